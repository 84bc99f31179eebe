"""Files of llama2.c: a published model tells its known story; files go in and out bit for bit; damage is named."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.config import BOS, GPTConfig
from weft.interop import huggingface, llama2c
from weft.layers.relative import Rotary
from weft.models.gpt import GPT

WORDS = 11
# doc/stories260K.md of llama2.c: the model at temperature 0.
STORY = """\
Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big, \
red ball. She wanted to play with it, but it was too high.
Lily's mom said, "Lily, let's go to the park." Lily was sad and didn't know what to do. She said, "I want to play with \
your ball, but I can't find it."
Lily was sad and didn't know what to do. She said, "I'm sorry, Lily. I didn't know what to do."
Lily didn't want to help her mom, so she said, "I'm sorry, mom. I didn't know what to do." Her mom said, "Don't worry, \
Lily. We can help you."""


def tiny(**options: Any) -> GPTConfig:
    sizes = {"dim": 16, "num_heads": 4, "num_layers": 2, "ffn_dim": 12, "max_len": 20, "dropout": 0.0}
    llama = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}
    return GPTConfig(**{**sizes, **llama, **options})


def make(config: GPTConfig) -> GPT:
    model = GPT(config, WORDS).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def stories(weft_weights: Path) -> Path:
    folder = weft_weights / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"{weft_weights} has no stories260K")
    return folder


@torch.no_grad()
def test_stories260k_tells_its_story(stories: Path) -> None:
    config, tensors, vocab_size = llama2c.read(stories / "stories260K.bin")
    assert (config.dim, config.num_layers, config.num_kv_heads, config.tie, vocab_size) == (64, 5, 4, True, 512)
    model = GPT(config, vocab_size).eval()
    model.load_state_dict(tensors)
    said = torch.tensor([[BOS]])
    state = model.start(said)
    for _ in range(256):
        hidden, state = model.step(said[:, -1:], state)
        said = torch.cat([said, model.logits(hidden[:, -1]).argmax(-1, keepdim=True)], 1)
    tokenizer = llama2c.read_pieces(stories / "tok512.bin").tokenizer()
    told = tokenizer.decode(said[0, 1:].tolist(), skip_special_tokens=False)
    assert told.startswith(STORY)
    assert tokenizer.encode(told).ids[:200] == said[0, 1:201].tolist()


def test_stories260k_goes_out_as_it_came(stories: Path, tmp_path: Path) -> None:
    read = llama2c.read(stories / "stories260K.bin")
    llama2c.write(tmp_path / "model", read.config, read.tensors)
    before, after = (path.read_bytes() for path in (stories / "stories260K.bin", tmp_path / "model"))
    tables = 512 * 4 * 2 * 4  # cosines and sines stand last; another machine made them
    assert before[:-tables] == after[:-tables]
    one, two = (torch.frombuffer(bytearray(data[-tables:]), dtype=torch.float32) for data in (before, after))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-4)
    llama2c.write_pieces(tmp_path / "pieces", llama2c.read_pieces(stories / "tok512.bin"))
    assert (tmp_path / "pieces").read_bytes() == (stories / "tok512.bin").read_bytes()


@torch.no_grad()
def test_stories260k_as_a_folder_of_transformers(stories: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, tensors, vocab_size = llama2c.read(stories / "stories260K.bin")
    huggingface.write(tmp_path / "stories", config, tensors)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stories").eval()
    model = GPT(config, vocab_size).eval()
    model.load_state_dict(tensors)
    tokens = torch.randint(0, vocab_size, (2, 200))
    expected = theirs(tokens).logits
    assert (model.logits(model(tokens)) - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "tie": False}, {"num_kv_heads": 1}])
def test_out_and_in_again_it_is_the_same(options: dict[str, Any], tmp_path: Path) -> None:
    model = make(tiny(**options))
    llama2c.write(tmp_path / "model", tiny(**options), model.state_dict())
    read = llama2c.read(tmp_path / "model")
    assert read.config == tiny(**options)
    assert read.vocab_size == WORDS
    assert sorted(read.tensors) == sorted(model.state_dict())
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    header = struct.unpack("<7i", (tmp_path / "model").read_bytes()[:28])
    keys = options.get("num_kv_heads", 4)
    assert header == (16, 12, 2, 4, keys, -WORDS if options.get("tie") is False else WORDS, 20)


def test_rows_change_places_so_that_the_same_entries_turn_together() -> None:
    """llama2.c turns neighbours: turned so and then ordered, or ordered and then turned as weft does, is one."""
    x, places = torch.randn(3, 5, 7, 8, dtype=torch.float64), torch.arange(7)
    halves = torch.cat([torch.arange(0, 8, 2), torch.arange(1, 8, 2)])
    neighbours, apart = Rotary(8, interleaved=True), Rotary(8)
    torch.testing.assert_close(neighbours(x, places)[..., halves], apart(x[..., halves], places))
    rows = torch.randn(4, 8, 6)  # heads, head_dim, dim
    assert torch.equal(llama2c._to_halves(rows), rows[:, halves])
    assert torch.equal(llama2c._to_neighbours(llama2c._to_halves(rows)), rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rope_base": 500_000.0}, "llama2.c has rope_base = 10000.0, but the model has 500000.0"),
        ({"norm_eps": 1e-6}, "norm_eps"),
        ({"bias": True}, "llama2.c has bias = False"),
        ({"attention_bias": True}, "llama2.c has attention_bias = False, but the model has True"),
        ({"head_dim": 8}, "llama2.c has head_dim = 4, but the model has 8"),
        ({"positions": "learned"}, "llama2.c has positions = rotary, but the model has learned"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling"),
    ],
)
def test_models_that_it_has_not_are_not_written(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tiny(**options)
    with pytest.raises(ValueError, match=message):
        llama2c.write(tmp_path / "model", config, GPT(config, WORDS).state_dict())
    with pytest.raises(ValueError, match="has no tensor 'embedding'"):
        llama2c.write(tmp_path / "model", tiny(), {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((16, 12, 2, 4, 4, WORDS, 21), "bytes, but its header asks for"),
        ((16, 12, 2, 4, 4, -WORDS, 20), "bytes, but its header asks for"),
        ((2**31 - 1, 2**31 - 1, 2**31 - 1, 1, 1, 2**31 - 1, 2**31 - 1), "is no model of llama2.c: rotary"),
        ((2**31 - 2, 2**31 - 1, 2**31 - 1, 1, 1, 2**31 - 1, 2**31 - 1), "too few for 2147483647 layers"),
        ((1, 12, 2**31 - 1, 1, 1, WORDS, 20), "no model of llama2.c"),
        ((0x616B3432, 1, 16, 12, 2, 4, 4), "is of version 1 of llama2.c's format: expected version 0"),
        ((16, 12, 2, 3, 3, WORDS, 20), "no model of llama2.c: dim must be a multiple of num_heads"),
        ((16, 12, 2, 4, 3, WORDS, 20), "no model of llama2.c: num_heads must be a multiple of num_kv_heads"),
        ((16, 12, 2, 4, 4, 0, 20), "vocab_size = 0"),
        ((16, 12, -2, 4, 4, WORDS, 20), "num_layers = -2"),
    ],
)
def test_headers_that_are_refused(header: tuple[int, ...], message: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    llama2c.write(path, tiny(), make(tiny()).state_dict())
    path.write_bytes(struct.pack("<7i", *header) + path.read_bytes()[28:])
    with pytest.raises(ValueError, match=message) as error:
        llama2c.read(path)
    assert "\n" not in str(error.value)


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        llama2c.read(path)
    path.write_bytes(b"\1\0\0")
    with pytest.raises(ValueError, match="has 3 bytes"):
        llama2c.read(path)
    for data, message in (
        (b"\1", "has 1 bytes"),
        (struct.pack("<i", 5), "has no pieces"),
        (struct.pack("<ifi", 5, 0.0, 4) + b"abc", "piece 0 would have 4 bytes"),
        (struct.pack("<ifi", 2, 0.0, 3) + b"abc", "piece 0 would have 3 bytes"),
        (struct.pack("<ifi", 5, 0.0, -1) + b"abc", "piece 0 would have -1 bytes"),
        (struct.pack("<ifi", 5, float("nan"), 3) + b"abc", "score nan"),
        (struct.pack("<ifi", 5, 0.0, 3) + b"abcd", "ends in the middle of piece 1"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            llama2c.read_pieces(path)
    with pytest.raises(ValueError, match="the vocabulary has no bytes"):
        llama2c.Pieces([b"a"], [0.0]).tokenizer()


BYTES = [f"<0x{byte:02X}>".encode() for byte in range(256)]
LETTERS = [b" ", b"a", b"b", b"c", "é".encode()]
MERGED = [b" a", b"bc", b" abc", b"ab", b"ca", "aé".encode(), b"abc", b"cab", b"aa", b"\n"]
PIECES = llama2c.Pieces(
    [b"<unk>", b"\n<s>\n", b"\n</s>\n", *BYTES, *MERGED, *LETTERS],
    [0.0] * 259 + [-float(i) for i in range(len(MERGED) + len(LETTERS))],
)


def encoded(text: str) -> list[int]:
    """What llama2.c makes of a text: a space before it, characters or their bytes, the best pair put together."""
    numbers = {piece: number for number, piece in reversed(list(enumerate(PIECES.pieces)))}
    tokens: list[int] = []
    for character in (" " + text if text else "").encode("utf-8", "surrogatepass").decode("utf-8", "replace"):
        piece = character.encode()
        tokens += [numbers[piece]] if piece in numbers else [byte + 3 for byte in piece]
    while True:
        pairs = [PIECES.pieces[a] + PIECES.pieces[b] for a, b in pairwise(tokens)]
        known = [(-PIECES.scores[numbers[pair]], place) for place, pair in enumerate(pairs) if pair in numbers]
        if not known:
            return tokens
        _, place = min(known)
        tokens[place : place + 2] = [numbers[pairs[place]]]


@given(st.text(st.sampled_from("abcé \n<x漢😀"), max_size=24))
def test_the_tokenizer_is_that_of_llama2c(text: str) -> None:
    tokenizer = PIECES.tokenizer()
    ids = tokenizer.encode(text).ids
    assert ids == encoded(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
