"""How an update changes the parameters: schedules, AdamW, Muon, the mean of the weights over time.

Schedules are pure functions of the step, and everything else that lasts from one step to the next is tensors by name:
what a checkpoint stores is all there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import cos, pi, sqrt

import torch
from torch import Tensor, nn

from weft.config import TrainingConfig
from weft.kernels import updates

_MOMENTUM = 0.95  # of Muon, as its makers chose it
_QUINTIC = (3.4445, -4.7750, 2.0315)  # of Newton–Schulz: the steepest at 0 that keeps singular values near 1
_ROUNDS = 5
_TOGETHER = 1 << 22  # numbers of matrices that are made orthogonal at once
_LONG = 2  # times as long as it is wide: where rounds on X Xᵀ alone are fewer multiplications


def learning_rate(config: TrainingConfig, step: int) -> float:
    """The learning rate of update number ``step`` = 1 … steps, of which the first ``warmup`` go up in a line.

    With t the step, w the warm-up, T the steps, f the final rate as a share of the highest::

        constant      1
        inverse_sqrt  √(w / t)
        cosine        f + (1 − f) · (1 + cos(π (t − w) / (T − w))) / 2
        wsd           1, and in the last d = min(decay · T, T − w) steps 1 − (1 − f) · (t − T + d) / d
    """
    warmup, end = config.warmup, config.steps
    share = 1.0
    if step < warmup:
        share = step / warmup
    elif config.schedule == "inverse_sqrt":
        share = sqrt(max(warmup, 1) / step)
    elif config.schedule == "cosine":
        way = min((step - warmup) / max(end - warmup, 1), 1.0)
        share = config.final_rate + (1.0 - config.final_rate) * (1.0 + cos(pi * way)) / 2.0
    elif config.schedule == "wsd":
        decay = min(config.decay * end, end - warmup)
        way = max(step - end + decay, 0.0) / max(decay, 1.0)
        share = 1.0 - (1.0 - config.final_rate) * way
    return config.learning_rate * share


class Optimizer:
    """The update of each step with its learning rate, over the parameters that are trained.

    AdamW (Loshchilov and Hutter 2019), or with ``optimizer = "muon"`` Muon for the matrices of linear layers and
    AdamW for the rest: embeddings, output tables, positions, and all that has one dimension. Weight decay is for
    matrices: biases and the gains of norms go without. A parameter that had no part in a step has a gradient of zero,
    on every rank.

    Muon (Jordan et al. 2024), with g the gradient and m its mean over time, updates a matrix of R rows and C columns by
    the nearest orthogonal one, about::

        m ← 0.95 · m + 0.05 · g
        W ← (1 − rate · decay) · W − rate · 0.2 · √max(R, C) · orthogonal(0.95 · m + 0.05 · g)

    The factor (Liu et al. 2025) makes an entry's change about as large as one of AdamW's, so that one learning rate
    and one weight decay serve both.
    """

    def __init__(self, model: nn.Module, config: TrainingConfig) -> None:
        """Make moments of zero for each trained parameter of the model."""
        self.config = config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        hidden = linear_weights(model) if config.optimizer == "muon" else set()
        self._momenta = {name: torch.zeros_like(self.parameters[name]) for name in self.parameters if name in hidden}
        self._alike = _alike(self._momenta)
        decay = config.weight_decay
        self._trained = {
            name: updates.Trained(p, torch.zeros_like(p), torch.zeros_like(p), decay if p.dim() > 1 else 0.0)
            for name, p in self.parameters.items()
            if name not in hidden
        }

    def gradients(self) -> list[Tensor]:
        """The gradient of each parameter, zeros for one that had no part."""
        found = []
        for p in self.parameters.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            found.append(p.grad)
        return found

    def step(self, step: int, by: float = 1.0) -> float:
        """Make update number ``step`` = 1, 2, … from the gradients, times ``by``; forget them.

        Returns:
            The learning rate that it had.
        """
        rate, betas = learning_rate(self.config, step), (self.config.beta1, self.config.beta2)
        with torch.no_grad():
            updates.adamw(list(self._trained.values()), step, rate, by, betas, self.config.eps)
            self._muon(rate, by)
        self.clear()
        return rate

    def clear(self) -> None:
        """Forget the gradients."""
        for p in self.parameters.values():
            p.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The moments by name, to be stored or overwritten in place."""
        found = {f"exp_avg.{name}": one.mean for name, one in self._trained.items()}
        found |= {f"exp_avg_sq.{name}": one.square for name, one in self._trained.items()}
        return found | {f"momentum.{name}": momentum for name, momentum in self._momenta.items()}

    def _muon(self, rate: float, by: float) -> None:
        """The update of the matrices that Muon has, those of one shape together."""
        for names in self._alike:
            parameters, momenta = ([of[name] for name in names] for of in (self.parameters, self._momenta))
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
            torch._foreach_mul_(gradients, by)
            torch._foreach_lerp_(momenta, gradients, 1.0 - _MOMENTUM)
            ahead = torch._foreach_lerp(gradients, momenta, _MOMENTUM)  # a step ahead, as Nesterov has it
            updates = orthogonal(torch.stack(ahead)).unbind()
            torch._foreach_mul_(parameters, 1.0 - rate * self.config.weight_decay)
            torch._foreach_add_(parameters, updates, alpha=-rate * 0.2 * sqrt(max(parameters[0].shape)))


def linear_weights(model: nn.Module) -> set[str]:
    """The names of the matrices of linear layers; not of one that is an embedding's table too."""
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    layers = {id(part.weight) for part in model.modules() if isinstance(part, nn.Linear)} - tables
    return {name for name, p in model.named_parameters() if id(p) in layers}


def _alike(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """The names of tensors of one shape together, up to about 4 million numbers: products of many go faster."""
    found: dict[torch.Size, list[list[str]]] = {}
    for name, tensor in tensors.items():
        groups = found.setdefault(tensor.shape, [[]])
        if groups[-1] and (len(groups[-1]) + 1) * tensor.numel() > _TOGETHER:
            groups.append([])
        groups[-1].append(name)
    return [group for groups in found.values() for group in groups]


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrix to each of [B, R, C]: singular values from 0.7 to 1.2 unless next to 0.

    Five rounds of Newton–Schulz, X ← q X with q = a + b (X Xᵀ) + c (X Xᵀ)², which take each singular value x to
    a x + b x³ + c x⁵. For long matrices the rounds are made on X Xᵀ ← q (X Xᵀ) q, and X is multiplied once by all the
    q. In the matrices' own precision, which is fp32 in training. The rounds multiply what is next to 0 by 485, rounding
    included: in bf16, as torch.optim.Muon has it, what comes of a matrix of rank 4 is 70% off, and rounds on X Xᵀ
    diverge.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT.contiguous() if is_tall else matrices  # the smaller of the two products
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)  # now no singular value is over 1
    if x.shape[2] < _LONG * x.shape[1]:
        for _ in range(_ROUNDS):
            x = torch.bmm(_factor(torch.bmm(x, x.mT)), x)
    else:
        gram = torch.bmm(x, x.mT)
        q = every = _factor(gram)
        for _ in range(_ROUNDS - 1):
            gram = torch.bmm(torch.bmm(q, gram), q)
            q = _factor(gram)
            every = torch.bmm(q, every)
        x = torch.bmm(every, x)
    return x.mT if is_tall else x


def _factor(gram: Tensor) -> Tensor:
    """a + b · gram + c · gram²."""
    a, b, c = _QUINTIC
    q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    q.diagonal(dim1=-2, dim2=-1).add_(a)
    return q


def shortened(gradients: list[Tensor], count: int, clip: float) -> tuple[float, float]:
    """The norm of gradients that are sums over ``count`` tokens, divided by that; and what makes them that short.

    Returns:
        The norm, and the number by which they are to be multiplied, which also shortens them to the norm ``clip``.
    """
    norm = updates.norm(gradients) / count
    shorter = min(clip / norm, 1.0) if clip and norm else 1.0
    return norm, shorter / count


class Mean:
    """The exponential moving average of parameters: mean ← d · mean + (1 − d) · parameter after each step t.

    d = min(decay, (1 + t) / (10 + t)), so that the beginning, from random numbers, is soon forgotten.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        """Begin with the parameters as they are."""
        self.parameters = dict(parameters)
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in parameters.items()}

    def update(self, step: int) -> None:
        """Take in the parameters after update number ``step`` = 1, 2, …"""
        decay = min(self.decay, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.values.values()), list(self.parameters.values()), 1.0 - decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """While inside, the model has the mean and the mean's place holds the parameters, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        with torch.no_grad():
            for name, p in self.parameters.items():
                kept = p.clone()
                p.copy_(self.values[name])
                self.values[name].copy_(kept)


def average(weights: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several models' weights, summed in fp64; of what is no floating point number, the last.

    Raises:
        ValueError: if there are none.
    """
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count = 0
    for tensors in weights:
        count += 1
        for name, tensor in tensors.items():
            dtypes[name] = tensor.dtype
            if count > 1 and tensor.is_floating_point():
                sums[name] += tensor
            else:
                sums[name] = tensor.double() if tensor.is_floating_point() else tensor
    if not count:
        raise ValueError("expected at least one model to average, not none")
    return {
        name: (total / count).to(dtypes[name]) if dtypes[name].is_floating_point else total
        for name, total in sums.items()
    }
