"""Draws the pictures of docs/pictures/.

    python -m docs.pictures [name …]      all of them, or the named ones

A function per picture, named as its file. Seeds are fixed. ``alignment``, ``bottleneck``, ``heads`` and ``reverse``
train the models of the examples first; ``three_ways`` is measured and drawn by its benchmark.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from examples import alignment as translation
from examples import bottleneck as one_state
from examples import reverse as reversal
from weft.data.synthetic import EOS, FIRST
from weft.layers import masks as named
from weft.layers.blocks import BlockConfig, EncoderBlock
from weft.layers.positions import Sinusoidal
from weft.layers.recurrent import RecurrentEncoder
from weft.layers.scores import SelfAttention
from weft.views import figures
from weft.views.matrix import Matrix, of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent / "pictures"


def reverse() -> Figure:
    """Where the example's Transformer looks while it reverses a word."""
    _, matrix = reversal.look(_reverser(), reversal.WORD)
    matrix.caption = (
        f"A Transformer reverses “{reversal.WORD}”: where it looked (across) for each letter that it said (down). "
        "It was taught the letters, never where to look. Cross attention, mean of 2 heads, after the softmax."
    )
    return figures.heat_map(matrix)


def heads() -> Figure:
    """Each head of the three attentions of the same model."""
    model, word = _reverser(), reversal.WORD
    source = torch.tensor([[FIRST + ord(letter) - ord("a") for letter in word] + [EOS]])
    with weft.record(model) as seen:
        said = [reversal.spell(token) for token in model.reverse(source)[0].tolist()]
    start, end = "▸", "■"
    read, heard, said = [*word, end], [start, *said[:-1]], [*said[:-1], end]
    sides = {
        "encoder.attention": (read, read),
        "decoder.attention": (heard, heard),
        "decoder.cross_attention": (said, read),
    }
    panels = []
    for number in range(2):
        for name, (down, across) in sides.items():
            head = of(seen.calls(name), head=number)
            panels.append(Matrix(head.weights, down, across, head.allowed, f"{name}, head {number + 1}"))
    caption = (
        "The two heads of each attention, after the softmax. Encoder: queries, keys and values from what is read. "
        "Decoder: from what was said so far; hatched: the future, which a step may not see. Cross attention: queries "
        f"from the decoder, keys and values from the encoder's top. {start} start, {end} end."
    )
    return figures.panels(panels, caption, columns=3)


def alignment() -> Figure:
    """Which English word each French word comes from, with a frame where the order differs."""
    from matplotlib.patches import Rectangle

    torch.manual_seed(0)
    model = translation.Translator()
    translation.train(model, 300, random.Random(0))
    matrix = translation.look(model)
    matrix.caption = (
        "English to French by a GRU with additive attention, trained on the sentences of a toy grammar; this one was "
        "held out. On a diagonal the words keep their order. Framed: the order differs. After the softmax."
    )
    figure = figures.heat_map(matrix)
    best = matrix.weights.argmax(1).tolist()
    for first, last in translation.turned(matrix):
        left = min(best[first : last + 1])
        size = max(best[first : last + 1]) - left + 1, last - first + 1
        figure.axes[0].add_patch(
            Rectangle((left - 0.5, first - 0.5), *size, fill=False, edgecolor=figures.LINES[1], linewidth=2)
        )
    return figure


def bottleneck() -> Figure:
    """How far one state carries a sequence, and a model that may look back."""
    return one_state.draw(one_state.experiment(one_state.STEPS), one_state.STEPS)


def self_attention() -> Figure:
    """Self-attention without parameters beside the same with projections."""
    torch.manual_seed(0)
    x = torch.randn(1, 12, 16)
    free = SelfAttention()
    with weft.record(free) as seen:
        free(x)
    query, key = (torch.randn(16, 16) / 4 for _ in range(2))
    learned = ((x @ query) @ (x @ key).transpose(-2, -1) / 4).softmax(-1)[0]
    panels = [
        Matrix(seen[""].weights[0, 0], caption="softmax(X Xᵀ)"),
        Matrix((x @ x.transpose(-2, -1) / 4).softmax(-1)[0], caption="softmax(X Xᵀ / √d)"),
        Matrix(learned, caption="softmax(X W_Q (X W_K)ᵀ / √d)"),
    ]
    caption = (
        "The weights of 12 random vectors, d = 16. A vector is most like itself, so without parameters the diagonal "
        "stands out. Projections, here random ones, are what frees attention from it."
    )
    return figures.panels(panels, caption, columns=3)


def masks() -> Figure:
    """The masks of the field."""
    edges = torch.tensor([[0, 1, 2, 3, 4, 0, 6, 7], [1, 2, 3, 4, 5, 5, 7, 2]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    shown = {
        "causal": named.causal(),
        "window of 3, causal": named.window(3),
        "window of 3, both sides": named.window(3, causal=False),
        "prefix of 3": named.prefix(3),
        "blocks of 3": named.block(8, 3),
        "packed documents": named.packed(segments),
        "padding after 5": named.padding([5]),
        "edges of a graph": named.from_edges(edges, 8),
    }
    panels = []
    for name, mask in shown.items():
        allowed = mask.dense(8, 8)[0, 0]
        weights = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
        panels.append(Matrix(weights, allowed=allowed, caption=name))
    caption = (
        "What each query (down) may attend to (across): hatched is closed. The ink is the weight when all scores are "
        "equal, 1 over the number of open keys."
    )
    return figures.panels(panels, caption)


def positions() -> Figure:
    """The sinusoidal encodings."""
    encoding = Sinusoidal(64)(torch.arange(128)).T  # [dim, position]
    caption = (
        "PE(pos, 2i) = sin(pos / 10000^(2i/64)), PE(pos, 2i + 1) = cos of the same: 128 positions across, 64 entries "
        "down. The wavelengths grow from 2π at the top to nearly 10000 · 2π at the bottom."
    )
    return figures.values({"": encoding}, "position", "entry", caption, high=3.2)


def gates() -> Figure:
    """What an LSTM's gates do while it remembers a letter."""
    text = "adb*ceacd*becad"
    model = _rememberer()
    letters = torch.tensor([["abcde*".index(letter) for letter in text]])
    many, _ = _letters_to_keep(500, 16)
    with weft.record(model) as seen, torch.no_grad():
        for tokens in (letters, many):
            model[1](model[0](tokens))
    shown, counted = seen.calls("1.layers.0")
    forget = counted["forward.forget"].mean(-1)
    at_marks, elsewhere = float(forget[many == 5].mean()), float(forget[many != 5].mean())
    order = shown["forward.forget"][0, text.index("*")].argsort()
    grids = {f"{name} gate": shown[f"forward.{name}"][0, :, order].T for name in ("input", "forget", "output")}
    caption = (
        f"An LSTM of {len(order)} units keeps the letter after the last * in mind. Its gates are maps of 0 to 1 over "
        f"the input, made by the input. The forget gate closes at a * (on 500 random texts its mean is {at_marks:.2f} "
        f"there, {elsewhere:.2f} elsewhere): what was kept is dropped. Units ordered by it at the first *."
    )
    return figures.values(grids, "the letters that are read", "unit", caption, list(text), high=1.25)


BLOCKS = {
    "residual and norm, norm first": BlockConfig(64, 4, 256),
    "residual and norm, norm last (2017)": BlockConfig(64, 4, 256, norm_first=False),
    "norm, no residual": BlockConfig(64, 4, 256, residual=False),
    "residual, no norm": BlockConfig(64, 4, 256, norm="none"),
    "neither": BlockConfig(64, 4, 256, norm="none", residual=False),
}


def stack(config: BlockConfig, num_layers: int) -> nn.Sequential:
    """Encoder blocks on top of each other with Xavier weights; pre-norm ones end with a norm. The seed is fixed."""
    torch.manual_seed(0)
    blocks: list[nn.Module] = [EncoderBlock(config) for _ in range(num_layers)]
    for block in blocks:
        for parameter in block.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)
    return nn.Sequential(*blocks, *([config.make_norm()] if config.norm_first else []))


def gradient_norms(config: BlockConfig, num_layers: int = 24) -> list[float]:
    """The norm of the gradient of each block's parameters, from the first to the last, before any training."""
    model = stack(config, num_layers)
    y = model(torch.randn(8, 16, config.dim))
    (y * torch.randn_like(y)).mean().backward()
    return [
        float(nn.utils.get_total_norm(p.grad for p in block.parameters() if p.grad is not None))
        for block in list(model)[:num_layers]
    ]


def gradients() -> Figure:
    """Gradients by depth, with and without residuals and norms."""
    depth = [float(number) for number in range(1, 25)]
    series = {name: (depth, gradient_norms(config)) for name, config in BLOCKS.items()}
    caption = (
        "24 encoder blocks before the first step of training. With neither, the gradient fades on its way to the "
        "input. With the residual alone it does not fade, but explodes: the activations grow. The norm keeps its size."
    )
    return figures.lines({"norm of the block's gradient": series}, "block, from the input", caption, log="y")


PICTURES: dict[str, Callable[[], Figure]] = {
    draw.__name__: draw
    for draw in (reverse, heads, alignment, bottleneck, self_attention, masks, positions, gates, gradients)
}


@cache
def _reverser() -> reversal.Reverser:
    """The trained model of the example."""
    torch.manual_seed(0)
    model = reversal.Reverser()
    reversal.train(model, 600, 0)
    return model


def _rememberer() -> nn.Sequential:
    """An embedding, an LSTM and its output, taught to say the letter after the last *."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 8), RecurrentEncoder("lstm", 8, 6), nn.Linear(6, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(800):
        tokens, kept = _letters_to_keep(64, 16)
        hidden, _state = model[1](model[0](tokens))
        loss = F.cross_entropy(model[2](hidden).flatten(0, 1), kept.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def _letters_to_keep(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Letters 0 … 4 with marks 5 among them, and at each position the letter after the last mark (5 if none)."""
    marks = torch.rand(batch, length) < 0.15
    tokens = torch.randint(0, 5, (batch, length)).masked_fill(marks, 5)
    kept = torch.full((batch, length), 5)
    for place in range(1, length):
        fresh = (tokens[:, place - 1] == 5) & (tokens[:, place] != 5)
        kept[:, place] = torch.where(fresh, tokens[:, place], kept[:, place - 1])
    return tokens, kept


def main() -> None:
    """Draw what was asked for."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/pictures/.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(PICTURES)}, three_ways; all if none")
    names: list[str] = parser.parse_args().names or [*PICTURES, "three_ways"]
    unknown = [name for name in names if name not in PICTURES and name != "three_ways"]
    if unknown:
        parser.error(f"there is no picture {unknown[0]!r}: expected {', '.join(PICTURES)} or three_ways")
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        path = FOLDER / f"{name}.png"
        if name == "three_ways":
            subprocess.run([sys.executable, "-m", "benchmarks.three_ways", "--out", str(path)], check=True)
        else:
            figures.save(PICTURES[name](), path)
        print(f"{path.relative_to(FOLDER.parent.parent)}  {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
