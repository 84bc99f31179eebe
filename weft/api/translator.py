"""A translation model, its tokenizers and the searches as one thing that takes text and gives text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Unpack, cast, overload

import torch
from torch import Tensor, nn

from weft.api.look import KINDS, Look, of_translation, way_of
from weft.api.results import Alignment, Candidate, Choice, Translation
from weft.api.search import Search, SearchKeys, batches, known, make_search, windows
from weft.config import EOS, PAD, UNK, Recipe
from weft.data.tokenizers import TokenizerPair
from weft.decoding.align import align
from weft.decoding.alternatives import alternatives
from weft.decoding.options import Hypothesis
from weft.decoding.score import score
from weft.interop.published import export_translator
from weft.models.contract import Seq2Seq
from weft.observe import record

TIMES_TRAINED = 8  # a source may have so many times the tokens that a source had in training
COMPILED = 4096  # sources that one compiled search is given: only their tokens and answers take memory
WINDOW = 1024  # lines that are read before the first of them is translated


class Options(SearchKeys, total=False):
    """What can be asked of a translation, besides ``SearchKeys``. Left out or None: as the model's recipe says.

    Attributes:
        coverage_penalty, max_ratio, max_extra, replace_unknown: see ``weft.config.DecodingConfig``.
        n_best: how many translations of each source; the beam is as wide at least, unless it is given. If they are
            drawn, they come in the order drawn.
        to: the language; a model of several must be told, with one of its own it is a check.
    """

    coverage_penalty: float | None
    max_ratio: float | None
    max_extra: int | None
    replace_unknown: bool | None
    n_best: int | None
    to: str | None


class Translator:
    """A translation model with its tokenizers and searches.

    Attributes:
        model: the nn.Module, which fulfils ``weft.models.contract.Seq2Seq``.
        recipe: what it was trained by; its ``decoding`` section holds the defaults of every search.
        tokenizers: for the source and for the target.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, tokenizers: TokenizerPair) -> None:
        self.model, self.recipe, self.tokenizers = model, recipe, tokenizers
        self._seq2seq = cast(Seq2Seq, model)
        self._nothing = Candidate("", 0.0, 0.0, (), (), True, tokenizers.target)

    def __repr__(self) -> str:
        data, count = self.recipe.data, sum(parameter.numel() for parameter in self.model.parameters())
        way = f"{data.source} → {data.target}, " if data.source and data.target else ""
        way = f"between {', '.join(data.languages)}, " if data.languages else way
        return f"Translator({way}{self.recipe.model.family}, {count:,} parameters)"

    @property
    def longest(self) -> int | None:
        """How many tokens a source may have; None if any number.

        As many as the model can take, and at most 8 × ``data.max_len``: what is far longer than all that a model was
        trained on is translated badly, and the memory of attention grows with the square of the length.
        """
        limits = [TIMES_TRAINED * self.recipe.data.max_len, (self._seq2seq.max_len or 0) - 1]  # the end token counts
        return min((limit for limit in limits if limit > 0), default=None)

    @overload
    def translate(self, text: str, prefix: str | None = None, **options: Unpack[Options]) -> Translation: ...

    @overload
    def translate(
        self, text: list[str] | tuple[str, ...], prefix: str | Sequence[str] | None = None, **options: Unpack[Options]
    ) -> list[Translation]: ...

    def translate(
        self,
        text: str | list[str] | tuple[str, ...],
        prefix: str | Sequence[str] | None = None,
        **options: Unpack[Options],
    ) -> Translation | list[Translation]:
        """Translate a text, or each of a list of texts. A text is one sentence or so: what a line of the data was.

        With ``exact=True`` the company that a text is translated in changes nothing of its translation, nor of its
        scores; without, it may exchange two translations that are all but equally probable. What is blank stays empty.

        Args:
            text: what to translate.
            prefix: what the translation must begin with; one for all, or one for each text.
            options: see ``Options``.

        Returns:
            A translation, or a list of them in the order of the texts.

        Raises:
            ValueError: if a text has more tokens than ``longest``, naming it; nothing is cut off silently. If an
                option is unknown or out of range, or the model translates to another language.
        """
        texts = [text] if isinstance(text, str) else list(text)
        prefixes = [prefix or ""] * len(texts) if prefix is None or isinstance(prefix, str) else list(prefix)
        if len(prefixes) != len(texts):
            raise ValueError(f"expected a prefix for each of {len(texts)} texts, not {len(prefixes)}")
        search = self.search(**options)
        lines = self._read(texts, self._mark(options.get("to")))
        for line in lines:
            if line.fault:
                raise ValueError(line.fault)
        found = self._translated(lines, search, self.tokenizers.target.encode_batch(prefixes))
        return found[0] if isinstance(text, str) else found

    def translate_lines(
        self,
        lines: Iterable[str],
        window: int = WINDOW,
        skipped: Callable[[str], None] | None = None,
        **options: Unpack[Options],
    ) -> Iterator[Translation]:
        """Translate a stream of lines, in their order, holding no more than a window of them.

        Args:
            lines: any number of lines.
            window: so many are read and sorted into batches at a time; 1 answers each line at once.
            skipped: told of each line with more tokens than ``longest``; its translation is then empty. If
                None, such a line is an error.
            options: see ``Options``.

        Raises:
            ValueError: as ``translate``; for a line that is too long once all lines before it were given.
        """
        if window < 1:
            raise ValueError(f"window must be ≥ 1, not {window}")
        return self._stream(iter(lines), window, skipped, self.search(**options), self._mark(options.get("to")))

    def score(self, source: str, target: str, to: str | None = None) -> Translation:
        """How probable the model finds a given translation, in all and (``n_best[0].token_log_probs``) by token.

        Args:
            source, target: texts.
            to: the language of the target, if the model has several.

        Raises:
            ValueError: if the source or the target is longer than the model can take.
        """
        ids = self.tokenizers.target.encode(target)
        (line,) = self._read([source], self._mark(to))
        (hypothesis,) = score(self._seq2seq, _padded([line.ids]), [ids], self.search().options)
        return self._translation(line, [self._candidate(hypothesis, target)])

    def align(self, source: str | Sequence[int], target: str | Sequence[int], to: str | None = None) -> Alignment:
        """Where the model looks in the source while it says the target.

        Args:
            source: a text, or token numbers such as ``Translation.source_ids``.
            target: a text, or token numbers such as ``Candidate.ids``.
            to: the language of the target, if the source is a text and the model has several.

        Raises:
            ValueError: if the model does not attend to its source, or a side is longer than it can take.
        """
        row, ids = self._row(source, to), self._target_ids(target)
        (weights,) = align(self._seq2seq, row, [ids])
        source_tokens = self.tokenizers.source.tokens(row[0].tolist())
        return Alignment(tuple(source_tokens), tuple(self.tokenizers.target.tokens([*ids, EOS])), weights)

    def look(self, source: str, target: str | None = None, **options: Unpack[Options]) -> Look:
        """Everything that the model looks at while it translates a text, or while it says a given translation.

        Args:
            source: a text.
            target: a translation of it; the one that is found if None.
            options: of the search.

        Raises:
            ValueError: if the source is blank or longer than the model can take; if options come with a target.
        """
        to = options.get("to")
        given = [name for name, value in options.items() if value is not None and name != "to"]
        if target is not None and given:
            raise ValueError(f"{', '.join(given)}: nothing is searched for where the target is given")
        search = self.search(**options)
        if search.sampling is not None and search.sampling.samples > 1:
            raise ValueError(f"n_best={search.sampling.samples}: one translation that is drawn can be looked at")
        with record(self.model, kinds=KINDS if target is None else (*KINDS, "hidden")) as seen:
            found = self.translate(source, **options) if target is None else self.score(source, target, to)
        return of_translation(seen, found, way_of(search) if target is None else "forced")

    def alternatives(
        self,
        source: str,
        target: str | Sequence[int],
        position: int,
        k: int = 5,
        complete: bool = False,
        **options: Unpack[Options],
    ) -> list[Choice]:
        """The k most probable tokens at a place of a translation, given what stands before it.

        Args:
            source: a text.
            target: a text, or token numbers such as ``Candidate.ids``.
            position: of the token in question, from 0; the number of tokens for what comes after the last.
            k: how many.
            complete: whether the search goes on from each of them to a whole translation.
            options: of the search that completes; and ``to``, if the model has several languages.

        Raises:
            ValueError: if there is no such position, or an argument is out of range.
        """
        ids, search = self._target_ids(target), self.search(**options).options
        row = self._row(source, options.get("to"))
        found = alternatives(self._seq2seq, row, ids, position, k, search, complete)
        return [
            Choice(
                self.tokenizers.target.tokens([each.token])[0],
                each.probability,
                None if each.completion is None else self._candidate(each.completion),
            )
            for each in found
        ]

    def export(
        self,
        path: str | os.PathLike[str],
        to: str = "transformers",
        samples: Sequence[str] = (),
        quantization: str = "none",
    ) -> str:
        """Write the model for others, once the program that is to run it has said what weft says.

        Args:
            path: a folder that is not there yet.
            to: "transformers" or "ctranslate2".
            samples: sentences on which both are compared; if none, some are made of the vocabulary.
            quantization: how CTranslate2 stores matrices: none, int8, int16, float16 or bfloat16.

        Returns:
            What was written and how it was checked, for people.

        Raises:
            ValueError: if such a format has no place for this model, or what was written does not say what weft says.
            ImportError: if a package is missing that the format needs.
            OSError: if the path is there already, or cannot be written.
        """
        return export_translator(self.model, self.recipe, self.tokenizers, path, to, samples, quantization)

    def search(self, **options: Unpack[Options]) -> Search:
        """The search that these options and the recipe's defaults ask for.

        Raises:
            ValueError: if an option is unknown, out of range, or asks for nothing.
        """
        given = known(options, Options)
        given.pop("to", None)
        replaced = given.pop("replace_unknown", self.recipe.decoding.replace_unknown)
        if replaced and not self._seq2seq.cross_attentions:
            raise ValueError("replace_unknown needs a model that attends to its source, which this one does not")
        n_best = given.pop("n_best", 1)
        return make_search(self.recipe.decoding, given, n_best, replaced)

    @property
    def languages(self) -> tuple[str, ...]:
        """What the model can translate to, as far as its recipe says."""
        data = self.recipe.data
        return tuple(data.languages) or ((data.target,) if data.target else ())

    def _mark(self, to: str | None) -> list[int]:
        """What sources open with that are to become this language: nothing, if the model has but one.

        Raises:
            ValueError: if the model does not translate to it, or has several and none was named.
        """
        known = " or ".join(self.languages) or "a language that its recipe does not name"
        if to is not None and to not in self.languages:
            raise ValueError(f"to={to!r}: this model translates to {known}")
        if not self.recipe.data.languages:
            return []
        if to is None:
            raise ValueError(f"to: this model translates to {known}: say which")
        return [self.tokenizers.source.tags[to]]

    def _stream(
        self,
        texts: Iterator[str],
        window: int,
        skipped: Callable[[str], None] | None,
        search: Search,
        mark: list[int],
    ) -> Iterator[Translation]:
        number = 0
        for some in windows(texts, window):
            lines = self._read(some, mark, number)
            faults = [place for place, line in enumerate(lines) if line.fault]
            whole = lines[: faults[0]] if faults and skipped is None else lines
            yield from self._translated(whole, search)
            for place in faults:
                if skipped is None:
                    raise ValueError(lines[place].fault)
                skipped(lines[place].fault)
            number += len(lines)

    def _read(self, texts: Sequence[str], mark: list[int], first: int = 0) -> list[_Line]:
        """The texts as tokens behind their mark; the first is number ``first``, counted from 0."""
        longest, lines = self.longest, []
        encoded = self.tokenizers.source.encode_batch(texts)
        for number, (text, tokens) in enumerate(zip(texts, encoded, strict=True), first):
            ids, fault = mark + tokens, ""
            if longest is not None and len(ids) > longest:
                fault = (
                    f"line {number + 1:,} has {len(ids):,} tokens, but the model takes at most {longest:,}: split it"
                )
            lines.append(_Line(text, ids, number, fault))
        return lines

    def _translated(
        self, lines: Sequence[_Line], search: Search, prefixes: Sequence[Sequence[int]] | None = None
    ) -> list[Translation]:
        """Each line's translation, in order: lines of like length are translated together."""
        found: list[list[Candidate]] = [[self._nothing]] * len(lines)
        wanted = [place for place, line in enumerate(lines) if line.text.strip() and not line.fault]
        lengths = [len(line.ids) + 1 for line in lines]
        most = search.source_tokens
        if search.is_compiled(self._seq2seq, prefixes):
            most = max(most, COMPILED * max(lengths, default=0))
        for places in batches(wanted, lengths, most):
            batch = [lines[place] for place in places]
            chosen = None if prefixes is None else [prefixes[place] for place in places]
            for place, candidates in zip(places, self._searched(batch, search, chosen), strict=True):
                found[place] = candidates
        return [self._translation(line, candidates) for line, candidates in zip(lines, found, strict=True)]

    def _searched(
        self, lines: Sequence[_Line], search: Search, prefixes: Sequence[Sequence[int]] | None
    ) -> list[list[Candidate]]:
        """The candidates of each line of a batch."""
        source = _padded([line.ids for line in lines])
        found = search.run(self._seq2seq, source, prefixes, [line.number for line in lines])
        texts = self._filled(lines, source, found) if search.replace_unknown else {}
        return [[self._candidate(h, texts.get((row, h))) for h in best] for row, best in enumerate(found)]

    def _filled(
        self, lines: Sequence[_Line], source: Tensor, found: Sequence[Sequence[Hypothesis]]
    ) -> dict[tuple[int, Hypothesis], str]:
        """The texts of hypotheses with unknown tokens, which give way to the source words they attended to most."""
        holes = [(row, h) for row, best in enumerate(found) for h in best if UNK in h.tokens]
        if not holes:
            return {}
        targets = [hypothesis.tokens for _, hypothesis in holes]
        aligned = align(self._seq2seq, source[torch.tensor([row for row, _ in holes])], targets)
        texts = {}
        for (row, hypothesis), weights in zip(holes, aligned, strict=True):
            words = self._words(lines[row])
            marks = len(lines[row].ids) - len(words)
            looked = (
                weights[:-1, marks : marks + len(words)].argmax(-1).tolist()
            )  # neither at the mark nor at the end token
            put = [words[place] for place, token in zip(looked, hypothesis.tokens, strict=True) if token == UNK]
            texts[row, hypothesis] = self.tokenizers.target.decode(hypothesis.tokens, put)
        return texts

    def _words(self, line: _Line) -> list[str]:
        """What each source token but the mark stands for in the text, the unknown ones too."""
        marks, source = set(self.tokenizers.source.tags.values()), self.tokenizers.source
        ids = [token for token in line.ids if token not in marks]
        split = {"word": line.text.split(" "), "char": list(line.text)}.get(source.kind, [])
        if len(split) == len(ids):
            return split
        return [source.decode([token], _UNKNOWN).strip() for token in ids]

    def _translation(self, line: _Line, candidates: Sequence[Candidate]) -> Translation:
        return Translation(line.text, tuple(line.ids), tuple(candidates), self)

    def _candidate(self, found: Hypothesis, text: str | None = None) -> Candidate:
        target = self.tokenizers.target
        return Candidate(
            target.decode(found.tokens, _UNKNOWN) if text is None else text,
            found.score,
            found.log_prob,
            found.tokens,
            found.token_log_probs,
            found.finished,
            target,
        )

    def _row(self, source: str | Sequence[int], to: str | None = None) -> Tensor:
        """[1, N] the tokens of a text behind their mark, or those given, and EOS."""
        if isinstance(source, str):
            source = self._mark(to) + self.tokenizers.source.encode(source)
        return _padded([source])

    def _target_ids(self, target: str | Sequence[int]) -> list[int]:
        return self.tokenizers.target.encode(target) if isinstance(target, str) else list(target)


@dataclass(frozen=True)
class _Line:
    """A text to translate: its tokens without EOS, its number from 0, and why it cannot be translated, if so."""

    text: str
    ids: Sequence[int]
    number: int = 0
    fault: str = ""


_UNKNOWN = "<unk>"  # what an unknown word is written as


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """[B, N] each row's tokens and EOS, padded."""
    return nn.utils.rnn.pad_sequence([torch.tensor([*row, EOS]) for row in rows], batch_first=True, padding_value=PAD)
