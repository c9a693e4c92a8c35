#!/usr/bin/env python3
"""Turns conversations into token shards with label masks, in the layout of OLMo-core and open-instruct, to fine-tune a model.

    python3 scripts/make_chat_shards.py --model FOLDER --output data/chat chats.jsonl more.jsonl.zst
    zcat chats/*.gz | python3 scripts/make_chat_shards.py --model FOLDER --output data/chat -

FOLDER is a Hugging Face folder; its tokenizer and chat template are used as transformers' apply_chat_template uses them. Each line
of a file, plain or compressed (gzip, bzip2, xz, zstd), is a conversation in JSON, in one of these forms:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}     the template gets all other keys
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}         ShareGPT
    {"prompt": "...", "completion": "..."}                                                          texts, or lists of messages
    {"instruction": "...", "input": "...", "output": "...", "history": [["...", "..."]]}            Alpaca; optional: input, history

Part 0 is token_ids_part_0000.npy (uint16 or uint32 without a header), labels_mask_part_0000.npy (a byte per token: 1 if it is to be
learned) and token_ids_part_0000.csv.gz (a row per document: first token, token after the last). The labels are the answers of the
assistant with the token that ends a turn, except in messages with "weight": 0 or "train": false. A conversation without an answer
is left out and named. A line that is not a conversation, or that the template refuses, ends the program; with --skip-bad it is left
out and counted. Notes say how many texts of messages the template leaves out. With --val-fraction, all documents of a conversation
are either for training or for validation. With --images conversations may show pictures, as <image> in questions with "image" or
"images" next to the messages, or as parts {"type": "image"}; each picture becomes as many tokens as it has rows of features, and
images_part_0000.npy says which pictures a part shows. The same files give the same bytes, with any number of processes.
fine-tune.yaml next to them is a configuration with FOLDER, these files and the usual settings. Needs the packages tokenizers,
jinja2 and numpy.
"""
import argparse, collections, datetime, json, os, re, shlex

import chat_images, chat_labels, chat_schema, chat_template, chat_written, errors, inputs, shards, tokenizer_files

np, Bad = shards.np, shards.Bad
process = argparse.Namespace()      # the state that work() uses, in each process

# the result for a conversation: documents: list of (ids, mask), with --images also numbers of pictures; ends: the last learned id
# of each document; notes: (key of NOTES, detail) of each finding; problem: a Bad or None
Result = collections.namedtuple("Result", "path line documents ends notes problem")

NOTES = {       # key: the finding, and advice; in the order of printing
    "spelled": ("messages or tools with the name of a special token, which becomes that token",
                "if the name is meant as text, spell it differently"),
    "lost": ("{detail} that the chat template leaves out", "the model does not learn what the template leaves out"),
    "unread": ('messages with the key "{detail}", which the chat template does not read', ""),
    "ignored": ('conversations with "{detail}", which the chat template does not read', ""),
    "renamed": ('messages with the role "{detail}", which the chat template does not know: they become messages of {role}', ""),
    "split": ("conversations with a document for each question",
              "the chat template renders the whole conversation differently than the prompts for its answers"),
    "open": ("answers that other messages follow and no special token ends",
             "nothing teaches the model to stop there; have the chat template put {{ eos_token }} after each answer"),
    "unasked": ("answers that do not begin as the template's prompts end",
                "the prompt ends with thoughts that these answers lack, or contains earlier messages in another form"),
    "begin": ("answers whose first characters are in one token with the end of the prompt", "that token is not learned"),
    "end": ("answers whose last characters are in one token with what follows", "that token is learned"),
}


# ---- a conversation ----------------------------------------------------------------------------------------------------------

def find_spelled(messages, tools):
    """For each message and each tool whose texts contain the name of a special token: the first such name. In the rendered text, it
    cannot be distinguished from the tokens that the chat template writes. So a user's message could end the turn."""
    for value in [*messages, *(tools or [])]:
        found = process.special.search("\n".join(chat_written.strings(value)))
        if found:
            yield found[0]


def check_vocabulary(ids, where):
    """Dies on tokens that only tokenizer_config.json names: these tokens get ids after all other ids, which no model knows."""
    largest, model = max(ids, default=0), process.model
    token = process.tokenizer.id_to_token(largest)
    if token in process.files.invented:
        raise Bad(f"{where}: the token {token}, which no file in {model} gives an id; expected a token of tokenizer.json. If the "
                  "chat template writes this token, name another token in tokenizer_config.json, or use another chat template")
    if isinstance(process.size, int) and largest >= process.size:
        raise Bad(f"{where}: the token {largest} ({token}), but config.json in {model} has vocab_size {process.size}; expected "
                  "tokens that the model knows. If the chat template writes this token, use another chat template")


def make_document(text, answers, document, where):
    """(ids, mask, notes) of a text with the positions of its answers: the document's text, or the text with images. The whole
    text is tokenized at once, as a model will see it. A token that begins in the prompt is not a label, because no model is
    asked for it."""
    tokens = shards.encode(process.tokenizer, text, where)
    check_vocabulary(tokens.ids, where)
    ids = np.array(tokens.ids, process.dtype)
    first, after = np.array(tokens.offsets, np.int64).reshape(-1, 2).T
    mask, notes = np.zeros(len(ids), np.bool_), []
    for begin, end in answers:
        mask |= (first >= begin) & (first < end)
        for place, key in ((begin, "begin"), (end, "end")):
            strips = key == "end" and text.endswith(process.files.added, begin, end)       # the token may also strip space
            if begin < end and not strips and ((first < place) & (after > place)).any():
                notes.append((key, ""))
    notes += [("lost", kind) for kind, count in document.lost.items() for _ in range(count)] + [("open", "")] * document.open
    notes += [("unasked", "")] * document.unasked
    return ids, mask, notes


def make_documents(path, number, line):
    """The Result for a conversation."""
    where, names = f"{path}:{number}", []
    try:
        if process.features:
            line, names = chat_images.take(line, where, process.features.token)
        talk = chat_schema.read_conversation(line, where, process.template.words)
        documents, notes = [], []
        if process.features:
            chat_images.check(talk, names, process.features.token, where)
        made = process.labels.documents(talk, where)
        for document in made:
            text, answers, shown = document.text, document.answers, []
            if process.features:
                text, answers, shown = chat_images.expand(document, process.features, names, document is made[-1], where)
            ids, mask, more = make_document(text, answers, document, where)
            if process.features and (ids == process.features.token_id).sum() != len(shown) * process.features.rows:
                raise Bad(f"{where}: the tokenizer writes {(ids == process.features.token_id).sum()} image tokens for {len(shown)} "
                          f"pictures of {process.features.rows}; expected a token {process.features.token} for each row")
            if mask.any():
                documents.append((ids, mask, shown) if process.features else (ids, mask))
            notes += more
    except Bad as problem:
        return Result(path, number, [], [], [], problem)
    except RecursionError:
        return Result(path, number, [], [], [], Bad(f"{where}: nested too deeply; expected a conversation in JSON"))
    if documents:
        notes += [("spelled", token) for token in find_spelled(talk.messages, talk.tools)
                  if not process.features or token != process.features.token]
        notes += [("renamed", role) for role in talk.renamed]
        notes += [("unread", key) for key in chat_written.find_unread(talk.messages, process.template.names)]
        notes += [("ignored", name) for name, value in talk.variables.items()
                  if value is not None and name not in process.template.variables]
        notes += [("split", "")] if len(documents) > 1 else []
    return Result(path, number, documents, [int(ids[mask][-1]) for ids, mask, *_ in documents], notes, None)


def start(model, now, images=None):
    files = shards.load_tokenizer(model)
    process.model, process.tokenizer, process.files = model, files.tokenizer, files
    config = tokenizer_files.read_json(os.path.join(model, "config.json"))
    process.size = config.get("text_config", config).get("vocab_size")
    process.template = chat_template.ChatTemplate(model, files, now)
    process.dtype = shards.dtype_name(process.tokenizer)
    process.special = re.compile("|".join(map(re.escape, files.special)) or r"(?!)")
    process.features = chat_images.Features(images, model, files.tokenizer) if images else None
    if process.features:
        chat_images.suit(process.template, process.features.token)
    process.labels = chat_labels.Labels(process.template, files.added, files.named.get("eos_token"))


def work(items):
    return [make_documents(*item) for item in items]


# ---- the run -----------------------------------------------------------------------------------------------------------------

class Notes:
    """How often each note was found, and its first position."""

    def __init__(self):
        self.count, self.first = collections.Counter(), {}

    def add(self, where, notes):
        for note in notes:
            key = note if note[0] != "spelled" else ("spelled", "")
            self.count[key] += 1
            self.first.setdefault(key, f"{where} ({note[1]})" if note[0] == "spelled" else where)

    def lines(self):
        for key, (what, advice) in NOTES.items():
            for note in sorted(one for one in self.count if one[0] == key):
                told = what.format(detail=errors.shortened(note[1], 100), role=chat_schema.ROLES.get(note[1]))
                yield f"NOTE: {told}: {self.count[note]:,}, the first in {self.first[note]}" + ("; " + advice if advice else "")


def check_template():
    """Warns of templates that ignore add_generation_prompt, unless they end every question with the opening of an answer.
    Templates that accept no question without a system message are not checked here; errors then appear with the
    conversations."""
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": chat_written.MARK}
    try:
        without, asked = (process.template.render([question], asks) for asks in (False, True))
        told = process.template.render([question, answer])
    except Exception:
        return
    front = told[len(asked):told.find(chat_written.MARK)]
    if asked == without and told.startswith(asked) and front.strip():
        print(f"NOTE: the chat template of {process.model} adds nothing for add_generation_prompt: so the model also learns "
              f"{front!r}, which the template writes before each answer, but prompts do not end with this text")


def make_shards(args, now, output):
    """(how many documents end with each id, whether conversations were split into several documents)"""
    ends, seen, learned, notes = collections.Counter(), collections.Counter(), set(), Notes()
    skipped, first_bad, unlabelled, named = errors.Skipped(args), {}, 0, []         # named: the first conversations without labels
    batches = inputs.read_batches(args.files, lambda path, first: True)
    with shards.progress_of(args.files) as progress:
        for results, position in shards.work_on(batches, work, start, (args.model, now, args.images), args.processes):
            for result in results:
                seen[result.path] += 1
                if result.problem:
                    skipped.add(result.problem)
                    first_bad.setdefault(result.path, result.problem)
                elif result.documents:
                    learned.add(result.path)
                else:
                    unlabelled += 1
                    named += [f"{result.path}:{result.line}"] if len(named) < errors.NAMED else []
                if result.documents:
                    output.add(result.documents, ())
                ends.update(result.ends)
                notes.add(f"{result.path}:{result.line}", result.notes)
            progress.show(position, f"{sum(seen.values()):,} conversations")
    for path in args.files:
        if path not in learned:
            why = f"; the first that is left out: {first_bad[path]}" if path in first_bad else ""
            raise Bad(f"{path}: none of its {seen[path]} conversations has an answer of the assistant; expected some{why}")
    if unlabelled:
        more = f" and {unlabelled - len(named)} more" if unlabelled > len(named) else ""
        print(f"left out, without an answer of the assistant: {unlabelled} ({', '.join(named)}{more})")
    if skipped.count:
        print(skipped)
    print(*notes.lines(), sep="\n", end="\n" if notes.count else "")
    return ends, bool(notes.count["split", ""])


def print_ends(ends, eos):
    """By default, programs stop at the token that the tokenizer calls eos. The eos of a base model seldom ends the turns of a
    chat template. Other tokens, such as a full stop, also occur inside answers, so no program can stop at them."""
    total, name = sum(ends.values()), process.tokenizer.id_to_token
    special = collections.Counter({end: n for end, n in ends.items() if end == eos or name(end) in process.files.added})
    others = ends - special
    if others:
        end, count = others.most_common(1)[0]
        print(f"NOTE: of the last answers {sum(others.values()):,} of {total:,} end with no special token, {count:,} with "
              f"{name(end)} ({end}): nothing teaches the model to stop there; have the chat template put {{{{ eos_token }}}} "
              f"after each answer (chat_template.jinja in {process.model})")
    end, count = special.most_common(1)[0] if special else (eos, 0)
    if end != eos:
        print(f"NOTE: of the last answers {ends[eos]:,} of {total:,} end with the eos token {name(eos)}, "
              f"{count:,} with {name(end)} ({end}): if programs should stop at the second token, make it the eos_token in "
              f"{process.model}/tokenizer_config.json")


USUAL = """\
max_duration: 1ep
global_train_batch_size: 32             # sequences of max_sequence_length
device_train_microbatch_size: 1
max_grad_norm: 1.0
optimizer: {learning_rate: 2.0e-5, eps: 1.0e-8, weight_decay: 0}      # with --lora.rank=16 (adapters): 2.0e-4
scheduler: {warmup_fraction: 0.03, warmup_min_lr: 0, alpha_f: 0}
save_interval: 500
save_num_checkpoints_to_keep: 1"""


def configuration(args):
    return os.path.join(args.output, "fine-tune.yaml")


def write_configuration(args, lines):
    """Writes a configuration with the settings of a run without a configuration file (model/config/load_folder.c)."""
    command = f"./train {shlex.quote(configuration(args))} --save_folder=runs/chat"
    with open(configuration(args), "x", encoding="utf-8") as file:
        print(f"# {command}", f"load_path: {json.dumps(args.model)}", USUAL, *lines, sep="\n", file=file)
    if os.path.exists(os.path.join(args.model, "config.json")):         # otherwise the folder has only a tokenizer
        print(f"\nto fine-tune:  {command}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="a conversation in JSON per line; also compressed; - for standard input")
    parser.add_argument("--model", required=True, help="folder with tokenizer.json and chat template")
    parser.add_argument("--images", metavar="FEATURES",
                        help="folder that make_image_features.py wrote for the pictures of these conversations")
    shards.add_arguments(parser)
    args = parser.parse_args(arguments)
    shards.check_arguments(args)
    now = datetime.datetime.now()
    start(args.model, now, args.images)
    end = process.files.named.get("eos_token", "")
    eos = process.tokenizer.token_to_id(end)
    if eos is None or end in process.files.invented:
        raise Bad(f"{args.model}: tokenizer_config.json names no eos_token of tokenizer.json; expected "
                  """a line as {"eos_token": "<|endoftext|>"}""")
    check_template()

    with shards.Output(args, "token_ids_part_{:04d}", "labels_mask_part_{:04d}", process.dtype, process.features) as output:
        if os.path.exists(configuration(args)):
            raise Bad(f"{configuration(args)} exists already; delete it, or give another --output")
        ends, split = make_shards(args, now, output)
        output.publish()
    print(*output.statistics("documents" if split else "conversations"), sep="\n")
    print_ends(ends, eos)
    model = {"eos_token_id": eos}
    data = {"memmap_dtype": process.dtype, "packing": "best_fit", "document_boundaries": "metadata"}
    write_configuration(args, shards.yaml_lines(output, model, data))


if __name__ == "__main__":
    shards.run(main)
