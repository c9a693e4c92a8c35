/* Aliases of keys: names from earlier versions and from other programs. Files, arguments and saved
 * configurations may use them. After names_rename, a tree has only the names of config_keys.c. Keys
 * that were removed are refused; the message says what replaces them. */
#include "model/config/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/formats/file.h"
#include "model/keys/value.h"

/* earlier: an alias from an earlier version; a note asks for the current name. as_null: the value
 * of the alias `other` that means null for `name`. as_true, as_false: the values of `name` for an
 * alias with the value true or false. */
static const struct {
    const char *other, *name;
    bool earlier;
    const char *as_null, *as_true, *as_false;
} names[] = {
    { "format.keep", "activations.keep", true },
    { "format.recompute", "activations.recompute", true },
    { "format.forward", "fp8.forward", true },
    { "format.fast", "fp8.fast_accumulation", true },
    { "format.scales", "fp8.scales", true },
    { "format.stream", "format.residual", true },
    { "format.saved", "format.saved_norm_input", true },
    { "format.qkv", "format.saved_qkv", true },
    { "format.att", "format.saved_attention", true },
    { "format.hidden", "format.saved_mlp", true },
    { "host.activations", "offload.activations", true },
    { "host.base", "offload.frozen", true },
    { "host.moments", "offload.optimizer", true },
    { "host.master", "offload.master", true },
    { "mlp_tile", "tiled_mlp_tokens", true },
    { "network", "internode_gb_per_s", true },
    { "optimizer.adjust_lr", "optimizer.adjust_lr_fn", true },
    /* torchtitan's names; -1 stands for all remaining ranks */
    { "parallelism.data_parallel_replicate_degree", "parallelism.replicate" },
    { "parallelism.data_parallel_shard_degree", "parallelism.shard", .as_null = "-1" },
    { "parallelism.context_parallel_degree", "parallelism.context" },
    { "parallelism.tensor_parallel_degree", "parallelism.tensor" },
    { "parallelism.pipeline_parallel_degree", "parallelism.pipeline" },
    { "parallelism.pipeline_parallel_schedule", "parallelism.pipeline_schedule" },
    /* PEFT */
    { "lora.r", "lora.rank" },
    { "lora.lora_alpha", "lora.alpha" },
    { "lora.lora_dropout", "lora.dropout" },
    /* OLMo-core's SkipStepOptimizer */
    { "skip_step", "spikes", .as_true = "skip", .as_false = "warn" },
};
enum { NUM_NAMES = sizeof names / sizeof names[0] };

const char *names_current(const char *name)
{
    static char section[64];
    const size_t n = strlen(name);
    for (int i = 0; i < NUM_NAMES; i++) {
        if (strncmp(names[i].other, name, n) != 0)
            continue;
        if (!names[i].other[n])
            return names[i].name;
        if (names[i].other[n] == '.') {
            snprintf(section, sizeof section, "%.*s", (int)strcspn(names[i].name, "."),
                     names[i].name);
            return section;
        }
    }
    return name;
}

const char *names_other(const char *name)
{
    for (int i = 0; i < NUM_NAMES; i++)
        if (strcmp(names[i].name, name) == 0)
            return names[i].other;
    return NULL;
}

/* Converts n, the value of the alias names[i].other, to the equivalent value of names[i].name. */
static void translate(int i, YamlNode *n)
{
    if (n->kind != YAML_SCALAR || !n->text)
        return;
    const char *as = n->text;
    if (names[i].as_null && strcmp(n->text, names[i].as_null) == 0)
        as = NULL;
    if (names[i].as_true) {
        const int truth = value_truth(n->text);
        if (truth < 0)
            die("%s: %s: expected true or false, found '%s'; for other values use the key %s",
                yaml_where(n), names[i].other, n->text, names[i].name);
        as = truth ? names[i].as_true : names[i].as_false;
    }
    if (as != n->text) {
        free(n->text);
        n->text = xstrdup(as);
    }
}

/* Removes the section of this key if it is empty: only earlier versions may have had this
 * section. */
static void remove_empty_section(YamlNode *root, const char *key)
{
    char *section = xasprintf("%.*s", (int)strcspn(key, "."), key);
    const YamlNode *n = strcmp(section, key) != 0 ? yaml_find(root, section) : NULL;
    if (n && n->kind != YAML_LIST && n->num_children == 0 && !n->text)
        yaml_free(yaml_take(root, section));
    free(section);
}

/* Whether the file is the config.yaml of a checkpoint or of a save_folder. */
static bool is_of_run(const char *file)
{
    const char *slash = strrchr(file, '/'), *name = slash ? slash + 1 : file;
    char *folder = xasprintf("%.*s.", (int)(name - file), file);
    const bool found = strcmp(name, "config.yaml") == 0 &&
                       (file_is_in(folder, "trainer.json") || file_is_in(folder, "metrics.jsonl"));
    free(folder);
    return found;
}

void names_check(const YamlNode *root)
{
    const bool saved = is_of_run(root->file);
    for (int i = 0; i < NUM_NAMES; i++) {
        const YamlNode *other = yaml_find(root, names[i].other),
                       *own = yaml_find(root, names[i].name);
        if (other && own)
            die("%s: '%s' and '%s' (%s) are two names of one key; give only '%s'",
                yaml_where(other), names[i].other, names[i].name, yaml_where(own), names[i].name);
        if (other && names[i].earlier && !saved && (other->kind != YAML_SCALAR || other->text))
            warn("%s: key '%s' of earlier versions is read as '%s'; use that name",
                 yaml_where(other), names[i].other, names[i].name);
    }
}

void names_rename(YamlNode *root)
{
    for (int i = 0; i < NUM_NAMES; i++) {
        YamlNode *n = yaml_take(root, names[i].other);
        if (n) {
            translate(i, n);
            yaml_put(root, names[i].name, n);
        }
        remove_empty_section(root, names[i].other);
    }
}

/* Removed keys, and sections whose keys were all removed. Most of them were OLMo's and COAT's. */
static const struct {
    const char *keys, *now;
} removed[] = {
    { "precision", "recipe: bf16 or f32" },
    { "quantize_model", "recipe: coat, coat-act or fp8; format.*" },
    { "quantize_optimizer", "recipe: coat or coat-opt; format.moment1, format.moment2" },
    { "format.expand", "a + after the format, as in format.moment1: e4m3/128+" },
    { "activation_checkpointing",
      "activations.keep: block (whole_layer) or inputs (fine_grained); activations.recompute" },
    { "distributed_strategy", "fsdp.sharding_strategy; NO_SHARD for ddp and single" },
    { "wandb", "scripts/watch.py --to wandb" },
    { "tokenizer", "tokenizer: FOLDER, which is copied into checkpoints; training reads tokens" },
    { "stop_after", "stop_at" },
    { "time_limit|extra_steps_after_cancel|canceled_check_interval",
      "timeout -s USR2: a run that gets SIGUSR2 saves and ends" },
    { "early_stopping_factor", "spikes: stop" },
    { "max_grad_norm_ratio", "max_grad_norm" },
    { "optimizer.no_decay_norm_and_bias",
      "optimizer.decay_norm_and_bias, optimizer.decay_embeddings" },
    { "epoch|fast_forward_batches", "data.seed" },
    { "evaluators[].device_eval_batch_size", "device_eval_batch_size" },
    { "evaluators[].subset_num_batches", "eval_subset_num_batches" },
    { "device_train_batch_size|device_train_grad_accum",
      "none, both follow from global_train_batch_size" },
    { "python_profiling|torch_profiling", "profile" },
    { "model.activation_type|model.block_type|model.rope|model.alibi|model.alibi_bias_max|"
      "model.include_bias|model.bias_for_layer_norm|model.attention_dropout|"
      "model.residual_dropout|model.embedding_dropout|model.embedding_layer_norm|"
      "model.scale_logits|model.scale_emb_init|model.emb_init_std",
      "none, it had one value" },
    { "model.flash_attention|model.rope_full_precision|model.block_group_size|model.init_device|"
      "model.precision|data.custom_dataset|data.pad_direction|data.drop_last|data.num_workers|"
      "data.pin_memory|data.prefetch_factor|data.persistent_workers|data.timeout|"
      "evaluators[].data.pad_direction|evaluators[].data.drop_last|evaluators[].data.num_workers|"
      "evaluators[].data.pin_memory|evaluators[].data.prefetch_factor|"
      "evaluators[].data.persistent_workers|evaluators[].data.timeout|"
      "optimizer.selective_updates|optimizer.metrics_log_interval|"
      "optimizer.record_update_metrics|fsdp.wrapping_strategy|fsdp.use_orig_params|ddp|single|"
      "compile|fused_loss|gen1_gc_interval|speed_monitor.gpu_flops_available|"
      "remote_save_folder|save_num_unsharded_checkpoints_to_keep|force_save_unsharded|"
      "no_pre_train_checkpoint|sharded_checkpointer|load_path_sharded_checkpointer|"
      "new_style_checkpoints|save_data_indices|hf_datasets_cache_dir|module_outputs_save_steps",
      "none, it had no effect" },
};

const char *names_replacement(const char *name)
{
    char section[64];
    snprintf(section, sizeof section, "%.*s", (int)strcspn(name, "."), name);
    for (size_t i = 0; i < sizeof removed / sizeof removed[0]; i++)
        if (text_is_among(name, removed[i].keys) || text_is_among(section, removed[i].keys))
            return removed[i].now;
    return NULL;
}
