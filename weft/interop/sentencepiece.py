"""SentencePiece's models: a protocol buffer with BPE or unigram over the bare text (Kudo and Richardson 2018)."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, NamedTuple
from unicodedata import category

import numpy as np
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Rust

from weft.data.tokenizer_file import numbered

_SPACE = "▁"  # U+2581, for which SentencePiece's pieces have a space


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


def read_model(data: bytes) -> tuple[Rust, dict[str, int | None]]:
    """The tokenizer of a file, and the numbers of its specials: bos, eos, pad and unk.

    ModelProto: pieces = 1, trainer_spec = 2, normalizer_spec = 3.

    Raises:
        ValueError: if it is no SentencePiece model, or one that needs what weft does not have.
    """
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
        merges = merges_of([piece.text for piece in normal], {piece.text: 0 for piece in normal})
        options = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": by_bytes}
        spelled = made(models.BPE, vocab, merges, **options)
        # A piece of the user's own has no merges: it is a token where it stands alone. So would be what is hidden.
        rust = Rust(made(models.BPE, vocab, merges, ignore_merges=True, **options) if own else spelled)
        hidden = hidden if own else []
    else:
        unspelled = {name: "\0" * (number + 1) for number, name in enumerate(hidden)}
        # Unigram takes a piece of the user's own for a very likely one.
        scored = [(piece.text, -0.1 if piece.type == _Type.USER_DEFINED else piece.score) for piece in pieces]
        own = []
        spelled = made(models.Unigram, [(unspelled.get(text, text), score) for text, score in scored], 0, False)
        rust = Rust(made(models.Unigram, scored, vocab[unknown], by_bytes))
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
    return rust, roles


def _normalizer(spec: Mapping[int, Sequence[int | bytes]]) -> normalizers.Normalizer:
    """NormalizerSpec: precompiled_charsmap = 2, add_dummy_prefix = 3, remove_extra_whitespaces = 4."""
    steps: list[normalizers.Normalizer] = []
    if charsmap := _bytes(spec.get(2, [b""])[-1], "a character map"):
        CharacterMap(charsmap)
        steps.append(made(normalizers.Precompiled, charsmap))
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


class CharacterMap:
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


def character_map(normalizer: normalizers.Normalizer | None) -> CharacterMap | None:
    """The map that a normalizer has in it, if it has one."""
    parts = [] if normalizer is None else [json.loads(normalizer.__getstate__())]
    while parts:
        part = parts.pop()
        if part["type"] == "Precompiled" and part["precompiled_charsmap"]:
            return CharacterMap(base64.b64decode(part["precompiled_charsmap"]))
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


def made(model: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """A part of the library, whose complaints become ValueErrors."""
    try:
        return model(*args, **kwargs)
    except Exception as error:  # the library raises no other kind
        raise ValueError(" ".join(str(error).split())) from None


def merges_of(pieces: Iterable[str], known: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every way to make each piece of two known ones: what merges by the rank of the outcome needs."""
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in known and piece[cut:] in known
    ]
