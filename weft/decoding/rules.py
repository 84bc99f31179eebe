"""Which tokens may come next: forced beginnings, lengths, forbidden tokens, no n-gram twice."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from weft.decoding.options import SearchOptions
from weft.decoding.steps import (
    check_length,
    check_numbers,
    check_source,
    check_targets,
    distribution,
    padded,
    predict,
    top,
)
from weft.models.compiled import Compiled, Result, compiled
from weft.models.contract import Seq2Seq, Steps
from weft.observe.paths import Path

_CLOSED = float("-inf")
_FREE = -1  # what stands in a table of forced tokens where none is forced


class Rules:
    """The rules of one search over the sources [B, N].

    ``limits`` [B] is how many tokens each target has at most, EOS not counted: max_ratio × source tokens (neither PAD
    nor EOS) + max_extra, but never fewer than the prefix or ``min_len``, and never more than the model has room for.
    """

    def __init__(
        self, model: Seq2Seq, source: Tensor, options: SearchOptions, prefix: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Take note of what holds for each source.

        Args:
            model: its specials and its room are used.
            source: [B, N] padded with PAD.
            options: lengths, ``no_repeat`` and ``suppress`` of it are used.
            prefix: the tokens that each target begins with, whatever the other rules say; none if None.

        Raises:
            ValueError: if the prefixes are not one a source, hold PAD, BOS or EOS, or are too long for the model; or
                if EOS is suppressed.
        """
        check_source(source)
        prefix = [()] * len(source) if prefix is None else prefix
        check_targets(model, source, prefix, "prefix")
        self.options, self.ends = options, model.specials.ends
        if wrong := set(self.ends).intersection(options.suppress):
            raise ValueError(f"suppress must be token numbers other than EOS ({min(wrong)}), not {options.suppress}")
        self._closed = sorted({*model.specials.never, *options.suppress})
        self._never = torch.tensor(self._closed, dtype=torch.int64, device=source.device)
        self._forced = padded(prefix, source.device, _FREE)  # [B, P]
        self._highest = max((*self._closed, *self.ends, *(token for row in prefix for token in row)), default=-1)
        words = words_of(model, source).sum(1)
        limits = (words.double() * options.max_ratio).long() + options.max_extra
        limits = limits.maximum((self._forced != _FREE).sum(1)).clamp(min=options.min_len)
        room = model.room(source) if len(source) else None
        self.limits = limits if room is None else limits.minimum(room)

    def always(self) -> list[int] | None:
        """The tokens that no target may hold; None if more is asked than that, and the least length."""
        return None if self.options.no_repeat or self._forced.shape[1] else self._closed

    def closed(self, position: int) -> list[int] | None:
        """The tokens that may not stand at a position of any target; None if it is not the same for all."""
        if self.options.no_repeat or position < self._forced.shape[1]:
            return None
        return [*self._closed, *self.ends] if position < self.options.min_len else self._closed

    def searched(self, model: Seq2Seq, source: Tensor, beam: int | None) -> list[list[Result]] | None:
        """What the compiled search finds, greedy if beam is None; None if there is none, or the rules ask for more."""
        options, closed = self.options, self.always()
        if closed is None or options.coverage_penalty:
            return None
        runner = compiled(model)
        if runner is None:
            return None
        check_length(runner, source)
        self.check(runner.vocab_size)
        finished = max(options.n_best, options.beam * options.patience)
        return runner.search(
            source,
            self.limits,
            closed,
            beam,
            1 if beam is None else options.n_best,
            options.length_penalty,
            finished,
            options.min_len,
        )

    def close(self, log_probs: Tensor, past: Tensor, sources: Tensor) -> None:
        """Set log_probs [R, V] to −∞, in place, where a token may not follow.

        A forced token stays open whatever else is said, and is then the only one.

        Args:
            log_probs: of the next token.
            past: [R, T] the tokens of the target before it.
            sources: [R] which source each row belongs to.

        Raises:
            ValueError: if a suppressed, forced or special token is not in the vocabulary.
        """
        position = past.shape[1]
        self.check(log_probs.shape[1])
        forced = self._forced[sources, position] if position < self._forced.shape[1] else None
        wanted = None if forced is None else log_probs.gather(1, forced[:, None].clamp(min=0))[:, 0]
        log_probs.index_fill_(1, self._never, _CLOSED)
        if position < self.options.min_len:
            log_probs[:, self.ends] = _CLOSED
        if self.options.no_repeat:
            rows, tokens = repeats(past, self.options.no_repeat)
            log_probs[rows, tokens] = _CLOSED
        if forced is not None and wanted is not None:
            rows = (forced != _FREE).nonzero()[:, 0]
            log_probs[rows] = _CLOSED
            log_probs[rows, forced[rows]] = wanted[rows]

    def candidates(
        self, model: Steps, hidden: Tensor, past: Tensor, sources: Tensor, k: int, path: Path
    ) -> tuple[Tensor, Tensor]:
        """The k most probable tokens that may come next: log p [R, k], or fewer, and their numbers, best first.

        Of equals the lowest number comes first; −∞ is what may not come.

        Args:
            model: what made hidden [R, D]; compiled, it does not make all logits where only few are wanted.
            hidden: of the last step.
            past, sources: as in ``close``.
            k: how many.
            path: shown the distribution.
        """
        if isinstance(model, Compiled) and (closed := self.closed(past.shape[1])) is not None:
            self.check(model.vocab_size)
            log_probs, tokens = model.best(hidden, min(k, model.vocab_size), closed)
            check_numbers(log_probs)
            return log_probs, tokens
        log_probs = predict(model, hidden)
        path.show("distribution", partial(distribution, log_probs))
        self.close(log_probs, past, sources)
        return top(log_probs, k)

    def check(self, vocab_size: int) -> None:
        """Raise ValueError if a suppressed, forced or special token is not in a vocabulary of this size."""
        if self._highest >= vocab_size:
            raise ValueError(f"token {self._highest} is not in the vocabulary of {vocab_size}")


def words_of(model: Seq2Seq, source: Tensor) -> Tensor:
    """[B, N] which tokens of the source [B, N] are neither PAD nor EOS."""
    return (source != model.specials.pad) & (source != model.specials.eos)


def repeats(past: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Which tokens would make an n-gram of past [R, T] occur a second time: row numbers and tokens, in pairs."""
    length = past.shape[1]
    if length < n:
        none = past.new_zeros(0)
        return none, none
    grams = past.unfold(1, n, 1)  # [R, T - n + 1, n]
    same = (grams[..., :-1] == past[:, None, length - n + 1 :]).all(-1)
    row, place = same.nonzero(as_tuple=True)
    return row, grams[row, place, -1]
