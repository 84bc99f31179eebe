"""One model of many directions, from files to scores, as a user does it at the shell and in Python."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

import weft
from benchmarks import robustness
from tests.test_end_to_end import SIZES
from weft import cli, folder
from weft.api import Translator
from weft.training.report import Silent
from weft.training.translation import choose

WORDS = {
    "en": ["one", "two", "three", "four", "five", "six"],
    "es": ["uno", "dos", "tres", "cuatro", "cinco", "seis"],
    "de": ["eins", "zwei", "drei", "vier", "fünf", "sechs"],
}
SMALL = [
    *SIZES,
    "--tokenizer.kind=word",
    "--training.batch_tokens=1024",
    "--training.optimizer=muon",
    "--training.learning_rate=1e-2",
    "--training.schedule=cosine",
    "--training.warmup=20",
    "--training.smoothing=0",
    "--training.average=0",
    "--training.steps=300",
    "--training.validate_every=150",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Numbers from English to Spanish and to German, word for word: train and test."""
    place, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    for part, count in (("train", 500), ("test", 40)):
        for target in ("es", "de"):
            rows = [[draw.randrange(6) for _ in range(draw.randint(1, 4))] for _ in range(count)]
            lines = (
                " ".join(WORDS["en"][i] for i in row) + "\t" + " ".join(WORDS[target][i] for i in row) for row in rows
            )
            (place / f"{part}.en-{target}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def model(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "model"
    given = [
        f"--data.train={data}/train.{{source}}-{{target}}.tsv",
        f"--data.validation={data}/test.{{source}}-{{target}}.tsv",
        '--data.languages=["en","es","de"]',
        "--data.bridge=en",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", str(data / "cache"))
        assert cli.main(["train", "translation", *given, "--out", str(out), *SMALL]) == 0
    return out


def test_it_says_the_same_text_in_the_language_that_is_asked_for(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, to, said in (
        ("one two three", "es", "uno dos tres"),
        ("one two three", "de", "eins zwei drei"),
        ("uno dos tres", "en", "one two three"),
        ("cuatro cinco", "de", "vier fünf"),
    ):
        assert cli.main(["translate", str(model), text, "--to", to]) == 0
        assert capsys.readouterr().out == f"{said}\n"


def test_every_direction_of_a_test_set_is_scored(
    model: Path, data: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = f"{data}/test.{{source}}-{{target}}.tsv"
    assert cli.main(["evaluate", str(model), spec, "--output", str(tmp_path / "said.txt")]) == 0
    out = capsys.readouterr().out
    for direction in ("en-es", "es-en", "en-de", "de-en", "es-de", "de-es"):
        assert f"{direction} " in out
    assert "±" in out
    assert "|bs:1000|seed:12345|" in out
    assert cli.main(["evaluate", str(model), spec, "--from", "es", "--to", "en", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["scores"]["bleu"] > 90.0
    assert alone["scores"]["bleu_ci"] >= 0.0
    assert cli.main(["evaluate", str(model), spec, "--baseline", str(model)]) == 0
    assert capsys.readouterr().out.count("p = 1.0000") == 6
    # A file of one's own, whose languages must be said.
    assert cli.main(["evaluate", str(model), f"{data}/test.en-de.tsv", "--from", "en", "--to", "de"]) == 0
    assert "BLEU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["translate", "MODEL", "one two"], "to: this model translates to en or es or de: say which"),
        (["translate", "MODEL", "one two", "--to", "it"], "to='it': this model translates to en or es or de"),
        (["evaluate", "MODEL", "DATA/test.en-de.tsv"], "say to which of en, es, de the file translates"),
        (["evaluate", "MODEL", "DATA/test.en-de.tsv", "--to", "it"], "'it' is no language of this model"),
        (
            ["evaluate", "MODEL", "DATA/test.{source}-{target}.tsv", "--from", "en", "--to", "en"],
            "no pairs from en to en",
        ),
        (["evaluate", "MODEL", "DATA/test.en-de.tsv", "--align"], "several languages"),
        (["look", "MODEL", "one two"], "say which"),
        (
            ["train", "translation", "--data.train=x.tsv", '--data.languages=["en","es"]', "--out", "O"],
            "validation set",
        ),
        (
            ["train", "translation", "--data.train=x.tsv", '--data.languages=["en"]', "--data.source=en", "--out", "O"],
            "take the place of source",
        ),
    ],
)
def test_what_is_wrong_is_one_line(
    model: Path, data: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.replace("MODEL", str(model)).replace("DATA", str(data)) for word in words]
    assert cli.main(given) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_the_mark_is_seen_wherever_the_source_is(model: Path) -> None:
    translator = weft.load(model)
    assert isinstance(translator, Translator)
    assert translator.languages == ("en", "es", "de")
    assert "between en, es, de" in repr(translator)
    found = translator.translate("one two", to="es")
    assert found.source_tokens[0] == "<2es>"
    assert found.attention.source_tokens[0] == "<2es>"
    assert found.attention.weights.shape[1] == len(found.source_ids) + 1
    by_text = translator.align("one two", "uno dos", to="es")
    assert (by_text.weights - found.attention.weights).abs().max() == 0.0
    right, wrong = (translator.score("one two", "uno dos", to=to).log_prob for to in ("es", "de"))
    assert right > wrong + 1.0
    assert translator.alternatives("one two", "uno dos", 0, to="de")[0].token == "eins"
    look = translator.look("one two", to="es")
    assert look.matrix.keys[0] == "<2es>"


def test_a_batch_is_translated_as_each_text_alone(model: Path) -> None:
    translator = weft.load(model)
    assert isinstance(translator, Translator)
    texts = ["one", "two three four", "six five"]
    together = [found.text for found in translator.translate(texts, to="de", exact=True)]
    assert together == [translator.translate(text, to="de", exact=True).text for text in texts]


def test_a_model_that_comes_with_weft_may_be_left_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "tatoeba").symlink_to(model)
    monkeypatch.setattr(folder, "SHIPPED", shipped)
    monkeypatch.chdir(tmp_path)
    for words in (["one two"], ["tatoeba", "one two"], ["one two", "three"], ["tatoeba", "one", "two"], ["one"]):
        assert cli.main(["translate", "--to", "es", *words]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == ["uno dos", "uno dos", "uno dos", "tres", "uno", "dos", "uno"]
    like_names = (["one", "two"], ["gone/model"], ["gone/model", "one"], ["tatoebe"], ["one", "two", "three"])
    for words in like_names:
        assert cli.main(["translate", "--to", "es", *words]) == 2
        error = capsys.readouterr().err
        assert f"no model '{words[0]}'" in error
        assert ("a text of several words goes into quotes" in error) == (len(words) > 2)
    (tmp_path / "tatoeba").mkdir()  # of data, perhaps
    for words in (["one two"], ["tatoeba", "one two"]):
        assert cli.main(["translate", "--to", "es", *words]) == 0
        assert capsys.readouterr().out == "uno dos\n"
    (tmp_path / "tatoeba" / "latest").write_text("step-000100")
    assert cli.main(["translate", "--to", "es", "tatoeba", "one two"]) == 2
    assert "a run that has not ended" in capsys.readouterr().err
    assert cli.main(["look", "--to", "es", "one two"]) == 0
    assert "uno dos" in capsys.readouterr().out
    assert (tmp_path / "look.html").is_file()
    for given, said in (
        (["one two", "three"], "put it into quotes"),
        (["gone.record"], "gone.record"),
        (["tatoeba"], "give it a text"),
        (["tatoeba", "--beam", "2"], "give it a text"),
    ):
        assert cli.main(["look", *given]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out.startswith("tatoeba: translates between en, es, de, each to each; 0.")
    assert cli.main(["models", "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["name"], Path(facts["path"])) == ("tatoeba", shipped / "tatoeba")


def test_the_mark_is_a_token_for_others_too(model: Path, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="the optional extra [ctranslate2] is not installed")
    assert cli.main(["convert", str(model), str(tmp_path / "out"), "--to", "ctranslate2"]) == 0
    other = ctranslate2.Translator(str(tmp_path / "out"), inter_threads=1, intra_threads=1)
    translator = weft.load(model)
    assert isinstance(translator, Translator)
    for to, said in (("es", "uno dos tres"), ("de", "eins zwei drei")):
        found = translator.translate("one two three", to=to)
        assert found.text == said
        tokens = [translator.tokenizers.source._rust.id_to_token(number) for number in found.source_ids]
        assert tokens[0] == f"<2{to}>"
        (answer,) = other.translate_batch([[*tokens, "</s>"]], beam_size=1)
        wanted = [translator.tokenizers.target._rust.id_to_token(number) for number in found.n_best[0].ids]
        assert answer.hypotheses[0] == wanted


def test_a_model_of_one_direction_is_compared_with_one_of_several(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(data / "cache"))
    train, test = (f"{data}/{part}.en-es.tsv" for part in ("train", "test"))
    for out, swap, read, said in ((tmp_path / "there", "false", "en", "es"), (tmp_path / "back", "true", "es", "en")):
        given = ["--data.source=en", "--data.target=es", f"--data.swap={swap}", *SMALL, "--training.steps=2"]
        assert cli.main(["train", "translation", f"--data.train={train}", "--out", str(out), *given]) == 0
        alone = weft.load(out)
        assert isinstance(alone, Translator)
        assert alone.languages == (said,)
        assert f"({read} → {said}, " in repr(alone)
        assert alone.translate("uno", to=said, from_=read).text == alone.translate("uno").text
    directions = ["--from", "en", "--to", "es"]
    for words in ([str(tmp_path / "there"), str(model)], [str(model), str(tmp_path / "there"), *directions]):
        capsys.readouterr()
        assert cli.main(["evaluate", words[0], test, "--baseline", *words[1:]]) == 0
        assert "baseline" in capsys.readouterr().out


def test_a_named_set_tells_the_languages_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    sets = [f"--data.{part}=tatoeba-sample:{part}" for part in ("train", "validation")]
    assert choose(sets, Silent()).data.direction == ("en", "es")


def test_what_is_in_the_language_already_stays(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    translator = weft.load(model)
    assert isinstance(translator, Translator)
    assert next(iter(translator.detect("uno dos tres"))) == "es"
    kept = translator.translate("uno dos tres", to="es")
    assert (kept.text, kept.log_prob) == ("uno dos tres", 0.0)
    assert kept.attention.weights.shape == (4, 5)
    assert translator.translate("uno dos tres", to="es", from_="en").log_prob < 0.0  # as it was told
    assert translator.translate("uno", to="es").log_prob < 0.0  # a word alone may be one of several languages
    assert (
        translator.translate("uno\ndos tres uno", to="es", split=True).text == "uno\ndos tres uno"
    )  # unless others tell
    assert translator.translate("uno\none two", to="es", split=True).parts[0].log_prob < 0.0
    assert translator.detect("ONE TWO THREE") == translator.detect("One two three")
    for from_ in (None, "en"):
        assert translator.translate("?! 😀 42", to="es", from_=from_).text == "?! 😀 42"  # is no language
    assert translator.translate("uno", to="es", from_="es").text == "uno"
    assert cli.main(["translate", str(model), "uno dos tres", "--to", "en", "--from", "es"]) == 0
    assert capsys.readouterr().out == "one two three\n"
    assert cli.main(["translate", str(model), "uno", "--to", "en", "--from", "it"]) == 2
    assert "this model translates from en or es or de" in capsys.readouterr().err


def test_a_text_sentence_by_sentence(model: Path) -> None:
    translator = weft.load(model)
    assert isinstance(translator, Translator)
    text = "one two\n\nthree"
    found = translator.translate(text, to="es", split=True)
    alone = [translator.translate(line, to="es") for line in ("one two", "three")]
    assert found.text == "uno dos\n\ntres"
    assert found.source == text
    assert found.parts == tuple(alone)
    assert found.log_prob == pytest.approx(sum(part.log_prob for part in alone))
    assert found.source_ids == alone[0].source_ids + alone[1].source_ids
    weights = found.attention.weights
    assert weights.shape == (2 + 2, 4 + 3)  # the first sentence's end is left out
    assert weights[:2, :4].equal(alone[0].attention.weights[:-1])
    assert not weights[:2, 4:].any()
    assert weights.sum(1).tolist() == pytest.approx([1.0] * 4)
    best = found.n_best[0]
    assert [place for place, _ in found.attention.pairs] == list(range(len(best.ids)))
    assert len(best.token_log_probs) == len(best.ids) + 1
    assert sum(best.token_log_probs) == pytest.approx(best.log_prob)
    assert translator.translate([text, "", "four"], to="de", split=True)[2].text == "vier"
    padded = translator.translate(f"\n {text}", to="es", split=True)  # what is blank goes to no model
    assert (padded.source_ids, padded.parts) == (found.source_ids, found.parts)
    # Several translations, or a beginning, are of the whole text; a beginning changes nothing of another text.
    both = translator.translate([text, "four"], to="es", split=True, prefix=["", "uno"], exact=True)
    assert both[0] == translator.translate(text, to="es", split=True, exact=True)
    assert both[1].text.startswith("uno")
    assert not translator.translate(text, to="es", split=True, n_best=2).parts
    assert not translator.translate(text, to="es", split=True, prefix="uno").parts


def test_a_very_long_text_is_cut_where_it_must_be(model: Path) -> None:
    translator = weft.load(model)
    assert isinstance(translator, Translator)
    words = ["one two three four"] * 500
    with pytest.raises(ValueError, match="split it"):
        translator.translate(" ".join(words), to="es")
    found = translator.translate(" ".join(words), to="es", split=True)
    longest = translator.recipe.data.max_len
    assert len(found.parts) >= 2000 / longest
    assert max(len(part.source_ids) for part in found.parts) < longest
    assert " ".join(part.source for part in found.parts) == " ".join(words)


def test_capitals(model: Path) -> None:
    translator = weft.load(model)
    assert isinstance(translator, Translator)
    found = translator.translate("ONE TWO SIX", to="es", recase=True)
    quiet = translator.translate("One two six", to="es")
    assert (found.text, found.source, found.log_prob) == (quiet.text.upper(), "ONE TWO SIX", quiet.log_prob)
    assert translator.look("ONE TWO SIX", to="es", recase=True).record.about["target_text"] == found.text
    with pytest.raises(ValueError, match="split"):
        translator.look("one two", to="es", split=True)


def test_sentences_of_a_line_are_drawn_each_for_itself(model: Path) -> None:
    translator = weft.load(model)
    assert isinstance(translator, Translator)
    drawn = translator.translate("one\none\none\none", to="es", split=True, sample=True, temperature=50.0, seed=1)
    assert len({part.text for part in drawn.parts}) > 1
    alone = translator.translate("one", to="es", sample=True, temperature=50.0, seed=1)
    assert drawn.parts[0].text == alone.text


def test_hard_text_keeps_its_lines_and_what_is_carried_over_is_counted(model: Path) -> None:
    translator = weft.load(model)
    assert isinstance(translator, Translator)
    outcomes = robustness.tried(translator, "es", None)
    assert [outcome.case for outcome in outcomes] == list(robustness.CASES)
    said = {outcome.case.what: outcome for outcome in outcomes}
    assert said["empty"].translation == said["only spaces"].translation == ""
    assert said["marks only"].translation == "?!…"
    assert said["pictures only"][1:] == ("😀🎉", 2, 2)
    assert said["an address"].wanted == said["mail"].wanted == said["decimals"].wanted == 1
    assert said["HTML"].wanted == 2
    lines = robustness.table(outcomes).splitlines()
    assert len(lines) == len(robustness.CASES) + 2
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {5}
