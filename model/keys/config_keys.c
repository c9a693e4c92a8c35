/* The table of keys. A key that OLMo has keeps OLMo's name, unit and default (olmo/config.py). If
 * OLMo's default is not supported here (dropout, biases), the default is the supported value.
 * model.sliding_window, layer_types and rope_scaling are Hugging Face's; full_attn_layers_only,
 * warmup_fraction, data.mix and sequence_length_warmup OLMo-core's; keys that none of these has are
 * our own. The resolved configuration lists sections in this order. */
#include "model/keys/config_keys.h"
#include "model/keys/config_keys_rows.h"
#include "model/keys/config_keys_images.h"
#include "model/keys/config_keys_mesh.h"
#include "model/keys/config_keys_muon.h"

// clang-format off
const ConfigKey config_keys[] = {
    OTHER ("run_name", STRING, "run", C(run_name), "name of the run"),
    NUMBER("seed", U64, "6198", 0, LONGS, C(seed), "seed of initial weights and stochastic rounding"),
    OTHER ("dry_run", BOOL, "false", C(dry_run),
           "print the memory plan, whether it fits, and the predicted time of a step, then stop with exit status 0; needs no data, "
           "and no GPU if device_memory is given"),
    OTHER ("eval_only", BOOL, "false", C(eval_only),
           "evaluate load_path, print the results, then stop; needs no training data and writes only eval.jsonl, if save_folder is "
           "given. If the file has no model section, batch sizes and data.generate_doc_lengths are those of the checkpoint's run, "
           "and without a recipe also recipe, format, activations and fp8; otherwise the recipe is bf16"),
    OTHER ("generate", STRING, "null", C(generate),
           "print load_path's continuations of the prompts in this file (a line each: {\"tokens\": [...]}), then stop; needs no "
           "data and writes no files; recipe bf16 unless one is given"),
    NUMBER("max_new_tokens", INT, "128", 1, 1 << 24, C(max_new_tokens),
           "generate: maximum length of a continuation in tokens; an end of text ends it earlier"),
    NUMBER("temperature", DOUBLE, "0", 0, 1e3, C(temperature),
           "generate: divides the logits; 0: always the most likely token; random draws depend on `seed`"),
    NUMBER("top_p", DOUBLE, "1", TINY, 1, C(top_p),
           "generate: draw from the smallest set of most likely tokens whose probabilities sum to this"),
    GENERATE_FEATURES_ROW,
    OPTION("ranks", INT, "null", 0, 1, MANY, C(ranks), "dry_run: number of ranks to plan for; default: the started ranks"),
    NUMBER("gpus_per_host", INT, "8", 1, 1024, C(gpus_per_host), "dry_run: GPUs of each host, for the time that it predicts"),
    OPTION("internode_gb_per_s", DOUBLE, "null", 0, TINY, 1e6, C(network), "dry_run: GB/s (10^9 bytes) of each GPU to other hosts"),
    WORD  ("mesh", CHOICE, "given", meshes, C(mesh_auto),
           "dry_run: auto also names the three fastest meshes that fit"),
    OPTION("device_memory", DOUBLE, "null", 0, TINY, 1e6, C(device_memory),
           "memory per device that the plan may use, in GiB (2^30 bytes, as in nvidia-smi), even if other processes use some of "
           "it; default: what they leave free on this device; dry_run: all of a device's, also of one that is not in this machine. "
           "A CPU build needs it to plan for other ranks than those started"),

    /* ---- numbers ---- */
    OTHER ("recipe", STRING, "null", X(recipe), "storage formats of all tensors; default: coat; of eval_only and generate bf16"),
    COLUMN("format.residual", WIDE, C(recipe.stream), "residual stream"),
    COLUMN("format.saved_norm_input", GROUPS, C(recipe.saved), "norm inputs kept for backward"),
    COLUMN("format.saved_qkv", GROUPS, C(recipe.qkv), "q, k, v kept for backward"),
    COLUMN("format.saved_attention", GROUPS, C(recipe.att), "attention output kept for backward"),
    COLUMN("format.saved_mlp", GROUPS, C(recipe.hidden), "gate and up kept for backward"),
    COLUMN("format.operand", ONE_SCALE, C(recipe.operand), "GEMM operands: activations and weights"),
    COLUMN("format.gradient", ONE_SCALE, C(recipe.gradient), "GEMM operands: gradients"),
    COLUMN("format.head", ONE_SCALE, C(recipe.head), "gradient of the logits; e5m2: both GEMMs of the head's backward "
           "are in FP8"),
    COLUMN("format.master", WIDE, C(recipe.master), "weights that the optimizer updates"),
    COLUMN("format.grads", WIDE, C(recipe.grads), "accumulated weight gradients; "
           "default: the recipe's, but f32 if more than 128 micro-batches of a rank, or more than 128 ranks, are summed"),
    COLUMN("format.moment1", MOMENT, C(recipe.moment1), "AdamW's m"),
    COLUMN("format.moment2", MOMENT, C(recipe.moment2), "AdamW's v"),
    COLUMN("format.frozen", WIDE, C(recipe.frozen), "frozen weights, which have no other copy"),
    WORD  ("activations.keep", CHOICE | FOLLOWS, "null", WORDS({ "all", KEEP_ALL }, { "inputs", KEEP_INPUTS },
           { "attention", KEEP_ATTENTION }, { "block", KEEP_BLOCK }), C(recipe.keep),
           "what forward saves for backward. all: everything; inputs: not what is cheap to recompute; attention: only each block's "
           "input and attention's output; block: only each block's input"),
    WORD  ("activations.recompute", CHOICE | FOLLOWS, "null", WORDS({ "none", 0 }, { "one_in_two", 2 }, { "one_in_three", 3 },
           { "one_in_four", 4 }, { "one_in_eight", 8 }, { "two_in_three", -3 }, { "three_in_four", -4 }), C(recipe.recompute),
           "which blocks save only their input, as all do with activations.keep=block. one_in_N: every Nth, starting with the "
           "first; two_in_three, three_in_four: all but every third or fourth"),
    WORD  ("fp8.forward", CHOICE | FOLLOWS, "null", WORDS({ "saved", FROM_SAVED }, { "exact", FROM_EXACT }), C(recipe.forward),
           "values that forward continues with after saving FP8. saved: the rounded ones, as in COAT; exact: those not rounded"),
    WORD  ("fp8.fast_accumulation", CHOICE | FOLLOWS, "null", WORDS({ "none", FAST_NONE }, { "forward", FAST_FORWARD },
           { "all", FAST_ALL }), C(recipe.fast), "FP8 GEMMs that may add with short accumulators"),
    WORD  ("fp8.scales", CHOICE | FOLLOWS, "null", WORDS({ "microbatch", PER_MICROBATCH }, { "step", PER_STEP }), C(recipe.scales),
           "how long the scale of an FP8 GEMM operand is valid. microbatch: each micro-batch has its own; step: one scale with "
           "headroom over the first micro-batch's amax, which saves passes over memory"),
    WORD  ("fp8.down_scales", CHOICE | FOLLOWS, "null", WORDS({ "tensor", DOWN_TENSOR }, { "channel", DOWN_CHANNEL }),
           C(recipe.down_scales),
           "scales of the FP8 input of each MLP's down_proj. tensor: one; channel: columns whose maximum is more than 64 times the "
           "median column's also have a factor each, which is folded into the weight. This keeps the digits of all other columns "
           "if SwiGLU has outliers, as quant/act/*/largest_channel shows"),

    OTHER ("trainable", PATTERNS, "[]", C(trainable), "Hugging Face names of the tensors to train; * matches any characters "
           "(model.layers.*.mlp.*). All others keep their loaded values, in format.frozen; []: all are trained"),

    /* ---- adapters ---- */
    OPTION("lora.rank", INT, "null", 0, 1, MANY, C(model.lora.rank), "train adapters of this rank and freeze all else; "
           "null: if load_path is a folder of adapters, its adapter_config.json sets rank, alpha, use_rslora, target_modules and "
           "projector; else no adapters"),
    OPTION("lora.alpha", DOUBLE, "null", 0, TINY, 1e6, C(model.lora.alpha),
           "the output of adapters is multiplied by alpha / rank; default rank"),
    OTHER ("lora.use_rslora", BOOL, "false", C(model.lora.use_rslora), "multiply by alpha / sqrt(rank) instead"),
    OTHER ("lora.target_modules", NAMES, "all-linear", X(lora_modules), "matrices of a block that have an adapter: q_proj, "
           "k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; all-linear: all of these"),
    WORD  ("lora.base", CHOICE, "null", WORDS({ "bf16", BASE_AS_FROZEN }, { "e4m3", BASE_E4M3 }, { "nf4", BASE_NF4 }), X(lora_base),
           "format of the blocks' frozen matrices. e4m3: one byte per weight, the operand of FP8 recipes; nf4: half a byte, as in "
           "QLoRA; null: as load_path's adapters were trained, else nf4 if bitsandbytes stored them in 4 bits, else format.frozen"),
    OTHER ("lora.base_path", STRING | FOLLOWS, "null", C(model.lora.base_path), "folder of the base model of load_path's adapters; "
           "default: the folder that they name. The base of new adapters is load_path itself"),
    ONLY  ("lora.dropout", "0|0.0|null", "there is no dropout"),
    ONLY  ("lora.use_dora", "false|null", "DoRA's magnitudes are not computed"),
    ONLY  ("lora.bias", "none|null", "only A and B are trained"),
    PROJECTOR_ADAPTER_ROWS,

    /* ---- architecture ---- */
    OTHER ("model.architecture", STRING, "null", X(architecture),
           "Hugging Face class in config.json of checkpoints; default: the first class that computes this model"),
    NUMBER("model.d_model", INT, NULL, 1, MANY, C(model.d_model), "width of the residual stream"),
    NUMBER("model.n_layers", INT, NULL, 1, MAX_LAYERS, C(model.n_layers), "number of blocks"),
    NUMBER("model.n_heads", INT, NULL, 1, 10000, C(model.n_heads), "query heads"),
    OPTION("model.n_kv_heads", INT, "null", 0, 1, 10000, C(model.n_kv_heads), "key/value heads; default n_heads"),
    OTHER ("model.multi_query_attention", BOOL | SPENT, "null", X(multi_query_attention), "true: one key/value head"),
    OPTION("model.head_dim", INT, "null", 0, 2, 4096, C(model.head_dim), "width of a head; default d_model / n_heads"),
    OPTION("model.mlp_hidden_size", LONG, "null", 0, 2, MANY - 1, X(mlp_hidden_size),
           "both halves of SwiGLU: twice Hugging Face's intermediate_size"),
    OPTION("model.intermediate_size", INT | SPENT, "null", 0, 1, (MANY - 1) / 2, X(intermediate_size),
           "half of mlp_hidden_size, as in Hugging Face's config.json; give only one of both"),
    NUMBER("model.mlp_ratio", DOUBLE | SPENT, "4", TINY, 1e6, X(mlp_ratio),
           "mlp_hidden_size / d_model, if mlp_hidden_size is not given"),
    NUMBER("model.max_sequence_length", INT, "1024", 2, 1 << 24, C(model.max_sequence_length),
           "tokens of a sequence; without a model section that of load_path's model, at most 4096"),
    NUMBER("model.vocab_size", INT, NULL, 2, VOCAB, C(model.vocab_size), "number of token ids"),
    OPTION("model.embedding_size", INT, "null", 0, 2, MANY, C(model.embedding_size),
           "rows of the embedding; default vocab_size rounded up to a multiple of 128"),
    OPTION("model.eos_token_id", INT, "null", -1, 0, MANY, C(model.eos_token_id),
           "token that ends a document; if it is given, generate stops at it, too"),
    OPTION("model.pad_token_id", INT, "null", -1, 0, MANY, C(model.pad_token_id), "padding token"),
    OTHER ("model.weight_tying", BOOL, "true", C(model.weight_tying), "the head is the embedding"),
    WORD  ("model.layer_norm_type", CHOICE, "default", WORDS({ "rms", NORM_RMS }, { "default", NORM_DEFAULT },
           { "low_precision", NORM_LOW_PRECISION }, { "amd_compatible", NORM_AMD_COMPATIBLE }), X(layer_norm_type),
           "rms: RMSNorm, others: LayerNorm"),
    NUMBER("model.layer_norm_eps", FLOAT, "1e-5", 0, 1, C(model.norm.eps), "added to the variance"),
    OTHER ("model.layer_norm_with_affine", BOOL, "true", C(model.norm_affine), "norms have weights (not in OLMo-1)"),
    OTHER ("model.norm_after", BOOL, "false", C(model.norm_after),
           "norm each branch's output, not its input (OLMo-2)"),
    OTHER ("model.qkv_bias", BOOL, "false", C(model.qkv_bias), "the projections to q, k and v add biases (Qwen2)"),
    WORD  ("model.attention_layer_norm", CHOICE, "false", WORDS({ "false", QK_NORM_NONE }, { "true", QK_NORM_WIDTH },
           { "head", QK_NORM_HEAD }), C(model.qk_norm),
           "RMSNorm of q and k over their full widths (OLMo-2) or over each head (Qwen3)"),
    OTHER ("model.attention_layer_norm_with_affine", BOOL, "true", X(attention_layer_norm_with_affine),
           "the norms of q and k have weights; must be true if there are such norms"),
    OPTION("model.clip_qkv", FLOAT, "null", 0, TINY, 1e9, C(model.clip_qkv), "clamp q, k, v to +- this"),
    OPTION("model.sliding_window", INT, "null", 0, 1, MANY, C(model.sliding_window),
           "tokens that a query attends to, itself included; default: all up to it"),
    OTHER ("model.layer_types", LAYER_TYPES, "null", C(model.layer_types),
           "which layers have the window; a shorter list repeats; default: all"),
    NUMBER("model.rope_theta", DOUBLE, "10000", 1, 1e12, C(model.rope_theta), "base of the rotary embedding"),
    OPTION("model.no_rope_layer_interval", INT, "null", 0, 1, MAX_LAYERS, C(model.no_rope_interval),
           "each layer whose number, from 1 on, is a multiple of this has no rotary embedding (SmolLM3: 4)"),
    WORD  ("model.rope_scaling.rope_type", CHOICE, "null", WORDS({ "default", ROPE_DEFAULT }, { "llama3", ROPE_LLAMA3 },
           { "yarn", ROPE_YARN }), X(rope_type),
           "context extension as in Llama 3.1 or YaRN; default: llama3 if there is a factor"),
    OPTION("model.rope_scaling.factor", DOUBLE, "null", 0, 1, 1e6, C(model.rope_scaling.factor),
           "divisor of low frequencies"),
    NUMBER("model.rope_scaling.low_freq_factor", DOUBLE, "1", TINY, 1e6, C(model.rope_scaling.low_freq_factor),
           "llama3: frequencies with fewer rotations than this in the original length are divided by factor"),
    NUMBER("model.rope_scaling.high_freq_factor", DOUBLE, "4", TINY, 1e6, C(model.rope_scaling.high_freq_factor),
           "llama3: frequencies with more rotations than this in the original length are unchanged"),
    NUMBER("model.rope_scaling.original_max_position_embeddings", INT, "8192", 1, MANY,
           C(model.rope_scaling.original_length), "tokens of a sequence before the extension: the original length"),
    NUMBER("model.rope_scaling.beta_fast", DOUBLE, "32", TINY, 1e6, C(model.rope_scaling.beta_fast),
           "yarn: frequencies with more rotations than this in the original length are unchanged"),
    NUMBER("model.rope_scaling.beta_slow", DOUBLE, "1", TINY, 1e6, C(model.rope_scaling.beta_slow),
           "yarn: frequencies with fewer rotations than this in the original length are divided by factor"),
    OPTION("model.rope_scaling.attention_factor", DOUBLE, "null", 0, TINY, 1e6, C(model.rope_scaling.attention_factor),
           "yarn: multiplies q and k; default 0.1 ln(factor) + 1"),
    OTHER ("model.rope_scaling.full_attn_layers_only", BOOL, "false", C(model.rope_scaling.full_attn_layers_only),
           "layers with a sliding window are not scaled (OLMo-3)"),
    WORD  ("model.init_fn", CHOICE, "normal", WORDS({ "mitchell", INIT_MITCHELL }, { "normal", INIT_NORMAL },
           { "full_megatron", INIT_FULL_MEGATRON }), C(model.init_fn), "distribution of initial weights"),
    NUMBER("model.init_std", DOUBLE, "0.02", TINY, 1e3, C(model.init_std),
           "standard deviation of initial weights (not for mitchell)"),
    OPTION("model.init_cutoff_factor", DOUBLE, "null", 0, TINY, 1e3, C(model.init_cutoff_factor),
           "truncate initial weights at this many standard deviations"),
    IMAGE_MODEL_ROWS,

    /* ---- data ---- */
    OTHER ("data.paths", PATHS, "[]", C(data.files.paths),
           "token shards in order, or patterns of their names; ** matches any number of folders"),
    OTHER ("data.datasets", DATASETS | SPENT, "null", X(datasets), "name: [paths], instead of data.paths; sorted by name"),
    OTHER ("data.mix", SECTIONS, "[]", C(data.mix),
           "sources, instead of data.paths; each has its share of every step (data/README.md)"),
    OTHER ("data.mix[].name", STRING, NULL, S(name), "name of the source, in messages, metrics and checkpoints"),
    OTHER ("data.mix[].paths", PATHS, NULL, S(files.paths), "as data.paths"),
    NUMBER("data.mix[].ratio", DOUBLE, NULL, 1e-6, 1e6, S(ratio), "its share of the tokens, relative to the sum of all ratios"),
    NUMBER("data.mix[].max_repetition", DOUBLE, "1", 1, 1e6, S(max_repetition),
           "how often its tokens may be used: 1: once; 2.5 is possible; a run that needs more is an error at its start"),
    OPTION("data.mix[].tokens", LONG, "null", 0, 1, LONGS, S(tokens),
           "number of tokens to use of it, in whole sequences; default: all"),
    OTHER ("data.mix[].label_mask_paths", PATHS, "[]", S(files.label_mask_paths), "as data.label_mask_paths, for its paths"),
    IMAGE_SOURCE_ROWS,
    OTHER ("data.label_mask_paths", PATHS, "[]", C(data.files.label_mask_paths),
           "files with one bool per token, parallel to paths; a token with false is no target"),
    IMAGE_DATA_ROWS,
    WORD  ("data.memmap_dtype", CHOICE, "uint16", token_types, X(memmap_dtype),
           "type of a token in headerless shards; default without a model section: uint32 if load_path's model has more than 65536 "
           "ids"),
    OPTION("data.seed", U64 | FOLLOWS, "null", NAN, 0, LONGS, C(data.seed), "seed of the order of the data; default `seed`"),
    WORD  ("data.packing", CHOICE, "concat", packings, C(data.files.packing),
           "how documents fill sequences. concat: one after the other, "
           "cut where a sequence is full, as in OLMo; best_fit: whole documents where they fit best, attention stays inside them"),
    WORD  ("data.long_documents", CHOICE, "truncate", WORDS({ "truncate", LONG_TRUNCATE }, { "split", LONG_SPLIT }),
           C(data.long_documents), "best_fit: what to do with documents longer than a sequence"),
    WORD  ("data.document_boundaries", CHOICE, "eos", boundaries, C(data.files.boundaries),
           "what delimits documents. eos: eos_token_id; metadata: the rows START,END of X.csv.gz next to X.npy"),
    OTHER ("data.generate_doc_lengths", BOOL, "false", C(data.generate_doc_lengths), "attention stays inside documents"),
    OTHER ("data.generate_attention_mask", BOOL, "false", C(data.mask_padding), "pad_token_id is never a target"),
    NUMBER("data.instance_filter.repetition_max_period", INT, "13", 1, 1024, C(data.instance_filter.max_period),
           "length of the longest n-gram that is searched for repetitions"),
    NUMBER("data.instance_filter.repetition_min_period", INT, "1", 1, 1024, C(data.instance_filter.min_period),
           "length of the shortest one"),
    OPTION("data.instance_filter.repetition_max_count", INT, "null", 0, 1, MANY, C(data.instance_filter.max_count),
           "mask a sequence with this many repetitions; default 32 if there is an instance_filter section, else no filter"),

    /* ---- the run ---- */
    NUMBER("global_train_batch_size", INT, "512", 1, MANY, C(global_train_batch_size),
           "sequences per step, over all ranks"),
    OTHER ("batch_size_warmup", NAMES, "[]", X(batch_warmup),
           "steps after which the global batch doubles, as in [1000, 3000]: here it starts as a quarter of "
           "global_train_batch_size. The learning rate is as scheduler says; its units, max_duration and stop_at in tokens count "
           "the tokens of these steps"),
    OPTION("sequence_length_warmup.min_sequence_length", INT, "null", 0, 1, MANY, C(length_warmup.min),
           "length of sequences at the start of the run, in tokens: attention is limited to these, and no token is left out. The "
           "length grows linearly, in multiples of it, to model.max_sequence_length after warmup_steps; null: no warmup of the length"),
    OPTION("sequence_length_warmup.warmup_steps", LONG, "null", 0, 1, LONGS, C(length_warmup.steps), "see min_sequence_length"),
    NUMBER("device_train_microbatch_size", INT, "16", 1, MANY, C(device_train_microbatch_size),
           "sequences per forward pass of a rank"),
    OTHER ("max_duration", DURATION, "10000", C(max_duration),
           "length of the training: 100 (steps), 2e9T (tokens), 1ep"),
    OTHER ("stop_at", DURATION, "null", C(stop_at), "stop here; the schedule still ends at max_duration"),
    OTHER ("extend", STRING | SPENT, "null", X(extend),
           "continue a run of scheduler.name wsd from its last checkpoint before the decay: its save_folder, or a checkpoint, in "
           "place of load_path. With a longer max_duration the stable part continues; with one that ends t_decay later the decay "
           "begins there. Give it a save_folder of its own"),
    NUMBER("timeout_seconds", INT, "600", 1, 1000000, C(timeout_seconds),
           "end all ranks if one of them, or a thread that it waits for, makes no progress for this long (a cluster's file server "
           "may stall for minutes); three times this for single operations on files. A dead process is noticed within two seconds "
           "in any case"),
    OTHER ("optimizer.name", STRING, "adamw", C(optimizer.name),
           "adamw; adamw8bit: AdamW with the 8-bit moments of bitsandbytes in the blocks and f32 moments elsewhere, whatever the recipe; muon: "
           "Muon for the matrices of blocks, with its momentum in format.moment1, and AdamW for all else"),
    NUMBER("optimizer.learning_rate", DOUBLE, "1e-4", 0, 1e3, C(optimizer.lr), "highest learning rate"),
    PROJECTOR_RATE_ROW,
    OTHER ("optimizer.betas", BETAS, "[0.9, 0.95]", C(optimizer.beta1), "decay of m and v"),
    NUMBER("optimizer.eps", DOUBLE, "1e-5", 1e-15, 1, C(optimizer.eps), "added to sqrt(v)"),
    NUMBER("optimizer.weight_decay", DOUBLE, "0.01", 0, 1e3, C(optimizer.weight_decay), "decay of weights, times the learning rate"),
    OTHER ("optimizer.decay_norm_and_bias", BOOL, "false", C(optimizer.decay_norm_and_bias), "decay norm weights too"),
    OTHER ("optimizer.decay_embeddings", BOOL, "false", C(optimizer.decay_embeddings), "decay the embedding too"),
    MUON_ROWS,
    WORD  ("scheduler.name", CHOICE, "cosine_with_warmup", WORDS({ "cosine_with_warmup", COSINE_WITH_WARMUP },
           { "linear_with_warmup", LINEAR_WITH_WARMUP }, { "inverse_sqrt_with_warmup", INVERSE_SQRT_WITH_WARMUP },
           { "constant", CONSTANT }, { "constant_with_warmup", CONSTANT_WITH_WARMUP }, { "wsd", WSD }),
           C(scheduler.name), "shape of the learning rate; wsd: warm up, stay, decay"),
    WORD  ("scheduler.units", CHOICE, "steps", WORDS({ "steps", UNITS_STEPS }, { "tokens", UNITS_TOKENS }),
           X(scheduler_units), "unit of the lengths below"),
    NUMBER("scheduler.t_warmup", LONG, "100", 0, LONGS, C(scheduler.t_warmup), "length of the warmup"),
    OPTION("scheduler.warmup_fraction", DOUBLE, "null", 0, TINY, 1, C(scheduler.warmup_fraction),
           "length of the warmup as a fraction of t_max, instead of t_warmup"),
    OPTION("scheduler.t_max", LONG, "null", 0, 1, LONGS, C(scheduler.t_max), "end of the decay; default max_duration"),
    OPTION("scheduler.t_decay", LONG, "null", 0, 1, LONGS, C(scheduler.t_decay), "wsd: length of the final decay"),
    NUMBER("scheduler.alpha_f", DOUBLE, "0.1", 0, 1e3, C(scheduler.alpha_f), "final / highest learning rate"),
    OPTION("scheduler.warmup_min_lr", DOUBLE, "null", -1, 0, 1e3, C(scheduler.warmup_min_lr),
           "learning rate at the start of the warmup; default a tenth of learning_rate"),
    OPTION("scheduler.grad_clip_warmup_steps", LONG, "null", 0, 1, LONGS, C(scheduler.grad_clip_warmup_steps),
           "length (in `units`) during which max_grad_norm is multiplied by grad_clip_warmup_factor"),
    OPTION("scheduler.grad_clip_warmup_factor", DOUBLE, "null", 1, TINY, 1e9, C(scheduler.grad_clip_warmup_factor),
           "see grad_clip_warmup_steps"),
    OPTION("average.last", LONG, "null", 0, 1, 1e6, C(average.last),
           "number of snapshots of the weights in an average; null: no average. Every `last` times `every` steps the mean of the "
           "last snapshots is evaluated and written as stepN-average, a folder for other programs. It is kept in f32 with the "
           "moments"),
    OPTION("average.every", LONG, "null", 0, 1, 1e9, C(average.every), "steps between two snapshots of an average"),
    OPTION("max_grad_norm", DOUBLE, "null", 0, TINY, 1e9, C(max_grad_norm), "clip gradients to this global norm"),
    WORD  ("spikes", CHOICE, "warn", WORDS({ "warn", SPIKES_WARN }, { "skip", SPIKES_SKIP }, { "stop", SPIKES_STOP }),
           C(spikes), "what to do at a step whose loss or gradient norm is more than 6 standard deviations above the mean of the "
           "last 128. warn: print it; skip: also make no update, as OLMo-core's SkipStepOptimizer; stop: end the run and keep the "
           "state before the step"),
    OTHER ("softmax_auxiliary_loss", BOOL, "false", X(softmax_auxiliary_loss),
           "add the z-loss, auxiliary_loss_multiplier * log(Z)^2"),
    OPTION("auxiliary_loss_multiplier", DOUBLE, "1e-4", 0, 0, 1e3, X(auxiliary_loss_multiplier), "factor of the z-loss"),
    NUMBER("loss_chunk", INT, "0", 0, MANY, C(loss_chunk), "tokens whose logits exist at once; 0: automatic"),
    NUMBER("tiled_mlp_tokens", INT, "0", 0, MANY, C(mlp_tile),
           "tokens whose MLP is computed at once (tiled MLP) in blocks whose MLP backward recomputes, a multiple of 128. Each tile "
           "has its own FP8 scales. 0: no tiles, or tiles of 16384 if nothing else fits device_memory; all tokens of a "
           "micro-batch: never tiles. With quant_stats_interval there are no tiles"),

    /* ---- saving and loading ---- */
    OTHER ("save_folder", STRING, "null", C(save_folder), "folder of checkpoints and metrics; default runs/<run_name>"),
    OTHER ("save_overwrite", BOOL, "false", C(save_overwrite),
           "replace the run in save_folder: delete its checkpoints. If load_path is one of them: go back to it and delete only the "
           "later ones"),
    OPTION("save_interval", LONG, "1000", 0, 0, LONGS, C(save_interval),
           "steps between checkpoints; null: only one at the end"),
    OPTION("save_num_checkpoints_to_keep", LONG, "-1", -1, -1, LONGS, C(save_num_checkpoints_to_keep),
           "newest checkpoints of save_interval to keep; -1: all; 0: none, and none at the end without save_interval_unsharded"),
    OPTION("save_interval_unsharded", LONG, "null", 0, 1, LONGS, C(save_interval_unsharded),
           "steps between checkpoints that are never deleted"),
    OPTION("save_interval_ephemeral", LONG, "null", 0, 1, LONGS, C(save_interval_ephemeral),
           "steps between checkpoints that the next one replaces"),
    OTHER ("load_path", STRING, "null", C(load_path), "a checkpoint to continue, or a Hugging Face folder to start from"),
    OTHER ("tokenizer", STRING, "null", C(tokenizer),
           "a folder with a tokenizer, or a tokenizer.json; it is copied into checkpoints. Default: the tokenizer of load_path"),
    OTHER ("try_load_latest_save", BOOL, "false", C(try_load_latest_save),
           "continue save_folder/latest if it exists"),
    OTHER ("restore_dataloader", BOOL, "true", C(restore_dataloader),
           "continue the data where load_path stopped; false: start them over, also with other data"),
    OTHER ("reset_optimizer_state", BOOL, "false", C(reset_optimizer_state),
           "do not load the moments of load_path, nor an average"),
    OTHER ("reset_trainer_state", BOOL, "false", C(reset_trainer_state),
           "start at step 0 with the weights and moments of load_path"),

    /* ---- evaluation ---- */
    OPTION("eval_interval", LONG, "1000", 0, 0, LONGS, C(eval_interval),
           "steps between evaluations; there is always one at the end; null: never"),
    OTHER ("eval_on_load", BOOL, "false", C(eval_on_load), "evaluate before the first step, too"),
    OPTION("device_eval_batch_size", INT, "null", 0, 1, MANY, C(device_eval_batch_size),
           "sequences of an evaluation batch on each rank, computed device_train_microbatch_size at a time; default: that number"),
    OPTION("eval_subset_num_batches", LONG, "-1", -1, -1, LONGS, C(eval_subset_num_batches),
           "batches of each rank per set; -1: all"),
    OTHER ("evaluators[].label", STRING, NULL, E(label), "name of the set if it has `paths`"),
    WORD  ("evaluators[].type", CHOICE, "lm", WORDS({ "lm", EVALUATOR_LM }, { "downstream", EVALUATOR_DOWNSTREAM }),
           E(type), "lm: loss on validation shards; downstream: questions with choices, skipped unless `paths` names their file"),
    OTHER ("evaluators[].data.paths", PATHS, "[]", E(files.paths),
           "validation shards; for downstream one file of scripts/prepare_eval.py or make_choices.py"),
    OTHER ("evaluators[].data.datasets", DATASETS, "null", E(datasets), "name: [paths]; one set per name"),
    WORD  ("evaluators[].data.memmap_dtype", CHOICE, "null", token_types, E(files.itemsize), "default data.memmap_dtype"),
    OTHER ("evaluators[].data.label_mask_paths", PATHS, "[]", E(files.label_mask_paths),
           "as data.label_mask_paths, parallel to paths"),
    IMAGE_EVALUATOR_ROWS,
    WORD  ("evaluators[].data.packing", CHOICE, "null", packings, E(files.packing), "default data.packing"),
    WORD  ("evaluators[].data.document_boundaries", CHOICE, "null", boundaries, E(files.boundaries),
           "default data.document_boundaries"),

    OTHER ("samples.prompts", STRING, "null", C(samples.prompts),
           "file of prompts, as for `generate`; their greedy continuations are logged"),
    NUMBER("samples.interval", LONG, "1000", 1, LONGS, C(samples.interval),
           "steps between samples; there are always some at the end"),
    NUMBER("samples.max_new_tokens", INT, "64", 1, 1 << 24, C(samples.max_new_tokens),
           "maximum tokens of a continuation; model.eos_token_id ends it earlier. Each token takes a forward pass over all "
           "prompts"),

    /* ---- ranks ---- */
    WORD  ("fsdp.sharding_strategy", CHOICE, "FULL_SHARD", shardings, X(fsdp.strategy),
           "what is sharded over the ranks. FULL_SHARD: weights, gradients and moments; SHARD_GRAD_OP: the same, but weights stay "
           "gathered during a step; NO_SHARD: nothing; HYBRID_SHARD and _HYBRID_SHARD_ZERO2: as the first two, inside groups of "
           "ranks that are replicas of each other. FULL_SHARD and HYBRID_SHARD gather some blocks' weights only once per step: "
           "as many as leave 3 GiB of device_memory free (3.3 with parallelism.tensor). On one GPU they keep the FP8 codes of weights "
           "and their transposes for a whole step in as many blocks as fit, SHARD_GRAD_OP in all blocks"),
    OPTION("fsdp.hybrid_sharding_num_model_replicas", INT, "null", 0, 1, MANY, X(fsdp.replicas),
           "number of HYBRID_SHARD's groups; null: one per host"),
    WORD  ("fsdp.precision", CHOICE | SPENT, "null", WORDS({ "pure", FSDP_PURE }, { "mixed", FSDP_MIXED }),
           X(fsdp.precision),
           "format in which several ranks accumulate and sum gradients. mixed: f32, unless format.grads is given; pure: the "
           "recipe's"),
    WORD  ("fsdp.grad_sync_mode", CHOICE, "null", WORDS({ "micro_batch", SUM_OFTEN }, { "batch", SUM_ONCE }),
           X(fsdp.grad_sync_mode),
           "when sharded gradients are summed over ranks. micro_batch: in each micro-batch; batch: once per step, which stores "
           "whole gradients on every rank; null: batch if they fit"),
    MESH_ROWS,

    /* ---- the host's memory ---- */
    WORD  ("offload.activations", CHOICE, "auto", host_uses, C(host.activations),
           "keep saved activations in host memory between forward and backward; results are the same. auto: those of as many "
           "blocks as exceed device_memory; all: those of all blocks that are not in use. Pipeline stages count a block once for "
           "each micro-batch in flight"),
    WORD  ("offload.frozen", CHOICE, "auto", host_uses, C(host.frozen),
           "keep frozen weights of blocks, as under adapters, in host memory; they are copied to the device before each block"),
    WORD  ("offload.optimizer", CHOICE, "auto", host_uses, C(host.moments),
           "keep the optimizer's states in host memory; they are copied to the device, part by part, for its step"),
    WORD  ("offload.master", CHOICE, "auto", host_uses, C(host.master),
           "keep master weights of blocks in host memory, if the device computes in a smaller format. auto moves activations "
           "first, then frozen weights, optimizer states and master weights, each only as far as needed"),

    /* ---- the log ---- */
    NUMBER("profile", INT, "0", 0, 1000, C(profile),
           "number of steps, from the third on, to profile: device times of all operations go to trace-rank*.json in save_folder "
           "(for Perfetto)"),
    NUMBER("console_log_interval", LONG, "1", 1, LONGS, C(console_log_interval),
           "steps between lines on the terminal"),
    NUMBER("speed_monitor.window_size", INT, "20", 1, 1000000, C(speed_window), "steps over which tok/s is averaged"),
    OPTION("quant_stats_interval", LONG, "null", 0, 0, LONGS, C(quant_stats_interval),
           "steps between statistics of the FP8 errors of activations and moments; null: never"),

    { .name = NULL }
};
// clang-format on
