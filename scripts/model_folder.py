"""Model folders: their JSON files, and their weights, of which only the bytes that change are in memory."""
import json, os, shutil, struct

from errors import Bad

CHUNK = 1 << 24


def read_json(folder, name, missing=None):
    path = os.path.join(folder, name)
    if missing is not None and not os.path.exists(path):
        return missing
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as problem:
        raise Bad(f"{path}: {problem}; expected JSON")


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, ensure_ascii=False)


class Tensor:
    """A tensor: dtype, shape, and its bytes: `count` bytes of a file from `at` on, then `tail`."""

    def __init__(self, dtype, shape, path=None, at=0, count=0, tail=b""):
        self.dtype, self.shape, self.path, self.at, self.count, self.tail = dtype, shape, path, at, count, tail

    def pieces(self):
        if self.count:
            with open(self.path, "rb") as file:
                file.seek(self.at)
                left = self.count
                while left:
                    data = file.read(min(left, CHUNK))
                    left -= len(data)
                    yield data
        yield self.tail


def read_files(folder):
    """[{name: Tensor}] of each file of weights."""
    index = read_json(folder, "model.safetensors.index.json", {"weight_map": {"": "model.safetensors"}})
    files = []
    for name in sorted(set(index["weight_map"].values())):
        path, found = os.path.join(folder, name), {}
        with open(path, "rb") as file:
            length, = struct.unpack("<Q", file.read(8))
            for key, one in json.loads(file.read(length)).items():
                if key != "__metadata__":
                    begin, end = one["data_offsets"]
                    found[key] = Tensor(one["dtype"], one["shape"], path, 8 + length + begin, end - begin)
        files.append(found)
    return files


def write_file(path, tensors):
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, one in tensors.items():
        size = one.count + len(one.tail)
        header[name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in tensors.values():
            for data in one.pieces():
                file.write(data)
    return at


def write_weights(output, files):
    total, index = 0, {}
    for i, tensors in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        total += write_file(os.path.join(output, name), tensors)
        index.update(dict.fromkeys(tensors, name))
    write_json(output, "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})


def copy_others(folder, output):
    """Copies what else a folder has, such as the tokenizer, unless it is in `output` already."""
    for name in os.listdir(folder):
        if name.endswith((".json", ".jinja", ".model", ".txt")) and not os.path.exists(os.path.join(output, name)) \
                and not name.endswith(".index.json") and name != "trainer.json":
            shutil.copy(os.path.join(folder, name), output)
