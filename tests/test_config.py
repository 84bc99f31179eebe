"""Recipes: what they take, what they refuse and how they say it, and that they come back from TOML as they were."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config import (
    DecodingConfig,
    Recipe,
    RecurrentConfig,
    TrainingConfig,
    TransformerConfig,
    find_recipe,
    recipe_names,
)


def test_overrides_change_what_they_name_and_nothing_else() -> None:
    recipe = Recipe.make({"training": {"steps": 7}}, ["training.clip=0.5", "--data.swap=true", "model.dim=64"])
    assert recipe.training == TrainingConfig(steps=7, clip=0.5)
    assert recipe.data.swap is True
    assert recipe.model == TransformerConfig(dim=64)
    assert recipe.differences(Recipe()) == ["data.swap", "model.dim", "training.clip", "training.steps"]


def test_another_family_starts_from_its_own_defaults_wherever_the_override_stands() -> None:
    tree = {"model": {"family": "transformer", "dim": 64, "num_heads": 8}}
    recipe = Recipe.make(tree, ["model.cell=lstm", "model.family=recurrent"])
    assert recipe.model == RecurrentConfig(cell="lstm")
    assert Recipe.make(tree, ["model.family=transformer"]).model == TransformerConfig(dim=64, num_heads=8)


def test_two_files_come_as_a_list_or_as_text() -> None:
    assert Recipe.make({}, ['data.train=["a.en", "a.de"]']).data.train == ["a.en", "a.de"]
    assert Recipe.make({}, ["data.train=a.en,a.de"]).data.train == "a.en,a.de"
    assert Recipe.make({}, ["data.train=1984"]).data.train == "1984"  # a file may have a number for a name


def test_none_is_a_value_where_the_type_has_it() -> None:
    tree = {"model": {"num_kv_heads": 2}}
    model = Recipe.make(tree, ["model.num_kv_heads=none"]).model
    assert isinstance(model, TransformerConfig)
    assert model.num_kv_heads is None


@pytest.mark.parametrize(
    ("tree", "overrides", "message"),
    [
        ({}, ["model.dmi=3"], "unknown key 'model.dmi'; did you mean 'model.dim'?"),
        ({}, ["steps=3"], "unknown key 'steps'; did you mean 'training.steps'?"),
        ({}, ["model=3"], "'model' is a section: expected one of its keys, such as 'model.family'"),
        ({}, ["training.steps"], "an override is key=value, such as training.steps=2000, not 'training.steps'"),
        ({}, ["training.steps=many"], "training.steps must be a valid integer, not 'many'"),
        ({}, ["training.steps=0"], "training.steps must be greater than or equal to 1, not '0'"),
        ({}, ["model.dropout=1.0"], "model.dropout must be less than 1, not '1.0'"),
        ({}, ["data.swap=maybe"], "data.swap must be a valid boolean, not 'maybe'"),
        ({}, ["training.precision=fp16"], "training.precision must be one of auto, bf16, fp32, not 'fp16'"),
        ({}, ["model.family=lstm"], "model.family must be one of transformer, recurrent, convolutional, gpt, not"),
        ({}, ["model.family=recurrent", "model.num_heads=3"], "unknown key 'model.num_heads'"),
        ({"modle": {}}, [], "unknown key 'modle'; did you mean 'model'?"),
        ({"model": {"dmi": 3}}, [], "unknown key 'model.dmi'; did you mean 'model.dim'?"),
        ({"model": {"family": "transfomer"}}, [], "not 'transfomer'; did you mean 'transformer'?"),
        ({"model": {"dim": 3.5}}, [], "model.dim must be a valid integer, not 3.5"),
        ({"training": {"steps": "7"}}, [], "training.steps must be a valid integer, not '7'"),
        ({"training": {"steps": True}}, [], "training.steps must be a valid integer, not True"),
        ({"model": {"dim": 10, "num_heads": 3}}, [], "dim must be a multiple of num_heads, but 10 is not one of 3"),
        ({"data": {"train": 3}}, [], "data.train must be a text or a list of two, not 3"),
        ({"data": 3}, [], "data must be a valid dictionary"),
        ({"model": 3}, [], "model must be a valid dictionary"),
    ],
)
def test_what_is_wrong_is_named(tree: dict[str, Any], overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        Recipe.make(tree, overrides)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@given(
    steps=st.integers(1, 10**9),
    rate=st.floats(1e-12, 1e3),
    train=st.text(st.characters(exclude_categories=["Cs"])),
    pair=st.booleans(),
)
def test_a_recipe_comes_back_from_toml(steps: int, rate: float, train: str, pair: bool) -> None:
    recipe = Recipe.make(
        {"data": {"train": [train, "b"] if pair else train}, "training": {"steps": steps, "learning_rate": rate}}
    )
    assert Recipe.make(tomllib.loads(recipe.toml())) == recipe


def test_a_file_that_is_no_recipe_is_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[training\n")
    with pytest.raises(ValueError, match=r"bad\.toml: .*line 1"):
        Recipe.read(bad)
    bad.write_text("[training]\nstepz = 3\n")
    with pytest.raises(ValueError, match=r"bad\.toml: unknown key 'training.stepz'; did you mean 'training.steps'"):
        find_recipe(str(bad))
    with pytest.raises(FileNotFoundError):
        find_recipe(str(tmp_path / "gone.toml"))


def test_every_recipe_that_comes_along_is_one() -> None:
    for name in recipe_names():
        recipe = find_recipe(name, ["seed=5"])
        assert recipe.seed == 5
        assert recipe.name == name
    with pytest.raises(ValueError, match="unknown recipe 'transfomer-base'; did you mean 'transformer-base'"):
        find_recipe("transfomer-base")


def test_sections_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        DecodingConfig().beam = 3  # type: ignore[misc]
    assert Recipe().changed(decoding={"beam": 3}).decoding.beam == 3
