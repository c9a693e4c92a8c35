/* A matrix is copied to device memory in BF16 if all its tensors in the files are BF16, else in
 * F32, which has all values of F16. If the base's format is NF4, NF4 of bitsandbytes is copied
 * unchanged. All other codes and scales are decoded. */
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
    char *raw; /* raw and values: buffers of safetensors_chunk bytes each */
    float *values;
} Reading;

/* The tensors of a matrix, which are consecutive: entries first .. end - 1. */
typedef struct {
    int unit, first, end;
    const Param *p;
} Matrix;

/* Advances to the next matrix of the region; returns false if there is none. Start with { 0 }. */
static bool next_matrix(const Reading *r, Matrix *m)
{
    const LayoutEntry *all = r->l->entry, *end = all + r->l->num_entries, *p = all + m->end;
    while (p < end && p->region != QUANTIZED)
        p++;
    if (p == end)
        return false;
    m->first = m->end = (int)(p - all);
    while (all + m->end < end && all[m->end].unit == p->unit && all[m->end].param == p->param)
        m->end++;
    m->unit = p->unit;
    m->p = &r->store->shape[p->unit].param[p->param];
    return true;
}

static Format format_of(const Reading *r, const Matrix *m)
{
    bool exact = true;
    for (int i = m->first; i < m->end; i++) {
        const SafeTensor *t = layout_find(&r->l->entry[i], r->files, r->count).tensor;
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

/* part: destination of entry i. All ranks of a stage's copy read the same bytes; only the first of
 * these ranks adds to the checksum. */
static void read_tensor(const Reading *r, int i, Tensor part)
{
    const LayoutEntry *p = &r->l->entry[i];
    EntryReader reader = { p, r->files, r->count, layout_find(p, r->files, r->count), r->raw, 0 };
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

/* Whether bitsandbytes stored the matrix in the base's format. Dies if it stored only some of the
 * matrix's tensors in this format. */
static bool is_quantized(const Reading *r, const Matrix *m)
{
    if (r->store->base_format != BASE_NF4)
        return false;
    const char *plain = NULL, *quantized = NULL;
    for (int i = m->first; i < m->end; i++)
        *(nf4_source_has(r->files, r->count, r->l->entry[i].name) ? &quantized : &plain) =
            r->l->entry[i].name;
    if (quantized && plain)
        die("%s%s: %s is stored in 4 bits and %s is not, but they are one matrix here: quantize "
            "both, or load the 16-bit folder",
            r->files[0]->path, r->count > 1 ? " and the files next to it" : "", quantized, plain);
    return quantized != NULL;
}

static void read_quantized(const Reading *r, const Matrix *m)
{
    const bool plain = r->store->shape->config->lora.plain_nf4;
    const Param whole = param_whole(m->p);
    char *groups = xmalloc(param_nf4_groups(&whole) * nf4_group_bytes(plain)), *next = groups;
    for (const LayoutEntry *entry = &r->l->entry[m->first]; entry < &r->l->entry[m->end]; entry++) {
        const size_t n = nf4_groups(entry->shape[0], entry->shape[1]);
        watchdog_mark("reading a base in NF4", -1);
        if (plain)
            nf4_source_read_plain((Nf4PlainGroup *)next, r->files, r->count, entry->name,
                                  entry->shape[0], entry->shape[1], 0, n);
        else
            nf4_source_read((Nf4Group *)next, r->files, r->count, entry->name, entry->shape[0],
                            entry->shape[1], 0, n);
        next += n * nf4_group_bytes(plain);
    }
    quantized_store_nf4(r->store, m->unit, m->p, groups);
    free(groups);
}

/* memory: device memory for a whole matrix in BF16 or F32. */
static void read_matrix(const Reading *r, const Matrix *m, void *memory)
{
    if (is_quantized(r, m)) {
        read_quantized(r, m);
        return;
    }
    const Param all = param_whole(m->p);
    const Tensor whole = tensor_at(memory, format_of(r, m), all.rows, all.cols);
    for (int i = m->first; i < m->end; i++)
        read_tensor(r, i,
                    tensor_rows(whole, (int)(r->l->entry[i].in_whole / (size_t)all.cols),
                                (int)r->l->entry[i].shape[0]));
    quantized_store(r->store, m->unit, m->p, whole);
}

static size_t largest_matrix(const Reading *r)
{
    size_t most = 0;
    for (Matrix m = { 0 }; next_matrix(r, &m);) {
        const Param whole = param_whole(m.p);
        const size_t bytes =
            is_quantized(r, &m) ? 0 : param_numel(&whole) * dtype_size(format_of(r, &m).dtype);
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
    for (Matrix m = { 0 }; next_matrix(&r, &m);)
        if (store_holds(store, m.unit)) {
            progress_show((double)m.unit / store->num_units, m.p->name);
            read_matrix(&r, &m, memory);
        }
    progress_end();
    device_sync();
    device_free(memory);
    free(r.raw);
    free(r.values);
}
