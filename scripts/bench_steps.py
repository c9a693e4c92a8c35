#!/usr/bin/env python3
"""Times training steps on random tokens: of one program, or of two that alternate on one machine, before and after a change.

    python3 scripts/bench_steps.py 7B 8B "configs/OLMo-1B.yaml --recipe=coat --device_train_microbatch_size=16"
    python3 scripts/bench_steps.py --train before/train --train build/cuda/train 7B 7B-lean
    python3 scripts/bench_steps.py --kernel-times build/cuda/kernel_times.so 7B

A work is a name of the list (--list) or, in quotes, a configuration with options, optionally after "NAME: ". The first two steps
choose algorithms and are not measured. The table shows tokens/s of a GPU, memory as the driver counts it, and from NVML the mean
power and clock of the GPUs and tokens per joule. With experts it also shows the largest part that one expert has in the work of all
experts of a block. Two programs run in the order A B A B; a second table shows their ratios, as means of pairs +- standard error.
--kernel-times also traces a run of four steps and prints the time of each kernel in the last two (in_step.py).
"""
import argparse, array, collections, ctypes, math, os, random, re, shlex, statistics, subprocess, sys, time

import errors, in_step, metrics

SEVEN = "configs/Llama-2-7B.yaml --model.max_sequence_length={} --device_train_microbatch_size={} --global_train_batch_size={}"
EIGHT = "configs/Llama-3-8B.yaml --model.max_sequence_length={} --device_train_microbatch_size={} --global_train_batch_size={}" \
        " --data.generate_doc_lengths=false"
# With init_std 0.02, attention adds the same to all tokens, so most tokens get the same experts. With small weights the token
# decides: experts have about as many tokens each, or, of the file `skewed`, about in proportion to 1/(i + 8).
BY_TOKEN = " --model.init_std=0.0002"
OLMOE = "configs/OLMoE-1B-7B.yaml --global_train_batch_size=4 --device_memory=79" + BY_TOKEN
SKEWED = " --data.paths=[{skewed}]"
THIRTY = "configs/Qwen3-30B-A3B-lora.yaml --load_path=null --data.label_mask_paths=[] --data.packing=concat " \
         "--data.document_boundaries=eos --data.generate_doc_lengths=false --device_memory={}" + BY_TOKEN
ONE = " --global_train_batch_size=2"            # of the works 30B, a step has one micro-batch, or four in pretraining
PRETRAIN = " --recipe=coat --lora.rank=null --format.master=null --format.moment1=null --format.moment2=null" \
           " --device_train_microbatch_size=4 --global_train_batch_size=16 --model.n_layers={}"
WORK = {        # number of ranks, and arguments; a step has 131,072 tokens per GPU
    "7B": (1, SEVEN.format(2048, 8, 64) + " --recipe=coat"),
    "7B-lean": (1, SEVEN.format(2048, 8, 64) + " --recipe=coat-lean"),
    "8B": (1, EIGHT.format(8192, 2, 16) + " --recipe=coat"),
    "7B-documents": (1, SEVEN.format(4096, 4, 32) + " --recipe=coat --data.packing=best_fit --data.paths=[{documents}]"),
    "8B-32k": (1, EIGHT.format(32768, 1, 4) + " --recipe=coat-lean"),
    "8B-128k": (1, EIGHT.format(131072, 1, 1) + " --recipe=coat-lean --activations.keep=block"),
    "30B-lora": (1, THIRTY.format(79) + ONE),
    "30B-lora-experts": (1, THIRTY.format(79) + ONE + " --lora.base=nf4 --lora.target_modules=all-linear"),
    "30B-lora-skewed": (1, THIRTY.format(79) + ONE + SKEWED),
    "30B-lora-experts-skewed": (1, THIRTY.format(79) + ONE + " --lora.base=nf4 --lora.target_modules=all-linear" + SKEWED),
    "30B-lora-24GB": (1, THIRTY.format(23) + ONE + " --lora.base=nf4 --device_train_microbatch_size=1"),
    "30B-7-layers": (1, THIRTY.format(79) + PRETRAIN.format(7)),
    "30B-13-layers": (1, THIRTY.format(79) + PRETRAIN.format(13)),
    "OLMoE": (1, OLMOE),
    "OLMoE-skewed": (1, OLMOE + SKEWED),
    "7B-fsdp": (2, SEVEN.format(2048, 8, 128) + " --recipe=coat --fsdp.sharding_strategy=FULL_SHARD"),
}
TOKENS, VOCABULARY, EOS = 1 << 21, 32000, 2
SKIPPED = 2             # steps that are not measured
TRACED = 4              # steps of a run under CUPTI, of which the last two are read
SHOWN = ("step ", "model", "memory", "  activations", "shards", "recipe", "  keep", "packing", "error", "kernel_times")

Work = collections.namedtuple("Work", "name ranks arguments")
Result = collections.namedtuple("Result", "speed memory watts clock per_joule share")
COLUMNS = ("tokens/s per GPU", "GiB", "W", "SM MHz", "tokens/J", "busiest expert")


def write_tokens(folder):
    """Writes three files of uint16 tokens, always the same: one without documents, one with documents of 350 - 350 ln u tokens, at
    most 4096, and one in which 16 tokens are frequent."""
    paths = {name: os.path.join(folder, name + ".npy") for name in ("tokens", "documents", "skewed")}
    if all(os.path.exists(path) and os.path.getsize(path) == 2 * TOKENS for path in paths.values()):
        return paths
    draw = random.Random(1)
    tokens = array.array("H", (draw.randrange(EOS + 1, VOCABULARY) for _ in range(TOKENS)))
    with open(paths["tokens"], "wb") as file:
        tokens.tofile(file)
    at = -1
    while (at := at + min(4096, 350 + int(-350 * math.log(1 - draw.random())))) < TOKENS:
        tokens[at] = EOS
    with open(paths["documents"], "wb") as file:
        tokens.tofile(file)
    # Token i brings its 8 of 128 experts from the smallest load, 1/136, to that of 1/(8 i + 12). A third of the tokens is random.
    frequent = draw.choices(draw.sample(range(EOS + 1, VOCABULARY), 16), [1 / (8 * i + 12) - 1 / 136 for i in range(16)], k=TOKENS)
    with open(paths["skewed"], "wb") as file:
        array.array("H", (x if draw.random() < 2 / 3 else draw.randrange(EOS + 1, VOCABULARY) for x in frequent)).tofile(file)
    return paths


def measure(folder, ranks):
    """The Result of all steps after the first SKIPPED, from metrics.jsonl. Values of GPUs are means since the previous line
    that has them."""
    lines = metrics.read(folder)
    steps = [line for line in lines if "throughput/total_tokens" in line]
    first, last = steps[SKIPPED - 1], steps[-1]
    seconds = last["throughput/device/seconds_total"] - first["throughput/device/seconds_total"]
    speed = (last["throughput/total_tokens"] - first["throughput/total_tokens"]) / seconds / ranks
    states = [line for line in lines if "system/gpu_power_watts" in line]
    weights = [(b["step"] - a["step"], b) for a, b in zip(states, states[1:])]
    # only lines whose means begin after SKIPPED steps; if there are none, the last line
    weights = [(n, b) for n, b in weights if b["step"] - n >= SKIPPED] or weights[-1:]

    def mean(name):
        known = [(n, line[name]) for n, line in weights if name in line]
        return sum(n * x for n, x in known) / sum(n for n, _ in known) if known else math.nan

    watts = mean("system/gpu_power_watts")
    return Result(speed, last["System/Peak GPU Memory (MB)"] * 1e6 / 2**30, watts, mean("system/gpu_sm_clock_mhz"), speed / watts,
                  last.get("router/largest_share", math.nan))


def run(options, train, work, steps, times=None):
    """Trains in options.folder/run; returns false if the run failed. times: the file that kernel_times.so writes."""
    config, *rest = shlex.split(work.arguments.format(**options.paths))
    command = [*shlex.split(options.launch), "-n", str(work.ranks), os.path.abspath(train), config,
               f"--data.paths=[{options.paths['tokens']}]", "--data.memmap_dtype=uint16", f"--save_folder={options.run}",
               "--save_overwrite", f"--max_duration={steps}", "--save_num_checkpoints_to_keep=0",
               "--save_interval_unsharded=null", "--save_interval_ephemeral=null", "--eval_interval=null", *rest]
    environment = dict(os.environ)
    if times:
        environment.update(CUDA_INJECTION64_PATH=os.path.abspath(options.kernel_times), KERNEL_TIMES=os.path.abspath(times))
    start, log = time.time(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        for line in process.stdout:
            log = [*log[-19:], line]
            if len(options.train) == 2 or not line.startswith(SHOWN):
                continue
            if line.startswith("step 1/"):
                print(f"first step done {time.time() - start:.0f} s after launch")
            print(line, end="", flush=True)
    if process.returncode == 0:
        return True
    print("".join(log), end="")
    print(f"error: exit status {process.returncode} of {shlex.join(command)}", flush=True)
    return False


def trace(options, train, work, name):
    """Prints the time of each kernel in the steps. A program that dies at its end has still written most records."""
    times = os.path.join(options.folder, f"times-{name}")
    os.makedirs(times, exist_ok=True)
    for old in os.listdir(times):
        os.remove(os.path.join(times, old))
    print(f"== {work.name}: {train}, in which kernels", flush=True)
    run(options, train, work, TRACED, times)
    try:
        in_step.main([options.run, times, "--ranks", str(work.ranks), "--tsv", os.path.join(options.folder, f"in-step-{name}.tsv")])
    except SystemExit as problem:
        print(problem)
        return False
    return True


def row(work, program, result):
    cells = [format(x, form) for x, form in zip(result, (",.0f", ".1f", ".0f", ".0f", ".2f", ".4f"))]
    return f"| {work.name} | {program} | " + " | ".join("-" if cell == "nan" else cell for cell in cells) + " |"


def mean(results):
    return Result(*(statistics.mean(column) for column in zip(*results)))


def ratio(before, after, column):
    ratios = [b[column] / a[column] for a, b in zip(before, after)]
    if any(math.isnan(r) for r in ratios):
        return "-"
    error = f" +- {statistics.stdev(ratios) / len(ratios) ** 0.5:.4f}" if len(ratios) > 1 else ""
    return f"{statistics.mean(ratios):.4f}{error}"


def print_table(programs, measured):
    """measured: a Result per round, for each work and each program."""
    print(f"\n| work | program | {' | '.join(COLUMNS)} |\n|---|---|" + "---|" * len(COLUMNS))
    for work, runs in measured.items():
        for train, results in zip(programs, runs):
            print(row(work, train, mean(results)) if results else f"| {work.name} | {train} | failed" + " |" * len(COLUMNS))
        if len(runs) == 2 and runs[0] and len(runs[0]) == len(runs[1]):
            print(f"| {work.name} | B / A | " + " | ".join(ratio(*runs, i) for i in range(len(COLUMNS))) + " |")


def kernel_times_loads(path):
    """Whether CUDA can load the library. If CUDA cannot, CUDA may end the traced program without a message."""
    try:
        ctypes.CDLL(os.path.abspath(path))
        return True
    except OSError as problem:
        print(f"error: {problem}; the times of kernels are left out. To get them, build the library: make BACKEND=cuda {path}")
        return False


def bench(options, work, traces):
    """Runs the programs alternately, then traces each. Returns their results, and whether all runs succeeded."""
    results, failed = [[] for _ in options.train], set()
    for _ in range(options.rounds or len(options.train)):
        for train, of_train in zip(options.train, results):
            if train in failed:
                continue
            print(f"== {work.name}: {train}", flush=True)
            if run(options, train, work, options.steps):
                of_train.append(measure(options.run, work.ranks))
                print(row(work, train, of_train[-1]), flush=True)
            else:
                failed.add(train)
    for i, train in enumerate(options.train if traces else []):
        if train not in failed and not trace(options, train, work, work.name + ["-A", "-B"][i] * (len(options.train) - 1)):
            failed.add(train)
    return results, not failed


def parse_work(text, parser, ranks):
    """Parses a name of WORK, or [NAME: ]CONFIGURATION OPTIONS."""
    named = re.fullmatch(r"(?:([\w.-]+): )?(\S+\.yaml\b.*)", text)
    if text not in WORK and not named:
        parser.error(f"unknown: {text}; expected one of {', '.join(WORK)}, or a configuration with its options in quotes")
    if text in WORK:
        return Work(text, *WORK[text])
    return Work(named[1] or os.path.basename(named[2].split()[0]), ranks, named[2])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", nargs="*")
    parser.add_argument("--list", action="store_true", help="print the names and their settings")
    parser.add_argument("--train", action="append",
                        help="a program; default: build/cuda/train; given twice: the two programs alternate")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, help="number of runs of each program; default: 1, or 2 for two programs")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks for configurations in quotes")
    parser.add_argument("--launch", default="mpirun", help="launcher with its options")
    parser.add_argument("--kernel-times", help="kernel_times.so: trace steps too")
    parser.add_argument("--folder", default="build/bench", help="folder for tokens, the run and in-step-*.tsv")
    options = parser.parse_args()
    if options.list:
        for name, (ranks, arguments) in WORK.items():
            print(f"{name}: {ranks} x {arguments}")
        return
    options.train = options.train or ["build/cuda/train"]
    if not options.work or options.steps <= SKIPPED or len(options.train) > 2:
        parser.error(f"expected a work, at least {SKIPPED + 1} steps and at most two programs")
    works = [parse_work(text, parser, options.ranks) for text in options.work]
    options.run = os.path.join(options.folder, "run")
    os.makedirs(options.folder, exist_ok=True)
    options.paths = write_tokens(options.folder)
    traces = bool(options.kernel_times) and kernel_times_loads(options.kernel_times)
    measured, complete = {}, traces == bool(options.kernel_times)
    for work in works:
        measured[work], without_error = bench(options, work, traces)
        complete &= without_error
    print_table(options.train, measured)
    sys.exit(not complete)


if __name__ == "__main__":
    errors.run(main, "a launcher (--launch) that can be run, and a --folder that can be written")
