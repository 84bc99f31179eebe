"""The bound Transformer against the model itself: every configuration, states, what it leaves to the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.config import EOS, PAD, TransformerConfig
from weft.decoding import steps
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import SearchOptions
from weft.decoding.steps import searching
from weft.kernels import native
from weft.kernels.plain import plain
from weft.kernels.steady import steady
from weft.layers.linear import Linear
from weft.models import bound as bound_models
from weft.models import narrow
from weft.models.bound import BoundTransformer, bound
from weft.models.transformer import Transformer

WORDS = 37


@pytest.fixture(autouse=True)
def _without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)


def made(**options: Any) -> Transformer:
    """A new model whose biases and norms are not the 0 and 1 that they start at."""
    sizes = {"dim": 16, "num_heads": 4, "ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
    model = Transformer(TransformerConfig(**{**sizes, **options}), WORDS, WORDS).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def fast(model: Transformer) -> BoundTransformer:
    found = bound(model)
    assert isinstance(found, BoundTransformer)
    return found


def sources(*lengths: int) -> Tensor:
    """Tokens and EOS; lengths count it."""
    rows = [torch.cat([torch.randint(4, WORDS, (length - 1,)), torch.tensor([EOS])]) for length in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-5)


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "rms": {"norm": "rms"},
    **{activation: {"activation": activation} for activation in ("gelu", "gelu_tanh", "swiglu")},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1, "norm_first": False},
    "no biases": {"bias": False},
    **{f"tie {tie}": {"tie": tie} for tie in ("output", "none")},
    **{positions: {"positions": positions} for positions in ("order", "none")},
    "learned": {"positions": "learned", "max_len": 40},
}
ALL = pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)


@ALL
@pytest.mark.parametrize("lengths", [(7,), (7, 7, 7), (7, 4, 1)], ids=["one", "alike", "padded"])
def test_steps_and_logits_are_the_models_own(options: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """Portions of several tokens, rows of several lengths and padding among them, which the model itself does."""
    model = made(**options)
    source, target = sources(*lengths), torch.randint(0, WORDS, (len(lengths), 40))
    mine, theirs = fast(model), model(source, target)
    with torch.no_grad():
        for portions in ([1] * 40, [1, 1, 3, 1, 34]):
            state, parts = mine.start(source), []
            for part in target.split(portions, 1):
                hidden, state = mine.step(part, state)
                parts.append(hidden)
            close(torch.cat(parts, 1), theirs)
            assert state.lengths.tolist() == [40] * len(lengths)
        close(mine.logits(theirs[:, -1]), model.logits(theirs[:, -1]))
        close(mine.logits(theirs), model.logits(theirs))


def test_states_go_from_one_to_the_other() -> None:
    """Rows chosen, cut back and joined between steps; each state by the model and bound."""
    model = made()
    mine, source = fast(model), sources(6)
    with torch.no_grad():
        state = model.start(source)
        for rows in ([0, 0, 0], [2, 1], [1, 0, 0, 1, 1], [3, 2, 1, 0, 4]):
            state = state.select(torch.tensor(rows))
            tokens = torch.randint(0, WORDS, (len(rows), 1))
            (one, after), (other, state) = mine.step(tokens, state), model.step(tokens, state)
            close(one, other)
            assert after.lengths.tolist() == state.lengths.tolist()
        state = after.truncate(torch.tensor([2, 2, 1, 0, 2]))
        state = state.cat([state, mine.step(tokens, model.start(source.expand(5, -1)))[1]])
        tokens = torch.randint(0, WORDS, (10, 1))
        close(mine.step(tokens, state)[0], model.step(tokens, state)[0])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [1, 4])
def test_searches_find_the_same(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = made(), sources(*[5] * rows)
    options = SearchOptions(beam=width, n_best=width, max_ratio=0.0, max_extra=12)
    search = beam if width > 1 else greedy
    found = search(model, source, options)
    monkeypatch.setattr(steps, "bound", lambda model: model)
    for mine, theirs in zip(found, search(model, source, options), strict=True):
        assert [h.tokens for h in mine] == [h.tokens for h in theirs]
        assert [h.score for h in mine] == pytest.approx([h.score for h in theirs], abs=1e-5)


@pytest.mark.parametrize("positions", ["shaw", "t5", "rotary", "alibi", "fraction"])
def test_other_positions_are_left_to_the_model(positions: str) -> None:
    model = made(positions=positions)
    assert bound(model) is model


def test_what_is_asked_of_the_model_itself() -> None:
    model = made()
    with weft.record(model):
        assert bound(model) is model
    with steady():
        assert bound(model) is model
    with plain():
        assert bound(model) is model
    with searching(model, exact=True) as runner:
        assert runner is model
    with searching(model, exact=False, observed=True) as runner:
        assert runner is model
    with searching(model, exact=False) as runner:
        assert isinstance(runner, BoundTransformer)
    model.precision = torch.bfloat16
    assert bound(model) is model
    normed = made(qk_norm=True)
    assert bound(normed) is normed
    double = made().double()
    assert bound(double) is double
    small = made()
    narrow.fill(small, narrow.state(small, torch.int8), keep=True)
    assert bound(small) is small


@pytest.mark.parametrize(
    "name",
    ["0", "0.around_attention", "0.cross_attention", "0.attention.key", "0.feed_forward", "1.feed_forward.outer"],
)
def test_hooks_are_called(name: str) -> None:
    """Wherever they are: in the block, its parts and their layers."""
    model, calls = made(), list[str]()
    source = sources(5)
    model.decoder.get_submodule(name).register_forward_hook(lambda *_: calls.append(name))
    with torch.no_grad():
        runner = bound(model)
        runner.step(torch.tensor([[1]]), runner.start(source))
    assert len(calls) == (name != "0")  # a block's step is no call of the block


def test_another_kind_of_layer_is_called() -> None:
    class Twice(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * super().forward(x)

    model, source = made(), sources(5)
    inner: nn.Module = model.decoder[1].feed_forward  # type: ignore[assignment]
    inner.outer = Twice(24, 16).requires_grad_(False)
    with torch.no_grad():
        (mine, _), (theirs, _) = (m.step(torch.tensor([[1]]), m.start(source)) for m in (fast(model), model))
    close(mine, theirs)


def test_the_output_layer_is_the_models_as_it_is_now() -> None:
    """Changed in place, behind torch's back, and replaced; and nothing is copied while nothing changes."""
    model, hidden = made(), torch.randn(3, 16)

    def check() -> Tensor:
        runner = fast(model)
        close(runner.logits(hidden), model.logits(hidden))
        return bound_models._columns(model)

    assert model.target_embedding is not None
    first = check()
    assert check() is first
    model.target_embedding.mul_(2.0)
    second = check()
    assert second is not first
    model.target_embedding.data.mul_(0.5)
    check()
    model.target_embedding = nn.Parameter(torch.randn(WORDS, 16), requires_grad=False)
    check()
    model.output_bias = nn.Parameter(torch.randn(WORDS), requires_grad=False)
    check()
