#!/usr/bin/env python3
"""Makes a downstream task of captioned pictures. Each question is which of several captions belongs to the picture.

    python3 scripts/make_choices.py --model LLAVA_FOLDER --images features --output eval/animals.jsonl test.jsonl

The files hold conversations as for make_chat_shards.py --images. The choices are the last answer of a conversation and different
answers of other conversations, drawn at random. A choice is scored by the log-probabilities of the tokens that fine-tuning would
learn. OUTPUT is the request file of an evaluator of type downstream (prepare_eval.py), whose questions also have "images", numbers
of pictures among the features. Prints the evaluator for a run's YAML. Needs what make_chat_shards.py needs.
"""
import argparse, datetime, json, os, random, sys

import chat_images, chat_schema, errors, inputs, make_chat_shards
from errors import Bad


def read(paths, token):
    """[(path, line number, messages, names of pictures)] of the conversations that end with an answer."""
    found = []
    for batch, _ in inputs.read_batches(paths, lambda path, first: True):
        for path, number, line in batch:
            line, names = chat_images.take(line, f"{path}:{number}", token)
            talk = chat_schema.read_conversation(line, f"{path}:{number}")
            if talk.roles[-1] != "assistant" or not isinstance(talk.messages[-1].get("content"), str):
                raise Bad(f"{path}:{number}: its last message is not an answer; expected the caption of the picture")
            if not talk.messages[-1]["content"].strip():
                raise Bad(f"{path}:{number}: its last message is empty; expected the caption of the picture")
            found.append((path, number, talk.messages, names))
    return found


def make_choice(path, number, messages, names, answer):
    """The choice with this answer as the last message: ({"tokens", ...}, numbers of the pictures)."""
    told = {"messages": [*messages[:-1], {**messages[-1], "content": answer}], "images": names}
    result = make_chat_shards.make_documents(path, number, json.dumps(told).encode())
    if result.problem:
        raise result.problem
    if not result.documents:
        raise Bad(f"{path}:{number}: the chat template writes no answer; expected one to score")
    ids, mask, shown = result.documents[-1]
    end = max(mask.nonzero()[0]) + 1
    begin = max([-1, *(~mask[:end]).nonzero()[0]]) + 1
    return {"tokens": ids[:end].tolist(), "continuation": int(end - begin), "characters": len(answer),
            "bytes": len(answer.encode())}, [int(one) for one in shown]


def questions(talks, count, seed):
    answers = sorted({messages[-1]["content"] for _, _, messages, _ in talks})
    if len(answers) < count:
        raise Bad(f"--choices={count}: the conversations have {len(answers)} different answers; expected at least as many")
    for path, number, messages, names in talks:
        draw = random.Random(f"{seed} {path} {number}")
        own = messages[-1]["content"]
        choices = draw.sample([one for one in answers if one != own], count - 1)
        gold = draw.randrange(count)
        choices.insert(gold, own)
        made = [make_choice(path, number, messages, names, answer) for answer in choices]
        yield {"gold": gold, "images": made[0][1], "choices": [choice for choice, _ in made]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="conversations, a line each")
    parser.add_argument("--model", required=True, help="folder with tokenizer.json and chat template")
    parser.add_argument("--images", required=True, metavar="FEATURES", help="the folder that make_image_features.py wrote")
    parser.add_argument("--choices", type=int, default=4, help="number of choices of a question; default: 4")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choices; default: 0")
    parser.add_argument("--output", required=True, help="the file to make; its name is the name of the task")
    args = parser.parse_args()
    inputs.check(args.files)
    if args.choices < 2:
        raise Bad(f"--choices={args.choices}; expected 2 or more")
    make_chat_shards.start(args.model, datetime.datetime.now(), args.images)
    talks = read(args.files, make_chat_shards.process.features.token)
    task = os.path.splitext(os.path.basename(args.output))[0]
    made = list(questions(talks, args.choices, args.seed))
    with open(args.output, "x", encoding="utf-8") as file:
        print(json.dumps({"task": task, "metric": "acc", "questions": len(made)}), file=file)
        for one in made:
            print(json.dumps(one, separators=(",", ":")), file=file)
    data = {"paths": [args.output], "image_features": args.images}
    print(f"evaluators:\n- {{label: {task}, type: downstream, data: {json.dumps(data, ensure_ascii=False)}}}")


if __name__ == "__main__":
    try:
        errors.run(main, "conversations that can be read, and an --output in a folder that is there and has no such file")
    except Bad as problem:
        sys.exit(f"error: {problem}")
