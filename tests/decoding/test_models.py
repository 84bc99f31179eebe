"""Every search on every family: the answers agree with each other and do not depend on the company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.decoding.table import batch
from weft.config import UNK, ConvolutionalConfig, RecurrentConfig, TransformerConfig
from weft.decoding.align import align
from weft.decoding.alternatives import alternatives
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import SearchOptions
from weft.decoding.sampling import SamplingOptions, sample
from weft.decoding.score import score
from weft.models import build
from weft.models.encoder_decoder import EncoderDecoder

VOCAB = 37
CONFIGS = {
    "transformer": TransformerConfig(dim=32, num_heads=2, ffn_dim=48, encoder_layers=2, decoder_layers=2),
    "learned": TransformerConfig(
        dim=32, num_heads=2, ffn_dim=48, encoder_layers=1, decoder_layers=1, positions="learned", max_len=24
    ),
    "alibi": TransformerConfig(
        dim=32, num_heads=2, ffn_dim=48, encoder_layers=1, decoder_layers=1, positions="alibi", norm_first=False
    ),
    "recurrent": RecurrentConfig(embed_dim=16, dim=24, cell="lstm", decoder_layers=2),
    "bottleneck": RecurrentConfig(embed_dim=16, dim=24, attention="none"),
    "convolutional": ConvolutionalConfig(embed_dim=16, dim=24, encoder_layers=2, decoder_layers=2),
}
OPTIONS = SearchOptions(beam=4, n_best=3, max_ratio=1.0, max_extra=4, no_repeat=3, suppress=(UNK,))


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Iterator[EncoderDecoder]:
    torch.manual_seed(3)
    made = build(CONFIGS[request.param], VOCAB, VOCAB).train()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(1.5)  # sharper than fresh models are
    yield made
    assert all(part.training for part in made.modules())


def some(count: int, longest: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(4, VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_source_has_the_same_result_in_any_company(model: EncoderDecoder, precision: torch.dtype) -> None:
    """Bit for bit: tokens, scores and every log-probability."""
    model.precision = precision
    longest = 90 if model.max_len is None else 20  # beyond 64 the padding of the whole batch grows
    sources = [*some(7, 12), some(1, 2)[0] * (longest // len(some(1, 2)[0]))]
    prefixes = [source[:1] for source in sources]
    options = SearchOptions(beam=4, n_best=3, max_ratio=0.0, max_extra=7, exact=True)
    drawn = SamplingOptions(samples=2, top_p=0.9)
    whole = batch(sources)
    beams, greedies = beam(model, whole, options, prefixes), greedy(model, whole, options)
    samples = sample(model, whole, drawn, options)
    targets = [hypotheses[-1].tokens for hypotheses in beams]
    scores = score(model, whole, targets, options)
    covering = replace(options, coverage_penalty=0.3 if model.cross_attentions else 0.0)
    covered = beam(model, whole, covering)
    aligned = align(model, whole, targets) if model.cross_attentions else []
    for chosen in ([0], [2, 5], [6, 1, 3]):
        part = batch([sources[i] for i in chosen])
        assert beam(model, part, options, [prefixes[i] for i in chosen]) == [beams[i] for i in chosen]
        assert greedy(model, part, options) == [greedies[i] for i in chosen]
        assert sample(model, part, drawn, options, numbers=chosen) == [samples[i] for i in chosen]
        assert score(model, part, [targets[i] for i in chosen], options) == [scores[i] for i in chosen]
        assert beam(model, part, covering) == [covered[i] for i in chosen]
        if aligned:
            for i, weights in zip(chosen, align(model, part, [targets[i] for i in chosen]), strict=True):
                assert torch.equal(weights, aligned[i][:, : weights.shape[1]])


def test_scoring_what_was_found_gives_what_was_found(model: EncoderDecoder) -> None:
    source = batch(some(5, 10))
    samples = sample(model, source, SamplingOptions(samples=2), OPTIONS)
    for found in (beam(model, source, OPTIONS), greedy(model, source, OPTIONS), samples):
        for hypotheses in zip(*found, strict=True):
            finished = score(model, source, [h.tokens for h in hypotheses], OPTIONS)
            begun = score(model, source, [h.tokens for h in hypotheses], OPTIONS, finished=False)
            for h, pair in zip(hypotheses, zip(begun, finished, strict=True), strict=True):
                again = pair[h.finished]
                assert h.token_log_probs == pytest.approx(again.token_log_probs, abs=1e-5)
                assert h.log_prob == pytest.approx(again.log_prob, abs=1e-5)
                assert h.score == pytest.approx(again.score, abs=1e-5)


def test_a_wider_beam_finds_no_worse(model: EncoderDecoder) -> None:
    """Not a law for beams, but one for a beam that holds everything."""
    options = SearchOptions(beam=1, max_ratio=0.0, max_extra=1, length_penalty=0.0)
    narrow = beam(model, batch(some(4, 8)), options)
    wide = beam(model, batch(some(4, 8)), SearchOptions(beam=2 * VOCAB, max_ratio=0.0, max_extra=1, length_penalty=0.0))
    for (one,), (other,) in zip(narrow, wide, strict=True):
        assert other.finished
        assert not one.finished or one.score <= other.score + 1e-6


def test_alignments_and_coverage(model: EncoderDecoder) -> None:
    sources = some(4, 8)
    options = SearchOptions(beam=3, coverage_penalty=0.4, max_extra=3, max_ratio=1.0)
    if not model.cross_attentions:
        with pytest.raises(ValueError, match="does not attend"):
            beam(model, batch(sources), options)
        return
    found = [hypotheses[0] for hypotheses in beam(model, batch(sources), options)]
    weights = align(model, batch(sources), [h.tokens for h in found])
    for source, h, w in zip(sources, found, weights, strict=True):
        rows = len(h.tokens) + 1
        assert w.shape == (rows, max(map(len, sources)) + 1)
        torch.testing.assert_close(w.sum(-1), torch.ones(rows))
        torch.testing.assert_close(w[:, : len(source) + 1].sum(-1), torch.ones(rows))
        coverage = w[: len(h.token_log_probs), : len(source)].sum(0).clamp(max=1.0).log().sum()
        expected = h.log_prob / len(h.token_log_probs) + 0.4 * float(coverage)
        assert h.score == pytest.approx(expected, abs=1e-4)


def test_alternatives_contain_the_choice_of_greedy(model: EncoderDecoder) -> None:
    source = batch(some(1, 8))
    ((h,),) = greedy(model, source, SearchOptions(max_ratio=0.0, max_extra=4, min_len=2))
    for position, token in enumerate(h.tokens[2:], 2):
        found = alternatives(model, source, h.tokens, position, 3)
        assert found[0].token == token
        assert found[0].probability == pytest.approx(2.718281828 ** h.token_log_probs[position], rel=1e-4)
