"""Prompts for a model folder and their continuations by ./train --generate, for generate.py and score_captions.py. Needs the
package tokenizers, and jinja2 for chat templates; for pictures it needs what make_image_features.py needs."""
import json, os, re, shlex, subprocess, sys, tempfile, threading

import tokenizer_files
from errors import Bad


def add_arguments(parser):
    parser.add_argument("--train", default="./train", help="how the program is started; default: ./train")
    parser.add_argument("--max-new-tokens", type=int, default=512, help="maximum number of tokens per continuation; default: 512")


def parse(parser):
    """(arguments, options for ./train)"""
    known, rest = parser.parse_known_intermixed_args()
    try:
        known.train = shlex.split(known.train)
    except ValueError as problem:
        raise Bad(f"--train {known.train}: {problem}")
    known.folder = follow(known.folder)
    strange = [one for one in rest if not (one.startswith("--") and "=" in one)]
    if strange:
        raise Bad(f"{strange[0]}: expected an option above, or --key=value for ./train")
    return known, rest


def follow(folder):
    """Follows `latest` to the checkpoint. On a file system without symbolic links, `latest` is a file that names the
    checkpoint."""
    if os.path.basename(folder) != "latest" or not os.path.isfile(folder):
        return folder
    with open(folder, encoding="utf-8") as file:
        return os.path.join(os.path.dirname(folder), file.readline().rstrip("\n"))


def load_files(folder):
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path) and os.path.isfile(os.path.join(folder, "latest", "tokenizer.json")):
        raise Bad(f"{folder} holds the checkpoints of a run; expected one checkpoint, such as {os.path.join(folder, 'latest')}")
    if not os.path.isdir(folder):
        raise Bad(f"{folder}: no such folder; expected a checkpoint or a Hugging Face folder")
    if not os.path.isfile(path):
        raise Bad(f"{path}: no such file; ./train --generate=FILE takes prompts as tokens")
    return tokenizer_files.load(folder)


def model_of(folder):
    """The folder of the model. For adapters, the folder that adapter_config.json names, next to them or as a path."""
    path = os.path.join(folder, "adapter_config.json")
    if os.path.exists(os.path.join(folder, "config.json")) or not os.path.exists(path):
        return folder
    with open(path, encoding="utf-8") as file:
        name = json.load(file).get("base_model_name_or_path") or ""
    found = [one for one in (name, os.path.join(folder, name)) if name and os.path.exists(os.path.join(one, "config.json"))]
    if not found:
        raise Bad(f"{path}: base_model_name_or_path is {name!r}; expected the folder of a model")
    return found[0]


# ---- pictures ------------------------------------------------------------------------------------------------------------------

class Pictures:
    """Features of pictures for a model: features of `store`, or computed into a new folder. folder: None if there are no
    pictures."""

    def __init__(self, model, files, names, root=".", store=None):
        import chat_images, make_image_features
        self.new = None if store else tempfile.TemporaryDirectory()
        self.folder, model = store or self.new.name, model_of(model)
        if not store:
            make_image_features.make(model, root, names, self.folder)
        self.features = chat_images.Features(self.folder, model, files.tokenizer)
        self.token = self.features.token

    def expand(self, text, names, where):
        """(the text with as many image tokens as rows of features, numbers of the pictures)"""
        count = text.count(self.token)
        if count != len(names):
            raise Bad(f"{where}: the chat template writes {count} of {len(names)} images; expected all")
        return text.replace(self.token, self.token * self.features.rows), [self.features.number(name, where) for name in names]


# ---- the program ---------------------------------------------------------------------------------------------------------------

def pass_on(lines, path):
    """Passes on messages of the program. A line of the file of prompts becomes the number of a text, because users do not see
    that file."""
    for line in lines:
        sys.stderr.write(re.sub(re.escape(path) + r":(\d+)", r"text \1", line).replace(path, "texts"))


def run(args, options, prompts, pictures, take):
    """Calls take(number, tokens) for each continuation when it comes. Returns the program's exit status. prompts: objects such
    as {"tokens": [...]}; pictures: the pictures that they show, or None."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(prompt) + "\n" for prompt in prompts)
        file.flush()
        command = [*args.train, f"--generate={file.name}", f"--load_path={args.folder}", f"--max_new_tokens={args.max_new_tokens}",
                   *([f"--generate_features={pictures.folder}"] if pictures else []), *options]
        try:
            train = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
        except (FileNotFoundError, PermissionError) as problem:
            raise Bad(f"{problem.filename}: no such program; build it with make, or name it with --train")
        with train:
            errors = threading.Thread(target=pass_on, args=(train.stderr, file.name))
            errors.start()
            for line in train.stdout:
                if line.startswith("{"):
                    answer = json.loads(line)
                    take(answer["prompt"], answer["tokens"])
                else:                               # perhaps a message of mpirun
                    sys.stderr.write(line)
            errors.join()
    return train.returncode
