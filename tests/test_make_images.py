#!/usr/bin/env python3
"""scripts/make_image_features.py --pixels, make_chat_shards.py --images and make_llava.py: features of pictures, tokens and image
indexes of conversations, folders of two models, and errors."""
import json, os, shutil, struct, sys, unittest
from unittest import mock

sys.dont_write_bytecode = True
from test_make_shards import MISSING, TOP, Folder

try:
    from PIL import Image
except ImportError as problem:
    MISSING = MISSING or f"{problem}: pip install pillow"

if not MISSING:
    import numpy as np
    from tokenizers import Tokenizer

    import make_chat_shards, make_image_features, make_llava, model_folder

IMAGE, END = "<image>", "<|im_end|>"
TEXTS = "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '<|im_end|>' }}{% endfor %}" \
        "{{ '[assistant]' if add_generation_prompt }}"
# as in LLaVA-1.5: images first, then texts
PARTS = "{% for m in messages %}{{ '[' + m.role + ']' }}" \
        "{% for c in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}" \
        "{% for c in m['content'] | selectattr('type', 'equalto', 'text') %}{{ c['text'] }}{% endfor %}" \
        "{{ '<|im_end|>' }}{% endfor %}" \
        "{{ '[assistant]' if add_generation_prompt }}"
ROWS, COLS = 4, 12          # of --pixels 2 --size 4


def talk(question, answer="a", **more):
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], **more}


def parts(*content, **more):
    return {"messages": [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "a"}], **more}


PART, TEXT = {"type": "image"}, {"type": "text", "text": "What?"}


class Images(Folder):
    """Pictures, their features, and the folder of a model with images."""

    def setUp(self):
        super().setUp()
        self.root = os.path.join(self.top, "pictures")
        os.makedirs(self.root)
        for name, colour in (("a.png", (255, 0, 0)), ("b.png", (0, 255, 127)), ("same.png", (255, 0, 0))):
            picture = Image.new("RGB", (4, 4), colour)
            picture.putpixel((1, 0), (0, 0, 255))
            picture.save(os.path.join(self.root, name))

    def features(self, chats, *more, output=None):
        output = output or os.path.join(self.top, "features")
        make_image_features.main(["--pixels", "2", "--size", "4", "--root", self.root, "--output", output, *more, chats])
        with open(os.path.join(output, "features.json")) as file:
            return output, json.load(file)

    def seeing(self, template):
        model = self.model(template, [END, IMAGE])
        token = Tokenizer.from_file(os.path.join(model, "tokenizer.json")).token_to_id(IMAGE)
        self.dump({"model_type": "llava", "image_token_index": token, "text_config": {}}, model, "config.json")
        return model, token


@unittest.skipIf(MISSING, MISSING)
class ImagesTest(Images):
    def index(self, output):
        with open(os.path.join(output, "images_part_0000.npy"), "rb") as file:
            data = file.read()
        return struct.unpack("<Q", data[:8])[0], list(struct.unpack(f"<{len(data) // 4 - 2}I", data[8:]))

    def test_pixels(self):
        """Rows are patches, values are colours from -1 to 1. Equal pictures are stored once. A second run computes nothing
        again."""
        chats = self.write("x.jsonl", [talk(IMAGE + "q", image="a.png"), talk("q" + IMAGE * 2, images=["same.png", "b.png"])])
        output, found = self.features(chats, "--f32")
        self.assertEqual((found["rows"], found["cols"], found["files"]), (ROWS, COLS, [["features-0000.f32", 2]]))
        self.assertEqual(found["names"], {"a.png": 0, "same.png": 0, "b.png": 1})
        x = np.fromfile(os.path.join(output, "features-0000.f32"), "<f4").reshape(2, ROWS, COLS)
        red, green, blue = [1, -1, -1], [-1, 1, 127 / 127.5 - 1], [-1, -1, 1]
        np.testing.assert_allclose(x[0, 0], [*red, *blue, *red, *red], atol=1e-6)
        np.testing.assert_allclose(x[0, 1:], [red * 4] * 3, atol=1e-6)
        np.testing.assert_allclose(x[1, 3], green * 4, atol=1e-6)
        before = os.stat(os.path.join(output, "features-0000.f32")).st_mtime_ns
        _, again = self.features(chats, "--f32")
        self.assertEqual(again, found)
        self.assertEqual(os.stat(os.path.join(output, "features-0000.f32")).st_mtime_ns, before)

    def test_resumed(self):
        """Features are written one file at a time. A run that continues after the first file gives the same files as an
        uninterrupted run."""
        chats = self.write("x.jsonl", [talk(IMAGE + "q", image=name) for name in ("a.png", "b.png")])
        whole, expected = self.features(chats, "--per-file", "1", output=os.path.join(self.top, "whole"))
        torn = self.write("y.jsonl", [talk(IMAGE + "q", image=name) for name in ("a.png", "none.png")])
        self.assert_bad(self.features, (torn, "--per-file", "1"), torn + ":2", "none.png: No such file")
        output, found = self.features(chats, "--per-file", "1")
        self.assertEqual(found, expected)
        self.assertEqual(len(found["files"]), 2)
        for name, _ in found["files"]:
            with open(os.path.join(output, name), "rb") as one, open(os.path.join(whole, name), "rb") as other:
                self.assertEqual(one.read(), other.read())

    def test_bfloat16(self):
        x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, -0.1, 3e38, 0], np.float32)
        wide = make_image_features.bfloat16(x).astype(np.uint32) << 16
        np.testing.assert_array_equal(wide.view(np.float32)[:3], [1, 1, 1 + 2**-6])          # rounded to nearest, ties to even
        np.testing.assert_allclose(wide.view(np.float32), x, rtol=2**-8)

    def test_sample(self):
        """The hash of a tensor of a tower; tests/test_llava.c has those of whole towers."""
        sample = lambda name, count: make_image_features.sample_of(name, np.arange(count, dtype=np.float32))
        self.assertEqual(sample("a.weight", 600), 0x739a1931401f531f)
        self.assertEqual(len({sample("a.weight", 600), sample("b.weight", 600), sample("a.weight", 601), sample("a.weight", 3)}), 4)

    def test_shards(self):
        """Both forms of conversations, with a template for texts and a template for parts: one token for each row, labels only of
        answers."""
        lines = [talk(IMAGE + "\nWhat?", image="b.png"), talk("Why?"), parts(PART, TEXT, images=["a.png"]),
                 parts({"type": "image", "image": "b.png"}, {"type": "image_url", "image_url": {"url": "a.png"}}, TEXT)]
        chats = self.write("x.jsonl", lines)
        features, found = self.features(chats)
        for template in (TEXTS, PARTS):
            model, token = self.seeing(template)
            output, printed = self.chat(model, "--images", features, chats)
            ids, mask, rows = self.read(output)
            shown = [found["names"][name] for name in ("b.png", "a.png", "b.png", "a.png")]
            self.assertEqual(self.index(output), (int(found["id"], 16), shown))
            self.assertEqual([int((ids[a:b] == token).sum()) for a, b in rows], [ROWS, 0, ROWS, 2 * ROWS])
            self.assertFalse(mask[ids == token].any())
            self.assertEqual(self.learned(model, output), ["a" + END] * 4)
            self.assertIn("4 images of 4 tokens", printed)
            tokenizer = Tokenizer.from_file(model + "/tokenizer.json")
            text = tokenizer.decode(ids[rows[0][0]:rows[0][1]].tolist(), skip_special_tokens=False)
            self.assertEqual(text.replace(" ", ""), f"[user]{IMAGE * ROWS}\nWhat?{END}[assistant]a{END}")
            with open(os.path.join(output, "fine-tune.yaml")) as file:
                said = file.read()
            self.assertIn("image_paths: [", said)
            self.assertIn(f'image_features: "{features}"', said)

    def test_errors(self):
        good = self.write("good.jsonl", [talk(IMAGE + "q", image="a.png")])
        features, _ = self.features(good)
        model, _ = self.seeing(TEXTS)
        for line, *words in ((talk(IMAGE + "q"), "1 times <image> in the messages, and 0 pictures"),
                             (talk(IMAGE * 2 + "q", image="a.png"), "2 times <image> in the messages, and 1 pictures"),
                             (talk("q", image="a.png"), "0 times <image> in the messages, and 1 pictures"),
                             (talk(IMAGE + "q", IMAGE, images=["a.png", "a.png"]), "message 2, an answer, has <image>"),
                             (talk(IMAGE + "q", image="c.png"), "the picture 'c.png' is not in"),
                             (talk(IMAGE + "q", image=3), "a picture is 3"),
                             (parts(PART, {"type": "image", "path": "a.png"}, TEXT), "some pictures have their names in the"),
                             (parts({"type": "video"}, PART), 'a part is {"type": "video"}')):
            path = self.write("bad.jsonl", [line])
            self.assert_bad(self.chat, (model, "--images", features, path), path + ":1", *words)
        plain = self.model(TEXTS, [END])
        self.dump({"vocab_size": 300}, plain, "config.json")
        self.assert_bad(self.chat, (plain, "--images", features, good), "no image_token_index")
        self.assert_bad(self.features, (self.write("none.jsonl", [talk("q")]),), "no conversation names a picture")
        with self.assertRaisesRegex(make_image_features.Bad, "its tower is pixels-2-4, but this is pixels-4-4"):
            make_image_features.main(["--pixels", "4", "--size", "4", "--root", self.root, "--output", features, good])
        with open(os.path.join(self.root, "torn.png"), "w") as file:
            file.write("no picture")
        self.assert_bad(self.features, (self.write("torn.jsonl", [talk(IMAGE, image="torn.png")]),), "torn.png")

    # ---- make_llava.py ---------------------------------------------------------------------------------------------------

    def text_model(self):
        folder = self.model(TEXTS, [END])
        for name in ("config.json", "model.safetensors", "generation_config.json"):
            shutil.copy(os.path.join(TOP, "tests", "golden", "llama", name), folder)
        return folder

    def join(self, *arguments):
        with mock.patch.object(sys, "argv", ["make_llava.py", *arguments]):
            make_llava.main()

    @staticmethod
    def values(one):
        return b"".join(one.pieces())

    def test_llava(self):
        """All tensors of both folders, byte for byte, rows of zeros for new tokens, and a projector with PyTorch's standard
        deviation."""
        text, tower = self.text_model(), os.path.join(TOP, "tests", "golden", "llava-qwen3-tied")
        output = os.path.join(self.top, "llava")
        self.join("--text", text, "--tower", tower, output)
        made = {name: one for file in make_llava.read_files(output) for name, one in file.items()}
        with open(os.path.join(output, "config.json")) as file:
            config = json.load(file)
        token = Tokenizer.from_file(os.path.join(output, "tokenizer.json")).token_to_id(IMAGE)
        self.assertEqual((config["image_token_index"], config["text_config"]["vocab_size"]), (token, token + 1))
        self.assertEqual((config["image_seq_length"], config["vision_feature_select_strategy"]), (4, "full"))
        for name, one in make_llava.read_files(text)[0].items():
            other = made.pop("language_model." + name)
            self.assertTrue(self.values(other).startswith(self.values(one)))
            if name.endswith(make_llava.ENDS):
                self.assertEqual(other.shape, [token + 1, one.shape[1]])
                self.assertFalse(any(self.values(other)[one.count:]))
            else:
                self.assertEqual((other.shape, self.values(other)), (one.shape, self.values(one)))
        for name, one in make_llava.read_files(tower)[0].items():
            if name.startswith("vision_tower."):
                self.assertEqual(self.values(made.pop(name)), self.values(one))
        self.assertEqual(sorted(made), [f"multi_modal_projector.linear_{i}.{kind}" for i in (1, 2) for kind in ("bias", "weight")])
        weights = np.frombuffer(self.values(made["multi_modal_projector.linear_1.weight"]), "<f4")
        self.assertEqual(made["multi_modal_projector.linear_1.weight"].shape, [32, 24])
        self.assertAlmostEqual(weights.std() * (3 * 24) ** 0.5, 1, delta=4 / (2 * 32 * 24) ** 0.5)     # 4 standard errors

    def test_llava_of_a_tower_alone(self):
        """transformers 5 saves a CLIP or SigLIP tower without the prefix vision_model, transformers 4 saves it with this
        prefix."""
        text, whole = self.text_model(), os.path.join(TOP, "tests", "golden", "llava-qwen3-tied")
        tensors = {name.removeprefix("vision_tower.vision_model."): one for name, one in make_llava.read_files(whole)[0].items()
                   if name.startswith("vision_tower.")}
        for prefix in ("", "vision_model."):
            tower, output = os.path.join(self.top, f"tower{prefix}"), os.path.join(self.top, f"llava{prefix}")
            os.mkdir(tower)
            self.dump(make_llava.tower_config(whole), tower, "config.json")
            model_folder.write_file(os.path.join(tower, "model.safetensors"), {prefix + name: one for name, one in tensors.items()})
            self.join("--text", text, "--tower", tower, output)
            made = {name: one for file in make_llava.read_files(output) for name, one in file.items() if name.startswith("vision_tower.")}
            self.assertEqual({name: self.values(one) for name, one in made.items()},
                             {"vision_tower.vision_model." + name: self.values(one) for name, one in tensors.items()})

    def test_llava_of_pixels(self):
        output = os.path.join(self.top, "llava")
        self.join("--text", self.text_model(), "--pixels", "2", "--size", "4", output)
        with open(os.path.join(output, "config.json")) as file:
            config = json.load(file)
        self.assertEqual((config["image_seq_length"], config["image_feature_size"]), (ROWS, COLS))
        self.assertNotIn("vision_config", config)
        chats = self.write("x.jsonl", [talk(IMAGE + "q", image="a.png")])
        features, _ = self.features(chats)
        self.assertIn("1 images of 4 tokens", self.chat(output, "--images", features, chats)[1])

    def test_llava_errors(self):
        text, olmo = self.text_model(), os.path.join(TOP, "tests", "golden", "olmo")
        for arguments, word in ((["--text", olmo, "--pixels", "2"], "its model_type is olmo; expected llama, mistral or qwen3"),
                                (["--text", text, "--pixels", "3", "--size", "4"], "--size=4: expected a multiple of --pixels=3"),
                                (["--text", text, "--tower", olmo], "has no vision_config"),
                                (["--text", text, "--pixels", "2", self.top], "exists already")):
            with self.assertRaisesRegex(make_llava.Bad, word):
                self.join(*arguments, *([] if arguments[-1] == self.top else [os.path.join(self.top, "none")]))


if __name__ == "__main__":
    unittest.main()
