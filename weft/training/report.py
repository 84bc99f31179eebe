"""What a training run tells while it runs, and to whom it tells it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol


class Reporter(Protocol):
    """Whoever shows a run: a bar in a terminal, lines in a log, a test.

    The loop calls ``start`` once, before the first update. Notes may come at any time, before ``start`` too; a run
    that was finished before has notes only. Whoever made the reporter closes it, however the run ended.
    """

    def start(self, total_steps: int, step: int, facts: Mapping[str, str]) -> None:
        """The run goes from ``step`` (0, or where it was resumed) to ``total_steps``; facts are for its first lines."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """What was written to metrics.jsonl, every ``training.log_every`` steps.

        Among the metrics: epoch, loss (per target token), its parts such as nll, lr, grad_norm, tokens (so far), and of
        the clock tokens_per_second and seconds.
        """

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """What the validation after this step gave."""

    def note(self, text: str) -> None:
        """One line for people: a warning, where the run goes on, why it stops."""

    def close(self) -> None:
        """Nothing more will come."""


class Silent:
    """A reporter that shows nothing."""

    def start(self, total_steps: int, step: int, facts: Mapping[str, str]) -> None:
        """Show nothing."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show nothing."""

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


def every(count: int, what: str, report: Reporter) -> Callable[[int], None]:
    """Tells the reporter of every so many things that were done, when called with how many there are so far."""
    told = 0

    def tell(done: int) -> None:
        nonlocal told
        if done >= told + count:
            told = done
            report.note(f"{done:,} {what}")

    return tell
