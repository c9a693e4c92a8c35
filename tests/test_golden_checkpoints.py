#!/usr/bin/env python3
"""Checkpoints that an earlier version of this program wrote, one of each kind, continue as they did then.

tests/golden/checkpoints/KIND is a save folder: step 3 of 6, with its config.yaml, and metrics.jsonl of all six steps as that version
went on. This version continues from step 3, with the same settings, and must have the losses and gradient norms of steps 4 to 6.

Bound: 2e-6 of the value. OpenBLAS adds in an order that depends on the processor, so bits can be compared on one kind of processor
only; the sums of these models have at most 128 terms, and three steps change a loss by 2e-2 and more. A state that is lost changes it
by more than 1e-3: test_can_fail drops the moments.

    python3 tests/test_golden_checkpoints.py --write FOLDER     # with BUILD: writes all kinds anew
"""
import json, os, random, shlex, shutil, struct, subprocess, sys, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# the results were recorded with the AVX2 kernels of OpenBLAS; those for AVX-512 sum in another order
os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
LAUNCH = shlex.split(os.environ.get("LAUNCH", "mpirun --oversubscribe"))
FOLDER = os.path.join(TOP, "tests", "golden", "checkpoints")
KEYS = ("train/CrossEntropyLoss", "optim/total_grad_norm")
CONFIG = """
seed: 5
model: {d_model: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, mlp_hidden_size: 128, max_sequence_length: 16, vocab_size: 64,
        eos_token_id: 63, pad_token_id: 62, weight_tying: false, layer_norm_type: rms}
optimizer: {learning_rate: 3.0e-3, weight_decay: 0.1}
scheduler: {name: cosine_with_warmup, t_warmup: 2}
max_duration: 6
global_train_batch_size: 8
device_train_microbatch_size: 2
max_grad_norm: 1.0
eval_interval: null
save_interval: 3
data: {paths: [tokens.npy]}
"""
# ranks, and settings besides CONFIG
KINDS = {
    "full":      (1, ["--recipe=coat"]),
    "lora":      (1, ["--recipe=f32", "--load_path=base", "--lora.rank=4"]),
    "muon":      (1, ["--recipe=bf16", "--optimizer.name=muon"]),
    "adamw8bit": (1, ["--recipe=bf16", "--optimizer.name=adamw8bit"]),
    "average":   (2, ["--recipe=bf16", "--average={last: 3, every: 2}"]),
    "pipeline":  (2, ["--recipe=coat", "--parallelism.pipeline=2"]),
    "tensor":    (2, ["--recipe=bf16", "--model.n_kv_heads=2", "--model.max_sequence_length=32", "--parallelism.tensor=2"]),
}


def run(folder, ranks, *arguments):
    done = subprocess.run([*LAUNCH, "-n", str(ranks), TRAIN, *arguments], cwd=folder, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    if done.returncode != 0:
        raise AssertionError(f"{arguments}:\n{done.stdout}")


def make_folder(folder):
    draw, token, tokens = random.Random(2), 0, []
    for _ in range(4096):
        token = (5 * token + draw.randrange(4)) % 62
        tokens.append(token)
    with open(os.path.join(folder, "tokens.npy"), "wb") as file:
        file.write(struct.pack(f"<{len(tokens)}H", *tokens))
    with open(os.path.join(folder, "c.yaml"), "w", encoding="utf-8") as file:
        file.write(CONFIG)


def metrics(save_folder):
    """Returns the values of KEYS by step."""
    with open(os.path.join(save_folder, "metrics.jsonl"), encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return {line["step"]: [line[key] for key in KEYS] for line in lines if KEYS[0] in line}


def write(to):
    """Yields step 3 of each kind, and the steps that followed it. The base of the adapters is an exported step 3."""
    with tempfile.TemporaryDirectory() as folder:
        make_folder(folder)
        run(folder, 1, "c.yaml", "--recipe=f32", "--save_folder=run", "--max_duration=3")
        run(folder, 1, "--export=run/step3", "--dtype=bf16", "base")
        shutil.copytree(os.path.join(folder, "base"), os.path.join(to, "base"))
        for kind, (ranks, settings) in KINDS.items():
            run(folder, ranks, "c.yaml", *settings, f"--save_folder={kind}")
            os.makedirs(os.path.join(to, kind))
            shutil.copytree(os.path.join(folder, kind, "step3"), os.path.join(to, kind, "step3"))
            shutil.copy(os.path.join(folder, kind, "metrics.jsonl"), os.path.join(to, kind))
        adapter = os.path.join(to, "lora", "step3", "adapter_config.json")      # the file names the base by its full path
        with open(adapter, encoding="utf-8") as file:
            text = file.read().replace(os.path.realpath(folder) + "/", "")
        with open(adapter, "w", encoding="utf-8") as file:
            file.write(text)


@unittest.skipUnless(os.path.exists(TRAIN), f"needs {TRAIN}")
class GoldenCheckpoints(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        make_folder(self.folder)
        shutil.copytree(os.path.join(FOLDER, "base"), os.path.join(self.folder, "base"))

    def tearDown(self):
        shutil.rmtree(self.folder, ignore_errors=True)

    def worst(self, kind, *more):
        """Returns the largest relative difference from the metrics of the version that wrote the checkpoint."""
        ranks, settings = KINDS[kind]
        settings = ["--lora.base_path=base" if s.startswith("--load_path") else s for s in settings]
        run(self.folder, ranks, "c.yaml", *settings, f"--load_path={FOLDER}/{kind}/step3", "--save_folder=more", *more)
        then, now = metrics(f"{FOLDER}/{kind}"), metrics(os.path.join(self.folder, "more"))
        self.assertEqual(sorted(now), [4, 5, 6])
        return max(abs(x - y) / y for step in now for x, y in zip(now[step], then[step]))

    def test_can_fail(self):
        self.assertGreater(self.worst("full", "--reset_optimizer_state"), 1e-3)


for name in KINDS:
    def test(self, kind=name):
        self.assertLessEqual(self.worst(kind), 2e-6)
    setattr(GoldenCheckpoints, f"test_{name}", test)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--write"]:
        write(sys.argv[2])
    else:
        unittest.main()
