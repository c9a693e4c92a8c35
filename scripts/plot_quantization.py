#!/usr/bin/env python3
"""Draws the effects of FP8 in a run, as in the figures of the COAT paper.

    python3 scripts/plot_quantization.py runs/tiny [--output quantization.png]

Panels on the newest checkpoint, whose moments must be F32 or BF16 (as with --recipe=bf16 or --format.moment1=f32
--format.moment2=f32): the dynamic range of the groups of m and v before and after dynamic range expansion; the distribution of k;
the relative error of m/(sqrt(v)+eps) if m and v were stored in E4M3 or E5M2, with (+) and without expansion. They use the first 64
groups of 128 of each matrix. Another panel shows the relative error of activations, as medians over all steps, of a run with
--quant_stats_interval=N. Prints the errors of moments as tables. Needs matplotlib and numpy.
"""
import argparse, glob, json, os, re, sys

try:
    import numpy as np
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install matplotlib numpy")

import errors, metrics

FORMATS = ["e4m3", "e4m3+", "e5m2", "e5m2+"]
CODES = {"e4m3": (3, -6, 448), "e5m2": (2, -14, 57344)}     # digits, exponent of the smallest normal value, largest value
COLORS = ["#c44e52", "#55a868", "#dd8452", "#4c72b0"]
GROUP, GROUPS = 128, 64


# ---- formats, as kernels/fp8.c has them ----

def rounded(x, name):
    """x, rounded to the nearest value of E4M3 or E5M2, ties to even; larger values become the largest value."""
    digits, least, most = CODES[name[:4]]
    unit = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - digits)
    return np.clip(np.rint(x / unit) * unit, -most, most)


def scale_above(x, bits):
    """The next float whose last bits are 0."""
    return ((x.astype(np.float32).view(np.uint32) + np.uint32((1 << bits) - 1)) >> bits << bits).view(np.float32).astype(float)


def expansion(x, name):
    """k of each group of x (groups, 128)."""
    size, most = np.abs(x), CODES[name[:4]][2]
    ratio = np.log2((size.max(1) + 1e-20) / (size.min(1) + 1e-20))
    steps = np.floor(np.log2(most ** 2 / 2) / np.maximum(ratio, 1e-9) * 16)
    return np.clip(steps, 1, 256) / 16


def stored(x, name):
    """x (groups, 128) as it is after a round trip through this format."""
    most = CODES[name[:4]][2]
    scale = scale_above(np.maximum(np.abs(x).max(1), 2.0 ** -90) / most, 7 if name.endswith("+") else 16)[:, None]
    if not name.endswith("+"):
        return rounded(x / scale, name) * scale
    k = expansion(x, name)[:, None]
    codes = rounded((np.abs(x) / (scale * most)) ** k * most, name)
    return np.sign(x) * (codes / most) ** (1 / k) * scale * most


def log2_range(x):
    """log2(max / min) of the values other than 0 of each group that has such values."""
    size = np.abs(x[(x != 0).any(1)])
    return np.log2(size.max(1) / np.where(size > 0, size, np.inf).min(1))


# ---- moments of a checkpoint ----

def read_tensors(path):
    """Names and values of the matrices in F32 and BF16."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begin = file.tell()
        for name, entry in header.items():
            if name != "__metadata__" and len(entry["shape"]) == 2 and entry["dtype"] in ("F32", "BF16"):
                first, end = entry["data_offsets"]
                file.seek(begin + first)
                raw = file.read(end - first)
                yield name, np.frombuffer(raw, "<f4") if entry["dtype"] == "F32" else \
                    (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4")


class Moments:
    """Moments of a checkpoint: (m, v) of each matrix in groups of 128, and the eps that is added to sqrt(v)."""

    def __init__(self, folder):
        found = {}
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "optimizer-*"))):
            for name, x in read_tensors(path):
                n = min(len(x) // GROUP, GROUPS) * GROUP
                if name.endswith((".exp_avg", ".exp_avg_sq")) and n:
                    weight, moment = name.rsplit(".", 1)
                    found.setdefault(weight, {})[moment] = x[:n].astype(float).reshape(-1, GROUP)
        self.pairs = [(both["exp_avg"], both["exp_avg_sq"]) for both in found.values() if len(both) == 2]
        if not self.pairs:
            sys.exit(f"error: {folder}: found no Adam moments of matrices in F32 or BF16; expected a checkpoint of a run with "
                     "--format.moment1=f32 --format.moment2=f32, for example")
        with open(os.path.join(folder, "config.yaml"), encoding="utf-8") as file:
            text = file.read()
        beta2, eps = (float(re.search(form, text).group(1)) for form in (r"betas: \[.*,\s*(\S+)\]", r"\n +eps: (\S+)"))
        with open(os.path.join(folder, "trainer.json"), encoding="utf-8") as file:
            self.eps = eps * np.sqrt(1 - beta2 ** json.load(file)["updates"])

    def groups(self, moment):
        return np.concatenate([pair[moment] for pair in self.pairs])

    def errors(self):
        """{"m", "v"}: errors (4 formats, matrices); "update": (4 formats of m, 4 of v, matrices)."""
        share = lambda q, x: np.linalg.norm(q - x) / np.linalg.norm(x)
        found = {name: [] for name in ("m", "v", "update")}
        for m, v in self.pairs:
            if m.any() and v.any():
                ms, vs = ([stored(x, name) for name in FORMATS] for x in (m, v))
                update = lambda m, v: m / (np.sqrt(v) + self.eps)
                found["m"].append([share(q, m) for q in ms])
                found["v"].append([share(q, v) for q in vs])
                found["update"].append([[share(update(a, b), update(m, v)) for b in vs] for a in ms])
        return {name: np.moveaxis(np.array(x), 0, -1) for name, x in found.items()}

    def underflow(self, moment):
        """The share of the values other than 0 that are stored as 0, in each format."""
        x = self.groups(moment)
        return [np.mean(stored(x, name)[x != 0] == 0) for name in FORMATS]


def typical(errors):
    """The geometric mean over matrices."""
    return np.exp(np.log(errors).mean(-1))


def rms(errors):
    return np.sqrt((errors ** 2).mean(-1))


def print_tables(moments, errors):
    mean, square = typical(errors["update"]), rms(errors["update"])
    print("Relative error of m/(sqrt(v)+eps), % (geometric mean over matrices, in brackets root mean square);\n"
          "rows: format of m, columns: of v")
    print(" " * 8 + "".join(f"{v:>18}" for v in FORMATS))
    for m, a, b in zip(FORMATS, mean, square):
        print(f"{m:8}" + "".join(f"{f'{100 * x:.2f} ({100 * y:.3g})':>18}" for x, y in zip(a, b)))
    print(f"Expansion divides it by {mean[0, 0] / mean[1, 1]:.2f} for E4M3 and by "
          f"{mean[2, 2] / mean[3, 3]:.2f} for E5M2 (root mean square: {square[0, 0] / square[1, 1]:.3g} and "
          f"{square[2, 2] / square[3, 3]:.3g})\n")
    print("Relative error of the moments in the same formats, % (values other than 0 that are stored as 0, %)")
    for i, moment in enumerate("mv"):
        print(f"{moment:8}" + "".join(f"{f'{100 * x:.2f} ({100 * y:.3g})':>18}"
                                      for x, y in zip(rms(errors[moment]), moments.underflow(i))))


def median(lines, name):
    return float(np.median([line[name] for line in lines if line.get(name) is not None] or [np.nan]))


def bars(ax, x, width, **style):
    n = np.bincount((x / width).astype(int))
    ax.bar(width * np.arange(len(n)), n / n.sum(), width, align="edge", **style)


def plot_ranges(ax, x, moment):
    kept = x[(x != 0).any(1)]
    bars(ax, log2_range(kept), 1, color=COLORS[0], alpha=0.7, label="before expansion")
    bars(ax, log2_range(kept) * expansion(kept, "e4m3"), 1, color=COLORS[1], alpha=0.7, label="after")
    ax.axvline(np.log2(448 / 2**-9), color="black", linestyle="--", linewidth=1, label="E4M3: 448 / 2$^{-9}$")
    ax.set(title=f"dynamic range of {moment}, groups of 128", xlabel="log$_2$(max / min)", ylabel="share of groups")
    ax.legend()


def plot_k(ax, moments):
    for i, color in enumerate(COLORS[1::2]):
        bars(ax, expansion(moments.groups(i), "e4m3"), 1 / 16, color=color, alpha=0.7, label="mv"[i])
    ax.set(title="power of the expansion to E4M3", xlabel="k", ylabel="share of groups", xlim=(0, 6))
    ax.legend()


def plot_update(ax, error):
    for j, v in enumerate(FORMATS):
        bar = ax.bar(np.arange(4) + (j - 1.5) * 0.2, 100 * error[:, j], 0.2, color=COLORS[j], label=f"v in {v}")
        ax.bar_label(bar, fmt="%.3g", fontsize=7)
    ax.set(title="error of m/($\\sqrt{v}$+eps), typical matrix", ylabel="relative error, %")
    ax.set_xticks(np.arange(4), [f"m in {m}" for m in FORMATS])
    ax.legend(ncols=2)


def plot_activations(ax, lines):
    names = [n.split("/") for n in dict.fromkeys(name for line in lines for name in line)
             if n.startswith("quant/") and n.endswith("/error")]
    # if there are earlier runs, the last one counts
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
    lines = metrics.read(args.folder)
    moments = Moments(os.path.join(args.folder, "latest"))
    found = moments.errors()
    print_tables(moments, found)
    figure, ax = plt.subplot_mosaic("ABC;DDE", figsize=(15, 8), layout="constrained")
    for i, panel in enumerate("AB"):
        plot_ranges(ax[panel], moments.groups(i), "mv"[i])
    plot_k(ax["C"], moments)
    plot_update(ax["D"], typical(found["update"]))
    plot_activations(ax["E"], lines)
    figure.suptitle(os.path.basename(os.path.normpath(args.folder)))
    args.output = args.output or os.path.join(args.folder, "quantization.png")
    errors.save(figure, args.output)
    print(f"\nwrote {args.output}")


if __name__ == "__main__":
    main()
