/* The run's log. The main output is metrics.jsonl: one JSON object per step, with OLMo's metric
 * names. */
#include "model/run/log.h"

#include <limits.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels/runtime/clock.h"
#include "kernels/runtime/comm.h"
#include "kernels/runtime/device.h"
#include "kernels/runtime/error.h"
#include "model/predict/flops.h"
#include "model/run/metrics.h"
#include "model/run/plot.h"

struct Log {
    const Config *config;
    RunLength length;
    long last_step;
    int world;
    Metrics metrics;
    double speed_of_light;
    double *time; /* ring buffer: end times of the last speed_window + 1 steps, in seconds */
    long steps;   /* number of steps that this process logged */
    double start, paused; /* time of the start in seconds; paused: time when log_pause was called */
    double *loss;         /* finite losses of this process's steps */
    long losses, capacity, first_step;
    char *from; /* with eval_only: the loaded folder; else NULL */
};

/* The name of an evaluator's metric: loss or perplexity. */
static char *eval_name(const char *label, const char *what)
{
    return xasprintf("eval/%s/%s", label, what);
}

static char *downstream_name(const char *label, Metric m)
{
    return xasprintf("eval/downstream/%s_%s", label, metric_name(m));
}

/* The name of a metric that each result of this set has. */
static char *result_name(const EvalSet *set)
{
    return set->downstream ? downstream_name(set->label, METRIC_BPB)
                           : eval_name(set->label, "CrossEntropyLoss");
}

bool log_evaluated(const Log *l, int i)
{
    char *name = result_name(&l->config->eval[i]);
    const bool found = json_object_get(l->metrics.there, name) != NULL;
    free(name);
    return found;
}

bool log_sampled(const Log *l)
{
    return json_object_get(l->metrics.there, "samples") != NULL;
}

Log *log_open_eval(const Config *c, const char *from)
{
    if (comm_rank() != 0)
        return NULL;
    Log *l = xcalloc(1, sizeof *l);
    *l = (Log){ .config = c,
                .from = xstrdup(from),
                .time = xcalloc((size_t)c->speed_window + 1, sizeof *l->time) };
    if (c->save_folder)
        l->metrics = metrics_open(c->save_folder, "eval.jsonl", LONG_MAX, false);
    return l;
}

Log *log_open(const Config *c, const UnitLayout *shape, RunLength length, long last_step,
              long first_step, bool resumes, int world)
{
    if (comm_rank() != 0)
        return NULL;
    Log *l = xcalloc(1, sizeof *l);
    *l = (Log){ .config = c,
                .length = length,
                .last_step = last_step,
                .world = world,
                .first_step = first_step,
                .speed_of_light = shape ? speed_of_light(c, shape) : 0,
                .start = clock_seconds(),
                .time = xcalloc((size_t)c->speed_window + 1, sizeof *l->time) };
    l->time[0] = l->start;
    l->metrics = metrics_open(c->save_folder, "metrics.jsonl", resumes ? first_step : -1, true);
    printf("folder: %s (config.yaml: all settings; metrics.jsonl: all values)\neach line: "
           "tokens/s%s%s, memory in use, time left\n",
           c->save_folder, world > 1 ? " of a rank" : "",
           l->speed_of_light > 0 ? " and % of its peak" : "");
    return l;
}

void log_object(Log *l, json_t *object)
{
    if (l)
        metrics_write(&l->metrics, object);
    else
        json_decref(object);
}

/* JSON has no infinity, so such values become null. */
void log_set(json_t *object, const char *name, double value)
{
    json_object_set_new(object, name, isfinite(value) ? json_real(value) : json_null());
}

static void format_time(char *text, size_t size, double seconds)
{
    long s = (long)(seconds + 0.5);
    if (s < 3600)
        snprintf(text, size, "%ldm%02lds", s / 60, s % 60);
    else if (s < 86400)
        snprintf(text, size, "%ldh%02ldm", s / 3600, s % 3600 / 60);
    else
        snprintf(text, size, "%ldd%02ldh", s / 86400, s % 86400 / 3600);
}

void log_line(char *line, size_t size, const StepStats *s, long steps, const Progress *p)
{
    char eta[64], light[32] = "", end[80] = "  SKIPPED", loss[64] = "no labels";
    format_time(eta, sizeof eta, p->seconds_left);
    if (!s->skipped)
        snprintf(end, sizeof end, "  eta %s", eta);
    if (p->light > 0)
        snprintf(light, sizeof light, " %.0f%%", 100 * p->light);
    if (s->labels > 0 || !s->finite)
        snprintf(loss, sizeof loss, "loss %.4f", s->loss);
    snprintf(line, size, "step %*ld/%ld  %s  norm %-6.3g  lr %.1e  %.0f tok/s%s  %.1f GiB%s",
             snprintf(NULL, 0, "%ld", steps), s->step, steps, loss, s->grad_norm, s->lr, p->speed,
             light, p->memory / (1 << 30), end);
}

static void print_step(const Log *l, const StepStats *s, double speed)
{
    char line[256];
    const Progress p = { .speed = speed,
                         .light = l->speed_of_light > 0 ? speed / l->speed_of_light : 0,
                         .memory = (double)device_memory_used(),
                         .seconds_left = schedule_tokens(l->config, s->step, l->last_step) /
                                         (speed * l->world) };
    log_line(line, sizeof line, s, l->length.steps, &p);
    puts(line);
    fflush(stdout);
}

/* Adds the share of each source of data.mix. */
static void set_mix(json_t *o, const Config *c, const uint32_t *share, long step)
{
    for (int i = 0; i < c->data.num_mix; i++) {
        char *name = xasprintf("data/mix/%s", c->data.mix[i].name);
        log_set(o, name, (double)share[i] / schedule_batch(c, step));
        free(name);
    }
}

/* Adds the means over pairs, with TRL's names. prefix: "", or the prefix of an evaluator's metrics.
 * */
static void set_pairs(json_t *o, const Config *c, const char *prefix, const double *sum)
{
    static const struct {
        const char *name;
        PairSum sum;
    } means[] = {
        { "rewards/chosen", PAIR_CHOSEN_REWARD },  { "rewards/rejected", PAIR_REJECTED_REWARD },
        { "rewards/accuracies", PAIR_ACCURACY },   { "logps/chosen", PAIR_CHOSEN_LOGPS },
        { "logps/rejected", PAIR_REJECTED_LOGPS },
    };
    char name[512];
    snprintf(name, sizeof name, "%spreference/loss", prefix);
    log_set(o, name, evaluate_pair_loss(sum, &c->preference));
    for (size_t i = 0; i < sizeof means / sizeof means[0]; i++) {
        snprintf(name, sizeof name, "%s%s", prefix, means[i].name);
        log_set(o, name, sum[means[i].sum] / sum[PAIR_COUNT]);
    }
    snprintf(name, sizeof name, "%srewards/margins", prefix);
    log_set(o, name, (sum[PAIR_CHOSEN_REWARD] - sum[PAIR_REJECTED_REWARD]) / sum[PAIR_COUNT]);
}

/* Adds means over the labels of a policy's documents. */
static void set_policy(json_t *o, const Config *c, double loss, const double *sum)
{
    static const struct {
        const char *name;
        PolicySum sum;
    } means[] = {
        { "policy/clip_low", POLICY_CLIPPED_LOW },
        { "policy/clip_high", POLICY_CLIPPED_HIGH },
        { "policy/ratio", POLICY_RATIO },
        { "policy/importance_weight", POLICY_IMPORTANCE },
        { "policy/entropy", POLICY_ENTROPY },
        { "policy/kl_old", POLICY_KL_OLD },
        { "policy/kl_reference", POLICY_KL_REFERENCE },
    };
    log_set(o, "policy/loss", loss);
    for (size_t i = 0; i < sizeof means / sizeof means[0]; i++)
        if (means[i].sum != POLICY_KL_REFERENCE || c->policy.beta > 0)
            log_set(o, means[i].name, sum[means[i].sum] / sum[POLICY_LABELS]);
    log_set(o, "policy/ratio_max", sum[POLICY_LARGEST_RATIO]);
}

static void write_step(Log *l, const StepStats *s, double speed)
{
    json_t *o = json_pack("{s:I}", "step", (json_int_t)s->step);
    log_set(o, "train/CrossEntropyLoss", s->cross_entropy);
    log_set(o, "train/Perplexity", exp(s->cross_entropy));
    if (s->pairs)
        set_pairs(o, l->config, "", s->pairs);
    if (s->policy)
        set_policy(o, l->config, s->loss, s->policy);
    if (l->config->distill.kind != DISTILL_NONE) {
        log_set(o, "distill/loss", s->loss);
        log_set(o, "distill/divergence", s->zloss);
    }
    if (l->config->z_loss > 0)
        log_set(o, "train/ZLoss", s->zloss * l->config->z_loss);
    json_object_set_new(o, "train/labels", json_integer(s->labels));
    if (l->config->batch_warmup.count > 0)
        json_object_set_new(o, "train/batch_size",
                            json_integer(schedule_batch(l->config, s->step)));
    if (l->config->length_warmup.steps > 0)
        json_object_set_new(o, "train/sequence_length",
                            json_integer(schedule_length(l->config, s->step)));
    set_mix(o, l->config, s->share, s->step);
    log_set(o, "optim/total_grad_norm", s->grad_norm);
    log_set(o, "optim/clipping_rate", s->clip < 1);
    log_set(o, "optim/learning_rate_group0", s->lr);
    if (!isnan(s->scores.loss))
        log_set(o, "train/CrossEntropyLoss_z_score", s->scores.loss);
    if (!isnan(s->scores.grad_norm))
        log_set(o, "optim/total_grad_norm_z_score", s->scores.grad_norm);
    json_object_update(o, s->router);
    json_decref(s->router);
    json_object_set_new(o, "optim/step_skipped", json_boolean(s->skipped));
    json_object_set_new(o, "throughput/total_tokens", json_integer(s->tokens));
    log_set(o, "throughput/device/tokens_per_second", speed);
    log_set(o, "throughput/device/seconds_total", clock_seconds() - l->start);
    if (l->speed_of_light > 0)
        log_set(o, "throughput/device/speed_of_light", speed / l->speed_of_light);
    if (l->world > 1)
        log_set(o, "throughput/device/exposed_communication_ms", s->exposed_ms);
    log_set(o, "System/Peak GPU Memory (MB)", device_memory_used() / 1e6);
    log_object(l, o);
}

static void keep_loss(Log *l, double loss)
{
    if (l->losses == l->capacity) {
        l->capacity = l->capacity ? 2 * l->capacity : 1024;
        l->loss = xrealloc(l->loss, sizeof *l->loss * l->capacity);
    }
    l->loss[l->losses++] = loss;
}

void log_step(Log *l, const StepStats *s)
{
    if (!l)
        return;
    int window = l->config->speed_window;
    double t = clock_seconds();
    l->steps++;
    long past = l->steps < window ? l->steps : window;
    /* the first step does not count: it also chooses algorithms and grows buffers */
    if (past == l->steps && past > 1)
        past--;
    double before = l->time[(l->steps - past) % (window + 1)];
    l->time[l->steps % (window + 1)] = t;
    const double tokens = schedule_tokens(l->config, s->step - past, s->step) / l->world,
                 speed = tokens / (t - before);
    if (isfinite(s->loss))
        keep_loss(l, s->loss);
    write_step(l, s, speed);
    if (s->step % l->config->console_log_interval == 0 || s->step == l->last_step ||
        l->steps == 1 || s->skipped)
        print_step(l, s, speed);
}

void log_pause(Log *l)
{
    if (l)
        l->paused = clock_seconds();
}

void log_resume(Log *l)
{
    if (!l)
        return;
    const double seconds = clock_seconds() - l->paused;
    for (int i = 0; i <= l->config->speed_window; i++)
        l->time[i] += seconds;
}

static json_t *eval_object(const Log *l, long step)
{
    json_t *o = json_pack("{s:I}", "step", (json_int_t)step);
    if (l->from)
        json_object_set_new(o, "load_path", json_string(l->from));
    return o;
}

void log_eval(Log *l, long step, const EvalResult *r)
{
    if (!l)
        return;
    char *loss = eval_name(r->label, "CrossEntropyLoss"),
         *perplexity = eval_name(r->label, "Perplexity");
    json_t *o = eval_object(l, step);
    log_set(o, loss, r->loss);
    log_set(o, perplexity, exp(r->loss));
    if (r->pairs[PAIR_COUNT] > 0) {
        char *prefix = eval_name(r->label, "");
        set_pairs(o, l->config, prefix, r->pairs);
        free(prefix);
    }
    log_object(l, o);
    free(loss);
    free(perplexity);
    printf("eval at step %ld | %s | loss %.4f | perplexity %.4g | %ld labels\n", step, r->label,
           r->loss, exp(r->loss), r->labels);
    if (r->pairs[PAIR_COUNT] > 0)
        printf("eval at step %ld | %s | preference loss %.4f | accuracy %.4f | %.0f pairs\n", step,
               r->label, evaluate_pair_loss(r->pairs, &l->config->preference),
               r->pairs[PAIR_ACCURACY] / r->pairs[PAIR_COUNT], r->pairs[PAIR_COUNT]);
    fflush(stdout);
}

/* Prints the task's own metric, and bits per byte. */
void log_downstream(Log *l, long step, const DownstreamResult *r)
{
    if (!l)
        return;
    json_t *o = eval_object(l, step);
    printf("eval at step %ld | %s", step, r->label);
    for (int m = 0; m < NUM_METRICS; m++) {
        if (r->metric == METRIC_BPB && m != METRIC_BPB && m != METRIC_BPB_V2)
            continue;
        char *name = downstream_name(r->label, (Metric)m);
        log_set(o, name, r->score[m]);
        free(name);
        if (m == (int)r->metric || m == METRIC_BPB)
            printf(" | %s %.4f", metric_name((Metric)m), r->score[m]);
    }
    printf(" | %d questions\n", r->questions);
    fflush(stdout);
    log_object(l, o);
}

void log_close(Log *l)
{
    if (!l)
        return;
    if (l->losses >= 2) {
        long tail = l->losses / 10 > 0 ? l->losses / 10 : 1;
        plot(l->loss, l->losses, l->first_step + 1, l->first_step + l->steps);
        printf("loss %.4f at the start, %.4f at the end (mean of the last %ld steps); %s\n",
               l->loss[0], plot_mean(l->loss, l->losses - tail, l->losses), tail, l->metrics.path);
    }
    metrics_close(&l->metrics);
    free(l->from);
    free(l->time);
    free(l->loss);
    free(l);
}
