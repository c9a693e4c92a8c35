"""Finds where the assistant's answers begin and end in the output of a chat template, and how many documents a conversation
becomes.

A conversation is usually one document, rendered as a whole. But templates of models that think leave out the thoughts of earlier
turns, and some write tools or the system message into the last question. If the rendered conversation does not begin with the text
that a model is asked with, or loses parts of answers, each question gets its own document, which ends with the answers to this
question. It contains earlier answers in the form in which the model then sees them; these are not learned again.
"""
import collections, functools, os, re

import chat_written
from chat_written import MARK, OTHER
from errors import Bad

# text; answers: (begin, end) of each answer in it; lost: {kind: number} of texts that the template leaves out; open: number of
# answers that other messages follow and that no special token ends; unasked: number of answers that do not begin as the prompts of
# the template end
Document = collections.namedtuple("Document", "text answers lost open unasked")


def common(one, other):
    """Length of the common prefix of two texts."""
    return len(os.path.commonprefix([one, other]))


class Labels:
    """template: a ChatTemplate; added: texts of tokens that may end a turn, the longest first; eos: text of the token at which
    models stop."""

    def __init__(self, template, added, eos):
        self.template, self.added, self.eos = template, tuple(added), eos
        self.tokens = re.compile("|".join(map(re.escape, added)) or "(?!)")
        self.token = re.compile(rf"\s*({self.tokens.pattern})")

    def documents(self, conversation, where):
        """The documents of a conversation; []: it has no answer to learn."""
        return Talk(self, conversation, where).documents()


class Talk:
    """One conversation. Messages are numbered from 0 here, and from 1 in errors."""

    def __init__(self, labels, conversation, where):
        self.labels, self.where, self.template = labels, where, labels.template
        self.roles, self.learned, self.tools = conversation.roles, conversation.learned, conversation.tools
        self.variables, self.texts = conversation.variables, {}
        self.messages = self.settle(conversation.messages)

    # ---- rendering -----------------------------------------------------------------------------------------------------------

    def render(self, messages, asks=False):
        try:
            return self.template.render(messages, asks, self.tools, **self.variables)
        except Bad:
            raise
        except Exception as problem:        # a template can raise any exception
            raise Bad(f"{self.where}: {type(problem).__name__} in the chat template, rendering the first {len(messages)} messages: "
                      f"{problem}; expected a conversation that the template accepts: change or remove this conversation, or "
                      "change the template")

    def try_render(self, messages, asks=False):
        """As render; None if the template fails."""
        try:
            return self.render(messages, asks)
        except Bad:
            return None

    def until(self, count, asks=False):
        """The text of the first `count` messages."""
        if (count, asks) not in self.texts:
            self.texts[count, asks] = self.render(self.messages[:count], asks)
        return self.texts[count, asks]

    def settle(self, given):
        """The messages in the form that the template accepts. Arguments of calls are objects or JSON text. A template for one of
        these forms may fail with the other, or print it as Python does or as a quoted text."""
        first = None
        for kind in (None, dict, str):
            self.messages = [chat_written.arguments_as(message, kind) for message in given] if kind else given
            if kind and self.messages == given:
                continue
            self.texts.clear()
            try:
                wrong = chat_written.find_misspelled(self.until(len(given)), self.messages, [self.tools, self.variables])
                if not wrong:
                    return self.messages
                raise Bad(f"{self.where}: the chat template {wrong}; expected the form that a model should write: give the value as a "
                          f"text, or change the template in {self.template.folder}")
            except Bad as problem:
                first = first or problem
        raise first

    # ---- documents -----------------------------------------------------------------------------------------------------------

    def documents(self):
        """One document; or one document per question, if the answers then lose less text, or more of them begin as the template
        asks."""
        if not any(self.learned):
            return []
        ends = [i for i in range(1, len(self.messages)) if self.roles[i] == "user" and self.roles[i - 1] != "user"]
        ends = [i for i in ends if "assistant" in self.roles[:i]] + [len(self.messages)]
        ways, problem = [], None
        for bounds in ([len(self.messages)], ends):
            try:
                ways.append([self.document(*pair) for pair in self.pairs(bounds)])
            except Bad as found:
                problem = problem or found
            if len(ends) == 1 or ways and self.harm(ways[0]) == (0, 0):
                break
        if not ways:
            raise problem
        return min(ways, key=self.harm)

    def pairs(self, bounds):
        """(since, until) of documents that end at `bounds`. A document without an answer to learn becomes a part of the next
        one."""
        since = 0
        for until in bounds:
            if any(self.learned[since:until]):
                yield since, until
                since = until

    @staticmethod
    def harm(documents):
        lost = sum(one.lost[kind] for one in documents for kind in ("answers", "thoughts", "calls of tools"))
        return lost, sum(one.unasked for one in documents)

    def document(self, since, until):
        """The document of the messages before number `until`. Answers from number `since` on are learned. Space after the token
        that ends a turn is not part of the answer, because no model writes it."""
        text = self.until(until)
        answers, open, unasked = [], 0, 0
        for i in range(since, until):
            if self.learned[i]:
                begin, asked = self.find_begin(text, i, until)
                end = self.find_end(text, i, until)
                bare = text[begin:end].rstrip()
                ended = bare.endswith(self.labels.added)
                answers.append((begin, begin + len(bare) if ended else end))
                open += not ended and i + 1 < until
                unasked += not asked
        return Document(text, answers, self.find_lost(since, until), open, unasked)

    def find_lost(self, since, until):
        render = lambda messages, tools: self.template.render(messages, False, tools, **self.variables)
        lost = chat_written.find_lost(render, self.messages[:until], self.roles, self.tools)
        return collections.Counter(kind for i, kind in lost if i >= since or since == 0)

    # ---- the beginning of an answer ------------------------------------------------------------------------------------------

    def find_begin(self, text, i, until):
        """(position in the text where answer i begins, whether the prompt of answer i ends there). The prompt is the text that a
        model is given to answer, and the answer usually begins after it. The rendered conversation may not begin with the prompt,
        because the prompt has earlier messages in another form, or thoughts that the answer lacks. In this case, the answer begins
        after the longest part of an answer's opening that is before it."""
        prompt = self.until(i, asks=True) if i else None        # no template renders an empty list of messages
        if i and text.startswith(prompt):
            return len(prompt), True
        front, lowest = (self.front(self.messages[:until], k, text) if k >= 0 else 0 for k in (i, i - 1))
        if self.opening == "":
            return len(text[:front].rstrip(" ")), i == 0
        for length in self.boundaries(self.opening or ""):
            at = text.rfind(self.opening[:length], lowest, front)
            if at >= 0 and self.opening[:length] not in self.heading:       # otherwise any message may begin so
                return at + length, i == 0 and length == len(self.opening)
        asked = prompt or self.opening or ""
        at = common(text, asked)
        raise Bad(f"{self.where}: the chat template asks for message {i + 1} with {asked[at:at + 40]!r}, but renders the "
                  f"conversation with {text[at:at + 40]!r} there; expected the same text, to find where the answer begins: "
                  f"give the answer the form that the template asks for, or change the template in {self.template.folder}")

    @functools.cached_property
    def opening(self):
        """The text that add_generation_prompt adds after a question. If the template writes other text in this place without
        add_generation_prompt: the text with it, from the first different token on. None: the template accepts no question."""
        question = [{"role": "user", "content": MARK}]
        without, asked = self.try_render(question), self.try_render(question, asks=True)
        if without is None or asked is None:
            return None
        same = common(without, asked)
        return asked[same if same == len(without) else max(place for place in [*self.boundaries(asked), 0] if place <= same):]

    @functools.cached_property
    def heading(self):
        """The text before a question that is the first message."""
        return (self.try_render([{"role": "user", "content": MARK}]) or "").partition(MARK)[0]

    def boundaries(self, opening):
        """The lengths at which an opening may be cut, the longest first: its whole length, and where its tokens begin and end."""
        tokens = self.labels.tokens.finditer(opening)
        return sorted({len(opening), *(place for token in tokens for place in token.span())}, reverse=True)

    def front(self, messages, i, text):
        """The position where the text of message i begins in the text of the messages."""
        return common(text, self.render([*messages[:i], chat_written.altered(messages[i], OTHER), *messages[i + 1:]]))

    # ---- the end of an answer ------------------------------------------------------------------------------------------------

    def find_end(self, text, i, until):
        """Where answer i ends. Some templates render the last turn differently (OLMo 3 ends it with another token, Qwen 3 adds
        thoughts). Then the answer ends where the beginning of the next message starts. To find that, a mark replaces the answer:
        after the mark comes the token that ends the turn, if there is one, and then the beginning of the next message. An answer
        with calls cannot be replaced, because later messages may need the calls. It ends with the token that ends it when it is
        the last message."""
        last = text if i + 1 == until else self.try_render(self.messages[:i + 1])
        if last and text.startswith(last):
            return len(last) - (len(self.trailing) if last.endswith(self.trailing) else 0)
        front = self.front(self.messages[:until], i + 1, text)
        begin = self.find_next(i, until, last or "")
        if begin is not None and text.endswith(begin, 0, front):
            return front - len(begin)
        changed = self.render([*self.messages[:i], chat_written.altered(self.messages[i], OTHER), *self.messages[i + 1:until]])
        own = len(text) - common(text[::-1], changed[::-1])
        token = next((one for one in self.labels.added if (last or "").rstrip().endswith(one)), None)
        at = text.find(token, own, front) if token and self.messages[i].get("tool_calls") else -1
        if at < 0:
            raise Bad(f"{self.where}: cannot find where message {i + 1} ends: the chat template renders this message differently "
                      f"when it is the last message. End the conversation after this message, or change the template in "
                      f"{self.template.folder}")
        return at + len(token)

    def find_next(self, i, until, last):
        """The text that the template writes between answer i and the text of the next message, without a token that ends the
        turn; None: the template accepts no mark there. last: the text that ends with the answer."""
        plain = {"role": self.messages[i]["role"], "content": MARK}
        messages = [*self.messages[:i], plain, *self.messages[i + 1:until]]
        shown = self.try_render(messages) or ""
        if MARK not in shown:
            return None
        between = shown[shown.find(MARK) + 1:self.front(messages, i + 1, shown)]
        token = self.labels.token.match(between)
        return between[token.end():] if token and self.ends_turn(token, messages[:i + 1], i, last) else between

    def ends_turn(self, token, messages, i, last):
        """Whether a token right after an answer ends the answer when it is the last message. Otherwise the token begins the next
        message, and depends on the role of that message."""
        if token[1] == self.labels.eos or last.rstrip().endswith(token[1]):
            return True
        if token[1] in (self.opening or ""):
            return False
        role = "assistant" if self.roles[i + 1] == "user" else "user"
        shown = self.try_render([*messages, {"role": role, "content": OTHER}])
        if shown:
            return shown[shown.find(MARK) + 1:].startswith(token[0])
        after = (self.try_render([{"role": "user", "content": MARK}]) or "").partition(MARK)[2]
        return token[1] not in self.heading or token[1] in after

    @functools.cached_property
    def trailing(self):
        """The opening of an answer that some templates write at the end of every text, without add_generation_prompt; else ""."""
        shown = self.try_render([{"role": "user", "content": MARK}, {"role": "assistant", "content": OTHER}]) or ""
        front, _, after = shown.partition(MARK)[2].partition(OTHER)
        token = self.labels.token.match(after)
        rest = after[token.end():].lstrip() if token else ""
        return rest if rest and front.endswith(rest) else ""
