"""The linear layer every block uses: fp32 parameters, products in the activations' dtype."""

from __future__ import annotations

from torch import Tensor, nn

from weft.kernels.linear import linear


class Linear(nn.Linear):
    """y = x Wᵀ + b. With bf16 x and fp32 parameters the product runs in bf16 (see kernels/linear.py)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map x[…, D_in] to […, D_out]."""
        return linear(x, self.weight, self.bias)
