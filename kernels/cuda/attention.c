/* Attention by cuDNN's fused kernels; where cuDNN has none (F32, head widths other than 64, 96, 128), by
 * attention_plain.cu. On compute capability 9.0 attention_sm90.cu stands for cuDNN, and what follows is about other GPUs.
 *
 * q, k and v are read where they are, columns of the rows [q | k | v] of width S = (H+2K)D; dq, dk and dv go back
 * into the same places. Deterministic backward stores ds = 2 H T^2 bytes a sequence: where that exceeds DS_BYTES, it
 * runs in parts, over sequences and then over key/value heads.
 *
 * With documents each is a batch entry of its own length, which starts at a "ragged offset" into the packed rows. A launch has
 * thread blocks, and backward a ds, for the longest that its plan allows, so documents of about one length run together. To need
 * few plans, their greatest lengths are powers of two and their number is padded with empty ones.
 * NOTE: there backward wants q, k, v, dq, dk and dv in buffers of their own, as (N, heads, D). The copies of q, k and
 * v are made in the memory of dqkv, where the gradients come later: that takes one buffer of (N, S), not two. */
#include "kernels/cuda/attention.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>

/* NOTE: parts cost time: in four of 512 MiB Llama-2-7B's backward, of 8 sequences of 2048 tokens, reaches 347 TFLOP/s
 * on an H200, a sixth less than cuDNN's deterministic plans do on longer launches. */
static const int64_t DS_BYTES = (int64_t)1 << 30;
enum { MOST_DOCUMENTS = 256, LEAST_LENGTH = 128 };  /* of a launch, after padding */
enum { SHORT = 512 };                               /* documents of up to so many tokens run together */

static void check_attention(const char *op, Attention a, Documents docs)
{
    CHECK(a.H % a.K == 0, "%s: %d query heads, %d key/value heads", op, a.H, a.K);
    CHECK(a.window >= 0, "%s: a window of %d keys", op, a.window);
    CHECK(docs.count == 0 || (docs.longest > 0 && docs.longest <= a.T), "%s: a document of %d tokens in sequences "
          "of %d", op, docs.longest, a.T);
}

/* A window that leaves no key out is none: it needs no plan of its own and changes no bit. */
static int window_of(Attention a, Documents docs)
{
    return a.window < (docs.count ? docs.longest : a.T) ? a.window : 0;
}

static bool has_cudnn(Tensor y, Tensor qkv, Attention a)
{
    return qkv.format.dtype == BF16 && y.format.dtype == BF16 && (a.D == 64 || a.D == 96 || a.D == 128);
}

static void *at(const void *bf16_data, int64_t element)
{
    return (uint16_t *)bf16_data + element;
}

/* Where q, k, v and their gradients begin, and elements from token to token. */
typedef struct { void *q, *k, *v; int64_t q_width, kv_width; } Heads;

/* What a call works on. Forward has no dy and no grad. */
typedef struct {
    void *y, *dy;
    float *lse;
    Heads in, grad;
    Attention a;
} Job;

static int64_t elements_per_token(Attention a)
{
    return (int64_t)(a.H + 2 * a.K) * a.D;
}

/* Rows [q | k | v] as they are. */
static Heads packed(Attention a, void *rows)
{
    const int64_t q = (int64_t)a.H * a.D, k = (int64_t)a.K * a.D, width = elements_per_token(a);
    return (Heads){ rows, at(rows, q), at(rows, q + k), width, width };
}

/* (N, H, D), (N, K, D), (N, K, D), one behind the other. */
static Heads separate(Attention a, void *memory)
{
    const int64_t N = (int64_t)a.B * a.T, q = (int64_t)a.H * a.D, k = (int64_t)a.K * a.D;
    return (Heads){ memory, at(memory, N * q), at(memory, N * (q + k)), q, k };
}

static AttentionKey key_of(const Job *j)
{
    return (AttentionKey){ .backward = j->dy != NULL, .D = j->a.D, .all_H = j->a.H, .q_width = j->in.q_width,
                           .kv_width = j->in.kv_width, .window = j->a.window };
}

/* Sequences from b, or with tables of `width` some documents; key/value heads from kv. */
static void run_part(const Job *j, const AttentionPlan *plan, int64_t b, int64_t kv, int *tables, int width)
{
    const int64_t T = j->a.T, H = j->a.H, D = j->a.D, h = kv * (H / j->a.K);
    const int64_t q = b * T * j->in.q_width + h * D, k = b * T * j->in.kv_width + kv * D, y = (b * T * H + h) * D;
    float scale = j->a.scale, minus_infinity = -INFINITY, one = 1, window = (float)j->a.window;
    void *memory[ATT_NAMES] = {
        [ATT_Q] = at(j->in.q, q), [ATT_K] = at(j->in.k, k), [ATT_V] = at(j->in.v, k), [ATT_Y] = at(j->y, y),
        [ATT_LSE] = j->lse + (tables ? h : (b * H + h) * T), [ATT_SCALE] = &scale, [ATT_MINUS_INFINITY] = &minus_infinity,
    };
    if (j->dy) {
        memory[ATT_ONE] = &one;
        memory[ATT_DY] = at(j->dy, y);
        memory[ATT_DQ] = at(j->grad.q, q);
        memory[ATT_DK] = at(j->grad.k, k);
        memory[ATT_DV] = at(j->grad.v, k);
    }
    if (j->a.window)
        memory[ATT_WINDOW] = &window;
    if (tables) {
        memory[ATT_QUERIES] = memory[ATT_KEYS] = tables;
        memory[ATT_Q_AT] = tables + width;
        memory[ATT_K_AT] = memory[ATT_V_AT] = tables + 2 * width;
        memory[ATT_Y_AT] = tables + 3 * width;
        memory[ATT_LSE_AT] = tables + 4 * width;
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

/* The same of the key/value heads, `bytes` each, where parts of lse must stay 16-byte aligned; the smallest if none fits. */
static int64_t part_of_heads(Attention a, int64_t bytes)
{
    int64_t part = a.K;
    for (int64_t d = a.K; d >= 1 && part * bytes > DS_BYTES; d--)
        if (a.K % d == 0 && d * (a.H / a.K) % 4 == 0)
            part = d;
    return part;
}

static void run_sequences(const Job *j)
{
    const Attention a = j->a;
    const int64_t ds = 2 * (int64_t)a.T * a.T * a.H;
    int64_t sequences = a.B, heads = a.K;
    if (j->dy && a.T % 4 == 0) {             /* parts of lse must stay 16-byte aligned */
        sequences = largest_part(a.B, ds);
        heads = sequences == 1 ? largest_part(a.K, ds / a.K) : a.K;
    }
    AttentionKey key = key_of(j);
    key.B = sequences, key.T = a.T, key.H = heads * (a.H / a.K), key.K = heads;
    const AttentionPlan *plan = attention_plan(key);
    for (int64_t b = 0; b < a.B; b += sequences)
        for (int64_t kv = 0; kv < a.K; kv += heads)
            run_part(j, plan, b, kv, NULL, 0);
}

/* ---- documents --------------------------------------------------------------------------------------------- */

/* The least length of a plan that has room for documents of `tokens` tokens. */
static int padded_length(int tokens)
{
    int length = LEAST_LENGTH;
    while (length < tokens)
        length *= 2;
    return length;
}

static int smaller(int a, int b)
{
    return a < b ? a : b;
}

/* How many documents of up to `longest` tokens a launch has. */
static int documents_per_launch(const Job *j, int longest, int count)
{
    const int64_t ds = 2 * (int64_t)longest * longest * j->a.H;
    int n = MOST_DOCUMENTS;
    while (j->dy && n > 1 && n * ds > DS_BYTES)
        n /= 2;
    while (n / 4 >= count)
        n /= 4;
    return n;
}

/* The tables of a launch: lengths, then where each document begins in q (and dq), k (and v, dk, dv), y (and dy) and lse, in
 * elements. Those that it lacks are empty documents at the end of the batch; offsets have an end. */
static void fill_tables(int *table, int width, const Job *j, const int *start, const int *document, int count)
{
    const Attention a = j->a;
    const int stride[] = { (int)j->in.q_width, (int)j->in.kv_width, a.H * a.D, a.H };
    for (int i = 0; i < width; i++) {
        const int first = i < count ? start[document[i]] : a.B * a.T;
        table[i] = i < count ? start[document[i] + 1] - first : 0;
        for (int t = 0; t < 4; t++)
            table[(t + 1) * width + i] = first * stride[t];
    }
}

/* `count` documents of up to `longest` tokens, of which document[] has the numbers. */
static void run_length(const Job *j, const int *start, const int *document, int count, int longest)
{
    const Attention a = j->a;
    const int per_launch = documents_per_launch(j, longest, count), launches = (count + per_launch - 1) / per_launch;
    const int64_t ds = 2 * (int64_t)longest * longest * a.H;
    const int64_t heads = j->dy && per_launch == 1 ? part_of_heads(a, ds / a.K) : a.K;
    const int width = (per_launch + 1 + 3) / 4 * 4;                     /* tables are 16-byte aligned */
    const size_t launch = 5 * (size_t)width, bytes = launch * (size_t)launches * sizeof(int);
    int *host = xmalloc(bytes), *tables = device_scratch(bytes, SCRATCH_DOCUMENTS);
    for (int i = 0; i < launches; i++)
        fill_tables(host + i * launch, width, j, start, document + i * per_launch,
                    smaller(per_launch, count - i * per_launch));
    device_put(tables, host, bytes);
    free(host);

    AttentionKey key = key_of(j);
    key.B = per_launch, key.T = longest, key.H = heads * (a.H / a.K), key.K = heads, key.tokens = (int64_t)a.B * a.T;
    const AttentionPlan *plan = attention_plan(key);
    for (int i = 0; i < launches; i++)
        for (int64_t kv = 0; kv < a.K; kv += heads)
            run_part(j, plan, 0, kv, tables + i * launch, width);
}

static void run_documents(const Job *j, Documents docs)
{
    const Attention a = j->a;
    const int64_t tokens = (int64_t)a.B * a.T;
    if (tokens * elements_per_token(a) > INT_MAX)
        die("attention with documents: %lld tokens of %lld elements exceed cuDNN's 32-bit offsets; "
            "reduce device_train_microbatch_size", (long long)tokens, (long long)elements_per_token(a));

    const int most = (a.T + LEAST_LENGTH - 1) / LEAST_LENGTH * LEAST_LENGTH;
    int *document = xmalloc(sizeof *document * (size_t)docs.count);
    int shorter = 0, longest = smaller(SHORT, padded_length(docs.longest));
    for (; shorter < docs.longest; shorter = longest, longest *= 2) {
        int count = 0;
        for (int i = 0; i < docs.count; i++) {
            const int length = docs.host_start[i + 1] - docs.host_start[i];
            if (length > shorter && length <= longest)
                document[count++] = i;
        }
        Job part = *j;
        part.a.window = a.window < longest ? a.window : 0;      /* as window_of */
        if (count)
            run_length(&part, docs.host_start, document, count, smaller(longest, most));
    }
    free(document);
}

static void copy_columns(void *to, int64_t to_width, const void *from, int64_t from_width, int64_t columns,
                         int64_t tokens)
{
    const size_t element = sizeof(uint16_t);
    CUDA_CHECK(cudaMemcpy2DAsync(to, (size_t)to_width * element, from, (size_t)from_width * element,
                                 (size_t)columns * element, (size_t)tokens, cudaMemcpyDeviceToDevice,
                                 device_stream()));
}

static void copy_heads(Heads to, Heads from, Attention a)
{
    const int64_t N = (int64_t)a.B * a.T, q = (int64_t)a.H * a.D, k = (int64_t)a.K * a.D;
    copy_columns(to.q, to.q_width, from.q, from.q_width, q, N);
    copy_columns(to.k, to.kv_width, from.k, from.kv_width, k, N);
    copy_columns(to.v, to.kv_width, from.v, from.kv_width, k, N);
}

static void run_documents_backward(Job j, Documents docs)
{
    const Heads qkv = j.in, dqkv = j.grad;
    const size_t numel = (size_t)j.a.B * (size_t)j.a.T * (size_t)elements_per_token(j.a);
    j.in = separate(j.a, dqkv.q);
    j.grad = separate(j.a, device_scratch(numel * sizeof(uint16_t), SCRATCH_ATTENTION_DQKV));
    copy_heads(j.in, qkv, j.a);
    run_documents(&j, docs);
    copy_heads(dqkv, j.grad, j.a);
}

/* ---- the operations ---------------------------------------------------------------------------------------- */

void attention_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs)
{
    check_attention(__func__, a, docs);
    CHECK_TENSOR(qkv, a.B * a.T, (a.H + 2 * a.K) * a.D);
    CHECK_TENSOR(y, a.B * a.T, a.H * a.D);
    a.window = window_of(a, docs);
    if (!has_cudnn(y, qkv, a)) {
        attention_plain_forward(y, lse, qkv, a, docs);
        return;
    }
    if (runs_on_hopper()) {
        attention_sm90_forward(y, lse, qkv, a, docs);
        return;
    }
    const Job j = { .y = y.data, .lse = lse, .in = packed(a, qkv.data), .a = a };
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
    a.window = window_of(a, docs);
    if (!has_cudnn(y, qkv, a)) {
        attention_plain_backward(dqkv, dy, qkv, y, lse, a, docs);
        return;
    }
    if (runs_on_hopper()) {
        attention_sm90_backward(dqkv, dy, qkv, y, lse, a, docs);
        return;
    }
    const Job j = { .y = y.data, .dy = dy.data, .lse = (float *)lse, .in = packed(a, qkv.data),
                    .grad = packed(a, dqkv.data), .a = a };
    if (docs.count)
        run_documents_backward(j, docs);
    else
        run_sequences(&j);
}
