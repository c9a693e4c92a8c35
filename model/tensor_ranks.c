#include "model/tensor_ranks.h"

#include "kernels/runtime/error.h"

ModelConfig *tensor_config(const ModelConfig *c, int ranks)
{
    ModelConfig *own = xmalloc(sizeof *own);
    *own = *c;
    own->n_heads /= ranks;
    own->n_kv_heads /= ranks;
    own->mlp_width /= ranks;
    return own;
}

Tensor own_rows(const Model *m, Tensor t)
{
    return m->tensor_ranks == 1 ? t : tensor_rows(t, m->tensor_place * m->N, m->N);
}

Tensor rows_buffer(const Model *m, Tensor t)
{
    return m->tensor_ranks > 1 && format_is_fp8(t.format) ? m->work.own : own_rows(m, t);
}

static void share_maximum(float *x)
{
    if (x)
        comm_all_reduce_max(tensor_at(x, (Format){ F32, 0, false }, 1, 1), RANKS_TENSOR);
}

/* This rank's rows of t are there, in place: those of all ranks, and then their transpose if `wanted` has one. */
static void gather(const Model *m, Tensor t, Tensor wanted)
{
    const Tensor own = own_rows(m, t);
    comm_all_gather(t.data, own.data, tensor_numel(own) * dtype_size(own.format.dtype), RANKS_TENSOR);
    t.data_t = wanted.data = NULL;
    if (wanted.data_t)
        quantize_codes(wanted, t);
}

void gather_rows(const Model *m, Tensor t, Tensor x)
{
    const Tensor own = own_rows(m, t);
    if (format_equal(t.format, x.format)) {
        comm_all_gather(t.data, x.data, tensor_bytes(x), RANKS_TENSOR);
        return;
    }
    if (!format_is_fp8(t.format)) {         /* an operand in BF16 of a stream in F32 */
        quantize(own, x);
        gather(m, t, t);
        return;
    }
    /* A scale grows with its range, and both with the maximum that they are made from: the largest are those of all tokens. */
    quantize_scale(own, x);
    share_maximum(t.scale);
    share_maximum(t.scale_amax);
    quantize_codes(own, x);
    gather(m, t, t);
}

void complete_rows(const Model *m, Tensor t, Tensor x)
{
    if (m->tensor_ranks > 1)
        gather_rows(m, t, x);
}

Tensor rows_again(const Model *m, Tensor t, Tensor again)
{
    return m->tensor_ranks == 1 ? again : own_rows(m, t);
}

void complete_again(const Model *m, Tensor t, Tensor again)
{
    if (m->tensor_ranks > 1)
        gather(m, t, again);
}

Tensor sums_buffer(const Model *m, Tensor y)
{
    return m->tensor_ranks == 1 ? y : m->work.partial;
}

Tensor sum_rows(const Model *m, Tensor buffer)
{
    if (m->tensor_ranks > 1)
        comm_reduce_scatter(own_rows(m, buffer), buffer, RANKS_TENSOR);
    return own_rows(m, buffer);
}

void add_rows(const Model *m, Tensor y, Tensor x, Tensor buffer)
{
    if (y.data == x.data)
        accumulate(y, sum_rows(m, buffer));
    else {
        comm_reduce_scatter(y, buffer, RANKS_TENSOR);
        accumulate(y, x);
    }
}
