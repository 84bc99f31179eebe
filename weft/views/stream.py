"""One pass of a GPT over a text as numbers: the residual stream, what was added to it, and the draw at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Draw:
    """How one token was drawn: a number between 0 and 1 falls on one of the shares, which stand in a line.

    Attributes:
        tokens: [C] what may be drawn, likeliest first.
        shares: [C] how much of the line each has, in fp64; they need not sum to 1.
        u: the number that was drawn, as a part of the whole line.
        chosen: the token on which it fell.
        rule: what the shares were made with besides the model's probabilities ("temperature 0.8"); "" for nothing.
    """

    tokens: Tensor
    shares: Tensor
    u: float
    chosen: int
    rule: str = ""

    def __post_init__(self) -> None:
        _require(self.tokens.shape == self.shares.shape and self.tokens.dim() == 1, "each token has one share")
        _require(bool((self.shares > 0).all()), "every share is above 0")
        _require(int(self.tokens[self.place]) == self.chosen, f"u = {self.u} falls on the token {self.chosen}")

    @property
    def running(self) -> Tensor:
        """[C] where each share ends, as a part of the whole line."""
        ends = self.shares.cumsum(0)
        return ends / ends[-1]

    @property
    def place(self) -> int:
        """Which of the candidates was chosen, 0 for the likeliest."""
        ends = self.shares.cumsum(0)
        return int(torch.searchsorted(ends, self.u * ends[-1], right=True).clamp(max=len(ends) - 1))


@dataclass(frozen=True, eq=False)
class Walk:
    """What happened to N tokens on their way through L blocks of H heads, and what came after them.

    It cannot be made of numbers that do not add up.

    Attributes:
        ids: [N] the tokens.
        names: how a token is written, for all that are in the text and for the likeliest to follow.
        scheme: how it knows where a token stands: learned, rotary, alibi or none.
        tokens: [N, D] the embedding of each token.
        positions: [N, D] the vector of each place, which is added to it; None unless they are learned.
        stream: [L + 1, N, D] what enters the first block, and what leaves each.
        between: [L, N, D] the stream inside each block, after its attention.
        attention: [L, N, D] what each attention added to the stream.
        heads: [L, H, N, D] the part of each head in it.
        biases: [L, D] what is added besides the heads; None where there are no biases.
        feed_forward: [L, N, D] what each feed-forward network added.
        weights: [L, H, N, N] where each token looked.
        hidden: [N, D] what leaves the last block, normalised.
        logits: [V] the score of every token to be the next.
        draw: how the next token was drawn.
    """

    ids: Tensor
    names: Mapping[int, str]
    scheme: str
    tokens: Tensor
    positions: Tensor | None
    stream: Tensor
    between: Tensor
    attention: Tensor
    heads: Tensor
    biases: Tensor | None
    feed_forward: Tensor
    weights: Tensor
    hidden: Tensor
    logits: Tensor
    draw: Draw

    def __post_init__(self) -> None:
        self.check()

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.heads)

    @property
    def num_heads(self) -> int:
        """H."""
        return self.heads.shape[1]

    @property
    def labels(self) -> list[str]:
        """How each of the N tokens is written."""
        return [self.name(token) for token in self.ids.tolist()]

    @property
    def probabilities(self) -> Tensor:
        """[V] softmax of the logits, in fp64."""
        return self.logits.double().softmax(-1)

    def tensors(self) -> dict[str, Tensor]:
        """All that is seen of the text on its way, by the attributes' names, for a record."""
        names = ("tokens", "positions", "stream", "between", "attention", "heads", "feed_forward", "weights", "hidden")
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}

    def name(self, token: int) -> str:
        """How a token is written; its number if that is not known."""
        return self.names.get(token, f"#{token}")

    def check(self) -> None:
        """Raise ValueError unless everything adds up.

        Sums that the model made itself are compared bit for bit; the parts of the heads within rounding.
        """
        start = self.tokens if self.positions is None else self.tokens + self.positions
        _require(torch.equal(start.to(self.stream.dtype), self.stream[0]), "embedding + position = stream")
        for layer in range(self.num_layers):
            before, inside, after = self.stream[layer], self.between[layer], self.stream[layer + 1]
            where = f"of block {layer + 1}"
            _require(torch.equal(before + self.attention[layer], inside), f"stream + attention {where} = stream")
            _require(torch.equal(inside + self.feed_forward[layer], after), f"stream + feed-forward {where} = stream")
            _require(self._heads_sum(layer), f"the heads {where} sum to what its attention added")
        rows = self.weights.sum(-1)
        _require(bool(((rows - 1).abs() < 1e-5).all()), "the weights of each token sum to 1")
        _require(not bool(self.weights.triu(1).any()), "no token looks at a later one")
        if not self.draw.rule:
            mine = self.probabilities[self.draw.tokens]
            apart = mine / mine.sum() - self.draw.shares / self.draw.shares.sum()
            _require(bool((apart.abs() < 1e-6).all()), "without a rule the shares are the probabilities")

    def _heads_sum(self, layer: int) -> bool:
        parts, added = self.heads[layer], self.attention[layer]
        whole = parts.sum(0) if self.biases is None else parts.sum(0) + self.biases[layer]
        size = parts.abs().sum(0).max() + whole.abs().max()
        rounding = torch.finfo(added.dtype).eps + 64 * torch.finfo(parts.dtype).eps  # of the result, of the products
        return bool(((whole - added).abs() <= rounding * size).all())  # NaN is not


def _require(true: bool, fact: str) -> None:
    if not true:
        raise ValueError(f"the numbers of a walk do not add up: expected that {fact}")
