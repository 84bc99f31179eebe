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
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unicodedata import category

import numpy as np
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Rust

from weft.config import nearest
from weft.data.text import existing
from weft.data.tokenizer_file import fit, numbered, parsed
from weft.data.tokenizers import Tokenizer

_LARGEST = 1 << 28  # bytes; the largest that is published has some 30 MB
_SPACE = "▁"  # U+2581, for which SentencePiece's pieces have a space

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
    """

    def __init__(self, rust: Rust, roles: Mapping[str, int | None]) -> None:
        """Wrap a tokenizer of the library; the roles are bos, eos, pad and unk."""
        self._rust, self._tokenizer = rust, Tokenizer(rust)
        self._map = _character_map(rust.normalizer)
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

    def __reduce__(self) -> tuple[Callable[..., Vocabulary], tuple[Rust, dict[str, int | None]]]:
        """Pickled as the library's JSON."""
        return Vocabulary, (self._rust, {role: getattr(self, role) for role in _ROLES})

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
            return _sentencepiece(data)
        raise ValueError("expected a tokenizer.json, GPT-2's two files, a tiktoken file or a SentencePiece model")
    except ValueError as error:
        raise ValueError(f"{found}: {error}") from None


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


def _made(model: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """A part of the library, whose complaints become ValueErrors."""
    try:
        return model(*args, **kwargs)
    except Exception as error:  # the library raises no other kind
        raise ValueError(" ".join(str(error).split())) from None


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
    return Vocabulary(rust, roles | _named(path.with_name("tokenizer_config.json"), there))


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
    rust = Rust(_made(models.BPE, vocab, merges, **options))
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
    merges = _merges(sorted(ranks, key=lambda piece: ranks[piece]), ranks)
    return _byte_level(vocab, merges, pattern or known or "", vocab.keys() - ranks.keys(), ignore_merges=True)


def _merges(pieces: Iterable[str], known: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every way to make each piece of two known ones: what merges by the rank of the outcome needs."""
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]


# SentencePiece


class _Type(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Piece(NamedTuple):
    text: str
    score: float
    type: int


def _sentencepiece(data: bytes) -> Vocabulary:
    """ModelProto: pieces = 1, trainer_spec = 2, normalizer_spec = 3."""
    fields = _message(data)
    pieces = [_piece(_bytes(value, "a piece")) for value in fields.get(1, ())]
    trainer, normalizer = (_message(_bytes(fields.get(number, [b""])[-1], "a spec")) for number in (2, 3))
    model_type, by_bytes = _flag(trainer, 3, 1), bool(_flag(trainer, 35, 0))
    if model_type not in (1, 2):
        raise ValueError(f"expected a unigram (1) or BPE (2) model, not one of type {model_type}")
    if _flag(trainer, 24, 0) or not _flag(normalizer, 5, 1):
        raise ValueError("spaces behind words, or unescaped, are not supported")
    if len({piece.text for piece in pieces}) < len(pieces):
        raise ValueError("a piece is there twice")
    vocab = numbered(piece.text for piece in pieces)
    kinds: dict[int, list[str]] = {kind: [piece.text for piece in pieces if piece.type == kind] for kind in _Type}
    if kinds[_Type.UNUSED] or len(kinds[_Type.UNKNOWN]) != 1:
        raise ValueError("expected one unknown piece, and none that is unused")
    if by_bytes and sorted(kinds[_Type.BYTE]) != [f"<0x{byte:02X}>" for byte in range(256)]:
        raise ValueError("expected a piece for each byte")
    [unknown] = kinds[_Type.UNKNOWN]
    own = sorted(kinds[_Type.USER_DEFINED], key=len, reverse=True)
    hidden = [unknown, *kinds[_Type.CONTROL], *kinds[_Type.BYTE]]
    if model_type == 2:
        normal = sorted((piece for piece in pieces if piece.type == _Type.NORMAL), key=lambda piece: -piece.score)
        merges = _merges([piece.text for piece in normal], {piece.text: 0 for piece in normal})
        options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": by_bytes}
        spelled = _made(models.BPE, vocab, merges, **options)
        # A piece of the user's own has no merges: it is a token where it stands alone. So would be what is hidden.
        rust = Rust(_made(models.BPE, vocab, merges, ignore_merges=True, **options) if own else spelled)
        hidden = hidden if own else []
    else:
        unspelled = {name: "\0" * (number + 1) for number, name in enumerate(hidden)}
        # Unigram takes a piece of the user's own for a very likely one.
        scored = [(piece.text, -0.1 if piece.type == _Type.USER_DEFINED else piece.score) for piece in pieces]
        own = []
        spelled = _made(models.Unigram, [(unspelled.get(text, text), score) for text, score in scored], 0, False)
        rust = Rust(_made(models.Unigram, scored, vocab[unknown], by_bytes))
    cuts = {name: next((token.offsets[1] for token in spelled.tokenize(name)), 1) for name in hidden}
    rust.normalizer = _normalizer(normalizer)
    rust.pre_tokenizer = _pre_tokenizer(pieces, own, cuts)
    prefix = [decoders.Strip(" ", 1, 0)] if _flag(normalizer, 3, 1) else []
    rust.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *prefix])
    rust.add_special_tokens([unknown, *kinds[_Type.CONTROL]])
    controls = set(kinds[_Type.CONTROL])
    names = {"bos": (46, "<s>"), "eos": (47, "</s>"), "pad": (48, "<pad>")}
    roles: dict[str, int | None] = {"unk": vocab[unknown]}
    for role, (number, usual) in names.items():
        name = _text(trainer[number][-1]) if number in trainer else usual
        roles[role] = vocab[name] if name in controls else None
    return Vocabulary(rust, roles)


def _normalizer(spec: Mapping[int, Sequence[int | bytes]]) -> normalizers.Normalizer:
    """NormalizerSpec: precompiled_charsmap = 2, add_dummy_prefix = 3, remove_extra_whitespaces = 4."""
    steps: list[normalizers.Normalizer] = []
    if charsmap := _bytes(spec.get(2, [b""])[-1], "a character map"):
        _CharacterMap(charsmap)
        steps.append(_made(normalizers.Precompiled, charsmap))
    if _flag(spec, 4, 1):  # an escaped space at the end goes too, as the spaces are escaped by then
        steps += [normalizers.Replace(Regex(rf"\A +|[ {_SPACE}]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if _flag(spec, 3, 1):
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])


def _pre_tokenizer(pieces: list[_Piece], own: list[str], cuts: dict[str, int]) -> pre_tokenizers.PreTokenizer | None:
    """Cuts that change no token but these: the user's own pieces stand alone, and no text spells a hidden piece.

    A hidden piece is cut where the first token ends that spells it otherwise.
    """
    steps: list[pre_tokenizers.PreTokenizer] = []
    if own:
        steps.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, own))), "isolated"))
    places = [f"(?<={re.escape(n[:cut])})(?={re.escape(n[cut:])})" for n, cut in cuts.items() if cut < len(n)]
    if places:
        steps.append(pre_tokenizers.Split(Regex("|".join(places)), "removed"))
    if not any(re.search(f"[^{_SPACE}]{_SPACE}", piece.text) for piece in pieces):
        # No piece goes on behind a word, so each word can be looked up by itself, and be remembered.
        steps.append(pre_tokenizers.Split(Regex(f"{_SPACE}+[^{_SPACE}]*"), "isolated"))
    return pre_tokenizers.Sequence(steps) if steps else None


class _CharacterMap:
    """A text with the longest rule of a map followed at each place, from left to right.

    The library's own does this for single characters. It takes a letter and the marks on it as one, by the shortest
    rule, and loses the others: ệ in three code points gave ẹ. So these clusters are done here, before it.
    """

    def __init__(self, data: bytes) -> None:
        """Take a map: its size, a double array (Darts), the texts that it names. No look-up may leave it."""
        size = int.from_bytes(data[:4], "little")
        if len(data) < 4 or size % 4 or not size or 4 + size > len(data):
            raise ValueError("the character map is damaged")
        units = np.frombuffer(data, "<u4", size // 4, 4)
        is_leaf = units >> 31 == 1
        offsets = (units >> 10) << ((units & 0x200) >> 6)
        reached = np.where(is_leaf, 0, (np.arange(len(units), dtype=np.uint32) ^ offsets) | 0xFF)
        values = np.where(is_leaf, units & 0x7FFFFFFF, 0)
        self.units, self.texts = units.tolist(), data[4 + size :]
        if int(reached.max()) >= len(units) or int(values.max()) >= len(self.texts) or self.texts[-1]:
            raise ValueError("the character map is damaged")
        _text(self.texts)

    def __call__(self, text: str) -> str:
        """The text with its clusters mapped, and the rest as it was."""
        return text if text.isascii() and "\r\n" not in text else _clusters().sub(self._mapped, text)

    def _mapped(self, cluster: re.Match[str]) -> str:
        data, place, found = cluster[0].encode(), 0, b""
        while place < len(data):
            end, text = self._longest(data, place)
            found += text
            place = end
        return found.decode(errors="replace")

    def _longest(self, data: bytes, place: int) -> tuple[int, bytes]:
        """Where the longest rule for what stands there ends, and its text; without one, the character itself."""
        end, rule = place + 1, None
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1
        text, unit, node = data[place:end], self.units[0], 0
        for index in range(place, len(data)):
            node ^= (unit >> 10) << ((unit & 0x200) >> 6) ^ data[index]
            unit = self.units[node]
            if unit & 0x800000FF != data[index]:
                break
            if unit & 0x100:
                below = node ^ (unit >> 10) << ((unit & 0x200) >> 6)
                end, rule = index + 1, self.units[below] & 0x7FFFFFFF
        return end, text if rule is None else self.texts[rule : self.texts.index(0, rule)]


@cache
def _clusters() -> re.Pattern[str]:
    """A character with what joins it: marks, vowels and ends of Hangul, joiners, the voicing of narrow Katakana."""
    joining = [chr(code) for code in (*range(0x300, 0x1F000), *range(0xE0100, 0xE01F0)) if _joins(chr(code))]
    marks = "".join(map(re.escape, joining))
    return re.compile(f"\r\n|[^{marks}]?[{marks}]+", re.DOTALL)


def _joins(character: str) -> bool:
    is_hangul = "\u1160" <= character <= "\u11ff" or "\ud7b0" <= character <= "\ud7ff"
    return is_hangul or character in "\u0e33\u0eb3\u200c\u200d\uff9e\uff9f" or category(character)[0] == "M"


def _character_map(normalizer: normalizers.Normalizer | None) -> _CharacterMap | None:
    """The map that a normalizer has in it, if it has one."""
    parts = [] if normalizer is None else [json.loads(normalizer.__getstate__())]
    while parts:
        part = parts.pop()
        if part["type"] == "Precompiled" and part["precompiled_charsmap"]:
            return _CharacterMap(base64.b64decode(part["precompiled_charsmap"]))
        parts += part.get("normalizers", [])
    return None


def _piece(data: bytes) -> _Piece:
    """SentencePiece: piece = 1, score = 2, type = 3."""
    fields = _message(data)
    [score] = struct.unpack("<f", _bytes(fields.get(2, [bytes(4)])[-1], "a score"))
    text, kind = _text(fields.get(1, [b""])[-1]), _flag(fields, 3, 1)
    if not text or not np.isfinite(score) or kind not in set(_Type):
        raise ValueError(f"expected a piece with a text, a score and a type, not {text[:40]!r}, {score} and {kind}")
    return _Piece(text, score, kind)


def _message(data: bytes) -> dict[int, list[int | bytes]]:
    """The fields of a protocol buffer by number: whole numbers, or bytes; those of 4 and 8 bytes are bytes too."""
    fields: dict[int, list[int | bytes]] = {}
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        wire = key & 7
        value: int | bytes
        if wire == 0:
            value, place = _varint(data, place)
        elif wire in (1, 2, 5):
            size, place = _varint(data, place) if wire == 2 else ({1: 8, 5: 4}[wire], place)
            value, place = data[place : place + size], place + size
            if place > len(data):
                raise ValueError("the SentencePiece model is cut short")
        else:
            raise ValueError(f"expected a SentencePiece model, but a field has the type {wire}")
        fields.setdefault(key >> 3, []).append(value)
    return fields


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """A whole number in groups of 7 bits, the lowest first, and the place behind it."""
    value = shift = 0
    while place < len(data) and shift < 70:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise ValueError("the SentencePiece model is cut short")


def _flag(fields: Mapping[int, Sequence[int | bytes]], number: int, default: int) -> int:
    value = fields.get(number, [default])[-1]
    if not isinstance(value, int):
        raise ValueError(f"expected a whole number in field {number} of the SentencePiece model")
    return value


def _bytes(value: int | bytes, what: str) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"expected {what} of the SentencePiece model to be bytes, not a number")
    return value


def _text(value: int | bytes) -> str:
    try:
        return _bytes(value, "a text").decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("expected the texts of the SentencePiece model to be UTF-8") from None
