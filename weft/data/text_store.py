"""Documents to tokens on disk, made once, and opened at once the next time.

    options = TextOptions(split="blank", held_out_share=0.1)
    train = prepare_text("books/", tokenizer, options, cache)
    validation = prepare_text("books/", tokenizer, options, cache, held_out=True)
    train.tokens[train.starts[0] :]      # the first document, and all behind it

The store is a folder like those of store.py. A document of any length is tokenised in pieces, cut where the tokens come
out as those of the whole.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from weft.config import UNK
from weft.data.disk import Sequences, digest, flush, once, open_sequences, save_json, sync
from weft.data.documents import (
    Block,
    Fragment,
    Paths,
    Text,
    TextOptions,
    files_of,
    fingerprint_of,
    fragments_of,
    part_of,
)

_FORMAT = 2  # a store of another format is made again
_PIECE = 1 << 16  # characters of a document that are tokenised as one, about
_BATCH = 1 << 20  # characters of all pieces that are tokenised side by side
_CONTEXT = 256  # so many characters on each side of a cut are looked at
_TRIES = 4  # so many cuts of a kind are tried
# Where to cut, the best first: before a line that opens with a letter, between two words, beside a word, anywhere.
_CUTS = [re.compile(cut, re.DOTALL) for cut in (r"\n(?=[^\W_])", r"(?<=[^\W_])(?= [^\W_])", r"\b", r".")]


class TextTokenizer(Protocol):
    """What is asked of a tokenizer: weft.data.tokenizers.Tokenizer, or one with numbers of its own.

    The latter may have ``unk``, the number of what it does not know, or None; else that is UNK.
    """

    @property
    def kind(self) -> str:
        """One of "char" knows only what it saw."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest number."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text."""

    def fingerprint(self) -> str:
        """The same for those that give the same tokens, and for no others."""


@dataclass(frozen=True)
class TextFacts:
    """What is known of a text besides its tokens.

    Attributes:
        characters: of the text as it was read, line ends and all.
        bytes: in UTF-8, of what there is to predict: the documents, and one for the end of each, if that is a token.
        words: of the same, what stands between white space, line ends, and ends, so that −Σ log p / words is per word
            as usual.
        unknown: how many tokens stand for something unknown.
    """

    characters: int = 0
    bytes: int = 0
    words: int = 0
    unknown: int = 0


@dataclass(frozen=True, eq=False)
class TextStore:
    """Tokenised documents, one behind the other.

    Attributes:
        documents: the documents as sequences of tokens.
        facts: counts of the text.
    """

    documents: Sequences
    facts: TextFacts
    _fingerprint: str

    @classmethod
    def open(cls, folder: Path) -> Self:
        """The store in a folder that ``prepare_text`` made, as memory maps.

        Raises:
            OSError: if a file is missing.
            ValueError: if it is no store of this format, or its files do not have the sizes that it names.
        """
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta["format"] != _FORMAT:
            raise ValueError(f"{folder}: expected a store of format {_FORMAT}, not {meta['format']}")
        return cls(open_sequences(folder, "text", meta["text"]), TextFacts(**meta["facts"]), meta["fingerprint"])

    @property
    def tokens(self) -> NDArray[Any]:
        """All tokens, uint16 or uint32."""
        return self.documents.tokens

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where each document begins in ``tokens``."""
        return self.documents.offsets[:-1]

    @property
    def bytes(self) -> int:
        """Of what there is to predict, in UTF-8, for bits per byte."""
        return self.facts.bytes

    @property
    def words(self) -> int:
        """Of what there is to predict, line ends counted, for the perplexity of a word."""
        return self.facts.words

    def __len__(self) -> int:
        """How many documents there are."""
        return len(self.documents)

    def fingerprint(self) -> str:
        """The same for the same text with the same tokens, and for no other."""
        return self._fingerprint

    def report(self) -> str:
        """What there is, in one line."""
        documents = f"{len(self):,} document{'' if len(self) == 1 else 's'}"
        line = f"{documents}, {len(self.tokens):,} tokens of {self.words:,} words and {self.bytes:,} bytes"
        return f"{line}, unknown: {self.facts.unknown / len(self.tokens):.2%}" if self.facts.unknown else line


def prepare_text(
    paths: Paths,
    tokenizer: TextTokenizer,
    options: TextOptions,
    cache: Path,
    progress: Callable[[int], None] | None = None,
    *,
    held_out: bool = False,
    allow_unknown: bool = False,
) -> TextStore:
    """The store of a text: opened if the cache has it, made otherwise.

    Args:
        paths: a file, a folder (every .txt and .txt.gz below it, by name), or several of them.
        tokenizer: of the text.
        options: what a document is.
        cache: the folder of all stores, made if it is not there. Its file system must know locks.
        progress: called with the number of characters read so far, now and then.
        held_out: whether the share for validation is meant, or what is left without it.
        allow_unknown: whether a char tokenizer may meet a character that it does not know. Right for validation;
            in training data such a character is a mistake.

    Raises:
        ValueError: if the text is empty or not UTF-8, or at a character that is not known, with its place.
        OSError: if a file cannot be read or the store cannot be written.
    """
    files = files_of(paths)
    part = [fingerprint_of(paths, options), held_out, allow_unknown]
    fingerprint = digest(["text", _FORMAT, tokenizer.fingerprint(), part])

    def make(folder: Path) -> None:
        text = part_of(files, options, held_out)
        folder.mkdir()
        writer = _Writer(folder, tokenizer, options)
        try:
            facts = _write(writer, text, options, progress or (lambda count: None), allow_unknown)
        finally:
            writer.close()
        meta = {"format": _FORMAT, "fingerprint": fingerprint, "text": writer.sizes(), "facts": asdict(facts)}
        save_json(folder / "meta.json", meta)
        sync(folder)

    return once(cache / f"text-{fingerprint}", make, TextStore.open)


class _Piece(NamedTuple):
    """What is tokenised as one: a document, or a part of one and what stands before it."""

    context: str
    text: str
    ends: bool
    at: int


def _pieces(fragments: Iterable[Fragment], is_stable: Callable[[str, str], bool], blank: bool) -> Iterator[_Piece]:
    """The documents as pieces; blank ones only if they are wanted."""
    context = text = ""
    at, begun = 0, False
    for fragment in fragments:
        if not text:
            at = fragment.at
        text += fragment.text
        while len(text) > _PIECE + _CONTEXT:
            cut, found = _cut(text, is_stable)
            yield _Piece(context, text[:cut], False, at)
            context = text[max(cut - _CONTEXT, 0) : cut] if found else ""
            text, at, begun = text[cut:], at + cut, True
        if fragment.ends:
            if begun or (text if blank else text.strip()):
                yield _Piece(context, text, True, at)
            context, text, begun = "", "", False


def _cut(text: str, is_stable: Callable[[str, str], bool]) -> tuple[int, bool]:
    """Where to cut a piece off, and whether what stands there is tokenised as it would be in the whole."""
    for pattern in _CUTS:
        places = deque((match.end() for match in pattern.finditer(text, _PIECE // 2, _PIECE)), _TRIES)
        for place in reversed(places):
            if is_stable(text[max(place - _CONTEXT, 0) : place], text[place : place + _CONTEXT]):
                return place, True
    return _PIECE, False


class _Writer:
    """A store while it is written: a file of tokens and one of offsets."""

    def __init__(self, folder: Path, tokenizer: TextTokenizer, options: TextOptions) -> None:
        for where, number in (("behind", options.end), ("before", options.begin)):
            if number is not None and not 0 <= number < tokenizer.vocab_size:
                raise ValueError(f"the token {where} a document must be below {tokenizer.vocab_size:,}, not {number}")
        self.tokenizer, self.options = tokenizer, options
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self.count = self.total = self.unknown = 0
        self.begun = 0  # where the present document began
        self.tokens: BinaryIO = (folder / "text.tokens").open("wb")
        self.offsets: BinaryIO = (folder / "text.offsets").open("wb")
        self.offsets.write(np.zeros(1, np.int64).tobytes())

    def is_stable(self, left: str, right: str) -> bool:
        """Whether the tokens of the left stay as they are with the right behind it."""
        both, alone = self.tokenizer.encode_batch([left + right, left])
        return both[: len(alone)] == alone

    def add(self, batch: Sequence[_Piece]) -> tuple[_Piece, int] | None:
        """Write the tokens of some pieces; the first piece with something unknown, and which of its tokens that is."""
        contexts = iter(self.tokenizer.encode_batch([piece.context for piece in batch if piece.context]))
        rows = self.tokenizer.encode_batch([piece.context + piece.text for piece in batch])
        unk = getattr(self.tokenizer, "unk", UNK)
        tokens: list[int] = []
        ends: list[int] = []
        first = None
        for piece, row in zip(batch, rows, strict=True):
            own = row[len(next(contexts)) :] if piece.context else row
            if unk in own:
                first = first or (piece, own.index(unk))
                self.unknown += own.count(unk)
            if own and self.total + len(tokens) == self.begun and self.options.begin is not None:
                tokens.append(self.options.begin)
            tokens += own
            if piece.ends and self.total + len(tokens) > self.begun:
                tokens += [] if self.options.end is None else [self.options.end]
                self.begun = self.total + len(tokens)
                ends.append(self.begun)
        self.tokens.write(np.array(tokens, self.dtype).tobytes())
        self.offsets.write(np.array(ends, np.int64).tobytes())
        self.total += len(tokens)
        self.count += len(ends)
        return first

    def close(self) -> None:
        for file in (self.tokens, self.offsets):
            with file:
                flush(file)

    def sizes(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total, "dtype": self.dtype.name}


@dataclass
class _Tally:
    """Counts what passes: characters that are read, and what there is to predict."""

    end: bool  # whether the end of a document is a token
    characters: int = 0
    bytes: int = 0
    words: int = 0
    inside: bool = False  # a word

    def read(self, blocks: Iterable[Block]) -> Iterator[Block]:
        for block in blocks:
            self.characters += len(block.text)
            yield block

    def add(self, piece: _Piece) -> None:
        text, end = piece.text, piece.ends and self.end
        goes_on = bool(text) and self.inside and not text[0].isspace()
        self.bytes += len(text.encode()) + end
        self.words += len(text.split()) - goes_on + text.count("\n") + end
        self.inside = not piece.ends and not text[-1:].isspace()


def _write(
    writer: _Writer, text: Text, options: TextOptions, progress: Callable[[int], None], allow_unknown: bool
) -> TextFacts:
    tally = _Tally(options.end is not None)
    fragments = fragments_of(tally.read(text.blocks()), options.split)
    for batch in _batches(_pieces(fragments, writer.is_stable, options.split == "file")):
        unknown = writer.add(batch)
        for piece in batch:
            tally.add(piece)
        if unknown is not None and writer.tokenizer.kind == "char" and not allow_unknown:
            piece, index = unknown
            place, character = text.place(piece.at + index), piece.text[index]
            known = f"none of the {writer.tokenizer.vocab_size:,} known tokens"
            raise ValueError(f"{place}: the character {character!r} (U+{ord(character):04X}) is {known}")
        progress(tally.characters)
    if not writer.count:
        raise ValueError(f"{', '.join(map(str, text.files[:3]))}: there is no text in it")
    return TextFacts(tally.characters, tally.bytes, tally.words, writer.unknown)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 1
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
