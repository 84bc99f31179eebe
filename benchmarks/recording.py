"""What it costs to watch: the same work unwatched, with one layer recorded, and with all of them.

    python -m benchmarks.recording [--rows 32] [--length 24] [--rounds 9] [--json FILE]

A Transformer-Tiny with random parameters; an update's forward and backward pass, a greedy search, a beam of 5, each of
a fixed number of steps. Time is the median of alternating runs, "watched" the time over that of the unwatched. Memory
is the peak of one run above what was in use before it, and "kept" what the record holds at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import timing
from weft.config import EOS, TransformerConfig
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import SearchOptions
from weft.models.transformer import Transformer
from weft.observe import record

WORDS = 10_000
# What is listened to, and for what: nothing; one layer's cross-attention; all attentions; all with their vectors.
WATCHED: dict[str, tuple[str | None, str] | None] = {
    "unwatched": None,
    "one layer": ("decoder.3.cross_attention", "weights"),
    "all layers": (None, "weights"),
    "all layers, vectors too": (None, "vectors"),
}
Work = Callable[[], object]


class Pairs(NamedTuple):
    """Sources and targets."""

    source: Tensor
    target: Tensor


def works(rows: int, length: int) -> tuple[Transformer, dict[str, Work]]:
    """A model, and what is done with it."""
    torch.manual_seed(0)
    config = TransformerConfig(dim=128, num_heads=4, ffn_dim=256, encoder_layers=4, decoder_layers=4, tie="all")
    model = Transformer(config, WORDS, WORDS)
    source = torch.randint(EOS + 2, WORDS, (rows, length))
    source[:, -1] = EOS
    target = torch.cat([torch.ones(rows, 1, dtype=torch.int64), source], 1)

    def update() -> None:
        model.train()
        model.loss(Pairs(source, target)).total.backward()
        model.zero_grad()

    return model, {
        "forward and backward": update,
        "greedy": lambda: greedy(model, source, SearchOptions(max_ratio=0.0, max_extra=length)),
        "beam 5": lambda: beam(model, source, SearchOptions(beam=5, max_ratio=0.0, max_extra=length)),
    }


def watched(model: Transformer, work: Work, what: tuple[str | None, str] | None) -> int:
    """Do the work; how many bytes the record holds then."""
    if what is None:
        work()
        return 0
    names, kinds = what
    with record(model, names, kinds) as seen:
        work()
    return sum(value.nbytes for entry in seen for value in entry.values.values())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What it costs to record attention.")
    parser.add_argument("--rows", type=int, default=32, help="sentences of a batch")
    parser.add_argument("--length", type=int, default=24, help="tokens of a sentence")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    timing.steady_memory()
    print(timing.header())
    print(f"{options.rows} sentences of {options.length} tokens\n")
    model, all_works = works(options.rows, options.length)
    lines = [["work", "recorded", "time", "watched", "peak memory", "kept"], ["---", "---", *["---:"] * 4]]
    results = {}
    for name, work in all_works.items():
        ways = {way: partial(watched, model, work, what) for way, what in WATCHED.items()}
        times = timing.alternate(ways, options.rounds, warmup=1)
        for way, call in ways.items():
            kept = call()
            try:
                peak: int | None = timing.peak_memory(call)
            except OSError:
                peak = None
            ratio = times[way] / times["unwatched"]
            shown = "–" if peak is None else f"{peak / 1e6:,.0f} MB"
            lines.append([name, way, timing.duration(times[way]), f"{ratio:.2f}×", shown, f"{kept / 1e6:,.2f} MB"])
            results[f"{name}: {way}"] = {"seconds": times[way], "ratio": ratio, "peak": peak, "kept": kept}
    print(timing.markdown(lines))
    if options.json:
        timing.save(options.json, results)


if __name__ == "__main__":
    main()
