"""A translation model, its tokenizers and the searches as one thing that takes text and gives text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Unpack, cast, overload

import torch
from torch import Tensor, nn

from weft.api.look import KINDS, Look, of_translation, way_of
from weft.api.reader import Line, Part, Reader, TextKeys, Way
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


class Options(SearchKeys, TextKeys, total=False):
    """What can be asked of a translation, besides ``SearchKeys`` and ``TextKeys``. None: as the model's recipe says.

    Attributes:
        coverage_penalty, max_ratio, max_extra, replace_unknown: see ``weft.config.DecodingConfig``.
        n_best: how many translations of each source; the beam is as wide at least, unless it is given. If they are
            drawn, they come in the order drawn.
    """

    coverage_penalty: float | None
    max_ratio: float | None
    max_extra: int | None
    replace_unknown: bool | None
    n_best: int | None


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
        way = f"{' → '.join(data.direction)}, " if all(data.direction) else ""
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
        """Translate a text, or each of a list of texts. A text is what a line of the data was, a sentence or so.

        With ``split=True`` it may be any number of sentences, which do not know of each other.

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
        way = self._reader.way(options, search.answers == 1)
        lines = _whole(self._reader.read(texts, way, begun=[bool(each) for each in prefixes]))
        begins = self.tokenizers.target.encode_batch(prefixes) if any(prefixes) else None
        found = self._translated(lines, search, begins)
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
        search = self.search(**options)
        return self._stream(iter(lines), window, skipped, search, self._reader.way(options, search.answers == 1))

    def score(self, source: str, target: str, to: str | None = None) -> Translation:
        """How probable the model finds a given translation, in all and (``n_best[0].token_log_probs``) by token.

        Both texts are taken as they stand: not split, capitals as capitals.

        Args:
            source, target: texts.
            to: the language of the target, if the model has several.

        Raises:
            ValueError: if the source or the target is longer than the model can take.
        """
        ids = self.tokenizers.target.encode(target)
        (line,) = self._reader.read([source], Way(self._reader.mark(to)))
        (part,) = line.parts
        (hypothesis,) = score(self._seq2seq, _padded([part.ids]), [ids], self.search().options)
        return self._translation(part, [self._candidate(hypothesis, target)])

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
        given = [name for name, value in options.items() if value is not None and name not in ("to", "from_")]
        if target is not None and given:
            raise ValueError(f"{', '.join(given)}: nothing is searched for where the target is given")
        search = self.search(**options)
        if search.sampling is not None and search.sampling.samples > 1:
            raise ValueError(f"n_best={search.sampling.samples}: one translation that is drawn can be looked at")
        if options.get("split"):
            raise ValueError("split: what is looked at is one text, a sentence or so")
        way = Way(self._reader.mark(to))
        if target is None:
            way = replace(self._reader.way(options, search.answers == 1), split=False, to=None, from_=None)
        lines = _whole(self._reader.read([source], way))
        with record(self.model, kinds=KINDS if target is None else (*KINDS, "hidden")) as seen:
            found = self._translated(lines, search)[0] if target is None else self.score(source, target, to)
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

        The source is taken as it stands, as in ``score``.

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
        sources = self.recipe.data.languages or self.recipe.data.direction[:1]
        if (from_ := given.get("from_")) and from_ not in sources:
            raise ValueError(
                f"{from_!r}: this model translates from {' or '.join(filter(None, sources)) or 'any text'}"
            )
        for name in TextKeys.__annotations__:
            given.pop(name, None)
        replaced = given.pop("replace_unknown", self.recipe.decoding.replace_unknown)
        if replaced and not self._seq2seq.cross_attentions:
            raise ValueError("replace_unknown needs a model that attends to its source, which this one does not")
        n_best = given.pop("n_best", 1)
        return make_search(self.recipe.decoding, given, n_best, replaced)

    @property
    def languages(self) -> tuple[str, ...]:
        """What the model can translate to, as far as its recipe says."""
        return self._reader.languages

    def detect(self, text: str) -> dict[str, float]:
        """How probably a text is in each of the model's languages, the likeliest first; the rest: in none of them.

        Raises:
            ValueError: if the model does not know several apart.
        """
        return self._reader.detect(text)

    @property
    def _reader(self) -> Reader:
        return Reader(self.recipe, self.tokenizers, self.longest)

    def _stream(
        self, texts: Iterator[str], window: int, skipped: Callable[[str], None] | None, search: Search, way: Way
    ) -> Iterator[Translation]:
        number = 0
        for some in windows(texts, window):
            lines = self._reader.read(some, way, number)
            faults = [place for place, line in enumerate(lines) if line.fault]
            whole = lines[: faults[0]] if faults and skipped is None else lines
            yield from self._translated(whole, search)
            for place in faults:
                if skipped is None:
                    raise ValueError(lines[place].fault)
                skipped(lines[place].fault)
            number += len(lines)

    def _translated(
        self, lines: Sequence[Line], search: Search, prefixes: Sequence[Sequence[int]] | None = None
    ) -> list[Translation]:
        """Each line's translation, in order: parts of like length are translated together."""
        parts = [part for line in lines for part in line.parts]
        found = [[self._said(part)] if part.is_said else [self._nothing] for part in parts]
        faults = {part.line for line in lines if line.fault for part in line.parts}
        asked = [bool(part.piece.text.strip()) and not part.is_said and part.line not in faults for part in parts]
        wanted = [place for place, is_asked in enumerate(asked) if is_asked]
        lengths = [len(part.ids) + 1 for part in parts]
        most = search.source_tokens
        if search.is_compiled(self._seq2seq, prefixes):
            most = max(most, COMPILED * max(lengths, default=0))
        for places in batches(wanted, lengths, most):
            batch = [parts[place] for place in places]
            chosen = None if prefixes is None else [prefixes[part.line] for part in batch]
            for place, candidates in zip(places, self._searched(batch, search, chosen), strict=True):
                part = parts[place]
                if not part.piece.holds(candidates[0].text):  # something was to be carried over, and got lost
                    part = parts[place] = self._reader.plain(part)
                    ((*candidates,),) = self._searched([part], search, None)
                found[place] = [replace(each, text=part.piece.said(each.text)) for each in candidates]
        translations = iter([self._translation(part, best) for part, best in zip(parts, found, strict=True)])
        return [self._joined(line, [next(translations) for _ in line.parts]) for line in lines]

    def _joined(self, line: Line, parts: Sequence[Translation]) -> Translation:
        """The translation of a text, of those of its parts."""
        if len(parts) == 1:
            return replace(parts[0], source=line.text)
        spoken = [(part.piece, found) for part, found in zip(line.parts, parts, strict=True) if part.piece.text.strip()]
        best = [found.n_best[0] for _, found in spoken]
        whole = Candidate(
            "".join(
                each.text + piece.between(each.text) for each, (piece, _) in zip(best, spoken, strict=True)
            ).rstrip(),
            sum(each.score for each in best),
            sum(each.log_prob for each in best),
            tuple(token for each in best for token in each.ids),
            _one_end(best),
            all(each.finished for each in best),
            self.tokenizers.target,
        )
        ids = tuple(token for _, found in spoken for token in found.source_ids)
        return Translation(line.text, ids, (whole,), self, tuple(found for _, found in spoken))

    def _said(self, part: Part) -> Candidate:
        """A text that stays as it is."""
        target = self.tokenizers.target
        ids = tuple(target.encode(part.piece.text))
        return Candidate(part.piece.original, 0.0, 0.0, ids, (0.0,) * (len(ids) + 1), True, target)

    def _searched(
        self, parts: Sequence[Part], search: Search, prefixes: Sequence[Sequence[int]] | None
    ) -> list[list[Candidate]]:
        """The candidates of each part of a batch."""
        source = _padded([part.ids for part in parts])
        found = search.run(self._seq2seq, source, prefixes, [part.stream for part in parts])
        texts = self._filled(parts, source, found) if search.replace_unknown else {}
        return [[self._candidate(h, texts.get((row, h))) for h in best] for row, best in enumerate(found)]

    def _filled(
        self, parts: Sequence[Part], source: Tensor, found: Sequence[Sequence[Hypothesis]]
    ) -> dict[tuple[int, Hypothesis], str]:
        """The texts of hypotheses with unknown tokens, which give way to the source words they attended to most."""
        holes = [(row, h) for row, best in enumerate(found) for h in best if UNK in h.tokens]
        if not holes:
            return {}
        targets = [hypothesis.tokens for _, hypothesis in holes]
        aligned = align(self._seq2seq, source[torch.tensor([row for row, _ in holes])], targets)
        texts = {}
        for (row, hypothesis), weights in zip(holes, aligned, strict=True):
            words = self._words(parts[row])
            marks = len(parts[row].ids) - len(words)
            own = weights[:-1, marks : marks + len(words)]  # neither the mark nor the end token
            looked = own.argmax(-1).tolist()
            put = [words[place] for place, token in zip(looked, hypothesis.tokens, strict=True) if token == UNK]
            texts[row, hypothesis] = self.tokenizers.target.decode(hypothesis.tokens, put)
        return texts

    def _words(self, part: Part) -> list[str]:
        """What each source token but the mark stands for in the text, the unknown ones too."""
        marks, source = set(self.tokenizers.source.tags.values()), self.tokenizers.source
        ids = [token for token in part.ids if token not in marks]
        text = part.piece.text
        split = {"word": text.split(" "), "char": list(text)}.get(source.kind, [])
        if len(split) == len(ids):
            return split
        return [source.decode([token], _UNKNOWN).strip() for token in ids]

    def _translation(self, part: Part, candidates: Sequence[Candidate]) -> Translation:
        return Translation(part.piece.text, tuple(part.ids), tuple(candidates), self)

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
            source = self._reader.mark(to) + self.tokenizers.source.encode(source)
        return _padded([source])

    def _target_ids(self, target: str | Sequence[int]) -> list[int]:
        return self.tokenizers.target.encode(target) if isinstance(target, str) else list(target)


def _one_end(sentences: Sequence[Candidate]) -> tuple[float, ...]:
    """The log-probabilities of the tokens in a row; that of an end but the last goes to the token before it."""
    found: list[float] = []
    for sentence in sentences:
        count = len(sentence.ids) + (sentence is sentences[-1])
        values, ends = list(sentence.token_log_probs[:count]), sum(sentence.token_log_probs[count:])
        found += values
        if found:
            found[-1] += ends
    return tuple(found)


def _whole(lines: list[Line]) -> list[Line]:
    """The lines, if they can all be translated.

    Raises:
        ValueError: if one cannot.
    """
    for line in lines:
        if line.fault:
            raise ValueError(line.fault)
    return lines


_UNKNOWN = "<unk>"  # what an unknown word is written as


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """[B, N] each row's tokens and EOS, padded."""
    return nn.utils.rnn.pad_sequence([torch.tensor([*row, EOS]) for row in rows], batch_first=True, padding_value=PAD)
