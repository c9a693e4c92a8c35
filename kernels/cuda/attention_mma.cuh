/* The kernels of attention by mma.sync, for GPUs of compute capability 8.0 and later.
 * attention_mma.cu launches them. The equations are in kernels/cpu/attention.c, the products in
 * mma.cuh. The structure is FlashAttention-2's [Dao 2023].
 *
 * D is the width of a tile. If heads are narrower, copies fill the other columns with zeros. Copies
 * also fill rows after the end of a document with zeros: queries there have dy = 0 and add nothing,
 * and keys there come after every query. */
#pragma once
#include "kernels/cuda/attention.h"
#include "kernels/cuda/mma.cuh"

/* Arguments of all kernels. The q, k and v of a head are columns of qkv. y and dy are separate
 * tensors. */
struct Work {
    int N, T, H, K, D, window; /* window: a number of keys; T if attention has no window */
    int width;                 /* elements per token of qkv */
    float scale, scale_log2;   /* factors of scores. scale_log2 = scale * log2(e), for exp2 */
    Blocks blocks;
};

/* Arguments of backward. A slot is a tile of queries of one head. Its number is tile * H + head. */
struct Backward : Work {
    float *delta; /* (H, N): dy . y */
    float *dq;    /* (slots, tile): sums before scaling, in the order of threads */
    int *turn;    /* (slots): number of blocks of keys that have added to the tile */
    int *ticket;  /* number of thread blocks that have started */
};

__device__ inline int warp_number()
{
    /* tells the compiler that the number is the same in all lanes of a warp */
    return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
}

/* Returns the index in lse (B, H, T) of token n of head h. */
__device__ inline int64_t lse_index(const Work &w, int n, int h)
{
    return ((int64_t)(n / w.T) * w.H + h) * w.T + n % w.T;
}

/* Sets a score to minus infinity where the query does not see the key. SIDE 1: rows are queries,
 * columns are keys. SIDE -1: rows are keys, columns are queries. first: position of the tile's
 * first query minus position of its first key. */
template <int SIDE, int M, int N>
__device__ inline void mask(float (&score)[M][N][4], int first, int window)
{
    const int lane = threadIdx.x % 32, thread = first + SIDE * (lane / 4 - lane % 4 * 2);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if ((unsigned)(thread + SIDE * (16 * m + i / 2 * 8 - 8 * n - i % 2)) >=
                    (unsigned)window)
                    score[m][n][i] = -INFINITY;
}

/* Stores d times `factor` with element type T, for rows below `rows` and columns below
 * `columns`. */
template <typename T, int M, int N>
__device__ inline void store_rows(T *to, int width, const float (&d)[M][N][4], float factor,
                                  int rows, int columns)
{
    const int lane = threadIdx.x % 32, row = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
            for (int n = 0; n < N; n++)
                if (row + 16 * m + 8 * r < rows && column + 8 * n < columns)
                    store_two(to + (int64_t)(row + 16 * m + 8 * r) * width + column + 8 * n,
                              d[m][n][2 * r] * factor, d[m][n][2 * r + 1] * factor);
}

/* ---- forward --------------------------------------------------------------------------------- */

/* Four warps process 16 M queries each, and loop over tiles of keys. */
template <typename T, int WIDTH>
struct Forward {
    static constexpr int D = WIDTH, ROW = PITCH<T, D>, THREADS = 128;
    static constexpr int M = D * sizeof(T) <= 256 && sizeof(T) == 2 ? 2 : 1, QUERIES = 64 * M;
    static constexpr int KEYS = D * sizeof(T) <= 256   ? 64
                                : D * sizeof(T) <= 512 ? 32
                                                       : 16,
                         TILE = KEYS * ROW;
    static constexpr int BYTES = QUERIES * ROW + 2 * TILE;
};

/* A score may exceed its row's `top` by this power of 2 before the sums are rescaled. */
static constexpr float SLACK = 8;

/* For each of a thread's rows: `top`, the reference of the row's scores, and `sum`, the sum of
 * weights over the thread's columns. */
template <int M>
struct Rows {
    float top[M][2], sum[M][2];
};

/* Replaces scores by weights relative to `top`. If `top` grows, rescales `out`, the sum so far, to
 * the new `top`. */
template <int M, int N, int C>
__device__ inline void weigh(float (&score)[M][N][4], Rows<M> &rows, float (&out)[M][C][4],
                             float scale_log2)
{
    float factor[M][2];
    bool moved = false;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float best = fmaxf(score[m][0][2 * r], score[m][0][2 * r + 1]), &top = rows.top[m][r];
#pragma unroll
            for (int n = 1; n < N; n++)
                best = fmaxf(best, fmaxf(score[m][n][2 * r], score[m][n][2 * r + 1]));
            best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 1));
            best = fmaxf(best, __shfl_xor_sync(0xffffffffu, best, 2));
            factor[m][r] = 1;
            if ((best - top) * scale_log2 > SLACK) {
                factor[m][r] = exp2_fast((top - best) * scale_log2);
                top = best;
                moved = true;
            }
            rows.sum[m][r] *= factor[m][r];
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; i++) {
                    score[m][n][i] = exp2_fast(fmaf(score[m][n][i], scale_log2, -top * scale_log2));
                    rows.sum[m][r] += score[m][n][i];
                }
        }
    if (!__any_sync(0xffffffffu, moved))
        return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int c = 0; c < C; c++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[m][c][i] *= factor[m][i / 2];
}

/* Writes y and lse of the first `exist` queries of a warp, whose first query is n. */
template <typename T, int M, int C>
__device__ inline void finish(T *y, float *lse, const Work &w, Rows<M> &rows, float (&out)[M][C][4],
                              int n, int h, int exist)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = 16 * m + 8 * r + lane / 4;
            float sum = rows.sum[m][r];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (lane % 4 == 0 && row < exist)
                lse[lse_index(w, n, h) + row] = rows.top[m][r] * w.scale + logf(sum);
            sum = 1 / sum;
#pragma unroll
            for (int c = 0; c < C; c++)
                out[m][c][2 * r] *= sum, out[m][c][2 * r + 1] *= sum;
        }
    store_rows(y + ((int64_t)n * w.H + h) * w.D, w.H * w.D, out, 1, exist, w.D);
}

/* Each thread block computes one block of queries of one head. Blocks with the most keys come
 * first. A thread block loops over tiles of keys from the diagonal back. The copy of a tile's
 * values overlaps with the computation of its scores, and the copy of the next keys with the sum of
 * values. */
template <class F, typename T>
__global__ void __launch_bounds__(F::THREADS, 2)
    forward_kernel(T *y, float *lse, const T *qkv, const Work w)
{
    constexpr int D = F::D, M = F::M, KEYS = F::KEYS, ROW = F::ROW;
    extern __shared__ __align__(16) char shared[];
    const int h = blockIdx.x % w.H, kv = h / (w.H / w.K), warp = warp_number();
    const Packed doc = document_of(w.blocks.table, w.T, F::QUERIES, blockIdx.x / w.H);
    const int first = ((doc.length - 1) / F::QUERIES - (blockIdx.x / w.H - doc.first)) * F::QUERIES,
              own = first + 16 * M * warp;
    const T *row = qkv + (int64_t)doc.start * w.width, *k = row + (w.H + kv) * w.D,
            *v = k + w.K * w.D;
    const uint32_t queries = shared_address(shared), keys = queries + F::QUERIES * ROW,
                   values = keys + F::TILE;
    const Along<ROW, false> q_rows(queries + 16 * M * warp * ROW);
    const Along<ROW, true> k_rows(keys);
    const Down<T, ROW, true> v_rows(values);

    float out[M][D / 8][4] = {}, score[M][KEYS / 8][4];
    Rows<M> rows;
    for (int i = 0; i < 2 * M; i++)
        rows.top[i / 2][i % 2] = -1e30f, rows.sum[i / 2][i % 2] = 0;
    const auto copy = [&](uint32_t to, const T *from, int t) {
        copy_tile<T, D, KEYS, F::THREADS>(to, from + (int64_t)t * w.width, w.width, doc.length - t,
                                          w.D);
    };
    const int last = (min(first + F::QUERIES, doc.length) - 1) / KEYS,
              end = max(first - w.window + 1, 0) / KEYS;
    copy_tile<T, D, F::QUERIES, F::THREADS>(queries, row + (int64_t)first * w.width + h * w.D,
                                            w.width, doc.length - first, w.D);
    copy(keys, k, last * KEYS);
    for (int tile = last; tile >= end; tile--) {
        /* position of the warp's first query minus position of the tile's first key */
        const int ahead = own - tile * KEYS;
        const bool seen = ahead + 16 * M > 0 && ahead - KEYS + 1 < w.window;
        copies_wait();
        __syncthreads();
        copy(values, v, tile * KEYS);
        if (seen) {
#pragma unroll
            for (int i = 0; i < M * KEYS / 2; i++)
                score[i / (KEYS / 2)][i / 4 % (KEYS / 8)][i % 4] = 0;
            add_product<T, D / DEPTH<T>>(score, q_rows, k_rows);
            if (ahead < KEYS - 1 || ahead + 16 * M - 1 >= w.window)
                mask<1>(score, ahead, w.window);
            weigh(score, rows, out, w.scale_log2);
        }
        copies_wait();
        __syncthreads();
        if (tile > end)
            copy(keys, k, (tile - 1) * KEYS);
        if (seen)
            add_product<T, KEYS / DEPTH<T>>(out, Weights<T, M, KEYS / 8>{ score }, v_rows);
    }
    finish(y, lse, w, rows, out, doc.start + own, h, doc.length - own);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* One warp computes delta of one token of one head. */
template <typename T>
__global__ void __launch_bounds__(256) delta_kernel(const Backward w, const T *dy, const T *y)
{
    const int64_t i = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (i >= (int64_t)w.N * w.H)
        return;
    float sum = 0;
    for (int d = threadIdx.x % 32 * 2; d < w.D; d += 64)
        sum += to_float(dy[i * w.D + d]) * to_float(y[i * w.D + d]) +
               to_float(dy[i * w.D + d + 1]) * to_float(y[i * w.D + d + 1]);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0)
        w.delta[i % w.H * w.N + i / w.H] = sum;
}

/* Each of PAIRS pairs of warps has 16 M keys. All pairs loop over tiles of QUERIES queries, with
 * STAGES tiles in shared memory. */
template <typename TYPE, int WIDTH, int PAIRS_, int M_, int QUERIES_, int STAGES_>
struct Gradients {
    typedef TYPE T;
    static constexpr int D = WIDTH, ROW = PITCH<T, D>, PAIRS = PAIRS_, THREADS = 64 * PAIRS, M = M_,
                         KEYS = 16 * M * PAIRS;
    static constexpr int QUERIES = QUERIES_, DS_ROW = PITCH<T, QUERIES>, STAGES = STAGES_;
    /* Shared memory holds, in this order: k, v, the stages of q, dy, lse and delta, the p of each
     * thread, ds, and the Item. */
    static constexpr int K_BYTES = KEYS * ROW, Q_BYTES = QUERIES * ROW,
                         STAGE = 2 * Q_BYTES + 2 * QUERIES * 4, Q = 2 * K_BYTES;
    static constexpr int P = Q + STAGES * STAGE, DS = P + KEYS * QUERIES * 4,
                         ITEM = DS + KEYS * DS_ROW, BYTES = ITEM + 64;
    /* Each warp computes 16 DQ_M queries by DQ_COLUMNS columns of a tile of dq. */
    static constexpr int DQ_M = QUERIES == 64 && D != 96 ? 2 : 1, DQ_WARPS = QUERIES / (16 * DQ_M);
    static constexpr int DQ_COLUMNS = D / (2 * PAIRS / DQ_WARPS);
    static_assert(KEYS % QUERIES == 0 && DQ_COLUMNS % 16 == 0,
                  "tiles end where blocks of keys do; products have 16 columns");
};

/* The block of keys and the key head that a thread block processes, in shared memory. */
struct Item {
    Packed doc;
    /* first: first key of the block, counted in the document; last: last tile of queries that sees
     * the block */
    int kv, block, first, last;
    int *turn, turns; /* the value `turns` to store in *turn when the previous tile is added */
};

template <class G>
__device__ inline void begin(Item &i, const Backward &w, int ticket)
{
    i.kv = ticket % w.K;
    i.doc = document_of(w.blocks.table, w.T, G::KEYS, ticket / w.K);
    i.block = ticket / w.K - i.doc.first;
    i.first = i.block * G::KEYS;
    i.last = (min(i.doc.length, i.first + G::KEYS - 1 + w.window) - 1) / G::QUERIES;
    i.turn = NULL;
}

/* A tile of queries of one head. An item loops over its heads; within a head it loops from the last
 * tile back to the tile on the diagonal. */
struct Tile {
    int tile, h;
};

template <class G>
__device__ inline Tile next_tile(const Item &i, Tile t)
{
    return (t.tile - 1) * G::QUERIES >= i.first ? Tile{ t.tile - 1, t.h } : Tile{ i.last, t.h + 1 };
}

/* The order of additions to a tile of dq. The blocks of keys that the tile's queries see add in
 * ascending order, so the block on the diagonal is the last. */
struct Turn {
    int slot, before;
    bool last;
};

template <class G>
__device__ inline Turn turn_of(const Backward &w, const Item &i, Tile t)
{
    const int first = t.tile * G::QUERIES;
    return { (i.doc.first * (G::KEYS / G::QUERIES) + t.tile) * w.H + t.h,
             i.block - max(first - w.window + 1, 0) / G::KEYS, first / G::KEYS == i.block };
}

/* Starts the copies of q, dy, lse and delta of a tile. */
template <class G, typename T>
__device__ inline void copy_queries(uint32_t stage, const Backward &w, const Item &i, Tile t,
                                    const T *qkv, const T *dy, const float *lse)
{
    const int first = t.tile * G::QUERIES, n = i.doc.start + first, rows = i.doc.length - first;
    copy_tile<T, G::D, G::QUERIES, G::THREADS>(stage, qkv + (int64_t)n * w.width + t.h * w.D,
                                               w.width, rows, w.D);
    copy_tile<T, G::D, G::QUERIES, G::THREADS>(
        stage + G::Q_BYTES, dy + ((int64_t)n * w.H + t.h) * w.D, w.H * w.D, rows, w.D);
    const int row = threadIdx.x % G::QUERIES;
    const uint32_t numbers = stage + 2 * G::Q_BYTES + row * 4;
    if (threadIdx.x < G::QUERIES) {
        copy_4(numbers, lse + lse_index(w, n, t.h) + row, row < rows);
        copy_4(numbers + G::QUERIES * 4, w.delta + (int64_t)t.h * w.N + n + row, row < rows);
    }
}

/* Adds a warp's part of a tile of dq when it is the block's turn. The first block stores its part;
 * the last block writes the sum as dq. */
template <class G, typename T, int C>
__device__ inline void add_dq(T *dq, const Backward &w, const Item &i, Tile t,
                              float (&d)[G::DQ_M][C][4], int warp)
{
    const Turn turn = turn_of<G>(w, i, t);
    const int row = t.tile * G::QUERIES + warp % G::DQ_WARPS * 16 * G::DQ_M,
              column = warp / G::DQ_WARPS * G::DQ_COLUMNS;
    Added *sums =
        reinterpret_cast<Added *>(w.dq + (int64_t)turn.slot * (G::QUERIES * G::D)) + threadIdx.x;
    const auto each = [&](auto act) {
#pragma unroll
        for (int i = 0; i < G::DQ_M * C * 4; i += ADDED)
            act(sums + i / ADDED * G::THREADS,
                reinterpret_cast<Added &>(d[i / 4 / C][i / 4 % C][i % 4]));
    };
    if (turn.last) {
        if (turn.before > 0)
            each([](Added *sum, Added &x) { x = plus(x, __ldcg(sum)); });
        store_rows(dq + (int64_t)(i.doc.start + row) * w.width + t.h * w.D + column, w.width, d,
                   w.scale, i.doc.length - row, w.D - column);
    } else if (turn.before > 0) {
        each([](Added *sum, Added &x) { add_floats(sum, x); });
    } else {
        each([](Added *sum, Added &x) { __stcg(sum, x); });
    }
}

/* Called by one thread. Signals that the previous tile is added, then waits for the item's turn to
 * add tile t. */
template <class G>
__device__ inline void take_turn(const Backward &w, Item &i, Tile t)
{
    const Turn turn = turn_of<G>(w, i, t);
    if (i.turn)
        turn_set(i.turn, i.turns);
    i.turn = turn.last ? NULL : w.turn + turn.slot;
    i.turns = turn.before + 1;
    if (turn.before > 0)
        turn_wait(w.turn + turn.slot, turn.before);
}

/* Replaces s = k q^T by p, the operand of dv, and passes p to the other warp of the pair. lse: lse
 * of the tile's queries. */
template <int M, int N>
__device__ inline void weigh_keys(float (&s)[M][N][4], float4 *exchange, const float *lse,
                                  float scale_log2)
{
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 l = *reinterpret_cast<const float2 *>(lse + 8 * n + threadIdx.x % 4 * 2);
        const float even = l.x * 1.44269504f, odd = l.y * 1.44269504f;
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[m][n][i] = exp2_fast(fmaf(s[m][n][i], scale_log2, i % 2 ? -odd : -even));
    }
#pragma unroll
    for (int i = 0; i < M * N; i++)
        exchange[i * 32] = reinterpret_cast<const float4 &>(s[i / N][i % N]);
}

/* Replaces dp = v dy^T by ds, the operand of dk, and stores ds in shared memory for dq. */
template <typename T, int ROW, int M, int N>
__device__ inline void grade_keys(float (&dp)[M][N][4], const float4 *exchange, const float *delta,
                                  char *ds)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const float2 d = *reinterpret_cast<const float2 *>(delta + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const float4 p = exchange[(m * N + n) * 32];
            float(&x)[4] = dp[m][n];
            x[0] = p.x * (x[0] - d.x), x[1] = p.y * (x[1] - d.y), x[2] = p.z * (x[2] - d.x),
            x[3] = p.w * (x[3] - d.y);
        }
    }
    ds += lane / 4 * ROW + lane % 4 * 2 * (int)sizeof(T);
#pragma unroll
    for (int i = 0; i < M * N * 2; i++) {
        const float *two = dp[i / 2 / N][i / 2 % N] + i % 2 * 2;
        store_two(reinterpret_cast<T *>(ds + (i / 2 / N * 16 + i % 2 * 8) * ROW) + i / 2 % N * 8,
                  two[0], two[1]);
    }
}

/* Each thread block processes one block of keys of one key/value head, and loops over all tiles of
 * queries that see these keys. One warp of a pair computes
 *     s = k q^T, p = exp2(c s - lse), dv += p dy     and the other     dp = v dy^T, ds = p (dp - delta), dk += ds q
 * for the same keys. Each thread passes its p to the corresponding thread of the other warp. Then
 * all warps compute dq = ds k.
 *
 * The bits are always the same, because tiles of dq are accumulated in global memory in the order
 * of Turn. Tickets number the blocks of keys in ascending order, and a block waits only for earlier
 * blocks. So no order of thread blocks on the GPU can cause a deadlock. All blocks loop over the
 * queries in the same direction, so they rarely wait. */
template <class G, typename T>
__global__ void __launch_bounds__(G::THREADS)
    gradients_kernel(T *dqkv, const T *dy, const T *qkv, const float *lse, const Backward w)
{
    constexpr int D = G::D, M = G::M, QUERIES = G::QUERIES, ROW = G::ROW, STEPS = D / DEPTH<T>;
    extern __shared__ __align__(16) char shared[];
    const int warp = warp_number(), pair = warp % G::PAIRS, own = 16 * M * pair;
    const bool has_p = warp < G::PAIRS;
    const uint32_t keys = shared_address(shared),
                   own_keys = keys + (has_p ? 0 : G::K_BYTES) + own * ROW;
    float4 *exchange =
        reinterpret_cast<float4 *>(shared + G::P) + own * QUERIES / 4 + threadIdx.x % 32;
    Item &item = *reinterpret_cast<Item *>(shared + G::ITEM);
    if (threadIdx.x == 0)
        begin<G>(item, w, atomicAdd(w.ticket, 1));
    __syncthreads();
    const int64_t at = (int64_t)(item.doc.start + item.first) * w.width + (w.H + item.kv) * w.D;
    const int rows = item.doc.length - item.first;
    copy_tile<T, D, G::KEYS, G::THREADS>(keys, qkv + at, w.width, rows, w.D);
    copy_tile<T, D, G::KEYS, G::THREADS>(keys + G::K_BYTES, qkv + at + w.K * w.D, w.width, rows,
                                         w.D);
    Tile tile = { item.last, item.kv * (w.H / w.K) };
    copy_queries<G>(keys + G::Q, w, item, tile, qkv, dy, lse);

    float sum[M][D / 8][4] = {}; /* dv in one warp of a pair, dk in the other */
    int stage = G::Q;
    for (bool more = true; more;) {
        const uint32_t q = keys + stage, dys = q + G::Q_BYTES;
        const float *numbers = reinterpret_cast<const float *>(shared + stage + 2 * G::Q_BYTES);
        const Tile next = next_tile<G>(item, tile);
        more = next.h < (item.kv + 1) * (w.H / w.K);
        copies_wait();
        __syncthreads();
        if (G::STAGES == 2) {
            stage = stage == G::Q ? G::Q + G::STAGE : G::Q;
            if (more)
                copy_queries<G>(keys + stage, w, item, next, qkv, dy, lse);
        }
        float x[M][QUERIES / 8][4] = {};
        add_product<T, STEPS>(x, Along<ROW, false>(own_keys), Along<ROW, true>(has_p ? q : dys));
        if (has_p) {
            /* position of the tile's first query minus position of the warp's first key */
            const int ahead = tile.tile * QUERIES - item.first - own;
            if (ahead < 16 * M - 1 || ahead + QUERIES - 1 >= w.window)
                mask<-1>(x, ahead, w.window);
            weigh_keys(x, exchange, numbers, w.scale_log2);
            pair_arrive(1 + pair);
        } else {
            if (threadIdx.x == 32 * G::PAIRS)
                take_turn<G>(w, item, tile);
            pair_wait(1 + pair);
            grade_keys<T, G::DS_ROW>(x, exchange, numbers + QUERIES,
                                     shared + G::DS + own * G::DS_ROW);
        }
        add_product<T, QUERIES / DEPTH<T>>(sum, Weights<T, M, QUERIES / 8>{ x },
                                           Down<T, ROW, true>(has_p ? dys : q));
        __syncthreads();
        if (G::STAGES == 1 && more)
            copy_queries<G>(keys + stage, w, item, next, qkv, dy, lse);
        float dq[G::DQ_M][G::DQ_COLUMNS / 8][4] = {};
        add_product<T, G::KEYS / DEPTH<T>>(
            dq,
            Down<T, G::DS_ROW, false>(keys + G::DS +
                                      warp % G::DQ_WARPS * 16 * G::DQ_M * (int)sizeof(T)),
            Down<T, ROW, true>(keys + warp / G::DQ_WARPS * G::DQ_COLUMNS * (int)sizeof(T)));
        add_dq<G>(dqkv, w, item, tile, dq, warp);
        tile = next;
    }
    T *out = dqkv + (int64_t)(item.doc.start + item.first + own) * w.width +
             (w.H + item.kv + (has_p ? w.K : 0)) * w.D;
    store_rows(out, w.width, sum, has_p ? 1 : w.scale, item.doc.length - item.first - own, w.D);
}
