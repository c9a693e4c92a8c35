#include "kernels/cuda/lora.cuh"
bool lora_narrow_fast(Tensor, Tensor, Tensor, LoraParts, float) { return false; }
