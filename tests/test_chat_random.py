#!/usr/bin/env python3
"""scripts/make_chat_shards.py: 504 random conversations in eight chat templates, which render as the published templates
(tests/golden/chat). If transformers is installed, its apply_chat_template must agree. The test derives the labels from the known
output of each template. Further tests write the same conversations in other forms, and odd conversations. tests/compare_chat.py
takes any templates, tests/fuzz_chat.py any number of odd lines."""
import importlib.util, json, os, random, shutil, sys, unittest

sys.dont_write_bytecode = True
from random_chat import Chat, json_arguments, nulls, sharegpt
from test_make_shards import MISSING, TEMPLATES, Folder, chatml_pieces, llama_pieces, make_tokenizer, olmo_pieces

if not MISSING:
    from tokenizers import Tokenizer

    import fuzz_chat, make_chat_shards

COUNT = 63          # conversations for each template


def gemma_pieces(messages):
    yield "<bos>", False
    for message in messages:
        learned = message["role"] == "assistant"
        for text in ("<start_of_turn>", "model" if learned else "user", "\n"):
            yield text, False
        yield message["content"].strip(), learned
        yield "<end_of_turn>", learned
        yield "\n", False


def mistral_pieces(messages):
    """The template puts the system message into the last message, if that is a question. So the text of a conversation that ends
    with an answer lacks it."""
    yield "<s>", False
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    for message in messages:
        if message["role"] == "user":
            yield "[INST]", False
            yield (system if message is messages[-1] else "") + message["content"], False
            yield "[/INST]", False
        elif message["role"] == "assistant":
            yield message["content"], True
            yield "</s>", True


def header_pieces(end):
    def pieces(messages):
        for message in messages:
            yield f"<|{message['role']}|>", False
            yield "\n", False
            for text in (message["content"], end):
                yield text, message["role"] == "assistant"
            yield "\n", False
    return pieces


def phi_pieces(messages):
    """A last answer ends with a second token; the text between the two tokens is learned, too."""
    *pieces, (line, _) = header_pieces("<|end|>")(messages)
    ends = messages[-1]["role"] == "assistant"
    yield from [*pieces, (line, ends), ("<|endoftext|>", ends)]


def qwen_turn(message, thinks):
    thoughts, content = message.get("reasoning_content", "").strip("\n"), message["content"]
    if thinks:
        yield from ("<think>", "\n", thoughts, "\n", "</think>", "\n", "\n", content.lstrip("\n"))
    else:
        yield content
    for i, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        yield "\n" if content or i else ""
        yield from ("<tool_call>", "\n", '{"name": "' + function["name"] + '", "arguments": ' +
                    json.dumps(function["arguments"], ensure_ascii=False) + "}", "\n", "</tool_call>")
    yield "<|im_end|>"


def qwen_pieces(messages, tools=None, since=0):
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    if tools:
        tools = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        yield "<|im_start|>system\n" + (system + "\n\n" if system is not None else "") + (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
            f"signatures within <tools></tools> XML tags:\n<tools>{tools}\n</tools>\n\nFor each function call, return a json "
            "object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
            "{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>"), False
        yield "<|im_end|>\n", False
    elif system is not None:
        yield f"<|im_start|>system\n{system}<|im_end|>\n", False
    last = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        if message["role"] == "user":
            yield f"<|im_start|>user\n{message['content']}<|im_end|>\n", False
        elif message["role"] == "assistant":
            yield "<|im_start|>assistant\n", False
            for text in qwen_turn(message, i > last and (i == len(messages) - 1 or "reasoning_content" in message)):
                yield text, i >= since
            yield "\n", False
        elif message["role"] == "tool":
            yield "<|im_start|>user" if messages[i - 1]["role"] != "tool" else "", False
            yield f"\n<tool_response>\n{message['content']}\n</tool_response>", False
            yield "<|im_end|>\n" if messages[i + 1]["role"] != "tool" else "", False


def qwen_documents(messages, tools):
    """One document or, where the template drops earlier thoughts, a document for each question."""
    questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if any("reasoning_content" in message for message in messages[:questions[-1]]):
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        for begin, end in zip(questions, [*questions[1:], len(messages)]):
            if any(begin <= i < end for i in answers):
                yield qwen_pieces(messages[:end], tools, begin)
    else:
        yield qwen_pieces(messages, tools)


# special tokens, the first of them bos and the last eos; other tokens; what conversations have; pieces, or a function that makes
# the documents
SHAPES = {
    "llama-3.1": (["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], [], {"system"}, llama_pieces),
    "olmo-2": (["<|endoftext|>"], [], {"system"}, olmo_pieces),
    "chatml": (["<|im_start|>", "<|im_end|>"], [], {"system", "first"}, chatml_pieces),
    "gemma-2": (["<bos>", "<start_of_turn>", "<end_of_turn>"], [], set(), gemma_pieces),
    "mistral-nemo": (["<s>", "[INST]", "[/INST]", "</s>"], [], {"system"}, mistral_pieces),
    "zephyr": (["<|system|>", "<|user|>", "<|assistant|>", "</s>"], [], {"system", "first"}, header_pieces("</s>")),
    "phi-3.5": (["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"], [], {"system", "first"}, phi_pieces),
    "qwen3": (["<|im_start|>", "<|im_end|>"],
              [f"<{end}{tag}>" for tag in ("think", "tool_call", "tool_response") for end in ("", "/")],
              {"system", "tools", "calls", "thoughts", "lists"}, qwen_documents),
}


def make_folder(top, name):
    """Makes a folder with a template and its tokenizer; returns (folder, tokenizer)."""
    special, more, _, _ = SHAPES[name]
    folder = os.path.join(top, name)
    os.makedirs(folder, exist_ok=True)
    make_tokenizer(folder + "/tokenizer.json", special)
    tokenizer = Tokenizer.from_file(folder + "/tokenizer.json")
    tokenizer.no_truncation()
    tokenizer.add_tokens(more)
    tokenizer.save(folder + "/tokenizer.json")
    config = {"bos_token": special[0], "eos_token": special[-1], "tokenizer_class": "PreTrainedTokenizerFast"}
    Folder.dump(config, folder, "tokenizer_config.json")
    shutil.copy(os.path.join(TEMPLATES, name + ".jinja"), folder + "/chat_template.jinja")
    return folder, tokenizer


class RandomTest(Folder):
    def folder(self, name):
        return make_folder(self.top, name)

    def conversations(self, name):
        return [Chat(i, SHAPES[name][2]).conversation() for i in range(COUNT)]

    def documents(self, folder, entries):
        output, _ = self.chat(folder, self.write("x.jsonl", entries))
        ids, mask, rows = self.read(output)
        return [(ids[begin:end].tolist(), mask[begin:end].tolist()) for begin, end in rows]

    def test_labels(self):
        for name, (_, _, _, pieces) in SHAPES.items():
            with self.subTest(name):
                folder, tokenizer = self.folder(name)
                entries, expected = self.conversations(name), []
                for entry in entries:
                    some = pieces(entry["messages"], entry.get("tools")) if name == "qwen3" else [pieces(entry["messages"])]
                    for document in some:
                        tokens = [(tokenizer.encode(text, add_special_tokens=False).ids, learned) for text, learned in document]
                        expected.append(([id for ids, _ in tokens for id in ids], [int(on) for ids, on in tokens for _ in ids]))
                found = self.documents(folder, entries)
                self.assert_same([ids for ids, _ in found], [ids for ids, _ in expected])
                self.assert_same([mask for _, mask in found], [mask for _, mask in expected])

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "pip install transformers")
    def test_transformers(self):
        """The tokens of the whole conversation or, with the thoughts of Qwen 3, up to the answers to a question."""
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        from transformers import AutoTokenizer
        for name in SHAPES:
            with self.subTest(name):
                folder, _ = self.folder(name)
                peer, expected = AutoTokenizer.from_pretrained(folder), []
                entries = self.conversations(name)
                for entry in entries:
                    messages = entry["messages"]
                    ends = [i for i, message in enumerate(messages) if i and message["role"] == "user"] + [len(messages)]
                    split = name == "qwen3" and any("reasoning_content" in message for message in messages[:([0] + ends)[-2]])
                    for begin, end in zip([0, *ends], ends) if split else [(0, len(messages))]:
                        if any(message["role"] == "assistant" for message in messages[begin:end]):
                            expected.append(peer.apply_chat_template(messages[:end], tools=entry.get("tools"))["input_ids"])
                self.assert_same([ids for ids, _ in self.documents(folder, entries)], expected)

    def test_same_said_otherwise(self):
        """Null keys, arguments as JSON, and ShareGPT's form give the same bytes."""
        r, (folder, _) = random.Random(0), self.folder("qwen3")
        entries = [Chat(i, {"system", "tools", "calls", "lists"}).conversation() for i in range(60)]
        entries = [entry for entry in entries if sharegpt(entry)]
        self.assertTrue(len(entries) > 15)
        for entry in entries:       # which ShareGPT cannot express
            entry["messages"] = [{key: value for key, value in message.items() if key not in ("name", "tool_call_id")}
                                 for message in entry["messages"]]
        expected = self.documents(folder, entries)
        for change in (lambda entry: {**entry, "messages": [nulls(message, r) for message in entry["messages"]]},
                       lambda entry: {**entry, "messages": [json_arguments(message) for message in entry["messages"]]}, sharegpt):
            self.assert_same(self.documents(folder, [change(entry) for entry in entries]), expected)

    def test_odd_lines(self):
        """Each odd line ends with an error that names the line, or becomes the text that transformers makes of it."""
        for name in ("qwen3", "chatml"):
            folder, _ = self.folder(name)
            counts = fuzz_chat.Fuzz(folder).run(400, 0)
            self.assertEqual(sum(counts.values()), 400)
            self.assertTrue(min(counts["refused"], counts["taken"]) > 50, counts)


if __name__ == "__main__":
    unittest.main()
