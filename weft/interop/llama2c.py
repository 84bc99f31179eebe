"""Files of llama2.c: a Llama as seven numbers and its parameters, and the vocabulary beside it.

    model        version 0: dim, ffn_dim, num_layers, num_heads, num_kv_heads, vocab_size and max_len as int32, where a
                 negative vocab_size says that the output layer is not tied; then fp32 without names: the embeddings,
                 each kind of parameter for all layers, the last norm, cosines and sines, the output layer
    vocabulary   the longest piece's length as int32; of each piece its score as fp32, its length as int32, its bytes

llama2.c turns neighbouring entries of a head by one angle, weft entries half a head apart: queries' and keys' rows
change places on the way. The cosines and sines follow from the sizes; they are written, and skipped when read.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, normalizers
from torch import Tensor

from weft.config import GPTConfig
from weft.interop.huggingface import Weights, check_tensors, implied, require
from weft.interop.tensor_files import short
from weft.interop.vocabularies import Vocabulary
from weft.layers.relative import Rotary

_HEADER = struct.Struct("<7i")
_LATER = 0x616B3432  # how versions 1 and 2 begin
_PIECE = struct.Struct("<fi")
_UNK, _BOS, _EOS, _BYTES = range(4)  # the first pieces: three specials, and that of byte 0
_EPS, _BASE = 1e-5, 10_000.0  # llama2.c knows no other


def read(path: str | os.PathLike[str]) -> Weights:
    """The model of a file, for ``GPT(config, vocab_size).load_state_dict(tensors)``.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is no model of version 0, or its size is not the one that its header asks for.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise ValueError(f"{path} has {size} bytes: a model of llama2.c begins with {_HEADER.size}")
        config, vocab_size = _config(path, head)
        if config.num_layers * config.dim * 4 > size:  # or else a forged number would keep us listing
            raise ValueError(f"{path} has {size} bytes, too few for {config.num_layers} layers")
        shapes = _shapes(config, vocab_size)
        expected = _HEADER.size + 4 * sum(map(math.prod, shapes.values()))
        if size != expected:
            raise ValueError(f"{path} has {size} bytes, but its header asks for {expected}: damaged, or no llama2.c")
        tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            numbers = np.fromfile(file, dtype="<f4", count=math.prod(shape))
            if numbers.size < math.prod(shape):  # the file became shorter
                raise ValueError(f"{path} ends in the middle of {name!r}")
            if name not in _TABLES:
                tensors[name] = torch.from_numpy(numbers.astype(np.float32, copy=False)).view(shape)
    return Weights(config, {name: _turned(name, tensors[name], config, _to_halves) for name in tensors}, vocab_size)


def write(path: str | os.PathLike[str], config: GPTConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a model for llama2.c, which has no place for other options than those of its Llama.

    Args:
        path: the file; one that is there is replaced when the new one is complete.
        config: of the model.
        tensors: its parameters, ``model.state_dict()``.

    Raises:
        ValueError: if llama2.c does not compute this model, or the tensors are not those of the configuration.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    plain = {"bias": False, "attention_bias": False, "rope_base": _BASE, "rope_scaling": None, "norm_eps": _EPS}
    sizes = {"head_dim": config.dim // config.num_heads}
    require(config, "llama2.c", positions="rotary", norm="rms", activation="swiglu", **plain, **sizes)
    vocab_size = len(tensors["embedding"]) if "embedding" in tensors else 1
    shapes = _shapes(config, vocab_size)
    check_tensors(tensors, {name: shape for name, shape in shapes.items() if name not in _TABLES})
    cos, sin = Rotary(implied(config)["head_dim"], _BASE).angles(torch.arange(config.max_len), torch.float32)
    whole = {**tensors, _TABLES[0]: cos, _TABLES[1]: sin}
    head = _HEADER.pack(
        config.dim,
        config.ffn_dim,
        config.num_layers,
        config.num_heads,
        implied(config)["num_kv_heads"],
        vocab_size if config.tie else -vocab_size,
        config.max_len,
    )
    aside = path.with_name(f".{path.name}.part")
    try:
        with aside.open("wb") as file:
            file.write(head)
            for name in shapes:
                tensor = _turned(name, whole[name].detach().to("cpu", torch.float32), config, _to_neighbours)
                file.write(tensor.contiguous().numpy().astype("<f4", copy=False).tobytes())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


class Pieces(NamedTuple):
    """A vocabulary of llama2.c: the pieces of text by their numbers, and how early each is put together.

    Pieces 0, 1 and 2 are unknown, BOS and EOS, pieces 3 to 258 the bytes. A space is a space in a piece, and a text is
    encoded with one before it.
    """

    pieces: list[bytes]
    scores: list[float]

    def tokenizer(self) -> Tokenizer:
        """The same as a tokenizer of the tokenizers library, with the file's own numbers, without BOS and EOS.

        Like llama2.c it puts those two neighbours together that make the piece with the highest score. Where two
        ways to make one piece overlap (a + aa + a), the library may take the second of them.

        Raises:
            ValueError: if the pieces are not those of a vocabulary with bytes.
        """
        texts = [piece.decode("utf-8", "replace") for piece in self.pieces]
        if texts[_BYTES : _BYTES + 256] != [f"<0x{byte:02X}>" for byte in range(256)]:
            raise ValueError("the vocabulary has no bytes: expected <0x00> … <0xFF> as pieces 3 to 258")
        numbers = {text: number for number, text in reversed(list(enumerate(texts)))}  # of equals, the first
        order = sorted(numbers.values(), key=lambda number: -self.scores[number])
        merges = [
            (text[:cut], text[cut:])
            for text in (texts[number] for number in order)
            for cut in range(1, len(text))
            if text[:cut] in numbers and text[cut:] in numbers
        ]
        found = Tokenizer(models.BPE(numbers, merges, unk_token=texts[0], byte_fallback=True))
        found.normalizer = normalizers.Prepend(" ")
        found.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        return found

    def vocabulary(self) -> Vocabulary:
        """The same with its specials, of which BOS opens every text."""
        rust = self.tokenizer()
        rust.add_special_tokens([rust.id_to_token(number) or "" for number in (_UNK, _BOS, _EOS)])
        return Vocabulary(rust, {"unk": _UNK, "bos": _BOS, "eos": _EOS}, opening=(_BOS,))


def read_pieces(path: str | os.PathLike[str]) -> Pieces:
    """The vocabulary of a file.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is damaged or no vocabulary of llama2.c.
    """
    data = Path(path).read_bytes()
    if len(data) < 4:
        raise ValueError(f"{path} has {len(data)} bytes: a vocabulary of llama2.c begins with 4")
    (longest,) = struct.unpack_from("<i", data)
    place, found = 4, Pieces([], [])
    while place < len(data):
        if place + _PIECE.size > len(data):
            raise ValueError(f"{path} ends in the middle of piece {len(found.pieces)}")
        score, length = _PIECE.unpack_from(data, place)
        place += _PIECE.size
        if not 0 <= length <= min(longest, len(data) - place) or not math.isfinite(score):
            raise ValueError(f"{path}: piece {len(found.pieces)} would have {length} bytes and score {score}: damaged")
        found.pieces.append(data[place : place + length])
        found.scores.append(score)
        place += length
    if not found.pieces:
        raise ValueError(f"{path} has no pieces")
    return found


def write_pieces(path: str | os.PathLike[str], pieces: Pieces) -> None:
    """Write a vocabulary for llama2.c."""
    parts = [struct.pack("<i", max(map(len, pieces.pieces), default=0))]
    for piece, score in zip(pieces.pieces, pieces.scores, strict=True):
        parts += [_PIECE.pack(score, len(piece)), piece]
    Path(path).write_bytes(b"".join(parts))


_TABLES = ("cosines", "sines")
_LAYERS = (  # the order in which the file has each kind of parameter, for all layers
    "around_attention.norm",
    "attention.query",
    "attention.key",
    "attention.value",
    "attention.output",
    "around_feed_forward.norm",
    "feed_forward.gate",
    "feed_forward.outer",
    "feed_forward.inner",
)


def _config(path: Path, head: bytes) -> tuple[GPTConfig, int]:
    dim, ffn_dim, num_layers, num_heads, num_kv_heads, vocab_size, max_len = _HEADER.unpack(head)
    if dim == _LATER:
        raise ValueError(f"{path} is of version {ffn_dim} of llama2.c's format: expected version 0, which has none")
    values = {
        "dim": dim,
        "ffn_dim": ffn_dim,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": None if num_kv_heads == num_heads else num_kv_heads,
        "max_len": max_len,
        "tie": vocab_size > 0,
    }
    fixed = {"positions": "rotary", "norm": "rms", "norm_eps": _EPS, "activation": "swiglu", "bias": False}
    try:
        config = GPTConfig.model_validate({**values, **fixed, "dropout": 0.0})
    except ValidationError as error:
        first = error.errors()[0]
        what = (
            first["ctx"]["error"] if first["type"] == "value_error" else f"{first['loc'][0]} = {short(first['input'])}"
        )
        raise ValueError(f"{path} is no model of llama2.c: {what}") from None
    if vocab_size == 0:
        raise ValueError(f"{path} is no model of llama2.c: vocab_size = 0")
    return config, abs(vocab_size)


def _shapes(config: GPTConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """What stands in the file behind the header, in this order, by weft's names."""
    dim, ffn_dim, head_dim = config.dim, config.ffn_dim, config.head_width
    keys = implied(config)["num_kv_heads"] * head_dim
    kinds: dict[str, tuple[int, ...]] = {
        "attention.query": (dim, dim),
        "attention.key": (keys, dim),
        "attention.value": (keys, dim),
        "attention.output": (dim, dim),
        "feed_forward.gate": (ffn_dim, dim),
        "feed_forward.outer": (dim, ffn_dim),
        "feed_forward.inner": (ffn_dim, dim),
    }
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocab_size, dim)}
    for kind in _LAYERS:
        shapes |= {f"blocks.{i}.{kind}.weight": kinds.get(kind, (dim,)) for i in range(config.num_layers)}
    shapes["norm.weight"] = (dim,)
    shapes |= dict.fromkeys(_TABLES, (config.max_len, head_dim // 2))
    return shapes if config.tie else {**shapes, "output_weight": (vocab_size, dim)}


def _to_halves(rows: Tensor) -> Tensor:
    """Rows [H, head_dim, D], of which neighbours turn together, so that those half a head apart do."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), 1)


def _to_neighbours(rows: Tensor) -> Tensor:
    """The way back."""
    return torch.stack(rows.chunk(2, 1), 2).flatten(1, 2)


def _turned(name: str, tensor: Tensor, config: GPTConfig, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A tensor, with the rows of each head in another order if it is a query's or a key's."""
    if not name.endswith(("attention.query.weight", "attention.key.weight")):
        return tensor
    return change(tensor.view(-1, config.head_width, config.dim)).reshape(tensor.shape)
