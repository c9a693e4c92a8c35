/* Tensor maps for the tensor memory accelerator, by the driver's function, without linking the
 * driver's library. */
#pragma once
#include <cuda.h>

#include "kernels/cuda/cuda.h"

/* A map of `dimensions` dimensions, the first dense; strides: of the others, in bytes. The box's
 * first dimension is 128 bytes, in the shared-memory layout of hopper.cuh, or 64: then chunk c of
 * row r is at position c ^ r / 2 % 4. Elements outside the tensor are 0. False: the driver
 * refused. */
bool tensor_map(CUtensorMap *map, CUtensorMapDataType type, int dimensions, void *data,
                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box);
