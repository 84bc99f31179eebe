"""The linear layer every block uses: fp32 parameters, products in the activations' dtype."""

from __future__ import annotations

from torch import Tensor, nn

from weft.kernels.linear import linear


class Linear(nn.Linear):
    """y = x Wᵀ + b. With bf16 x and fp32 parameters the product runs in bf16 (see kernels/linear.py).

    A weight that was loaded in int8 has a scale for each of its rows, ``weight_scale``.
    """

    weight_scale: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        """Make the matrix."""
        super().__init__(in_features, out_features, bias)
        self.register_buffer("weight_scale", None)

    def forward(self, x: Tensor) -> Tensor:
        """Map x[…, D_in] to […, D_out]."""
        return linear(x, self.weight, self.bias, self.weight_scale)
