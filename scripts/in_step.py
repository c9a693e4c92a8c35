#!/usr/bin/env python3
"""Prints how much time each kernel took in the last whole steps of a run.

    make BACKEND=cuda build/cuda/kernel_times.so && mkdir times
    CUDA_INJECTION64_PATH=$PWD/build/cuda/kernel_times.so KERNEL_TIMES=times mpirun -n 1 ./train ... --save_folder=run
    python3 scripts/in_step.py run times

A step lasts from the end of an update to the end of the next one. Kernels that run at the same time on several queues count in
full, and a separate line subtracts their overlap: rows, overlap and idle time add up to the time of the steps. With several ranks,
the table shows the process with the lowest number. --tsv writes the second table, with every kernel, for programs.
"""
import argparse, collections, glob, os, re, shutil, subprocess, sys

Record = collections.namedtuple("Record", "start end stream name")      # times in ns
Row = collections.namedtuple("Row", "group name ms share calls mean_us")    # ms and calls per micro-step

FP8, BF16, HEAD = "FP8 GEMMs", "GEMMs in BF16", "the head's GEMMs"
ATTENTION, ELEMENTWISE, ADAMW, COMMUNICATION = "attention", "elementwise", "AdamW", "communication"
GROUPS = [FP8, ATTENTION, ELEMENTWISE, HEAD, BF16, ADAMW, COMMUNICATION]        # in the order of printing
# cuBLASLt names operands, sum and result of a GEMM by letters: q is E4M3, r E5M2, t BF16, s F32.
PATTERNS = [(COMMUNICATION, re.compile(r"nccl|^\[copy peer to peer\]")),
            (ADAMW, re.compile(r"adamw")),
            (ATTENTION, re.compile(r"attention|(^|\d)(forward|gradients|delta|prepare|finish_dq|sum_heads|part|merge|append)_kernel")),
            (FP8, re.compile(r"(^|_)[qr]{2}[a-z]{3}_\d+x\d+|gemm.*e[45]m[23]|e[45]m[23].*gemm|matmul_fused")),
            (BF16, re.compile(r"(^|_)[a-z]{3,5}_\d+x\d+_\d+x\d+|gemm|cutlass|nvjet"))]
SHOWN = 1e-4        # kernels with a smaller share of the time are only in the file


class Bad(Exception):
    """An error in the input, in the words that the user reads."""


def read_times(folder):
    """Records of one process, ordered by their start. If the process was killed, the last line may be incomplete. A launcher
    that only looks at the GPUs has an empty file."""
    paths = sorted(glob.glob(os.path.join(folder, "*.tsv")), key=lambda path: [len(path), path])
    if not paths:
        raise Bad(f"{folder} has no .tsv; expected the files that kernel_times.so writes: was the program run with "
                  "CUDA_INJECTION64_PATH, and on a GPU?")
    paths = [path for path in paths if os.path.getsize(path)] or paths
    with open(paths[0], encoding="utf-8") as file:
        lines = file.read().split("\n")[:-1]
    records = []
    for line in lines:
        start, end, stream, name = line.split("\t", 3)
        records.append(Record(int(start), int(end), int(stream), name))
    if not records:
        raise Bad(f"{paths[0]} is empty: CUPTI reported no kernel; the program's own output may say why")
    return sorted(records)


def group_of(name):
    return next((group for group, pattern in PATTERNS if pattern.search(name)), ELEMENTWISE)


def find_steps(records):
    """The ends of the updates: each is the end of the last kernel of AdamW before the next loss. Every step has a loss."""
    ends, last = [], 0
    for r in records:
        if "cross_entropy" in r.name and last:
            ends.append(last)
            last = 0
        elif group_of(r.name) == ADAMW:
            last = max(last, r.end)
    return ends + [last] if last else ends


def group_records(records):
    """The group of each kernel. A chunk of the head has one GEMM before its loss and, if all weights are trained, two after
    it. Copies within a GPU that run on another queue than the kernels are collectives of NCCL's copy engines."""
    groups = [group_of(r.name) for r in records]
    busy = collections.Counter()
    for r in records:
        busy[r.stream] += r.end - r.start
    compute = busy.most_common(1)[0][0]
    gemms = [i for i, group in enumerate(groups) if group in (FP8, BF16)]
    at = 0
    for i, r in enumerate(records):
        if r.name == "[copy device to device]" and r.stream != compute and COMMUNICATION in groups:
            groups[i] = COMMUNICATION
        if "cross_entropy" in r.name:
            while at < len(gemms) and gemms[at] < i:
                at += 1
            for k in range(max(0, at - 1), min(at + 2, len(gemms))):
                groups[gemms[k]] = HEAD
    return groups


def demangle(names):
    """{name: C++ name without return type and parameters}, by c++filt; without c++filt, a part of the mangled name."""
    if shutil.which("c++filt"):
        done = subprocess.run(["c++filt"], input="\n".join(names) + "\n", capture_output=True, text=True, check=True)
        return {name: shorten(long) for name, long in zip(names, done.stdout.split("\n"))}
    return {name: re.sub(r"^_ZN?\d*", "", name) for name in names}


def shorten(name):
    name, depth = name.replace("(anonymous namespace)::", "").removeprefix("void ").replace("__nv_bfloat16", "bf16"), 0
    for i, c in enumerate(name):
        depth += (c == "<") - (c == ">")
        if c == "(" and depth == 0:
            return name[:i]
    return name


class Window:
    """The last `steps` whole steps: their time, and the sums of groups and kernels."""

    def __init__(self, records, steps):
        ends = find_steps(records)
        if len(ends) < 2:
            raise Bad(f"{len(ends)} updates in the records; expected at least 2, because a step lasts from one update to the next")
        self.steps = min(steps, len(ends) - 1)
        begin, end = ends[-1 - self.steps], ends[-1]
        groups = group_records(records)
        self.seconds, self.idle, self.sum = (end - begin) / 1e9, 0, 0
        self.groups, self.kernels, self.calls = collections.Counter(), collections.Counter(), collections.Counter()
        busy = begin
        for r, group in zip(records, groups):
            first, last = max(r.start, begin), min(r.end, end)
            if last <= first:
                continue
            self.idle += max(0, first - busy)
            busy = max(busy, last)
            self.sum += last - first
            self.groups[group] += last - first
            self.kernels[group, r.name] += last - first
            self.calls[group, r.name] += 1
        self.overlap = self.sum + self.idle - (end - begin)

    def rows(self, micro_steps):
        names = demangle(sorted({name for _, name in self.kernels}))
        return [Row(group, names[name], ns / 1e6 / micro_steps, ns / 1e9 / self.seconds, self.calls[group, name] / micro_steps,
                    ns / 1e3 / self.calls[group, name]) for (group, name), ns in self.kernels.most_common()]


class Run:
    """Properties of the steps that follow from the settings of the run."""

    def __init__(self, folder, ranks):
        path = os.path.join(folder, "config.yaml")
        try:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise Bad(f"{path}: {error.strerror}; give the save_folder of the run")
        found = dict(re.findall(r"^ *(\w+): *(?:null +# )?(\w+)", text, re.M))      # the comment after null is the effective value
        wide, layers, heads, kv_heads, head_dim, mlp, self.sequence, self.micro_batch, batch = (int(found[name]) for name in (
            "d_model", "n_layers", "n_heads", "n_kv_heads", "head_dim", "mlp_hidden_size", "max_sequence_length",
            "device_train_microbatch_size", "global_train_batch_size"))
        self.micro_steps = batch // (self.micro_batch * ranks)
        weights = layers * wide * (2 * head_dim * (heads + kv_heads) + mlp * 3 // 2)
        passes = 4 if found["keep"] == "block" else 3       # forward, dx and dW; if blocks are recomputed, forward once more
        self.gemm_flops = 2 * weights * passes * self.micro_batch * self.sequence
        self.trains_all = "\ntrainable: []\n" in text and not re.search(r"^lora:\n  rank: \d", text, re.M)


def print_table(window, run, rows):
    micro_steps = window.steps * run.micro_steps
    tokens = micro_steps * run.micro_batch * run.sequence

    def line(name, ns, more=""):
        print(f"  {name:<24}{ns / 1e6 / micro_steps:12.3f} ms{100 * ns / 1e9 / window.seconds:9.2f} %{more}")

    print(f"{window.steps} steps of {run.micro_steps} micro-steps of {run.micro_batch} x {run.sequence} tokens on a GPU: "
          f"{window.seconds:.3f} s, {tokens / window.seconds:,.0f} tokens/s while traced; of a micro-step:")
    for group in GROUPS:
        ns = window.groups[group]
        rate = f"  {run.gemm_flops * micro_steps / ns / 1e3:9,.0f} TFLOP/s" if group == FP8 and ns and run.trains_all else ""
        if ns:
            line(group, ns, rate)
    line("idle", window.idle)
    if window.overlap:
        line("two or more at once", -window.overlap)
    line("together", window.seconds * 1e9)
    print(f"{'ms':>10}{'share':>9}{'calls':>9}{'mean us':>10}  group: kernel")
    for r in rows:
        if r.share >= SHOWN:
            print(f"{r.ms:10.3f}{100 * r.share:7.2f} %{r.calls:9.2f}{r.mean_us:10.1f}  {r.group}: {r.name[:92]}")


def write_tsv(path, rows):
    with open(path, "w", encoding="utf-8") as file:
        file.write("\t".join(Row._fields) + "\n")
        for r in rows:
            file.write(f"{r.group}\t{r.name}\t{r.ms:.6f}\t{r.share:.8f}\t{r.calls:.4f}\t{r.mean_us:.4f}\n")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="save_folder of the run")
    parser.add_argument("times", help="the folder that KERNEL_TIMES named")
    parser.add_argument("--steps", type=int, default=2, help="maximum number of steps in the table")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tsv", help="file for the table of kernels")
    options = parser.parse_args(arguments)
    try:
        run = Run(options.run, options.ranks)
        window = Window(read_times(options.times), options.steps)
    except Bad as problem:
        sys.exit(f"error: {problem}")
    rows = window.rows(window.steps * run.micro_steps)
    print_table(window, run, rows)
    if options.tsv:
        write_tsv(options.tsv, rows)


if __name__ == "__main__":
    main()
