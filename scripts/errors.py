"""One-line error messages about input, files and programs, for the other scripts."""
import os, sys

LONGEST = 1000              # maximum number of characters of a message
NAMED = 10                  # number of left-out items that are named; further ones are only counted


def shortened(text, most=LONGEST):
    """The start and the end of a text, which may be of any length in the input. The end says what was expected."""
    return text if len(text) <= most else f"{text[:most // 2]} ... {text[-most // 2:]}"


class Bad(Exception):
    """An error in the input, in the words that the user reads."""

    def __init__(self, text):
        super().__init__(shortened(str(text)))


class Skipped:
    """Counts lines or pictures with errors, which --skip-bad leaves out."""

    def __init__(self, args):
        self.asked, self.problems, self.count = args.skip_bad, [], 0

    def add(self, problem):
        if not self.asked:
            raise problem
        self.count += 1
        self.problems += [str(problem)] if len(self.problems) < NAMED else []

    def __str__(self):
        more = [f"and {self.count - NAMED:,} more"] if self.count > NAMED else []
        return "\n  ".join([f"left out, as --skip-bad asks: {self.count:,}", *self.problems, *more])


def run(main, expected):
    """Returns what main() returns. expected: the files and programs that it needs, in the words that the user reads."""
    try:
        return main()
    except OSError as problem:
        sys.exit(f"error: {shortened(str(problem.filename or 'writing'))}: {problem.strerror or problem}; expected {expected}")


def save(figure, path):
    """Saves a picture with matplotlib. matplotlib raises ValueError for an unknown ending, and writes another file if a folder
    has that name."""
    try:
        if os.path.isdir(path):
            raise ValueError("is a folder")
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as problem:
        sys.exit(f"error: {path}: {getattr(problem, 'strerror', problem)}; give another --output, such as loss.png, in a folder "
                 "that exists")
