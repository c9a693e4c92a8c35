"""Error messages of one line for input, files and programs, for the other scripts."""
import os, sys


class Bad(Exception):
    """An error in the input, in the words that the user reads."""


def run(main, expected):
    """Returns what main() does; expected: the files and programs that it needs, in the words that the user reads."""
    try:
        return main()
    except OSError as problem:
        sys.exit(f"error: {problem.filename or 'writing'}: {problem.strerror or problem}; expected {expected}")


def save(figure, path):
    """Saves a picture with matplotlib, which raises ValueError for an unknown ending, and writes another file if a folder has
    that name."""
    try:
        if os.path.isdir(path):
            raise ValueError("is a folder")
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as problem:
        sys.exit(f"error: {path}: {getattr(problem, 'strerror', problem)}; give another --output, such as loss.png, in a folder "
                 "that is there")
