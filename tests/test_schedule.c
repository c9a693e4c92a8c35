/* The learning rate and the limit of gradient norms at a step: from the configuration's text to the
 * value, against OLMo's formulas, with values by hand if exact. With r = (t - warmup) / (end -
 * warmup), a = alpha_f, all as fractions of learning_rate:
 *
 *     warmup         start + (1 - start) t / warmup        for t < warmup; start: warmup_min_lr, or 0.1
 *     cosine         a + (1 - a) (1 + cos(pi r)) / 2       a from the end on
 *     linear         1 - (1 - a) r                         a from the end on
 *     inverse_sqrt   sqrt(warmup / t)                      has no end
 *     wsd            a + (1 - a) (end - t) / t_decay       in the last t_decay, 1 before
 *
 * allenai/OLMo, olmo/optim.py: the classes derived from Scheduler; the limit is
 * Scheduler.get_max_grad_norm. wsd: allenai/OLMo-core, src/olmo_core/optim/scheduler.py, WSD. */
#include <stddef.h>

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/update/schedule.h"
#include "tests/test.h"
#include "tests/try_config.h"

/* Odd, so that its multiples are not exact in F32; lengths in tokens exceed 2^31. */
static const long TOKENS_PER_STEP = 2047l * 2049;
static const double LR = 3e-4;

typedef enum { MAX_DURATION, T_MAX } End; /* the key that sets the end */

/* Lengths in steps; start < 0: no warmup_min_lr. `at` ends with a rate of 0. */
static const struct Case {
    const char *name;
    long warmup, end, decay;
    double alpha_f, start;
    struct {
        long step;
        double share;
    } at[12];
} cases[] = {
    { "cosine_with_warmup",
      100,
      1300,
      0,
      0.1,
      -1,
      { { 0, 0.1 },
        { 1, 0.109 },
        { 50, 0.55 },
        { 99, 0.991 },
        { 100, 1 },
        { 400, 0.1 + 0.9 * (1 + M_SQRT1_2) / 2 },
        { 500, 0.775 },
        { 700, 0.55 },
        { 900, 0.325 },
        { 1300, 0.1 },
        { 5000, 0.1 } } },
    { "cosine_with_warmup",
      0,
      1200,
      0,
      0.25,
      -1,
      { { 0, 1 },
        { 400, 0.8125 },
        { 600, 0.625 },
        { 800, 0.4375 },
        { 1200, 0.25 },
        { 1201, 0.25 } } },
    { "cosine_with_warmup",
      100,
      100,
      0,
      0.1,
      0.5,
      { { 0, 0.5 }, { 50, 0.75 }, { 99, 0.995 }, { 100, 0.1 }, { 101, 0.1 } } },
    { "linear_with_warmup",
      100,
      1300,
      0,
      0.1,
      -1,
      { { 0, 0.1 },
        { 1, 0.109 },
        { 50, 0.55 },
        { 99, 0.991 },
        { 100, 1 },
        { 101, 1 - 0.9 / 1200 },
        { 500, 0.7 },
        { 700, 0.55 },
        { 1299, 0.1 + 0.9 / 1200 },
        { 1300, 0.1 },
        { 5000, 0.1 } } },
    { "linear_with_warmup",
      100,
      1300,
      0,
      0.4,
      0.2,
      { { 0, 0.2 }, { 25, 0.4 }, { 100, 1 }, { 900, 0.6 }, { 1300, 0.4 } } },
    { "inverse_sqrt_with_warmup",
      100,
      1300,
      0,
      0.9,
      -1,
      { { 0, 0.1 },
        { 50, 0.55 },
        { 99, 0.991 },
        { 100, 1 },
        { 200, M_SQRT1_2 },
        { 400, 0.5 },
        { 900, 1 / 3.0 },
        { 1300, 0.27735009811261457 },
        { 10000, 0.1 } } },
    { "constant", 100, 1300, 0, 0.1, -1, { { 1, 1 }, { 50, 1 }, { 1300, 1 }, { 5000, 1 } } },
    { "constant_with_warmup",
      100,
      1300,
      0,
      0.1,
      -1,
      { { 0, 0.1 },
        { 1, 0.109 },
        { 50, 0.55 },
        { 99, 0.991 },
        { 100, 1 },
        { 700, 1 },
        { 1300, 1 },
        { 5000, 1 } } },
    { "wsd",
      100,
      1300,
      200,
      0.1,
      -1,
      { { 0, 0.1 },
        { 50, 0.55 },
        { 100, 1 },
        { 700, 1 },
        { 1100, 1 },
        { 1101, 1 - 0.9 / 200 },
        { 1150, 0.775 },
        { 1200, 0.55 },
        { 1300, 0.1 },
        { 5000, 0.1 } } },
    { "wsd", 100, 300, 200, 0.2, 0.6, { { 50, 0.8 }, { 100, 1 }, { 200, 0.6 }, { 300, 0.2 } } },
};
enum { NUM_CASES = sizeof cases / sizeof cases[0] };

/* Writes the case as a configuration; lengths are multiplied by `unit`. */
static Config *load_case(const struct Case *k, long unit, End end)
{
    char schedule[512], lr[64], more[128] = "", start[64] = "";
    if (end == T_MAX)
        snprintf(more, sizeof more, ", t_max: %ld", k->end * unit);
    if (k->decay)
        snprintf(more + strlen(more), sizeof more - strlen(more), ", t_decay: %ld",
                 k->decay * unit);
    if (k->start >= 0)
        snprintf(start, sizeof start, ", warmup_min_lr: %.17g", k->start * LR);
    snprintf(schedule, sizeof schedule,
             "--scheduler={name: %s, units: %s, t_warmup: %ld, alpha_f: %.17g%s%s}", k->name,
             unit > 1 ? "tokens" : "steps", k->warmup * unit, k->alpha_f, more, start);
    snprintf(lr, sizeof lr, "--optimizer.learning_rate=%.17g", LR);
    return try_load(1, schedule, lr, "--max_duration=1ep", NULL);
}

/* The formulas have some ten operations on numbers of at most LR, and cosine adds the rounding
 * error of pi: 16 roundoffs. */
static void check_case(const struct Case *k, long unit, End end)
{
    /* t_max takes precedence over max_duration */
    const long steps = end == T_MAX ? 2 * k->end : k->end;
    const RunLength length = { steps, steps * TOKENS_PER_STEP };
    Config *c = load_case(k, unit, end);
    for (int i = 0; k->at[i].share > 0; i++) {
        const long t = k->at[i].step;
        const double found = schedule_lr(c, length, t, t * TOKENS_PER_STEP),
                     expected = k->at[i].share * LR;
        if (!(fabs(found - expected) <= 16 * DBL_EPSILON / 2 * LR))
            fail_msg("case %d, %s in %s, %s: %.17g at step %ld, expected %.17g", (int)(k - cases),
                     k->name, unit > 1 ? "tokens" : "steps",
                     end == T_MAX ? "t_max" : "max_duration", found, t, expected);
    }
    config_free(c);
}

TEST(test_learning_rate)
{
    try_write(try_path, try_complete);
    for (int i = 0; i < NUM_CASES; i++)
        for (End end = MAX_DURATION; end <= T_MAX; end++) {
            check_case(&cases[i], 1, end);
            check_case(&cases[i], TOKENS_PER_STEP, end);
        }
}

/* Steps and tokens need not be proportional: a run may be resumed with another batch. Each schedule
 * uses its own unit. */
TEST(test_own_unit)
{
    try_write(try_path, try_complete);
    const RunLength length = { 1300, 1300 * TOKENS_PER_STEP };
    Config *steps = load_case(&cases[0], 1, MAX_DURATION),
           *tokens = load_case(&cases[0], TOKENS_PER_STEP, MAX_DURATION);
    assert_true(schedule_lr(steps, length, 700, 5) ==
                schedule_lr(tokens, length, 5, 700 * TOKENS_PER_STEP));
    assert_true(schedule_lr(steps, length, 5, 700) != schedule_lr(steps, length, 700, 5));
    config_free(steps);
    config_free(tokens);
}

/* A warmup that is a fraction of the run, or of t_max, is rounded to whole steps or tokens. */
TEST(test_warmup_fraction)
{
    static const struct {
        const char *share, *same;
    } list[] = {
        { "{warmup_fraction: 0.04}", "{t_warmup: 52}" },
        { "{warmup_fraction: 0.0384}", "{t_warmup: 50}" },
        { "{warmup_fraction: 0.04, t_max: 500}", "{t_warmup: 20, t_max: 500}" },
        { "{warmup_fraction: 0.04, units: tokens}", "{t_warmup: 52000, units: tokens}" },
        { "{warmup_fraction: 1}", "{t_warmup: 1300}" },
        { "{warmup_fraction: 0.04, name: inverse_sqrt_with_warmup}",
          "{t_warmup: 52, name: inverse_sqrt_with_warmup}" },
    };
    const RunLength length = { 1300, 1300 * 1000 };
    for (size_t i = 0; i < sizeof list / sizeof list[0]; i++) {
        char share[128], same[128];
        snprintf(share, sizeof share, "--scheduler=%s", list[i].share);
        snprintf(same, sizeof same, "--scheduler=%s", list[i].same);
        try_write_changed("t_warmup", "alpha_f: 0");
        Config *a = try_load(1, share, "--max_duration=1ep", NULL, NULL),
               *b = try_load(1, same, "--max_duration=1ep", NULL, NULL);
        for (long step = 0; step <= 1300; step++)
            assert_true(schedule_lr(a, length, step, step * 1000) ==
                        schedule_lr(b, length, step, step * 1000));
        config_free(a);
        config_free(b);
    }
}

/* ---- clipping -------------------------------------------------------------------------------- */

static void check_clip(const char *clip, const char *schedule, long step, long tokens,
                       double expected)
{
    Config *c = try_load(1, clip, schedule, NULL, NULL);
    const double found = schedule_max_grad_norm(c, step, tokens);
    if (found != expected)
        fail_msg("%s %s: limit %.17g at step %ld, token %ld, expected %.17g", clip, schedule, found,
                 step, tokens, expected);
    config_free(c);
}

/* The factor applies up to and including the last step of the warmup. All products are exact. */
TEST(test_clip_warmup)
{
    static const char clip
        [] = "--max_grad_norm=1.5",
    in_steps[] = "--scheduler={grad_clip_warmup_steps: 1000, grad_clip_warmup_factor: 10}",
    in_tokens[] =
        "--scheduler={units: tokens, grad_clip_warmup_steps: 4e9, grad_clip_warmup_factor: 0.5}";
    static const long T = 4000000000;
    try_write(try_path, try_complete);
    check_clip(clip, in_steps, 1, T, 15);
    check_clip(clip, in_steps, 999, 2 * T, 15);
    check_clip(clip, in_steps, 1000, 2 * T, 15);
    check_clip(clip, in_steps, 1001, 1, 1.5);
    check_clip(clip, in_steps, 1000000, T, 1.5);
    check_clip(clip, in_tokens, 5, 1, 0.75);
    check_clip(clip, in_tokens, 2000, T, 0.75);
    check_clip(clip, in_tokens, 2000, T + 1, 1.5);
    check_clip(clip, in_tokens, 1, 2 * T, 1.5);
}

/* Either key without the other changes nothing. Without clipping, norms stay as they are. */
TEST(test_clip_without_warmup)
{
    try_write(try_path, try_complete);
    for (long step = 1; step <= 2000; step += 999) {
        check_clip("--max_grad_norm=1.5", "--scheduler.t_warmup=10", step, step, 1.5);
        check_clip("--max_grad_norm=1.5", "--scheduler.grad_clip_warmup_factor=10", step, step,
                   1.5);
        check_clip("--max_grad_norm=1.5", "--scheduler.grad_clip_warmup_steps=1000", step, step,
                   1.5);
        check_clip("--max_grad_norm=null",
                   "--scheduler={grad_clip_warmup_steps: 1000, grad_clip_warmup_factor: 10}", step,
                   step, 0);
    }
}

int main(void)
{
    return run_all_tests(try_make_folder, try_remove_folder);
}
