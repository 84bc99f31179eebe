"""Every kernel against its reference and torch's own, in one run: ``python -m benchmarks.kernels``.

Times are of forward and backward together, medians of alternating runs; the machine's load is printed above.
At the end stand the targets, each met or missed by how much.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import timing
from weft.kernels import attention, cross_entropy, dropout, linear
from weft.kernels.mask import Mask

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SCORES = (1 << 18, 1 << 22)  # over batch and heads in the attention grid: small and large batches follow from it
_HEADS = 8


@dataclass
class Targets:
    """What must be reached, and what was."""

    lines: list[str] = field(default_factory=list)
    missed: int = 0

    def at_least(self, what: str, given: float, wanted: float) -> None:
        """Note that ``given`` should be at least ``wanted``."""
        self.missed += given < wanted
        self.lines.append(f"{'met   ' if given >= wanted else 'MISSED'} {what}: {given:.2f} (target ≥ {wanted:g})")


def step(call: Callable[[], Tensor], *inputs: Tensor) -> Callable[[], object]:
    """The call and its backward pass, with a gradient that is made once."""
    grad = torch.randn_like(call())
    return lambda: torch.autograd.grad(call(), inputs, grad)


def torch_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """torch's kernel as a user calls it: is_causal if that is all, a boolean matrix otherwise."""
    if mask is None or mask.lengths is None:
        return F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None)
    return F.scaled_dot_product_attention(q, k, v, mask.dense(q.shape[2], k.shape[2]))


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> Tensor:
    """The formula as people write it: matmul, mask, softmax, matmul in the inputs' dtype."""
    scores: Tensor = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask.dense(q.shape[2], k.shape[2]), float("-inf"))
    return scores.softmax(-1) @ v


def attention_ways(q: Tensor, k: Tensor, v: Tensor, mask: Callable[[], Mask | None]) -> dict[str, Callable[[], object]]:
    """The picked way, torch's and the plain formula, forward and backward; each call makes its mask anew."""
    return {
        "picked": step(lambda: attention.attend(q, k, v, mask()), q, k, v),
        "tiled": step(lambda: attention.tiled(q, k, v, mask(), None, None, 0.0), q, k, v),
        "sdpa": step(lambda: torch_sdpa(q, k, v, mask()), q, k, v),
        "plain": step(lambda: plain(q, k, v, mask()), q, k, v),
    }


def attention_grid(lengths: list[int], targets: Targets, seconds: float) -> dict[str, dict[str, float]]:
    """The picked way against SDPA and the plain formula over batch × length × dtype × mask."""
    rows: dict[str, dict[str, float]] = {}
    for n, batch, (name, dtype) in product(lengths, (0, 1), _DTYPES.items()):
        dim = 32 if n <= 64 else 64
        batch = min(1024, max(1, _SCORES[batch] // (_HEADS * n * n)))
        q, k, v = (torch.randn(batch, _HEADS, n, dim, dtype=dtype, requires_grad=True) for _ in range(3))
        real = torch.randint(n // 2, n + 1, (batch,)).clamp(min=1)
        masks: dict[str, Callable[[], Mask | None]] = {
            "no mask": lambda: None,
            "causal": lambda: Mask(causal=True),
            "padding": lambda real=real: Mask(lengths=real),  # type: ignore[misc]
        }
        for label, mask in masks.items():
            case = f"N {n}, {batch}×{_HEADS} heads of {dim}, {name}, {label}"
            if case in rows:
                continue
            times = timing.alternate(attention_ways(q, k, v, mask), rounds=21, warmup=1, seconds=seconds)
            rows[case] = times
            print(f"  {case}: {min(times['sdpa'], times['plain']) / times['picked']:.2f}", flush=True)
    ratios = {case: min(times["sdpa"], times["plain"]) / times["picked"] for case, times in rows.items()}
    worst = min(ratios, key=ratios.__getitem__)
    targets.at_least(f"picked attention against the best of SDPA and plain, worst case ({worst})", ratios[worst], 0.9)
    for label in ("no mask", "causal"):
        sixteen = {case: times for case, times in rows.items() if case.startswith("N 16,") and case.endswith(label)}
        for heads in {case.split(",")[1] for case in sixteen}:
            cell = [times for case, times in sixteen.items() if heads in case]
            ratio = min(times["sdpa"] for times in cell) / min(times["picked"] for times in cell)
            targets.at_least(f"attention at length 16,{heads}, {label}, against SDPA's better dtype", ratio, 1.5)
    return rows


def tile_settings() -> dict[str, dict[str, float]]:
    """What the constants of the tiles rest on: each changed in turn, beside torch's kernel."""
    changes = {
        "tiled": {},
        "no weights kept": {"_KEPT": 0},
        "tiles of 2^18": {"_TILE": 1 << 18},
        "all queries at once": {"_QUERIES": 1 << 20},
    }
    usual = {name: getattr(attention, name) for name in ("_KEPT", "_TILE", "_QUERIES")}

    def tiled(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, change: dict[str, int]) -> Tensor:
        for name, value in (usual | change).items():
            setattr(attention, name, value)
        return attention.tiled(q, k, v, mask, None, None, 0.0)

    rows = {}
    causal = Mask(causal=True)
    for batch, n, mask in ((8, 256, None), (8, 256, causal), (2, 512, causal), (512, 16, None)):
        q, k, v = (torch.randn(batch, _HEADS, n, 64, requires_grad=True) for _ in range(3))
        ways = {"sdpa": step(partial(torch_sdpa, q, k, v, mask), q, k, v)}
        ways |= {name: step(partial(tiled, q, k, v, mask, change), q, k, v) for name, change in changes.items()}
        rows[f"N {n}, {batch}×{_HEADS} heads of 64, {'causal' if mask else 'no mask'}"] = timing.alternate(ways)
    for name, value in usual.items():
        setattr(attention, name, value)
    return rows


def attention_memory(targets: Targets, length: int = 8192) -> dict[str, dict[str, float]]:
    """Peak memory, forward and backward, at a length where the plain formula's matrices are large."""
    rows: dict[str, dict[str, float]] = {}
    masks = {
        "no mask": None,
        "causal": Mask(causal=True),
        "window 256": Mask(causal=True, window=256),
        "packed documents": Mask(causal=True, segments=torch.arange(length)[None] // 512),
    }
    for label, mask in masks.items():
        q, k, v = (torch.randn(1, 1, length, 64, requires_grad=True) for _ in range(3))
        ways = attention_ways(q, k, v, lambda mask=mask: mask)  # type: ignore[misc]
        peak = {name: float(timing.peak_memory(ways[name])) for name in ("picked", "plain")}
        rows[f"N {length}, {label}"] = peak
        print(f"  N {length}, {label}: picked {peak['picked'] / 2**20:.0f} MiB, plain {peak['plain'] / 2**20:.0f} MiB")
        targets.at_least(f"plain attention's memory over the picked one's, {label}", peak["plain"] / peak["picked"], 10)
    return rows


def dropouts(targets: Targets) -> dict[str, dict[str, float]]:
    """Dropout of 4096×128 with p = 0.3 against torch's."""
    ways: dict[str, Callable[[], object]] = {}
    for name, dtype in _DTYPES.items():
        x = torch.randn(4096, 128, dtype=dtype, requires_grad=True)
        ways[f"weft {name}"] = step(partial(dropout.dropout, x, 0.3), x)
        ways[f"torch {name}"] = step(partial(F.dropout, x, 0.3), x)
    times = timing.alternate(ways, rounds=41)
    best = min(times["torch fp32"], times["torch bf16"])
    for name in _DTYPES:
        targets.at_least(f"dropout in {name} against torch's faster dtype", best / times[f"weft {name}"], 10)
    return {"dropout 4096×128": times}


def cross_entropies(targets: Targets) -> dict[str, dict[str, float]]:
    """Output layer and smoothed cross entropy, 4096×128 over 10,000 words, against torch's eager ones."""
    hidden, weight = torch.randn(4096, 128, requires_grad=True), (torch.randn(10_000, 128) / 10).requires_grad_()
    wanted = torch.randint(0, 10_000, (4096,))

    def weft(dtype: torch.dtype) -> Callable[[], object]:
        def call() -> Tensor:
            return cross_entropy.linear_cross_entropy(hidden.to(dtype), weight, wanted, smoothing=0.1).total

        return step(call, hidden, weight)

    def eager(dtype: torch.dtype) -> Callable[[], object]:
        def call() -> Tensor:
            logits = F.linear(hidden.to(dtype), weight.to(dtype)).float()
            return F.cross_entropy(logits, wanted, label_smoothing=0.1, reduction="sum")

        return step(call, hidden, weight)

    def products() -> object:
        with torch.no_grad():
            logits = torch.mm(hidden, weight.t())
            return torch.mm(logits, weight), torch.mm(logits.t(), hidden)

    ways: dict[str, Callable[[], object]] = {"the three fp32 products alone": products}
    for name, dtype in _DTYPES.items():
        ways[f"weft {name}"] = weft(dtype)
        ways[f"torch {name}"] = eager(dtype)
    times = timing.alternate(ways, rounds=9, warmup=1, seconds=90)
    best = min(times["torch fp32"], times["torch bf16"]) / min(times["weft fp32"], times["weft bf16"])
    targets.at_least("output layer + cross entropy against torch's faster dtype", best, 3)
    return {"output layer + cross entropy 4096×128→10,000": times}


def rdrops() -> dict[str, dict[str, float]]:
    """R-Drop's loss, 2×1024 rows over 10,000 words, against the plain form."""
    first, second = (torch.randn(1024, 128, requires_grad=True) for _ in range(2))
    weight = (torch.randn(10_000, 128) / 10).requires_grad_()
    inputs, targets = (first, second, weight), torch.randint(10_000, (1024,))
    ways = {
        "weft fp32": step(lambda: cross_entropy.linear_rdrop(*inputs, targets, smoothing=0.1).total, *inputs),
        "torch fp32": step(lambda: cross_entropy.rdrop_reference(*inputs, targets, smoothing=0.1).total, *inputs),
    }
    return {"R-Drop 2×1024×128→10,000": timing.alternate(ways, rounds=9)}


def linears() -> dict[str, dict[str, float]]:
    """A linear layer on 4096 rows in fp32, and in bf16 as weft does it and as torch's autocast does."""
    rows = {}
    for din, dout in ((128, 256), (512, 2048)):
        x = torch.randn(4096, din, requires_grad=True)
        weight, bias = torch.randn(dout, din, requires_grad=True), torch.randn(dout, requires_grad=True)
        narrow = x.detach().bfloat16().requires_grad_()

        def autocast(narrow: Tensor = narrow, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return F.linear(narrow, weight, bias)

        ways = {
            "torch fp32": step(partial(F.linear, x, weight, bias), x, weight, bias),
            "torch bf16 autocast": step(autocast, narrow, weight, bias),
            "weft bf16": step(partial(linear.linear, narrow, weight, bias), narrow, weight, bias),
        }
        rows[f"linear 4096×{din}→{dout}"] = timing.alternate(ways, rounds=15, seconds=20)
    return rows


def main() -> None:
    """Measure, print, and say which targets are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--seconds", type=float, default=4.0, help="at most so long for each case of the grid")
    parser.add_argument("--only", choices=["attention", "tiles", "memory", "dropout", "cross_entropy", "linear"])
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    arguments = parser.parse_args()
    timing.steady_memory()
    print(timing.header(), flush=True)
    torch.manual_seed(0)
    targets = Targets()
    parts: dict[str, Callable[[], dict[str, dict[str, float]]]] = {
        "dropout": lambda: dropouts(targets),
        "linear": linears,
        "cross_entropy": lambda: cross_entropies(targets) | rdrops(),
        "memory": lambda: attention_memory(targets),
        "tiles": tile_settings,
        "attention": lambda: attention_grid(arguments.lengths, targets, arguments.seconds),
    }
    results: dict[str, dict[str, float]] = {}
    for name, part in parts.items():
        if arguments.only in (None, name):
            found = part()
            results |= found
            if name != "memory":
                print(
                    timing.table(found, against="sdpa" if name in ("attention", "tiles") else "torch fp32"), flush=True
                )
    print("\n".join(targets.lines))
    if arguments.json:
        timing.save(arguments.json, results)
    if arguments.strict and targets.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
