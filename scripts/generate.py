#!/usr/bin/env python3
"""Continues texts with a model: by its tokenizer.json, its chat template and ./train --generate.

    python3 scripts/generate.py FOLDER "Why is the sky blue?"
    python3 scripts/generate.py FOLDER --raw --temperature=0.8 --top-p=0.95 "Once upon a time"
    python3 scripts/generate.py FOLDER --train "mpirun -n 2 ./train" --recipe=f32 "one text" "and another"

FOLDER is a checkpoint or a Hugging Face folder, with tokenizer.json and, without --raw, a chat template. Options that are not
listed below go to ./train unchanged. Needs the packages tokenizers and jinja2 (--raw: only tokenizers).
"""
import argparse, json, os, re, shlex, subprocess, sys, tempfile, threading

import tokenizer_files
from errors import Bad


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("folder")
    parser.add_argument("texts", nargs="+", metavar="text")
    parser.add_argument("--raw", action="store_true", help="no chat template: the text follows the tokenizer's first tokens")
    parser.add_argument("--train", default="./train", help="how the program is started; default: ./train")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="most tokens of each continuation; default: 512")
    parser.add_argument("--temperature", type=float, default=0, help="0, the default: always the most likely token")
    parser.add_argument("--top-p", type=float, default=1,
                        help="draws from the likeliest tokens that together have this probability; default: 1")
    parser.add_argument("--seed", type=int, default=6198, help="seed of the draws; default: 6198")
    known, rest = parser.parse_known_intermixed_args()
    try:
        known.train = shlex.split(known.train)
    except ValueError as problem:
        sys.exit(f"error: --train {known.train}: {problem}")
    known.folder = follow(known.folder)
    strange = [one for one in rest if not (one.startswith("--") and "=" in one)]
    if strange:
        sys.exit(f"error: {strange[0]}: expected an option above, or --key=value for ./train")
    return known, rest


def follow(folder):
    """Where a file system has no symbolic links, `latest` is a file that names the checkpoint."""
    if os.path.basename(folder) != "latest" or not os.path.isfile(folder):
        return folder
    with open(folder, encoding="utf-8") as file:
        return os.path.join(os.path.dirname(folder), file.readline().rstrip("\n"))


def check_texts(texts):
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except UnicodeEncodeError:
            sys.exit(f"error: text {number}: {text[:40]!r} is not UTF-8; expected a text that is")


def load_files(folder):
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path) and os.path.isfile(os.path.join(folder, "latest", "tokenizer.json")):
        sys.exit(f"error: {folder} holds the checkpoints of a run; expected one of them, as {os.path.join(folder, 'latest')}")
    if not os.path.isdir(folder):
        sys.exit(f"error: {folder}: no such folder; expected a checkpoint or a model as Hugging Face has it")
    if not os.path.isfile(path):
        sys.exit(f"error: {path}: no such file; ./train --generate=FILE takes prompts as tokens")
    try:
        return tokenizer_files.load(folder)
    except Bad as problem:
        sys.exit(f"error: {problem}")


def encode(args, files):
    """The tokens of each text. A template writes the tokens that a text begins with, so the tokenizer must not."""
    if args.raw:
        return [files.tokenizer.encode(text).ids for text in args.texts]
    from chat_template import ChatTemplate
    try:
        template = ChatTemplate(args.folder, files)
    except Bad as problem:
        sys.exit(f"error: {problem}; --raw goes without one")
    try:
        prompts = [template.render([{"role": "user", "content": text}], add_generation_prompt=True) for text in args.texts]
    except Exception as problem:        # whatever a template does
        sys.exit(f"error: {args.folder}: its chat template: {problem}; --raw goes without one")
    return [files.tokenizer.encode(prompt, add_special_tokens=False).ids for prompt in prompts]


def pass_on(lines, path):
    """Messages of the program. A line of the file of prompts becomes the number of a text, because users do not see that file."""
    for line in lines:
        sys.stderr.write(re.sub(re.escape(path) + r":(\d+)", r"text \1", line).replace(path, "texts"))


def run(args, rest, prompts, tokenizer):
    """Prints answers as they come; returns the program's exit status."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps({"tokens": ids}) + "\n" for ids in prompts)
        file.flush()
        options = [f"--generate={file.name}", f"--load_path={args.folder}", f"--max_new_tokens={args.max_new_tokens}",
                   f"--temperature={args.temperature}", f"--top_p={args.top_p}", f"--seed={args.seed}"]
        command = [*args.train, *options, *rest]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace") as train:
            errors = threading.Thread(target=pass_on, args=(train.stderr, file.name))
            errors.start()
            for line in train.stdout:
                if not line.startswith("{"):        # mpirun's, perhaps
                    sys.stderr.write(line)
                    continue
                answer = json.loads(line)
                if len(prompts) > 1:
                    print(f"> {args.texts[answer['prompt']]}")
                print(tokenizer.decode(answer["tokens"], skip_special_tokens=True), flush=True)
            errors.join()
    return train.returncode


def main():
    args, rest = parse_arguments()
    check_texts(args.texts)
    files = load_files(args.folder)
    try:
        sys.exit(run(args, rest, encode(args, files), files.tokenizer))
    except BrokenPipeError:
        sys.exit("error: stdout: closed by its reader")
    except (FileNotFoundError, PermissionError) as problem:
        sys.exit(f"error: {problem.filename}: no such program; build it with make, or name it with --train")


if __name__ == "__main__":
    main()
