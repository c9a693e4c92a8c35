"""Reference results of 8-bit AdamW: bitsandbytes on a CPU, and its CUDA kernel repeated step by step in Python.

codes.safetensors: the codes of groups of 256 numbers
    map.signed, map.unsigned (256)    bitsandbytes.functional.create_dynamic_map
    x (groups, 256)                   the first `plain` of them are random, the others difficult cases
    signed, unsigned (groups, 256)    codes of x and of |x| by the search of the CUDA kernel
    bnb.signed, bnb.unsigned (plain, 256), bnb.absmax (plain)    by bitsandbytes.functional.quantize_blockwise on the CPU
steps.safetensors: steps of AdamW in float32, as kOptimizerStatic8bit2StateBlockwise computes them, from zero moments
    settings (7)                      lr, beta1, beta2, eps, weight decay, grad_scale, steps
    grad (steps, n) bfloat16, w (1 + steps, n), and after each step codes m, v (steps, n), m.absmax, v.absmax (steps, n/256)
bnb.safetensors: the same steps by optimizer_update_8bit_blockwise_pytorch, bitsandbytes' own step in torch

bitsandbytes 0.49 has its 8-bit steps only on GPUs; this script uses the functions that run on a CPU. The functions differ from the
kernel if two values are equally near, and turn small negative numbers into 0. quantize_blockwise overwrites the 0 of
the unsigned map with -1, and the torch step decays weights before the update. tests/test_adamw8bit.c and check_codes below
allow for these differences.
"""
import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"     # bitsandbytes would compile its step, which takes time and is not needed

import bitsandbytes.functional as F
import numpy as np
import torch
from bitsandbytes.backends.triton.kernels_optim import optimizer_update_8bit_blockwise_pytorch
from safetensors.torch import save_file

GROUP = 256
f32 = np.float32


def search(code, x):
    """The kernel's quantize_2D: seven steps down a tree of 255 nodes, then the middle to the neighbour not yet ruled out.

    Between the ends no node occurs twice, so `lower` and `upper` are the values next to `pivot`."""
    pivot = np.full(x.shape, 127)
    low, high = np.zeros_like(pivot), np.full_like(pivot, 255)
    for step in (64, 32, 16, 8, 4, 2, 1):
        up = x > code[pivot]
        low, high = np.where(up, pivot, low), np.where(up, high, pivot)
        pivot = pivot + np.where(up, step, -step)
    up = x > code[pivot]
    past_high = x > (code[high] + code[pivot]) * f32(0.5)
    short_of_low = x < (code[low] + code[pivot]) * f32(0.5)
    return np.where(up, np.where(past_high, high, pivot), np.where(short_of_low, low, pivot))


def quantize(code, m, signed):
    """Codes and maxima of groups; the sign of m is kept. Where the kernel has a fast quotient, x is m (1/absmax)."""
    absmax = np.abs(m).max(axis=1).astype(f32)
    with np.errstate(divide="ignore"):
        inverse = np.where(absmax < f32(2.0**-126), f32(0), f32(1) / absmax)
    c = search(code, m * inverse[:, None])
    if signed:
        lost = np.signbit(code[c]) != np.signbit(m)
        c = np.where(lost, np.where(m > 0, c + 1, c - 1), c)
    return c.astype(np.uint8), absmax


def difficult_groups(signed, unsigned, rng):
    """Groups with all midpoints between values, and one float to either side of each; all values; small numbers next to a large
    one."""
    groups = []
    for code in (signed, unsigned):
        middles = np.append((code[1:] + code[:-1]) * f32(0.5), f32(1))
        groups += [code, middles, np.nextafter(middles, f32(-2)), np.nextafter(middles, f32(2))]
        groups[-1][-1] = groups[-2][-1] = 1
        groups += [-g for g in groups[-4:]]
    small = np.exp(rng.uniform(np.log(1e-9), np.log(1e-5), GROUP)).astype(f32)
    for sign in (1, -1):
        small[:2] = 0.0, -0.0
        small[-1] = 1
        groups.append(sign * small)
    groups.append(small * np.where(rng.random(GROUP) < 0.5, f32(-1), f32(1)) * f32(2.0**-120))       # with denormal numbers
    return groups


def plain_groups(rng):
    groups = [rng.standard_normal(GROUP) * scale for scale in (1, 1e-3, 1e-12, 1e20)]
    groups += [rng.standard_normal(GROUP) * np.exp(4 * rng.standard_normal(GROUP)) for _ in range(4)]
    groups += [rng.uniform(-1, 1, GROUP)]
    outlier = rng.standard_normal(GROUP) * 1e-4
    outlier[77] = -3
    return [g.astype(f32) for g in groups + [outlier]]


def bnb_codes(x, code):
    """NOTE: works on copies, because bitsandbytes changes the map."""
    codes, state = F.quantize_blockwise(torch.from_numpy(x.copy()), code=torch.from_numpy(code.copy()), blocksize=GROUP)
    return codes, state.absmax


def check_codes(codes, x, code):
    """Asserts that `codes`, by the kernel's search, equal bitsandbytes' on the CPU, up to the sign rule and the lost 0."""
    expected = bnb_codes(x, code)[0].numpy()
    if code[0] < 0:
        expected = np.where(np.signbit(x) & (expected == 127), 126, expected)
    else:
        expected = np.where((codes == 0) & (expected == 1), 0, expected)
    assert np.array_equal(codes, expected)


def make_codes(path, signed, unsigned):
    rng = np.random.default_rng(1)
    plain = plain_groups(rng)
    x = np.stack(plain + difficult_groups(signed, unsigned, rng))
    first = x[:len(plain)]
    bnb_signed, absmax = bnb_codes(first, signed)
    check_codes(quantize(signed, first, True)[0], first, signed)
    check_codes(quantize(unsigned, np.abs(first), False)[0], np.abs(first), unsigned)
    save_file({"map.signed": torch.from_numpy(signed), "map.unsigned": torch.from_numpy(unsigned), "x": torch.from_numpy(x),
               "signed": torch.from_numpy(quantize(signed, x, True)[0]),
               "unsigned": torch.from_numpy(quantize(unsigned, np.abs(x), False)[0]),
               "bnb.signed": bnb_signed, "bnb.unsigned": bnb_codes(np.abs(first), unsigned)[0], "bnb.absmax": absmax},
              path)


def gradients(rng, steps, n):
    """Gradients that are bfloat16 numbers, so that they are exact in both formats: sizes differ from group to group; zeros, -0."""
    g = rng.standard_normal((steps, n)) * np.exp(2 * rng.standard_normal((steps, n)))
    g *= 10.0 ** -np.arange(1, 1 + n // GROUP).repeat(GROUP)
    g[:, 5:60:7] = 0.0
    g[:, 6:60:7] = -0.0
    return torch.from_numpy(g).to(torch.bfloat16)


class Steps:
    """kOptimizerStatic8bit2StateBlockwise operation by operation, each rounded to float32."""

    def __init__(self, signed, unsigned, w, lr, beta1, beta2, eps, decay, scale):
        self.map = signed, unsigned
        self.lr, self.beta, self.eps, self.decay, self.scale = f32(lr), (f32(beta1), f32(beta2)), f32(eps), f32(decay), f32(scale)
        self.w = w
        n = w.size
        self.codes = [np.zeros((n // GROUP, GROUP), np.uint8) for _ in range(2)]
        self.absmax = [np.zeros(n // GROUP, f32) for _ in range(2)]
        self.count = 0

    def step(self, grad):
        self.count += 1
        one, (beta1, beta2) = f32(1), self.beta
        correction1 = f32(1 - float(beta1) ** self.count)
        correction2 = np.sqrt(f32(1 - float(beta2) ** self.count))
        step_size = -self.lr * correction2 / correction1
        grad = grad.reshape(-1, GROUP)
        g = grad * self.scale
        m, v = (self.map[i][self.codes[i]] * self.absmax[i][:, None] for i in range(2))
        v = v * beta2 + (one - beta2) * g * g
        m = m * beta1 + (one - beta1) * g
        finite = np.isfinite(grad)
        m, v = np.where(finite, m, f32(0)), np.where(finite, v, f32(0))
        w = self.w.reshape(-1, GROUP)
        new = w + step_size * (m / (np.sqrt(v) + correction2 * self.eps))
        if self.decay > 0:
            new = new * (one - self.lr * self.decay)
        self.w = np.where(finite, new, w).reshape(-1)
        for i, (x, signed) in enumerate(((m, True), (v, False))):
            self.codes[i], self.absmax[i] = quantize(self.map[i], x, signed)
            check_codes(self.codes[i], x.astype(f32), self.map[i])


def save_steps(path, settings, w, grad, state):
    tensors = {"settings": torch.tensor(settings, dtype=torch.float32), "grad": grad.contiguous(), "w": torch.stack(w)}
    for i, name in enumerate(("m", "v", "m.absmax", "v.absmax")):
        tensors[name] = torch.stack([s[i].reshape(-1) for s in state])
    save_file(tensors, path)


def make_steps(path, signed, unsigned):
    n, steps = 4 * GROUP, 4
    lr, beta1, beta2, eps, decay, scale = 1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5
    rng = np.random.default_rng(2)
    grad = gradients(rng, steps, n)
    grad[2, 100], grad[2, 300], grad[3, 301] = float("inf"), float("-inf"), float("nan")
    w = torch.from_numpy(rng.uniform(-1, 1, n).astype(f32)).to(torch.bfloat16).float()
    run = Steps(signed, unsigned, w.numpy(), lr, beta1, beta2, eps, decay, scale)
    weights, state = [w], []
    for g in grad:
        run.step(g.float().numpy())
        weights.append(torch.from_numpy(run.w.copy()))
        state.append([torch.from_numpy(np.array(a)) for a in (*run.codes, *run.absmax)])
    save_steps(path, [lr, beta1, beta2, eps, decay, scale, steps], weights, grad, state)


def make_bnb(path, signed, unsigned):
    """The betas are exact in float32, so that 1 - beta is the same in double."""
    n, steps = 4 * GROUP, 3
    lr, beta1, beta2, eps = 1e-2, 0.875, 0.96875, 1e-8
    rng = np.random.default_rng(3)
    grad = gradients(rng, steps, n)
    p = torch.from_numpy(rng.uniform(-1, 1, n).astype(f32))
    moments = [torch.zeros(n, dtype=torch.uint8) for _ in range(2)] + [torch.zeros(n // GROUP) for _ in range(2)]
    maps = torch.from_numpy(signed), torch.from_numpy(unsigned)
    weights, state = [p.clone()], []
    for i, g in enumerate(grad):
        optimizer_update_8bit_blockwise_pytorch(p, g.float(), moments[0], moments[1], beta1, beta2, 0.0, 0.0, eps, i + 1, lr,
                                                *maps, moments[2], moments[3], 0.0, 1.0, False, optimizer_name="adam")
        weights.append(p.clone())
        state.append([t.clone() for t in moments])
    save_steps(path, [lr, beta1, beta2, eps, 0, 1, steps], weights, grad, state)


def write(root):
    folder = f"{root}/adamw8bit"
    os.makedirs(folder, exist_ok=True)
    np.seterr(all="ignore")
    signed, unsigned = (F.create_dynamic_map(signed=s).numpy() for s in (True, False))
    make_codes(os.path.join(folder, "codes.safetensors"), signed, unsigned)
    make_steps(os.path.join(folder, "steps.safetensors"), signed, unsigned)
    make_bnb(os.path.join(folder, "bnb.safetensors"), signed, unsigned)
