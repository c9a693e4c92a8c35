/* Messages about `trainable`: from the configuration, and for a checkpoint that was trained
 * differently. test_trainable_ranks tests the effects of `trainable`. */
#include "tests/test.h"
#include "tests/saved.h"
#include "tests/try_config.h"

static void open_with(Run *r, char *pattern, const char *recipe)
{
    static char *patterns[8];
    static int used;
    ModelConfig m = architecture(LLAMA);
    *r = (Run){ 0 };
    model_config(&r->config, &m, recipe, 1);
    patterns[used % 8] = pattern;
    r->config.trainable = &patterns[used++ % 8];
    r->config.num_trainable = pattern != NULL;
    place(r);
    store_init(&r->store, &r->config.model, 3);
}

/* States belong to the weights that were trained. */
TEST(test_other_choice)
{
    Run all, some;
    needs_fork();
    open_with(&all, NULL, "f32");
    open_with(&some, "*.mlp.*", "f32");
    save(&all, 10);
    save(&some, 10);
    DIES("the checkpoint has model.embed_tokens.weight.exp_avg: this run freezes the weight, but "
         "the "
         "checkpoint's run trained it. Use the `trainable` of the checkpoint's config.yaml",
         load(&some, step_folder(&all, 10)));
    DIES("the checkpoint has no model.embed_tokens.weight.exp_avg: this run trains the weight, but "
         "the "
         "checkpoint's run did not. Use the `trainable`",
         load(&all, step_folder(&some, 10)));
    load(&some, step_folder(&some, 10));
    close_run(&all);
    close_run(&some);
    release();
}

/* A frozen weight has one copy, in bf16 unless the settings say otherwise. */
TEST(test_rounding)
{
    Run saved, loaded;
    TrainState s;
    needs_fork();
    open_with(&saved, NULL, "f32");
    save(&saved, 10);
    open_with(&loaded, "*.mlp.*", "bf16");
    DIES("warning: ",
         checkpoint_load(step_folder(&saved, 10), &loaded.config, &loaded.store, &s, false);
         die("loaded"));
    DIES("model.safetensors: frozen tensors are stored as F32 in this folder and rounded to bf16 "
         "in this run; --format.frozen=f32 keeps",
         checkpoint_load(step_folder(&saved, 10), &loaded.config, &loaded.store, &s, false);
         die("loaded"));
    close_run(&saved);
    close_run(&loaded);
    release();
}

TEST(test_configuration)
{
    static const struct {
        const char *a, *b, *message;
    } table[] = {
        { "--trainable=model.layer.*", NULL,
          "--trainable=model.layer.*: trainable: 'model.layer.*' names no tensor of this model; "
          "names "
          "are those of a checkpoint" },
        { "--trainable=[model.norm.weight, nothing]", NULL, "'nothing' names no tensor" },
        { "--trainable=lm_head.weight", NULL,
          "the head is the embedding here (model.weight_tying): train model.embed_tokens.weight"
          ", or untie head and embedding with --model.weight_tying=false\n" },
        { "--trainable='*.q_proj.weight'", NULL,
          ": trainable: model.layers.0.self_attn.q_proj.weight is "
          "trained and model.layers.0.self_attn.k_proj.weight is frozen, but they are one matrix "
          "here; train both or none" },
        { "--trainable={a: b}", NULL,
          "trainable: expected a pattern or a list [a, b] of patterns" },
        { "--format.frozen=e4m3", NULL, "format.frozen cannot be e4m3; use bf16 or f32" },
    };
    static char text_of[1 << 16];
    needs_fork();
    assert_int_equal(try_make_folder(NULL), 0);
    try_write(try_path, try_complete);
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        assert_false(try_printed(text_of, sizeof text_of, 2, 1, table[i].a, table[i].b));
        try_contains(text_of, table[i].message);
    }
    Config *c = try_load(1, "--trainable=['*.mlp.*', model.norm.weight]", NULL, NULL, NULL);
    try_contains(c->text, "trainable:\n- \"*.mlp.*\"\n- model.norm.weight\n");
    try_write(try_path, c->text);
    Config *again = try_load(1, NULL, NULL, NULL, NULL);
    assert_string_equal(c->text, again->text);
    assert_int_equal(again->num_trainable, 2);
    config_free(c);
    config_free(again);
    try_write_hf("{" TRY_LLAMA ", \"tie_word_embeddings\": true}");
    char *from = xasprintf("--load_path=%s", try_folder);
    assert_false(try_printed(text_of, sizeof text_of, 2, 1, from, "--trainable=lm_head.weight"));
    try_contains(text_of, "(model.weight_tying): train model.embed_tokens.weight\n");
    free(from);
    assert_int_equal(try_remove_folder(NULL), 0);
}

int main(void)
{
    device_init(0);
    return run_all_tests(make_root, remove_root);
}
