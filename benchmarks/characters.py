"""nanoGPT's character model for a CPU, trained to its end: weft's recipe beside the best peer's of the same size.

    python -m benchmarks.characters [--steps 400] [--turns 2] [--json FILE]

The peer is the fastest of those that can run here, found by a race. It trains as nanoGPT does: 2,000 updates of 12
windows of 64 characters by AdamW, at 1e-3 after a warm-up of 100 and down to a tenth along a cosine, gradients cut at
1 (but weight decay is for all parameters). weft trains its recipe shakespeare-char-small for ``--steps``. They take
turns. weft's time is that of everything, from the recipe to the written model; the peer's that of its updates alone,
compiled before. Both are measured by nanoGPT's estimate on the same windows.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import cos, pi
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks import timing, training
from benchmarks.contestants import Contestant, Plain, Way, race, taking_part
from benchmarks.peers import Case
from weft.config import Recipe, find_recipe
from weft.data.batching import Batch
from weft.data.packing import TokenBatch, sampled
from weft.evaluation import language as evaluation
from weft.training import language
from weft.training.report import Silent

WANTED, SHARE = 1.88, 1 / 3  # of validation loss, and of the peer's time
STEPS, WARMUP, RATE = 2000, 100, 1e-3  # nanoGPT's, and so is the rest of its AdamW
ADAMW = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
ROUNDS = 30  # of the race


def peer_rate(step: int) -> float:
    """nanoGPT's learning rate of update 1, 2, …"""
    if step < WARMUP:
        return RATE * step / WARMUP
    return RATE * (0.1 + 0.9 * (1 + cos(pi * (step - WARMUP) / (STEPS - WARMUP))) / 2)


def train_peer(way: Way, case: Case, data: language.Prepared, steps: int = STEPS) -> tuple[float, float]:
    """Seconds of all updates, and nanoGPT's estimate afterwards."""
    contestant = way.start(case)
    assert isinstance(contestant, Plain)
    contestant.loss(*_sides(data.batches.at(0)), 0.0).backward()  # compiles, if it is to be compiled
    contestant.optimizer.zero_grad()
    for group in contestant.optimizer.param_groups:
        group.update(ADAMW)
    begin = perf_counter()
    for step in range(1, steps + 1):
        for group in contestant.optimizer.param_groups:
            group["lr"] = peer_rate(step)
        contestant.loss(*_sides(data.batches.at(step - 1)), 0.0).backward()
        torch.nn.utils.clip_grad_norm_(contestant.model.parameters(), 1.0)
        contestant.optimizer.step()
        contestant.optimizer.zero_grad(set_to_none=True)
    seconds = perf_counter() - begin
    contestant.model.eval()
    with torch.no_grad():
        windows = [Batch(*_sides(batch)) for batch in sampled(data.validation, case.rows, case.length, 200, seed=1)]
        total = sum(float(contestant.nll(batch)) for batch in windows)
    return seconds, total / (len(windows) * case.rows * case.length)


def train_weft(recipe: Recipe) -> tuple[float, float]:
    """Seconds from the recipe to the written model, and nanoGPT's estimate of that."""
    with tempfile.TemporaryDirectory() as place:
        begin = perf_counter()
        language.train(recipe, Path(place) / "run", Silent())
        seconds = perf_counter() - begin
        return seconds, evaluation.evaluate_folder(Path(place) / "run", nanogpt=True).nll


def fastest_peer(case: Case, data: language.Prepared, compiled: bool = True) -> tuple[Way, dict[str, float]]:
    """The peer with the shortest update, and what each one's took."""
    some = [Batch(*_sides(data.batches.at(number))) for number in range(training.BATCHES)]
    with ExitStack() as ends:
        entered = (Contestant(way, case, some) for way in taking_part(compiled))
        times, _ = race([ends.enter_context(one) for one in entered], ROUNDS)
    theirs = {way: seconds for way, seconds in times.items() if way.who != "weft"}
    return min(theirs, key=lambda way: theirs[way]), {str(way): seconds for way, seconds in times.items()}


def _sides(batch: TokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.tokens[:, :0], batch.tokens


def main(words: Sequence[str] | None = None) -> None:
    """Train them in turns and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400, help="of weft's recipe")
    parser.add_argument("--peer-steps", type=int, default=STEPS, help="fewer only to try this out")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="leave compiled peers out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(words)
    timing.steady_memory()
    print(timing.header())
    keys = {"steps": options.steps, "validate_every": options.steps, "save_every": options.steps, "samples": 0}
    recipe = find_recipe("shakespeare-char-small", [f"--training.{key}={value}" for key, value in keys.items()])
    data = language.prepared(recipe, Silent())
    case = next(case for case in training._CASES if case.name == "gpt-small")
    case = replace(case, vocab_size=data.tokenizer.vocab_size)
    way, race = fastest_peer(case, data, not options.no_compile)
    print("an update: " + ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in race.items()))
    found: dict[str, list[tuple[float, float]]] = {"weft": [], str(way): []}
    for _ in range(options.turns):
        found["weft"].append(train_weft(recipe))
        found[str(way)].append(train_peer(way, case, data, options.peer_steps))
        for name, steps in (("weft", options.steps), (str(way), options.peer_steps)):
            seconds, loss = found[name][-1]
            print(f"{name}: {steps:,} steps in {seconds:.1f} s, validation loss {loss:.4f}", flush=True)
    ours, theirs = (median(seconds for seconds, _ in found[name]) for name in found)
    loss = max(loss for _, loss in found["weft"])
    print(f"weft's loss {loss:.4f}: {'met' if loss <= WANTED else 'missed'} (at most {WANTED})")
    print(f"weft's time {ours / theirs:.2f} of the peer's: {'met' if ours <= SHARE * theirs else 'missed'} (a third)")
    results: dict[str, Any] = {"race": race, "runs": found, "steps": [options.steps, options.peer_steps]}
    if options.json:
        timing.save(options.json, results)


if __name__ == "__main__":
    main()
