"""Gated 1-D convolution: the way to see neighbours that is neither recurrence nor attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import observe
from weft.kernels.dropout import dropout
from weft.kernels.linear import linear
from weft.kernels.steady import is_steady, sigmoid
from weft.layers.gates import real_positions


class GatedConvolution(nn.Module):
    """Convolution over time and a gated linear unit (Dauphin et al. 2017; Gehring et al. 2017).

        [a_t; b_t] = Σ_j W_j x_{t + shift_j} + bias,    y_t = a_t ⊗ σ(b_t)

    Causal: the shifts are −(K−1)·dilation, …, −dilation, 0, so that nothing sees the future.
    Centred: they lie on both sides of 0. What lies outside the sequence counts as zero.

    There is no residual here: a block adds one. The gate σ(b)[B, N, out_dim] is recorded as "gate".

    Example:
        >>> convolution = GatedConvolution(8, kernel_size=3, causal=True)
        >>> x = torch.randn(2, 5, 8)
        >>> whole, _ = convolution(x)
        >>> first, state = convolution(x[:, :4])
        >>> last, state = convolution(x[:, 4:], state=state)  # whole[:, 4:]
    """

    def __init__(
        self,
        dim: int,
        kernel_size: int,
        causal: bool,
        dilation: int = 1,
        dropout: float = 0.0,
        out_dim: int | None = None,
    ) -> None:
        """Make the convolution, initialised to keep the variance through the gate (Gehring et al. 2017).

        Args:
            dim: width D of the input.
            kernel_size: how many positions K each output sees; odd unless causal.
            causal: whether it sees itself and the past only.
            dilation: the distance between the positions that it sees.
            dropout: probability that an input is dropped in training.
            out_dim: width of the output; dim if None.

        Raises:
            ValueError: if a number is below 1, or a centred kernel is even.
        """
        super().__init__()
        if kernel_size < 1 or dilation < 1:
            raise ValueError(f"kernel_size and dilation must be ≥ 1, not {kernel_size} and {dilation}")
        if not causal and kernel_size % 2 == 0:
            raise ValueError(f"a centred convolution needs an odd kernel_size, not {kernel_size}")
        self.causal = causal
        self.reach = (kernel_size - 1) * dilation
        self.dropout = dropout
        out_dim = dim if out_dim is None else out_dim
        self.convolution = nn.Conv1d(dim, 2 * out_dim, kernel_size, dilation=dilation)
        nn.init.normal_(self.convolution.weight, std=(4 * (1 - dropout) / (kernel_size * dim)) ** 0.5)
        nn.init.zeros_(self.convolution.bias)  # type: ignore[arg-type]

    def start(self, batch: int) -> Tensor:
        """The state before the first position: ``reach`` inputs of zero [B, reach, D]."""
        return self.convolution.weight.new_zeros(batch, self.reach, self.convolution.in_channels)

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, state: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve T ≥ 1 positions, the first or the next ones.

        Args:
            x: [B, T, D].
            lengths: [B] how many of the T positions are real in each row. The rest is not seen.
            state: [B, reach, D] the inputs before x, as returned by the call before; causal only.
                ``state.index_select(0, rows)`` picks rows, ``torch.cat`` joins them.

        Returns:
            The output [B, T, out_dim], zero at padding, and the state after each row's last real
            position (None when centred: it cannot go step by step).

        Raises:
            ValueError: if a shape does not fit, or a state is given to a centred convolution.
        """
        self._check(x, state)
        real = None if lengths is None else real_positions(x, lengths)
        x = dropout(x, self.dropout, self.training)
        if real is not None:
            x = x.masked_fill(~real, 0.0)
        if self.causal:
            x = torch.cat([self.start(x.shape[0]).to(x) if state is None else state, x], 1)  # [B, reach + T, D]
            state = _last(x, self.reach, lengths)
        else:
            x = F.pad(x, (0, 0, self.reach // 2, self.reach // 2))
        # The kernel times each window: in any precision, and on a CPU no slower than conv1d (128 × 32 positions of
        # 256, kernel 3, forward and backward, one thread: 132 ms, by conv1d 197).
        windows = x.unfold(1, self.reach + 1, 1)[..., :: self.convolution.dilation[0]]  # [B, T, D, K]
        both = linear(
            windows.flatten(2), self.convolution.weight.flatten(1), self.convolution.bias
        )  # [B, T, 2·out_dim]
        if real is not None:
            both = both.masked_fill(~real, 0.0)
        observe.see(self, "gates", lambda: {"gate": _gate(both, real)})
        if is_steady():
            a, b = both.chunk(2, -1)
            return a * sigmoid(b), state
        return F.glu(both, -1), state

    def _check(self, x: Tensor, state: Tensor | None) -> None:
        dim = self.convolution.in_channels
        if x.dim() != 3 or x.shape[1] < 1 or x.shape[2] != dim:
            raise ValueError(f"expected x [B, T ≥ 1, {dim}], not {list(x.shape)}")
        if state is None:
            return
        if not self.causal:
            raise ValueError("a centred convolution sees the future: it takes no state")
        if state.shape != (x.shape[0], self.reach, dim):
            raise ValueError(f"expected a state [{x.shape[0]}, {self.reach}, {dim}], not {list(state.shape)}")


def _last(x: Tensor, reach: int, lengths: Tensor | None) -> Tensor:
    """The last ``reach`` real inputs of x[B, reach + T, D], whose first ``reach`` came before."""
    if lengths is None:
        return x[:, x.shape[1] - reach :]
    index = lengths.to(x.device, torch.int64)[:, None] + torch.arange(reach, device=x.device)  # [B, reach]
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))


def _gate(both: Tensor, real: Tensor | None) -> Tensor:
    gate = both.chunk(2, -1)[1].sigmoid()
    return gate if real is None else gate.masked_fill(~real, 0.0)
