/* F16 has 5 bits of exponent and 10 of mantissa [IEEE 754 binary16]; BF16 is the upper half of
 * F32. */
#include "model/checkpoint/convert.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kernels/fp8.h"

bool convert_knows(const char *dtype)
{
    return strcmp(dtype, "F32") == 0 || strcmp(dtype, "BF16") == 0 || strcmp(dtype, "F16") == 0;
}

static float f16_decode(uint16_t code)
{
    uint32_t sign = (uint32_t)(code & 0x8000) << 16, exponent = code >> 10 & 31,
             mantissa = code & 1023, bits;
    float x;
    if (exponent == 0) {
        x = (float)mantissa * 0x1p-24f;
        return sign ? -x : x;
    }
    bits = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | mantissa << 13;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Below 2^-14, neighbouring F16 numbers differ by 2^-24, as F32 numbers in [1/2, 1) do: adding 1/2
 * rounds to an F16 number. */
static uint16_t f16_encode(float x)
{
    const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, a = bits & 0x7fffffff;
    if (a >= 0x477ff000) /* 65520 lies half-way between the largest value, 65504, and 65536 */
        return (uint16_t)(sign | (a > 0x7f800000 ? 0x7fff : 0x7c00));
    if (a < 0x38800000)
        return (uint16_t)(sign | (bits_of(fabsf(x) + 0.5f) - 0x3f000000));
    return (uint16_t)(sign | (a - (112u << 23) + 0xfff + (a >> 13 & 1)) >> 13);
}

void convert_decode(float *x, const char *from, const void *raw, size_t n)
{
    const uint16_t *code = raw;
    if (strcmp(from, "F32") == 0)
        memcpy(x, raw, n * sizeof *x);
    else if (strcmp(from, "F16") == 0)
        for (size_t i = 0; i < n; i++)
            x[i] = f16_decode(code[i]);
    else
        for (size_t i = 0; i < n; i++)
            x[i] = bf16_decode(code[i]);
}

/* Works in place: code i only overwrites elements that were read already. */
size_t convert_encode(void *raw, const char *to, const float *x, size_t n)
{
    const bool half = strcmp(to, "F16") == 0;
    const uint16_t infinite = half ? 0x7c00 : 0x7f80;
    size_t first = n;
    if (strcmp(to, "F32") == 0) {
        memmove(raw, x, n * sizeof *x);
        for (size_t i = n; i-- > 0;)
            first = isfinite(x[i]) ? first : i;
        return first;
    }
    for (size_t i = 0; i < n; i++) {
        const uint16_t code = half ? f16_encode(x[i]) : bf16_encode(x[i]);
        memcpy((char *)raw + i * sizeof code, &code, sizeof code);
        if ((code & infinite) == infinite && first == n)
            first = i;
    }
    return first;
}
