#!/usr/bin/env python3
"""scripts/make_chat_shards.py: where answers begin and end in the rendered text, and templates that do not show it."""
import os, re, shutil, sys, unittest

sys.dont_write_bytecode = True
from test_make_shards import MISSING, TEMPLATES, Folder

if not MISSING:
    from tokenizers import Tokenizer


class TemplateTest(Folder):
    def test_boundaries(self):
        """A token that begins in the prompt is not learned. A token that begins in the answer is learned, whatever the
        tokenizer's offsets leave out."""
        model = self.model("{% for m in messages %}{{ m.role + ':\n' + m.content }}"
                           "{{ '<|end|>' if m.role == 'assistant' else '\n' }}{% endfor %}"
                           "{{ 'assistant:\n' if add_generation_prompt }}", splits=False)
        file = self.write("x.jsonl", [{"prompt": "a", "completion": answer} for answer in ("two", "\n\ntwo  ", "  two", " ")])
        output, _ = self.chat(model, file)
        ids, _, _ = self.read(output)
        self.assertIn("\n\n", [Tokenizer.from_file(model + "/tokenizer.json").decode([i]) for i in ids.tolist()])
        self.assertEqual(self.learned(model, output), ["two<|end|>", "\ntwo  <|end|>", "  two<|end|>", " <|end|>"])

    def test_prompt_that_ends_with_spaces(self):
        model = self.model("{% for m in messages %}{{ m.content if m.role == 'user' else 'A:  ' + m.content + '<|end|>' }}"
                           "{% endfor %}{{ 'A:  ' if add_generation_prompt }}", splits=False)
        output, _ = self.chat(model, self.write("x.jsonl", [{"prompt": "a", "completion": answer} for answer in ("\ntwo", "two")]))
        self.assertEqual(self.learned(model, output), ["\ntwo<|end|>", "<|end|>"])

    def test_turns_that_end_with_a_line(self):
        """Space at the end of an answer belongs to the answer if no token ends the turn. A newline cannot be named as the eos
        token."""
        model = self.model("{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
                           "{{ 'assistant:' if add_generation_prompt }}")
        output, printed = self.chat(model, self.write("x.jsonl", [{"prompt": "a", "completion": "two"}]))
        self.assertEqual(self.learned(model, output), ["two\n"])
        self.assertIn("of the last answers 1 of 1 end with no special token, 1 with Ċ (", printed)
        self.assertIn("have the chat template put {{ eos_token }} after each answer", printed)
        self.assertNotIn("make it the eos_token", printed)

    def test_ends(self):
        """A note suggests the special token that ends answers as the eos token, unless all answers end with eos. It never
        suggests a full stop."""
        two = [{"prompt": "a", "completion": "b."}, {"prompt": "two", "completion": "b."}, {"prompt": "two", "completion": "c"}]
        file = self.write("x.jsonl", two)
        name = "1 with <|turn|> (1): if programs should stop at the second token, make it the eos_token in"
        for end, notes in (("eos_token", []), ("''", ["3 of 3 end with no special token, 2 with . ("]),
                           ("'<|turn|>'", ["0 of 3 end with the eos token <|end|>, 3" + name[1:]]),
                           ("'<|turn|>' if messages[0].content == 'a' else ''",
                            ["2 of 3 end with no special token, 1 with . (", "0 of 3 end with the eos token <|end|>, " + name]),
                           ("eos_token if messages[0].content == 'a' else ''", ["2 of 3 end with no special token, 1 with . ("])):
            with self.subTest(end):
                model = self.model("{% for m in messages %}[{{ m.role }}]{{ m.content }}"
                                   "{{ (" + end + ") if m.role == 'assistant' }}{% endfor %}"
                                   "{{ '[assistant]' if add_generation_prompt }}", ["<|end|>", "<|turn|>"])
                lines = [line for line in self.chat(model, file)[1].splitlines() if line.startswith("NOTE: of the last answers ")]
                self.assertEqual(len(lines), len(notes), lines)
                for line, note in zip(lines, notes):
                    self.assertIn(note, line)

    def test_prompt_without_its_end(self):
        """A note tells of a header in front of answers that the generation prompt lacks."""
        loop = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<|end|>' }}{% endfor %}"
        file = self.write("x.jsonl", [{"prompt": "a", "completion": "two"}])
        for template, learned, told in ((loop, "<assistant>two<|end|>", True),
                                        (loop + "{{ '<assistant>' if add_generation_prompt }}", "two<|end|>", False),
                                        ("{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else "
                                         "m.content + '<|end|>' }}{% endfor %}", "two<|end|>", False)):
            model = self.model(template)
            output, printed = self.chat(model, file)
            self.assertEqual(self.learned(model, output), [learned])
            self.assertEqual("adds nothing for add_generation_prompt: so the model also learns '<assistant>', which" in printed, told)

    def test_last_turns_that_differ(self):
        """Templates as in OLMo 3 and Qwen 3: another token at the end, thoughts."""
        head = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        tail = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        olmo = "{{ m.content + (eos_token if loop.last and m.role == 'assistant' else '<|im_end|>\n') }}"
        qwen = "{{ ('<think></think>' if loop.last and m.role == 'assistant') ~ m.content | trim + '<|im_end|>\n' }}"
        chat = [("user", "x"), ("assistant", " a b"), ("user", "a b"), ("assistant", "a b<b>"), ("user", "x"), ("assistant", "b")]
        file = self.write("x.jsonl", [{"messages": [{"role": role, "content": text} for role, text in chat]}])
        for turn, expected in ((olmo, [" a b<|im_end|>", "a b<b><|im_end|>", "b<|end|>"]),
                               (qwen, ["a b<|im_end|>", "a b<b><|im_end|>", "<think></think>b<|im_end|>"])):
            model = self.model(head + turn + tail, ["<|end|>", "<|im_start|>", "<|im_end|>"])
            self.assertEqual(self.learned(model, self.chat(model, file)[0]), expected)

    def test_calls_of_tools_in_turns_that_differ(self):
        """As in Qwen 3 and OLMo 3: calls follow the content. In the last turn, thoughts precede the content, or another token
        ends it."""
        turn = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}" \
               "{{ ('<think></think>' if THINKS and loop.last and m.role == 'assistant') ~ m.content }}" \
               "{% if m.tool_calls %}{{ '\n' if m.content }}<call>{{ m.tool_calls[0].function.name }}</call>{% endif %}" \
               "{{ eos_token if not THINKS and loop.last and m.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}" \
               "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
        qwen, olmo = (self.model(turn.replace("THINKS", one), ["<|end|>", "<|im_start|>", "<|im_end|>"]) for one in ("1", "0"))
        call = {"function": {"name": "b", "arguments": {}}}
        for content, expected in (("", "<call>b</call><|im_end|>"), ("x", "x\n<call>b</call><|im_end|>")):
            file = self.write("x.jsonl", [{"messages": [
                {"role": "user", "content": "q"}, {"role": "assistant", "content": content, "tool_calls": [call]},
                {"role": "tool", "content": "b"}, {"role": "assistant", "content": "a"}]}])
            self.assertEqual(self.learned(qwen, self.chat(qwen, file)[0]), [expected, "<think></think>a<|im_end|>"])
            self.assertEqual(self.learned(olmo, self.chat(olmo, file)[0]), [expected, "a<|end|>"])

    def test_template_language(self):
        """Features of published templates; chat_template.jinja takes precedence over tokenizer_config.json."""
        turn = "{%- for m in messages %}\n    {% if m.role == 'tool' %}{% break %}{% endif %}\n" \
               "{{- m.role + strftime_now('%%') + (tools | tojson if tools else '') }}\n" \
               "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}" \
               "{%- endfor %}{{ 'assistant%' ~ (tools | tojson if tools else '') if add_generation_prompt }}{{ unk_token }}"
        model = self.model(turn)
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "é"}, {"role": "function", "content": ""}]
        file = self.write("x.jsonl", [{"messages": messages, "tools": [{"a": "<é>"}]}])
        output, _ = self.chat(model, file)
        tokenizer = Tokenizer.from_file(model + "/tokenizer.json")
        text = tokenizer.decode(self.read(output)[0].tolist(), skip_special_tokens=False)
        self.assertEqual(text, 'user%[{"a": "<é>"}]assistant%[{"a": "<é>"}]é<|end|>')
        self.assertEqual(self.learned(model, output), ["é<|end|>"])
        shutil.copy(os.path.join(TEMPLATES, "olmo-2.jinja"), model + "/chat_template.jinja")
        self.assertIn("<|assistant|>\né", tokenizer.decode(self.read(self.chat(model, file)[0])[0].tolist()))

    def test_old_processors(self):
        """chat_template.json, in which old image processors stored the template, is used if there is no other template."""
        turns = "{% for m in messages %}{{ m.role + m.content + '<|end|>' }}{% endfor %}{{ 'assistant' if add_generation_prompt }}"
        file = self.write("x.jsonl", [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}])
        for own, expected in ((None, "a<|end|>"), (turns.replace("<|end|>", "!<|end|>"), "a!<|end|>")):
            model = self.model(own)
            self.dump({"chat_template": turns}, model, "chat_template.json")
            self.assertEqual(self.learned(model, self.chat(model, file)[0]), [expected])
        model = self.model(None)
        self.dump({"chat_template": 3}, model, "chat_template.json")
        self.assert_bad(self.chat, (model, file), "has no chat template", "chat_template.json")

    def test_bad_templates(self):
        loop = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
        for template, *words in (
                (None, "has no chat template", "chat_template.jinja"), ("{% for %}", "line 1 of the chat template"),
                ("{{ raise_exception('no way') }}", "x.jsonl:1: ", "no way"), ("{{ messages[7].role + 'x' }}", "UndefinedError"),
                (loop + "{{ 'assistant<think>' if add_generation_prompt }}", "x.jsonl:1: ", "'<think>'", "'y<systemz'"),
                (loop + "{{ 'asks' if add_generation_prompt }}{{ messages | length }}", "x.jsonl:1: ", "expected the same"),
                ("{% for m in messages %}{{ m.content if loop.index == 1 or loop.last }}{% endfor %}", "x.jsonl:1: ",
                 "where message 2 ends")):
            model = self.model(template)
            file = self.write("x.jsonl", [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y<"},
                                                        {"role": "system", "content": "z"}]}])
            self.assert_bad(self.chat, (model, file), *words)



CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}{{ '<|im_end|>\n' }}{% endfor %}" \
         "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
TOKENS = ["<|im_end|>", "<|im_start|>", "<|end|>"]        # the first is eos
CALL = {"type": "function", "function": {"name": "look", "arguments": {"in": "town"}}}


def say(*texts, **keys):
    """Returns a conversation that alternates questions and answers; keys: further keys of every answer."""
    return {"messages": [{"role": "user", "content": text} if i % 2 == 0 else {"role": "assistant", "content": text, **keys}
                         for i, text in enumerate(texts)]}


class LeftOutTest(Folder):
    """Named templates, conversations that begin with an answer, and texts that a template leaves out."""
    def check(self, template, entries, learned, *notes, special=TOKENS, **config):
        model = self.model(template, special, **config)
        output, printed = self.chat(model, self.write("x.jsonl", entries))
        self.assertEqual(self.learned(model, output), learned)
        for note in notes:
            self.assertIn(note, printed)
        self.assertEqual(printed.count("NOTE"), len(notes), printed)
        return model, output

    def text(self, model, output):
        return Tokenizer.from_file(model + "/tokenizer.json").decode(self.read(output)[0].tolist(), skip_special_tokens=False)

    def test_templates_by_name(self):
        """A conversation with tools, even an empty list, uses the template for tools. If there are template files, only they
        count."""
        tools = "{{ tools | tojson }}" + CHATML
        named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": tools}]
        tool = {"name": "t"}
        for given, begin in ((None, ""), ([], "[]"), ([tool], '[{"name": "t"}]')):
            entry = {**say("a", "b"), **({} if given is None else {"tools": given})}
            model, output = self.check(named, [entry], ["b<|im_end|>"])
            self.assertTrue(self.text(model, output).startswith(begin + "<|im_start|>"))
            os.mkdir(model + "/additional_chat_templates")
            for path, text in (("chat_template.jinja", CHATML), ("additional_chat_templates/tool_use.jinja", "F" + tools)):
                with open(os.path.join(model, path), "w") as file:
                    file.write(text)
            output, _ = self.chat(model, self.write("x.jsonl", [entry]))
            self.assertTrue(self.text(model, output).startswith(("F" + begin if begin else "") + "<|im_start|>"))
        os.remove(model + "/chat_template.jinja")
        self.assert_bad(self.chat, (model, self.write("x.jsonl", [say("a", "b")])), "named tool_use; expected one named default")

    def test_answers_that_come_first(self):
        """transformers does not render an empty list of messages, and templates that look at the first message fail with an empty
        list."""
        first = {"messages": [{"role": "assistant", "content": "Hello"}, *say("a", "b")["messages"]]}
        looks = "{% if messages[0].role == 'system' %}S{% endif %}" + CHATML
        begins = "{% for m in messages %}{{ eos_token if loop.first }}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}" \
                 "{{ 'assistant:' if add_generation_prompt }}"
        ends = "{% for m in messages %}<|im_start|>{{ m.role + ':' + m.content }}<|im_end|>{% endfor %}" \
               "{{ '<|im_start|>assistant:' if add_generation_prompt else eos_token }}"       # as Phi 3
        for template in (looks, begins):
            self.check(template, [first], ["Hello<|im_end|>", "b<|im_end|>"])
        self.check(ends, [first], ["Hello<|im_end|>", "b<|im_end|><|end|>"], eos_token="<|end|>")
        user = CHATML.replace("m.role", "('user' if loop.first else m.role)")       # as Llama 3.1 with tools
        self.assert_bad(self.chat, (self.model(user, TOKENS), self.write("x.jsonl", [first])), "x.jsonl:1: ", "asks for message 1")
        fails = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a question') }}{% endif %}" + CHATML
        self.assert_bad(self.chat, (self.model(fails, TOKENS), self.write("x.jsonl", [first])), "x.jsonl:1: ", "begin with a q")

    def test_counted(self):
        """Each kind of text that a template leaves out is counted, even if a word of it occurs elsewhere."""
        tool = {"role": "tool", "content": "a"}
        ask = {"role": "user", "content": "a"}
        answer = {"role": "assistant", "content": "a"}
        skips = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != ROLE %}")
        for template, messages, what in (
                (CHATML, [ask, {**answer, "reasoning_content": "a"}], "thoughts"),
                (CHATML, [ask, {**answer, "thinking": "a"}], "thoughts"),
                (CHATML, [ask, {**answer, "tool_calls": [CALL]}], "calls of tools"),
                (skips.replace("ROLE", "'system'"), [{"role": "system", "content": "a"}, ask, answer], "system messages"),
                (skips.replace("ROLE", "'tool'"), [ask, answer, tool, answer], "results of tools"),
                (skips.replace("ROLE", "'tool'"), [ask, answer, tool, answer, ask, answer], "results of tools")):
            learned = ["a<|im_end|>"] * sum(message["role"] == "assistant" for message in messages)
            self.check(template, [say("a", "a"), {"messages": messages}], ["a<|im_end|>"] + learned,
                       f"NOTE: {what} that the chat template leaves out: 1, the first in {self.top}/x.jsonl:2")
        self.check(CHATML, [{**say("a", "a"), "tools": [{"name": "a"}]}], ["a<|im_end|>"],
                   "NOTE: tools that the chat template leaves out: 1")
        self.check(CHATML, [say("a", "a", name="Ann", refusal=None)], ["a<|im_end|>"],
                   'NOTE: messages with the key "name", which the chat template does not read: 1')
        self.check(CHATML, [say("a", "b", "a", "b", name="Ann")], ["b<|im_end|>"] * 2,
                   'NOTE: messages with the key "name", which the chat template does not read: 2')
        self.check(CHATML, [{**say("a", "a"), "documents": [{"text": "a"}]}], ["a<|im_end|>"],
                   'NOTE: conversations with "documents", which the chat template does not read: 1')
        thinks = CHATML.replace("m.content", "(m.thinking or '') + m.content")
        self.check(thinks, [say("a", "b", thinking="<|im_start|>")], ["<|im_start|>b<|im_end|>"],
                   "NOTE: messages or tools with the name of a special token, which becomes that token: 1")
        later = "{% for t in tools if messages | length == 0 %}{{ t }}{% endfor %}" + CHATML.replace(
            "{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' }}")
        unlearned = say("a", "b", "c", "d", "e", "f")
        unlearned["messages"][1]["weight"] = 0
        self.check(later, [{**unlearned, "tools": [{"name": "a"}]}], ["d<|im_end|>", "f<|im_end|>"],
                   "NOTE: tools that the chat template leaves out: 1", "NOTE: answers that the chat template leaves out: 1",
                   "NOTE: conversations with a document for each question")
        developer = {"messages": [{"role": "developer", "content": "D"}, ask, answer]}
        self.check(CHATML, [developer], ["a<|im_end|>"], 'NOTE: messages with the role "developer"')
        model, output = self.check(CHATML + "{{ '' if messages[0].role == 'developer' }}", [developer], ["a<|im_end|>"])
        self.assertIn("<|im_start|>developer\n", self.text(model, output))

    def test_thoughts(self):
        """Thoughts under each name, and in the content if the template looks for them there. If the template drops thoughts of
        earlier turns, each question becomes a document, so that no thought is lost."""
        thought = "{{ '<think>' + (m.reasoning_content or '') + '</think>' if m.role == 'assistant' and loop.index0 > last.at }}"
        thinks = CHATML.replace("{{ m.content }}", thought + "{{ m.content.split('</think>')[-1] }}")
        thinks = "{% set last = namespace(at=0) %}{% for m in messages %}{% set last.at = loop.index0 if m.role == 'user' else " \
                 "last.at %}{% endfor %}" + thinks
        both = ["<think>hm</think>b<|im_end|>", "<think>hm</think>d<|im_end|>"]
        note = "NOTE: conversations with a document for each question"
        for name in ("reasoning_content", "reasoning", "thinking"):
            model, output = self.check(thinks, [say("a", "b", "c", "d", **{name: "hm"})], both, note)
            self.assertEqual(len(self.read(output)[2]), 2)
            # the first answer, in a later document
            self.assertIn("assistant\nb<|im_end|>\n<|im_start|>user\nc", self.text(model, output))
        self.check(thinks, [say("a", "b", "c", "d")], ["b<|im_end|>", "<think></think>d<|im_end|>"])
        within = thinks.replace("(m.reasoning_content or '')", "m.content.split('</think>')[0].split('<think>')[-1]")
        self.check(within, [say("a", "<think>hm</think>b", "c", "<think>hm</think>d")], both, note)
        bare = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
        self.check(bare, [say("a", "<think>hm</think>b")], ["b<|im_end|>"], "NOTE: thoughts that the chat template leaves out: 1")
        model = self.model(thinks, TOKENS)
        file = self.write("x.jsonl", [say(f"a{i}", "b", "c", "d", thinking="hm") for i in range(20)])
        output, _ = self.chat(model, file, "--val-fraction", "0.5")         # the whole conversation is in one of the two
        questions = [set(re.findall(r"a\d+", self.text(model, folder))) for folder in (output, output + "/val")]
        self.assertEqual([len(questions[0] | questions[1]), questions[0] & questions[1]], [20, set()])
        self.assert_bad(self.chat, (model, self.write("x.jsonl", [say("a", "b", thinking="x", reasoning="y")])),
                        "x.jsonl:1: message 2 has different thoughts in thinking and in reasoning")

    def test_questions_of_their_own(self):
        """The system message is in the last question, as in Mistral's templates, or only the last turn has answers."""
        system = "{% set last = (messages | selectattr('role', 'eq', 'user') | list)[-1] %}{% for m in messages[1:] %}" \
                 "{{ '[Q]' + (messages[0].content + '|' if m == last else '') + m.content + '[A]' if m.role == 'user' else " \
                 "m.content + eos_token }}{% endfor %}"
        entry = {"messages": [{"role": "system", "content": "S"}, *say("a", "b", "c", "d", "e")["messages"]]}
        note = "NOTE: conversations with a document for each question"
        model, output = self.check(system, [entry], ["b<|end|>", "d<|end|>"], note, special=["<|end|>", "[Q]", "[A]"])
        self.assertEqual(self.text(model, output), "[Q]S|a[A]b<|end|>[Q]a[A]b<|end|>[Q]S|c[A]d<|end|>")
        drops = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' }}")
        self.check(drops, [say("a", "b", "c", "d")], ["b<|im_end|>", "d<|im_end|>"], note)

    def test_asked_with_thoughts(self):
        """As DeepSeek R1: prompts end with <think>. An answer without thoughts begins after the part of this end that it has, and
        is counted."""
        asks = CHATML.replace("{{ '<|im_start|>assistant\n' if", "{{ '<|im_start|>assistant\n<think>' if")
        note = "NOTE: answers that do not begin as the template's prompts end: "
        self.check(asks, [say("a", "b", "a", "<thin"), say("a", "<think>b")], ["b<|im_end|>", "<thin<|im_end|>", "b<|im_end|>"],
                   note + "2", "NOTE: messages or tools with the name of a special token", special=[*TOKENS, "<think>"])

    def test_ends(self):
        """eos comes only after the last answer: the opening of the next turn is not a label. Neither is a prompt that the
        template always writes at the end."""
        last = "{% for m in messages %}{{ OPEN + m.content }}{{ eos_token if loop.last and m.role == 'assistant' }}{% endfor %}" \
               "{{ '<|im_start|>assistant|' if add_generation_prompt }}"
        tools = {"messages": [*say("a", "b")["messages"], {"role": "tool", "content": "c"}, *say("a", "d")["messages"][1:]]}
        note = "NOTE: answers that other messages follow and no special token ends: 2"
        own = "{'user': '<|user|>', 'assistant': '<|im_start|>assistant|', 'tool': '<|tool|>'}[m.role]"
        for begins in ("'<|im_start|>' + m.role + '|'", own):
            self.check(last.replace("OPEN", begins), [say("a", "b", "c", "d"), tools], ["b", "d<|end|>"] * 2, note,
                       special=[*TOKENS, "<|user|>", "<|tool|>"], eos_token="<|end|>")
        alternate = "{% for m in messages %}{% if m.role != ['user', 'assistant'][loop.index0 % 2] %}{{ raise_exception('no') }}" \
                    "{% endif %}{{ '[Q]' + m.content + '[A]' if m.role == 'user' else m.content }}{% endfor %}" \
                    "{{ eos_token if not add_generation_prompt }}"
        self.check(alternate, [say("a", "b", "c", "d")], ["b", "d<|end|>"], note[:-1] + "1", special=["<|end|>", "[Q]", "[A]"])
        always = CHATML.replace(" if add_generation_prompt", "")
        self.check(always, [say("a", "b", "c", "d")], ["b<|im_end|>", "d<|im_end|>"])


class TokensTest(Folder):
    """Tokens that are not in tokenizer.json."""
    def folder(self, known, config, **files):
        model = self.model(CHATML, known)
        self.dump({"chat_template": CHATML, **config}, model, "tokenizer_config.json")
        for name, content in files.items():
            self.dump(content, model, name + ".json")
        return model, Tokenizer.from_file(model + "/tokenizer.json").get_vocab_size()

    def learned_ids(self, model, entry=None):
        output, printed = self.chat(model, self.write("x.jsonl", [entry or say("a", "b", "a", "b")]))
        ids, mask, _ = self.read(output)
        return [int(id) for id, on in zip(ids, mask) if on], ids.tolist(), printed

    def test_other_files(self):
        """tokenizer_config.json with added_tokens_decoder, or added_tokens.json with special_tokens_map.json."""
        special = lambda text: {"content": text, "special": True, "normalized": False}
        n = self.folder(["<|end|>"], {})[1]
        added, file = {"<|im_start|>": n, "<|im_end|>": n + 1}, self.write("y.jsonl", [say("a", "b")])
        for eos in ("<|im_end|>", "<|end|>"):
            for config, files in (({"added_tokens_decoder": {n + 1: special("<|im_end|>"), n: special("<|im_start|>")}}, {}),
                                  ({"extra_special_tokens": ["<|im_end|>"]}, {"added_tokens": added}),
                                  ({}, {"added_tokens": added,
                                        "special_tokens_map": {"bos_token": special("<|im_start|>"), "eos_token": eos}})):
                model, _ = self.folder(["<|end|>"], {"eos_token": eos, **config}, **files)
                learned, ids, printed = self.learned_ids(model)
                self.assertEqual([learned[1], learned[3], len(learned), ids.count(n), ids.count(n + 1)], [n + 1, n + 1, 4, 4, 4])
                self.assertEqual("0 of 1 end with the eos token" in printed, eos == "<|end|>")
        wrong, _ = self.folder(["<|end|>"], {"eos_token": "<|end|>", "added_tokens_decoder": {n + 5: special("<|im_end|>")}})
        self.assert_bad(self.chat, (wrong, file), f"<|im_end|> has the id {n + 5}, but", f"gets {n};")
        for found in ([], {"x": {}}, {"7": "<|im_end|>"}, {"7": {"content": 1}}):
            odd, _ = self.folder(["<|end|>"], {"eos_token": "<|end|>", "added_tokens_decoder": found})
            self.assert_bad(self.chat, (odd, file), "tokenizer_config.json: its added tokens are not")
        named, _ = self.folder(["<|end|>", "<|im_end|>"], {"eos_token": "<|end|>", "bos_token": "<|im_start|>"})
        self.assert_bad(self.chat, (named, file), "y.jsonl:1: the token <|im_start|>, which no file in ")

    def test_tokens_that_are_not_called_special(self):
        """A token that no file calls special, as eos or at the end of turns. The newline after it is not learned."""
        for eos in ("<|im_end|>", "<|end|>"):
            model, n = self.folder(["<|end|>"], {"eos_token": eos})
            tokenizer = Tokenizer.from_file(model + "/tokenizer.json")
            tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"])
            tokenizer.save(model + "/tokenizer.json")
            learned, _, printed = self.learned_ids(model)
            self.assertEqual([learned[1], learned[3], len(learned)], [n + 1, n + 1, 4])
            spelled = say("a", "b", "a<|im_end|>", "b")
            self.assertEqual("with the name of a special token" in self.learned_ids(model, spelled)[2], eos == "<|im_end|>")

    def test_tokens_across_the_edge(self):
        """A token that begins in the prompt is not learned. A token that ends after the answer is learned. Both are counted."""
        template = "{% for m in messages %}{{ m.role + ':\n' + m.content }}{{ '\n' if m.role == 'user' else '\nx' }}{% endfor %}" \
                   "{{ 'assistant:\n' if add_generation_prompt }}"
        model = self.model(template, splits=False)
        for entry, count in ((say("a", "two"), 0), (say("a", "\n\ntwo"), 1), (say("a", "two", "a", "\n\ntwo"), 1)):
            _, printed = self.chat(model, self.write("x.jsonl", [entry]))
            self.assertEqual(f"one token with the end of the prompt: {count}," in printed, count > 0, printed)
        ends = "{% for m in messages %}{{ '\n\n' if loop.index0 }}{{ m.content }}{% endfor %}{{ '\n\n' if add_generation_prompt }}"
        model = self.model(ends, splits=False)
        for entry, count in ((say("a", "two\n"), 0), (say("a", "two", "a", "two"), 0), (say("a", "two\n", "a", "two"), 1)):
            _, printed = self.chat(model, self.write("x.jsonl", [entry]))
            self.assertEqual(f"whose last characters are in one token with what follows: {count}," in printed, count > 0, printed)


if __name__ == "__main__":
    unittest.main()
