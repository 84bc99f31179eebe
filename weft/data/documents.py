r"""Text files to documents: whole files, what stands between blank lines, or lines.

    options = TextOptions(split="blank", held_out_share=0.1)
    read_text("books/", options)                     # what is trained on, in lines, for a tokenizer
    read_text("books/", options, held_out=True)      # what is validated with

A file may be gzipped, whatever it is called. Text is UTF-8; a byte order mark at the start and a "\r" before "\n" are
dropped, and a TextWarning says so, once a file. Nothing here holds a file in memory.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from weft.config import EOS
from weft.data.disk import digest
from weft.data.text import content_digest, existing, opened, say_once

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Split = Literal["file", "blank", "line"]

_ENDS = (".txt", ".txt.gz")  # what counts in a folder
_BLOCK = 1 << 20  # bytes that are read at once; a line that is begun is read to its end, up to as many again


@dataclass(frozen=True)
class TextOptions:
    """What a document is.

    Attributes:
        split: "file": a whole file; "blank": what stands between blank lines; "line": a line that is not blank. The
            line end behind a document is not part of it, except in a whole file.
        end: the token behind each document; None: none, as for one long text of characters.
        begin: the token before each document; None: none. Where documents do not see each other, nothing else stands
            before a document's first token.
        held_out_share: so much of the text, counted in characters from its end, is for validation. A file is cut just
            there; of smaller documents none is cut.
    """

    split: Split = "file"
    end: int | None = EOS
    held_out_share: float = 0.0
    begin: int | None = None

    def __post_init__(self) -> None:
        if self.split not in _SPLITS:
            raise ValueError(f"split must be one of {', '.join(_SPLITS)}, not {self.split!r}")
        if not 0.0 <= self.held_out_share < 1.0:
            raise ValueError(f"held_out_share must be from 0 to less than 1, not {self.held_out_share}")


def read_text(paths: Paths, options: TextOptions, *, held_out: bool = False) -> Iterator[str]:
    r"""The text in portions of a line or less, as documents have it, to train a tokenizer.

    What goes on from the portion before it begins with the line ends that stand there.

    Raises:
        ValueError: if it is not UTF-8, naming file and line.
        OSError: if a file cannot be read.
    """
    for fragment in fragments_of(part_of(files_of(paths), options, held_out).blocks(), options.split):
        yield from re.findall(r"\n*[^\n]+|\n+", fragment.text)


def fingerprint_of(paths: Paths, options: TextOptions) -> str:
    """The same for the same text, cut into the same documents, and for no other.

    Raises:
        OSError: if a file cannot be read.
    """
    return digest([[content_digest(path) for path in files_of(paths)], asdict(options)])


def files_of(paths: Paths) -> tuple[Path, ...]:
    """The files that are meant, each there and each with something in it if it was named itself."""
    files: list[Path] = []
    for given in [paths] if isinstance(paths, str | os.PathLike) else paths:
        path = Path(given)
        if path.is_dir():
            found = [file for file in path.rglob("*") if file.name.endswith(_ENDS) and not file.name.startswith(".")]
            if not found:
                raise FileNotFoundError(f"{path} has no {' or '.join(_ENDS)} file below it")
            files += sorted(found, key=lambda file: file.relative_to(path).as_posix())
            continue
        if not existing(path).is_file():
            raise OSError(f"{path} can be read only once: expected a file")
        with opened(path) as file:
            if not file.read(1):
                raise ValueError(f"{path} is empty: expected text")
        files.append(path)
    if not files:
        raise ValueError(f"expected a file or a folder of text, not {paths!r}")
    return tuple(files)


class Block(NamedTuple):
    """A portion of a file, never empty."""

    file: int
    at: int  # how many characters stand before it, in all files
    text: str


@dataclass(frozen=True)
class Text:
    """The characters from ``begin`` to ``end`` of some files."""

    files: tuple[Path, ...]
    begin: int = 0
    end: int | None = None

    def blocks(self) -> Iterator[Block]:
        """In portions."""
        at = 0
        for number, path in enumerate(self.files):
            for text in _decoded(path):
                first = max(self.begin - at, 0)
                last = len(text) if self.end is None else self.end - at
                if kept := text[first : max(last, 0)]:
                    yield Block(number, at + first, kept)
                at += len(text)
                if self.end is not None and at >= self.end:
                    return

    def place(self, position: int) -> str:
        """Where a character stands: ``file:line``, from 1."""
        file, line = -1, 1
        for block in Text(self.files, 0, position + 1).blocks():
            line = (line if block.file == file else 1) + block.text[: position - block.at].count("\n")
            file = block.file
        return f"{self.files[file]}:{line}"


def _decoded(path: Path) -> Iterator[str]:
    """The text of a file in portions, which end with a line if lines are not longer than a block."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read, lines, begun = 0, 1, False
    with opened(path) as file:
        while True:
            block = file.read(_BLOCK) + file.readline(_BLOCK)
            while block.endswith(b"\r") and (more := file.read(1)):  # is a "\n" behind it?
                block += more
            held = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                wrong = error.object[error.start]
                raise ValueError(
                    f"{path}:{lines + error.object[: error.start].count(10)}: expected UTF-8 text, "
                    f"but byte {read - held + error.start + 1:,} of the file is 0x{wrong:02x} ({error.reason})"
                ) from None
            read, lines = read + len(block), lines + block.count(b"\n")
            if text and not begun and text[0] == "\ufeff":
                say_once(f"{path}: the byte order mark is dropped")
                text = text[1:]
                begun = True
            begun = begun or bool(text)
            if "\r\n" in text:
                say_once(f"{path}: carriage returns before line ends are dropped")
                text = text.replace("\r\n", "\n")
            if text:
                yield text
            if not block:
                return


def part_of(files: tuple[Path, ...], options: TextOptions, held_out: bool) -> Text:
    """The text that is held out, or what is left."""
    whole, share = Text(files), options.held_out_share
    if not share:
        if held_out:
            raise ValueError("nothing is held out if held_out_share is 0: expected a share, or files for validation")
        return whole
    total = sum(len(block.text) for block in whole.blocks())
    cut = int(total * (1.0 - share))
    if options.split != "file":  # the next document that begins there
        cut = next((start for start in _starts(fragments_of(whole.blocks(), options.split)) if start >= cut), total)
    if cut in (0, total):
        names = ", ".join(map(str, files[:3])) + (", …" if len(files) > 3 else "")
        raise ValueError(f"{names}: {total:,} characters are too few to hold {share:.1%} of them out")
    return Text(files, cut) if held_out else Text(files, 0, cut)


class Fragment(NamedTuple):
    """A part of a document, which may be empty."""

    text: str
    ends: bool  # whether the document ends behind it
    at: int


def fragments_of(blocks: Iterable[Block], split: Split) -> Iterator[Fragment]:
    """The documents in portions. No document goes on behind the end of a file."""
    for _, file in groupby(blocks, lambda block: block.file):
        yield from _SPLITS[split](file)


def _starts(fragments: Iterable[Fragment]) -> Iterator[int]:
    """Where documents begin."""
    ended = True
    for fragment in fragments:
        if ended and fragment.text:
            yield fragment.at
        ended = fragment.ends or (ended and not fragment.text)


def _by_file(blocks: Iterable[Block]) -> Iterator[Fragment]:
    end = 0
    for _, at, text in blocks:
        yield Fragment(text, False, at)
        end = at + len(text)
    yield Fragment("", True, end)


def _by_line(blocks: Iterable[Block]) -> Iterator[Fragment]:
    at = 0
    for block in blocks:
        at = block.at
        *lines, rest = block.text.split("\n")
        for line in lines:
            yield Fragment(line, True, at)
            at += len(line) + 1
        if rest:
            yield Fragment(rest, False, at)
            at += len(rest)
    yield Fragment("", True, at)


def _by_blank(blocks: Iterable[Block]) -> Iterator[Fragment]:
    is_open = is_filled = False  # whether the document has a line; whether the present line has more than spaces
    held, at = "", 0  # what the present line has so far, if that is nothing but spaces
    for text, ends, start in _by_line(blocks):
        at, held = start - len(held), held + text
        if is_filled or held.strip():
            line_end = "\n" if is_open and not is_filled else ""
            yield Fragment(line_end + held, False, at - len(line_end))
            held, is_filled = "", True
        if ends:
            if is_open and not is_filled:
                yield Fragment("", True, at)
            held, is_open, is_filled = "", is_filled, False
    yield Fragment("", True, at)


_SPLITS: dict[str, Callable[[Iterable[Block]], Iterator[Fragment]]] = {
    "file": _by_file,
    "blank": _by_blank,
    "line": _by_line,
}
