"""How well a language model knows a text: perplexity by token and by word, bits a byte, tokens a second.

    print(evaluate_folder("runs/wikitext-2", "wikitext-2:test").text())

A word is what stands between white space, and a line end, however the model cuts words into tokens: perplexities per
word and bits per byte compare between vocabularies, those per token do not.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from weft.api import Precision, load_language_model
from weft.config import BOS, EOS, Recipe
from weft.config.places import cache_folder
from weft.data.corpora import text_paths
from weft.data.documents import TextOptions
from weft.data.packing import Sample, TokenBatch, in_order, sampled
from weft.data.text_store import TextStore, TextTokenizer, prepare_text
from weft.data.tokenizers import Tokenizer
from weft.decoding.options import SearchOptions
from weft.decoding.sampling import SamplingOptions, sample
from weft.decoding.sliding import Sliding
from weft.decoding.steps import searching
from weft.models.contract import Seq2Seq
from weft.models.gpt import GPT

_BATCH_TOKENS = 4096  # of a batch whose loss is taken
_LONGEST = 2048  # of a published model's windows, if nothing is said


@dataclass(frozen=True)
class Report:
    """What evaluating a language model on a text gave.

    Attributes:
        nll: −log p of a token, the mean, in nats.
        tokens: how many tokens of the text are to be predicted; not the first, nor the first of documents kept apart.
        words: of the text, line ends counted.
        bytes: of the text, in UTF-8.
        unknown: tokens that stand for something that the tokenizer does not know.
        predicted: how many tokens were predicted, of which ``nll`` is the mean.
        seconds: how long that took.
        how: which tokens that were, and what the model saw before them.
    """

    nll: float
    tokens: int
    words: int
    bytes: int
    unknown: int
    predicted: int
    seconds: float
    how: str

    @property
    def perplexity(self) -> float:
        """e to the mean −log p of a token."""
        return _exp(self.nll)

    @property
    def word_perplexity(self) -> float:
        """e to the mean −log p of a word."""
        return _exp(self.nll * self.tokens / max(self.words, 1))

    @property
    def bits_per_byte(self) -> float:
        """−log₂ p of the text by its bytes."""
        return self.nll * self.tokens / math.log(2) / max(self.bytes, 1)

    @property
    def tokens_per_second(self) -> float:
        """Predicted tokens a second."""
        return self.predicted / self.seconds if self.seconds else 0.0

    def tree(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        names = ("perplexity", "word_perplexity", "bits_per_byte", "tokens_per_second")
        return asdict(self) | {name: getattr(self, name) for name in names}

    def json(self) -> str:
        """The report as a line of JSON."""
        return json.dumps(self.tree())

    def text(self) -> str:
        """The report as a person reads it."""
        unknown = f", {self.unknown:,} of them unknown" if self.unknown else ""
        speed = f"{self.seconds:.1f} s: {self.tokens_per_second:,.0f} tokens/s"
        return "\n".join(
            [
                f"{self.nll:.4f} nats a token: perplexity {self.perplexity:.2f}   {self.tokens:,} tokens{unknown}",
                f"perplexity of a word {self.word_perplexity:.2f}   {self.words:,} words, line ends counted",
                f"{self.bits_per_byte:.4f} bits a byte   {self.bytes:,} bytes",
                f"{self.predicted:,} tokens in {speed}   {self.how}",
            ]
        )


def evaluate(
    model: nn.Module, store: TextStore, length: int, stride: int | None = None, *, sample: Sample = "stream"
) -> Report:
    """Predict every token of a text once.

    Args:
        model: a language model.
        store: the text.
        length: how many tokens the model sees at most.
        stride: from one window to the next: each token has at least length − stride tokens before it, if there are so
            many. Less costs more and gives lower perplexities. None: half the length.
        sample: "documents" keeps documents apart.

    Raises:
        ValueError: if stride is more than length, or nothing is to be predicted.
    """
    stride = max(length // 2, 1) if stride is None else stride
    batches = in_order(store, max(_BATCH_TOKENS // length, 1), length, stride, sample=sample)
    how = f"windows of {length:,} tokens, {stride:,} apart"
    return _measured(model, store, batches, how, sample)


def estimate(model: nn.Module, store: TextStore, length: int, rows: int, count: int = 200, seed: int = 1) -> Report:
    """Predict all tokens of random windows: nanoGPT's estimate, the mean over ``count`` batches of ``rows`` windows.

    The first tokens of a window see little, so that it comes out higher than ``evaluate``.

    Raises:
        ValueError: if a number is less than 1, or the text is shorter than a window.
    """
    batches = sampled(store, rows, length, count, seed)
    how = f"{count:,} batches of {rows:,} random windows of {length:,} tokens, as nanoGPT estimates"
    return _measured(model, store, batches, how, "stream")


def evaluate_folder(
    model: str | os.PathLike[str],
    data: str | Sequence[str] | None = None,
    *,
    length: int | None = None,
    stride: int | None = None,
    nanogpt: bool = False,
    batches: int = 200,
    precision: Precision = "auto",
) -> Report:
    """Load a language model and measure it on a text.

    Args:
        model: what ``weft.load`` takes.
        data: text files, folders, or a part of a named set; None: the text that it was validated with.
        length: of a window; None: as in training, of a published model the context, but at most 2,048.
        stride: see ``evaluate``.
        nanogpt: estimate as nanoGPT does, with rows as in training; see ``estimate``.
        batches: how many, for that estimate.
        precision: see ``weft.load``.

    Raises:
        OSError: if a file is missing.
        ValueError: if the data or the model is at fault.
    """
    loaded = load_language_model(model, precision)
    recipe, tokenizer = loaded.recipe, cast(TextTokenizer, loaded.vocabulary)
    published = not recipe.data.train
    if published and data:  # what its publisher puts before a text stands there; no end is added, nor asked for
        options = TextOptions(begin=loaded.opening[0] if loaded.opening else None, end=None)
        store = prepare_text(text_paths(data), tokenizer, options, cache_folder() / "text", allow_unknown=True)
    else:
        store = text_of(recipe, tokenizer, data) if data else validation_text(recipe, tokenizer)
    assert recipe.model.family == "gpt"  # a recipe of this task has no other
    most, trained = recipe.model.max_len, row_length(recipe)
    length = (min(trained, _LONGEST) if published else trained) if length is None else length
    if length > most:
        raise ValueError(f"length must be at most the model's context of {most:,}, not {length:,}")
    if nanogpt:
        if stride is not None:
            raise ValueError("stride is for a full pass: nanoGPT's estimate draws its windows")
        if recipe.data.sample == "documents":
            raise ValueError("nanoGPT's estimate runs on from text to text: this model knows documents apart")
        rows = max(recipe.training.batch_tokens // length, 1)
        return estimate(loaded.model, store, length, rows, batches)
    return evaluate(loaded.model, store, length, stride, sample=recipe.data.sample)


def text_options(recipe: Recipe) -> TextOptions:
    """What a document is in a recipe, and how much of the training text is held out for validation."""
    data = recipe.data
    share = 0.0 if data.validation else data.held_out_share
    return TextOptions(data.split, EOS if data.end else None, share, BOS if data.sample == "documents" else None)


def text_of(recipe: Recipe, tokenizer: TextTokenizer, data: str | Sequence[str]) -> TextStore:
    """A text to measure a model of this recipe on, cut and ended as the recipe says.

    Raises:
        OSError: if a file is missing.
        ValueError: if the text is empty or not UTF-8.
    """
    begin = BOS if recipe.data.sample == "documents" else None
    options = TextOptions(recipe.data.split, EOS if recipe.data.end else None, begin=begin)
    return prepare_text(text_paths(data), tokenizer, options, cache_folder() / "text", allow_unknown=True)


def validation_text(recipe: Recipe, tokenizer: TextTokenizer) -> TextStore:
    """The text that a recipe validates with: a set of its own, or what is held out of the training text.

    Raises:
        OSError: if a file is missing.
        ValueError: if there is none, or it is at fault.
    """
    data, options = recipe.data, text_options(recipe)
    if data.validation:
        return text_of(recipe, tokenizer, data.validation)
    if not data.train or not options.held_out_share:
        raise ValueError("no validation data: expected data.validation, or a data.held_out_share of the training data")
    cache = cache_folder() / "text"
    return prepare_text(text_paths(data.train), tokenizer, options, cache, held_out=True, allow_unknown=True)


def row_length(recipe: Recipe) -> int:
    """How many tokens of a row a model of this recipe reads.

    Raises:
        ValueError: if that is more than the model can take.
    """
    assert recipe.model.family == "gpt"  # a recipe of this task has no other
    most = recipe.model.max_len
    if recipe.data.length > most:
        raise ValueError(f"data.length must be at most model.max_len = {most:,}, not {recipe.data.length:,}")
    return recipe.data.length or most


Validate = Callable[[nn.Module], dict[str, float]]


def validator(store: TextStore, tokenizer: Tokenizer, recipe: Recipe, tell: Callable[[str], None]) -> Validate:
    """What the training loop calls to validate a model: its loss on a text, after which ``tell`` gets the samples.

    Raises:
        ValueError: if nothing of the text is to be predicted.
    """
    length, apart = row_length(recipe), recipe.data.sample
    if not _asked(store, apart):
        raise ValueError(f"the validation text has too few tokens to predict any: {store.report()}")

    def validate(model: nn.Module) -> dict[str, float]:
        found = evaluate(model, store, length, length, sample=apart)
        seed = torch.initial_seed()  # the loop has set it from the step, and a draw asks no generator
        for number, text in enumerate(samples(model, store, tokenizer, recipe, seed), 1):
            tell(f"sample {number}: {text.replace(chr(10), '⏎')}")
        return {"loss": found.nll, "perplexity": found.perplexity, "bits_per_byte": found.bits_per_byte}

    return validate


def samples(model: nn.Module, store: TextStore, tokenizer: Tokenizer, recipe: Recipe, seed: int) -> list[str]:
    """``training.samples`` texts drawn as the recipe says, from the first tokens of documents on."""
    wanted, decoding = recipe.training.samples, recipe.decoding
    if not wanted:
        return []
    starts = store.starts[[number * len(store) // wanted for number in range(wanted)]]
    prompts = torch.from_numpy(store.tokens[starts].astype(np.int64))[:, None]
    drawn = decoding.model_dump(include={key.name for key in fields(SamplingOptions)})
    cast(Seq2Seq, model).specials = recipe.specials
    endless = cast(Seq2Seq, Sliding(model))
    found = sample(endless, prompts, SamplingOptions(**drawn, seed=seed), SearchOptions.of(decoding))
    return [tokenizer.decode([int(prompt), *best[0].tokens]) for prompt, best in zip(prompts, found, strict=True)]


def _measured(model: nn.Module, store: TextStore, batches: Iterable[TokenBatch], how: str, apart: Sample) -> Report:
    total, count = 0.0, 0
    begin = time.perf_counter()
    with searching(cast(Seq2Seq, model), exact=False):
        for batch in batches:
            loss = cast(GPT, model).loss(batch)
            total, count = total + float(loss.parts["nll"]), count + loss.count
    seconds = time.perf_counter() - begin
    if not count:
        raise ValueError(f"there is nothing to predict: {store.report()}")
    tokens, facts = _asked(store, apart), store.facts
    return Report(total / count, tokens, facts.words, facts.bytes, facts.unknown, count, seconds, how)


def _asked(store: TextStore, apart: Sample) -> int:
    """How many tokens of a text are to be predicted."""
    return len(store.tokens) - (len(store) if apart == "documents" else 1)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # e^710 is no float
