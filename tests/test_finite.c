/* find_not_finite finds every special code of every format anywhere in memory, and nothing else. */
#include "kernels/dynamic8.h"
#include "tests/test.h"
#include "tests/golden.h"

enum { GROUP = 256, COLS = 16 * GROUP };

static int *flag;

static int find(Tensor x, bool negative)
{
    int found = 0;
    device_put(flag, &found, sizeof found);
    find_not_finite(flag, x, negative);
    device_get(&found, flag, sizeof found);
    return found;
}

/* Writes `bytes` of the value as number i of a format's codes or scales. */
static void put_at(void *data, size_t i, uint32_t value, size_t bytes)
{
    device_put((char *)data + i * bytes, &value, bytes);
}

/* Sizes at which vectors, blocks and tensors begin and end, and some sizes between. */
static const size_t places[] = { 0,    1,    7,         15,        16,       17,      31,
                                 1023, 1024, COLS - 17, COLS - 16, COLS - 2, COLS - 1 };
enum { PLACES = sizeof places / sizeof places[0] };

typedef struct {
    uint32_t code;
    bool bad, bad_as_square;
} Case;

/* A tensor of small numbers. A code is stored at each position and removed again. */
static void check_codes(Format f, const Case *cases, int count)
{
    const size_t size = dtype_size(f.dtype);
    Tensor x = make(f, 1, COLS), result = make_f32(2 * count, PLACES);
    float *results = keep(sizeof *results * 2 * (size_t)count * PLACES);
    tensor_restore(x, keep(tensor_bytes(x))); /* zeros */
    assert_int_equal(find(x, f.dtype != DYNAMIC8), 0);
    for (int k = 0; k < count; k++)
        for (int p = 0; p < PLACES; p++) {
            put_at(x.data, places[p], cases[k].code, size);
            const int any = find(x, false), square = f.dtype == DYNAMIC8 ? any : find(x, true);
            put_at(x.data, places[p], 0, size);
            if (any != cases[k].bad || square != cases[k].bad_as_square)
                fail_msg("%s: code %x at %zu: found %d, and %d with negative ones", format_name(f),
                         cases[k].code, places[p], any, square);
            results[2 * k * PLACES + p] = (float)any;
            results[(2 * k + 1) * PLACES + p] = (float)square;
        }
    put(result, results);
    char name[64];
    snprintf(name, sizeof name, "finite/%s", format_name(f));
    golden_check(name, result, NULL);
    release();
}

TEST(test_plain)
{
    static const Case f32[] = {
        { 0x7f800000, true, true },   { 0xff800000, true, true },   { 0x7fc00000, true, true },
        { 0xffc00001, true, true },   { 0x7f800001, true, true },   { 0x7f7fffff, false, false },
        { 0xff7fffff, false, true },  { 0x80000000, false, false }, { 0x80000001, false, true },
        { 0x00000001, false, false }, { 0x3f800000, false, false }, { 0xbf800000, false, true },
    };
    static const Case bf16[] = {
        { 0x7f80, true, true },   { 0xff80, true, true },   { 0x7fc0, true, true },
        { 0xff81, true, true },   { 0x7f7f, false, false }, { 0xff7f, false, true },
        { 0x8000, false, false }, { 0x8001, false, true },  { 0x0001, false, false },
    };
    flag = device_alloc(sizeof *flag);
    check_codes((Format){ F32, 0 }, f32, sizeof f32 / sizeof f32[0]);
    check_codes((Format){ BF16, 0 }, bf16, sizeof bf16 / sizeof bf16[0]);
    device_free(flag);
}

/* All 256 codes; decode_fp8 gives the expected result. */
TEST(test_codes)
{
    static const Format formats[] = { { E4M3, 0 },
                                      { E5M2, 0 },
                                      { E4M3, 128, .bf16_scale = true },
                                      { E5M2, 128, .bf16_scale = true },
                                      { E4M3, 128, true },
                                      { E5M2, 128, true },
                                      { DYNAMIC8, GROUP },
                                      { UDYNAMIC8, GROUP } };
    flag = device_alloc(sizeof *flag);
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        Case cases[256];
        for (uint32_t c = 0; c < 256; c++) {
            const double x =
                format_is_fp8(formats[i]) ? decode_fp8((uint8_t)c, formats[i].dtype) : 0;
            cases[c] = (Case){ c, !isfinite(x), !isfinite(x) || x < 0 };
        }
        check_codes(formats[i], cases, 256);
    }
    device_free(flag);
}

/* A scale that is NaN, below 0, or so large that the format's largest number exceeds F32. */
static void check_scale(Format f, size_t bytes, uint32_t scale, bool bad)
{
    Tensor x = make(f, 1, COLS);
    const size_t n = f.group ? (size_t)(COLS / f.group) : 1, at[] = { 0, n / 2, n - 1 };
    tensor_restore(x, keep(tensor_bytes(x)));
    for (int k = 0; k < 3; k++) {
        put_at(x.scale, at[k], scale, bytes);
        if (find(x, false) != bad)
            fail_msg("%s: scale %x at %zu: found %d", format_name(f), scale, at[k], !bad);
        put_at(x.scale, at[k], 0, bytes);
    }
    release();
}

TEST(test_scales)
{
    static const Format e4m3 = { E4M3, 128, .bf16_scale = true },
                        e5m2 = { E5M2, 128, .bf16_scale = true };
    const struct {
        Format f;
        size_t bytes;
        uint32_t scale;
        bool bad;
    } cases[] = {
        { { E4M3, 0 }, 4, 0x7f800000, true },
        { { E4M3, 0 }, 4, 0x7b000000, false },
        { { E5M2, 0 }, 4, 0x7b000000, true },
        { { E5M2, 0 }, 4, 0xbf800000, true },
        { e4m3, 2, 0x7f80, true },
        { e4m3, 2, 0x7fc0, true },
        { e4m3, 2, 0x7b00, false },
        { e5m2, 2, 0x7b00, true },
        { e5m2, 2, 0x8001, true },
        { e4m3, 2, 0x8000, false },
        { { E4M3, 128, true }, 4, 0x00ff0000, true },
        { { E4M3, 128, true }, 4, 0xffff8000, true },
        { { E4M3, 128, true }, 4, 0xfff60000, false },
        { { E5M2, 128, true }, 4, 0xfff60000, true },
        { { DYNAMIC8, GROUP }, 4, 0x7f800000, true },
        { { DYNAMIC8, GROUP }, 4, 0x7f7fffff, false },
        { { UDYNAMIC8, GROUP }, 4, 0x7fc00000, true },
        { { UDYNAMIC8, GROUP }, 4, 0xbf800000, true },
    };
    flag = device_alloc(sizeof *flag);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_scale(cases[i].f, cases[i].bytes, cases[i].scale, cases[i].bad);
    Tensor bytes = make((Format){ E4M3, 128 }, 1, COLS);
    DIES("e4m3/128 has scales of one byte; the scales of moments are larger",
         find_not_finite(flag, bytes, false));
    release();
    device_free(flag);
}

/* Views with any start and length check only their own numbers. An earlier finding stays. */
TEST(test_views)
{
    static const DType types[] = { F32, BF16 };
    const uint32_t nan = 0x7fc07fc0;
    const int one = 1;
    flag = device_alloc(sizeof *flag);
    for (int k = 0; k < 2; k++) {
        const size_t size = dtype_size(types[k]);
        char *data = guarded(64 * size);
        for (int first = 0; first < 20; first++)
            for (int n = 0; n <= 40; n++) {
                uint32_t zero[64] = { 0 };
                device_put(data, zero, 64 * size);
                if (first > 0)
                    put_at(data, (size_t)first - 1, nan, size);
                put_at(data, (size_t)(first + n), nan, size);
                assert_int_equal(
                    find(tensor_at(data + (size_t)first * size, (Format){ types[k], 0 }, 1, n),
                         true),
                    0);
                assert_int_equal(
                    find(tensor_at(data + (size_t)first * size, (Format){ types[k], 0 }, 1, n + 1),
                         false),
                    1);
            }
        device_put(flag, &one, sizeof one);
        int found = 0;
        find_not_finite(flag, tensor_at(data, (Format){ types[k], 0 }, 1, 0), false);
        device_get(&found, flag, sizeof found);
        assert_int_equal(found, 1);
    }
    device_free(flag);
    release();
}

/* The argument: a test to leave out; scripts/gpu.sh gives it under racecheck. */
int main(int argc, char **argv)
{
    if (argc > 1)
        cmocka_set_skip_filter(argv[1]);
    return run_all_tests(start_device, NULL);
}
