"""Converts config.json of OLMo-core, as its runs write it and `--dry-run` prints it."""
from config_keys import shown

NAME = "OLMo-core"
MODEL, BLOCK, TRAIN, OPTIM = "model.", "model.block.", "train_module.", "train_module.optim."
SCHEDULERS = {"cos_with_warmup": "cosine_with_warmup", "linear_with_warmup": "linear_with_warmup", "constant": "constant",
              "constant_with_warmup": "constant_with_warmup", "inv_sqrt_with_warmup": "inverse_sqrt_with_warmup", "wsd": "wsd"}
# Values of keys that ./train supports; other values describe another model.
ONLY = {"model.name": "default", "model.block.name": "default reordered_norm", "sequence_mixer.type": "attention",
        "sequence_mixer.name": "default fused", "feed_forward.name": "default", "feed_forward.activation": "silu", "rope.name":
        "default fused complex", "rope.partial_rotary_factor": "1.0", "lm_head.name": "default"}
PYTORCH = ("a setting of PyTorch; ./train has no such choice")
LAUNCH = "settings of the cluster that OLMo-core runs on; scripts/README.md shows how to start ./train"
METRICS = "all metrics are in metrics.jsonl; scripts/watch.py sends them"


def matches(tree):
    model = tree.get("model")
    return "train_module" in tree or "data_loader" in tree or (isinstance(model, dict) and "_CLASS_" in model)


def no(c, key, reason):
    """Checks a part that ./train does not have: it must be absent or false."""
    value = c.take(key)
    if value not in (None, False, {}, []):
        c.refuse(key, value, reason)


def norm(c, key):
    """The norms of a block; here all norms have one kind and one eps."""
    kind, eps = c.take(f"{key}.name", "rms"), c.take(f"{key}.eps", 1e-5)
    affine = c.take(f"{key}.elementwise_affine", True)
    no(c, f"{key}.bias", "norms have no bias")
    c.take(f"{key}.full_precision")                                     # always full precision here
    return kind.replace("fused_", ""), float(eps), affine


def windows(c, key, layers):
    pattern = c.take(f"{key}.pattern")
    first = c.take(f"{key}.force_full_attention_on_first_layer", True)
    last = c.take(f"{key}.force_full_attention_on_last_layer", True)
    if not pattern:
        return
    sizes = {size for size in pattern if size > 0}
    if len(sizes) > 1:
        c.refuse(f"{key}.pattern", pattern, "all windows have one size here")
    window = [pattern[(layer - first) % len(pattern)] for layer in range(layers)]
    types = ["full_attention" if size < 0 or (first and layer == 0) or (last and layer == layers - 1) else "sliding_attention"
             for layer, size in enumerate(window)]
    if "sliding_attention" in types:
        c.put("model.sliding_window", sizes.pop(), f"{key}.pattern: {shown(pattern)}")
        c.put("model.layer_types", types, f"{key}.pattern: {shown(pattern)}")


def rope(c, key):
    c.move(f"{key}.theta", "model.rope_theta", 500000)
    no(c, f"{key}.no_global_rope", "every layer has rotary positions")
    c.take(f"{key}.full_precision")                                     # always full precision here
    kind = c.take(f"{key}.scaling._CLASS_", "").rpartition(".")[2]
    rope_type = {"": None, "YaRNRoPEScalingConfig": "yarn", "StepwiseRoPEScalingConfig": "llama3"}
    if kind not in rope_type:
        c.refuse(f"{key}.scaling", kind, "expected YaRN or the steps of Llama 3")
    if not kind:
        return
    c.put("model.rope_scaling.rope_type", rope_type[kind], f"{key}.scaling: {kind}")
    for theirs, ours in (("factor", "factor"), ("low_freq_factor", "low_freq_factor"), ("high_freq_factor", "high_freq_factor"),
                         ("old_context_len", "original_max_position_embeddings"), ("beta_fast", "beta_fast"),
                         ("beta_slow", "beta_slow")):
        c.move(f"{key}.scaling.{theirs}", f"model.rope_scaling.{ours}")
    c.drop(f"{key}.scaling.attention_rescale_factor", "it follows from the factor")


def model(c):
    block, mixer = "model.block", "model.block.sequence_mixer"
    if not any(key.startswith(mixer) for key in c.theirs):
        mixer = "model.block.attention"                                 # name in earlier versions
    same = []
    for key, values in ONLY.items():
        part, _, last = key.rpartition(".")
        place = {"model": "model", "model.block": block, "sequence_mixer": mixer, "rope": f"{mixer}.rope",
                 "lm_head": "model.lm_head", "feed_forward": f"{block}.feed_forward"}[part] + "." + last
        value = c.theirs.get(place) if place == f"{block}.name" else c.take(place)
        if value is not None and str(value) not in values.split():
            c.refuse(place, value, f"./train computes only {values.replace(' ', ' or ')}")
        if value is not None:
            same.append(place)
    if same:
        c.dropped.append(f"{', '.join(same)}: ./train computes this")
    for key in ("embedding_norm.name", "embed_scale", "block_pattern", "block_overrides", "embedding_init_std"):
        no(c, MODEL + key, "./train has no such part")
    sparse = ("model.block_overrides", "model.block.feed_forward_moe", "model.block.routed")
    others = [key for key in c.theirs if key.startswith(sparse)]
    if others:
        c.refuse(others[0], c.theirs[others[0]], "all blocks are alike and dense here")
    for key in ("bias", "gate", "gate.granularity", "dropout", "scalable_softmax", "attention_sinks", "qk_norm_per_head_gains",
                "mxfp8_projections", "mxfp8_qkv_projection", "mxfp8_out_projection"):
        no(c, f"{mixer}.{key}", "attention here has no such part")
    no(c, f"{block}.feed_forward.bias", "the MLP has no bias")
    no(c, f"{block}.dropout", "there is no dropout")
    no(c, "model.lm_head.bias", "the head has no bias")
    layers = c.theirs.get("model.n_layers", 0)
    c.move("model.d_model", "model.d_model")
    c.move("model.n_layers", "model.n_layers")
    c.move(f"{mixer}.n_heads", "model.n_heads")
    c.move(f"{mixer}.n_kv_heads", "model.n_kv_heads")
    c.move(f"{mixer}.head_dim", "model.head_dim")
    c.move(f"{mixer}.clip_qkv", "model.clip_qkv")
    c.move(f"{block}.feed_forward.hidden_size", "model.mlp_hidden_size", change=lambda x: 2 * x, why="it counts both halves of "
           "SwiGLU")
    rope(c, f"{mixer}.rope")
    windows(c, f"{mixer}.sliding_window", layers)
    key = f"{block}.layer_norm" if f"{block}.layer_norm.name" in c.theirs else f"{block}.attention_norm"
    kind, eps, affine = norm(c, key)
    others = [norm(c, name) for name in (f"{block}.feed_forward_norm", "model.lm_head.layer_norm", f"{mixer}.qk_norm")
              if f"{name}.name" in c.theirs or name != f"{mixer}.qk_norm" and f"{name}.eps" in c.theirs]
    if any(other != (kind, eps, affine) for other in others) or kind not in ("rms", "default"):
        c.refuse(key, kind, "all norms are alike here, RMSNorm or LayerNorm")
    c.put("model.layer_norm_type", kind, f"{key}.name: {kind}")
    c.put("model.layer_norm_eps", eps, f"{key}.eps: {eps}")
    c.put("model.layer_norm_with_affine", affine, f"{key}.elementwise_affine: {affine}")
    c.put("model.norm_after", c.take(f"{block}.name", "default") == "reordered_norm", f"{block}.name")
    head_norm = c.take(f"{mixer}.use_head_qk_norm", False)
    if len(others) and f"{mixer}.qk_norm._CLASS_" in c.theirs:
        c.put("model.attention_layer_norm", "head" if head_norm else True, f"{mixer}.qk_norm")
    c.move("model.tie_word_embeddings", "model.weight_tying", False)
    initial(c)


def initial(c):
    method, std = c.take("model.init_method", "normal"), c.take("model.init_std", 0.02)
    c.put("model.init_fn", "normal", f"model.init_method: {method}")
    c.put("model.init_std", std, f"model.init_std: {std}")
    c.put("model.init_cutoff_factor", 3, "OLMo-core truncates initial weights at three standard deviations")
    if method != "normal":
        c.ask("model.init_fn", f"{method} is not one of mitchell, normal and full_megatron; if weights are loaded, "
              "init_fn has no effect")


def tokenizer(c):
    padded, key = c.take("model.vocab_size"), "dataset.tokenizer"
    if not any(name.startswith(key) for name in c.theirs):
        key = "data_loader.tokenizer"
    size = c.take(f"{key}.vocab_size", padded)
    c.put("model.vocab_size", size, f"{key}.vocab_size: {size}")
    c.put("model.embedding_size", padded, f"model.vocab_size: {padded}", "rows of the embedding")
    c.move(f"{key}.eos_token_id", "model.eos_token_id")
    c.move(f"{key}.pad_token_id", "model.pad_token_id")
    c.put("data.memmap_dtype", c.take("dataset.dtype") or ("uint32" if size > 65536 else "uint16"), f"{key}.vocab_size: {size}")
    c.drop(f"{key}", "training reads tokens")


def data(c):
    kind = c.take("dataset._CLASS_", "NumpyFSLDatasetConfig").rpartition(".")[2]
    length = c.take("train_module.max_sequence_length") or c.theirs.get("dataset.sequence_length")
    if kind == "NumpyPackedFSLDatasetConfig":
        c.put("data.packing", "best_fit", f"dataset: {kind}")
        c.move("dataset.long_doc_strategy", "data.long_documents", "truncate", change=lambda x: "split" if x == "fragment" else x)
    elif kind != "NumpyFSLDatasetConfig":
        c.ask("data.packing", f"{kind} fills sequences in another way; without it: concat")
    c.move("dataset.paths", "data.paths")
    c.move("dataset.label_mask_paths", "data.label_mask_paths")
    for key in ("dataset.mix", "dataset.source_mixture_config", "dataset.name"):
        value = c.take(key)
        if value:
            c.ask("data.paths", f"{key}: {shown(value)}: OLMo-core lists the files that this name stands for; download them and "
                  "give their local paths, or data.mix")
    if "data.paths" not in c.ours and not c.missing:
        c.ask("data.paths", "the file names no tokens")
    for key in ("repetition_max_period", "repetition_min_period", "repetition_max_count"):
        c.move(f"dataset.instance_filter_config.{key}", f"data.instance_filter.{key}")
    c.move("dataset.generate_doc_lengths", "data.generate_doc_lengths")
    c.move("data_loader.seed", "data.seed", 0)
    c.move("init_seed", "seed", 12536)
    c.put("model.max_sequence_length", length, f"sequence_length: {length}")
    for theirs, ours in (("data_loader.global_batch_size", "global_train_batch_size"),
                         ("train_module.rank_microbatch_size", "device_train_microbatch_size")):
        c.move(theirs, ours, change=lambda tokens: tokens // length, why=f"sequences of {length} tokens")
    c.drop("dataset data_loader", "how OLMo-core prepares and reads files")


def optimizer(c):
    name = c.take(OPTIM + "type") or c.take(OPTIM + "_CLASS_", "AdamWConfig").rpartition(".")[2]
    name = name.removesuffix("Config").lower()
    skips = name.startswith("skip") and "adamw" in name
    known = "adamw" if skips or name == "adamw" else name
    c.put("optimizer.name", known, f"optim: {name}")
    if known != "adamw":
        c.ask("optimizer.name", f"./train has adamw, adamw8bit and muon, not {name}")
    c.move(OPTIM + "lr", "optimizer.learning_rate", 1e-3)
    c.move(OPTIM + "betas", "optimizer.betas", [0.9, 0.999])
    c.move(OPTIM + "eps", "optimizer.eps", 1e-8)
    c.move(OPTIM + "weight_decay", "optimizer.weight_decay", 0.01)
    if skips:
        sigma, length = c.take(OPTIM + "sigma_factor", 6), c.take(OPTIM + "rolling_interval_length", 128)
        c.put("spikes", "skip", f"optim: {name}")
        if (sigma, length) != (6, 128):
            c.ask("spikes", f"sigma_factor {sigma} and rolling_interval_length {length}; they are 6 and 128 here")
    decays = {"embeddings": True, "norm": True}
    for override in c.take(OPTIM + "group_overrides", []):
        params, opts = override.get("params", []), override.get("opts", {})
        kinds = {kind for kind in decays for p in params if kind in p}
        if opts == {"weight_decay": 0.0} and kinds and all(any(kind in p for kind in kinds) for p in params):
            decays.update(dict.fromkeys(kinds, False))
        else:
            c.ask("optimizer", f"group_overrides of {shown(params)}: {shown(opts)}: parameters have one learning rate and one "
                  "decay here")
    c.put("optimizer.decay_embeddings", decays["embeddings"], "group_overrides")
    c.put("optimizer.decay_norm_and_bias", decays["norm"], "group_overrides")
    c.move(TRAIN + "max_grad_norm", "max_grad_norm")
    if c.theirs.get(TRAIN + "z_loss_multiplier"):
        c.put("softmax_auxiliary_loss", True, "z_loss_multiplier")
        c.move(TRAIN + "z_loss_multiplier", "auxiliary_loss_multiplier")


def scheduler(c, total):
    """total: length of the run in steps or tokens, in the scheduler's unit; None: unknown."""
    key = TRAIN + "scheduler."
    kind = c.take(key + "type") or c.take(key + "_CLASS_", "constant").rpartition(".")[2]
    kind = {"CosWithWarmup": "cos_with_warmup", "WSD": "wsd", "LinearWithWarmup": "linear_with_warmup"}.get(kind, kind)
    c.put("scheduler.name", SCHEDULERS.get(kind, kind), f"scheduler: {kind}")
    if kind not in SCHEDULERS:
        c.ask("scheduler.name", f"./train has no schedule {kind}")
    c.move(key + "units", "scheduler.units", "steps")
    fraction = c.theirs.get(key + "warmup_fraction")
    if kind != "constant" and not fraction:
        c.put("scheduler.t_warmup", c.take(key + "warmup") or c.take(key + "warmup_steps", 0), "scheduler.warmup")
    c.move(key + "warmup_fraction", "scheduler.warmup_fraction")
    if kind != "constant":
        c.move(key + "warmup_min_lr", "scheduler.warmup_min_lr", 0.0)
    c.move(key + "t_max", "scheduler.t_max")
    c.move(key + "alpha_f", "scheduler.alpha_f", 0.1 if kind.startswith(("cos", "lin", "inv")) else None)
    if kind == "wsd":
        decay = c.take(key + "decay") or c.take(key + "decay_steps")
        share = c.take(key + "decay_fraction", 0.1)
        if decay or total:
            c.put("scheduler.t_decay", decay or round(share * total), "scheduler.decay" if decay else f"decay_fraction: {share}")
        else:
            c.ask("scheduler.t_decay", f"decay_fraction is {share}, but the length of the run is not known in these units")
        least = c.take(key + "decay_min_lr", 0) / c.ours["optimizer.learning_rate"]
        c.put("scheduler.alpha_f", round(least, 12), "decay_min_lr / lr")
    c.drop("train_module.scheduler", "settings of a schedule that ./train does not have" if kind not in SCHEDULERS else PYTORCH)


def length(c, key):
    """A Duration in the form of ./train."""
    value, unit = c.take(f"{key}.value"), c.take(f"{key}.unit")
    c.take(f"{key}._CLASS_")
    return value, unit, value and f"{value}{ {'steps': '', 'tokens': 'T', 'epochs': 'ep'}[unit]}"


def parallel(c):
    ways = {"fsdp": "FULL_SHARD", "hsdp": "HYBRID_SHARD", "ddp": "NO_SHARD"}
    way = c.take(TRAIN + "dp_config.name")
    precision = c.take(TRAIN + "dp_config.param_dtype") or c.take(TRAIN + "autocast_precision")
    if way:
        c.put("fsdp.sharding_strategy", ways.get(way, "FULL_SHARD"), f"dp_config.name: {way}")
    c.move(TRAIN + "dp_config.num_replicas", "parallelism.replicate")
    c.move(TRAIN + "dp_config.shard_degree", "parallelism.shard")
    if c.take(TRAIN + "dp_config.reduce_dtype", "float32") == "float32" and way:
        c.put("fsdp.precision", "mixed", "dp_config.reduce_dtype: float32")
    for theirs, ours in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
        c.move(f"{TRAIN}{theirs}_config.degree", f"parallelism.{ours}")
    if c.take(TRAIN + "float8_config.enabled", False):
        c.put("recipe", "fp8", "float8_config.enabled: true")
    else:
        c.put("recipe", "bf16" if precision == "bfloat16" else "f32", f"param_dtype: {precision or 'float32'}")
    mode, interval = c.take(TRAIN + "ac_config.mode"), c.take(TRAIN + "ac_config.block_interval")
    shares = {2: "one_in_two", 3: "one_in_three", 4: "one_in_four", 8: "one_in_eight"}
    if mode == "full" or (mode == "selected_blocks" and interval == 1):
        c.put("activations.keep", "block", f"ac_config.mode: {mode}")
    elif mode == "selected_blocks" and interval in shares:
        c.put("activations.recompute", shares[interval], f"ac_config.block_interval: {interval}")
    elif mode:
        c.ask("activations.keep", f"ac_config.mode {mode} keeps other tensors; without it the recipe decides")


def saving(c):
    key = "trainer.callbacks.checkpointer."
    c.move("run_name", "run_name")
    c.move("trainer.save_folder", "save_folder")
    c.move("trainer.save_overwrite", "save_overwrite")
    c.move(key + "save_interval", "save_interval", 250)
    c.move(key + "ephemeral_save_interval", "save_interval_ephemeral")
    keeps = c.take(key + "remove", "ephemeral_only")
    if keeps == "all_non_permanent":
        c.move(key + "max_checkpoints", "save_num_checkpoints_to_keep", 3)
    if c.take("trainer.load_strategy", "if_available") == "if_available":
        c.put("try_load_latest_save", True, "trainer.load_strategy: if_available")
    load = c.take("trainer.load_path")
    if load:
        c.ask("load_path", f"{load} is in OLMo-core's format; convert it with OLMo-core's convert_checkpoint_to_hf.py "
              "and give the new folder")
    c.move("trainer.metrics_collect_interval", "console_log_interval", 5)
    c.move("trainer.callbacks.lm_evaluator.eval_interval", "eval_interval")
    for name in ("lm_evaluator", "downstream_evaluator"):
        if any(k.startswith(f"trainer.callbacks.{name}") for k in c.theirs):
            c.ask("evaluators", f"the files of {name} are not named; scripts/prepare_eval.py makes some")
    c.drop("trainer.callbacks.checkpointer trainer.checkpointer trainer.no_checkpoints", "how OLMo-core writes its files")
    c.drop("trainer.callbacks.lm_evaluator trainer.callbacks.downstream_evaluator trainer.no_evals", "see evaluators")
    c.drop("trainer.callbacks", METRICS)
    c.drop("trainer.work_dir trainer.cancel_check_interval trainer.bookkeeping_soft_timeout trainer.async_bookkeeping "
           "trainer.device launch backend", LAUNCH)


def plain(c):
    """Leaves out class names that no rule reads. Leaves out formats, because the recipe decides them."""
    read = ("dataset._CLASS_", "rope.scaling._CLASS_", "optim._CLASS_", "scheduler._CLASS_", "qk_norm._CLASS_")
    for key in list(c.theirs):
        last = key.rpartition(".")[2]
        if (last == "_CLASS_" and not key.endswith(read)) or (last == "dtype" and key != "dataset.dtype"):
            c.theirs.pop(key)


def convert(c):
    plain(c)
    model(c)
    tokenizer(c)
    data(c)
    optimizer(c)
    value, unit, duration = length(c, "trainer.max_duration")
    c.put("max_duration", duration or "1ep", f"trainer.max_duration: {value} {unit}" if value else None)
    stop = length(c, "trainer.hard_stop")[2]
    if stop:
        c.put("stop_at", stop, "trainer.hard_stop")
    scheduler(c, value if unit == c.theirs.get(TRAIN + "scheduler.units", "steps") else None)
    parallel(c)
    saving(c)
    c.drop("train_module.dp_config train_module.tp_config train_module.cp_config train_module.pp_config train_module.float8_config "
           "train_module.ac_config train_module.compile_model train_module.label_ignore_index train_module.optim", PYTORCH)
    for key in [key for key in c.theirs if key.rpartition(".")[2] in ("_CLASS_", "backend", "use_flash", "init_seed", "type",
                                                                     "loss_implementation", "use_recompute_qkv_prep")]:
        c.drop(key, PYTORCH)
    c.rest()
