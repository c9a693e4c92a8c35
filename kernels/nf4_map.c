/* The map of NF4 and the checks of its operations. Both back ends use this file. */
#include "kernels/nf4_map.h"

#include <math.h>
#include <string.h>

#include "kernels/check.h"
#include "kernels/dynamic8.h"
#include "kernels/fp8.h"

const float *nf4_map(void)
{
    static const float map[16] = {
        -1,
        -0.6961928009986877f,
        -0.5250730514526367f,
        -0.39491748809814453f,
        -0.28444138169288635f,
        -0.18477343022823334f,
        -0.09105003625154495f,
        0,
        0.07958029955625534f,
        0.16093020141124725f,
        0.24611230194568634f,
        0.33791524171829224f,
        0.44070982933044434f,
        0.5626170039176941f,
        0.7229568362236023f,
        1,
    };
    return map;
}

size_t nf4_encode_blocks(uint8_t *codes, float *absmax, const float *x, size_t n)
{
    size_t blocks = 0;
    for (size_t first = 0; first < n; first += NF4_BLOCK, blocks++) {
        const size_t count = n - first < NF4_BLOCK ? n - first : NF4_BLOCK;
        const float inverse = 1 / (absmax[blocks] = abs_max(x + first, count));
        for (size_t i = first; i < first + count; i++)
            codes[i / 2] |= (uint8_t)(nf4_nearest(nf4_map(), x[i] * inverse) << (i % 2 ? 0 : 4));
    }
    return blocks;
}

float nf4_absmax(Nf4 x, size_t group, size_t block)
{
    if (x.plain)
        return x.plain[group].absmax[block];
    const Nf4Group *g = &x.group[group];
    const float rest = g->nested * dynamic8_map(DYNAMIC8)[g->absmax[block]];
    return rest + g->offset;
}

void nf4_copy_block(Nf4PlainGroup *to, size_t i, Nf4 x, size_t k)
{
    enum { BLOCKS = NF4_GROUP / NF4_BLOCK, BYTES = NF4_BLOCK / 2 };
    const size_t group = k / BLOCKS;
    const uint8_t *codes = x.plain ? x.plain[group].codes : x.group[group].codes;
    memcpy(to[i / BLOCKS].codes + i % BLOCKS * BYTES, codes + k % BLOCKS * BYTES, BYTES);
    to[i / BLOCKS].absmax[i % BLOCKS] = nf4_absmax(x, group, k % BLOCKS);
}

void nf4_encode_group(Nf4Group *to, const float *x, size_t n, float offset)
{
    float absmax[NF4_GROUP / NF4_BLOCK], nested = 0;
    memset(to, 0, sizeof *to);
    const size_t blocks = nf4_encode_blocks(to->codes, absmax, x, n);
    for (size_t i = 0; i < blocks; i++)
        nested = fmaxf(nested, fabsf(absmax[i] - offset));
    const float inverse = 1 / nested;
    for (size_t i = 0; i < blocks; i++)
        to->absmax[i] = dynamic8_nearest(dynamic8_map(DYNAMIC8), (absmax[i] - offset) * inverse);
    to->nested = nested;
    to->offset = offset;
}

void nf4_check_source(const char *op, Tensor w, size_t first, size_t count)
{
    check_tensor(op, "w", w, w.rows, w.cols);
    check_plain(op, "w", w);
    const size_t groups = nf4_groups((size_t)w.rows, (size_t)w.cols);
    CHECK(groups > 0 && first <= groups && count <= groups - first,
          "%s: %zu groups from %zu on, of (%d, %d), which has %zu", op, count, first, w.rows,
          w.cols, groups);
}

void nf4_check_matrix(const char *op, Tensor y, Nf4 x)
{
    int rows = 0;
    for (int i = 0; i < x.num_tensors; i++)
        rows += x.rows[i];
    CHECK(!x.group != !x.plain && x.num_tensors >= 1 && x.num_tensors <= 3 &&
              rows * nf4_items(x) == y.rows,
          "%s: %d matrices of %d rows, each of %d tensors; y has %d rows", op, nf4_items(x), rows,
          x.num_tensors, y.rows);
    CHECK(tensor_exists(y), "%s: there is no y", op);
    CHECK(!format_has_scales(y.format) || (format_is_fp8(y.format) && !y.format.group && y.scale),
          "%s: y is %s; expected f32, bf16 or FP8 with one scale", op, format_name(y.format));
}
