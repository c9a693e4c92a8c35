/* The scale of an FP8 tensor, from its maximum. This function has a file of its own, so that a test
 * can wrap it. */
#include "kernels/cpu/cpu.h"

/* NOTE: the comparison uses amax / headroom, because headroom * range may overflow. */
float scale_within_range(Tensor t, float amax)
{
    const DType d = t.format.dtype;
    if (!t.scale_amax)
        return fp8_scale(amax, d);
    const float headroom = scale_is_reused(t) ? fp8_headroom(d) : 1;
    if (!scale_is_reused(t) || amax / headroom > *t.scale_amax)
        *t.scale_amax = amax;
    return headroom * fp8_scale(*t.scale_amax, d);
}
