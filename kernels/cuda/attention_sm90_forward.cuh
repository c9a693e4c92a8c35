/* The kernel of attention's forward on compute capability 9.0. The equations are in
 * kernels/cpu/attention.c. The structure is FlashAttention-3's [Shah 2024].
 *
 * An item is one block of 128 queries of one query head. Its loop goes over tiles of 128 keys and
 * values, from the diagonal back to the first tile that a query sees. The first of three warpgroups
 * moves data. The other two have 64 queries each. Each of these two keeps in registers a tile's
 * scores s = q k^T, its weights p = exp2(c s - top) and the sums out += p v. Each of them starts
 * the products q k^T of the next tile, then p v of the current tile, and computes the next weights
 * while p v runs. The two warpgroups alternate in starting products, so that one warpgroup computes
 * weights while the products of the other run. Items overlap too: the first scores of the next item
 * run with the last p v of the current item.
 *
 * HEADS: if query heads share keys, two thread blocks form a cluster with items of two such heads.
 * Each block loads half of a tile for both blocks. This saves traffic from the L2 cache, which
 * costs energy, and on a GPU at its power limit energy costs time.
 *
 * `top` is a number that the scores of a row exceed only a little. `top` need not be their maximum:
 * `out` is rescaled only if a score exceeds top by SLACK. Every query sees its own key, which is in
 * the first tile, so top is finite after this tile. No score exceeds |q| times the largest |k|
 * (Cauchy-Schwarz). Once this bound exceeds top by at most ROOM, the kernel no longer computes the
 * maxima of tiles. Weights are BF16 and sums are F32; both formats have the same relative precision
 * at 2^ROOM as at 1. The largest |k| is taken over the blocks before the item's own block, so later
 * keys have no influence. NOTE: a warp decides for its 16 queries together, including rows after
 * the end of a document. So the last bits of a query's result may depend on neighbouring
 * queries. */
#pragma once
#include "kernels/cuda/attention_tiles.cuh"

static constexpr int STAGES = 4; /* number of tiles of keys or values in shared memory */
/* as exponents of 2: weights stay below 2^SLACK, and sums of 2^24 weights stay far below 2^127 */
static constexpr float SLACK = 8;
/* maximum excess of the bound over `top`, as an exponent of 2, if maxima are not computed */
static constexpr float ROOM = 64;
/* bytes of keys and values that the L2 cache keeps */
static constexpr int64_t CACHED = 24 << 20;

struct Forward : Work {
    int K;
    bf16 *y;
    float *lse; /* (B, H, T), or (N, H) if `table` is set */
    /* (K, blocks): the largest |k| of each block of each head; NULL: unknown */
    const float *k_norm;
};

/* Returns the item of a ticket. Tickets go document by document. Inside a document they go through
 * groups of heads; the keys and values of a group fit into the cache. Inside a group, the last
 * block of each head comes first, because it has the most tiles; then comes the block before it,
 * and so on. A cluster has one ticket for its HEADS items; `rank` selects one item. */
template <int HEADS>
__device__ inline Item item_of(const Forward &w, int ticket, int rank)
{
    const int H = w.H / HEADS;
    if (ticket >= w.blocks * H)
        return { 0, 0, 0, 0, -1 };
    const Packed d = document_of(w, ticket / H);
    const int count = (d.length + KEYS - 1) / KEYS, i = ticket - d.first * H;
    /* bytes of the keys and values of one key/value head */
    const int64_t bytes = (int64_t)count * KEYS * w.D * 2 * (int)sizeof(bf16);
    const int fit = max(1, min(w.K, (int)(CACHED / bytes))), parts = (w.K + fit - 1) / fit;
    const int most = (w.K + parts - 1) / parts * (H / w.K);
    const int part = i / (count * most), at = i % (count * most),
              heads = min(most, H - part * most);
    return { d.start, d.length, d.first, count - 1 - at / heads,
             (part * most + at % heads) * HEADS + rank };
}

/* The first tile that the item's first query sees. The last tile of the item is item.block. */
__device__ inline int first_tile(const Item &item, int window)
{
    return max(0, item.block * KEYS - window + 1) / KEYS;
}

/* Readers wait for the "full" barrier, the next writer waits for the "empty" barrier. Readers of a
 * tile arrive at "empty" in every block of the cluster. q_full also covers the item. */
template <int D>
struct alignas(1024) ForwardShared {
    char q[2][Tile<D>::KEY_BYTES];
    /* in the order in which products use the tiles: k 0, k 1, v 0, k 2, v 1, ... */
    char tile[STAGES][Tile<D>::KEY_BYTES];
    char y[Tile<D>::KEY_BYTES]; /* rows that are being stored */
    Item item[2];
    Barrier q_full[2], q_empty[2], full[STAGES], empty[STAGES];
    Tickets tickets;
};

static_assert(sizeof(ForwardShared<128>) + 1024 <= 227 * 1024,
              "shared memory of a thread block, aligned");

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int D, int HEADS>
__device__ inline void init_barriers(ForwardShared<D> &s)
{
    init_tickets(s.tickets);
    for (int i = 0; i < 2; i++) {
        barrier_init(&s.q_full[i], 1);
        barrier_init(&s.q_empty[i], CONSUMERS / 32);
    }
    for (int i = 0; i < STAGES; i++) {
        barrier_init(&s.full[i], 1);
        barrier_init(&s.empty[i], HEADS * CONSUMERS / 32);
    }
    barrier_init_fence();
}

/* ---- data movement --------------------------------------------------------------------------- */

template <int D, int HEADS>
__device__ inline void load_next(ForwardShared<D> &s, Ring<STAGES> &ring, const CUtensorMap *qkv,
                                 int head, int n, int rank)
{
    const Ring<STAGES> to = ring.take();
    Barrier *full = &s.full[to.stage];
    barrier_wait(&s.empty[to.stage], to.parity ^ 1);
    barrier_expect(full, Tile<D>::KEY_BYTES);
    load_tile<D, HEADS>(s.tile[to.stage], qkv, head, n, KEYS, full, rank);
}

/* Called by one thread. Takes items and loads their data. The thread loads the values of a tile
 * after the keys of the next tile. */
template <int D, int HEADS>
__device__ void load(ForwardShared<D> &s, const Forward &w, const CUtensorMap *qkv, int rank)
{
    Ring<STAGES> ring;
    int head = -1, n = 0; /* head and first token of the values to load next */
    for (int i = 0;; i++) {
        const Item item = item_of<HEADS>(w, next_ticket<HEADS>(s.tickets, w.ticket, i, rank), rank);
        barrier_wait(&s.q_empty[i & 1], (i >> 1 & 1) ^ 1);
        fence_async(); /* bound_scores has read s.q[i & 1] by ordinary loads */
        s.item[i & 1] = item;
        if (item.head < 0) {
            barrier_arrive(&s.q_full[i & 1]);
            break;
        }
        barrier_expect(&s.q_full[i & 1], Tile<D>::KEY_BYTES);
        load_tile<D>(s.q[i & 1], qkv, item.head, item.start + item.block * KEYS, KEYS,
                     &s.q_full[i & 1]);
        const int kv = w.H + item.head / (w.H / w.K), end = first_tile(item, w.window);
        for (int tile = item.block; tile >= end; tile--) {
            load_next<D, HEADS>(s, ring, qkv, kv, item.start + tile * KEYS, rank);
            if (head >= 0)
                load_next<D, HEADS>(s, ring, qkv, head, n, rank);
            head = kv + w.K, n = item.start + tile * KEYS;
        }
    }
    if (head >= 0)
        load_next<D, HEADS>(s, ring, qkv, head, n, rank);
}

/* ---- computing ------------------------------------------------------------------------------- */

/* score (64 queries, KEYS) = the queries' rows times the keys' rows, summed over D columns. */
template <int D>
__device__ inline void start_products(float (&score)[KEYS / 2], uint32_t queries, uint32_t keys)
{
    keep_in_place(score);
    products_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++)
        product<0, 0>(score, queries + step_by_rows(k, KEYS * ROW),
                      keys + step_by_rows(k, KEYS * ROW), k > 0);
    products_commit();
}

/* out (64 queries, D) += p values. With `half`, the sum has only the first half of the keys. */
template <int C>
__device__ inline void start_values(float (&out)[C], uint32_t (&p)[KEYS / 4], uint32_t values,
                                    bool half)
{
    if (half)
        start_sum(out, reinterpret_cast<uint32_t(&)[KEYS / 8]>(p), values);
    else
        start_sum(out, p, values);
}

/* Sets a score to minus infinity where the query does not see the key. first: position of the
 * thread's first query minus position of its first key. */
__device__ inline void mask_keys(float (&score)[KEYS / 2], int first, int window)
{
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
        /* position of the query minus position of the key */
        const int ahead = first + i % 4 / 2 * 8 - i / 4 * 8 - i % 2;
        if ((unsigned)ahead >= (unsigned)window)
            score[i] = -INFINITY;
    }
}

/* For each of a thread's two rows: `top`, the reference of the row's scores, and `sum`, the sum of
 * weights over the thread's columns. */
struct Rows {
    float top[2] = { -INFINITY, -INFINITY }, sum[2] = {};
    bool bounded = false; /* in all rows of the warp no score can exceed top by more than ROOM */
};

/* Returns the largest |k| in the blocks that the item's queries see, except the item's own
 * block. */
__device__ inline float largest_key(const Forward &w, const Item &item)
{
    const float *norm = w.k_norm + (int64_t)(item.head / (w.H / w.K)) * w.blocks + item.first;
    float most = 0;
#pragma unroll 4
    for (int block = first_tile(item, w.window) + threadIdx.x % 32; block < item.block; block += 32)
        most = fmaxf(most, norm[block]);
    return warp_max(most);
}

/* Computes upper bounds of the unscaled scores of the thread's two queries in s.q[slot], for all
 * tiles after the first. The bounds hold up to rounding, for which ROOM leaves space. The bounds
 * are infinite if k_norm is unknown. */
template <int D>
__device__ inline void bound_scores(float (&bound)[2], const ForwardShared<D> &s, const Forward &w,
                                    const Item &item, int slot)
{
    const int lane = threadIdx.x % 32, first = (threadIdx.x - MOVERS) / 32 * 16 + lane / 4;
    bound[0] = bound[1] = INFINITY;
    if (!w.k_norm)
        return;
    const float k_norm = largest_key(w, item);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = first + 8 * r;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < D / 32; i++) {
            const int chunk = 4 * i + lane % 4;
            const char *at = s.q[slot] + (chunk / 8 * KEYS + row) * ROW + (chunk ^ row) % 8 * 16;
            sum += norm_squared(*reinterpret_cast<const uint4 *>(at));
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        bound[r] = sqrtf(sum) * k_norm;
    }
}

/* Raises `top` in rows where scores of the tile exceed it by SLACK. Returns true if any row of the
 * warp has a new `top`. Then the sums so far must be multiplied by `factor`, which is 1 on entry.
 * Sets rows.bounded. */
__device__ inline bool raise_top(Rows &rows, float (&factor)[2], const float (&score)[KEYS / 2],
                                 float scale_log2, const float (&bound)[2])
{
    bool moved = false, bounded = true;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float even = score[2 * r], odd = score[2 * r + 1];
#pragma unroll
        for (int i = 2 * r + 4; i < KEYS / 2; i += 4)
            even = fmaxf(even, score[i]), odd = fmaxf(odd, score[i + 1]);
        float top = fmaxf(even, odd);
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        if ((top - rows.top[r]) * scale_log2 > SLACK) {
            factor[r] = exp2_fast((rows.top[r] - top) * scale_log2);
            rows.top[r] = top;
            moved = true;
        }
        bounded &= (bound[r] - rows.top[r]) * scale_log2 <= ROOM;
    }
    rows.bounded = __all_sync(0xffffffffu, bounded);
    return __any_sync(0xffffffffu, moved);
}

/* Replaces scores by weights. Returns true if the sums so far must be multiplied by `factor`. */
__device__ inline bool weigh(float (&score)[KEYS / 2], Rows &rows, float (&factor)[2],
                             float scale_log2, const float (&bound)[2])
{
    factor[0] = factor[1] = 1;
    const bool moved = !rows.bounded && raise_top(rows, factor, score, scale_log2, bound);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float top = rows.top[r] * scale_log2;
        float even = 0, odd = 0;
#pragma unroll
        for (int i = 2 * r; i < KEYS / 2; i += 4) {
            score[i] = exp2_fast(fmaf(score[i], scale_log2, -top));
            score[i + 1] = exp2_fast(fmaf(score[i + 1], scale_log2, -top));
            even += score[i], odd += score[i + 1];
        }
        rows.sum[r] = rows.sum[r] * factor[r] + (even + odd);
    }
    return moved;
}

/* Returns the position of the first of a warp's 16 rows. */
__device__ inline int first_row(const Item &item)
{
    return item.block * KEYS + uniform((threadIdx.x - MOVERS) / 32) * 16;
}

/* Writes lse of the rows inside the document. Sets factor to 1 / (sum of weights). The caller must
 * multiply `out` by this factor. */
__device__ inline void finish_rows(const Forward &w, const Item &item, const Rows &rows,
                                   float (&factor)[2])
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int t = first_row(item) + lane / 4 + 8 * r;
        float sum = rows.sum[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        factor[r] = 1 / sum;
        const int64_t at = w.table ? (int64_t)t * w.H + item.head : (int64_t)item.head * w.T + t;
        if (t < item.length && lane % 4 == 0)
            w.lse[(int64_t)item.start * w.H + at] = rows.top[r] * w.scale + logf(sum);
    }
}

/* Writes a warp's rows of y through shared memory. All 16 rows must exist. */
template <int D>
__device__ inline void store_y(ForwardShared<D> &s, const CUtensorMap *y, const Item &item,
                               int first, const float (&out)[D / 2], const float (&factor)[2])
{
    char *to = s.y + first % KEYS * ROW;
    const int lane = threadIdx.x % 32, row = lane % 16;
    if (lane == 0)
        copies_wait_read<0>(); /* the stores of the previous item have read shared memory */
    __syncwarp();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const float *d = out + 8 * k;
        const uint32_t a[] = { bf16_pair(d[0] * factor[0], d[1] * factor[0]),
                               bf16_pair(d[2] * factor[1], d[3] * factor[1]),
                               bf16_pair(d[4] * factor[0], d[5] * factor[0]),
                               bf16_pair(d[6] * factor[1], d[7] * factor[1]) };
        const int chunk = 2 * k + lane / 16;
        store_matrices(to + (chunk / 8 * KEYS + row) * ROW + ((chunk % 8) ^ (row % 8)) * 16, a);
    }
    fence_async();
    __syncwarp();
    if (lane == 0) {
#pragma unroll
        for (int panel = 0; panel < Tile<D>::PANELS; panel++)
            store_box(y, 64 * panel, item.head, item.start + first, to + panel * KEYS * ROW);
        copies_commit();
    }
}

/* Writes a warp's rows of y, except rows after the end of the document. */
template <int D>
__device__ inline void write_y(ForwardShared<D> &s, const Forward &w, const CUtensorMap *y,
                               const Item &item, const float (&out)[D / 2],
                               const float (&factor)[2])
{
    const int first = first_row(item);
    if (first + 16 <= item.length) {
        store_y(s, y, item, first, out, factor);
        return;
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int t = first + threadIdx.x % 32 / 4 + 8 * r;
        store_row(w.y + ((int64_t)(item.start + t) * w.H + item.head) * w.D, out, r == 1, factor[r],
                  w.D, t < item.length);
    }
}

/* Masks and weighs the warpgroup's scores of a tile. */
template <int D>
__device__ inline bool weigh_tile(float (&score)[KEYS / 2], Rows &rows, float (&factor)[2],
                                  const Forward &w, const Item &item, int tile, int group,
                                  const float (&bound)[2])
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4,
              ahead = (item.block - tile) * KEYS + 64 * group;
    if (ahead < KEYS - 1 || ahead + 63 >= w.window)
        mask_keys(score, ahead + 16 * warp + lane / 4 - 2 * (lane % 4), w.window);
    return weigh(score, rows, factor, w.scale_log2, bound);
}

__device__ inline void round_weights(uint32_t (&p)[KEYS / 4], const float (&score)[KEYS / 2])
{
#pragma unroll
    for (int i = 0; i < KEYS / 4; i++)
        p[i] = bf16_pair(score[2 * i], score[2 * i + 1]);
}

template <int C>
__device__ inline void multiply_rows(float (&out)[C], const float (&factor)[2])
{
#pragma unroll
    for (int i = 0; i < C; i++)
        out[i] *= factor[i / 2 % 2];
}

template <int C, int W>
__device__ inline void finish_sum(float (&out)[C], uint32_t (&p)[W])
{
    products_wait<0>();
    keep_in_place(out);
    keep_in_place(p);
}

/* Computes the weights of the first tile of the first item. */
template <int D, int HEADS>
__device__ inline void begin(ForwardShared<D> &s, const Forward &w, const Item &item,
                             float (&score)[KEYS / 2], uint32_t (&p)[KEYS / 4], Rows &rows,
                             float (&bound)[2], int group)
{
    float factor[2];
    if (group == 1)
        named_barrier_arrive(1, CONSUMERS);
    barrier_wait(&s.full[0], 0);
    start_products<D>(score, operand(s.q[0] + 64 * group * ROW, 16), operand(s.tile[0], 16));
    bound_scores(bound, s, w, item, 0);
    products_wait<0>();
    keep_in_place(score);
    barrier_arrive_everywhere<HEADS>(&s.empty[0]);
    weigh_tile<D>(score, rows, factor, w, item, item.block, group, bound);
    round_weights(p, score);
}

/* Starts the products of the next keys with the queries in `slot`, and the products of p with the
 * values of the previous keys. The two warpgroups alternate. */
template <int D>
__device__ inline void start_tile(ForwardShared<D> &s, float (&score)[KEYS / 2],
                                  float (&out)[D / 2], uint32_t (&p)[KEYS / 4], Ring<STAGES> keys,
                                  Ring<STAGES> values, int slot, int group, bool half)
{
    barrier_wait(&s.full[keys.stage], keys.parity);
    take_turn(group);
    start_products<D>(score, operand(s.q[slot] + 64 * group * ROW, 16),
                      operand(s.tile[keys.stage], 16));
    barrier_wait(&s.full[values.stage], values.parity);
    start_values(out, p, operand(s.tile[values.stage], KEYS * ROW), half);
    pass_turn(group);
}

/* The loop of one warpgroup over its items. `out` and p belong to tile `tile` of `item`, and score
 * to the next tile. On the diagonal the first warpgroup sees only the first half of the keys. */
template <int D, int HEADS>
__device__ void consume(ForwardShared<D> &s, const Forward &w, const CUtensorMap *y, int group)
{
    float out[D / 2] = {}, score[KEYS / 2], factor[2], end[2], bound[2];
    uint32_t p[KEYS / 4];
    Rows rows;
    Ring<STAGES> ring;
    barrier_wait(&s.q_full[0], 0);
    Item item = s.item[0];
    if (item.head < 0)
        return;
    begin<D, HEADS>(s, w, item, score, p, rows, bound, group);
    ring.take();
    int tile = item.block, items = 0;
    for (;;) {
        const bool last = tile == first_tile(item, w.window),
                   half = group == 0 && tile == item.block;
        Item next = item;
        if (last) {
            barrier_arrive_warp(&s.q_empty[items & 1]);
            items++;
            barrier_wait(&s.q_full[items & 1], items >> 1 & 1);
            next = s.item[items & 1];
            if (next.head < 0)
                break;
        }
        tile = last ? next.block : tile - 1;
        const Ring<STAGES> keys = ring.take(), values = ring.take();
        start_tile(s, score, out, p, keys, values, items & 1, group, half);
        if (last)
            bound_scores(bound, s, w, next, items & 1);

        products_wait<1>();
        keep_in_place(score);
        barrier_arrive_everywhere<HEADS>(&s.empty[keys.stage]);
        if (last) {
            finish_rows(w, item, rows, end);
            rows = Rows();
        }
        const bool moved = weigh_tile<D>(score, rows, factor, w, next, tile, group, bound);
        /* NOTE: each branch has its own wait, because the assembler moves a common wait before the
         * computation of the weights */
        if (last) {
            finish_sum(out, p);
            write_y(s, w, y, item, out, end);
            for (int i = 0; i < D / 2; i++)
                out[i] = 0;
        } else {
            finish_sum(out, p);
            if (moved)
                multiply_rows(out, factor);
        }
        barrier_arrive_everywhere<HEADS>(&s.empty[values.stage]);
        round_weights(p, score);
        item = next;
    }
    if (group == 0)
        named_barrier(1, CONSUMERS); /* matches the last arrival of the other warpgroup */
    barrier_wait(&s.full[ring.stage], ring.parity);
    start_values(out, p, operand(s.tile[ring.stage], KEYS * ROW), group == 0 && tile == item.block);
    finish_rows(w, item, rows, end);
    finish_sum(out, p);
    write_y(s, w, y, item, out, end);
    copies_wait();
}

#endif

/* Launched with one thread block per SM, in clusters of HEADS blocks. Each block takes items until
 * none are left. *ticket must be 0 before the launch. */
template <int D, int HEADS>
__global__ void __launch_bounds__(SM90_THREADS, 1)
    forward_kernel(const Forward w, const __grid_constant__ CUtensorMap qkv,
                   const __grid_constant__ CUtensorMap y)
{
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char memory[];
    ForwardShared<D> &s =
        *reinterpret_cast<ForwardShared<D> *>(memory + (-shared_address(memory) & 1023));
    const int group = uniform(threadIdx.x / 128) - 1, rank = blockIdx.x % HEADS;
    if (threadIdx.x == 0) {
        prefetch_map(&qkv);
        prefetch_map(&y);
        init_barriers<D, HEADS>(s);
    }
    cluster_barrier<HEADS>();
    if (group < 0) {
        registers_shrink<32>();
        if (threadIdx.x == 0)
            load<D, HEADS>(s, w, &qkv, rank);
    } else {
        registers_grow<232>();
        consume<D, HEADS>(s, w, &y, group);
    }
    cluster_end<HEADS>();
#endif
}
