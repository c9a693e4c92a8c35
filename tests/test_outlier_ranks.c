/* A model with an outlier of SwiGLU in every block: gradients of FP8 recipes against those of F32,
 * with one scale for down's input and with factors of its columns; the same losses of tokens on 1,
 * 2 and 4 ranks, the same gradient norms with every strategy. */
#include <math.h>

#include "tests/kit.h"

#include "tests/outlier.h"
#include "tests/ranks_run.h"

enum { BATCH = 4, LAYERS = 4, MICRO_BATCHES = 2, TOKENS = 4096 };

static HostUse on_host = HOST_NEVER; /* saved activations */

static void open_run(Run *r, const char *recipe, DownScales down, float size, Strategy strategy)
{
    static ModelConfig m;
    m = with_sizes(architecture(LLAMA), 128, 32, 96, LAYERS);
    m.max_sequence_length = 64;
    *r = (Run){ 0 };
    model_config(&r->config, &m, recipe, 1);
    r->config.recipe.down_scales = down;
    r->config.recipe.grads = (Format){ F32, 0, false };
    r->config.global_train_batch_size = BATCH;
    r->config.strategy = strategy;
    r->config.host.activations = on_host;
    divide(strategy.shard_ranks);
    memory_plan(&r->model, &r->store, &r->config);
    model_alloc(&r->model, &r->store, &r->config);
    store_init(&r->store, &r->config.model, 5);
    if (size > 0)
        grow_outlier(&r->store, size);
}

/* All other columns have none. */
static float outlier_factor(const Run *r, int layer)
{
    const Tensor t = r->model.acts[layer].swiglu_operand;
    float *x = keep(sizeof *x * (size_t)t.cols);
    device_get(x, t.channel, sizeof *x * (size_t)t.cols);
    for (int c = 0; c < t.cols; c++)
        assert_true(c == outlier_of(layer) || x[c] == 1);
    return x[outlier_of(layer)];
}

/* ---- gradients ------------------------------------------------------------------------------- */

/* Those of a step of two micro-batches, of one parameter of the last block. */
static double *gradient(Run *r, const char *name, size_t *n)
{
    const int unit = unit_of_layer(&r->config.model, LAYERS - 1);
    forward_backward(&r->model, &r->store, &r->config, 0, MICRO_BATCHES);
    for (int k = 0; k < r->store.shape[unit].num_params; k++) {
        const Param *p = &r->store.shape[unit].param[k];
        if (strcmp(p->name, name) != 0)
            continue;
        float *x = keep((*n = param_numel(p)) * sizeof *x);
        double *y = keep(*n * sizeof *y);
        device_get(x, (float *)r->store.shard[unit].grad.data + p->offset, *n * sizeof *x);
        for (size_t i = 0; i < *n; i++)
            y[i] = x[i];
        return y;
    }
    fail_msg("no %s", name);
    return NULL;
}

/* Relative error of down's gradient in all columns but the outlier's. */
static double error_of(const char *recipe, DownScales down, float size, const double *exact)
{
    const Strategy alone = { 1, GATHER_OFTEN, SUM_OFTEN };
    Run r;
    open_run(&r, recipe, down, size, alone);
    size_t n;
    const double *found = gradient(&r, "down", &n);
    double error2 = 0, norm2 = 0;
    for (size_t i = 0; i < n; i++)
        if (i % (size_t)r.config.model.mlp_width != (size_t)outlier_of(LAYERS - 1)) {
            error2 += (found[i] - exact[i]) * (found[i] - exact[i]);
            norm2 += exact[i] * exact[i];
        }
    if (down == DOWN_CHANNEL)
        assert_true((outlier_factor(&r, LAYERS - 1) < 1) == (size > 0));
    close_run(&r);
    return sqrt(error2 / norm2);
}

/* An outlier that leaves the other columns no codes: with one scale their gradient is about 0, an
 * error of 1. With factors it has the rounding of all other operands, which the outliers of all
 * blocks make larger: less than 0.7. Without an outlier the bits are the same. */
static void test_gradients(void **state)
{
    (void)state;
    static const char *const recipes[] = { "fp8", "coat", "coat-lean" };
    const Strategy alone = { 1, GATHER_OFTEN, SUM_OFTEN };
    if (comm_size() > 1)
        return;
    for (int i = 0; i < 3; i++) {
        double error[2][2];
        for (int grown = 0; grown < 2; grown++) {
            const float size = grown ? 90 : 0;
            Run r;
            size_t n;
            open_run(&r, "f32", DOWN_TENSOR, size, alone);
            const double *exact = gradient(&r, "down", &n);
            close_run(&r);
            for (int down = 0; down < 2; down++)
                error[grown][down] =
                    error_of(recipes[i], down ? DOWN_CHANNEL : DOWN_TENSOR, size, exact);
            release();
        }
        print_message(
            "%s: error of down's gradient %.4f, with an outlier %.4f, with factors %.4f\n",
            recipes[i], error[0][0], error[1][0], error[1][1]);
        assert_true(error[0][0] == error[0][1] && error[1][0] > 0.9 &&
                    error[1][1] < 0.7 * error[1][0]);
    }
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* Losses of the tokens of all sequences: each rank its own, or all. */
static void token_losses(float *losses, DownScales down, Strategy strategy, int first, int count)
{
    static int tokens[TOKENS];
    Run r;
    open_run(&r, "fp8", down, 40, strategy);
    const int T = r.config.model.max_sequence_length, vocab = r.config.model.vocab_size;
    for (int s = first; s < first + count; s++) {
        for (int t = 0; t <= T; t++)
            tokens[t] = test_token(11, (uint64_t)(s * T + t), vocab);
        model_micro_batch(&r.model, &r.store, tokens, tokens + 1, NULL, 1, 0, PASS_FORWARD);
        model_token_losses(&r.model, losses + (s - first) * T);
    }
    if (down == DOWN_CHANNEL)
        assert_true(outlier_factor(&r, 0) < 1);
    close_run(&r);
}

static void test_ranks(void **state)
{
    (void)state;
    static float alone[TOKENS], sharded[TOKENS], other[TOKENS];
    const int share = BATCH / comm_size(), first = comm_rank() * share,
              T = architecture(LLAMA).max_sequence_length;
    const size_t bytes = sizeof(float) * (size_t)(share * T);
    assert_true(BATCH * T < TOKENS);
    token_losses(alone, DOWN_CHANNEL, (Strategy){ 1, GATHER_OFTEN, SUM_OFTEN }, first, share);
    token_losses(sharded, DOWN_CHANNEL, (Strategy){ comm_size(), GATHER_OFTEN, SUM_OFTEN }, first,
                 share);
    token_losses(other, DOWN_TENSOR, (Strategy){ 1, GATHER_OFTEN, SUM_OFTEN }, first, share);
    check_same_bytes("losses", sharded, alone, bytes);
    assert_true(memcmp(other, alone, bytes) != 0);
}

/* The norm of a step's gradients and, after the update, of the next step's: with weights that are
 * gathered once or often, and with activations that leave the device, the bits are the same.
 * Without sharding F32 sums over ranks have another order: each of up to 64 terms errs by 2^-24. */
static void norms(double *norm, Strategy strategy, HostUse activations)
{
    Run r;
    on_host = activations;
    open_run(&r, "coat", DOWN_CHANNEL, 40, strategy);
    on_host = HOST_NEVER;
    assert_true((r.model.offload.slots < LAYERS) == (activations == HOST_ALL));
    for (int s = 0; s < 2; s++) {
        forward_backward(&r.model, &r.store, &r.config, s, BATCH / comm_size());
        norm[s] = optimizer_grad_norm(&r.store);
        optimizer_step(&r.store, &r.config, s + 1, 1e-3, fmin(1, 1 / norm[s]));
    }
    close_run(&r);
}

static void test_strategies(void **state)
{
    (void)state;
    double alone[2], sharded[2], once[2], away[2];
    norms(alone, (Strategy){ 1, GATHER_OFTEN, SUM_OFTEN }, HOST_NEVER);
    norms(sharded, (Strategy){ comm_size(), GATHER_OFTEN, SUM_OFTEN }, HOST_NEVER);
    norms(once, (Strategy){ comm_size(), GATHER_ONCE, SUM_OFTEN }, HOST_NEVER);
    norms(away, (Strategy){ comm_size(), GATHER_ONCE, SUM_OFTEN }, HOST_ALL);
    for (int s = 0; s < 2; s++)
        assert_true(sharded[s] == once[s] && away[s] == once[s] &&
                    fabs(alone[s] / sharded[s] - 1) < 0x1p-18);
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_ranks),
        cmocka_unit_test(test_strategies),
    };
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
