#!/usr/bin/env python3
"""Answers about pictures: greedy tokens of ./train --generate_features are those of transformers' generate, with scripts/generate.py's
tokens and features of pictures; scores of scripts/score_captions.py computed by hand; errors."""
import importlib.util, json, math, os, shlex, shutil, struct, subprocess, sys, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GOLDEN = os.path.join(TOP, "tests", "golden")
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
MISSING = [module for module in ("tokenizers", "jinja2", "numpy", "PIL") if importlib.util.find_spec(module) is None]
TWO_RANKS = [*shlex.split(os.environ.get("LAUNCH", "mpirun --oversubscribe")), "-n", "2"]
T = 16          # tokens of a row of the golden batches
MODELS = ("llava-llama", "llava-mistral", "llava-qwen3-tied")
sys.path.insert(0, os.path.join(TOP, "scripts"))

# Answers the words that the picture of each prompt is of, and writes down its prompts and features.
STAND_IN = '''
import json, shutil, sys
options = dict(one[2:].split("=", 1) for one in sys.argv[2:])
prompts = [json.loads(line) for line in open(options["generate"])]
if "generate_features" in options:
    shutil.copytree(options["generate_features"], sys.argv[1] + ".features", dirs_exist_ok=True)
json.dump(prompts, open(sys.argv[1], "w"))
answers = ANSWERS
for i, prompt in enumerate(prompts):
    print(json.dumps({"prompt": i, "tokens": answers[prompt["images"][0] % len(answers)], "finish": "eos"}))
'''


def read_tensor(folder, name):
    """(shape, bytes) of a tensor of golden.safetensors."""
    with open(os.path.join(folder, "golden.safetensors"), "rb") as file:
        length, = struct.unpack("<Q", file.read(8))
        one = json.loads(file.read(length))[name]
        file.seek(8 + length + one["data_offsets"][0])
        return one["shape"], file.read(one["data_offsets"][1] - one["data_offsets"][0])


def read_numbers(model, name):
    shape, data = read_tensor(os.path.join(GOLDEN, model), name)
    return [one for one, in struct.iter_unpack("<i" if name == "tokens" else "<f", data)]


class Program(unittest.TestCase):
    """./train itself."""

    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def generate(self, model, prompts, *options, launch=()):
        command = [*launch, TRAIN, f"--generate={self.path('prompts.jsonl', prompts)}", "--recipe=f32",
                   f"--load_path={os.path.join(GOLDEN, model)}", *options]
        result = subprocess.run(command, capture_output=True, text=True)
        return [json.loads(line)["tokens"] for line in result.stdout.splitlines() if line.startswith("{")], result.stderr

    def write_features(self, model, rows=None):
        """The tower's features of golden.safetensors; returns how many images these are."""
        with open(os.path.join(GOLDEN, model, "config.json")) as file:
            each = json.load(file)["image_seq_length"]
        (count, cols), data = read_tensor(os.path.join(GOLDEN, model), "features")
        self.path("features-0000.f32", data)
        about = {"id": "1", "rows": rows or each, "cols": cols, "dtype": "f32", "files": [["features-0000.f32", count // each]]}
        self.path("features.json", [about])
        return count // each

    def test_transformers(self):
        """Each model; images of other prompts in between; two ranks, which share the weights or are stages."""
        for model in MODELS:
            images = self.write_features(model)
            with open(os.path.join(GOLDEN, model, "continuation.json")) as file:
                golden = json.load(file)
            self.assertGreaterEqual(golden["margin"], 1e-3)
            prompt = {"tokens": golden["prompt"], "images": [0]}
            prompts = [prompt, [5, 6, 7], {**prompt, "images": [images - 1]}, prompt]
            ways = ((), []), (TWO_RANKS, []), (TWO_RANKS, ["--parallelism.pipeline=2"])
            for ranks, mesh in ways[:3 if model == MODELS[0] else 1]:
                found, errors = self.generate(model, prompts, f"--generate_features={self.folder}", "--max_new_tokens=52", *mesh,
                                              launch=ranks)
                self.assertEqual(len(found), 4, errors)
                self.assertEqual(found[0], golden["tokens"][:52], model)        # max_position_embeddings is 64
                self.assertEqual(found[3], found[0])
                self.assertEqual(found[2] == found[0], images == 1)

    def path(self, name, data):
        with open(os.path.join(self.folder, name), "wb") as file:
            file.write(data if isinstance(data, bytes) else "".join(json.dumps(line) + "\n" for line in data).encode())
        return os.path.join(self.folder, name)

    def evaluate(self, model, evaluator, launch=(), fails=False):
        """The last line of eval.jsonl, or what an error says."""
        settings = {"model": {"max_sequence_length": T}, "device_eval_batch_size": 1, "device_train_microbatch_size": 1,
                    "global_train_batch_size": 2, "evaluators": [{"label": "seen", **evaluator}]}
        save = os.path.join(self.folder, "scores")
        command = [*launch, TRAIN, self.path("eval.yaml", [settings]), "--eval_only", "--recipe=f32",
                   f"--load_path={os.path.join(GOLDEN, model)}", f"--save_folder={save}"]
        result = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(result.returncode != 0, fails, result.stderr + result.stdout)
        if fails:
            return result.stderr
        with open(os.path.join(save, "eval.jsonl")) as file:
            return json.loads(file.readlines()[-1])

    def test_caption_loss(self):
        """The loss that transformers computes from pixels; on two ranks too, of which one has no image in two of the models; with
        other images another one."""
        for model in MODELS:
            tokens, images = read_numbers(model, "tokens"), self.write_features(model)
            loss = read_numbers(model, "loss")[0]

            def found(index, launch=()):
                index = self.path("images.npy", struct.pack(f"<Q{len(index)}I", 1, *index))
                data = {"paths": [self.path("tokens.npy", struct.pack(f"<{len(tokens)}H", *tokens))], "memmap_dtype": "uint16",
                        "image_paths": [index], "image_features": self.folder}
                return self.evaluate(model, {"data": data}, launch)["eval/seen/CrossEntropyLoss"]
            for launch in ((), TWO_RANKS):
                self.assertAlmostEqual(found(range(images), launch), loss, delta=1e-5 * loss)
            if images > 1:
                self.assertGreater(abs(found(range(images)[::-1]) - loss), 1e-3 * loss)

    def test_questions(self):
        """Downstream tasks: log-probabilities of continuations by the logits that transformers computes from pixels."""
        model = MODELS[0]
        self.write_features(model)
        tokens, logits = read_numbers(model, "tokens"), read_numbers(model, "logits")
        each = len(logits) // len(tokens)
        normal = [math.log(sum(map(math.exp, logits[i * each:(i + 1) * each]))) for i in range(len(tokens))]
        known = lambda place, token: logits[place * each + token] - normal[place]
        choice = lambda tokens, scored: {"tokens": tokens, "continuation": scored, "characters": 1, "bytes": 5}
        questions, right, bits = [], 0, 0
        for row, end in [(0, end) for end in range(11, T)] + [(1, end) for end in range(2, T)]:      # images: of row 0 only
            context, images = tokens[row * T:row * T + end], [0, 1] if row == 0 else []
            answers = [5 * end + row, 3 * end + 5, end]
            values = [known(row * T + end - 1, one) for one in answers]
            gold = (end + row) % 3
            right += values.index(max(values)) == gold
            questions.append({"gold": gold, "images": images, "choices": [choice(context + [one], 1) for one in answers]})
        head = {"task": "made", "metric": "acc", "questions": len(questions)}
        data = {"paths": [self.path("acc.jsonl", [head, *questions])], "image_features": self.folder}
        for launch in ((), TWO_RANKS):
            found = self.evaluate(model, {"type": "downstream", "data": data}, launch)
            self.assertAlmostEqual(found["eval/downstream/seen_acc"], right / len(questions))
            self.assertTrue(0 < right < len(questions))
        bits = -sum(known(place, tokens[place + 1]) for place in (11, 12, 13, 14)) / math.log(2) / 5
        head = {"task": "made", "metric": "bpb", "questions": 1}
        question = {"gold": 0, "images": [0, 1], "choices": [choice(tokens[:T], 4)]}
        data["paths"] = [self.path("bpb.jsonl", [head, question])]
        found = self.evaluate(model, {"type": "downstream", "data": data})
        self.assertAlmostEqual(found["eval/downstream/seen_bpb"], bits, delta=1e-5 * bits)
        for change, expected in (({"images": [0]}, ":2: 8 tokens are 98 (model.image_token_id), and there are 1 images; expected 4"),
                                 ({"images": [0, 2]}, "image 2 is shown, but"),
                                 ({"choices": [choice(tokens[:T] + [1, 2], 4)]}, "a choice with images has 18 tokens; expected")):
            self.path("bpb.jsonl", [head, {**question, **change}])
            self.assertIn(expected, self.evaluate(model, {"type": "downstream", "data": data}, fails=True))
        self.path("bpb.jsonl", [head, question])
        error = self.evaluate(model, {"type": "downstream", "data": {"paths": data["paths"]}}, fails=True)
        self.assertIn("there are images, but no features of them; give them as data.image_features", error)
        data["image_paths"] = data["paths"]
        error = self.evaluate(model, {"type": "downstream", "data": data}, fails=True)
        self.assertIn("the questions of a downstream task name their images", error)

    def test_errors(self):
        model, token = MODELS[0], 98
        self.write_features(model)
        whole, given = {"tokens": [5] + 4 * [token], "images": [0]}, f"--generate_features={self.folder}"
        for prompt, options, expected in (
                (whole, [], "prompts.jsonl:1: there are images, but no features of them; give them as --generate_features"),
                ({**whole, "images": []}, [given], ":1: 4 tokens are 98 (model.image_token_id), and there are 0 images; expected 4"),
                ({"tokens": [5, token], "images": [0]}, [given], ":1: 1 tokens are 98 (model.image_token_id), and there are 1 images"),
                ({**whole, "images": [2]}, [given], "image 2 is shown, but"),
                ({**whole, "images": [-1]}, [given], "element 0 of the images is not the number of an image"),
                ({**whole, "images": 0}, [given], "\"images\" is not a list"),
                (whole, ["--generate_features=/no/such"], "generate_features: /no/such/features.json: ")):
            found, errors = self.generate(model, [prompt], *options)
            self.assertEqual(found, [])
            self.assertIn(expected, errors)
        self.assertIn("generate_features: the model reads only text", self.generate("llama", [[1]], given)[1])
        self.assertIn("there are images, but the model reads only text", self.generate("llama", [whole])[1])
        self.write_features(model, rows=2)
        self.assertIn("generate_features: ", self.generate(model, [whole], given)[1])


@unittest.skipIf(MISSING, f"needs {', '.join(MISSING)}")
class Scripts(unittest.TestCase):
    WORDS = "? what is it a red cat the dog".split()

    def setUp(self):
        from PIL import Image
        from tokenizers import Tokenizer, models, pre_tokenizers
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(self.WORDS)}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<image>"])
        tokenizer.save(os.path.join(self.folder, "tokenizer.json"))
        self.write("config.json", {"model_type": "llava", "image_token_index": 9, "image_feature_size": 12, "image_seq_length": 4})
        self.write("tokenizer_config.json", {"chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}what "})
        for i, colour in enumerate(("red", "green", "blue")):
            Image.new("RGB", (4, 4), colour).save(os.path.join(self.folder, f"{i}.png"))
        self.write("train.py", STAND_IN.replace("ANSWERS", "[[0]]"))
        self.seen = os.path.join(self.folder, "seen.json")

    def write(self, name, value):
        with open(os.path.join(self.folder, name), "w") as file:
            file.write(value if isinstance(value, str) else json.dumps(value))

    def path(self, i):
        return os.path.join(self.folder, f"{i}.png")

    def call(self, script, *arguments):
        train = f"{sys.executable} {os.path.join(self.folder, 'train.py')} {self.seen}"
        command = [sys.executable, "-B", os.path.join(TOP, "scripts", script), self.folder, "--train", train, *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    def prompts(self):
        with open(self.seen) as file:
            return json.load(file)

    def test_pictures_of_a_text(self):
        """Four tokens each, in front of the text or where it says; the second picture is the first one again."""
        import numpy as np
        what, image = 1, 9
        result = self.call("generate.py", "is", "--image", self.path(0), "--image", self.path(2))
        self.assertEqual((result.returncode, result.stdout), (0, "?\n"), result.stderr)
        self.assertEqual(self.prompts(), [{"tokens": 8 * [image] + [2, what], "images": [0, 1]}])
        with open(self.seen + ".features/features-0000.f32", "rb") as file:
            rows = np.frombuffer(file.read(), "<f4").reshape(2, 4, 4, 3)
        self.assertTrue((rows == np.array([[1, -1, -1], [-1, -1, 1]])[:, None, None]).all())
        self.call("generate.py", "is <image> it", "a<image>", "--image", self.path(1))
        self.assertEqual([one["tokens"] for one in self.prompts()], [[2, *4 * [image], 3, what], [4, *4 * [image], what]])
        self.call("generate.py", "--raw", "is", "--image", self.path(1))
        self.assertEqual(self.prompts()[0]["tokens"], [*4 * [image], 2])

    def test_errors(self):
        for arguments, expected in ((["is<image>", "--image", self.path(0), "--image", self.path(1)],
                                     "text 1: 1 times <image>, and 2 pictures; expected one for each picture, or no <image>"),
                                    (["is", "--image", "/no/such.png"], "/no/such.png: No such file"),
                                    (["is", "--image", os.path.join(self.folder, "config.json")], "expected a picture that Pillow")):
            result = self.call("generate.py", *arguments)
            self.assertEqual(result.returncode, 1)
            self.assertIn(expected, result.stderr)
            self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.write("config.json", {"model_type": "llama"})
        self.assertIn("expected llava, a model with images", self.call("generate.py", "is", "--image", self.path(0)).stderr)

    def test_scores(self):
        """Scores of answers "red cat", "the dog", "a cat": one right but for an article, one with half of the words, one wrong."""
        answers = [[5, 6], [7, 8], [4, 6]]
        lines = [{"image": f"{i}.png", "messages": [{"role": "user", "content": "<image>\nwhat is it"},
                                                    {"role": "assistant", "content": text}]}
                 for i, text in enumerate(("A red dog!", "Dog", "red"))]
        path = os.path.join(self.folder, "test.jsonl")
        self.write("test.jsonl", "\n".join(map(json.dumps, lines)))
        options = ["--root", self.folder, f"--answers={os.path.join(self.folder, 'out.jsonl')}"]
        self.write("train.py", STAND_IN.replace("ANSWERS", str(answers)))
        result = self.call("score_captions.py", path, "--shuffled", *options)
        self.assertEqual(result.returncode, 0, result.stderr)
        prompts = self.prompts()
        self.assertEqual(prompts[0], {"tokens": [*4 * [9], 1, 2, 3, 1], "images": [0]})
        self.assertEqual([one["images"][0] for one in prompts[:3]], [0, 1, 2])
        others = [one["images"][0] for one in prompts[3:]]
        self.assertEqual(sorted(others), [0, 1, 2])
        self.assertTrue(all(own != other for own, other in enumerate(others)))
        # words of the answers: {red cat}, {dog}, {cat}; of the references: {red dog}, {dog}, {red}
        f1 = {(0, 0): 1 / 2, (0, 1): 2 / 3, (0, 2): 0, (1, 0): 0, (1, 1): 1, (1, 2): 0, (2, 0): 2 / 3, (2, 1): 0, (2, 2): 0}
        own = 100 * (f1[0, 0] + f1[1, 1] + f1[2, 2]) / 3
        blind = 100 * sum(f1[i, other] for i, other in enumerate(others)) / 3
        self.assertEqual(result.stdout.splitlines()[2], f"| {path} | 3 | 33.3 | {own:.1f} | 0.0 | {blind:.1f} |")
        with open(os.path.join(self.folder, "out.jsonl")) as file:
            rows = [json.loads(line) for line in file]
        self.assertEqual([(one["answer"], one["exact_match"], one["shuffled"]) for one in rows[:3]],
                         [("red cat", 0, False), ("the dog", 1, False), ("a cat", 0, False)])
        self.assertEqual(rows[3]["pictures"], [f"{others[0]}.png"])

    def test_choices(self):
        """Each question has its own answer and another one; scored are the answer and the token that ends it."""
        template = "{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}{{ eos_token }} {% endif %}{% endfor %}"
        self.write("tokenizer_config.json", {"chat_template": template, "eos_token": "?"})
        texts = ["red dog", "dog", "a red cat"]
        self.write("test.jsonl", "\n".join(map(json.dumps, [
            {"image": f"{i}.png", "messages": [{"role": "user", "content": "<image>is it"}, {"role": "assistant", "content": text}]}
            for i, text in enumerate(texts)])))
        file = lambda name: os.path.join(self.folder, name)
        sys.path.insert(0, os.path.join(TOP, "scripts"))
        import make_image_features
        make_image_features.make(self.folder, self.folder, ["2.png", "1.png", "0.png"], file("features"))
        command = [sys.executable, "-B", os.path.join(TOP, "scripts", "make_choices.py"), "--model", self.folder, "--images",
                   file("features"), "--output", file("made.jsonl"), file("test.jsonl")]
        result = subprocess.run([*command, "--choices=2"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("label: made, type: downstream", result.stdout)
        with open(file("made.jsonl")) as lines:
            head, *rows = map(json.loads, lines)
        self.assertEqual(head, {"task": "made", "metric": "acc", "questions": 3})
        for i, (row, text) in enumerate(zip(rows, texts)):
            self.assertEqual((row["images"], len(row["choices"])), ([2 - i], 2))
            words = [self.WORDS.index(word) for word in text.split()]
            own, other = row["choices"][row["gold"]], row["choices"][1 - row["gold"]]
            self.assertEqual(own, {"tokens": [*4 * [9], 2, 3, *words, 0], "continuation": len(words) + 1, "characters": len(text),
                                   "bytes": len(text)})
            self.assertNotEqual(own["tokens"], other["tokens"])
        self.assertIn("3 different answers", subprocess.run([*command, "--choices=4"], capture_output=True, text=True).stderr)

    def test_definition(self):
        """As SQuAD's evaluate-v1.1.py has it: capital letters, punctuation, articles, and words that occur twice."""
        from score_captions import exact_match, token_f1
        for answer, reference, exact, f1 in (("The cat.", "cat", 1, 1), ("a  theme", "Theme", 1, 1), ("cat", "dog", 0, 0),
                                             ("red red cat", "red cat", 0, 2 * (2 / 3) * 1 / (2 / 3 + 1)), ("", "cat", 0, 0),
                                             ("flag: Åland", "flag aland", 0, 1 / 2), ("up-side", "upside", 1, 1)):
            self.assertEqual(exact_match(answer, reference), exact)
            self.assertAlmostEqual(token_f1(answer, reference), f1)


if __name__ == "__main__":
    unittest.main()
