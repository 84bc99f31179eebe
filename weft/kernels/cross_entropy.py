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

from weft.kernels import losses, output
from weft.kernels.linear import bf16_matmul
from weft.kernels.plain import is_plain
from weft.kernels.rows import add

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
class RDrop:
    """Two passes over the same targets.

    Attributes:
        total: what is trained: the mean of the two cross entropies, plus the divergence times its weight.
        nll: the mean of both sums of −log p(target), without gradient.
        divergence: the sum over rows of how far the two predictions are apart, without gradient.
        count: how many targets were not ignored, in one pass.
    """

    total: Tensor
    nll: Tensor
    divergence: Tensor
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


def linear_rdrop(
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    ignore: int = -100,
    apart: float = 1.0,
) -> RDrop:
    """The cross entropies of two passes under different drops, and how far their predictions p and q are apart.

    ½ (CE(p) + CE(q)) + apart · ½ (KL(p‖q) + KL(q‖p)), summed over rows (R-Drop, Wu et al. 2021): logits made once.

    Args:
        first: [..., D] what the output layer sees in the one pass.
        second: [..., D] in the other.
        weight: [V, D] of the output layer.
        targets: [...] word numbers, or ``ignore``.
        bias: [V].
        smoothing: as in ``linear_cross_entropy``.
        ignore: positions with this target count for nothing.
        apart: the weight of the divergence.

    Raises:
        ValueError: if shapes do not fit or a target is not a word.
    """
    if first.shape != second.shape:
        raise ValueError(f"the two hidden states differ in shape: {list(first.shape)} and {list(second.shape)}")
    if is_plain():
        return rdrop_reference(first, second, weight, targets, bias, smoothing, ignore, apart)
    (a, wanted), (b, _) = (_valid(hidden, weight, targets, smoothing, ignore) for hidden in (first, second))
    given = weight, bias, wanted, smoothing, apart, torch.is_grad_enabled()
    total, nll, divergence = _LinearRDrop.apply(a, b, *given)  # type: ignore[no-untyped-call]
    return RDrop(total, nll, divergence, len(wanted))


def rdrop_reference(
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    ignore: int = -100,
    apart: float = 1.0,
) -> RDrop:
    """The plain form: both distributions at once, torch's own losses."""
    one, two = (reference(hidden, weight, targets, bias, smoothing, ignore) for hidden in (first, second))
    rows = (_valid(hidden, weight, targets, smoothing, ignore)[0] for hidden in (first, second))
    p, q = (_all_logits(each, weight, bias).log_softmax(-1) for each in rows)
    forward, backward = (F.kl_div(x, y, reduction="sum", log_target=True) for x, y in ((q, p), (p, q)))
    divergence = (forward + backward) / 2
    total = (one.total + two.total) / 2 + apart * divergence
    return RDrop(total, (one.nll + two.nll) / 2, divergence.detach(), one.count)


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
        """Of the rows; in bf16 only if that is what products give, no bias is to be added, and losses can take it."""
        if not self.narrow:
            z = torch.mm(rows, self.weight.t())
            return z if self.bias is None else z.add_(self.bias)
        z = bf16_matmul(rows, self.weight.t())
        if self.bias is not None:
            return z.float().add_(self.bias)
        return z if losses.is_compiled(z) else z.float()

    def back(self, rows: Tensor, dlogits: Tensor) -> Tensor:
        """Add to dweight and dbias; return the gradient of the rows."""
        if self.bias is not None:
            self.dbias += dlogits.sum(0)
        if not self.narrow:
            self.dweight.addmm_(dlogits.t(), rows)
            return torch.mm(dlogits, self.weight)
        dlogits = dlogits.to(rows.dtype)
        add(self.dweight, bf16_matmul(dlogits.t(), rows))
        return bf16_matmul(dlogits, self.weight)


def _chunks(rows: int, vocab_size: int) -> Iterator[slice]:
    size = max(_ROWS, _CHUNK // vocab_size)
    return (slice(low, min(low + size, rows)) for low in range(0, rows, size))


def _scaled(ctx: Any, by: Tensor) -> Iterator[Tensor | None]:
    """The gradients that were kept, as far as they are wanted: as they are where the loss itself is differentiated."""
    wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
    as_kept = by.is_cpu and float(by) == 1.0
    return ((grad if as_kept else grad * by) if need else None for grad, need in wanted)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, train: bool
    ) -> tuple[Tensor, Tensor]:
        if output.serves(weight, bias, rows):
            costs, _, gradients = output.losses(weight, [rows], targets, smoothing, 0.0, train)
            ctx.save_for_backward(*gradients, None)
            nll, total = (x.to(weight.dtype) for x in costs.sum(0, dtype=torch.float64))
            ctx.mark_non_differentiable(nll)
            return total, nll
        layer = _Layer(rows, weight, bias)
        drows = torch.empty_like(rows) if train else None
        total, nll = rows.new_zeros(2, dtype=torch.float64).unbind()
        for chunk in _chunks(len(rows), len(weight)):
            z, wanted = layer.logits(rows[chunk]), targets[chunk, None]
            if losses.is_compiled(z):
                costs = losses.cross_entropy(z, targets[chunk], smoothing, train).sum(0, dtype=torch.float64)
                nll, total = nll + costs[0], total + costs[1]
                if drows is not None:
                    drows[chunk] = layer.back(rows[chunk], z)
                continue
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
        if drows is not None:
            ctx.save_for_backward(drows, layer.dweight, layer.dbias)
        total, nll = (x.to(layer.dweight.dtype) for x in (total, nll))
        ctx.mark_non_differentiable(nll)
        return total, nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled(ctx, dtotal), None, None, None


class _LinearRDrop(torch.autograd.Function):
    """With ratio = log p − log q and the row's sums f = Σ p·ratio, b = −Σ q·ratio, the divergence is (f + b) / 2 and
    its gradient ½ (p·(ratio − f) + p − q) for the logits of p, and the same the other way round for those of q.
    """

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        apart: float,
        train: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if output.serves(weight, bias, a, b):
            costs, far, gradients = output.losses(weight, [a, b], targets, smoothing, apart, train)
            ctx.save_for_backward(*gradients, None)
            nll, entropy = costs.sum(0, dtype=torch.float64)
            divergence = far.sum(dtype=torch.float64)
            total = entropy + apart * divergence
            total, nll, divergence = (x.to(weight.dtype) for x in (total, nll, divergence))
            ctx.mark_non_differentiable(nll, divergence)
            return total, nll, divergence
        layer = _Layer(a, weight, bias)
        passes = (a, torch.empty_like(a)), (b, torch.empty_like(b))
        entropy, nll, divergence = a.new_zeros(3, dtype=torch.float64).unbind()
        for chunk in _chunks(len(a), 2 * len(weight)):
            wanted = targets[chunk, None]
            logs = [layer.logits(rows[chunk]) for rows, _ in passes]
            if losses.is_compiled(*logs):
                given = targets[chunk], smoothing, apart, train
                costs, far = (x.sum(0, dtype=torch.float64) for x in losses.rdrop(logs[0], logs[1], *given))
                nll, entropy, divergence = nll + costs[0], entropy + costs[1], divergence + far
                for (rows, drows), grad in zip(passes if train else (), logs, strict=train):
                    drows[chunk] = layer.back(rows[chunk], grad)
                continue
            for log in logs:
                log.sub_(log.logsumexp(1, keepdim=True))
                log_wanted = log.gather(1, wanted)[:, 0]
                log_mean = log.mean(1) if smoothing else log_wanted
                nll -= log_wanted.sum(dtype=torch.float64) / 2
                entropy -= torch.lerp(log_wanted, log_mean, smoothing).sum(dtype=torch.float64) / 2
            ratio = logs[0] - logs[1]
            p, q = (log.exp_() for log in logs)
            sums = torch.linalg.vecdot(p, ratio)[:, None], -torch.linalg.vecdot(q, ratio)[:, None]
            divergence += (sums[0] + sums[1]).sum(dtype=torch.float64) / 2
            if train:
                ratio.mul_(apart / 2)
                grads = [ratio + (1 + apart * (1 - sums[0])) / 2, ratio.neg_().add_((1 + apart * (1 - sums[1])) / 2)]
                grads[0].mul_(p).sub_(q, alpha=apart / 2)
                grads[1].mul_(q).sub_(p, alpha=apart / 2)
                for (rows, drows), grad in zip(passes, grads, strict=True):
                    grad.sub_(smoothing / 2 / len(weight)).scatter_add_(
                        1, wanted, grad.new_full((1, 1), (smoothing - 1) / 2).expand_as(wanted)
                    )
                    drows[chunk] = layer.back(rows[chunk], grad)
        ctx.save_for_backward(*(drows for _, drows in passes), layer.dweight, layer.dbias)
        total = entropy + apart * divergence
        total, nll, divergence = (x.to(layer.dweight.dtype) for x in (total, nll, divergence))
        ctx.mark_non_differentiable(nll, divergence)
        return total, nll, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return *_scaled(ctx, dtotal), None, None, None, None


def _valid(hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, ignore: int) -> tuple[Tensor, Tensor]:
    """The rows [R, D] whose targets count, and those targets [R]."""
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"hidden {list(hidden.shape)} and targets {list(targets.shape)} do not fit: expected […, D] and […]"
        )
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"smoothing must be at least 0 and less than 1, not {smoothing}")
    if targets.dtype != torch.int64 or targets.device != hidden.device:
        raise ValueError(f"targets are {targets.dtype} on {targets.device}: expected torch.int64 on {hidden.device}")
    rows, wanted = _rows(hidden, weight), targets.flatten().contiguous()
    if _are_words(wanted, weight) and not 0 <= ignore < len(weight):
        return rows, wanted
    counted = wanted != ignore
    if not bool(counted.all()):
        places = counted.nonzero()[:, 0]
        rows, wanted = rows.index_select(0, places), wanted.index_select(0, places)
    if not _are_words(wanted, weight):
        wrong = wanted[(wanted < 0) | (wanted >= len(weight))][0]
        raise ValueError(f"target {int(wrong)} is not a word: expected 0 … {len(weight) - 1}, or {ignore} to ignore")
    return rows, wanted


def _are_words(targets: Tensor, weight: Tensor) -> bool:
    low, high = targets.aminmax() if len(targets) else (0, 0)
    return int(low) >= 0 and int(high) < len(weight)


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
