"""What contract.py promises, of every family and option: steps, states, the loss."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import weft
from weft.config import BOS, EOS, PAD, ConvolutionalConfig, RecurrentConfig, TransformerConfig
from weft.data.synthetic import Batch
from weft.kernels.steady import steady
from weft.models import FAMILIES, build
from weft.models.contract import Seq2Seq
from weft.models.encoder_decoder import EncoderDecoder
from weft.models.state import DecoderState

Config = TransformerConfig | RecurrentConfig | ConvolutionalConfig
SOURCE, TARGET = 11, 13  # words


def transformer(**options: Any) -> TransformerConfig:
    sizes = {"dim": 8, "num_heads": 2, "ffn_dim": 12, "encoder_layers": 2, "decoder_layers": 2, "tie": "output"}
    return TransformerConfig(**{**sizes, "dropout": 0.0, "max_len": 40, **options})


def recurrent(**options: Any) -> RecurrentConfig:
    sizes = {"embed_dim": 6, "dim": 8, "encoder_layers": 2, "decoder_layers": 2}
    return RecurrentConfig(**{**sizes, "dropout": 0.0, **options})


def convolutional(**options: Any) -> ConvolutionalConfig:
    sizes = {"embed_dim": 6, "dim": 8, "encoder_layers": 2, "decoder_layers": 3, "max_len": 40}
    return ConvolutionalConfig(**{**sizes, "dropout": 0.0, **options})


SCHEMES = ["sinusoidal", "learned", "order", "fraction", "rotary", "alibi", "shaw", "t5", "none"]
ATTENTIONS = ["additive", "dot", "scaled_dot", "bilinear", "none"]
FAMILY = {"transformer": transformer(), "recurrent": recurrent(), "convolutional": convolutional()}
OPTIONS: dict[str, Config] = {
    **{f"transformer {name}": transformer(positions=name) for name in SCHEMES},
    "transformer post-norm": transformer(norm_first=False, tie="none"),
    "transformer modern": transformer(
        norm="rms", activation="swiglu", bias=False, qk_norm=True, num_kv_heads=1, positions="rotary"
    ),
    **{f"recurrent {name}": recurrent(attention=name) for name in ATTENTIONS},
    **{f"recurrent {name} one way": recurrent(attention=name, bidirectional=False) for name in ("dot", "none")},
    **{f"recurrent {cell} {name}": recurrent(cell=cell, attention=name)
       for cell in ("rnn", "lstm") for name in ("additive", "none")},
    "recurrent shallow to deep": recurrent(encoder_layers=1, decoder_layers=3, cell="lstm", tie="none"),
    "recurrent deep to shallow": recurrent(encoder_layers=3, decoder_layers=1),
    "convolutional": convolutional(),
    "convolutional wide": convolutional(kernel_size=5, tie="none"),
    "convolutional pointwise": convolutional(kernel_size=1),
}  # fmt: skip
every_family = pytest.mark.parametrize("config", FAMILY.values(), ids=FAMILY)
every_option = pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
DTYPES = {torch.float64: 1e-10, torch.float32: 1e-5}


def make(config: Config, dtype: torch.dtype = torch.float64) -> EncoderDecoder:
    """A model whose every parameter matters: biases and tables start at random, too."""
    model = build(config, SOURCE, TARGET).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def sources(*lengths: int) -> Tensor:
    """Random words and EOS, of these lengths in all."""
    rows = [torch.cat([torch.randint(3, SOURCE, (length - 1,)), torch.tensor([EOS])]) for length in lengths]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def targets(*lengths: int) -> Tensor:
    """BOS, random words, EOS; so many words."""
    rows = [torch.cat([torch.tensor([BOS]), torch.randint(3, TARGET, (n,)), torch.tensor([EOS])]) for n in lengths]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def words(rows: int, count: int) -> Tensor:
    return torch.randint(3, TARGET, (rows, count))


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_the_families_are_those_of_the_recipes() -> None:
    assert set(FAMILIES) == set(weft.config.MODELS)
    for name, config in FAMILY.items():
        model: Seq2Seq = build(config, SOURCE, TARGET)
        assert type(model) is FAMILIES[name]
        assert model.precision == torch.float32


@every_option
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_stepping_in_portions_is_the_whole_at_once(config: Config, dtype: torch.dtype) -> None:
    model = make(config, dtype)
    for source in (sources(5, 9, 2), sources(7, 7, 7)):
        target = words(3, 9)
        whole = model(source, target)
        for portions in ([1] * 9, [9], [1, 3, 5], [4, 1, 1, 3]):
            state, parts = model.start(source), []
            for part in target.split(portions, 1):
                hidden, state = model.step(part, state)
                parts.append(hidden)
            assert state.lengths.tolist() == [9, 9, 9]
            close(torch.cat(parts, 1), whole, DTYPES[dtype])


@every_option
@torch.no_grad()
def test_padding_changes_nothing(config: Config) -> None:
    model = make(config)
    source, target = sources(6, 3, 1), words(3, 4)
    together = model(F.pad(source, (0, 2), value=PAD), target)
    for row, length in enumerate((6, 3, 1)):
        close(together[row : row + 1], model(source[row : row + 1, :length], target[row : row + 1]))


@every_option
@torch.no_grad()
def test_no_position_sees_the_future_and_all_see_the_past_and_the_source(config: Config) -> None:
    model = make(config)
    source, target = sources(5, 5), words(2, 6)
    hidden = model(source, target)
    for place in range(6):
        other = target.clone()
        other[:, place] = 3 + (target[:, place] - 2) % (TARGET - 3)
        changed = (model(source, other) != hidden).any(-1)
        assert not changed[:, :place].any()
        assert changed[:, place].all()
    elsewhere = source.clone()
    elsewhere[:, 1] = 3 + (source[:, 1] - 2) % (SOURCE - 3)
    assert ((model(elsewhere, target) - hidden).abs().amax(-1) > 1e-9).all()


@every_option
@pytest.mark.parametrize("joins", [True, False])
@torch.no_grad()
def test_states_after_any_selection_cut_and_join(config: Config, joins: bool) -> None:
    """A walk: whatever was done to a state, each row goes on as if it had been alone and untouched.

    Without joins all rows are of one source.
    """
    model, rng = make(config), random.Random(0)

    def begin(source: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of each row the source, and what it has consumed."""
        return [(row[row != PAD][None], torch.zeros(1, 0, dtype=torch.int64)) for row in source]

    source = sources(5, 3) if joins else sources(5)
    state, rows = model.start(source), begin(source)
    for _ in range(14):
        match rng.choice(["step", "step", "select", "truncate", "cat" if joins else "select"]):
            case "step" if rows:
                tokens = words(len(rows), rng.choice([1, 1, 3]))
                hidden, state = model.step(tokens, state)
                rows = [(s, torch.cat([t, new[None]], 1)) for (s, t), new in zip(rows, tokens, strict=True)]
                for row, (s, t) in enumerate(rows):
                    close(hidden[row], model(s, t)[0, t.shape[1] - tokens.shape[1] :])
            case "select":
                chosen = [rng.randrange(len(rows)) for _ in range(rng.randint(1, 4))]
                state, rows = state.select(torch.tensor(chosen)), [rows[i] for i in chosen]
            case "truncate":
                lengths = [rng.randint(0, t.shape[1]) for _, t in rows]
                state = state.truncate(torch.tensor(lengths))
                rows = [(s, t[:, :length]) for (s, t), length in zip(rows, lengths, strict=True)]
            case "cat":
                source = sources(*rng.sample(range(1, 9), 2))
                state, rows = DecoderState.cat([model.start(source), state]), begin(source) + rows
        assert state.lengths.tolist() == [t.shape[1] for _, t in rows]


@every_family
@torch.no_grad()
def test_rows_of_one_source_share_what_was_made_of_it(config: Config) -> None:
    model = make(config)
    state = model.start(sources(6)).select(torch.tensor([0, 0, 0]))
    first = [part.data_ptr() for part in state.source]
    assert all(part.stride(0) == 0 for part in state.source)
    for rows in ([2, 0, 1], [1, 0], [0, 1, 1, 0]):
        state = state.select(torch.tensor(rows))
        assert [part.data_ptr() for part in state.source] == first
        assert state.source_lengths.tolist() == [6] * len(rows)
    assert not DecoderState.cat([state, state]).alone


@every_family
@torch.no_grad()
def test_a_state_is_a_value(config: Config) -> None:
    model = make(config)
    tokens, other = words(3, 2), words(3, 2)
    before = model.start(sources(4, 6, 2))
    hidden, after = model.step(tokens, before)
    model.step(other, before)
    model.step(other, after.truncate(torch.tensor([0, 1, 2])))
    after.select(torch.tensor([2, 0]))
    assert before.lengths.tolist() == [0, 0, 0]
    assert after.lengths.tolist() == [2, 2, 2]
    close(model.step(tokens, before)[0], hidden, 0.0)
    once, _ = model.step(words(3, 1), after)
    model.step(words(3, 1), after)
    assert after.select(torch.tensor([], dtype=torch.int64)).lengths.tolist() == []
    assert once.shape == hidden[:, :1].shape


@every_family
def test_wrong_cuts_joins_and_tokens_are_refused(config: Config) -> None:
    model = make(config)
    _, state = model.step(words(2, 2), model.start(sources(4, 3)))
    with pytest.raises(ValueError, match="cannot cut rows of lengths"):
        state.truncate(torch.tensor([3, 1]))
    with pytest.raises(ValueError, match="at least one state"):
        DecoderState.cat([])
    with pytest.raises(ValueError, match="padding must be at the right"):
        model.start(torch.tensor([[3, PAD, EOS]]))
    with pytest.raises(ValueError, match="rdrop must be at least 0"):
        model.loss(Batch(sources(3), targets(2)), rdrop=-1.0)


@every_option
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_cross_entropy_of_the_logits(config: Config, smoothing: float) -> None:
    model = make(config)
    batch = Batch(sources(4, 6, 3), targets(5, 2, 7))
    logits = model.logits(model(batch.source, batch.target[:, :-1]))
    wanted = batch.target[:, 1:].flatten()
    options = {"ignore_index": PAD, "reduction": "sum"}
    expected = F.cross_entropy(logits.flatten(0, 1), wanted, label_smoothing=smoothing, **options)
    loss = model.loss(batch, smoothing)
    close(loss.total, expected)
    close(loss.parts["nll"], F.cross_entropy(logits.flatten(0, 1), wanted, **options))
    assert loss.count == 6 + 3 + 8
    assert set(loss.parts) == {"nll"}
    names, parameters = zip(*model.named_parameters(), strict=True)
    for name, ours, theirs in zip(
        names, torch.autograd.grad(loss.total, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        close(ours, theirs, 1e-9)
        # A bias of all keys moves all scores of a query alike, which the softmax does not see.
        assert name.endswith("key.bias") or ours.abs().max() > 1e-9, f"{name} does not matter"


@every_family
def test_rdrop_is_two_passes_in_one(config: Config) -> None:
    model = make(config.model_copy(update={"dropout": 0.3})).train()
    batch = Batch(sources(4, 6, 3), targets(5, 2, 7))
    torch.manual_seed(3)
    loss = model.loss(batch, smoothing=0.1, rdrop=2.0)
    torch.manual_seed(3)
    hidden = model(batch.source.repeat(2, 1), batch.target[:, :-1].repeat(2, 1))
    wanted = batch.target[:, 1:]
    real = wanted != PAD
    p, q = (model.logits(half)[real].log_softmax(-1) for half in hidden.chunk(2))
    entropies = [F.cross_entropy(x, wanted[real], label_smoothing=0.1, reduction="sum") for x in (p, q)]
    apart = sum(F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p))) / 2
    assert apart > 0.1
    close(loss.total, sum(entropies) / 2 + 2.0 * apart)
    close(loss.parts["rdrop"], apart)
    assert not loss.parts["rdrop"].requires_grad
    assert loss.count == int(real.sum())
    model.eval()
    close(model.loss(batch, 0.1, 2.0).total, model.loss(batch, 0.1).total)
    close(model.loss(batch, 0.1, 2.0).parts["nll"], model.loss(batch, 0.1).parts["nll"])


@every_family
def test_dropout_is_for_training_alone(config: Config) -> None:
    model = make(config.model_copy(update={"dropout": 0.5}))
    source, target = sources(5, 4), words(2, 5)
    assert torch.equal(model(source, target), model(source, target))
    model.train()
    assert not torch.equal(model(source, target), model(source, target))


@every_option
def test_bf16_trains_and_logits_stay_fp32(config: Config) -> None:
    model = make(config, torch.float32)
    batch = Batch(sources(4, 6, 3), targets(5, 2, 7))
    wide = model.loss(batch, 0.1, 0.5)
    model.precision = torch.bfloat16
    narrow = model.loss(batch, 0.1, 0.5)
    assert abs(narrow.total.item() / wide.total.item() - 1) < 0.02
    assert narrow.total.item() != wide.total.item()
    narrow.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
    with torch.no_grad():
        hidden, _ = model.step(words(3, 2), model.start(batch.source))
    assert hidden.dtype == torch.bfloat16
    assert model.logits(hidden).dtype == torch.float32


@every_family
def test_what_is_tied_is_one_parameter(config: Config) -> None:
    width = config.dim if isinstance(config, TransformerConfig) else config.embed_dim
    counts = {}
    for tie in ("all", "output", "none"):
        model = build(config.model_copy(update={"tie": tie}), TARGET, TARGET)
        counts[tie] = sum(parameter.numel() for parameter in model.parameters())
        stored = [parameter.data_ptr() for parameter in model.state_dict().values()]
        assert len(set(stored)) == len(stored)
    assert counts["output"] - counts["all"] == counts["none"] - counts["output"] == TARGET * width
    with pytest.raises(ValueError, match=f"the source has {SOURCE} words and the target {TARGET}"):
        build(config.model_copy(update={"tie": "all"}), SOURCE, TARGET)
    with pytest.raises(ValueError, match="a vocabulary needs words"):
        build(config, 0, TARGET)


@every_option
def test_parameters_follow_from_the_seed_and_take_no_memory_on_the_meta_device(config: Config) -> None:
    torch.manual_seed(5)
    one = build(config, SOURCE, TARGET).state_dict()
    torch.manual_seed(5)
    two = build(config, SOURCE, TARGET).state_dict()
    other = build(config, SOURCE, TARGET).state_dict()
    with torch.device("meta"):
        empty = build(config, SOURCE, TARGET).state_dict()
    assert list(one) == list(two) == list(empty)
    for name, value in one.items():
        assert torch.equal(value, two[name])
        assert (value.shape, value.dtype) == (empty[name].shape, empty[name].dtype)
        assert empty[name].is_meta
        if name.endswith(("weight", "embedding")) and "norm" not in name:
            assert not torch.equal(value, other[name])


@every_option
@torch.no_grad()
def test_every_look_at_the_source_is_recorded_and_changes_nothing(config: Config) -> None:
    model = make(config, torch.float32)
    source, target = sources(5, 2), words(2, 3)
    alone = model(source, target)
    assert (model.cross_attentions == ()) == (getattr(config, "attention", "") == "none")
    with weft.record(model, names=model.cross_attentions) as seen:
        observed = model(source, target)
    assert torch.equal(alone, observed)
    assert [entry.name for entry in seen] == list(model.cross_attentions)
    with weft.record(model, names=model.cross_attentions) as steps:
        _, state = model.step(target[:, :1], model.start(source))
        model.step(target[:, 1:], state)
    for name in model.cross_attentions:
        weights = seen[name].weights
        assert weights.shape[0] == 2
        assert weights.shape[2:] == (3, 5)
        close(weights.sum(-1), torch.ones(weights.shape[:3]), 1e-5)
        assert (weights[1, ..., 2:] == 0).all()
        close(torch.cat([step.weights for step in steps.calls(name)], 2), weights, 1e-5)


def test_what_is_longer_than_the_table_of_positions_is_refused() -> None:
    for config in (transformer(positions="learned", max_len=6), convolutional(max_len=6)):
        model = make(config)
        assert model.max_len == 6
        padded = F.pad(sources(6, 2), (0, 4), value=PAD)  # padding needs no place
        _, state = model.step(words(2, 6), model.start(padded))
        with pytest.raises(ValueError, match="max_len is 6"):
            model.step(words(2, 1), state)
        with pytest.raises(ValueError, match="max_len is 6"):
            model.start(sources(7, 2))
        with steady():
            model.start(sources(6, 2))
    for config in (transformer(), recurrent()):
        assert make(config).max_len is None


@every_option
@torch.no_grad()
def test_steady_mode_computes_the_same(config: Config) -> None:
    model = make(config)
    source, target = sources(5, 9, 2), words(3, 6)
    whole = model(source, target)
    with steady():
        state, parts = model.start(source), []
        for part in target.split([1, 4, 1], 1):
            hidden, state = model.step(part, state)
            parts.append(hidden)
    close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", FAMILY.values(), ids=FAMILY)
@torch.no_grad()
def test_in_steady_mode_a_row_has_the_same_logits_in_any_company(config: Config, precision: torch.dtype) -> None:
    sizes = {"dim": 24, "max_len": 100} | ({} if isinstance(config, TransformerConfig) else {"embed_dim": 20})
    model = build(config.model_copy(update=sizes), SOURCE, TARGET).eval()
    model.precision = precision
    lengths = [5, 9, 2, 17, 30, 8, 1, 65]
    source, target = sources(*lengths), words(len(lengths), 6)

    def logits(rows: list[int]) -> Tensor:
        longest, parts = max(lengths[row] for row in rows), []
        state = model.start(source[rows, :longest])
        for part in target[rows].split([1, 1, 1, 3], 1):
            hidden, state = model.step(part, state)
            parts.append(model.logits(hidden))
        return torch.cat(parts, 1)

    everyone = list(range(len(lengths)))
    with steady():
        together = logits(everyone)
        assert all(torch.equal(logits([row])[0], together[row]) for row in everyone)
        assert torch.equal(logits([4, 0, 3, 0]), together[[4, 0, 3, 0]])
    assert not all(torch.equal(logits([row])[0], logits(everyone)[row]) for row in everyone)  # else this shows nothing
