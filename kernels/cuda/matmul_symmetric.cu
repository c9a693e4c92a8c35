/* Products that are symmetric: x xT and xT x.
 *
 * Blocks on and below the diagonal are computed. The blocks above the diagonal are copies. The
 * sides of a block are a quarter or a half of the matrix:
 *
 *     a            a: four products at once
 *     b a          b: two
 *     c c a        c: one
 *     c c b a
 *
 * These are 5/8 of the products of the whole matrix. With 4,096 rows, the tiles of each of the
 * three launches fill one wave or half a wave on 132 SMs. Smaller blocks would leave some SMs idle.
 * With fewer rows the whole product takes less time. */
#include "kernels/cuda/vector.cuh"

enum { TILE = 64, THREADS = 256, PARTS = TILE / 8 };

/* Copies the tiles of y (rows, rows) below the diagonal blocks to their places above. */
__global__ __launch_bounds__(THREADS) static void mirror_kernel(bf16 *y, int rows, int block)
{
    __shared__ uint32_t tile[TILE][TILE / 2 + 1];
    const int row = blockIdx.y * TILE, col = blockIdx.x * TILE;
    if (row / block <= col / block)
        return;
#pragma unroll
    for (int i = threadIdx.x; i < TILE * PARTS; i += THREADS) {
        const int r = i / PARTS, word = i % PARTS * 4;
        const Pack<bf16> p = load_pack(y + (size_t)(row + r) * rows + col + 2 * word, 8);
#pragma unroll
        for (int k = 0; k < 4; k++)
            tile[r][word + k] = p.word[k];
    }
    __syncthreads();
    /* a thread writes eight rows of two columns */
    const int part = threadIdx.x % PARTS, pair = threadIdx.x / PARTS;
    uint32_t low[4], high[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const uint32_t a = tile[8 * part + 2 * k][pair], b = tile[8 * part + 2 * k + 1][pair];
        low[k] = __byte_perm(a, b, 0x5410);
        high[k] = __byte_perm(a, b, 0x7632);
    }
    bf16 *to = y + (size_t)(col + 2 * pair) * rows + row + 8 * part;
    *(uint4 *)to = make_uint4(low[0], low[1], low[2], low[3]);
    *(uint4 *)(to + rows) = make_uint4(high[0], high[1], high[2], high[3]);
}

void backend_matmul_symmetric(Tensor y, Tensor x, bool columns, float alpha, Tensor add, float beta)
{
    const int rows = y.rows, block = rows / 4;
    check_matmul_symmetric(y, x, columns, add);
    if (!symmetric_in_blocks(rows) || !is_aligned(y, rows)) {
        multiply_blocks(y, x, columns, alpha, add, beta, { rows, 0, 0, 1, 0 });
        return;
    }
    multiply_blocks(y, x, columns, alpha, add, beta, { block, 0, 0, 4, block });
    multiply_blocks(y, x, columns, alpha, add, beta, { block, block, 0, 2, 2 * block });
    multiply_blocks(y, x, columns, alpha, add, beta, { 2 * block, 2 * block, 0, 1, 0 });
    mirror_kernel<<<dim3(rows / TILE, rows / TILE), THREADS, 0, device_stream()>>>((bf16 *)y.data,
                                                                                   rows, block);
    LAUNCH_CHECK();
}
