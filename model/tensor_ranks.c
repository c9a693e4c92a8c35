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
    return m->tensor_ranks > 1 && format_is_fp8(t.format) ? m->work.gathered : t;
}

Tensor gather_rows(const Model *m, Tensor buffer, Tensor x)
{
    if (m->tensor_ranks == 1)
        return x;
    comm_all_gather(buffer.data, x.data, tensor_bytes(x), RANKS_TENSOR);
    return buffer;
}

void encode_rows(const Model *m, Tensor t, Tensor buffer)
{
    if (m->tensor_ranks > 1)
        quantize(t, gather_rows(m, buffer, own_rows(m, buffer)));
}

void encode_rows_codes(const Model *m, Tensor t, Tensor buffer)
{
    if (m->tensor_ranks == 1)
        return;
    gather_rows(m, buffer, own_rows(m, buffer));
    if (format_is_fp8(t.format))
        quantize_codes(t, buffer);
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
