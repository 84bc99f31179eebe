"""Output layer and cross entropy in one, in chunks of rows, the gradient made on the spot.

The logits of 4,096 positions over 50,000 words are 800 MB in fp32, and softmax, loss and gradient want several
such arrays. Here a chunk of rows is multiplied out, scored, turned into its gradient in place, multiplied
back into the gradients of the hidden states and the weights, and forgotten. The softmax is in fp32 also for bf16
hidden states; their logits are what ``bf16_matmul`` gives.

    loss = Σ over rows of (1 − ε)·(lse − z_y) + ε·(lse − mean z),    ∂loss/∂z = softmax(z) − (1 − ε)·1_y − ε/V
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.linear import bf16_matmul
from weft.kernels.plain import is_plain

_CHUNK = 1 << 22  # logits at a time: 16 MiB in fp32
_ROWS = 128  # but at least so many rows: the gradient of the weights is read and written once a chunk


@dataclass(frozen=True)
class CrossEntropy:
    """Sums and a count apart, so that batches and ranks are weighted by tokens exactly.

    Attributes:
        total: what is trained: the sum of the smoothed losses.
        nll: the sum of −log p(target), without smoothing and without gradient: what perplexity is made of.
        count: how many targets were not ignored.
    """

    total: Tensor
    nll: Tensor
    count: int


@dataclass(frozen=True)
class Divergence:
    """The sum of the rows' divergences, and how many rows there were."""

    total: Tensor
    count: int


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    ignore: int = -100,
) -> CrossEntropy:
    """Cross entropy of softmax(hidden · weightᵀ + bias) against the targets.

    Args:
        hidden: [..., D] what the output layer sees; bf16 multiplies in bf16.
        weight: [V, D] of the output layer.
        targets: [...] word numbers, or ``ignore``.
        bias: [V].
        smoothing: ε: this share of the target's probability is spread over all V words.
        ignore: positions with this target count for nothing.

    Raises:
        ValueError: if shapes do not fit or a target is not a word.
    """
    if is_plain():
        return reference(hidden, weight, targets, bias, smoothing, ignore)
    rows, wanted = _valid(hidden, weight, targets, smoothing, ignore)
    train = torch.is_grad_enabled()
    total, nll = _LinearCrossEntropy.apply(rows, weight, bias, wanted, smoothing, train)  # type: ignore[no-untyped-call]
    return CrossEntropy(total, nll, len(wanted))


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    ignore: int = -100,
) -> CrossEntropy:
    """The plain form: all logits at once, torch's own loss."""
    rows, wanted = _valid(hidden, weight, targets, smoothing, ignore)
    logits = _all_logits(rows, weight, bias)
    total = F.cross_entropy(logits, wanted, label_smoothing=smoothing, reduction="sum")
    nll = F.cross_entropy(logits.detach(), wanted, reduction="sum")
    return CrossEntropy(total, nll, len(wanted))


def linear_divergence(
    first: Tensor, second: Tensor, weight: Tensor, bias: Tensor | None = None, keep: Tensor | None = None
) -> Divergence:
    """How far two hidden states' predictions are apart, for R-Drop (Wu et al. 2021).

    ½ (KL(p‖q) + KL(q‖p)) summed over rows, p and q the softmax of first · weightᵀ + bias and of second's.

    Args:
        first: [..., D].
        second: [..., D].
        weight: [V, D] of the output layer.
        bias: [V].
        keep: [...] True where a row counts; all if None.
    """
    if first.shape != second.shape:
        raise ValueError(f"the two hidden states differ in shape: {list(first.shape)} and {list(second.shape)}")
    if keep is not None and (keep.dtype != torch.bool or keep.shape != first.shape[:-1]):
        raise ValueError(f"keep must be boolean {list(first.shape[:-1])}, not {keep.dtype} {list(keep.shape)}")
    if is_plain():
        return divergence_reference(first, second, weight, bias, keep)
    a, b = _rows(first, weight), _rows(second, weight)
    if keep is not None and not bool(keep.all()):
        rows = keep.flatten().nonzero()[:, 0]
        a, b = a.index_select(0, rows), b.index_select(0, rows)
    total = _LinearDivergence.apply(a, b, weight, bias, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return Divergence(total, len(a))


def divergence_reference(
    first: Tensor, second: Tensor, weight: Tensor, bias: Tensor | None = None, keep: Tensor | None = None
) -> Divergence:
    """The plain form: both distributions at once, torch's own divergence."""
    p, q = (_all_logits(_rows(h, weight), weight, bias).log_softmax(-1) for h in (first, second))
    if keep is not None:
        p, q = p[keep.flatten()], q[keep.flatten()]
    forward, backward = (F.kl_div(x, y, reduction="sum", log_target=True) for x, y in ((q, p), (p, q)))
    return Divergence((forward + backward) / 2, len(p))


def _all_logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = F.linear(rows, weight.to(rows.dtype))
    logits = logits.float() if rows.dtype == torch.bfloat16 else logits
    return logits if bias is None else logits + bias


class _Layer:
    """The output layer without autograd: logits of some rows, and the way back for their gradients."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.narrow = rows.dtype == torch.bfloat16
        self.weight = weight.to(rows.dtype) if self.narrow else weight
        self.bias = bias
        self.dweight = torch.zeros_like(weight, dtype=torch.float32 if self.narrow else weight.dtype)
        self.dbias = torch.zeros_like(self.dweight[:, 0])

    def logits(self, rows: Tensor) -> Tensor:
        z = bf16_matmul(rows, self.weight.t()).float() if self.narrow else torch.mm(rows, self.weight.t())
        return z if self.bias is None else z.add_(self.bias)

    def back(self, rows: Tensor, dlogits: Tensor) -> Tensor:
        """Add to dweight and dbias; return the gradient of the rows."""
        if self.bias is not None:
            self.dbias += dlogits.sum(0)
        if not self.narrow:
            self.dweight.addmm_(dlogits.t(), rows)
            return torch.mm(dlogits, self.weight)
        dlogits = dlogits.to(rows.dtype)
        self.dweight += bf16_matmul(dlogits.t(), rows)
        return bf16_matmul(dlogits, self.weight)


def _chunks(rows: int, vocab_size: int) -> Iterator[slice]:
    size = max(_ROWS, _CHUNK // vocab_size)
    return (slice(low, min(low + size, rows)) for low in range(0, rows, size))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, train: bool
    ) -> tuple[Tensor, Tensor]:
        layer = _Layer(rows, weight, bias)
        drows = torch.empty_like(rows) if train else None
        total, nll = rows.new_zeros(2, dtype=torch.float64).unbind()
        for chunk in _chunks(len(rows), len(weight)):
            z, wanted = layer.logits(rows[chunk]), targets[chunk, None]
            z_wanted, z_top = z.gather(1, wanted)[:, 0], z.amax(1)
            z_mean = z.mean(1) if smoothing else z_wanted
            p = torch.softmax(z, 1, out=z)
            lse = z_top - p.amax(1).log_()  # the largest probability is exp(z_top − lse)
            nll += (lse - z_wanted).sum(dtype=torch.float64)
            total += (lse - torch.lerp(z_wanted, z_mean, smoothing)).sum(dtype=torch.float64)
            if drows is not None:
                p.sub_(smoothing / len(weight)).scatter_add_(
                    1, wanted, p.new_full((1, 1), smoothing - 1).expand_as(wanted)
                )
                drows[chunk] = layer.back(rows[chunk], p)
        ctx.mark_non_differentiable(nll)
        if drows is not None:
            ctx.save_for_backward(drows, layer.dweight, layer.dbias)
        wide = layer.dweight.dtype
        return total.to(wide), nll.to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grads = (g * dtotal if need else None for g, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False))
        return *grads, None, None, None


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, train: bool) -> Tensor:
        layer = _Layer(a, weight, bias)
        da, db = torch.empty_like(a), torch.empty_like(b)
        total = a.new_zeros((), dtype=torch.float64)
        for chunk in _chunks(len(a), 2 * len(weight)):
            p, q = (layer.logits(x[chunk]).log_softmax(1) for x in (a, b))
            ratio = p - q
            p.exp_(), q.exp_()
            forward, backward = (p * ratio).sum(1, keepdim=True), -(q * ratio).sum(1, keepdim=True)
            total += (forward + backward).sum(dtype=torch.float64) / 2
            if train:
                gap = p - q
                da[chunk] = layer.back(a[chunk], p.mul_(ratio - forward).add_(gap).div_(2))
                db[chunk] = layer.back(b[chunk], q.mul_(-ratio - backward).sub_(gap).div_(2))
        ctx.save_for_backward(da, db, layer.dweight, layer.dbias)
        return total.to(layer.dweight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        grads = (g * dtotal if need else None for g, need in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False))
        return *grads, None


def _valid(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, ignore: int) -> tuple[Tensor, Tensor]:
    """The rows [R, D] whose targets count, and those targets [R]."""
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden {list(hidden.shape)} and targets {list(targets.shape)} do not fit: expected […, D] and […]"
        )
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"smoothing must be at least 0 and less than 1, not {smoothing}")
    rows, wanted = _rows(hidden, weight), targets.flatten()
    counted = wanted != ignore
    if not bool(counted.all()):
        places = counted.nonzero()[:, 0]
        rows, wanted = rows.index_select(0, places), wanted.index_select(0, places)
    if len(wanted) and (int(wanted.min()) < 0 or int(wanted.max()) >= len(weight)):
        wrong = wanted[(wanted < 0) | (wanted >= len(weight))][0]
        raise ValueError(f"target {int(wrong)} is not a word: expected 0 … {len(weight) - 1}, or {ignore} to ignore")
    return rows, wanted


def _rows(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden [..., D] as [R, D], if it fits the output layer."""
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} do not fit: expected […, D], [V, D]"
        )
    if hidden.dtype != weight.dtype and (hidden.dtype, weight.dtype) != (torch.bfloat16, torch.float32):
        raise ValueError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: expected the same, or bfloat16 and float32"
        )
    return hidden.reshape(-1, hidden.shape[-1])
