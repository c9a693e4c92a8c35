/* The operations of NF4. */
#include "kernels/nf4_map.h"

#include <math.h>
#include <string.h>

#include "kernels/cpu/cpu.h"
#include "kernels/dynamic8.h"

enum { BLOCKS = NF4_GROUP / NF4_BLOCK };

/* Loads block i of a tensor; returns its number of elements. */
static size_t load_block(float x[NF4_BLOCK], Tensor w, size_t i)
{
    const size_t first = i * NF4_BLOCK,
                 left = tensor_numel(w) > first ? tensor_numel(w) - first : 0;
    const size_t n = left < NF4_BLOCK ? left : NF4_BLOCK;
    tensor_load(x, w, first, n);
    return n;
}

/* First adds the absmaxes of the first blocks of all groups, then those of the second blocks, and
 * so on; then adds these partial sums. A GPU sums in the same order. */
void backend_nf4_offset(float *offset, Tensor w)
{
    nf4_check_source(OPERATION, w, 0, 0);
    double sum[BLOCKS] = { 0 }, total = 0;
    float x[NF4_BLOCK];
    size_t blocks = 0;
    for (size_t n; (n = load_block(x, w, blocks)) > 0; blocks++)
        sum[blocks % BLOCKS] += abs_max(x, n);
    for (int i = 0; i < BLOCKS; i++)
        total += sum[i];
    *offset = (float)(total / (double)blocks);
}

/* Loads the group with number `group` of w into scratch memory. Returns its number of elements. */
static size_t load_group(float **x, Tensor w, size_t group)
{
    const size_t first = group * NF4_GROUP, left = tensor_numel(w) - first,
                 n = left < NF4_GROUP ? left : NF4_GROUP;
    *x = cpu_scratch(0, NF4_GROUP);
    tensor_load(*x, w, first, n);
    return n;
}

void backend_nf4_quantize(Nf4Group *to, Tensor w, const float *offset, size_t first, size_t count)
{
    nf4_check_source(OPERATION, w, first, count);
    for (size_t i = 0; i < count; i++) {
        float *x;
        const size_t n = load_group(&x, w, first + i);
        nf4_encode_group(&to[i], x, n, *offset);
    }
}

void backend_nf4_quantize_plain(Nf4PlainGroup *to, Tensor w, size_t first, size_t count)
{
    nf4_check_source(OPERATION, w, first, count);
    memset(to, 0, count * sizeof *to);
    for (size_t i = 0; i < count; i++) {
        float *x;
        const size_t n = load_group(&x, w, first + i);
        nf4_encode_blocks(to[i].codes, to[i].absmax, x, n);
    }
}

/* Loads the n elements of tensor x, whose groups begin with group `first`. */
static void load_tensor(float *values, Nf4 x, size_t first, size_t n)
{
    const float *map = nf4_map();
    float absmax = 0;
    for (size_t i = 0; i < n; i++) {
        const size_t at = i % NF4_GROUP, group = first + i / NF4_GROUP;
        const uint8_t *codes = x.plain ? x.plain[group].codes : x.group[group].codes;
        if (at % NF4_BLOCK == 0)
            absmax = nf4_absmax(x, group, at / NF4_BLOCK);
        values[i] = map[codes[at / 2] >> (at % 2 ? 0 : 4) & 15] * absmax;
    }
}

static void dequantize(Tensor y, Nf4 x)
{
    float *values = tensor_result(y, 0);
    size_t first = 0, group = 0;
    for (int i = 0; i < x.num_tensors; i++) {
        const size_t n = (size_t)x.rows[i] * (size_t)y.cols;
        load_tensor(values + first, x, group, n);
        group += nf4_groups((size_t)x.rows[i], (size_t)y.cols);
        first += n;
    }
    tensor_finish_scaled(y, values);
}

/* Each matrix has its own scale and its own transposed codes. */
void backend_nf4_dequantize(Tensor y, Nf4 x)
{
    nf4_check_matrix(OPERATION, y, x);
    const int items = nf4_items(x);
    Tensor own = y;
    own.rows /= items;
    const size_t n = tensor_numel(own);
    size_t groups = 0;
    for (int i = 0; i < x.num_tensors; i++)
        groups += nf4_groups((size_t)x.rows[i], (size_t)y.cols);
    for (int i = 0; i < items; i++) {
        dequantize(own, x);
        own.data = own.data ? (char *)own.data + n * dtype_size(y.format.dtype) : NULL;
        own.data_t = own.data_t ? (char *)own.data_t + n : NULL;
        own.scale = own.scale ? (float *)own.scale + SCALE_FLOATS : NULL;
        x.group = x.group ? x.group + groups : NULL;
        x.plain = x.plain ? x.plain + groups : NULL;
    }
}

void backend_nf4_amax(float *amax, Nf4 x, int cols, size_t first, size_t count)
{
    for (size_t i = 0; i < count; i++)
        for (int block = 0; block < nf4_blocks(x, cols, first + i); block++)
            *amax = fmaxf(*amax, fabsf(nf4_absmax(x, i, (size_t)block)));
}
