#!/usr/bin/env python3
"""Computes the features of pictures once, for training a model with images on token shards.

    python3 scripts/make_image_features.py --model LLAVA_FOLDER --root pictures --output features chats.jsonl
    python3 scripts/make_image_features.py --pixels 16 --size 128 --root pictures --output features chats.jsonl

The files of conversations name the pictures (make_chat_shards.py --images reads the same forms); names are relative
to --root. Equal files are stored once. --model: features are the rows that the model's vision tower gives to its projector;
transformers computes them, on the GPU if there is one. Needs torch, transformers and pillow. --pixels: without a tower; features
are the pixels of the picture, scaled to --size and cut into square patches of --pixels pixels a side, each a row of values from -1
to 1. Needs pillow and numpy. OUTPUT gets features-NNNN.bf16 and features.json (data/images.h). If OUTPUT has features already,
these pictures are not computed again, for example after an interruption. It is an error if the features were made with another
tower or with other settings. Pictures are read as load_image of transformers reads them. A picture that cannot be read, or a line
that is not a conversation, ends the program; with --skip-bad it is left out and counted, and OUTPUT/left-out.txt names the pictures.
"""
import argparse, hashlib, json, math, os, sys

try:
    import numpy as np
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install numpy")

import chat_images, errors, image_settings, inputs, pictures
from errors import Bad
from progress import Progress


LEFT_OUT = "left-out.txt"
ANOTHER = "expected the same: make the features again, with another --output"


# ---- towers ------------------------------------------------------------------------------------------------------------------

class Pixels:
    """The patches of a picture, row by row. A patch consists of its pixels, row by row, with three colours per pixel."""

    def __init__(self, patch, size):
        if size % patch:
            raise Bad(f"--size={size}: expected a multiple of --pixels={patch}")
        self.patch, self.size, self.name, self.sample, self.settings = patch, size, f"pixels-{patch}-{size}", None, {}

    def values(self, picture):
        """The input of rows() for a picture."""
        return np.asarray(picture.resize((self.size, self.size), resample=3), np.float32) / 127.5 - 1        # bicubic

    def rows(self, values):
        side = self.size // self.patch
        for x in values:
            x = x.reshape(side, self.patch, side, self.patch, 3).swapaxes(1, 2)
            yield x.reshape(side * side, -1)


def sample_of(name, values):
    """A hash of the tensor's name and of 768 of its values, as in model/checkpoint/tower.h."""
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
        found = image_settings.check(folder)
        try:
            import torch
            import transformers
            from safetensors import safe_open
        except ImportError as problem:
            raise Bad(f"--model: {problem}; expected torch, transformers and safetensors")
        try:
            config = transformers.AutoConfig.from_pretrained(folder)
            self.processor = transformers.AutoImageProcessor.from_pretrained(folder)
            self.settings = image_settings.of_model(found, config.vision_config, self.processor)
            self.tower = transformers.AutoModel.from_config(config.vision_config).eval()
            self.name, self.sample = self.load(folder, safe_open)
        except Bad:
            raise
        except Exception as problem:        # transformers and safetensors can raise any exception
            raise Bad(f"{folder}: {' '.join(str(problem).split())}; expected a LLaVA folder with preprocessor_config.json")
        self.folder, self.torch, self.layer = folder, torch, image_settings.layer_of(found["config"])
        layers = config.vision_config.num_hidden_layers
        if not -layers - 1 <= self.layer <= layers:
            raise Bad(f"{folder}/config.json: vision_feature_layer is {self.layer}; expected a number from {-layers - 1} to {layers}: "
                      f"the tower has {layers} layers")
        self.drops = image_settings.strategy_of(found["config"]) == "default"
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tower.to(self.device)

    def load(self, folder, safe_open):
        """Reads the tower's weights. Returns two hashes of the weights, which do not depend on the prefix vision_model of the
        names, because versions of transformers differ in it."""
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

    def values(self, picture):
        return self.processor(images=picture, return_tensors="pt")["pixel_values"][0]

    def rows(self, values):
        try:
            pixels = self.torch.stack(values).to(self.device)
            with self.torch.no_grad():
                rows = self.tower(pixels, output_hidden_states=True).hidden_states[self.layer]
        except (RuntimeError, ValueError) as problem:       # because of wrong shapes or too little memory
            raise Bad(f"{self.folder}: {' '.join(str(problem).split())}. Either the image processor makes pictures of another size "
                      "than the tower reads, or --batch needs more memory than there is")
        yield from (rows[:, 1:] if self.drops else rows).float().cpu().numpy()


# ---- files -------------------------------------------------------------------------------------------------------------------

def names_of(paths, skipped):
    """{name: file and line of the first conversation that shows the picture} of all pictures, in order."""
    found = {}
    for batch, _ in inputs.read_batches(paths, lambda path, first: True):
        for path, number, line in batch:
            try:
                _, names = chat_images.take(line, f"{path}:{number}", "<image>")
            except Bad as problem:
                skipped.add(problem)
                continue
            for name in names:
                found.setdefault(name, f"{path}:{number}: ")
    return found


def values_of(tower, path):
    picture = pictures.load(path)
    try:
        return tower.values(picture)
    except Exception as problem:        # an image processor can raise any exception, for example for a picture of one pixel
        raise Bad(f"{path}: {picture.width} x {picture.height} pixels: {problem}; expected a picture that the model's image "
                  "processor takes: scale it, or leave it out")


def hash_of(path):
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except (OSError, ValueError) as problem:            # ValueError: the name is not a possible file name
        raise Bad(f"{path}: {getattr(problem, 'strerror', problem)}; expected pictures that can be read")


def bfloat16(x):
    """BF16 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype("<u2")


def replace(path, data):
    with open(path + ".tmp", "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".tmp", path)


class Store:
    """OUTPUT: features.json, which grows by a file of features at a time. images: hashes of the pictures; names: {name: number};
    settings: by image_settings.py; reading: how pictures were read. Features of early versions have neither settings nor reading;
    check_old adds only the settings."""

    def __init__(self, folder, tower, f32):
        os.makedirs(folder, exist_ok=True)
        self.folder, self.path = folder, os.path.join(folder, "features.json")
        dtype = "f32" if f32 else "bf16"
        self.o = {"id": "", "rows": 0, "cols": 0, "dtype": dtype, "tower": tower.name, "reading": pictures.READING,
                  "settings": tower.settings, "files": [], "images": [], "names": {}}
        if os.path.exists(self.path):
            self.o = image_settings.read_json(self.path)
        for key, value in (("tower", tower.name), ("dtype", dtype), ("reading", self.o.get("reading") and pictures.READING)):
            if self.o.get(key) != value:
                raise Bad(f"{self.path}: its {key} is {str(self.o.get(key))[:64]}, but this is {str(value)[:64]}; {ANOTHER}")
        self.o["tower_sample"] = tower.sample
        self.known = {image: number for number, image in enumerate(self.o["images"])}

    def check(self, tower, folder):
        """tower: the vision tower of the model in `folder`. Dies unless the features were made with the settings of this model."""
        wrong = image_settings.differing(self.o["settings"], folder)
        program, own = (one.get("program", {}) for one in (self.o["settings"], tower.settings))
        if wrong or program != own:
            raise Bad(f"{self.path}: {wrong or f'the image processor was {program}, but this one is {own}'}; {ANOTHER}")

    def check_old(self, tower, names, root):
        """Checks features without settings: all pictures must be read now as they were read then, and for 32 pictures, spread over
        all, the tower must give the same features. Values may differ by the rounding to BF16, up to 2^-8 of a value, and, because
        the device may be another one, by 2^-10 of the largest value."""
        paths = {}
        for name in dict.fromkeys([*names, *self.o["names"]]):
            path = os.path.join(root, name)
            if os.path.exists(path):
                paths[hash_of(path)] = path
        images = self.o["images"]
        for image in images:
            if image not in paths:
                raise Bad(f"{self.path} does not say how its features were made, and one of their pictures is not in {root}; "
                          f"{ANOTHER}")
            if pictures.load(paths[image]).tobytes() != pictures.load(paths[image], turned=False).tobytes():
                raise Bad(f"{self.path}: {paths[image]} is now rotated as its EXIF says, but was not when its features were made; "
                          f"{ANOTHER}")
        some = sorted({number * len(images) // 32 for number in range(32)}) if images else []
        made = list(tower.rows([values_of(tower, paths[images[number]]) for number in some])) if some else []
        for number, new in zip(some, made):
            old, rounded = self.made(number), 2**-8 if self.o["dtype"] == "bf16" else 0
            over = np.inf if new.shape != old.shape else np.linalg.norm(np.maximum(abs(new - old) - rounded * abs(old), 0))
            if over > 2**-10 * np.linalg.norm(old):
                raise Bad(f"{self.path}: the features of {paths[images[number]]} are not those that this model gives; {ANOTHER}")
        self.o["settings"] = tower.settings

    def made(self, number):
        """The features of a picture, as F32."""
        kind, size = "<f4" if self.o["dtype"] == "f32" else "<u2", self.o["rows"] * self.o["cols"]
        for name, count in self.o["files"]:
            if number < count:
                break
            number -= count
        values = np.fromfile(os.path.join(self.folder, name), kind, size, offset=number * size * np.dtype(kind).itemsize)
        values = values if kind == "<f4" else (values.astype(np.uint32) << 16).view(np.float32)
        return values.reshape(self.o["rows"], self.o["cols"])

    def add(self, hashes, rows):
        """Adds a file with the features of some pictures."""
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
        what += [self.o["settings"], self.o["reading"]] if "reading" in self.o else []
        self.o["id"] = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]
        replace(self.path, json.dumps(self.o).encode())


def compute(store, tower, names, args, skipped):
    """Computes the features of all pictures that the store lacks. names: {name: where it is shown, for errors}."""
    waiting, hashes, problems = {}, {}, {}           # waiting: {hash: (path, where)}; problems: {name or hash: text}
    with Progress(len(names)) as progress:
        for done, (name, where) in enumerate(names.items()):
            path = os.path.join(args.root, name)
            try:
                hashes[name] = hash_of(path)
            except Bad as problem:
                leave_out(skipped, problems, name, where, problem)
                continue
            if hashes[name] not in store.known and hashes[name] not in problems:
                waiting.setdefault(hashes[name], (path, where))
            if len(waiting) == args.per_file:
                flush(store, tower, waiting, args.batch, skipped, problems)
            progress.show(done, f"{done:,} of {len(names):,} pictures")
        flush(store, tower, waiting, args.batch, skipped, problems)
    store.o["names"].update({name: store.known[image] for name, image in hashes.items() if image in store.known})
    write_left_out(store.folder, [name for name in names if hashes.get(name) not in store.known])
    if not store.known:
        raise Bad(f"{args.root}: none of {len(names):,} pictures can be read; the first: {next(iter(problems.values()))}")
    store.write()
    if pictures.deep:
        print(f"NOTE: pictures with more than 8 bits, whose values above 255 became 255, as in transformers: {len(pictures.deep):,}, "
              f"the first {next(iter(pictures.deep))}; if this makes them white, save them with 8 bits", file=sys.stderr)
        pictures.deep.clear()


def leave_out(skipped, problems, key, where, problem):
    problems[key] = f"{where}{problem}"
    skipped.add(Bad(problems[key]))


def write_left_out(folder, names):
    """Writes a line for each picture. A line end, or a byte that is not UTF-8, in a name is written as in Python."""
    path = os.path.join(folder, LEFT_OUT)
    if names:
        lines = [name.replace("\n", "\\n").replace("\r", "\\r") + "\n" for name in names]
        replace(path, "".join(lines).encode(errors="backslashreplace"))
        print(f"{len(names):,} pictures are left out; {path} names them", file=sys.stderr)
    elif os.path.exists(path):
        os.remove(path)


def flush(store, tower, waiting, batch, skipped, problems):
    """Adds a file of features."""
    items, rows, images = list(waiting.items()), [], []
    for first in range(0, len(items), batch):
        values = []
        for image, (path, where) in items[first:first + batch]:
            try:
                values.append(values_of(tower, path))
                images.append(image)
            except Bad as problem:
                leave_out(skipped, problems, image, where, problem)
        rows += tower.rows(values) if values else []
    if rows:
        store.add(images, rows)
    waiting.clear()


def pixels_of(folder):
    """The patches that a model without a tower reads; None: the model has a tower."""
    config = image_settings.read(folder)["config"]
    values, rows = config.get("image_feature_size"), config.get("image_seq_length")
    if config.get("model_type") != "llava":
        raise Bad(f"{folder}: its model_type is {config.get('model_type')}; expected llava, a model with images")
    if config.get("vision_config") or not values or not rows:
        return None
    patch, side = math.isqrt(values // 3), math.isqrt(rows)
    if 3 * patch ** 2 != values or side ** 2 != rows:
        raise Bad(f"{folder}: {rows} rows of {values} values are not the square patches of a square picture; expected a "
                  "folder that make_llava.py --pixels made")
    return Pixels(patch, patch * side)


def make(folder, root, names, output):
    """Computes the features of pictures in `root` for the model in `folder`, in F32, into the folder `output`."""
    pictures.check_pillow()
    tower, args = pixels_of(folder) or Tower(folder), argparse.Namespace(root=root, batch=32, per_file=1024, skip_bad=False)
    compute(Store(output, tower, True), tower, dict.fromkeys(names, ""), args, errors.Skipped(args))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="conversations, a line each")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--model", help="a LLaVA folder with its vision tower")
    way.add_argument("--pixels", type=int, help="no tower: width of a patch in pixels")
    parser.add_argument("--size", type=int, default=128, help="pixels: width of a scaled picture")
    parser.add_argument("--root", default=".", help="folder of the pictures")
    parser.add_argument("--output", required=True, help="folder of the features")
    parser.add_argument("--f32", action="store_true", help="features in 4 bytes, not in BF16")
    parser.add_argument("--batch", type=int, default=32, help="number of pictures that the tower gets at once")
    parser.add_argument("--per-file", type=int, default=1024, help="number of pictures in a file of features")
    parser.add_argument("--skip-bad", action="store_true", help="leave out pictures and lines that are errors, and count them")
    args = parser.parse_args(arguments)
    inputs.check(args.files)
    pictures.check_pillow()
    tower, skipped = Pixels(args.pixels, args.size) if args.pixels else Tower(args.model), errors.Skipped(args)
    names = names_of(args.files, skipped)
    if not names:
        raise Bad(f"{args.files[0]}: no conversation names a picture; expected \"image\", \"images\" or parts with a name")
    store = Store(args.output, tower, args.f32)
    if "settings" not in store.o:
        store.check_old(tower, names, args.root)
    elif args.model:
        store.check(tower, args.model)
    before = len(store.known)
    compute(store, tower, names, args, skipped)
    print(f"{len(names):,} pictures, {len(store.known):,} different ones, {len(store.known) - before:,} of them new, of "
          f"{store.o['rows']} rows of {store.o['cols']} values in {args.output}")
    if skipped.count:
        print(skipped)


if __name__ == "__main__":
    try:
        errors.run(main, "pictures that can be read, and an --output that can be written")
    except Bad as problem:
        sys.exit(f"error: {problem}")
