/* Definitions that the kernels of adapters share: projections of the adapter matrix, tensor-core
 * products, and exact conversion of FP8 codes to BF16. */
#pragma once
#include "kernels/cuda/experts_gemm.cuh"
#include "kernels/cuda/readers.cuh"

/* ---- projections ----------------------------------------------------------------------------- */

/* A projection has columns first .. first + width - 1 of the wide tensor. The matrix element for
 * column c of the projection and column xa + j of xa, j < rank, has index `at` + c * by_column + j
 * * by_rank. block: number of blocks of columns in earlier projections. */
struct LoraProjection {
    int first, width, xa, block;
    size_t at;
};
struct LoraProjections {
    int count, rank;
    size_t by_column, by_rank;
    LoraProjection projection[LORA_PROJECTIONS];
};

LoraProjections lora_projections(LoraMatrix m, int rank, int C); /* lora.cu */

/* With experts, each has its own matrix of `matrix` elements, and `first` has the first row of each
 * (kernels/experts.h). first NULL: one matrix for all rows. */
struct LoraGroups {
    const int *first;
    int count; /* number of matrices */
    size_t matrix;
};

/* Returns the number of the matrix for a row; -1: no row in use has this number or a higher one. */
__device__ inline int group_of(const LoraGroups &g, int row)
{
    if (!g.first)
        return 0;
    return row < g.first[g.count] ? expert_of(g.first, g.count, row) : -1;
}

/* Divides each projection into blocks of `columns` columns, and numbers the blocks. No block spans
 * two projections. Returns the number of blocks. */
static inline int number_blocks(LoraProjections &projections, int columns)
{
    int blocks = 0;
    for (int i = 0; i < projections.count; i++) {
        projections.projection[i].block = blocks;
        blocks += (int)ceil_div(projections.projection[i].width, columns);
    }
    return blocks;
}

/* NOTE: a run-time index would copy all projections to local memory. */
__device__ inline LoraProjection projection_number(const LoraProjections &projections, int number)
{
    LoraProjection projection = projections.projection[0];
#pragma unroll
    for (int i = 1; i < LORA_PROJECTIONS; i++)
        if (i == number)
            projection = projections.projection[i];
    return projection;
}

__device__ inline LoraProjection projection_of_block(const LoraProjections &projections, int block)
{
    LoraProjection projection = projections.projection[0];
#pragma unroll
    for (int i = 1; i < LORA_PROJECTIONS; i++)
        if (i < projections.count && block >= projections.projection[i].block)
            projection = projections.projection[i];
    return projection;
}

/* Returns true if the columns of the wide tensor, and those of each projection, can be accessed
 * `each` elements at a time. */
static inline bool projections_aligned(const LoraProjections &projections, Tensor wide, int each)
{
    bool aligned = wide.cols % each == 0 && (uintptr_t)wide.data % 16 == 0;
    for (int i = 0; i < projections.count; i++)
        aligned = aligned && projections.projection[i].first % each == 0 &&
                  projections.projection[i].width % each == 0;
    return aligned;
}

/* The fast kernels. The caller has checked the arguments. Each function returns false, without
 * doing anything, if its kernel does not support the formats or shapes. */
/* lora_narrow.cu */
bool lora_narrow_fast(Tensor xa, Tensor x, Tensor w, LoraProjections projections, LoraGroups groups,
                      float scale);
/* lora_widen.cu */
bool lora_widen_fast(Tensor y, Tensor xa, Tensor w, LoraProjections projections, LoraGroups groups,
                     Tensor add);
/* lora_dw.cu */
bool lora_dw_fast(Tensor dw, LoraProjections projections, LoraGroups groups, Tensor xa, Tensor x);

/* swiglu_lora.cu: swiglu_forward with an adapter's product. The caller has checked the other
 * arguments. The functions return false, without doing anything, if there is no product, or if they
 * do not support the formats or shapes.
 *
 * swiglu_added is for an act in BF16. An FP8 act takes two calls. First, swiglu_save_added saves
 * gate_up, even if gate_up is `wide`, and raises probe.amax to max|act|. With `exact`, and if
 * gate_up is not `wide`, act is computed from the exact sums. If probe.scale_amax is set, the
 * function also encodes act within that range. Then swiglu_codes_added encodes act from the exact
 * sums, or encodes act again if it exceeded the range. Without `exact`, act can be encoded from
 * gate_up. */
struct AmaxProbe; /* tiles.cuh */
bool swiglu_added(Tensor act, Tensor gate_up, Tensor wide, LoraProduct product);
bool swiglu_save_added(AmaxProbe probe, Tensor act, Tensor gate_up, Tensor wide,
                       LoraProduct product, bool exact);
void swiglu_codes_added(Tensor act, AmaxProbe probe, Tensor wide, LoraProduct product);

/* swiglu_lora_backward.cu: swiglu_backward with an adapter's product. Returns false in the same
 * cases as the functions above. */
bool swiglu_backward_added(Tensor dgate_up, Tensor act, Tensor dact, LoraProduct product,
                           Tensor gate_up);

/* rope_lora.cu: rope_forward without norms, in one pass, with an adapter's product, or with exact
 * results and saved values in FP8 groups. Returns false, without doing anything, in other cases, or
 * if it does not support the formats or shapes. */
bool rope_forward_added(bool exact, Tensor y, Tensor saved, Tensor x, LoraProduct product,
                        Attention a);

/* Calls f(Known<format of x>). x is BF16, E4M3 or E5M2. */
template <typename F>
static inline void with_wide(Tensor x, F f)
{
    switch (x.format.dtype) {
    case E4M3: f(Known<E4M3>()); break;
    case E5M2: f(Known<E5M2>()); break;
    default: f(Known<BF16>());
    }
}

static inline const float *scale_of(Tensor x)
{
    return format_is_fp8(x.format) ? (const float *)x.scale : NULL;
}

/* ---- tensor cores ---------------------------------------------------------------------------- */

/* d += a b, where a is 16 x 16 and b is 16 x 8. Lane 4 g + t holds [PTX ISA]: of a, rows g and g +
 * 8 in columns 2t, 2t + 1, then both rows in columns 2t + 8, 2t + 9; of b, rows 2t, 2t + 1, then
 * 2t + 8, 2t + 9 in column g; of d, columns 2t, 2t + 1 in row g, then in row g + 8. The summed
 * dimension may have any order that is the same in a and b. */
__device__ inline void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <DType D>
constexpr int WIDE_BYTES = D == BF16 ? 2 : 1;

/* Decodes codes 2i and 2i + 1 of the word. */
template <DType D>
__device__ inline float2 decode_two(uint32_t word, int i)
{
    const __half2_raw h =
        __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(word >> 16 * i), FP8_KIND<D>);
    return __half22float2(__half2(h));
}
