#include "model/config/check_experts.h"

#include <math.h>

#include "kernels/runtime/error.h"

static void check_count(const Reader *r)
{
    const Experts *e = &r->s->c.model.experts;
    if (e->top_k > e->count)
        die("%s: model.num_experts_per_tok %d is more than model.num_experts %d",
            reader_where(r, "model.num_experts_per_tok"), e->top_k, e->count);
}

/* PEFT stores adapters of gate and up of all experts as one tensor. */
static void check_adapters(const Reader *r)
{
    const Lora *l = &r->s->c.model.lora;
    if (l->rank > 0 && l->target[LORA_GATE] != l->target[LORA_UP])
        die("%s: lora.target_modules has only one of gate_proj and up_proj; PEFT cannot load such "
            "adapters of experts: name both or neither",
            reader_where(r, "lora.target_modules"));
    if (l->rank > 0 && l->target[LORA_GATE] && l->use_rslora)
        die("%s: lora.use_rslora: PEFT joins the adapters of gate_proj and up_proj of an expert, "
            "which changes their scale; use lora.use_rslora false with lora.alpha %g",
            reader_where(r, "lora.use_rslora"), l->alpha * sqrt(l->rank));
}

static void check_strategy(const Reader *r)
{
    const Config *c = &r->s->c;
    if (c->model.experts.balance == BALANCE_POOLED && pipeline_stages(&c->strategy) > 1)
        die("%s: model.router_aux_loss pooled needs all blocks on each rank, but "
            "parallelism.pipeline is %d; use --model.router_aux_loss=micro_batch",
            reader_where(r, "model.router_aux_loss"), pipeline_stages(&c->strategy));
    if (c->recipe.down_scales == DOWN_CHANNEL)
        die("%s: fp8.down_scales channel is not supported with experts; leave it out",
            reader_where(r, "fp8.down_scales"));
    if (c->tiled_mlp_tokens > 0)
        die("%s: tiled_mlp_tokens is not supported with experts; leave it out",
            reader_where(r, "tiled_mlp_tokens"));
}

/* Warns that other programs ignore a router's bias: no class of transformers has a place for it. */
static void check_bias(const Reader *r)
{
    const ModelConfig *m = &r->s->c.model;
    if (m->experts.bias_gamma == 0)
        return;
    if (m->lora.rank > 0)
        die("%s: a bias of routers is not supported with adapters; leave it out",
            reader_where(r, "model.bias_gamma"));
    if (!config_forward_only(&r->s->c))
        warn("%s: checkpoints have the bias of routers in trainer.json, which "
             "only this program reads; other programs choose other experts, and --export is "
             "refused",
             reader_where(r, "model.bias_gamma"));
}

/* Without experts the keys of the router have no effect. */
static void note_idle(Reader *r)
{
    static const char *const keys[] = {
        "model.num_experts_per_tok", "model.norm_topk_prob",       "model.mlp_layer_types",
        "model.router_aux_loss",     "model.router_aux_loss_coef", "model.router_z_loss_coef",
        "model.bias_gamma"
    };
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (reader_given(r, keys[i]))
            reader_note(r, "%s (there is no model.num_experts)", keys[i]);
}

void check_experts(Reader *r)
{
    if (r->s->c.model.experts.count == 0) {
        note_idle(r);
        return;
    }
    check_count(r);
    check_adapters(r);
    check_bias(r);
    check_strategy(r);
}
