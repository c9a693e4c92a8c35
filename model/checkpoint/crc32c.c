/* CRC-32C of large blocks. The checksum of a whole can be computed from the checksums of its parts.
 *
 * A checksum is the remainder of a polynomial over GF(2) modulo P; bit 31 of the number is the
 * coefficient of x^0. Appending a byte multiplies by x^8 and adds. So a part that n bytes follow
 * contributes its remainder times x^(8n); exclusive or adds the contributions, in any order.
 *
 * The CPU's instruction takes 8 bytes, with a latency of 3 cycles and a throughput of one per
 * cycle: three interleaved streams, a block each, keep it busy. [V. Gopal et al., Fast CRC
 * Computation for iSCSI Polynomial Using CRC32 Instruction, Intel, 2011] */
#include "model/checkpoint/crc32c.h"

#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#define P 0x82f63b78u /* the polynomial without x^32 */
#define X_TO_0 0x80000000u

/* bytes per stream: many compared to the cost of joining streams, few compared to caches */
enum { BLOCK = 1 << 15 };

/* Returns a b mod P. */
static uint32_t multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (uint32_t bit = X_TO_0; bit; bit >>= 1) {
        product ^= a & bit ? b : 0;
        b = b >> 1 ^ (b & 1 ? P : 0);
    }
    return product;
}

/* Returns x^(8 bytes) mod P. */
static uint32_t power(uint64_t bytes)
{
    uint32_t result = X_TO_0, square = X_TO_0 >> 8;
    for (; bytes; bytes >>= 1) {
        if (bytes & 1)
            result = multiply(result, square);
        square = multiply(square, square);
    }
    return result;
}

uint32_t crc32c_shift(uint32_t crc, uint64_t bytes)
{
    return multiply(crc, power(bytes));
}

/* ---- without the instruction ----------------------------------------------------------------- */

static uint32_t table[256];

static void fill_table(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        table[i] = i;
        for (int bit = 0; bit < 8; bit++)
            table[i] = table[i] >> 1 ^ (table[i] & 1 ? P : 0);
    }
}

uint32_t crc32c_by_table(uint32_t crc, const void *data, size_t bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const uint8_t *p = data;
    pthread_once(&once, fill_table);
    crc = ~crc;
    for (size_t i = 0; i < bytes; i++)
        crc = crc >> 8 ^ table[(crc ^ p[i]) & 0xff];
    return ~crc;
}

/* ---- with the instruction -------------------------------------------------------------------- */

#if defined __x86_64__
#include <nmmintrin.h>
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#define ADD_8(crc, x) _mm_crc32_u64(crc, x)
#define ADD_1(crc, x) _mm_crc32_u8(crc, x)

static bool has_instruction(void)
{
    return __builtin_cpu_supports("sse4.2");
}
#elif defined __aarch64__ && !defined __AARCH64EB__
#include <sys/auxv.h>
#ifdef __clang__
#define WITH_INSTRUCTION __attribute__((target("crc")))
#define ADD_8(crc, x) __builtin_arm_crc32cd((uint32_t)(crc), x)
#define ADD_1(crc, x) __builtin_arm_crc32cb(crc, x)
#else
#include <arm_acle.h>
#define WITH_INSTRUCTION __attribute__((target("+crc")))
#define ADD_8(crc, x) __crc32cd((uint32_t)(crc), x)
#define ADD_1(crc, x) __crc32cb(crc, x)
#endif

static bool has_instruction(void)
{
    return getauxval(AT_HWCAP) & HWCAP_CRC32;
}
#endif

#ifdef WITH_INSTRUCTION
static uint64_t load_8(const uint8_t *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

WITH_INSTRUCTION static uint32_t by_instruction(uint32_t crc, const uint8_t *p, size_t bytes)
{
    const uint32_t over_one = bytes < 3 * BLOCK ? 0 : power(BLOCK),
                   over_two = multiply(over_one, over_one);
    crc = ~crc;
    for (; bytes >= 3 * BLOCK; p += 3 * BLOCK, bytes -= 3 * BLOCK) {
        uint64_t first = crc, second = 0, third = 0;
        for (size_t i = 0; i < BLOCK; i += 8) {
            first = ADD_8(first, load_8(p + i));
            second = ADD_8(second, load_8(p + BLOCK + i));
            third = ADD_8(third, load_8(p + 2 * BLOCK + i));
        }
        crc = multiply((uint32_t)first, over_two) ^ multiply((uint32_t)second, over_one) ^
              (uint32_t)third;
    }
    for (; bytes >= 8; p += 8, bytes -= 8)
        crc = (uint32_t)ADD_8(crc, load_8(p));
    for (; bytes > 0; p++, bytes--)
        crc = ADD_1(crc, *p);
    return ~crc;
}
#endif

uint32_t crc32c(uint32_t crc, const void *data, size_t bytes)
{
#ifdef WITH_INSTRUCTION
    if (has_instruction())
        return by_instruction(crc, data, bytes);
#endif
    return crc32c_by_table(crc, data, bytes);
}
