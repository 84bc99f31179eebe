"""Which language a text is in."""

import json
from pathlib import Path

import numpy as np
import pytest

from weft.config import UNK, TokenizerConfig
from weft.data.languages import Languages
from weft.data.tokenizers import TokenizerPair
from weft.data.vocabulary import train_tokenizer

TEXTS = {
    "en": ["the cat is here", "the dog is there", "is the house big"],
    "es": ["el gato está aquí", "el perro está allí", "es grande la casa"],
}


@pytest.fixture(scope="module")
def pair() -> TokenizerPair:
    lines = [line for text in TEXTS.values() for line in text]
    tokenizer = train_tokenizer(lines, TokenizerConfig(kind="word", vocab_size=100))
    return TokenizerPair(tokenizer, tokenizer, Languages.learned(TEXTS, tokenizer))


def test_the_words_tell(pair: TokenizerPair) -> None:
    assert pair.languages is not None
    for language, lines in TEXTS.items():
        for line in lines:
            found = pair.languages.of(pair.source.encode(line))
            assert next(iter(found)) == language
            assert found[language] > 0.9
            assert sum(found.values()) < 1.0


def test_it_is_bayes_rule(pair: TokenizerPair) -> None:
    """As counted by hand: of 12 English words 3 are "the", of 12 Spanish ones none."""
    assert pair.languages is not None
    common, unseen = 1e-3 * (3 / 12) / 2, 0.5 / 12
    chance = {"en": 3 / 12 + common + unseen, "es": common + unseen, "": 1 / pair.source.vocab_size}
    found = pair.languages.of(pair.source.encode("the"))
    assert found["en"] == pytest.approx(chance["en"] / sum(chance.values()), abs=0.02)


def test_what_no_language_has_tells_nothing(pair: TokenizerPair) -> None:
    more = {"en": TEXTS["en"] * 50, "es": TEXTS["es"]}
    uneven = Languages.learned(more, pair.source)
    found = uneven.of([UNK] * 20)
    assert found["en"] == found["es"]


def test_what_none_of_them_has_is_in_none(pair: TokenizerPair) -> None:
    many = Languages.learned({name: lines * 100 for name, lines in TEXTS.items()}, pair.source)
    assert sum(many.of([UNK] * 5).values()) < 0.01
    assert sum(many.of(pair.source.encode("the cat is here")).values()) > 0.99


def test_nothing_tells_nothing(pair: TokenizerPair) -> None:
    assert pair.languages is not None
    assert pair.languages.of([]) == pytest.approx({"en": 1 / 3, "es": 1 / 3})


def test_it_is_kept_beside_the_tokenizer(pair: TokenizerPair, tmp_path: Path) -> None:
    pair.save(tmp_path)
    loaded = TokenizerPair.load(tmp_path)
    assert pair.languages is not None
    assert loaded.languages is not None
    assert loaded.languages.names == ("en", "es")
    assert np.array_equal(loaded.languages.costs, pair.languages.costs)
    TokenizerPair(pair.source, pair.target).save(tmp_path)
    assert TokenizerPair.load(tmp_path).languages is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"en": [1, 2]}',
        '{"en": "x"}',
        '{"en": [1e400, 1]}',
        '{"en": null}',
        '{"en": {}}',
        '{"en": [1.7, 1, 1]}',
        '{"en": [true, 1, 1]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_table_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "languages.json").write_text(text)
    with pytest.raises(ValueError, match=r"languages\.json: expected 3 whole numbers for each language") as error:
        Languages.load(tmp_path / "languages.json", 3)
    assert "\n" not in str(error.value)


def test_numbers_below_zero_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(json.dumps({"en": [1, -1, 2]}))
    with pytest.raises(ValueError, match="from 0 to"):
        Languages.load(tmp_path / "t", 3)
