"""From text to text: order, company, streams, what is blank or too long, unknown words, and what the results show."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft import api, cli, folder
from weft.api import Translation, Translator, search
from weft.config import BOS, EOS, PAD, UNK, Recipe
from weft.data.vocabulary import make_pair
from weft.kernels import machine
from weft.models import build
from weft.models.compiled import is_compiled
from weft.views import terminal

LINES = ["a man sleeps", "the dog runs home", "two birds sing a song", "a dog sings"]
OTHERS = ["ein mann schläft", "der hund rennt heim", "zwei vögel singen ein lied", "ein hund singt"]


def translator_of(kind: str = "char", seed: int = 3, **changes: Any) -> Translator:
    sizes = {"dim": 16, "num_heads": 2, "ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 2}
    tree = {
        "data": {"source": "en", "target": "de"},
        "tokenizer": {"kind": kind, "vocab_size": 300},
        "model": changes.pop("model", {"family": "transformer", **sizes, "positions": "learned", "max_len": 64}),
        "decoding": {"beam": 3, "max_ratio": 1.0, "max_extra": 4},
    }
    recipe = Recipe.make(tree, changes.pop("overrides", ()))
    pair = make_pair(recipe.tokenizer, lambda: iter(LINES), lambda: iter(OTHERS))
    torch.manual_seed(seed)
    model = build(recipe.model, pair.source.vocab_size, pair.target.vocab_size)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # larger than at the start of training, so that sources differ in what they give
            parameter.data *= 2.0 if "embedding" not in name else 4.0
    return Translator(model.eval(), recipe, pair)


@pytest.fixture(scope="module")
def chars() -> Translator:
    return translator_of()


@pytest.fixture(scope="module")
def words() -> Translator:
    return translator_of("word")


TEXTS = ["a man sleeps", "dogs", "two birds sing a song and run home", "a", "the song runs", "the dog sings the song"]


def rows(*texts: list[int]) -> Tensor:
    longest = max(map(len, texts)) + 1
    return torch.tensor([[*text, EOS, *[PAD] * (longest - len(text) - 1)] for text in texts])


def test_the_sources_are_told_apart(chars: Translator) -> None:
    assert len({found.text for found in chars.translate(TEXTS)}) == len(TEXTS)  # or else the other tests say little


def test_greedy_takes_the_likeliest_token_at_each_step(chars: Translator) -> None:
    found = chars.translate("the dog runs", beam=1)
    model = cast(Any, chars.model)
    with torch.no_grad():
        state = model.start(rows(chars.tokenizers.source.encode("the dog runs")))
        token, said, total = BOS, [], 0.0
        while len(said) < 12 + 4:
            hidden, state = model.step(torch.tensor([[token]]), state)
            log_probs = model.logits(hidden[0, -1]).log_softmax(-1)
            log_probs[[PAD, BOS]] = float("-inf")
            token = int(log_probs.argmax())
            total += float(log_probs[token])
            if token == EOS:
                break
            said.append(token)
    assert found.n_best[0].ids == tuple(said)
    assert found.log_prob == pytest.approx(total, abs=1e-4)
    assert found.text == chars.tokenizers.target.decode(said, "<unk>")


def test_one_text_gives_one_and_a_list_gives_a_list_in_order(chars: Translator) -> None:
    assert isinstance(chars.translate("a man"), Translation)
    found = chars.translate(TEXTS)
    assert [each.source for each in found] == TEXTS
    assert chars.translate([]) == []


@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 3, "n_best": 2}, {"sample": True, "seed": 5, "n_best": 2}])
def test_the_company_changes_nothing(chars: Translator, options: dict[str, Any]) -> None:
    options = {**options, "exact": True}
    alone = [chars.translate([text], **options)[0] for text in TEXTS]
    if "sample" in options:  # whose draws follow the number of the line
        alone = list(chars.translate_lines(TEXTS, window=1, **options))
    for other in ({}, {"batch_tokens": 1}, {"batch_tokens": 40}):
        together = chars.translate(TEXTS, **options, **other)
        assert [each.text for each in together] == [each.text for each in alone]
        assert together == alone  # the scores too, to the bit
    assert list(chars.translate_lines(TEXTS, window=4, **options)) == alone


@pytest.mark.parametrize("beam", [1, 3])
def test_unless_it_is_to_be_exact_company_changes_next_to_nothing(chars: Translator, beam: int) -> None:
    together = chars.translate(TEXTS, beam=beam)
    for text, found in zip(TEXTS, together, strict=True):
        alone = chars.translate(text, beam=beam)
        assert alone.score == pytest.approx(found.score, abs=1e-4)
        exact = chars.translate(text, beam=beam, exact=True)
        assert exact.score == pytest.approx(found.score, abs=1e-4)


def test_blank_texts_stay_empty_and_in_their_places(chars: Translator) -> None:
    found = chars.translate(["", "a man", " \t ", "\u3000"])
    assert [each.text == "" for each in found] == [True, False, True, True]
    assert (found[0].score, found[0].log_prob, found[0].tokens, len(found[0].n_best)) == (0.0, 0.0, (), 1)
    assert chars.translate("").text == ""
    assert found[0].attention.weights.shape == (1, 1)


def test_the_n_best_come_best_first_and_the_beam_is_wide_enough(chars: Translator) -> None:
    found = chars.translate("the dog runs", n_best=7)
    scores = [candidate.score for candidate in found.n_best]
    assert len({candidate.ids for candidate in found.n_best}) == len(scores) == 7
    assert scores == sorted(scores, reverse=True)
    assert (found.text, found.score) == (found.n_best[0].text, scores[0])
    with pytest.raises(ValueError, match="a beam of 2 gives at most 2"):
        chars.translate("the dog runs", n_best=3, beam=2)


def test_scores_are_those_of_the_whole_target_at_once(chars: Translator) -> None:
    source, target = "the dog runs", "der hund"
    found = chars.score(source, target)
    ids = chars.tokenizers.target.encode(target)
    model = cast(Any, chars.model)
    with torch.no_grad():
        hidden, _ = model.step(torch.tensor([[BOS, *ids]]), model.start(rows(chars.tokenizers.source.encode(source))))
        log_probs = model.logits(hidden[0]).log_softmax(-1)
    by_token = log_probs.gather(1, torch.tensor([*ids, EOS])[:, None])[:, 0]
    assert found.n_best[0].token_log_probs == pytest.approx(by_token.tolist(), abs=1e-4)
    assert found.log_prob == pytest.approx(float(by_token.sum()), abs=1e-3)
    assert found.n_best[0].perplexity == pytest.approx(float((-by_token.mean()).exp()), rel=1e-3)
    assert (found.source, found.text) == (source, target)
    assert found.score == pytest.approx(found.log_prob / len(by_token))


def test_a_translation_scored_again_has_its_score(chars: Translator) -> None:
    for each in chars.translate(TEXTS):
        if each.n_best[0].finished and UNK not in each.n_best[0].ids:
            again = chars.score(each.source, each.text)
            assert again.n_best[0].ids == each.n_best[0].ids
            assert again.log_prob == pytest.approx(each.log_prob, abs=1e-4)


def test_a_prefix_begins_the_translation(chars: Translator) -> None:
    assert chars.translate("a dog", prefix="ein h").text.startswith("ein h")
    found = chars.translate(["a", "two birds sing", "a dog"], prefix=["ein", "der", "das"])  # long ones go first
    assert [each.text[:3] for each in found] == ["ein", "der", "das"]
    assert [each.text[:3] for each in chars.translate(["a dog", "a man"], prefix="zwe", beam=1)] == ["zwe", "zwe"]
    with pytest.raises(ValueError, match="a prefix for each of 2 texts, not 1"):
        chars.translate(["a dog", "a man"], prefix=["ein"])


def test_samples_follow_the_seed_and_come_as_drawn(chars: Translator) -> None:
    drawn = chars.translate("a man sleeps", sample=True, n_best=8, seed=1)
    assert drawn == chars.translate("a man sleeps", sample=True, n_best=8, seed=1)
    assert drawn != chars.translate("a man sleeps", sample=True, n_best=8, seed=2)
    scores = [candidate.score for candidate in drawn.n_best]
    assert scores != sorted(scores, reverse=True)
    likeliest = chars.translate("a man sleeps", sample=True, top_k=1)
    assert likeliest.text == chars.translate("a man sleeps", beam=1).text
    with pytest.raises(ValueError, match=r"temperature needs sample=True \(at the shell --sample\)"):
        chars.translate("a man sleeps", temperature=0.5)


def test_what_is_too_long_is_named_and_never_cut(chars: Translator) -> None:
    assert chars.translate("a" * 63, beam=1).source_tokens == ("a",) * 63  # and the end token: 64
    with pytest.raises(ValueError, match="line 2 has 64 tokens, but the model takes at most 63"):
        chars.translate(["a", "a" * 64])


def test_no_source_is_much_longer_than_those_of_training() -> None:
    gru = {"family": "recurrent", "embed_dim": 8, "dim": 8}
    translator = translator_of(model=gru, overrides=["data.max_len=5"])
    assert translator.longest == 40
    assert translator.translate("a" * 40, beam=1).text
    with pytest.raises(ValueError, match="line 1 has 41 tokens, but the model takes at most 40"):
        translator.translate("a" * 41)
    assert translator_of(model=gru, overrides=["data.max_len=0"]).longest is None
    assert translator_of(overrides=["data.max_len=0"]).longest == 63


def test_a_stream_gives_all_lines_before_a_fault(chars: Translator) -> None:
    stream = chars.translate_lines(["a", "dogs", "a" * 100, "song"], beam=1)
    assert [next(stream).source, next(stream).source] == ["a", "dogs"]
    with pytest.raises(ValueError, match="line 3 has 100 tokens"):
        next(stream)


def test_a_stream_can_skip_faults_and_keeps_its_lines(chars: Translator) -> None:
    told: list[str] = []
    lines = ["a", "b" * 70, "dogs", "", "c" * 80]
    found = list(chars.translate_lines(lines, window=2, skipped=told.append, beam=1))
    assert [each.source for each in found] == lines
    assert [each.text == "" for each in found] == [False, True, False, True, True]
    assert [message[:6] for message in told] == ["line 2", "line 5"]


def test_a_stream_reads_no_further_than_its_window(chars: Translator) -> None:
    read = [0]

    def endless() -> Iterator[str]:
        while True:
            read[0] += 1
            yield "a man"

    stream = chars.translate_lines(endless(), window=3, beam=1)
    assert read[0] == 0
    for count in range(1, 8):
        next(stream)
        assert read[0] == -(-count // 3) * 3
    with pytest.raises(ValueError, match="window must be ≥ 1"):
        chars.translate_lines([], window=0)


def test_options_are_checked_before_anything_is_read(chars: Translator) -> None:
    bad: dict[str, Any] = {"lenght_penalty": 1.0}
    with pytest.raises(ValueError, match="unknown option 'lenght_penalty'; did you mean 'length_penalty'"):
        chars.translate("a", **bad)
    with pytest.raises(ValueError, match="beam must be ≥ 1"):
        chars.translate_lines(iter(["a"]), beam=0)
    with pytest.raises(ValueError, match="batch_tokens must be ≥ 1"):
        chars.translate("a", batch_tokens=0)
    with pytest.raises(ValueError, match="to='fr': this model translates to de"):
        chars.translate("a", to="fr")
    assert chars.translate("a", to="de", beam=None, n_best=None).text == chars.translate("a").text


def test_the_recipe_gives_the_defaults(chars: Translator) -> None:
    search = chars.search()
    assert (search.options.beam, search.options.max_ratio, search.options.n_best) == (3, 1.0, 1)
    assert chars.search(beam=2, length_penalty=0.5).options.length_penalty == 0.5
    assert chars.search(n_best=9).options.beam == 9


def test_unknown_words_give_way_to_the_source_word_they_looked_at(words: Translator) -> None:
    source = "the zebra runs home"  # the zebra is unknown to the source, too
    plain = words.translate(source, prefix="der quagga", beam=2)
    assert plain.n_best[0].ids[1] == UNK
    assert plain.text.split(" ")[:2] == ["der", "<unk>"]
    replaced = words.translate(source, prefix="der quagga", beam=2, replace_unknown=True)
    assert replaced.n_best[0].ids == plain.n_best[0].ids
    weights = plain.attention.weights[:, :-1]  # not at the end token
    expected = [
        "<unk>" if token == UNK else word for token, word in zip(plain.n_best[0].ids, plain.tokens, strict=True)
    ]
    for place, token in enumerate(plain.n_best[0].ids):
        if token == UNK:
            expected[place] = source.split(" ")[int(weights[place].argmax())]
    assert replaced.text.split(" ") == expected


def test_an_unknown_character_gives_way_too(chars: Translator) -> None:
    found = chars.translate("x ž y", prefix="ein ž", beam=1, replace_unknown=True)
    looked = int(found.attention.weights[4, :-1].argmax())
    assert found.n_best[0].ids[4] == UNK
    assert found.text[4] == "x ž y"[looked]


def test_pieces_of_words_know_everything() -> None:
    translator = translator_of("bpe")
    found = translator.translate("naïve 日本 🦓 dogs", prefix="日本 ž")
    forced = translator.tokenizers.target.encode("日本 ž")
    assert found.n_best[0].ids[: len(forced)] == tuple(forced)
    assert UNK not in found.n_best[0].ids


def test_alternatives_are_the_distribution_at_that_place(chars: Translator) -> None:
    source, target = "the dog runs", "der hund"
    ids = chars.tokenizers.target.encode(target)
    model = cast(Any, chars.model)
    with torch.no_grad():
        hidden, _ = model.step(torch.tensor([[BOS, *ids]]), model.start(rows(chars.tokenizers.source.encode(source))))
        shares = model.logits(hidden[0, 4]).softmax(-1)
    shares[[PAD, BOS]] = 0.0
    best = shares.topk(3)
    found = chars.alternatives(source, target, 4, k=3)
    assert [choice.probability for choice in found] == pytest.approx(best.values.tolist(), rel=1e-3)
    assert [choice.token for choice in found] == chars.tokenizers.target.tokens(best.indices.tolist())
    assert chars.alternatives(source, ids, 4, k=3) == found
    with pytest.raises(ValueError, match="position must be from 0 to 8"):
        chars.alternatives(source, target, 9)


def test_alternatives_can_be_completed(chars: Translator) -> None:
    ids = chars.tokenizers.target.encode("der hund")
    for choice in chars.alternatives("the dog runs", "der hund", 4, k=3, complete=True, beam=2):
        assert choice.completion is not None
        assert choice.completion.ids[:4] == tuple(ids[:4])
        end = len(choice.completion.ids) == 4
        assert choice.token == ("</s>" if end else choice.completion.tokens[4])


def test_the_attention_is_made_when_asked_for_and_has_labels(chars: Translator) -> None:
    found = chars.translate("the dog", prefix="der")
    attention = found.attention
    assert attention is found.attention
    assert attention.source_tokens == (*found.source_tokens, "</s>")
    assert attention.target_tokens == (*found.tokens, "</s>")
    assert attention.weights.shape == (len(found.tokens) + 1, 8)
    assert torch.allclose(attention.weights.sum(-1), torch.ones(len(found.tokens) + 1), atol=1e-5)
    assert torch.equal(attention.weights, chars.align("the dog", found.n_best[0].ids).weights)
    assert attention.pairs == list(enumerate(attention.weights[:-1].argmax(-1).tolist()))
    assert "target down, source across" in terminal.draw(attention.matrix)
    assert "\n" not in repr(attention)


def test_a_model_that_does_not_attend_says_so() -> None:
    translator = translator_of(model={"family": "recurrent", "embed_dim": 8, "dim": 8, "attention": "none"})
    found = translator.translate("the dog" * 30)  # it reads any length
    with pytest.raises(ValueError, match="does not attend to its source"):
        _ = found.attention
    with pytest.raises(ValueError, match="replace_unknown needs a model that attends"):
        translator.translate("the dog", replace_unknown=True)


def test_results_show_themselves(chars: Translator) -> None:
    found = chars.translate("a <b>&", prefix="ein", n_best=2)
    assert str(found) == found.text
    assert repr(found).startswith("Translation('ein")
    assert "\n" not in repr(found)
    tree = json.loads(found.json())
    assert tree["text"] == found.text
    assert tree["source"] == "a <b>&"
    assert [best["score"] for best in tree["n_best"]] == [candidate.score for candidate in found.n_best]
    assert repr(chars).startswith("Translator(en → de, transformer, ")


def test_html_shows_text_as_text(chars: Translator) -> None:
    found = chars.translate("a <script>alert(1)</script>", beam=1)
    candidate = found.n_best[0]
    risky = Translation(
        found.source,
        (5,),
        (replace(candidate, text="<i>&"), candidate),
        chars,
    )
    page = risky._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "&lt;i&gt;&amp;" in page
    drawn = api.Alignment(("<b>", "</s>"), ("<i>", "</s>"), torch.tensor([[0.25, 0.75], [1.0, 0.0]]))._repr_html_()
    assert "<b>" not in drawn
    assert "&lt;i&gt;" in drawn
    assert "title='0.75'" in drawn


def test_load_reads_the_folder_and_sets_the_precision(chars: Translator, tmp_path: Path) -> None:
    folder.save(tmp_path / "m", chars.model, chars.recipe, chars.tokenizers, "")
    expected = chars.translate(TEXTS)
    loaded = api.load(tmp_path / "m", precision="fp32")
    assert loaded.translate(TEXTS) == expected
    assert cast(Any, loaded.model).precision == torch.float32
    half = api.load(tmp_path / "m", precision="bf16")
    assert cast(Any, half.model).precision == torch.bfloat16
    assert half.score("a dog", "ein hund").log_prob == pytest.approx(
        chars.score("a dog", "ein hund").log_prob, rel=0.05
    )
    automatic = cast(Any, api.load(tmp_path / "m").model)
    assert automatic.precision == (
        torch.bfloat16 if machine.bf16_products() and not is_compiled(automatic) else torch.float32
    )
    wrong: Any = "int8"
    with pytest.raises(ValueError, match="auto, fp32, bf16, not 'int8'"):
        api.load(tmp_path / "m", precision=wrong)
    with pytest.raises(FileNotFoundError, match="no model"):
        api.load(tmp_path / "nothing")


def test_load_sets_the_threads(chars: Translator, tmp_path: Path) -> None:
    folder.save(tmp_path / "m", chars.model, chars.recipe, chars.tokenizers, "")
    before = torch.get_num_threads()
    try:
        api.load(tmp_path / "m", threads=before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ValueError, match="threads must be ≥ 1"):
        api.load(tmp_path / "m", threads=0)


def test_lines_of_a_file_go_through_as_they_are(chars: Translator) -> None:
    lines = io.StringIO("a man\u2028sleeps\nthe dog\x0c\n")
    found = list(chars.translate_lines((line.removesuffix("\n") for line in lines), beam=1))
    assert [each.source for each in found] == ["a man\u2028sleeps", "the dog\x0c"]


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(0, 120))
def test_batches_hold_every_line_once_and_keep_to_the_budget(lengths: list[int], most: int) -> None:
    wanted = [place for place, length in enumerate(lengths) if length != 7]
    batches = list(search.batches(wanted, lengths, most))
    assert sorted(place for batch in batches for place in batch) == wanted
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[place] for place in batch) <= most
    for batch, after in pairwise(batches):  # no batch could have taken the next line too
        assert (len(batch) + 1) * max(lengths[place] for place in [*batch, after[0]]) > most


def test_it_goes_out_to_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"dim": 16, "num_heads": 2, "ffn_dim": 32, "encoder_layers": 1, "decoder_layers": 2}
    translator = translator_of("bpe", model={"family": "transformer", **sizes, "tie": "all"})
    model = str(tmp_path / "model")
    folder.save(model, translator.model, translator.recipe, translator.tokenizers, "card")
    for to in ("transformers", "ctranslate2"):
        pytest.importorskip(to)
        assert cli.main(["convert", model, str(tmp_path / to), "--to", to]) == 0
        assert "checked with" in capsys.readouterr().out
        assert (tmp_path / to / "config.json").is_file()
        assert cli.main(["convert", model, str(tmp_path / to), "--to", to]) == 2
        assert "is there already" in capsys.readouterr().err
    assert cli.main(["convert", model, str(tmp_path / "x"), "--quantization", "int8"]) == 2
    assert "is for ctranslate2" in capsys.readouterr().err
    recurrent = translator_of(model={"family": "recurrent", "dim": 16, "embed_dim": 8})
    with pytest.raises(ValueError, match="ctranslate2 has family = transformer"):
        recurrent.export(tmp_path / "y", "ctranslate2")
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "y").exists()
