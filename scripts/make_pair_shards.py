#!/usr/bin/env python3
"""Turns preference pairs into token shards with label masks, for DPO and related losses (preference.loss).

    python3 scripts/make_pair_shards.py --model FOLDER --output data/pairs pairs.jsonl

FOLDER is a Hugging Face folder; its tokenizer and chat template are used as in make_chat_shards.py. Each line of a file, plain or
compressed, is a pair in JSON, in one of these forms:

    {"prompt": "...", "chosen": "...", "rejected": "..."}                       TRL, explicit prompt: texts, or lists of messages
    {"chosen": [messages], "rejected": [messages]}                              TRL's implicit prompt, open-instruct, UltraFeedback
    {"context": [messages], "completions": [{"rank": 0, "completion": [messages]}, {"rank": 1, ...}]}       NeMo

An implicit prompt is the longest common prefix of the messages of both sides. A pair becomes two documents, first the chosen side,
then the rejected side; each is the prompt with an answer. The labels are the messages after the prompt or, with --labels all, all
answers of the assistant. A side of more than --max-length tokens keeps its start. Pairs of which a side has no label or no answer are
left out. Pairs whose prompts differ are errors. Notes at the end count such pairs, equal sides, empty answers, and pairs whose
scores are equal. preference.yaml next to the shards is a configuration with FOLDER, these files and the usual settings. Needs the
packages tokenizers, jinja2 and numpy.
"""
import argparse, collections, datetime, json, os, shlex

import chat_schema, errors, inputs, make_chat_shards, shards
from errors import Bad
from make_chat_shards import process

NOTES = {       # key of a finding: what it is, in the order of printing
    "unanswered": "pairs of which a side does not end with an answer of the assistant: left out",
    "unlabelled": "pairs of which a side has no label within --max-length tokens: left out",
    "cut": "pairs of which a side is longer than --max-length tokens: the rest is cut off",
    "empty": "pairs of which an answer is empty",
    "equal": "pairs whose sides are equal: nothing is learned from them",
    "tie": "pairs whose scores are equal",
}
# sides: [(ids, mask), (ids, mask)], or [] if the pair is left out; notes: keys of NOTES; problem: a Bad or None
Result = collections.namedtuple("Result", "path line sides notes problem")


# ---- forms of lines ----------------------------------------------------------------------------------------------------------

def as_messages(value, role, where, key):
    if isinstance(value, str):
        return [chat_schema.say(role, value)]
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise Bad(f"{where}: \"{key}\" is {chat_schema.shown(value)}; expected a text or a list of messages")
    return value


def role_of(message):
    return chat_schema.ROLES.get(str(message.get("role", message.get("from"))))


def read_ranked(entry, where):
    """NeMo's form as chosen and rejected: the completions of the lowest and the highest rank."""
    completions = chat_schema.read_list(entry, "completions", where)
    if len(completions) != 2 or not all(isinstance(one, dict) and {"rank", "completion"} <= one.keys() for one in completions):
        raise Bad(f"{where}: \"completions\" is {chat_schema.shown(completions)}; expected two objects with rank and completion")
    best, worst = sorted(completions, key=lambda one: one["rank"])
    return {**entry, "prompt": entry.get("context"), "chosen": best["completion"], "rejected": worst["completion"],
            **({"score_chosen": 0, "score_rejected": 0} if best["rank"] == worst["rank"] else {})}


def read_pair(line, where):
    """(entry, prompt, chosen, rejected): the last three are lists of messages."""
    entry = chat_schema.read_entry(line, where)
    if "completions" in entry:
        entry = read_ranked(entry, where)
    for key in ("chosen", "rejected"):
        if key not in entry:
            raise Bad(f"{where}: an object with {', '.join(entry)[:200] or 'nothing'}; expected prompt, chosen and rejected, or "
                      "context and completions")
    chosen, rejected = (as_messages(entry[key], "assistant", where, key) for key in ("chosen", "rejected"))
    whole = any(role_of(one) in ("user", "system") for one in chosen[:1] + rejected[:1])
    if entry.get("prompt") is not None and not whole:
        return entry, as_messages(entry["prompt"], "user", where, "prompt"), chosen, rejected
    if not whole:
        raise Bad(f"{where}: no \"prompt\", and the sides are {'texts' if isinstance(entry['chosen'], str) else 'answers alone'}; "
                  "expected a prompt, or sides that begin with the same question")
    same = 0                # the last message is never part of the prompt
    while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
        same += 1
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if role_of(side[same]) != "assistant" == role_of(side[-1]) or not same:
            raise Bad(f"{where}: the prompts of the two sides differ: message {same + 1} of \"{name}\" is "
                      f"{chat_schema.shown(side[same])}; expected an answer of the assistant after a common prompt")
    return entry, chosen[:same], chosen[same:], rejected[same:]


# ---- a pair ------------------------------------------------------------------------------------------------------------------

def make_side(path, number, entry, prompt, answer):
    """(ids, mask) of a side, or a Bad."""
    context = prompt if process.labels_all else [{**one, "weight": 0} if role_of(one) == "assistant" else one for one in prompt]
    keys = ("system", "tools", "functions", "documents", "chat_template_kwargs")
    talk = {"messages": context + answer, **{key: entry[key] for key in keys if key in entry}}
    result = make_chat_shards.make_documents(path, number, json.dumps(talk).encode())
    if result.problem:
        raise result.problem
    if len(result.documents) > 1:
        raise Bad(f"{path}:{number}: the chat template makes {len(result.documents)} documents of a side; expected one: use "
                  "--labels last")
    return result.documents[0] if result.documents else None


def text_of(messages):
    return "".join(str(one.get("content", one.get("value")) or "") + str(one.get("tool_calls") or "") for one in messages).strip()


def make_pair(path, number, line):
    where, notes = f"{path}:{number}", []
    try:
        entry, prompt, chosen, rejected = read_pair(line, where)
        if not all(side and role_of(side[-1]) == "assistant" for side in (chosen, rejected)):
            return Result(path, number, [], ["unanswered"], None)
        notes += ["empty"] if not all(map(text_of, (chosen, rejected))) else []
        sides = [make_side(path, number, entry, prompt, side) for side in (chosen, rejected)]
    except Bad as problem:
        return Result(path, number, [], [], problem)
    most = process.max_length
    notes += ["cut"] if any(side and len(side[0]) > most for side in sides) else []
    sides = [side and (side[0][:most], side[1][:most]) for side in sides]
    if not all(side and side[1][1:].any() for side in sides):
        return Result(path, number, [], [*notes, "unlabelled"], None)
    notes += ["equal"] if sides[0][0].tobytes() == sides[1][0].tobytes() else []
    scores = entry.get("score_chosen"), entry.get("score_rejected")
    notes += ["tie"] if None not in scores and scores[0] == scores[1] else []
    return Result(path, number, sides, notes, None)


def start(model, now, max_length, labels_all):
    make_chat_shards.start(model, now)
    process.max_length, process.labels_all = max_length, labels_all


def work(items):
    return [make_pair(*item) for item in items]


# ---- the run -----------------------------------------------------------------------------------------------------------------

def make_shards(args, now, output):
    count, first, skipped, pairs = collections.Counter(), {}, errors.Skipped(args), 0
    batches = inputs.read_batches(args.files, lambda path, head: True)
    arguments = args.model, now, args.max_length, args.labels == "all"
    with shards.progress_of(args.files) as progress:
        for results, position in shards.work_on(batches, work, start, arguments, args.processes):
            for result in results:
                if result.problem:
                    skipped.add(result.problem)
                elif result.sides:
                    output.add(result.sides, (), together=True)
                    pairs += 1
                for note in result.notes:
                    count[note] += 1
                    first.setdefault(note, f"{result.path}:{result.line}")
            progress.show(position, f"{pairs:,} pairs")
    if skipped.count:
        print(skipped)
    for note, what in NOTES.items():
        if count[note]:
            print(f"NOTE: {what}: {count[note]:,}, the first in {first[note]}")
    if not pairs:
        raise Bad("no pair is left; expected some with an answer on both sides")


# Loss, learning rate and schedule of Tulu-3-8B. With scales of a micro-batch, policy and reference measure FP8 scales in the same way.
# BF16 master weights are rounded stochastically. At this learning rate, the noise of rounding is larger than the updates.
USUAL = """\
preference: {loss: dpo_norm}            # beta 5
max_duration: 1ep
global_train_batch_size: 32             # sequences of max_sequence_length, each with several pairs
device_train_microbatch_size: 1
max_grad_norm: 1.0
optimizer: {learning_rate: 5.0e-7, eps: 1.0e-8, weight_decay: 0}      # with --lora.rank=16 (adapters): 1.0e-5
scheduler: {name: linear_with_warmup, warmup_fraction: 0.1, warmup_min_lr: 0, alpha_f: 0}
fp8: {scales: microbatch}
format: {master: f32}                   # bf16: two bytes less per parameter, but noise in small updates
save_interval: 500
save_num_checkpoints_to_keep: 1"""


def write_configuration(args, lines):
    path = os.path.join(args.output, "preference.yaml")
    command = f"./train {shlex.quote(path)} --save_folder=runs/pairs"
    at = lines.index("  - label: val") + 1 if "  - label: val" in lines else None
    lines = lines if at is None else [*lines[:at], "    type: preference", *lines[at:]]
    with open(path, "x", encoding="utf-8") as file:
        print(f"# {command}", f"load_path: {json.dumps(args.model)}", USUAL, *lines, sep="\n", file=file)
    print(f"\nto train:  {command}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="a pair in JSON per line; also compressed; - for standard input")
    parser.add_argument("--model", required=True, help="folder with tokenizer.json and chat template")
    parser.add_argument("--labels", choices=("last", "all"), default="last",
                        help="last: the messages after the prompt; all: also earlier answers")
    parser.add_argument("--max-length", type=int, default=2048, help="maximum number of tokens of a side, prompt included")
    shards.add_arguments(parser)
    args = parser.parse_args(arguments)
    shards.check_arguments(args)
    if args.max_length < 2:
        raise Bad(f"--max-length={args.max_length}: expected at least 2")
    now = datetime.datetime.now()
    start(args.model, now, args.max_length, args.labels == "all")
    eos = process.tokenizer.token_to_id(process.files.named.get("eos_token", ""))
    if eos is None:
        raise Bad(f"{args.model}: tokenizer_config.json names no eos_token of tokenizer.json; expected one")
    with shards.Output(args, "token_ids_part_{:04d}", "labels_mask_part_{:04d}", process.dtype) as output:
        if os.path.exists(os.path.join(args.output, "preference.yaml")):
            raise Bad(f"{args.output}/preference.yaml exists already; delete it, or give another --output")
        make_shards(args, now, output)
        output.publish()
    print(*output.statistics("documents, two for each pair,"), sep="\n")
    model = {"eos_token_id": eos, "max_sequence_length": 2 * args.max_length}
    data = {"memmap_dtype": process.dtype, "packing": "best_fit", "document_boundaries": "metadata"}
    write_configuration(args, shards.yaml_lines(output, model, data))


if __name__ == "__main__":
    shards.run(main)
