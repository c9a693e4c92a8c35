#!/usr/bin/env python3
"""Reference results of adapters for the models of golden.py and golden_llava.py, computed by PEFT, for images from pixels.

    python3 scripts/golden_lora.py [folder]        # default: tests/golden; from the repository's root

For each model of these in folder/<name>, folder/lora/<name> gets an adapter with random A and B, saved by PEFT's save_pretrained
(adapter_config.json, adapter_model.safetensors), and golden.safetensors with the results of float32 on a CPU:
    tokens, targets, adamw   as in the model's own golden.safetensors; of a model with images also features
    logits (B, T, vocab), loss ()
    grad.<tensor>            gradients of what is trained, under the names of adapter_model.safetensors
    losses (8)               of 8 AdamW steps, with golden.py's settings; biases are not decayed
    trained.<tensor>         its values after them
    merged.<tensor>          first and last row of each matrix that training changes, after merge_and_unload with the random values
Where modules_to_save names the projector, PEFT trains all of it, too, and saves it in adapter_model.safetensors; its values differ
from the base's. tests/test_parity.c compares. Needs torch, transformers 5 and peft.
"""
import json
import os

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlavaForConditionalGeneration

import golden
from golden import DECAY, mean_loss
from golden_folder import golden_folder
from golden_llava import in_files

PROJECTOR = "multi_modal_projector"
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SETTINGS = {           # in the order of golden.MODELS, since the place is the seed
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
    "qwen2-tied": dict(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj", "up_proj"]),
    "smollm3": dict(r=2, lora_alpha=4, target_modules=["q_proj", "k_proj", "o_proj"]),
}
IMAGE_SETTINGS = {
    "llava-llama": dict(r=4, lora_alpha=8, modules_to_save=[PROJECTOR],
                        target_modules=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"),
    "llava-mistral": dict(r=2, lora_alpha=3, use_rslora=True, modules_to_save=[PROJECTOR],
                          target_modules=r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.(?:q_proj|v_proj|down_proj)"),
    "llava-qwen3-tied": dict(r=4, lora_alpha=4, target_modules=r".*language_model.*\.(k_proj|o_proj|gate_proj)"),
}


def scale_of(model):
    config = model.peft_config["default"]
    return config.lora_alpha / (config.r ** 0.5 if config.use_rslora else config.r)


def trained(model):
    """What is trained, under the names of adapter_model.safetensors."""
    return {n.replace(".modules_to_save.default.", ".").replace(".default.", "."): p for n, p in model.named_parameters()
            if p.requires_grad}


def randomize(model, generator):
    """A, B that make every adapter matter: it adds half the size of the product of its matrix, which has unit scale; and a
    projector that is not the base's."""
    with torch.no_grad():
        for name, p in trained(model).items():
            noise = torch.randn(p.shape, generator=generator)
            if PROJECTOR in name:
                p.add_(0.3 * noise * (p.shape[1] ** -0.5 if p.dim() == 2 else 1))
            else:
                p.copy_(noise * (p.shape[1] ** -0.5 if "lora_A" in name else 0.5 * p.shape[1] ** -0.5 / scale_of(model)))


def logits_of(model, batch):
    pictures = {"pixel_values": batch["pixels"]} if "pixels" in batch else {}
    return model(input_ids=batch["tokens"].long(), **pictures).logits


def check_matters(model, batch):
    """An adapter that changes nothing would prove nothing."""
    with torch.no_grad():
        logits = logits_of(model, batch)
        for name, p in trained(model).items():
            before = p.clone()
            p.zero_()
            off = (logits_of(model, batch) - logits).abs().max().item()
            p.copy_(before)
            assert off > 1e-2, f"without {name} logits change by {off:.2g} only"


def train(model, batch):
    named = trained(model)
    groups = [{"params": [p for p in named.values() if p.dim() == d], "weight_decay": decay} for d, decay in ((2, DECAY), (1, 0.0))]
    return golden.train(lambda: logits_of(model, batch), batch["targets"].long(), named.values(),
                        golden.adamw([g for g in groups if g["params"]]))


def merged_rows(model, base):
    """First and last row of each matrix that training changes, under its name in files."""
    merged = model.merge_and_unload().state_dict()
    return {"merged." + in_files(n): merged[n][[0, -1]] for n in base if base[n].dim() == 2 and not torch.equal(merged[n], base[n])}


def save_adapters(model, folder):
    """As PEFT saves them, but without the model card, and with a list of target_modules, a set there, in a fixed order."""
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    path = os.path.join(folder, "adapter_config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2)
            file.write("\n")


def make(name, kind, settings, root, seed):
    base = os.path.join(root, name)
    batch = load_file(os.path.join(base, "golden.safetensors"))
    original = kind.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    weights = {n: w.clone() for n, w in original.state_dict().items()}
    with torch.no_grad():
        assert (logits_of(original, batch) - batch["logits"]).abs().max() < 1e-4, "the base computes something else"
    model = get_peft_model(original, LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    randomize(model, torch.Generator().manual_seed(seed))
    check_matters(model, batch)
    start = {n: p.detach().clone() for n, p in trained(model).items()}
    assert start.keys() == get_peft_model_state_dict(model).keys()

    logits = logits_of(model, batch)
    loss = mean_loss(logits, batch["targets"].long())
    loss.backward()
    out = {n: batch[n] for n in ("tokens", "targets", "adamw", "features") if n in batch}
    out |= {"logits": logits.detach(), "loss": loss.detach()} | {"grad." + n: p.grad.clone() for n, p in trained(model).items()}
    out["losses"] = train(model, batch)
    out |= {"trained." + n: p.detach().clone() for n, p in trained(model).items()}
    with torch.no_grad():
        for n, p in trained(model).items():
            p.copy_(start[n])
    folder = os.path.join(root, "lora", name)
    os.makedirs(folder, exist_ok=True)
    save_adapters(model, folder)
    golden.save(dict(sorted((out | merged_rows(model, weights)).items())), folder, name)


def main():
    root = golden_folder(__doc__, "tests/golden")
    for kind, table, first in ((AutoModelForCausalLM, SETTINGS, 1000), (LlavaForConditionalGeneration, IMAGE_SETTINGS, 2000)):
        for seed, (name, settings) in enumerate(table.items()):
            make(name, kind, settings, root, first + seed)


if __name__ == "__main__":
    main()
