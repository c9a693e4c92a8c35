"""Shared parts of make_shards.py and make_chat_shards.py: tokenizers, parallel work, writing token shards.

A part of a set of shards has up to three files: NAME.npy, bare little-endian uint16 or uint32 numbers; NAME.csv.gz, a row for each
document with its first token, the token after its last and more columns; and, for conversations, a mask of one byte for each token.
Parts for validation are in the folder "val" of the output. A hash of the tokens chooses documents for validation. So the choice
does not depend on the order and number of files and processes; of two equal documents both or none are chosen, and of one
conversation all documents or none.
"""
import collections, csv, glob, gzip, hashlib, io, json, os, signal, sys, tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

os.environ["TOKENIZERS_PARALLELISM"] = "false"      # the processes of this module replace its threads
try:
    import numpy as np
    from tokenizers import processors
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install tokenizers numpy")

import errors, inputs, tokenizer_files
from errors import Bad
from progress import Progress


def add_arguments(parser):
    parser.add_argument("--output", required=True, help="folder for the shards")
    parser.add_argument("--val-fraction", type=float, default=0, help="share of the documents for validation, in OUTPUT/val")
    parser.add_argument("--max-tokens", type=int, default=2**28, help="tokens of a part, unless one document has more")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: number of cores")
    parser.add_argument("--skip-bad", action="store_true", help="leave out lines of a file that are errors, and count them")


def check_arguments(args):
    inputs.check(args.files)
    if not 0 <= args.val_fraction < 1:
        raise Bad(f"--val-fraction={args.val_fraction}: expected from 0 to below 1")
    if args.max_tokens < 1 or args.processes < 1:
        raise Bad(f"--max-tokens={args.max_tokens} --processes={args.processes}: expected at least 1")


def run(main):
    """Calls main() and reports an error in one line."""
    if sys.stdout:
        sys.stdout.reconfigure(errors="backslashreplace")       # names in the input may not be UTF-8
    try:
        errors.run(main, "files that can be read, and an --output that can be written and has room")
    except Bad as problem:
        sys.exit(f"error: {problem}")
    except BrokenProcessPool:
        sys.exit("error: a process ended without a message, probably because memory was short: use fewer --processes")
    except KeyboardInterrupt:
        sys.exit(130)


# ---- tokenizers --------------------------------------------------------------------------------------------------------------

def load_tokenizer(path):
    """tokenizer_files.load without the post-processor, so that the tokenizer gives the exact characters of each token: the
    post-processor would leave out spaces (trim_offsets), and has no other effect without special tokens."""
    files = tokenizer_files.load(path)
    files.tokenizer.post_processor = processors.Sequence([])
    return files


def encode(tokenizer, text, where):
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except (UnicodeEncodeError, TypeError):
        raise Bad(f"{where}: half of a surrogate pair (such as \\ud83d); expected text that UTF-8 can hold")


def vocabulary_size(tokenizer):
    return max(tokenizer.get_vocab().values()) + 1


def dtype_name(tokenizer):
    return "uint16" if vocabulary_size(tokenizer) <= 2**16 else "uint32"


# ---- working -----------------------------------------------------------------------------------------------------------------

def start_process(start, arguments):
    signal.signal(signal.SIGINT, signal.SIG_IGN)    # the first process also gets the signal, and ends the others
    start(*arguments)


def work_on(batches, work, start, arguments, processes):
    """Yields (work(items), position) of all batches in order, computed by `processes` processes. Each process first calls
    start(*arguments). Memory only has as many batches as the processes need to stay busy."""
    if processes == 1:
        start(*arguments)
        for items, position in batches:
            yield work(items), position
        return
    with ProcessPoolExecutor(processes, initializer=start_process, initargs=(start, arguments)) as pool:
        waiting = collections.deque()
        try:
            for items, position in batches:
                waiting.append((pool.submit(work, items), position))
                if len(waiting) > 2 * processes:
                    result, position = waiting.popleft()
                    yield result.result(), position
            while waiting:
                result, position = waiting.popleft()
                yield result.result(), position
        finally:
            for result, _ in waiting:
                result.cancel()


def progress_of(paths):
    """Shows the progress, by bytes of the input files, compressed or not."""
    return Progress(sum(map(inputs.size_of, paths)))


# ---- writing -----------------------------------------------------------------------------------------------------------------

def gzip_text(path):
    """Opens a gzip file that has the same bytes for the same rows: without the time and the name that gzip adds by default."""
    raw = open(path, "wb")
    file = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0)
    file.myfileobj = raw        # so that closing `file` also closes `raw`
    return io.TextIOWrapper(file, encoding="utf-8", newline="")


IMAGES = "images_part_{:04d}"        # the index of images of a part: data/images.h


class Writer:
    """The parts of one set of documents. name: file of tokens, with a field for the number; mask_name: file of the mask, or
    None."""

    def __init__(self, folder, name, mask_name, dtype, max_tokens, features=None):
        self.folder, self.name, self.mask_name, self.dtype, self.max_tokens = folder, name, mask_name, dtype, max_tokens
        self.features, self.images = features, 0
        self.parts = self.documents = self.tokens = self.labels = self.longest = 0
        self.part_tokens, self.files = 0, None

    def open(self, number):
        os.makedirs(self.folder, exist_ok=True)
        base = os.path.join(self.folder, self.name.format(number))
        self.files = [open(base + ".npy", "wb"), gzip_text(base + ".csv.gz")]
        self.rows = csv.writer(self.files[1], lineterminator="\n")
        if self.mask_name:
            self.files.append(open(os.path.join(self.folder, self.mask_name.format(number) + ".npy"), "wb"))
        if self.features:
            self.files.append(open(os.path.join(self.folder, IMAGES.format(number) + ".npy"), "wb"))
            self.files[-1].write(self.features.id.to_bytes(8, "little"))

    def add(self, ids, mask, columns, images=(), together=False):
        """Adds a document: its ids, its mask of bools (None: no mask), the columns of its row after start and end, and the
        numbers of its pictures among the features. together: it goes into the file of the document before it (reserve)."""
        if not together:
            self.reserve(len(ids))
        if not self.files:
            self.open(self.parts)
            self.parts, self.part_tokens = self.parts + 1, 0
        self.files[0].write(ids.astype(self.dtype).tobytes())
        if self.mask_name:
            self.files[2].write(mask.astype(np.bool_).tobytes())
            self.labels += int(mask.sum())
        if self.features:
            self.files[-1].write(np.array(images, "<u4").tobytes())
            self.images += len(images)
        self.rows.writerow([self.part_tokens, self.part_tokens + len(ids), *map(one_line, columns)])
        self.part_tokens += len(ids)
        self.documents += 1
        self.tokens += len(ids)
        self.longest = max(self.longest, len(ids))

    def reserve(self, tokens):
        """Makes the next documents, which have so many tokens together, parts of one file."""
        if self.files and self.part_tokens + tokens > self.max_tokens:
            self.close()

    def close(self):
        for file in self.files or []:
            file.close()
        self.files = None


def one_line(column):
    """A name that a row can contain: control characters and line ends are replaced."""
    return " ".join(column.split("\n")).encode(errors="replace").decode() if isinstance(column, str) else column


class Output:
    """The parts for training and validation of a run. publish() makes them appear in the output folder together."""

    def __init__(self, args, name, mask_name, dtype, features=None):
        self.folder, self.fraction = args.output, args.val_fraction
        for folder in (self.folder, os.path.join(self.folder, "val")):
            found = sorted(glob.glob(os.path.join(glob.escape(folder), name.split("{")[0] + "*")))
            if found:
                raise Bad(f"{found[0]} exists already; expected a folder without shards: delete them, or give another --output")
        os.makedirs(self.folder, exist_ok=True)
        self.unfinished = tempfile.TemporaryDirectory(prefix=".unfinished-", dir=self.folder)
        folders = self.unfinished.name, os.path.join(self.unfinished.name, "val")
        self.train, self.val = (Writer(folder, name, mask_name, dtype, args.max_tokens, features) for folder in folders)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.train.close()
        self.val.close()
        self.unfinished.cleanup()

    def add(self, documents, columns, together=False):
        """Adds documents [(ids, mask or None)] that stay together, for example of a conversation; the hash of the first decides
        for all. With features, each also has the numbers of its pictures. together: all become parts of one file."""
        chance = int.from_bytes(hashlib.blake2b(documents[0][0].tobytes(), digest_size=8).digest(), "little") / 2**64
        writer = self.val if chance < self.fraction else self.train
        if together:
            writer.reserve(sum(len(ids) for ids, *_ in documents))
        for ids, mask, *images in documents:
            writer.add(ids, mask, columns, *images, together=together)

    def publish(self):
        self.train.close()
        self.val.close()
        if self.fraction and not (self.train.documents and self.val.documents):
            raise Bad(f"--val-fraction={self.fraction} leaves {self.train.documents} documents for training and "
                      f"{self.val.documents} for validation; expected some for each: choose another")
        for folder, _, names in os.walk(self.unfinished.name):
            to = os.path.normpath(os.path.join(self.folder, os.path.relpath(folder, self.unfinished.name)))
            os.makedirs(to, exist_ok=True)
            for name in names:
                os.rename(os.path.join(folder, name), os.path.join(to, name))

    def statistics(self, what):
        for place, writer in (("", self.train), (" for validation", self.val)):
            if writer.documents:
                labels = f", of which {writer.labels:,} are labels" if writer.mask_name else ""
                labels += f"; {writer.images:,} images of {writer.features.rows} tokens" if writer.features else ""
                yield (f"{writer.documents:,} {what}{place} in {writer.parts} part{'s' * (writer.parts > 1)}: "
                       f"{writer.tokens:,} tokens{labels}; mean {writer.tokens / writer.documents:.1f}, longest {writer.longest:,}")


def paths_yaml(writer, folder):
    """'paths: [...]' and, if there are masks, 'label_mask_paths: [...]'. The values are patterns; the folder's name is escaped."""
    folder = glob.escape(folder.replace("\\", "\\\\"))
    for key, name in (("paths", writer.name), ("label_mask_paths", writer.mask_name),
                      ("image_paths", writer.features and IMAGES)):
        if name:
            yield f"{key}: " + json.dumps([os.path.join(folder, name.split("{")[0] + "*.npy")], ensure_ascii=False)
    if writer.features:
        yield "image_features: " + json.dumps(writer.features.folder, ensure_ascii=False)


def yaml_lines(output, model, data):
    """The lines that a configuration needs to train on the output; model, data: further keys of these sections."""
    lines = ["model: {" + ", ".join(f"{key}: {value}" for key, value in model.items()) + "}", "data:"]
    lines += ["  " + line for line in [*paths_yaml(output.train, output.folder), *(f"{key}: {value}" for key, value in data.items())]]
    if output.val.documents:
        lines += ["evaluators:", "  - label: val", "    data:"]
        lines += ["      " + line for line in paths_yaml(output.val, os.path.join(output.folder, "val"))]
    return lines


def print_yaml(output, model, data):
    print("\nin the configuration:\n", *yaml_lines(output, model, data), sep="\n")
