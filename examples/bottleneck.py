"""Why attention: a recurrent model that must keep the whole source in one state, beside one that may look back.

    python examples/bottleneck.py [--steps 500] [--seed 0] [--save PICTURE.png]

Both reverse sequences of random symbols, are equally wide and see the same pairs. Without attention all that the
decoder knows of the source is the encoder's last state, however long the source was (Sutskever et al. 2014). With it,
the decoder looks at the encoder's states at all positions (Bahdanau et al. 2015). About two minutes on one core.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn

from weft.config import EOS, RecurrentConfig
from weft.data.synthetic import Task
from weft.decoding.greedy import greedy
from weft.models.encoder_decoder import EncoderDecoder
from weft.models.recurrent import Recurrent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUM_SYMBOLS, MIN_LEN, MAX_LEN = 10, 2, 20
DIM = 64  # of the decoder's state, and of the encoder's in each direction
STEPS = 500
WAYS = {"without attention": "none", "with attention": "additive"}


def make(attention: str, task: Task) -> EncoderDecoder:
    """A GRU encoder, in both directions, and a GRU decoder."""
    config = RecurrentConfig.model_validate({"attention": attention, "embed_dim": 32, "dim": DIM, "dropout": 0.0})
    return Recurrent(config, task.vocab_size, task.vocab_size)


def train(model: EncoderDecoder, task: Task, steps: int, seed: int) -> None:
    """Teach the model with Adam; the learning rate rises, then falls to nothing."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=max(steps, 10), pct_start=0.2)
    begin = time.perf_counter()
    for step, batch in enumerate(islice(task.batches(64, seed), steps), start=1):
        loss = model.loss(batch)
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            mean = loss.parts["nll"].item() / loss.count
            print(f"step {step:4d}  loss {mean:.4f}  {time.perf_counter() - begin:5.1f} s", flush=True)


def accuracy(model: EncoderDecoder, length: int, count: int = 100) -> float:
    """The share of held-out sequences of this length that are reversed without a fault, end included."""
    task = Task("reverse", NUM_SYMBOLS, length, length)
    source, target = next(task.batches(count, seed=1, held_out=True))
    said = (found[0] for found in greedy(model, source))
    right = (row[1 : row.index(EOS)] for row in target.tolist())
    faultless: list[bool] = [one.finished and list(one.tokens) == other for one, other in zip(said, right, strict=True)]
    return sum(faultless) / count


def experiment(
    steps: int, seed: int = 0, max_len: int = MAX_LEN, lengths: range | None = None
) -> dict[str, dict[int, float]]:
    """Train both on lengths up to max_len: for each, the accuracy at each length (every other one if None)."""
    task = Task("reverse", NUM_SYMBOLS, MIN_LEN, max_len)
    found = {}
    for name, attention in WAYS.items():
        torch.manual_seed(seed)
        model = make(attention, task)
        print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
        train(model, task, steps, seed)
        found[name] = {n: accuracy(model, n) for n in lengths or range(MIN_LEN, max_len + 1, 2)}
    return found


def draw(found: dict[str, dict[int, float]], steps: int) -> Figure:
    """The accuracies of ``experiment`` as curves."""
    from weft.views import figures

    caption = (
        f"A GRU of {DIM} units learns to reverse up to {MAX_LEN} symbols in {steps} steps of 64 pairs. Without "
        "attention one state must hold the whole source, and what it holds is soon too little. Share of 100 held-out "
        "sequences of each length that are reversed without a fault."
    )
    curves = {name: ([float(n) for n in curve], list(curve.values())) for name, curve in found.items()}
    figure = figures.lines({"reversed without a fault": curves}, "length", caption)
    figure.axes[0].set_xticks(list(next(iter(found.values()))))
    return figure


def main() -> None:
    """Train both, print the table, draw it."""
    parser = argparse.ArgumentParser(description="What attention is for: the same model with and without it.")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of training, 64 pairs each (default: {STEPS})")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sequences (default: 0)")
    parser.add_argument("--save", metavar="PNG", help="also write the curves as a picture")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, not {arguments.steps}")

    found = experiment(arguments.steps, arguments.seed)
    print("\nreversed without a fault\nlength" + "".join(f"{name:>20}" for name in found))
    for length in next(iter(found.values())):
        print(f"{length:6d}" + "".join(f"{curve[length]:20.0%}" for curve in found.values()))
    if arguments.save:
        from weft.views import figures

        figures.save(draw(found, arguments.steps), arguments.save)
        print(f"\nwritten: {arguments.save}")


if __name__ == "__main__":
    main()
