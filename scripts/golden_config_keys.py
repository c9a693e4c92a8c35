"""Which keys of a config.json change what transformers computes, for each class that ./train reads.

Keys are the fields of the configuration class and of PreTrainedConfig, the keys that their code reads from its arguments, the
settings of generation, and every attribute that transformers asks the configuration for while it makes, saves and loads a small
random model, trains and generates. That includes attributes that only getattr(config, "is_causal", True) names. The script gives
each key another value in a folder with the same weights, and AutoModelForCausalLM loads it. The first difference in this list is
the effect of the key:

    fails       the folder is not loaded, or does not compute
    model       tensors or logits differ
    decoding    logits differ, token by token with a cache
    training    gradients differ in training mode
    nothing

config_keys.json has, for each version of transformers, the declared keys with their defaults (null: none, or not a simple value),
the base, and [value, effect] for each key. rope_keys has the same for rope_scaling in `scaled`. A run with another version of
transformers adds that version. tests/test_config_keys.c compares with what ./train does with each key.
"""
import dataclasses
import inspect
import json
import os
import re
import tempfile

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.configuration_utils import PretrainedConfig

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=99,
             max_position_embeddings=64)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192)
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2)
MIXED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]

# config.json of each class, and the rope_scaling whose keys are tried
CLASSES = {
    "LlamaForCausalLM": (dict(model_type="llama"), LLAMA3),
    "OlmoForCausalLM": (dict(model_type="olmo"), YARN),
    "Olmo2ForCausalLM": (dict(model_type="olmo2"), YARN),
    "Olmo3ForCausalLM": (dict(model_type="olmo3", sliding_window=5), YARN),
    "MistralForCausalLM": (dict(model_type="mistral", sliding_window=5, head_dim=8), LLAMA3),
    "MinistralForCausalLM": (dict(model_type="ministral", sliding_window=5, head_dim=8, layer_types=MIXED), YARN),
    "Qwen2ForCausalLM": (dict(model_type="qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1), YARN),
    "Qwen3ForCausalLM": (dict(model_type="qwen3", head_dim=8, use_sliding_window=True, sliding_window=5, max_window_layers=1),
                         YARN),
    "SmolLM3ForCausalLM": (dict(model_type="smollm3", no_rope_layer_interval=2, tie_word_embeddings=False), YARN),
    "OlmoeForCausalLM": (dict(model_type="olmoe", **EXPERTS), YARN),
    "Qwen3MoeForCausalLM": (dict(model_type="qwen3_moe", head_dim=8, moe_intermediate_size=24, use_sliding_window=True,
                                 sliding_window=5, **EXPERTS), YARN),
}

# values of keys for which another(default) would be invalid or without effect; return_dict only changes the Python result
VALUES = dict(
    hidden_act="gelu", hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=4,
    vocab_size=98, max_position_embeddings=32, initializer_range=0.5, head_dim=16, rms_norm_eps=0.5, tie_word_embeddings=True,
    clip_qkv=0.125, use_sliding_window=False, sliding_window=3, max_window_layers=2,
    no_rope_layers=[1, 1, 0, 1], no_rope_layer_interval=3,
    layer_types=MIXED[::-1][1:] + ["full_attention"], rope_theta=100.0, rope_scaling=YARN,
    rope_parameters=dict(rope_type="default", rope_theta=100.0), partial_rotary_factor=0.5, attention_dropout=0.5, pad_token_id=7,
    is_causal=False, architectures=None, dtype="bfloat16", torch_dtype="bfloat16", return_dict=True,
    id2label={"0": "no", "1": "yes", "2": "both"}, label2id={"no": 0}, problem_type="regression", num_labels=3,
    per_layer_config={"0": {"intermediate_size": 24}}, attention_chunk_size=4, num_kv_shared_layers=1, kv_sharing_modes=["a"] * 4,
    text_config=dict(model_type="llama", **SIZES | dict(num_hidden_layers=2)), mlp_layer_types=["sparse"] * 4,
    mtp_layer_types=["full_attention"], transformers_weights="other.safetensors", attn_implementation="sdpa",
    experts_implementation="eager", configuration_files=["config.4.0.0.json"], original_max_position_embeddings=512,
    auto_map={"AutoConfig": "configuration_other.OtherConfig"}, pruned_heads={"0": [1]}, vision_feature_select_strategy="full",
    quantization_config=dict(quant_method="fp8", activation_scheme="dynamic", weight_block_size=[64, 64]),
    fusion_config={"patch_embeddings": True}, num_return_sequences=1, bad_words_ids=[[1]], suppress_tokens=[1],
    begin_suppress_tokens=[1], num_experts=3, num_local_experts=3, num_experts_per_tok=1, moe_intermediate_size=16,
    decoder_sparse_step=2, mlp_only_layers=[1],
    # keys of rope_scaling
    rope_type="linear", type="linear", truncate=False, mscale=0.5, mscale_all_dim=0.25, attention_factor=2.0, factor=2.0,
    beta_fast=256.0, beta_slow=2.0, low_freq_factor=2.0, high_freq_factor=8.0, short_factor=[2.0] * 4, long_factor=[2.0] * 4,
)
VALUES["decoder"] = VALUES["generator"] = VALUES["text_encoder"] = VALUES["text_config"]
NOT_TRIED = {"model_type"}      # not a key of the model: it selects the class


def fields(config):
    """Names and defaults of the keys that the class declares."""
    if dataclasses.is_dataclass(config):        # in transformers 5
        return {f.name: f.default for f in dataclasses.fields(config)}
    declared = inspect.signature(type(config).__init__).parameters.values()
    own = {p.name: p.default for p in declared if p.default is not inspect.Parameter.empty}
    return {k: v for k, v in vars(PretrainedConfig()).items() if not k.startswith("_")} | own


def taken():
    """Keys that the code of configurations reads from its arguments."""
    made = inspect.getsource(getattr(PretrainedConfig, "__post_init__", PretrainedConfig.__init__))
    rest = inspect.getsource(PretrainedConfig) + inspect.getsource(AutoConfig)
    names = re.findall(r'kwargs(?:\.pop|\.get)\(\s*"(\w+)"', made) + re.findall(r'"(\w+)" in config_dict', rest)
    return set(names) | {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "per_layer_config",
                         "is_causal", "layer_types", "original_max_position_embeddings", "sliding_window"}


def generation():
    made = getattr(GenerationConfig, "_get_default_generation_params", None)
    return set(made() if made else PretrainedConfig._get_global_generation_defaults())


def rotation():
    from transformers import modeling_rope_utils as rope
    declared = getattr(rope, "RopeParameters", None)
    read = re.findall(r'(?:rope_scaling|rope_parameters\w*|\[layer_type\])(?:\.get\(|\[)"(\w+)"', inspect.getsource(rope))
    return set(declared.__annotations__ if declared else ()) | set(read) - {"full_attention", "sliding_attention"}


def passes(model, tokens):
    """Logits; logits with a cache; gradients of a loss in training mode."""
    with torch.no_grad():
        logits, steps = model(tokens, return_dict=True).logits, []
        out = model(tokens[:, :8], use_cache=True, return_dict=True)
        for i in range(8, tokens.shape[1]):
            out = model(tokens[:, i:i + 1], past_key_values=out.past_key_values, use_cache=True,
                        return_dict=True)
            steps.append(out.logits[:, -1])
    torch.manual_seed(0)
    model.train()
    model(tokens, labels=tokens, return_dict=True).loss.backward()
    # an expert without tokens has no gradient
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return dict(model=logits, decoding=torch.stack(steps), training=gradients)


def load(folder):
    """Implementations differ only in rounding; transformers 4 had one of experts."""
    experts = dict(experts_implementation="eager") if int(transformers.__version__.split(".")[0]) >= 5 else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **experts).eval()


def same(a, b):
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a.shape == b.shape and torch.equal(a, b)


def record(folder, tokens):
    """The results of the base model, and the attributes for which its configuration is asked."""
    asked, plain = set(), PretrainedConfig.__getattribute__
    PretrainedConfig.__getattribute__ = lambda self, name: asked.add(name) or plain(self, name)
    model = load(folder)
    expected = passes(model, tokens)
    model.eval().generate(tokens, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with tempfile.TemporaryDirectory() as copy:
        model.save_pretrained(copy)
    PretrainedConfig.__getattribute__ = plain
    declared = {name for c in type(model.config).__mro__ for name in vars(c)}
    return expected, {name for name in asked if not name.startswith("_") and name not in declared}, model.config


def effect_of(folder, expected, tokens):
    try:
        found = passes(load(folder), tokens)
    except Exception:       # transformers can raise any exception
        return "fails"
    return next((name for name in expected if not same(expected[name], found[name])), "nothing")


def another(key, default):
    if key in VALUES:
        return VALUES[key]
    if isinstance(default, (bool, int, float)):
        return not default if isinstance(default, bool) else default + 1
    return 1


def write_config(folder, config):
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
        json.dump(config, file)


def try_keys(folder, base, at, keys, defaults, expected, tokens):
    """[value, effect] of each key; at: the object in config.json that has the keys; None: config.json itself."""
    found = {}
    for key in sorted(keys - NOT_TRIED):
        value = another(key, defaults.get(key))
        write_config(folder, base | ({at: base[at] | {key: value}} if at else {key: value}))
        found[key] = [value, effect_of(folder, expected, tokens)]
    return found


def try_class(name, config, scaling):
    base = dict(architectures=[name], **config, **SIZES, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    tokens = torch.randint(0, 98, (2, 24), generator=torch.Generator().manual_seed(0))
    tokens[0, :4] = VALUES["pad_token_id"]
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, base)
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.3)
        save_file({k: v.contiguous() for k, v in model.state_dict().items()}, os.path.join(folder, "model.safetensors"),
                  {"format": "pt"})
        expected, asked, loaded = record(folder, tokens)
        declared = fields(loaded)
        keys = set(declared) | taken() | generation() | asked
        found = dict(base=base, keys=try_keys(folder, base, None, keys, declared, expected, tokens))
        # another rope_theta has a different meaning for OLMo-3 in different versions
        scaled = base | dict(rope_theta=500000.0 if name.startswith("Olmo3") else 10000.0, rope_scaling=scaling)
        write_config(folder, scaled)
        if effect_of(folder, expected, tokens) == "model":      # in transformers 4 only some classes had scaling
            expected, _, _ = record(folder, tokens)
            rope = rotation() | {"type"}
            found |= dict(scaled=scaled, rope_keys=try_keys(folder, scaled, "rope_scaling", rope, {}, expected, tokens))
    simple = {k: v if isinstance(v, (bool, int, float, str)) else None for k, v in declared.items() if k in found["keys"]}
    return dict(defaults=simple) | found


def dump(found):
    """JSON with a line per key."""
    line = json.dumps
    rows = lambda d, pad: ",\n".join(f"{pad}{line(k)}: {v}" for k, v in d.items())
    group = lambda d: "{\n" + rows({k: line(v) for k, v in d.items()}, "    ") + "}"
    parts = lambda d: "{\n" + rows({k: group(v) for k, v in d.items()}, "   ") + "}"
    classes = lambda d: "{\n" + rows({name: parts(of_class) for name, of_class in d.items()}, "  ") + "}"
    return "{\n" + rows({v: classes(d) for v, d in sorted(found.items())}, " ") + "}\n"


def write(root):
    path = f"{root}/config_keys.json"
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    found = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    found[transformers.__version__] = {name: try_class(name, *how) for name, how in CLASSES.items()}
    with open(path, "w", encoding="utf-8") as file:
        file.write(dump(found))
