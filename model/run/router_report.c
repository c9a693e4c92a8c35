#include "model/run/router_report.h"

#include <math.h>
#include <stdlib.h>

#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/block/experts.h"
#include "model/run/log.h"

double *router_sums(const Stream *s)
{
    const Tensor sums = s->router.sums;
    if (s->config->experts.count == 0)
        return NULL;
    const size_t count = tensor_numel(sums);
    float *own = xmalloc(sizeof *own * count);
    double *all = xmalloc(sizeof *all * count);
    device_get(own, sums.data, sizeof *own * count);
    /* context ranks have already added up their statistics */
    for (size_t i = 0; i < count; i++)
        all[i] = s->context_rank == 0 ? (double)own[i] : 0;
    comm_sum(all, (int)count);
    free(own);
    return all;
}

static json_t *counts_json(const double *sums, int L, int E)
{
    json_t *blocks = json_array();
    for (int l = 0; l < L; l++) {
        json_t *counts = json_array();
        for (int e = 0; e < E; e++)
            json_array_append_new(counts, json_integer((json_int_t)sums[l * (2 * E + 3) + e]));
        json_array_append_new(blocks, counts);
    }
    return blocks;
}

json_t *router_report(const Stream *s, const double *sums, bool detailed)
{
    const int L = s->L, E = s->config->experts.count, width = 2 * E + 3;
    double balance = 0, squares = 0, entropy = 0, tokens = 0, largest = 0;
    int idle = 0;
    if (!sums || comm_rank() != 0)
        return NULL;
    for (int l = 0; l <= L; l++)
        balance += sums[l * width + 2 * E + 2];
    for (int l = 0; l < L; l++) {
        const double *row = sums + l * width;
        double assignments = 0;
        for (int e = 0; e < E; e++)
            assignments += row[e], tokens += row[E + e];
        /* 0 assignments: backward ends above this block */
        for (int e = 0; e < E && assignments > 0; e++) {
            largest = fmax(largest, row[e] / assignments);
            idle += row[e] == 0;
        }
        squares += row[2 * E];
        entropy += row[2 * E + 1];
    }
    json_t *o = json_object();
    log_set(o, "router/LoadBalancingLoss", balance);
    log_set(o, "router/ZLoss", squares * (double)s->router.z);
    log_set(o, "router/entropy", entropy / fmax(tokens, 1));
    log_set(o, "router/largest_share", largest);
    json_object_set_new(o, "router/idle_experts", json_integer(idle));
    json_object_set_new(o, "router/dropped_tokens", json_integer(0));
    if (detailed)
        json_object_set_new(o, "router/tokens_per_expert", counts_json(sums, L, E));
    return o;
}

/* ---- the routers' bias ----------------------------------------------------------------------- */

void router_load_bias(Stream *s, const TrainState *t, const char *folder)
{
    const Experts *e = &s->config->experts;
    if (t->router_bias && e->bias_gamma == 0)
        warn("%s was trained with a bias of its routers, which this run leaves out: other experts "
             "compute some tokens. --model.bias_gamma=GAMMA uses the bias",
             folder);
    if (t->router_bias && e->bias_gamma > 0 && t->router_biases != s->L * e->count)
        die("%s/trainer.json: router_bias has %d numbers; expected %d, one for each expert of each "
            "block",
            folder, t->router_biases, s->L * e->count);
    experts_set_bias(s, t->router_bias);
}

void router_move_bias(Stream *s, TrainState *t, const double *sums)
{
    const int L = s->L, E = s->config->experts.count;
    const float gamma = (float)s->config->experts.bias_gamma;
    if (gamma == 0)
        return;
    if (!t->router_bias) {
        t->router_biases = L * E;
        t->router_bias = xcalloc((size_t)t->router_biases, sizeof *t->router_bias);
    }
    for (int l = 0; l < L; l++) {
        const double *count = sums + l * (2 * E + 3);
        double all = 0;
        for (int e = 0; e < E; e++)
            all += count[e];
        for (int e = 0; e < E; e++) { /* E count and all are whole numbers */
            const double above = E * count[e] - all;
            t->router_bias[l * E + e] += above > 0 ? -gamma : above < 0 ? gamma : 0;
        }
    }
    experts_set_bias(s, t->router_bias);
}
