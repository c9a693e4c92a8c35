"""Reads metrics.jsonl of a run, for the other scripts."""
import array, bisect, json, os, sys, zlib


def read(folder):
    """The lines of the file as dicts. The last line may be incomplete: the run is still writing it, or was killed."""
    path = os.path.join(folder, "metrics.jsonl")
    try:
        with open(path, "rb") as file:
            whole = file.read().split(b"\n")[:-1]
    except OSError as error:
        sys.exit(f"error: {path}: {error.strerror}; give the save_folder of a run")
    records = [parse(line) for line in whole]
    if None in records:
        at = records.index(None)
        sys.exit(f"error: {path}:{at + 1}: found {whole[at][:60].decode(errors='replace')!r}; expected an object of JSON, as "
                 "./train writes it: delete this line, or restore it")
    return records


def parse(line):
    """The line as a dict; None: the line is damaged, for example because a disk or a host failed."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class Follower:
    """Reads metrics.jsonl while it grows. A run that continues from an earlier step truncates the file and writes it
    again. To notice this at any size, the reader remembers end, step and CRC of each line that it has read."""

    CHUNK = 1 << 24     # bytes read at a time

    def __init__(self, folder):
        self.path = os.path.join(folder, "metrics.jsonl")
        self.ends, self.steps, self.sums = array.array("q"), array.array("q"), array.array("q")

    def forget_from(self, line):
        del self.ends[line:], self.steps[line:], self.sums[line:]

    def forget_step(self, step):
        """Forgets the lines of this step and of later ones, so that they are read again."""
        self.forget_from(bisect.bisect_left(self.steps, step))

    def still_there(self, file, line):
        start = self.ends[line - 1] if line else 0
        file.seek(start)
        return zlib.crc32(file.read(self.ends[line] - start)) == self.sums[line]

    def find_cut(self, file):
        """Number of unchanged lines. A run only truncates the file and appends to it: after a changed line, all lines have
        changed."""
        n = len(self.ends)
        if n == 0 or self.still_there(file, n - 1):
            return n
        low, high = 0, n - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.still_there(file, middle) else (low, middle)
        return low

    def poll(self):
        """New records, up to CHUNK bytes, and the step from which earlier records are void, or None."""
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:       # the run has not begun, or is beginning again
            file = open(os.devnull, "rb")
        with file:
            void, kept = None, self.find_cut(file)
            if kept < len(self.ends):
                void = self.steps[kept]
                self.forget_step(void)
            at = self.ends[-1] if self.ends else 0
            file.seek(at)
            text = file.read(self.CHUNK)
        records = []
        for line in text[:text.rfind(b"\n") + 1].splitlines(keepends=True):
            record = self.parse_step(line)
            at += len(line)
            self.ends.append(at)
            self.steps.append(record["step"] if record else self.steps[-1] if self.steps else 0)
            self.sums.append(zlib.crc32(line))
            records += [record] if record else []
        return records, void

    @staticmethod
    def parse_step(line):
        """The step of a line; None also if the line has no step."""
        record = parse(line) or {}
        return record if type(record.get("step")) is int and 0 <= record["step"] < 1 << 63 else None
