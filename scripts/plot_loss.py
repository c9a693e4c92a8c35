#!/usr/bin/env python3
"""Draws the loss curves of runs: training loss, smoothed, and the validation losses.

    python3 scripts/plot_loss.py runs/bf16 runs/coat --output loss.png [--smooth 50] [--tokens]

Prints each run's final losses: the mean of the last --smooth steps, and the last evaluations. Needs matplotlib and
numpy.
"""
import argparse, json, os, sys

import numpy as np
import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt

TRAIN = "train/CrossEntropyLoss"


def read(folder):
    """Steps, tokens and training losses; and for each evaluation set its steps and losses."""
    path = os.path.join(folder, "metrics.jsonl")
    try:
        with open(path, encoding="utf-8") as file:
            lines = [json.loads(line) for line in file]
    except OSError as error:
        sys.exit(f"error: {path}: {error.strerror}; give the save_folder of a run")
    train = [(l["step"], l["throughput/total_tokens"], l[TRAIN]) for l in lines if l.get(TRAIN) is not None]
    if not train:
        sys.exit(f"error: {path} has no training losses yet")
    sets = {}
    for line in lines:
        for name, loss in line.items():
            if name.startswith("eval/") and name.endswith("/CrossEntropyLoss") and loss is not None:
                sets.setdefault(name.split("/", 2)[1], []).append((line["step"], loss))
    return np.array(train), {name: np.array(points) for name, points in sets.items()}


def smooth(x, n):
    """Mean of the last n values, fewer at the start."""
    total = np.concatenate([[0], np.cumsum(x)])
    end = np.arange(1, len(x) + 1)
    start = np.maximum(end - n, 0)
    return (total[end] - total[start]) / (end - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="save_folder of each run; its last part is the label")
    parser.add_argument("--output", default="loss.png", help="the picture")
    parser.add_argument("--smooth", type=int, default=20, help="steps that the training loss is averaged over")
    parser.add_argument("--tokens", action="store_true", help="tokens, not steps, on the axis")
    args = parser.parse_args()
    if args.smooth < 1:
        sys.exit("error: --smooth counts steps: at least 1")

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for i, folder in enumerate(args.folders):
        label, color = os.path.basename(os.path.normpath(folder)), f"C{i}"
        train, sets = read(folder)
        x, tokens_per_step = train[:, 1 if args.tokens else 0], train[-1, 1] / train[-1, 0]
        curve = smooth(train[:, 2], args.smooth)
        left.plot(x, train[:, 2], color=color, alpha=0.15, linewidth=0.7)
        left.plot(x, curve, color=color, linewidth=1.2, label=label)
        text = f"{label}: step {int(train[-1, 0])}, training {curve[-1]:.4f}"
        for j, (name, points) in enumerate(sets.items()):
            at = points[:, 0] * (tokens_per_step if args.tokens else 1)
            right.plot(at, points[:, 1], color=color, marker=".", linestyle=["-", "--", ":", "-."][j % 4],
                       label=f"{label}, {name}")
            text += f", {name} {points[-1, 1]:.4f}"
        print(text)
    unit = "tokens" if args.tokens else "step"
    left.set(title=f"training loss, mean of {args.smooth} steps", xlabel=unit, ylabel="cross entropy")
    right.set(title="validation loss", xlabel=unit, ylabel="cross entropy")
    for ax in (left, right):
        ax.grid(alpha=0.3)
        if ax.lines:
            ax.legend()
    figure.savefig(args.output, dpi=110)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
