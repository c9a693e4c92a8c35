#!/usr/bin/env python3
"""Reference results of adapters for the models with images of golden_llava.py, computed by PEFT from pixels.

    python3 scripts/golden_llava_lora.py [folder]        # default: tests/golden; from the repository's root

For each model in folder/<name>, folder/lora/<name> gets an adapter of the language model with random A and B, saved by PEFT's
save_pretrained, and golden.safetensors as golden_lora.py makes it, also with the base's features (golden_llava.py). Where
modules_to_save names the projector, PEFT trains all of it, too, and saves it in adapter_model.safetensors; its values differ from
the base's. In AdamW its biases are not decayed. tests/test_parity.c compares. Needs torch, transformers 5 and peft.
"""
import os

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import LlavaForConditionalGeneration

import golden
from golden_folder import golden_folder
from golden_llava import in_files
from golden_lora import scale_of

PROJECTOR = "multi_modal_projector"
SETTINGS = {
    "llava-llama": dict(r=4, lora_alpha=8, modules_to_save=[PROJECTOR],
                        target_modules=r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"),
    "llava-mistral": dict(r=2, lora_alpha=3, use_rslora=True, modules_to_save=[PROJECTOR],
                          target_modules=r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.(?:q_proj|v_proj|down_proj)"),
    "llava-qwen3-tied": dict(r=4, lora_alpha=4, target_modules=r".*language_model.*\.(k_proj|o_proj|gate_proj)"),
}


def trained(model):
    """What is trained, under the names of adapter_model.safetensors."""
    return {n.replace(".modules_to_save.default.", ".").replace(".default.", "."): p for n, p in model.named_parameters()
            if p.requires_grad}


def randomize(model, generator):
    """A, B that add half the size of the product of their matrix; a projector that is not the base's."""
    with torch.no_grad():
        for name, p in trained(model).items():
            noise = torch.randn(p.shape, generator=generator)
            if PROJECTOR in name:
                p.add_(0.3 * noise * (p.shape[1] ** -0.5 if p.dim() == 2 else 1))
            else:
                p.copy_(noise * (p.shape[1] ** -0.5 if "lora_A" in name else 0.5 * p.shape[1] ** -0.5 / scale_of(model)))


def train(model, batch):
    named = trained(model)
    groups = [{"params": [p for p in named.values() if p.dim() == 2], "weight_decay": golden.DECAY},
              {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=golden.LR, betas=(golden.BETA1, golden.BETA2), eps=golden.EPS, foreach=False)
    losses = []
    for _ in range(golden.STEPS):
        loss = golden.mean_loss(logits_of(model, batch), batch["targets"].long())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(named.values()), golden.CLIP, foreach=False)
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def logits_of(model, batch):
    return model(input_ids=batch["tokens"].long(), pixel_values=batch["pixels"]).logits


def merged_rows(model, base):
    """First and last row of each matrix that training changes, under its name in files."""
    merged = model.merge_and_unload().state_dict()
    return {"merged." + in_files(n): merged[n][[0, -1]] for n in base if base[n].dim() == 2 and not torch.equal(merged[n], base[n])}


def make(name, root, seed):
    base = os.path.join(root, name)
    batch = load_file(os.path.join(base, "golden.safetensors"))
    original = LlavaForConditionalGeneration.from_pretrained(base, dtype=torch.float32, attn_implementation="eager").eval()
    weights = {n: w.clone() for n, w in original.state_dict().items()}
    assert (logits_of(original, batch) - batch["logits"]).abs().max() < 1e-4, "the base computes something else"
    model = get_peft_model(original, LoraConfig(task_type="CAUSAL_LM", **SETTINGS[name])).eval()
    randomize(model, torch.Generator().manual_seed(2000 + seed))
    start = {n: p.detach().clone() for n, p in trained(model).items()}
    assert start.keys() == get_peft_model_state_dict(model).keys()
    logits = logits_of(model, batch)
    assert (logits - batch["logits"]).abs().max() > 0.1, "the adapters change no logit"
    loss = golden.mean_loss(logits, batch["targets"].long())
    loss.backward()
    out = {n: batch[n] for n in ("tokens", "targets", "adamw", "features")}
    out |= {"logits": logits.detach(), "loss": loss.detach()} | {"grad." + n: p.grad.clone() for n, p in trained(model).items()}
    out["losses"] = train(model, batch)
    out |= {"trained." + n: p.detach().clone() for n, p in trained(model).items()}
    with torch.no_grad():
        for n, p in trained(model).items():
            p.copy_(start[n])
    folder = os.path.join(root, "lora", name)
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    out |= merged_rows(model, weights)
    save_file({n: t.contiguous() for n, t in sorted(out.items())}, os.path.join(folder, "golden.safetensors"))
    print(f"{name}: losses", *(f"{x:.3f}" for x in out["losses"]))


def main():
    root = golden_folder(__doc__, "tests/golden")
    for seed, name in enumerate(SETTINGS):
        make(name, root, seed)


if __name__ == "__main__":
    main()
