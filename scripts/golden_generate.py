#!/usr/bin/env python3
"""Greedy continuations by Hugging Face transformers' generate, in float32 on a CPU.

    python3 scripts/golden_generate.py [folder]        # default: tests/golden

For each model that scripts/golden.py made, folder/<name>/continuation.json gets
    prompt   12 random tokens
    tokens   the 64 tokens with which generate(do_sample=False) continues them
    margin   the smallest lead of a chosen token over the second one, as a share of the largest logit
A model with images has the first of golden.safetensors' pixels in its prompt, from the second token on.
The script tries SEEDS prompts and takes the one with the most different tokens, since these models soon repeat themselves. The
margin must be a hundred times the effect of rounding (1e-5, tests/test_parity.c), and the text must not end early.
tests/test_decode.c and, with images, tests/test_generate_images.py compare. Needs torch and transformers.
"""
import glob
import json
import os

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from golden_folder import golden_folder

PROMPT, NEW, MARGIN, SEEDS = 12, 64, 1e-3, 24


def greedy(model, prompt, pictures=None):
    """Tokens and margin; None if the text ends early."""
    out = model.generate(prompt, **(pictures or {}), attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW,
                         output_logits=True, return_dict_in_generate=True, pad_token_id=0)
    if len(out.logits) < NEW:
        return None, 0
    logits = torch.cat(out.logits)
    top = logits.topk(2).values
    return out.sequences[0, PROMPT:].tolist(), ((top[:, 0] - top[:, 1]) / logits.abs().amax(1)).min().item()


def load(folder):
    """The model, its picture as an argument of generate, and the image token and how many of them the picture has."""
    with open(os.path.join(folder, "config.json")) as file:
        config = json.load(file)
    kind = AutoModelForImageTextToText if config["model_type"] == "llava" else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if kind is AutoModelForCausalLM:
        return model, {}, (0, 0)
    pixels = load_file(os.path.join(folder, "golden.safetensors"))["pixels"][:1]
    return model, {"pixel_values": pixels}, (config["image_token_index"], config["image_seq_length"])


def make(folder):
    model, pictures, (token, rows) = load(folder)
    best, most = None, 0
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(1, model.config.get_text_config().vocab_size - (rows > 0), (1, PROMPT), generator=generator)
        prompt[0, 1:1 + rows] = token
        tokens, margin = greedy(model, prompt, pictures)
        if margin >= MARGIN and len(set(tokens)) > most:
            best, most = {"prompt": prompt[0].tolist(), "tokens": tokens, "margin": round(margin, 6)}, len(set(tokens))
    if not best:
        raise SystemExit(f"{folder}: none of {SEEDS} prompts has a margin of {MARGIN}")
    with open(os.path.join(folder, "continuation.json"), "w") as file:
        json.dump(best, file)
        file.write("\n")
    print(f"{os.path.basename(folder)}: margin {best['margin']:.2g}, {most} different tokens of {NEW}", flush=True)


def main():
    root = golden_folder(__doc__, os.path.join(os.path.dirname(__file__), "..", "tests", "golden"))
    for path in sorted(glob.glob(os.path.join(root, "*", "config.json"))):
        make(os.path.dirname(path))


if __name__ == "__main__":
    main()
