/* A kind of unit that is not in the table: between the embedding and the first block each token's x
 * becomes x + W x. This file shows all that a program needs to add a kind of unit: parameters,
 * buffers, forward and backward, and names in files. */
#pragma once
#include "model/shape/architecture.h"
#include "model/plan/plan.h"
#include "kernels/kernels.h"
#include "tests/llama_tensors.h"

static const TensorNames mapped_tensors[] = {
    { "mapping", { "model.mapping.weight" } },
    LLAMA_TENSORS,
    { NULL },
};
static const Architecture mapped = {
    "MappedForCausalLM",
    "mapped",
    "Mapped",
    .norm = RMS_NORM,
    .norm_affine = true,
    .rope_types = 1 << ROPE_DEFAULT,
    .blocks = "model.layers",
    .tensors = mapped_tensors,
};

static int mapping_count(const ModelConfig *c)
{
    return c->architecture == &mapped;
}

static const ParamRow mapping_params[] = { { "mapping", 0, SIZE_MODEL, SIZE_MODEL, SPLIT_ROWS,
                                             STD_IN, ALWAYS } };

static void mapping_plan(Planner *p, Model *m, int u)
{
    m->unit_acts[u].attn_res = plan_own(p, m->text.recipe.residual, m->text.config->d_model);
}

static void mapping_forward(Model *m, const UnitTensors *w, int u)
{
    const Tensor x = m->unit_acts[u].attn_res;
    matmul(m->unit_acts[u + 1].attn_res, x, w->tensor[0], x);
}

static int mapping_uses(const Model *m, int u)
{
    (void)m, (void)u;
    return FOR_BACKWARD;
}

static void mapping_backward(Model *m, const UnitTensors *w, UnitTensors *dw, int u,
                             BackwardStep step)
{
    const Tensor dy = m->text.work.dh;
    quantize(dy, m->text.work.dres); /* a copy, as they have one format */
    matmul_dw(dw->tensor[0], dy, m->unit_acts[u].attn_res);
    if (step.needs_dx)
        matmul_dx(m->text.work.dres, dy, w->tensor[0], true);
}

static const UnitKind mapping_kind = {
    .name = "mapping",
    .count = mapping_count,
    .params = mapping_params,
    .num_params = 1,
    .plan = mapping_plan,
    .forward = mapping_forward,
    .backward_uses = mapping_uses,
    .backward = mapping_backward,
};
