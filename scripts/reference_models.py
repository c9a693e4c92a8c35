"""The small random models on which ./train is compared with other libraries: a table, and functions that make, load and compute
a model."""
import json
import os
from typing import NamedTuple, Optional

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

B, T = 2, 16
IMAGE_TOKEN, SIDE, PATCH = 98, 28, 14
ROWS = (SIDE // PATCH) ** 2             # rows of features of an image

# no pad token, because torch gives the pad token's row of the embedding no gradient
COMMON = dict(num_hidden_layers=2, max_position_embeddings=64, vocab_size=99, initializer_range=0.02, attention_dropout=0.0,
              bos_token_id=None, eos_token_id=0, pad_token_id=None)
TOWER = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=SIDE, patch_size=PATCH)
CLIP = ("CLIPVisionConfig", dict(projection_dim=16))
SIGLIP = ("SiglipVisionConfig", dict(vision_use_head=False))
PROJECTOR = "multi_modal_projector"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Images(NamedTuple):
    tower: tuple
    strategy: str
    counts: list            # number of images in each row of the batch
    bias: bool = True


class Model(NamedTuple):
    config: str             # name of a configuration class of transformers
    settings: dict
    adapters: dict          # settings of peft.LoraConfig
    images: Optional[Images] = None
    others: tuple = ()      # other settings, each of which must change the logits; functions of the configuration
    shard: str = "5GB"      # maximum size of a file of weights
    seed: Optional[int] = None      # None: the number of the model


def sizes(hidden, mlp, heads, kv_heads, eps=1e-6, tied=False, **more):
    return COMMON | dict(hidden_size=hidden, intermediate_size=mlp, num_attention_heads=heads, num_key_value_heads=kv_heads,
                         tie_word_embeddings=tied, **{"rms_norm_eps": eps} if eps else {}, **more)


def rope(theta, kind="default", **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


def sliding(config):
    """Windows that are one token wider and one token narrower: the window must have exactly the given size."""
    return [dict(sliding_window=config.sliding_window + more) for more in (1, -1)]


def each_rope(config):
    """Scales the rotary frequencies of no layer, and of all layers."""
    both = config.rope_parameters
    return [dict(rope_parameters=both | {"full_attention": both["sliding_attention"]}),
            dict(rope_parameters=both | {"sliding_attention": both["full_attention"]})]


def routing(config):
    """Renormalizes the weights of experts, or does not, the opposite of the model; and uses one expert more or less."""
    k = config.num_experts_per_tok
    return [dict(norm_topk_prob=not config.norm_topk_prob), dict(num_experts_per_tok=k + 1), dict(num_experts_per_tok=k - 1)]


MODELS = {
    # Llama-2: full multi-head attention, untied head. With all-linear, PEFT saves the names of all adapted matrices
    "llama": Model("LlamaConfig", sizes(32, 48, 4, 4, 1e-5, rope_parameters=rope(10000.0)),
                   dict(r=4, lora_alpha=8, target_modules="all-linear")),
    # Llama-3.2: grouped queries, tied head, scaled rotary frequencies. One of the 8 wavelengths is kept (< 32/4),
    # one is interpolated, and six (> 32/1) are divided by the factor.
    "llama-gqa-tied": Model("LlamaConfig", sizes(64, 96, 4, 2, 1e-5, True, rope_parameters=rope(
                                10000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                original_max_position_embeddings=32)),
                            dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "down_proj"])),
    # the heads together are wider than the model
    "llama-head-dim": Model("LlamaConfig", sizes(32, 64, 4, 2, head_dim=16, rope_parameters=rope(500000.0)),
                            dict(r=4, lora_alpha=6, use_rslora=True, target_modules=ALL)),
    # OLMo-1: LayerNorm without weights, q, k and v clamped, tied head
    "olmo": Model("OlmoConfig", sizes(32, 64, 4, 4, None, True, clip_qkv=1.0, rope_parameters=rope(10000.0)),
                  dict(r=4, lora_alpha=8, target_modules=ALL)),
    # OLMo-2: norms of the branch outputs, of q and of k, grouped queries; saved as several files with an index
    "olmo2": Model("Olmo2Config", sizes(48, 64, 6, 2, rope_parameters=rope(500000.0)),
                   dict(r=2, lora_alpha=4, target_modules=ALL), shard="100KB"),
    # Mistral v0.1: every layer has a window of 5 tokens, grouped queries
    "mistral": Model("MistralConfig", sizes(32, 48, 4, 2, 1e-5, sliding_window=5, rope_parameters=rope(10000.0)),
                     dict(r=4, lora_alpha=4, target_modules=["k_proj", "o_proj", "up_proj"]), others=(sliding,)),
    # Mistral since v0.2: no window; here with a separate head_dim
    "mistral-full": Model("MistralConfig", sizes(32, 48, 4, 2, 1e-5, head_dim=16, sliding_window=None,
                                                 rope_parameters=rope(1000000.0)),
                          dict(r=8, lora_alpha=8, use_rslora=True, target_modules=["gate_proj", "q_proj", "k_proj"])),
    # Qwen3: norms of each head of q and of k, a separate head_dim, grouped queries
    "qwen3": Model("Qwen3Config", sizes(32, 48, 4, 2, head_dim=16, rope_parameters=rope(1000000.0)),
                   dict(r=4, lora_alpha=8, target_modules=ALL)),
    # also tied, and with a window from the second layer on: full, sliding, sliding
    "qwen3-tied": Model("Qwen3Config", sizes(32, 48, 4, 2, tied=True, head_dim=16, use_sliding_window=True, sliding_window=5,
                                             max_window_layers=1, rope_parameters=rope(1000000.0)) | dict(num_hidden_layers=3),
                        dict(r=2, lora_alpha=2, target_modules=["k_proj", "v_proj"]), others=(sliding,)),
    # OLMo-3: OLMo-2's blocks; three layers with a window, then one without, with YaRN's rotary frequencies. Two of
    # its 4 frequencies are kept, one is interpolated halfway, one is divided by the factor; the attention factor is 1.21.
    "olmo3": Model("Olmo3Config", sizes(48, 48, 6, 2, sliding_window=5, rope_parameters={
                       "sliding_attention": rope(1000.0),
                       "full_attention": rope(1000.0, "yarn", factor=8.0, original_max_position_embeddings=128,
                                              beta_fast=2.0, beta_slow=0.5)})
                   | dict(num_hidden_layers=4, max_position_embeddings=1024),
                   dict(r=2, lora_alpha=5, target_modules=ALL), others=(sliding, each_rope)),
    # OLMo-3 before its context was extended
    "olmo3-default": Model("Olmo3Config", sizes(32, 48, 4, 2, sliding_window=5) | dict(num_hidden_layers=4),
                           dict(r=2, lora_alpha=4, use_rslora=True,
                                target_modules=["v_proj", "o_proj", "gate_proj", "down_proj"]), others=(sliding,)),
    # the class that transformers uses for a Mistral with layer_types: a window in some layers
    "ministral": Model("MinistralConfig", sizes(32, 48, 4, 2, 1e-5, head_dim=8, sliding_window=5, rope_parameters=rope(10000.0),
                                                layer_types=["full_attention", "sliding_attention", "sliding_attention"])
                       | dict(num_hidden_layers=3),
                       dict(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj"]),
                       others=(sliding, lambda config: [dict(layer_types=config.layer_types[::-1])])),
    # Qwen2.5 from 7B: biases of q, k and v, grouped queries
    "qwen2": Model("Qwen2Config", sizes(32, 48, 4, 2, use_sliding_window=False, rope_parameters=rope(1000000.0)),
                   dict(r=4, lora_alpha=8, target_modules=ALL)),
    # Qwen2.5 up to 3B: tied; here with a window from the second layer on
    "qwen2-tied": Model("Qwen2Config", sizes(48, 48, 6, 2, tied=True, use_sliding_window=True, sliding_window=5,
                                             max_window_layers=1, rope_parameters=rope(1000000.0)) | dict(num_hidden_layers=3),
                        dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "up_proj"]), others=(sliding,)),
    # SmolLM3: every third layer without rotary embedding, tied
    "smollm3": Model("SmolLM3Config", sizes(32, 48, 4, 2, tied=True, no_rope_layer_interval=3, rope_parameters=rope(5000000.0))
                     | dict(num_hidden_layers=4),
                     dict(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "o_proj"]),
                     others=(lambda config: [dict(no_rope_layers=[1, 1, 1, 1]), dict(no_rope_layers=[1, 0, 1, 1])],)),
    # OLMoE: each token uses 2 of 8 experts, weights are not renormalized, norms over the full width of q and k
    "olmoe": Model("OlmoeConfig", sizes(32, 16, 4, 2, 1e-5, num_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.01,
                                        rope_parameters=rope(10000.0)),
                   dict(r=4, lora_alpha=8, target_modules=ALL[:4]), others=(routing,), seed=268),
    # Qwen3-MoE: each token uses 3 of 8 experts, renormalized weights, norms of each head of q and k, a separate head_dim
    "qwen3-moe": Model("Qwen3MoeConfig", sizes(32, 48, 4, 2, head_dim=16, moe_intermediate_size=16, num_experts=8,
                                               num_experts_per_tok=3, norm_topk_prob=True, router_aux_loss_coef=0.01,
                                               rope_parameters=rope(1000000.0)),
                       dict(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]), others=(routing,), seed=1439),
    # four of its six layers have one MLP: the first of each two (decoder_sparse_step), and the fourth (mlp_only_layers)
    "qwen3-moe-dense": Model("Qwen3MoeConfig", sizes(32, 48, 4, 2, head_dim=16, moe_intermediate_size=16, num_experts=4,
                                                     num_experts_per_tok=2, norm_topk_prob=True, router_aux_loss_coef=0.01,
                                                     decoder_sparse_step=2, mlp_only_layers=[3], rope_parameters=rope(1000000.0))
                             | dict(num_hidden_layers=6),
                             dict(r=2, lora_alpha=4, target_modules=["k_proj", "o_proj"]), others=(routing,), seed=3),
    # LLaVA: two images in one row; another row is text
    "llava-llama": Model("LlamaConfig", sizes(32, 48, 4, 2, 1e-5),
                         dict(r=4, lora_alpha=8, modules_to_save=[PROJECTOR],
                              target_modules=rf".*language_model.*\.({'|'.join(ALL)})"), Images(CLIP, "default", [2, 0])),
    "llava-mistral": Model("MistralConfig", sizes(32, 48, 4, 2, 1e-5, sliding_window=None),
                           dict(r=2, lora_alpha=3, use_rslora=True, modules_to_save=[PROJECTOR], target_modules=
                                r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.(?:q_proj|v_proj|down_proj)"),
                           Images(CLIP, "default", [0, 1], bias=False)),
    "llava-qwen3-tied": Model("Qwen3Config", sizes(32, 48, 4, 2, tied=True, head_dim=16),
                              dict(r=4, lora_alpha=4, target_modules=r".*language_model.*\.(k_proj|o_proj|gate_proj)"),
                              Images(SIGLIP, "full", [1, 1])),
}

# adapters of experts: the model, settings of peft.LoraConfig, a seed, and whether they are saved with one tensor for each matrix of
# each expert, as ./train writes them, or as PEFT does: with one tensor for all experts of a block, gate and up joined
EXPERT_ADAPTERS = {
    "olmoe-experts": ("olmoe", dict(r=16, lora_alpha=8, target_modules=ALL), 6, True),
    "qwen3-moe-experts": ("qwen3-moe", dict(r=16, lora_alpha=24, target_modules=ALL[4:]), 2, False),
}


def seed_of(name):
    """By default the model's number among the text models, or among the models with images."""
    if MODELS[name].seed is not None:
        return MODELS[name].seed
    return [n for n in MODELS if bool(MODELS[n].images) == bool(MODELS[name].images)].index(name)


def config_of(model, wider=1):
    """wider: how many times as wide the text model is."""
    settings = {n: x * wider if n in ("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim") else x
                for n, x in model.settings.items()}
    config = text = getattr(transformers, model.config)(**settings)
    if model.images:
        kind, more = model.images.tower
        config = transformers.LlavaConfig(
            text_config=text, vision_config=getattr(transformers, kind)(**TOWER, **more), image_token_index=IMAGE_TOKEN,
            image_seq_length=ROWS, vision_feature_select_strategy=model.images.strategy,
            multimodal_projector_bias=model.images.bias, vision_feature_layer=-2)
        config.tie_word_embeddings = text.tie_word_embeddings
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def has_experts(config):
    return hasattr(config, "num_experts_per_tok")


def make_network(config, generator):
    """A network whose weights make every part of the model matter: projections and biases of unit scale, norm weights that
    differ from 1."""
    images = hasattr(config, "vision_config")
    network = (AutoModelForImageTextToText if images else AutoModelForCausalLM).from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, p in network.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_((0.3 if images else 1) * noise if "bias" in name else 1 + 0.2 * noise if p.dim() == 1 else
                    # three dimensions: a tensor of all experts
                    noise / (p.shape[2] if p.dim() == 3 else p[0].numel()) ** 0.5)
    return network


def make_batch(config, counts, generator, length=T, first=0):
    """Tokens from `first` on, with `counts` images in each row; and pixels for these images."""
    last = IMAGE_TOKEN if counts else config.vocab_size
    tokens = torch.randint(first, last, (B, length), generator=generator)
    for row, count in enumerate(counts):
        for i in range(count):
            start = 1 + i * (ROWS + 2)
            tokens[row, start:start + ROWS] = IMAGE_TOKEN
    return {"tokens": tokens} | ({"pixels": torch.randn((sum(counts), 3, SIDE, SIDE), generator=generator)} if counts else {})


def load(folder, dtype=torch.float32):
    """The model of a folder; asserts that no tensor is missing and none is left over."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        images = json.load(file)["model_type"] == "llava"
    network, info = (AutoModelForImageTextToText if images else AutoModelForCausalLM).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True)
    assert not any(info.values()), f"{folder}: {info}"
    return network.eval()


def outputs(network, batch):
    pictures = {"pixel_values": batch["pixels"]} if "pixels" in batch else {}
    return network(input_ids=batch["tokens"].long(), **pictures)


def forward(network, batch):
    """The logits of a batch."""
    return outputs(network, batch).logits


def features_of(network, pixels):
    """The features before the projector, as in LlavaModel.get_image_features."""
    with torch.no_grad():
        layers = network.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    rows = layers[network.config.vision_feature_layer]
    return rows[:, 1:] if network.config.vision_feature_select_strategy == "default" else rows


def in_files(name):
    """The name that a parameter of a model with images has in files."""
    for tree, file in (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
                       (f"model.{PROJECTOR}.", f"{PROJECTOR}.")):
        if name.startswith(tree):
            return file + name[len(tree):]
    return name
