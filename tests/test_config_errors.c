/* Every kind of mistake in a configuration: the message names the place, what is wrong and what would do. */
#include "tests/try_config.h"

#include <setjmp.h>
#include <stdarg.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- mistakes --------------------------------------------------------------------------------------------- */

/* A line of `base` (NULL: a line at the end) and what takes its place, or an argument; and words of the message. */
typedef struct { const char *line, *with, *words, *more; } Mistake;

static void check_mistakes(const Mistake *m, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        char place[256], message[8192];
        int number = try_write_changed(m[i].line, m[i].with);
        snprintf(place, sizeof place, "error: %s:%d: ", try_path, number);
        if (try_printed(message, sizeof message, 2, 1, NULL, NULL))
            fail_msg("'%s' was accepted", m[i].with);
        try_contains(message, place);
        try_contains(message, m[i].words);
        if (m[i].more)
            try_contains(message, m[i].more);
    }
}
#define CHECK_MISTAKES(list) check_mistakes(list, sizeof list / sizeof *list)

static void test_unknown_keys(void **state)
{
    (void)state;
    static const Mistake list[] = {
        { "seed",          "sead: 1",             "unknown key 'sead'", "did you mean 'seed'?" },
        { "learning_rate", "learning_rat: 1",     "unknown key 'optimizer.learning_rat'",
          "did you mean 'optimizer.learning_rate'?" },
        { "seed",          "n_heads: 4",          "unknown key 'n_heads'", "did you mean 'model.n_heads'?" },
        { "n_heads",       "num_heads: 4",        "did you mean 'model.n_heads'?", NULL },
        { NULL,            "optimiser: {}",       "did you mean 'optimizer'?", NULL },
        { NULL,            "modle: {}",           "did you mean 'model'?", NULL },
        { "learning_rate", "lr: 1",               "did you mean 'optimizer.learning_rate'?", NULL },
        { NULL,            "lr: 1",               "did you mean 'optimizer.learning_rate'?", NULL },
        { "include_bias",  "rope_scaling: {type: llama3, factor: 8}", "did you mean 'model.rope_scaling.rope_type'?", NULL },
        { NULL,            "xyzzy_plugh: 1",      "unknown key 'xyzzy_plugh'; ./train --help lists all", NULL },
        { NULL,            "evaluator: []",       "did you mean 'evaluators'?", NULL },
        { NULL,            "evaluators: [{label: x, data: {pathz: [a]}}]", "unknown key 'evaluators[].data.pathz'",
          "did you mean 'evaluators[].data.paths'?" },
    };
    CHECK_MISTAKES(list);
}

static void test_wrong_values(void **state)
{
    (void)state;
    static const Mistake list[] = {
        { "n_layers",      "n_layers: two",
          "model.n_layers: expected an integer from 1 to 10000, found 'two'", NULL },
        { "n_layers",      "n_layers: 2.5",        "expected an integer", "found '2.5'" },
        { "n_layers",      "n_layers: 0",          "expected an integer from 1 to 10000, found '0'", NULL },
        { "n_layers",      "n_layers: null",       "found 'null'", NULL },
        { "n_layers",      "n_layers: [1]",        "found 'a list'", NULL },
        { "n_layers",      "n_layers: {a: 1}",     "found 'a section'", NULL },
        { "vocab_size",    "vocab_size: 2147483647",
          "model.vocab_size: expected an integer from 2 to 2147483520, found '2147483647'", NULL },
        { NULL,            "max_grad_norm: 2e9",   "expected a number above 0, at most 1000000000, found '2e9'", NULL },
        { "learning_rate", "learning_rate: nan",   "expected a number", NULL },
        { "learning_rate", "learning_rate: -1",    "expected a number from 0 to 1000, found '-1'", NULL },
        { "betas",         "betas: [0.9, 1]",
          "optimizer.betas: expected [beta1, beta2], each from 0 to below 1", NULL },
        { "betas",         "betas: 0.9",           "optimizer.betas", NULL },
        { NULL,            "eval_subset_num_batches: 0", "evaluates nothing", NULL },
        { NULL,            "save_overwrite: 3",    "expected true or false, found '3'", NULL },
        { "max_duration",  "max_duration: 2e9X",
          "expected steps (100), tokens (2e9T) or epochs (1ep), above 0, at most 9e+18, found '2e9X'", NULL },
        { "max_duration",  "max_duration: 1e30T",  "above 0, at most 9e+18, found '1e30T'", NULL },
        { "seed",          "seed: 18446744073709551615",
          "seed: expected an integer >= 0, at most 9e+18, found '18446744073709551615'", NULL },
        { "betas",         "eps: 1e-16",           "optimizer.eps: expected a number from 1e-15 to 1, found '1e-16'", NULL },
        { "max_duration",  "max_duration: 0",      "max_duration", NULL },
        { NULL,            "format: {saved: fp9}", "format.saved: expected f32, bf16", "found 'fp9'" },
        { NULL,            "format: {keep: some}", "format.keep: expected all|inputs|block", NULL },
        { NULL,            "format: {master: e4m3/128}", "format.master cannot be e4m3/128; take bf16 or f32", NULL },
        { NULL,            "format: {head: e4m3/16}", "format.head cannot be e4m3/16: a GEMM operand has one scale", NULL },
        { NULL,            "format: {head: f32}", "format.head is f32 and format.stream bf16", "take e5m2 or bf16" },
        { NULL,            "format: {saved: e4m3/48}", "format.saved is e4m3/48, but a row of 64 cannot be cut",
          NULL },
        { NULL,            "format: {saved: e4m3/16+}", "only moments are expanded", NULL },
        { NULL,            "format: {operand: e4m3/16}", "a GEMM operand has one scale", NULL },
        { NULL,            "format: {moment1: e4m3}", "FP8 moments have a scale per group, as in e4m3/128", NULL },
        { NULL,            "format: {moment2: e5m2/100}", "a block of 256 cannot be cut into groups of 100", NULL },
        { NULL,            "recipe: {moment1: e5m2}", "its columns are changed by format.*", NULL },
        { NULL,            "fsdp: on",             "fsdp is a section", "found 'on'" },
        { NULL,            "evaluators: {label: a}", "evaluators is a list", NULL },
        { NULL,            "evaluators: [{type: lm}]", "evaluator has no label", NULL },
        { NULL,            "evaluators: [{label: a}]", "evaluator 'a' has no data", NULL },
        { NULL,            "evaluators: [{label: a, data: {paths: a.npy}}, {label: b, data: {datasets: {a: b.npy}}}]",
          "two validation sets are named 'a'", NULL },
        { NULL, "evaluators: [{label: a, type: downstream, data: {paths: [b, c]}}]\n", "evaluator 'a' has 2 files", NULL },
        { NULL, "eval_only: true\n", "there are no evaluators", NULL },
    };
    CHECK_MISTAKES(list);
}

static void test_unsupported(void **state)
{
    (void)state;
    static const Mistake list[] = {
        { "include_bias", "include_bias: true",        "model.include_bias: 'true' is not supported, only false",
          NULL },
        { "include_bias", "alibi: true",               "model.alibi: 'true' is not supported", NULL },
        { "include_bias", "rope: false",               "model.rope", "positions are rotary" },
        { "include_bias", "activation_type: gelu",     "only swiglu", NULL },
        { "include_bias", "block_type: parallel",      "only sequential|llama", NULL },
        { "include_bias", "attention_dropout: 0.1",    "there is no dropout", NULL },
        { "include_bias", "bias_for_layer_norm: true", "norms have no bias", NULL },
        { "include_bias", "scale_logits: true",        "model.scale_logits", NULL },
        { "layer_norm_type", "layer_norm_type: group",    "expected rms|default|low_precision|amd_compatible", NULL },
        { "include_bias", "init_fn: kaiming_normal",   "expected mitchell|normal|full_megatron", NULL },
        { "betas",        "name: lionw",               "this program has no optimizer 'lionw'; it has adamw, adamw8bit", NULL },
        { "t_warmup",     "name: max_scheduler",       "expected cosine_with_warmup|linear_with_warmup", NULL },
        { NULL, "precision: amp_fp16",                 "expected amp_bf16|fp32, found 'amp_fp16'", NULL },
        { NULL, "max_grad_norm_ratio: 0.5",            "clipped by max_grad_norm", NULL },
        { NULL, "time_limit: 3600",                    "SIGTERM", NULL },
        { NULL, "optimizer.eps: 1e-6",                 "'optimizer.eps' is written with a dot", "a section" },
        { NULL, "save_folder: ''",                     "save_folder is empty", NULL },
        { NULL, "activation_checkpointing: one_in_five", "expected whole_layer|true|fine_grained|false|one_in_two", NULL },
        { NULL, "recipe: fp4",                         "this build has no recipe 'fp4'; it has f32, bf16", NULL },
        { NULL, "quantize_model: {use_quantize_model: fp8deepseek}", "expected coat_real|fp8linear", NULL },
        { NULL, "load_path: ''",                       "load_path is empty; give a folder", NULL },
        { NULL, "load_path: s3://bucket/step1",        "load_path 's3://bucket/step1' is remote; fetch", NULL },
        { NULL, "save_folder: s3://bucket/run",        "save_folder 's3://bucket/run' is remote", NULL },
        { "paths", "paths: [https://host/a.npy]",      "'https://host/a.npy' is remote",
          "wget -x https://host/a.npy" },
        { "paths", "paths: [b.npy, s3://b/a.npy, s3://b/c.npy]", "'s3://b/a.npy' and others are remote",
          "aws s3 cp s3://b/a.npy ." },
        { "paths", "paths: [gs://b/a.npy]",            "'gs://b/a.npy' is remote", "gcloud storage cp gs://b/a.npy ." },
        { "paths", "paths: [r2://b/a.npy]",            "'r2://b/a.npy' is remote", "r2.cloudflarestorage.com s3://b/a.npy ." },
        { "paths", "paths: [weka://b/a.npy]",          "'weka://b/a.npy' is remote", "WEKA_URL s3://b/a.npy ." },
        { "paths", "paths: [hf://b/a.npy]",            "'hf://b/a.npy' is remote", "the tool of that store: hf://b/a.npy" },
    };
    CHECK_MISTAKES(list);
}

static void test_combinations(void **state)
{
    (void)state;
    static const Mistake list[] = {
        { "n_heads",      "n_heads: 5",
          "model.d_model 64 is not a multiple of model.n_heads 5; take d_model 60 or 65",
          "model.head_dim" },
        { "include_bias", "n_kv_heads: 3",           "model.n_heads 4 is not a multiple of model.n_kv_heads 3",
          NULL },
        { "include_bias", "head_dim: 5",             "heads are 5 wide", "must be even" },
        { "n_heads",      "n_heads: 64",             "heads are 1 wide", NULL },
        { "include_bias", "mlp_hidden_size: 333",    "so it must be even", NULL },
        { "include_bias", "mlp_ratio: 0.7",          "both halves of the MLP 44.8 wide", NULL },
        { "include_bias", "embedding_size: 96",
          "model.vocab_size 100 does not fit model.embedding_size 96; take 128", NULL },
        { "eos_token_id", "eos_token_id: 100",       "model.eos_token_id 100 is beyond the vocabulary", NULL },
        { "include_bias", "pad_token_id: 777",       "model.pad_token_id 777 is beyond the vocabulary", NULL },
        { "include_bias", "rope_scaling: {rope_type: llama3}", "needs model.rope_scaling.factor", NULL },
        { "include_bias", "rope_scaling: {factor: 8, high_freq_factor: 1}", "high_freq_factor 1 must be above",
          NULL },
        { "global_train_batch_size", "global_train_batch_size: 7", "--device_train_microbatch_size=1",
          "--global_train_batch_size=6 or 8 would do" },
        { "global_train_batch_size", "global_train_batch_size: 1", "--device_train_microbatch_size=1",
          "--global_train_batch_size=2 would do" },
        { "t_warmup", "name: wsd",                   "needs scheduler.t_decay", NULL },
        { "t_warmup", "warmup_min_lr: 1",
          "scheduler.warmup_min_lr 1 is above optimizer.learning_rate 0.001", NULL },
        { "paths",    "paths: []",                   "no training data", NULL },
    };
    CHECK_MISTAKES(list);
}

/* Mistakes that take two lines or an argument. */
/* Arguments that a complete file is refused with, and words of the message. */
typedef struct { int world; const char *a, *b, *words; } Refused;

static void refuse_all(const Refused *list, size_t count)
{
    try_write(try_path, try_base);
    for (size_t i = 0; i < count; i++) {
        char message[8192];
        if (try_printed(message, sizeof message, 2, list[i].world, list[i].a, list[i].b))
            fail_msg("%s was accepted", list[i].a ? list[i].a : "the number of ranks");
        try_contains(message, list[i].words);
    }
}

static void test_model_arguments(void **state)
{
    (void)state;
    static const Refused list[] = {
        { 1, "--model.multi_query_attention", "--model.n_kv_heads=2", "give only n_kv_heads" },
        { 1, "--model.attention_layer_norm", "--model.layer_norm_type=default", "set model.layer_norm_type: rms" },
        { 1, "--model.layer_norm_type=default", NULL, "\n  OLMo (OlmoForCausalLM): model.layer_norm_with_affine: false\n" },
        { 1, "--model.architecture=GPT2LMHeadModel", NULL,
          "'GPT2LMHeadModel' is not known, only LlamaForCausalLM, OlmoForCausalLM, " },
        { 1, "--model.architecture=Qwen3ForCausalLM", NULL,
          "--model.architecture=Qwen3ForCausalLM: a Qwen3ForCausalLM does not compute this model; it would with "
          "model.attention_layer_norm: head\n" },
        { 1, "--model.n_heads=1", "--model.d_model=8192",
          "model.head_dim would be 8192, by the keys that it follows from; expected an integer from 2 to 4096" },
        { 1, "--model.d_model=2147483647", "--model.n_heads=10000", "take d_model 2147480000 or 2147490000" },
        { 1, "--model.mlp_hidden_size=4294967294", NULL, "model.mlp_hidden_size: expected an integer from 2 to 2147483646" },
        { 1, "--model.mlp_ratio=1e6", "--model.d_model=4096", "model.mlp_hidden_size would be 4096000000" },
        { 1, "--model.layer_norm_type=default", NULL, "x.yaml" },
        { 1, "--model.attention_layer_norm=each", NULL, "expected false|true|head, found 'each'" },
        { 1, "--model.layer_types=[sliding_attention]", NULL, "layer_types has sliding_attention, but there is no sliding_window" },
        { 1, "--model.layer_types=[sliding]", "--model.sliding_window=4", "and full_attention, found 'sliding'" },
        { 1, "--model.layer_types=full_attention", NULL, "a list of sliding_attention and full_attention, found 'full_attention'" },
        { 1, "--model.sliding_window=0", NULL, "model.sliding_window: expected an integer from 1 to 2147483647, found '0'" },
        { 1, "--model.rope_scaling={rope_type: yarn}", NULL, "rope_type yarn needs model.rope_scaling.factor" },
        { 1, "--model.rope_scaling={rope_type: yarn, factor: 8, beta_slow: 32}", NULL, "beta_fast 32 must be above beta_slow 32" },
        { 1, "--model.rope_scaling={rope_type: yarn, factor: 8}", "--model.rope_theta=1", "a rope_theta above 1" },
        { 1, "--model.rope_scaling={rope_type: yarn, factor: 8, full_attn_layers_only: true}",
          "--model={sliding_window: 4, layer_types: [sliding_attention, full_attention]}",
          "\n  Mistral (MistralForCausalLM): model.layer_types: null, model.rope_scaling.full_attn_layers_only: false\n" },
    };
    refuse_all(list, sizeof list / sizeof *list);
}

#define SIXTY_ZEROS "000000000000000000000000000000000000000000000000000000000000"

static void test_arguments(void **state)
{
    (void)state;
    static const Refused list[] = {
        { 1, "--max_duratoin=3", NULL,
          "error: --max_duratoin=3: unknown key 'max_duratoin'; did you mean 'max_duration'?" },
        { 1, "--model.n_layers=x", NULL, "error: --model.n_layers=x: model.n_layers: expected an integer" },
        { 1, "max_duration=3", NULL, "unexpected argument 'max_duration=3'" },
        { 1, "other.yaml", NULL, "unexpected argument 'other.yaml'; there is one configuration file, which comes first: ./tr" },
        { 1, "--betas=[1", NULL, "--betas=[1: " },
        { 1, "--max_duration=", NULL, "there is no value, as if a variable of the shell were not set; --max_duration=null takes" },
        { 1, "--run_name=..", NULL, "run_name .. leads out of the folder runs" },
        { 1, "--run_name=a/../../b", NULL, "run_name a/../../b leads out of the folder runs" },
        { 1, "--data.paths=[*.npy]", NULL, "--data.paths=[*.npy]: invalid alias; quote a pattern that begins with *" },
        { 3, NULL, NULL, "global_train_batch_size 8 is not a multiple of 3 ranks x device_train_microbatch_size 2; "
                         "--global_train_batch_size=6 or 12 would do" },
        { 8, NULL, NULL, "--device_train_microbatch_size=1 or --global_train_batch_size=16 would do" },
        { 1, "--scheduler.t_max=10", "--scheduler.t_warmup=20", "t_warmup 20 is longer than scheduler.t_max 10" },
        { 1, "--scheduler={name: wsd, t_decay: 91}", NULL, "t_warmup 10 and t_decay 91 do not fit max_duration 100" },
        { 1, "--scheduler={name: wsd, t_decay: 41}", "--scheduler.t_max=50", "and t_decay 41 do not fit t_max 50" },
        { 1, "--scheduler={name: wsd, t_decay: 60, warmup_fraction: 0.5, t_warmup: 0}", NULL,
          "t_warmup 50 and t_decay 60 do not fit max_duration 100" },
        { 1, "--scheduler.warmup_fraction=0.1", NULL, "scheduler.t_warmup and scheduler.warmup_fraction both say how long" },
        { 1, "--scheduler.name=inverse_sqrt_with_warmup", "--scheduler.t_warmup=0", "needs scheduler.t_warmup > 0" },
        { 1, "--data.generate_attention_mask", NULL, "needs model.pad_token_id" },
        { 1, "--data.generate_doc_lengths", "--model.eos_token_id=null", "needs model.eos_token_id" },
        { 1, "--data.packing=best_fit", "--model.eos_token_id=null",
          "data.packing=best_fit without data.document_boundaries=metadata needs model.eos_token_id" },
        { 1, "--evaluators=[{label: v, data: {paths: a.npy, packing: best_fit}}]", NULL, "packing best_fit needs a model whose "
          "attention stays inside documents" },
        { 1, "--evaluators=[{label: v, data: {paths: a.npy, packing: best_fit}}]", "--model.eos_token_id=null",
          "packing best_fit needs" },
        { 1, "--evaluators=[{label: v, data: {datasets: {a: b.npy}, label_mask_paths: m}}]", NULL,
          "evaluator 'v' has label_mask_paths, which are parallel to data.paths" },
        { 1, "--data.datasets={x: [b.npy]}", NULL, "not both" },
        { 1, "--model.vocab_size=null", NULL, "found 'null'" },
        { 2, "--device_eval_batch_size=2147483647", NULL, "2147483647 sequences on each of 2 ranks exceed the 2^31 - 1" },
        { 1, "--run_name=${oc.env:NO_SUCH_VARIABLE}", NULL, "NO_SUCH_VARIABLE is not set" },
        { 4, "--fsdp.sharding_strategy=HYBRID_SHARD", "--fsdp.hybrid_sharding_num_model_replicas=3",
          "4 ranks cannot form 3 groups of equal size" },
        { 1, "--fsdp.sharding_strategy=FULL", NULL, "expected FULL_SHARD|SHARD_GRAD_OP|NO_SHARD" },
        { 1, "--run_name=${nowhere}", NULL, "there is no key 'nowhere'" },
        { 1, "--run_name=${save_folder}", "--save_folder=${run_name}", "refers to itself" },
        { 1, "--run_name=${path.best:x}", NULL, "${path.best:...} is unknown; there are oc.env" },
        { 1, "--run_name=${seed", NULL, "lacks a closing }" },
        { 1, "--data.paths=${path.glob:/nowhere/*.npy}", NULL, "no file matches '/nowhere/*.npy'" },
        { 1, "--save_folder=${path.choose:/nowhere/a,/nowhere/b}", NULL, "none of '/nowhere/a', '/nowhere/b' exists" },
        { 1, "--load_path=${path.last_checkpoint:/nowhere}", NULL, "there is no checkpoint stepN in '/nowhere'" },
        { 1, "--optimizer.eps=1e-20", NULL, "optimizer.eps" },
        { 1, "--run_name=${data.paths}-x", NULL, "puts a list or a section inside a text" },
        { 1, "--evaluators[].data.memmap_dtype=uint32", NULL,
          "error: --evaluators[].data.memmap_dtype=uint32: 'evaluators[]': an element of a list cannot be changed on its own" },
        { 1, "--evaluators[].label=a", NULL, "error: --evaluators[].label=a: 'evaluators[]': an element of a list" },
        { 1, "--evaluators[0].data.paths=a", NULL,
          "give the whole list, as in --evaluators='[{label: val, data: {paths: [val.npy]}}]'" },
        { 1, "--evaluators.label=a", NULL, "evaluators is a list" },
        { 1, "--model={rope_scaling.factor: 8}", NULL, "'rope_scaling.factor' is written with a dot" },
        { 1, "--model.=3", NULL, "unknown key 'model.'" },
        { 1, "--.=3", NULL, "unknown key ''" },
        { 1, "--seed=" SIXTY_ZEROS SIXTY_ZEROS "000000001", NULL, "seed: expected an integer" },
        { 1, "--run_name=\xff", NULL, "run_name: its text is not UTF-8" },
        { 1, "--data.paths=['a', 'b\xc3']", NULL, "--data.paths" },
        { 1, "--run_name=${oc.env:NOT_UTF8}", NULL, "run_name: its text is not UTF-8" },
        { 1, "--data.paths=[\"a\\0b\"]", NULL, "a zero byte" },
        { 1, "--run_name=${oc.env:REFERENCE}", NULL, "run_name: '${seed}' would be evaluated again" },
        { 1, "--format.moment1=e4m3/4294967424", NULL, "found 'e4m3/4294967424'" },
    };
    setenv("NOT_UTF8", "a\xed\xa0\x80", 1);
    setenv("REFERENCE", "${seed}", 1);
    refuse_all(list, sizeof list / sizeof *list);
}

static void test_files(void **state)
{
    (void)state;
    char message[8192], expected[256];
    static const struct { const char *text, *words; int line; } list[] = {
        { "a: 1\nb: 2\na: 3\n",     "duplicate key", 3 },
        { "a: 1\npaths: *.npy\n",  "invalid alias; quote a pattern that begins with *, as in '*.npy'", 2 },
        { "model:\n  a: [1, 2\n",   "", 0 },
        { "",                       "is empty or no YAML", 0 },
        { "---\na: 1\n---\nb: 2\n", "holds several documents; a configuration is one", 0 },
        { "a: 1\n---\nb: [2\n",     "", 0 },
        { "- 1\n- 2\n",             "a list of `key: value` lines", 0 },
        { "seed: 1\n",              "model.d_model is missing: width", 0 },
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        try_write(try_path, list[i].text);
        assert_false(try_printed(message, sizeof message, 2, 1, NULL, NULL));
        snprintf(expected, sizeof expected, list[i].line ? "%s:%d:" : "%s", try_path, list[i].line);
        try_contains(message, expected);
        try_contains(message, list[i].words);
    }
    static const char *const no_utf8[] = { "seed: 1\n# r\xe9glages\nseed: 2\n", "seed: 1\nrun_name: \xff\n", "a: 1\n\xed\xa0\x80" };
    for (int i = 0; i < 3; i++) {
        try_write(try_path, no_utf8[i]);
        assert_false(try_printed(message, sizeof message, 2, 1, NULL, NULL));
        try_contains(message, "x.yaml:2: this line is not UTF-8, or has a zero byte; save the file as UTF-8");
    }
    unlink(try_path);
    assert_false(try_printed(message, sizeof message, 2, 1, NULL, NULL));
    try_contains(message, "cannot read this configuration file");
    assert_int_equal(mkdir(try_path, 0777), 0);
    assert_false(try_printed(message, sizeof message, 2, 1, NULL, NULL));
    rmdir(try_path);
    try_contains(message, "a model's folder is given as --load_path=");
}

/* ---- Hugging Face folders -------------------------------------------------------------------------------- */

static void test_hf_refused(void **state)
{
    (void)state;
    static const struct { const char *json, *words; } list[] = {
        { "{" TRY_LLAMA ", \"attention_bias\": true}",                     "attention_bias true is not supported, only false" },
        { "{" TRY_LLAMA ", \"mlp_bias\": true}",                           "mlp_bias true is not supported, only false" },
        { "{" TRY_LLAMA ", \"rope_scaling\": {\"rope_type\": \"linear\"}}", "rope_type 'linear' is not supported" },
        { "{\"architectures\": [\"GPT2LMHeadModel\"], \"model_type\": \"gpt2\"}",
          "architecture GPT2LMHeadModel (model_type gpt2) is not supported, only LlamaForCausalLM, OlmoForCausalLM, "
          "Olmo2ForCausalLM, MistralForCausalLM, MinistralForCausalLM, Qwen3ForCausalLM, Olmo3ForCausalLM" },
        { "{\"architectures\"\n: }",                                   "config.json:2:" },
    };
    char from[128], message[8192];
    snprintf(from, sizeof from, "--load_path=%s", try_folder);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        try_write_hf(list[i].json);
        assert_false(try_printed(message, sizeof message, 2, 1, from, NULL));
        try_contains(message, list[i].words);
    }
    assert_false(try_printed(message, sizeof message, 2, 1, "--load_path=/nowhere", NULL));
    try_contains(message, "load_path /nowhere: there is no such folder");
}

/* The folder that a run began with is missed only while there is no checkpoint to go on with. */
static void test_hf_gone(void **state)
{
    (void)state;
    char place[128], name[128], message[8192];
    snprintf(place, sizeof place, "--save_folder=%s/run", try_folder);
    try_write_hf("{" TRY_LLAMA "}");
    try_write(try_path, "data: {paths: a.npy}\ntry_load_latest_save: true\n");
    assert_false(try_printed(message, sizeof message, 2, 1, "--load_path=/nowhere", place));
    try_contains(message, "load_path /nowhere: there is no such folder");

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
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unknown_keys),
        cmocka_unit_test(test_wrong_values),
        cmocka_unit_test(test_unsupported),
        cmocka_unit_test(test_combinations),
        cmocka_unit_test(test_arguments), cmocka_unit_test(test_model_arguments),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_hf_refused),
        cmocka_unit_test(test_hf_gone),
    };
    return cmocka_run_group_tests(tests, try_make_folder, try_remove_folder);
}
