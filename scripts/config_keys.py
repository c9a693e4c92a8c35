"""The result of convert_config.py: the new keys, and the list of how each old key was converted."""
import functools, json, math, os, re

from errors import Bad

README = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "configs", "README.md")
PLAIN = re.compile(r"[A-Za-z0-9_./-][A-Za-z0-9_./+-]*$")
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+$")


@functools.cache
def known():
    """Each key of ./train with its default, in the order of the table in configs/README.md, which ./train prints."""
    with open(README, encoding="utf-8") as file:
        table = file.read().partition("| key | value | default | meaning |\n")[2]
    rows = (re.split(r"(?<!\\)\|", line) for line in table.splitlines() if line.startswith("| `"))
    return {row[1].strip(" `"): row[3].strip() for row in rows}


@functools.cache
def other_names():
    """Other names of keys of ./train, from the table in configs/README.md."""
    with open(README, encoding="utf-8") as file:
        table = file.read().partition("| key | other name | from |\n")[2].partition("\n\n")[0]
    rows = [line.split("|") for line in table.splitlines()]
    return {other: name for row in rows[1:] for name, other in zip(*(re.findall(r"`([a-z0-9_.]+)`", cell) for cell in row[1:3]))}


def flatten(tree, prefix=""):
    """{a: {b: 1}} as {"a.b": 1}; the value of a key of ./train is not flattened."""
    flat = {}
    for key, value in tree.items():
        name = prefix + str(key)
        if isinstance(value, dict) and value and name not in known():
            flat.update(flatten(value, name + "."))
        else:
            flat[name] = value
    return flat


def number(value):
    """The number in a text such as 1e-5 or 739_328; other values do not change."""
    if not isinstance(value, str):
        return value
    try:
        x = float(value.replace("_", ""))
    except ValueError:
        return value
    if not math.isfinite(x):
        return value
    return int(x) if x == int(x) and "e" not in value.lower() and "." not in value else x


def truth(value):
    return value.lower() in ("true", "yes", "on", "auto") if isinstance(value, str) else bool(value)


def scalar(value):
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return value if PLAIN.match(value) and value.lower() not in ("null", "~") else json.dumps(value, ensure_ascii=False)
    return repr(value)


def shown(value):
    text = json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, (dict, list)) else \
        value if isinstance(value, str) else scalar(value)
    text = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return text if len(text) <= 60 else text[:57] + "..."


def lines_of(value, indent):
    """The lines below `key:`, or the value on the same line."""
    space = " " * indent
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield f"{space}{scalar(str(key))}:{after_colon(item, indent)}"
    elif isinstance(value, list):
        for item in value:
            first = list(lines_of(item, indent + 2)) if isinstance(item, dict) and item else [scalar(item)]
            yield f"{space}- " + "\n".join(first).lstrip()


def after_colon(value, indent):
    if isinstance(value, list) and all(not isinstance(item, (dict, list)) for item in value) and len(value) <= 8:
        short = ", ".join(map(scalar, value))
        if len(short) < 80:
            return f" [{short}]"
    if isinstance(value, (dict, list)) and value:
        return "\n" + "\n".join(lines_of(value, indent + 2))
    return " {}" if isinstance(value, dict) else f" {scalar(value)}"


class Converted:
    """theirs: keys of the other program's file that are not converted yet; ours: keys of ./train."""

    def __init__(self, tree, program, path, ranks):
        self.theirs, self.ours, self.program, self.path, self.ranks = flatten(tree), {}, program, path, ranks
        self.kept, self.translated, self.dropped, self.missing = 0, [], [], []

    def refuse(self, key, value, reason):
        raise Bad(f"{self.path}: {key}: {shown(value)}: {reason}")

    def take(self, key, default=None):
        """Returns the value of an old key, which then counts as converted; null counts as not given."""
        value = self.theirs.pop(key, None)
        return default if value is None else value

    def put(self, key, value, source=None, why=""):
        """source: where the value comes from, as `lr: 1`; None: the old program's default."""
        if key not in known():
            raise KeyError(key)
        self.ours[key] = value
        source = source or f"default of {self.program}"
        self.translated.append(f"{source} -> {key}: {shown(value)}{why and f' ({why})'}")

    def count(self, key, default=None):
        """Returns the old key's number."""
        value = number(self.take(key, default))
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            self.refuse(key, value, "expected a number")
        return value

    def move(self, theirs, ours, default=None, change=None, why=""):
        """Converts an old key to ours. `default`: the old program's default, if the file does not have the key."""
        value = self.take(theirs)
        if value is not None:
            self.put(ours, change(number(value)) if change else value, f"{theirs}: {shown(value)}", why)
        elif default is not None:
            self.put(ours, default, None, why)

    def drop(self, names, reason):
        """Leaves out these keys, and all keys below them."""
        out = []
        for name in names.split():
            below = [key for key in self.theirs if key == name or key.startswith(name + ".")]
            given = [key for key in below if self.take(key) not in (None, {}, [])]
            out += given if len(given) < 2 else [name + ".*"]
        if out:
            self.dropped.append(f"{', '.join(out)}: {reason}")

    def ask(self, what, reason):
        """Adds something that the file does not say to the list."""
        self.missing.append(f"{what}: {reason}")

    def rest(self):
        """Reports keys that no rule names, unless they switch nothing on."""
        for key, value in list(self.theirs.items()):
            if self.take(key) not in (None, {}, [], False, 0, "", "false", "none"):
                self.ask(f"{key}: {shown(value)}", "this script does not know the key; it is left out")

    def load_path(self, key, name):
        self.put("load_path", name, f"{key}: {name}")
        if HUB.match(name) and not os.path.exists(name):
            self.ask("load_path", f"{name} is a name on the Hugging Face hub; give the folder that it is downloaded to (hf "
                     f"download {name} --local-dir {name})")

    def batch(self, micro, accumulation, width=1):
        """micro: sequences per GPU; accumulation: micro-batches per step; width: number of GPUs that share each sequence."""
        self.put("device_train_microbatch_size", micro, f"{micro} sequences per GPU")
        groups = max(1, (self.ranks or width) // width)
        self.put("global_train_batch_size", micro * accumulation * groups,
                 f"{micro} sequences x {accumulation} micro-batches x {groups} data-parallel rank{'s' * (groups > 1)}")
        if not self.ranks:
            self.ask("global_train_batch_size", "the file gives the sequences per GPU, but not the number of GPUs; this "
                     "is the batch of one GPU. Multiply it by the number of data-parallel ranks, or convert with --ranks N")

    def report(self, name):
        out = [f"From {name} of {self.program} by scripts/convert_config.py."]
        if self.kept:
            out.append(f"{self.kept} keys keep their name and value.")
        for title, rows in (("Translated:", self.translated), ("Left out:", self.dropped),
                            ("Not known; check these:", self.missing)):
            out += [title] + [f"  {row}" for row in rows] if rows else []
        return out

    def text(self):
        tree = {}
        order = [key.partition("[")[0] for key in known()]
        for key in sorted(self.ours, key=order.index):
            *sections, last = key.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = self.ours[key]
        return "\n" + "\n".join(lines_of(tree, 0)) + "\n"
