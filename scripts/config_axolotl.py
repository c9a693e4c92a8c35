"""Converts YAML of axolotl."""
from config_keys import shown, truth
from config_training_arguments import (HUB, LABELS, METRICS, PYTORCH, adapters, base, checkpointing, duration, optimizer, scheduler,
                                       sharding)

NAME = "axolotl"


def matches(tree):
    return "base_model" in tree and ("micro_batch_size" in tree or "sequence_len" in tree or "datasets" in tree)


def precision(c):
    bf16, half = c.take("bf16", c.take("bfloat16", "auto")), truth(c.take("fp16", c.take("float16", False)))
    if truth(c.take("fp8", False)):
        c.put("recipe", "fp8", "fp8: true")
    else:
        c.put("recipe", "bf16" if truth(bf16) or half else "f32", "fp16: true" if half else f"bf16: {str(bf16).lower()}")
    if half:
        c.ask("recipe", "there is no float16 with loss scaling; bf16 has the same memory")
    c.drop("tf32 fp8_enable_fsdp_float8_all_gather", PYTORCH)


def data(c):
    c.move("sequence_len", "model.max_sequence_length", 512)
    packs = truth(c.take("sample_packing", False))
    c.put("data.packing", "best_fit", f"sample_packing: {str(packs).lower()}",
          "whole documents, attention inside documents" if packs else
          "./train fills sequences with several texts instead of padding")
    if not packs:
        c.ask("global_train_batch_size", "a sequence of ./train holds several texts of the file, so a step reads more texts")
    sets = [entry.get("path") for entry in c.take("datasets", []) + c.take("pretraining_dataset", []) if isinstance(entry, dict)]
    c.ask("data.paths", f"{', '.join(map(str, sets)) or 'the data'}: text; make tokens of it by scripts/make_shards.py or "
          "make_chat_shards.py and give their files")
    held = c.count("val_set_size", 0)
    if held or c.take("test_datasets"):
        c.ask("evaluators", f"val_set_size: {held}: make tokens of the validation data and give their files")
    c.drop("train_on_inputs chat_template chat_template_jinja special_tokens tokens added_tokens_overrides tokenizer_type "
           "tokenizer_config dataset_prepared_path pad_to_sequence_len eval_sample_packing dataset_processes "
           "default_system_message shuffle_merged_datasets "
           "train_on_eos roles_to_train excess_length_strategy type_of_model model_type group_by_length", LABELS)


def steps(c, kind, interval, ours):
    """kind: "save" or "eval"."""
    each = c.count(f"{kind}s_per_epoch", 0)
    given = c.count(interval)
    if given is not None and given >= 1:
        c.put(ours, given, f"{interval}: {given}")
    elif each or given:
        c.put(ours, None, f"{kind}s_per_epoch: {each}" if each else f"{interval}: {given}")
        c.ask(ours, f"{each or given} {'per epoch' if each else 'of the run'}; the number of steps depends on the data. The "
              "end of the run always has one")
    c.drop(f"{kind}_strategy", "intervals are in steps")


def parallel(c):
    width = 1
    for theirs, ours in (("tensor_parallel_size", "tensor"), ("context_parallel_size", "context"),
                         ("sequence_parallel_degree", "context"),
                         ("dp_shard_size", "shard"), ("dp_replicate_size", "replicate")):
        value = int(c.count(theirs, 1))
        if value > 1:
            c.put(f"parallelism.{ours}", value, f"{theirs}: {value}")
            width *= value if ours in ("tensor", "context") else 1
    return width


def convert(c):
    for key in ("rl", "reward_model", "process_reward_model"):
        value = c.take(key)
        if value:
            c.refuse(key, value, "./train pretrains and fine-tunes on given tokens")
    c.load_path("base_model", c.take("base_model"))
    precision(c)
    c.batch(c.count("micro_batch_size", 1), c.count("gradient_accumulation_steps", 1), parallel(c))
    data(c)
    optimizer(c, "optimizer", "adamw_torch_fused", None)
    if "optimizer.learning_rate" not in c.ours:
        c.refuse("learning_rate", None, "axolotl requires a learning rate")
    scheduler(c, "lr_scheduler", "cosine")
    least = c.count("cosine_min_lr_ratio", 0)
    if least:
        c.put("scheduler.alpha_f", least, f"cosine_min_lr_ratio: {least}")
    duration(c, "num_epochs", 1)
    adapter = c.take("adapter")
    if adapter in ("lora", "qlora"):
        adapters(c, "lora_r", "lora_alpha", "lora_target_modules", "lora_dropout", truth(c.take("lora_target_linear", False)))
        base(c, adapter == "qlora" or truth(c.take("load_in_4bit", False)), truth(c.take("load_in_8bit", False)))
        c.move("peft_use_rslora", "lora.use_rslora", change=lambda x: truth(x))
        saved = c.take("lora_modules_to_save")
        if saved:
            c.ask("lora", f"lora_modules_to_save: {shown(saved)}: with adapters nothing else is trained here")
        if truth(c.take("peft_use_dora", False)):
            c.ask("lora", "peft_use_dora: DoRA's magnitudes are not computed here")
    elif adapter:
        c.refuse("adapter", adapter, "expected lora or qlora")
    c.take("load_in_4bit")
    c.drop("lora_r lora_alpha lora_dropout lora_target_linear lora_target_modules lora_fan_in_fan_out lora_model_dir load_in_8bit "
           "lora_mlp_kernel lora_qkv_kernel lora_o_kernel peft_use_dora", "adapters are fused into their layers" if adapter else
           "there are no adapters")
    checkpointing(c)
    sharding(c)
    c.move("output_dir", "save_folder", "./model-out")
    steps(c, "save", "save_steps", "save_interval")
    steps(c, "eval", "eval_steps", "eval_interval")
    c.move("save_total_limit", "save_num_checkpoints_to_keep")
    c.move("eval_batch_size", "device_eval_batch_size")
    c.move("logging_steps", "console_log_interval", change=lambda x: max(1, int(x)))
    c.move("seed", "seed", 42)
    if truth(c.take("auto_resume_from_checkpoints", False)) or c.take("resume_from_checkpoint"):
        c.put("try_load_latest_save", True, "resume_from_checkpoint")
    c.drop("hub_model_id hub_strategy push_dataset_to_hub", HUB)
    for key in [key for key in c.theirs if key.startswith(("wandb_", "mlflow_", "comet_", "use_wandb", "eval_table"))]:
        c.drop(key, METRICS)
    for key in [key for key in c.theirs if key.startswith(("liger_", "loss_watchdog", "xformers", "flash_attn", "unsloth_"))]:
        c.drop(key, PYTORCH)
    c.drop("strict plugins flash_attention sdp_attention flex_attention attn_implementation attention torch_compile ddp_timeout "
           "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor trust_remote_code local_rank debug "
           "early_stopping_patience use_tensorboard low_cpu_mem_usage save_safetensors save_first_step", PYTORCH)
    c.rest()
