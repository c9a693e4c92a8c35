"""Steps of ./train on small models, its exports and its losses, for the scripts that compare it with other libraries."""
import argparse
import json
import shlex
import subprocess
import tempfile

import torch
import transformers


def parser_of(doc, origin):
    """The command line of such a script. doc: its help; origin: the script whose models NAMEs are."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default="./train")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"models of {origin}; default: all")
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    return parser


def each_model(parser, options, models):
    """Name, number and an empty folder of each model that the command line names."""
    for name in options.names or models:
        if name not in models:
            parser.error(f"there is no model {name}; there are {', '.join(models)}")
        with tempfile.TemporaryDirectory() as root:
            yield name, list(models).index(name), root


def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}error: exit status {done.returncode}")


def train(options, root, name, load, rate, length, steps=1, data=None, recipe="f32", more=""):
    """Steps of two sequences from the folder `load`, of root/tokens.npy or the section `data`; returns the checkpoint and the loss of
    the first step. more: further lines of the configuration."""
    folder = f"{root}/{name}"
    with open(folder + ".yaml", "w", encoding="utf-8") as file:
        file.write(f"global_train_batch_size: 2\ndevice_train_microbatch_size: 1\nmax_duration: {steps}\neval_interval: null\n"
                   f"recipe: {recipe}\nload_path: {load}\nsave_folder: {folder}\nmodel: {{max_sequence_length: {length}}}\n"
                   f"optimizer: {{learning_rate: {rate}, weight_decay: 0}}\nscheduler: {{name: constant}}\n"
                   f"data: {data or f'{{paths: [{root}/tokens.npy]}}'}\n{more}")
    run([*shlex.split(options.train), folder + ".yaml"])
    with open(f"{folder}/metrics.jsonl", encoding="utf-8") as file:
        losses = [json.loads(line).get("train/CrossEntropyLoss") for line in file]
    return f"{folder}/step{steps}", next(x for x in losses if x is not None)


def export(options, checkpoint, folder, dtype, *more):
    run([shlex.split(options.train)[-1], f"--export={checkpoint}", folder, f"--dtype={dtype}", *more])
    return folder


def check_loss(what, loss, logits, tokens, ignored=-100):
    """ignored: a token that is no label."""
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), tokens[:, 1:].flatten().long(),
                                                 ignore_index=ignored).item()
    assert abs(loss - expected) <= 1e-5 * expected, f"{what}: ./train has the loss {loss}, the library {expected}"
