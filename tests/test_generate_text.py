#!/usr/bin/env python3
"""scripts/generate.py: the tokens that it gives to the program, with three published chat templates and without a template, and
the text that it prints for the answer. Uses a script that pretends to be ./train, and the program itself."""
import importlib.util, json, os, shutil, subprocess, sys, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GOLDEN = os.path.join(TOP, "tests", "golden")
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
MISSING = [module for module in ("tokenizers", "jinja2", "numpy") if importlib.util.find_spec(module) is None]

# Writes its arguments and prompts to files, and answers with the tokens of each prompt in reverse order.
STAND_IN = '''
import json, sys
options = dict(one[2:].split("=", 1) for one in sys.argv[2:])
prompts = [json.loads(line)["tokens"] for line in open(options["generate"])]
json.dump({"options": options, "prompts": prompts}, open(sys.argv[1], "w"))
print("a line of mpirun's")
for i, tokens in enumerate(prompts):
    print(json.dumps({"prompt": i, "tokens": tokens[::-1], "finish": "eos"}), flush=True)
sys.exit(3 if "fail" in options else 0)
'''
SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
           "<|endoftext|>", "<|user|>", "<|assistant|>"]


@unittest.skipIf(MISSING, f"needs {', '.join(MISSING)}")
class Generate(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        self.seen = os.path.join(self.folder, "seen.json")
        stand_in = os.path.join(self.folder, "train.py")
        with open(stand_in, "w") as file:
            file.write(STAND_IN)
        self.train = f"{sys.executable} {stand_in} {self.seen}"
        self.make_tokenizer()

    def make_tokenizer(self):
        """A tokenizer with a token for each word, fewer than the 99 of the golden models; texts begin with <|begin_of_text|>."""
        from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
        words = {word: i for i, word in enumerate("? user assistant system hello two plus is four why".split())}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL])
        begin = tokenizer.token_to_id(SPECIAL[0])
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], begin)])
        tokenizer.enable_truncation(2)
        tokenizer.save(os.path.join(self.folder, "tokenizer.json"))
        self.tokenizer = tokenizer

    def use_template(self, name):
        shutil.copy(os.path.join(GOLDEN, "chat", f"{name}.jinja"), os.path.join(self.folder, "chat_template.jinja"))
        with open(os.path.join(self.folder, "tokenizer_config.json"), "w") as file:
            json.dump({"bos_token": "<|endoftext|>" if name == "olmo-2" else SPECIAL[0], "eos_token": "<|endoftext|>"}, file)

    def generate(self, *arguments, train=None):
        command = [sys.executable, "-B", os.path.join(TOP, "scripts", "generate.py"), self.folder, "--train", train or self.train]
        return subprocess.run([*command, *arguments], capture_output=True, text=True)

    def words(self, i):
        with open(self.seen) as file:
            return [self.tokenizer.id_to_token(id) for id in json.load(file)["prompts"][i]]

    def test_templates(self):
        """The text has one beginning-of-text token, the question, and the beginning of an answer."""
        ends = {"llama-3.1": ["<|start_header_id|>", "assistant", "<|end_header_id|>"],
                "olmo-2": ["<|assistant|>"], "chatml": ["<|im_start|>", "assistant"]}
        for name, end in ends.items():
            self.use_template(name)
            result = self.generate("two plus two")
            self.assertEqual(result.returncode, 0, result.stderr)
            found = self.words(0)
            self.assertEqual(found[-len(end):], end)
            at = found.index("two")
            self.assertEqual(found[at:at + 3], ["two", "plus", "two"])
            self.assertLessEqual(found.count(SPECIAL[0]), 1)
            self.assertIn("two plus two", result.stdout)         # in reverse order, without special tokens
            self.assertNotIn("<|", result.stdout)
            self.assertIn("mpirun's", result.stderr)

    def test_tokens_of_other_files(self):
        """As in test_chat_templates.py: a token that only tokenizer_config.json has is a token. A token with a name there is not
        printed."""
        from tokenizers import Tokenizer
        self.use_template("chatml")
        path, config = (os.path.join(self.folder, name) for name in ("tokenizer.json", "tokenizer_config.json"))
        special = {token: self.tokenizer.token_to_id(token) for token in SPECIAL}
        with open(path) as file:
            whole = json.load(file)
        for keep, known in ((lambda token: False, special), (lambda token: {**token, "special": False}, {})):
            added = [token for token in map(keep, whole["added_tokens"]) if token]
            with open(path, "w") as file:
                json.dump({**whole, "post_processor": None, "added_tokens": added}, file)
            with open(config, "w") as file:
                decoder = {id: {"content": token, "special": True, "normalized": False} for token, id in known.items()}
                json.dump({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "added_tokens_decoder": decoder}, file)
            self.assertEqual(Tokenizer.from_file(path).get_vocab_size() < self.tokenizer.get_vocab_size(), bool(known))
            result = self.generate("two plus two")
            self.assertEqual(self.words(0), ["<|im_start|>", "user", "two", "plus", "two", "<|im_end|>", "<|im_start|>", "assistant"])
            self.assertEqual(result.stdout, "assistant two plus two user\n")
        with open(config, "w") as file:
            json.dump({"split_special_tokens": True, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}, file)
        self.generate("two plus two")       # as in transformers: each word is text
        self.assertEqual([word for word in self.words(0) if word != "?"], ["user", "two", "plus", "two", "assistant"])

    def test_raw(self):
        result = self.generate("--raw", "why is two four ?", "hello", "--max-new-tokens=7", "--temperature", "0.5", "--top-p=0.9",
                               "--seed=4", "--recipe=f32", "--a.b=c=d")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.words(0), [SPECIAL[0], "why", "is", "two", "four", "?"])
        self.assertEqual(result.stdout, "> why is two four ?\n? four two is why\n> hello\nhello\n")
        with open(self.seen) as file:
            options = json.load(file)["options"]
        options.pop("generate")
        self.assertEqual(options, {"load_path": self.folder, "max_new_tokens": "7", "temperature": "0.5", "top_p": "0.9",
                                   "seed": "4", "recipe": "f32", "a.b": "c=d"})

    def test_errors(self):
        self.assertIn("--raw does not use a chat template", self.generate("hello").stderr)
        self.assertIn("no such program", self.generate("--raw", "hello", train="/no/such").stderr)
        self.assertIn("--recipe: expected an option above", self.generate("--raw", "hello", "--recipe").stderr)
        self.assertEqual(self.generate("--raw", "hello", "--fail=1").returncode, 3)
        self.assertIn("error: text 2: '\\udcff' is not UTF-8", self.generate("--raw", "hello", b"\xff").stderr)
        with open(os.path.join(self.folder, "tokenizer.json"), "r+", encoding="utf-8") as file:
            file.truncate(9)
        self.assertRegex(self.generate("--raw", "hello").stderr, "^error: .*/tokenizer.json: .*; expected a tokenizer.json\n$")
        os.unlink(os.path.join(self.folder, "tokenizer.json"))
        self.assertIn("tokenizer.json: no such file", self.generate("--raw", "hello").stderr)
        shutil.copytree(self.folder, os.path.join(self.folder, "latest"))
        open(os.path.join(self.folder, "latest", "tokenizer.json"), "w").close()
        self.assertIn("expected one checkpoint, such as " + os.path.join(self.folder, "latest"), self.generate("--raw", "hello").stderr)
        self.folder = os.path.join(self.folder, "none")
        self.assertIn("none: no such folder", self.generate("--raw", "hello").stderr)

    @unittest.skipUnless(os.path.exists(TRAIN), f"needs {TRAIN}")
    def test_program(self):
        for name in os.listdir(os.path.join(GOLDEN, "llama")):
            shutil.copy(os.path.join(GOLDEN, "llama", name), self.folder)
        self.use_template("chatml")
        result = self.generate("two plus two", "--max-new-tokens=9", train=TRAIN)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("ms each", result.stderr)

        from tokenizers import processors
        self.tokenizer.post_processor = processors.Sequence([])         # so that the tokenizer adds no token at the start
        self.tokenizer.save(os.path.join(self.folder, "tokenizer.json"))
        for texts, expected in ((["hello", ""], "error: text 2: a prompt without tokens; there is nothing to continue"),
                                (["hello " * 64], "error: text 1: a prompt of 64 tokens; expected at most 63: the prompt and one more token must fit"),
                                (["hello " * 60], "warning: texts: a prompt with max_new_tokens 9 is longer than")):
            error = self.generate("--raw", "--max-new-tokens=9", *texts, train=TRAIN).stderr
            self.assertIn(expected, error)
            self.assertNotIn(".jsonl", error)


if __name__ == "__main__":
    unittest.main()
