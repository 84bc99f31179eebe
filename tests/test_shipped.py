"""The models that come with weft: what their cards promise, and what a newcomer may throw at them."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path

import pytest

import weft
from benchmarks import robustness
from weft import cli, folder
from weft.api import LanguageModel, Translator, load_language_model, load_translator
from weft.evaluation.translation import Report, evaluate_folder

LIMIT = 25_000_000  # bytes of all that a model brings along


@pytest.fixture(scope="module")
def translator() -> Translator:
    return load_translator("tatoeba")


@pytest.fixture(scope="module")
def shakespeare() -> LanguageModel:
    return load_language_model("shakespeare")


def test_they_are_known_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert folder.names() == ["shakespeare", "tatoeba"]
    assert cli.main(["models"]) == 0
    printed = capsys.readouterr().out
    assert "tatoeba: translates between en, es, fr, de, each to each; " in printed
    assert "shakespeare: goes on with a text, of which it sees the last " in printed
    assert isinstance(weft.load("tatoeba"), Translator)


@pytest.mark.parametrize("name", ["tatoeba", "shakespeare"])
def test_they_are_small_and_have_a_card(name: str) -> None:
    place = folder.SHIPPED / name
    assert sum(path.stat().st_size for path in place.iterdir()) < LIMIT
    card = folder.card_of(name)
    for part in ("## Data", "Licence", "## Results", "## Command", "weft train"):
        assert part in card


def test_the_card_names_whose_sentences_they_are() -> None:
    card = folder.card_of("tatoeba")
    for part in ("CC BY 2.0 FR", "tatoeba.org", "manythings.org/anki", "## Limits", "nrefs:var"):
        assert part in card


@pytest.mark.parametrize("text", ["we are eating bread", "We are eating bread.", "WE ARE EATING BREAD"])
def test_the_lectures_sentence(translator: Translator, text: str) -> None:
    found = translator.translate(text, to="es").text
    assert re.sub(r"\W+", " ", found.lower()).strip() in ("estamos comiendo pan", "nosotros estamos comiendo pan")


def test_text_of_every_kind_gives_a_line_each(translator: Translator) -> None:
    for target in ("es", "fr", "de"):
        outcomes = robustness.tried(translator, target, None)
        assert len(outcomes) == len(robustness.CASES)
        for outcome in outcomes:
            assert bool(outcome.translation.strip()) == bool(outcome.case.text.strip()), outcome.case.what
            assert "<unk>" not in outcome.translation or not outcome.case.text.isascii()


@pytest.mark.parametrize("target", ["es", "fr", "de"])
def test_numbers_and_addresses_are_carried_over(translator: Translator, target: str) -> None:
    wanted = {"a number", "a large number", "decimals", "a time", "an address", "mail"}
    cases = [case for case in robustness.CASES if case.what in wanted]
    assert len(cases) == len(wanted)
    for outcome in robustness.tried(translator, target, "en", cases):
        assert outcome.kept == outcome.wanted, outcome


def test_what_cannot_be_carried_over_is_translated_as_it_stands(translator: Translator) -> None:
    """Rather than told with a number that stood for another."""
    text = "Between 1.5, 2.5, 3.5, 4.5 and 5.5 there are 6.5, 7.5 and 8.5, or 9:30 on 12/05/2024."
    for target in ("es", "fr", "de"):
        found = translator.translate(text, to=target, from_="en").text
        assert not re.search(r"735|385|648|274|596|817", found)
    assert translator.translate("https://a.org/b", to="de").text == "https://a.org/b"


def test_the_language_of_a_text_is_told(translator: Translator) -> None:
    sentences = {
        "en": "Where is the station?",
        "es": "¿Dónde está la estación?",
        "fr": "Où est la gare ?",
        "de": "Wo ist der Bahnhof?",
    }
    for language, sentence in sentences.items():
        assert next(iter(translator.detect(sentence))) == language
        assert translator.translate(sentence, to=language).text == sentence


def test_it_scores_what_the_sample_promises() -> None:
    """On validation text, so that the test set stays for the card: a model that is broken or another misses by far."""
    report = evaluate_folder("tatoeba", "tatoeba-sample:validation", source="en", to="es", beam=1)
    assert isinstance(report, Report)
    assert report.scores.bleu > 35


def test_the_small_gpt_writes_plays(shakespeare: LanguageModel) -> None:
    text = shakespeare.generate("ROMEO:", max_tokens=300, seed=1).text
    words = re.findall(r"[a-z]+", text.lower())
    assert len(words) > 20
    common = {"the", "and", "to", "of", "i", "you", "my", "a", "that", "in", "is", "not", "be", "it", "thou", "with"}
    assert sum(word in common for word in words) / len(words) > 0.15
    assert shakespeare.generate("ROMEO:", max_tokens=30, seed=1).text == text[:30]


def test_what_is_left_out_means_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["translate", "--to", "es", "we are eating bread"]) == 0
    short = capsys.readouterr().out
    assert cli.main(["translate", "tatoeba", "--to", "es", "we are eating bread"]) == 0
    assert capsys.readouterr().out == short
    assert cli.main(["look", "--to", "es", "we are eating bread", "--out", str(tmp_path / "page.html")]) == 0
    assert short.strip() in capsys.readouterr().out
    assert cli.main(["generate", "ROMEO:", "--max-tokens", "5", "--seed", "1"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["translate", "we are here"], "say which"),
        (["translate", "--to", "it", "we are here"], "translates to en or es or fr or de"),
        (["translate", "tatoebe", "we are here"], "did you mean 'tatoeba'?"),
        (["generate", "tatoeba", "x"], "does not generate"),
        (["translate", "shakespeare", "x"], "does not translate"),
        (["look", "one", "two", "three"], "no model 'one'"),
        (["look", "tatoeba"], "give it a text"),
        (["look", "missing.record"], "missing.record"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.skipif("WEFT_DATA" not in os.environ, reason="WEFT_DATA is not set")
def test_the_card_was_made_from_the_test_set_as_it_is() -> None:
    """Counts of references in the card's signature are those of the files."""
    place = Path(os.environ["WEFT_DATA"], "tatoeba", "en-es", "test.tsv.gz")
    with gzip.open(place, "rt", encoding="utf-8") as file:
        sentences = {line.split("\t")[0] for line in file}
    assert f"{len(sentences):,}" in folder.card_of("tatoeba")
