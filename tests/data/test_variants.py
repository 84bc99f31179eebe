"""Pairs read with a difference: both sides alike, the same ones every time."""

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from weft.data.directions import Directions, open_directions
from weft.data.variants import Varied, variant, varied

PAIRS = [(f"I saw Tom {n} times.", f"Vi a Tom {n} veces.") for n in range(1000)]


class Pairs:
    """Some pairs in memory."""

    name = "pairs"

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(PAIRS)

    def fingerprint(self) -> str:
        return "pairs"

    def place(self, index: int) -> str:
        return f"pair {index}"


def draws(source: str, target: str) -> list[tuple[str, str]]:
    return [variant(source, target, Random(seed)) for seed in range(300)]


def test_a_name_or_a_number_of_both_sides_is_exchanged_in_both() -> None:
    for source, target in draws("Tom paid 30 euros.", "Tom pagó 30 euros."):
        here = re.fullmatch(r"(\S+) paid (\d+) euros\.", source)
        there = re.fullmatch(r"(\S+) pagó (\d+) euros\.", target)
        assert here is not None
        assert there is not None
        assert here.groups() == there.groups()
        assert "Tom" in here.groups() or "30" in here.groups()  # one of them stays


def test_made_up_things_are_of_every_kind() -> None:
    found = {source.split()[0] for source, _ in draws("Tom is here.", "Tom está aquí.")}
    assert len(found) > 200
    for kind in (r"[A-Z][a-z]+", r"(https?://|www\.)[a-z.]+(/\w+)*", r"[a-z]+@[a-z.]+"):
        assert any(re.fullmatch(kind, each) for each in found), kind


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("Tom saw Tom.", "Tom vio a Tom."),  # twice
        ("Tomorrow it is.", "Tom lo es."),  # a part of a word
        ("a sofa here", "un sofa aquí"),  # in small letters
        ("No, no.", "No es."),  # too short
        ("At 17:45.", "A las 17:45."),  # not a number alone
    ],
)
def test_what_is_no_name_of_both_sides_stays(source: str, target: str) -> None:
    for one, other in draws(source, target):
        assert one.casefold().startswith(source.casefold().rstrip("."))
        assert other.casefold().startswith(target.casefold().rstrip("."))


def test_the_name_is_exchanged_where_it_stands_alone() -> None:
    for one, other in draws("Tom's father died before Tom was born.", "Toms Vater starb, bevor Tom geboren war."):
        assert one.startswith("Tom's father died before ")
        assert other.startswith("Toms Vater starb, bevor ")


def test_without_a_shared_word_something_is_added_or_carelessly_left_out() -> None:
    seen = set()
    for source, target in draws("It rains.", "Llueve."):
        if source == "it rains":
            assert target == "llueve"
            seen.add("careless")
        else:
            assert source.removeprefix("It rains. ") == target.removeprefix("Llueve. ")
            seen.add("address" if source.isascii() else "picture")
    assert seen == {"careless", "address", "picture"}


def test_about_the_share_is_varied_and_always_the_same() -> None:
    found = list(Varied(Pairs(), 0.2))
    assert found == list(Varied(Pairs(), 0.2))
    changed = sum(before != after for before, after in zip(PAIRS, found, strict=True))
    assert 150 < changed < 250
    more = list(Varied(Pairs(), 0.5))
    assert all(new == after or after == before for before, after, new in zip(PAIRS, found, more, strict=True))
    assert Varied(Pairs(), 0.2).fingerprint() != Varied(Pairs(), 0.5).fingerprint() != "pairs"
    assert Varied(Pairs(), 0.2).place(7) == "pair 7"


def test_no_share_is_the_text_itself() -> None:
    pairs = Pairs()
    assert varied(pairs, 0.0) is pairs


def test_each_direction_is_varied_for_itself(tmp_path: Path) -> None:
    (tmp_path / "en-es.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS))
    plain = open_directions(str(tmp_path / "{source}-{target}.tsv"), ["en", "es"])
    found = varied(plain, 0.3)
    assert isinstance(found, Directions)
    assert [(text.source, text.target) for text in found.texts] == [("en", "es"), ("es", "en")]
    forth, back = (
        [before != after for before, after in zip(*texts, strict=True)]
        for texts in zip(plain.texts, found.texts, strict=True)
    )
    assert any(forth)
    assert any(back)
    assert forth != back
    assert found.languages == plain.languages
    assert found.fingerprint() != plain.fingerprint()
