"""metrics.jsonl of a run, for the other scripts."""
import json, os, sys


def read(folder):
    """Its lines as dicts. The last may be cut short: the run is still writing it, or was killed."""
    path = os.path.join(folder, "metrics.jsonl")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        sys.exit(f"error: {path}: {error.strerror}; give the save_folder of a run")
    whole = text[:text.rfind("\n") + 1].splitlines()
    try:
        return [json.loads(line) for line in whole]
    except ValueError as error:
        sys.exit(f"error: {path}: {error}")
