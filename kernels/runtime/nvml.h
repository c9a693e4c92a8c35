/* What NVIDIA's management library (NVML) says of one GPU. The library is part of the driver and is loaded while the program runs:
 * without it there are no values, and nothing fails. */
#pragma once
#include <stdbool.h>

#include "kernels/runtime/device.h"

/* The GPU at this PCI address ("0000:3B:00.0"), whatever number CUDA_VISIBLE_DEVICES gives it. False: there is no NVML, or it does
 * not know the GPU. */
bool nvml_open(const char *address);

/* Its state now; what this GPU or driver does not tell is NAN. Takes some milliseconds. After nvml_open was true; any thread. */
void nvml_read(DeviceHealth *h);
