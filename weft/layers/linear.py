"""The linear layer every block uses: fp32 parameters, products in the activations' dtype."""

from __future__ import annotations

from typing import TypeGuard, TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from weft.kernels.linear import can_join, joined, linear

Module = TypeVar("Module", bound=nn.Module)


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


def together(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """What each of these layers makes of x: by one product where that is faster, and they are plain linear layers."""
    plain = [layer for layer in layers if is_bare(layer, Linear)]
    parameters = [layer.weight for layer in plain], [layer.bias for layer in plain]
    if len(plain) == len(layers) and can_join(x, *parameters):
        return joined(x, *parameters)
    return tuple(layer(x) for layer in layers)


def is_bare(module: nn.Module, kind: type[Module]) -> TypeGuard[Module]:
    """Whether it is of this kind and no other, and nobody has hooks in it: then what it does may be done without it."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    own = "forward" in module.__dict__  # put there by hand
    return type(module) is kind and not (hooks or own or _has_any_global_hook())


def parameters_of(*layers: nn.Module) -> list[tuple[Tensor, Tensor | None]]:
    """Weight and bias of each of these layers; nothing if one of them is more than a linear layer."""
    plain = [layer for layer in layers if is_bare(layer, Linear) and layer.weight_scale is None]
    return [(layer.weight, layer.bias) for layer in plain] if len(plain) == len(layers) else []
