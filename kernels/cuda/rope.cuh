/* Definitions that the kernels of rope.cu and rope_heads.cu share: the heads of a token, a thread's
 * elements of these heads, the rotation and the clamp. */
#pragma once
#include "kernels/cuda/vector.cuh"

/* Arguments of the kernels. */
struct Heads {
    int H, K, D, T, S; /* S = (H + 2K) D */
    int from, count;   /* heads to visit: from .. count-1; heads from H + K on belong to v */
    int chunks;        /* number of packs of half a head */
    int parallel;      /* number of heads that the block processes at a time */
    float clip;        /* INFINITY: no clamp */
    float eps, q_inverse, k_inverse; /* q_inverse, k_inverse: 1 / width of the norm */
    const float *rope;
};

/* A thread's elements: its columns in half a head, and its first head. */
template <bool ALIGNED>
struct ThreadPart {
    int first, left, head;
    __device__ ThreadPart(const Heads &a)
        : first(8 * (threadIdx.x % a.chunks)), left(ALIGNED ? 8 : a.D / 2 - first),
          head(a.from + threadIdx.x / a.chunks)
    {
        if (head >= a.from + a.parallel) /* the last warp has surplus threads */
            head = a.count;
    }
};

struct Angles {
    float cosine[8], sine[8];
};

template <bool ALIGNED>
__device__ static inline Angles load_angles(const Heads &a, int n, const ThreadPart<ALIGNED> &p)
{
    const float *table = a.rope + (size_t)(n % a.T) * a.D + 2 * p.first;
    Angles t;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const Pack<float> pack =
            load_pack<ALIGNED>(table + 8 * k, ALIGNED ? 8 : 2 * p.left - 8 * k);
#pragma unroll
        for (int i = 0; i < 4; i++)
            t.cosine[4 * k + i] = pack[2 * i], t.sine[4 * k + i] = pack[2 * i + 1];
    }
    return t;
}

__device__ static inline float clamp(float x, float limit)
{
    float y;
    /* unlike fmaxf, these instructions keep NaN */
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(-limit));
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(limit));
    return y;
}

/* Rotates a pair of elements. Backward passes -sine. */
__device__ static inline void rotate(float &u, float &v, float cosine, float sine)
{
    const float old = u;
    u = old * cosine - v * sine;
    v = old * sine + v * cosine;
}

template <bool CLIPS>
__device__ static inline float limit(float x, float clip)
{
    return CLIPS ? clamp(x, clip) : x;
}

static bool halves_aligned(Attention a, Tensor x, Tensor y, Tensor z, Tensor qnorm, Tensor knorm)
{
    const int half = a.D / 2;
    return is_aligned(x, half) && is_aligned(y, half) && is_aligned(z, half) &&
           is_aligned(qnorm, half) && is_aligned(knorm, half) && (uintptr_t)a.rope % 16 == 0;
}

/* rope_heads.cu: rope_forward and rope_backward with QK-norm head by head. Arguments have the same
 * meaning; they are checked and not in FP8. values: v is written to y too. Backward writes only q
 * and k of dx. */
void rope_forward_by_head(Tensor y, float *stats, Tensor x, Tensor qnorm, Tensor knorm, Attention a,
                          bool values);
void rope_backward_by_head(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x,
                           const float *stats, Tensor qnorm, Tensor knorm, Attention a);
