"""Linear layers of one input, joined in one product where that is the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft.kernels.linear import side_by_side
from weft.kernels.machine import bf16_products
from weft.kernels.plain import plain
from weft.layers.linear import Linear, together


@pytest.mark.parametrize("bias", [True, False])
def test_layers_of_one_input_are_joined_in_one_product(bias: bool) -> None:
    if not bf16_products():
        pytest.skip("no bf16 products here: layers stay apart")
    layers = [Linear(24, width, bias) for width in (16, 8, 8)]
    x = torch.randn(5, 7, 24).bfloat16().requires_grad_()
    parameters = [x, *(p for layer in layers for p in layer.parameters())]
    by = [torch.randn(5, 7, layer.out_features).bfloat16() for layer in layers]

    def found(outputs: tuple[Tensor, ...]) -> list[Tensor]:
        return [*outputs, *torch.autograd.grad(outputs, parameters, by)]

    joined = together(x, *layers)
    assert len({y.untyped_storage().data_ptr() for y in joined}) == 1
    for mine, alone in zip(found(joined), found(tuple(layer(x) for layer in layers)), strict=True):
        torch.testing.assert_close(mine, alone, rtol=2e-2, atol=2e-2)
    with plain():
        assert len({y.untyped_storage().data_ptr() for y in together(x, *layers)}) == 3


def test_gradients_that_stand_side_by_side_are_not_copied() -> None:
    whole = torch.randn(4, 6, 10).bfloat16()
    parts = whole.split([3, 2, 5], -1)
    assert side_by_side(parts).data_ptr() == whole.data_ptr()
    assert torch.equal(side_by_side(parts), whole.view(24, 10))
    for apart in ([parts[1], parts[0], parts[2]], [part.clone() for part in parts], [parts[0], parts[2]]):
        assert torch.equal(side_by_side(apart), torch.cat([part.reshape(24, -1) for part in apart], 1))


def test_layers_are_not_joined_behind_the_back_of_a_hook() -> None:
    layers = [Linear(8, 8), Linear(8, 8)]
    seen = []
    layers[1].register_forward_hook(lambda *given: seen.append(given))
    together(torch.randn(2, 8).bfloat16(), *layers)
    assert len(seen) == 1
    wide = together(torch.randn(2, 8), *layers)
    assert [y.dtype for y in wide] == [torch.float32] * 2


def test_layers_of_different_kinds_are_not_joined() -> None:
    x = torch.randn(3, 8).bfloat16()
    for others in (Linear(8, 4, bias=False), nn.Sequential(Linear(8, 4))):
        first = Linear(8, 4)
        for mine, alone in zip(together(x, first, others), (first(x), others(x)), strict=True):
            assert torch.equal(mine, alone)
    with pytest.raises(ValueError, match="the layer takes vectors of 9, not 8"):
        together(x, Linear(9, 4), Linear(9, 4))
