#!/usr/bin/env python3
"""Takes a small random model of every architecture through --export in fp8, int8, int4 and nf4, and the libraries that read these.

    python3 scripts/round_trip_quantized.py [--train "mpirun -n 1 build/cuda/train"] [NAME ...]

It takes each model of golden.py, eight times as wide, so that its matrices can be divided into blocks and groups. transformers
saves the model, ./train trains it for one step in FP8 and exports the checkpoint in each format, and each folder once more as
f32. The script ends with an error unless:

    weights             compressed-tensors, bitsandbytes or transformers reads from codes and scales the values that the folder's
                        export to f32 holds, bit for bit (bitsandbytes gives nf4 in bf16: rounded to bf16)
    logits              those of the folder in transformers, activations not rounded, are those of that export, to 1e-4
    losses              the loss of a step from the folder that ./train prints is that of transformers for that export, to 1e-5
    --scales=trained    the same; q, k and v have one scale, gate and up have one
    other files         as in round_trip.py

--train is the command of the program; --export uses only its last word. Needs torch, transformers, tokenizers,
compressed-tensors, bitsandbytes and accelerate.
"""
import copy
import os

import numpy
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import round_trip
from golden import MODELS
from small_runs import check_loss, each_model, export, parser_of, train

FORMATS = {
    "fp8": ["fp8"], "fp8-block": ["fp8", "--block=128"], "fp8-deepseek": ["fp8", "--layout=fp8"],
    "fp8-trained": ["fp8", "--scales=trained"], "int8": ["int8"], "int8-bitsandbytes": ["int8", "--layout=bitsandbytes"],
    "int4": ["int4"], "int4-32": ["int4", "--group=32"], "nf4": ["nf4"],
}
WIDER = 8


def wide(config):
    config = copy.deepcopy(config)
    config.hidden_size *= WIDER
    config.intermediate_size *= WIDER
    if getattr(config, "head_dim", None):
        config.head_dim *= WIDER
    return config


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                       output_loading_info=True)
    assert not any(info.values()), f"{folder}: {info}"
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = None         # activations are not rounded
    return model.eval()


def weight_of(module):
    """The values with which the library computes, before it rounds them to the type of activations."""
    w = module.weight
    if isinstance(module, Linear4bit):
        return dequantize_4bit(w.data, w.quant_state)
    if isinstance(module, Linear8bitLt):
        return int8_vectorwise_dequant(w.data, w.SCB if w.SCB is not None else module.state.SCB)
    return w.data


@torch.no_grad()
def check_weights(name, model, plain):
    """Compares the weights, puts those of the export to f32 into a plain model, and returns it."""
    exact = round_trip.load(plain, torch.float32)
    values = exact.state_dict()
    compared = 0
    for path, module in model.named_modules():
        if getattr(module, "weight", None) is None:
            continue
        found, expected = weight_of(module), values[path + ".weight"]
        assert torch.equal(found, expected.to(found.dtype)), f"{name}: {path} is not what --export reads"
        compared += found.numel()
    assert compared >= sum(x.numel() for key, x in values.items() if key != "lm_head.weight"), f"{name}: {compared} compared"
    return exact


def shared_scales(folder):
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    for key, scale in tensors.items():
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            if key.endswith(f"{first}.weight_scale"):
                assert all(torch.equal(scale, tensors[key.replace(first, other)]) for other in others), key


@torch.no_grad()
def check_format(options, name, checkpoint, root, original, tokens):
    folder = export(options, checkpoint, os.path.join(root, name), *FORMATS[name])
    plain = export(options, folder, os.path.join(root, name + "-f32"), "f32")
    round_trip.check_files(folder, original, {"quantization_config"})
    if name == "fp8-trained":
        shared_scales(folder)
    model = load(folder)
    rounds = any(isinstance(module, (Linear4bit, Linear8bitLt)) for module in model.modules())      # activations, always
    served = None if rounds else model(tokens).logits       # compressed-tensors decodes weights when they are first needed
    exact = check_weights(name, model, plain)
    logits = exact(tokens).logits
    _, loss = train(options, root, name + "-again", folder, 0, round_trip.T)
    check_loss(name, loss, logits, tokens)
    if not rounds:
        worst = (served - logits).abs().max().item()
        assert worst <= 1e-4, f"{name}: logits differ by {worst}"
    return logits


def round_trip_quantized(options, name, config, root, seed):
    original = os.path.join(root, "original")
    tokens = round_trip.make(wide(config), original, seed)
    numpy.asarray(tokens, dtype=numpy.uint16).tofile(os.path.join(root, "tokens.npy"))
    checkpoint, _ = train(options, root, "trained", original, 1e-3, round_trip.T, recipe="fp8")
    exact = round_trip.logits_of(export(options, checkpoint, os.path.join(root, "f32"), "f32"), tokens)
    moved = {}
    for form in FORMATS:
        moved[form] = (check_format(options, form, checkpoint, root, original, tokens) - exact).abs().max().item()
    print(f"{name}: weights, logits, losses and files equal; logits up to {exact.abs().max().item():.3f} moved by "
          + ", ".join(f"{form} {x:.3f}" for form, x in moved.items()), flush=True)


def main():
    parser = parser_of(__doc__, "golden.py")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    for name, seed, root in each_model(parser, options, MODELS):
        round_trip_quantized(options, name, MODELS[name], root, seed)


if __name__ == "__main__":
    main()
