/* Quantization statistics: metrics.jsonl against the tensors, decoded by the test. */
#include "tests/kit.h"

#include <jansson.h>

#include "model/run/log.h"
#include "model/run/outliers.h"
#include "model/run/quant_stats.h"
#include "model/run/telemetry.h"
#include "model/update.h"
#include "tests/models.h"
#include "tests/outlier.h"
#include "tests/sanitized.h"

enum { B = 4, MAX_TOKENS = 128 };

static char folder[] = "/tmp/coat-telemetry-XXXXXX";

/* One rank with statistics every step; line: the last one written. */
typedef struct {
    Config config;
    Model  model;
    ParamStore store;
    Log   *log;
    Telemetry *telemetry;
    json_t *line;
    long   step;
    bool   apart;          /* shared buffers keep their values */
} Small;

static void small_open(Small *s, SmallModel a, const char *recipe)
{
    static ModelConfig m;
    *s = (Small){ 0 };
    m = architecture(a);
    m.d_model = 128;            /* as FP8 GEMMs need */
    m.head_dim = 32;
    m.mlp_width = 256;
    model_config(&s->config, &m, recipe, B);
    s->config.recipe.forward = FROM_SAVED;      /* so that operands follow from saved tensors, bit for bit */
    s->config.save_folder = folder;
    s->config.quant_stats_interval = 1;
}

static void small_start(Small *s)
{
    (s->apart ? model_create_apart : model_create)(&s->model, &s->store, &s->config);
    store_init(&s->store, &s->config.model, 3);
    s->log = log_open(&s->config, s->store.shape, (RunLength){ .steps = 10 }, 10, 0, false, 1);
    s->telemetry = telemetry_open(&s->config, &s->model, &s->store, s->log);
}

static json_t *last_line(void)
{
    char path[64], line[1 << 16];
    json_t *o = NULL;
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
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

/* Forward, or forward, backward and the line of statistics; the caller runs the optimizer. */
static void small_step(Small *s, bool backward)
{
    int tokens[MAX_TOKENS], targets[MAX_TOKENS], N = s->model.N;
    s->step++;
    for (int n = 0; n < N; n++)
        tokens[n] = test_token((uint64_t)s->step, (uint64_t)n, s->config.model.vocab_size);
    for (int n = 0; n < N; n++)
        targets[n] = (n + 1) % s->model.attn.T ? tokens[n + 1] : -1;
    fsdp_empty_grads(&s->store);
    telemetry_watch(s->telemetry, s->step);
    model_step(&s->model, &s->store, tokens, targets, NULL, 1.0f / (float)N, 0, backward ? PASS_COMPLETE : PASS_FORWARD);
    assert_null(s->model.observe);
    telemetry_write(s->telemetry, s->step, 1);
    json_decref(s->line);
    s->line = last_line();
    assert_int_equal(json_integer_value(json_object_get(s->line, "step")), s->step);
}

static void small_update(Small *s)
{
    optimizer_step(&s->store, &s->config, s->step, s->step, 1e-2, 1);
}

static void remove_metrics(void)
{
    char path[64];
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    assert_int_equal(unlink(path), 0);
}

static void small_close(Small *s)
{
    json_decref(s->line);
    telemetry_close(s->telemetry);
    log_close(s->log);
    model_free(&s->model, &s->store);
    remove_metrics();
}

static double metric(const Small *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
static double metric(const Small *s, const char *format, ...)
{
    char name[128];
    va_list list;
    va_start(list, format);
    vsnprintf(name, sizeof name, format, list);
    va_end(list);
    json_t *v = json_object_get(s->line, name);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

/* A tensor's values, all of them; host memory freed by release(). */
static const double *all(Tensor t)
{
    return decode(t, tensor_snapshot(t));
}

static double relative_error(const double *q, const double *x, size_t n)
{
    double error2 = 0, norm2 = 0;
    for (size_t i = 0; i < n; i++)
        error2 += (q[i] - x[i]) * (q[i] - x[i]), norm2 += x[i] * x[i];
    return sqrt(error2 / norm2);
}

static void expect_near(const char *what, double found, double expected, double relative)
{
    if (!(fabs(found - expected) <= relative * fabs(expected)))
        fail_msg("%s: %.9g in metrics.jsonl, %.9g by the test", what, found, expected);
}

/* Every number is finite. Fractions are at most 1, ranges at least 1. A normal E4M3 value has an error of up to 2^-4, a subnormal
 * one of 2^-10 S, where S <= 1.01 max|x|/240 (a group's maximum has the code 240 or more, within 2^-7) <= 1.01 ||x||/240, since the
 * sample is the whole tensor (64 rows): n of them together by sqrt(n) 2^-10 1.01 / 240 of the norm. Rounding gives an error of
 * about 2^-4 / sqrt(3) / 1.5 = 0.024 of the norm; usual values are not below half of it. */
static void check_line(const Small *s, const char *name, double x)
{
    const char *last = strrchr(name, '/') + 1;
    if (!isfinite(x))
        fail_msg("%s: %s is not finite", s->config.recipe.name, name);
    bool share = strcmp(last, "underflow") == 0 || strcmp(last, "saturation") == 0;
    bool range = strncmp(last, "dynamic_range", 13) == 0;
    bool error = strcmp(last, "error") == 0 && strncmp(name, "quant/optimizer", 15) != 0;
    bool activation = strncmp(name, "quant/m/", 8) && strncmp(name, "quant/v/", 8) && strncmp(name, "quant/u", 7);
    const double most = 0x1p-4 + sqrt(64 * 512) * 0x1p-10 * 1.01 / 240;
    if ((share && (x < 0 || x > 1)) || (range && x < 1) || (error && (x < 0 || x > 1))
        || (error && activation && !strstr(name, "att_op") && (x < 0.012 || x > most)))
        fail_msg("%s: %s = %g", s->config.recipe.name, name, x);
}

static void check_all(const Small *s)
{
    const char *name;
    json_t *value;
    json_object_foreach(s->line, name, value) {
        if (strcmp(name, "step") == 0 || strcmp(name, "time") == 0)
            continue;
        if (!json_is_array(value)) {
            check_line(s, name, json_is_number(value) ? json_number_value(value) : NAN);
            continue;
        }
        json_int_t count = 0;
        for (size_t i = 0; i < json_array_size(value); i++)
            count += json_integer_value(json_array_get(value, i));
        assert_true(count > 0);
    }
}

/* Which kinds appear: those that the recipe stores in FP8, and always the moments. */
static void test_every_recipe(void **state)
{
    (void)state;
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++)
        for (const Recipe *r = recipes; r->name; r++) {
            Small s;
            small_open(&s, a, r->name);
            s.config.model.d_model = 64;
            s.config.model.head_dim = 16;
            s.config.model.mlp_width = 128;
            small_start(&s);
            for (int i = 0; i < (SANITIZED ? 1 : 3); i++) {
                small_step(&s, true);
                check_all(&s);
                small_update(&s);
            }
            assert_int_equal(isfinite(metric(&s, "quant/x1/1/saturation")), format_is_fp8(r->saved));
            assert_int_equal(isfinite(metric(&s, "quant/h1/0/saturation")), format_is_fp8(r->operand));
            assert_int_equal(isfinite(metric(&s, "quant/qkv/0/saturation")), format_is_fp8(r->qkv));
            assert_int_equal(isfinite(metric(&s, "quant/gate_up/1/error")), format_is_fp8(r->hidden));
            assert_int_equal(isfinite(metric(&s, "quant/m/1/k")), r->moment1.expand);
            assert_true(isfinite(metric(&s, "quant/v/embedding/dynamic_range")));
            assert_int_equal(isfinite(metric(&s, "quant/v/head/error")), !s.config.model.weight_tying);
            small_close(&s);
        }
}

/* The fraction of largest E4M3 codes, among codes whose source is not 0. */
static double largest_codes(Tensor t, const double *source)
{
    const uint8_t *codes = tensor_snapshot(t);
    double values = 0, largest = 0;
    for (size_t i = 0; i < tensor_numel(t); i++) {
        values += source[i] != 0;
        largest += source[i] != 0 && (codes[i] & 0x7f) == 0x7e;
    }
    assert_true(largest > 0);
    return largest / values;
}

static double channel_rms(const double *act, size_t N, size_t F, size_t f)
{
    double sum = 0;
    for (size_t n = 0; n < N; n++)
        sum += pow(act[n * F + f], 2);
    return sqrt(sum / (double)N);
}

/* Expected from act's values before rounding; its scale is that of the largest. */
static void expect_outliers(const Small *s, const double *act, size_t N, size_t F)
{
    double square = 0, fourth = 0, most = 0, least_half = INFINITY;
    for (size_t i = 0; i < N * F; i++) {
        square += pow(act[i], 2);
        fourth += pow(act[i], 4);
        most = fmax(most, fabs(act[i]));
    }
    for (size_t f = 0; f < F; f++) {            /* the median: half of the channels, and this one, are not larger */
        size_t not_larger = 0;
        const double rms = channel_rms(act, N, F, f);
        for (size_t g = 0; g < F; g++)
            not_larger += channel_rms(act, N, F, g) <= rms;
        if (not_larger > F / 2)
            least_half = fmin(least_half, rms);
    }
    expect_near("kurtosis", metric(s, "quant/act/1/kurtosis"), (double)(N * F) * fourth / (square * square), 1e-6);
    expect_near("largest_channel", metric(s, "quant/act/1/largest_channel"), most / least_half, 1e-6);
}

/* The last block's tensors still hold the measured values. x1 has no source in `coat`, and h0 is overwritten; with keep: all and a
 * separate stream h0 is kept, and must equal the recomputed values. */
static void test_activations(void **state)
{
    (void)state;
    for (int keep_all = 0; keep_all < 2; keep_all++) {
        Small s;
        small_open(&s, LLAMA, "coat");
        if (keep_all)
            s.config.recipe.keep = KEEP_ALL;
        s.apart = true;
        small_start(&s);
        small_step(&s, false);
        const Acts *a = &s.model.acts[1];
        const size_t N = (size_t)s.model.N, C = 128, F = 256;
        assert_true(N <= 64);
        const double *gate_up = all(a->gate_up_saved), *act = all(a->swiglu_operand), *x1 = all(a->mlp_x), *h1 = all(a->mlp_h);
        expect_near("gate_up", metric(&s, "quant/gate_up/1/error"), relative_error(gate_up, all(a->gate_up_raw), N * 2 * F),
                    1e-6);
        expect_near("att_op", metric(&s, "quant/att_op/1/error"), relative_error(all(a->attn_operand), all(a->attn_saved), N * C),
                    1e-6);
        double *exact = keep(N * F * sizeof *exact);
        for (size_t i = 0; i < N * F; i++) {
            double gate = gate_up[i / F * 2 * F + i % F];
            exact[i] = gate / (1 + exp(-gate)) * gate_up[i / F * 2 * F + F + i % F];
        }
        expect_near("act", metric(&s, "quant/act/1/error"), relative_error(act, exact, N * F), 1e-6);
        expect_outliers(&s, exact, N, F);
        for (size_t i = 0; i < N; i++) {
            double mean2 = 0;
            for (size_t c = 0; c < C; c++)
                mean2 += x1[i * C + c] * x1[i * C + c] / C;
            for (size_t c = 0; c < C; c++)      /* the initial weight is 1 */
                exact[i * C + c] = x1[i * C + c] / sqrt(mean2 + s.config.model.norm.eps);
        }
        expect_near("h1", metric(&s, "quant/h1/1/error"), relative_error(h1, exact, N * C), 1e-4);
        assert_int_equal(a->attn_h.data == a->mlp_h.data, !keep_all);
        static double h0[2];
        h0[keep_all] = metric(&s, "quant/h0/1/error");
        if (keep_all)
            expect_near("h0", h0[0], h0[1], 1e-4);
        assert_true(isnan(metric(&s, "quant/x1/1/error")) && metric(&s, "quant/x0/1/error") < 0x1p-4);
        expect_near("saturation", metric(&s, "quant/gate_up/1/saturation"), largest_codes(a->gate_up_saved, all(a->gate_up_raw)),
                    1e-6);
        small_close(&s);
        release();
    }
}

/* What small_step prints on stderr. */
static const char *printed_by_step(Small *s)
{
    static char text[4096];
    FILE *f = tmpfile();
    assert_non_null(f);
    fflush(stderr);
    const int saved = dup(STDERR_FILENO);
    dup2(fileno(f), STDERR_FILENO);
    small_step(s, false);
    fflush(stderr);
    dup2(saved, STDERR_FILENO);
    close(saved);
    rewind(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    return text;
}

/* An outlier in both blocks: one warning each, until it has gone and come again; none with factors of columns, whose scale covers
 * less. The metrics are those of values without factors. */
static void test_outliers(void **state)
{
    (void)state;
    double kurtosis[2];
    for (int by_channel = 0; by_channel < 2; by_channel++) {
        Small s;
        small_open(&s, LLAMA, "coat");
        s.config.recipe.down_scales = by_channel ? DOWN_CHANNEL : DOWN_TENSOR;
        small_start(&s);
        static const float sizes[] = { 20, 20, 0.01f, 20 };
        for (int i = 0; i < 4; i++) {
            grow_outlier(&s.store, sizes[i]);
            const char *text = printed_by_step(&s);
            const double largest = metric(&s, "quant/act/1/largest_channel");
            const bool expected = !by_channel && (i == 0 || i == 3);
            assert_true((strstr(text, "block 0") && strstr(text, "block 1")) == expected);
            assert_true((strstr(text, "--fp8.down_scales=channel") != NULL) == expected);
            assert_true((largest > outliers_limit(&s.config.recipe)) == (!by_channel && i != 2));
            assert_true(metric(&s, "quant/act/1/error") < 0x1p-4);
        }
        kurtosis[by_channel] = metric(&s, "quant/act/1/kurtosis");
        small_close(&s);
    }
    assert_true(kurtosis[0] > 100 && fabs(kurtosis[1] / kurtosis[0] - 1) < 0.1);
    const Recipe *fp8 = recipe_find("fp8");
    bool warned = false;
    static const struct { double part; bool warned; } watched[] = { { 0.9, false }, { 1.1, true }, { 0.6, true }, { 0.4, false } };
    for (int i = 0; i < 4; i++) {
        outliers_watch(&warned, 1, 0, watched[i].part * outliers_limit(fp8), fp8, false);
        assert_true(warned == watched[i].warned);
    }
    assert_true(fabs(outliers_limit(fp8) - 7945) < 1 && outliers_limit(recipe_find("coat")) == outliers_limit(fp8) / 2);
    release();
}

/* Stored moments have the reported error. On the CPU codes and scales are those of the telemetry, except where the F32 arithmetic
 * of the update falls on the other side of a midpoint. */
static void test_moments(void **state)
{
    (void)state;
    Small s;
    small_open(&s, LLAMA, "coat");
    small_start(&s);
    for (int i = 0; i < 4; i++) {
        small_step(&s, true);
        size_t differ = 0, codes = 0;
        double sum[2] = { 0 }, beta[2] = { (float)0.9, (float)0.95 };
        int matrices = 0;
        Shard *shard = &s.store.shard[1];
        const size_t count = shard->slice[TRAINED].count;
        const size_t group = (size_t)shard->state[0].format.group;
        const double *g = all(shard->grad);
        Sample old[2] = { sample_fetch(shard->state[0], 0, count), sample_fetch(shard->state[1], 0, count) };
        small_update(&s);
        Sample new[2] = { sample_fetch(shard->state[0], 0, count), sample_fetch(shard->state[1], 0, count) };
        for (int p = 0; p < s.store.shape[1].num_params; p++) {
            const Param *param = &s.store.shape[1].param[p];
            size_t at = param->offset, n = (size_t)param->rows * (size_t)param->cols;
            n = n < 8192 ? n : 8192;
            if (param->is_vector)
                continue;
            matrices++;
            for (int j = 0; j < 2; j++) {
                double *x = keep(n * sizeof *x), *q = keep(n * sizeof *q);
                for (size_t e = 0; e < n; e++)
                    x[e] = beta[j] * old[j].x[at + e] + (1 - beta[j]) * (j ? g[at + e] * g[at + e] : g[at + e]);
                Sample r = sample_round(x, n, shard->state[0].format);
                for (size_t e = 0; e < n; e++) {
                    const bool same_k = sample_k(r, e / group) == sample_k(new[j], (at + e) / group);
                    q[e] = same_k ? new[j].x[at + e] : r.x[e];
                }
                sum[j] += pow(relative_error(q, x, n), 2);
                for (size_t e = 0; e < n; e++)
                    differ += ((uint8_t *)r.t.data)[e] != ((uint8_t *)new[j].t.data)[at + e];
                codes += n;
                sample_free(&r);
            }
        }
        /* NOTE: a group has another k in F32 if the exact one is close to a step of 1/16, or if its smallest element nearly
         * cancels; then all its codes differ, and it counts as reported. That such groups are few is checked below. */
        expect_near("m", metric(&s, "quant/m/0/error"), sqrt(sum[0] / matrices), 1e-3);
        expect_near("v", metric(&s, "quant/v/0/error"), sqrt(sum[1] / matrices), 1e-3);
        if (on_cpu() && differ > codes / 10000 + group)
            fail_msg("step %d: %zu of %zu codes differ", i, differ, codes);
        for (int j = 0; j < 2; j++)
            sample_free(&old[j]), sample_free(&new[j]);
        release();
    }
    small_close(&s);
}

/* F32 moments are rounded once, from double: u = 2^-24. Expansion must pay on each moment and on the update. */
static void test_formats(void **state)
{
    (void)state;
    Small s;
    small_open(&s, LLAMA, "f32");
    small_start(&s);
    for (int i = 0; i < 4; i++) {
        small_step(&s, true);
        assert_true(metric(&s, "quant/m/0/error") <= U24 && metric(&s, "quant/v/head/error") <= U24);
        assert_true(metric(&s, "quant/update/1/error") <= 3 * U24);
        assert_true(metric(&s, "quant/m/1/underflow") == 0);
        small_update(&s);
    }
    double plain = metric(&s, "quant/optimizer/update/e4m3/e4m3/typical_error");
    double expanded = metric(&s, "quant/optimizer/update/e4m3+/e4m3+/typical_error");
    printf("error of m/(sqrt(v)+eps): e4m3 %.4f, e4m3+ %.4f, factor %.2f\n", plain, expanded, plain / expanded);
    assert_true(expanded < plain / 1.2);
    assert_true(metric(&s, "quant/optimizer/m/e4m3+/error") < metric(&s, "quant/optimizer/m/e4m3/error"));
    assert_true(metric(&s, "quant/optimizer/v/e5m2+/error") < metric(&s, "quant/optimizer/v/e5m2/error"));
    small_close(&s);
}

/* Frozen parameters have no moments: a unit without trained parameters has no line. */
static void test_frozen(void **state)
{
    (void)state;
    static const char *const recipes[] = { "f32", "coat" };
    static char *pattern = "model.layers.*.mlp.*";
    for (int i = 0; i < 2; i++) {
        Small s;
        small_open(&s, LLAMA, recipes[i]);
        s.config.trainable = &pattern;
        s.config.num_trainable = 1;
        small_start(&s);
        for (int step = 0; step < 2; step++) {
            small_step(&s, true);
            small_update(&s);
        }
        assert_true(metric(&s, "quant/m/0/dynamic_range") > 1 && metric(&s, "quant/v/1/dynamic_range") > 1);
        assert_null(json_object_get(s.line, "quant/m/embedding/dynamic_range"));
        assert_null(json_object_get(s.line, "quant/m/head/dynamic_range"));
        small_close(&s);
    }
}

/* Statistics change nothing: same loss and same moments with and without, and no line where none is due. */
static void test_no_side_effects(void **state)
{
    (void)state;
    double loss[2];
    for (int interval = 0; interval < 2; interval++) {
        Small s;
        small_open(&s, LLAMA_GQA, "coat-lean");
        s.config.quant_stats_interval = interval ? 2 : 1000;
        small_start(&s);
        int tokens[MAX_TOKENS], targets[MAX_TOKENS];
        for (int n = 0; n < s.model.N; n++)
            tokens[n] = targets[n] = n % 90;
        for (long step = 1; step <= 4; step++) {
            fsdp_empty_grads(&s.store);
            telemetry_watch(s.telemetry, step);
            model_step(&s.model, &s.store, tokens, targets, NULL, 0.01f, 0, PASS_COMPLETE);
            loss[interval] = take_losses(&s.model).loss;
            telemetry_write(s.telemetry, step, 1);
            optimizer_step(&s.store, &s.config, step, step, 1e-2, 1);
        }
        json_t *line = last_line();
        assert_int_equal(line != NULL, interval);
        if (line)
            assert_int_equal(json_integer_value(json_object_get(line, "step")), 4);
        json_decref(line);
        small_close(&s);
    }
    assert_true(loss[0] == loss[1]);
}

/* Two steps with 0.3 seconds of other work between them: the time of the second excludes it. */
static void test_speed(void **state)
{
    (void)state;
    Small s;
    small_open(&s, LLAMA, "bf16");
    s.log = log_open(&s.config, NULL, (RunLength){ .steps = 10 }, 10, 0, false, 1);
    log_step(s.log, &(StepStats){ .step = 1 });
    log_pause(s.log);
    usleep(300000);
    log_resume(s.log);
    log_step(s.log, &(StepStats){ .step = 2 });
    s.line = last_line();
    assert_true(metric(&s, "throughput/device/tokens_per_second") > B * s.config.model.max_sequence_length / 0.3);
    json_decref(s.line);
    log_close(s.log);
    remove_metrics();
}

static int start(void **state)
{
    return mkdtemp(folder) ? start_device(state) : -1;
}

static int finish(void **state)
{
    (void)state;
    return rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_recipe), cmocka_unit_test(test_activations), cmocka_unit_test(test_moments),
        cmocka_unit_test(test_formats), cmocka_unit_test(test_no_side_effects), cmocka_unit_test(test_speed),
            cmocka_unit_test(test_frozen), cmocka_unit_test(test_outliers),
    };
    return cmocka_run_group_tests(tests, start, finish);
}
