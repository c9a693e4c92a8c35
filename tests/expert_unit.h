/* A second kind of layer, which has experts: a parameter of five items, each with an adapter. The
 * layer computes nothing: it copies the residual stream, and the gradients of its parameters are
 * 0. */
#pragma once
#include <stddef.h>

#include "kernels/kernels.h"
#include "model/plan/plan.h"
#include "model/shape/architecture.h"
#include "tests/llama_tensors.h"
#include "tests/models.h"

enum { ITEMS = 5, RANK = 6, LAYER = 1 }; /* LAYER: the unit with items */

static const TensorNames expert_tensors[] = {
    { "experts", { "experts.%d.gate_proj.weight", "experts.%d.up_proj.weight" } },
    LLAMA_TENSORS,
    { NULL },
};
static const Architecture with_experts = {
    "ExpertsForCausalLM",
    "experts",
    "Experts",
    .norm = RMS_NORM,
    .norm_affine = true,
    .tying = true,
    .rope_types = 1 << ROPE_DEFAULT,
    .blocks = "model.layers",
    .tensors = expert_tensors,
    .keys = (const ClassKey[]){ { "rms_norm_eps", 1e-5 }, { NULL } },
};

static int layers_with_experts(const ModelConfig *c)
{
    return c->architecture == &with_experts;
}

static int five(const ModelConfig *c)
{
    (void)c;
    return ITEMS;
}

#define FIELD(name, field) name, offsetof(UnitTensors, field)
static const ParamRow expert_params[] = {
    { FIELD("experts", gate_up), SIZE_OUTPUTS, SIZE_MODEL, SPLIT_ROWS, STD_IN, ALWAYS,
      LINEAR_GATE_UP, five },
    { FIELD("experts_a", gate_up_a), SIZE_LORA_RANKS, SIZE_MODEL, SPLIT_NONE, STD_ADAPTER, ADAPTED,
      LINEAR_GATE_UP, five },
    { FIELD("experts_b", gate_up_b), SIZE_OUTPUTS, SIZE_LORA_RANK, SPLIT_ROWS, ZEROS, ADAPTED,
      LINEAR_GATE_UP, five },
};

static void expert_forward(Model *m, const UnitTensors *w, int u)
{
    (void)w;
    quantize(m->unit_acts[u + 1].attn_res, m->unit_acts[u].attn_res); /* a copy */
}

static void expert_backward(Model *m, const UnitTensors *w, UnitTensors *dw, int u,
                            BackwardStep step)
{
    (void)m, (void)w, (void)u, (void)step;
    const Tensor t[] = { dw->gate_up, dw->gate_up_a, dw->gate_up_b };
    for (int i = 0; i < 3; i++)
        if (t[i].data && t[i].empty)
            device_zero(t[i].data, tensor_bytes(t[i]));
}

static const UnitKind expert_layer = {
    .name = "expert layer",
    .count = layers_with_experts,
    .is_layer = true,
    .params = expert_params,
    .num_params = 3,
    .plan = plan_head_input, /* needs only the stream */
    .forward = expert_forward,
    .backward = expert_backward,
};

static inline ModelConfig expert_model(BaseFormat base)
{
    ModelConfig m = architecture(LLAMA);
    m.architecture = &with_experts;
    m.n_layers = 3; /* the first layer has experts */
    m.mlp_width = 128;
    /* without a cutoff: with one, all items would have the cutoff as their maximum */
    m.init_fn = INIT_NORMAL;
    m.init_std = 0.02;
    m.init_cutoff_factor = 0;
    return base == BASE_AS_FROZEN ? m : with_adapters(m, RANK, ALL_MODULES, base);
}
