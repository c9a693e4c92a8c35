/* An optimizer that is not in the table: Lion [Chen et al. 2023, arXiv 2302.06675, alg. 2]. This
 * file shows all that a program needs to add an optimizer. Lion computes on the host here, so that
 * it runs with either back end. */
#pragma once
#include <stdlib.h>

#include "kernels/random.h"
#include "kernels/runtime/device.h"
#include "model/shape/optimizer_table.h"
#include "model/run/quant_stats.h"

/* u = sign(b1 m + (1-b1) g); m = b2 m + (1-b2) g; w -= lr (u + weight_decay w). m is F32, w F32 or
 * BF16. */
static inline void lion_step(Tensor w, const Tensor *state, Tensor grad, const StepParams *p,
                             uint64_t first)
{
    const size_t n = (size_t)w.cols;
    Elements x = elements_fetch(w, 0, n), m = elements_fetch(state[0], 0, n),
             g = elements_fetch(grad, 0, n);
    const float lr = (float)p->lr, b1 = (float)p->beta1, b2 = (float)p->beta2,
                decay = (float)p->weight_decay;
    for (size_t i = 0; i < n; i++) {
        const float gi = (float)p->grad_scale * g.x[i], along = b1 * m.x[i] + (1 - b1) * gi;
        m.x[i] = b2 * m.x[i] + (1 - b2) * gi;
        x.x[i] -= lr * ((float)((along > 0) - (along < 0)) + decay * x.x[i]);
    }
    if (w.format.dtype == BF16)
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)x.t.data)[i] =
                bf16_round_stochastic(x.x[i], random_16(p->seed, first + i));
    device_put(w.data, w.format.dtype == BF16 ? x.t.data : x.x, tensor_bytes(w));
    device_put(state[0].data, m.x, tensor_bytes(state[0]));
    elements_free(&x), elements_free(&m), elements_free(&g);
}

static const Optimizer lion = { "lion",
                                1,
                                { { "momentum", "momentum", OWN_FORMAT, { F32, 0, false } } },
                                HAS_BETAS | HAS_WEIGHT_DECAY,
                                .step = lion_step };
