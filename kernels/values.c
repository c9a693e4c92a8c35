/* Conversion of elements to and from floats, in every format that a tensor can have. */
#include "kernels/values.h"

#include <math.h>
#include <string.h>

#include "kernels/dynamic8.h"
#include "kernels/fp8.h"

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

/* Returns the scale of a group, or the single scale of the tensor. */
static float scale_at(Tensor t, size_t group)
{
    if (!t.format.group)
        return *(const float *)t.scale;
    return t.format.bf16_scale ? bf16_decode(((const uint16_t *)t.scale)[group])
                               : fp8_group_value(((const uint8_t *)t.scale)[group], t.format.dtype);
}

static void set_scale(Tensor t, size_t group, float amax)
{
    if (t.format.bf16_scale)
        ((uint16_t *)t.scale)[group] = fp8_moment_scale(amax, t.format.dtype);
    else
        ((uint8_t *)t.scale)[group] = fp8_group_scale(amax, t.format.dtype);
}

/* Returns the end of the group that contains element first + i, counted from `first`, but at most
 * n. */
static size_t group_end(Tensor t, size_t first, size_t i, size_t n)
{
    const size_t group = (size_t)t.format.group,
                 end = group ? ((first + i) / group + 1) * group - first : n;
    return end < n ? end : n;
}

static void load_fp8(float *x, Tensor t, size_t first, size_t n)
{
    const uint8_t *codes = (const uint8_t *)t.data + first;
    const float *value = fp8_values(t.format.dtype);
    for (size_t i = 0; i < n;) {
        const size_t end = group_end(t, first, i, n);
        const float s = scale_at(t, t.format.group ? (first + i) / (size_t)t.format.group : 0);
        for (; i < end; i++)
            x[i] = value[codes[i]] * s;
    }
}

static void load_expanded(float *x, Tensor t, size_t first, size_t n)
{
    const float max = fp8_max(t.format.dtype), *value = fp8_values(t.format.dtype);
    const uint8_t *codes = (const uint8_t *)t.data + first;
    for (size_t i = 0; i < n;) {
        const size_t end = group_end(t, first, i, n);
        const uint32_t pair = ((const uint32_t *)t.scale)[(first + i) / (size_t)t.format.group];
        const float a = fp8_pair_scale(pair) * max, k = fp8_pair_power(pair);
        for (; i < end; i++) {
            const float f = value[codes[i]];
            x[i] = f == 0 ? f : copysignf(powf(fabsf(f) / max, 1 / k) * a, f);
        }
    }
}

void tensor_load(float *x, Tensor t, size_t first, size_t n)
{
    if (t.format.dtype == F32)
        memcpy(x, (const float *)t.data + first, n * sizeof *x);
    else if (t.format.dtype == BF16) {
        const uint16_t *codes = (const uint16_t *)t.data + first;
        for (size_t i = 0; i < n; i++)
            x[i] = bf16_decode(codes[i]);
    } else if (format_is_dynamic8(t.format))
        dynamic8_load(x, t, first, n);
    else if (t.format.expand)
        load_expanded(x, t, first, n);
    else
        load_fp8(x, t, first, n);
}

static void store_fp8(Tensor t, size_t first, const float *x, size_t n)
{
    const DType d = t.format.dtype;
    const size_t group = t.format.group ? (size_t)t.format.group : n;
    uint8_t *codes = (uint8_t *)t.data + first;
    for (size_t g = 0; g < n; g += group) {
        if (t.format.group)
            set_scale(t, (first + g) / group, abs_max(x + g, group));
        const float inverse = 1 / scale_at(t, (first + g) / group);
        for (size_t i = g; i < g + group; i++)
            codes[i] = fp8_encode(x[i] * inverse, d);
    }
}

static void store_expanded(Tensor t, size_t first, const float *x, size_t n)
{
    const DType d = t.format.dtype;
    const size_t group = (size_t)t.format.group;
    const float max = fp8_max(d);
    uint8_t *codes = (uint8_t *)t.data + first;
    for (size_t g = 0; g < n; g += group) {
        uint32_t *pair = (uint32_t *)t.scale + (first + g) / group;
        float b = INFINITY, top = abs_max(x + g, group);
        for (size_t i = g; i < g + group; i++)
            b = fminf(b, fabsf(x[i]));
        const float k = fp8_expansion_power(top, b, d);
        *pair = fp8_pair(top, k, d);
        const float a = fp8_pair_scale(*pair) * max;
        for (size_t i = g; i < g + group; i++)
            codes[i] = fp8_encode(copysignf(powf(fabsf(x[i]) / a, k) * max, x[i]), d);
    }
}

void tensor_store(Tensor t, size_t first, const float *x, size_t n)
{
    if (t.format.dtype == F32)
        memmove((float *)t.data + first, x, n * sizeof *x);
    else if (t.format.dtype == BF16) {
        uint16_t *codes = (uint16_t *)t.data + first;
        for (size_t i = 0; i < n; i++)
            codes[i] = bf16_encode(x[i]);
    } else if (format_is_dynamic8(t.format))
        dynamic8_store(t, first, x, n);
    else if (t.format.expand)
        store_expanded(t, first, x, n);
    else
        store_fp8(t, first, x, n);
}
