"""Published vocabularies, with the numbers that they were published with.

    vocabulary = read_vocabulary("gpt2/vocab.json")     # merges.txt stands beside it; or name the folder
    vocabulary.encode("Once upon a time")               # [7454, 2402, 257, 640]
    vocabulary.save("model/tokenizer.json")

    tokenizer.json      of the ``tokenizers`` library
    GPT-2               vocab.json and merges.txt, or encoder.json and vocab.bpe: byte-level BPE (Radford et al. 2019)
    tiktoken            a token in base64 and its rank a line: the same BPE, without its merges and its pattern
    SentencePiece       a protocol buffer: BPE or unigram over the bare text (Kudo and Richardson 2018)

Each becomes a tokenizer of that library. A file is data: it is parsed and checked, and nothing in it is run.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Rust

from weft.config import nearest
from weft.data.text import existing
from weft.data.tokenizer_file import fit, numbered, parsed
from weft.data.tokenizers import Tokenizer
from weft.interop.sentencepiece import character_map, made, merges_of, read_model

_LARGEST = 1 << 28  # bytes; the largest that is published has some 30 MB

# Pairs of files, vocabulary first; then what else a folder may hold.
_GPT2 = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
_FOLDER = ("tokenizer.json", "vocab.json", "encoder.json", "*.tiktoken", "tokenizer.model", "*.model", "*.spm")

_ROLES: dict[str, tuple[str, ...]] = {
    "bos": ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]", "[CLS]", "<|endoftext|>"),
    "eos": ("</s>", "<|end_of_text|>", "<eos>", "[EOS]", "[SEP]", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "unk": ("<unk>", "[UNK]"),
}

_ENDS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
# How text is cut into words, inside which tokens are sought.
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": _ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "o200k": "|".join(
        [
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDS}?",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDS}?",
            r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ]
    ),
}
_CL100K = {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
# A tiktoken file says neither its pattern nor its specials; the number of its tokens tells which one it is.
_PUBLISHED: dict[int, tuple[str, dict[str, int]]] = {
    50256: ("gpt2", {"<|endoftext|>": 50256}),
    50280: ("gpt2", {"<|endoftext|>": 50256}),
    100256: ("cl100k", {**_CL100K, "<|endofprompt|>": 100276}),
    128000: ("cl100k", {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eot_id|>": 128009}),
    199998: ("o200k", {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}


class Vocabulary:
    """Text to tokens and back, with a file's own numbers. Made by ``read_vocabulary``.

    Text that spells a special token is text: no prompt can forge one.

    Attributes:
        bos, eos, pad, unk: the numbers of the specials that the vocabulary has, else None.
        opening: the tokens that its publisher puts before every text.
    """

    def __init__(self, rust: Rust, roles: Mapping[str, int | None], opening: tuple[int, ...] = ()) -> None:
        """Wrap a tokenizer of the library; the roles are bos, eos, pad and unk."""
        self._rust, self._tokenizer, self.opening = rust, Tokenizer(rust), opening
        self._map = character_map(rust.normalizer)
        self.bos, self.eos, self.pad, self.unk = (roles.get(role) for role in _ROLES)

    @property
    def kind(self) -> str:
        """bpe, unigram, word, char or wordpiece."""
        return self._tokenizer.kind

    @property
    def vocab_size(self) -> int:
        """One more than the largest number."""
        return self._tokenizer.vocab_size

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without BOS and EOS."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, on all cores."""
        return self._tokenizer.encode_batch(texts if self._map is None else list(map(self._map, texts)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens; specials have none, and bytes that are no UTF-8 show as ``�``.

        Raises:
            ValueError: if a number is no token.
        """
        return self._tokenizer.decode(ids)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """A label for each token, to be read in pictures; see ``Tokenizer.tokens``."""
        return self._tokenizer.tokens(ids)

    def fingerprint(self) -> str:
        """A hash that is the same for vocabularies that give the same tokens."""
        return self._tokenizer.fingerprint()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json, which ``read_vocabulary`` takes back. It is whole or not there."""
        self._tokenizer.save(path)

    def renumbered(self) -> Tokenizer:
        """The same tokens as weft numbers them: padding, begin, end and unknown at 0 to 3. For training anew."""
        fitted, _ = fit(json.loads(self._rust.to_str()))
        return Tokenizer(parsed(json.dumps(fitted)))

    def __reduce__(self) -> tuple[Callable[..., Vocabulary], tuple[Rust, dict[str, int | None], tuple[int, ...]]]:
        """Pickled as the library's JSON."""
        return Vocabulary, (self._rust, {role: getattr(self, role) for role in _ROLES}, self.opening)

    def __repr__(self) -> str:
        """Kind and size."""
        return f"Vocabulary({self.kind}, {self.vocab_size:,} tokens)"


def read_vocabulary(path: str | os.PathLike[str], pattern: str | None = None) -> Vocabulary:
    """A published vocabulary, whatever its format, which its content tells.

    Args:
        path: a file in one of the formats named above, or a folder with one.
        pattern: for a tiktoken file that is none of the known ones, how text is cut into words: one of ``PATTERNS``.

    Raises:
        OSError: if there is no such file, or it cannot be read.
        ValueError: if it is no vocabulary, or needs what weft does not have; with the file and what is wrong.
    """
    if pattern is not None and pattern not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise ValueError(f"no pattern {pattern!r}: expected one of {known}{nearest(pattern, PATTERNS)}")
    found = _in_folder(Path(path)) if Path(path).is_dir() else existing(path)
    try:
        return _opening_said(_vocabulary(found, pattern), found.with_name("tokenizer_config.json"))
    except ValueError as error:
        raise ValueError(f"{found}: {error}") from None


class Saved(Protocol):
    """What is asked of a vocabulary that is written."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json."""


def write_vocabulary(
    folder: Path,
    vocabulary: Saved,
    special: Mapping[str, int | list[int]],
    opening: Sequence[int] = (),
    closing: Sequence[int] = (),
    also: Mapping[str, object] | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which transformers takes as they are.

    Args:
        folder: where to.
        vocabulary: what to write.
        special: the numbers of the specials by their roles, bos, eos, pad and unk.
        opening: the tokens that stand before every text.
        closing: those that stand behind it.
        also: what else the tokenizer_config.json says.
    """
    path = folder / "tokenizer.json"
    vocabulary.save(path)
    rust = Rust.from_file(str(path))
    around = [*opening, *closing]
    names = [rust.id_to_token(number) or "" for number in around]
    rust.add_special_tokens(names)
    if around:
        marks = [f"{name}:0" for name in names]
        before, after = marks[: len(opening)], marks[len(opening) :]
        rust.post_processor = processors.TemplateProcessing(
            single=" ".join([*before, "$A:0", *after]),
            pair=" ".join([*before, "$A:0", *after, *before, "$B:0", *after]),
            special_tokens=list(zip(names, around, strict=True)),
        )
        rust.save(str(path))
    tokens = {role: number[0] if isinstance(number, list) else number for role, number in special.items()}
    roles = {f"{role}_token": rust.id_to_token(number) for role, number in tokens.items()}
    tree = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "clean_up_tokenization_spaces": False,
        **(also or {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _opening_said(vocabulary: Vocabulary, config: Path) -> Vocabulary:
    """The vocabulary with what opens a text as a tokenizer_config.json says, if one stands beside it and says it."""
    said = (_tree(_read(config)) if config.is_file() else {}).get("add_bos_token")
    bos = vocabulary.bos
    if said is True and bos is not None and bos not in vocabulary.opening:
        vocabulary.opening = (bos, *vocabulary.opening)
    if said is False:
        vocabulary.opening = tuple(number for number in vocabulary.opening if number != bos)
    return vocabulary


def _vocabulary(found: Path, pattern: str | None) -> Vocabulary:
    data = _read(found)
    if found.name in dict(_GPT2).values() or data.startswith(b"#version"):
        return _gpt2(_tree(_read(_beside(found))), data)
    if data.lstrip()[:1] == b"{":
        tree = _tree(data)
        own = isinstance(tree.get("model"), dict)  # GPT-2 has a token of that name
        return _tokenizer_json(tree, found) if own else _gpt2(tree, _read(_beside(found)))
    if re.match(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)", data):
        return _tiktoken(data, pattern)
    if data[:1] == b"\n":  # field 1, with a length: the first piece
        rust, roles = read_model(data)
        return Vocabulary(rust, roles, () if roles["bos"] is None else (roles["bos"],))
    raise ValueError("expected a tokenizer.json, GPT-2's two files, a tiktoken file or a SentencePiece model")


def _in_folder(folder: Path) -> Path:
    for name in _FOLDER:
        if found := sorted(path for path in folder.glob(name) if path.is_file()):
            return found[0]
    raise FileNotFoundError(f"{folder} has no vocabulary: expected one of {', '.join(_FOLDER)}")


def _beside(path: Path) -> Path:
    """The other one of GPT-2's two files."""
    for pair in _GPT2:
        if path.name in pair:
            return existing(path.with_name(pair[1 - pair.index(path.name)]))
    raise ValueError(f"expected its name to be one of {', '.join(name for pair in _GPT2 for name in pair)}")


def _read(path: Path) -> bytes:
    if path.stat().st_size > _LARGEST:
        raise ValueError(f"expected at most {_LARGEST:,} bytes, not {path.stat().st_size:,}")
    return path.read_bytes()


def _tree(data: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"expected a JSON object, not {type(tree).__name__}")
    return tree


def _roles(there: Mapping[str, int]) -> dict[str, int | None]:
    """The numbers of the specials, by the names that are usual."""
    return {role: next((there[name] for name in names if name in there), None) for role, names in _ROLES.items()}


# tokenizer.json


def _tokenizer_json(tree: dict[str, Any], path: Path) -> Vocabulary:
    """As it is, without what cuts, pads or draws; numbers that nothing has get a token of their own."""
    model, added = tree["model"], tree.get("added_tokens") or []
    if not isinstance(added, list):
        raise ValueError("expected a list of added tokens")
    tokens = {}
    for token in added:
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError("expected added tokens with a content and an id")
        tokens[token["content"]] = token.get("id")
    vocab = model.get("vocab")
    if isinstance(vocab, dict) and (_holes(vocab) or _holes(vocab | tokens)):
        model = {**model, "vocab": _closed(vocab | tokens)}
    model |= {key: None for key in ("dropout", "alpha", "nbest_size") if key in model}
    rust = parsed(json.dumps({**tree, "model": model, "truncation": None, "padding": None}))
    for content, number in tokens.items():
        if rust.token_to_id(content) != number:
            raise ValueError(f"the added token {content!r} cannot have the number {number!r}")
    there = rust.get_vocab(with_added_tokens=True)
    unknown = model.get("unk_token")
    if isinstance(unknown_id := model.get("unk_id"), int):
        unknown = rust.id_to_token(unknown_id)
    roles = _roles(there) | ({"unk": there[unknown]} if unknown in there else {})
    roles |= _named(path.with_name("tokenizer_config.json"), there)
    # What its template puts around an empty text, up to an end that would belong behind the text.
    opening = tuple(takewhile(lambda number: number != roles["eos"] or number == roles["bos"], rust.encode("").ids))
    return Vocabulary(rust, roles, opening)


def _named(path: Path, there: Mapping[str, int]) -> dict[str, int | None]:
    """The specials that a tokenizer_config.json names, if there is one."""
    tree = _tree(_read(path)) if path.is_file() else {}
    found = {}
    for role in _ROLES:
        if f"{role}_token" in tree:
            token = tree[f"{role}_token"]
            name = token.get("content") if isinstance(token, dict) else token
            found[role] = there.get(name) if isinstance(name, str) else None
    return found


def _holes(vocab: Mapping[str, Any]) -> bool:
    return max(_numbers(vocab), default=-1) >= len(vocab)


def _numbers(vocab: Mapping[str, Any]) -> list[int]:
    """The numbers of a vocabulary, checked: all different, and not many more left out than there are."""
    for token, number in vocab.items():
        if type(number) is not int or not 0 <= number <= 2 * len(vocab) + 1000:
            raise ValueError(f"the token {token[:40]!r} of {len(vocab):,} cannot have the number {number!r}")
    if len(set(vocab.values())) < len(vocab):
        raise ValueError("two tokens have the same number")
    return list(vocab.values())


def _closed(vocab: Mapping[str, Any]) -> dict[str, int]:
    """The vocabulary in the order of its numbers, with a token for each that has none."""
    names = {number: token for token, number in vocab.items()}
    size = max(_numbers(vocab), default=-1) + 1
    return numbered(names.get(number, f"<|unused_{number}|>") for number in range(size))


# Byte-level BPE: GPT-2 and tiktoken


def _characters() -> list[str]:
    """The character by which each byte is written: itself if it can be printed, else one from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte if byte in shown else 256 + hidden.index(byte)) for byte in range(256)]


_BYTES = _characters()


def _byte_level(
    vocab: dict[str, int], merges: list[tuple[str, str]], pattern: str, specials: Iterable[str], **options: bool
) -> Vocabulary:
    if missing := [byte for byte, character in enumerate(_BYTES) if character not in vocab]:
        raise ValueError(f"expected a token for each byte, but 0x{missing[0]:02X} has none")
    rust = Rust(made(models.BPE, vocab, merges, **options))
    split = pre_tokenizers.Split(Regex(PATTERNS[pattern]), "isolated")
    rust.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(sorted(specials, key=lambda name: vocab[name]))
    return Vocabulary(rust, _roles(vocab))


def _gpt2(vocab: dict[str, Any], data: bytes) -> Vocabulary:
    merges = []
    for number, line in enumerate(_lines(data), 1):
        parts = tuple(line.split(" "))
        if number == 1 and line.startswith("#version"):
            continue
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"line {number} of the merges: expected two tokens, not {line[:60]!r}")
        merges.append((parts[0], parts[1]))
    if any(right.endswith("</w>") for _, right in merges):
        raise ValueError("expected GPT-2's merges, not such as mark the ends of words with </w>")
    closed = _closed(vocab)
    names = {name for names in _ROLES.values() for name in names}
    specials = [name for name in closed if name in names or re.fullmatch(r"<\|.+\|>|<mask>", name)]
    return _byte_level(closed, merges, "gpt2", specials)


def _lines(data: bytes) -> list[str]:
    try:
        return [line.removesuffix("\r") for line in data.decode("utf-8").removesuffix("\n").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8 text, but byte {error.start + 1:,} is 0x{data[error.start]:02x}") from None


def _tiktoken(data: bytes, pattern: str | None) -> Vocabulary:
    ranks: dict[str, Any] = {}
    for number, line in enumerate(_lines(data), 1):
        token, _, rank = line.partition(" ")
        try:
            piece = "".join(_BYTES[byte] for byte in base64.b64decode(token, validate=True))
            ranks[piece] = int(rank)
        except (binascii.Error, ValueError):
            raise ValueError(f"line {number}: expected a token in base64 and its rank, not {line[:60]!r}") from None
        if not piece or len(ranks) < number:
            raise ValueError(f"line {number}: the token is {'there twice' if piece else 'empty'}")
    known, specials = _PUBLISHED.get(len(ranks), (pattern, {}))
    if pattern is None and known is None:
        raise ValueError(f"no known file has {len(ranks):,} tokens: name the pattern, {', '.join(PATTERNS)}")
    vocab = _closed(ranks | specials)
    merges = merges_of(sorted(ranks, key=lambda piece: ranks[piece]), ranks)
    return _byte_level(vocab, merges, pattern or known or "", vocab.keys() - ranks.keys(), ignore_merges=True)
