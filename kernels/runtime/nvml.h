/* State of a GPU from NVIDIA's management library (NVML). The library is part of the driver and is
 * loaded at run time: without it there are no values, and nothing fails. */
#pragma once
#include <stdbool.h>

#include "kernels/runtime/device.h"

/* The GPU at this PCI address ("0000:3B:00.0"), whatever number CUDA_VISIBLE_DEVICES gives it.
 * False: no NVML, or an unknown GPU. */
bool nvml_open(const char *address);

/* Its state now; unknown values are NAN. Takes some milliseconds. For any thread, after nvml_open
 * returned true. */
void nvml_read(DeviceHealth *h);
