"""How a time, or a peak of memory, is taken: the helpers of every benchmark.

Candidates take turns, round after round, so that a busy moment of the machine hits all of them; the
median of the rounds is the figure. A benchmark starts with::

    timing.steady_memory()
    print(timing.header())
    times = timing.alternate({"reference": lambda: …, "tiled": lambda: …})
    print(timing.table({"N = 512": times}, against="reference"))
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter

from weft.kernels import machine
from weft.kernels.machine import MMAP_THRESHOLD, TOP_PAD, TRIM_THRESHOLD

Ways = Mapping[str, Callable[[], object]]

_SHORTEST = 0.02  # seconds a turn must last: a faster callable is called several times, as a training step would


def alternate(ways: Ways, rounds: int = 15, warmup: int = 2, seconds: float | None = None) -> dict[str, float]:
    """The median time of a call of each of the ``ways``, which take turns.

    Args:
        ways: what to call, by name.
        rounds: how often each has its turn.
        warmup: calls of each before the first round.
        seconds: no new round after so long, once there were three; no limit if None.

    Raises:
        ValueError: if there is nothing to time, or no round to time it in.
    """
    if not ways or rounds < 1:
        raise ValueError(f"expected at least one way and one round, not {len(ways)} and {rounds}")
    calls = {name: _calls_needed(call, warmup) for name, call in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # as timeit does: a collection would hit one candidate by chance
    try:
        begin = perf_counter()
        for done in range(rounds):
            if seconds is not None and done >= 3 and perf_counter() - begin > seconds:
                break
            for name in names[done % len(names) :] + names[: done % len(names)]:
                times[name].append(_time(ways[name], calls[name]))
    finally:
        if collecting:
            gc.enable()
    return {name: median(taken) for name, taken in times.items()}


def peak_memory(call: Callable[[], object]) -> int:
    """How many bytes of memory a call needs at its peak, above what was in use before it.

    It is the process' resident memory as Linux counts it, thus with the scratch memory that torch's own
    counters do not see. The peak is reset before the call, and meanwhile every large block comes from the
    system and goes back at once, so that memory which lies free is neither counted nor used unseen. A call
    before that one loads libraries and fills caches that stay. Right to within about a megabyte. Memory is
    steady afterwards (see ``steady_memory``).

    Raises:
        OSError: where Linux's /proc does not tell.
    """
    for parameter, value in ((MMAP_THRESHOLD, 1 << 16), (TRIM_THRESHOLD, 1 << 16), (TOP_PAD, 0)):
        machine.glibc("mallopt", parameter, value)
    try:
        call()
        gc.collect()
        machine.glibc("malloc_trim", 0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # 5: the peak starts from here
        before = _status("VmRSS")
        call()
        return max(0, _status("VmHWM") - before)
    finally:
        steady_memory()


def peak_resident() -> int:
    """The most memory that this process has ever had in use, in bytes.

    Raises:
        OSError: where Linux's /proc does not tell.
    """
    return _status("VmHWM")


def steady_memory() -> bool:
    """Keep freed memory, as training does; once, at the start of a benchmark. All candidates profit alike."""
    return machine.keep_memory()


def header() -> str:
    """The machine, how busy it is, and the commit: the lines above every table."""
    busy = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{machine.describe()}{busy}\ncommit {commit()}"


def commit() -> str:
    """The project's commit, and whether the files differ from it."""
    root = Path(__file__).resolve().parent.parent
    try:
        name, changes = (
            subprocess.run(
                ["git", "-C", str(root), *command], capture_output=True, text=True, check=True
            ).stdout.strip()
            for command in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name} with changes" if changes else name


def table(rows: Mapping[str, Mapping[str, float]], against: str) -> str:
    """A Markdown table of seconds, a row per case and a column per way, with the speed relative to one way.

    Args:
        rows: case -> way -> seconds, as from ``alternate``.
        against: the way whose speed is 1; "2.00×" is twice as fast. A case without it has no such figure.
    """
    ways = list(dict.fromkeys(way for row in rows.values() for way in row))
    lines = [["case", *ways], ["---", *["---:"] * len(ways)]]
    for case, row in rows.items():
        lines.append([case, *(_cell(row, way, against) for way in ways)])
    return markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    """Lines of cells, the second being the rule ("---", "---:"), as a table whose columns stand under each other."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]

    def fill(cell: str, column: int) -> str:
        return cell.rjust(widths[column]) if lines[1][column].endswith(":") else cell.ljust(widths[column])

    return "\n".join(f"| {' | '.join(fill(cell, i) for i, cell in enumerate(line))} |" for line in lines)


def duration(seconds: float) -> str:
    """Seconds with three digits and a unit that fits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def save(path: str | Path, results: Mapping[str, object]) -> None:
    """Write the results as JSON, with the machine and the commit beside them."""
    whole = {"machine": machine.describe(), "commit": commit(), "results": results}
    Path(path).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def _calls_needed(call: Callable[[], object], warmup: int) -> int:
    """How many calls make a measurement long enough for the clock, after the warm-up."""
    for _ in range(warmup):
        call()
    once = _time(call, 1)
    return max(1, round(_SHORTEST / max(once, 1e-9)))


def _time(call: Callable[[], object], calls: int) -> float:
    """The time of one of so many calls."""
    begin = perf_counter()
    for _ in range(calls):
        call()
    return (perf_counter() - begin) / calls


def _cell(row: Mapping[str, float], way: str, against: str) -> str:
    if way not in row:
        return "–"
    return duration(row[way]) + (f" ({row[against] / row[way]:.2f}×)" if against in row else "")


def _status(field: str) -> int:
    """A figure of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
