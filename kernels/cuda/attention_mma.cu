/* Launches attention by mma.sync: one kernel in forward, two in backward. The workspace of backward
 * has a float per token and query head. If documents are longer than a block of keys, it also has a
 * row of dq in F32 per token and query head. */
#include "kernels/cuda/attention_mma.cuh"

struct Tensors {
    Tensor y, qkv, dy, dqkv;
    float *lse;
}; /* forward uses y, qkv, lse */

static void describe(Work *w, Attention a, Documents docs, int size)
{
    w->N = a.B * a.T, w->T = a.T, w->H = a.H, w->K = a.K, w->D = a.D;
    w->window = a.window > 0 ? a.window : a.T;
    w->width = (a.H + 2 * a.K) * a.D;
    w->scale = a.scale;
    w->scale_log2 = a.scale * 1.44269504f;
    w->blocks = attention_blocks(a, docs, size);
}

/* Maximum shared memory of a block: 163 KiB on compute capability 8.0, 99 on 8.6, 8.9 and 12.0, 227
 * on 9.0 and 10.0. */
static int shared_limit(void)
{
    int device, bytes;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
}

/* A kernel that needs more than 48 KiB of shared memory must request it. */
template <typename Kernel>
static void allow_shared(Kernel *kernel, int bytes)
{
    CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename T, int D>
static void launch_forward(const Tensors &t, Attention a, Documents docs)
{
    typedef Forward<T, D> F;
    Work w;
    describe(&w, a, docs, F::QUERIES);
    allow_shared(forward_kernel<F, T>, F::BYTES);
    forward_kernel<F, T><<<w.blocks.count * a.H, F::THREADS, F::BYTES, device_stream()>>>(
        (T *)t.y.data, t.lse, (const T *)t.qkv.data, w);
    LAUNCH_CHECK();
}

/* ---- backward -------------------------------------------------------------------------------- */

template <class G>
static void launch_gradients(const Tensors &t, Attention a, Documents docs)
{
    typedef typename G::T T;
    Backward w;
    describe(&w, a, docs, G::KEYS);
    const size_t slots = (size_t)w.blocks.split * (G::KEYS / G::QUERIES) * (size_t)a.H;
    const size_t sums = slots * G::QUERIES * G::D,
                 deltas = ceil_div((size_t)w.N * (size_t)a.H, 4) * 4;
    w.dq = (float *)attention_scratch(a, (sums + deltas + slots + 1) * sizeof(float));
    w.delta = w.dq + sums;
    w.ticket = (int *)(w.delta + deltas);
    w.turn = w.ticket + 1;
    CUDA_CHECK(cudaMemsetAsync(w.ticket, 0, (slots + 1) * sizeof(int), device_stream()));
    delta_kernel<T><<<(unsigned)ceil_div((size_t)w.N * (size_t)a.H, 8), 256, 0, device_stream()>>>(
        w, (const T *)t.dy.data, (const T *)t.y.data);
    LAUNCH_CHECK();
    allow_shared(gradients_kernel<G, T>, G::BYTES);
    gradients_kernel<G, T><<<w.blocks.count * a.K, G::THREADS, G::BYTES, device_stream()>>>(
        (T *)t.dqkv.data, (const T *)t.dy.data, (const T *)t.qkv.data, t.lse, w);
    LAUNCH_CHECK();
}

/* Launches the first kernel that fits into shared memory. */
template <class First, class... Others>
struct Choice {
    static void launch(const Tensors &t, Attention a, Documents docs)
    {
        if constexpr (sizeof...(Others) > 0)
            if (First::BYTES > shared_limit())
                return Choice<Others...>::launch(t, a, docs);
        launch_gradients<First>(t, a, docs);
    }
};

/* The kernels for a head width, the fastest first. Template arguments: pairs of warps, M (16 M keys
 * for each pair), queries per tile, number of buffered tiles of queries. The comment behind each
 * kernel is its shared memory in KiB. */
template <typename T, int D>
struct Table;
template <>
struct Table<bf16, 64> : Choice<Gradients<bf16, 64, 4, 2, 64, 2>, /* 123 */
                                Gradients<bf16, 64, 4, 1, 64, 2>> {
}; /*  80 */
template <>
struct Table<bf16, 96> : Choice<Gradients<bf16, 96, 4, 2, 64, 2>, /* 155 */
                                Gradients<bf16, 96, 4, 1, 64, 1>> {
}; /*  77 */
template <>
struct Table<bf16, 128> : Choice<Gradients<bf16, 128, 4, 2, 64, 2>, /* 187 */
                                 Gradients<bf16, 128, 4, 2, 64, 1>, /* 153 */
                                 Gradients<bf16, 128, 4, 1, 64, 1>> {
}; /*  94 */
template <>
struct Table<bf16, 256> : Choice<Gradients<bf16, 256, 4, 1, 64, 2>, /* 224 */
                                 Gradients<bf16, 256, 4, 1, 64, 1>, /* 158 */
                                 Gradients<bf16, 256, 4, 1, 16, 1>> {
}; /*  90 */
template <>
struct Table<float, 64> : Choice<Gradients<float, 64, 4, 1, 32, 1>> {
}; /*  69 */
template <>
struct Table<float, 128> : Choice<Gradients<float, 128, 4, 1, 16, 1>> {
}; /*  92 */
template <>
struct Table<float, 256> : Choice<Gradients<float, 256, 1, 1, 16, 1>> {
}; /*  67 */

/* ---- both ------------------------------------------------------------------------------------ */

template <typename T, int D>
static void launch(const Tensors &t, Attention a, Documents docs)
{
    if (t.dqkv.data)
        Table<T, D>::launch(t, a, docs);
    else
        launch_forward<T, D>(t, a, docs);
}

static void launch_width(const Tensors &t, Attention a, Documents docs)
{
    if (t.qkv.format.dtype == F32)
        (a.D <= 64    ? launch<float, 64>
         : a.D <= 128 ? launch<float, 128>
                      : launch<float, 256>)(t, a, docs);
    else
        (a.D <= 64    ? launch<bf16, 64>
         : a.D <= 96  ? launch<bf16, 96>
         : a.D <= 128 ? launch<bf16, 128>
                      : launch<bf16, 256>)(t, a, docs);
}

void attention_mma_forward(Tensor y, float *lse, Tensor qkv, Attention a, Documents docs)
{
    launch_width({ y, qkv, {}, {}, lse }, a, docs);
}

void attention_mma_backward(Tensor dqkv, Tensor dy, Tensor qkv, Tensor y, const float *lse,
                            Attention a, Documents docs)
{
    launch_width({ y, qkv, dy, dqkv, (float *)lse }, a, docs);
}
