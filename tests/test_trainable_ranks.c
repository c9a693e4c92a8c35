/* Frozen parameters on any number of ranks, under every strategy: their bytes never change, also through a checkpoint; the gradients
 * of the others are, bit for bit, those of a run that trains all; a run goes on from a checkpoint bit for bit; and memory is saved. */
#include "kernels/comm.h"
#include "kernels/fp8.h"
#include "kernels/values.h"
#include "model/checkpoint/checkpoint.h"
#include "model/model.h"
#include "model/run/memory.h"
#include "model/update.h"
#include "tests/kit.h"
#include "tests/models.h"
#include "tests/ranks.h"

enum { BATCH = 4, MICRO = 1, STEPS = 2, MAX_TOKENS = 64 };

/* Recipes whose frozen weights are rounded as those that are trained are for computing. */
static const char *const recipe_names[] = { "f32", "bf16", "coat", "coat-lean" };
enum { NUM_RECIPES = sizeof recipe_names / sizeof recipe_names[0] };

static const struct { SmallModel model; const char *patterns[3]; int count, first_trained; } choices[] = {
    { LLAMA, { "model.layers.*.mlp.*", "lm_head.weight" }, 2, 1 },
    { LLAMA_GQA, { "model.layers.1.self_attn.?_proj.weight", "model.norm.weight" }, 2, 2 },
    { OLMO2, { "*norm.weight" }, 1, 1 },
    { OLMO, { "model.embed_tokens.weight" }, 1, 0 },
    { QWEN3, { "model.layers.*.self_attn.*" }, 1, 1 },
};
enum { NUM_CHOICES = sizeof choices / sizeof choices[0] };

static const struct { const char *name; int groups; bool keep_weights; GradSum sum; } strategies[] = {
    { "FULL_SHARD, sums per micro-batch", 1, false, SUM_OFTEN }, { "FULL_SHARD, sums per step", 1, false, SUM_ONCE },
    { "SHARD_GRAD_OP", 1, true, SUM_OFTEN },                     { "HYBRID_SHARD", 2, false, SUM_OFTEN },
    { "NO_SHARD", 0, false, SUM_ONCE },                          /* 0: a group per rank */
};
enum { NUM_STRATEGIES = sizeof strategies / sizeof strategies[0] };

typedef struct { Config config; Model model; Fsdp fsdp; ModelConfig m; } Run;

static void divide(int shard_ranks)
{
    if (comm_group_size(RANKS_SHARD) == shard_ranks)
        return;
    comm_device_finish();
    comm_divide(shard_ranks);
    comm_init();
}

static void open_run(Run *r, int choice, int recipe, int strategy, bool all)
{
    const int groups = strategies[strategy].groups ? strategies[strategy].groups : comm_size();
    *r = (Run){ .m = architecture(choices[choice].model) };
    model_config(&r->config, &r->m, recipe_names[recipe], MICRO);
    r->config.global_train_batch_size = BATCH;
    r->config.strategy = (Strategy){ comm_size() / groups, strategies[strategy].keep_weights, strategies[strategy].sum };
    r->config.trainable = (char **)choices[choice].patterns;
    r->config.num_trainable = all ? 0 : choices[choice].count;
    divide(r->config.strategy.shard_ranks);
    memory_plan(&r->model, &r->fsdp, &r->config);
    model_place(&r->model, &r->fsdp, &r->config);
    fsdp_init(&r->fsdp, &r->config.model, 5);
}

/* share: micro-batches of this rank. */
static void forward_backward(Run *r, int step, int share)
{
    int tokens[MAX_TOKENS], targets[MAX_TOKENS];
    const int T = r->m.max_sequence_length;
    assert_true(MICRO * T <= MAX_TOKENS);
    fsdp_zero_grads(&r->fsdp);
    for (int i = 0; i < share; i++) {
        const int sequence = (step * BATCH + comm_rank() * share + i) * T;
        for (int t = 0; t < T; t++) {
            tokens[t] = test_token(11, (uint64_t)(sequence + t), r->m.vocab_size);
            targets[t] = test_token(11, (uint64_t)(sequence + t + 1), r->m.vocab_size);
        }
        model_step(&r->model, &r->fsdp, tokens, targets, 1.0f / (float)(BATCH * T), 0,
                   i == share - 1 ? PASS_COMPLETE : PASS_ACCUMULATE);
    }
}

static double train(Run *r, int first, int steps)
{
    for (int s = first; s < first + steps; s++) {
        forward_backward(r, s, BATCH / comm_size());
        const double norm = optimizer_grad_norm(&r->fsdp);
        optimizer_step(&r->fsdp, &r->config, s + 1, s + 1, 1e-2, fmin(1, 1 / norm));
    }
    return model_losses(&r->model).loss;
}

/* n elements of a shard's tensor, exact as doubles; NULL: none. */
static double *fetch(Tensor t, size_t n)
{
    if (n == 0)
        return NULL;
    unsigned char *raw = keep(n * sizeof(float));
    double *x = keep(n * sizeof *x);
    device_get(raw, t.data, n * dtype_size(t.format.dtype));
    t.data = raw;
    float *values = keep(n * sizeof *values);
    tensor_load(values, t, 0, n);
    for (size_t i = 0; i < n; i++)
        x[i] = values[i];
    return x;
}

/* A parameter's gradient, or its weights as stored, of all shards: of each element one rank of the group has the value. */
static double *whole(const Run *r, int u, const Param *p, bool grad)
{
    const Shard *s = &r->fsdp.shard[u];
    const size_t numel = (size_t)p->rows * (size_t)p->cols;
    size_t first, n = shard_part(s, p, &first);
    double *x = keep(numel * sizeof *x);
    if (n > 0)
        memcpy(x + first, fetch(grad ? shard_view(s, s->grad, p->offset + first, n) : shard_weights(s, p, first, n), n), n * sizeof *x);
    comm_sum_over(x, (int)numel, RANKS_SHARD);
    return x;
}

static void check_same(const Run *a, const Run *b, bool grad, const char *what)
{
    for (int u = 0; u < a->fsdp.num_units; u++)
        for (int i = 0; i < a->fsdp.shape[u].num_params; i++) {
            const Param *p = &a->fsdp.shape[u].param[i], *q = &b->fsdp.shape[u].param[i];
            if (grad && p->region == FROZEN)
                continue;
            check_same_bytes(what, whole(a, u, p, grad), whole(b, u, q, grad), sizeof(double) * (size_t)p->rows * (size_t)p->cols);
            release();
        }
}

static void check_frozen(const Run *r, const Run *untouched)
{
    for (int u = 0; u < r->fsdp.num_units; u++)
        for (int i = 0; i < r->fsdp.shape[u].num_params; i++) {
            const Param *p = &r->fsdp.shape[u].param[i], *q = &untouched->fsdp.shape[u].param[i];
            const size_t bytes = sizeof(double) * (size_t)p->rows * (size_t)p->cols;
            const double *now = whole(r, u, p, false), *before = whole(untouched, u, q, false);
            const bool same = memcmp(now, before, bytes) == 0;
            if (same != (p->region == FROZEN))
                fail_msg("unit %d, %s: %s after training", u, p->name, same ? "is trained but has not changed" : "is frozen but has changed");
            release();
        }
}

static void strategy_case(int choice, int recipe, int strategy)
{
    Run some, all, untouched;
    open_run(&some, choice, recipe, strategy, false);
    open_run(&all, choice, recipe, strategy, true);
    open_run(&untouched, choice, recipe, strategy, false);
    assert_int_equal(some.fsdp.first_trained, choices[choice].first_trained);
    assert_true(model_planned_bytes(&some.model, &some.fsdp) < model_planned_bytes(&all.model, &all.fsdp));
    /* NOTE: an element's sum over ranks begins with its owner's, who may be another one with fewer parameters: so there is one
     * micro-batch a rank, and NCCL, whose order depends on the owner, is compared on up to two ranks. */
    forward_backward(&some, 0, 1);
    forward_backward(&all, 0, 1);
    if (on_cpu() || comm_size() <= 2)
        check_same(&some, &all, true, strategies[strategy].name);
    train(&some, 0, STEPS);
    check_frozen(&some, &untouched);
    model_free(&some.model, &some.fsdp);
    model_free(&all.model, &all.fsdp);
    model_free(&untouched.model, &untouched.fsdp);
}

static void test_strategies(void **state)
{
    (void)state;
    for (int s = 0; s < NUM_STRATEGIES; s++) {
        const int groups = strategies[s].groups ? strategies[s].groups : comm_size();
        const bool new = comm_size() > 1 || s == 0;     /* one rank cannot shard: all strategies are one */
        for (int i = 0; i < NUM_RECIPES && new && comm_size() % groups == 0; i++)
            for (int c = 0; c < NUM_CHOICES; c++)
                strategy_case(c, i, s);
    }
}

/* Training goes on from a checkpoint as if nothing had been, and what was frozen comes back as it was. */
static void test_checkpoint(void **state)
{
    (void)state;
    char folder[] = "/tmp/coat-trainable-XXXXXX", path[64];
    if (comm_rank() == 0)
        assert_non_null(mkdtemp(folder));
    comm_broadcast(folder, sizeof folder, 0);
    snprintf(path, sizeof path, "%s/step%d", folder, STEPS);
    for (int i = 0; i < NUM_RECIPES; i++) {
        Run r, again, untouched;
        open_run(&untouched, 0, i, 0, false);
        open_run(&r, 0, i, 0, false);
        train(&r, 0, STEPS);
        r.config.save_folder = folder;
        r.config.save_num_checkpoints_to_keep = -1;
        r.config.text = "run_name: test\n";
        TrainState s = { .step = STEPS, .updates = STEPS }, loaded = { 0 };
        checkpoint_begin(&r.config, &r.fsdp, &s, CHECKPOINT_FILE_BYTES);
        checkpoint_finish();
        open_run(&again, 0, i, 0, false);
        assert_true(checkpoint_load(path, &again.config, &again.fsdp, &loaded, true));
        assert_int_equal(loaded.step, STEPS);
        const double expected = train(&r, STEPS, STEPS), found = train(&again, STEPS, STEPS);
        assert_memory_equal(&expected, &found, sizeof found);
        check_same(&r, &again, false, "a resumed run");
        check_frozen(&again, &untouched);
        model_free(&r.model, &r.fsdp);
        model_free(&again.model, &again.fsdp);
        model_free(&untouched.model, &untouched.fsdp);
    }
    comm_barrier();
    char command[96];
    snprintf(command, sizeof command, "rm -r %s", folder);
    if (comm_rank() == 0)
        assert_int_equal(system(command), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_strategies), cmocka_unit_test(test_checkpoint) };
    start_ranks(&argc, &argv);
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
