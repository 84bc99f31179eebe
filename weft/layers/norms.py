"""Norms that keep their parameters in fp32 under bf16 activations, and are compiled ones where those are chosen."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft.kernels import rows
from weft.kernels.sublayers import Norm
from weft.layers.linear import is_bare


class LayerNorm(nn.LayerNorm):
    """(x − mean(x)) / √(var(x) + eps) · weight + bias (Ba, Kiros and Hinton 2016), over the last dimension."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last dimension; the dtype stays."""
        if rows.serves_norm(x, self.weight, self.bias):
            return rows.norm(x, self.weight, self.bias, self.eps, centred=True)
        return super().forward(x)


class RMSNorm(nn.RMSNorm):
    """x / √(mean(x²) + eps) · weight (Zhang and Sennrich 2019), in the wider dtype of x and the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its last dimension; the dtype stays."""
        if self.eps is not None and rows.serves_norm(x, self.weight, None):
            return rows.norm(x, self.weight, None, self.eps, centred=False)
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        return super().forward(x.to(wide)).to(x.dtype)


def plain_norm(norm: nn.Module) -> Norm | None:
    """The norm by its numbers, if it is one of these and has gains; else None."""
    if is_bare(norm, LayerNorm) and norm.weight is not None:
        return Norm(norm.weight, norm.bias, norm.eps, True)
    if is_bare(norm, RMSNorm) and norm.weight is not None and norm.eps is not None:
        return Norm(norm.weight, None, norm.eps, False)
    return None
