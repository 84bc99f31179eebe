"""A large corpus is tokenised, shuffled and iterated in little memory, and opened at once the next time.

Each measurement is a process of its own, since only there memory tells what this work took::

    python tests/data/test_large.py FOLDER      prepare, shuffle, iterate; prints what it took as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ITERATED = 200  # batches
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]


def word(number: int) -> str:
    """Numbers as words: frequent ones short, each different."""
    found = SYLLABLES[number % len(SYLLABLES)]
    while number := number // len(SYLLABLES):
        found += SYLLABLES[number % len(SYLLABLES)]
    return found


def write_corpus(folder: Path, count: int) -> None:
    """So many different pairs, of 6 to 36 words a side; some words come often and most seldom, as in language."""
    words, random = [word(number) for number in range(60_000)], np.random.default_rng(0)
    with (folder / "text.en").open("w") as source, (folder / "text.de").open("w") as target:
        for start in range(0, count, 10_000):
            block = range(start, min(start + 10_000, count))
            for file, factor in ((source, 1), (target, 7)):
                ends = np.cumsum(random.integers(2, 18, (2, len(block))).sum(0)).tolist()
                drawn = (random.random(ends[-1]) ** 5 * len(words)).astype(int).tolist()
                text = [words[number] for number in drawn]
                lines = zip(block, [0, *ends], ends, strict=False)
                file.writelines(f"{word(factor * n)} {' '.join(text[a:b])} .\n" for n, a, b in lines)


def memory() -> dict[str, int]:
    """Resident memory in bytes: this process's own, and pages of files, which the system takes back at need."""
    found = {}
    for row in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = row.partition(":")
        if name in ("RssAnon", "RssFile"):
            found[name] = int(rest.split()[0]) * 1024
    return found


def measure(folder: Path) -> dict[str, Any]:
    """Seconds and most memory, beyond what the imports took, of each stage."""
    from weft.config import DataConfig, TokenizerConfig
    from weft.data.batching import Batches
    from weft.data.corpora import open_pairs
    from weft.data.store import prepare, split_held_out
    from weft.data.tokenizers import TokenizerPair
    from weft.data.vocabulary import make_pair

    before, peak, done = memory(), dict.fromkeys(memory(), 0), threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            for name, value in memory().items():
                peak[name] = max(peak[name], value - before[name])

    watcher = threading.Thread(target=watch)
    watcher.start()
    clock, report = time.perf_counter(), {}

    def stage(name: str) -> None:
        nonlocal clock
        report[name] = {"seconds": round(time.perf_counter() - clock, 2)} | {n: v // 2**20 for n, v in peak.items()}
        clock = time.perf_counter()

    try:
        pairs = open_pairs([str(folder / "text.en"), str(folder / "text.de")])
        train, held_out = split_held_out(pairs, 1000, folder / "cache")
        if (folder / "tokenizer.json").exists():
            tokenizers = TokenizerPair.load(folder)
        else:
            sides = [[pair[n] for pair in islice(train, 5000)] for n in range(2)]
            tokenizers = make_pair(TokenizerConfig(vocab_size=4000), lambda: sides[0], lambda: sides[1])
            tokenizers.save(folder)
        stage("tokenizer")
        store = prepare(train, tokenizers, DataConfig(), folder / "cache")
        validation = prepare(held_out, tokenizers, DataConfig(), folder / "cache")
        stage("prepare")
        batches = Batches(store, 4096, seed=1)
        batches.at(0)
        stage("first batch")
        for batch in batches.prefetched(range(batches.per_epoch - ITERATED // 2, batches.per_epoch + ITERATED // 2)):
            assert batch.source.numel() <= 4096
        stage("iterate")
    finally:
        done.set()
        watcher.join()
    return {"pairs": len(store), "held_out": len(validation), "says": [store.report(), batches.report()]} | report


def run(folder: Path) -> dict[str, Any]:
    made = subprocess.run([sys.executable, __file__, str(folder)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    print(made.stdout)
    found: dict[str, Any] = json.loads(made.stdout)
    return found


@pytest.mark.parametrize(
    ("lines", "megabytes"),
    [
        # A chunk on its way through the tokenizer takes about 100 MB; all tokens as lists would take as much again.
        pytest.param(50_000, 200, id="50k"),
        pytest.param(5_000_000, 1024, id="5M", marks=pytest.mark.long),
    ],
)
def test_memory_stays_bounded_and_the_second_start_is_quick(lines: int, megabytes: int, tmp_path: Path) -> None:
    write_corpus(tmp_path, lines)
    first, second = run(tmp_path), run(tmp_path)
    assert first["pairs"] + first["held_out"] == second["pairs"] + second["held_out"] == lines
    assert first["says"] == second["says"]
    for made in (first, second):
        assert made["iterate"]["RssAnon"] < megabytes
    start = sum(second[stage]["seconds"] for stage in ("tokenizer", "prepare", "first batch"))
    if lines >= 1_000_000:
        assert start < 5.0
    else:
        assert start < sum(first[stage]["seconds"] for stage in ("tokenizer", "prepare", "first batch"))


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
