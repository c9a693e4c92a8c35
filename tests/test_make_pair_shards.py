#!/usr/bin/env python3
"""scripts/make_pair_shards.py: every form of a pair gives the same two documents; labels of the last turn and of all turns; errors
of pairs whose prompts differ; what is cut, left out and counted."""
import os, unittest

import test_make_shards

if not test_make_shards.MISSING:
    import make_pair_shards
    from test_make_shards import np

user = lambda text: {"role": "user", "content": text}
answer = lambda text: {"role": "assistant", "content": text}
QUESTION, GOOD, WORSE = [user("two plus two?")], [answer("is four")], [answer("is seven")]


class PairTest(test_make_shards.Folder):
    def pairs(self, entries, *arguments, name="chatml"):
        file = self.write(f"pairs{self.outputs}.jsonl", entries)
        return self.call(make_pair_shards, "--model", os.path.join(self.models, name), "--processes", "1", file, *arguments)

    def texts(self, output, name="chatml"):
        return self.learned(os.path.join(self.models, name), output)

    def test_forms(self):
        forms = [
            {"prompt": QUESTION, "chosen": GOOD, "rejected": WORSE},
            {"prompt": "two plus two?", "chosen": "is four", "rejected": "is seven"},
            {"chosen": QUESTION + GOOD, "rejected": QUESTION + WORSE},
            {"prompt": "two plus two?", "chosen": QUESTION + GOOD, "rejected": QUESTION + WORSE, "score_chosen": 8.0,
             "score_rejected": 4.0},
            {"context": QUESTION, "completions": [{"rank": 1, "completion": WORSE}, {"rank": 0, "completion": GOOD}]},
        ]
        first = None
        for form in forms:
            output, printed = self.pairs([form])
            ids, mask, rows = self.read(output)
            self.assertEqual(len(rows), 2)
            self.assertEqual(rows[0][1], rows[1][0])
            self.assertEqual(self.texts(output), ["is four<|im_end|>", "is seven<|im_end|>"], form)
            self.assertNotIn("NOTE", printed)
            first = first or (ids.tolist(), mask.tolist(), rows)
            self.assertEqual((ids.tolist(), mask.tolist(), rows), first, form)

    def test_labels(self):
        before = [user("hello"), answer("thank you"), *QUESTION]
        pair = [{"chosen": before + GOOD, "rejected": before + WORSE}]
        self.assertEqual(self.texts(self.pairs(pair)[0]), ["is four<|im_end|>", "is seven<|im_end|>"])
        self.assertEqual(self.texts(self.pairs(pair, "--labels", "all")[0]),
                         ["thank you<|im_end|>", "is four<|im_end|>", "thank you<|im_end|>", "is seven<|im_end|>"])
        # turns of the assistant after the common prompt are part of the sides
        later = [{"chosen": QUESTION + GOOD + [user("thank you")] + WORSE, "rejected": QUESTION + WORSE}]
        self.assertEqual(self.texts(self.pairs(later)[0]), ["is four<|im_end|>", "is seven<|im_end|>", "is seven<|im_end|>"])

    def test_special_tokens(self):
        """The begin token of a template is written once on each side, and so is the end of an answer."""
        output, _ = self.pairs([{"prompt": QUESTION, "chosen": GOOD, "rejected": WORSE}], name="llama-3.1")
        ids, _, rows = self.read(output)
        self.assertEqual([int((ids[a:b] == ids[0]).sum()) for a, b in rows], [1, 1])
        self.assertEqual(self.texts(output, "llama-3.1"), ["is four<|eot_id|>", "is seven<|eot_id|>"])

    def test_errors(self):
        good = {"prompt": QUESTION, "chosen": GOOD, "rejected": WORSE}
        for bad, *words in (
                ({"chosen": QUESTION + GOOD, "rejected": [user("one plus one?")] + WORSE}, "prompts of the two sides differ"),
                ({"chosen": QUESTION + GOOD + [user("hello"), answer("x1")], "rejected": QUESTION + GOOD + [user("you"), answer("x1")]},
                 "prompts of the two sides differ", "message 3"),
                ({"chosen": "is four", "rejected": "is seven"}, 'no "prompt"', "texts"),
                ({"prompt": QUESTION, "chosen": GOOD}, "expected prompt, chosen and rejected"),
                ({"context": QUESTION, "completions": [{"rank": 0, "completion": GOOD}]}, "expected two objects"),
                ({"prompt": QUESTION, "completion": GOOD, "label": True}, "expected prompt, chosen and rejected"),
                ({"prompt": QUESTION, "chosen": GOOD, "rejected": [answer(None)]}, "content null"),
                ({"prompt": QUESTION, "chosen": None, "rejected": WORSE}, '"chosen" is '),
                ({"prompt": QUESTION, "chosen": 4, "rejected": WORSE}, '"chosen" is 4')):
            self.assert_bad(self.pairs, [[good, bad]], ":2", *words)
            self.assertIn("left out, as --skip-bad asks: 1", self.pairs([good, bad], "--skip-bad")[1])

    def test_notes(self):
        good = {"prompt": QUESTION, "chosen": GOOD, "rejected": WORSE}
        for entry, note, left in (
                ({"chosen": QUESTION + GOOD, "rejected": QUESTION + GOOD}, "sides are equal", 4),
                ({"prompt": QUESTION, "chosen": GOOD, "rejected": [answer("")]}, "an answer is empty", 4),
                ({**good, "score_chosen": 5, "score_rejected": 5}, "scores are equal", 4),
                ({"prompt": QUESTION, "chosen": GOOD, "rejected": WORSE + [user("hello")]}, "does not end with an answer", 2)):
            output, printed = self.pairs([good, entry])
            self.assertIn(f"{note}", printed)
            self.assertIn(": 1, the first in ", printed)
            self.assertEqual(len(self.read(output)[2]), left, note)

    def test_length(self):
        long = {"prompt": QUESTION, "chosen": [answer("four " * 40)], "rejected": WORSE}
        late = {"prompt": [user("hello " * 60)], "chosen": GOOD, "rejected": WORSE}
        output, printed = self.pairs([long, late], "--max-length", "50")
        ids, mask, rows = self.read(output)
        self.assertEqual([b - a for a, b in rows][0], 50)       # the start is kept
        self.assertEqual(len(rows), 2)
        self.assertIn("the rest is cut off: 2", printed)
        self.assertIn("no label within --max-length tokens: left out: 1", printed)

    def test_files(self):
        """The sides of a pair are in one file, and both are for training or both for validation."""
        entries = [{"prompt": [user(f"x1 = {i}")], "chosen": GOOD, "rejected": WORSE} for i in range(60)]
        output, _ = self.pairs(entries, "--max-tokens", "60", "--val-fraction", "0.3")
        parts, total = 0, 0
        for folder in (output, os.path.join(output, "val")):
            while os.path.exists(os.path.join(folder, f"token_ids_part_{parts:04d}.npy")):
                ids, mask, rows = self.read(folder, parts)
                self.assertEqual(len(rows) % 2, 0)
                self.assertTrue(len(ids) <= 60 or len(rows) == 2)
                for (a, b), (c, d) in zip(rows[::2], rows[1::2]):
                    same = min(b - a, d - c) - 8                # the prompt, and a part of the answers
                    self.assertTrue(np.array_equal(ids[a:a + same // 2], ids[c:c + same // 2]))
                parts, total = parts + 1, total + len(rows)
            parts = 0
        self.assertEqual(total, 120)
        with open(os.path.join(output, "preference.yaml")) as file:
            written = file.read()
        self.assertIn("preference: {loss: dpo_norm}", written)
        self.assertIn("  - label: val\n    type: preference\n", written)


if __name__ == "__main__":
    unittest.main()
