"""Any text comes back, specials are no text, training and dropout follow from their input, other tokenizers fit in."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
import re
import subprocess
import sys
import tracemalloc
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice, pairwise, product
from math import prod
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from weft.config import BOS, EOS, PAD, UNK, TokenizerConfig
from weft.data import merges, vocabulary
from weft.data.merges import Coins
from weft.data.tokenizer_file import SPECIALS, WORDS
from weft.data.tokenizers import Tokenizer, TokenizerPair
from weft.data.vocabulary import make_pair, train_tokenizer

Kind = Literal["bpe", "unigram", "word", "char"]
KINDS: tuple[Kind, ...] = ("bpe", "unigram", "word", "char")
# Sentences of both languages, and text that spells what is not text, often enough to be learned.
CORPUS = [
    f"{who} {does} {what} {mark}"
    for who, does, what, mark in product(
        ("a man", "two women", "the children", "ein mann", "zwei frauen"),
        ("watches", "is playing with", "hört", "spielt mit"),
        ("a dog", "the older brothers", "einem größeren hund", "the t-shirt's owner"),
        (".", "<s>", "</s><pad> <unk>", "<0x41>"),
    )
]
ODD = [
    "",
    " ",
    "   a  man ",
    "\ta\nb\r\n c\x00\x07\x7f\u2028",
    "▁▁ a ▁man",
    "<s>a man</s>",
    "<s> </s><pad><unk> <0x41><0x0A>",
    "[CLS] [UNK]",
    "👩‍👩‍👧 naïve cafe\u0301 ǅ",
    "日本語とأبجد हिन्दी",
    "\ufeff\u200b\u0301\ufffe\U0010ffff",
    "größßer hund ,die frau.",
]
texts = st.one_of(
    st.text(),
    st.lists(st.sampled_from([*SPECIALS, "<0x41>", "[CLS]", "▁", " ", "a", "man", "hund", "ß", "\n", "é"])).map(
        "".join
    ),
    st.lists(st.sampled_from(CORPUS), max_size=3).map(" ".join),
)


@cache
def made(kind: Kind, vocab_size: int = 400) -> Tokenizer:
    return train_tokenizer(iter(CORPUS), TokenizerConfig(kind=kind, vocab_size=vocab_size))


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_opens_with_the_specials_and_keeps_its_size(kind: Kind) -> None:
    tokenizer = made(kind)
    assert tokenizer.kind == kind
    assert (PAD, BOS, EOS, UNK) == (0, 1, 2, 3)
    assert tokenizer.tokens(range(4)) == ["<pad>", "<s>", "</s>", "<unk>"]
    assert 4 < tokenizer.vocab_size <= 400
    assert repr(tokenizer) == f"Tokenizer({kind}, {tokenizer.vocab_size} tokens)"
    ids = tokenizer.encode_batch(CORPUS)
    assert {number for row in ids for number in row} <= set(range(4, tokenizer.vocab_size))
    assert [tokenizer.encode(text) for text in CORPUS] == ids
    assert [tokenizer.decode(row) for row in ids] == CORPUS


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("vocab_size", [260, 400, 8000])
def test_odd_texts_come_back(kind: Kind, vocab_size: int) -> None:
    tokenizer = made(kind, vocab_size)
    assert tokenizer.vocab_size <= vocab_size
    for text in ODD:
        ids = tokenizer.encode(text, strict=True)
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {PAD, BOS, EOS, UNK}
        assert tokenizer.unknown(text) == []


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@settings(max_examples=150)
@given(text=texts)
def test_any_text_comes_back(kind: Kind, text: str) -> None:
    ids = made(kind).encode(text)
    assert made(kind).decode(ids) == text
    assert all(UNK < number < made(kind).vocab_size for number in ids)


@settings(max_examples=60)
@given(words=st.lists(st.sampled_from(["", *" ".join(CORPUS).split()]), min_size=1))
def test_known_words_come_back_with_all_their_spaces(words: list[str]) -> None:
    text = " ".join(words)
    ids = made("word").encode(text, strict=True)
    assert made("word").decode(ids) == text
    assert len(ids) == (len(words) if text else 0)


def test_characters_are_code_points() -> None:
    tokenizer = made("char")
    assert tokenizer.vocab_size == 4 + len(set("".join(CORPUS)))
    assert len(tokenizer.encode("größer <s>")) == 10
    assert tokenizer.tokens(tokenizer.encode("a ß")) == ["a", "▁", "ß"]
    combined = train_tokenizer(["e\u0301\n"], TokenizerConfig(kind="char"))
    assert combined.encode("\u0301e", strict=True) == [6, 5]
    assert combined.encode("\u00e9") == [UNK]  # no normalisation


@pytest.mark.parametrize(
    ("kind", "text", "missing", "named"),
    [
        ("char", "a måñ å", ["å", "ñ"], "the character 'å' (U+00E5)"),
        ("char", "a 👩", ["👩"], "the character '👩' (U+1F469)"),
        ("word", "a Man  plays a dog dog's", ["Man", "plays", "dog's"], "the word 'Man'"),
        ("word", "dog's", ["dog's"], r"the word \"dog's\""),
        ("word", " ß the", ["ß"], "the character 'ß' (U+00DF)"),
    ],
)
def test_what_is_unknown_is_named(kind: Kind, text: str, missing: list[str], named: str) -> None:
    tokenizer = made(kind)
    assert tokenizer.unknown(text) == missing
    assert set(tokenizer.encode(text)) & {UNK}
    with pytest.raises(ValueError, match=r"is none of the \d+ known tokens") as error:
        tokenizer.encode(text, strict=True)
    assert str(error.value).startswith(named.replace("\\", ""))
    assert "\n" not in str(error.value)


def test_a_text_without_spaces_lacks_the_space() -> None:
    tokenizer = train_tokenizer(["ab"], TokenizerConfig(kind="char"))
    assert tokenizer.unknown("a b") == [" "]
    assert tokenizer.encode("a b") == [4, UNK, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_specials_have_no_text_and_unknown_words_can_be_given(kind: Kind) -> None:
    tokenizer = made(kind)
    ids = tokenizer.encode("a man")
    assert tokenizer.decode([BOS, *ids, EOS, PAD, PAD]) == "a man"
    assert tokenizer.decode([]) == tokenizer.decode([UNK, PAD]) == ""
    between = "" if kind == "char" else " "
    mixed = [BOS, UNK, *ids, UNK, UNK, EOS]
    assert tokenizer.decode(mixed) == "a man"
    assert tokenizer.decode(mixed, "<unk>") == between.join(["<unk>", "a man", "<unk>", "<unk>"])
    assert tokenizer.decode(mixed, ["x", "y", "z"]) == between.join(["x", "a man", "y", "z"])
    assert tokenizer.decode(ids, "<unk>") == "a man"
    with pytest.raises(ValueError, match="a word for each of the 3 unknown tokens, not 1"):
        tokenizer.decode(mixed, ["x"])


def test_unknown_words_keep_the_spaces_around_them() -> None:
    tokenizer, text = made("word"), "x  a man   y z a"
    assert tokenizer.decode(tokenizer.encode(text), tokenizer.unknown(text)) == text


@pytest.mark.parametrize("number", [-1, 10**6])
def test_a_number_that_is_no_token_is_refused(number: int) -> None:
    for call in (made("bpe").decode, made("bpe").tokens):
        with pytest.raises(ValueError, match=f"from 0 to {made('bpe').vocab_size - 1}, not {number}"):
            call([5, number])


def test_labels_can_be_read() -> None:
    bpe, word = made("bpe", 8000), made("word")
    assert bpe.tokens(bpe.encode("a man.\n ß")) == ["▁a", "▁man", ".", "<0x0A>", "▁", "ß"]
    assert word.tokens(word.encode("a  man q")) == ["a", "▁", "man", "<unk>"]
    odd = train_tokenizer(["\t\u200b\x07"], TokenizerConfig(kind="char"))
    assert odd.tokens(odd.encode("\t\u200b\x07")) == [r"\t", r"\u200b", r"\x07"]


def test_half_a_surrogate_pair_is_no_text() -> None:
    for kind in KINDS:
        with pytest.raises(ValueError, match="half a surrogate pair at"):
            train_tokenizer(["a\ud800b"], TokenizerConfig(kind=kind))
    for call in (made("bpe").encode, lambda text: made("bpe").encode_dropout(["a", text], 0.5, 1), made("bpe").unknown):
        with pytest.raises(ValueError, match=r"'a\\ud800b' has half a surrogate pair at 1"):
            call("a\ud800b")


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same(kind: Kind, tmp_path: Path) -> None:
    tokenizer, path = made(kind), tmp_path / "tokenizer.json"
    path.write_text("what was there", encoding="utf-8")
    tokenizer.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = Tokenizer.load(path)
    loaded.save(tmp_path / "again.json")
    assert sorted(os.listdir(tmp_path)) == ["again.json", "tokenizer.json"]
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    for other in (loaded, pickle.loads(pickle.dumps(tokenizer))):
        assert other.kind == kind
        assert other.fingerprint() == tokenizer.fingerprint()
        assert other.encode_batch([*CORPUS, *ODD]) == tokenizer.encode_batch([*CORPUS, *ODD])
    assert len({made(other).fingerprint() for other in KINDS}) == 4


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
def test_the_library_reads_the_file_by_itself(kind: Kind, tmp_path: Path) -> None:
    made(kind).save(tmp_path / "tokenizer.json")
    rust = Rust.from_file(str(tmp_path / "tokenizer.json"))
    assert rust.encode("a man watches a dog").ids == made(kind).encode("a man watches a dog")
    assert rust.decode([BOS, *rust.encode("a man").ids, EOS]) == "a man"


def test_training_follows_from_the_lines_alone(tmp_path: Path) -> None:
    program = (
        "import json, sys\nfrom weft.config import TokenizerConfig\nfrom weft.data.vocabulary import train_tokenizer\n"
        "lines = json.load(open(sys.argv[1], encoding='utf-8'))\n"
        "for kind in ('bpe', 'unigram', 'word', 'char'):\n"
        "    train_tokenizer(lines, TokenizerConfig(kind=kind, vocab_size=400)).save(f'{sys.argv[2]}/{kind}.json')\n"
    )
    running = []
    for number, parallel in enumerate(("true", "false")):
        lines = random.Random(number).sample(CORPUS, len(CORPUS))
        (tmp_path / f"{number}.json").write_text(json.dumps(lines), encoding="utf-8")
        (tmp_path / str(number)).mkdir()
        seeds = {"PYTHONHASHSEED": str(number), "TOKENIZERS_PARALLELISM": parallel}
        command = [sys.executable, "-c", program, str(tmp_path / f"{number}.json"), str(tmp_path / str(number))]
        running.append(subprocess.Popen(command, env={**os.environ, **seeds}))
    assert [process.wait() for process in running] == [0, 0]
    for kind in KINDS:
        made(kind).save(tmp_path / f"{kind}.json")
        found = {(tmp_path / folder / f"{kind}.json").read_bytes() for folder in ("0", "1", ".")}
        assert len(found) == 1, kind


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lines", [[], [""], [" "], ["a"], ["ab ab"], ["日本語"], ["\n", "\t"], ["ab" * 50]])
@pytest.mark.parametrize("vocab_size", [260, 261, 270, 8000])
def test_a_tiny_corpus_is_enough(kind: Kind, lines: list[str], vocab_size: int) -> None:
    tokenizer = train_tokenizer(lines, TokenizerConfig(kind=kind, vocab_size=vocab_size))
    assert tokenizer.vocab_size <= vocab_size
    if kind in ("bpe", "unigram"):
        lines = [*lines, *ODD]
    assert [tokenizer.decode(tokenizer.encode(line, strict=True)) for line in lines] == lines


def test_a_vocabulary_without_room_is_refused() -> None:
    for kind, least in (("bpe", 260), ("unigram", 260)):
        config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 259})
        with pytest.raises(ValueError, match=f"vocab_size must be at least {least}.*{kind}.*, not 259"):
            train_tokenizer(CORPUS, config)


def test_words_are_kept_by_how_often_they_occur() -> None:
    tokenizer = train_tokenizer(["c b a b", "c c d"], TokenizerConfig(kind="word", vocab_size=8))
    assert tokenizer.vocab_size == 8
    assert tokenizer.tokens(range(4, 8)) == ["▁", "c", "b", "a"]
    assert tokenizer.unknown("a b c d") == ["d"]


def test_words_too_long_to_study_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_STUDIED", 0)
    tokenizer = train_tokenizer(["ab" * 50] * 2, TokenizerConfig(kind="unigram"))
    assert tokenizer.decode(tokenizer.encode("ab" * 50)) == "ab" * 50


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_rare_characters_leave_room_for_words(kind: Kind) -> None:
    rare = [chr(0x4E00 + number) for number in range(500)]
    tokenizer = train_tokenizer([*CORPUS, *rare], TokenizerConfig(kind=kind, vocab_size=400))
    assert tokenizer.vocab_size == 400
    assert tokenizer.tokens(tokenizer.encode("a man")) == ["▁a", "▁man"]
    assert tokenizer.decode(tokenizer.encode("".join(rare))) == "".join(rare)
    assert len(tokenizer.encode(rare[-1])) == 4  # the space and three bytes


def test_marks_do_not_cling_to_words() -> None:
    tokenizer = train_tokenizer(["the end.", "the end,"] * 50, TokenizerConfig())
    assert tokenizer.tokens(tokenizer.encode("end, the end.")) == ["▁end", ",", "▁the", "▁end", "."]


def test_bpe_is_what_the_library_learns_from_the_lines() -> None:
    rust = Rust(models.BPE(byte_fallback=True))
    rust.normalizer, rust.pre_tokenizer = normalizers.Prepend(" "), WORDS
    specials = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, min_frequency=2, special_tokens=specials, show_progress=False)
    rust.train_from_iterator(CORPUS, trainer)
    rust.encode_special_tokens = True
    lines = [*CORPUS, *ODD]
    assert [encoding.ids for encoding in rust.encode_batch(lines)] == made("bpe").encode_batch(lines)


def test_what_was_seen_once_is_not_learned() -> None:
    tokenizer = train_tokenizer(["both one", "both"], TokenizerConfig())
    assert tokenizer.tokens(tokenizer.encode("both one")) == ["▁both", "▁", "o", "n", "e"]


@pytest.mark.parametrize("vocab_size", [330, 400])
def test_unigram_needs_fewer_tokens_than_the_librarys_own_training(vocab_size: int) -> None:
    rust = Rust(models.Unigram())
    rust.normalizer, rust.pre_tokenizer = normalizers.Prepend(" "), WORDS
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - 259, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    theirs = sum(len(encoding.ids) for encoding in rust.encode_batch(CORPUS))
    tokenizer = made("unigram", vocab_size)
    ours = tokenizer.encode_batch(CORPUS)
    assert sum(map(len, ours)) < theirs
    assert not any(label.startswith("<0x") for row in ours for label in tokenizer.tokens(row))  # single characters stay
    scores = [score for _, score in json.loads(tokenizer._rust.to_str())["model"]["vocab"]][260:]
    assert scores == sorted(scores, reverse=True)


def test_the_likeliest_spelling_is_found() -> None:
    pieces = {"a": -2.0, "b": -2.5, "ab": -4.6, "ba": -3.0, "aba": -6.4}
    table = {piece[:end]: float("-inf") for piece in pieces for end in range(1, len(piece) + 1)} | pieces

    def all_ways(text: str) -> Iterator[list[str]]:
        if not text:
            yield []
        for end in range(1, len(text) + 1):
            if text[:end] in pieces:
                yield from ([text[:end], *rest] for rest in all_ways(text[end:]))

    for text in map("".join, product("ab", repeat=6)):
        score, spelled = vocabulary._spelling(text, table, len(text))
        assert "".join(spelled) == text
        assert score == pytest.approx(sum(map(pieces.__getitem__, spelled)))
        assert score == pytest.approx(max(sum(map(pieces.__getitem__, way)) for way in all_ways(text)))
    assert vocabulary._spelling("aba", table, 2)[1] == ["a", "ba"]
    assert vocabulary._spelling("aba", table | {"aba": -4.0}, 3)[1] == ["aba"]


@pytest.mark.parametrize("kind", ["bpe", "word", "char"])
def test_lines_are_not_kept(kind: Kind) -> None:
    words = [f"w{number}" for number in range(300)]

    def peak(count: int) -> int:
        lines = (" ".join(random.Random(number).choices(words, k=300)) for number in range(count))
        tracemalloc.start()
        train_tokenizer(lines, TokenizerConfig(kind=kind, vocab_size=300))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(250) < peak(50) + 60_000  # of 250 kB of text more


def test_words_are_forgotten_before_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_COUNTED", 50)
    once = (f"the dog once{number}" for number in range(1000))
    tokenizer = train_tokenizer(once, TokenizerConfig(kind="word"))
    assert tokenizer.vocab_size <= 4 + 50
    assert tokenizer.unknown("the dog") == []


@pytest.mark.parametrize("setting", [{}, {"TOKENIZERS_PARALLELISM": "true"}])
def test_a_forked_process_can_encode(setting: dict[str, str]) -> None:
    program = (
        "import os\nfrom weft.config import TokenizerConfig\nfrom weft.data.vocabulary import train_tokenizer\n"
        "tokenizer = train_tokenizer(['a b c'] * 9, TokenizerConfig())\nids = tokenizer.encode_batch(['a b'] * 1000)\n"
        "child = os.fork()\n"
        "if child == 0:\n    os._exit(0 if tokenizer.encode_batch(['a b'] * 1000) == ids else 3)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    command, environment = [sys.executable, "-c", program], {**environment, **setting}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def every_merge_by_hand(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    """What our own merges make of the lines, none left out and none taken from the library."""

    def heads(p: float, seed: str) -> Coins:
        coins = Always(p, seed)
        coins.heads = -1
        return coins

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merges, "Coins", heads)
        return tokenizer.encode_dropout(lines, 0.5, 1)


class Always(Coins):
    def __call__(self) -> bool:
        return True


@settings(max_examples=150)
@given(text=texts)
@example(" ".join(ODD))
def test_without_dropped_merges_it_is_the_librarys_bpe(text: str) -> None:
    for tokenizer in (made("bpe"), made("bpe", 8000)):
        plain = [tokenizer.encode(text)]
        assert every_merge_by_hand(tokenizer, [text]) == plain
        assert tokenizer.encode_dropout([text], 0.0, 1) == plain
        assert tokenizer.encode_dropout([text], 1e-12, 1) == plain


@settings(max_examples=60)
@given(text=texts, p=st.floats(0.0, 1.0), seed=st.integers())
def test_dropout_only_cuts_differently(text: str, p: float, seed: int) -> None:
    [ids] = made("bpe").encode_dropout([text], p, seed)
    assert made("bpe").decode(ids) == text
    assert len(ids) >= len(made("bpe").encode(text)) if p in (0.0, 1.0) else True
    [single] = made("bpe").encode_dropout([text], 1.0, seed)
    assert all(len(label) == 1 or label.startswith("<0x") for label in made("bpe").tokens(single))


def test_dropout_follows_from_text_and_seed() -> None:
    tokenizer = made("bpe", 8000)
    random.seed(7)
    before = random.getstate()
    batch = tokenizer.encode_dropout(CORPUS, 0.3, 5)
    seeds = list(range(len(CORPUS)))
    each = tokenizer.encode_dropout(CORPUS, 0.3, seeds)
    assert random.getstate() == before
    for number in (0, 17, len(CORPUS) - 1):
        assert tokenizer.encode_dropout([CORPUS[number]], 0.3, 5) == [batch[number]]
        assert tokenizer.encode_dropout([CORPUS[number]], 0.3, [number]) == [each[number]]
    fresh = pickle.loads(pickle.dumps(tokenizer))
    assert fresh.encode_dropout(CORPUS[::-1], 0.3, seeds[::-1]) == each[::-1]
    assert batch != each
    assert len({tuple(row) for row in tokenizer.encode_dropout([CORPUS[0]] * 50, 0.3, range(50))}) > 20
    starts = {tuple(row[:3]) for row, text in zip(batch, CORPUS, strict=True) if text.startswith("the children")}
    assert len(starts) > 3  # one seed for all does not cut the same word in the same way everywhere
    with pytest.raises(ValueError, match="a seed for each of the 2 texts, not 3"):
        tokenizer.encode_dropout(["a", "b"], 0.1, [1, 2, 3])


Shares = dict[tuple[str, ...], float]


def probabilities(symbols: tuple[str, ...], ranks: dict[tuple[str, str], int], p: float) -> Shares:
    """How likely each outcome is, as the paper has it: before each step every possible merge is dropped or not."""
    places = [(ranks[pair], place) for place, pair in enumerate(pairwise(symbols)) if pair in ranks]
    found: Shares = defaultdict(float)
    for kept in product((False, True), repeat=len(places)):
        share = prod(1 - p if one else p for one in kept)
        left = [place for place, one in zip(places, kept, strict=True) if one]
        if not left:
            found[symbols] += share
            continue
        _, at = min(left)
        after = (*symbols[:at], symbols[at] + symbols[at + 1], *symbols[at + 2 :])
        for outcome, further in probabilities(after, ranks, p).items():
            found[outcome] += share * further
    return found


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_merges_are_dropped_as_often_as_the_paper_says(p: float) -> None:
    merges = [("a", "b"), ("b", "a"), ("ab", "ab"), ("a", "ba"), ("aba", "b")]
    pieces = [*SPECIALS, "a", "b", "ab", "ba", "abab", "aba"]
    rust = Rust(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges, unk_token="<unk>"))
    tokenizer, draws = Tokenizer(rust), 8_000
    rows = tokenizer.encode_dropout(["ababab"] * draws, p, range(draws))
    found = Counter(tuple(tokenizer.tokens(row)) for row in rows)
    expected = probabilities(tuple("ababab"), {pair: rank for rank, pair in enumerate(merges)}, p)
    assert found.keys() <= expected.keys()
    assert sum(expected.values()) == pytest.approx(1.0)
    for outcome, share in expected.items():  # within five standard deviations
        assert abs(found[outcome] - draws * share) < 5 * (draws * share * (1 - share)) ** 0.5 + 1, outcome


def test_words_of_a_text_are_drawn_for_apart() -> None:
    rust = Rust(models.BPE({piece: number for number, piece in enumerate([*SPECIALS, "a", "b", "ab"])}, [("a", "b")]))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    [ids] = Tokenizer(rust).encode_dropout([" ".join(["ab"] * 8_000)], 0.2, 1)
    whole = [number == 6 for number in ids if number != 5]
    assert len(whole) == 8_000
    assert sum(whole) == pytest.approx(6_400, abs=180)  # five standard deviations
    after_whole = [second for first, second in pairwise(whole) if first]
    assert sum(after_whole) == pytest.approx(0.8 * len(after_whole), abs=180)


def test_only_bpe_has_merges_to_drop() -> None:
    assert made("unigram").encode_dropout(["a man"], 0.0, 1) == [made("unigram").encode("a man")]
    with pytest.raises(ValueError, match=r"only bpe has merges.*dropout 0 for unigram, not 0\.1"):
        made("unigram").encode_dropout(["a"], 0.1, 1)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match=f"from 0 to 1, not {p}"):
            made("bpe").encode_dropout(["a"], p, 1)


def wordpiece() -> Rust:
    """As BERT's: lower case, its own specials at its own places, a frame, cut at three tokens."""
    rust = Rust(models.WordPiece(unk_token="[UNK]"))
    rust.normalizer, rust.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=200, special_tokens=["[UNK]", "[MASK]", "[PAD]", "[SEP]", "[CLS]"], show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 4))
    rust.decoder = decoders.WordPiece()
    rust.enable_truncation(3)
    rust.enable_padding(length=8)
    return rust


def byte_level() -> Rust:
    """As GPT-2's: bytes, no special but one that marks the end of a text."""
    rust = Rust(models.BPE())
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    rust.train_from_iterator([*CORPUS, *["<s>"] * 50], trainer)  # "<s>" has become a token like others
    return rust


def sentencepiece() -> Rust:
    """As T5's: unigram with ▁, the padding first, no begin, and tokens that the model does not know."""
    rust = Rust(models.Unigram())
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150, unk_token="<unk>", special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.add_special_tokens(["<extra_id_0>", "<extra_id_1>"])
    return rust


def suffixed() -> Rust:
    """As subword-nmt's: the end of a word is marked, unknown characters are one token, merges are dropped at random."""
    rust = Rust(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>", fuse_unk=True))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=300, end_of_word_suffix="</w>", special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    rust.model.dropout = 0.5
    return rust


def prefixed() -> Rust:
    """The inside of a word is marked, and what is unknown vanishes."""
    rust = Rust(models.BPE(continuing_subword_prefix="##"))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    trainer = trainers.BpeTrainer(
        vocab_size=300, continuing_subword_prefix="##", special_tokens=["[PAD]"], show_progress=False
    )
    rust.train_from_iterator(CORPUS, trainer)
    return rust


def words_apart() -> Rust:
    """Words as tokens, "<s>" one of them, in a vocabulary with holes, whose unknown word has a name of its own."""
    words = sorted(set(" ".join(CORPUS).split()))
    vocab = {word: 3 * number for number, word in enumerate([*words, "UNKNOWN", "<bos>", "<eos>"])}
    rust = Rust(models.WordLevel(vocab, unk_token="UNKNOWN"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rust.add_special_tokens(["<bos>", "<eos>"])
    return rust


FOREIGN: dict[str, tuple[Callable[[], Rust], list[str], list[str]]] = {
    "wordpiece": (
        wordpiece,
        ["[PAD]", "[CLS]", "[SEP]", "[UNK]"],
        ["[PAD] moved from 2 to 0", "[UNK] moved from 0 to 3", "truncation left out", "post_processor left out"],
    ),
    "byte_level": (byte_level, ["<pad>", "<s>", "</s>", "<unk>"], ["<pad> added as 0", "renumbered"]),
    "sentencepiece": (
        sentencepiece,
        ["<pad>", "<s>", "</s>", "<unk>"],
        ["<s> added as 1", "</s> moved from 1 to 2", "<unk> moved from 2 to 3"],
    ),
    "suffixed": (suffixed, ["<pad>", "<s>", "</s>", "<unk>"], ["<s> moved from 0 to 1", "dropout left out"]),
    "prefixed": (prefixed, ["[PAD]", "<s>", "</s>", "<unk>"], ["</s> added as 2", "renumbered"]),
    "words_apart": (
        words_apart,
        ["<pad>", "<bos>", "<eos>", "UNKNOWN"],
        ["<pad> added as 0", "UNKNOWN moved from ", "renumbered"],
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_tokenizer_made_elsewhere_fits_in(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make, specials, said = FOREIGN[name]
    rust, path = make(), tmp_path / "tokenizer.json"
    rust.save(str(path))
    capfd.readouterr()
    with pytest.warns(UserWarning, match="^" + re.escape(f"{path}: ")) as warned:
        tokenizer = Tokenizer.load(path)
    [message] = [str(one.message) for one in warned]
    assert [part for part in said if part not in message] == []
    assert capfd.readouterr() == ("", "")

    rust.no_truncation()
    rust.no_padding()
    if isinstance(rust.model, models.BPE):
        rust.model.dropout = None
    plain = [text for text in [*CORPUS, "der müde hund SCHLÄFT heute 12 日本"] if "<" not in text]
    for text in plain:
        expected = rust.encode(text, add_special_tokens=False).ids
        ids = tokenizer.encode(text)
        known = [number for number in ids if number != UNK] if name == "prefixed" else ids
        assert [*map(tokenizer._rust.id_to_token, known)] == [*map(rust.id_to_token, expected)]
        if UNK not in ids:
            assert tokenizer.decode([BOS, *ids, EOS, PAD]) == rust.decode(expected)
    assert UNK not in tokenizer.encode(plain[0])
    assert (UNK in tokenizer.encode(plain[-1])) == (name != "byte_level")
    assert tokenizer.tokens(range(4)) == specials
    assert tokenizer.vocab_size == len(tokenizer._rust.get_vocab())
    assert {tokenizer._rust.id_to_token(number) for number in range(tokenizer.vocab_size)} == {
        *rust.get_vocab(),
        *specials,
    }

    tokenizer.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = Tokenizer.load(path)
    assert again.fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize("name", FOREIGN)
def test_no_text_spells_a_special_of_a_tokenizer_made_elsewhere(name: str, tmp_path: Path) -> None:
    make, specials, _ = FOREIGN[name]
    make().save(str(tmp_path / "tokenizer.json"))
    with pytest.warns(UserWarning, match=re.escape(FOREIGN[name][2][0])):
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    for special in [*specials, *SPECIALS]:
        for text in (special, f"a{special}b", f"a {special} man {special}{special}"):
            assert not set(tokenizer.encode(text)) & {PAD, BOS, EOS}
    if name == "byte_level":
        assert all(tokenizer.decode(tokenizer.encode(text, strict=True)) == text for text in ODD)
        assert tokenizer.tokens(tokenizer.encode("a größer\n")) == ["a", "▁größ", "er", r"\n"]


@pytest.mark.parametrize("name", ["byte_level", "suffixed", "prefixed"])
def test_merges_of_a_tokenizer_made_elsewhere_can_be_dropped(name: str, tmp_path: Path) -> None:
    FOREIGN[name][0]().save(str(tmp_path / "tokenizer.json"))
    with pytest.warns(UserWarning, match=re.escape(FOREIGN[name][2][0])):
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.kind == "bpe"
    lines = [*CORPUS, *ODD]
    assert every_merge_by_hand(tokenizer, lines) == tokenizer.encode_batch(lines)
    dropped = tokenizer.encode_dropout(CORPUS, 0.5, 1)
    assert [tokenizer.decode(row) for row in dropped] == [tokenizer.decode(tokenizer.encode(text)) for text in CORPUS]
    assert sum(map(len, dropped)) > sum(map(len, tokenizer.encode_batch(CORPUS)))


def test_what_only_looks_like_ours_is_guarded_too(tmp_path: Path) -> None:
    tree = json.loads(made("word")._rust.to_str())
    tree["normalizer"] = None  # now a first word has no space before it
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode("<s> a") == [UNK, UNK, *made("word").encode("a")]


def test_gpt2_fits_in(weft_weights: Path, tmp_path: Path) -> None:
    folder = weft_weights / "tokenizers" / "gpt2-bpe"
    rust = Rust(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    rust.pre_tokenizer, rust.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    rust.save(str(tmp_path / "tokenizer.json"))
    with pytest.warns(UserWarning, match="<pad> added as 0"):
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == 50257 + 4
    assert [number - 4 for number in tokenizer.encode("Hello world")] == [15496, 995]  # as published
    lines = [*CORPUS, *ODD]
    assert [tokenizer.decode(row) for row in tokenizer.encode_batch(lines)] == lines
    assert every_merge_by_hand(tokenizer, lines) == tokenizer.encode_batch(lines)


def test_a_missing_file_is_an_oserror(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(OSError, match=path.name):
            Tokenizer.load(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"model": {}}',
        b'{"version": "1.0", "model": {"type": "Magic", "vocab": {}}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": "b"}, "merges": []}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b'{"version": "1.0", "model": {"type": "Unigram", "vocab": [], "unk_id": 3}}',
        b'{"version": "1.0", "model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 3}}',
    ],
)
def test_a_damaged_file_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer\.json: ") as error:
        Tokenizer.load(path)
    assert "\n" not in str(error.value)


def test_far_numbers_take_no_memory(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {"b": 2**32 - 1, "a": 2**31}, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}), encoding="utf-8")
    with pytest.warns(UserWarning, match="<pad> added as 0"):
        tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert tokenizer.encode("abc") == [4, 5, UNK]


def branches(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all places in a tree of JSON, a few of each long list."""
    yield path
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in islice(inner, 6):
        yield from branches(value, (*path, key))


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word"])
@settings(max_examples=60)
@given(draw=st.data())
def test_a_changed_file_is_read_or_refused(
    kind: Kind, draw: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tree = json.loads(made(kind)._rust.to_str())
    *path, last = draw.draw(st.sampled_from([path for path in branches(tree) if path]))
    place = tree
    for key in path:
        place = place[key]
    place[last] = draw.draw(st.sampled_from([None, -1, 0, 2**40, "", "x", [], {}, True, 0.5, [["a", 0.0]], {"a": 1}]))
    file = tmp_path_factory.mktemp("changed") / "tokenizer.json"
    file.write_text(json.dumps(tree), encoding="utf-8")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tokenizer = Tokenizer.load(file)
        except ValueError as error:
            assert "\n" not in str(error)  # noqa: PT017
        else:
            assert max(tokenizer.encode("a man <s>"), default=0) < tokenizer.vocab_size


def test_a_pair_is_joint_or_not_in_its_folder(tmp_path: Path) -> None:
    joint, apart = TokenizerPair(made("bpe"), made("bpe")), TokenizerPair(made("bpe"), made("char"))
    for pair, names in (
        (joint, ["tokenizer.json"]),
        (apart, ["tokenizer.source.json", "tokenizer.target.json"]),
        (joint, ["tokenizer.json"]),
    ):
        pair.save(tmp_path)
        assert sorted(os.listdir(tmp_path)) == names
        loaded = TokenizerPair.load(tmp_path)
        assert loaded.joint == pair.joint == (len(names) == 1)
        assert loaded.fingerprint() == pair.fingerprint()
        assert (loaded.source.kind, loaded.target.kind) == (pair.source.kind, pair.target.kind)
    sides = [made("bpe"), made("char"), made("bpe", 300)]
    assert len({TokenizerPair(*both).fingerprint() for both in product(sides, repeat=2)}) == 9


def test_a_pair_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"neither tokenizer\.json nor tokenizer\.source\.json and"):
        TokenizerPair.load(tmp_path)
    made("char").save(tmp_path / "tokenizer.source.json")
    with pytest.raises(OSError, match=r"tokenizer\.target\.json"):
        TokenizerPair.load(tmp_path)


def test_a_recipe_makes_a_pair(tmp_path: Path) -> None:
    english, german = ["a man", "a dog"] * 9, ["ein mann", "ein hund"] * 9

    def pair(**values: Any) -> TokenizerPair:
        return make_pair(TokenizerConfig(**values), lambda: iter(english), lambda: iter(german))

    joint = pair(kind="word")
    assert joint.joint
    assert joint.source.unknown(" ".join(english + german)) == []
    apart = pair(kind="word", joint=False)
    assert not apart.joint
    assert apart.source.unknown("a mann") == ["mann"]
    assert apart.target.unknown("a mann") == ["a"]

    apart.save(tmp_path)
    files = [str(tmp_path / "tokenizer.source.json"), str(tmp_path / "tokenizer.target.json")]
    for path in (files, ",".join(files)):
        assert pair(path=path, joint=False).fingerprint() == apart.fingerprint()
    brought = pair(path=files[0])
    assert brought.joint
    assert brought.source.fingerprint() == apart.source.fingerprint()
    with pytest.raises(ValueError, match=r"must name two files if tokenizer\.joint is false, not"):
        pair(path=files[0], joint=False)
    with pytest.raises(ValueError, match=r"must name one file if tokenizer\.joint is true, not"):
        pair(path=files)
    assert pair(dropout=0.1).source.kind == "bpe"
    for asked in ({"kind": "unigram"}, {"path": files[0]}):
        with pytest.raises(ValueError, match=r"tokenizer\.dropout .* expected 0\.0 for (unigram|word), not 0\.1"):
            pair(dropout=0.1, **asked)


def test_tokenised_text_comes_back(weft_data: Path) -> None:
    lines: list[str] = []
    for language in ("en", "de"):
        file = weft_data / "multi30k" / "tok" / f"train.lc.norm.tok.{language}.gz"
        if not file.is_file():
            pytest.skip(f"no {file}")
        with gzip.open(file, "rt", encoding="utf-8", newline="\n") as opened:
            lines += [line.rstrip("\n") for line in islice(opened, 2000)]
    for kind in KINDS:
        vocab_size = 20_000 if kind == "word" else 1_500  # all words are known
        tokenizer = train_tokenizer(lines, TokenizerConfig(kind=kind, vocab_size=vocab_size))
        assert [tokenizer.decode(row) for row in tokenizer.encode_batch(lines)] == lines
        if kind == "bpe":
            assert [tokenizer.decode(row) for row in tokenizer.encode_dropout(lines, 0.1, 1)] == lines
