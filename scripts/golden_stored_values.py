#!/usr/bin/env python3
"""Reference of distillation and of policy gradients: losses and gradient norms in four steps of AdamW.

    python3 scripts/golden_stored_values.py      # needs torch, transformers and trl; writes tests/golden/stored_values.json

The student or policy is tests/golden/llama, the teacher tests/golden/mistral, in float32 on a CPU. Each step has all documents, so
their order does not matter. Distillation is plain PyTorch, on the teacher's eight most likely ids and their tail, rounded as
model/shape/distill.h rounds. The losses of policies are computed by TRL's own GRPOTrainer._compute_loss, with log-probabilities of
the old policy, the generator and the reference model that differ from the policy's by noise.
"""
import collections, json, math, os, random

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
import torch
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
GOLDEN = os.path.join(TOP, "tests/golden")
VOCABULARY, STEPS, DOCUMENTS, TOP_K, RATE, EPS = 99, 4, 9, 8, 0.005, 1e-3
DISTILLATIONS = [{"distill.loss": "forward_kl"}, {"distill.loss": "reverse_kl"},
                 {"distill.loss": "forward_kl", "distill.temperature": 2, "distill.ce_weight": 0.5},
                 {"distill.loss": "reverse_kl", "distill.temperature": 0.7, "distill.ce_weight": 0.25}]
# name: our settings, TRL's
POLICIES = {"grpo": ({}, {}), "dr_grpo": ({"policy.constant": 16}, {"max_completion_length": 16}),
            "dapo": ({"policy.clip_high": 0.28, "policy.beta": 0.1}, {"epsilon_high": 0.28, "beta": 0.1}),
            "cispo": ({}, {"epsilon_high": 5.0})}


def make_documents():
    """Lists of (prompt, completion). A document of one label, and a long one."""
    draw = random.Random(1)
    ids = lambda n: [draw.randrange(1, VOCABULARY) for _ in range(n)]
    documents = [[ids(draw.randint(1, 6)), ids(draw.randint(2, 9))] for _ in range(DOCUMENTS)]
    documents[1][1] = ids(1)
    documents[2][1] = ids(14)
    return documents


def pad(documents):
    """ids (D, T), and 1 for each label: completion tokens."""
    longest = max(len(p) + len(c) for p, c in documents)
    rows = [p + c + [0] * (longest - len(p) - len(c)) for p, c in documents]
    mask = [[0] * len(p) + [1] * len(c) + [0] * (longest - len(p) - len(c)) for p, c in documents]
    return torch.tensor(rows), torch.tensor(mask)


def load(name):
    return AutoModelForCausalLM.from_pretrained(os.path.join(GOLDEN, name), dtype=torch.float32, attn_implementation="eager")


def train(compute):
    """compute(model) -> loss, metrics. Returns {name: values of all steps}."""
    model = load("llama")
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), EPS, 0)
    found = collections.defaultdict(list)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, metrics = compute(model)
        loss.backward()
        norm = math.sqrt(sum(float((p.grad ** 2).sum()) for p in model.parameters()))
        for name, value in {**metrics, "loss": loss, "optim/total_grad_norm": norm}.items():
            found[name].append(float(value))
        optimizer.step()
    return dict(found)


def rounded(p):
    return torch.exp(-torch.round(-2048 * torch.log(p)) / 2048)


def distillation(settings, ids, mask):
    divisor, weight = settings.get("distill.temperature", 1), settings.get("distill.ce_weight", 0)
    with torch.no_grad():
        teacher = torch.softmax(load("mistral")(ids).logits[:, :-1] / divisor, -1)
    top, columns = teacher.topk(TOP_K, -1)
    t = torch.cat([rounded(top), rounded(1 - top.sum(-1, keepdim=True))], -1)
    labels, used = ids[:, 1:], mask[:, 1:]

    def compute(model):
        logits = model(ids).logits[:, :-1]
        ce = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        q = torch.softmax(logits / divisor, -1).gather(-1, columns)
        q = torch.cat([q, 1 - q.sum(-1, keepdim=True)], -1)
        a, b = (t, q) if settings["distill.loss"] == "forward_kl" else (q, t)
        divergence = (a * torch.log(a / b)).sum(-1)
        ce, divergence = ((x * used).sum() / used.sum() for x in (ce, divergence))
        return weight * ce + (1 - weight) * divisor ** 2 * divergence, {"train/CrossEntropyLoss": ce, "distill/divergence": divergence}

    return train(compute)


def logps_of(model, ids):
    logits = model(ids).logits[:, :-1]
    logps = torch.log_softmax(logits, -1)
    return logps.gather(-1, ids[:, 1:, None])[..., 0], -(logps.exp() * logps).sum(-1)


class Policy(GRPOTrainer):
    """TRL's loss without TRL's trainer: the whole text is the completion, and a mask says which tokens count."""

    def __init__(self, loss, **settings):
        self.args = GRPOConfig(output_dir="/tmp/golden", use_cpu=True, bf16=False, report_to=[], loss_type=loss,
                               vllm_importance_sampling_mode="token_truncate", **settings)
        self.loss_type, self.beta, self.use_vllm = loss, self.args.beta, True
        self.epsilon_low = self.args.epsilon
        self.epsilon_high = self.args.epsilon if self.args.epsilon_high is None else self.args.epsilon_high
        self.max_completion_length = self.args.max_completion_length
        self.vllm_importance_sampling_correction = True
        self.importance_sampling_level, self.top_entropy_quantile = "token", 1.0
        self.off_policy_mask_threshold, self._entropy_bonus_enabled, self.aux_loss_enabled = None, False, False
        self.current_gradient_accumulation_steps, self.args.steps_per_generation = 1, 1
        self.model = type("Mode", (), {"training": True})()
        self._metrics = {"train": collections.defaultdict(list)}
        self.accelerator = type("One", (), {"num_processes": 1, "gather": lambda _, x: x, "reduce": lambda _, x, **k: x})()

    def _get_per_token_logps_and_entropies(self, model, ids, *_, **__):
        return *logps_of(model, ids), None


def policy(loss, settings, ids, mask, values):
    trainer = Policy(loss, **settings)
    used = mask[:, 1:]
    old, generator, reference = (values[name] for name in ("old", "generator", "reference"))
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1]), "completion_ids": ids[:, 1:],
              "completion_mask": used, "advantages": values["advantage"], "old_per_token_logps": old,
              "ref_per_token_logps": reference, "num_items_in_batch": used.sum(),
              "importance_sampling_ratio": torch.exp(old - generator).clamp(max=trainer.args.vllm_importance_sampling_clip_max)}

    def compute(model):
        with torch.no_grad():
            logps, entropy = logps_of(model, ids)
        mean = lambda x: (x * used).sum() / used.sum()
        metrics = {"policy/ratio": mean(torch.exp(logps - old)), "policy/entropy": mean(entropy),
                   "policy/ratio_max": (torch.exp(logps - old) * used).max(),
                   "policy/importance_weight": mean(inputs["importance_sampling_ratio"]),
                   "policy/kl_old": mean(torch.exp(old - logps) - (old - logps) - 1)}
        if trainer.beta:
            metrics["policy/kl_reference"] = mean(torch.exp(reference - logps) - (reference - logps) - 1)
        value = trainer._compute_loss(model, inputs)
        theirs = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        names = {"clip_ratio/low_mean": "policy/clip_low", "clip_ratio/high_mean": "policy/clip_high",
                 "cispo_clip_ratio": "policy/clip_high"}
        return value, {**metrics, **{ours: theirs[name] for name, ours in names.items() if name in theirs}}

    return train(compute)


def main():
    documents = make_documents()
    ids, mask = pad(documents)
    torch.manual_seed(1)
    with torch.no_grad():
        logps, _ = logps_of(load("llama"), ids)
    noise = lambda scale: torch.randn(logps.shape) * scale
    old = logps + noise(0.3)
    values = {"advantage": torch.randn(len(documents), 1) + noise(0.2), "old": old, "generator": old + noise(0.8),
              "reference": logps + noise(0.5)}
    golden = {"steps": STEPS, "rate": RATE, "eps": EPS, "top_k": TOP_K, "documents": documents,
              "values": {name: [[round(float(x), 6) for x in row[:len(p) + len(c) - 1]] for row, (p, c) in zip(value, documents)]
                         for name, value in values.items()}, "runs": []}
    for name, rows in golden["values"].items():        # as they are stored
        for row, numbers in zip(values[name], rows):
            row[:len(numbers)] = torch.tensor(numbers)
    for settings in DISTILLATIONS:
        golden["runs"].append({"settings": settings, "metrics": distillation(settings, ids, mask)})
    for loss, (ours, theirs) in POLICIES.items():
        golden["runs"].append({"settings": {"policy.loss": loss, **ours}, "metrics": policy(loss, theirs, ids, mask, values)})
    for run in golden["runs"]:
        print(run["settings"], run["metrics"]["loss"], {k: v for k, v in run["metrics"].items() if "clip" in k})
    with open(os.path.join(GOLDEN, "stored_values.json"), "w") as file:
        file.write(json.dumps(golden).replace("}, {\"settings\"", "},\n{\"settings\"") + "\n")


if __name__ == "__main__":
    main()
