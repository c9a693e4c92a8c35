#!/usr/bin/env python3
"""Computes the features of pictures once, for training a model with images on token shards.

    python3 scripts/make_image_features.py --model LLAVA_FOLDER --root pictures --output features chats.jsonl
    python3 scripts/make_image_features.py --pixels 16 --size 128 --root pictures --output features chats.jsonl

The pictures are those that the files of conversations name (make_chat_shards.py --images reads the same forms); names are relative
to --root. Equal files are stored once. --model: the rows that the model's vision tower gives to its projector, by transformers on
the GPU, if there is one; needs torch, transformers and pillow. --pixels: no tower; the picture, scaled to --size, in square patches of
--pixels pixels a side, each a row of values from -1 to 1; needs pillow and numpy. OUTPUT gets features-NNNN.bf16 and features.json
(data/images.h). A program that was interrupted continues where it was; pictures that are there already are not computed again.
"""
import argparse, hashlib, json, math, os, sys

try:
    import numpy as np
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install numpy")

import chat_images, errors, inputs
from errors import Bad
from progress import Progress


# ---- towers ------------------------------------------------------------------------------------------------------------------

class Pixels:
    """Patches of the picture, row by row; in a patch the pixels, row by row, each with its three colours."""

    def __init__(self, patch, size):
        if size % patch:
            raise Bad(f"--size={size}: expected a multiple of --pixels={patch}")
        self.patch, self.size, self.name, self.sample = patch, size, f"pixels-{patch}-{size}", None

    def rows(self, pictures):
        side = self.size // self.patch
        for picture in pictures:
            scaled = picture.resize((self.size, self.size), resample=3)                     # bicubic
            x = np.asarray(scaled, np.float32) / 127.5 - 1
            x = x.reshape(side, self.patch, side, self.patch, 3).swapaxes(1, 2)
            yield x.reshape(side * side, -1)


def sample_of(name, values):
    """A hash of the name and of 768 values, as model/checkpoint/tower.h says."""
    flat = values.reshape(-1)
    n = min(256, flat.size)
    pages = [flat[first:first + n].astype("<f4").tobytes() for first in (0, (flat.size - n) // 2, flat.size - n)]
    sum_ = 0xcbf29ce484222325
    for byte in name.encode() + b"\0" + b"".join(pages):
        sum_ = (sum_ ^ byte) * 0x100000001b3 % 2**64
    return sum_


class Tower:
    """The vision tower of a LLaVA folder, without its language model."""

    def __init__(self, folder):
        try:
            import torch
            import transformers
            from safetensors import safe_open
        except ImportError as problem:
            raise Bad(f"--model: {problem}; expected torch, transformers and safetensors")
        config = transformers.AutoConfig.from_pretrained(folder)
        if config.model_type != "llava":
            raise Bad(f"{folder}: its model_type is {config.model_type}; expected llava")
        self.torch, self.layer = torch, config.vision_feature_layer
        self.drops = config.vision_feature_select_strategy == "default"
        self.processor = transformers.AutoImageProcessor.from_pretrained(folder)
        self.tower = transformers.AutoModel.from_config(config.vision_config).eval()
        self.name, self.sample = self.load(folder, safe_open)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tower.to(self.device)

    def load(self, folder, safe_open):
        """Reads the tower's weights; returns two hashes of them. Versions of transformers differ in the prefix vision_model."""
        want, found, digest, sample = self.tower.state_dict(), {}, hashlib.sha256(), 0
        for file in sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")):
            with safe_open(os.path.join(folder, file), "pt") as tensors:
                for name in sorted(key for key in tensors.keys() if key.startswith("vision_tower.")):
                    bare, tensor = name.removeprefix("vision_tower.").removeprefix("vision_model."), tensors.get_tensor(name)
                    sample += sample_of(bare, tensor.float().numpy()) if tensor.is_floating_point() else 0
                    key = next((key for key in (bare, "vision_model." + bare) if key in want), None)
                    if key:
                        found[key] = tensor.float()
                        digest.update(bare.encode() + found[key].numpy().tobytes())
        lacks = [key for key in want if key not in found and not key.endswith("position_ids")]
        if lacks:
            raise Bad(f"{folder}: its files have no {lacks[0]} of the vision tower; expected a LLaVA folder with its tower")
        self.tower.load_state_dict(found, strict=False)
        return digest.hexdigest(), f"{sample % 2**64:016x}"

    def rows(self, pictures):
        pixels = self.processor(images=pictures, return_tensors="pt")["pixel_values"].to(self.device)
        with self.torch.no_grad():
            rows = self.tower(pixels, output_hidden_states=True).hidden_states[self.layer]
        yield from (rows[:, 1:] if self.drops else rows).float().cpu().numpy()


# ---- files -------------------------------------------------------------------------------------------------------------------

def names_of(paths):
    """The names of all pictures in the conversations, in order."""
    found = {}
    for batch, _ in inputs.read_batches(paths, lambda path, first: True):
        for path, number, line in batch:
            _, names = chat_images.take(line, f"{path}:{number}", "<image>")
            found.update(dict.fromkeys(names))
    return list(found)


def open_picture(path):
    from PIL import Image
    try:
        with Image.open(path) as picture:
            return picture.convert("RGB")
    except OSError as problem:
        raise Bad(f"{path}: {problem}; expected a picture that Pillow reads")


def bfloat16(x):
    """Rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype("<u2")


def replace(path, data):
    with open(path + ".tmp", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


class Store:
    """OUTPUT: features.json, which grows by a file of features at a time. images: hashes of the pictures; names: {name: number}."""

    def __init__(self, folder, tower, sample, f32):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.path = folder, os.path.join(folder, "features.json")
        self.o = {"id": "", "rows": 0, "cols": 0, "dtype": "f32" if f32 else "bf16", "tower": tower, "files": [], "images": [],
                  "names": {}}
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as file:
                self.o = json.load(file)
        for key, value in (("tower", tower), ("dtype", "f32" if f32 else "bf16")):
            if self.o[key] != value:
                raise Bad(f"{self.path}: its {key} is {self.o[key][:64]}, but this is {value[:64]}; expected the same: give "
                          "another --output")
        self.o["tower_sample"] = sample
        self.known = {image: number for number, image in enumerate(self.o["images"])}

    def add(self, hashes, rows):
        """A file with the features of some pictures."""
        shape = (self.o["rows"] or rows[0].shape[0], self.o["cols"] or rows[0].shape[1])
        if any(one.shape != shape for one in rows):
            raise Bad(f"{self.folder}: pictures with other numbers of rows or values than {shape}; expected the same for all")
        name = f"features-{len(self.o['files']):04d}.{self.o['dtype']}"
        values = np.stack(rows)
        if not np.isfinite(values).all():
            raise Bad(f"{self.folder}: the tower gives values that are not finite; expected numbers")
        replace(os.path.join(self.folder, name), (values.astype("<f4") if self.o["dtype"] == "f32" else bfloat16(values)).tobytes())
        self.o["rows"], self.o["cols"] = map(int, shape)
        self.o["files"].append([name, len(rows)])
        for image in hashes:
            self.known[image] = len(self.o["images"])
            self.o["images"].append(image)
        self.write()

    def write(self):
        what = [self.o["tower"], self.o["dtype"], self.o["rows"], self.o["cols"], self.o["images"]]
        self.o["id"] = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
        replace(self.path, json.dumps(self.o).encode())


def compute(store, tower, names, args):
    """Features of all pictures that the store lacks."""
    waiting, hashes = [], {}
    with Progress(len(names)) as progress:
        for done, name in enumerate(names):
            path = os.path.join(args.root, name)
            with open(path, "rb") as file:
                hashes[name] = hashlib.sha256(file.read()).hexdigest()
            if hashes[name] not in store.known and hashes[name] not in [one for one, _ in waiting]:
                waiting.append((hashes[name], path))
            if len(waiting) == args.per_file:
                flush(store, tower, waiting, args.batch)
            progress.show(done, f"{done:,} of {len(names):,} pictures")
        flush(store, tower, waiting, args.batch)
    store.o["names"].update({name: store.known[image] for name, image in hashes.items()})
    store.write()


def flush(store, tower, waiting, batch):
    rows = []
    for first in range(0, len(waiting), batch):
        rows += tower.rows([open_picture(path) for _, path in waiting[first:first + batch]])
    if rows:
        store.add([image for image, _ in waiting], rows)
    waiting.clear()


def pixels_of(folder):
    """The patches that a model without a tower reads; None: it has a tower."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    values, rows = config.get("image_feature_size"), config.get("image_seq_length")
    if config.get("model_type") != "llava":
        raise Bad(f"{folder}: its model_type is {config.get('model_type')}; expected llava, a model with images")
    if config.get("vision_config") or not values or not rows:
        return None
    patch, side = math.isqrt(values // 3), math.isqrt(rows)
    if 3 * patch ** 2 != values or side ** 2 != rows:
        raise Bad(f"{folder}: {rows} rows of {values} values are no picture in patches of pixels; expected those of --pixels")
    return Pixels(patch, patch * side)


def make(folder, root, names, output):
    """The features of pictures in `root` for the model in `folder`, in F32, in the folder `output`."""
    check_pillow()
    tower = pixels_of(folder) or Tower(folder)
    compute(Store(output, tower.name, tower.sample, True), tower, names, argparse.Namespace(root=root, batch=32, per_file=1024))


def check_pillow():
    try:
        import PIL.Image        # noqa: open_picture uses it
    except ImportError as problem:
        raise Bad(f"{problem}; expected pillow: pip install pillow")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="conversations, a line each")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--model", help="a LLaVA folder with its vision tower")
    way.add_argument("--pixels", type=int, help="width of a patch")
    parser.add_argument("--size", type=int, default=128, help="pixels: width of a scaled picture")
    parser.add_argument("--root", default=".", help="folder of the pictures")
    parser.add_argument("--output", required=True, help="folder of the features")
    parser.add_argument("--f32", action="store_true", help="features in 4 bytes, not in BF16")
    parser.add_argument("--batch", type=int, default=32, help="pictures that the tower gets at once")
    parser.add_argument("--per-file", type=int, default=1024, help="pictures of a file of features")
    args = parser.parse_args(arguments)
    inputs.check(args.files)
    check_pillow()
    tower = Pixels(args.pixels, args.size) if args.pixels else Tower(args.model)
    names = names_of(args.files)
    if not names:
        raise Bad(f"{args.files[0]}: no conversation names a picture; expected \"image\", \"images\" or parts with a name")
    store = Store(args.output, tower.name, tower.sample, args.f32)
    before = len(store.known)
    compute(store, tower, names, args)
    print(f"{len(names):,} pictures, {len(store.known):,} different ones, {len(store.known) - before:,} of them new, of "
          f"{store.o['rows']} rows of {store.o['cols']} values in {args.output}")


if __name__ == "__main__":
    try:
        errors.run(main, "pictures that can be read, and an --output that can be written")
    except Bad as problem:
        sys.exit(f"error: {problem}")
