/* A small model on the ranks of a test: its sizes, its start as a run would place it, and its
 * end. */
#pragma once
#include "model/predict/memory.h"
#include "tests/models.h"
#include "tests/ranks.h"
#include "tests/ranks_training.h"

typedef struct {
    Config config;
    Model model;
    ParamStore store;
} Run;

/* The model with these sizes; the number of its heads stays. */
static inline ModelConfig with_sizes(ModelConfig m, int d_model, int head_dim, int mlp_width,
                                     int n_layers)
{
    m.d_model = d_model;
    m.head_dim = head_dim;
    m.mlp_width = mlp_width;
    m.n_layers = n_layers;
    return m;
}

/* Plans and places the model of r->config, with weights that are the same in each call. */
static inline void place_run(Run *r)
{
    memory_plan(&r->model, &r->store, &r->config);
    model_alloc(&r->model, &r->store, &r->config);
    store_init(&r->store, &r->config.model, 5);
    test_fill_adapters(&r->store, 6);
}

static inline void close_run(Run *r)
{
    model_free(&r->model, &r->store);
}
