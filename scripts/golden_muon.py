#!/usr/bin/env python3
"""Reference results of Muon: torch.optim.Muon on a CPU.

    python3 scripts/golden_muon.py [folder]         # default: tests/golden/muon

steps.safetensors: the matrices q, k, v, o, gate, up and down of a block of width 32 with heads of width 16, two for q and one for
    k and v, and an MLP of width 48, in float32 after 8 steps:
    CASE.NAME (rows, columns)
Cases: `default`; `original`, with adjust_lr_fn original, another momentum without Nesterov's, and no weight decay; `heads`, as default
with each head of q, k and v as a matrix of its own. Matrix i of these begins as uniform(1000 i, .), and its gradient in step s (from
0) is uniform(1000 i + 1 + s, .): an integer hash that tests/test_muon_ranks.c has too. Needs torch 2.9 or later, and safetensors.
"""
import sys

import numpy as np
import torch
from safetensors.torch import save_file

MATRICES = [("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32), ("gate", 48, 32), ("up", 48, 32), ("down", 32, 48)]
HEAD = 16
DEFAULT = dict(lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
ORIGINAL = dict(lr=0.02, weight_decay=0.0, momentum=0.9, nesterov=False, adjust_lr_fn="original")
CASES = [("default", DEFAULT, False), ("original", ORIGINAL, False), ("heads", DEFAULT, True)]
STEPS = 8


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


def main():
    torch.set_num_threads(1)
    tensors = {}
    for case, settings, heads in CASES:
        for i, (name, rows, columns) in enumerate(MATRICES):
            tensors[f"{case}.{name}"] = train(i, rows, columns, settings, HEAD if heads and name in "qkv" else rows)
    folder = sys.argv[1] if len(sys.argv) > 1 else "tests/golden/muon"
    save_file(tensors, f"{folder}/steps.safetensors")


if __name__ == "__main__":
    main()
