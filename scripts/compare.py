#!/usr/bin/env python3
"""Trains the same run with several recipes and prints a table of memory, speed and loss.

    python3 scripts/compare.py configs/OLMo-1B.yaml bf16 fp8 coat coat-lean -- --data.paths='[train-*.npy]' ...

Arguments after -- go to every run. Each run is in --folder/RECIPE (scripts/plot_loss.py draws them in one picture); a
complete run is not trained again. The training loss is the mean of the last 10 % of the steps; each evaluation set has
its last loss; the difference from the first recipe's loss follows in brackets. Speed leaves out the first tenth of the steps and
includes evaluations. With --seeds each recipe is trained once per seed, in --folder/RECIPE-SEED; the table then has means, and
after +- the standard error of the mean difference.
"""
import argparse, os, statistics, subprocess, sys

import errors, metrics

TRAIN, SPEED, MEMORY = "train/CrossEntropyLoss", "throughput/device/tokens_per_second", "System/Peak GPU Memory (MB)"
SECONDS, TOKENS = "throughput/device/seconds_total", "throughput/total_tokens"


def train(options, recipe, folder, more):
    """Trains a run, unless the same command has trained it already."""
    command = [*options.launch.split(), "-n", str(options.ranks), options.train, options.config, f"--recipe={recipe}",
               f"--run_name={recipe}", f"--save_folder={folder}", "--save_num_checkpoints_to_keep=0",
               "--save_interval_unsharded=null", "--save_interval_ephemeral=null", *options.rest, *more]
    line, complete, started = " ".join(command), *(os.path.join(folder, name) for name in ("complete", "started"))
    if os.path.exists(complete):
        with open(complete, encoding="utf-8") as file:
            before = file.read()
        if before == line:
            return
        sys.exit(f"error: {folder} has the run of another command:\n  {before}\nnow:\n  {line}\ndelete this run, or give another "
                 "--folder")
    print(f"== {recipe}: {line}", flush=True)
    if os.path.exists(os.path.join(folder, "config.yaml")) and not os.path.exists(started):
        sys.exit(f"error: {folder} has a run that this script did not make; give another --folder")
    os.makedirs(folder, exist_ok=True)
    with open(started, "w", encoding="utf-8") as file:
        file.write(line)
    if subprocess.run([*command, "--save_overwrite"]).returncode != 0:
        sys.exit(f"error: the run with recipe {recipe} failed")
    with open(complete, "w", encoding="utf-8") as file:
        file.write(line)


def read(folder):
    lines = metrics.read(folder)
    steps = [line for line in lines if line.get(TRAIN) is not None]
    if not steps:
        sys.exit(f"error: {folder}/metrics.jsonl has no training losses")
    tail = steps[-max(1, len(steps) // 10):]
    warm = steps[len(steps) // 10]
    losses = {"training": statistics.mean(line[TRAIN] for line in tail)}
    for line in lines:
        for name, value in line.items():
            if name.startswith("eval/") and name.endswith("/CrossEntropyLoss") and value is not None:
                losses[name[len("eval/"):-len("/CrossEntropyLoss")]] = value
    seconds = steps[-1][SECONDS] - warm[SECONDS]
    return {"losses": losses, "memory": steps[-1][MEMORY] * 1e6 / 2**30,
            "speed": (steps[-1][TOKENS] - warm[TOKENS]) / seconds if seconds > 0 else steps[-1][SPEED]}


def differences(runs, first, name):
    """The mean loss and, in brackets, its mean difference from the losses of the first recipe with the same seeds."""
    percent = [100 * (run["losses"][name] / base["losses"][name] - 1) for run, base in zip(runs, first)]
    error = f" +- {statistics.stdev(percent) / len(percent) ** 0.5:.2f}" if len(percent) > 1 and runs is not first else ""
    return f"{statistics.mean(run['losses'][name] for run in runs):.4f} ({statistics.mean(percent):+.2f}{error} %)"


def table(recipes):
    """recipes: the runs of each recipe, one per seed."""
    first = next(iter(recipes.values()))
    names = list(first[0]["losses"])
    print("| recipe | memory, GiB | tokens/s | " + " | ".join(f"{name} loss" for name in names) + " |")
    print("|---" * (3 + len(names)) + "|")
    for recipe, runs in recipes.items():
        memory, speed = max(run["memory"] for run in runs), statistics.mean(run["speed"] for run in runs)
        losses = [differences(runs, first, name) for name in names]
        print(f"| `{recipe}` | {memory:.1f} | {speed:,.0f} | " + " | ".join(losses) + " |")


def main():
    own = sys.argv[1:sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--folder", default="runs/compare")
    parser.add_argument("--train", default="./train", help="the program")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds of weights and data order")
    parser.add_argument("--launch", default="mpirun", help="launcher with its options")
    options = parser.parse_args(own)
    options.rest = sys.argv[sys.argv.index("--") + 1:] if "--" in sys.argv else []
    places = [(f"-{seed}", [f"--seed={seed}"]) for seed in options.seeds] if options.seeds else [("", [])]
    recipes = {recipe: [] for recipe in options.recipes}
    for ending, more in places:
        for recipe in options.recipes:
            folder = os.path.join(options.folder, recipe + ending)
            train(options, recipe, folder, more)
            recipes[recipe].append(read(folder))
    table(recipes)


if __name__ == "__main__":
    errors.run(main, "programs that can be run (--launch, --train), and a --folder that can be written")
