#!/usr/bin/env python3
"""Turns text into token shards: little-endian uint16 or uint32 files without a header, in the format of `dolma tokens`.

    python3 scripts/make_shards.py --tokenizer tokenizer.json --eos 50279 --output data/mine docs/*.txt more.jsonl.gz

A .jsonl, .ndjson or .json file has a document in the field "text" of each line. Any other file of text is one document. All may be
compressed (gzip, bzip2, xz, zstd). "-" is standard input. If standard input or a pipe begins with {, it has lines of JSON;
otherwise it is one text. With --skip-bad a line or a file that is an error is left out and counted. Texts are stripped and empty
ones skipped. The eos token ends each document; no other special token is added. A special token spelled out within a text, such as
<|endoftext|>, is text. A text that ends with eos spelled out gets no second one. Next to part-00000.npy, part-00000.csv.gz has a
row per document: first token, token after the last, id, file, line (from 1). The same files give the same bytes, with any number of
processes. The script ends with the lines that a configuration needs. Needs the packages tokenizers and numpy. NOTE: the name
tokenize.py would hide Python's module of that name.
"""
import argparse, codecs, json, os

import errors, inputs, shards

np, Bad = shards.np, shards.Bad
process = argparse.Namespace()      # the state that work() uses, in each process


def has_lines(path, first):
    """first: the first bytes of the file, which show the kind if there is no name."""
    if os.path.isfile(path):
        return inputs.uncompressed(path).lower().endswith((".jsonl", ".ndjson", ".json"))
    return first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")


def read_line(path, number, line):
    """(id, text) of a line of JSON."""
    try:
        entry = json.loads(line)
    except RecursionError:
        raise Bad(f"{path}:{number}: nested too deeply; expected a line of JSON")
    except ValueError as problem:
        raise Bad(f"{path}:{number}: {getattr(problem, 'msg', problem)}; expected a line of JSON")
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise Bad(f"{path}:{number}: {json.dumps(entry)[:80]}; expected an object with a string \"text\"")
    return str(entry.get("id", number)), entry["text"]


def read_file(path, data):
    """(id, text) of a whole file."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise Bad(f"{path}: {problem}; expected text in UTF-8")
    if "\0" in text:
        raise Bad(f"{path}: byte {text.index(chr(0))} is 0; expected text")
    return inputs.uncompressed(os.path.basename(path)), text.replace("\r\n", "\n")


def load_tokenizer(path):
    """Loads a tokenizer that treats the name of a special token in a text as ordinary text, so that a text about eos does not
    end there."""
    tokenizer = shards.load_tokenizer(path).tokenizer
    if not hasattr(tokenizer, "encode_special_tokens"):
        raise Bad("this version of tokenizers turns the name of a special token in a text into this token; expected "
                  "tokenizers 0.15.2 or newer: pip install --upgrade tokenizers")
    tokenizer.encode_special_tokens = True
    return tokenizer


def start(tokenizer, eos):
    process.tokenizer, process.eos = load_tokenizer(tokenizer), eos
    process.dtype = shards.dtype_name(process.tokenizer)
    process.end = process.tokenizer.id_to_token(eos)
    process.tokenizer.add_special_tokens([process.end])     # some tokenizer.json do not mark it as special


def make_document(path, number, data):
    """(ids, columns of the row); number: the number of a line; 0: a whole file."""
    name, text = read_line(path, number, data) if number else read_file(path, data)
    where = f"{path}:{number}" if number else path
    ids = shards.encode(process.tokenizer, text.strip().removesuffix(process.end), where).ids
    return np.array([*ids, process.eos], process.dtype), (name, path, number or 1)


def work(items):
    """(ids, columns of the row) for each item, or the item's error."""
    documents = []
    for item in items:
        try:
            documents.append(make_document(*item))
        except Bad as problem:
            documents.append(problem)
    return documents


def find_eos(tokenizer, eos, path):
    """The id for --eos, which may be an id or the text of a token."""
    number = int(eos) if eos.isascii() and eos.isdigit() else tokenizer.token_to_id(eos)
    size = shards.vocabulary_size(tokenizer)
    if number is None or number >= size or tokenizer.id_to_token(number) is None:
        raise Bad(f"--eos {eos} is not a token of {path}; expected the text of one, or an id below {size}")
    return number


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help=".jsonl, .ndjson, .json, or any text; also compressed; - for standard input")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json of the model, or its folder")
    parser.add_argument("--eos", required=True, help="token that ends a document, by text or id (model.eos_token_id)")
    shards.add_arguments(parser)
    args = parser.parse_args(arguments)
    shards.check_arguments(args)
    tokenizer = load_tokenizer(args.tokenizer)
    eos = find_eos(tokenizer, args.eos, args.tokenizer)

    with shards.Output(args, "part-{:05d}", None, shards.dtype_name(tokenizer)) as output:
        batches, skipped = inputs.read_batches(args.files, has_lines), errors.Skipped(args)
        with shards.progress_of(args.files) as progress:
            for documents, position in shards.work_on(batches, work, start, (args.tokenizer, eos), args.processes):
                for document in documents:
                    if isinstance(document, Bad):
                        skipped.add(document)
                    elif len(document[0]) > 1:          # the document has more tokens than eos
                        output.add([(document[0], None)], document[1])
                progress.show(position, f"{output.train.documents:,} documents")
        if not output.train.documents + output.val.documents:
            raise Bad("no document with text in these files; expected one")
        output.publish()
    if skipped.count:
        print(skipped)
    print(*output.statistics("documents"), sep="\n")
    size = shards.vocabulary_size(tokenizer)
    padded = {"embedding_size": -(-size // 128) * 128} if size % 128 else {}
    shards.print_yaml(output, {"vocab_size": size, **padded, "eos_token_id": eos}, {"memmap_dtype": shards.dtype_name(tokenizer)})


if __name__ == "__main__":
    shards.run(main)
