"""Models: one file a family, read top to bottom; thin over layers. They know tensors, no text."""

from __future__ import annotations

from typing import Any

from torch import nn

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
