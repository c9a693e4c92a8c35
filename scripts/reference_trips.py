"""Models and adapters go from a library through ./train and back; the functions check the results."""
import glob
import json
import os
import re
import shlex
import shutil
import subprocess

import numpy
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from reference_golden import NEW, add_adapters, continuation
from reference_models import (ALL, IMAGE_TOKEN, MODELS, PROJECTOR, ROWS, config_of, features_of, forward, load, make_batch,
                              make_network, seed_of)

LENGTH = 32
TENSORS = "adapter_model.safetensors"
# ./train warns in this case: it reads the spelling of transformers 4 as transformers 4 does
OTHERWISE = {("Olmo3ForCausalLM", "rope_theta")}
MADE_ANEW = {"dtype", "torch_dtype", "transformers_version", "_name_or_path", "max_window_layers"}
ADDED_WITH_IMAGES = {"image_feature_size", "architectures"}
FORMATS = {
    "fp8": ["fp8"], "fp8-block": ["fp8", "--block=128"], "fp8-deepseek": ["fp8", "--layout=fp8"],
    "fp8-trained": ["fp8", "--scales=trained"], "int8": ["int8"], "int8-bitsandbytes": ["int8", "--layout=bitsandbytes"],
    "int4": ["int4"], "int4-32": ["int4", "--group=32"], "nf4": ["nf4"],
}
WIDER = 8                       # so wide that matrices can be divided into blocks and groups
UNCODED = ("vision_tower", PROJECTOR, "lm_head")


# The program

def run(command):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout}{done.stderr}error: exit status {done.returncode}")
    return done.stdout


def train(options, root, name, folder, rate, steps=1, recipe="f32", more=""):
    """Trains steps on the batch in `root` from `folder`. Returns the checkpoint and the loss of the first step. more: further
    lines of the configuration."""
    images = f", image_paths: [{root}/images.npy], image_features: {root}/features" if os.path.exists(f"{root}/features") else ""
    with open(f"{root}/{name}.yaml", "w", encoding="utf-8") as file:
        file.write(f"global_train_batch_size: 2\ndevice_train_microbatch_size: 1\nmax_duration: {steps}\neval_interval: null\n"
                   f"recipe: {recipe}\nload_path: {folder}\nsave_folder: {root}/{name}\n"
                   f"model: {{max_sequence_length: {LENGTH}}}\ndata: {{paths: [{root}/tokens.npy]{images}}}\n"
                   f"optimizer: {{learning_rate: {rate}, weight_decay: 0}}\nscheduler: {{name: constant}}\n{more}")
    run([*shlex.split(options.train), f"{root}/{name}.yaml"])
    with open(f"{root}/{name}/metrics.jsonl", encoding="utf-8") as file:
        losses = [json.loads(line).get("train/CrossEntropyLoss") for line in file]
    return f"{root}/{name}/step{steps}", next(x for x in losses if x is not None)


def export(options, checkpoint, folder, dtype, *more):
    run([shlex.split(options.train)[-1], f"--export={checkpoint}", folder, f"--dtype={dtype}", *more])
    return folder


def generate(options, root, folder, prompt):
    with open(f"{root}/prompts.jsonl", "w", encoding="utf-8") as file:
        json.dump({"tokens": prompt}, file)
    lines = run([shlex.split(options.train)[-1], f"--generate={root}/prompts.jsonl", f"--load_path={folder}", "--recipe=f32",
                 f"--max_new_tokens={NEW}", "--model.max_sequence_length=128"]).splitlines()
    return next(json.loads(line)["tokens"] for line in lines if line.startswith("{"))


def check_loss(what, loss, logits, batch):
    """Image tokens are not labels."""
    labels = batch["tokens"][:, 1:].flatten().long()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).double(), labels,
                                                 ignore_index=IMAGE_TOKEN if "pixels" in batch else -100).item()
    assert abs(loss - expected) <= 1e-5 * expected, f"{what}: ./train has the loss {loss}, the library {expected}"


def check_close(what, found, expected):
    off = ((found - expected).abs().max() / expected.abs().max()).item()
    assert off <= 1e-5, f"{what}: off by {off:.2g} of the largest"


# What goes in

def save_tokenizer(folder, size):
    """Saves a tokenizer with `size` byte tokens; token 0 ends a text."""
    words = ["<eos>"] + sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 1]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    turns = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
    fast.chat_template = {"default": turns, "tool_use": turns + "{{ tools }}"}
    fast.save_pretrained(folder)


def write_data(root, batch, network):
    """Writes the batch for ./train: tokens; for images the index and the tower's features."""
    batch["tokens"].numpy().astype("<u2").tofile(f"{root}/tokens.npy")
    if "pixels" not in batch:
        return
    features = features_of(network, batch["pixels"])
    count, _, width = features.shape
    with open(f"{root}/images.npy", "wb") as file:
        file.write((1).to_bytes(8, "little") + numpy.arange(count, dtype="<u4").tobytes())
    os.mkdir(f"{root}/features")
    features.numpy().astype("<f4").tofile(f"{root}/features/features-0000.f32")
    with open(f"{root}/features/features.json", "w", encoding="utf-8") as file:
        json.dump({"id": f"{1:016x}", "rows": ROWS, "cols": width, "dtype": "f32", "files": [["features-0000.f32", count]]}, file)


def make(config, counts, root, seed):
    """Makes a model and a tokenizer, saved by transformers in root/original, and a batch in `root` for ./train."""
    generator = torch.Generator().manual_seed(seed)
    network = make_network(config, generator)
    network.generation_config = GenerationConfig(eos_token_id=0, do_sample=True, top_p=0.9)
    network.save_pretrained(f"{root}/original")
    save_tokenizer(f"{root}/original", config.get_text_config().vocab_size)
    batch = make_batch(config, counts, generator, LENGTH, 1)
    write_data(root, batch, network)
    return f"{root}/original", batch


def make_of(name, root, wider=1):
    model = MODELS[name]
    return make(config_of(model, wider), model.images.counts if model.images else [], root, seed_of(name))


@torch.no_grad()
def logits_of(folder, batch):
    return forward(load(folder), batch)


# ---- transformers -> ./train -> --export -> transformers

def tensors_of(folder):
    return {n: x for path in glob.glob(f"{folder}/model*.safetensors") for n, x in load_file(path).items()}


def check_rounded(folder, exact, dtype):
    """Compares every tensor, and the type that from_pretrained chooses for the folder."""
    tensors, wide = tensors_of(folder), tensors_of(exact)
    assert tensors.keys() == wide.keys()
    for name, x in tensors.items():
        as_saved = name.startswith("vision_tower.")
        assert (as_saved or x.dtype == dtype) and torch.equal(x, wide[name].to(x.dtype)), f"{folder}: {name}"
    assert load(folder, "auto").dtype == dtype


def differences(a, b):
    """Keys whose values in b differ from a. Keys that only b has may say that something is absent, such as biases in a class
    without them."""
    found = {}
    for key in a.keys() | b.keys():
        x, y = a.get(key), b.get(key)
        if isinstance(x, dict) and isinstance(y, dict):
            found |= differences(x, y)
        elif x != y and (key in a or y):
            found[key] = x, y
    return found


def check_files(folder, original, more=frozenset()):
    """Compares all files except config.json and weights byte for byte. more: keys of config.json that may differ."""
    names = lambda root: {os.path.relpath(os.path.join(path, n), root) for path, _, files in os.walk(root) for n in files
                          if not n.startswith("model")}
    assert names(folder) == names(original), f"{names(folder)} of {names(original)}"
    for name in names(folder) - {"config.json"}:
        with open(os.path.join(folder, name), "rb") as one, open(os.path.join(original, name), "rb") as other:
            assert one.read() == other.read(), name
    found, expected = (AutoConfig.from_pretrained(f).to_dict() for f in (folder, original))
    changed = differences(expected, found)
    assert changed.keys() <= MADE_ANEW | more | (ADDED_WITH_IMAGES if "vision_config" in expected else set()), changed
    found, expected = (AutoTokenizer.from_pretrained(f) for f in (folder, original))
    talk = [{"role": "user", "content": "Wie geht's?"}]
    for template in (None, "tool_use"):
        texts = [t.apply_chat_template(talk, chat_template=template, tokenize=False) for t in (found, expected)]
        assert texts[0] == texts[1]
    assert found(texts[0]).input_ids == expected(texts[0]).input_ids


def through_transformers(options, name, root):
    original, batch = make_of(name, root)
    before = logits_of(original, batch)

    same, loss = train(options, root, "same", original, 0)
    check_loss("saved", loss, before, batch)
    assert torch.equal(logits_of(export(options, same, f"{root}/same-f32", "f32"), batch), before)

    trained, _ = train(options, root, "trained", original, 1e-3)
    exported = {d: export(options, trained, f"{root}/{d}", d) for d in ("f32", "bf16", "f16")}
    after = logits_of(exported["f32"], batch)
    assert torch.equal(after, logits_of(trained, batch)) and not torch.equal(after, before)
    check_rounded(exported["bf16"], exported["f32"], torch.bfloat16)
    check_rounded(exported["f16"], exported["f32"], torch.float16)
    for folder in exported.values():
        check_files(folder, original)

    _, loss = train(options, root, "again", exported["f32"], 0)
    check_loss("exported", loss, after, batch)
    rounded = (logits_of(exported["bf16"], batch) - after).abs().max().item()
    return (f"logits and files equal; a step moved logits by {(after - before).abs().max().item():.3f}, rounding to bf16 by "
            f"{rounded:.3f}; loss {loss:.6f}")


# the same for each key of config.json

def honours(key):
    """Whether ./train supports the key, by its table."""
    with open("model/formats/hf_keys.c", encoding="utf-8") as file:
        rows = re.findall(r'{ "(\w+)",\s+(HF_\w+)', file.read())
    return any((key, kind) in rows for kind in ("HF_VALUE", "HF_TOKEN", "HF_ROTATION", "HF_BLOCKS"))


def key_models():
    """{"CLASS KEY": config.json with another value of this key}; for each class also its unchanged config.json."""
    transformers.utils.logging.set_verbosity(transformers.utils.logging.CRITICAL)
    with open("tests/golden/config_keys.json", encoding="utf-8") as file:
        known = json.load(file)[transformers.__version__]
    found = {}
    for name, c in known.items():
        found[name] = c["base"]
        for key, (value, effect) in c["keys"].items():
            if honours(key) and effect != "nothing" and (name, key) not in OTHERWISE:
                found[f"{name} {key}"] = c["base"] | {key: value}
        for key, (value, effect) in c.get("rope_keys", {}).items():
            if honours(key) and effect != "nothing":
                found[f"{name} rope_scaling.{key}"] = c["scaled"] | {"rope_scaling": c["scaled"]["rope_scaling"] | {key: value}}
    return found


def through_keys(options, name, root):
    original, config = f"{root}/original", key_models()[name]
    os.mkdir(original)
    write = lambda: open(f"{original}/config.json", "w", encoding="utf-8")
    with write() as file:
        json.dump(config, file)
    try:
        _, batch = make(AutoConfig.from_pretrained(original, attn_implementation="eager"), [], root, 0)
        with write() as file:
            json.dump(config, file)
        before = logits_of(original, batch)
    except Exception as error:      # for example because sizes do not match
        return f"transformers: {str(error).splitlines()[0]:.100}"
    try:
        same, loss = train(options, root, "same", original, 0)
    except SystemExit as error:
        return f"refused: {str(error).splitlines()[-2]:.200}"
    check_loss("saved", loss, before, batch)
    for folder in (same, export(options, same, f"{root}/f32", "f32"), export(options, original, f"{root}/direct", "f32")):
        assert torch.equal(logits_of(folder, batch), before), folder
    return f"loss {loss:.6f}, logits equal"


# the same in formats with fewer bits

def weight_of(module):
    """The values with which the library computes, before it rounds them to the type of activations; and whether the module has
    codes."""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant
    from bitsandbytes.nn import Linear4bit, Linear8bitLt
    w = module.weight
    if isinstance(module, Linear4bit):
        return dequantize_4bit(w.data, w.quant_state), True
    if isinstance(module, Linear8bitLt):
        return int8_vectorwise_dequant(w.data, w.SCB if w.SCB is not None else module.state.SCB), True
    return w.data, hasattr(module, "quantization_scheme") or type(module).__name__ == "FP8Linear"


@torch.no_grad()
def check_weights(form, network, exact):
    """Compares all weights, and checks that only the matrices of the language model's blocks have codes."""
    values, coded, compared = exact.state_dict(), 0, set()
    for path, module in network.named_modules():
        if getattr(module, "weight", None) is None:
            continue
        (found, is_coded), expected = weight_of(module), values[path + ".weight"]
        assert torch.equal(found, expected.to(found.dtype)), f"{form}: {path} is not what --export reads"
        assert not (is_coded and any(part in path for part in UNCODED)), f"{form}: {path} has codes"
        coded += is_coded
        compared.add(path + ".weight")
    assert compared == {n for n in values if n.endswith(".weight")}, f"{form}: {compared}"
    layers = network.config.get_text_config().num_hidden_layers
    decoded = form == "fp8-deepseek" and not torch.cuda.is_available()         # transformers decodes the weights when it loads them
    assert coded == 7 * layers or (decoded and coded == 0), f"{form}: {coded} matrices with codes, expected {7 * layers}"


def check_shared_scales(folder):
    tensors = tensors_of(folder)
    for key, scale in tensors.items():
        for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
            if key.endswith(f"{first}.weight_scale"):
                assert all(torch.equal(scale, tensors[key.replace(first, other)]) for other in others), key


def tower_of(network):
    return {n: x for n, x in network.state_dict().items() if "vision_tower" in n}


@torch.no_grad()
def check_format(options, form, checkpoint, root, original, batch):
    folder = export(options, checkpoint, f"{root}/{form}", *FORMATS[form])
    exact = load(export(options, folder, f"{root}/{form}-f32", "f32"))
    check_files(folder, original, {"quantization_config"})
    if form == "fp8-trained":
        check_shared_scales(folder)
    network = load(folder)
    for module in network.modules():
        if hasattr(module, "quantization_scheme"):
            module.quantization_scheme.input_activations = None         # activations are not rounded
    rounds = "bitsandbytes" in form or form == "nf4"                    # these round activations, always
    served = None if rounds else forward(network, batch)    # compressed-tensors decodes weights when they are first needed
    check_weights(form, network, exact)
    tower = tower_of(exact)
    assert all(torch.equal(x, tower[n]) for n, x in tower_of(load(original)).items()), f"{form}: another tower"
    logits = forward(exact, batch)
    _, loss = train(options, root, form + "-again", folder, 0)
    check_loss(form, loss, logits, batch)
    if not rounds:
        worst = (served - logits).abs().max().item()
        assert worst <= 1e-4, f"{form}: logits differ by {worst}"
    return logits


def through_formats(options, name, root):
    original, batch = make_of(name, root, WIDER)
    checkpoint, _ = train(options, root, "trained", original, 1e-3, recipe="fp8")
    exact = logits_of(export(options, checkpoint, f"{root}/f32", "f32"), batch)
    moved = {form: (check_format(options, form, checkpoint, root, original, batch) - exact).abs().max().item() for form in FORMATS}
    return (f"weights, logits, losses and files equal; logits up to {exact.abs().max().item():.3f} moved by "
            + ", ".join(f"{form} {x:.3f}" for form, x in moved.items()))


# adapters: ./train -> PEFT, PEFT -> ./train

def new_adapters(settings):
    """The section of the configuration for adapters with these settings of PEFT; a regular expression selects some modules."""
    modules = settings["target_modules"]
    if modules != "all-linear":
        modules = f"[{', '.join(modules if isinstance(modules, list) else [ALL[0], ALL[2], ALL[3], ALL[6]])}]"
    return (f"lora: {{rank: {settings['r']}, alpha: {settings['lora_alpha']}, "
            f"use_rslora: {str(settings.get('use_rslora', False)).lower()}, target_modules: {modules}}}\n")


def load_adapters(folder):
    """Adapters as PEFT loads them, on the base that the folder names."""
    from peft import PeftModel, get_peft_model_state_dict
    with open(f"{folder}/adapter_config.json", encoding="utf-8") as file:
        base = load(json.load(file)["base_model_name_or_path"])
    network = PeftModel.from_pretrained(base, folder).eval()
    check_tensors(get_peft_model_state_dict(network), load_file(f"{folder}/{TENSORS}"))
    return network


def check_tensors(found, expected):
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


@torch.no_grad()
def from_train(options, root, original, batch, settings):
    """Returns how much the adapters change logits."""
    step, _ = train(options, root, "ours", original, 1e-2, 3, more=new_adapters(settings))
    names = load_file(f"{step}/{TENSORS}").keys()
    assert any(PROJECTOR in name for name in names) == ("pixels" in batch) and not any("tower" in name for name in names)
    logits = forward(load_adapters(step), batch)
    check_close("the export of our adapters", logits_of(export(options, step, f"{root}/ours-merged", "f32"), batch), logits)
    moved = (logits - logits_of(original, batch)).abs().max().item()
    assert moved > 0.01, f"the adapters change logits by {moved:.2g} only"

    os.mkdir(f"{root}/bare")           # the files of a run that users publish
    for name in ("adapter_config.json", TENSORS):
        shutil.copy(f"{step}/{name}", f"{root}/bare")
    _, loss = train(options, root, "ours-again", f"{root}/bare", 0)
    check_loss("ours", loss, logits, batch)
    return moved


@torch.no_grad()
def from_peft(options, root, original, batch, settings, seed):
    """Returns the loss of the first step."""
    folder = f"{root}/peft"
    network = add_adapters(load(original), settings, seed)
    network.save_pretrained(folder)
    step, loss = train(options, root, "through", folder, 0)
    check_loss("PEFT's", loss, forward(network, batch), batch)
    check_tensors(load_file(f"{step}/{TENSORS}"), load_file(f"{folder}/{TENSORS}"))
    if "pixels" not in batch:
        expected = continuation("PEFT's", network, enough=5)
        said = generate(options, root, folder, expected["prompt"])
        assert said == expected["tokens"], f"--generate: {said}; PEFT: {expected['tokens']}"
    merged = network.merge_and_unload().state_dict()
    for name, x in load(export(options, folder, f"{root}/peft-merged", "f32")).state_dict().items():
        check_close(name, x, merged[name])
    return loss


def through_peft(options, name, root):
    original, batch = make_of(name, root)
    settings = MODELS[name].adapters
    moved = from_train(options, root, original, batch, settings)
    loss = from_peft(options, root, original, batch, settings, seed_of(name))
    return f"adapters of ./train move logits by {moved:.3f}; PEFT's are the same in ./train; loss {loss:.6f}"
