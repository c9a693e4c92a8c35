#!/usr/bin/env python3
"""Reference results of Muon: torch.optim.Muon on a CPU, of single matrices and of whole models of transformers.

    python3 scripts/golden_muon.py [folder]         # default: tests/golden

folder/muon/steps.safetensors: the matrices q, k, v, o, gate, up and down of a block of width 32 with heads of width 16, two for
    q and one for k and v, and an MLP of width 48, in float32 after 8 steps:
    CASE.NAME (rows, columns)
Cases: `default`; `original`, with adjust_lr_fn original, another momentum without Nesterov's, and no weight decay; `heads`, as
default with each head of q, k and v as a matrix of its own. Matrix i of these begins as uniform(1000 i, .), and its gradient in
step s (from 0) is uniform(1000 i + 1 + s, .): an integer hash that tests/test_muon_ranks.c has too.

folder/muon/NAME.safetensors, for each model that golden.py made in folder/NAME, with its batch: 8 steps of Muon for the matrices of
    its blocks and of AdamW for all else, with golden.py's settings and clipping, in float32:
    losses (8)               each before its step
    rows.<tensor>            after them, the first and the last row; of the embedding, the rows of the first two tokens
tests/test_parity.c compares. Needs torch 2.9 or later, transformers and safetensors.
"""
import os

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import golden
from golden import DECAY, LR, MODELS, STEPS, adamw, parameter_groups
from golden_folder import golden_folder

MATRICES = [("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32), ("gate", 48, 32), ("up", 48, 32), ("down", 32, 48)]
HEAD = 16
DEFAULT = dict(lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
ORIGINAL = dict(lr=0.02, weight_decay=0.0, momentum=0.9, nesterov=False, adjust_lr_fn="original")
CASES = [("default", DEFAULT, False), ("original", ORIGINAL, False), ("heads", DEFAULT, True)]


def uniform(seed, count):
    """Numbers in [-1/2, 1/2), multiples of 2^-24."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return ((x >> np.uint32(8)).astype(np.float64) * 2.0**-24 - 0.5).astype(np.float32)


def matrix(seed, rows, columns):
    return torch.from_numpy(uniform(seed, rows * columns).reshape(rows, columns).copy())


def train(i, rows, columns, settings, height):
    """Matrix i after its steps, as matrices of `height` rows."""
    parts = [torch.nn.Parameter(part.clone()) for part in matrix(1000 * i, rows, columns).split(height)]
    muon = torch.optim.Muon(parts, **settings)
    for step in range(STEPS):
        for part, grad in zip(parts, matrix(1000 * i + 1 + step, rows, columns).split(height)):
            part.grad = grad.clone()
        muon.step()
    return torch.cat([part.detach() for part in parts])


def is_matrix(name, p):
    return p.dim() == 2 and ".layers." in name


def optimizers(model):
    muon = {id(p) for n, p in model.named_parameters() if is_matrix(n, p)}
    groups = parameter_groups([(n, p) for n, p in model.named_parameters() if id(p) not in muon])
    matrices = [p for p in model.parameters() if id(p) in muon]
    return [adamw([g for g in groups if g["params"]]), torch.optim.Muon(matrices, **DEFAULT | dict(lr=LR, weight_decay=DECAY))]


def train_model(folder):
    batch = load_file(os.path.join(folder, "golden.safetensors"))
    tokens, targets = batch["tokens"].long(), batch["targets"].long()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = {"losses": golden.train(lambda: model(tokens).logits, targets, model.parameters(), *optimizers(model))}
    for name, p in model.named_parameters():
        rows = tokens[0, :2] if "embed_tokens" in name else [0, -1]
        found["rows." + name] = p.detach()[rows] if p.dim() == 2 else p.detach()
    return {n: t.contiguous() for n, t in found.items()}


def main():
    root = golden_folder(__doc__, os.path.join(os.path.dirname(__file__), "..", "tests", "golden"))
    tensors = {}
    for case, settings, heads in CASES:
        for i, (name, rows, columns) in enumerate(MATRICES):
            tensors[f"{case}.{name}"] = train(i, rows, columns, settings, HEAD if heads and name in "qkv" else rows)
    save_file(tensors, os.path.join(root, "muon", "steps.safetensors"))
    for name in MODELS:
        found = train_model(os.path.join(root, name))
        save_file(found, os.path.join(root, "muon", name + ".safetensors"))
        print(f"{name}: losses", *(f"{x:.3f}" for x in found["losses"]))


if __name__ == "__main__":
    main()
