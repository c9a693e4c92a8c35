/* Search for values that weights and moments may not have: infinities, NaN and, for some tensors,
 * numbers below 0. */
#include "kernels/cpu/cpu.h"

#include <math.h>

#include "kernels/dynamic8.h"

static bool is_bad(float x, bool negative)
{
    return !isfinite(x) || (negative && x < 0);
}

static bool has_bad_code(Tensor x, bool negative)
{
    const uint8_t *codes = x.data;
    bool bad[256], found = false;
    for (int c = 0; c < 256; c++) {
        const float value = format_is_fp8(x.format) ? fp8_decode((uint8_t)c, x.format.dtype)
                                                    : dynamic8_map(x.format.dtype)[c];
        bad[c] = is_bad(value, negative);
    }
    for (size_t i = 0; i < tensor_numel(x); i++)
        found |= bad[codes[i]];
    return found;
}

static float scale_at(Tensor x, size_t i)
{
    if (!x.format.group || format_is_dynamic8(x.format))
        return ((const float *)x.scale)[i];
    return x.format.expand ? fp8_pair_scale(((const uint32_t *)x.scale)[i])
                           : bf16_decode(((const uint16_t *)x.scale)[i]);
}

static bool has_bad_scale(Tensor x)
{
    const size_t n = x.format.group ? tensor_numel(x) / (size_t)x.format.group : 1;
    const float largest = format_is_fp8(x.format) ? fp8_max(x.format.dtype) : 1;
    bool found = false;
    for (size_t i = 0; i < n; i++)
        found |= is_bad(scale_at(x, i) * largest, true);
    return found;
}

void backend_find_not_finite(int *found, Tensor x, bool negative)
{
    check_find_not_finite(x, negative);
    bool bad = false;
    if (format_has_scales(x.format))
        bad = has_bad_code(x, negative) || has_bad_scale(x);
    else
        for (size_t i = 0; i < tensor_numel(x); i++) {
            const float value = x.format.dtype == F32 ? ((const float *)x.data)[i]
                                                      : bf16_decode(((const uint16_t *)x.data)[i]);
            bad |= is_bad(value, negative);
        }
    if (bad)
        *found = 1;
}
