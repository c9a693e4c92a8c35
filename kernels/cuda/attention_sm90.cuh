/* The main kernel of attention's backward on compute capability 9.0. attention_tiles.cuh has the
 * kernels before and after it. The equations are in kernels/cpu/attention.c. The structure is
 * FlashAttention-3's [Shah 2024].
 *
 * An item is one block of keys of one query head. Its k and v stay in shared memory, and part of v
 * in registers, while the kernel loops over the tiles of queries that see these keys, from the
 * diagonal on. The first of three warpgroups moves data. The other two have 64 keys each and hold
 * the dk and dv of these keys in registers. For each tile they compute, transposed,
 *     s = k q^T, dp = v dy^T,  p = exp2(c s - lse),  ds = p (dp - delta),  dv += p dy,  dk += ds q,
 * They store ds in shared memory. Then each of them computes one half of the tile's dq = ds k over
 * all 128 keys, and this half is added to an F32 workspace. The sums of a tile start together with
 * the scores of the next tile. The two warpgroups alternate in starting products, so that one
 * warpgroup computes p and ds while the products of the other run.
 *
 * PAIR: for long sequences, two thread blocks form a cluster with neighbouring items. Each block
 * loads half of a tile of queries for both blocks. This saves traffic from the L2 cache, which
 * costs energy, and on a GPU at its power limit energy costs time.
 *
 * The bits are always the same, because the additions to a tile of dq are ordered. The block on the
 * diagonal stores first. Then the blocks before it add, the nearest first. turn[tile] counts the
 * additions, and the adding threads wait for their turn. Items are assigned so that an item waits
 * only for earlier items, which are done or running. The first item of a pair also waits for the
 * second, and the second waits only until the first has finished earlier tiles. So no order of
 * thread blocks on the GPU can cause a deadlock. A block starts on its own diagonal. So the blocks
 * that it waits for are ahead of it, and it rarely waits. */
#pragma once
#include "kernels/cuda/attention_tiles.cuh"

/* Number of tiles of queries in shared memory: as many as fit. */
template <int D>
constexpr int QUERY_STAGES = D == 128 ? 3 : 2;

/* Returns the item of a ticket. Tickets go document by document, in a document head by head, and in
 * a head from the last block to the first. With PAIR 2 a ticket stands for two neighbouring blocks,
 * `rank` selects one of them, and sequences have an even number of blocks. */
template <int PAIR>
__device__ inline Item item_of(const Backward &w, int ticket, int rank)
{
    if (ticket * PAIR >= w.blocks * w.H)
        return { 0, 0, 0, 0, -1 };
    const Packed d = document_of(w, ticket * PAIR / w.H);
    const int count = (d.length + KEYS - 1) / KEYS / PAIR, i = ticket - d.first / PAIR * w.H;
    return { d.start, d.length, d.first, (count - 1 - i % count) * PAIR + rank, i / count };
}

/* first_tile and end_tile give the range of tiles that see the keys of a block of the item's
 * document: from the diagonal to the end of the document or of the last key's window. */
template <int D>
__device__ inline int first_tile(int block)
{
    return block * Tile<D>::PER_BLOCK;
}
template <int D>
__device__ inline int end_tile(const Item &item, int block, int window)
{
    const int tokens = min(item.length, block * KEYS + KEYS - 1 + window);
    return (tokens + Tile<D>::QUERIES - 1) / Tile<D>::QUERIES;
}

/* The range of tiles that the pair needs. Both blocks get all of these tiles. */
template <int D, int PAIR>
__device__ inline int first_of_pair(const Item &item)
{
    return first_tile<D>(item.block / PAIR * PAIR);
}
template <int D, int PAIR>
__device__ inline int end_of_pair(const Item &item, int window)
{
    return end_tile<D>(item, item.block / PAIR * PAIR + PAIR - 1, window);
}

template <int D>
__device__ inline int64_t slot_of(const Backward &w, const Item &item, int tile)
{
    return ((int64_t)item.first * Tile<D>::PER_BLOCK + tile) * w.H + item.head;
}

/* ---- the gradients: data movement ------------------------------------------------------------ */

/* Readers wait for the "full" barrier, the next writer waits for the "empty" barrier. Readers of
 * queries arrive at "empty" in every block of the cluster. q_full also covers `rows`; q_empty also
 * covers dy. */
template <int D>
struct alignas(1024) Shared {
    static constexpr int STAGES = QUERY_STAGES<D>;
    char k[Tile<D>::KEY_BYTES], v[Tile<D>::KEY_BYTES];
    char q[STAGES][Tile<D>::BYTES], dy[STAGES][Tile<D>::BYTES];
    char ds[2][Tile<D>::DS_BYTES]; /* rows are keys, columns queries */
    float dq[2][PART];             /* one part per warpgroup */
    float rows[STAGES][2][Tile<D>::QUERIES];
    Item item;
    Tickets tickets;
    Barrier item_full, item_empty, kv_full, kv_empty, q_full[STAGES], q_empty[STAGES],
        dy_full[STAGES];
    Barrier ds_full[2], ds_empty[2];    /* indexed [tile's parity] */
    Barrier dq_full[2][2], dq_empty[2]; /* indexed [tile's parity][warpgroup], and [warpgroup] */
};

static_assert(sizeof(Shared<128>) + 1024 <= 227 * 1024 && sizeof(Shared<64>) + 1024 <= 227 * 1024,
              "shared memory, aligned");

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int D>
using QueryRing = Ring<QUERY_STAGES<D>>;

template <int D, int PAIR>
__device__ inline void init_barriers(Shared<D> &s)
{
    const int warps = CONSUMERS / 32;
    init_tickets(s.tickets);
    barrier_init(&s.item_full, 1);
    barrier_init(&s.item_empty, warps + 2);
    barrier_init(&s.kv_full, 1);
    barrier_init(&s.kv_empty, warps);
    for (int i = 0; i < s.STAGES; i++) {
        barrier_init(&s.q_full[i], 1);
        barrier_init(&s.q_empty[i], PAIR * warps);
        barrier_init(&s.dy_full[i], 1);
    }
    for (int i = 0; i < 2; i++) {
        barrier_init(&s.ds_full[i], warps);
        barrier_init(&s.ds_empty[i], warps);
        barrier_init(&s.dq_full[0][i], warps / 2);
        barrier_init(&s.dq_full[1][i], warps / 2);
        barrier_init(&s.dq_empty[i], 1);
    }
    barrier_init_fence();
}

/* Loads the keys and values of the item. */
template <int D>
__device__ inline void load_keys(Shared<D> &s, const Backward &w, int K, const CUtensorMap *qkv)
{
    const int head = w.H + s.item.head / (w.H / K), n = s.item.start + s.item.block * KEYS;
    barrier_expect(&s.kv_full, 2 * Tile<D>::KEY_BYTES);
    load_tile<D>(s.k, qkv, head, n, KEYS, &s.kv_full);
    load_tile<D>(s.v, qkv, head + K, n, KEYS, &s.kv_full);
}

/* Called by one thread. Takes items and loads their data. The thread takes the next item when all
 * loads of the previous item have started. */
template <int D, int PAIR>
__device__ void load(Shared<D> &s, const Backward &w, int K, const CUtensorMap *qkv,
                     const CUtensorMap *dys, int rank)
{
    constexpr int QUERIES = Tile<D>::QUERIES;
    QueryRing<D> ring;
    for (int i = 0;; i++) {
        barrier_wait(&s.item_empty, (i & 1) ^ 1);
        s.item = item_of<PAIR>(w, next_ticket<PAIR>(s.tickets, w.ticket, i, rank), rank);
        barrier_arrive(&s.item_full);
        if (s.item.head < 0)
            return;
        const int first = first_of_pair<D, PAIR>(s.item),
                  end = end_of_pair<D, PAIR>(s.item, w.window), head = s.item.head;
        for (int tile = first; tile < end; tile++) {
            const QueryRing<D> to = ring.take();
            const int stage = to.stage, n = s.item.start + tile * QUERIES;
            barrier_wait(&s.q_empty[stage], to.parity ^ 1);
            barrier_expect(&s.q_full[stage], Tile<D>::BYTES + (int)sizeof s.rows[0]);
            load_bytes(s.rows[stage], w.rows + slot_of<D>(w, s.item, tile) * 2 * QUERIES,
                       sizeof s.rows[0], &s.q_full[stage]);
            load_tile<D, PAIR>(s.q[stage], qkv, head, n, QUERIES, &s.q_full[stage], rank);
            if (tile == first) {
                barrier_wait(&s.kv_empty, (i & 1) ^ 1);
                load_keys(s, w, K, qkv);
            }
            barrier_expect(&s.dy_full[stage], Tile<D>::BYTES);
            load_tile<D, PAIR>(s.dy[stage], dys, head, n, QUERIES, &s.dy_full[stage], rank);
        }
    }
}

/* For two threads, one for even and one for odd tiles: adds tiles to dq in the workspace when it is
 * the item's turn. Two additions overlap, because an addition and its signal take longer than the
 * computation of a tile. */
template <int D>
__device__ void add_dq(Shared<D> &s, const Backward &w, int parity)
{
    int count = 0;
    for (int i = 0;; i++) {
        barrier_wait(&s.item_full, i & 1);
        const Item item = s.item;
        barrier_arrive(&s.item_empty);
        if (item.head < 0)
            return;
        const int end = end_tile<D>(item, item.block, w.window);
        for (int tile = first_tile<D>(item.block); tile < end; tile++, count++) {
            if ((count & 1) != parity)
                continue;
            const int64_t slot = slot_of<D>(w, item, tile);
            const int before = tile / Tile<D>::PER_BLOCK - item.block;
            turn_wait(w.turn + slot, before);
            for (int part = 0; part < 2; part++) {
                float *to = w.dq + (2 * slot + part) * PART;
                barrier_wait(&s.dq_full[parity][part], count >> 1 & 1);
                fence_async();
                if (before == 0)
                    store_bytes(to, s.dq[part], sizeof s.dq[part]);
                else
                    add_floats(to, s.dq[part], sizeof s.dq[part]);
                copies_commit();
            }
            copies_wait_read<1>();
            barrier_arrive(&s.dq_empty[0]);
            copies_wait_read<0>();
            barrier_arrive(&s.dq_empty[1]);
            copies_wait();
            turn_set(w.turn + slot, before + 1);
        }
    }
}

/* ---- the gradients: computing ---------------------------------------------------------------- */

/* Descriptors of the operands of a warpgroup's products. If an operand has stages, its descriptor
 * points to stage 0. k and v of the warpgroup's keys are read by rows. q and dy are read by rows
 * and, for sums over queries, by columns. ds and k are read by columns for the warpgroup's half of
 * dq: with D = 128 this is all of ds and half of the columns of k, with D = 64 half of the queries
 * of ds and all of k. */
template <int D>
struct Operands {
    uint32_t k, v, q, dy, q_columns, dy_columns, ds, k_columns;

    __device__ Operands(Shared<D> &s, int group)
    {
        constexpr int PANEL = Tile<D>::QUERIES * ROW;
        k = operand(s.k + 64 * group * ROW, 16);
        v = operand(s.v + 64 * group * ROW, 16);
        q = operand(s.q[0], 16);
        dy = operand(s.dy[0], 16);
        q_columns = operand(s.q[0], PANEL);
        dy_columns = operand(s.dy[0], PANEL);
        ds = operand(s.ds[0] + (D == 128 ? 0 : group * KEYS * ROW), 16);
        k_columns = operand(s.k + (D == 128 ? group * KEYS * ROW : 0), 16);
    }
};

/* x (64 keys, QUERIES) = the keys' rows times the queries' rows, summed over D columns. `held` has
 * the first HELD columns of the keys in registers, to read less shared memory. */
template <int D, int HELD = 0, int C>
__device__ inline void start_scores(float (&x)[C], uint32_t keys, uint32_t queries,
                                    const uint32_t *held = NULL)
{
    products_fence();
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        const uint32_t rows = queries + step_by_rows(k, Tile<D>::QUERIES * ROW);
        if (k < HELD / 16)
            product(x, held + 4 * k, rows, k > 0);
        else
            product<0, 0>(x, keys + step_by_rows(k, KEYS * ROW), rows, k > 0);
    }
    products_commit();
}

/* Sets a score to minus infinity where the query does not see the key. first: position of the
 * thread's first query minus position of its first key. */
template <int C>
__device__ inline void mask(float (&score)[C], int first, int window)
{
#pragma unroll
    for (int i = 0; i < C; i++) {
        /* position of the query minus position of the key */
        const int ahead = first + i / 4 * 8 + i % 2 - i % 4 / 2 * 8;
        if ((unsigned)ahead >= (unsigned)window)
            score[i] = -INFINITY;
    }
}

/* `probabilities` replaces scores by p. score_gradients computes ds from p and dp, and rounds p and
 * ds to BF16, as operands of the sums. */
template <int C>
__device__ inline void probabilities(float (&score)[C], const float *lse, float scale_log2)
{
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < C / 4; j++) {
        const float2 l = *reinterpret_cast<const float2 *>(lse + 8 * j + 2 * quad);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float *s = score + 4 * j + 2 * r;
            s[0] = exp2_fast(fmaf(s[0], scale_log2, -l.x));
            s[1] = exp2_fast(fmaf(s[1], scale_log2, -l.y));
        }
    }
}

template <int C>
__device__ inline void score_gradients(uint32_t (&rounded)[C / 2], uint32_t (&ds)[C / 2],
                                       const float (&p)[C], const float (&dp)[C],
                                       const float *delta)
{
    const int quad = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < C / 4; j++) {
        const float2 d = *reinterpret_cast<const float2 *>(delta + 8 * j + 2 * quad);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int i = 4 * j + 2 * r;
            rounded[2 * j + r] = bf16_pair(p[i], p[i + 1]);
            ds[2 * j + r] = bf16_pair(p[i] * (dp[i] - d.x), p[i + 1] * (dp[i + 1] - d.y));
        }
    }
}

/* Stores ds of the warpgroup's keys in shared memory, one row of queries per key. */
template <int W>
__device__ inline void store_ds(char *to, const uint32_t (&ds)[W], int group)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const int key = 64 * group + 16 * warp + lane % 16;
#pragma unroll
    for (int k = 0; k < W / 4; k++) {
        const int chunk = 2 * k + lane / 16, panel = chunk / 8;
        store_matrices(to + (panel * KEYS + key) * ROW + ((chunk % 8) ^ (key % 8)) * 16,
                       ds + 4 * k);
    }
}

/* Stores the warpgroup's half of dq in shared memory, for add_dq. */
__device__ inline void store_dq(float *to, const float (&dq)[32])
{
    float4 *at = reinterpret_cast<float4 *>(to) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < 8; j++)
        at[j * 128] = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
}

/* Columns of v that a warpgroup keeps in registers: half of 128, or all if D is 64. More columns do
 * not fit. */
static constexpr int COLUMNS_HELD = 64;

/* Loads these columns of v for the warpgroup's 64 keys. */
template <int D>
__device__ inline void hold_v(uint32_t (&held)[COLUMNS_HELD / 4], const Shared<D> &s, int group)
{
    const int lane = threadIdx.x % 32, key = 64 * group + threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < COLUMNS_HELD / 16; k++)
        load_matrices(held + 4 * k, s.v + key * ROW + ((2 * k + lane / 16) ^ (key % 8)) * 16);
}

/* Computes p from the scores of a tile of queries. key: position of the thread's first key. */
template <int D, int C>
__device__ inline void weigh(float (&score)[C], const Shared<D> &s, const Backward &w,
                             const Item &item, int tile, int stage, int key)
{
    const int query = tile * Tile<D>::QUERIES, first = item.block * KEYS;
    if (query < first + KEYS - 1 || query + Tile<D>::QUERIES - 1 - first >= w.window)
        mask(score, query + threadIdx.x % 4 * 2 - key, w.window);
    probabilities(score, s.rows[stage][0], w.scale_log2);
    keep_in_place(score);
}

/* Computes p and ds as operands of this warpgroup's sums, and stores ds in shared memory for the dq
 * of both warpgroups. */
template <int D, int C>
__device__ inline void hand_over(uint32_t (&p)[C / 2], uint32_t (&ds)[C / 2],
                                 const float (&score)[C], const float (&dp)[C], Shared<D> &s,
                                 int stage, int group, int count)
{
    const int at = uniform(count & 1);
    score_gradients(p, ds, score, dp, s.rows[stage][1]);
    barrier_wait(&s.ds_empty[at], (count >> 1 & 1) ^ 1);
    store_ds(s.ds[at], ds, group);
    barrier_arrive_warp(&s.ds_full[at]);
}

template <int D>
__device__ inline void start_dq(float (&dq)[32], Shared<D> &s, const Operands<D> &of, int count)
{
    const int at = uniform(count & 1);
    const uint32_t ds = of.ds + at * operand_step(Tile<D>::DS_BYTES);
    barrier_wait(&s.ds_full[at], count >> 1 & 1);
    fence_async();
    products_fence();
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        product<1, 1>(dq, ds + step_by_columns(k), of.k_columns + step_by_columns(k), k > 0);
    products_commit();
}

template <int D>
__device__ inline void finish_dq(float (&dq)[32], Shared<D> &s, int group, int count)
{
    const int at = uniform(count & 1);
    keep_in_place(dq);
    barrier_arrive_warp(&s.ds_empty[at]);
    barrier_wait(&s.dq_empty[group], (count & 1) ^ 1);
    store_dq(s.dq[group], dq);
    barrier_arrive_warp(&s.dq_full[at][group]);
}

/* Computes dk and dv of an item's keys, over the item's tiles. `count`: number of tiles of earlier
 * items. NOTE: the order of products and waits keeps at most two of these in use at a time: scores,
 * dp, dq, and p with ds. More values do not fit into registers. */
template <int D, int PAIR>
__device__ inline void sum_tiles(float (&dk)[D / 2], float (&dv)[D / 2], Shared<D> &s,
                                 const Backward &w, const Item &item, int group, QueryRing<D> &ring,
                                 int count)
{
    constexpr int C = Tile<D>::QUERIES / 2;
    constexpr uint32_t STAGE = operand_step(Tile<D>::BYTES);
    const Operands<D> of(s, group);
    const int end = end_tile<D>(item, item.block, w.window);
    const int key =
        item.block * KEYS + 64 * group + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    int tile = first_tile<D>(item.block);
    float score[C], dp[C], dq[32];
    uint32_t p[C / 2], ds[C / 2], held[COLUMNS_HELD / 4];
    hold_v(held, s, group);

    QueryRing<D> at = ring.take();
    int stage = uniform(at.stage);
    barrier_wait(&s.q_full[stage], at.parity);
    take_turn(group);
    start_scores<D>(score, of.k, of.q + stage * STAGE);
    barrier_wait(&s.dy_full[stage], at.parity);
    start_scores<D, COLUMNS_HELD>(dp, of.v, of.dy + stage * STAGE, held);
    pass_turn(group);
    products_wait<1>();
    keep_in_place(score);
    weigh(score, s, w, item, tile, stage, key);
    products_wait<0>();
    keep_in_place(dp);
    hand_over(p, ds, score, dp, s, stage, group, count);
    while (++tile < end) {
        const int before = stage;
        at = ring.take();
        stage = uniform(at.stage);
        barrier_wait(&s.q_full[stage], at.parity);
        take_turn(group);
        start_sum(dv, p, of.dy_columns + before * STAGE);
        start_sum(dk, ds, of.q_columns + before * STAGE);
        start_dq(dq, s, of, count);
        products_wait<1>();
        keep_in_place(dv);
        keep_in_place(dk);
        barrier_arrive_everywhere<PAIR>(&s.q_empty[before]);
        start_scores<D>(score, of.k, of.q + stage * STAGE);
        pass_turn(group);
        products_wait<1>();
        finish_dq(dq, s, group, count++);
        barrier_wait(&s.dy_full[stage], at.parity);
        start_scores<D, COLUMNS_HELD>(dp, of.v, of.dy + stage * STAGE, held);
        products_wait<1>();
        keep_in_place(score);
        weigh(score, s, w, item, tile, stage, key);
        if (tile + 1 == end)
            products_wait<0>();
        else
            products_wait<0, 1>(); /* NOTE: CALL 1 keeps this wait after the powers */
        keep_in_place(dp);
        hand_over(p, ds, score, dp, s, stage, group, count);
    }
    take_turn(group);
    start_sum(dv, p, of.dy_columns + stage * STAGE);
    start_sum(dk, ds, of.q_columns + stage * STAGE);
    start_dq(dq, s, of, count);
    pass_turn(group);
    products_wait<0>();
    keep_in_place(dv);
    keep_in_place(dk);
    barrier_arrive_everywhere<PAIR>(&s.q_empty[stage]);
    finish_dq(dq, s, group, count);
}

/* Skips the tiles that only the other block of the pair needs. */
template <int D, int PAIR>
__device__ inline void skip_tiles(Shared<D> &s, QueryRing<D> &ring, int tiles)
{
    for (; tiles > 0; tiles--) {
        const QueryRing<D> at = ring.take();
        barrier_wait(&s.q_full[at.stage], at.parity);
        barrier_wait(&s.dy_full[at.stage], at.parity);
        __syncwarp();
        barrier_arrive_everywhere<PAIR>(&s.q_empty[at.stage]);
    }
}

/* The loop of one warpgroup over its items. */
template <int D, int PAIR>
__device__ void consume(Shared<D> &s, const Backward &w, int group)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int count = 0;
    QueryRing<D> ring;
    if (group == 1)
        pass_turn(group);
    for (int i = 0;; i++) {
        barrier_wait(&s.item_full, i & 1);
        const Item item = s.item;
        barrier_arrive_warp(&s.item_empty);
        if (item.head < 0)
            break;
        const int first = first_tile<D>(item.block), end = end_tile<D>(item, item.block, w.window);
        float dk[D / 2], dv[D / 2];
#pragma unroll
        for (int j = 0; j < D / 2; j++)
            dk[j] = dv[j] = 0;
        barrier_wait(&s.kv_full, i & 1);
        skip_tiles<D, PAIR>(s, ring, first - first_of_pair<D, PAIR>(item));
        sum_tiles<D, PAIR>(dk, dv, s, w, item, group, ring, count);
        skip_tiles<D, PAIR>(s, ring, end_of_pair<D, PAIR>(item, w.window) - end);
        count += end - first;
        barrier_arrive_warp(&s.kv_empty);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int key = item.block * KEYS + 64 * group + 16 * warp + lane / 4 + 8 * r;
            const int64_t at = (item.start + key) * w.kv_width + item.head * w.D;
            store_row(w.dk + at, dk, r == 1, w.scale, w.D, key < item.length);
            store_row(w.dv + at, dv, r == 1, 1, w.D, key < item.length);
        }
    }
    if (group == 0)
        take_turn(group); /* matches the last pass_turn of the other warpgroup */
}

#endif

/* Launched with one thread block per SM, in clusters of PAIR blocks. Each block takes items until
 * none are left. */
template <int D, int PAIR>
__global__ void __launch_bounds__(SM90_THREADS, 1)
    gradients_kernel(const Backward w, int K, const __grid_constant__ CUtensorMap qkv,
                     const __grid_constant__ CUtensorMap dy)
{
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ char memory[];
    Shared<D> &s = *reinterpret_cast<Shared<D> *>(memory + (-shared_address(memory) & 1023));
    const int group = uniform(threadIdx.x / 128) - 1, rank = blockIdx.x % PAIR;
    if (threadIdx.x == 0) {
        prefetch_map(&qkv);
        prefetch_map(&dy);
        init_barriers<D, PAIR>(s);
    }
    cluster_barrier<PAIR>();
    if (group < 0) {
        registers_shrink<24>();
        if (threadIdx.x == 0)
            load<D, PAIR>(s, w, K, &qkv, &dy, rank);
        if (threadIdx.x == 32 || threadIdx.x == 64)
            add_dq(s, w, threadIdx.x == 64);
    } else {
        registers_grow<240>();
        consume<D, PAIR>(s, w, group);
    }
    cluster_end<PAIR>();
#endif
}
