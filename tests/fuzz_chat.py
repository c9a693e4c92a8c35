#!/usr/bin/env python3
"""Sends odd lines of conversations through scripts/make_chat_shards.py: valid conversations in which one or two values are
changed.

    python3 tests/fuzz_chat.py COUNT [FIRST [MODEL ...]]

MODEL is a folder with tokenizer and chat template; the default is two of tests/golden/chat. Each line must be refused with an
error that names it, or accepted. In an accepted line, labels must be words of answers, and the text must come from the messages.
If transformers is installed, the tokens must be those of its apply_chat_template, wherever it accepts the messages and tools
unchanged. The first violation ends the script.
"""
import collections, copy, importlib.util, json, os, random, re, sys, tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(TOP, "scripts"), os.path.join(TOP, "tests")]
import chat_written, make_chat_shards
from random_chat import Chat, json_arguments, nulls

WORD = re.compile(r"w\d+w")
ODD = (None, True, 0, -1.5, "", " ", "x", "{}", "[]", '{"a": 1}', "null", [], {}, [None], ["x"], [[]], {"a": None},
       {"type": "text"}, [{"type": "text", "text": "part"}], "\ud83d", "<think>x</think>y", "</think>", 10**30, "😀\0")
KEYS = ("role", "content", "tool_calls", "function", "name", "arguments", "reasoning", "thinking", "weight", "train", "from",
        "value", "id", "tools", "messages", "conversations", "prompt", "completion", "system", "functions", "function_call", "odd")


def places(value, at=()):
    """Yields the paths to all values inside a JSON value."""
    for key, one in (value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()):
        yield (*at, key)
        yield from places(one, (*at, key))


def change(entry, r):
    """Changes one value: deletes it, replaces it by its JSON text, copies it to another key, or replaces it by an odd value."""
    *way, key = r.choice(list(places(entry)))
    holder = entry
    for step in way:
        holder = holder[step]
    how = r.randrange(5)
    if how == 0:
        del holder[key]
    elif how == 1:
        holder[key] = json.dumps(holder[key])
    elif how == 2 and isinstance(holder, dict):
        holder[r.choice(KEYS)] = copy.deepcopy(holder[key])
    elif how == 3 and isinstance(holder, dict):
        holder[r.choice(KEYS)] = r.choice(ODD)
    else:
        holder[key] = copy.deepcopy(r.choice(ODD))


class Fuzz:
    def __init__(self, folder):
        make_chat_shards.start(folder, None)
        self.tokenizer, self.peer = make_chat_shards.process.tokenizer, None
        if importlib.util.find_spec("transformers"):
            from transformers import AutoTokenizer
            self.peer = AutoTokenizer.from_pretrained(folder)

    def line(self, number):
        r = random.Random(number)
        entry = Chat(number, {"system", "tools", "calls", "thoughts", "lists"}).conversation()
        entry["messages"] = [self.say_otherwise(message, r) for message in entry["messages"]]
        for _ in range(r.choice((0, 1, 1, 2))):
            if entry:
                change(entry, r)
        return entry

    @staticmethod
    def say_otherwise(message, r):
        """Returns an equal message: keys that are null, empty content left out, or arguments as JSON text."""
        message = json_arguments(message) if r.random() < 0.1 else message
        if message["content"] == "" and r.random() < 0.7:
            without = {key: message[key] for key in message if key != "content"}
            message = {**message, "content": None} if r.random() < 0.5 else without
        return nulls(message, r) if r.random() < 0.3 else message

    def ask(self, entry, count):
        """Returns the tokens by transformers, or None if transformers fails."""
        messages, tools = entry["messages"][:count], entry.get("tools")
        try:
            return self.peer.apply_chat_template(messages, tools=tools)["input_ids"]
        except Exception:
            return None

    def try_line(self, number):
        """Returns "refused" or "taken"; fails with an assertion if the result is wrong."""
        entry = self.line(number)
        result = make_chat_shards.make_documents("x", 1, json.dumps(entry).encode())
        if result.problem:
            assert str(result.problem).startswith("x:1: "), str(result.problem)
            return "refused"
        for ids, mask in result.documents:
            self.check(entry, ids.tolist(), mask.tolist())
        self.compare(entry, result.documents)
        return "taken"

    def check(self, entry, ids, mask):
        text, said = self.tokenizer.decode(ids, skip_special_tokens=False), "\n".join(chat_written.strings(entry))
        assert text.count("None") <= said.count("None"), text
        answers = set(WORD.findall(json.dumps([message for message in self.messages(entry) if self.is_answer(message)])))
        for i, on in enumerate(mask):
            token = self.tokenizer.id_to_token(ids[i])
            ends = i + 1 == len(mask) or not mask[i + 1]
            assert not on or ends or token not in make_chat_shards.process.files.special or token in said, text
        learned = set(WORD.findall(self.tokenizer.decode([id for id, on in zip(ids, mask) if on], skip_special_tokens=False)))
        assert learned <= answers, learned - answers

    @staticmethod
    def messages(entry):
        for key in ("messages", "conversations"):
            if entry.get(key) is not None:
                return entry[key]
        return [{"role": "assistant", "content": entry}]

    @staticmethod
    def is_answer(message):
        return message.get("role", message.get("from")) in ("assistant", "gpt", "function_call", "tool_call")

    @staticmethod
    def is_plain(entry):
        """Whether transformers would accept the line as it is: messages whose roles all templates know, lists of objects, and
        arguments that are objects."""
        objects = lambda value: value is None or isinstance(value, list) and all(isinstance(one, dict) for one in value)
        if set(entry) - {"messages", "tools"} or not objects(entry.get("messages")) or not objects(entry.get("tools")):
            return False
        return all(message.get("role") in ("system", "user", "assistant", "tool") and not {"from", "value"} & set(message)
                   and not message.get("function_call") and objects(message.get("tool_calls"))
                   and not any(isinstance((call.get("function") or call).get("arguments"), str)
                               for call in message.get("tool_calls") or []) for message in entry.get("messages") or [])

    def compare(self, entry, documents):
        if self.peer and documents and self.is_plain(entry):
            possible = [self.ask(entry, count) for count in range(1, len(entry["messages"]) + 1)]
            for ids, _ in documents:
                assert ids.tolist() in possible, self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def run(self, count, first):
        counts = collections.Counter()
        for number in range(first, first + count):
            try:
                counts[self.try_line(number)] += 1
            except Exception as problem:
                line = json.dumps(self.line(number))
                raise AssertionError(f"line {number}: {line}: {type(problem).__name__}: {problem}") from problem
        return counts


def main():
    from test_chat_random import make_folder
    count, first, *models = int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0]), *sys.argv[3:]
    with tempfile.TemporaryDirectory() as top:
        for model in models or [make_folder(top, name)[0] for name in ("qwen3", "chatml")]:
            counts = Fuzz(model).run(count, first)
            print(f"{os.path.basename(model)}: {count} lines of conversations, {counts['taken']} taken, "
                  f"{counts['refused']} refused")


if __name__ == "__main__":
    main()
