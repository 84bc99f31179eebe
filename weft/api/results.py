"""What a model's answers are: small frozen objects that show themselves in a line, and in notebooks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from math import exp
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from weft.views.matrix import Matrix

if TYPE_CHECKING:
    from weft.api.language_model import LanguageModel
    from weft.api.translator import Translator


class Labels(Protocol):
    """What is asked of a tokenizer here."""

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """A label for each token."""


@dataclass(frozen=True)
class Candidate:
    """One translation of a source, or one continuation of a prompt.

    Attributes:
        text: what it says.
        score: what it was ranked by.
        log_prob: log p(translation | source), or of a continuation given the prompt.
        ids: the numbers of its tokens, without the end token.
        token_log_probs: of each token, and of the end token if it came.
        finished: whether it did, or a stop string; if not, the text was cut off at its greatest length.
    """

    text: str
    score: float
    log_prob: float
    ids: tuple[int, ...] = field(repr=False)
    token_log_probs: tuple[float, ...] = field(repr=False)
    finished: bool
    tokenizer: Labels = field(repr=False, compare=False)

    @cached_property
    def tokens(self) -> tuple[str, ...]:
        """Its tokens as labels, without the end token."""
        return tuple(self.tokenizer.tokens(self.ids))

    @property
    def perplexity(self) -> float:
        """The inverse of the geometric mean of the tokens' probabilities."""
        return exp(min(-self.log_prob / max(len(self.token_log_probs), 1), 700.0))  # e^710 is no float


class _Ranked:
    """What has candidates, best first: what the best one has, the whole has too."""

    n_best: tuple[Candidate, ...]

    @property
    def text(self) -> str:
        """The best one."""
        return self.n_best[0].text

    @property
    def score(self) -> float:
        """What it was ranked by."""
        return self.n_best[0].score

    @property
    def log_prob(self) -> float:
        """Its log-probability, given the source or the prompt."""
        return self.n_best[0].log_prob

    @property
    def tokens(self) -> tuple[str, ...]:
        """Its tokens as labels, without the end token."""
        return self.n_best[0].tokens

    def _json(self, **given: Any) -> str:
        best = [{"text": c.text, "score": c.score, "log_prob": c.log_prob} for c in self.n_best]
        return json.dumps({**given, **best[0], "n_best": best}, ensure_ascii=False)

    def _html(self, given: str) -> str:
        rows = (f"<tr><td>{c.score:.3f}</td><td dir='auto'>{escape(c.text)}</td></tr>" for c in self.n_best)
        return f"<div dir='auto'>{escape(given)}</div><table>{''.join(rows)}</table>"

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Translation(_Ranked):
    """A source and its translations, best first. What the best one has, the translation has too.

    Attributes:
        source: the text that was given.
        source_ids: the numbers of its tokens, without the end token; the mark of the language it became comes first.
        n_best: as many translations as were asked for, or could be found; at least one.
        parts: of a text that was translated sentence by sentence, these.
    """

    source: str
    source_ids: tuple[int, ...]
    n_best: tuple[Candidate, ...]
    translator: Translator = field(repr=False, compare=False)
    parts: tuple[Translation, ...] = field(default=(), repr=False)

    @cached_property
    def source_tokens(self) -> tuple[str, ...]:
        """The source's tokens as labels, without the end token."""
        return tuple(self.translator.tokenizers.source.tokens(self.source_ids))

    @cached_property
    def attention(self) -> Alignment:
        """Where the model looked while it said the best translation; computed when first asked for."""
        if self.parts:
            return Alignment.joined([part.attention for part in self.parts])
        return self.translator.align(self.source_ids, self.n_best[0].ids)

    def json(self) -> str:
        """Text, score and the n-best list as a line of JSON."""
        return self._json(source=self.source)

    def __repr__(self) -> str:
        return f"Translation({self.text!r}, score {self.score:.3f}, of {self.source!r})"

    def _repr_html_(self) -> str:
        return self._html(self.source)


@dataclass(frozen=True)
class Continuation(_Ranked):
    """A prompt and how it goes on, most probable first. What the best continuation has, the whole has too.

    Attributes:
        prompt: the text that was given.
        prompt_ids: the numbers of its tokens, and of what the model puts before a text.
        n_best: as many continuations as were asked for; each ``text`` is what follows the prompt.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    n_best: tuple[Candidate, ...]
    model: LanguageModel = field(repr=False, compare=False)

    @property
    def full(self) -> str:
        """The prompt and the best continuation."""
        return self.prompt + self.text

    @cached_property
    def prompt_tokens(self) -> tuple[str, ...]:
        """The prompt's tokens as labels."""
        return tuple(self.model.vocabulary.tokens(self.prompt_ids))

    def json(self) -> str:
        """Text, log-probability and all continuations as a line of JSON."""
        return self._json(prompt=self.prompt)

    def __repr__(self) -> str:
        return f"Continuation({self.prompt!r} + {self.text!r}, log p {self.log_prob:.2f})"

    def _repr_html_(self) -> str:
        return self._html(self.prompt)


@dataclass(frozen=True)
class Alignment:
    """The attention from a translation to its source: the mean over heads and layers.

    Attributes:
        source_tokens, target_tokens: labels, the end tokens among them.
        weights: [target, source]; each row sums to 1.
    """

    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    weights: Tensor = field(compare=False)

    @classmethod
    def joined(cls, parts: Sequence[Alignment]) -> Alignment:
        """Those of several sentences, none of which looked at another; of the targets' ends only the last is left."""
        rows = [part.weights if part is parts[-1] else part.weights[:-1] for part in parts]
        return cls(
            tuple(token for part in parts for token in part.source_tokens),
            tuple(token for part, own in zip(parts, rows, strict=True) for token in part.target_tokens[: len(own)]),
            torch.block_diag(*rows),
        )

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """For each target token but the end its place and that of the source token it looked at most."""
        return list(enumerate(self.weights[:-1].argmax(-1).tolist()))

    @property
    def matrix(self) -> Matrix:
        """For ``weft.views``."""
        caption = "where each target token looked: attention to the source, mean over heads and layers, after softmax"
        return Matrix(self.weights, self.target_tokens, self.source_tokens, None, caption, ("target", "source"))

    def __repr__(self) -> str:
        said = ", ".join(f"{self.target_tokens[t]}←{self.source_tokens[s]}" for t, s in self.pairs)
        return f"Alignment({said})"

    def _repr_html_(self) -> str:
        matrix = self.matrix
        head = "".join(f"<th dir='auto'>{escape(key)}</th>" for key in matrix.keys)
        rows = []
        for query, weights in zip(matrix.queries, matrix.weights.tolist(), strict=True):
            cells = (f"<td title='{w:.2f}' style='{_CELL}rgba(10,47,102,{w:.3f})'></td>" for w in weights)
            rows.append(f"<tr><th dir='auto'>{escape(query)}</th>{''.join(cells)}</tr>")
        table = f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"
        return f"<figure>{table}<figcaption>{escape(matrix.caption)}</figcaption></figure>"


@dataclass(frozen=True)
class Choice:
    """A token that could have stood at a place.

    Attributes:
        token: its label.
        probability: p(token | what stood before it, source).
        completion: the whole translation with it, if it was asked for.
    """

    token: str
    probability: float
    completion: Candidate | None = None


_CELL = "min-width:1.4em;height:1.4em;background:"
