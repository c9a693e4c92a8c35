#!/usr/bin/env python3
"""scripts/prepare_eval.py with a hand-made package, and scripts/compare_eval.py without the packages that it needs."""
import gzip, json, os, shutil, subprocess, sys, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

try:
    import tokenizers
except ImportError:
    tokenizers = None


def request(document, index, context, continuation, label=1):
    return {"doc_id": document, "idx": index, "label": label, "request": {"context": context, "continuation": continuation}}


@unittest.skipUnless(tokenizers, "pip install tokenizers")
class PrepareEvalTest(unittest.TestCase):
    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="coat-prepare-eval-")
        self.addCleanup(shutil.rmtree, self.top, ignore_errors=True)
        self.task = os.path.join(self.top, "package", "oe_eval_tasks", "piqa", "rc_0shot")
        os.makedirs(self.task)
        with open(os.path.join(self.task, "config.json"), "w", encoding="utf-8") as file:
            json.dump({"task_config": {"primary_metric": "acc_raw"}}, file)
        self.pack(json.dumps(one).encode() for one in (
            request(0, 0, "why two", " four"), request(0, 1, "why two", " two four two"), request(1, 0, "two", " why", 0),
            request(1, 1, "two", " four", 0)))

    def pack(self, lines):
        with gzip.open(os.path.join(self.task, "requests.jsonl.gz"), "wb") as file:
            file.writelines(line + b"\n" for line in lines)

    def tokenizer(self, change=lambda tokenizer: None):
        """A tokenizer of words that puts token 1 in front of every text."""
        words = {word: i for i, word in enumerate("? <s> why two four".split())}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<s>"])
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        change(tokenizer)
        path = os.path.join(self.top, "tokenizer.json")
        tokenizer.save(path)
        return path

    def prepare(self, *arguments):
        return subprocess.run([sys.executable, os.path.join(TOP, "scripts", "prepare_eval.py"), "piqa", "--package",
                               os.path.join(self.top, "package"), *arguments], capture_output=True, text=True)

    def test_requests(self):
        """The script turns off truncation and padding of tokenizers."""
        for change in (lambda tokenizer: None, lambda tokenizer: tokenizer.enable_padding(),
                       lambda tokenizer: tokenizer.enable_truncation(1)):
            done = self.prepare("--tokenizer", self.tokenizer(change), "--output", self.top)
            self.assertEqual(done.returncode, 0, done.stderr)
            with open(os.path.join(self.top, "piqa_rc_0shot.jsonl"), encoding="utf-8") as file:
                header, *questions = [json.loads(line) for line in file]
            self.assertEqual(header, {"task": "piqa_rc_0shot", "metric": "acc", "questions": 2})
            self.assertEqual([(one["gold"], [(choice["tokens"], choice["continuation"], choice["characters"])
                                             for choice in one["choices"]]) for one in questions],
                             [(1, [([1, 2, 3, 4], 1, 4), ([1, 2, 3, 3, 4, 3], 3, 12)]),
                              (0, [([1, 3, 2], 1, 3), ([1, 3, 4], 1, 4)])])

    def test_names_of_one_task(self):
        """The task has one entry, as ./train accepts a label once; so have the training questions."""
        train = os.path.join(self.top, "package", "oe_eval_tasks", "openbookqa", "train_rc_5shot")
        os.makedirs(train)
        shutil.copy(os.path.join(self.task, "config.json"), train)
        with gzip.open(os.path.join(train, "requests.jsonl.gz"), "wt") as file:
            for i, text in enumerate((" four", " five", " six")):
                print(json.dumps({**request(0, i, "two", text, 1), "doc": {}}), file=file)
        shutil.copytree(train, os.path.join(os.path.dirname(train), "rc_0shot"))
        conversations = os.path.join(self.top, "conversations.jsonl")
        pairs = os.path.join(self.top, "pairs.jsonl")
        done = self.prepare("--tokenizer", self.tokenizer(), "--output", self.top, "--train", conversations, "--pairs", pairs, "--",
                            "piqa_rc_0shot", "openbookqa", "openbook_qa")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(self.top, "evaluators.yaml"), encoding="utf-8") as file:
            labels = [line.split()[-1] for line in file if "label:" in line]
        self.assertEqual(labels, ["piqa_rc_0shot", "openbookqa_rc_0shot"])
        with open(conversations, encoding="utf-8") as file:
            self.assertEqual(len(file.readlines()), 1)
        with open(pairs, encoding="utf-8") as file:
            self.assertEqual(json.load(file), {"prompt": [{"role": "user", "content": "two"}],
                                               "chosen": [{"role": "assistant", "content": "five"}],
                                               "rejected": [{"role": "assistant", "content": "six"}]})

    def test_errors(self):
        """One line each."""
        cut = os.path.join(self.task, "requests.jsonl.gz")
        kept = os.path.join(self.top, "kept")
        with open(kept, "w", encoding="utf-8") as file:
            file.write("mine")
        asked = ["--tokenizer", self.tokenizer(), "--output", self.top]
        nowhere = os.path.join(self.top, "none", "q.jsonl")
        cases = [(["--train", kept], None, "kept exists already"),
                 (["--train", nowhere], None, f"error: {nowhere}: No such file or directory; expected "),
                 ([*asked[:3], kept, "--train", nowhere], None, f"error: {kept}: File exists; expected "),
                 ([*asked, "--package", "nope.whl"], None, "error: nope.whl: no such file or folder; --package takes"),
                 ([*asked, "--questions", "0"], None, "--questions 0; expected 1"),
                 (["--tokenizer", kept, "--output", self.top], None, "expected a tokenizer.json"),
                 (asked, [b'{"doc_id": 1}'], "requests.jsonl.gz:1: KeyError: 'request'"),
                 (asked, [json.dumps(request(0, 0, "a", 5)).encode()], "requests.jsonl.gz:1: TypeError: no number, label or texts"),
                 (asked, [b"{"], "requests.jsonl.gz:1: "),
                 (asked, [b"\xff"], "requests.jsonl.gz:1: Unicode"), (asked, [json.dumps(request(0, 0, "a", " b")).encode()],
                                                                          "expected a whole file")]
        for arguments, lines, said in cases:
            if lines:
                self.pack(lines)
            if said == "expected a whole file":
                os.truncate(cut, os.path.getsize(cut) - 9)
            done = self.prepare(*arguments)
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn(said, done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        with open(kept, encoding="utf-8") as file:
            self.assertEqual(file.read(), "mine")

    def test_compare_without_torch(self):
        hidden = os.path.join(self.top, "hidden")
        os.makedirs(hidden)
        for module in ("importlib_resources", "torch", "torchmetrics", "transformers"):
            with open(os.path.join(hidden, module + ".py"), "w", encoding="utf-8") as file:
                file.write("raise ImportError('no torch')\n" if module == "torch" else "")
        done = subprocess.run([sys.executable, os.path.join(TOP, "scripts", "compare_eval.py"), "--model", self.top, "--package",
                               os.path.join(self.top, "package")], capture_output=True, text=True,
                              env={**os.environ, "PYTHONPATH": hidden})
        self.assertEqual((done.returncode, done.stderr),
                         (1, "error: no torch: pip install torch torchmetrics transformers tokenizers importlib_resources\n"))


if __name__ == "__main__":
    unittest.main()
