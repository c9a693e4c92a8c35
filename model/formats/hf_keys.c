/* All keys in one table, in the order of writing. The named row of config_keys gives type, range
 * and the field of ModelConfig; rows of architecture.c say which classes have a key, with which
 * default.
 *
 * tests/golden/config_keys.json lists all keys that transformers 4 and 5 declare or read for these
 * classes, and their effects; tests/test_config_keys.c compares.
 *
 * NOTE: in transformers the embedding's row of pad_token_id gets no gradient. Here it is trained
 * like any other, if it is used. */
#include "model/formats/hf_keys.h"

#include <math.h>
#include <string.h>

#define OF_TRANSFORMERS \
    "transformers reads it; remove it from config.json if the model was trained without it"

// clang-format off
const HfKey hf_keys[] = {
    { "hidden_act",              HF_ONLY,     "[\"silu\", \"swish\"]" },
    { "attention_bias",          HF_ONLY | HF_UNLISTED, "false" },
    { "attention_bias",          HF_IGNORED | HF_LISTED },
    { "attention_dropout",       HF_ONLY,     "0.0", .why = "dropout is not supported: set attention_dropout to 0.0 to train without dropout" },
    { "initializer_range",       HF_WRITTEN,  "model.init_std" },
    { "use_cache",               HF_LITERAL,  "true" },
    { "hidden_size",             HF_VALUE,    "model.d_model", NAN },
    { "intermediate_size",       HF_VALUE | HF_UNLISTED, "model.mlp_hidden_size", NAN },
    { "intermediate_size",       HF_ROUTER | HF_LISTED },        /* of blocks with one MLP */
    { "moe_intermediate_size",   HF_VALUE | HF_LISTED, "model.mlp_hidden_size" },
    { "num_experts",             HF_VALUE | HF_LISTED, "model.num_experts" },
    { "num_experts_per_tok",     HF_VALUE | HF_LISTED, "model.num_experts_per_tok" },
    { "norm_topk_prob",          HF_VALUE | HF_LISTED, "model.norm_topk_prob" },
    { "router_aux_loss_coef",    HF_VALUE | HF_LISTED, "model.router_aux_loss_coef" },
    { "num_local_experts",       HF_ROUTER | HF_LISTED },
    { "output_router_logits",    HF_ROUTER | HF_LISTED },
    { "decoder_sparse_step",     HF_ROUTER | HF_LISTED },
    { "mlp_only_layers",         HF_ROUTER | HF_LISTED },
    { "num_hidden_layers",       HF_VALUE,    "model.n_layers", NAN },
    { "num_attention_heads",     HF_VALUE,    "model.n_heads", NAN },
    { "num_key_value_heads",     HF_VALUE,    "model.n_kv_heads", 0 },
    { "max_position_embeddings", HF_VALUE,    "model.max_sequence_length", 2048 },
    { "vocab_size",              HF_VALUE,    "model.vocab_size", NAN },
    { "partial_rotary_factor",   HF_REFUSED,  "1.0" },
    { "rope_theta",              HF_ROTATION },
    { "rope_scaling",            HF_ROTATION },
    { "tie_word_embeddings",     HF_VALUE,    "model.weight_tying", 0 },
    { "bos_token_id",            HF_LITERAL,  "null" },
    { "eos_token_id",            HF_TOKEN,    "model.eos_token_id", -1 },
    { "pad_token_id",            HF_TOKEN,    "model.pad_token_id", -1 },
    { "head_dim",                HF_VALUE,    "model.head_dim", 0 },
    { "mlp_bias",                HF_ONLY | HF_LISTED,     "false" },
    { "clip_qkv",                HF_VALUE | HF_LISTED,    "model.clip_qkv" },
    { "rms_norm_eps",            HF_VALUE | HF_LISTED,    "model.layer_norm_eps" },
    { "use_sliding_window",      HF_BLOCKS | HF_LISTED },
    { "sliding_window",          HF_VALUE | HF_LISTED,    "model.sliding_window" },
    { "sliding_window",          HF_REFUSED | HF_UNLISTED, "null",
      .why = "transformers uses it in generation, but not in the model; remove it from config.json" },
    /* has no effect without sliding_window, and a sliding_window is refused */
    { "use_sliding_window",      HF_IGNORED | HF_UNLISTED },
    { "no_rope_layers",          HF_BLOCKS | HF_LISTED },
    { "no_rope_layer_interval",  HF_BLOCKS | HF_LISTED },
    { "max_window_layers",       HF_BLOCKS | HF_LISTED },
    { "layer_types",             HF_BLOCKS | HF_LISTED },
    { "layer_types",             HF_REFUSED | HF_UNLISTED, "[\"full_attention\"]" },
    { "rope_parameters",         HF_ROTATION },
    { "original_max_position_embeddings", HF_ROTATION },

    /* keys that no class here declares, but that transformers reads for all classes */
    { "is_causal",               HF_REFUSED,  "true" },
    { "is_encoder_decoder",      HF_REFUSED,  "false" },
    { "attention_chunk_size",    HF_REFUSED,  "null", .why = OF_TRANSFORMERS },
    { "num_kv_shared_layers",    HF_REFUSED,  "0",    .why = OF_TRANSFORMERS },
    { "per_layer_config",        HF_REFUSED,  "null", .why = "all layers have the same sizes here" },
    { "pruned_heads",            HF_REFUSED,  "null", .why = "all layers have the same heads here" },
    { "text_config",             HF_REFUSED,  "null",
      .why = "LlavaForConditionalGeneration is the only supported class with a text_config" },
    { "decoder",                 HF_REFUSED,  "null", .why = "only models of text are read" },
    { "generator",               HF_REFUSED,  "null", .why = "only models of text are read" },
    { "text_encoder",            HF_REFUSED,  "null", .why = "only models of text are read" },
    { "transformers_weights",    HF_REFUSED,  "null", .why = "weights are read from model.safetensors, or the files of its index" },
    { "configuration_files",     HF_REFUSED,  "null", .why = "copy the right one to config.json" },
    { "quantization_config",     HF_IGNORED },       /* quantized.h checks it */

    /* names of the model, and types of weights, which are read from the weights' files */
    { "architectures", HF_IGNORED }, { "model_type", HF_IGNORED }, { "transformers_version", HF_IGNORED },
    { "name_or_path", HF_IGNORED }, { "dtype", HF_IGNORED }, { "torch_dtype", HF_IGNORED }, { "use_bfloat16", HF_IGNORED },
    { "tokenizer_class", HF_IGNORED }, { "prefix", HF_IGNORED }, { "unsloth_version", HF_IGNORED }, { "unsloth_fixed", HF_IGNORED },

    /* settings of how transformers computes the function, and of its results */
    { "pretraining_tp", HF_IGNORED }, { "chunk_size_feed_forward", HF_IGNORED }, { "attn_implementation", HF_IGNORED },
    { "experts_implementation", HF_IGNORED }, { "gradient_checkpointing", HF_IGNORED }, { "torchscript", HF_IGNORED },
    { "output_attentions", HF_IGNORED }, { "output_hidden_states", HF_IGNORED }, { "return_dict", HF_IGNORED },
    { "use_return_dict", HF_IGNORED }, { "tie_last_hidden_states", HF_IGNORED },

    /* keys of encoders, encoder-decoders and classifiers */
    { "is_decoder", HF_IGNORED }, { "add_cross_attention", HF_IGNORED }, { "cross_attention_hidden_size", HF_IGNORED },
    { "tie_encoder_decoder", HF_IGNORED }, { "decoder_start_token_id", HF_IGNORED }, { "sep_token_id", HF_IGNORED },
    { "id2label", HF_IGNORED }, { "label2id", HF_IGNORED }, { "num_labels", HF_IGNORED }, { "problem_type", HF_IGNORED },
    { "finetuning_task", HF_IGNORED }, { "task_specific_params", HF_IGNORED }, { "tf_legacy_loss", HF_IGNORED },

    /* settings of generation, which current versions store in generation_config.json */
    { "assistant_confidence_threshold", HF_IGNORED }, { "assistant_lookbehind", HF_IGNORED }, { "bad_words_ids", HF_IGNORED },
    { "begin_suppress_tokens", HF_IGNORED }, { "diversity_penalty", HF_IGNORED }, { "do_sample", HF_IGNORED },
    { "early_stopping", HF_IGNORED }, { "encoder_no_repeat_ngram_size", HF_IGNORED }, { "encoder_repetition_penalty", HF_IGNORED },
    { "epsilon_cutoff", HF_IGNORED }, { "eta_cutoff", HF_IGNORED }, { "exponential_decay_length_penalty", HF_IGNORED },
    { "forced_bos_token_id", HF_IGNORED }, { "forced_eos_token_id", HF_IGNORED }, { "length_penalty", HF_IGNORED },
    { "max_length", HF_IGNORED }, { "min_length", HF_IGNORED }, { "no_repeat_ngram_size", HF_IGNORED },
    { "num_assistant_tokens", HF_IGNORED }, { "num_assistant_tokens_schedule", HF_IGNORED }, { "num_beam_groups", HF_IGNORED },
    { "num_beams", HF_IGNORED }, { "num_return_sequences", HF_IGNORED }, { "output_scores", HF_IGNORED },
    { "remove_invalid_values", HF_IGNORED }, { "repetition_penalty", HF_IGNORED }, { "return_dict_in_generate", HF_IGNORED },
    { "suppress_tokens", HF_IGNORED }, { "target_lookbehind", HF_IGNORED }, { "temperature", HF_IGNORED }, { "top_k", HF_IGNORED },
    { "top_p", HF_IGNORED }, { "typical_p", HF_IGNORED },
    { NULL }
};
// clang-format on

enum {
    LLAMA3 = 1 << ROPE_LLAMA3,
    YARN = 1 << ROPE_YARN,
    ALL_TYPES = 1 << ROPE_DEFAULT | LLAMA3 | YARN
};

// clang-format off
const HfRopeKey hf_rope_keys[] = {
    { { "rope_type",             HF_ROTATION },                                             ALL_TYPES },
    { { "type",                  HF_ROTATION },                                             ALL_TYPES },
    { { "rope_theta",            HF_ROTATION },                                             ALL_TYPES },
    { { "factor",                HF_VALUE, "model.rope_scaling.factor", NAN },              LLAMA3 | YARN },
    { { "attention_factor",      HF_VALUE, "model.rope_scaling.attention_factor", 0 },      YARN },
    { { "beta_fast",             HF_VALUE, "model.rope_scaling.beta_fast", 32 },            YARN },
    { { "beta_slow",             HF_VALUE, "model.rope_scaling.beta_slow", 1 },             YARN },
    { { "low_freq_factor",       HF_VALUE, "model.rope_scaling.low_freq_factor", 1 },       LLAMA3 },
    { { "high_freq_factor",      HF_VALUE, "model.rope_scaling.high_freq_factor", 4 },      LLAMA3 },
    { { "original_max_position_embeddings", HF_VALUE, "model.rope_scaling.original_max_position_embeddings", 8192 },
      LLAMA3 | YARN },
    { { "truncate",              HF_REFUSED, "true" },                                      YARN },
    { { "mscale",                HF_REFUSED, "null" },                                      YARN },
    { { "mscale_all_dim",        HF_REFUSED, "null" },                                      YARN },
    { { "partial_rotary_factor", HF_REFUSED, "1.0" },                                       ALL_TYPES },
    { { NULL }, 0 }
};
// clang-format on

bool hf_key_is_of(const HfKey *k, const Architecture *a)
{
    const bool listed = architecture_key(a, k->key) != NULL;
    return !(k->kind & (listed ? HF_UNLISTED : HF_LISTED));
}

const HfKey *hf_key(const Architecture *a, const char *key)
{
    for (const HfKey *k = hf_keys; k->key; k++)
        if (strcmp(k->key, key) == 0 && hf_key_is_of(k, a))
            return k;
    return NULL;
}

const HfKey *hf_rope_key(const char *key, RopeType type)
{
    for (const HfRopeKey *k = hf_rope_keys; k->key.key; k++)
        if (k->types >> type & 1 && strcmp(k->key.key, key) == 0)
            return &k->key;
    return NULL;
}
