/* CRC-32C: published values, the CPU's instruction against the table for every length and
 * alignment, and the combination of parts. */
#include "model/checkpoint/crc32c.h"
#include "tests/test.h"
#include "tests/kit.h"
#include "tests/pattern.h"

static void make_data(unsigned char *data, uint64_t seed, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        data[i] = pattern_byte(seed, i);
}

typedef uint32_t Checksum(uint32_t crc, const void *data, size_t bytes);

/* RFC 3720, B.4, and the check value of the CRC catalogue. */
static void check_published(Checksum *crc)
{
    unsigned char zeros[32] = { 0 }, ones[32], rising[32], falling[32];
    static const unsigned char command[48] = {
        /* an iSCSI read (10) */
        0x01, 0xc0, 0, 0, 0, 0, 0,    0, 0, 0, 0,    0,    0, 0, 0, 0, 0x14, 0, 0, 0,    0,
        0,    0x04, 0, 0, 0, 0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0,    0, 0, 0x02,
    };
    for (int i = 0; i < 32; i++) {
        ones[i] = 0xff;
        rising[i] = (unsigned char)i;
        falling[i] = (unsigned char)(31 - i);
    }
    assert_int_equal(crc(0, zeros, 32), 0x8a9136aa);
    assert_int_equal(crc(0, ones, 32), 0x62a8ab43);
    assert_int_equal(crc(0, rising, 32), 0x46dd794e);
    assert_int_equal(crc(0, falling, 32), 0x113fdb5c);
    assert_int_equal(crc(0, command, 48), 0xd9963a56);
    assert_int_equal(crc(0, "123456789", 9), 0xe3069283);
    assert_int_equal(crc(0, "", 0), 0);
}

TEST(test_published)
{
    check_published(crc32c);
    check_published(crc32c_by_table);
}

/* The instruction runs on three streams, then on 8 bytes at a time, then on single bytes. */
TEST(test_lengths)
{
    enum { MOST = 1 << 20 };
    static const size_t large[] = { 98303, 98304, 98305, 98312, 98319, 196608, 300007, MOST - 8 };
    unsigned char *data = keep(MOST);
    make_data(data, 1, MOST);
    for (size_t at = 0; at < 8; at++) {
        for (size_t bytes = 0; bytes < 100; bytes++)
            assert_int_equal(crc32c(0, data + at, bytes), crc32c_by_table(0, data + at, bytes));
        for (size_t i = 0; i < sizeof large / sizeof large[0]; i++)
            assert_int_equal(crc32c((uint32_t)i, data + at, large[i]),
                             crc32c_by_table((uint32_t)i, data + at, large[i]));
    }
    release();
}

TEST(test_parts)
{
    enum { BYTES = 250000 };
    static const size_t cuts[] = { 0, 1, 7, 8, 4096, 99999, 200000, BYTES - 1, BYTES };
    unsigned char *data = keep(BYTES);
    make_data(data, 2, BYTES);
    const uint32_t whole = crc32c(0, data, BYTES);
    for (size_t i = 0; i < sizeof cuts / sizeof cuts[0]; i++)
        for (size_t k = i; k < sizeof cuts / sizeof cuts[0]; k++) {
            const size_t a = cuts[i], b = cuts[k];
            const uint32_t last = crc32c(0, data + b, BYTES - b),
                           middle = crc32c_shift(crc32c(0, data + a, b - a), BYTES - b),
                           first = crc32c_shift(crc32c(0, data, a), BYTES - a);
            assert_int_equal(last ^ first ^ middle, whole);
            assert_int_equal(crc32c(crc32c(0, data, a), data + a, BYTES - a), whole);
        }
    assert_int_equal(crc32c_shift(crc32c_shift(whole, 3), (uint64_t)5 << 40),
                     crc32c_shift(whole, ((uint64_t)5 << 40) + 3));
    release();
}

TEST(test_every_bit_counts)
{
    unsigned char data[64];
    make_data(data, 3, sizeof data);
    const uint32_t whole = crc32c(0, data, sizeof data);
    for (size_t bit = 0; bit < 8 * sizeof data; bit++) {
        data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        assert_int_not_equal(crc32c(0, data, sizeof data), whole);
        data[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
}

int main(void)
{
    return run_all_tests(NULL, NULL);
}
