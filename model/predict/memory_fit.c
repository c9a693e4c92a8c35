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

/* Chooses the format of gradients again, after a change of the batch or the ranks. */
static void choose_grads(Config *c)
{
    if (c->grads_by_terms)
        c->recipe.grads = gradient_terms(c, c->ranks) > MOST_BF16_TERMS
                              ? (Format){ F32, 0, false }
                              : recipe_find(c->recipe.name)->grads;
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
    choose_grads(&other);
    return memory_fit_needed(&other) <= smallest_device(c);
}

static int sequences_of_rank(const Config *c)
{
    return c->global_train_batch_size / data_ranks(&c->strategy, c->ranks);
}

/* The largest micro-batch of `first` to `last` sequences that fits; 0: none fits. Memory grows with
 * the micro-batch, so this uses binary search. */
static int largest_between(const Config *c, int first, int last)
{
    int fits = 0;
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

/* Small micro-batches may take more memory than larger ones, because a step then sums so many
 * gradients that they are in F32. So these are searched last. */
static int largest_with(const Config *c)
{
    const int T = c->model.max_sequence_length, all = sequences_of_rank(c),
              most = all < INT32_MAX / T ? all : INT32_MAX / T;
    Config other = *c;
    int few = 1; /* the smallest micro-batch whose gradients are not in F32 */
    for (; c->grads_by_terms && few <= most; few++) {
        other.device_train_microbatch_size = few;
        if (gradient_terms(&other, c->ranks) <= MOST_BF16_TERMS)
            break;
    }
    const int largest = largest_between(c, few, most);
    return largest > 0 ? largest : largest_between(c, 1, few - 1);
}

/* The largest micro-batch without tiles, and without offload except where the configuration
 * demands it. */
static int largest_on_device(const Config *c)
{
    Config all = *c;
    all.tiled_mlp_tokens = c->tiled_mlp_tokens > 0 ? c->tiled_mlp_tokens : INT_MAX;
    HostUse *const use[] = { &all.offload.activations, &all.offload.frozen, &all.offload.optimizer,
                             &all.offload.master };
    for (int i = 0; i < 4; i++)
        *use[i] = *use[i] == HOST_AUTO ? HOST_NEVER : *use[i];
    return largest_with(&all);
}

/* First tries without offload, because offload slows a step. If no micro-batch fits, offloads
 * everything that the configuration allows. */
int memory_fit_largest(const Config *c)
{
    const int largest = largest_on_device(c);
    return largest > 0 ? largest : largest_with(c);
}

/* Returns the least number of ranks, a power of two, on which one sequence fits if all of them share
 * one copy of the model, and the batch grows with their number. 0: none up to MOST, or this is no
 * dry run, or ranks divide the model in another way than by shards. */
static int ranks_that_fit(const Config *c)
{
    enum { MOST = 1024 };
    const Strategy *s = &c->strategy;
    if (!c->dry_run || context_ranks(s) * tensor_ranks(s) * pipeline_stages(s) > 1)
        return 0;
    for (int ranks = 2 * c->ranks; ranks <= MOST; ranks *= 2) {
        Config more = *c;
        more.ranks = more.strategy.shard_ranks = ranks;
        more.device_train_microbatch_size = 1;
        more.global_train_batch_size = ranks;
        choose_grads(&more);
        if (memory_fit_needed(&more) <= smallest_device(c))
            return ranks;
    }
    return 0;
}

/* Says whether the largest micro-batch needs offload, if the configuration leaves this open.
 * on_device: the largest micro-batch without it. */
static const char *offload_words(const Config *c, int on_device)
{
    const HostUse use[] = { c->offload.activations, c->offload.frozen, c->offload.optimizer,
                            c->offload.master };
    bool open = false, demanded = false;
    for (int i = 0; i < 4; i++) {
        open |= use[i] == HOST_AUTO;
        demanded |= use[i] == HOST_ALL;
    }
    return !open || demanded ? "" : on_device > 0 ? " without CPU offload" : " with CPU offload";
}

static void print_largest(const Config *c, int largest, const char *offload)
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
        printf("largest micro-batch that fits: %d sequence%s of %d tokens%s", largest,
               largest > 1 ? "s" : "", c->model.max_sequence_length, offload);
    if (largest == all)
        puts(", all sequences of a rank in a step");
    else if (largest > 0)
        printf("; the largest that divides the %d sequences of a rank in a step: %d\n", all,
               divisor);
}

/* All ranks plan, because they must agree; then rank 0 prints. */
void memory_fit_print(const Config *c)
{
    const double bytes = memory_fit_needed(c), device = smallest_device(c);
    const int on_device = c->generate ? 0 : largest_on_device(c),
              largest = c->generate || on_device > 0 ? on_device : largest_with(c),
              ranks = c->generate || largest > 0 ? 0 : ranks_that_fit(c);
    if (comm_rank() != 0)
        return;
    if (!c->generate)
        print_largest(c, largest, offload_words(c, on_device));
    if (ranks > 0)
        printf("fits with one sequence on %d devices of %.1f GiB that share the model: --ranks=%d "
               "--device_train_microbatch_size=1\n",
               ranks, device / GIB, ranks);
    printf("%s: %.1f of %.1f GiB", bytes <= device ? "fits" : "DOES NOT FIT", bytes / GIB,
           device / GIB);
    if (c->ranks > 1)
        printf(" on each of %d devices", c->ranks);
    if (memory_allowance(c) > 0)
        printf(", of which %.1f are for CUDA and its libraries", memory_allowance(c) / GIB);
    putchar('\n');
}
