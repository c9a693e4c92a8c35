"""Reference of a run of ./train: 8 steps of a small OLMo-2, trained with torch and transformers.

It writes these files:
    train/start                     a seeded model, saved by save_pretrained
    train/tokens.npy, labels.npy    tokens and label masks
    train/config.yaml               the configuration of the run, which names these files
    train/golden.safetensors        the results of float32 on a CPU
golden.safetensors has:
    loss, zloss (8)                 means per label in each step, zloss multiplied by its weight; NaN if not finite
    norm, clipped, rate, labels (8) gradient norm before clipping, whether it is clipped, learning rate, number of labels
    trained.<tensor>                the weights after the last step
The order of the sequences is numpy's. The schedule and the groups of parameters follow OLMo's definitions. The steps are
torch.optim.AdamW with clip_grad_norm_. One row of the embedding is so large that the step with this token overflows: its loss is
not finite, and it makes no update. tests/test_train_parity.c compares.
"""
import math
import os

import numpy
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Olmo2Config

from reference_golden import parameter_groups

STEPS, BATCH, T, INSTANCES, SEED = 8, 8, 16, 50, 11         # chosen so that the last two steps are in a second epoch
LR, LR_FIRST, LR_LAST, WARMUP = 1e-2, 2e-3, 1e-3, 3
BETA1, BETA2, EPS, DECAY = 0.9, 0.95, 1e-3, 0.5             # this eps is large enough to show errors in the size of gradients
CLIP, CLIP_WARMUP, CLIP_FACTOR = 2.5, 2, 2.0
Z_WEIGHT = 0.02
VOCABULARY, EOS, HUGE_TOKEN, HUGE_STEP = 99, 0, 98, 3       # HUGE_TOKEN occurs only in step HUGE_STEP

CONFIG = f"""\
# What torch does in scripts/golden_train.py, which wrote this file.
run_name: golden
seed: 1
recipe: f32
load_path: FOLDER/start
model: {{max_sequence_length: {T}}}
data:
  paths: [FOLDER/tokens.npy]
  label_mask_paths: [FOLDER/labels.npy]
  seed: {SEED}
max_duration: {STEPS}
global_train_batch_size: {BATCH}
optimizer: {{learning_rate: {LR}, betas: [{BETA1}, {BETA2}], eps: {EPS}, weight_decay: {DECAY}}}
scheduler:
  name: cosine_with_warmup
  t_warmup: {WARMUP}
  warmup_min_lr: {LR_FIRST}
  alpha_f: {LR_LAST / LR}
  grad_clip_warmup_steps: {CLIP_WARMUP}
  grad_clip_warmup_factor: {CLIP_FACTOR}
max_grad_norm: {CLIP}
softmax_auxiliary_loss: true
auxiliary_loss_multiplier: {Z_WEIGHT}
save_interval: null
eval_interval: null
"""


def make_model():
    generator = torch.Generator().manual_seed(SEED)
    config = Olmo2Config(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
                         max_position_embeddings=64, vocab_size=VOCABULARY, rms_norm_eps=1e-6, tie_word_embeddings=False,
                         attention_dropout=0.0, bos_token_id=None, eos_token_id=EOS, pad_token_id=None,
                         rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.2 * noise if p.dim() == 1 else noise / p.shape[1] ** 0.5)
        model.model.embed_tokens.weight[HUGE_TOKEN] = 3e38 * torch.sign(torch.randn(32, generator=generator))
    return model


def order_of_steps():
    """The sequences of each step: OLMo's order, epoch after epoch; a partial batch at the end of an epoch is not used."""
    steps = []
    for epoch in range(2):
        order = numpy.arange(INSTANCES, dtype=numpy.uint32)
        numpy.random.Generator(numpy.random.PCG64(SEED + epoch)).shuffle(order)
        steps += [order[i:i + BATCH].tolist() for i in range(0, INSTANCES - BATCH + 1, BATCH)]
    return steps[:STEPS]


def make_data(steps):
    """Tokens, and which of them are learned: few of some sequences, nearly all of others."""
    random = numpy.random.default_rng(SEED)
    tokens = random.integers(EOS, HUGE_TOKEN, (INSTANCES, T), dtype=numpy.uint16)
    labels = random.random((INSTANCES, T)) < 0.2
    # on two ranks, rank 1 has every second sequence of a step, starting with the second
    for step in steps[:INSTANCES // BATCH]:
        labels[step[1::2]] = random.random((BATCH // 2, T)) < 0.8
    huge = steps[HUGE_STEP - 1][2]
    tokens[huge, T // 2] = HUGE_TOKEN
    assert sum(huge in step for step in steps) == 1
    for step in steps:
        of_rank = labels[step, 1:].reshape(BATCH // 2, 2, -1).sum((0, 2))
        assert abs(of_rank[0] - of_rank[1]) > 0.1 * of_rank.sum(), of_rank
    return tokens, labels


def rate(step):
    """The learning rate of OLMo's CosWithWarmup."""
    if step < WARMUP:
        return LR_FIRST + (LR - LR_FIRST) * step / WARMUP
    return LR_LAST + (LR - LR_LAST) * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def max_norm(step):
    return CLIP * (CLIP_FACTOR if step <= CLIP_WARMUP else 1)


def losses(model, tokens, labels):
    """Cross entropy and weighted z-loss of sequences, as means per label, whose sum is minimized; and the number of labels."""
    tokens, labels = torch.from_numpy(tokens.astype(numpy.int64)), torch.from_numpy(labels)
    targets = torch.where(labels, tokens, -100)[:, 1:]
    logits = model(tokens).logits[:, :-1]
    is_label = targets != -100
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    z = torch.logsumexp(logits, -1)
    return loss, Z_WEIGHT * (z[is_label] ** 2).mean(), int(is_label.sum())


def train(tokens, labels, steps, wrong=""):
    """Trains the run; wrong: makes one named error."""
    model = make_model()
    groups = parameter_groups(list(model.named_parameters()), DECAY)
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS, foreach=False)
    rows = []
    for number, step in enumerate(steps, 1):
        optimizer.zero_grad()
        loss, zloss, count = losses(model, tokens[step], labels[step])
        if wrong == "labels of a rank":
            loss, zloss = sum(torch.stack(losses(model, tokens[part], labels[part])[:2]) for part in (step[0::2], step[1::2]))
        (loss + (zloss if wrong != "no z-loss" else 0)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, foreach=False)
        limit = max_norm(number) if wrong != "no warmup of clipping" else CLIP
        finite = math.isfinite(loss.item()) and math.isfinite(norm.item())
        rows.append([loss.item(), zloss.item(), norm.item(), rate(number), count, norm.item() > limit, finite])
        scale = limit / norm.item() if finite else 1
        scale = {"never clipped": 1, "always scaled": scale}.get(wrong, min(1, scale))
        for p in model.parameters():
            p.grad *= scale
        for group in optimizer.param_groups:
            group["lr"] = rate(number - 1 if wrong == "the rate of the step before" else number)
        if finite:
            assert max(p.grad.abs().max().item() for p in model.parameters()) < (1 if not wrong else math.inf)
            optimizer.step()
        elif wrong == "corrected by steps":
            for state in optimizer.state.values():
                state["step"] += 1
    return model, rows


def distance(model, other, start):
    """The largest difference of a tensor between two runs, relative to how much the first run changed the tensor."""
    off = lambda a, b: (a - b).double().norm().item()
    return max(off(q, p) / off(p, s) for p, q, s in zip(model.parameters(), other.parameters(), start.parameters()))


def write(root):
    folder = f"{root}/train"
    steps = order_of_steps()
    tokens, labels = make_data(steps)
    start = make_model()
    model, rows = train(tokens, labels, steps)
    for row in rows:
        print("loss %.4f  z-loss %.4f  norm %.3f  rate %.6f  labels %d  clipped %d  finite %d" % tuple(row))
    clipped = [row[5] for row in rows if row[6]]
    assert [row[6] for row in rows].count(False) == 1 and not rows[HUGE_STEP - 1][6]
    assert 2 <= sum(clipped) <= len(clipped) - 2
    for wrong in ("never clipped", "always scaled", "no warmup of clipping", "the rate of the step before", "corrected by steps",
                  "labels of a rank", "no z-loss"):
        off = distance(model, train(tokens, labels, steps, wrong)[0], start)
        print(f"{wrong}: the weights are off by {off:.3f} of their change")
        assert off > 0.05                       # the test allows a tenth of this difference

    os.makedirs(folder, exist_ok=True)
    start.save_pretrained(os.path.join(folder, "start"))
    tokens.tofile(os.path.join(folder, "tokens.npy"))
    labels.tofile(os.path.join(folder, "labels.npy"))
    with open(os.path.join(folder, "config.yaml"), "w") as f:
        f.write(CONFIG.replace("FOLDER", folder))
    golden = {"trained." + n: p.detach() for n, p in model.named_parameters()}
    for i, name in enumerate(("loss", "zloss", "norm", "rate", "labels", "clipped")):
        golden[name] = torch.tensor([row[i] for row in rows], dtype=torch.float32)
    save_file({n: t.contiguous() for n, t in golden.items()}, os.path.join(folder, "golden.safetensors"))
