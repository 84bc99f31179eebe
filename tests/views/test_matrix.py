"""A matrix takes what records hold and refuses what no attention is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import weft
from weft.kernels.mask import Mask
from weft.layers.attention import MultiHeadAttention
from weft.layers.cache import KVCache
from weft.views.matrix import Matrix, heads, of, visible


def test_any_array_will_do() -> None:
    rows = [[0.25, 0.75], [1.0, 0.0]]
    for weights in (rows, np.array(rows), torch.tensor(rows, requires_grad=True), torch.tensor(rows).bfloat16()):
        matrix = Matrix(weights, allowed=[[True, True], [True, False]])
        assert matrix.weights.tolist() == rows
        assert matrix.queries == matrix.keys == ["0", "1"]
        assert matrix.closed.tolist() == [[False, False], [False, True]]


def test_labels_are_made_visible() -> None:
    matrix = Matrix([[1.0]], [" a\n"], ["茶\u0301"])
    assert matrix.queries == ["·a�"]
    assert matrix.keys == ["茶\u0301"]
    assert visible("\x1b[31m") == "�[31m"  # nothing in a text may steer the terminal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.5, 0.5],), r"expected weights \[queries, keys\], not of shape \[2\]"),
        (([[1.5]],), "between 0 and 1"),
        (([[-0.5]],), "between 0 and 1"),
        (([[float("nan")]],), "between 0 and 1"),
        (([[1.0]], ["a", "b"]), "there are 1 queries, but 2 labels"),
        (([[1.0]], ["a"], []), "there are 1 keys, but 0 labels"),
        (([[1.0]], None, None, [True]), r"allowed \[1\] does not fit the weights \[1, 1\]"),
    ],
)
def test_what_is_no_attention_is_refused(arguments: tuple[list[object], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Matrix(*arguments)  # type: ignore[arg-type]


def test_a_record_becomes_a_matrix() -> None:
    layer, x = MultiHeadAttention(16, 4), torch.randn(2, 5, 16)
    mask = Mask(causal=True)
    with weft.record(layer) as seen:
        layer(x, mask=mask)
    seen.label("*", queries="abcde", keys="vwxyz")
    weights = seen[""].weights
    mean = of(seen[""], row=1, allowed=mask.dense(5, 5), caption="what")
    assert torch.equal(mean.weights, weights[1].mean(0))
    assert mean.queries == list("abcde")
    assert mean.keys == list("vwxyz")
    assert mean.closed.tolist() == (~torch.ones(5, 5).tril().bool()).tolist()
    assert mean.caption == "what: , mean of 4 heads, after the softmax"
    third = of(seen[""], head=2)
    assert torch.equal(third.weights, weights[0, 2])
    assert "head 3 of 4" in third.caption
    for number, matrix in enumerate(heads(seen[""], row=1)):
        assert torch.equal(matrix.weights, weights[1, number])
        assert matrix.caption == f"head {number + 1}"
    for wrong in ({"head": 4}, {"row": 2}, {"head": -1}):
        with pytest.raises(ValueError, match="has 2 rows and 4 heads"):
            of(seen[""], **wrong)
    with pytest.raises(ValueError, match="at least one recorded call"):
        of([])


def test_a_mask_may_differ_by_row_and_head() -> None:
    layer, x = MultiHeadAttention(8, 2), torch.randn(3, 4, 8)
    with weft.record(layer) as seen:
        layer(x)
    pattern = torch.rand(3, 2, 4, 4) > 0.5
    assert torch.equal(~of(seen[""], head=1, row=2, allowed=pattern).closed, pattern[2, 1])
    assert torch.equal(~of(seen[""], head=1, row=2, allowed=pattern[:, :1]).closed, pattern[2, 0])
    assert torch.equal(~of(seen[""], head=1, row=2, allowed=pattern[0, 0]).closed, pattern[0, 0])


def test_the_steps_of_a_decoder_stand_below_each_other() -> None:
    layer, x = MultiHeadAttention(16, 4), torch.randn(1, 6, 16)
    cache = KVCache.empty(1)
    with weft.record(layer) as seen:
        for part in x.split((2, 1, 3), 1):
            _, cache = layer.step(part, cache)
    with weft.record(layer) as whole:
        layer(x, mask=Mask(causal=True))
    matrix = of(seen.calls(""), head=1)
    assert torch.allclose(matrix.weights, whole[""].weights[0, 1], atol=1e-6)
    # A step of several positions has a triangle of its own, which its record cannot tell from no interest.
    assert matrix.closed.sum(1).tolist() == [4, 4, 3, 0, 0, 0]
    assert not matrix.weights[matrix.closed].any()
