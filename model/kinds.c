/* The table of kinds of units: parameters, buffers, forward and backward of each kind. */
#include <assert.h>
#include <stddef.h>

#include "model/block/block.h"
#include "model/store/param_store.h"
#include "model/plan/plan.h"
#include "model/block/projector.h"

static int mlps(const ModelConfig *c, int layer)
{
    const int experts = layer_experts(c, layer);
    return experts > 0 ? experts : 1;
}

/* ---- parameters ------------------------------------------------------------------------------ */

#define FIELD(name) #name, offsetof(UnitTensors, name)
static const ParamRow of_embedding[] = {
    { FIELD(embed), .rows = SIZE_VOCABULARY, .cols = SIZE_MODEL, .split = SPLIT_ROWS,
      .init = STD_EMBEDDING },
};
// clang-format off
static const ParamRow of_block[] = {
    { FIELD(attn_norm),   .cols = SIZE_MODEL, .condition = WITH_NORM_WEIGHTS },
    { FIELD(qkv),         .rows = SIZE_OUTPUTS, .cols = SIZE_MODEL, .split = SPLIT_ROWS, .init = STD_IN, .linear = LINEAR_QKV },
    { FIELD(qkv_bias),    .rows = SIZE_OUTPUTS, .split = SPLIT_ROWS, .init = ZEROS, .condition = WITH_QKV_BIAS, .linear = LINEAR_QKV },
    { FIELD(qnorm),       .cols = SIZE_Q_NORM, .split = SPLIT_COLUMNS, .condition = WITH_QK_NORM },
    { FIELD(knorm),       .cols = SIZE_K_NORM, .split = SPLIT_COLUMNS, .condition = WITH_QK_NORM },
    { FIELD(out),         .rows = SIZE_OUTPUTS, .cols = SIZE_Q, .split = SPLIT_COLUMNS, .init = STD_ATTENTION_OUT, .linear = LINEAR_OUT },
    { FIELD(mlp_norm),    .cols = SIZE_MODEL, .condition = WITH_NORM_WEIGHTS },
    { FIELD(router),      .rows = SIZE_EXPERTS, .cols = SIZE_MODEL, .init = STD_IN, .condition = WITH_EXPERTS, .in_stream_format = true },
    { FIELD(gate_up),     .rows = SIZE_OUTPUTS, .cols = SIZE_MODEL, .split = SPLIT_ROWS, .init = STD_IN, .linear = LINEAR_GATE_UP, .count = mlps },
    { FIELD(down),        .rows = SIZE_OUTPUTS, .cols = SIZE_MLP, .split = SPLIT_COLUMNS, .init = STD_MLP_OUT, .linear = LINEAR_DOWN, .count = mlps },
    { FIELD(qkv_a),       .rows = SIZE_LORA_RANKS, .cols = SIZE_MODEL, .init = STD_ADAPTER, .condition = ADAPTED, .linear = LINEAR_QKV },
    { FIELD(qkv_b),       .rows = SIZE_OUTPUTS, .cols = SIZE_LORA_RANK, .split = SPLIT_ROWS, .init = ZEROS, .condition = ADAPTED, .linear = LINEAR_QKV },
    { FIELD(out_a),       .rows = SIZE_LORA_RANKS, .cols = SIZE_Q, .split = SPLIT_COLUMNS, .init = STD_ADAPTER, .condition = ADAPTED, .linear = LINEAR_OUT },
    { FIELD(out_b),       .rows = SIZE_OUTPUTS, .cols = SIZE_LORA_RANK, .init = ZEROS, .condition = ADAPTED, .linear = LINEAR_OUT },
    { FIELD(gate_up_a),   .rows = SIZE_LORA_RANKS, .cols = SIZE_MODEL, .init = STD_ADAPTER, .condition = ADAPTED, .linear = LINEAR_GATE_UP, .count = mlps },
    { FIELD(gate_up_b),   .rows = SIZE_OUTPUTS, .cols = SIZE_LORA_RANK, .split = SPLIT_ROWS, .init = ZEROS, .condition = ADAPTED, .linear = LINEAR_GATE_UP, .count = mlps },
    { FIELD(down_a),      .rows = SIZE_LORA_RANKS, .cols = SIZE_MLP, .split = SPLIT_COLUMNS, .init = STD_ADAPTER, .condition = ADAPTED, .linear = LINEAR_DOWN, .count = mlps },
    { FIELD(down_b),      .rows = SIZE_OUTPUTS, .cols = SIZE_LORA_RANK, .init = ZEROS, .condition = ADAPTED, .linear = LINEAR_DOWN, .count = mlps },
};
// clang-format on
static const ParamRow of_head[] = {
    { FIELD(norm), .cols = SIZE_MODEL, .condition = WITH_NORM_WEIGHTS },
    { FIELD(head), .rows = SIZE_VOCABULARY, .cols = SIZE_MODEL, .split = SPLIT_ROWS,
      .init = STD_HEAD, .condition = UNTIED },
};
static const ParamRow of_projector[] = {
    { FIELD(image_in), .rows = SIZE_MODEL, .cols = SIZE_FEATURE, .split = SPLIT_ROWS,
      .init = STD_ADAPTER },
    { FIELD(image_in_bias), .rows = SIZE_MODEL, .split = SPLIT_ROWS, .init = ZEROS,
      .condition = WITH_PROJECTOR_BIAS },
    { FIELD(image_out), .rows = SIZE_MODEL, .cols = SIZE_MODEL, .split = SPLIT_COLUMNS,
      .init = STD_ADAPTER, .condition = WITH_PROJECTOR_OUT },
    { FIELD(image_out_bias), .rows = SIZE_MODEL, .init = ZEROS,
      .condition = WITH_PROJECTOR_OUT_BIAS },
};
#define COUNT(rows) (sizeof(rows) / sizeof(rows)[0])
static_assert(COUNT(of_embedding) + COUNT(of_block) + COUNT(of_head) == NUM_PARAMS &&
                  sizeof(UnitTensors) == NUM_PARAMS * sizeof(Tensor),
              "a parameter is a field of UnitTensors and a row");

/* ---- forward and backward -------------------------------------------------------------------- */

static void embed(Model *m, const UnitTensors *w, int u)
{
    embedding_forward(m->unit_acts[u + 1].attn_res, m->sorted, w->embed);
}

static void embed_backward(Model *m, const UnitTensors *w, UnitTensors *dw, int u,
                           BackwardStep step)
{
    (void)w, (void)u, (void)step;
    embedding_backward(dw->embed, m->sorted, m->text.work.dres);
}

static void plan_projector(Planner *p, Model *m, int u)
{
    (void)p;
    projector_plan(m, u);
}

static int projector_uses(const Model *m, int u)
{
    (void)m, (void)u;
    return FOR_FORWARD | FOR_BACKWARD;
}

static void projector_back(Model *m, const UnitTensors *w, UnitTensors *dw, int u,
                           BackwardStep step)
{
    (void)u, (void)step;
    projector_backward(m, w, dw);
}

static void block(Model *m, const UnitTensors *w, int u)
{
    block_forward(&m->text, w, &m->unit_acts[u], &m->unit_acts[u + 1]);
}

static int block_uses(const Model *m, int u)
{
    return keep_recomputes(m->unit_acts[u].keep) ? FOR_FORWARD | FOR_BACKWARD : FOR_BACKWARD;
}

static void block_back(Model *m, const UnitTensors *w, UnitTensors *dw, int u, BackwardStep step)
{
    block_backward(&m->text, w, dw, &m->unit_acts[u], &m->unit_acts[u + 1], step);
}

/* ---- the table ------------------------------------------------------------------------------- */

static int one(const ModelConfig *c)
{
    (void)c;
    return 1;
}

static int projectors(const ModelConfig *c)
{
    return c->image.feature_size > 0;
}

static const UnitKind kinds[] = {
    { .name = "embedding",
      .count = one,
      .params = of_embedding,
      .num_params = COUNT(of_embedding),
      .forward = embed,
      .backward = embed_backward },
    { .name = "projector",
      .count = projectors,
      .is_projector = true,
      .params = of_projector,
      .num_params = COUNT(of_projector),
      .plan = plan_projector,
      .forward = projector_forward,
      .backward_uses = projector_uses,
      .backward = projector_back },
    { .name = "block",
      .is_layer = true,
      .params = of_block,
      .num_params = COUNT(of_block),
      .plan = plan_block,
      .forward = block,
      .backward_uses = block_uses,
      .backward = block_back },
    { .name = "head",
      .count = one,
      .params = of_head,
      .num_params = COUNT(of_head),
      .plan = plan_head_input },
};

/* Registers the kinds before main, so that code that works with units does not depend on this
 * file. */
__attribute__((constructor)) static void add_kinds(void)
{
    for (int i = 0; i < (int)COUNT(kinds); i++)
        unit_kind_add(&kinds[i], i);
}
