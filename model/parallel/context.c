#include "model/parallel/context.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/collectives.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/parallel/context_work.h"

/* ---- what is exchanged ----------------------------------------------------------------------- */

bool context_skips(const Stream *stream)
{
    return stream->context > 1 && stream->documents;
}

bool context_attends_whole(const Stream *stream)
{
    return stream->context == 1 || stream->exchange.segments > 0;
}

void context_allocate(Stream *stream)
{
    const size_t c = (size_t)stream->context, rows = (size_t)stream->rows;
    ContextExchange *e = &stream->exchange;
    if (stream->context == 1)
        return;
    *e = (ContextExchange){ .whole = xmalloc(sizeof *e->whole * c * rows),
                            .packed = xmalloc(sizeof *e->packed * c * rows),
                            .range = xmalloc(sizeof *e->range * rows),
                            .own_start = xmalloc(sizeof *e->own_start * (rows + 1)),
                            .left_out = xmalloc(c * rows),
                            .own_left_out = xmalloc(rows),
                            .own = xmalloc(sizeof *e->own * c * rows),
                            .exchanged = xmalloc(sizeof *e->exchanged * c) };
}

void context_free(Stream *stream)
{
    ContextExchange *e = &stream->exchange;
    free(e->whole);
    free(e->packed);
    free(e->range);
    free(e->own_start);
    free(e->left_out);
    free(e->own_left_out);
    free(e->own);
    free(e->exchanged);
}

static int num_documents(const Stream *stream)
{
    return stream->docs.count ? stream->docs.count : stream->attn.B;
}

/* Returns document i as rows of whole sequences. Without documents, each sequence is one
 * document. */
static RowRange document(const Stream *stream, int i)
{
    const int *start = stream->docs.host_start;
    return stream->docs.count ? (RowRange){ start[i], start[i + 1] - start[i] }
                              : (RowRange){ i * stream->T, stream->T };
}

/* Returns the rows of document d on rank r; count <= 0: there are none. */
static RowRange part_of(const Stream *stream, RowRange document, int r)
{
    const int begin = document.first / stream->T * stream->T + r * stream->attn.T,
              end = begin + stream->attn.T;
    const int first = document.first > begin ? document.first : begin,
              last = document.first + document.count;
    return (RowRange){ first, (last < end ? last : end) - first };
}

/* Returns the rank that has the whole document; -1: several ranks have rows of the document. */
static int rank_of(const Stream *stream, RowRange document)
{
    const int first = document.first % stream->T, last = first + document.count - 1;
    return first / stream->attn.T == last / stream->attn.T ? first / stream->attn.T : -1;
}

/* Decides for each document whether it is exchanged, and stores this in e->left_out. Without
 * own_doc_start, all documents are exchanged: the plan has no memory for documents that a rank
 * keeps. */
static void choose_left_out(Stream *stream)
{
    ContextExchange *e = &stream->exchange;
    const int c = stream->context;
    ContextWork work = { .ranks = c,
                         .token_pairs = context_token_pairs(stream->config, c),
                         .exchanged = e->exchanged };
    int count = 0;
    memset(e->exchanged, 0, sizeof *e->exchanged * (size_t)c);
    for (int i = 0; i < stream->docs.count; i++) {
        const RowRange d = document(stream, i);
        const int rank = stream->own_doc_start ? rank_of(stream, d) : -1;
        const double pairs = context_pairs(stream->config, d.count);
        e->left_out[i] = false;
        if (rank >= 0)
            e->own[count++] =
                (OwnDocument){ .index = i, .rank = rank, .tokens = d.count, .pairs = pairs };
        else
            work.pairs += pairs;
        for (int r = 0; r < c && rank < 0; r++)
            e->exchanged[r] += part_of(stream, d, r).count > 0 ? part_of(stream, d, r).count : 0;
    }
    const int chosen = context_leave_out(e->own, count, &work);
    for (int i = 0; i < chosen; i++)
        e->left_out[e->own[i].index] = true;
}

static bool is_exchanged(const Stream *stream, int i)
{
    return stream->docs.count == 0 || !stream->exchange.left_out[i];
}

/* Segments are the ranges of a rank's rows that are exchanged. Writes rank r's segments to
 * `segment`, unless it is NULL; returns their number. */
static int segments_of(const Stream *stream, int r, RowRange *segment)
{
    int count = 0, end = -1;
    for (int i = 0; i < num_documents(stream); i++) {
        const RowRange part = part_of(stream, document(stream, i), r);
        if (part.count <= 0 || !is_exchanged(stream, i))
            continue;
        count += part.first != end;
        if (segment && part.first != end)
            segment[count - 1] = part;
        else if (segment)
            segment[count - 1].count += part.count;
        end = part.first + part.count;
    }
    return count;
}

/* Converts a row of this rank's part of whole sequences to a row of this rank's tensors outside
 * attention. */
static int own_row(const Stream *stream, int row)
{
    return row / stream->T * stream->attn.T + row % stream->T % stream->attn.T;
}

/* Joins adjacent segments: computes the ranges of this rank's rows that its segments form. */
static void join_segments(Stream *stream, const RowRange *segment)
{
    ContextExchange *e = &stream->exchange;
    for (int i = 0; i < e->segments; i++) {
        const int first = own_row(stream, segment[i].first);
        RowRange *last = e->ranges > 0 ? &e->range[e->ranges - 1] : NULL;
        if (last && segment[i].count > 0 && last->first + last->count == first)
            last->count += segment[i].count;
        else if (segment[i].count > 0)
            e->range[e->ranges++] = (RowRange){ first, segment[i].count };
    }
}

/* Computes the position of this rank's segments in `exchanged`: for each range, its rows with the
 * heads of rank 0, then with the heads of rank 1, and so on. */
static void pack(Stream *stream, const RowRange *segment)
{
    ContextExchange *e = &stream->exchange;
    for (int i = 0, k = 0, before = 0; i < e->segments; i++) {
        const int first = own_row(stream, segment[i].first);
        while (segment[i].count > 0 && first >= e->range[k].first + e->range[k].count)
            before += e->range[k++].count;
        for (int r = 0; r < stream->context; r++)
            e->packed[r * e->segments + i] =
                segment[i].count == 0
                    ? (RowRange){ 0 }
                    : (RowRange){ stream->context * before + r * e->range[k].count + first -
                                      e->range[k].first,
                                  segment[i].count };
    }
}

/* Sets stream->own_docs: the documents of this rank that are not exchanged. */
static void divide_own(Stream *stream)
{
    ContextExchange *e = &stream->exchange;
    Documents d = { .start = stream->own_doc_start,
                    .host_start = e->own_start,
                    .left_out = e->own_left_out };
    for (int i = 0; i < stream->docs.count; i++) {
        const RowRange whole = document(stream, i),
                       part = part_of(stream, whole, stream->context_rank);
        if (part.count <= 0)
            continue;
        e->own_start[d.count] = own_row(stream, part.first);
        e->own_left_out[d.count] = is_exchanged(stream, i);
        if (!e->own_left_out[d.count++] && part.count > d.longest)
            d.longest = part.count;
    }
    stream->own_docs = d.longest > 0 ? d : (Documents){ 0 };
    if (d.longest == 0)
        return;
    e->own_start[d.count] = stream->rows;
    device_put(stream->own_doc_start, e->own_start, sizeof *e->own_start * ((size_t)d.count + 1));
}

void context_divide(Stream *stream)
{
    ContextExchange *e = &stream->exchange;
    if (stream->context == 1)
        return;
    e->segments = e->ranges = 0;
    choose_left_out(stream);
    for (int r = 0; r < stream->context; r++) {
        const int count = segments_of(stream, r, NULL);
        e->segments = count > e->segments ? count : e->segments;
    }
    for (int r = 0; r < stream->context; r++)
        for (int i = segments_of(stream, r, e->whole + r * e->segments); i < e->segments; i++)
            e->whole[r * e->segments + i] = (RowRange){ 0 };
    join_segments(stream, e->whole + stream->context_rank * e->segments);
    pack(stream, e->whole + stream->context_rank * e->segments);
    divide_own(stream);
    stream->docs.left_out = stream->docs.count ? e->left_out : NULL;
    stream->docs.longest = 0;
    for (int i = 0; i < stream->docs.count; i++) {
        const RowRange d = document(stream, i);
        if (!e->left_out[i] && d.count > stream->docs.longest)
            stream->docs.longest = d.count;
    }
}

void context_divide_for_plan(Stream *stream)
{
    ContextExchange *e = &stream->exchange;
    stream->docs = (Documents){ 0 };
    context_divide(stream);
    if (!context_skips(stream))
        return;
    for (int b = 0; b <= stream->attn.B; b++)
        e->own_start[b] = b * stream->attn.T;
    stream->own_docs = (Documents){ .count = stream->attn.B,
                                    .longest = stream->attn.T,
                                    .start = stream->own_doc_start,
                                    .host_start = e->own_start };
}

/* ---- the exchange ---------------------------------------------------------------------------- */

/* Describes `buffer`: rows of all ranks, each with the columns of one rank's heads. */
static Tensor exchanged(const Stream *stream, Tensor buffer)
{
    return tensor_at(stream->work.exchanged.data, buffer.format, buffer.rows, buffer.cols);
}

/* Attention reads tiles of rows, also some rows after a document's end, and multiplies these by 0.
 * So these rows must be finite (kernels.h). */
static void clear_after_documents(const Stream *stream, Tensor buffer)
{
    for (int i = 1; i < stream->docs.count; i++) {
        const int first = stream->docs.host_start[i], left = buffer.rows - first;
        if (!stream->docs.left_out[i] || stream->docs.left_out[i - 1])
            continue;
        const Tensor rows =
            tensor_rows(buffer, first, left < ROWS_AFTER_DOCUMENT ? left : ROWS_AFTER_DOCUMENT);
        device_zero(rows.data, tensor_bytes(rows));
    }
}

Tensor context_heads(const Stream *stream, const Acts *a, Tensor buffer, Tensor x)
{
    const ContextExchange *e = &stream->exchange;
    if (stream->context == 1)
        return x;
    const Tensor packed = exchanged(stream, buffer);
    for (int k = 0, at = 0; k < e->ranges; at += stream->context * e->range[k++].count)
        heads_split(tensor_rows(packed, at, stream->context * e->range[k].count),
                    tensor_rows(x, e->range[k].first, e->range[k].count), a->heads);
    clear_after_documents(stream, buffer);
    comm_exchange(buffer, e->whole, packed, e->packed, e->segments, RANKS_CONTEXT);
    return buffer;
}

Tensor context_buffer(const Stream *stream, Tensor buffer, Tensor x)
{
    return stream->context == 1 ? x : buffer;
}

void context_tokens(const Stream *stream, const Acts *a, Tensor x, Tensor buffer)
{
    const ContextExchange *e = &stream->exchange;
    if (stream->context == 1)
        return;
    const Tensor packed = exchanged(stream, buffer);
    comm_exchange(packed, e->packed, buffer, e->whole, e->segments, RANKS_CONTEXT);
    for (int k = 0, at = 0; k < e->ranges; at += stream->context * e->range[k++].count)
        heads_join(tensor_rows(x, e->range[k].first, e->range[k].count),
                   tensor_rows(packed, at, stream->context * e->range[k].count), a->heads);
}

Attention context_attention(const Stream *stream, Attention a)
{
    a.T *= stream->context;
    a.H /= stream->context;
    a.K = a.K > stream->context ? a.K / stream->context : 1;
    return a;
}

const int *context_part(const Stream *stream, const int *values)
{
    const int first = stream->tensor_rank * stream->N;
    if (stream->context == 1)
        return values + first;
    const int own = stream->attn.T;
    for (int b = 0; b < stream->attn.B; b++)
        memcpy(stream->host_part + (size_t)b * (size_t)own,
               values + (size_t)b * (size_t)stream->T + (size_t)stream->context_rank * (size_t)own,
               sizeof *values * (size_t)own);
    return stream->host_part + first;
}
