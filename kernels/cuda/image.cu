/* Finds which GPUs this program has code for. All .cu files are compiled for the same GPUs, so
 * testing one kernel is enough. */
#include <string.h>

#include "kernels/cuda/cuda.h"

__global__ static void empty_kernel()
{
}

bool image_found(void)
{
    struct cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, (const void *)empty_kernel);
    cudaGetLastError();
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
        status == cudaErrorUnsupportedPtxVersion)
        return false;
    cuda_check(status, "cudaFuncGetAttributes", __FILE__, __LINE__);
    return true;
}

const char *image_architectures(void)
{
    return ARCHITECTURES;
}

bool runs_on_hopper(void)
{
    int device, major, minor;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    return major == 9 && minor == 0 && strstr(image_architectures(), "90a");
}
