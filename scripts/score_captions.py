#!/usr/bin/env python3
"""Scores a model's answers to questions about pictures: exact match and token F1, as SQuAD defines them, in per cent.

    python3 scripts/score_captions.py FOLDER --root pictures test.jsonl
    python3 scripts/score_captions.py FOLDER --root pictures --shuffled --max-new-tokens=16 test.jsonl more.jsonl

FOLDER is a checkpoint of a model with images. The files hold conversations as for make_chat_shards.py --images; the last answer of
each is the reference. The model's answer is greedy, by ./train --generate. Before they are compared, both are converted to small
letters, without punctuation and the articles a, an and the. F1 is the harmonic mean of precision and recall of the answer's tokens.
--shuffled also asks with pictures of other conversations: a model that looks at the picture then has lower scores. Options that are
not listed below go to ./train unchanged. Needs what generate.py needs with --image.
"""
import argparse, collections, json, random, re, string, sys

import chat_images, chat_schema, continuations, errors, inputs
from chat_template import ChatTemplate
from errors import Bad

# where: "file:line"; text: the prompt with one image token for each picture; names: names of these pictures; reference: the right
# answer
Question = collections.namedtuple("Question", "path where text names reference")


# ---- scores --------------------------------------------------------------------------------------------------------------------

def normalized(text):
    """The words of a text, as in SQuAD's evaluate-v1.1.py."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def exact_match(answer, reference):
    return float(normalized(answer) == normalized(reference))


def token_f1(answer, reference):
    one, other = normalized(answer), normalized(reference)
    common = sum((collections.Counter(one) & collections.Counter(other)).values())
    return 2 * common / (len(one) + len(other)) if common else 0.0


# ---- questions -----------------------------------------------------------------------------------------------------------------

def read_lines(paths, token):
    """[(path, where, line without pictures, names)]"""
    found = []
    for batch, _ in inputs.read_batches(paths, lambda path, first: True):
        for path, number, line in batch:
            where = f"{path}:{number}"
            found.append((path, where, *chat_images.take(line, where, token)))
    return found


def make_question(path, where, line, names, template, token):
    talk = chat_schema.read_conversation(line, where, template.words)
    chat_images.check(talk, names, token, where)
    if not names:
        raise Bad(f"{where}: it shows no picture; expected questions about pictures")
    if talk.roles[-1] != "assistant" or not isinstance(talk.messages[-1].get("content"), str):
        raise Bad(f"{where}: its last message is not an answer; expected the answer that the model should write")
    try:
        text = template.render(talk.messages[:-1], True, talk.tools, **talk.variables)
    except Exception as problem:        # a template can raise any exception
        raise Bad(f"{where}: {type(problem).__name__} in the chat template: {problem}")
    return Question(path, where, text, names, talk.messages[-1]["content"])


def shuffled(questions, seed):
    """The questions with other pictures: the pictures of a question are replaced by the pictures of another question that
    has the same number of pictures. Equal pictures get equal replacements."""
    draw, others = random.Random(seed), {}
    for count in sorted({len(one.names) for one in questions}):
        rows = sorted({tuple(one.names) for one in questions if len(one.names) == count})
        if len(rows) == 1:
            raise Bad(f"--shuffled: all conversations with {count} pictures show the same; expected different ones")
        draw.shuffle(rows)
        others.update(zip(rows, rows[1:] + rows[:1]))
    return [one._replace(names=list(others[tuple(one.names)])) for one in questions]


# ---- the table -----------------------------------------------------------------------------------------------------------------

def ask(args, options, files, pictures, questions):
    """The model's answer to each question."""
    prompts, answers = [], [None] * len(questions)
    for one in questions:
        text, images = pictures.expand(one.text, one.names, one.where)
        prompts.append({"tokens": files.tokenizer.encode(text, add_special_tokens=False).ids, "images": images})

    def take(number, tokens):
        answers[number] = files.tokenizer.decode(tokens, skip_special_tokens=True)

    status = continuations.run(args, options, prompts, pictures, take)
    if status != 0:
        sys.exit(status)
    return answers


def table(paths, asked):
    """asked: {heading: [(question, answer)]}"""
    yield "| file | conversations |" + "".join(f" exact match{how} | token F1{how} |" for how in asked)
    yield "|---|---|" + "---|---|" * len(asked)
    for path in paths:
        cells = []
        for pairs in asked.values():
            own = [(one.reference, answer) for one, answer in pairs if one.path == path]
            cells += [100 * sum(score(answer, reference) for reference, answer in own) / len(own) for score in (exact_match, token_f1)]
        yield f"| {path} | {len(own)} | " + " | ".join(f"{cell:.1f}" for cell in cells) + " |"


def write_answers(path, asked):
    with open(path, "w", encoding="utf-8") as file:
        for how, pairs in asked.items():
            for one, answer in pairs:
                print(json.dumps({"question": one.where, "pictures": one.names, "shuffled": bool(how), "answer": answer,
                                  "reference": one.reference, "exact_match": exact_match(answer, one.reference),
                                  "f1": token_f1(answer, one.reference)}, ensure_ascii=False), file=file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("folder")
    parser.add_argument("files", nargs="+", help="conversations, a line each")
    parser.add_argument("--root", default=".", help="folder of the pictures")
    parser.add_argument("--images", metavar="FEATURES", help="features of the pictures, if they are computed already")
    parser.add_argument("--shuffled", action="store_true", help="also with pictures of other conversations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices; default: 0")
    parser.add_argument("--questions", type=int, help="number of conversations to take from each file, at random by --seed")
    parser.add_argument("--answers", metavar="FILE", help="file for the answers, one line for each answer")
    continuations.add_arguments(parser)
    args, options = continuations.parse(parser)
    inputs.check(args.files)
    if args.questions is not None and args.questions < 1:
        raise Bad(f"--questions={args.questions}; expected 1 or more")
    files = continuations.load_files(args.folder)
    token = chat_images.image_token(continuations.model_of(args.folder), files.tokenizer)
    template = ChatTemplate(args.folder, files)
    chat_images.suit(template, token)
    lines = read_lines(args.files, token)
    if args.questions:
        lines = [one for path in args.files for one in chosen([line for line in lines if line[0] == path], args)]
    questions = [make_question(*line, template, token) for line in lines]
    names = list(dict.fromkeys(name for one in questions for name in one.names))
    pictures = continuations.Pictures(args.folder, files, names, args.root, args.images)
    asked = questions + (shuffled(questions, args.seed) if args.shuffled else [])
    pairs = list(zip(asked, ask(args, options, files, pictures, asked)))
    result = {"": pairs[:len(questions)], **({", shuffled": pairs[len(questions):]} if args.shuffled else {})}
    if args.answers:
        write_answers(args.answers, result)
    print(*table(args.files, result), sep="\n")


def chosen(lines, args):
    return random.Random(args.seed).sample(lines, args.questions) if args.questions < len(lines) else lines


if __name__ == "__main__":
    try:
        errors.run(main, "a model folder, conversations and pictures that can be read")
    except Bad as problem:
        sys.exit(f"error: {problem}")
