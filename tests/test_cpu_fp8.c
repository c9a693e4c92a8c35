/* The FP8 encoder and decoder of the CPU: all codes, all BF16 values, all ties, and a million
 * random floats. test_fp8.c tests both back ends through quantize(). */
#include <float.h>

#include "tests/test.h"
#include "tests/fp8.h"

#include "kernels/cpu/cpu.h"

static void check_encode(float x, DType d)
{
    uint8_t code = fp8_encode(x, d), expected = fp8_nearest(x, d);
    if (code != expected)
        fail_msg("%s: %a becomes %02x (%g), expected %02x (%g)", d == E4M3 ? "e4m3" : "e5m2", x,
                 code, decode_fp8(code, d), expected, decode_fp8(expected, d));
}

/* Published values [Micikevicius et al. 2022, tab. 1]. */
TEST(test_landmarks)
{
    assert_true(fp8_decode(0x7e, E4M3) == 448 && fp8_decode(0x7b, E5M2) == 57344);
    assert_true(fp8_decode(0x08, E4M3) == 0x1p-6f && fp8_decode(0x01, E4M3) == 0x1p-9f);
    assert_true(fp8_decode(0x04, E5M2) == 0x1p-14f && fp8_decode(0x01, E5M2) == 0x1p-16f);
    assert_true(fp8_decode(0x38, E4M3) == 1 && fp8_decode(0x3c, E5M2) == 1 &&
                fp8_decode(0xb8, E4M3) == -1);
    assert_true(isnan(fp8_decode(0x7f, E4M3)) && isnan(fp8_decode(0xff, E4M3)) &&
                isnan(fp8_decode(0x7d, E5M2)));
    assert_true(fp8_decode(0x7c, E5M2) == INFINITY && fp8_decode(0xfc, E5M2) == -INFINITY);
    assert_true(fp8_max(E4M3) == 448 && fp8_max(E5M2) == 57344);
    assert_int_equal(fp8_encode(NAN, E4M3), 0x7f);
    assert_int_equal(fp8_encode(-NAN, E5M2), 0x7f);
    assert_int_equal(fp8_encode(INFINITY, E4M3), 0x7e);
    assert_int_equal(fp8_encode(-INFINITY, E5M2), 0xfb);
    assert_int_equal(fp8_encode(1e30f, E4M3), 0x7e);
    assert_int_equal(fp8_encode(-464, E4M3), 0xfe);
    assert_int_equal(fp8_encode(-0.0f, E4M3), 0x80);
}

TEST(test_codes_and_ties)
{
    for (DType d = E4M3; d <= E5M2; d++)
        for (int c = 0; c < 256; c++) {
            double value = decode_fp8((uint8_t)c, d), x = fp8_decode((uint8_t)c, d);
            assert_true(isnan(value) ? isnan(x) : x == value && signbit(x) == signbit(value));
            if ((c & 0x7f) > fp8_last(d))
                continue;
            assert_int_equal(fp8_encode((float)value, d), c);
            if ((c & 0x7f) == fp8_last(d))
                continue;
            float tie = (float)((value + decode_fp8((uint8_t)(c + 1), d)) / 2);
            check_encode(tie, d);
            assert_int_equal(fp8_encode(tie, d) % 2, 0);
            check_encode(nextafterf(tie, INFINITY), d);
            check_encode(nextafterf(tie, -INFINITY), d);
        }
}

TEST(test_floats)
{
    for (DType d = E4M3; d <= E5M2; d++) {
        for (uint32_t i = 0; i < 0x10000; i++)
            check_encode(float_from_bits(i << 16), d);
        for (uint64_t i = 0; i < 1000000; i++) {
            uint64_t bits = random_bits(1, i);
            /* any exponent; most values are out of range */
            check_encode(float_from_bits((uint32_t)bits), d);
            check_encode(ldexpf(1 + (float)(bits >> 41) * 0x1p-23f, (int)(bits % 40) - 20), d);
        }
    }
}

TEST(test_scales)
{
    for (DType d = E4M3; d <= E5M2; d++)
        for (uint64_t i = 0; i < 100000; i++) {
            float amax = float_from_bits((uint32_t)random_bits(2, i) & 0x7fffffff);
            if (!isfinite(amax))
                continue;
            float s = fp8_scale(amax, d), group = bf16_decode(fp8_moment_scale(amax, d));
            assert_true(s > 0 && isfinite(s) && group >= s && group <= s * (1 + 0x1p-7f));
            assert_true(fp8_encode(amax / group, d) <= fp8_last(d));
            /* see fp8_moment_scale */
            assert_true((double)amax / group <= fp8_max(d) * (1 + 0x1p-24));
        }
}

/* Except for 255, each one-byte scale is the scale of a group whose maximum gets the first code of
 * the last binade. */
TEST(test_byte_scales)
{
    for (DType d = E4M3; d <= E5M2; d++) {
        const double binade = d == E4M3 ? 256 : 32768;
        for (int s = 0; s < 256; s++) {
            const float value = fp8_group_value((uint8_t)s, d);
            assert_true(s == 255 ? isnan(value) : value == decode_scale((uint8_t)s, d));
            if (s < 255)
                assert_int_equal(fp8_group_scale((float)(value * binade), d), s);
        }
        assert_int_equal(fp8_group_scale(0, d), 0);
        assert_int_equal(fp8_group_scale(0x1p-10f, d), 0);
        assert_int_equal(fp8_group_scale(0x1p-149f, d), 0);
        assert_int_equal(fp8_group_scale(0x1p22f, d), 254);
        assert_int_equal(fp8_group_scale(FLT_MAX, d), 254);
        assert_int_equal(fp8_group_scale(INFINITY, d), 255);
        assert_int_equal(fp8_group_scale(NAN, d), 255);
    }
}

/* If the maximum of a group is in range, it is decoded with an error of at most 2^-(M+4). */
TEST(test_group_maxima)
{
    for (DType d = E4M3; d <= E5M2; d++)
        for (uint64_t i = 0; i < 1000000; i++) {
            const uint64_t bits = random_bits(3, i);
            const float a = ldexpf(1 + (float)(bits >> 41) * 0x1p-23f, (int)(bits % 31) - 10);
            const float s = fp8_group_value(fp8_group_scale(a, d), d),
                        back = fp8_decode(fp8_encode(a * (1 / s), d), d) * s;
            if (!(fabs((double)back - a) <= (d == E4M3 ? 0x1p-7 : 0x1p-6) * back * (1 + 0x1p-20)))
                fail_msg("a maximum of %a comes back as %a, with the scale %a", a, back, s);
        }
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
