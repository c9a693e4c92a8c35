/* Times the products of adapters, separately and fused into operations. */
#pragma once
#include "tests/bench_tensors.h"

static const char *lora_label(const char *layer, const char *operation)
{
    static char label[64];
    snprintf(label, sizeof label, "lora %s: %s", layer, operation);
    return label;
}

/* A linear layer of `parts` equal parts with an adapter of rank 16 on each: x (N,C) in E4M3, dy
 * (N,O) in E5M2, the rest in BF16. Reads of the narrow tensors are small and not counted. */
static void bench_lora_layer(const char *name, int N, int C, int O, int parts)
{
    enum { RANK = 16 };
    const double n = (double)N * C, o = (double)N * O;
    LoraMatrix a = { .w = make_normal(BF16_, parts * RANK, C, 1), .num_projections = 1 };
    LoraMatrix b = { .w = make_normal(BF16_, O, RANK, 1), .is_b = true, .num_projections = parts };
    for (int i = 0; i < parts; i++)
        b.projection[i].first = O / parts * i, b.projection[i].width = O / parts;
    LoraMatrix da = a, db = b;
    da.w = make_normal(BF16_, parts * RANK, C, 1), db.w = make_normal(BF16_, O, RANK, 1);
    Tensor dense = make_normal(BF16_, N, C > O ? C : O, 1), x = make(E4M3_, N, C),
           dy = make(E5M2_, N, O);
    Tensor xa = make(BF16_, N, parts * RANK), y = make(BF16_, N, O), dx = make(BF16_, N, C);
    dense.cols = C, quantize(x, dense);
    dense.cols = O, quantize(dy, dense);
    TIME_BYTES(lora_label(name, "narrow(x, A) FP8"), n, lora_narrow(xa, x, a, 0.01f));
    TIME_BYTES(lora_label(name, "widen(xa, B)"), 2 * o, lora_widen(y, xa, b, NONE));
    TIME_BYTES(lora_label(name, "widen(xa, B, add)"), 4 * o, lora_widen(y, xa, b, dense));
    TIME_BYTES(lora_label(name, "narrow(dy, B) FP8"), o, lora_narrow(xa, dy, b, 0.01f));
    TIME_BYTES(lora_label(name, "narrow(dy, B) bf16"), 2 * o, lora_narrow(xa, dense, b, 0.01f));
    TIME_BYTES(lora_label(name, "widen(dxa, A)"), 2 * n, lora_widen(dx, xa, a, NONE));
    TIME_BYTES(lora_label(name, "dB, dy FP8"), o, lora_dw(db, xa, dy));
    TIME_BYTES(lora_label(name, "dB, dy bf16"), 2 * o, lora_dw(db, xa, dense));
    TIME_BYTES(lora_label(name, "dA, x FP8"), n, lora_dw(da, xa, x));
    release();
}

/* Makes an adapter's product of rank 16 for the columns of up to three consecutive parts. */
static LoraProduct make_product(int N, int parts, const int *width)
{
    enum { RANK = 16 };
    LoraProduct p = { make_normal(BF16_, N, parts * RANK, 0.01f),
                      { .is_b = true, .num_projections = parts } };
    int rows = 0;
    for (int i = 0; i < parts; rows += width[i++])
        p.m.projection[i].first = rows, p.m.projection[i].width = width[i];
    p.m.w = make_normal(BF16_, rows, RANK, 1);
    return p;
}

/* Times operations that add an adapter's product when they load their input. The variants in bf16
 * work in place. */
static void bench_lora_added(const Model *m)
{
    const int N = m->B * m->T, F = m->F, q = m->H * m->D, k = m->K * m->D, S = q + 2 * k;
    const double f = (double)N * F, s = (double)N * S;
    LoraProduct product = make_product(N, 2, (int[]){ F, F });
    Tensor wide = make_normal(BF16_, N, 2 * F, 1), gate_up = make(E4M3_16, N, 2 * F);
    Tensor codes = make(E4M3_, N, F), act = make(BF16_, N, F);
    TIME_BYTES("lora: swiglu_forward adds, gate_up and act", (4 + 2.125 + 4 + 1) * f,
               swiglu_forward(codes, gate_up, wide, product, FROM_EXACT));
    Tensor dact = make_normal(BF16_, N, F, 1), dwide = make(E5M2_, N, 2 * F),
           dense = make(BF16_, N, 2 * F);
    const LoraProduct back = { make_normal(BF16_, N, 16, 0.01f),
                               { .w = make_normal(BF16_, 16, F, 1), .num_projections = 1 } };
    TIME_BYTES("lora: swiglu_backward adds, FP8 and act", (4.125 + 4.125 + 3) * f,
               swiglu_backward(dwide, codes, dact, back, gate_up));
    Tensor codes_kept = with_range(codes), dwide_kept = with_range(dwide);
    TIME_IN_RANGE("in range: swiglu_forward adds", (4 + 2.125 + 1) * f,
                  swiglu_forward(codes_kept, gate_up, wide, product, FROM_EXACT));
    TIME_IN_RANGE("in range: swiglu_backward adds, act", (4.125 + 3) * f,
                  swiglu_backward(dwide_kept, codes, dact, back, gate_up));
    TIME_BYTES("lora: swiglu_backward, FP8 and act", (4.125 + 4.125 + 3) * f,
               swiglu_backward(dwide, codes, dact, NO_PRODUCT, gate_up));
    TIME_BYTES("lora: swiglu_backward adds, bf16", 10 * f,
               swiglu_backward(dense, NONE, dact, back, wide));
    TIME_BYTES("lora: swiglu_forward adds, bf16", 10 * f,
               swiglu_forward(act, wide, wide, product, FROM_SAVED));
    release();
    const Attention a = attention_of(m);
    Tensor qkv = make_normal(BF16_, N, S, 1), saved = make(E4M3_16, N, S);
    product = make_product(N, 3, (int[]){ q, k, k });
    TIME_BYTES("lora: rope_forward adds, qkv saved", 5.0625 * s,
               rope_forward(qkv, saved, NULL, qkv, product, NONE, NONE, a, FROM_EXACT));
    TIME_BYTES("lora: rope_forward adds, bf16", 4 * s,
               rope_forward(qkv, qkv, NULL, qkv, product, NONE, NONE, a, FROM_SAVED));
    release();
}

static void bench_lora(const Model *m)
{
    const int N = m->B * m->T, q = m->H * m->D;
    if (m->K == m->H)
        bench_lora_layer("qkv", N, m->C, 3 * q, 3);
    bench_lora_layer("out", N, q, m->C, 1);
    bench_lora_layer("gate_up", N, m->C, 2 * m->F, 2);
    bench_lora_layer("down", N, m->F, m->C, 1);
    bench_lora_added(m);
}
