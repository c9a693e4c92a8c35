#!/usr/bin/env python3
"""Draws the loss curves of runs: smoothed training loss, its difference from the first run, and validation losses.

    python3 scripts/plot_loss.py runs/bf16 runs/coat --output loss.png [--smooth 50] [--tokens]

Prints the final losses of each run: the mean of the last --smooth steps, and the last evaluations. Needs matplotlib and
numpy.
"""
import argparse, os, sys

try:
    import numpy as np
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install matplotlib numpy")

import errors, metrics

TRAIN = "train/CrossEntropyLoss"


def read(folder):
    """Steps, tokens and training losses; and for each evaluation set its steps and losses."""
    lines = metrics.read(folder)
    train = [(l["step"], l["throughput/total_tokens"], l[TRAIN]) for l in lines if l.get(TRAIN) is not None]
    if not train:
        sys.exit(f"error: {folder}/metrics.jsonl has no training losses yet")
    sets = {}
    for line in lines:
        for name, loss in line.items():
            if name.startswith("eval/") and name.endswith("/CrossEntropyLoss") and loss is not None:
                sets.setdefault(name[len("eval/"):-len("/CrossEntropyLoss")], []).append((line["step"], loss))
    return np.array(train), {name: np.array(points) for name, points in sets.items()}


def smooth(x, n):
    """Mean of the last n values, fewer at the start."""
    total = np.concatenate([[0], np.cumsum(x)])
    end = np.arange(1, len(x) + 1)
    start = np.maximum(end - n, 0)
    return (total[end] - total[start]) / (end - start)


def labels_of(folders):
    """The last part of each path, or as many parts as make them different."""
    parts = [os.path.normpath(folder).split(os.sep) for folder in folders]
    longest = max(len(p) for p in parts)
    for count in range(1, longest + 1):
        labels = ["/".join(p[-count:]) for p in parts]
        if len(set(labels)) == len(set(map(tuple, parts))):
            break
    return labels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="save_folder of each run, which names it")
    parser.add_argument("--output", default="loss.png", help="the picture")
    parser.add_argument("--smooth", type=int, default=20, help="average the training loss over this many steps")
    parser.add_argument("--tokens", action="store_true", help="tokens instead of steps on the axis")
    args = parser.parse_args()
    if args.smooth < 1:
        sys.exit("error: --smooth counts steps: at least 1")

    several = len(args.folders) > 1
    figure, axes = plt.subplots(1, 2 + several, figsize=(13, 4 if several else 5), layout="constrained")
    left, right = axes[0], axes[-1]
    first = {}      # the first run's curve: value by step
    labels, styles = labels_of(args.folders), {}
    for i, (folder, label) in enumerate(zip(args.folders, labels)):
        color = f"C{i % 10}"
        train, sets = read(folder)
        x = train[:, 1] / 1e6 if args.tokens else train[:, 0]
        tokens_per_step = train[-1, 1] / 1e6 / train[-1, 0]
        curve = smooth(train[:, 2], args.smooth)
        left.plot(x, train[:, 2], color=color, alpha=0.15, linewidth=0.7)
        left.plot(x, curve, color=color, linewidth=1.2, label=label)
        if i == 0:
            first = dict(zip(train[:, 0], curve))
        else:
            both = np.array([step in first for step in train[:, 0]])
            axes[1].plot(x[both], curve[both] - [first[step] for step in train[both, 0]], color=color, linewidth=1.2)
        text = f"{label}: step {int(train[-1, 0])}, training {curve[-1]:.4f}"
        for name, points in sets.items():
            at = points[:, 0] * (tokens_per_step if args.tokens else 1)
            style = styles.setdefault(name, ["-", "--", ":", "-."][len(styles) % 4])
            right.plot(at, points[:, 1], color=color, marker=".", linestyle=style)
            text += f", {name} {points[-1, 1]:.4f}"
        print(text)
    unit = "tokens, millions" if args.tokens else "step"
    left.set(title=f"training loss, mean of {args.smooth} steps", xlabel=unit, ylabel="cross entropy")
    right.set(title="validation loss", xlabel=unit, ylabel="cross entropy")
    if several:
        axes[1].set(title=f"difference from {labels[0]}", xlabel=unit, ylabel="cross entropy")
    for ax in axes:
        ax.grid(alpha=0.3)
    # Below the panels, where no curve is; one entry per run, and per evaluation set its kind of line.
    handles = left.get_legend_handles_labels()[0]
    handles += [plt.Line2D([], [], color="black", linestyle=style, label=name) for name, style in styles.items()]
    columns = max(1, 130 // (8 + max(len(h.get_label()) for h in handles)))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))
    errors.save(figure, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
