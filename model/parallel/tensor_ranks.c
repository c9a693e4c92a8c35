#include "model/parallel/tensor_ranks.h"

#include <stdlib.h>

#include "kernels/runtime/error.h"

void tp_open(Stream *stream)
{
    ModelConfig *own = xmalloc(sizeof *own);
    *own = *stream->config;
    own->n_heads /= stream->tensor_ranks;
    own->n_kv_heads /= stream->tensor_ranks;
    own->mlp_width /= stream->tensor_ranks;
    stream->config = stream->own_config = own;
    stream->exchanges = xcalloc(NUM_EXCHANGES, sizeof *stream->exchanges);
}

void tp_close(Stream *stream)
{
    tp_unmark(stream);
    free(stream->exchanges);
    free(stream->own_config);
}

Tensor own_rows(const Stream *stream, Tensor t)
{
    return row_parts(stream) == 1 ? t : tensor_rows(t, stream->tensor_rank * stream->N, stream->N);
}

Tensor rows_buffer(const Stream *stream, Tensor t)
{
    return row_parts(stream) > 1 && format_is_fp8(t.format) ? stream->work.own
                                                            : own_rows(stream, t);
}

/* Sets the scale of t to the scale for the tokens of all ranks. A rank's scale, and its scale_amax,
 * grow with the largest value among its tokens. So the scale_amax (or else the scale) for all
 * tokens is the maximum over ranks. */
static void share_scale(Tensor t)
{
    float *const x = t.scale_amax ? t.scale_amax : t.scale;
    comm_all_reduce_max(tensor_at(x, (Format){ F32, 0, false }, 1, 1), RANKS_TENSOR);
    if (t.scale_amax)
        quantize_scale_from(t, t.scale_amax);
}

void tp_unmark(Stream *stream)
{
    for (Exchange e = 0; stream->exchanges && e < NUM_EXCHANGES; e++)
        transfer_free(&stream->exchanges[e]);
}

static void gather(const Stream *stream, Tensor t)
{
    const Tensor own = own_rows(stream, t);
    comm_all_gather(t.data, own.data, tensor_numel(own) * dtype_size(own.format.dtype),
                    RANKS_TENSOR);
}

/* Waits for the rows of all ranks. If t has a transpose, computes it from these rows. */
static void transpose(Tensor t, Tensor rows)
{
    t.data = rows.data_t = NULL;
    if (t.data_t)
        quantize_codes(t, rows);
}

void gather_rows_begin(const Stream *stream, Tensor t, Tensor x)
{
    const Tensor own = own_rows(stream, t);
    const bool encodes = !format_equal(t.format, x.format), fp8 = format_is_fp8(t.format);
    if (row_parts(stream) == 1) {
        quantize(t, x);
        return;
    }
    /* not on the queue of exchanges, because it needs scratch memory */
    if (fp8)
        quantize_scale(own, x);
    else if (encodes) /* the operand is BF16 and the stream F32 */
        quantize(own, x);
    else if (x.data != own.data)
        device_copy(own.data, x.data, tensor_bytes(x));
    transfer_begin(&stream->exchanges[EXCHANGE_ROWS], QUEUE_TENSOR);
    if (fp8) {
        share_scale(own);
        quantize_codes(own, x);
    }
    gather(stream, t);
    transfer_end(&stream->exchanges[EXCHANGE_ROWS]);
}

void gather_rows_end(const Stream *stream, Tensor t)
{
    if (row_parts(stream) == 1)
        return;
    transfer_wait(&stream->exchanges[EXCHANGE_ROWS], "tensor ranks", -1);
    transpose(t, t);
}

void gather_again(const Stream *stream, Tensor t)
{
    transfer_begin(&stream->exchanges[EXCHANGE_AGAIN], QUEUE_TENSOR);
    gather(stream, t);
    transfer_end(&stream->exchanges[EXCHANGE_AGAIN]);
}

void complete_again(const Stream *stream, Tensor t, Tensor wanted)
{
    transfer_wait(&stream->exchanges[EXCHANGE_AGAIN], "tensor ranks", -1);
    transpose(wanted, t);
}

Tensor sums_buffer(const Stream *stream, Tensor y)
{
    return stream->tensor_ranks == 1
               ? y
               : tensor_rows(stream->work.partial, 0, y.rows * row_parts(stream));
}

Tensor sum_rows(const Stream *stream, Tensor buffer)
{
    if (row_parts(stream) > 1)
        comm_reduce_scatter(own_rows(stream, buffer), buffer, RANKS_TENSOR);
    else if (stream->tensor_ranks > 1)
        comm_all_reduce(buffer, RANKS_TENSOR);
    return own_rows(stream, buffer);
}

void sum_rows_begin(const Stream *stream, Tensor buffer)
{
    transfer_begin(&stream->exchanges[EXCHANGE_SUMS], QUEUE_TENSOR);
    sum_rows(stream, buffer);
    transfer_end(&stream->exchanges[EXCHANGE_SUMS]);
}

Tensor sum_rows_end(const Stream *stream, Tensor buffer)
{
    transfer_wait(&stream->exchanges[EXCHANGE_SUMS], "tensor ranks", -1);
    return own_rows(stream, buffer);
}

void add_rows(const Stream *stream, Tensor y, Tensor x, Tensor buffer)
{
    if (y.data == x.data)
        accumulate(y, sum_rows(stream, buffer));
    else {
        if (row_parts(stream) > 1)
            comm_reduce_scatter(y, buffer, RANKS_TENSOR);
        else
            quantize(y, sum_rows(stream, buffer));
        accumulate(y, x);
    }
}
