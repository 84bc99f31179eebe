"""Texts cut into sentences and put together again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.data.sentences import cut, sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", [""]),
        ("one", ["one"]),
        ("One. Two.", ["One. ", "Two."]),
        ("One.  Two! \n Three?", ["One.  ", "Two! \n ", "Three?"]),
        ("no marks\nbut lines", ["no marks\n", "but lines"]),
        ("Really?! Yes… No.", ["Really?! ", "Yes… ", "No."]),
        ("He said: “Go.” Then he went.", ["He said: “Go.” ", "Then he went."]),
        ("¿Cómo estás? ¡Bien! ¿Y tú?", ["¿Cómo estás? ", "¡Bien! ", "¿Y tú?"]),
        ("Was ? Ça va ! Oui.", ["Was ? ", "Ça va ! ", "Oui."]),
        ("Mr. Smith met Dr. Jones. They talked.", ["Mr. Smith met Dr. Jones. ", "They talked."]),
        ("J. R. R. Tolkien wrote it.", ["J. R. R. Tolkien wrote it."]),
        ("It was me, not I. He knew.", ["It was me, not I. ", "He knew."]),
        ("Am 3. Mai kam er. Am 24. Dezember ging er.", ["Am 3. Mai kam er. ", "Am 24. Dezember ging er."]),
        ("It was 1969. He was born.", ["It was 1969. ", "He was born."]),
        ("He lives in the U.S. She does not.", ["He lives in the U.S. She does not."]),  # nobody can know
        ("He was No. 1. Then he left.", ["He was No. 1. Then he left."]),
        ("She lives at No. 12 now. Good.", ["She lives at No. 12 now. ", "Good."]),
        ("No. He left.", ["No. ", "He left."]),
        ("Wait... what?", ["Wait... what?"]),
        ("See example.com. Then 3.5 is more.", ["See example.com. Then 3.5 is more."]),  # a dot inside: no end
        ("猫です。犬です！", ["猫です。", "犬です！"]),
        (" spaces . ", [" spaces . "]),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


@given(st.text(alphabet="aB1.!?…。 \n“”»(,'é", max_size=60))
def test_together_they_are_the_text(text: str) -> None:
    assert "".join(sentences(text)) == text
    assert "".join(cut(text, lambda part: len(part) <= 7)) == text


@given(st.text(alphabet="ab ,", max_size=60), st.integers(1, 9))
def test_what_is_cut_fits(text: str, most: int) -> None:
    assert all(len(part) <= most for part in cut(text, lambda part: len(part) <= most))


def test_it_is_cut_behind_a_comma_then_a_word_then_anywhere() -> None:
    assert cut("one, two three four", lambda part: len(part) <= 8) == ["one, ", "two ", "three ", "four"]
    assert cut("one two, three", lambda part: len(part) <= 11) == ["one two, ", "three"]
    assert cut("abcdef", lambda part: len(part) <= 4) == ["abcd", "ef"]
    assert cut("abc", lambda part: False) == ["a", "b", "c"]


def test_a_very_long_text_is_no_matter_of_depth() -> None:
    assert len(cut("a " * 20_000, lambda part: len(part) <= 10)) == 4_000


@pytest.mark.parametrize(
    "text",
    ["." * 200_000, " " * 200_000, "a" * 200_000 + " x. B", "A. " * 70_000, "One is here. " * 20_000, "\n" * 200_000],
)
def test_time_grows_with_the_length(text: str) -> None:
    """A second's work at most; in the square of the length each would be minutes."""
    assert "".join(sentences(text)) == text
