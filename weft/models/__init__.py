"""Models: one file a family, read top to bottom; thin over layers. They know tensors, no text."""

from __future__ import annotations

from typing import Any

from weft.config import ConvolutionalConfig, RecurrentConfig, TransformerConfig
from weft.models.convolutional import Convolutional
from weft.models.encoder_decoder import EncoderDecoder
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer

FAMILIES: dict[str, type[Any]] = {
    "transformer": Transformer,
    "recurrent": Recurrent,
    "convolutional": Convolutional,
}


def build(
    config: TransformerConfig | RecurrentConfig | ConvolutionalConfig, source_vocab: int, target_vocab: int
) -> EncoderDecoder:
    """The model of this configuration for vocabularies of these sizes.

    Its parameters follow from torch's seed. Under ``torch.device("meta")`` they take no memory.

    Raises:
        ValueError: if sizes do not fit each other.
    """
    model: EncoderDecoder = FAMILIES[config.family](config, source_vocab, target_vocab)
    return model
