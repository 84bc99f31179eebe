"""weft's training step against its peers', side by side: ``python -m benchmarks.training``.

All contestants train a model of the same sizes (peers.py) on the same batches of real text, with the same threads, each
in a process of its own (contestants.py), and take turns: in each it makes updates that are not timed and then some that
are, as in training an update follows one of the same model. The median of the turns counts. What is measured:

    tokens/s  target tokens that are not padding, per second of an update.
    MFU       what the model needs ÷ time ÷ peak. It needs 6 × matrix entries × the rows that go through them, forward
              and backward, plus 12 × attentions × tokens × length × dim. The output layer's rows are the target
              tokens, every other layer's the whole batch with its padding; causal attention counts in full. The peak
              is that of a product of 2048³ in the faster of fp32 and bf16, in the same run.
    floor     the same products timed alone, in the faster type, plus one read and one write, forward and backward,
              of what each element-wise pass works on (``passes``), plus what AdamW reads and writes, at the speed of a
              large copy. A contestant's share is its tokens/s ÷ those of an update that takes no more than that.
    memory    the peak of an update above parameters and moments.

Keeping freed memory is part of how weft trains; a peer has it too with ``--kept-memory``.

The targets at the end are met or missed. ``--quality STEPS`` also trains weft and torch's fp32 model, from the same
weights and on the same batches, and compares their losses on text that neither has seen.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from benchmarks import floor, peers, timing
from benchmarks.contestants import Contestant, Way, race, taking_part
from benchmarks.floor import Speeds, operations, products
from benchmarks.kernels import Targets
from benchmarks.peers import Case
from weft.config import BOS, EOS, PAD, TokenizerConfig
from weft.data.batching import Batch
from weft.data.corpora import open_pairs
from weft.data.vocabulary import make_pair, train_tokenizer
from weft.training import loop

_CASES = (
    Case("tiny", 4, 4, 128, 256, 4, 256, 16, 10_000, dropout=0.3, smoothing=0.1, ratio=2.5),
    Case("wide", 6, 6, 512, 2048, 8, 256, 16, 10_000, dropout=0.1, smoothing=0.1, ratio=1.5, mfu=0.3),
    # nanoGPT's sizes for a CPU and for a GPU
    Case("gpt-small", 0, 4, 128, 512, 4, 12, 64, 100, dropout=0.0, ratio=2.0),
    Case("gpt", 0, 6, 384, 1536, 6, 64, 256, 100, dropout=0.2, attention_dropout=0.2, ratio=2.5),
)
CASES = {case.name: case for case in _CASES}
FLOOR_SHARE = 0.6  # what weft should reach of the floor's tokens per second
BATCHES = 12  # different ones, over and over


class Data(NamedTuple):
    """Batches of one shape to train on, and others to validate with."""

    origin: str
    vocab_size: int
    train: list[Batch]
    held_out: list[Batch]


def read(case: Case, count: int = BATCHES) -> Data:
    """The text of a case in so many batches; a language model's have a source without tokens."""
    return _read_pairs(case, count) if case.translates else _read_characters(case, count)


def _read_pairs(case: Case, count: int) -> Data:
    """Multi30k en-de where it is, else the sample that comes with weft: pairs of nearly the case's length."""
    try:
        origin, languages = "multi30k", ("en", "de")
        train, held_out = (list(open_pairs(f"{origin}:{part}", *languages)) for part in ("train", "validation"))
    except OSError:
        origin, languages = "tatoeba-sample", ("en", "es")
        train, held_out = (list(open_pairs(f"{origin}:{part}", *languages)) for part in ("train", "validation"))
    config = TokenizerConfig(kind="bpe", vocab_size=case.vocab_size)
    tokenizers = make_pair(config, lambda: (a for a, _ in train), lambda: (b for _, b in train))
    lengths = range(case.length * 3 // 4, case.length + 1)  # with EOS

    def fitting(pairs: list[tuple[str, str]]) -> list[tuple[list[int], list[int]]]:
        sides = zip(*pairs, strict=True)
        rows = zip(*(tokenizers.source.encode_batch(side) for side in sides), strict=True)  # one vocabulary for both
        return [(a, b) for a, b in rows if len(a) + 1 in lengths and len(b) + 1 in lengths]

    def padded(rows: Sequence[list[int]], *begin: int) -> Tensor:
        width = case.length + len(begin)
        return torch.tensor([[*begin, *row, EOS, *[PAD] * (width - len(begin) - len(row) - 1)] for row in rows])

    def batch(pairs: Sequence[tuple[list[int], list[int]]]) -> Batch:
        return Batch(padded([a for a, _ in pairs]), padded([b for _, b in pairs], BOS))

    pairs, others = fitting(train), fitting(held_out)
    draws = torch.randint(len(pairs), (count, case.rows), generator=torch.Generator().manual_seed(0)).tolist()
    starts = range(0, len(others), case.rows)
    return Data(
        f"{origin} {'-'.join(languages)}",
        tokenizers.source.vocab_size,
        [batch([pairs[number] for number in draw]) for draw in draws],
        [batch(others[start : start + case.rows]) for start in starts],
    )


def _read_characters(case: Case, count: int) -> Data:
    """The characters of tinyshakespeare where it is, else of the sample's English side; the last tenth held out."""
    file = Path(os.environ.get("WEFT_DATA", ""), "tinyshakespeare", "input.txt")
    if file.is_file():
        origin, lines = "tinyshakespeare", file.read_text(encoding="utf-8").split("\n")
    else:
        origin, lines = "tatoeba-sample en", [english for english, _ in open_pairs("tatoeba-sample:train", "en", "es")]
    lines = [line + "\n" for line in lines]
    tokenizer = train_tokenizer(lines, TokenizerConfig(kind="char"))
    tokens = torch.tensor(list(chain.from_iterable(tokenizer.encode_batch(lines))))
    train, held_out = tokens.split([end := len(tokens) * 9 // 10, len(tokens) - end])

    def batch(text: Tensor, starts: Tensor) -> Batch:
        target = text[starts[:, None] + torch.arange(case.length + 1)]
        return Batch(target[:, :0], target)

    draws = torch.randint(end - case.length, (count, case.rows), generator=torch.Generator().manual_seed(0))
    starts = torch.arange(0, len(held_out) - case.length, case.length)[: 4 * case.rows]
    return Data(
        origin,
        tokenizer.vocab_size,
        [batch(train, draw) for draw in draws],
        [batch(held_out, some) for some in starts.split(case.rows)],
    )


def quality(case: Case, data: Data, precision: str, steps: int) -> dict[str, float]:
    """Loss per held-out target token of weft and of torch in fp32, after so many steps from the same weights."""
    ours, reference = Way("weft", precision).start(case), Way("torch", "fp32").start(case)
    peers.copy_weights(ours.model, cast(peers.Torch, reference.model))
    losses = {}
    for name, contestant in {"weft": ours, "reference": reference}.items():
        for batch in islice(cycle(data.train), steps):
            contestant.update(batch)
        contestant.model.eval()
        with torch.no_grad():
            total = sum(float(contestant.nll(batch)) for batch in data.held_out)
        losses[name] = total / sum(_targets(batch) for batch in data.held_out)
    return losses | {"ratio": losses["weft"] / losses["reference"]}


def _targets(batch: Batch) -> int:
    return int((batch.target[:, 1:] != PAD).sum())


@dataclass(frozen=True)
class Row:
    """What was found of one contestant."""

    tokens_per_second: float
    seconds: float
    mfu: float
    floor_share: float
    memory: int | None
    compile_seconds: float | None


def measure(case: Case, ways: Sequence[Way], speeds: Speeds, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a case, told as they come."""
    data = read(case, max(BATCHES, options.quality))
    case = replace(case, vocab_size=data.vocab_size)
    targets = round(sum(map(_targets, data.train[:BATCHES])) / BATCHES)
    print(f"\n{case.name}: {data.origin}, {case.vocab_size:,} words, {targets:,} target tokens a batch", flush=True)
    with ExitStack() as ends:
        entered = (Contestant(way, case, data.train[:BATCHES], options.kept_memory) for way in ways)
        contestants = [ends.enter_context(one) for one in entered]
        parameters = contestants[0].parameters
        for one in contestants:
            alike = abs(one.parameters / parameters - 1) < 0.01
            assert alike, f"{one.way} has {one.parameters:,} parameters, {ways[0]} {parameters:,}"
        seconds, compiling = race(contestants, options.rounds)
        memory = {one.way: one.memory() if options.memory else None for one in contestants}
    work = operations(products(case, targets))
    parts = speeds.floor(case, targets, parameters, min(options.rounds, 5))
    least = sum(parts.values())
    rows = {}
    for way, taken in seconds.items():
        mfu = work / taken / max(speeds.peaks.values())
        rows[str(way)] = Row(targets / taken, taken, mfu, least / taken, memory[way], compiling.get(way))
        print(f"  {way}: {targets / taken:,.0f} target tokens/s", flush=True)
    ours = str(Way("weft", loop.fastest_precision()))
    best = max((name for name in rows if not name.startswith("weft")), key=lambda name: rows[name].tokens_per_second)
    found: dict[str, Any] = {
        "data": data.origin,
        "parameters": parameters,
        "targets": targets,
        "operations": work,
        "floor": parts | {"tokens_per_second": targets / least},
        "contestants": {name: asdict(row) for name, row in rows.items()},
        "weft": ours,
        "best_peer": best,
        "ratio": rows[ours].tokens_per_second / rows[best].tokens_per_second,
        "quality": quality(case, data, loop.fastest_precision(), options.quality) if options.quality else None,
    }
    shares = ", ".join(f"{name} {timing.duration(part)}" for name, part in parts.items())
    print(f"  floor: {shares}: {targets / least:,.0f} target tokens/s")
    if losses := found["quality"]:
        print(f"  after {options.quality} steps: " + ", ".join(f"{name} {value:.4f}" for name, value in losses.items()))
    return found


def table(results: dict[str, dict[str, Any]]) -> str:
    """The contestants of all cases as Markdown; weft's default precision is the measure of the third column."""
    heads = ["case", "contestant", "target tokens/s", "weft is", "MFU", "of the floor", "memory", "compiling"]
    lines = [heads, ["---", "---", *["---:"] * 6]]
    for case, found in results.items():
        ours = found["contestants"][found["weft"]]["tokens_per_second"]
        for name, row in found["contestants"].items():
            peak, compiling, speed = row["memory"], row["compile_seconds"], row["tokens_per_second"]
            shares = f"{ours / speed:.2f}×", f"{row['mfu']:.1%}", f"{row['floor_share']:.0%}"
            rest = f"{peak / 1e6:,.0f} MB" if peak else "–", f"{compiling:.0f} s" if compiling else "–"
            lines.append([case, name, f"{speed:,.0f}", *shares, *rest])
    return timing.markdown(lines)


def judge(results: dict[str, dict[str, Any]]) -> Targets:
    """Which targets are met."""
    targets = Targets()
    for name, found in results.items():
        row = found["contestants"][found["weft"]]
        targets.at_least(f"{name}: tokens/s over {found['best_peer']}", found["ratio"], CASES[name].ratio)
        targets.at_least(f"{name}: share of the floor", row["floor_share"], FLOOR_SHARE)
        if CASES[name].mfu:
            targets.at_least(f"{name}: MFU", row["mfu"], CASES[name].mfu)
    return targets


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print, and say which targets are met."""
    parser = argparse.ArgumentParser(description="weft's training step against its peers', side by side.")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only peers whose names begin so")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contestant")
    parser.add_argument("--quality", type=int, default=0, metavar="STEPS", help="also compare losses after so many")
    parser.add_argument("--quick", action="store_true", help="2 rounds, nothing compiled, no memory")
    parser.add_argument("--all", action="store_true", help="also bf16 without bf16 products, x-transformers compiled")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave memory out")
    parser.add_argument("--kept-memory", action="store_true", help="let peers keep freed memory, as weft does")
    parser.add_argument("--json", metavar="PATH", help="write the figures here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.memory = 2, False
    timing.steady_memory()
    print(timing.header(), flush=True)
    ways = taking_part(not options.quick, options.all)
    wanted = ["weft", *options.only] if options.only else [""]
    ways = [way for way in ways if str(way).startswith(tuple(wanted))]
    if all(way.who == "weft" for way in ways):
        parser.error(f"no peer takes part whose name begins with {' or '.join(options.only or [])}")
    speeds = Speeds.measured(min(options.rounds, 5))
    peaks = ", ".join(f"{name} {peak / 1e9:,.0f} GFLOP/s" for name, peak in speeds.peaks.items())
    print(f"peak at {floor.SIDE}³: {peaks}; copying {speeds.bandwidth / 1e9:.1f} GB/s", flush=True)
    results = {name: measure(CASES[name], ways, speeds, options) for name in options.case}
    targets = judge(results)
    print(f"\n{table(results)}\n\n" + "\n".join(targets.lines))
    if options.json:
        timing.save(options.json, {"speeds": asdict(speeds), "cases": results})
    if options.strict and targets.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
