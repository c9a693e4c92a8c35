/* Shared by the kernels of rope.cu and rope_heads.cu: the heads of a token, a thread's part of
 * them, the rotation, the clamp and the norms. */
#pragma once
#include "kernels/cuda/vector.cuh"

/* Arguments of the kernels. */
struct Heads {
    int H, K, D, T, S; /* S = (H + 2K) D */
    int from, count;   /* heads to visit: from .. count-1; those from H + K on are v's */
    int chunks;        /* packs of half a head */
    int parallel;      /* heads at a time in the block */
    float clip;        /* INFINITY: none */
    float eps, q_inverse, k_inverse; /* 1 / width of the norms of q and k */
    const float *rope;
};

/* What a kernel of rope.cu and rope_heads.cu says about all heads. */
static inline Heads heads_of_token(Attention a)
{
    Heads h = {};
    h.H = a.H, h.K = a.K, h.D = a.D, h.T = a.T, h.S = (a.H + 2 * a.K) * a.D;
    h.clip = a.clip > 0 ? a.clip : INFINITY;
    h.eps = a.norm.eps;
    h.rope = a.rope;
    return h;
}

/* Cosines and sines of eight columns. */
struct Angles {
    float cosine[8], sine[8];
};

/* A thread's part: eight columns from `first` on of a head's first half, the same of its second
 * half, of which `left` exist; and its first head. */
template <bool ALIGNED>
struct ThreadPart {
    int first, left, head, half;
    __device__ ThreadPart(const Heads &a)
        : first(8 * (threadIdx.x % a.chunks)), left(ALIGNED ? 8 : a.D / 2 - first),
          head(a.from + threadIdx.x / a.chunks), half(a.D / 2)
    {
        if (head >= a.from + a.parallel) /* surplus threads of the last warp */
            head = a.count;
    }
    /* x, at: the thread's first element of a head */
    template <typename T>
    __device__ void load(Pack<T> (&to)[2], const T *x, bool inside = true) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
            to[h] = load_pack<ALIGNED>(x + h * half, inside ? left : 0);
    }
    __device__ void store(AnyOut y, size_t at, const float (&v)[2][8]) const
    {
#pragma unroll
        for (int h = 0; h < 2; h++)
            store_any<ALIGNED>(y, at + h * half, v[h], left);
    }
    __device__ Angles angles(const Heads &a, int n) const
    {
        const float *table = a.rope + (size_t)(n % a.T) * a.D + 2 * first;
        Angles t;
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const Pack<float> pack =
                load_pack<ALIGNED>(table + 8 * k, ALIGNED ? 8 : 2 * left - 8 * k);
#pragma unroll
            for (int i = 0; i < 4; i++)
                t.cosine[4 * k + i] = pack[2 * i], t.sine[4 * k + i] = pack[2 * i + 1];
        }
        return t;
    }
};

template <typename T, int K>
__device__ static inline void keep_packed(Pack<T> (&packs)[K][2])
{
#pragma unroll
    for (int j = 0; j < K; j++)
        keep_packed(packs[j]);
}

__device__ static inline float clamp(float x, float limit)
{
    float y;
    /* fmaxf would replace NaN */
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(-limit));
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(y), "f"(limit));
    return y;
}

/* Rotates a pair of elements: forward; backward with -sine. */
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

/* The sum of squares of clamp(x). */
template <bool CLIPS, typename T>
__device__ static inline float squares(const Pack<T> (&x)[2], float clip)
{
    float s = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float u = limit<CLIPS>(x[0][i], clip), v = limit<CLIPS>(x[1][i], clip);
        s += u * u + v * v;
    }
    return s;
}

/* ---- launches -------------------------------------------------------------------------------- */

static bool halves_aligned(Attention a, Tensor x, Tensor y, Tensor z, Tensor qnorm, Tensor knorm)
{
    const int half = a.D / 2;
    return is_aligned(x, half) && is_aligned(y, half) && is_aligned(z, half) &&
           is_aligned(qnorm, half) && is_aligned(knorm, half) && (uintptr_t)a.rope % 16 == 0;
}

/* f(aligned, whether x is clamped, weights, x), the first two std::true_type or std::false_type. */
template <typename F>
static inline void with_variant(Attention a, bool aligned, Tensor qnorm, Tensor x, F f)
{
    with_bool(aligned, [&](auto is_aligned) {
        with_bool(a.clip > 0, [&](auto clips) {
            with_type(qnorm, [&](auto *weight) {
                with_type(x, [&](auto *in) { f(is_aligned, clips, weight, in); });
            });
        });
    });
}

/* rope_heads.cu: rope_forward and rope_backward with QK-norm head by head; same arguments, checked,
 * no FP8. values: whether v is written to y too. dx: only q and k. */
void rope_forward_by_head(Tensor y, float *stats, Tensor x, Tensor qnorm, Tensor knorm, Attention a,
                          bool values);
void rope_backward_by_head(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x,
                           const float *stats, Tensor qnorm, Tensor knorm, Attention a);
