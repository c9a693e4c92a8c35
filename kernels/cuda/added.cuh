/* The skeleton of operations that add an adapter's product to their input: rope_lora.cu,
 * swiglu_lora.cu, swiglu_lora_backward.cu.
 *
 * A warp processes two strips (32 columns each) of 16 tokens at a time, while the loads of the next
 * tokens are in flight. Each kernel chooses its strips and what it computes from their sums. A
 * kernel may save the sums, and it writes results, in several formats. */
#pragma once
#include "kernels/cuda/strips.cuh"

constexpr int ADDED_TOKENS = 256, ADDED_THREADS = 32 * STRIP_WARPS;
constexpr int SCALE_BYTES = ADDED_TOKENS * 4; /* bytes of group scales per warp */

/* The elements of a thread. Its block has tokens first .. end - 1. The thread has eight columns,
 * from `eight` on, in both strips of warp number `warp` of column_warps. Its first tokens are n and
 * n + 8. */
struct Place {
    int column_warps, warp, eight, first, end, n, step;
    __device__ Place(const Layout &l, int N)
        : column_warps(l.column_warps), warp(threadIdx.x / 32 % column_warps),
          eight(threadIdx.x % 4 * 8), first(blockIdx.y * ADDED_TOKENS),
          end(min(N, first + ADDED_TOKENS)),
          n(first + 16 * (threadIdx.x / 32 / column_warps) + threadIdx.x % 32 / 4),
          step(16 * (STRIP_WARPS / column_warps))
    {
    }
};

/* The input, from the thread's first column on. Rows have `width` elements; the second strip begins
 * `apart` columns after the first. NOTE: with sizes of type int more registers spill. */
struct Input {
    const bf16 *x;
    int rows;
    size_t width, apart;
};

/* Loads the thread's packs of tokens n and n + 8. Beyond the last row, loads the packs of the last
 * row. */
__device__ inline void load_tokens(Pack<bf16> (&to)[2][2], const Input &in, int n)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        to[i / 2][i % 2] = load_pack<true>(
            in.x + (size_t)min(n + i / 2 * 8, in.rows - 1) * in.width + i % 2 * in.apart, 8);
}

/* Calls use(i, token, the thread's sums in both strips) for all tokens. i is 0 for token n and 1
 * for token n + 8. load(n) starts further loads for tokens n and n + 8. xa is as in add_product,
 * strip as in hold_matrix. */
template <class Load, class StripOf, class Use>
__device__ inline void for_sums(const Place &t, const Product &p, const Input &in,
                                const int (&xa)[2], StripOf strip, Load load, Use use)
{
    extern __shared__ uint4 packs[];
    const int lane = threadIdx.x % 32;
    const uint4 *matrix = packs + t.warp * (p.layout.steps * 4 * 32) + lane;
    Pack<bf16> next[2][2];
    load_tokens(next, in, t.n);
    hold_matrix(packs, p, strip);
    __syncthreads();
    for (int n = t.n; n - lane / 4 < t.end; n += t.step) {
        float sum[1][8][4];
        load(n);
#pragma unroll
        for (int i = 0; i < 32; i++)
            strip_element(sum, i / 16, i / 8 % 2, i % 8) = next[i / 16][i / 8 % 2][i % 8];
        if (n - lane / 4 + t.step < t.end)
            load_tokens(next, in, n + t.step);
        add_product(sum, matrix, p, xa, n, t.end);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float v[2][8];
#pragma unroll
            for (int k = 0; k < 16; k++)
                v[k / 8][k % 8] = strip_element(sum, i, k / 8, k % 8);
            use(i, n + 8 * i, v);
        }
    }
}

/* strips: number of pairs of strips in a row; each: as in choose_product. */
template <class... Parameters, class... Arguments>
static inline void launch_added(void (*kernel)(Parameters...), const Product &p, int each,
                                int strips, int N, Arguments... arguments)
{
    const dim3 grid((unsigned)ceil_div(strips, p.layout.column_warps),
                    (unsigned)ceil_div(N, ADDED_TOKENS));
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, STRIP_BYTES));
    kernel<<<grid, ADDED_THREADS, strip_bytes(p.layout, each), device_stream()>>>(arguments...);
    LAUNCH_CHECK();
}

/* Returns true if x has rows, and at most as many as a grid can process. */
static inline bool has_rows(Tensor x)
{
    return x.rows > 0 && x.rows <= 65535 * ADDED_TOKENS;
}

/* ---- saved sums ------------------------------------------------------------------------------ */

enum Save { SAVE_NONE, SAVE_BF16, SAVE_GROUPS };

struct SaveOut {
    bf16 *data;      /* for SAVE_BF16 */
    GroupOut groups; /* for SAVE_GROUPS */
};

/* Returns the scales of groups in shared memory, [token][slot]. The slot is 4 warp + 2 strip +
 * number (0 or 1) of the half of the strip. */
__device__ inline uint8_t *held_scales(const Product &p)
{
    extern __shared__ uint4 packs[];
    return (uint8_t *)(packs + p.layout.column_warps * (p.layout.steps * 4 * 32));
}

/* Saves eight neighbouring values v at element `at` if `inside`, and sets v to the saved values.
 * Stores a group's scale in *scale. All threads of a warp must call this function. */
template <Save SAVE>
__device__ inline void save_values(const SaveOut &out, size_t at, float (&v)[8], uint8_t *scale,
                                   bool inside)
{
    if constexpr (SAVE == SAVE_BF16) {
        const Pack<bf16> pack = make_pack(v, bf16());
        store_pack<true>(out.data + at, v, inside ? 8 : 0);
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[k] = pack[k];
    } else if constexpr (SAVE == SAVE_GROUPS) {
        uint2 codes;
        const uint8_t s = round_group(v, codes, out.groups.dtype);
        if (inside) {
            *(uint2 *)(out.groups.data + at) = codes;
            if (threadIdx.x % 2 == 0)
                *scale = s;
        }
    }
}

/* Saves a token's sums. The sums of the second strip go `apart` elements after `at`. Unless EXACT,
 * sets v to the saved values. */
template <Save SAVE, bool EXACT>
__device__ inline void save_token(const SaveOut &out, uint8_t *held, const Place &t, int token,
                                  size_t at, int apart, float (&v)[2][8], bool inside)
{
    uint8_t *scale = held + (token - t.first) * 4 * t.column_warps + 4 * t.warp + t.eight / 16;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float s[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            s[k] = v[h][k];
        save_values<SAVE>(out, at + h * apart, s, scale + 2 * h, inside);
#pragma unroll
        for (int k = 0; k < 8; k++)
            v[h][k] = EXACT ? v[h][k] : s[k];
    }
}

/* Stores the scales of the block's tokens. column(slot) is the first column of the slot's group, or
 * negative if there is no group. */
template <class F>
__device__ inline void store_scales(const SaveOut &out, const uint8_t *held, const Place &t,
                                    int cols, F column)
{
    const int slot = threadIdx.x % 32, slots = 4 * t.column_warps,
              c = slot < slots ? column(slot) : -1;
    __syncthreads();
    for (int n = t.first + threadIdx.x / 32; c >= 0 && n < t.end; n += STRIP_WARPS)
        out.groups.scale[((size_t)n * cols + c) / 16] = held[(n - t.first) * slots + slot];
}

/* ---- results --------------------------------------------------------------------------------- */

/* TO_CODES_IN_RANGE does what TO_AMAX and TO_CODES do. */
enum To { TO_BF16, TO_AMAX, TO_CODES, TO_CODES_IN_RANGE };

struct Result {
    bf16 *data;      /* for TO_BF16 */
    float *amax;     /* for TO_AMAX */
    TileOut codes;   /* for TO_CODES */
    AmaxProbe probe; /* what a TO_CODES_IN_RANGE pass measured; amax NULL: no such pass */
};

template <To TO>
constexpr bool MEASURES = TO == TO_AMAX || TO == TO_CODES_IN_RANGE;
template <To TO>
constexpr bool ENCODES = TO == TO_CODES || TO == TO_CODES_IN_RANGE;

/* Returns true if an earlier pass has written the result. */
template <To TO>
__device__ inline bool is_written(const Result &out)
{
    return TO == TO_CODES && out.probe.amax && was_in_range(out.codes, out.probe);
}

template <To TO>
__device__ inline float inverse_scale(const Result &out)
{
    return ENCODES<TO> ? 1.0f / tile_scale(out.codes, *tile_scale_from(out.codes)) : 0.0f;
}

/* Stores eight neighbouring values at element `at`, or includes them in m, the largest absolute
 * value so far, or both. */
template <To TO>
__device__ inline void put(const Result &out, size_t at, const float (&v)[8], float inverse,
                           float &m, bool inside)
{
    if (TO == TO_BF16)
        store_pack<true>(out.data + at, v, inside ? 8 : 0);
    if (MEASURES<TO>)
        m = inside ? fmaxf(m, pack_abs_max(v)) : m;
    if (ENCODES<TO> && inside)
        *(uint2 *)(out.codes.data + at) = encode_pack(v, inverse, out.codes.dtype);
}
