"""Reference results of the models of reference_models.py: what libraries compute with them in float32 on a CPU.

NAME/golden.safetensors of a model
    tokens, targets (B, T)     one batch; a target below 0 is masked
    logits (B, T, vocab), loss ()      mean cross entropy over the unmasked targets
    grad.<tensor>              the gradient of the loss; of experts one tensor for each matrix
    losses (8)                 of 8 AdamW steps on the same batch, each before its update
    adamw (5)                  lr, beta1, beta2, eps, weight decay of those steps; gradients are clipped to norm 1
    features (rows, width)     of images: the tower's, one row for each image token, in the order of the tokens
    pixels (images, 3, H, W)   the pictures from which the features were computed
    losses_projector (8)       losses when only the projector is trained, from the same start
    routing_gap ()             of experts: the smallest difference, in all layers, tokens and steps, between the probabilities of
                               the last expert that is chosen and of the next one
NAME-aux of a model with experts: the same weights and batch, with output_router_logits, saved with one tensor for all experts
    ...                        the same; loss, losses and gradients with the auxiliary loss, times router_aux_loss_coef
    aux_loss ()                the auxiliary loss itself
lora/NAME, saved by PEFT, with random A and B and, where modules_to_save names it, another projector than the base's
    tokens, ..., losses        the same; gradients are those of what is trained, under the names of adapter_model.safetensors,
                               or of single experts
    trained.<tensor>           values of the trained tensor after the steps
    merged.<tensor>            first and last row of each matrix that training changes, after merge_and_unload of the random ones
muon/NAME.safetensors, with Muon for the matrices of the blocks and AdamW for all else
    losses (8)
    rows.<tensor>              after the steps, the first and the last row; of the embedding, the rows of the first two tokens
muon/steps.safetensors
    CASE.NAME (rows, columns)  matrices of a block of width 32 with heads of width 16 after 8 steps: `default` as the program's
                               defaults; `original` has adjust_lr_fn original, another momentum without Nesterov's, and no weight
                               decay; `heads` takes each head of q, k and v as a matrix of its own. Matrix i begins as
                               uniform(1000 i, .), and its gradient in step s (from 0) is uniform(1000 i + 1 + s, .).
NAME/continuation.json
    prompt, tokens             12 random tokens, and the 64 with which generate(do_sample=False) continues them. With images the
                               first of the pixels is in the prompt, from the second token on
    margin                     the smallest lead of a chosen token over the second one, as a share of the largest logit: a hundred
                               times the effect of rounding (1e-5, tests/test_parity.c) or more
"""
import copy
import json
import os

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from reference_models import (EXPERT_ADAPTERS, IMAGE_TOKEN, MODELS, PROJECTOR, ROWS, config_of, features_of, forward, has_experts,
                              in_files, load, make_batch, make_network, outputs, seed_of)

STEPS = 8
LR, BETA1, BETA2, EPS, DECAY, CLIP = 1e-2, 0.9, 0.95, 1e-5, 0.1, 1.0


def save(tensors, folder, name):
    """Writes folder/golden.safetensors, and prints a line about it."""
    save_file({n: t.contiguous() for n, t in tensors.items()}, f"{folder}/golden.safetensors")
    print(f"{name}: loss {tensors['loss'].item():.4f}, losses", *(f"{x:.3f}" for x in tensors["losses"]), flush=True)


# Losses and steps

def mean_loss(logits, targets):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.long().flatten(), ignore_index=-100)


def total_loss(network, batch):
    """The mean cross entropy; with output_router_logits also the auxiliary loss."""
    out, config = outputs(network, batch), network.config
    loss = mean_loss(out.logits, batch["targets"])
    return loss + config.router_aux_loss_coef * out.aux_loss if getattr(config, "output_router_logits", False) else loss


def parameter_groups(named, decayed=DECAY):
    """OLMo's groups of parameters: norms, biases and the embedding have no weight decay."""
    decay = [p for n, p in named if p.dim() >= 2 and "embed_tokens" not in n]
    rest = [p for n, p in named if p.dim() == 1 or "embed_tokens" in n]
    return [{"params": decay, "weight_decay": decayed}, {"params": rest, "weight_decay": 0.0}]


def adamw(groups):
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=LR, betas=(BETA1, BETA2), eps=EPS, foreach=False)


def train(network, batch, parameters, *optimizers):
    """The loss of each step, before its update."""
    losses, parameters = [], list(parameters)
    for _ in range(STEPS):
        loss = total_loss(network, batch)
        for p in parameters:
            p.grad = None
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP, foreach=False)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def train_copy(network, batch, trained=""):
    """The losses of AdamW steps that train only the parameters with `trained` in their names."""
    network = copy.deepcopy(network)
    named = [(n, p) for n, p in network.named_parameters() if p.requires_grad and trained in n]
    groups = parameter_groups(named)
    # the order in which the norm is summed
    in_order = [p for g in groups for p in g["params"]] if "pixels" in batch else [p for _, p in named]
    return train(network, batch, in_order, adamw(groups))


# Checks that the cases matter: otherwise the comparison would prove nothing

@torch.no_grad()
def check_clipping(network, batch, limit):
    """Asserts that the clamp changes some elements of q."""
    seen = []
    record = lambda module, args, y: seen.append((y.abs() > limit).float().mean())
    hooks = [layer.self_attn.q_proj.register_forward_hook(record) for layer in network.model.layers]
    forward(network, batch)
    for hook in hooks:
        hook.remove()
    share = torch.stack(seen).mean().item()
    assert 0.1 < share < 0.9, f"{share:.2f} of q is clipped"


@torch.no_grad()
def check_settings(network, batch, others):
    """Asserts that each setting of `others`, such as another window, changes a logit."""
    for change in (change for changes in others for change in changes(network.config)):
        config = type(network.config).from_dict(copy.deepcopy(network.config.to_dict()) | change)
        config._attn_implementation = "eager"
        other = type(network)(config).eval()
        other.load_state_dict(network.state_dict())
        off = (forward(other, batch) - forward(network, batch)).abs().max().item()
        assert off > 0.1, f"{change} changes no logit by more than {off:.2g}"


@torch.no_grad()
def check_parameters(network, batch, named, least):
    """Asserts that each of the parameters changes a logit."""
    logits = forward(network, batch)
    for name, p in named:
        before = p.clone()
        p.zero_()
        off = (forward(network, batch) - logits).abs().max().item()
        p.copy_(before)
        assert off > least, f"without {name} no logit changes by more than {off:.2g}"


# Experts

STACKED = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
GAP = 1e-4      # compared with double precision, probabilities are off by up to 5.8e-6 in 8 steps: rounding changes no choice


def layers_with_experts(network):
    return [layer for layer in network.model.layers if hasattr(layer.mlp, "gate")] if has_experts(network.config) else []


def record_gaps(network):
    """Returns a list. Each later pass through a layer with experts, also in copies of the network, adds a number to it: the
    smallest difference between the probability of the last chosen expert and that of the next one."""
    gaps = []

    def record(router, args, out):
        top = out[0].detach().softmax(-1).topk(router.top_k + 1).values
        gaps.append((top[:, -2] - top[:, -1]).min())
    for layer in layers_with_experts(network):
        layer.mlp.gate.register_forward_hook(record)
    return gaps


def smallest(gaps):
    """The entry of golden.safetensors about the gaps; {} for a model without experts."""
    if not gaps:
        return {}
    gap = min(gaps)
    assert gap > GAP, f"the probabilities of a chosen expert and of the next one differ by {gap:.2g} only; take another seed"
    return {"routing_gap": gap}


def by_expert(tensors):
    """Tensors by their names in files. A tensor of all experts is divided into one matrix per expert."""
    found = {}
    for name, x in tensors.items():
        place, _, kind = name.rpartition(".")
        if kind not in STACKED:
            found[name] = x
            continue
        for part, matrices in zip(STACKED[kind], x.chunk(len(STACKED[kind]), 1)):
            found |= {f"{place}.{expert}.{part}.weight": matrix for expert, matrix in enumerate(matrices)}
    return found


@torch.no_grad()
def check_balance(out, targets, k):
    """Asserts that the auxiliary loss is computed over all layers together, and over all tokens."""
    balance = lambda logits, mask=None: load_balancing_loss_func(logits, out.router_logits[0].shape[1], k, mask)
    layers = sum(balance((x,)) for x in out.router_logits) / len(out.router_logits)
    for other in (layers, balance(out.router_logits, (targets >= 0).float())):
        assert abs(other / out.aux_loss - 1) > 1e-3, f"the auxiliary loss is {out.aux_loss.item()}, otherwise {other.item()}"


def check_experts(network, batch, loss):
    """Asserts that every expert has tokens, that `loss`, whose gradients the network has, equals the loss of transformers, and
    that the auxiliary loss affects every router. Returns the entry of golden.safetensors about the auxiliary loss."""
    assert all(x.abs().amax((1, 2)).min() > 0 for x in (p.grad for p in network.parameters()) if x.dim() == 3), "an idle expert"
    targets = batch["targets"].long()
    out = network(input_ids=batch["tokens"].long(), labels=targets, shift_labels=targets)
    assert abs(out.loss - loss) <= 1e-6 * loss, f"the loss is {loss.item()}, by transformers {out.loss.item()}"
    if out.aux_loss is None:
        return {}
    routers = [layer.mlp.gate.weight for layer in layers_with_experts(network)]
    for router, without in zip(routers, torch.autograd.grad(mean_loss(out.logits, targets), routers)):
        off = ((router.grad - without).abs().max() / router.grad.abs().max()).item()
        assert off > 2e-3, f"the auxiliary loss changes the gradient of a router by {off:.2g} only"
    check_balance(out, targets, network.config.num_experts_per_tok)
    return {"aux_loss": out.aux_loss.detach()}


# The parts

def add_targets(batch):
    """Adds the next tokens as targets. Image tokens and the last token of a row are masked; in a text model, one more token is
    masked."""
    tokens = batch["tokens"]
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = tokens[:, 1:]
    if "pixels" in batch:
        targets[targets == IMAGE_TOKEN] = -100
    else:
        targets[1, 5] = -100
    batch["targets"] = targets


def check_text(model, network, batch):
    if getattr(network.config, "clip_qkv", None):
        check_clipping(network, batch, network.config.clip_qkv)
    check_settings(network, batch, model.others)
    check_parameters(network, batch, [(n, p) for n, p in network.named_parameters() if n.endswith(".bias")], 0.1)


def check_images(network, batch):
    for p in network.model.vision_tower.parameters():
        p.requires_grad_(False)
    with torch.no_grad():
        off = (forward(network, batch | {"pixels": batch["pixels"].roll(1, 2)}) - forward(network, batch)).abs().max()
    assert off > 0.1, "the images change no logit"


def write_model(name, folder, balanced=False):
    """balanced: with the auxiliary loss, and saved with one tensor for all experts."""
    model, generator = MODELS[name], torch.Generator().manual_seed(seed_of(name))
    config, counts = config_of(model), model.images.counts if model.images else []
    if balanced:
        config.output_router_logits = True
    network = make_network(config, generator)
    network.save_pretrained(folder, max_shard_size=model.shard, save_original_format=not balanced)
    batch = make_batch(config, counts, generator)
    add_targets(batch)
    check_images(network, batch) if model.images else check_text(model, network, batch)
    gaps = record_gaps(network)
    logits, loss = forward(network, batch), total_loss(network, batch)
    loss.backward()
    out = {"tokens": batch["tokens"].int(), "targets": batch["targets"].int(), "logits": logits.detach(), "loss": loss.detach(),
           "adamw": torch.tensor([LR, BETA1, BETA2, EPS, DECAY]), "losses": train_copy(network, batch)}
    out |= by_expert({"grad." + (in_files(n) if model.images else n): p.grad for n, p in network.named_parameters()
                      if p.grad is not None})
    out |= smallest(gaps)
    if has_experts(config):
        out |= check_experts(network, batch, out["loss"])
    if model.images:
        features = features_of(network, batch["pixels"])
        assert features.shape[1] == ROWS, features.shape
        row = network.get_input_embeddings().weight.grad[IMAGE_TOKEN]
        assert network.config.tie_word_embeddings or row.abs().max() == 0, "the image token's embedding has a gradient"
        out |= {"features": features.flatten(0, 1), "pixels": batch["pixels"],
                "losses_projector": train_copy(network, batch, PROJECTOR)}
    save(out, folder, name)


def write_models(root, images=False):
    for name, model in MODELS.items():
        if bool(model.images) == images:
            write_model(name, f"{root}/{name}")
            if has_experts(config_of(model)):
                write_model(name, f"{root}/{name}-aux", True)


def write_images(root):
    write_models(root, True)


# Adapters

def trained(network):
    """The trained tensors of a model with adapters, with the names of adapter_model.safetensors."""
    return {n.replace(".modules_to_save.default.", ".").replace(".default.", "."): p for n, p in network.named_parameters()
            if p.requires_grad}


def add_adapters(network, settings, seed):
    """Sets A and B so that every adapter matters: it adds half the size of the product of its matrix, which has unit scale. Also
    sets a projector that differs from the base's."""
    import peft
    network = peft.get_peft_model(network, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
    generator, r = torch.Generator().manual_seed(seed), settings["r"]
    scale = settings["lora_alpha"] / (r ** 0.5 if settings.get("use_rslora") else r)
    with torch.no_grad():
        for name, p in trained(network).items():
            noise = torch.randn(p.shape, generator=generator)
            if PROJECTOR in name:
                p.add_(0.3 * noise * (p.shape[1] ** -0.5 if p.dim() == 2 else 1))
            else:
                x = noise * (p.shape[1] ** -0.5 if "lora_A" in name else 0.5 * r ** -0.5 / scale)
                p.copy_(torch.where(own_ranks(name, p, r), x, 0))
    assert trained(network).keys() == peft.utils.get_peft_model_state_dict(network).keys()
    return network


def own_ranks(name, p, r):
    """Whether an element may differ from 0. PEFT joins the ranks of gate and of up of each expert, but in B each of the two has
    only its own ranks."""
    if ".experts.base_layer.lora_B" not in name:
        return torch.tensor(True)
    rank = torch.arange(p.shape[1]) // (p.shape[1] // (2 * r))      # columns are ranks x experts
    return torch.arange(p.shape[0])[:, None] // (p.shape[0] // 2) == rank // r


def of_experts(tensors, r):
    """Adapters by the names of single experts. PEFT stores those of all experts of a block in one tensor: A is (experts x ranks,
    in), and B is (out, ranks x experts). The ranks of gate_up_proj (base_layer) are first those of gate, then those of up."""
    found = {}
    for name, x in tensors.items():
        place, experts, rest = name.partition(".experts.")
        if not experts:
            found[name] = x
            continue
        modules = STACKED["gate_up_proj" if "base_layer" in rest else "down_proj"]
        ranks = len(modules) * r
        each = x.unflatten(0, (-1, ranks)) if "lora_A" in rest else x.unflatten(1, (ranks, -1)).permute(2, 0, 1)
        for i, module in enumerate(modules):
            own = each[:, i * r:(i + 1) * r] if "lora_A" in rest else each.chunk(len(modules), 1)[i][..., i * r:(i + 1) * r]
            found |= {f"{place}{experts}{expert}.{module}.{rest.removeprefix('base_layer.')}": y for expert, y in enumerate(own)}
    return found


def save_adapters(network, folder, single=None):
    """Saves adapters as PEFT does, but without the model card, and with names of modules as lists in a fixed order; PEFT has sets.
    single: the settings with which adapters of experts are saved by the names of single experts."""
    network.save_pretrained(folder)
    os.remove(f"{folder}/README.md")
    path, weights = f"{folder}/adapter_config.json", f"{folder}/adapter_model.safetensors"
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    if single:
        config |= single | {"target_parameters": None, "rank_pattern": {}, "alpha_pattern": {}}
        save_file({n: x.contiguous() for n, x in of_experts(load_file(weights), single["r"]).items()}, weights, {"format": "pt"})
    lists = [config[key] for key in ("target_modules", "target_parameters") if isinstance(config[key], list)]
    for names in lists:
        names.sort()
    if lists:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2)
            file.write("\n")


def check_loading(folder, base, batch, logits):
    """Asserts that PEFT loads the adapters from the folder."""
    import peft
    with torch.no_grad():
        off = (forward(peft.PeftModel.from_pretrained(load(base), folder).eval(), batch) - logits).abs().max().item()
    assert off < 1e-5, f"PEFT loads other adapters from {folder}: logits are off by {off:.2g}"


def write_adapted(name, root):
    if name in EXPERT_ADAPTERS:
        model, settings, seed, single = EXPERT_ADAPTERS[name]
    else:
        model, settings, single = name, MODELS[name].adapters, False
        seed = (2000 if MODELS[name].images else 1000) + seed_of(name)
    batch, base, r = load_file(f"{root}/{model}/golden.safetensors"), load(f"{root}/{model}"), settings["r"]
    weights = by_expert({n: w.clone() for n, w in base.state_dict().items()})
    with torch.no_grad():
        assert (forward(base, batch) - batch["logits"]).abs().max() < 1e-4, "the base computes something else"
    network = add_adapters(base, settings, seed)
    check_parameters(network, batch, trained(network).items(), 1e-2)
    gaps = record_gaps(base)
    start = {n: p.detach().clone() for n, p in trained(network).items()}
    for n, p in trained(network).items():
        if ".experts.base_layer.lora_B" in n:
            p.register_hook(lambda grad, n=n: grad * own_ranks(n, grad, r))

    logits = forward(network, batch)
    loss = mean_loss(logits, batch["targets"])
    loss.backward()
    out = {n: batch[n] for n in ("tokens", "targets", "adamw", "features") if n in batch}
    grads = of_experts({n: p.grad.clone() for n, p in trained(network).items()}, r)
    assert all(x.abs().max() > 0 for x in grads.values()), "an idle expert; take another seed"
    out |= {"logits": logits.detach(), "loss": loss.detach()} | {"grad." + n: x for n, x in grads.items()}
    out["losses"] = train(network, batch, trained(network).values(), adamw(parameter_groups(list(trained(network).items()))))
    after = of_experts({n: p.detach().clone() for n, p in trained(network).items()}, r)
    out |= smallest(gaps) | {"trained." + n: x for n, x in after.items()}
    with torch.no_grad():
        for n, p in trained(network).items():
            p.copy_(start[n])
    folder = f"{root}/lora/{name}"
    save_adapters(network, folder, settings if single else None)
    check_loading(folder, f"{root}/{model}", batch, logits)
    merged = by_expert(network.merge_and_unload().state_dict())
    changed = [n for n in weights if weights[n].dim() == 2 and not torch.equal(merged[n], weights[n])]
    save(out | {"merged." + in_files(n): merged[n][[0, -1]] for n in changed}, folder, name)


def write_adapters(root):
    for name in (*MODELS, *EXPERT_ADAPTERS):
        write_adapted(name, root)


# Muon

MATRICES = [("q", 32, 32), ("k", 16, 32), ("v", 16, 32), ("o", 32, 32), ("gate", 48, 32), ("up", 48, 32), ("down", 32, 48)]
HEAD = 16
DEFAULT = dict(lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw")
ORIGINAL = dict(lr=0.02, weight_decay=0.0, momentum=0.9, nesterov=False, adjust_lr_fn="original")
CASES = [("default", DEFAULT, False), ("original", ORIGINAL, False), ("heads", DEFAULT, True)]


def uniform(seed, count):
    """Numbers in [-1/2, 1/2), multiples of 2^-24."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return ((x >> np.uint32(8)).astype(np.float64) * 2.0**-24 - 0.5).astype(np.float32)


def matrix(seed, rows, columns):
    return torch.from_numpy(uniform(seed, rows * columns).reshape(rows, columns).copy())


def train_matrix(i, rows, columns, settings, height):
    """Matrix i after its steps, which treat it as matrices of `height` rows."""
    parts = [torch.nn.Parameter(part.clone()) for part in matrix(1000 * i, rows, columns).split(height)]
    muon = torch.optim.Muon(parts, **settings)
    for step in range(STEPS):
        for part, grad in zip(parts, matrix(1000 * i + 1 + step, rows, columns).split(height)):
            part.grad = grad.clone()
        muon.step()
    return torch.cat([part.detach() for part in parts])


def train_by_muon(folder):
    batch, network = load_file(f"{folder}/golden.safetensors"), load(folder)
    is_matrix = lambda n, p: p.dim() == 2 and ".layers." in n
    matrices = [p for n, p in network.named_parameters() if is_matrix(n, p)]
    rest = [(n, p) for n, p in network.named_parameters() if not is_matrix(n, p)]
    found = {"losses": train(network, batch, network.parameters(), adamw(parameter_groups(rest)),
                             torch.optim.Muon(matrices, **DEFAULT | dict(lr=LR, weight_decay=DECAY)))}
    for name, p in network.named_parameters():
        rows = batch["tokens"][0, :2].long() if "embed_tokens" in name else [0, -1]
        found["rows." + name] = p.detach()[rows] if p.dim() == 2 else p.detach()
    return {n: t.contiguous() for n, t in found.items()}


def write_muon(root):
    os.makedirs(f"{root}/muon", exist_ok=True)
    save_file({f"{case}.{name}": train_matrix(i, rows, columns, settings, HEAD if heads and name in "qkv" else rows)
               for case, settings, heads in CASES for i, (name, rows, columns) in enumerate(MATRICES)},
              f"{root}/muon/steps.safetensors")
    for name in (name for name, model in MODELS.items() if not model.images and not has_experts(config_of(model))):
        found = train_by_muon(f"{root}/{name}")
        save_file(found, f"{root}/muon/{name}.safetensors")
        print(f"{name}: losses", *(f"{x:.3f}" for x in found["losses"]), flush=True)


# Continuations

PROMPT, NEW, MARGIN, SEEDS = 12, 64, 1e-3, 24


def greedy(network, prompt, pixels=None):
    """Tokens and margin; None if the text ends early."""
    pictures = {} if pixels is None else {"pixel_values": pixels}
    out = network.generate(prompt, **pictures, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW,
                           output_logits=True, return_dict_in_generate=True, pad_token_id=0)
    if len(out.logits) < NEW:
        return None, 0
    logits = torch.cat(out.logits)
    top = logits.topk(2).values
    return out.sequences[0, PROMPT:].tolist(), ((top[:, 0] - top[:, 1]) / logits.abs().amax(1)).min().item()


def continuation(name, network, pixels=None, enough=NEW):
    """Tries SEEDS prompts, and returns the continuation with the most different tokens, or the first one that has enough. These
    models soon repeat themselves."""
    best, most, places = None, 0, 0 if pixels is None else ROWS
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(1, network.config.get_text_config().vocab_size - (places > 0), (1, PROMPT), generator=generator)
        prompt[0, 1:1 + places] = IMAGE_TOKEN
        tokens, margin = greedy(network, prompt, pixels)
        if margin >= MARGIN and len(set(tokens)) > most:
            best, most = {"prompt": prompt[0].tolist(), "tokens": tokens, "margin": round(margin, 6)}, len(set(tokens))
        if most >= enough:
            break
    if not best:
        raise SystemExit(f"error: {name}: none of {SEEDS} prompts has a margin of {MARGIN}")
    print(f"{name}: margin {best['margin']:.2g}, {most} different tokens of {NEW}", flush=True)
    return best


def write_continuations(root):
    for name, model in MODELS.items():
        pixels = load_file(f"{root}/{name}/golden.safetensors")["pixels"][:1] if model.images else None
        with open(f"{root}/{name}/continuation.json", "w", encoding="utf-8") as file:
            json.dump(continuation(name, load(f"{root}/{name}"), pixels), file)
            file.write("\n")
