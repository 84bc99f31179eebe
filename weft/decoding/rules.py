"""Which tokens may come next: forced beginnings, lengths, forbidden tokens, no n-gram twice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.config import BOS, EOS, PAD
from weft.decoding.options import SearchOptions
from weft.decoding.steps import check_source, check_targets, padded

_CLOSED = float("-inf")


class Rules:
    """The rules of one search over the sources [B, N].

    ``limits`` [B] is how many tokens each target has at most, EOS not counted: max_ratio × source tokens (neither PAD
    nor EOS) + max_extra, but never fewer than the prefix or ``min_len``, and never more than the model can read after
    BOS.
    """

    def __init__(
        self,
        source: Tensor,
        options: SearchOptions,
        prefix: Sequence[Sequence[int]] | None = None,
        max_len: int | None = None,
    ) -> None:
        """Take note of what holds for each source.

        Args:
            source: [B, N] padded with PAD.
            options: lengths, ``no_repeat`` and ``suppress`` of it are used.
            prefix: the tokens that each target begins with, whatever the other rules say; none if None.
            max_len: of the model.

        Raises:
            ValueError: if the prefixes are not one a source, hold PAD, BOS or EOS, or are too long for the model.
        """
        check_source(source)
        prefix = [()] * len(source) if prefix is None else prefix
        check_targets("prefix", prefix, source, max_len)
        self.options = options
        self._closed = sorted({PAD, BOS, *options.suppress})
        self._forced = padded(prefix, source.device)  # [B, P]
        self._highest = max([*self._closed, *(token for row in prefix for token in row)])
        words = ((source != PAD) & (source != EOS)).sum(1)
        limits = (words.double() * options.max_ratio).long() + options.max_extra
        limits = limits.maximum((self._forced != PAD).sum(1)).clamp(min=options.min_len)
        self.limits = limits if max_len is None else limits.clamp(max=max_len - 1)

    def close(self, log_probs: Tensor, past: Tensor, sources: Tensor) -> None:
        """Set log_probs [R, V] to −∞, in place, where a token may not follow.

        A forced token stays open whatever else is said, and is then the only one.

        Args:
            log_probs: of the next token.
            past: [R, T] the tokens before it, without BOS.
            sources: [R] which source each row belongs to.

        Raises:
            ValueError: if a suppressed or forced token is not in the vocabulary.
        """
        position, vocab_size = past.shape[1], log_probs.shape[1]
        if self._highest >= vocab_size:
            raise ValueError(f"token {self._highest} is not in the vocabulary of {vocab_size}")
        forced = self._forced[sources, position] if position < self._forced.shape[1] else None
        wanted = None if forced is None else log_probs.gather(1, forced[:, None])[:, 0]
        log_probs[:, self._closed] = _CLOSED
        if position < self.options.min_len:
            log_probs[:, EOS] = _CLOSED
        if self.options.no_repeat:
            rows, tokens = repeats(past, self.options.no_repeat)
            log_probs[rows, tokens] = _CLOSED
        if forced is not None and wanted is not None:
            rows = (forced != PAD).nonzero()[:, 0]
            log_probs[rows] = _CLOSED
            log_probs[rows, forced[rows]] = wanted[rows]


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
