#!/usr/bin/env python3
"""scripts/metrics.py: reads metrics.jsonl as a whole, and follows the file while it grows and is cut. Also pictures of the
metrics."""
import contextlib, importlib, importlib.util, io, json, os, random, re, sys, unittest
from unittest import mock

sys.dont_write_bytecode = True
from test_watch import Folder, as_lines, record

import metrics

CHECKPOINTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "golden", "checkpoints")


class ReadTest(Folder):
    def test_labels(self):
        """Special characters in a label do not end a line, and a slash does not end a label."""
        lines = [record(1), {"step": 1, "eval/a/b/CrossEntropyLoss": 3.0, "eval/c\u2028/CrossEntropyLoss": 4.0}]
        self.append("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode() + b'{"step": 2, "tra')
        self.assertEqual(metrics.read(self.run_folder), lines)

    def test_damaged_line(self):
        """A damaged line is named. Only the last line may be incomplete, even in the middle of a character."""
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
        """If a picture cannot be made, one line says why."""
        self.append([record(1), record(2)])
        self.link("average")
        nowhere, other = os.path.join(self.top, "none", "x.png"), os.path.join(self.top, "x.foo")
        for script in ("plot_loss", "plot_quantization"):
            for path, said in ((nowhere, "No such file or directory"), (other, "Format 'foo' is not supported")):
                with self.assertRaises(SystemExit) as caught:
                    self.plot(script, self.run_folder, "--output", path)
                self.assertRegex(str(caught.exception), rf"^error: {re.escape(path)}: {said}.*; give another --output")

    def link(self, name):
        """Makes the last checkpoint of this kind the checkpoint of the run."""
        os.symlink(os.path.join(CHECKPOINTS, name, "step3"), os.path.join(self.run_folder, "latest"))

    def test_formats(self):
        """Compares with a search in all values of a format. Also checks the purpose of expansion: k is the largest number in
        sixteenths with which a group spans no more than the codes. The power 1/k enlarges an error of half a unit of a code."""
        import numpy as np
        import plot_quantization as plot
        r = np.random.default_rng(1)
        for name, (digits, least, most) in plot.CODES.items():
            units = np.arange(2 ** (digits + 1)) * 2.0 ** (least - digits)
            values = np.unique(np.concatenate([units * 2.0 ** i for i in range(40)]))
            values = values[values <= most]
            x = np.concatenate([most * 1.2 * r.random(500), 2.0 ** r.uniform(least - 6, 0, 500), values])
            nearest = values[np.abs(values - x[:, None]).argmin(1)]
            np.testing.assert_array_equal(plot.rounded(-x, name), -nearest)
            middle = (values[1:] + values[:-1]) / 2        # ties go to an even number of units
            found = plot.rounded(middle, name)
            unit = np.maximum(2.0 ** (np.floor(np.log2(np.maximum(found, units[1]))) - digits), units[1])
            self.assertEqual(set(found / unit % 2), {0})

            groups = np.exp(3 * r.normal(size=(50, 128))) * r.choice([-1, 1], (50, 128))
            k, ratio = plot.expansion(groups, name), 2 ** plot.log2_range(groups)
            self.assertTrue((ratio ** k <= most ** 2 / 2 * (1 + 1e-9)).all() and (ratio ** (k + 1 / 16) > most ** 2 / 2).all())
            read = plot.stored(groups, name + "+")
            half = units[1] / 2 / (2 / most)        # half of the smallest code, which is at least 2 / most
            self.assertTrue((np.abs(np.log(read / groups)).max(1) <= -np.log1p(-half) / k * 1.01).all())
            self.assertTrue((read != 0).all())
            self.assertEqual((plot.stored(groups, name) == 0).any(), name == "e4m3")

    def test_moments(self):
        """Errors of a checkpoint's moments, by the definition of an error. FP8 moments have lost what was rounded."""
        import numpy as np
        import plot_quantization as plot
        self.link("average")
        moments = plot.Moments(os.path.join(self.run_folder, "latest"))
        errors, (m, v) = moments.errors(), moments.pairs[0]
        self.assertEqual(errors["update"].shape, (4, 4, len(moments.pairs)))
        self.assertAlmostEqual(moments.eps, 1e-5 * (1 - 0.95 ** 3) ** 0.5)
        found, exact = plot.stored(v, "e4m3"), v
        self.assertAlmostEqual(errors["v"][0, 0], (((found - exact) ** 2).sum() / (exact ** 2).sum()) ** 0.5)
        exact = m / (np.sqrt(v) + moments.eps)
        found = plot.stored(m, "e5m2") / (np.sqrt(plot.stored(v, "e4m3+")) + moments.eps)
        self.assertAlmostEqual(errors["update"][2, 1, 0], (((found - exact) ** 2).sum() / (exact ** 2).sum()) ** 0.5)
        self.assertLess(plot.rms(errors["m"])[1], plot.rms(errors["m"])[0])         # the purpose of expansion
        os.unlink(os.path.join(self.run_folder, "latest"))
        self.link("full")
        with self.assertRaises(SystemExit) as caught:
            plot.Moments(os.path.join(self.run_folder, "latest"))
        self.assertIn("found no Adam moments of matrices in F32 or BF16", str(caught.exception))

    def test_seeds(self):
        """Two seeds: the differences 0.5 and 0.1 have the mean 0.3 and the standard error 0.2; 1 and 3 have the standard
        deviation sqrt 2."""
        import numpy as np
        import plot_loss
        runs = {"bf16-1": 1, "bf16-2": 3, "coat-1": 1.5, "coat-2": 3.1}
        for name, loss in runs.items():
            os.mkdir(os.path.join(self.top, name))
            with open(os.path.join(self.top, name, "metrics.jsonl"), "w", encoding="utf-8") as file:
                for step in range(1, 4 + (name == "coat-1")):       # only steps that all runs have count
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
        """All lines of the damaged step are void, and come again."""
        self.append([record(1), record(2), {"step": 2, "eval/val/CrossEntropyLoss": 4}])
        self.poll()
        os.truncate(os.path.join(self.run_folder, "metrics.jsonl"), len(as_lines([record(1), record(2)])))
        self.append([{"step": 2, "eval/val/CrossEntropyLoss": 5}])
        self.assertEqual(self.poll(), 2)
        self.assertEqual(self.seen, [record(1), record(2), {"step": 2, "eval/val/CrossEntropyLoss": 5}])

    def test_damaged_line(self):
        """A damaged line is skipped, because a run that continues leaves it in the file. A step that is not a number is damage,
        too."""
        damaged = b'{"step": 2, "train/Cr\n{"step": Infinity}\n{"step": "7"}\n\xff\n'
        self.append(as_lines([record(1)]) + damaged + as_lines([record(3)]))
        self.poll()
        self.assertEqual(self.seen, [record(1), record(3)])
        os.truncate(os.path.join(self.run_folder, "metrics.jsonl"), len(as_lines([record(1)])))
        self.append([record(2)])
        self.poll()
        self.assertEqual(self.seen, [record(1), record(2)])

    def test_random(self):
        """Whatever was appended, cut and torn between polls, the follower has seen what is in the file."""
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
