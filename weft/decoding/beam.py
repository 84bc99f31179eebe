"""Beam search: the best few hypotheses of each source go on side by side."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

import torch
from torch import Tensor

from weft import observe
from weft.decoding.align import observed_step
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.rules import Rules, words_of
from weft.decoding.steps import begin, choose, is_one_of, searching, top
from weft.models.contract import Seq2Seq
from weft.observe.paths import Path

_NEVER = float("-inf")


def beam(
    model: Seq2Seq,
    source: Tensor,
    options: SearchOptions | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses that a beam of ``options.beam`` meets, for each source.

    At each step all continuations of a source's K live hypotheses are ranked by log p. Those among the first K that
    end with EOS are finished; the first K that do not go on. A source is done

    - when K × patience hypotheses are finished, but at least ``n_best`` (Kasai et al. 2022),
    - at its greatest length, or when the rules leave no continuation,
    - or when nothing live can enter its n-best list any more; see ``best_possible``. This changes no result.

    Finished hypotheses are ranked by ``SearchOptions``; equal ones in the order in which they were found.
    Hypotheses cut off at the greatest length come after them, if there are fewer than n_best.

    Args:
        model: any that fulfils the contract.
        source: [B, N] tokens and EOS, or prompts, padded with PAD.
        options: the defaults if None.
        prefix: the tokens that each target must begin with.

    Returns:
        For each source up to ``n_best`` hypotheses, best first.

    Raises:
        ValueError: if the source or the prefixes are not as described, or a coverage penalty is asked of a model that
            does not attend to the source.
    """
    options = SearchOptions() if options is None else options
    rules = Rules(model, source, options, prefix)
    if not len(source):
        return []
    at_once = rules.searched(model, source, options.beam)
    if at_once is not None:
        return [
            [Hypothesis(tuple(h.tokens), h.score, h.log_prob, tuple(h.gained), h.finished) for h in each]
            for each in at_once
        ]
    path = observe.path(model)
    beams = _Beams(model, source, options, rules.limits, path)
    with searching(model, options.exact, observed=bool(options.coverage_penalty)) as runner:
        state = begin(runner, source)
        path.begun(beams.owner, state.lengths, getattr(state, "begins", None))
        while len(beams.total):
            weights = None
            if options.coverage_penalty:
                hidden, weights, state = observed_step(model, beams.last[:, None], state, source.shape[1])
            else:
                hidden, state = runner.step(beams.last[:, None], state)
            sources, width = beams.numbers[beams.owner], 2 * options.beam  # no other can be among those of its source
            gain, token = rules.candidates(runner, hidden[:, -1], beams.tokens, sources, width, path)
            path.stepped(getattr(state, "begins", None))
            parents = beams.extend(gain, token, None if weights is None else weights[:, 0])
            if len(parents):
                path.goes_on(parents)
                state = choose(state, parents)
    path.finish([(number, kept[0].tokens) for number, kept in enumerate(beams.kept)])
    return beams.kept


def best_possible(log_prob: Tensor, length: int, limits: Tensor, options: SearchOptions) -> Tensor:
    """No score that a hypothesis with ``log_prob`` [S] and ``length`` tokens can end with is above this [S].

    It will end with some log p' ≤ log p ≤ 0, since each further token adds a logarithm ≤ 0, and with a length L,
    length + 1 ≤ L ≤ limit + 1. Its score is log p' / L^α plus a coverage penalty ≤ 0, so it is at most log p / L^α. As
    log p ≤ 0, that is greatest where L^α is: at L = limit + 1 if α ≥ 0, at L = length + 1 if α < 0. The result is moved
    up by more than the rounding of these operations.
    """
    longest = limits + 1 if options.length_penalty >= 0.0 else torch.full_like(limits, length + 1)
    return options.rank(log_prob, longest.double()) * (1.0 - 1e-12)


class _Beams:
    """The live hypotheses of all sources that are not done, a row each, and what is finished.

    R rows, S sources not done, K = beam. Row r is number ``slot[r]`` of the live ones of source ``numbers[owner[r]]``.
    """

    def __init__(self, model: Seq2Seq, source: Tensor, options: SearchOptions, limits: Tensor, path: Path) -> None:
        count = len(source)
        self.options, self.ends, self.path = options, model.specials.ends, path
        self.kept: list[list[Hypothesis]] = [[] for _ in range(count)]  # of every source, best first
        self.numbers = torch.arange(count, device=source.device)  # [S]
        self.limits = limits  # [S]
        self.words = words_of(model, source)  # [S, N]
        self.completed = torch.zeros_like(self.numbers)  # [S] how many were finished
        self.owner = self.numbers  # [R]
        self.slot = torch.zeros_like(self.numbers)  # [R]
        self.last = model.first(source)  # [R] what the next step consumes
        self.tokens = source.new_zeros(count, 0)  # [R, T]
        self.gained = source.new_zeros(count, 0, dtype=torch.float32)  # [R, T] log p of each token
        self.total = source.new_zeros(count, dtype=torch.float64)  # [R] and their sum
        self.coverage = source.new_zeros(source.shape, dtype=torch.float32)  # [R, N] attention so far

    def extend(self, gain: Tensor, token: Tensor, weights: Tensor | None) -> Tensor:
        """Go on by one token.

        Args:
            gain: [R, W] log p of the best tokens to come next, best first.
            token: [R, W] their numbers.
            weights: [R, N] what the step that made them attended to.

        Returns:
            The rows [R'] that the new rows continue.
        """
        width, length, count = self.options.beam, self.tokens.shape[1], len(self.numbers)
        order = torch.arange(len(self.owner), device=gain.device)
        total = self.total[:, None] + gain  # [R, W]
        if len(order) == count * width:
            row = order.view(count, width)
        else:  # of some sources fewer are live: [S, K], [S, K, W]
            row = order.new_zeros(count, width).index_put_((self.owner, self.slot), order)
            none = total.new_full((*row.shape, gain.shape[1]), _NEVER)
            total = none.index_put_((self.owner, self.slot), total)
        total, place = top(total.view(count, -1), 2 * width)  # [S, C]
        parent, place = row.gather(1, place // gain.shape[1]), place % gain.shape[1]
        token, gain = token[parent, place], gain[parent, place]

        possible, is_end = total > _NEVER, is_one_of(token, self.ends)
        goes, ends = possible & ~is_end, possible & is_end
        ends[:, width:] = False
        slot = goes.cumsum(1) - 1
        goes &= slot < width

        covered = self.coverage if weights is None else self.coverage + weights
        ending = ends.nonzero().tolist()
        if ending:
            score = self.options.rank(total, length + 1)
            if self.options.coverage_penalty:
                score = score + self._penalty(covered)[parent]
            for s, c in ending:
                self._keep(s, int(parent[s, c]), float(score[s, c]), float(total[s, c]), float(gain[s, c]))
            self.completed = self.completed + ends.sum(1)
        stuck = (self.limits == length) | ~goes.any(1)
        for s in stuck.nonzero()[:, 0].tolist():
            self._cut_off(s)
        left = ~(stuck | self._enough(total.masked_fill(~goes, _NEVER).amax(1), length + 1))

        going = goes & left[:, None]
        if self.path.wants("search"):
            s, c = (going | ends).nonzero(as_tuple=True)
            row = torch.where(going[s, c], going.flatten().cumsum(0).view_as(going)[s, c] - 1, -1)
            parts = {"parent": parent, "token": token, "log_prob": gain, "total": total}
            self.path.grew(source=self.numbers[s], row=row, **{name: part[s, c] for name, part in parts.items()})
        s, c = going.nonzero(as_tuple=True)
        parents = parent[s, c]
        self.owner, self.slot, self.last, self.total = s, slot[s, c], token[s, c], total[s, c]
        self.tokens = torch.cat([self.tokens[parents], self.last[:, None]], 1)
        self.gained = torch.cat([self.gained[parents], gain[s, c, None]], 1)
        if self.options.coverage_penalty:
            self.coverage = covered[parents]
        if not bool(left.all()):
            self.owner = (left.cumsum(0) - 1)[s]
            self.numbers, self.limits, self.completed = self.numbers[left], self.limits[left], self.completed[left]
            self.words = self.words[left]
        return parents

    def _penalty(self, coverage: Tensor) -> Tensor:
        """β Σ_j log min(coverage_j, 1) [R] over the words of each row's source; at least a little is always covered."""
        logs = coverage.double().clamp(1e-10, 1.0).log()
        logs = logs.masked_fill(~self.words[self.owner], 0.0)
        # One after the other: how torch groups the terms of a sum depends on N, which the longest source decides.
        return self.options.coverage_penalty * logs.cumsum(1)[:, -1]

    def _enough(self, log_prob: Tensor, length: int) -> Tensor:
        """[S] whether nothing more is wanted of a source whose best live hypothesis has ``log_prob`` [S]."""
        wanted = self.options.n_best
        enough = self.completed >= max(wanted, self.options.beam * self.options.patience)
        lists = [self.kept[number] for number in self.numbers.tolist()]
        if not any(len(kept) == wanted for kept in lists):
            return enough
        worst = [kept[-1].score if len(kept) == wanted else _NEVER for kept in lists]
        settled = best_possible(log_prob, length, self.limits, self.options) <= log_prob.new_tensor(worst)
        return enough | settled

    def _keep(self, s: int, row: int, score: float, log_prob: float, gain: float) -> None:
        """Row ``row`` with EOS, whose log-probability is ``gain``, is finished."""
        kept = self.kept[int(self.numbers[s])]
        if len(kept) < self.options.n_best or score > kept[-1].score:
            gained = (*self.gained[row].tolist(), gain)
            hypothesis = Hypothesis(tuple(self.tokens[row].tolist()), score, log_prob, gained, True)
            self.path.ended((int(self.numbers[s]), hypothesis.tokens), row)
            insort(kept, hypothesis, key=lambda h: -h.score)
            del kept[self.options.n_best :]

    def _cut_off(self, s: int) -> None:
        """The live hypotheses of a source that cannot go on fill its list, as far as there is room."""
        kept = self.kept[int(self.numbers[s])]
        rows = (self.owner == s).nonzero()[:, 0]
        score = self.options.rank(self.total, max(self.tokens.shape[1], 1))
        if self.options.coverage_penalty:
            score = score + self._penalty(self.coverage)
        finished = {hypothesis.tokens for hypothesis in kept}
        cut = []
        for row in rows.tolist():
            tokens, gained = tuple(self.tokens[row].tolist()), tuple(self.gained[row].tolist())
            if tokens not in finished:
                self.path.ended((int(self.numbers[s]), tokens), row)
                cut.append(Hypothesis(tokens, float(score[row]), float(self.total[row]), gained, False))
        kept += sorted(cut, key=lambda h: -h.score)[: self.options.n_best - len(kept)]
