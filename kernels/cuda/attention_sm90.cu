/* Launches attention on compute capability 9.0. Forward uses one kernel; if keys are read often,
 * another kernel computes their norms first. Backward uses three kernels, and a fourth if query
 * heads share keys. The workspace is linear in the number of tokens. Forward needs a float per
 * block and key head. Backward needs, per token and query head, a row of dq in F32, two floats and,
 * if heads share keys, rows of dk and dv in BF16. */
#include <math.h>

#include "kernels/cuda/attention_sm90.cuh"
#include "kernels/cuda/attention_sm90_forward.cuh"
#include "kernels/cuda/tensor_map.cuh"

/* ---- tensor maps and arguments of the kernels ------------------------------------------------ */

/* Makes a tensor map of rows (N, heads * D) as (D, heads, N), with boxes of 64 columns of a head by
 * `tokens` tokens. load_tile expects 64 tokens. */
static CUtensorMap map_of(Tensor t, int D, int tokens)
{
    const cuuint64_t dims[] = { (cuuint64_t)D, (cuuint64_t)(t.cols / D), (cuuint64_t)t.rows };
    const cuuint64_t strides[] = { (cuuint64_t)D * sizeof(bf16),
                                   (cuuint64_t)t.cols * sizeof(bf16) };
    const cuuint32_t box[] = { 64, 1, (cuuint32_t)tokens };
    CUtensorMap map;
    if (!tensor_map(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, t.data, dims, strides, box))
        die("attention: cuTensorMapEncodeTiled refuses (%d, %d) with heads of width %d at %p",
            t.rows, t.cols, D, t.data);
    return map;
}

static void describe(Work *w, Attention a, Documents docs)
{
    w->T = a.T, w->H = a.H, w->D = a.D;
    w->window = a.window > 0 && a.window < a.T ? a.window : a.T;
    w->scale = a.scale;
    w->scale_log2 = a.scale * (float)M_LOG2E;
    const Blocks blocks = attention_blocks(a, docs, KEYS);
    w->blocks = blocks.count, w->table = blocks.table;
}

/* Takes `bytes` bytes of scratch memory. The remaining memory stays 256-byte aligned. */
static char *take(char **memory, size_t bytes)
{
    char *p = *memory;
    *memory += (bytes + 255) / 256 * 256;
    return p;
}

/* ---- forward --------------------------------------------------------------------------------- */

template <int D, int HEADS>
static void launch_forward(Forward w, Tensor y, Tensor qkv)
{
    const int items = w.blocks * (w.H / HEADS), most = device_sm_count() / HEADS;
    const CUtensorMap qkv_map = map_of(qkv, w.D, 64), y_map = map_of(y, w.D, 16);
    CUDA_CHECK(cudaMemsetAsync(w.ticket, 0, sizeof(int), device_stream()));
    launch_clusters(forward_kernel<D, HEADS>, items < most ? items : most, HEADS, SM90_THREADS,
                    sizeof(ForwardShared<D>) + 1024, w, qkv_map, y_map);
    LAUNCH_CHECK();
}

/* Returns true if reading all keys once more, to compute their norms, makes forward faster. On an
 * H200 at its power limit, with four query heads per key head, the norms gain 6 % at 32768 tokens
 * and 5 % at 8192. At 4096 tokens, with one query head per key head, they gain nothing. */
static bool norms_pay(const Forward &w, Documents docs)
{
    const int longest = docs.count ? docs.longest : w.T,
              seen = w.window < longest ? w.window : longest;
    return (int64_t)seen * (w.H / w.K) >= 8192;
}

void attention_sm90_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs)
{
    Forward w = {};
    describe(&w, a, docs);
    w.K = a.K, w.y = (bf16 *)y.data, w.lse = lse;
    char *memory =
        (char *)attention_scratch(a, 256 + sizeof(float) * (size_t)a.K * (size_t)w.blocks);
    w.ticket = (int *)take(&memory, sizeof(int));
    if (norms_pay(w, docs)) {
        w.k_norm = (float *)memory;
        key_norm_kernel<<<dim3(w.blocks, a.K), SIDE_THREADS, 0, device_stream()>>>(
            (float *)memory, w, (const bf16 *)qkv.data + a.H * a.D, qkv.cols);
        LAUNCH_CHECK();
    }
    if (a.H / a.K % 2 == 0)
        (a.D == 64 ? launch_forward<64, 2> : launch_forward<128, 2>)(w, y, qkv);
    else
        (a.D == 64 ? launch_forward<64, 1> : launch_forward<128, 1>)(w, y, qkv);
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Places the workspace. If query heads share keys, dk and dv of every query head go to `heads`;
 * else they go directly to dqkv. */
template <int D>
static bf16 *place(Backward *w, Tensor dqkv, Attention a)
{
    const size_t slots = (size_t)w->blocks * Tile<D>::PER_BLOCK * (size_t)a.H,
                 rows = slots * 2 * Tile<D>::QUERIES * sizeof(float);
    const size_t dq = slots * 2 * PART * sizeof(float), turn = slots * sizeof(int),
                 numel = (size_t)dqkv.rows * a.H * a.D;
    const size_t heads = a.K < a.H ? 2 * numel * sizeof(bf16) : 0;
    char *memory = (char *)attention_scratch(a, rows + dq + turn + heads + 5 * 256);
    w->rows = (float *)take(&memory, rows);
    w->dq = (float *)take(&memory, dq);
    w->turn = (int *)take(&memory, turn);
    w->ticket = (int *)take(&memory, sizeof(int));
    bf16 *own = (bf16 *)take(&memory, heads);
    w->dk = heads ? own : (bf16 *)dqkv.data + a.H * a.D;
    w->dv = w->dk + (heads ? numel : (size_t)a.K * a.D);
    w->kv_width = heads ? a.H * a.D : dqkv.cols;
    return own;
}

/* Returns true if pairs of neighbouring blocks of keys, which share what they read, make backward
 * faster. The later block of a pair does not need the pair's first tiles. In short sequences these
 * are a large part of all tiles: on an H200 at its power limit pairs gain nothing at 2048 and 4096
 * tokens, 1 % at 8192, 3 % at 32768. In a window, an item has as many tiles as the mean item of a
 * sequence twice as long. */
static bool pairs_pay(const Backward &w)
{
    return !w.table && w.T >= 8192 && w.window >= 4096 && (w.T + KEYS - 1) / KEYS % 2 == 0;
}

/* With PAIR 2, sequences have an even number of blocks. */
template <int D, int PAIR>
static void launch_gradients(const Backward &w, int K, Tensor qkv, Tensor dy)
{
    const int items = w.blocks * w.H / PAIR, most = device_sm_count() / PAIR;
    launch_clusters(gradients_kernel<D, PAIR>, items < most ? items : most, PAIR, SM90_THREADS,
                    sizeof(Shared<D>) + 1024, w, K, map_of(qkv, w.D, 64), map_of(dy, w.D, 64));
    LAUNCH_CHECK();
}

template <int D>
static void launch(Backward w, Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse,
                   Attention a)
{
    const bf16 *heads = place<D>(&w, dqkv, a);
    prepare_kernel<D><<<dim3(w.blocks, a.H), SIDE_THREADS, 0, device_stream()>>>(
        w, (const bf16 *)dy.data, (const bf16 *)y.data, lse);
    LAUNCH_CHECK();
    (pairs_pay(w) ? launch_gradients<D, 2> : launch_gradients<D, 1>)(w, a.K, qkv, dy);
    finish_dq_kernel<D>
        <<<dim3(w.blocks * Tile<D>::PER_BLOCK, a.H), SIDE_THREADS, 0, device_stream()>>>(
            (bf16 *)dqkv.data, dqkv.cols, w);
    LAUNCH_CHECK();
    if (a.K == a.H)
        return;
    const unsigned packs = 2u * (unsigned)(a.K * a.D) / 8;
    sum_heads_kernel<<<dim3(w.blocks * KEYS, ceil_div(packs, SIDE_THREADS)), SIDE_THREADS, 0,
                       device_stream()>>>((bf16 *)dqkv.data + a.H * a.D, dqkv.cols, heads,
                                          dqkv.rows, a.K, a.H / a.K, w);
    LAUNCH_CHECK();
}

void attention_sm90_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse,
                             Attention a, Documents docs)
{
    Backward w = {};
    describe(&w, a, docs);
    if (a.D == 64)
        launch<64>(w, dqkv, dy, qkv, y, lse, a);
    else
        launch<128>(w, dqkv, dy, qkv, y, lse, a);
}
