/* A small model of one rank that trains with quantization statistics in each step, and the last
 * line of its metrics.jsonl. */
#pragma once
#include "tests/kit.h"

#include <jansson.h>

#include "model/run/log.h"
#include "model/run/telemetry.h"
#include "model/update/update.h"
#include "tests/models.h"

enum { B = 4, MAX_TOKENS = 128 };

static char measured_folder[] = "/tmp/coat-telemetry-XXXXXX";

/* A run of one rank with statistics in every step. line: the last line of metrics.jsonl. */
typedef struct {
    Config config;
    Model model;
    ParamStore store;
    Log *log;
    Telemetry *telemetry;
    json_t *line;
    long step;
    bool apart; /* each buffer has separate memory, so that all values can be read */
} Small;

static inline void small_open(Small *s, SmallModel a, const char *recipe)
{
    static ModelConfig m;
    *s = (Small){ 0 };
    m = architecture(a);
    m.d_model = 128; /* a multiple of 16, as FP8 GEMMs need */
    m.head_dim = 32;
    m.mlp_width = 256;
    model_config(&s->config, &m, recipe, B);
    /* so that a test can compute operands from saved tensors, bit for bit */
    s->config.recipe.forward = FROM_SAVED;
    s->config.save_folder = measured_folder;
    s->config.quant_stats_interval = 1;
}

static inline void small_start(Small *s)
{
    (s->apart ? model_create_apart : model_create)(&s->model, &s->store, &s->config);
    store_init(&s->store, &s->config.model, 3);
    s->log = log_open(&s->config, s->store.shape, (RunLength){ .steps = 10 }, 10, 0, false, 1);
    s->telemetry = telemetry_open(&s->config, &s->model, &s->store, s->log);
}

static inline json_t *last_line(void)
{
    char path[64], line[1 << 16];
    json_t *o = NULL;
    snprintf(path, sizeof path, "%s/metrics.jsonl", measured_folder);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f)) {
        json_decref(o);
        o = json_loads(line, 0, NULL);
        assert_non_null(o);
    }
    fclose(f);
    return o;
}

/* Runs forward or, if `backward`, forward and backward, and reads the line of statistics. The
 * caller runs the optimizer. */
static inline void small_step(Small *s, bool backward)
{
    int tokens[MAX_TOKENS], targets[MAX_TOKENS], N = s->model.text.N;
    s->step++;
    for (int n = 0; n < N; n++)
        tokens[n] = test_token((uint64_t)s->step, (uint64_t)n, s->config.model.vocab_size);
    for (int n = 0; n < N; n++)
        targets[n] = (n + 1) % s->model.text.attn.T ? tokens[n + 1] : -1;
    fsdp_empty_grads(&s->store);
    telemetry_watch(s->telemetry, s->step);
    model_micro_batch(&s->model, &s->store, tokens, targets, NULL, 1.0f / (float)N, 0,
                      backward ? PASS_COMPLETE : PASS_FORWARD);
    assert_null(s->model.observe);
    telemetry_write(s->telemetry, 1);
    json_decref(s->line);
    s->line = last_line();
    assert_int_equal(json_integer_value(json_object_get(s->line, "step")), s->step);
}

static inline void small_update(Small *s)
{
    optimizer_step(&s->store, &s->config, s->step, 1e-2, 1);
}

static inline void remove_metrics(void)
{
    char path[64];
    snprintf(path, sizeof path, "%s/metrics.jsonl", measured_folder);
    assert_int_equal(unlink(path), 0);
}

static inline void small_close(Small *s)
{
    json_decref(s->line);
    telemetry_close(s->telemetry);
    log_close(s->log);
    model_free(&s->model, &s->store);
    remove_metrics();
}

static inline double metric(const Small *s, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
static inline double metric(const Small *s, const char *format, ...)
{
    char name[128];
    va_list list;
    va_start(list, format);
    vsnprintf(name, sizeof name, format, list);
    va_end(list);
    json_t *v = json_object_get(s->line, name);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

/* Returns all values of a tensor, in host memory that release() frees. */
static inline const double *all(Tensor t)
{
    return decode(t, tensor_snapshot(t));
}

static inline double relative_error(const double *q, const double *x, size_t n)
{
    double error2 = 0, norm2 = 0;
    for (size_t i = 0; i < n; i++)
        error2 += (q[i] - x[i]) * (q[i] - x[i]), norm2 += x[i] * x[i];
    return sqrt(error2 / norm2);
}

static inline void expect_near(const char *what, double found, double expected, double relative)
{
    if (!(fabs(found - expected) <= relative * fabs(expected)))
        fail_msg("%s: %.9g in metrics.jsonl, %.9g by the test", what, found, expected);
}

static inline int measured_start(void **state)
{
    return mkdtemp(measured_folder) ? start_device(state) : -1;
}

static inline int measured_finish(void **state)
{
    (void)state;
    return rmdir(measured_folder);
}
