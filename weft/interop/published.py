"""A published language model, ready to run as it was published, with its own vocabulary.

published = read_published("SmolLM/")               # a folder of transformers: GPT-2 or Llama
published = read_published("stories260K.bin")       # a file of llama2.c, with tok512.bin or tokenizer.bin beside it
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft.config import GPTConfig, Recipe, Specials, TransformerConfig, nearest
from weft.data.tokenizers import TokenizerPair
from weft.interop import ctranslate2, huggingface, llama2c, marian
from weft.interop.handover import POSITIONS
from weft.interop.huggingface import CONFIG, Weights
from weft.interop.tensor_files import read_json
from weft.interop.vocabularies import Saved, Vocabulary, read_vocabulary, write_vocabulary
from weft.models import outline
from weft.models.gpt import GPT
from weft.models.transformer import Transformer

TRANSLATORS = ("transformers", "ctranslate2")  # what a translation model can be written for


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
        named = huggingface.special_tokens(path)
    else:
        weights = llama2c.read(path)
        vocabulary = llama2c.read_pieces(_pieces_beside(path, weights.vocab_size)).vocabulary()
        named = {}
    return Published(_model(weights, vocabulary, named), _recipe(path, weights), vocabulary)


def write_published(
    path: str | os.PathLike[str], model: GPT, config: GPTConfig, vocabulary: Saved, opening: Sequence[int] = ()
) -> str:
    """Write a model for others: a folder of transformers, or a file of llama2.c if the path ends with .bin.

    Args:
        path: a folder without a model, or a file.
        model: what to write.
        config: its configuration.
        vocabulary: written beside it as tokenizer.json; a file of llama2.c goes without.
        opening: the tokens that stand before every text.

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
    specials = model.specials
    ends = [number for number in specials.ends if number not in specials.never]
    special: dict[str, int | list[int]] = {"eos": ends[0] if len(ends) == 1 else ends} if ends else {}
    special |= {name: number for name, number in (("bos", specials.bos), ("pad", specials.pad)) if number >= 0}
    config, tensors = _with_biases(config, model.state_dict())
    huggingface.write(path, config, tensors, {"eos": [], **special})
    write_vocabulary(path, vocabulary, special, opening)
    return f"{path}: a folder of transformers"


def export_translator(
    model: nn.Module,
    recipe: Recipe,
    tokenizers: TokenizerPair,
    path: str | os.PathLike[str],
    to: str,
    samples: Sequence[str] = (),
    quantization: str = "none",
) -> str:
    """Write a translation model for others, once the program that is to run it has said what weft says.

    Args:
        model: a Transformer.
        recipe: what it was trained by.
        tokenizers: for the source and for the target.
        path: a folder that is not there yet.
        to: "transformers" or "ctranslate2"; see ``weft.interop.marian`` and ``weft.interop.ctranslate2``.
        samples: sentences on which both are compared; if none, some are made of the source's vocabulary.
        quantization: how CTranslate2 stores matrices: none, int8, int16, float16 or bfloat16.

    Returns:
        What was written and how it was checked, for people.

    Raises:
        ValueError: if such a format has no place for this model, or what was written does not say what weft says.
        ImportError: if a package is missing that the format needs.
        OSError: if the path is there already, or cannot be written.
    """
    if to not in TRANSLATORS:
        raise ValueError(f"to={to!r}: expected {' or '.join(TRANSLATORS)}{nearest(to, TRANSLATORS)}")
    config = recipe.model
    if not isinstance(config, TransformerConfig) or not isinstance(model, Transformer):
        raise ValueError(f"{to} has family = transformer, but the model has {config.family}")
    positions = max(POSITIONS, 8 * recipe.data.max_len)  # as long a text as a Translator takes
    if to == "ctranslate2":
        return ctranslate2.write(path, model, config, tokenizers, samples, quantization, positions)
    if quantization != "none":
        raise ValueError(f"quantization={quantization!r} is for ctranslate2: transformers has its own ways to quantise")
    return marian.write(path, model, config, tokenizers, samples, positions)


def _model(weights: Weights, vocabulary: Vocabulary, named: Mapping[str, tuple[int, ...]]) -> GPT:
    model = outline(weights.config, weights.vocab_size, weights.vocab_size)
    assert isinstance(model, GPT)
    model.load_state_dict(weights.tensors, assign=True)
    eos, *others = named.get("eos", (-1 if vocabulary.eos is None else vocabulary.eos,)) or (-1,)
    (bos,) = named.get("bos", (eos if vocabulary.bos is None else vocabulary.bos,))[:1]
    beyond = tuple(range(vocabulary.vocab_size, weights.vocab_size))  # rows that only round the size up
    model.specials = Specials(pad=-1, bos=bos, eos=eos, never=beyond, others=tuple(others))
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
