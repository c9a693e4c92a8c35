/* The products of adapters: choice of kernel, and plain kernels for cases that have no fast kernel:
 * F32, and rows of odd widths. */
#include "kernels/cuda/lora.cuh"

enum { THREADS = 256 };

LoraProjections lora_projections(LoraMatrix m, int rank, int C)
{
    LoraProjections projections = {
        m.num_projections, rank, m.is_b ? (size_t)rank : 1, m.is_b ? 1 : (size_t)C, {}
    };
    size_t row = 0;
    for (int i = 0; i < m.num_projections; i++) {
        const int first = m.is_b ? m.projection[i].first : 0,
                  width = m.is_b ? m.projection[i].width : C;
        projections.projection[i] = { first, width, i * rank, 0, row * rank };
        row += width;
    }
    return projections;
}

/* ---- plain kernels --------------------------------------------------------------------------- */

/* The numbers of a tensor in any format. FP8 codes are read without their scale. */
struct Elements {
    const void *data;
    DType dtype;
    __device__ float operator[](size_t i) const
    {
        switch (dtype) {
        case F32: return ((const float *)data)[i];
        case BF16: return to_float(((const bf16 *)data)[i]);
        case E4M3: return decode<E4M3>(((const uint8_t *)data)[i]);
        default: return decode<E5M2>(((const uint8_t *)data)[i]);
        }
    }
};

static Elements elements(Tensor t)
{
    return { t.data, t.format.dtype };
}

__device__ static inline void store(AnyOut out, size_t i, float x)
{
    if (out.is_f32)
        ((float *)out.data)[i] = x;
    else
        ((bf16 *)out.data)[i] = from_float<bf16>(x);
}

/* Each warp computes one number of xa. */
__global__ __launch_bounds__(THREADS) void narrow_kernel(AnyOut xa, Elements x,
                                                         const float *x_scale, Elements w,
                                                         LoraProjections projections,
                                                         LoraGroups groups, size_t count, int C,
                                                         float scale)
{
    const size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    const int xa_cols = projections.count * projections.rank, lane = threadIdx.x % 32;
    if (i >= count)
        return;
    const size_t n = i / xa_cols;
    const int j = (int)(i % xa_cols);
    const LoraProjection projection = projection_number(projections, j / projections.rank);
    const int group = group_of(groups, (int)n);
    float sum = 0;
    if (group < 0)
        return;
    for (int c = lane; c < projection.width; c += 32)
        sum += x[n * C + projection.first + c] *
               w[group * groups.matrix + projection.at + c * projections.by_column +
                 j % projections.rank * projections.by_rank];
    sum = warp_sum(sum);
    if (lane == 0)
        store(xa, i, sum * (x_scale ? scale * *x_scale : scale));
}

/* Each thread computes one number of y, in projection blockIdx.y. */
__global__ __launch_bounds__(THREADS) void widen_kernel(AnyOut y, Elements xa, Elements w,
                                                        Elements add, LoraProjections projections,
                                                        LoraGroups groups, int N, int C)
{
    const LoraProjection projection = projection_number(projections, blockIdx.y);
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x, n = i / projection.width,
                 c = i % projection.width;
    const int group = n < N ? group_of(groups, (int)n) : -1;
    float sum = 0;
    if (group < 0)
        return;
    for (int j = 0; j < projections.rank; j++)
        sum += xa[n * projections.count * projections.rank + projection.xa + j] *
               w[group * groups.matrix + projection.at + c * projections.by_column +
                 j * projections.by_rank];
    const size_t at = n * C + projection.first + c;
    store(y, at, add.data ? sum + add[at] : sum);
}

/* Each thread computes one number of dm, in projection blockIdx.y of matrix blockIdx.z. before: the sum so far; data
 * NULL: there is no sum yet. */
__global__ __launch_bounds__(THREADS) void dw_kernel(AnyOut dw, Elements before,
                                                     LoraProjections projections, LoraGroups groups,
                                                     Elements xa, Elements x, const float *x_scale,
                                                     int N, int C)
{
    const LoraProjection projection = projection_number(projections, blockIdx.y);
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x, j = i / projection.width,
                 c = i % projection.width;
    if (j >= projections.rank)
        return;
    float sum = 0;
    const size_t first = groups.first ? groups.first[blockIdx.z] : 0,
                 end = groups.first ? groups.first[blockIdx.z + 1] : N;
    for (size_t n = first; n < end; n++)
        sum += xa[n * projections.count * projections.rank + projection.xa + j] *
               x[n * C + projection.first + c];
    const size_t at = blockIdx.z * groups.matrix + projection.at + c * projections.by_column +
                      j * projections.by_rank;
    store(dw, at, (before.data ? before[at] : 0.0f) + sum * (x_scale ? *x_scale : 1.0f));
}

/* Returns a grid with one thread for each of `rows` numbers per column of the widest projection,
 * for each projection of each matrix. */
static dim3 grid_of_projections(const LoraProjections &projections, int rows, int matrices)
{
    size_t most = 0;
    for (int i = 0; i < projections.count; i++)
        if ((size_t)projections.projection[i].width > most)
            most = projections.projection[i].width;
    return dim3((unsigned)ceil_div(most * rows, THREADS), projections.count, matrices);
}

/* ---- entry ----------------------------------------------------------------------------------- */

/* Sets the columns of y that are in no projection. */
static void fill_gaps(Tensor y, LoraProjections projections, Tensor add)
{
    const size_t size = dtype_size(y.format.dtype), pitch = y.cols * size;
    if (add.data == y.data)
        return;
    for (int i = 0, at = 0; i <= projections.count; i++) {
        const int end = i < projections.count ? projections.projection[i].first : y.cols;
        const size_t bytes = (end - at) * size;
        char *to = (char *)y.data + at * size;
        if (bytes > 0 && add.data)
            CUDA_CHECK(cudaMemcpy2DAsync(to, pitch, (const char *)add.data + at * size, pitch,
                                         bytes, y.rows, cudaMemcpyDeviceToDevice, device_stream()));
        else if (bytes > 0)
            CUDA_CHECK(cudaMemset2DAsync(to, pitch, 0, bytes, y.rows, device_stream()));
        at = i < projections.count ? end + projections.projection[i].width : end;
    }
}

static LoraGroups one_matrix(Tensor w)
{
    return { NULL, 1, tensor_numel(w) };
}

static LoraGroups matrices_of(Tensor w, Routing r)
{
    return { r.first, r.experts, tensor_numel(w) / r.experts };
}

static void narrow(Tensor xa, Tensor x, LoraMatrix m, int rank, LoraGroups groups, float scale)
{
    const LoraProjections projections = lora_projections(m, rank, x.cols);
    const size_t count = tensor_numel(xa);
    if (x.rows == 0 || lora_narrow_fast(xa, x, m.w, projections, groups, scale))
        return;
    narrow_kernel<<<(unsigned)ceil_div(32 * count, THREADS), THREADS, 0, device_stream()>>>(
        any_out(xa), elements(x), scale_of(x), elements(m.w), projections, groups, count, x.cols,
        scale);
    LAUNCH_CHECK();
}

void backend_lora_narrow(Tensor xa, Tensor x, LoraMatrix m, float scale)
{
    narrow(xa, x, m, check_lora_narrow(xa, x, m), one_matrix(m.w), scale);
}

void backend_experts_lora_narrow(Tensor xa, Tensor x, LoraMatrix m, float scale, Routing r)
{
    narrow(xa, x, m, check_experts_lora_narrow(xa, x, m, r), matrices_of(m.w, r), scale);
}

static void widen(Tensor y, Tensor xa, LoraMatrix m, int rank, LoraGroups groups, Tensor add)
{
    const LoraProjections projections = lora_projections(m, rank, y.cols);
    if (y.rows == 0)
        return;
    fill_gaps(y, projections, add);
    if (lora_widen_fast(y, xa, m.w, projections, groups, add))
        return;
    widen_kernel<<<grid_of_projections(projections, y.rows, 1), THREADS, 0, device_stream()>>>(
        any_out(y), elements(xa), elements(m.w), elements(add), projections, groups, y.rows,
        y.cols);
    LAUNCH_CHECK();
}

void backend_lora_widen(Tensor y, Tensor xa, LoraMatrix m, Tensor add)
{
    const int rank = check_lora_widen(y, xa, m, add);
    CHECK(!add.data || format_equal(add.format, y.format),
          "lora_widen: add is %s, y %s; the CUDA back end needs one format",
          format_name(add.format), format_name(y.format));
    widen(y, xa, m, rank, one_matrix(m.w), add);
}

void backend_experts_lora_widen(Tensor y, Tensor xa, LoraMatrix m, Routing r)
{
    widen(y, xa, m, check_experts_lora_widen(y, xa, m, r), matrices_of(m.w, r), y);
}

static void add_dw(LoraMatrix dm, int rank, LoraGroups groups, Tensor xa, Tensor x)
{
    const LoraProjections projections = lora_projections(dm, rank, x.cols);
    const Elements before = elements(dm.w.empty ? Tensor{} : dm.w);
    if (x.rows == 0 || lora_dw_fast(dm.w, projections, groups, xa, x))
        return;
    dw_kernel<<<grid_of_projections(projections, rank, groups.count), THREADS, 0,
                device_stream()>>>(any_out(dm.w), before, projections, groups, elements(xa),
                                   elements(x), scale_of(x), x.rows, x.cols);
    LAUNCH_CHECK();
}

void backend_lora_dw(LoraMatrix dm, Tensor xa, Tensor x)
{
    if (dm.w.data)
        add_dw(dm, check_lora_dw(dm, xa, x), one_matrix(dm.w), xa, x);
}

void backend_experts_lora_dw(LoraMatrix dm, Tensor xa, Tensor x, Routing r)
{
    if (dm.w.data)
        add_dw(dm, check_experts_lora_dw(dm, xa, x, r), matrices_of(dm.w, r), xa, x);
}
