"""Reference results of NF4: bitsandbytes on a CPU, and its CUDA kernels repeated in numpy.

codes.safetensors: map (16); and for each tensor X of TENSORS
    X (rows, cols)                      float32
    X.codes, .absmax, .nested, .offset  packed codes; codes of absmaxes; their F32 scales; one F32
    X.f32, X.bf16 (rows, cols)          values by bitsandbytes.functional.dequantize_4bit
saved.safetensors: a bfloat16 tensor NAME as bitsandbytes saves it
    NAME, NAME.absmax, ...              packed codes, and QuantState.as_dict(packed=True)
    source, bf16 (rows, cols)           the original tensor, and its values after quantization
plain.safetensors: that tensor without double quantization, as a CPU makes it, with its bf16

The codes are those of bitsandbytes' CUDA kernels: x (1/absmax) compared with the midpoints between values, rounded to F32. On a CPU
bitsandbytes searches the nearest value. Its result differs at a midpoint that F32 cannot represent; and the lowest of the 256
values is -1 there. check_codes allows only for these two differences. bitsandbytes sums the absmaxes in F32 in an order that is not
specified. So here all absmaxes of a tensor are multiples of a number that is so large that every sum is exact.
"""
import os

import bitsandbytes.functional as F
import numpy as np
import torch
from safetensors.torch import save_file

from golden_adamw8bit import search         # used for dQuantize, too

BLOCK, NESTED = 64, 256
NAME = "model.layers.0.mlp.up_proj.weight"
f32 = np.float32


def in_blocks(x, size):
    """Rows of `size` elements; the last row is filled up with 0."""
    return np.pad(x, (0, -x.size % size)).reshape(-1, size)


def quotients(x, size):
    """x (1/max) of each block, and the maxima. If a block is all 0, the quotients are NaN."""
    blocks = in_blocks(x, size)
    top = np.abs(blocks).max(axis=1)
    return (blocks * (f32(1) / top)[:, None]).reshape(-1)[:x.size], top


def nearest16(code, x):
    """dQuantizeNF4: the number of midpoints below x."""
    return (x[:, None] > (code[1:] + code[:-1]) * f32(0.5)).sum(axis=1).astype(np.uint8)


def check_codes(codes, nested_codes, offset, x, packed, state):
    """Asserts that codes equal bitsandbytes' on a CPU, except for midpoints that were rounded up, and effects of -1 for the
    lowest value."""
    quotient, top = quotients(x, BLOCK)
    code = state.code.numpy()
    upper = np.minimum(codes + 1, 15)
    middle = (code[codes].astype(np.float64) + code[upper]) / 2
    rounded_up = (quotient == f32(middle)) & (quotient > middle)
    assert rounded_up.any() == any(np.array_equal(b, ties(code)) for b in in_blocks(x, BLOCK))
    found = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)
    assert np.array_equal(found, np.where(rounded_up, upper, codes))
    assert offset == state.offset.numpy() and offset == f32(top.astype(np.float64).sum() / top.size)
    rest, nested = quotients(top - offset, NESTED)
    assert np.array_equal(nested, state.state2.absmax.numpy())
    other = nested_codes != state.absmax.numpy()
    assert (rest[other] < -0.985).all() and (np.maximum(nested_codes, state.absmax.numpy())[other] == 1).all()


def quantize(w):
    """codes, state: as bitsandbytes computes them on a GPU."""
    packed, state = F.quantize_4bit(w, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    x = w.float().numpy().reshape(-1)
    quotient, top = quotients(x, BLOCK)
    codes = nearest16(state.code.numpy(), quotient)
    dynamic = F.create_dynamic_map()
    offset = state.offset.numpy()
    nested_codes = search(dynamic.numpy(), quotients(top - offset, NESTED)[0]).astype(np.uint8)
    check_codes(codes, nested_codes, offset, x, packed.numpy().reshape(-1), state)
    packed = torch.from_numpy(codes[::2] << 4 | codes[1::2]).reshape(-1, 1)
    state.absmax, state.state2.code = torch.from_numpy(nested_codes), dynamic
    return packed, state


def values(packed, state, dtype):
    """The values by bitsandbytes: a product of F32 numbers, rounded once."""
    state.dtype = dtype
    y = F.dequantize_4bit(packed, state)
    absmax = state.state2.code.numpy()[state.absmax.numpy()] * state.state2.absmax.numpy().repeat(NESTED)[:state.absmax.numel()]
    absmax = (absmax + state.offset.numpy()).repeat(BLOCK)[:y.numel()]
    codes = np.stack([packed.numpy() >> 4, packed.numpy() & 15], axis=1).reshape(-1)
    expected = torch.from_numpy(state.code.numpy()[codes] * absmax).to(dtype)
    assert torch.equal(y.reshape(-1).view(torch.uint8), expected.view(torch.uint8))
    return y


def plain(w):
    """bitsandbytes' default, with absmaxes in F32. Values are products of F32 numbers, rounded once."""
    packed, state = F.quantize_4bit(w, blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
    y = F.dequantize_4bit(packed, state)
    codes = np.stack([packed.numpy() >> 4, packed.numpy() & 15], axis=1).reshape(-1)
    expected = torch.from_numpy(state.code.numpy()[codes] * state.absmax.numpy().repeat(BLOCK))
    assert torch.equal(y.reshape(-1), expected.to(y.dtype)) and state.absmax.dtype == torch.float32
    return {NAME: packed, "bf16": y} | {f"{NAME}.{key}": t for key, t in state.as_dict(packed=True).items()}


def on_grid(rng, blocks, unit):
    """Blocks whose absmaxes are multiples of `unit`, at most 1023 `unit`."""
    top = rng.integers(100, 1024, blocks) * unit
    x = rng.standard_normal((blocks, BLOCK)) / 4
    x = np.clip(x, -1, 1) * top[:, None]
    x[np.arange(blocks), rng.integers(0, BLOCK, blocks)] = top * rng.choice([-1, 1], blocks)
    return x


def ties(code):
    """Every midpoint between two values, one float to either side of it, every value, and both zeros."""
    middle = (code[1:] + code[:-1]) * f32(0.5)
    x = np.concatenate([middle, np.nextafter(middle, f32(-2)), np.nextafter(middle, f32(2)), code, [f32(0), f32(-0.0)], code[:1]])
    assert x.size == BLOCK
    return x


def hard_blocks(code, rng):
    """Hard cases: zeros, one outlier, ties under several maxima, zeros of both signs, all elements at the maximum, a last block
    that is not full."""
    t = ties(code)
    outlier = rng.standard_normal(BLOCK) * 1e-4
    outlier[17] = -3
    lone = np.full(BLOCK, -0.0)
    lone[40] = 0.25
    return np.concatenate([np.zeros(BLOCK), outlier, t, -t, t / 2, lone, t * f32(0.75), -t * f32(0.6875), np.full(BLOCK, -0.5),
                           np.zeros(BLOCK), on_grid(rng, 5, 2.0**-10).reshape(-1), rng.choice([-1, 1], 24) * 0.125])


def tensors(code, rng):
    last = on_grid(rng, 2, 2.0**-10).reshape(-1)[:104]
    last[64] = last[103] = 0.375
    return {
        "hard": hard_blocks(code, rng).reshape(3, -1),
        "zeros": np.zeros((3, 64)),
        "one": np.full((1, 64), -0.0) + np.eye(64)[9] * 0.3,                    # one block: its absmax is the mean
        "short": last.reshape(4, 26),                                           # a last block that is not full
        "few": np.array([[0.5, -0.25, 0.125, 0.5, 0.0, -0.5]]),
        "tiny": on_grid(rng, 6, 2.0**-149).reshape(6, -1),                      # denormal numbers; 1/max may be infinite
        "small": np.append(on_grid(rng, 5, 2.0**-137).reshape(-1), np.zeros(64)).reshape(6, -1),
        "large": on_grid(rng, 6, 2.0**116).reshape(4, -1),                      # 1/max is denormal or near it
    }


def write(root):
    folder = f"{root}/nf4"
    os.makedirs(folder, exist_ok=True)
    np.seterr(all="ignore")
    rng = np.random.default_rng(1)
    code = F.get_4bit_type("nf4", device="cpu")
    golden = {"map": code}
    for name, x in tensors(code.numpy(), rng).items():
        w = torch.from_numpy(x.astype(f32))
        packed, state = quantize(w)
        golden |= {name: w, f"{name}.codes": packed, f"{name}.absmax": state.absmax, f"{name}.nested": state.state2.absmax,
                   f"{name}.offset": state.offset.reshape(1), f"{name}.f32": values(packed, state, torch.float32),
                   f"{name}.bf16": values(packed, state, torch.bfloat16)}
    save_file(golden, os.path.join(folder, "codes.safetensors"))

    w = torch.from_numpy(on_grid(rng, 258, 2.0**-10).astype(f32)).to(torch.bfloat16).reshape(48, 344)
    packed, state = quantize(w)
    saved = {NAME: packed, "source": w, "bf16": values(packed, state, torch.bfloat16)}
    saved |= {f"{NAME}.{key}": t for key, t in state.as_dict(packed=True).items()}
    save_file(saved, os.path.join(folder, "saved.safetensors"))
    save_file(plain(w), os.path.join(folder, "plain.safetensors"))
