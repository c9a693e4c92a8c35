/* Images on ranks: only the first sequence of a batch has some, so that most ranks have none. Steps
 * on 1, 2 and 4 ranks, under every strategy, with context ranks and with pipeline stages, have the
 * losses and gradient norms of ranks that each compute the whole batch. In F32 these differ by the
 * order of sums only: up to 32 terms of 2 sums, a few u = 2^-24 of each; three steps of AdamW with
 * eps 1e-5 pass it on. 1e-5 is 80 times of that. */
#include "tests/kit.h"

#include "model/predict/memory.h"
#include "tests/images.h"
#include "tests/ranks.h"
#include "tests/ranks_training.h"

enum { BATCH = 4, T = 16, STEPS = 3 };

static const struct {
    const char *name;
    int groups, context, stages;
    Gathering gathering;
    GradSum sum;
} ways[] = {
    { "FULL_SHARD, sums per micro-batch", 1, 1, 1, GATHER_OFTEN, SUM_OFTEN },
    { "FULL_SHARD, sums per step", 1, 1, 1, GATHER_OFTEN, SUM_ONCE },
    { "SHARD_GRAD_OP", 1, 1, 1, GATHER_ONCE, SUM_OFTEN },
    { "HYBRID_SHARD", 2, 1, 1, GATHER_OFTEN, SUM_OFTEN },
    { "NO_SHARD", 0, 1, 1, GATHER_OFTEN, SUM_ONCE }, /* 0: a group per rank */
    { "context", 1, 2, 1, GATHER_OFTEN, SUM_OFTEN },
    { "pipeline", 1, 1, 2, GATHER_ONCE, SUM_ONCE },
};
enum { NUM_WAYS = sizeof ways / sizeof ways[0] };

typedef struct {
    double loss[STEPS], norm[STEPS];
} Result;
typedef struct {
    char *trainable;
    Lora lora;
} Trained;

/* Sequences [first, first + count) of the batch of a step. */
static void fill_batch(int *tokens, int *targets, TestImages *images, int step)
{
    for (int n = 0; n < BATCH * T; n++)
        tokens[n] = test_token(11, (uint64_t)(step * BATCH * T + n), 70);
    for (int n = 0; n < BATCH * T; n++)
        targets[n] = n % T == T - 1 ? -1 : tokens[n + 1];
    place_images(images, tokens, targets, 1, T, (uint64_t)step + 20);
}

/* whole: each rank computes all sequences of the batch. */
static void run(Result *r, int way, const char *recipe, const Trained *t, bool whole)
{
    const int groups = ways[way].groups ? ways[way].groups : comm_size(),
              shard_ranks = comm_size() / groups / ways[way].stages;
    ModelConfig m = with_images(architecture(LLAMA), PROJECTOR_MLP, true);
    Config c;
    Model model;
    ParamStore store;
    m.lora = t->lora;
    model_config(&c, &m, recipe, 1);
    c.global_train_batch_size = BATCH;
    c.trainable = (char **)&t->trainable;
    c.num_trainable = t->trainable != NULL;
    c.strategy = (Strategy){ shard_ranks,
                             ways[way].gathering,
                             ways[way].sum,
                             .context_ranks = ways[way].context,
                             .pipeline_stages = ways[way].stages,
                             .pipeline_chunks = 1 };
    divide_in_stages(ways[way].stages, shard_ranks, ways[way].context);
    const int data = comm_group_size(RANKS_DATA), share = whole ? BATCH : BATCH / data;
    const int first = whole ? 0 : comm_group_rank(RANKS_DATA) * share;
    if (whole)
        c.global_train_batch_size *= data;
    memory_plan(&model, &store, &c);
    model_alloc(&model, &store, &c);
    store_init(&store, &m, 5);
    for (int s = 0; s < STEPS; s++) {
        int tokens[BATCH * T], targets[BATCH * T];
        TestImages images;
        fill_batch(tokens, targets, &images, s);
        fsdp_empty_grads(&store);
        model_zero_losses(&model);
        model_use_images(&model, (ImageRows){ images.row + first * T, F32 });
        model_micro_batches(&model, &store, tokens + first * T, targets + first * T, NULL, share,
                            1.0f / (float)(BATCH * T) / (whole ? (float)data : 1), 0,
                            PASS_COMPLETE);
        r->loss[s] = model_losses(&model).loss / (whole ? data : 1);
        comm_sum(&r->loss[s], 1);
        r->norm[s] = optimizer_grad_norm(&store);
        optimizer_step(&store, &c, s + 1, 1e-2, fmin(1, 1 / r->norm[s]));
    }
    model_free(&model, &store);
}

static bool is_possible(int way)
{
    const int parts =
        ways[way].context * ways[way].stages * (ways[way].groups ? ways[way].groups : 1);
    return comm_size() >= parts &&
           comm_size() / ways[way].stages >=
               ways[way].context * (ways[way].groups ? ways[way].groups : 1);
}

static void compare(const Trained *t)
{
    Result expected;
    run(&expected, 0, "f32", t, true);
    for (int way = 0; way < NUM_WAYS; way++) {
        Result found;
        if (!is_possible(way))
            continue;
        run(&found, way, "f32", t, false);
        for (int s = 0; s < STEPS; s++)
            if (!(fabs(found.loss[s] - expected.loss[s]) <= 1e-5 * expected.loss[s]) ||
                !(fabs(found.norm[s] - expected.norm[s]) <= 1e-5 * expected.norm[s]) ||
                !(expected.norm[s] > 0))
                fail_msg("%s, step %d: loss %.8g, norm %.8g; expected %.8g, %.8g", ways[way].name,
                         s + 1, found.loss[s], found.norm[s], expected.loss[s], expected.norm[s]);
    }
}

static void test_all(void **state)
{
    (void)state;
    compare(&(Trained){ NULL });
}

static void test_projector(void **state)
{
    (void)state;
    compare(&(Trained){ "multi_modal_projector.*" });
}

/* LoRA and QLoRA: adapters, and the projector next to them. */
static void test_adapters(void **state)
{
    (void)state;
    Lora l = { .rank = 4,
               .alpha = 8,
               .projector = true,
               .target = { [LORA_Q] = true, [LORA_UP] = true, [LORA_DOWN] = true } };
    compare(&(Trained){ .lora = l });
    l.base = BASE_NF4;
    compare(&(Trained){ .lora = l });
}

/* FP8 recipes: the same bits in a second run, and finite losses that fall, in every way. */
static void test_recipes(void **state)
{
    (void)state;
    static const char *const names[] = { "coat", "coat-lean", "bf16" };
    for (int way = 0; way < NUM_WAYS; way++) {
        Result one, other;
        if (!is_possible(way))
            continue;
        run(&one, way, names[way % 3], &(Trained){ NULL }, false);
        run(&other, way, names[way % 3], &(Trained){ NULL }, false);
        assert_memory_equal(&one, &other, sizeof one);
        assert_true(isfinite(one.loss[STEPS - 1]) && isfinite(one.norm[STEPS - 1]));
    }
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_all),
                                        cmocka_unit_test(test_projector),
                                        cmocka_unit_test(test_adapters),
                                        cmocka_unit_test(test_recipes) };
    return finish_ranks(cmocka_run_group_tests(tests, NULL, NULL));
}
