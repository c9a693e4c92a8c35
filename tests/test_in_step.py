#!/usr/bin/env python3
"""Tests scripts/in_step.py with hand-made records, and scripts/bench_steps.py and similar scripts with programs that pretend to
train."""
import contextlib, io, json, os, shutil, stat, subprocess, sys, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(TOP, "scripts"))
sys.dont_write_bytecode = True

import in_step

CONFIG = """recipe: coat
activations:
  keep: null    # inputs
trainable: []
lora:
  rank: null
model:
  d_model: 64
  n_layers: 2
  n_heads: 4
  n_kv_heads: 2
  head_dim: 16
  mlp_hidden_size: 256
  max_sequence_length: 128000
global_train_batch_size: 8
device_train_microbatch_size: 4
"""
FP8_FORWARD, FP8_DW = "nvjet_sm90_qqtst_176x128_128x5_1x2_h_bz_TNN", "nvjet_sm90_qrtst_256x128_128x4_1x2_h_badd_coopA_TNT"
FUSED_FORWARD = "_Z19matmul_fused_kernelIN49_GLOBAL__N__ca52836b_16_matmul_swiglu_cu_53865fc07ForwardEEvNT_3JobE9FusedMaps"
FUSED_DX = "_Z19matmul_fused_kernelIN52_GLOBAL__N__2675d671_19_matmul_dx_swiglu_cu_bc23f7778BackwardEEvNT_3JobE9FusedMaps"
BF16_GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_badd_coopA_NTT"
FLASH = "_Z14forward_kernelI7ForwardI13__nv_bfloat16Li128EES1_EvPT0_PfPKS3_4Work"
GRADIENTS = "_Z16gradients_kernelI9GradientsI13__nv_bfloat16Li128ELi4ELi2ELi64ELi2EES1_EvPT0_PKS3_S6_PKf8Backward"
LOSS = "_Z20cross_entropy_kernelILb1ELb1E13__nv_bfloat16EvPT1_PfS3_PKiiiff"
ADAMW = "_Z16adamw_fp8_kernelI4FormIL5DType2ELb1EES2_13__nv_bfloat16S3_EvPT1_6MomentS6_PKT2_j9QuickStepm"
NORM = "_Z20norm_backward_kernelv"
NCCL = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"

# One micro-batch: name, us. The GEMM before each loss and the two GEMMs after it belong to the head.
MICRO_STEP = [(FP8_FORWARD, 100), (FLASH, 30), (BF16_GEMM, 5), (LOSS, 1), (BF16_GEMM, 6), (BF16_GEMM, 7),
              (FP8_FORWARD, 5), (LOSS, 1), (FP8_FORWARD, 6), (FP8_DW, 7), (FUSED_FORWARD, 40), (FUSED_DX, 50), (FP8_DW, 10),
              (GRADIENTS, 10), (NORM, 20), ("[memset]", 2)]


def steps(count, gap=0, other=None):
    """Returns the lines of `count` steps of two micro-batches, with a pause of `gap` us before each, and `other` (name, us) on
    another queue from the start of the second-last step."""
    lines, at = [], 1_000_000

    def add(name, us, stream=7):
        lines.append(f"{at}\t{at + 1000 * us}\t{stream}\t{name}\n")
        return at + 1000 * us

    for step in range(count):
        at += 1000 * gap
        if other and step == count - 2:
            add(*other, stream=8)
        for name, us in 2 * MICRO_STEP + [(NORM, 4), (ADAMW, 3), (ADAMW, 3)]:
            at = add(name, us)
    return lines


class Folder(unittest.TestCase):
    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="coat-in-step-")
        self.addCleanup(shutil.rmtree, self.top, ignore_errors=True)
        self.write("run/config.yaml", CONFIG)

    def write(self, name, text):
        path = os.path.join(self.top, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path


class InStepTest(Folder):
    def window(self, lines, count=2):
        self.write("times/17.tsv", "".join(lines))
        return in_step.Window(in_step.read_times(os.path.join(self.top, "times")), count)

    def test_groups(self):
        """Two of five steps: every kernel is in its row, and the GEMMs of the head are in the head's row, whatever their
        format."""
        window = self.window(steps(5, gap=9))
        of_step = {in_step.FP8: 400, in_step.ATTENTION: 80, in_step.HEAD: 72, in_step.ELEMENTWISE: 52, in_step.ADAMW: 6}
        self.assertEqual(window.groups, {group: 2 * 1000 * us for group, us in of_step.items()})
        self.assertEqual((window.steps, window.idle, window.overlap), (2, 18_000, 0))
        self.assertAlmostEqual(window.seconds, 2 * (sum(of_step.values()) + 9) / 1e6)

    def test_overlap(self):
        """A collective overlaps with a step and fills the gap after the step: there is less idle time, and the overlap is
        subtracted."""
        for name in (NCCL, "[copy peer to peer]"):
            window = self.window(steps(4, gap=9, other=(name, 700)))
            self.assertEqual(window.groups[in_step.COMMUNICATION], 700_000)
            self.assertEqual((window.idle, window.overlap), (9_000, 691_000))
        self.assertAlmostEqual(sum(window.groups.values()) + window.idle - window.overlap, window.seconds * 1e9)

    def test_copies(self):
        """Copies within a GPU that are not on the queue of kernels belong to NCCL, if NCCL runs."""
        copy = "[copy device to device]"
        alone, own = steps(3, other=(copy, 20)), steps(3, other=(copy, 20))
        collective = f"1000000\t1000100\t8\t{NCCL}\n"
        own[-5] = own[-5].replace(NORM, copy)       # on the queue of the kernels
        for lines, expected in ((alone, 0), ([collective, *alone], 20_000), ([collective, *own], 20_000)):
            self.assertEqual(self.window(lines).groups[in_step.COMMUNICATION], expected)

    def test_broken_off(self):
        """A step without its update does not count. Half a line at the end is ignored."""
        lines = steps(3)
        whole = self.window(lines)
        broken = self.window(lines + steps(1)[:20] + ["123\t45"])
        self.assertEqual((broken.groups, broken.seconds), (whole.groups, whole.seconds))
        with self.assertRaisesRegex(in_step.Bad, "1 updates"):
            self.window(steps(1))
        with self.assertRaisesRegex(in_step.Bad, "empty"):
            self.window([])

    def test_launcher(self):
        """The empty file of a launcher comes first and is ignored."""
        alone = self.window(steps(3))
        self.write("times/9.tsv", "")
        self.assertEqual(self.window(steps(3)).groups, alone.groups)

    def test_table(self):
        """The TFLOP/s of all GEMMs of the blocks. The file for programs has the same contents as the table."""
        self.write("times/17.tsv", "".join(steps(4)))
        tsv, out = os.path.join(self.top, "out.tsv"), io.StringIO()
        with contextlib.redirect_stdout(out):
            in_step.main([os.path.join(self.top, "run"), os.path.join(self.top, "times"), "--tsv", tsv])
        weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 64 * 256 * 3 // 2)       # q, out; k, v; gate, up, down
        self.assertIn(f"{6 * weights * 4 * 128000 / 200e-6 / 1e12:,.0f} TFLOP/s", out.getvalue())
        self.assertRegex(out.getvalue(), r"(?m)^  FP8 GEMMs +0\.200 ms +65\.57 %")
        with open(tsv, encoding="utf-8") as file:
            header, *rows = [line.rstrip("\n").split("\t") for line in file]
        self.assertEqual(header, ["group", "name", "ms", "share", "calls", "mean_us"])
        first = dict(zip(header, rows[0]))
        self.assertEqual((first["name"], float(first["ms"]), float(first["calls"])), (FP8_FORWARD, 0.1, 1))
        self.assertEqual({row[1].split("<")[0] for row in rows if row[0] == in_step.ELEMENTWISE},
                         {"cross_entropy_kernel", "norm_backward_kernel", "[memset]"})


# The options, files and step lines of ./train, with given tokens per second and watts. Each start adds a letter to a file.
TRAIN = """#!/usr/bin/env python3
import json, os, sys
letter, speed, watts, top = "{letter}", {speed}, {watts}, "{top}"
given = dict(a[2:].split("=", 1) for a in sys.argv[2:] if "=" in a)
folder = given["save_folder"]
os.makedirs(folder, exist_ok=True)
with open(top + "/order", "a") as file:
    file.write(letter)
with open(folder + "/config.yaml", "w") as file:
    file.write(open(top + "/run/config.yaml").read())
if os.path.getsize(given["data.paths"][1:-1]) != 2 << 21 or "--fails" in sys.argv:
    sys.exit("error: what is wrong")
if "KERNEL_TIMES" in os.environ:
    with open(os.environ["KERNEL_TIMES"] + "/5.tsv", "w") as file:
        file.write(open(top + "/times/17.tsv").read())
print("model: 7 M parameters")
with open(folder + "/metrics.jsonl", "w") as file:
    for step in range(1, int(given["max_duration"]) + 1):
        seconds = 50 + 1024 * (step - 2) / speed if step > 2 else 25 * step        # the first two are slow
        print(f"step {{step}}/9  loss 1.0", flush=True)
        file.write(json.dumps({{"step": step, "throughput/total_tokens": 1024 * step, "System/Peak GPU Memory (MB)": 2**31 / 1e6,
                               "throughput/device/seconds_total": seconds}}) + "\\n")
        file.write(json.dumps({{"step": step, "system/gpu_power_watts": watts if step > 2 else 100,
                               "system/gpu_sm_clock_mhz": 1500 if step > 2 else 1980}}) + "\\n")
"""


class BenchStepsTest(Folder):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="coat-bench-")
        cls.addClassCleanup(shutil.rmtree, cls.folder, ignore_errors=True)

    def setUp(self):
        super().setUp()
        self.write("times/17.tsv", "".join(steps(3)))
        self.launch = self.program("launch", '#!/bin/sh\nshift 2\nexec "$@"\n')       # mpirun -n N
        self.a = self.program("a", TRAIN.format(letter="a", speed=1000, watts=500, top=self.top))
        self.b = self.program("b", TRAIN.format(letter="b", speed=1100, watts=440, top=self.top))

    def program(self, name, text):
        path = self.write(name, text)
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)
        return path

    def bench(self, *arguments):
        return subprocess.run([sys.executable, os.path.join(TOP, "scripts", "bench_steps.py"), "--launch", self.launch,
                               "--folder", self.folder, *arguments], capture_output=True, text=True)

    def test_two_programs(self):
        done = self.bench("--train", self.a, "--train", self.b, "7B", "small: configs/tiny.yaml --recipe=coat")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(os.path.join(self.top, "order"), encoding="utf-8") as file:
            self.assertEqual(file.read(), "abababab")
        for work in ("7B", "small"):
            table = f"""
| {work} | {self.a} | 1,000 | 2.0 | 500 | 1500 | 2.00 | - |
| {work} | {self.b} | 1,100 | 2.0 | 440 | 1500 | 2.50 | - |
| {work} | B / A | 1.1000 +- 0.0000 | 1.0000 +- 0.0000 | 0.8800 +- 0.0000 | 1.0000 +- 0.0000 | 1.2500 +- 0.0000 | - |
"""
            self.assertIn(table, done.stdout)

    def test_documents(self):
        """The documents have 700 tokens on average."""
        self.assertEqual(self.bench("--train", self.a, "7B-documents").returncode, 0)
        with open(os.path.join(self.folder, "documents.npy"), "rb") as file:
            documents = file.read()
        ends = sum(documents[i:i + 2] == b"\2\0" for i in range(0, len(documents), 2))
        self.assertTrue(680 < len(documents) / 2 / ends < 720, ends)
        with open(os.path.join(self.folder, "tokens.npy"), "rb") as file:
            tokens = file.read()
        self.assertFalse(any(tokens[i:i + 2] == b"\2\0" for i in range(0, len(tokens), 2)))

    def test_failures(self):
        """A run that fails gets a row that says so; the other runs continue."""
        done = self.bench("--train", self.a, "bad: configs/tiny.yaml --fails", "7B")
        self.assertEqual(done.returncode, 1)
        self.assertIn("error: what is wrong\nerror: exit status 1 of ", done.stdout)
        self.assertIn(f"| bad | {self.a} | failed |", done.stdout)
        self.assertIn(f"| 7B | {self.a} | 1,000 |", done.stdout)
        self.assertIn("unknown: 8C; expected one of 7B", self.bench("8C").stderr)

    def test_no_launcher(self):
        """One line names the missing program, here and in the other scripts that train."""
        run = ["configs/tiny.yaml", "bf16"]
        for script, *arguments in (["bench_steps.py", "7B", "--folder", self.folder], ["compare.py", *run, "--folder", self.top],
                                   ["largest_batch.py", *run, "--batch", "1"], ["largest_batch.py", *run, "--train", "/nope"]):
            done = subprocess.run([sys.executable, os.path.join(TOP, "scripts", script), *arguments, "--launch", "/nope"],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
            self.assertRegex(done.stderr, r"\Aerror: /nope: No such file or directory; expected .*--launch.*\n\Z")

    def test_no_batch(self):
        """A number below 1 is an error. It does not mean the same as no number, which starts a search."""
        for batch in ("0", "-1"):
            done = subprocess.run([sys.executable, os.path.join(TOP, "scripts", "largest_batch.py"), "configs/tiny.yaml", "bf16",
                                   "--train", self.a, "--launch", self.launch, "--batch", batch], capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertRegex(done.stderr, rf"\Aerror: --batch {batch}; expected 1 or more.*\n\Z")

    @unittest.skipUnless(shutil.which("cc"), "no cc")
    def test_traced(self):
        """A separate run reports kernel times, if the library that records them can be loaded."""
        library, source = os.path.join(self.top, "times.so"), self.write("empty.c", "")
        done = self.bench("--train", self.a, "--kernel-times", library, "7B")
        self.assertEqual(done.returncode, 1)
        self.assertIn("the times of kernels are left out", done.stdout)
        subprocess.run(["cc", "-shared", "-fPIC", source, "-o", library], check=True)
        done = self.bench("--train", self.a, "--kernel-times", library, "7B")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"(?m)^  FP8 GEMMs +0\.200 ms")
        self.assertTrue(os.path.exists(os.path.join(self.folder, "in-step-7B.tsv")))


if __name__ == "__main__":
    unittest.main()
