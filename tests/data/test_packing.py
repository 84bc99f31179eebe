"""A batch follows from its number; in an epoch each token is seen once; documents are kept apart; windows add up."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.config import PAD
from weft.data.disk import Sequences
from weft.data.packing import PackedBatches, TokenBatch, in_order, sampled
from weft.data.text_store import TextFacts, TextStore
from weft.kernels.mask import Mask
from weft.training.loop import Batches


def make_store(lengths: list[int]) -> TextStore:
    """Documents of these lengths; every token is another number, from 1 on."""
    tokens = iter(range(1, sum(lengths) + 1))
    rows = [[next(tokens) for _ in range(length)] for length in lengths]
    return TextStore(Sequences.of(rows, np.uint16), TextFacts(), "made up")


def same(one: TokenBatch, two: TokenBatch) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, two, strict=True)
    )


def asked(batch: TokenBatch) -> list[tuple[int, int]]:
    """(the token before, the token asked for) wherever the loss counts."""
    pairs = torch.stack((batch.tokens[:, :-1], batch.tokens[:, 1:]), -1)
    counts = torch.ones(pairs.shape[:2], dtype=torch.bool)
    if batch.segments is not None:
        counts &= batch.segments[:, :-1] == batch.segments[:, 1:]
    if batch.counted is not None:
        counts &= batch.counted
    return [(int(a), int(b)) for a, b in pairs[counts]]


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=12).filter(lambda lengths: sum(lengths) > 1)


@given(lengths=lengths, rows=st.integers(1, 5), length=st.integers(1, 15), seed=st.integers(0, 2**64))
def test_each_epoch_sees_each_token_of_each_document_once(
    lengths: list[int], rows: int, length: int, seed: int
) -> None:
    store = make_store(lengths)
    batches: Batches = PackedBatches(store, rows, length, seed, sample="documents")
    starts = set(store.tokens[store.starts].tolist())
    document = dict(zip(store.tokens.tolist(), np.repeat(np.arange(len(lengths)), lengths).tolist(), strict=True))
    for epoch in (0, 1, 7):
        made = [batches.at(epoch * batches.per_epoch + number) for number in range(batches.per_epoch)]
        assert all(batch.tokens.shape == (rows, length + 1) for batch in made[:-1])
        # Each token is asked for once, behind the one that stands before it in its document.
        found = Counter(pair for batch in made for pair in asked(batch))
        inner = [token for token in document if token not in starts]
        assert found == Counter((token - 1, token) for token in inner)
        read = Counter(token for batch in made for token in batch.tokens[:, :-1].flatten().tolist() if token != PAD)
        last = [token for token in document if not read[token]]
        assert len(last) <= 1  # the end of the last document has nothing behind it
        assert max(read.values()) == 1
        for batch in made:
            assert batch.tokens.dtype == batch.segments.dtype == torch.int64
            for tokens, segments in zip(batch.tokens.tolist(), batch.segments.tolist(), strict=True):
                pairs = list(zip(tokens, segments, strict=True))
                real = [(document[token], segment) for token, segment in pairs if token != PAD]
                assert len(set(real)) == len({a for a, _ in real}) == len({b for _, b in real})
                padding = [segment for token, segment in pairs if token == PAD]
                assert len(set(padding)) == len(padding)
                assert not set(padding) & {segment for _, segment in real}
                assert segments == sorted(segments)
    assert batches.costliest().tokens.numel() == max(batch.tokens.numel() for batch in made)


def test_no_attention_from_document_to_document_or_padding() -> None:
    batch = PackedBatches(make_store([3, 2]), rows=1, length=6, seed=0, sample="documents").at(0)
    assert batch.segments is not None
    open_ = Mask(causal=True, segments=batch.segments).dense(7, 7)[0]
    sizes = [3, 2] if batch.tokens[0, 0] == 1 else [2, 3]
    expected = torch.block_diag(*(torch.ones(n, n).tril() for n in (*sizes, 1, 1))).bool()
    assert torch.equal(open_.reshape(7, 7), expected)


@given(total=st.integers(2, 60), rows=st.integers(1, 4), length=st.integers(1, 12), seed=st.integers(0, 2**64))
def test_a_stream_is_windows_of_the_text(total: int, rows: int, length: int, seed: int) -> None:
    store = make_store([total // 2, total - total // 2])
    if total <= length:
        with pytest.raises(ValueError, match=rf"a row has {length + 1} tokens: expected a longer text"):
            PackedBatches(store, rows, length, seed)
        return
    batches = PackedBatches(store, rows, length, seed)
    assert batches.per_epoch * rows * length >= total - 1 > (batches.per_epoch - 1) * rows * length
    for number in (0, 1, 1000):
        batch = batches.at(number)
        assert (batch.segments, batch.counted) == (None, None)
        assert batch.tokens.dtype == torch.int64
        first = batch.tokens[:, :1]
        assert torch.equal(batch.tokens, first + torch.arange(length + 1))
        assert int(first.min()) >= 1
        assert int(first.max()) + length <= total


def test_every_window_is_as_likely() -> None:
    """χ² over 50 places, of 20,000 draws: 98 is passed by chance once in 40,000 seeds."""
    batches = PackedBatches(make_store([59]), rows=100, length=9, seed=5)
    counts = torch.zeros(51)
    for number in range(200):
        counts += torch.bincount(batches.at(number).tokens[:, 0], minlength=51)
    assert counts[0] == 0
    assert float(((counts[1:] - 400) ** 2 / 400).sum()) < 98


@given(total=st.integers(2, 60), rows=st.integers(1, 5), length=st.integers(1, 15), seed=st.integers(0, 2**64))
def test_a_round_asks_for_each_token_once_behind_the_one_before_it(
    total: int, rows: int, length: int, seed: int
) -> None:
    store = make_store([total])
    if total <= length:
        with pytest.raises(ValueError, match="expected a longer text"):
            PackedBatches(store, rows, length, seed, sample="rounds")
        return
    batches = PackedBatches(store, rows, length, seed, sample="rounds")
    for epoch in range(4):
        made = [batches.at(epoch * batches.per_epoch + number) for number in range(batches.per_epoch)]
        assert all(batch.segments is None and batch.counted is None for batch in made)
        assert all(batch.tokens.shape == (rows, length + 1) for batch in made[:-1])
        pairs = [pair for batch in made for pair in asked(batch)]
        assert len(set(pairs)) == len(pairs) == total // length * length
        assert all(after == before % total + 1 for before, after in pairs)


def test_rounds_cut_the_text_elsewhere_each_time() -> None:
    batches = PackedBatches(make_store([70]), rows=10, length=7, seed=3, sample="rounds")
    assert {int(batches.at(epoch).tokens[:, 0].min()) for epoch in range(40)} == set(range(1, 8))


@pytest.mark.parametrize("sample", ["stream", "rounds", "documents"])
def test_a_batch_follows_from_seed_and_number_alone(sample: str) -> None:
    store = make_store([5, 9, 1, 30, 12, 7, 7])
    batches = PackedBatches(store, 3, 8, 7, sample=sample)
    wanted = [0, 3, batches.per_epoch + 1, 9 * batches.per_epoch, 2]
    one = {number: batches.at(number) for number in wanted}
    for number in reversed(wanted):
        assert same(PackedBatches(store, 3, 8, 7, sample=sample).at(number), one[number])
        assert same(batches.at(number), one[number])
    assert not same(one[0], PackedBatches(store, 3, 8, 8, sample=sample).at(0))
    assert not same(one[0], batches.at(batches.per_epoch))
    assert not same(one[0], batches.at(1))
    with pytest.raises(ValueError, match="there is no batch -1"):
        batches.at(-1)


def test_documents_change_neighbours_and_rows_their_order() -> None:
    batches = PackedBatches(make_store([4] * 50), 5, 12, 3, sample="documents")
    orders, neighbours = [], []
    for epoch in range(2):
        rows = torch.cat([batches.at(epoch * batches.per_epoch + n).tokens for n in range(batches.per_epoch)])
        orders.append([sorted({(token - 1) // 4 for token in row if token}) for row in rows.tolist()])
        neighbours.append({tuple(row) for row in orders[-1]})
    assert len(neighbours[0] & neighbours[1]) <= 1
    # In their order the rows would go on where the last one ended.
    follow = sum(bool(set(a) & set(b)) for a, b in zip(orders[0], orders[0][1:], strict=False))
    assert follow < len(orders[0]) // 2


def test_ranks_share_an_epoch() -> None:
    store = make_store([6] * 40)
    batches = PackedBatches(store, 2, 10, 1, sample="documents")
    seen = Counter(
        pair for rank in range(3) for n in range(rank, batches.per_epoch, 3) for pair in asked(batches.at(n))
    )
    assert len(seen) == 40 * 5
    assert set(seen.values()) == {1}


@given(lengths=lengths, rows=st.integers(1, 4), length=st.integers(1, 15), data=st.data())
def test_windows_in_order_ask_for_each_token_once(
    lengths: list[int], rows: int, length: int, data: st.DataObject
) -> None:
    store = make_store(lengths)
    total = sum(lengths)
    stride = data.draw(st.one_of(st.none(), st.integers(1, length)))
    made = list(in_order(store, rows, length, stride))
    assert [pair for batch in made for pair in asked(batch)] == [(token - 1, token) for token in range(2, total + 1)]
    step = stride or length
    for batch in made:
        assert batch.segments is None
        assert len(batch.tokens) <= rows
        counted = torch.ones_like(batch.tokens[:, 1:]).bool() if batch.counted is None else batch.counted
        for row, counts in zip(batch.tokens.tolist(), counted.tolist(), strict=True):
            assert row == list(range(row[0], row[0] + len(row)))
            places = [place for place, counts_here in enumerate(counts) if counts_here]
            assert row[0] == 1 or min(places) == length - step  # so many have been read before the first that counts
    if stride in (None, length):
        assert all(batch.counted is None for batch in made)
    if total > length:
        assert [batch.tokens.shape[1] for batch in made[:-1]] == [length + 1] * (len(made) - 1)


def test_windows_keep_documents_apart_if_asked() -> None:
    store = make_store([3, 5, 1, 2])
    for stride in (None, 2):
        made = list(in_order(store, 2, 4, stride, sample="documents"))
        found = [pair for batch in made for pair in asked(batch)]
        assert found == [(token - 1, token) for token in range(2, 12) if token not in (4, 9, 10)]


def test_perplexity_by_windows_is_that_of_plain_loops() -> None:
    """A model that knows how much it has read: the sum over windows is the sum over the tokens of the text."""
    store, length, stride = make_store([57]), 16, 4

    def cost(read: int, token: int) -> float:
        return token / (1 + read)

    total = 0.0
    for batch in in_order(store, 3, length, stride):
        counted = torch.ones_like(batch.tokens[:, 1:]).bool() if batch.counted is None else batch.counted
        for row, counts in zip(batch.tokens.tolist(), counted.tolist(), strict=True):
            total += sum(
                cost(read + 1, token) for read, (token, yes) in enumerate(zip(row[1:], counts, strict=True)) if yes
            )
    expected, begin, done = 0.0, 0, 0
    while done < 56:  # token by token, moving on by a stride when the window is full
        expected += cost(done - begin + 1, done + 2)
        done += 1
        if done - begin == length:
            begin += stride
    assert total == pytest.approx(expected)


def test_the_estimate_draws_the_same_windows_each_time() -> None:
    store = make_store([100])
    one, two = (list(sampled(store, 4, 10, count=6, seed=2)) for _ in range(2))
    assert len(one) == 6
    assert all(map(same, one, two))
    assert all(same(batch, PackedBatches(store, 4, 10, 2).at(number)) for number, batch in enumerate(one))


def test_wrong_numbers_are_named() -> None:
    store = make_store([9])
    for wrong in ({"rows": 0}, {"length": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1, not 0"):
            PackedBatches(store, **{"rows": 1, "length": 2, "seed": 0} | wrong)
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least 1, not 0"):
            in_order(store, **{"rows": 1, "length": 2} | wrong)
    with pytest.raises(ValueError, match="stride must be at least 1, not 0"):
        in_order(store, 1, 2, 0)
    with pytest.raises(ValueError, match="not stride 3 of 2"):
        in_order(store, 1, 2, 3)
    with pytest.raises(ValueError, match="not a text of 1 tokens"):
        in_order(make_store([1]), 1, 2)
    with pytest.raises(ValueError, match="not 'document'; did you mean 'documents'"):
        PackedBatches(store, 1, 2, 0, sample="document")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected a longer text"):
        PackedBatches(make_store([1]), 1, 2, 0, sample="documents")
    assert PackedBatches(store, 2, 2, 0).report() == "2 batches an epoch of 2 × 2 tokens"
