#include "model/predict/mesh_search.h"

#include <stdio.h>
#include <stdlib.h>

#include "kernels/runtime/comm.h"
#include "model/config/check_tensor_ranks.h"
#include "model/predict/memory.h"
#include "model/predict/plan_time.h"

enum { BEST = 3 };

typedef struct {
    Strategy strategy;
    double speed, seconds, device, host;
} Found;

static bool tp_is_possible(const Config *c)
{
    char *refusal = check_tensor_ranks_refusal(c, c->ranks);
    free(refusal);
    return !refusal;
}

bool mesh_is_possible(const Config *c)
{
    enum { MULTIPLE = 16 }; /* for FP8, the number of a rank's tokens must be a multiple of this */
    const Strategy *s = &c->strategy;
    const ModelConfig *m = &c->model;
    const int context = context_ranks(s), stages = pipeline_stages(s), tensor = tensor_ranks(s),
              T = m->max_sequence_length;
    const int chunks = s->pipeline_chunks > 1 ? s->pipeline_chunks : 1, groups = c->ranks / tensor;
    if (c->ranks % tensor != 0 || groups % (context * stages) != 0 ||
        groups / stages % s->shard_ranks != 0 || s->shard_ranks % context != 0)
        return false;
    const long at_once = (long)data_ranks(s, c->ranks) * c->device_train_microbatch_size;
    if (c->global_train_batch_size % at_once != 0)
        return false;
    if (context > 1 && (!context_divides(m, context) || T % (MULTIPLE * context) != 0))
        return false;
    if (stages > 1 && (m->n_layers < stages * chunks || s->grad_sum == SUM_OFTEN ||
                       (chunks > 1 && c->global_train_batch_size / at_once % stages != 0)))
        return false;
    return tp_is_possible(c);
}

/* Keeps the list sorted by time, the fastest mesh first. */
static void add_found(Found best[BEST], Found x)
{
    for (int i = 0; i < BEST; i++)
        if (x.speed > best[i].speed) {
            const Found slower = best[i];
            best[i] = x;
            x = slower;
        }
}

typedef struct {
    int stages, shard, context, tensor;
} Sizes;

/* Returns the strategy that config/check_ranks.c would set. */
static Strategy strategy_of(const Config *c, Sizes n)
{
    Strategy s = c->strategy;
    s.pipeline_stages = n.stages;
    s.context_ranks = n.context;
    s.shard_ranks = n.shard;
    s.tensor_ranks = n.tensor;
    s.pipeline_chunks = n.stages > 1 ? s.pipeline_chunks : 1;
    s.pipeline_schedule = n.stages > 1 ? s.pipeline_schedule : PIPELINE_1F1B;
    s.gathering = n.stages > 1 && n.shard * n.tensor > 1               ? GATHER_ONCE
                  : n.stages == 1 && pipeline_stages(&c->strategy) > 1 ? GATHER_ONCE_IF_FITS
                                                                       : c->strategy.gathering;
    s.grad_sum = n.stages > 1                        ? SUM_ONCE
                 : pipeline_stages(&c->strategy) > 1 ? SUM_ONCE_IF_FITS
                                                     : c->strategy.grad_sum;
    return s;
}

typedef struct {
    Found best[BEST];
    int fit, exceed;
} Search;

static void try_mesh(Search *search, const Config *given, Sizes n)
{
    Config c = *given;
    Found x = { .strategy = strategy_of(given, n) };
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

static void try_all(Search *search, const Config *c)
{
    for (int tensor = 1; tensor <= c->ranks && tensor <= c->model.n_heads; tensor++) {
        const int groups = c->ranks / tensor;
        for (int stages = 1;
             c->ranks % tensor == 0 && stages <= groups && stages <= c->model.n_layers; stages++)
            for (int shard = 1; groups % stages == 0 && shard <= groups / stages; shard++)
                for (int context = 1; groups / stages % shard == 0 && context <= shard &&
                                      context <= c->model.n_heads;
                     context++)
                    if (shard % context == 0)
                        try_mesh(search, c, (Sizes){ stages, shard, context, tensor });
    }
}

/* Prints a setting if the mesh needs it, or if the configuration has another value. */
static void print_setting(const char *name, int n, int given)
{
    if (n > 1 || given > 1)
        printf(" --parallelism.%s=%d", name, n);
}

/* Prints the sharding strategy, and the number of replicas as settings of the configuration. */
static void print_replicas(const Strategy *s, int replicas)
{
    static const char *const names[2][2] = { { "FULL_SHARD", "SHARD_GRAD_OP" },
                                             { "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2" } };
    const bool keeps = s->gathering == GATHER_ONCE && pipeline_stages(s) == 1,
               hybrid = replicas > 1 && !s->by_mesh;
    printf(" --fsdp.sharding_strategy=%s", names[hybrid][keeps]);
    if (hybrid)
        printf(" --fsdp.hybrid_sharding_num_model_replicas=%d", replicas);
    if (s->by_mesh)
        printf(" --parallelism.replicate=%d --parallelism.shard=%d", replicas,
               s->shard_ranks / context_ranks(s));
}

static void print_found(const Config *c, const Found *x)
{
    const Strategy *s = &x->strategy;
    const int stages = pipeline_stages(s), context = context_ranks(s), tensor = tensor_ranks(s);
    const int replicas = c->ranks / stages / tensor / s->shard_ranks;
    printf("  %d replicas x %d shards x %d context ranks x %d tensor ranks x %d stages: %.0f ms, "
           "%.0f tokens/s of each GPU, "
           "%.1f GiB",
           replicas, s->shard_ranks / context, context, tensor, stages, 1e3 * x->seconds, x->speed,
           x->device / (1 << 30));
    if (x->host > 0)
        printf(", %.1f GiB of host memory", x->host / (1 << 30));
    printf("\n    ");
    print_replicas(s, replicas);
    print_setting("context", context, context_ranks(&c->strategy));
    print_setting("tensor", tensor, tensor_ranks(&c->strategy));
    print_setting("pipeline", stages, pipeline_stages(&c->strategy));
    putchar('\n');
}

void mesh_search_print(const Config *c)
{
    Search search = { 0 };
    if (!plan_time_is_known(c))
        return;
    try_all(&search, c);
    if (comm_rank() != 0)
        return;
    printf("meshes of %d ranks: %d fit, %d do not; the fastest, as predicted%s:\n", c->ranks,
           search.fit, search.exceed,
           c->ranks > PLAN_TIME_MEASURED_RANKS ? " (not measured beyond 2 GPUs)" : "");
    for (int i = 0; i < BEST && i < search.fit; i++)
        print_found(c, &search.best[i]);
    if (search.fit == 0)
        puts("  none; lower device_train_microbatch_size, or use a recipe that stores less "
             "(coat-lean, activations.keep=block)");
}
