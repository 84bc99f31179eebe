"""How a run is told to people: a live bar on a terminal, lines elsewhere, TensorBoard if wanted, a picture at the end.

``reporter`` picks what fits; each is a ``weft.training.report.Reporter``. All goes to stderr: stdout is for results.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from weft.training.distributed import is_first
from weft.training.report import Reporter, Silent
from weft.views import figures

Clock = Callable[[], float]
Curves = Mapping[str, figures.Line]  # what was measured -> at which steps, and its values

_MOST_POINTS = 400  # of a drawn curve: more than a picture's columns can tell apart


@contextmanager
def reporter(out: str | Path, tensorboard: bool = False, stream: TextIO | None = None) -> Iterator[Reporter]:
    """What tells of a run: a bar if the stream is a terminal, else lines; and TensorBoard's files if wanted.

    Of several processes the first tells, the others are silent.

    Args:
        out: the run folder; TensorBoard's files go to its folder ``tensorboard``.
        tensorboard: whether they are written.
        stream: where the bar or the lines go; stderr if None.

    Raises:
        ValueError: if TensorBoard is wanted and not installed.
    """
    if not is_first():
        yield Silent()
        return
    stream = sys.stderr if stream is None else stream
    shown: Reporter = Bar(stream) if stream.isatty() else Lines(stream)
    told = Several([shown, TensorBoard(Path(out) / "tensorboard")]) if tensorboard else shown
    try:
        yield told
    finally:
        told.close()


class Pace:
    """How long a run still takes, from the steps of this process alone: those before a resume took time elsewhere."""

    def __init__(self, total_steps: int, step: int, clock: Clock = time.monotonic) -> None:
        self.total_steps, self.first_step, self._clock, self._begin = total_steps, step, clock, clock()

    def left(self, step: int) -> str:
        """The time left after this step, in words; nothing before the first step and after the last."""
        done = step - self.first_step
        if done <= 0 or step >= self.total_steps:
            return ""
        return f"{duration((self._clock() - self._begin) / done * (self.total_steps - step))} left"


class Lines:
    """A line for each thing told, for logs and pipes."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._pace = Pace(0, 0, clock)

    def start(self, total_steps: int, step: int, facts: Mapping[str, str]) -> None:
        """Tell what is known and where the run begins."""
        self._pace = Pace(total_steps, step, self._clock)
        for name, fact in facts.items():
            self.note(f"{name}: {fact}")
        self.note(f"going on after step {step:,} of {total_steps:,}" if step else f"training for {total_steps:,} steps")

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell all numbers of training, and the time left."""
        self.note(f"{self._place(step)}: {', '.join(self._told(step, metrics))}")

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell what a validation gave."""
        self.note(f"step {step:,}: validation {', '.join(spoken(metrics))}")

    def note(self, text: str) -> None:
        """Tell anything else."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing is open."""

    def _place(self, step: int) -> str:
        return f"step {step:,} of {self._pace.total_steps:,}"

    def _told(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        return [*spoken(metrics), *filter(None, [self._pace.left(step)])]


class Bar(Lines):
    """A live bar with loss, speed and time left. Validations and notes scroll by above it."""

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        super().__init__(stream, clock)
        self._console = Console(file=stream, highlight=False)
        self._bar: Progress | None = None

    def start(self, total_steps: int, step: int, facts: Mapping[str, str]) -> None:
        """Tell what is known and where the run begins, and show the bar."""
        self.close()
        super().start(total_steps, step, facts)
        columns = TextColumn("{task.fields[place]}"), BarColumn(bar_width=24), TextColumn("{task.fields[told]}")
        # Drawn at updates only: no thread beside those that train. stdout stays stdout.
        self._bar = Progress(*columns, console=self._console, auto_refresh=False, redirect_stdout=False)
        self._bar.add_task("", total=total_steps, completed=step, place=self._place(step), told="")
        self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar."""
        if self._bar is not None:
            brief = {key: metrics[key] for key in ("loss", "tokens_per_second") if key in metrics}
            told = " · ".join(self._told(step, brief))
            self._bar.update(self._bar.task_ids[0], completed=step, place=self._place(step), told=told, refresh=True)

    def note(self, text: str) -> None:
        """Tell anything else, above the bar."""
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class TensorBoard(Silent):
    """Every number as a scalar for TensorBoard. What an earlier process wrote past the resumed step is taken back."""

    def __init__(self, folder: Path) -> None:
        try:
            self._make = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError:
            raise ValueError("training.tensorboard needs TensorBoard: pip install tensorboard") from None
        self._folder = folder
        self._writer: Any = None

    def start(self, total_steps: int, step: int, facts: Mapping[str, str]) -> None:
        """Open a file for this process."""
        self.close()
        self._writer = self._make(str(self._folder), purge_step=step + 1 if step else None)
        self._writer.add_text("facts", "\n\n".join(f"{name}: {fact}" for name, fact in facts.items()), step)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of training."""
        self._write("training", step, metrics)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of a validation."""
        self._write("validation", step, metrics)

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, group: str, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)


class Several:
    """Tells several reporters the same."""

    def __init__(self, reporters: Sequence[Reporter]) -> None:
        self._reporters = tuple(reporters)

    def start(self, total_steps: int, step: int, facts: Mapping[str, str]) -> None:
        """Begin, or go on after ``step``."""
        for each in self._reporters:
            each.start(total_steps, step, facts)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell how training goes."""
        for each in self._reporters:
            each.update(step, metrics)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell what a validation gave."""
        for each in self._reporters:
            each.validation(step, metrics)

    def note(self, text: str) -> None:
        """Tell anything else."""
        for each in self._reporters:
            each.note(text)

    def close(self) -> None:
        """Close them all."""
        for each in self._reporters:
            each.close()


def spoken(metrics: Mapping[str, float]) -> list[str]:
    """Metrics as a person reads them: ``loss 3.412``, ``4,310 tokens/s``. What tells nothing to people is left out."""
    parts = []
    for name, value in metrics.items():
        if name == "tokens_per_second":
            parts.append(f"{value:,.0f} tokens/s")
        elif name not in ("step", "tokens", "seconds"):
            parts.append(f"{name.replace('_', ' ')} {value:.4g}")
    return parts


def duration(seconds: float) -> str:
    """A time to two figures that matter: ``45 s``, ``12 min``, ``3 h 05 min``, ``2 d 4 h``."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def draw_curve(metrics: str | Path, picture: str | Path, note: Callable[[str], None] = lambda text: None) -> bool:
    """Draw the course of a run: likelihood in training and validation, BLEU if it was taken, and the learning rate.

    Args:
        metrics: the run's metrics.jsonl.
        picture: the PNG (or SVG, PDF) to write.
        note: told, in a line, if there is no picture and why.

    Returns:
        Whether there is a picture: not without matplotlib, and not of a run without numbers.
    """
    training, validation = _series(Path(metrics))
    plots = _plots(training, validation)
    if not plots:
        note(f"no curve was drawn: {metrics} has no numbers yet")
        return False
    try:
        figure = figures.lines(plots, across="step", caption=_caption(training, validation))
    except ImportError:
        note("no curve was drawn: that needs matplotlib: pip install 'weft[plots]'")
        return False
    figures.save(figure, picture)
    return True


def _series(path: Path) -> tuple[Curves, Curves]:
    """The numbers of training and of validation, each as steps and values by name."""
    training: dict[str, tuple[list[float], list[float]]] = {}
    validation: dict[str, tuple[list[float], list[float]]] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            event = json.loads(line)
        except json.JSONDecodeError:  # the last line is empty, or was cut short
            continue
        into, values = (validation, event["validation"]) if "validation" in event else (training, event)
        for key, value in values.items():
            if value is None:  # what was no number
                continue
            steps, numbers = into.setdefault(key, ([], []))
            steps.append(event["step"])
            numbers.append(value)
    return dict(training), dict(validation)


def _plots(training: Curves, validation: Curves) -> dict[str, dict[str, figures.Line]]:
    # The likelihood, not the smoothed loss, where there is one: only that compares with the validation's.
    learnt = training.get("nll") or training.get("loss")
    drawn = {
        "loss, nats per target token": {"training": learnt, "validation": validation.get("loss")},
        "BLEU": {"validation": validation.get("bleu")},
        "learning rate": {"training": training.get("lr")},
    }
    plots = {up: {name: _thinned(line) for name, line in curves.items() if line} for up, curves in drawn.items()}
    return {up: curves for up, curves in plots.items() if curves}


def _thinned(line: figures.Line) -> figures.Line:
    """The curve with no more points than can be seen: means over neighbours."""
    size = -(-len(line[0]) // _MOST_POINTS)
    x, y = ([sum(part) / len(part) for part in _portions(values, size)] for values in line)
    return x, y


def _portions(values: Sequence[float], size: int) -> list[Sequence[float]]:
    return [values[begin : begin + size] for begin in range(0, len(values), size)]


def _caption(training: Curves, validation: Curves) -> str:
    steps = max(line[0][-1] for line in (*training.values(), *validation.values()))
    told = [f"{steps:,.0f} steps"]
    for key, name, best in (("loss", "loss", min), ("bleu", "BLEU", max)):
        if key in validation:
            x, y = validation[key]
            at = y.index(best(y))
            told.append(f"best validation {name} {y[at]:.4g} at step {x[at]:,.0f}")
    return "; ".join(told)
