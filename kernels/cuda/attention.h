/* Declarations for attention's two sets of kernels, and the division of documents into blocks. */
#pragma once
#include "kernels/cuda/cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A document: `length` tokens from `start` on. Its block i is block first + i of all documents'
 * blocks. */
typedef struct {
    int start, length, first;
} Packed;

/* Documents divided into blocks of `size` tokens; long documents come first. */
typedef struct {
    int count, split; /* split: number of blocks in documents with several blocks; these blocks come
                       * first */
    /* (count), device memory: the document of each block; NULL: each document is a sequence */
    const Packed *table;
} Blocks;
Blocks attention_blocks(Attention a, Documents docs, int size);

/* attention_sm90.cu, for BF16 rows with D = 64, 96 or 128. Call it only if runs_on_hopper(). lse is
 * (B, H, T), or (N, H) with documents. */
void attention_sm90_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs);
void attention_sm90_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse,
                             Attention a, Documents docs);

/* attention_mma.cu, for F32 or BF16 rows and any even D up to 256. lse is (B, H, T). */
void attention_mma_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs);
void attention_mma_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse,
                            Attention a, Documents docs);

#ifdef __cplusplus
}
#endif

#ifdef __CUDACC__
__device__ inline Packed document_of(const Packed *table, int T, int size, int block)
{
    if (table)
        return table[block];
    const int each = (T + size - 1) / size;
    return { block / each * T, T, block / each * each };
}
#endif
