#!/usr/bin/env python3
"""scripts/make_chat_shards.py: where answers begin and end in what a chat template writes, and templates that do not tell."""
import os, shutil, sys, unittest

sys.dont_write_bytecode = True
from test_make_shards import MISSING, TEMPLATES, Folder

if not MISSING:
    from tokenizers import Tokenizer


class TemplateTest(Folder):
    def test_boundaries(self):
        """A token that begins in the prompt is not learned; one that begins in the answer is, whatever offsets leave out."""
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
        """Space at the end of an answer is the answer's where no token ends the turn; a line's end is not to be named eos."""
        model = self.model("{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
                           "{{ 'assistant:' if add_generation_prompt }}")
        output, printed = self.chat(model, self.write("x.jsonl", [{"prompt": "a", "completion": "two"}]))
        self.assertEqual(self.learned(model, output), ["two\n"])
        self.assertIn("of the last answers 1 of 1 end with no special token, 1 with Ċ (", printed)
        self.assertIn("have the chat template put {{ eos_token }} behind each answer", printed)
        self.assertNotIn("name it eos_token", printed)

    def test_ends(self):
        """A special token that ends answers may be named eos, if they do not all end with eos; a full stop may not."""
        two = [{"prompt": "a", "completion": "b."}, {"prompt": "two", "completion": "b."}, {"prompt": "two", "completion": "c"}]
        file = self.write("x.jsonl", two)
        name = "1 with <|turn|> (1): if programs are to stop there, name it eos_token in"
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
        """A header in front of answers that the template does not ask with is told; one that stands in the question is not."""
        loop = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<|end|>' }}{% endfor %}"
        file = self.write("x.jsonl", [{"prompt": "a", "completion": "two"}])
        for template, learned, told in ((loop, "<assistant>two<|end|>", True),
                                        (loop + "{{ '<assistant>' if add_generation_prompt }}", "two<|end|>", False),
                                        ("{% for m in messages %}{{ '[' + m.content + ']' if m.role == 'user' else "
                                         "m.content + '<|end|>' }}{% endfor %}", "two<|end|>", False)):
            model = self.model(template)
            output, printed = self.chat(model, file)
            self.assertEqual(self.learned(model, output), [learned])
            self.assertEqual("adds nothing for add_generation_prompt: '<assistant>' in front of answers" in printed, told)

    def test_last_turns_that_differ(self):
        """As OLMo 3 and Qwen 3 have them: another token at the end, thoughts."""
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
        """As Qwen 3 has them: calls stand behind the content, and thoughts before it where the turn is last. Where another
        token ends the last turn, nothing tells the end of such a call: not that token, many messages later."""
        turn = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}" \
               "{{ ('<think></think>' if THINKS and loop.last and m.role == 'assistant') ~ m.content }}" \
               "{% if m.tool_calls %}{{ '\n' if m.content }}<call>{{ m.tool_calls[0] }}</call>{% endif %}" \
               "{{ eos_token if not THINKS and loop.last and m.role == 'assistant' else '<|im_end|>\n' }}{% endfor %}" \
               "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
        qwen, olmo = (self.model(turn.replace("THINKS", one), ["<|end|>", "<|im_start|>", "<|im_end|>"]) for one in ("1", "0"))
        for content, expected in (("", "<call>b</call><|im_end|>"), ("x", "x\n<call>b</call><|im_end|>"),
                                  ([], "[]<call>b</call><|im_end|>")):
            file = self.write("x.jsonl", [{"messages": [
                {"role": "user", "content": "q"}, {"role": "assistant", "content": content, "tool_calls": ["b"]},
                {"role": "tool", "content": "b"}, {"role": "assistant", "content": "a"}]}])
            self.assertEqual(self.learned(qwen, self.chat(qwen, file)[0]), [expected, "<think></think>a<|im_end|>"])
            self.assert_bad(self.chat, (olmo, file), "message 2 differently when it is the last")

    def test_template_language(self):
        """What published templates use; chat_template.jinja goes before tokenizer_config.json, of a list the default counts."""
        turn = "{%- for m in messages %}\n    {% if m.role == 'tool' %}{% break %}{% endif %}\n" \
               "{{- m.role + strftime_now('%%') + (tools | tojson if tools else '') }}\n" \
               "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}" \
               "{%- endfor %}{{ 'assistant%' ~ (tools | tojson if tools else '') if add_generation_prompt }}{{ unk_token }}"
        model = self.model([{"name": "tool_use", "template": "x"}, {"name": "default", "template": turn}])
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "é"}, {"role": "function", "content": ""}]
        file = self.write("x.jsonl", [{"messages": messages, "tools": [{"a": "<é>"}]}])
        output, _ = self.chat(model, file)
        tokenizer = Tokenizer.from_file(model + "/tokenizer.json")
        text = tokenizer.decode(self.read(output)[0].tolist(), skip_special_tokens=False)
        self.assertEqual(text, 'user%[{"a": "<é>"}]assistant%[{"a": "<é>"}]é<|end|>')
        self.assertEqual(self.learned(model, output), ["é<|end|>"])
        shutil.copy(os.path.join(TEMPLATES, "olmo-2.jinja"), model + "/chat_template.jinja")
        self.assertIn("<|assistant|>\né", tokenizer.decode(self.read(self.chat(model, file)[0])[0].tolist()))

    def test_bad_templates(self):
        loop = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
        for template, *words in (
                (None, "has no chat template", "chat_template.jinja"), ("{% for %}", "line 1 of the chat template"),
                ("{{ raise_exception('no way') }}", "x.jsonl:1: ", "no way"), ("{{ messages[7].role + 'x' }}", "UndefinedError"),
                (loop + "{{ 'assistant<think>' if add_generation_prompt }}", "x.jsonl:1: ", "'<think>'", "'y<userz'"),
                (loop + "{{ messages | length }}", "x.jsonl:1: ", "expected the same"),
                ("{{ messages | map(attribute='content') | join }}{{ '' if messages | length == 1 else messages | length }}",
                 "x.jsonl:1: ", "message 2 differently when it is the last")):
            model = self.model(template)
            file = self.write("x.jsonl", [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y<"},
                                                        {"role": "user", "content": "z"}]}])
            self.assert_bad(self.chat, (model, file), *words)


if __name__ == "__main__":
    unittest.main()
