#!/usr/bin/env python3
"""Two ranks in separate folders, as on two hosts, have different files with the same names. Each kind of file is refused before
it is used. Files that only rank 0 reads, and differences without effect, are accepted."""
import json, os, random, shlex, shutil, struct, subprocess, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
LAUNCH = shlex.split(os.environ.get("LAUNCH", "mpirun --oversubscribe"))
VOCAB, EOS, T = 100, 99, 16
CONFIG = f"""
recipe: f32
model: {{d_model: 16, n_layers: 2, n_heads: 2, mlp_hidden_size: 64, max_sequence_length: {T}, vocab_size: {VOCAB},
        eos_token_id: {EOS}, weight_tying: false, layer_norm_type: rms}}
optimizer: {{learning_rate: 1.0e-3}}
scheduler: {{t_warmup: 0}}
max_duration: 2
global_train_batch_size: 4
device_train_microbatch_size: 2
eval_interval: null
data: {{paths: [text.npy]}}
"""
QUESTIONS = [{"gold": 0, "choices": [{"tokens": [1, 2, 3], "continuation": 1, "characters": 3, "bytes": 3},
                                     {"tokens": [1, 2, 4], "continuation": 1, "characters": 3, "bytes": 3}]}]


def tokens(seed, count=640):
    draw = random.Random(seed)
    return [EOS if i % 20 == 19 else draw.randrange(EOS) for i in range(count)]


@unittest.skipUnless(os.path.exists(TRAIN), f"needs {TRAIN}")
class RankFiles(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """A and B are the folders of rank 0 and rank 1, with the same files: a run, the model exported from the run, and
        adapters."""
        cls.top = tempfile.mkdtemp()
        cls.ranks = [os.path.join(cls.top, name) for name in "AB"]
        for name in ("A", "other"):
            folder = os.path.join(cls.top, name)
            os.mkdir(folder)
            cls.write(folder, "c.yaml", CONFIG)
            cls.write(folder, "text.npy", tokens(1))
            seed = ["--seed=2"] if name == "other" else []
            cls.must(folder, "c.yaml", "--save_folder=run", *seed)
            cls.must(folder, "--export=run/latest", "--dtype=f32", "model")
            cls.must(folder, "c.yaml", "--load_path=model", "--lora.rank=2", "--save_folder=adapters", *seed)
        shutil.copytree(cls.ranks[0], cls.ranks[1], symlinks=True)
        cls.other = os.path.join(cls.top, "other")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.top)

    @staticmethod
    def write(folder, name, content):
        path = os.path.join(folder, name)
        data = content.encode() if isinstance(content, str) else struct.pack(f"<{len(content)}H", *content) \
            if isinstance(content, list) else content
        with open(path, "wb") as file:
            file.write(data)

    def both(self, name, content, other):
        """Writes a file for both ranks; the second rank's file differs from now on."""
        for folder, mine in zip(self.ranks, (content, other)):
            self.write(folder, name, mine)
            self.addCleanup(os.remove, os.path.join(folder, name))

    def instead(self, name):
        """Rank 1 has the folder of this name from another run, until the end of the test."""
        here = os.path.join(self.ranks[1], name)
        os.rename(here, here + ".mine")
        shutil.copytree(os.path.join(self.other, name), here, symlinks=True)
        self.addCleanup(os.rename, here + ".mine", here)
        self.addCleanup(shutil.rmtree, here)

    @classmethod
    def must(cls, folder, *arguments):
        subprocess.run([TRAIN, *arguments], cwd=folder, check=True, capture_output=True)

    def run_both(self, *arguments):
        """Both ranks use the same save_folder."""
        saved = tempfile.mkdtemp(dir=self.top)
        rank = lambda folder: ["-n", "1", "--wdir", folder, TRAIN, *arguments, f"--save_folder={saved}"]
        self.saved = saved
        return subprocess.run([*LAUNCH, *rank(self.ranks[0]), ":", *rank(self.ranks[1])], capture_output=True, text=True,
                              timeout=120)

    def refused(self, what, *arguments):
        done = self.run_both(*arguments)
        said = [line for line in done.stderr.splitlines() if line.startswith("error")]
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertEqual(len(said), 1, done.stderr)
        self.assertRegex(said[0], f"the ranks have different {what}.*: those of rank 1 on .* differ from those of rank 0 on ")
        self.assertNotIn("\nstep 1/", done.stdout)

    def accepted(self, *arguments):
        done = self.run_both(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def evaluator(self, **data):
        return f"--evaluators=[{{label: v, data: {json.dumps(data)}}}]"

    def test_same(self):
        """Times make no difference."""
        os.utime(os.path.join(self.ranks[1], "model", "model.safetensors"), (1, 1))
        for folder in ("model", "adapters/latest", "run/latest"):
            self.assertIn("\nstep ", self.accepted("c.yaml", f"--load_path={folder}", "--max_duration=4"))

    def test_weights(self):
        self.instead("model")
        self.both("prompts.jsonl", '{"tokens": [1, 2]}\n', '{"tokens": [1, 2]}\n')
        self.both("v.npy", tokens(2), tokens(2))
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            self.refused("weights", "c.yaml", "--load_path=model", f"--fsdp.sharding_strategy={strategy}")
        self.refused("weights", "c.yaml", "--load_path=model", "--eval_only", self.evaluator(paths=["v.npy"]))
        self.refused("weights", "c.yaml", "--load_path=model", "--generate=prompts.jsonl")
        self.refused("weights", "c.yaml", "--load_path=model", "--lora.rank=2")
        self.refused("weights", "c.yaml", "--load_path=adapters/latest", "--lora.base_path=model")

    def test_one_value(self):
        """In a tensor that is smaller than the sample, each byte counts: here the last byte of the final norm."""
        path = os.path.join(self.ranks[1], "model", "model.safetensors")
        with open(path, "rb") as file:
            whole = bytearray(file.read())
        header = json.loads(whole[8:8 + struct.unpack("<Q", whole[:8])[0]])
        end = 8 + struct.unpack("<Q", whole[:8])[0] + header["model.norm.weight"]["data_offsets"][1]
        self.addCleanup(self.write, self.ranks[1], "model/model.safetensors", bytes(whole))
        whole_again = bytearray(whole)
        whole_again[end - 4] ^= 1
        self.write(self.ranks[1], "model/model.safetensors", bytes(whole_again))
        self.refused("weights", "c.yaml", "--load_path=model")

    def test_checkpoints(self):
        """A checkpoint's trainer.json has the checksums of all tensors. Without checksums, moments are compared by samples."""
        self.instead("run")
        self.refused("trainer.json", "c.yaml", "--load_path=run/latest", "--max_duration=4")
        shutil.copy(os.path.join(self.ranks[0], "run/step2/model.safetensors"), os.path.join(self.ranks[1], "run/step2"))
        for folder in self.ranks:
            path = os.path.join(folder, "run/step2/trainer.json")
            with open(os.path.join(self.ranks[0], "run/step2/trainer.json")) as file:
                manifest = json.load(file)
            manifest.pop("crc32c", None)
            self.write(folder, "run/step2/trainer.json.new", json.dumps(manifest))
            os.rename(path, path + ".old")
            os.rename(path + ".new", path)
            self.addCleanup(os.rename, path + ".old", path)
        self.refused("weights or moments", "c.yaml", "--load_path=run/latest", "--max_duration=4")

    def test_adapters(self):
        load = ["c.yaml", "--load_path=adapters/latest", "--lora.base_path=model"]
        self.instead("adapters")
        self.refused("trainer.json", *load, "--max_duration=4")
        for folder in self.ranks:           # as PEFT saves them
            path = os.path.join(folder, "adapters/step2/trainer.json")
            os.rename(path, path + ".old")
            self.addCleanup(os.rename, path + ".old", path)
        for name in os.listdir(os.path.join(self.ranks[0], "adapters/step2")):
            if name.startswith("optimizer"):
                for folder in self.ranks:
                    path = os.path.join(folder, "adapters/step2", name)
                    os.rename(path, path + ".old")
                    self.addCleanup(os.rename, path + ".old", path)
        self.refused("weights", *load)

    def test_training_data(self):
        mask = bytes(i % 2 for i in range(640))
        self.both("t.npy", tokens(3), tokens(4))
        self.refused("contents of data files", "c.yaml", "--data.paths=[t.npy]")
        self.both("t.mask", mask, mask[::-1])
        self.refused("contents of data files", "c.yaml", "--data.label_mask_paths=[t.mask]")
        self.both("s.npy", tokens(3), tokens(3)[:320])
        self.refused("data files", "c.yaml", "--data.paths=[s.npy]")

    def test_validation_data(self):
        mask = bytes(i % 3 > 0 for i in range(640))
        often = ["c.yaml", "--eval_interval=1"]
        self.both("v.npy", tokens(5), tokens(5))
        self.assertIn("validation: v: 640 tokens from 1 file\n", self.accepted(*often, self.evaluator(paths=["v.npy"])))
        self.both("w.npy", tokens(5), tokens(6))
        self.refused("validation data for evaluator 'v'", *often, self.evaluator(paths=["w.npy"]))
        self.both("short.npy", tokens(5), tokens(5)[:320])
        self.refused("validation data", *often, self.evaluator(paths=["short.npy"]))
        self.both("v.mask", mask, mask[1:] + mask[:1])
        self.refused("validation data", *often, self.evaluator(paths=["v.npy"], label_mask_paths=["v.mask"]))
        self.both("v.csv.gz", "0,320\n320,640\n", "0,300\n300,640\n")
        for packing in ("best_fit", "concat"):
            self.refused("validation data", *often, "--data.generate_doc_lengths",
                         self.evaluator(paths=["v.npy"], document_boundaries="metadata", packing=packing))
        self.refused("validation data", "c.yaml", "--load_path=model", "--eval_only", self.evaluator(paths=["w.npy"]))

    def test_questions(self):
        head = {"task": "a", "metric": "acc", "questions": 1}
        lines = lambda questions: "".join(json.dumps(q) + "\n" for q in [head, *questions])
        other = json.loads(json.dumps(QUESTIONS))
        other[0]["choices"][1]["tokens"][2] = 5         # the same number of choices and tokens
        self.both("q.jsonl", lines(QUESTIONS), lines(other))
        evaluator = "--evaluators=[{label: q, type: downstream, data: {paths: [q.jsonl]}}]"
        self.refused("questions of evaluator 'q'", "c.yaml", "--eval_interval=1", evaluator)
        self.refused("questions of evaluator 'q'", "c.yaml", "--load_path=model", "--eval_only", evaluator)

    def test_configurations(self):
        self.both("d.yaml", CONFIG, CONFIG.replace("1.0e-3", "2.0e-3"))
        self.both("prompts.jsonl", '{"tokens": [1, 2]}\n', '{"tokens": [1, 2]}\n')
        self.refused("configurations", "d.yaml")
        self.refused("configurations", "d.yaml", "--load_path=model", "--generate=prompts.jsonl")

    def test_rank_0_alone(self):
        """Only rank 0 reads prompts and the tokenizer, so other hosts may have different files."""
        self.both("p.jsonl", '{"tokens": [1, 2]}\n', "nonsense")
        said = self.accepted("c.yaml", "--load_path=model", "--generate=p.jsonl", "--max_new_tokens=4")
        alone = subprocess.run([TRAIN, "c.yaml", "--load_path=model", "--generate=p.jsonl", "--max_new_tokens=4"],
                               cwd=self.ranks[0], capture_output=True, text=True, check=True)
        self.assertEqual([l for l in said.splitlines() if "prompt" in l], alone.stdout.splitlines())
        self.accepted("c.yaml", "--samples.prompts=p.jsonl", "--samples.interval=1", "--samples.max_new_tokens=2")
        vocab = '{"model": {"vocab": {%s}}}'
        self.both("tokenizer.json", vocab % ", ".join(f'"t{i}": {i}' for i in range(VOCAB)), "nonsense")
        self.accepted("c.yaml", "--tokenizer=tokenizer.json")
        with open(os.path.join(self.saved, "latest", "tokenizer.json")) as file:
            self.assertIn('"t7": 7', file.read())

    def test_patterns(self):
        """** matches the files of all folders below, in the order of their names, on the command line and in evaluators."""
        for folder in self.ranks:
            for i, name in enumerate(("one", "one/two", "one/.hidden", "three")):
                os.makedirs(os.path.join(folder, "deep", name))
                self.write(folder, f"deep/{name}/part.npy", tokens(i, 160))
            self.addCleanup(shutil.rmtree, os.path.join(folder, "deep"))
        said = self.accepted("c.yaml", "--data.paths=[deep/**/*.npy]", "--eval_interval=2", self.evaluator(paths=["deep/**"]))
        self.assertIn(f"data: 480 tokens in 30 instances of {T} from 3 files\n", said)
        self.assertIn("validation: v: 480 tokens from 3 files\n", said)
        said = self.accepted("c.yaml", "--data.paths=deep/**/part.npy")
        self.assertIn("from 3 files\n", said)
        self.assertIn("from 2 files\n", self.accepted("c.yaml", "--data.paths=[deep/*/*.npy]"))


if __name__ == "__main__":
    unittest.main()
