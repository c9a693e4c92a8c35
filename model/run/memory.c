/* The memory plan of a run. */
#include "model/run/memory.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/comm.h"
#include "kernels/device.h"
#include "model/fsdp_plan.h"
#include "model/model.h"

double memory_of_device(const Config *c)
{
    return c->device_memory > 0 ? c->device_memory * (1 << 30) : (double)device_memory_total();
}

static int ranks_of(const Config *c)
{
    return c->dry_run ? c->ranks : comm_size();
}

/* CUDA's context and code, workspaces of cuBLASLt and cuDNN, scratch of our kernels; with several ranks also NCCL's buffers. Measured
 * on H200s, models of 1B to 30B parameters in sequences of 2048 tokens: 0.77 to 1.65 GiB in 13 runs on one GPU, 2.06 to 2.89 GiB in
 * 16 on two and four. This is the most of either, rounded up. */
double memory_allowance(const Config *c)
{
    if (c->device_memory == 0 && strcmp(device_build(), "cpu") == 0)
        return 0;
    return (ranks_of(c) > 1 ? 2.9 : 1.7) * (1 << 30);
}

/* A fifth of the memory is left to libraries and chance, of a small one what they take; with one micro-batch a step there is nothing
 * to gain. The ranks agree. */
static bool fits(const Model *m, const Fsdp *f, const Config *c)
{
    const double device = memory_of_device(c), planned = (double)model_planned_bytes(m, f);
    double refused = planned > fmin(0.8 * device, device - memory_allowance(c)) || f->shards == 1
                  || c->global_train_batch_size <= (long)c->device_train_microbatch_size * ranks_of(c);
    comm_max(&refused, 1);
    return !refused;
}

void memory_plan(Model *m, Fsdp *f, const Config *c)
{
    Placement p = { comm_group_size(RANKS_SHARD), comm_group_rank(RANKS_SHARD), c->strategy.grad_sum != SUM_OFTEN };
    if (c->dry_run) {           /* of ranks that may not be there; all have as much */
        p.shards = c->strategy.shard_ranks;
        p.rank = 0;
    }
    model_plan(m, f, c, p);
    if (c->strategy.grad_sum == SUM_ONCE_IF_FITS && !fits(m, f, c)) {
        model_free(m, f);
        p.sum_once = false;
        model_plan(m, f, c, p);
    }
}

static double gib(double bytes)
{
    return bytes / (1 << 30);
}

/* Nothing is trained: what there is besides weights. */
static void print_forward_plan(const Model *m, const Fsdp *f, const Config *c, size_t stored)
{
    const PlanBytes *b = &m->bytes;
    printf("memory plan of a rank, GiB: weights %.3f, gathered or rounded again %.3f, activations of one block %.3f,\n  head %.3f",
           gib((double)stored), gib((double)fsdp_weight_bytes(f)), gib((double)b->work), gib((double)b->head));
    if (b->cache > 0)
        printf(", keys and values of %d tokens %.3f", m->P, gib((double)b->cache));
    printf("; total %.3f of %.1f\n", gib((double)model_planned_bytes(m, f)), gib(memory_of_device(c)));
}

static void print_optimizer(const Optimizer *o, const Recipe *r)
{
    printf("optimizer %s:", o->name);
    for (int i = 0; i < o->num_states; i++)
        printf("%s %s in %s", i ? "," : "", o->state[i].label, format_name(optimizer_format(o, i, r)));
    puts(o->num_states ? "" : " no states");
}

static void print_plan(const Model *m, const Fsdp *f, const Config *c)
{
    const PlanBytes *b = &m->bytes;
    size_t n[NUM_REGIONS] = { 0 }, master = 0, moments = fsdp_state_bytes(f), frozen = 0, base = 0;
    for (int u = 0; u < f->num_units; u++) {
        const Shard *s = &f->shard[u];
        for (int i = 0; i < f->shape[u].num_params; i++)
            n[f->shape[u].param[i].region] += param_numel(&f->shape[u].param[i]);
        master += tensor_bytes(s->master);
        frozen += tensor_bytes(s->frozen);
        base += base_bytes(f, s->base_count);
    }
    const size_t untrained = n[FROZEN] + n[BASE];
    printf("model: %.4g M parameters", (double)(n[TRAINED] + untrained) / 1e6);
    if (untrained > 0 && !m->forward_only)
        printf(", of which %.4g M are trained", (double)n[TRAINED] / 1e6);
    printf(", %d blocks; micro-batch %d x %d tokens\n", m->L, m->attn.B, m->attn.T);
    recipe_print(&m->recipe);
    if (m->forward_only) {
        print_forward_plan(m, f, c, frozen + base);
        return;
    }
    print_optimizer(f->optimizer, &m->recipe);
    char frozen_text[32] = "";
    if (untrained > 0)
        snprintf(frozen_text, sizeof frozen_text, "frozen %.3f, ", gib((double)(frozen + base)));
    printf("memory plan of a rank, GiB: master %.3f, %sweights %.3f, gradients %.3f, moments %.3f,\n"
           "  activations %.3f (%.1f kB per token and block), work %.3f, head and loss %.3f; total %.3f of %.1f\n",
           gib((double)master), frozen_text, gib(fsdp_weight_bytes(f)), gib(fsdp_grad_bytes(f)), gib(moments),
           gib((double)m->L * b->block),
           b->block / 1e3 / m->N, gib(b->work), gib(b->head), gib(model_planned_bytes(m, f)), gib(memory_of_device(c)));
    printf("while a checkpoint is written, up to %.3f GiB of host memory besides\n",
           gib(master + moments + (c->model.lora.rank > 0 ? 0 : frozen)));
}

/* What the same run would take, changed to `other`. All ranks call. */
static double bytes_of(const Config *other)
{
    Model m;
    Fsdp f;
    memory_plan(&m, &f, other);
    const double bytes = (double)model_planned_bytes(&m, &f);
    model_free(&m, &f);
    return bytes;
}

void memory_print(const Model *m, const Fsdp *f, const Config *c)
{
    if (m->forward_only) {
        if (comm_rank() == 0)
            print_plan(m, f, c);
        return;
    }
    Config classic = *c, whole = *c;
    classic.recipe = *recipe_find("bf16");
    classic.optimizer.name = "adamw";
    classic.model.lora.base = BASE_AS_FROZEN;
    whole.num_trainable = whole.model.lora.rank = 0;
    whole.model.lora.base = BASE_AS_FROZEN;
    const double bytes = bytes_of(&classic), all_trained = c->num_trainable > 0 || c->model.lora.rank > 0 ? bytes_of(&whole) : 0;
    if (comm_rank() != 0)
        return;
    print_plan(m, f, c);
    if (all_trained > 0)
        printf("with all parameters trained it would be %.3f GiB\n", gib(all_trained));
    printf("recipe bf16, with f32 master weights and moments, would take %.3f GiB: %.2f times as much\n", gib(bytes),
           bytes / (double)model_planned_bytes(m, f));
}
