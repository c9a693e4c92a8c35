/* Steps of small models with any recipe: loss and gradients, and distances between two steps. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/plan/plan.h"
#include "tests/test.h"
#include "tests/models.h"

enum { B = 4, MAX_TOKENS = 128 };

typedef struct {
    double loss;
    UnitLayout shape[16];
    float *gradient[16];
    size_t count[16];
    int units;
} Result;

/* With experts, all of them compute each token: rounding cannot change the choice. */
static inline ModelConfig wide(SmallModel a)
{
    ModelConfig m = architecture(a);
    m.experts.top_k = m.experts.count;
    m.d_model = 128;
    m.head_dim = 32;
    m.mlp_width = 256;
    m.clip_qkv = 0;
    m.init_fn = INIT_FULL_MEGATRON;
    m.init_std = 0.05;
    return m;
}

static inline float *as_floats(Tensor t)
{
    size_t n = tensor_numel(t);
    float *x = malloc(sizeof(float) * n);
    if (t.format.dtype == F32) {
        device_get(x, t.data, sizeof(float) * n);
        return x;
    }
    uint16_t *h = malloc(sizeof(uint16_t) * n);
    device_get(h, t.data, sizeof(uint16_t) * n);
    for (size_t i = 0; i < n; i++) {
        union {
            uint32_t bits;
            float value;
        } v = { .bits = (uint32_t)h[i] << 16 };
        x[i] = v.value;
    }
    free(h);
    return x;
}

/* How to run a step of `parts` micro-batches. If there are several micro-batches, the first has no
 * labels. before: if it is not 0, another step, whose loss is multiplied by `before`, and an
 * evaluation run first. */
typedef struct {
    Keep keep;
    bool saved_forward;
    int parts;
    ScalesPer scales;
    float before;
} How;

static inline void step(Model *model, ParamStore *store, const Config *c, int parts, uint64_t seed,
                        float factor)
{
    const int N = model->text.N * parts, labels = parts > 1 ? N - model->text.N : N;
    int tokens[MAX_TOKENS], targets[MAX_TOKENS];
    for (int n = 0; n < N; n++)
        tokens[n] = test_token(seed, n, model->text.config->vocab_size);
    for (int n = 0; n < N; n++)
        targets[n] = (n + 1) % model->text.attn.T && n >= N - labels ? tokens[n + 1] : -1;
    for (int n = 0; n < N; n += model->text.N)
        model_micro_batch(model, store, tokens + n, targets + n, NULL, factor / (float)labels,
                          (float)c->z_loss,
                          n + model->text.N < N ? PASS_ACCUMULATE : PASS_COMPLETE);
}

/* The result of a step in `parts` micro-batches; before: see How. */
static inline Result run_config(Config c, int parts, float before)
{
    const ModelConfig *m = &c.model;
    Model model;
    ParamStore store;
    c.recipe.grads = (Format){ F32, 0 };
    model_create(&model, &store, &c);
    store_init(&store, m, 3);
    test_fill_adapters(&store, 9);
    if (before != 0) {
        const int zeros[MAX_TOKENS] = { 0 };
        step(&model, &store, &c, parts, 2, before);
        model_micro_batch(&model, &store, zeros, zeros, NULL, 0, 0, PASS_FORWARD);
        take_losses(&model);
        fsdp_empty_grads(&store);
    }
    step(&model, &store, &c, parts, 1, 1);
    Result r = { .loss = take_losses(&model).loss / model.text.N, .units = store.num_units };
    for (int u = 0; u < r.units; u++) {
        const size_t size = (size_t)store.shape[u].num_params * sizeof(Param);
        r.shape[u] = store.shape[u];
        r.shape[u].param = xmalloc(size + 1);
        if (size > 0)
            memcpy(r.shape[u].param, store.shape[u].param, size);
        r.count[u] = store.shard[u].slice[TRAINED].count;
        r.gradient[u] = r.count[u] ? as_floats(store.shard[u].grad) : NULL;
    }
    model_free(&model, &store);
    return r;
}

static inline Result run_as(const ModelConfig *m, const char *recipe, How how)
{
    Config c;
    model_config(&c, m, recipe, B / how.parts);
    c.recipe.keep = how.keep;
    c.recipe.scales = how.scales;
    if (how.saved_forward)
        c.recipe.forward = FROM_SAVED;
    return run_config(c, how.parts, how.before);
}

static inline Result run(const ModelConfig *m, const char *recipe, Keep keep, bool saved_forward)
{
    return run_as(m, recipe, (How){ keep, saved_forward, 1, PER_MICROBATCH });
}

static inline void free_result(Result *r)
{
    for (int u = 0; u < r->units; u++) {
        free(r->gradient[u]);
        free(r->shape[u].param);
    }
}

static inline double distance(const float *x, const float *y, size_t n)
{
    double e = 0, s = 0;
    for (size_t i = 0; i < n; i++) {
        e += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
        s += (double)y[i] * y[i];
    }
    return sqrt(e / s);
}

/* Returns the relative error of the gradients of parameter i of unit u; 0: the parameter is
 * frozen. */
static inline double param_distance(const Result *x, const Result *y, int u, int i)
{
    const Param *p = &x->shape[u].param[i];
    if (p->region != TRAINED)
        return 0;
    return distance(x->gradient[u] + p->offset, y->gradient[u] + p->offset,
                    (size_t)p->rows * p->cols);
}

/* Returns the largest relative error of a gradient in `found`, with the unit and the name of its
 * parameter. */
static inline double worst_distance(const Result *found, const Result *exact, int *unit,
                                    const char **where)
{
    double worst = 0;
    *unit = 0, *where = "";
    for (int u = 0; u < exact->units; u++)
        for (int i = 0; i < exact->shape[u].num_params; i++) {
            double d = param_distance(found, exact, u, i);
            if (!(d <= worst))
                worst = d, *where = exact->shape[u].param[i].name, *unit = u;
        }
    return worst;
}

/* Models that train only adapters. */
static const struct {
    SmallModel model;
    unsigned modules;
    BaseFormat base;
} adapted[] = {
    { LLAMA_GQA, ALL_MODULES, BASE_AS_FROZEN },
    { OLMO2, 1 << LORA_Q | 1 << LORA_V | 1 << LORA_O | 1 << LORA_GATE, BASE_NF4 },
    { QWEN3, ALL_MODULES, BASE_E4M3 },
};
enum { NUM_ADAPTED = sizeof adapted / sizeof adapted[0], RANK = 8 };

static inline ModelConfig adapted_model(int i)
{
    return with_adapters(wide(adapted[i].model), RANK, adapted[i].modules, adapted[i].base);
}

/* Checks that all gradients have the same bits. */
static inline void check_same_as(const ModelConfig *m, const char *recipe, How one, How other)
{
    Result x = run_as(m, recipe, one), y = run_as(m, recipe, other);
    for (int u = 0; u < x.units; u++)
        for (size_t i = 0; i < x.count[u]; i++)
            if (x.gradient[u][i] != y.gradient[u][i])
                fail_msg("%s, unit %d, element %zu: %.9g and %.9g", recipe, u, i, x.gradient[u][i],
                         y.gradient[u][i]);
    free_result(&x);
    free_result(&y);
}
