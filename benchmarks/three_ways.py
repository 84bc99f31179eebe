"""Recurrence, convolution and self-attention side by side: time, memory, and how far apart two positions are.

    python -m benchmarks.three_ways [--out PNG] [--json FILE] [--lengths 64 128 …]

One layer of each, of the same width, forward and backward. What else the table says is found out, not known
beforehand:

    path      what every position can do at the same time is done once; gradients tell how far back the last
              position sees now. So many times it must be done (recurrence: step by step, else: layer upon
              layer) until the last has seen the first.
    in a row  how many of these must wait for each other inside one layer.
    works on  a layer whose outputs are reordered with its inputs takes a set; one whose outputs move with its
              inputs takes a grid; one for which a start and an order exist takes an ordered sequence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from benchmarks import timing
from weft.kernels.mask import Mask
from weft.layers.attention import MultiHeadAttention
from weft.layers.cells import RecurrentState
from weft.layers.convolution import GatedConvolution
from weft.layers.recurrent import RecurrentEncoder

BATCH, DIM, NUM_HEADS, KERNEL_SIZE = 4, 128, 4, 5
LENGTHS = [64, 128, 256, 512, 1024, 2048, 4096]

Layer = Callable[[Tensor], Tensor]  # [B, N, D] -> [B, N, D]


@dataclass(frozen=True)
class Way:
    """One of the three: its layer, what its positions do at the same time, and the layer that sees both sides."""

    module: nn.Module
    causal: Layer
    at_once: Layer
    both_sides: Layer


@dataclass(frozen=True)
class Row:
    """What was found for one way and one length."""

    length: int
    way: str
    seconds: float
    megabytes: float
    path: int
    in_a_row: int


def ways(dim: int = DIM) -> dict[str, Way]:
    """The three, with random weights."""
    recurrence = RecurrentEncoder("lstm", dim, dim)
    convolution = GatedConvolution(dim, KERNEL_SIZE, causal=True)
    centred = GatedConvolution(dim, KERNEL_SIZE, causal=False)
    attention = MultiHeadAttention(dim, NUM_HEADS)
    two_sided = RecurrentEncoder("lstm", dim, dim // 2, bidirectional=True)

    def one_step(x: Tensor) -> Tensor:
        """Every position makes its state from its input and its neighbour's state, here the neighbour's input."""
        before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1).flatten(0, 1)  # [B·N, D]
        outputs, _ = recurrence(x.flatten(0, 1)[:, None], state=RecurrentState((before,), (before,)))
        return outputs.view_as(x)  # type: ignore[no-any-return]

    def convolve(x: Tensor) -> Tensor:
        return convolution(x)[0]  # type: ignore[no-any-return]

    def attend(x: Tensor) -> Tensor:
        return attention(x, mask=Mask(causal=True))  # type: ignore[no-any-return]

    return {
        "recurrence": Way(recurrence, lambda x: recurrence(x)[0], one_step, lambda x: two_sided(x)[0]),
        "convolution": Way(convolution, convolve, convolve, lambda x: centred(x)[0]),
        "self-attention": Way(attention, attend, attend, attention),
    }


def reach(layer: Layer, length: int, dim: int = DIM) -> int:
    """How many positions back the last output of the layer sees: the farthest input with a gradient."""
    x = torch.randn(1, length, dim, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x)[0, -1].sum(), x)
    seen = gradient[0].abs().amax(1).nonzero()[:, 0]  # the positions with a gradient
    return length - 1 - int(seen.min())


def path_length(way: Way, length: int, dim: int = DIM) -> int:
    """How often positions must do what they do at once until the last has seen the first."""
    return -(-(length - 1) // reach(way.at_once, length, dim))


def in_a_row(way: Way, length: int, dim: int = DIM) -> int:
    """How many of these must wait for each other inside one layer; each position of a recurrence for the last."""
    return 1 if way.at_once is way.causal else path_length(way, length, dim) + 1


def works_on(layer: Layer, dim: int = DIM, length: int = 16) -> str:
    """What kind of thing the layer takes its inputs for."""
    x, order = torch.randn(1, length, dim), torch.randperm(length)
    with torch.no_grad():
        y = layer(x)
        reordered, moved = layer(x[:, order]), layer(torch.cat((torch.zeros_like(x[:, :3]), x), 1))
    if torch.allclose(reordered, y[:, order], atol=1e-5):
        return "sets"
    return "grids" if torch.allclose(moved[:, 3:], y, atol=1e-5) else "ordered sequences"


def measure(three: dict[str, Way], length: int, seconds: float = 5.0) -> list[Row]:
    """Time, memory and paths of the three at one length."""
    x = torch.randn(BATCH, length, DIM, requires_grad=True)

    def step(way: Way) -> Callable[[], object]:
        inputs = [x, *way.module.parameters()]
        return lambda: torch.autograd.grad(way.causal(x).sum(), inputs)

    calls = {name: step(way) for name, way in three.items()}
    times = timing.alternate(calls, rounds=9, warmup=1, seconds=seconds)
    rows = []
    for name, way in three.items():
        megabytes = timing.peak_memory(calls[name]) / 2**20
        rows.append(Row(length, name, times[name], megabytes, path_length(way, length), in_a_row(way, length)))
    return rows


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [["length", "way", "time", "memory", "path", "in a row"], ["---:", "---", *["---:"] * 4]]
    for row in rows:
        memory = f"{row.megabytes:.1f} MB"
        lines.append([str(row.length), row.way, timing.duration(row.seconds), memory, str(row.path), str(row.in_a_row)])
    return timing.markdown(lines)


def draw(rows: list[Row], path: str) -> None:
    """Time, memory and path over the length, as a picture."""
    from weft.views import figures

    plots: dict[str, dict[str, figures.Line]] = {"time [s]": {}, "peak memory [MB]": {}, "path length": {}}
    for name in dict.fromkeys(row.way for row in rows):
        of = [row for row in rows if row.way == name]
        lengths = [row.length for row in of]
        plots["time [s]"][name] = lengths, [row.seconds for row in of]
        plots["peak memory [MB]"][name] = lengths, [row.megabytes for row in of]
        plots["path length"][name] = lengths, [row.path for row in of]
    caption = (
        f"One causal layer of width {DIM}, batch {BATCH}, forward and backward: LSTM, gated convolution "
        f"(kernel {KERNEL_SIZE}), attention ({NUM_HEADS} heads). Path: how often positions must pass on what they know "
        "until the last has seen the first."
    )
    figures.save(figures.lines(plots, "length of the sequence", caption, log="xy"), path)


def main() -> None:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description="Recurrence, convolution and self-attention side by side.")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of the sequences, each ≥ 2")
    parser.add_argument("--out", metavar="PNG", help="also draw the plot")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers")
    arguments = parser.parse_args()
    if min(arguments.lengths) < 2:
        parser.error(f"--lengths must be at least 2, not {min(arguments.lengths)}")

    timing.steady_memory()
    torch.manual_seed(0)
    three = ways()
    kinds = {name: works_on(way.both_sides) for name, way in three.items()}
    print(f"{timing.header()}\n\none layer, width {DIM}, batch {BATCH}, forward and backward\n")
    rows = [row for length in arguments.lengths for row in measure(three, length)]
    print(table(rows))
    print("\nworks on: " + ", ".join(f"{name} {kind}" for name, kind in kinds.items()))
    if arguments.json:
        timing.save(arguments.json, {"rows": [asdict(row) for row in rows], "works_on": kinds})
    if arguments.out:
        draw(rows, arguments.out)


if __name__ == "__main__":
    main()
