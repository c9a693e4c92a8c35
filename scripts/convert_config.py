#!/usr/bin/env python3
"""Turns a configuration of another program into one for ./train.

    python3 scripts/convert_config.py FILE > mine.yaml
    python3 scripts/convert_config.py llama3_8b.toml --ranks 64 > mine.yaml

FILE is YAML of OLMo or COAT, config.json of OLMo-core, TOML of torchtitan, YAML of axolotl, or TrainingArguments of Hugging Face
(YAML or JSON; also of TRL and LLaMA-Factory). stderr and the comments at the top of the result list converted keys, keys that were
left out, and settings that the file does not give, each with the reason. YAML needs the package pyyaml.
"""
import argparse, json, os, sys, tomllib

import errors
from config_keys import Converted
import config_axolotl, config_olmo, config_olmo_core, config_torchtitan, config_training_arguments

# The first row that matches gives the kind of the file.
KINDS = (config_olmo_core, config_torchtitan, config_axolotl, config_training_arguments, config_olmo)


def read_yaml(path, text):
    try:
        import yaml
    except ImportError:
        raise errors.Bad("YAML needs the package pyyaml: pip install pyyaml") from None

    class Texts(yaml.SafeLoader):
        """Reads scalars as texts: ./train reads 1e-5, 739_328 and 2e12T as numbers."""
    Texts.yaml_implicit_resolvers = {first: [(tag, pattern) for tag, pattern in rows if tag.endswith((":null", ":merge"))]
                                     for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    try:
        return yaml.load(text, Loader=Texts)
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        raise errors.Bad(f"{path}{f':{mark.line + 1}' if mark else ''}: {getattr(problem, 'problem', None) or problem}") from None


def read(path):
    with open(path, "rb") as file:
        data = file.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise errors.Bad(f"{path}: expected a text file in UTF-8; training_args.bin is a pickle, which is not read: save the "
                         "arguments as text by args.to_json_string()") from None
    try:
        if path.endswith(".toml"):
            return tomllib.loads(text)
        if path.endswith(".json"):
            return json.loads(text)
    except ValueError as problem:
        raise errors.Bad(f"{path}: {problem}") from None
    return read_yaml(path, text)


def kind_of(path, tree):
    if not isinstance(tree, dict):
        raise errors.Bad(f"{path}: expected keys and values")
    for kind in KINDS:
        if kind.matches(tree):
            return kind
    raise errors.Bad(f"{path}: expected keys of {', '.join(kind.NAME for kind in KINDS)}; found "
                     f"{', '.join(list(map(str, tree))[:5])}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], epilog="Prints the new configuration, and on stderr what "
                                     "became of each key.")
    parser.add_argument("file", help="configuration of OLMo, COAT, OLMo-core, torchtitan, axolotl or TrainingArguments")
    parser.add_argument("--ranks", type=int, help="GPUs of the run, for files that give sequences of each GPU")
    options = parser.parse_args()
    if options.ranks is not None and options.ranks < 1:
        raise errors.Bad(f"--ranks={options.ranks}: expected a number of GPUs, 1 or more")
    tree = read(options.file)
    kind = kind_of(options.file, tree)
    converted = Converted(tree, kind.NAME, options.file, options.ranks)
    try:
        kind.convert(converted)
    except (AttributeError, IndexError, TypeError, ValueError) as problem:      # for example a list in place of a number
        raise errors.Bad(f"{options.file}: this script cannot convert this file of {kind.NAME}: {problem}") from problem
    report = converted.report(os.path.basename(options.file))
    print("".join(f"# {line}".rstrip() + "\n" for line in report) + converted.text(), end="")
    print("\n".join(report), file=sys.stderr)


if __name__ == "__main__":
    try:
        errors.run(main, "a configuration")
    except errors.Bad as problem:
        sys.exit(f"error: {problem}")
