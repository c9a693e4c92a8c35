/* Tensor maps for the tensor memory accelerator (TMA). The driver's function makes them, without
 * linking the driver's library. */
#pragma once
#include <cuda.h>

#include "kernels/cuda/cuda.h"

/* Makes a tensor map of `dimensions` dimensions. The first dimension is dense. strides: the strides
 * of the other dimensions, in bytes. The box's first dimension is 128 bytes, in the shared-memory
 * layout of hopper.cuh, or 64 bytes. With 64 bytes, chunk c of row r is at position c ^ r / 2 % 4.
 * Elements outside the tensor are 0. Returns false if the driver refuses. */
bool tensor_map(CUtensorMap *map, CUtensorMapDataType type, int dimensions, void *data,
                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box);
