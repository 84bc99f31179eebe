"""Recurrence: gates, padding, state, stepping, what is recorded."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import weft
from weft.kernels.mask import Mask
from weft.kernels.steady import steady
from weft.layers.cells import CellName, RecurrentLayer, RecurrentState
from weft.layers.recurrent import Bridge, RecurrentDecoder, RecurrentEncoder
from weft.layers.scores import AdditiveAttention, DotScore, HardAttention, ScoreAttention

CELLS: list[CellName] = ["rnn", "gru", "lstm"]
GATES = {
    "rnn": {"state"},
    "gru": {"reset", "update", "candidate"},
    "lstm": {"input", "forget", "candidate", "output"},
}


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dot(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def loop(cell: str, rnn: nn.Module, suffix: str, xs: Tensor, h: Tensor, c: Tensor) -> list[dict[str, list[float]]]:
    """The gates at each step of xs[N, D], one number after the other, from the cell's formula."""
    wi, wh, bi, bh = (
        getattr(rnn, f"{name}_l0{suffix}").tolist() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    hidden, memory = h.tolist(), c.tolist()
    dim, steps = len(hidden), []
    for x in xs.tolist():
        a = [dot(w, x) + b for w, b in zip(wi, bi, strict=True)]
        u = [dot(w, hidden) + b for w, b in zip(wh, bh, strict=True)]
        part = [range(i, i + dim) for i in range(0, len(a), dim)]
        if cell == "rnn":
            gates = {"state": [math.tanh(a[i] + u[i]) for i in part[0]]}
            hidden = gates["state"]
        elif cell == "gru":
            r = [sigmoid(a[i] + u[i]) for i in part[0]]
            z = [sigmoid(a[i] + u[i]) for i in part[1]]
            n = [math.tanh(a[i] + r_ * u[i]) for i, r_ in zip(part[2], r, strict=True)]
            gates = {"reset": r, "update": z, "candidate": n}
            hidden = [(1 - z_) * n_ + z_ * h_ for z_, n_, h_ in zip(z, n, hidden, strict=True)]
        else:
            i_, f, o = ([sigmoid(a[i] + u[i]) for i in part[k]] for k in (0, 1, 3))
            g = [math.tanh(a[i] + u[i]) for i in part[2]]
            gates = {"input": i_, "forget": f, "candidate": g, "output": o}
            memory = [f[d] * memory[d] + i_[d] * g[d] for d in range(dim)]
            hidden = [o[d] * math.tanh(memory[d]) for d in range(dim)]
        steps.append(gates)
    return steps


def close(a: object, b: object, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def random_state(encoder: RecurrentEncoder | RecurrentDecoder, batch: int) -> RecurrentState:
    like = torch.zeros(batch, 1, dtype=torch.float64)
    return RecurrentState.of(
        tuple(None if part is None else torch.randn_like(part) for part in layer.start(like))  # type: ignore[misc]
        for layer in encoder.layers
    )


@pytest.mark.parametrize("start", ["zeros", "given"])
@pytest.mark.parametrize("cell", CELLS)
def test_recorded_gates_are_the_true_ones(cell: CellName, start: str) -> None:
    encoder = RecurrentEncoder(cell, 3, 4, num_layers=2, bidirectional=True).double()
    x, lengths = torch.randn(3, 5, 3, dtype=torch.float64), torch.tensor([5, 2, 3])
    state = random_state(encoder, 3) if start == "given" else RecurrentState.of(lay.start(x) for lay in encoder.layers)
    with weft.record(encoder) as seen:
        encoder(x, lengths, state)
    assert [(entry.name, entry.kind) for entry in seen] == [("layers.0", "gates"), ("layers.1", "gates")]
    below = x
    for i, layer in enumerate(encoder.layers):
        entry = seen[f"layers.{i}"]
        assert set(entry.values) == {f"{way}.{gate}" for way in ("forward", "backward") for gate in GATES[cell]}
        h0 = state.hidden[i].chunk(2, -1)
        c0 = (state.cell or state.hidden)[i].chunk(2, -1)
        for b, n in enumerate(lengths.tolist()):
            ahead = loop(cell, layer.rnn, "", below[b, :n], h0[0][b], c0[0][b])
            back = loop(cell, layer.rnn, "_reverse", below[b, :n].flip(0), h0[1][b], c0[1][b])[::-1]
            for way, steps in (("forward", ahead), ("backward", back)):
                for gate in GATES[cell]:
                    shown = entry[f"{way}.{gate}"][b]
                    close(shown[:n].tolist(), [step[gate] for step in steps])
                    assert not shown[n:].any()
        below, _ = layer(below, lengths, state.layers[i])


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_recorded_gates_of_the_decoder_are_the_true_ones(cell: CellName, attention: bool) -> None:
    attend = AdditiveAttention(4, 5, 6) if attention else None
    decoder = RecurrentDecoder(cell, 3, 4, 2, attend, memory_dim=5).double()
    x, memory = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(2, 7, 5, dtype=torch.float64)
    state = random_state(decoder, 2)
    with weft.record(decoder) as seen:
        hidden, _ = decoder(x, memory if attention else None, state=state)
    below = torch.cat([x, hidden[..., 4:]], -1)
    for i, layer in enumerate(decoder.layers):
        entry = seen[f"layers.{i}"]
        assert set(entry.values) == {f"forward.{gate}" for gate in GATES[cell]}
        for b in range(2):
            steps = loop(cell, layer.rnn, "", below[b], state.hidden[i][b], (state.cell or state.hidden)[i][b])
            for gate in GATES[cell]:
                close(entry[f"forward.{gate}"][b].tolist(), [step[gate] for step in steps])
        below, _ = layer(below, None, state.layers[i])


@settings(max_examples=25)
@given(
    cell=st.sampled_from(CELLS),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    extra=st.integers(0, 3),
    num_layers=st.integers(1, 2),
    bidirectional=st.booleans(),
)
def test_padded_is_unpadded(
    cell: CellName, lengths: list[int], extra: int, num_layers: int, bidirectional: bool
) -> None:
    encoder = RecurrentEncoder(cell, 3, 4, num_layers, bidirectional).double()
    x = torch.randn(len(lengths), max(lengths) + extra, 3, dtype=torch.float64)
    outputs, state = encoder(x, torch.tensor(lengths))
    assert outputs.shape == (*x.shape[:2], encoder.output_dim)
    for b, n in enumerate(lengths):
        alone, last = encoder(x[b : b + 1, :n])
        close(outputs[b, :n], alone[0])
        assert not outputs[b, n:].any()
        row = state.select(torch.tensor([b]))
        close(row.hidden, last.hidden)
        close(row.cell, last.cell)
        assert len(last.cell) == (num_layers if cell == "lstm" else 0)


@pytest.mark.parametrize("cell", CELLS)
def test_a_state_carries_the_past(cell: CellName) -> None:
    encoder = RecurrentEncoder(cell, 3, 4, 2).double()
    x = torch.randn(2, 9, 3, dtype=torch.float64)
    whole, last = encoder(x)
    first, state = encoder(x[:, :4])
    second, state = encoder(x[:, 4:], state=state)
    close(torch.cat([first, second], 1), whole)
    close((state.hidden, state.cell), (last.hidden, last.cell))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_same_weights_run_any_length(bidirectional: bool) -> None:
    encoder = RecurrentEncoder("rnn", 3, 4, bidirectional=bidirectional)
    for n in (1, 2, 50):
        assert encoder(torch.randn(2, n, 3))[0].shape == (2, n, 8 if bidirectional else 4)
    count = 2 if bidirectional else 1
    assert sum(p.numel() for p in encoder.parameters()) == count * (4 * 3 + 4 * 4 + 4 + 4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kind", ["none", "additive", "dot", "hard"])
@pytest.mark.parametrize("cell", CELLS)
def test_step_by_step_is_the_whole(cell: CellName, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    attention = {
        "none": None,
        "additive": AdditiveAttention(6, 6, 5),
        "dot": ScoreAttention(DotScore()),
        "hard": HardAttention(DotScore()),
    }[kind]
    decoder = RecurrentDecoder(cell, 3, 6, 2, attention, memory_dim=6).to(dtype)
    x, memory = torch.randn(3, 5, 3, dtype=dtype), torch.randn(3, 4, 6, dtype=dtype)
    mask = Mask(lengths=torch.tensor([4, 1, 3]))
    whole, last = decoder(x, memory, mask)
    projected = None if attention is None else attention.score.project(memory)
    parts, state = [], None
    for size in x.split([1, 1, 2, 1], 1):
        part, state = decoder(size, memory, mask, state, projected)
        parts.append(part)
    assert state is not None
    close(torch.cat(parts, 1), whole, tolerance)
    close((state.hidden, state.cell), (last.hidden, last.cell), tolerance)


def test_padding_of_the_memory_does_not_matter() -> None:
    decoder = RecurrentDecoder("lstm", 3, 6, 1, AdditiveAttention(6, 4, 5), memory_dim=4).double()
    x, memory = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 7, 4, dtype=torch.float64)
    hidden, _ = decoder(x, memory, Mask(lengths=torch.tensor([7, 3])))
    close(decoder(x[:1], memory[:1])[0], hidden[:1])
    close(decoder(x[1:], memory[1:, :3])[0], hidden[1:])


def test_a_mask_may_differ_from_step_to_step() -> None:
    decoder = RecurrentDecoder("gru", 3, 6, 1, AdditiveAttention(6, 4, 5), memory_dim=4).double()
    x, memory = torch.randn(2, 3, 3, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    with weft.record(decoder) as seen:
        hidden, _ = decoder(x, memory, Mask(pattern=torch.eye(3, dtype=torch.bool)))
    close(hidden[..., 6:], memory)
    close(seen["attention"].weights, torch.eye(3, dtype=torch.float64).expand(2, 1, 3, 3))


@pytest.mark.parametrize("kind", ["additive", "hard"])
def test_each_step_has_its_own_weights_and_context(kind: str) -> None:
    attention = AdditiveAttention(6, 6, 5) if kind == "additive" else HardAttention(DotScore())
    decoder = RecurrentDecoder("gru", 3, 6, 2, attention, memory_dim=6).double()
    x, memory = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64)
    with weft.record(decoder) as seen:
        hidden, state = decoder(x, memory, Mask(lengths=torch.tensor([4, 2])))
        decoder(x[:, :1], memory, None, state)
    first, second = seen.calls("attention")
    assert first.kind == "weights"
    assert first.weights.shape == (2, 1, 5, 4)
    assert second.weights.shape == (2, 1, 1, 4)
    close(first.weights.sum(-1), torch.ones(2, 1, 5, dtype=torch.float64))
    assert not first.weights[1, :, :, 2:].any()
    close(first.weights[:, 0] @ memory, hidden[..., 6:])
    if kind == "additive":
        assert (first.weights[:, :, 1:] != first.weights[:, :, :-1]).any(-1).all()


def test_without_attention_the_decoder_sees_its_state_alone() -> None:
    decoder = RecurrentDecoder("lstm", 3, 6)
    x, state = torch.randn(2, 4, 3), RecurrentState((torch.randn(2, 6),), (torch.randn(2, 6),))
    hidden, _ = decoder(x, state=state)
    assert hidden.shape == (2, 4, 6)
    assert torch.equal(decoder(x, torch.randn(2, 9, 5), None, state)[0], hidden)
    other, _ = decoder(x, state=RecurrentState((state.hidden[0] + 1,), state.cell))
    assert not torch.isclose(other, hidden).any()


@pytest.mark.parametrize("cell", CELLS)
def test_recording_changes_nothing(cell: CellName) -> None:
    encoder = RecurrentEncoder(cell, 3, 4, 2, bidirectional=True, dropout=0.3)
    decoder = RecurrentDecoder(cell, 3, 4, 2, AdditiveAttention(4, 8, 5), memory_dim=8, dropout=0.3)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    x, lengths = torch.randn(2, 5, 3, requires_grad=True), torch.tensor([5, 3])

    def run() -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(1)
        memory, _ = encoder(x, lengths)
        hidden, _ = decoder(x, memory, Mask(lengths=lengths))
        (gradient,) = torch.autograd.grad(hidden.sum(), x)
        return hidden, gradient, torch.random.get_rng_state()

    plain = run()
    with weft.record(model) as seen:
        observed = run()
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    names = ["encoder.layers.0", "encoder.layers.1", "decoder.attention", "decoder.layers.0", "decoder.layers.1"]
    assert [entry.name for entry in seen] == names
    assert not any(value.requires_grad for entry in seen for value in entry.values.values())


def test_dropout_is_between_layers_and_in_training_only() -> None:
    for model in (
        RecurrentEncoder("gru", 3, 32, 2, dropout=0.5),
        RecurrentDecoder("gru", 3, 32, 2, AdditiveAttention(32, 3, 4), memory_dim=3, dropout=0.5),
        RecurrentDecoder("gru", 3, 32, 2, dropout=0.5),
    ):
        x = torch.randn(2, 5, 3)
        given = (x, x) if isinstance(model, RecurrentDecoder) else (x,)
        with weft.record(model) as seen:
            first, second = model(*given)[0], model(*given)[0]
        assert not torch.equal(first, second)
        if getattr(model, "attention", None) is None:
            layers = seen.calls("layers.0")
            assert torch.equal(layers[0]["forward.reset"], layers[1]["forward.reset"])
        model.eval()
        assert torch.equal(model(*given)[0], model(*given)[0])
    single = RecurrentEncoder("gru", 3, 32, 1, dropout=0.5)
    assert torch.equal(single(x)[0], single(x)[0])


def test_state_rows_can_be_picked_and_joined() -> None:
    encoder = RecurrentEncoder("lstm", 3, 4, 2, bidirectional=True)
    x = torch.randn(3, 5, 3)
    _, state = encoder(x)
    picked = state.select(torch.tensor([2, 0, 2]))
    for before, after in zip(state.hidden + state.cell, picked.hidden + picked.cell, strict=True):
        assert torch.equal(after, torch.stack([before[2], before[0], before[2]]))
    joined = RecurrentState.cat([encoder(x[:1])[1], encoder(x[1:])[1]])
    close((joined.hidden, joined.cell), (state.hidden, state.cell), 1e-6)
    gru = RecurrentEncoder("gru", 3, 4)(x)[1]
    assert RecurrentState.cat([gru, gru]).cell == ()
    assert RecurrentState.cat([gru, gru]).hidden[0].shape == (6, 4)


@pytest.mark.parametrize(
    ("encoder_layers", "decoder_layers", "sources"), [(2, 2, [0, 1]), (1, 3, [0, 0, 0]), (3, 1, [2])]
)
@pytest.mark.parametrize("cell", CELLS)
def test_bridge_is_the_formula(cell: CellName, encoder_layers: int, decoder_layers: int, sources: list[int]) -> None:
    encoder = RecurrentEncoder(cell, 3, 4, encoder_layers, bidirectional=True).double()
    decoder = RecurrentDecoder(cell, 3, 6, decoder_layers).double()
    bridge = Bridge(cell, encoder.output_dim, 6, decoder_layers).double()
    _, last = encoder(torch.randn(2, 5, 3, dtype=torch.float64))
    state = bridge(last)
    for i, source in enumerate(sources):
        linear = bridge.hidden[i]
        close(state.hidden[i], torch.tanh(last.hidden[source] @ linear.weight.T + linear.bias))
        if cell == "lstm":
            close(state.cell[i], last.cell[source] @ bridge.cell[i].weight.T + bridge.cell[i].bias)
    assert len(state.cell) == (decoder_layers if cell == "lstm" else 0)
    decoder(torch.randn(2, 1, 3, dtype=torch.float64), state=state)


def test_bad_input_is_named() -> None:
    encoder = RecurrentEncoder("gru", 3, 4)
    x = torch.randn(2, 5, 3)
    with pytest.raises(ValueError, match="one of rnn, gru, lstm, not 'elman'"):
        RecurrentEncoder("elman", 3, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_layers must be ≥ 1, not 0"):
        RecurrentEncoder("gru", 3, 4, 0)
    with pytest.raises(ValueError, match=r"lengths must be ≥ 1, not \[5, 0\]"):
        encoder(x, torch.tensor([5, 0]))
    with pytest.raises(ValueError, match=r"2 whole numbers ≤ 5, not \[6, 1\]"):
        encoder(x, torch.tensor([6, 1]))
    with pytest.raises(ValueError, match=r"2 whole numbers ≤ 5, not \[5\]"):
        encoder(x, torch.tensor([5]))
    with pytest.raises(ValueError, match=r"expected x \[B, N ≥ 1, 3\], not \[2, 5, 4\]"):
        encoder(torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match=r"not \[2, 0, 3\]"):
        encoder(x[:, :0])
    with pytest.raises(ValueError, match=r"hidden of the state to be \[\[2, 4\]\], not \[\[3, 4\]\]"):
        encoder(x, state=RecurrentState((torch.zeros(3, 4),)))
    with pytest.raises(ValueError, match=r"cell of the state to be \[\[2, 4\]\], not \[\]"):
        RecurrentEncoder("lstm", 3, 4)(x, state=RecurrentState((torch.zeros(2, 4),)))
    with pytest.raises(ValueError, match="needs memory_dim"):
        RecurrentDecoder("gru", 3, 4, attention=AdditiveAttention(4, 4, 4))
    decoder = RecurrentDecoder("gru", 3, 4, attention=AdditiveAttention(4, 5, 4), memory_dim=5)
    with pytest.raises(ValueError, match=r"expected a memory \[2, M, 5\] to attend to, not None"):
        decoder(x)
    with pytest.raises(ValueError, match=r"not \[2, 7, 4\]"):
        decoder(x, torch.zeros(2, 7, 4))
    with pytest.raises(ValueError, match="lengths has 3 rows, but the batch has 2"):
        decoder(x, torch.zeros(2, 7, 5), Mask(lengths=torch.tensor([1, 2, 3])))
    with pytest.raises(ValueError, match="for a state with cells"):
        Bridge("lstm", 4, 4)(encoder(x)[1])


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_a_step_gives_the_state_after_each_position(cell: CellName, attends: bool) -> None:
    attention = AdditiveAttention(4, 5, 3) if attends else None
    decoder = RecurrentDecoder(cell, 3, 4, num_layers=2, attention=attention, memory_dim=5).double()
    x, memory = torch.randn(2, 6, 3, dtype=torch.float64), torch.randn(2, 7, 5, dtype=torch.float64)
    first = random_state(decoder, 2)
    outputs, path = decoder.step(x, memory, state=first)
    close(outputs, decoder(x, memory, state=first)[0])
    assert len(path) == 6
    for n, state in enumerate(path, start=1):
        expected = decoder(x[:, :n], memory, state=first)[1]
        close(state.hidden, expected.hidden)
        close(state.cell, expected.cell)


@pytest.mark.parametrize("lengths", [None, [2, 6, 1]])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_in_steady_mode_it_is_the_same(cell: CellName, bidirectional: bool, lengths: list[int] | None) -> None:
    encoder = RecurrentEncoder(cell, 3, 4, num_layers=2, bidirectional=bidirectional).double()
    x, first = torch.randn(3, 8, 3, dtype=torch.float64), random_state(encoder, 3)
    given = None if lengths is None else torch.tensor(lengths)
    with weft.record(encoder) as plain:
        expected, end = encoder(x, given, first)
    with steady(), weft.record(encoder) as seen:
        outputs, state = encoder(x, given, first)
    close(outputs, expected)
    close(state.hidden, end.hidden)
    close(state.cell, end.cell)
    for one, other in zip(seen, plain, strict=True):
        close(one.values, other.values)


def test_starting_over() -> None:
    layer = RecurrentLayer("lstm", 5, 4, bidirectional=True)
    layer.initialise()
    for suffix in ("", "_reverse"):
        for gate in layer.parameter("weight_hh", suffix).chunk(4):
            close(gate @ gate.T, torch.eye(4), 1e-5)
        close(layer.parameter("bias_ih", suffix), torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(4))
        assert (layer.parameter("bias_hh", suffix) == 0).all()


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_padded_rows_learn_as_torchs_module_does(cell: CellName, bidirectional: bool) -> None:
    torch.manual_seed(5)
    encoder = RecurrentEncoder(cell, 6, 7, num_layers=2, bidirectional=bidirectional)
    x, lengths = torch.randn(4, 9, 6, requires_grad=True), torch.tensor([9, 1, 5, 3])
    given = [x, *encoder.parameters()]

    def learn(outputs: Tensor, ends: list[Tensor]) -> list[Tensor]:
        total = outputs.square().sum() + sum((end * (i + 2)).sum() for i, end in enumerate(ends))
        return [outputs, *ends, *torch.autograd.grad(total, given)]

    outputs, state = encoder(x, lengths)
    found = learn(outputs, [*state.hidden, *state.cell])
    y, hidden, cells = x, [], []
    for layer in encoder.layers:
        assert isinstance(layer, RecurrentLayer)
        packed = nn.utils.rnn.pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False)
        packed, last = layer.rnn(packed)
        y = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0]
        parts = last if cell == "lstm" else (last,)
        for ends, part in zip((hidden, cells), parts, strict=False):
            ends.append(part.transpose(0, 1).flatten(1))
    for mine, torchs in zip(found, learn(y, [*hidden, *cells]), strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attends", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_inputs_in_bf16_are_multiplied_so_and_states_stay_wide(cell: CellName, attends: bool) -> None:
    torch.manual_seed(6)
    attention = AdditiveAttention(16, 12, 10) if attends else None
    decoder = RecurrentDecoder(cell, 8, 16, 2, attention, 12 if attends else None)
    x, memory = torch.randn(3, 6, 8).bfloat16(), torch.randn(3, 4, 12)
    narrow, state = decoder(x, memory)
    wide, _ = decoder(x.float(), memory)
    assert {t.dtype for t in (narrow, *state.hidden, *state.cell)} == {torch.float32}
    assert not torch.equal(narrow, narrow.bfloat16().float())  # what comes out is not rounded
    assert not torch.equal(narrow, wide)  # what is multiplied is
    torch.testing.assert_close(narrow, wide, rtol=0.0, atol=2e-2)
    narrow.square().sum().backward()
    found = [p.grad.clone() for p in decoder.parameters() if p.grad is not None]
    decoder.zero_grad()
    wide.square().sum().backward()
    for parameter, grad in zip(decoder.parameters(), found, strict=True):
        assert parameter.grad is not None
        assert grad.dtype == torch.float32
        assert float((grad - parameter.grad).norm()) < 0.03 * float(parameter.grad.norm())
