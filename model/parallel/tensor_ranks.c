#include "model/parallel/tensor_ranks.h"

#include <stdlib.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/trace.h"

void tensor_open(Model *m)
{
    ModelConfig *own = xmalloc(sizeof *own);
    *own = *m->config;
    own->n_heads /= m->tensor_ranks;
    own->n_kv_heads /= m->tensor_ranks;
    own->mlp_width /= m->tensor_ranks;
    m->config = m->own_config = own;
    m->exchanges = xcalloc(1, sizeof *m->exchanges);
}

void tensor_close(Model *m)
{
    tensor_unmark(m);
    free(m->exchanges);
    free(m->own_config);
}

Tensor own_rows(const Model *m, Tensor t)
{
    return row_parts(m) == 1 ? t : tensor_rows(t, m->tensor_rank * m->N, m->N);
}

Tensor rows_buffer(const Model *m, Tensor t)
{
    return row_parts(m) > 1 && format_is_fp8(t.format) ? m->work.own : own_rows(m, t);
}

/* The scale of t becomes that of all ranks' tokens. A scale grows with the maximum that it is made
 * from, and this with the maximum that was seen: the largest are those of all tokens. */
static void share_scale(Tensor t)
{
    float *const x = t.scale_amax ? t.scale_amax : t.scale;
    comm_all_reduce_max(tensor_at(x, (Format){ F32, 0, false }, 1, 1), RANKS_TENSOR);
    if (t.scale_amax)
        quantize_scale_from(t, t.scale_amax);
}

/* Begins an exchange: the queue of exchanges continues after all that is queued. */
static void begin(const Model *m)
{
    m->exchanges->ready = device_follow(QUEUE_TENSOR, m->exchanges->ready);
}

static void end(const Model *m, Exchange e)
{
    m->exchanges->done[e] = device_mark(m->exchanges->done[e]);
    device_queue(QUEUE_COMPUTE);
}

static void wait_for(const Model *m, Exchange e)
{
    trace_wait(m->exchanges->done[e], "tensor ranks", -1);
}

void tensor_unmark(Model *m)
{
    Exchanges *x = m->exchanges;
    if (!x)
        return;
    device_unmark(x->ready);
    for (Exchange e = 0; e < NUM_EXCHANGES; e++)
        device_unmark(x->done[e]);
    *x = (Exchanges){ 0 };
}

static void gather(const Model *m, Tensor t)
{
    const Tensor own = own_rows(m, t);
    comm_all_gather(t.data, own.data, tensor_numel(own) * dtype_size(own.format.dtype),
                    RANKS_TENSOR);
}

/* The rows of all ranks are there; their transpose, if t has one, is made of them. */
static void transpose(Tensor t, Tensor rows)
{
    t.data = rows.data_t = NULL;
    if (t.data_t)
        quantize_codes(t, rows);
}

void gather_rows_begin(const Model *m, Tensor t, Tensor x)
{
    const Tensor own = own_rows(m, t);
    const bool encodes = !format_equal(t.format, x.format), fp8 = format_is_fp8(t.format);
    if (row_parts(m) == 1) {
        quantize(t, x);
        return;
    }
    /* not on the queue of exchanges: it needs scratch memory */
    if (fp8)
        quantize_scale(own, x);
    else if (encodes) /* an operand in BF16 of a stream in F32 */
        quantize(own, x);
    else if (x.data != own.data)
        device_copy(own.data, x.data, tensor_bytes(x));
    begin(m);
    if (fp8) {
        share_scale(own);
        quantize_codes(own, x);
    }
    gather(m, t);
    end(m, EXCHANGE_ROWS);
}

void gather_rows_end(const Model *m, Tensor t)
{
    if (row_parts(m) == 1)
        return;
    wait_for(m, EXCHANGE_ROWS);
    transpose(t, t);
}

void gather_again(const Model *m, Tensor t)
{
    begin(m);
    gather(m, t);
    end(m, EXCHANGE_AGAIN);
}

void complete_again(const Model *m, Tensor t, Tensor wanted)
{
    wait_for(m, EXCHANGE_AGAIN);
    transpose(wanted, t);
}

Tensor sums_buffer(const Model *m, Tensor y)
{
    return m->tensor_ranks == 1 ? y : tensor_rows(m->work.partial, 0, y.rows * row_parts(m));
}

Tensor sum_rows(const Model *m, Tensor buffer)
{
    if (row_parts(m) > 1)
        comm_reduce_scatter(own_rows(m, buffer), buffer, RANKS_TENSOR);
    else if (m->tensor_ranks > 1)
        comm_all_reduce(buffer, RANKS_TENSOR);
    return own_rows(m, buffer);
}

void sum_rows_begin(const Model *m, Tensor buffer)
{
    begin(m);
    sum_rows(m, buffer);
    end(m, EXCHANGE_SUMS);
}

Tensor sum_rows_end(const Model *m, Tensor buffer)
{
    wait_for(m, EXCHANGE_SUMS);
    return own_rows(m, buffer);
}

void add_rows(const Model *m, Tensor y, Tensor x, Tensor buffer)
{
    if (y.data == x.data)
        accumulate(y, sum_rows(m, buffer));
    else {
        if (row_parts(m) > 1)
            comm_reduce_scatter(y, buffer, RANKS_TENSOR);
        else
            quantize(y, sum_rows(m, buffer));
        accumulate(y, x);
    }
}
