/* Mistakes of every kind in a configuration: the message names the place, what was found and what
 * was expected. */
#include "model/config/check_tensor_ranks.h"
#include "tests/test.h"
#include "tests/try_config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/models.h"

/* ---- mistakes -------------------------------------------------------------------------------- */

/* A line of `base` (NULL: a line at the end), its replacement, and texts that the message must
 * contain: the key, what was found, what was expected. */
typedef struct {
    const char *line, *with, *names;
} Mistake;

static void check_mistakes(const Mistake *m, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char place[256], message[8192];
        int number = try_write_changed(m[i].line, m[i].with);
        snprintf(place, sizeof place, "error: %s:%d: ", try_path, number);
        if (try_printed(message, sizeof message, 2, 1, NULL, NULL))
            fail_msg("'%s' was accepted", m[i].with);
        try_contains(message, place);
        try_names(message, m[i].names);
    }
}
#define CHECK_MISTAKES(list) check_mistakes(list, sizeof list / sizeof *list)

TEST(test_unknown_keys)
{
    static const Mistake list[] = {
        { "seed", "sead: 1", "sead seed" },
        { "learning_rate", "learning_rat: 1", "optimizer.learning_rat optimizer.learning_rate" },
        { "seed", "n_heads: 4", "model.n_heads" },
        { "n_heads", "num_heads: 4", "model.n_heads" },
        { NULL, "optimiser: {}", "optimizer optimiser" },
        { NULL, "modle: {}", "model modle" },
        { "learning_rate", "lr: 1", "optimizer.learning_rate" },
        { NULL, "lr: 1", "optimizer.learning_rate" },
        { "qkv_bias", "rope_scaling: {type: llama3, factor: 8}", "model.rope_scaling.rope_type" },
        { NULL, "xyzzy_plugh: 1", "xyzzy_plugh ./train --help" },
        { NULL, "evaluator: []", "evaluators" },
        { NULL, "evaluators: [{label: x, data: {pathz: [a]}}]",
          "evaluators[].data.pathz evaluators[].data.paths" },
    };
    CHECK_MISTAKES(list);
}

TEST(test_wrong_values)
{
    static const Mistake list[] = {
        { "n_layers", "n_layers: two", "model.n_layers 1 10000 two" },
        { "n_layers", "n_layers: 2.5", "n_layers 2.5" },
        { "n_layers", "n_layers: 0", "1 10000 0 n_layers" },
        { "n_layers", "n_layers: null", "null" },
        { "n_layers", "n_layers: [1]", "n_layers 1" },
        { "n_layers", "n_layers: {a: 1}", "n_layers 1" },
        { "vocab_size", "vocab_size: 2147483647", "model.vocab_size 2 2147483520 2147483647" },
        { NULL, "max_grad_norm: 2e9", "0 1000000000 2e9 max_grad_norm" },
        { "learning_rate", "learning_rate: nan", "learning_rate nan" },
        { "learning_rate", "learning_rate: -1", "0 1000 -1 learning_rate" },
        { "betas", "betas: [0.9, 1]", "optimizer.betas beta1 beta2 0 1" },
        { "betas", "betas: 0.9", "optimizer.betas 0.9" },
        { NULL, "eval_subset_num_batches: 0", "eval_subset_num_batches 0" },
        { NULL, "save_overwrite: 3", "3 save_overwrite" },
        { "max_duration", "max_duration: 2e9X", "100 2e9T 1ep 0 9e+18 2e9X max_duration" },
        { "max_duration", "max_duration: 1e30T", "0 9e+18 1e30T max_duration" },
        { "seed", "seed: 18446744073709551615", "0 9e+18 18446744073709551615 seed" },
        { "betas", "eps: 1e-16", "optimizer.eps 1e-15 1 1e-16" },
        { "max_duration", "max_duration: 0", "max_duration 0" },
        { NULL, "format: {saved_norm_input: fp9}", "format.saved_norm_input f32 bf16 fp9 format" },
        { NULL, "activations: {keep: some}", "activations.keep all|inputs|attention|block some" },
        { NULL, "format: {master: e4m3/128}", "format.master e4m3/128 bf16 f32" },
        { NULL, "format: {head: e4m3/16}", "format.head e4m3/16" },
        { NULL, "format: {head: f32}", "format.head f32 format.residual bf16 e5m2 format" },
        { NULL, "format: {saved_norm_input: e4m3/48}", "format.saved_norm_input e4m3/48 64" },
        { NULL, "format: {saved_norm_input: e4m3/16+}", "format saved_norm_input e4m3/16+" },
        { NULL, "format: {operand: e4m3/16}", "format operand e4m3/16" },
        { NULL, "format: {moment1: e4m3}", "e4m3/128 format moment1" },
        { NULL, "format: {moment2: e5m2/100}", "256 100 format moment2 e5m2/100" },
        { NULL, "recipe: {moment1: e5m2}", "format.* recipe moment1 e5m2" },
        { NULL, "fsdp: on", "fsdp on" },
        { NULL, "evaluators: {label: a}", "evaluators" },
        { NULL, "evaluators: [{type: lm}]", "label" },
        { NULL, "evaluators: [{label: a}]", "a" },
        { NULL,
          "evaluators: [{label: a, data: {paths: a.npy}}, {label: b, data: {datasets: {a: "
          "b.npy}}}]",
          "a" },
        { NULL, "evaluators: [{label: a, type: downstream, data: {paths: [b, c]}}]\n",
          "a 2 downstream" },
        { NULL, "eval_only: true\n", "eval_only" },
    };
    CHECK_MISTAKES(list);
}

TEST(test_unsupported)
{
    static const Mistake list[] = {
        { "qkv_bias", "mlp_hidden_size: 100", "model.mlp_hidden_size 50 16 48 64" },
        { "layer_norm_type", "layer_norm_type: group",
          "rms|default|low_precision|amd_compatible layer_norm_type group" },
        { "qkv_bias", "init_fn: kaiming_normal",
          "mitchell|normal|full_megatron init_fn kaiming_normal" },
        { "betas", "name: lionw", "lionw adamw8bit" },
        { "t_warmup", "name: max_scheduler",
          "cosine_with_warmup|linear_with_warmup max_scheduler" },
        { NULL, "optimizer.eps: 1e-6", "optimizer.eps" },
        { NULL, "save_folder: ''", "save_folder" },
        { NULL, "activations: {recompute: one_in_five}",
          "activations.recompute one_in_two one_in_five" },
        { NULL, "recipe: fp4", "fp4 f32 bf16 recipe" },
        { NULL, "load_path: ''", "load_path" },
        { NULL, "load_path: s3://bucket/step1", "load_path s3://bucket/step1" },
        { NULL, "save_folder: s3://bucket/run", "save_folder s3://bucket/run" },
        { "paths", "paths: [https://host/a.npy]", "https://host/a.npy" },
        { "paths", "paths: [b.npy, s3://b/a.npy, s3://b/c.npy]", "s3://b/a.npy" },
        { "paths", "paths: [gs://b/a.npy]", "gs://b/a.npy" },
        { "paths", "paths: [r2://b/a.npy]", "r2://b/a.npy r2.cloudflarestorage.com s3://b/a.npy" },
        { "paths", "paths: [weka://b/a.npy]", "weka://b/a.npy s3://b/a.npy weka" },
        { "paths", "paths: [hf://b/a.npy]", "hf://b/a.npy" },
    };
    CHECK_MISTAKES(list);
}

/* Keys of OLMo and COAT: the message names the script that converts files of these programs. */
TEST(test_foreign)
{
    static const Mistake list[] = {
        { NULL, "precision: amp_bf16", "precision scripts/convert_config.py" },
        { NULL, "wandb: {project: x}", "wandb scripts/convert_config.py" },
        { NULL, "compile: null", "compile scripts/convert_config.py" },
        { NULL, "quantize_model: {fabit: E4M3}", "quantize_model scripts/convert_config.py" },
        { NULL, "tokenizer: {identifier: x}", "tokenizer scripts/convert_config.py" },
        { NULL, "fsdp: {wrapping_strategy: by_block}",
          "fsdp.wrapping_strategy scripts/convert_config.py" },
        { NULL, "evaluators: [{label: x, data: {paths: [a], num_workers: 0}}]",
          "evaluators[].data.num_workers scripts/convert_config.py" },
        { "qkv_bias", "activation_type: swiglu",
          "model.activation_type scripts/convert_config.py" },
        { "paths", "num_workers: 4", "data.num_workers scripts/convert_config.py" },
        { NULL, "base_model: x/y", "base_model scripts/convert_config.py" },
    };
    CHECK_MISTAKES(list);
}

TEST(test_combinations)
{
    static const Mistake list[] = {
        { "n_heads", "n_heads: 5", "model.d_model 64 model.n_heads 5 60 65 model.head_dim" },
        { "qkv_bias", "n_kv_heads: 3", "model.n_heads 4 model.n_kv_heads 3" },
        { "qkv_bias", "head_dim: 5", "5" },
        { "n_heads", "n_heads: 64", "1" },
        { "qkv_bias", "mlp_hidden_size: 333", "mlp_hidden_size 333" },
        { "qkv_bias", "mlp_ratio: 0.7", "44.8 mlp_ratio 0.7" },
        { "qkv_bias", "embedding_size: 96", "model.vocab_size 100 model.embedding_size 96 128" },
        { "eos_token_id", "eos_token_id: 100", "model.eos_token_id 100" },
        { "qkv_bias", "pad_token_id: 777", "model.pad_token_id 777" },
        { "qkv_bias", "rope_scaling: {rope_type: llama3}",
          "model.rope_scaling.factor rope_type llama3" },
        { "qkv_bias", "rope_scaling: {factor: 8, high_freq_factor: 1}",
          "high_freq_factor 1 rope_scaling" },
        { "global_train_batch_size", "global_train_batch_size: 7",
          "global_train_batch_size 7 --device_train_microbatch_size=1 --global_train_batch_size=6 "
          "8" },
        { "global_train_batch_size", "global_train_batch_size: 1",
          "global_train_batch_size 1 --device_train_microbatch_size=1 "
          "--global_train_batch_size=2" },
        { "t_warmup", "name: wsd", "scheduler.t_decay wsd" },
        { "t_warmup", "warmup_min_lr: 1",
          "scheduler.warmup_min_lr 1 optimizer.learning_rate 0.001" },
        { "paths", "paths: []", "data.paths" },
    };
    CHECK_MISTAKES(list);
}

/* Arguments that are refused with a complete file, and texts that the message must contain. */
typedef struct {
    int world;
    const char *a, *b, *names;
} Refused;

static void refuse_all(const Refused *list, size_t count)
{
    try_write(try_path, try_complete);
    for (size_t i = 0; i < count; i++) {
        char message[8192];
        if (try_printed(message, sizeof message, 2, list[i].world, list[i].a, list[i].b))
            fail_msg("%s was accepted", list[i].a ? list[i].a : "the number of ranks");
        try_names(message, list[i].names);
    }
}

TEST(test_model_arguments)
{
    static const Refused list[] = {
        { 1, "--model.multi_query_attention", "--model.n_kv_heads=2",
          "n_kv_heads model.n_kv_heads 2" },
        { 1, "--model.attention_layer_norm", "--model.layer_norm_type=default",
          "model.layer_norm_type" },
        { 1, "--model.layer_norm_type=default", NULL,
          "OLMo OlmoForCausalLM model.layer_norm_with_affine model.layer_norm_type" },
        { 1, "--model.architecture=GPT2LMHeadModel", NULL,
          "GPT2LMHeadModel LlamaForCausalLM OlmoForCausalLM model.architecture" },
        { 1, "--model.architecture=Qwen3ForCausalLM", NULL,
          "--model.architecture=Qwen3ForCausalLM Qwen3ForCausalLM model.attention_layer_norm" },
        { 1, "--model.n_heads=1", "--model.d_model=8192", "model.head_dim 8192 2 4096" },
        { 1, "--model.d_model=2147483647", "--model.n_heads=10000",
          "d_model 2147480000 2147490000 model.n_heads 10000" },
        { 1, "--model.mlp_hidden_size=4294967294", NULL,
          "model.mlp_hidden_size 2 2147483646 4294967294" },
        { 1, "--model.mlp_ratio=1e6", "--model.d_model=4096", "model.mlp_hidden_size 4096000000" },
        { 1, "--model.layer_norm_type=default", NULL, "x.yaml model.layer_norm_type" },
        { 1, "--model.attention_layer_norm=each", NULL,
          "false|true|head each model.attention_layer_norm" },
        { 1, "--model.layer_types=[sliding_attention]", NULL,
          "layer_types sliding_attention sliding_window model.layer_types" },
        { 1, "--model.layer_types=[sliding]", "--model.sliding_window=4",
          "full_attention sliding" },
        { 1, "--model.layer_types=full_attention", NULL,
          "sliding_attention full_attention model.layer_types" },
        { 1, "--model.sliding_window=0", NULL, "model.sliding_window 1 2147483647 0" },
        { 1, "--model.rope_scaling={rope_type: yarn}", NULL,
          "rope_type model.rope_scaling.factor yarn" },
        { 1, "--model.rope_scaling={rope_type: yarn, factor: 8, beta_slow: 32}", NULL,
          "model.rope_scaling beta_fast beta_slow 32" },
        { 1, "--model.rope_scaling={rope_type: yarn, factor: 8}", "--model.rope_theta=1",
          "rope_theta 1" },
        { 1, "--model.rope_scaling={rope_type: yarn, factor: 8, full_attn_layers_only: true}",
          "--model={sliding_window: 4, layer_types: [sliding_attention, full_attention]}",
          "MistralForCausalLM model.layer_types model.rope_scaling.full_attn_layers_only "
          "sliding_window" },
    };
    refuse_all(list, sizeof list / sizeof *list);
}

#define SIXTY_ZEROS "000000000000000000000000000000000000000000000000000000000000"

TEST(test_arguments)
{
    static const Refused list[] = {
        { 1, "--max_duratoin=3", NULL, "--max_duratoin=3 max_duratoin max_duration" },
        { 1, "--model.n_layers=x", NULL, "--model.n_layers=x model.n_layers" },
        { 1, "max_duration=3", NULL, "max_duration=3" },
        { 1, "other.yaml", NULL, "other.yaml" },
        { 1, "--betas=[1", NULL, "--betas=[1" },
        { 1, "--max_duration=", NULL, "--max_duration=null" },
        { 1, "--run_name=..", NULL, "run_name .." },
        { 1, "--run_name=a/../../b", NULL, "run_name a/../../b" },
        { 1, "--data.paths=[*.npy]", NULL, "--data.paths=[*.npy]" },
        { 3, NULL, NULL,
          "global_train_batch_size 8 3 device_train_microbatch_size 2 --global_train_batch_size=6 "
          "12" },
        { 8, NULL, NULL, "--device_train_microbatch_size=1 --global_train_batch_size=16" },
        { 1, "--scheduler.t_max=10", "--scheduler.t_warmup=20",
          "t_warmup 20 scheduler.t_max 10 scheduler.t_warmup" },
        { 1, "--scheduler={name: wsd, t_decay: 91}", NULL,
          "t_warmup 10 t_decay 91 max_duration 100 scheduler wsd" },
        { 1, "--scheduler={name: wsd, t_decay: 41}", "--scheduler.t_max=50",
          "t_decay 41 t_max 50" },
        { 1, "--scheduler={name: wsd, t_decay: 60, warmup_fraction: 0.5, t_warmup: 0}", NULL,
          "t_warmup 50 t_decay 60 max_duration 100 scheduler wsd warmup_fraction 0.5" },
        { 1, "--scheduler.warmup_fraction=0.1", NULL,
          "scheduler.t_warmup scheduler.warmup_fraction 0.1" },
        { 1, "--scheduler.name=inverse_sqrt_with_warmup", "--scheduler.t_warmup=0",
          "scheduler.t_warmup 0" },
        { 1, "--data.generate_attention_mask", NULL, "model.pad_token_id" },
        { 1, "--data.generate_doc_lengths", "--model.eos_token_id=null", "model.eos_token_id" },
        { 1, "--data.packing=best_fit", "--model.eos_token_id=null",
          "data.packing=best_fit data.document_boundaries=metadata model.eos_token_id" },
        { 1, "--evaluators=[{label: v, data: {paths: a.npy, packing: best_fit}}]", NULL,
          "best_fit evaluators a.npy packing" },
        { 1, "--evaluators=[{label: v, data: {paths: a.npy, packing: best_fit}}]",
          "--model.eos_token_id=null", "best_fit" },
        { 1, "--evaluators=[{label: v, data: {datasets: {a: b.npy}, label_mask_paths: m}}]", NULL,
          "v label_mask_paths data.paths evaluators datasets b.npy" },
        { 1, "--data.datasets={x: [b.npy]}", NULL, "data.datasets b.npy" },
        { 1, "--model.vocab_size=null", NULL, "null" },
        { 2, "--device_eval_batch_size=2147483647", NULL,
          "2147483647 2 2^31 1 device_eval_batch_size" },
        { 1, "--tiled_mlp_tokens=200", "--activations.keep=block",
          "tiled_mlp_tokens 200 128 --tiled_mlp_tokens=256" },
        { 1, "--tiled_mlp_tokens=256", NULL,
          "tiled_mlp_tokens 256 --activations.keep=block --tiled_mlp_tokens=0" },
        { 1, "--tiled_mlp_tokens=-128", NULL, "tiled_mlp_tokens -128" },
    };
    refuse_all(list, sizeof list / sizeof *list);
}

/* The division of ranks into replicas, shards and context ranks. */
TEST(test_groups)
{
    static const Refused list[] = {
        { 4, "--fsdp.sharding_strategy=HYBRID_SHARD", "--fsdp.hybrid_sharding_num_model_replicas=3",
          "4 3 fsdp.hybrid_sharding_num_model_replicas" },
        { 4, "--fsdp={sharding_strategy: HYBRID_SHARD, hybrid_sharding_num_model_replicas: 4}",
          "--parallelism.context=2",
          "4 1 2 fsdp.hybrid_sharding_num_model_replicas parallelism.context" },
        { 4, "--parallelism.replicate=3", NULL,
          "parallelism.replicate 3 4 --parallelism.replicate=2 --parallelism.shard=2" },
        { 4, "--parallelism={replicate: 2, shard: 4}", NULL,
          "parallelism.replicate 2 4 --parallelism.shard=2" },
        { 4, "--parallelism.shard=2", "--fsdp.sharding_strategy=NO_SHARD",
          "parallelism.shard NO_SHARD --parallelism.replicate=4" },
        { 4, "--parallelism.replicate=2",
          "--fsdp={sharding_strategy: HYBRID_SHARD, hybrid_sharding_num_model_replicas: 2}",
          "parallelism.replicate fsdp.hybrid_sharding_num_model_replicas" },
        { 1, "--parallelism.shard=-1", NULL, "parallelism.shard -1" },
        { 3, "--parallelism.context=2", NULL, "parallelism.context 2 3 --parallelism.context=1" },
        { 1, "--parallelism.context=2", NULL, "parallelism.context 2 1 --parallelism.context=1" },
        { 8, "--parallelism.context=8", NULL, "parallelism.context 8 4 --parallelism.context=4" },
        { 4, "--parallelism.context=4", "--model={n_heads: 12, n_kv_heads: 6, head_dim: 16}",
          "parallelism.context 4 12 6 --parallelism.context=2" },
        { 4, "--parallelism.context=4", "--model.max_sequence_length=96",
          "parallelism.context model.max_sequence_length 96 4 16 --model.max_sequence_length=128" },
        { 2, "--parallelism.context=2", "--global_train_batch_size=3",
          "global_train_batch_size 3 1 --device_train_microbatch_size=1 "
          "--global_train_batch_size=2 4" },
        { 1, "--parallelism.context=0", NULL, "parallelism.context 1 0" },
        { 1, "--fsdp.sharding_strategy=FULL", NULL,
          "FULL_SHARD|SHARD_GRAD_OP|NO_SHARD fsdp.sharding_strategy" },
    };
    refuse_all(list, sizeof list / sizeof *list);
}

/* A matrix of NF4 whose tensors have no whole blocks. */
TEST(test_parts_of_nf4)
{
    Config c;
    ModelConfig m = with_adapters(architecture(LLAMA), 4, ALL_MODULES, BASE_NF4);
    m.max_sequence_length = 32;
    model_config(&c, &m, "f32", 1);
    c.strategy.tensor_ranks = 2;
    char *refusal = check_tensor_ranks_refusal(&c, 2);
    assert_non_null(refusal);
    try_names(refusal, "nf4 lora.base 64 --lora.base=e4m3");
    free(refusal);
    c.model.lora.base = BASE_E4M3;
    assert_null(check_tensor_ranks_refusal(&c, 2));
}

/* Tensor ranks and pipeline stages. */
TEST(test_layers_and_stages)
{
    static const Refused list[] = {
        { 3, "--parallelism.tensor=2", NULL, "parallelism.tensor 2 3 ranks" },
        { 8, "--parallelism.tensor=8", NULL, "parallelism.tensor 8 4 heads" },
        { 8, "--parallelism={tensor: 4, context: 2}", NULL,
          "parallelism.tensor 4 heads 8 parallelism.context" },
        { 2, "--parallelism.tensor=2", "--model.n_kv_heads=1", "parallelism.tensor 2 1 key heads" },
        { 4, "--parallelism.tensor=4", "--model.mlp_hidden_size=64",
          "parallelism.tensor 4 MLP 32 16" },
        { 4, "--parallelism.tensor=4", "--model.max_sequence_length=96",
          "parallelism.tensor model.max_sequence_length 96 4 16 --model.max_sequence_length=128" },
        { 2, "--parallelism.tensor=2", "--optimizer.name=muon", "parallelism.tensor 2 muon" },
        { 2, "--parallelism.tensor=2", "--optimizer.name=adamw8bit",
          "parallelism.tensor 2 exp_avg 256 out" },
        { 2, "--parallelism.tensor=2",
          "--model={norm_after: true, attention_layer_norm: true, layer_norm_type: rms}",
          "parallelism.tensor 2 q and k heads" },
        { 3, "--parallelism.pipeline=2", NULL,
          "parallelism.pipeline 2 3 --parallelism.pipeline=1" },
        { 2, "--parallelism={pipeline: 2, context: 2}", NULL,
          "parallelism.pipeline 2 parallelism.context 4 --parallelism.pipeline=1" },
        { 8,
          "--parallelism={pipeline: 4, pipeline_schedule: Interleaved1F1B, "
          "pipeline_virtual_stages: 3}",
          "--device_train_microbatch_size=1",
          "parallelism.pipeline 4 2 3 --parallelism.pipeline=1" },
        { 8, "--parallelism.pipeline=8", "--device_train_microbatch_size=1",
          "parallelism.pipeline 8 2 --parallelism.pipeline=2" },
        { 2, "--fsdp.precision=mixed", "--fsdp.grad_wire=fp8",
          "fsdp.grad_wire fsdp.precision mixed f32" },
        { 2, "--parallelism.pipeline=2", "--fsdp.grad_sync_mode=micro_batch",
          "fsdp.grad_sync_mode micro_batch batch" },
        { 2, "--parallelism.pipeline=2", "--parallelism.pipeline_schedule=Interleaved1F1B",
          "Interleaved1F1B --parallelism.pipeline_virtual_stages=2 1F1B" },
        { 2, "--parallelism.pipeline=2", "--parallelism.pipeline_virtual_stages=2",
          "parallelism.pipeline_virtual_stages 2 --parallelism.pipeline_schedule=Interleaved1F1B" },
        { 3,
          "--parallelism={pipeline: 3, pipeline_schedule: Interleaved1F1B, "
          "pipeline_virtual_stages: 2}",
          "--model.n_layers=6", "Interleaved1F1B 4 3 --global_train_batch_size=12" },
        { 2, "--parallelism.pipeline=2", "--parallelism.pipeline_schedule=GPipe",
          "1F1B|Interleaved1F1B|Sequential GPipe" },
    };
    refuse_all(list, sizeof list / sizeof *list);
}

/* OmegaConf's references, names of list elements, and texts that no YAML file may have. */
TEST(test_texts)
{
    static const Refused list[] = {
        { 1, "--save_folder=runs/${run_name}", NULL,
          "runs/${run_name} save_folder scripts/convert_config.py" },
        { 1, "--data.paths=[a, '${path.glob:x}']", NULL,
          "${path.glob:x} data.paths scripts/convert_config.py" },
        { 1, "--evaluators=[{label: a, data: {datasets: {'b${seed}': b}}}]", NULL,
          "b${seed} evaluators[].data.datasets" },
        { 1, "--optimizer.eps=1e-20", NULL, "optimizer.eps 1e-20" },
        { 1, "--evaluators[].data.memmap_dtype=uint32", NULL,
          "--evaluators[].data.memmap_dtype=uint32 evaluators[]" },
        { 1, "--evaluators[].label=a", NULL, "--evaluators[].label=a evaluators[]" },
        { 1, "--evaluators[0].data.paths=a", NULL, "val.npy" },
        { 1, "--evaluators.label=a", NULL, "evaluators" },
        { 1, "--model={rope_scaling.factor: 8}", NULL, "rope_scaling.factor model 8" },
        { 1, "--model.=3", NULL, "model. 3" },
        { 1, "--.=3", NULL, "--.=3" },
        { 1, "--seed=" SIXTY_ZEROS SIXTY_ZEROS "000000001", NULL, "seed" },
        { 1, "--run_name=\xff", NULL, "run_name UTF-8" },
        { 1, "--data.paths=['a', 'b\xc3']", NULL, "--data.paths" },
        { 1, "--run_name=a\xed\xa0\x80", NULL, "run_name UTF-8" },
        { 1, "--data.paths=[\"a\\0b\"]", NULL, "data.paths" },
        { 1, "--format.moment1=e4m3/4294967424", NULL, "e4m3/4294967424 format.moment1" },
    };
    refuse_all(list, sizeof list / sizeof *list);
}

TEST(test_files)
{
    char message[8192], expected[256];
    static const struct {
        const char *text, *names;
        int line;
    } list[] = {
        { "a: 1\nb: 2\na: 3\n", "", 3 },        { "a: 1\npaths: *.npy\n", "*.npy", 2 },
        { "model:\n  a: [1, 2\n", "", 0 },      { "", "", 0 },
        { "---\na: 1\n---\nb: 2\n", "---", 0 }, { "a: 1\n---\nb: [2\n", "", 0 },
        { "- 1\n- 2\n", "key value", 0 },       { "seed: 1\n", "model.d_model", 0 },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        try_write(try_path, list[i].text);
        assert_false(try_printed(message, sizeof message, 2, 1, NULL, NULL));
        snprintf(expected, sizeof expected, list[i].line ? "%s:%d:" : "%s", try_path, list[i].line);
        try_contains(message, expected);
        try_names(message, list[i].names);
    }
    static const char *const no_utf8[] = { "seed: 1\n# r\xe9glages\nseed: 2\n",
                                           "seed: 1\nrun_name: \xff\n", "a: 1\n\xed\xa0\x80" };
    for (int i = 0; i < 3; i++) {
        try_write(try_path, no_utf8[i]);
        try_refused(NULL, NULL, "x.yaml:2 UTF-8");
    }
    unlink(try_path);
    try_refused(NULL, NULL, "x.yaml");
    assert_int_equal(mkdir(try_path, 0777), 0);
    assert_false(try_printed(message, sizeof message, 2, 1, NULL, NULL));
    rmdir(try_path);
    try_names(message, "--load_path=");
}

/* ---- Hugging Face folders -------------------------------------------------------------------- */

TEST(test_hf_refused)
{
    static const struct {
        const char *json, *names;
    } list[] = {
        { "{" TRY_LLAMA ", \"attention_bias\": true}", "attention_bias" },
        { "{" TRY_LLAMA ", \"mlp_bias\": true}", "mlp_bias" },
        { "{" TRY_LLAMA ", \"rope_scaling\": {\"rope_type\": \"linear\"}}", "rope_type linear" },
        { "{\"architectures\": [\"GPT2LMHeadModel\"], \"model_type\": \"gpt2\"}",
          "GPT2LMHeadModel model_type gpt2 LlamaForCausalLM OlmoForCausalLM Olmo2ForCausalLM "
          "MistralForCausalLM "
          "MinistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM Olmo3ForCausalLM "
          "SmolLM3ForCausalLM" },
        { "{\"architectures\"\n: }", "config.json:2" },
    };
    char from[128];
    snprintf(from, sizeof from, "--load_path=%s", try_folder);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        try_write_hf(list[i].json);
        try_refused(from, NULL, list[i].names);
    }
    try_refused("--load_path=/nowhere", NULL, "load_path /nowhere");
}

/* A run needs the folder it started from only if there is no checkpoint to continue from. */
TEST(test_hf_gone)
{
    char place[128], name[128];
    snprintf(place, sizeof place, "--save_folder=%s/run", try_folder);
    try_write_hf("{" TRY_LLAMA "}");
    try_write(try_path, "data: {paths: a.npy}\ntry_load_latest_save: true\n");
    try_refused("--load_path=/nowhere", place, "load_path /nowhere");

    static const char *const made[] = { "run", "run/step3" };
    for (int i = 0; i < 2; i++) {
        snprintf(name, sizeof name, "%s/%s", try_folder, made[i]);
        assert_int_equal(mkdir(name, 0777), 0);
    }
    snprintf(name, sizeof name, "%s/run/step3/trainer.json", try_folder);
    try_write(name, "{\"files\": {\"config.json\": 232}}");
    snprintf(name, sizeof name, "%s/run/step3/config.json", try_folder);
    try_write(name, "{" TRY_LLAMA "}");
    Config *c = try_load(1, "--load_path=/nowhere", place, NULL, NULL);
    assert_int_equal(c->model.vocab_size, 90);
    assert_string_equal(c->save_folder, place + strlen("--save_folder="));
    config_free(c);
}

int main(void)
{
    return run_all_tests(try_make_folder, try_remove_folder);
}
