"""The search that is compiled as a whole: exactly what the searches in Python find, in any company, by any threads."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.decoding.table import batch
from tests.interop.tiny import sources as sentences
from tests.interop.tiny import taught, tiny, vocabularies
from tests.kernels.test_steady import threads
from tests.models.test_narrow import stored
from weft.config import EOS, UNK, TransformerConfig
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.rules import Rules
from weft.decoding.sampling import SamplingOptions, sample
from weft.decoding.score import score
from weft.kernels import native
from weft.models.compiled import Compiled, Result, compiled
from weft.models.transformer import Transformer

Search = Callable[..., list[list[Hypothesis]]]
SEARCHES = pytest.mark.parametrize("search", [greedy, beam])


@pytest.fixture(params=["fp32", "bf16", "int8", "coarse"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """What matrices are stored in; coarse is int8 times inputs of 7 bits, which else only wide models have."""
    if request.param == "coarse":
        monkeypatch.setattr(Compiled, "coarse_from", 1)
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return kinds.get(request.param, torch.int8)


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if native.library() is None:
        pytest.skip(f"nothing is compiled here: {native.why_not()}")


@contextmanager
def by_steps() -> Iterator[None]:
    """Inside, searches are Python's own; their steps stay compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rules, "searched", lambda *_: None)
        yield


def made(seed: int, words: int = 23, end: float = 1.0, dtype: torch.dtype = torch.float32) -> Transformer:
    """A model that is surer than a new one; ``end`` is added to EOS's logit, and in every third two words are equal."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        dim=16, num_heads=2, ffn_dim=20, encoder_layers=1, decoder_layers=2, tie="none", norm_first=True
    )
    model = Transformer(config, words, words).eval().requires_grad_(False)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.mul_(1.0 if "norm" in name else 2.0)
    output, bias = parameters["output_weight"], parameters["decoder_norm.bias"]
    bias[0] = 8.0  # what every hidden vector has
    output[:, 0] = 0.0
    output[EOS, 0] = end / 8.0
    if seed % 3 == 0:
        for table in (output, parameters["target_embedding"]):
            table[4] = table[5]
    return stored(model, dtype)


def some(draw: random.Random, count: int, words: int = 23, longest: int = 9) -> list[list[int]]:
    return [[draw.randrange(3, words) for _ in range(draw.randint(0, longest))] for _ in range(count)]


def drawn(draw: random.Random, words: int) -> SearchOptions:
    width = draw.choice([1, 2, 3, 4, 5, 2 * words])
    return SearchOptions(
        beam=width,
        n_best=draw.randint(1, min(width, 6)),
        length_penalty=draw.choice([-1.0, -0.3, 0.0, 0.6, 1.0, 2.0]),
        patience=draw.choice([0.4, 1.0, 2.0, math.inf]),
        max_ratio=draw.choice([0.0, 0.5, 1.0]),
        max_extra=draw.choice([0, 1, 4, 7]),
        min_len=draw.choice([0, 0, 1, 3]),
        suppress=draw.choice([(), (UNK,), (UNK, 4)]),
        exact=draw.random() < 0.2,
    )


@SEARCHES
def test_it_finds_exactly_what_the_search_in_python_finds(search: Search, dtype: torch.dtype) -> None:
    draw, finished, cut = random.Random(1), 0, 0
    for seed in range(40):
        words = draw.choice([6, 11, 23])
        model = made(seed, words, draw.choice([-1.0, 1.0, 3.0]), dtype)
        source, options = batch(some(draw, draw.randint(1, 9), words)), drawn(draw, words)
        found = search(model, source, options)
        with by_steps():
            assert search(model, source, options) == found, (seed, options)
        hypotheses = [h for each in found for h in each]
        finished += sum(h.finished for h in hypotheses)
        cut += sum(not h.finished for h in hypotheses)
    assert min(finished, cut) > 25


def test_long_ones_too() -> None:
    """Slots are taken and left for hundreds of steps, by sources that begin when others have ended."""
    draw = random.Random(2)
    model, source = made(1, end=-1.0), batch(some(draw, 30, longest=40))
    options = SearchOptions(beam=3, n_best=3, max_ratio=3.0, max_extra=5, length_penalty=0.2, patience=9.0)
    found = beam(model, source, options)
    with by_steps():
        assert beam(model, source, options) == found
    lengths = [len(h.tokens) for each in found for h in each]
    assert max(lengths) > 80
    assert min(lengths) < 20


@SEARCHES
def test_it_is_what_searches_call(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, really = [], Compiled.search

    def counted(self: Compiled, inputs: Tensor, *rest: Any) -> list[list[Result]]:
        calls.append(len(inputs))
        return really(self, inputs, *rest)

    monkeypatch.setattr(Compiled, "search", counted)
    search(made(1), batch([[4], [5, 6]]), SearchOptions(min_len=2, suppress=(UNK,)))
    assert calls
    assert set(calls) == {2}
    assert search(made(1), batch([])) == []


@SEARCHES
def test_a_source_has_the_same_result_in_any_company_and_by_any_threads(search: Search, dtype: torch.dtype) -> None:
    """Bit for bit: tokens, scores and every log-probability."""
    draw = random.Random(3)
    model, rows = made(2, dtype=dtype), some(draw, 41, longest=25)
    options = SearchOptions(beam=3, n_best=3, max_ratio=1.0, max_extra=5)
    alone = [search(model, batch([row]), options)[0] for row in rows]
    assert len({h.tokens for each in alone for h in each}) > 15
    for count in (1, 2, 3):
        with threads(count):
            assert search(model, batch(rows), options) == alone
            for size in (2, 5, 16, 40):
                chosen = draw.sample(range(41), size)
                assert search(model, batch([rows[i] for i in chosen]), options) == [alone[i] for i in chosen]
    with by_steps():
        assert search(model, batch(rows), options) == alone


def test_scoring_what_was_found_gives_what_was_found(dtype: torch.dtype) -> None:
    model, source = made(4, dtype=dtype), batch(some(random.Random(4), 8))
    found = [each[0] for each in beam(model, source, SearchOptions(max_ratio=1.0))]
    for finished in (True, False):
        chosen = [place for place, h in enumerate(found) if h.finished == finished]
        targets = [found[place].tokens for place in chosen]
        for place, again in zip(chosen, score(model, source[chosen], targets, finished=finished), strict=True):
            assert again.token_log_probs == pytest.approx(found[place].token_log_probs, abs=1e-5)


@pytest.mark.parametrize("words", [6, 23, 600, 2000])
def test_all_log_probabilities_are_those_of_the_best(words: int) -> None:
    """Bit for bit: a search that asks for all of them, as one with a beginning does, agrees with one that does not."""
    model = compiled(made(1, words))
    assert model is not None
    hidden = 3 * torch.randn(5, 16)
    values, tokens = model.best(hidden, words, ())
    found = model.log_probs(hidden)
    assert torch.equal(found.gather(1, tokens), values)
    torch.testing.assert_close(found, model.logits(hidden).log_softmax(-1))


def forbidden(*_: Any) -> None:
    raise AssertionError("the whole search was called")


def stop_at_six(rows: Tensor, tokens: Tensor) -> Tensor:
    return tokens[:, -1] == 6


SHORT: dict[str, Any] = {"max_ratio": 0.0, "max_extra": 6, "beam": 3, "n_best": 2}
OTHERS: dict[str, Callable[[Transformer, Tensor], list[list[Hypothesis]]]] = {
    "prefix": lambda model, source: beam(model, source, SearchOptions(**SHORT), [[5, 6], [], [7], [8]]),
    "greedy prefix": lambda model, source: greedy(model, source, SearchOptions(**SHORT), [[5, 6], [], [7], [8]]),
    "no_repeat": lambda model, source: beam(model, source, SearchOptions(**SHORT, no_repeat=2)),
    "greedy no_repeat": lambda model, source: greedy(model, source, SearchOptions(**SHORT, no_repeat=1)),
    "coverage": lambda model, source: beam(model, source, SearchOptions(**SHORT, coverage_penalty=0.4)),
    "watch": lambda model, source: greedy(model, source, SearchOptions(**SHORT), watch=stop_at_six),
    "sample": lambda model, source: sample(model, source, SamplingOptions(samples=2, seed=3), SearchOptions(**SHORT)),
}


@pytest.mark.parametrize("run", OTHERS.values(), ids=OTHERS)
def test_what_asks_for_more_goes_by_steps(
    run: Callable[[Transformer, Tensor], list[list[Hypothesis]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = made(5), batch([[4, 6, 9], [7], [8, 8, 10], []])
    monkeypatch.setattr(Compiled, "search", forbidden)
    found = run(model, source)
    monkeypatch.setenv("WEFT_NATIVE", "0")
    agree(found, run(model, source))


def agree(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    assert [[h.tokens for h in each] for each in found] == [[h.tokens for h in each] for each in expected]
    for h, e in zip(chain(*found), chain(*expected), strict=True):
        assert h.finished == e.finished
        assert h.token_log_probs == pytest.approx(e.token_log_probs, abs=1e-5)
        assert (h.log_prob, h.score) == pytest.approx((e.log_prob, e.score), abs=1e-5 * (len(h.tokens) + 1))


@pytest.fixture(scope="module", params=[True, False], ids=["pre-norm", "post-norm"])
def learner(request: pytest.FixtureRequest) -> Transformer:
    torch.manual_seed(0)
    return taught(tiny(norm_first=request.param), vocabularies())


@pytest.mark.parametrize("width", [1, 4])
def test_it_agrees_with_the_model_in_torch(learner: Transformer, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = batch(sentences(vocabularies(), 24))
    options = SearchOptions(beam=width, n_best=width, max_ratio=1.0, max_extra=5)
    search = beam if width > 1 else greedy
    found = search(learner, source, options)
    assert len({each[0].tokens for each in found}) > 8
    monkeypatch.setenv("WEFT_NATIVE", "0")
    agree(found, search(learner, source, options))


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """As if Ctrl-C were pressed once."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("count", [1, 2])
@SEARCHES
def test_ctrl_c_ends_it_at_once_and_leaves_all_as_it_was(search: Search, count: int) -> None:
    model, few = made(7).train(), batch([[4, 5], [6]])
    expected = search(model, few)
    many = batch(some(random.Random(5), 3000, longest=3))
    endless = SearchOptions(beam=5, max_ratio=0.0, max_extra=3000, min_len=3000)  # minutes
    began = time.monotonic()
    with threads(count), pytest.raises(KeyboardInterrupt), interrupted_after(0.3):
        search(model, many, endless)
    assert 0.2 < time.monotonic() - began < 10.0
    assert model.training
    assert search(model, few) == expected
