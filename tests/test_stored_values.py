#!/usr/bin/env python3
"""./train on values that are stored with tokens: soft labels (distillation) and numbers of a policy. Every loss against PyTorch and
TRL (golden/stored_values.json); packed and unpacked, on several ranks, resumed; the format of soft labels, and draws; recipes;
refused files and settings.

BUILD and LAUNCH as scripts/run-tests sets them."""
import collections, glob, gzip, json, math, os, shlex, shutil, struct, subprocess, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
LAUNCH = shlex.split(os.environ.get("LAUNCH", "mpirun --oversubscribe --bind-to none"))
STUDENT, TEACHER = (os.path.join(TOP, "tests/golden", name) for name in ("llama", "mistral"))
with open(os.path.join(TOP, "tests/golden/stored_values.json")) as file:
    GOLDEN = json.load(file)
VALUES = ("advantage", "old", "generator", "reference")
VOCABULARY = 99


def write_documents(folder, documents, values):
    """Shards with label masks and, for each token, the four numbers of a policy; the first token of a document has none."""
    os.makedirs(folder)
    ids, mask, rows, numbers = [], [], [], []
    for i, (prompt, completion) in enumerate(documents):
        rows.append(f"{len(ids)},{len(ids) + len(prompt) + len(completion)}\n")
        ids += prompt + completion
        mask += [0] * len(prompt) + [1] * len(completion)
        numbers += [math.nan] * 4
        for at in range(len(prompt) + len(completion) - 1):
            numbers += [values[name][i][at] for name in VALUES]
    for name, kind, data in (("ids.npy", "H", ids), ("mask.npy", "B", mask), ("ids.policy.f32", "f", numbers)):
        with open(os.path.join(folder, name), "wb") as file:
            file.write(struct.pack(f"<{len(data)}{kind}", *data))
    with gzip.open(os.path.join(folder, "ids.csv.gz"), "wt") as file:
        file.writelines(rows)
    return folder


class SoftLabels:
    """A file of soft labels, read as model/shape/distill.h describes it."""

    def __init__(self, path):
        with open(path, "rb") as file:
            data = file.read()
        magic, self.tokens, entries, self.tokenizer, self.vocabulary, self.k, _, self.temperature = struct.unpack("<8s3Q3If", data[:48])
        assert magic == b"coatsft1" and len(data) == 64 + 8 * self.tokens + 6 * entries
        self.words = struct.unpack(f"<{self.tokens}Q", data[64:64 + 8 * self.tokens])
        self.entries = list(struct.iter_unpack("<IH", data[64 + 8 * self.tokens:]))
        self.bytes = len(data)

    def of(self, token):
        """({id: probability}, tail)"""
        word = self.words[token]
        first, count, tail = word & (1 << 38) - 1, word >> 38 & 1023, word >> 48
        value = lambda code: 0 if code == 65535 or not word else math.exp(-code / 2048)
        return {i: value(code) for i, code in self.entries[first:first + count]}, value(tail)


class StoredValuesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.top = tempfile.mkdtemp(prefix="coat-values-")
        cls.data = write_documents(os.path.join(cls.top, "data"), GOLDEN["documents"], GOLDEN["values"])
        cls.runs = 0
        cls.scored = {}

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.top)

    def call(self, settings, ranks=1, fails=False):
        """Runs ./train; what it printed."""
        command = [*LAUNCH, "-n", str(ranks), TRAIN, *(f"--{key}={value}" for key, value in settings.items())]
        done = subprocess.run(command, cwd=self.top, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(done.returncode != 0, fails, done.stdout)
        return done.stdout

    def settings(self, **more):
        """Each step has all documents: eight sequences of up to 256 tokens, most of them empty."""
        StoredValuesTest.runs += 1
        return {"load_path": STUDENT, "recipe": "f32", "model.max_sequence_length": 256, "data.paths": f"[{self.data}/ids.npy]",
                "data.label_mask_paths": f"[{self.data}/mask.npy]", "data.packing": "best_fit", "data.document_boundaries": "metadata",
                "data.memmap_dtype": "uint16", "max_duration": GOLDEN["steps"], "global_train_batch_size": 8,
                "device_train_microbatch_size": 1, "max_grad_norm": "null", "optimizer.learning_rate": GOLDEN["rate"],
                "optimizer.betas": "[0.9,0.95]", "optimizer.eps": GOLDEN["eps"], "optimizer.weight_decay": 0,
                "scheduler.name": "constant", "eval_interval": "null", "save_interval": "null",
                "save_folder": os.path.join(self.top, f"run{self.runs}"), **more}

    def score(self, ranks=1, fails=False, **more):
        """A folder with soft labels of the teacher, of the data at this length and temperature."""
        settings = self.settings(**{"load_path": TEACHER, "top_k": GOLDEN["top_k"], **more})
        folder = os.path.join(self.top, f"soft{self.runs}")
        printed = self.call({**settings, "score": folder}, ranks, fails)
        return printed if fails else folder

    def soft(self, settings):
        """The settings of a run, with its soft labels, which are written once for each length and temperature."""
        key = settings["model.max_sequence_length"], settings.get("distill.temperature", 1)
        if key not in self.scored:
            self.scored[key] = self.score(**{"model.max_sequence_length": key[0], "distill.temperature": key[1]})
        return {**settings, "distill.targets": self.scored[key]}

    def metrics(self, settings):
        with open(os.path.join(settings["save_folder"], "metrics.jsonl")) as file:
            lines = [json.loads(line) for line in file]
        found = collections.defaultdict(list)
        for line in lines:
            for name, value in line.items():
                found[name].append(value)
        found["loss"] = found["distill/loss"] or found["policy/loss"]
        return found

    def train(self, settings, ranks=1):
        settings = self.soft(settings) if "distill.loss" in settings else settings
        self.call(settings, ranks)
        return self.metrics(settings)

    def assert_close(self, found, expected, what, bound=1e-4):
        """Float32, and later steps carry the error of earlier ones. A code of a soft label that is rounded the other way changes a
        probability by 2^-11, in one of 47 labels."""
        for name, values in expected.items():
            self.assertEqual(len(found[name]), len(values), name)
            for step, (a, b) in enumerate(zip(found[name], values), 1):
                self.assertLessEqual(abs(a - b), bound * max(1, abs(b)), f"{what}, step {step}: {name} is {a}, expected {b}")

    def test_golden(self):
        for run in GOLDEN["runs"]:
            self.assert_close(self.train(self.settings(**run["settings"])), run["metrics"], run["settings"])

    def test_ranks(self):
        """Packed and nearly unpacked, micro-batches, ranks without documents, context ranks and stages, chunks of logits."""
        short = {"model.max_sequence_length": 32}
        for run in (GOLDEN["runs"][3], GOLDEN["runs"][4], GOLDEN["runs"][5]):
            ways = [(2, short), (4, {"loss_chunk": 7}), (2, {"device_train_microbatch_size": 4, **short}),
                    (2, {"parallelism.pipeline": 2, **short})]
            if "distill.loss" in run["settings"]:
                ways += [(2, {"parallelism.context": 2})]
            for ranks, more in ways:
                self.assert_close(self.train(self.settings(**run["settings"], **more), ranks), run["metrics"], f"{ranks} ranks, {more}")

    def test_resume(self):
        """A run that stops and continues has the bits of one that does not."""
        for more in ({"distill.loss": "forward_kl"}, {"policy.loss": "dapo"}):
            whole, parts = self.settings(**more), self.settings(**more)
            expected = self.train(whole)
            self.train({**parts, "stop_at": 2})
            found = self.train({**parts, "try_load_latest_save": "true"})
            for name in ("loss", "optim/total_grad_norm", "train/CrossEntropyLoss"):
                self.assertEqual(found[name], expected[name])

    def test_recipes(self):
        """BF16 and FP8, also of the head's gradient: the norm is that of float32 within 1/8, the rounding error of E5M2."""
        for run in (GOLDEN["runs"][0], GOLDEN["runs"][6]):
            for recipe in ("bf16", "coat"):
                found = self.train(self.settings(recipe=recipe, **{**run["settings"], "model.max_sequence_length": 64}), 2)
                self.assertAlmostEqual(found["loss"][0], run["metrics"]["loss"][0], delta=0.05, msg=recipe)
                ratio = found["optim/total_grad_norm"][0] / run["metrics"]["optim/total_grad_norm"][0]
                self.assertLess(abs(ratio - 1), 1 / 8, (recipe, run["settings"]))

    def test_soft_labels(self):
        """The file has the teacher's most likely ids, on any ranks, also of files that are cut into sequences; its size."""
        with open(os.path.join(self.data, "mask.npy"), "rb") as file:
            mask = file.read()
        path, = glob.glob(os.path.join(self.score(), "soft-*.bin"))
        one = SoftLabels(path)
        self.assertEqual([one.k, one.vocabulary, one.temperature], [8, VOCABULARY, 1])
        self.assertEqual([bool(word) for word in one.words], [bool(label) for label in mask])
        self.assertLessEqual(one.bytes, 64 + len(mask) * 8 + sum(mask) * 8 * 6)
        for token in range(one.tokens):
            entries, tail = one.of(token)
            self.assertAlmostEqual(sum(entries.values()) + tail, mask[token], delta=2 ** -12 * 9)
        everything = SoftLabels(glob.glob(self.score(top_k=VOCABULARY) + "/*")[0])
        for token in range(one.tokens):
            entries, _ = one.of(token)
            for i, p in everything.of(token)[0].items():
                if i in entries:
                    self.assertEqual(p, entries[i])
                else:
                    self.assertLessEqual(p, min(entries.values()))
        for ranks, more in ((2, {}), (4, {"device_train_microbatch_size": 2}), (2, {"parallelism.context": 2}),
                            (2, {"parallelism.pipeline": 2})):
            other = SoftLabels(glob.glob(self.score(ranks, **more) + "/*")[0])
            for token in range(one.tokens):
                (a, tail_a), (b, tail_b) = one.of(token), other.of(token)
                self.assertEqual(list(a), list(b))
                self.assertLess(abs(tail_a - tail_b), 1e-3)
        cut = {"data.packing": "concat", "data.document_boundaries": "eos", "data.generate_doc_lengths": "false",
               "model.max_sequence_length": 16, "device_train_microbatch_size": 2}
        folder = self.score(2, **cut)
        words = SoftLabels(glob.glob(folder + "/*")[0]).words
        whole = len(mask) // 16 * 16        # the last sequence is incomplete; the first token of a sequence is no label
        self.assertEqual([bool(word) for word in words], [bool(label) and i % 16 > 0 and i < whole for i, label in enumerate(mask)])
        found = self.train_with(folder, **cut, **{"distill.loss": "forward_kl", "load_path": TEACHER, "global_train_batch_size": 4})
        self.assertLess(abs(found["distill/divergence"][0]), 2 ** -12 * 9)          # teacher and student are equal

    def train_with(self, folder, **more):
        settings = self.settings(**{"distill.targets": folder, **more})
        self.call(settings)
        return self.metrics(settings)

    def test_draws(self):
        """Draws have the teacher's probabilities on average. Their gradient is that of all ids, on average: with 512 draws, the mean
        over ids of the error of a count is sqrt(p / 512), and the loss of 47 labels is close."""
        everything = SoftLabels(glob.glob(self.score(top_k=VOCABULARY) + "/*")[0])
        exact = self.train_with(self.score(top_k=VOCABULARY), **{"distill.loss": "forward_kl", "top_k": VOCABULARY})
        for by, most in (("counts", 6), ("probabilities", math.inf)):
            folder = self.score(top_k=512, top_k_by=by)
            drawn = SoftLabels(glob.glob(folder + "/*")[0])
            squares = count = 0
            for token in range(drawn.tokens):
                entries, tail = drawn.of(token)
                if entries:
                    self.assertEqual(tail, 0)
                    self.assertAlmostEqual(sum(entries.values()), 1, delta=2 ** -11)
                for i, p in everything.of(token)[0].items():
                    if by == "counts" and p > 0.02:
                        squares, count = squares + (entries.get(i, 0) - p) ** 2 / (p * (1 - p) / 512), count + 1
            if by == "counts":      # a mean of squares of standard deviation sqrt(2 / count)
                self.assertLess(abs(squares / count - 1), 5 * math.sqrt(2 / count))
            found = self.train_with(folder, **{"distill.loss": "forward_kl", "top_k": 512})
            self.assertAlmostEqual(found["optim/total_grad_norm"][0], exact["optim/total_grad_norm"][0],
                                   delta=0.1 * exact["optim/total_grad_norm"][0])
            printed = self.call({**self.settings(top_k=512), "distill.loss": "reverse_kl", "distill.targets": folder}, fails=True)
            self.assertIn("drawn ids have none", printed)

    def test_vocabulary(self):
        """A teacher with another tokenizer is refused, and one with more ids unless both have the same tokenizer."""
        teacher, student = (os.path.join(self.top, name) for name in ("teacher", "student"))
        shutil.copytree(TEACHER, teacher)
        shutil.copytree(STUDENT, student)
        for folder, text in ((teacher, "{}"), (student, "{ }")):
            with open(os.path.join(folder, "tokenizer.json"), "w") as file:
                file.write(text)
        scored = self.score(load_path=teacher)
        run = {**self.settings(load_path=student), "distill.loss": "forward_kl", "distill.targets": scored}
        self.assertIn("tokenizer.json differs", self.call(run, 2, fails=True))
        path, = glob.glob(scored + "/*")
        with open(path, "r+b") as file:         # as if the teacher had more ids
            file.seek(32)
            file.write(struct.pack("<I", VOCABULARY + 5))
        os.remove(os.path.join(student, "tokenizer.json"))
        again = {**run, "save_overwrite": "true"}
        self.assertIn(f"the teacher has {VOCABULARY + 5} ids, the student {VOCABULARY}", self.call(again, fails=True))
        shutil.copy(os.path.join(teacher, "tokenizer.json"), student)
        self.call(again)
        before = self.metrics(run)["loss"][0]
        soft = SoftLabels(path)
        with open(path, "r+b") as file:         # an id that the student lacks belongs to the tail
            file.seek(64 + 8 * soft.tokens)
            file.write(struct.pack("<I", VOCABULARY + 1))
        self.call(again)
        self.assertNotEqual(self.metrics(run)["loss"][0], before)

    def test_missing_numbers(self):
        """Without old and generator, ratios and weights are 1; a label needs its advantage, and beta the reference."""
        values = {**GOLDEN["values"], **{name: [[math.nan] * len(row) for row in GOLDEN["values"][name]] for name in VALUES[1:]}}
        folder = write_documents(os.path.join(self.top, "few"), GOLDEN["documents"], values)
        few = {"data.paths": f"[{folder}/ids.npy]", "data.label_mask_paths": f"[{folder}/mask.npy]", "policy.loss": "grpo"}
        found = self.train(self.settings(**few))
        for name, value in (("ratio", 1), ("ratio_max", 1), ("importance_weight", 1), ("kl_old", 0), ("clip_low", 0)):
            self.assertEqual(found["policy/" + name], [value] * GOLDEN["steps"])
        self.assertIn("no log-probability under the reference", self.call(self.settings(**few, **{"policy.beta": 0.1}), fails=True))
        os.truncate(os.path.join(folder, "ids.policy.f32"), 160)
        self.assertIn("with 16 bytes of values each", self.call(self.settings(**few), 2, fails=True))
        os.remove(os.path.join(folder, "ids.policy.f32"))
        self.assertIn("ids.policy.f32", self.call(self.settings(**few), fails=True))

    def test_refused(self):
        distill = {"distill.loss": "forward_kl", "distill.targets": "nowhere"}
        for more, word in (({"distill.loss": "forward_kl"}, "--top_k=K writes with the teacher"), (distill, "no soft labels for these data"),
                           ({**distill, "loss_temperature": 2}, "has its own distill.temperature"),
                           ({**distill, "softmax_auxiliary_loss": "true"}, "has no z-loss"),
                           ({**distill, "policy.loss": "grpo"}, "use one"), ({**distill, "preference.loss": "dpo"}, "use one of them"),
                           ({"policy.loss": "grpo", "parallelism.context": 2}, "does not support parallelism.context"),
                           ({"policy.loss": "grpo", "data.packing": "concat"}, "needs whole documents"),
                           ({"score": "s", "top_k": 100}, "the vocabulary has 99 ids")):
            self.assertIn(word, self.call(self.settings(**more), 2, fails=True))
        scored = self.score()
        for more, word in (({"distill.temperature": 2}, "was written with --distill.temperature=1"), ({"top_k": 4}, "use --top_k=8"),
                           ({"model.max_sequence_length": 128}, "no soft labels for these data")):
            run = self.settings(**{**distill, "distill.targets": scored, **more})
            self.assertIn(word, self.call(run, fails=True))
        shutil.copy(*(glob.glob(scored + "/*")[0].replace("soft-", name) for name in ("soft-", "soft-0-")))
        self.assertIn("2 files for these data", self.call(self.settings(**{**distill, "distill.targets": scored}), fails=True))


if __name__ == "__main__":
    unittest.main()
