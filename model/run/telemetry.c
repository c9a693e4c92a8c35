/* Samples of device memory, decoded on the host and compared with their values before rounding
 * (their source).
 *
 * An activation is measured after its block has run. A block reuses some memory, so not every
 * source still exists:
 *   always: attn_x of a pre-norm block (source: the block's input, fetched before it ran), mlp_x of OLMo-2 (the branch
 *     output), attn_saved (attn_out), attn_operand (attn_saved), and gate_up_saved (gate_up_raw) unless an adapter's part is
 *     added to gate_up_raw while it is read; gate_up_raw is always written in the step's first micro-batch, which is measured
 *     here;
 *   recomputed in double from the stored norm input, gate and up: the norm outputs attn_h and mlp_h, and act;
 *   only if the source has memory of its own: other attn_x and mlp_x, h of OLMo-2 and qkv.
 * Without a source there is no error, and underflow is the share of all codes that are 0.
 *
 * Adam's moments are measured before the optimizer runs: the next m and v are computed in double
 * from the stored m and v and the gradient, and rounded by the code of the CPU back end. States of
 * other optimizers are measured without a source. */
#include "model/run/telemetry.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/fp8.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/run/outliers.h"
#include "model/run/quant_stats.h"
#include "model/parallel/tensor_ranks.h"
#include "model/shape/units.h"
#include "model/store/param_store_sizes.h"

enum { ROWS = 64, GROUPS = 64 };

struct Telemetry {
    /* whether this rank measures: the first rank of each stage, and the ranks of its tensor
     * group */
    bool measures;
    const Config *config;
    Model *model;
    const ParamStore *store;
    Log *log;
    json_t *line;   /* the line of this step; NULL: no line is due */
    double *input;  /* (rows, C): input of the next block */
    long step;      /* number of the step that is measured */
    bool *warned;   /* [blocks]: see outliers_watch */
    bool *measured; /* [units] whether the unit was measured in this step */
};

static void set(Telemetry *t, const char *kind, const char *where, const char *statistic,
                double value)
{
    char name[128];
    snprintf(name, sizeof name, "quant/%s/%s/%s", kind, where, statistic);
    log_set(t->line, name, value);
}

static void set_stats(Telemetry *t, const char *kind, const char *where, const Stats *s,
                      bool expanded)
{
    set(t, kind, where, "dynamic_range", exp2(s->log_range / s->groups));
    if (expanded) {
        set(t, kind, where, "dynamic_range_expanded", exp2(s->log_range_expanded / s->groups));
        set(t, kind, where, "k", s->k / s->groups);
    }
    set(t, kind, where, "underflow", s->zeros / s->values);
    set(t, kind, where, "saturation", s->largest / s->values);
    if (s->tensors > 0)
        set(t, kind, where, "error", stats_error(s));
}

/* ---- activations ----------------------------------------------------------------------------- */

static size_t measured_rows(const Model *m)
{
    return m->text.N < ROWS ? (size_t)m->text.N : ROWS;
}

static double *first_rows(const Telemetry *t, Tensor x)
{
    return fetch_values(x, 0, measured_rows(t->model) * (size_t)x.cols);
}

/* LOST: the codes were overwritten, but not their scale. CUT: each tensor rank has some of the
 * columns. */
enum { LOST = 1, CUT = 2 };

/* Takes ownership of `exact`, which may be NULL. */
static void activation(Telemetry *t, const char *kind, int block, Tensor stored, double *exact,
                       int how)
{
    if (format_is_fp8(stored.format)) {
        char where[16];
        Stats s = { 0 };
        Elements q = elements_fetch(stored, 0, measured_rows(t->model) * (size_t)stored.cols);
        if (how & LOST)
            elements_replace(&q, exact);
        sample_without_factors(&q, stored);
        snprintf(where, sizeof where, "%d", block);
        stats_add(&s, q, exact);
        if (how & CUT)
            stats_sum(&s, RANKS_TENSOR);
        set_stats(t, kind, where, &s, false);
        elements_free(&q);
    }
    free(exact);
}

/* Computes (x - mean) rstd w from the stored x. */
static double *norm_output(const Telemetry *t, Tensor x, const float *stats, Tensor w)
{
    size_t rows = measured_rows(t->model), C = (size_t)x.cols;
    float *row = xmalloc(2 * rows * sizeof *row);
    double *y = first_rows(t, x), *weight = w.data ? fetch_values(w, 0, C) : NULL;
    device_get(row, stats, 2 * rows * sizeof *row);
    for (size_t i = 0; i < rows * C; i++)
        y[i] = (y[i] - row[i / C * 2]) * row[i / C * 2 + 1] * (weight ? weight[i % C] : 1);
    free(weight);
    free(row);
    return y;
}

/* Computes silu(gate) * up from the stored gate and up. */
static double *swiglu_output(const Telemetry *t, Tensor gate_up)
{
    size_t rows = measured_rows(t->model), F = (size_t)gate_up.cols / 2;
    double *x = first_rows(t, gate_up), *y = xmalloc(rows * F * sizeof *y);
    for (size_t i = 0; i < rows * F; i++) {
        double gate = x[i / F * 2 * F + i % F], up = x[i / F * 2 * F + F + i % F];
        y[i] = gate / (1 + exp(-gate)) * up;
    }
    free(x);
    return y;
}

/* Multiplies each row of act, which experts compute, by the weight of its assignment. */
static void multiply_by_weights(double *act, const Routing *r, size_t rows, size_t F)
{
    const size_t count = (size_t)r->tokens * (size_t)r->top_k;
    int *assignment = xmalloc(rows * sizeof *assignment);
    float *weight = xmalloc(count * sizeof *weight);
    device_get(assignment, r->assignment, rows * sizeof *assignment);
    device_get(weight, r->weight, count * sizeof *weight);
    for (size_t i = 0; i < rows * F; i++)
        act[i] *= assignment[i / F] >= 0 ? (double)weight[assignment[i / F]] : 0;
    free(weight);
    free(assignment);
}

/* Measures the outliers of act, whatever its format is. */
static void measure_outliers(Telemetry *t, int l, Tensor stored, const double *act)
{
    const size_t rows = measured_rows(t->model), F = (size_t)stored.cols;
    double most = 0;
    for (size_t i = 0; i < rows * F; i++)
        most = fmax(most, fabs(act[i]));
    if (format_is_fp8(stored.format)) {
        float scale;
        device_get(&scale, stored.scale, sizeof scale);
        most = scale * fp8_max(stored.format.dtype);
    }
    const OutlierStats s = outliers_measure(act, rows, F, most, RANKS_TENSOR);
    char where[16];
    snprintf(where, sizeof where, "%d", l);
    set(t, "act", where, "kurtosis", s.kurtosis);
    set(t, "act", where, "largest_channel", s.largest_channel);
}

static void measure_block(Telemetry *t, int l, const UnitTensors *w)
{
    const Acts *a = &t->model->acts[l];
    const int h0 = a->attn_h.data == a->mlp_h.data ? LOST : 0;
    double *input = t->input,
           *middle = a->mlp_res.data == a[1].attn_res.data ? NULL : first_rows(t, a->mlp_res);
    t->input = NULL;
    if (t->config->model.norm_after) {
        const bool sums = t->model->text.tensor_ranks > 1; /* both branches use the same memory */
        activation(t, "x0", l, a->attn_x,
                   sums || a->attn_branch.data == a->mlp_branch.data
                       ? NULL
                       : first_rows(t, a->attn_branch),
                   0);
        activation(t, "x1", l, a->mlp_x,
                   first_rows(t, sums ? own_rows(&t->model->text, t->model->text.work.partial)
                                      : a->mlp_branch),
                   0);
        activation(t, "h0", l, a->attn_h, input, h0);
        activation(t, "h1", l, a->mlp_h, middle, 0);
    } else {
        activation(t, "x0", l, a->attn_x, input, 0);
        activation(t, "x1", l, a->mlp_x, middle, 0);
        activation(t, "h0", l, a->attn_h, norm_output(t, a->attn_x, a->attn_stats, w->attn_norm),
                   h0);
        activation(t, "h1", l, a->mlp_h, norm_output(t, a->mlp_x, a->mlp_stats, w->mlp_norm), 0);
    }
    activation(t, "qkv", l, a->qkv_saved,
               a->qkv_raw.data == a->qkv_rotated.data ? NULL : first_rows(t, a->qkv_raw), CUT);
    activation(t, "att", l, a->attn_saved, first_rows(t, a->attn_out), CUT);
    activation(t, "att_op", l, a->attn_operand, first_rows(t, a->attn_saved), CUT);
    activation(t, "gate_up", l, a->gate_up_saved,
               a->xa_gate_up.data ? NULL : first_rows(t, a->gate_up_raw), CUT);
    double *act = swiglu_output(t, a->gate_up_saved);
    if (t->config->model.experts.count > 0)
        multiply_by_weights(act, &a->experts, measured_rows(t->model),
                            (size_t)a->swiglu_operand.cols);
    measure_outliers(t, l, a->swiglu_operand, act);
    activation(t, "act", l, a->swiglu_operand, act, CUT);
}

static void observe(void *observer, int unit, const UnitTensors *w)
{
    Telemetry *t = observer;
    Model *m = t->model;
    const UnitLayout *shape = t->store->shape;
    if (w && !t->measured[unit] && shape[unit].kind->is_layer)
        measure_block(t, shape[unit].number, w);
    t->measured[unit] |= w != NULL;
    if (shape[unit + 1].kind->is_layer && !t->measured[unit + 1]) {
        free(t->input);
        t->input = first_rows(t, m->unit_acts[unit + 1].attn_res);
    } else if (unit + 2 == t->store->num_units)
        m->observe = NULL; /* one micro-batch is enough, so the observer is removed */
}

/* ---- optimizer ------------------------------------------------------------------------------- */

/* The next moments of a sample before rounding, and the direction of the update. */
typedef struct {
    size_t n;
    double *moment[2], *update;
    double eps, correction[2];
} Next;

static double direction(const Next *x, double m, double v)
{
    return m / x->correction[0] / (sqrt(v / x->correction[1]) + x->eps);
}

/* Computes the next moments of n elements from `first` on. Hyper-parameters are rounded to float,
 * as in the kernel. */
static Next next_moments(const Telemetry *t, const Shard *s, size_t first, size_t n,
                         double grad_scale)
{
    const Config *c = t->config;
    const double update = (double)t->store->counts.updates + 1;
    const double beta[2] = { (float)c->optimizer.beta1, (float)c->optimizer.beta2 };
    Next x = {
        .n = n,
        .moment = { fetch_values(s->state[0], first, n), fetch_values(s->state[1], first, n) },
        .update = fetch_values(s->grad, first, n),
        .eps = (float)c->optimizer.eps,
        .correction = { 1 - pow(c->optimizer.beta1, update), 1 - pow(c->optimizer.beta2, update) }
    };
    double *m = x.moment[0], *v = x.moment[1];
    for (size_t i = 0; i < n; i++) {
        double g = (float)grad_scale * x.update[i];
        m[i] = beta[0] * m[i] + (1 - beta[0]) * g;
        v[i] = beta[1] * v[i] + (1 - beta[1]) * g * g;
        x.update[i] = direction(&x, m[i], v[i]);
    }
    return x;
}

static void next_free(Next *x)
{
    free(x->moment[0]), free(x->moment[1]), free(x->update);
}

static void add_update(Stats *st, const Next *x, Elements m, Elements v)
{
    float *u = xmalloc(x->n * sizeof *u);
    for (size_t i = 0; i < x->n; i++)
        u[i] = (float)direction(x, m.x[i], v.x[i]);
    stats_add_error(st, u, x->update, x->n);
    free(u);
}

/* Returns the number of elements in a parameter's sample: up to GROUPS whole groups of this rank's
 * slice; 0 for norms and biases, and for frozen parameters, which have neither states nor
 * gradient. */
static size_t sample_size(const Shard *s, const Param *p, size_t *first)
{
    size_t group = MOMENT_GROUP, in_param, n = shard_part(s, p, &in_param);
    for (int i = 0; i < MAX_STATES; i++)
        group = (size_t)s->state[i].format.group > group ? (size_t)s->state[i].format.group : group;
    if (p->is_vector || p->region != TRAINED || n == 0)
        return 0;
    *first = p->offset + in_param - s->slice[TRAINED].first;
    size_t most = GROUPS * MOMENT_GROUP > group ? GROUPS * MOMENT_GROUP : group;
    return (n < most ? n : most) / group * group;
}

/* Returns the name of a unit in metrics. */
static const char *unit_label(const UnitLayout *shape, char number[16])
{
    snprintf(number, 16, "%d", shape->number);
    return shape->kind->is_layer ? number : shape->kind->name;
}

static void measure_states(Telemetry *t, int u)
{
    const Shard *s = &t->store->shard[u];
    const Optimizer *o = t->store->optimizer;
    char number[16];
    for (int k = 0; k < o->num_states; k++) {
        Stats stats = { 0 };
        for (int i = 0; i < t->store->shape[u].num_params; i++) {
            size_t first = 0, n = sample_size(s, &t->store->shape[u].param[i], &first);
            const StateOf none =
                t->store->shape[u].param[i].is_operand ? STATE_OF_OTHERS : STATE_OF_MATRICES;
            if (n == 0 || o->state[k].of == none)
                continue;
            Elements q = elements_fetch(s->state[k], first - s->before[k], n);
            stats_add(&stats, q, NULL);
            elements_free(&q);
        }
        if (stats.values > 0)
            set_stats(t, o->state[k].label, unit_label(&t->store->shape[u], number), &stats,
                      s->state[k].format.expand);
    }
}

static void measure_moments(Telemetry *t, int u, double grad_scale)
{
    const Shard *s = &t->store->shard[u];
    const Format own[2] = { s->state[0].format, s->state[1].format };
    char number[16];
    Stats moment[2] = { 0 }, direction = { 0 };
    for (int i = 0; i < t->store->shape[u].num_params; i++) {
        size_t first = 0, n = sample_size(s, &t->store->shape[u].param[i], &first);
        if (n == 0)
            continue;
        Next x = next_moments(t, s, first, n, grad_scale);
        Elements q[2] = { elements_round(x.moment[0], n, own[0]),
                          elements_round(x.moment[1], n, own[1]) };
        for (int j = 0; j < 2; j++)
            stats_add(&moment[j], q[j], x.moment[j]);
        add_update(&direction, &x, q[0], q[1]);
        elements_free(&q[0]), elements_free(&q[1]);
        next_free(&x);
    }
    if (moment[0].tensors == 0)
        return;
    const char *unit = unit_label(&t->store->shape[u], number);
    for (int j = 0; j < 2; j++)
        set_stats(t, t->store->optimizer->state[j].label, unit, &moment[j], own[j].expand);
    set(t, "update", unit, "error", stats_error(&direction));
}

/* ---- stages ---------------------------------------------------------------------------------- */

/* line: the line of each stage, at most `size` bytes. */
static void join_lines(Telemetry *t, const char *line, size_t size)
{
    for (int stage = 1; stage < t->store->pipe.stages; stage++) {
        json_t *values = json_loads(line + (size_t)stage * size, 0, NULL);
        CHECK(values, "the statistics of stage %d cannot be read", stage);
        json_object_update(t->line, values);
        json_decref(values);
    }
}

/* Sends the measurements of all stages to the first stage. */
static void gather_stages(Telemetry *t)
{
    const size_t stages = (size_t)t->store->pipe.stages;
    char *own = json_dumps(t->line, JSON_COMPACT);
    const size_t length = strlen(own) + 1;
    size_t *lengths = xmalloc(stages * sizeof *lengths), most = 0;
    comm_gather(lengths, &length, sizeof length, RANKS_PIPELINE);
    for (size_t i = 0; i < stages; i++)
        most = lengths[i] > most ? lengths[i] : most;
    char *padded = xcalloc(most, 1), *lines = xmalloc(stages * most);
    memcpy(padded, own, length);
    comm_gather(lines, padded, most, RANKS_PIPELINE);
    if (t->log)
        join_lines(t, lines, most);
    free(own), free(lengths), free(padded), free(lines);
}

/* ---- the run --------------------------------------------------------------------------------- */

Telemetry *telemetry_open(const Config *c, Model *m, const ParamStore *store, Log *log)
{
    const int stages = store->pipe.stages, in_stage = comm_rank() % (comm_size() / stages);
    if (c->quant_stats_interval == 0 || (in_stage >= store->tensor_ranks && stages == 1))
        return NULL;
    Telemetry *t = xcalloc(1, sizeof *t);
    *t = (Telemetry){ .config = c,
                      .model = m,
                      .store = store,
                      .log = log,
                      .warned = xcalloc((size_t)m->text.L, sizeof *t->warned),
                      .measured = xcalloc((size_t)store->num_units, sizeof *t->measured),
                      .measures = in_stage < store->tensor_ranks };
    return t;
}

void telemetry_close(Telemetry *t)
{
    if (!t)
        return;
    json_decref(t->line);
    free(t->warned);
    free(t->measured);
    free(t->input);
    free(t);
}

void telemetry_watch(Telemetry *t, long step)
{
    if (!t)
        return;
    json_decref(t->line); /* a line remains if its step was skipped */
    t->line = NULL;
    t->model->observe = NULL;
    if (step % t->config->quant_stats_interval != 0)
        return;
    t->step = step;
    t->line = json_pack("{s:I}", "step", (json_int_t)step);
    memset(t->measured, 0, sizeof *t->measured * (size_t)t->store->num_units);
    t->model->observe = t->measures ? observe : NULL;
    t->model->observer = t;
}

void telemetry_write(Telemetry *t, double grad_scale)
{
    if (!t || !t->line)
        return;
    const ParamStore *store = t->store;
    for (int u = 0; u < store->num_units && t->measures && store->tensor_rank == 0; u++) {
        if (pipeline_stage_of(&store->pipe, t->model->text.config, u) != store->pipe.stage)
            continue;
        if (store->optimizer->is_adam)
            measure_moments(t, u, grad_scale);
        else
            measure_states(t, u);
    }
    if (store->pipe.stages > 1)
        gather_stages(t);
    if (t->log) /* only rank 0, which now has the measurements of all stages */
        outliers_watch_line(t->warned, t->step, t->config->model.n_layers, t->line,
                            &t->model->text.recipe, t->config->model.lora.rank > 0);
    log_object(t->log, t->line);
    t->line = NULL;
}
