"""What a training run does about SIGTERM and Ctrl-C: it ends its step and saves before it goes."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any


class Terminated(SystemExit):
    """SIGTERM came, and the run has been saved. Uncaught it gives the exit code that a shell expects, 143."""

    def __init__(self) -> None:
        """With that code."""
        super().__init__(128 + signal.SIGTERM)


class Signals(AbstractContextManager["Signals"]):
    """While inside, SIGTERM and Ctrl-C only leave their number here; a Ctrl-C after that stops at once.

    Attributes:
        received: the signal that came, None if none did.
    """

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        """Begin to listen. Python allows it in the main thread only; elsewhere signals do what they did."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        """Let signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def exception(self) -> BaseException:
        """What to raise once all is saved; on a rank that only heard of a signal, as if it were SIGTERM."""
        return KeyboardInterrupt() if self.received == signal.SIGINT else Terminated()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
