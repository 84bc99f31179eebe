"""A published language model, ready to run as it was published, with its own vocabulary.

published = read_published("SmolLM/")               # a folder of transformers: GPT-2 or Llama
published = read_published("stories260K.bin")       # a file of llama2.c, with tok512.bin or tokenizer.bin beside it
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from weft.config import GPTConfig, Recipe, Specials
from weft.interop import huggingface, llama2c
from weft.interop.huggingface import CONFIG, Weights
from weft.interop.tensor_files import read_json
from weft.interop.vocabularies import Vocabulary, read_vocabulary
from weft.models import outline
from weft.models.gpt import GPT


class Published(NamedTuple):
    """A model in evaluation mode, a recipe that describes it, and its vocabulary."""

    model: GPT
    recipe: Recipe
    vocabulary: Vocabulary


def is_published(path: str | os.PathLike[str]) -> bool:
    """Whether this is a file, or a folder with a configuration that is not weft's own."""
    path = Path(path)
    if path.is_dir():
        try:
            tree = read_json(path / CONFIG)
        except (OSError, ValueError):
            return False
        return "weft" not in tree and "model_type" in tree
    return path.is_file() and path.suffix == ".bin"


def read_published(path: str | os.PathLike[str]) -> Published:
    """The model of a folder of transformers or of a file of llama2.c, with the vocabulary that is there too.

    Raises:
        OSError: if a file is missing.
        ValueError: if a file is damaged, files do not fit each other, or the model is one that weft does not compute.
    """
    path = Path(path)
    if path.is_dir():
        weights, vocabulary = huggingface.read(path), read_vocabulary(path)
        roles = {name: numbers[0] for name, numbers in huggingface.special_tokens(path).items()}
    else:
        weights = llama2c.read(path)
        vocabulary = llama2c.read_pieces(_pieces_beside(path, weights.vocab_size)).vocabulary()
        roles = {}
    return Published(_model(path, weights, vocabulary, roles), _recipe(path, weights), vocabulary)


def write_published(path: str | os.PathLike[str], model: GPT, config: GPTConfig, vocabulary: Saved) -> str:
    """Write a model for others: a folder of transformers, or a file of llama2.c if the path ends with .bin.

    Args:
        path: a folder without a model, or a file.
        model: what to write.
        config: its configuration.
        vocabulary: written beside it as tokenizer.json; a file of llama2.c goes without.

    Returns:
        What was written, for people.

    Raises:
        ValueError: if such a format has no place for this model.
        OSError: if it cannot be written.
    """
    path = Path(path)
    if path.suffix == ".bin":
        llama2c.write(path, config, model.state_dict())
        return f"{path}: a model of llama2.c; it needs the vocabulary that the model was published with beside it"
    pad, bos, eos, _ = model.specials
    special = {name: number for name, number in (("bos", bos), ("eos", eos), ("pad", pad)) if number >= 0}
    config, tensors = _with_biases(config, model.state_dict())
    huggingface.write(path, config, tensors, special)
    vocabulary.save(path / "tokenizer.json")
    return f"{path}: a folder of transformers"


class Saved(Protocol):
    """What is asked of a vocabulary that is written."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json."""


def _model(path: Path, weights: Weights, vocabulary: Vocabulary, roles: dict[str, int]) -> GPT:
    if vocabulary.vocab_size > weights.vocab_size:
        raise ValueError(
            f"{path}: the vocabulary has {vocabulary.vocab_size:,} tokens, but the model only {weights.vocab_size:,}"
        )
    model = outline(weights.config, weights.vocab_size, weights.vocab_size)
    assert isinstance(model, GPT)
    model.load_state_dict(weights.tensors, assign=True)
    eos = roles.get("eos", vocabulary.eos)
    bos = roles.get("bos", vocabulary.bos)
    eos = -1 if eos is None else eos
    beyond = tuple(range(vocabulary.vocab_size, weights.vocab_size))  # rows that only round the size up
    model.specials = Specials(pad=-1, bos=eos if bos is None else bos, eos=eos, never=beyond)
    return model.eval()


def _with_biases(config: GPTConfig, tensors: dict[str, Tensor]) -> tuple[GPTConfig, dict[str, Tensor]]:
    """The same model with biases of 0 where it has none, if it is like a GPT-2, which has them all."""
    if config.positions != "learned":
        return config, tensors
    whole = config.model_copy(update={"bias": True, "attention_bias": None})
    size = len(tensors["embedding"])
    zeros = {name: torch.zeros(tensor.shape) for name, tensor in outline(whole, size, size).state_dict().items()}
    missing = {name: zero for name, zero in zeros.items() if name.endswith("bias")}
    return whole, {**missing, **tensors}


def _recipe(path: Path, weights: Weights) -> Recipe:
    return Recipe.make({"task": "language", "name": path.stem, "model": weights.config.model_dump(exclude_none=True)})


def _pieces_beside(path: Path, vocab_size: int) -> Path:
    names = (f"tok{vocab_size}.bin", "tokenizer.bin")
    for name in names:
        if (path.parent / name).is_file():
            return path.parent / name
    raise FileNotFoundError(f"{path}: its vocabulary must stand beside it as {' or '.join(names)}")
