"""The training loop: the only one, for every model.

It knows no model by name: a model has ``loss(batch, smoothing=, rdrop=) -> Loss`` and ``precision``. An update is

    seed ← hash(seed, step, rank)
    for each micro-batch: g ← g + ∂ loss.total            sums over target tokens
    g ← Σ_ranks g / Σ_ranks tokens;  ‖g‖ ≤ clip;  AdamW;  mean of the weights

Exact resume is by construction. The random numbers of a step follow from (seed, step, rank), the batches from their
number, the learning rate from the step; parameters, moments, the mean, and the sums since the last log line are all
that one step hands to the next, and all of that is stored. So a run that was stopped at any instant and started
again ends with the bits of an unbroken one, on the same machine type, torch build, thread count and number of
processes. Nothing reads the clock but the fields named in ``TIME_FIELDS``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from weft.config import TrainingConfig, nearest
from weft.kernels import machine, native
from weft.kernels.compiled import KINDS, compiled, fastest
from weft.kernels.plain import plain
from weft.models.contract import Loss
from weft.training import optim
from weft.training.checkpoint import RunFolder, copy_into, tensors_of
from weft.training.distributed import Ranks, joined
from weft.training.progress import duration
from weft.training.report import Reporter, Silent
from weft.training.signals import Signals

TIME_FIELDS = ("tokens_per_second", "seconds")  # of metrics.jsonl; all else is the same in every run of a recipe
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

Best = tuple[str, Literal["min", "max"]]
Validate = Callable[[nn.Module], Mapping[str, float]]


class Batches(Protocol):
    """What the loop reads."""

    @property
    def per_epoch(self) -> int:
        """How many micro-batches see each example once."""

    def at(self, number: int) -> Any:
        """Micro-batch 0, 1, 2, … over all ranks. A pure function, which draws nothing from torch's own generator."""

    def costliest(self) -> Any:
        """The batch that needs most memory."""


class Trainable(Protocol):
    """What the loop asks of an nn.Module."""

    precision: torch.dtype

    def loss(self, batch: Any, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        """Sums over the batch's target tokens."""


class TrainingError(ValueError):
    """Training cannot go on; what was saved before is as it was."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended. The model has the weights named here.

    Attributes:
        step: the last step.
        tokens: target tokens trained on.
        seconds: what it took, over all its starts.
        best_step: the step with the best validation; None if there was none.
        metrics: what validation gave with the model as it is now.
        weights: the steps whose weights, or their means over time, were averaged into the model: the best or the last
            alone unless the recipe averages and validation finds the average no worse.
        precision: of activations and products, fp32 or bf16.
    """

    step: int
    tokens: int
    seconds: float
    best_step: int | None
    metrics: Mapping[str, float]
    weights: tuple[int, ...]
    precision: str


@dataclass
class _State:
    """What one step hands to the next, besides tensors."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    window: dict[str, float] = field(default_factory=dict)  # sums since the last line of the log
    best_step: int | None = None
    best: dict[str, float] = field(default_factory=dict)
    lowest: float | None = None  # loss of all validations
    waited: int = 0  # validations since one that was better by either
    saved: list[int] = field(default_factory=list)  # the newest of the steps that the recipe says to save
    weights: list[int] = field(default_factory=list)  # at the end: the steps whose mean the model is
    metrics: dict[str, float] = field(default_factory=dict)  # and what validation gave with it
    finished: bool = False


def train(
    model: nn.Module,
    batches: Batches,
    config: TrainingConfig,
    run: RunFolder | Path,
    *,
    seed: int,
    identity: Mapping[str, Any],
    validate: Validate | None = None,
    best: Best = ("loss", "min"),
    report: Reporter | None = None,
    fork: bool = False,
) -> Outcome:
    """Train a model, or go on where its run was stopped; the model has the final weights afterwards.

    These are the mean of the last ``config.average`` saved steps, unless validation finds it worse than the best step;
    or else those of the best validation, or else the last. With ``config.ema`` the mean over time stands for the
    parameters of a step, in validation too. A run that was finished before gives its outcome at once.

    Args:
        model: an nn.Module that is ``Trainable``; under torchrun all ranks get the first one's parameters.
        batches: what it is trained on.
        config: how.
        run: the run's folder. Only the first rank writes there.
        seed: of dropout and whatever else the model draws.
        identity: the resolved recipe; a run that was begun with another is not continued.
        validate: measures the model, in eval mode and without gradients, every ``config.validate_every`` steps and at
            the end; on the first rank only.
        best: which of the measures chooses the best step, and whether less or more of it is better.
        report: who is told how it goes.
        fork: continue although the recipe has changed; a finished run too, if it now has more steps.

    Raises:
        ValueError: if the recipe has changed, or a batch does not fit in memory, or the loss is no number any more.
        OSError: if the folder is in use, cannot be written, or has no step that is whole.
        Terminated: after SIGTERM; the step was finished and saved.
        KeyboardInterrupt: after Ctrl-C, likewise; a second one stops at once.
    """
    if not callable(getattr(model, "loss", None)):
        raise ValueError(f"expected a model with a loss(batch, smoothing, rdrop) method, not {type(model).__name__}")
    folder = run if isinstance(run, RunFolder) else RunFolder(run)
    machine.remember_few_products()
    with ExitStack() as stack:
        ranks = stack.enter_context(joined())
        if ranks.first:
            stack.enter_context(folder.locked())
        told: Reporter = report if report is not None and ranks.first else Silent()
        training = _Training(model, batches, config, folder, ranks, told, seed)
        if not training.resume(identity, fork):
            for key in ("patience", "goal"):
                if validate is None and (value := getattr(config, key)):
                    raise ValueError(f"training.{key}={value} needs a validation, but there is none")
            machine.keep_memory()
            with plain(config.reference), compiled(*() if config.reference else training.compiled):
                training.run(validate, best)
        return training.outcome()


class _Training:
    """A run in progress."""

    def __init__(
        self,
        model: nn.Module,
        batches: Batches,
        config: TrainingConfig,
        folder: RunFolder,
        ranks: Ranks,
        report: Reporter,
        seed: int,
    ) -> None:
        self.model = model.to(ranks.device)
        self.batches, self.config, self.folder = batches, config, folder
        self.ranks, self.report, self.seed = ranks, report, seed
        self.optimizer = optim.Optimizer(model, config)
        self.mean = optim.Mean(self.optimizer.parameters, config.ema) if config.ema else None
        self.state = _State()
        self.precision: str = config.precision
        self.compiled: list[str] = []  # which operations
        self.clock = time.perf_counter()
        self.logged = (self.clock, 0)  # when, and after how many tokens, the last line of the log was written

    def resume(self, identity: Mapping[str, Any], fork: bool) -> bool:
        """Take up the newest saved step, if there is one. Whether the run is finished already."""
        note = self.report.note
        if self.ranks.first:
            facts = {"the machine": machine.describe(), "the number of processes": str(self.ranks.world)}
            facts["the compiled library"] = native.name()
            choices = {"precision": fastest_precision(), **dict.fromkeys(KINDS, fastest())}
            chosen = self.folder.begin(identity, facts, choices, fork=fork, note=note)
            if self.precision == "auto":
                self.precision = cast(Literal["bf16", "fp32"], chosen["precision"])
            self.compiled = [kind for kind in KINDS if chosen.get(kind) == "compiled"]
            if self.compiled and (why := native.why_not()):
                note(f"{', '.join(self.compiled)}: were compiled and are torch's ({why}): the last bits may differ")
            found = self.folder.newest(self._needs, note)
            self.state = _State(**found) if found else _State()
            step = self.state.step
            self.folder.cut_metrics(step)
            if step:
                for name, tensors in self._tensors().items():
                    # A mean that a fork has asked for begins with the parameters, which were read before it.
                    saved = self.folder.tensors(step, name)
                    copy_into(tensors, saved if saved or name != "mean" else self.optimizer.parameters)
                self._prune()
                note(f"{self.folder.path}: {'finished' if self.state.finished else 'going on'} after step {step:,}")
        told = [self.precision, self.compiled, asdict(self.state)]
        self.precision, self.compiled, stored = self.ranks.share_json(told)
        self.state = _State(**stored)
        for tensors in self._tensors().values():
            self.ranks.share(tensors.values())
        cast(Trainable, self.model).precision = PRECISIONS[self.precision]
        if fork:
            self.state.finished, self.state.waited = self.state.step >= self.config.steps, 0
            if not self.state.finished:  # what the model was to be is decided anew
                self.state.weights, self.state.metrics = [], {}
        return self.state.finished

    def run(self, validate: Validate | None, best: Best) -> None:
        """From here to the end, or to a signal."""
        state, config = self.state, self.config
        self.model.train()
        seconds = self._try_costliest() * config.accumulate * (config.steps - state.step)
        facts = {
            "machine": machine.describe(),
            "precision": self.precision,
            "kernels": "the plain formulas"
            if config.reference
            else "the fast ones (--reference for the plain formulas)",
            "compiled": ", ".join(self.compiled) or "nothing",
            "parameters": f"{sum(p.numel() for p in self.optimizer.parameters.values()):,}",
            "epochs": f"{self._epoch(config.steps):.1f}",
            "time": f"at most about {duration(seconds)} on this machine, validations not counted",
        }
        self.report.start(config.steps, state.step, facts)
        self.logged = (time.perf_counter(), state.tokens)
        with Signals() as signals, self._feed() as feed:
            while not state.finished:
                rate = self._update(feed)
                if state.step % config.log_every == 0 or state.step == config.steps:
                    self._log(rate)
                state.finished = state.step == config.steps
                measured = validate is not None and (state.step % config.validate_every == 0 or state.finished)
                if validate is not None and measured:
                    self._validate(validate, best)
                if validate is not None and state.finished and config.average > 1:
                    self._try_average(validate, best)
                due = measured or state.step % config.save_every == 0 or state.finished
                stop = self.ranks.any(signals.received is not None)
                if due or stop:
                    self._save(due)
                if stop:
                    self.report.note(f"stopped by a signal; step {state.step:,} is saved in {self.folder.path}")
                    raise signals.exception()

    def outcome(self) -> Outcome:
        """Put the final weights into the model and say how it went."""
        state = self.state
        if state.weights:
            chosen = state.weights
        elif self.config.average > 1:
            chosen = state.saved[-self.config.average :]
        else:
            chosen = [state.best_step or state.step]
        tensors = tensors_of(self.model)
        if self.ranks.first:
            for step in chosen:
                if fault := self.folder.fault(step):
                    raise OSError(fault)
            copy_into(tensors, optim.average(self._weights(step) for step in chosen))
        self.ranks.share(tensors.values())
        self.model.eval()
        metrics = state.metrics or state.best
        return Outcome(state.step, state.tokens, state.seconds, state.best_step, metrics, tuple(chosen), self.precision)

    @contextmanager
    def _feed(self) -> Iterator[Iterator[Any]]:
        """This rank's micro-batches from the present step on, the next one made while the present one is used."""
        first = self.state.step * self.config.accumulate
        numbers = (turn * self.ranks.world + self.ranks.rank for turn in count(first))

        def batches() -> Iterator[Any]:
            ahead = pool.submit(self.batches.at, next(numbers))
            while True:
                batch, ahead = ahead.result(), pool.submit(self.batches.at, next(numbers))
                yield self.ranks.place(batch)

        with ThreadPoolExecutor(1, thread_name_prefix="batches") as pool:
            yield batches()

    def _loss(self, batch: Any) -> Loss:
        return cast(Trainable, self.model).loss(batch, smoothing=self.config.smoothing, rdrop=self.config.rdrop)

    def _update(self, feed: Iterator[Any]) -> float:
        """One update of the parameters; the learning rate that it had."""
        state = self.state
        _seed(self.ranks.device, seed_of(self.seed, state.step, self.ranks.rank))
        sums: dict[str, float] = {"count": 0.0, "loss": 0.0}
        for _ in range(self.config.accumulate):
            loss = self._loss(next(feed))
            loss.total.backward()
            sums["count"] += loss.count
            for name, value in {"loss": loss.total, **loss.parts}.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach())
        sums = self.ranks.sums(sums)
        gradients = self.optimizer.gradients()
        self.ranks.add_up(gradients)
        norm, by = optim.shortened(gradients, max(int(sums["count"]), 1), self.config.clip)
        if not (math.isfinite(sums["loss"]) and math.isfinite(norm)):
            self.optimizer.clear()
            raise TrainingError(self._diverged(sums["loss"], norm))
        state.step += 1
        rate = self.optimizer.step(state.step, by)
        if self.mean:
            self.mean.update(state.step)
        state.tokens += int(sums["count"])
        for name, total in {**sums, "grad_norm": norm, "steps": 1.0}.items():
            state.window[name] = state.window.get(name, 0.0) + total
        return rate

    def _validate(self, validate: Validate, best: Best) -> None:
        """Measure the model, on the first rank, and see whether it is the best so far."""
        state = self.state
        begin = time.perf_counter()
        with self.mean.swapped() if self.mean else nullcontext():
            measured = self._measured(validate)
        key, _ = best
        if key not in measured:
            raise ValueError(f"validation gave {', '.join(measured)}, but no {key!r}{nearest(key, measured)}")
        state.waited += 1
        if _better(measured, state.best, best):
            state.best_step, state.best, state.waited = state.step, measured, 0
        loss = measured.get("loss", math.nan)  # at first it falls where BLEU has nothing to tell yet
        if loss < (math.inf if state.lowest is None else state.lowest):
            state.lowest, state.waited = loss, 0
        state.finished |= 0 < self.config.patience <= state.waited
        if goal := self.config.goal:
            state.finished |= measured[key] == goal or _better(measured, {key: goal}, best)
        if self.ranks.first:
            self.folder.log({"step": state.step, "validation": measured})
        self.report.validation(state.step, measured)
        self.logged = (self.logged[0] + time.perf_counter() - begin, self.logged[1])  # the rate is that of training

    def _measured(self, validate: Validate) -> dict[str, float]:
        """What validation gives with the model as it is, on all ranks."""
        measured: dict[str, float] = {}
        if self.ranks.first:
            _seed(self.ranks.device, seed_of(self.seed, self.state.step, -1))  # should the validation draw
            self.model.eval()
            with torch.no_grad():
                measured = {name: float(value) for name, value in validate(self.model).items()}
            self.model.train()
        return cast(dict[str, float], self.ranks.share_json(measured))

    def _try_average(self, validate: Validate, best: Best) -> None:
        """At the end, choose between the mean of the last saved steps and the best step; the parameters stay."""
        state = self.state
        steps = [*state.saved, state.step][-self.config.average :]
        tensors = tensors_of(self.model)
        now = {name: tensor.clone() for name, tensor in tensors.items()}
        if self.ranks.first:
            last = {**now, **(self.mean.values if self.mean else {})}
            earlier = (self._weights(step) for step in steps[:-1])
            copy_into(tensors, optim.average(chain(earlier, [last])))
        measured = self._measured(validate)
        copy_into(tensors, now)
        if _better(state.best, measured, best) and state.best_step is not None:
            state.weights, state.metrics = [state.best_step], state.best
        else:
            state.weights, state.metrics = steps, measured
        told = ", ".join(f"{name} {value:.4g}" for name, value in measured.items())
        kept = "kept" if state.weights == steps else f"worse than step {state.best_step:,}, which is kept"
        self.report.note(f"the mean of {len(steps)} steps has {told}: {kept}")

    def _log(self, rate: float) -> None:
        """One line of metrics.jsonl: means over the tokens, or steps, since the last line."""
        state = self.state
        window, state.window = state.window, {}
        tokens, steps, norm = (window.pop(name) for name in ("count", "steps", "grad_norm"))
        now = time.perf_counter()
        metrics = {
            "epoch": self._epoch(state.step),
            **{name: total / max(tokens, 1.0) for name, total in window.items()},
            "lr": rate,
            "grad_norm": norm / steps,
            "tokens": state.tokens,
            "tokens_per_second": (state.tokens - self.logged[1]) / (now - self.logged[0]),
            "seconds": self._seconds(now),
        }
        self.logged = (now, state.tokens)
        if self.ranks.first:
            self.folder.log({"step": state.step, **metrics})
        self.report.update(state.step, metrics)

    def _save(self, due: bool) -> None:
        """Save this step, and remove those that nobody needs any more.

        Args:
            due: whether the recipe says so; a step that is saved because of a signal is never averaged, so that a run
                that was stopped ends as one that was not.
        """
        state, config = self.state, self.config
        if due:
            state.saved = [*state.saved, state.step][-max(config.keep, config.average) :]
        if not self.ranks.first:
            return
        state.seconds = self._seconds(time.perf_counter())
        self.clock = time.perf_counter()
        self.folder.save(state.step, self._tensors(), asdict(state))
        self._prune()

    def _prune(self) -> None:
        """Keep this step and the last of those that the recipe says to save, so that the run can fall back to them.

        A step that is kept keeps what it needs; one that is damaged needs nothing.
        """
        kept = {self.state.step, *self.state.saved[-self.config.keep :]}
        needed: set[int] = set()
        for step in kept:
            with suppress(OSError, ValueError, KeyError):
                needed.update(self._needs(self.folder.state(step)))
        self.folder.prune(kept | needed)

    def _needs(self, state: Mapping[str, Any]) -> list[int]:
        """The other steps that a run with this state may read again at its end."""
        needed = [state["best_step"]]
        if self.config.average > 1:  # the last of those that are averaged is yet to come, unless this is the end
            needed += state["saved"][-(self.config.average - (not state["finished"])) :]
        return [step for step in needed if step not in (None, state["step"])]

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors that one step hands to the next, by file."""
        groups = {"model": tensors_of(self.model), "optimizer": self.optimizer.tensors()}
        return {**groups, "mean": self.mean.values} if self.mean else groups

    def _weights(self, step: int) -> dict[str, Tensor]:
        """What a saved step offers as a model: the mean over time, where it has one."""
        return {**self.folder.tensors(step, "model"), **self.folder.tensors(step, "mean")}

    def _try_costliest(self) -> float:
        """Forward and backward of the costliest batch: a lack of memory shows now, not hours later. Changes nothing.

        Returns:
            How many seconds it took.
        """
        batch = self.batches.costliest()
        begin = time.perf_counter()
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            with torch.random.fork_rng():
                self._loss(self.ranks.place(batch)).total.backward()
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            raise TrainingError(
                f"the costliest batch does not fit in memory: lower training.batch_tokens (now "
                f"{self.config.batch_tokens}) or the longest row (data.max_len, of a text data.length), and raise "
                "training.accumulate for as large an update"
            ) from error
        finally:
            self.optimizer.clear()
            for buffer, before in buffers:
                buffer.copy_(before)
        return time.perf_counter() - begin

    def _epoch(self, step: int) -> float:
        return step * self.config.accumulate * self.ranks.world / self.batches.per_epoch

    def _seconds(self, now: float) -> float:
        return self.state.seconds + now - self.clock

    def _diverged(self, loss: float, norm: float) -> str:
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient's norm is {norm}"
        saved = self.folder.steps()
        return (
            f"step {self.state.step + 1}: {what}; {f'step {saved[-1]} is saved' if saved else 'no step is saved yet'}. "
            "Try a lower training.learning_rate, a longer training.warmup, or training.precision=fp32"
        )


def _better(one: Mapping[str, float], other: Mapping[str, float], best: Best) -> bool:
    """Whether one validation gave a better value than another, which may not have been."""
    key, direction = best
    if key not in one or math.isnan(one[key]):
        return False
    return key not in other or (one[key] > other[key] if direction == "max" else one[key] < other[key])


def fastest_precision() -> str:
    """What ``training.precision = "auto"`` stands for on this machine."""
    return "bf16" if machine.bf16_products() else "fp32"


def seed_of(seed: int, step: int, rank: int) -> int:
    """The seed of torch's generator for one step of one rank: 64 bits of a hash."""
    return int.from_bytes(sha256(f"{seed} {step} {rank}".encode()).digest()[:8], "big")


def _seed(device: torch.device, seed: int) -> None:
    """torch.manual_seed, which would take half a millisecond to tell devices that a run on the CPU has no use for."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _out_of_memory(error: BaseException) -> bool:
    words = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in words or "can't allocate memory" in words
