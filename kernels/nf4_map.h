/* NF4 with double quantization, as QLoRA and bitsandbytes define it [Dettmers et al. 2023, arXiv
 * 2305.14314, sec. 3; bitsandbytes 0.49, quantize_4bit with compress_statistics on a GPU].
 *
 * A block is 64 consecutive elements of a tensor in row-major order. absmax is its largest
 * magnitude, and each element becomes absmax times the nearest of 16 values. The tensor's offset,
 * the mean of its absmaxes, is subtracted from the absmaxes. `nested` is the largest magnitude
 * among 256 such differences, and each difference becomes nested times the nearest of 256 values
 * (DYNAMIC8, kernels/dynamic8.h, without its rule of signs). x / max is computed as x (1/max), with
 * quotient and product rounded to F32. In a block of zeros x (1/max) is NaN. NaN gets code 0, whose
 * value is -1. So each element of the block becomes -1 times the block's rounded absmax.
 *
 * DIFFERS: the mean is a sum in F64, rounded once; in bitsandbytes it is a sum in F32, in torch's
 * order. 1/max is rounded to nearest; on a GPU bitsandbytes approximates it. On a CPU bitsandbytes
 * differs in three ways. Its codes differ at a midpoint of two of the 16 values that is not an F32
 * number. In the last block of a BF16 tensor, if this block is not full, it rounds quotients to
 * BF16. For the lowest of the 256 values, which is -0.993, it uses -1. */
#pragma once
#include "kernels/random.h"
#include "kernels/tensor.h"

enum { NF4_BLOCK = 64, NF4_GROUP = 256 * NF4_BLOCK };

/* NF4_GROUP consecutive elements of a tensor as stored. The last group of a tensor is padded with
 * zeros. Element i has the value nf4_map()[code] * (nested * map[absmax[i / 64]] + offset), where
 * each operation is rounded to F32. */
typedef struct {
    uint8_t codes[NF4_GROUP / 2]; /* element 2i is in the high half of byte i */
    uint8_t absmax[NF4_GROUP / NF4_BLOCK];
    float nested, offset; /* offset: the tensor's offset, repeated in each group */
    uint32_t unused[2];   /* always 0; pads groups to multiples of 16 bytes */
} Nf4Group;

/* A group without double quantization. absmax is stored as F32. */
typedef struct {
    uint8_t codes[NF4_GROUP / 2];
    float absmax[NF4_GROUP / NF4_BLOCK];
} Nf4PlainGroup;

/* A matrix of up to three tensors, one below the other. Tensor i has rows[i] rows. The groups of
 * the first tensor come first, then the groups of the next tensor. If items > 1, there are `items`
 * matrices of this shape, one below the other, and their groups follow each other in the same
 * order. */
typedef struct {
    const Nf4Group *group;      /* device memory, 16-byte aligned; NULL: `plain` is used */
    const Nf4PlainGroup *plain; /* device memory, 16-byte aligned */
    int num_tensors, rows[3];
    int items; /* 0: one matrix */
} Nf4;

static inline int nf4_items(Nf4 x)
{
    return x.items > 0 ? x.items : 1;
}

static inline size_t nf4_group_bytes(bool plain)
{
    return plain ? sizeof(Nf4PlainGroup) : sizeof(Nf4Group);
}

static inline size_t nf4_groups(size_t rows, size_t cols) /* number of groups of one tensor */
{
    return (rows * cols + NF4_GROUP - 1) / NF4_GROUP;
}

const float *nf4_map(void); /* 16 values, ascending, indexed by code */

/* *offset = the mean of the absmaxes of w. offset is in device memory; w is a whole tensor in F32
 * or BF16. */
void nf4_offset(float *offset, Tensor w);

/* Computes groups first .. first + count - 1 of the whole tensor w, with its offset. */
void nf4_quantize(Nf4Group *to, Tensor w, const float *offset, size_t first, size_t count);
/* As nf4_quantize, without double quantization. */
void nf4_quantize_plain(Nf4PlainGroup *to, Tensor w, size_t first, size_t count);

/* y (items * rows, cols) = the matrices, in F32 or BF16, rounded once to nearest even, or as FP8
 * codes. In FP8, each matrix has a scale of its own, SCALE_FLOATS floats apart, and its own
 * transposed codes. y.data or y.data_t may be NULL; a NULL copy is not written. */
void nf4_dequantize(Tensor y, Nf4 x);

/* *amax = the larger of *amax and the largest magnitude in groups first .. first + count - 1 of the
 * single matrix x (.., cols). amax is in device memory. The largest magnitude is the largest absmax of the
 * blocks, because one element of each block is 1 or -1 times absmax. x.group or x.plain points to
 * group `first`. */
void nf4_amax(float *amax, Nf4 x, int cols, size_t first, size_t count);

/* ---- for both back ends ---------------------------------------------------------------------- */

/* Returns the code of x = w (1/absmax): the code of the value nearest to x. The midpoint of two
 * values, rounded to F32, gets the lower code. */
HOST_DEVICE static inline uint8_t nf4_nearest(const float *map, float x)
{
    int code = 0;
    while (code < 15 && x > (map[code] + map[code + 1]) * 0.5f)
        code++;
    return (uint8_t)code;
}

/* Returns the number of blocks in a group of the matrix x (.., cols), including a partial block. */
HOST_DEVICE static inline int nf4_blocks(Nf4 x, int cols, size_t group)
{
    for (int i = 0; i < x.num_tensors; i++) {
        const size_t numel = (size_t)x.rows[i] * (size_t)cols,
                     groups = (numel + NF4_GROUP - 1) / NF4_GROUP;
        if (group < groups) {
            const size_t left = numel - group * NF4_GROUP;
            return left < NF4_GROUP ? (int)((left + NF4_BLOCK - 1) / NF4_BLOCK)
                                    : NF4_GROUP / NF4_BLOCK;
        }
        group -= groups;
    }
    return 0;
}

/* On the host: returns the absmax of block `block` of group `group`, as it is decoded. */
float nf4_absmax(Nf4 x, size_t group, size_t block);
/* On the host: copies block k of x, with its absmax decoded, to block i of the groups that begin at
 * `to`. Both numbers count blocks from the first group on. */
void nf4_copy_block(Nf4PlainGroup *to, size_t i, Nf4 x, size_t k);

/* On the host: encodes a group of n elements x of a tensor with this offset. */
void nf4_encode_group(Nf4Group *to, const float *x, size_t n, float offset);
/* On the host: writes the codes, which must be 0 before, and the absmaxes of a group's blocks.
 * Returns the number of blocks. */
size_t nf4_encode_blocks(uint8_t *codes, float *absmax, const float *x, size_t n);

/* These functions die if arguments of NF4's operations are invalid. */
void nf4_check_source(const char *op, Tensor w, size_t first, size_t count);
void nf4_check_matrix(const char *op, Tensor y, Nf4 x);
