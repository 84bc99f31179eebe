"""One path a row: the most probable token at each step, or whatever else a rule chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.config import BOS, EOS
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.rules import Rules
from weft.decoding.steps import begin, choose, predict, searching
from weft.models.contract import Seq2Seq

Pick = Callable[[Tensor, Tensor, int], Tensor]


def greedy(
    model: Seq2Seq,
    source: Tensor,
    options: SearchOptions | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """The most probable token at each step, of equals the one with the lowest number: a beam of one, done faster.

    Args:
        model: any that fulfils the contract.
        source: [B, N] tokens and EOS, padded with PAD.
        options: the rules of lengths and tokens; the defaults if None. ``beam`` and ``n_best`` count as 1.
        prefix: the tokens that each target must begin with.

    Returns:
        A list of one hypothesis for each source.

    Raises:
        ValueError: if the source or the prefixes are not as described.
    """
    return follow(model, source, lambda log_probs, rows, position: log_probs.argmax(-1), options, prefix)


def follow(
    model: Seq2Seq,
    source: Tensor,
    pick: Pick,
    options: SearchOptions | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
    copies: int = 1,
) -> list[list[Hypothesis]]:
    """Follow ``copies`` paths for each source of [B, N], one token after the other, to EOS or the greatest length.

    ``pick(log_probs [R, V], rows [R], position)`` says the next token [R] of each path that still goes on; row r is
    copy r mod copies of source r // copies. What the rules forbid has log-probability −∞; a path to which they leave
    no token ends.
    """
    options = SearchOptions() if options is None else options
    rules = Rules(source, options, prefix, model.max_len)
    found: dict[int, Hypothesis] = {}
    rows = torch.arange(len(source) * copies, device=source.device)  # the paths that go on
    tokens, gained = source.new_zeros(len(rows), 0), source.new_zeros(len(rows), 0, dtype=torch.float32)
    last = torch.full_like(rows, BOS)
    if not len(source):
        return []
    with searching(model, options.exact):
        state = choose(begin(model, source), rows // copies)
        while len(rows):
            position = tokens.shape[1]
            hidden, state = model.step(last[:, None], state)
            log_probs = predict(model, hidden[:, -1])
            rules.close(log_probs, tokens, rows // copies)
            last = pick(log_probs, rows, position)
            gain = log_probs.gather(1, last[:, None])
            ended = (last == EOS) & (gain[:, 0] > float("-inf"))
            going = ~ended & (log_probs.amax(1) > float("-inf")) & (position < rules.limits[rows // copies])
            for i in (~going).nonzero()[:, 0].tolist():
                parts = [*gained[i].tolist(), *(gain[i].tolist() if ended[i] else [])]
                found[int(rows[i])] = options.hypothesis(tokens[i].tolist(), parts, bool(ended[i]))
            tokens, gained = torch.cat([tokens, last[:, None]], 1)[going], torch.cat([gained, gain], 1)[going]
            rows, last = rows[going], last[going]
            if len(rows):
                state = choose(state, going.nonzero()[:, 0])
    return [[found[row * copies + copy] for copy in range(copies)] for row in range(len(source))]
