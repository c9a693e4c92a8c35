/* FP8 through quantize(): codes, scales and transposed copies, bit for bit on both back ends. */
#include "tests/test.h"
#include "tests/fp8.h"
#include "tests/golden.h"

static const Format F = { F32, 0 }, H = { BF16, 0 };

static float amax_of(const double *x, size_t n)
{
    float amax = 0;
    for (size_t i = 0; i < n; i++)
        amax = fmaxf(amax, (float)fabs(x[i]));
    return amax;
}

/* Returns the scale of a group: it maps the largest code <= a, in the binade of the largest codes,
 * to a. */
static uint8_t expected_byte(float a, DType d)
{
    const double *code = fp8_table(d);
    /* the first code of the last binade */
    const int M = d == E4M3 ? 3 : 2, binade = fp8_last(d) >> M << M;
    int p, c = binade;
    if (a < 0x1p-10f)
        return 0;
    const double x = 2 * frexp(a, &p) * code[binade];
    while (c < binade + (1 << M) - 1 &&
           code[binade] * (1 + (double)(c + 1 - binade) / (1 << M)) <= x)
        c++;
    const float beyond = (float)(x / (code[binade] * (1 + (double)(c - binade) / (1 << M))));
    const int j = (int)nearbyint(ldexp(beyond - 1, M + 3)),
              E = p - 1 + 10 + (c > fp8_last(d) && d == E4M3), s = 8 * E + j % 8;
    return (uint8_t)(s < 254 ? s : 254);
}

/* Returns the expected snapshot of `t`, from the values that were quantized. */
static uint8_t *expected_bytes(Tensor t, const double *x)
{
    const size_t n = tensor_numel(t), codes = t.data_t ? 2 * n : n;
    const size_t group = t.format.group ? (size_t)t.format.group : n;
    uint8_t *bytes = keep(tensor_bytes(t));
    for (size_t g = 0; g < n; g += group) {
        float amax = amax_of(x + g, group),
              s = fmaxf(amax, 0x1p-90f) /
                  (float)fp8_table(t.format.dtype)[fp8_last(t.format.dtype)];
        if (t.format.group) {
            bytes[codes + g / group] = expected_byte(amax, t.format.dtype);
            s = decode_scale(bytes[codes + g / group], t.format.dtype);
        } else
            memcpy(bytes + codes, &s, sizeof s);
        for (size_t i = g; i < g + group; i++)
            bytes[i] = fp8_nearest((float)x[i] * (1 / s), t.format.dtype);
    }
    for (int r = 0; t.data_t && r < t.rows; r++)
        for (int c = 0; c < t.cols; c++)
            bytes[n + (size_t)(c * t.rows + r)] = bytes[r * t.cols + c];
    return bytes;
}

static Tensor make_transposed(Format f, int rows, int cols)
{
    Tensor t = make(f, rows, cols);
    t.data_t = guarded(tensor_numel(t));
    return t;
}

static const Format formats[] = {
    { E4M3, 0 }, { E5M2, 0 }, { E4M3, 16 }, { E5M2, 16 }, { E4M3, 128 }
};
enum { FORMATS = sizeof formats / sizeof formats[0] };

static void check_quantize(const char *what, Format f, Tensor x, bool transposed)
{
    char text[96];
    snprintf(text, sizeof text, "quantize/%s/%s-%s%s", what, format_name(f), format_name(x.format),
             transposed ? "-t" : "");
    Tensor y = transposed ? make_transposed(f, x.rows, x.cols) : make(f, x.rows, x.cols);
    TWICE(quantize(y, x), y);
    check_same_bytes(text, tensor_snapshot(y), expected_bytes(y, values(x)), tensor_bytes(y));
    golden_check(text, y, NULL);
    Tensor back = make(F, x.rows, x.cols), half = make(H, x.rows, x.cols),
           rounded = make(H, x.rows, x.cols);
    quantize(back, y);
    quantize(half, y);
    quantize(rounded, back);
    const double *exact = values(y), *got = values(back);
    /* code times scale in F32, for BF16 rounded again */
    for (size_t i = 0; i < tensor_numel(x); i++)
        assert_true(isnan(exact[i]) ? isnan(got[i]) : got[i] == (double)(float)exact[i]);
    check_same_bytes(text, tensor_snapshot(half), tensor_snapshot(rounded), tensor_bytes(half));
}

/* Rows of very different sizes, a row of zeros, a row of numbers too small for any scale, and
 * ties. */
static void fill_hard(Tensor t)
{
    float *x = keep(tensor_numel(t) * sizeof *x);
    for (size_t i = 0; i < tensor_numel(t); i++) {
        uint64_t row = i / (size_t)t.cols, bits = random_bits(3, i);
        x[i] = ldexpf(uniform(4, i, -1, 1), (int)(random_bits(5, row) % 60) - 40);
        x[i] = row % 5 == 1 ? 0 : row % 5 == 2 ? ldexpf(x[i], -90) : x[i];
        x[i] = bits % 8 == 0 ? ldexpf((float)(bits >> 60), -6) : x[i];
    }
    put(t, x);
}

TEST(test_quantize)
{
    static const int shapes[][2] = { { 1, 128 }, { 8, 128 }, { 96, 256 }, { 3, 384 } };
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int i = 0; i < FORMATS; i++)
            for (int half = 0; half < 2; half++) {
                if (shapes[s][0] == 3 && !on_cpu())
                    continue;
                char what[32];
                snprintf(what, sizeof what, "%dx%d", shapes[s][0], shapes[s][1]);
                Tensor x = make(half ? H : F, shapes[s][0], shapes[s][1]);
                fill_hard(x);
                check_quantize(what, formats[i], x, false);
                if (!formats[i].group)
                    check_quantize(what, formats[i], x, true);
                release();
            }
}

/* If the tensor contains the format's largest value, S is 1 and the codes are those of the numbers:
 * every BF16 value and every tie in range, and random floats. */
TEST(test_rounding)
{
    enum { N = 1 << 18 };
    for (int i = 0; i < 2; i++) {
        const DType d = formats[i].dtype;
        const float max = (float)fp8_table(d)[fp8_last(d)];
        float *x = keep(N * sizeof *x);
        for (uint32_t j = 0; j < N; j++) {
            uint64_t bits = random_bits(6, j);
            float any = ldexpf(1 + (float)(bits >> 41) * 0x1p-23f, (int)(bits % 40) - 24);
            float tie = (float)(fp8_table(d)[j % 120] + fp8_table(d)[j % 120 + 1]) / 2;
            x[j] = j < 0x10000 ? float_from_bits(j << 16) : j % 4 ? any : bits & 1 ? tie : -tie;
            if (!(fabsf(x[j]) <= max))
                x[j] = isnan(x[j]) ? NAN : max;
        }
        Tensor t = make(F, N / 128, 128);
        put(t, x);
        check_quantize("rounding", formats[i], t, true);
        release();
    }
}

/* Maxima of groups: every exponent; all mantissas near values at which the code, the scale or both
 * change; and random ones. */
TEST(test_group_scales)
{
    enum { COLS = 512, ROWS = 2048, GROUPS = COLS / 16 * ROWS };
    for (int i = 2; i < 4; i++) {
        float *x = keep(GROUPS * 16 * sizeof *x);
        for (uint32_t g = 0; g < GROUPS; g++) {
            const uint64_t bits = random_bits(8, g);
            const int steps = (int)(g / 3 % 512), near = (int)(g % 3) - 1;
            const float chosen = 1 + (float)steps / 512 + (float)near * 0x1p-23f,
                        any = 1 + (float)(bits >> 41) * 0x1p-23f;
            const float amax = ldexpf(g < GROUPS / 2 ? chosen : any, (int)(bits % 44) - 16);
            for (uint32_t e = 0; e < 16; e++)
                x[16 * g + e] = e == bits / 64 % 16 ? -amax : amax * uniform(9, 16 * g + e, -1, 1);
        }
        Tensor t = make(F, ROWS, COLS);
        put(t, x);
        check_quantize("scales", formats[i], t, false);
        release();
    }
}

/* NaN stays NaN and does not affect the scale. An infinity spoils all values that share its
 * scale. */
TEST(test_not_finite)
{
    for (int i = 0; i < FORMATS; i++) {
        float x[256];
        for (size_t j = 0; j < 256; j++)
            x[j] = uniform(7, j, -1, 1);
        x[3] = NAN;
        Tensor t = make(F, 2, 128), y = make(formats[i], 2, 128);
        put(t, x);
        check_quantize("nan", formats[i], t, false);
        x[130] = -INFINITY;
        put(t, x);
        quantize(y, t);
        const double *v = values(y);
        const size_t group = formats[i].group ? (size_t)formats[i].group : 256;
        for (size_t j = 0; j < 256; j++)
            assert_int_equal(isnan(v[j]) != 0, j == 3 || j / group == 130 / group);
        release();
    }
}

/* Converts from one FP8 format to another, and sums FP8 values, by decoded values. */
TEST(test_between_formats)
{
    for (int i = 0; i < FORMATS; i++)
        for (int j = 0; j < FORMATS; j++) {
            Tensor x = make(F, 8, 256), y = make(formats[i], 8, 256), z = make(formats[j], 8, 256);
            fill_hard(x);
            quantize(y, x);
            double *v = values(y);
            for (int k = 0; k < 8 * 256; k++)
                v[k] = (float)v[k];
            quantize(z, y);
            check_same_bytes("from FP8 to FP8", tensor_snapshot(z), expected_bytes(z, v),
                             tensor_bytes(z));
            release();
        }
}

/* The two halves of quantize: a given scale, codes without rows or without a transpose, and a
 * transpose of codes. */
TEST(test_halves)
{
    for (int i = 0; i < 2; i++) {
        Tensor x = make(F, 24, 32), whole = make_transposed(formats[i], 24, 32);
        Tensor y = make_transposed(formats[i], 24, 32);
        fill_hard(x);
        quantize(whole, x);
        const uint8_t *expected = tensor_snapshot(whole);
        quantize_scale(y, x);
        quantize_codes(y, x);
        check_same_bytes("scale, then codes", tensor_snapshot(y), expected, tensor_bytes(y));

        Tensor rows = make(formats[i], 24, 32), columns = make(formats[i], 32, 24), only = columns;
        rows.scale = columns.scale = only.scale = y.scale;
        TWICE(quantize_codes(rows, x), rows);
        check_same_bytes("rows", tensor_snapshot(rows), expected, tensor_numel(rows));
        only.rows = 24, only.cols = 32, only.data = NULL, only.data_t = columns.data;
        TWICE(quantize_codes(only, x), columns);
        check_same_bytes("columns", tensor_snapshot(columns), expected + tensor_numel(rows),
                         tensor_numel(rows));
        Tensor transpose = make(formats[i], 32, 24);
        transpose.scale = y.scale, only.data_t = transpose.data;
        TWICE(quantize_codes(only, rows), transpose);
        check_same_bytes("columns from rows", tensor_snapshot(transpose),
                         expected + tensor_numel(rows), tensor_numel(rows));
        release();
    }
}

static void check_items(const char *what, Tensor y, Tensor x, int items)
{
    for (int i = 0; i < items; i++) {
        const Tensor one = tensor_item(y, i, items);
        check_same_bytes(what, tensor_snapshot(one),
                         expected_bytes(one, values(tensor_item(x, i, items))), tensor_bytes(one));
    }
}

/* Each item has the scale, codes and transposed codes that it has alone, in shapes with and without
 * tiles of the CUDA back end. */
TEST(test_items)
{
    static const int shapes[][3] = { { 5, 48, 80 }, { 3, 160, 64 }, { 4, 24, 36 }, { 6, 1, 4112 } };
    for (int c = 0; c < 16; c++) {
        const int *s = shapes[c / 4], items = s[0], rows = items * s[1], cols = s[2];
        const size_t n = (size_t)rows * (size_t)cols;
        Tensor x = make(c % 2 ? H : F, rows, cols),
               y = make_transposed(formats[c / 2 % 2], rows, cols), back = make(F, rows, cols);
        float *value = keep(n * sizeof *value);
        y.scale = guarded(sizeof(float) * SCALE_FLOATS * (size_t)items);
        for (size_t i = 0; i < n; i++)
            value[i] = ldexpf(uniform(4, i, -1, 1), (int)(i / (n / (size_t)items)));
        put(x, value);
        TWICE(quantize_item_scales(y, x, items), y);
        TWICE(quantize_item_codes(y, x, items), y);
        check_items("rows and columns", y, x, items);
        Tensor halves = y, row_codes = y, columns = y;
        halves.data = row_codes.data = guarded(n), halves.data_t = columns.data_t = guarded(n);
        row_codes.data_t = columns.data = NULL;
        quantize_item_codes(row_codes, x, items);
        quantize_item_codes(columns, x, items);
        check_items("rows, then columns", halves, x, items);
        halves.data_t = columns.data_t = guarded(n);
        quantize_item_codes(columns, row_codes, items);
        check_items("columns from rows", halves, x, items);
        TWICE(quantize_item_codes(back, row_codes, items), back);
        for (int i = 0; i < items; i++) {
            const double *found = values(tensor_item(back, i, items)),
                         *expected = values(tensor_item(row_codes, i, items));
            for (size_t k = 0; k < n / (size_t)items; k++)
                assert_true((float)found[k] == (float)expected[k]);
        }
        release();
    }
    Tensor x = make(F, 30, 16), y = make_transposed(formats[0], 30, 16),
           groups = make(formats[2], 30, 16);
    DIES("expected one shape, divided into 7 items", quantize_item_codes(y, x, 7));
    DIES("10 items of 3 x 8 elements; expected a multiple of 16 in each",
         quantize_item_scales((Tensor){ .format = formats[0], .rows = 30, .cols = 8 },
                              (Tensor){ .format = F, .rows = 30, .cols = 8 }, 10));
    DIES("items of e4m3/16 from f32; expected no groups", quantize_item_codes(groups, x, 2));
    release();
}

/* A transpose uses tiles, and a CUDA grid has at most 65,535 rows of tiles. The test does not
 * access the memory of such a tensor. */
TEST(test_too_many_rows)
{
    if (on_cpu())
        skip();
    Tensor x = make(F, 16, 16), y = make_transposed(formats[0], 16, 16);
    x.rows = y.rows = 65535 * 128 + 16;
    DIES("8388496 rows; the CUDA back end supports up to 8388480", quantize_codes(y, x));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
