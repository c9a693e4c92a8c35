/* The maps, codes and constants of adamw8bit. Both back ends use this file. */
#include "kernels/dynamic8.h"

#include <math.h>
#include <string.h>

#include "kernels/runtime/error.h"

enum { CODES = 256, DECADES = 7, ZERO = 127 }; /* ZERO: the code of 0 in the signed map */

/* Returns point i of `points` evenly spaced points in [0.1, 1], as torch.linspace computes it in
 * F32: from the nearer end, with one rounding. */
static float divide_decade(int i, int points)
{
    const float step = (1 - 0.1f) / (float)(points - 1);
    return i < points / 2 ? fmaf(step, (float)i, 0.1f) : fmaf(-step, (float)(points - 1 - i), 1);
}

/* Fills the map. Decade i has 2^i values, or 2^(i+1) in the unsigned map. The values are the
 * midpoints of equal parts of [0.1, 1], one part per value, times 10^(i-6). */
static void fill_map(float *map, bool is_signed)
{
    static const double decade[DECADES] = { 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1 };
    const int zero = is_signed ? ZERO : 0;
    int rank = 0;
    map[zero] = 0;
    for (int i = 0; i < DECADES; i++) {
        const int intervals = is_signed ? 1 << i : 2 << i;
        for (int j = 0; j < intervals; j++) {
            const float middle =
                (divide_decade(j, intervals + 1) + divide_decade(j + 1, intervals + 1)) / 2;
            map[zero + ++rank] = (float)decade[i] * middle;
            if (is_signed)
                map[zero - rank] = -map[zero + rank];
        }
    }
    map[CODES - 1] = 1;
}

const float *dynamic8_map(DType d)
{
    static float map[2][CODES];
    static bool filled;
    if (!filled) {
        fill_map(map[0], true);
        fill_map(map[1], false);
        filled = true;
    }
    return map[d == UDYNAMIC8];
}

float dynamic8_inverse(float absmax)
{
    return absmax >= 0x1p-126f && absmax < 0x1p126f ? 1 / absmax : 0;
}

uint8_t dynamic8_encode(float x, DType d)
{
    if (isnan(x))
        return d == DYNAMIC8 ? ZERO : 0;
    const uint8_t code = dynamic8_nearest(dynamic8_map(d), x);
    return d == DYNAMIC8 && signbit(x) && code == ZERO ? ZERO - 1 : code;
}

void dynamic8_load(float *x, Tensor t, size_t first, size_t n)
{
    const float *map = dynamic8_map(t.format.dtype), *absmax = t.scale;
    const uint8_t *codes = (const uint8_t *)t.data + first;
    for (size_t i = 0; i < n; i++)
        x[i] = map[codes[i]] * absmax[(first + i) / DYNAMIC8_GROUP];
}

void dynamic8_store(Tensor t, size_t first, const float *x, size_t n)
{
    uint8_t *codes = (uint8_t *)t.data + first;
    float *absmax = (float *)t.scale + first / DYNAMIC8_GROUP;
    for (size_t g = 0; g < n; g += DYNAMIC8_GROUP) {
        float top = 0;
        for (size_t i = g; i < g + DYNAMIC8_GROUP; i++)
            top = fmaxf(top, fabsf(x[i])); /* NaN counts as 0 */
        const float inverse = dynamic8_inverse(top);
        absmax[g / DYNAMIC8_GROUP] = top;
        for (size_t i = g; i < g + DYNAMIC8_GROUP; i++)
            codes[i] = dynamic8_encode(x[i] * inverse, t.format.dtype);
    }
}

static uint32_t rank_of(uint32_t bits, DType d)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return (uint32_t)dynamic8_encode(x, d) - (d == DYNAMIC8 ? ZERO : 0);
}

/* Fills `steps`, which has one entry for each upper half of a float's bits. If the rank grows from
 * r to r + 1 at the float with the bits s, the entry is (r + 1) 2^16 - s, so that bits + entry
 * crosses a multiple of 2^16 there. If the rank does not grow, s is the first number with the next
 * upper half. */
void dynamic8_steps(uint32_t steps[DYNAMIC8_STEPS], DType d)
{
    for (uint32_t i = 0; i < DYNAMIC8_STEPS; i++) {
        uint32_t below = (DYNAMIC8_FIRST + i) << 16, above = below + 0x10000;
        const uint32_t rank = rank_of(below, d);
        CHECK(rank_of(above - 1, d) <= rank + 1,
              "the rank of dynamic8 codes grows twice after %08x", below);
        while (above - below > 1) {
            const uint32_t middle = (below + above) / 2;
            if (rank_of(middle, d) > rank)
                above = middle;
            else
                below = middle;
        }
        steps[i] = ((rank + 1) << 16) - above;
    }
}

Dynamic8Step dynamic8_step(AdamW a)
{
    const float root = sqrtf(a.correction2);
    return (Dynamic8Step){ .grad_scale = a.grad_scale,
                           .beta1 = a.beta1,
                           .beta2 = a.beta2,
                           .rest1 = 1 - a.beta1,
                           .rest2 = 1 - a.beta2,
                           .rate = -a.lr * root / a.correction1,
                           .eps = root * a.eps,
                           .keep = 1 - a.lr * a.weight_decay };
}
