"""Attention as gating: a learned 0…1 for every channel, and which positions of a padded batch are real."""

from __future__ import annotations

from torch import Tensor, nn

from weft import observe
from weft.kernels.mask import Mask
from weft.layers.linear import Linear


def real_positions(x: Tensor, lengths: Tensor) -> Tensor:
    """Which positions of the right-padded x[B, N, …] are real: boolean [B, N, 1].

    Raises:
        ValueError: unless lengths[B] has whole numbers from 0 to N.
    """
    batch, n = x.shape[:2]
    padding = Mask(lengths=lengths)
    if lengths.shape != (batch,) or (batch and int(lengths.max()) > n):
        raise ValueError(f"lengths must be {batch} whole numbers ≤ {n}, not {lengths.tolist()}")
    return padding.dense(1, n, x.device)[:, 0, 0, :, None]


class SqueezeExcitation(nn.Module):
    """Weigh the channels by what the whole input holds (Hu et al. 2018).

        s = mean of x over positions,    g = σ(W₂ max(0, W₁ s + b₁) + b₂),    y = g ⊗ x

    The gate g[B, C] is recorded as "channels".

    Example:
        >>> SqueezeExcitation(32)(torch.randn(2, 7, 32)).shape
        torch.Size([2, 7, 32])
    """

    def __init__(self, channels: int, reduction: int = 16, spatial_dims: int = 1) -> None:
        """Make the two linear layers.

        Args:
            channels: C.
            reduction: the layer between has C // reduction channels.
            spatial_dims: 1 for sequences [B, N, C], 2 for images [B, C, H, W].

        Raises:
            ValueError: if the reduction leaves no channel, or spatial_dims is neither 1 nor 2.
        """
        super().__init__()
        if not 1 <= reduction <= channels:
            raise ValueError(f"reduction must be from 1 to channels = {channels}, not {reduction}")
        if spatial_dims not in (1, 2):
            raise ValueError(f"spatial_dims must be 1 ([B, N, C]) or 2 ([B, C, H, W]), not {spatial_dims!r}")
        self.channels = channels
        self.spatial_dims = spatial_dims
        self.squeeze = Linear(channels, channels // reduction)
        self.excite = Linear(channels // reduction, channels)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Scale the channels of x.

        Args:
            x: [B, N, C], or [B, C, H, W] with two spatial dims.
            lengths: [B] how many positions of each sequence are real; only they are in the mean.

        Returns:
            As x.

        Raises:
            ValueError: if the shape is another, or lengths are given for images.
        """
        images = self.spatial_dims == 2
        if x.dim() != self.spatial_dims + 2 or x.shape[1 if images else 2] != self.channels:
            expected = f"[B, {self.channels}, H, W]" if images else f"[B, N, {self.channels}]"
            raise ValueError(f"expected {expected}, not {list(x.shape)}")
        if images and lengths is not None:
            raise ValueError("lengths are for sequences: images have no padding")
        gate: Tensor = self.excite(self.squeeze(_mean(x, images, lengths)).relu()).sigmoid()  # [B, C]
        observe.see(self, "gates", lambda: {"channels": gate})
        return x * (gate[:, :, None, None] if images else gate[:, None])


def _mean(x: Tensor, images: bool, lengths: Tensor | None) -> Tensor:
    """The mean over positions [B, C]; of an empty sequence, zero."""
    if images:
        return x.mean((2, 3))
    if lengths is None:
        return x.mean(1)
    real = real_positions(x, lengths)
    return x.masked_fill(~real, 0.0).sum(1) / real.sum(1).clamp(min=1)
