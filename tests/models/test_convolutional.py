"""The convolutional family against the paper's formulas in torch's plain functions, and how it starts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.config import EOS, PAD, ConvolutionalConfig
from weft.models.convolutional import Convolutional

SOURCE, TARGET = 11, 13
HALF = 0.5**0.5


def make(**options: Any) -> Convolutional:
    sizes = {"embed_dim": 5, "dim": 6, "encoder_layers": 2, "decoder_layers": 3, "max_len": 20, "dropout": 0.0}
    model = Convolutional(ConvolutionalConfig(**{**sizes, **options}), SOURCE, TARGET).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokens(vocab: int, *lengths: int) -> Tensor:
    rows = [torch.cat([torch.randint(3, vocab, (length - 1,)), torch.tensor([EOS])]) for length in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def formula(p: dict[str, Tensor], source: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] and the weights [T, M] of each decoder layer, for one sentence, with torch's convolution."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def convolve(name: str, x: Tensor, left: int, right: int) -> Tensor:
        padded = F.pad(x.T, (left, right))[None]
        both = F.conv1d(padded, p[f"{name}.convolution.weight"], p[f"{name}.convolution.bias"])[0].T
        a, b = both.chunk(2, 1)
        return a * torch.sigmoid(b)

    m = len(source)
    e = p["source_embedding"][source] + p["source_positions.scheme.weight"][:m]
    x = linear("encoder_input", e)
    for i in range(2):
        x = (convolve(f"encoder.{i}", x, 1, 1) + x) * HALF
    z = linear("encoder_output", x)
    g = p["target_embedding"][target] + p["target_positions.scheme.weight"][: len(target)]
    x, weights = linear("decoder_input", g), []
    for i in range(3):
        h = convolve(f"decoder.{i}.convolution", x, 2, 0)
        d = (linear(f"decoder.{i}.query", h) + g) * HALF
        weights.append((d @ z.T).softmax(-1))
        context = weights[-1] @ ((z + e) * HALF) * (m * (1 / m) ** 0.5)
        x = ((linear(f"decoder.{i}.output", context) + h) * HALF + x) * HALF
    hidden = linear("decoder_output", x)
    return hidden @ p["target_embedding"].T + p["output_bias"], weights


def test_is_the_papers_formulas() -> None:
    model = make()
    source, target = tokens(SOURCE, 7, 3, 1), tokens(TARGET, 6, 6, 6)
    with weft.record(model, names=model.cross_attentions) as seen:
        logits = model.logits(model(source, target))
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    for row, length in enumerate((7, 3, 1)):
        expected, weights = formula(parameters, source[row, :length], target[row])
        close(logits[row], expected)
        for i, layer in enumerate(weights):
            close(seen[f"decoder.{i}.attention"].weights[row, 0, :, :length], layer)


def test_the_encoder_gets_a_share_of_the_gradient_for_each_attention() -> None:
    """The encoder's layers alone: not the decoder, and not what source embeddings get as values."""
    model = make()
    source, target = tokens(SOURCE, 5), tokens(TARGET, 4)
    model.logits(model(source, target)).square().sum().backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    plain = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}
    formula(plain, source[0], target[0])[0].square().sum().backward()
    for name, value in plain.items():
        if name.startswith("encoder"):
            close(ours[name], value.grad / 3)
        elif not name.startswith("source"):
            close(ours[name], value.grad)
        else:
            assert not torch.allclose(ours[name], value.grad)


def test_variances_stay() -> None:
    config = ConvolutionalConfig(embed_dim=128, dim=128, encoder_layers=8, decoder_layers=8, dropout=0.0)
    model = Convolutional(config, 500, 500)
    before, after = [], []
    model.encoder_output.register_forward_hook(lambda _, given, result: before.append(given[0].std().item()))
    model.decoder_output.register_forward_hook(lambda _, given, result: after.append(given[0].std().item()))
    model(torch.randint(3, 500, (8, 20)), torch.randint(3, 500, (8, 20)))
    embedded = (0.1**2 + 0.1**2) ** 0.5
    assert 0.3 < before[0] / embedded < 3
    assert 0.3 < after[0] / embedded < 3


def test_starting_values() -> None:
    model = Convolutional(ConvolutionalConfig(embed_dim=64, dim=256, dropout=0.2), 1000, 1000)
    values = dict(model.named_parameters())
    expected = {
        "target_embedding": 0.1,
        "source_positions.scheme.weight": 0.1,
        "encoder_input.weight": (0.8 / 64) ** 0.5,
        "encoder_output.weight": 256**-0.5,
        "decoder.0.query.weight": 256**-0.5,
        "encoder.0.convolution.weight": (4 * 0.8 / (3 * 256)) ** 0.5,
    }
    for name, std in expected.items():
        assert abs(values[name].std().item() / std - 1) < 0.05, name
    assert all((value == 0).all() for name, value in values.items() if name.endswith("bias"))


def test_an_even_kernel_has_no_centre() -> None:
    with pytest.raises(ValueError, match="odd kernel_size, not 4"):
        make(kernel_size=4)
