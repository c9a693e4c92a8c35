/* quantize, from the parts that each back end has; and what both do with ranges. */
#include "kernels/check.h"
#include "kernels/device.h"
#include "kernels/kernels.h"

static OperandRanges ranges = RANGES_MEASURED;

void operand_ranges(OperandRanges use)
{
    ranges = use;
}

bool range_is_kept(Tensor y)
{
    return y.range && ranges == RANGES_KEPT;
}

void quantize(Tensor y, Tensor x)
{
    quantize_with_amax(y, x, NULL);
}

void quantize_with_amax(Tensor y, Tensor x, const float *amax)
{
    check_tensor("quantize", "x", x, x.rows, x.cols);
    check_tensor("quantize", "y", y, x.rows, x.cols);
    if (y.data == x.data) {
        CHECK(format_equal(y.format, x.format), "quantize: %s and %s in the same memory", format_name(y.format),
              format_name(x.format));
        return;
    }
    if (format_is_fp8(y.format) && !y.format.group) {
        if (format_equal(y.format, x.format))           /* the same codes: nothing is rounded twice */
            device_copy(y.scale, x.scale, sizeof(float));
        else if (range_is_kept(y)) {
            quantize_in_range(y, x);
            return;
        } else if (amax)
            quantize_scale_from(y, amax);
        else
            quantize_scale(y, x);
    }
    quantize_codes(y, x);
}
