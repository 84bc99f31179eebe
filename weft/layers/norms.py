"""RMSNorm that keeps its parameters in fp32 under bf16 activations, as torch's LayerNorm does by itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + eps) · weight (Zhang and Sennrich 2019), in the wider dtype of x and the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last dimension; the dtype stays."""
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        return super().forward(x.to(wide)).to(x.dtype)
