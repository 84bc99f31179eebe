"""GPT: steps, states, documents that do not leak, the loss, the start, and what is refused."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

import weft
from weft.config import BOS, PAD, GPTConfig, RopeScaling, Specials
from weft.kernels.mask import Mask
from weft.kernels.steady import steady
from weft.models.contract import Seq2Seq
from weft.models.gpt import GPT, places_of
from weft.models.state import DecoderState

WORDS = 13
LLAMA = {"norm": "rms", "activation": "swiglu", "bias": False, "positions": "rotary"}


def tiny(**options: Any) -> GPTConfig:
    sizes = {"dim": 8, "num_heads": 2, "num_layers": 2, "ffn_dim": 12, "max_len": 40, "dropout": 0.0}
    return GPTConfig(**{**sizes, **options})


OPTIONS = {
    "gpt2": tiny(activation="gelu_tanh"),
    "no biases": tiny(bias=False, tie=False),
    "llama": tiny(**LLAMA, tie=False),
    "llama grouped": tiny(**LLAMA, num_kv_heads=1, head_dim=6, attention_bias=True),
    "llama linear": tiny(**LLAMA, rope_scaling=RopeScaling(factor=4.0)),
    "llama 3": tiny(**LLAMA, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_len=16)),
    "alibi": tiny(positions="alibi"),
    "none": tiny(positions="none", activation="relu"),
}
every_option = pytest.mark.parametrize("config", OPTIONS.values(), ids=OPTIONS)
some = pytest.mark.parametrize("config", [OPTIONS["gpt2"], OPTIONS["llama grouped"]], ids=["gpt2", "llama"])


class Text(NamedTuple):
    tokens: Tensor
    segments: Tensor | None = None
    counted: Tensor | None = None


def make(config: GPTConfig, dtype: torch.dtype = torch.float64) -> GPT:
    """A model whose every parameter matters."""
    model = GPT(config, WORDS).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


def words(*shape: int) -> Tensor:
    return torch.randint(1, WORDS, shape)


def padded(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def padded_text(*lengths: int) -> Text:
    """Texts of so many tokens, of which padding does not count."""
    tokens = padded([words(length) for length in lengths])
    return Text(tokens, counted=tokens[:, 1:] != PAD)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@every_option
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@torch.no_grad()
def test_stepping_in_portions_is_the_whole_at_once(config: GPTConfig, dtype: torch.dtype, tolerance: float) -> None:
    model = make(config, dtype)
    searched: Seq2Seq = model  # as every search sees it
    assert searched.cross_attentions == ()
    tokens = words(3, 12)
    whole = model(tokens)
    for prompt, portions in ((1, [1] * 12), (5, [8]), (12, [1]), (3, [2, 1, 7])):
        state, parts = model.start(tokens[:, :prompt]), []
        assert state.lengths.tolist() == [prompt - 1] * 3
        for part in tokens[:, prompt - 1 :].split(portions, 1):
            hidden, state = model.step(part, state)
            parts.append(hidden)
        close(torch.cat(parts, 1), whole[:, prompt - 1 :], tolerance)


@every_option
@torch.no_grad()
def test_no_position_sees_the_future_and_all_see_the_past(config: GPTConfig) -> None:
    model, tokens = make(config), words(2, 6)
    hidden = model(tokens)
    close(model(tokens, Mask(lengths=torch.tensor([6, 6]))), hidden)  # a mask comes on top of causality
    for place in range(6):
        other = tokens.clone()
        other[:, place] = 1 + tokens[:, place] % (WORDS - 1)
        changed = (model(other) - hidden).abs().amax(-1) > 1e-12
        assert not changed[:, :place].any()
        assert changed[:, place:].all()


@every_option
@torch.no_grad()
def test_states_after_any_selection_cut_and_join(config: GPTConfig) -> None:
    """A walk: whatever was done to a state, each row goes on as if it had been alone and untouched."""
    model, rng = make(config), random.Random(0)

    def begin(*lengths: int) -> tuple[DecoderState, list[Tensor]]:
        """A state, and what each of its rows has consumed."""
        prompts = [words(length) for length in lengths]
        return model.start(padded(prompts)), [prompt[:-1] for prompt in prompts]

    state, rows = begin(5, 1)
    for _ in range(14):
        match rng.choice(["step", "step", "select", "truncate", "cat"]):
            case "step":
                tokens = words(len(rows), rng.choice([1, 1, 3]))
                hidden, state = model.step(tokens, state)
                rows = [torch.cat([row, new]) for row, new in zip(rows, tokens, strict=True)]
                for found, row in zip(hidden, rows, strict=True):
                    close(found, model(row[None])[0, len(row) - tokens.shape[1] :])
            case "select":
                chosen = [rng.randrange(len(rows)) for _ in range(rng.randint(1, 4))]
                state, rows = state.select(torch.tensor(chosen)), [rows[i] for i in chosen]
            case "truncate":
                lengths = [rng.randint(0, len(row)) for row in rows]
                state = state.truncate(torch.tensor(lengths))
                rows = [row[:length] for row, length in zip(rows, lengths, strict=True)]
            case "cat":
                other, others = begin(*rng.sample(range(1, 9), 2))
                state, rows = DecoderState.cat([other, state]), others + rows
        assert state.lengths.tolist() == [len(row) for row in rows]
    assert state.select(torch.tensor([], dtype=torch.int64)).lengths.tolist() == []


@some
@torch.no_grad()
def test_a_state_is_a_value(config: GPTConfig) -> None:
    model = make(config)
    before, tokens = model.start(padded([words(4), words(2)])), words(2, 2)
    hidden, after = model.step(tokens, before)
    model.step(words(2, 2), before)
    model.step(words(2, 1), after.truncate(torch.tensor([1, 3])))
    assert (before.lengths.tolist(), after.lengths.tolist()) == ([3, 1], [5, 3])
    close(model.step(tokens, before)[0], hidden, 0.0)


@some
@torch.no_grad()
def test_a_word_may_have_the_number_of_padding(config: GPTConfig) -> None:
    """Published vocabularies have words at 0."""
    model = make(config)
    prompt = torch.tensor([[4, PAD, 5, PAD], [PAD, PAD, -1, -1]])
    with pytest.raises(ValueError, match="padding must be at the right"):
        model.start(prompt)
    model.specials = Specials(pad=-1)
    assert model.first(prompt).tolist() == [PAD, PAD]
    hidden, _ = model.step(model.first(prompt)[:, None], model.start(prompt))
    close(hidden[0], model(prompt[:1, :4])[0, -1:])
    close(hidden[1], model(prompt[1:, :2])[0, -1:])
    tokens = torch.tensor([[4, PAD, 5, PAD, 9, 9]])
    one = torch.zeros_like(tokens)
    assert model.loss(Text(tokens, one)).count == model.loss(Text(tokens)).count == 5
    one[:, 4:] = -1
    assert model.loss(Text(tokens, one)).count == 3
    assert model.loss(Text(tokens, one, torch.tensor([[True, False, True, True, True]]))).count == 2


@every_option
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_cross_entropy_of_the_logits(config: GPTConfig, smoothing: float) -> None:
    model = make(config)
    batch = padded_text(5, 9, 2)
    logits = model.logits(model(batch.tokens[:, :-1])).flatten(0, 1)
    wanted = batch.tokens[:, 1:].flatten()
    expected = F.cross_entropy(logits, wanted, ignore_index=PAD, reduction="sum", label_smoothing=smoothing)
    loss = model.loss(batch, smoothing)
    close(loss.total, expected)
    close(loss.parts["nll"], F.cross_entropy(logits, wanted, ignore_index=PAD, reduction="sum"))
    assert (loss.count, set(loss.parts)) == (4 + 8 + 1, {"nll"})
    names, parameters = zip(*model.named_parameters(), strict=True)
    both = [torch.autograd.grad(total, parameters) for total in (loss.total, expected)]
    for name, ours, theirs in zip(names, *both, strict=True):
        close(ours, theirs, 1e-9)
        # A bias of all keys moves all scores of a query alike, which the softmax does not see (rotation undoes that).
        silent = name.endswith("key.bias") and config.positions != "rotary"
        assert silent or ours.abs().max() > 1e-9, f"{name} does not matter"


@every_option
def test_packed_documents_are_each_as_alone(config: GPTConfig) -> None:
    model = make(config)
    rows = [[words(4), words(1), words(6)], [words(5), words(6)], [words(3), words(4)]]
    tokens = padded([torch.cat(row) for row in rows])
    segments = torch.full_like(tokens, -1)
    for row, documents in zip(segments, rows, strict=True):
        numbers = torch.arange(len(documents)) + 7
        row[: sum(map(len, documents))] = numbers.repeat_interleave(torch.tensor([len(one) for one in documents]))
    hidden = model(tokens, Mask(causal=True, segments=segments), places_of(segments))
    for row, documents in zip(hidden, rows, strict=True):
        begins = [sum(map(len, documents[:i])) for i in range(len(documents))]
        for begin, document in zip(begins, documents, strict=True):
            close(row[begin : begin + len(document)], model(document[None])[0])
    alone = [model.loss(Text(document[None])) for row in rows for document in row if len(document) > 1]
    loss = model.loss(Text(tokens, segments))
    assert loss.count == sum(one.count for one in alone) == 3 + 5 + 4 + 5 + 2 + 3
    close(loss.total, sum(one.total for one in alone))
    text = words(2, 6)
    one = torch.tensor([[4], [0]]).expand(2, 6)  # one document a row: as without segments
    close(model.loss(Text(text, one)).total, model.loss(Text(text)).total, 0.0)


def test_places_start_again_in_each_document() -> None:
    segments = torch.tensor([[3, 3, 3, 5, 5, 3, -1], [0, 1, 2, 2, 2, 2, 2]])
    assert places_of(segments).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 0, 1, 2, 3, 4]]
    assert places_of(segments[:, :0]).shape == (2, 0)


@some
def test_rdrop_is_two_passes_and_how_far_they_are_apart(config: GPTConfig) -> None:
    model = make(config.model_copy(update={"dropout": 0.3})).train()
    batch = padded_text(6, 4)
    tokens, real = batch.tokens, batch.counted
    torch.manual_seed(3)
    loss = model.loss(batch, smoothing=0.1, rdrop=2.0)
    torch.manual_seed(3)
    p, q = (model.logits(model(tokens[:, :-1]))[real].log_softmax(-1) for _ in range(2))
    entropies = [F.cross_entropy(x, tokens[:, 1:][real], label_smoothing=0.1, reduction="sum") for x in (p, q)]
    apart = sum(F.kl_div(a, b, reduction="sum", log_target=True) for a, b in ((p, q), (q, p))) / 2
    assert apart > 0.1
    close(loss.total, sum(entropies) / 2 + 2.0 * apart)
    close(loss.parts["rdrop"], apart)
    assert loss.count == 5 + 3
    model.eval()
    close(model.loss(batch, 0.1, 2.0).total, model.loss(batch, 0.1).total)
    close(model.loss(batch, 0.1, 2.0).parts["nll"], model.loss(batch).total)


@pytest.mark.parametrize("place", ["dropout", "attention_dropout"])
def test_dropout_is_for_training_alone(place: str) -> None:
    rates = {"dropout": 0.0, "attention_dropout": 0.0} | {place: 0.5}
    model, tokens = make(tiny(**rates)), words(2, 5)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    assert GPT(tiny(dropout=0.3), WORDS).blocks[1].attention.dropout == 0.3


@every_option
def test_bf16_trains_and_logits_stay_fp32(config: GPTConfig) -> None:
    model = make(config, torch.float32)
    batch = Text(words(4, 9), torch.arange(9)[None].repeat(4, 1) // 5)
    wide = model.loss(batch, 0.1)
    model.precision = torch.bfloat16
    narrow = model.loss(batch, 0.1)
    assert 0 < abs(narrow.total.item() / wide.total.item() - 1) < 0.03
    narrow.total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
    with torch.no_grad():
        state = DecoderState.cat([model.start(words(1, 1)), model.start(words(2, 5))])
        hidden, _ = model.step(words(3, 2), state)
    assert hidden.dtype == torch.bfloat16
    assert model.logits(hidden).dtype == torch.float32


def test_parameters_start_as_in_gpt2() -> None:
    torch.manual_seed(5)
    model = GPT(GPTConfig(dim=64, num_heads=2, num_layers=8, ffn_dim=256, tie=False), 500)
    torch.manual_seed(5)
    again = GPT(GPTConfig(dim=64, num_heads=2, num_layers=8, ffn_dim=256, tie=False), 500)
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)
        if "norm" in name:
            assert (parameter == float(name.endswith("weight"))).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            residual = name.endswith(("output.weight", "outer.weight"))
            expected = 0.02 / math.sqrt(16) if residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < expected / 10


@pytest.mark.parametrize(
    ("config", "words", "parameters"),
    [
        (GPTConfig(dim=768, num_heads=12, num_layers=12, ffn_dim=3072, max_len=1024), 50_257, 124_439_808),
        (GPTConfig(**LLAMA, dim=4096, num_heads=32, num_layers=32, ffn_dim=11008, tie=False), 32_000, 6_738_415_616),
        (
            GPTConfig(**LLAMA, dim=4096, num_heads=32, num_kv_heads=8, num_layers=32, ffn_dim=14336, tie=False),
            128_256,
            8_030_261_248,
        ),
    ],
    ids=["GPT-2", "Llama 2 7B", "Llama 3 8B"],
)
def test_published_sizes(config: GPTConfig, words: int, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(config, words)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert all(tensor.is_meta for tensor in model.state_dict().values())


@every_option
@torch.no_grad()
def test_steady_mode_computes_the_same(config: GPTConfig) -> None:
    model, tokens = make(config), words(3, 9)
    whole = model(tokens)
    with steady():
        state, parts = model.start(tokens[:, :4]), []
        for part in tokens[:, 3:].split([1, 4, 1], 1):
            hidden, state = model.step(part, state)
            parts.append(hidden)
        close(model(tokens), whole)
    close(torch.cat(parts, 1), whole[:, 3:])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama grouped", "alibi"])
@torch.no_grad()
def test_in_steady_mode_a_prompt_has_the_same_logits_in_any_company(name: str, precision: torch.dtype) -> None:
    model = GPT(OPTIONS[name].model_copy(update={"dim": 24, "max_len": 90}), WORDS).eval()
    model.precision = precision
    lengths = [5, 9, 2, 17, 30, 1, 3, 65]
    prompts, more = [words(length) for length in lengths], words(len(lengths), 5)

    def logits(rows: list[int]) -> Tensor:
        state, parts = model.start(padded([prompts[row] for row in rows])), []
        last = torch.stack([prompts[row][-1:] for row in rows])
        for part in (last, *more[rows].split([1, 1, 3], 1)):
            hidden, state = model.step(part, state)
            parts.append(model.logits(hidden))
        return torch.cat(parts, 1)

    everyone = list(range(len(lengths)))
    with steady():
        together = logits(everyone)
        assert all(torch.equal(logits([row])[0], together[row]) for row in everyone)
        assert torch.equal(logits([4, 0, 2, 0]), together[[4, 0, 2, 0]])


@every_option
@torch.no_grad()
def test_attention_is_recorded_and_changes_nothing(config: GPTConfig) -> None:
    model, tokens = make(config, torch.float32), words(2, 5)
    alone = model(tokens)
    with weft.record(model) as seen:
        observed = model(tokens)
    assert torch.equal(alone, observed)
    assert [entry.name for entry in seen] == ["blocks.0.attention", "blocks.1.attention"]
    weights = seen["blocks.1.attention"].weights
    assert weights.shape == (2, 2, 5, 5)
    assert (weights.triu(1) == 0).all()
    close(weights.sum(-1), torch.ones(2, 2, 5), 1e-5)


@torch.no_grad()
def test_positions_tell_order() -> None:
    """Without positions a token at the end sees a set; with them it does not."""
    for name, config in OPTIONS.items():
        model, tokens = make(config.model_copy(update={"num_layers": 1})), torch.tensor([[5, 6, 7, 8]])
        turned = tokens[:, [1, 0, 2, 3]]
        same = torch.allclose(model(tokens)[:, -1], model(turned)[:, -1], rtol=0, atol=1e-12)
        assert same == (name == "none"), name


def test_the_longest_text() -> None:
    model = make(tiny(max_len=6))
    assert model.max_len == 6
    _, state = model.step(words(2, 1), model.start(F.pad(words(2, 6), (0, 3), value=PAD)))  # padding needs no place
    for refused in (
        lambda: model.step(words(2, 1), state),
        lambda: model(words(1, 7)),
        lambda: model.start(words(1, 8)),
    ):
        with pytest.raises(ValueError, match="max_len is 6"):
            refused()
    assert make(tiny(**LLAMA)).max_len == 40
    assert make(tiny(positions="alibi")).max_len is make(tiny(positions="none")).max_len is None


def test_what_does_not_fit_is_refused() -> None:
    model = make(tiny())
    with pytest.raises(ValueError, match="needs words"):
        GPT(tiny(), 0)
    with pytest.raises(ValueError, match="row 1 has none: an empty text begins with BOS"):
        model.start(torch.tensor([[BOS, 5], [PAD, PAD]]))
    with pytest.raises(ValueError, match="rdrop must be at least 0"):
        model.loss(Text(words(1, 3)), rdrop=-1.0)
    with pytest.raises(ValueError, match=r"segments must be \[1, 3\]"):
        model.loss(Text(words(1, 3), words(1, 2)))
    with pytest.raises(ValueError, match=r"counted must be \[1, 2\] of bool"):
        model.loss(Text(words(1, 3), counted=words(1, 3) > 0))
    with pytest.raises(ValueError, match="do not fit"):
        model(words(2, 3), places=words(3, 3))
    assert model.start(words(0, 3)).lengths.tolist() == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "8 is not one of 3"),
        ({"num_heads": 4, "num_kv_heads": 3}, "4 is not one of 3"),
        ({"positions": "rotary", "head_dim": 5}, "head_dim must be even, not 5"),
        ({"rope_scaling": RopeScaling(factor=2.0)}, "for rotary positions, not for 'learned'"),
        ({"rope_scaling": {"factor": 0.5}, "positions": "rotary"}, "greater than or equal to 1"),
        ({"rope_scaling": {"low_freq_factor": 4.0}, "positions": "rotary"}, "less than high_freq_factor"),
        ({"positions": "sinusoidal"}, "learned"),
        ({"tie": "all"}, "boolean"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        tiny(**options)


@pytest.mark.parametrize("name", ["gpt2", "llama grouped"])
def test_it_learns_to_repeat_what_it_read(name: str) -> None:
    model = GPT(OPTIONS[name].model_copy(update={"dim": 32, "ffn_dim": 64}), WORDS)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        half = words(32, 5)
        loss = model.loss(Text(torch.cat([half, half], 1)))
        optimiser.zero_grad()
        (loss.total / loss.count).backward()
        optimiser.step()
    model.eval()
    half = words(16, 5)
    state, last, said = model.start(half), half[:, -1:], []
    with torch.no_grad():
        for _ in range(5):
            hidden, state = model.step(last, state)
            last = model.logits(hidden[:, -1]).argmax(-1, keepdim=True)
            said.append(last)
    assert (torch.cat(said, 1) == half).float().mean() > 0.9
