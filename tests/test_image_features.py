#!/usr/bin/env python3
"""scripts/make_image_features.py: how pictures are read, which pictures are skipped, and the refusal of features with other
settings."""
import hashlib, io, json, os, shutil, struct, sys, tempfile, unittest, zlib
from unittest import mock

sys.dont_write_bytecode = True
from test_make_images import COLS, IMAGE, MISSING, ROWS, TEXT, TEXTS, Images, parts, talk

if not MISSING:
    import numpy as np
    from PIL import Image

    import errors, image_settings, make_image_features, pictures

try:
    from transformers.image_utils import load_image
except ImportError:
    load_image = None


@unittest.skipIf(MISSING, MISSING)
class FeaturesTest(Images):
    # ---- pictures ----------------------------------------------------------------------------------------------------------

    def test_turned(self):
        """EXIF: the sides of the picture at which its first row and its first column are."""
        height, width = 16, 24
        upright = np.zeros((height, width, 3), np.uint8)
        upright[:8, :8], upright[:8, 16:], upright[8:, :8] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
        y, x = np.mgrid[:height, :width]
        stored = {1: (y, x), 2: (y, width - 1 - x), 3: (height - 1 - y, width - 1 - x), 4: (height - 1 - y, x),
                  5: (x, y), 6: (width - 1 - x, y), 7: (width - 1 - x, height - 1 - y), 8: (x, height - 1 - y)}
        for orientation, (row, column) in stored.items():
            pixels = np.zeros((width, height, 3) if orientation > 4 else (height, width, 3), np.uint8)
            pixels[row, column] = upright
            exif = Image.Exif()
            exif[0x0112] = orientation
            for kind, options in (("png", {}), ("tiff", {}), ("webp", {"lossless": True}),
                                  ("jpeg", {"quality": 100, "subsampling": 0})):
                path = os.path.join(self.root, f"turned-{orientation}.{kind}")
                Image.fromarray(pixels).save(path, exif=exif, **options)
                found = np.asarray(pictures.load(path), int)
                self.assertEqual(found.shape, upright.shape)
                self.assertLessEqual(abs(found - upright).max(), 4 if kind == "jpeg" else 0, path)

    def test_modes(self):
        """The pixels of pictures of each mode, by hand. Pictures of all formats are compared with transformers' own loading, if
        it is installed."""
        ramp, wide = np.arange(240, dtype=np.uint8).reshape(12, 20), np.linspace(0, 65535, 240).astype("<u2").reshape(12, 20)
        gray, colour = Image.fromarray(ramp), Image.fromarray(np.stack([ramp, ramp.T.reshape(12, 20), 255 - ramp], 2))
        see_through = colour.copy()
        see_through.putalpha(gray)
        palette = Image.fromarray(ramp % 4)
        palette.putpalette([9, 8, 7, 60, 50, 40, 255, 0, 1, 2, 3, 4])
        colours = np.array([[9, 8, 7], [60, 50, 40], [255, 0, 1], [2, 3, 4]], np.uint8)[ramp % 4]
        thrice = lambda x: np.stack([x] * 3, 2)
        by_hand = {"L": (gray, {}, thrice(ramp)), "LA": (Image.merge("LA", [gray, gray]), {}, thrice(ramp)),
                   "1": (Image.fromarray(ramp > 99), {}, thrice(np.where(ramp > 99, 255, 0))),
                   "RGB": (colour, {}, np.asarray(colour)), "RGBA": (see_through, {}, np.asarray(colour)),
                   "P": (palette, {}, colours), "P-clear": (palette, {"transparency": 2}, colours),
                   "I;16": (Image.fromarray(wide), {}, thrice(np.minimum(wide, 255)))}
        for name, (picture, options, expected) in by_hand.items():
            path = os.path.join(self.root, f"mode-{name}.png")
            picture.save(path, **options)
            np.testing.assert_array_equal(np.asarray(pictures.load(path)), expected, name)
        others = {mode: colour.convert(mode) for mode in ("CMYK", "YCbCr", "HSV", "RGBX")}
        others |= {"La": by_hand["LA"][0].convert("La"), "LAB": Image.frombytes("LAB", (20, 12), colour.tobytes()),
                   "PA": palette.convert("PA"), "I": Image.fromarray(wide.astype(np.int32) - 9),
                   "F": Image.fromarray(wide.astype(np.float32) / 99 - 1),
                   "I;16B": Image.frombytes("I;16B", (20, 12), wide.astype(">u2").tobytes())}
        compared = 0
        for mode, picture in {**others, **{mode: one[0] for mode, one in by_hand.items()}}.items():
            for kind in ("png", "jpeg", "webp", "tiff", "gif", "bmp", "ppm", "tga", "im", "jp2", "ico"):
                for orientation in range(1, 9):
                    path = os.path.join(self.root, f"{mode}-{orientation}.{kind}")
                    exif, more = Image.Exif(), {"append_images": [colour.convert("P")], "save_all": True} if kind == "gif" else {}
                    exif[0x0112] = orientation
                    try:
                        picture.save(path, exif=exif, **more)
                        with Image.open(path) as again:      # some versions write files that they cannot read
                            again.load()
                    except (OSError, ValueError, KeyError):      # a format without this mode
                        continue
                    found = pictures.load(path)
                    if load_image:
                        expected = load_image(path)
                        self.assertEqual((found.size, found.mode), (expected.size, "RGB"), path)
                        self.assertEqual(found.tobytes(), expected.tobytes(), path)
                    compared += 1
        self.assertGreater(compared, 500)

    def test_deep(self):
        """A note tells of gray values above 255, once per run."""
        Image.fromarray(np.full((4, 4), 300, np.uint16)).save(os.path.join(self.root, "deep.png"))
        Image.fromarray(np.full((4, 4), 255, np.uint16)).save(os.path.join(self.root, "flat.png"))
        chats = self.write("x.jsonl", [talk(IMAGE, image=name) for name in ("deep.png", "flat.png", "a.png")])
        with mock.patch.object(sys, "stderr", io.StringIO()) as told:
            self.features(chats)
        self.assertRegex(told.getvalue(), r"NOTE: pictures with more than 8 bits.*: 1, the first .*deep\.png")

    def broken(self):
        """Pictures that Pillow refuses with different kinds of errors."""
        chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        with open(os.path.join(self.root, "a.png"), "rb") as file:
            png = file.read()
        body = png.index(b"IDAT")
        header = lambda width, height: chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
        bomb = png[:8] + header(20000, 20000) + chunk(b"IDAT", zlib.compress(bytes(2501 * 20000))) + chunk(b"IEND", b"")
        some = {"bomb.png": bomb, "profile.png": png[:33] + chunk(b"iCCP", b"x\0\0" + zlib.compress(bytes(3 << 20))) + png[33:],
                "text.png": png[:33] + chunk(b"zTXt", b"Comment\0\0" + zlib.compress(b"a" * (3 << 20))) + png[33:],
                "chunk.png": png[:body] + b"\0\1\2\3" + png[body + 4:], "cut.png": png[:body + 8], "page.jpg": b"<html>404</html>",
                "empty.gif": b""}
        for name, data in some.items():
            with open(os.path.join(self.root, name), "wb") as file:
                file.write(data)
        return list(some)

    def test_broken(self):
        """Whatever Pillow raises, the message is one line that names the conversation and the picture."""
        for name in [*self.broken(), "none.png", "a.png/b.png", "half\ud83d.png"]:
            chats = self.write("x.jsonl", [talk(IMAGE, image="a.png"), talk(IMAGE, image=name)])
            self.assert_bad(self.features, (chats,), chats + ":2", name, "expected")

    def test_skip_bad(self):
        names = [*self.broken(), "none.png", "new\nline.png"]
        chats = self.write("x.jsonl", [talk(IMAGE, image=name) for name in ["a.png", *names, "b.png", "empty.gif", 3]])
        with mock.patch.object(sys, "stdout", io.StringIO()) as told:
            output, found = self.features(chats, "--skip-bad", "--per-file", "1")
        self.assertIn(f"left out, as --skip-bad asks: {len(names) + 1}\n", told.getvalue())
        self.assertEqual(found["names"], {"a.png": 0, "b.png": 1})
        self.assertEqual([count for _, count in found["files"]], [1, 1])
        left = os.path.join(output, "left-out.txt")
        with open(left) as file:
            self.assertEqual(file.read().splitlines(), [name.replace("\n", "\\n") for name in names])
        self.features(self.write("y.jsonl", [talk(IMAGE, image="b.png")]), "--skip-bad")
        self.assertFalse(os.path.exists(left))
        cut, other = self.write("z.jsonl", [talk(IMAGE, image="cut.png")]), os.path.join(self.top, "other")
        self.assert_bad(lambda: self.features(cut, "--skip-bad", output=other), (), "none of 1 pictures can be read", "cut.png")
        model, _ = self.seeing(TEXTS)
        printed = self.chat(model, "--images", output, "--skip-bad", chats)[1]
        self.assertIn(f"left out, as --skip-bad asks: {len(names) + 2}", printed)

    def test_long_names(self):
        """An error names the conversation and the start of the picture's name, however long the name is."""
        model, _ = self.seeing(TEXTS)
        features, _ = self.features(self.write("good.jsonl", [talk(IMAGE + "q", image="a.png")]))
        url = "data:image/png;base64," + "A" * 200000
        for name in (url, "https://host/a.png", "x" * 5000, "a\0b"):
            chats = self.write("x.jsonl", [parts({"type": "image_url", "image_url": {"url": name}}, TEXT)])
            for call, arguments in ((self.features, (chats,)), (self.chat, (model, "--images", features, chats))):
                with self.assertRaises(errors.Bad) as caught:
                    call(*arguments)
                self.assertLess(len(str(caught.exception)), 400)
                self.assertIn(f"{chats}:1: a picture is {json.dumps(name)[:60]}", str(caught.exception))
        chats = self.write("x.jsonl", [talk(IMAGE, image="x" * 4000)])
        self.assert_bad(self.chat, (model, "--images", features, chats), chats + ":1: the picture 'xxx", "is not in")
        message = str(errors.Bad("a" * 5000 + "; expected less"))
        self.assertTrue(len(message) < 1100 and message.endswith("; expected less"))

    # ---- settings ----------------------------------------------------------------------------------------------------------

    def model_of(self, config=None, processor=None, name="llava"):
        """Makes a folder with these settings, and a stand-in for its tower: the pixels of pictures."""
        folder = os.path.join(self.top, name)
        os.makedirs(folder, exist_ok=True)
        vision = {"model_type": "clip_vision_model", "hidden_act": "gelu"}
        self.dump({"model_type": "llava", "vision_config": vision, "image_token_index": 0, **(config or {})}, folder, "config.json")
        raw = {"size": 336, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "CLIPImageProcessor", **(processor or {})}
        self.dump(raw, folder, "preprocessor_config.json")
        return folder

    def compute(self, folder, chats, output, backend="pil"):
        defaults = {**dict.fromkeys(image_settings.TOWER, 1), "model_type": "clip_vision_model"}

        class Processor:
            def __init__(self, **given):
                self.backend = backend
                self.given = {"size": {"shortest_edge": 224}, "do_rescale": True, "image_mean": [0, 0, 0], **given}

            def to_dict(self):
                return self.given

        class Stand(make_image_features.Pixels):
            def __init__(self, folder):
                super().__init__(2, 4)
                found = image_settings.check(folder)
                raw = dict(found["image_processor"])
                if isinstance(raw.get("size"), int):
                    raw["size"] = {"shortest_edge": raw["size"]}
                tower = type("Tower", (), defaults)()
                vars(tower).update(found["vision_config"])
                self.settings = image_settings.of_model(found, tower, Processor(**raw))

        with mock.patch.object(make_image_features, "Tower", Stand):
            make_image_features.main(["--model", folder, "--root", self.root, "--output", output, "--per-file", "1", chats])
        with open(os.path.join(output, "features.json")) as file:
            return json.load(file)

    def test_settings(self):
        """Both scripts refuse features with other settings. Equal settings may be written in different ways."""
        chats, output = self.write("x.jsonl", [talk(IMAGE, image="a.png")]), os.path.join(self.top, "features")
        made = self.compute(self.model_of(), chats, output)
        for config, processor in (({}, {}), ({"vision_feature_layer": -2}, {"size": {"shortest_edge": 336}}),
                                  ({"vision_feature_layer": None}, {"do_rescale": True, "processor_class": "x"})):
            folder = self.model_of(config, processor)
            self.assertEqual(self.compute(folder, chats, output), made)
            self.assertIsNone(image_settings.differing(made["settings"], folder))
        no_tower = self.model_of({"vision_config": None, "vision_feature_layer": -1})
        self.assertIsNone(image_settings.differing(made["settings"], no_tower))
        for config, processor, *words in (({"vision_feature_layer": -1}, {}, "vision_feature_layer (config.json) is -1", "with -2"),
                                          ({"vision_feature_select_strategy": "full"}, {}, "vision_feature_select_strategy"),
                                          ({"vision_config": {"hidden_act": "quick_gelu"}}, {}, "hidden_act"),
                                          ({"vision_config": {"hidden_act": "gelu", "layer_norm_eps": 2}}, {}, "layer_norm_eps"),
                                          ({}, {"size": 224}, "size (preprocessor_config.json) is 224"),
                                          ({}, {"image_mean": [0.5, 0.5, 0.4]}, "image_mean"),
                                          ({}, {"do_rescale": False}, "do_rescale"),
                                          ({}, {"image_mean": None}, "image_mean"), ({}, {"do_pad": True}, "do_pad"),
                                          ({}, {"resample": 2}, "resample"), ({}, {"crop_size": 300}, "crop_size"),
                                          ({}, {"image_std": [1, 1, 1]}, "image_std"),
                                          ({}, {"rescale_factor": 1.5}, "rescale_factor"),
                                          ({}, {"image_processor_type": "SiglipImageProcessor"}, "image_processor_type")):
            folder = self.model_of(config, processor)
            self.assert_bad(self.compute, (folder, chats, output), *words, "make the features again")
            self.assertNotEqual(self.compute(folder, chats, tempfile.mkdtemp(dir=self.top))["id"], made["id"])
            model, _ = self.seeing(TEXTS)
            for name in ("config.json", "preprocessor_config.json"):
                shutil.copy(os.path.join(folder, name), model)
            self.assert_bad(self.chat, (model, "--images", output, chats), words[0], "make the features again")
        self.assert_bad(self.compute, (self.model_of(), chats, output, "torchvision"), "'torchvision'", "make the features again")

    def test_settings_nested(self):
        """transformers 5 reads the image processor from processor_config.json, if this file exists."""
        chats, folder = self.write("x.jsonl", [talk(IMAGE, image="a.png")]), self.model_of()
        made = self.compute(folder, chats, os.path.join(self.top, "features"))
        self.dump({"image_processor": {"size": 224}}, folder, "processor_config.json")
        self.assertIn("size", image_settings.differing(made["settings"], folder))
        own = image_settings.read_json(folder + "/preprocessor_config.json")
        self.dump({"image_processor": own}, folder, "processor_config.json")
        os.remove(folder + "/preprocessor_config.json")
        self.assertIsNone(image_settings.differing(made["settings"], folder))
        os.remove(folder + "/processor_config.json")
        self.assertIsNone(image_settings.differing(made["settings"], folder))       # not said

    def test_old(self):
        """Features that lack their settings are accepted if they are unchanged. Afterwards they have the settings, and the same
        id."""
        chats, output = self.write("x.jsonl", [talk(IMAGE, images=["a.png", "b.png"])]), os.path.join(self.top, "features")
        now = self.compute(self.model_of(), chats, output)

        def grow_old():
            old = {key: value for key, value in now.items() if key not in ("settings", "reading")}
            old["id"] = "000000000000000a"
            self.dump(old, output, "features.json")

        grow_old()
        found = self.compute(self.model_of(), chats, output)
        self.assertEqual((found["settings"], found["files"], found["names"]), (now["settings"], now["files"], now["names"]))
        self.assertEqual(found["id"], hashlib.sha256(json.dumps(
            [now[key] for key in ("tower", "dtype", "rows", "cols", "images")]).encode()).hexdigest()[:16])
        self.assertEqual(self.compute(self.model_of(), chats, output), found)
        self.assert_bad(self.compute, (self.model_of({"vision_feature_layer": -1}), chats, output), "vision_feature_layer")

        picture, exif = Image.open(os.path.join(self.root, "b.png")), Image.Exif()
        grow_old()
        with open(os.path.join(output, now["files"][1][0]), "r+b") as file:        # one value, changed by two steps of BF16
            values = np.frombuffer(file.read(), "<u2").copy()
            values[0] += 2
            file.seek(0)
            file.write(values.tobytes())
        self.assert_bad(self.compute, (self.model_of(), chats, output), "b.png are not those that this model gives")
        os.rename(os.path.join(self.root, "b.png"), os.path.join(self.root, "moved.png"))
        other = self.write("y.jsonl", [talk(IMAGE, image="a.png")])
        self.assert_bad(self.compute, (self.model_of(), other, output), "is not in", "again")
        exif[0x0112] = 6
        picture.save(os.path.join(self.root, "b.png"), exif=exif)
        shutil.rmtree(output)
        now = self.compute(self.model_of(), chats, output)
        grow_old()
        self.assert_bad(self.compute, (self.model_of(), chats, output), "b.png is now rotated as its EXIF says", "again")

    def test_tower_errors(self):
        """What ./train refuses, and models without a tower, are errors before anything is computed."""
        chats = self.write("x.jsonl", [talk(IMAGE, image="a.png")])
        for config, word in (({"vision_feature_layer": [-2, -1]}, "config.json: vision_feature_layer is a list"),
                             ({"vision_feature_layer": "last"}, 'vision_feature_layer is "last"; expected a number'),
                             ({"vision_feature_layer": True}, "vision_feature_layer is true"),
                             ({"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy is cls"),
                             ({"vision_config": {"model_type": "pixtral"}}, "vision_config is of model_type pixtral"),
                             ({"model_type": "llama"}, "its model_type is llama")):
            with self.assertRaisesRegex(make_image_features.Bad, word):
                make_image_features.main(["--model", self.model_of(config), "--root", self.root, "--output", self.top, chats])

    def test_processor(self):
        """With the settings of transformers' own image processors, if installed: the written settings equal those that were
        read."""
        if not load_image:
            return
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
        from transformers import CLIPVisionConfig, SiglipVisionConfig
        for kind, tower, given in ((CLIPImageProcessorPil, CLIPVisionConfig, {"size": 28, "crop_size": 28}),
                                   (SiglipImageProcessorPil, SiglipVisionConfig, {"size": {"height": 28, "width": 28}})):
            folder = self.model_of()
            self.dump(given, folder, "preprocessor_config.json")
            settings = image_settings.of_model(image_settings.read(folder), tower(), kind(**given))
            self.dump({"model_type": "llava", "vision_config": {"model_type": tower.model_type}}, folder, "config.json")
            self.assertIsNone(image_settings.differing(settings, folder))
            kind(**given).save_pretrained(folder)
            raw = {**image_settings.read_json(folder + "/preprocessor_config.json"), "image_processor_type": None}
            self.dump(raw, folder, "preprocessor_config.json")
            self.assertIsNone(image_settings.differing(settings, folder))
            for key in ("resample", "rescale_factor", "do_normalize", "image_mean", "size"):
                self.dump({**raw, key: 7}, folder, "preprocessor_config.json")
                self.assertIn(key, image_settings.differing(settings, folder))


if __name__ == "__main__":
    unittest.main()
