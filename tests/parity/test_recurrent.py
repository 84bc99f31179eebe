"""Recurrent layers and their attention against torch's modules and loops straight from the formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from weft.kernels.mask import Mask
from weft.layers.cells import CellName, RecurrentState
from weft.layers.recurrent import RecurrentDecoder, RecurrentEncoder
from weft.layers.scores import AdditiveAttention, BilinearScore, ScoreAttention

MODULES: dict[str, type[nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
STEPS: dict[str, type[nn.RNNCellBase]] = {"rnn": nn.RNNCell, "gru": nn.GRUCell, "lstm": nn.LSTMCell}
CELLS: list[CellName] = ["rnn", "gru", "lstm"]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def copy_layers(theirs: nn.RNNBase, ours: RecurrentEncoder | RecurrentDecoder) -> None:
    """Put the weights of torch's deep module into our layers, one by one."""
    for i, layer in enumerate(ours.layers):
        own = dict(layer.named_parameters())
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if f"_l{i}" in name:
                    own.pop(f"rnn.{name.replace(f'_l{i}', '_l0')}").copy_(parameter)
        assert not own


def flat(state: RecurrentState, directions: int) -> tuple[Tensor, ...]:
    """The state as torch gives it: [layers · directions, B, D], for an LSTM twice."""
    parts = [state.hidden] + ([state.cell] if state.cell else [])
    return tuple(torch.stack([half for layer in part for half in layer.chunk(directions, -1)]) for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_encoder_is_torch(cell: CellName, bidirectional: bool, num_layers: int, dtype: torch.dtype) -> None:
    theirs = MODULES[cell](5, 6, num_layers, batch_first=True, bidirectional=bidirectional).to(dtype)
    ours = RecurrentEncoder(cell, 5, 6, num_layers, bidirectional).to(dtype)
    copy_layers(theirs, ours)
    x = torch.randn(4, 7, 5, dtype=dtype)
    lengths = torch.tensor([3, 7, 1, 5])
    directions = 2 if bidirectional else 1
    first = [torch.randn(num_layers * directions, 4, 6, dtype=dtype) for _ in range(2 if cell == "lstm" else 1)]
    joined = [tuple(torch.cat(tuple(layer), -1) for layer in part.split(directions)) for part in first]
    close = {"rtol": 0, "atol": TOLERANCE[dtype]}

    expected, last = theirs(x)
    outputs, state = ours(x)
    torch.testing.assert_close(outputs, expected, **close)
    torch.testing.assert_close(flat(state, directions), last if cell == "lstm" else (last,), **close)

    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    expected, last = theirs(packed, tuple(first) if cell == "lstm" else first[0])
    expected, _ = pad_packed_sequence(expected, batch_first=True, total_length=7)
    outputs, state = ours(x, lengths, RecurrentState(*joined))
    torch.testing.assert_close(outputs, expected, **close)
    torch.testing.assert_close(flat(state, directions), last if cell == "lstm" else (last,), **close)


@pytest.mark.parametrize("cell", CELLS)
def test_encoder_gradients_are_torch(cell: CellName) -> None:
    theirs = MODULES[cell](3, 4, 2, batch_first=True, bidirectional=True).double()
    ours = RecurrentEncoder(cell, 3, 4, 2, bidirectional=True).double()
    copy_layers(theirs, ours)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(theirs(x)[0].square().sum(), x)
    (gradient,) = torch.autograd.grad(ours(x)[0].square().sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cell", CELLS)
def test_decoder_without_attention_is_torch(cell: CellName, dtype: torch.dtype) -> None:
    theirs = MODULES[cell](5, 6, 2, batch_first=True).to(dtype)
    ours = RecurrentDecoder(cell, 5, 6, 2).to(dtype)
    copy_layers(theirs, ours)
    first = [torch.randn(2, 3, 6, dtype=dtype) for _ in range(2 if cell == "lstm" else 1)]
    x = torch.randn(3, 4, 5, dtype=dtype)
    expected, last = theirs(x, tuple(first) if cell == "lstm" else first[0])
    hidden, state = ours(x, state=RecurrentState(*(tuple(part) for part in first)))
    torch.testing.assert_close(hidden, expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(flat(state, 1), last if cell == "lstm" else (last,), rtol=0, atol=TOLERANCE[dtype])


def additive_row(attention: AdditiveAttention, query: Tensor, memory: Tensor) -> tuple[Tensor, list[float]]:
    """The context of one query[Q] over memory[M, K] and the weights, number by number."""
    wq, wk, b, v = (
        p.tolist()
        for p in (
            attention.score.query.weight,
            attention.score.key.weight,
            attention.score.key.bias,
            attention.score.energy.weight[0],
        )
    )
    q = query.tolist()
    scores = []
    for k in memory.tolist():
        inner = [
            math.tanh(
                sum(w * y for w, y in zip(wq[d], q, strict=True))
                + sum(map(math.prod, zip(wk[d], k, strict=True)))
                + b[d]
            )
            for d in range(len(b))
        ]
        scores.append(sum(map(math.prod, zip(v, inner, strict=True))))
    parts = [math.exp(score) for score in scores]
    weights = [part / sum(parts) for part in parts]
    context = sum(w * row for w, row in zip(weights, memory, strict=True))
    assert isinstance(context, Tensor)
    return context, weights


def test_additive_attention_is_the_formula() -> None:
    attention = AdditiveAttention(3, 4, 5).double()
    query, memory = torch.randn(2, 6, 3, dtype=torch.float64), torch.randn(2, 7, 4, dtype=torch.float64)
    lengths = [7, 4]
    context = attention(query, memory, mask=Mask(lengths=torch.tensor(lengths)))
    weights = attention.weights(query, attention.score.project(memory), Mask(lengths=torch.tensor(lengths)))
    for b, length in enumerate(lengths):
        for n in range(6):
            expected, shares = additive_row(attention, query[b, n], memory[b, :length])
            torch.testing.assert_close(context[b, n], expected, rtol=0, atol=1e-12)
            torch.testing.assert_close(weights[b, 0, n].tolist(), shares + [0.0] * (7 - length), rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
def test_decoder_with_attention_is_a_loop_of_cells(cell: CellName, num_layers: int) -> None:
    attention = AdditiveAttention(6, 4, 5)
    ours = RecurrentDecoder(cell, 3, 6, num_layers, attention, memory_dim=4).double()
    steps = [STEPS[cell](7 if i == 0 else 6, 6).double() for i in range(num_layers)]
    for step, layer in zip(steps, ours.layers, strict=True):
        step.load_state_dict({k.removeprefix("rnn.").removesuffix("_l0"): v for k, v in layer.state_dict().items()})
    x, memory = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 7, 4, dtype=torch.float64)
    lengths = [7, 3]
    first = [[torch.randn(2, 6, dtype=torch.float64) for _ in steps] for _ in range(2 if cell == "lstm" else 1)]
    hidden, state = ours(
        x, memory, Mask(lengths=torch.tensor(lengths)), RecurrentState(*(tuple(part) for part in first))
    )

    now: list[Tensor | tuple[Tensor, Tensor]] = [
        pair if cell == "lstm" else pair[0] for pair in zip(*first, strict=True)
    ]
    for t in range(5):
        top = now[-1][0] if cell == "lstm" else now[-1]
        context = torch.stack([additive_row(attention, top[b], memory[b, :n])[0] for b, n in enumerate(lengths)])
        below = torch.cat([x[:, t], context], -1)
        for i, step in enumerate(steps):
            now[i] = step(below, now[i])
            below = now[i][0] if cell == "lstm" else now[i]
        torch.testing.assert_close(hidden[:, t], torch.cat([below, context], -1), rtol=0, atol=1e-10)
    last = zip(*now, strict=True) if cell == "lstm" else [now]
    torch.testing.assert_close(flat(state, 1), tuple(torch.stack(part) for part in last), rtol=0, atol=1e-10)


def test_decoder_attends_with_any_score() -> None:
    score = BilinearScore(6, 4)
    ours = RecurrentDecoder("gru", 3, 6, 1, ScoreAttention(score), memory_dim=4).double()
    step = nn.GRUCell(7, 6).double()
    step.load_state_dict(
        {k.removeprefix("rnn.").removesuffix("_l0"): v for k, v in ours.layers[0].state_dict().items()}
    )
    x, memory = torch.randn(2, 4, 3, dtype=torch.float64), torch.randn(2, 5, 4, dtype=torch.float64)
    hidden, _ = ours(x, memory)
    s = torch.zeros(2, 6, dtype=torch.float64)
    for t in range(4):
        weights = torch.einsum("bq,qk,bmk->bm", s, score.key.weight, memory).softmax(-1)
        context = torch.einsum("bm,bmk->bk", weights, memory)
        s = step(torch.cat([x[:, t], context], -1), s)
        torch.testing.assert_close(hidden[:, t], torch.cat([s, context], -1), rtol=0, atol=1e-10)
