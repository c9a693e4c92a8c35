"""Converts TOML of torchtitan, with the names of its versions until 2026, when torchtitan stopped using TOML."""
from config_keys import shown

NAME = "torchtitan"
# width, layers, heads, key heads, MLP, vocabulary, tied head, base of rotary positions, width of a head, norm of each head
SHAPES = {
    ("llama3", "8B"): (4096, 32, 32, 8, 14336, 128256, False, 500000, None, False),
    ("llama3", "70B"): (8192, 80, 64, 8, 28672, 128256, False, 500000, None, False),
    ("llama3", "405B"): (16384, 126, 128, 8, 53248, 128256, False, 500000, None, False),
    ("qwen3", "0.6B"): (1024, 28, 16, 8, 3072, 151936, True, 1000000, 128, True),
    ("qwen3", "8B"): (4096, 36, 32, 8, 12288, 151936, False, 1000000, 128, True),
}
SHAPE_KEYS = ("d_model", "n_layers", "n_heads", "n_kv_heads", "mlp_hidden_size", "vocab_size", "weight_tying", "rope_theta",
              "head_dim")
PYTORCH = "a setting of PyTorch or of its launcher; ./train has no such choice"


def matches(tree):
    training = tree.get("training")
    return isinstance(training, dict) and any(key in training for key in ("seq_len", "local_batch_size", "batch_size", "steps"))


def first(c, names, default=None):
    """(the value of the first of these names that the file has, this name)."""
    values = [(c.take(name), name) for name in names.split()]
    return next(((value, f"{name}: {shown(value)}") for value, name in values if value is not None), (default, None))


def model(c):
    name, flavor = c.take("model.name", ""), c.take("model.flavor", "")
    name = name.removesuffix("_ft")
    shape = SHAPES.get((name, flavor))
    c.drop("model.tokenizer_path model.hf_assets_path", "training reads tokens")
    if not shape:
        c.ask("model", f"the shape of {name} {flavor} is in torchtitan's code; give the section model, or a folder as load_path")
        return
    for key, value in zip(SHAPE_KEYS, shape):
        if value is not None:
            c.ours[f"model.{key}"] = 2 * value if key == "mlp_hidden_size" else value
    c.ours.update({"model.layer_norm_type": "rms", "model.layer_norm_eps": 1e-6 if name == "qwen3" else 1e-5,
                   "model.init_fn": "full_megatron", "model.init_std": 0.02})
    if shape[-1]:
        c.ours["model.attention_layer_norm"] = "head"
    c.translated.append(f"model: {name} {flavor} -> section model, with the published shape")
    c.ask("model.init_fn", "torchtitan divides the output layers of block number n by sqrt(2 n); full_megatron, the nearest "
          "init_fn, divides them by sqrt(2 n_layers). If weights are loaded, init_fn has no effect")
    if name == "llama3":
        c.ask("model.rope_scaling", "some versions of torchtitan scale the rotary positions of llama3 as Llama 3.1 does; this "
              "file does not say so. The same setting of ./train is rope_scaling: {factor: 8}")


def optimizer(c):
    name = c.take("optimizer.name", "AdamW")
    c.put("optimizer.name", name.lower(), f"optimizer.name: {name}")
    c.move("optimizer.lr", "optimizer.learning_rate", 8e-4)
    betas = [c.take("optimizer.beta1", 0.9), c.take("optimizer.beta2", 0.95)]
    c.put("optimizer.betas", betas, f"optimizer.beta1, beta2: {betas}")
    c.move("optimizer.eps", "optimizer.eps", 1e-8)
    c.move("optimizer.weight_decay", "optimizer.weight_decay", 0.1)
    for key in ("decay_norm_and_bias", "decay_embeddings"):
        c.put(f"optimizer.{key}", True, "torchtitan decays all parameters")
    c.drop("optimizer", PYTORCH)


def schedule(c):
    steps, source = first(c, "training.steps", 10000)
    c.put("max_duration", steps, source)
    warmup, source = first(c, "lr_scheduler.warmup_steps training.warmup_steps", 200)
    c.put("scheduler.t_warmup", warmup, source)
    c.put("scheduler.warmup_min_lr", 0, "torchtitan warms up from 0")
    share = c.take("lr_scheduler.decay_ratio")
    shape, source = first(c, "lr_scheduler.decay_type", "linear")
    least, least_source = first(c, "lr_scheduler.min_lr_factor lr_scheduler.lr_min", 0.0)
    c.put("scheduler.alpha_f", least, least_source)
    if share:
        c.put("scheduler.name", "wsd", f"lr_scheduler.decay_ratio: {share}")
        c.put("scheduler.t_decay", round(steps * share), f"lr_scheduler.decay_ratio: {share}")
        if shape != "linear":
            c.ask("scheduler.name", f"the decay is {shape}; wsd decays linearly")
    else:
        names = {"linear": "linear_with_warmup", "cosine": "cosine_with_warmup"}
        c.put("scheduler.name", names.get(shape, shape), source)
        if shape not in names:
            c.ask("scheduler.name", f"./train has no decay {shape} over the whole run")
    c.drop("lr_scheduler", PYTORCH)


def parallel(c):
    width = 1
    for theirs, ours in (("data_parallel_replicate", "replicate"), ("data_parallel_shard", "shard"), ("tensor_parallel", "tensor"),
                         ("context_parallel", "context"), ("pipeline_parallel", "pipeline")):
        value, source = first(c, f"parallelism.{theirs}_degree training.{theirs}_degree experimental.{theirs}_degree")
        if value is not None and value > 1:
            c.put(f"parallelism.{ours}", value, source)
            width *= value if ours in ("tensor", "context", "pipeline") else 1
    kind = c.take("parallelism.pipeline_parallel_schedule")
    if kind in ("1F1B", "Interleaved1F1B"):
        c.put("parallelism.pipeline_schedule", kind, f"parallelism.pipeline_parallel_schedule: {kind}")
    elif kind and "parallelism.pipeline" in c.ours:
        c.ask("parallelism.pipeline_schedule", f"there is no {kind}; without it: 1F1B")
    c.drop("parallelism experimental", PYTORCH)
    return width


def batch(c, width):
    length, source = first(c, "training.seq_len", 2048)
    c.put("model.max_sequence_length", length, source)
    micro, micro_source = first(c, "training.local_batch_size training.batch_size", 8)
    whole = c.take("training.global_batch_size", -1)
    replicas = c.ours.get("parallelism.replicate", 1) * c.ours.get("parallelism.shard", 1)
    if whole > 0:
        c.put("device_train_microbatch_size", micro, micro_source)
        c.put("global_train_batch_size", whole, f"training.global_batch_size: {whole}")
        return
    if not c.ranks and "parallelism.shard" in c.ours:
        c.ranks = width * replicas
    c.batch(micro, 1, width)


def precision(c):
    converters = c.take("model.converters", [])
    fp8 = "float8" in str(converters)
    kind, source = first(c, "training.mixed_precision_param", "bfloat16")
    recipe = "fp8" if fp8 else "f32" if kind == "float32" else "bf16"
    c.put("recipe", recipe, f"model.converters: {shown(converters)}" if fp8 else source)
    if first(c, "training.mixed_precision_reduce", "float32")[0] == "float32":
        c.put("fsdp.precision", "mixed", "mixed_precision_reduce: float32")
    c.drop("float8 quantize mx", "recipe and format say what is in FP8")
    mode, option = c.take("activation_checkpoint.mode"), str(c.take("activation_checkpoint.selective_ac_option", ""))
    shares = {"2": "one_in_two", "3": "one_in_three", "4": "one_in_four", "8": "one_in_eight"}
    if mode == "full" or (mode == "selective" and option == "1"):
        c.put("activations.keep", "block", f"activation_checkpoint.mode: {mode}")
    elif mode == "selective" and option in shares:
        c.put("activations.recompute", shares[option], f"activation_checkpoint.selective_ac_option: {option}")
        c.ask("activations.recompute", "torchtitan counts blocks from 1, ./train from 0; results are the same")
    elif mode == "selective":
        c.ask("activations.keep", f"selective {option} keeps the results of some operations; without it the recipe decides. "
              "Results are the same, memory is not")
    c.drop("activation_checkpoint", PYTORCH)


def saving(c):
    folder = c.take("job.dump_folder", "./outputs")
    c.put("save_folder", f"{folder}/{c.take('checkpoint.folder', 'checkpoint')}", "job.dump_folder, checkpoint.folder")
    enabled, source = first(c, "checkpoint.enable checkpoint.enable_checkpoint", False)
    if enabled:
        c.move("checkpoint.interval", "save_interval", 500)
        c.put("try_load_latest_save", True, source)
        keep, source = first(c, "checkpoint.keep_latest_k", 10)
        c.put("save_num_checkpoints_to_keep", keep or -1, source)
    else:
        c.put("save_interval", None, source, "one checkpoint at the end")
    load, huggingface = c.take("checkpoint.initial_load_path"), c.take("checkpoint.initial_load_in_hf")
    if load and huggingface:
        c.load_path("checkpoint.initial_load_path", load)
    elif load:
        c.ask("load_path", f"{load} is in PyTorch's distributed format; convert it to a Hugging Face folder")
    c.drop("checkpoint", "how torchtitan writes its files")
    c.move("metrics.log_freq", "console_log_interval", 10)
    c.drop("metrics", "all metrics are in metrics.jsonl; scripts/watch.py sends them")
    c.drop("profiling memory_estimation", "--profile=N records device times, --dry_run plans memory")
    c.drop("job comm compile fault_tolerance", PYTORCH)


def convert(c):
    precision(c)
    model(c)
    optimizer(c)
    schedule(c)
    batch(c, parallel(c))
    seed, source = first(c, "training.seed debug.seed")
    if seed is not None:
        c.put("seed", seed, source)
    clip, source = first(c, "training.max_norm", 1.0)
    c.put("max_grad_norm", clip, source)
    dataset = first(c, "training.dataset training.dataset_path")[1]
    c.ask("data.paths", f"{dataset or 'the data'} is text; make tokens of it by scripts/make_shards.py and give their files")
    if c.take("validation.enable", c.take("validation.enabled")):
        c.move("validation.freq", "eval_interval")
        c.ask("evaluators", "the validation data are text; make tokens of them by scripts/make_shards.py")
    c.drop("validation", "evaluators name files of tokens")
    saving(c)
    c.drop("training.compile training.dataset_path training.enable_cpu_offload training.gc_freq training.gc_debug "
           "training.deterministic debug", PYTORCH)
    c.rest()
