"""Text to tokens and back, over the ``tokenizers`` library.

    bpe, unigram   pieces of words; what has no piece is spelled in bytes, so any Unicode text comes back as it was
    word           what stands between two spaces
    char           one code point each

Every vocabulary opens with the specials ``<pad> <s> </s> <unk>`` = PAD, BOS, EOS, UNK. No text spells them: a text with
``<s>`` in it has these three characters in it. A space belongs to the word behind it, and the first word of a text gets
one, which decoding takes away again; so a word is the same token at the start of a sentence and inside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from tokenizers import Encoding
from tokenizers import Tokenizer as Rust

from weft.config import BOS, EOS, PAD, UNK
from weft.data.languages import Languages
from weft.data.merges import MergeDropout
from weft.data.tokenizer_file import closed, fit, parsed

JOINT, SIDES = "tokenizer.json", ("tokenizer.source.json", "tokenizer.target.json")
LANGUAGES = "languages.json"

if hasattr(os, "register_at_fork"):  # a forked process has none of the library's threads, and would wait for them
    os.register_at_fork(after_in_child=partial(os.environ.__setitem__, "TOKENIZERS_PARALLELISM", "false"))


_TAG = re.compile("<2(.+)>")


def tag_token(language: str) -> str:
    """The token that says that a source should become this language."""
    return f"<2{language}>"


class Tokenizer:
    """Text to token numbers and back. Made by ``train_tokenizer`` or ``Tokenizer.load``."""

    def __init__(self, rust: Rust) -> None:
        """Wrap a tokenizer of the library whose specials are at 0 to 3."""
        rust.encode_special_tokens = True  # means: a text that spells a special is text
        self._rust = rust

    @cached_property
    def kind(self) -> str:
        """bpe, unigram, word or char; or wordpiece, for one that was made elsewhere."""
        model = self._tree["model"]
        if model["type"] == "BPE":
            return "bpe" if model["merges"] or model["byte_fallback"] else "char"
        return {"Unigram": "unigram", "WordLevel": "word", "WordPiece": "wordpiece"}[model["type"]]

    @cached_property
    def vocab_size(self) -> int:
        """How many tokens there are, the specials among them."""
        return self._rust.get_vocab_size()

    @cached_property
    def tags(self) -> dict[str, int]:
        """The tokens ``<2es>``, ``<2fr>``, … that say which language a source should become, by language.

        They are specials: no text spells them, and decoding leaves them out.
        """
        added = self._rust.get_added_tokens_decoder()
        found = {number: _TAG.fullmatch(token.content) for number, token in added.items() if token.special}
        return {match[1]: number for number, match in found.items() if match}

    def encode(self, text: str, strict: bool = False) -> list[int]:
        """The tokens of a text, without BOS and EOS.

        Args:
            text: any text.
            strict: whether a word or character without a token is an error; else it is UNK.

        Raises:
            ValueError: naming the unknown word or character; or if the text has half a surrogate pair in it.
        """
        [ids] = self.encode_batch([text])
        if strict and UNK in ids:
            raise ValueError(f"{_named(self.unknown(text)[0])} is none of the {self.vocab_size:,} known tokens")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, on all cores (on one in a forked process, or if TOKENIZERS_PARALLELISM is false)."""
        return [encoding.ids for encoding in _encoded(self._rust.encode_batch_fast, texts)]

    def encode_dropout(self, texts: Sequence[str], p: float, seed: int | Sequence[int]) -> list[list[int]]:
        """The tokens of each text where each merge is left out with probability p (BPE dropout, Provilkov et al. 2020).

        What comes out follows from p, the text and its seed, whatever else is in the batch. p = 1 leaves characters.

        Args:
            texts: any texts.
            p: from 0 to 1.
            seed: one for all texts, or one for each.

        Raises:
            ValueError: if p > 0 and the tokenizer has no merges, or the seeds are not as many as the texts.
        """
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"the dropout of merges must be from 0 to 1, not {p}")
        seeds = [seed] * len(texts) if isinstance(seed, int) else seed
        if len(seeds) != len(texts):
            raise ValueError(f"expected a seed for each of the {len(texts)} texts, not {len(seeds)}")
        if p == 0.0:
            return self.encode_batch(texts)
        if self.kind != "bpe":
            raise ValueError(f"only bpe has merges to leave out: expected dropout 0 for {self.kind}, not {p}")
        return self._dropout.encode(texts, _encoded(self._rust.encode_batch, texts), p, seeds)

    def decode(self, ids: Sequence[int], unknown: str | Sequence[str] = "") -> str:
        """The text of the tokens; specials have none.

        Args:
            ids: from 0 to vocab_size − 1.
            unknown: words to put for UNK: one for all, or one for each.

        Raises:
            ValueError: if a number is no token, or the words are not as many as the unknown tokens.
        """
        self._check(ids)
        if not unknown:
            return self._rust.decode(ids)
        missing = sum(number == UNK for number in ids)
        words = [unknown] * missing if isinstance(unknown, str) else unknown
        if len(words) != missing:
            raise ValueError(f"expected a word for each of the {missing} unknown tokens, not {len(words)}")
        parts, rest = [], iter(words)
        for is_unknown, run in groupby((n for n in ids if n not in (PAD, BOS, EOS)), UNK.__eq__):
            tokens = list(run)
            parts += [next(rest) for _ in tokens] if is_unknown else [self._rust.decode(tokens)]
        return ("" if self.kind == "char" else " ").join(parts)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        r"""A label for each token, to be read in pictures.

        The space before a word shows as ``▁`` (the words of a word tokenizer go without), what cannot be printed as in
        Python (``\n``, ``\u200b``), and a byte as ``<0x0A>``.

        Raises:
            ValueError: if a number is no token.
        """
        self._check(ids)
        return [self._label(self._rust.id_to_token(number) or "") for number in ids]

    def unknown(self, text: str) -> list[str]:
        """The words or characters of the text that have no token, each once."""
        [encoding] = _encoded(self._rust.encode_batch, [text])
        places = (place for place, number in zip(encoding.offsets, encoding.ids, strict=True) if number == UNK)
        return list(dict.fromkeys(text[start:stop].strip(" ") or " " for start, stop in places))

    def fingerprint(self) -> str:
        """A hash that is the same for tokenizers that give the same tokens."""
        return hashlib.sha256(self._rust.to_str().encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json. What was there stays until the new one is whole."""
        part = Path(f"{os.fspath(path)}.part")
        part.write_bytes(self._rust.to_str(pretty=True).encode())
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a tokenizer.json. It is data: nothing in it is run.

        One that was made elsewhere is fitted in, and a warning says what that took: its specials move to 0 to 3 under
        their own names, or are added, and it no longer cuts, pads or draws.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is no tokenizer.json.
        """
        try:
            rust = parsed(closed(Path(path).read_text(encoding="utf-8")))
            tree = json.loads(rust.to_str())
            fitted, changes = fit(tree)
            made = cls(rust if fitted == tree else parsed(json.dumps(fitted)))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)} is no tokenizer.json: {error}") from None
        if changes:
            warnings.warn(f"{os.fspath(path)}: {', '.join(changes)}", stacklevel=2)
        return made

    def __reduce__(self) -> tuple[Callable[[str], Tokenizer], tuple[str]]:
        """Pickled as JSON."""
        return _from_json, (self._rust.to_str(),)

    def __repr__(self) -> str:
        """Kind and size."""
        return f"Tokenizer({self.kind}, {self.vocab_size:,} tokens)"

    @property
    def _tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(self._rust.to_str())
        return tree

    @cached_property
    def _dropout(self) -> MergeDropout:
        return MergeDropout(self._tree["model"])

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(self._tree["decoder"])

    def _check(self, ids: Sequence[int]) -> None:
        for number in ids:
            if not 0 <= number < self.vocab_size:
                raise ValueError(f"a token is a number from 0 to {self.vocab_size - 1}, not {number}")

    def _label(self, piece: str) -> str:
        if self._byte_level:
            piece = self._rust.decoder.decode([piece])
        if self.kind == "word" and piece != " ":
            piece = piece.removeprefix(" ")
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece)
        return "".join(shown).replace(" ", "▁")


@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of the two sides; one and the same where the vocabulary is joint.

    Attributes:
        source, target: text to tokens and back.
        languages: tells the languages of sources apart, where there are several.
    """

    source: Tokenizer
    target: Tokenizer
    languages: Languages | None = None

    @property
    def joint(self) -> bool:
        """Whether both sides have one vocabulary."""
        return self.source is self.target

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, or tokenizer.source.json and tokenizer.target.json, in place of any that were there.

        And languages.json, if there are several.
        """
        made = {JOINT: self.source} if self.joint else dict(zip(SIDES, (self.source, self.target), strict=True))
        for name, tokenizer in made.items():
            tokenizer.save(Path(folder, name))
        for name in {JOINT, *SIDES, LANGUAGES} - made.keys():
            Path(folder, name).unlink(missing_ok=True)
        if self.languages is not None:
            self.languages.save(Path(folder, LANGUAGES))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Read what ``save`` wrote.

        Raises:
            OSError: if a file is missing or cannot be read.
            ValueError: if one is no tokenizer.json.
        """
        names = (JOINT, *SIDES, LANGUAGES)
        places = {name: Path(folder, name) for name in names if Path(folder, name).exists()}
        if not places.keys() & {JOINT, *SIDES}:
            raise FileNotFoundError(f"{os.fspath(folder)} has neither {JOINT} nor {' and '.join(SIDES)}")
        return cls.read(places | {name: Path(folder, name) for name in SIDES})

    @classmethod
    def read(cls, places: Mapping[str, Path]) -> Self:
        """Read those files that ``save`` wrote, each by its name; a joint vocabulary goes first.

        Raises:
            OSError, ValueError: as ``load``.
        """
        files = [JOINT] if JOINT in places else SIDES
        made = [Tokenizer.load(places[name]) for name in files]
        languages = Languages.load(places[LANGUAGES], made[0].vocab_size) if LANGUAGES in places else None
        return cls(made[0], made[-1], languages)

    def fingerprint(self) -> str:
        """A hash that is the same for pairs that give the same tokens."""
        both = f"{self.joint} {self.source.fingerprint()} {self.target.fingerprint()}"
        return hashlib.sha256(both.encode()).hexdigest()


def _encoded(encode: Callable[..., list[Encoding]], texts: Sequence[str]) -> list[Encoding]:
    try:
        return encode(texts, add_special_tokens=False)
    except TypeError:
        check_unicode(texts)
        raise


def check_unicode(texts: Iterable[str]) -> None:
    """Raise ValueError if one of the texts is none."""
    for text in texts:
        if half := re.search("[\\ud800-\\udfff]", text):
            raise ValueError(f"expected Unicode text, but {text[:80]!r} has half a surrogate pair at {half.start()}")


def _named(unknown: str) -> str:
    return f"the character {unknown!r} (U+{ord(unknown):04X})" if len(unknown) == 1 else f"the word {unknown!r}"


def _from_json(text: str) -> Tokenizer:
    return Tokenizer(parsed(text))
