"""Train a translator: from a recipe to a model folder.

    corpora ─ tokenizers ─ store ─ batches ─▶ model ─ loop ─▶ model folder
                     └ validation: loss and BLEU ┘

``choose`` makes the recipe where the user gave only data; ``train`` does what a recipe says.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import nn

from weft import folder
from weft.api import Translator
from weft.config import GPTConfig, Recipe
from weft.config.places import cache_folder
from weft.data.batching import Batches
from weft.data.corpora import open_pairs
from weft.data.directions import Directions, open_directions
from weft.data.languages import Languages
from weft.data.store import PairStore, prepare, split_held_out
from weft.data.text import TextPairs
from weft.data.tokenizers import TokenizerPair
from weft.data.variants import varied
from weft.data.vocabulary import kept_pair, make_pair
from weft.evaluation.translation import Sentences, of_direction, sentences, validator
from weft.models import build
from weft.models.contract import Seq2Seq
from weft.training import loop, progress
from weft.training.card import card
from weft.training.checkpoint import RunFolder
from weft.training.distributed import is_first
from weft.training.report import Reporter, every
from weft.training.sizes import fitted, size_for


@dataclass(frozen=True)
class Prepared:
    """What training reads: tokenizers, token stores, batches, and the text that validation translates."""

    tokenizers: TokenizerPair
    store: PairStore
    validation: PairStore
    batches: Batches
    texts: list[Sentences]
    content: dict[str, str]  # hashes of all that was read


def choose(overrides: Sequence[str], report: Reporter) -> Recipe:
    """A recipe for this much data, from the table in sizes.py; the overrides have the last word.

    Raises:
        ValueError: if no training data is named, or the data is at fault.
    """
    draft = Recipe.make({}, overrides)
    data, (pairs, _) = draft.data, _texts(draft)
    count = sum(1 for _ in pairs)
    if not data.languages:
        text = open_pairs(data.train, data.source, data.target)
        if text.source and text.target:  # a named set knows its languages
            overrides = [*overrides, f"--data.source={text.source}", f"--data.target={text.target}"]
    recipe = fitted(size_for(count), overrides, lambda draft: prepared(draft, report).batches.per_epoch)
    model = recipe.model
    assert not isinstance(model, GPTConfig)  # a recipe of this task has none
    report.note(
        f"{count:,} pairs: chose {recipe.tokenizer.vocab_size:,} {recipe.tokenizer.kind} tokens, {model.family} "
        f"of dim {model.dim}, {model.encoder_layers} + {model.decoder_layers} layers, dropout {model.dropout:g}, "
        f"{recipe.training.steps:,} steps of {recipe.training.batch_tokens:,} tokens"
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
    report.note(f"training: {data.store.report()}; {data.batches.padding:.0%} of a batch is padding")
    report.note(f"validation: {data.validation.report()}")
    torch.manual_seed(recipe.seed)
    model = build(recipe.model, data.tokenizers.source.vocab_size, data.tokenizers.target.vocab_size)
    parameters = sum(p.numel() for p in model.parameters())
    report.note(f"model: {recipe.model.family}, {parameters:,} parameters")
    _check_lengths(model, data.store)
    Translator(model, recipe, data.tokenizers).search()  # what decoding cannot do is told before the work
    bleu = recipe.training.bleu
    outcome = loop.train(
        model,
        data.batches,
        recipe.training,
        out,
        seed=recipe.seed,
        identity={**recipe.tree(), "content": data.content},
        validate=validator(
            data.validation,
            data.tokenizers,
            recipe,
            texts=data.texts if bleu else (),
        ),
        best=("bleu", "max") if bleu else ("loss", "min"),
        report=report,
        fork=fork,
    )
    if is_first():
        folder.save(out, model, recipe, _telling_apart(recipe, data.tokenizers), card(recipe, outcome, parameters))
        progress.draw_curve(out / "metrics.jsonl", out / "curve.png", report.note)
    return outcome


def prepared(recipe: Recipe, report: Reporter) -> Prepared:
    """The data of a recipe, ready for training. What was made before, here or for another run, is used again."""
    pairs, validation = _texts(recipe)
    cache = cache_folder() / "pairs"
    tokenizers = _tokenizers(recipe, pairs, cache, report)
    pairs = varied(pairs, recipe.data.variants)
    store = prepare(pairs, tokenizers, recipe.data, cache, every(500_000, "pairs tokenised", report))
    everything = recipe.data.model_copy(update={"max_len": 0, "max_ratio": 0.0})
    held_out = prepare(validation, tokenizers, everything, cache, allow_unknown=True)
    batches = Batches(
        store,
        batch_tokens=recipe.training.batch_tokens,
        seed=recipe.seed,
        dropout=recipe.tokenizer.dropout,
        tokenizers=tokenizers,
    )
    texts = [Sentences(*sentences(validation))]
    if isinstance(validation, Directions):
        texts = [of_direction(text) for text in validation.texts]
    content = {
        "train": pairs.fingerprint(),
        "validation": validation.fingerprint(),
        "tokenizers": tokenizers.fingerprint(),
    }
    return Prepared(tokenizers, store, held_out, batches, texts, content)


def _texts(recipe: Recipe) -> tuple[TextPairs, TextPairs]:
    """The text to train on and the text to validate with."""
    data = recipe.data
    if not data.train:
        raise ValueError(
            "no training data: give --data.train=pairs.tsv, two files as a.en,a.de, or a part of a named set"
        )
    if data.languages:
        ways = data.languages, data.bridge
        trained = open_directions(data.train, *ways, share=data.bridged)
        return trained, open_directions(data.validation, *ways, every=True)
    pairs = open_pairs(data.train, data.source, data.target, data.swap)
    if data.validation:
        return pairs, open_pairs(data.validation, data.source, data.target, data.swap)
    if not data.held_out:
        raise ValueError("no validation data: give --data.validation, or --data.held_out pairs of the training data")
    return split_held_out(pairs, data.held_out, cache_folder() / "pairs")


def _tokenizers(recipe: Recipe, pairs: TextPairs, cache: Path, report: Reporter) -> TokenizerPair:
    """The tokenizers that the recipe asks for; what was trained on the same text before is used again."""

    def make() -> TokenizerPair:
        tags = pairs.languages if isinstance(pairs, Directions) else ()
        return make_pair(recipe.tokenizer, lambda: _side(pairs, 0), lambda: _side(pairs, 1), tags)

    def train() -> TokenizerPair:
        report.note(f"training a {recipe.tokenizer.kind} tokenizer")
        return make()

    return make() if recipe.tokenizer.path else kept_pair(recipe.tokenizer, pairs.fingerprint(), cache, train)


def _telling_apart(recipe: Recipe, tokenizers: TokenizerPair) -> TokenizerPair:
    """The tokenizers, which know languages apart if there are several."""
    pairs, _ = _texts(recipe)
    if not isinstance(pairs, Directions):
        return tokenizers
    texts = {text.source: _side(text, 0) for text in reversed(pairs.texts)}  # of each language the first text
    names = [name for name in recipe.data.languages if name in texts]
    return replace(tokenizers, languages=Languages.learned({name: texts[name] for name in names}, tokenizers.source))


def _check_lengths(model: nn.Module, store: PairStore) -> None:
    """Raise ValueError if there are pairs that the model cannot take."""
    most, longest = cast(Seq2Seq, model).max_len, max(store.sources.longest, store.targets.longest)
    if most is not None and longest + 1 > most:  # the end token counts
        raise ValueError(
            f"the longest of the data has {longest} tokens, but the model takes {most - 1}: "
            f"set data.max_len to {most - 1}, or model.max_len to {longest + 1}"
        )


def _side(pairs: TextPairs, side: int) -> Iterable[str]:
    return (pair[side] for pair in pairs)
