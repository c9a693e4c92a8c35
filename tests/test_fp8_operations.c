/* Operations that read or write FP8, as COAT's data flow uses them: quantize, norms, SwiGLU, linear
 * layers. test_fp8_rope.c tests the rotation. Each operation is compared with a double reference
 * that is computed from the stored codes. A comment derives each bound. On CUDA the results are
 * also compared with the CPU's record. The shapes end inside the tiles of 128 x 64 in which the
 * CUDA back end moves codes, and inside its warps. u = 2^-24. */
#include "tests/test.h"
#include "tests/fp8.h"
#include "tests/norm.h"

static const Format F = { F32, 0 }, H = { BF16, 0 }, E4 = { E4M3, 0 }, E5 = { E5M2, 0 },
                    E16 = { E4M3, 16 };

typedef struct {
    int N, C, F;
} Shape;
static const Shape shapes[] = {
    { 16, 64, 384 }, { 96, 256, 176 }, { 160, 176, 384 }, { 160, 256, 176 }
};
enum { SHAPES = sizeof shapes / sizeof shapes[0] };

static char label[96];
static const char *name(const char *op, int rows, int cols, const char *variant)
{
    snprintf(label, sizeof label, "fp8-%s/%dx%d/%s", op, rows, cols, variant);
    return label;
}

static double *doubles(size_t n)
{
    return keep(n * sizeof(double));
}

static Tensor make_saved(int rows, int cols, uint64_t seed, float low, float high)
{
    Tensor t = make(E16, rows, cols);
    quantize(t, make_uneven(rows, cols, seed, low, high));
    return t;
}

/* Saved values must equal those of quantize. */
static void check_saved(const char *label_, Tensor saved, Tensor from)
{
    Tensor expected = make(saved.format, saved.rows, saved.cols);
    quantize(expected, from);
    check_same_bytes(label_, tensor_snapshot(saved), tensor_snapshot(expected),
                     tensor_bytes(saved));
    golden_check(label_, saved, NULL);
}

/* ---- quantize -------------------------------------------------------------------------------- */

static void quantize_operand(Format f, Tensor x)
{
    const int N = x.rows, C = x.cols;
    Tensor y = make_operand(f, N, C), rows = make(f, N, C);
    Tensor halves = make_operand(f, N, C), copy = make_operand(f, N, C);
    TWICE(quantize(y, x), y);
    check_operand("quantize", y, values(x), doubles(tensor_numel(x)));
    check_transposed("quantize", y);
    golden_check(name("quantize", N, C, format_name(f)), y, NULL);

    const size_t bytes = tensor_bytes(y), codes = tensor_numel(y);
    const uint8_t *expected = tensor_snapshot(y);
    TWICE(quantize(rows, x), rows);
    check_same_bytes("without data_t", tensor_snapshot(rows), expected, codes);
    assert_true(operand_scale(rows) == operand_scale(y));
    TWICE(quantize(copy, rows), copy);
    check_same_bytes("copy", tensor_snapshot(copy), expected, bytes);
    for (int f32 = 0; f32 < 2; f32++) {
        Tensor expanded = make(f32 ? F : H, N, C), plain = make(f32 ? F : H, N, C),
               transpose = rows;
        transpose.data_t = guarded(codes);
        TWICE(expand_operand(expanded, transpose), expanded, transpose);
        check_same_bytes("codes and transpose with values", tensor_snapshot(transpose), expected,
                         bytes);
        quantize(plain, rows);
        check_same_bytes("values with a transpose", tensor_snapshot(expanded),
                         tensor_snapshot(plain), tensor_bytes(plain));
    }
    TWICE(quantize_scale(halves, x), halves);
    quantize_codes(rows_of(halves), x);
    quantize_codes(columns_of(halves), x);
    check_same_bytes("scale, rows, columns", tensor_snapshot(halves), expected, bytes);
}

/* y has more rows and columns than x: the codes of x, then zeros. Old contents are overwritten. */
static void quantize_padded(Format f, int N, int C)
{
    const int padded = (N + 15) / 16 * 16 + (N % 3 ? 0 : 16);
    const size_t codes = (size_t)N * (size_t)C, all = (size_t)padded * (size_t)C;
    Tensor x = make_uneven(N, C, 3, -1, 2), exact = make(f, N, C), y = make_operand(f, padded, C),
           halves = y;
    Tensor saved = make(f, padded, C), transpose = make_operand(f, padded, C);
    quantize(exact, x);
    quantize_scale(y, x);
    TWICE(quantize_codes(y, x), y);
    const uint8_t *rows = tensor_snapshot(y);
    check_same_bytes("x's codes", rows, tensor_snapshot(exact), codes);
    assert_true(operand_scale(y) == operand_scale(exact));
    check_same_bytes("padding", rows + codes, keep(all - codes), all - codes);
    check_transposed("padded", y);
    halves.data = guarded(all), halves.data_t = guarded(all);
    quantize_codes(rows_of(halves), x);
    quantize_codes(columns_of(halves), x);
    check_same_bytes("rows and columns separately", tensor_snapshot(halves), rows, 2 * all);
    saved.scale = transpose.scale = y.scale;
    quantize_codes(saved, exact); /* the same from codes */
    quantize_codes(columns_of(transpose), saved);
    transpose.data = saved.data;
    check_same_bytes("from codes", tensor_snapshot(transpose), rows, 2 * all);
    release();
}

TEST(test_padding)
{
    static const int N[] = { 1, 15, 16, 37, 130, 250 }, C[] = { 24, 64, 176 };
    for (int i = 0; i < 36; i++)
        quantize_padded(i % 2 ? E5 : E4, N[i / 2 % 6], C[i / 12]);
    Tensor x = make(H, 5, 32), longer = make(E4, 16, 32), shorter = make(E4, 4, 32),
           wider = make(E4, 16, 48);
    Tensor groups = make(E16, 16, 32), plain = make(H, 16, 32);
    DIES("quantize_codes: y is (4, 32), x is (5, 32)", quantize_codes(shorter, x));
    DIES("quantize_codes: y is (16, 48), x is (5, 32)", quantize_codes(wider, x));
    DIES("quantize_codes: y is (16, 32), x is (5, 32)", quantize_codes(groups, x));
    DIES("quantize_codes: y is (16, 32), x is (5, 32)", quantize_codes(plain, x));
    DIES("quantize: y is (16, 32)", quantize(longer, x));
    DIES("expand_operand: x is bf16 without a transpose", expand_operand(plain, plain));
    release();
}

TEST(test_quantize)
{
    static const int N[] = { 16, 96, 160 }, C[] = { 64, 176, 256, 384 };
    for (int i = 0; i < 12; i++) {
        const int rows = N[i % 3], cols = C[i / 3];
        Tensor x = make_uneven(rows, cols, 1, -1, 2), saved = make(E16, rows, cols),
               back = make(H, rows, cols);
        Tensor exact = make(F, rows, cols);
        quantize_operand(E4, x);
        quantize_operand(E5, x);
        TWICE(quantize(saved, x), saved);
        golden_check(name("quantize", rows, cols, "e4m3-16"), saved, NULL);
        const double *v = values(saved);
        TWICE(quantize(back, saved), back);
        check_close("from groups to bf16", back, v, doubles(tensor_numel(x)));
        golden_check(name("quantize", rows, cols, "e4m3-16-bf16"), back, NULL);
        TWICE(quantize(exact, saved), exact);
        const double *w = values(exact);
        /* 4 bits of code times 7 bits of scale */
        for (size_t j = 0; j < tensor_numel(x); j++)
            assert_true(v[j] == w[j]);
        release();
    }
}

/* ---- norms ----------------------------------------------------------------------------------- */

typedef struct {
    const char *text;
    NormKind kind;
    bool weight, residual, saved;
} NormCase;
static const NormCase norm_cases[] = {
    { "rms", RMS_NORM, true, false, true },
    { "rms-plain", RMS_NORM, false, false, true },
    { "layer", LAYER_NORM, true, false, true },
    { "layer-plain", LAYER_NORM, false, false, true },
    { "rms-residual", RMS_NORM, true, true, true },
    { "layer-residual", LAYER_NORM, true, true, true },
    { "rms-dense", RMS_NORM, true, false, false },
};
enum { NORM_CASES = sizeof norm_cases / sizeof norm_cases[0] };

/* With the scale of y, norm_recompute writes the same codes: both copies, or either one. Forward
 * without the transpose writes the same rows. */
static void check_norm_recompute(Tensor y, Tensor x, Tensor stats, Tensor stream, Tensor w,
                                 Norm norm)
{
    const void *expected = tensor_snapshot(y);
    Tensor recomputed = make_operand(y.format, y.rows, y.cols),
           halves = make_operand(y.format, y.rows, y.cols);
    Tensor rows = make(y.format, y.rows, y.cols);
    recomputed.scale = halves.scale = y.scale;
    TWICE(norm_recompute(recomputed, x, stats.data, w), recomputed);
    check_same_bytes("norm_recompute", tensor_snapshot(recomputed), expected, tensor_bytes(y));
    norm_recompute(columns_of(halves), x, stats.data, w);
    norm_recompute(rows_of(halves), x, stats.data, w);
    check_same_bytes("norm_recompute, one copy", tensor_snapshot(halves), expected,
                     tensor_bytes(y));
    norm_forward(rows, x, stats.data, stream, w, NONE, norm, FROM_SAVED);
    check_same_bytes("norm_forward without data_t", tensor_snapshot(rows), expected,
                     tensor_numel(y));
    assert_true(operand_scale(rows) == operand_scale(y));
}

static void norm_forward_case(const Shape *s, const NormCase *k)
{
    const int N = s->N, C = s->C;
    const size_t n = (size_t)N * (size_t)C, rows = (size_t)N;
    const Norm norm = { k->kind, 1e-5f };
    Tensor stream = make_uneven(N, C, 1, -1, 2), x = k->saved ? make(E16, N, C) : stream,
           stats = make_f32(N, 2);
    Tensor w = k->weight ? make_filled(H, 1, C, 2, 0.5f, 1.5f) : NONE;
    Tensor residual = k->residual ? make_filled(H, N, C, 3, -1, 1) : NONE;
    Tensor y = k->residual ? make(H, N, C) : make_operand(E4, N, C);
    double *ref = doubles(n), *bound = doubles(n), *ref_stats = doubles(2 * rows),
           *bs = doubles(2 * rows);
    TWICE(norm_forward(y, x, stats.data, stream, w, residual, norm, FROM_SAVED), y, x, stats);
    if (k->saved)
        check_saved(name("norm_x", N, C, k->text), x, stream);
    norm_reference(ref, bound, ref_stats, bs, values(x), values(w), values(residual), N, C, norm);
    check_close(name("norm_stats", N, C, k->text), stats, ref_stats, bs);
    golden_check(label, stats, bs);
    name("norm_forward", N, C, k->text);
    if (k->residual) {
        check_close(label, y, ref, bound);
        golden_check(label, y, bound);
        return;
    }
    check_operand(label, y, ref, bound);
    check_transposed(label, y);
    golden_operand(label, y, ref, bound);
    check_norm_recompute(y, x, stats, stream, w, norm);
}

/* norm_backward replaces a larger number by max|dx|. With this maximum, quantize makes the same
 * codes as without it. A larger maximum gives a larger scale. */
static void check_amax(Tensor dx, Tensor dw, Tensor dy, Tensor x, Tensor stats, Tensor w, Norm norm,
                       bool accumulate)
{
    Tensor given = make_operand(E5, dx.rows, dx.cols), found = make_operand(E5, dx.rows, dx.cols),
           amax = make_f32(1, 1);
    Tensor rows = make(E5, dx.rows, dx.cols);
    double max = 0;
    put(amax, &(float){ 0x1p100f });
    TWICE(norm_backward(dx, amax.data, dw, dy, x, stats.data, w, norm, accumulate), dx, dw, amax);
    const double *v = values(dx);
    for (size_t i = 0; i < tensor_numel(dx); i++)
        max = fmax(max, fabs(v[i]));
    assert_true(*values(amax) == max);
    quantize(found, dx);
    quantize_with_amax(given, dx, amax.data);
    check_same_bytes("codes by the maximum of norm_backward", tensor_snapshot(given),
                     tensor_snapshot(found), tensor_bytes(found));
    quantize_with_amax(rows, dx, amax.data);
    check_same_bytes("the same without data_t", tensor_snapshot(rows), tensor_snapshot(found),
                     tensor_numel(found));
    assert_true(operand_scale(rows) == operand_scale(found));
    put(amax, &(float){ 8 * (float)max });
    quantize_with_amax(given, dx, amax.data);
    assert_true(operand_scale(given) == 8 * operand_scale(found));
    assert_true(*values(amax) == 8 * max);
}

/* In BF16, dx accumulates, as in the stream. In E5M2, dx is the operand of a GEMM. */
static void norm_backward_case(const Shape *s, const NormCase *k, bool operand)
{
    const int N = s->N, C = s->C;
    const size_t n = (size_t)N * (size_t)C, cols = (size_t)C;
    const Norm norm = { k->kind, 1e-5f };
    Tensor x = k->saved ? make_saved(N, C, 1, -1, 2) : make_uneven(N, C, 1, -1, 2);
    Tensor dy = make_uneven(N, C, 4, -1, 1), stats = make_f32(N, 2);
    Tensor w = k->weight ? make_filled(H, 1, C, 2, 0.5f, 1.5f) : NONE;
    Tensor dw = k->weight ? make_filled(F, 1, C, 5, -1, 1) : NONE;
    Tensor dx = operand ? make_operand(E5, N, C) : make_filled(H, N, C, 6, -1, 1);
    double *X = values(x), *DY = values(dy), *W = values(w), *old = operand ? NULL : values(dx),
           *old_dw = values(dw);
    double *ref = doubles(n), *bound = doubles(n), *dw_ref = doubles(cols),
           *dw_bound = doubles(cols);
    float *given = keep(2 * sizeof *given * (size_t)N);
    for (int c = 0; old_dw && c < C; c++)
        dw_ref[c] = old_dw[c], dw_bound[c] = (N + 4) * U24 * fabs(old_dw[c]);
    for (int i = 0; i < N; i++) {
        const Stats t = row_stats(X + i * C, C, norm);
        given[2 * i] = (float)t.mean, given[2 * i + 1] = (float)t.rstd;
        norm_backward_row(ref + i * C, bound + i * C, dw_ref, dw_bound, DY + i * C, X + i * C,
                          (double[]){ given[2 * i], given[2 * i + 1] }, W, old ? old + i * C : NULL,
                          N, C, k->kind);
    }
    put(stats, given);
    TWICE(norm_backward(dx, NULL, dw, dy, x, stats.data, w, norm, !operand), dx, dw);
    name(operand ? "norm_backward-e5m2" : "norm_backward", N, C, k->text);
    if (operand) {
        check_operand(label, dx, ref, bound);
        check_transposed(label, dx);
        golden_operand(label, dx, ref, bound);
    } else {
        check_close(label, dx, ref, bound);
        golden_check(label, dx, bound);
    }
    if (dw.data) {
        check_close(name(operand ? "norm_dw-e5m2" : "norm_dw", N, C, k->text), dw, dw_ref,
                    dw_bound);
        golden_check(label, dw, dw_bound);
    }
    EMPTY_IS_ZEROS(dw, norm_backward(dx, NULL, dw, dy, x, stats.data, w, norm, false));
    for (int accumulate = 0; !operand && accumulate < 2; accumulate++)
        check_amax(dx, dw, dy, x, stats, w, norm, accumulate);
}

TEST(test_norm)
{
    for (int s = 0; s < SHAPES; s++)
        for (int k = 0; k < NORM_CASES; k++) {
            norm_forward_case(&shapes[s], &norm_cases[k]);
            release();
            if (norm_cases[k].residual)
                continue;
            norm_backward_case(&shapes[s], &norm_cases[k], false);
            norm_backward_case(&shapes[s], &norm_cases[k], true);
            release();
        }
}

/* ---- SwiGLU ---------------------------------------------------------------------------------- */

/* Relative error of s = 1/(1+e^-g) with CUDA's fast functions. The CUDA C programming guide gives
 * their errors: 2 + 1.173 |g| ulp for __expf, which s reduces by the factor e^-g s = 1 - s, and 2
 * ulp for __fdividef. An ulp is at most 2 u, and the sum rounds once. The CPU's functions are more
 * exact. */
static double sigmoid_error(double g, double s)
{
    return ((1 - s) * (2 + 1.173 * fabs(g)) * 2 + 4 + 1) * U24;
}

/* t = 1 + g (1-s) has an error of |g| (s E + 3 u (1-s)) and u of its terms. Each product has an
 * error of u. If e^-g overflows F32, s is 0 instead of less than 1e-38. */
static void swiglu_reference(double *act, double *ba, double *d, double *bd, const double *gate_up,
                             const double *dact, int N, int width)
{
    for (int i = 0; i < N * width; i++) {
        const int gate = i / width * 2 * width + i % width, up = gate + width;
        const double g = gate_up[gate], u = gate_up[up], s = 1 / (1 + exp(-g)),
                     E = sigmoid_error(g, s), D = dact[i];
        const double t = 1 + g * (1 - s),
                     bt = fabs(g) * (s * E + 3 * U24 * (1 - s)) + U24 * (1 + fabs(t));
        act[i] = g * s * u;
        ba[i] = fabs(act[i]) * (E + 4 * U24) + 1e-36;
        d[gate] = D * u * s * t;
        bd[gate] = fabs(D * u) * s * (fabs(t) * (E + 5 * U24) + bt * (1 + E)) + 1e-36;
        d[up] = D * g * s;
        bd[up] = fabs(d[up]) * (E + 4 * U24) + 1e-36;
    }
}

/* gate and up are saved in groups, as in COAT, or not at all. Backward recomputes act as in
 * forward: both copies, only the transpose, or nothing. */
static void swiglu_case(const Shape *s, bool saved)
{
    const int N = s->N, width = s->F;
    const size_t n = (size_t)N * (size_t)width;
    const char *text = saved ? "saved" : "dense";
    Tensor wide = make_uneven(N, 2 * width, 1, -2, 2),
           gate_up = saved ? make(E16, N, 2 * width) : wide;
    Tensor act = make_operand(E4, N, width), recomputed = make_operand(E4, N, width);
    Tensor dact = make_uneven(N, width, 2, -1, 1);
    Tensor d = make_operand(E5, N, 2 * width), other = make_operand(E5, N, 2 * width);
    Tensor columns = make_operand(E4, N, width);
    double *ref = doubles(n), *bound = doubles(n), *dref = doubles(2 * n), *dbound = doubles(2 * n);
    /* -100: e^100 overflows F32 */
    device_put(wide.data, &(uint16_t){ 0xc2c8 }, sizeof(uint16_t));
    recomputed.scale = columns.scale = act.scale;

    TWICE(swiglu_forward(act, gate_up, wide, NO_PRODUCT, FROM_SAVED), act, gate_up);
    if (saved)
        check_saved(name("swiglu_saved", N, width, text), gate_up, wide);
    swiglu_reference(ref, bound, dref, dbound, values(gate_up), values(dact), N, width);
    check_operand(name("swiglu_forward", N, width, text), act, ref, bound);
    check_transposed(label, act);
    golden_operand(label, act, ref, bound);

    TWICE(swiglu_backward(d, recomputed, dact, NO_PRODUCT, gate_up), d, recomputed);
    check_operand(name("swiglu_backward", N, width, text), d, dref, dbound);
    check_transposed(label, d);
    golden_operand(label, d, dref, dbound);
    const void *expected = tensor_snapshot(act), *gradient = tensor_snapshot(d);
    check_same_bytes("act again", tensor_snapshot(recomputed), expected, tensor_bytes(act));
    TWICE(swiglu_backward(other, NONE, dact, NO_PRODUCT, gate_up), other);
    check_same_bytes("without act", tensor_snapshot(other), gradient, tensor_bytes(d));
    Tensor d_rows = make(E5, N, 2 * width), act_rows = make(E4, N, width);
    act_rows.scale = act.scale;
    swiglu_backward(d_rows, act_rows, dact, NO_PRODUCT, gate_up);
    check_same_bytes("gradient without data_t", tensor_snapshot(d_rows), gradient, tensor_numel(d));
    check_same_bytes("act without data_t", tensor_snapshot(act_rows), expected, tensor_numel(act));
    assert_true(operand_scale(d_rows) == operand_scale(d));
    const size_t rows = tensor_numel(act);
    const void *untouched = tensor_snapshot(columns);
    swiglu_backward(other, columns_of(columns), dact, NO_PRODUCT, gate_up);
    check_same_bytes("with act's transpose", tensor_snapshot(other), gradient, tensor_bytes(d));
    const uint8_t *found = tensor_snapshot(columns);
    check_same_bytes("rows of act", found, untouched, rows);
    check_same_bytes("act's transpose", found + rows, (const uint8_t *)expected + rows, rows);
    if (saved) {
        other.data = gate_up.data;
        swiglu_backward(other, columns_of(columns), dact, NO_PRODUCT, gate_up);
        check_same_bytes("gradient over gate and up", tensor_snapshot(other), gradient,
                         tensor_bytes(d));
    }
    release();
}

TEST(test_swiglu)
{
    for (int s = 0; s < SHAPES; s++) {
        swiglu_case(&shapes[s], true);
        swiglu_case(&shapes[s], false);
    }
}

/* ---- linear ---------------------------------------------------------------------------------- */

static Tensor make_quantized(Format f, int rows, int cols, uint64_t seed)
{
    Tensor t = make_operand(f, rows, cols);
    quantize(t, make_uneven(rows, cols, seed, -1, 1));
    return t;
}

static void linear_case(const Shape *s, const char *text, bool fast)
{
    const int N = s->N, C = s->C, O = s->F;
    const size_t most = (size_t)(N > O ? N : O) * (size_t)(C > O ? C : O);
    Tensor x = make_quantized(E4, N, C, 1), w = make_quantized(E4, O, C, 2),
           dy = make_quantized(E5, N, O, 3);
    Tensor y = make(H, N, O), dx = make(H, N, C), dw = make_filled(F, O, C, 6, -2, 2);
    x.fast = dy.fast = fast;
    double *X = values(x), *W = values(w), *DY = values(dy), *old = values(dw);
    double *ref = doubles(most), *bound = doubles(most);

    TWICE(matmul(y, rows_of(x), rows_of(w), NONE), y);
    product(ref, bound, NULL, N, O, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    check_close(name("matmul", N, C, text), y, ref, bound);
    golden_check(label, y, bound);
    check_bias(y, rows_of(x), rows_of(w), rows_of(dy), ref, bound);

    TWICE(matmul_dx(dx, rows_of(dy), w, false), dx);
    product(ref, bound, NULL, N, C, O, (Strided){ DY, O, 1 }, (Strided){ W, 1, C });
    check_close(name("matmul_dx", N, C, text), dx, ref, bound);
    golden_check(label, dx, bound);

    TWICE(matmul_dw(dw, dy, x), dw);
    product(ref, bound, old, O, C, N, (Strided){ DY, 1, O }, (Strided){ X, 1, C });
    check_close(name("matmul_dw", N, C, text), dw, ref, bound);
    golden_check(label, dw, bound);
    EMPTY_IS_ZEROS(dw, matmul_dw(dw, dy, x));
    release();
}

TEST(test_linear)
{
    for (int s = 0; s < SHAPES; s++) {
        linear_case(&shapes[s], "precise", false);
        linear_case(&shapes[s], "fast", true);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return run_all_tests(start_device, NULL);
}
