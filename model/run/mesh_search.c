#include "model/run/mesh_search.h"

#include <stdio.h>

#include "kernels/runtime/comm.h"
#include "model/run/memory.h"
#include "model/run/plan_time.h"

enum { BEST = 3 };

typedef struct { Strategy strategy; double speed, seconds, device, host; } Found;

bool mesh_is_possible(const Config *c)
{
    enum { MULTIPLE = 16 };     /* of tokens of a rank, for FP8 */
    const Strategy *s = &c->strategy;
    const ModelConfig *m = &c->model;
    const int context = context_ranks(s), stages = pipeline_stages(s), T = m->max_sequence_length;
    const int chunks = s->pipeline_chunks > 1 ? s->pipeline_chunks : 1;
    if (c->ranks % (context * stages) != 0 || c->ranks / stages % s->shard_ranks != 0 || s->shard_ranks % context != 0)
        return false;
    const long at_once = (long)data_ranks(s, c->ranks) * c->device_train_microbatch_size;
    if (c->global_train_batch_size % at_once != 0)
        return false;
    if (context > 1 && (!context_divides(m, context) || T % (MULTIPLE * context) != 0))
        return false;
    return stages == 1 || (m->n_layers >= stages * chunks && c->host.activations != HOST_ALL && s->grad_sum != SUM_OFTEN
                           && (chunks == 1 || c->global_train_batch_size / at_once % stages == 0));
}

/* Keeps the list in order, the fastest first. */
static void add_found(Found best[BEST], Found x)
{
    for (int i = 0; i < BEST; i++)
        if (x.speed > best[i].speed) {
            const Found slower = best[i];
            best[i] = x;
            x = slower;
        }
}

/* As config/check_ranks.c sets it. */
static Strategy strategy_of(const Config *c, int stages, int shard, int context)
{
    Strategy s = c->strategy;
    s.pipeline_stages = stages;
    s.context_ranks = context;
    s.shard_ranks = shard;
    s.tensor_ranks = 1;
    s.pipeline_chunks = stages > 1 ? s.pipeline_chunks : 1;
    s.pipeline_schedule = stages > 1 ? s.pipeline_schedule : PIPELINE_1F1B;
    s.gathering = stages > 1 && shard > 1 ? GATHER_ONCE : stages == 1 && pipeline_stages(&c->strategy) > 1 ? GATHER_ONCE_IF_FITS
                : c->strategy.gathering;
    s.grad_sum = stages > 1 ? SUM_ONCE : pipeline_stages(&c->strategy) > 1 ? SUM_ONCE_IF_FITS : c->strategy.grad_sum;
    return s;
}

typedef struct { Found best[BEST]; int fit, exceed; } Search;

static void try_mesh(Search *search, const Config *given, int stages, int shard, int context)
{
    Config c = *given;
    Found x = { .strategy = strategy_of(given, stages, shard, context) };
    c.strategy = x.strategy;
    if (!mesh_is_possible(&c))
        return;
    const StepTime t = plan_time(&c);
    x.seconds = t.seconds;
    x.speed = plan_time_speed(&c, &t);
    x.host = t.host;
    x.device = t.device + memory_allowance(&c);
    if (x.device > memory_of_device(&c)) {
        search->exceed++;
        return;
    }
    search->fit++;
    add_found(search->best, x);
}

static void print_found(const Config *c, const Found *x)
{
    const Strategy *s = &x->strategy;
    const int stages = pipeline_stages(s), context = context_ranks(s), replicas = c->ranks / stages / s->shard_ranks;
    printf("  %d replicas x %d shards x %d context ranks x %d stages: %.0f ms, %.0f tokens/s of each GPU, %.1f GiB", replicas,
           s->shard_ranks / context, context, stages, 1e3 * x->seconds, x->speed, x->device / (1 << 30));
    if (x->host > 0)
        printf(", %.1f of its host", x->host / (1 << 30));
    printf("\n    ");
    if (replicas > 1)
        printf(" --fsdp.sharding_strategy=HYBRID_SHARD --fsdp.hybrid_sharding_num_model_replicas=%d", replicas);
    else
        printf(" --fsdp.sharding_strategy=FULL_SHARD");
    if (context > 1 || context_ranks(&c->strategy) > 1)
        printf(" --parallelism.context=%d", context);
    if (stages > 1 || pipeline_stages(&c->strategy) > 1)
        printf(" --parallelism.pipeline=%d", stages);
    if (tensor_ranks(&c->strategy) > 1)
        printf(" --parallelism.tensor=1");
    putchar('\n');
}

void mesh_search_print(const Config *c)
{
    Search search = { 0 };
    if (!plan_time_is_known(c))
        return;
    for (int stages = 1; stages <= c->ranks && stages <= c->model.n_layers; stages++)
        for (int shard = 1; c->ranks % stages == 0 && shard <= c->ranks / stages; shard++)
            for (int context = 1; c->ranks / stages % shard == 0 && context <= shard && context <= c->model.n_heads; context++)
                if (shard % context == 0)
                    try_mesh(&search, c, stages, shard, context);
    if (comm_rank() != 0)
        return;
    printf("meshes of %d ranks: %d fit, %d do not; the fastest, as predicted%s:\n", c->ranks, search.fit, search.exceed,
           c->ranks > PLAN_TIME_MEASURED_RANKS ? " (not measured beyond 2 GPUs)" : "");
    for (int i = 0; i < BEST && i < search.fit; i++)
        print_found(c, &search.best[i]);
    if (search.fit == 0)
        puts("  none; lower device_train_microbatch_size, or use a recipe that stores less (coat-lean, activations.keep=block)");
}
