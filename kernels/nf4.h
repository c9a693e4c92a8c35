/* NF4 with double quantization, as QLoRA and bitsandbytes define it [Dettmers et al. 2023, arXiv 2305.14314, sec. 3; bitsandbytes
 * 0.49, quantize_4bit with compress_statistics]. Of 64 consecutive elements of a tensor, row behind row, the largest magnitude is their
 * absmax, and each element is the nearest of 16 values times it. Of 256 absmaxes, less the tensor's offset, their mean over the
 * tensor, the largest magnitude is `nested`, and each is the nearest of 256 values (DYNAMIC8, kernels/dynamic8.h) times that.
 * DIFFERS: the mean is a sum in F64 rounded once; bitsandbytes' depends on the order of its F32 sum. */
#pragma once
#include "kernels/tensor.h"

enum { NF4_BLOCK = 64, NF4_GROUP = 256 * NF4_BLOCK };

/* What is stored of NF4_GROUP consecutive elements of a tensor. Groups are whole: the last of a tensor goes on in padding, which
 * is 0. Value of element i: nf4_map()[code] * (nested * map[absmax[i / 64]] + offset), in F32. */
typedef struct {
    uint8_t  codes[NF4_GROUP / 2];           /* element 2i in the high half of byte i                              */
    uint8_t  absmax[NF4_GROUP / NF4_BLOCK];
    float    nested, offset;                 /* offset: of the tensor, the same in all its groups                  */
    uint32_t unused[2];                      /* 0: groups are 16-byte aligned                                      */
} Nf4Group;

/* A matrix from up to three tensors, below one another, of rows[i] rows each: the groups of the first, then those of the next. */
typedef struct {
    const Nf4Group *group;                   /* device memory */
    int             num_parts, rows[3];
} Nf4;

static inline size_t nf4_groups(size_t rows, size_t cols)       /* of one tensor */
{
    return (rows * cols + NF4_GROUP - 1) / NF4_GROUP;
}

const float *nf4_map(void);                  /* 16 values in ascending order, that of their codes */

/* *offset, a float of device memory = the mean of the absmaxes of w, a whole tensor in F32 or BF16. */
void nf4_offset(float *offset, Tensor w);

/* Groups first .. first + count - 1 of the whole tensor w, which has that offset. */
void nf4_quantize(Nf4Group *to, Tensor w, const float *offset, size_t first, size_t count);

/* y (rows, cols) = the matrix, in F32 or BF16, rounded once to nearest even; or as codes of E4M3 with the scale that y has, of
 * which y.data or y.data_t may be NULL: not written. */
void nf4_dequantize(Tensor y, Nf4 x);

/* *amax, a float of device memory = the larger of *amax and the largest magnitude in groups first .. first + count - 1 of the matrix
 * x (.., cols): its blocks' absmax, since one element of each block is 1 or -1 times it. x.group points to group `first`. */
void nf4_amax(float *amax, Nf4 x, int cols, size_t first, size_t count);
