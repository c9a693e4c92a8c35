/* Frozen parameters on any number of ranks, under every strategy: their bytes never change, the
 * gradients of other parameters have the bits of a run that trains everything, and memory is saved.
 * (test_resume_ranks tests frozen parameters in checkpoints.) */
#include "model/plan_model.h"
#include "tests/test.h"
#include "tests/ranks_state.h"

enum { BATCH = 4, STEPS = 2 };

/* Recipes, changed here so that frozen weights are rounded for computing as trained weights are. */
static const struct {
    const char *name;
    Keep keep;
    DType frozen;
} recipe_rows[] = {
    { "f32", KEEP_ALL, F32 },      { "bf16", KEEP_ALL, BF16 },         { "fp8", KEEP_ALL, F32 },
    { "coat", KEEP_INPUTS, BF16 }, { "coat-lean", KEEP_INPUTS, BF16 }, { "coat", KEEP_BLOCK, BF16 },
};
enum { NUM_RECIPES = sizeof recipe_rows / sizeof recipe_rows[0] };

static const struct {
    SmallModel model;
    const char *patterns[2];
    int first_trained;
} choices[] = {
    { LLAMA, { "model.layers.*.mlp.*", "lm_head.weight" }, 1 },
    { LLAMA_GQA, { "model.layers.1.self_attn.?_proj.weight", "model.norm.weight" }, 2 },
    { OLMO2, { "*norm.weight" }, 1 },
    { OLMO, { "model.embed_tokens.weight" }, 0 },
    { QWEN3, { "model.layers.*.self_attn.*" }, 1 },
    { LLAMA, { "lm_head.weight" }, 3 },
    { QWEN2, { "*_proj.bias" }, 1 },
};
enum { NUM_CHOICES = sizeof choices / sizeof choices[0] };

/* The gradients of a step, before any update. */
static Whole open_run(Run *r, const Case *k, DType frozen, Strategy strategy)
{
    configure(r, k, architecture(k->model), strategy);
    r->config.recipe.frozen = (Format){ frozen, 0, false };
    r->config.global_train_batch_size = BATCH;
    place_run(r);
    forward_backward(r, 0, 1);
    return take_whole(r, GRADIENTS);
}

/* NOTE: an element's sum over ranks begins with the rank that owns the element, which may be
 * another rank if there are fewer parameters. So the test compares gradients of one micro-batch per
 * rank. With NCCL, whose order depends on the owner, it uses up to two ranks. */
static void check_case(int choice, int recipe, Strategy strategy, const char *name)
{
    const Case whole = { recipe_rows[recipe].name, choices[choice].model,
                         .keep = (int)recipe_rows[recipe].keep };
    Case k = whole;
    Run r;
    memcpy(k.trainable, choices[choice].patterns, sizeof k.trainable);
    const Whole all = open_run(&r, &whole, recipe_rows[recipe].frozen, strategy);
    const size_t bytes = model_planned_bytes(&r.model, &r.store);
    close_run(&r);

    const Whole some = open_run(&r, &k, recipe_rows[recipe].frozen, strategy);
    assert_int_equal(r.store.first_trained, choices[choice].first_trained);
    assert_true(model_planned_bytes(&r.model, &r.store) < bytes);
    if (on_cpu() || comm_size() <= 2)
        assert_true(check_whole(name, &some, &all, 0) > 0);
    const Stored before = take_stored(&r.store);
    for (int s = 0; s < STEPS; s++)
        train_step(&r, s);
    const Stored after = take_stored(&r.store);
    check_stored(name, &after, &before, FROZEN);
    check_trained(name, &r.store, &after, &before);
    close_run(&r);
    release();
}

TEST(test_strategies)
{
    /* on several ranks, every pair of strategy, recipe and choice occurs */
    for (int s = 0; s < NUM_STRATEGIES; s++) {
        Strategy strategy;
        for (int i = 0; i < NUM_RECIPES && use_strategy(&strategy, s); i++)
            for (int c = 0; c < NUM_CHOICES; c++)
                if (comm_size() == 1 || (s + i + c) % 2 == 0)
                    check_case(c, i, strategy, strategies[s].name);
    }
}

int main(int argc, char **argv)
{
    start_ranks(&argc, &argv);
    return finish_ranks(run_all_tests(NULL, NULL));
}
