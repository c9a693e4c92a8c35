/* Prints the stages of a pipeline. */
#include "model/predict/pipeline_plan.h"

#include <stdio.h>

#include "kernels/runtime/comm.h"
#include "model/model.h"
#include "model/plan_model.h"
#include "model/store/offload.h"
#include "model/predict/memory.h"
#include "model/shape/units.h"
#include "model/store/param_store_sizes.h"

static int in_flight(const Pipeline *p)
{
    int all = 0;
    for (int chunk = 0; chunk < p->chunks; chunk++)
        all += pipeline_in_flight(p, chunk);
    return all;
}

void pipeline_print(const ParamStore *store)
{
    const Pipeline *p = &store->pipe;
    static const char *const names[NUM_PIPELINE_SCHEDULES] = { "1F1B", "Interleaved1F1B",
                                                               "Sequential" };
    if (comm_rank() != 0 || p->stages == 1)
        return;
    printf("pipeline: %d stages", p->stages);
    if (!store->forward_only)
        printf(", %s", names[p->schedule]);
    if (p->chunks > 1)
        printf(" with %d virtual stages each", p->chunks);
    if (store->forward_only)
        puts("");
    else
        printf(", %d micro-batch%s a step; if all micro-batches take the same time, stages wait "
               "for each "
               "other %.1f %% of the time\n",
               p->micro_batches, p->micro_batches > 1 ? "es" : "", 100 * pipeline_bubble(p));
}

static void print_stage(const Config *c, const Model *m, const ParamStore *store)
{
    char first[UNIT_NAME], last[UNIT_NAME];
    printf("stage %d:", store->pipe.stage);
    for (int chunk = 0; chunk < store->pipe.chunks; chunk++) {
        const UnitRange units = pipeline_units(&store->pipe, &c->model, chunk);
        printf("%s %s", chunk ? "," : "", unit_name(&c->model, units.first, first));
        if (units.end > units.first + 1)
            printf(" to %s", unit_name(&c->model, units.end - 1, last));
    }
    if (c->model.weight_tying && m->has_head)
        printf(", which is %s", unit_name(&c->model, unit_of_head_matrix(&c->model), first));
    const int saved = m->text.forward_only ? 0 : in_flight(&store->pipe);
    if (saved > 0)
        printf("; activations of %d micro-batch%s%s", saved, saved > 1 ? "es" : "",
               store->pipe.chunks > 1 ? ", each in one virtual stage" : "");
    printf("; %.3f GiB", (double)model_planned_bytes(m, store) / (1 << 30));
    const size_t on_host = offload_host_bytes(m) + store_host_bytes(store, NUM_HOSTED);
    if (on_host > 0)
        printf(", on the host %.3f", (double)on_host / (1 << 30));
    putchar('\n');
}

int pipeline_print_stages(const Config *c)
{
    const int stages = pipeline_stages(&c->strategy);
    size_t most = 0;
    int largest = 0;
    for (int stage = 0; stage < stages && stages > 1; stage++) {
        Model m;
        ParamStore store;
        memory_plan_stage(&m, &store, c, stage);
        if (stage == 0)
            pipeline_print(&store);
        if (comm_rank() == 0)
            print_stage(c, &m, &store);
        const size_t bytes = model_planned_bytes(&m, &store);
        largest = bytes > most ? stage : largest;
        most = bytes > most ? bytes : most;
        model_free(&m, &store);
    }
    return largest;
}
