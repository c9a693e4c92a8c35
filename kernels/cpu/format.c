/* Numbers in their formats, bit for bit, and tensors as floats.
 *
 * FP8 [Micikevicius et al. 2022, arXiv 2209.05433, tab. 1]; value = 2^(e - bias) 1.m, or 2^(1 - bias) 0.m if e = 0:
 *            bits s/e/m  bias  largest          smallest normal  smallest   special
 *     E4M3   1/4/3       7     448   (0x7e)     2^-6             2^-9       0x7f NaN; no infinity
 *     E5M2   1/5/2       15    57344 (0x7b)     2^-14            2^-16      0x7c infinity, 0x7d .. 0x7f NaN */
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <string.h>

/* Smaller maxima count as this. Then S and S * (smallest code) are normal floats: 2^-90 / 57344 * 2^-16 > 2^-122. */
#define AMAX_MIN 0x1p-90f

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

float bf16_decode(uint16_t code)
{
    return float_of((uint32_t)code << 16);
}

uint16_t bf16_encode(float x)
{
    uint32_t u = bits_of(x);
    if (isnan(x))
        return 0x7fff;
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

float fp8_decode(uint8_t code, DType d)
{
    int mantissa_bits = d == E4M3 ? 3 : 2, bias = d == E4M3 ? 7 : 15;
    int e = (code & 0x7f) >> mantissa_bits, m = code & ((1 << mantissa_bits) - 1);
    float x;
    if (d == E4M3 ? (code & 0x7f) == 0x7f : e == 31)
        x = d == E5M2 && m == 0 ? INFINITY : NAN;
    else if (e == 0)
        x = ldexpf((float)m, 1 - bias - mantissa_bits);
    else
        x = ldexpf((float)(m + (1 << mantissa_bits)), e - bias - mantissa_bits);
    return code & 0x80 ? -x : x;
}

/* A normal result: the float's bits with the exponent re-biased, cut behind the mantissa bits that remain; adding
 * just under half of the last place (and one more if that place is odd) first rounds to nearest even, and a carry out
 * of the mantissa is the next exponent. A subnormal result counts in units of the smallest value; 2^mantissa_bits
 * units are the first normal code. */
uint8_t fp8_encode(float x, DType d)
{
    if (isnan(x))
        return 0x7f;
    int mantissa_bits = d == E4M3 ? 3 : 2, bias = d == E4M3 ? 7 : 15, cut = 23 - mantissa_bits;
    uint8_t sign = signbit(x) ? 0x80 : 0;
    float a = fabsf(x);
    if (a >= fp8_max(d))
        return sign | (d == E4M3 ? 0x7e : 0x7b);
    if (a < ldexpf(1, 1 - bias))
        return sign | (uint8_t)rintf(ldexpf(a, bias - 1 + mantissa_bits));
    uint32_t u = bits_of(a) - ((uint32_t)(127 - bias) << 23);
    u += (1u << (cut - 1)) - 1 + (u >> cut & 1);
    return sign | (uint8_t)(u >> cut);
}

float fp8_max(DType d)
{
    return d == E4M3 ? 448 : 57344;
}

/* S = max|x| / max(format). An infinite maximum gives S = inf: x/S is 0 or NaN, and all values read back as NaN. */
float fp8_scale(float amax, DType d)
{
    return fmaxf(amax, AMAX_MIN) / fp8_max(d);
}

/* Rounded up, hence |x/S| <= max(format) but for the last bit of the division, which rounding to a code removes. */
uint16_t fp8_group_scale(float amax, DType d)
{
    uint32_t u = bits_of(fp8_scale(amax, d));
    return (uint16_t)((u + 0xffff) >> 16);
}

float abs_max(const float *x, size_t n)
{
    float a = 0;
    for (size_t i = 0; i < n; i++)
        a = fmaxf(a, fabsf(x[i]));
    return a;
}

static const float *fp8_values(DType d)
{
    static float table[2][256];
    static bool filled;
    if (!filled) {
        for (int c = 0; c < 256; c++) {
            table[0][c] = fp8_decode((uint8_t)c, E4M3);
            table[1][c] = fp8_decode((uint8_t)c, E5M2);
        }
        filled = true;
    }
    return table[d == E5M2];
}

static void load_fp8(float *x, Tensor t, size_t first, size_t n)
{
    const uint8_t *codes = (const uint8_t *)t.data + first;
    const float *value = fp8_values(t.format.dtype);
    const size_t group = (size_t)t.format.group;
    for (size_t i = 0; i < n; i++) {
        float s = group ? bf16_decode(((const uint16_t *)t.scale)[(first + i) / group]) : *(const float *)t.scale;
        x[i] = value[codes[i]] * s;
    }
}

void load(float *x, Tensor t, size_t first, size_t n)
{
    if (t.format.dtype == F32)
        memcpy(x, (const float *)t.data + first, n * sizeof *x);
    else if (t.format.dtype == BF16) {
        const uint16_t *codes = (const uint16_t *)t.data + first;
        for (size_t i = 0; i < n; i++)
            x[i] = bf16_decode(codes[i]);
    } else
        load_fp8(x, t, first, n);
}

static void store_fp8(Tensor t, size_t first, const float *x, size_t n)
{
    const DType d = t.format.dtype;
    const size_t group = t.format.group ? (size_t)t.format.group : n;
    uint8_t *codes = (uint8_t *)t.data + first;
    for (size_t g = 0; g < n; g += group) {
        float s;
        if (t.format.group) {
            uint16_t *scale = (uint16_t *)t.scale + (first + g) / group;
            *scale = fp8_group_scale(abs_max(x + g, group), d);
            s = bf16_decode(*scale);
        } else
            s = *(const float *)t.scale;
        for (size_t i = g; i < g + group; i++)
            codes[i] = fp8_encode(x[i] / s, d);
    }
}

void store(Tensor t, size_t first, const float *x, size_t n)
{
    if (t.format.dtype == F32)
        memmove((float *)t.data + first, x, n * sizeof *x);
    else if (t.format.dtype == BF16) {
        uint16_t *codes = (uint16_t *)t.data + first;
        for (size_t i = 0; i < n; i++)
            codes[i] = bf16_encode(x[i]);
    } else
        store_fp8(t, first, x, n);
}

float *tensor_values(Tensor t, int slot)
{
    if (!t.data || t.format.dtype == F32)
        return t.data;
    float *x = scratch(slot, tensor_numel(t));
    load(x, t, 0, tensor_numel(t));
    return x;
}

float *tensor_result(Tensor t, int slot)
{
    return t.format.dtype == F32 ? t.data : scratch(slot, tensor_numel(t));
}

void transpose_codes(Tensor t)
{
    if (!t.data_t)
        return;
    const uint8_t *codes = t.data;
    uint8_t *transposed = t.data_t;
    for (int r = 0; r < t.rows; r++)
        for (int c = 0; c < t.cols; c++)
            transposed[(size_t)c * t.rows + r] = codes[(size_t)r * t.cols + c];
}

void tensor_finish(Tensor t, const float *values)
{
    if (format_is_fp8(t.format) && !t.format.group)
        *(float *)t.scale = fp8_scale(abs_max(values, tensor_numel(t)), t.format.dtype);
    if (values != t.data)
        store(t, 0, values, tensor_numel(t));
    transpose_codes(t);
}

void tensor_finish_again(Tensor t, const float *values)
{
    if (!format_is_fp8(t.format) || t.format.group) {
        tensor_finish(t, values);
        return;
    }
    if (!t.data)
        t.data = scratch(SLOTS - 1, tensor_numel(t) / sizeof(float) + 1);
    store(t, 0, values, tensor_numel(t));
    transpose_codes(t);
}
