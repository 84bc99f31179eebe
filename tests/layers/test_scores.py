"""Score functions and the attention over them: values, masks, gradients, what is recorded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import weft
from weft.kernels.mask import Mask
from weft.layers import scores
from weft.layers.scores import (
    SCORES,
    AdditiveAttention,
    AdditiveScore,
    BilinearScore,
    DotScore,
    HardAttention,
    ScaledDotScore,
    Score,
    ScoreAttention,
    SelfAttention,
)

NAMES = ["dot", "scaled_dot", "bilinear", "additive"]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def close(a: object, b: object, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def formula(score: Score, q: Tensor, k: Tensor) -> Tensor:
    """The score of one query[Q] and one key[K], as it stands in the papers."""
    match score:
        case ScaledDotScore():
            return (q * k).sum() / len(q) ** 0.5
        case DotScore():
            return (q * k).sum()
        case BilinearScore():
            return q @ score.key.weight @ k
        case AdditiveScore():
            inner = score.query.weight @ q + score.key.weight @ k + score.key.bias
            return score.energy.weight[0] @ inner.tanh()
    raise AssertionError(score)


def test_every_name_has_its_score() -> None:
    kinds = {name: type(make(4, 4, 5)) for name, make in SCORES.items()}
    expected = {"dot": DotScore, "scaled_dot": ScaledDotScore, "bilinear": BilinearScore, "additive": AdditiveScore}
    assert kinds == expected


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10)
@given(batch=st.integers(1, 3), n=st.integers(1, 4), m=st.integers(1, 5), dim=st.integers(1, 5), data=st.data())
def test_attention_is_a_loop_over_the_formula(
    name: str, batch: int, n: int, m: int, dim: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, m), min_size=batch, max_size=batch))
    key_dim = dim if "dot" in name else dim + 1
    attention = ScoreAttention(SCORES[name](dim, key_dim, 3)).double()
    query, keys, values = draw(batch, n, dim), draw(batch, m, key_dim), draw(batch, m, 2)
    with weft.record(attention) as seen:
        context = attention(query, keys, values, Mask(lengths=torch.tensor(lengths)))
    plain = attention.score(query, attention.score.project(keys))
    assert seen[""].weights.shape == (batch, 1, n, m)
    for b, length in enumerate(lengths):
        for i in range(n):
            expected = torch.stack([formula(attention.score, query[b, i], keys[b, j]) for j in range(m)])
            close(plain[b, i], expected)
            shares = expected[:length].exp() / expected[:length].exp().sum()
            close(seen[""].weights[b, 0, i], torch.cat([shares, torch.zeros(m - length, dtype=torch.float64)]))
            close(context[b, i], (shares[:, None] * values[b, :length]).sum(0))


def test_the_step_by_step_numbers() -> None:
    """Two scores, 112 and 96, at a width of 64: divided by 8 they give the weights 0.88 and 0.12."""
    query = torch.zeros(1, 1, 64)
    query[0, 0, 0] = 16.0
    keys = torch.zeros(1, 2, 64)
    keys[0, :, 0] = torch.tensor([7.0, 6.0])
    assert DotScore()(query, keys).tolist() == [[[112.0, 96.0]]]
    assert ScaledDotScore()(query, keys).tolist() == [[[14.0, 12.0]]]
    close(ScoreAttention(ScaledDotScore()).weights(query, keys), torch.tensor([[[[0.88, 0.12]]]]), 0.005)


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_the_values_and_may_come_projected(name: str) -> None:
    attention = ScoreAttention(SCORES[name](4, 4, 3)).double()
    query, keys = draw(2, 3, 4), draw(2, 5, 4)
    expected = attention(query, keys, keys)
    assert torch.equal(attention(query, keys), expected)
    assert torch.equal(attention(query, keys, projected=attention.score.project(keys)), expected)
    assert not torch.allclose(attention(query, keys, keys + 1), expected)


@pytest.mark.parametrize("kind", [*NAMES, "hard", "self"])
def test_nothing_allowed_gives_zeros_and_no_gradient(kind: str) -> None:
    score = SCORES[kind if kind in NAMES else "dot"](4, 4, 3).double()
    query, keys = draw(2, 3, 4).requires_grad_(), draw(2, 3, 4).requires_grad_()
    mask = Mask(lengths=torch.tensor([0, 2]))
    if kind == "self":
        context = SelfAttention()(keys, mask)
    else:
        context = (HardAttention if kind == "hard" else ScoreAttention)(score)(query, keys, mask=mask)
    assert not context[0].any()
    assert context[1].all()

    leaves = [query, keys, *score.parameters()]
    gradients = torch.autograd.grad(context.square().sum(), leaves, allow_unused=True, retain_graph=True)
    assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
    for gradient in gradients[:2]:
        if gradient is not None:
            assert not gradient[0].any()
            assert gradient[1, :2].all()
    assert [gradient is None for gradient in gradients[:2]] == [kind in ("hard", "self"), False]
    empty = torch.autograd.grad(context[0].exp().sum(), leaves, allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in empty)


def test_additive_attention_has_the_right_gradients() -> None:
    attention = AdditiveAttention(3, 4, 5).double()
    names, parameters = zip(*attention.named_parameters(), strict=True)
    mask = Mask(lengths=torch.tensor([4, 0, 2]))

    def run(query: Tensor, keys: Tensor, values: Tensor, *weights: Tensor) -> Tensor:
        given = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(attention, given, (query, keys, values, mask))

    leaves = [draw(3, 2, 3), draw(3, 4, 4), draw(3, 4, 2), *(p.detach().clone() for p in parameters)]
    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in leaves])


def test_additive_scores_in_parts_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    score = AdditiveScore(3, 4, 5).double()
    query, projected = draw(2, 7, 3), score.project(draw(2, 6, 4))
    whole = score(query, projected)
    sizes: list[int] = []
    score.energy.register_forward_hook(lambda module, given, output: sizes.append(output.shape[1]))
    monkeypatch.setattr(scores, "_PART", 3 * projected.numel())
    close(score(query, projected), whole)
    assert sizes == [3, 3, 1]


def test_hard_attention_takes_the_best_allowed_key() -> None:
    attention = HardAttention(ScaledDotScore())
    query, keys = draw(2, 6, 4).requires_grad_(), draw(2, 5, 4).requires_grad_()
    values = draw(2, 5, 3).requires_grad_()
    lengths = [5, 3]
    products = query.detach() @ keys.detach().mT
    with weft.record(attention) as seen:
        context = attention(query, keys, values, Mask(lengths=torch.tensor(lengths)))
        open_context = attention(query, keys, values)
    weights = seen.calls("")[0].weights
    counts = torch.zeros(2, 5, 1, dtype=torch.float64)
    for b, length in enumerate(lengths):
        for i in range(6):
            best = max(range(length), key=products[b, i].tolist().__getitem__)
            assert torch.equal(context[b, i], values[b, best])
            assert weights[b, 0, i].tolist() == [float(j == best) for j in range(5)]
            counts[b, best] += 1
            whole = max(range(5), key=products[b, i].tolist().__getitem__)
            assert torch.equal(open_context[b, i], values[b, whole])
    to_query, to_keys, to_values = torch.autograd.grad(context.sum(), [query, keys, values], allow_unused=True)
    assert to_query is None
    assert to_keys is None
    assert torch.equal(to_values, counts.expand(-1, -1, 3))


def test_soft_attention_nears_the_hard_one_as_scores_grow() -> None:
    query, keys, values = draw(2, 3, 4), draw(2, 5, 4), draw(2, 5, 2)
    hard = HardAttention(DotScore())(query, keys, values)
    soft = ScoreAttention(DotScore())
    close(soft(1e6 * query, keys, values), hard)
    assert not torch.allclose(soft(query, keys, values), hard)


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (None, 0.5), (0.1, 0.1)])
def test_self_attention_has_no_parameter(scale: float | None, factor: float) -> None:
    attention = SelfAttention(scale)
    assert not list(attention.parameters())
    x = draw(2, 5, 4)
    with weft.record(attention) as seen:
        y = attention(x)
    w = (x @ x.transpose(1, 2) * factor).exp()
    w = w / w.sum(-1, keepdim=True)
    close(seen[""].weights, w[:, None])
    close(y, w @ x)


def test_self_attention_looks_at_itself_most_and_keeps_the_order() -> None:
    x = torch.nn.functional.normalize(draw(1, 6, 16), dim=-1) * 4  # of one length: nothing is more alike than itself
    attention = SelfAttention()
    with weft.record(attention) as seen:
        y = attention(x)
    assert torch.equal(seen[""].weights[0, 0].argmax(-1), torch.arange(6))
    order = torch.randperm(6)
    close(attention(x[:, order]), y[:, order])
    first = attention(x, Mask(causal=True))
    assert torch.equal(first[:, 0], x[:, 0])


@pytest.mark.parametrize("kind", [*NAMES, "hard", "self"])
def test_recording_changes_nothing(kind: str) -> None:
    x = torch.randn(2, 5, 4, requires_grad=True)
    mask = Mask(lengths=torch.tensor([5, 3]))
    score = SCORES[kind if kind in NAMES else "dot"](4, 4, 3)
    attention = SelfAttention() if kind == "self" else (HardAttention if kind == "hard" else ScoreAttention)(score)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        y = attention(x, mask) if kind == "self" else attention(x, x, x, mask)
        return y, torch.autograd.grad(y.sum(), x)[0], torch.random.get_rng_state()

    plain = run()
    with weft.record(attention) as seen:
        observed = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert seen[""].kind == "weights"
    assert seen[""].weights.shape == (2, 1, 5, 5)
    assert not seen[""].weights.requires_grad


def test_bad_input_is_named() -> None:
    attention = ScoreAttention(DotScore())
    x = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="one width, not 3 and 4"):
        attention(x[..., :3], x)
    with pytest.raises(ValueError, match=r"not \[1, 5, 4\], \[2, 5, 4\] and \[2, 5, 4\]"):
        attention(x[:1], x)
    with pytest.raises(ValueError, match=r"and \[2, 4, 4\]"):
        attention(x, x, x[:, :4])
    with pytest.raises(ValueError, match=r"not \[2, 4\]"):
        attention(x[:, 0], x)
    with pytest.raises(ValueError, match="lengths has 3 rows, but the batch has 2"):
        attention(x, x, mask=Mask(lengths=torch.tensor([1, 2, 3])))
    with pytest.raises(ValueError, match=r"expected x \[B, N, D\], not \[5, 4\]"):
        SelfAttention()(x[0])
