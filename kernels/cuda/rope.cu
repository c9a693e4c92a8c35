/* From projection to attention: clamp, QK-norm, rotation. One block per token.
 *
 * A head is `chunks` pairs of packs: elements 8c .. 8c+7 of its first half and of its second half,
 * which the rotation combines. A thread has one c, and therefore one set of cosines and sines, and
 * several heads. Neighbouring threads have neighbouring c. Without QK-norm the heads are
 * independent. With QK-norm the block holds all heads of q and k of its token, so that x is read
 * once. Forward also copies v while it waits for sums. Backward has a separate launch for v.
 *
 * Bytes per element in BF16: forward takes 4 (x, y). If y is x and nothing is clamped, forward
 * reads and writes only q and k. Backward takes 4, or 6 if a norm or a clamp needs x. The tables of
 * angles and the weights are read from L1 and L2. rope_heads.cu has the norms of single heads. Sums
 * are F32 trees. dqnorm and dknorm are partial sums per block, which are then added in the order of
 * the blocks (reduce.cu). */
#include "kernels/cuda/lora.cuh"
#include "kernels/cuda/operations_fp8.h"
#include "kernels/cuda/rope.cuh"

enum { EACH = 4, EACH_BACKWARD = 2, MAX_THREADS = 512, BLOCKS_PER_SM = 2 };

/* Loads the weights of the norm at column `at` of a head of q or k. */
template <bool ALIGNED>
__device__ static inline void load_weight(float (&w)[8], const Heads &a, AnyIn qw, AnyIn kw,
                                          int head, int at, int left)
{
    if (head < a.H)
        load_any<ALIGNED>(w, qw, (size_t)head * a.D + at, left);
    else
        load_any<ALIGNED>(w, kw, (size_t)(head - a.H) * a.D + at, left);
}

/* ---- without norm ---------------------------------------------------------------------------- */

/* Forward (sign 1): y = rope(clamp(x)). Backward (sign -1): computes y from the gradient x. If
 * LIMITED, y is 0 where |limited| > clip; then a thread has half as many heads, so that the number
 * of loads in flight stays the same. Heads of v are not rotated. */
template <bool ALIGNED, bool LIMITED, typename T, typename TL>
__global__ __launch_bounds__(MAX_THREADS) void rotate_kernel(AnyOut y, const T *x,
                                                             const TL *limited, float sign, Heads a)
{
    constexpr int HEADS = LIMITED ? EACH / 2 : EACH;
    const ThreadPart<ALIGNED> p(a);
    const size_t row = (size_t)blockIdx.x * a.S + p.first;
    const int half = a.D / 2;
    const Angles t = load_angles<ALIGNED>(a, blockIdx.x, p);
    for (int base = p.head; base < a.count; base += HEADS * a.parallel) {
        Pack<T> u[HEADS], v[HEADS];
        Pack<TL> lu[HEADS], lv[HEADS];
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            const int head = base + j * a.parallel, left = head < a.count ? p.left : 0;
            const size_t at = row + (size_t)head * a.D;
            u[j] = load_pack<ALIGNED>(x + at, left);
            v[j] = load_pack<ALIGNED>(x + at + half, left);
            if (LIMITED) {
                lu[j] = load_pack<ALIGNED>(limited + at, left);
                lv[j] = load_pack<ALIGNED>(limited + at + half, left);
            }
        }
#pragma unroll
        for (int j = 0; j < HEADS; j++) {
            const int head = base + j * a.parallel;
            if (head >= a.count)
                break;
            const size_t at = row + (size_t)head * a.D;
            float ux[8], vx[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                ux[i] = LIMITED ? u[j][i] : clamp(u[j][i], a.clip);
                vx[i] = LIMITED ? v[j][i] : clamp(v[j][i], a.clip);
                if (head < a.H + a.K)
                    rotate(ux[i], vx[i], t.cosine[i], sign * t.sine[i]);
                if (LIMITED) {
                    ux[i] = fabsf(lu[j][i]) > a.clip ? 0.0f : ux[i];
                    vx[i] = fabsf(lv[j][i]) > a.clip ? 0.0f : vx[i];
                }
            }
            store_any<ALIGNED>(y, at, ux, p.left);
            store_any<ALIGNED>(y, at + half, vx, p.left);
        }
    }
}

/* ---- with norm: H + K <= EACH * a.parallel, so that a block holds q and k -------------------- */

/* passing: number of elements of v to copy, K D; 0: v stays in place. v is no larger than q, so
 * EACH packs per thread are enough. */
template <bool ALIGNED, bool CLIPS, typename T, typename TW>
__global__ __launch_bounds__(MAX_THREADS) void norm_rotate_kernel(AnyOut y, float2 *stats,
                                                                  const T *x, const TW *q_weight,
                                                                  const TW *k_weight, Heads a,
                                                                  int passing)
{
    __shared__ float shared[64];
    const AnyIn qw = { q_weight, std::is_same<TW, float>::value }, kw = { k_weight, qw.is_f32 };
    const ThreadPart<ALIGNED> p(a);
    const int half = a.D / 2;
    const size_t row = (size_t)blockIdx.x * a.S + p.first,
                 values = (size_t)blockIdx.x * a.S + (size_t)a.count * a.D;
    Pack<T> u[EACH], v[EACH], pass[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int head = p.head + j * a.parallel, left = head < a.count ? p.left : 0;
        u[j] = load_pack<ALIGNED>(x + row + (size_t)head * a.D, left);
        v[j] = load_pack<ALIGNED>(x + row + (size_t)head * a.D + half, left);
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int c = 8 * (threadIdx.x + j * blockDim.x);
        pass[j] = load_pack<ALIGNED>(x + values + c, passing - c);
    }
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int head = p.head + j * a.parallel;
        float s = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float ui = limit<CLIPS>(u[j][i], a.clip), vi = limit<CLIPS>(v[j][i], a.clip);
            s += ui * ui + vi * vi;
        }
        sums[0] += head < a.H ? s : 0.0f;
        sums[1] += head < a.H ? 0.0f : s;
    }
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int c = 8 * (threadIdx.x + j * blockDim.x);
        float z[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            z[i] = limit<CLIPS>(pass[j][i], a.clip);
        store_any<ALIGNED>(y, values + c, z, passing - c);
    }
    block_sums(sums, shared);
    keep_packed(u);
    keep_packed(v);
    const float2 rstd = make_float2(1.0f / sqrtf(sums[0] * a.q_inverse + a.eps),
                                    1.0f / sqrtf(sums[1] * a.k_inverse + a.eps));
    if (threadIdx.x == 0)
        stats[blockIdx.x] = rstd;
    const Angles t = load_angles<ALIGNED>(a, blockIdx.x, p);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int head = p.head + j * a.parallel;
        if (head >= a.count)
            break;
        float ux[8], vx[8], uw[8], vw[8];
        const float r = head < a.H ? rstd.x : rstd.y;
        load_weight<ALIGNED>(uw, a, qw, kw, head, p.first, p.left);
        load_weight<ALIGNED>(vw, a, qw, kw, head, p.first + half, p.left);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            ux[i] = limit<CLIPS>(u[j][i], a.clip) * r * uw[i],
            vx[i] = limit<CLIPS>(v[j][i], a.clip) * r * vw[i];
            rotate(ux[i], vx[i], t.cosine[i], t.sine[i]);
        }
        store_any<ALIGNED>(y, row + (size_t)head * a.D, ux, p.left);
        store_any<ALIGNED>(y, row + (size_t)head * a.D + half, vx, p.left);
    }
}

/* to: (H + K, D), this block's sums. */
template <bool ALIGNED>
__device__ static inline void store_sums(float *to, const float (&u)[EACH_BACKWARD][8],
                                         const float (&v)[EACH_BACKWARD][8], const Heads &a,
                                         const ThreadPart<ALIGNED> &p)
{
#pragma unroll
    for (int j = 0; j < EACH_BACKWARD; j++) {
        const int head = p.head + j * a.parallel;
        float *pair = to + (size_t)head * a.D + p.first;
        if (head < a.count) {
            store_pack<ALIGNED>(pair, u[j], p.left);
            store_pack<ALIGNED>(pair + a.D / 2, v[j], p.left);
        }
    }
}

/* d is dy rotated back. The gradient of the norm's input is r (g - h mean_gh), where g = d w and
 * h = clamp(x) r; the gradient is 0 where x was clamped. partial: (gridDim.x, (H + K) D), the sums
 * of d h over each block's tokens. NOTE: these sums take 32 registers per thread. So that registers
 * do not spill, a thread has fewer heads than in forward, only packs are held during the reduction,
 * the block's next token is prefetched to L2, not to registers, and the format of the weights is a
 * template parameter. */
template <bool ALIGNED, bool CLIPS, typename TW, typename TDY, typename TX>
__global__ __launch_bounds__(MAX_THREADS) void norm_rotate_backward_kernel(
    AnyOut dx, float *partial, const TDY *dy, const TX *x, const float2 *stats, const TW *q_weight,
    const TW *k_weight, Heads a, int N)
{
    __shared__ float shared[64];
    const AnyIn qw = { q_weight, std::is_same<TW, float>::value }, kw = { k_weight, qw.is_f32 };
    const ThreadPart<ALIGNED> p(a);
    const int half = a.D / 2;
    float dwu[EACH_BACKWARD][8] = {}, dwv[EACH_BACKWARD][8] = {};
    for (int n = blockIdx.x; n < N; n += gridDim.x) {
        const size_t row = (size_t)n * a.S + p.first;
        Pack<TDY> du[EACH_BACKWARD], dv[EACH_BACKWARD];
        Pack<TX> xu[EACH_BACKWARD], xv[EACH_BACKWARD];
#pragma unroll
        for (int j = 0; j < EACH_BACKWARD; j++) {
            const int head = p.head + j * a.parallel, left = head < a.count ? p.left : 0;
            const size_t at = row + (size_t)head * a.D;
            du[j] = load_pack<ALIGNED>(dy + at, left),
            dv[j] = load_pack<ALIGNED>(dy + at + half, left);
            xu[j] = load_pack<ALIGNED>(x + at, left),
            xv[j] = load_pack<ALIGNED>(x + at + half, left);
        }
        if (ALIGNED && threadIdx.x == 0 && n + gridDim.x < N) {
            const size_t next = (size_t)(n + gridDim.x) * a.S, width = (size_t)a.count * a.D;
            prefetch(dy + next, width * sizeof *dy);
            prefetch(x + next, width * sizeof *x);
        }
        const float2 rstd = stats[n];
        Angles t = load_angles<ALIGNED>(a, n, p);
        float sums[2] = {};
#pragma unroll
        for (int j = 0; j < EACH_BACKWARD; j++) {
            const int head = p.head + j * a.parallel;
            if (head >= a.count)
                break;
            float uw[8], vw[8], s = 0;
            const float r = head < a.H ? rstd.x : rstd.y;
            load_weight<ALIGNED>(uw, a, qw, kw, head, p.first, p.left);
            load_weight<ALIGNED>(vw, a, qw, kw, head, p.first + half, p.left);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float u = du[j][i], v = dv[j][i];
                rotate(u, v, t.cosine[i], -t.sine[i]);
                u *= limit<CLIPS>(xu[j][i], a.clip) * r, v *= limit<CLIPS>(xv[j][i], a.clip) * r;
                dwu[j][i] += u, dwv[j][i] += v;
                s += u * uw[i] + v * vw[i];
            }
            sums[0] += head < a.H ? s : 0.0f;
            sums[1] += head < a.H ? 0.0f : s;
        }
        block_sums(sums, shared);
        keep_packed(du), keep_packed(dv);
        keep_packed(xu), keep_packed(xv);
        t = load_angles<ALIGNED>(a, n, p); /* loaded again, to save 16 registers */
#pragma unroll
        for (int j = 0; j < EACH_BACKWARD; j++) {
            const int head = p.head + j * a.parallel;
            if (head >= a.count)
                break;
            float u[8], v[8]; /* first the weights, then the results */
            const float r = head < a.H ? rstd.x : rstd.y;
            const float r_mean_gh =
                r * (head < a.H ? sums[0] * a.q_inverse : sums[1] * a.k_inverse);
            load_weight<ALIGNED>(u, a, qw, kw, head, p.first, p.left);
            load_weight<ALIGNED>(v, a, qw, kw, head, p.first + half, p.left);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float d = du[j][i], e = dv[j][i];
                rotate(d, e, t.cosine[i], -t.sine[i]);
                d = r * (d * u[i] - limit<CLIPS>(xu[j][i], a.clip) * r_mean_gh);
                e = r * (e * v[i] - limit<CLIPS>(xv[j][i], a.clip) * r_mean_gh);
                u[i] = CLIPS && fabsf(xu[j][i]) > a.clip ? 0.0f : d;
                v[i] = CLIPS && fabsf(xv[j][i]) > a.clip ? 0.0f : e;
            }
            store_any<ALIGNED>(dx, row + (size_t)head * a.D, u, p.left);
            store_any<ALIGNED>(dx, row + (size_t)head * a.D + half, v, p.left);
        }
    }
    store_sums(partial + (size_t)blockIdx.x * (a.H + a.K) * a.D, dwu, dwv, a, p);
}

/* ---- entry ----------------------------------------------------------------------------------- */

/* As check_rope, for tensors that are not in FP8. */
static bool check_dense_rope(const char *op, Tensor qkv, Tensor qnorm, Tensor knorm,
                             const void *stats, Attention a)
{
    const bool by_head = check_rope(op, qkv, qnorm, knorm, stats, a);
    check_dense(op, "qkv", qkv, qkv.rows, qkv.cols);
    if (qnorm.data) {
        check_dense(op, "qnorm", qnorm, 1, qnorm.cols);
        check_dense(op, "knorm", knorm, 1, knorm.cols);
        CHECK(qnorm.format.dtype == knorm.format.dtype, "%s: weights in %s and %s", op,
              format_name(qnorm.format), format_name(knorm.format));
    }
    return by_head;
}

/* Describes heads from .. count-1, of which a thread processes `each` at a time. at_once: all heads
 * must fit into one iteration. */
static Heads heads_of(const char *op, Attention a, int from, int count, int each, bool at_once)
{
    Heads h = {};
    h.H = a.H, h.K = a.K, h.D = a.D, h.T = a.T, h.S = (a.H + 2 * a.K) * a.D;
    h.from = from, h.count = count;
    h.chunks = (int)ceil_div(a.D / 2, 8);
    h.parallel = (int)ceil_div(count - from, each);
    h.clip = a.clip > 0 ? a.clip : INFINITY;
    h.eps = a.norm.eps, h.q_inverse = 1.0f / (a.H * a.D), h.k_inverse = 1.0f / (a.K * a.D);
    h.rope = a.rope;
    if (h.parallel * h.chunks > MAX_THREADS) {
        h.parallel = MAX_THREADS / h.chunks;
        if (at_once || h.parallel == 0)
            die("%s: %d heads of width %d; the CUDA back end supports up to %d%s", op, a.H + a.K,
                a.D, h.parallel * each, at_once ? " with QK-norm" : "");
    }
    return h;
}

static int threads_of(Heads h)
{
    return block_threads(h.parallel * h.chunks, 1, MAX_THREADS);
}

/* Rotates heads from .. count-1, without a norm. limited.data may be NULL. */
static void rotate_heads(const char *op, Tensor y, Tensor x, Tensor limited, float sign,
                         Attention a, int from, int count)
{
    const Heads h = heads_of(op, a, from, count, EACH, false);
    with_bool(halves_aligned(a, x, y, limited, Tensor{}, Tensor{}), [&](auto aligned) {
        with_type(x, [&](auto *in) {
            constexpr bool ALIGNED = decltype(aligned)::value;
            if (limited.data)
                with_type(limited, [&](auto *limit) {
                    rotate_kernel<ALIGNED, true><<<x.rows, threads_of(h), 0, device_stream()>>>(
                        any_out(y), in, limit, sign, h);
                });
            else
                rotate_kernel<ALIGNED, false>
                    <<<x.rows, threads_of(h), 0, device_stream()>>>(any_out(y), in, in, sign, h);
        });
    });
    LAUNCH_CHECK();
}

static void rotate_values(Tensor y, float *stats, Tensor x, Tensor qnorm, Tensor knorm,
                          Attention a);

/* If there is a clip or a norm, the FP8 x is converted to y, and then y is changed in place. */
static void forward_from_fp8(Tensor y, float *stats, Tensor x, Tensor qnorm, Tensor knorm,
                             Attention a)
{
    if (!qnorm.data && a.clip == 0) {
        rope_forward_fp8(y, x, a);
        return;
    }
    backend_quantize(y, x);
    rotate_values(y, stats, y, qnorm, knorm, a);
}

/* Computes y from x. Intermediate values stay in F32. */
static void rotate_values(Tensor y, float *stats, Tensor x, Tensor qnorm, Tensor knorm, Attention a)
{
    if (format_is_fp8(x.format)) {
        forward_from_fp8(y, stats, x, qnorm, knorm, a);
        return;
    }
    const bool by_head = check_dense_rope("rope_forward", x, qnorm, knorm, stats, a);
    check_dense("rope_forward", "y", y, x.rows, x.cols);
    const bool norm = qnorm.data, in_place = y.data == x.data, values = !in_place || a.clip > 0;
    CHECK(!in_place || format_equal(y.format, x.format),
          "rope_forward: x and y share memory but have different formats");
    if (x.rows == 0)
        return;
    const int rotated = a.H + a.K, count = rotated + (values ? a.K : 0);
    if (!norm) {
        rotate_heads("rope_forward", y, x, Tensor{}, 1, a, 0, count);
        return;
    }
    if (by_head) {
        rope_forward_by_head(y, stats, x, qnorm, knorm, a, values);
        return;
    }
    const Heads h = heads_of("rope_forward", a, 0, rotated, EACH, true);
    with_bool(halves_aligned(a, x, y, x, qnorm, knorm), [&](auto aligned) {
        with_bool(a.clip > 0, [&](auto clips) {
            with_type(qnorm, [&](auto *weight) {
                with_type(x, [&](auto *in) {
                    norm_rotate_kernel<decltype(aligned)::value, decltype(clips)::value>
                        <<<x.rows, threads_of(h), 0, device_stream()>>>(
                            any_out(y), (float2 *)stats, in, weight, (decltype(weight))knorm.data,
                            h, values ? a.K * a.D : 0);
                });
            });
        });
    });
    LAUNCH_CHECK();
}

void backend_rope_forward(Tensor y, Tensor saved, float *stats, Tensor x, LoraProduct product,
                          Tensor qnorm, Tensor knorm, Attention a, ForwardSource from)
{
    check_rope("rope_forward", x, qnorm, knorm, stats, a);
    if (!qnorm.data && rope_forward_added(from == FROM_EXACT, y, saved, x, product, a))
        return;
    if (product.xa.data)
        backend_lora_widen(x, product.xa, product.m, x);
    backend_quantize(saved, x);
    rotate_values(y, stats, from == FROM_EXACT ? x : saved, qnorm, knorm, a);
}

static void backward_with_norm(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x,
                               const float *stats, Tensor qnorm, Tensor knorm, Attention a)
{
    const Heads h = heads_of("rope_backward", a, 0, a.H + a.K, EACH_BACKWARD, true);
    const int N = dy.rows, most = BLOCKS_PER_SM * device_sm_count(), blocks = most < N ? most : N;
    const size_t q_width = (size_t)a.H * a.D, width = q_width + (size_t)a.K * a.D;
    float *partial = (float *)device_scratch(blocks * width * sizeof(float), SCRATCH_0);
    with_bool(halves_aligned(a, dx, dy, x, qnorm, knorm), [&](auto aligned) {
        with_bool(a.clip > 0, [&](auto clips) {
            with_type(qnorm, [&](auto *weight) {
                with_type(dy, [&](auto *d) {
                    with_type(x, [&](auto *in) {
                        norm_rotate_backward_kernel<decltype(aligned)::value,
                                                    decltype(clips)::value>
                            <<<blocks, threads_of(h), 0, device_stream()>>>(
                                any_out(dx), partial, d, in, (const float2 *)stats, weight,
                                (decltype(weight))knorm.data, h, N);
                    });
                });
            });
        });
    });
    LAUNCH_CHECK();
    if (dqnorm.data)
        add_column_sums(dqnorm, partial, blocks, width);
    if (dknorm.data)
        add_column_sums(dknorm, partial + q_width, blocks, width);
}

/* If there is a clip or a norm, x is converted in scratch memory, and dy is changed in place before
 * it is converted to dx. */
static void backward_with_fp8(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x,
                              const float *stats, Tensor qnorm, Tensor knorm, Attention a)
{
    if (!qnorm.data && a.clip == 0) {
        rope_backward_fp8(dx, dy, a);
        return;
    }
    if (format_is_fp8(x.format)) {
        const Format f = { BF16, 0, false };
        const Tensor dense =
            tensor_at(device_scratch(2 * tensor_numel(x), SCRATCH_1), f, x.rows, x.cols);
        backend_quantize(dense, x);
        x = dense;
    }
    backend_rope_backward(dy, dqnorm, dknorm, dy, x, stats, qnorm, knorm, a);
    backend_quantize(dx, dy);
}

void backend_rope_backward(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x,
                           const float *stats, Tensor qnorm, Tensor knorm, Attention a)
{
    const bool by_head = check_dense_rope(OPERATION, dy, qnorm, knorm, stats, a);
    if (format_is_fp8(dx.format) || ((a.clip > 0 || qnorm.data) && format_is_fp8(x.format))) {
        backward_with_fp8(dx, dqnorm, dknorm, dy, x, stats, qnorm, knorm, a);
        return;
    }
    CHECK_DENSE(dx, dy.rows, dy.cols);
    CHECK_DENSE_OPTIONAL(dqnorm, 1, by_head ? a.D : a.H * a.D);
    CHECK_DENSE_OPTIONAL(dknorm, 1, by_head ? a.D : a.K * a.D);
    const bool in_place = dx.data == dy.data, clips = a.clip > 0;
    const int rotated = a.H + a.K, count = rotated + (!in_place || clips ? a.K : 0);
    CHECK(!in_place || format_equal(dx.format, dy.format),
          "rope_backward: dx and dy share memory but have different formats");
    if (clips || qnorm.data)
        CHECK_DENSE(x, dy.rows, dy.cols);
    if (dy.rows == 0)
        return;
    if (by_head)
        rope_backward_by_head(dx, dqnorm, dknorm, dy, x, stats, qnorm, knorm, a);
    else if (qnorm.data)
        backward_with_norm(dx, dqnorm, dknorm, dy, x, stats, qnorm, knorm, a);
    const int from = qnorm.data ? rotated : 0;
    if (from < count)
        rotate_heads(OPERATION, dx, dy, clips ? x : Tensor{}, -1, a, from, count);
}
