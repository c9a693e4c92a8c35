/* Gradients as ranks send them to each other: the error of each format, values that are not finite,
 * and sums in the order of ranks. On CUDA, messages and sums are also compared with the CPU's
 * record, byte for byte. */
#include "tests/test.h"
#include "tests/golden.h"

#include "kernels/wire.h"

static const Format F = { F32, 0 }, H = { BF16, 0 };
static const struct {
    const char *name;
    Wire wire;
} wires[] = {
    { "bf16", WIRE_BF16 }, { "fp8", WIRE_FP8 }, { "int8", WIRE_INT8 }, { "fp8_lm", WIRE_FP8_LM }
};
enum { NUM_WIRES = sizeof wires / sizeof *wires, RECORDS = 37 };

static char label[96];
static const char *name(const char *what, int wire, Format f)
{
    snprintf(label, sizeof label, "wire-%s/%s/%s", what, wires[wire].name, format_name(f));
    return label;
}

/* Gradients: groups of very different sizes, from 2^-100 to 2^20. Group 1 is 0. */
static Tensor make_gradients(Format f, uint64_t seed)
{
    const size_t n = (size_t)RECORDS * WIRE_VALUES;
    Tensor t = make(f, RECORDS, WIRE_VALUES);
    float *x = keep(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        const size_t group = i / WIRE_GROUP;
        const int exponent = (int)(random_bits(9, group) % 120) - 100;
        x[i] = group == 1 ? 0 : ldexpf(uniform(seed, i, -1, 1), exponent);
    }
    put(t, x);
    return t;
}

/* A scale of 1/4, and a factor of 2^-4: the values of the larger groups are cut. */
static WireScale given_scale(Wire w)
{
    const float quarter = 0.25f;
    const uint64_t none = 0;
    if (w != WIRE_FP8_LM)
        return (WireScale){ 0 };
    WireScale s = { guarded(sizeof quarter), 0x1p-4f, guarded(sizeof none) };
    device_put((void *)s.scale, &quarter, sizeof quarter);
    device_put(s.cut, &none, sizeof none);
    return s;
}

static uint64_t take_cut(WireScale s)
{
    uint64_t cut;
    device_get(&cut, s.cut, sizeof cut);
    return cut;
}

static Tensor make_message(int records, Wire w)
{
    Tensor t = make(H, records, (int)(wire_record_bytes(w) / 2));
    return wire_message(t.data, (size_t)records, w);
}

static Tensor encoded(Tensor x, int wire)
{
    const Wire w = wires[wire].wire;
    const WireScale s = given_scale(w);
    Tensor message = make_message(x.rows, w);
    TWICE(wire_encode(message, x, w, s), message);
    return message;
}

/* Returns the values of a message, each product rounded to F32. */
static float *decoded(Tensor message, Wire w)
{
    const size_t n = (size_t)message.rows * WIRE_VALUES, bytes = wire_record_bytes(w);
    const uint8_t *all = tensor_snapshot(message);
    const double *bf16 = w == WIRE_BF16 ? values(message) : NULL;
    float *x = keep(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        const uint8_t *record = all + i / WIRE_VALUES * bytes;
        const size_t at = i % WIRE_VALUES;
        float scale = 1;
        if (w != WIRE_BF16)
            memcpy(&scale, record + WIRE_VALUES + at / WIRE_GROUP * sizeof scale, sizeof scale);
        x[i] = bf16             ? (float)bf16[i]
               : w == WIRE_INT8 ? (float)(int8_t)record[at] * scale
                                : (float)decode_fp8(record[at], E4M3) * scale;
    }
    return x;
}

/* Half the distance of two codes at x, where S is the scale: E4M3 has 3 bits after the first and
 * its smallest code is 2^-9. BF16 has 7 bits. The product with 1/S adds two roundings of 2^-24. */
static double half_step(double x, double S, Wire w)
{
    const double steps = w == WIRE_BF16   ? 0x1p-8 * fabs(x)
                         : w == WIRE_INT8 ? S / 2
                                          : fmax(0x1p-4 * fabs(x), 0x1p-10 * S);
    return steps + 2 * U24 * fabs(x);
}

static void check_codes(int wire, Format f)
{
    const Wire w = wires[wire].wire;
    const Tensor x = make_gradients(f, 1);
    const Tensor message = encoded(x, wire);
    const double *exact = values(x);
    const float *found = decoded(message, w);
    for (size_t g = 0; g < (size_t)RECORDS * WIRE_VALUES / WIRE_GROUP; g++) {
        double amax = 0x1p-90;
        for (int i = 0; i < WIRE_GROUP; i++)
            amax = fmax(amax, fabs(exact[g * WIRE_GROUP + i]));
        const double S = w == WIRE_FP8_LM ? 0x1p-6 : (float)(amax / (w == WIRE_INT8 ? 127 : 448));
        for (size_t i = g * WIRE_GROUP; i < (g + 1) * WIRE_GROUP; i++) {
            const double most = w == WIRE_FP8_LM ? 448 * S : INFINITY,
                         v = fmax(-most, fmin(exact[i], most));
            if (!(fabs(found[i] - v) <= half_step(v, S, w)))
                fail_msg("%s: element %zu is %.9g, %.9g in the message", name("codes", wire, f), i,
                         exact[i], found[i]);
        }
    }
    golden_check(name("codes", wire, f), message, NULL);
    release();
}

TEST(test_codes)
{
    for (int wire = 0; wire < NUM_WIRES; wire++) {
        check_codes(wire, F);
        check_codes(wire, H);
    }
}

/* The values that the given scale cuts are counted, over several calls. */
TEST(test_cut)
{
    const Tensor x = make_gradients(F, 2);
    const Tensor message = make_message(RECORDS, WIRE_FP8_LM);
    const WireScale s = given_scale(WIRE_FP8_LM);
    const double *exact = values(x);
    uint64_t expected = 0;
    for (size_t i = 0; i < tensor_numel(x); i++)
        expected += fabs(exact[i]) >= WIRE_CUT * 0x1p-6;
    wire_encode(message, x, WIRE_FP8_LM, s);
    assert_true(expected > 0 && take_cut(s) == expected);
    wire_encode(message, x, WIRE_FP8_LM, s);
    assert_true(take_cut(s) == 2 * expected);
    release();
}

/* All values of a group with NaN or infinity become NaN in 8 bits, and no others. BF16 keeps
 * them. */
TEST(test_not_finite)
{
    for (int wire = 0; wire < NUM_WIRES; wire++)
        for (int i = 0; i < 3; i++) {
            const float bad[] = { INFINITY, -INFINITY, NAN };
            const Tensor x = make_f32(1, WIRE_VALUES);
            float in[WIRE_VALUES];
            for (int k = 0; k < WIRE_VALUES; k++)
                in[k] = (float)k - 100;
            in[WIRE_GROUP + 5] = bad[i];
            put(x, in);
            const Tensor message = encoded(x, wire);
            const float *found = decoded(message, wires[wire].wire);
            for (int k = 0; k < WIRE_VALUES; k++) {
                const bool whole = wires[wire].wire != WIRE_BF16 && k >= WIRE_GROUP;
                assert_true(isfinite(found[k]) == (whole ? false : k != WIRE_GROUP + 5));
            }
            snprintf(label, sizeof label, "wire-not-finite/%s/%d", wires[wire].name, i);
            golden_check(label, message, NULL);
            release();
        }
}

/* The sum has the bits of additions in F32 in the order of ranks, of which this one is not
 * rounded. */
static void check_sum(int wire, Format f, int ranks, int own)
{
    const Wire w = wires[wire].wire;
    const size_t n = (size_t)RECORDS * WIRE_VALUES;
    const int apart = RECORDS + own;
    const Tensor all = make_message((ranks - 1) * apart, w), y = make(f, RECORDS, WIRE_VALUES);
    float *sum = keep(n * sizeof *sum);
    Tensor x = y;
    for (int r = 0; r < ranks; r++) {
        const Tensor values_of = make_gradients(f, (uint64_t)r);
        const double *exact = values(values_of);
        if (r == own)
            x = values_of;
        const Tensor message = r == own ? NONE : encoded(values_of, wire);
        const float *rounded = r == own ? NULL : decoded(message, w);
        for (size_t i = 0; i < n; i++)
            sum[i] += rounded ? rounded[i] : (float)exact[i];
        if (r != own)
            device_copy(tensor_rows(all, (r - (r > own)) * apart, RECORDS).data, message.data,
                        tensor_bytes(message));
    }
    TWICE(wire_sum(y, x, all, ranks, own, w), y);
    const Tensor wide = make_f32(RECORDS, WIRE_VALUES), expected = make(f, RECORDS, WIRE_VALUES);
    put(wide, sum);
    quantize(expected, wide);
    snprintf(label, sizeof label, "wire-sum/%s/%s/%d-%d", wires[wire].name, format_name(f), ranks,
             own);
    check_same_bytes(label, tensor_snapshot(y), tensor_snapshot(expected), tensor_bytes(y));
    golden_check(label, y, NULL);
    wire_sum(x, x, all, ranks, own, w);
    check_same_bytes("in place", tensor_snapshot(x), tensor_snapshot(y), tensor_bytes(y));
    release();
}

TEST(test_sum)
{
    for (int wire = 0; wire < NUM_WIRES; wire++) {
        check_sum(wire, F, 2, 1);
        check_sum(wire, H, 2, 0);
        check_sum(wire, H, 9, 4);
    }
}

TEST(test_errors)
{
    const Tensor x = make_gradients(F, 1), wide = make_message(RECORDS, WIRE_BF16),
                 message = make_message(RECORDS, WIRE_FP8_LM),
                 uneven = make_message(RECORDS + 1, WIRE_FP8);
    const WireScale none = { 0 };
    DIES("wire_encode: message", wire_encode(wide, x, WIRE_FP8, none));
    DIES("wire_encode: a scale is not given", wire_encode(message, x, WIRE_FP8_LM, none));
    DIES("wire_sum: f32 from f32, 37 records from 38, on rank 0 of 3",
         wire_sum(x, x, uneven, 3, 0, WIRE_FP8));
    release();
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
