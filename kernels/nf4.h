/* NF4 with double quantization, as QLoRA and bitsandbytes define it [Dettmers et al. 2023, arXiv 2305.14314, sec. 3; bitsandbytes
 * 0.49, quantize_4bit with compress_statistics on a GPU]. Of 64 consecutive elements of a tensor, row behind row, the largest
 * magnitude is their absmax, and each element is the nearest of 16 values times it. Of 256 absmaxes, less the tensor's offset,
 * their mean over the tensor, the largest magnitude is `nested`, and each is the nearest of 256 values (DYNAMIC8,
 * kernels/dynamic8.h, without its rule of signs) times that. x / max is x (1/max), quotient and product rounded to F32. Where all
 * are 0 that is NaN, whose code is 0: the elements of such a block are -1 times what its absmax is rounded to.
 * DIFFERS: the mean is a sum in F64, rounded once; bitsandbytes' is a sum in F32, whose order is torch's. 1/max is rounded to
 * nearest; on a GPU bitsandbytes has an approximation. On a CPU it decides otherwise where a middle between two of the 16 values is
 * no F32, rounds quotients to BF16 in the last block of a BF16 tensor if that is not full, and takes -1 for the lowest of the 256
 * values, which is -0.993. */
#pragma once
#include "kernels/random.h"
#include "kernels/tensor.h"

enum { NF4_BLOCK = 64, NF4_GROUP = 256 * NF4_BLOCK };

/* What is stored of NF4_GROUP consecutive elements of a tensor. Groups are whole: the last of a tensor goes on in padding, which
 * is 0. Value of element i: nf4_map()[code] * (nested * map[absmax[i / 64]] + offset), each operation rounded to F32. */
typedef struct {
    uint8_t  codes[NF4_GROUP / 2];           /* element 2i in the high half of byte i                              */
    uint8_t  absmax[NF4_GROUP / NF4_BLOCK];
    float    nested, offset;                 /* offset: of the tensor, the same in all its groups                  */
    uint32_t unused[2];                      /* 0: groups are 16-byte aligned                                      */
} Nf4Group;

/* The same without double quantization: blocks have their absmax as it is. */
typedef struct {
    uint8_t  codes[NF4_GROUP / 2];
    float    absmax[NF4_GROUP / NF4_BLOCK];
} Nf4PlainGroup;

/* A matrix from up to three tensors, below one another, of rows[i] rows each: the groups of the first, then those of the next. */
typedef struct {
    const Nf4Group      *group;              /* device memory, 16-byte aligned; NULL: they are ... */
    const Nf4PlainGroup *plain;
    int                  num_parts, rows[3];
} Nf4;

static inline size_t nf4_group_bytes(bool plain)
{
    return plain ? sizeof(Nf4PlainGroup) : sizeof(Nf4Group);
}

static inline size_t nf4_groups(size_t rows, size_t cols)       /* of one tensor */
{
    return (rows * cols + NF4_GROUP - 1) / NF4_GROUP;
}

const float *nf4_map(void);                  /* 16 values in ascending order, that of their codes */

/* *offset, a float of device memory = the mean of the absmaxes of w, a whole tensor in F32 or BF16. */
void nf4_offset(float *offset, Tensor w);

/* Groups first .. first + count - 1 of the whole tensor w, which has that offset; plain: without double quantization. */
void nf4_quantize      (Nf4Group *to, Tensor w, const float *offset, size_t first, size_t count);
void nf4_quantize_plain(Nf4PlainGroup *to, Tensor w, size_t first, size_t count);

/* y (rows, cols) = the matrix, in F32 or BF16, rounded once to nearest even; or as codes of FP8 with the one scale that y has, of
 * which y.data or y.data_t may be NULL: not written. */
void nf4_dequantize(Tensor y, Nf4 x);

/* *amax, a float of device memory = the larger of *amax and the largest magnitude in groups first .. first + count - 1 of the
 * matrix x (.., cols): its blocks' absmax, since one element of each block is 1 or -1 times it. x.group or x.plain points to
 * group `first`. */
void nf4_amax(float *amax, Nf4 x, int cols, size_t first, size_t count);

/* ---- for both back ends -------------------------------------------------------------------------------------- */

/* The code of x = w (1/absmax): of the nearest value. The middle between two, rounded to F32, belongs to the lower. */
HOST_DEVICE static inline uint8_t nf4_nearest(const float *map, float x)
{
    int code = 0;
    while (code < 15 && x > (map[code] + map[code + 1]) * 0.5f)
        code++;
    return (uint8_t)code;
}

/* Blocks, the last of which may not be full, in a group of the matrix x (.., cols). */
HOST_DEVICE static inline int nf4_blocks(Nf4 x, int cols, size_t group)
{
    for (int i = 0; i < x.num_parts; i++) {
        const size_t numel = (size_t)x.rows[i] * (size_t)cols, groups = (numel + NF4_GROUP - 1) / NF4_GROUP;
        if (group < groups) {
            const size_t left = numel - group * NF4_GROUP;
            return left < NF4_GROUP ? (int)((left + NF4_BLOCK - 1) / NF4_BLOCK) : NF4_GROUP / NF4_BLOCK;
        }
        group -= groups;
    }
    return 0;
}

/* A group of n elements x of a tensor with that offset, on the host. Of it: codes, which are 0 before, and the absmaxes of its
 * blocks, of which there are as many as it returns. */
void   nf4_encode_group (Nf4Group *to, const float *x, size_t n, float offset);
size_t nf4_encode_blocks(uint8_t *codes, float *absmax, const float *x, size_t n);

/* Dies unless the arguments of these operations are what they have to be. */
void nf4_check_source(const char *op, Tensor w, size_t first, size_t count);
void nf4_check_matrix(const char *op, Tensor y, Nf4 x);
