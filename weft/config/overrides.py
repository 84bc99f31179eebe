"""Dotted keys: what an override's text means, and what an error says. This file imports no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from weft.config.sections import MODELS, Section

Types = Mapping[str, Any]  # dotted keys and the types of their values


def nearest(given: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the nearest of the names, or nothing if none is near."""
    near = get_close_matches(given, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def split(override: str) -> tuple[str, str]:
    """An override's key and the text of its value."""
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key:
        raise ValueError(f"an override is key=value, such as training.steps=2000, not {override!r}")
    return key, text


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set what a dotted key names."""
    *path, last = key.split(".")
    for name in path:
        tree = tree.setdefault(name, {})
    tree[last] = value


def field(key: str, known: Types) -> Any:
    """The type of the value that a dotted key names."""
    if key not in known:
        sections = {name.partition(".")[0] for name in known if "." in name}
        if key in sections:
            raise ValueError(f"{key!r} is a section: expected one of its keys, such as {_first(known, key)!r}")
        bare = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = f"; did you mean {bare[0]!r}?" if bare else nearest(key, known)
        raise ValueError(f"unknown key {key!r}{hint}")
    return known[key]


def _first(known: Iterable[str], section: str) -> str:
    return next(name for name in known if name.startswith(section + "."))


def types(recipe: type[BaseModel], tree: Mapping[str, Any]) -> dict[str, Any]:
    """All dotted keys of a recipe with the model family of this tree, and the types of their values."""
    model = tree.get("model", {})
    family = model.get("family", "transformer") if isinstance(model, Mapping) else "transformer"
    known: dict[str, Any] = {}
    for name, info in recipe.model_fields.items():
        if name == "model":
            known |= _keys(name, MODELS.get(family if isinstance(family, str) else "", MODELS["transformer"]))
        elif isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            known |= _keys(name, info.annotation)
        else:
            known[name] = _annotation(info)
    return known | {"model.family": Literal[tuple(MODELS)]}


def _keys(section: str, kind: type[BaseModel]) -> dict[str, Any]:
    """The dotted keys of a section and of the sections inside it, and the types of their values."""
    known: dict[str, Any] = {}
    for name, info in kind.model_fields.items():
        inside = [part for part in get_args(info.annotation) if isinstance(part, type) and issubclass(part, Section)]
        known |= _keys(f"{section}.{name}", inside[0]) if inside else {f"{section}.{name}": _annotation(info)}
    return known


def _annotation(info: Any) -> Any:
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def typed(kind: Any, key: str, text: str) -> Any:
    """The text of an override as a value of this type."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    choices = get_args(bare) if isinstance(bare, UnionType) or get_origin(bare) is Union else (bare,)
    if list[str] in choices and text.startswith("["):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            raise ValueError(f'{key} must be a list such as ["a.en", "a.de"], not {text!r}') from None
    if str in choices:
        return text
    if type(None) in choices and text in ("", "none"):
        return None
    try:
        return TypeAdapter(kind).validate_strings(text)
    except ValidationError as error:
        raise ValueError(f"{key} {_expected(error.errors()[0])}, not {text!r}") from None


def explain(error: ErrorDetails, known: Types) -> str:
    """One line for what pydantic finds wrong in a recipe with these keys."""
    path = [str(part) for part in error["loc"] if part not in MODELS or error["loc"].index(part) != 1]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        sections = {name.partition(".")[0] for name in known}
        return f"unknown key {key!r}{nearest(key, [*known, *sections])}"
    if error["type"] == "union_tag_invalid":
        given = str(error["input"].get("family"))
        return f"model.family must be one of {', '.join(MODELS)}, not {given!r}{nearest(given, MODELS)}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}".removeprefix(": ")
    if key.endswith((".str", ".list[str]")):
        key = key.rpartition(".")[0]
        return f"{key} must be a text or a list of two, not {error['input']!r}"
    return f"{key} {_expected(error)}, not {error['input']!r}"


def _expected(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Input ")
    if error["type"] == "literal_error":
        return f"must be one of {error['ctx']['expected'].replace(' or ', ', ')}".replace("'", "")
    return message.replace("should be", "must be").split(", unable")[0]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a tree by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
