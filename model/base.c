/* How frozen matrices are stored, gathered and made into operands. */
#include "model/base.h"

#include "kernels/comm.h"
#include "kernels/error.h"
#include "kernels/kernels.h"
#include "kernels/watchdog.h"

/* ---- storing ---------------------------------------------------------------------------------------------- */

/* Elements of the region that this rank has of a parameter: from *first on, counted in what is stored of it. */
static size_t stored_part(const Fsdp *f, int u, const Param *p, size_t *first)
{
    const Shard *s = &f->shard[u];
    const size_t numel = f->base == BASE_NF4 ? nf4_param_groups(f->shape[u].config, p) * NF4_GROUP : param_numel(p);
    const size_t from = p->offset > s->base_first ? p->offset : s->base_first;
    const size_t end = s->base_first + s->base_count, to = p->offset + numel < end ? p->offset + numel : end;
    *first = from - p->offset;
    return from < to ? to - from : 0;
}

static char *stored_at(const Fsdp *f, int u, const Param *p, size_t first)
{
    return (char *)f->shard[u].base + base_bytes(f, p->offset + first - f->shard[u].base_first);
}

static void store_e4m3(Fsdp *f, int u, const Param *p, Tensor whole)
{
    Tensor part = { .format = { E4M3, 0, false }, .scale = base_scale(f, u, p), .rows = 1 };
    size_t first, n = stored_part(f, u, p, &first);
    quantize_scale(part, whole);
    if (n == 0)
        return;
    part.data = stored_at(f, u, p, first);
    part.cols = (int)n;
    whole.data = (char *)whole.data + first * dtype_size(whole.format.dtype);
    whole.rows = 1;
    whole.cols = (int)n;
    quantize_codes(part, whole);
}

static Nf4 nf4_of(const Fsdp *f, int u, const Param *p, const void *groups)
{
    Nf4 x = { .group = f->plain_nf4 ? NULL : groups, .plain = f->plain_nf4 ? groups : NULL };
    x.num_parts = linear_parts(x.rows, f->shape[u].config, p->linear);
    return x;
}

/* All groups of a parameter, of which this rank keeps its own, and the scale that its operand will have. */
static void keep_groups(Fsdp *f, int u, const Param *p, const char *groups)
{
    const Tensor operand = f->unit[u].tensor[p->id];
    size_t first, n = stored_part(f, u, p, &first);
    if (n > 0)
        device_copy(stored_at(f, u, p, first), groups + base_bytes(f, first), base_bytes(f, n));
    if (!format_is_fp8(operand.format))
        return;
    device_zero(f->square_sum, sizeof *f->square_sum);
    nf4_amax(f->square_sum, nf4_of(f, u, p, groups), p->cols, 0, nf4_param_groups(f->shape[u].config, p));
    quantize_scale_from(operand, f->square_sum);
}

static void store_nf4(Fsdp *f, int u, const Param *p, Tensor whole)
{
    const ModelConfig *c = f->shape[u].config;
    char *groups = device_alloc(base_bytes(f, nf4_param_groups(c, p) * NF4_GROUP)), *next = groups;
    int rows[LINEAR_PARTS], count = linear_parts(rows, c, p->linear);
    for (int i = 0, first = 0; i < count; first += rows[i++]) {
        const Tensor part = tensor_rows(whole, first, rows[i]);
        const size_t n = nf4_groups((size_t)rows[i], (size_t)p->cols);
        if (f->plain_nf4)
            nf4_quantize_plain((Nf4PlainGroup *)next, part, 0, n);
        else {
            nf4_offset(f->square_sum, part);
            nf4_quantize((Nf4Group *)next, part, f->square_sum, 0, n);
        }
        next += base_bytes(f, n * NF4_GROUP);
    }
    keep_groups(f, u, p, groups);
    device_free(groups);
}

void base_store(Fsdp *f, int u, const Param *p, Tensor whole)
{
    CHECK(p->region == BASE, "%s is not stored as lora.base says", p->name);
    if (f->base == BASE_NF4)
        store_nf4(f, u, p, whole);
    else
        store_e4m3(f, u, p, whole);
}

void base_store_nf4(Fsdp *f, int u, const Param *p, const void *host)
{
    const size_t bytes = base_bytes(f, nf4_param_groups(f->shape[u].config, p) * NF4_GROUP);
    char *groups = device_alloc(bytes);
    device_put(groups, host, bytes);
    keep_groups(f, u, p, groups);
    device_free(groups);
}

/* ---- using ------------------------------------------------------------------------------------------------ */

/* Where the whole region stands as it is stored: gathered, or this rank's. */
static char *whole_region(const Fsdp *f, int u, const WeightBuffer *b)
{
    size_t at;
    if (f->shards == 1)
        return f->shard[u].base;
    region_in_buffer(f, u, BASE, &at);
    return base_is_operand(f) ? (char *)b->flat.data + at : b->raw;
}

void base_gather(Fsdp *f, int u, WeightBuffer *b)
{
    if (f->shards == 1 || f->shape[u].numel[BASE] == 0)
        return;
    watchdog_mark_together("all-gather", u);
    comm_all_gather(whole_region(f, u, b), f->shard[u].base, base_bytes(f, f->shard[u].base_count));
}

/* y: the matrix's operand, of which data or data_t is written. */
static void make_operand(const Fsdp *f, int u, const Param *p, Tensor y, char *region)
{
    char *stored = region + base_bytes(f, p->offset);
    if (f->base == BASE_NF4) {
        nf4_dequantize(y, nf4_of(f, u, p, stored));
        return;
    }
    const Tensor codes = { .data = stored, .scale = base_scale(f, u, p), .format = { E4M3, 0, false }, .rows = p->rows,
                           .cols = p->cols };
    if (!format_is_fp8(y.format))
        quantize(y, codes);
    else if (y.data_t) {
        y.data = NULL;                  /* forward's operand is what is stored */
        quantize_codes(y, codes);
    }
}

void base_operands(Fsdp *f, int u, WeightBuffer *b, int uses)
{
    char *region = whole_region(f, u, b);
    for (int i = 0; i < f->shape[u].num_params; i++) {
        const Param *p = &f->shape[u].param[i];
        Tensor y = f->unit[u].tensor[p->id];
        if (p->region != BASE)
            continue;
        if (!(uses & FOR_FORWARD) && format_is_fp8(y.format))
            y.data = NULL;
        if (!(uses & FOR_BACKWARD))
            y.data_t = NULL;
        make_operand(f, u, p, y, region);
    }
}
