"""Recipes: everything that decides what a training run does, typed and strict, in TOML.

A recipe is a tree of sections. It comes from a TOML file, a dictionary or the defaults, and is changed by dotted
overrides as the shell gives them::

    recipe = Recipe.read("my.toml", ["model.dim=128", "training.steps=2000"])
    recipe.write("resolved.toml")

An unknown key, a wrong type or a value out of range is a ValueError that names the key, what was given, and the
nearest key that there is. This room imports no torch.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import Field, ValidationError, model_validator

from weft.config.overrides import explain, field, flat, nearest, put, split, typed, types
from weft.config.sections import (
    BOS,
    EOS,
    MODELS,
    PAD,
    UNK,
    ConvolutionalConfig,
    DataConfig,
    DecodingConfig,
    GPTConfig,
    ModelConfig,
    RecurrentConfig,
    RopeScaling,
    Section,
    Specials,
    Tie,
    TokenizerConfig,
    TrainingConfig,
    TransformerConfig,
)

__all__ = [
    "BOS",
    "EOS",
    "PAD",
    "UNK",
    "ConvolutionalConfig",
    "DataConfig",
    "DecodingConfig",
    "GPTConfig",
    "ModelConfig",
    "Recipe",
    "RecurrentConfig",
    "RopeScaling",
    "Specials",
    "Tie",
    "TokenizerConfig",
    "TrainingConfig",
    "TransformerConfig",
    "find_recipe",
    "flat",
    "nearest",
    "recipe_names",
]

# What a recipe of each task starts from, where that is not the default of the sections.
TASKS: dict[str, dict[str, Any]] = {
    "translation": {},
    "language": {
        "model": {"family": "gpt"},
        "training": {
            "smoothing": 0.0,
            "bleu": False,
            "schedule": "cosine",
            "final_rate": 0.1,
            "beta2": 0.99,
            "weight_decay": 0.1,
            "samples": 1,
        },
        "decoding": {"beam": 1, "max_ratio": 0.0, "max_extra": 200, "length_penalty": 0.0, "sample": True},
    },
}
_ONLY = {  # keys of the data that are for one task
    "translation": (
        *("source", "target", "swap", "languages", "bridge", "bridged", "variants", "held_out", "max_len", "max_ratio"),
    ),
    "language": ("split", "end", "held_out_share", "sample", "length"),
}
RECIPES = Path(__file__).parent.parent / "recipes"


class Recipe(Section):
    """Everything that decides what a run does. ``name`` and ``note`` are for people."""

    name: str = ""
    note: str = ""
    task: Literal["translation", "language"] = "translation"
    seed: int = Field(default=1, ge=0)
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: Annotated[ModelConfig, Field(discriminator="family")] = TransformerConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: DecodingConfig = DecodingConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.task == "language") != (self.model.family == "gpt"):
            others = ", ".join(name for name in MODELS if (name == "gpt") == (self.task == "language"))
            raise ValueError(f"task {self.task!r} needs a model.family of {others}, not {self.model.family!r}")
        if self.data.variants and self.tokenizer.kind not in ("bpe", "unigram"):
            raise ValueError(
                f"data.variants makes up words, for a tokenizer.kind of bpe or unigram, not of {self.tokenizer.kind}"
            )
        for task, names in _ONLY.items():
            for name in names if task != self.task else ():
                if getattr(self.data, name) != DataConfig.model_fields[name].default:
                    raise ValueError(f"data.{name} is for the task {task!r}, not for {self.task!r}")
        return self

    @property
    def specials(self) -> Specials:
        """The tokens that mean something to a search of a model that this recipe trains.

        Texts that see each other follow on the end of another; those kept apart begin with BOS. An end that never came
        in training never comes.
        """
        if self.task == "translation":
            return Specials()
        unseen = (PAD, BOS, UNK) if self.data.end else (PAD, BOS, UNK, EOS)
        return Specials(bos=BOS if self.data.sample == "documents" else EOS, never=unseen)

    @classmethod
    def make(cls, tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> Self:
        """A recipe from a tree of values, changed by overrides such as ``model.dim=128``.

        Raises:
            ValueError: naming the key, what was given, and the nearest key or what was expected.
        """
        pairs = [split(override) for override in overrides]
        task = next((text for key, text in reversed(pairs) if key == "task"), tree.get("task"))
        usual = TASKS.get(task if isinstance(task, str) else "", {})
        changed: dict[str, Any] = {**usual, **tree}
        for key, value in changed.items():
            if isinstance(value, Mapping):
                changed[key] = {**_usual(usual.get(key, {}), value), **value}
        # The family decides which keys the model has, so it comes first; another family starts from its defaults.
        for key, text in sorted(pairs, key=lambda pair: pair[0] != "model.family"):
            if key == "model.family" and changed.get("model", {}).get("family", "transformer") != text:
                changed["model"] = {}
            put(changed, key, typed(field(key, types(cls, changed)), key, text))
        if "model" in changed and isinstance(changed["model"], dict):
            changed["model"].setdefault("family", "transformer")
        try:
            return cls.model_validate(changed)
        except ValidationError as error:
            raise ValueError(explain(error.errors()[0], types(cls, changed))) from None

    @classmethod
    def read(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Self:
        """A recipe from a TOML file, changed by overrides.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is no TOML, or not a recipe.
        """
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
        try:
            cls.make(tree)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls.make(tree, overrides)

    def tree(self) -> dict[str, Any]:
        """All values as dictionaries, for JSON and TOML; what is None is left out."""
        return self.model_dump(exclude_none=True)

    def toml(self) -> str:
        """The recipe as TOML, which ``Recipe.read`` takes back."""
        return tomli_w.dumps(self.tree())

    def changed(self, **sections: Mapping[str, Any]) -> Self:
        """The recipe with some keys of some sections changed: ``recipe.changed(training={"steps": 10})``."""
        tree = self.tree()
        for section, values in sections.items():
            tree[section] = {**tree[section], **values}
        return self.make(tree)

    def differences(self, other: Recipe) -> list[str]:
        """The dotted keys in which two recipes differ."""
        mine, theirs = flat(self.tree()), flat(other.tree())
        return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


def recipe_names() -> list[str]:
    """The names of the recipes that come with weft."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_recipe(name: str, overrides: Iterable[str] = (), others: Iterable[str] = ()) -> Recipe:
    """A recipe by its name or its file, changed by overrides; ``others`` could have been said instead.

    Raises:
        ValueError: if there is none of that name, with the nearest; or if it is no recipe.
        OSError: if the file cannot be read.
    """
    path = RECIPES / f"{name}.toml"
    if name in recipe_names():
        return Recipe.read(path, overrides)
    if name.endswith(".toml") or os.sep in name:
        return Recipe.read(name, overrides)
    known = [*others, *recipe_names()]
    hint = nearest(name, known) or f": expected a TOML file or one of {', '.join(known)}"
    raise ValueError(f"unknown recipe {name!r}{hint}")


def _usual(usual: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a section starts from; not that of another model family."""
    return usual if given.get("family", usual.get("family")) == usual.get("family") else {}
