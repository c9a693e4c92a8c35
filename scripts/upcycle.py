#!/usr/bin/env python3
"""Makes a model with experts of a dense one [sparse upcycling: Komatsuzaki et al. 2022, arXiv 2212.05055].

    python3 scripts/upcycle.py --experts 8 --top-k 2 QWEN3_FOLDER OUTPUT
    ./train --load_path=OUTPUT --model.router_aux_loss=micro_batch ...

The dense model is a Qwen3ForCausalLM, which becomes a Qwen3MoeForCausalLM. Each expert is a copy of the MLP. The routers are drawn
at random, by --seed, with the model's initializer_range. The weights of a token's experts add up to 1, so the model computes what
the dense one computes. All other tensors are copied byte for byte. Needs numpy.
"""
import argparse, os, re, sys

try:
    import numpy as np
except ImportError as problem:
    sys.exit(f"error: {problem}: pip install numpy")

import errors
from errors import Bad
from model_folder import Tensor, copy_others, read_files, read_json, write_json, write_weights

MLP = re.compile(r"(model\.layers\.\d+\.mlp\.)((gate|up|down)_proj\.weight)")


def router(experts, width, std, random, dtype):
    """(experts, width), in F32 or BF16."""
    values = random.normal(0, std, (experts, width)).astype("<f4")
    data = values.tobytes() if dtype == "F32" else (values.view("<u4") >> 16).astype("<u2").tobytes()     # BF16: the upper half
    return Tensor("F32" if dtype == "F32" else "BF16", [experts, width], tail=data)


def with_experts(tensors, args, config, random):
    """The tensors of a file, with experts in place of an MLP."""
    made = {}
    for name, one in tensors.items():
        match = MLP.fullmatch(name)
        if not match:
            made[name] = one
            continue
        prefix, matrix, kind = match.groups()
        made.update((f"{prefix}experts.{e}.{matrix}", one) for e in range(args.experts))
        if kind == "gate":
            made[prefix + "gate.weight"] = router(args.experts, config["hidden_size"], config.get("initializer_range", 0.02), random,
                                                  one.dtype)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", help="folder of the dense model")
    parser.add_argument("output", help="folder to make")
    parser.add_argument("--experts", type=int, default=8, help="experts of each block; default: 8")
    parser.add_argument("--top-k", type=int, default=2, help="experts of a token; default: 2")
    parser.add_argument("--seed", type=int, default=0, help="seed of the routers; default: 0")
    args = parser.parse_args()
    config = read_json(args.dense, "config.json")
    if config.get("model_type") != "qwen3" or config.get("use_sliding_window"):
        raise Bad(f"{args.dense}: its model_type is {config.get('model_type')}, use_sliding_window is "
                  f"{config.get('use_sliding_window', False)}; expected qwen3 without sliding windows: of the classes with experts, "
                  "Qwen3MoeForCausalLM has the attention of Qwen3")
    if not 1 <= args.top_k <= args.experts:
        raise Bad(f"--top-k={args.top_k}: expected a number from 1 to --experts={args.experts}")
    if os.path.exists(args.output):
        raise Bad(f"{args.output} exists already; expected a new name")
    random = np.random.default_rng(args.seed)
    files = [with_experts(tensors, args, config, random) for tensors in read_files(args.dense)]
    os.makedirs(args.output)
    for key in ("layer_types", "max_window_layers"):
        config.pop(key, None)
    write_json(args.output, "config.json", {
        **config, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": args.experts,
        "num_experts_per_tok": args.top_k, "moe_intermediate_size": config["intermediate_size"], "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": []})
    write_weights(args.output, files)
    copy_others(args.dense, args.output)
    print(f"{args.output}: {args.experts} experts in each block, {args.top_k} of them for each token")


if __name__ == "__main__":
    try:
        errors.run(main, "a folder of a dense model, and room for OUTPUT")
    except Bad as problem:
        sys.exit(f"error: {problem}")
