#!/usr/bin/env python3
"""Turns a checkpoint in OLMo's own format into a Hugging Face folder, which ./train --load_path and transformers read.

    python3 scripts/convert_olmo.py step1000-unsharded OLMo-1B --tokenizer tokenizer.json

The input folder has config.yaml and model.safetensors or model.pt, from an unsharded checkpoint or as published. The output folder
gets a config.json for OlmoForCausalLM or Olmo2ForCausalLM, and the weights, unchanged in their type and with all rows of the
embedding. model.pt needs the package torch; model.safetensors needs only Python.
"""
import argparse, base64, io, json, mmap, os, pickle, shutil, struct, sys

from progress import Progress

FILE_BYTES = 5 * 10**9          # size of a file of weights, as in save_pretrained
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def fail(place, message):
    sys.exit(f"error: {place}: {message}")


# ---- reading ----------------------------------------------------------------------------------------------------------------

def scalar(text):
    """Reads a YAML scalar in OLMo's spelling."""
    text = text.split(" #")[0].strip()
    words = {"": None, "~": None, "null": None, "true": True, "false": False}
    if text in words:
        return words[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text.strip("'\"")


def read_section(path, section):
    """Reads a section of config.yaml whose values are scalars; the rest of the file is not read."""
    values, inside = {}, False
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            if not line.startswith(" "):
                inside = line.split(":")[0] == section
            elif inside:
                key, colon, value = line.strip().partition(":")
                if not colon or line.startswith("   ") or value.strip()[:1] in ("[", "{", "|", ">", "&", "*"):
                    fail(f"{path}:{number}", f"expected `key: value` in the section {section}; found {line.strip()!r}")
                values[key] = scalar(value)
    if not values:
        fail(path, f"it has no section {section}; INPUT must be a checkpoint of OLMo (checkpoints of OLMo-core are converted by "
             "OLMo-core's src/examples/huggingface/convert_checkpoint_to_hf.py)")
    return values


class Names(pickle.Unpickler):
    """Reads OLMo's names in safetensors, which are pickled tuples; nothing else is unpickled."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name}")


def name_of(path, key):
    if key.startswith("transformer."):
        return key
    try:
        keys, pickled = Names(io.BytesIO(base64.urlsafe_b64decode(key))).load()
        return None if pickled else ".".join(keys)
    except (ValueError, TypeError, EOFError, IndexError, pickle.UnpicklingError) as error:
        fail(path, f"tensor {key!r} has no name of OLMo's ({error}); expected transformer.blocks.0.att_proj.weight and the like")


def read_safetensors(path):
    """{name: (dtype, shape, bytes)}"""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else b""
    header = struct.unpack("<Q", data[:8])[0] if size >= 8 else size
    if 8 + header > size:
        fail(path, f"it has {size} bytes, too few for safetensors; copy it again")
    try:
        entries = json.loads(bytes(data[8:8 + header]))
        entries.pop("__metadata__", None)
        found = {name_of(path, key): (e["dtype"], tuple(e["shape"]), data[8 + header:][slice(*e["data_offsets"])])
                 for key, e in entries.items()}
        found.pop(None, None)           # the key of pickled values; a model has none
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fail(path, f"it is not a safetensors file: {error!r}")
    return found


def read_pt(path):
    try:
        import torch
    except ImportError:
        fail(path, "this needs the package torch: pip install torch --index-url https://download.pytorch.org/whl/cpu")
    types = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        fail(path, f"PyTorch cannot read it ({str(error).splitlines()[0]}); copy it again")
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        fail(path, "it does not hold tensors by name; expected model.pt of an unsharded checkpoint of OLMo")
    return {name: (types.get(t.dtype, str(t.dtype)), tuple(t.shape), memoryview(t.contiguous().view(torch.uint8).numpy()).cast("B"))
            for name, t in found.items()}


def read_weights(folder):
    for name, read in (("model.safetensors", read_safetensors), ("model.pt", read_pt)):
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path, read(path)
    fail(folder, "neither model.safetensors nor model.pt; a sharded checkpoint of OLMo is unsharded by its scripts/unshard.py")


# ---- the model --------------------------------------------------------------------------------------------------------------

def check_supported(path, m, second):
    """second: whether the model is an OLMo-2. A missing key has OLMo's default."""
    affine = m.get("layer_norm_with_affine", True)
    demands = [
        ("activation_type", "swiglu", ("swiglu",)), ("block_type", "sequential", ("sequential",)),
        ("include_bias", True, (False,)), ("bias_for_layer_norm", m.get("include_bias", True), (False, None)),
        ("rope", False, (True,)), ("alibi", False, (False,)), ("embedding_layer_norm", False, (False,)),
        ("scale_logits", False, (False,)), ("attention_layer_norm", False, (second,)),
        ("layer_norm_with_affine", affine, (second,)),
        ("layer_norm_type", "default", ("rms",) if second else ("default", "low_precision")),
        ("attention_layer_norm_with_affine", True, (True,) if second else (True, False)),
        ("layer_norm_eps", 1e-5, (m.get("layer_norm_eps", 1e-5) if second else 1e-5,)),
    ]
    for key, default, wanted in demands:
        if m.get(key, default) not in wanted:
            fail(path, f"model.{key} is {m.get(key, default)}; no class of transformers computes that with norm_after "
                 f"{str(second).lower()}, only {' or '.join(map(str, wanted))}")


def describe(path, m, embeddings, dtype):
    """The content of config.json; `embeddings`: number of rows of the embedding, and so of the logits."""
    second = bool(m.get("norm_after", False))
    check_supported(path, m, second)
    missing = [key for key in ("d_model", "n_heads", "n_layers", "max_sequence_length", "vocab_size") if not m.get(key)]
    if missing:
        fail(path, f"the section model lacks {', '.join(missing)}")
    heads = m["n_heads"]
    eos = m.get("eos_token_id")
    if eos == 0 and m["vocab_size"] == 50280:
        print("eos_token_id: 50279, not 0 as config.yaml says, because 50279 ends the documents of Dolma")
        eos = 50279
    config = {
        "architectures": ["Olmo2ForCausalLM" if second else "OlmoForCausalLM"], "model_type": "olmo2" if second else "olmo",
        "torch_dtype": DTYPES[dtype], "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "hidden_size": m["d_model"],
        # OLMo's value: both halves
        "intermediate_size": int(m.get("mlp_hidden_size") or m.get("mlp_ratio", 4) * m["d_model"]) // 2,
        "num_hidden_layers": m["n_layers"], "num_attention_heads": heads,
        "num_key_value_heads": m.get("n_kv_heads") or (1 if m.get("multi_query_attention") else heads),
        "max_position_embeddings": m["max_sequence_length"], "vocab_size": embeddings, "rope_theta": m.get("rope_theta", 10000),
        "tie_word_embeddings": m.get("weight_tying", True), "initializer_range": m.get("init_std", 0.02), "use_cache": True,
        "bos_token_id": None, "eos_token_id": eos, "pad_token_id": m.get("pad_token_id"),
    }
    clip = m.get("clip_qkv")
    if second and clip:
        fail(path, f"model.clip_qkv is {clip}, which an Olmo2ForCausalLM does not have")
    return config | ({"rms_norm_eps": m.get("layer_norm_eps", 1e-5)} if second else {"clip_qkv": clip})


def plan(config):
    """(OLMo's name, shape in OLMo, [(new name, rows)]): fused tensors are split into rows. NOTE: SwiGLU's halves are [up; gate]."""
    C, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    D = C // config["num_attention_heads"]
    K = D * config["num_key_value_heads"]
    second = config["model_type"] == "olmo2"
    yield "transformer.wte.weight", (V, C), [("model.embed_tokens.weight", V)]
    for i in range(config["num_hidden_layers"]):
        there, here = f"transformer.blocks.{i}.", f"model.layers.{i}."
        qkv = [(here + f"self_attn.{x}_proj.weight", n) for x, n in zip("qkv", (C, K, K))]
        yield there + "att_proj.weight", (C + 2 * K, C), qkv
        yield there + "attn_out.weight", (C, C), [(here + "self_attn.o_proj.weight", C)]
        yield there + "ff_proj.weight", (2 * F, C), [(here + "mlp.up_proj.weight", F), (here + "mlp.gate_proj.weight", F)]
        yield there + "ff_out.weight", (C, F), [(here + "mlp.down_proj.weight", C)]
        for name, other, n in (("q_norm", "self_attn.q_norm", C), ("k_norm", "self_attn.k_norm", K),
                               ("attn_norm", "post_attention_layernorm", C), ("ff_norm", "post_feedforward_layernorm", C)):
            if second:
                yield f"{there}{name}.weight", (n,), [(f"{here}{other}.weight", n)]
    if second:
        yield "transformer.ln_f.weight", (C,), [("model.norm.weight", C)]
    if not config["tie_word_embeddings"]:
        yield "transformer.ff_out.weight", (V, C), [("lm_head.weight", V)]


def cut(path, weights, config):
    """[(new name, dtype, shape, bytes)]; dies if tensors are missing, left over or of another shape."""
    weights, result = dict(weights), []
    for there, shape, pieces in plan(config):
        if there not in weights:
            fail(path, f"there is no tensor {there}; config.yaml must describe the model in this file")
        dtype, found, data = weights.pop(there)
        if found != shape or dtype not in DTYPES:
            fail(path, f"tensor {there} is {dtype} {found}; expected {' or '.join(DTYPES)} {shape}, which follow from config.yaml")
        at, row = 0, len(data) // shape[0]
        for here, rows in pieces:
            result.append((here, dtype, (rows, *shape[1:]), data[at * row:(at + rows) * row]))
            at += rows
    if weights:
        fail(path, f"tensor {min(weights, key=str)} has no place in the model that config.yaml describes")
    return result


# ---- writing ----------------------------------------------------------------------------------------------------------------

def write_file(path, tensors, show):
    """Calls show(name, bytes) after each tensor."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, _, _, data in tensors:
            file.write(data)
            show(name, len(data))


def write_weights(folder, tensors, show):
    files, filled = [[]], 0
    for tensor in tensors:
        if files[-1] and filled + len(tensor[3]) > FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(tensor)
        filled += len(tensor[3])
    if len(files) == 1:
        write_file(os.path.join(folder, "model.safetensors"), tensors, show)
        return
    index = {"metadata": {"total_size": sum(len(t[3]) for t in tensors)}, "weight_map": {}}
    for i, part in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        write_file(os.path.join(folder, name), part, show)
        index["weight_map"] |= {tensor[0]: name for tensor in part}
    write_json(os.path.join(folder, "model.safetensors.index.json"), index)


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")


def copy_tokenizer(source, output):
    """Copies the tokenizer files of a folder, or one file as tokenizer.json."""
    if os.path.isfile(source):
        shutil.copy(source, os.path.join(output, "tokenizer.json"))
        return
    found = [name for name in TOKENIZER if os.path.isfile(os.path.join(source, name))]
    for name in found:
        shutil.copy(os.path.join(source, name), os.path.join(output, name))
    if "tokenizer.json" not in found:
        print(f"{output} has no tokenizer.json: training needs none, other tools do (--tokenizer)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", help="folder with config.yaml and model.safetensors or model.pt")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--tokenizer", help="tokenizer.json, or a folder with it; default: the tokenizer files in INPUT")
    args = parser.parse_args()
    if args.tokenizer and not os.path.exists(args.tokenizer):
        fail(args.tokenizer, "there is no such file or folder")
    described = os.path.join(args.input, "config.yaml")
    if not os.path.isfile(described):
        fail(described, "there is no such file; INPUT must be a folder with OLMo's config.yaml next to the weights")
    if os.path.exists(args.output) and (not os.path.isdir(args.output) or os.listdir(args.output)):
        fail(args.output, "it exists already; give a folder that is empty or new")
    path, weights = read_weights(args.input)
    wte = weights.get("transformer.wte.weight")
    if not wte or len(wte[1]) != 2 or wte[0] not in DTYPES:
        fail(path, "there is no embedding transformer.wte.weight; expected a model of OLMo in F32, BF16 or F16")
    config = describe(described, read_section(described, "model"), wte[1][0], wte[0])
    tensors = cut(path, weights, config)
    try:
        os.makedirs(args.output, exist_ok=True)
        with Progress(sum(len(t[3]) for t in tensors)) as progress:
            write_weights(args.output, tensors, progress.add)
        copy_tokenizer(args.tokenizer or args.input, args.output)
        # written last: without config.json the folder is no model
        write_json(os.path.join(args.output, "config.json"), config)
    except OSError as error:
        fail(args.output, f"cannot be written: {error}; remove the incomplete folder and try again")
    print(f"{args.output}: {config['architectures'][0]}, {sum(len(t[3]) for t in tensors) / 2**30:.2f} GiB; "
          f"./train --load_path={args.output} --data.paths='[shards/*.npy]'")


if __name__ == "__main__":
    main()
