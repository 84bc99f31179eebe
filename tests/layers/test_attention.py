"""Multi-head attention: cached = whole, causality, equivariance, relative positions, recording, errors."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft import record
from weft.kernels.attention import attention_weights
from weft.kernels.mask import Mask
from weft.layers.attention import MultiHeadAttention
from weft.layers.cache import KVCache
from weft.layers.relative import ALiBi, Rotary, ShawRelative

DIM, HEADS = 16, 4


def layer(**options: object) -> MultiHeadAttention:
    return MultiHeadAttention(DIM, HEADS, **options).double()  # type: ignore[arg-type]


VARIANTS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1, "bias": False},
    "normed": {"qk_norm": True},
    "wide heads": {"head_dim": 6},
}


def variant(name: str) -> MultiHeadAttention:
    if name == "shaw":
        return layer(relative=ShawRelative(DIM // HEADS, 3))
    return (
        layer(relative=ShawRelative(DIM // HEADS, 3, values=False)) if name == "shaw keys" else layer(**VARIANTS[name])
    )


@settings(max_examples=25)
@given(data=st.data(), rotary=st.booleans(), window=st.sampled_from([None, 1, 3]))
@pytest.mark.parametrize("name", [*VARIANTS, "shaw", "shaw keys"])
def test_steps_with_a_cache_equal_the_whole(name: str, data: st.DataObject, rotary: bool, window: int | None) -> None:
    """Any way of cutting a sequence into steps gives the outputs of the whole, causal and with a window."""
    torch.manual_seed(0)
    attention = variant(name)
    turn = Rotary(attention.head_dim) if rotary else None
    n = data.draw(st.integers(1, 8))
    cuts = sorted(data.draw(st.sets(st.integers(1, n), max_size=4)) | {0, n})
    x = torch.randn(2, n, DIM, dtype=torch.float64)
    whole = attention(x, mask=Mask(causal=True, window=window), rotary=turn)
    cache, parts = KVCache.empty(2), []
    for low, high in pairwise(cuts):
        out, cache = attention.step(x[:, low:high], cache, mask=Mask(window=window), rotary=turn)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", [*VARIANTS, "shaw"])
def test_rows_of_unequal_length_step_on_as_if_alone(name: str) -> None:
    attention, turn = variant(name), None if name == "shaw" else Rotary(variant(name).head_dim)
    x = torch.randn(2, 6, DIM, dtype=torch.float64)
    cache = KVCache.empty(2)
    _, cache = attention.step(x[:, :4], cache, rotary=turn)
    cache = cache.truncate(torch.tensor([4, 2]))  # the second row takes two back
    together, _ = attention.step(torch.stack([x[0, 4:6], x[1, 2:4]]), cache, rotary=turn)
    for row, place in ((0, slice(4, 6)), (1, slice(2, 4))):
        alone = attention(x[row : row + 1, : place.stop], mask=Mask(causal=True), rotary=turn)[0, place]
        torch.testing.assert_close(together[row], alone, atol=1e-12, rtol=1e-12)


def test_padding_changes_nothing() -> None:
    attention = layer()
    x = torch.randn(3, 7, DIM, dtype=torch.float64)
    lengths = torch.tensor([7, 4, 1])
    padded = attention(x, mask=Mask(lengths=lengths))
    for row, length in enumerate(lengths.tolist()):
        alone = attention(x[row : row + 1, :length])
        torch.testing.assert_close(padded[row, :length], alone[0], atol=1e-12, rtol=1e-12)


def test_packed_documents_do_not_see_each_other() -> None:
    attention, turn = layer(), Rotary(DIM // HEADS)
    one, two = torch.randn(1, 5, DIM, dtype=torch.float64), torch.randn(1, 3, DIM, dtype=torch.float64)
    packed = Mask(causal=True, segments=torch.tensor([[0] * 5 + [1] * 3]))
    together = attention(torch.cat([one, two], 1), mask=packed, rotary=turn)
    apart = torch.cat([attention(document, mask=Mask(causal=True), rotary=turn) for document in (one, two)], 1)
    torch.testing.assert_close(together, apart, atol=1e-12, rtol=1e-12)  # rotary: only distances count


def test_memory_may_be_projected_once() -> None:
    attention = layer(memory_dim=5)
    x, memory = torch.randn(2, 3, DIM, dtype=torch.float64), torch.randn(2, 4, 5, dtype=torch.float64)
    mask = Mask(lengths=torch.tensor([4, 2]))
    assert torch.equal(attention(x, memory, mask=mask), attention(x, attention.keys_values(memory), mask=mask))


def test_alibi_as_bias_with_a_cache() -> None:
    attention, alibi = layer(), ALiBi(HEADS)
    x = torch.randn(1, 6, DIM, dtype=torch.float64)
    whole = attention(x, mask=Mask(causal=True), bias=alibi(torch.arange(6), torch.arange(6), torch.float64))
    _, cache = attention.step(x[:, :4], KVCache.empty(1), bias=alibi(torch.arange(4), torch.arange(4), torch.float64))
    last, _ = attention.step(x[:, 4:], cache, bias=alibi(torch.arange(4, 6), torch.arange(6), torch.float64))
    torch.testing.assert_close(last, whole[:, 4:], atol=1e-12, rtol=1e-12)


def shaw_loop(attention: MultiHeadAttention, x: Tensor) -> Tensor:
    """Shaw et al. (2018), equations 3 and 4, one pair of positions at a time."""
    relative = attention.relative
    assert relative is not None
    assert relative.value_vectors is not None
    n, d, reach = x.shape[1], attention.head_dim, relative.max_distance
    q, k, v = (f(x)[0].view(n, HEADS, d) for f in (attention.query, attention.key, attention.value))
    heads = torch.zeros(n, HEADS, d, dtype=x.dtype)
    for h in range(HEADS):
        for i in range(n):
            place = [max(-reach, min(reach, j - i)) + reach for j in range(n)]
            e = torch.stack([q[i, h] @ (k[j, h] + relative.key_vectors[place[j]]) / d**0.5 for j in range(n)])
            a = e.exp() / e.exp().sum()
            heads[i, h] = sum(a[j] * (v[j, h] + relative.value_vectors[place[j]]) for j in range(n))
    return attention.output(heads.view(1, n, HEADS * d))  # type: ignore[no-any-return]


def test_shaws_relative_positions_against_the_formula() -> None:
    attention = variant("shaw")
    x = torch.randn(1, 6, DIM, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(attention(x), shaw_loop(attention, x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*VARIANTS, "shaw", "shaw keys"])
@pytest.mark.parametrize("n", [5, 300])
def test_recording_changes_no_bit_and_shows_the_references_weights(name: str, n: int, dtype: torch.dtype) -> None:
    attention = variant(name).float().train()
    attention.dropout = 0.3
    x = torch.randn(2, n, DIM).to(dtype)
    mask = Mask(causal=True, lengths=torch.tensor([n, n // 2]))
    torch.manual_seed(1)
    without = attention(x, mask=mask)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    with record(attention) as seen:
        within = attention(x, mask=mask)
    assert torch.equal(without, within)
    assert torch.equal(state, torch.get_rng_state())
    weights = seen[""].weights
    assert weights.shape == (2, HEADS, n, n)
    assert not weights.requires_grad
    q, (k, _) = attention._projected(x)[0], attention.keys_values(x)
    bias = None
    if attention.relative is not None:
        bias = attention.relative(q, torch.arange(n), torch.arange(n)) * attention.head_dim**-0.5
    exact = attention_weights(q.double(), k.double(), mask, bias)
    assert (weights - exact).abs().max() <= 1e-6


@pytest.mark.parametrize("kind", ["cross", "rotary", "bias", "step"])
@pytest.mark.parametrize("name", VARIANTS)
def test_recording_is_exact_in_every_use(name: str, kind: str) -> None:
    """Bit-identical outputs, and weights that equal the formula on the layer's own queries and keys to 1e-6."""
    attention, n = variant(name).float(), 6
    x, memory = torch.randn(2, n, DIM), torch.randn(2, 4, DIM)
    turn = Rotary(attention.head_dim) if kind == "rotary" else None
    bias = torch.randn(1, HEADS, n, n) if kind == "bias" else None
    _, past = attention.step(torch.randn(2, 3, DIM), KVCache.empty(2))
    past = past.truncate(torch.tensor([3, 1]))

    def run() -> Tensor:
        if kind == "step":
            return attention.step(x, past)[0]
        return attention(x, memory if kind == "cross" else None, bias=bias, rotary=turn)  # type: ignore[no-any-return]

    without = run()
    with record(attention) as seen:
        assert torch.equal(run(), without)
    q, (k, _) = attention._projected(x)[0], attention.keys_values(memory if kind == "cross" else x)
    allowed = torch.ones(2, 1, n, k.shape[2], dtype=torch.bool)
    if turn is not None:
        q, k = (turn(t, torch.arange(n)) for t in (q, k))
    if kind == "step":
        cache = past.append(*attention.keys_values(x))
        k = cache.keys
        place = past.lengths[:, None] + torch.arange(n)
        allowed = (torch.arange(k.shape[2]) <= place[:, :, None])[:, None]
    scores = q.double() @ k.double().repeat_interleave(HEADS // k.shape[1], 1).transpose(2, 3) / attention.head_dim**0.5
    scores = scores if bias is None else scores + bias
    exact = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
    assert (seen[""].weights - exact).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*VARIANTS, "shaw"])
def test_what_each_head_adds_sums_to_the_output(name: str, dtype: torch.dtype) -> None:
    """By hand: the weights of a head times its values times its columns of W_O; the bias stands apart."""
    attention = variant(name)
    attention = attention if dtype == torch.float64 else attention.float()
    x, mask = torch.randn(2, 5, DIM, dtype=torch.float64).to(dtype), Mask(causal=True)
    with record(attention, kinds=("weights", "added")) as seen, torch.no_grad():
        output = attention(x, mask=mask)
    parts = seen["output"]["heads"]
    assert parts.shape == (2, HEADS, 5, DIM)
    assert parts.dtype == torch.promote_types(dtype, torch.float32)
    assert ("bias" in seen["output"].values) == (attention.output.bias is not None)
    whole = parts.sum(1) + (0 if attention.output.bias is None else seen["output"]["bias"])
    exact = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(whole.to(output.dtype), output, rtol=0, atol=exact)
    if name != "shaw":  # which adds vectors of distances to the values
        _, v = attention.keys_values(x)
        v = v.repeat_interleave(HEADS // v.shape[1], 1).to(parts.dtype)
        width = attention.head_dim
        for head in range(HEADS):
            columns = attention.output.weight[:, head * width : (head + 1) * width].to(parts.dtype)
            by_hand = seen[""].weights[:, head].to(parts.dtype) @ v[:, head] @ columns.T
            torch.testing.assert_close(parts[:, head], by_hand, rtol=0, atol=exact)


def test_gradients_pass_through_steps() -> None:
    attention = layer()
    x = torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)
    cache, parts = KVCache.empty(2), []
    for t in range(5):
        part, cache = attention.step(x[:, t : t + 1], cache)
        parts.append(part)
    stepped, whole = torch.cat(parts, 1), attention(x, mask=Mask(causal=True))
    grad = torch.randn_like(whole)
    (by_steps,), (at_once,) = (torch.autograd.grad(y, x, grad) for y in (stepped, whole))
    torch.testing.assert_close(by_steps, at_once, atol=1e-12, rtol=1e-12)


def test_heads_are_independent_attentions_concatenated() -> None:
    attention = layer()
    x = torch.randn(2, 5, DIM, dtype=torch.float64)
    heads, d = [], DIM // HEADS
    for h in range(HEADS):
        q, k, v = ((f(x))[..., h * d : (h + 1) * d] for f in (attention.query, attention.key, attention.value))
        heads.append((q @ k.transpose(1, 2) / d**0.5).softmax(-1) @ v)
    torch.testing.assert_close(attention(x), attention.output(torch.cat(heads, -1)), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 10, "num_heads": 4}, "dim must be a multiple of num_heads, but 10 is not one of 4"),
        ({"dim": 8, "num_heads": 4, "num_kv_heads": 3}, "multiple of num_kv_heads, but 4 is not one of 3"),
        ({"dim": 8, "num_heads": 0}, "head counts must be ≥ 1"),
        ({"dim": 8, "num_heads": 2, "dropout": 1.5}, "dropout must be at least 0 and less than 1, not 1.5"),
        ({"dim": 8, "num_heads": 2, "relative": ShawRelative(3, 2)}, "vectors of 3, but a head is 4 wide"),
    ],
)
def test_sizes_that_do_not_fit_are_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(**arguments)  # type: ignore[arg-type]


def test_inputs_that_do_not_fit_are_named() -> None:
    attention = MultiHeadAttention(8, 2)
    x = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="takes vectors of 8, not 9"):
        attention(torch.randn(2, 3, 9))
    with pytest.raises(ValueError, match=r"pattern \[4, 4\] does not fit"):
        attention(x, mask=Mask(pattern=torch.ones(4, 4, dtype=torch.bool)))
    with pytest.raises(ValueError, match="positions are for self-attention"):
        attention(x, x, rotary=Rotary(4))
    for listening in (nullcontext(), record(attention)):
        with listening, pytest.raises(ValueError, match="mask must be a Mask"):
            attention(x, mask=torch.ones(3, 3))
    with pytest.raises(ValueError, match="positions are for self-attention"):
        layer(relative=ShawRelative(DIM // HEADS, 3))(torch.randn(1, 2, DIM).double(), torch.randn(1, 3, DIM).double())
    with pytest.raises(ValueError, match="a prefix must be run as a whole"):
        attention.step(x, KVCache.empty(2), mask=Mask(causal=True, prefix=2))
