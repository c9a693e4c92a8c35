/* Group scaling: the groups that there are, and the running maxima, a ring that is cleared when it has gone round. */
#include "kernels/cuda/tiles.cuh"

enum { SLOTS = 1024 };

bool knows_group(int group, bool moment)
{
    return group == (moment ? 128 : 16);
}

float *amax_slot(void)
{
    static int next;
    float *ring = (float *)device_scratch(SLOTS * sizeof(float), SCRATCH_AMAX);
    if (next == 0)
        CUDA_CHECK(cudaMemsetAsync(ring, 0, SLOTS * sizeof(float), device_stream()));
    float *slot = ring + next;
    next = (next + 1) % SLOTS;
    return slot;
}
