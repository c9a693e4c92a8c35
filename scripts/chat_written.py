"""Compares the output of a chat template with the conversation: which texts of the messages it leaves out, and what it adds,
such as Python's spelling of a list. The functions put marks into the texts, because a word may occur twice."""
import json, re

from chat_schema import PARTS, THOUGHTS

MARK, OTHER = "\ue000", "\ue001"        # private-use characters that distinguish one text from another
NUMBERED = re.compile("\ue002(\\d+)\ue003")
# keys whose loss the marks show, or whose loss does not matter
READ = ("role", "content", "tool_calls", "tool_call_id", *THOUGHTS)


def strings(value):
    """The texts in a value of JSON, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for one in ([*value, *value.values()] if isinstance(value, dict) else value):
            yield from strings(one)


def containers(value):
    """The objects and lists in a value of JSON, including the value itself."""
    if isinstance(value, (dict, list)):
        yield value
        for one in (value.values() if isinstance(value, dict) else value):
            yield from containers(one)


def functions(message):
    """The function of each call: an object with name and arguments."""
    return [call if call.get("function") is None else call["function"] for call in message.get("tool_calls") or []]


def change_calls(message, change):
    """A copy of the message in which change(function) replaces each function."""
    calls = [change(call) if call.get("function") is None else {**call, "function": change(call["function"])}
             for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def altered(message, mark):
    """The message, with a mark in place of each of its texts."""
    changed = {**message, "content": mark, **{name: mark for name in THOUGHTS if name in message}}
    return change_calls(changed, lambda function: {**function, "name": mark}) if message.get("tool_calls") else changed


# ---- what is left out --------------------------------------------------------------------------------------------------------

class Marks:
    """Numbered marks. kinds: for each mark (number of the message, kind of the text, as a plural noun)."""

    def __init__(self):
        self.kinds = []

    def put(self, text, at, i, kind):
        self.kinds.append((i, kind))
        return f"{text[:at]}\ue002{len(self.kinds) - 1}\ue003{text[at:]}"

    def in_content(self, text, i, kind):
        """Puts a mark in the middle of the text, where it changes beginning and end least; thoughts before an answer get their
        own mark."""
        before, end, after = text.rpartition("</think>")
        if end and before.split("<think>")[-1].strip():
            before = self.put(before, len(before.rstrip()), i, "thoughts")
        return before + end + (self.put(after, len(after) // 2, i, kind) if after.strip() else after)

    def in_part(self, part, i, kind):
        key = part.get("type") if isinstance(part, dict) else None
        if key not in PARTS or not isinstance(part.get(key), str) or not part[key].strip():
            return part
        kind = "thoughts" if key == "thinking" else kind
        return {**part, key: self.in_content(part[key], i, kind)}

    def in_message(self, message, i, kind):
        marked = dict(message)
        for name in THOUGHTS:
            if message.get(name, "").strip():
                first = next(one for one in THOUGHTS if one in message)       # both names have the same text
                marked[name] = marked[first] if name != first else self.put(message[name], len(message[name]) // 2, i, "thoughts")
        if isinstance(message.get("content"), str):
            marked["content"] = self.in_content(message["content"], i, kind)
        elif isinstance(message.get("content"), list):
            marked["content"] = [self.in_part(part, i, kind) for part in message["content"]]
        if marked.get("tool_calls"):
            name = lambda function: {**function, "name": self.put(function["name"], len(function["name"]), i, "calls of tools")}
            marked = change_calls(marked, name)
        return marked

    def in_tool(self, tool, i):
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        if not isinstance(function.get("name"), str):
            return tool
        marked = {**function, "name": self.put(function["name"], len(function["name"]), i, "tools")}
        return marked if function is tool else {**tool, "function": marked}


CONTENTS = {"system": "system messages", "user": "questions", "assistant": "answers", "tool": "results of tools"}


def find_lost(render, messages, roles, tools):
    """[(number of the message, kind)] of texts that render(messages, tools) leaves out; number -1: the tools. If a template
    accepts no marks, because it reads names, a text counts as written if it occurs anywhere in the result."""
    marks = Marks()
    marked = [marks.in_message(message, i, CONTENTS[role]) for i, (message, role) in enumerate(zip(messages, roles))]
    tools = tools and [marks.in_tool(tool, -1) for tool in tools]
    if not marks.kinds:
        return []
    try:
        text = render(marked, tools)
    except Exception:
        return []
    found = set(map(int, NUMBERED.findall(text)))
    return [kind for number, kind in enumerate(marks.kinds) if number not in found]


def find_unread(messages, names):
    """For each message, the keys with a value that no template of the folder names."""
    return [key for message in messages for key in message if key not in READ and key not in names]


# ---- what no message says --------------------------------------------------------------------------------------------------------

def arguments_as(message, kind):
    """The message with the arguments of its calls in the form `kind`: dict, or str (JSON text)."""
    def change(function):
        value = function.get("arguments")
        if isinstance(value, str) and kind is dict:
            return {**function, "arguments": json.loads(value)}
        if isinstance(value, dict) and kind is str:
            return {**function, "arguments": json.dumps(value, ensure_ascii=False)}
        return function
    return change_calls(message, change) if message.get("tool_calls") else message


def find_misspelled(text, messages, others):
    """The error in the spelling of lists, objects and arguments in the text; None: no error. others: other inputs of the
    template, which may contain the same words. Templates spell the values within arguments as their models do, some as Python
    does."""
    wrong = {}
    for message in messages:
        calls, called = message.get("tool_calls") or [], functions(message)
        values = [*containers(message.get("content")), calls, *calls, *called, *(one.get("arguments") for one in called)]
        for value in values:
            if isinstance(value, (dict, list)) and str(value) != json.dumps(value, ensure_ascii=False):
                wrong[str(value)] = f"writes {str(value)[:40]}, as Python does"
        for given in (one["arguments"] for one in called if isinstance(one.get("arguments"), str)):
            if given.strip() not in text:
                return f"does not write arguments given as a text unchanged, as {given[:40]}"
            if (twice := json.dumps(given, ensure_ascii=False)[1:-1]) != given:
                wrong[twice] = f"writes arguments given as a text with a second pair of quotes, as {twice[:40]}"
        if any(None in one.values() for one in [*calls, *called]):
            wrong["None"] = "writes None for a key of a call that is null"
    if not wrong:
        return None
    said = list(strings([messages, others]))
    return next((what for spelled, what in wrong.items() if text.count(spelled) > sum(one.count(spelled) for one in said)), None)
