#!/usr/bin/env python3
"""scripts/make_chat_shards.py: what messages may contain, forms of lines, kinds of files, and errors."""
import bz2, gzip, importlib.util, io, json, lzma, os, subprocess, sys, threading, unittest
from unittest import mock

sys.dont_write_bytecode = True
from test_make_shards import MISSING, TOP, Folder

if not MISSING:
    from tokenizers import Tokenizer

    import make_chat_shards, make_shards

TOKENS = ["<|im_end|>", "<|im_start|>"]
HEAD = "{% for t in tools or [] %}{{ '<tool>' + t | tojson }}{% endfor %}" \
       "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
TAIL = "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function | tojson }}{% endfor %}"
CHATML = HEAD + "{{ m.content }}" + CALLS + TAIL
CALL = {"type": "function", "function": {"name": "look", "arguments": {"in": "Åre", "n": 1}}}
WRITTEN = '<call>{"name": "look", "arguments": {"in": "Åre", "n": 1}}'
QUESTION, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def call(**function):
    return {"type": "function", "function": {**CALL["function"], **function}}


class MessagesTest(Folder):
    def learned_of(self, template, *lines, notes=0):
        model = self.model(template, TOKENS)
        output, printed = self.chat(model, self.write("x.jsonl", list(lines)))
        self.assertEqual(printed.count("NOTE"), notes, printed)
        self.tokenizer = Tokenizer.from_file(model + "/tokenizer.json")
        self.text = self.tokenizer.decode(self.read(output)[0].tolist(), skip_special_tokens=False)
        return [text.removesuffix("<|im_end|>") for text in self.learned(model, output)]

    def test_content_that_is_missing(self):
        """A message with calls or thoughts may have null or absent content. The template then finds no content, as for other null
        keys."""
        for content in ({"content": None}, {}):
            said = {"messages": [QUESTION, {"role": "assistant", **content, "tool_calls": [CALL]}]}
            self.assertEqual(self.learned_of(CHATML, said), [WRITTEN])
            asks = HEAD + "{% if 'content' in m %}{{ m.content }}{% endif %}" + CALLS + TAIL
            self.assertEqual(self.learned_of(asks, said), [WRITTEN])
            thinks, said = HEAD + "{{ (m.reasoning_content or '') }}{{ m.content }}" + TAIL, {"role": "assistant", "thinking": "hm"}
            self.assertEqual(self.learned_of(thinks, {"messages": [QUESTION, {**said, **content}]}), ["hm"])
        nulls = dict.fromkeys(("tool_calls", "name", "reasoning_content", "function_call", "weight", "refusal"))
        looks = HEAD + "{{ m.content }}{% for key in m if key not in ('role', 'content') %}{{ key }}{% endfor %}" + TAIL
        self.assertEqual(self.learned_of(looks, {"messages": [{**QUESTION, **nulls}, {**ANSWER, **nulls}]}), ["a"])

    def test_calls(self):
        """Arguments are an object or its JSON text; so are whole calls and lists. The rendered text has the form that a model
        should write."""
        text, escaped = (json.dumps(CALL["function"]["arguments"], ensure_ascii=ascii) for ascii in (False, True))
        for calls in ([CALL], [call(arguments=text)], json.dumps([CALL]), [json.dumps(CALL)], [call(arguments=escaped)]):
            said = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]}
            self.assertEqual(self.learned_of(CHATML, said), [WRITTEN])
        for write, expected in (("c.function.arguments", text), ("'=' + c.function.arguments", "=" + text),
                                ("c.function.arguments | tojson", text), ("c.function.arguments['in']", "Åre"),
                                ("c.function.arguments if c.function.arguments is string else c.function.arguments | tojson", text)
                                ):
            template = HEAD + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ " + write + " }}{% endfor %}" + TAIL
            for calls in ([CALL], [call(arguments=text)]):
                said = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]}
                # a note about the name, which is left out
                self.assertEqual(self.learned_of(template, said, notes=1), [expected])
        flat = CHATML.replace("c.function | tojson", "c | tojson")
        said = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL["function"]]}]}
        self.assertEqual(self.learned_of(flat, said), [WRITTEN])
        old = {"messages": [QUESTION, {"role": "assistant", "content": None, "function_call": CALL["function"]},
                            {"role": "function", "name": "look", "content": "fog"}], "functions": [{"name": "look"}]}
        self.assertEqual(self.learned_of(CHATML, old, notes=2), [WRITTEN])     # notes about the role and the name
        self.assertIn('<tool>{"type": "function", "function": {"name": "look"}}', self.text)

    def test_tools(self):
        tool = {"name": "look", "parameters": {"a": None}}
        for tools in ([tool], json.dumps([tool]), [json.dumps(tool)]):
            self.assertEqual(self.learned_of(CHATML, {"messages": [QUESTION, ANSWER], "tools": tools}), ["a"])
            self.assertTrue(self.text.startswith("<tool>" + json.dumps(tool) + "<|im_start|>"))
        for tools in (None, [], "", "[]"):
            self.learned_of(CHATML, {"messages": [QUESTION, ANSWER], "tools": tools})
            self.assertTrue(self.text.startswith("<|im_start|>user"))

    def test_parts(self):
        """Lists of texts work with templates that know lists. With other templates, Python's spelling of the list in the text is
        an error."""
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        said = {"messages": [QUESTION, {"role": "assistant", "content": parts}]}
        knows = HEAD + "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}" \
                       "{% endfor %}{% endif %}" + TAIL
        self.assertEqual(self.learned_of(knows, said), ["ab"])
        self.assert_bad(self.chat, (self.model(CHATML, TOKENS), self.write("x.jsonl", [said])), "x.jsonl:1: ", "as Python does")
        thinks = knows.replace("part.text", "'<think>' + part.thinking + '</think>' if part.type == 'thinking' else part.text")
        said["messages"][1]["content"] = [{"type": "thinking", "thinking": "hm"}, parts[0]]
        self.assertEqual(self.learned_of(thinks, said), ["<think>hm</think>a"])
        result = {"messages": [QUESTION, ANSWER, {"role": "tool", "content": {"t": [1, None]}}, ANSWER]}
        dumps = CHATML.replace("m.content }}", "m.content if m.content is string else m.content | tojson }}")
        self.assertEqual(self.learned_of(dumps, result), ["a", "a"])
        self.assertIn('tool\n{"t": [1, null]}<|im_end|>', self.text)

    def test_variables(self):
        """A line may have chat_template_kwargs and documents, and messages may have keys that the script does not know."""
        template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.mood }}{{ mood }}{{ documents[0].text if documents }}")
        entry = {"messages": [{**QUESTION, "id": None}, {**ANSWER, "mood": "!"}], "chat_template_kwargs": {"mood": "?"},
                 "documents": [{"text": "D"}]}
        self.assertEqual(self.learned_of(template, entry), ["a!?D"])

    def test_bad_messages(self):
        """Each error names file, line and message. With --skip-bad the lines are skipped and counted, and ten are named."""
        answer = lambda **keys: {"messages": [QUESTION, {**ANSWER, **keys}]}
        null = call(); null["id"] = None
        bad = [(answer(**keys), words) for keys, *words in (
            ({"content": 5}, "message 2 has the content 5"), ({"content": True}, "content true"), ({"content": []}, "content []"),
            ({"content": {"a": 1}}, 'content {"a": 1}'), ({"content": None, "tool_calls": []}, "content null"),
            ({"content": [1], "tool_calls": [CALL]}, "content [1]"), ({"content": 7, "tool_calls": [CALL]}, "content 7"),
            ({"content": [{"type": "image", "url": "u"}]}, 'content [{"type": "image"'),
            ({"content": [{"type": "text", "text": None}]}, 'content [{"type": "text", "text": null}]'),
            ({"tool_calls": "x"}, '"tool_calls" is "x"', "a list, or JSON text of one"), ({"tool_calls": {}}, '"tool_calls" is {}'),
            ({"tool_calls": [5]}, "a call of a tool is 5"), ({"tool_calls": [{}]}, "a call of a tool is {}"),
            ({"tool_calls": [{"function": {"name": None}}]}, "a call of a tool is"),
            ({"tool_calls": [{"function": "f"}]}, "a call of a tool is"), ({"tool_calls": [call(arguments=[])]}, "is []"),
            ({"tool_calls": [call(arguments="{")]}, '"arguments" of a call is "{"'),
            ({"tool_calls": [call(arguments=None)]}, "is null"), ({"tool_calls": [call(arguments="")]}, 'is ""'),
            ({"tool_calls": [call(arguments='{"x": NaN}')]}, "of a call is"),
            ({"value": "b"}, 'message 2 has one text in "content" and another in "value"'),
            ({"function_call": "look"}, '"function_call" is "look"'), ({"reasoning": 3}, '"reasoning" is 3'),
            ({"weight": 2}, "weight 2"), ({"train": "no"}, 'the train "no"; expected false'), ({"loss": []}, "the loss []"),
            ({"role": 3}, "role 3"), ({"role": "robot"}, 'role "robot"'), ({"role": None}, "role null"),
            ({"role": "function_call"}, 'its text is "a"'))]
        bad += [({"messages": [{**QUESTION, "tool_calls": [CALL]}, ANSWER]}, ['message 1 has the role "user" and calls']),
                ({"messages": [{**QUESTION, "train": True}, ANSWER]}, ['message 1 has the role "user" and is to be learned'])]
        bad += [({"messages": [QUESTION, ANSWER], **keys}, words) for keys, *words in (
            ({"tools": {"name": "look"}}, '"tools" is {"name": "look"}', "a list"), ({"tools": "look"}, '"tools" is "look"'),
            ({"tools": ["look"]}, 'one of "tools" is "look"'), ({"tools": [None]}, "is null"), ({"tools": 5}, '"tools" is 5'),
            ({"functions": [3]}, 'one of "functions" is 3'), ({"documents": "D"}, '"documents" is "D"'),
            ({"chat_template_kwargs": {"messages": []}}, "has messages"), ({"chat_template_kwargs": {"self": 1}}, "has self"),
            ({"chat_template_kwargs": [1]}, "is [1]"))]
        bad += [({"prompt": [], "completion": [ANSWER]}, ['"prompt" is []']),
                ({"prompt": [5], "completion": "a"}, ["message 1 is 5"]),
                ({"prompt": [QUESTION], "completion": 5}, ['"completion" is 5']),
                ({"instruction": "q", "output": "a", "history": [["x"]]}, ['"history" is [["x"]]', "pairs"]),
                ({"instruction": "q", "output": "a", "history": "x"}, ['"history" is "x"']),
                ({"messages": None}, ['"messages" is null']), (answer(tool_calls=[null], content=float("nan")), ["NaN is not JSON"])]
        model = self.model(CHATML, TOKENS)
        for entry, words in bad:
            file = self.write("x.jsonl", [answer(), entry])
            self.assert_bad(self.chat, (model, file), f"{file}:2: ", *words)
        none = {**answer(tool_calls=[null]), "tools": [{"name": "look", "None": "or None"}]}
        self.assertEqual(self.learned(model, self.chat(model, self.write("x.jsonl", [none]))[0]), ["a" + WRITTEN + "<|im_end|>"])
        writes = self.model(CHATML.replace("'<call>' +", "c.id ~"), TOKENS)
        self.assert_bad(self.chat, (writes, self.write("x.jsonl", [none])), "x.jsonl:1: ", "writes None")
        self.assert_bad(self.chat, (writes, self.write("x.jsonl", [answer(tool_calls=[null])])), "x.jsonl:1: ", "writes None")
        file = self.write("y.jsonl", "{\n" + "".join(json.dumps(one) + "\n" for entry, _ in bad for one in (entry, answer())))
        for processes in "12":
            output, printed = self.chat(model, file, "--skip-bad", "--processes", processes)
            self.assertIn(f"left out, as --skip-bad asks: {len(bad) + 1}\n  {file}:1: ", printed)
            self.assertIn(f"\n  {file}:18: message 2 has", printed)
            self.assertIn(f"\n  and {len(bad) - 9} more\n{len(bad)} conversations in 1 part", printed)
            self.assertEqual(self.learned(model, output), ["a<|im_end|>"] * len(bad))
        file = self.write("z.jsonl", [{}])
        self.assert_bad(self.chat, (model, file, "--skip-bad"), "z.jsonl: none of its 1 conversations", "z.jsonl:1: an object")
        more = self.write("x.jsonl", [answer(), 5])
        self.assert_bad(self.chat, (model, more, file, "--skip-bad"), "z.jsonl: none of its 1 conversations", "z.jsonl:1: an object")

    def test_nested_deeply(self):
        """Deeply nested JSON is accepted or is an error of its line. It does not end the script by Python's recursion limit."""
        make_chat_shards.start(self.model(CHATML, TOKENS), None)
        problems = set()
        for depth in [*range(850, 1000), 5000, 20000]:
            text = json.dumps("[" * depth + "]" * depth)
            for said in (f'"content": "", "tool_calls": [{{"name": "f", "arguments": "{{\\"a\\": {text[1:-1]}}}"}}]',
                         f'"content": "a", "x": {text[1:-1]}'):
                line = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", ' + said + "}]}"
                problem = make_chat_shards.make_documents("x", 1, line.encode()).problem
                problems.add(problem and str(problem)[:5])
        self.assertEqual(problems, {None, "x:1: "})

    def test_halves_of_surrogates_in_notes(self):
        """Messages to the terminal may contain characters that UTF-8 cannot encode."""
        model, odd = self.model(CHATML, TOKENS), "\ud83d"
        file = self.write("x.jsonl", [{"messages": [QUESTION, {**ANSWER, **keys}]} for keys in ({odd: 1}, {"content": {odd: 1}})])
        program = [sys.executable, "-B", os.path.join(TOP, "scripts", "make_chat_shards.py"), "--model", model, "--output"]
        done = subprocess.run([*program, os.path.join(self.top, "odd"), file, "--skip-bad"], capture_output=True)
        self.assertEqual((done.returncode, done.stderr), (0, b""))
        self.assertIn(b'the key "\\ud83d"', done.stdout)
        self.assertIn(b'x.jsonl:2: message 2 has the content {"\\ud83d": 1}', done.stdout)


class FormsTest(Folder):
    """Several ways to write a conversation give the same bytes."""
    def same(self, *forms, template=CHATML):
        model = self.model(template, TOKENS)
        digests = [self.digest(self.chat(model, self.write("x.jsonl", [form]))[0]) for form in forms]
        self.assertEqual(digests, [digests[0]] * len(forms))

    def test_sharegpt_with_tools(self):
        call, more = CALL["function"], {"name": "go", "arguments": {}}
        wrap = lambda *calls: [{"type": "function", "function": one} for one in calls]
        result, tools = {"role": "tool", "content": "fog"}, [{"name": "look"}]
        says = lambda *calls: {"role": "assistant", "content": "", "tool_calls": wrap(*calls)}
        messages = [{"role": "system", "content": "S"}, QUESTION, says(call), result, says(call, more), result, ANSWER]
        for names in (("function_call", "observation"), ("tool_call", "tool_response"), ("function_call", "tool")):
            said = [("human", "q"), (names[0], json.dumps(call)), (names[1], "fog"), (names[0], json.dumps([call, more])),
                    (names[1], "fog"), ("gpt", "a")]
            self.same({"messages": messages, "tools": tools}, {"system": "S", "tools": json.dumps(tools), "conversations": [
                {"from": name, "value": text} for name, text in said]})

    def test_prompt_and_completion_as_messages(self):
        """TRL's form; answers in the prompt are not learned."""
        old = {"role": "assistant", "content": "old"}
        whole = {"messages": [QUESTION, {**old, "weight": 0}, QUESTION, ANSWER, QUESTION, ANSWER], "tools": [{"name": "t"}]}
        self.same(whole, {"prompt": [QUESTION, old, QUESTION], "completion": [ANSWER, QUESTION, ANSWER], "tools": [{"name": "t"}]})
        names = [{"from": name, "value": text} for name, text in (("human", "q"), ("gpt", "old"), ("human", "q"))]
        self.same({"messages": [QUESTION, {**old, "weight": 0}, QUESTION, ANSWER]}, {"prompt": names, "completion": "a"})
        self.same({"messages": [QUESTION, ANSWER]}, {"prompt": [QUESTION], "completion": "a"},
                  {"prompt": "q", "completion": [ANSWER]})

    def test_alpaca_with_history(self):
        history = {"instruction": "q", "input": "", "output": "a", "history": [["q1", "a1"], ["q2", "a2"]], "system": "S"}
        said = [("system", "S"), *((role, text + n) for n in ("1", "2", "") for role, text in (("user", "q"), ("assistant", "a")))]
        self.same({"messages": [{"role": role, "content": text} for role, text in said]}, history)
        for none in ([], None):
            self.same({"messages": [QUESTION, ANSWER]}, {"instruction": "q", "output": "a", "history": none, "messages": None})

    def test_what_is_not_learned(self):
        unlearned = {"weight": 0}, {"train": False}, {"loss": False}, {"weight": 1, "train": False}
        self.same(*({"messages": [{**QUESTION, "train": False}, {**ANSWER, **keys}, QUESTION, ANSWER]} for keys in unlearned))
        self.same(*({"messages": [QUESTION, {**ANSWER, **keys}]} for keys in ({}, {"weight": 1}, {"train": True}, {"loss": None})))


class FilesTest(Folder):
    LINES = [{"prompt": f"q{i}", "completion": f"a{i}"} for i in range(300)]

    def data(self):
        return b"\xef\xbb\xbf" + b"".join(json.dumps(line).encode() + b"\r\n" for line in self.LINES)

    def kinds(self):
        """(name, bytes)"""
        data, half = self.data(), len(self.data()) // 2
        yield from (("x.jsonl", data), ("x.ndjson", data), ("x.jsonl.gz", gzip.compress(data)), ("x.JSONL.BZ2", bz2.compress(data)),
                    ("x.ndjson.xz", lzma.compress(data)), ("two.jsonl.gz", gzip.compress(data[:half]) + gzip.compress(data[half:])),
                    ("no-name", lzma.compress(data)), ("x.jsonl.bz2", bz2.compress(data[:half]) + bz2.compress(data[half:])))

    def zstd_kinds(self):
        import zstandard
        data, half, pack = self.data(), len(self.data()) // 2, zstandard.ZstdCompressor().compress
        skipped = b"\x50\x2a\x4d\x18\x01\0\0\0x"
        yield from (("x.jsonl.zst", pack(data)), ("two.jsonl.zst", pack(data[:half]) + skipped + pack(data[half:])))

    def path(self, name, data):
        path = os.path.join(self.top, name)
        with open(path, "wb") as file:
            file.write(data)
        return path

    def check(self, kinds):
        expected = self.digest(self.chat("chatml", self.write("plain.jsonl", self.LINES))[0])
        for name, data in kinds:
            with self.subTest(name):
                path = self.path(name, data)
                self.assertEqual(self.digest(self.chat("chatml", path)[0]), expected)
                if data != self.data():
                    for cut in (len(data) - 5, len(data) // 3):
                        path = self.path("cut-" + name, data[:cut])
                        self.assert_bad(self.chat, ("chatml", path), f"cut-{name}: ", "a whole file")

    def test_kinds(self):
        self.check(self.kinds())
        for name in ("plain.jsonl.gz", "plain.jsonl.zst", "empty.xz"):
            path = self.path(name, b"" if "empty" in name else self.data())
            self.assert_bad(self.chat, ("chatml", path), f"{name}: damaged, or not compressed although")

    @unittest.skipUnless(importlib.util.find_spec("zstandard"), "pip install zstandard")
    def test_zstd(self):
        import zstandard
        self.check(self.zstd_kinds())
        long = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)         # as zstd --long=28 does
        long = zstandard.ZstdCompressor(compression_params=long).compressobj()
        self.check([("long.jsonl.zst", long.compress(self.data()) + long.flush())])

    def test_zstd_without_its_package(self):
        path = self.path("x.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(20))
        with mock.patch.dict(sys.modules, {"zstandard": None, "compression": None}):
            self.assert_bad(self.chat, ("chatml", path), "x.jsonl.zst: ", "pip install zstandard")

    def test_pipes(self):
        """Standard input and named pipes, which can be read once, plain or compressed."""
        expected = self.digest(self.chat("chatml", self.write("plain.jsonl", self.LINES))[0])
        program = [sys.executable, "-B", os.path.join(TOP, "scripts", "make_chat_shards.py")]
        program += ["--model", os.path.join(self.models, "chatml")]
        for data in (self.data(), gzip.compress(self.data())):
            output = os.path.join(self.top, f"piped{len(data)}")
            done = subprocess.run([*program, "--output", output, "-"], input=data, capture_output=True)
            self.assertEqual((done.returncode, done.stderr), (0, b""))
            self.assertEqual(self.digest(output), expected)
            pipe = os.path.join(self.top, f"pipe{len(data)}")
            os.mkfifo(pipe)
            thread = threading.Thread(target=lambda: open(pipe, "wb", buffering=0).write(data))
            thread.start()
            self.assertEqual(self.digest(self.chat("chatml", pipe)[0]), expected)
            thread.join()
        closed = subprocess.run(["sh", "-c", 'exec "$@" <&-', "", *program, "--output", output + "x", "-"], capture_output=True)
        self.assertIn(b"error: standard input is closed", closed.stderr)
        broken = subprocess.run([*program, "--output", output + "x", "-"], input=b'{"prompt": 1}\n{', capture_output=True)
        self.assertIn(b"error: -:1: ", broken.stderr)

    def test_texts(self):
        """make_shards.py reads the same kinds of files. In a pipe, the first character tells whether the lines are JSON."""
        tokenizer = os.path.join(self.models, "chatml")
        lines = b'\xef\xbb\xbf{"text": "abc"}\n{"text": ""}\n{"text": 3}\n'
        options = "--tokenizer", tokenizer, "--eos", "<|im_end|>", "--processes", "1", "--skip-bad"
        run, digests = lambda *files: self.call(make_shards, *options, *files), []
        for name, data in (("x.ndjson", lines), ("x.jsonl", lines), ("x.ndjson.xz", lzma.compress(lines)),
                           ("x.json.bz2", bz2.compress(lines))):
            output, printed = run(self.path(name, data))
            self.assertIn(f"left out, as --skip-bad asks: 1\n  {self.top}/{name}:3: ", printed)
            with open(os.path.join(output, "part-00000.npy"), "rb") as file:
                digests.append(file.read())
        for data in (lines, gzip.compress(lines), b"abc", b"\n abc\n"):
            stdin = mock.Mock(buffer=io.BytesIO(data))
            with mock.patch.object(sys, "stdin", stdin):
                output, printed = run("-")
            with open(os.path.join(output, "part-00000.npy"), "rb") as file:
                digests.append(file.read())
        self.assertEqual(digests, digests[:1] * len(digests))
        output, printed = run(self.path("bad.txt", b"\xff"), self.path("good.txt", b"abc"))
        self.assertIn(f"left out, as --skip-bad asks: 1\n  {self.top}/bad.txt: ", printed)


if __name__ == "__main__":
    unittest.main()
