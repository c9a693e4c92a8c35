#!/usr/bin/env python3
"""Reference results of small random models with images, computed by Hugging Face transformers from pixels.

    python3 scripts/golden_llava.py [folder]        # default: tests/golden

For each model it writes folder/<name>/ with save_pretrained, and golden.safetensors as scripts/golden.py does, also with
    features (rows, width)     the tower's features in float32, one row for each image token, in the order of the tokens
    pixels (images, 3, H, W)   what they were made from
    losses_projector (8)       of 8 AdamW steps in which only the projector is trained, from the same start
The vision tower is never trained. tests/test_parity.c compares. Needs torch and transformers 4.57.
"""
import copy
import os

import torch
from transformers import (CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, MistralConfig, Qwen3Config,
                          SiglipVisionConfig)

import golden

from golden_folder import golden_folder

B, T, IMAGE_TOKEN, SIDE, PATCH = golden.B, golden.T, 98, 28, 14
ROWS = (SIDE // PATCH) ** 2
TOWER = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, image_size=SIDE, patch_size=PATCH)
TEXT = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, vocab_size=99, attention_dropout=0.0, bos_token_id=None, eos_token_id=0, pad_token_id=None)
CLIP = CLIPVisionConfig(projection_dim=16, **TOWER)

# text model, tower, strategy, images of each row of the batch, biases
MODELS = {
    "llava-llama": (LlamaConfig(rms_norm_eps=1e-5, tie_word_embeddings=False, **TEXT), CLIP, "default", [2, 0], True),
    "llava-mistral": (MistralConfig(rms_norm_eps=1e-5, tie_word_embeddings=False, sliding_window=None, **TEXT), CLIP, "default",
                      [0, 1], False),
    "llava-qwen3-tied": (Qwen3Config(rms_norm_eps=1e-6, tie_word_embeddings=True, head_dim=16, **TEXT),
                         SiglipVisionConfig(vision_use_head=False, **TOWER), "full", [1, 1], True),
}


def in_files(name):
    """The name of a parameter of the module tree in files."""
    for tree, file in (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."),
                       ("model.multi_modal_projector.", "multi_modal_projector.")):
        if name.startswith(tree):
            return file + name[len(tree):]
    return name


def make_batch(generator, images):
    """Tokens with the places of images, and targets, which never are such places."""
    tokens = torch.randint(0, IMAGE_TOKEN, (B, T), generator=generator)
    for row, count in enumerate(images):
        for i in range(count):
            first = 1 + i * (ROWS + 2)
            tokens[row, first:first + ROWS] = IMAGE_TOKEN
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    targets[targets == IMAGE_TOKEN] = -100
    return tokens, targets


def features_of(model, pixels):
    """As LlavaModel.get_image_features, before the projector."""
    layers = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    rows = layers[model.config.vision_feature_layer]
    return rows[:, 1:] if model.config.vision_feature_select_strategy == "default" else rows


def train(model, tokens, targets, pixels, trained):
    model = copy.deepcopy(model)
    groups = golden.parameter_groups([(n, p) for n, p in model.named_parameters() if trained(n)])
    return golden.train(lambda: model(input_ids=tokens, pixel_values=pixels).logits, targets,
                        [p for g in groups for p in g["params"]], golden.adamw(groups))


def make(name, spec, folder, seed):
    text, tower, strategy, images, bias = spec
    generator = torch.Generator().manual_seed(seed)
    config = LlavaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE_TOKEN, image_seq_length=ROWS,
                         vision_feature_select_strategy=strategy, multimodal_projector_bias=bias, vision_feature_layer=-2)
    config.tie_word_embeddings = text.tie_word_embeddings
    config._attn_implementation = "eager"
    model = LlavaForConditionalGeneration(config).eval()
    with torch.no_grad():
        for n, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            flat = p.shape[1:].numel()
            p.copy_(0.3 * noise if "bias" in n else 1 + 0.2 * noise if p.dim() == 1 else noise / max(flat, 1) ** 0.5)
    model.tie_weights()
    model.save_pretrained(folder)
    tokens, targets = make_batch(generator, images)
    pixels = torch.randn((sum(images), 3, SIDE, SIDE), generator=generator)
    model.requires_grad_(True)
    for p in model.model.vision_tower.parameters():
        p.requires_grad_(False)

    with torch.no_grad():
        features = features_of(model, pixels)
        other = model(input_ids=tokens, pixel_values=pixels.roll(1, 2)).logits
    logits = model(input_ids=tokens, pixel_values=pixels).logits
    assert features.shape[1] == ROWS, features.shape
    assert (other - logits).abs().max() > 0.1, "the images change no logit"
    loss = golden.mean_loss(logits, targets)
    loss.backward()
    out = {"tokens": tokens.int(), "targets": targets.int(), "logits": logits.detach(), "loss": loss.detach(),
           "features": features.flatten(0, 1), "pixels": pixels}
    out |= {"grad." + in_files(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    row = model.get_input_embeddings().weight.grad[IMAGE_TOKEN]
    assert text.tie_word_embeddings or row.abs().max() == 0, "the image token's embedding has a gradient"
    out["losses"] = train(model, tokens, targets, pixels, lambda n: "vision_tower" not in n)
    out["losses_projector"] = train(model, tokens, targets, pixels, lambda n: "multi_modal_projector" in n)
    out["adamw"] = torch.tensor([golden.LR, golden.BETA1, golden.BETA2, golden.EPS, golden.DECAY])
    golden.save(out, folder, name)


def main():
    root = golden_folder(__doc__, os.path.join(os.path.dirname(__file__), "..", "tests", "golden"))
    for seed, (name, spec) in enumerate(MODELS.items()):
        folder = os.path.join(root, name)
        os.makedirs(folder, exist_ok=True)
        make(name, spec, folder, seed)


if __name__ == "__main__":
    main()
