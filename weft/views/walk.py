"""The walk through a GPT, to be read: each step a sentence and its numbers, as plain text or with colours by rich.

Vectors are shown by their first few numbers and their length (the norm); a bar is as long as what it stands for.
Blocks and heads are counted from 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shutil import get_terminal_size
from textwrap import fill, wrap
from typing import NamedTuple

import torch
from rich.console import Console, ConsoleOptions
from rich.text import Text
from torch import Tensor

from weft.views.matrix import Matrix, visible
from weft.views.stream import Walk
from weft.views.terminal import draw, width

_EIGHTHS = " ▏▎▍▌▋▊▉"
_INK = "[█▏▎▍▌▋▊▉░▒▓]+"
_LABEL = 14  # columns of a label at most
_NEXT = 10  # of the tokens that may come next, how many are listed
_LISTED = 0.00005  # a smaller share would be written as 0
_NARROWEST = 72
_MARK = "◀"

_PLACES = {
    "learned": "To it is added a learned vector of the place where the token stands.",
    "rotary": "Nothing is added for its place: attention turns queries and keys by it (rotary positions).",
    "alibi": "Nothing is added for its place: attention subtracts from a score what is far away (ALiBi).",
    "none": "Nothing tells its place but which tokens it may look at.",
}


def show(walk: Walk, limit: int = 40, layer: int | None = None, head: int | None = None) -> None:
    """Print the walk: with colours on a terminal, as plain text elsewhere. Arguments and errors as of ``walk_text``."""
    console = Console(width=max(get_terminal_size().columns, _NARROWEST), highlight=False)
    if console.is_terminal:
        console.print(WalkView(walk, limit, layer, head))
    else:
        print(walk_text(walk, console.width, limit, layer, head), end="")


class Section(NamedTuple):
    """A step of the walk: what it is called, what happens in it, and the numbers."""

    title: str
    told: str
    lines: list[str]


def walk_text(walk: Walk, width: int = 80, limit: int = 40, layer: int | None = None, head: int | None = None) -> str:
    """The walk as plain text.

    Args:
        walk: what to tell.
        width: columns of a line, at least 72.
        limit: tokens of the text in a table at most; the last ones are shown.
        layer, head: whose attention is drawn, counted from 0; where None, the head's that added most to the last token.

    Raises:
        ValueError: if there is no such layer or head, or no room.
    """
    parts = []
    for number, (title, told, lines) in enumerate(sections(walk, width, limit, layer, head), 1):
        parts.append("\n".join([f"{number}. {title}", fill(told, width), "", *lines]))
    return "\n\n".join(parts) + "\n"


class WalkView:
    """The same for ``rich.print``, as wide as the terminal."""

    def __init__(self, walk: Walk, limit: int = 40, layer: int | None = None, head: int | None = None) -> None:
        """Take what ``walk_text`` takes."""
        self.walk, self.limit, self.layer, self.head = walk, limit, layer, head

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Say the steps one after the other."""
        wide = max(options.max_width, _NARROWEST)
        for number, (title, told, lines) in enumerate(sections(self.walk, wide, self.limit, self.layer, self.head), 1):
            yield Text(f"{number}. {title}", style="bold")
            yield Text(fill(told, wide) + "\n", style="dim")
            shown = Text("\n".join(lines) + "\n", no_wrap=True, overflow="ignore")
            shown.highlight_regex(_INK, "cyan")
            shown.highlight_regex(f".*{_MARK}.*", "bold green")
            yield shown


def sections(walk: Walk, width: int, limit: int, layer: int | None = None, head: int | None = None) -> list[Section]:
    """The steps of the walk, laid out; see ``walk_text``."""
    if width < _NARROWEST or limit < 1:
        raise ValueError(f"a walk needs {_NARROWEST} columns and a token, not width {width} and limit {limit}")
    layer, head = _shown_head(walk, layer, head)
    page = _Page(walk, width, min(limit, len(walk.ids)))
    return [
        page.text(),
        page.embeddings(),
        *(page.block(number) for number in range(walk.num_layers)),
        page.lengths(),
        page.looks(layer, head),
        page.scores(),
        page.draw(),
    ]


class _Page:
    """Lays one walk out on lines of a width, with the last ``count`` of its tokens."""

    def __init__(self, walk: Walk, width: int, count: int) -> None:
        self.walk, self.width, self.count = walk, width, count
        self.labels = [_cut(visible(label), _LABEL) for label in walk.labels]
        self.last = f'"{self.labels[-1]}"'
        self.bar = 10 if width < 110 else 20
        self.values = max(2, min(8, (width - 48 - self.bar) // 7))
        parts = torch.cat([walk.heads[:, :, -1].flatten(0, 1), walk.feed_forward[:, -1]])
        self.most = float(parts.double().norm(dim=-1).max().clamp(min=1e-30))  # that was added to the last token

    def text(self) -> Section:
        told = f"The text is cut into pieces. Each has a number among the {len(self.walk.logits):,} of the vocabulary."
        numbers = [str(token) for token in self.walk.ids[-self.count :].tolist()]
        lines = _table("", self.labels[-self.count :], [("", numbers)], self.width)
        return Section("Text to tokens", told, [*self._left_out(), *lines])

    def embeddings(self) -> Section:
        walk, dim = self.walk, self.walk.tokens.shape[1]
        told = (
            f"Each number picks its row of the embedding matrix W_E [{len(walk.logits):,} × {dim}]: a vector "
            f"of {dim} numbers. {_PLACES[walk.scheme]}"
        )
        rows = zip(self.labels[-self.count :], walk.tokens[-self.count :], strict=True)
        lines = [*self._left_out(), *(self._vector(label, vector) for label, vector in rows)]
        if walk.positions is not None:
            lines += ["", self._vector(f"  {self.labels[-1]}", walk.tokens[-1])]
            lines.append(self._vector(f"+ place {len(walk.ids) - 1}", walk.positions[-1]))
            lines.append(self._vector("= stream", walk.stream[0, -1]))
        return Section("Tokens to vectors", told, lines)

    def block(self, layer: int) -> Section:
        walk = self.walk
        told = f"The same once more, with weights of its own, for {self.last}."
        if layer == 0:
            told = (
                "Each head adds what it takes from the tokens it looks at (E' = E + ΔE), then the feed-forward network "
                f"what it makes of the token alone. Here for the last token, {self.last}, after which the next comes."
            )
        lines = [self._vector("  before", walk.stream[layer, -1])]
        for head in range(walk.num_heads):
            weight, key = walk.weights[layer, head, -1].max(0)
            link = f"{float(weight):.2f} on {self.labels[int(key)]}"
            lines.append(self._vector(f"+ head {head + 1}", walk.heads[layer, head, -1], link, bar=True))
        if walk.biases is not None:
            lines.append(self._vector("+ bias", walk.biases[layer], bar=True))
        lines.append(self._vector("= attended", walk.between[layer, -1]))
        lines.append(self._vector("+ feed-forward", walk.feed_forward[layer, -1], bar=True))
        lines.append(self._vector("= after", walk.stream[layer + 1, -1]))
        return Section(f"Block {layer + 1} of {walk.num_layers}", told, lines)

    def lengths(self) -> Section:
        told = "What every token carries along: the length of its vector before the first block and after each."
        norms = self.walk.stream[:, -self.count :].double().norm(dim=-1).T.tolist()
        rows = [(label, list(map(_number, row))) for label, row in zip(self.labels[-self.count :], norms, strict=True)]
        heads = ["0", *(str(layer + 1) for layer in range(self.walk.num_layers))]
        return Section("The residual stream", told, [*self._left_out(), *_table("block", heads, rows, self.width)])

    def looks(self, layer: int, head: int) -> Section:
        told = (
            f"For each head of block {layer + 1}: what each token looked at most, and how much of its attention went "
            f"there. Below, all weights of head {head + 1}."
        )
        weights, keys = (part[:, -self.count :].T.tolist() for part in self.walk.weights[layer].max(-1))
        rows = [
            (label, [f"{_cut(self.labels[key], 7)} {weight:.2f}" for weight, key in zip(*links, strict=True)])
            for label, *links in zip(self.labels[-self.count :], weights, keys, strict=True)
        ]
        heads = [f"head {number + 1}" for number in range(self.walk.num_heads)]
        lines = [*self._left_out(), *_table("", heads, rows, self.width), "", *self._map(layer, head)]
        return Section("Where it looked", told, lines)

    def scores(self) -> Section:
        walk, count = self.walk, len(self.walk.logits)
        told = (
            f"The vector of {self.last} is normalised and multiplied with the output matrix [{count:,} × "
            f"{walk.hidden.shape[1]}]: a score (logit) for every token. The softmax makes probabilities of them."
        )
        likeliest = walk.probabilities.topk(min(_NEXT, count))
        rows = [
            (visible(walk.name(token)), _number(float(walk.logits[token])), p)
            for p, token in zip(*(part.tolist() for part in likeliest), strict=True)
        ]
        if count > _NEXT:
            rows.append((f"{count - _NEXT:,} others", "", 1.0 - float(likeliest.values.sum())))
        lines = [self._vector("  normalised", walk.hidden[-1]), "", f"{'':{_LABEL}}    logit   probability"]
        for name, logit, p in rows:
            lines.append(f"{_fit(name, _LABEL)} {logit:>8}   {p:.4f}  {_bar(p, self.width - 36)}".rstrip())
        return Section("Vector to probabilities", told, lines)

    def draw(self) -> Section:
        drawn, walk = self.walk.draw, self.walk
        rule = f" (made with {drawn.rule})" if drawn.rule else ""
        told = (
            f"The tokens that may come ({len(drawn.tokens):,}) stand in a line from 0 to 1, each as wide as its "
            f"share{rule}. A random number falls on one of them: u = {drawn.u:.4f}."
        )
        starts, ends = [0.0, *drawn.running.tolist()], drawn.running.tolist()
        listed = [place for place in range(min(_NEXT, len(ends))) if ends[place] - starts[place] >= _LISTED]
        lines = [f"{'':{_LABEL}}    share    from      to"]
        for place in sorted({*listed, drawn.place}):
            lines += ["…"] if place > len(listed) else []
            name = _fit(visible(walk.name(int(drawn.tokens[place]))), _LABEL)
            mark = f"  {_MARK} u" if place == drawn.place else ""
            lines.append(f"{name}   {ends[place] - starts[place]:.4f}  {starts[place]:.4f}  {ends[place]:.4f}{mark}")
        chosen = f'"{visible(walk.name(drawn.chosen))}"'
        end = f"The next token is {chosen}, number {drawn.chosen}. With it at the end of the text, all begins anew."
        return Section("The draw", told, [*lines, "", *wrap(end, self.width)])

    def _map(self, layer: int, head: int) -> list[str]:
        """The attention of one head, of as many of the last tokens as there is room for."""
        room = (self.width - max(map(width, self.labels[-self.count :])) - 1) // 2
        count = min(self.count, room)
        labels = self.labels[-count:]
        weights = self.walk.weights[layer, head, -count:, -count:]
        caption = f"block {layer + 1}, head {head + 1} of {self.walk.num_heads}, after the softmax"
        if count < len(self.labels):
            caption += f"; the last {count} tokens"
        allowed = torch.ones(count, count, dtype=torch.bool).tril()
        drawn = draw(Matrix(weights, labels, labels, allowed, caption, ("token", "key"))).splitlines()
        return [part for line in drawn for part in ([line] if width(line) <= self.width else wrap(line, self.width))]

    def _vector(self, name: str, vector: Tensor, link: str = "", bar: bool = False) -> str:
        """A name, the vector's first numbers and its length; what was added has a bar."""
        first = "".join(f" {_number(value):>6}" for value in vector[: self.values].tolist())
        more = " …" if len(vector) > self.values else ""
        length = float(vector.double().norm())
        shown = f"{_bar(length / self.most, self.bar):{self.bar}}" if bar else ""
        return _cut(
            f"{_fit(name, _LABEL + 2)}[{first}{more} ] {_number(length):>6} {shown} {link}".rstrip(), self.width
        )

    def _left_out(self) -> list[str]:
        before = len(self.labels) - self.count
        return [f"({before} tokens before these)"] if before else []


def _shown_head(walk: Walk, layer: int | None, head: int | None) -> tuple[int, int]:
    """The layer and the head whose attention is drawn."""
    for what, given, count in (("layer", layer, walk.num_layers), ("head", head, walk.num_heads)):
        if given is not None and not 0 <= given < count:
            raise ValueError(f"there are {count} {what}s, counted from 0, so no {what} {given}")
    added = walk.heads[:, :, -1].double().norm(dim=-1).cpu()  # [L, H]
    for dim, given in enumerate((layer, head)):
        if given is not None:
            others = torch.arange(added.shape[dim]) != given
            added = added.index_fill(dim, others.nonzero()[:, 0], -1.0)
    place = int(added.argmax())
    return place // walk.num_heads, place % walk.num_heads


def _table(corner: str, heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], columns: int) -> list[str]:
    """Rows of cells under their heads; what does not fit beside each other stands below."""
    margin = min(_LABEL, max([width(corner), *(width(label) for label, _ in rows)]))
    wide = [max(width(head), *(width(cells[i]) for _, cells in rows)) for i, head in enumerate(heads)]
    lines: list[str] = []
    begin = 0
    while begin < len(heads):
        end, room = begin + 1, columns - margin - 2 - wide[begin]
        while end < len(heads) and wide[end] + 2 <= room:
            room -= wide[end] + 2
            end += 1
        lines += [""] if begin else []
        for label, cells in [(corner, heads), *rows]:
            line = "  ".join(_fit(cells[i], wide[i]) for i in range(begin, end))
            lines.append((f"{_fit(label, margin)}  {line}" if margin else line).rstrip())
        begin = end
    return lines


def _bar(share: float, columns: int) -> str:
    """A bar of this share of the columns, to an eighth of one."""
    eighths = round(max(0.0, min(1.0, share)) * columns * 8)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _number(value: float) -> str:
    """Two digits behind the point where there is room."""
    return f"{round(value, 2) + 0.0:.2f}" if abs(value) < 100 else f"{value:.0f}"  # + 0.0: no −0.00


def _cut(text: str, columns: int) -> str:
    """The text, or its beginning and an ellipsis, in at most so many columns."""
    if width(text) <= columns:
        return text
    while width(text) > columns - 1:
        text = text[:-1]
    return text + "…"


def _fit(text: str, columns: int) -> str:
    """The text in exactly so many columns."""
    text = _cut(text, columns)
    return text + " " * (columns - width(text))
