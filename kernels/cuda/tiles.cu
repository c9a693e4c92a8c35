/* Group scaling: the supported group sizes, and the running maxima, which are in a ring of two
 * halves. */
#include "kernels/cuda/tiles.cuh"

enum { HALF = 512 };

bool knows_group(int group, bool moment)
{
    return group == (moment ? 128 : 16);
}

/* NOTE: a half of the ring is cleared when its first maximum is taken. A caller may take two maxima
 * before it raises the first one: the last of one half and the first of the other half. So taking
 * the second maximum must not clear the half of the first: the caller raises the first maximum
 * afterwards, and then this maximum would not be 0 at its next use. */
float *amax_new(void)
{
    static int next;
    float *ring = (float *)device_scratch(2 * HALF * sizeof(float), SCRATCH_AMAX),
          *amax = ring + next;
    if (next % HALF == 0)
        CUDA_CHECK(cudaMemsetAsync(amax, 0, HALF * sizeof(float), device_stream()));
    next = (next + 1) % (2 * HALF);
    return amax;
}
