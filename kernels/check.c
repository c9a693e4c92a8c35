/* Checks on entry of every operation: a wrong shape or format is an error of the program. The
 * message names operation, tensor, what was found and what was expected. */
#include "kernels/check.h"

#include <string.h>

#include "kernels/runtime/comm.h"

const char *operation_name(const char *function)
{
    static const char prefix[] = "backend_";
    return strncmp(function, prefix, sizeof prefix - 1) == 0 ? function + sizeof prefix - 1
                                                             : function;
}

void check_tensor(const char *op, const char *name, Tensor t, int rows, int cols)
{
    if (!t.data)
        die("%s: there is no %s; expected (%d, %d)", op, name, rows, cols);
    if (t.rows != rows || t.cols != cols)
        die("%s: %s is (%d, %d); expected (%d, %d)", op, name, t.rows, t.cols, rows, cols);
    bool scales = format_has_scales(t.format);
    if (!scales && (t.format.group || t.data_t))
        die("%s: %s is %s; only formats with scales have groups, and only FP8 has a transposed "
            "copy",
            op, name, format_name(t.format));
    if (scales && !t.scale)
        die("%s: %s is %s without scales", op, name, format_name(t.format));
    if (t.format.group < 0 || (t.format.group && (cols % t.format.group || t.data_t)))
        die("%s: %s is %s of (%d, %d); groups must divide a row, and a tensor with groups has no "
            "transposed copy",
            op, name, format_name(t.format), rows, cols);
    if (format_is_dynamic8(t.format) && t.format.group != DYNAMIC8_GROUP)
        die("%s: %s is %s; expected groups of %d for the dynamic maps", op, name,
            format_name(t.format), (int)DYNAMIC8_GROUP);
}

void check_plain(const char *op, const char *name, Tensor t)
{
    if (format_has_scales(t.format))
        die("%s: %s is %s; expected f32 or bf16, since it accumulates or is changed in place", op,
            name, format_name(t.format));
}

void check_quantized(Tensor y, Tensor x)
{
    const bool longer = format_is_fp8(y.format) && !y.format.group && y.rows > x.rows;
    CHECK(y.cols == x.cols && (y.rows == x.rows || longer),
          "quantize_codes: y is (%d, %d), x is (%d, %d)", y.rows, y.cols, x.rows, x.cols);
    CHECK(!x.channel, "quantize_codes: x has column factors; expected none");
}

void check_items(const char *op, Tensor y, Tensor x, int items)
{
    enum { TOGETHER = 16 }; /* elements that a GPU may access at once */
    CHECK(!x.format.group && !y.format.group && !y.scale_amax,
          "%s: items of %s from %s; expected no groups, and no scale that is reused", op,
          format_name(y.format), format_name(x.format));
    if (items == 1)
        return;
    CHECK(items > 1 && x.rows % items == 0 && y.rows == x.rows && y.cols == x.cols,
          "%s: y is (%d, %d), x is (%d, %d); expected one shape, divided into %d items", op, y.rows,
          y.cols, x.rows, x.cols, items);
    CHECK(tensor_numel(x) / (size_t)items % TOGETHER == 0,
          "%s: %d items of %d x %d elements; expected a multiple of %d in each", op, items,
          x.rows / items, x.cols, (int)TOGETHER);
}

void check_scaled(Tensor y)
{
    CHECK(format_is_fp8(y.format) && !y.format.group && y.scale, "quantize_scale: y is %s",
          format_name(y.format));
}

void check_expand_operand(Tensor y, Tensor x)
{
    const char *op = "expand_operand";
    check_tensor(op, "x", x, x.rows, x.cols);
    check_tensor(op, "y", y, x.rows, x.cols);
    check_plain(op, "y", y);
    CHECK(format_is_fp8(x.format) && x.data_t,
          "%s: x is %s %s a transpose; expected FP8 with a transpose", op, format_name(x.format),
          x.data_t ? "with" : "without");
}

void check_find_not_finite(Tensor x, bool negative)
{
    const char *op = "find_not_finite";
    check_tensor(op, "x", x, x.rows, x.cols);
    CHECK(!negative || x.format.dtype != DYNAMIC8, "%s: %s has negative values", op,
          format_name(x.format));
    CHECK(!format_has_byte_scales(x.format),
          "%s: %s has scales of one byte; the scales of moments are larger", op,
          format_name(x.format));
}

void check_logit_codes(const char *op, Tensor gradient, Tensor logits)
{
    check_tensor(op, "gradient", gradient, gradient.rows, gradient.cols);
    CHECK(gradient.rows >= logits.rows && gradient.cols >= logits.cols,
          "%s: gradient is (%d, %d); the logits are (%d, %d)", op, gradient.rows, gradient.cols,
          logits.rows, logits.cols);
    CHECK(format_is_fp8(gradient.format) && !gradient.format.group,
          "%s: the gradient is %s; expected e4m3 or e5m2", op, format_name(gradient.format));
}

void check_columns(const char *op, Tensor logits, int vocab, int k)
{
    check_tensor(op, "logits", logits, logits.rows, logits.cols);
    check_plain(op, "logits", logits);
    CHECK(vocab > 0 && vocab <= logits.cols, "%s: a vocabulary of %d in %d columns", op, vocab,
          logits.cols);
    CHECK(k > 0 && k <= MOST_SOFT, "%s: %d columns; at most %d", op, k, (int)MOST_SOFT);
}

void check_soft_labels(const char *op, Tensor gradient, Tensor logits, int k, int vocab)
{
    check_columns(op, logits, vocab, k);
    if (format_is_fp8(gradient.format))
        check_logit_codes(op, gradient, logits);
    else
        CHECK(!gradient.data || gradient.data == logits.data,
              "%s: the gradient is neither the logits nor FP8 codes", op);
}

bool check_gemm(const char *op, Tensor out, Tensor a, Tensor b)
{
    const Format f = a.format, g = b.format;
    const bool fp8 = format_is_fp8(f) && format_is_fp8(g) && !f.group && !g.group;
    const bool plain = f.dtype == g.dtype && (f.dtype == F32 || f.dtype == BF16);
    CHECK(out.data != a.data && out.data != b.data, "%s: the result has the memory of an operand",
          op);
    if (format_has_scales(out.format) || (out.format.dtype == BF16 && f.dtype == F32))
        die("%s: %s and %s into %s; the result may be f32, or bf16 unless the operands are f32", op,
            format_name(f), format_name(g), format_name(out.format));
    if ((!fp8 && !plain) || (f.dtype == E5M2 && g.dtype == E5M2))
        die("%s: no GEMM of %s and %s; there are f32 x f32, bf16 x bf16, e4m3 x e4m3 and e4m3 x "
            "e5m2 with one scale per tensor",
            op, format_name(f), format_name(g));
    return fp8;
}

void check_has_transpose(const char *op, const char *name, Tensor t)
{
    if (!t.data_t)
        die("%s: %s is %s without the transposed copy that FP8 GEMMs read", op, name,
            format_name(t.format));
}

bool is_bias(Tensor add, Tensor y)
{
    return add.data && add.rows == y.cols && add.cols == 1;
}

bool check_matmul(Tensor y, Tensor x, Tensor w, Tensor add)
{
    const char *op = "matmul";
    check_tensor(op, "x", x, x.rows, x.cols);
    check_tensor(op, "w", w, w.rows, x.cols);
    check_tensor(op, "y", y, x.rows, w.rows);
    if (add.data && !is_bias(add, y))
        check_tensor(op, "add", add, x.rows, w.rows);
    CHECK(!w.channel, "%s: w has column factors; fold_channels removes them", op);
    if (add.data && !format_equal(add.format, y.format))
        die("matmul: adds %s to %s; both must have the same format", format_name(add.format),
            format_name(y.format));
    return check_gemm(op, y, x, w);
}

bool check_matmul_dx(Tensor dx, Tensor dy, Tensor w, bool accumulate)
{
    const char *op = "matmul_dx";
    CHECK(tensor_exists(w), "%s: there is no w", op);
    check_tensor(op, "dy", dy, dy.rows, w.rows);
    check_tensor(op, "dx", dx, dy.rows, w.cols);
    if (accumulate)
        check_plain(op, "dx", dx);
    const bool fp8 = check_gemm(op, dx, dy, w);
    if (fp8)
        check_has_transpose(op, "w", w);
    return fp8;
}

bool check_matmul_dw(Tensor dw, Tensor dy, Tensor x)
{
    const char *op = "matmul_dw";
    check_tensor(op, "dy", dy, dy.rows, dy.cols);
    check_tensor(op, "x", x, dy.rows, x.cols);
    check_tensor(op, "dw", dw, dy.cols, x.cols);
    check_plain(op, "dw", dw);
    CHECK(!dy.channel, "%s: dy has column factors; expected none", op);
    const bool fp8 = check_gemm(op, dw, dy, x);
    if (fp8) {
        check_has_transpose(op, "dy", dy);
        check_has_transpose(op, "x", x);
    }
    return fp8;
}

void check_fold_channels(Tensor y, Tensor w)
{
    const char *op = "fold_channels";
    check_tensor(op, "w", w, w.rows, w.cols);
    check_tensor(op, "y", y, w.rows, w.cols);
    CHECK(format_is_fp8(w.format) && !w.format.group && format_equal(y.format, w.format),
          "%s: y is %s, w is %s; expected e4m3 or e5m2 for both", op, format_name(y.format),
          format_name(w.format));
    CHECK(y.data != w.data && !y.data_t, "%s: y must have its own memory, and no transposed copy",
          op);
}

void check_matmul_db(Tensor db, Tensor dy)
{
    const char *op = "matmul_db";
    check_tensor(op, "dy", dy, dy.rows, dy.cols);
    check_tensor(op, "db", db, dy.cols, 1);
    check_plain(op, "db", db);
}

static void check_heads(const char *op, Tensor y, Tensor qkv, Attention a)
{
    CHECK(a.H % a.K == 0, "%s: %d query heads, %d key/value heads", op, a.H, a.K);
    CHECK(a.window >= 0, "%s: a window of %d keys", op, a.window);
    check_tensor(op, "qkv", qkv, a.B * a.T, (a.H + 2 * a.K) * a.D);
    check_tensor(op, "y", y, a.B * a.T, a.H * a.D);
    CHECK(y.data != qkv.data, "%s: y has the memory of qkv", op);
}

void check_attention(const char *op, Tensor y, Tensor qkv, Attention a, Documents docs)
{
    check_heads(op, y, qkv, a);
    CHECK(docs.count == 0 || (docs.longest > 0 && docs.longest <= a.T),
          "%s: a document of %d tokens in sequences of %d", op, docs.longest, a.T);
}

/* If rows of x contain keys, each rank gets heads.K key heads of its own, or one key head that
 * several ranks share. */
int check_exchange(const char *op, Tensor y, Tensor x, Attention heads)
{
    const int ranks = x.rows > 0 ? y.rows / x.rows : 0, q = heads.H * heads.D,
              k = heads.K * heads.D;
    const int keys = (x.cols - ranks * q) / 2, shared = keys > 0 ? ranks * k / keys : 1;
    check_plain(op, "y", y);
    check_plain(op, "x", x);
    CHECK(ranks > 0 && keys >= 0 && x.cols == ranks * q + 2 * keys &&
              (keys == 0 || shared * keys == ranks * k) &&
              (shared == 1 || (heads.K == 1 && ranks % shared == 0)),
          "%s: rows of %d elements for %d ranks; expected %d or %d", op, x.cols, ranks, ranks * q,
          ranks * (q + 2 * k));
    check_tensor(op, "y", y, ranks * x.rows, keys > 0 ? q + 2 * k : q);
    CHECK(format_equal(y.format, x.format), "%s: y is %s, x is %s; expected the same format", op,
          format_name(y.format), format_name(x.format));
    return shared;
}

/* Checks that all ranges lie within the rows of t. */
static void check_ranges(const char *op, const char *name, Tensor t, const RowRange *range,
                         int count)
{
    for (int i = 0; i < count; i++)
        CHECK(range[i].first >= 0 && range[i].count >= 0 &&
                  range[i].count <= t.rows - range[i].first,
              "%s: %d rows from %d on of %s, which has %d", op, range[i].count, range[i].first,
              name, t.rows);
}

size_t check_rows(const char *op, Tensor y, const RowRange *received, Tensor x,
                  const RowRange *sent, int items, Ranks g)
{
    const int own = comm_group_rank(g) * items, count = comm_group_size(g) * items;
    check_plain(op, "y", y);
    check_plain(op, "x", x);
    CHECK(y.data != x.data && y.cols == x.cols && format_equal(y.format, x.format),
          "%s: rows of %d %s to rows of %d %s; expected the same format and width in other memory",
          op, x.cols, format_name(x.format), y.cols, format_name(y.format));
    check_ranges(op, "y", y, received, count);
    check_ranges(op, "x", x, sent, count);
    for (int i = own; i < own + items; i++)
        CHECK(sent[i].count == received[i].count,
              "%s: this rank sends itself %d rows and receives %d", op, sent[i].count,
              received[i].count);
    return (size_t)x.cols * dtype_size(x.format.dtype);
}

static void check_wire_values(const char *op, const char *name, Tensor t)
{
    check_tensor(op, name, t, t.rows, WIRE_VALUES);
    check_plain(op, name, t);
}

void check_wire_encode(Tensor message, Tensor x, Wire w, WireScale s)
{
    const char *op = "wire_encode";
    check_wire_values(op, "x", x);
    check_tensor(op, "message", message, x.rows, (int)(wire_record_bytes(w) / 2));
    CHECK((w == WIRE_FP8_LM) == (s.scale && s.cut), "%s: a scale is %sgiven", op,
          s.scale ? "" : "not ");
}

void check_wire_sum(Tensor y, Tensor x, Tensor messages, int ranks, int own, Wire w)
{
    const char *op = "wire_sum";
    check_wire_values(op, "x", x);
    check_tensor(op, "y", y, x.rows, WIRE_VALUES);
    check_tensor(op, "messages", messages, messages.rows, (int)(wire_record_bytes(w) / 2));
    CHECK(format_equal(y.format, x.format) && own >= 0 && own < ranks && ranks > 1 &&
              messages.rows % (ranks - 1) == 0 && messages.rows / (ranks - 1) >= x.rows,
          "%s: %s from %s, %d records from %d, on rank %d of %d", op, format_name(y.format),
          format_name(x.format), x.rows, messages.rows, own, ranks);
}

void check_comm_alloc(const char *op, size_t bytes, MemoryUse use)
{
    const Ranks g = use == FOR_ACTIVATIONS ? RANKS_TENSOR : RANKS_STAGE;
    double sum = (double)bytes;
    comm_sum_over(&sum, 1, g);
    CHECK(sum == (double)bytes * comm_group_size(g),
          "%s: %zu bytes on this rank, but a mean of %.0f in its group of dimensions %#x; expected "
          "the same on all ranks",
          op, bytes, sum / comm_group_size(g), g);
}

void check_cached(const char *op, Tensor y, Tensor qkv, KvCache cache, Attention a)
{
    CHECK(a.B == 1 && a.T > 0,
          "%s: %d sequences of %d tokens; expected one sequence, because a cache holds one", op,
          a.B, a.T);
    check_heads(op, y, qkv, a);
    check_tensor(op, "the cache's k", cache.k, cache.k.rows, a.K * a.D);
    check_tensor(op, "the cache's v", cache.v, cache.k.rows, a.K * a.D);
    CHECK(cache.length >= 0 && a.T <= cache.k.rows - cache.length,
          "%s: %d tokens after %d; the cache has room for %d", op, a.T, cache.length, cache.k.rows);
    const Format f = qkv.format;
    if (format_has_scales(f) || !format_equal(y.format, f) || !format_equal(cache.k.format, f) ||
        !format_equal(cache.v.format, f))
        die("%s: qkv is %s, y %s and the cache %s; all must be f32 or all bf16", op, format_name(f),
            format_name(y.format), format_name(cache.k.format));
}

bool check_rope(const char *op, Tensor qkv, Tensor qnorm, Tensor knorm, const void *stats,
                Attention a)
{
    CHECK(a.D % 2 == 0 && a.H % a.K == 0, "%s: %d query heads, %d key/value heads of width %d", op,
          a.H, a.K, a.D);
    check_tensor(op, "qkv", qkv, a.B * a.T, (a.H + 2 * a.K) * a.D);
    CHECK(!qnorm.data == !knorm.data,
          "%s: only one of q and k has a norm; expected norms of both or of neither", op);
    if (!qnorm.data)
        return false;
    const bool by_head = a.H > 1 && qnorm.cols == a.D;
    if (!by_head && qnorm.cols != a.H * a.D)
        die("%s: qnorm is (%d, %d); expected (1, %d) for q as a whole or (1, %d) for each head", op,
            qnorm.rows, qnorm.cols, a.H * a.D, a.D);
    check_tensor(op, "qnorm", qnorm, 1, by_head ? a.D : a.H * a.D);
    check_tensor(op, "knorm", knorm, 1, by_head ? a.D : a.K * a.D);
    CHECK(a.norm.kind == RMS_NORM, "%s: QK-norm is RMSNorm only", op);
    CHECK(stats, "%s: QK-norm needs stats", op);
    return by_head;
}

int check_lora_matrix(const char *op, LoraMatrix m, Tensor wide, Tensor xa)
{
    const int P = m.num_projections, r = m.is_b ? m.w.cols : m.w.rows;
    CHECK(P >= 1 && P <= (m.is_b ? LORA_PROJECTIONS : 1), "%s: %s of %d parts", op,
          m.is_b ? "a B" : "an A", P);
    CHECK(r >= 1, "%s: rank %d", op, r);
    check_tensor(op, "xa", xa, wide.rows, P * r);
    check_plain(op, "xa", xa);
    check_plain(op, "w", m.w);
    if (format_has_scales(wide.format) && (!format_is_fp8(wide.format) || wide.format.group))
        die("%s: x is %s; expected f32, bf16 or FP8 with one scale", op, format_name(wide.format));
    CHECK(!wide.channel, "%s: x has column factors; expected none", op);
    if (!m.is_b) {
        check_tensor(op, "A", m.w, r, wide.cols);
        return r;
    }
    int rows = 0, end = 0;
    for (int i = 0; i < P; i++) {
        const int first = m.projection[i].first, width = m.projection[i].width;
        CHECK(first >= end && width >= 1 && width <= wide.cols - first,
              "%s: part %d begins at column %d and has %d columns; expected it to begin at column "
              "%d or later, and to end within %d columns",
              op, i, first, width, end, wide.cols);
        rows += width;
        end = first + width;
    }
    check_tensor(op, "B", m.w, rows, r);
    return r;
}

int check_lora_narrow(Tensor xa, Tensor x, LoraMatrix m)
{
    const char *op = "lora_narrow";
    const int r = check_lora_matrix(op, m, x, xa);
    check_tensor(op, "x", x, x.rows, x.cols);
    CHECK(xa.data != x.data && xa.data != m.w.data, "%s: xa has the memory of an input", op);
    return r;
}

int check_lora_widen(Tensor y, Tensor xa, LoraMatrix m, Tensor add)
{
    const char *op = "lora_widen";
    const int r = check_lora_matrix(op, m, y, xa);
    check_tensor(op, "y", y, y.rows, y.cols);
    check_plain(op, "y", y);
    if (add.data)
        check_tensor(op, "add", add, y.rows, y.cols);
    check_plain(op, "add", add);
    CHECK(y.data != xa.data && y.data != m.w.data, "%s: y has the memory of an input", op);
    return r;
}

int check_lora_dw(LoraMatrix dm, Tensor xa, Tensor x)
{
    const char *op = "lora_dw";
    const int r = check_lora_matrix(op, dm, x, xa);
    check_tensor(op, "x", x, x.rows, x.cols);
    CHECK(dm.w.data != x.data && dm.w.data != xa.data, "%s: dm has the memory of an input", op);
    return r;
}

void check_bf16(const char *op, const char *name, Tensor t)
{
    CHECK(t.format.dtype == BF16, "%s: %s is %s; expected bf16", op, name, format_name(t.format));
}

void check_matmul_scaled(Tensor y, Tensor x, Tensor w, Tensor add)
{
    const char *op = "matmul_scaled";
    check_tensor(op, "x", x, x.rows, x.cols);
    check_tensor(op, "w", w, x.cols, w.cols);
    check_tensor(op, "y", y, x.rows, w.cols);
    check_tensor(op, "add", add, x.rows, w.cols);
    check_bf16(op, "x", x), check_bf16(op, "w", w), check_bf16(op, "y", y),
        check_bf16(op, "add", add);
    CHECK(y.data != x.data && y.data != w.data && y.data != add.data, "%s: y is one of its inputs",
          op);
}

void check_matmul_symmetric(Tensor y, Tensor x, bool columns, Tensor add)
{
    const char *op = "matmul_symmetric";
    check_tensor(op, "x", x, x.rows, x.cols);
    const int rows = columns ? x.cols : x.rows;
    check_tensor(op, "y", y, rows, rows);
    check_bf16(op, "x", x), check_bf16(op, "y", y);
    if (add.data)
        check_tensor(op, "add", add, rows, rows), check_bf16(op, "add", add);
    CHECK(y.data != x.data && y.data != add.data, "%s: y is one of its inputs", op);
}

void check_muon_normalize(Tensor y, Tensor x)
{
    const char *op = "muon_normalize";
    check_tensor(op, "x", x, x.rows, x.cols);
    check_tensor(op, "y", y, x.rows, x.cols);
    check_bf16(op, "x", x), check_bf16(op, "y", y);
}

void check_muon_momentum(Tensor u, Tensor m, Tensor grad)
{
    const char *op = "muon_momentum";
    check_tensor(op, "u", u, 1, u.cols);
    check_tensor(op, "m", m, 1, u.cols);
    check_tensor(op, "grad", grad, 1, u.cols);
    check_plain(op, "grad", grad);
    check_bf16(op, "u", u);
    CHECK(!format_is_dynamic8(m.format) &&
              (!format_is_fp8(m.format) || (m.format.group && u.cols % m.format.group == 0)),
          "%s: m is %s of %d elements; expected f32, bf16, or FP8 in whole groups", op,
          format_name(m.format), u.cols);
    CHECK(!format_has_byte_scales(m.format),
          "%s: m is %s with one byte of scale per group; moments need larger scales "
          "(format_of_moment)",
          op, format_name(m.format));
}

void check_muon_apply(Tensor w, Tensor x)
{
    const char *op = "muon_apply";
    check_tensor(op, "w", w, 1, w.cols);
    check_tensor(op, "x", x, 1, w.cols);
    check_plain(op, "w", w);
    check_bf16(op, "x", x);
}
