/* Times the operations of experts. FLOPs and bytes count the assignments, without padding. */
#pragma once
#include "kernels/experts.h"
#include "tests/bench_tensors.h"

/* N tokens of width C; E experts of width F; k experts for each token */
typedef struct {
    int N, C, E, F, k;
} ExpertShape;

static const char *experts_label(const ExpertShape *s, const char *text, const char *loads)
{
    static char label[96];
    snprintf(label, sizeof label, "experts %dx%d %s%s%s", s->E, s->F, text, loads ? ", " : "",
             loads ? loads : "");
    return label;
}

/* Logits from which each expert gets the same number of tokens or, if `skewed`, expert i is chosen
 * with odds 1/(i+8): the logarithm of the odds plus Gumbel noise [Kool et al. 2019, arXiv
 * 1903.06059]. */
static Tensor make_router_logits(const ExpertShape *s, bool skewed)
{
    Tensor t = make(F32_, s->N, s->E);
    float *x = malloc(tensor_bytes(t));
    for (int i = 0; i < s->N * s->E; i++) {
        const int n = i / s->E, e = i % s->E;
        const double u = ((double)(random_bits(5, (uint64_t)i) >> 11) + 0.5) * 0x1p-53;
        x[i] = skewed ? (float)(-log(e + 8) - log(-log(u)))
                      : (float)-((e - n * s->k % s->E + s->E) % s->E);
    }
    device_put(t.data, x, tensor_bytes(t));
    free(x);
    return t;
}

static Routing make_bench_routing(const ExpertShape *s)
{
    const size_t n = (size_t)(s->N * s->k), rows = (size_t)routing_rows(s->N, s->E, s->k);
    return (Routing){ .tokens = s->N,
                      .experts = s->E,
                      .top_k = s->k,
                      .expert = hold(n * sizeof(int)),
                      .weight = hold(n * sizeof(float)),
                      .row = hold(n * sizeof(int)),
                      .assignment = hold(rows * sizeof(int)),
                      .first = hold(((size_t)s->E + 1) * sizeof(int)) };
}

/* ---- GEMMs ----------------------------------------------------------------------------------- */

/* The matrices (O,C) of E experts, all with the same values. */
static Tensor make_matrices(Format f, int E, int O, int C)
{
    Tensor w = format_is_fp8(f) ? make_operand(f, E * O, C) : make(f, E * O, C),
           source = make_normal(BF16_, O, C, 0.02f);
    if (format_is_fp8(f))
        w.scale = hold(sizeof(float) * SCALE_FLOATS * (size_t)E);
    for (int e = 0; e < E; e++) {
        const size_t first = (size_t)e * (size_t)O * (size_t)C;
        Tensor own = w;
        own.rows = O;
        own.data = (char *)w.data + first * dtype_size(f.dtype);
        if (format_is_fp8(f)) {
            own.data_t = (char *)w.data_t + first;
            own.scale = (float *)w.scale + SCALE_FLOATS * e;
        }
        quantize(own, source);
    }
    return w;
}

/* Makes rows of assignments, gathered from normally distributed numbers. */
static Tensor make_rows(Format f, const ExpertShape *s, Routing r, int C)
{
    const int rows = routing_rows(s->N, s->E, s->k);
    Tensor x = make_normal(BF16_, s->N, C, 1),
           y = format_is_fp8(f) ? make_operand(f, rows, C) : make(f, rows, C);
    experts_gather(y, x, NULL, r);
    y.fast = true;
    return y;
}

static void bench_experts_matrix(const ExpertShape *s, Routing r, const char *name,
                                 const char *loads, bool fp8, int O, int C)
{
    char text[48];
    const int rows = routing_rows(s->N, s->E, s->k);
    const double flops = 2.0 * s->N * s->k * O * C;
    Tensor x = make_rows(fp8 ? E4M3_ : BF16_, s, r, C),
           dy = make_rows(fp8 ? E5M2_ : BF16_, s, r, O),
           w = make_matrices(fp8 ? E4M3_ : BF16_, s->E, O, C);
    Tensor y = make(BF16_, rows, O), dx = make(BF16_, rows, C), dw = make(BF16_, s->E * O, C),
           empty = dw;
    empty.empty = true;
    const char *format = fp8 ? "FP8" : "bf16";
    snprintf(text, sizeof text, "%s %s matmul", format, name);
    TIME_FLOPS(experts_label(s, text, loads), flops, experts_matmul(y, x, w, r));
    snprintf(text, sizeof text, "%s %s matmul_dx", format, name);
    TIME_FLOPS(experts_label(s, text, loads), flops, experts_matmul_dx(dx, dy, w, r));
    snprintf(text, sizeof text, "%s %s matmul_dw", format, name);
    TIME_FLOPS(experts_label(s, text, loads), flops, experts_matmul_dw(empty, dy, x, r));
    snprintf(text, sizeof text, "%s %s matmul_dw +=", format, name);
    TIME_FLOPS(experts_label(s, text, loads), flops, experts_matmul_dw(dw, dy, x, r));
    if (fp8) {
        x.fast = dy.fast = false;
        snprintf(text, sizeof text, "FP8 %s matmul, precise", name);
        TIME_FLOPS(experts_label(s, text, loads), flops, experts_matmul(y, x, w, r));
        snprintf(text, sizeof text, "FP8 %s matmul_dw, precise", name);
        TIME_FLOPS(experts_label(s, text, loads), flops, experts_matmul_dw(empty, dy, x, r));
    }
}

/* ---- rows and SwiGLU ------------------------------------------------------------------------- */

static void bench_experts_rows(const ExpertShape *s, Routing r, Tensor logits)
{
    const int rows = routing_rows(s->N, s->E, s->k);
    const double n = (double)s->N * s->C, a = n * s->k, p = 4.0 * s->N * s->E;
    Tensor x = make_normal(BF16_, s->N, s->C, 1), y = make(BF16_, rows, s->C),
           codes = make_operand(E4M3_, rows, s->C), sum = make(BF16_, s->N, s->C),
           stats = make(F32_, 1, router_stats_width(s->E)), dlogits = make(BF16_, s->N, s->E),
           dweight = make_normal(F32_, 1, rows, 1);
    TIME_BYTES(experts_label(s, "route", NULL), p, route(r, logits, NULL, true));
    TIME_BYTES(experts_label(s, "router_stats", NULL), p, router_stats(stats, logits, r));
    TIME_BYTES(experts_label(s, "route_backward", NULL), 1.5 * p,
               route_backward(dlogits, dweight.data, logits, r, true, stats, 1e-6f, 1e-6f));
    TIME_BYTES(experts_label(s, "gather bf16", NULL), 2 * n + 2 * a, experts_gather(y, x, NULL, r));
    TIME_BYTES(experts_label(s, "gather FP8", NULL), 4 * n + a,
               experts_gather(rows_only(codes), x, NULL, r));
    TIME_BYTES(experts_label(s, "gather FP8 and transposed", NULL), 4 * n + 2 * a,
               experts_gather(codes, x, NULL, r));
    TIME_BYTES(experts_label(s, "gather again, transposed", NULL), 2 * n + a,
               experts_gather_again(transpose_only(codes), x, r));
    TIME_BYTES(experts_label(s, "sum", NULL), 2 * a + 2 * n, experts_sum(sum, y, NONE, r));
    TIME_BYTES(experts_label(s, "sum, add", NULL), 2 * a + 4 * n, experts_sum(sum, y, x, r));
}

static void bench_experts_swiglu(const ExpertShape *s, Routing r)
{
    const int rows = routing_rows(s->N, s->E, s->k), F = s->F;
    const double f = (double)s->N * s->k * F;
    Tensor wide = make_normal(BF16_, rows, 2 * F, 1), dact = make_normal(BF16_, rows, F, 1),
           gate_up = make(E4M3_16, rows, 2 * F), dweight = make(F32_, 1, rows);
    Tensor act = with_range(make_operand(E4M3_, rows, F)),
           dwide = with_range(make_operand(E5M2_, rows, 2 * F));
    TIME_IN_RANGE(experts_label(s, "in range: swiglu", NULL), (4 + 2.125 + 1) * f,
                  experts_swiglu(rows_only(act), gate_up, wide, r, FROM_EXACT));
    TIME_IN_RANGE(
        experts_label(s, "in range: swiglu_backward, act", NULL), (2 * 4.125 + 5) * f,
        experts_swiglu_backward(dwide, transpose_only(act), dweight.data, dact, gate_up, r));
    TIME_BYTES(experts_label(s, "swiglu_backward bf16, act", NULL), 12 * f,
               experts_swiglu_backward(wide, dact, dweight.data, dact, wide, r));
}

/* The GEMMs with SwiGLU; the results stay within the range of the reused scale. */
static void bench_experts_fused(const ExpertShape *s, Routing r, const char *loads)
{
    const int rows = routing_rows(s->N, s->E, s->k), F = s->F, C = s->C;
    const double flops = 2.0 * s->N * s->k * F * C;
    Tensor x = make_rows(E4M3_, s, r, C), dy = make_rows(E5M2_, s, r, C),
           w = make_matrices(E4M3_, s->E, 2 * F, C), down = make_matrices(E4M3_, s->E, C, F);
    Tensor wide = make(BF16_, rows, 2 * F), dact = make(BF16_, rows, F),
           gate_up = make(E4M3_16, rows, 2 * F), dweight = make(F32_, 1, rows);
    Tensor act = with_range(make_operand(E4M3_, rows, F)),
           dwide = with_range(make_operand(E5M2_, rows, 2 * F));
    experts_matmul_swiglu(rows_only(act), gate_up, wide, x, w, r);
    experts_matmul_dx_swiglu(dwide, transpose_only(act), dweight.data, dact, dy, down, gate_up, r);
    scales_reused = true;
    TIME_FLOPS(experts_label(s, "in range: FP8 matmul_swiglu", loads), 2 * flops,
               experts_matmul_swiglu(rows_only(act), gate_up, wide, x, w, r));
    TIME_FLOPS(experts_label(s, "in range: FP8 matmul_dx_swiglu", loads), flops,
               experts_matmul_dx_swiglu(dwide, transpose_only(act), dweight.data, dact, dy, down,
                                        gate_up, r));
    scales_reused = false;
}

static void bench_expert_shape(const ExpertShape *s, bool skewed)
{
    const char *loads = skewed ? "1/(i+8)" : "balanced";
    for (int part = 0; part < (skewed ? 4 : 6); part++) {
        const Routing r = make_bench_routing(s);
        const Tensor logits = make_router_logits(s, skewed);
        const bool fp8 = part % 2 == 0;
        route(r, logits, NULL, true);
        if (part < 2)
            bench_experts_matrix(s, r, "gate_up", loads, fp8, 2 * s->F, s->C);
        else if (part < 4)
            bench_experts_matrix(s, r, "down", loads, fp8, s->C, s->F);
        else if (part == 4)
            bench_experts_rows(s, r, logits);
        else
            bench_experts_swiglu(s, r);
        release();
    }
    const Routing r = make_bench_routing(s);
    route(r, make_router_logits(s, skewed), NULL, true);
    bench_experts_fused(s, r, loads);
    release();
}

/* The shapes of OLMoE-1B-7B and Qwen3-30B-A3B. */
static void bench_experts(bool small)
{
    const ExpertShape olmoe = { 16384, 2048, 64, 1024, 8 }, qwen = { 16384, 2048, 128, 768, 8 },
                      tiny = { 32, 64, 4, 32, 2 };
    const ExpertShape *shapes[] = { &olmoe, &qwen };
    for (int i = 0; i < (small ? 1 : 2); i++)
        for (int skewed = 0; skewed < 2; skewed++)
            bench_expert_shape(small ? &tiny : shapes[i], skewed);
}
