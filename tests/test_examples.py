"""The examples run as a newcomer runs them, and learn what they say."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import weft
from examples import alignment, reverse
from weft.data.synthetic import BOS, EOS, FIRST, PAD, is_held_out
from weft.views.matrix import Matrix

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=cwd, timeout=300)


@pytest.mark.parametrize("name", ["reverse.py", "alignment.py"])
def test_a_short_run_prints_a_map_and_writes_what_was_asked_for(name: str, tmp_path: Path) -> None:
    done = run(name, "--steps", "2", "--seed", "1", "--save", "map.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"^step +2  loss \d\.\d{4} +\d+\.\d s$", done.stdout, re.MULTILINE)
    assert "after the softmax" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["map.png"]
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("example", [reverse, alignment], ids=["reverse", "alignment"])
@pytest.mark.parametrize("wrong", [["--steps", "many"], ["--steps", "0"], ["--nothing"]], ids=" ".join)
def test_wrong_arguments_are_usage_errors(
    example: ModuleType, wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["example", *wrong])
    with pytest.raises(SystemExit) as stopped:
        example.main()
    printed = capsys.readouterr()
    assert stopped.value.code == 2
    assert printed.err.startswith("usage: example")
    assert printed.out == ""


def test_the_word_that_is_shown_is_held_out() -> None:
    assert is_held_out(torch.tensor([[FIRST + ord(letter) - ord("a") for letter in reverse.WORD]])).all()
    assert reverse.TASK.min_len <= len(reverse.WORD) <= reverse.TASK.max_len


def test_reversing_step_by_step_is_the_argmax_of_all_at_once() -> None:
    model = reverse.Reverser()
    source, _ = next(reverse.TASK.batches(16, 0))
    said = model.reverse(source)
    bos = torch.full((16, 1), BOS)
    with torch.no_grad():
        best = model(source, torch.cat((bos, said[:, :-1]), 1)).argmax(-1)
    ended = ((said == EOS).cumsum(1) - (said == EOS).int()) > 0
    assert torch.equal(said, best.masked_fill(ended, PAD))


def test_accuracy_counts_whole_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = reverse.Reverser()
    batch = next(reverse.TASK.batches(4, 0))
    right = batch.target[:, 1:].clone()
    right[0, 0] = FIRST + (right[0, 0] - FIRST + 1) % 26
    monkeypatch.setattr(model, "reverse", lambda source: right)
    assert reverse.accuracy(model, batch) == 0.75


def test_reverse_learns_quickly_and_looks_backwards() -> None:
    reverse.train(model := reverse.Reverser(), 250, 0)
    held_out = next(reverse.TASK.batches(200, 0, held_out=True))
    assert reverse.accuracy(model, held_out) > 0.8
    _, matrix = reverse.look(model, reverse.WORD)
    length = len(reverse.WORD)
    strongest = matrix.weights[:length].argmax(1)
    backwards = torch.arange(length).flip(0)
    assert ((strongest - backwards).abs() <= 1).float().mean() > 0.8


@pytest.mark.long
def test_the_example_reverses_nearly_every_word(tmp_path: Path) -> None:
    for seed in ("0", "1", "2"):
        done = run("reverse.py", "--seed", seed, cwd=tmp_path)
        accuracy = re.search(r"right on (\d+\.\d)% of 1,000 held-out words", done.stdout)
        assert accuracy is not None
        assert float(accuracy[1]) >= 99
        assert f"{reverse.WORD} -> {reverse.WORD[::-1]}" in done.stdout


def test_the_sentences_of_the_grammar() -> None:
    rng = random.Random(0)
    pairs = [alignment.sentence(rng) for _ in range(5000)]
    assert {word for english, _ in pairs for word in english} <= set(alignment.ENGLISH)
    assert {word for _, french in pairs for word in french} <= set(alignment.FRENCH)
    assert set(alignment.SENTENCE.split()) <= set(alignment.ENGLISH)
    assert set(alignment.ANSWER.split()) <= set(alignment.FRENCH)
    assert alignment.SENTENCE not in {" ".join(english) for english, _ in pairs}
    phrases = {
        " ".join(english): " ".join(french) for english, french, _ in (alignment.phrase(rng) for _ in range(9000))
    }
    by_hand = {
        "the union": "l' union",
        "the common law": "la loi commune",
        "the European social budget": "le budget social européen",
        "the national agreement": "l' accord national",
        "the European Economic Area": "la zone économique européenne",
    }
    assert {english: phrases[english] for english in by_hand} == by_hand
    verb = re.compile(r" (?:a été|est) (?:signé|publié|discuté)(e?) ")
    for _, french in pairs:
        subject = " ".join(french)
        agrees = verb.search(subject)
        assert agrees is not None
        assert bool(agrees[1]) == any(subject.split()[1] == noun for noun in alignment.FEMININE.values())


def test_where_the_order_turns() -> None:
    weights = torch.zeros(7, 6)
    weights[torch.arange(7), torch.tensor([0, 3, 2, 1, 4, 5, 0])] = 1.0  # the last row, the end, does not count
    assert alignment.turned(Matrix(weights)) == [(1, 3)]
    assert alignment.turned(Matrix(torch.eye(4))) == []
    weights = torch.zeros(6, 5)
    weights[torch.arange(6), torch.tensor([1, 0, 2, 4, 3, 0])] = 1.0
    assert alignment.turned(Matrix(weights)) == [(0, 1), (3, 4)]


def test_translating_step_by_step_is_what_was_trained() -> None:
    model = alignment.Translator(dim=16)
    english = alignment.SENTENCE.split()
    french, weights = model.translate(english)
    source = alignment.tokens([[*english, alignment.EOS]], alignment.ENGLISH)
    target = alignment.tokens([[alignment.BOS, *french[:-1]]], alignment.FRENCH)
    with weft.record(model) as seen, torch.no_grad():
        best = model(source, target).argmax(-1)[0]
    assert [alignment.FRENCH[token] for token in best.tolist()] == french
    assert torch.allclose(weights, seen["decoder.attention"].weights[0, 0], atol=1e-6)


@pytest.mark.long
def test_the_translator_finds_the_alignment(tmp_path: Path) -> None:
    for seed in ("0", "1", "2"):
        done = run("alignment.py", "--seed", seed, cwd=tmp_path)
        assert f"{alignment.SENTENCE}\n{alignment.ANSWER}\n" in done.stdout
        assert "other order: zone économique européenne <- Area Economic European" in done.stdout
