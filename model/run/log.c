/* The run's log. metrics.jsonl is the source of truth: one JSON object per step, with OLMo's metric names. */
#include "model/run/log.h"

#include <errno.h>
#include <limits.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "kernels/comm.h"
#include "kernels/device.h"
#include "kernels/clock.h"
#include "kernels/error.h"

enum { PLOT_WIDTH = 64, PLOT_HEIGHT = 12 };

struct Log {
    const Config *config;
    RunLength length;
    long    last_step;
    int     world;
    char   *path;
    FILE   *file;
    double  speed_of_light;
    double *time;              /* ring of speed_window + 1 step ends, seconds */
    long    steps;             /* logged by this process */
    double  start, paused;     /* paused: when log_pause was called */
    double *loss;              /* of every step of this process, where it was finite */
    long    losses, capacity, first_step;
    bool   *evaluated;         /* each evaluator, at first_step by an earlier process */
    bool    sampled;           /* whether an earlier process has written samples there */
    char   *from;              /* of a run that only evaluates: the folder that it loads; else NULL */
};

/* Keys that a token of block l sees, on average over a sequence of T: half of T, with a window w the ramp to it and then w. */
static double mean_keys(const ModelConfig *c, int l)
{
    const double T = c->max_sequence_length, w = layer_slides(c, l) && c->sliding_window < T ? c->sliding_window : T;
    return w * (1 - w / (2 * T));
}

/* Weights of a unit's matrices: all, and those that are trained. `trains`: whether anything in it is. */
typedef struct { double all, trained; bool trains; } UnitWeights;

static UnitWeights weights_of(const UnitShape *shape)
{
    UnitWeights w = { 0 };
    for (int i = 0; i < shape->num_params; i++) {
        const Param *p = &shape->param[i];
        const double n = p->is_norm ? 0 : (double)p->rows * p->cols;
        w.all += n;
        w.trained += p->region == TRAINED ? n : 0;
        w.trains |= p->region == TRAINED;
    }
    return w;
}

/* A weight takes 2 FLOPs forward, 2 for the gradient of its input, 2 for its own if it is trained; attention 2 products of the keys
 * forward and twice as many backward. Backward ends at the first unit that trains something. */
TokenFlops token_flops(const Config *c, const UnitShape *shape)
{
    const ModelConfig *m = &c->model;
    const int L = m->n_layers;
    const double HD = (double)m->n_heads * m->head_dim;
    TokenFlops f = { 0 };
    int first = 0;
    while (first <= L && !weights_of(&shape[first]).trains)
        first++;
    for (int l = 0; l < L; l++) {
        const UnitWeights w = weights_of(&shape[l + 1]);
        const bool backward = first <= l + 1;
        f.linear += 2 * (w.all + (backward ? w.all : 0) + w.trained);
        f.attention += (backward ? 12 : 4) * HD * mean_keys(m, l);
    }
    const UnitWeights head = weights_of(&shape[m->weight_tying ? 0 : L + 1]);
    f.head_forward = 2 * head.all;
    f.head = 2 * (head.all + (first <= L ? head.all : 0) + head.trained);
    return f;
}

static double speed_of_light(const Config *c, const UnitShape *shape)
{
    TokenFlops f = token_flops(c, shape);
    double operand = device_peak_flops(c->recipe.operand.dtype), stream = device_peak_flops(c->recipe.stream.dtype);
    if (operand <= 0 || stream <= 0)
        return 0;
    const double faster = format_is_fp8(c->recipe.head) ? 1 / stream - 1 / device_peak_flops(c->recipe.head.dtype) : 0;
    return 1 / (f.linear / operand + (f.head + f.attention) / stream - (f.head - f.head_forward) * faster);
}

/* The metric's name of an evaluator's loss or perplexity. */
static char *eval_name(const char *label, const char *what)
{
    return xasprintf("eval/%s/%s", label, what);
}

static char *downstream_name(const char *label, Metric m)
{
    return xasprintf("eval/downstream/%s_%s", label, metric_name(m));
}

/* A metric that each of its results has. */
static char *result_name(const EvalSet *set)
{
    return set->downstream ? downstream_name(set->label, METRIC_BPB) : eval_name(set->label, "CrossEntropyLoss");
}

static void mark_evaluated(Log *l, const char *line)
{
    json_t *o = json_loads(line, 0, NULL);
    for (int i = 0; i < l->config->num_eval; i++) {
        char *name = result_name(&l->config->eval[i]);
        l->evaluated[i] |= json_object_get(o, name) != NULL;
        free(name);
    }
    json_decref(o);
}

static bool has_samples(const char *line)
{
    json_t *o = json_loads(line, 0, NULL);
    const bool has = json_object_get(o, "samples") != NULL;
    json_decref(o);
    return has;
}

/* Drops what follows the lines of step `last`, -1: all lines, and a last line that a crash cut short. Lines that say no step stay.
 * Notes what the lines that stay have of evaluations and samples at `last`. */
static void drop_later_steps(Log *l, long last)
{
    FILE *in = fopen(l->path, "r");
    if (!in)
        return;
    char *line = NULL;
    size_t size = 0;
    long keep = 0, at = 0;
    ssize_t n;
    while ((n = getline(&line, &size, in)) > 0) {
        at += n;
        long step = 0;
        const bool says = sscanf(line, "{\"step\": %ld", &step) == 1;
        if (line[n - 1] != '\n' || step > last)
            break;
        keep = at;
        if (says && step == last) {
            mark_evaluated(l, line);
            l->sampled |= has_samples(line);
        }
    }
    free(line);
    fclose(in);
    if (keep < at && truncate(l->path, keep) != 0)
        die("%s: cannot drop the steps from %ld on: %s", l->path, last + 1, strerror(errno));
}

bool log_evaluated(const Log *l, int i)
{
    return l->evaluated[i];
}

bool log_sampled(const Log *l)
{
    return l->sampled;
}

/* Two processes in one folder would mix their steps and delete each other's checkpoints. Where the file system has no locks,
 * that is up to the user. The lock ends with the process. */
static void lock(FILE *file, const char *folder)
{
    if (flock(fileno(file), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
        die("another process trains in save_folder %s: wait for its end, or take another --save_folder", folder);
}

static void open_file(Log *l, const char *folder, const char *name)
{
    l->path = xasprintf("%s/%s", folder, name);
    l->file = fopen(l->path, "ae");
    if (!l->file)
        die("%s: cannot open for writing: %s", l->path, strerror(errno));
}

Log *log_open_eval(const Config *c, const char *from)
{
    if (comm_rank() != 0)
        return NULL;
    Log *l = xcalloc(1, sizeof *l);
    l->config = c;
    l->from = xstrdup(from);
    l->evaluated = xcalloc((size_t)c->num_eval, sizeof *l->evaluated);
    l->time = xcalloc((size_t)c->speed_window + 1, sizeof *l->time);
    if (c->save_folder) {
        open_file(l, c->save_folder, "eval.jsonl");
        drop_later_steps(l, LONG_MAX);
    }
    return l;
}

Log *log_open(const Config *c, const UnitShape *shape, RunLength length, long last_step, long first_step, bool resumes, int world)
{
    if (comm_rank() != 0)
        return NULL;
    Log *l = xcalloc(1, sizeof *l);
    l->config = c;
    l->length = length;
    l->last_step = last_step;
    l->world = world;
    l->first_step = first_step;
    l->evaluated = xcalloc((size_t)c->num_eval, sizeof *l->evaluated);
    l->speed_of_light = shape ? speed_of_light(c, shape) : 0;
    l->time = xcalloc(c->speed_window + 1, sizeof *l->time);
    l->time[0] = l->start = clock_seconds();
    open_file(l, c->save_folder, "metrics.jsonl");
    lock(l->file, c->save_folder);
    drop_later_steps(l, resumes ? first_step : -1);
    printf("each line: tokens per second%s%s, memory in use; all else is in %s\n", world > 1 ? " of a rank" : "",
           l->speed_of_light > 0 ? " and % of its peak" : "", l->path);
    return l;
}

void log_object(Log *l, json_t *object)
{
    if (!l) {
        json_decref(object);
        return;
    }
    json_object_set_new(object, "time", json_integer(time(NULL)));
    char *text = json_dumps(object, JSON_REAL_PRECISION(9));
    if (!text || fprintf(l->file, "%s\n", text) < 0 || fflush(l->file) != 0)
        die("%s: cannot write: %s; what is saved there stays as it is: make room, and start again", l->path, strerror(errno));
    free(text);
    json_decref(object);
}

/* JSON has no infinity. */
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
             snprintf(NULL, 0, "%ld", steps), s->step, steps, loss, s->grad_norm, s->lr, p->speed, light, p->memory / (1 << 30),
             end);
}

static void print_step(const Log *l, const StepStats *s, double speed)
{
    char line[256];
    const double per_step = (double)l->config->global_train_batch_size * l->config->model.max_sequence_length;
    const Progress p = { .speed = speed, .light = l->speed_of_light > 0 ? speed / l->speed_of_light : 0,
                         .memory = (double)device_memory_used(),
                         .seconds_left = (double)(l->last_step - s->step) * per_step / (speed * l->world) };
    log_line(line, sizeof line, s, l->length.steps, &p);
    puts(line);
    fflush(stdout);
}

static void write_step(Log *l, const StepStats *s, double speed)
{
    json_t *o = json_pack("{s:I}", "step", (json_int_t)s->step);
    log_set(o, "train/CrossEntropyLoss", s->loss);
    log_set(o, "train/Perplexity", exp(s->loss));
    if (l->config->z_loss > 0)
        log_set(o, "train/ZLoss", s->zloss * l->config->z_loss);
    json_object_set_new(o, "train/labels", json_integer(s->labels));
    log_set(o, "optim/total_grad_norm", s->grad_norm);
    log_set(o, "optim/clipping_rate", s->clip < 1);
    log_set(o, "optim/learning_rate_group0", s->lr);
    if (!isnan(s->scores.loss))
        log_set(o, "train/CrossEntropyLoss_z_score", s->scores.loss);
    if (!isnan(s->scores.grad_norm))
        log_set(o, "optim/total_grad_norm_z_score", s->scores.grad_norm);
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
    if (past == l->steps && past > 1)       /* a process's first step also chooses algorithms and grows buffers */
        past--;
    double before = l->time[(l->steps - past) % (window + 1)];
    l->time[l->steps % (window + 1)] = t;
    double tokens = (double)l->config->global_train_batch_size * l->config->model.max_sequence_length / l->world;
    double speed = past * tokens / (t - before);
    if (isfinite(s->loss))
        keep_loss(l, s->loss);
    write_step(l, s, speed);
    if (s->step % l->config->console_log_interval == 0 || s->step == l->last_step || l->steps == 1 || s->skipped)
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

/* A run that only evaluates may have no folder. */
static void write_eval(Log *l, json_t *o)
{
    if (l->file)
        log_object(l, o);
    else
        json_decref(o);
}

void log_eval(Log *l, long step, const EvalResult *r)
{
    if (!l)
        return;
    char *loss = eval_name(r->label, "CrossEntropyLoss"), *perplexity = eval_name(r->label, "Perplexity");
    json_t *o = eval_object(l, step);
    log_set(o, loss, r->loss);
    log_set(o, perplexity, exp(r->loss));
    write_eval(l, o);
    free(loss);
    free(perplexity);
    printf("eval at step %ld | %s | loss %.4f | perplexity %.4g | %ld labels\n", step, r->label, r->loss, exp(r->loss),
           r->labels);
    fflush(stdout);
}

/* On the terminal the metric that counts, and bits per byte. */
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
    write_eval(l, o);
}

static double mean(const double *x, long from, long to)
{
    double s = 0;
    for (long i = from; i < to; i++)
        s += x[i];
    return s / (to - from);
}

/* n losses of the steps first to last, each column the mean of its share of them. */
static void plot(const double *loss, long n, long first, long last)
{
    int width = n < PLOT_WIDTH ? (int)n : PLOT_WIDTH;
    double column[PLOT_WIDTH], low = INFINITY, high = -INFINITY;
    for (int i = 0; i < width; i++) {
        column[i] = mean(loss, n * i / width, n * (i + 1) / width);
        low = fmin(low, column[i]);
        high = fmax(high, column[i]);
    }
    if (high <= low)
        high = low + 1;
    for (int row = 0; row < PLOT_HEIGHT; row++) {
        printf("%8.3f |", high - (high - low) * row / (PLOT_HEIGHT - 1));
        for (int i = 0; i < width; i++)
            putchar((int)lround((high - column[i]) / (high - low) * (PLOT_HEIGHT - 1)) == row ? '*' : ' ');
        putchar('\n');
    }
    printf("%8s +%.*s\n%10ld%*ld\n", "loss", width, "----------------------------------------------------------------",
           first, width - 1, last);
}

void log_close(Log *l)
{
    if (!l)
        return;
    if (l->losses >= 2) {
        long tail = l->losses / 10 > 0 ? l->losses / 10 : 1;
        plot(l->loss, l->losses, l->first_step + 1, l->first_step + l->steps);
        printf("loss %.4f at the start, %.4f at the end (mean of the last %ld steps); %s\n", l->loss[0],
               mean(l->loss, l->losses - tail, l->losses), tail, l->path);
    }
    if (l->file)
        fclose(l->file);
    free(l->path);
    free(l->from);
    free(l->evaluated);
    free(l->time);
    free(l->loss);
    free(l);
}
