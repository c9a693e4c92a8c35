/* Stores frozen matrices in E4M3 or NF4. */
#include "model/store/quantized_weights.h"

#include <stdlib.h>

#include "kernels/kernels.h"
#include "kernels/runtime/error.h"
#include "model/shape/units.h"
#include "model/store/param_store_sizes.h"

static void store_e4m3(ParamStore *store, int u, const Param *p, Tensor whole)
{
    size_t first, n = shard_part(&store->shard[u], p, &first);
    Tensor part = shard_weights(&store->shard[u], p, first, n);
    part.scale = quantized_scale(store, p);
    quantize_scale(part, whole);
    for (size_t done = 0, run, at; done < n; done += run) {
        run = param_run(p, first + done, &at);
        run = run < n - done ? run : n - done;
        const Tensor from = tensor_at((char *)whole.data + at * dtype_size(whole.format.dtype),
                                      whole.format, 1, (int)run);
        Tensor to = shard_weights(&store->shard[u], p, first + done, run);
        to.scale = part.scale;
        quantize_codes(to, from);
    }
}

/* Whether NF4 groups of whole matrices have no double quantization (Nf4PlainGroup). */
static bool is_plain(const ParamStore *store)
{
    return store->shape->config->lora.plain_nf4;
}

static size_t whole_bytes(const ParamStore *store, const Param *p)
{
    const Param whole = param_whole(p);
    return param_nf4_groups(&whole) * nf4_group_bytes(is_plain(store));
}

/* Copies the blocks of a part from the groups of the whole matrix; both are in host memory. */
static void cut_groups(Nf4PlainGroup *to, const Param *p, Nf4 from)
{
    enum { BLOCKS = NF4_GROUP / NF4_BLOCK };
    const Param whole = param_whole(p);
    const size_t cols = (size_t)p->cols, all_cols = (size_t)whole.cols;
    size_t group = 0, from_group = 0;
    for (int i = 0; i < p->num_projections; i++) {
        const Projection projection = p->projection[i], all = whole.projection[i];
        for (size_t block = 0, at; block < (size_t)projection.rows * cols / NF4_BLOCK; block++) {
            param_run(p, (size_t)projection.first * cols + block * NF4_BLOCK, &at);
            at = (at - (size_t)all.first * all_cols) / NF4_BLOCK;
            nf4_copy_block(to, group * BLOCKS + block, from, from_group * BLOCKS + at);
        }
        group += nf4_groups((size_t)projection.rows, cols);
        from_group += nf4_groups((size_t)all.rows, all_cols);
    }
}

/* Stores this rank's part of the groups of a whole matrix. */
static void keep_part(ParamStore *store, int u, const Param *p, const char *groups)
{
    size_t first, n = shard_part(&store->shard[u], p, &first);
    char *to = n > 0 ? shard_weights(&store->shard[u], p, first, n).data : NULL;
    if (n > 0 && p->tensor_ranks == 1)
        device_copy(to, groups + first, n);
    else if (n > 0) {
        const Param whole = param_whole(p);
        char *host = xmalloc(whole_bytes(store, p)), *part = xcalloc(p->stored, 1);
        device_get(host, groups, whole_bytes(store, p));
        cut_groups((Nf4PlainGroup *)part, p, param_nf4(&whole, host, is_plain(store)));
        device_put(to, part + first, n);
        free(host);
        free(part);
    }
}

/* Stores this rank's part of the groups of a whole matrix, and the operand's scale, which is the
 * scale of the whole matrix. */
static void keep_groups(ParamStore *store, int u, const Param *p, const char *groups)
{
    const Param whole = param_whole(p);
    const Tensor operand = param_tensor(&store->unit[u], p);
    keep_part(store, u, p, groups);
    if (!format_is_fp8(operand.format))
        return;
    device_zero(store->square_sum, sizeof *store->square_sum);
    nf4_amax(store->square_sum, param_nf4(&whole, groups, is_plain(store)), whole.cols, 0,
             param_nf4_groups(&whole));
    quantize_scale_from(operand, store->square_sum);
}

static void store_nf4(ParamStore *store, int u, const Param *p, Tensor whole)
{
    const Param all = param_whole(p);
    char *groups = device_alloc(whole_bytes(store, p)), *next = groups;
    for (int i = 0; i < p->num_projections; i++) {
        const Tensor projection =
            tensor_rows(whole, all.projection[i].first, all.projection[i].rows);
        const size_t n = nf4_groups((size_t)projection.rows, (size_t)projection.cols);
        if (is_plain(store))
            nf4_quantize_plain((Nf4PlainGroup *)next, projection, 0, n);
        else {
            nf4_offset(store->square_sum, projection);
            nf4_quantize((Nf4Group *)next, projection, store->square_sum, 0, n);
        }
        next += n * nf4_group_bytes(is_plain(store));
    }
    keep_groups(store, u, p, groups);
    device_free(groups);
}

void quantized_store(ParamStore *store, int u, const Param *p, Tensor whole)
{
    CHECK(p->region == QUANTIZED, "%s is not in region QUANTIZED", p->name);
    if (store->base_format == BASE_NF4)
        store_nf4(store, u, p, whole);
    else
        store_e4m3(store, u, p, whole);
}

void quantized_store_nf4(ParamStore *store, int u, const Param *p, const void *host)
{
    char *groups = device_alloc(whole_bytes(store, p));
    device_put(groups, host, whole_bytes(store, p));
    keep_groups(store, u, p, groups);
    device_free(groups);
}

void frozen_round(ParamStore *store)
{
    for (int u = 0; u < store->num_units; u++) {
        if (store->shape[u].kind->is_projector && lora_trains_projector(store->shape[u].config))
            continue; /* this projector is stored with the adapters */
        for (int i = 0; i < store->shape[u].num_params; i++) {
            const Param *p = &store->shape[u].param[i];
            size_t first, n = shard_part(&store->shard[u], p, &first);
            if (p->region != FROZEN || p->is_adapter || n == 0)
                continue;
            const Tensor part = shard_weights(&store->shard[u], p, first, n);
            const Tensor rounded = tensor_at(device_alloc(n * dtype_size(BF16)),
                                             (Format){ BF16, 0, false }, 1, (int)n);
            quantize_codes(rounded, part);
            quantize_codes(part, rounded);
            device_free(rounded.data);
        }
    }
}
