/* Compares each operation of Muon with its formula, and the two back ends with each other. */
#include "tests/test.h"
#include "tests/golden.h"

#include "kernels/values.h"

static const Format F = { F32, 0 }, H = { BF16, 0 };
enum { N = 5120 };

/* Errors: m and u are sums of two products, with errors of 4 u of their sizes; u also has the error
 * of m. */
static void check_momentum(const char *name, Format moment, Format grad, bool nesterov)
{
    const float momentum = 0.95f, scale = 0.5f, rest = 1 - momentum;
    Tensor u = make(H, 1, N), m = make_filled(moment, 1, N, 1, -1e-2f, 1e-2f),
           g = make_filled(grad, 1, N, 2, -1, 1);
    double *M = values(m), *G = values(g), *U = keep(N * sizeof *U), *bm = keep(N * sizeof *bm),
           *bu = keep(N * sizeof *bu);
    char text[64];
    TWICE(muon_momentum(u, m, g, momentum, nesterov, scale), u, m);
    for (int i = 0; i < N; i++) {
        const double step = (double)rest * scale * G[i], old = momentum * M[i];
        M[i] = old + step;
        bm[i] = 4 * U24 * (fabs(old) + fabs(step));
        U[i] = nesterov ? momentum * M[i] + step : M[i];
        bu[i] = bm[i] + 4 * U24 * (fabs(momentum * M[i]) + fabs(step));
    }
    snprintf(text, sizeof text, "muon-%s-m", name);
    check_close(text, m, M, bm);
    golden_check(text, m, bm);
    snprintf(text, sizeof text, "muon-%s-u", name);
    check_close(text, u, U, bu);
    golden_check(text, u, bu);
    release();
}

/* Returns a coded moment as a snapshot has it: codes, then scales. */
static Tensor in_snapshot(Tensor m, void *bytes)
{
    return (Tensor){ .data = bytes,
                     .scale = (char *)bytes + tensor_numel(m),
                     .format = m.format,
                     .rows = 1,
                     .cols = m.cols };
}

static double *coded_values(Tensor m)
{
    float *x = keep(tensor_numel(m) * sizeof *x);
    double *wide = keep(tensor_numel(m) * sizeof *wide);
    tensor_load(x, in_snapshot(m, tensor_snapshot(m)), 0, tensor_numel(m));
    for (size_t i = 0; i < tensor_numel(m); i++)
        wide[i] = x[i];
    return wide;
}

/* Powers of approximated logarithms err by 2^-18 of the largest value of a group (test_moments.c).
 * A code is off by a half of its spacing, or of the next one's: with a power k >= 1/2 its value by
 * at most 2^-4 / k of itself, and that of code 0 by the group's smallest value. So m is within 2^-3
 * of itself or 2^-6 of the largest. u is not made from codes. */
TEST(test_coded_momentum)
{
    const Format coded = format_of_moment((Format){ E4M3, 128, true });
    Tensor u = make(H, 1, N), m = make(coded, 1, N), g = make_filled(F, 1, N, 2, -1, 1);
    void *bytes = keep(tensor_bytes(m));
    float *start = keep(N * sizeof *start);
    for (size_t i = 0; i < N; i++)
        start[i] = uniform(1, i, -1e-2f, 1e-2f);
    tensor_store(in_snapshot(m, bytes), 0, start, N);
    tensor_restore(m, bytes);
    double *M = coded_values(m), *G = values(g), most = 0, off = 0, all = 0;
    double *U = keep(N * sizeof *U), *bu = keep(N * sizeof *bu);
    TWICE(muon_momentum(u, m, g, 0.95f, true, 1), u, m);
    for (int i = 0; i < N; i++) {
        const double step = (double)(1 - 0.95f) * G[i];
        M[i] = 0.95f * M[i] + step;
        U[i] = 0.95f * M[i] + step;
        bu[i] = 0x1p-17 * (fabs(M[i]) + fabs(step));
        most = fmax(most, fabs(M[i]));
    }
    const double *stored = coded_values(m);
    for (int i = 0; i < N; i++) {
        assert_true(fabs(stored[i] - M[i]) <= fmax(0x1p-3 * fabs(M[i]), 0x1p-6 * most));
        off += pow(stored[i] - M[i], 2);
        all += pow(M[i], 2);
    }
    assert_true(sqrt(off / all) < 0x1p-4 / sqrt(3) && off > 0);
    check_close("muon-coded-u", u, U, bu);
    golden_check("muon-coded-u", u, bu);
    release();
}

TEST(test_momentum)
{
    check_momentum("f32", F, F, true);
    check_momentum("f32-plain", F, H, false);
    check_momentum("bf16", H, H, true);
}

/* The divisor is a BF16 number, as torch's norm of a BF16 tensor. */
TEST(test_normalize)
{
    Tensor x = make_filled(H, 40, 24, 1, -1, 1), squares = make_filled(F, 1, 1, 0, 301.0f, 301.0f);
    double *X = values(x), *bound = keep(960 * sizeof *bound);
    TWICE(muon_normalize(x, x, squares.data, 1e-7f), x);
    for (int i = 0; i < 960; i++) {
        X[i] /= 17.375; /* sqrt(301) = 17.349; 17.375 is the next multiple of 1/8 */
        bound[i] = U24 * fabs(X[i]);
    }
    check_close("muon-normalize", x, X, bound);
    golden_check("muon-normalize", x, NULL);
    fill(x, 1, -1, 1);
    fill(squares, 0, 0, 0);
    X = values(x);
    muon_normalize(x, x, squares.data, 2);
    for (int i = 0; i < 960; i++)
        bound[i] = 0, X[i] /= 2;
    check_close("muon-normalize-eps", x, X, bound);
    release();
}

/* Sums of 48 products in F32 have an error of 50 u of their sizes. */
TEST(test_product)
{
    enum { R = 32, O = 48, C = 64 };
    Tensor y = make(H, R, C), x = make_filled(H, R, O, 1, -1, 1),
           w = make_filled(H, O, C, 2, -1, 1);
    Tensor add = make_filled(H, R, C, 3, -1, 1);
    double *X = values(x), *W = values(w), *A = values(add), *ref = keep(R * C * sizeof *ref),
           *bound = keep(R * C * sizeof *bound);
    TWICE(matmul_scaled(y, x, w, 2.0315f, add, -4.775f), y);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            double sum = -4.775f * A[r * C + c], size = fabs(sum);
            for (int o = 0; o < O; o++) {
                const double product = 2.0315f * X[r * O + o] * W[o * C + c];
                sum += product;
                size += fabs(product);
            }
            ref[r * C + c] = sum;
            bound[r * C + c] = (O + 2) * U24 * size;
        }
    check_close("muon-product", y, ref, bound);
    golden_check("muon-product", y, bound);
    release();
}

/* Sums of 24 products in F32. */
static void check_symmetric(const char *name, bool columns)
{
    enum { R = 40, C = 24 };
    Tensor y = make(H, R, R),
           x = columns ? make_filled(H, C, R, 1, -1, 1) : make_filled(H, R, C, 1, -1, 1),
           gram = make(H, R, R);
    double *X = values(x), *ref = keep(R * R * sizeof *ref), *bound = keep(R * R * sizeof *bound);
    matmul_symmetric(gram, x, columns, 1, (Tensor){ 0 }, 0);
    const double *A = values(gram);
    TWICE(matmul_symmetric(y, x, columns, 2.0315f, gram, -4.775f), y);
    for (int r = 0; r < R; r++)
        for (int c = 0; c < R; c++) {
            double sum = 0, size = 0;
            for (int i = 0; i < C; i++) {
                const double product =
                    columns ? X[i * R + r] * X[i * R + c] : X[r * C + i] * X[c * C + i];
                sum += product;
                size += fabs(product);
            }
            const double u = unit_roundoff(H) * (fabs(sum) + C * U24 * size) + C * U24 * size;
            if (!(fabs(A[r * R + c] - sum) <= u))
                fail_msg("%s[%d,%d]: %.9g, expected %.9g", name, r, c, A[r * R + c], sum);
            const double added = -4.775f * A[r * R + c];
            ref[r * R + c] = 2.0315f * sum + added;
            bound[r * R + c] = (C + 2) * U24 * (2.0315f * size + fabs(added));
        }
    check_close(name, y, ref, bound);
    golden_check(name, y, bound);
    release();
}

/* Checks one of 97 elements of a product in blocks. All other elements, outside of the blocks on
 * the diagonal, are symmetric. */
static void check_blocks(const char *name, bool columns)
{
    enum { R = 4096, C = 16 };
    Tensor y = make(H, R, R),
           x = columns ? make_filled(H, C, R, 1, -1, 1) : make_filled(H, R, C, 1, -1, 1);
    Tensor add = make(H, R, R);
    assert_true(symmetric_in_blocks(R));
    matmul_symmetric(add, x, columns, 0.5f, (Tensor){ 0 }, 0);
    TWICE(matmul_symmetric(y, x, columns, 2, add, -1), y);
    const double *X = values(x);
    const uint16_t *Y = tensor_snapshot(y), *A = tensor_snapshot(add);
    for (int r = 0; r < R; r++)
        for (int c = r % 97; c < R; c += 97) {
            const double added = -float_from_bits((uint32_t)A[(size_t)r * R + (size_t)c] << 16);
            const double here = float_from_bits((uint32_t)Y[(size_t)r * R + (size_t)c] << 16);
            double sum = added, size = fabs(added);
            for (int i = 0; i < C; i++) {
                const double product =
                    2 * (columns ? X[i * R + r] * X[i * R + c] : X[r * C + i] * X[c * C + i]);
                sum += product;
                size += fabs(product);
            }
            if (!(fabs(here - sum) <= unit_roundoff(H) * fabs(sum) + (C + 2) * U24 * size))
                fail_msg("%s[%d,%d]: %.9g, expected %.9g", name, r, c, here, sum);
            if (r / (R / 4) != c / (R / 4))
                assert_int_equal(Y[(size_t)r * R + (size_t)c], Y[(size_t)c * R + (size_t)r]);
        }
    release();
}

TEST(test_symmetric)
{
    check_symmetric("muon-symmetric", false);
    check_symmetric("muon-symmetric-columns", true);
    check_blocks("blocks", false);
    check_blocks("blocks of columns", true);
}

/* keep and rate are powers of two, and w and x have few bits. So both sides are exact in F32, and
 * only the random bits decide. The number of an element does not depend on where a slice begins. */
TEST(test_apply)
{
    Tensor wide = make_filled(F, 1, N, 1, -1, 1), w = make_filled(H, 1, N, 1, -1, 1),
           x = make_filled(H, 1, N, 2, -1, 1);
    double *W = values(wide), *X = values(x), *bound = keep(N * sizeof *bound);
    const uint16_t *old = tensor_snapshot(w);
    uint16_t *expected = keep(N * sizeof *expected);
    muon_apply(wide, x, 0.875f, 0.02f, 3, 7);
    for (int i = 0; i < N; i++) {
        const double from = 0.875 * W[i], step = 0.02f * X[i];
        W[i] = from - step;
        bound[i] = 2 * U24 * (fabs(from) + fabs(step));
        const float here = 0.5f * float_from_bits((uint32_t)old[i] << 16) - 0x1p-7f * (float)X[i];
        expected[i] = bf16_round_stochastic(here, random_16(3, (uint64_t)(i + 7)));
    }
    check_close("muon-apply", wide, W, bound);
    golden_check("muon-apply", wide, bound);
    for (int first = 0, n; first < N; first += n) {
        n = first == 0 ? 1001 : N - first;
        muon_apply(tensor_at((uint16_t *)w.data + first, H, 1, n),
                   tensor_at((uint16_t *)x.data + first, H, 1, n), 0.5f, 0x1p-7f, 3,
                   (uint64_t)(first + 7));
    }
    check_same_bytes("muon-apply-bf16", tensor_snapshot(w), expected, N * sizeof *expected);
    release();
}

TEST(test_errors)
{
    Tensor wide = make(F, 1, 256), h = make(H, 1, 256), half = make(H, 1, 128);
    Tensor odd = make(format_of_moment((Format){ E4M3, 128, true }), 1, 64),
           short_h = make(H, 1, 64), short_f = make(F, 1, 64);
    Tensor square = make(H, 256, 256), other = make(H, 1, 256);
    DIES("muon_momentum: u is f32; expected bf16", muon_momentum(wide, wide, wide, 0.9f, true, 1));
    DIES("muon_momentum: m is (1, 128); expected (1, 256)",
         muon_momentum(h, half, wide, 0.9f, true, 1));
    DIES("e4m3/128+ of ", muon_momentum(short_h, odd, short_f, 0.9f, true, 1));
    DIES("matmul_scaled: y is one of its inputs", matmul_scaled(h, h, square, 1, other, 1));
    DIES("matmul_scaled: x is f32; expected bf16", matmul_scaled(h, wide, square, 1, h, 1));
    DIES("matmul_symmetric: y is (256, 256); expected (1, 1)",
         matmul_symmetric(square, h, false, 1, (Tensor){ 0 }, 0));
    DIES("matmul_symmetric: y is one of its inputs",
         matmul_symmetric(square, square, true, 1, (Tensor){ 0 }, 0));
    DIES("muon_normalize: x is f32; expected bf16", muon_normalize(wide, wide, wide.data, 1));
    DIES("muon_apply: x is f32; expected bf16", muon_apply(h, wide, 1, 1, 0, 0));
    release();
}

int main(void)
{
    device_init(0);
    return run_all_tests(NULL, NULL);
}
