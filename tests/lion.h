/* An optimizer that the table does not have: Lion [Chen et al. 2023, arXiv 2302.06675, alg. 2]. All that a program needs to add
 * another one stands here. It computes on the host, so that it runs with either back end. */
#pragma once
#include <stdlib.h>

#include "kernels/device.h"
#include "kernels/fp8.h"
#include "kernels/random.h"
#include "model/optimizer.h"

static inline Tensor lion_fetch(Tensor t)
{
    const size_t bytes = tensor_bytes(t);
    void *host = malloc(bytes);
    device_get(host, t.data, bytes);
    t.data = host;
    return t;
}

static inline float *lion_values(Tensor host)
{
    float *x = malloc(sizeof *x * (size_t)host.cols);
    load(x, host, 0, (size_t)host.cols);
    return x;
}

/* u = sign(b1 m + (1-b1) g); m = b2 m + (1-b2) g; w -= lr (u + weight_decay w) */
static inline void lion_step(Tensor w, const Tensor *state, Tensor grad, const StepParams *p, uint64_t first)
{
    const Tensor host[] = { lion_fetch(w), lion_fetch(state[0]), lion_fetch(grad) };
    float *x = lion_values(host[0]), *m = lion_values(host[1]), *g = lion_values(host[2]);
    const float lr = (float)p->lr, b1 = (float)p->beta1, b2 = (float)p->beta2, decay = (float)p->weight_decay;
    for (int i = 0; i < w.cols; i++) {
        const float gi = (float)p->grad_scale * g[i], along = b1 * m[i] + (1 - b1) * gi;
        m[i] = b2 * m[i] + (1 - b2) * gi;
        x[i] -= lr * ((float)((along > 0) - (along < 0)) + decay * x[i]);
    }
    store(host[0], 0, x, (size_t)w.cols);
    for (int i = 0; w.format.dtype == BF16 && i < w.cols; i++)
        ((uint16_t *)host[0].data)[i] = bf16_round_stochastic(x[i], random_16(p->seed, first + (uint64_t)i));
    store(host[1], 0, m, (size_t)w.cols);
    device_put(w.data, host[0].data, tensor_bytes(w));
    device_put(state[0].data, host[1].data, tensor_bytes(state[0]));
    for (int i = 0; i < 3; i++)
        free(host[i].data);
    free(x), free(m), free(g);
}

static const Optimizer lion = { "lion", 1, { { "momentum", "momentum", OWN_FORMAT, { BF16, 0, false } } },
                                HAS_BETAS | HAS_WEIGHT_DECAY, .step = lion_step };
