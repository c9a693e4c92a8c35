#!/usr/bin/env python3
"""Draws the effects of FP8 in a run with --quant_stats_interval=N, as in the figures of the COAT paper.

    python3 scripts/plot_quantization.py runs/tiny [--output quantization.png]

Panels: the dynamic range of the groups of m and v before and after expansion, and the distribution of k, at the last step
that has them; the relative error of m/(sqrt(v)+eps) if m and v were stored in E4M3 or E5M2, with (+) and without
expansion, and of the activations, as medians over all steps. Prints the errors as tables. Needs matplotlib and numpy.
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

FORMATS = ["e4m3", "e4m3+", "e5m2", "e5m2+"]
COLORS = ["#c44e52", "#55a868", "#dd8452", "#4c72b0"]


def read(folder):
    """The lines of metrics.jsonl that have statistics."""
    lines = [line for line in metrics.read(folder) if "quant/optimizer/m/k" in line]
    if not lines:
        sys.exit(f"error: {folder}/metrics.jsonl has no quantization statistics: train with --quant_stats_interval=100, for "
                 "example")
    return lines


def median(lines, name):
    return float(np.median([line[name] for line in lines if line.get(name) is not None] or [np.nan]))


def update_errors(lines, statistic):
    """(4, 4): format of m, format of v."""
    name = "quant/optimizer/update/{}/{}/" + statistic
    return np.array([[median(lines, name.format(m, v)) for v in FORMATS] for m in FORMATS])


def print_tables(lines):
    typical, rms = update_errors(lines, "typical_error"), update_errors(lines, "error")
    print(f"Relative error of m/(sqrt(v)+eps), % (medians of {len(lines)} steps; geometric mean over matrices, in "
          "brackets\nroot mean square); rows: format of m, columns: of v")
    print(" " * 8 + "".join(f"{v:>18}" for v in FORMATS))
    for m, a, b in zip(FORMATS, typical, rms):
        print(f"{m:8}" + "".join(f"{f'{100 * x:.2f} ({100 * y:.3g})':>18}" for x, y in zip(a, b)))
    print(f"Expansion divides it by {typical[0, 0] / typical[1, 1]:.2f} for E4M3 and by "
          f"{typical[2, 2] / typical[3, 3]:.2f} for E5M2 (root mean square: {rms[0, 0] / rms[1, 1]:.3g} and "
          f"{rms[2, 2] / rms[3, 3]:.3g})\n")
    print("Relative error of the moments in the same formats, % (values other than 0 that are stored as 0, %)")
    for moment in "mv":
        error, lost = ([100 * median(lines, f"quant/optimizer/{moment}/{f}/{what}") for f in FORMATS]
                       for what in ("error", "underflow"))
        print(f"{moment:8}" + "".join(f"{f'{x:.2f} ({y:.3g})':>18}" for x, y in zip(error, lost)))


def bars(ax, counts, start, width, **style):
    n = np.array(counts, dtype=float)
    ax.bar(start + width * np.arange(len(n)), n / n.sum(), width, align="edge", **style)


def plot_ranges(ax, line, moment):
    bars(ax, line[f"quant/optimizer/{moment}/log2_range"], 0, 1, color=COLORS[0], alpha=0.7, label="before expansion")
    bars(ax, line[f"quant/optimizer/{moment}/log2_range_expanded"], 0, 1, color=COLORS[1], alpha=0.7, label="after")
    ax.axvline(np.log2(448 / 2**-9), color="black", linestyle="--", linewidth=1, label="E4M3: 448 / 2$^{-9}$")
    ax.set(title=f"dynamic range of {moment}, groups of 128", xlabel="log$_2$(max / min)", ylabel="share of groups")
    ax.legend()


def plot_k(ax, line):
    for moment, color in zip("mv", COLORS[1::2]):
        bars(ax, line[f"quant/optimizer/{moment}/k"], 0, 1 / 16, color=color, alpha=0.7, label=moment)
    ax.set(title="power of the expansion", xlabel="k", ylabel="share of groups", xlim=(0, 6))
    ax.legend()


def plot_update(ax, lines):
    error = 100 * update_errors(lines, "typical_error")
    for j, v in enumerate(FORMATS):
        bar = ax.bar(np.arange(4) + (j - 1.5) * 0.2, error[:, j], 0.2, color=COLORS[j], label=f"v in {v}")
        ax.bar_label(bar, fmt="%.3g", fontsize=7)
    ax.set(title="error of m/($\\sqrt{v}$+eps), typical matrix", ylabel="relative error, %")
    ax.set_xticks(np.arange(4), [f"m in {m}" for m in FORMATS])
    ax.legend(ncols=2)


def plot_activations(ax, lines):
    names = [n.split("/") for n in lines[-1] if n.startswith("quant/") and n.endswith("/error")]
    for kind in dict.fromkeys(n[1] for n in names if n[1] not in ("m", "v", "update", "optimizer")):
        layers = sorted(int(n[2]) for n in names if n[1] == kind)
        ax.plot(layers, [100 * median(lines, f"quant/{kind}/{i}/error") for i in layers], marker=".", label=kind)
    ax.set(title="error of the activations in FP8", xlabel="block", ylabel="relative error, %")
    if ax.lines:
        ax.set_ylim(0, 1.1 * max(line.get_ydata().max() for line in ax.lines))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.legend(ncols=2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="save_folder of the run")
    parser.add_argument("--output", help="the picture; default folder/quantization.png")
    args = parser.parse_args()
    lines = read(args.folder)
    print_tables(lines)
    figure, ax = plt.subplot_mosaic("ABC;DDE", figsize=(15, 8), layout="constrained")
    for panel, moment in zip("AB", "mv"):
        plot_ranges(ax[panel], lines[-1], moment)
    plot_k(ax["C"], lines[-1])
    plot_update(ax["D"], lines)
    plot_activations(ax["E"], lines)
    figure.suptitle(f"{os.path.basename(os.path.normpath(args.folder))}, step {lines[-1]['step']}")
    args.output = args.output or os.path.join(args.folder, "quantization.png")
    errors.save(figure, args.output)
    print(f"\nwrote {args.output}")


if __name__ == "__main__":
    main()
