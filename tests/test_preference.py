#!/usr/bin/env python3
"""./train on preference pairs: every loss against TRL (golden/preference.json), cDPO by its formula; packed and unpacked, on
several ranks, resumed; LoRA with its base as reference; stored log-probabilities; the evaluator of pairs; refused settings.

BUILD and LAUNCH as scripts/run-tests sets them."""
import glob, gzip, json, math, os, re, shlex, shutil, struct, subprocess, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
LAUNCH = shlex.split(os.environ.get("LAUNCH", "mpirun --oversubscribe --bind-to none"))
MODEL, ADAPTER = os.path.join(TOP, "tests/golden/llama"), os.path.join(TOP, "tests/golden/lora/llama")
NAMES = ["preference/loss", "optim/total_grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies",
         "logps/chosen", "logps/rejected"]
with open(os.path.join(TOP, "tests/golden/preference.json")) as file:
    GOLDEN = json.load(file)


def most_ranks():
    """How many ranks can run at once. With CUDA each rank needs a GPU of its own."""
    if "cuda" not in TRAIN:
        return 4
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len(visible.split(","))
    return subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True).stdout.count("GPU ")


MOST_RANKS = most_ranks()


def can_run(ranks, case):
    if ranks > MOST_RANKS:
        print(f"SKIPPED {case}, needs {ranks} GPUs")
    return ranks <= MOST_RANKS


def write_zero_adapter(folder):
    """The adapter with B = 0, so that it changes nothing."""
    shutil.copytree(ADAPTER, folder)
    with open(os.path.join(folder, "adapter_model.safetensors"), "r+b") as file:
        size, = struct.unpack("<Q", file.read(8))
        for name, tensor in json.loads(file.read(size)).items():
            if "lora_B" in name:
                begin, end = tensor["data_offsets"]
                file.seek(8 + size + begin)
                file.write(bytes(end - begin))
    return folder


def write_pairs(folder, pairs):
    """Shards as make_pair_shards.py writes them; the labels are the tokens after the prompt."""
    os.makedirs(folder)
    ids, mask, rows = [], [], []
    for prompt, *sides in pairs:
        for side in sides:
            rows.append(f"{len(ids)},{len(ids) + len(prompt) + len(side)}\n")
            ids += prompt + side
            mask += [0] * len(prompt) + [1] * len(side)
    with open(os.path.join(folder, "ids.npy"), "wb") as file:
        file.write(struct.pack(f"<{len(ids)}H", *ids))
    with open(os.path.join(folder, "mask.npy"), "wb") as file:
        file.write(bytes(mask))
    with gzip.open(os.path.join(folder, "ids.csv.gz"), "wt") as file:
        file.writelines(rows)
    return folder


def read_logps(folder):
    path, = glob.glob(os.path.join(folder, "logps-*.f32"))
    with open(path, "rb") as file:
        return struct.unpack(f"<{os.path.getsize(path) // 4}f", file.read())


def side_sums(logps):
    at, sums = 0, []
    for prompt, *sides in GOLDEN["pairs"]:
        for side in sides:
            sums.append(sum(logps[at:at + len(prompt) + len(side)]))
            at += len(prompt) + len(side)
    return sums


def files_of(folder):
    return f"{{paths: [{folder}/ids.npy], label_mask_paths: [{folder}/mask.npy]}}"


class PreferenceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.top = tempfile.mkdtemp(prefix="coat-preference-")
        cls.data = {name: write_pairs(os.path.join(cls.top, name), GOLDEN[name]) for name in ("pairs", "short")}
        cls.adapters = {"adapter": ADAPTER, "zero-adapter": write_zero_adapter(os.path.join(cls.top, "zero"))}
        cls.runs = 0

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.top)

    def call(self, settings, ranks=1, fails=False, config=None):
        """Runs ./train; what it printed."""
        command = [*LAUNCH, "-n", str(ranks), TRAIN, *([config] if config else []),
                   *(f"--{key}={value}" for key, value in settings.items())]
        done = subprocess.run(command, cwd=self.top, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode != 0, fails, done.stdout)
        return done.stdout

    def settings(self, loss, data="pairs", **more):
        """Each step has all pairs: eight sequences of up to 256 tokens, most of them empty."""
        PreferenceTest.runs += 1
        folder = self.data[data]
        return {"load_path": MODEL, "recipe": "f32", "preference.loss": loss, "model.max_sequence_length": 256,
                "data.paths": f"[{folder}/ids.npy]", "data.label_mask_paths": f"[{folder}/mask.npy]", "data.packing": "best_fit",
                "data.document_boundaries": "metadata", "data.memmap_dtype": "uint16", "max_duration": GOLDEN["steps"],
                "global_train_batch_size": 8, "device_train_microbatch_size": 1, "max_grad_norm": "null",
                "optimizer.learning_rate": GOLDEN["rate"], "optimizer.betas": "[0.9,0.95]", "optimizer.eps": GOLDEN["eps"],
                "optimizer.weight_decay": 0, "scheduler.name": "constant", "eval_interval": "null", "save_interval": "null",
                "save_folder": os.path.join(self.top, f"run{self.runs}"), **more}

    def metrics(self, settings):
        """{name: values of all steps}, with evaluations after the steps."""
        with open(os.path.join(settings["save_folder"], "metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        return lines

    def train(self, settings, ranks=1):
        self.call(settings, ranks)
        lines = [line for line in self.metrics(settings) if NAMES[0] in line]
        return {name: [line[name] for line in lines] for name in NAMES}

    def assert_close(self, found, expected, what):
        """Sums of float32 log-probabilities are about 100 with errors of 1e-5; rewards are beta times such sums, and beta is at
        most 5. Later steps carry the error of earlier ones. Rounding decides whether the equal sides count as accurate,
        and at step 1 all pairs."""
        for name in NAMES:
            self.assertEqual(len(found[name]), len(expected[name]))
            for step, (a, b) in enumerate(zip(found[name], expected[name]), 1):
                bound = 1e-4 * max(1, abs(b))
                if name == "rewards/accuracies":
                    bound = 1 if step == 1 else 1 / 8
                self.assertLessEqual(abs(a - b), bound, f"{what}, step {step}: {name} is {a}, expected {b}")

    def test_trl(self):
        for run in GOLDEN["runs"]:
            adapter = run["adapter"] and {"load_path": self.adapters[run["adapter"]], "lora.base_path": MODEL}
            found = self.train(self.settings(run["loss"], run["data"], **run["settings"], **(adapter or {})))
            self.assert_close(found, run["metrics"], f"{run['loss']} {run['settings']} {run['adapter']}")

    def test_smoothing(self):
        """cDPO by its formula, of the one pair's margin."""
        self.data["one"] = self.data.get("one") or write_pairs(os.path.join(self.top, "one"), GOLDEN["pairs"][:1])
        found = self.train(self.settings("dpo", "one", **{"preference.label_smoothing": 0.2}))
        for loss, margin in zip(found["preference/loss"], found["rewards/margins"]):
            log_s = lambda x: -math.log1p(math.exp(-x))
            self.assertAlmostEqual(loss, -0.8 * log_s(margin) - 0.2 * log_s(-margin), 6)
        self.assertGreater(found["rewards/margins"][-1], 0.1)

    def test_ranks(self):
        """Packed and nearly unpacked, micro-batches, ranks with different numbers of pairs, also none; pipeline stages."""
        settings = lambda **more: self.settings("dpo", **{"preference.sft_weight": 0.3, **more})
        expected = self.train(settings())
        short = {"model.max_sequence_length": 32}
        for ranks, more in ((1, short), (2, short), (4, short), (2, {"device_train_microbatch_size": 4, **short}), (4, {}),
                            (2, {"parallelism.pipeline": 2, **short}), (1, {"loss_chunk": 7})):
            if can_run(ranks, f"test_ranks on {ranks} ranks"):
                self.assert_close(self.train(settings(**more), ranks), expected, f"{ranks} ranks, {more}")

    def test_resume(self):
        """A run that stops and continues has the bits of one that does not, and finds its reference."""
        for more in ({}, {"lora.rank": 2, "optimizer.learning_rate": 0.02}):
            whole, parts = self.settings("dpo_norm", **more), self.settings("dpo_norm", **more)
            expected = self.train(whole)
            self.call({**parts, "stop_at": 2})
            printed = self.call({**parts, "try_load_latest_save": "true"})
            self.assertNotIn("log-probabilities of", printed)
            lines = [line for line in self.metrics(parts) if NAMES[0] in line]
            self.assertEqual({name: [line[name] for line in lines] for name in NAMES}, expected)
            self.assertEqual(expected["rewards/margins"][0], 0)
            self.assertEqual(expected["rewards/accuracies"][0], 0)
            self.assertAlmostEqual(expected["preference/loss"][0], math.log(2), 6)
            self.assertLess(expected["preference/loss"][-1], math.log(2) - 1e-3)

    def test_recipes(self):
        """Policy and reference are bit for bit the same at step 1, also in FP8. FP8 gradients of the head have weights, too: the
        gradient's norm is that of float32 within 1/8, the rounding error of E5M2."""
        wide = {"load_path": os.path.join(TOP, "tests", "golden", "llama-gqa-tied")}     # heads of 16, as tensor cores need
        expected = self.train(self.settings("dpo", **wide))
        for recipe in ("bf16", "coat"):
            found = self.train(self.settings("dpo", recipe=recipe, **wide, **{"fp8.scales": "microbatch",
                                                                              "model.max_sequence_length": 64}),
                               min(2, MOST_RANKS))
            self.assertEqual(found["rewards/chosen"][0], 0, recipe)     # a sequence always has the same scales
            self.assertEqual(found["rewards/rejected"][0], 0, recipe)
            ratio = found["optim/total_grad_norm"][0] / expected["optim/total_grad_norm"][0]
            self.assertLess(abs(ratio - 1), 1 / 8, recipe)
            self.assertLess(found["preference/loss"][-1], 0.5, recipe)

    def test_score(self):
        """Log-probabilities by --score, on two ranks; which runs may use them."""
        expected = self.train(self.settings("dpo"))
        settings = self.settings("dpo")
        scores = os.path.join(self.top, "scores")
        self.call({**settings, "score": scores}, min(2, MOST_RANKS))
        path, = glob.glob(os.path.join(scores, "logps-*.f32"))
        logps = read_logps(scores)
        with open(os.path.join(self.data["pairs"], "mask.npy"), "rb") as file:
            mask = file.read()
        self.assertEqual([logp != 0 for logp in logps], [bool(one) for one in mask])
        sums = side_sums(logps)
        self.assertAlmostEqual(sum(sums[::2]) / 8, expected["logps/chosen"][0], 3)
        self.assertAlmostEqual(sum(sums[1::2]) / 8, expected["logps/rejected"][0], 3)
        for i, (ranks, more) in enumerate(((1, {}), (2, {}), (2, {"parallelism.context": 2}), (2, {"parallelism.pipeline": 2}))):
            other = os.path.join(self.top, f"scores{i}")            # of documents that are no pairs
            if can_run(ranks, f"test_score on {ranks} ranks"):
                self.call({**settings, **more, "preference.loss": "none", "score": other}, ranks)
                self.assertLess(max(abs(a - b) for a, b in zip(read_logps(other), logps)), 1e-4, more)
        reference = {"preference.reference": scores}
        self.assert_close(self.train({**settings, **reference}), expected, "with --score")
        for wrong in ({"recipe": "bf16"}, {"loss_temperature": 0.7}, {"model.max_sequence_length": 64},
                      {"load_path": os.path.join(TOP, "tests/golden/olmo2")}):
            printed = self.call({**self.settings("dpo"), **reference, **wrong}, fails=True)
            self.assertIn("no log-probabilities of the reference model", printed)
            self.assertIn(os.path.basename(path), printed)

    def test_temperature(self):
        folder, sharpened = os.path.join(self.top, "sharpened"), GOLDEN["sharpened"]
        self.call({**self.settings("dpo"), "loss_temperature": sharpened["temperature"], "score": folder})
        for found, expected in zip(side_sums(read_logps(folder)), sharpened["sums"]):
            self.assertAlmostEqual(found, expected, 4)              # sums of float32 numbers to 60

    def test_evaluator(self):
        """All pairs as held-out pairs: the metrics of the next step. --eval_only gives the same, and so does the run's own
        configuration."""
        settings = self.settings("ipo", save_interval=2, eval_interval=2)
        config = os.path.join(self.top, "evaluators.yaml")
        with open(config, "w") as file:
            file.write("evaluators:\n- {label: held, type: preference, data: " + files_of(self.data["pairs"]) + "}\n")
        ranks = min(2, MOST_RANKS)
        self.call(settings, ranks, config=config)
        lines = self.metrics(settings)
        step = next(line for line in lines if line["step"] == 3 and NAMES[0] in line)
        held = next(line for line in lines if line["step"] == 2 and "eval/held/preference/loss" in line)
        for name in NAMES[:1] + NAMES[2:]:
            self.assertAlmostEqual(held["eval/held/" + name], step[name], 4, name)
        folder = settings["save_folder"]
        again = {"eval_only": "true", "load_path": folder + "/step2", "save_folder": os.path.join(self.top, "evaluated")}
        self.assertIn("needs the log-probabilities", self.call(again, ranks, fails=True, config=folder + "/config.yaml"))
        self.call({**again, "preference.reference": folder + "/reference"}, ranks, config=folder + "/config.yaml")
        with open(os.path.join(self.top, "evaluated/eval.jsonl")) as file:
            found = json.loads(file.readlines()[-1])
        for name in NAMES[:1] + NAMES[2:]:
            self.assertEqual(found["eval/held/" + name], held["eval/held/" + name], name)

    def test_refused(self):
        for more, *words in (({"preference.loss": "hinge"}, "hinge", "apo_zero"),
                             ({"preference.loss": "kto"}, "kto", "apo_zero"),
                             ({"parallelism.context": 2}, "does not support parallelism.context"),
                             ({"softmax_auxiliary_loss": "true"}, "has no z-loss"),
                             ({"data.packing": "concat"}, "needs --data.packing=best_fit"),
                             ({"preference.label_smoothing": 0.1, "preference.loss": "ipo"}, "no label smoothing"),
                             ({"preference.gamma": 1}, "only preference.loss simpo"),
                             ({"model.max_sequence_length": 16}, "both sides must fit into one sequence of 16")):
            ranks = 2 if "parallelism.context" in more else 1
            if can_run(ranks, f"test_refused {more}"):
                printed = self.call({**self.settings("dpo"), **more}, ranks, fails=True)
                for word in words:
                    self.assertIn(word, printed)

    def test_memory(self):
        """The logits of a micro-batch never exist together, nor does a second model: pairs take only the weights of labels."""
        plans = []
        for loss in ("none", "dpo"):
            more = {"preference.loss": loss, "dry_run": "true", "device_memory": 79, "save_folder": "null", "max_duration": 1,
                    "model.max_sequence_length": 8192, "device_train_microbatch_size": 2, "global_train_batch_size": 2,
                    "softmax_auxiliary_loss": "false", "data.generate_doc_lengths": "false", "data.packing": "best_fit",
                    "data.document_boundaries": "metadata"}
            printed = self.call(more, config=os.path.join(TOP, "configs/Llama-3-8B.yaml"))
            plans.append(float(re.search(r"total ([0-9.]+) of 79", printed)[1]))
        self.assertLess(plans[1] - plans[0], 0.002)         # GiB: float32 logits of these tokens would be 7.8, a BF16 model 15

    def test_odd_documents(self):
        folder = write_pairs(os.path.join(self.top, "odd"), GOLDEN["pairs"])
        with gzip.open(os.path.join(folder, "ids.csv.gz"), "rt") as file:
            rows = file.readlines()
        with gzip.open(os.path.join(folder, "ids.csv.gz"), "wt") as file:
            file.writelines(rows[:-1])
        self.data["odd"] = folder
        self.assertIn("has a document without a partner", self.call(self.settings("dpo", "odd"), fails=True))


if __name__ == "__main__":
    unittest.main()
