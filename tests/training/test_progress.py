"""What a run tells: the time left, lines in a pipe, a bar on a terminal, TensorBoard's scalars, the picture."""

from __future__ import annotations

import builtins
import io
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.training import progress
from weft.training.progress import Bar, Lines, Pace, TensorBoard, draw_curve, duration, reporter
from weft.views import figures

METRICS = {"epoch": 1.0, "loss": 3.41234, "lr": 5e-4, "tokens": 9000.0, "tokens_per_second": 4310.4, "seconds": 2.0}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n")


def test_the_time_left_counts_from_this_process_own_steps() -> None:
    clock = Clock()
    pace = Pace(1000, 400, clock)
    assert pace.left(400) == ""
    clock.now += 50
    assert pace.left(500) == "4 min left"  # 100 steps in 50 s, 500 to go
    assert pace.left(410) == "49 min left"
    assert pace.left(1000) == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "0 s"),
        (45, "45 s"),
        (89, "89 s"),
        (91, "2 min"),
        (3540, "59 min"),
        (3599, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_lines_tell_everything_in_order() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = Lines(stream, clock)
    lines.note("29,000 pairs")
    lines.start(2000, 0, {"machine": "a CPU"})
    clock.now += 60
    lines.update(1000, METRICS)
    lines.validation(1000, {"loss": 2.0, "bleu": 12.34567})
    lines.close()
    assert stream.getvalue().splitlines() == [
        "29,000 pairs",
        "machine: a CPU",
        "training for 2,000 steps",
        "step 1,000 of 2,000: epoch 1, loss 3.412, lr 0.0005, 4,310 tokens/s, 60 s left",
        "step 1,000: validation loss 2, bleu 12.35",
    ]


def test_a_resumed_run_says_where_it_goes_on() -> None:
    stream = io.StringIO()
    Lines(stream).start(2000, 500, {})
    assert stream.getvalue() == "going on after step 500 of 2,000\n"


def test_the_bar_shows_loss_speed_and_time_left_and_lets_notes_pass() -> None:
    stream, clock = Terminal(), Clock()
    bar = Bar(stream, clock)
    bar.note("[bold]said[/bold] before")  # what looks like markup is text
    bar.start(2000, 0, {"machine": "a CPU"})
    clock.now += 60
    bar.update(1000, METRICS)
    bar.validation(1000, {"bleu": 12.34567})
    bar.close()
    bar.close()
    bar.note("after")
    told = plain(stream.getvalue())
    assert "[bold]said[/bold] before" in told
    assert "step 1,000: validation bleu 12.35" in told
    shown = [line for line in told.splitlines() if line.startswith("step 1,000 of 2,000")]
    assert shown
    assert all(line.endswith("loss 3.412 · 4,310 tokens/s · 60 s left") for line in shown)
    assert "━" in shown[0]
    assert told.rstrip().endswith("after")


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines(tmp_path: Path) -> None:
    with reporter(tmp_path, stream=Terminal()) as told:
        assert type(told) is Bar
    with reporter(tmp_path, stream=io.StringIO()) as told:
        assert type(told) is Lines


def test_the_bar_is_closed_whatever_happens(tmp_path: Path) -> None:
    stream = Terminal()
    with pytest.raises(RuntimeError), reporter(tmp_path, stream=stream) as told:  # noqa: PT012
        told.start(10, 0, {})
        raise RuntimeError
    assert stream.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


class Writer:
    """What torch.utils.tensorboard.SummaryWriter would have been told."""

    made: list[Writer]

    def __init__(self, folder: str, purge_step: int | None) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.scalars: list[tuple[str, float, int]] = []
        self.closed = 0
        Writer.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, text: str, step: int) -> None:
        self.text = text

    def close(self) -> None:
        self.closed += 1


def test_tensorboard_gets_every_number_and_the_lines_are_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Writer.made = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    stream = io.StringIO()
    with reporter(tmp_path, tensorboard=True, stream=stream) as told:
        told.note("before")
        told.start(10, 4, {"machine": "a CPU"})
        told.update(5, {"loss": 2.0, "lr": 0.1})
        told.validation(5, {"bleu": 3.0})
        told.close()
    (writer,) = Writer.made
    assert writer.folder == str(tmp_path / "tensorboard")
    assert writer.purge_step == 5  # what was written past step 4 does not count any more
    assert writer.scalars == [("training/loss", 2.0, 5), ("training/lr", 0.1, 5), ("validation/bleu", 3.0, 5)]
    assert writer.text == "machine: a CPU"
    assert writer.closed == 1
    told_lines = stream.getvalue().splitlines()
    assert [line.split(":")[0] for line in told_lines] == [
        "before",
        "machine",
        "going on after step 4 of 10",
        "step 5 of 10",
        "step 5",
    ]


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        TensorBoard(tmp_path)


def write(path: Path, events: list[dict[str, Any]], torn: str = "") -> Path:
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + torn, encoding="utf-8")
    return path


def test_the_curve_draws_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}

    def lines(plots: Any, across: str, caption: str) -> Any:
        drawn.update(plots=plots, caption=caption)
        return SimpleNamespace(savefig=lambda *a, **k: None)

    monkeypatch.setattr(figures, "lines", lines)
    events: list[dict[str, Any]] = [
        {"step": 10, "loss": 4.0, "nll": 3.5, "lr": 0.1},
        {"step": 20, "loss": 3.0, "nll": 2.5, "lr": 0.2},
        {"step": 20, "validation": {"loss": 2.6, "bleu": 7.0}},
        {"step": 30, "validation": {"loss": 2.8, "bleu": 9.0}},
    ]
    assert draw_curve(write(tmp_path / "m.jsonl", events, torn='{"step": 4'), tmp_path / "c.png")
    assert drawn["plots"] == {
        "loss, nats per target token": {
            "training": ([10, 20], [3.5, 2.5]),  # without the smoothing, as in the validation
            "validation": ([20, 30], [2.6, 2.8]),
        },
        "BLEU": {"validation": ([20, 30], [7.0, 9.0])},
        "learning rate": {"training": ([10, 20], [0.1, 0.2])},
    }
    assert drawn["caption"] == "30 steps; best validation loss 2.6 at step 20; best validation BLEU 9 at step 30"


def test_long_curves_are_thinned_by_means() -> None:
    x, y = progress._thinned(([float(n) for n in range(801)], [float(n % 2) for n in range(801)]))
    assert len(x) == len(y) == 267
    assert x[:2] == [1.0, 4.0]
    assert x[-1] == 799.0
    assert y[0] == pytest.approx(1 / 3)
    short = ([1.0, 2.0], [3.0, 4.0])
    assert progress._thinned(short) == short


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    events = [{"step": n, "loss": 1 / n, "lr": 0.1} for n in range(1, 30)]
    assert draw_curve(write(tmp_path / "m.jsonl", events), tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_numbers_or_matplotlib_there_is_a_note_and_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    assert not draw_curve(write(tmp_path / "m.jsonl", []), tmp_path / "curve.png", notes.append)
    really = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return really(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert not draw_curve(write(tmp_path / "m.jsonl", [{"step": 1, "loss": 1.0}]), tmp_path / "curve.png", notes.append)
    assert "no numbers" in notes[0]
    assert "weft[plots]" in notes[1]
    assert not (tmp_path / "curve.png").exists()


def test_a_curve_leaves_out_what_was_no_number(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": 2.0},
        {"step": 1, "validation": {"loss": None, "bleu": 1.0}},
        {"step": 2, "loss": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert draw_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
