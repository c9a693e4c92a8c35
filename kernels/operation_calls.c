/* The operations as programs call them. Each operation reports its accesses to the watch, if one is
 * set, and calls the back end. */
#include "kernels/backend.h"
#include "kernels/runtime/operations.h"

/* ---- the words of the last column of operation_list.h
 * ----------------------------------------- */

static bool has_one_scale(Format f)
{
    return format_is_fp8(f) && !f.group;
}

static Access memory(const void *p, size_t bytes, unsigned how)
{
    return (Access){ p, bytes, how };
}

static Access codes(Tensor t, unsigned how)
{
    return memory(t.data, tensor_numel(t) * dtype_size(t.format.dtype), how);
}

static Access transposed(Tensor t, unsigned how)
{
    return memory(t.data_t, tensor_numel(t), how);
}

static Access scales(Tensor t, unsigned how)
{
    return memory(t.scale,
                  t.format.group ? format_scale_bytes(t.format, tensor_numel(t)) : sizeof(float),
                  how);
}

/* Returns `rows` rows of a cache from row `first` on. If the cache is too small, returns the whole
 * cache; the operation itself reports the error. */
static Tensor cached(Tensor t, int first, int rows)
{
    return first + rows <= t.rows ? tensor_rows(t, first, rows) : t;
}

static size_t groups_of(Nf4 x, int cols)
{
    size_t count = 0;
    for (int i = 0; i < x.num_tensors; i++)
        count += nf4_groups((size_t)x.rows[i], (size_t)cols);
    return count;
}

/* Returns the floats of statistics per token: the rstd of each head of q and k, or of q and of k; 0
 * without a norm. */
static size_t qk_stats(Tensor qnorm, Attention a)
{
    return !qnorm.data ? 0 : a.H > 1 && qnorm.cols == a.D ? (size_t)(a.H + a.K) : 2;
}

/* Returns the number of pairs (query, key that this query sees) in all documents. Without
 * documents, these are a.B sequences of a.T tokens. */
static double seen_pairs(Attention a, Documents docs)
{
    const int count = docs.count ? docs.count : a.B;
    double pairs = 0;
    for (int i = 0; i < count; i++) {
        const double T = docs.host_start ? docs.host_start[i + 1] - docs.host_start[i] : a.T;
        const double w = a.window > 0 && a.window < T ? a.window : T;
        if (docs.left_out && docs.left_out[i])
            continue;
        pairs += w * (T - w) + w * w / 2;
    }
    return pairs;
}

static size_t assignments_of(Routing r)
{
    return (size_t)r.tokens * (size_t)r.top_k;
}

static size_t rows_of(Routing r)
{
    return (size_t)routing_rows(r.tokens, r.experts, r.top_k);
}

static int bits_of(Tensor t)
{
    return 8 * (int)dtype_size(t.format.dtype);
}

/* Returns the FLOPs of a product of a matrix (rows, depth) by a matrix (depth, cols), whose
 * operands have the format of x. */
static Access products(double rows, double cols, double depth, Tensor x)
{
    return (Access){ NULL, (size_t)(2 * rows * cols * depth), (unsigned)(MULTIPLIES + bits_of(x)) };
}

/* Returns the mean number of columns that are computed in a row of a symmetric product. */
static double symmetric_columns(Tensor y)
{
    return symmetric_in_blocks(y.rows) ? 0.625 * y.rows : y.rows;
}

#define NOTHING { 0 }
#define PRODUCTS(rows, cols, depth, x) products(rows, cols, depth, x)
/* The FLOPs of `times` products with all keys that queries see. */
#define PRODUCTS_OF_KEYS(times, a, docs, x) products((times) * seen_pairs(a, docs), (a).H, (a).D, x)
#define WITH_NEIGHBOUR(n) { NULL, RANKS_PIPELINE, OVER_RANKS + (unsigned)(n) }
#define OVER(g) { NULL, (size_t)(g), OVER_RANKS }
#define MEMORY(p, bytes, how) memory(p, bytes, how)
#define FLOATS(p, rows, each, how) memory(p, sizeof(float) * (size_t)(rows) * (size_t)(each), how)
#define CODES(t, how) codes(t, how)
#define TRANSPOSED(t, how) transposed(t, how)

/* A tensor that is read. Of an FP8 tensor with one scale, IN reads data, and IN_TRANSPOSED reads
 * data_t. An absent tensor adds nothing. */
#define IN_IF(condition, t) codes(t, (condition) ? READS : 0), scales(t, (condition) ? READS : 0)
#define IN(t) IN_IF(true, t)
#define IN_TRANSPOSED_IF(condition, t) \
    (has_one_scale((t).format) ? transposed : codes)(t, (condition) ? READS : 0), \
        scales(t, (condition) ? READS : 0)
#define IN_TRANSPOSED(t) IN_TRANSPOSED_IF(true, t)
/* A tensor that is read, and to which the operation may add an adapter's product. */
#define IN_WITH(t, product) \
    IN(t), codes(t, (product).xa.data ? SPOILS : 0), IN((product).xa), IN((product).m.w)

/* A tensor that is written. OUT_AS_SCALED keeps the tensor's scale, unless the tensor has groups.
 * scale_amax is accessed together with the scale. */
#define SCALE(t) scales(t, WRITES), memory((t).scale_amax, sizeof(float), READS | WRITES)
#define OUT(t) codes(t, WRITES), transposed(t, WRITES), SCALE(t)
#define OUT_AS_SCALED(t) \
    codes(t, WRITES), transposed(t, WRITES), scales(t, has_one_scale((t).format) ? READS : WRITES)
/* Column factors. An operation that writes a tensor either keeps both the factors and the scale, or
 * replaces both. */
#define CHANNELS_IF(condition, t, how) FLOATS((t).channel, (t).cols, 1, (condition) ? (how) : 0)
#define CHANNELS_OUT(t) CHANNELS_IF(true, t, scale_is_reused(t) ? READS : WRITES)
/* What an all-gather writes: `whole`, which consists of `size` parts, except part number `rank` if
 * that part is in place. */
#define GATHERED(whole, part, bytes, rank, size) \
    memory(whole, (bytes) * (size_t)(rank), WRITES), \
        memory((const char *)(whole) + (bytes) * (size_t)(rank), bytes, \
               (const char *)(part) == (const char *)(whole) + (bytes) * (size_t)(rank) ? 0 \
                                                                                        : WRITES), \
        memory((const char *)(whole) + (bytes) * ((size_t)(rank) + 1), \
               (bytes) * (size_t)((size) - (rank) - 1), WRITES)
#define SPOILED(t) codes(t, SPOILS)
/* A gradient that accumulates. An empty gradient is overwritten. */
#define SUM(t) codes(t, (t).empty ? WRITES : READS | WRITES)

#define GROUPS(x, count) \
    memory((x).group, (count) * sizeof *(x).group, READS), \
        memory((x).plain, (count) * sizeof *(x).plain, READS)
/* The factors of a loss's rows; NULL: there are none. */
#define LABEL_WEIGHTS(weight, logits) FLOATS(weight, (weight) ? (logits).rows : 0, 1, READS)
/* The bytes of k columns of each row, or of their numbers. */
#define CHOSEN(logits, k) (sizeof(float) * (size_t)(logits).rows * (size_t)(k))
#define WEIGHTS(r) MEMORY((r).weight, sizeof(float) * assignments_of(r), READS)
/* The assignment of each row, and the range of rows of each expert. */
#define ROWS(r) \
    MEMORY((r).assignment, sizeof(int) * rows_of(r), READS), \
        MEMORY((r).first, sizeof(int) * ((size_t)(r).experts + 1), READS)
#define ROUTING(r, how) \
    MEMORY((r).expert, sizeof(int) * assignments_of(r), how), \
        MEMORY((r).weight, sizeof(float) * assignments_of(r), how), \
        MEMORY((r).row, sizeof(int) * assignments_of(r), how), \
        MEMORY((r).assignment, sizeof(int) * rows_of(r), how), \
        MEMORY((r).first, sizeof(int) * ((size_t)(r).experts + 1), how)
/* The scales of all items of a tensor without groups; IN names only the first. */
#define ITEM_SCALES(t, items, how) \
    MEMORY((t).scale, sizeof(float) * SCALE_FLOATS * (size_t)(items), how)
#define ANGLES(a) FLOATS((a).rope, (a).T, (a).D, READS)
#define QK_STATS(p, qkv, qnorm, a, how) FLOATS(p, (qkv).rows, qk_stats(qnorm, a), how)
#define STARTS(docs) memory((docs).start, ((size_t)(docs).count + 1) * sizeof(int), READS)
#define SCRATCH(a) memory((a).scratch, (a).scratch_bytes, SPOILS)

/* ---- the operations -------------------------------------------------------------------------- */

#define OP(name, parameters, arguments, ...) \
    void name parameters \
    { \
        if (!operations_watched()) { \
            backend_##name arguments; \
            return; \
        } \
        Operation o = { #name }; \
        Access all[] = { __VA_ARGS__ }; \
        if (operation_begin(&o, all, (int)(sizeof all / sizeof *all))) { \
            backend_##name arguments; \
            operation_end(&o); \
        } \
    }
#include "kernels/operation_list.h"
