/* Adds a recipe and a metric as a program does that links this code (model/README.md): a row of
 * formats, and an object that begins with "step". */
#include "tests/test.h"
#include "tests/kit.h"

#include <jansson.h>

#include "model/run/log.h"
#include "tests/recipe_runs.h"

/* This combination of formats is in no row of recipe.c: FP8 operands, attention in groups of 16,
 * gate and up in BF16. */
static const Recipe made_up = {
    .name = "made-up",
    .residual = { BF16 },
    .saved_norm_input = { BF16 },
    .saved_qkv = { BF16 },
    .saved_attention = { E4M3, 16 },
    .saved_mlp = { BF16 },
    .operand = { E4M3 },
    .gradient = { E5M2 },
    .head = { BF16 },
    .keep = KEEP_ALL,
    .forward = FROM_EXACT,
    .fast = FAST_FORWARD,
    .scales = PER_MICROBATCH,
    .master = { F32 },
    .grads = { BF16 },
    .moment1 = { BF16 },
    .moment2 = { E4M3, 128, true },
    .frozen = { BF16 },
};

/* The recipe's formats take effect: the result is near the result of f32, within test_recipes'
 * bound for FP8 operands, and differs from the result of bf16. */
TEST(test_recipe)
{
    for (SmallModel a = 0; a < NUM_ARCHITECTURES; a++) {
        const ModelConfig m = wide(a);
        Config c, f32, bf16;
        const char *where;
        int unit;
        model_config(&c, &m, "f32", B);
        f32 = bf16 = c;
        c.recipe = made_up;
        bf16.recipe = *recipe_find("bf16");
        Result found = run_config(c, 1, false), exact = run_config(f32, 1, false),
               near = run_config(bf16, 1, false);
        const double worst = worst_distance(&found, &exact, &unit, &where);
        if (!(fabs(found.loss - exact.loss) <= 0.01 * exact.loss && worst <= 0.32))
            fail_msg("%s: loss %.6f (f32 %.6f), %s of unit %d is off by %.4f", architecture_name(a),
                     found.loss, exact.loss, where, unit, worst);
        assert_true(worst > 2 * worst_distance(&near, &exact, &unit, &where));
        free_result(&found), free_result(&exact), free_result(&near);
    }
}

TEST(test_metric)
{
    char folder[] = "/tmp/coat-added-XXXXXX", path[64];
    const ModelConfig m = architecture(LLAMA);
    Config c;
    assert_non_null(mkdtemp(folder));
    model_config(&c, &m, "f32", B);
    c.save_folder = folder;
    Log *log = log_open(&c, NULL, (RunLength){ .steps = 10 }, 10, 0, false, 1);
    json_t *o = json_object();
    json_object_set_new(o, "step", json_integer(3));
    log_set(o, "made_up/value", 0.25);
    log_set(o, "made_up/nothing", NAN);
    log_object(log, o);
    log_close(log);
    snprintf(path, sizeof path, "%s/metrics.jsonl", folder);
    json_t *found = json_load_file(path, 0, NULL);
    assert_string_equal(json_object_iter_key(json_object_iter(found)), "step");
    assert_int_equal(json_integer_value(json_object_get(found, "step")), 3);
    assert_true(json_real_value(json_object_get(found, "made_up/value")) == 0.25);
    assert_true(json_is_null(json_object_get(found, "made_up/nothing")));
    assert_true(json_is_number(json_object_get(found, "time")));
    json_decref(found);
    assert_int_equal(unlink(path) | rmdir(folder), 0);
}

int main(void)
{
    return run_all_tests(start_device, NULL);
}
