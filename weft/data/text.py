r"""Text as a stream of lines, and of pairs of lines.

A file may be gzipped, whatever it is called. Text is UTF-8 and is split on "\n" only. A byte order mark at the start
and a "\r" before "\n" are dropped; a TextWarning says so, once a file. A side may be empty: who trains leaves such
pairs out.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import warnings
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Protocol, Self, cast

from weft.config import nearest

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_SHOWN = 60  # so many characters of a faulty line are shown


class TextWarning(UserWarning):
    """Something about a file that was mended while reading. Its text is one line, for the shell to print."""


_said: set[str] = set()  # Python's own record of what was said is cleared whenever somebody changes its filters


def say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, TextWarning, stacklevel=2)


def lines_of(stream: Iterable[bytes], name: str) -> Iterator[str]:
    """The lines of a binary stream, each as soon as it is there.

    Args:
        stream: an open binary file, such as ``sys.stdin.buffer``.
        name: what errors and warnings call it.

    Raises:
        ValueError: if a line is not UTF-8, naming it and the byte.
    """
    for number, line in enumerate(stream, 1):
        if number == 1 and line.startswith(_BOM):
            say_once(f"{name}: the byte order mark is dropped")
            line = line.removeprefix(_BOM)
            if not line:
                return
        if line.endswith(b"\r\n"):
            say_once(f"{name}: carriage returns before line ends are dropped")
            line = line[:-2]
        elif line.endswith(b"\n"):
            line = line[:-1]
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{name}:{number}: expected UTF-8 text, but byte {error.start + 1} of the line is "
                f"0x{line[error.start]:02x} ({error.reason})"
            ) from None
        yield text


@dataclass(frozen=True)
class Lines:
    """The lines of a file, gzipped or not, read anew each time and never all held."""

    path: Path

    def __iter__(self) -> Iterator[str]:
        with opened(self.path) as file:
            yield from lines_of(file, str(self.path))

    def place(self, index: int) -> str:
        """Where the line with this number, from 0, stands: ``file:line``, from 1."""
        return f"{self.path}:{index + 1}"


def open_lines(path: str | os.PathLike[str]) -> Lines:
    """The lines of a file, as a stream that can be read again.

    Raises:
        OSError: if there is no such file, naming the nearest one.
    """
    return Lines(existing(path))


def read_lines(path: str | os.PathLike[str]) -> list[str]:
    """All lines of a file."""
    return list(open_lines(path))


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, unpacked if it is gzipped, which its first bytes tell."""
    with path.open("rb") as file:
        if file.peek(2)[:2] != _GZIP:
            yield file
            return
        try:
            # Without a buffer of its own each line would cost a call into gzip's Python.
            yield io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=file)))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise OSError(f"{path}: the gzip file is damaged: {error}") from None


def existing(path: str | os.PathLike[str]) -> Path:
    """The path, if a file stands there.

    Raises:
        OSError: if there is none, naming the nearest, or if it is a folder.
    """
    found = Path(path)
    if found.is_dir():
        raise IsADirectoryError(f"{found} is a folder: expected a file")
    if not found.exists():
        folder = found.parent
        if not folder.is_dir():
            raise FileNotFoundError(f"no file {found}: there is no folder {folder}")
        raise FileNotFoundError(f"no file {found}{nearest(found.name, os.listdir(folder))}")
    return found


class TextPairs(Protocol):
    """Pairs of texts that can be read again and again, such as ``ParallelText``."""

    @property
    def name(self) -> str:
        """For people."""

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The pairs, source first, from the beginning."""

    def fingerprint(self) -> str:
        """The same for the same pairs in the same order, and for no others."""

    def place(self, index: int) -> str:
        """Where the pair with this number, from 0, stands: file and line."""


@dataclass(frozen=True)
class ParallelText:
    """Pairs (source, target) in their order, read anew each time and never all held.

    Attributes:
        files: one TSV file, or the file of the source and the file of the target.
        name: for people.
        source, target: the languages, if known.
        columns: of a TSV, the numbers of the source's and the target's.
        several: whether a source may come again with another translation that is as right; see ``references``.
    """

    files: tuple[Path, ...]
    name: str
    source: str = ""
    target: str = ""
    columns: tuple[int, int] = (0, 1)
    several: bool = False

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """The pairs.

        Raises:
            ValueError: naming file and line, if a line is not UTF-8 or has no partner.
            OSError: if a file cannot be read.
        """
        return self._cells() if len(self.files) == 1 else self._side_by_side()

    def _cells(self) -> Iterator[tuple[str, str]]:
        source, target = self.columns
        for index, line in enumerate(Lines(self.files[0])):
            cells = line.split("\t", 2)
            if len(cells) < 2:
                shown = repr(line) if len(line) <= _SHOWN else repr(line[:_SHOWN]) + "…"
                raise ValueError(f"{self.place(index)}: expected source TAB target, but the line has no tab: {shown}")
            yield cells[source], cells[target]

    def _side_by_side(self) -> Iterator[tuple[str, str]]:
        for index, (source, target) in enumerate(zip_longest(*map(Lines, self.files))):
            if source is None or target is None:
                short, long = self.files if source is None else self.files[::-1]
                total = sum(1 for _ in Lines(long))
                raise ValueError(
                    f"{short} has {index:,} lines and {long} has {total:,}: line {index + 1:,} has no partner"
                )
            yield source, target

    def place(self, index: int) -> str:
        """Where the pair with this number, from 0, stands: ``file:line``, from 1, of each file."""
        return ", ".join(Lines(path).place(index) for path in self.files)

    def swapped(self) -> Self:
        """The same pairs the other way round."""
        return replace(
            self,
            files=self.files[::-1],
            columns=self.columns[::-1] if len(self.files) == 1 else self.columns,
            source=self.target,
            target=self.source,
        )

    def fingerprint(self) -> str:
        """A sha256 of what the files hold, unpacked, and of how it is read: the same wherever they are."""
        whole = hashlib.sha256(repr(self.columns if len(self.files) == 1 else len(self.files)).encode())
        with ThreadPoolExecutor(len(self.files)) as pool:  # a hash leaves the other cores free
            for found in pool.map(content_digest, self.files):
                whole.update(found.encode())
        return whole.hexdigest()


def references(pairs: Iterable[tuple[str, str]]) -> tuple[list[str], list[list[str]]]:
    """The different sources in order of first sight, and for each all its translations, each once."""
    found: dict[str, dict[str, None]] = {}
    for source, target in pairs:
        found.setdefault(source, {})[target] = None
    return list(found), [list(targets) for targets in found.values()]


def content_digest(path: Path) -> str:
    """The sha256 of what a file holds, unpacked, as hexadecimal digits."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
