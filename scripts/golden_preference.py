#!/usr/bin/env python3
"""Reference of training on preference pairs: TRL's losses, rewards and gradient norms in eight steps of AdamW.

    python3 scripts/golden_preference.py        # needs torch, trl and peft; writes tests/golden/preference.json

The model is tests/golden/llama, in float32 on a CPU. Each step has all pairs, so their order does not matter. The pairs are odd on
purpose: sides of one token, sides of different lengths, two equal sides. Prompts of `pairs` have several tokens, those of
`short` have one: TRL's ORPO counts tokens of prompts in the cross entropy of the chosen sides, and a prompt of one token has no
label. Runs with an adapter train golden/lora/llama, which is also the reference, or the same adapter with B = 0, so that the
reference is the base. `sharpened` are log-probabilities with a temperature. TRL's `sigmoid` ignores label_smoothing; cDPO is checked
by its formula in tests/test_preference.py.
"""
import copy, json, os, random

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
import torch
from datasets import Dataset
from peft import PeftModel
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

TOP = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODEL, ADAPTER, OUTPUT = (os.path.join(TOP, "tests/golden", name) for name in ("llama", "lora/llama", "preference.json"))
VOCABULARY, EOS, STEPS, PAIRS = 99, 0, 8, 8
RATE, EPS, TEMPERATURE = 0.02, 1e-3, 0.7
SETTINGS = dict(output_dir="/tmp/golden_preference", per_device_train_batch_size=PAIRS, max_steps=STEPS, learning_rate=RATE,
                lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=EPS, weight_decay=0.0, warmup_steps=0,
                max_grad_norm=0.0, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
                gradient_checkpointing=False, disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False)
# loss and, after a blank, what is different: settings of ./train; trainer; settings of TRL; data
RUNS = {
    "dpo": ({}, DPOTrainer, dict(loss_type=["sigmoid"], beta=0.1), "pairs"),
    "dpo + sft": ({"preference.sft_weight": 0.2}, DPOTrainer,
                  dict(loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.2], beta=0.1), "pairs"),
    "dpo adapter": ({}, DPOTrainer, dict(loss_type=["sigmoid"], beta=0.1), "pairs"),
    "dpo zero-adapter": ({}, DPOTrainer, dict(loss_type=["sigmoid"], beta=0.1), "pairs"),
    "dpo_norm": ({}, DPOTrainer, dict(loss_type=["sigmoid_norm"], beta=5.0), "pairs"),
    "ipo": ({}, DPOTrainer, dict(loss_type=["ipo"], beta=0.1), "pairs"),
    "apo_zero": ({}, DPOTrainer, dict(loss_type=["apo_zero"], beta=0.1), "pairs"),
    "cpo": ({}, CPOTrainer, dict(loss_type="sigmoid", beta=0.1, cpo_alpha=1.0), "pairs"),
    "simpo": ({"preference.beta": 2, "preference.gamma": 1}, CPOTrainer,
              dict(loss_type="simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0), "pairs"),
    "orpo": ({}, ORPOTrainer, dict(beta=0.1), "short"),
}
METRICS = {"loss": "preference/loss", "grad_norm": "optim/total_grad_norm",
           **{name: name for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
                                      "logps/rejected")}}


def make_pairs(longest_prompt):
    """Lists of (prompt, chosen, rejected). Sides end with EOS, as TRL's trainers of texts add it."""
    draw = random.Random(longest_prompt)
    ids = lambda n: [draw.randrange(1, VOCABULARY) for _ in range(n)]
    pairs = [[ids(draw.randint(1, longest_prompt)), ids(draw.randrange(1, 9)) + [EOS], ids(draw.randrange(1, 9)) + [EOS]]
             for _ in range(PAIRS)]
    if longest_prompt > 1:
        pairs[1][1] = [EOS]             # an empty answer, of which TRL's ORPO is NaN
    pairs[2][2] = list(pairs[2][1])     # equal sides
    return pairs


def as_text(ids):
    """TRL joins the texts of prompt and answer, so each begins with a space."""
    return "".join(f" t{i}" for i in ids if i != EOS)


class InOrder:
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def make_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t0", pad_token="t0")


def load(adapter):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.config._attn_implementation = "eager"
    if adapter:
        model = PeftModel.from_pretrained(model, ADAPTER, is_trainable=True)
    if adapter == "zero-adapter":
        for name, one in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(one)
    return model


def sharpened(pairs):
    """Sums of log-probabilities of each side's labels with the temperature."""
    model, sums = load(""), []
    for prompt, *sides in pairs:
        for side in sides:
            with torch.no_grad():
                logps = (model(torch.tensor([prompt + side])).logits[0] / TEMPERATURE).double().log_softmax(-1)
            sums.append(sum(logps[len(prompt) - 1 + i, token].item() for i, token in enumerate(side)))
    return {"temperature": TEMPERATURE, "sums": sums}


def train(trainer, settings, pairs, adapter):
    torch.manual_seed(0)
    model = load(adapter)
    if trainer is DPOTrainer:
        class Run(InOrder, DPOTrainer):
            def _prepare_dataset(self, dataset, *_):
                return dataset
        rows = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair)) for pair in pairs]
        run = Run(model, ref_model=None if adapter else copy.deepcopy(model), args=DPOConfig(**SETTINGS, max_length=None, **settings),
                  train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer())
    else:
        class Run(InOrder, trainer):
            pass
        config = CPOConfig if trainer is CPOTrainer else ORPOConfig
        rows = [dict(zip(("prompt", "chosen", "rejected"), map(as_text, pair))) for pair in pairs]
        run = Run(model, args=config(**SETTINGS, max_length=64, **settings), train_dataset=Dataset.from_list(rows),
                  processing_class=make_tokenizer())
    run.train()
    return {ours: [log[theirs] for log in run.state.log_history if theirs in log] for theirs, ours in METRICS.items()}


def main():
    golden = {"steps": STEPS, "rate": RATE, "eps": EPS, "eos": EOS, "pairs": make_pairs(6), "short": make_pairs(1), "runs": []}
    golden["sharpened"] = sharpened(golden["pairs"])
    for name, (settings, trainer, of_trl, data) in RUNS.items():
        loss, _, other = name.partition(" ")
        adapter = other if other.endswith("adapter") else ""
        metrics = train(trainer, of_trl, golden[data], adapter)
        assert all(len(values) == STEPS for values in metrics.values()), metrics
        print(name, metrics["preference/loss"])
        golden["runs"].append({"loss": loss, "settings": settings, "adapter": adapter, "data": data, "metrics": metrics})
    with open(OUTPUT, "w") as file:
        file.write(json.dumps(golden).replace("}, {\"loss\"", "},\n{\"loss\"") + "\n")


if __name__ == "__main__":
    main()
