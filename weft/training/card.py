"""The card of a model that a run made: what was measured, and the command that makes it again."""

from __future__ import annotations

import shlex

from pydantic import BaseModel

from weft import folder
from weft.config import Recipe, find_recipe, flat, recipe_names
from weft.data.corpora import SETS
from weft.training import progress
from weft.training.loop import Outcome
from weft.training.sizes import SIZES, TEXT_SIZES


def card(recipe: Recipe, outcome: Outcome, parameters: int) -> str:
    """The README of a model with so many parameters."""
    results: dict[str, str | float] = {f"validation {name}": value for name, value in outcome.metrics.items()}
    if outcome.best_step is not None:
        results["best step"] = f"{outcome.best_step:,} of {outcome.step:,}"
    if len(outcome.weights) > 1:
        results["weights"] = f"the mean of steps {', '.join(f'{step:,}' for step in outcome.weights)}"
    results |= {
        f"{'target ' if recipe.task == 'translation' else ''}tokens trained on": f"{outcome.tokens:,}",
        "time": progress.duration(outcome.seconds),
        "precision": outcome.precision,
    }
    named = SETS.get(str(recipe.data.train).partition(":")[0])
    return folder.card(recipe, parameters, results, _command(recipe), named.licence if named else "")


def _command(recipe: Recipe) -> str:
    """What trains this recipe: the one of its name, and what differs from that."""
    known = recipe.name in recipe_names()
    name = recipe.name if known else recipe.task
    changed = recipe.differences(find_recipe(name) if known else Recipe.make({"task": recipe.task}))
    if not known:  # what a table would choose is said too: it may be another table by then
        table = SIZES if recipe.task == "translation" else TEXT_SIZES
        changed = sorted({*changed, *flat(table[0].tree(1)).keys() - {"task", "model.family"}})
    values = flat(recipe.tree())
    words = [f"--{key}={_word(values.get(key, 'none'))}" for key in changed if _has(recipe, key)]
    return shlex.join(["weft", "train", name, *words, "--out", "DIR"])


def _has(part: BaseModel, key: str) -> bool:
    """Whether there is such a key: another family of models does not have all that the usual one has."""
    name, _, rest = key.partition(".")
    return name in type(part).model_fields and (not rest or _has(getattr(part, name), rest))


def _word(value: object) -> str:
    """A value as the shell's overrides take it."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
