"""The cells of recurrence: RNN, GRU and LSTM as formulas, their state, and one layer that shows its gates.

A layer runs torch's own module, or its formula position by position: in steady mode, since the bits of torch's module
depend on who else is in the batch; in training on padded rows, where the module's backward pass fills and adds a
gradient of all positions at each of them; and for inputs in bf16. These are multiplied in bf16, and so are the states,
which stay in the parameters' precision: an error in a state is handed on from position to position.

All gates follow from the inputs and the states, so whoever listens gets them computed beside the run, for all positions
at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from weft import observe
from weft.kernels.linear import linear
from weft.kernels.loops import repeated
from weft.kernels.steady import is_steady, sigmoid
from weft.layers.gates import real_positions

CellName = Literal["rnn", "gru", "lstm"]
Gates = dict[str, Tensor]
LayerState = tuple[Tensor, Tensor | None]  # hidden [B, D] and, of an LSTM, cell [B, D]


class Formula(NamedTuple):
    """One kind of recurrence: torch's module, its gates, and the state that they make.

    The gates come from the products with the input, wx = W x_t + b, and with the state before,
    uh = U h_{t−1} + b', each [..., gates · D] in torch's order. The cell state has no part in them.
    """

    module: Callable[..., nn.RNNBase]
    gates: Callable[[Tensor, Tensor], Gates]
    update: Callable[[Gates, Tensor, Tensor | None], LayerState]


def _rnn_gates(wx: Tensor, uh: Tensor) -> Gates:
    return {"state": (wx + uh).tanh()}


def _rnn_update(gates: Gates, hidden: Tensor, cell: Tensor | None) -> LayerState:
    return gates["state"], None


def _gru_gates(wx: Tensor, uh: Tensor) -> Gates:
    xr, xz, xn = wx.chunk(3, -1)
    hr, hz, hn = uh.chunk(3, -1)
    reset = sigmoid(xr + hr)
    return {"reset": reset, "update": sigmoid(xz + hz), "candidate": (xn + reset * hn).tanh()}


def _gru_update(gates: Gates, hidden: Tensor, cell: Tensor | None) -> LayerState:
    return torch.lerp(gates["candidate"], hidden, gates["update"]), None


def _lstm_gates(wx: Tensor, uh: Tensor) -> Gates:
    i, f, g, o = (wx + uh).chunk(4, -1)
    return {"input": sigmoid(i), "forget": sigmoid(f), "candidate": g.tanh(), "output": sigmoid(o)}


def _lstm_update(gates: Gates, hidden: Tensor, cell: Tensor | None) -> LayerState:
    assert cell is not None
    cell = gates["forget"] * cell + gates["input"] * gates["candidate"]
    return gates["output"] * cell.tanh(), cell


# h' = tanh(·) (Elman 1990); h' = (1 − z) n + z h (Cho et al. 2014); c' = f c + i g, h' = o tanh c'
# (Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000).
CELLS: dict[str, Formula] = {
    "rnn": Formula(nn.RNN, _rnn_gates, _rnn_update),
    "gru": Formula(nn.GRU, _gru_gates, _gru_update),
    "lstm": Formula(nn.LSTM, _lstm_gates, _lstm_update),
}


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """What a stack of recurrent layers hands from one position to the next.

    Attributes:
        hidden: per layer [B, D]; of a bidirectional layer [B, 2·D], forward first.
        cell: the same for an LSTM's cells, empty for the other kinds.
    """

    hidden: tuple[Tensor, ...]
    cell: tuple[Tensor, ...] = ()

    @staticmethod
    def of(layers: Iterable[LayerState]) -> RecurrentState:
        """The state of a stack from the states of its layers."""
        hidden, cell = zip(*layers, strict=True)
        return RecurrentState(hidden, tuple(c for c in cell if c is not None))

    @property
    def layers(self) -> list[LayerState]:
        """The state of each layer."""
        return list(zip(self.hidden, self.cell or (None,) * len(self.hidden), strict=True))

    def select(self, rows: Tensor) -> RecurrentState:
        """The state of the given rows [R] of the batch, in that order, repeats allowed."""
        return RecurrentState(*(tuple(t.index_select(0, rows) for t in part) for part in (self.hidden, self.cell)))

    @staticmethod
    def cat(states: Sequence[RecurrentState]) -> RecurrentState:
        """The states of several batches as the state of one."""
        hidden = zip(*(state.hidden for state in states), strict=True)
        cell = zip(*(state.cell for state in states), strict=True)
        return RecurrentState(tuple(map(torch.cat, hidden)), tuple(map(torch.cat, cell)))


class RecurrentLayer(nn.Module):
    """One recurrent layer, in one direction or two, that shows its gates.

    Recorded, per direction and gate, as [B, N, dim] (zero at padding): "forward.input",
    "backward.forget", … LSTM: input, forget, candidate, output. GRU: reset, update, candidate.
    RNN, which has no gates: state.
    """

    def __init__(self, cell: CellName, input_dim: int, dim: int, bidirectional: bool = False) -> None:
        super().__init__()
        if cell not in CELLS:
            raise ValueError(f"cell must be one of {', '.join(CELLS)}, not {cell!r}")
        self.formula = CELLS[cell]
        self.has_cell = cell == "lstm"
        self.directions = 2 if bidirectional else 1
        self.rnn = self.formula.module(input_dim, dim, batch_first=True, bidirectional=bidirectional)

    def initialise(self) -> None:
        """Start over: matrices on the state orthogonal and on the input Glorot-uniform, gate by gate; biases at 0.

        But an LSTM's forget gate starts at 1, open (Jozefowicz et al. 2015).
        """
        for name, parameter in self.rnn.named_parameters():
            gates = parameter.detach().split(self.rnn.hidden_size)
            for gate in gates:
                if name.startswith("bias"):
                    nn.init.zeros_(gate)
                elif name.startswith("weight_hh"):
                    nn.init.orthogonal_(gate)
                else:
                    nn.init.xavier_uniform_(gate)
            if self.has_cell and name.startswith("bias_ih"):
                nn.init.ones_(gates[1])

    def start(self, like: Tensor) -> LayerState:
        """A state of zeros for the batch and device of ``like``[B, …], in the parameters' precision."""
        zeros = like.new_zeros(like.shape[0], self.directions * self.rnn.hidden_size, dtype=self._wide)
        return zeros, zeros if self.has_cell else None

    def forward(self, x: Tensor, lengths: Tensor | None, state: LayerState) -> tuple[Tensor, LayerState]:
        """Run over x[B, N, input_dim], of which lengths[B] are real: outputs[B, N, D], the last state."""
        learning = lengths is not None and torch.is_grad_enabled()
        by_formula = is_steady() or learning or x.dtype != self._wide
        outputs, last = (self._by_formula if by_formula else self._by_torch)(x, lengths, state)
        observe.see(self, "gates", lambda: self._beside(x, lengths, state[0], outputs))
        return outputs, last

    def product(self, x: Tensor, suffix: str = "") -> Tensor:
        """W x + b for x[..., ≤ input_dim], which may be the first part of the input: [..., gates · dim]."""
        weight, bias = self.parameter("weight_ih", suffix)[:, : x.shape[-1]], self.parameter("bias_ih", suffix)
        return linear(x, weight, bias).to(self._wide)

    def of_state(self, dtype: torch.dtype, suffix: str = "") -> Callable[[Tensor], Tensor]:
        """U h + b' for hidden states [..., dim] of one step after the other, multiplied in a dtype."""
        return repeated(self.parameter("weight_hh", suffix), self.parameter("bias_hh", suffix), dtype)

    def parameter(self, name: str, suffix: str = "") -> Tensor:
        """A parameter by torch's name, weight_ih, bias_hh, …; the suffix "_reverse" for the backward direction."""
        found: Tensor = getattr(self.rnn, f"{name}_l0{suffix}")
        return found

    def show(self, steps: Sequence[Gates]) -> None:
        """Show the gates of a run that was made step by step."""
        observe.see(self, "gates", lambda: {f"forward.{k}": torch.stack([s[k] for s in steps], 1) for k in steps[0]})

    def _by_torch(self, x: Tensor, lengths: Tensor | None, state: LayerState) -> tuple[Tensor, LayerState]:
        packed = x if lengths is None else _pack(x, lengths)
        first = tuple(self._split(part) for part in state if part is not None)
        outputs, last = self.rnn(packed, first if self.has_cell else first[0])
        if lengths is not None:
            outputs = pad_packed_sequence(outputs, batch_first=True, total_length=x.shape[1])[0]
        hidden, cell = last if self.has_cell else (last, None)
        return outputs, (self._join(hidden), None if cell is None else self._join(cell))

    def _by_formula(self, x: Tensor, lengths: Tensor | None, state: LayerState) -> tuple[Tensor, LayerState]:
        """One position after the other; at padding, a row's state stays what it is."""
        longest = x.shape[1] if lengths is None else int(lengths.max())
        real = None if lengths is None else real_positions(x, lengths)
        outputs, ends = [], []
        for direction in range(self.directions):
            suffix, order = ("", range(longest)) if direction == 0 else ("_reverse", reversed(range(longest)))
            hidden, cell = (None if part is None else part.chunk(self.directions, -1)[direction] for part in state)
            assert hidden is not None
            wx, of_state = self.product(x[:, :longest], suffix).unbind(1), self.of_state(x.dtype, suffix)
            rows = [hidden] * longest
            for t in order:
                new, new_cell = self.formula.update(self.formula.gates(wx[t], of_state(hidden)), hidden, cell)
                hidden = new if real is None else torch.where(real[:, t], new, hidden)
                if cell is not None and new_cell is not None:
                    cell = new_cell if real is None else torch.where(real[:, t], new_cell, cell)
                rows[t] = hidden if real is None else hidden.masked_fill(~real[:, t], 0.0)
            outputs.append(F.pad(torch.stack(rows, 1), (0, 0, 0, x.shape[1] - longest)))
            ends.append((hidden, cell))
        last = RecurrentState.of(ends)
        return torch.cat(outputs, -1), (torch.cat(last.hidden, -1), torch.cat(last.cell, -1) if last.cell else None)

    def _beside(self, x: Tensor, lengths: Tensor | None, first: Tensor, outputs: Tensor) -> Gates:
        """The gates of every position, from the inputs and the states that the fast run made."""
        positions = torch.arange(x.shape[1], device=x.device)[:, None]  # [N, 1]
        ends = positions[-1:] if lengths is None else lengths.to(x.device)[:, None, None] - 1
        real = None if lengths is None else real_positions(x, lengths)
        ways = (("forward", "", 0, 1), ("backward", "_reverse", ends, -1))[: self.directions]
        parts = zip(ways, outputs.chunk(self.directions, -1), first.chunk(self.directions, -1), strict=True)
        seen = {}
        for (direction, suffix, start, shift), states, h0 in parts:
            before = torch.where(positions == start, h0[:, None], states.roll(shift, 1))  # [B, N, dim]
            gates = self.formula.gates(self.product(x, suffix), self.of_state(x.dtype, suffix)(before))
            for name, gate in gates.items():
                seen[f"{direction}.{name}"] = gate if real is None else gate.masked_fill(~real, 0.0)
        return seen

    @property
    def _wide(self) -> torch.dtype:
        return self.parameter("weight_hh").dtype

    def _split(self, part: Tensor) -> Tensor:
        """[B, directions · dim] -> torch's [directions, B, dim]."""
        return part.reshape(part.shape[0], self.directions, -1).transpose(0, 1).contiguous()

    def _join(self, part: Tensor) -> Tensor:
        """Torch's [directions, B, dim] -> [B, directions · dim]."""
        return part.transpose(0, 1).flatten(1)


def _pack(x: Tensor, lengths: Tensor) -> PackedSequence:
    return pack_padded_sequence(x, lengths.to("cpu", torch.int64), batch_first=True, enforce_sorted=False)
