#!/usr/bin/env python3
"""Joins a text model and a vision tower to a LLaVA folder with a new projector, whose training begins with
./train --load_path=OUTPUT --trainable='[multi_modal_projector.*]'.

    python3 scripts/make_llava.py --text LLAMA_FOLDER --tower CLIP_FOLDER OUTPUT
    python3 scripts/make_llava.py --text LLAMA_FOLDER --pixels 16 --size 128 OUTPUT

The text model is a Llama, Mistral or Qwen3. --tower: a folder of CLIP or SigLIP, or a LLaVA folder, whose tower is used. --pixels:
without a tower; features come from make_image_features.py --pixels, and transformers cannot read the folder. Tensors are copied
byte for byte. The image token is added to the tokenizer, unless it has one. If embedding and head have no row for the token, they
get a row of zeros. The projector is drawn at random, by --seed, with the standard deviation of PyTorch's linear layers. Needs
numpy.
"""
import argparse, os, shutil, sys

try:
    import numpy as np
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install numpy")

import errors
from errors import Bad
from model_folder import Tensor, copy_others, read_files, read_json, write_json, write_weights

KINDS = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
IMAGES = ("preprocessor_config.json", "processor_config.json")
ENDS = ("embed_tokens.weight", "lm_head.weight")        # tensors with a row for each token


def with_rows(one, rows):
    """The tensor with additional rows of zeros."""
    more = rows - one.shape[0]
    if more <= 0:
        return one
    return Tensor(one.dtype, [rows, *one.shape[1:]], one.path, one.at, one.count, bytes(one.count // one.shape[0] * more))


# ---- parts of the model ----------------------------------------------------------------------------------------------------------

def text_files(folder, rows):
    """The text model's tensors with their names in a LLaVA folder; rows: number of rows that the embedding must have."""
    for found in read_files(folder):
        yield {"language_model." + name: with_rows(one, rows) if name.endswith(ENDS) else one for name, one in found.items()
               if not name.endswith("inv_freq")}


def tower_files(folder):
    """The tower's tensors under their names in a LLaVA folder. transformers 5 saves a tower alone without the prefix vision_model."""
    files = read_files(folder)
    prefixed = any(name.startswith(("vision_model.", "vision_tower.")) for file in files for name in file)
    alone = read_json(folder, "config.json").get("model_type") in KINDS.values() and not prefixed
    found = {}
    for name, one in (item for file in files for item in file.items()):
        bare = name.removeprefix("vision_tower.").removeprefix("vision_model.")
        if alone or bare != name:
            found["vision_tower.vision_model." + bare] = one
    if not found:
        raise Bad(f"{folder}: it has no tensor vision_model.*; expected a folder of CLIP or SigLIP, or of LLaVA")
    return found


def tower_config(folder):
    config = read_json(folder, "config.json")
    given = config if config.get("model_type") in KINDS.values() else config.get("vision_config")
    if not isinstance(given, dict):
        raise Bad(f"{folder}/config.json has no vision_config; expected a folder of CLIP or SigLIP")
    kind = given.get("model_type", KINDS.get(config.get("model_type")))
    if kind not in KINDS.values():
        raise Bad(f"{folder}/config.json: its tower is of model_type {kind}; expected {' or '.join(KINDS.values())}")
    return {**{key: value for key, value in given.items() if key != "architectures"}, "model_type": kind}


def projector(width, features, seed):
    """A projector: two layers with biases, in F32."""
    random, made = np.random.default_rng(seed), {}
    for number, inputs in ((1, features), (2, width)):
        for name, shape in (("weight", [width, inputs]), ("bias", [width])):
            values = random.normal(0, (3 * inputs) ** -0.5, shape) if name == "weight" else np.zeros(shape)
            made[f"multi_modal_projector.linear_{number}.{name}"] = Tensor("F32", shape, tail=values.astype("<f4").tobytes())
    return made


def add_token(text, folder, output):
    """The id of the image token in the tokenizer; copies the tokenizer with this token."""
    tokenizer, config = read_json(folder, "tokenizer.json"), read_json(folder, "tokenizer_config.json", {})
    added = tokenizer.setdefault("added_tokens", [])
    vocab = tokenizer["model"]["vocab"]
    ids = {**(vocab if isinstance(vocab, dict) else {one[0]: i for i, one in enumerate(vocab)}),
           **{one["content"]: one["id"] for one in added}}
    number = ids.get(text, max(ids.values()) + 1)
    if all(one["content"] != text for one in added):
        flags = {"content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added.append({"id": number, **flags})
        if "added_tokens_decoder" in config:
            config["added_tokens_decoder"][str(number)] = flags
    write_json(output, "tokenizer.json", tokenizer)
    write_json(output, "tokenizer_config.json", config)
    return number


def copy_tower(args):
    for name in IMAGES:
        if args.tower and os.path.exists(path := os.path.join(args.tower, name)):
            shutil.copy(path, args.output)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", help="folder to make")
    parser.add_argument("--text", required=True, help="folder of the text model")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--tower", help="folder of the vision tower")
    way.add_argument("--pixels", type=int, help="no tower: width of a patch in pixels")
    parser.add_argument("--size", type=int, default=128, help="pixels: width of a scaled picture")
    parser.add_argument("--image-token", default="<image>", help="its text")
    parser.add_argument("--seed", type=int, default=0, help="seed of the projector's weights; default: 0")
    args = parser.parse_args()
    text = read_json(args.text, "config.json")
    if text.get("model_type") not in ("llama", "mistral", "qwen3"):
        raise Bad(f"{args.text}: its model_type is {text.get('model_type')}; expected llama, mistral or qwen3")
    if os.path.exists(args.output):
        raise Bad(f"{args.output} exists already; expected a new name")
    if args.pixels and args.size % args.pixels:
        raise Bad(f"--size={args.size}: expected a multiple of --pixels={args.pixels}")
    tower = tower_config(args.tower) if args.tower else None
    os.makedirs(args.output)
    token = add_token(args.image_token, args.text, args.output)
    text["vocab_size"] = max(text["vocab_size"], token + 1)
    features = tower.get("hidden_size", 768) if tower else 3 * args.pixels ** 2
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": token,
              "multimodal_projector_bias": True, "projector_hidden_act": "gelu", "text_config": text,
              "tie_word_embeddings": text.get("tie_word_embeddings", False)}
    files = [*text_files(args.text, text["vocab_size"]), projector(text["hidden_size"], features, args.seed)]
    if tower:
        full = tower["model_type"] == KINDS["siglip"]
        config |= {"vision_config": tower, "vision_feature_layer": -2}
        config["vision_feature_select_strategy"] = "full" if full else "default"
        config["image_seq_length"] = (tower.get("image_size", 224) // tower.get("patch_size", 16 if full else 32)) ** 2
        files.append(tower_files(args.tower))
    else:
        config |= {"image_feature_size": features, "image_seq_length": (args.size // args.pixels) ** 2}
    write_json(args.output, "config.json", config)
    write_weights(args.output, files)
    copy_others(args.text, args.output)
    copy_tower(args)
    print(f"{args.output}: {config['image_seq_length']} tokens of {features} values for an image; {args.image_token} has the id "
          f"{token}")


if __name__ == "__main__":
    try:
        errors.run(main, "a folder of a text model with tokenizer.json, a tower, and room for OUTPUT")
    except Bad as problem:
        sys.exit(f"error: {problem}")
