"""The model folder: all that a trained model needs; and the names of the models that come with weft.

    model.safetensors   the parameters
    config.json         the recipe, resolved; the sizes of the vocabularies; the format's number
    tokenizer.json      text to tokens and back (tokenizer.source.json and tokenizer.target.json where there are two)
    languages.json      of a model of several languages: how to tell them apart
    README.md           the card: data, licence, results, command

Reading never unpickles and runs no code from the folder. Names, shapes and types in the file's header are compared
with a model that was built without memory before anything is allocated.

Writing, whenever it is cut short, leaves the old model or the new one, never a mix. All files are written aside into
a hidden folder, which is then renamed: at that instant the folder becomes the new model. Then its files move up to
their places; a reader finds those that have not moved yet. A run folder can hold its final model beside its steps.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from safetensors.torch import save_file
from torch import nn

from weft import __version__
from weft.config import Recipe, nearest
from weft.data.tokenizers import JOINT, LANGUAGES, SIDES, TokenizerPair
from weft.models import narrow, outline
from weft.models.compiled import is_compiled
from weft.models.narrow import SCALE

FORMAT = 1
WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
SHIPPED = Path(__file__).parent / "shipped"

_TEXT_FILES = (JOINT, *SIDES, LANGUAGES)
_ASIDE, _COMPLETE = ".model-being-written", ".model-complete"
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
_FLOATS = {"F64", "F32", "F16", "BF16"}  # what a parameter may be stored as; it is read into fp32, or kept narrow

Header = Mapping[str, tuple[list[int], str]]  # name -> shape and type of a stored tensor


class Parts(NamedTuple):
    """What a model folder holds: an nn.Module in evaluation mode, its recipe, and its tokenizers."""

    model: nn.Module
    recipe: Recipe
    tokenizers: TokenizerPair


def names() -> list[str]:
    """The names of the models that come with weft."""
    return sorted(path.name for path in SHIPPED.iterdir() if is_model(path)) if SHIPPED.is_dir() else []


def resolve(path_or_name: str | os.PathLike[str]) -> Path:
    """The folder of a model, given its path or the name of one that comes with weft. A path to a model goes first.

    Raises:
        OSError: if there is no such folder, with the nearest name; or if there is, without a model in it.
    """
    path, known = Path(path_or_name), names()
    if path.is_dir() and (_file(path, CONFIG).is_file() or _is_run(path) or str(path_or_name) not in known):
        if not _file(path, CONFIG).is_file():
            raise FileNotFoundError(_why_no_model(path))
        return path
    if str(path_or_name) in known:
        return SHIPPED / path_or_name
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file: a model is the folder that holds {WEIGHTS} and {CONFIG}")
    beside = [str(path.parent / other.name) for other in _folders(path.parent)]
    come = f"of those that come with weft ({', '.join(known)})" if known else "of those that come with weft (none yet)"
    hint = nearest(str(path_or_name), [*known, *beside, *(Path(other).name for other in beside)])
    raise FileNotFoundError(f"no model {str(path_or_name)!r}: neither a folder nor one {come}{hint}")


def is_model(folder: Path) -> bool:
    """Whether a folder holds a model of weft's."""
    try:
        _config(folder)
    except (OSError, ValueError):
        return False
    return True


def recipe(path_or_name: str | os.PathLike[str]) -> Recipe:
    """The recipe of a model folder.

    Raises:
        OSError: if there is no such folder.
        ValueError: if the configuration is damaged.
    """
    folder = resolve(path_or_name)
    return _recipe(folder, _config(folder))


def read(path_or_name: str | os.PathLike[str], wide: bool = False) -> Parts:
    """The model, the recipe and the tokenizers of a model folder.

    Matrices that are stored in bf16 or int8 stay as they are where compiled code multiplies them so; else, or if
    wide, all parameters become fp32.

    Raises:
        OSError: if there is no such folder or one of its files is missing.
        ValueError: if a file is damaged or does not fit the others. One line, which names the file.
    """
    folder = resolve(path_or_name)
    config = _config(folder)
    recipe = _recipe(folder, config)
    tokenizers = _tokenizers(folder, config)
    path = _present(folder, WEIGHTS)
    try:
        with safetensors.safe_open(path, framework="pt") as file:  # reads the header only
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            found = {name: (list(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
            model = _unfilled(path, recipe, tokenizers, found)
            # Copies: get_tensor maps the file, which may change.
            tensors = {name: file.get_tensor(name).clone() for name in found}
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short: {error}") from None
    narrow.fill(model, tensors, keep=not wide and is_compiled(model))
    assert not any(tensor.is_meta for tensor in model.buffers()), "a buffer that is not stored must be made when called"
    return Parts(model.eval(), recipe, tokenizers)


def card_of(path_or_name: str | os.PathLike[str]) -> str:
    """The card of a model folder; empty if it has none.

    Raises:
        OSError: if there is no such folder.
    """
    path = _file(resolve(path_or_name), CARD)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def describe(path_or_name: str | os.PathLike[str]) -> dict[str, Any]:
    """A model folder for a list: name, what the model does, megabytes of parameters, path.

    Raises:
        OSError: if there is no such folder, or its parameters are missing.
        ValueError: if the configuration is damaged.
    """
    folder = resolve(path_or_name)
    return {
        "name": folder.name,
        "does": _does(recipe(folder)),
        "megabytes": round(size(folder) / 1e6, 1),
        "path": str(folder),
    }


def size(path_or_name: str | os.PathLike[str]) -> int:
    """How many bytes the parameters of a model folder take.

    Raises:
        OSError: if there is no such folder, or they are missing.
    """
    return _present(resolve(path_or_name), WEIGHTS).stat().st_size


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    recipe: Recipe,
    tokenizers: TokenizerPair,
    card: str,
    stored: str = "fp32",
) -> None:
    """Write a model folder, new or over an older one. Cut short at any instant, it holds the one or the other.

    Args:
        folder: one that is not there, is empty, holds a model or is a run folder.
        model: what ``weft.models.build`` made from the recipe.
        recipe: the resolved recipe.
        tokenizers: those that the model was trained with.
        card: the text of README.md; see ``card``.
        stored: "fp32"; "bf16" for half the size at 3 digits; or "int8" for a quarter: the matrices of linear layers and
            of embeddings, each row with a scale.

    Raises:
        ValueError: if the folder holds something else.
        OSError: if it cannot be written.
    """
    if stored not in STORED:
        raise ValueError(f"stored must be one of {', '.join(STORED)}, not {stored!r}")
    folder = Path(folder)
    _check_room(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _move_up(folder)  # what an earlier writer may have left
    aside = folder / _ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    tensors = narrow.state(model, STORED[stored])
    save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
    tokenizers.save(aside)
    (aside / CARD).write_text(card, encoding="utf-8")
    config = {
        "weft": __version__,
        "format": FORMAT,
        "files": sorted(path.name for path in aside.iterdir()),
        "vocab": {"source": tokenizers.source.vocab_size, "target": tokenizers.target.vocab_size},
        "recipe": recipe.tree(),
    }
    (aside / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.copymode(aside / CONFIG, aside / WEIGHTS)  # safetensors lets nobody else read it
    for path in (*aside.iterdir(), aside):
        _sync(path)
    aside.rename(folder / _COMPLETE)
    _sync(folder)
    _move_up(folder)


def card(
    recipe: Recipe, parameters: int, results: Mapping[str, str | float], command: str = "", licence: str = ""
) -> str:
    """The card of a model, in Markdown.

    Args:
        recipe: what it was made by.
        parameters: how many it has.
        results: what was measured, and what came out.
        command: what made it, as one types it.
        licence: of the data, and so of what may be done with the model.
    """
    data, model, does = recipe.data, recipe.model, _does(recipe)
    corpus = data.train if isinstance(data.train, str) else ", ".join(data.train)
    size = f"{parameters / 1e6:.1f} M" if parameters >= 100_000 else f"{parameters:,}"
    parts = [
        f"# {recipe.name or f'A {recipe.task} model'}",
        f"{does[:1].upper()}{does[1:]}. Family: {model.family}, {size} parameters. Made with weft {__version__}.",
        *([recipe.note] if recipe.note else []),
        f"## Data\n\n{corpus or 'Not named.'}" + (f"\n\nLicence: {licence}" if licence else ""),
    ]
    if results:
        rows = "\n".join(f"| {name} | {_figure(value)} |" for name, value in results.items())
        parts.append(f"## Results\n\n| what | figure |\n|---|---|\n{rows}")
    if command:
        parts.append(f"## Command\n\n```sh\n{command}\n```")
    return "\n\n".join(parts) + "\n"


def _does(recipe: Recipe) -> str:
    """What a model of this recipe does."""
    data, model = recipe.data, recipe.model
    if model.family == "gpt":
        return f"goes on with a text, of which it sees the last {model.max_len:,} tokens"
    if data.languages:
        return f"translates between {', '.join(data.languages)}, each to each"
    return "translates from {} to {}".format(*data.direction) if all(data.direction) else "translates text"


def _figure(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _unfilled(path: Path, recipe: Recipe, tokenizers: TokenizerPair, found: Header) -> nn.Module:
    """The model of the recipe, without memory, once it is known that the file fits it."""
    layers = max((value for key, value in recipe.model if key.endswith("_layers")), default=0)
    if layers > len(found):  # or else a forged number would keep us building
        raise ValueError(f"{path} has {len(found)} tensors, too few for the {layers} layers of {CONFIG}")
    model = outline(recipe.model, tokenizers.source.vocab_size, tokenizers.target.vocab_size)
    expected, matrices = model.state_dict(), narrow.matrices(model)
    for name, tensor in expected.items():
        if name not in found:
            raise ValueError(f"{path} has no tensor {name!r}{nearest(name, found.keys() - expected.keys())}")
        shape, dtype = found[name]
        if shape != list(tensor.shape):
            raise ValueError(f"{path}: {name!r} has shape {shape}, but {CONFIG} asks for {list(tensor.shape)}")
        if name in matrices and dtype == "I8":
            scales = found.get(name + SCALE)
            if scales != (shape[:1], "F32"):
                raise ValueError(
                    f"{path}: {name!r} is int8 and needs {name + SCALE!r}, {shape[:1]} of F32, not {scales}"
                )
        elif (dtype in _FLOATS) != tensor.is_floating_point():
            raise ValueError(f"{path}: {name!r} is stored as {dtype}, but the model has it as {tensor.dtype}")
    for name in found:
        if narrow.is_scale(name, matrices) and found[name.removesuffix(SCALE)][1] == "I8":
            continue
        if name not in expected:
            raise ValueError(f"{path} has a tensor {name!r} that the model has not{nearest(name, expected)}")
    return model


def _config(folder: Path) -> dict[str, Any]:
    path = _present(folder, CONFIG)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict) or "weft" not in config:
        raise ValueError(f"{path} is not a model's of weft: it has no 'weft' key")
    if config.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {config.get('format')!r}, written by weft {config['weft']}, but this is weft "
            f"{__version__}, which reads format {FORMAT}"
        )
    return config


def _recipe(folder: Path, config: Mapping[str, Any]) -> Recipe:
    path, tree = _file(folder, CONFIG), config.get("recipe")
    if not isinstance(tree, dict):
        raise ValueError(f"{path} has no recipe")
    try:
        return Recipe.make(tree)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _tokenizers(folder: Path, config: Mapping[str, Any]) -> TokenizerPair:
    """The tokenizers that the configuration lists, of the sizes that it gives."""
    listed = config.get("files")
    if not isinstance(listed, list) or not (JOINT in listed or set(SIDES) <= set(map(str, listed))):
        raise ValueError(f"{folder}/{CONFIG}: 'files' must list {JOINT} or {' and '.join(SIDES)}, not {listed!r}")
    pair = TokenizerPair.read({name: _present(folder, name) for name in _TEXT_FILES if name in listed})
    sizes = {"source": pair.source.vocab_size, "target": pair.target.vocab_size}
    if config.get("vocab") != sizes:
        raise ValueError(
            f"{folder}: the tokenizers have {sizes['source']} and {sizes['target']} tokens, but {CONFIG} says "
            f"{config.get('vocab')!r}"
        )
    return pair


def _file(folder: Path, name: str) -> Path:
    """Where a file of the model is: in its place, or still where the writer made it."""
    written = folder / _COMPLETE / name
    return written if written.is_file() else folder / name


def _present(folder: Path, name: str) -> Path:
    path = _file(folder, name)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {name}, which a model folder needs")
    return path


def _move_up(folder: Path) -> None:
    """Bring the files of a complete model up to their places; the configuration last, for it lists the others."""
    complete = folder / _COMPLETE
    if not complete.is_dir():
        return
    if (complete / CONFIG).is_file():
        files = _config(folder)["files"]
        for name in set(_TEXT_FILES) - set(files):  # the model before may have had others
            (folder / name).unlink(missing_ok=True)
        for name in (*files, CONFIG):
            if (complete / name).is_file():
                os.replace(complete / name, folder / name)
        _sync(folder)
    complete.rmdir()
    _sync(folder)


def _check_room(folder: Path) -> None:
    if not folder.exists() or is_model(folder) or _is_run(folder):
        return
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file: a model is written into a folder")
    if others := [path.name for path in folder.iterdir() if path.name != _ASIDE]:
        raise ValueError(f"{folder} holds something else than a model ({sorted(others)[0]}): choose another folder")


def _is_run(folder: Path) -> bool:
    return (folder / "latest").is_file()


def _why_no_model(folder: Path) -> str:
    if _is_run(folder):
        last = (folder / "latest").read_text(encoding="utf-8", errors="replace").strip()
        return (
            f"{folder} is a run that has not ended (saved up to {last}): go on with it by the same `weft train` command"
        )
    inside = [path.name for path in _folders(folder) if (path / CONFIG).is_file()]
    hint = f"; did you mean {str(folder / sorted(inside)[0])!r}?" if inside else ""
    return f"{folder} has no {CONFIG}, so it is no model folder{hint}"


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def _sync(path: Path) -> None:
    """Have what was written survive a power cut."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
