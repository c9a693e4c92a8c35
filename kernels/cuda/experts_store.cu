/* Grouped GEMMs of FP8 operands with short accumulators and a result in BF16, by matmul_fused.cuh.
 * The results of a tile are stored while products of the next tile run. A gradient that is not empty
 * is added to the sum after the sum was rounded to BF16.
 *
 * Row 16t + 2j + c of each 64 rows of b is loaded to position 8j + 2t + c, so a thread has 16
 * neighbouring columns. Two threads exchange halves, so that they store 32 bytes together. */
#include "kernels/cuda/experts_fused.cuh"

namespace
{

template <class W>
struct StoreJob : W::Job {
    bf16 *out;
    bool adds;
};

template <DType A>
struct StoreShape {
    enum { ACROSS = FUSED_WEIGHTS, PARTS = 8 };
    static constexpr DType TOKENS = A;
};

template <class W, DType A>
struct Store : StoreShape<A> {
    typedef W Work;
    typedef StoreJob<W> Job;
    struct Staging {
    };

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)

    const Job &job;
    const int rows;
    /* the thread's first row and column; no sums are held if row is after the last row */
    int row, column, result_row;

    static __device__ int weights(const Job &job, const FusedTile &at, int part)
    {
        return (at.matrix * job.F + at.column + part * FUSED_WEIGHTS / FUSED_PAIR) / 64;
    }
    static __device__ bool done(const Job &)
    {
        return false;
    }
    static __device__ void init(Staging &)
    {
    }
    static __device__ void carry(Staging &, const Job &, const FusedMaps &, FusedTile, int, int)
    {
    }

    __device__ Store(const Job &job, Staging &, int, int rows)
        : job(job), rows(rows), row(rows), column(0), result_row(0)
    {
    }

    __device__ void expect(FusedTile at)
    {
        const int lane = threadIdx.x % 32;
        row = at.token + threadIdx.x / 32 % 4 * 16 + lane / 4;
        column = at.column + 16 * (lane % 4);
        result_row = at.row + row;
    }

    __device__ void store(bf16 *to, uint4 words) const
    {
        if (job.adds) {
            const Pack<bf16> old = load_pack(to, 8),
                             own = { { words.x, words.y, words.z, words.w } };
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                v[i] = old[i] + own[i];
            store_pack(to, v, 8);
        } else
            *(uint4 *)to = words;
    }

    /* Stores 16 columns of a row. */
    __device__ void finish(const Held &held, int part)
    {
        const int block = part / 2, below = part % 2;
        const bool odd = threadIdx.x % 2;
        uint32_t first[4], second[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t low = held.pair[16 * block + 2 * k + below],
                           high = held.pair[16 * block + 8 + 2 * k + below];
            const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
            first[k] = odd ? other : low;
            second[k] = odd ? high : other;
        }
        if (row + 8 * below >= rows)
            return;
        bf16 *to = job.out + (size_t)(result_row + 8 * below) * job.F + column + 64 * block;
        store(to - (odd ? 8 : 0), make_uint4(first[0], first[1], first[2], first[3]));
        store(to + (odd ? 8 : 16), make_uint4(second[0], second[1], second[2], second[3]));
    }

    __device__ void end()
    {
    }

#endif
};

template <class Work, DType A>
bool launch(const GroupedGemm &g, const FusedMaps &maps, int rows, int terms)
{
    const FusedJob job = { rows, g.out.cols, terms, (const float *)g.a.scale,
                           (const float *)g.b.scale };
    launch_fused<Store<Work, A>>(
        { experts_job(job, g.r), (bf16 *)g.out.data, g.kind == GROUPED_DW && !g.out.empty }, maps);
    return true;
}

template <DType A>
bool run(const GroupedGemm &g)
{
    const RowOrder rows = { 16, { 16, 1, 1 }, { 1, 16, 16 } },
                   columns = { 64, { 2, 4, 8 }, { 1, 16, 2 } };
    const bool dw = g.kind == GROUPED_DW, b_transposed = g.kind != GROUPED_MATMUL;
    void *a = dw ? g.a.data_t : g.a.data, *b = b_transposed ? g.b.data_t : g.b.data;
    const int a_rows = dw ? g.a.cols : g.a.rows, terms = dw ? g.a.rows : g.a.cols,
              b_rows = dw ? g.b.cols : g.r.experts * g.out.cols;
    FusedMaps maps = {};
    if (!is_fusable(a, g.a, StoreShape<A>::TOKENS) || !is_fusable(b, g.b, E4M3) || a_rows % 16 ||
        terms % 16 || !fused_map(&maps.x, a, a_rows, terms, rows, FUSED_TOKENS, FUSED_DEPTH) ||
        !fused_map(&maps.w, b, b_rows, terms, columns, FUSED_WEIGHTS / FUSED_PAIR, FUSED_DEPTH))
        return false;
    return dw ? launch<SumOfEach, A>(g, maps, a_rows, terms)
              : launch<MatrixOfEach, A>(g, maps, a_rows, terms);
}

} // namespace

bool grouped_gemm_fused(const GroupedGemm &g)
{
    if (!runs_on_hopper() || !g.a.fast || g.r.experts > MOST_EXPERTS ||
        g.out.format.dtype != BF16 || g.out.cols % FUSED_WEIGHTS || (uintptr_t)g.out.data % 16)
        return false;
    return g.a.format.dtype == E4M3   ? run<E4M3>(g)
           : g.a.format.dtype == E5M2 ? run<E5M2>(g)
                                      : false;
}
