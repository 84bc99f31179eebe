"""weft's training step against its peers', side by side: ``python -m benchmarks.training``.

All contestants train a model of the same sizes (peers.py) on the same batches of real text, in one process with the
same threads, and take turns: each makes two updates a round, of which the second is timed, as in training an update
follows one of the same model. The median counts. What is measured:

    tokens/s  target tokens that are not padding, per second of an update.
    MFU       what the model needs ÷ time ÷ peak. It needs 6 × matrix entries × the rows that go through them, forward
              and backward, plus 12 × attentions × tokens × length × dim. The output layer's rows are the target
              tokens, every other layer's the whole batch with its padding; causal attention counts in full. The peak
              is that of a product of 2048³ in the faster of fp32 and bf16, in the same run.
    floor     the same products timed alone, in the faster type, plus one read and one write, forward and backward,
              of what each element-wise pass works on (``passes``), plus what AdamW reads and writes, at the speed of a
              large copy. A contestant's share is its tokens/s ÷ those of an update that takes no more than that.
    memory    the peak of an update above parameters and moments, alone in a fresh process.

The targets at the end are met or missed. ``--quality STEPS`` also trains weft and torch's fp32 model, from the same
weights and on the same batches, and compares their losses on text that neither has seen.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, cycle, islice
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers, timing
from benchmarks.kernels import Targets
from benchmarks.peers import PEERS, Case
from weft.config import BOS, EOS, PAD, TokenizerConfig, TrainingConfig
from weft.data.batching import Batch
from weft.data.corpora import open_pairs
from weft.data.vocabulary import make_pair, train_tokenizer
from weft.kernels import machine
from weft.kernels.compiled import KINDS, compiled, fastest
from weft.training import loop
from weft.training.checkpoint import RunFolder
from weft.training.distributed import Ranks
from weft.training.report import Silent

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
SIDE = 2048  # of the square matrices whose product gives the peak
_ADAM = TrainingConfig(learning_rate=5e-4, schedule="constant", warmup=0, clip=0.0)  # every contestant's


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


class Weft:
    """weft's model, trained by the loop's own update."""

    def __init__(self, case: Case, precision: str) -> None:
        """Make the model of a case."""
        self.model = peers.weft_model(case).train()
        cast(loop.Trainable, self.model).precision = loop.PRECISIONS[precision]
        config = _ADAM.model_copy(update={"smoothing": case.smoothing})
        nothing = cast(loop.Batches, None)  # an update is handed its batches
        alone = Ranks(0, 1, torch.device("cpu"))
        self._run = loop._Training(self.model, nothing, config, RunFolder(""), alone, Silent(), seed=0)

    def update(self, batch: Batch) -> float:
        """One update; the mean loss of the batch's target tokens before it."""
        window = self._run.state.window
        window.clear()
        with compiled(*KINDS if fastest() == "compiled" else ()):
            self._run._update(iter([batch]))
        return window["loss"] / window["count"]

    def nll(self, batch: Batch) -> Tensor:
        """The negative log-likelihood of the batch's targets, summed."""
        return cast(loop.Trainable, self.model).loss(batch).parts["nll"]


class Plain:
    """A peer's model in a plain loop: forward, cross entropy, backward, fused AdamW."""

    def __init__(self, peer: str, case: Case, precision: str, compiled: bool = False) -> None:
        """Make the model of a case."""
        self.model = PEERS[peer](case).train()
        self.precision, self.smoothing = precision, case.smoothing
        self.loss = torch.compile(self._loss, dynamic=False) if compiled else self._loss
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=_ADAM.learning_rate,
            betas=(_ADAM.beta1, _ADAM.beta2),
            eps=_ADAM.eps,
            weight_decay=_ADAM.weight_decay,
            fused=True,
        )

    def update(self, batch: Batch) -> float:
        """One update; the mean loss of the batch's target tokens before it."""
        loss = self.loss(batch.source, batch.target, self.smoothing)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def nll(self, batch: Batch) -> Tensor:
        """The negative log-likelihood of the batch's targets, summed."""
        return self._loss(batch.source, batch.target, 0.0) * (batch.target[:, 1:] != PAD).sum()

    def _loss(self, source: Tensor, target: Tensor, smoothing: float) -> Tensor:
        narrow = torch.autocast("cpu", torch.bfloat16) if self.precision == "bf16" else nullcontext()
        with cast(AbstractContextManager[None], narrow):
            logits = self.model(source, target[:, :-1])
        wanted = target[:, 1:].flatten()
        return F.cross_entropy(logits.float().flatten(0, 1), wanted, ignore_index=PAD, label_smoothing=smoothing)


@dataclass(frozen=True)
class Way:
    """A contestant: whose model, in which precision, compiled or not."""

    who: str
    precision: str
    compiled: bool = False

    def __str__(self) -> str:
        """As in the tables."""
        return f"{self.who} {self.precision}{' compiled' * self.compiled}"

    def start(self, case: Case) -> Weft | Plain:
        """Make it, ready to train."""
        torch.manual_seed(0)
        if self.who == "weft":
            return Weft(case, self.precision)
        return Plain(self.who, case, self.precision, self.compiled)


def contestants(compiled: bool = True, everything: bool = False) -> list[Way]:
    """All that can run here, except, unless ``everything`` is wanted, what cannot be the best; says what is left out.

    x-transformers takes minutes to compile. bf16 is some thirty times slower than fp32 on a CPU without bf16 products.
    """
    precisions = list(loop.PRECISIONS)
    if not (everything or machine.bf16_products()):
        precisions.remove("bf16")
        print("this CPU has no bf16 products: only fp32 takes part (--all: bf16 too)")
    found = [Way("weft", precision) for precision in precisions]
    for peer in PEERS:
        if not peers.installed(peer):
            print(f"{peer} is not installed and does not take part")
            continue
        kinds = [False, True] if compiled and (everything or peer != "x-transformers") else [False]
        found += [Way(peer, precision, kind) for kind in kinds for precision in precisions]
    return found


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


def parameter_count(model: nn.Module) -> int:
    """A table that is tied counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def race(case: Case, data: Data, ways: Sequence[Way], rounds: int) -> tuple[dict[Way, float], dict[Way, float], int]:
    """Median seconds of an update of each, seconds that the compiled ones took to compile, and weft's parameters."""
    torch._dynamo.reset()  # it compiles one piece of code so many times and no more
    started = {way: way.start(case) for way in ways}
    ours = parameter_count(started[ways[0]].model)
    for way, contestant in started.items():
        theirs = parameter_count(contestant.model)
        assert abs(theirs / ours - 1) < 0.01, f"{way} has {theirs:,} parameters, {ways[0]} {ours:,}"

    def turns(contestant: Weft | Plain) -> Iterator[float]:
        return (contestant.update(batch) for batch in cycle(data.train[:BATCHES]))

    calls = {str(way): partial(next, turns(contestant)) for way, contestant in started.items()}
    compiling = {}
    for way in ways:
        if way.compiled:
            begin = perf_counter()
            calls[str(way)]()
            compiling[way] = perf_counter() - begin
            print(f"  {way}: {compiling[way]:.0f} s to compile", flush=True)
    times = timing.alternate(calls, rounds, warmup=0, settle=1)  # which calls each once before the first round
    return {way: times[str(way)] for way in ways}, compiling, ours


def memory(way: Way, case: Case, batch: Batch) -> int | None:
    """Bytes that an update needs at its peak above parameters and moments; None where the system does not tell."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak, way, case, [side.numpy() for side in batch]).result()


def _peak(way: Way, case: Case, sides: list[Any]) -> int | None:
    contestant, batch = way.start(case), Batch(*map(torch.from_numpy, sides))
    contestant.update(batch)  # makes the moments
    try:
        return timing.peak_memory(lambda: contestant.update(batch))
    except OSError:
        return None


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
    seconds, compiling, parameters = race(case, data, ways, options.rounds)
    gc.collect()
    work = operations(products(case, targets))
    parts = speeds.floor(case, targets, parameters, min(options.rounds, 5))
    floor = sum(parts.values())
    rows = {}
    for way, taken in seconds.items():
        peak = memory(way, case, data.train[0]) if options.memory else None
        mfu = work / taken / max(speeds.peaks.values())
        rows[str(way)] = Row(targets / taken, taken, mfu, floor / taken, peak, compiling.get(way))
        print(f"  {way}: {targets / taken:,.0f} target tokens/s", flush=True)
    ours = str(Way("weft", loop.fastest_precision()))
    best = max((name for name in rows if not name.startswith("weft")), key=lambda name: rows[name].tokens_per_second)
    found: dict[str, Any] = {
        "data": data.origin,
        "parameters": parameters,
        "targets": targets,
        "operations": work,
        "floor": parts | {"tokens_per_second": targets / floor},
        "contestants": {name: asdict(row) for name, row in rows.items()},
        "weft": ours,
        "best_peer": best,
        "ratio": rows[ours].tokens_per_second / rows[best].tokens_per_second,
        "quality": quality(case, data, loop.fastest_precision(), options.quality) if options.quality else None,
    }
    shares = ", ".join(f"{name} {timing.duration(part)}" for name, part in parts.items())
    print(f"  floor: {shares}: {targets / floor:,.0f} target tokens/s")
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
    parser.add_argument("--rounds", type=int, default=9, help="updates of each contestant that are timed")
    parser.add_argument("--quality", type=int, default=0, metavar="STEPS", help="also compare losses after so many")
    parser.add_argument("--quick", action="store_true", help="2 rounds, nothing compiled, no memory")
    parser.add_argument("--all", action="store_true", help="also what takes minutes: see contestants()")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave memory out")
    parser.add_argument("--json", metavar="PATH", help="write the figures here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if a target is missed")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.memory = 2, False
    timing.steady_memory()
    print(timing.header(), flush=True)
    ways = contestants(not options.quick, options.all)
    wanted = ["weft", *options.only] if options.only else [""]
    ways = [way for way in ways if str(way).startswith(tuple(wanted))]
    if all(way.who == "weft" for way in ways):
        parser.error(f"no peer takes part whose name begins with {' or '.join(options.only or [])}")
    speeds = Speeds.measured(min(options.rounds, 5))
    peaks = ", ".join(f"{name} {peak / 1e9:,.0f} GFLOP/s" for name, peak in speeds.peaks.items())
    print(f"peak at {SIDE}³: {peaks}; copying {speeds.bandwidth / 1e9:.1f} GB/s", flush=True)
    results = {name: measure(CASES[name], ways, speeds, options) for name in options.case}
    targets = judge(results)
    print(f"\n{table(results)}\n\n" + "\n".join(targets.lines))
    if options.json:
        timing.save(options.json, {"speeds": asdict(speeds), "cases": results})
    if options.strict and targets.missed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
