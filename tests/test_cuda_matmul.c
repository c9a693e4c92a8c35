/* GEMMs of cuBLASLt beyond the common tests: FP8 operands, and GEMMs so large that their algorithm
 * is chosen by timing. The choice must not change the accumulators or the bits. */
#include "tests/test.h"
#include "tests/fp8.h"

#include <unistd.h>

#include "kernels/cuda/cuda.h"
#include "kernels/runtime/autotune.h"

static const Format F = { F32, 0 }, BF = { BF16, 0 }, E4 = { E4M3, 0 }, E5 = { E5M2, 0 };

/* ---- FP8 ------------------------------------------------------------------------------------- */

/* Makes finite codes of both signs, some of them subnormal, with their transposed copy, and a scale
 * that is not a power of two. */
static Tensor make_fp8(Format f, int rows, int cols, uint64_t seed)
{
    Tensor t = make(f, rows, cols);
    const size_t n = tensor_numel(t);
    uint8_t *codes = keep(n), *transposed = keep(n);
    const float scale = 0.0123f;
    t.data_t = guarded(n);
    for (size_t i = 0; i < n; i++) {
        uint64_t bits = random_bits(seed, i);
        codes[i] = (uint8_t)((bits & 0x80) | (bits >> 8) % (f.dtype == E4M3 ? 0x58 : 0x48));
        transposed[i % (size_t)cols * (size_t)rows + i / (size_t)cols] = codes[i];
    }
    device_put(t.data, codes, n);
    device_put(t.data_t, transposed, n);
    device_put(t.scale, &scale, sizeof scale);
    return t;
}

static void fp8_case(int N, int C, int O, Format out, Format gradient)
{
    const size_t most = (size_t)(N > O ? N : O) * (size_t)(C > O ? C : O);
    Tensor x = make_fp8(E4, N, C, 1), w = make_fp8(E4, O, C, 2), dy = make_fp8(gradient, N, O, 3);
    Tensor y = make(out, N, O), add = make_filled(out, N, O, 4, -2, 2);
    Tensor dx = make_filled(out, N, C, 5, -2, 2), dw = make_filled(out, O, C, 6, -2, 2);
    double *X = values(x), *W = values(w), *DY = values(dy), *old, *ref = keep(most * 8),
           *bound = keep(most * 8);

    TWICE(matmul(y, x, w, NONE), y);
    product(ref, bound, NULL, N, O, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    check_close("matmul", y, ref, bound);
    TWICE(matmul(y, x, w, add), y);
    product(ref, bound, values(add), N, O, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    check_close("matmul + add", y, ref, bound);
    product(ref, bound, NULL, N, O, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    check_bias(y, x, w, dy, ref, bound);

    old = values(dx);
    TWICE(matmul_dx(dx, dy, w, true), dx);
    product(ref, bound, old, N, C, O, (Strided){ DY, O, 1 }, (Strided){ W, 1, C });
    check_close("matmul_dx +=", dx, ref, bound);
    TWICE(matmul_dx(dx, dy, w, false), dx);
    product(ref, bound, NULL, N, C, O, (Strided){ DY, O, 1 }, (Strided){ W, 1, C });
    check_close("matmul_dx", dx, ref, bound);

    old = values(dw);
    TWICE(matmul_dw(dw, dy, x), dw);
    product(ref, bound, old, O, C, N, (Strided){ DY, 1, O }, (Strided){ X, 1, C });
    check_close("matmul_dw", dw, ref, bound);
    EMPTY_IS_ZEROS(dw, matmul_dw(dw, dy, x));
    release();
}

TEST(test_fp8)
{
    fp8_case(16, 16, 16, BF, E5);
    fp8_case(48, 64, 32, BF, E5);
    fp8_case(96, 256, 384, BF, E5);
    fp8_case(96, 256, 384, F, E5);
    fp8_case(96, 256, 384, BF, E4);
    fp8_case(64, 32, 8192, BF, E5); /* dx: few outputs, a long sum */
}

/* ---- large ----------------------------------------------------------------------------------- */

/* |y - sum a b - old| <= u |y| + 2 (K + 4) u24 sum|a b| for sampled elements; the factor 2 covers tensor cores, which truncate
 * instead of rounding. */
static void check_elements(const char *what, Tensor t, const double *old, int K, Strided a,
                           Strided b)
{
    const double *y = values(t);
    for (uint64_t s = 0; s < 2000; s++) {
        int i = (int)(random_bits(7, s) % (unsigned)t.rows),
            j = (int)(random_bits(8, s) % (unsigned)t.cols);
        size_t at = (size_t)i * (size_t)t.cols + (size_t)j;
        double sum = old ? old[at] : 0, size = fabs(sum);
        for (int k = 0; k < K; k++) {
            double term = a.x[(size_t)i * a.row + (size_t)k * a.col] *
                          b.x[(size_t)j * b.row + (size_t)k * b.col];
            sum += term;
            size += fabs(term);
        }
        double error = 2 * (K + 4) * U24 * size,
               limit = unit_roundoff(t.format) * (fabs(sum) + error) + error;
        if (!(fabs(y[at] - sum) <= limit))
            fail_msg("%s[%d,%d]: %.9g, expected %.9g; at most %.3g off is explained", what, i, j,
                     y[at], sum, limit);
    }
}

/* 2 N C O > 1e10: the first call of each GEMM tries algorithms, the second call does not. */
static void large_case(Format operand, Format out)
{
    const int N = 2048, C = 1536, O = 2304;
    Tensor x = make_filled(operand, N, C, 1, -1, 1), w = make_filled(operand, O, C, 2, -1, 1);
    Tensor dy = make_filled(operand, N, O, 3, -1, 1), y = make_filled(out, N, O, 4, -8, 8);
    Tensor dx = make_filled(out, N, C, 5, -8, 8), dw = make_filled(out, O, C, 6, -8, 8);
    double *X = values(x), *W = values(w), *DY = values(dy), *old = values(y);

    TWICE(matmul(y, x, w, y), y);
    check_elements("matmul, added in place", y, old, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    TWICE(matmul(y, x, w, NONE), y);
    check_elements("matmul", y, NULL, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    Tensor bias = make_filled(out, O, 1, 7, -8, 8);
    double *rows = keep((size_t)N * O * sizeof *rows), *added = values(bias);
    for (int i = 0; i < N * O; i++)
        rows[i] = added[i % O];
    TWICE(matmul(y, x, w, bias), y);
    check_elements("matmul + bias", y, rows, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    old = values(dx);
    TWICE(matmul_dx(dx, dy, w, true), dx);
    check_elements("matmul_dx", dx, old, O, (Strided){ DY, O, 1 }, (Strided){ W, 1, C });
    old = values(dw);
    /* before the choice, as in a step: dst holds NaNs during the choice */
    EMPTY_IS_ZEROS(dw, matmul_dw(dw, dy, x));
    TWICE(matmul_dw(dw, dy, x), dw);
    check_elements("matmul_dw", dw, old, N, (Strided){ DY, 1, O }, (Strided){ X, 1, C });
    release();
}

TEST(test_large)
{
    large_case(F, F);
    large_case(BF, BF);
    large_case(BF, F);
}

/* A single row, with a width that ends inside a warp's load, and an odd number of outputs. */
static void row_case(int C, int O, Format out)
{
    Tensor x = make_filled(BF, 1, C, 1, -1, 1), w = make_filled(BF, O, C, 2, -1, 1),
           y = make_filled(out, 1, O, 3, -8, 8);
    const double *X = values(x), *W = values(w), *old = values(y);
    TWICE(matmul(y, x, w, y), y);
    check_elements("one row, added in place", y, old, C, (Strided){ X, C, 1 },
                   (Strided){ W, C, 1 });
    TWICE(matmul(y, x, w, NONE), y);
    check_elements("one row", y, NULL, C, (Strided){ X, C, 1 }, (Strided){ W, C, 1 });
    Tensor bias = make_filled(out, O, 1, 4, -8, 8);
    TWICE(matmul(y, x, w, bias), y);
    check_elements("one row + bias", y, values(bias), C, (Strided){ X, C, 1 },
                   (Strided){ W, C, 1 });
    release();
}

TEST(test_row)
{
    row_case(8, 1, BF);
    row_case(1000, 333, BF);
    row_case(4096, 4096, BF);
    row_case(11008, 4099, F);
}

/* If all operands are zeros, all algorithms give the same bits. So the choice waits for real data,
 * which come in the third call. */
TEST(test_zeros)
{
    const int n = 1792;
    Tensor x = make_filled(BF, n, n, 1, 0, 0), w = make_filled(BF, n, n, 2, -1, 1),
           y = make(BF, n, n);
    for (int i = 0; i < 2; i++)
        matmul(y, x, w, NONE);
    const double *zeros = values(y);
    for (int i = 0; i < n * n; i++)
        assert_true(zeros[i] == 0);
    fill(x, 3, -1, 1);
    TWICE(matmul(y, x, w, NONE), y);
    check_elements("after zeros", y, NULL, n, (Strided){ values(x), n, 1 },
                   (Strided){ values(w), n, 1 });
    release();
}

/* A later process uses the algorithms that this process chose, and adds no choice. */
TEST(test_later_run)
{
    char command[256], path[200];
    const ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    assert_true(n > 0);
    path[n] = '\0';
    test_large(state);
    char *chosen = autotune_read("gemms.txt"), *then;
    if (strlen(chosen) == 0)
        fail_msg("nothing was written to %s/coat/gemms.txt", getenv("XDG_CACHE_HOME"));
    snprintf(command, sizeof command, "%s test_large", path);
    assert_int_equal(system(command), 0);
    then = autotune_read("gemms.txt");
    assert_string_equal(then, chosen);
    free(then);
    free(chosen);
}

static bool scales_reused;

/* On Hopper, one kernel computes GEMM and SwiGLU and does not write `wide`. It gives the bits of
 * GEMM and SwiGLU, although these sums depend on the order of terms. */
static void swiglu_case(int C)
{
    enum { N = 2320, WIDTH = 1024 };
    Tensor x = make_fp8(E4, N, C, 1), w = make_fp8(E4, 2 * WIDTH, C, 2);
    Tensor wide = make(BF, N, 2 * WIDTH), other = make(BF, N, 2 * WIDTH);
    Tensor saved[2], act[2];
    for (int i = 0; i < 2; i++) {
        saved[i] = make((Format){ E4M3, 16 }, N, 2 * WIDTH);
        act[i] = make(E4, N, WIDTH);
        act[i].scale_amax = guarded(sizeof(float));
        act[i].scale_reused = &scales_reused;
    }
    const void *before = tensor_snapshot(other);
    x.fast = true;
    matmul(wide, x, w, NONE);
    swiglu_forward(act[0], saved[0], wide, NO_PRODUCT, FROM_EXACT);
    device_copy(act[1].scale_amax, act[0].scale_amax, sizeof(float));
    scales_reused = true;
    swiglu_forward(act[0], saved[0], wide, NO_PRODUCT, FROM_EXACT);
    matmul_swiglu(act[1], saved[1], other, x, w);
    scales_reused = false;
    /* without the bytes that pad the scale to 16 bytes */
    check_same_bytes("act", tensor_snapshot(act[1]), tensor_snapshot(act[0]),
                     tensor_bytes(act[0]) - 12);
    check_same_bytes("saved", tensor_snapshot(saved[1]), tensor_snapshot(saved[0]),
                     tensor_bytes(saved[0]));
    if (runs_on_hopper())
        check_same_bytes("wide", tensor_snapshot(other), before, tensor_bytes(other));
    release();
}

/* The parts of a tile's epilogue overlap with one stage each, or with two. */
TEST(test_swiglu)
{
    swiglu_case(1296);
    swiglu_case(2320);
}

/* The same for the input gradient of the last layer with SwiGLU's backward. Tokens and sums end
 * inside a tile, and thread blocks have several tiles. */
static void dx_swiglu_case(bool with_act, bool exceeds)
{
    enum { N = 4624, C = 4112, WIDTH = 1024 };
    Tensor dy = make_fp8(E5, N, C, 1), w = make_fp8(E4, C, WIDTH, 2),
           wide = make_filled(BF, N, 2 * WIDTH, 3, -2, 2);
    Tensor saved = make((Format){ E4M3, 16 }, N, 2 * WIDTH), dact = make(BF, N, WIDTH),
           other = make(BF, N, WIDTH);
    Tensor gradient[2], act[2];
    const float scale = 0.0123f, unknown = 0;
    for (int i = 0; i < 2; i++) {
        gradient[i] = make_operand(E5, N, 2 * WIDTH);
        gradient[i].scale_amax = guarded(sizeof(float));
        gradient[i].scale_reused = &scales_reused;
        act[i] = make_operand(E4, N, WIDTH);
        device_put(act[i].scale, &scale, sizeof scale);
    }
    act[1].data = act[0].data; /* not written */
    const void *before = tensor_snapshot(other);
    quantize(saved, wide);
    dy.fast = true;
    matmul_dx(dact, dy, w, false);
    swiglu_backward(gradient[0], columns_of(act[0]), dact, NO_PRODUCT, saved);
    if (exceeds)
        device_put(gradient[0].scale_amax, &unknown, sizeof unknown);
    device_copy(gradient[1].scale_amax, gradient[0].scale_amax, sizeof(float));
    scales_reused = true;
    swiglu_backward(gradient[0], columns_of(act[0]), dact, NO_PRODUCT, saved);
    matmul_dx_swiglu(gradient[1], with_act ? columns_of(act[1]) : NONE, other, dy, w, saved);
    scales_reused = false;
    check_same_bytes("gradient", tensor_snapshot(gradient[1]), tensor_snapshot(gradient[0]),
                     tensor_bytes(gradient[0]) - 12);
    check_transposed("gradient", gradient[1]);
    if (with_act)
        check_same_bytes("act", tensor_snapshot(act[1]), tensor_snapshot(act[0]),
                         tensor_bytes(act[0]) - 12);
    if (runs_on_hopper())
        check_same_bytes("dact", tensor_snapshot(other), before, tensor_bytes(other));
    release();
}

TEST(test_dx_swiglu)
{
    for (int i = 0; i < 4; i++)
        dx_swiglu_case(i % 2, i / 2);
}

/* ---- errors ---------------------------------------------------------------------------------- */

TEST(test_errors)
{
    Tensor a = make(BF, 16, 16), f = make(F, 16, 16), e4 = make_fp8(E4, 16, 16, 1),
           e5 = make_fp8(E5, 16, 16, 2);
    Tensor narrow = make_fp8(E4, 16, 24, 3), no_t = e4;
    no_t.data_t = NULL;
    const Tensor y = make(F, 16, 16);
    DIES("no GEMM of f32 and bf16", matmul(y, f, a, NONE));
    DIES("no GEMM of e5m2 and e5m2", matmul(a, e5, e5, NONE));
    DIES("into e4m3", matmul(e4, a, a, NONE));
    DIES("f32 and f32 into bf16", matmul(a, f, f, NONE));
    DIES("adds f32 to bf16", matmul(a, e4, e4, f));
    DIES("inputs = 24 a multiple of 16", matmul(a, narrow, narrow, NONE));
    DIES("w is e4m3 without the transposed copy", matmul_dx(a, e5, no_t, false));
    DIES("x is e4m3 without the transposed copy", matmul_dw(a, e5, no_t));
    release();
}

/* ./test_cuda_matmul [pattern]: only the tests whose names match. */
int main(int argc, char **argv)
{
    static char folder[] = "/tmp/coat-autotune-XXXXXX", file[64];
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    else if (mkdtemp(folder))
        setenv("XDG_CACHE_HOME", folder, 1);
    const int failed = run_all_tests(start_device, NULL);
    for (int i = 0; i < 3 && argc == 1; i++) {
        snprintf(file, sizeof file, "%s%s", folder,
                 i == 0   ? "/coat/gemms.txt"
                 : i == 1 ? "/coat"
                          : "");
        remove(file);
    }
    return failed;
}
