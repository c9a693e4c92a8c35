/* The reference for the FP8 encoders, which shares no code with them: it looks up the values of all
 * codes in a table, and encodes a number as the nearest value, in double. The file also makes and
 * checks operands of FP8 GEMMs: tensors with one scale, rows of codes, and the same codes
 * transposed. */
#pragma once
#include "tests/golden.h"

/* Code of the largest finite value. */
static inline int fp8_last(DType d)
{
    return d == E4M3 ? 0x7e : 0x7b;
}

static inline const double *fp8_table(DType d)
{
    static double table[2][256];
    if (table[d == E5M2][1] == 0)
        for (int c = 0; c < 256; c++)
            table[d == E5M2][c] = decode_fp8((uint8_t)c, d);
    return table[d == E5M2];
}

/* Codes 0 .. last have ascending values. In a tie, the even code is the one with the even
 * mantissa. */
static inline uint8_t fp8_nearest(double x, DType d)
{
    const double *value = fp8_table(d), a = fabs(x);
    const uint8_t sign = signbit(x) ? 0x80 : 0;
    int low = 0, high = fp8_last(d);
    if (isnan(x))
        return 0x7f;
    if (a >= value[high])
        return sign | (uint8_t)high;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (value[middle] <= a)
            low = middle;
        else
            high = middle;
    }
    /* exact: both values are multiples of a's last place */
    double below = a - value[low], above = value[high] - a;
    return sign | (uint8_t)(below < above || (below == above && low % 2 == 0) ? low : high);
}

/* ---- operands -------------------------------------------------------------------------------- */

static inline Tensor make_operand(Format f, int rows, int cols)
{
    Tensor t = make(f, rows, cols);
    t.data_t = guarded(tensor_numel(t));
    return t;
}

/* rows_of and columns_of return views of an operand that have only its rows or only its transposed
 * codes. */
static inline Tensor rows_of(Tensor t)
{
    t.data_t = NULL;
    return t;
}

static inline Tensor columns_of(Tensor t)
{
    t.data = NULL;
    return t;
}

static inline float operand_scale(Tensor t)
{
    float s;
    device_get(&s, t.scale, sizeof s);
    return s;
}

static inline void check_transposed(const char *name, Tensor t)
{
    const uint8_t *codes = tensor_snapshot(t), *transposed = codes + tensor_numel(t);
    assert_non_null(t.data_t);
    for (int r = 0; r < t.rows; r++)
        for (int c = 0; c < t.cols; c++) {
            uint8_t a = codes[r * t.cols + c], b = transposed[c * t.rows + r];
            if (a != b)
                fail_msg("%s[%d,%d]: code %02x, transposed %02x", name, r, c, a, b);
        }
}

typedef struct {
    double low, high;
} Range;

/* Returns the range of max|x| for values x within `bound` of ref. Both ends are at least 2^-90. */
static inline Range amax_range(const double *ref, const double *bound, size_t n)
{
    Range r = { 0x1p-90, 0x1p-90 };
    for (size_t i = 0; i < n; i++) {
        r.low = fmax(r.low, fabs(ref[i]) - bound[i]);
        r.high = fmax(r.high, fabs(ref[i]) + bound[i]);
    }
    return r;
}

/* Checks that t, with its scale S, encodes values within `bound` of ref. Rounding to codes is
 * monotonic, so each code lies between the codes of the smallest and the largest allowed x/S. x
 * (1/S) in F32 has two roundings. */
static inline void check_codes(const char *name, Tensor t, const double *ref, const double *bound)
{
    const DType d = t.format.dtype;
    const double *value = fp8_table(d), S = operand_scale(t);
    const uint8_t *codes = tensor_snapshot(t);
    for (size_t i = 0; i < tensor_numel(t); i++) {
        double low = (ref[i] - bound[i]) / S, high = (ref[i] + bound[i]) / S;
        uint8_t least = fp8_nearest(low - 3 * U24 * fabs(low), d);
        uint8_t most = fp8_nearest(high + 3 * U24 * fabs(high), d);
        if (!(value[codes[i]] >= value[least] && value[codes[i]] <= value[most]))
            fail_msg("%s[%zu,%zu]: code %02x (%g), expected %02x .. %02x for %.9g +- %.3g with "
                     "scale %.9g",
                     name, i / (size_t)t.cols, i % (size_t)t.cols, codes[i], value[codes[i]], least,
                     most, ref[i], bound[i], S);
    }
}

/* As check_codes; also checks that the scale is max|x| / max(format) of values within `bound` of
 * ref, in F32. */
static inline void check_operand(const char *name, Tensor t, const double *ref, const double *bound)
{
    const double top = fp8_table(t.format.dtype)[fp8_last(t.format.dtype)], S = operand_scale(t);
    const Range amax = amax_range(ref, bound, tensor_numel(t));
    if (!(S * top >= amax.low * (1 - 2 * U24) && S * top <= amax.high * (1 + 2 * U24)))
        fail_msg("%s: scale %.9g, expected %.9g .. %.9g", name, S, amax.low / top, amax.high / top);
    check_codes(name, t, ref, bound);
}

/* Compares with the CPU's record. Two results may have neighbouring codes, whose values differ by 2
 * u |y| or by the smallest code, and their scales may differ within the range of max|x|. */
static inline void golden_operand(const char *name, Tensor t, const double *ref,
                                  const double *bound)
{
    const Range amax = amax_range(ref, bound, tensor_numel(t));
    const double smallest = fp8_table(t.format.dtype)[1] * operand_scale(t);
    const double slack = amax.high / amax.low - 1 + 4 * U24;
    double *wider = keep(tensor_numel(t) * sizeof *wider);
    for (size_t i = 0; i < tensor_numel(t); i++)
        wider[i] = bound[i] + smallest / 2 + slack * (fabs(ref[i]) + bound[i]);
    golden_check(name, t, wider);
}

/* ---- GEMMs ----------------------------------------------------------------------------------- */

/* element (i, k) is x[i row + k col] */
typedef struct {
    const double *x;
    int row, col;
} Strided;

/* ref = old + sum over k of a b. In F32, decoding, products and sums are rounded, which gives an
 * error of at most (K + 4) u sum|ab|. Hopper's FP8 tensor cores add 32 products and the accumulator
 * at a time, with 14 fraction bits: each of these 33 terms is truncated at 2^-13 of the largest
 * term. `most` bounds the largest term: it is at least as large as each product, and as each sum
 * over a range of k, which is a difference of two sums from 0. In a step all 33 truncations may
 * have the same sign. Without short accumulators, sums are regularly promoted to F32, so the error
 * is smaller. */
static inline void product(double *ref, double *bound, const double *old, int rows, int cols, int K,
                           Strided a, Strided b)
{
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < cols; j++) {
            double sum = 0, size = 0, most = 0;
            for (int k = 0; k < K; k++) {
                double term = a.x[i * a.row + k * a.col] * b.x[j * b.row + k * b.col];
                sum += term;
                size += fabs(term);
                most = fmax(most, fmax(fabs(term), 2 * fabs(sum)));
            }
            size_t at = (size_t)i * (size_t)cols + (size_t)j;
            double start = old ? old[at] : 0;
            ref[at] = start + sum;
            bound[at] = (K + 4) * U24 * size + 4 * U24 * fabs(start);
            if (!on_cpu())
                bound[at] += (K + 31) / 32 * 33 * 0x1p-13 * most;
        }
}

/* Checks matmul with a bias, and the gradient of the bias. ref, bound: the product without the
 * bias, and its error bound. */
static inline void check_bias(Tensor y, Tensor x, Tensor w, Tensor dy, double *ref, double *bound)
{
    const int N = y.rows, O = y.cols;
    Tensor bias = make_filled(y.format, O, 1, 7, -2, 2), db = make_filled(y.format, O, 1, 8, -2, 2);
    double *added = values(bias), *DY = values(dy), *old = values(db), one = 1;
    for (int i = 0; i < N * O; i++) {
        ref[i] += added[i % O];
        bound[i] += 4 * U24 * fabs(added[i % O]);
    }
    TWICE(matmul(y, x, w, bias), y);
    check_close("matmul + bias", y, ref, bound);
    TWICE(matmul_db(db, dy), db);
    product(ref, bound, old, O, 1, N, (Strided){ DY, 1, O }, (Strided){ &one, 0, 0 });
    check_close("matmul_db", db, ref, bound);
    EMPTY_IS_ZEROS(db, matmul_db(db, dy));
}

/* ---- inputs ---------------------------------------------------------------------------------- */

/* Makes a BF16 tensor whose groups of 16 have values of different sizes, so that a wrong scale
 * shows. */
static inline Tensor make_uneven(int rows, int cols, uint64_t seed, float low, float high)
{
    Tensor t = make((Format){ BF16, 0 }, rows, cols);
    float *x = keep(tensor_numel(t) * sizeof *x);
    for (size_t i = 0; i < tensor_numel(t); i++)
        x[i] = ldexpf(uniform(seed, i, low, high), (int)(random_bits(seed + 100, i / 16) % 5) - 2);
    put(t, x);
    return t;
}

/* Makes an FP8 tensor; in E4M3 its scale is size / 256. Products of its elements have up to 6
 * binary digits, so tensor cores add them exactly, in any order. */
static inline Tensor make_round(Format f, int rows, int cols, uint64_t seed, float size)
{
    Tensor t = make((Format){ BF16, 0 }, rows, cols), codes = make_operand(f, rows, cols);
    float *x = keep(tensor_numel(t) * sizeof *x);
    for (size_t i = 0; i < tensor_numel(t); i++)
        x[i] = size * ((float)(random_bits(seed, i) % 15) - 7) / 4;
    put(t, x);
    quantize(codes, t);
    return codes;
}
