/* Random initial weights. */
#include "kernels/random.h"

#include "kernels/cpu/cpu.h"

void backend_init_normal(Tensor w, float std, float cutoff, uint64_t seed, uint64_t first)
{
    CHECK_TENSOR(w, w.rows, w.cols);
    float *values = tensor_result(w, 0);
    for (size_t i = 0; i < tensor_numel(w); i++)
        values[i] = (float)(std * random_normal(seed, first + i, cutoff));
    tensor_finish(w, values);
}

void backend_init_constant(Tensor w, float value)
{
    CHECK_TENSOR(w, w.rows, w.cols);
    float *values = tensor_result(w, 0);
    for (size_t i = 0; i < tensor_numel(w); i++)
        values[i] = value;
    tensor_finish(w, values);
}
