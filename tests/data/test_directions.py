"""Every direction between several languages, bridged where there are no pairs; sources are marked, and stay so."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.config import EOS, DataConfig, TokenizerConfig
from weft.data.batching import Batches
from weft.data.directions import Bridged, Directions, is_many, open_directions
from weft.data.store import prepare
from weft.data.tokenizers import Tokenizer
from weft.data.vocabulary import make_pair

EN_ES = ["I eat\tyo como", "I eat\tcomo", "you sleep\tduermes", "we read\tleemos"]
EN_FR = ["I eat\tje mange", "I eat\tmoi je mange", "I eat\tj'en mange", "we read\tnous lisons", "they go\tils vont"]


@pytest.fixture
def spec(tmp_path: Path) -> str:
    for name, lines in (("en-es", EN_ES), ("en-fr", EN_FR)):
        (tmp_path / f"{name}.tsv").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(tmp_path / "{source}-{target}.tsv")


def way(texts: Directions, source: str, target: str) -> list[tuple[str, str]]:
    (found,) = [text for text in texts.texts if (text.source, text.target) == (source, target)]
    return list(found)


def test_each_file_is_read_both_ways(spec: str) -> None:
    texts = open_directions(spec, ["en", "es", "fr"])
    assert [(text.source, text.target) for text in texts.texts] == [
        ("en", "es"),
        ("en", "fr"),
        ("es", "en"),
        ("fr", "en"),
    ]
    straight = [tuple(line.split("\t")) for line in EN_ES]
    assert way(texts, "en", "es") == straight
    assert way(texts, "es", "en") == [pair[::-1] for pair in straight]
    assert list(texts) == [pair for text in texts.texts for pair in text]
    assert texts.languages == ["es", "fr", "en"]


def test_two_languages_are_bridged_by_what_both_say_for_one_sentence(spec: str) -> None:
    once = open_directions(spec, ["en", "es", "fr"], bridge="en")
    assert way(once, "es", "fr") == [
        ("yo como", "je mange"),
        ("como", "moi je mange"),
        ("yo como", "j'en mange"),
        ("leemos", "nous lisons"),
    ]
    every = open_directions(spec, ["en", "es", "fr"], bridge="en", every=True)
    assert set(way(every, "fr", "es")) == {
        *((fr, es) for fr in ("je mange", "moi je mange", "j'en mange") for es in ("yo como", "como")),
        ("nous lisons", "leemos"),
    }
    assert len(way(every, "fr", "es")) == 7
    assert once.fingerprint() != every.fingerprint()


def test_a_pair_is_found_again_by_its_number(spec: str) -> None:
    texts = open_directions(spec, ["en", "es", "fr"], bridge="en")
    pairs = list(texts)
    assert texts.place(2).endswith("en-es.tsv:3")
    assert texts.place(len(EN_ES)).endswith("en-fr.tsv:1")
    bridged = next(number for number, pair in enumerate(pairs) if pair == ("leemos", "nous lisons"))
    assert "es-fr over en" in texts.place(bridged)
    assert "leemos" in texts.place(bridged)
    with pytest.raises(IndexError):
        texts.place(len(pairs))


@pytest.mark.parametrize(
    ("spec_", "languages", "bridge", "said"),
    [
        ("SPEC", ["en"], "", "two or more"),
        ("SPEC", ["en", "es", "en"], "", "each named once"),
        ("SPEC", ["en", "es"], "fr", "bridge must be one of"),
        ("SPEC", ["it", "pt"], "", "no pairs between any of it, pt"),
        ("pairs.tsv", ["en", "es"], "", "{source} and {target}"),
        (["a.en", "b.es"], ["en", "es"], "", "{source} and {target}"),
        ("tatoeba:tset", ["en", "es"], "", "no part 'tset'"),
    ],
)
def test_what_is_wrong_is_told(spec: str, spec_: str | list[str], languages: list[str], bridge: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("{", r"\{")):
        open_directions(spec if spec_ == "SPEC" else spec_, languages, bridge)


def test_a_named_set_has_the_directions_of_its_files() -> None:
    texts = open_directions("tatoeba-sample:validation", ["en", "es"])
    assert [(text.source, text.target) for text in texts.texts] == [("en", "es"), ("es", "en")]
    assert all(text.several for text in texts.texts)
    assert is_many("tatoeba-sample:validation")
    assert not is_many("pairs.tsv")


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
def test_marks_are_tokens_that_no_text_spells(kind: str, spec: str, tmp_path: Path) -> None:
    texts = open_directions(spec, ["en", "es", "fr"])
    config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 320})
    pair = make_pair(config, lambda: (a for a, _ in texts), lambda: (b for _, b in texts), texts.languages)
    tokenizer = pair.source
    assert set(tokenizer.tags) == {"en", "es", "fr"}
    assert tokenizer.tokens(list(tokenizer.tags.values())) == ["<2es>", "<2fr>", "<2en>"]
    spelled = tokenizer.encode("<2es> I eat")
    assert not set(spelled) & set(tokenizer.tags.values())
    ids = tokenizer.encode("I eat")
    assert tokenizer.decode([tokenizer.tags["es"], *ids]) == tokenizer.decode(ids) == "I eat"
    tokenizer.save(tmp_path / "tokenizer.json")
    again = Tokenizer.load(tmp_path / "tokenizer.json")
    assert again.tags == tokenizer.tags
    assert again.encode("<2es> I eat") == spelled


def test_a_tokenizer_without_marks_is_refused(spec: str, tmp_path: Path) -> None:
    plain = make_pair(TokenizerConfig(vocab_size=300), lambda: ["I eat"], lambda: ["como"])
    plain.source.save(tmp_path / "tokenizer.json")
    config = TokenizerConfig(path=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="has no token <2es>"):
        make_pair(config, list, list, ["es"])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_every_source_of_a_batch_opens_with_the_mark_of_its_target(spec: str, tmp_path: Path, dropout: float) -> None:
    texts = open_directions(spec, ["en", "es", "fr"], bridge="en")
    config = TokenizerConfig(vocab_size=320, dropout=dropout)
    pair = make_pair(config, lambda: (a for a, _ in texts), lambda: (b for _, b in texts), texts.languages)
    store = prepare(texts, pair, DataConfig(), tmp_path / "cache")
    marks = {number: language for language, number in pair.source.tags.items()}
    wanted = {(text.target, *each) for text in texts.texts for each in text}
    batches = Batches(store, 64, seed=1, dropout=dropout, tokenizers=pair)
    for epoch in range(3):
        seen = set()
        for number in range(batches.per_epoch):
            batch = batches.at(epoch * batches.per_epoch + number)
            for source, target in zip(batch.source.tolist(), batch.target.tolist(), strict=True):
                assert [token in marks for token in source] == [True, *[False] * (len(source) - 1)]
                assert not any(token in marks for token in target)
                said = pair.source.decode(source[: source.index(EOS)]), pair.target.decode(target[: target.index(EOS)])
                seen.add((marks[source[0]], *said))
        assert seen == wanted


def test_bridged_pairs_know_their_languages(spec: str) -> None:
    texts = open_directions(spec, ["en", "es", "fr"], bridge="en")
    (bridged,) = [text for text in texts.texts if isinstance(text, Bridged) and text.source == "es"]
    assert (bridged.source, bridged.target, bridged.several) == ("es", "fr", True)


def test_a_share_of_the_bridged_pairs_is_read_and_all_of_the_others(tmp_path: Path) -> None:
    for target in ("es", "fr"):
        lines = (f"sentence {number}\t{target} {number}\n" for number in range(400))
        (tmp_path / f"en-{target}.tsv").write_text("".join(lines), encoding="utf-8")
    spec = str(tmp_path / "{source}-{target}.tsv")
    whole, some = (open_directions(spec, ["en", "es", "fr"], "en", share=share) for share in (1.0, 0.25))
    for all_of, part_of in zip(whole.texts, some.texts, strict=True):
        pairs, read = list(all_of), list(part_of)
        assert len(pairs) == 400
        if {part_of.source, part_of.target} == {"es", "fr"}:
            assert 60 < len(read) < 140
            assert set(read) < set(pairs)
        else:
            assert read == pairs
    assert whole.fingerprint() != some.fingerprint()
