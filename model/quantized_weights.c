/* Stores frozen matrices in E4M3 or NF4. */
#include "model/quantized_weights.h"

#include "kernels/kernels.h"
#include "kernels/runtime/error.h"
#include "model/units.h"

static void store_e4m3(ParamStore *f, int u, const Param *p, Tensor whole)
{
    size_t first, n = shard_part(&f->shard[u], p, &first);
    Tensor part = shard_weights(&f->shard[u], p, first, n);
    part.scale = quantized_scale(f, u, p);
    quantize_scale(part, whole);
    if (n == 0)
        return;
    whole.data = (char *)whole.data + first * dtype_size(whole.format.dtype);
    whole.rows = 1;
    whole.cols = (int)n;
    quantize_codes(part, whole);
}

/* Stores this rank's part of a parameter's groups, and the scale of its operand. */
static void keep_groups(ParamStore *f, int u, const Param *p, const char *groups)
{
    const Tensor operand = f->unit[u].tensor[p->id];
    size_t first, n = shard_part(&f->shard[u], p, &first);
    if (n > 0)
        device_copy(shard_weights(&f->shard[u], p, first, n).data, groups + first, n);
    if (!format_is_fp8(operand.format))
        return;
    device_zero(f->square_sum, sizeof *f->square_sum);
    nf4_amax(f->square_sum, param_nf4(p, groups, f->plain_nf4), p->cols, 0, param_nf4_groups(p));
    quantize_scale_from(operand, f->square_sum);
}

static void store_nf4(ParamStore *f, int u, const Param *p, Tensor whole)
{
    char *groups = device_alloc(p->stored), *next = groups;
    for (int i = 0; i < p->num_parts; i++) {
        const Tensor part = tensor_rows(whole, p->part[i].first, p->part[i].rows);
        const size_t n = nf4_groups((size_t)part.rows, (size_t)part.cols);
        if (f->plain_nf4)
            nf4_quantize_plain((Nf4PlainGroup *)next, part, 0, n);
        else {
            nf4_offset(f->square_sum, part);
            nf4_quantize((Nf4Group *)next, part, f->square_sum, 0, n);
        }
        next += n * nf4_group_bytes(f->plain_nf4);
    }
    keep_groups(f, u, p, groups);
    device_free(groups);
}

void quantized_store(ParamStore *f, int u, const Param *p, Tensor whole)
{
    CHECK(p->region == QUANTIZED, "%s is not in region QUANTIZED", p->name);
    if (f->base_format == BASE_NF4)
        store_nf4(f, u, p, whole);
    else
        store_e4m3(f, u, p, whole);
}

void quantized_store_nf4(ParamStore *f, int u, const Param *p, const void *host)
{
    char *groups = device_alloc(p->stored);
    device_put(groups, host, p->stored);
    keep_groups(f, u, p, groups);
    device_free(groups);
}

void frozen_round(ParamStore *f)
{
    for (int u = 0; u < f->num_units; u++) {
        if (f->shape[u].kind == &projector_kind && lora_trains_projector(f->shape[u].config))
            continue;                   /* stored with the adapters */
        for (int i = 0; i < f->shape[u].num_params; i++) {
            const Param *p = &f->shape[u].param[i];
            size_t first, n = shard_part(&f->shard[u], p, &first);
            if (p->region != FROZEN || p->is_adapter || n == 0)
                continue;
            const Tensor part = shard_weights(&f->shard[u], p, first, n);
            const Tensor rounded = tensor_at(device_alloc(n * dtype_size(BF16)), (Format){ BF16, 0, false }, 1, (int)n);
            quantize_codes(rounded, part);
            quantize_codes(part, rounded);
            device_free(rounded.data);
        }
    }
}
