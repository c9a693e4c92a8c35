#!/usr/bin/env python3
"""Takes adapters on a small random model of every architecture from ./train to PEFT, and from PEFT to ./train.

    python3 scripts/compare_peft.py [--train "mpirun -n 1 build/cuda/train"] [NAME ...]

Models are those of golden.py, adapters those of golden_lora.py: ranks, scales and modules. It ends with an error unless:

    from ./train    a folder of adapters that were trained for three steps names its base, so that PEFT loads both; each tensor is
                    that of the file, bit for bit; logits are those of the folder that --export writes, loaded by transformers, and
                    differ from those of the base
    from PEFT       a folder with random A and B goes through ./train with learning rate 0 and comes out with the same tensors, bit
                    for bit; --export gives what merge_and_unload gives; --generate continues a prompt as PEFT's generate does
    losses          the loss of a step that ./train prints for either folder is that of PEFT, to 1e-5

--train is the command of the program; --export and --generate use only its last word. Needs torch, transformers, tokenizers
and peft.
"""
import json
import os
import shlex
import shutil
import subprocess
import warnings

import numpy
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file

import round_trip
from golden import MODELS
from golden_generate import MARGIN, NEW, PROMPT, SEEDS, greedy
from golden_lora import SETTINGS, randomize
from round_trip import B, T
from small_runs import check_loss, each_model, export, parser_of, train

TENSORS = "adapter_model.safetensors"


def new_adapters(settings):
    """The configuration's section for adapters as golden_lora.py describes them."""
    modules = settings["target_modules"]
    return (f"lora: {{rank: {settings['r']}, alpha: {settings['lora_alpha']}, "
            f"use_rslora: {str(settings.get('use_rslora', False)).lower()}, "
            f"target_modules: {modules if isinstance(modules, str) else '[' + ', '.join(modules) + ']'}}}\n")


def load_adapters(folder):
    """As PEFT loads them, with the base that the folder names."""
    model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found, expected = get_peft_model_state_dict(model), load_file(os.path.join(folder, TENSORS))
    assert found.keys() == expected.keys(), f"{folder}: {found.keys() ^ expected.keys()}"
    for name, x in expected.items():
        assert torch.equal(found[name], x), f"{folder}: {name}"
    return model


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens).logits


def check_close(what, found, expected):
    off = ((found - expected).abs().max() / expected.abs().max()).item()
    assert off <= 1e-5, f"{what}: off by {off:.2g} of the largest"


def from_train(options, root, original, tokens, settings):
    """Returns how far the adapters move logits."""
    longer = os.path.join(root, "longer.npy")
    generator = torch.Generator().manual_seed(1)
    numpy.asarray(torch.randint(1, 99, (4 * B, T), generator=generator), dtype=numpy.uint16).tofile(longer)
    step, _ = train(options, root, "ours", original, 1e-2, T, 3, f"{{paths: [{longer}]}}", more=new_adapters(settings))
    logits = logits_of(load_adapters(step), tokens)
    merged = export(options, step, os.path.join(root, "ours-merged"), "f32")
    check_close("the export of our adapters", round_trip.logits_of(merged, tokens), logits)
    moved = (logits - round_trip.logits_of(original, tokens)).abs().max().item()
    assert moved > 0.01, f"the adapters change logits by {moved:.2g} only"

    bare = os.path.join(root, "bare")           # what is published of a run
    os.mkdir(bare)
    for name in ("adapter_config.json", TENSORS):
        shutil.copy(os.path.join(step, name), bare)
    _, loss = train(options, root, "ours-again", bare, 0, T)
    check_loss("ours", loss, logits, tokens)
    return moved


def prompt_of(model, vocabulary):
    """A prompt whose continuation is certain, as in golden_generate.py, and PEFT's continuation."""
    for seed in range(SEEDS):
        prompt = torch.randint(1, vocabulary, (1, PROMPT), generator=torch.Generator().manual_seed(seed))
        tokens, margin = greedy(model, prompt)
        if tokens and margin > MARGIN:
            return prompt[0].tolist(), tokens
    raise SystemExit("error: no prompt has a certain continuation")


def generate(options, root, folder, prompt):
    path = os.path.join(root, "prompts.jsonl")
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"tokens": prompt}, file)
    command = [shlex.split(options.train)[-1], f"--generate={path}", f"--load_path={folder}", "--recipe=f32",
               f"--max_new_tokens={NEW}", "--model.max_sequence_length=128"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)}\n{done.stderr}error: exit status {done.returncode}")
    return next(json.loads(line)["tokens"] for line in done.stdout.splitlines() if line.startswith("{"))


def from_peft(options, root, original, tokens, settings, seed):
    """Returns PEFT's continuation of a prompt."""
    folder = os.path.join(root, "peft")
    model = get_peft_model(round_trip.load(original, torch.float32), LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    randomize(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(folder)
    logits = logits_of(model, tokens)
    step, loss = train(options, root, "through", folder, 0, T)
    check_loss("PEFT's", loss, logits, tokens)
    found, expected = (load_file(os.path.join(f, TENSORS)) for f in (step, folder))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name
    prompt, continuation = prompt_of(model, model.config.vocab_size)
    said = generate(options, root, folder, prompt)
    assert said == continuation, f"--generate: {said}; PEFT: {continuation}"
    merged = model.merge_and_unload().state_dict()
    exported = export(options, folder, os.path.join(root, "peft-merged"), "f32")
    for name, x in load_file(os.path.join(exported, "model.safetensors")).items():
        check_close(name, x, merged[name])
    return continuation


def compare(options, name, root, seed):
    original = os.path.join(root, "original")
    tokens = round_trip.make(MODELS[name], original, seed)
    numpy.asarray(tokens, dtype=numpy.uint16).tofile(os.path.join(root, "tokens.npy"))
    moved = from_train(options, root, original, tokens, SETTINGS[name])
    continuation = from_peft(options, root, original, tokens, SETTINGS[name], seed)
    print(f"{name}: adapters of ./train move logits by {moved:.3f}; PEFT's say the same tokens, {len(set(continuation))} different",
          flush=True)


def main():
    parser = parser_of(__doc__, "golden.py")
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    for name, seed, root in each_model(parser, options, MODELS):
        compare(options, name, root, seed)


if __name__ == "__main__":
    main()
