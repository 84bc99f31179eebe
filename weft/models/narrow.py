"""Parameters in fewer bits: bf16, or int8 with a scale for each row (see kernels/linear.py).

A module that can have a matrix in int8 has a buffer beside it for the scales, ``weight_scale`` beside ``weight``, which
is None as long as there are none. The matrices of linear layers and the tables of embeddings can; norms, biases and all
else stay fp32, being few.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.kernels.linear import narrowed, widened

SCALE = "_scale"  # what the name of a matrix's scales ends with


def matrices(model: nn.Module) -> set[str]:
    """The names of the parameters that have a place for scales beside them."""
    return {
        f"{path}{'.' * bool(path)}{name.removesuffix(SCALE)}"
        for path, module in model.named_modules()
        for name in module._buffers
        if name.endswith(SCALE) and getattr(module, name.removesuffix(SCALE)) is not None
    }


def state(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state of a model with its matrices in fp32, bf16 or int8, whatever they are in now; bf16 is for all of it."""
    own, names, made = model.state_dict(), matrices(model), {}
    for name, tensor in own.items():
        if is_scale(name, names):
            continue
        wide = tensor.detach().cpu()
        if name in names and tensor.dtype in (torch.bfloat16, torch.int8):
            wide = widened(wide, own.get(name + SCALE))
        if dtype == torch.int8 and name in names:
            made[name], scale = narrowed(wide, dtype)
            assert scale is not None
            made[name + SCALE] = scale
        else:
            made[name] = wide.to(dtype) if dtype == torch.bfloat16 and wide.is_floating_point() else wide
    return {name: tensor.contiguous() for name, tensor in made.items()}


def fill(model: nn.Module, tensors: Mapping[str, Tensor], keep: bool) -> None:
    """Give a model without memory its parameters: matrices as they are stored if ``keep``, all else in fp32.

    Matrices of several types are widened all the same: compiled code joins those that belong together.
    """
    names, filled = matrices(model), {}
    keep = keep and len({tensors[name].dtype for name in names}) == 1
    for name, tensor in tensors.items():
        if is_scale(name, names) and not keep:
            continue
        if name in names and tensor.dtype in (torch.bfloat16, torch.int8):
            filled[name] = tensor if keep else widened(tensor, tensors.get(name + SCALE))
        else:
            filled[name] = tensor.float() if tensor.is_floating_point() else tensor
    if any(tensor.dtype == torch.int8 for tensor in filled.values()):
        model.requires_grad_(False)  # whole numbers have no gradient
    for name in filled.keys() - model.state_dict().keys():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, filled[name])
    model.load_state_dict(filled, assign=True)


def is_scale(name: str, names: set[str]) -> bool:
    """Whether a tensor of this name holds the scales of one of these matrices."""
    return name.endswith(SCALE) and name.removesuffix(SCALE) in names
