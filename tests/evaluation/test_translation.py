"""Scores are sacreBLEU's own, on any number of references; validation measures what it says."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft import folder
from weft.api import Translator
from weft.config import EOS, PAD, Recipe
from weft.data.batching import Batch
from weft.data.corpora import open_pairs
from weft.data.store import prepare
from weft.data.vocabulary import make_pair
from weft.evaluation import translation as evaluation
from weft.evaluation.translation import (
    Sentences,
    compare,
    evaluate,
    evaluate_folder,
    score,
    sentences,
    validation_loss,
    validator,
)
from weft.models import build

REFERENCES = [
    "A man is sleeping on the green couch.",
    "The dog runs home, as it always does!",
    "Two birds sing a song in the old tree.",
    "Children play football in the street at 10:30.",
    "An old woman sells fish — fresh fish — at the market.",
]
SECOND = [
    "A man sleeps on a green sofa.",
    "The dog is running home as always.",
    "In the old tree, two birds are singing.",
    "Kids are playing football on the street at half past ten.",
    "Fresh fish is sold by an old woman at the market.",
]
GOOD = [
    "A man is sleeping on a green couch.",
    "The dog runs home as it always does.",
    "Two birds sing in the old tree.",
    "Children play football on the street at 10:30.",
    "An old woman sells fresh fish at the market.",
]
POOR = [
    "A man sleeps.",
    "A dog is home always, as the dog does.",
    "birds in tree Two",
    "Football in the street with children, at 10:30.",
    "Old fish is fresh.",
]


def shell(tmp_path: Path, systems: Sequence[Sequence[str]], columns: Sequence[Sequence[str]], *options: str) -> str:
    """What sacreBLEU's own command prints for these lines."""
    files = []
    for number, lines in enumerate([*columns, *systems]):
        path = tmp_path / f"{number}.txt"
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        files.append(str(path))
    command = [sys.executable, "-m", "sacrebleu", *files[: len(columns)], "-i", *files[len(columns) :]]
    command += ["-m", "bleu", "chrf", "-w", "8", "-q", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("columns", "tokenize", "lowercase"),
    [
        ([REFERENCES], "13a", False),
        ([REFERENCES, SECOND], "13a", True),
        ([REFERENCES], "none", False),
        ([REFERENCES, SECOND], "char", False),
    ],
)
def test_scores_are_those_of_the_sacrebleu_command(
    columns: list[list[str]], tokenize: str, lowercase: bool, tmp_path: Path
) -> None:
    small = ["-lc", "--chrf-lowercase"] if lowercase else []
    bleu, chrf = json.loads(shell(tmp_path, [GOOD], columns, "-tok", tokenize, *small))
    found = score(GOOD, [list(each) for each in zip(*columns, strict=True)], tokenize, lowercase)
    assert found.bleu == pytest.approx(bleu["score"], abs=1e-8)
    assert found.chrf == pytest.approx(chrf["score"], abs=1e-8)
    assert (found.bleu_signature, found.chrf_signature) == (bleu["signature"], chrf["signature"])


def test_the_comparison_is_that_of_the_sacrebleu_command(tmp_path: Path) -> None:
    table = shell(tmp_path, [POOR, GOOD], [REFERENCES], "--paired-bs", "-pbsn", "200", "-f", "text")
    # Each row: score (mean ± interval) of BLEU and chrF; below the system's, its p-values.
    cells = re.findall(r"([\d.]+) \([\d.]+ ± ([\d.]+)\)", table)
    p_values = re.findall(r"\(p = ([\d.]+)\)", table)
    assert len(cells) == 4
    found = compare(POOR, GOOD, [[line] for line in REFERENCES], samples=200)
    for number, mine in enumerate((found.bleu, found.chrf)):
        theirs = [float(value) for value in (*cells[number], *cells[2 + number])]
        assert [mine.baseline, mine.baseline_ci, mine.system, mine.system_ci] == pytest.approx(theirs, abs=1e-6)
        assert mine.p_value == pytest.approx(float(p_values[number]), abs=1e-4)
        assert mine.signature in table
        assert "bs:200|seed:12345" in mine.signature
    assert found == compare(POOR, GOOD, [[line] for line in REFERENCES], samples=200)


def test_equal_systems_do_not_differ() -> None:
    found = compare(GOOD, GOOD, [[line] for line in REFERENCES], samples=50)
    assert found.bleu.baseline == found.bleu.system
    assert found.bleu.p_value == found.chrf.p_value == 1.0
    # Other words, but none of them right: no difference either.
    found = compare(["x x x x x"] * 5, ["y y y y y"] * 5, [["a b c d e"]] * 5, samples=50)
    assert (found.bleu.baseline, found.bleu.system, found.bleu.p_value) == (0.0, 0.0, 1.0)


@given(st.data())
def test_sentences_may_have_different_numbers_of_references(data: st.DataObject) -> None:
    pool = st.sampled_from([*REFERENCES, *SECOND])
    ragged = [data.draw(st.lists(pool, min_size=1, max_size=4)) for _ in GOOD]
    # A reference twice counts as once, so a table filled up with repetitions must score the same.
    full = [[*each, *[each[0]] * (4 - len(each))] for each in ragged]
    mine, theirs = score(GOOD, ragged), score(GOOD, full)
    assert mine.bleu == pytest.approx(theirs.bleu, abs=1e-9)
    assert mine.chrf == pytest.approx(theirs.chrf, abs=1e-9)
    counts = {len(each) for each in ragged}
    assert mine.bleu_signature.startswith(f"nrefs:{counts.pop() if len(counts) == 1 else 'var'}|")


def test_more_references_can_only_match_more() -> None:
    one, two = (
        score(GOOD, [[line] for line in REFERENCES]),
        score(GOOD, [*map(list, zip(REFERENCES, SECOND, strict=True))]),
    )
    assert two.bleu > one.bleu
    assert "nrefs:2" in two.bleu_signature


def test_what_cannot_be_scored_is_told() -> None:
    with pytest.raises(ValueError, match="5 sentences, but references for 4"):
        score(GOOD, [[line] for line in REFERENCES[:4]])
    with pytest.raises(ValueError, match="sentence 2 has no reference"):
        score(GOOD[:2], [["a"], []])
    with pytest.raises(ValueError, match="nothing to score"):
        score([], [])
    with pytest.raises(ValueError, match=r"tokenize must be one of .* not '13b'; did you mean '13a'"):
        score(GOOD, [[line] for line in REFERENCES], "13b")
    with pytest.raises(ValueError, match="there are 4 sentences"):
        compare(GOOD, GOOD[:4], [[line] for line in REFERENCES])


LINES = ["a man sleeps", "the dog runs home", "two birds sing a song", "a dog sings"]
OTHERS = ["ein mann schläft", "der hund rennt heim", "zwei vögel singen ein lied", "ein hund singt"]


def translator_of(seed: int = 3, **model: Any) -> Translator:
    sizes = {"dim": 16, "num_heads": 2, "ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 1, "dropout": 0.3}
    tree = {
        "data": {"source": "en", "target": "de"},
        "tokenizer": {"kind": "char"},
        "model": {"family": "transformer", **sizes, **model},
        "decoding": {"beam": 2, "max_ratio": 1.0, "max_extra": 4},
    }
    recipe = Recipe.make(tree)
    pair = make_pair(recipe.tokenizer, lambda: iter(LINES), lambda: iter(OTHERS))
    torch.manual_seed(seed)
    network = build(recipe.model, pair.source.vocab_size, pair.target.vocab_size)
    for name, parameter in network.named_parameters():
        if parameter.dim() > 1:
            parameter.data *= 2.0 if "embedding" not in name else 4.0
    return Translator(network.eval(), recipe, pair)


@pytest.fixture(scope="module")
def translator() -> Translator:
    return translator_of()


def test_evaluate_translates_and_counts(translator: Translator) -> None:
    found = translator.translate(LINES, beam=3)
    own = [[each.text] for each in found]
    report = evaluate(translator, LINES, own, beam=3, tokenize="char")
    assert report.scores.bleu == pytest.approx(100.0)
    assert report.scores.bleu_signature.startswith("nrefs:1")
    assert "tok:char" in report.scores.bleu_signature
    assert report.sentences == 4
    assert report.target_tokens == sum(len(each.tokens) for each in found)
    assert report.translations == tuple(each.text for each in found)
    assert report.decoding["beam"] == 3
    assert report.tokens_per_second == pytest.approx(report.target_tokens / report.seconds)
    assert evaluate(translator, LINES, [[line] for line in OTHERS], beam=1).scores.bleu < 50


def test_the_report_is_told_as_json_and_on_a_screen(translator: Translator) -> None:
    report = evaluate(translator, LINES, [[line] for line in OTHERS])
    tree = json.loads(report.json())
    assert tree["scores"]["bleu"] == report.scores.bleu
    assert tree["tokens_per_second"] == report.tokens_per_second
    assert "translations" not in tree
    text = report.text()
    assert report.scores.bleu_signature in text
    assert "4 sentences" in text
    assert len(text.splitlines()) <= 24
    drawn = evaluate(translator, LINES, [[line] for line in OTHERS], sample=True, temperature=0.5)
    assert json.loads(drawn.json())["decoding"]["sampling"]["temperature"] == 0.5


def test_a_folder_is_evaluated_and_compared(translator: Translator, tmp_path: Path) -> None:
    folder.save(tmp_path / "new", translator.model, translator.recipe, translator.tokenizers, "")
    other = translator_of(seed=4)
    folder.save(tmp_path / "old", other.model, other.recipe, other.tokenizers, "")
    data = tmp_path / "test.tsv"
    data.write_text("".join(f"{a}\t{b}\n" for a, b in zip(LINES, OTHERS, strict=True)))
    out = tmp_path / "out.txt"
    report = evaluate_folder(tmp_path / "new", [str(data)], tmp_path / "old", output=out, precision="fp32", beam=2)
    assert out.read_text() == "".join(f"{text}\n" for text in report.translations)
    assert report.comparison is not None
    assert report.comparison.bleu.system == pytest.approx(report.scores.bleu)
    alone = evaluate_folder(tmp_path / "old", [str(data)], precision="fp32", beam=2)
    assert report.comparison.chrf.baseline == pytest.approx(alone.scores.chrf)
    assert alone.comparison is None
    assert "baseline" in report.text()
    assert json.loads(report.json())["comparison"]["bleu"]["p_value"] == report.comparison.bleu.p_value
    with pytest.raises(FileNotFoundError, match=r"no folder .*gone"):
        evaluate_folder(tmp_path / "new", str(data), output=tmp_path / "gone" / "out.txt")


def test_the_model_s_own_direction_is_read(translator: Translator, tmp_path: Path) -> None:
    turned = translator.recipe.changed(data={"swap": True})
    folder.save(tmp_path / "m", translator.model, turned, translator.tokenizers, "")
    data = tmp_path / "test.tsv"
    data.write_text("".join(f"{b}\t{a}\n" for a, b in zip(LINES, OTHERS, strict=True)))
    report = evaluate_folder(tmp_path / "m", str(data), precision="fp32")
    assert report.translations == tuple(each.text for each in translator.translate(LINES))


def test_a_wrong_tokenizer_is_told_before_the_work(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Translator, "translate", lambda *a, **k: pytest.fail("it was translated"))
    with pytest.raises(ValueError, match="not '14a'"):
        evaluate(translator, LINES, [[line] for line in OTHERS], tokenize="14a")


def test_lines_are_scored_one_by_one_unless_a_sentence_has_several_translations(tmp_path: Path) -> None:
    from dataclasses import replace

    data = tmp_path / "a.tsv"
    data.write_text("a\tx\nb\ty\na\tz\n")
    pairs = open_pairs(str(data))
    assert sentences(pairs) == (["a", "b", "a"], [["x"], ["y"], ["z"]])
    assert sentences(replace(pairs, several=True)) == (["a", "b"], [["x", "z"], ["y"]])


def batches_of(translator: Translator, pairs: Sequence[tuple[str, str]]) -> Batch:
    tokenizers = translator.tokenizers
    sources = [[*tokenizers.source.encode(source), EOS] for source, _ in pairs]
    targets = [[1, *tokenizers.target.encode(target), EOS] for _, target in pairs]

    def padded(rows: list[list[int]]) -> torch.Tensor:
        return torch.tensor([[*row, *[PAD] * (max(map(len, rows)) - len(row))] for row in rows])

    return Batch(padded(sources), padded(targets))


def nll(translator: Translator, source: str, target: str) -> tuple[float, int]:
    """The sum and the count, by the whole table of logits."""
    batch, model = batches_of(translator, [(source, target)]), cast(Any, translator.model)
    with torch.no_grad():
        hidden, _ = model.step(batch.target[:, :-1], model.start(batch.source))
        log_probs = model.logits(hidden)[0].log_softmax(-1)
    return -float(log_probs.gather(1, batch.target[0, 1:, None]).sum()), batch.target.shape[1] - 1


def test_the_validation_loss_is_the_mean_over_target_tokens(translator: Translator) -> None:
    pairs = list(zip(LINES, OTHERS, strict=True))
    expected = [nll(translator, *pair) for pair in pairs]
    mean = sum(total for total, _ in expected) / sum(count for _, count in expected)
    model = translator.model
    model.train()  # dropout must not matter
    try:
        apart = validation_loss(model, (batches_of(translator, [pair]) for pair in pairs))
        uneven = validation_loss(model, [batches_of(translator, pairs[:3]), batches_of(translator, pairs[3:])])
        assert model.training
    finally:
        model.eval()
    for found in (apart, uneven):
        assert found["loss"] == pytest.approx(mean, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(mean), rel=1e-4)


def test_pairs_that_the_model_cannot_take_do_not_count() -> None:
    translator = translator_of(max_len=20, positions="learned")
    pairs = [("a man sleeps", "ein mann"), ("a man " * 6, "ein mann"), ("a dog", "der hund " * 6), ("song", "lied")]
    found = validation_loss(translator.model, [batches_of(translator, pairs)])
    kept = [nll(translator, *pairs[0]), nll(translator, *pairs[3])]
    assert found["loss"] == pytest.approx(sum(t for t, _ in kept) / sum(c for _, c in kept), rel=1e-5)
    edge = "a" * 19, "i" * 19  # 20 with the end token on the one side and the begin token on the other
    total, count = nll(translator, *edge)
    found = validation_loss(translator.model, [batches_of(translator, [edge, pairs[1], pairs[2]])])
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
    with pytest.raises(ValueError, match="no validation pair that the model can take"):
        validation_loss(translator.model, [batches_of(translator, pairs[1:3])])


class Text:
    """Pairs as a store wants them."""

    name = "text"

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self.pairs = pairs

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.pairs)

    def fingerprint(self) -> str:
        return str(hash(tuple(self.pairs)))

    def place(self, index: int) -> str:
        return f"text:{index + 1}"


def test_the_validator_gives_loss_and_greedy_bleu(translator: Translator, tmp_path: Path) -> None:
    pairs = list(zip(LINES, OTHERS, strict=True))
    store = prepare(Text(pairs), translator.tokenizers, translator.recipe.data, tmp_path)
    only_loss = validator(store, translator.tokenizers, translator.recipe)(translator.model)
    whole = validation_loss(translator.model, [batches_of(translator, pairs)])
    assert only_loss.keys() == {"loss", "perplexity"}
    assert only_loss["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    said = [each.text for each in translator.translate(LINES, beam=1)]
    both = validator(store, translator.tokenizers, translator.recipe, [Sentences(LINES, [[text] for text in said])])
    translator.model.train()
    try:
        found = both(translator.model)
        assert translator.model.training
    finally:
        translator.model.eval()
    assert found["bleu"] == pytest.approx(score(said, [[text] for text in said]).bleu)
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    wrong = validator(store, translator.tokenizers, translator.recipe, [Sentences(LINES, [[text] for text in OTHERS])])
    assert wrong(translator.model)["bleu"] < 50


def test_validation_translates_greedily(translator: Translator, monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[list[str]] = []
    really = evaluation.score
    monkeypatch.setattr(evaluation, "score", lambda texts, *rest: scored.append(texts) or really(texts, *rest))
    evaluation.validation_bleu(translator, [Sentences(LINES, [[line] for line in OTHERS])])
    assert scored == [[each.text for each in translator.translate(LINES, beam=1)]]
    assert scored != [[each.text for each in translator.translate(LINES)]]


def test_too_long_a_source_costs_bleu_but_no_run() -> None:
    translator = translator_of(max_len=20, positions="learned")
    said = translator.translate(LINES[0], beam=1).text
    found = evaluation.validation_bleu(translator, [Sentences([LINES[0], "a" * 30], [[said], ["b b b b"]])])
    assert found == pytest.approx(score([said, ""], [[said], ["b b b b"]]).bleu)
