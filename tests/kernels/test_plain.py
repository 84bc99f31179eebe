"""The plain ways are the references, bit for bit; the fast ways lead to the same parameters."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft.config import TransformerConfig
from weft.data.batching import Batch
from weft.kernels import attention, cross_entropy, linear
from weft.kernels.dropout import dropout
from weft.kernels.mask import Mask
from weft.kernels.plain import is_plain, plain
from weft.models import build


def test_inside_every_kernel_is_its_reference_and_outside_not() -> None:
    q, k, v = (torch.randn(2, 4, 40, 16) for _ in range(3))
    mask = Mask(causal=True, lengths=torch.tensor([40, 23]))
    x, weight, bias = torch.randn(50, 24), torch.randn(600, 24), torch.randn(600)
    targets = torch.randint(600, (50,))
    narrow = x.bfloat16()
    assert not is_plain()
    with plain():
        assert is_plain()
        heads = attention.attend(q, k, v, mask)
        product = linear.linear(narrow, weight, bias)
        total = cross_entropy.linear_cross_entropy(x, weight, targets, bias, smoothing=0.1).total
        both = cross_entropy.linear_rdrop(narrow, narrow.flip(0), weight, targets, bias).total
        torch.manual_seed(3)
        dropped = dropout(x, 0.4)
        with plain(False):
            assert not is_plain()
    assert not is_plain()
    assert torch.equal(heads, attention.reference(q, k, v, mask, None, None, 0.0))
    assert torch.equal(product, linear.reference(narrow, weight, bias))
    assert torch.equal(total, cross_entropy.reference(x, weight, targets, bias, smoothing=0.1).total)
    assert torch.equal(both, cross_entropy.rdrop_reference(narrow, narrow.flip(0), weight, targets, bias).total)
    torch.manual_seed(3)
    assert torch.equal(dropped, F.dropout(x, 0.4))
    torch.manual_seed(3)
    assert not torch.equal(dropped, dropout(x, 0.4))


@pytest.mark.parametrize("rdrop", [0.0, 2.0])
def test_the_fast_ways_lead_to_the_same_parameters(rdrop: float) -> None:
    torch.manual_seed(1)
    config = TransformerConfig(dim=32, num_heads=4, ffn_dim=64, encoder_layers=2, decoder_layers=2, dropout=0.0)
    batch = Batch(torch.randint(4, 90, (6, 11)), torch.randint(4, 90, (6, 13)))
    batch.source[3:, 8:], batch.target[2:, 9:] = 0, 0
    trained = []
    for way in (True, False):
        torch.manual_seed(2)
        model = build(config, 90, 90)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(5):
            with plain(way):
                loss = model.loss(batch, smoothing=0.1, rdrop=rdrop)  # type: ignore[operator]
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(trained[0], trained[1], rtol=1e-5, atol=1e-6)
