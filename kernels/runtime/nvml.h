/* State of a GPU from NVIDIA's management library (NVML). The library is part of the driver and is
 * loaded at run time. Without the library there are no values, and nothing fails. */
#pragma once
#include <stdbool.h>

#include "kernels/runtime/device.h"

/* Selects the GPU at this PCI address ("0000:3B:00.0"), whatever number CUDA_VISIBLE_DEVICES gives
 * it. Returns false if there is no NVML, or the GPU is unknown. */
bool nvml_open(const char *address);

/* Reads the GPU's state. Unknown values are NAN. Takes some milliseconds. Any thread may call it
 * after nvml_open returned true. */
void nvml_read(DeviceHealth *h);
