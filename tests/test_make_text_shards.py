#!/usr/bin/env python3
"""scripts/make_shards.py: texts become documents with rows of metadata. Also parts, processes, progress, errors."""
import contextlib, csv, gzip, io, os, random, sys, unittest
from unittest import mock

sys.dont_write_bytecode = True
from test_make_shards import MISSING, Folder, random_text

if not MISSING:
    import numpy as np
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    import make_shards
    import shards


class TextTest(Folder):
    def text(self, *arguments):
        tokenizer = os.path.join(self.models, "olmo-2", "tokenizer.json")
        return self.call(make_shards, "--tokenizer", tokenizer, "--processes", "1", *arguments)

    def read_text(self, folder, part=0):
        """Returns (ids, rows) of a part."""
        with gzip.open(os.path.join(folder, f"part-{part:05d}.csv.gz"), "rt", newline="") as file:
            return np.fromfile(os.path.join(folder, f"part-{part:05d}.npy"), "<u2").tolist(), list(csv.reader(file))

    def test_documents(self):
        lines = '{"text": " one "}\n\n{"text": "  "}\n{"text": "a<|endoftext|>", "id": "x,\\ny", "more": 1}\n'
        files = [self.write("a.jsonl", lines), self.write("b.md.gz", b"\xef\xbb\xbfhello\r\n  world\r\n"), self.write("c", "two\n"),
                 self.write("d.json.gz", [{"text": "é"}]), self.write("empty.txt", " \n"), self.write("e", "<|endoftext|>\n")]
        tokenizer = Tokenizer.from_file(os.path.join(self.models, "olmo-2", "tokenizer.json"))
        tokenizer.no_truncation()
        eos, size = tokenizer.token_to_id("<|endoftext|>"), tokenizer.get_vocab_size()
        for name in ("<|endoftext|>", str(eos)):
            output, printed = self.text("--eos", name, *files)
            with open(os.path.join(output, "part-00000.csv.gz"), "rb") as file:
                self.assertEqual(file.read(10)[4:8], bytes(4))      # gzip's field for the time
            ids, expected, rows = self.read_text(output)[0], [], []
            for text, *columns in (("one", "1", files[0], 1), ("a", "x, y", files[0], 4), ("hello\n  world", "b.md", files[1], 1),
                                   ("two", "c", files[2], 1), ("é", "1", files[3], 1)):
                begin = len(expected)
                expected += tokenizer.encode(text, add_special_tokens=False).ids + [eos]
                rows.append([str(column) for column in (begin, len(expected), *columns)])
            self.assertEqual(self.read_text(output), (expected, rows))
            self.assertIn(f"5 documents in 1 part: {len(ids)} tokens; mean {len(ids) / 5:.1f}, longest", printed)
            self.assertTrue(printed.endswith(f"model: {{vocab_size: {size}, embedding_size: 384, eos_token_id: {eos}}}\ndata:\n"
                                             f'  paths: ["{output}/part-*.npy"]\n  memmap_dtype: uint16\n'), printed)

    def test_capitals(self):
        """File name endings may be in capitals."""
        lines, text = [{"text": "one"}, {"text": "two"}], b"a\n"
        packed = [self.write("b.JSON.GZ", lines), self.write("c.TXT.GZ", text)]
        found, _ = self.text("--eos", "0", self.write("a.JSONL", lines), *packed)
        plain = [self.write(name, content) for name, content in (("a.jsonl", lines), ("b.json", lines), ("c.txt", text))]
        expected, _ = self.text("--eos", "0", *plain)
        self.assertEqual(self.read_text(found)[0], self.read_text(expected)[0])
        self.assertEqual([row[2:] for row in self.read_text(found)[1]][3:], [["2", packed[0], "2"], ["c.TXT", packed[1], "1"]])

    def test_special_tokens_in_texts(self):
        """Spelled-out special tokens stay text, whether or not the tokenizer calls eos special. Other added tokens stay
        tokens."""
        text = "a<|endoftext|>two <|eos|><b> <|endoftext|> two"
        tokenizer = Tokenizer.from_file(os.path.join(self.models, "olmo-2", "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.add_tokens(["<|eos|>", "<b>"])
        path = os.path.join(self.top, "tokenizer.json")
        tokenizer.save(path)
        added = {name: tokenizer.token_to_id(name) for name in ("<|endoftext|>", "<|eos|>", "<b>")}
        files = [self.write("a.txt", text), self.write("b.jsonl", [{"text": text}])]
        for eos, inside in (("<|endoftext|>", ["<|eos|>", "<b>"]), ("<|eos|>", ["<b>"])):
            for processes in "12":
                output, _ = self.text("--tokenizer", path, "--eos", eos, "--processes", processes, *files)
                ids, rows = self.read_text(output)
                self.assertEqual([int(row[1]) for row in rows], [i + 1 for i, one in enumerate(ids) if one == added[eos]])
                document = ids[:int(rows[0][1]) - 1]
                self.assertEqual([one for one in document if one in added.values()], [added[name] for name in inside])
                self.assertEqual(tokenizer.decode(document, skip_special_tokens=False), text)
                self.assertEqual(ids, 2 * (document + [added[eos]]))

    def test_old_tokenizers(self):
        old = mock.Mock(spec=["encode"])
        with mock.patch.object(shards, "load_tokenizer", return_value=mock.Mock(tokenizer=old)):
            self.assert_bad(self.text, ("--eos", "0", self.write("a.txt", "x")), "pip install --upgrade tokenizers")

    def test_processes_and_validation(self):
        r = random.Random(2)
        files = [self.write("a.jsonl", [{"text": random_text(r)} for _ in range(1500)]), self.write("b.txt", "the model")]
        more = "--eos", "0", "--max-tokens", "8000", "--val-fraction", "0.05"
        outputs = [self.text(*files, *more, "--processes", n) for n in "13"]
        self.assertEqual(*(self.digest(output) for output, _ in outputs))
        output, printed = outputs[0]
        expected = {"part-00000.npy", "part-00001.npy", "part-00001.csv.gz", "val/part-00000.npy"}
        self.assertTrue(expected <= self.digest(output).keys())
        self.assertIn(f'evaluators:\n  - label: val\n    data:\n      paths: ["{output}/val/part-*.npy"]\n', printed)

    def test_progress(self):
        class Terminal(io.StringIO):
            isatty = lambda self: True
        file = self.write("a.txt", "x" * 50)
        for stream, expected in ((io.StringIO(), ""), (Terminal(), f"\r[{'#' * 15:30}]  50%  7 words, 0 s left\x1b[K\r\x1b[K")):
            with contextlib.redirect_stderr(stream), shards.progress_of([file]) as progress:
                progress.shown -= 1
                progress.show(25, "7 words")
                progress.show(26, "8 words")        # too soon after the previous one
            self.assertEqual(stream.getvalue(), expected)

    def test_wide(self):
        """With more than 65,536 ids, each id takes 4 bytes."""
        path = os.path.join(self.top, "tokenizer.json")
        words = WordLevel({f"w{i}": i for i in range(65537)}, unk_token="w0")
        Tokenizer(words).save(path)
        output, printed = self.text("--tokenizer", path, "--eos", "w7", self.write("a.txt", "w65536"))
        self.assertEqual(np.fromfile(os.path.join(output, "part-00000.npy"), "<u4").tolist(), [65536, 7])
        self.assertIn("memmap_dtype: uint32", printed)

    def test_bad_texts(self):
        good = self.write("good.txt", "x")
        for name, content, *words in (("a.txt", b"x\xff", "a.txt: ", "UTF-8"), ("a.bin", "x\0", "byte 1 is 0"),
                                      ("a.jsonl", '{"text": "x"}\n{"text": 1}', "a.jsonl:2: ", "a string"),
                                      ("a.json", "{\n}", "a.json:1: ", "a line of JSON"),
                                      ("a.json", "[" * 100000, "a.json:1: nested too deeply", "a line of JSON")):
            self.assert_bad(self.text, ("--eos", "0", good, self.write(name, content)), *words)
        self.assert_bad(self.text, ("--eos", "0", self.write("a.txt", " ")), "no document with text")
        for eos in ("<|no|>", "400", "-1", "99999999999"):
            self.assert_bad(self.text, (f"--eos={eos}", good), f"--eos {eos} is not a token", "an id below")
        self.assert_bad(self.text, ("--eos", "0", "--tokenizer", good, good), "good.txt: ", "expected a tokenizer.json")


if __name__ == "__main__":
    unittest.main()
