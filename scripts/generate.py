#!/usr/bin/env python3
"""Continues texts with a model: uses its tokenizer.json, its chat template and ./train --generate.

    python3 scripts/generate.py FOLDER "Why is the sky blue?"
    python3 scripts/generate.py FOLDER --image cat.png "What is it?"
    python3 scripts/generate.py FOLDER --raw --temperature=0.8 --top-p=0.95 "Once upon a time"
    python3 scripts/generate.py FOLDER --train "mpirun -n 2 ./train" --recipe=f32 "one text" "and another"

FOLDER is a checkpoint or a Hugging Face folder, with tokenizer.json and, without --raw, a chat template. Options that are not
listed below go to ./train unchanged. Needs the packages tokenizers and jinja2 (--raw: only tokenizers). --image needs a model with
images, pillow and numpy, and if the model has a vision tower, torch and transformers. A text has one <image> at the position of
each picture; if it has none, the pictures come first.
"""
import argparse, sys

import continuations, errors
from errors import Bad


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("folder")
    parser.add_argument("texts", nargs="+", metavar="text")
    parser.add_argument("--image", action="append", default=[], help="a picture that each text shows; several are possible")
    parser.add_argument("--raw", action="store_true", help="no chat template: the text follows the tokenizer's first tokens")
    continuations.add_arguments(parser)
    parser.add_argument("--temperature", type=float, default=0, help="0, the default: always the most likely token")
    parser.add_argument("--top-p", type=float, default=1,
                        help="draws from the likeliest tokens that together have this probability; default: 1")
    parser.add_argument("--seed", type=int, default=6198, help="seed of the draws; default: 6198")
    args, rest = continuations.parse(parser)
    return args, [f"--temperature={args.temperature}", f"--top_p={args.top_p}", f"--seed={args.seed}", *rest]


def check_texts(texts):
    for number, text in enumerate(texts, 1):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise Bad(f"text {number}: {text[:40]!r} is not UTF-8; expected UTF-8")


def with_pictures(args, pictures):
    """The texts, with an image token for each picture."""
    for number, text in enumerate(args.texts, 1):
        count = text.count(pictures.token)
        if count not in (0, len(args.image)):
            raise Bad(f"text {number}: {count} times {pictures.token}, and {len(args.image)} pictures; expected one for each "
                      f"picture, or no {pictures.token}")
        yield text if count else (pictures.token + "\n") * len(args.image) + text


def render(args, files, texts, pictures):
    """The output of the chat template for each text."""
    import chat_images
    from chat_template import ChatTemplate
    try:
        template = ChatTemplate(args.folder, files)
    except Bad as problem:
        raise Bad(f"{problem}; --raw does not use a chat template")
    if pictures:
        chat_images.suit(template, pictures.token)
    try:
        return [template.render([{"role": "user", "content": text}], add_generation_prompt=True) for text in texts]
    except Exception as problem:        # a template can raise any exception
        raise Bad(f"{args.folder}: its chat template: {problem}; --raw does not use a chat template")


def encode(args, files, pictures):
    """The prompt of each text. A template writes the tokens at the beginning of a text, so the tokenizer must not add them."""
    texts = list(with_pictures(args, pictures)) if pictures else args.texts
    written = texts if args.raw else render(args, files, texts, pictures)
    for number, text in enumerate(written, 1):
        prompt = {}
        if pictures:
            text, prompt["images"] = pictures.expand(text, args.image, f"text {number}")
        yield {"tokens": files.tokenizer.encode(text, add_special_tokens=args.raw).ids, **prompt}


def main():
    args, options = parse_arguments()
    check_texts(args.texts)
    files = continuations.load_files(args.folder)
    pictures = continuations.Pictures(args.folder, files, args.image) if args.image else None

    def show(prompt, tokens):
        if len(args.texts) > 1:
            print(f"> {args.texts[prompt]}")
        print(files.tokenizer.decode(tokens, skip_special_tokens=True), flush=True)

    try:
        sys.exit(continuations.run(args, options, list(encode(args, files, pictures)), pictures, show))
    except BrokenPipeError:
        raise Bad("stdout: closed by its reader")


if __name__ == "__main__":
    try:
        errors.run(main, "a model folder and pictures that can be read")
    except Bad as problem:
        sys.exit(f"error: {problem}")
