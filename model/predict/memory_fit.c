/* The result of a dry run: compares the memory plan and an allowance with a device's memory. */
#include "model/predict/memory_fit.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>

#include "kernels/runtime/comm.h"
#include "model/model.h"
#include "kernels/runtime/agree.h"
#include "model/plan_model.h"
#include "model/predict/memory.h"

static const double GIB = 1 << 30;

/* Devices may differ, so the plan must fit every device. All ranks must call this. */
static double smallest_device(const Config *c)
{
    return agree_least(memory_of_device(c));
}

double memory_fit_needed(const Config *c)
{
    double most = 0;
    for (int stage = 0; stage < pipeline_stages(&c->strategy); stage++) {
        Model m;
        ParamStore store;
        memory_plan_stage(&m, &store, c, stage);
        most = fmax(most, (double)model_planned_bytes(&m, &store) + memory_allowance(c));
        model_free(&m, &store);
    }
    return most;
}

static bool fits_with(const Config *c, int sequences)
{
    Config other = *c;
    const long batch =
        (long)(c->global_train_batch_size / c->device_train_microbatch_size) * sequences;
    other.device_train_microbatch_size = sequences;
    /* the number of micro-batches in flight does not change */
    if (pipeline_stages(&c->strategy) > 1 && batch <= INT32_MAX)
        other.global_train_batch_size = (int)batch;
    return memory_fit_needed(&other) <= smallest_device(c);
}

static int sequences_of_rank(const Config *c)
{
    return c->global_train_batch_size / data_ranks(&c->strategy, c->ranks);
}

/* Memory grows with the micro-batch, so this uses binary search. */
static int largest_with(const Config *c)
{
    const int T = c->model.max_sequence_length, all = sequences_of_rank(c),
              most = all < INT32_MAX / T ? all : INT32_MAX / T;
    int fits = 0, first = 1, last = most;
    while (first <= last) {
        const int middle = first + (last - first) / 2;
        if (fits_with(c, middle)) {
            fits = middle;
            first = middle + 1;
        } else
            last = middle - 1;
    }
    return fits;
}

/* First tries without automatic offload and tiles, which is faster. If no micro-batch fits, offloads
 * everything that the configuration allows. */
int memory_fit_largest(const Config *c, bool *offloads)
{
    Config tried = *c;
    tried.tiled_mlp_tokens = c->tiled_mlp_tokens > 0 ? c->tiled_mlp_tokens : INT_MAX;
    HostUse *const use[] = { &tried.offload.activations, &tried.offload.frozen,
                             &tried.offload.optimizer, &tried.offload.master };
    for (int i = 0; i < 4; i++)
        *use[i] = *use[i] == HOST_AUTO ? HOST_NEVER : *use[i];
    int largest = largest_with(&tried);
    if (largest == 0) {
        tried = *c;
        largest = largest_with(c);
    }
    *offloads = false;
    for (int i = 0; i < 4; i++)
        *offloads |= *use[i] != HOST_NEVER;
    return largest;
}

/* Returns the least number of ranks, a power of two, on which one sequence fits if all of them share
 * one copy of the model, and the batch grows with their number; 0: none up to MOST. */
static int ranks_that_fit(const Config *c)
{
    enum { MOST = 1024 };
    for (int ranks = 2 * c->ranks; ranks <= MOST; ranks *= 2) {
        Config more = *c;
        more.ranks = more.strategy.shard_ranks = ranks;
        more.device_train_microbatch_size = 1;
        more.global_train_batch_size = ranks;
        if (memory_fit_needed(&more) <= smallest_device(c))
            return ranks;
    }
    return 0;
}

/* Only a dry run can plan for ranks that were not started. */
static void print_ranks(const Config *c)
{
    const Strategy *s = &c->strategy;
    const int ranks = !c->dry_run || context_ranks(s) * tensor_ranks(s) * pipeline_stages(s) > 1
                          ? 0
                          : ranks_that_fit(c);
    if (ranks > 0)
        printf("fits with one sequence on %d devices of %.1f GiB that share the model: --ranks=%d "
               "--device_train_microbatch_size=1\n",
               ranks, memory_of_device(c) / GIB, ranks);
}

static void print_largest(const Config *c, int largest, bool offloads)
{
    const int all = sequences_of_rank(c);
    int divisor = largest;
    while (divisor > 0 && all % divisor != 0)
        divisor--;
    if (largest == 0)
        puts("largest micro-batch that fits: none, not even one sequence; use more ranks, or a "
             "recipe that stores less (coat-lean, "
             "activations.keep=block)");
    else
        printf("largest micro-batch that fits %s CPU offload: %d sequence%s of %d tokens",
               offloads ? "with" : "without", largest, largest > 1 ? "s" : "",
               c->model.max_sequence_length);
    if (largest == all)
        puts(", all sequences of a rank in a step");
    else if (largest > 0)
        printf("; the largest that divides the %d sequences of a rank in a step: %d\n", all,
               divisor);
}

void memory_fit_print(const Config *c)
{
    const double bytes = memory_fit_needed(c), device = smallest_device(c);
    bool offloads = false;
    const int largest = c->generate ? 0 : memory_fit_largest(c, &offloads);
    if (comm_rank() != 0)
        return;
    if (!c->generate)
        print_largest(c, largest, offloads);
    if (!c->generate && largest == 0)
        print_ranks(c);
    printf("%s: %.1f of %.1f GiB", bytes <= device ? "fits" : "DOES NOT FIT", bytes / GIB,
           device / GIB);
    if (c->ranks > 1)
        printf(" on each of %d devices", c->ranks);
    if (memory_allowance(c) > 0)
        printf(", of which %.1f are for CUDA and its libraries", memory_allowance(c) / GIB);
    putchar('\n');
}
