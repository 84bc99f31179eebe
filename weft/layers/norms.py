"""RMSNorm that keeps its parameters in fp32 under bf16 activations, as torch's LayerNorm does by itself."""

from __future__ import annotations

from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + eps) · weight (Zhang and Sennrich 2019), computed in the parameters' dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last dimension; the dtype stays."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)
