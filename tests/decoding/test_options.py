"""Options come from a recipe, and say what is wrong with them."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from weft.config import DecodingConfig
from weft.decoding.options import SearchOptions
from weft.decoding.sampling import SamplingOptions


def test_the_defaults_are_the_recipe_s() -> None:
    assert SearchOptions.of(DecodingConfig()) == SearchOptions()
    usual = DecodingConfig()
    of_text = {"replace_unknown", "split", "recase", "carry", "sample"}  # what is not the search's
    names = set(DecodingConfig.model_fields) - of_text
    assert names <= {field.name for kind in (SearchOptions, SamplingOptions) for field in fields(kind)}
    for name in names & {field.name for field in fields(SamplingOptions)}:
        assert getattr(usual, name) == getattr(SamplingOptions(), name), name


def test_a_recipe_can_be_changed() -> None:
    options = SearchOptions.of(DecodingConfig(beam=7, no_repeat=3), n_best=2, length_penalty=0.5)
    assert options == SearchOptions(beam=7, no_repeat=3, n_best=2, length_penalty=0.5)
    with pytest.raises(ValueError, match="beam of 2 gives at most 2 hypotheses, not 3"):
        SearchOptions.of(DecodingConfig(beam=2), n_best=3)


@pytest.mark.parametrize(
    "given",
    [
        {"beam": 0},
        {"n_best": 0},
        {"coverage_penalty": -0.1},
        {"max_ratio": math.inf},
        {"max_ratio": math.nan},
        {"max_extra": -1},
        {"no_repeat": -1},
        {"min_len": -2},
        {"patience": 0.0},
        {"patience": math.nan},
        {"length_penalty": math.inf},
        {"suppress": (-1,)},
    ],
)
def test_a_value_out_of_range_is_named(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=name) as error:
        SearchOptions(**given)
    assert str(value) in str(error.value)


def test_a_score_is_the_log_probability_by_the_length() -> None:
    options = SearchOptions(length_penalty=0.5)
    hypothesis = options.hypothesis([4, 5, 6], [-1.0, -2.0, -3.0, -2.0], True)
    assert hypothesis.log_prob == -8.0
    assert hypothesis.score == -4.0
    assert options.hypothesis([], [], False).score == 0.0
