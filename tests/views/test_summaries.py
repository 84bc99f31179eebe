"""What attention weights come to, against the definitions written out."""

from __future__ import annotations

import math

import pytest
import torch

from weft.observe import Seen
from weft.views import summaries


def _weights(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(*shape).softmax(-1)


def test_entropy_is_in_bits_and_counts_only_who_looks() -> None:
    one, all_alike = torch.eye(4)[None], torch.full((1, 4, 4), 0.25)
    assert summaries.entropy(torch.cat([one, all_alike])).tolist() == [0.0, 2.0]
    with_padding = torch.cat([all_alike, torch.zeros(1, 3, 4)], 1)
    assert summaries.entropy(with_padding).tolist() == [2.0]
    w = _weights(2, 3, 5, 6)
    expected = sum(-float(p) * math.log2(float(p)) for p in w[1, 2].flatten()) / 5
    assert summaries.entropy(Seen("a", "weights", 0, {"weights": w}))[1, 2].item() == pytest.approx(expected, abs=1e-5)


def test_distance_is_how_far_a_head_looks() -> None:
    before = torch.diag(torch.ones(3), -1)[None]  # each token looks at the one before it, the first nowhere
    assert summaries.distance(before).tolist() == [1.0]
    w = _weights(1, 2, 4, 4)
    expected = sum(float(w[0, 1, i, j]) * abs(i - j) for i in range(4) for j in range(4)) / 4
    assert summaries.distance(w)[0, 1].item() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="as many queries as keys, not 2 and 3"):
        summaries.distance(_weights(1, 2, 3))


def test_alignment_is_the_first_of_the_most() -> None:
    w = torch.tensor([[0.2, 0.4, 0.4], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert summaries.alignment(w).tolist() == [1, -1, 0]


def test_mean_of_heads() -> None:
    w = _weights(2, 3, 4, 5)
    assert torch.equal(summaries.mean_of_heads(w), (w[:, 0] + w[:, 1] + w[:, 2]) / 3) or torch.allclose(
        summaries.mean_of_heads(w), w.mean(1)
    )


def test_rollout_multiplies_layers_from_the_first_to_the_last() -> None:
    layers = [_weights(2, 3, 4, 4), _weights(2, 3, 4, 4).flip(0), _weights(2, 3, 4, 4).flip(-1)]
    expected = torch.eye(4).expand(2, 4, 4)
    for layer in layers:
        expected = torch.bmm(0.5 * layer.mean(1) + 0.5 * torch.eye(4), expected)
    rolled = summaries.rollout(layers)
    torch.testing.assert_close(rolled, expected)
    torch.testing.assert_close(rolled.sum(-1), torch.ones(2, 4))
    assert not torch.allclose(rolled, summaries.rollout(layers[::-1])), "the order matters"
    torch.testing.assert_close(summaries.rollout(layers[:1], residual=0.0), layers[0].mean(1))
    with pytest.raises(ValueError, match="at least one layer"):
        summaries.rollout([])
    with pytest.raises(ValueError, match="self-attentions of one stack"):
        summaries.rollout([_weights(1, 2, 3, 4)])
    with pytest.raises(ValueError, match="residual"):
        summaries.rollout(layers, residual=1.0)


def test_words_are_told_from_their_pieces() -> None:
    assert summaries.word_numbers(["▁the", "▁ca", "t", "<0xC3>", "<0xA4>", "</s>"]) == [0, 1, 1, 1, 1, 2]
    assert summaries.word_numbers(["a", "b", " c"]) == [0, 0, 1]
    assert summaries.word_numbers([]) == []


def test_weights_between_words_are_sums_over_keys_and_means_over_queries() -> None:
    w = _weights(2, 3, 4)
    found = summaries.by_words(w, [0, 0, 1], [0, 1, 1, 1])
    expected = torch.stack([(w[:, 0] + w[:, 1]) / 2, w[:, 2]], 1)
    expected = torch.stack([expected[..., 0], expected[..., 1:].sum(-1)], -1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 2))
    with pytest.raises(ValueError, match="2 and 4 tokens"):
        summaries.by_words(w, [0, 1], [0, 1, 1, 1])


def test_order_counts_runs_and_crossings() -> None:
    assert summaries.order([0, 1, 1, 2]) == (1, 0)
    assert summaries.order([0, 2, 1, -1, 3]) == (2, 1)
    assert summaries.order([3, 2, 1, 0]) == (4, 6)
    assert summaries.order([-1]) == (0, 0)
