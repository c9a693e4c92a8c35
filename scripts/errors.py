"""What went wrong with files and programs, in one line, for the other scripts."""
import os, sys


class Bad(Exception):
    """What is wrong with the input, in the words that the user reads."""


def run(main, expected):
    """Returns what main() does; expected: the files and programs that it needs, in the words that the user reads."""
    try:
        return main()
    except OSError as problem:
        sys.exit(f"error: {problem.filename or 'writing'}: {problem.strerror or problem}; expected {expected}")


def save(figure, path):
    """A picture of matplotlib's, which raises ValueError for an ending that it does not know, and beside a folder of that name
    writes another file."""
    try:
        if os.path.isdir(path):
            raise ValueError("is a folder")
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as problem:
        sys.exit(f"error: {path}: {getattr(problem, 'strerror', problem)}; give another --output, such as loss.png, in a folder "
                 "that is there")
