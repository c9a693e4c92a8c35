/* Tiles of grouped GEMMs, as Works of matmul_fused.cuh. A block finds the expert of a tile in its copy
 * of Routing.first. */
#pragma once
#include "kernels/cuda/experts_gemm.cuh"
#include "kernels/cuda/matmul_fused.cuh"

/* The FusedJob's N "tokens" are the R rows of assignments or, for dw, the O columns of dy. A sum of
 * dw has at most C = R terms. */
struct ExpertsJob : FusedJob {
    const int *first;
    int experts;
};

static inline ExpertsJob experts_job(FusedJob job, Routing r)
{
    return { job, r.first, r.experts };
}

struct FirstRows {
    typedef ExpertsJob Job;
    static constexpr bool DEEP = false;
    int first[MOST_EXPERTS + 1];

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __device__ void start(const Job &job)
    {
        for (int e = threadIdx.x; e <= job.experts; e += FUSED_THREADS)
            first[e] = job.first[e];
    }
#endif
};

/* Tiles of rows of assignments, with the matrix of their expert. */
struct MatrixOfEach : FirstRows {
    template <int ACROSS>
    static int most(const Job &job)
    {
        return fused_pairs(job.N) * (job.F / ACROSS);
    }

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __device__ int rows(const Job &job) const
    {
        return first[job.experts];
    }
    template <int ACROSS>
    __device__ int tiles(const Job &job) const
    {
        return fused_pairs(rows(job)) * (job.F / ACROSS);
    }
    template <int ACROSS>
    __device__ FusedTile tile(const Job &job, int i, int rank) const
    {
        FusedTile at = fused_tile<ACROSS>(job, rows(job), i, rank);
        const int row = at.token - rank * FUSED_TOKENS,
                  below = min(row + FUSED_TOKENS, rows(job) - 1);
        const int upper = expert_of(first, job.experts, row),
                  lower = expert_of(first, job.experts, below);
        at.matrix = rank == 0 ? upper : lower;
        at.paired = upper == lower;
        return at;
    }
#endif
};

/* Tiles of the gradients of all matrices: sums over the rows of an expert. If an expert has no
 * rows, the terms are those after the last column of the operands, where TMA loads zeros. */
struct SumOfEach : FirstRows {
    template <int ACROSS>
    __host__ __device__ static int most(const Job &job)
    {
        return job.experts * fused_pairs(job.N) * (job.F / ACROSS);
    }

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
    __device__ int rows(const Job &job) const
    {
        return job.N;
    }
    template <int ACROSS>
    __device__ int tiles(const Job &job) const
    {
        return most<ACROSS>(job);
    }
    template <int ACROSS>
    __device__ FusedTile tile(const Job &job, int i, int rank) const
    {
        const int down = fused_pairs(job.N), each = down * (job.F / ACROSS), e = i / each;
        const bool empty = first[e] == first[e + 1];
        i %= each;
        return { (i % down * FUSED_PAIR + rank) * FUSED_TOKENS,
                 i / down * ACROSS,
                 empty ? job.C : first[e],
                 empty ? job.C + FUSED_DEPTH : first[e + 1],
                 0,
                 e * job.N,
                 true };
    }
#endif
};
