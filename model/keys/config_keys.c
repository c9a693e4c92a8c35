/* The table of keys. A key that OLMo has keeps OLMo's name, unit and default (olmo/config.py). If
 * OLMo's default is not supported here (dropout, biases), the default is the supported value.
 * model.sliding_window, layer_types and rope_scaling come from Hugging Face; full_attn_layers_only,
 * warmup_fraction, data.mix and sequence_length_warmup from OLMo-core. All other keys are our own.
 * The resolved configuration lists sections in this order. */
#include "model/keys/config_keys.h"
#include "model/keys/config_keys_rows.h"
#include "model/keys/config_keys_distill.h"
#include "model/keys/config_keys_experts.h"
#include "model/keys/config_keys_images.h"
#include "model/keys/config_keys_mesh.h"
#include "model/keys/config_keys_muon.h"
#include "model/keys/config_keys_policy.h"
#include "model/keys/config_keys_preference.h"

// clang-format off
const ConfigKey config_keys[] = {
    OTHER ("run_name", STRING, "run", C(run_name), "name of the run"),
    NUMBER("seed", U64, "6198", 0, LONGS, C(seed), "seed of the initial weights and of stochastic rounding"),
    OTHER ("dry_run", BOOL, "false", C(dry_run),
           "print the memory plan, whether it fits, and the predicted time of a step; then stop with exit status 0. It needs no "
           "data, and with device_memory no GPU"),
    OTHER ("eval_only", BOOL, "false", C(eval_only),
           "evaluate load_path, print the results and stop. No training data are needed. The only file that is written is "
           "eval.jsonl, if save_folder is given. If the configuration file has no model section, batch sizes and "
           "data.generate_doc_lengths come from the run that wrote the checkpoint. Then recipe, format, activations and fp8 come "
           "from this run, too, unless `recipe` is given. In all other cases the default recipe is bf16"),
    OTHER ("score", STRING, "null", C(score),
           "write the log-probability of each label of data.paths, and of evaluators of type preference, to this folder with the model "
           "of load_path, and stop. Each file has a float32 number for each token, in the order of the shards; 0: the token is no "
           "label. The names have hashes of model, recipe and data. Use the same configuration and recipe as the run that will read the files"),
    SCORE_SOFT_ROWS,
    OTHER ("generate", STRING, "null", C(generate),
           "continue the prompts in this file with the model of load_path, print the continuations and stop. Each line of the file "
           "is a prompt: {\"tokens\": [...]}. No data are needed and no files are written. The default recipe is bf16"),
    NUMBER("max_new_tokens", INT, "128", 1, 1 << 24, C(max_new_tokens),
           "generate: maximum number of tokens of a continuation; an end-of-text token ends a continuation earlier"),
    NUMBER("temperature", DOUBLE, "0", 0, 1e3, C(temperature),
           "generate: divisor of the logits. 0: always the most likely token. Above 0: tokens are drawn at random, with random "
           "numbers from `seed`"),
    NUMBER("top_p", DOUBLE, "1", TINY, 1, C(top_p),
           "generate: draw from the smallest set of most likely tokens whose probabilities sum to top_p (nucleus sampling)"),
    GENERATE_FEATURES_ROW,
    OPTION("ranks", INT, "null", 0, 1, MANY, C(ranks),
           "dry_run: number of ranks to plan for; default: the number of started ranks"),
    NUMBER("gpus_per_host", INT, "8", 1, 1024, C(gpus_per_host), "dry_run: GPUs per host, for the predicted time"),
    OPTION("internode_gb_per_s", DOUBLE, "null", 0, TINY, 1e6, C(internode_gb_per_s),
           "dry_run: bandwidth of each GPU to other hosts, in GB/s (10^9 bytes)"),
    WORD  ("mesh", CHOICE, "given", meshes, C(mesh_auto),
           "dry_run. given: plan the configured mesh; auto: also try all other meshes and print the three fastest meshes that fit"),
    OPTION("device_memory", DOUBLE, "null", 0, TINY, 1e6, C(device_memory),
           "memory limit of the run on each device, in GiB (2^30 bytes). The memory of other processes does not count. Default: the free "
           "memory of the device; with dry_run its total memory. With dry_run the device need not be in this machine. In a CPU "
           "build, dry_run needs this key if `ranks` is not the number of started ranks"),

    /* ---- numbers ---- */
    OTHER ("recipe", STRING, "null", X(recipe), "storage formats of all tensors. Default: coat; with eval_only and generate: bf16"),
    COLUMN("format.residual", WIDE, C(recipe.residual), "residual stream"),
    COLUMN("format.saved_norm_input", GROUPS, C(recipe.saved_norm_input), "norm inputs that are saved for backward"),
    COLUMN("format.saved_qkv", GROUPS, C(recipe.saved_qkv), "q, k and v that are saved for backward"),
    COLUMN("format.saved_attention", GROUPS, C(recipe.saved_attention), "attention output that is saved for backward"),
    COLUMN("format.saved_mlp", GROUPS, C(recipe.saved_mlp), "gate and up that are saved for backward"),
    COLUMN("format.operand", ONE_SCALE, C(recipe.operand), "GEMM operands that are activations or weights"),
    COLUMN("format.gradient", ONE_SCALE, C(recipe.gradient), "GEMM operands that are gradients"),
    COLUMN("format.head", ONE_SCALE, C(recipe.head),
           "gradient of the logits. e5m2: both GEMMs of the head's backward pass are in FP8"),
    COLUMN("format.master", WIDE, C(recipe.master), "master weights, which the optimizer updates"),
    COLUMN("format.grads", WIDE, C(recipe.grads),
           "accumulated weight gradients. Default: the recipe's format, but f32 if gradients of more than 128 micro-batches of a "
           "rank, or of more than 128 ranks, are summed"),
    COLUMN("format.moment1", MOMENT, C(recipe.moment1), "AdamW's first moment m"),
    COLUMN("format.moment2", MOMENT, C(recipe.moment2), "AdamW's second moment v"),
    COLUMN("format.frozen", WIDE, C(recipe.frozen), "frozen weights; a run stores no other copy of a frozen weight"),
    WORD  ("activations.keep", CHOICE | FOLLOWS, "null", WORDS({ "all", KEEP_ALL }, { "inputs", KEEP_INPUTS },
           { "attention", KEEP_ATTENTION }, { "block", KEEP_BLOCK }), C(recipe.keep),
           "activations that the forward pass saves. The backward pass recomputes all other activations (gradient checkpointing). "
           "all: every activation; inputs: activations that are expensive to recompute; attention: each block's input and "
           "attention output; block: each block's input"),
    WORD  ("activations.recompute", CHOICE | FOLLOWS, "null", WORDS({ "none", 0 }, { "one_in_two", 2 }, { "one_in_three", 3 },
           { "one_in_four", 4 }, { "one_in_eight", 8 }, { "two_in_three", -3 }, { "three_in_four", -4 }), C(recipe.recompute),
           "blocks that save only their input, regardless of activations.keep. one_in_N: every Nth block, starting with the first "
           "block; two_in_three: all blocks except every third block; three_in_four: all blocks except every fourth block"),
    WORD  ("fp8.forward", CHOICE | FOLLOWS, "null", WORDS({ "saved", FROM_SAVED }, { "exact", FROM_EXACT }), C(recipe.forward),
           "values that the forward pass uses after it has saved an activation in FP8. saved: the rounded values, as in COAT; "
           "exact: the values before rounding"),
    WORD  ("fp8.fast_accumulation", CHOICE | FOLLOWS, "null", WORDS({ "none", FAST_NONE }, { "forward", FAST_FORWARD },
           { "all", FAST_ALL }), C(recipe.fast), "FP8 GEMMs that use fast accumulation: faster sums with fewer bits"),
    WORD  ("fp8.scales", CHOICE | FOLLOWS, "null", WORDS({ "microbatch", PER_MICROBATCH }, { "step", PER_STEP }), C(recipe.scales),
           "how long the scale of an FP8 GEMM operand is valid. microbatch: one micro-batch; step: one step, which saves passes "
           "over memory. With step, all micro-batches use the scale of the first micro-batch, enlarged by headroom"),
    WORD  ("fp8.down_scales", CHOICE | FOLLOWS, "null", WORDS({ "tensor", DOWN_TENSOR }, { "channel", DOWN_CHANNEL }),
           C(recipe.down_scales),
           "scales of the FP8 input of each down_proj. tensor: one scale; channel: one scale, and a factor for each outlier "
           "column. The weights of the column are divided by the factor. A column is an outlier if its maximum is more than 64 "
           "times the median column's maximum. Use channel if SwiGLU has outliers (quant/act/*/largest_channel), so that all other "
           "columns keep their precision"),

    OTHER ("trainable", PATTERNS, "[]", C(trainable),
           "Hugging Face names of the tensors to train; * matches any characters (model.layers.*.mlp.*). All other tensors are "
           "frozen and stored in format.frozen. []: all tensors are trained"),

    /* ---- adapters ---- */
    OPTION("lora.rank", INT, "null", 0, 1, MANY, C(model.lora.rank),
           "rank of the adapters (LoRA). All other weights are frozen. null: no adapters, unless load_path is a folder of "
           "adapters. In that case its adapter_config.json sets rank, alpha, use_rslora, target_modules and projector"),
    OPTION("lora.alpha", DOUBLE, "null", 0, TINY, 1e6, C(model.lora.alpha),
           "the output of adapters is multiplied by alpha / rank; default: rank"),
    OTHER ("lora.use_rslora", BOOL, "false", C(model.lora.use_rslora),
           "multiply the output of adapters by alpha / sqrt(rank) instead of alpha / rank (rank-stabilized LoRA)"),
    OTHER ("lora.target_modules", NAMES, "all-linear", X(lora_modules),
           "matrices of each block that have an adapter: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; "
           "all-linear: all seven"),
    WORD  ("lora.base", CHOICE, "null", WORDS({ "bf16", BASE_AS_FROZEN }, { "e4m3", BASE_E4M3 }, { "nf4", BASE_NF4 }), X(lora_base),
           "format of the blocks' frozen matrices. bf16: as format.frozen; e4m3: one byte per weight, used directly as operand in "
           "FP8 recipes; nf4: half a byte per weight, as in QLoRA. Default for adapters in load_path: the format of their base. "
           "Default for new adapters: nf4 if bitsandbytes stored load_path in 4 bits, else bf16"),
    OTHER ("lora.base_path", STRING | FOLLOWS, "null", C(model.lora.base_path),
           "base model of the adapters in load_path; default: the folder that the adapters name. If the adapters are new, their "
           "base is load_path"),
    ONLY  ("lora.dropout", "0|0.0|null", "dropout is not supported"),
    ONLY  ("lora.use_dora", "false|null", "DoRA is not supported"),
    ONLY  ("lora.bias", "none|null", "only the matrices A and B are trained"),
    PROJECTOR_ADAPTER_ROWS,

    /* ---- architecture ---- */
    OTHER ("model.architecture", STRING, "null", X(architecture),
           "Hugging Face class in the config.json of checkpoints; default: the first supported class that can compute this model"),
    NUMBER("model.d_model", INT, NULL, 1, MANY, C(model.d_model), "width of the residual stream"),
    NUMBER("model.n_layers", INT, NULL, 1, MAX_LAYERS, C(model.n_layers), "number of blocks"),
    NUMBER("model.n_heads", INT, NULL, 1, 10000, C(model.n_heads), "query heads"),
    OPTION("model.n_kv_heads", INT, "null", 0, 1, 10000, C(model.n_kv_heads), "key/value heads; default: n_heads"),
    OTHER ("model.multi_query_attention", BOOL | SPENT, "null", X(multi_query_attention), "true: one key/value head"),
    OPTION("model.head_dim", INT, "null", 0, 2, 4096, C(model.head_dim), "width of a head; default: d_model / n_heads"),
    OPTION("model.mlp_hidden_size", LONG, "null", 0, 2, MANY - 1, X(mlp_hidden_size),
           "width of gate and up together: twice Hugging Face's intermediate_size"),
    OPTION("model.intermediate_size", INT | SPENT, "null", 0, 1, (MANY - 1) / 2, X(intermediate_size),
           "width of the MLP, as in Hugging Face's config.json: half of mlp_hidden_size. Give only one of these two keys"),
    NUMBER("model.mlp_ratio", DOUBLE | SPENT, "4", TINY, 1e6, X(mlp_ratio),
           "mlp_hidden_size / d_model, if mlp_hidden_size is not given"),
    EXPERT_MODEL_ROWS,
    NUMBER("model.max_sequence_length", INT, "1024", 2, 1 << 24, C(model.max_sequence_length),
           "tokens per sequence. Default without a model section: the length of load_path's model, at most 4096"),
    NUMBER("model.vocab_size", INT, NULL, 2, VOCAB, C(model.vocab_size), "number of token ids"),
    OPTION("model.embedding_size", INT, "null", 0, 2, MANY, C(model.embedding_size),
           "rows of the embedding; default: vocab_size rounded up to a multiple of 128"),
    OPTION("model.eos_token_id", INT, "null", -1, 0, MANY, C(model.eos_token_id),
           "end-of-text token, which ends a document; `generate` also stops at this token"),
    OPTION("model.pad_token_id", INT, "null", -1, 0, MANY, C(model.pad_token_id), "padding token"),
    OTHER ("model.weight_tying", BOOL, "true", C(model.weight_tying), "the head uses the matrix of the embedding"),
    WORD  ("model.layer_norm_type", CHOICE, "default", WORDS({ "rms", NORM_RMS }, { "default", NORM_DEFAULT },
           { "low_precision", NORM_LOW_PRECISION }, { "amd_compatible", NORM_AMD_COMPATIBLE }), X(layer_norm_type),
           "rms: RMSNorm; the others: LayerNorm"),
    NUMBER("model.layer_norm_eps", FLOAT, "1e-5", 0, 1, C(model.norm.eps), "added to the variance"),
    OTHER ("model.layer_norm_with_affine", BOOL, "true", C(model.norm_affine), "norms have weights (false in OLMo-1)"),
    OTHER ("model.norm_after", BOOL, "false", C(model.norm_after),
           "normalize the outputs of attention and MLP instead of their inputs (OLMo-2)"),
    OTHER ("model.qkv_bias", BOOL, "false", C(model.qkv_bias), "the projections of q, k and v have biases (Qwen2)"),
    WORD  ("model.attention_layer_norm", CHOICE, "false", WORDS({ "false", QK_NORM_NONE }, { "true", QK_NORM_WIDTH },
           { "head", QK_NORM_HEAD }), C(model.qk_norm),
           "RMSNorm of q and k. true: over the full width of q or k (OLMo-2); head: over each head (Qwen3)"),
    OTHER ("model.attention_layer_norm_with_affine", BOOL, "true", X(attention_layer_norm_with_affine),
           "norms of q and k have weights; false is allowed only in models without norms of q and k"),
    OPTION("model.clip_qkv", FLOAT, "null", 0, TINY, 1e9, C(model.clip_qkv),
           "clamp q, k and v to the range from -clip_qkv to clip_qkv"),
    OPTION("model.sliding_window", INT, "null", 0, 1, MANY, C(model.sliding_window),
           "number of tokens that a query attends to, including its own; default: no window"),
    WORD  ("model.layer_types", LAYER_TYPES, "null", WORDS({ "full_attention", false }, { "sliding_attention", true }),
           C(model.layer_types),
           "attention of each layer: sliding_attention uses sliding_window, full_attention does not. A shorter list repeats. "
           "Default: all layers use sliding_window"),
    NUMBER("model.rope_theta", DOUBLE, "10000", 1, 1e12, C(model.rope_theta), "base of the rotary embedding"),
    OPTION("model.no_rope_layer_interval", INT, "null", 0, 1, MAX_LAYERS, C(model.no_rope_interval),
           "every Nth layer has no rotary embedding (SmolLM3: 4)"),
    WORD  ("model.rope_scaling.rope_type", CHOICE, "null", WORDS({ "default", ROPE_DEFAULT }, { "llama3", ROPE_LLAMA3 },
           { "yarn", ROPE_YARN }), X(rope_type),
           "context extension as in Llama 3.1 (llama3) or YaRN (yarn); default: llama3 if factor is given"),
    OPTION("model.rope_scaling.factor", DOUBLE, "null", 0, 1, 1e6, C(model.rope_scaling.factor), "divisor of low frequencies"),
    NUMBER("model.rope_scaling.low_freq_factor", DOUBLE, "1", TINY, 1e6, C(model.rope_scaling.low_freq_factor),
           "llama3: frequencies with fewer rotations than this within original_max_position_embeddings tokens are divided by `factor`"),
    NUMBER("model.rope_scaling.high_freq_factor", DOUBLE, "4", TINY, 1e6, C(model.rope_scaling.high_freq_factor),
           "llama3: frequencies with more rotations than this within original_max_position_embeddings tokens are unchanged"),
    NUMBER("model.rope_scaling.original_max_position_embeddings", INT, "8192", 1, MANY,
           C(model.rope_scaling.original_length), "tokens per sequence before the extension (the original length)"),
    NUMBER("model.rope_scaling.beta_fast", DOUBLE, "32", TINY, 1e6, C(model.rope_scaling.beta_fast),
           "yarn: frequencies with more rotations than this within original_max_position_embeddings tokens are unchanged"),
    NUMBER("model.rope_scaling.beta_slow", DOUBLE, "1", TINY, 1e6, C(model.rope_scaling.beta_slow),
           "yarn: frequencies with fewer rotations than this within original_max_position_embeddings tokens are divided by `factor`"),
    OPTION("model.rope_scaling.attention_factor", DOUBLE, "null", 0, TINY, 1e6, C(model.rope_scaling.attention_factor),
           "yarn: q and k are multiplied by this factor; default: 0.1 ln(factor) + 1"),
    OTHER ("model.rope_scaling.full_attn_layers_only", BOOL, "false", C(model.rope_scaling.full_attn_layers_only),
           "scale only layers without a sliding window (OLMo-3)"),
    WORD  ("model.init_fn", CHOICE, "normal", WORDS({ "mitchell", INIT_MITCHELL }, { "normal", INIT_NORMAL },
           { "full_megatron", INIT_FULL_MEGATRON }), C(model.init_fn), "distribution of initial weights"),
    NUMBER("model.init_std", DOUBLE, "0.02", TINY, 1e3, C(model.init_std),
           "standard deviation of initial weights; init_fn mitchell ignores it"),
    OPTION("model.init_cutoff_factor", DOUBLE, "null", 0, TINY, 1e3, C(model.init_cutoff_factor),
           "truncate initial weights at this many standard deviations"),
    IMAGE_MODEL_ROWS,

    /* ---- data ---- */
    OTHER ("data.paths", PATHS, "[]", C(data.files.paths),
           "paths of token shards, read in this order. A path may be a pattern, where ** matches any number of folders"),
    OTHER ("data.datasets", DATASETS | SPENT, "null", X(datasets),
           "named lists of shards, instead of data.paths. The lists are read in the order of their names"),
    OTHER ("data.mix", SECTIONS, "[]", C(data.mix), "sources with mixture weights, instead of data.paths (data/README.md)"),
    OTHER ("data.mix[].name", STRING, NULL, S(name), "name of the source, in messages, metrics and checkpoints"),
    OTHER ("data.mix[].paths", PATHS, NULL, S(files.paths), "as data.paths"),
    NUMBER("data.mix[].ratio", DOUBLE, NULL, 1e-6, 1e6, S(ratio),
           "mixture weight: the source's share of the tokens, relative to the sum of all ratios"),
    NUMBER("data.mix[].max_repetition", DOUBLE, "1", 1, 1e6, S(max_repetition),
           "how often the source's tokens may be used, for example 1 or 2.5 times. A run that needs more tokens ends with an error "
           "at its start"),
    OPTION("data.mix[].tokens", LONG, "null", 0, 1, LONGS, S(tokens),
           "number of tokens to use from the source, in whole sequences; default: all"),
    OTHER ("data.mix[].label_mask_paths", PATHS, "[]", S(files.label_mask_paths),
           "label masks, one file per shard of the source (data.label_mask_paths)"),
    IMAGE_SOURCE_ROWS,
    OTHER ("data.label_mask_paths", PATHS, "[]", C(data.files.label_mask_paths),
           "label masks, one file per shard, with one byte per token. A token with the byte 0 is not a target"),
    IMAGE_DATA_ROWS,
    WORD  ("data.memmap_dtype", CHOICE, "uint16", token_types, X(memmap_dtype),
           "type of a token in shards without a header. Default without a model section: uint32 if load_path's model has more than "
           "65536 token ids, else uint16"),
    OPTION("data.seed", U64 | FOLLOWS, "null", NAN, 0, LONGS, C(data.seed), "seed of the data order; default: `seed`"),
    WORD  ("data.packing", CHOICE, "concat", packings, C(data.files.packing),
           "how documents fill sequences. concat: documents follow each other and are cut at the end of each sequence, as in OLMo; "
           "best_fit: each document goes as a whole into the sequence where it fits best, and attention stays inside documents"),
    WORD  ("data.long_documents", CHOICE, "truncate", WORDS({ "truncate", LONG_TRUNCATE }, { "split", LONG_SPLIT }),
           C(data.long_documents),
           "best_fit: what to do with a document that is longer than a sequence. truncate: drop the rest; split: make several "
           "documents"),
    WORD  ("data.document_boundaries", CHOICE, "eos", boundaries, C(data.files.boundaries),
           "where documents end. eos: after model.eos_token_id; metadata: as the rows START,END of X.csv.gz next to X.npy say"),
    OTHER ("data.generate_doc_lengths", BOOL, "false", C(data.generate_doc_lengths), "attention stays inside documents"),
    OTHER ("data.generate_attention_mask", BOOL, "false", C(data.mask_padding), "model.pad_token_id is never a target"),
    NUMBER("data.instance_filter.repetition_max_period", INT, "13", 1, 1024, C(data.instance_filter.max_period),
           "longest n-gram that the filter looks for, in tokens"),
    NUMBER("data.instance_filter.repetition_min_period", INT, "1", 1, 1024, C(data.instance_filter.min_period),
           "shortest n-gram that the filter looks for, in tokens"),
    OPTION("data.instance_filter.repetition_max_count", INT, "null", 0, 1, MANY, C(data.instance_filter.max_count),
           "a sequence is left out of the loss if it repeats an n-gram this often. Default: 32 if the section instance_filter is "
           "given, else no filter"),

    /* ---- the run ---- */
    NUMBER("global_train_batch_size", INT, "512", 1, MANY, C(global_train_batch_size),
           "sequences per step, over all ranks"),
    OTHER ("batch_size_warmup", NAMES, "[]", X(batch_warmup),
           "list of steps after which the global batch doubles. [1000, 3000]: the run starts with a quarter of global_train_batch_size. "
           "The LR schedule does not change. Lengths in tokens (scheduler.units, max_duration, stop_at) count the tokens of the "
           "actual batches"),
    OPTION("sequence_length_warmup.min_sequence_length", INT, "null", 0, 1, MANY, C(length_warmup.min),
           "tokens per sequence at the start of the run. Longer sequences of the data are split into sequences of this length; no "
           "token is dropped. The length grows linearly, in multiples of the initial length, and is model.max_sequence_length "
           "after warmup_steps. null: no warmup of the length"),
    OPTION("sequence_length_warmup.warmup_steps", LONG, "null", 0, 1, LONGS, C(length_warmup.steps),
           "steps until the length is model.max_sequence_length"),
    NUMBER("device_train_microbatch_size", INT, "16", 1, MANY, C(device_train_microbatch_size),
           "micro-batch: sequences per forward pass of a rank. A larger global batch takes several micro-batches (gradient "
           "accumulation)"),
    OTHER ("max_duration", DURATION, "10000", C(max_duration), "length of the run: 100 (steps), 2e9T (tokens), 1ep (epochs)"),
    OTHER ("stop_at", DURATION, "null", C(stop_at),
           "length after which the run stops; the LR schedule still ends at max_duration"),
    OTHER ("extend", STRING | SPENT, "null", X(extend),
           "continue a WSD run from its last checkpoint before the decay. The value is the save_folder of the WSD run, or a "
           "checkpoint; it replaces load_path. Give a new save_folder. A longer max_duration continues the stable phase. To begin "
           "the decay at the checkpoint, set max_duration to the step of the checkpoint + t_decay"),
    NUMBER("timeout_seconds", INT, "600", 1, 1000000, C(timeout_seconds),
           "all ranks end if one rank, or a thread that the rank waits for, makes no progress for this long. A single file "
           "operation may take three times as long, because file servers can stall for minutes. A dead process is noticed within "
           "two seconds"),
    OTHER ("optimizer.name", STRING, "adamw", C(optimizer.name),
           "adamw: AdamW; adamw8bit: AdamW with bitsandbytes' 8-bit moments in the blocks and F32 moments elsewhere, regardless of "
           "the recipe; muon: Muon for the matrices of the blocks, with momentum in format.moment1, and AdamW for all other "
           "weights"),
    NUMBER("optimizer.learning_rate", DOUBLE, "1e-4", 0, 1e3, C(optimizer.lr), "peak learning rate"),
    PROJECTOR_RATE_ROW,
    OTHER ("optimizer.betas", BETAS, "[0.9, 0.95]", C(optimizer.beta1), "AdamW's beta1 and beta2: decay of m and v"),
    NUMBER("optimizer.eps", DOUBLE, "1e-5", 1e-15, 1, C(optimizer.eps), "added to sqrt(v)"),
    NUMBER("optimizer.weight_decay", DOUBLE, "0.01", 0, 1e3, C(optimizer.weight_decay),
           "weight decay, which is multiplied by the learning rate"),
    OTHER ("optimizer.decay_norm_and_bias", BOOL, "false", C(optimizer.decay_norm_and_bias),
           "apply weight decay to norm weights and biases, too"),
    OTHER ("optimizer.decay_embeddings", BOOL, "false", C(optimizer.decay_embeddings), "apply weight decay to the embedding, too"),
    MUON_ROWS,
    WORD  ("scheduler.name", CHOICE, "cosine_with_warmup", WORDS({ "cosine_with_warmup", COSINE_WITH_WARMUP },
           { "linear_with_warmup", LINEAR_WITH_WARMUP }, { "inverse_sqrt_with_warmup", INVERSE_SQRT_WITH_WARMUP },
           { "constant", CONSTANT }, { "constant_with_warmup", CONSTANT_WITH_WARMUP }, { "wsd", WSD }),
           C(scheduler.name), "LR schedule; wsd: warmup, stable phase, decay"),
    WORD  ("scheduler.units", CHOICE, "steps", WORDS({ "steps", UNITS_STEPS }, { "tokens", UNITS_TOKENS }),
           X(scheduler_units), "unit of t_warmup, t_max, t_decay and grad_clip_warmup_steps"),
    NUMBER("scheduler.t_warmup", LONG, "100", 0, LONGS, C(scheduler.t_warmup), "length of the warmup, in scheduler.units"),
    OPTION("scheduler.warmup_fraction", DOUBLE, "null", 0, TINY, 1, C(scheduler.warmup_fraction),
           "length of the warmup as a fraction of t_max, instead of t_warmup"),
    OPTION("scheduler.t_max", LONG, "null", 0, 1, LONGS, C(scheduler.t_max), "end of the decay, in scheduler.units; default: max_duration"),
    OPTION("scheduler.t_decay", LONG, "null", 0, 1, LONGS, C(scheduler.t_decay), "wsd: length of the final decay, in scheduler.units"),
    NUMBER("scheduler.alpha_f", DOUBLE, "0.1", 0, 1e3, C(scheduler.alpha_f), "final learning rate / peak learning rate"),
    OPTION("scheduler.warmup_min_lr", DOUBLE, "null", -1, 0, 1e3, C(scheduler.warmup_min_lr),
           "learning rate at the start of the warmup; default: a tenth of learning_rate"),
    OPTION("scheduler.grad_clip_warmup_steps", LONG, "null", 0, 1, LONGS, C(scheduler.grad_clip_warmup_steps),
           "length of the phase, in `units`, in which max_grad_norm is multiplied by grad_clip_warmup_factor"),
    OPTION("scheduler.grad_clip_warmup_factor", DOUBLE, "null", 1, TINY, 1e9, C(scheduler.grad_clip_warmup_factor),
           "factor of max_grad_norm during grad_clip_warmup_steps"),
    OPTION("average.last", LONG, "null", 0, 1, 1e6, C(average.last),
           "number of snapshots of the weights in a mean; null: no averaging. After every `last` x `every` steps, the run "
           "evaluates the mean and writes the mean as stepN-average, a model folder for other programs. The running mean is stored "
           "in F32, next to the moments"),
    OPTION("average.every", LONG, "null", 0, 1, 1e9, C(average.every), "steps between two snapshots"),
    OPTION("max_grad_norm", DOUBLE, "null", 0, TINY, 1e9, C(max_grad_norm), "clip gradients to this global norm; null: no clipping"),
    WORD  ("spikes", CHOICE, "warn", WORDS({ "warn", SPIKES_WARN }, { "skip", SPIKES_SKIP }, { "stop", SPIKES_STOP }),
           C(spikes),
           "what to do at a spike: a step whose loss or gradient norm is more than 6 standard deviations above the mean of the "
           "last 128 steps. warn: print a warning; skip: print a warning and skip the update, as OLMo-core's SkipStepOptimizer; "
           "stop: end the run and keep the state before the step"),
    OTHER ("softmax_auxiliary_loss", BOOL, "false", X(softmax_auxiliary_loss),
           "add the z-loss: auxiliary_loss_multiplier * log(Z)^2"),
    OPTION("auxiliary_loss_multiplier", DOUBLE, "1e-4", 0, 0, 1e3, X(auxiliary_loss_multiplier), "factor of the z-loss"),
    NUMBER("loss_temperature", DOUBLE, "1", 0.01, 100, C(loss_temperature),
           "divisor of the logits in the head, for the loss of training and evaluation and for the log-probabilities of --score. For "
           "texts that were generated with a temperature, give the same number"),
    NUMBER("loss_chunk", INT, "0", 0, MANY, C(loss_chunk),
           "number of tokens whose logits are in memory at the same time; 0: automatic"),
    NUMBER("tiled_mlp_tokens", INT, "0", 0, MANY, C(tiled_mlp_tokens),
           "tokens per tile of a tiled MLP, a multiple of 128. Only blocks that recompute the MLP in the backward pass use tiles. "
           "Each tile has its own FP8 scales. 0: tiles of 16384 tokens if the run fits device_memory only with tiles, else no "
           "tiles. If the value is at least the number of tokens of a micro-batch, there are no tiles. With quant_stats_interval "
           "there are no tiles, either"),

    PREFERENCE_ROWS,

    DISTILL_ROWS,

    POLICY_ROWS,

    /* ---- saving and loading ---- */
    OTHER ("save_folder", STRING, "null", C(save_folder), "folder of checkpoints and metrics; default: runs/<run_name>"),
    OTHER ("save_overwrite", BOOL, "false", C(save_overwrite),
           "replace the run in save_folder: delete its checkpoints. If load_path is a checkpoint in save_folder, delete only the "
           "checkpoints after load_path"),
    OPTION("save_interval", LONG, "1000", 0, 0, LONGS, C(save_interval),
           "steps between checkpoints; null: only a checkpoint at the end"),
    OPTION("save_num_checkpoints_to_keep", LONG, "-1", -1, -1, LONGS, C(save_num_checkpoints_to_keep),
           "number of the newest checkpoints of save_interval to keep. -1: all; 0: none. With 0, the run also writes no checkpoint "
           "at the end, unless save_interval_unsharded is given"),
    OPTION("save_interval_unsharded", LONG, "null", 0, 1, LONGS, C(save_interval_unsharded),
           "steps between checkpoints that are never deleted"),
    OPTION("save_interval_ephemeral", LONG, "null", 0, 1, LONGS, C(save_interval_ephemeral),
           "steps between checkpoints that are deleted when the next checkpoint is written"),
    OTHER ("load_path", STRING, "null", C(load_path), "a checkpoint to continue, or a Hugging Face folder to start from"),
    OTHER ("tokenizer", STRING, "null", C(tokenizer),
           "tokenizer.json to copy into checkpoints, or a folder with this file; default: the tokenizer of load_path"),
    OTHER ("try_load_latest_save", BOOL, "false", C(try_load_latest_save),
           "continue from the newest checkpoint in save_folder, if there is one"),
    OTHER ("restore_dataloader", BOOL, "true", C(restore_dataloader),
           "continue the data at the position of the checkpoint load_path. false: start at the beginning of the data, which may "
           "differ from the data of that checkpoint's run"),
    OTHER ("reset_optimizer_state", BOOL, "false", C(reset_optimizer_state),
           "start with new moments and a new average of weights instead of those in load_path"),
    OTHER ("reset_trainer_state", BOOL, "false", C(reset_trainer_state),
           "start at step 0, with the weights and moments of load_path"),

    /* ---- evaluation ---- */
    OPTION("eval_interval", LONG, "1000", 0, 0, LONGS, C(eval_interval),
           "steps between evaluations. The last step always has an evaluation. null: no evaluations"),
    OTHER ("eval_on_load", BOOL, "false", C(eval_on_load), "also evaluate before the first step"),
    OPTION("device_eval_batch_size", INT, "null", 0, 1, MANY, C(device_eval_batch_size),
           "sequences per rank in an evaluation batch. A forward pass takes device_train_microbatch_size sequences. Default: "
           "device_train_microbatch_size"),
    OPTION("eval_subset_num_batches", LONG, "-1", -1, -1, LONGS, C(eval_subset_num_batches),
           "number of batches of each evaluation set, per rank; -1: all"),
    OTHER ("evaluators[].label", STRING, NULL, E(label), "name of the evaluation set that `paths` defines; each list of `datasets` has its own name"),
    WORD  ("evaluators[].type", CHOICE, "lm", WORDS({ "lm", EVALUATOR_LM }, { "downstream", EVALUATOR_DOWNSTREAM },
           { "preference", EVALUATOR_PREFERENCE }),
           E(type),
           "lm: loss on validation shards; downstream: accuracy on multiple-choice questions; preference: loss and rewards of "
           "held-out pairs, by preference.loss. A downstream task without `paths` is skipped"),
    OTHER ("evaluators[].data.paths", PATHS, "[]", E(files.paths),
           "validation shards; for downstream one file, written by scripts/prepare_eval.py or make_choices.py"),
    OTHER ("evaluators[].data.datasets", DATASETS, "null", E(datasets), "named lists of shards; each list is an evaluation set"),
    WORD  ("evaluators[].data.memmap_dtype", CHOICE, "null", token_types, E(files.itemsize), "default: data.memmap_dtype"),
    OTHER ("evaluators[].data.label_mask_paths", PATHS, "[]", E(files.label_mask_paths),
           "label masks, one file per shard of the evaluation set (data.label_mask_paths)"),
    IMAGE_EVALUATOR_ROWS,
    WORD  ("evaluators[].data.packing", CHOICE, "null", packings, E(files.packing), "default: data.packing"),
    WORD  ("evaluators[].data.document_boundaries", CHOICE, "null", boundaries, E(files.boundaries),
           "default: data.document_boundaries"),

    OTHER ("samples.prompts", STRING, "null", C(samples.prompts),
           "file of prompts, in the format of `generate`; the run logs a greedy continuation of each prompt"),
    NUMBER("samples.interval", LONG, "1000", 1, LONGS, C(samples.interval),
           "steps between samples; the last step always has samples"),
    NUMBER("samples.max_new_tokens", INT, "64", 1, 1 << 24, C(samples.max_new_tokens),
           "maximum number of tokens of a continuation; model.eos_token_id ends a continuation earlier. Each token takes a forward "
           "pass over all prompts"),

    /* ---- ranks ---- */
    WORD  ("fsdp.sharding_strategy", CHOICE, "FULL_SHARD", shardings, X(fsdp.strategy),
           "what FSDP shards over ranks. FULL_SHARD: weights, gradients and moments; SHARD_GRAD_OP: the same, but weights stay "
           "gathered during a step; NO_SHARD: nothing; HYBRID_SHARD (HSDP): FULL_SHARD inside groups of ranks that are replicas of "
           "each other; _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP inside such groups. On several GPUs, FULL_SHARD and HYBRID_SHARD also "
           "keep gathered weights during a step, of as many blocks as leave 3 GiB of device_memory free (3.3 with "
           "parallelism.tensor). On one GPU, a block can keep FP8 copies of its weights and of the transposed weights during a "
           "step. FULL_SHARD and HYBRID_SHARD keep copies for as many blocks as fit, SHARD_GRAD_OP for all blocks"),
    OPTION("fsdp.hybrid_sharding_num_model_replicas", INT, "null", 0, 1, MANY, X(fsdp.replicas),
           "number of HSDP replicas; null: one replica per host"),
    WORD  ("fsdp.precision", CHOICE | SPENT, "null", WORDS({ "pure", FSDP_PURE }, { "mixed", FSDP_MIXED }),
           X(fsdp.precision),
           "format in which several ranks accumulate and sum gradients. mixed: f32, unless format.grads is given; pure: the "
           "recipe's format"),
    WORD  ("fsdp.grad_sync_mode", CHOICE, "null", WORDS({ "micro_batch", SUM_OFTEN }, { "batch", SUM_ONCE }),
           X(fsdp.grad_sync_mode),
           "when ranks sum sharded gradients. micro_batch: in each micro-batch; batch: once per step, which needs memory for "
           "unsharded gradients on every rank; null: batch if unsharded gradients fit, else micro_batch"),
    WORD  ("fsdp.grad_wire", CHOICE, "null", WORDS({ "bf16", WIRE_BF16 }, { "fp8", WIRE_FP8 }, { "int8", WIRE_INT8 },
           { "fp8_lm", WIRE_FP8_LM }), X(fsdp.grad_wire),
           "format in which ranks send each other gradients of the matrices of blocks. Each rank then adds the gradients of all "
           "ranks in F32, in the order of ranks. fp8: E4M3 with a scale per 128 values; int8: the same with integers; fp8_lm: E4M3 "
           "with one scale per matrix, as FP8-LM (recipe: fp8-lm); null: NCCL or "
           "MPI sums gradients in the recipe's format. All other gradients are summed as with null. If shards of a group are on "
           "several hosts, the ranks of a host first sum the gradients of this host. Not with fsdp.precision: mixed"),
    MESH_ROWS,

    /* ---- the host's memory ---- */
    WORD  ("offload.activations", CHOICE, "auto", host_uses, C(offload.activations),
           "CPU offload: keep saved activations in host memory between forward and backward. Results are the same. auto: "
           "activations of as many blocks as needed to fit device_memory; all: activations of every block that is not in use. With "
           "pipeline stages, a block counts separately for each micro-batch in flight"),
    WORD  ("offload.frozen", CHOICE, "auto", host_uses, C(offload.frozen),
           "CPU offload: keep frozen weights of blocks, for example under adapters, in host memory. The weights are copied to the "
           "device before the block is computed"),
    WORD  ("offload.optimizer", CHOICE, "auto", host_uses, C(offload.optimizer),
           "CPU offload: keep optimizer states in host memory. The optimizer copies the states to the device in chunks"),
    WORD  ("offload.master", CHOICE, "auto", host_uses, C(offload.master),
           "CPU offload: keep master weights of blocks in host memory, if the device computes in a smaller format. auto offloads "
           "only as much as needed: first activations, then frozen weights, optimizer states and master weights"),

    /* ---- the log ---- */
    NUMBER("profile", INT, "0", 0, 1000, C(profile),
           "number of steps to profile, starting with the third step. The device times of all operations are written to "
           "trace-rank*.json in save_folder, for Perfetto"),
    NUMBER("console_log_interval", LONG, "1", 1, LONGS, C(console_log_interval),
           "steps between lines on the terminal"),
    NUMBER("speed_monitor.window_size", INT, "20", 1, 1000000, C(speed_window), "number of steps over which tokens/s is averaged"),
    OPTION("quant_stats_interval", LONG, "null", 0, 0, LONGS, C(quant_stats_interval),
           "steps between measurements of the FP8 errors of activations and moments; null: never"),

    { .name = NULL }
};
// clang-format on
