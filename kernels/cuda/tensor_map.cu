/* Tensor maps for TMA. */
#include "kernels/cuda/tensor_map.cuh"

typedef CUresult (*EncodeTiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

static EncodeTiled find_encode(void)
{
    static void *function;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSuccess;
    if (!function)
        CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                    cudaEnableDefault, &found));
    if (!function || found != cudaDriverEntryPointSuccess)
        die("this NVIDIA driver has no cuTensorMapEncodeTiled; install one for CUDA 12 or later");
    return (EncodeTiled)function;
}

bool tensor_map(CUtensorMap *map, CUtensorMapDataType type, int dimensions, void *data,
                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box)
{
    const cuuint32_t every[] = { 1, 1, 1, 1, 1 },
                     width = box[0] * (type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2);
    return find_encode()(map, type, (cuuint32_t)dimensions, data, sizes, strides, box, every,
                         CU_TENSOR_MAP_INTERLEAVE_NONE,
                         width == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
