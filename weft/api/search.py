"""From what a caller asks for to a search: options over the recipe's defaults, batches of like length, one search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypedDict

from torch import Tensor

from weft.config import DecodingConfig, nearest
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.sampling import SamplingOptions, sample
from weft.models.compiled import compiled
from weft.models.contract import Seq2Seq

BATCH_TOKENS = 4096  # hypotheses × longest source of a batch, padding counted

Watch = Callable[[Tensor, Tensor], Tensor | None]


class SearchKeys(TypedDict, total=False):
    """What can be asked of every search. Left out or None: as the model's recipe says.

    Attributes:
        beam, length_penalty, patience, no_repeat, exact: see ``weft.config.DecodingConfig``.
        sample: draw at random instead of searching for the best.
        temperature, top_k, top_p, min_p, typical_p, repetition_penalty, frequency_penalty, seed: of the draw, see
            ``weft.decoding.sampling.SamplingOptions``.
        batch_tokens: a batch has hypotheses × longest source ≤ this, padding counted; more need more memory.
    """

    beam: int | None
    length_penalty: float | None
    patience: float | None
    no_repeat: int | None
    exact: bool | None
    sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    batch_tokens: int | None


class Search(NamedTuple):
    """How texts are found: by a beam (or greedily) or by drawing, and what becomes of unknown words."""

    options: SearchOptions
    sampling: SamplingOptions | None
    batch_tokens: int
    replace_unknown: bool = False

    @property
    def source_tokens(self) -> int:
        """How many source tokens a batch may have, padding counted."""
        return self.batch_tokens // (self.sampling.samples if self.sampling else self.options.beam)

    @property
    def answers(self) -> int:
        """How many texts are wanted for each source."""
        return self.sampling.samples if self.sampling else self.options.n_best

    def is_compiled(self, model: Seq2Seq, prefixes: Sequence[Sequence[int]] | None) -> bool:
        """Whether it runs compiled as a whole (see ``Rules.searched``), and takes any number of sources."""
        asked = self.options.no_repeat or self.options.coverage_penalty or any(prefixes or ())
        return self.sampling is None and not asked and compiled(model) is not None

    def run(
        self,
        model: Seq2Seq,
        source: Tensor,
        prefixes: Sequence[Sequence[int]] | None = None,
        numbers: Sequence[int] | None = None,
        watch: Watch | None = None,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each source [B, N].

        Args:
            model: any that fulfils the contract.
            source: padded tokens.
            prefixes: what each target begins with.
            numbers: of the sources among all, for the random streams of a draw.
            watch: see ``weft.decoding.greedy.follow``; a beam has no single path to watch.
        """
        if self.sampling is not None:
            return sample(model, source, self.sampling, self.options, prefixes, numbers, watch=watch)
        if self.options.beam == 1:
            return greedy(model, source, self.options, prefixes, watch=watch)
        return beam(model, source, self.options, prefixes)


def make_search(decoding: DecodingConfig, given: dict[str, Any], n_best: int, replace_unknown: bool = False) -> Search:
    """The search that a recipe's decoding section and what a caller gave ask for.

    Raises:
        ValueError: if a value is out of range, or asks for what such a search has not.
    """
    given = dict(given)
    batch_tokens = given.pop("batch_tokens", BATCH_TOKENS)
    if batch_tokens < 1:
        raise ValueError(f"batch_tokens must be ≥ 1, not {batch_tokens}")
    drawn = {key.name: given.pop(key.name) for key in fields(SamplingOptions) if key.name in given}
    if given.pop("sample", decoding.sample and "beam" not in given):
        usual = decoding.model_dump(include={key.name for key in fields(SamplingOptions)})
        sampling = SamplingOptions(**{**usual, **drawn, "samples": n_best})
        return Search(SearchOptions.of(decoding, **given), sampling, batch_tokens, replace_unknown)
    if drawn:
        raise ValueError(f"{', '.join(drawn)} needs sample=True (at the shell --sample): the best is not drawn")
    given.setdefault("beam", max(decoding.beam, n_best))
    return Search(SearchOptions.of(decoding, n_best=n_best, **given), None, batch_tokens, replace_unknown)


def known(options: Any, keys: type[Any]) -> dict[str, Any]:
    """The options that were given, those that are None left out.

    Raises:
        ValueError: if there is one of another name than the keys of this TypedDict.
    """
    for name in options:
        if name not in keys.__annotations__:
            raise ValueError(f"unknown option {name!r}{nearest(name, keys.__annotations__)}")
    return {name: value for name, value in options.items() if value is not None}


def batches(places: Sequence[int], lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """The places in batches of like lengths, longest first: rows × longest ≤ most, or one row."""
    batch: list[int] = []
    for place in sorted(places, key=lambda place: -lengths[place]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > most:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def windows(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """So many texts at a time; if one cannot be read, those before it come first."""
    some: list[str] = []
    try:
        for text in texts:
            some.append(text)
            if len(some) == size:
                yield some
                some = []
    except Exception:
        if some:
            yield some
        raise
    if some:
        yield some
