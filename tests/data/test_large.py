"""A large corpus is tokenised, shuffled and trained on in little memory, and training begins at once the next time.

Each measurement is a process of its own, since only there memory tells what this work took::

    python tests/data/test_large.py FOLDER OUT      train a little on FOLDER's text; prints what it took as JSON
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.training.report import Silent

STEPS = 60
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


class Watch(Silent):
    """Follows a training: when it begins to update the model, and the most memory up to there and in all."""

    def __init__(self) -> None:
        self.before, self.peak, self.done = memory(), dict.fromkeys(memory(), 0), threading.Event()
        self.stages: dict[str, dict[str, int]] = {}
        self.notes: list[str] = []
        self.started = math.nan

    def follow(self) -> None:
        while not self.done.wait(0.02):
            for name, value in memory().items():
                self.peak[name] = max(self.peak[name], value - self.before[name])

    def stage(self, name: str) -> None:
        self.stages[name] = {kind: value // 2**20 for kind, value in self.peak.items()}

    def start(self, total_steps: int, step: int, facts: Mapping[str, str]) -> None:
        self.started = time.time()
        self.stage("start")

    def note(self, text: str) -> None:
        self.notes.append(text)


def measure(folder: Path, out: Path) -> dict[str, Any]:
    """Train a small model on the corpus, and say when the first update came and how much memory was taken, in MB."""
    from weft.config import Recipe
    from weft.training import translation

    recipe = Recipe.make(
        {
            "data": {"train": f"{folder}/text.en,{folder}/text.de", "held_out": 1000},
            "tokenizer": {"vocab_size": 4000},
            "model": {"dim": 64, "num_heads": 2, "ffn_dim": 128, "encoder_layers": 1, "decoder_layers": 1},
            "training": {"steps": STEPS, "validate_every": STEPS, "batch_tokens": 2048, "bleu": False},
        },
        [],
    )
    watch = Watch()
    watcher = threading.Thread(target=watch.follow)
    watcher.start()
    try:
        translation.train(recipe, out, watch)
        watch.stage("train")
    finally:
        watch.done.set()
        watcher.join()
    return {"started": watch.started, "notes": watch.notes, **watch.stages}


def run(folder: Path, out: str) -> dict[str, Any]:
    """Measure in a process of its own; "seconds" counts from its start, imports and all, to the first update."""
    environment = os.environ | {"WEFT_CACHE": str(folder / "cache")}
    begin = time.time()
    words = [sys.executable, __file__, str(folder), str(folder / out)]
    made = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert made.returncode == 0, made.stderr
    found: dict[str, Any] = json.loads(made.stdout)
    found["seconds"] = found["started"] - begin
    print(found)
    return found


@pytest.mark.parametrize(
    ("lines", "start", "train"),
    [
        pytest.param(50_000, 230, 420, id="50k"),
        pytest.param(5_000_000, 1024, 1024, id="5M", marks=pytest.mark.long),
    ],
)
def test_memory_stays_bounded_and_the_second_start_is_quick(lines: int, start: int, train: int, tmp_path: Path) -> None:
    """What a quiet machine takes for the second start is in docs/results.md; -s prints it.

    Up to the first update it is much the same each time, 162 to 170 MB for the smaller corpus; what glibc keeps of the
    updates after it is more or less as its pieces happen to fit: 227 to 351 MB at most in 22 runs.
    """
    write_corpus(tmp_path, lines)
    first, second = run(tmp_path, "first"), run(tmp_path, "second")
    told = [note for note in second["notes"] if note.startswith(("training: ", "validation: "))]
    assert [f"{lines - 1000:,} pairs" in told[0], "1,000 pairs" in told[1]] == [True, True]
    assert [note for note in first["notes"] if note in told] == told
    for made in (first, second):
        assert made["start"]["RssAnon"] < start
        assert made["train"]["RssAnon"] < train
    assert second["seconds"] < first["seconds"] / (20 if lines >= 1_000_000 else 1)


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), Path(sys.argv[2]))))
