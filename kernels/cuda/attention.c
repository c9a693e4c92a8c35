/* Attention by cuDNN's fused kernels; where cuDNN has none (F32, head widths other than 64, 96, 128), by
 * attention_plain.cu.
 *
 * q, k and v are read where they are, columns of the rows [q | k | v] of width S = (H+2K)D; dq, dk and dv go back
 * into the same places. Deterministic backward stores ds = 2 H T^2 bytes a sequence: where that exceeds DS_BYTES, it
 * runs in parts, over sequences and then over key/value heads.
 *
 * With documents each is a batch entry of its own length, which starts at a "ragged offset" into the packed rows. To
 * need few plans, the number of documents is padded to a power of two with empty ones, the greatest length too.
 * NOTE: with ragged offsets dk and dv need buffers of their own; they are copied into the rows of dqkv afterwards. */
#include "kernels/cuda/attention.h"

#include <limits.h>
#include <math.h>

static const int64_t DS_BYTES = (int64_t)512 << 20;
enum { FEWEST_DOCUMENTS = 8, MOST_DOCUMENTS = 256, SHORTEST_DOCUMENT = 128 };     /* of a launch, after padding */

static void check_attention(const char *op, Attention a, Documents docs)
{
    CHECK(a.H / a.K * a.K == a.H, "%s: %d query heads, %d key/value heads", op, a.H, a.K);
    CHECK(docs.count == 0 || (docs.longest > 0 && docs.longest <= a.T), "%s: a document of %d tokens in sequences "
          "of %d", op, docs.longest, a.T);
}

static bool has_cudnn(Tensor y, Tensor qkv, Attention a)
{
    return qkv.format.dtype == BF16 && y.format.dtype == BF16 && (a.D == 64 || a.D == 96 || a.D == 128);
}

static void *at(const void *bf16_data, int64_t element)
{
    return (uint16_t *)bf16_data + element;
}

/* One part of the batch: sequences from b, key/value heads from kv; or, with tables, some documents. */
typedef struct {
    Tensor y, qkv, dy, dqkv;        /* of forward: y, qkv */
    float *lse;
    void *dk, *dv;                  /* documents: (N, K, D) */
    Attention a;
} Job;

static void run_part(const Job *j, const AttentionPlan *plan, int64_t b, int64_t kv, int *tables, int width)
{
    const Attention a = j->a;
    const int64_t H = a.H, K = a.K, D = a.D, h = kv * (H / K);
    const int64_t row = b * a.T * (H + 2 * K) * D, q = row + h * D, k = row + (H + kv) * D, v = k + K * D;
    const int64_t y = b * a.T * H * D + h * D;
    float scale = a.scale, minus_infinity = -INFINITY, one = 1;
    void *memory[ATT_NAMES] = {
        [ATT_Q] = at(j->qkv.data, q), [ATT_K] = at(j->qkv.data, k), [ATT_V] = at(j->qkv.data, v),
        [ATT_Y] = at(j->y.data, y), [ATT_LSE] = j->lse + (b * H + h) * a.T,
        [ATT_SCALE] = &scale, [ATT_MINUS_INFINITY] = &minus_infinity,
    };
    if (j->dqkv.data) {
        memory[ATT_ONE] = &one;
        memory[ATT_DY] = at(j->dy.data, y);
        memory[ATT_DQ] = at(j->dqkv.data, q);
        memory[ATT_DK] = tables ? j->dk : at(j->dqkv.data, k);
        memory[ATT_DV] = tables ? j->dv : at(j->dqkv.data, v);
    }
    if (tables) {
        memory[ATT_LENGTHS] = tables;
        memory[ATT_ROWS_AT] = tables + width;
        memory[ATT_Y_AT] = tables + 2 * width;
        memory[ATT_LSE_AT] = tables + 3 * width;
        if (j->dqkv.data)
            memory[ATT_DKV_AT] = tables + 4 * width;
    }
    attention_run(plan, memory);
}

/* ---- sequences --------------------------------------------------------------------------------------------- */

/* The largest divisor d of n for which d * bytes fits into DS_BYTES; 1 if none does. */
static int64_t largest_part(int64_t n, int64_t bytes)
{
    int64_t d = n;
    while (d > 1 && (n % d || d * bytes > DS_BYTES))
        d--;
    return d;
}

static void run_sequences(const Job *j)
{
    const Attention a = j->a;
    const bool backward = j->dqkv.data;
    const int64_t ds = 2 * (int64_t)a.T * a.T * a.H;
    int64_t sequences = a.B, heads = a.K;
    if (backward && ATTENTION_DETERMINISTIC && a.T % 4 == 0) {          /* parts of lse must stay 16-byte aligned */
        sequences = largest_part(a.B, ds);
        heads = sequences == 1 ? largest_part(a.K, ds / a.K) : a.K;
    }
    const AttentionPlan *plan = attention_plan((AttentionKey){
        .backward = backward, .B = sequences, .T = a.T, .H = heads * (a.H / a.K), .K = heads, .D = a.D,
        .all_H = a.H, .all_K = a.K });
    for (int64_t b = 0; b < a.B; b += sequences)
        for (int64_t kv = 0; kv < a.K; kv += heads)
            run_part(j, plan, b, kv, NULL, 0);
}

/* ---- documents --------------------------------------------------------------------------------------------- */

static int power_of_two(int at_least)
{
    int p = 1;
    while (p < at_least)
        p *= 2;
    return p;
}

static int larger(int a, int b)
{
    return a > b ? a : b;
}

static int smaller(int a, int b)
{
    return a < b ? a : b;
}

static void run_documents(const Job *j, Documents docs)
{
    const Attention a = j->a;
    const bool backward = j->dqkv.data;
    const int longest = smaller(power_of_two(larger(docs.longest, SHORTEST_DOCUMENT)), a.T);
    const int64_t ds = 2 * (int64_t)longest * longest * a.H, tokens = (int64_t)a.B * a.T;
    const AttentionStrides strides = { (a.H + 2 * a.K) * a.D, a.H * a.D, a.H, a.K * a.D };
    if (tokens * strides.qkv > INT_MAX)
        die("attention with documents: %lld tokens of %d elements exceed cuDNN's 32-bit offsets; "
            "reduce device_train_microbatch_size", (long long)tokens, strides.qkv);

    int per_launch = smaller(power_of_two(larger(docs.count, FEWEST_DOCUMENTS)), MOST_DOCUMENTS);
    while (backward && ATTENTION_DETERMINISTIC && per_launch > 1 && per_launch * ds > DS_BYTES)
        per_launch /= 2;
    const int launches = (int)ceil_div((size_t)docs.count, (size_t)per_launch);
    const int width = (per_launch + 1 + 3) / 4 * 4;                     /* tables are 16-byte aligned */
    int *tables = device_scratch((size_t)launches * 5 * (size_t)width * sizeof *tables, SCRATCH_DOCUMENTS);
    attention_tables(tables, docs, launches, per_launch, width, strides);

    const AttentionPlan *plan = attention_plan((AttentionKey){
        .backward = backward, .B = per_launch, .T = longest, .H = a.H, .K = a.K, .D = a.D,
        .all_H = a.H, .all_K = a.K, .tokens = tokens });
    for (int i = 0; i < launches; i++)
        run_part(j, plan, 0, 0, tables + (size_t)i * 5 * (size_t)width, width);
}

/* dk or dv (N, K D) into columns of dqkv. */
static void copy_columns(const Job *j, int first_head, const void *from)
{
    const size_t width = (size_t)j->a.K * (size_t)j->a.D * sizeof(uint16_t);
    const size_t pitch = (size_t)j->dqkv.cols * sizeof(uint16_t);
    CUDA_CHECK(cudaMemcpy2DAsync(at(j->dqkv.data, (int64_t)first_head * j->a.D), pitch, from, width, width,
                                 (size_t)j->dqkv.rows, cudaMemcpyDeviceToDevice, device_stream()));
}

/* ---- the operations ---------------------------------------------------------------------------------------- */

void attention_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs)
{
    check_attention(__func__, a, docs);
    CHECK_TENSOR(qkv, a.B * a.T, (a.H + 2 * a.K) * a.D);
    CHECK_TENSOR(y, a.B * a.T, a.H * a.D);
    if (!has_cudnn(y, qkv, a)) {
        attention_plain_forward(y, lse, qkv, a, docs);
        return;
    }
    const Job j = { .y = y, .qkv = qkv, .lse = lse, .a = a };
    if (docs.count)
        run_documents(&j, docs);
    else
        run_sequences(&j);
}

void attention_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse, Attention a, Documents docs)
{
    check_attention(__func__, a, docs);
    CHECK_TENSOR(qkv, a.B * a.T, (a.H + 2 * a.K) * a.D);
    CHECK_TENSOR(y, a.B * a.T, a.H * a.D);
    CHECK_TENSOR(dqkv, a.B * a.T, (a.H + 2 * a.K) * a.D);
    CHECK_TENSOR(dy, a.B * a.T, a.H * a.D);
    CHECK(dqkv.data != qkv.data, "dqkv is written before qkv is read");
    if (!format_equal(dqkv.format, qkv.format) || !format_equal(dy.format, y.format))
        die("attention_backward: qkv is %s and dqkv %s, y is %s and dy %s; each pair must have one format",
            format_name(qkv.format), format_name(dqkv.format), format_name(y.format), format_name(dy.format));
    if (!has_cudnn(y, qkv, a)) {
        attention_plain_backward(dqkv, dy, qkv, y, lse, a, docs);
        return;
    }
    Job j = { .y = y, .qkv = qkv, .dy = dy, .dqkv = dqkv, .lse = (float *)lse, .a = a };
    if (!docs.count) {
        run_sequences(&j);
        return;
    }
    const size_t bytes = (size_t)a.B * (size_t)a.T * (size_t)a.K * (size_t)a.D * sizeof(uint16_t);
    j.dk = device_scratch(2 * bytes, SCRATCH_ATTENTION_DKV);
    j.dv = (char *)j.dk + bytes;
    run_documents(&j, docs);
    copy_columns(&j, a.H, j.dk);
    copy_columns(&j, a.H + a.K, j.dv);
}
