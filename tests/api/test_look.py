"""Everything a model looked at, put together with its labels: for translators, language models and saved records."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api.test_language_model import model_of
from tests.api.test_translator import translator_of
from weft import api, cli
from weft.api import LanguageModel, Look, Translator
from weft.observe import Record

RECURRENT = {"family": "recurrent", "dim": 16, "embed_dim": 12}
CONVOLUTIONAL = {"family": "convolutional", "dim": 16, "embed_dim": 12, "encoder_layers": 1, "decoder_layers": 2}


@pytest.fixture(scope="module")
def translator() -> Translator:
    return translator_of("bpe", model={"family": "transformer", "dim": 16, "num_heads": 2, "ffn_dim": 32})


@pytest.fixture(scope="module")
def language_model() -> LanguageModel:
    return model_of()


@pytest.mark.parametrize("model", [None, RECURRENT, CONVOLUTIONAL])
@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 4}, {"sample": True, "seed": 2}])
def test_labels_fit_and_the_alignment_is_that_of_the_answer(model: Any, options: Any) -> None:
    changes = {} if model is None else {"model": model}
    translator = translator_of("bpe", **changes)
    found = translator.translate("the dog runs home", **options)
    look = translator.look("the dog runs home", **options)
    about = look.record.about
    assert about["target_text"] == found.text, "looking changes nothing"
    for entry in look.record.of_kind("weights"):
        assert entry.queries is not None
        assert entry.keys is not None
        assert (len(entry.queries), len(entry.keys)) == entry.weights.shape[-2:]
        sums = entry.weights.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))
    roles = {entry.role for entry in look.record.of_kind("weights")}
    assert "cross" in roles
    assert roles <= {"encoder self", "decoder self", "cross"}
    expected = found.attention.weights
    torch.testing.assert_close(look.matrix.weights, expected[: len(look.matrix.weights)], rtol=0.0, atol=1e-5)
    assert len(about["target"]) == len(about["search"]["candidates"]) == len(look.matrix.weights)
    assert about["source"][-1] == translator.tokenizers.source.tokens([2])[0]


@pytest.mark.parametrize("beam", [1, 4])
def test_the_search_is_told_from_step_to_step(translator: Translator, beam: int) -> None:
    found = translator.translate("the dog runs home", beam=beam)
    search = translator.look("the dog runs home", beam=beam).record.about["search"]
    assert search["kind"] == ("beam" if beam > 1 else "greedy")
    score = pytest.approx(found.score, abs=1e-5)  # what is watched runs in torch, what is not may be compiled
    assert search["finished"][0] == {"text": found.text, "score": score}
    path = [[row for row in step if row["chosen"]] for step in search["steps"]]
    said = [row["token"] for rows in path for row in rows]
    tokens = [label.replace("▁", " ") for label in found.tokens]
    assert said[: len(tokens)] == tokens
    probabilities = [row["p"] for rows in path for row in rows]
    expected = torch.tensor(found.n_best[0].token_log_probs).exp().tolist()
    assert probabilities[: len(expected)] == pytest.approx(expected, abs=1e-6)
    for before, step in pairwise(search["steps"]):
        rows = {row["row"] for row in before if not row["end"]}
        assert {row["parent"] for row in step} <= rows
        assert len([row for row in step if not row["end"]]) <= beam
    for position, token in enumerate(tokens):
        chosen = [each for each in search["candidates"][position] if each["chosen"]]
        assert [each["token"] for each in chosen] in ([token], [])
        ranked = [each["p"] for each in search["candidates"][position]]
        assert ranked == sorted(ranked, reverse=True)


def test_a_given_target_is_looked_at_as_it_is(translator: Translator) -> None:
    look = translator.look("a man sleeps", "der hund")
    assert look.record.about["target_text"] == "der hund"
    assert look.record.about["search"]["kind"] == "forced"
    torch.testing.assert_close(look.matrix.weights, translator.align("a man sleeps", "der hund").weights)
    scored = translator.score("a man sleeps", "der hund").n_best[0]
    ids = [*scored.ids, 2]
    for place, (token, log_prob) in enumerate(zip(ids, scored.token_log_probs, strict=True)):
        label = translator.tokenizers.target.tokens([token])[0].replace("▁", " ")
        found = [each["p"] for each in look.record.about["search"]["candidates"][place] if each["chosen"]]
        assert found in ([pytest.approx(torch.tensor(log_prob).exp().item(), rel=1e-4)], []), label
    with pytest.raises(ValueError, match="beam: nothing is searched for"):
        translator.look("a man", "ein mann", beam=2)
    with pytest.raises(ValueError, match="the text is blank"):
        translator.look("  ")


def test_the_alignment_can_be_between_words(translator: Translator) -> None:
    look = translator.look("the dog runs home", "der hund rennt heim")
    words = look.aligned(words=True)
    assert words.keys == ["the", "dog", "runs", "home", "</s>"]
    assert words.queries == ["der", "hund", "rennt", "heim", "</s>"]
    torch.testing.assert_close(words.weights.sum(-1), torch.ones(5))
    columns = [number for number, word in enumerate(look.record.about["words"]["source"]) if word == 1]
    pieces = look.matrix.weights[:, columns].sum(1)
    rows = [number for number, word in enumerate(look.record.about["words"]["target"]) if word == 2]
    assert float(words.weights[2, 1]) == pytest.approx(float(pieces[rows].mean()), abs=1e-6)
    assert "rennt" in look.draw(words=True)


def test_words_are_the_tokens_between_spaces(translator: Translator) -> None:
    about = translator.look("the dog runs home", beam=1).record.about
    labels, words = about["source"], about["words"]["source"]
    joined: dict[int, str] = {}
    for label, word in zip(labels, words, strict=True):
        joined[word] = joined.get(word, "") + label
    assert [word.strip() for word in joined.values()] == ["the", "dog", "runs", "home", labels[-1]]
    assert "words" not in translator_of("word").look("the dog").record.about["words"]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 4}, {"beam": 3}])
def test_a_language_model_shows_the_prompt_and_how_it_goes_on(language_model: LanguageModel, options: Any) -> None:
    found = language_model.generate("O Romeo", max_tokens=5, **options)
    look = language_model.look("O Romeo", max_tokens=5, **options)
    record = look.record
    assert record.about["target_text"] == found.text
    count = len(found.prompt_ids) + len(found.n_best[0].ids)
    assert len(record.about["source"]) == count
    with torch.no_grad(), api_record(language_model) as at_once:
        language_model.model(torch.tensor([[*found.prompt_ids, *found.n_best[0].ids]]))
    for entry in record.of_kind("weights"):
        rows = entry.weights.shape[2]
        expected = at_once[entry.name].weights[:, :, :rows, :rows]
        torch.testing.assert_close(entry.weights, expected, rtol=0.0, atol=1e-5)
    assert record.about["search"]["first"] == len(found.prompt_ids) - 1
    if "beam" in options:
        assert "walk" not in record.about, "a beam's first token is chosen at its end"
        return
    walk = record.calls("", "walk")[0]
    assert record.about["walk"]["chosen"] == record.about["source"][len(found.prompt_ids)]
    assert record.about["walk"]["labels"] == record.about["source"][: len(found.prompt_ids)]
    torch.testing.assert_close(
        walk["weights"][0], at_once["blocks.0.attention"].weights[0, :, :7, :7], rtol=0.0, atol=1e-5
    )


def api_record(model: LanguageModel) -> Any:
    import weft

    return weft.record(model)


def test_a_text_ends_with_the_context(language_model: LanguageModel) -> None:
    look = language_model.look("O Romeo", sample=False, max_tokens=500)
    assert len(look.record.about["source"]) <= 32
    with pytest.raises(ValueError, match="40 tokens, and the context ends at 32"):
        language_model.look("O" * 40)
    with pytest.raises(ValueError, match="one continuation"):
        language_model.look("O", n=2)


def test_exact_and_drawn_answers_are_looked_at_too(translator: Translator) -> None:
    exact = translator.look("the dog runs home", exact=True)
    assert exact.record.about["target_text"] == translator.translate("the dog runs home", exact=True).text
    assert exact.matrix.weights.shape == (len(exact.record.about["target"]), len(exact.record.about["source"]))
    drawn = translator.look("the dog runs home", sample=True, seed=5).record.about["search"]
    assert drawn["kind"] == "sample"
    taken = [[each["token"] for each in step if each["chosen"]] for step in drawn["steps"]]
    for tokens, candidates in zip(taken, drawn["candidates"], strict=False):
        assert [each["token"] for each in candidates if each["chosen"]] == tokens, "what was drawn is among them"
    with pytest.raises(ValueError, match="one translation that is drawn"):
        translator.look("the dog", sample=True, n_best=3)


def test_a_model_without_attention_is_looked_at_without(capsys: pytest.CaptureFixture[str]) -> None:
    model = translator_of("bpe", model={"family": "recurrent", "dim": 16, "embed_dim": 8, "attention": "none"})
    look = model.look("the dog", beam=1)
    assert "no attention was recorded" in str(look)
    assert "<html" in look.page()
    with pytest.raises(ValueError, match="no attention was recorded"):
        look.aligned()


def test_max_tokens_is_as_the_recipe_says() -> None:
    model = model_of(overrides=("decoding.max_extra=3",))
    assert len(model.look("O Rom", temperature=0).record.about["search"]["candidates"]) <= 4
    assert model.look("O Rom", temperature=0, max_tokens=0).record.about["target_text"] == ""


def test_a_stream_is_heard_too(language_model: LanguageModel) -> None:
    with api_record(language_model) as seen:
        text = "".join(language_model.stream("O Rom", temperature=0, max_tokens=4))
    assert text == language_model.generate("O Rom", temperature=0, max_tokens=4).text
    assert seen["blocks.0.attention"].weights.shape[2] == 5 + 4


def test_positions_are_shown_as_the_model_has_them(translator: Translator, language_model: LanguageModel) -> None:
    record = translator.look("the dog", beam=1).record
    sides = record.of_kind("positions")
    assert [entry.role for entry in sides] == ["sinusoidal", "sinusoidal"]
    assert sides[0]["table"].shape == (len(record.about["source"]), 16)
    (learned,) = language_model.look("O Rom", max_tokens=2, temperature=0).record.of_kind("positions")
    table = dict(language_model.model.named_parameters())["positions.weight"]
    assert torch.equal(learned["table"], table[: len(learned["table"])])
    turned = model_of(positions="rotary").look("O Rom", max_tokens=2, temperature=0).record.of_kind("positions")
    assert [entry.role for entry in turned] == ["rotary"]
    assert turned[0]["angles"][3, 0].item() == 3.0


def test_it_shows_itself_everywhere(translator: Translator, tmp_path: Path) -> None:
    look = translator.look("the dog", beam=2)
    assert "the dog" in str(look)
    assert "\x1b[" in look.draw(colour=True)
    assert "too wide for 10 columns" in look.draw(columns=10)
    assert look.draw(columns=400) == look.draw()
    assert "\x1b[" not in str(look)
    assert repr(look).startswith("Look('the dog' → ")
    assert look._repr_html_().startswith("<iframe")
    look.write(tmp_path / "look.html")
    assert (tmp_path / "look.html").read_text(encoding="utf-8") == look.page()
    pytest.importorskip("matplotlib")
    look.figure(tmp_path / "look.svg")
    assert "<svg" in (tmp_path / "look.svg").read_text(encoding="utf-8")


def test_the_shell_writes_the_page_the_picture_and_the_record(
    translator: Translator, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = saved(translator, tmp_path / "model")
    assert cli.main(["look", model, "the dog", "--beam", "2", "--record", "seen.record"]) == 0
    assert "look.html, seen.record written" in capsys.readouterr().out
    page = (tmp_path / "look.html").read_text(encoding="utf-8")
    assert cli.main(["look", "seen.record", "--out", "again.html"]) == 0
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == page
    assert isinstance(api.look("seen.record"), Look)
    assert Record.load("seen.record").about["source_text"] == "the dog"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["look", "nowhere", "the dog"], "nowhere"),
        (["look", "seen"], "no such file: seen"),
        (["look", "model", " "], "the text is blank"),
        (["look", "model", "the dog", "--figure", "x.nothing"], "a picture must end with .png, .svg, .pdf"),
        (["look", "model"], "model is a model: give it a text"),
        (["look", "model", "the dog", "--max-tokens", "3"], "max_tokens is for language models"),
        (["look", "model", "the dog", "--record", "no/such/x"], "cannot write no/such/x"),
        (["evaluate", "model", "text.txt", "--align", "--beam", "3"], "--beam: --align reads given translations"),
        (["look", "text.txt"], "is no record of attention"),
        (["look", "text.txt", "--beam", "3"], "beam: a saved record is looked at as it is"),
        (["look", "model", "the dog", "--out", "no/such/place.html"], "no/such/place.html"),
    ],
)
def test_what_is_wrong_is_one_line(
    translator: Translator,
    arguments: list[str],
    told: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(translator, tmp_path / "model")
    (tmp_path / "text.txt").write_text("some text")
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft: error: ")
    assert told in error
    assert error.count("\n") == 1


def saved(translator: Translator, path: Path) -> str:
    from weft import folder

    folder.save(path, translator.model, translator.recipe, translator.tokenizers, "card")
    return str(path)
