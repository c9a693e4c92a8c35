/* AdamW with the 8-bit moments of bitsandbytes (kernels/dynamic8.h): decode, update and encode in
 * registers, in one pass.
 *
 * A warp processes a group of 256 elements, eight per thread. Warp reductions compute the maxima of
 * the new moments. Bytes per element with BF16 weights and gradients: 2 + 2 + 2, four for codes,
 * and 1/16 for scales, 10.06 in all. At the 3.95 TB/s of a copy on an H200, 1e9 elements take 2.55
 * ms. With F32 weights an element takes 14.06 bytes, and each access uses half of every sector.
 *
 * The moments are computed operation by operation as in the specification, so codes and scales
 * agree with the CPU bit for bit. Weights use the hardware's approximate root and reciprocal.
 *
 * NOTE: after the memory bandwidth, the instruction rate is the next limit. An element takes 60
 * instructions (decode 6, moments 9, weights 7, random rounding 10, maxima 2, encode 16, the rest
 * for loads, stores and addresses). That is 1.8 ms for 1e9 elements if an H200 at 1.98 GHz fills
 * every issue slot. So the encoder does not search: the upper half of a float selects one table
 * entry, which gives the code (dynamic8_steps). The third limit is shared memory, which serves one
 * access of 32 banks per clock and SM. Shared memory holds the maps once per lane, so that decoding
 * has no bank conflicts (2 accesses for 32 elements). The encoder's random accesses take about 3.4
 * clocks each. Shared memory takes 1.1 ms in all. The tables, 87 KiB, are filled once per thread
 * block, because blocks are persistent. A warp loads its next group before it computes the current
 * one. */
#include "kernels/cuda/adamw.cuh"
extern "C" {
#include "kernels/dynamic8.h"
}

enum {
    GROUP = DYNAMIC8_GROUP,
    LANES = 32,
    EACH = GROUP / LANES,
    THREADS = 384,
    WARPS = THREADS / LANES,
    BLOCKS = 2
};

struct Tables {
    float map[2][256]; /* of m, of v */
    uint32_t steps[2][DYNAMIC8_STEPS];
};

struct Shared {
    float map[2][256][LANES];
    uint32_t steps[2][DYNAMIC8_STEPS];
};

struct Moments {
    uint8_t *codes[2]; /* of m, of v */
    float *absmax[2];
    /* bits of the smallest number that has rank 1 in DYNAMIC8 */
    uint32_t least;
};

/* One thread's elements of a group. */
template <typename TW, typename TG>
struct Loaded {
    Pack<TW> w;
    Pack<TG> grad;
    uint2 codes[2];
    float absmax[2];
};

template <typename TW, typename TG>
__device__ static inline Loaded<TW, TG> load_group(const TW *w, const TG *grad, const Moments &t,
                                                   unsigned group)
{
    const unsigned at = group * GROUP + threadIdx.x % LANES * EACH;
    Loaded<TW, TG> x;
    x.w = load_pack<true>(w + at, EACH);
    x.grad = load_pack<true>(grad + at, EACH);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x.codes[i] = *(const uint2 *)(t.codes[i] + at);
        x.absmax[i] = t.absmax[i][group];
    }
    return x;
}

/* Addresses of the tables in shared memory. NOTE: the addresses have 32 bits, so that the dot
 * products below add them at no cost. */
struct TableAddresses {
    unsigned map; /* m's map for this lane; v's map is MAP_BYTES after it */
    /* the address that the entry of 0.0f would have in m's table; v's table is STEPS_BYTES after
     * it */
    unsigned steps;
};

enum { MAP_BYTES = sizeof(float) * 256 * LANES, STEPS_BYTES = sizeof(uint32_t) * DYNAMIC8_STEPS };

__device__ static inline TableAddresses table_addresses(const Shared &shared)
{
    return { (unsigned)__cvta_generic_to_shared(&shared.map[0][0][threadIdx.x % LANES]),
             (unsigned)__cvta_generic_to_shared(shared.steps[0]) -
                 (unsigned)sizeof(uint32_t) * DYNAMIC8_FIRST };
}

template <typename T>
__device__ static inline T shared_at(unsigned address)
{
    return *(const T *)__cvta_shared_to_generic(address);
}

/* The offset of a code's value in the map is 128 bytes times the code. A dot product of four codes
 * with one 128 and three zeros computes this offset. */
__device__ static inline void decode_codes(float (&x)[EACH], unsigned map, int offset, uint2 codes,
                                           float absmax)
{
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const unsigned value =
            __dp4a(i < 4 ? codes.x : codes.y, (unsigned)sizeof(float) * LANES << 8 * (i % 4), map);
        x[i] = __fmul_rn(shared_at<float>(value + offset), absmax);
    }
}

/* Returns max|x| over the warp, ignoring NaN. Floats >= 0 have the order of their bits. */
__device__ static inline float group_abs_max(const float (&x)[EACH])
{
    float a = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        a = fmaxf(a, fabsf(x[i]));
    return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(a)));
}

/* Returns the maximum over the warp of numbers >= 0, or NaN if any of them is NaN. The result is
 * the maximum of the bits of these numbers. */
__device__ static inline float group_max_or_nan(const float (&x)[EACH])
{
    uint32_t a = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        a = max(a, __float_as_uint(x[i]));
    return __uint_as_float(__reduce_max_sync(0xffffffffu, a));
}

/* Computes dynamic8_inverse. In this range `reciprocal` equals the compiler's correctly rounded
 * __frcp_rn, but lacks the slow path of __frcp_rn. */
__device__ static inline float group_inverse(float absmax)
{
    return absmax >= 0x1p-126f && absmax < 0x1p126f ? reciprocal(absmax) : 0.0f;
}

/* Fills each byte with the sign of one word. prmt.b32 does this if bit 3 of a selector is set;
 * __byte_perm cannot. */
__device__ static inline uint32_t sign_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    uint32_t low, high;
    asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(low) : "r"(a), "r"(b));
    asm("prmt.b32 %0, %1, %2, 0x00fb;" : "=r"(high) : "r"(c), "r"(d));
    return __byte_perm(low, high, 0x5410);
}

/* Returns the third byte of each word, in one word. */
__device__ static inline uint32_t rank_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    return __byte_perm(__byte_perm(a, b, 0x0062), __byte_perm(c, d, 0x0062), 0x5410);
}

/* Returns the bits of x plus the entry of dynamic8_steps for x. The dot product of the float's
 * halves with 0 and 4 is the offset of the entry. */
__device__ static inline uint32_t rank_of(float x, unsigned steps, int offset)
{
    const uint32_t bits = __float_as_uint(x);
    return bits + shared_at<uint32_t>(__dp2a_lo(bits, (unsigned)sizeof bits << 8, steps) + offset);
}

/* The product |x| * inverse is at most 1. If it is NaN, fmaxf replaces it. A product below the
 * smallest number of rank 1 is replaced: by this number if x is negative, else by the float before
 * it, which has rank 0. */
__device__ static inline uint32_t encode_signed(const float *x, float inverse, unsigned steps,
                                                uint32_t least)
{
    uint32_t scaled[4], rank[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float s = __fmul_rn(x[i], inverse);
        scaled[i] = __float_as_uint(s);
        rank[i] =
            rank_of(fmaxf(fabsf(s), __uint_as_float((scaled[i] >> 31) + least - 1)), steps, 0);
    }
    return dynamic8_codes(rank_bytes(rank[0], rank[1], rank[2], rank[3]),
                          sign_bytes(scaled[0], scaled[1], scaled[2], scaled[3]));
}

__device__ static inline uint32_t encode_unsigned(const float *x, float inverse, unsigned steps)
{
    uint32_t rank[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
        rank[i] = rank_of(fmaxf(__fmul_rn(x[i], inverse), __uint_as_float(DYNAMIC8_FIRST << 16)),
                          steps, STEPS_BYTES);
    return rank_bytes(rank[0], rank[1], rank[2], rank[3]);
}

__device__ static inline void update_moments(float &m, float &v, float grad, const Dynamic8Step &s)
{
    const float g = __fmul_rn(s.grad_scale, grad);
    v = __fadd_rn(__fmul_rn(s.beta2, v), __fmul_rn(__fmul_rn(s.rest2, g), g));
    m = __fadd_rn(__fmul_rn(s.beta1, m), __fmul_rn(s.rest1, g));
}

/* Updates two weights, which share one reciprocal: 1/a = b (1/ab), finite if sqrt(c2) eps > 2^-63.
 * With u = 2^-24, the root and the reciprocal add an error of 2 u each to the quotient, and a sum
 * and four products add u each, 9 u in all. w has a further error of 3 u of its own size. rate:
 * s.rate times s.keep. */
__device__ static inline void update_weights(float *w, const float *m, const float *v,
                                             const Dynamic8Step &s, float rate)
{
    const float a = sqrt_quick(v[0]) + s.eps, b = sqrt_quick(v[1]) + s.eps,
                r = inverse_quick(a * b);
    w[0] = __fmaf_rn(rate, m[0] * (b * r), s.keep * w[0]);
    w[1] = __fmaf_rn(rate, m[1] * (a * r), s.keep * w[1]);
}

/* Both functions handle gradients that are not finite. drop_moments sets the new moments of such
 * elements to 0 and recomputes the group's maxima. keep_weights restores the old weights. */
template <typename TG>
__device__ static inline void drop_moments(float (&m)[EACH], float (&v)[EACH], float (&top)[2],
                                           const Pack<TG> &grad)
{
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (!isfinite(grad[i]))
            m[i] = v[i] = 0;
    top[0] = group_abs_max(m);
    top[1] = group_abs_max(v);
}

template <typename TW, typename TG>
__device__ static inline void keep_weights(float (&w)[EACH], const Pack<TW> &old,
                                           const Pack<TG> &grad)
{
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (!isfinite(grad[i]))
            w[i] = old[i];
}

template <typename TW, typename TG>
__device__ static inline void step_group(TW *w, const Moments &t, const Loaded<TW, TG> &x,
                                         TableAddresses addresses, const Dynamic8Step &s,
                                         unsigned group, uint64_t sequence, uint64_t first,
                                         const Numbering &numbering)
{
    const unsigned lane = threadIdx.x % LANES, at = group * GROUP + lane * EACH;
    float wx[EACH], mx[EACH], vx[EACH];
    decode_codes(mx, addresses.map, 0, x.codes[0], x.absmax[0]);
    decode_codes(vx, addresses.map, MAP_BYTES, x.codes[1], x.absmax[1]);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        update_moments(mx[i], vx[i], x.grad[i], s);
    float top[2] = { group_abs_max(mx), group_max_or_nan(vx) };
    const bool rare = !isfinite(top[1]); /* v is not finite if the gradient is not finite */
    if (rare)
        drop_moments(mx, vx, top, x.grad);
#pragma unroll
    for (int i = 0; i < EACH; i += 2) {
        wx[i] = x.w[i], wx[i + 1] = x.w[i + 1];
        update_weights(wx + i, mx + i, vx + i, s, s.rate * s.keep);
    }
    if (rare)
        keep_weights(wx, x.w, x.grad);
    store_weights(w + at, wx, sequence, number_of(first, at, numbering));
    const float inverse[2] = { group_inverse(top[0]), group_inverse(top[1]) };
    *(uint2 *)(t.codes[0] + at) =
        make_uint2(encode_signed(mx, inverse[0], addresses.steps, t.least),
                   encode_signed(mx + 4, inverse[0], addresses.steps, t.least));
    *(uint2 *)(t.codes[1] + at) = make_uint2(encode_unsigned(vx, inverse[1], addresses.steps),
                                             encode_unsigned(vx + 4, inverse[1], addresses.steps));
    if (lane == 0) {
        t.absmax[0][group] = top[0];
        t.absmax[1][group] = top[1];
    }
}

__device__ static inline void fill(Shared &shared, const Tables *tables)
{
    for (unsigned i = threadIdx.x; i < 2 * 256 * LANES; i += THREADS)
        (&shared.map[0][0][0])[i] = (&tables->map[0][0])[i / LANES];
    for (unsigned i = threadIdx.x; i < 2 * DYNAMIC8_STEPS; i += THREADS)
        (&shared.steps[0][0])[i] = (&tables->steps[0][0])[i];
    __syncthreads();
}

/* n: number of elements, in whole groups */
template <typename TW, typename TG>
__global__ __launch_bounds__(THREADS,
                             BLOCKS) void adamw8bit_kernel(TW *w, Moments t, const TG *grad,
                                                           unsigned n, const Tables *tables,
                                                           Dynamic8Step s, uint64_t sequence,
                                                           uint64_t first, Numbering numbering)
{
    /* unrolling by two alternates registers without moves, if there are enough registers */
    constexpr int UNROLL = sizeof(TW) + sizeof(TG) == 4 ? 2 : 1;
    extern __shared__ uint4 memory[];
    Shared &shared = *(Shared *)memory;
    fill(shared, tables);
    const TableAddresses addresses = table_addresses(shared);
    const unsigned groups = n / GROUP, stride = gridDim.x * WARPS;
    unsigned group = blockIdx.x * WARPS + threadIdx.x / LANES;
    if (group >= groups)
        return;
    Loaded<TW, TG> next = load_group((const TW *)w, grad, t, group);
#pragma unroll UNROLL
    for (; group < groups; group += stride) {
        const Loaded<TW, TG> x = next;
        next = load_group((const TW *)w, grad, t, group + stride < groups ? group + stride : group);
        step_group(w, t, x, addresses, s, group, sequence, first, numbering);
    }
}

/* Returns the tables in device memory. All calls share them. */
static const Tables *device_tables(void)
{
    static Tables *tables;
    if (!tables) {
        Tables host;
        for (int i = 0; i < 2; i++) {
            const DType d = i ? UDYNAMIC8 : DYNAMIC8;
            for (int c = 0; c < 256; c++)
                host.map[i][c] = dynamic8_map(d)[c];
            dynamic8_steps(host.steps[i], d);
        }
        tables = (Tables *)device_alloc(sizeof host);
        backend_device_put(tables, &host, sizeof host);
        device_sync(); /* because later calls may use other queues */
    }
    return tables;
}

static void check_moment(const char *name, Tensor t, DType d, int n)
{
    check_tensor("adamw8bit", name, t, 1, n);
    if (t.format.dtype != d)
        die("adamw8bit: %s is %s; expected %s", name, format_name(t.format),
            format_name({ d, DYNAMIC8_GROUP, false }));
}

static uint32_t least_of_rank_1(void)
{
    const float middle = dynamic8_map(DYNAMIC8)[128] * 0.5f;
    uint32_t bits;
    memcpy(&bits, &middle, sizeof bits);
    return bits;
}

void backend_adamw8bit(Tensor w, Tensor m, Tensor v, Tensor grad, AdamW a, uint64_t first)
{
    CHECK_DENSE(w, 1, w.cols);
    CHECK_DENSE(grad, 1, w.cols);
    check_moment("m", m, DYNAMIC8, w.cols);
    check_moment("v", v, UDYNAMIC8, w.cols);
    check_numbers(OPERATION, first, a.numbering);
    CHECK(is_aligned(w, 8) && is_aligned(m, 8) && is_aligned(v, 8) && is_aligned(grad, 8),
          "adamw8bit: expected w, m, v and grad aligned to 16 bytes");
    if (w.cols == 0)
        return;
    const Moments t = { { (uint8_t *)m.data, (uint8_t *)v.data },
                        { (float *)m.scale, (float *)v.scale },
                        least_of_rank_1() };
    const unsigned most = BLOCKS * (unsigned)device_sm_count(),
                   needed = (unsigned)ceil_div(w.cols / GROUP, WARPS);
    with_type(w, [&](auto *wp) {
        with_type(grad, [&](auto *gp) {
            typedef std::remove_pointer_t<decltype(wp)> TW;
            typedef std::remove_pointer_t<decltype(gp)> TG;
            const auto kernel = adamw8bit_kernel<TW, TG>;
            CUDA_CHECK(cudaFuncSetAttribute((const void *)kernel,
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            (int)sizeof(Shared)));
            const auto blocks = needed < most ? needed : most;
            kernel<<<blocks, THREADS, sizeof(Shared), device_stream()>>>(
                wp, t, gp, (unsigned)w.cols, device_tables(), dynamic8_step(a),
                random_sequence(a.seed), first, a.numbering);
        });
    });
    LAUNCH_CHECK();
}
