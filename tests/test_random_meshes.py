#!/usr/bin/env python3
"""Random meshes of up to 8 ranks: replicas, shards, context ranks, tensor ranks, pipeline stages and their schedules, with random
models, recipes, optimizers, adapters, packings and micro-batches (test_random_runs.py draws them). For each of them:

  one rank            same numbers of labels; losses, norms and evaluations within the bounds of test_random_runs.py, weights within
                      that of moved_at_most below
  no stages           the same bits, and the same bytes of weights and states: stages change nothing. Where the head is the
                      embedding its gradients are added in another order: within the bounds of one rank
  a rank is killed    with SIGKILL, and another mesh continues: the same bits as without the kill, and one rank's numbers

    python3 tests/test_random_meshes.py                   # six settings, the same every time
    python3 tests/test_random_meshes.py COUNT [FIRST]     # as many as one likes: number FIRST and those after it

BUILD and LAUNCH as scripts/run-tests sets them."""
import array, json, math, os, random, shlex, shutil, signal, subprocess, tempfile, time, unittest

import test_random_runs as single
from test_random_runs import BATCH, LAUNCH, STEPS, TRAIN, compare

RANKS = 8


class Setting(single.Configuration):
    """Random number n; depends only on n."""
    length = 64

    def __init__(self, n):
        super().__init__(n)
        pick, draw = self.draw.choice, self.draw
        self.micro = pick([1, 1, 2, 4])
        self.keys.update({"model.n_heads": 4, "model.n_layers": pick([1, 2, 3, 4, 4, 5]), "model.max_sequence_length": self.length,
                          "device_train_microbatch_size": self.micro})
        if self.keys.get("model.n_kv_heads", 0) is None:
            self.keys["model.n_kv_heads"] = pick([None, 2])
        self.keep["activations.keep"] = pick([None, "all", "inputs", "attention", "block"])
        self.keys["tiled_mlp_tokens"] = pick([None, 128]) if self.keep["activations.keep"] == "block" else None
        self.keys["sequence_length_warmup"] = pick([None, None, "{min_sequence_length: 32, warmup_steps: 3}"])
        if pick([True, False, False]):
            self.micro = min(self.micro, BATCH // 4)        # in the first steps, two ranks have a micro-batch each
            self.keys.update({"batch_size_warmup": "[2]", "device_train_microbatch_size": self.micro,
                              "device_eval_batch_size": self.micro})
        if "model.num_experts" in self.keys:
            self.keys["tiled_mlp_tokens"] = None
        self.draw_muon()
        self.meshes = [self.draw_mesh(), self.draw_mesh()]
        self.context = max(mesh["context"] * mesh["tensor"] for mesh in self.meshes)
        self.tensor = max(mesh["tensor"] for mesh in self.meshes)
        self.stop = draw.randrange(1, STEPS - 1)

    def draw_muon(self):
        """A third of the settings that allow it have it. It has its own random numbers, so that the other settings stay the
        same."""
        pick = random.Random(f"muon {self.n}").choice
        if pick([True, False, False]) and not self.lora:
            self.optimizer = "muon"
            self.keys.update({"optimizer.name": "muon", "optimizer.per_head": pick([True, False]),
                              "optimizer.nesterov": pick([True, True, False]), "optimizer.ns_steps": pick([4, 5]),
                              "optimizer.adjust_lr_fn": pick(["match_rms_adamw", "original"])})

    def draw_mesh(self):
        """Draws again until the settings allow the mesh."""
        while True:
            pick = self.draw.choice
            tensor = pick([1, 2]) if self.can_be_cut() else 1
            mesh = {"stages": pick([1, 2, 2, 3, 4]), "tensor": tensor, "replicas": pick([1, 1, 2]), "shards": pick([1, 1, 2, 4]),
                    "context": pick([1, 1, 2, 4]), "chunks": pick([1, 2, 2]), "sequential": pick([True, False, False]),
                    "strategy": pick(["FULL_SHARD", "SHARD_GRAD_OP"]), "no_shard": pick([True, False, False]),
                    "sync": pick([None, "micro_batch", "batch"]), "precision": pick([None, "pure", "mixed"]),
                    "host": {f"offload.{what}": pick([None, None, "all"]) for what in ("activations", "frozen", "optimizer", "master")}}
            if self.allows(mesh):
                return mesh

    def allows(self, mesh):
        data, stages, chunks = mesh["replicas"] * mesh["shards"], mesh["stages"], mesh["chunks"]
        smallest = BATCH // 2 if "batch_size_warmup" in self.keys else BATCH
        heads = self.keys.get("model.n_kv_heads") or self.keys["model.n_heads"]
        moves = mesh["host"]["offload.optimizer"] or mesh["host"]["offload.master"]
        return 1 < ranks_of(mesh) <= RANKS and not (self.optimizer == "muon" and moves) and smallest % (data * self.micro) == 0 and \
            heads % mesh["tensor"] == 0 and 4 % (mesh["context"] * mesh["tensor"]) == 0 and \
            (heads // mesh["tensor"] % mesh["context"] == 0 or mesh["context"] % (heads // mesh["tensor"]) == 0) and \
            self.keys["model.n_layers"] >= stages * chunks and not (mesh["no_shard"] and mesh["replicas"] > 1) and \
            not (mesh["context"] == 4 and self.keys["sequence_length_warmup"]) and \
            (stages == 1 and chunks == 1 or stages > 1 and mesh["sync"] != "micro_batch" and
             (chunks == 1 or smallest // (data * self.micro) % stages == 0))

    def can_be_cut(self):
        """Whether model/config/check_tensor_ranks.c accepts the settings: slices of these models have no whole groups of moments
        or blocks of NF4."""
        grouped = self.optimizer in ("adamw8bit", "muon") or self.recipe in ("fp8-lm", "coat-opt", "coat", "coat-lean")
        return "model.num_experts" not in self.keys and self.keys.get("model.n_kv_heads") != 1 and self.keys.get("model.attention_layer_norm") is not True and \
            not grouped and self.keys.get("lora.base") != "nf4" and self.keys["tiled_mlp_tokens"] is None

    def strategy_of(self, mesh, stages):
        """The keys of a mesh, with or without its stages."""
        hybrid = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "_HYBRID_SHARD_ZERO2"}[mesh["strategy"]]
        keys = {"fsdp.sharding_strategy": "NO_SHARD" if mesh["no_shard"] else hybrid if mesh["replicas"] > 1 else mesh["strategy"],
                "fsdp.grad_sync_mode": mesh["sync"], "fsdp.precision": mesh["precision"], "parallelism.context": mesh["context"],
                "parallelism.tensor": mesh["tensor"], **mesh["host"]}
        if mesh["replicas"] > 1:
            keys["fsdp.hybrid_sharding_num_model_replicas"] = mesh["replicas"]
        if mesh["stages"] > 1 and not stages:
            keys["fsdp.grad_sync_mode"] = "batch"   # as with stages
        elif mesh["stages"] > 1:
            chunks, name = mesh["chunks"], "Sequential" if mesh["sequential"] else "1F1B"
            keys.update({"parallelism.pipeline": mesh["stages"], "parallelism.pipeline_virtual_stages": chunks,
                         "parallelism.pipeline_schedule": "Interleaved1F1B" if chunks > 1 else name})
        return keys

    def shares_scales(self):
        many = any(mesh["context"] * mesh["tensor"] > 1 for mesh in self.meshes)
        return super().shares_scales() or (single.RECIPES[self.recipe] and many)


def ranks_of(mesh):
    return mesh["stages"] * mesh["replicas"] * mesh["shards"] * mesh["context"] * mesh["tensor"]


def tensors(folder):
    """Returns {name: numbers} of a folder of F32 weights."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.startswith("model") and name.endswith(".safetensors"):
            with open(os.path.join(folder, name), "rb") as file:
                data = file.read()
            header = 8 + int.from_bytes(data[:8], "little")
            for tensor, entry in json.loads(data[8:header]).items():
                if tensor != "__metadata__" and entry["dtype"] == "F32":
                    begin, end = entry["data_offsets"]
                    found[tensor] = array.array("f", data[header + begin:header + end])
    return found


def moved_at_most(setting, found, alone, rate):
    """Bounds of F32 weights under AdamW: step_error for each step. The gradient of a key's bias is 0 in theory, so its sign is
    random."""
    gradient = setting.bounds({1: (1.0, 0.0)})[1][1] / 2
    squares = count = 0
    for name, numbers in found.items():
        if not name.endswith("k_proj.bias"):
            squares += sum((x - y) ** 2 for x, y in zip(numbers, alone[name]))
            count += len(numbers)
    most = STEPS * single.step_error(gradient, rate)
    if sorted(found) != sorted(alone) or not count or not math.sqrt(squares / count) <= most:
        raise AssertionError(f"weights: {math.sqrt(squares / max(count, 1)):.3g} from those of one rank, at most {most:.3g}")


class Meshes(single.Runs):
    def on(self, mesh, name, base, stages=True, **more):
        ranks = ranks_of(mesh) // (1 if stages else mesh["stages"])
        return self.train(ranks, name, self.c.keep, self.c.strategy_of(mesh, stages), base, **more)

    def kill_one(self, mesh, name, base, step):
        """Kills a rank of a run that saves every step, after this step. Returns the last step that the run saved."""
        run, last = os.path.join(self.folder, name), 0
        command = [*LAUNCH, "-n", str(ranks_of(mesh)), TRAIN, "c.yaml",
                   *self.arguments(name, self.c.keep, self.c.strategy_of(mesh, True), base, save_interval=1)]
        with subprocess.Popen(command, cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              env=dict(os.environ, OPENBLAS_NUM_THREADS="1")) as launcher:
            while last < step and launcher.poll() is None:
                time.sleep(0.001)
                last = last_step(os.path.join(run, "metrics.jsonl"))
            ranks = [pid for pid in descendants(launcher.pid) if is_rank(pid)]
            if launcher.poll() is None and ranks:
                os.kill(self.c.draw.choice(ranks), signal.SIGKILL)
            status = launcher.wait(timeout=120)
        latest = os.path.join(run, "latest")
        saved = int(os.readlink(latest)[len("step"):]) if os.path.islink(latest) else 0
        if status == 0 and saved < STEPS:
            raise AssertionError(f"a rank of {shlex.join(command)} was killed, and the status is 0")
        return saved

    def same_files(self, what, found, expected):
        """Whether two folders have the same bytes of weights and states."""
        found, expected = os.path.join(self.folder, found), os.path.join(self.folder, expected)
        names = sorted(name for name in os.listdir(expected) if name.endswith((".safetensors", ".states")))
        if not names or names != sorted(name for name in os.listdir(found) if name.endswith((".safetensors", ".states"))):
            raise AssertionError(f"{what}: files {sorted(os.listdir(found))}, expected {sorted(os.listdir(expected))}")
        for name in names:
            with open(os.path.join(found, name), "rb") as one, open(os.path.join(expected, name), "rb") as other:
                if one.read() != other.read():
                    raise AssertionError(f"{what}: {name} has other bytes")


def last_step(path):
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")[:-1]
        return max((json.loads(line)["step"] for line in lines), default=0)
    except FileNotFoundError:
        return 0


def descendants(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            children = [int(child) for child in file.read().split()]
    except FileNotFoundError:
        return []
    return children + [more for child in children for more in descendants(child)]


def is_rank(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")[0] == TRAIN.encode()
    except FileNotFoundError:
        return False


def as_tuples(evals):
    return {step: (loss,) for step, loss in evals.items()}


def check(c, folder):
    runs = Meshes(c, folder)
    base, (mesh, other) = runs.base(), c.meshes
    alone, evals = runs.train(1, "alone", c.keep, base)
    bounds = c.bounds(alone)

    several, found = runs.on(mesh, "several", base, save_interval=1)
    compare("one rank", several, alone, bounds)
    compare("one rank, evaluation", as_tuples(found), as_tuples(evals), bounds)
    exact = c.recipe == "f32" and c.optimizer == "adamw" and not c.lora
    last = f"step{STEPS}"
    if exact:
        moved_at_most(c, tensors(f"{folder}/several/{last}"), tensors(f"{folder}/alone/{last}"), single.RATE)
    if mesh["stages"] > 1:
        whole, shown = runs.on(mesh, "whole", base, stages=False)
        apart = bounds if c.keys["model.weight_tying"] else None
        compare("no stages", several, whole, apart)
        compare("no stages, evaluation", as_tuples(found), as_tuples(shown), apart)
        if not apart:
            runs.same_files("no stages", f"several/{last}", f"whole/{last}")

    saved = runs.kill_one(mesh, "killed", base, c.stop)
    moved, shown = {}, {}
    if saved < STEPS:
        begin = {**base} if saved == 0 else {"load_path": f"several/step{saved}"}
        moved, shown = runs.on(other, "moved", begin)
    resumed, again = runs.on(other, "killed", base, try_load_latest_save=True)
    compare(f"killed after step {saved} and resumed", resumed, {**{s: x for s, x in several.items() if s <= saved}, **moved})
    compare("resumed, evaluation", as_tuples(again), as_tuples({**{s: x for s, x in found.items() if s <= saved}, **shown}))
    compare("resumed, one rank", resumed, alone, bounds)
    runs.same_files("resumed", f"killed/{last}", f"moved/{last}" if saved < STEPS else f"several/{last}")


def failure(number):
    """Returns the failure of a setting, and how to reproduce it; None: no failure."""
    folder = tempfile.mkdtemp()
    c = Setting(number)
    try:
        single.make_data(folder, c.micro)
        check(c, folder)
    except AssertionError as error:
        return f"setting {number}: {error}\n  {c.keys} {c.keep}\n  {c.meshes[0]}, then {c.meshes[1]}\n" \
               f"  again: python3 tests/test_random_meshes.py 1 {number}"
    finally:
        shutil.rmtree(folder)
    return None


@unittest.skipUnless(os.path.exists(TRAIN), f"needs {TRAIN}")
class RandomMeshes(unittest.TestCase):
    def test_six(self):
        for number in (1, 2, 5, 6, 7, 36):       # Muon, experts, 8-bit AdamW, all kinds of ranks (36: tensor ranks), adapters
            with self.subTest(number=number):
                self.assertIsNone(failure(number))


if __name__ == "__main__":
    single.main(failure, "setting")
