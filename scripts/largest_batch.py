#!/usr/bin/env python3
"""Finds the largest micro-batch that fits a GPU for each recipe and number of ranks, and trains a few steps with it.

    python3 scripts/largest_batch.py configs/Llama-2-7B.yaml bf16 coat coat-lean --ranks 1 2 4 --limit 80 -- --data.paths=...

Arguments after -- go to every run. The search begins with the batch that fits by a dry run. It then adds one sequence until
the batch does not fit, or removes one until it fits. The table shows measurements: peak memory per GPU in GB (10^9 bytes), as the
driver counts it, and tokens/s per GPU after the first step. A step has one micro-batch.
"""
import argparse, re, shlex, subprocess, sys, tempfile

import errors, metrics

STEPS = 4
MOST = 128      # maximum number of sequences; with more micro-batches, gradients are summed in another format


def device_memory(options):
    """The option --device_memory: with it, the program keeps its optional memory (for speed) within the limit, too."""
    return f"--device_memory={options.limit * 1e9 / 2**30}"


def command(options, recipe, ranks, batch, *more):
    return [*shlex.split(options.launch), "-n", str(ranks), options.train, options.config, f"--recipe={recipe}",
            f"--global_train_batch_size={ranks * batch}", f"--device_train_microbatch_size={batch}",
            "--save_num_checkpoints_to_keep=0", "--save_interval_unsharded=null", "--save_interval_ephemeral=null",
            "--eval_interval=null", "--save_overwrite", device_memory(options), *options.rest, *more]


def planned(options, recipe, ranks):
    """The number of sequences that fit by a dry run, at least 1. A step of the dry run has MOST sequences per rank.
    Gradients are summed in each micro-batch, as in a step with one micro-batch."""
    done = subprocess.run([options.train, options.config, f"--recipe={recipe}", *options.rest, "--dry_run", f"--ranks={ranks}",
                           device_memory(options), f"--global_train_batch_size={ranks * MOST}",
                           "--device_train_microbatch_size=1", "--fsdp.grad_sync_mode=micro_batch"],
                          capture_output=True, text=True)
    found = re.search(r"largest micro-batch that fits: (none|\d+)", done.stdout)
    if not found:
        sys.exit(f"error: {recipe} on {ranks} ranks printed no memory plan:\n{done.stdout[-2000:]}{done.stderr}")
    return 1 if found[1] == "none" else int(found[1])


def measured(options, recipe, ranks, batch):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command(options, recipe, ranks, batch, f"--max_duration={STEPS}", f"--save_folder={folder}"),
                              capture_output=True, text=True)
        if done.returncode != 0:
            if not re.search(r"out of (GPU )?memory", done.stderr):
                sys.exit(f"error: {recipe} on {ranks} ranks ended with {done.returncode}, for another reason than too little "
                         f"memory:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
            print(done.stderr[-1000:], file=sys.stderr)
            return None
        lines = [line for line in metrics.read(folder) if "train/CrossEntropyLoss" in line]
    seconds = "throughput/device/seconds_total"
    speed = (lines[-1]["throughput/total_tokens"] - lines[0]["throughput/total_tokens"]) / ranks \
        / (lines[-1][seconds] - lines[0][seconds])
    return lines[-1]["System/Peak GPU Memory (MB)"] / 1e3, speed


def search(options, recipe, ranks):
    """(batch, peak in GB, tokens/s per GPU); None: no batch fits."""
    if options.batch:
        found = measured(options, recipe, ranks, options.batch)
        return (options.batch, *found) if found else None
    batch, best = planned(options, recipe, ranks), None
    while batch > 0:
        found = measured(options, recipe, ranks, batch)
        if found and found[0] <= options.limit:
            best = (batch, *found)
            batch += 1
        elif best:
            break
        else:
            batch -= 1
    return best


def main():
    own = sys.argv[1:sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--limit", type=float, default=80, help="GB per GPU that may be used")
    parser.add_argument("--batch", type=int, help="this micro-batch instead of the largest")
    parser.add_argument("--train", default="./train", help="the program")
    parser.add_argument("--launch", default="mpirun", help="launcher with its options")
    options = parser.parse_args(own)
    if options.batch is not None and options.batch < 1:
        sys.exit(f"error: --batch {options.batch}; expected 1 or more; without --batch, the largest batch is searched for")
    options.rest = sys.argv[sys.argv.index("--") + 1:] if "--" in sys.argv else []
    print("| GPUs | recipe | micro-batch | GB per GPU | tokens/s per GPU |\n|---|---|---|---|---|", flush=True)
    for ranks in options.ranks:
        for recipe in options.recipes:
            found = search(options, recipe, ranks)
            row = "{} | {:.1f} | {:,.0f}".format(*found) if found else "none | |"
            print(f"| {ranks} | `{recipe}` | {row} |", flush=True)


if __name__ == "__main__":
    errors.run(main, "programs that can be run (--launch, --train)")
