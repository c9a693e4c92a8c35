/* Times attention over whole sequences and over documents, and the decoding of one token. */
#pragma once
#include "tests/bench_tensors.h"

static struct {
    void (*forward)(Tensor, float *, Tensor, Attention, Documents);
    void (*backward)(Tensor, Tensor, Tensor, Tensor, const float *, Attention, Documents);
} attention = { attention_forward, attention_backward };

/* Used only to time attention with a window of 4096 keys. */
static Model sliding = { "Olmo-3-7B", 1, 8192, 4096, 32, 32, 128 };

/* Counts the FLOPs of the causal half of the T x T scores. With a window, counts only the scores
 * inside the window: a query sees `window` keys, and the first queries see fewer. */
static inline void bench_attention(const Model *m, int window, double times)
{
    char forward[64] = "attention_forward", backward[64] = "attention_backward";
    const int N = m->B * m->T, S = (m->H + 2 * m->K) * m->D, q = m->H * m->D;
    const double T = m->T, keys = window ? window * (2 * T - window) : T * T,
                 flops = 2.0 * m->B * m->H * keys * m->D;
    Attention a = attention_of(m);
    const Documents whole = { 0 };
    Tensor qkv = make_normal(BF16_, N, S, 1), dqkv = make(BF16_, N, S);
    Tensor y = make(BF16_, N, q), dy = make_normal(BF16_, N, q, 1);
    float *lse = hold((size_t)N * (size_t)m->H * sizeof *lse);
    a.window = window;
    if (window) {
        snprintf(forward, sizeof forward, "attention_forward, window %d of %d", window, m->T);
        snprintf(backward, sizeof backward, "attention_backward, window %d of %d", window, m->T);
    }
    TIME_FLOPS(forward, flops, attention.forward(y, lse, qkv, a, whole));
    in_step(ATTENTION, times);
    TIME_FLOPS(backward, 2.5 * flops, attention.backward(dqkv, dy, qkv, y, lse, a, whole));
    in_step(ATTENTION, times);
    release();
}

/* Times documents of the lengths that packed conversations have: 700 tokens on average, most of
 * them shorter, a few much longer [350 - 350 ln u, u uniform in (0, 1)]. */
static inline void bench_documents(const Model *m, int B, int T)
{
    const int N = B * T, S = (m->H + 2 * m->K) * m->D, q = m->H * m->D;
    int *start = calloc((size_t)N + 1, sizeof *start);
    Documents docs = { .host_start = start, .start = hold(((size_t)N + 1) * sizeof *start) };
    double flops = 0;
    for (int n = 0, i = 0; n < N; i++) {
        const int left = T - n % T,
                  drawn = 350 + (int)(-350 * log((double)(1 + random_16(7, (uint64_t)i)) / 65536));
        const int length = drawn < left ? drawn : left;
        start[docs.count++] = n;
        docs.longest = length > docs.longest ? length : docs.longest;
        flops += 2.0 * m->H * length * length * m->D;
        n += length;
    }
    start[docs.count] = N;
    device_put((int *)docs.start, start, sizeof *start * ((size_t)docs.count + 1));
    Attention a = {
        .B = B, .T = T, .H = m->H, .K = m->K, .D = m->D, .scale = 1 / sqrtf((float)m->D)
    };
    Tensor qkv = make_normal(BF16_, N, S, 1), dqkv = make(BF16_, N, S), y = make(BF16_, N, q),
           dy = make_normal(BF16_, N, q, 1);
    float *lse = hold((size_t)N * (size_t)m->H * sizeof *lse);
    char label[64];
    snprintf(label, sizeof label, "attention_forward, %d documents", docs.count);
    TIME_FLOPS(label, flops, attention.forward(y, lse, qkv, a, docs));
    snprintf(label, sizeof label, "attention_backward, %d documents", docs.count);
    TIME_FLOPS(label, 2.5 * flops, attention.backward(dqkv, dy, qkv, y, lse, a, docs));
    release();
    free(start);
}

/* Times the decoding of one token, which reads each matrix once, and all keys and values of the 2 T
 * tokens before this token. Several matrices alternate, so that none is read from the L2 cache. */
static inline void bench_decoding(const Model *m)
{
    enum { TURNS = 4 };
    const int S = (m->H + 2 * m->K) * m->D, q = m->H * m->D, past = 2 * m->T;
    const struct {
        const char *name;
        int O, C;
    } linear[] = {
        { "qkv", S, m->C },     { "out", m->C, q },     { "gate_up", 2 * m->F, m->C },
        { "down", m->C, m->F }, { "head", m->V, m->C },
    };
    for (int i = 0; i < 5; i++) {
        char label[64];
        const int O = linear[i].O, C = linear[i].C;
        int n = 0;
        Tensor x = make_normal(BF16_, 1, C, 1), w = make_normal(BF16_, TURNS * O, C, 0.02f),
               y = make_normal(BF16_, 1, O, 1);
        snprintf(label, sizeof label, "matmul    one row, %s (%d,%d)", linear[i].name, O, C);
        TIME_BYTES(label, 2.0 * O * C, matmul(y, x, tensor_rows(w, n++ % TURNS * O, O), y));
        release();
    }
    Attention a = attention_of(m);
    const KvCache cache = { .k = make_normal(BF16_, past + 1, m->K * m->D, 1),
                            .v = make_normal(BF16_, past + 1, m->K * m->D, 1),
                            .length = past };
    Tensor qkv = make_normal(BF16_, 1, S, 1), y = make(BF16_, 1, q);
    a.B = a.T = 1;
    TIME_BYTES("attention_cached, one token", 4.0 * past * m->K * m->D,
               attention_cached(y, qkv, cache, a));
    release();
}
