#!/usr/bin/env python3
"""Random conversations through scripts/make_chat_shards.py and through transformers' apply_chat_template, by published templates.

    pip download --no-deps trl && unzip -j trl-*.whl 'trl/chat_templates/*.jinja' -d templates
    python3 tests/compare_chat.py 500 templates/*.jinja

For each template it counts the conversations with the same tokens, as a whole or, if each question has a document, up to the end of
its answers; those that both refuse, and those that only one refuses; and labels against a second method: for templates with
{% generation %} transformers' own mask of the assistant's tokens, for all others the words, since each word is in only one message.
Exits with 1 if tokens or labels differ. Needs the packages transformers, tokenizers, jinja2 and numpy.
"""
import collections, json, os, re, sys, tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(TOP, "scripts"), os.path.join(TOP, "tests")]
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

import make_chat_shards
from random_chat import Chat

TOKEN = re.compile(r"<\|[^|<>\n']{1,40}\|>|<｜[^｜\n']{1,40}｜>|</?[a-zA-Z_]{1,24}>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]{3,24}\]")
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>", "<｜end▁of▁sentence｜>",
        "<|END_OF_TURN_TOKEN|>")
FEATURES = {"system", "tools", "calls", "thoughts", "first", "lists"}
WORD = re.compile(r"w\d+w")


def make_model(folder, text):
    """Makes a folder with a template, and a tokenizer that knows the special tokens of the template."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(r"\n|w\d+w|[^\nw]+|w"), "isolated")     # words and line ends are separate tokens
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(["a model"], trainers.BpeTrainer(vocab_size=300, show_progress=False,
                                                                   initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    found = sorted(set(TOKEN.findall(text)))
    special = [one for one in found if not re.fullmatch("</?[a-z_]+>", one) or one in ENDS]
    end = next((one for one in ENDS if one in found), "</s>")
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in [*special, "<s>", "</s>"]])
    tokenizer.add_tokens([AddedToken(one, special=False, normalized=False) for one in found if one not in special])
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
        file.write(text)
    with open(os.path.join(folder, "tokenizer_config.json"), "w", encoding="utf-8") as file:
        json.dump({"bos_token": "<s>", "eos_token": end, "tokenizer_class": "PreTrainedTokenizerFast"}, file)


def words(value):
    return set(WORD.findall(json.dumps(value)))


class Comparison:
    def __init__(self, folder, masks):
        make_chat_shards.start(folder, None)
        self.peer, self.masks = AutoTokenizer.from_pretrained(folder), masks
        self.counts, self.shown = collections.Counter(), []

    def show(self, what, entry, *more):
        self.counts[what] += 1
        if what.endswith("differ") and len(self.shown) < 2:
            self.shown.append((what, json.dumps(entry, ensure_ascii=False), *more))

    def ask(self, messages, tools):
        """Returns (ids, mask of the assistant's tokens) by transformers, or None if the template refuses the conversation."""
        try:
            found = self.peer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=self.masks)
        except Exception:
            return None
        return found["input_ids"], found.get("assistant_masks")

    def compare(self, entry):
        messages, tools = entry["messages"], entry.get("tools")
        result = make_chat_shards.make_documents("x", 1, json.dumps(entry).encode())
        whole = self.ask(messages, tools)
        if result.problem or not whole:
            self.show("refused by both" if result.problem and not whole else
                      "refused only here" if result.problem else "refused only by transformers", entry)
            if whole and self.counts["refused only here"] == 1:
                self.shown.append(("refused only here", str(result.problem)))
            return
        split = len(result.documents) > 1 or [int(id) for id in result.documents[0][0]] != whole[0]
        self.counts["split"] += split
        ends = [i for i in range(1, len(messages)) if messages[i]["role"] == "user" and messages[i - 1]["role"] != "user"]
        begin = 0
        for ids, mask in result.documents:
            ids = ids.tolist()
            rest = [end for end in [*ends, len(messages)] if end > begin]
            end = next((end for end in rest if (self.ask(messages[:end], tools) or [0])[0] == ids), 0)
            if not end:
                return self.show("tokens differ", entry, repr(self.peer.decode(ids)), repr(self.peer.decode(whole[0])))
            self.check_labels(entry, begin if split else 0, end, ids, mask.tolist())
            begin = end
        self.counts["same tokens"] += 1

    def ids(self, messages, tools, asks):
        try:
            return self.peer.apply_chat_template(messages, tools=tools, add_generation_prompt=asks)["input_ids"]
        except Exception:
            return []

    def unprompted(self, messages, tools, ids, mask):
        """The mask without the tokens that add_generation_prompt writes. Some templates mark these tokens as the assistant's."""
        question, mask = [{"role": "user", "content": "x"}], list(mask)
        opening = self.ids(question, None, True)[len(self.ids(question, None, False)):]
        prompts = [self.ids(messages[:i], tools, True) for i in range(1, len(messages)) if messages[i]["role"] == "assistant"]
        for i in (i for i in range(len(ids)) if mask[i] and not (i and mask[i - 1])):
            for k in range(len(opening), 0, -1):
                begin = next((i - j for j in range(k) if ids[i - j:i - j + k] == opening[:k] and i >= j), None)
                if begin is not None:
                    mask[i:begin + k] = [0] * (begin + k - i)
                    break
            for prompt in prompts:
                if ids[:len(prompt)] == prompt and all(mask[i:len(prompt)]):
                    mask[i:len(prompt)] = [0] * max(0, len(prompt) - i)
        return mask

    def check_labels(self, entry, begin, end, ids, mask):
        answers = [message for message in entry["messages"][begin:end] if message["role"] == "assistant"]
        others = [message for message in entry["messages"][:end] if message not in answers]
        text = self.peer.decode(ids)
        learned = set(WORD.findall(self.peer.decode([id for id, on in zip(ids, mask) if on])))
        if learned != words(answers) & set(WORD.findall(text)) or learned & (words(others) - words(answers)):
            return self.show("labels differ", entry, repr(text), repr(self.peer.decode([id for id, on in zip(ids, mask) if on])))
        if self.masks and begin == 0:
            expected = self.ask(entry["messages"][:end], entry.get("tools"))[1]
            expected = self.unprompted(entry["messages"][:end], entry.get("tools"), ids, expected)
            # without line ends
            strip = lambda mask: [on and not self.peer.decode([id]).isspace() for id, on in zip(ids, mask)]
            if strip(mask) != strip(expected):
                return self.show("labels differ", entry, *(repr(self.peer.decode([id if on else 0 for id, on in zip(ids, one)]))
                                                           for one in (mask, expected)))
        self.counts["same labels"] += 1


def main():
    count, paths = int(sys.argv[1]), sys.argv[2:]
    failed = False
    for path in paths:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        with tempfile.TemporaryDirectory() as folder:
            make_model(folder, text)
            comparison = Comparison(folder, "generation" in text and "endgeneration" in text)
            for i in range(count):
                what = FEATURES - {one for one in FEATURES if Chat(i, {one}).maybe(one, 0.4)}
                comparison.compare(Chat(i, what).conversation())
        print(f"{os.path.basename(path)}: " + ", ".join(f"{n} {what}" for what, n in sorted(comparison.counts.items())), flush=True)
        for lines in comparison.shown:
            print(*lines, sep="\n    ")
        failed |= any(what.endswith("differ") for what in comparison.counts)
    sys.exit(failed)


if __name__ == "__main__":
    main()
