/* Quantization statistics of activations: compares metrics.jsonl with the tensors, which the test
 * decodes. test_telemetry_moments.c tests those of moments. */
#include "tests/test.h"
#include "tests/measured.h"

#include "model/run/outliers.h"
#include "tests/outlier.h"
#include "tests/sanitized.h"

/* Every number is finite. Fractions are at most 1, ranges at least 1. A normal E4M3 value has an
 * error of up to 2^-4, a subnormal one of 2^-10 S, where S <= 1.01 max|x|/240 (a group's maximum
 * has the code 240 or more, within 2^-7) <= 1.01 ||x||/240, since the sample is the whole tensor
 * (64 rows): n of them together by sqrt(n) 2^-10 1.01 / 240 of the norm. Rounding gives an error of
 * about 2^-4 / sqrt(3) / 1.5 = 0.024 of the norm; usual values are not below half of it. */
static void check_line(const Small *s, const char *name, double x)
{
    const char *last = strrchr(name, '/') + 1;
    if (!isfinite(x))
        fail_msg("%s: %s is not finite", s->config.recipe.name, name);
    bool share = strcmp(last, "underflow") == 0 || strcmp(last, "saturation") == 0;
    bool range = strncmp(last, "dynamic_range", 13) == 0;
    bool error = strcmp(last, "error") == 0;
    bool activation =
        strncmp(name, "quant/m/", 8) && strncmp(name, "quant/v/", 8) && strncmp(name, "quant/u", 7);
    const double most = 0x1p-4 + sqrt(64 * 512) * 0x1p-10 * 1.01 / 240;
    if ((share && (x < 0 || x > 1)) || (range && x < 1) || (error && (x < 0 || x > 1)) ||
        (error && activation && !strstr(name, "att_op") && (x < 0.012 || x > most)))
        fail_msg("%s: %s = %g", s->config.recipe.name, name, x);
}

static void check_all(const Small *s)
{
    const char *name;
    json_t *value;
    json_object_foreach(s->line, name, value)
    {
        if (strcmp(name, "step") == 0 || strcmp(name, "time") == 0)
            continue;
        check_line(s, name, json_is_number(value) ? json_number_value(value) : NAN);
    }
}

/* The kinds of statistics that appear: the tensors that the recipe stores in FP8, and always the
 * moments. */
TEST(test_every_recipe)
{
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
            assert_int_equal(isfinite(metric(&s, "quant/x1/1/saturation")),
                             format_is_fp8(r->saved_norm_input));
            /* a router reads the norm's output before it is encoded */
            assert_int_equal(isfinite(metric(&s, "quant/h1/0/saturation")),
                             format_is_fp8(r->operand) && a != OLMOE);
            assert_int_equal(isfinite(metric(&s, "quant/qkv/0/saturation")),
                             format_is_fp8(r->saved_qkv));
            assert_int_equal(isfinite(metric(&s, "quant/gate_up/1/error")),
                             format_is_fp8(r->saved_mlp));
            assert_int_equal(isfinite(metric(&s, "quant/m/1/k")), r->moment1.expand);
            assert_true(isfinite(metric(&s, "quant/v/embedding/dynamic_range")));
            assert_int_equal(isfinite(metric(&s, "quant/v/head/error")),
                             !s.config.model.weight_tying);
            small_close(&s);
        }
}

/* Returns the fraction of largest E4M3 codes, among codes whose value before rounding is not 0. */
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

/* Expected values from act before rounding. The scale is that of the largest value. */
static void expect_outliers(const Small *s, const double *act, size_t N, size_t F)
{
    double square = 0, fourth = 0, most = 0, least_half = INFINITY;
    for (size_t i = 0; i < N * F; i++) {
        square += pow(act[i], 2);
        fourth += pow(act[i], 4);
        most = fmax(most, fabs(act[i]));
    }
    /* the median: half of the channels, including this one, are not larger */
    for (size_t f = 0; f < F; f++) {
        size_t not_larger = 0;
        const double rms = channel_rms(act, N, F, f);
        for (size_t g = 0; g < F; g++)
            not_larger += channel_rms(act, N, F, g) <= rms;
        if (not_larger > F / 2)
            least_half = fmin(least_half, rms);
    }
    expect_near("kurtosis", metric(s, "quant/act/1/kurtosis"),
                (double)(N * F) * fourth / (square * square), 1e-6);
    expect_near("largest_channel", metric(s, "quant/act/1/largest_channel"), most / least_half,
                1e-6);
}

/* The tensors of the last block still hold the measured values. x1 has no value before rounding in
 * `coat`, and h0 is overwritten. With keep: all and a separate stream, h0 is kept, and must equal
 * the recomputed values. */
TEST(test_activations)
{
    for (int keep_all = 0; keep_all < 2; keep_all++) {
        Small s;
        small_open(&s, LLAMA, "coat");
        if (keep_all)
            s.config.recipe.keep = KEEP_ALL;
        s.apart = true;
        small_start(&s);
        small_step(&s, false);
        const Acts *a = &s.model.acts[1];
        const size_t N = (size_t)s.model.text.N, C = 128, F = 256;
        assert_true(N <= 64);
        const double *gate_up = all(a->gate_up_saved), *act = all(a->swiglu_operand),
                     *x1 = all(a->mlp_x), *h1 = all(a->mlp_h);
        expect_near("gate_up", metric(&s, "quant/gate_up/1/error"),
                    relative_error(gate_up, all(a->gate_up_raw), N * 2 * F), 1e-6);
        expect_near("att_op", metric(&s, "quant/att_op/1/error"),
                    relative_error(all(a->attn_operand), all(a->attn_saved), N * C), 1e-6);
        double *exact = keep(N * F * sizeof *exact);
        for (size_t i = 0; i < N * F; i++) {
            double gate = gate_up[i / F * 2 * F + i % F];
            exact[i] = gate / (1 + exp(-gate)) * gate_up[i / F * 2 * F + F + i % F];
        }
        expect_near("act", metric(&s, "quant/act/1/error"), relative_error(act, exact, N * F),
                    1e-6);
        expect_outliers(&s, exact, N, F);
        for (size_t i = 0; i < N; i++) {
            double mean2 = 0;
            for (size_t c = 0; c < C; c++)
                mean2 += x1[i * C + c] * x1[i * C + c] / C;
            for (size_t c = 0; c < C; c++) /* the initial weight is 1 */
                exact[i * C + c] = x1[i * C + c] / sqrt(mean2 + s.config.model.norm.eps);
        }
        expect_near("h1", metric(&s, "quant/h1/1/error"), relative_error(h1, exact, N * C), 1e-4);
        assert_int_equal(a->attn_h.data == a->mlp_h.data, !keep_all);
        static double h0[2];
        h0[keep_all] = metric(&s, "quant/h0/1/error");
        if (keep_all)
            expect_near("h0", h0[0], h0[1], 1e-4);
        assert_true(isnan(metric(&s, "quant/x1/1/error")) &&
                    metric(&s, "quant/x0/1/error") < 0x1p-4);
        expect_near("saturation", metric(&s, "quant/gate_up/1/saturation"),
                    largest_codes(a->gate_up_saved, all(a->gate_up_raw)), 1e-6);
        small_close(&s);
        release();
    }
}

/* Returns what small_step prints on stderr. */
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

/* Both blocks have an outlier: each causes one warning, until the outlier has gone and come again.
 * With column factors there is no warning, because the scale covers less. The metrics are those of
 * values without factors. */
TEST(test_outliers)
{
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
    static const struct {
        double part;
        bool warned;
    } watched[] = { { 0.9, false }, { 1.1, true }, { 0.6, true }, { 0.4, false } };
    for (int i = 0; i < 4; i++) {
        outliers_watch(&warned, 1, 0, watched[i].part * outliers_limit(fp8), fp8, false);
        assert_true(warned == watched[i].warned);
    }
    assert_true(fabs(outliers_limit(fp8) - 7945) < 1 &&
                outliers_limit(recipe_find("coat")) == outliers_limit(fp8) / 2);
    release();
}

/* Statistics change nothing: loss and moments are the same with and without them. There is no line
 * in steps without statistics. */
TEST(test_no_side_effects)
{
    double loss[2];
    for (int interval = 0; interval < 2; interval++) {
        Small s;
        small_open(&s, LLAMA_GQA, "coat-lean");
        s.config.quant_stats_interval = interval ? 2 : 1000;
        small_start(&s);
        int tokens[MAX_TOKENS], targets[MAX_TOKENS];
        for (int n = 0; n < s.model.text.N; n++)
            tokens[n] = targets[n] = n % 90;
        for (long step = 1; step <= 4; step++) {
            fsdp_empty_grads(&s.store);
            telemetry_watch(s.telemetry, step);
            model_micro_batch(&s.model, &s.store, tokens, targets, NULL, 0.01f, 0, PASS_COMPLETE);
            loss[interval] = take_losses(&s.model).loss;
            telemetry_write(s.telemetry, 1);
            optimizer_step(&s.store, &s.config, step, 1e-2, 1);
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
TEST(test_speed)
{
    Small s;
    small_open(&s, LLAMA, "bf16");
    s.log = log_open(&s.config, NULL, (RunLength){ .steps = 10 }, 10, 0, false, 1);
    log_step(s.log, &(StepStats){ .step = 1 });
    log_pause(s.log);
    usleep(300000);
    log_resume(s.log);
    log_step(s.log, &(StepStats){ .step = 2 });
    s.line = last_line();
    assert_true(metric(&s, "throughput/device/tokens_per_second") >
                B * s.config.model.max_sequence_length / 0.3);
    json_decref(s.line);
    log_close(s.log);
    remove_metrics();
}

int main(void)
{
    return run_all_tests(measured_start, measured_finish);
}
