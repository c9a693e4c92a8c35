/* Runs on any number of ranks resume bit for bit, under every strategy: with adapters, whose base
 * comes only from its own folder, with frozen parameters, and with every optimizer, one of which
 * the test adds. Training changes each trained parameter and no byte of another one, and losses
 * fall. A single rank reads and writes the same files. On 1, 2 and 4 ranks. */
#include "kernels/runtime/comm.h"
#include "kernels/runtime/error.h"
#include "model/checkpoint/checkpoint.h"
#include "model/checkpoint/load.h"
#include "model/checkpoint/save.h"
#include "model/run/quant_stats.h"
#include "tests/test.h"
#include "tests/lion.h"
#include "tests/ranks_state.h"

enum { BATCH = 4, HALF = 2, STEPS = 2 * HALF };
enum { SOME = 1 << LORA_K | 1 << LORA_O | 1 << LORA_UP, Q_AND_V = 1 << LORA_Q | 1 << LORA_V };
#define MLP_AND_HEAD .trainable = { "model.layers.*.mlp.*", "lm_head.weight" }

/* ways: strategies, one bit each; 0: half of them, so that for each format of the base its two
 * recipes cover all strategies. */
static const struct {
    Case k;
    unsigned ways;
} rows[] = {
    { { "bf16", LLAMA, ALL_MODULES } },
    { { "coat", OLMO2, SOME } },
    { { "bf16", LLAMA_GQA, ALL_MODULES, BASE_E4M3 } },
    { { "coat-lean", LLAMA, Q_AND_V, BASE_E4M3 } },
    { { "fp8", QWEN3, ALL_MODULES, BASE_NF4 } },
    { { "coat-lean", OLMO3, ALL_MODULES, BASE_NF4 } },
    { { "coat", QWEN2, ALL_MODULES, BASE_E4M3 } },
    { { "bf16", OLMO, SOME, BASE_NF4, .plain_nf4 = true } },
    { { "coat", LLAMA_GQA, ALL_MODULES, BASE_NF4, .plain_nf4 = true } },
    { { "f32", LLAMA, ALL_MODULES }, 1 << FULL_SHARD },
    { { "coat", MISTRAL, ALL_MODULES }, 1 << SHARD_GRAD_OP },
    { { "coat-lean", OLMO2, ALL_MODULES, BASE_E4M3 }, 1 << FULL_SHARD_ONE_SUM },
    { { "bf16", LLAMA_GQA, ALL_MODULES, BASE_NF4, .optimizer = "adamw8bit" }, 1 << HYBRID_SHARD },
    { { "coat-lean", OLMO3, ALL_MODULES, BASE_NF4 }, 1 << NO_SHARD },
    { { "f32", LLAMA, MLP_AND_HEAD }, 1 << FULL_SHARD },
    { { "bf16", LLAMA, MLP_AND_HEAD }, 1 << FULL_SHARD },
    { { "fp8", LLAMA, MLP_AND_HEAD }, 1 << FULL_SHARD },
    { { "coat", LLAMA, MLP_AND_HEAD }, 1 << FULL_SHARD },
    { { "coat-lean", LLAMA, MLP_AND_HEAD }, 1 << FULL_SHARD },
    { { "coat", LLAMA, MLP_AND_HEAD, .keep = KEEP_BLOCK }, 1 << FULL_SHARD },
    { { "coat", OLMO2 }, 1 << FULL_SHARD },
    { { "fp8-lm", OLMO2 }, 1 << FULL_SHARD },
    { { "f32", OLMO2, .optimizer = "adamw8bit" }, 1 << FULL_SHARD },
    { { "coat-opt", OLMO2, .optimizer = "adamw8bit" }, 1 << FULL_SHARD },
    { { "bf16", OLMO2, .optimizer = "lion" }, 1 << FULL_SHARD },
    { { "coat-opt", OLMO2, .optimizer = "lion" }, 1 << FULL_SHARD },
    { { "coat", OLMO2, .optimizer = "muon" }, 1 << FULL_SHARD },
    { { "f32", OLMO2, .optimizer = "muon" }, 1 << FULL_SHARD },
    { { "coat", OLMOE }, 1 << HYBRID_SHARD },
    { { "f32", OLMOE, .optimizer = "muon" }, 1 << FULL_SHARD },
    /* frozen experts */
    { { "coat", OLMOE, .trainable = { "*.self_attn.*", "*.mlp.gate.weight" } }, 1 << FULL_SHARD },
};
enum { ROWS = sizeof rows / sizeof rows[0] };

static bool trains_all(const Case *k)
{
    return !k->modules && !k->trainable[0];
}

static int cases;       /* number of cases so far; each case has its own folder */
static char *base_path; /* of adapters */

/* Returns a text that is valid until release(). */
static char *text(const char *format, ...) __attribute__((format(printf, 1, 2)));
static char *text(const char *format, ...)
{
    char *s = keep(256);
    va_list list;
    va_start(list, format);
    vsnprintf(s, 256, format, list);
    va_end(list);
    return s;
}

static void shell(const char *command)
{
    if (comm_rank() == 0 && system(command) != 0)
        fail_msg("%s failed", command);
    comm_barrier();
}

/* Saves in this folder. The norms have 64 weights, so groups of 128 and 256 reach into the
 * padding. */
static void open_run(Run *r, const Case *k, Strategy s, const char *folder)
{
    configure(r, k, architecture(k->model), s);
    Config *c = &r->config;
    c->model.lora.base_path = base_path;
    c->global_train_batch_size = BATCH;
    c->optimizer.decay_embeddings = true;
    c->optimizer.lr = strcmp(c->optimizer.name, "lion") == 0 ? 1e-3 : 1e-2;
    c->save_num_checkpoints_to_keep = -1;
    c->text = text("optimizer: {name: %s}\n", c->optimizer.name);
    c->save_folder = text("%s/%d/%s", shared, cases, folder);
    shell(text("mkdir -p %s", c->save_folder));
    alloc_run(r);
}

static void save(Run *r, int step)
{
    const TrainState s = { .step = step };
    checkpoint_begin(&r->config, &r->store, &s, CHECKPOINT_FILE_BYTES);
    checkpoint_finish();
}

static void load(Run *r, int step)
{
    TrainState s = { 0 };
    assert_true(checkpoint_load(text("%s/%d/whole/step%d", shared, cases, step), &r->config,
                                &r->store, &s, true));
    assert_true(s.step == step && r->store.counts.updates == step);
}

/* Every second step has the same batch. */
static void train(Run *r, double *loss, int first, int end)
{
    for (int s = first; s < end; s++) {
        forward_backward(r, s % 2, BATCH / comm_size());
        const double norm = optimizer_grad_norm(&r->store);
        assert_true(isfinite(norm));
        optimizer_step(&r->store, &r->config, s + 1, r->config.optimizer.lr, fmin(1, 1 / norm));
        loss[s] = take_loss(r);
        comm_sum(&loss[s], 1);
    }
}

/* The states of padding stay 0. Otherwise groups that contain padding would be rounded
 * differently. */
static void check_padding(const char *what, const ParamStore *store)
{
    double looked = 0;
    for (int u = 0; u < store->num_units; u++)
        for (int k = 0; k < store->optimizer->num_states && store->shard[u].slice[TRAINED].count;
             k++) {
            const Slice own = shard_state(&store->shard[u], k);
            if (own.count == 0)
                continue;
            Elements values = elements_fetch(store->shard[u].state[k], 0, own.count);
            for (int i = 0; i < store->shape[u].num_params; i++) {
                const Param *p = &store->shape[u].param[i];
                const size_t end = p->offset + param_numel(p);
                for (size_t at = end;
                     p->region == TRAINED && at < p->offset + param_align(end - p->offset); at++)
                    if (at >= own.first && at < own.first + own.count &&
                        (looked++, values.x[at - own.first] != 0))
                        fail_msg("%s: %s of unit %d, element %zu after %s is %g", what,
                                 store->optimizer->state[k].name, u, at - end, p->name,
                                 (double)values.x[at - own.first]);
            }
            elements_free(&values);
        }
    comm_sum(&looked, 1);
    assert_true(looked > 0);
}

/* Compares the last checkpoint of this run with the files of the first run. */
static void check_files(const Run *r)
{
    const char *own = r->config.save_folder,
               *name = r->config.model.lora.rank ? "adapter_model" : "model";
    shell(text("cmp %s/../whole/step%d/%s.safetensors %s/step%d/%s.safetensors", own, STEPS, name,
               own, STEPS, name));
    shell(text("cmp %s/../whole/step%d/optimizer-00001.states %s/step%d/optimizer-00001.states",
               own, STEPS, own, STEPS));
}

static void save_base(const Case *k, Strategy s)
{
    Run r;
    open_run(&r, &(Case){ k->recipe, k->model }, s, "base");
    store_init(&r.store, &r.config.model, 5);
    save(&r, 0);
    base_path = text("%s/step0", r.config.save_folder);
    close_run(&r);
}

static void begin_run(Run *r, const Case *k, Strategy s)
{
    TrainState none;
    open_run(r, k, s, "whole");
    if (k->modules)
        assert_false(checkpoint_load(base_path, &r->config, &r->store, &none, true));
    else
        store_init(&r->store, &r->config.model, 5);
}

static void check_resume(const Case *k, Strategy s, const char *what, double loss[STEPS])
{
    double again[STEPS];
    Run r;
    if (k->modules)
        save_base(k, s);
    begin_run(&r, k, s);
    const Stored before = take_stored(&r.store);
    train(&r, loss, 0, HALF);
    save(&r, HALF);
    train(&r, loss, HALF, STEPS);
    save(&r, STEPS);
    const Stored after = take_stored(&r.store);
    check_stored(what, &after, &before, FROZEN);
    check_trained(what, &r.store, &after, &before);
    if (trains_all(k))
        check_padding(what, &r.store);
    close_run(&r);

    open_run(&r, k, s, "resumed");
    load(&r, HALF);
    if (trains_all(k))
        check_padding(what, &r.store);
    train(&r, again, HALF, STEPS);
    save(&r, STEPS);
    const Stored resumed = take_stored(&r.store);
    check_stored(what, &resumed, &after, TRAINED);
    check_same_bytes("losses of a resumed run", &again[HALF], &loss[HALF], HALF * sizeof *loss);
    check_files(&r);
    close_run(&r);

    open_run(&r, k, ALONE, "alone");
    load(&r, STEPS);
    save(&r, STEPS);
    check_files(&r);
    close_run(&r);
}

/* On one rank nothing is sharded. Weights that stay change no bit. */
static void check_alone(int row, const double loss[STEPS])
{
    static double first[ROWS][STEPS];
    if (first[row][0] == 0)
        memcpy(first[row], loss, sizeof first[row]);
    check_same_bytes("losses of one rank that keeps weights", loss, first[row], sizeof first[row]);
}

TEST(test_resume)
{
    for (int s = 0; s < NUM_STRATEGIES; s++) {
        Strategy strategy;
        for (int i = 0; i < ROWS && use_strategy(&strategy, s); i++) {
            const Case *k = &rows[i].k;
            char what[128];
            double loss[STEPS];
            if (rows[i].ways ? !(rows[i].ways >> s & 1) : comm_size() > 1 && i % 2 != s % 2)
                continue;
            snprintf(what, sizeof what, "%s, %s, base %d, %s, %s", k->recipe,
                     architecture_name(k->model), (int)k->base,
                     k->optimizer ? k->optimizer : "adamw", strategies[s].name);
            check_resume(k, strategy, what, loss);
            for (int n = HALF; n < STEPS && trains_all(k); n++)
                if (!(loss[n] < loss[n - 2]))
                    fail_msg("%s: loss %g in step %d, %g two steps before", what, loss[n], n,
                             loss[n - 2]);
            if (comm_size() == 1)
                check_alone(i, loss);
            base_path = NULL;
            cases++;
            release();
        }
    }
}

static int make_root(void **state)
{
    optimizer_add(&lion);
    return make_shared(state);
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(make_root, remove_shared));
}
