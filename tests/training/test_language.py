"""A language model learns what can be known of a text and no more; a run that was stopped ends as one that was not."""

from __future__ import annotations

import math
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.toys import Told, metrics
from weft import folder
from weft.config import GPTConfig, Recipe, find_recipe
from weft.data.tokenizers import Tokenizer
from weft.data.vocabulary import train_tokenizer
from weft.models.gpt import GPT
from weft.training import language
from weft.training.checkpoint import RunFolder
from weft.training.signals import Terminated
from weft.training.sizes import TEXT_SIZES, text_size_for

SMALL = {
    "model": {"dim": 32, "num_heads": 2, "num_layers": 2, "ffn_dim": 64, "max_len": 16, "dropout": 0.0},
    "training": {
        "steps": 120,
        "batch_tokens": 256,
        "precision": "fp32",
        "learning_rate": 1e-2,
        "warmup": 20,
        "validate_every": 60,
        "save_every": 60,
    },
    "tokenizer": {"kind": "char"},
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own for every test."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def recipe(path: Path | str, **sections: dict[str, Any]) -> Recipe:
    tree: dict[str, Any] = {"task": "language", "data": {"train": str(path)}, **SMALL}
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Recipe.make(tree)


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def echoes(count: int, seed: int = 0) -> str:
    """Letters drawn at random, each followed by its capital: half of the text can be known, and half of it cannot."""
    draw = random.Random(seed)
    return "".join(letter + letter.upper() for letter in draw.choices("abcdefgh", k=count))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_can_be_known_is_learned_and_no_more(tmp_path: Path, optimizer: str) -> None:
    """A letter costs log 8 and its capital nothing: log(8) / 2 a token, where the letters' frequencies give log 16.

    Who sees the future falls below that, and who is asked for the wrong token stays above.
    """
    path = written(tmp_path / "x.txt", echoes(4000))
    told = Told()
    outcome = language.train(recipe(path, training={"optimizer": optimizer}), tmp_path / "run", told)
    assert outcome.metrics["loss"] == pytest.approx(math.log(8) / 2, abs=0.06)
    assert outcome.metrics["perplexity"] == pytest.approx(math.exp(outcome.metrics["loss"]))
    told_lines = "\n".join(told.notes)
    assert "training: 1 document, 7,201 tokens of " in told_lines
    assert "validation: 1 document, 801 tokens of " in told_lines
    model, again, tokenizers = folder.read(tmp_path / "run")
    assert isinstance(model, GPT)
    assert tokenizers.joint
    assert again.training.optimizer == optimizer
    card = (tmp_path / "run" / "README.md").read_text()
    assert "# A language model" in card
    assert "Goes on with a text, of which it sees the last 16 tokens." in card
    assert "weft train language" in card
    assert "--data.train=" in card
    assert "| tokens trained on | 30,720 |" in card


class Stops(Told):
    """A reporter that has the run stopped after some steps."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def update(self, step: int, metrics: Any) -> None:
        if step == self.step:
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, optimizer: str) -> None:
    path = written(tmp_path / "x.txt", echoes(500))
    short = {"steps": 12, "warmup": 2, "validate_every": 6, "save_every": 6, "log_every": 1, "ema": 0.9}
    made = recipe(path, model={"dropout": 0.2}, training={**short, "optimizer": optimizer, "samples": 2})
    whole = Told()
    language.train(made, tmp_path / "whole", whole)
    parts: list[str] = []
    for step in (3, 7):
        told = Stops(step)
        with pytest.raises(Terminated):
            language.train(made, tmp_path / "broken", told)
        parts += told.notes
        assert RunFolder(tmp_path / "broken").steps()[-1] == step
    told = Told()
    language.train(made, tmp_path / "broken", told)
    for name in ("model.safetensors", "step-000012/optimizer.safetensors", "step-000012/mean.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "broken" / name).read_bytes(), name
    assert metrics(tmp_path / "whole") == metrics(tmp_path / "broken")
    # The texts that were drawn are those of the step, whatever came before.
    drawn = [[note for note in notes if note.startswith("sample ")] for notes in (whole.notes, parts + told.notes)]
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 4
    assert len(set(drawn[0])) == 4


def test_samples_change_nothing_of_the_run(tmp_path: Path) -> None:
    path = written(tmp_path / "x.txt", echoes(300))
    short = {"steps": 4, "validate_every": 2}
    for number in (0, 3):
        made = recipe(path, model={"dropout": 0.2}, training={**short, "samples": number})
        language.train(made, tmp_path / str(number), Told())
    assert metrics(tmp_path / "0") == metrics(tmp_path / "3")
    assert (tmp_path / "0" / "model.safetensors").read_bytes() == (tmp_path / "3" / "model.safetensors").read_bytes()


def test_the_settings_are_chosen_by_the_amount_of_text(tmp_path: Path) -> None:
    assert text_size_for(0) is TEXT_SIZES[0]
    assert [text_size_for(size.characters) for size in TEXT_SIZES] == list(TEXT_SIZES)
    assert text_size_for(TEXT_SIZES[1].characters - 1) is TEXT_SIZES[0]
    for size in TEXT_SIZES:
        assert Recipe.make(size.tree(10)).task == "language"
    path = written(tmp_path / "x.txt", echoes(2000))
    told = Told()
    made = language.choose([f"data.train={path}", "model.dim=64", "data.held_out_share=0.25"], told)
    assert (made.task, made.model.dim, made.tokenizer.kind) == ("language", 64, "char")
    assert told.notes[-1] == (
        "3,000 characters: chose single characters, gpt of dim 64, 4 layers, context 128, dropout 0.1, "
        "500 steps of 2,048 tokens"
    )


def test_a_validation_text_of_its_own_may_have_unknown_characters(tmp_path: Path) -> None:
    train, validation = written(tmp_path / "a.txt", echoes(300)), written(tmp_path / "b.txt", echoes(30) + "xX")
    made = recipe(train, data={"validation": str(validation)})
    data = language.prepared(made, Told())
    assert len(data.store.tokens) == 601  # nothing is held out
    assert data.validation.facts.unknown == 2
    told = Told()
    made = recipe(train, data={"validation": str(validation)}, training={"steps": 2})
    outcome = language.train(made, tmp_path / "run", told)
    assert math.isfinite(outcome.metrics["loss"])
    assert any(note.startswith("validation:") and note.endswith("unknown: 3.17%") for note in told.notes)


def test_documents_are_kept_apart(tmp_path: Path) -> None:
    path = written(tmp_path / "x.txt", "".join(echoes(5, seed) + "\n" for seed in range(40)))
    apart = {"split": "line", "sample": "documents", "length": 8}
    with pytest.raises(
        ValueError, match=r"data\.length=8 would leave learned positions up to model\.max_len=16 untrained"
    ):
        language.prepared(recipe(path, data=apart), Told())
    made = recipe(path, data=apart, model={"positions": "rotary"}, training={"steps": 2})
    batch = language.prepared(made, Told()).batches.at(0)
    assert batch.tokens.shape == (32, 9)
    assert batch.segments is not None
    assert math.isfinite(language.train(made, tmp_path / "run", Told()).metrics["loss"])


def test_a_word_is_learned_as_it_stands_at_the_start_of_a_line(tmp_path: Path) -> None:
    """In running text a line's first word has no space before it, but a line end."""
    path = written(tmp_path / "x.txt", "Romeo sees Citizen\nCitizen sees Romeo\n\nRomeo runs\n" * 60)
    made = recipe(path, tokenizer={"kind": "bpe", "vocab_size": 400})
    tokenizer = language.prepared(made, Told()).tokenizer
    labels = tokenizer.tokens(tokenizer.encode("Romeo sees Citizen\nCitizen sees Romeo\n\nRomeo runs"))
    assert labels == ["▁Romeo", "▁sees", "▁Citizen", "\\n", "Citizen", "▁sees", "▁Romeo", "\\n\\n", "Romeo", "▁runs"]
    with pytest.raises(ValueError, match=r"needs data\.split=line"):
        language.prepared(recipe(path, tokenizer={"kind": "word"}), Told())


def test_the_schedule_follows_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "x.txt", echoes(3000))
    few = language.choose([f"data.train={path}", "training.steps=40"], Told()).training
    assert (few.steps, few.warmup) == (40, 2)
    assert few.validate_every <= 40
    usual = language.choose([f"data.train={path}"], Told()).training
    gathered = language.choose([f"data.train={path}", "training.accumulate=2", "training.steps=1000"], Told()).training
    assert gathered.steps == 1000
    assert usual.steps == 500


def test_a_tokenizer_is_trained_once_or_brought_along(tmp_path: Path) -> None:
    path = written(tmp_path / "x.txt", "the cat sat on the mat and the dog sat on the cat\n" * 40)
    made = recipe(path, tokenizer={"kind": "bpe", "vocab_size": 300})
    first, second = Told(), Told()
    trained = language.prepared(made, first).tokenizer
    assert language.prepared(made, second).tokenizer.fingerprint() == trained.fingerprint()
    assert first.notes == ["training a bpe tokenizer"]
    assert second.notes == []
    trained.save(tmp_path / "tokenizer.json")
    brought = recipe(path, tokenizer={"path": str(tmp_path / "tokenizer.json")})
    assert language.prepared(brought, second).tokenizer.fingerprint() == trained.fingerprint()
    expected = train_tokenizer(["the cat sat on the mat and the dog sat on the cat\n"] * 36, made.tokenizer)
    assert isinstance(trained, Tokenizer)
    assert trained.encode("the dog") == expected.encode("the dog")


@pytest.mark.parametrize(
    ("text", "sections", "message"),
    [
        ("", {}, "is empty: expected text"),
        ("abc", {"data": {"train": ""}}, "no training data: give --data.train=my.txt"),
        ("abc", {"data": {"train": "nowhere.txt"}}, "no file nowhere.txt"),
        (echoes(50), {"data": {"held_out_share": 0.0}}, "no validation data: expected data.validation"),
        (echoes(50), {"data": {"length": 32}}, "data.length must be at most model.max_len = 16, not 32"),
        (echoes(50), {"training": {"batch_tokens": 8}}, "training.batch_tokens=8 has no room for a row of 16 tokens"),
        (echoes(5), {}, "a row has 17 tokens: expected a longer text"),
        (echoes(50), {"tokenizer": {"dropout": 0.1}}, "tokenizer.dropout is for the task 'translation'"),
        (echoes(50), {"tokenizer": {"joint": False}}, "a language model has one vocabulary"),
        (echoes(50), {"tokenizer": {"path": ["a", "b"]}}, "tokenizer.path must name one vocabulary"),
        (echoes(50), {"tokenizer": {"kind": "bpe", "vocab_size": 100}}, "tokenizer.vocab_size must be at least"),
    ],
)
def test_what_is_wrong_is_told_in_one_line_before_the_work(
    tmp_path: Path, text: str, sections: dict[str, Any], message: str
) -> None:
    made = recipe(written(tmp_path / "x.txt", text), **sections)
    with pytest.raises((ValueError, OSError)) as caught:
        language.train(made, tmp_path / "run", Told())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "parameters"), [("shakespeare-char-small", 0.80), ("shakespeare-char", 10.65), ("wikitext-2", 5.26)]
)
def test_the_recipes_train(name: str, parameters: float, tmp_path: Path) -> None:
    """The size is that of the recipe; with one layer it trains for two steps on a little text."""
    tree = find_recipe(name).tree()
    with torch.device("meta"):
        model = GPT(GPTConfig(**tree["model"]), 8000 if name == "wikitext-2" else 69)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(parameters, abs=0.01)
    path = written(tmp_path / "x.txt", echoes(2000) + " \n" * 20)
    tree["data"] |= {"train": str(path), "validation": "", "held_out_share": 0.1}
    tree["model"]["num_layers"] = 1
    tree["training"] |= {"steps": 2, "batch_tokens": tree["model"]["max_len"], "samples": 0}
    assert math.isfinite(language.train(Recipe.make(tree), tmp_path / "run", Told()).metrics["loss"])


def test_shakespeare_is_cut_as_nanogpt_cuts_it(weft_data: Path) -> None:
    data = language.prepared(find_recipe("shakespeare-char-small"), Told())
    assert (len(data.store.tokens), len(data.validation.tokens)) == (1_003_854, 111_540)
    assert data.tokenizer.vocab_size == 4 + 65
    assert data.validation.facts.unknown == 0
    assert data.batches.at(0).tokens.shape == (12, 65)
    assert torch.equal(data.batches.at(7).tokens, data.batches.at(7).tokens)
