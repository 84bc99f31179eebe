"""Published vocabularies give the tokens of their own packages; what is no vocabulary is said in one line.

The table below is what tiktoken 0.14 and sentencepiece 0.2.2 gave, so that it holds where neither is installed.
"""

from __future__ import annotations

import base64
import importlib
import json
import pickle
import random
import struct
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.tokenizers import Tokenizer
from weft.interop.vocabularies import PATTERNS, Vocabulary, read_vocabulary

PLACES = {
    "gpt2": "gpt2-bpe/encoder.json",
    "cl100k": "cl100k/cl100k_base.tiktoken",
    "llama2": "llama2-sp/tokenizer.model",
    "t5": "t5-sp/spiece.model",
}

TABLE = {
    "Once upon a time": {
        "gpt2": [7454, 2402, 257, 640],
        "cl100k": [12805, 5304, 264, 892],
        "llama2": [9038, 2501, 263, 931],
        "t5": [1447, 1286, 3, 9, 97],
    },
    "  two  spaces\n\tand a tab ": {
        "gpt2": [220, 734, 220, 9029, 198, 197, 392, 257, 7400, 220],
        "cl100k": [220, 1403, 220, 12908, 198, 53577, 264, 5769, 220],
        "llama2": [259, 1023, 29871, 8162, 13, 12, 392, 263, 4434, 29871],
        "t5": [192, 4856, 11, 3, 9, 3808],
    },
    "don't I'LL we've": {
        "gpt2": [9099, 470, 314, 6, 3069, 356, 1053],
        "cl100k": [15357, 956, 358, 6, 4178, 584, 3077],
        "llama2": [1016, 29915, 29873, 306, 29915, 2208, 591, 29915, 345],
        "t5": [278, 31, 17, 27, 31, 10376, 62, 31, 162],
    },
    "def f(x):\n    return x**2  # ok\n": {
        "gpt2": [4299, 277, 7, 87, 2599, 198, 220, 220, 220, 1441, 2124, 1174, 17, 220, 1303, 12876, 198],
        "cl100k": [755, 282, 2120, 997, 262, 471, 865, 334, 17, 220, 674, 5509, 198],
        "llama2": [822, 285, 29898, 29916, 1125, 13, 1678, 736, 921, 1068, 29906, 29871, 396, 3431, 13],
        "t5": [20, 89, 3, 89, 599, 226, 61, 10, 1205, 3, 226, 19844, 357, 1713, 3, 1825],
    },
    "naïve Straße Ærø": {
        "gpt2": [2616, 38776, 15195, 39683, 68, 6184, 228, 81, 24172],
        "cl100k": [3458, 38672, 588, 27745, 24352, 1717, 228, 81, 6282],
        "llama2": [1055, 30085, 345, 22667, 29871, 30232, 29878, 30077],
        "t5": [3, 29, 9, 2, 162, 5438, 5202, 15, 3, 2, 52, 2],
    },
    "日本語のテキスト": {
        "gpt2": [33768, 98, 17312, 105, 45739, 252, 5641, 24336, 25084, 43302],
        "cl100k": [9080, 22656, 45918, 252, 16144, 57933, 62903, 71634],
        "llama2": [29871, 30325, 30346, 30968, 30199, 30572, 30454, 30255, 30279],
        "t5": [3, 2],
    },
    "Привет, мир!": {
        "gpt2": [140, 253, 21169, 18849, 38857, 16843, 20375, 11, 12466, 120, 18849, 21169, 0],
        "cl100k": [54745, 28089, 8341, 11, 11562, 78746, 0],
        "llama2": [7203, 7616, 29892, 4157, 29927, 29991],
        "t5": [3, 2, 14709, 6609, 15042, 6, 3, 21325, 8452, 55],
    },
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 ok": {
        "gpt2": [47249, 222, 41840, 102, 447, 235, 41840, 102, 447, 235, 41840, 100, 12876],
        "cl100k": [76460, 222, 9468, 239, 102, 378, 235, 9468, 239, 102, 378, 235, 9468, 239, 100, 5509],
        "llama2": [
            29871,
            243,
            162,
            155,
            131,
            243,
            162,
            148,
            172,
            30722,
            243,
            162,
            148,
            172,
            30722,
            243,
            162,
            148,
            170,
            3431,
        ],
        "t5": [3, 2, 3, 2, 3, 2, 3, 1825],
    },
    "<s>not</s> <unk> <|endoftext|>": {
        "gpt2": [27, 82, 29, 1662, 3556, 82, 29, 1279, 2954, 29, 1279, 91, 437, 1659, 5239, 91, 29],
        "cl100k": [45147, 29, 1962, 524, 82, 29, 366, 3200, 29, 83739, 8862, 728, 428, 91, 29],
        "llama2": [
            529,
            29879,
            29958,
            1333,
            829,
            29879,
            29958,
            529,
            2960,
            29958,
            529,
            29989,
            355,
            974,
            726,
            29989,
            29958,
        ],
        "t5": [3, 2, 7, 3155, 2264, 2, 87, 7, 3155, 3, 2, 6513, 3155, 3, 2, 9175, 989, 858, 6327, 9175, 3155],
    },
    "12345.678e-9": {
        "gpt2": [10163, 2231, 13, 30924, 68, 12, 24],
        "cl100k": [4513, 1774, 13, 17458, 68, 12, 24],
        "llama2": [29871, 29896, 29906, 29941, 29946, 29945, 29889, 29953, 29955, 29947, 29872, 29899, 29929],
        "t5": [586, 3710, 25134, 3940, 15, 7141],
    },
    "ﬁ ½ ① …": {
        "gpt2": [171, 105, 223, 25208, 2343, 239, 254, 3926],
        "cl100k": [171, 71831, 220, 27154, 220, 49412, 254, 4696],
        "llama2": [29871, 31017, 29871, 30226, 29871, 229, 148, 163, 16088],
        "t5": [361, 209, 2, 357, 209, 3, 233],
    },
    "e\u0301 a\u030a": {
        "gpt2": [68, 136, 223, 257, 136, 232],
        "cl100k": [68, 54939, 264, 136, 232],
        "llama2": [321, 30103, 263, 207, 141],
        "t5": [3, 154, 3, 2],
    },
    "▁x ▁": {
        "gpt2": [5008, 223, 87, 11019, 223],
        "cl100k": [10634, 223, 87, 14860, 223],
        "llama2": [29871, 921, 259],
        "t5": [3, 226],
    },
    "\x00\x01\r\n\r\n x": {
        "gpt2": [188, 189, 201, 198, 201, 198, 2124],
        "cl100k": [188, 189, 881, 865],
        "llama2": [29871, 3, 4, 30004, 13, 30004, 13, 921],
        "t5": [3, 2, 3, 226],
    },
    "\u017f\u059a Vie\u0323\u0302t": {
        "gpt2": [129, 123, 146, 248, 47154, 136, 96, 136, 224, 83],
        "cl100k": [129, 123, 146, 248, 60402, 136, 96, 136, 224, 83],
        "llama2": [29871, 30473, 217, 157, 21769, 31214, 31500, 29873],
        "t5": [3, 7, 2, 1813, 2, 17],
    },
}


@cache
def vocabulary(path: Path) -> Vocabulary:
    return read_vocabulary(path)


@pytest.fixture(params=PLACES)
def published(request: pytest.FixtureRequest, weft_weights: Path) -> tuple[str, Path]:
    return request.param, weft_weights / "tokenizers" / PLACES[request.param]


def test_the_table(published: tuple[str, Path]) -> None:
    name, path = published
    read = vocabulary(path)
    texts = list(TABLE)
    assert dict(zip(texts, read.encode_batch(texts), strict=True)) == {text: ids[name] for text, ids in TABLE.items()}
    for text, ids in TABLE.items():
        assert len(read.tokens(ids[name])) == len(ids[name])
        if name in ("gpt2", "cl100k"):
            assert read.decode(ids[name]) == text
        if name == "llama2":
            assert read.decode(ids[name]) == text.replace("▁", " ")
    assert read.encode("") == []


def test_specials_and_sizes(weft_weights: Path) -> None:
    found = {}
    for name, place in PLACES.items():
        read = vocabulary(weft_weights / "tokenizers" / place)
        found[name] = (read.vocab_size, read.bos, read.eos, read.pad, read.unk, read.kind)
    assert found == {
        "gpt2": (50257, 50256, 50256, None, None, "bpe"),
        "cl100k": (100277, 100257, 100257, None, None, "bpe"),
        "llama2": (32000, 1, 2, None, 0, "bpe"),
        "t5": (32000, None, 1, 0, 2, "unigram"),
    }
    cl100k = vocabulary(weft_weights / "tokenizers" / PLACES["cl100k"])
    assert cl100k.tokens([100256, 100257, 100276]) == ["<|unused_100256|>", "<|endoftext|>", "<|endofprompt|>"]
    assert cl100k.decode([12805, 100257, 100256, 5304]) == "Once upon"
    with pytest.raises(ValueError, match="a token is a number from 0 to 100276, not 100277"):
        cl100k.decode([100277])
    assert vocabulary(weft_weights / "tokenizers" / PLACES["llama2"]).tokens([1, 9038, 13]) == [
        "<s>",
        "▁Once",
        "<0x0A>",
    ]


# A pile of what people write: prose, code, white space, emoji, any script, and marks on letters.
known = st.characters(exclude_categories=("Cs", "Cn", "Co"))
PROSE = """
the Once don't I'LL we've 'S 12345 3.14 naïve Straße 日本語 한국어 Привет ﬁ ① ½ … Việt हिन्दी ｶﾞ ▁ 😀 👍🏽 🇩🇪 👩\u200d👧
def __init__(self): return x==1; <s> </s> <unk> <pad> <0x41> <|endoftext|>
"""
words = st.sampled_from(PROSE.split())
spaces = st.sampled_from(["", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u200b", "    "])
forms = st.sampled_from(["NFC", "NFD"])
portions = st.tuples(st.one_of(words, st.text(known, max_size=4), st.text(max_size=3, alphabet="az AZ09_.\n")), spaces)
pile = st.builds(
    lambda parts, form: unicodedata.normalize(form, "".join(part for pair in parts for part in pair)),
    st.lists(portions, max_size=8),
    forms,
)


def tiktoken_of(name: str, path: Path) -> Callable[[str], list[int]]:
    tiktoken, load = pytest.importorskip("tiktoken"), importlib.import_module("tiktoken.load")
    if name == "gpt2":
        ranks = load.data_gym_to_mergeable_bpe_ranks(str(path.with_name("vocab.bpe")), str(path))
    else:
        ranks = load.load_tiktoken_bpe(str(path))
    return tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens={}).encode_ordinary


def sentencepiece_of(path: Path) -> Any:
    return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(path))


def transformers_of(path: Path) -> Callable[[str], list[int]]:
    transformers = pytest.importorskip("transformers")
    lines = path.with_name("vocab.bpe").read_text(encoding="utf-8").split("\n")[1:]
    merges = [tuple(line.split(" ")) for line in lines if line]
    made = transformers.GPT2Tokenizer(vocab=json.loads(path.read_bytes()), merges=merges)
    return lambda text: made.encode(text, split_special_tokens=True)


def by_hand(name: str, path: Path) -> Callable[[str], list[int]]:
    """Byte-level BPE in a few lines: in each word, the pair whose outcome has the lowest rank is merged."""
    regex = pytest.importorskip("regex")
    if name == "gpt2":
        shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
        order = shown + [byte for byte in range(256) if byte not in shown]
        written = {chr(byte if byte in shown else 256 + order.index(byte) - len(shown)): byte for byte in order}
        vocab = json.loads(path.read_bytes())
        ids = {bytes(written[c] for c in token): n for token, n in vocab.items() if token != "<|endoftext|>"}
    else:
        rows = (line.split() for line in path.read_bytes().splitlines())
        ids = {base64.b64decode(token): int(rank) for token, rank in rows}

    def encode(text: str) -> list[int]:
        found = []
        for word in regex.findall(PATTERNS[name], text):
            parts = [bytes([byte]) for byte in word.encode()]
            while True:
                ranks = [ids.get(a + b, len(ids)) for a, b in pairwise(parts)]
                if min(ranks, default=len(ids)) == len(ids):
                    break
                at = ranks.index(min(ranks))
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            found += [ids[part] for part in parts]
        return found

    return encode


def pieces_by_hand(path: Path) -> Callable[[str], list[int]]:
    """SentencePiece's BPE in a few lines, from llama2.c's copy of the pieces and scores."""
    data, place, pieces = path.with_name("tokenizer.bin").read_bytes(), 4, []
    while place < len(data):
        score, size = struct.unpack_from("<fi", data, place)
        pieces.append((data[place + 8 : place + 8 + size].decode(), score))
        place += 8 + size
    ids = {text: (score, number) for number, (text, score) in enumerate(pieces) if number >= 259}

    def encode(text: str) -> list[int]:
        parts = list(" " + text) if text else []
        while True:
            scores = [ids.get(a + b, (-inf,))[0] for a, b in pairwise(parts)]
            if max(scores, default=-inf) == -inf:
                break
            at = scores.index(max(scores))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        spelled = ([ids[part][1]] if part in ids else [byte + 3 for byte in part.encode()] for part in parts)
        return [number for numbers in spelled for number in numbers]

    return encode


REFERENCES: dict[str, Callable[[Path], Callable[[str], list[int]]]] = {
    "gpt2 tiktoken": lambda path: tiktoken_of("gpt2", path),
    "gpt2 transformers": transformers_of,
    "gpt2 by hand": lambda path: by_hand("gpt2", path),
    "cl100k tiktoken": lambda path: tiktoken_of("cl100k", path),
    "cl100k by hand": lambda path: by_hand("cl100k", path),
    "llama2 sentencepiece": lambda path: sentencepiece_of(path).encode,
    "llama2 by hand": pieces_by_hand,
    "t5 sentencepiece": lambda path: sentencepiece_of(path).encode,
}


@pytest.mark.parametrize("reference", REFERENCES)
def test_agrees_on_a_pile_of_text(reference: str, weft_weights: Path) -> None:
    name = reference.partition(" ")[0]
    path = weft_weights / "tokenizers" / PLACES[name]
    read, expected = vocabulary(path), REFERENCES[reference](path)
    escaped = "by hand" in reference and name == "llama2"

    @settings(max_examples=300)
    @given(text=pile)
    def agrees(text: str) -> None:
        text = text.replace("▁", " ") if escaped else text
        assert read.encode(text) == expected(text)
        if name != "t5":
            assert read.decode(read.encode(text)) == text.replace("▁", " " if name == "llama2" else "▁")

    agrees()


@pytest.mark.parametrize("side", ["source", "target"])
def test_marian_vocabularies_agree(side: str, weft_weights: Path) -> None:
    path = weft_weights / "tokenizers" / "opus-mt-en-mg" / f"{side}.spm"
    read, expected = vocabulary(path), sentencepiece_of(path)

    @given(text=pile)
    def agrees(text: str) -> None:
        assert read.encode(text) == expected.encode(text)

    agrees()


def test_saved_and_read_again_it_is_the_same(published: tuple[str, Path], tmp_path: Path) -> None:
    name, path = published
    read = vocabulary(path)
    read.save(tmp_path / "tokenizer.json")
    for again in (read_vocabulary(tmp_path), pickle.loads(pickle.dumps(read))):
        assert again.encode_batch(list(TABLE)) == read.encode_batch(list(TABLE))
        assert again.vocab_size == read.vocab_size
        assert [getattr(again, role) for role in ("bos", "eos", "pad", "unk")] == [
            read.bos,
            read.eos,
            read.pad,
            read.unk,
        ]
    if name == "gpt2":
        weft = read.renumbered()
        assert isinstance(weft, Tokenizer)
        assert weft.tokens([0, 1, 2, 3]) == ["<pad>", "<s>", "</s>", "<unk>"]
        assert weft.decode(weft.encode("Once upon a time")) == "Once upon a time"
        assert weft.tokens(weft.encode("Once upon a time")) == read.tokens(read.encode("Once upon a time"))


# Small files, made here.

BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES += [byte for byte in range(256) if byte not in BYTES]
SHOWN = [chr(byte) if number < 188 else chr(256 + number - 188) for number, byte in enumerate(BYTES)]
GPT2 = {token: number for number, token in enumerate([*SHOWN, "Ġa", "ab", "<|endoftext|>", "model"])}
MERGES = "#version: 0.2\nĠ a\na b\n"


def varint(value: int) -> bytes:
    value %= 1 << 64
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3) + varint(value)


def charsmap(offset: int = 1, text: int = 0) -> bytes:
    """A map of one rule, A to a: the root leads to the unit of "A", and that to a leaf, which names the text."""
    units = [0] * 512
    units[0] = 256 << 10
    units[256 ^ 0x41] = 0x41 | 1 << 8 | offset << 10
    units[256 ^ 0x41 ^ 1] = 1 << 31 | text
    return struct.pack("<I512I", 2048, *units) + b"a\0"


def spm(pieces: list[tuple[str, float, int]], trainer: dict[int, int], normalizer: dict[int, int | bytes]) -> bytes:
    """A SentencePiece model."""
    listed = [field(1, text.encode()) + field(2, score) + field(3, kind) for text, score, kind in pieces]
    specs = [b"".join(field(number, value) for number, value in spec.items()) for spec in (trainer, normalizer)]
    return b"".join(field(1, piece) for piece in listed) + field(2, specs[0]) + field(3, specs[1])


CONTROLS = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
LETTERS = [(letter, -float(5 + number), 1) for number, letter in enumerate("▁abc<s>/")]
MERGED = [("ab", -1.0, 1), ("▁a", -2.0, 1), ("abc", -3.0, 1), ("▁abc", -4.0, 1)]
OWN = [("<x>", 0.0, 4), ("▁▁", 0.0, 4), ("c<", 0.0, 4)]
BYTE_PIECES = [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
UNIGRAM, BPE, BYTE_FALLBACK = {3: 1}, {3: 2}, {35: 1}
MODELS = {
    "bpe": spm([*CONTROLS, *LETTERS, *MERGED], BPE, {4: 0}),
    "bpe, bytes": spm([*CONTROLS, *BYTE_PIECES, *LETTERS, *MERGED], BPE | BYTE_FALLBACK, {3: 0, 4: 0}),
    "bpe, own pieces": spm([*CONTROLS, *LETTERS, *MERGED, *OWN], BPE, {4: 0}),
    "unigram": spm([*CONTROLS, *LETTERS, *MERGED], UNIGRAM, {}),
    "unigram, bytes, map": spm([*CONTROLS, *BYTE_PIECES, *LETTERS, *MERGED], UNIGRAM | BYTE_FALLBACK, {2: charsmap()}),
    "unigram, own pieces": spm([*CONTROLS, *LETTERS, *MERGED, *OWN], UNIGRAM, {3: 0, 4: 0}),
}


@pytest.mark.parametrize("name", MODELS)
def test_small_models_agree_with_sentencepiece(name: str, tmp_path: Path) -> None:
    path = tmp_path / "small.model"
    path.write_bytes(MODELS[name])
    read, expected = read_vocabulary(path), sentencepiece_of(path)

    @given(text=st.lists(st.sampled_from([*"abcA s<>/▁é", "<s>", "</s>", "<unk>", "<0x41>", "<x>"])).map("".join))
    def agrees(text: str) -> None:
        assert read.encode(text) == expected.encode(text)

    agrees()


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("bpe", "abc ab  é", "▁abc ▁ ab ▁ ▁ <unk>"),
        ("bpe", "<s>", "▁ < s >"),
        ("bpe, bytes", "abé", "ab <0xC3> <0xA9>"),
        ("bpe, own pieces", "a<x>bc<  a", "▁a <x> b c< ▁▁ a"),
        ("unigram", "  abc   ab</s>", "▁abc ▁ ab < / s >"),
        ("unigram", "a  ▁ ▁", "▁a"),
        ("unigram, bytes, map", "ABA <0x41>", "▁a <0x42> a ▁ < <0x30> <0x78> <0x34> <0x31> >"),
        ("unigram, own pieces", "a<x>bc<  a", "a <x> b c< ▁▁ a"),
    ],
)
def test_small_models(name: str, text: str, pieces: str, tmp_path: Path) -> None:
    path = tmp_path / "small.model"
    path.write_bytes(MODELS[name])
    assert read_vocabulary(path).tokens(read_vocabulary(path).encode(text)) == pieces.split(" ")


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    model = {"type": "BPE", "vocab": {**GPT2, "far": 270}, "merges": [["Ġ", "a"], ["a", "b"]]}
    return {
        "version": "1.0",
        "truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        "padding": None,
        "added_tokens": [{"id": 265, "content": "<|im_end|>", "special": True, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    } | changes  # fmt: skip


def test_a_tokenizer_json_keeps_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    read = read_vocabulary(tmp_path)
    assert read.vocab_size == 271
    assert read.tokens([256, 258, 265, 260, 270]) == ["▁a", "<|endoftext|>", "<|im_end|>", "<|unused_260|>", "far"]
    assert read.encode("ab a<|im_end|>")[:2] == [257, 256]
    assert len(read.encode("ab a<|im_end|>")) == 2 + len("<|im_end|>")  # neither cut nor forged
    assert (read.bos, read.eos, read.pad, read.unk) == (258, 258, None, None)
    config = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    read = read_vocabulary(tmp_path / "tokenizer.json")
    assert (read.bos, read.eos, read.pad, read.unk) == (None, 265, 258, None)


def test_gpt2s_two_files_under_both_their_names(tmp_path: Path) -> None:
    for vocab, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
        folder = tmp_path / vocab.partition(".")[0]
        folder.mkdir()
        (folder / vocab).write_text(json.dumps(GPT2))
        (folder / merges).write_text(MERGES if vocab == "vocab.json" else MERGES.partition("\n")[2])
        for path in (folder, folder / vocab, folder / merges):
            assert read_vocabulary(path).encode("ab a") == [257, 256]
    (tmp_path / "vocab.json").write_text(json.dumps(GPT2))
    with pytest.raises(OSError, match=r"no file .*merges\.txt"):
        read_vocabulary(tmp_path / "vocab.json")


def tiktoken_file(extra: str = "") -> str:
    tokens = [bytes([byte]) for byte in range(256)] + [b" a", b"ab"]
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)) + extra


def test_a_tiktoken_file_of_no_known_size_needs_a_pattern(tmp_path: Path) -> None:
    path = tmp_path / "own.tiktoken"
    path.write_text(tiktoken_file())
    with pytest.raises(ValueError, match="no known file has 258 tokens: name the pattern, gpt2, cl100k, o200k"):
        read_vocabulary(path)
    assert read_vocabulary(path, "o200k").encode("ab a") == [257, 256]
    with pytest.raises(ValueError, match=r"no pattern 'o200': expected one of .*; did you mean 'o200k'"):
        read_vocabulary(path, "o200")


SHORT = [*CONTROLS, *LETTERS]
FAULTS: dict[str, tuple[str | bytes, str]] = {
    "empty": (b"", "expected a tokenizer.json, GPT-2's two files, a tiktoken file or a SentencePiece model"),
    "magic": (b"GGUF\x03\0\0\0", "expected a tokenizer.json, GPT-2's"),
    "cut JSON": ('{"model": {', "expected JSON"),
    "deep JSON": ('{"a":' * 100_000, "expected JSON"),
    "no vocabulary": ('{"model": {"type": "BPE"}}', ""),
    "huge number": (
        json.dumps(tokenizer_json(model={"type": "BPE", "vocab": {"a": 1 << 40}, "merges": []})),
        "cannot have",
    ),
    "name": (json.dumps(GPT2), "expected its name to be one of vocab.json, merges.txt, encoder.json, vocab.bpe"),
    "twice": (tiktoken_file("YWI= 258\n"), "line 259: the token is there twice"),
    "rank": (tiktoken_file("YWJj 257\n"), "two tokens have the same number"),
    "far rank": (tiktoken_file("YWJj 99999999999\n"), "cannot have the number 99999999999"),
    "base64": (tiktoken_file("YWJ 258\n"), "line 259: expected a token in base64 and its rank"),
    "a byte": (tiktoken_file().partition("\n")[2], "expected a token for each byte, but 0x00 has none"),
    "cut": (MODELS["unigram"][:-3], "the SentencePiece model is cut short"),
    "long": (b"\n\xff\xff\xff\xff\xff\xff\xff\xff\x7f", "the SentencePiece model is cut short"),
    "word model": (
        spm(SHORT, {3: 3}, {}),
        "expected a unigram (1) or BPE (2) model, not one of type 3",
    ),
    "suffix": (spm(SHORT, {24: 1}, {}), "spaces behind words, or unescaped, are not supported"),
    "piece twice": (spm([*CONTROLS, *LETTERS, *LETTERS], {}, {}), "a piece is there twice"),
    "no unknown": (spm(LETTERS, {}, {}), "expected one unknown piece"),
    "bytes": (spm(SHORT, BYTE_FALLBACK, {}), "expected a piece for each byte"),
    "score": (spm([*CONTROLS, ("a", float("nan"), 1)], {}, {}), "expected a piece with a text, a score and a type"),
    "map": (spm(SHORT, {}, {2: charsmap()[:-1]}), "the character map is damaged"),
    "map's text": (spm(SHORT, {}, {2: charsmap(text=2)}), "the character map is damaged"),
    "map's offset": (spm(SHORT, {}, {2: charsmap(offset=512)}), "the character map is damaged"),
    "map's size": (
        spm(SHORT, {}, {2: b"\xff\xff\xff\x7f" + charsmap()[4:]}),
        "the character map is damaged",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_vocabulary_is_said_in_one_line(fault: str, tmp_path: Path) -> None:
    content, message = FAULTS[fault]
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as error:  # noqa: PT011
        read_vocabulary(path, "gpt2")
    assert str(error.value).startswith(f"{path}: {message}" if message else f"{path}: ") or message in str(error.value)
    assert "\n" not in str(error.value)


def test_merges_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(GPT2))
    for merges, message in {
        "#version: 0.2\na b\na b c\n": "line 3 of the merges: expected two tokens, not 'a b c'",
        "a zz\n": "zz",
        "a b</w>\n": "not such as mark the ends of words",
    }.items():
        (tmp_path / "merges.txt").write_text(merges)
        with pytest.raises(ValueError, match=message):
            read_vocabulary(tmp_path)
    with pytest.raises(OSError, match="has no vocabulary: expected one of "):
        read_vocabulary(Path(__file__).parent)


def test_damaged_files_never_do_worse_than_a_value_error(tmp_path: Path) -> None:
    """A byte changed, taken out or put in, or the file cut short: an error of one line, or a vocabulary that works."""
    files = {f"{number}.model": model for number, model in enumerate(MODELS.values())}
    files |= {"tokenizer.json": json.dumps(tokenizer_json()).encode(), "own.tiktoken": tiktoken_file().encode()}
    files |= {"vocab.json": json.dumps(GPT2).encode(), "merges.txt": MERGES.encode()}
    draw = random.Random(0)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    read, messages = 0, []
    for turn in range(700):
        name = draw.choice(list(files))
        data = bytearray(files[name])
        for _ in range(draw.choice((1, 1, 4))):
            place = draw.randrange(len(data))
            match draw.randrange(4):
                case 0:
                    data[place] = draw.randrange(256)
                case 1:
                    data[place : place + draw.choice((1, 1, 8))] = b""
                case 2:
                    data[place:place] = draw.randbytes(draw.choice((1, 4)))
                case 3:
                    data[place] ^= 1 << draw.randrange(8)
        if turn % 10 == 0:
            del data[draw.randrange(len(data)) :]
        (tmp_path / name).write_bytes(data)
        try:
            found = read_vocabulary(tmp_path / name, "gpt2")
        except (ValueError, OSError) as error:
            messages.append(str(error))
        else:
            ids = found.encode_batch(["abc <s> é A\u0301", "a<x>b  ", ""])
            assert all(0 <= number < found.vocab_size for row in ids for number in row)
            found.decode(ids[0])
            read += 1
        (tmp_path / name).write_bytes(files[name])
    assert not [message for message in messages if "\n" in message]
    assert len(messages) > 50 < read
