"""One path a row: the most probable token at each step, or whatever else a rule chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft import observe
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.rules import Rules
from weft.decoding.steps import begin, choose, distribution, is_one_of, normalised, searching
from weft.models.contract import Seq2Seq


@dataclass(frozen=True, eq=False)
class Moment:
    """R paths that go on, each before its next token. Path r is copy r mod copies of source r // copies.

    Attributes:
        log_probs: [R, V] of the next token; −∞ for what the rules forbid.
        logits: [R, V] what the model gave, with nothing forbidden.
        rows: [R] the numbers of the paths.
        tokens: [R, T] the targets so far.
        read: [R, P] what the decoder consumed before the target: a prompt, or BOS alone. Shorter ones are filled up
            with a token that they hold.
    """

    log_probs: Tensor
    logits: Tensor
    rows: Tensor
    tokens: Tensor
    read: Tensor


Pick = Callable[[Moment], Tensor]
Watch = Callable[[Tensor, Tensor], Tensor | None]


def greedy(
    model: Seq2Seq,
    source: Tensor,
    options: SearchOptions | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
    watch: Watch | None = None,
) -> list[list[Hypothesis]]:
    """The most probable token at each step, of equals the one with the lowest number: a beam of one, done faster.

    Args:
        model: any that fulfils the contract.
        source: [B, N] tokens and EOS, or prompts, padded with PAD.
        options: the rules of lengths and tokens; the defaults if None. ``beam`` and ``n_best`` count as 1.
        prefix: the tokens that each target must begin with.
        watch: sees the paths grow, and may end them; see ``follow``.

    Returns:
        A list of one hypothesis for each source.

    Raises:
        ValueError: if the source or the prefixes are not as described.
    """
    return follow(model, source, None, options, prefix, watch=watch)


def follow(
    model: Seq2Seq,
    source: Tensor,
    pick: Pick | None,
    options: SearchOptions | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
    copies: int = 1,
    watch: Watch | None = None,
) -> list[list[Hypothesis]]:
    """Follow ``copies`` paths for each source of [B, N], one token after the other, to EOS or the greatest length.

    ``pick(moment)`` says the next token [R] of each path that still goes on, the most probable if there is none. A
    path to which the rules leave no token ends.

    ``watch(rows [R], tokens [R, T])`` is called after each token with the paths that go on and their targets so far,
    the newest token included. It may say [R] which of them end here: they count as finished, though EOS has not come
    and is not in their log-probabilities.
    """
    options = SearchOptions() if options is None else options
    rules = Rules(model, source, options, prefix)
    if not len(source):
        return []
    if pick is None and watch is None:
        at_once = rules.searched(model, source, None)
        if at_once is not None:
            return [[options.hypothesis(h.tokens, h.gained, h.finished) for h in each] for each in at_once]
    found: dict[int, Hypothesis] = {}
    rows = torch.arange(len(source) * copies, device=source.device)  # the paths that go on
    tokens, gained = source.new_zeros(len(rows), 0), source.new_zeros(len(rows), 0, dtype=torch.float32)
    first = model.first(source)
    sources = rows // copies
    last, limits = first[sources], rules.limits[sources]
    nearest = int(limits.min())
    path = observe.path(model)
    with searching(model, options.exact) as runner:
        state = begin(runner, source)
        path.begun(sources, state.lengths, getattr(state, "begins", None))
        order = torch.arange(source.shape[1], device=source.device)
        read = source.where(order < state.lengths[:, None], first[:, None])  # [B, N]
        state = choose(state, sources)
        while len(rows):
            hidden, state = runner.step(last[:, None], state)
            if pick is None:
                gain, best = rules.candidates(runner, hidden[:, -1], tokens, sources, 1, path)
                last = best[:, 0]
                left = possible = gain[:, 0] > float("-inf")
            else:
                logits = runner.logits(hidden[:, -1])
                log_probs = normalised(logits)
                path.show("distribution", partial(distribution, log_probs))
                rules.close(log_probs, tokens, sources)
                last = pick(Moment(log_probs, logits, rows, tokens, read[sources]))
                gain, left = log_probs.gather(1, last[:, None]), log_probs.amax(1) > float("-inf")
                possible = gain[:, 0] > float("-inf")
            path.stepped(getattr(state, "begins", None))
            finished = is_one_of(last, rules.ends) & possible
            going = left & ~finished
            if tokens.shape[1] >= nearest:
                going &= limits > tokens.shape[1]
            tokens, gained = torch.cat([tokens, last[:, None]], 1), torch.cat([gained, gain], 1)
            stopped = None
            if watch is not None and bool(going.any()):
                told = watch(rows[going], tokens[going])
                if told is not None:
                    stopped = torch.zeros_like(going)
                    stopped[going] = told
                    going, finished = going & ~stopped, finished | stopped
            if path.wants("search"):
                row, parent = torch.where(going, going.cumsum(0) - 1, -1), torch.arange(len(rows), device=rows.device)
                path.grew(source=sources, parent=parent, row=row, token=last, log_prob=gain[:, 0], total=gained.sum(1))
            if not path and bool(going.all()):
                continue
            for i in (~going).nonzero()[:, 0].tolist():
                path.ended(int(rows[i]), i)
                said, parts = tokens[i].tolist(), gained[i].tolist()
                found[int(rows[i])] = options.hypothesis(
                    said if stopped is not None and stopped[i] else said[:-1],
                    parts if finished[i] else parts[:-1],
                    bool(finished[i]),
                )
            rows, tokens, gained, last = rows[going], tokens[going], gained[going], last[going]
            sources, limits = sources[going], limits[going]
            if len(rows):
                path.goes_on(going.nonzero()[:, 0])
                state = choose(state, going.nonzero()[:, 0])
    path.finish(range(len(source) * copies))
    return [[found[row * copies + copy] for copy in range(copies)] for row in range(len(source))]
