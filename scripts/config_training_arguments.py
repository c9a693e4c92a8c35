"""Converts TrainingArguments of Hugging Face, as YAML or JSON; also TRL's SFTConfig with its model arguments, and LLaMA-Factory."""
from config_keys import number, shown, truth

NAME = "TrainingArguments"
OPTIMIZERS = {**dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused", "paged_adamw",
                               "paged_adamw_32bit"), "adamw"),
              **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "adamw8bit"), "muon": "muon"}
SCHEDULERS = {"linear": "linear_with_warmup", "cosine": "cosine_with_warmup", "cosine_with_min_lr": "cosine_with_warmup",
              "constant": "constant", "constant_with_warmup": "constant_with_warmup", "inverse_sqrt": "inverse_sqrt_with_warmup",
              "warmup_stable_decay": "wsd"}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STRATEGIES = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "no_shard": "NO_SHARD", "hybrid_shard": "HYBRID_SHARD",
              "hybrid_shard_zero2": "_HYBRID_SHARD_ZERO2"}
PYTORCH = "a setting of PyTorch or of its launcher; ./train has no such choice"
LABELS = "conversations, templates and labels become tokens and label masks in scripts/make_shards.py"
HUB = "nothing is uploaded"
METRICS = "all metrics are in metrics.jsonl; scripts/watch.py sends them"


def matches(tree):
    return any(key in tree for key in ("per_device_train_batch_size", "num_train_epochs", "lr_scheduler_type", "output_dir"))


# ---- keys that axolotl shares
# ---------------------------------------------------------------------------------------------------

def optimizer(c, key, default, rate):
    """key: the key that names it; default: the default of this key; rate: default of the learning rate."""
    name = c.take(key, default)
    c.put("optimizer.name", OPTIMIZERS.get(name, name), f"{key}: {name}")
    if name not in OPTIMIZERS:
        c.ask("optimizer.name", f"./train has adamw, adamw8bit and muon, not {name}")
    c.move("learning_rate", "optimizer.learning_rate", rate)
    betas = [c.count("adam_beta1", 0.9), c.count("adam_beta2", 0.999)]
    c.put("optimizer.betas", betas, "adam_beta1, adam_beta2")
    c.move("adam_epsilon", "optimizer.eps", 1e-8)
    c.move("weight_decay", "optimizer.weight_decay", 0.0)
    c.put("optimizer.decay_embeddings", True, "all but norms and biases decay")
    c.move("max_grad_norm", "max_grad_norm", 1.0)


def scheduler(c, key, default):
    kind = str(c.take(key, default))
    arguments = {name: c.count(f"lr_scheduler_kwargs.{name}") for name in ("min_lr", "min_lr_rate", "num_decay_steps")}
    c.put("scheduler.name", SCHEDULERS.get(kind, kind), f"{key}: {kind}")
    if kind not in SCHEDULERS:
        c.ask("scheduler.name", f"./train has no schedule {kind}")
    steps, share = c.count("warmup_steps", 0), c.count("warmup_ratio", 0)
    if 0 < steps < 1:
        steps, share = 0, steps
    if share and not steps:
        c.put("scheduler.warmup_fraction", share, f"warmup_ratio: {share}")
    else:
        c.put("scheduler.t_warmup", steps, f"warmup_steps: {steps}")
    c.put("scheduler.warmup_min_lr", 0, "the warmup begins at 0")
    least = arguments["min_lr_rate"] or (arguments["min_lr"] or 0) / (number(c.ours["optimizer.learning_rate"]) or 1)
    c.put("scheduler.alpha_f", round(least, 12), f"{key}: {kind}")
    if arguments["num_decay_steps"]:
        c.put("scheduler.t_decay", arguments["num_decay_steps"], "lr_scheduler_kwargs.num_decay_steps")
    c.drop("lr_scheduler_kwargs", "./train has no such argument of a schedule")


def duration(c, epochs_key, default):
    steps, epochs = c.count("max_steps", -1), c.count(epochs_key, default)
    if steps > 0:
        c.put("max_duration", steps, f"max_steps: {steps}")
    else:
        c.put("max_duration", f"{epochs}ep", f"{epochs_key}: {epochs}")


def adapters(c, rank_key, alpha_key, target_key, dropout_key, linear=False, default_rank=None, default_alpha=None):
    c.move(rank_key, "lora.rank", default_rank)
    c.move(alpha_key, "lora.alpha", default_alpha)
    targets = c.take(target_key)
    targets = [part.strip() for part in targets.split(",")] if isinstance(targets, str) else targets
    names = [name for name in targets or () if name in LINEAR]
    if linear or targets in (["all-linear"], ["all"]):
        c.put("lora.target_modules", "all-linear", target_key)
    elif names:
        c.put("lora.target_modules", names, target_key)
    if targets and not names and targets not in (["all-linear"], ["all"]):
        c.ask("lora.target_modules", f"{shown(targets)} are not among {', '.join(LINEAR)}; without it: all-linear")
    elif len(names) < len(targets or ()) and names:
        c.ask("lora.target_modules", f"only {', '.join(LINEAR)} can have adapters; the file has {shown(targets)}")
    elif not targets and not linear:
        c.ask("lora.target_modules", "the file leaves the matrices to PEFT, which often takes q_proj and v_proj; without it: "
              "all-linear")
    if c.count(dropout_key, 0):
        c.dropped.append(f"{dropout_key}: there is no dropout")


def base(c, four, eight):
    """four, eight: whether the base is stored in 4 or 8 bits."""
    if four:
        c.put("lora.base", "nf4", "4 bits")
    elif eight:
        c.put("lora.base", "e4m3", "8 bits")
        c.ask("lora.base", "e4m3 has the size of bitsandbytes' int8, but other values")


def checkpointing(c, default=False):
    if truth(c.take("gradient_checkpointing", default)):
        c.put("activations.keep", "block", "gradient_checkpointing: true")
    c.drop("gradient_checkpointing_kwargs", PYTORCH)


def sharding(c):
    given, config = c.take("fsdp"), c.take("fsdp_config.fsdp_sharding_strategy") or c.take("fsdp_config.sharding_strategy")
    words = given.split() if isinstance(given, str) else given or []
    if isinstance(words, list) and ("offload" in words):
        c.ask("offload.optimizer", "fsdp offload: in ./train `auto` moves to the host what does not fit, `all` moves everything")
    way = str(config or next((word for word in words if word in STRATEGIES), "")).lower()
    names = {"1": "full_shard", "2": "shard_grad_op", "3": "no_shard", "4": "hybrid_shard", "5": "hybrid_shard_zero2"}
    way = names.get(way, way).lstrip("_")
    if way in STRATEGIES:
        c.put("fsdp.sharding_strategy", STRATEGIES[way], f"fsdp: {way}")
    deepspeed = c.take("deepspeed")
    if deepspeed:
        stage = next((n for n in "321" if any(f"{word}{n}" in str(deepspeed) for word in ("zero", "z", "stage"))), None)
        strategy = {"3": "FULL_SHARD", "2": "SHARD_GRAD_OP", "1": "SHARD_GRAD_OP"}.get(stage)
        if strategy:
            c.put("fsdp.sharding_strategy", strategy, f"deepspeed: {shown(deepspeed)}")
        else:
            c.ask("fsdp.sharding_strategy", f"deepspeed: {shown(deepspeed)}: the file names the stage of ZeRO; without this "
                  "setting: FULL_SHARD")
    c.drop("fsdp_config fsdp_version", "each block is a unit, so are the embedding and the head")


# ---- the arguments --------------------------------------------------------------------------------------------------------------

def precision(c):
    half, bf16 = truth(c.take("fp16", False)), truth(c.take("bf16", False))
    stored = str(c.take("torch_dtype", c.take("dtype", "")))
    eight = truth(c.take("fp8", False))
    recipe = "fp8" if eight else "bf16" if bf16 or half or "bfloat16" in stored else "f32"
    c.put("recipe", recipe, "fp8" if eight else f"bf16: {str(bf16).lower()}" if not half else "fp16: true")
    if half:
        c.ask("recipe", "there is no float16 with loss scaling; bf16 has the same memory")


def intervals(c, strategy, steps, ours, default):
    """strategy: the key whose value is no, steps or epoch."""
    theirs = str(c.take(strategy, "steps" if default else "no"))
    if theirs == "steps":
        share = number(c.theirs.get(steps))
        if isinstance(share, float) and share < 1:
            c.put(ours, None, f"{steps}: {c.take(steps)}")
            c.ask(ours, f"{share} of the run; its number of steps depends on the data")
        c.move(steps, ours, None if ours in c.ours else 500)
    elif theirs in ("no", "epoch", "best"):
        c.put(ours, None, f"{strategy}: {theirs}")
        if theirs == "epoch":
            c.ask(ours, "once per epoch; the number of steps of an epoch depends on the data. There is one at the end of the run")


def saving(c):
    c.move("run_name", "run_name")
    c.move("output_dir", "save_folder", "trainer_output")
    c.move("overwrite_output_dir", "save_overwrite", change=lambda x: truth(x))
    intervals(c, "save_strategy", "save_steps", "save_interval", True)
    c.move("save_total_limit", "save_num_checkpoints_to_keep")
    strategy = "eval_strategy" if "eval_strategy" in c.theirs else "evaluation_strategy"
    evaluates = c.theirs.get(strategy) not in (None, "no")
    intervals(c, strategy, "eval_steps", "eval_interval", False)
    if evaluates:
        c.ask("evaluators", "make tokens of the validation data by scripts/make_shards.py and give their files")
    c.move("per_device_eval_batch_size", "device_eval_batch_size")
    c.move("logging_steps", "console_log_interval", 500, change=lambda x: max(1, int(x)))
    resume = c.take("resume_from_checkpoint")
    if resume not in (None, False, "false"):
        c.put("try_load_latest_save", True, f"resume_from_checkpoint: {shown(resume)}")
    c.move("seed", "seed", 42)
    c.move("data_seed", "data.seed")


def packing(c):
    lengths = ("max_seq_length", "max_length", "cutoff_len", "model_max_length")
    key = next((key for key in lengths if c.theirs.get(key) is not None), None)
    if key:
        c.move(key, "model.max_sequence_length")
    else:
        c.ask("model.max_sequence_length", "the file gives no length of sequences; without it: that of the model, at most 4096")
    packs = truth(c.take("packing", False))
    c.put("data.packing", "best_fit", f"packing: {str(packs).lower()}",
          "whole documents, attention inside documents" if packs else
          "./train fills sequences with several texts instead of padding")
    if not packs:
        c.ask("global_train_batch_size", "a sequence of ./train holds several texts of the file, so a step reads more texts")
    names = [key for key in c.theirs if key.startswith(("dataset", "data_path", "train_file")) and c.theirs[key] not in (None, [])]
    source = f"{names[0]}: {shown(c.theirs[names[0]])} is" if names else "the data are"
    c.ask("data.paths", f"{source} text; make tokens of it by scripts/make_shards.py or make_chat_shards.py and give their files")
    for name in list(c.theirs):
        if name.startswith(("dataset", "data_path", "train_file", "eval_dataset", "chat_template")):
            c.drop(name, LABELS)
    c.drop("stage do_train do_eval template max_samples preprocessing_num_workers overwrite_cache assistant_only_loss "
           "completion_only_loss train_on_prompt mask_history val_size packing_strategy eos_token pad_token", LABELS)


def convert(c):
    stage = c.theirs.get("stage")
    if stage not in (None, "sft", "pt"):
        c.refuse("stage", stage, "./train pretrains and fine-tunes on given tokens")
    name = c.take("model_name_or_path")
    if name:
        c.load_path("model_name_or_path", name)
    else:
        c.ask("load_path", "the file names no model; give its folder, or a section model")
    precision(c)
    c.batch(c.count("per_device_train_batch_size", 8), c.count("gradient_accumulation_steps", 1))
    packing(c)
    optimizer(c, "optim", "adamw_torch", 5e-5)
    scheduler(c, "lr_scheduler_type", "linear")
    duration(c, "num_train_epochs", 3.0)
    lora = truth(c.take("use_peft", False)) or c.take("finetuning_type", "full") == "lora"
    factory = any(key in c.theirs for key in ("lora_target", "lora_rank", "cutoff_len"))
    if lora and factory:
        adapters(c, "lora_rank", "lora_alpha", "lora_target", "lora_dropout", default_rank=8,
                 default_alpha=None if "lora_alpha" in c.theirs else 2 * int(number(c.theirs.get("lora_rank") or 8)))
    elif lora:
        adapters(c, "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout", default_rank=16, default_alpha=32)
    if lora:
        c.move("use_rslora", "lora.use_rslora", change=lambda x: truth(x))
        bits = c.count("quantization_bit", 0)
        base(c, truth(c.take("load_in_4bit", False)) or bits == 4, truth(c.take("load_in_8bit", False)) or bits == 8)
    checkpointing(c)
    sharding(c)
    saving(c)
    c.drop("use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_task_type lora_modules_to_save load_in_4bit "
           "load_in_8bit "
           "bnb_4bit_quant_type bnb_4bit_compute_dtype use_bnb_nested_quant quantization_method", "there are no adapters"
           if not lora else "adapters and their bases have these formats here")
    c.drop("push_to_hub hub_model_id hub_strategy hub_token hub_private_repo push_to_hub_organization", HUB)
    c.drop("save_only_model save_safetensors", "checkpoints hold weights as safetensors and the optimizer's states")
    c.drop("report_to logging_strategy logging_dir logging_first_step log_level plot_loss include_num_input_tokens_seen "
           "include_tokens_per_second wandb_project project trackio_space_id", METRICS)
    c.drop("model_revision trust_remote_code attn_implementation flash_attn use_cache tf32 ddp_timeout ddp_find_unused_parameters "
           "dataloader_num_workers dataloader_pin_memory dataloader_drop_last remove_unused_columns torch_compile local_rank "
           "group_by_length use_liger_kernel liger_kernel_config disable_tqdm", PYTORCH)
    c.rest()
