#!/usr/bin/env python3
"""Takes LLaVA models through --export in fp8, int8, int4 and nf4, and the libraries that read these, as round_trip_quantized.py.

    python3 scripts/round_trip_llava_quantized.py [--train ./train] [NAME ...]        # from the repository's root

It takes each model of golden_llava.py, eight times as wide. transformers saves the model, ./train trains it for one step in FP8 and
exports the checkpoint in each format, and each folder once more as f32. The script ends with an error unless:

    weights     compressed-tensors, bitsandbytes or transformers reads from codes and scales the values that the folder's export to
                f32 holds, bit for bit (bitsandbytes gives nf4 in bf16: rounded to bf16); tower, projector and head have no
                codes, and the tower is the one that was saved
    logits      from pixels, activations not rounded, are those of that export, to 1e-4
    losses      the loss of a step from the folder that ./train prints is that of transformers for that export, to 1e-5

Needs torch, transformers 5, tokenizers, compressed-tensors, bitsandbytes and accelerate.
"""
import copy

import torch
import transformers
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from transformers import LlavaConfig, LlavaForConditionalGeneration

import golden_llava
from compare_llava_peft import load, logits_of, train, write_data
from round_trip_quantized import FORMATS, wide, weight_of
from small_runs import check_loss, each_model, export, parser_of

UNCODED = ("vision_tower", "multi_modal_projector", "lm_head")


def make(name, folder, seed):
    """The model as transformers saves it; a batch with pixels and features."""
    text, tower, strategy, images, bias = golden_llava.MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    config = LlavaConfig(text_config=wide(text), vision_config=copy.deepcopy(tower), image_token_index=golden_llava.IMAGE_TOKEN,
                         image_seq_length=golden_llava.ROWS, vision_feature_select_strategy=strategy,
                         multimodal_projector_bias=bias, vision_feature_layer=-2)
    config.tie_word_embeddings = text.tie_word_embeddings
    config._attn_implementation = "eager"
    model = LlavaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(0.3 * noise if "bias" in n else 1 + 0.2 * noise if p.dim() == 1 else noise / p[0].numel() ** 0.5)
    model.tie_weights()
    model.save_pretrained(folder)
    tokens, _ = golden_llava.make_batch(generator, images)
    pixels = torch.randn((sum(images), 3, golden_llava.SIDE, golden_llava.SIDE), generator=generator)
    with torch.no_grad():
        features = golden_llava.features_of(model, pixels)
    return {"tokens": tokens.int(), "pixels": pixels, "features": features.flatten(0, 1)}


def load_coded(folder):
    model, info = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                                output_loading_info=True)
    assert not any(info.values()), f"{folder}: {info}"
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = None         # activations are not rounded
    return model.eval()


@torch.no_grad()
def check_weights(name, model, exact):
    """Compares all weights; matrices of the language model's blocks, and only these, are coded."""
    values = exact.state_dict()
    coded = 0
    for path, module in model.named_modules():
        if getattr(module, "weight", None) is None:
            continue
        found, expected = weight_of(module), values[path + ".weight"]
        assert torch.equal(found, expected.to(found.dtype)), f"{name}: {path} is not what --export reads"
        is_coded = hasattr(module, "quantization_scheme") or isinstance(module, (Linear4bit, Linear8bitLt)) \
            or type(module).__name__ == "FP8Linear"
        assert not (is_coded and any(part in path for part in UNCODED)), f"{name}: {path} has codes"
        coded += is_coded
    layers = model.config.text_config.num_hidden_layers
    decoded = name == "fp8-deepseek" and not torch.cuda.is_available()         # when it is loaded
    assert coded == 7 * layers or (decoded and coded == 0), f"{name}: {coded} matrices with codes, expected {7 * layers}"


def check_format(options, name, checkpoint, root, batch, original):
    folder = export(options, checkpoint, f"{root}/{name}", *FORMATS[name])
    exact = load(export(options, folder, f"{root}/{name}-f32", "f32"))
    model = load_coded(folder)
    rounds = any(isinstance(module, (Linear4bit, Linear8bitLt)) for module in model.modules())      # activations, always
    served = None if rounds else logits_of(model, batch)       # compressed-tensors decodes weights when they are first needed
    check_weights(name, model, exact)
    tower = exact.model.vision_tower.state_dict()
    assert all(torch.equal(x, tower[n]) for n, x in original.model.vision_tower.state_dict().items()), f"{name}: another tower"
    logits = logits_of(exact, batch)
    _, loss = train(options, root, name + "-again", folder, 0, 1)
    check_loss(name, loss, logits, batch["tokens"], golden_llava.IMAGE_TOKEN)
    if served is not None:
        worst = (served - logits).abs().max().item()
        assert worst <= 1e-4, f"{name}: logits differ by {worst}"
    return logits


def round_trip(options, name, root, seed):
    batch = make(name, f"{root}/original", seed)
    write_data(root, batch)
    checkpoint, _ = train(options, root, "trained", f"{root}/original", 1e-3, 1, recipe="fp8")
    exact = logits_of(load(export(options, checkpoint, f"{root}/f32", "f32")), batch)
    original = load(f"{root}/original")
    moved = {form: (check_format(options, form, checkpoint, root, batch, original) - exact).abs().max().item() for form in FORMATS}
    print(f"{name}: weights, tower, logits and losses equal; logits up to {exact.abs().max().item():.3f} moved by "
          + ", ".join(f"{form} {x:.3f}" for form, x in moved.items()), flush=True)


def main():
    parser = parser_of(__doc__, "golden_llava.py")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    for name, seed, root in each_model(parser, options, golden_llava.MODELS):
        round_trip(options, name, root, seed)


if __name__ == "__main__":
    main()
