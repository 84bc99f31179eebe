"""What an update needs at least: its products, its passes over memory, and what this machine does at best.

work = products(case, targets)
speeds = Speeds.measured(rounds=5)
seconds = speeds.floor(case, targets, parameters, rounds=5)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.peers import Case
from weft.kernels import machine
from weft.training import loop

SIDE = 2048  # of the square matrices whose product gives the peak

Product = tuple[int, int, int, int]  # so many products, in one call, of [rows, depth] by [depth, width]


def products(case: Case, targets: int) -> Counter[Product]:
    """How often an update does which matrix products, if ``targets`` of the batch's target tokens are no padding."""
    found: Counter[Product] = Counter()

    def linear(rows: int, depth: int, width: int, times: int) -> None:
        found[1, rows, depth, width] += times
        found[1, rows, width, depth] += times  # gradient of the input
        found[1, width, rows, depth] += times  # gradient of the weights

    tokens, layers = case.rows * case.length, case.encoder_layers + case.decoder_layers
    linear(tokens, case.dim, case.dim, 4 * _attentions(case))
    linear(tokens, case.dim, case.ffn_dim, layers)
    linear(tokens, case.ffn_dim, case.dim, layers)
    linear(targets, case.dim, case.vocab_size, 1)
    heads, head_dim = case.rows * case.num_heads, case.dim // case.num_heads
    found[heads, case.length, head_dim, case.length] += 2 * _attentions(case)  # scores; gradient of the weights
    found[heads, case.length, case.length, head_dim] += 4 * _attentions(case)  # mix; gradients of q, k and v
    return found


def operations(work: Counter[Product]) -> int:
    """Multiplications and additions in all of these products."""
    return sum(2 * count * rows * depth * width * times for (count, rows, depth, width), times in work.items())


def passes(case: Case, targets: int) -> dict[str, int]:
    """How many elements the element-wise passes of a forward pass work on, all layers together."""
    sides, layers = 1 + case.translates, case.encoder_layers + case.decoder_layers
    tokens, parts = case.rows * case.length, _attentions(case) + layers  # sub-layers
    return {
        "norm": (parts + sides) * tokens * case.dim,  # one more at the end of each stack
        "dropout and residual": (parts + sides) * tokens * case.dim,  # one more on the embeddings of each side
        "activation": layers * tokens * case.ffn_dim,
        "softmax of attention": _attentions(case) * case.num_heads * tokens * case.length,
        "softmax of the output": targets * case.vocab_size,
    }


def _attentions(case: Case) -> int:
    """A decoder that has an encoder attends twice in each layer."""
    return case.encoder_layers + case.decoder_layers * (1 + case.translates)


@dataclass(frozen=True)
class Speeds:
    """What the machine does at best: operations a second by precision, bytes copied a second."""

    peaks: dict[str, float]
    bandwidth: float

    @property
    def faster(self) -> str:
        """The precision with the higher peak."""
        return max(self.peaks, key=self.peaks.__getitem__)

    @classmethod
    def measured(cls, rounds: int) -> Speeds:
        """Of this machine, now."""
        sides = dict.fromkeys(loop.PRECISIONS, SIDE)
        if not machine.bf16_products():
            sides["bf16"] = SIDE // 8  # it takes a minute at the full size, and is not the peak
        ways: dict[str, Callable[[], object]] = {
            name: _product((1, side, side, side), loop.PRECISIONS[name]) for name, side in sides.items()
        }
        room = torch.ones(8 * SIDE * SIDE)  # 128 MiB, more than a cache
        ways["copy"] = partial(torch.empty_like(room).copy_, room)
        times = timing.alternate(ways, rounds, warmup=1)
        peaks = {name: 2 * side**3 / times[name] for name, side in sides.items()}
        return cls(peaks, 2 * room.nbytes / times["copy"])

    def floor(self, case: Case, targets: int, parameters: int, rounds: int) -> dict[str, float]:
        """Seconds that an update takes at least: in products, in passes, in the optimiser."""
        dtype, work = loop.PRECISIONS[self.faster], products(case, targets)
        times = timing.alternate({str(shape): _product(shape, dtype) for shape in work}, rounds, warmup=0)
        touched = 4 * sum(passes(case, targets).values()) * dtype.itemsize  # read, write; forward, backward
        adam = 7 * parameters * 4  # parameter and both moments read and written, gradient read
        return {
            "products": sum(times[str(shape)] * count for shape, count in work.items()),
            "passes": touched / self.bandwidth,
            "optimiser": adam / self.bandwidth,
        }


def _product(shape: Product, dtype: torch.dtype) -> Callable[[], Tensor]:
    count, rows, depth, width = shape
    a, b = torch.randn(count, rows, depth).to(dtype), torch.randn(count, depth, width).to(dtype)
    return partial(torch.bmm, a, b) if count > 1 else partial(torch.mm, a[0], b[0])
