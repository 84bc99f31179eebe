"""Perplexities, bits and estimates are those of a computation by hand from the model's own logits."""

from __future__ import annotations

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from weft import folder
from weft.config import BOS, GPTConfig, Recipe
from weft.data.packing import PackedBatches
from weft.data.text_store import TextStore
from weft.data.tokenizers import Tokenizer, TokenizerPair
from weft.data.vocabulary import train_tokenizer
from weft.evaluation.language import (
    estimate,
    evaluate,
    evaluate_folder,
    samples,
    text_of,
    validation_text,
    validator,
)
from weft.models.gpt import GPT

TEXT = "The cät sat on the mat.\nThe dog sat on the cät.\n\nWhere is the mat?\n" * 3
LENGTH = 8


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def recipe(path: Path, **data: Any) -> Recipe:
    tree = {
        "task": "language",
        "data": {"train": str(path), "end": False, **data},
        "tokenizer": {"kind": "char"},
        "model": {"dim": 16, "num_heads": 2, "num_layers": 1, "ffn_dim": 24, "max_len": LENGTH, "dropout": 0.3},
        "training": {"batch_tokens": 3 * LENGTH, "samples": 2},
    }
    return Recipe.make(tree)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "x.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path / "x.txt"


def made(path: Path, **data: Any) -> tuple[GPT, Recipe, Tokenizer, TextStore]:
    """A model with random weights, not near zero so that what it sees matters, and a text."""
    chosen = recipe(path, **data)
    tokenizer = train_tokenizer([TEXT], chosen.tokenizer)
    assert isinstance(chosen.model, GPTConfig)
    model = GPT(chosen.model, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model, chosen, tokenizer, text_of(chosen, tokenizer, str(path))


def log_probs(model: GPT, tokens: Tensor) -> Tensor:
    """log p of each token of [N] but the first, given all before it."""
    model.eval()
    with torch.no_grad():
        logits = model.logits(model(tokens[None, :-1]))[0]
    return -F.cross_entropy(logits, tokens[1:], reduction="none").double()


@pytest.mark.parametrize("stride", [1, 3, 4, 8])
def test_every_token_is_predicted_once_from_at_least_so_many(path: Path, stride: int) -> None:
    model, _, tokenizer, store = made(path)
    tokens = torch.tensor(tokenizer.encode(TEXT))
    expected, end = 0.0, 0  # end: the last place that was predicted
    for start in range(0, len(tokens), stride):
        window = tokens[start : start + LENGTH + 1]
        last = start + len(window) - 1
        if last > end:
            expected -= float(log_probs(model, window)[end - last :].sum())
            end = last
    model.train()
    found = evaluate(model, store, LENGTH, stride)
    assert model.training
    assert found.predicted == found.tokens == len(tokens) - 1
    assert found.nll * found.tokens == pytest.approx(expected, rel=1e-5)
    words = len(TEXT.split()) + TEXT.count("\n")
    assert (found.words, found.bytes) == (words, len(TEXT.encode()))
    assert found.perplexity == pytest.approx(math.exp(expected / found.tokens), rel=1e-5)
    assert found.word_perplexity == pytest.approx(math.exp(expected / words), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(expected / math.log(2) / len(TEXT.encode()), rel=1e-5)
    if stride == LENGTH // 2:
        assert evaluate(model, store, LENGTH).nll == found.nll


def test_documents_are_measured_apart(path: Path) -> None:
    model, _, tokenizer, store = made(path, split="line", sample="documents")
    lines = [[BOS, *tokenizer.encode(line)] for line in TEXT.split("\n") if line]
    places = [(number, token) for number, line in enumerate(lines) for token in line]
    expected, count = 0.0, 0
    for start in range(0, len(places), LENGTH):  # a window and what is behind it; a document's part of it stands alone
        for _, run in groupby(places[start : start + LENGTH + 1], lambda place: place[0]):
            ids = torch.tensor([token for _, token in run])
            if len(ids) > 1:
                expected, count = expected - float(log_probs(model, ids).sum()), count + len(ids) - 1
    found = evaluate(model, store, LENGTH, LENGTH, sample="documents")
    assert found.tokens == found.predicted == count == len(places) - len(lines)
    assert found.nll * count == pytest.approx(expected, rel=1e-5)


def test_the_estimate_is_the_mean_over_random_windows(path: Path) -> None:
    model, _, _, store = made(path)
    batches = PackedBatches(store, rows=3, length=LENGTH, seed=4)
    means = [
        torch.stack([-log_probs(model, row) for row in batches.at(number).tokens]).mean().item() for number in range(5)
    ]
    found = estimate(model, store, LENGTH, rows=3, count=5, seed=4)
    assert found.nll == pytest.approx(sum(means) / 5, rel=1e-5)
    assert found.predicted == 5 * 3 * LENGTH
    assert found.tokens == len(store.tokens) - 1
    assert found.bits_per_byte == pytest.approx(found.nll * found.tokens / math.log(2) / found.bytes)
    assert found.word_perplexity == pytest.approx(math.exp(found.nll * found.tokens / found.words))
    with pytest.raises(ValueError, match="nothing to predict"):
        estimate(model, store, LENGTH, rows=3, count=0)


def test_a_folder_is_measured_on_its_validation_text_or_another(path: Path, tmp_path: Path) -> None:
    model, chosen, tokenizer, store = made(path, held_out_share=0.25)
    folder.save(tmp_path / "model", model, chosen, TokenizerPair(tokenizer, tokenizer), "")
    whole = evaluate_folder(tmp_path / "model", str(path), precision="fp32")
    assert whole.nll == pytest.approx(evaluate(model, store, LENGTH).nll, rel=1e-6)
    held_out = evaluate_folder(tmp_path / "model", stride=LENGTH, precision="fp32")
    assert held_out.bytes < whole.bytes / 3
    measured = validator(validation_text(chosen, tokenizer), tokenizer, chosen, lambda text: None)(model)
    assert measured["loss"] == pytest.approx(held_out.nll, rel=1e-6)
    assert measured["bits_per_byte"] == pytest.approx(held_out.bits_per_byte, rel=1e-6)
    guessed = evaluate_folder(tmp_path / "model", str(path), nanogpt=True, batches=7, precision="fp32")
    assert guessed.predicted == 7 * 3 * LENGTH
    tree = json.loads(whole.json())
    assert tree["word_perplexity"] == whole.word_perplexity
    text = whole.text()
    assert f"{whole.nll:.4f} nats a token" in text
    assert f"perplexity of a word {whole.word_perplexity:.2f}" in text
    assert f"{whole.bits_per_byte:.4f} bits a byte" in text
    assert "windows of 8 tokens, 4 apart" in text


def test_what_is_unknown_is_counted(path: Path, tmp_path: Path) -> None:
    model, chosen, tokenizer, _ = made(path)
    (tmp_path / "other.txt").write_text("The Zebra sat.\n")
    found = evaluate(model, text_of(chosen, tokenizer, str(tmp_path / "other.txt")), LENGTH)
    assert found.unknown == 2  # Z and b
    assert math.isfinite(found.nll)
    assert "2 of them unknown" in found.text()


def test_samples_follow_from_the_seed_and_draw_nothing(path: Path) -> None:
    model, chosen, tokenizer, store = made(path)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one = samples(model, store, tokenizer, chosen, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert one == samples(model, store, tokenizer, chosen, seed=1)
    assert one != samples(model, store, tokenizer, chosen, seed=2)
    assert len(one) == 2
    assert all(text.startswith("T") for text in one)
    notes: list[str] = []
    validator(store, tokenizer, chosen, notes.append)(model)
    assert [note[:10] for note in notes] == ["sample 1: ", "sample 2: "]
    assert not any("\n" in note for note in notes)


def test_what_cannot_be_measured_is_told(path: Path, tmp_path: Path) -> None:
    model, chosen, tokenizer, store = made(path)
    with pytest.raises(ValueError, match="expected a stride up to the length"):
        evaluate(model, store, LENGTH, LENGTH + 1)
    (tmp_path / "one.txt").write_text("T")
    with pytest.raises(ValueError, match="too few tokens to predict any"):
        validator(text_of(chosen, tokenizer, str(tmp_path / "one.txt")), tokenizer, chosen, print)
    apart = recipe(path, sample="documents")
    folder.save(tmp_path / "apart", model, apart, TokenizerPair(tokenizer, tokenizer), "")
    with pytest.raises(ValueError, match="runs on from text to text"):
        evaluate_folder(tmp_path / "apart", str(path), nanogpt=True)
    nothing = recipe(path, held_out_share=0.0)
    with pytest.raises(ValueError, match="no validation data"):
        validation_text(nothing, tokenizer)


def test_wikitext_has_as_many_words_as_everybody_counts(path: Path, weft_data: Path) -> None:
    _, chosen, tokenizer, _ = made(path)
    assert text_of(chosen, tokenizer, "wikitext-2:test").words == 245_569
