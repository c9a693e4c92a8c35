#!/usr/bin/env python3
"""scripts/metrics.py: metrics.jsonl as a whole, and followed while it grows and is cut; the pictures made of it."""
import contextlib, importlib, importlib.util, io, json, os, random, re, sys, unittest
from unittest import mock

sys.dont_write_bytecode = True
from test_watch import Folder, as_lines, record

import metrics


class ReadTest(Folder):
    def test_labels(self):
        """Characters in a label end no line, and a slash ends no label."""
        lines = [record(1), {"step": 1, "eval/a/b/CrossEntropyLoss": 3.0, "eval/c\u2028/CrossEntropyLoss": 4.0}]
        self.append("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode() + b'{"step": 2, "tra')
        self.assertEqual(metrics.read(self.run_folder), lines)

    def test_damaged_line(self):
        """It is named; only the last line may be cut short, even within a letter."""
        path = os.path.join(self.run_folder, "metrics.jsonl")
        for damaged, shown in ((b"Expecting", "'Expecting'"), (b'{"step": 2, "tra', "'{\"step\": 2, \"tra'"), (b"[3]", "'[3]'"),
                               (b"7", "'7'"), (b"null", "'null'"), (b"\xff\0", "'\ufffd\\x00'"), (b"", "''"),
                               (b"[" * 100000, f"'{'[' * 60}'")):
            self.append(as_lines([record(1), record(2)]) + damaged + b"\n" + as_lines([record(3)]))
            with self.assertRaises(SystemExit) as caught:
                metrics.read(self.run_folder)
            self.assertIn(f"error: {path}:3: found {shown}; expected an object of JSON", str(caught.exception))
            os.unlink(path)
        self.append(as_lines([record(1)]) + '{"step": 2, "eval/\u00e9'.encode()[:-1])
        self.assertEqual(metrics.read(self.run_folder), [record(1)])


@unittest.skipUnless(importlib.util.find_spec("matplotlib"), "pip install matplotlib")
class PlotTest(Folder):
    def plot(self, script, *arguments):
        with mock.patch.object(sys, "argv", [script, *arguments]), contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(script).main()

    def test_output(self):
        """One line says of a picture that it cannot be."""
        counts = {f"quant/optimizer/{name}": [1, 2] for name in ("m/k", "v/k", "m/log2_range", "v/log2_range",
                                                                 "m/log2_range_expanded", "v/log2_range_expanded")}
        self.append([record(1, **counts), record(2, **counts)])
        nowhere, other = os.path.join(self.top, "none", "x.png"), os.path.join(self.top, "x.foo")
        for script in ("plot_loss", "plot_quantization"):
            for path, said in ((nowhere, "No such file or directory"), (other, "Format 'foo' is not supported")):
                with self.assertRaises(SystemExit) as caught:
                    self.plot(script, self.run_folder, "--output", path)
                self.assertRegex(str(caught.exception), rf"^error: {re.escape(path)}: {said}.*; give another --output")

    def test_seeds(self):
        """Two seeds: differences 0.5 and 0.1 have the mean 0.3 and the standard error 0.2; 1 and 3 have the standard deviation
        sqrt 2."""
        import numpy as np
        import plot_loss
        runs = {"bf16-1": 1, "bf16-2": 3, "coat-1": 1.5, "coat-2": 3.1}
        for name, loss in runs.items():
            os.mkdir(os.path.join(self.top, name))
            with open(os.path.join(self.top, name, "metrics.jsonl"), "w", encoding="utf-8") as file:
                for step in range(1, 4 + (name == "coat-1")):       # only steps that all have count
                    file.write(json.dumps({"step": step, "throughput/total_tokens": 10 * step, plot_loss.TRAIN: loss}) + "\n")
        with contextlib.redirect_stdout(io.StringIO()):
            bf16, coat = (plot_loss.Group(recipe, [os.path.join(self.top, f"{recipe}-{seed}") for seed in (1, 2)], 1)
                          for recipe in ("bf16", "coat"))
        steps, mean, error = plot_loss.difference(coat.curves, bf16.curves)
        self.assertEqual(steps.tolist(), [1, 2, 3])
        np.testing.assert_allclose([mean, error], [[0.3] * 3, [0.2] * 3], rtol=1e-12)
        np.testing.assert_allclose(plot_loss.spread(plot_loss.common(bf16.curves)[1]), [2 ** 0.5] * 3, rtol=1e-12)
        path = os.path.join(self.top, "loss.png")
        self.plot("plot_loss", os.path.join(self.top, "bf16"), os.path.join(self.top, "coat"), "--seeds", "1", "2",
                  "--output", path)
        self.assertGreater(os.path.getsize(path), 0)


class FollowerTest(Folder):
    def setUp(self):
        super().setUp()
        self.follower, self.seen = metrics.Follower(self.run_folder), []

    def poll(self):
        records, void = self.follower.poll()
        if void is not None:
            self.seen = [r for r in self.seen if r["step"] < void]
        self.seen += records
        return void

    def test_pieces(self):
        self.assertEqual(self.follower.poll(), ([], None))          # no file yet
        text = as_lines([record(1), record(2)])
        for i in range(0, len(text), 7):
            self.append(text[i:i + 7])
            self.poll()
        self.assertEqual(self.seen, [record(1), record(2)])

    def test_cut_and_longer_than_before(self):
        self.append([record(i) for i in range(1, 8)])
        self.poll()
        self.cut(3)
        again = [record(i, 1) for i in range(4, 30)]
        self.append(again)
        self.assertEqual(self.poll(), 4)
        self.assertEqual(self.seen, [record(i) for i in range(1, 4)] + again)

    def test_cut_to_nothing(self):
        self.append([record(1), record(2)])
        self.poll()
        os.unlink(os.path.join(self.run_folder, "metrics.jsonl"))
        self.assertEqual(self.poll(), 1)
        self.assertEqual(self.seen, [])

    def test_cut_within_a_step(self):
        """All of the step is void, and comes again."""
        self.append([record(1), record(2), {"step": 2, "eval/val/CrossEntropyLoss": 4}])
        self.poll()
        os.truncate(os.path.join(self.run_folder, "metrics.jsonl"), len(as_lines([record(1), record(2)])))
        self.append([{"step": 2, "eval/val/CrossEntropyLoss": 5}])
        self.assertEqual(self.poll(), 2)
        self.assertEqual(self.seen, [record(1), record(2), {"step": 2, "eval/val/CrossEntropyLoss": 5}])

    def test_damaged_line(self):
        """It is passed over, as a run that continues leaves it where it is; a step that is no number of one is damage too."""
        damaged = b'{"step": 2, "train/Cr\n{"step": Infinity}\n{"step": "7"}\n\xff\n'
        self.append(as_lines([record(1)]) + damaged + as_lines([record(3)]))
        self.poll()
        self.assertEqual(self.seen, [record(1), record(3)])
        os.truncate(os.path.join(self.run_folder, "metrics.jsonl"), len(as_lines([record(1)])))
        self.append([record(2)])
        self.poll()
        self.assertEqual(self.seen, [record(1), record(2)])

    def test_random(self):
        """Whatever was appended, cut and torn between polls: what was seen is what is there."""
        chance = random.Random(6198)
        for trial in range(40):
            self.setUp()
            truth, step, torn = [], 0, b""
            for event in range(30):
                kind = chance.random()
                if kind < 0.6:
                    for _ in range(chance.randrange(1, 4)):
                        step += 1
                        new = [record(step, chance.random())] * chance.randrange(1, 3)
                        text = torn + as_lines(new)
                        truth += new
                        self.append(text)
                        torn = b""
                elif kind < 0.75 and step:
                    step = chance.randrange(step)
                    truth = [r for r in truth if r["step"] <= step]
                    self.cut(step)
                    torn = b""
                if chance.random() < 0.5:
                    self.poll()
            self.poll()
            self.assertEqual(self.seen, truth, f"trial {trial}")


if __name__ == "__main__":
    unittest.main()
