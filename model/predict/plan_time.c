#include "model/predict/plan_time.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/runtime/error.h"
#include "model/predict/flops.h"
#include "model/predict/memory.h"
#include "model/shape/trainable.h"
#include "model/shape/units.h"

/* ---- a step ---------------------------------------------------------------------------------- */

static Topology topology_of(const Config *c)
{
    return (Topology){ memory_mesh(c), 0, c->gpus_per_host, c->internode_gb_per_s };
}

/* Predicts two steps: t[0] with `few` micro-batches, t[1] with `more`. */
static void two_steps(StepTime t[2], const Config *c, int few, int more)
{
    const int stages = pipeline_stages(&c->strategy), micro_batches[2] = { few, more };
    const Topology topology = topology_of(c);
    Rehearsal *r[2] = { xcalloc((size_t)stages, sizeof **r), xcalloc((size_t)stages, sizeof **r) };
    for (int stage = 0; stage < stages; stage++) {
        Rehearsal both[2];
        rehearse(both, micro_batches, 2, c, stage);
        r[0][stage] = both[0];
        r[1][stage] = both[1];
    }
    for (int i = 0; i < 2; i++) {
        t[i] = timeline_step(r[i], stages, &topology, &c->model);
        for (int stage = 0; stage < stages; stage++)
            rehearsal_free(&r[i][stage]);
        free(r[i]);
    }
}

/* Once all stages work, each round of as many micro-batches as there are stages takes the same
 * time. So the times of two short steps give the time of a long step by linear extrapolation. */
StepTime plan_time(const Config *c)
{
    const int n = rehearsal_micro_batches(c), round = pipeline_stages(&c->strategy),
              few = round == 1 ? 4 : 3 * round + n % round;
    const bool many = n > few + round;
    StepTime t[2];
    two_steps(t, c, many ? few : n, many ? few + round : n);
    const double times = many ? (double)(n - few) / round : 0;
    t->seconds += times * (t[1].seconds - t->seconds);
    for (Owner o = 0; o < NUM_OWNERS; o++)
        for (TimeUse u = 0; u < NUM_USES; u++)
            t->use[o][u] += times * (t[1].use[o][u] - t->use[o][u]);
    for (TimeUse u = 0; u < NUM_USES; u++)
        t->exposed[u] += times * (t[1].exposed[u] - t->exposed[u]);
    return *t;
}

bool plan_time_is_known(const Config *c)
{
    return !config_forward_only(c) && (c->internode_gb_per_s > 0 || c->ranks <= c->gpus_per_host);
}

double plan_time_speed(const Config *c, const StepTime *t)
{
    return (double)c->global_train_batch_size * c->model.max_sequence_length / c->ranks /
           t->seconds;
}

/* ---- what limits it -------------------------------------------------------------------------- */

/* The use of time that delays computation longest. */
static TimeUse longest(const StepTime *t)
{
    TimeUse most = USE_CONTEXT;
    for (TimeUse u = USE_CONTEXT; u <= USE_SEND; u++)
        most = t->exposed[u] > t->exposed[most] ? u : most;
    return most;
}

/* The ranks of a tensor group are adjacent; the tensor groups of a context group are adjacent. */
static char *advice_for_exchanges(const Config *c, TimeUse use, double percent)
{
    const int tensor = tensor_ranks(&c->strategy),
              ranks = use == USE_TENSOR ? tensor : tensor * context_ranks(&c->strategy);
    const char *name = use == USE_TENSOR || tensor >= c->gpus_per_host ? "tensor" : "context";
    if (ranks > c->gpus_per_host)
        return xasprintf("computation waits %.0f %% of the step, mostly for exchanges of %s ranks "
                         "between hosts: with a smaller parallelism.%s these ranks fit on one host "
                         "and do not use the network",
                         percent, use == USE_TENSOR ? "tensor" : "context", name);
    return xasprintf("computation waits %.0f %% of the step, mostly for exchanges of %s ranks: a "
                     "smaller parallelism.%s, with more shards instead where memory allows, "
                     "exchanges less",
                     percent, name, name);
}

/* With pipeline stages, weights are gathered and gradients are summed once per step, whatever
 * grad_sync_mode is. */
static char *advice_for_waiting(const Config *c, TimeUse use, double percent)
{
    const bool in_stages = pipeline_stages(&c->strategy) > 1;
    if (use == USE_HOST)
        return xasprintf("computation waits %.0f %% of the step, mostly for copies from and to the "
                         "host: a larger "
                         "global_train_batch_size updates less often, and more ranks or a smaller "
                         "device_train_microbatch_size leave more data on the device",
                         percent);
    if (use == USE_SEND)
        return xasprintf(
            "stages wait for each other %.0f %% of the step: more micro-batches (a larger "
            "global_train_batch_size or a smaller device_train_microbatch_size) or Interleaved1F1B "
            "shorten the waits",
            percent);
    if (use == USE_GATHER &&
        c->strategy.shard_ranks * tensor_ranks(&c->strategy) > c->gpus_per_host)
        return xasprintf("computation waits %.0f %% of the step, mostly for gathered weights: "
                         "HYBRID_SHARD with one replica per host gathers only inside hosts; a "
                         "larger %s gathers less often",
                         percent,
                         in_stages ? "global_train_batch_size" : "device_train_microbatch_size");
    if (use == USE_GATHER && !in_stages)
        return xasprintf(
            "computation waits %.0f %% of the step, mostly for gathered weights: a larger "
            "device_train_microbatch_size, or SHARD_GRAD_OP where memory allows, gathers less "
            "often",
            percent);
    if (use == USE_GATHER)
        return xasprintf("computation waits %.0f %% of the step, mostly for gathered weights: a "
                         "larger global_train_batch_size "
                         "gathers less often",
                         percent);
    if (use == USE_SUM)
        return xasprintf("computation waits %.0f %% of the step, mostly for sums of gradients: a "
                         "larger global_train_batch_size%s "
                         "sums less often",
                         percent,
                         in_stages || c->strategy.grad_sum == SUM_ONCE
                             ? ""
                             : ", or fsdp.grad_sync_mode batch where memory allows,");
    return advice_for_exchanges(c, use, percent);
}

char *plan_time_advice(const Config *c, const StepTime *t)
{
    enum { MUCH = 5 }; /* per cent of a step */
    const double update = 100 * t->use[OWNER_UPDATE][USE_COMPUTE] / t->seconds;
    double waits = 0;
    for (TimeUse u = USE_CONTEXT; u <= USE_SEND; u++)
        waits += 100 * t->exposed[u] / t->seconds;
    if (waits >= MUCH)
        return advice_for_waiting(c, longest(t), waits);
    if (update >= MUCH)
        return xasprintf("the optimizer takes %.0f %% of the step: a larger "
                         "global_train_batch_size updates less often",
                         update);
    return xasprintf(
        "computation takes %.0f %% of the step, so faster links would change little; a "
        "recipe that recomputes less, or FP8 GEMMs, computes less",
        100 * t->exposed[USE_COMPUTE] / t->seconds);
}

/* ---- words ----------------------------------------------------------------------------------- */

static void print_table(const Config *c, const StepTime *t)
{
    static const char *const uses[NUM_USES] = { "compute", "context", "tensor", "gather",
                                                "sum",     "host",    "send",   "waiting" };
    static const char *const owners[NUM_OWNERS] = { "embedding", "blocks", "head", "update" };
    printf("%-10s", "ms");
    for (TimeUse u = 0; u < NUM_USES; u++)
        printf("%10s", uses[u]);
    putchar('\n');
    for (Owner o = 0; o < NUM_OWNERS; o++) {
        printf("%-10s", owners[o]);
        for (TimeUse u = 0; u < NUM_USES; u++)
            printf("%10.1f", 1e3 * t->use[o][u]);
        putchar('\n');
    }
    if (pipeline_stages(&c->strategy) > 1)
        printf("(stage %d, which computes longest)\n", t->stage);
}

/* MFU: the predicted speed as a share of the speed at peak FLOP/s. Recomputation does not count. */
static double utilization(const Config *c, double speed)
{
    int count;
    HfTensor *tensors = hf_tensors_of(&c->model, &count);
    UnitLayout *shape = trainable_shapes(c, tensors, count);
    const double peak = speed_at_peak(c, shape, rates_peak);
    free(tensors);
    units_free(shape, unit_count(&c->model));
    return speed / peak;
}

static void print_step(const Config *c, const StepTime *t)
{
    const double speed = plan_time_speed(c, t);
    char *advice = plan_time_advice(c, t);
    printf("time of a step, predicted for H100s of 700 W%s:\n",
           c->ranks > PLAN_TIME_MEASURED_RANKS ? " (not measured beyond 2 GPUs)" : "");
    print_table(c, t);
    printf("predicted: %.0f ms a step, %.0f tokens/s of each GPU, %.1f %% of the speed at peak "
           "FLOP/s\n",
           1e3 * t->seconds, speed, 100 * utilization(c, speed));
    printf("limit: %s\n", advice);
    free(advice);
}

/* All ranks plan memory, since they must agree on the plan. */
void plan_time_print(const Config *c)
{
    if (plan_time_is_known(c)) {
        const StepTime t = plan_time(c);
        if (comm_rank() == 0)
            print_step(c, &t);
    } else if (comm_rank() == 0 && !config_forward_only(c))
        printf("time of a step: give --internode_gb_per_s, the GB/s of each GPU between hosts, to "
               "predict it "
               "for %d ranks on hosts of %d "
               "GPUs\n",
               c->ranks, c->gpus_per_host);
}
