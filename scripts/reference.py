#!/usr/bin/env python3
"""Compares ./train with other libraries on small random models of every architecture, and computes the reference results of tests.

    python3 scripts/reference.py golden PART ...                          # from the repository's root
    python3 scripts/reference.py round-trip|formats|peft [MODEL ...]      # default: all models
    python3 scripts/reference.py keys ["CLASS KEY" ...]                   # default: all keys of all classes

golden writes to tests/golden, or the folder --golden, from fixed seeds on one thread:

    models          text models, saved by save_pretrained, and for a batch: logits, loss, gradients and the losses of 8 AdamW
                    steps; models with experts also with the auxiliary loss: tests/test_parity.c
    images          the same for models with images, from pixels, with the features of the tower
    adapters        the same for adapters on each of these models, by PEFT, and the matrices after merge_and_unload
    muon            steps of torch.optim.Muon, without experts: tests/test_parity.c, tests/test_muon_ranks.c
    continuations   a prompt for each model and its greedy continuation: tests/test_decode.c, tests/test_generate_images.py
    train           a run: tests/test_train_parity.c
    config-keys     what another value of each key of config.json changes: tests/test_config_keys.c
    adamw8bit, nf4  steps and codes of bitsandbytes: tests/test_adamw8bit.c, tests/test_nf4.c

adapters, muon and continuations need the folders of models and images. The others run ./train, or --train "mpirun -n 1
build/cuda/train", whose last word also exports and generates. Each action ends with an error unless these conditions hold:

    round-trip  A model saved by transformers with a tokenizer, two chat templates and settings for generation goes through
                ./train and --export. With learning rate 0 its logits stay the same, bit for bit. After a step, the export in f32
                has the logits of the checkpoint, bit for bit, and the exports in bf16 and f16 have the values of f32, rounded.
                The losses that ./train prints, for the model and for the export, differ from the losses of transformers by at
                most 1e-5 (relative). config.json has equal settings, except for the type, the version, max_window_layers
                (layer_types says the same) and keys that say that something is absent. All other files are equal byte for byte,
                and no file is added.
    keys        For every key of config.json that ./train supports, with the values of tests/golden/config_keys.json: ./train and
                transformers have the same loss, and with learning rate 0 the same logits.
    formats     The model, eight times as wide, is trained in FP8 and exported in fp8, int8, int4 and nf4. Each of these folders
                is exported again as f32. compressed-tensors, bitsandbytes or transformers decodes codes and scales to the values
                of the f32 folder, bit for bit (bitsandbytes decodes nf4 to bf16; then the f32 values are rounded to bf16). Only
                matrices of the language model's blocks have codes. If activations are not rounded, logits differ from the logits
                of the f32 folder by at most 1e-4. The loss of ./train differs from the loss of transformers by at most 1e-5
                (relative). With --scales=trained, q, k and v share a scale, and gate and up share a scale. Other files are
                checked as in round-trip.
    peft        PEFT loads a folder of adapters that ./train wrote, on the base that the folder names, with the same tensors. Its
                logits equal the logits of the folder that --export writes, and differ from the base's. A folder that PEFT wrote
                goes through ./train with learning rate 0 and has the same tensors afterwards; --export gives the weights of
                merge_and_unload; --generate continues a prompt of text as PEFT's generate does. The losses of ./train differ from
                PEFT's by at most 1e-5 (relative). Models with images train the projector, too, and never the tower.

Needs torch and transformers 5; tokenizers; for adapters and peft, peft; for formats, compressed-tensors, bitsandbytes and
accelerate; for adamw8bit and nf4, bitsandbytes 0.49.
"""
import argparse
import importlib
import tempfile
import warnings

import torch
import transformers

PARTS = {           # module and function of each part
    "models": ("reference_golden", "write_models"), "images": ("reference_golden", "write_images"),
    "adapters": ("reference_golden", "write_adapters"), "muon": ("reference_golden", "write_muon"),
    "continuations": ("reference_golden", "write_continuations"), "train": ("golden_train", "write"),
    "config-keys": ("golden_config_keys", "write"), "adamw8bit": ("golden_adamw8bit", "write"), "nf4": ("golden_nf4", "write"),
}
TRIPS = {"round-trip": "through_transformers", "keys": "through_keys", "formats": "through_formats", "peft": "through_peft"}


def chosen(parser, options, known):
    for name in options.names:
        if name not in known:
            parser.error(f"{options.action}: there is no {name}; there are {', '.join(known)}")
    return options.names


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["golden", *TRIPS])
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts, models or keys")
    parser.add_argument("--golden", default="tests/golden", metavar="FOLDER")
    parser.add_argument("--train", default="./train", metavar="COMMAND")
    options = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if options.action == "golden":
        torch.use_deterministic_algorithms(True)
        for part in chosen(parser, options, PARTS) or parser.error(f"name a part: {', '.join(PARTS)}"):
            module, function = PARTS[part]
            getattr(importlib.import_module(module), function)(options.golden)
        return
    transformers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)
    trips = importlib.import_module("reference_trips")
    known = trips.key_models() if options.action == "keys" else trips.MODELS
    for name in chosen(parser, options, known) or known:
        with tempfile.TemporaryDirectory() as root:
            print(f"{name}: {getattr(trips, TRIPS[options.action])(options, name, root)}", flush=True)


if __name__ == "__main__":
    main()
