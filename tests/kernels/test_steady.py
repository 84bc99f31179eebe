"""In steady mode a row's numbers are bit-equal in any company; outside it they are what they ever were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.kernels import steady as kernel
from weft.kernels.attention import attend, attention_weights
from weft.kernels.linear import linear
from weft.kernels.mask import Mask
from weft.kernels.steady import gelu, gelu_tanh, is_steady, pad_length, padded, sigmoid, silu, steady
from weft.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock
from weft.layers.cache import KVCache
from weft.layers.linear import Linear
from weft.layers.relative import ALiBi, Rotary

VOCAB = 203
LENGTHS = (3, 9, 1, 17, 30, 12, 5, 31, 32, 2, 8, 41)
FP32, BF16 = torch.float32, torch.bfloat16


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Translator(nn.Module):
    """An encoder, a decoder and an output layer of the blocks that models are made of."""

    def __init__(self, config: BlockConfig, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.dtype = dtype
        self.embedding = nn.Embedding(VOCAB, config.dim)
        self.encoder, self.decoder = EncoderBlock(config), DecoderBlock(config)
        self.norm, self.output = config.make_norm(), Linear(config.dim, VOCAB)

    @torch.no_grad()
    def logits(self, sources: list[Tensor], steps: int = 5) -> Tensor:
        """The logits [B, steps, VOCAB] of the first tokens, each the best after the one before."""
        mask = Mask(lengths=torch.tensor([len(source) for source in sources]))
        x = self.embedding(nn.utils.rnn.pad_sequence(sources, batch_first=True)).to(self.dtype)
        memory = self.decoder.cross_attention.keys_values(self.norm(self.encoder(x, mask)))
        cache = KVCache.empty(len(sources))
        tokens, seen = torch.ones(len(sources), 1, dtype=torch.int64), []
        for _ in range(steps):
            y = self.embedding(tokens).to(self.dtype)
            y, cache = self.decoder.step(y, memory, cache, mask)
            seen.append(self.output(self.norm(y).float()))
            tokens = seen[-1].argmax(-1)
        return torch.cat(seen, 1)


def companies(count: int) -> dict[str, tuple[list[int], list[int]]]:
    """Who is in a batch, of ``count`` sentences and a long one behind them, and where in it the sentences stand."""
    alone = list(range(count))
    shuffled = torch.randperm(count).tolist()
    return {
        "together": (alone, alone),
        "shuffled": (shuffled, [shuffled.index(i) for i in alone]),
        "beside a long one": ([count, *alone], [1 + i for i in alone]),
        "many times": ([*alone * 4, count], [2 * count + i for i in alone]),
    }


def differing(model: Translator) -> dict[str, int]:
    """How many sentences have other logits than alone, by company."""
    sentences = [torch.randint(4, VOCAB, (n,)) for n in (*LENGTHS, 150)]
    alone = torch.cat([model.logits([sentence]) for sentence in sentences[:-1]])
    found = {}
    for name, (batch, places) in companies(len(LENGTHS)).items():
        logits = model.logits([sentences[i] for i in batch])[places]
        found[name] = int((logits != alone).flatten(1).any(1).sum())
    return found


NONE = dict.fromkeys(companies(1), 0)


@pytest.mark.parametrize(
    ("dim", "dtype", "count"),
    [
        (32, FP32, 1),
        (32, BF16, 1),
        (128, FP32, 1),
        (128, BF16, 1),
        (512, FP32, 1),
        pytest.param(512, BF16, 1, marks=pytest.mark.long),
        pytest.param(32, FP32, 2, marks=pytest.mark.long),
        pytest.param(32, BF16, 2, marks=pytest.mark.long),
        pytest.param(128, FP32, 2, marks=pytest.mark.long),
        pytest.param(128, BF16, 2, marks=pytest.mark.long),
        pytest.param(512, FP32, 2, marks=pytest.mark.long),
        pytest.param(512, BF16, 2, marks=pytest.mark.long),
    ],
)
def test_a_sentence_has_the_same_logits_in_any_company(dim: int, dtype: torch.dtype, count: int) -> None:
    model = Translator(BlockConfig(dim=dim, num_heads=4, ffn_dim=2 * dim, activation="gelu"), dtype)
    with threads(count), steady():
        assert differing(model) == NONE


@pytest.mark.parametrize(
    "choices",
    [
        {"activation": "swiglu", "norm": "rms", "num_kv_heads": 2, "qk_norm": True},
        {"activation": "gelu_tanh", "norm_first": False, "num_kv_heads": 1},
        {"max_distance": 4, "num_kv_heads": 2},
        {"dim": 36, "num_heads": 3, "ffn_dim": 50, "bias": False, "activation": "gelu_tanh"},
        {"dim": 30, "num_heads": 6, "ffn_dim": 31, "head_dim": 7, "activation": "swiglu"},
    ],
)
def test_so_it_is_for_other_blocks(choices: dict[str, object]) -> None:
    model = Translator(BlockConfig(**{"dim": 32, "num_heads": 4, "ffn_dim": 64, **choices}))  # type: ignore[arg-type]
    with steady():
        assert differing(model) == NONE


def test_outside_of_it_company_is_felt() -> None:
    model = Translator(BlockConfig(dim=128, num_heads=4, ffn_dim=256, activation="gelu"))
    assert differing(model) != NONE
    with steady(), steady(False):
        assert differing(model) != NONE


def test_it_changes_nothing_but_the_last_bits() -> None:
    model = Translator(BlockConfig(dim=64, num_heads=4, ffn_dim=128, activation="swiglu"))
    sentences = [torch.randint(4, VOCAB, (n,)) for n in LENGTHS]
    expected = model.logits(sentences)
    with steady():
        torch.testing.assert_close(model.logits(sentences), expected, atol=1e-4, rtol=1e-4)


SHAPES = [(1, 64), (3, 100), (8, 31), (48, 16), (100, 5), (128, 128), (203, 32), (64, 300), (2000, 24)]


@pytest.mark.parametrize(("e", "d"), SHAPES)
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (BF16, BF16), (torch.float64, torch.float64)])
def test_a_row_of_a_product_is_the_same_in_any_company(e: int, d: int, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, weight, bias = torch.randn(600, d).to(dtypes[0]), torch.randn(e, d).to(dtypes[1]), torch.randn(e).to(dtypes[1])
    for b in (bias, None):
        with steady():
            whole = linear(x, weight, b)
            for n in (1, 2, 3, 5, 7, 11, 16, 17, 33, 100, 513):
                first = 7 * n % 80  # not where an aligned address is
                assert torch.equal(linear(x[first : first + n], weight, b), whole[first : first + n])
            order = torch.randperm(600)
            assert torch.equal(linear(x[order], weight, b), whole[order])
            assert torch.equal(linear(x.view(5, 120, d), weight, b), whole.view(5, 120, e))
            assert torch.equal(linear(x[4], weight, b), whole[4])
            assert torch.equal(linear(x[::7], weight, b), whole[::7])
        torch.testing.assert_close(whole, linear(x, weight, b))


def test_so_it_is_with_two_threads() -> None:
    x, weight, bias = torch.randn(64, 128), torch.randn(512, 128), torch.randn(512)
    with threads(2), steady():
        whole = linear(x, weight, bias)
        for n in (1, 3, 5, 7, 11, 16, 33):
            assert torch.equal(linear(x[n : 2 * n], weight, bias), whole[n : 2 * n])


def test_a_part_of_a_weight_is_a_weight() -> None:
    x, weight = torch.randn(40, 24), torch.randn(32, 60)
    for part in (weight[:, :24], weight[:, 25:49], weight[:, ::2][:, :24], torch.randn(24, 32).t()):
        with steady():
            whole = linear(x, part)
            assert torch.equal(torch.cat([linear(row, part) for row in x.split(1)]), whole)
        torch.testing.assert_close(whole, x @ part.t())


def test_where_no_other_height_agrees_products_have_sixteen_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    heights = []

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        heights.append(len(x))
        return x @ weight.t() + (0.0 if bias is None else bias)

    x, weight, bias = torch.randn(600, 32), torch.randn(8, 32), torch.randn(8)
    monkeypatch.setattr(kernel, "_height", lambda n, product: kernel.ROWS)
    monkeypatch.setattr(F, "linear", product)
    for n in (1, 16, 17, 600):
        torch.testing.assert_close(kernel.by_rows(x[:n], weight, bias), x[:n] @ weight.t() + bias)
    assert set(heights) == {16}
    assert len(heights) == 1 + 1 + 2 + 38


@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float64])
@pytest.mark.parametrize("e", [1, 40])
def test_a_height_that_sums_otherwise_is_found_out(e: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of a product of 12 is summed backwards, that of 20 is not."""

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = in_order(x, weight)
        if len(x) == 12:
            y[-1:] = in_order(x[-1:].flip(1), weight.flip(1))
        return y.to(x.dtype)

    def in_order(x: Tensor, weight: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, FP32)
        y = torch.zeros(len(x), len(weight), dtype=wide)
        for a, b in zip(x.to(wide).unbind(1), weight.to(wide).unbind(1), strict=True):
            y += a[:, None] * b
        return y

    monkeypatch.setattr(F, "linear", product)
    shape = kernel.Product.of(torch.empty(e, 32, dtype=dtype), None)
    assert not kernel._agrees.__wrapped__(12, shape)
    assert kernel._agrees.__wrapped__(20, shape)


def test_the_trial_of_a_height_draws_no_numbers_of_others() -> None:
    before = torch.get_rng_state()
    with steady():
        linear(torch.randn(1, 19), torch.randn(23, 19))
    torch.set_rng_state(before)
    torch.randn(1, 19), torch.randn(23, 19)
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    x, weight = torch.randn(1, 19), torch.randn(23, 19)
    kernel._height.cache_clear(), kernel._agrees.cache_clear()
    with steady():
        linear(x, weight)
    assert torch.equal(torch.get_rng_state(), after)


def test_empty_products() -> None:
    with steady():
        assert linear(torch.randn(0, 8), torch.randn(5, 8)).shape == (0, 5)
        assert linear(torch.randn(3, 8), torch.randn(0, 8)).shape == (3, 0)
        assert torch.equal(linear(torch.randn(3, 0), torch.randn(5, 0), torch.ones(5)), torch.ones(3, 5))


def heads(count: int, n: int, m: int, groups: int, d: int, e: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(count, 4, n, d), torch.randn(count, groups, m, d), torch.randn(count, groups, m, e)


@pytest.mark.parametrize("n", [1, 20])
@pytest.mark.parametrize(("groups", "d", "e"), [(4, 16, 16), (2, 40, 24), (1, 5, 9)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_attention_of_a_row_is_the_same_in_any_company(n: int, groups: int, d: int, e: int, dtype: torch.dtype) -> None:
    """Among more rows, with more keys and, if it has several, with more queries."""
    lengths = torch.tensor([7, 33, 200, 64, 15, 290])
    q, k, v = (x.to(dtype) for x in heads(len(lengths), n, 300, groups, d, e))
    longer = q if n == 1 else torch.cat([q, torch.randn(len(lengths), 4, 60, d).to(dtype)], 2)
    with steady(), torch.no_grad():
        together = attend(longer, k, v, Mask(lengths=lengths))[:, :, :n]
        weights = attention_weights(longer, k, Mask(lengths=lengths))[:, :, :n]
        for row, m in enumerate(lengths.tolist()):
            one = q[row : row + 1], k[row : row + 1, :, :m], v[row : row + 1, :, :m]
            assert torch.equal(attend(*one), together[row : row + 1])
            assert torch.equal(attention_weights(*one[:2]), weights[row : row + 1, ..., :m])
            assert not weights[row, ..., m:].any()
    torch.testing.assert_close(together, attend(q, k, v, Mask(lengths=lengths)), atol=1e-5, rtol=1e-2)
    torch.testing.assert_close(weights, attention_weights(q, k, Mask(lengths=lengths)), atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize("n", [1, 3, 32, 70])
@pytest.mark.parametrize("m", [1, 32, 70])
def test_attention_in_steady_mode_is_attention(n: int, m: int) -> None:
    q, k, v = heads(2, n, m, 2, 6, 10)
    bias = torch.randn(2, 4, n, m)
    bias[0, 0, 0] = float("-inf")  # a query that may attend nowhere
    pattern = torch.rand(2, 1, n, m) > 0.3
    pattern[1, 0, -1] = False
    masks = (None, Mask(causal=True), Mask(window=3, causal=True, offset=2), Mask(pattern=pattern))
    for mask in masks:
        for more in (None, bias, bias[:1, :, :1], bias[..., :1]):
            expected = attend(q, k, v, mask, more, scale=0.3)
            weights = attention_weights(q, k, mask, more, scale=0.3)
            with steady(), torch.no_grad():
                torch.testing.assert_close(attend(q, k, v, mask, more, scale=0.3), expected)
                torch.testing.assert_close(attention_weights(q, k, mask, more, scale=0.3), weights)


def test_gradients_are_those_of_the_plain_way() -> None:
    x, q, k, v = (
        torch.randn(shape, requires_grad=True) for shape in ((5, 20), (2, 4, 3, 6), (2, 2, 9, 6), (2, 2, 9, 7))
    )
    weight, bias = torch.randn(11, 20, requires_grad=True), torch.randn(11, requires_grad=True)
    given = (x, weight, bias, q, k, v)

    def total() -> Tensor:
        heads = attend(q, k, v, Mask(causal=True, offset=4))
        return (
            linear(x, weight, bias).sin().sum()
            + heads.sin().sum()
            + attention_weights(q, k).square().sum()
            + silu(x).sum()
        )

    expected = torch.autograd.grad(total(), given)
    with steady():
        found = torch.autograd.grad(total(), given)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "sigmoid": (sigmoid, torch.sigmoid),
    "silu": (silu, F.silu),
    "gelu": (gelu, F.gelu),
    "gelu_tanh": (gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_an_activation_does_not_depend_on_the_place(name: str, dtype: torch.dtype) -> None:
    ours, torchs = FUNCTIONS[name]
    x = (torch.randn(70_001) * 4).to(dtype)
    assert torch.equal(ours(x), torchs(x))
    with steady():
        whole = ours(x)
        for n in (*range(1, 40), 1001, 65_537):
            assert torch.equal(ours(x[n : 2 * n].clone()), whole[n : 2 * n])
        with threads(2):
            assert torch.equal(ours(x), whole)
        wild = torch.tensor([-1e4, -90.0, 90.0, 1e4], dtype=dtype)
        torch.testing.assert_close(ours(wild), torchs(wild))
    torch.testing.assert_close(whole, torchs(x))


def test_a_target_is_scored_the_same_beside_a_longer_one() -> None:
    """Several positions in one step, of which some are padding."""
    block = DecoderBlock(BlockConfig(dim=48, num_heads=4, ffn_dim=96, activation="gelu")).eval()
    x, memory = torch.randn(5, 90, 48), torch.randn(5, 40, 48)
    lengths, sources = [2, 90, 31, 5, 33], torch.tensor([40, 3, 32, 11, 33])
    with steady(), torch.no_grad():
        together, _ = block.step(x, memory, KVCache.empty(5), Mask(lengths=sources))
        for row, (n, m) in enumerate(zip(lengths, sources.tolist(), strict=True)):
            alone, _ = block.step(x[row : row + 1, :n], memory[row : row + 1, :m], KVCache.empty(1))
            assert torch.equal(alone[0], together[row, :n])


def test_a_step_in_steady_mode_is_a_step() -> None:
    """With a window, segments, a bias and a rotation, at several lengths of the past, and seen by an observer."""
    block = EncoderBlock(BlockConfig(dim=32, num_heads=4, ffn_dim=32)).eval()
    x, rotary, alibi = torch.randn(2, 40, 32), Rotary(8), ALiBi(4)
    segments = torch.arange(40).expand(2, 40) // 6

    def walk() -> tuple[Tensor, list[tuple[int, ...]]]:
        cache, outputs = KVCache.empty(2), []
        with weft.record(block) as seen:
            for low, high in ((0, 1), (1, 4), (4, 33), (33, 34), (34, 40)):
                mask = Mask(window=9, segments=segments[:, :high])
                bias = alibi(torch.arange(low, high), torch.arange(high))
                y, cache = block.step(x[:, low:high], cache, mask, bias, rotary)
                outputs.append(y)
        return torch.cat(outputs, 1), [tuple(entry.weights.shape) for entry in seen.entries]

    with torch.no_grad():
        expected, shapes = walk()
        with steady():
            found, steady_shapes = walk()
    torch.testing.assert_close(found, expected)
    assert steady_shapes == shapes == [(2, 4, 1, 1), (2, 4, 3, 4), (2, 4, 29, 33), (2, 4, 1, 34), (2, 4, 6, 40)]


def test_a_cache_is_as_wide_as_whole_blocks() -> None:
    def filled(n: int) -> KVCache:
        return KVCache.empty(2).append(torch.randn(2, 3, n, 4), torch.randn(2, 3, n, 5))

    cache = filled(3).append(torch.randn(2, 3, 30, 4), torch.randn(2, 3, 30, 5))
    joined = KVCache.cat([cache, filled(70)])
    for each, longest in (
        (cache, 33),
        (cache.select(torch.tensor([1])), 33),
        (joined, 70),
        (joined.truncate(joined.lengths // 2), 35),
    ):
        assert each.width == each.keys.shape[2] == each.values.shape[2] == longest
        with steady():
            assert each.width == each.keys.shape[2] == each.values.shape[2] == pad_length(longest)
            assert torch.equal(each.keys[:, :, :longest], each._filled().keys[:, :, :longest])
            assert each.keys.isfinite().all()


def test_lengths() -> None:
    assert [pad_length(n) for n in (0, 1, 32, 33, 100)] == [32, 32, 32, 64, 128]
    x = torch.randn(2, 3, 33, 5)
    for dim in (2, -2):
        wide = padded(x, dim)
        assert wide.shape == (2, 3, 64, 5)
        assert torch.equal(wide[:, :, :33], x)
        assert not wide[:, :, 33:].any()
    assert padded(wide, 2) is wide


def test_the_mode_ends_with_its_block_and_its_thread() -> None:
    assert not is_steady()
    with steady():
        assert is_steady()
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(is_steady()))
        thread.start()
        thread.join()
        assert seen == [False]
        with steady(False):
            assert not is_steady()
        assert is_steady()
        with pytest.raises(ValueError, match="the layer takes vectors of 4, not 5"):
            linear(torch.randn(2, 5), torch.randn(3, 4))
    assert not is_steady()
    with pytest.raises(KeyError), steady():
        raise KeyError
    assert not is_steady()


def test_what_is_compiled_runs_eagerly() -> None:
    layer = Linear(64, 64)
    compiled, x = torch.compile(layer, backend="eager"), torch.randn(9, 64)
    with torch.no_grad():
        compiled(x)
        with steady():
            whole = compiled(x)
            assert torch.equal(torch.cat([compiled(row) for row in x.split(1)]), whole)
