/* The products of adapters: dispatch, and plain kernels for cases without a fast one: F32, and rows
 * of odd widths. */
#include "kernels/cuda/lora.cuh"

enum { THREADS = 256 };

LoraParts lora_parts(LoraMatrix m, int rank, int C)
{
    LoraParts parts = { m.num_parts, rank, m.is_b ? (size_t)rank : 1, m.is_b ? 1 : (size_t)C, {} };
    size_t row = 0;
    for (int i = 0; i < m.num_parts; i++) {
        const int first = m.is_b ? m.part[i].first : 0, width = m.is_b ? m.part[i].width : C;
        parts.part[i] = { first, width, i * rank, 0, row * rank };
        row += width;
    }
    return parts;
}

/* ---- plain kernels --------------------------------------------------------------------------- */

/* Numbers in any format; FP8 without scale. */
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

/* One warp per number of xa. */
__global__ __launch_bounds__(THREADS) void narrow_kernel(AnyOut xa, Elements x,
                                                         const float *x_scale, Elements w,
                                                         LoraParts parts, size_t count, int C,
                                                         float scale)
{
    const size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    const int xa_cols = parts.count * parts.rank, lane = threadIdx.x % 32;
    if (i >= count)
        return;
    const size_t n = i / xa_cols;
    const int j = (int)(i % xa_cols);
    const LoraPart part = part_number(parts, j / parts.rank);
    float sum = 0;
    for (int c = lane; c < part.width; c += 32)
        sum += x[n * C + part.first + c] *
               w[part.at + c * parts.by_column + j % parts.rank * parts.by_rank];
    sum = warp_sum(sum);
    if (lane == 0)
        store(xa, i, sum * (x_scale ? scale * *x_scale : scale));
}

/* One thread per number of y, in part blockIdx.y. */
__global__ __launch_bounds__(THREADS) void widen_kernel(AnyOut y, Elements xa, Elements w,
                                                        Elements add, LoraParts parts, int N, int C)
{
    const LoraPart part = part_number(parts, blockIdx.y);
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x, n = i / part.width,
                 c = i % part.width;
    if (n >= N)
        return;
    float sum = 0;
    for (int j = 0; j < parts.rank; j++)
        sum += xa[n * parts.count * parts.rank + part.xa + j] *
               w[part.at + c * parts.by_column + j * parts.by_rank];
    const size_t at = n * C + part.first + c;
    store(y, at, add.data ? sum + add[at] : sum);
}

/* One thread per number of dm, in part blockIdx.y. before: the sum so far, or no data. */
__global__ __launch_bounds__(THREADS) void dw_kernel(AnyOut dw, Elements before, LoraParts parts,
                                                     Elements xa, Elements x, const float *x_scale,
                                                     int N, int C)
{
    const LoraPart part = part_number(parts, blockIdx.y);
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x, j = i / part.width,
                 c = i % part.width;
    if (j >= parts.rank)
        return;
    float sum = 0;
    for (size_t n = 0; n < N; n++)
        sum += xa[n * parts.count * parts.rank + part.xa + j] * x[n * C + part.first + c];
    const size_t at = part.at + c * parts.by_column + j * parts.by_rank;
    store(dw, at, (before.data ? before[at] : 0.0f) + sum * (x_scale ? *x_scale : 1.0f));
}

/* One thread for each of `rows` numbers per column of the widest part, times parts. */
static dim3 grid_of_parts(const LoraParts &parts, int rows)
{
    size_t most = 0;
    for (int i = 0; i < parts.count; i++)
        if ((size_t)parts.part[i].width > most)
            most = parts.part[i].width;
    return dim3((unsigned)ceil_div(most * rows, THREADS), parts.count);
}

/* ---- entry ----------------------------------------------------------------------------------- */

void backend_lora_narrow(Tensor xa, Tensor x, LoraMatrix m, float scale)
{
    const int N = x.rows, C = x.cols, r = check_lora_narrow(xa, x, m);
    const LoraParts parts = lora_parts(m, r, C);
    const size_t count = tensor_numel(xa);
    if (N == 0 || lora_narrow_fast(xa, x, m.w, parts, scale))
        return;
    narrow_kernel<<<(unsigned)ceil_div(32 * count, THREADS), THREADS, 0, device_stream()>>>(
        any_out(xa), elements(x), scale_of(x), elements(m.w), parts, count, C, scale);
    LAUNCH_CHECK();
}

/* The columns of y between the parts. */
static void fill_gaps(Tensor y, LoraParts parts, Tensor add)
{
    const size_t size = dtype_size(y.format.dtype), pitch = y.cols * size;
    if (add.data == y.data)
        return;
    for (int i = 0, at = 0; i <= parts.count; i++) {
        const int end = i < parts.count ? parts.part[i].first : y.cols;
        const size_t bytes = (end - at) * size;
        char *to = (char *)y.data + at * size;
        if (bytes > 0 && add.data)
            CUDA_CHECK(cudaMemcpy2DAsync(to, pitch, (const char *)add.data + at * size, pitch,
                                         bytes, y.rows, cudaMemcpyDeviceToDevice, device_stream()));
        else if (bytes > 0)
            CUDA_CHECK(cudaMemset2DAsync(to, pitch, 0, bytes, y.rows, device_stream()));
        at = i < parts.count ? end + parts.part[i].width : end;
    }
}

void backend_lora_widen(Tensor y, Tensor xa, LoraMatrix m, Tensor add)
{
    const int N = y.rows, C = y.cols, r = check_lora_widen(y, xa, m, add);
    CHECK(!add.data || format_equal(add.format, y.format),
          "lora_widen: add is %s, y %s; the CUDA back end needs one format",
          format_name(add.format), format_name(y.format));
    const LoraParts parts = lora_parts(m, r, C);
    if (N == 0)
        return;
    fill_gaps(y, parts, add);
    if (lora_widen_fast(y, xa, m.w, parts, add))
        return;
    widen_kernel<<<grid_of_parts(parts, N), THREADS, 0, device_stream()>>>(
        any_out(y), elements(xa), elements(m.w), elements(add), parts, N, C);
    LAUNCH_CHECK();
}

void backend_lora_dw(LoraMatrix dm, Tensor xa, Tensor x)
{
    if (!dm.w.data)
        return;
    const int N = x.rows, C = x.cols, r = check_lora_dw(dm, xa, x);
    const LoraParts parts = lora_parts(dm, r, C);
    if (N == 0 || lora_dw_fast(dm.w, parts, xa, x))
        return;
    const Elements before = elements(dm.w.empty ? Tensor{} : dm.w);
    dw_kernel<<<grid_of_parts(parts, r), THREADS, 0, device_stream()>>>(
        any_out(dm.w), before, parts, elements(xa), elements(x), scale_of(x), N, C);
    LAUNCH_CHECK();
}
