"""How times and memory are taken, and what the three ways are found to be."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import kernels, three_ways, timing

ROOT = Path(__file__).resolve().parent.parent


class Clock:
    """A clock that goes on only while something is called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def takes(self, name: str, *seconds: float) -> Callable[[], None]:
        """A callable that takes so long: first the first, then the second, …; the last for ever."""
        left = list(seconds)

        def call() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "perf_counter", lambda: clock.now)
    return clock


def test_candidates_take_turns_and_the_median_counts(clock: Clock) -> None:
    # a call to warm up, one to see how long it takes, then the rounds: what happens once does not count
    ways = {"slow": clock.takes("slow", 9, 2, 2, 50, 2), "fast": clock.takes("fast", 9, 1)}
    assert timing.alternate(ways, rounds=3, warmup=1) == {"slow": 2, "fast": 1}
    assert clock.calls == ["slow", "slow", "fast", "fast", "slow", "fast", "fast", "slow", "slow", "fast"]
    assert gc.isenabled()


def test_no_round_begins_when_time_is_up(clock: Clock) -> None:
    timing.alternate({"one": clock.takes("one", 1)}, rounds=100, warmup=0, seconds=0.5)
    assert len(clock.calls) == 1 + 3
    timing.alternate({"one": clock.takes("two", 1)}, rounds=100, warmup=0, seconds=9.5)
    assert clock.calls.count("two") == 1 + 10
    with pytest.raises(ValueError, match="at least one way and one round, not 0 and 15"):
        timing.alternate({})


def test_fast_callables_are_called_often_enough() -> None:
    found = timing.alternate({"nothing": lambda: None, "sleep": lambda: time.sleep(0.002)}, rounds=3)
    assert found["nothing"] < 1e-5
    assert 0.002 <= found["sleep"] < 0.1


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
@pytest.mark.parametrize("steady", [False, True])
def test_peak_memory_is_what_a_call_holds_at_once(steady: bool) -> None:
    program = f"""
import torch
from benchmarks.timing import peak_memory, steady_memory
if {steady}:
    steady_memory()
size = 8 << 20  # in float32 32 MB
def one():
    torch.ones(size).sum()
def two():
    (torch.ones(size) + 1).sum()
def after():  # what was free after the first has no room for the second, and something stands behind it
    first = torch.ones(size)
    between = torch.ones(100)
    del first
    torch.ones(size + size // 4).sum()
kept = []
def keep():
    kept.append(torch.ones(size))
print(*(round(peak_memory(call) / 2**20, 1) for call in (one, two, after, lambda: None, keep)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [float(figure) for figure in done.stdout.split()] == pytest.approx([32, 64, 40, 0, 32], abs=2)


def test_steady_memory_ends_page_faults() -> None:
    program = """
import resource, torch
from benchmarks.timing import steady_memory
told = steady_memory()
x = torch.ones(20 << 20)  # 80 MB
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        x.exp().exp()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(int(told), faults())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    told, faults = map(int, done.stdout.split())
    if not told:
        pytest.skip("no glibc")
    assert faults < 100  # of 120,000 pages


def test_the_table_of_times() -> None:
    rows = {"N = 8": {"plain": 2e-3, "fast": 1e-3}, "N = 16": {"fast": 5e-6}}
    assert timing.table(rows, against="plain").splitlines() == [
        "| case   |        plain |         fast |",
        "| ---    |         ---: |         ---: |",
        "| N = 8  | 2 ms (1.00×) | 1 ms (2.00×) |",
        "| N = 16 |            – |         5 µs |",
    ]
    assert [timing.duration(t) for t in (2.5, 0.01234, 3.3e-5, 4e-8)] == ["2.5 s", "12.3 ms", "33 µs", "40 ns"]


def test_the_header_names_the_machine_and_the_commit(tmp_path: Path) -> None:
    assert f"torch {torch.__version__}" in timing.header()
    assert f"commit {timing.commit()}" in timing.header()
    timing.save(tmp_path / "out.json", {"time": 1.5})
    saved = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert saved["results"] == {"time": 1.5}
    assert set(saved) == {"machine", "commit", "results"}


class Neighbours(nn.Module):
    """Sees so many positions back, by hand."""

    def __init__(self, back: int) -> None:
        super().__init__()
        self.back = back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, (0, 0, self.back, 0))
        return sum(padded[:, k : k + x.shape[1]] * (k + 1) for k in range(self.back + 1))  # type: ignore[return-value]


@pytest.mark.parametrize("back", [1, 3, 5])
def test_reach_is_how_far_a_layer_sees(back: int) -> None:
    layer = Neighbours(back)
    assert three_ways.reach(layer, 12, dim=4) == back
    way = three_ways.Way(layer, layer, layer, layer)
    layers = three_ways.path_length(way, 12, dim=4)
    # so many on top of each other do reach the first, and one less does not
    for count, reached in ((layers, True), (layers - 1, False)):
        stacked = nn.Sequential(*[layer] * count)
        assert (three_ways.reach(stacked, 12, dim=4) == 11) == reached


def test_the_three_ways_are_what_they_are() -> None:
    three = three_ways.ways(dim=16)
    found = {
        name: (
            three_ways.path_length(way, 33, dim=16),
            three_ways.in_a_row(way, 33, dim=16),
            three_ways.works_on(way.both_sides, dim=16),
        )
        for name, way in three.items()
    }
    assert found == {
        "recurrence": (32, 33, "ordered sequences"),
        "convolution": (8, 1, "grids"),  # 32 positions, 4 a layer
        "self-attention": (1, 1, "sets"),
    }
    assert three_ways.works_on(nn.Linear(4, 4), dim=4) == "sets"
    assert three_ways.works_on(Neighbours(2), dim=4) == "grids"
    assert three_ways.works_on(lambda x: x.cumsum(1) + torch.arange(x.shape[1])[:, None], dim=4) == "ordered sequences"


def test_the_program_prints_a_table_and_writes_what_was_asked_for(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks.three_ways", *arguments]
        return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=ROOT)

    out, numbers = tmp_path / "out.png", tmp_path / "out.json"
    done = run("--lengths", "8", "16", "--out", str(out), "--json", str(numbers))
    assert done.returncode == 0, done.stderr
    assert "| length | way " in done.stdout
    assert "works on: recurrence ordered sequences, convolution grids, self-attention sets" in done.stdout
    rows = json.loads(numbers.read_text(encoding="utf-8"))["results"]["rows"]
    assert [(row["length"], row["way"], row["path"]) for row in rows] == [
        (8, "recurrence", 7),
        (8, "convolution", 2),
        (8, "self-attention", 1),
        (16, "recurrence", 15),
        (16, "convolution", 4),
        (16, "self-attention", 1),
    ]
    assert all(row["seconds"] > 0 for row in rows)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert run("--lengths", "1").returncode == 2


def test_the_kernels_are_timed_and_targets_that_are_missed_can_fail_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.kernels", "--only", "attention", "--lengths", "16", "--seconds", "0"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "out.json")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "attention at length 16" in done.stdout
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
    assert all({"picked", "tiled", "sdpa", "plain"} == set(row) for row in results.values())
    targets = kernels.Targets()
    targets.at_least("something", 2.0, 1.5)
    assert targets.missed == 0
    targets.at_least("something else", 1.0, 1.5)
    assert targets.missed == 1
    assert targets.lines[1].startswith("MISSED")


def test_what_recording_costs_is_printed(tmp_path: Path) -> None:
    numbers = tmp_path / "out.json"
    arguments = ["--rows", "2", "--length", "4", "--rounds", "1", "--json", str(numbers)]
    command = [sys.executable, "-m", "benchmarks.recording", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(numbers.read_text(encoding="utf-8"))["results"]
    assert len(found) == 3 * 4
    # Rows × heads × queries × keys × 4 bytes: of one cross-attention; of all; in a search one more step, to the end.
    one = 2 * 4 * 4 * 4 * 4
    assert found["greedy: unwatched"]["kept"] == 0
    assert found["greedy: one layer"]["kept"] == 2 * 4 * 5 * 4 * 4
    assert found["forward and backward: all layers"]["kept"] == one * 12
    assert found["beam 5: all layers"]["kept"] == one * 4 + 4 * 2 * 4 * 5 * (5 + 4) * 4


def test_bleu_by_length_is_that_of_the_sentences_of_the_length() -> None:
    from benchmarks.ladder import by_length
    from weft.evaluation.translation import score

    sources = ["a b c", "a " * 9, "b " * 10, "c " * 30]
    said = ["x y z w", "x y z w v", "y y y z w", "q q q q"]
    wanted = [["x y z w"], ["x y z w u"], ["y y z z w"], ["q q q r"]]
    found = by_length(sources, said, wanted, "none")
    assert list(found) == [1, 9, 22]
    assert found[1] == pytest.approx(100.0)
    assert found[9] == score(said[1:3], wanted[1:3], "none").bleu
    assert found[22] == score(said[3:], wanted[3:], "none").bleu
