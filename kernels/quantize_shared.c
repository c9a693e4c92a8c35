/* quantize and scale_is_reused, which both back ends use. */
#include "kernels/backend.h"
#include "kernels/check.h"
#include "kernels/kernels.h"
#include "kernels/runtime/device.h"

bool scale_is_reused(Tensor y)
{
    return y.scale_amax && y.scale_reused && *y.scale_reused;
}

void backend_quantize(Tensor y, Tensor x)
{
    backend_quantize_with_amax(y, x, NULL);
}

void backend_quantize_with_amax(Tensor y, Tensor x, const float *amax)
{
    check_tensor("quantize", "x", x, x.rows, x.cols);
    check_tensor("quantize", "y", y, x.rows, x.cols);
    if (y.data == x.data) {
        CHECK(format_equal(y.format, x.format), "quantize: %s and %s in the same memory",
              format_name(y.format), format_name(x.format));
        return;
    }
    if (format_is_fp8(y.format) && !y.format.group) {
        if (format_equal(y.format, x.format)) /* copies the codes, without a second rounding */
            backend_device_copy(y.scale, x.scale, sizeof(float));
        else if (scale_is_reused(y)) {
            backend_quantize_in_range(y, x);
            return;
        } else if (amax)
            backend_quantize_scale_from(y, amax);
        else
            backend_quantize_scale(y, x);
    }
    backend_quantize_codes(y, x);
}
