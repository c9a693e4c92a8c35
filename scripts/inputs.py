"""Input files: plain, or compressed with gzip, bzip2, xz or zstd (recognized by the first bytes); also standard input ("-") and
pipes, which can be read only once."""
import bz2, contextlib, gzip, io, lzma, os, re, sys, zlib

from errors import Bad

ENDINGS = (".gz", ".bz2", ".xz", ".zst", ".zstd")
STANDARD_INPUT = "-"
LONGEST_WINDOW = 31     # of zstd, as a power of two: some archives are made with zstd --long=31
BATCH_BYTES, BATCH_ITEMS = 1 << 20, 512     # maximum size of the work that a process gets at once


def uncompressed(path):
    """The name of the file without the ending of a compression; .GZ counts, too."""
    stem, ending = os.path.splitext(path)
    return stem if ending.lower() in ENDINGS else path


def size_of(path):
    """Size in bytes; 0: it is known only after reading."""
    return os.path.getsize(path) if os.path.isfile(path) else 0


def check(paths):
    if STANDARD_INPUT in paths and sys.stdin is None:
        raise Bad("standard input is closed; expected it open, as in zcat FILE | PROGRAM -")
    for path in paths:
        if os.path.isdir(path):
            raise Bad(f"{path} is a folder; expected files: name the files in this folder")
        if path != STANDARD_INPUT and not os.path.exists(path):
            raise Bad(f"{path}: no such file")
    if len(set(paths)) < len(paths):
        raise Bad("a file is named twice; expected each file once")


class Counted(io.RawIOBase):
    """A file that counts the bytes read from it, and shows its first bytes without seeking."""

    def __init__(self, file, first):
        self.file, self.count = file, 0
        self.first = b""
        while len(self.first) < first and (more := file.read(first - len(self.first))):
            self.first += more
        self.rest = self.first

    def readable(self):
        return True

    def readinto(self, buffer):
        data = self.rest[:len(buffer)] or self.file.read(len(buffer))
        self.rest = self.rest[len(data):]
        buffer[:len(data)] = data
        self.count += len(data)
        return len(data)


class Frames(io.RawIOBase):
    """Decompresses frame by frame with the package zstandard; a truncated frame is an error."""

    def __init__(self, file, package):
        self.file, self.package, self.data, self.rest, self.frame = file, package, b"", b"", None

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.data:
            chunk = self.rest or self.file.read(1 << 17)
            if not chunk:
                if self.frame:
                    raise EOFError("the compressed data end within a frame")
                return 0
            self.frame = self.frame or self.package.ZstdDecompressor(max_window_size=1 << LONGEST_WINDOW).decompressobj()
            try:
                self.data, self.rest = self.frame.decompress(chunk), b""
            except self.package.ZstdError as problem:
                raise OSError(str(problem))
            if self.frame.eof:
                self.rest, self.frame = self.frame.unused_data, None
        data, self.data = self.data[:len(buffer)], self.data[len(buffer):]
        buffer[:len(data)] = data
        return len(data)


def open_zstd(file):
    try:
        from compression import zstd            # since Python 3.14
        return zstd.ZstdFile(file, options={zstd.DecompressionParameter.window_log_max: LONGEST_WINDOW})
    except ImportError:
        pass
    try:
        import zstandard
    except ImportError:
        raise Bad("compressed with zstd, which needs Python 3.14 or the package zstandard: pip install zstandard")
    return Frames(file, zstandard)


OPENERS = (     # the first bytes of a format, and what opens such a file
    (rb"\x1f\x8b", lambda file: gzip.GzipFile(fileobj=file)),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", bz2.BZ2File),
    (rb"\xfd7zXZ\0", lzma.LZMAFile),
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", open_zstd),
)
FIRST = 10      # number of bytes that identify a format


def decompressed(source, path):
    opener = next((opener for pattern, opener in OPENERS if re.match(pattern, source.first, re.DOTALL)), None)
    if opener is None and uncompressed(path) != path:
        raise Bad("damaged, or not compressed although the file's name says so")
    source = io.BufferedReader(source, 1 << 16)
    return io.BufferedReader(opener(source), 1 << 16) if opener else source


def read_items(paths, has_lines):
    """((path, line, bytes), bytes read so far) of every line that is not blank, if has_lines(path, first bytes of the file);
    otherwise of the whole file, as line 0."""
    before = 0
    for path in paths:
        standard = contextlib.nullcontext(sys.stdin.buffer)
        with standard if path == STANDARD_INPUT else open(path, "rb", buffering=0) as raw:
            source = Counted(raw, FIRST)
            try:
                file = decompressed(source, path)
                if has_lines(path, file.peek(1)):
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield (path, number, line), before + source.count
                else:
                    yield (path, 0, file.read()), before + source.count
            except Bad as problem:
                raise Bad(f"{path}: {problem}")
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as problem:
                raise Bad(f"{path}: {problem}; expected a whole file")
            before += source.count


def read_batches(paths, has_lines):
    """(items, bytes read so far)"""
    batch, size = [], 0
    for item, position in read_items(paths, has_lines):
        batch.append(item)
        size += len(item[2])
        if size >= BATCH_BYTES or len(batch) == BATCH_ITEMS:
            yield batch, position
            batch, size = [], 0
    if batch:
        yield batch, position
