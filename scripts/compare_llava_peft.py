#!/usr/bin/env python3
"""Takes adapters and the projector of small LLaVA models from ./train to PEFT, and from PEFT to ./train.

    python3 scripts/compare_llava_peft.py [--train ./train] [NAME ...]        # from the repository's root

Models, pictures and the adapters of PEFT are those of tests/golden and tests/golden/lora (golden_llava.py, golden_lora.py).
./train gets the tower's features, PEFT and transformers the pixels. It ends with an error unless:

    from ./train    PEFT loads a folder that was trained for three steps, on the base that it names; each tensor is that of the
                    file, bit for bit; no module of the tower has an adapter; logits are those of the folder that --export
                    writes, loaded by transformers; and the loss that ./train prints for the folder is PEFT's, to 1e-5
    from PEFT       a folder goes through ./train with learning rate 0 and comes out with the same tensors, bit for bit

Needs torch, transformers 5 and peft.
"""
import json
import os
import shutil

import numpy
import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import LlavaForConditionalGeneration

import small_runs
from golden_llava import IMAGE_TOKEN, ROWS
from golden_lora import IMAGE_SETTINGS, PROJECTOR
from small_runs import check_loss, each_model, export, parser_of

TENSORS = "adapter_model.safetensors"
NEW = "lora: {rank: 3, alpha: 6, target_modules: [q_proj, v_proj, o_proj, down_proj]}\n"


def write_data(root, golden):
    """The batch as token file, index and features."""
    width, count = golden["features"].shape[1], golden["features"].shape[0] // ROWS
    golden["tokens"].numpy().astype("<u2").tofile(f"{root}/tokens.npy")
    with open(f"{root}/images.npy", "wb") as file:
        file.write((1).to_bytes(8, "little") + numpy.arange(count, dtype="<u4").tobytes())
    os.mkdir(f"{root}/features")
    golden["features"].numpy().astype("<f4").tofile(f"{root}/features/features-0000.f32")
    with open(f"{root}/features/features.json", "w", encoding="utf-8") as file:
        json.dump({"id": f"{1:016x}", "rows": ROWS, "cols": width, "dtype": "f32", "files": [["features-0000.f32", count]]}, file)


def train(options, root, name, load, rate, steps, **more):
    data = f"{{paths: [{root}/tokens.npy], image_paths: [{root}/images.npy], image_features: {root}/features}}"
    return small_runs.train(options, root, name, load, rate, 16, steps, data, **more)


def load(folder):
    return LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def logits_of(model, golden):
    return model(input_ids=golden["tokens"].long(), pixel_values=golden["pixels"]).logits


def load_adapters(folder):
    with open(f"{folder}/adapter_config.json", encoding="utf-8") as file:
        base = json.load(file)["base_model_name_or_path"]
    model = PeftModel.from_pretrained(load(base), folder).eval()
    found, expected = get_peft_model_state_dict(model), load_file(f"{folder}/{TENSORS}")
    assert found.keys() == expected.keys(), f"{folder}: {found.keys() ^ expected.keys()}"
    assert not any("tower" in name for name in found)
    for name, x in expected.items():
        assert torch.equal(found[name], x), f"{folder}: {name}"
    return model


def compare(options, name, root):
    base = f"tests/golden/{name}"
    golden = load_file(f"{base}/golden.safetensors")
    write_data(root, golden)
    step, _ = train(options, root, "ours", base, 1e-2, 3, more=NEW)
    model = load_adapters(step)
    assert any(PROJECTOR in n for n in get_peft_model_state_dict(model))
    logits = logits_of(model, golden)
    moved = (logits - golden["logits"]).abs().max().item()
    merged = logits_of(load(export(options, step, f"{root}/merged", "f32")), golden)
    off = ((merged - logits).abs().max() / logits.abs().max()).item()
    assert off <= 1e-5, f"the export of our adapters: off by {off:.2g} of the largest logit"
    os.mkdir(f"{root}/bare")           # what is published of a run
    for file in ("adapter_config.json", TENSORS):
        shutil.copy(f"{step}/{file}", f"{root}/bare")
    _, loss = train(options, root, "again", f"{root}/bare", 0, 1)
    check_loss("our adapters", loss, logits, golden["tokens"], IMAGE_TOKEN)
    theirs = f"tests/golden/lora/{name}"
    through, _ = train(options, root, "through", theirs, 0, 1)
    found, given = load_file(f"{through}/{TENSORS}"), load_file(f"{theirs}/{TENSORS}")
    assert found.keys() == given.keys() and all(torch.equal(found[n], x) for n, x in given.items())
    print(f"{name}: adapters and projector of ./train move logits by {moved:.3f}; PEFT's logits from pixels are those of the export "
          f"to {off:.1g}; loss {loss:.6f}", flush=True)


def main():
    parser = parser_of(__doc__, "golden_lora.py")
    options = parser.parse_args()
    for name, _, root in each_model(parser, options, IMAGE_SETTINGS):
        compare(options, name, root)


if __name__ == "__main__":
    main()
