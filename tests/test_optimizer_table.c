/* The table of optimizers, and the effects of a row that a program adds: the configuration and its
 * notes, the memory plan, the weights that decay, statistics, and messages of other optimizers
 * about its checkpoints. */
#include <jansson.h>

#include "model/plan_model.h"
#include "model/run/telemetry.h"
#include "model/store/param_store_sizes.h"
#include "model/update/update.h"
#include "tests/test.h"
#include "tests/images.h"
#include "tests/lion.h"
#include "tests/saved.h"
#include "tests/try_config.h"

/* ---- the configuration ----------------------------------------------------------------------- */

static bool warned(const char *message, const char *words)
{
    return strstr(message, words) != NULL;
}

TEST(test_choice)
{
    needs_fork();
    char message[8192];
    try_write(try_path, try_complete);
    assert_false(try_printed(message, sizeof message, 2, 1, "--optimizer.name=sgd", NULL));
    try_contains(
        message,
        "this program has no optimizer 'sgd'; it has adamw, adamw8bit, muon, lion, momentum");
    assert_true(try_printed(message, sizeof message, 2, 1,
                            "--optimizer={name: lion, betas: [0.9, 0.99], eps: 1e-8}",
                            "--format={moment1: bf16, moment2: e4m3}"));
    try_contains(message, "optimizer.eps (optimizer lion does not read this key), format.moment1 "
                          "(optimizer lion does not read this key), "
                          "format.moment2 (optimizer lion does not read this key)");
    assert_false(warned(message, "optimizer.betas") || warned(message, "decay"));
    try_accepted("--optimizer={name: adamw, eps: 1e-8}", "--format.moment1=bf16", "");
    assert_false(try_printed(message, sizeof message, 2, 1, "--format.moment1=dynamic8/256", NULL));
    try_contains(message, "only the moments of --optimizer.name=adamw8bit have this format");
    assert_true(try_printed(message, sizeof message, 2, 1, "--optimizer.momentum=0.9",
                            "--optimizer.ns_steps=6"));
    try_contains(message, "optimizer.momentum (optimizer adamw does not read this key)");
    try_contains(message, "optimizer.ns_steps (optimizer adamw does not read this key)");
    assert_true(try_printed(message, sizeof message, 2, 1,
                            "--optimizer={name: muon, momentum: 0.9, per_head: true}", NULL));
    assert_false(try_printed(message, sizeof message, 2, 1, "--optimizer.name=muon",
                             "--offload.optimizer=all"));
    try_contains(message, "optimizer.name is muon and offload.optimizer is all");
    assert_false(try_printed(message, sizeof message, 2, 1, "--optimizer.name=muon",
                             "--offload.master=all"));
    try_contains(message, "optimizer.name is muon and offload.master is all");
    assert_false(
        try_printed(message, sizeof message, 2, 1, "--optimizer.name=muon", "--lora.rank=4"));
    try_contains(message, "optimizer.name is muon and lora.rank is 4");
    Config *c = try_load(1, "--optimizer.name=lion", NULL, NULL, NULL);
    try_contains(c->text, "optimizer:\n  name: lion\n");
    config_free(c);
}

/* Moments in two formats are accepted. A v that is too coarse for beta2 causes a warning. */
TEST(test_mixed_moments)
{
    needs_fork();
    char message[8192];
    try_write(try_path, try_complete);
    try_accepted("--recipe=coat", "--format.moment1=f32", "");
    try_accepted("--recipe=fp8-lm", "--optimizer.betas=[0.9, 0.995]", "");
    assert_true(try_printed(message, sizeof message, 2, 1, "--recipe=fp8-lm",
                            "--optimizer.betas=[0.9, 0.999]"));
    try_contains(message, "a v in bf16 is too coarse for a beta2 of 0.999");
    assert_true(
        try_printed(message, sizeof message, 2, 1, "--recipe=coat", "--format.moment2=e5m2/128"));
    try_contains(message, "in e5m2/128, the v of weights with rare gradients");
    try_contains(message, "Use --format.moment2=e5m2/128+");
    try_accepted("--recipe=f32", "--optimizer.betas=[0.9, 0.999]", "");
}

/* The reason for this warning: with rounding to nearest, a v that should decrease stays. */
TEST(test_coarse)
{
    static const float beta2[] = { 0.999f, 0.995f };
    for (int i = 0; i < 2; i++) {
        const Format f32 = { F32, 0 }, bf16 = { BF16, 0 };
        Tensor w = make_filled(f32, 1, 8, 1, 1, 1), m = make_filled(f32, 1, 8, 1, 0, 0);
        Tensor v = make_filled(bf16, 1, 8, 1, 1.25f, 1.25f);
        adamw(
            w, m, v, m,
            (AdamW){
                .beta2 = beta2[i], .eps = 1, .correction1 = 1, .correction2 = 1, .grad_scale = 1 },
            0);
        assert_int_equal(values(v)[0] == 1.25, i == 0);
        release();
    }
}

/* ---- the plan -------------------------------------------------------------------------------- */

typedef struct {
    Config config;
    Model model;
    ParamStore store;
} Small;

static void plan_of(Small *s, const ModelConfig *m, const char *optimizer, const char *recipe)
{
    *s = (Small){ 0 };
    model_config(&s->config, m, recipe, 2);
    s->config.optimizer.name = (char *)optimizer;
    model_plan(&s->model, &s->store, &s->config, (ShardChoice){ 1, 0, false });
}

static void small_plan(Small *s, const char *optimizer, const char *recipe)
{
    static ModelConfig m;
    m = architecture(LLAMA);
    plan_of(s, &m, optimizer, recipe);
}

/* Returns the bytes of states per 256 weights of layers, and of other weights. Units are multiples
 * of 256. */
TEST(test_plan)
{
    const struct {
        const char *optimizer, *recipe;
        size_t bytes, elsewhere;
    } rows[] = {
        { "adamw", "f32", 2 * 256 * 4, 2 * 256 * 4 },
        { "adamw", "coat", 2 * (256 + 2 * 4), 2 * (256 + 2 * 4) },
        { "adamw", "fp8-lm", 256 + 2 * 2 + 256 * 2, 256 + 2 * 2 + 256 * 2 },
        { "adamw8bit", "coat", 2 * (256 + 4), 2 * 256 * 4 },
        { "adamw8bit", "f32", 2 * (256 + 4), 2 * 256 * 4 },
        { "lion", "f32", 256 * 4, 256 * 4 },
    };
    size_t total[2] = { 0 };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Small s;
        size_t bytes = 0;
        small_plan(&s, rows[i].optimizer, rows[i].recipe);
        for (int u = 0; u < s.store.num_units; u++)
            bytes += s.store.shard[u].slice[TRAINED].count / 256 *
                     (s.store.shape[u].kind->is_layer ? rows[i].bytes : rows[i].elsewhere);
        assert_int_equal(store_state_bytes(&s.store), bytes);
        if (strcmp(rows[i].recipe, "f32") == 0 && strcmp(rows[i].optimizer, "adamw8bit") != 0)
            total[strcmp(rows[i].optimizer, "lion") == 0] =
                s.model.bytes.total - store_state_bytes(&s.store);
        model_free(&s.model, &s.store);
    }
    /* only the states differ, and their sizes are multiples of 256 */
    assert_int_equal(total[0], total[1]);
}

/* ---- a step ---------------------------------------------------------------------------------- */

/* Weight decay moves BF16 master weights of 1 down by half a step, rounded up or down. Returns
 * which weights went up in one run of the optimizer, for every parameter. */
enum { MOST_PARAMS = 32, MOST_BITS = 16384 };
typedef struct {
    int params;
    struct {
        size_t count;
        bool up[MOST_BITS];
    } of[MOST_PARAMS];
} Dither;

static void round_once(Dither *d, uint64_t seed, long step)
{
    Small s;
    small_plan(&s, "adamw", "coat-opt");
    model_alloc(&s.model, &s.store, &s.config);
    s.config.seed = seed;
    s.config.optimizer.weight_decay = 0x1p-9;
    s.config.optimizer.decay_embeddings = s.config.optimizer.decay_norm_and_bias = true;
    store_zero_states(&s.store);
    for (int u = 0; u < s.store.num_units; u++) {
        fill(s.store.shard[u].grad, 1, 0, 0);
        fill(s.store.shard[u].slice[TRAINED].stored, 1, 1, 1);
    }
    optimizer_step(&s.store, &s.config, step, 1, 1);
    for (int u = 0; u < s.store.num_units; u++) {
        const double *w = values(s.store.shard[u].slice[TRAINED].stored);
        for (int i = 0; i < s.store.shape[u].num_params; i++) {
            const Param *p = &s.store.shape[u].param[i];
            assert_true(d->params < MOST_PARAMS && param_numel(p) <= MOST_BITS);
            d->of[d->params].count = param_numel(p);
            for (size_t k = 0; k < param_numel(p); k++) {
                assert_true(w[p->offset + k] == 1 || w[p->offset + k] == 1 - 0x1p-8);
                d->of[d->params].up[k] = w[p->offset + k] == 1;
            }
            d->params++;
        }
    }
    model_free(&s.model, &s.store);
    release();
}

/* Half of n independent bits are set, with a standard deviation of sqrt(n) / 2; 5 of these are
 * allowed. */
static void check_half(size_t found, size_t n, const char *what, int a, int i, int b, int j)
{
    if (!(fabs((double)found - (double)n / 2) <= 2.5 * sqrt((double)n)))
        fail_msg("%s: %zu of %zu, of run %d, parameter %d, and run %d, parameter %d", what, found,
                 n, a, i, b, j);
}

/* Rounding goes up as often as down, and independently for each parameter, step and seed. */
TEST(test_dither)
{
    enum { RUNS = 3 };
    static Dither d[RUNS];
    round_once(&d[0], 1, 1);
    round_once(&d[1], 1, 2);
    round_once(&d[2], 2, 1);
    for (int a = 0; a < RUNS; a++)
        for (int i = 0; i < d[a].params; i++) {
            size_t up = 0;
            for (size_t k = 0; k < d[a].of[i].count; k++)
                up += d[a].of[i].up[k];
            check_half(up, d[a].of[i].count, "rounded up", a, i, a, i);
            for (int b = 0; b <= a; b++)
                for (int j = 0; j < (b < a ? d[b].params : i); j++) {
                    const size_t n =
                        d[a].of[i].count < d[b].of[j].count ? d[a].of[i].count : d[b].of[j].count;
                    size_t same = 0;
                    for (size_t k = 0; k < n; k++)
                        same += d[a].of[i].up[k] == d[b].of[j].up[k];
                    check_half(same, n, "rounded alike", a, i, b, j);
                }
        }
}

/* From a momentum of 0, Lion's first step is lr against the sign of the gradient. Matrices also
 * decay, and vectors and the embedding if the settings say so. At a third of optimizer.lr, the
 * projector's lr is a third of projector_lr. */
static void check_step(bool vectors, bool embedding)
{
    Small s;
    const ModelConfig m = with_images(architecture(LLAMA), PROJECTOR_MLP, true);
    plan_of(&s, &m, "lion", "f32");
    model_alloc(&s.model, &s.store, &s.config);
    store_init(&s.store, &s.config.model, 3);
    s.config.optimizer.decay_norm_and_bias = vectors;
    s.config.optimizer.decay_embeddings = embedding;
    s.config.optimizer.lr = 3e-2;
    s.config.optimizer.projector_lr = 6e-3;
    const double lr_of[2] = { 1e-2, 2e-3 }, lr = lr_of[0];
    const float decay = (float)s.config.optimizer.weight_decay, scale = 0.5f;
    for (int u = 0; u < s.store.num_units; u++)
        fill(s.store.shard[u].grad, (uint64_t)u + 1, -1, 1);
    const double *before[8], *grad[8];
    for (int u = 0; u < s.store.num_units; u++)
        before[u] = values(s.store.shard[u].slice[TRAINED].stored),
        grad[u] = values(s.store.shard[u].grad);
    optimizer_step(&s.store, &s.config, 1, lr, scale);
    for (int u = 0; u < s.store.num_units; u++) {
        const double *w = values(s.store.shard[u].slice[TRAINED].stored),
                     *m = values(s.store.shard[u].state[0]);
        for (int i = 0; i < s.store.shape[u].num_params; i++) {
            const Param *p = &s.store.shape[u].param[i];
            const bool decays = p->is_vector ? vectors : !p->is_embedding || embedding;
            const double own = lr_of[s.store.shape[u].kind->is_projector];
            for (size_t k = p->offset; k < p->offset + (size_t)p->rows * (size_t)p->cols; k++) {
                const double x = before[u][k], g = grad[u][k];
                const double expected = x - own * ((g > 0) - (g < 0) + (decays ? decay * x : 0));
                if (fabs(w[k] - expected) > 4 * U24 * (fabs(x) + lr))
                    fail_msg("%s of unit %d: %.9g, expected %.9g", p->name, u, w[k], expected);
                /* beta2 in F32 has an error of U24; the difference and two products have relative
                 * errors of U24 */
                const double momentum = (1 - s.config.optimizer.beta2) * scale * g;
                assert_true(fabs(m[k] - momentum) <=
                            fabs(momentum) * (4 * U24 + U24 / (1 - s.config.optimizer.beta2)));
            }
        }
    }
    model_free(&s.model, &s.store);
    release();
}

TEST(test_step)
{
    check_step(false, false);
    check_step(true, false);
    check_step(false, true);
}

/* ---- statistics ------------------------------------------------------------------------------ */

/* Returns the line of metrics.jsonl with the statistics of the optimizer's second step. */
static json_t *statistics(const char *optimizer)
{
    Small s;
    static char folder[64];
    char path[128], line[1 << 16];
    snprintf(folder, sizeof folder, "%s/%s", root, optimizer);
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    mkdir(folder, 0777);
    small_plan(&s, optimizer, "f32");
    model_alloc(&s.model, &s.store, &s.config);
    store_init(&s.store, &s.config.model, 3);
    s.config.save_folder = folder;
    s.config.quant_stats_interval = 1;
    Log *log = log_open(&s.config, s.store.shape, (RunLength){ .steps = 10 }, 10, 0, false, 1);
    Telemetry *t = telemetry_open(&s.config, &s.model, &s.store, log);
    for (long step = 1; step <= 2; step++) {
        for (int u = 0; u < s.store.num_units; u++)
            fill(s.store.shard[u].grad, (uint64_t)u + 1, -1, 1);
        telemetry_watch(t, step);
        telemetry_write(t, 1);
        optimizer_step(&s.store, &s.config, step, 1e-2, 1);
    }
    telemetry_close(t);
    log_close(log);
    model_free(&s.model, &s.store);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_non_null(fgets(line, sizeof line, f));
    assert_non_null(fgets(line, sizeof line, f));
    fclose(f);
    release();
    return json_loads(line, 0, NULL);
}

static double number(json_t *line, const char *name)
{
    json_t *x = json_object_get(line, name);
    return json_is_number(x) ? json_number_value(x) : NAN;
}

/* Adam's moments are compared with their values before rounding, in any format: the error is below
 * that of E4M3, but not 0. The states of another optimizer are described as stored. */
TEST(test_statistics)
{
    json_t *eight = statistics("adamw8bit"), *other = statistics("lion");
    assert_true(number(eight, "quant/m/0/error") > 1e-4 &&
                number(eight, "quant/m/0/error") < 0x1p-4);
    assert_true(number(eight, "quant/v/0/error") > 1e-4 &&
                number(eight, "quant/v/0/error") < 0x1p-4);
    assert_true(isfinite(number(eight, "quant/update/1/error")));
    assert_true(number(eight, "quant/m/head/dynamic_range") > 1);
    assert_true(number(other, "quant/momentum/0/dynamic_range") > 1 &&
                number(other, "quant/momentum/embedding/underflow") == 0);
    assert_null(json_object_get(other, "quant/momentum/0/error"));
    assert_null(json_object_get(other, "quant/m/0/error"));
    json_decref(eight);
    json_decref(other);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

static void open_with(Run *r, const char *optimizer, const char *moments)
{
    static char text_of_run[64];
    ModelConfig m = architecture(LLAMA);
    Format f;
    assert_true(format_parse(&f, moments));
    open_run_of(r, &m, optimizer, (Format){ F32, 0 }, f, f);
    snprintf(text_of_run, sizeof text_of_run, "optimizer:\n  name: %s\n", optimizer);
    r->config.text = text_of_run;
    store_init(&r->store, &r->config.model, 3);
}

/* A checkpoint of `saved` cannot continue with `loaded`; the message gives the reason. */
static void expect_refusal(const char *saved, const char *loaded, const char *words)
{
    Run r, other;
    open_with(&r, saved, "f32");
    save(&r, 1);
    open_with(&other, loaded, "f32");
    DIES(words, load(&other, step_folder(&r, 1)));
    DIES(text("Use --optimizer.name=%s, or start with new states", saved),
         load(&other, step_folder(&r, 1)));
    TrainState s;
    assert_true(checkpoint_load(step_folder(&r, 1), &other.config, &other.store, &s, false));
    close_run(&r);
    close_run(&other);
    release();
}

TEST(test_refusals)
{
    needs_fork();
    expect_refusal("lion", "adamw",
                   "there is no exp_avg, which optimizer adamw keeps for every weight; the "
                   "checkpoint was saved "
                   "with optimizer lion");
    expect_refusal("adamw", "lion",
                   "there is no momentum, which optimizer lion keeps for every weight; the "
                   "checkpoint was saved "
                   "with optimizer adamw");
    expect_refusal("adamw", "momentum",
                   "embed_tokens.weight.exp_avg_sq is not a state of optimizer momentum");
}

/* As documented in the header, a row that does not fit in the table is an error of the program. */
TEST(test_add)
{
    needs_fork();
    static Optimizer o;
    o = lion;
    DIES("there is an optimizer lion already", optimizer_add(&o));
    o.name = "other";
    o.state[0].own = (Format){ E4M3, 96, false };
    DIES("momentum is e4m3/96; groups must divide 256", optimizer_add(&o));
    o.num_states = MAX_STATES + 1;
    DIES("5 states, of at most 4", optimizer_add(&o));
}

static int start(void **state)
{
    static const Optimizer momentum = {
        "momentum", 1, { { "exp_avg", "m", MOMENT1 } }, HAS_BETAS, .step = lion_step
    };
    device_init(0);
    optimizer_add(&lion);
    optimizer_add(&momentum);
    return make_root(state) || try_make_folder(state);
}

static int end(void **state)
{
    return remove_root(state) || try_remove_folder(state);
}

int main(void)
{
    return run_all_tests(start, end);
}
