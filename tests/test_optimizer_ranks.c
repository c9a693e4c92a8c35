/* Optimizers in training, one of them added by the test: their losses decrease, a resumed run has
 * the bits of an uninterrupted one, and other divisions of states over ranks read and write the
 * same. On 1, 2 and 4 ranks. */
#include "model/store/param_store_sizes.h"
#include "tests/kit.h"

#include "kernels/collectives.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/save.h"
#include "model/checkpoint/load.h"
#include "model/predict/memory.h"
#include "model/run/quant_stats.h"
#include "model/update/update.h"
#include "tests/lion.h"
#include "tests/models.h"
#include "tests/ranks.h"

enum { BATCH = 8, STEPS = 6 };

static const struct {
    const char *optimizer, *recipe;
    double lr;
} cases[] = {
    { "adamw", "coat", 1e-2 },         { "adamw", "fp8-lm", 1e-2 }, { "adamw8bit", "f32", 1e-2 },
    { "adamw8bit", "coat-opt", 1e-2 }, { "lion", "bf16", 1e-3 },    { "lion", "coat-opt", 1e-3 },
    { "muon", "coat", 1e-2 },          { "muon", "f32", 1e-2 },
};
enum { CASES = sizeof cases / sizeof cases[0] };

typedef struct {
    Config config;
    Model model;
    ParamStore store;
    TrainState state;
    double lr, loss[STEPS];
} Run;

/* Norms of 128 weights and a vocabulary of 90 in 128 rows: groups of 256 reach into padding. */
static void open_run(Run *r, int which, int shard_ranks, const char *folder)
{
    ModelConfig m = architecture(OLMO2);
    m.d_model = 128;
    m.head_dim = 32;
    m.mlp_width = 160;
    *r = (Run){ .lr = cases[which].lr };
    model_config(&r->config, &m, cases[which].recipe, 1);
    r->config.optimizer.name = (char *)cases[which].optimizer;
    r->config.optimizer.decay_embeddings = true;
    r->config.global_train_batch_size = BATCH;
    r->config.strategy = (Strategy){ .shard_ranks = shard_ranks };
    r->config.save_num_checkpoints_to_keep = -1;
    r->config.text = keep(64);
    snprintf(r->config.text, 64, "optimizer: {name: %s}\n", cases[which].optimizer);
    r->config.save_folder = keep(64);
    snprintf(r->config.save_folder, 64, "%s/%s", shared, folder);
    if (comm_group_size(RANKS_SHARD) != shard_ranks) {
        comm_device_finish();
        comm_set_mesh(mesh_of_shards(comm_size(), shard_ranks));
        comm_init();
    }
    memory_plan(&r->model, &r->store, &r->config);
    model_alloc(&r->model, &r->store, &r->config);
    store_init(&r->store, &r->config.model, 5);
}

static void close_run(Run *r)
{
    model_free(&r->model, &r->store);
    release();
}

/* Trains to step `last`; every second step has the same batch. */
static void train(Run *r, long last)
{
    const int T = r->config.model.max_sequence_length, share = BATCH / comm_size(),
              vocab = r->config.model.vocab_size;
    int tokens[64], targets[64];
    assert_true(T <= 64);
    while (r->state.step < last) {
        fsdp_empty_grads(&r->store);
        for (int i = 0; i < share; i++) {
            const long sequence = ((r->state.step % 2) * BATCH + comm_rank() * share + i) * T;
            for (int t = 0; t < T; t++) {
                tokens[t] = test_token(11, (uint64_t)(sequence + t), vocab);
                targets[t] = test_token(11, (uint64_t)(sequence + t + 1), vocab);
            }
            model_micro_batch(&r->model, &r->store, tokens, targets, NULL,
                              1.0f / (float)(BATCH * T), 0,
                              i == share - 1 ? PASS_COMPLETE : PASS_ACCUMULATE);
        }
        double loss = take_losses(&r->model).loss / (BATCH * T);
        comm_sum(&loss, 1);
        r->loss[r->state.step++] = loss;
        const double norm = optimizer_grad_norm(&r->store);
        assert_true(isfinite(norm));
        optimizer_step(&r->store, &r->config, r->state.step, r->lr, fmin(1, 1 / norm));
    }
}

static void save(Run *r)
{
    if (comm_rank() == 0) {
        char command[128];
        snprintf(command, sizeof command, "mkdir -p %s", r->config.save_folder);
        assert_int_equal(system(command), 0);
    }
    comm_barrier();
    checkpoint_begin(&r->config, &r->store, &r->state, CHECKPOINT_FILE_BYTES);
    checkpoint_finish();
}

/* The weights and states of two checkpoints are the same files. */
static void expect_same(const char *what, long step, const char *folder, const char *other)
{
    char command[512];
    if (comm_rank() != 0)
        return;
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "optimizer-00001.states" : "model.safetensors";
        snprintf(command, sizeof command, "cmp %s/%s/step%ld/%s %s/%s/step%ld/%s", shared, folder,
                 step, name, shared, other, step, name);
        if (system(command) != 0)
            fail_msg("%s: %s: %s", what, name, command);
    }
}

static void load_run(Run *r, const char *from, long step)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s/step%ld", shared, from, step);
    assert_true(checkpoint_load(path, &r->config, &r->store, &r->state, true));
    assert_int_equal(r->state.step, step);
}

/* States after a parameter stay 0; else groups that include them would be rounded differently. */
static void expect_zero_padding(const char *what, const Run *r)
{
    double looked = 0;
    for (int u = 0; u < r->store.num_units; u++)
        for (int k = 0;
             k < r->store.optimizer->num_states && r->store.shard[u].slice[TRAINED].count; k++) {
            const UnitLayout *shape = &r->store.shape[u];
            const Shard *s = &r->store.shard[u];
            const Slice own = shard_state(s, k);
            if (own.count == 0)
                continue;
            Elements values = elements_fetch(s->state[k], 0, own.count);
            for (int i = 0; i < shape->num_params; i++) {
                const Param *p = &shape->param[i];
                const size_t end = p->offset + (size_t)p->rows * (size_t)p->cols;
                for (size_t at = end; at < p->offset + param_align(end - p->offset); at++)
                    if (at >= own.first && at < own.first + own.count &&
                        (looked++, values.x[at - own.first] != 0))
                        fail_msg("%s: %s of unit %d, element %zu after %s is %g", what,
                                 r->store.optimizer->state[k].name, u, at - end, p->name,
                                 (double)values.x[at - own.first]);
            }
            elements_free(&values);
        }
    comm_sum(&looked, 1);
    assert_true(looked > 0);
}

static void check_case(int which)
{
    char what[64];
    Run r;
    const int W = comm_size();
    snprintf(what, sizeof what, "%s, %s", cases[which].optimizer, cases[which].recipe);
    open_run(&r, which, W, "whole");
    train(&r, STEPS / 2);
    save(&r);
    train(&r, STEPS);
    save(&r);
    if (!(r.loss[STEPS - 1] < r.loss[1] && r.loss[STEPS - 2] < r.loss[0]))
        fail_msg("%s: losses %g, %g, then %g, %g", what, r.loss[0], r.loss[1], r.loss[STEPS - 2],
                 r.loss[STEPS - 1]);
    const double last = r.loss[STEPS - 1];
    expect_zero_padding(what, &r);
    close_run(&r);

    open_run(&r, which, W, "resumed");
    load_run(&r, "whole", STEPS / 2);
    expect_zero_padding(what, &r);
    train(&r, STEPS);
    assert_true(r.loss[STEPS - 1] == last);
    save(&r);
    expect_same(what, STEPS, "whole", "resumed");
    close_run(&r);

    open_run(&r, which, 1, "unsharded");
    load_run(&r, "whole", STEPS);
    save(&r);
    expect_same(what, STEPS, "whole", "unsharded");
    close_run(&r);
}

static void test_training(void **state)
{
    (void)state;
    for (int i = 0; i < CASES; i++)
        check_case(i);
}

static int make_root(void **state)
{
    optimizer_add(&lion);
    return make_shared(state);
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_training) };
    return finish_ranks(cmocka_run_group_tests(tests, make_root, remove_shared));
}
