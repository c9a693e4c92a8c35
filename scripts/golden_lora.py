#!/usr/bin/env python3
"""Reference results of adapters for the models of golden.py, computed by PEFT.

    python3 scripts/golden_lora.py [folder]        # default: tests/golden; from the repository's root

For each model that golden.py made in folder/<name>, folder/lora/<name> gets an adapter with random A and B, saved by PEFT's
save_pretrained (adapter_config.json, adapter_model.safetensors), and golden.safetensors with the results of float32 on a CPU:
    tokens, targets, adamw   as in the model's own golden.safetensors
    logits (B, T, vocab), loss ()
    grad.<tensor>            gradients of A and B, under the names of adapter_model.safetensors
    losses (8)               of 8 AdamW steps of A and B, with golden.py's settings; all are decayed
    trained.<tensor>         A and B after them
    merged.<tensor>          first and last row of each matrix that has an adapter, after merge_and_unload with the random A, B
tests/test_parity.c compares. Needs torch, transformers and peft.
"""
import json
import os

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from golden import BETA1, BETA2, CLIP, DECAY, EPS, LR, MODELS, STEPS, mean_loss
from golden_folder import golden_folder

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {
    "llama": dict(r=4, lora_alpha=8, target_modules="all-linear"),        # PEFT saves the name of every matrix
    "llama-gqa-tied": dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "down_proj"]),
    "llama-head-dim": dict(r=4, lora_alpha=6, use_rslora=True, target_modules=ALL),
    "olmo": dict(r=4, lora_alpha=8, target_modules=ALL),
    "olmo2": dict(r=2, lora_alpha=4, target_modules=ALL),
    "mistral": dict(r=4, lora_alpha=4, target_modules=["k_proj", "o_proj", "up_proj"]),
    "mistral-full": dict(r=8, lora_alpha=8, use_rslora=True, target_modules=["gate_proj", "q_proj", "k_proj"]),
    "qwen3": dict(r=4, lora_alpha=8, target_modules=ALL),
    "qwen3-tied": dict(r=2, lora_alpha=2, target_modules=["k_proj", "v_proj"]),
    "olmo3": dict(r=2, lora_alpha=5, target_modules=ALL),
    "olmo3-default": dict(r=2, lora_alpha=4, use_rslora=True, target_modules=["v_proj", "o_proj", "gate_proj", "down_proj"]),
    "ministral": dict(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj"]),
    "qwen2": dict(r=4, lora_alpha=8, target_modules=ALL),
    "smollm3": dict(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "o_proj"]),
    "qwen2-tied": dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "up_proj"]),
}


def randomize(model, generator):
    """A, B that make every adapter matter: it adds half the size of the product of its matrix, which has unit scale."""
    with torch.no_grad():
        for name, p in adapters(model).items():
            size = p.shape[1] ** -0.5 if "lora_A" in name else 0.5 * p.shape[1] ** -0.5 / scale_of(model)
            p.copy_(torch.randn(p.shape, generator=generator) * size)


def scale_of(model):
    config = model.peft_config["default"]
    return config.lora_alpha / (config.r ** 0.5 if config.use_rslora else config.r)


def adapters(model):
    """A and B under the names of adapter_model.safetensors."""
    return {n.replace(".default.", "."): p for n, p in model.named_parameters() if p.requires_grad}


def train(model, tokens, targets):
    parameters = list(adapters(model).values())
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, foreach=False)
    losses = []
    for _ in range(STEPS):
        loss = mean_loss(model(tokens).logits, targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=False)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_matters(model, tokens):
    """An adapter that changes nothing would prove nothing."""
    with torch.no_grad():
        logits = model(tokens).logits
        for name, p in adapters(model).items():
            before = p.clone()
            p.zero_()
            off = (model(tokens).logits - logits).abs().max().item()
            p.copy_(before)
            assert off > 1e-2, f"without {name} logits change by {off:.2g} only"


def merged_rows(model, base):
    """First and last row of each matrix that has an adapter, under the names of the base."""
    merged = model.merge_and_unload().state_dict()
    changed = {n for n in base if not torch.equal(merged[n], base[n])}
    return {"merged." + n: merged[n][[0, -1]] for n in changed}


def make(name, root, seed):
    """The model with its adapter, what is recorded of both, and the base's weights."""
    base = os.path.join(root, name)
    batch = load_file(os.path.join(base, "golden.safetensors"))
    tokens, targets = batch["tokens"].long(), batch["targets"].long()
    generator = torch.Generator().manual_seed(1000 + seed)
    original = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    weights = {n: w.clone() for n, w in original.state_dict().items()}
    model = get_peft_model(original, LoraConfig(task_type="CAUSAL_LM", **SETTINGS[name])).eval()
    randomize(model, generator)
    check_matters(model, tokens)
    start = {n: p.detach().clone() for n, p in adapters(model).items()}
    assert start.keys() == get_peft_model_state_dict(model).keys()

    logits = model(tokens).logits
    loss = mean_loss(logits, targets)
    loss.backward()
    golden = {n: batch[n] for n in ("tokens", "targets", "adamw")} | {"logits": logits.detach(), "loss": loss.detach()}
    golden |= {"grad." + n: p.grad.clone() for n, p in adapters(model).items()}
    golden["losses"] = torch.tensor(train(model, tokens, targets))
    golden |= {"trained." + n: p.detach().clone() for n, p in adapters(model).items()}
    with torch.no_grad():
        for n, p in adapters(model).items():
            p.copy_(start[n])
    return model, golden, weights


def save(name, model, golden, weights, folder):
    """The adapter as PEFT saves it, but without the model card, and with target_modules, a set there, in a fixed order."""
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    path = os.path.join(folder, "adapter_config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config["target_modules"].sort()
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
        file.write("\n")
    golden |= merged_rows(model, weights)
    save_file({n: t.contiguous() for n, t in sorted(golden.items())}, os.path.join(folder, "golden.safetensors"))
    print(f"{name} on {config['base_model_name_or_path']}: losses", *(f"{x:.3f}" for x in golden["losses"]))


def main():
    root = golden_folder(__doc__, "tests/golden")
    for seed, name in enumerate(MODELS):
        folder = os.path.join(root, "lora", name)
        os.makedirs(folder, exist_ok=True)
        save(name, *make(name, root, seed), folder)


if __name__ == "__main__":
    main()
