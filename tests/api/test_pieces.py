"""What of a text goes to the model."""

import pytest

from weft.api.pieces import Piece, pieces


def test_a_text_stays_whole_unless_it_is_to_be_split() -> None:
    assert pieces(" One. Two. ") == [Piece(" One. Two. ")]
    assert pieces("") == [Piece("")]


def test_sentences_and_the_space_between_them() -> None:
    found = pieces("  One.  Two!\nThree?  ", fits=lambda part: True)
    assert found == [Piece("One.", "  "), Piece("Two!", "\n"), Piece("Three?", "  ")]


def test_what_does_not_fit_is_cut() -> None:
    assert pieces("one two, three", fits=lambda part: len(part) < 10) == [Piece("one two,", " "), Piece("three")]


def test_a_single_sentence_is_given_as_it_stands() -> None:
    assert pieces(" One. ", fits=lambda part: True) == [Piece(" One. ")]


@pytest.mark.parametrize(
    ("text", "quiet"),
    [
        ("STOP THAT NOW!", "Stop that now!"),
        ("WHAT DO I DO? I'M LOST", "What do I do? I'm lost"),
        ("¿DÓNDE ESTÁ?", "¿Dónde está?"),
        ("«GRÜSS GOTT»", "«Grüss gott»"),
        ("24 PEOPLE CAME", "24 People came"),
        ("I AM HERE", "I am here"),
        ("HELP ME!", "Help me!"),
        ("A TV SET", "A tv set"),
    ],
)
def test_capitals_are_made_small_and_the_translation_loud(text: str, quiet: str) -> None:
    (piece,) = pieces(text, recase=True)
    assert piece == Piece(quiet, "", loud=text)
    assert piece.original == text
    assert piece.said("así es") == "ASÍ ES"
    assert pieces(text) == [Piece(text)]


@pytest.mark.parametrize(
    "text",
    [
        *(
            "NASA",
            "OK!",
            "A B",
            "The USA",
            "Mr. X",
            "42 + 17",
            "",
            "U. S. A.",
            "A. B. C. D. E.",
            "USA, UK",
            "NATO, EU 2024",
        ),
        *("猫は ねこ", "我们在 USA 吃面包。", "אני גר ב USA היום", "हम USA में रहते हैं", "私はNHKをみます A"),
    ],
)
def test_abbreviations_and_other_scripts_are_not_loud(text: str) -> None:
    (piece,) = pieces(text, recase=True)
    assert piece == Piece(text)
    assert piece.said("así es") == "así es"


def test_each_sentence_is_loud_or_not_for_itself() -> None:
    found = pieces("GO AWAY NOW! Please. ", fits=lambda part: True, recase=True)
    assert found == [Piece("Go away now!", " ", loud="GO AWAY NOW!"), Piece("Please.", " ")]


def test_a_space_comes_between_sentences_that_need_none_in_their_own_script() -> None:
    first, second = pieces("猫です。犬です。", fits=lambda part: True)
    assert (first.after, second.after) == ("", "")
    assert first.between("It is a cat.") == " "
    assert first.between("是猫。") == ""
    assert Piece("猫です。", "\n").between("It is a cat.") == "\n"


@pytest.mark.parametrize(
    ("text", "given", "translation", "said"),
    [
        ("It costs 12.50 euros.", "It costs 735 euros.", "Cuesta 735 euros.", "Cuesta 12.50 euros."),
        ("At 17:45, not 18:00.", "At 735, not 385.", "A las 735, no a las 385.", "A las 17:45, no a las 18:00."),
        ("Visit https://a.org/b?c=1.", "Visit Tom.", "Visita a Tom.", "Visita a https://a.org/b?c=1."),
        ("Ask Tom: me@a.org!", "Ask Tom: Boston!", "¡Pregunta a Tom: Boston!", "¡Pregunta a Tom: me@a.org!"),
        ("I have 735 or 1,000.", "I have 735 or 385.", "Tengo 735 o 385.", "Tengo 735 o 1,000."),
        ("Born in 1969.", "Born in 1969.", "Nacido en 1969.", "Nacido en 1969."),
        ("THE TRAIN TO a@b.org LEAVES.", "The train to Tom leaves.", "El tren a Tom sale.", "EL TREN A a@b.org SALE."),
    ],
)
def test_what_is_hard_to_spell_stands_aside(text: str, given: str, translation: str, said: str) -> None:
    (piece,) = pieces(text, recase=True, carry=True)
    assert piece.text == given
    assert piece.original == text
    assert piece.said(translation) == said


def test_what_got_lost_is_seen() -> None:
    (piece,) = pieces("It costs 12.50 euros.", carry=True)
    assert piece.holds("Cuesta 735 euros.")
    for lost in ("Cuesta treinta euros.", "Cuesta 7350 euros.", "735 o 735 euros"):
        assert not piece.holds(lost)
    assert piece.told == "It costs  euros."


def test_there_are_only_so_many_stand_ins() -> None:
    text = " ".join(f"{number}.5" for number in range(9))
    (piece,) = pieces(text, carry=True)
    assert len(piece.aside) == 6
    assert piece.said(piece.text) == text
