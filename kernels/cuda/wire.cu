/* Gradients as ranks send them to each other. A warp encodes a record: each thread has eight
 * neighbours, sixteen threads a group. Bytes per value: 2 or 4 read and 1.03 written; in BF16, 2
 * written. wire_sum reads 1.03 (BF16: 2) for each other rank, and reads and writes one value. */
#include "kernels/cuda/fp8.cuh"

enum { THREADS = 256, RECORDS = THREADS / 32, PER_THREAD = WIRE_VALUES / 32 };

static_assert(PER_THREAD == 8 && WIRE_GROUP == 16 * PER_THREAD, "half a warp has a group");

__device__ inline size_t record_bytes(Wire w)
{
    return w == WIRE_BF16 ? WIRE_VALUES * sizeof(bf16)
                          : WIRE_VALUES + WIRE_VALUES / WIRE_GROUP * sizeof(float);
}

/* The bits of a magnitude have the order of integers, with infinity and NaN above all numbers. */
__device__ inline float group_max(const float (&x)[8])
{
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        most = max(most, __float_as_uint(fabsf(x[i])));
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    return __uint_as_float(most);
}

template <Wire W>
__device__ inline float scale_of(float amax, WireScale s)
{
    const float scale = W == WIRE_FP8    ? fp8_scale(amax, E4M3)
                        : W == WIRE_INT8 ? __fdiv_rn(fmaxf(amax, 0x1p-90f), 127.0f)
                                         : __fmul_rn(*s.scale, s.factor);
    return amax <= FLT_MAX ? scale : __uint_as_float(0x7fc00000u);
}

__device__ inline uint2 encode_int8(const float (&x)[8], float inverse)
{
    uint32_t word[2] = { 0, 0 };
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float v = fminf(fmaxf(__fmul_rn(x[i], inverse), -127.0f), 127.0f);
        word[i / 4] |= ((uint32_t)__float2int_rn(v) & 0xffu) << 8 * (i % 4);
    }
    return make_uint2(word[0], word[1]);
}

__device__ inline void decode_int8(float (&x)[8], uint2 codes, float scale)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = __fmul_rn((float)(int8_t)((i < 4 ? codes.x : codes.y) >> 8 * (i % 4)), scale);
}

/* Adds the warp's number of values that exceed the codes. */
__device__ inline void count_cut(uint64_t *cut, const float (&x)[8], float inverse)
{
    int n = 0;
#pragma unroll
    for (int i = 0; i < 8; i++)
        n += fabsf(__fmul_rn(x[i], inverse)) >= WIRE_CUT;
    n = __reduce_add_sync(0xffffffffu, n);
    if (threadIdx.x % 32 == 0 && n > 0)
        atomicAdd((unsigned long long *)cut, (unsigned long long)n);
}

template <typename T, Wire W>
__global__ __launch_bounds__(THREADS) void encode_kernel(uint8_t *__restrict__ message,
                                                         const T *__restrict__ in, size_t records,
                                                         WireScale s)
{
    const size_t r = (size_t)blockIdx.x * RECORDS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, at = PER_THREAD * lane;
    if (r >= records)
        return;
    const Pack<T> pack = load_pack(in + r * WIRE_VALUES + at, 8);
    uint8_t *record = message + r * record_bytes(W);
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = pack[i];
    if (W == WIRE_BF16) {
        store_pack((bf16 *)record + at, x, 8);
        return;
    }
    const float scale = scale_of<W>(group_max(x), s), inverse = __frcp_rn(scale);
    const uint2 codes = isnan(scale)     ? make_uint2(0, 0)
                        : W == WIRE_INT8 ? encode_int8(x, inverse)
                                         : encode_pack<E4M3>(x, inverse);
    *reinterpret_cast<uint2 *>(record + at) = codes;
    if (lane % 16 == 0)
        *reinterpret_cast<float *>(record + WIRE_VALUES + lane / 16 * sizeof(float)) = scale;
    if (W == WIRE_FP8_LM)
        count_cut(s.cut, x, inverse);
}

/* Loads a thread's values of a record. Products are rounded before they are added, as on the
 * CPU. */
template <Wire W>
__device__ inline void decode_record(float (&x)[8], const uint8_t *record, int lane)
{
    const int at = PER_THREAD * lane;
    if (W == WIRE_BF16) {
        const Pack<bf16> pack = load_pack((const bf16 *)record + at, 8);
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = pack[i];
        return;
    }
    const uint2 codes = *reinterpret_cast<const uint2 *>(record + at);
    const float scale =
        *reinterpret_cast<const float *>(record + WIRE_VALUES + lane / 16 * sizeof(float));
    if (W == WIRE_INT8) {
        decode_int8(x, codes, scale);
        return;
    }
    decode_pack<E4M3>(x, codes, 1.0f);
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = __fmul_rn(x[i], scale);
}

template <typename T, Wire W>
__global__ __launch_bounds__(THREADS) void sum_kernel(T *y, const T *own_values,
                                                      const uint8_t *__restrict__ messages,
                                                      size_t records, size_t apart, int ranks,
                                                      int own)
{
    const size_t r = (size_t)blockIdx.x * RECORDS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const size_t at = r * WIRE_VALUES + PER_THREAD * lane;
    if (r >= records)
        return;
    const Pack<T> pack = load_pack(own_values + at, 8);
    float sum[8] = {};
#pragma unroll 4
    for (int k = 0; k < ranks; k++) {
        float x[8];
        const size_t number = (size_t)(k - (k > own)) * apart + r;
        if (k != own)
            decode_record<W>(x, messages + number * record_bytes(W), lane);
#pragma unroll
        for (int i = 0; i < 8; i++)
            sum[i] = __fadd_rn(sum[i], k == own ? pack[i] : x[i]);
    }
    store_pack(y + at, sum, 8);
}

/* Calls f(std::integral_constant<Wire, w>). */
template <typename F>
static void with_wire(Wire w, F f)
{
    switch (w) {
    case WIRE_BF16: f(std::integral_constant<Wire, WIRE_BF16>()); break;
    case WIRE_FP8: f(std::integral_constant<Wire, WIRE_FP8>()); break;
    case WIRE_INT8: f(std::integral_constant<Wire, WIRE_INT8>()); break;
    default: f(std::integral_constant<Wire, WIRE_FP8_LM>()); break;
    }
}

void backend_wire_encode(Tensor message, Tensor x, Wire w, WireScale s)
{
    check_wire_encode(message, x, w, s);
    const size_t records = (size_t)x.rows;
    with_wire(w, [&](auto wire) {
        with_type(x, [&](auto *in) {
            encode_kernel<std::remove_pointer_t<decltype(in)>, decltype(wire)::value>
                <<<(unsigned)ceil_div(records, RECORDS), THREADS, 0, device_stream()>>>(
                    (uint8_t *)message.data, in, records, s);
        });
    });
    LAUNCH_CHECK();
}

void backend_wire_sum(Tensor y, Tensor x, Tensor messages, int ranks, int own, Wire w)
{
    check_wire_sum(y, x, messages, ranks, own, w);
    const size_t records = (size_t)x.rows, apart = (size_t)(messages.rows / (ranks - 1));
    with_wire(w, [&](auto wire) {
        with_type(x, [&](auto *in) {
            using T = std::remove_pointer_t<decltype(in)>;
            sum_kernel<T, decltype(wire)::value>
                <<<(unsigned)ceil_div(records, RECORDS), THREADS, 0, device_stream()>>>(
                    (T *)y.data, in, (const uint8_t *)messages.data, records, apart, ranks, own);
        });
    });
    LAUNCH_CHECK();
}
