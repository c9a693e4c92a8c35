#!/usr/bin/env python3
"""scripts/make_chat_shards.py: in random conversations with three published chat templates (tests/golden/chat), the labels are
the assistant's tokens, derived from the known output of each template. Also forms of input, errors, parts, processes.
test_chat_templates.py tests templates whose answers are hard to find."""
import contextlib, glob, gzip, hashlib, importlib.util, io, json, os, random, shlex, shutil, subprocess, sys
import tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEMPLATES = os.path.join(TOP, "tests", "golden", "chat")
sys.path.insert(0, os.path.join(TOP, "scripts"))
sys.dont_write_bytecode = True

MISSING = [module for module in ("tokenizers", "jinja2", "numpy") if importlib.util.find_spec(module) is None]
if not MISSING:
    import numpy as np
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    import inputs, make_chat_shards, shards

WORDS = "a the model answers question two plus four is seven thank you hello  world don't naïve 東京 😀 x1 = {y} <b>".split(" ")
SPECIAL = {"llama-3.1": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
           "olmo-2": ["<|endoftext|>"], "chatml": ["<|im_start|>", "<|im_end|>"]}


def make_tokenizer(path, special, splits=True):
    """A byte-level BPE tokenizer. splits: a line end is a separate token, so that texts that end with a line end can be tokenized
    separately. The tokenizer.json truncates to 5 tokens and trims the offsets of words, as the files of published models may; the
    script must turn both off."""
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    line_ends = pre_tokenizers.Split(Regex("\n"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([line_ends, byte_level]) if splits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    r = random.Random(0)
    text = [" ".join(r.choices(WORDS, k=50)) + "\n\n" for _ in range(40)]
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False,
                                                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.enable_truncation(5)
    tokenizer.save(path)


def random_text(r):
    text = " ".join(r.choices(WORDS, k=r.randrange(12)))
    return r.choice(["", " ", "\n", "\t "]) + text.replace("two", "\n") + r.choice(["", "", " ", "\n\n"])


def random_conversation(r, special):
    messages = [{"role": "system", "content": random_text(r)}] if r.random() < 0.4 else []
    for _ in range(r.randrange(1, 5)):
        question = random_text(r) + r.choice(["", "", "", r.choice(special) + "?"])
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": random_text(r)}]
    if r.random() < 0.2:
        messages.append({"role": "user", "content": random_text(r)})       # a last question without an answer
    return messages


def llama_pieces(messages):
    given = messages[0]["role"] == "system"
    system = messages[0]["content"].strip() if given else ""
    yield "<|begin_of_text|>", False
    for text in ("<|start_header_id|>", "system", "<|end_header_id|>", "\n", "\n", "Cutting Knowledge Date: December 2023\n",
                 "Today Date: 26 Jul 2024\n", "\n", system, "<|eot_id|>"):
        yield text, False
    for message in messages[given:]:
        for text in ("<|start_header_id|>", message["role"], "<|end_header_id|>", "\n", "\n"):
            yield text, False
        for text in (message["content"].strip(), "<|eot_id|>"):
            yield text, message["role"] == "assistant"


def olmo_pieces(messages):
    yield "<|endoftext|>", False
    for i, message in enumerate(messages):
        learned = message["role"] == "assistant"
        yield f"<|{message['role']}|>\n", False
        yield message["content"] + ("<|endoftext|>" if learned else ""), learned
        yield "" if learned and i == len(messages) - 1 else "\n", False


def chatml_pieces(messages):
    for message in messages:
        for text in ("<|im_start|>", message["role"], "\n"):
            yield text, False
        for text in (message["content"], "<|im_end|>"):
            yield text, message["role"] == "assistant"
        yield "\n", False


PIECES = {"llama-3.1": llama_pieces, "olmo-2": olmo_pieces, "chatml": chatml_pieces}


@unittest.skipIf(MISSING, "pip install " + " ".join(MISSING))
class Folder(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.models = tempfile.mkdtemp(prefix="coat-shards-models-")
        for name in PIECES:
            os.makedirs(folder := os.path.join(cls.models, name))
            make_tokenizer(os.path.join(folder, "tokenizer.json"), SPECIAL[name])
            tokens = {"bos_token": SPECIAL[name][0], "eos_token": {"content": SPECIAL[name][-1]}, "pad_token": None}
            cls.dump(tokens, folder, "tokenizer_config.json")
            shutil.copy(os.path.join(TEMPLATES, name + ".jinja"), os.path.join(folder, "chat_template.jinja"))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.models)

    def setUp(self):
        self.top = tempfile.mkdtemp(prefix="coat-shards-")
        self.addCleanup(shutil.rmtree, self.top, ignore_errors=True)
        self.outputs = 0

    @staticmethod
    def dump(value, *path):
        with open(os.path.join(*path), "w", encoding="utf-8") as file:
            json.dump(value, file)

    def write(self, name, content):
        """content: objects, one per line, or the text or bytes of the file."""
        path = os.path.join(self.top, name)
        data = "".join(json.dumps(entry) + "\n" for entry in content) if isinstance(content, list) else content
        with (gzip.open if name.lower().endswith(".gz") else open)(path, "wb") as file:
            file.write(data if isinstance(data, bytes) else data.encode())
        return path

    def model(self, template, special=("<|end|>",), splits=True, **config):
        """Makes a folder with another template."""
        folder = tempfile.mkdtemp(dir=self.top)
        make_tokenizer(os.path.join(folder, "tokenizer.json"), list(special), splits)
        self.dump({"eos_token": special[0], "chat_template": template, **config}, folder, "tokenizer_config.json")
        return folder

    def call(self, program, *arguments):
        """Runs the script; returns (output folder, printed text)."""
        self.outputs += 1
        output = os.path.join(self.top, f"out{self.outputs}")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            program.main([*arguments, "--output", output])
        return output, printed.getvalue()

    def chat(self, model, *arguments):
        folder = os.path.join(self.models, model)       # which an absolute path replaces
        return self.call(make_chat_shards, "--model", folder, "--processes", "1", *arguments)

    def assert_bad(self, program, arguments, *words):
        with self.assertRaises(shards.Bad) as caught:
            program(*arguments)
        for word in words:
            self.assertIn(word, str(caught.exception))
        left = os.path.join(self.top, f"out{self.outputs}")
        self.assertEqual(os.listdir(left) if os.path.exists(left) else [], [])

    def read(self, folder, part=0):
        """Returns (ids, mask, rows) of a part."""
        path = os.path.join(folder, f"token_ids_part_{part:04d}")
        with gzip.open(path + ".csv.gz", "rt") as file:
            rows = [tuple(map(int, line.split(","))) for line in file]
        mask = np.fromfile(os.path.join(folder, f"labels_mask_part_{part:04d}.npy"), np.uint8)
        return np.fromfile(path + ".npy", "<u2"), mask, rows

    def learned(self, model, output):
        """Returns the texts of consecutive labels."""
        ids, mask, _ = self.read(output)
        tokenizer, runs = Tokenizer.from_file(os.path.join(model, "tokenizer.json")), []
        for i in range(len(ids)):
            if mask[i]:
                runs += [[]] if i == 0 or not mask[i - 1] else []
                runs[-1].append(int(ids[i]))
        return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]

    def assert_same(self, found, expected):
        """Compares lists so long that assertEqual would take minutes to print the difference."""
        self.assertEqual(len(found), len(expected))
        self.assertEqual([], [(i, a, b) for i, (a, b) in enumerate(zip(found, expected)) if a != b][:3])

    def digest(self, folder):
        """Returns the bytes of every file except fine-tune.yaml, which names its folder."""
        found = {}
        for path in sorted(glob.glob(os.path.join(folder, "**"), recursive=True)):
            if os.path.isfile(path) and not path.endswith(".yaml"):
                with open(path, "rb") as file:
                    found[os.path.relpath(path, folder)] = hashlib.sha256(file.read()).hexdigest()
        return found


class ChatTest(Folder):
    def test_labels(self):
        for name, pieces in PIECES.items():
            with self.subTest(name):
                r = random.Random(name)
                conversations = [random_conversation(r, SPECIAL[name]) for _ in range(200)]
                file = self.write(name + ".jsonl", [{"messages": messages} for messages in conversations])
                output, printed = self.chat(name, file)
                tokenizer = Tokenizer.from_file(os.path.join(self.models, name, "tokenizer.json"))
                tokenizer.no_truncation()
                ids, mask, rows = [], [], []
                for messages in conversations:
                    begin = len(ids)
                    for text, learned in pieces(messages):
                        tokens = tokenizer.encode(text, add_special_tokens=False).ids
                        ids += tokens
                        mask += [int(learned)] * len(tokens)
                    rows.append((begin, len(ids)))
                found = self.read(output)
                self.assert_same(found[0].tolist(), ids)
                self.assert_same(found[1].tolist(), mask)
                self.assert_same(found[2], rows)
                longest = max(end - begin for begin, end in rows)
                self.assertNotIn("of the last answers", printed)
                self.assertIn(f"200 conversations in 1 part: {len(ids):,} tokens, of which {sum(mask):,} are labels; "
                              f"mean {len(ids) / 200:.1f}, longest {longest:,}", printed)
                eos = tokenizer.token_to_id(SPECIAL[name][-1])
                with open(os.path.join(output, "fine-tune.yaml")) as file:
                    configuration = file.read()
                self.assertNotIn("to fine-tune:", printed)      # for a folder that has only a tokenizer
                self.assertIn(f'load_path: "{os.path.join(self.models, name)}"\n', configuration)
                self.assertIn(f'model: {{eos_token_id: {eos}}}\ndata:\n  paths: ["{output}/token_ids_part_*.npy"]\n'
                              f'  label_mask_paths: ["{output}/labels_mask_part_*.npy"]\n  memmap_dtype: uint16\n'
                              "  packing: best_fit\n  document_boundaries: metadata\n", configuration)

    def test_command(self):
        model = os.path.join(self.models, "chatml")
        with open(os.path.join(model, "config.json"), "w") as file:
            file.write("{}")
        self.addCleanup(os.remove, os.path.join(model, "config.json"))
        output, printed = self.chat("chatml", self.write("one.jsonl", [{"prompt": "a", "completion": "b"}]))
        self.assertIn(f"to fine-tune:  ./train {output}/fine-tune.yaml", printed)

    def test_forms(self):
        """All forms of input give the same bytes."""
        pairs = [("Hi\n\nthere", "Yes."), ("Two", "")]
        chats = [[("user", q), ("assistant", a)] for q, a in pairs]
        forms = {
            "messages.jsonl": [{"messages": [{"role": role, "content": text} for role, text in chat], "id": 1} for chat in chats],
            "sharegpt.jsonl.gz": [{"conversations": [{"from": {"user": "human", "assistant": "gpt"}[role], "value": text}
                                                     for role, text in chat]} for chat in chats],
            "completion.jsonl": [{"prompt": q, "completion": a} for q, a in pairs],
            "alpaca.json": [dict(zip(("instruction", "input", "output"), (*(q.split("\n\n") + [""])[:2], a))) for q, a in pairs],
        }
        forms["alpaca.json"][1].pop("input")
        for system in (False, True):
            digests = []
            for name, entries in forms.items():
                if system and name == "messages.jsonl":     # the second system message is a different text
                    entries = [{"messages": [{"role": "system", "content": "S"}, *entry["messages"]]} for entry in entries]
                    entries[1]["system"] = "S"
                elif system:
                    entries = [{**entry, "system": "S"} for entry in entries]
                digests.append(self.digest(self.chat("chatml", self.write(name, entries))[0]))
            self.assertEqual(len(digests[0]), 3)
            self.assertEqual(digests, [digests[0]] * len(forms))

    def test_processes_and_validation(self):
        r = random.Random(1)
        chats = [{"messages": random_conversation(r, SPECIAL["olmo-2"])} for _ in range(700)]      # more than one batch
        files = [self.write("a.jsonl", chats[:600] + chats[:5]), self.write("b.jsonl.gz", chats[600:])]
        more = "--max-tokens", "20000", "--val-fraction", "0.1"
        digests = [self.digest(self.chat("olmo-2", *files, *more, "--processes", n)[0]) for n in "13"]
        self.assertEqual(*digests)
        positions = [position for _, position in inputs.read_batches(files, lambda path, first: True)]
        self.assertEqual((sorted(positions), positions[-1]), (positions, sum(map(os.path.getsize, files))))

        output, printed = self.chat("olmo-2", *files, *more)
        sets = []
        for folder in (output, os.path.join(output, "val")):
            documents = []
            for part in range(len(glob.glob(os.path.join(folder, "token_ids_part_*.npy")))):
                ids, mask, rows = self.read(folder, part)
                self.assertTrue(len(ids) == len(mask) == rows[-1][1] <= 20000)
                self.assertEqual([begin for begin, _ in rows], [0] + [end for _, end in rows[:-1]])
                documents += [ids[begin:end].tobytes() for begin, end in rows]
            sets.append(documents)
        whole, _, rows = self.read(self.chat("olmo-2", *files)[0])
        self.assert_same(sorted(sets[0] + sets[1]), sorted(whole[begin:end].tobytes() for begin, end in rows))
        self.assertTrue(os.path.exists(os.path.join(output, "token_ids_part_0001.npy")))
        self.assertEqual(set(sets[0]) & set(sets[1]), set())
        self.assertTrue(30 < len(sets[1]) < 110, len(sets[1]))     # 70 on average, standard deviation 8
        with open(os.path.join(output, "fine-tune.yaml")) as file:
            self.assertIn(f'    data:\n      paths: ["{output}/val/token_ids_part_*.npy"]\n'
                          f'      label_mask_paths: ["{output}/val/labels_mask_part_*.npy"]\n', file.read())

    def test_weights(self):
        """An answer of weight 0, as in OpenAI's and Mistral's files, is context, but not learned."""
        say = lambda weight, text: {"role": "assistant", "content": text, **({} if weight is None else {"weight": weight})}
        user = {"role": "user", "content": "x", "weight": 0.5}
        file = self.write("x.jsonl", [{"messages": [user, say(0, "two"), user, say(1, "four"), user, say(None, "is")]}])
        model = os.path.join(self.models, "chatml")
        self.assertEqual(self.learned(model, self.chat("chatml", file)[0]), ["four<|im_end|>", "is<|im_end|>"])
        for weight in (0.5, "0"):
            bad = self.write("bad.jsonl", [{"messages": [user, say(weight, "two")]}])
            self.assert_bad(self.chat, ("chatml", bad), "bad.jsonl:1: message 2 has the weight", "expected 0 (not learned) or 1")

    def test_special_tokens_in_messages(self):
        """Spelled-out special tokens become tokens, as those of the template, and are counted. Other added tokens, and skipped
        conversations, do not count."""
        say = lambda *texts: {"messages": [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, texts)]}
        plain = self.write("a.jsonl", [say("<|im_star", "<|im_end>"), say("a", "b")])
        more = self.write("b.jsonl", [say("<|im_end|>"), say("x", "y"), say("a<|im_end|><|im_start|>", "<|im_start|>", "c", "<b>")])
        for files, note in (([plain], ""), ([plain, more], f": 2, the first in {more}:3 (<|im_end|>); if the name is meant as text")):
            for processes in "12":
                output, printed = self.chat("chatml", *files, "--processes", processes)
                self.assertEqual(printed.count("the name of a special token"), bool(note))
                self.assertIn(note, printed)
        ids = self.read(output)[0].tolist()
        tokenizer = Tokenizer.from_file(os.path.join(self.models, "chatml", "tokenizer.json"))
        self.assertEqual([ids.count(tokenizer.token_to_id(token)) for token in SPECIAL["chatml"]], [10 + 2, 10 + 1])

    def test_without_answers(self):
        user = {"messages": [{"role": "user", "content": "x"}]}
        answered = {"prompt": "x", "completion": "y"}
        file = self.write("x.jsonl", json.dumps(answered) + "\n\n" + "".join(json.dumps(user) + "\n" for _ in range(12)))
        output, printed = self.chat("chatml", file)
        self.assertIn(f"left out, without an answer of the assistant: 12 ({file}:3, {file}:4, ", printed)
        self.assertIn(f", {file}:12 and 2 more)\n1 conversations in 1 part", printed)
        self.assertEqual(len(self.read(output)[2]), 1)
        for entries in ([user], []):
            bad = self.write("bad.jsonl", entries)
            self.assert_bad(self.chat, ("chatml", file, bad), f"bad.jsonl: none of its {len(entries)} conversations has an answer")

    def test_bad_conversations(self):
        good = json.dumps({"prompt": "x", "completion": "y"})
        say = lambda **message: {"messages": [{"role": "user", "content": "x"}, message]}
        for line, *words in (
                ("{", "expected a conversation in JSON"), ("[", "jq -c"), ("[1]", "jq -c"), ('"\xff"', "JSON"),
                ("[" * 100000, "nested too deeply", "a conversation in JSON"),
                ({"text": "x"}, "an object with text", "expected messages, conversations"), ({}, "nothing"),
                ({"prompt": "x", "completion": None}, '"completion" is null', "expected a text"),
                ({"instruction": "x", "input": 1, "output": "y"}, '"input" is 1'), ({"output": "y"}, '"instruction" is null'),
                ({"messages": []}, '"messages" is []', "list"), ({"messages": [1]}, "message 1 is 1", "object"),
                (say(content="y"), "message 2 has the role null", "expected system, user, assistant"),
                (say(role="bot", content="y"), 'the role "bot"'), (say(role="assistant"), "the content null"),
                (say(role="assistant", content=["y"]), 'the content ["y"]'),
                ({"conversations": [{"from": "system", "value": "S"}, {"from": "gpt", "value": "y"}], "system": "T"},
                 'two system messages, one in "system"', "expected one"),
                ({"prompt": "x", "completion": "y", "system": ["S"]}, '"system" is ["S"]', "expected a text"),
                (say(role="assistant", content="\ud83d"), "surrogate")):
            text = line.encode("latin-1") if isinstance(line, str) else json.dumps(line).encode()
            file = self.write("x.jsonl", good.encode() + b"\n\n" + text + b"\n")
            self.assert_bad(self.chat, ("chatml", file), f"{file}:3: ", *words)
        self.assert_bad(self.chat, ("chatml", file, "--processes", "2"), f"{file}:3: ")

    def test_bad_folders(self):
        file = self.write("x.jsonl", [{"prompt": "x", "completion": "y"}])
        model = self.model("{{ messages }}{{ '<|end|>' }}", eos_token="<|no|>")
        self.assert_bad(self.chat, (model, file), "names no eos_token")
        self.dump({"vocab_size": 256}, self.models, "chatml", "config.json")
        self.addCleanup(os.remove, os.path.join(self.models, "chatml", "config.json"))
        wide = self.write("y.jsonl", [{"prompt": "x", "completion": " question"}])
        self.assert_bad(self.chat, ("chatml", wide), "y.jsonl:1: the token ", "vocab_size 256")
        tokenizer = Tokenizer.from_file(os.path.join(self.models, "chatml", "tokenizer.json"))
        last = tokenizer.get_vocab_size() - 1
        self.dump({"vocab_size": last}, self.models, "chatml", "config.json")
        wide = self.write("y.jsonl", [{"prompt": "x", "completion": text} for text in ("y", tokenizer.decode([last]))])
        self.assertIn(f"left out, as --skip-bad asks: 1\n  {wide}:2: the token {last} (", self.chat("chatml", wide, "--skip-bad")[1])
        os.remove(model + "/tokenizer.json")
        self.assert_bad(self.chat, (model, file), "tokenizer.json: no such file")
        self.assert_bad(self.chat, ("olmo-2", file + "x"), "no such file")
        self.assert_bad(self.chat, ("olmo-2", file, self.top), f"{self.top} is a folder; expected files")
        self.assert_bad(self.chat, ("olmo-2", file, file), "named twice")
        self.assert_bad(self.chat, ("olmo-2", file, "--val-fraction", "0.5"), "--val-fraction=0.5 leaves")
        cut = self.write("cut.jsonl.gz", [{"prompt": "x", "completion": "y"}])
        os.truncate(cut, os.path.getsize(cut) - 9)
        self.assert_bad(self.chat, ("olmo-2", cut), "cut.jsonl.gz: ", "expected a whole file")

    def test_output_with_odd_characters(self):
        """The pattern in fine-tune.yaml matches only the files of its folder, whatever the folder's name. bash checks this,
        because bash, unlike Python, reads backslashes in patterns as the program does. The shown command can be pasted."""
        file = self.write("x.jsonl", [{"prompt": "x", "completion": "y"}])
        model = os.path.join(self.models, "chatml")
        for name in ("a[1] b", "a*", "a?", "a1", "a\\1", "it's"):
            output = os.path.join(self.top, name)
            with contextlib.redirect_stdout(io.StringIO()):
                make_chat_shards.main([file, "--model", model, "--processes", "1", "--output", output])
            with open(os.path.join(output, "fine-tune.yaml"), encoding="utf-8") as yaml:
                command, *lines = yaml
            pattern = json.loads(next(line for line in lines if line.startswith("  paths: ")).split(": ", 1)[1])[0]
            found = subprocess.run(["bash", "-c", r"IFS=; printf '%s\n' $1", "bash", pattern], capture_output=True, text=True)
            self.assertEqual(found.stdout, f"{output}/token_ids_part_0000.npy\n")
            self.assertEqual(shlex.split(command)[2], f"{output}/fine-tune.yaml")

    def test_output_that_cannot_be_written(self):
        file = self.write("x.jsonl", [{"prompt": "x", "completion": "y"}])
        for program, more in (("make_chat_shards.py", ["--model", os.path.join(self.models, "chatml")]),
                              ("make_shards.py", ["--tokenizer", os.path.join(self.models, "chatml"), "--eos", "0"])):
            done = subprocess.run([sys.executable, os.path.join(TOP, "scripts", program), *more, file, "--output", file + "/x"],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 1)
            self.assertTrue(done.stderr.startswith(f"error: {file}/x: Not a directory; expected"), done.stderr)

    def test_existing_output(self):
        """No file is overwritten; the script says so in one line."""
        file = self.write("x.jsonl", [{"prompt": "x", "completion": "y"}])
        output, _ = self.chat("chatml", file)
        before = self.digest(output)
        script = os.path.join(TOP, "scripts", "make_chat_shards.py")
        result = subprocess.run([sys.executable, script, "--model", os.path.join(self.models, "chatml"), "--output", output, file],
                                capture_output=True, text=True, timeout=60)
        found = os.path.join(output, "token_ids_part_0000.csv.gz")
        self.assertEqual((result.returncode, result.stdout, result.stderr), (
            1, "", f"error: {found} exists already; expected a folder without shards: delete them, or give another --output\n"))
        self.assertEqual(self.digest(output), before)


if __name__ == "__main__":
    unittest.main()
