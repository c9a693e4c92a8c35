/* model/config: values, overrides, OLMo's spellings, Hugging Face folders. test_config_text.c tests
 * the written text and the texts about keys; test_config_errors.c tests mistakes and their
 * messages. */
#include "kernels/kernels.h"
#include "model/formats/hf.h"
#include "model/keys/config_keys.h"
#include "model/keys/key.h"
#include "model/keys/value.h"
#include "model/keys/value_print.h"
#include "tests/test.h"
#include "tests/try_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- valid configurations -------------------------------------------------------------------- */

TEST(test_defaults)
{
    try_write(try_path, try_complete);
    Config *c = try_load(2, NULL, NULL, NULL, NULL);
    const ModelConfig *m = &c->model;
    assert_int_equal(m->n_kv_heads, 4);
    assert_int_equal(m->head_dim, 16);
    assert_int_equal(m->mlp_width, 128); /* mlp_ratio 4 is the width of gate and up together */
    assert_int_equal(m->embedding_size, 128);
    assert_int_equal(m->eos_token_id, 99);
    assert_int_equal(m->pad_token_id, -1);
    assert_int_equal(m->norm.kind, RMS_NORM);
    assert_true(m->norm.eps == 1e-5f && m->norm_affine && m->weight_tying && !m->qk_norm &&
                !m->norm_after);
    assert_true(m->clip_qkv == 0 && m->rope_theta == 10000 && m->rope_scaling.factor == 0 &&
                m->init_fn == INIT_NORMAL);
    assert_string_equal(c->recipe.name, "coat");
    assert_true(c->optimizer.eps == 1e-5 && c->optimizer.beta1 == 0.9 &&
                c->optimizer.beta2 == 0.95);
    assert_true(c->scheduler.warmup_min_lr == -1 && c->scheduler.t_max == 0 &&
                c->scheduler.grad_clip_warmup_factor == 1);
    assert_true(c->max_grad_norm == 0 && c->z_loss == 0 && c->data.files.itemsize == 2 &&
                c->data.seed == 6198);
    assert_true(c->data.instance_filter.max_count == 0 && c->max_duration.steps == 100 &&
                c->stop_at.steps == 0);
    assert_true(c->save_interval == 1000 && c->save_num_checkpoints_to_keep == -1 &&
                c->eval_interval == 1000);
    assert_true(c->device_eval_batch_size == 2 && c->eval_subset_num_batches == -1 &&
                c->restore_dataloader);
    assert_string_equal(c->save_folder, "runs/try");
    assert_null(c->load_path);
    config_free(c);
}

TEST(test_values)
{
    try_write_changed("paths", "paths: b.npy");
    Config *c = try_load(1, "--max_duration=2e12T", "--optimizer={betas: [0, .5], eps: 1E-8}",
                         "--save-overwrite", "--stop_at=1_000");
    assert_true(c->max_duration.tokens == 2000000000000 && c->max_duration.steps == 0 &&
                c->stop_at.steps == 1000);
    assert_true(c->optimizer.beta1 == 0 && c->optimizer.beta2 == 0.5 && c->optimizer.eps == 1e-8);
    /* an override of a section keeps the section's other keys */
    assert_true(c->optimizer.lr == 1e-3);
    assert_true(c->save_overwrite && c->data.files.num_paths == 1);
    assert_string_equal(c->data.files.paths[0], "b.npy");
    config_free(c);

    c = try_load(1, "--max_duration=1.5ep", "--scheduler.units=tokens", "--scheduler.t_max=5e12",
                 "--data.paths=[x, 'y z', \"q\"]");
    assert_true(c->max_duration.epochs == 1.5 && c->scheduler.in_tokens &&
                c->scheduler.t_max == 5000000000000);
    assert_int_equal(c->data.files.num_paths, 3);
    assert_string_equal(c->data.files.paths[1], "y z");
    config_free(c);

    /* gradients of many micro-batches are summed in F32 unless BF16 is requested */
    c = try_load(1, "--recipe=coat", "--global_train_batch_size=256",
                 "--device_train_microbatch_size=2", NULL);
    assert_int_equal(c->recipe.grads.dtype, BF16);
    config_free(c);
    c = try_load(1, "--recipe=coat", "--global_train_batch_size=258",
                 "--device_train_microbatch_size=2", NULL);
    assert_int_equal(c->recipe.grads.dtype, F32);
    config_free(c);
    /* the same for many ranks; each rank has two micro-batches */
    for (int ranks = 128; ranks <= 256; ranks += 128) {
        char size[64];
        snprintf(size, sizeof size, "--global_train_batch_size=%d", 2 * ranks);
        c = try_load(ranks, "--recipe=coat", size, "--device_train_microbatch_size=1", NULL);
        assert_int_equal(c->recipe.grads.dtype, ranks == 128 ? BF16 : F32);
        config_free(c);
    }
    c = try_load(2, "--recipe=coat", "--global_train_batch_size=512",
                 "--device_train_microbatch_size=1", "--format.grads=bf16");
    assert_int_equal(c->recipe.grads.dtype, BF16);
    config_free(c);

    c = try_load(1,
                 "--model={sliding_window: 8, layer_types: [sliding_attention, full_attention, "
                 "full_attention], n_layers: 7}",
                 "--model.attention_layer_norm=head",
                 "--model.rope_scaling={rope_type: yarn, factor: 4, attention_factor: 1.5}", NULL);
    assert_true(c->model.qk_norm == QK_NORM_HEAD && c->model.sliding_window == 8 &&
                c->model.layer_types.count == 3);
    for (int l = 0; l < 7; l++)
        assert_true(layer_slides(&c->model, l) == (l % 3 == 0) && layer_is_scaled(&c->model, l));
    assert_true(c->model.rope_scaling.type == ROPE_YARN && c->model.rope_scaling.beta_slow == 1);
    assert_true(c->model.rope_scaling.attention_factor == 1.5 &&
                c->model.rope_scaling.original_length == 8192);
    config_free(c);
    c = try_load(1, "--model.sliding_window=8",
                 "--model.layer_types=[sliding_attention, sliding_attention]", NULL, NULL);
    assert_true(c->model.layer_types.count == 0 && layer_slides(&c->model, 0) &&
                layer_slides(&c->model, 1));
    config_free(c);
    /* the default type, as for files without a type */
    c = try_load(1, "--model.rope_scaling.factor=8", NULL, NULL, NULL);
    assert_true(c->model.rope_scaling.type == ROPE_LLAMA3);
    config_free(c);

    /* 40 tokens per step are 8 sequences of 5 tokens. 2.5 steps are rounded to 3, for a warmup of 1
     * and a decay of 2. */
    c = try_load(1, "--model.max_sequence_length=5", "--max_duration=100T",
                 "--scheduler={name: wsd, t_warmup: 1, t_decay: 2}", NULL);
    assert_true(c->scheduler.name == WSD && c->scheduler.t_decay == 2);
    config_free(c);

    c = try_load(1, "--seed=9007199254740993", "--data.seed=0", "--save_interval=null",
                 "--eval_interval=0");
    assert_true(c->seed == 9007199254740993 && c->data.seed == 0 && c->save_interval == 0 &&
                c->eval_interval == 0);
    config_free(c);
}

TEST(test_datasets_and_formats)
{
    try_write(try_path, try_complete);
    Config *c =
        try_load(1, "--data={paths: null, datasets: {zebra: [z.npy], ape: [a.npy, b.npy]}}",
                 "--recipe=f32", "--format={master: bf16, moment1: e5m2/128, moment2: e4m3/128}",
                 "--activations={keep: inputs}");
    assert_int_equal(c->data.files.num_paths, 3);
    assert_string_equal(c->data.files.paths[0], "a.npy");
    assert_string_equal(c->data.files.paths[2], "z.npy");
    assert_true(c->recipe.master.dtype == BF16 && c->recipe.moment1.dtype == E5M2 &&
                c->recipe.keep == KEEP_INPUTS);
    assert_true(c->recipe.moment2.dtype == E4M3 && c->recipe.moment2.group == 128);
    config_free(c);

    c = try_load(1, "--data.instance_filter={}", "--max_duration=5", NULL, NULL);
    assert_int_equal(c->data.instance_filter.max_count, 32);
    config_free(c);
}

/* OLMo's should_checkpoint_block (olmo/model.py): block i % n == 0, or block i % n != 0. */
TEST(test_recompute)
{
    static const struct {
        const char *word;
        int n;
        bool rest;
    } shares[] = {
        { "one_in_two", 2, false },   { "one_in_three", 3, false }, { "one_in_four", 4, false },
        { "one_in_eight", 8, false }, { "two_in_three", 3, true },  { "three_in_four", 4, true },
    };
    char column[64], text[1024];
    try_write(try_path, try_complete);
    for (size_t i = 0; i < sizeof shares / sizeof shares[0]; i++) {
        snprintf(column, sizeof column, "--activations.recompute=%s", shares[i].word);
        Config *c = try_load(1, column, "--recipe=coat", NULL, NULL);
        for (int l = 0; l < 24; l++)
            assert_int_equal(recipe_keep(&c->recipe, l),
                             (l % shares[i].n == 0) != shares[i].rest ? KEEP_BLOCK : KEEP_INPUTS);
        assert_true(recipe_recomputes(&c->recipe));
        config_free(c);
    }
    Config *c = try_load(1, "--activations.recompute=none", "--recipe=bf16", NULL, NULL);
    assert_false(recipe_recomputes(&c->recipe));
    config_free(c);
    assert_true(try_printed(text, sizeof text, 2, 1, "--activations.keep=block",
                            "--activations.recompute=one_in_two"));
    try_contains(text, "activations.recompute (activations.keep is block: all blocks recompute)");
}

/* A recipe counts as changed exactly if one of its formats differs from its row. */
TEST(test_changed_recipe)
{
    static const char *const formats[] = { "f32", "bf16", "e5m2" };
    Settings *s = calloc(1, sizeof *s);
    int columns = 0, changes = 0;
    for (const ConfigKey *k = config_keys; k->name; k++) {
        columns += key_column(k) != NULL;
        for (int i = 0; key_column(k) && (k->words ? k->words[i].word != NULL : i < 3); i++) {
            s->c.recipe = *recipe_find("coat");
            char *own = value_printed(s, k);
            value_parse_text(s, k, k->words ? k->words[i].word : formats[i], "test");
            char *now = value_printed(s, k);
            if (recipe_is_changed(&s->c.recipe) != (strcmp(own, now) != 0))
                fail_msg("%s: %s instead of %s", k->name, now, own);
            changes += strcmp(own, now) != 0;
            free(own);
            free(now);
        }
    }
    assert_true(columns == 19 && changes > columns);
    free(s);
}

/* Which ranks share a copy of the model, what they keep, and the format of gradient sums. */
TEST(test_strategies)
{
    static const struct {
        const char *a, *b;
        int shard_ranks;
        Gathering gathering;
        GradSum sum;
    } list[] = {
        { NULL, NULL, 4, GATHER_ONCE_IF_FITS, SUM_ONCE_IF_FITS },
        { "--fsdp.sharding_strategy=FULL_SHARD", "--fsdp.grad_sync_mode=batch", 4,
          GATHER_ONCE_IF_FITS, SUM_ONCE },
        { "--fsdp.sharding_strategy=SHARD_GRAD_OP", "--fsdp.grad_sync_mode=micro_batch", 4,
          GATHER_ONCE, SUM_OFTEN },
        { "--fsdp.sharding_strategy=NO_SHARD", NULL, 1, GATHER_ONCE_IF_FITS, SUM_ONCE_IF_FITS },
        { "--fsdp.sharding_strategy=HYBRID_SHARD", "--fsdp.hybrid_sharding_num_model_replicas=2", 2,
          GATHER_ONCE_IF_FITS, SUM_ONCE_IF_FITS },
        { "--fsdp.sharding_strategy=_HYBRID_SHARD_ZERO2",
          "--fsdp.hybrid_sharding_num_model_replicas=4", 1, GATHER_ONCE, SUM_ONCE_IF_FITS },
        { "--parallelism.pipeline=2", "--model.weight_tying=false", 2, GATHER_ONCE, SUM_ONCE },
        { "--parallelism={pipeline: 4, pipeline_schedule: Sequential}",
          "--model={n_layers: 4, weight_tying: false}", 1, GATHER_ONCE_IF_FITS, SUM_ONCE },
        { "--parallelism={pipeline: 2, context: 2}", "--model.weight_tying=false", 2, GATHER_ONCE,
          SUM_ONCE },
        { "--parallelism.replicate=2", NULL, 2, GATHER_ONCE_IF_FITS, SUM_ONCE_IF_FITS },
        { "--parallelism.shard=4", "--fsdp.sharding_strategy=SHARD_GRAD_OP", 4, GATHER_ONCE,
          SUM_ONCE_IF_FITS },
        { "--parallelism={replicate: 4, shard: 1}", "--fsdp.sharding_strategy=NO_SHARD", 1,
          GATHER_ONCE_IF_FITS, SUM_ONCE_IF_FITS },
        { "--parallelism={replicate: 2, shard: 1, context: 2}", NULL, 2, GATHER_ONCE_IF_FITS,
          SUM_ONCE_IF_FITS },
        { "--parallelism.context=2", NULL, 4, GATHER_ONCE_IF_FITS, SUM_ONCE_IF_FITS },
        { "--parallelism.context=2", "--fsdp.sharding_strategy=NO_SHARD", 2, GATHER_ONCE_IF_FITS,
          SUM_ONCE_IF_FITS },
        { "--parallelism.tensor=2", "--recipe=bf16", 2, GATHER_ONCE_IF_FITS, SUM_ONCE_IF_FITS },
        { "--parallelism={tensor: 2, context: 2}", "--recipe=bf16", 2, GATHER_ONCE_IF_FITS,
          SUM_ONCE_IF_FITS },
    };
    try_write(try_path, try_complete);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        Config *c = try_load(4, list[i].a, list[i].b, "--global_train_batch_size=4",
                             "--device_train_microbatch_size=1");
        if (c->strategy.shard_ranks != list[i].shard_ranks ||
            c->strategy.gathering != list[i].gathering || c->strategy.grad_sum != list[i].sum)
            fail_msg("case %zu: %d ranks, gathering %d, sum %d", i, c->strategy.shard_ranks,
                     c->strategy.gathering, (int)c->strategy.grad_sum);
        config_free(c);
    }
    Config *mixed = try_load(4, "--fsdp.precision=mixed", "--recipe=coat",
                             "--global_train_batch_size=4", "--device_train_microbatch_size=1");
    assert_int_equal(mixed->recipe.grads.dtype, F32);
    config_free(mixed);
    config_free(try_load(8, "--parallelism={tensor: 4, context: 2}", "--generate=prompts.jsonl",
                         "--recipe=bf16", NULL));
    mixed = try_load(1, "--fsdp.precision=mixed", "--recipe=coat", NULL, NULL);
    assert_int_equal(mixed->recipe.grads.dtype, BF16);
    config_free(mixed);
}

/* A shell does not replace ~/ after --key=. */
TEST(test_home)
{
    char made[128];
    try_write(try_path, try_complete);
    setenv("HOME", try_folder, 1);
    Config *c = try_load(1, "--save_folder=~/run", "--data.paths=[~/a.npy, b~/c.npy]", NULL, NULL);
    snprintf(made, sizeof made, "%s/run", try_folder);
    assert_string_equal(c->save_folder, made);
    snprintf(made, sizeof made, "%s/a.npy", try_folder);
    assert_string_equal(c->data.files.paths[0], made);
    assert_string_equal(c->data.files.paths[1], "b~/c.npy");
    config_free(c);
}

/* By default, validation sets are packed like the training data, and the config.yaml of a run has
 * all settings. */
TEST(test_packing)
{
    try_write(try_path, try_complete);
    Config *c = try_load(1, "--data.packing=best_fit", "--data.document_boundaries=metadata",
                         "--data.long_documents=split",
                         "--evaluators=[{label: a, data: {paths: [x.npy], label_mask_paths: [m], "
                         "document_boundaries: eos}}, "
                         "{label: b, data: {paths: y.npy, packing: concat}}]");
    assert_true(c->data.generate_doc_lengths && c->data.files.packing == PACK_BEST_FIT &&
                c->data.long_documents == LONG_SPLIT);
    assert_true(c->eval[0].files.packing == PACK_BEST_FIT &&
                c->eval[0].files.boundaries == BOUNDARIES_EOS);
    assert_true(c->eval[1].files.packing == PACK_CONCAT &&
                c->eval[1].files.boundaries == BOUNDARIES_METADATA);
    assert_int_equal(c->eval[0].files.num_label_mask_paths, 1);
    assert_string_equal(c->eval[0].files.label_mask_paths[0], "m");
    assert_int_equal(c->eval[1].files.num_label_mask_paths, 0);
    try_write(try_path, c->text);
    Config *again = try_load(1, NULL, NULL, NULL, NULL);
    assert_string_equal(again->text, c->text);
    config_free(again);
    config_free(c);

    try_write(try_path, try_complete);
    try_accepted("--data.packing=best_fit", "--data.generate_doc_lengths=false",
                 "data.generate_doc_lengths=false best_fit");
    try_accepted("--data.generate_attention_mask=true",
                 "--model={pad_token_id: 7, eos_token_id: 7}", "data.generate_attention_mask 7");
    /* no other setting needs documents */
    c = try_load(1, "--data.document_boundaries=metadata", NULL, NULL, NULL);
    assert_int_equal(c->data.files.boundaries, BOUNDARIES_EOS);
    config_free(c);
}

TEST(test_published)
{
    try_write(try_path, try_published);
    Config *c = try_load(4, "--recipe=bf16", NULL, NULL, NULL);
    assert_true(c->model.mlp_width == 256 && !c->model.norm_affine &&
                c->model.init_fn == INIT_MITCHELL);
    assert_true(c->scheduler.name == LINEAR_WITH_WARMUP &&
                c->scheduler.grad_clip_warmup_steps == 1000 &&
                c->scheduler.grad_clip_warmup_factor == 10);
    assert_true(c->max_duration.steps == 739328 && c->save_interval_unsharded == 10000 &&
                c->device_eval_batch_size == 8);
    assert_int_equal(c->num_eval, 3);
    try_contains(c->eval[1].where, "x.yaml:28: ");
    try_names(c->eval[1].where, "pile-validation --evaluators=[]");
    assert_string_equal(c->eval[0].label, "c4-validation");
    assert_string_equal(c->eval[1].label, "pile-validation");
    assert_string_equal(c->eval[1].files.paths[1], "eval/p1.npy");
    assert_string_equal(c->eval[2].label, "own");
    assert_int_equal(c->eval[0].files.itemsize, 2);
    assert_int_equal(c->eval[2].files.itemsize, 4);
    config_free(c);
}

/* A single warning names all settings that have no effect. */
TEST(test_warning)
{
    char message[8192];
    try_write(try_path, try_published);
    assert_true(
        try_printed(message, sizeof message, 2, 1, "--recipe=bf16", "--scheduler.t_decay=5"));
    try_names(message, "scheduler.t_decay wsd data.paths piqa far-validation");
    assert_null(strstr(strstr(message, "warning:") + 1, "warning:"));

    static const struct {
        const char *a, *b, *names;
    } idle[] = {
        { "--recipe=bf16", "--fp8.down_scales=channel", "fp8.down_scales format.operand bf16" },
    };
    try_write(try_path, try_complete);
    for (size_t i = 0; i < sizeof idle / sizeof *idle; i++) {
        try_accepted(idle[i].a, idle[i].b, idle[i].names);
    }
    try_accepted(NULL, NULL, "");
    /* 9.5 steps of 8 x 64 tokens become 10 */
    try_accepted("--model.max_sequence_length=64", "--max_duration=4864T", "");
    try_accepted("--model.max_sequence_length=64", "--max_duration=4608T",
                 "scheduler.t_warmup 10 9");
    try_write_changed("betas:", "betas: [0.9, 0.999]");
    try_accepted("--recipe=coat", NULL, "");
    try_accepted("--recipe=coat", "--format.moment2=e4m3/128", "0.999 --format.moment2=e4m3/128+");
}

/* ---- Hugging Face ---------------------------------------------------------------------------- */

TEST(test_hf)
{
    char from[128];
    snprintf(from, sizeof from, "--load_path=%s", try_folder);
    try_write_hf("{" TRY_LLAMA
                 ", \"num_key_value_heads\": 2, \"head_dim\": 8, \"rope_parameters\": {"
                 "\"rope_type\": \"llama3\", \"rope_theta\": 5e5, \"factor\": 32.0, "
                 "\"low_freq_factor\": 1.0, "
                 "\"high_freq_factor\": 4.0, \"original_max_position_embeddings\": 256}, "
                 "\"rms_norm_eps\": 1e-5, "
                 "\"eos_token_id\": [7, 8]}");
    Config *c = try_load(1, from, "--model.max_sequence_length=128", NULL, NULL);
    const ModelConfig *m = &c->model;
    assert_true(m->d_model == 64 && m->n_layers == 2 && m->n_kv_heads == 2 && m->head_dim == 8 &&
                m->mlp_width == 96);
    assert_true(m->vocab_size == 90 && m->embedding_size == 128 && m->max_sequence_length == 128 &&
                m->eos_token_id == 7);
    assert_true(m->norm.kind == RMS_NORM && m->norm.eps == 1e-5f && m->norm_affine &&
                !m->norm_after && !m->weight_tying);
    assert_true(m->rope_theta == 5e5 && m->rope_scaling.factor == 32 &&
                m->rope_scaling.original_length == 256);
    config_free(c);

    try_write_hf("{" TRY_LLAMA ", \"rope_theta\": 20000.0, \"rope_scaling\": {"
                 "\"type\": \"llama3\", \"factor\": 8.0}, \"tie_word_embeddings\": true, "
                 "\"head_dim\": null}");
    c = try_load(1, from, NULL, NULL, NULL);
    assert_true(c->model.rope_theta == 20000 && c->model.rope_scaling.factor == 8 &&
                c->model.weight_tying);
    assert_true(c->model.n_kv_heads == 4 && c->model.head_dim == 16 && c->model.norm.eps == 1e-6f);
    config_free(c);
    c = try_load(1, from, "--model.rope_scaling=null", NULL, NULL);
    assert_true(c->model.rope_scaling.factor == 0);
    config_free(c);

    ModelConfig read = { 0 };
    try_write_hf(
        "{\"architectures\": [\"OlmoForCausalLM\"], \"hidden_size\": 64, \"num_hidden_layers\": 1, "
        "\"clip_qkv\": 8, \"num_attention_heads\": 4, \"intermediate_size\": 96, \"vocab_size\": "
        "90, "
        "\"rope_scaling\": null, \"eos_token_id\": 50279}");
    hf_read(&read, try_folder);
    assert_true(read.norm.kind == LAYER_NORM && !read.norm_affine && read.clip_qkv == 8 &&
                read.rope_theta == 10000);
    assert_int_equal(read.eos_token_id, -1); /* outside of the vocabulary */
    try_write_hf("{\"architectures\": [\"Olmo2ForCausalLM\"], \"hidden_size\": 64, "
                 "\"num_hidden_layers\": 1, "
                 "\"num_attention_heads\": 4, \"intermediate_size\": 96, \"vocab_size\": 90, "
                 "\"rms_norm_eps\": 1e-6}");
    hf_read(&read, try_folder);
    assert_true(read.norm.kind == RMS_NORM && read.norm_after && read.qk_norm && read.norm_affine &&
                read.clip_qkv == 0);
}

int main(void)
{
    return run_all_tests(try_make_folder, try_remove_folder);
}
