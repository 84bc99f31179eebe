"""From text to what a translation model is given: sentences, small letters, the mark of a language, tokens.

reader = Reader(recipe, tokenizers, longest=None)
reader.read(["Where is it?", "¿Dónde está?"], reader.way({"to": "es"}, single=True))    # the second stays as it is
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from weft.api.pieces import Piece, has_capitals, pieces, quiet
from weft.config import Recipe
from weft.data.tokenizers import TokenizerPair

SURE = 0.95  # how probably a text must be in the language asked for to stay as it is


class TextKeys(TypedDict, total=False):
    """What can be asked of a text before the search. Left out or None: as the model's recipe says.

    Attributes:
        split, recase, carry: see ``weft.config.DecodingConfig``; only one translation without a prefix is put together
            of several.
        to: the language; a model of several must be told, with one of its own it is a check.
        from_: the language that the text is in. If it is not said, a model of several languages tells by the text, and
            leaves one as it is that is in the language asked for.
    """

    split: bool | None
    recase: bool | None
    carry: bool | None
    to: str | None
    from_: str | None


@dataclass(frozen=True)
class Way:
    """What becomes of a text before the search.

    Attributes:
        mark: what sources open with.
        split, recase, carry: as asked for.
        to: the language asked for, if what is in it already is to stay as it is.
        from_: the language of the text, if it was said.
    """

    mark: list[int]
    split: bool = False
    recase: bool = False
    carry: bool = False
    to: str | None = None
    from_: str | None = None


@dataclass(frozen=True)
class Part:
    """What is translated at once.

    Attributes:
        piece: its text.
        ids: its tokens, without EOS.
        line: the number of its line, from 0.
        place: of the part in its line, from 0.
        is_said: whether it stays as it is.
    """

    piece: Piece
    ids: Sequence[int]
    line: int = 0
    place: int = 0
    is_said: bool = False

    @property
    def stream(self) -> int:
        """The number of its random stream: that of its line, or for a later part of a line one of its own."""
        return self.line + (self.place << 40)


@dataclass(frozen=True)
class Line:
    """A text to translate: its parts, and why it cannot be translated, if so."""

    text: str
    parts: tuple[Part, ...]
    fault: str = ""


@dataclass(frozen=True)
class Reader:
    """Reads texts as a model was trained to.

    Attributes:
        recipe: of the model.
        tokenizers: of the model.
        longest: how many tokens a source may have; None if any number.
    """

    recipe: Recipe
    tokenizers: TokenizerPair
    longest: int | None

    @property
    def languages(self) -> tuple[str, ...]:
        """What the model can translate to, as far as its recipe says."""
        data = self.recipe.data
        return tuple(data.languages) or tuple(filter(None, data.direction[1:]))

    def detect(self, text: str) -> dict[str, float]:
        """How probably a text is in each of the model's languages, the likeliest first; the rest: in none of them.

        Raises:
            ValueError: if the model does not know several apart.
        """
        languages, source = self.tokenizers.languages, self.tokenizers.source
        if languages is None:
            raise ValueError("this model cannot tell languages apart")
        return languages.of(source.encode(quiet(text) if has_capitals(text) else text))  # capitals tell nothing

    def way(self, options: TextKeys, single: bool) -> Way:
        """What these options ask of a text before the search; of several answers none is put together of parts.

        Raises:
            ValueError: as ``mark``.
        """
        decoding, to = self.recipe.decoding, options.get("to")
        split, recase, carry = (
            single and (usual if asked is None else asked)
            for usual, asked in (
                (decoding.split, options.get("split")),
                (decoding.recase, options.get("recase")),
                (decoding.carry, options.get("carry")),
            )
        )
        stays = to if single and self.recipe.data.languages else None
        return Way(self.mark(to), split, recase, carry, stays, options.get("from_"))

    def mark(self, to: str | None) -> list[int]:
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

    def read(self, texts: Sequence[str], way: Way, first: int = 0, begun: Sequence[bool] | None = None) -> list[Line]:
        """The texts as tokens behind their mark; the first is number ``first``, counted from 0.

        What has a beginning given (``begun``) is taken as it stands.
        """
        source, longest = self.tokenizers.source, self.longest
        room = min((n for n in (self.recipe.data.max_len - 1, longest) if n and n > 0), default=None)

        def fits(text: str) -> bool:
            return room is None or len(source.encode(text)) + len(way.mark) <= room

        ways = [Way(way.mark) if is_begun else way for is_begun in begun or [False] * len(texts)]
        cut = [
            pieces(text, fits if each.split else None, each.recase, each.carry)
            for text, each in zip(texts, ways, strict=True)
        ]
        encoded = iter(source.encode_batch([piece.text for each in cut for piece in each]))
        lines = []
        for number, (text, each, own) in enumerate(zip(texts, cut, ways, strict=True), first):
            stay = self._stay(each, own)
            parts = tuple(
                Part(piece, own.mark + next(encoded), number, place, stays)
                for place, (piece, stays) in enumerate(zip(each, stay, strict=True))
            )
            most, fault = max((len(part.ids) for part in parts), default=0), ""
            if longest is not None and most > longest:
                fault = f"line {number + 1:,} has {most:,} tokens, but the model takes at most {longest:,}: split it"
            lines.append(Line(text, parts, fault))
        return lines

    def plain(self, part: Part) -> Part:
        """The part with nothing that stands for anything else, unless that makes it too long."""
        source = self.tokenizers.source
        (piece,) = pieces(part.piece.original, recase=bool(part.piece.loud))
        ids = [token for token in part.ids[:1] if token in source.tags.values()] + source.encode(piece.text)
        fits = self.longest is None or len(ids) <= self.longest
        return replace(part, piece=replace(piece, after=part.piece.after), ids=ids) if fits else part

    def _stay(self, parts: Sequence[Piece], way: Way) -> list[bool]:
        """Which parts of a line are the same in the language asked for: they have no letters, or are surely in it.

        Of a single word nobody can be sure: it stays if all others do.
        """
        if way.to is None:
            return [False] * len(parts)
        texts = [part.told for part in parts]
        letters = [any(letter.isalpha() for letter in text) for text in texts]
        told = [self._is_in(way.to, text, way.from_) if has else None for text, has in zip(texts, letters, strict=True)]
        known = [each for each in told if each is not None]
        rest = bool(known) and all(known)
        return [
            bool(part.text.strip()) and (not has or (rest if each is None else each))
            for part, has, each in zip(parts, letters, told, strict=True)
        ]

    def _is_in(self, language: str, text: str, said: str | None) -> bool | None:
        """Whether a text is in a language, by what was said, or surely by its words; None where that is open."""
        if said is not None:
            return said == language
        if self.tokenizers.languages is None or len(text.split()) < 2:
            return None
        return self.detect(text).get(language, 0.0) > SURE
