#!/usr/bin/env python3
"""Turns conversations into token shards with label masks, in the layout of OLMo-core and open-instruct, to fine-tune a model.

    python3 scripts/make_chat_shards.py --model FOLDER --output data/chat chats.jsonl more.jsonl.gz

FOLDER is the model as Hugging Face has it: its tokenizer.json and chat template are used (chat_template.jinja, or chat_template in
tokenizer_config.json). Each line of a file is a conversation in JSON, in one of these forms:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}     more keys reach the template
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}         ShareGPT
    {"prompt": "...", "completion": "..."}
    {"instruction": "...", "input": "...", "output": "..."}                                         Alpaca; input may be missing

Part 0 is token_ids_part_0000.npy (headerless uint16 or uint32), labels_mask_part_0000.npy (a byte per token: 1 if it is to be
learned) and token_ids_part_0000.csv.gz (a row per conversation: first token, token behind the last). Learned are the assistant's
answers with the token that ends a turn, but for messages with "weight": 0. A conversation without an answer is left out and named.
The same files give the same bytes, with any number of processes. fine-tune.yaml beside them is a configuration: FOLDER, these
files and the usual settings. Needs the packages tokenizers, jinja2 and numpy.
"""
import argparse, collections, datetime, json, os, re, shlex

import chat_template
import shards

np, Bad = shards.np, shards.Bad
process = argparse.Namespace()      # what work() uses, in each process

ROLES = {"system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
         "gpt": "assistant", "tool": "tool", "function": "tool", "observation": "tool", "ipython": "ipython"}
NAMED = 10                  # conversations without an answer that are named; the others are counted
MARK = "\ue000"             # a character for private use, to tell one text from another


# ---- conversations -----------------------------------------------------------------------------------------------------------

def read_message(message, number, where):
    """With the keys role and content, as templates expect it; other keys stay."""
    if not isinstance(message, dict):
        raise Bad(f"{where}: message {number} is {json.dumps(message)[:60]}; expected an object")
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise Bad(f"{where}: message {number} has the role {json.dumps(role)}; expected system, user, assistant or tool "
                  "(ShareGPT: \"from\" with human or gpt)")
    if not isinstance(content, str) and not message.get("tool_calls"):
        raise Bad(f"{where}: message {number} has the content {json.dumps(content)[:60]}; expected a text")
    if ROLES[role] == "assistant" and message.get("weight") not in (None, 0, 1):
        raise Bad(f"{where}: message {number} has the weight {json.dumps(message['weight'])[:60]}; expected 0 (not learned) or 1")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {**rest, "role": ROLES[role], "content": content}


def read_texts(entry, keys, where):
    for key in keys:
        if not isinstance(entry.get(key), str):
            raise Bad(f"{where}: \"{key}\" is {json.dumps(entry.get(key))[:60]}; expected a text")
    return [entry[key] for key in keys]


def read_entry(line, where):
    """The object of a line."""
    try:
        entry = json.loads(line)
    except RecursionError:
        raise Bad(f"{where}: nested too deeply; expected a conversation in JSON")
    except ValueError as problem:
        if line.lstrip().startswith(b"["):
            raise Bad(f"{where}: a list over many lines; expected an object per line: jq -c '.[]' FILE > FILE.jsonl")
        raise Bad(f"{where}: {getattr(problem, 'msg', problem)}; expected a conversation in JSON")
    if not isinstance(entry, dict):
        raise Bad(f"{where}: {json.dumps(entry)[:60]}; expected an object (of a list make lines: jq -c '.[]' FILE > FILE.jsonl)")
    return entry


def read_messages(entry, where):
    for key in ("messages", "conversations"):
        if key in entry:
            if not isinstance(entry[key], list) or not entry[key]:
                raise Bad(f"{where}: \"{key}\" is {json.dumps(entry[key])[:60]}; expected a list of messages")
            return [read_message(message, i, where) for i, message in enumerate(entry[key], 1)]
    if "completion" in entry:
        question, answer = read_texts(entry, ("prompt", "completion"), where)
    elif "output" in entry:
        question, answer = read_texts(entry, ("instruction", "output"), where)
        question += "\n\n" + read_texts(entry, ("input",), where)[0] if entry.get("input") else ""
    else:
        raise Bad(f"{where}: an object with {', '.join(entry) or 'nothing'}; expected messages, conversations, "
                  "prompt and completion, or instruction and output")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def read_conversation(line, where):
    """(messages, tools or None) of a line. A text "system" beside the messages comes before them."""
    entry = read_entry(line, where)
    messages = read_messages(entry, where)
    if entry.get("system"):
        system, = read_texts(entry, ("system",), where)
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        elif messages[0]["content"] != system:
            raise Bad(f"{where}: two system messages, one in \"system\" and another as the first of the messages; expected one")
    return messages, entry.get("tools")


# ---- labels ------------------------------------------------------------------------------------------------------------------

def render(messages, tools, where, add_generation_prompt=False):
    try:
        return process.template.render(messages, add_generation_prompt, tools)
    except Exception as problem:        # a template can fail in any way
        raise Bad(f"{where}: {type(problem).__name__} in the chat template, rendering the first {len(messages)} messages: "
                  f"{problem}; expected a conversation that it takes: change or remove this one, or change the template")


def check_template():
    """Templates that end a question with what an answer follows need no add_generation_prompt; others that ignore it are told.
    Some take no question without a system's message: what these do shows with the conversations."""
    question, answer = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": MARK}
    try:
        without, asked = (process.template.render([question], asks, None) for asks in (False, True))
        told = process.template.render([question, answer], False, None)
    except Exception:
        return
    front = told[len(asked):told.find(MARK)]
    if asked == without and told.startswith(asked) and front.strip():
        print(f"NOTE: the chat template of {process.model} adds nothing for add_generation_prompt: {front!r} in front of answers is "
              "learned too, and no program asks with it")


def find_begin(text, messages, i, tools, where):
    """Where answer i begins in the text of the whole conversation: behind what a model is given to answer."""
    prompt = render(messages[:i], tools, where, add_generation_prompt=True)
    if not text.startswith(prompt):
        at = len(os.path.commonprefix([text, prompt]))
        raise Bad(f"{where}: the chat template asks for message {i + 1} with {prompt[at:at + 40]!r}, but renders the conversation "
                  f"with {text[at:at + 40]!r} there; expected the same, so that its labels can be told: give the answer the form "
                  f"that the template asks for, or change the template (chat_template.jinja in {process.model})")
    return len(prompt)


def find_end(text, messages, i, tools, where):
    """Where answer i ends. Some templates render a turn differently when it is last (OLMo 3 ends the last with another token,
    Qwen 3 adds thoughts): then it ends with the special token right behind its content, and what stands behind the content is
    what stays the same when the content is another. If calls of tools stand there, it ends with the token that ends it when it is
    last, the first one ahead of the next message's content."""
    until = text if i + 1 == len(messages) else render(messages[:i + 1], tools, where)
    if text.startswith(until):
        return len(until)
    mark = lambda k: render([*messages[:k], {**messages[k], "content": MARK}, *messages[k + 1:]], tools, where)
    behind = len(text) - len(os.path.commonprefix([text[::-1], mark(i)[::-1]]))
    end_of_turn = process.special.match(text, behind)
    if end_of_turn:
        return end_of_turn.end()
    token = next((one for one in process.special_texts if until.rstrip().endswith(one)), None)
    at = text.find(token, behind, len(os.path.commonprefix([text, mark(i + 1)]))) if token else -1
    if at < 0:
        raise Bad(f"{where}: the chat template renders message {i + 1} differently when it is the last, and with no special token "
                  f"behind it otherwise; expected the same, so that its labels can be told: end the conversation there, or change "
                  f"the template (chat_template.jinja in {process.model})")
    return at + len(token)


def find_answers(text, messages, tools, where):
    """(begin, end) of each answer in the text. Space behind the token that ends a turn is not the answer's: no model writes it."""
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("weight") != 0:
            begin, end = find_begin(text, messages, i, tools, where), find_end(text, messages, i, tools, where)
            bare = text[begin:end].rstrip()
            yield begin, begin + len(bare) if bare.endswith(process.special_texts) else end


def find_spelled(messages):
    """The first special token in the content of each message that has any: in the text as a whole nothing tells it from the chat
    template's own, so that a user's message can end the turn. Beside calls of tools the content may be no text."""
    for message in messages:
        found = isinstance(message["content"], str) and process.special.search(message["content"])
        if found:
            yield found[0]


def make_document(line, where):
    """(ids, mask, special tokens that messages spell out) of a conversation. Its text becomes tokens as a whole, as it will be
    before a model; a token that begins in the prompt is not learned, as no model is asked for it."""
    messages, tools = read_conversation(line, where)
    text = render(messages, tools, where)
    tokens = shards.encode(process.tokenizer, text, where)
    ids, first = np.array(tokens.ids, process.dtype), np.array([begin for begin, _ in tokens.offsets], np.int64)
    mask = np.zeros(len(ids), np.bool_)
    for begin, end in find_answers(text, messages, tools, where):
        mask |= (first >= begin) & (first < end)
    return ids, mask, list(find_spelled(messages))


def start(model, now):
    process.model, process.tokenizer, process.template = model, shards.load_tokenizer(model), chat_template.ChatTemplate(model, now)
    process.dtype = shards.dtype_name(process.tokenizer)
    special = {token.content for token in process.tokenizer.get_added_tokens_decoder().values() if token.special}
    process.special_texts = tuple(sorted(special, key=len, reverse=True))
    process.special = re.compile("|".join(map(re.escape, process.special_texts)) or r"(?!)")


def work(items):
    """(path, line, ids, mask, special tokens that messages spell out) of each conversation."""
    return [(path, number, *make_document(line, f"{path}:{number}")) for path, number, line in items]


# ---- the run -----------------------------------------------------------------------------------------------------------------

def make_shards(args, now, output):
    """(the largest id, how many last answers end with each id)"""
    largest, ends, seen, learned = 0, collections.Counter(), collections.Counter(), collections.Counter()
    unlabelled, spelled = [], []
    batches = shards.read_batches(args.files, lambda path: True)
    with shards.Progress(args.files) as progress:
        for documents, position in shards.work_on(batches, work, start, (args.model, now), args.processes):
            for path, number, ids, mask, tokens in documents:
                seen[path] += 1
                learned[path] += int(mask.sum())
                if mask.any():
                    output.add(ids, mask, ())
                    largest = max(largest, int(ids.max()))
                    ends[int(ids[mask][-1])] += 1
                    spelled += [(f"{path}:{number}", token) for token in tokens]
                else:
                    unlabelled.append(f"{path}:{number}")
            progress.show(position, f"{sum(seen.values()):,} conversations")
    for path in args.files:
        if not learned[path]:
            raise Bad(f"{path}: none of its {seen[path]} conversations has an answer of the assistant; expected some")
    if unlabelled:
        more = f" and {len(unlabelled) - NAMED} more" if len(unlabelled) > NAMED else ""
        print(f"left out, without an answer of the assistant: {len(unlabelled)} ({', '.join(unlabelled[:NAMED])}{more})")
    if spelled:
        print(f"NOTE: messages that spell out a special token, and so become that token there: {len(spelled):,}, the first in "
              "{} ({}); where it is to be text, write it otherwise".format(*spelled[0]))
    return largest, ends


def check_vocabulary(model, largest):
    size = chat_template.read_json(os.path.join(model, "config.json")).get("vocab_size")
    if isinstance(size, int) and largest >= size:
        token = process.tokenizer.id_to_token(largest)
        raise Bad(f"{model}: its tokenizer makes the token {largest} ({token}), but its config.json has vocab_size {size}; "
                  "expected tokens that the model knows: use a chat template without others")


def print_ends(ends, eos):
    """What a tokenizer calls eos is what programs stop at, by default; a base model's is seldom what a chat template ends turns
    with. Other tokens, such as a full stop, stand inside answers, too: nothing can stop at those."""
    total, name = sum(ends.values()), process.tokenizer.id_to_token
    special = collections.Counter({end: n for end, n in ends.items() if end == eos or name(end) in process.special_texts})
    others = ends - special
    if others:
        end, count = others.most_common(1)[0]
        print(f"NOTE: of the last answers {sum(others.values()):,} of {total:,} end with no special token, {count:,} with "
              f"{name(end)} ({end}): nothing teaches the model to stop there; have the chat template put {{{{ eos_token }}}} "
              f"behind each answer (chat_template.jinja in {process.model})")
    end, count = special.most_common(1)[0] if special else (eos, 0)
    if end != eos:
        print(f"NOTE: of the last answers {ends[eos]:,} of {total:,} end with the eos token {name(eos)}, "
              f"{count:,} with {name(end)} ({end}): if programs are to stop there, name it eos_token in "
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
    """With the settings of a run without a configuration (model/config/source.c)."""
    command = f"./train {shlex.quote(configuration(args))} --save_folder=runs/chat"
    with open(configuration(args), "x", encoding="utf-8") as file:
        print(f"# {command}", f"load_path: {json.dumps(args.model)}", USUAL, *lines, sep="\n", file=file)
    if os.path.exists(os.path.join(args.model, "config.json")):         # else the folder has a tokenizer alone
        print(f"\nto fine-tune:  {command}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="a conversation in JSON per line; also .gz")
    parser.add_argument("--model", required=True, help="folder with tokenizer.json and chat template")
    shards.add_arguments(parser)
    args = parser.parse_args(arguments)
    shards.check_arguments(args)
    now = datetime.datetime.now()
    start(args.model, now)
    eos = process.tokenizer.token_to_id(process.template.tokens.get("eos_token", ""))
    if eos is None:
        raise Bad(f"{args.model}: tokenizer_config.json names no eos_token of tokenizer.json; expected "
                  """a line as {"eos_token": "<|endoftext|>"}""")
    check_template()

    with shards.Output(args, "token_ids_part_{:04d}", "labels_mask_part_{:04d}", process.dtype) as output:
        if os.path.exists(configuration(args)):
            raise Bad(f"{configuration(args)} is there already; delete it, or give another --output")
        largest, ends = make_shards(args, now, output)
        check_vocabulary(args.model, largest)
        output.publish()
    print(*output.statistics("conversations"), sep="\n")
    print_ends(ends, eos)
    model = {"eos_token_id": eos}
    data = {"memmap_dtype": process.dtype, "packing": "best_fit", "document_boundaries": "metadata"}
    write_configuration(args, shards.yaml_lines(output, model, data))


if __name__ == "__main__":
    shards.run(main)
