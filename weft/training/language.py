"""Train a language model: from a recipe to a model folder.

    text ─ tokenizer ─ store ─ batches ─▶ model ─ loop ─▶ model folder
                 └ validation: loss, bits a byte, samples ┘

``choose`` makes the recipe where the user gave only text; ``train`` does what a recipe says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from weft import folder
from weft.config import Recipe
from weft.config.places import cache_folder
from weft.data.corpora import text_paths
from weft.data.documents import TextOptions, fingerprint_of, read_text
from weft.data.packing import PackedBatches
from weft.data.text_store import TextStore, prepare_text
from weft.data.tokenizers import Tokenizer, TokenizerPair
from weft.data.vocabulary import kept_pair, make_pair
from weft.evaluation.language import row_length, text_options, validation_text, validator
from weft.interop.vocabularies import read_vocabulary
from weft.models import build
from weft.training import loop, progress
from weft.training.card import card
from weft.training.checkpoint import RunFolder
from weft.training.distributed import is_first
from weft.training.report import Reporter, every
from weft.training.sizes import fitted, text_size_for


@dataclass(frozen=True)
class Prepared:
    """What training reads: the tokenizer, the text and what is held out of it as tokens, batches."""

    tokenizer: Tokenizer
    store: TextStore
    validation: TextStore
    batches: PackedBatches
    content: dict[str, str]  # hashes of all that was read


def choose(overrides: Sequence[str], report: Reporter) -> Recipe:
    """A recipe for this much text, from the table in sizes.py; the overrides have the last word.

    Raises:
        ValueError: if no training data is named, or the data is at fault.
    """
    first = Recipe.make({"task": "language"}, overrides)
    count = sum(map(len, read_text(_paths(first), text_options(first))))
    recipe = fitted(text_size_for(count), overrides, lambda draft: prepared(draft, report).batches.per_epoch)
    model = recipe.model
    assert model.family == "gpt"  # a recipe of this task has no other
    tokens = f"{recipe.tokenizer.vocab_size:,} {recipe.tokenizer.kind} tokens"
    if recipe.tokenizer.path or recipe.tokenizer.kind == "char":
        tokens = "the given tokenizer" if recipe.tokenizer.path else "single characters"
    report.note(
        f"{count:,} characters: chose {tokens}, {model.family} of dim {model.dim}, {model.num_layers} layers, context "
        f"{model.max_len:,}, dropout {model.dropout:g}, {recipe.training.steps:,} steps of "
        f"{recipe.training.batch_tokens:,} tokens"
    )
    return recipe


def train(recipe: Recipe, out: Path, report: Reporter, fork: bool = False) -> loop.Outcome:
    """Train what the recipe says, or go on where a run in ``out`` stopped, and write the model folder there.

    Args:
        recipe: all that decides what is trained.
        out: the run folder, which becomes the model folder too.
        report: who is told how it goes.
        fork: go on with a recipe that differs from the one that the run was begun with.

    Raises:
        ValueError: if the data or the recipe is at fault, or the loss is no number any more.
    """
    RunFolder(out).check_room()
    data = prepared(recipe, report)
    report.note(f"training: {data.store.report()}; {data.batches.report()}")
    report.note(f"validation: {data.validation.report()}")
    torch.manual_seed(recipe.seed)
    size = data.tokenizer.vocab_size
    model = build(recipe.model, size, size)
    parameters = sum(p.numel() for p in model.parameters())
    report.note(f"model: {recipe.model.family}, {parameters:,} parameters, {size:,} tokens")
    outcome = loop.train(
        model,
        data.batches,
        recipe.training,
        out,
        seed=recipe.seed,
        identity={**recipe.tree(), "content": data.content},
        validate=validator(data.validation, data.tokenizer, recipe, report.note),
        best=("loss", "min"),
        report=report,
        fork=fork,
    )
    if is_first():
        pair = TokenizerPair(data.tokenizer, data.tokenizer)
        folder.save(out, model, recipe, pair, card(recipe, outcome, parameters))
        progress.draw_curve(out / "metrics.jsonl", out / "curve.png", report.note)
    return outcome


def prepared(recipe: Recipe, report: Reporter) -> Prepared:
    """The data of a recipe, ready for training. What was made before, here or for another run, is used again."""
    length = row_length(recipe)
    assert recipe.model.family == "gpt"
    if length < recipe.model.max_len and recipe.model.positions == "learned":
        raise ValueError(
            f"data.length={length:,} would leave learned positions up to model.max_len={recipe.model.max_len:,} "
            "untrained: expected them to be equal, or other positions"
        )
    rows = recipe.training.batch_tokens // length
    if not rows:
        raise ValueError(
            f"training.batch_tokens={recipe.training.batch_tokens:,} has no room for a row of {length:,} tokens: "
            "raise it, or lower data.length"
        )
    paths, options, cache = _paths(recipe), text_options(recipe), cache_folder() / "text"
    tokenizer = _tokenizer(recipe, paths, options, cache, report)
    tell = every(100_000_000, "characters tokenised", report)
    store = prepare_text(paths, tokenizer, options, cache, tell)
    validation = validation_text(recipe, tokenizer)
    batches = PackedBatches(store, rows, length, recipe.seed, sample=recipe.data.sample)
    content = {
        "train": store.fingerprint(),
        "validation": validation.fingerprint(),
        "tokenizer": tokenizer.fingerprint(),
    }
    return Prepared(tokenizer, store, validation, batches, content)


def _paths(recipe: Recipe) -> tuple[Path, ...]:
    """The files and folders of the training text."""
    if not recipe.data.train:
        raise ValueError("no training data: give --data.train=my.txt, a folder of text files, or a part of a named set")
    return text_paths(recipe.data.train)


def _tokenizer(recipe: Recipe, paths: Sequence[Path], options: TextOptions, cache: Path, report: Reporter) -> Tokenizer:
    """The tokenizer that the recipe asks for, brought along or trained on the text that is not held out."""
    config = recipe.tokenizer
    if config.dropout:
        raise ValueError(f"tokenizer.dropout is for the task 'translation': expected 0.0, not {config.dropout}")
    if not config.joint:
        raise ValueError("a language model has one vocabulary: expected tokenizer.joint=true, not false")
    if config.path:
        if not isinstance(config.path, str):
            raise ValueError(f"tokenizer.path must name one vocabulary, not {config.path!r}")
        return read_vocabulary(config.path).renumbered()

    def make() -> TokenizerPair:
        report.note(f"training a {config.kind} tokenizer")
        return make_pair(config, lambda: read_text(paths, options), lambda: ())

    if config.kind == "word" and options.split != "line":
        raise ValueError("tokenizer.kind=word cuts at spaces alone: it needs data.split=line, where no line end stands")
    return kept_pair(config, fingerprint_of(paths, options), cache, make).target
