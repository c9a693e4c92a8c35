/* The scale of an FP8 tensor, from its maximum. It has a file of its own, so that a test can wrap it. */
#include "kernels/cpu/cpu.h"

/* NOTE: amax / h, not h * range, which may overflow. */
float scale_within_range(Tensor t, float amax)
{
    const DType d = t.format.dtype;
    if (!t.range)
        return fp8_scale(amax, d);
    const float headroom = range_is_reused(t) ? fp8_headroom(d) : 1;
    if (!range_is_reused(t) || amax / headroom > *t.range)
        *t.range = amax;
    return headroom * fp8_scale(*t.range, d);
}
