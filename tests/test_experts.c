/* Compares the operations on rows, and the grouped GEMMs, of experts with double precision. */
#include "tests/test.h"
#include "tests/expert_tensors.h"

static const Format F = { F32, 0 }, H = { BF16, 0 }, E4 = { E4M3, 0 }, E5 = { E5M2, 0 };

/* ---- rows ------------------------------------------------------------------------------------ */

/* Each row has the codes that quantize gives for x; padding has zeros. */
static void check_gathered(const char *what, Tensor y, Tensor quantized, const Routed *g)
{
    const size_t row = (size_t)y.cols * dtype_size(y.format.dtype);
    const uint8_t *codes = tensor_snapshot(y), *expected = tensor_snapshot(quantized),
                  *zeros = keep(row);
    for (int i = 0; i < g->used; i++) {
        const int a = g->host.assignment[i];
        check_same_bytes(what, codes + (size_t)i * row,
                         a < 0 ? zeros : expected + (size_t)(a / g->host.top_k) * row, row);
    }
    check_used_transposed(what, y, g);
    if (is_operand(y.format))
        assert_true(operand_scale(y) == operand_scale(quantized));
}

/* A given maximum sets the scale. The given maximum is larger than the actual one, which shows that
 * it is used. */
static void gather_into(Format format, Tensor x, const Routed *g, const char *text)
{
    Tensor y = make_either(format, g->rows, x.cols), again = make_either(format, g->rows, x.cols),
           rows = make(format, g->rows, x.cols), quantized = make(format, x.rows, x.cols),
           amax = make_f32(1, 1);
    quantize(quantized, x);
    TWICE(experts_gather(y, x, NULL, g->device), y);
    check_gathered(text, y, quantized, g);
    golden_check(text, in_use(y, g), NULL);
    experts_gather(rows, x, NULL, g->device);
    check_same_rows("without data_t", rows, only_rows(y), g);
    put(amax, &(float){ 4 * amax_of(x) });
    quantize_with_amax(quantized, x, amax.data);
    TWICE(experts_gather(y, x, amax.data, g->device), y);
    check_gathered("with a maximum", y, quantized, g);

    again.scale = y.scale;
    TWICE(experts_gather_again(again, x, g->device), again);
    check_same_rows("again", again, y, g);
    if (!is_operand(format))
        return;
    Tensor halves = make_operand(format, g->rows, x.cols);
    halves.scale = y.scale;
    const void *before = tensor_snapshot(halves);
    experts_gather_again(columns_of(halves), x, g->device);
    check_same_bytes("rows, not written", tensor_snapshot(halves), before, tensor_numel(halves));
    experts_gather_again(only_rows(halves), x, g->device);
    check_same_rows("rows and columns separately", halves, y, g);
}

TEST(test_gather)
{
    for (int i = 0; i < CASES; i++) {
        const Case *c = &cases[i];
        const Formats *f = &all_formats[0];
        if (c->odd && !on_cpu())
            continue;
        const Routed g = routed(c);
        Tensor x = make_uneven(c->N, c->C, 1, -1, 2), exact = make_filled(F, c->N, c->C, 2, -1, 2);
        gather_into(F, exact, &g, name("gather", f, c, ""));
        gather_into(H, x, &g, name("gather", f, c, "-bf16"));
        gather_into(E4, x, &g, name("gather", f, c, "-e4m3"));
        gather_into(E5, x, &g, name("gather", f, c, "-e5m2"));
        release();
    }
}

/* The sum has a fixed order in F32, so its bits are known. */
static void sum_case(const Formats *f, const Case *c, const Routed *g)
{
    const size_t C = (size_t)c->C, n = (size_t)c->N * C;
    Tensor x = make_assigned(f->stream, g, c->C, 1, -1, 1), y = make(f->stream, c->N, c->C),
           add = make_filled(f->stream, c->N, c->C, 2, -1, 1);
    const double *X = values(x), *A = values(add);
    double *sum = doubles(n), *with = doubles(n);
    for (size_t i = 0; i < n; i++) {
        float total = 0;
        for (int j = 0; j < c->k; j++)
            total += (float)X[(size_t)g->host.row[(int)(i / C) * c->k + j] * C + i % C];
        sum[i] = total;
        with[i] = total + (float)A[i];
    }
    TWICE(experts_sum(y, x, NONE, g->device), y);
    check_close(name("experts_sum", f, c, ""), y, sum, doubles(n));
    golden_check(label, y, NULL);
    TWICE(experts_sum(y, x, add, g->device), y);
    check_close(name("experts_sum", f, c, "-add"), y, with, doubles(n));
    golden_check(label, y, NULL);
    if (f->stream.dtype == F32)
        check_same_values(label, values(y), with, n);
    TWICE(experts_sum(add, x, add, g->device), add);
    check_same_bytes("added in place", tensor_snapshot(add), tensor_snapshot(y), tensor_bytes(y));
}

TEST(test_sum)
{
    for (int i = 0; i < 2; i++) /* f32, bf16 */
        for (int j = 0; j < CASES; j++)
            if (on_cpu() || !cases[j].odd) {
                const Routed g = routed(&cases[j]);
                sum_case(&all_formats[i], &cases[j], &g);
                release();
            }
}

/* ---- grouped GEMMs --------------------------------------------------------------------------- */

static void matmul_case(const Formats *f, const Case *c, const Routed *g)
{
    const int C = c->C, O = c->F, E = c->E;
    const size_t most = (size_t)g->rows * (size_t)(C > O ? C : O);
    double *W, *ref = doubles(most), *bound = doubles(most);
    Tensor x = make_assigned(f->operand, g, C, 1, -1, 1),
           w = make_matrices(f->weight, E, O, C, 2, &W),
           dy = make_assigned(f->gradient, g, O, 30, -1, 1);
    Tensor y = make(f->stream, g->rows, O), dx = make(f->stream, g->rows, C);
    x.fast = dy.fast = f->fast;
    TWICE(experts_matmul(y, only_rows(x), only_rows(w), g->device), y);
    grouped(ref, bound, values(x), W, C, O, f, g);
    check_output(name("experts_matmul", f, c, ""), y, g, ref, bound);

    memset(ref, 0, most * sizeof *ref), memset(bound, 0, most * sizeof *bound);
    TWICE(experts_matmul_dx(dx, only_rows(dy), only_columns(w), g->device), dx);
    grouped_dx(ref, bound, values(dy), W, C, O, f, g);
    check_output(name("experts_matmul_dx", f, c, ""), dx, g, ref, bound);
}

static void dw_case(const Formats *f, const Case *c, const Routed *g)
{
    const int C = c->C, O = c->F;
    const size_t n = (size_t)(c->E * O) * (size_t)C;
    Tensor x = make_assigned(f->operand, g, C, 1, -1, 1),
           dy = make_assigned(f->gradient, g, O, 30, -1, 1),
           dw = make_filled(f->sum, c->E * O, C, 40, -2, 2);
    double *ref = doubles(n), *bound = doubles(n);
    x.fast = dy.fast = f->fast;
    grouped_dw(ref, bound, values(dw), values(dy), values(x), C, O, f, g);
    x = only_columns(x), dy = only_columns(dy);
    TWICE(experts_matmul_dw(dw, dy, x, g->device), dw);
    check_close(name("experts_matmul_dw", f, c, ""), dw, ref, bound);
    golden_check(label, dw, bound);
    EMPTY_IS_ZEROS(dw, experts_matmul_dw(dw, dy, x, g->device));
    experts_matmul_dw(NONE, dy, x, g->device);
}

TEST(test_matmul)
{
    for_all(matmul_case);
    for_all(dw_case);
}

/* ---- adapters -------------------------------------------------------------------------------- */

enum { RANK = 8 };
static const float SCALE = 0.5f;

/* The element of expert e's matrix for column c of the wide tensor and column j of xa. A B has two
 * parts, one for each half of the C columns. */
static double adapter_element(const double *w, bool is_b, int C, int e, int c, int j)
{
    if (!is_b)
        return w[(e * RANK + j) * C + c];
    return j / RANK == (c >= C / 2) ? w[(e * C + c) * RANK + j % RANK] : 0;
}

static int expert_of_row(const Routed *g, int row)
{
    int e = 0;
    while (g->host.first[e + 1] <= row)
        e++;
    return e;
}

static void narrow_case(LoraMatrix m, Tensor x, int J, const Formats *f, const Case *c,
                        const Routed *g)
{
    const double *X = values(x), *W = values(m.w);
    Tensor xa = make(f->stream, g->rows, J);
    double *ref = doubles(tensor_numel(xa)), *bound = doubles(tensor_numel(xa));
    for (int i = 0; i < g->used * J; i++) {
        double sum = 0, terms = 0;
        for (int k = 0; k < x.cols; k++) {
            const double p = X[i / J * x.cols + k] *
                             adapter_element(W, m.is_b, x.cols, expert_of_row(g, i / J), k, i % J);
            sum += p, terms += fabs(p);
        }
        ref[i] = SCALE * sum;
        bound[i] = 2 * (x.cols + 2) * U24 * terms;
    }
    TWICE(experts_lora_narrow(xa, only_rows(x), m, SCALE, g->device), xa);
    check_output(name("experts_lora_narrow", f, c, m.is_b ? "-b" : ""), xa, g, ref, bound);
}

static void widen_case(LoraMatrix m, Tensor xa, int C, const Formats *f, const Case *c,
                       const Routed *g)
{
    Tensor y = make_filled(f->stream, g->rows, C, 50, -1, 1);
    const double *XA = values(xa), *W = values(m.w), *old = values(y);
    const size_t n = (size_t)(g->used * C), size = dtype_size(y.format.dtype);
    const uint8_t *before = tensor_snapshot(y);
    double *ref = doubles(n), *bound = doubles(n);
    for (int i = 0; i < g->used * C; i++) {
        double terms = fabs(old[i]);
        ref[i] = old[i];
        for (int j = 0; j < xa.cols; j++) {
            const double p = XA[i / C * xa.cols + j] *
                             adapter_element(W, m.is_b, C, expert_of_row(g, i / C), i % C, j);
            ref[i] += p, terms += fabs(p);
        }
        bound[i] = 2 * (xa.cols + 2) * U24 * terms;
    }
    TWICE(experts_lora_widen(y, xa, m, g->device), y);
    check_close(name("experts_lora_widen", f, c, m.is_b ? "-b" : ""), in_use(y, g), ref, bound);
    golden_check(label, in_use(y, g), bound);
    check_same_bytes("rows after those in use", (uint8_t *)tensor_snapshot(y) + n * size,
                     before + n * size, tensor_bytes(y) - n * size);
}

static void adapter_dw_case(LoraMatrix m, Tensor x, Tensor xa, const Formats *f, const Case *c,
                            const Routed *g)
{
    const int C = x.cols, J = xa.cols;
    const double *X = values(x), *XA = values(xa);
    m.w = make_filled(f->sum, m.w.rows, m.w.cols, 60, -2, 2);
    const size_t n = tensor_numel(m.w);
    double *ref = doubles(n), *bound = doubles(n);
    memcpy(ref, values(m.w), n * sizeof *ref);
    for (size_t i = 0; i < n; i++)
        bound[i] = fabs(ref[i]);
    for (int row = 0; row < g->used; row++)
        for (int i = 0; i < C * J; i++) {
            const int e = expert_of_row(g, row), k = i / J, j = i % J;
            const size_t at =
                (size_t)(m.is_b ? (e * C + k) * RANK + j % RANK : (e * RANK + j) * C + k);
            const double p = XA[row * J + j] * X[row * C + k];
            if (m.is_b && j / RANK != (k >= C / 2))
                continue;
            ref[at] += p, bound[at] += fabs(p);
        }
    for (size_t i = 0; i < n; i++)
        bound[i] *= 2 * (g->used + 2) * U24;
    TWICE(experts_lora_dw(m, xa, only_rows(x), g->device), m.w);
    check_close(name("experts_lora_dw", f, c, m.is_b ? "-b" : ""), m.w, ref, bound);
    golden_check(label, m.w, bound);
    EMPTY_IS_ZEROS(m.w, experts_lora_dw(m, xa, only_rows(x), g->device));
    m.w = NONE;
    experts_lora_dw(m, xa, only_rows(x), g->device);
}

static void adapter_case(const Formats *f, const Case *c, const Routed *g)
{
    for (int is_b = 0; is_b < 2; is_b++) {
        const int C = c->C, J = is_b ? 2 * RANK : RANK;
        Tensor x = make_assigned(f->operand, g, C, 1, -1, 1),
               xa = make_assigned(f->stream, g, J, 2, -1, 1);
        LoraMatrix m = { .w = make_filled(f->stream, c->E * (is_b ? C : RANK), is_b ? RANK : C, 3,
                                          -1, 1),
                         .is_b = is_b,
                         .num_projections = is_b ? 2 : 1,
                         .projection = { { 0, C / 2 }, { C / 2, C - C / 2 } } };
        narrow_case(m, x, J, f, c, g);
        widen_case(m, xa, C, f, c, g);
        adapter_dw_case(m, x, xa, f, c, g);
    }
}

TEST(test_adapters)
{
    for_all(adapter_case);
}

/* ---- errors ---------------------------------------------------------------------------------- */

TEST(test_errors)
{
    enum { N = 20, E = 4, K = 2, C = 32, O = 48 };
    const Routed g = route_on_host(make_logits(N, E, EVEN), K, false);
    const Routing r = g.device;
    Tensor x = make(H, N, C), rows = make(H, g.rows, C), w = make(H, E * O, C),
           y = make(H, g.rows, O), wider = make(H, E * O + 1, C), exact = make(F, E * O, C),
           codes = make(E4, g.rows, C), gradient = make(E5, g.rows, O), w8 = make(E4, E * O, C),
           groups = make((Format){ E4M3, 16 }, g.rows, C), act = make(E4, g.rows, O / 2);
    Tensor dweight = make_f32(1, g.rows), x8 = make(E4, N, C), half = make(H, g.rows, O / 2),
           narrow = make(H, g.rows, C / 2), too_few = make(H, N, RANK);
    DIES("experts_gather: y is (20, 32)", experts_gather(x, x, NULL, r));
    DIES("experts_gather: y is e4m3/16; expected f32, bf16, or FP8 with one scale",
         experts_gather(groups, x, NULL, r));
    DIES("experts_gather: x is e4m3; expected f32 or bf16", experts_gather(rows, x8, NULL, r));
    DIES("experts_sum: x is (20, 32)", experts_sum(x, x, NONE, r));
    DIES("experts_matmul: the matrices of 4 experts have 193 rows",
         experts_matmul(y, rows, wider, r));
    DIES("experts_matmul: no GEMM of bf16 and f32", experts_matmul(y, rows, exact, r));
    DIES("experts_matmul_dx: w is e4m3 without the transposed copy",
         experts_matmul_dx(rows, gradient, w8, r));
    DIES("experts_matmul_dw: dy is e5m2 without the transposed copy",
         experts_matmul_dw(w, gradient, codes, r));
    DIES("experts_matmul_dw: dw is e4m3; expected f32 or bf16", experts_matmul_dw(w8, y, rows, r));
    const LoraMatrix a = { .w = make(H, E * RANK, C), .num_projections = 1 };
    DIES("experts_lora_narrow: 20 rows; expected", experts_lora_narrow(too_few, x, a, SCALE, r));
    DIES("lora_narrow: xa is (", experts_lora_narrow(narrow, rows, a, SCALE, r));
    act.channel = dweight.data;
    DIES("experts_swiglu: act has column factors", experts_swiglu(act, y, y, r, FROM_SAVED));
    DIES("experts_swiglu: gate_up is e4m3; expected f32, bf16, or FP8 in groups",
         experts_swiglu(narrow, codes, rows, r, FROM_SAVED));
    DIES("experts_swiglu_backward: there is no dweight",
         experts_swiglu_backward(y, NONE, NULL, half, y, r));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
