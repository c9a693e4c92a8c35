#include "model/block/weights.h"

#include <math.h>

#include "kernels/runtime/device.h"

float weights_put(Model *m)
{
    const size_t N = (size_t)m->text.N;
    const float *weight = m->weighed.host + 2 * N;
    float largest = 0;
    for (size_t i = 0; i < N; i++)
        largest = fmaxf(largest, fabsf(weight[i]));
    device_put(m->weighed.weight, weight, N * sizeof *weight);
    return largest > 0 ? largest : 1;
}
