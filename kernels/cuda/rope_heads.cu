/* From projection to attention with a QK-norm per head, as in Qwen3.
 *
 * The packs of a head are defined as in rope.cu. A team is a group of neighbouring threads in one
 * warp that have the packs of a head; its size is a power of two. So the sum of a head takes a few
 * shuffles, and no thread waits for another warp. All heads of a team belong to q, to k or to v. So
 * a team needs one set of weights, and one set of sums for their gradient. Forward has one block
 * per token, in which the teams of v copy. In backward each block takes every gridDim.x-th token.
 *
 * Bytes per element in BF16: forward 4 (x, y), backward 6 (dy, x, dx). Statistics: 4 bytes per
 * head. The tables of angles and the weights are read from L1 and L2. Sums are F32 trees. dqnorm
 * and dknorm are added in a fixed order: heads and tokens of a thread, then teams of a block, then
 * blocks (reduce.cu). */
#include "kernels/cuda/rope.cuh"

/* EACH: heads per team. MAX_THREADS: maximum number of threads per block. In backward RESIDENT
 * threads fit on an SM, in two blocks or more. */
enum {
    EACH = 4,
    MAX_THREADS = 512,
    MAX_THREADS_BACKWARD = 320,
    RESIDENT = 2 * MAX_THREADS_BACKWARD
};

/* The teams of a block: those of q, of k and of v, in this order, `parallel` teams in all, with
 * `chunks` threads each. If the heads of a token do not fit into one block, further blocks with the
 * same x and higher y have the remaining heads. */
struct Teams : Heads {
    int q, k, v;
};

/* The elements of a thread: its columns of the heads head, head + step, ... below `end`. A thread
 * that has no columns has left = 0. */
template <bool ALIGNED>
struct TeamPart : ThreadPart<ALIGNED> {
    int step, end;
    __device__ TeamPart(const Teams &a, int each) : ThreadPart<ALIGNED>(a)
    {
        const int team = this->head, rotated = a.H + a.K;
        if (team < a.q)
            step = a.q, end = a.H;
        else if (team < a.q + a.k)
            this->head += a.H - a.q, step = a.k, end = rotated;
        else if (team < a.parallel)
            this->head += rotated - a.q - a.k, step = a.v, end = rotated + a.K;
        else
            step = end = 0;
        this->head += blockIdx.y * each * step;
        if (this->first >= a.D / 2)
            this->first = this->left = 0;
    }
};

/* Sums over the threads of a team. All threads of a warp must call this function. */
template <int K>
__device__ static inline void team_sums(float (&x)[K], int threads)
{
    for (int o = threads / 2; o > 0; o /= 2)
#pragma unroll
        for (int j = 0; j < K; j++)
            x[j] += __shfl_xor_sync(0xffffffffu, x[j], o);
}

/* gridDim: (tokens, number of blocks for the heads of a token) */
template <bool ALIGNED, bool CLIPS, typename T, typename TW>
__global__ __launch_bounds__(MAX_THREADS) void norm_heads_kernel(AnyOut y, float *stats, const T *x,
                                                                 const TW *q_weight,
                                                                 const TW *k_weight, Teams a)
{
    const TeamPart<ALIGNED> p(a, EACH);
    const int half = a.D / 2, rotated = a.H + a.K;
    const size_t row = (size_t)blockIdx.x * a.S + p.first;
    const TW *weight = (p.head < a.H ? q_weight : k_weight) + p.first;
    Pack<T> u[EACH], v[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int head = p.head + j * p.step, left = head < p.end ? p.left : 0;
        const size_t at = row + (size_t)head * a.D;
        u[j] = load_pack<ALIGNED>(x + at, left);
        v[j] = load_pack<ALIGNED>(x + at + half, left);
    }
    Pack<TW> w[2] = { load_pack<ALIGNED>(weight, p.left),
                      load_pack<ALIGNED>(weight + half, p.left) };
    const Angles t = load_angles<ALIGNED>(a, blockIdx.x, p);
    float sums[EACH] = {};
#pragma unroll
    for (int j = 0; j < EACH; j++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const float ui = limit<CLIPS>(u[j][i], a.clip), vi = limit<CLIPS>(v[j][i], a.clip);
            sums[j] += ui * ui + vi * vi;
        }
    team_sums(sums, a.chunks);
    keep_packed(u), keep_packed(v);
    keep_packed(w);
#pragma unroll
    for (int j = 0; j < EACH; j++) {
        const int head = p.head + j * p.step;
        if (head >= p.end)
            break;
        const size_t at = row + (size_t)head * a.D;
        const float r = 1.0f / sqrtf(sums[j] * a.q_inverse + a.eps);
        float ux[8], vx[8];
        if (head < rotated && p.first == 0 && p.left > 0)
            stats[(size_t)blockIdx.x * rotated + head] = r;
#pragma unroll
        for (int i = 0; i < 8; i++)
            ux[i] = limit<CLIPS>(u[j][i], a.clip), vx[i] = limit<CLIPS>(v[j][i], a.clip);
        if (head < rotated)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                ux[i] *= r * w[0][i], vx[i] *= r * w[1][i];
                rotate(ux[i], vx[i], t.cosine[i], t.sine[i]);
            }
        store_any<ALIGNED>(y, at, ux, p.left);
        store_any<ALIGNED>(y, at + half, vx, p.left);
    }
}

/* Computes the block's sums of each column, over the teams of q and over the teams of k. to: (2,
 * D); shared: (parallel, D). */
template <bool ALIGNED>
__device__ static inline void add_teams(float *to, float *shared, const float (&u)[8],
                                        const float (&v)[8], const Teams &a,
                                        const TeamPart<ALIGNED> &p)
{
    float *own = shared + (size_t)(threadIdx.x / a.chunks) * a.D + p.first;
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (p.end > 0 && i < p.left)
            own[i] = u[i], own[a.D / 2 + i] = v[i];
    __syncthreads();
    for (int c = threadIdx.x; c < 2 * a.D; c += blockDim.x) {
        const int first = c < a.D ? 0 : a.q, count = c < a.D ? a.q : a.k,
                  column = c < a.D ? c : c - a.D;
        float sum = 0;
        for (int s = first; s < first + count; s++)
            sum += shared[s * a.D + column];
        to[c] = sum;
    }
}

/* Prefetches a block's next token to L2. */
template <typename TDY, typename TX>
__device__ static inline void prefetch_token(const TDY *dy, const TX *x, const Teams &a, int n)
{
    const size_t row = (size_t)n * a.S, width = (size_t)(a.H + a.K) * a.D;
    prefetch(dy + row, width * sizeof *dy);
    prefetch(x + row, width * sizeof *x);
    prefetch(a.rope + (size_t)(n % a.T) * a.D, a.D * sizeof *a.rope);
}

/* As norm_rotate_backward_kernel of rope.cu, but a team has one head. gridDim: (blocks that share
 * the tokens, blocks for the heads of a token). partial: for each block (2, D), the sums of d h
 * over its tokens and its heads of q, and of k. shared: parallel D floats. NOTE: with two heads per
 * thread the compiler runs short of registers, and loads the second head after it has summed the
 * first. With one head, all loads of a token start together, and twenty warps instead of fifteen
 * fit on an SM. */
template <bool ALIGNED, bool CLIPS, typename TW, typename TDY, typename TX>
__global__ __launch_bounds__(
    MAX_THREADS_BACKWARD,
    RESIDENT / MAX_THREADS_BACKWARD) void norm_heads_backward_kernel(AnyOut dx, float *partial,
                                                                     const TDY *dy, const TX *x,
                                                                     const float *stats,
                                                                     const TW *q_weight,
                                                                     const TW *k_weight, Teams a,
                                                                     int N)
{
    extern __shared__ float shared[];
    const TeamPart<ALIGNED> p(a, 1);
    const int half = a.D / 2, rotated = a.H + a.K, left = p.head < p.end ? p.left : 0;
    const TW *weight = (p.head < a.H ? q_weight : k_weight) + p.first;
    Pack<TW> w[2] = { load_pack<ALIGNED>(weight, left), load_pack<ALIGNED>(weight + half, left) };
    float dwu[8] = {}, dwv[8] = {};
    float next_rstd = left > 0 ? stats[(size_t)blockIdx.x * rotated + p.head] : 0.0f;
    for (int n = blockIdx.x, next; n < N; n = next) {
        const size_t at = (size_t)n * a.S + (size_t)p.head * a.D + p.first;
        const float r = next_rstd;
        next = n + gridDim.x;
        if (ALIGNED && threadIdx.x == 0 && blockIdx.y == 0 && next < N)
            prefetch_token(dy, x, a, next);
        Pack<TDY> d[2] = { load_pack<ALIGNED>(dy + at, left),
                           load_pack<ALIGNED>(dy + at + half, left) };
        Pack<TX> in[2] = { load_pack<ALIGNED>(x + at, left),
                           load_pack<ALIGNED>(x + at + half, left) };
        const Angles t = load_angles<ALIGNED>(a, n, p);
        next_rstd = left > 0 && next < N ? stats[(size_t)next * rotated + p.head] : 0.0f;
        float sums[1] = {}, u[8], v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u[i] = d[0][i], v[i] = d[1][i];
            rotate(u[i], v[i], t.cosine[i], -t.sine[i]);
            u[i] *= limit<CLIPS>(in[0][i], a.clip) * r, v[i] *= limit<CLIPS>(in[1][i], a.clip) * r;
            dwu[i] += u[i], dwv[i] += v[i];
            sums[0] += u[i] * w[0][i] + v[i] * w[1][i];
        }
        team_sums(sums, a.chunks);
        keep_packed(d), keep_packed(in);
        keep_packed(w);
        const float r_mean_gh = r * sums[0] * a.q_inverse;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            u[i] = d[0][i], v[i] = d[1][i];
            rotate(u[i], v[i], t.cosine[i], -t.sine[i]);
            u[i] = r * (u[i] * w[0][i] - limit<CLIPS>(in[0][i], a.clip) * r_mean_gh);
            v[i] = r * (v[i] * w[1][i] - limit<CLIPS>(in[1][i], a.clip) * r_mean_gh);
            u[i] = CLIPS && fabsf(in[0][i]) > a.clip ? 0.0f : u[i];
            v[i] = CLIPS && fabsf(in[1][i]) > a.clip ? 0.0f : v[i];
        }
        store_any<ALIGNED>(dx, at, u, left);
        store_any<ALIGNED>(dx, at + half, v, left);
    }
    add_teams(partial + ((size_t)blockIdx.y * gridDim.x + blockIdx.x) * 2 * a.D, shared, dwu, dwv,
              a, p);
}

/* ---- entry ----------------------------------------------------------------------------------- */

/* Divides the heads among teams of up to `each` heads, in as few blocks of up to `most` threads as
 * possible. */
static Teams teams_of(const char *op, Attention a, bool values, int each, int most, int *blocks)
{
    Teams s = {};
    s.H = a.H, s.K = a.K, s.D = a.D, s.T = a.T, s.S = (a.H + 2 * a.K) * a.D;
    s.clip = a.clip > 0 ? a.clip : INFINITY;
    s.eps = a.norm.eps, s.q_inverse = s.k_inverse = 1.0f / a.D;
    s.rope = a.rope;
    for (s.chunks = 1; 8 * s.chunks < a.D / 2;)
        s.chunks *= 2;
    if (s.chunks > 32)
        die("%s: heads of width %d, each with a norm; the CUDA back end supports up to 512", op,
            a.D);
    *blocks = 0;
    do {
        ++*blocks;
        s.q = (int)ceil_div(a.H, each * *blocks), s.k = (int)ceil_div(a.K, each * *blocks);
        s.v = values ? s.k : 0;
        s.parallel = s.count = s.q + s.k + s.v;
    } while (s.parallel * s.chunks > most);
    return s;
}

void rope_forward_by_head(Tensor y, float *stats, Tensor x, Tensor qnorm, Tensor knorm, Attention a,
                          bool values)
{
    int blocks;
    const Teams s = teams_of("rope_forward", a, values, EACH, MAX_THREADS, &blocks);
    const dim3 grid(x.rows, blocks);
    const int threads = block_threads(s.parallel * s.chunks, 1, MAX_THREADS);
    with_bool(halves_aligned(a, x, y, x, qnorm, knorm), [&](auto aligned) {
        with_bool(a.clip > 0, [&](auto clips) {
            with_type(qnorm, [&](auto *weight) {
                with_type(x, [&](auto *in) {
                    norm_heads_kernel<decltype(aligned)::value, decltype(clips)::value>
                        <<<grid, threads, 0, device_stream()>>>(any_out(y), stats, in, weight,
                                                                (decltype(weight))knorm.data, s);
                });
            });
        });
    });
    LAUNCH_CHECK();
}

void rope_backward_by_head(Tensor dx, Tensor dqnorm, Tensor dknorm, Tensor dy, Tensor x,
                           const float *stats, Tensor qnorm, Tensor knorm, Attention a)
{
    int blocks;
    const Teams s = teams_of("rope_backward", a, false, 1, MAX_THREADS_BACKWARD, &blocks);
    const int threads = block_threads(s.parallel * s.chunks, 1, MAX_THREADS_BACKWARD), N = dy.rows;
    const int fit = RESIDENT / threads * device_sm_count() / blocks, most = fit > 0 ? fit : 1;
    const dim3 grid(most < N ? most : N, blocks);
    const int rows = (int)(grid.x * grid.y);
    const size_t shared = (size_t)s.parallel * a.D * sizeof(float);
    float *partial = (float *)device_scratch((size_t)rows * 2 * a.D * sizeof(float), SCRATCH_0);
    with_bool(halves_aligned(a, dx, dy, x, qnorm, knorm), [&](auto aligned) {
        with_bool(a.clip > 0, [&](auto clips) {
            with_type(qnorm, [&](auto *weight) {
                with_type(dy, [&](auto *d) {
                    with_type(x, [&](auto *in) {
                        norm_heads_backward_kernel<decltype(aligned)::value, decltype(clips)::value>
                            <<<grid, threads, shared, device_stream()>>>(
                                any_out(dx), partial, d, in, stats, weight,
                                (decltype(weight))knorm.data, s, N);
                    });
                });
            });
        });
    });
    LAUNCH_CHECK();
    if (dqnorm.data)
        add_column_sums(dqnorm, partial, rows, 2 * a.D);
    if (dknorm.data)
        add_column_sums(dknorm, partial + a.D, rows, 2 * a.D);
}
