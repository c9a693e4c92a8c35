/* What the tensor memory accelerator is told of a tensor, by the driver's function, without linking the driver's library. */
#pragma once
#include <cuda.h>

#include "kernels/cuda/cuda.h"

/* Of so many dimensions, the first dense; strides: of the others, in bytes. The box's first dimension is 128 bytes, which lie in
 * shared memory as hopper.cuh says, or 64: then chunk c of row r is at place c ^ r / 2 % 4. What is outside the tensor is 0. False:
 * the driver refuses. */
bool tensor_map(CUtensorMap *map, CUtensorMapDataType type, int dimensions, void *data, const cuuint64_t *sizes,
                const cuuint64_t *strides, const cuuint32_t *box);
