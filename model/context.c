#include "model/context.h"

#include <string.h>

#include "kernels/collectives.h"

/* For the exchange: rows of all ranks, each with the columns of one rank's heads, as `buffer` has them. */
static Tensor exchanged(const Model *m, Tensor buffer)
{
    return tensor_at(m->work.exchanged.data, buffer.format, buffer.rows, buffer.cols);
}

Tensor context_heads(const Model *m, const Acts *a, Tensor buffer, Tensor x)
{
    if (m->context == 1)
        return x;
    heads_split(exchanged(m, buffer), x, a->heads);
    comm_all_to_all(buffer, exchanged(m, buffer), m->attn.B, BY_RANK);
    return buffer;
}

Tensor context_buffer(const Model *m, Tensor buffer, Tensor x)
{
    return m->context == 1 ? x : buffer;
}

void context_tokens(const Model *m, const Acts *a, Tensor x, Tensor buffer)
{
    if (m->context == 1)
        return;
    comm_all_to_all(exchanged(m, buffer), buffer, m->attn.B, BY_ITEM);
    heads_join(x, exchanged(m, buffer), a->heads);
}

Attention context_attention(const Model *m, Attention a)
{
    a.T *= m->context;
    a.H /= m->context;
    a.K = a.K > m->context ? a.K / m->context : 1;
    return a;
}

const int *context_part(const Model *m, const int *values)
{
    const int first = m->tensor_place * m->N;
    if (m->context == 1)
        return values + first;
    const int own = m->attn.T;
    for (int b = 0; b < m->attn.B; b++)
        memcpy(m->host_part + (size_t)b * (size_t)own, values + (size_t)b * (size_t)m->T + (size_t)m->context_rank * (size_t)own,
               sizeof *values * (size_t)own);
    return m->host_part + first;
}
