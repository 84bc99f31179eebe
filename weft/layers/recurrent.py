"""Recurrence: h_t = f(x_t, h_{t−1}), as an encoder, as a decoder, and as a decoder that attends.

The sequences run one layer at a time (see cells.py). Only the decoder with attention has to go step by step through all
layers: each context needs the state before. Inputs in bf16 are multiplied in bf16; states, contexts and what comes out
are in the parameters' precision all the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from weft import observe
from weft.kernels.dropout import dropout as drop
from weft.kernels.loops import repeated
from weft.kernels.mask import Mask, check_mask
from weft.layers.cells import CellName, Gates, LayerState, RecurrentLayer, RecurrentState
from weft.layers.gates import real_positions
from weft.layers.linear import Linear
from weft.layers.scores import Look, ScoreAttention


class _Stack(nn.Module):
    """Recurrent layers, each over the outputs of the one below."""

    def __init__(
        self,
        cell: CellName,
        input_dim: int,
        dim: int,
        num_layers: int,
        bidirectional: bool,
        dropout: float,
        context_dim: int = 0,
    ) -> None:
        super().__init__()
        if num_layers < 1:
            raise ValueError(f"num_layers must be ≥ 1, not {num_layers}")
        self.input_dim = input_dim
        self.context_dim = context_dim
        self.output_dim = (2 * dim if bidirectional else dim) + context_dim
        self.dropout = dropout
        widths = [input_dim + context_dim] + [self.output_dim - context_dim] * (num_layers - 1)
        self.layers = nn.ModuleList(RecurrentLayer(cell, width, dim, bidirectional) for width in widths)

    def _begin(self, x: Tensor, state: RecurrentState | None) -> list[LayerState]:
        """Where each layer starts, after a look at the shapes of x[B, N ≥ 1, input_dim] and the state."""
        if x.dim() != 3 or x.shape[1] < 1 or x.shape[2] != self.input_dim:
            raise ValueError(f"expected x [B, N ≥ 1, {self.input_dim}], not {list(x.shape)}")
        zeros = RecurrentState.of(layer.start(x) for layer in self._layers)
        if state is None:
            return zeros.layers
        for name in ("hidden", "cell"):
            given, expected = ([list(t.shape) for t in getattr(s, name)] for s in (state, zeros))
            if given != expected:
                raise ValueError(f"expected the {name} of the state to be {expected}, not {given}")
        return state.layers

    def _run(self, x: Tensor, lengths: Tensor | None, states: list[LayerState]) -> tuple[Tensor, RecurrentState]:
        """All positions of one layer, then of the next."""
        dtype = x.dtype
        for i, layer in enumerate(self._layers):
            x, states[i] = layer(x if i == 0 else self._between(x).to(dtype), lengths, states[i])
        return x, RecurrentState.of(states)

    def _between(self, x: Tensor) -> Tensor:
        return drop(x, self.dropout, self.training)

    @property
    def _layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]


class RecurrentEncoder(_Stack):
    """A stack of recurrent layers over a sequence of any length.

    Example:
        >>> encoder = RecurrentEncoder("lstm", input_dim=8, dim=16, bidirectional=True)
        >>> outputs, state = encoder(torch.randn(2, 5, 8), lengths=torch.tensor([5, 3]))
        >>> outputs.shape
        torch.Size([2, 5, 32])
    """

    def __init__(
        self,
        cell: CellName,
        input_dim: int,
        dim: int,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
    ) -> None:
        """Make the layers.

        Args:
            cell: "rnn", "gru" or "lstm".
            input_dim: width of the input.
            dim: width of the state in each direction.
            num_layers: how many layers.
            bidirectional: whether each layer also runs from the end to the start.
            dropout: probability that an input of a layer above the first is dropped in training.

        Raises:
            ValueError: if the cell has another name, or there is no layer.
        """
        super().__init__(cell, input_dim, dim, num_layers, bidirectional, dropout)

    def forward(
        self, x: Tensor, lengths: Tensor | None = None, state: RecurrentState | None = None
    ) -> tuple[Tensor, RecurrentState]:
        """Read the sequences.

        Args:
            x: [B, N, input_dim], right-padded.
            lengths: [B] how many positions are real in each row, at least 1; all if None.
            state: where to start; zeros if None.

        Returns:
            The top layer's outputs [B, N, output_dim], zero at padding, and the state after the
            last real position (of the backward direction: after the first).

        Raises:
            ValueError: if a shape does not fit, or a row is empty.
        """
        states = self._begin(x, state)
        if lengths is not None:
            real_positions(x, lengths)
            if int(lengths.min()) < 1:
                raise ValueError(f"lengths must be ≥ 1, not {lengths.tolist()}: there is no state after nothing")
        return self._run(x, lengths, states)


class Bridge(nn.Module):
    """How the encoder's last state becomes the decoder's first, when their shapes differ.

        hidden = tanh(W h + b) (Bahdanau et al. 2015),    cell = W' c + b' (an LSTM's cell has no bounds)

    The decoder's top layer starts from the encoder's top layer, and so on down; where the encoder
    has fewer layers, its lowest serves several times.
    """

    def __init__(self, cell: CellName, encoder_dim: int, dim: int, num_layers: int = 1) -> None:
        """Make one linear layer for each layer of the decoder, two for an LSTM.

        Args:
            cell: the kind of both, "rnn", "gru" or "lstm".
            encoder_dim: width of the encoder's state, both directions together.
            dim: width of the decoder's state.
            num_layers: layers of the decoder.
        """
        super().__init__()
        self.hidden = nn.ModuleList(Linear(encoder_dim, dim) for _ in range(num_layers))
        self.cell = nn.ModuleList(Linear(encoder_dim, dim) for _ in range(num_layers if cell == "lstm" else 0))

    def forward(self, state: RecurrentState) -> RecurrentState:
        """The decoder's first state from the encoder's last.

        Raises:
            ValueError: if the state has cells and the bridge is for a kind without, or the reverse.
        """
        if bool(state.cell) != bool(self.cell):
            kinds = ["without cells (rnn, gru)", "with cells (lstm)"]
            raise ValueError(f"the bridge is for a state {kinds[bool(self.cell)]}, not one {kinds[bool(state.cell)]}")
        depth = len(state.hidden) - len(self.hidden)
        below = [max(0, depth + i) for i in range(len(self.hidden))]
        return RecurrentState(
            tuple(layer(state.hidden[i]).tanh() for layer, i in zip(self.hidden, below, strict=True)),
            tuple(layer(state.cell[i]) for layer, i in zip(self.cell, below[: len(self.cell)], strict=True)),
        )


class RecurrentDecoder(_Stack):
    """A recurrent decoder, with attention or without; teacher forcing and stepping are one call.

    With attention (Bahdanau et al. 2015), at each position t:

        c_t = attention(query s_{t−1}, memory),    s_t = f([x_t; c_t], s_{t−1}),    output [s_t; c_t]

    where the query is the top layer's state and the first layer eats the context. Without it
    (Sutskever et al. 2014) the decoder knows the source by the state alone that it starts from, and
    the output is s_t. The weights [B, 1, T, M] and each layer's gates are recorded, once a call.

    Example:
        >>> decoder = RecurrentDecoder("gru", 8, 16, attention=AdditiveAttention(16, 32, 16), memory_dim=32)
        >>> hidden, state = decoder(torch.randn(2, 3, 8), torch.randn(2, 5, 32))
        >>> hidden.shape
        torch.Size([2, 3, 48])
    """

    def __init__(
        self,
        cell: CellName,
        input_dim: int,
        dim: int,
        num_layers: int = 1,
        attention: ScoreAttention | None = None,
        memory_dim: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        """Make the layers.

        Args:
            cell: "rnn", "gru" or "lstm".
            input_dim: width of the input.
            dim: width of the state, and so of the attention's query.
            num_layers: how many layers.
            attention: how to look at the memory; None not to.
            memory_dim: width of the memory, and so of the context; needed with attention.
            dropout: probability that an input of a layer above the first is dropped in training.

        Raises:
            ValueError: if the cell has another name, there is no layer, or memory_dim is missing.
        """
        if attention is not None and memory_dim is None:
            raise ValueError("a decoder with attention needs memory_dim, the width of what it attends to")
        context_dim = 0 if attention is None or memory_dim is None else memory_dim
        super().__init__(cell, input_dim, dim, num_layers, False, dropout, context_dim)
        self.attention = attention

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Mask | None = None,
        state: RecurrentState | None = None,
        projected: Tensor | None = None,
    ) -> tuple[Tensor, RecurrentState]:
        """Go on by T ≥ 1 positions.

        Args:
            x: [B, T, input_dim] the inputs, such as the embeddings of the tokens before.
            memory: [B, M, memory_dim] what to attend to. Not looked at without attention.
            mask: which of the M memories each of the T positions may attend to; all if None.
            state: where to start; zeros if None.
            projected: ``attention.score.project(memory)``, if it is already there: a search that
                comes once a token computes it once.

        Returns:
            The outputs [B, T, output_dim] and the state after the last.

        Raises:
            ValueError: if a shape does not fit, or the memory is missing.
        """
        states = self._begin(x, state)
        look = self._look(x, memory, mask, projected)
        if look is None:
            return self._run(x, None, states)
        outputs, path = self._walk(x, look, states)
        return outputs, path[-1]

    def step(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Mask | None = None,
        state: RecurrentState | None = None,
        projected: Tensor | None = None,
    ) -> tuple[Tensor, list[RecurrentState]]:
        """As ``forward``, with the state after each of the T positions, for whoever may want to go back to it."""
        return self._walk(x, self._look(x, memory, mask, projected), self._begin(x, state))

    def _look(self, x: Tensor, memory: Tensor | None, mask: Mask | None, projected: Tensor | None) -> _Look | None:
        """What the positions of x attend to; None without attention."""
        if self.attention is None:
            return None
        if memory is None or memory.dim() != 3 or memory.shape[::2] != (x.shape[0], self.context_dim):
            given = None if memory is None else list(memory.shape)
            raise ValueError(f"expected a memory [{x.shape[0]}, M, {self.context_dim}] to attend to, not {given}")
        check_mask(mask, x.shape[0], 1, x.shape[1], memory.shape[1])
        projected = self.attention.score.project(memory) if projected is None else projected
        return _Look(self.attention, memory, projected, mask)

    def _walk(self, x: Tensor, look: _Look | None, states: list[LayerState]) -> tuple[Tensor, list[RecurrentState]]:
        """All layers at one position, then at the next."""
        layers = self._layers
        of_context = repeated(layers[0].parameter("weight_ih")[:, self.input_dim :], None, x.dtype)
        of_state = [layer.of_state(x.dtype) for layer in layers]
        looks = [] if look is None else look.steps(x.shape[1])
        listening = observe.listening()
        seen: list[list[Gates]] = [[] for _ in layers]
        queries, contexts, path = [], [], []
        for t, wx in enumerate(layers[0].product(x).unbind(1)):
            if looks:
                queries.append(states[-1][0])
                contexts.append(looks[t](queries[-1]))
                wx = wx + of_context(contexts[-1])
            for i, layer in enumerate(layers):
                if i > 0:
                    wx = layer.product(self._between(states[i - 1][0]).to(x.dtype))
                gates = layer.formula.gates(wx, of_state[i](states[i][0]))
                states[i] = layer.formula.update(gates, *states[i])
                if listening:
                    seen[i].append(gates)
            path.append(RecurrentState.of(states))
        outputs = torch.stack([state.hidden[-1] for state in path], 1)
        if look is not None:
            look.show(queries)
            outputs = torch.cat((outputs, torch.stack(contexts, 1)), -1)
        for layer, steps in zip(layers, seen, strict=True):
            layer.show(steps)
        return outputs, path


class _Look(NamedTuple):
    """What a decoder attends to on its walk."""

    attention: ScoreAttention
    memory: Tensor  # [B, M, memory_dim]
    projected: Tensor  # what of the score needs the memory alone
    mask: Mask | None

    def steps(self, n: int) -> list[Look]:
        """How each of n positions alone looks at the memory."""
        if self.mask is None or (self.mask.pattern is None and not self.mask.positional):
            return self.attention.looks(self.projected, self.memory, [self.mask] * n)  # padding is the same at each
        dense = self.mask.dense(n, self.memory.shape[1], self.memory.device)
        return self.attention.looks(self.projected, self.memory, [Mask(pattern=row) for row in dense.split(1, 2)])

    def show(self, queries: list[Tensor]) -> None:
        """Show the weights of all positions at once."""
        observe.see(
            self.attention,
            "weights",
            lambda: {"weights": self.attention.weights(torch.stack(queries, 1), self.projected, self.mask)},
        )
