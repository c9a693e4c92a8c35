#!/usr/bin/env python3
"""Takes a small random model of every architecture through transformers, ./train and --export, and back.

    python3 scripts/round_trip.py [--train "mpirun -n 1 build/cuda/train"] [NAME ...]
    python3 scripts/round_trip.py --keys [--train ...] [CLASS ...]

For each model of golden.py: saved by transformers with a tokenizer, two chat templates and settings for generation;
trained for one step with learning rate 0 and for one with 1e-3; the checkpoints exported as f32, bf16 and f16; loaded by
transformers. It ends with an error unless:

    learning rate 0     logits are those of the model that was saved, bit for bit
    1e-3                logits of the export in f32 are those of the checkpoint, bit for bit, and differ from those before
    bf16, f16           each tensor is that of f32, rounded, bit for bit; from_pretrained finds the type in config.json
    losses              the loss of a step that ./train prints is that of transformers, to 1e-5: for the model that was saved, and
                        for the export, loaded by ./train again
    config.json         AutoConfig reads equal settings, except for the type, the version, max_window_layers (layer_types has the
                        same) and keys that say that something is absent
    other files         tokenizer, chat templates and generation_config.json, equal byte for byte; there are no others

With --keys it takes instead a model for every key of config.json that ./train honours, with values and spelling of
tests/golden/config_keys.json. It compares the loss, and the logits of the checkpoint of a step with learning rate 0 and of the
export in f32.

--train is the command of the program; --export uses only its last word. Needs torch, transformers and tokenizers.
"""
import json
import os
import re
import tempfile

import numpy
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from golden import MODELS, randomize
from small_runs import check_loss, each_model, export, parser_of, train

B, T = 2, 32
# ./train warns: it reads the spelling of transformers 4 as transformers 4 does
OTHERWISE = {("Olmo3ForCausalLM", "rope_theta")}
MADE_ANEW = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "max_window_layers"}


def save_tokenizer(folder, size):
    """One of `size` bytes as tokens; 0 ends a text."""
    words = ["<eos>"] + sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    turns = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    fast.chat_template = {"default": turns, "tool_use": turns + "{{ tools }}"}
    fast.save_pretrained(folder)


def make(config, folder, seed):
    """The model and a tokenizer as transformers saves them; returns tokens."""
    generator = torch.Generator().manual_seed(seed)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, generator)
    model.generation_config = GenerationConfig(eos_token_id=0, do_sample=True, top_p=0.9)
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return torch.randint(1, config.vocab_size, (B, T), generator=generator)


def load(folder, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager",
                                                       output_loading_info=True)
    assert not any(info.values()), f"{folder}: {info}"
    return model.eval()


@torch.no_grad()
def logits_of(folder, tokens):
    return load(folder, torch.float32)(tokens).logits


def check_rounded(folder, exact, dtype):
    """Compares every tensor, and the type that from_pretrained chooses for the folder."""
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    wide = load_file(os.path.join(exact, "model.safetensors"))
    assert tensors.keys() == wide.keys()
    for name, x in tensors.items():
        assert x.dtype == dtype and torch.equal(x, wide[name].to(dtype)), f"{folder}: {name}"
    assert load(folder, "auto").dtype == dtype


def differences(a, b):
    """Differences of b from a. Keys that only b has may say that something is absent, such as biases in a class without any."""
    return {key: (a.get(key), b.get(key)) for key in a.keys() | b.keys() if a.get(key) != b.get(key) and (key in a or b[key])}


def check_files(folder, original, more=frozenset()):
    """Compares all files except config.json and weights byte for byte. more: keys of config.json that may differ."""
    names = lambda root: {os.path.relpath(os.path.join(path, n), root) for path, _, files in os.walk(root) for n in files}
    assert names(folder) == names(original), f"{names(folder)} of {names(original)}"
    for name in names(folder) - {"config.json", "model.safetensors"}:
        with open(os.path.join(folder, name), "rb") as one, open(os.path.join(original, name), "rb") as other:
            assert one.read() == other.read(), name
    found, expected = (AutoConfig.from_pretrained(f).to_dict() for f in (folder, original))
    changed = differences(expected, found)
    assert changed.keys() <= MADE_ANEW | more, f"config.json: {changed}"
    found, expected = (AutoTokenizer.from_pretrained(f) for f in (folder, original))
    talk = [{"role": "user", "content": "Wie geht's?"}]
    for template in (None, "tool_use"):
        texts = [t.apply_chat_template(talk, chat_template=template, tokenize=False) for t in (found, expected)]
        assert texts[0] == texts[1]
    assert found(texts[0]).input_ids == expected(texts[0]).input_ids
    return sorted(names(folder))


def round_trip(options, name, config, root, seed):
    original = os.path.join(root, "original")
    tokens = make(config, original, seed)
    numpy.asarray(tokens, dtype=numpy.uint16).tofile(os.path.join(root, "tokens.npy"))
    before = logits_of(original, tokens)

    same, loss = train(options, root, "same", original, 0, T)
    check_loss("saved", loss, before, tokens)
    assert torch.equal(logits_of(export(options, same, os.path.join(root, "same-f32"), "f32"), tokens), before)

    trained, _ = train(options, root, "trained", original, 1e-3, T)
    exported = {d: export(options, trained, os.path.join(root, d), d) for d in ("f32", "bf16", "f16")}
    after = logits_of(exported["f32"], tokens)
    assert torch.equal(after, logits_of(trained, tokens)) and not torch.equal(after, before)
    check_rounded(exported["bf16"], exported["f32"], torch.bfloat16)
    check_rounded(exported["f16"], exported["f32"], torch.float16)
    for folder in exported.values():
        files = check_files(folder, original)

    _, loss = train(options, root, "again", exported["f32"], 0, T)
    check_loss("exported", loss, after, tokens)
    rounded = (logits_of(exported["bf16"], tokens) - after).abs().max().item()
    print(f"{name}: logits and files equal; a step moved logits by "
          f"{(after - before).abs().max().item():.3f}, rounding to bf16 by {rounded:.3f}; loss {loss:.6f}", flush=True)
    return files


def honours(key):
    """Whether ./train does, by its table."""
    with open("model/formats/hf_keys.c", encoding="utf-8") as file:
        rows = re.findall(r'{ "(\w+)",\s+(HF_\w+)', file.read())
    return any((key, kind) in rows for kind in ("HF_VALUE", "HF_TOKEN", "HF_ROTATION", "HF_BLOCKS"))


def variants(classes):
    """Name and config.json of each model with another value of one key."""
    with open("tests/golden/config_keys.json", encoding="utf-8") as file:
        known = json.load(file)[transformers.__version__]
    for name, c in known.items():
        if classes and name not in classes:
            continue
        yield f"{name} as it is", c["base"]
        for key, (value, effect) in c["keys"].items():
            if honours(key) and effect != "nothing" and (name, key) not in OTHERWISE:
                yield f"{name} {key}", c["base"] | {key: value}
        for key, (value, effect) in c.get("rope_keys", {}).items():
            if honours(key) and effect != "nothing":
                yield f"{name} rope_scaling.{key}", c["scaled"] | {"rope_scaling": c["scaled"]["rope_scaling"] | {key: value}}


def try_key(options, name, config, root, seed):
    original = os.path.join(root, "original")
    os.mkdir(original)
    write = lambda: open(os.path.join(original, "config.json"), "w", encoding="utf-8")
    with write() as file:
        json.dump(config, file)
    try:
        tokens = make(AutoConfig.from_pretrained(original), original, seed)
        with write() as file:
            json.dump(config, file)
        before = logits_of(original, tokens)
    except Exception as error:      # for instance sizes that do not match
        print(f"{name}: transformers: {str(error).splitlines()[0]:.100}")
        return
    numpy.asarray(tokens, dtype=numpy.uint16).tofile(os.path.join(root, "tokens.npy"))
    try:
        same, loss = train(options, root, "same", original, 0, T)
    except SystemExit as error:
        print(f"{name}: refused: {str(error).splitlines()[-2]:.200}", flush=True)
        return
    check_loss(name, loss, before, tokens)
    assert torch.equal(logits_of(same, tokens), before), name
    assert torch.equal(logits_of(export(options, same, os.path.join(root, "f32"), "f32"), tokens), before), name
    assert torch.equal(logits_of(export(options, original, os.path.join(root, "direct"), "f32"), tokens), before), name
    print(f"{name}: loss {loss:.6f}, logits equal", flush=True)


def main():
    parser = parser_of(__doc__, "golden.py")
    parser.add_argument("--keys", action="store_true", help="every honoured key of config.json; NAMEs are classes then")
    options = parser.parse_args()
    if options.keys:
        transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    for name, config in variants(options.names) if options.keys else ():
        with tempfile.TemporaryDirectory() as root:
            try_key(options, name, config, root, 0)
    if not options.keys:
        for name, seed, root in each_model(parser, options, MODELS):
            files = round_trip(options, name, MODELS[name], root, seed)
        print("files:", *files)


if __name__ == "__main__":
    main()
