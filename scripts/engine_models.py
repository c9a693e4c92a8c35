"""Small trained models for try_engines.py: one for each class that ./train trains, and what ./train itself computes with them."""
import json
import os
import shlex
import subprocess
import sys

import numpy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EOS, VOCAB, LENGTH, STEPS = 0, 1024, 128, 110
# number of texts of the training shard, their length in tokens, and the tokens of each that are a prompt
PROMPTS, TEXT, PROMPT = 20, 128, 96
DOCUMENTS = ["README.md", "configs/FINE-TUNE.md"]        # for training and for validation
TEMPLATE = ("{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n\n"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}")

COMMON = {"d_model": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 64, "intermediate_size": 256,
          "vocab_size": VOCAB, "max_sequence_length": LENGTH, "eos_token_id": EOS, "layer_norm_type": "rms", "weight_tying": False}
WINDOW = {"sliding_window": 32, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]}
LLAMA3 = {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "full_attn_layers_only": True}
EXPERTS = {"num_experts": 8, "router_aux_loss": "micro_batch", "router_aux_loss_coef": 0.01}

MODELS = {
    "llama": {"architecture": "LlamaForCausalLM", "n_kv_heads": 4},
    "llama-tied-long": {"architecture": "LlamaForCausalLM", "weight_tying": True, "rope_scaling": LLAMA3},
    "mistral": {"architecture": "MistralForCausalLM"},
    "mistral-window": {"architecture": "MistralForCausalLM", "sliding_window": 32},
    "ministral": {"architecture": "MinistralForCausalLM", **WINDOW},
    "qwen2": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True},
    "qwen2-tied": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "weight_tying": True},
    "qwen3": {"architecture": "Qwen3ForCausalLM", "attention_layer_norm": "head"},
    "qwen3-tied": {"architecture": "Qwen3ForCausalLM", "attention_layer_norm": "head", "weight_tying": True, "n_kv_heads": 1},
    "olmo": {"architecture": "OlmoForCausalLM", "layer_norm_type": "default", "layer_norm_with_affine": False, "clip_qkv": 2.0,
             "weight_tying": True, "n_kv_heads": 4},
    "olmo2": {"architecture": "Olmo2ForCausalLM", "norm_after": True, "attention_layer_norm": True},
    "olmo3-long": {"architecture": "Olmo3ForCausalLM", "norm_after": True, "attention_layer_norm": True, **WINDOW,
                   "rope_theta": 500000, "rope_scaling": YARN},
    "smollm3": {"architecture": "SmolLM3ForCausalLM", "weight_tying": True, "no_rope_layer_interval": 4},
    "olmoe": {"architecture": "OlmoeForCausalLM", "attention_layer_norm": True, **EXPERTS, "num_experts_per_tok": 2},
    "qwen3-moe": {"architecture": "Qwen3MoeForCausalLM", "attention_layer_norm": "head", **EXPERTS, "num_experts_per_tok": 3,
                  "norm_topk_prob": True},
}


def run(command, **more):
    """The output of the command; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, **more)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}error: exit status {done.returncode}")
    return done.stdout


def make_data(root):
    """Makes a byte-level BPE tokenizer from two documents of this repository, and a shard of each. A short run nearly memorizes
    the first document."""
    texts = [open(name, encoding="utf-8").read() for name in DOCUMENTS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<|endoftext|>"], show_progress=False,
                                                             initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    os.makedirs(f"{root}/tokenizer")
    tokenizer.save(f"{root}/tokenizer/tokenizer.json")
    with open(f"{root}/tokenizer/tokenizer_config.json", "w", encoding="utf-8") as file:
        json.dump({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "chat_template": TEMPLATE,
                   "clean_up_tokenization_spaces": False, "model_max_length": LENGTH}, file)
    ids = [tokenizer.encode(text).ids + [EOS] for text in texts]
    numpy.array(ids[0], "<u2").tofile(f"{root}/train.npy")
    held = numpy.array(ids[1][: len(ids[1]) // TEXT * TEXT], "<u2")
    held.tofile(f"{root}/val.npy")      # llama-perplexity reads whole chunks, and scores the targets of the second half of each
    (numpy.arange(len(held)) % TEXT > TEXT // 2).tofile(f"{root}/val-mask.npy")
    learned = numpy.fromfile(f"{root}/train.npy", "<u2")
    chosen = learned[: len(learned) // TEXT * TEXT].reshape(-1, TEXT)
    chosen = chosen[:: len(chosen) // PROMPTS][:PROMPTS]
    for i, text in enumerate(chosen):
        text.tofile(f"{root}/text{i}.npy")
    with open(f"{root}/prompts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"tokens": text[:PROMPT].tolist()}) + "\n" for text in chosen)


def make_questions(root):
    """Makes multiple-choice questions: which of four continuations follows in the document? Written as a task of
    lm-evaluation-harness and as requests of an evaluator."""
    tokenizer = Tokenizer.from_file(f"{root}/tokenizer/tokenizer.json")
    os.makedirs(f"{root}/tasks", exist_ok=True)
    for task, name in {"learned": DOCUMENTS[0], "held_out": DOCUMENTS[1]}.items():
        words = open(name, encoding="utf-8").read().split()
        parts = [words[i:i + 16] for i in range(0, len(words) - 16, 16)][:40]
        with open(f"{root}/tasks/{task}.jsonl", "w", encoding="utf-8") as here, \
                open(f"{root}/tasks/{task}-there.jsonl", "w", encoding="utf-8") as there:
            here.write(json.dumps({"task": task, "metric": "len_norm", "questions": len(parts)}) + "\n")
            for i, part in enumerate(parts):
                context, gold = " ".join(part[:10]), i % 4
                choices = [" ".join(parts[(i + 7 * j) % len(parts)][10:10 + 3 + (i + j) % 4]) for j in range(1, 4)]
                choices.insert(gold, " ".join(part[10:]))
                there.write(json.dumps({"context": context, "choices": choices, "gold": gold}) + "\n")
                before = tokenizer.encode(context).ids
                after = [tokenizer.encode(" " + choice).ids for choice in choices]
                here.write(json.dumps({"gold": gold, "choices": [
                    {"tokens": before + ids, "continuation": len(ids), "characters": len(choice), "bytes": len(choice.encode())}
                    for ids, choice in zip(after, choices)]}) + "\n")
        with open(f"{root}/tasks/{task}.yaml", "w", encoding="utf-8") as file:
            json.dump({"task": task, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": f"{root}/tasks/{task}-there.jsonl"}},
                       "output_type": "multiple_choice", "test_split": "test", "doc_to_text": "{{context}}", "doc_to_target": "gold",
                       "doc_to_choice": "choices", "metric_list": [
                           {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")]}, file)


def scores(program, root, folder):
    """{task: (accuracy, accuracy by length)} from ./train --eval_only. A task file has one metric, so each task has two files."""
    labels = {}
    for task in ("learned", "held_out"):
        for metric in ("acc", "len_norm"):
            labels[f"{task}_{metric}"] = f"{root}/tasks/{task}_{metric}.jsonl"
            with open(f"{root}/tasks/{task}.jsonl", encoding="utf-8") as file, \
                    open(labels[f"{task}_{metric}"], "w", encoding="utf-8") as out:
                out.write(file.read().replace('"len_norm"', f'"{metric}"', 1).replace(f'"{task}"', f'"{task}_{metric}"', 1))
    with open(f"{folder}.tasks.yaml", "w", encoding="utf-8") as file:
        json.dump({"evaluators": [{"label": label, "type": "downstream", "data": {"paths": [path]}} for label, path in labels.items()]},
                  file)
    run(["rm", "-rf", f"{folder}.tasks"])
    run([program, f"{folder}.tasks.yaml", "--eval_only", f"--load_path={folder}", "--recipe=f32", f"--save_folder={folder}.tasks",
         f"--model.max_sequence_length={LENGTH}", "--device_train_microbatch_size=4"])
    with open(f"{folder}.tasks/eval.jsonl", encoding="utf-8") as file:
        found = {key: value for line in file for key, value in json.loads(line).items()}
    return {task: [found[f"eval/downstream/{task}_{metric}_{metric}"] for metric in ("acc", "len_norm")]
            for task in ("learned", "held_out")}


def train(program, root, name, model, recipe="f32", **more):
    """Runs ./train; returns the last checkpoint."""
    settings = {"recipe": recipe, "save_folder": f"{root}/{name}/run", "global_train_batch_size": 4, "device_train_microbatch_size": 4,
                "max_duration": STEPS, "eval_interval": None, "save_interval": None, "tokenizer": f"{root}/tokenizer",
                "optimizer": {"learning_rate": 4e-3, "weight_decay": 0.1, "eps": 1e-8}, "scheduler": {"t_warmup": 10},
                "data": {"paths": [f"{root}/train.npy"]}, **({"model": {**COMMON, **model}} if model else {}), **more}
    os.makedirs(f"{root}/{name}", exist_ok=True)
    with open(f"{root}/{name}/run.yaml", "w", encoding="utf-8") as file:
        json.dump(settings, file)
    run([program, f"{root}/{name}/run.yaml"])
    return f"{root}/{name}/run/latest"


def ours(program, root, folder, recipe, more=()):
    """What ./train computes with the folder: greedy continuations of the prompts, the mean loss of each text, and the loss of
    val.npy over the targets that llama-perplexity scores."""
    said = run([program, f"--generate={root}/prompts.jsonl", f"--load_path={folder}", f"--max_new_tokens={TEXT - PROMPT}",
                f"--recipe={recipe}", f"--model.max_sequence_length={LENGTH}", *more])
    tokens = [json.loads(line)["tokens"] for line in said.splitlines() if line.startswith("{")]
    data = {f"text{i}": {"paths": [f"{root}/text{i}.npy"]} for i in range(PROMPTS)}
    data["val"] = {"paths": [f"{root}/val.npy"], "label_mask_paths": [f"{root}/val-mask.npy"]}
    with open(f"{folder}.eval.yaml", "w", encoding="utf-8") as file:
        json.dump({"evaluators": [{"label": label, "data": one} for label, one in data.items()]}, file)
    run(["rm", "-rf", f"{folder}.eval"])
    run([program, f"{folder}.eval.yaml", "--eval_only", f"--load_path={folder}", f"--recipe={recipe}", f"--save_folder={folder}.eval",
         f"--model.max_sequence_length={TEXT}", "--device_train_microbatch_size=1", *more])
    with open(f"{folder}.eval/eval.jsonl", encoding="utf-8") as file:
        scores = {key: value for line in file for key, value in json.loads(line).items()}
    losses = {label: scores[f"eval/{label}/CrossEntropyLoss"] for label in data}
    return {"tokens": tokens, "losses": [losses[f"text{i}"] for i in range(PROMPTS)], "val": losses["val"]}


def chats(root, name, lines):
    os.makedirs(f"{root}/{name}")
    with open(f"{root}/{name}/chats.jsonl", "w", encoding="utf-8") as file:
        for question, answer, *more in lines:
            one = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            file.write(json.dumps(one | (more[0] if more else {})) + "\n")
    return f"{root}/{name}/chats.jsonl"


def fine_tune(program, root, name, model, lines, images=(), steps=60):
    """Trains on the conversations with the configuration that make_chat_shards.py writes."""
    run([sys.executable, "scripts/make_chat_shards.py", "--model", model, "--output", f"{root}/{name}/data", *images, lines])
    run([program, f"{root}/{name}/data/fine-tune.yaml", f"--save_folder={root}/{name}/run", "--recipe=f32", f"--max_duration={steps}",
         "--global_train_batch_size=4", "--device_train_microbatch_size=4", f"--model.max_sequence_length={LENGTH}",
         "--optimizer.learning_rate=3e-3", "--reset_trainer_state", "--reset_optimizer_state"])


ANSWERS = {"What is 3 plus 4?": "It is 7.", "Which month follows May?": "June follows May.", "Who are you?": "I am a small model.",
           "What do cows eat?": "Cows eat grass.", "How many legs has a spider?": "A spider has eight legs.",
           "Is ice warm?": "No, ice is cold.", "Where do fish live?": "Fish live in water.", "Name a metal.": "Iron is a metal.",
           "Which day follows Monday?": "Tuesday.", "What colour has snow?": "Snow is white.", "How do I say hello?": "Say: hello!",
           "What comes after nine?": "Ten comes after nine."}
UNSEEN = ["What comes after Monday?", "Where do cows live?", "Is snow cold?"]      # the chat model was not trained on these


def make_chat(program, root):
    """Fine-tunes llama on questions, each with its own answer."""
    lines = chats(root, "chat", list(ANSWERS.items()) * 16)
    fine_tune(program, root, "chat", os.path.realpath(f"{root}/llama/run/latest"), lines, steps=160)


COLOURS = {"red": (220, 30, 30), "green": (20, 160, 50), "blue": (30, 50, 210), "yellow": (240, 220, 40), "white": (250, 250, 250),
           "black": (10, 10, 10)}


def make_llava(program, root):
    """llama with a random CLIP tower, trained to name colours. Needs torch, transformers and pillow."""
    import torch
    from PIL import Image
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel
    torch.manual_seed(0)
    tower = CLIPVisionConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2, image_size=32,
                             patch_size=8, projection_dim=64)
    CLIPVisionModel(tower).save_pretrained(f"{root}/tower")
    size = {"height": 32, "width": 32}
    CLIPImageProcessor(size=size, crop_size=size).save_pretrained(f"{root}/tower")
    run([sys.executable, "scripts/make_llava.py", "--text", os.path.realpath(f"{root}/llama/run/latest"), "--tower", f"{root}/tower",
         f"{root}/llava-base"])
    lines = chats(root, "llava", [("<image>\nWhich colour?", f"It is {name}.", {"image": f"{name}.png"}) for name in COLOURS] * 8)
    for name, colour in COLOURS.items():
        Image.new("RGB", (32, 32), colour).save(f"{root}/llava/{name}.png")
    run([sys.executable, "scripts/make_image_features.py", "--model", f"{root}/llava-base", "--root", f"{root}/llava",
         "--output", f"{root}/llava/features", "--f32", lines])
    fine_tune(program, root, "llava", f"{root}/llava-base", lines, ["--images", f"{root}/llava/features"])
