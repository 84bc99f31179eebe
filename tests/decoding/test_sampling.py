"""Sampling: definitions against transformers, draws against their distribution, streams in any company."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from tests.decoding.table import TableModel, batch, every_target
from weft.config import GPTConfig, Specials
from weft.decoding.greedy import Moment, greedy
from weft.decoding.options import SearchOptions
from weft.decoding.sampling import SamplingOptions, candidates, draw, mix, penalised, sample, uniform
from weft.models.gpt import GPT


def surprise(counts: list[int], expected: list[float]) -> float:
    """How many standard deviations Pearson's χ² lies above its mean."""
    total, whole = sum(counts), sum(expected)
    wanted = [total * e / whole for e in expected]
    assert min(wanted) > 5
    chi = sum((c - w) ** 2 / w for c, w in zip(counts, wanted, strict=True))
    df = len(counts) - 1
    return (chi - df) / math.sqrt(2 * df)


def left_by_transformers(logits: Tensor, held: Tensor, said: Tensor, sampling: SamplingOptions) -> Tensor:
    """The distribution [R, V] that they draw from, where held [R, N] and said [R, T] ⊂ held are the tokens before."""
    scores = logits
    if sampling.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(held, scores)
    counts = torch.stack([torch.bincount(row, minlength=logits.shape[1]) for row in said])
    scores = scores - sampling.frequency_penalty * counts  # which they do not have; by the definition of OpenAI
    scores = TemperatureLogitsWarper(sampling.temperature)(held, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(held, scores)
    scores = MinPLogitsWarper(sampling.min_p)(held, TopPLogitsWarper(sampling.top_p)(held, scores))
    if sampling.typical_p < 1.0:
        scores = TypicalLogitsWarper(sampling.typical_p)(held, scores)
    return scores.softmax(-1)


def shares(log_probs: Tensor, **options: Any) -> Tensor:
    """The distribution [R, V] that is drawn from."""
    share, tokens = candidates(log_probs, SamplingOptions(**options))
    return torch.zeros(log_probs.shape, dtype=share.dtype).scatter(1, tokens, share / share.sum(-1, keepdim=True))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 0.9)),
    typical_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.3, 5.0]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.8]),
    read=st.integers(0, 5),
    said=st.integers(0, 5),
)
def test_what_may_be_drawn_is_what_transformers_leaves(
    seed: int, spread: float, read: int, said: int, **options: Any
) -> None:
    """The same tokens, with the same probabilities; closed tokens stay closed whatever the penalties make of them."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 10, generator=generator).double() * spread
    held = torch.randint(0, 10, (4, read + said), generator=generator)
    sampling = SamplingOptions(**options)
    theirs = left_by_transformers(logits, held, held[:, read:], sampling)
    moment = Moment(logits.log_softmax(-1), logits, torch.arange(4), held[:, read:], held[:, :read])
    share, tokens = candidates(penalised(moment, sampling), sampling)
    mine = torch.zeros(4, 10).double().scatter(1, tokens, share / share.sum(-1, keepdim=True))
    assert torch.equal(mine > 0, theirs > 0)
    torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-6)

    shut = torch.rand(4, 10, generator=generator) < 0.4
    shut[:, 0] = False
    closed = logits.masked_fill(shut, -math.inf)
    moment = Moment(closed.log_softmax(-1), logits, torch.arange(4), held[:, read:], held[:, :read])
    share, tokens = candidates(penalised(moment, sampling), sampling)
    assert not bool((shut.gather(1, tokens) & (share > 0)).any())
    mine = torch.zeros(4, 10).double().scatter(1, tokens, share / share.sum(-1, keepdim=True))
    torch.testing.assert_close(mine, left_by_transformers(closed, held, held[:, read:], sampling), rtol=0.0, atol=1e-6)


def test_the_definitions_by_hand() -> None:
    log_probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]], dtype=torch.float64).log()

    def kept(**options: Any) -> list[int]:
        return shares(log_probs, **options)[0].nonzero()[:, 0].tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [1, 2]
    assert kept(top_k=9) == [0, 1, 2, 3]
    assert kept(top_p=0.39) == [1]
    assert kept(top_p=0.41) == [1, 2]
    assert kept(top_p=0.69) == [1, 2]
    assert kept(top_p=0.71) == [1, 2, 3]
    assert kept(min_p=0.49) == [1, 2, 3]
    assert kept(min_p=0.51) == [1, 2]
    assert kept(min_p=1.0) == [1]
    assert kept(top_k=3, top_p=0.78) == [1, 2, 3]  # of what top_k left, 0.4 and 0.3 are 0.777…
    assert kept(top_k=3, top_p=0.77) == [1, 2]
    # The entropy is 1.28; −log p is 2.30, 0.92, 1.20 and 1.61: the order is 2, 3, 1, 0.
    assert kept(typical_p=0.29) == [2]
    assert kept(typical_p=0.31) == [2, 3]
    assert kept(typical_p=0.51) == [1, 2, 3]
    assert kept(typical_p=0.91) == [0, 1, 2, 3]
    assert kept(min_p=1.0, typical_p=0.5) == [1]
    twins = torch.tensor([[0.3, 0.3, 0.2, 0.2]], dtype=torch.float64).log()
    assert shares(twins, typical_p=0.1)[0].tolist() == pytest.approx([0.5, 0.5, 0.0, 0.0])  # equals stay together


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, 3.0]])
    read, said = torch.tensor([[0, 0]]), torch.tensor([[1, 3, 3]])
    moment = Moment(logits.log_softmax(-1), logits, torch.arange(1), said, read)

    def scores(**options: Any) -> list[float]:
        return penalised(moment, SamplingOptions(**options))[0].tolist()

    assert penalised(moment, SamplingOptions(temperature=0.5, top_k=2)) is moment.log_probs
    assert scores(repetition_penalty=2.0) == [1.0, -2.0, 0.5, 1.5]
    assert scores(frequency_penalty=0.5) == [2.0, -1.5, 0.5, 2.0]
    assert scores(repetition_penalty=2.0, frequency_penalty=-1.0) == [1.0, -1.0, 0.5, 3.5]
    assert moment.logits[0].tolist() == [2.0, -1.0, 0.5, 3.0]


SAMPLERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.4},
    {"typical_p": 0.6},
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 0.9},
    {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "temperature": 1.5, "top_k": 8, "top_p": 0.95, "min_p": 0.02},
    {"repetition_penalty": 0.8, "temperature": 0.9, "top_p": 0.95, "typical_p": 0.9},
]


@pytest.mark.parametrize("options", SAMPLERS, ids=str)
def test_a_language_model_s_samples_follow_what_transformers_would_draw_from(options: dict[str, Any]) -> None:
    """Pearson's χ² of some thousand tokens drawn after a prompt and a beginning, at the level of 1 in 10,000."""
    count, vocab, prompt, said = 4000, 12, [3, 9, 9, 4], [5, 2, 5]
    torch.manual_seed(4)
    model = GPT(GPTConfig(dim=8, num_heads=2, num_layers=1, max_len=16, dropout=0.0), vocab)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.25 * torch.randn_like(parameter)
        model.specials = Specials(pad=-1, bos=11, eos=11, never=())
        held = torch.tensor([[*prompt, *said]])
        logits = model.eval().logits(model(held))[:, -1].double()
    sampling = SamplingOptions(samples=count, seed=2, **options)
    expected = left_by_transformers(logits, held, torch.tensor([said]), sampling)[0]
    rules = SearchOptions(max_ratio=0.0, max_extra=len(said) + 1)
    # A second prompt of another length stands beside it.
    (found, _) = sample(model, torch.tensor([prompt, [1, 2, -1, -1]]), sampling, rules, [said, []])
    drawn = torch.tensor([(*h.tokens, 11)[len(said)] for h in found])
    counts = torch.bincount(drawn, minlength=vocab)
    assert int(counts[expected == 0].sum()) == 0
    assert int((expected > 0).sum()) > 1

    def probability(expected: Tensor) -> float:
        often = expected * count >= 5
        cells = torch.cat([counts[often], counts[~often].sum()[None]]).double()
        wanted = torch.cat([expected[often], expected[~often].sum()[None]]) * count
        real = wanted > 0
        chi = ((cells - wanted).square() / wanted)[real].sum()
        return float(torch.special.gammaincc((real.sum() - 1) / 2, chi / 2))

    assert probability(expected) > 1e-4
    plain = logits.softmax(-1)[0]
    assert not options or probability(plain) < 1e-4, "the test must see whether the sampler did anything"


def test_equal_tokens_are_kept_by_their_number() -> None:
    assert shares(torch.zeros(1, 6).log_softmax(-1), top_k=2)[0].tolist() == [0.5, 0.5, 0, 0, 0, 0]


def test_splitmix_is_the_published_one() -> None:
    """The first five outputs for seed 1234567, as other implementations give them."""
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + i * golden) % 2**64 for i in range(5)]
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in states])
    assert [x % 2**64 for x in mix(signed).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_uniform_numbers_are_uniform_in_each_of_their_keys() -> None:
    steps, fixed = torch.arange(20_000), torch.full((20_000,), 3)
    for keys in ((steps, fixed, fixed), (fixed, steps, fixed), (fixed, fixed, steps), (steps, steps, steps)):
        u = uniform(1, *keys)
        assert float(u.min()) > 0.0
        assert float(u.max()) < 1.0
        assert surprise(torch.histc(u, 50, 0.0, 1.0).long().tolist(), [1.0] * 50) < 4
        pairs = (u[:-1] * 7).long() * 7 + (u[1:] * 7).long()  # neighbours know nothing of each other
        assert surprise(torch.bincount(pairs, minlength=49).tolist(), [1.0] * 49) < 4
    assert not torch.equal(uniform(1, steps), uniform(2, steps))
    assert not torch.equal(uniform(1, steps, fixed), uniform(1, fixed, steps))
    assert torch.equal(uniform(-1, steps), uniform(2**64 - 1, steps))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.2}])
def test_draws_follow_the_distribution(options: dict[str, Any]) -> None:
    count = 30_000
    log_probs = torch.randn(1, 9).log_softmax(-1)
    share, tokens = candidates(log_probs.expand(count, -1), SamplingOptions(**options))
    drawn = draw(share, tokens, uniform(5, torch.arange(count)))
    counts = torch.bincount(drawn, minlength=9)
    expected = shares(log_probs, **options)[0]
    possible = expected > 0
    assert int(counts[~possible].sum()) == 0
    assert surprise(counts[possible].tolist(), expected[possible].tolist()) < 4
    tilted = expected[possible] * (1.0 + 0.1 * torch.linspace(-1, 1, int(possible.sum())))
    assert surprise(counts[possible].tolist(), tilted.tolist()) > 4, "the test must see a tilt of a tenth"


def test_the_ends_of_the_line_draw_the_ends_of_the_list() -> None:
    share, tokens = torch.tensor([[0.5, 0.25, 0.0]] * 4, dtype=torch.float64), torch.tensor([[7, 5, 6]] * 4)
    u = torch.tensor([2.0**-53, 2 / 3 - 1e-9, 2 / 3 + 1e-9, 1.0 - 2.0**-53], dtype=torch.float64)
    assert draw(share, tokens, u).tolist() == [7, 7, 5, 5]
    draw(share * math.nan, tokens, u)


@given(share=st.lists(st.floats(1e-300, 1.0), min_size=1, max_size=6))
def test_the_last_draw_is_never_past_the_end(share: list[float]) -> None:
    kept = torch.tensor([[*share, 0.0, 0.0]], dtype=torch.float64)
    token = draw(kept, torch.arange(len(share) + 2)[None], torch.tensor([1.0 - 2.0**-53], dtype=torch.float64))
    assert int(token) < len(share)


def test_samples_follow_the_distribution_over_targets() -> None:
    """All targets of up to two tokens, and those that are cut off there, against their probabilities."""
    model = TableModel(vocab_size=6, seed=4, spread=0.5)
    rules = SearchOptions(max_ratio=0.0, max_extra=1)
    (found,) = sample(model, batch([[4, 5]]), SamplingOptions(samples=6000, seed=3), rules)
    counts = Counter((h.tokens, h.finished) for h in found)
    # PAD and BOS are never drawn: the rest shares their part, at each step.
    expected = {}
    for row in every_target(model, [4, 5], 1):
        p, left = 1.0, [1.0 - math.exp(a) - math.exp(b) for a, b in _closed(model, row["tokens"])]
        for part, rest in zip(row["parts"], left, strict=True):
            p *= math.exp(part) / rest
        expected[(row["tokens"], True)] = p
        if row["tokens"]:
            before = math.exp(row["parts"][0]) / left[0]
            expected[(row["tokens"], False)] = before - p
    assert set(counts) <= set(expected)
    assert sum(expected.values()) == pytest.approx(1.0)
    assert surprise([counts[key] for key in expected], list(expected.values())) < 4
    for h in found[:50]:  # what is reported is the model's own log-probability
        lookup = [model.log_probs((4, 5, 2), (1, *h.tokens[:t])) for t in range(len(h.token_log_probs))]
        said = (*h.tokens, 2)[: len(h.token_log_probs)]
        assert h.token_log_probs == pytest.approx([row[t] for row, t in zip(lookup, said, strict=True)])


def _closed(model: TableModel, tokens: tuple[int, ...]) -> list[tuple[float, float]]:
    rows = [model.log_probs((4, 5, 2), (1, *tokens[:t])) for t in range(len(tokens) + 1)]
    return [(row[0], row[1]) for row in rows]


@settings(max_examples=25)
@given(seed=st.integers(-(10**20), 10**20), table=st.integers(0, 100), data=st.data())
def test_a_sample_is_the_same_in_any_company(seed: int, table: int, data: st.DataObject) -> None:
    model = TableModel(seed=table, spread=0.3, dtype=torch.float32)
    sources = [[4, 5], [6], [4, 5], [], [6, 6, 6]]
    options = SamplingOptions(samples=3, seed=seed, top_p=0.9)
    short = SearchOptions(max_ratio=0.0, max_extra=4)
    together = sample(model, batch(sources), options, short)
    chosen = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    count = data.draw(st.integers(1, 3))
    fewer = SamplingOptions(samples=count, seed=seed, top_p=0.9)
    apart = sample(model, batch([sources[i] for i in chosen]), fewer, short, numbers=chosen)
    assert apart == [together[i][:count] for i in chosen]


def test_streams_differ_by_seed_source_and_sample() -> None:
    model = TableModel(vocab_size=20, spread=0.1)
    (one, other) = sample(model, batch([[4], [4]]), SamplingOptions(samples=2), SearchOptions(min_len=5))
    (again,) = sample(model, batch([[4]]), SamplingOptions(samples=2, seed=1), SearchOptions(min_len=5))
    assert len({h.tokens for h in (*one, *other, *again)}) == 6


def test_no_generator_is_asked() -> None:
    before = torch.get_rng_state()
    sample(TableModel(), batch([[4]]), SamplingOptions(samples=5))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_likeliest_token_alone_is_greedy() -> None:
    model = TableModel(seed=9)
    for options in (SamplingOptions(top_k=1), SamplingOptions(top_p=1e-9), SamplingOptions(min_p=1.0)):
        assert sample(model, batch([[4], [5, 6]]), options) == greedy(model, batch([[4], [5, 6]]))


def test_rules_hold_for_samples() -> None:
    options = SearchOptions(max_ratio=0.0, max_extra=6, min_len=4, no_repeat=1, suppress=(3,))
    model = TableModel(vocab_size=12, spread=0.2)
    for found in sample(model, batch([[4], [5]]), SamplingOptions(samples=40), options, [[7], [8, 9]]):
        for h in found:
            assert 4 <= len(h.tokens) <= 6
            assert len(set(h.tokens)) == len(h.tokens)
            assert 3 not in h.tokens
            assert h.tokens[0] in (7, 8)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"typical_p": 0.0},
        {"typical_p": 1.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"samples": 0},
    ],
)
def test_a_value_out_of_range_is_named(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=f"{name} must be .* not {value}"):
        SamplingOptions(**given)
    with pytest.raises(ValueError, match="a number for each of 1 sources, not 2"):
        sample(TableModel(), batch([[4]]), numbers=[1, 2])
