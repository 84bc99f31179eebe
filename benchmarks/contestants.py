"""Who takes part in benchmarks/training.py: weft and its peers, each in a process of its own.

    with Contestant(Way("weft", "bf16"), case, some) as ours, Contestant(Way("torch", "bf16"), case, some) as theirs:
        times, compiling = race([ours, theirs], rounds=9)

A process of its own, since that is how people train: what one library leaves in the caches of torch, oneDNN and the
allocator is not another's. weft's tells the allocator to keep freed memory, as ``weft train`` does; a peer's has what
glibc does by itself, as its users have, or with ``kept`` the same as weft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from multiprocessing import get_context
from statistics import median
from time import perf_counter
from typing import Any, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import peers, timing
from benchmarks.peers import PEERS, Case
from weft.config import PAD, TrainingConfig
from weft.data.batching import Batch
from weft.kernels import machine
from weft.kernels.compiled import KINDS, compiled, fastest
from weft.training import loop
from weft.training.checkpoint import RunFolder
from weft.training.distributed import Ranks
from weft.training.report import Silent

_ADAM = TrainingConfig(learning_rate=5e-4, schedule="constant", warmup=0, clip=0.0)  # every contestant's
_TURN = 0.5  # seconds of updates that are timed in a turn, at least one
_BEFORE = 2  # updates before that, which fetch the memory that was given back after the last turn, and fill the caches
Found = TypeVar("Found")


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


def taking_part(compiled: bool = True, everything: bool = False) -> list[Way]:
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


def parameter_count(model: nn.Module) -> int:
    """A table that is tied counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


class Contestant:
    """A contestant in a process of its own, which trains on these batches over and over, when it is told to.

    Attributes:
        way: who it is.
    """

    def __init__(self, way: Way, case: Case, batches: Sequence[Batch], kept: bool = False) -> None:
        """Start the process and in it the model of a case; does not wait for it.

        Args:
            way: who takes part.
            case: the sizes.
            batches: to train on, in turn.
            kept: whether a peer keeps freed memory as well.
        """
        self.way = way
        self._process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        sides = [[side.numpy() for side in batch] for batch in batches]
        self._parameters = self._process.submit(_start, way, case, sides, kept or way.who == "weft")

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self._process.shutdown(cancel_futures=True)

    @property
    def parameters(self) -> int:
        """How many the model has."""
        return self._parameters.result()

    def first(self) -> float:
        """Seconds that the first update took, with what it had to compile."""
        return self._told(_first)

    def turn(self) -> float:
        """Seconds of an update that follows others of this contestant."""
        return self._told(_turn)

    def memory(self) -> int | None:
        """Bytes that an update needs at its peak above parameters and moments; None where the system does not tell."""
        return self._told(_memory)

    def _told(self, what: Callable[[], Found]) -> Found:
        self._parameters.result()  # what went wrong at the start is told here
        return self._process.submit(what).result()


def race(contestants: Sequence[Contestant], rounds: int) -> tuple[dict[Way, float], dict[Way, float]]:
    """Median seconds of an update of each, which take turns; and what the compiled ones needed to compile."""
    compiling = {}
    for one in contestants:
        seconds = one.first()
        if one.way.compiled:
            compiling[one.way] = seconds
            print(f"  {one.way}: {seconds:.0f} s to compile", flush=True)
    times: dict[Way, list[float]] = {one.way: [] for one in contestants}
    for done in range(rounds):
        begin = done % len(contestants)
        for one in (*contestants[begin:], *contestants[:begin]):
            times[one.way].append(one.turn())
    return {way: median(taken) for way, taken in times.items()}, compiling


_updates: Iterator[float]  # of the contestant whose process this is


def _start(way: Way, case: Case, sides: list[list[Any]], kept: bool) -> int:
    """Make the contestant of this process; returns how many parameters it has."""
    global _updates
    if kept:
        machine.keep_memory()
    if way.who == "weft":
        machine.remember_few_products()
    batches = [Batch(*map(torch.from_numpy, batch)) for batch in sides]
    contestant = way.start(case)
    _updates = (contestant.update(batch) for batch in cycle(batches))
    return parameter_count(contestant.model)


def _first() -> float:
    begin = perf_counter()
    next(_updates)
    return perf_counter() - begin


def _turn() -> float:
    for _ in range(_BEFORE):
        next(_updates)
    seconds = _repeat(_TURN)
    machine.glibc("malloc_trim", 0)  # what is kept is not needed until the next turn, and others need it
    return seconds


def _repeat(seconds: float) -> float:
    """Make updates for so long, at least one; the mean time of one."""
    begin, count = perf_counter(), 0
    while not count or perf_counter() - begin < seconds:
        next(_updates)
        count += 1
    return (perf_counter() - begin) / count


def _memory() -> int | None:
    next(_updates)  # makes the moments
    try:
        return timing.peak_memory(lambda: next(_updates))
    except OSError:
        return None
