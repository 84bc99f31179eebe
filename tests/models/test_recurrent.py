"""The recurrent family: plain torch modules without attention, the paper's formulas with it, and how it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import weft
from weft.config import EOS, PAD, RecurrentConfig
from weft.data.batching import Batch
from weft.kernels.compiled import KINDS, compiled
from weft.kernels.plain import plain
from weft.models.recurrent import Recurrent

SOURCE, TARGET = 11, 13
MODULES: dict[str, type[nn.RNNBase]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def make(**options: Any) -> Recurrent:
    sizes = {"embed_dim": 5, "dim": 6, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    model = Recurrent(RecurrentConfig(**{**sizes, **options}), SOURCE, TARGET).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokens(vocab: int, *lengths: int) -> Tensor:
    rows = [torch.cat([torch.randint(3, vocab, (length - 1,)), torch.tensor([EOS])]) for length in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


class Plain(nn.Module):
    """An encoder-decoder without attention, of torch's modules alone."""

    def __init__(self, cell: str, bidirectional: bool) -> None:
        super().__init__()
        self.lstm, directions = cell == "lstm", 2 if bidirectional else 1
        self.directions = directions
        self.source, self.target = nn.Embedding(SOURCE, 5), nn.Embedding(TARGET, 5)
        self.encoder = MODULES[cell](5, 6, 2, batch_first=True, bidirectional=bidirectional)
        self.hidden = nn.ModuleList(nn.Linear(6 * directions, 6) for _ in range(2))
        self.cell = nn.ModuleList(nn.Linear(6 * directions, 6) for _ in range(2 if self.lstm else 0))
        self.decoder = MODULES[cell](5, 6, 2, batch_first=True)
        self.readout, self.output = nn.Linear(6, 5), nn.Linear(5, TARGET)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        lengths = (source != PAD).sum(1)
        packed = pack_padded_sequence(self.source(source), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.encoder(packed)
        h, c = last if self.lstm else (last, None)
        first = torch.stack([w(x).tanh() for w, x in zip(self.hidden, self.by_layer(h), strict=True)])
        if c is not None:
            first = (first, torch.stack([w(x) for w, x in zip(self.cell, self.by_layer(c), strict=True)]))
        outputs, _ = self.decoder(self.target(target), first)
        logits: Tensor = self.output(self.readout(outputs).tanh())
        return logits

    def by_layer(self, last: Tensor) -> list[Tensor]:
        """[layers · directions, B, D] -> for each layer both directions side by side."""
        return [torch.cat(tuple(layer), -1) for layer in last.split(self.directions)]


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("cell", MODULES)
def test_without_attention_it_is_torchs_modules(cell: Any, bidirectional: bool) -> None:
    ours = make(cell=cell, attention="none", bidirectional=bidirectional, tie="none")
    theirs = Plain(cell, bidirectional).double()
    values = {
        "source.weight": ours.source_embedding,
        "target.weight": ours.target_embedding,
        "output.weight": ours.output_weight,
        "output.bias": ours.output_bias,
    }
    for name, value in ours.named_parameters():
        part, *path = name.split(".")
        if part in ("encoder", "decoder"):
            values[f"{part}.{path[-1].replace('_l0', f'_l{path[1]}')}"] = value
        elif part in ("bridge", "readout"):
            values[name.removeprefix("bridge.")] = value
    theirs.load_state_dict(values)
    source, target = tokens(SOURCE, 7, 3, 5), tokens(TARGET, 6, 6, 6)
    close(ours.logits(ours(source, target)), theirs(source, target))
    with torch.no_grad():
        hidden, _ = ours.step(target, ours.start(source))
    close(ours.logits(hidden), theirs(source, target))


def test_with_additive_attention_it_is_the_papers_formulas() -> None:
    """Bahdanau et al. 2015, one sentence, one number after the other."""
    model = make(encoder_layers=1, decoder_layers=1, tie="output")
    p = {name: value.detach() for name, value in model.named_parameters()}

    def gru(prefix: str, suffix: str, x: Tensor, h: Tensor) -> Tensor:
        wi, wh, bi, bh = (p[f"{prefix}.{n}_l0{suffix}"] for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
        (ir, iz, in_), (hr, hz, hn) = (wi @ x + bi).chunk(3), (wh @ h + bh).chunk(3)
        r, z = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
        return (1 - z) * torch.tanh(in_ + r * hn) + z * h

    source, target = tokens(SOURCE, 6), tokens(TARGET, 5)
    x = p["source_embedding"][source[0]]
    ways = {}
    for suffix, order in (("", range(6)), ("_reverse", reversed(range(6)))):
        h, ways[suffix] = torch.zeros(6, dtype=torch.float64), {}
        for i in order:
            h = ways[suffix][i] = gru("encoder.layers.0.rnn", suffix, x[i], h)
    memory = [torch.cat((ways[""][i], ways["_reverse"][i])) for i in range(6)]
    last = torch.cat((ways[""][5], ways["_reverse"][0]))
    s = torch.tanh(p["bridge.hidden.0.weight"] @ last + p["bridge.hidden.0.bias"])
    score = "decoder.attention.score"
    expected, weights = [], []
    for token in target[0]:
        query = p[f"{score}.query.weight"] @ s
        keys = [p[f"{score}.key.weight"] @ h + p[f"{score}.key.bias"] for h in memory]
        energies = torch.stack([p[f"{score}.energy.weight"][0] @ torch.tanh(query + k) for k in keys])
        alpha = energies.exp() / energies.exp().sum()
        context = sum(a * h for a, h in zip(alpha, memory, strict=True))
        s = gru("decoder.layers.0.rnn", "", torch.cat((p["target_embedding"][token], context)), s)
        read = torch.tanh(p["readout.weight"] @ torch.cat((s, context)) + p["readout.bias"])
        expected.append(p["target_embedding"] @ read + p["output_bias"])
        weights.append(alpha)
    with weft.record(model, names=model.cross_attentions) as seen:
        logits = model.logits(model(source, target))
    close(logits[0], torch.stack(expected))
    close(seen["decoder.attention"].weights[0, 0], torch.stack(weights))


@pytest.mark.parametrize(("name", "scale"), [("dot", 1.0), ("scaled_dot", 6**-0.5)])
def test_a_memory_of_two_directions_is_mapped_to_the_width_of_the_query(name: Any, scale: float) -> None:
    model = make(attention=name)
    assert model.memory.weight.shape == (6, 12)
    source = tokens(SOURCE, 5, 3)
    memory, _, _, first = model.encode(source)
    assert memory.shape == (2, 5, 6)
    outputs, _ = model.encoder(model._embed(source, target=False), (source != PAD).sum(1))
    close(memory, outputs @ model.memory.weight.T)
    with weft.record(model, names=model.cross_attentions) as seen:
        model(source, tokens(TARGET, 2, 2))
    scores = (memory @ first.hidden[-1][:, :, None])[:, :, 0] * scale
    expected = scores.masked_fill(source == PAD, float("-inf")).softmax(-1)
    close(seen["decoder.attention"].weights[:, 0, 0], expected)
    one_way = make(attention=name, bidirectional=False)
    assert not list(one_way.memory.parameters())


def test_starting_values() -> None:
    config = RecurrentConfig(cell="lstm", embed_dim=32, dim=16, encoder_layers=2, decoder_layers=2)
    model = Recurrent(config, 4000, 4000)
    for name, parameter in model.named_parameters():
        if "weight_hh" in name:
            for gate in parameter.chunk(4):
                close(gate @ gate.T, torch.eye(16), 1e-5)
        elif "weight_ih" in name:
            bound = (6 / (16 + parameter.shape[1])) ** 0.5
            assert 0.9 * bound < parameter.abs().max() <= bound
        elif "bias_ih" in name:
            close(parameter, torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(16), 0.0)
        elif name.endswith("bias") or "bias_hh" in name:
            assert (parameter == 0).all()
    assert model.target_embedding is not None
    assert abs(model.target_embedding.std().item() - 32**-0.5) < 0.01


def test_under_bf16_the_states_stay_fp32() -> None:
    model = make().float()
    model.precision = torch.bfloat16
    with torch.no_grad():
        hidden, state = model.step(tokens(TARGET, 3), model.start(tokens(SOURCE, 4)))
    assert hidden.dtype == torch.bfloat16
    assert state.caches[0].keys.dtype == state.source[0].dtype == torch.float32


@pytest.mark.parametrize("attention", ["none", "additive", "dot", "scaled_dot", "bilinear"])
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
def test_training_as_a_run_has_it_learns_what_the_plain_formulas_in_fp32_do(cell: str, attention: str) -> None:
    torch.manual_seed(0)
    model = make(cell=cell, attention=attention, embed_dim=16, dim=32).float().train()
    batch = Batch(tokens(SOURCE, 6, 3, 5, 1), tokens(TARGET, 5, 4, 2, 6))
    found = []
    for precision, reference in ((torch.bfloat16, False), (torch.float32, True)):
        model.precision = precision
        with plain(reference), compiled(*() if reference else KINDS):
            total = model.loss(batch, smoothing=0.1).total
            found.append((float(total.detach()), torch.autograd.grad(total, list(model.parameters()))))
    (loss, grads), (plain_loss, plain_grads) = found
    assert loss == pytest.approx(plain_loss, rel=1e-2)
    flat, plain_flat = (torch.cat([grad.flatten() for grad in some]) for some in (grads, plain_grads))
    assert float((flat - plain_flat).norm()) < 0.05 * float(plain_flat.norm())
