#!/usr/bin/env python3
"""scripts/upcycle.py: a model of experts has the validation loss of the dense model, and each expert has the bytes of its MLP."""
import array, importlib.util, json, os, random, re, shutil, subprocess, sys, tempfile, unittest

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(TOP, os.environ.get("BUILD", "build/cpu"), "train")
DENSE = os.path.join(TOP, "tests", "golden", "qwen3")
sys.path.insert(0, os.path.join(TOP, "scripts"))


@unittest.skipUnless(importlib.util.find_spec("numpy"), "pip install numpy")
class Upcycle(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def upcycle(self, *arguments):
        return subprocess.run([sys.executable, os.path.join(TOP, "scripts", "upcycle.py"), *arguments], capture_output=True, text=True)

    def loss(self, folder):
        command = [TRAIN, f"--load_path={folder}", "--eval_only", "--recipe=f32", "--model.max_sequence_length=32",
                   "--global_train_batch_size=4", "--device_train_microbatch_size=4", f"--data.paths=[{self.path('t.npy')}]",
                   f"--evaluators=[{{label: v, data: {{paths: [{self.path('t.npy')}]}}}}]", f"--save_folder={self.path('eval')}"]
        done = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(self.path("eval"), "eval.jsonl")) as file:
            losses = [json.loads(line)["eval/v/CrossEntropyLoss"] for line in file if "eval/v/CrossEntropyLoss" in line]
        return losses[-1]

    def test_same_model(self):
        """Three equal outputs with weights that add up to 1: roundings of F32."""
        import model_folder
        draw = random.Random(1)
        with open(self.path("t.npy"), "wb") as file:
            array.array("H", [draw.randrange(99) for _ in range(512)]).tofile(file)
        made = self.upcycle("--experts=5", "--top-k=3", DENSE, self.path("experts"))
        self.assertEqual(made.returncode, 0, made.stderr)
        dense = self.loss(DENSE)
        self.assertAlmostEqual(self.loss(self.path("experts")) / dense, 1, delta=1e-6)
        bytes_of = lambda folder: {name: b"".join(one.pieces()) for file in model_folder.read_files(folder) for name, one in file.items()}
        old, new = bytes_of(DENSE), bytes_of(self.path("experts"))
        routers = {name for name in new if name.endswith("mlp.gate.weight")}
        self.assertEqual(len(routers), 2)
        for name in new.keys() - routers:
            self.assertEqual(new[name], old[re.sub(r"experts\.\d+\.", "", name)], name)
        self.assertEqual(len(new), len(old) + 2 * (1 + 3 * 4))

    def test_errors(self):
        for arguments, text in (((os.path.join(TOP, "tests", "golden", "llama"), self.path("x")), "model_type is llama"),
                                (("--top-k=9", DENSE, self.path("x")), "from 1 to --experts=8"),
                                ((DENSE, self.folder), "exists already")):
            done = self.upcycle(*arguments)
            self.assertEqual(done.returncode, 1)
            self.assertIn(text, done.stderr)


if __name__ == "__main__":
    unittest.main()
