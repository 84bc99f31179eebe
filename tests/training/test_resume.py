"""A run that was stopped at any instant ends as one that was not, bit for bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.training import toys
from tests.training.toys import Server, assert_same, everything
from weft.training.checkpoint import RunFolder

KILL = [int(signal.SIGKILL)]
FULL = {"ema": 0.9, "average": 3}
CASES: dict[str, dict[str, Any]] = {
    "gru-fp32": {"model": "gru", "changes": FULL},
    "attention-bf16": {"model": "attention", "changes": {"precision": "bf16", "ema": 0.9}},
}


@pytest.fixture(scope="module")
def unbroken(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcome of a case that nothing disturbs."""

    @cache
    def made(case: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(case)
        assert server.train(folder, **CASES[case]) == 0, (folder / "said").read_text()
        return everything(folder)

    return made


def finish(server: Server, folder: Path, case: str) -> dict[str, Any]:
    assert server.train(folder, **CASES[case]) == 0, (folder / "said").read_text()
    return everything(folder)


@pytest.mark.parametrize("case", CASES)
def test_the_same_command_twice_is_the_same_run(server: Server, tmp_path: Path, unbroken: Any, case: str) -> None:
    assert_same(finish(server, tmp_path, case), unbroken(case))


@pytest.mark.parametrize(
    ("case", "stops"),
    [
        ("gru-fp32", [("mid-save", 2), ("before-rename", 1), ("after-rename", 1), ("mid-step", 5), ("mid-prune", 1)]),
        ("attention-bf16", [("before-latest", 2), ("mid-log", 3), ("after-latest", 2), ("epoch-end", 1)]),
        ("gru-fp32", [("before-sync", 9), ("mid-validation", 1), ("after-update", 7), ("before-checksum", 14)]),
    ],
)
def test_killed_five_times_and_started_again(
    server: Server, tmp_path: Path, unbroken: Any, case: str, stops: list[tuple[str, int]]
) -> None:
    for point, times in stops:
        assert server.train(tmp_path, **CASES[case], stop=(point, times, KILL)) == -signal.SIGKILL, point
    process = server.start(tmp_path, **CASES[case], pause=0.05)
    time.sleep(0.3)
    os.kill(process, signal.SIGKILL)
    assert server.wait(process) == -signal.SIGKILL
    assert_same(finish(server, tmp_path, case), unbroken(case))


@pytest.mark.long
@pytest.mark.parametrize("model", ["gru", "attention", "transformer", "recurrent"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_killed_many_times(server: Server, tmp_path: Path, model: str, precision: str) -> None:
    changes = {"precision": precision, "ema": 0.9, "average": 3, "steps": 40}
    assert server.train(tmp_path / "whole", model=model, changes=changes) == 0
    draw, broken, kills = random.Random(model + precision), tmp_path / "broken", 0
    while kills < 60:
        point, times = draw.choice(list(toys.POINTS)), draw.randint(1, 12)
        stop = None if draw.random() < 0.3 else (point, times, KILL)
        process = server.start(broken, model=model, changes=changes, stop=stop, pause=0.002)
        if stop is None:
            time.sleep(draw.uniform(0.0, 0.4))
            os.kill(process, signal.SIGKILL)
        code = server.wait(process)
        assert code in (0, -signal.SIGKILL), (broken / "said").read_text()
        kills += code != 0
        if code == 0:
            assert_same(everything(broken), everything(tmp_path / "whole"))
            shutil.rmtree(broken)
    assert server.train(broken, model=model, changes=changes) == 0
    assert_same(everything(broken), everything(tmp_path / "whole"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 128 + signal.SIGINT)]
)
@pytest.mark.parametrize("point", ["mid-step", "mid-validation"])
def test_a_signal_saves_the_step_and_the_run_goes_on(
    server: Server, tmp_path: Path, unbroken: Any, number: int, code: int, point: str
) -> None:
    # Step 19 stands between two that are averaged, but is not itself one of those that the recipe says to save.
    stop = (point, 1 if point == "mid-validation" else 19, [number])
    assert server.train(tmp_path, **CASES["gru-fp32"], stop=stop) == code
    run = RunFolder(tmp_path)
    assert run.steps()[-1] == (6 if point == "mid-validation" else 19)
    assert run.fault(run.steps()[-1]) is None
    assert (tmp_path / "latest").read_text() == f"step-{run.steps()[-1]:06d}\n"
    assert_same(finish(server, tmp_path, "gru-fp32"), unbroken("gru-fp32"))


def test_a_second_interrupt_stops_at_once(server: Server, tmp_path: Path, unbroken: Any) -> None:
    stop = ("mid-step", 10, [signal.SIGINT, signal.SIGINT])
    assert server.train(tmp_path, **CASES["gru-fp32"], stop=stop) == 130
    assert RunFolder(tmp_path).steps()[-1] == 8
    assert_same(finish(server, tmp_path, "gru-fp32"), unbroken("gru-fp32"))


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "mean.safetensors", "state.json"])
def test_a_flipped_byte_is_found_and_the_step_before_taken(
    server: Server, tmp_path: Path, unbroken: Any, name: str
) -> None:
    assert server.train(tmp_path, **CASES["gru-fp32"], stop=("mid-step", 18, KILL)) == -signal.SIGKILL
    assert RunFolder(tmp_path).steps()[-1] == 16
    file = tmp_path / "step-000016" / name
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert_same(finish(server, tmp_path, "gru-fp32"), unbroken("gru-fp32"))


def test_a_second_trainer_is_kept_out(server: Server, tmp_path: Path, unbroken: Any) -> None:
    first = server.start(tmp_path, **CASES["gru-fp32"], pause=0.05)
    while not (tmp_path / "run.json").exists():
        time.sleep(0.01)
    second = server.start(tmp_path, **CASES["gru-fp32"])
    assert server.wait(second) == 1
    assert f"process {first} is training here" in (tmp_path / "said").read_text()
    assert server.wait(first) == 0
    assert_same(everything(tmp_path), unbroken("gru-fp32"))


def test_a_finished_run_gives_its_outcome_again(server: Server, tmp_path: Path, unbroken: Any) -> None:
    finish(server, tmp_path, "gru-fp32")
    before = json.loads((tmp_path / "outcome.json").read_text())
    for made in ("outcome.json", "final.safetensors"):
        (tmp_path / made).unlink()
    assert_same(finish(server, tmp_path, "gru-fp32"), unbroken("gru-fp32"))
    assert json.loads((tmp_path / "outcome.json").read_text()) == before
