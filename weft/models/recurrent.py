"""Recurrent translation, with attention (Bahdanau et al. 2015) or without (Sutskever et al. 2014; Cho et al. 2014).

    source ─ embedding ─▶ encoder ─▶ memory, one state a position ┐ attention, anew for each target token
                             └ last state ─ bridge ─▶ decoder ◀───┘ ─ readout ─▶ hidden ─▶ logits

Without attention all that the decoder knows of the source is its first state, however long the source was.

What differs from the papers:

- The first state is made from the last states of both directions of the encoder, not of the backward one alone, and
  through a linear layer also where the shapes would fit without.
- The readout is tanh(W [s; c] + b) of the state and the context (Luong et al. 2015), not a maxout layer.
- dot and scaled_dot need a memory as wide as the query. If it is not (two directions), one matrix maps the memory to
  that width first, for keys and values alike. To map the keys alone would be bilinear.
- Sources are not fed backwards; bidirectional = True serves that end.
- Under bf16 the states and the attention stay in fp32, since an error in a state is handed on from position to
  position; what is multiplied by the matrices of the cells, the readout and the output layer is rounded to bf16.

Recurrent matrices start orthogonal gate by gate, other matrices Glorot-uniform, biases at 0 but an LSTM's forget gate
at 1 (Jozefowicz et al. 2015), embeddings normal with variance 1 / embed_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft import observe
from weft.config import RecurrentConfig
from weft.kernels.dropout import dropout
from weft.kernels.mask import Mask
from weft.layers.cells import RecurrentLayer, RecurrentState
from weft.layers.linear import Linear
from weft.layers.recurrent import Bridge, RecurrentDecoder, RecurrentEncoder
from weft.layers.scores import SCORES, ScoreAttention
from weft.models.encoder_decoder import EncoderDecoder, read_source
from weft.models.state import DecoderState, last_entries, new_caches


class Recurrent(EncoderDecoder):
    """An encoder and a decoder of RNN, GRU or LSTM layers.

    Example:
        >>> model = Recurrent(RecurrentConfig(cell="lstm"), source_vocab=100, target_vocab=80)
        >>> hidden, state = model.step(torch.tensor([[1]]), model.start(torch.tensor([[7, 8, 9, 2]])))
        >>> model.logits(hidden).shape
        torch.Size([1, 1, 80])
    """

    def __init__(self, config: RecurrentConfig, source_vocab: int, target_vocab: int) -> None:
        """Make the model of this configuration for vocabularies of these sizes."""
        embed_dim, dim, cell = config.embed_dim, config.dim, config.cell
        super().__init__(source_vocab, target_vocab, embed_dim, config.tie, std=embed_dim**-0.5, bias=True)
        self.dropout = config.dropout
        self.encoder = RecurrentEncoder(
            cell, embed_dim, dim, config.encoder_layers, config.bidirectional, config.dropout
        )
        width = self.encoder.output_dim
        self.bridge = Bridge(cell, width, dim, config.decoder_layers)
        fits = width == dim or config.attention not in ("dot", "scaled_dot")
        self.memory = nn.Identity() if fits else Linear(width, dim, bias=False)
        memory_dim = width if fits else dim
        attention = None
        if config.attention != "none":
            attention = ScoreAttention(SCORES[config.attention](dim, memory_dim, dim))
            self.cross_attentions = ("decoder.attention",)
        self.decoder = RecurrentDecoder(
            cell, embed_dim, dim, config.decoder_layers, attention, memory_dim, config.dropout
        )
        self.readout = Linear(self.decoder.output_dim, embed_dim)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, RecurrentLayer):
                module.initialise()

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, Mask, RecurrentState]:
        """The memory [B, M, ·] of source tokens [B, N], its lengths [B] and mask, and the decoder's first state."""
        tokens, _, lengths, mask = read_source(source)
        x = self._drop(self._narrow(self._embed(tokens, target=False)))
        outputs, state = self.encoder(x, None if mask.open else lengths)
        memory: Tensor = self.memory(outputs)
        observe.see(self.encoder, "hidden", lambda: {"memory": memory})
        return memory, lengths, mask, self.bridge(state)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """What the output layer takes [B, T, embed_dim] after each token of target [B, T], all positions at once."""
        memory, _, mask, state = self.encode(source)
        x = self._drop(self._narrow(self._embed(target, target=True)))
        outputs, _ = self.decoder(x, memory, mask, state)
        return self._read(outputs)

    def start(self, inputs: Tensor) -> DecoderState:
        """The state before the first target token, from source tokens [B, N].

        It has the decoder's first hidden states and cells, the memory if there is attention, what the score makes of
        it, and a cache of the hidden states and cells after each target token.
        """
        memory, lengths, _, first = self.encode(inputs)
        hidden, cell = _stacked(first)
        source = [hidden, cell]
        if self.decoder.attention is not None:
            source += [memory, self.decoder.attention.score.project(memory)]
        return DecoderState.of(tuple(source), lengths, new_caches((hidden[:, :, None], cell[:, :, None])))

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Consume tokens [B, T], T ≥ 1: hidden [B, T, embed_dim] and the state after them."""
        hidden, cell, *memory = state.source
        (cache,) = state.caches
        begun = (cache.lengths > 0)[:, None, None]
        now = [
            torch.where(begun, entry[:, :, 0], first)
            for entry, first in zip(last_entries(cache, 1), (hidden, cell), strict=True)
        ]
        current = RecurrentState(now[0].unbind(1), now[1].unbind(1) if cell.shape[2] else ())
        x = self._drop(self._narrow(self._embed(tokens, target=True)))
        outputs, path = self.decoder.step(
            x, memory[0] if memory else None, state.mask, current, memory[1] if memory else None
        )
        hiddens, cells = zip(*map(_stacked, path), strict=True)
        return self._read(outputs), state.with_caches([cache.append(torch.stack(hiddens, 2), torch.stack(cells, 2))])

    def _read(self, outputs: Tensor) -> Tensor:
        hidden: Tensor = self.readout(self._narrow(outputs)).tanh()
        return self._shown(self._drop(hidden))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


def _stacked(state: RecurrentState) -> tuple[Tensor, Tensor]:
    """Hidden states and cells of all layers [B, L, D]; of kinds without cells, cells of no width."""
    hidden = torch.stack(state.hidden, 1)
    return hidden, torch.stack(state.cell, 1) if state.cell else hidden[:, :, :0]
