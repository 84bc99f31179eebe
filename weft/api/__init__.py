"""What ``weft.load`` returns: a model, its tokenizers and the searches as one thing that takes text and gives text.

model = weft.load("runs/en-de")
found = model.translate("a man sleeps")      # or a list: then a list comes back, in the same order
found.text, found.score, found.attention

model = weft.load("runs/shakespeare")        # or a published GPT-2 or Llama, as it was published
model.generate("O Romeo, ", n=3, temperature=0.8).text
"""

from __future__ import annotations

import os
from typing import Any, Literal, cast

import torch

from weft import folder
from weft.api.language_model import LanguageModel
from weft.api.language_model import Options as GenerateOptions
from weft.api.look import Look
from weft.api.results import Alignment, Candidate, Choice, Continuation, Translation
from weft.api.search import Search
from weft.api.translator import WINDOW, Options, Translator
from weft.interop.published import is_published, read_published
from weft.kernels.machine import bf16_products, remember_few_products
from weft.models.compiled import is_compiled
from weft.models.contract import Seq2Seq
from weft.observe import Record

__all__ = [
    "WINDOW",
    "Alignment",
    "Candidate",
    "Choice",
    "Continuation",
    "GenerateOptions",
    "LanguageModel",
    "Look",
    "Options",
    "Precision",
    "Search",
    "Translation",
    "Translator",
    "convert",
    "load",
    "load_language_model",
    "load_translator",
    "look",
    "task_of",
]

Precision = Literal["auto", "fp32", "bf16"]


def load(
    path_or_name: str | os.PathLike[str], precision: Precision = "auto", threads: int | None = None
) -> Translator | LanguageModel:
    """A model that is ready to translate or to generate.

    Args:
        path_or_name: a model folder, or the name of a model that comes with weft; or a published GPT-2 or Llama: a
            folder of transformers, or a file of llama2.c.
        precision: of activations and products; auto is fp32 where a model's steps are compiled (kernels/native), else
            bf16 where the CPU multiplies it fast.
        threads: how many torch uses from now on, in the whole process; as before if None.

    Raises:
        OSError: if there is no such model, or a file of it is missing.
        ValueError: if a file is damaged, or there is no such precision.
    """
    if precision not in ("auto", "fp32", "bf16"):
        raise ValueError(f"precision must be one of auto, fp32, bf16, not {precision!r}")
    if threads is not None:
        if threads < 1:
            raise ValueError(f"threads must be ≥ 1, not {threads}")
        torch.set_num_threads(threads)
    made = _opened(path_or_name)
    remember_few_products()
    bf16 = precision == "bf16" or (precision == "auto" and bf16_products() and not is_compiled(made.model))
    cast(Seq2Seq, made.model).precision = torch.bfloat16 if bf16 else torch.float32
    return made


def load_translator(path_or_name: str | os.PathLike[str], precision: Precision = "auto") -> Translator:
    """``load`` for what must be a translator.

    Raises:
        ValueError: if it is something else; and as ``load``.
    """
    found = load(path_or_name, precision)
    if not isinstance(found, Translator):
        raise ValueError(f"{os.fspath(path_or_name)} is a language model, which generates and does not translate")
    return found


def load_language_model(path_or_name: str | os.PathLike[str], precision: Precision = "auto") -> LanguageModel:
    """``load`` for what must be a language model.

    Raises:
        ValueError: if it is something else; and as ``load``.
    """
    found = load(path_or_name, precision)
    if not isinstance(found, LanguageModel):
        raise ValueError(f"{os.fspath(path_or_name)} is a translator, which translates and does not generate")
    return found


def look(
    path_or_name: str | os.PathLike[str],
    text: str | None = None,
    target: str | None = None,
    precision: Precision = "auto",
    **options: Any,
) -> Look:
    """Everything that a model looks at while it answers a text; or what a saved record holds.

    Args:
        path_or_name: a model as in ``load``; or without a text a file that ``Record.save`` wrote.
        text: what to translate, or to go on from.
        target: a translation to look at instead of the model's own.
        precision: as in ``load``.
        options: of the search; see ``Translator.look`` and ``LanguageModel.look``.

    Raises:
        OSError: if there is no such model or file.
        ValueError: if a file is damaged, or something does not go together.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if text is None:
        if os.path.isdir(path_or_name) or os.fspath(path_or_name) in folder.names():
            raise ValueError(f"{os.fspath(path_or_name)} is a model: give it a text to look at")
        if target is not None or given:
            raise ValueError(f"{', '.join(given) or 'target'}: a saved record is looked at as it is")
        return Look(Record.load(path_or_name))
    model = load(path_or_name, precision)
    if isinstance(model, Translator):
        if "max_tokens" in given:
            raise ValueError("max_tokens is for language models: a translation ends by itself")
        return model.look(text, target, **cast(Options, given))
    if target is not None or "to" in given:
        raise ValueError(f"{os.fspath(path_or_name)} is a language model, which goes on from a text and has no target")
    return model.look(text, **cast(GenerateOptions, given))


def convert(
    path_or_name: str | os.PathLike[str],
    path: str | os.PathLike[str],
    to: str,
    quantization: str = "none",
    weights: str = "fp32",
) -> str:
    """Write a model in the format of others, or in weft's own with weights of fewer bits.

    Args:
        path_or_name: a model as in ``load``.
        path: where to.
        to: "weft", or what ``Translator.export`` and ``LanguageModel.export`` write.
        quantization: as in ``Translator.export``.
        weights: for weft: fp32, bf16 or int8; see ``weft.folder.save``.

    Returns:
        What was written, for people.

    Raises:
        OSError, ValueError, ImportError: as these do.
    """
    if to == "weft":
        if quantization != "none":
            raise ValueError("quantization is for CTranslate2; for models of weft's own there is weights")
        return _stored(path_or_name, path, weights)
    if weights != "fp32":
        raise ValueError(f"weights={weights!r} is for models of weft's own; for CTranslate2 there is quantization")
    model = _opened(path_or_name, wide=True)
    if isinstance(model, Translator):
        return model.export(path, to, quantization=quantization)
    if to != "transformers" or quantization != "none":
        raise ValueError("a language model is written for transformers, or to a .bin of llama2.c, in fp32")
    return model.export(path)


def task_of(path_or_name: str | os.PathLike[str]) -> str:
    """What a model is for, "translation" or "language", by its configuration alone.

    Raises:
        OSError: if there is no such model.
        ValueError: if its configuration is damaged.
    """
    return "language" if is_published(path_or_name) else folder.recipe(path_or_name).task


def _stored(path_or_name: str | os.PathLike[str], path: str | os.PathLike[str], weights: str) -> str:
    if is_published(path_or_name):
        raise ValueError(f"{os.fspath(path_or_name)} is no model of weft's own: only these are stored in fewer bits")
    if os.path.exists(path):
        raise FileExistsError(f"{os.fspath(path)} is there already: choose another folder")
    parts, card = folder.read(path_or_name, wide=True), folder.card_of(path_or_name)
    folder.save(path, *parts, card, weights)
    before, after = (folder.size(place) / 1e6 for place in (path_or_name, path))
    return f"{os.fspath(path)}: the same model with weights in {weights}, {after:.1f} MB (it had {before:.1f} MB)"


def _opened(path_or_name: str | os.PathLike[str], wide: bool = False) -> Translator | LanguageModel:
    if is_published(path_or_name):
        published = read_published(path_or_name)
        return LanguageModel(*published, published.vocabulary.opening)
    model, recipe, tokenizers = folder.read(path_or_name, wide)
    if recipe.task == "language":
        return LanguageModel.trained(model, recipe, tokenizers.target)
    return Translator(model, recipe, tokenizers)
