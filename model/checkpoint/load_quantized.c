/* A matrix is copied to device memory in BF16 if all its tensors in the files are BF16, else in
 * F32, which has all values of F16. bitsandbytes' NF4 is copied unchanged if the base's format is
 * NF4. Otherwise codes and scales are decoded. */
#include "model/checkpoint/load_quantized.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "kernels/runtime/progress.h"
#include "kernels/runtime/watchdog_marks.h"
#include "model/store/param_store_sizes.h"
#include "model/store/quantized_weights.h"
#include "model/checkpoint/nf4_source.h"

typedef struct {
    Layout *l;
    ParamStore *store;
    SafeFile *const *files;
    int count;
    char *raw; /* safetensors_chunk bytes, as values */
    float *values;
} Reading;

static bool is_part(const Reading *r, const Piece *piece, int unit, const Param *p)
{
    return piece->unit == unit && &r->store->shape[unit].param[piece->param] == p;
}

static Format format_of(const Reading *r, int unit, const Param *p)
{
    bool exact = true;
    for (int i = 0; i < r->l->num_pieces; i++) {
        if (!is_part(r, &r->l->piece[i], unit, p))
            continue;
        const SafeTensor *t = layout_find(&r->l->piece[i], r->files, r->count).tensor;
        exact &= t && strcmp(t->dtype, "BF16") == 0;
    }
    return (Format){ exact ? BF16 : F32, 0, false };
}

static void check_finite(const Reading *r, Tensor part, const SafeFile *file, const char *name)
{
    int found = 0, *flag = (int *)r->store->square_sum;
    device_put(flag, &found, sizeof found);
    find_not_finite(flag, part, false);
    device_get(&found, flag, sizeof found);
    if (found)
        die("%s: tensor %s holds a value that is not finite, so this model is unusable. Get the "
            "file again, or use another model",
            file->path, name);
}

/* part: destination of piece i. All ranks of a stage's copy read the same bytes; only the first
 * one's checksum counts. */
static void read_tensor(const Reading *r, int i, Tensor part)
{
    const Piece *p = &r->l->piece[i];
    PieceReader reader = { p, r->files, r->count, layout_find(p, r->files, r->count), r->raw, 0 };
    const size_t size = dtype_size(part.format.dtype), all = tensor_numel(part),
                 chunk = safetensors_chunk / sizeof(float);
    for (size_t at = 0, n; at < all; at += n) {
        n = all - at < chunk ? all - at : chunk;
        layout_fetch(&reader, r->values, part.format.dtype == BF16 ? "BF16" : "F32", at, n);
        device_put((char *)part.data + at * size, r->values, n * size);
    }
    r->l->sum[i] = r->store->rank == 0 && r->store->tensor_rank == 0 ? reader.sum : 0;
    check_finite(r, part, reader.from.file, p->name);
}

/* Whether bitsandbytes stored the matrix in the base's format; dies if only some of its tensors
 * are. */
static bool is_quantized(const Reading *r, int unit, const Param *p)
{
    if (r->store->base_format != BASE_NF4)
        return false;
    const char *plain = NULL, *quantized = NULL;
    for (int i = 0; i < r->l->num_pieces; i++)
        if (is_part(r, &r->l->piece[i], unit, p))
            *(nf4_source_has(r->files, r->count, r->l->piece[i].name) ? &quantized : &plain) =
                r->l->piece[i].name;
    if (quantized && plain)
        die("%s%s: %s is stored in 4 bits and %s is not, but they are one matrix here: quantize "
            "both, or load the 16-bit folder",
            r->files[0]->path, r->count > 1 ? " and the files next to it" : "", quantized, plain);
    return quantized != NULL;
}

static void read_quantized(const Reading *r, int unit, const Param *p)
{
    const bool plain = r->store->shape->config->lora.plain_nf4;
    const Param whole = param_whole(p);
    char *groups = xmalloc(param_nf4_groups(&whole) * nf4_group_bytes(plain)), *next = groups;
    for (int i = 0; i < r->l->num_pieces; i++) {
        const Piece *piece = &r->l->piece[i];
        if (!is_part(r, piece, unit, p))
            continue;
        const size_t n = nf4_groups(piece->shape[0], piece->shape[1]);
        watchdog_mark("reading a base in NF4", -1);
        if (plain)
            nf4_source_read_plain((Nf4PlainGroup *)next, r->files, r->count, piece->name,
                                  piece->shape[0], piece->shape[1], 0, n);
        else
            nf4_source_read((Nf4Group *)next, r->files, r->count, piece->name, piece->shape[0],
                            piece->shape[1], 0, n);
        next += n * nf4_group_bytes(plain);
    }
    quantized_store_nf4(r->store, unit, p, groups);
    free(groups);
}

/* memory: device memory for the matrix in its format. */
static void read_matrix(const Reading *r, int unit, const Param *p, void *memory)
{
    if (is_quantized(r, unit, p)) {
        read_quantized(r, unit, p);
        return;
    }
    const Param all = param_whole(p);
    const Tensor whole = tensor_at(memory, format_of(r, unit, p), all.rows, all.cols);
    for (int i = 0; i < r->l->num_pieces; i++) {
        const Piece *piece = &r->l->piece[i];
        if (is_part(r, piece, unit, p))
            read_tensor(r, i,
                        tensor_rows(whole, (int)(piece->in_whole / (size_t)all.cols),
                                    (int)piece->shape[0]));
    }
    quantized_store(r->store, unit, p, whole);
}

static size_t largest_matrix(const Reading *r)
{
    size_t most = 0;
    for (int u = 0; u < r->store->num_units; u++)
        for (int i = 0; i < r->store->shape[u].num_params; i++) {
            const Param *p = &r->store->shape[u].param[i], whole = param_whole(p);
            const size_t bytes = p->region != QUANTIZED || is_quantized(r, u, p)
                                     ? 0
                                     : param_numel(&whole) * dtype_size(format_of(r, u, p).dtype);
            most = bytes > most ? bytes : most;
        }
    return most;
}

void load_quantized(Layout *l, ParamStore *store, SafeFile *const *files, int count)
{
    Reading r = { l, store, files, count, NULL, NULL };
    void *memory = device_alloc(largest_matrix(&r));
    r.raw = xmalloc(safetensors_chunk);
    r.values = xmalloc(safetensors_chunk);
    progress_begin("loading");
    for (int u = 0; u < store->num_units; u++)
        for (int i = 0; i < store->shape[u].num_params; i++)
            if (store->shape[u].param[i].region == QUANTIZED && store_holds(store, u)) {
                progress_show((double)u / store->num_units, store->shape[u].param[i].name);
                read_matrix(&r, u, &store->shape[u].param[i], memory);
            }
    progress_end();
    device_sync();
    device_free(memory);
    free(r.raw);
    free(r.values);
}
