"""Every pair once an epoch, within the budget, from the seed and the number alone."""

from __future__ import annotations

import gzip
import itertools
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from weft.config import BOS, EOS, PAD, DataConfig, TokenizerConfig
from weft.data import batching
from weft.data.batching import Batch, Batches, in_order, in_turn, scrambled
from weft.data.disk import Sequences
from weft.data.store import Facts, PairStore, prepare
from weft.data.tokenizers import TokenizerPair
from weft.data.vocabulary import train_tokenizer


def make_store(lengths: Sequence[tuple[int, int]]) -> PairStore:
    """Pair i is the token 4 + i, so many times a side, and EOS."""
    sides = ([[4 + i] * (pair[n] - 1) + [EOS] for i, pair in enumerate(lengths)] for n in range(2))
    return PairStore(*map(Sequences.of, sides), Facts(0, 0.0, {}, {}))


def some_lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Sides of 2 to about 60 tokens, one about as long as the other."""
    random = np.random.default_rng(seed)
    source = random.gamma(3.0, 6.0, count).astype(int) + 2
    target = np.maximum((source * random.normal(1.0, 0.2, count)).astype(int), 2)
    return list(zip(source.tolist(), target.tolist(), strict=True))


def numbers(batch: Batch) -> list[int]:
    """Which pairs of ``make_store`` are in a batch."""
    return (batch.source[:, 0] - 4).tolist()


def same(one: Batch, two: Batch) -> bool:
    return torch.equal(one.source, two.source) and torch.equal(one.target, two.target)


def check_rows(batch: Batch, store: PairStore) -> None:
    """Each row is its pair; the tensors are no wider than their longest row."""
    assert batch.source.dtype == batch.target.dtype == torch.int64
    for side, begin, sequences in ((batch.source, [], store.sources), (batch.target, [BOS], store.targets)):
        longest = 0
        for i, row in zip(numbers(batch), side.tolist(), strict=True):
            real = begin + sequences[i].tolist()
            assert row == real + [PAD] * (len(row) - len(real))
            longest = max(longest, len(real))
        assert side.shape[1] == longest


def cost(batch: Batch) -> int:
    """What a batch is taken to cost: for each token its activations, and a weight for each key that it attends to."""
    rows, source, target = len(batch.source), batch.source.shape[1], batch.target.shape[1]
    return rows * (640 * (source + target) + source * source + target * source + target * target)


def share_of_padding(made: Sequence[Batch]) -> float:
    sides = [side for batch in made for side in batch]
    return sum(int((side == PAD).sum()) for side in sides) / sum(side.numel() for side in sides)


# All kinds together, and such as share their buckets.
lengths = st.one_of(
    st.lists(st.tuples(st.integers(low, high), st.integers(low, high)), min_size=1, max_size=60)
    for low, high in ((2, 80), (30, 45), (65, 80))
)


@example(lengths=[(36, 19), *[(35, 34)] * 5], batch_tokens=140, seed=0)  # a bucket narrower than the one before it
@example(lengths=[(36, 35), *[(35, 34)] * 3], batch_tokens=140, seed=0)  # two widths in one bucket
@example(lengths=[(100, 4), (5, 98)], batch_tokens=100, seed=0)  # a costly source
@given(lengths=lengths, batch_tokens=st.integers(1, 1000), seed=st.integers(0, 2**64))
def test_every_pair_once_an_epoch_within_the_budget(
    lengths: list[tuple[int, int]], batch_tokens: int, seed: int
) -> None:
    store = make_store(lengths)
    batches = Batches(store, batch_tokens, seed)
    for epoch in (0, 1, 5):
        made = [batches.at(epoch * batches.per_epoch + n) for n in range(batches.per_epoch)]
        assert sorted(i for batch in made for i in numbers(batch)) == list(range(len(store)))
        for batch in made:
            check_rows(batch, store)
            rows, width = len(batch.source), max(batch.source.shape[1], batch.target.shape[1])
            assert rows == 1 or rows * width <= batch_tokens
        if epoch == 0:
            assert batches.padding == pytest.approx(share_of_padding(made))
            assert cost(batches.costliest()) == max(map(cost, made))
    for batch in (ordered := list(in_order(store, batch_tokens))):
        check_rows(batch, store)
    assert sorted(i for batch in ordered for i in numbers(batch)) == list(range(len(store)))
    assert len(ordered) == batches.per_epoch
    assert all(map(same, ordered, in_order(store, batch_tokens)))


def test_a_batch_follows_from_its_number_alone() -> None:
    store = make_store(some_lengths(500))
    batches = Batches(store, 256, seed=7)
    wanted = [0, 3, batches.per_epoch + 1, 9 * batches.per_epoch, 2]
    one = {n: batches.at(n) for n in wanted}
    for n in reversed(wanted):
        assert same(Batches(store, 256, seed=7).at(n), one[n])
        assert same(batches.at(n), one[n])
    with pytest.raises(ValueError, match="there is no batch -1"):
        batches.at(-1)


def test_epochs_and_seeds_differ_in_order_and_in_company() -> None:
    store = make_store(some_lengths(3000))
    batches, other = Batches(store, 512, seed=1), Batches(store, 512, seed=2)
    epochs = [
        [tuple(numbers(source.at(start + n))) for n in range(source.per_epoch)]
        for source, start in ((batches, 0), (batches, batches.per_epoch), (other, 0))
    ]
    for one, two in itertools.combinations(epochs, 2):
        together = [
            {frozenset(pair) for rows in made for pair in itertools.combinations(rows, 2)} for made in (one, two)
        ]
        assert len(together[0] & together[1]) < 0.8 * len(together[0])
        widths = [
            [max(max(store.sources.lengths[i], store.targets.lengths[i]) for i in rows) for rows in made]
            for made in (one, two)
        ]
        assert widths[0] != widths[1]  # the batches come in another order …
        assert sum(abs(a - b) for a, b in zip(*map(sorted, widths), strict=True)) < 0.05 * sum(
            widths[0]
        )  # … but are alike
    rising = sum(a < b for a, b in itertools.pairwise(widths[0]))
    assert 0.3 < rising / len(widths[0]) < 0.7  # lengths come mixed


def test_all_orders_are_as_likely() -> None:
    store = make_store([(5, 5)] * 3)
    batches = Batches(store, 1000, seed=3)
    seen = Counter(tuple(numbers(batches.at(n))) for n in range(3000))
    assert len(seen) == 6
    # χ² with 5 degrees of freedom: above 20.5 once in a thousand
    assert sum((count - 500) ** 2 / 500 for count in seen.values()) < 20.5


@pytest.mark.parametrize("world", [2, 3])
def test_no_two_ranks_see_the_same_pair_in_an_epoch(world: int) -> None:
    store = make_store(some_lengths(400))
    ranks = [Batches(store, 256, seed=0) for _ in range(world)]
    steps = ranks[0].per_epoch * 2
    seen = [
        (n // ranks[0].per_epoch, i)
        for rank, batches in enumerate(ranks)
        for n in range(rank, steps, world)
        for i in numbers(batches.at(n))
    ]
    assert sorted(seen) == [(epoch, i) for epoch in range(2) for i in range(len(store))]


def test_padding_is_told_and_the_costliest_is_one_of_them() -> None:
    store = make_store([*some_lengths(2000), (61, 12), (7, 90)])
    batches = Batches(store, 1024, seed=4)
    made = [batches.at(n) for n in range(batches.per_epoch)]
    assert share_of_padding(made) < 0.12
    assert batches.report() == (
        f"{batches.per_epoch} batches an epoch of up to 1,024 tokens a side, {100 * batches.padding:.1f}% padding"
    )
    costliest = batches.costliest()
    assert any(same(costliest, batch) for batch in made)
    batches.at(5 * batches.per_epoch)
    assert same(batches.costliest(), costliest)


def test_one_pair_past_any_budget_is_the_costliest() -> None:
    store = make_store([*some_lengths(100), (3000, 4)])
    costliest = Batches(store, 512, seed=0).costliest()
    assert costliest.source.shape == (1, 3000)


def test_a_plan_takes_few_bytes_a_pair() -> None:
    count = 300_000
    sides = [np.arange(count + 1) * length for length in (3, 4)]
    store = PairStore(*(Sequences(np.full(o[-1], 4, np.uint16), o) for o in sides), Facts(0, 0.0, {}, {}))
    tracemalloc.start()
    try:
        batches = Batches(store, 4096, seed=1)
        batches.at(0)
        assert tracemalloc.get_traced_memory()[0] < 10 * count  # 5 million pairs: 50 MB
        tracemalloc.reset_peak()
        batches.at(batches.per_epoch)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10 * count
    assert peak < 34 * count  # 5 million: 170 MB, for the second that it takes to change the epoch


def test_multi30k_has_little_padding(weft_data: Path) -> None:
    sides = []
    for language in ("en", "de"):
        with gzip.open(weft_data / f"multi30k/tok/train.lc.norm.tok.{language}.gz", "rt", encoding="utf-8") as file:
            sides.append([len(line.split()) + 1 for line in file])
    offsets = [np.concatenate(([0], np.cumsum(side))) for side in sides]
    store = PairStore(*(Sequences(np.full(o[-1], 4, np.uint16), o) for o in offsets), Facts(0, 0.0, {}, {}))
    assert Batches(store, 4096, seed=1).padding < 0.04


@dataclass
class ParallelLines:
    """Each line beside itself."""

    lines: list[str]
    name: str = "lines"

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter([(line, line) for line in self.lines])

    def fingerprint(self) -> str:
        return repr(self.lines)

    def place(self, index: int) -> str:
        return str(index)


@dataclass
class Letters:
    """A stand-in for BPE: a token for each pair of letters, unless dropout splits it in two."""

    kind: str = "bpe"
    seeds: list[int] = field(default_factory=list)
    tags: dict[str, int] = field(default_factory=dict)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + (n - 4) % 26) + (chr(97 + (n - 30) // 26) if n >= 30 else "") for n in ids)

    def encode(self, text: str, drop: int = 0) -> list[int]:
        found: list[int] = []
        for place in range(0, len(text), 2):
            codes = [ord(letter) - 97 for letter in text[place : place + 2]]
            if len(codes) == 2 and not drop >> (place // 2 % 64) & 1:
                codes = [26 + codes[0] + 26 * codes[1]]
            found += [4 + code for code in codes]
        return found

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_dropout(self, texts: Sequence[str], p: float, seed: Sequence[int]) -> list[list[int]]:
        assert p == 0.1
        self.seeds += seed
        return [self.encode(text, one) for text, one in zip(texts, seed, strict=True)]


@dataclass
class BothLetters:
    source: Letters = field(default_factory=Letters)
    target: Letters = field(default_factory=Letters)


def lettered(count: int) -> tuple[PairStore, dict[tuple[str, str], int]]:
    """A store of texts in Letters, and the number of each."""
    random = np.random.default_rng(0)
    both = [
        tuple("".join(chr(97 + c) for c in random.integers(0, 26, 2 * random.integers(2, 12))) for _ in range(2))
        for _ in range(count)
    ]
    sides = ([[*Letters().encode(pair[n]), EOS] for pair in both] for n in range(2))
    return PairStore(*map(Sequences.of, sides), Facts(0, 0.0, {}, {})), {(a, b): i for i, (a, b) in enumerate(both)}


def spelled(batch: Batch) -> list[tuple[tuple[str, str], list[list[int]]]]:
    """Text and tokens of each row."""

    def real(row: Tensor, special: int) -> list[int]:
        tokens = [token for token in row.tolist() if token != PAD]
        assert tokens[-1] == EOS
        return tokens[special:-1]

    pairs = [[real(s, 0), real(t, 1)] for s, t in zip(*batch, strict=True)]
    return [((Letters().decode(pair[0]), Letters().decode(pair[1])), pair) for pair in pairs]


def test_dropout_segments_each_pair_anew_each_epoch() -> None:
    store, known = lettered(200)
    tokenizers = BothLetters()
    batches = Batches(store, 128, 5, dropout=0.1, tokenizers=tokenizers)
    plain = Batches(store, 128, 5)
    assert batches.per_epoch == plain.per_epoch
    drawn: list[dict[tuple[str, str], list[list[int]]]] = []
    for epoch in range(2):
        drawn.append({})
        for n in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            batch = batches.at(n)
            assert (batch.target[:, 0] == BOS).all()
            assert [text for text, _ in spelled(batch)] == [text for text, _ in spelled(plain.at(n))]
            drawn[epoch] |= dict(spelled(batch))
    assert drawn[0].keys() == drawn[1].keys() == known.keys()
    for n, side in enumerate((store.sources, store.targets)):
        lengths = [len(pair[n]) + 1 for epoch in drawn for pair in epoch.values()]
        assert max(lengths) <= side.longest
        assert sum(lengths) > 1.1 * 2 * side.lengths.sum()
        assert sum(drawn[0][text][n] != drawn[1][text][n] for text in known) > 100
    # Each pair, side and epoch has its own seed, which no company changes.
    seeds = tokenizers.source.seeds + tokenizers.target.seeds
    assert len(set(seeds)) == len(seeds) == 4 * len(store)
    small = Batches(store, 40, 5, dropout=0.1, tokenizers=BothLetters())
    for n in range(small.per_epoch):
        assert all(drawn[0][text] == tokens for text, tokens in spelled(small.at(n)))


def test_dropout_of_real_merges_changes_tokens_but_no_text(tmp_path: Path) -> None:
    lines = [f"the {a} {b}s saw {c} old {a}s , été 🙂" for a, b, c in itertools.permutations(("dog", "bird", "house"))]
    lines.append(" ".join(lines[:3]))  # no row outgrows the longest, so let there be a long one
    both = train_tokenizer(lines, TokenizerConfig(vocab_size=400))
    store = prepare(ParallelLines(lines), TokenizerPair(both, both), DataConfig(), tmp_path)
    batches = Batches(store, 10_000, 1, dropout=0.5, tokenizers=TokenizerPair(both, both))
    epochs = [batches.at(n) for n in range(2)]
    plain = store.sources.lengths.sum() + store.targets.lengths.sum() + len(store)
    for batch in epochs:
        for side in batch:
            assert sorted(both.decode(row) for row in side.tolist()) == sorted(lines)
        assert sum(int((side != PAD).sum()) for side in batch) > plain
    assert not same(*epochs)
    assert same(batches.at(0), epochs[0])


def test_dropout_needs_bpe() -> None:
    store = make_store([(3, 3)])
    with pytest.raises(ValueError, match="needs a BPE tokenizer for each side, not none"):
        Batches(store, 10, 0, dropout=0.1)
    with pytest.raises(ValueError, match="needs a BPE tokenizer for each side, not bpe and word"):
        Batches(store, 10, 0, dropout=0.1, tokenizers=BothLetters(Letters(), Letters("word")))
    sides = ([[30, EOS], [4, 5, EOS]], [[4, EOS], [30, EOS]])  # 4 5 is the text of another token
    for store in (PairStore(*map(Sequences.of, order), Facts(0, 0.0, {}, {})) for order in (sides, sides[::-1])):
        Batches(store, 10, 0)
        with pytest.raises(ValueError, match="needs a tokenizer that gives texts back as they were"):
            Batches(store, 10, 0, dropout=0.1, tokenizers=BothLetters())
    for make in (lambda: Batches(store, 0, 0), lambda: next(in_order(store, 0))):
        with pytest.raises(ValueError, match="batch_tokens must be at least 1, not 0"):
            make()


def workers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("weft-batches")]


def test_prefetched_batches_come_in_order_and_not_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(make_store(some_lengths(300)), 256, seed=0)
    expected = [batches.at(n) for n in range(30)]
    made: list[int] = []
    at = Batches.at
    monkeypatch.setattr(Batches, "at", lambda self, n: (made.append(n), at(self, n))[1])
    for depth in (0, 1, 4, 50):
        made.clear()
        for n, batch in enumerate(batches.prefetched(range(0, 30, 2), depth)):
            assert same(batch, expected[2 * n])
            assert len(made) <= n + 1 + depth
        assert made == list(range(0, 30, 2))
    assert list(batches.prefetched([])) == []
    endless = batches.prefetched(itertools.count())
    assert same(next(endless), expected[0])
    assert len(workers()) == 1
    endless.close()
    assert workers() == []


def test_leaving_early_leaves_the_rest_unmade(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(make_store([(3, 3)]), 256, seed=0)
    made: list[int] = []

    def at(self: Batches, number: int) -> int:
        time.sleep(0.005)
        made.append(number)
        return number

    monkeypatch.setattr(Batches, "at", at)
    for _ in batches.prefetched(range(1000), 500):
        break
    assert len(made) < 400


def test_an_error_comes_where_its_batch_would_have() -> None:
    batches = Batches(make_store(some_lengths(300)), 256, seed=0)
    stream = batches.prefetched([0, 1, -1, 2])
    assert [same(next(stream), batches.at(n)) for n in (0, 1)] == [True, True]
    with pytest.raises(ValueError, match="there is no batch -1"):
        next(stream)
    assert workers() == []


def test_random_bits_are_splitmix64() -> None:
    # The first numbers of SplitMix64 from state 0, as its authors' C program prints them.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert scrambled(np.arange(4, dtype=np.uint64)).tolist() == expected
    many = np.arange(1000, dtype=np.uint64)
    drawn = [scrambled(many, *keys).tolist() for keys in ((), (0,), (1,), (0, 1), (1, 0), (2**64 - 1,), (1, 0, 0))]
    assert len(set(itertools.chain(*drawn))) == 7000
    assert scrambled(many[5:6], 1, 0).tolist() == drawn[4][5:6]


@given(st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=300), st.integers(0, 2**32 - 1))
@example([], 0)
@example([7] * 50, 0)
def test_turns_are_those_of_a_stable_sort(keys: list[int], seed: int) -> None:
    given_keys = np.array(keys, np.uint64)
    assert in_turn(given_keys).tolist() == np.argsort(given_keys, kind="stable").tolist()
    many = np.random.default_rng(seed).integers(0, 50, 1000).astype(np.uint64)
    assert in_turn(many).tolist() == np.argsort(many, kind="stable").tolist()


@given(st.lists(st.integers(-20, 400), min_size=1, max_size=100), st.booleans())
def test_keys_are_numbered_in_their_order(keys: list[int], far: bool) -> None:
    given_keys = np.array([*keys, 10**9] if far else keys, np.int64)
    names, expected = np.unique(given_keys, return_inverse=True)
    numbers, count = batching._numbered(given_keys)
    assert (numbers.tolist(), count) == (expected.tolist(), len(names))
