"""What could have stood at a place in a target, and how the target would have gone on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from torch import Tensor

from weft.decoding.beam import beam
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.rules import Rules
from weft.decoding.score import score, teacher_inputs
from weft.decoding.steps import begin, predict, searching, top
from weft.models.contract import Seq2Seq


@dataclass(frozen=True)
class Alternative:
    """A token that could come next.

    Attributes:
        token: EOS among them.
        probability: p(token | tokens before, source).
        completion: the whole target with this token at its place, if it was asked for.
    """

    token: int
    probability: float
    completion: Hypothesis | None = None


def alternatives(
    model: Seq2Seq,
    source: Tensor,
    tokens: Sequence[int],
    position: int,
    k: int = 5,
    options: SearchOptions | None = None,
    complete: bool = False,
) -> list[Alternative]:
    """The k most probable tokens after the first ``position`` tokens of a target.

    Args:
        model: any that fulfils the contract.
        source: [1, N] tokens and EOS, or a prompt.
        tokens: the target, without BOS and EOS.
        position: of the token in question; ``len(tokens)`` for the one after the last.
        k: how many; there are fewer if the rules leave fewer.
        options: rules for the tokens, and the search that completes; a beam of 1 is greedy. The defaults if None.
        complete: whether the search goes on from each of them.

    Raises:
        ValueError: if there is not one source, the position is outside the target, or k < 1.
    """
    options = SearchOptions() if options is None else options
    if not 0 <= position <= len(tokens):
        raise ValueError(f"position must be from 0 to {len(tokens)}, the number of tokens, not {position}")
    if k < 1:
        raise ValueError(f"k must be ≥ 1, not {k}")
    before = list(tokens[:position])
    inputs = teacher_inputs(model, source, [before])
    rules, eos = Rules(model, source, options, [before]), model.specials.eos
    with searching(model, options.exact) as runner:
        hidden, _ = runner.step(inputs, begin(runner, source))
        found = predict(runner, hidden[:, -1])
    rules.close(found, inputs[:, 1:], source.new_zeros(1))
    best, chosen = top(found, k)
    pairs = [(t, exp(b)) for t, b in zip(chosen[0].tolist(), best[0].tolist(), strict=True) if b > float("-inf")]
    if not complete:
        return [Alternative(*pair) for pair in pairs]
    onward = [token for token, _ in pairs if token != eos]
    searched = beam(model, source.expand(len(onward), -1), options, [[*before, token] for token in onward])
    completions = {token: hypotheses[0] for token, hypotheses in zip(onward, searched, strict=True)}
    if len(onward) < len(pairs):
        completions[eos] = score(model, source, [before], options)[0]
    return [Alternative(*pair, completions[pair[0]]) for pair in pairs]
