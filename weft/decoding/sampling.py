"""Sampling: each token is drawn from the model's distribution, or from the likelier part of it.

A draw is a function of (seed, number of the source, number of its sample, position) alone: a hash of the four numbers
gives a uniform number, which picks a token by its share of the sorted distribution. No generator is asked, so a sample
is the same in any batch and order (to the last bit of the distribution with ``SearchOptions.exact``), and changing how
many are drawn changes none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.decoding.greedy import Moment, Watch, follow
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.steps import top
from weft.models.contract import Seq2Seq


@dataclass(frozen=True)
class SamplingOptions:
    """What is drawn from. All that is given must hold, in this order, which is that of transformers.

    Attributes:
        repetition_penalty: above 1, what the prompt and the target so far hold is less likely, each token once: a
            logit below 0 is multiplied by it, one above 0 divided (Keskar et al. 2019). The source of a translation
            does not count.
        frequency_penalty: each time that a token occurs in the target so far takes this off its logit; the prompt does
            not count.
        temperature: the logits are divided by it: below 1 sharper, above 1 flatter.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the smallest set of likeliest tokens with at least this probability together (Holtzman et al. 2020).
        min_p: only tokens at least this times as likely as the likeliest (Nguyen et al. 2024).
        typical_p: only the smallest set with at least this probability together of those tokens that are about as
            surprising as a draw is on average: −log p nearest to the entropy of what is left (Meister et al. 2023).
        samples: how many for each source.
        seed: another seed, other samples.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty must be > 0, not {self.repetition_penalty}; 1 changes nothing")
        if not math.isfinite(self.frequency_penalty):
            raise ValueError(f"frequency_penalty must be a finite number, not {self.frequency_penalty}")
        if not 0.0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be > 0, not {self.temperature}; top_k=1 takes the likeliest token")
        if self.top_k < 0:
            raise ValueError(f"top_k must be ≥ 0, not {self.top_k}")
        for name in ("top_p", "typical_p"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be above 0 and at most 1, not {getattr(self, name)}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, not {self.min_p}")
        if self.samples < 1:
            raise ValueError(f"samples must be ≥ 1, not {self.samples}")


def sample(
    model: Seq2Seq,
    source: Tensor,
    sampling: SamplingOptions | None = None,
    options: SearchOptions | None = None,
    prefix: Sequence[Sequence[int]] | None = None,
    numbers: Sequence[int] | None = None,
    watch: Watch | None = None,
) -> list[list[Hypothesis]]:
    """Draw targets for each source.

    Args:
        model: any that fulfils the contract.
        source: [B, N] tokens and EOS, or prompts, padded with PAD.
        sampling: the defaults if None.
        options: the rules of lengths and tokens; the defaults if None.
        prefix: the tokens that each target must begin with.
        numbers: of the sources, for their random streams; 0, 1, 2, … if None. Whoever cuts many sources into batches
            gives their numbers among all.
        watch: sees the samples grow, and may end them; see ``follow``. Row r is sample r mod samples of source
            r // samples.

    Returns:
        For each source its samples, in the order of their numbers (not best first).

    Raises:
        ValueError: if the source, the prefixes or the numbers are not as described.
    """
    sampling = SamplingOptions() if sampling is None else sampling
    if numbers is not None and len(numbers) != len(source):
        raise ValueError(f"expected a number for each of {len(source)} sources, not {len(numbers)}")
    order = torch.tensor(range(len(source)) if numbers is None else numbers, dtype=torch.int64, device=source.device)

    def pick(moment: Moment) -> Tensor:
        rows = moment.rows
        position = torch.full_like(rows, moment.tokens.shape[1])
        u = uniform(sampling.seed, order[rows // sampling.samples], rows % sampling.samples, position)
        return draw(*candidates(penalised(moment, sampling), sampling), u)

    return follow(model, source, pick, options, prefix, sampling.samples, watch)


def penalised(moment: Moment, sampling: SamplingOptions) -> Tensor:
    """What the next tokens are drawn by [R, V], up to a constant for each row: logits after the penalties.

    Without penalties these are the log-probabilities as they are. What the rules forbid is −∞.
    """
    repetition, frequency = sampling.repetition_penalty, sampling.frequency_penalty
    if repetition == 1.0 and frequency == 0.0:
        return moment.log_probs
    scores = moment.logits
    if repetition != 1.0:
        held = torch.cat([moment.read, moment.tokens], 1)
        old = scores.gather(1, held)
        scores = scores.scatter(1, held, torch.where(old < 0.0, old * repetition, old / repetition))
    if frequency != 0.0:
        scores = scores.scatter_add(1, moment.tokens, scores.new_full(moment.tokens.shape, -frequency))
    return scores.masked_fill(moment.log_probs == float("-inf"), float("-inf"))


def candidates(scores: Tensor, sampling: SamplingOptions) -> tuple[Tensor, Tensor]:
    """The probabilities [R, C] of what may be drawn by scores [R, V], likeliest first, and the tokens [R, C].

    Scores are log-probabilities, up to a constant for each row. Probabilities are as after the temperature, and 0 for
    what is left out; they need not sum to 1.
    """
    scores, tokens = top(scores, sampling.top_k or scores.shape[1])
    share = (scores.double() / sampling.temperature).softmax(-1)
    kept = share >= sampling.min_p * share[:, :1]
    if sampling.top_p < 1.0:
        likelier = share.cumsum(-1) - share  # the probability of all tokens before
        kept &= likelier < sampling.top_p
    kept[:, 0] = True
    share = share.where(kept, 0.0)
    return (share.where(typical(share, sampling.typical_p), 0.0) if sampling.typical_p < 1.0 else share), tokens


def typical(share: Tensor, mass: float) -> Tensor:
    """Which of share [R, C] are the most typical ones, with at least this part of the whole together.

    Of equally typical ones at the border all are.
    """
    share = share / share.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(share).sum(-1, keepdim=True)
    away = (-share.log() - entropy).abs()  # ∞ for what has no share
    nearest, order = away.sort(dim=-1, stable=True)
    last = (share.gather(-1, order).cumsum(-1) < mass).sum(-1, keepdim=True)
    return away <= nearest.gather(-1, last.clamp(max=share.shape[-1] - 1))


def draw(share: Tensor, tokens: Tensor, u: Tensor) -> Tensor:
    """The token [R] at which the running sum of share [R, C] passes the part u [R] of the whole.

    As u ≤ 1 − 2⁻⁵³, u times the whole is less than the whole even when rounded: a token with a share of 0 is not drawn.
    A row of NaN, where there is nothing to draw from, gives any token.
    """
    running = share.cumsum(-1)
    place = torch.searchsorted(running, (u * running[:, -1])[:, None], right=True)
    return tokens.gather(1, place.clamp(max=tokens.shape[1] - 1))[:, 0]


def uniform(seed: int, *numbers: Tensor) -> Tensor:
    """A number strictly between 0 and 1 for each row of the int64 tensors, in fp64, from nothing but these."""
    bits = mix(torch.full_like(numbers[0], _signed(seed)))
    for number in numbers:
        bits = mix(bits ^ number)
    return (_shifted(bits, 12).double() + 0.5) * 2.0**-52


def mix(bits: Tensor) -> Tensor:
    """SplitMix64 (Steele et al. 2014): the output after state ``bits``, 64 bits to 64 well-mixed bits."""
    bits = bits + _GOLDEN
    bits = (bits ^ _shifted(bits, 30)) * _FIRST
    bits = (bits ^ _shifted(bits, 27)) * _SECOND
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Moved right, zeros coming in (torch's own shift of int64 brings the sign in)."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(value: int) -> int:
    """The low 64 bits as a signed number."""
    return (value + 2**63) % 2**64 - 2**63


_GOLDEN, _FIRST, _SECOND = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
