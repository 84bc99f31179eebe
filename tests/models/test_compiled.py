"""The compiled Transformer against the model itself: every configuration, states, the best tokens, what it leaves."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.config import BOS, EOS, PAD, GPTConfig, TrainingConfig, TransformerConfig
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.rules import Rules
from weft.decoding.score import score
from weft.kernels import native
from weft.kernels.plain import plain
from weft.models.compiled import Compiled, compiled, is_compiled
from weft.models.gpt import GPT
from weft.models.slots import CompiledState
from weft.models.state import DecoderState
from weft.models.transformer import Transformer
from weft.training.optim import Optimizer

WORDS = 37
SHORT = SearchOptions(beam=3, n_best=2, max_ratio=0.0, max_extra=6)


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if native.library() is None:
        pytest.skip(f"nothing is compiled here: {native.why_not()}")


def made(words: int = WORDS, **options: Any) -> Transformer:
    """A new model whose biases and norms are not the 0 and 1 that they start at."""
    sizes = {"dim": 16, "num_heads": 4, "ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.1}
    model = Transformer(TransformerConfig(**{**sizes, **options}), words, words).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def table(model: Transformer) -> Tensor:
    assert model.target_embedding is not None
    return model.target_embedding


def fast(model: nn.Module) -> Compiled:
    found = compiled(model)
    assert found is not None
    return found


def sources(*lengths: int, words: int = WORDS) -> Tensor:
    """Tokens and EOS; lengths count it, and 0 is nothing but padding."""
    rows = [torch.cat([torch.randint(4, words, (length,))[1:], torch.tensor([EOS])])[:length] for length in lengths]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def some(rows: int, count: int, words: int = WORDS) -> Tensor:
    return torch.randint(0, words, (rows, count))


def close(mine: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(mine, theirs, rtol=0.0, atol=tolerance)


def tokens_of(found: list[list[Hypothesis]]) -> list[list[tuple[int, ...]]]:
    return [[h.tokens for h in each] for each in found]


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm_first": False},
    "rms": {"norm": "rms"},
    "rms, post-norm": {"norm": "rms", "norm_first": False},
    **{activation: {"activation": activation} for activation in ("relu", "gelu", "gelu_tanh", "swiglu")},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1, "norm_first": False},
    "no biases": {"bias": False},
    "no biases, rms, swiglu": {"bias": False, "norm": "rms", "activation": "swiglu"},
    **{f"tie {tie}": {"tie": tie} for tie in ("all", "output", "none")},
    **{positions: {"positions": positions} for positions in ("sinusoidal", "order", "none", "rotary")},
    "rotary heads in groups": {
        "positions": "rotary",
        "dim": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "norm_first": False,
    },
    "rotary wide heads": {"positions": "rotary", "dim": 64, "num_heads": 2},
    "learned": {"positions": "learned", "max_len": 12},
    "odd sizes": {"dim": 20, "num_heads": 2, "ffn_dim": 27},
    "odder": {"dim": 21, "num_heads": 3, "ffn_dim": 5, "positions": "none", "activation": "swiglu"},
    "least": {"dim": 2, "num_heads": 1, "ffn_dim": 1, "encoder_layers": 1, "decoder_layers": 1, "norm_first": False},
    "wide": {"dim": 96, "num_heads": 3, "ffn_dim": 200, "activation": "gelu", "encoder_layers": 1},
    **{f"heads of {size}": {"dim": 2 * size, "num_heads": 2} for size in (8, 12, 16, 24, 32, 64)},
    "a head of 128, grouped": {"dim": 256, "num_heads": 2, "num_kv_heads": 1, "encoder_layers": 1, "decoder_layers": 1},
    "unequal stacks": {"encoder_layers": 1, "decoder_layers": 3},
}
ALL = pytest.mark.parametrize("options", CONFIGURATIONS.values(), ids=CONFIGURATIONS)


@ALL
def test_hidden_and_logits_are_the_models_own_in_any_portions(options: dict[str, Any]) -> None:
    model = made(**options)
    mine, source, target = fast(model), sources(7, 4, 12, 1), some(4, 11)
    theirs = model(source, target)
    for portions in ([1] * 11, [11], [3, 1, 5, 2]):
        state, parts = mine.start(source), []
        for part in target.split(portions, 1):
            hidden, state = mine.step(part, state)
            parts.append(hidden)
        close(torch.cat(parts, 1), theirs)
        assert state.lengths.tolist() == [11] * 4
    close(mine.logits(theirs), model.logits(theirs))


def test_long_sources_and_targets() -> None:
    model = made(dim=32, num_heads=2)
    source, target = sources(150, 1, 77), some(3, 130)
    hidden, _ = fast(model).step(target, fast(model).start(source))
    close(hidden, model(source, target))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "swiglu"])
def test_large_numbers_on_the_way(activation: str) -> None:
    """Activations and attention where their exponentials would overflow."""
    model = made(activation=activation)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("query", "key", "inner", "gate")):
            parameter.mul_(300.0)
    source, target = sources(7, 4), some(2, 6)
    hidden, _ = fast(model).step(target, fast(model).start(source))
    assert bool(hidden.isfinite().all())
    close(hidden, model.double()(source, target).float(), 1e-3)


def test_two_vocabularies_of_different_sizes() -> None:
    config = TransformerConfig(dim=16, num_heads=2, ffn_dim=24, encoder_layers=1, decoder_layers=1, tie="none")
    model = Transformer(config, 51, 9).eval().requires_grad_(False)
    source, target = sources(5, 8, words=51), some(2, 6, 9)
    hidden, _ = fast(model).step(target, fast(model).start(source))
    close(hidden, model(source, target))
    assert fast(model).vocab_size == 9
    close(fast(model).logits(hidden), model.logits(hidden))


def test_a_bias_of_the_output_counts() -> None:
    model = made(tie="all")
    model.output_bias = nn.Parameter(torch.randn(WORDS), requires_grad=False)
    hidden = torch.randn(3, 16)
    close(fast(model).logits(hidden), model.logits(hidden))


def test_a_source_of_nothing_but_padding_is_attended_to_nowhere() -> None:
    model = made()
    source, target = sources(4, 0, 6), some(3, 5)
    hidden, _ = fast(model).step(target, fast(model).start(source))
    close(hidden, model.step(target, model.start(source))[0])


def test_an_empty_batch_has_no_rows() -> None:
    model = made()
    mine = fast(model)
    state = mine.start(torch.zeros(0, 5, dtype=torch.int64))
    for count in (1, 4):
        hidden, state = mine.step(torch.zeros(0, count, dtype=torch.int64), state)
        assert hidden.shape == (0, count, 16)
    assert mine.logits(hidden).shape == (0, 4, WORDS)
    assert [part.shape for part in mine.best(hidden[:, 0], 3, [])] == [(0, 3), (0, 3)]
    assert mine.search(torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), [], 4) == []


def test_a_state_of_which_no_row_was_chosen_is_joined_like_any_other() -> None:
    model = made()
    mine, source, token, none = fast(model), sources(4, 6), some(2, 1), torch.zeros(0, dtype=torch.int64)
    _, other = mine.step(some(1, 3), mine.start(sources(5)))
    expected, _ = mine.step(token, mine.start(source))
    for states in ([other.select(none), mine.start(source)], [mine.start(source), other.select(none)]):
        assert torch.equal(mine.step(token, CompiledState.cat(states))[0], expected)


def test_a_padding_token_before_a_real_one_is_refused() -> None:
    with pytest.raises(ValueError, match="padding"):
        fast(made()).start(torch.tensor([[5, PAD, 6]]))


class Walk:
    """Pairs of states, the compiled one and the model's own, that are stepped, chosen, cut back and joined alike."""

    def __init__(self, model: Transformer, seed: int) -> None:
        self.model, self.mine, self.draw = model, fast(model), random.Random(seed)
        self.pairs: list[tuple[CompiledState, DecoderState]] = []
        self.moved = 0

    def begin(self) -> tuple[CompiledState, DecoderState]:
        source = sources(*(self.draw.randint(1, 9) for _ in range(self.draw.randint(1, 4))))
        return self.mine.start(source), self.model.start(source)

    def step(self, mine: CompiledState, theirs: DecoderState) -> tuple[CompiledState, DecoderState]:
        tokens = some(len(mine.lengths), self.draw.choice([1, 1, 2, 5]))
        hidden, after = self.mine.step(tokens, mine)
        expected, theirs = self.model.step(tokens, theirs)
        close(hidden, expected)
        self.moved += after.slots is not mine.slots
        return after, theirs

    def select(self, mine: CompiledState, theirs: DecoderState) -> tuple[CompiledState, DecoderState]:
        rows = torch.tensor([self.draw.randrange(len(mine.lengths)) for _ in range(self.draw.randint(1, 5))])
        return mine.select(rows), theirs.select(rows)

    def truncate(self, mine: CompiledState, theirs: DecoderState) -> tuple[CompiledState, DecoderState]:
        lengths = torch.tensor([self.draw.randint(length // 2, length) for length in mine.lengths.tolist()])
        return mine.truncate(lengths), theirs.truncate(lengths)

    def cat(self, mine: CompiledState, theirs: DecoderState) -> tuple[CompiledState, DecoderState]:
        other = self.draw.choice(self.pairs)
        return CompiledState.cat([mine, other[0]]), DecoderState.cat([theirs, other[1]])

    def go_on(self) -> None:
        """One more pair, made of one that stays as it is."""
        ways = [self.step] * 6 + [self.select, self.truncate, self.cat]
        pair = self.draw.choice(ways)(*self.draw.choice(self.pairs)) if self.pairs else self.begin()
        if len(pair[0].lengths) > 8:
            pair = self.select(*pair)
        assert torch.equal(pair[0].lengths, pair[1].lengths)
        self.pairs.append(pair if int(pair[0].lengths.max()) < 40 else self.begin())
        if len(self.pairs) > 6:
            self.pairs.pop(self.draw.randrange(len(self.pairs)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "norm_first": False}], ids=["pre-norm", "grouped"])
def test_states_are_values_whatever_becomes_of_them(seed: int, options: dict[str, Any]) -> None:
    walk = Walk(made(**options), seed)
    for _ in range(120):
        walk.go_on()
    assert walk.moved > 10  # slots ran out many times


def test_who_holds_a_state_does_not_see_others_step() -> None:
    mine, source = fast(made()), sources(4, 7)
    _, state = mine.step(some(2, 3), mine.start(source))
    token = some(2, 1)
    expected, _ = mine.step(token, state)
    for _ in range(50):
        mine.step(some(2, 2), state.truncate(torch.tensor([1, 2])))
        mine.step(some(4, 1), state.select(torch.tensor([1, 1, 0, 1])))
    assert torch.equal(mine.step(token, state)[0], expected)
    assert state.lengths.tolist() == [3, 3]


def test_a_state_says_what_is_wrong() -> None:
    mine = fast(made())
    _, state = mine.step(some(2, 3), mine.start(sources(4, 7)))
    for lengths in ([4, 0], [0, -1]):
        with pytest.raises(ValueError, match=r"rows of \[3, 3\] tokens cannot be cut back"):
            state.truncate(torch.tensor(lengths))
    with pytest.raises(ValueError, match="at least one state"):
        CompiledState.cat([])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_has_the_same_bits_in_any_company(threads: int) -> None:
    model = made(dim=32, num_heads=2)
    mine, lengths = fast(model), [random.Random(1).randint(1, 30) for _ in range(60)]
    source, target = sources(*lengths), some(60, 4)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        whole, state = mine.step(target[:, :3], mine.start(source))
        last, _ = mine.step(target[:, 3:], state)
        best = mine.best(last[:, 0], 5, [PAD])
    finally:
        torch.set_num_threads(before)
    for row in (0, 17, 59):
        alone, own = mine.step(target[row : row + 1, :3], mine.start(source[row : row + 1]))
        assert torch.equal(alone, whole[row : row + 1])
        alone, _ = mine.step(target[row : row + 1, 3:], own)
        assert torch.equal(alone, last[row : row + 1])
        for part, parts in zip(mine.best(alone[:, 0], 5, [PAD]), best, strict=True):
            assert torch.equal(part[0], parts[row])


def ranked(logits: Tensor, k: int, never: list[int]) -> tuple[Tensor, Tensor]:
    """What ``best`` should give: in fp64, of equals the lowest number first, −∞ where nothing is left."""
    log_probs = logits.double().log_softmax(-1)
    log_probs[:, never] = float("-inf")
    values, tokens = log_probs.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], tokens[:, :k]


@pytest.mark.parametrize("words", [5, WORDS, 3000])
@pytest.mark.parametrize("k", [1, 4, 10, 3000])
@pytest.mark.parametrize("never", [[], [PAD, BOS], list(range(0, 5000, 3))], ids=["all", "some", "a third"])
def test_the_best_are_those_of_a_sorted_softmax(words: int, k: int, never: list[int]) -> None:
    model = made(words, tie="none")
    assert model.output_weight is not None
    model.output_weight.mul_(4.0)
    mine, hidden = fast(model), torch.randn(19, 16)
    k, never = min(k, words), [token for token in never if token < words]
    values, tokens = mine.best(hidden, k, never)
    expected, order = ranked(mine.logits(hidden), k, never)
    open_ones = expected > float("-inf")
    close(values[open_ones].double(), expected[open_ones])
    assert torch.equal(tokens[open_ones], order[open_ones])
    assert bool((values[~open_ones] == float("-inf")).all())
    assert open_ones.sum().item() == 19 * min(k, words - len(never))


@pytest.mark.parametrize("rows", [1, 7, 47, 61, 64, 97, 128, 200, 333])
def test_the_best_of_many_rows_and_words_are_those_of_each_row_alone(rows: int) -> None:
    mine = fast(made(2731))
    hidden = torch.randn(rows, 16)
    values, tokens = mine.best(hidden, 7, [0])
    expected, order = ranked(mine.logits(hidden), 7, [0])
    close(values.double(), expected)
    assert torch.equal(tokens, order)
    for row in range(0, rows, 13):
        alone = mine.best(hidden[row : row + 1], 7, [0])
        assert torch.equal(values[row], alone[0][0])
        assert torch.equal(tokens[row], alone[1][0])


@pytest.mark.parametrize("k", [1, 3, 8, 20, 40])
def test_of_equals_the_lowest_number_comes_first(k: int) -> None:
    model = made(3000, tie="none")
    assert model.output_weight is not None
    chosen = torch.randint(0, 8, (3000,))  # eight logits for all words
    model.output_weight.copy_(torch.randn(8, 16)[chosen])
    mine, hidden = fast(model), torch.randn(5, 16)
    assert len(mine.logits(hidden)[0].unique()) == 8
    expected, order = ranked(mine.logits(hidden), k, [7])
    values, tokens = mine.best(hidden, k, [7])
    assert torch.equal(tokens, order)
    close(values.double(), expected)
    model.output_weight.zero_()
    assert fast(model).best(hidden, k, [0, 2])[1][0].tolist() == [1, *range(3, k + 2)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 20, 2999])
def test_logits_that_are_no_numbers_are_told(value: float, place: int) -> None:
    model = made(3000, tie="none")
    assert model.output_weight is not None
    model.output_weight[place] = value
    mine = fast(model)
    assert bool(mine.best(torch.ones(2, 16), 3, [])[0].isnan().all())


NO_NUMBERS = "^the model's logits are not finite numbers: its parameters may be damaged$"


@pytest.mark.parametrize("name", ["target_embedding", "encoder.0.attention.query.weight", "decoder_norm.bias"])
def test_damaged_parameters_are_told_by_every_search(name: str) -> None:
    model, source = made(), sources(4, 6)
    dict(model.named_parameters())[name].view(-1)[-1] = float("nan")
    for search in (greedy, beam):
        with pytest.raises(ValueError, match=NO_NUMBERS):
            search(model, source, SHORT)
    with pytest.raises(ValueError, match=NO_NUMBERS):
        score(model, source, [[5], [6, 7]])


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_damage_to_any_parameter_is_told(activation: str, norm: str) -> None:
    model, source = made(activation=activation, norm=norm, encoder_layers=1, decoder_layers=1), sources(4, 6)
    told = {}
    for name, parameter in model.named_parameters():
        kept = parameter.clone()
        parameter.view(-1)[-1] = float("nan")
        mine = fast(model)
        hidden, _ = mine.step(source, mine.start(source))
        told[name] = bool(mine.best(hidden[:, -1], 1, [])[0].isnan().all())
        parameter.copy_(kept)
    assert [name for name, found in told.items() if not found] == []


@pytest.mark.parametrize("whole", [False, True], ids=["by steps", "whole"])
def test_one_damaged_row_of_a_beam_is_told(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = made(tie="none"), sources(6)
    options = SearchOptions(beam=4, n_best=4, max_ratio=0.0, max_extra=1, min_len=1)
    third = beam(model, source, options)[0][2].tokens[0]
    if not whole:
        monkeypatch.setattr(Rules, "searched", lambda *_: None)
    table(model)[third] = float("nan")  # which only the rows that go on from it read
    with pytest.raises(ValueError, match=NO_NUMBERS):
        beam(model, source, SearchOptions(beam=4, max_ratio=0.0, max_extra=3, min_len=3))


UNKNOWN: dict[str, dict[str, Any]] = {
    **{name: {"positions": name} for name in ("t5", "alibi", "shaw", "fraction")},
    "qk_norm": {"qk_norm": True},
}


@pytest.mark.parametrize("options", UNKNOWN.values(), ids=UNKNOWN)
def test_what_it_does_not_know_runs_in_torch(options: dict[str, Any]) -> None:
    model = made(**options)
    assert compiled(model) is None
    assert not is_compiled(model)
    assert all(len(each) == 2 for each in beam(model, sources(4, 6), SHORT))


def test_other_precisions_and_families_run_in_torch() -> None:
    narrow, double = made(), made().double()
    narrow.precision = torch.bfloat16
    config = GPTConfig(dim=16, num_heads=2, ffn_dim=24, num_layers=1, max_len=32)
    gpt = GPT(config, WORDS).eval()
    models: list[Any] = [narrow, double, gpt]
    for model in models:
        assert compiled(model) is None
        assert not is_compiled(model)
        assert all(h.tokens for each in greedy(model, sources(4, 6), SearchOptions(min_len=1)) for h in each)
    assert compiled(None) is None


def test_a_known_model_is_packed_once() -> None:
    model, other = made(), made()
    assert is_compiled(model)
    assert fast(model) is fast(model)
    assert fast(other) is not fast(model)
    with plain():
        assert compiled(model) is None
    assert isinstance(compiled(model), Compiled)


def in_place(model: Transformer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)


def loaded(model: Transformer) -> None:
    model.load_state_dict({name: 1.3 * tensor for name, tensor in model.state_dict().items()})


def assigned(model: Transformer) -> None:
    model.load_state_dict({name: 1.3 * tensor for name, tensor in model.state_dict().items()}, assign=True)


def one_number(model: Transformer) -> None:
    with torch.no_grad():
        table(model)[5, 3] += 9.0


def learn(model: Transformer) -> None:
    hidden = model.requires_grad_()(sources(4, 6), some(2, 5))
    model.logits(hidden).square().mean().backward()


def torchs_optimizer(model: Transformer) -> None:
    learn(model)
    torch.optim.Adam(model.parameters(), 0.1).step()


def torchs_fused_optimizer(model: Transformer) -> None:
    learn(model)
    torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()


def own_optimizer(model: Transformer) -> None:
    learn(model)
    Optimizer(model, TrainingConfig(learning_rate=0.1, warmup=0)).step(1)


def data(model: Transformer) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.3)


def replaced(model: Transformer) -> None:
    model.encoder[0] = made().encoder[0]


CHANGES = [
    in_place,
    loaded,
    assigned,
    one_number,
    torchs_optimizer,
    torchs_fused_optimizer,
    own_optimizer,
    data,
    replaced,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: str(each.__name__))
def test_what_was_packed_is_never_older_than_the_parameters(change: Callable[[Transformer], None]) -> None:
    model, source, target = made(), sources(4, 6), some(2, 5)
    before, _ = fast(model).step(target, fast(model).start(source))
    change(model)
    model.requires_grad_(False)
    expected = model(source, target)
    assert (expected - before).abs().max() > 1e-3
    close(fast(model).step(target, fast(model).start(source))[0], expected)


def test_a_model_that_nobody_needs_any_more_is_gone() -> None:
    model = made()
    greedy(model, sources(4), SHORT)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("search", [greedy, beam])
def test_who_records_hears_the_model_itself_and_gets_the_same_tokens(search: Callable[..., Any]) -> None:
    model, source = made(), sources(4, 6, 5)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.mul_(2.0)  # so that no two candidates are close
    before = search(model, source, SHORT)
    with weft.record(model) as seen:
        assert compiled(model) is None
        heard = search(model, source, SHORT)
    assert tokens_of(heard) == tokens_of(before)
    assert seen["decoder.1.cross_attention"].weights.shape[:2] == (3, 4)
    assert search(model, source, SHORT) == before


@pytest.mark.parametrize("token", [WORDS, WORDS + 10**6, 2**31, -1, -(2**40)])
def test_a_number_that_is_no_word_is_refused(token: int) -> None:
    model, good = made(), sources(4, 6)
    mine, bad = fast(model), sources(4, 6)
    bad[1, 2] = token
    for call in (mine.start, lambda source: greedy(model, source), lambda source: beam(model, source)):
        with pytest.raises(IndexError, match=f"token {token} is not in the source vocabulary of {WORDS}"):
            call(bad)
    with pytest.raises(IndexError, match=f"token {token} is not in the target vocabulary of {WORDS}"):
        mine.step(torch.tensor([[5, 6], [token, 7]]), mine.start(good))
    if token > 0:
        with pytest.raises(ValueError, match=f"token {token} is not in the vocabulary of {WORDS}"):
            beam(model, good, SearchOptions(suppress=(token,)))
    assert mine.start(good).lengths.tolist() == [0, 0]


@pytest.mark.parametrize(("source", "target"), [(9, 4), (4, 9)])
def test_what_is_longer_than_the_model_can_take_is_refused(source: int, target: int) -> None:
    mine = fast(made(positions="learned", max_len=8))
    with pytest.raises(ValueError, match=r"\b8\b"):
        mine.step(some(1, target), mine.start(sources(source)))


def test_a_search_fills_a_learned_table_to_its_end_and_no_further() -> None:
    model = made(positions="learned", max_len=8)
    (found,) = greedy(model, sources(8), SearchOptions(max_ratio=0.0, max_extra=50, min_len=50))
    assert len(found[0].tokens) == 7
    with pytest.raises(ValueError, match="at most 8 tokens, not 9"):
        greedy(model, sources(9))


def test_searching_is_without_dropout_and_leaves_training_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = made(dropout=0.5), sources(4, 6)
    expected = greedy(model, source, SHORT), beam(model, source, SHORT)
    model.train()
    model.encoder[0].eval()
    training = [part.training for part in model.modules()]
    assert (greedy(model, source, SHORT), beam(model, source, SHORT)) == expected
    assert [part.training for part in model.modules()] == training
    with monkeypatch.context() as patch:
        patch.setattr(Rules, "searched", lambda *_: None)
        assert (greedy(model, source, SHORT), beam(model, source, SHORT)) == expected
    with pytest.raises(IndexError):
        greedy(model, torch.tensor([[WORDS]]))
    assert [part.training for part in model.modules()] == training


def test_a_call_keeps_its_places_whatever_another_asks_for() -> None:
    config = TransformerConfig(dim=16, num_heads=2, ffn_dim=24, encoder_layers=1, decoder_layers=1)
    found = compiled(Transformer(config, 30, 30))
    assert found is not None
    long, short = found._told(target=500), found._told(target=30)
    found._places.clear()
    found._told(target=30)  # as if another thread had seen the table before it grew
    table = (ctypes.c_float * (500 * 16)).from_address(long.target_places)
    expected = found._positions["target"].table(500).flatten()
    assert list(table) == expected.tolist()
    assert short.target_places == long.target_places
