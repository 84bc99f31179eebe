"""What a search is asked for, and what it gives back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, overload

from torch import Tensor

from weft.config import DecodingConfig


@dataclass(frozen=True)
class Hypothesis:
    """One target that a search found, or that was scored.

    Attributes:
        tokens: the target, without BOS and EOS.
        score: what hypotheses of one source are ranked by; see ``SearchOptions``.
        log_prob: log p(target | source), the sum of ``token_log_probs``. What a search left out of consideration
            (suppressed tokens, the tail of a nucleus) does not change it.
        token_log_probs: of each token, and of EOS if it came.
        finished: whether it came to its end: EOS, or what a caller watched for. If not, the target was cut off at its
            greatest length.
    """

    tokens: tuple[int, ...]
    score: float
    log_prob: float
    token_log_probs: tuple[float, ...]
    finished: bool


@dataclass(frozen=True)
class SearchOptions:
    """How a target is searched for. The first eight are those of ``weft.config.DecodingConfig``.

    What is said of a source holds for the prompt of a language model.

    Attributes:
        beam: hypotheses that a source keeps at each step.
        length_penalty: α of score = log p / length^α, EOS counted in the length.
        coverage_penalty: β of Wu et al. 2016: the score gets β Σ_j log min(Σ_i a_ij, 1) added, over source words j and
            target steps i, where a is the attention from target to source. Only ``beam`` looks at it.
        patience: a source is done when beam × patience of its hypotheses are finished (Kasai et al. 2022).
        max_ratio, max_extra: a target has at most max_ratio × source tokens + max_extra tokens, EOS not counted.
        no_repeat: no sequence of so many tokens occurs twice in a target; 0: it may.
        exact: a row's numbers do not depend on its company (see kernels/steady.py), which takes longer. Else they
            depend on it by some 1e-6: two hypotheses that are all but equally probable may change places.
        n_best: how many hypotheses are wanted, at most ``beam``.
        min_len: EOS may come after so many tokens.
        suppress: tokens that are never chosen, besides those that the model's specials name.
    """

    beam: int = 5
    length_penalty: float = 1.0
    coverage_penalty: float = 0.0
    patience: float = 1.0
    max_ratio: float = 2.0
    max_extra: int = 20
    no_repeat: int = 0
    exact: bool = False
    n_best: int = 1
    min_len: int = 0
    suppress: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        lowest = {"beam": 1, "n_best": 1, "coverage_penalty": 0.0, "max_ratio": 0.0, "max_extra": 0}
        for name, low in (lowest | {"no_repeat": 0, "min_len": 0}).items():
            value = getattr(self, name)
            if not low <= value < math.inf:
                raise ValueError(f"{name} must be ≥ {low}, not {value}")
        if not self.patience > 0.0:
            raise ValueError(f"patience must be > 0, not {self.patience}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be a number, not {self.length_penalty}")
        if self.n_best > self.beam:
            raise ValueError(f"a beam of {self.beam} gives at most {self.beam} hypotheses, not {self.n_best}")
        if any(token < 0 for token in self.suppress):
            raise ValueError(f"suppress must be token numbers, not {self.suppress}")

    @classmethod
    def of(cls, config: DecodingConfig, **changes: Any) -> Self:
        """The options that a recipe has, some of them changed; n_best is at most the beam then.

        Raises:
            ValueError: if a value is out of range.
        """
        own = {field.name for field in fields(cls)}
        return cls(**{**config.model_dump(include=own), **changes})

    @overload
    def rank(self, log_prob: float, length: int) -> float: ...
    @overload
    def rank(self, log_prob: Tensor, length: int | Tensor) -> Tensor: ...
    def rank(self, log_prob: float | Tensor, length: int | Tensor) -> float | Tensor:
        """log p / length^α, where the length counts EOS; without the coverage penalty."""
        return log_prob / length**self.length_penalty

    def hypothesis(self, tokens: Sequence[int], token_log_probs: Sequence[float], finished: bool) -> Hypothesis:
        """The hypothesis of these tokens, ranked without a coverage penalty."""
        log_prob = float(sum(token_log_probs))
        score = self.rank(log_prob, max(len(token_log_probs), 1))
        return Hypothesis(tuple(tokens), score, log_prob, tuple(token_log_probs), finished)
