#!/usr/bin/env python3
"""Draws the loss curves of runs and, in a second panel, their differences from the first run.

    python3 scripts/plot_loss.py runs/bf16 runs/coat --output loss.png [--smooth 50] [--tokens]
    python3 scripts/plot_loss.py runs/bf16 runs/coat --seeds 1 2 3 --output loss.png

Lines are training losses, points are validation losses. With --seeds the runs are runs/bf16-1, runs/bf16-2, ... as
scripts/compare.py --seeds names them. Then a line is the mean over seeds. In the second panel, a band around a line is the standard
error of the mean difference between runs of the same seed; the grey band is the standard deviation over the first run's seeds.
Prints the final losses of each run: the mean of the last --smooth steps, and the last evaluations. Needs matplotlib and numpy. The
picture is legible at 600 pixels.
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
    """Mean of the last n values; at the start, of all values so far."""
    total = np.concatenate([[0], np.cumsum(x)])
    end = np.arange(1, len(x) + 1)
    start = np.maximum(end - n, 0)
    return (total[end] - total[start]) / (end - start)


def labels_of(folders):
    """The last component of each path, or as many components as make the labels different."""
    parts = [os.path.normpath(folder).split(os.sep) for folder in folders]
    longest = max(len(p) for p in parts)
    for count in range(1, longest + 1):
        labels = ["/".join(p[-count:]) for p in parts]
        if len(set(labels)) == len(set(map(tuple, parts))):
            break
    return labels


def common(runs):
    """Steps that all these runs have, and their losses there: (runs, steps)."""
    steps = sorted(set.intersection(*(set(points[:, 0]) for points in runs)))
    return np.array(steps), np.array([[dict(points)[step] for step in steps] for points in runs])


def spread(x):
    """The standard deviation over seeds, for each step."""
    return x.std(axis=0, ddof=1) if len(x) > 1 else np.zeros(x.shape[1:])


class Group:
    """Runs with the same name and different seeds. Each has a curve (step, smoothed loss) and evaluation sets (step, loss)."""

    def __init__(self, label, folders, smoothing):
        self.label, self.curves, self.sets = label, [], []
        for folder in folders:
            train, sets = read(folder)
            self.tokens = train[-1, 1] / 1e6 / train[-1, 0]     # millions of tokens per step
            self.curves.append(np.column_stack([train[:, 0], smooth(train[:, 2], smoothing)]))
            self.sets.append(sets)
            text = f"{label if len(folders) == 1 else folder}: step {int(train[-1, 0])}, training {self.curves[-1][-1, 1]:.4f}"
            print(text + "".join(f", {name} {points[-1, 1]:.4f}" for name, points in sets.items()))

    def of_set(self, name):
        """Steps and losses of this set; empty if a run lacks it."""
        return [sets[name] for sets in self.sets] if all(name in sets for sets in self.sets) else []


def difference(runs, first):
    """Steps; mean over seeds of the differences between runs of the same seed; their standard error."""
    steps, losses = common([*runs, *first])
    differences = losses[:len(runs)] - losses[len(runs):]
    return steps, differences.mean(axis=0), spread(differences) / np.sqrt(len(runs))


def draw(top, bottom, group, first, color, scale, aside, markers):
    """scale: factor from steps to the horizontal axis; aside: shift of points, so that points of several groups do not cover
    each other."""
    steps, losses = common(group.curves)
    top.plot(steps * scale, losses.mean(axis=0), color=color, linewidth=1.3)
    for name, marker in markers.items():
        if group.of_set(name):
            steps, losses = common(group.of_set(name))
            top.plot(steps * scale, losses.mean(axis=0), color=color, marker=marker, linestyle="none", markersize=5)
    if bottom is None:
        return
    if group is first:
        steps, losses = common(group.curves)
        bottom.axhline(0, color=color, linewidth=1.3)
        bottom.fill_between(steps * scale, -spread(losses), spread(losses), color="grey", alpha=0.25, linewidth=0)
        return
    steps, mean, error = difference(group.curves, first.curves)
    bottom.plot(steps * scale, mean, color=color, linewidth=1.3)
    bottom.fill_between(steps * scale, mean - error, mean + error, color=color, alpha=0.2, linewidth=0)
    for name, marker in markers.items():
        if group.of_set(name) and first.of_set(name):
            steps, mean, error = difference(group.of_set(name), first.of_set(name))
            bottom.errorbar(steps * scale + aside, mean, error, color=color, marker=marker, linestyle="none", markersize=5,
                            capsize=3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="save_folder of each run, which names it; with --seeds without -SEED")
    parser.add_argument("--output", default="loss.png", help="the picture")
    parser.add_argument("--smooth", type=int, default=20, help="average the training loss over this many steps")
    parser.add_argument("--tokens", action="store_true", help="tokens instead of steps on the axis")
    parser.add_argument("--seeds", nargs="+", help="seeds of the runs, the same for all folders")
    args = parser.parse_args()
    if args.smooth < 1:
        sys.exit("error: --smooth counts steps: at least 1")

    endings = [f"-{seed}" for seed in args.seeds] if args.seeds else [""]
    groups = [Group(label, [folder.rstrip("/") + ending for ending in endings], args.smooth)
              for folder, label in zip(args.folders, labels_of(args.folders))]
    several = len(groups) > 1
    figure, axes = plt.subplots(1 + several, 1, figsize=(6, 3.2 * (1 + several)), sharex=True, squeeze=False, layout="constrained")
    top, bottom = axes[0, 0], axes[1, 0] if several else None
    markers = dict(zip(dict.fromkeys(name for group in groups for sets in group.sets for name in sets), "osD^vP*X" * 99))
    for i, group in enumerate(groups):
        scale = group.tokens if args.tokens else 1
        draw(top, bottom, group, groups[0], f"C{i % 10}", scale, 0.01 * i * scale * group.curves[0][-1, 0], markers)
    top.set(title=f"loss: training (mean of {args.smooth} steps), points: validation", ylabel="cross entropy")
    if several:
        seeds = f", mean of {len(endings)} seeds and its standard error" if args.seeds else ""
        bottom.set(title=f"difference from {groups[0].label}{seeds}", ylabel="cross entropy")
    axes[-1, 0].set(xlabel="tokens, millions" if args.tokens else "step")
    for ax in axes[:, 0]:
        ax.grid(alpha=0.3)
    # The legend is below the panels, where no curve is. It has one entry per run, and the marker of each evaluation set.
    handles = [plt.Line2D([], [], color=f"C{i % 10}", label=group.label) for i, group in enumerate(groups)]
    handles += [plt.Line2D([], [], color="black", marker=marker, linestyle="none", label=name) for name, marker in markers.items()]
    if several and args.seeds:
        handles.append(plt.Rectangle((0, 0), 1, 1, color="grey", alpha=0.25,
                                     label=f"standard deviation of {groups[0].label}'s seeds"))
    columns = max(1, 100 // (6 + max(len(h.get_label()) for h in handles)))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(columns, len(handles)))
    errors.save(figure, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
