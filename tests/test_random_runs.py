#!/usr/bin/env python3
"""Random runs of small models: features, ranks, strategies, resumes. One rank trains each configuration. Several ranks, and one rank
that keeps less for backward, must give the same results; a resume must continue bit for bit; and --eval_only must give the numbers
of the run.

    python3 tests/test_random_runs.py                   # 20 configurations, the same every time
    python3 tests/test_random_runs.py COUNT [FIRST]     # as many as one likes: number FIRST and those after it

BUILD and LAUNCH as scripts/run-tests sets them."""
import json, math, os, random, shlex, shutil, struct, subprocess, sys, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
LAUNCH = shlex.split(os.environ.get("LAUNCH", "mpirun --oversubscribe --bind-to none"))
VOCAB, EOS, T, BATCH, STEPS, RATE = 128, 127, 32, 8, 5, 1e-2
LOSS, NORM, LABELS = "train/CrossEntropyLoss", "optim/total_grad_norm", "train/labels"

ARCHITECTURES = {       # keys of `model`; for a list, one of its values
    "llama": {"layer_norm_type": "rms", "n_kv_heads": [None, 1], "weight_tying": [True, False]},
    "llama3": {"layer_norm_type": "rms", "weight_tying": [True, False],
               "rope_scaling": "{rope_type: llama3, factor: 4, original_max_position_embeddings: 16}"},
    "olmo": {"layer_norm_with_affine": False, "clip_qkv": [None, 0.5], "weight_tying": [True, False]},
    "olmo2": {"layer_norm_type": "rms", "norm_after": True, "attention_layer_norm": True, "n_kv_heads": [None, 1],
              "weight_tying": False},
    "olmo3": {"layer_norm_type": "rms", "norm_after": True, "attention_layer_norm": True, "weight_tying": False,
              "sliding_window": 8, "layer_types": "[sliding_attention, full_attention]"},
    "mistral": {"layer_norm_type": "rms", "sliding_window": [8, None], "n_kv_heads": 1, "weight_tying": False},
    "qwen2": {"layer_norm_type": "rms", "qkv_bias": True, "n_kv_heads": 1, "weight_tying": [True, False]},
    "smollm3": {"layer_norm_type": "rms", "no_rope_layer_interval": [1, 2], "weight_tying": [True, False]},
    "qwen3": {"layer_norm_type": "rms", "attention_layer_norm": "head", "head_dim": 32, "weight_tying": [True, False]},
}
EXPERTS = {             # the same for models with experts, drawn by Configuration.draw_experts
    "olmoe": {"layer_norm_type": "rms", "attention_layer_norm": True, "norm_topk_prob": [True, False], "weight_tying": [True, False]},
    "qwen3_moe": {"layer_norm_type": "rms", "attention_layer_norm": "head", "n_kv_heads": 1, "head_dim": 32,
                  "norm_topk_prob": [True, False], "weight_tying": [True, False]},
}
# FP8: whether all rows of a GEMM operand share a scale
RECIPES = {"f32": False, "bf16": False, "coat-opt": False, "fp8": True, "fp8-lm": True, "coat-act": True, "coat": True,
           "coat-lean": True}
STRATEGIES = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
SHARES = ["none", "one_in_two", "two_in_three"]


def text(value):
    return {True: "true", False: "false", None: "null"}.get(value, value) if not isinstance(value, (int, float)) or \
        isinstance(value, bool) else repr(value)


class Configuration:
    """Random number n; depends only on n."""
    length = T
    tensor = 1

    def __init__(self, n):
        draw = self.draw = random.Random(n)
        pick = draw.choice
        self.n, self.recipe, self.optimizer = n, pick(list(RECIPES)), pick(["adamw", "adamw", "adamw8bit"])
        self.micro, self.ranks, self.stop = pick([1, 2]), pick([1, 2, 2, 4]), draw.randrange(1, STEPS)
        self.architecture, self.lora = pick(list(ARCHITECTURES)), draw.random() < 0.25
        self.keys = {"recipe": self.recipe, "optimizer.name": self.optimizer, "seed": draw.randrange(1000)}
        for key, value in ARCHITECTURES[self.architecture].items():
            self.keys[f"model.{key}"] = pick(value) if isinstance(value, list) else value
        self.keys["model.n_layers"] = draw.randrange(1, 4)
        self.draw_data(pick)
        self.draw_training(pick)
        self.strategy = self.draw_strategy(pick)
        self.keep = {"activations.keep": pick([None, "all", "inputs", "block"]), "activations.recompute": pick(SHARES)}
        self.ratio = pick([None, None, 0.2, 0.5, 0.73])      # of the first of two sources; None: data.paths
        self.context = pick([1, 2]) if self.can_share_sequences() else 1
        if self.context > 1:
            self.strategy["parallelism.context"] = self.context
        if self.can_have_stages():
            self.strategy.update(pick([{}, {"parallelism.pipeline": 2},
                                       {"parallelism.pipeline": 2, "parallelism.pipeline_schedule": "Sequential"},
                                       {"parallelism.pipeline": 2, "parallelism.pipeline_schedule": "Interleaved1F1B",
                                        "parallelism.pipeline_virtual_stages": 2, "model.n_layers": 4}]))
            self.keys["model.n_layers"] = self.strategy.pop("model.n_layers", self.keys["model.n_layers"])
        if n % 8 in (2, 3) and not self.lora:
            self.draw_experts(random.Random(f"experts {n}").choice)

    def draw_experts(self, pick):
        """Replaces the architecture; with its own numbers, so that the other settings are drawn as without experts. Rounding may
        change the choice of experts, so all of them compute each token, unless the run is in F32."""
        for key in ARCHITECTURES[self.architecture]:
            del self.keys[f"model.{key}"]
        self.architecture = pick(list(EXPERTS))
        for key, value in EXPERTS[self.architecture].items():
            self.keys[f"model.{key}"] = pick(value) if isinstance(value, list) else value
        self.keys.update({"model.num_experts": 4, "model.num_experts_per_tok": 2 if self.recipe == "f32" else 4,
                          "model.router_aux_loss": pick(["none", "sequence"]), "model.router_z_loss_coef": pick([0, 0.01]),
                          "model.bias_gamma": pick([None, 0.01])})
        if RECIPES[self.recipe]:
            self.keys["fp8.down_scales"] = "tensor"

    def draw_data(self, pick):
        best_fit, metadata = pick([True, False]), pick([True, False])
        self.keys["data.packing"] = "best_fit" if best_fit else "concat"
        self.keys["data.document_boundaries"] = "metadata" if metadata else "eos"
        self.keys["data.generate_doc_lengths"] = best_fit or pick([True, False])
        if best_fit:
            self.keys["data.long_documents"] = pick(["truncate", "split"])
        self.masked = pick([True, False])

    def draw_training(self, pick):
        self.keys.update({
            "max_grad_norm": pick([None, 1.0]), "softmax_auxiliary_loss": pick([True, False]), "loss_chunk": pick([0, 13]),
            "scheduler.name": pick(["cosine_with_warmup", "linear_with_warmup", "constant_with_warmup"]),
            "scheduler.t_warmup": pick([0, 2]), "optimizer.weight_decay": pick([0, 0.1]), "format.grads": pick([None, "f32"])})
        if RECIPES[self.recipe]:
            self.keys["fp8.scales"] = pick([None, "microbatch", "step"])
            self.keys["format.head"] = pick([None, "bf16", "e5m2"])
            self.keys["fp8.down_scales"] = "tensor" if self.lora else pick(["tensor", "channel"])
        if self.lora:
            self.keys.update({"lora.rank": pick([2, 4]), "lora.base": pick(["bf16", "e4m3", "nf4"]),
                              "lora.use_rslora": pick([True, False]),
                              "lora.target_modules": pick(["all-linear", "[q_proj, v_proj]", "[o_proj, up_proj, down_proj]"])})
        else:
            self.keys["trainable"] = pick(["[]", "[]", "[]", "[model.layers.*.mlp.*]", "[model.layers.0.*, model.norm.weight]"])
            if "layer_norm_with_affine" in ARCHITECTURES[self.architecture]:
                self.keys["trainable"] = "[]"

    def draw_strategy(self, pick):
        strategy = {"fsdp.sharding_strategy": pick(STRATEGIES), "fsdp.grad_sync_mode": pick([None, "micro_batch", "batch"]),
                    "fsdp.precision": pick([None, "pure", "mixed"])}
        if "HYBRID" in strategy["fsdp.sharding_strategy"] and self.ranks > 1:
            strategy["fsdp.hybrid_sharding_num_model_replicas"] = 2
        return strategy

    def can_share_sequences(self):
        group = self.ranks // self.strategy.get("fsdp.hybrid_sharding_num_model_replicas", 1)
        return group % 2 == 0

    def can_have_stages(self):
        in_stage = self.context * self.strategy.get("fsdp.hybrid_sharding_num_model_replicas", 1)
        return self.keys["model.n_layers"] > 1 and self.strategy["fsdp.grad_sync_mode"] != "micro_batch" and \
            self.ranks % (2 * in_stage) == 0

    def saves_fp8(self):
        return self.recipe in ("coat-act", "coat", "coat-lean")

    def shares_scales(self):
        """Whether tokens share the scale of an FP8 operand with other tokens, and with different ones on other numbers of
        ranks."""
        scales = self.keys.get("fp8.scales") or ("step" if self.saves_fp8() else "microbatch")
        return RECIPES[self.recipe] and (self.micro > 1 or scales == "step" or self.context > 1)

    def bounds(self, alone):
        """How far apart, relative to them, loss and norm of each step may be on other numbers of ranks. alone: those of one rank.

        The loss of the first step: its BATCH x length terms are the same bits and are added in another order, at a roundoff of F32,
        2^-24, each time. Where an FP8 operand's scale is that of other sequences, it errs by roundings of E4M3, 2^-4 of each of them,
        which sums of 32 terms and more average out: 2^-6.
        Of gradients BATCH, or parts of them, are added in another order: each sum errs by 2 BATCH roundoffs of the format they are
        summed in, F32's or BF16's 2^-9; with other scales by the 2^-4 of their operands, too. So, relatively, does the norm, for
        which sums that cancel count twice. Context ranks multiply fewer rows at once, for which OpenBLAS sums in another order, and
        what is next to the middle between two numbers of BF16 becomes the other one: 2^-9. Tensor ranks round their partial sums to
        BF16 in both branches of a block, forward and backward: four roundings more.
        AdamW's step moves the weights by as much more or less, and the loss, to first order, by that part of what it moved by so
        far; in BF16, and where moments have 8 bits, a weight or moment next to the middle between two numbers becomes the other
        one: 2^-9 of the loss. Where a gradient is near 0 the error decides the sign of a weight's step, so that steps differ by a root
        mean square of step_error, each independently of others. Such a difference has no relation to the gradient of a later batch:
        it changes the loss by the norm of that gradient times as much.
        What that does to the norm of later steps is not bounded: only those of F32 are compared."""
        exact = self.recipe == "f32" and self.optimizer == "adamw"
        first = 2**-6 if self.shares_scales() else 2 * BATCH * self.length * 2**-24
        in_f32 = self.recipe == "f32" or self.keys["format.grads"]
        gradient = 2 * BATCH * self.context * (2**-24 if in_f32 else 2**-9) + (2**-4 if self.shares_scales() else 0)
        gradient += 2**-9 if self.context > 1 and self.recipe != "f32" else 0
        gradient += 4 * 2**-9 if self.tensor > 1 and self.recipe != "f32" else 0
        bounds, moved = {}, 0
        for step, (loss, norm, *_) in sorted(alone.items()):
            moved += abs(loss - alone[step - 1][0]) if step > 1 else 0
            later = (gradient * moved + norm * step_error(gradient, RATE) * math.sqrt(step - 1)) / loss
            later += 2**-9 if step > 1 and not exact else 0
            bounds[step] = (first * step + later, 2 * gradient * step if exact or step == 1 else float("inf"), 0)
        return bounds


def step_error(gradient, rate):
    """The root mean square of the difference of AdamW's steps, over weights, where gradients err by this part of their root mean
    square: e changes the step of a weight whose gradient is g by at most 2 rate min(1, e/g), and gradients near 0 are as frequent
    as others of that width."""
    return 2 * rate * math.sqrt(2 * gradient)


class Runs:
    """Writes the files of a configuration to its own folder."""

    def __init__(self, configuration, folder):
        self.c, self.folder = configuration, folder

    def arguments(self, name, *sections, **more):
        keys = dict(self.c.keys)
        for section in sections:
            keys.update(section)
        keys.update(self.data())
        keys.update(more, save_folder=name)
        return [f"--{key}={text(value)}" for key, value in keys.items()
                if value is not None or key in ("max_grad_norm",)]

    def data(self):
        if not self.c.ratio:
            return {"data.paths": "[a.npy, b.npy]", **({"data.label_mask_paths": "[a.mask, b.mask]"} if self.c.masked else {})}
        sources = [f"{{name: {name}, paths: [{name}.npy], {f'label_mask_paths: [{name}.mask], ' if self.c.masked else ''}"
                   f"ratio: {ratio}, max_repetition: 100}}" for name, ratio in (("a", self.c.ratio), ("b", 1 - self.c.ratio))]
        return {"data.mix": f"[{', '.join(sources)}]"}

    def train(self, ranks, name, *sections, **more):
        """Returns the metrics by step: loss, norm and number of labels, and the results of evaluations."""
        command = ([*LAUNCH, "-n", str(ranks)] if ranks > 1 else []) + [TRAIN, "c.yaml", *self.arguments(name, *sections, **more)]
        done = subprocess.run(["timeout", "-k", "10", "200", *command], cwd=self.folder, capture_output=True, text=True,
                              env=dict(os.environ, OPENBLAS_NUM_THREADS="1"))       # status 124: a hang
        if done.returncode != 0:
            raise AssertionError(f"status {done.returncode} of {shlex.join(command)}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
        steps, evals = {}, {}
        path = os.path.join(self.folder, name, "eval.jsonl" if more.get("eval_only") else "metrics.jsonl")
        with open(path) as file:
            for record in map(json.loads, file):
                if LOSS in record:
                    steps[record["step"]] = (record[LOSS], record[NORM], record[LABELS])
                evals.update({record["step"]: value for key, value in record.items() if key == "eval/v/CrossEntropyLoss"})
        return steps, evals

    def base(self):
        """Makes the base model of adapters."""
        if not self.c.lora:
            return {}
        model = {key: value for key, value in self.c.keys.items() if key.startswith("model.")}
        saved, self.c.keys = self.c.keys, {**model, "recipe": "f32"}
        self.train(1, "base", max_duration=1)
        self.c.keys = saved
        return {"load_path": "base/step1"}


def compare(what, found, expected, bounds=None):
    """Compares bit for bit, or within these bounds of each step."""
    if sorted(found) != sorted(expected):
        raise AssertionError(f"{what}: steps {sorted(found)}, expected {sorted(expected)}")
    for step, values in found.items():
        for name, x, y, most in zip(("loss", "norm", "labels"), values, expected[step], bounds[step] if bounds else (0, 0, 0)):
            if x != y and (None in (x, y) or not abs(x - y) <= most * abs(y)):
                raise AssertionError(f"{what}: step {step}: {name} {x}, expected {y}, at most {most:.2g} of it apart")


def check(number, folder):
    c = Configuration(number)
    runs = Runs(c, folder)
    base = runs.base()
    alone, evals = runs.train(1, "alone", c.keep, base)
    if not c.saves_fp8():           # if backward reads saved E4M3 values, they differ from the values of forward
        compare("all kept", runs.train(1, "kept", {"activations.keep": "all"}, base)[0], alone)
    several, found = runs.train(c.ranks, "several", c.keep, c.strategy, base, save_interval=c.stop)
    bounds = c.bounds(alone) if c.ranks > 1 else None
    compare(f"{c.ranks} ranks", several, alone, bounds)
    compare("evaluation", {s: (x,) for s, x in found.items()}, {s: (x,) for s, x in evals.items()}, bounds)
    again, later = runs.train(c.ranks, "again", c.keep, c.strategy, load_path=f"several/step{c.stop}")
    compare("resumed", again, {s: x for s, x in several.items() if s > c.stop})
    compare("resumed, evaluation", {s: (x,) for s, x in later.items()}, {s: (x,) for s, x in found.items() if s > c.stop})
    only = runs.train(c.ranks, "only", c.keep, c.strategy, load_path="several/latest", eval_only=True)[1]
    if only[STEPS] != found[STEPS]:
        raise AssertionError(f"--eval_only: loss {only[STEPS]}, expected {found[STEPS]}")


CONFIG = f"""
model: {{d_model: 32, n_heads: 2, mlp_hidden_size: 128, max_sequence_length: {T}, vocab_size: {VOCAB}, eos_token_id: {EOS},
        pad_token_id: {EOS - 1}}}
optimizer: {{learning_rate: {RATE}}}
max_duration: {STEPS}
global_train_batch_size: {BATCH}
eval_interval: 3
evaluators: [{{label: v, data: {{paths: [v.npy]}}}}]
"""


def make_data(folder, micro):
    """Writes documents of 3 to 60 tokens in shards, with label masks and metadata."""
    draw = random.Random(1)
    with open(os.path.join(folder, "c.yaml"), "w") as file:
        file.write(CONFIG + f"device_train_microbatch_size: {micro}\n")
    for name, documents in (("a", 40), ("b", 30), ("v", 12)):
        tokens, mask, rows = [], [], []
        for _ in range(documents):
            length = draw.randrange(3, 61)
            rows.append(f"{len(tokens)},{len(tokens) + length}\n")
            tokens += [draw.randrange(40) + 40 * (i % 3) for i in range(length - 1)] + [EOS]
            mask += [i * 3 > length for i in range(length)]
        for ending, data in (("npy", struct.pack(f"<{len(tokens)}H", *tokens)), ("mask", bytes(mask)),
                             ("csv.gz", "".join(rows).encode())):
            with open(os.path.join(folder, f"{name}.{ending}"), "wb") as file:
                file.write(data)


def failure(number):
    """Returns the failure of a configuration, and how to reproduce it; None: no failure."""
    folder = tempfile.mkdtemp()
    try:
        make_data(folder, Configuration(number).micro)
        check(number, folder)
    except AssertionError as error:
        c = Configuration(number)
        return f"configuration {number}: {error}\n  {c.ranks} ranks, micro-batches of {c.micro}, {c.keys} {c.keep} {c.strategy}\n" \
               f"  again: python3 tests/test_random_runs.py 1 {number}"
    finally:
        shutil.rmtree(folder)
    return None


@unittest.skipUnless(os.path.exists(TRAIN), f"needs {TRAIN}")
class RandomRuns(unittest.TestCase):
    def test_twenty(self):
        for number in range(20):
            with self.subTest(number=number):
                self.assertIsNone(failure(number))


def main(failure, what):
    """COUNT [FIRST]: tries COUNT configurations from number FIRST on; without arguments, runs the test."""
    if len(sys.argv) < 2 or not sys.argv[1].isdigit():
        return unittest.main()
    first, failed = int(sys.argv[2]) if len(sys.argv) > 2 else 0, 0
    for number in range(first, first + int(sys.argv[1])):
        said = failure(number)
        failed += said is not None
        print(said or f"{what} {number}: as it should be", flush=True)
    print(f"{sys.argv[1]} {what}s, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(failure, "configuration")
