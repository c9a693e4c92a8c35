#include "model/parallel/context.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/collectives.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/parallel/context_work.h"

/* ---- what is exchanged ----------------------------------------------------------------------- */

bool context_skips(const Model *m)
{
    return m->context > 1 && m->documents;
}

bool context_attends_whole(const Model *m)
{
    return m->context == 1 || m->exchange.pieces > 0;
}

void context_allocate(Model *m)
{
    const size_t c = (size_t)m->context, rows = (size_t)m->rows;
    ContextExchange *e = &m->exchange;
    if (m->context == 1)
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

void context_free(Model *m)
{
    ContextExchange *e = &m->exchange;
    free(e->whole);
    free(e->packed);
    free(e->range);
    free(e->own_start);
    free(e->left_out);
    free(e->own_left_out);
    free(e->own);
    free(e->exchanged);
}

static int num_documents(const Model *m)
{
    return m->docs.count ? m->docs.count : m->attn.B;
}

/* Document i, rows of whole sequences; without documents each sequence is one. */
static RowRange document(const Model *m, int i)
{
    const int *start = m->docs.host_start;
    return m->docs.count ? (RowRange){ start[i], start[i + 1] - start[i] }
                         : (RowRange){ i * m->T, m->T };
}

/* What of it is in rank r's part of its sequence; count 0 or less: nothing. */
static RowRange part_of(const Model *m, RowRange document, int r)
{
    const int begin = document.first / m->T * m->T + r * m->attn.T, end = begin + m->attn.T;
    const int first = document.first > begin ? document.first : begin,
              last = document.first + document.count;
    return (RowRange){ first, (last < end ? last : end) - first };
}

/* The rank whose part has all of it; -1: several ranks have some. */
static int rank_of(const Model *m, RowRange document)
{
    const int first = document.first % m->T, last = first + document.count - 1;
    return first / m->attn.T == last / m->attn.T ? first / m->attn.T : -1;
}

/* Sets e->left_out for all documents. A plan without documents has no memory for those of a
 * part. */
static void choose_left_out(Model *m)
{
    ContextExchange *e = &m->exchange;
    const int c = m->context;
    ContextWork work = { .ranks = c,
                         .token_pairs = context_token_pairs(m->config, c),
                         .exchanged = e->exchanged };
    int count = 0;
    memset(e->exchanged, 0, sizeof *e->exchanged * (size_t)c);
    for (int i = 0; i < m->docs.count; i++) {
        const RowRange d = document(m, i);
        const int rank = m->own_doc_start ? rank_of(m, d) : -1;
        const double pairs = context_pairs(m->config, d.count);
        e->left_out[i] = false;
        if (rank >= 0)
            e->own[count++] =
                (OwnDocument){ .index = i, .rank = rank, .tokens = d.count, .pairs = pairs };
        else
            work.pairs += pairs;
        for (int r = 0; r < c && rank < 0; r++)
            e->exchanged[r] += part_of(m, d, r).count > 0 ? part_of(m, d, r).count : 0;
    }
    const int chosen = context_leave_out(e->own, count, &work);
    for (int i = 0; i < chosen; i++)
        e->left_out[e->own[i].index] = true;
}

static bool is_exchanged(const Model *m, int i)
{
    return m->docs.count == 0 || !m->exchange.left_out[i];
}

/* Rank r's pieces, the ranges of its rows that are exchanged, are written to `piece`, unless that
 * is NULL; returns how many there are. */
static int pieces_of(const Model *m, int r, RowRange *piece)
{
    int count = 0, end = -1;
    for (int i = 0; i < num_documents(m); i++) {
        const RowRange part = part_of(m, document(m, i), r);
        if (part.count <= 0 || !is_exchanged(m, i))
            continue;
        count += part.first != end;
        if (piece && part.first != end)
            piece[count - 1] = part;
        else if (piece)
            piece[count - 1].count += part.count;
        end = part.first + part.count;
    }
    return count;
}

/* A row of this rank's part of whole sequences, as a row of what it has outside attention. */
static int own_row(const Model *m, int row)
{
    return row / m->T * m->attn.T + row % m->T % m->attn.T;
}

/* The ranges of this rank's rows that its pieces make: pieces that touch are joined. */
static void join_pieces(Model *m, const RowRange *piece)
{
    ContextExchange *e = &m->exchange;
    for (int i = 0; i < e->pieces; i++) {
        const int first = own_row(m, piece[i].first);
        RowRange *last = e->ranges > 0 ? &e->range[e->ranges - 1] : NULL;
        if (last && piece[i].count > 0 && last->first + last->count == first)
            last->count += piece[i].count;
        else if (piece[i].count > 0)
            e->range[e->ranges++] = (RowRange){ first, piece[i].count };
    }
}

/* Where its pieces are in `exchanged`: a range has its rows with the heads of rank 0, then with
 * those of rank 1, and so on. */
static void pack(Model *m, const RowRange *piece)
{
    ContextExchange *e = &m->exchange;
    for (int i = 0, k = 0, before = 0; i < e->pieces; i++) {
        const int first = own_row(m, piece[i].first);
        while (piece[i].count > 0 && first >= e->range[k].first + e->range[k].count)
            before += e->range[k++].count;
        for (int r = 0; r < m->context; r++)
            e->packed[r * e->pieces + i] =
                piece[i].count == 0 ? (RowRange){ 0 }
                                    : (RowRange){ m->context * before + r * e->range[k].count +
                                                      first - e->range[k].first,
                                                  piece[i].count };
    }
}

/* Documents of this rank's part: m->own_docs, without those that are exchanged. */
static void divide_own(Model *m)
{
    ContextExchange *e = &m->exchange;
    Documents d = { .start = m->own_doc_start,
                    .host_start = e->own_start,
                    .left_out = e->own_left_out };
    for (int i = 0; i < m->docs.count; i++) {
        const RowRange whole = document(m, i), part = part_of(m, whole, m->context_rank);
        if (part.count <= 0)
            continue;
        e->own_start[d.count] = own_row(m, part.first);
        e->own_left_out[d.count] = is_exchanged(m, i);
        if (!e->own_left_out[d.count++] && part.count > d.longest)
            d.longest = part.count;
    }
    m->own_docs = d.longest > 0 ? d : (Documents){ 0 };
    if (d.longest == 0)
        return;
    e->own_start[d.count] = m->rows;
    device_put(m->own_doc_start, e->own_start, sizeof *e->own_start * ((size_t)d.count + 1));
}

void context_divide(Model *m)
{
    ContextExchange *e = &m->exchange;
    if (m->context == 1)
        return;
    e->pieces = e->ranges = 0;
    choose_left_out(m);
    for (int r = 0; r < m->context; r++) {
        const int count = pieces_of(m, r, NULL);
        e->pieces = count > e->pieces ? count : e->pieces;
    }
    for (int r = 0; r < m->context; r++)
        for (int i = pieces_of(m, r, e->whole + r * e->pieces); i < e->pieces; i++)
            e->whole[r * e->pieces + i] = (RowRange){ 0 };
    join_pieces(m, e->whole + m->context_rank * e->pieces);
    pack(m, e->whole + m->context_rank * e->pieces);
    divide_own(m);
    m->docs.left_out = m->docs.count ? e->left_out : NULL;
    m->docs.longest = 0;
    for (int i = 0; i < m->docs.count; i++) {
        const RowRange d = document(m, i);
        if (!e->left_out[i] && d.count > m->docs.longest)
            m->docs.longest = d.count;
    }
}

void context_divide_for_plan(Model *m)
{
    ContextExchange *e = &m->exchange;
    m->docs = (Documents){ 0 };
    context_divide(m);
    if (!context_skips(m))
        return;
    for (int b = 0; b <= m->attn.B; b++)
        e->own_start[b] = b * m->attn.T;
    m->own_docs = (Documents){ .count = m->attn.B,
                               .longest = m->attn.T,
                               .start = m->own_doc_start,
                               .host_start = e->own_start };
}

/* ---- the exchange ---------------------------------------------------------------------------- */

/* Rows of all ranks, each with the columns of one rank's heads, as `buffer` has them. */
static Tensor exchanged(const Model *m, Tensor buffer)
{
    return tensor_at(m->work.exchanged.data, buffer.format, buffer.rows, buffer.cols);
}

/* Attention reads tiles of rows, also some after a document's end, and multiplies these by 0: they
 * must be finite (kernels.h). */
static void clear_after_documents(const Model *m, Tensor buffer)
{
    for (int i = 1; i < m->docs.count; i++) {
        const int first = m->docs.host_start[i], left = buffer.rows - first;
        if (!m->docs.left_out[i] || m->docs.left_out[i - 1])
            continue;
        const Tensor rows =
            tensor_rows(buffer, first, left < ROWS_AFTER_DOCUMENT ? left : ROWS_AFTER_DOCUMENT);
        device_zero(rows.data, tensor_bytes(rows));
    }
}

Tensor context_heads(const Model *m, const Acts *a, Tensor buffer, Tensor x)
{
    const ContextExchange *e = &m->exchange;
    if (m->context == 1)
        return x;
    const Tensor packed = exchanged(m, buffer);
    for (int k = 0, at = 0; k < e->ranges; at += m->context * e->range[k++].count)
        heads_split(tensor_rows(packed, at, m->context * e->range[k].count),
                    tensor_rows(x, e->range[k].first, e->range[k].count), a->heads);
    clear_after_documents(m, buffer);
    comm_exchange(buffer, e->whole, packed, e->packed, e->pieces);
    return buffer;
}

Tensor context_buffer(const Model *m, Tensor buffer, Tensor x)
{
    return m->context == 1 ? x : buffer;
}

void context_tokens(const Model *m, const Acts *a, Tensor x, Tensor buffer)
{
    const ContextExchange *e = &m->exchange;
    if (m->context == 1)
        return;
    const Tensor packed = exchanged(m, buffer);
    comm_exchange(packed, e->packed, buffer, e->whole, e->pieces);
    for (int k = 0, at = 0; k < e->ranges; at += m->context * e->range[k++].count)
        heads_join(tensor_rows(x, e->range[k].first, e->range[k].count),
                   tensor_rows(packed, at, m->context * e->range[k].count), a->heads);
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
    const int first = m->tensor_rank * m->N;
    if (m->context == 1)
        return values + first;
    const int own = m->attn.T;
    for (int b = 0; b < m->attn.B; b++)
        memcpy(m->host_part + (size_t)b * (size_t)own,
               values + (size_t)b * (size_t)m->T + (size_t)m->context_rank * (size_t)own,
               sizeof *values * (size_t)own);
    return m->host_part + first;
}
