"""Where attention should look is known for strings that stand on both sides; IBM model 1 beside it."""

from __future__ import annotations

import random

import pytest
import torch

from tests.api.test_translator import translator_of
from weft.evaluation.alignment import MEAN, Lexicon, attended, hits, identical


def test_identical_strings_are_those_that_stand_once_on_each_side() -> None:
    source = ["two", "dogs", ",", "two", "1992", "cats", "."]
    target = ["zwei", "hunde", ",", "1992", "zwei", "katzen", "."]
    assert identical(source, target) == [(2, 2), (3, 4), (6, 6)]
    assert identical(source, target, punctuation=False) == [(3, 4)]
    assert identical(["a", "a"], ["a"]) == []
    assert identical([], []) == []


def _by_hand(pairs: list[tuple[list[str], list[str]]], rounds: int) -> dict[tuple[str, str], float]:
    """Brown et al.'s estimate, word by word."""
    t = {(e, f): 1.0 for source, target in pairs for e in ["", *source] for f in target}
    for _ in range(rounds):
        counts: dict[tuple[str, str], float] = dict.fromkeys(t, 0.0)
        for source, target in pairs:
            for f in target:
                total = sum(t[e, f] for e in ["", *source])
                for e in ["", *source]:
                    counts[e, f] += t[e, f] / total
        sums: dict[str, float] = {}
        for (e, _), count in counts.items():
            sums[e] = sums.get(e, 0.0) + count
        t = {(e, f): count / sums[e] for (e, f), count in counts.items()}
    return t


def test_the_lexicon_is_the_one_that_is_estimated_word_by_word() -> None:
    draw = random.Random(0)
    pairs = [
        (draw.choices("abcdef", k=draw.randint(1, 5)), draw.choices("uvwxyz", k=draw.randint(1, 5))) for _ in range(30)
    ]
    expected = _by_hand(pairs, 4)
    learned = Lexicon.learned(pairs, rounds=4).table
    assert learned.keys() == expected.keys()
    assert all(learned[key] == pytest.approx(p, rel=1e-9) for key, p in expected.items())


def test_the_lexicon_learns_a_code() -> None:
    draw = random.Random(1)
    code = {letter: letter.upper() for letter in "abcdefghij"}
    pairs = []
    for _ in range(300):
        source = draw.sample(list(code), 4)
        target = [code[letter] for letter in source]
        draw.shuffle(target)
        pairs.append((source, target))
    lexicon = Lexicon.learned(pairs)
    assert lexicon.align(["a", "c", "g"], ["G", "A", "C"]) == [2, 0, 1]
    assert Lexicon.learned([]).align(["a"], ["b"]) == [0]


def test_weights_of_words_are_those_of_their_pieces() -> None:
    translator = translator_of("bpe")
    pairs = [("the dog sings", "der hund singt ein lied"), ("a man", "ein mann schläft")]
    for (source, target), found in zip(pairs, attended(translator, pairs), strict=True):
        assert list(found) == [MEAN, "attention, layer 1", "attention, layer 2"]
        whole = translator.align(source, target).weights
        for weights in found.values():
            assert weights.shape == (len(target.split()), len(source.split()))
        # What is missing from 1 went to the end token.
        pieces = translator.tokenizers.target.tokens(translator.tokenizers.target.encode(target))
        first = next((n for n, piece in enumerate(pieces) if n and piece.startswith("▁")), len(pieces))
        expected = 1.0 - float(whole[:first, -1].mean())
        assert float(found[MEAN][0].sum()) == pytest.approx(expected, abs=1e-5)


def test_hits_are_counted_for_every_way() -> None:
    translator = translator_of("word", seed=1)
    pairs = [("a dog sings a song", "a hund song"), ("man dog", "dog mann"), ("x", "y")]
    lexicon = Lexicon.learned((a.split(), b.split()) for a, b in pairs)
    found = hits(translator, pairs, lexicon, punctuation=True)
    assert (found.links, found.sentences, found.skipped) == (2, 2, 0)
    assert found.shares["chance"] == pytest.approx((1 / 5 + 1 / 2) / 2)
    expected = 0
    for source, target in pairs[:2]:
        weights = translator.align(source, target).weights[:-1, :-1]
        expected += sum(int(weights[t].argmax()) == s for t, s in identical(source.split(), target.split()))
    assert found.shares[MEAN] == expected / 2
    assert set(found.shares) == {MEAN, "attention, layer 1", "attention, layer 2", "IBM model 1", "chance"}
    assert "2 strings" in found.text()
    nothing = hits(translator, [("a", "b")], lexicon, punctuation=True)
    assert (nothing.links, nothing.shares) == (0, {})
    none = translator_of(model={"family": "recurrent", "dim": 16, "embed_dim": 8, "attention": "none"})
    with pytest.raises(ValueError, match="aligns nothing"):
        hits(none, pairs, lexicon, punctuation=True)
    assert torch.is_grad_enabled()
