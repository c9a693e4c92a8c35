#!/usr/bin/env python3
"""Reference results of small random models, computed by Hugging Face transformers.

    python3 scripts/golden.py [folder]        # default: tests/golden

For each architecture it makes a seeded model, saves it with save_pretrained into folder/<name>/, and writes into
folder/<name>/golden.safetensors the results of float32 on a CPU:
    tokens, targets (B, T)   one batch; a target below 0 is masked
    logits (B, T, vocab)
    loss ()                  mean cross entropy over the unmasked targets
    grad.<tensor>            its gradient
    losses (8)               of 8 AdamW steps on the same batch, each before its update
    adamw (5)                lr, beta1, beta2, eps, weight decay of those steps; gradients are clipped to norm 1
tests/test_parity.c compares. Needs torch and transformers.
"""
import copy
import os

import torch
from safetensors.torch import save_file
from transformers import (AutoModelForCausalLM, LlamaConfig, MinistralConfig, MistralConfig, Olmo2Config, Olmo3Config,
                          OlmoConfig, Qwen2Config, Qwen3Config, SmolLM3Config)

from golden_folder import golden_folder

B, T, STEPS = 2, 16, 8
LR, BETA1, BETA2, EPS, DECAY, CLIP = 1e-2, 0.9, 0.95, 1e-5, 0.1, 1.0

# no pad token: torch gives its row of the embedding no gradient
COMMON = dict(num_hidden_layers=2, max_position_embeddings=64, vocab_size=99, initializer_range=0.02,
              attention_dropout=0.0, bos_token_id=None, eos_token_id=0, pad_token_id=None)

MODELS = {
    # Llama-2: full multi-head attention, untied head
    "llama": LlamaConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4,
                         rms_norm_eps=1e-5, tie_word_embeddings=False,
                         rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **COMMON),
    # Llama-3.2: grouped queries, tied head, scaled rotary frequencies. One of the 8 wavelengths is kept (< 32/4),
    # one interpolated, and six (> 32/1) divided by the factor.
    "llama-gqa-tied": LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
                                  rms_norm_eps=1e-5, tie_word_embeddings=True,
                                  rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                                                   "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                   "original_max_position_embeddings": 32}, **COMMON),
    # heads wider together than the model
    "llama-head-dim": LlamaConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
                                  head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=False,
                                  rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, **COMMON),
    # OLMo-1: LayerNorm without weights, q, k and v clamped, tied head
    "olmo": OlmoConfig(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4,
                       clip_qkv=1.0, tie_word_embeddings=True,
                       rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **COMMON),
    # OLMo-2: norms of the branch outputs, of q and of k, grouped queries; saved as several files with an index
    "olmo2": Olmo2Config(hidden_size=48, intermediate_size=64, num_attention_heads=6, num_key_value_heads=2,
                         rms_norm_eps=1e-6, tie_word_embeddings=False,
                         rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, **COMMON),
    # Mistral v0.1: every layer has a window of 5 tokens, grouped queries
    "mistral": MistralConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                             rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=5,
                             rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, **COMMON),
    # Mistral since v0.2: no window; here with a head_dim of its own
    "mistral-full": MistralConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                                  head_dim=16, rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=None,
                                  rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, **COMMON),
    # Qwen3: norms of each head of q and of k, head_dim of its own, grouped queries
    "qwen3": Qwen3Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                         head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=False,
                         rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, **COMMON),
    # also tied, and a window from the second layer on: full, sliding, sliding
    "qwen3-tied": Qwen3Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                              head_dim=16, rms_norm_eps=1e-6, tie_word_embeddings=True, use_sliding_window=True,
                              sliding_window=5, max_window_layers=1,
                              rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
                              **COMMON | {"num_hidden_layers": 3}),
    # OLMo-3: OLMo-2's blocks; three layers with a window, then one without, with YaRN's rotary frequencies. Two of
    # its 4 frequencies are kept, one is interpolated halfway, one is divided by the factor; the attention factor is 1.21.
    "olmo3": Olmo3Config(hidden_size=48, intermediate_size=48, num_attention_heads=6, num_key_value_heads=2,
                         rms_norm_eps=1e-6, tie_word_embeddings=False, sliding_window=5,
                         rope_parameters={"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                                          "full_attention": {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0,
                                                             "original_max_position_embeddings": 128,
                                                             "beta_fast": 2.0, "beta_slow": 0.5}},
                         **COMMON | {"num_hidden_layers": 4, "max_position_embeddings": 1024}),
    # OLMo-3 before its context was extended
    "olmo3-default": Olmo3Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
                                 rms_norm_eps=1e-6, tie_word_embeddings=False, sliding_window=5,
                                 **COMMON | {"num_hidden_layers": 4}),
    # the class that transformers takes for a Mistral with layer_types: a window in some layers
    "ministral": MinistralConfig(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
                                 rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=5,
                                 layer_types=["full_attention", "sliding_attention", "sliding_attention"],
                                 rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                                 **COMMON | {"num_hidden_layers": 3}),
    # Qwen2.5 from 7B: biases of q, k and v, grouped queries
    "qwen2": Qwen2Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6,
                         tie_word_embeddings=False, use_sliding_window=False,
                         rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, **COMMON),
    # Qwen2.5 up to 3B: tied; here with a window from the second layer on
    "qwen2-tied": Qwen2Config(hidden_size=48, intermediate_size=48, num_attention_heads=6, num_key_value_heads=2, rms_norm_eps=1e-6,
                              tie_word_embeddings=True, use_sliding_window=True, sliding_window=5, max_window_layers=1,
                              rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
                              **COMMON | {"num_hidden_layers": 3}),
    # SmolLM3: every third layer without rotary embedding, tied
    "smollm3": SmolLM3Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6,
                             tie_word_embeddings=True, no_rope_layer_interval=3,
                             rope_parameters={"rope_type": "default", "rope_theta": 5000000.0},
                             **COMMON | {"num_hidden_layers": 4}),
}


def randomize(model, generator):
    """Weights that make every part of the model matter: unit-scale projections and biases, norm weights that differ from 1."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise if "bias" in name else 1 + 0.2 * noise if p.dim() == 1 else noise / p.shape[1] ** 0.5)


def check_clipping(model, tokens, limit):
    """A clamp that never acts would prove nothing."""
    seen = []
    record = lambda module, args, y: seen.append((y.abs() > limit).float().mean())
    hooks = [layer.self_attn.q_proj.register_forward_hook(record) for layer in model.model.layers]
    with torch.no_grad():
        model(tokens)
    for hook in hooks:
        hook.remove()
    share = torch.stack(seen).mean().item()
    assert 0.1 < share < 0.9, f"{share:.2f} of q is clipped"


def check_matters(model, tokens, **change):
    """A window or a scaling that changes nothing would prove nothing."""
    config = type(model.config).from_dict(copy.deepcopy(model.config.to_dict()) | change)
    config._attn_implementation = "eager"
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        off = (other(tokens).logits - model(tokens).logits).abs().max().item()
    assert off > 0.1, f"{change} changes no logit by more than {off:.2g}"


def check_biases(model, tokens):
    """A bias that adds nothing would prove nothing."""
    with torch.no_grad():
        logits = model(tokens).logits
        for name, p in model.named_parameters():
            if not name.endswith(".bias"):
                continue
            before = p.clone()
            p.zero_()
            off = (model(tokens).logits - logits).abs().max().item()
            p.copy_(before)
            assert off > 0.1, f"without {name} no logit changes by more than {off:.2g}"


def mean_loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100)


def parameter_groups(named, decayed=DECAY):
    """OLMo's groups: norms, biases and the embedding are not decayed."""
    decay = [p for n, p in named if p.dim() == 2 and "embed_tokens" not in n]
    rest = [p for n, p in named if p.dim() == 1 or "embed_tokens" in n]
    return [{"params": decay, "weight_decay": decayed}, {"params": rest, "weight_decay": 0.0}]


def adamw(groups):
    return torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS, foreach=False)


def train(logits, targets, parameters, *optimizers):
    """The losses of the steps, each before it. logits: a function; parameters: those that are trained."""
    losses, parameters = [], list(parameters)
    for _ in range(STEPS):
        loss = mean_loss(logits(), targets)
        for p in parameters:
            p.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=False)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def save(tensors, folder, name):
    """Writes folder/golden.safetensors, and a line of what the script prints."""
    save_file({n: t.contiguous() for n, t in tensors.items()}, os.path.join(folder, "golden.safetensors"))
    print(f"{name}: loss {tensors['loss'].item():.4f}, losses", *(f"{x:.3f}" for x in tensors["losses"]))


def make(name, config, folder, seed):
    generator = torch.Generator().manual_seed(seed)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, generator)
    model.save_pretrained(folder, max_shard_size="100KB" if name == "olmo2" else "5GB")

    tokens = torch.randint(0, config.vocab_size, (B, T), generator=generator)
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    targets[1, 5] = -100
    if getattr(config, "clip_qkv", None):
        check_clipping(model, tokens, config.clip_qkv)
    window = getattr(config, "sliding_window", None)
    if window:                              # exactly as many tokens as its name says
        check_matters(model, tokens, sliding_window=window + 1)
        check_matters(model, tokens, sliding_window=window - 1)
    check_biases(model, tokens)
    if name == "ministral":
        check_matters(model, tokens, layer_types=config.layer_types[::-1])
    if name == "smollm3":
        check_matters(model, tokens, no_rope_layers=[1, 1, 1, 1])
        check_matters(model, tokens, no_rope_layers=[1, 0, 1, 1])
    if name == "olmo3":                     # scaled in some layers: neither in none nor in all
        rope = config.rope_parameters
        check_matters(model, tokens, rope_parameters=rope | {"full_attention": rope["sliding_attention"]})
        check_matters(model, tokens, rope_parameters=rope | {"sliding_attention": rope["full_attention"]})

    logits = model(tokens).logits
    loss = mean_loss(logits, targets)
    loss.backward()
    golden = {"tokens": tokens.int(), "targets": targets.int(), "logits": logits.detach(), "loss": loss.detach()}
    golden |= {"grad." + n: p.grad.clone() for n, p in model.named_parameters()}
    named = list(model.named_parameters())
    golden["losses"] = train(lambda: model(tokens).logits, targets, model.parameters(), adamw(parameter_groups(named)))
    golden["adamw"] = torch.tensor([LR, BETA1, BETA2, EPS, DECAY])
    save(golden, folder, name)


def main():
    root = golden_folder(__doc__, os.path.join(os.path.dirname(__file__), "..", "tests", "golden"))
    for seed, (name, config) in enumerate(MODELS.items()):
        folder = os.path.join(root, name)
        os.makedirs(folder, exist_ok=True)
        make(name, config, folder, seed)


if __name__ == "__main__":
    main()
