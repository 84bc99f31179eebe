"""Models: one file a family, read top to bottom; thin over layers. They know tensors, no text."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.config import GPTConfig, ModelConfig
from weft.models.convolutional import Convolutional
from weft.models.gpt import GPT
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer

FAMILIES: dict[str, type[Any]] = {
    "transformer": Transformer,
    "recurrent": Recurrent,
    "convolutional": Convolutional,
    "gpt": GPT,
}


def build(config: ModelConfig, source_vocab: int, target_vocab: int) -> nn.Module:
    """The model of this configuration for vocabularies of these sizes; a language model has the target's alone.

    Its parameters follow from torch's seed. Under ``torch.device("meta")`` they take no memory.

    Raises:
        ValueError: if sizes do not fit each other.
    """
    sizes = (target_vocab,) if isinstance(config, GPTConfig) else (source_vocab, target_vocab)
    model: nn.Module = FAMILIES[config.family](config, *sizes)
    return model


def outline(config: ModelConfig, source_vocab: int, target_vocab: int) -> nn.Module:
    """The same model without memory: names and shapes, to be filled by ``load_state_dict(…, assign=True)``."""
    with torch.device("meta"), _Undrawn():
        return build(config, source_vocab, target_vocab)


class _Undrawn(TorchFunctionMode):
    """Inside, no tensor is filled with random numbers: they would be overwritten.

    Also, the first ``normal_`` of a tensor without memory has torch import its compiler, which takes seconds.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in ("normal_", "uniform_"):  # torch.nn.init's and the tensors' own
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)
