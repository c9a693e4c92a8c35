"""Random conversations for tests, with odd texts. Each word occurs in only one message, so a word tells which message a token is
from."""
import itertools, json, random

SPACE = ("", "", "", " ", "\n", "\n\n", "  ")
ODD = ("naïve", "東京", "😀", "{x}", "<b>", "don't", "None", "[1, 2]", '"q"', "a\\b")


class Chat:
    """Makes conversations as objects of a JSON line. what: which of "system", "tools", "calls", "thoughts", "first" (an answer is
    the first message), "lists" (several calls in a message) they may have."""

    def __init__(self, seed, what):
        self.r, self.what, self.words = random.Random(seed), what, itertools.count()

    def maybe(self, what, chance):
        return what in self.what and self.r.random() < chance

    def word(self):
        return f"w{next(self.words)}w"

    def text(self, most=5):
        words = [self.r.choice(("", "", "", self.r.choice(ODD) + " ")) + self.word() for _ in range(self.r.randint(1, most))]
        return self.r.choice(SPACE) + self.r.choice((" ", " ", "\n")).join(words) + self.r.choice(SPACE)

    def arguments(self):
        values = [self.word(), self.r.randint(0, 99), True, [self.word(), 1], {"in": self.word()}, self.word() + ' "x"\n']
        return {f"k{i}": self.r.choice(values) for i in range(self.r.randint(0, 3))}

    def call(self):
        return {"id": f"call{self.r.randint(1000, 9999)}x", "type": "function",
                "function": {"name": self.word(), "arguments": self.arguments()}}

    def tool(self):
        return {"type": "function", "function": {"name": self.word(), "description": self.text(), "parameters": {
            "type": "object", "properties": {self.word(): {"type": "string", "description": self.text()}}, "required": []}}}

    def answer(self, calls=False):
        message = {"role": "assistant", "content": self.text()}
        if self.maybe("thoughts", 0.5):
            message["reasoning_content"] = self.text().strip()
        if calls:
            message["content"] = self.r.choice(("", "", self.text(2)))
            message["tool_calls"] = [self.call() for _ in range(2 if self.maybe("lists", 0.3) else 1)]
        return message

    def turn(self):
        yield {"role": "user", "content": self.text()}
        while self.maybe("calls", 0.4):
            message = self.answer(calls=True)
            yield message
            for call in message["tool_calls"]:
                yield {"role": "tool", "content": self.text(), "tool_call_id": call["id"], "name": call["function"]["name"]}
        yield self.answer()

    def conversation(self):
        """{"messages", "tools"}"""
        messages = [{"role": "system", "content": self.text()}] if self.maybe("system", 0.4) else []
        if self.maybe("first", 0.2):
            messages.append(self.answer())
        for _ in range(self.r.randint(1, 4)):
            messages += self.turn()
        if self.r.random() < 0.2:
            messages.append({"role": "user", "content": self.text()})       # a last question without an answer
        entry = {"messages": messages}
        if self.maybe("tools", 0.4):
            entry["tools"] = [self.tool() for _ in range(self.r.randint(1, 2))]
        return entry


# ---- the same, said otherwise ------------------------------------------------------------------------------------------------

def nulls(message, r):
    """Adds keys that are null, as in rows that come from a table."""
    return {**{key: None for key in ("tool_calls", "name", "reasoning", "weight") if r.random() < 0.5}, **message}


def json_arguments(message):
    change = lambda function: {**function, "arguments": json.dumps(function["arguments"])}
    calls = [{**call, "function": change(call["function"])} for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls} if calls else message


def sharegpt(entry):
    """The conversation as a ShareGPT line with tools, or None if ShareGPT cannot express it."""
    said = []
    for message in entry["messages"]:
        calls = [call["function"] for call in message.get("tool_calls", [])]
        if calls and message["content"] or "reasoning_content" in message:
            return None
        name = {"user": "human", "assistant": "function_call" if calls else "gpt", "tool": "observation"}
        said.append({"from": name.get(message["role"], message["role"]),
                     "value": json.dumps(calls if len(calls) > 1 else calls[0]) if calls else message["content"]})
    return {"conversations": said, **({"tools": json.dumps(entry["tools"])} if "tools" in entry else {})}
