#!/usr/bin/env python3
"""Turns text into token shards: headerless little-endian uint16 or uint32 files, as `dolma tokens` writes them.

    python3 scripts/make_shards.py --tokenizer tokenizer.json --eos 50279 --output data/mine docs/*.txt more.jsonl.gz

A .txt file is one document; a .jsonl file has one in the field "text" of each line; both may be compressed (.gz).
Texts are stripped, empty ones skipped, and the eos token ends each document; no other special token is added. Next to
part-00000.npy, part-00000.csv.gz has a row per document: first token, token behind the last, id, file, line (from 1).
Needs the packages tokenizers and numpy. NOTE: tokenize.py as a name would hide Python's own module of that name.
"""
import argparse, csv, glob, gzip, json, os, sys

import numpy as np
from tokenizers import Tokenizer


def documents(path):
    """(id, text, line) of every document of a file."""
    name = path.removesuffix(".gz")
    with (gzip.open if name != path else open)(path, "rt", encoding="utf-8") as file:
        if name.endswith(".jsonl"):
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                except ValueError as error:
                    sys.exit(f"error: {path}:{number}: {error}")
                if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
                    sys.exit(f"error: {path}:{number}: expected an object with a string \"text\"; found {line.strip()[:80]}")
                yield str(entry.get("id", number)), entry["text"], number
        elif name.endswith(".txt"):
            yield os.path.basename(name), file.read(), 1
        else:
            sys.exit(f"error: {path}: neither .txt nor .jsonl (nor one of them with .gz)")


def readable(path):
    try:
        yield from documents(path)
    except (UnicodeDecodeError, gzip.BadGzipFile) as error:
        sys.exit(f"error: {path}: {error}")


def write_shard(folder, number, dtype, tokens, rows):
    base = os.path.join(folder, f"part-{number:05d}")
    np.concatenate(tokens).astype(dtype).tofile(base + ".npy")
    with gzip.open(base + ".csv.gz", "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    print(f"{base}.npy: {rows[-1][1]} tokens, {len(rows)} documents")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help=".txt, .jsonl, .txt.gz or .jsonl.gz")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of the model")
    parser.add_argument("--eos", required=True, type=int, help="id that ends a document (model.eos_token_id)")
    parser.add_argument("--output", required=True, help="folder for the shards")
    parser.add_argument("--shard-tokens", type=int, default=2**28, help="begin a new shard after so many tokens")
    args = parser.parse_args()

    for path in [args.tokenizer, *args.files]:
        if not os.path.isfile(path):
            sys.exit(f"error: {path}: no such file")
    if glob.glob(os.path.join(args.output, "part-*.npy")):
        sys.exit(f"error: {args.output} has shards already; delete them, or give another --output")
    tokenizer = Tokenizer.from_file(args.tokenizer)
    vocab = max(tokenizer.get_vocab().values()) + 1
    if tokenizer.id_to_token(args.eos) is None:
        sys.exit(f"error: --eos {args.eos} is no id of {args.tokenizer}, whose ids are below {vocab}")
    dtype = "<u2" if vocab <= 2**16 else "<u4"
    os.makedirs(args.output, exist_ok=True)

    tokens, rows, end, shards = [], [], 0, 0
    for path in args.files:
        for name, text, line in readable(path):
            ids = tokenizer.encode(text.strip(), add_special_tokens=False).ids
            if not ids:
                continue
            ids += [args.eos] if ids[-1] != args.eos else []
            tokens.append(np.array(ids, dtype=dtype))
            rows.append((end, end + len(ids), name, path, line))
            end += len(ids)
            if end >= args.shard_tokens:
                write_shard(args.output, shards, dtype, tokens, rows)
                tokens, rows, end, shards = [], [], 0, shards + 1
    if rows:
        write_shard(args.output, shards, dtype, tokens, rows)
    elif shards == 0:
        sys.exit("error: no document with text in these files")
    print(f"data.memmap_dtype: {'uint16' if dtype == '<u2' else 'uint32'}, model.eos_token_id: {args.eos}, "
          f"ids below {vocab}")


if __name__ == "__main__":
    main()
