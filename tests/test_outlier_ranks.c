/* A model with a SwiGLU outlier in every block. Gradients of FP8 recipes are compared with those of
 * F32, with a single scale for down's input and with factors of its columns. The losses of tokens
 * are the same on 1, 2 and 4 ranks, and the gradient norms are the same with every strategy. */
#include "tests/test.h"
#include "tests/ranks_state.h"

#include "tests/outlier.h"

enum { BATCH = 4, LAYERS = 4, MICRO_BATCHES = 2, TOKENS = 4096 };

/* Makes a model with outliers of this size; 0: without outliers. */
static void open_run(Run *r, const char *recipe, DownScales down, float size, Strategy strategy,
                     HostUse activations)
{
    ModelConfig m = with_sizes(architecture(LLAMA), 128, 32, 96, LAYERS);
    m.max_sequence_length = 64;
    configure(r, &(Case){ recipe, LLAMA }, m, strategy);
    r->config.recipe.down_scales = down;
    r->config.recipe.grads = (Format){ F32, 0, false };
    r->config.global_train_batch_size = BATCH;
    r->config.optimizer.lr = 1e-3;
    r->config.offload.activations = activations;
    place_run(r);
    if (size > 0)
        grow_outlier(&r->store, size);
}

/* Whether no other column has a factor. */
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

/* The gradients of a step of two micro-batches, for one parameter of the last block. */
static double *gradient(Run *r, const char *name, size_t *n)
{
    const int unit = unit_of_layer(&r->config.model, LAYERS - 1);
    forward_backward(r, 0, MICRO_BATCHES);
    for (int k = 0; k < r->store.shape[unit].num_params; k++) {
        const Param *p = &r->store.shape[unit].param[k];
        *n = param_numel(p);
        if (strcmp(p->name, name) == 0)
            return whole_values(&r->store, unit, p, GRADIENTS);
    }
    fail_msg("no %s", name);
    return NULL;
}

/* Returns the relative error of down's gradient in all columns except the outlier's. */
static double error_of(const char *recipe, DownScales down, float size, const double *exact)
{
    Run r;
    open_run(&r, recipe, down, size, ALONE, HOST_NEVER);
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

/* An outlier leaves the other columns no codes. With one scale, their gradient is about 0, an error
 * of 1. With factors, it has the rounding of all other operands, which the outliers of all blocks
 * enlarge: less than 0.7. Without an outlier, the bits are the same. */
TEST(test_gradients)
{
    static const char *const recipes[] = { "fp8", "coat", "coat-lean" };
    if (comm_size() > 1)
        return;
    for (int i = 0; i < 3; i++) {
        double error[2][2];
        for (int grown = 0; grown < 2; grown++) {
            const float size = grown ? 90 : 0;
            Run r;
            size_t n;
            open_run(&r, "f32", DOWN_TENSOR, size, ALONE, HOST_NEVER);
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

/* Returns the losses of the tokens in this rank's sequences. */
static void token_losses(float *losses, DownScales down, Strategy strategy)
{
    static int tokens[TOKENS], targets[TOKENS];
    const int share = BATCH / comm_size();
    Run r;
    open_run(&r, "fp8", down, 40, strategy, HOST_NEVER);
    const int T = r.config.model.max_sequence_length;
    assert_true(BATCH * T < TOKENS);
    for (int s = 0; s < share; s++) {
        fill_tokens(tokens, targets, (size_t)((comm_rank() * share + s) * T), T,
                    r.config.model.vocab_size);
        model_micro_batch(&r.model, &r.store, tokens, targets, NULL, 1, 0, PASS_FORWARD);
        model_token_losses(&r.model, losses + s * T);
    }
    if (down == DOWN_CHANNEL)
        assert_true(outlier_factor(&r, 0) < 1);
    close_run(&r);
}

TEST(test_ranks)
{
    static float alone[TOKENS], sharded[TOKENS], other[TOKENS];
    token_losses(alone, DOWN_CHANNEL, ALONE);
    token_losses(sharded, DOWN_CHANNEL, mesh(1, 1, 1));
    token_losses(other, DOWN_TENSOR, ALONE);
    check_same_bytes("losses", sharded, alone, sizeof alone);
    assert_true(memcmp(other, alone, sizeof alone) != 0);
}

/* Returns the norm of a step's gradients and, after the update, of the next step's gradients. The
 * bits are the same whether weights are gathered once or often, and with offloaded activations.
 * Without sharding, F32 sums over ranks have another order: each of up to 64 terms has an error of
 * 2^-24. */
static void norms(double *norm, Strategy strategy, HostUse activations)
{
    Run r;
    open_run(&r, "coat", DOWN_CHANNEL, 40, strategy, activations);
    assert_true((r.model.offload.slots < LAYERS) == (activations == HOST_ALL));
    for (int s = 0; s < 2; s++)
        norm[s] = train_step(&r, s);
    close_run(&r);
}

TEST(test_strategies)
{
    const Strategy keeps = { comm_size(), GATHER_ONCE, SUM_OFTEN };
    double alone[2], sharded[2], once[2], away[2];
    norms(alone, ALONE, HOST_NEVER);
    norms(sharded, mesh(1, 1, 1), HOST_NEVER);
    norms(once, keeps, HOST_NEVER);
    norms(away, keeps, HOST_ALL);
    for (int s = 0; s < 2; s++)
        assert_true(sharded[s] == once[s] && away[s] == once[s] &&
                    fabs(alone[s] / sharded[s] - 1) < 0x1p-18);
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
