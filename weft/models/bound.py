"""A Transformer for searches that are not compiled: its parameters at hand (see layers/bound.py).

The output layer is most of a small model's step. For few rows torch multiplies a matrix that stands [D, V] in memory up
to twice as fast as one that stands [V, D] (docs/performance.md), so a copy is kept that does. It is made again
whenever the parameter was changed or replaced: torch counts changes, and for those that it does not count (fused
optimisers, ``.data``) some of the numbers are looked at.
"""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from weft import observe
from weft.kernels.plain import is_plain
from weft.kernels.steady import is_steady
from weft.layers.bound import Bound, can_be_bound, norm
from weft.models.contract import Seq2Seq, Steps
from weft.models.state import DecoderState
from weft.models.transformer import Transformer

_ADDED = ("sinusoidal", "learned", "order", "none")  # positions that are a table, or nothing
_PLACES = 32  # of the table, at first
_FEW = 16  # rows for which the copy is worth its memory
_SAMPLE = 1024  # numbers that are looked at

_copies: WeakKeyDictionary[Transformer, tuple[object, Tensor]] = WeakKeyDictionary()


def bound(model: Seq2Seq) -> Steps:
    """What a search calls in the place of this model, which is in eval mode; the model itself if nothing is gained."""
    if type(model) is not Transformer or observe.listening() or is_plain() or is_steady():
        return model
    wide = model.precision == model._output.dtype == torch.float32
    known = wide and model.config.positions in _ADDED
    return BoundTransformer(model) if known and all(map(can_be_bound, model.decoder)) else model


class BoundTransformer:
    """A Transformer as a search sees it: steps of one token a row by bound blocks, everything else by the model."""

    def __init__(self, model: Transformer) -> None:
        """Look up its parameters; see ``bound``."""
        self._model, self._blocks = model, [Bound(block) for block in model._decoder_blocks]
        self._norm, self._scale = norm(model.decoder_norm), model.scale
        assert model.target_embedding is not None
        self._embed = partial(F.embedding, weight=model.target_embedding)
        self._table: Tensor | None = None  # of what is added at each place
        self._columns: Tensor | None = None  # the output layer's weight [D, V]
        self.specials, self.cross_attentions, self.max_len = model.specials, model.cross_attentions, model.max_len
        self.start, self.first, self.room = model.start, model.first, model.room

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Consume tokens [B, T], T ≥ 1: hidden [B, T, D] and the state after them."""
        source, size = state.source, state.size
        if tokens.shape[1] > 1 or not size.alike or not state.mask.shows(source[0].shape[2]):
            return self._model.step(tokens, state)
        x, place = self._embed(tokens) * self._scale, self._place(size.longest)
        x = x if place is None else x + place
        caches = []
        for block, cache, keys, values in zip(self._blocks, state.caches, source[::2], source[1::2], strict=True):
            x, cache = block(x, cache, (keys, values))
            caches.append(cache)
        return self._norm(x), state.with_caches(caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token [..., V] of hidden [..., D]."""
        if hidden.dim() != 2 or hidden.shape[0] > _FEW or hidden.device.type != "cpu":
            return self._model.logits(hidden)
        if self._columns is None:
            self._columns = _columns(self._model)
        bias = self._model.output_bias
        return hidden @ self._columns if bias is None else torch.addmm(bias, hidden, self._columns)

    def _place(self, number: int) -> Tensor | None:
        """What is added [D] to an embedding at a place."""
        positions = self._model.target_positions
        if positions.scheme is None:
            return None
        if self._table is None or number >= len(self._table):
            count = max(_PLACES, 2 * number)
            self._table = positions.table(count if self.max_len is None else max(min(count, self.max_len), number + 1))
        return self._table[number]


def _columns(model: Transformer) -> Tensor:
    """The weight [D, V] of a model's output layer, as it is now."""
    weight = model._output.detach()
    sample = weight.flatten()[:: max(weight.numel() // _SAMPLE, 1)].tolist()
    found = weight.data_ptr(), weight._version, weight.shape, sample
    copy = _copies.get(model)
    if copy is None or copy[0] != found:
        copy = _copies[model] = found, weight.t().contiguous()
    return copy[1]
