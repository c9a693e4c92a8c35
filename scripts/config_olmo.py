"""Converts YAML of OLMo's trainer and of COAT. Keys that ./train has keep their names; this file has a row for each other key."""
import re

from config_keys import known, other_names, shown

NAME = "OLMo or COAT"
SECTIONS = ("model", "optimizer", "quantize_model", "quantize_optimizer", "fsdp", "global_train_batch_size", "max_duration")

# Keys for which ./train supports only one value. Another value of a key in MODEL describes another model.
MODEL = {
    "activation_type": ("swiglu", "the MLP is SwiGLU"), "block_type": ("sequential llama", "attention, then MLP"),
    "rope": ("true", "positions are rotary"), "alibi": ("false", "positions are rotary"),
    "include_bias": ("false", "only q, k and v may have biases (model.qkv_bias)"),
    "bias_for_layer_norm": ("false", "norms have no bias"), "attention_dropout": ("0 0.0", "there is no dropout"),
    "residual_dropout": ("0 0.0", "there is no dropout"), "embedding_dropout": ("0 0.0", "there is no dropout"),
    "embedding_layer_norm": ("false", "the embedding is not normed"), "scale_logits": ("false", "logits are not scaled"),
    "scale_emb_init": ("false", "initial embeddings follow init_fn"), "emb_init_std": ("", "initial embeddings follow init_fn"),
}
ONLY = {
    "data.custom_dataset": ("", "data are token shards"),
    "optimizer.no_decay_norm_and_bias": ("", "use optimizer.decay_norm_and_bias and decay_embeddings"),
    "optimizer.selective_updates": ("false", "every parameter is updated"),
    "max_grad_norm_ratio": ("", "gradients are clipped by max_grad_norm"),
    "fast_forward_batches": ("0", "change data.seed to avoid the data that led to a loss spike"),
    "epoch": ("0", "the epoch follows from the data; change data.seed for another order"),
    "stop_after": ("", "use stop_at"),
    "time_limit": ("", "a run that gets SIGUSR2 saves and ends: timeout --preserve-status -s USR2 47h mpirun ..."),
    "early_stopping_factor": ("", "spikes: stop ends a run for its loss"),
    "quantize_optimizer.expand_min": ("16", "the expansion exponent is a multiple of 1/16"),
}
NO_USE = (
    ("model.flash_attention model.rope_full_precision model.alibi_bias_max model.block_group_size "
     "model.init_device model.precision "
     "quantize_model.weight_memory_efficient fused_loss compile", "./train has only one implementation; results are the same"),
    ("data.pad_direction data.drop_last data.num_workers data.pin_memory data.prefetch_factor data.persistent_workers data.timeout "
     "save_data_indices hf_datasets_cache_dir evaluators[].data.pad_direction evaluators[].data.drop_last "
     "evaluators[].data.num_workers evaluators[].data.pin_memory evaluators[].data.prefetch_factor "
     "evaluators[].data.persistent_workers evaluators[].data.timeout", "shards are mapped into memory and read by one thread"),
    ("evaluators[].device_eval_batch_size evaluators[].subset_num_batches",
     "device_eval_batch_size and eval_subset_num_batches apply to all sets"),
    ("wandb optimizer.metrics_log_interval optimizer.record_update_metrics module_outputs_save_steps",
     "all metrics are in metrics.jsonl; scripts/watch.py --to wandb sends them"),
    ("fsdp.wrapping_strategy fsdp.use_orig_params ddp single", "each block is a unit, so are the embedding and the head"),
    ("speed_monitor.gpu_flops_available gen1_gc_interval python_profiling torch_profiling canceled_check_interval "
     "extra_steps_after_cancel", "settings of PyTorch or of its cluster; --profile=N records device times"),
    ("remote_save_folder", "nothing is uploaded; copy save_folder"),
    ("save_num_unsharded_checkpoints_to_keep", "checkpoints of save_interval_unsharded are all kept"),
    ("force_save_unsharded no_pre_train_checkpoint sharded_checkpointer load_path_sharded_checkpointer new_style_checkpoints",
     "there is one kind of checkpoint"),
    ("device_train_batch_size device_train_grad_accum", "follow from global_train_batch_size"),
)
RECIPES = {("coat_real", True): "coat", ("coat_real", False): "coat-act", ("fp8linear", False): "fp8", ("fp8linear", True): "fp8",
           ("fp8deepseek", False): "fp8", ("fp8deepseek", True): "fp8", (None, True): "coat-opt"}
# Columns of recipes that sections of COAT change.
SAVED = {"format.saved_norm_input": ("e4m3", 16), "format.saved_mlp": ("e4m3", 16), "format.operand": ("e4m3", 0)}
FORWARD = {"coat": SAVED, "coat-act": SAVED, "fp8": {"format.operand": ("e4m3", 0)}}
SHARES = ("one_in_two", "one_in_three", "one_in_four", "one_in_eight", "two_in_three", "three_in_four")


def matches(tree):
    return any(section in tree for section in SECTIONS)


# ---- ${...} -----------------------------------------------------------------------------------------------------------------

class Unknown(Exception):
    """A value that depends on the machine."""


def written_out(c, text, depth=0):
    """The text with ${other.key} replaced by that key's value."""
    def replace(match):
        name = match[1].strip()
        value = c.theirs.get(name, known().get(name))
        if ":" in name or value is None or isinstance(value, (dict, list)) or depth > 15:
            raise Unknown
        return written_out(c, str(value), depth + 1)
    try:
        done = re.sub(r"\$\{([^${}]*)\}", replace, text)
    except Unknown:
        raise Unknown(text) from None
    return done if done == text or "${" not in done else written_out(c, done, depth + 1)


def resolve(c, key, value):
    if isinstance(value, dict):
        return {written_out(c, str(k)): resolve(c, key, v) for k, v in value.items()}
    if isinstance(value, list):
        items = [resolve(c, key, item) for item in value]
        return [part for item in items for part in (item if isinstance(item, list) else [item])]
    if not isinstance(value, str) or "${" not in value:
        return value
    glob = re.fullmatch(r"\$\{path\.glob:([^${}]*)\}", value)
    return [pattern.strip() for pattern in glob[1].split(",")] if glob and key.endswith("paths") else written_out(c, value)


def continues(c, value):
    """Whether load_path has the form ${path.check_exist:SAVE_FOLDER/latest}."""
    inner = re.fullmatch(r"\$\{path\.check_exist:(.*)\}", value or "")
    try:
        return bool(inner) and written_out(c, inner[1]) == written_out(c, c.theirs.get("save_folder") or "") + "/latest"
    except Unknown:
        return False


def resolve_all(c):
    load = c.theirs.get("load_path")
    if isinstance(load, str) and continues(c, load):
        c.take("load_path")
        c.put("try_load_latest_save", True, f"load_path: {load}")
    result = {}
    for key, value in c.theirs.items():
        try:
            result[key] = resolve(c, key, value)
        except Unknown:
            if key in known() or key == "evaluators":
                c.ask(f"{key}: {shown(value)}", f"the value depends on files or variables of a machine; without this key: "
                      f"{known().get(key, 'none')}")
            else:
                result[key] = value
    for key, value in c.theirs.items():
        if key in result and result[key] != value and key in known() and not isinstance(value, list):
            c.translated.append(f"{key}: {shown(value)} -> {key}: {shown(result[key])}")
    c.theirs = result


# ---- recipes ----------------------------------------------------------------------------------------------------------------

def one_format(c, names, default):
    """The common format of all these keys. Their values are E4M3 or E5M2."""
    given = {name: str(c.take(name)).lower() for name in names if c.theirs.get(name) is not None}
    for name, value in given.items():
        if value not in ("e4m3", "e5m2"):
            c.refuse(name, value, "expected E4M3 or E5M2")
    if len(set(given.values())) > 1:
        c.ask(", ".join(given), f"these keys differ, but ./train uses one format for all: {default}. Set "
              "format.operand, format.saved_norm_input, format.saved_mlp or format.gradient")
        return default
    return next(iter(given.values()), default)


def columns(c, recipe, model, optimizer):
    """Columns that sections of COAT set to another value than the recipe."""
    names = [f"quantize_model.{x}" for x in ("fabit", "fwbit", "fobit", "babit", "bwbit", "bobit")]
    forward, backward = one_format(c, names[:3], "e4m3"), one_format(c, names[3:], "e5m2")
    group = c.count("quantize_model.group_size", 0)
    for key, (usual, usual_group) in FORWARD.get(recipe, {}).items() if model else ():
        size = (group or usual_group) if usual_group else 0
        if (forward, size) != (usual, usual_group):
            c.put(key, forward + f"/{size}" * bool(size), "quantize_model")
    if model and backward != "e5m2":
        c.put("format.gradient", backward, "quantize_model")
    size = c.count("quantize_optimizer.qgroup_size", 128)
    for i, order in enumerate(("first", "second"), 1):
        kind = one_format(c, [f"quantize_optimizer.{order}_order_bit"], "e4m3")
        words = str(c.take(f"quantize_optimizer.{order}_order_expansion", "true")).lower()
        expanded = words not in ("none", "false")
        if optimizer and (recipe == "fp8" or (kind, size, expanded) != ("e4m3", 128, True)):
            c.put(f"format.moment{i}", f"{kind}/{size}" + "+" * expanded, "quantize_optimizer")
        if optimizer and words == "expand":
            c.ask(f"format.moment{i}", "`expand` expands here; COAT's own program knows only `expansion` and `true`, so its run "
                  f"of this file had no expansion ({kind}/{size})")


def choose_recipe(c):
    method, states = (str(c.take(key, "none")).lower() for key in ("quantize_model.use_quantize_model",
                                                                   "quantize_optimizer.use_quantize_optimizer"))
    model = None if method in ("none", "false") else method
    optimizer = states not in ("none", "false")
    precision = str(c.take("precision", "")).lower()
    if model not in (None, "coat_real", "fp8linear", "fp8deepseek") or states not in ("none", "false", "coat_fp8_adamw"):
        c.refuse("quantize_model, quantize_optimizer", f"{method}, {states}", "expected coat_real, fp8linear or none, and "
                 "coat_fp8_adamw or none")
    given = c.theirs.get("recipe")
    recipe = given or RECIPES.get((model, optimizer)) or {"": None, "fp32": "f32"}.get(precision, "bf16")
    if given or recipe is None:
        c.drop("quantize_model quantize_optimizer", f"recipe {given} is given" if given else "no method is chosen")
        if recipe is None:
            c.ask("recipe", "the file gives no precision; without it: coat")
        return
    source = ", ".join(filter(None, (model and f"use_quantize_model: {model}", optimizer and f"use_quantize_optimizer: {states}")))
    c.put("recipe", recipe, source or f"precision: {precision}" if precision or source else "no quantization")
    if model == "fp8deepseek":
        c.ask("recipe", "fp8deepseek has one scale per block; the nearest recipe, fp8, has one scale per operand")
    if precision == "amp_fp16":
        c.ask("recipe", "there is no float16 with loss scaling; bf16 has the same memory")
    columns(c, recipe, model, optimizer)
    c.drop("quantize_model quantize_optimizer", "recipe and format say what is in FP8")


def checkpointing(c):
    word = str(c.take("activation_checkpointing", "")).lower()
    source = f"activation_checkpointing: {word}"
    if word in ("whole_layer", "true", "fine_grained"):
        c.put("activations.keep", "inputs" if word == "fine_grained" else "block", source)
    elif word in SHARES:
        c.put("activations.recompute", word, source)
    elif word not in ("", "false"):
        c.ask(source, "this script does not know this value; the recipe decides")
    ranks = c.take("distributed_strategy")
    if ranks in ("ddp", "single"):
        c.put("fsdp.sharding_strategy", "NO_SHARD", f"distributed_strategy: {ranks}")
    elif ranks:
        c.dropped.append(f"distributed_strategy: {ranks}: fsdp.sharding_strategy says what is sharded")


# ---- the rest ---------------------------------------------------------------------------------------------------------------

def one_value(c):
    same = []
    for key, (values, why) in list(ONLY.items()) + [(f"model.{key}", row) for key, row in MODEL.items()]:
        value = c.take(key)
        if value is None:
            continue
        if str(value).lower() in values.split():
            same.append(key)
            continue
        if key.startswith("model."):
            c.refuse(key, value, f"./train cannot compute this model: {why}")
        c.dropped.append(f"{key}: {shown(value)}: {why}")
    if same:
        c.dropped.append(f"{', '.join(same)}: ./train has only the value that the file gives")


def evaluator(c, tree, prefix="evaluators[]."):
    """The keys of an evaluator that ./train has; all other keys stay in c.theirs."""
    out = {}
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, dict) and name not in known():
            below = evaluator(c, value, name + ".")
            if below:
                out[key] = below
        elif name in known():
            out[key] = value
        else:
            c.theirs[name] = value
    return out


def is_remote(value):
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return sum(is_remote(v) if isinstance(v, (dict, list)) else isinstance(v, str) and "://" in v for v in values)


def convert(c):
    resolve_all(c)
    choose_recipe(c)
    checkpointing(c)
    one_value(c)
    evaluators = c.take("evaluators")
    if isinstance(evaluators, list):
        c.ours["evaluators"] = [evaluator(c, e) for e in evaluators if isinstance(e, dict)]
        c.kept += 1
    for names, why in NO_USE:
        c.drop(names, why)
    if isinstance(c.theirs.get("tokenizer"), dict):
        c.drop("tokenizer", "training reads tokens; here the key names the folder of a tokenizer to copy into checkpoints")
    for key, name in other_names().items():
        c.move(key, name)
    for key in [key for key in c.theirs if key in known()]:
        c.ours[key] = c.theirs.pop(key)
        c.kept += 1
    for key in ("data.paths", "data.datasets", "evaluators"):
        if is_remote(c.ours.get(key)):
            c.ask(key, f"{is_remote(c.ours[key])} files are remote; ./train reads local copies: give "
                  "their paths")
    c.rest()
