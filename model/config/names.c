/* Other names of keys: those of earlier versions and of other programs. Files, arguments and saved
 * configurations may have them. After names_rename a tree has the names of config_keys.c only.
 * Keys of other programs that have no place here are refused; the message names the script that
 * converts their files. */
#include "model/config/names.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/runtime/error.h"
#include "kernels/runtime/text.h"
#include "model/formats/file.h"
#include "model/keys/value.h"

/* earlier: a note asks for the present name. as_null: the value of `other` that `name` has as null.
 * as_true, as_false: the values of `name` for a truth value of `other`. */
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
    /* torchtitan; -1: the ranks that are left */
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

/* Gives n, the value of names[i].other, the meaning that it has for names[i].name. */
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
            die("%s: %s: expected true or false, found '%s'; %s has more values", yaml_where(n),
                names[i].other, n->text, names[i].name);
        as = truth ? names[i].as_true : names[i].as_false;
    }
    if (as != n->text) {
        free(n->text);
        n->text = xstrdup(as);
    }
}

/* Removes the section of this key if it is empty: it may be one of earlier versions only. */
static void remove_empty_section(YamlNode *root, const char *key)
{
    char *section = xasprintf("%.*s", (int)strcspn(key, "."), key);
    const YamlNode *n = strcmp(section, key) != 0 ? yaml_find(root, section) : NULL;
    if (n && n->num_children == 0 && !n->text)
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

/* Keys of OLMo and COAT, by sections. */
static const char foreign[] =
    "precision|activation_checkpointing|distributed_strategy|quantize_model|quantize_optimizer|"
    "compile|ddp|single|wandb|tokenizer|"
    "model.activation_type|model.alibi|model.alibi_bias_max|model.attention_dropout|model.bias_for_"
    "layer_norm|"
    "model.block_group_size|model.block_type|model.emb_init_std|model.embedding_dropout|model."
    "embedding_layer_norm|"
    "model.flash_attention|model.include_bias|model.init_device|model.precision|model.residual_"
    "dropout|model.rope|"
    "model.rope_full_precision|model.scale_emb_init|model.scale_logits|"
    "data.custom_dataset|data.drop_last|data.num_workers|data.pad_direction|data.persistent_"
    "workers|data.pin_memory|"
    "data.prefetch_factor|data.timeout|"
    "evaluators[].data.drop_last|evaluators[].data.num_workers|evaluators[].data.pad_direction|"
    "evaluators[].data.persistent_workers|evaluators[].data.pin_memory|evaluators[].data.prefetch_"
    "factor|"
    "evaluators[].data.timeout|evaluators[].device_eval_batch_size|evaluators[].subset_num_batches|"
    "optimizer.metrics_log_interval|optimizer.no_decay_norm_and_bias|optimizer.record_update_"
    "metrics|optimizer.selective_updates|"
    "fsdp.use_orig_params|fsdp.wrapping_strategy|speed_monitor.gpu_flops_available|"
    "canceled_check_interval|device_train_batch_size|device_train_grad_accum|early_stopping_factor|"
    "epoch|extra_steps_after_cancel|"
    "fast_forward_batches|force_save_unsharded|fused_loss|gen1_gc_interval|hf_datasets_cache_dir|"
    "load_path_sharded_checkpointer|"
    "max_grad_norm_ratio|module_outputs_save_steps|new_style_checkpoints|no_pre_train_checkpoint|"
    "python_profiling|"
    "remote_save_folder|save_data_indices|save_num_unsharded_checkpoints_to_keep|sharded_"
    "checkpointer|stop_after|time_limit|"
    "torch_profiling";

void names_refuse_foreign(const char *where, const char *name)
{
    if (text_is_among(name, foreign))
        die("%s: '%s' is a key of OLMo or COAT that this program does not have. Convert the file: "
            "python3 "
            "scripts/convert_config.py FILE > mine.yaml; the result says what replaces it",
            where, name);
}
