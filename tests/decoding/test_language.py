"""Searches over language models, against ``generate`` of transformers on tiny random weights and against themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from weft.config import GPTConfig, Specials
from weft.decoding.alternatives import alternatives
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.sampling import SamplingOptions, sample
from weft.decoding.score import score
from weft.decoding.steps import padded
from weft.interop import huggingface
from weft.models.gpt import GPT

VOCAB, END, CONTEXT = 13, 12, 48
ENDING = Specials(pad=-1, bos=END, eos=END, never=())  # as GPT-2's: every number but one is a word, 0 too
ENDLESS = ENDING._replace(never=(END,))
PROMPTS = [[0, 3, 0, 7, 11], [5], [0, 0], [9, 1, 2, 8, 10, 4, 6]]

MAKE = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            bos_token_id=END,
            eos_token_id=END,
            n_positions=CONTEXT,
            n_embd=16,
            n_layer=2,
            n_head=2,
            initializer_range=0.35,
        )
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            bos_token_id=END,
            eos_token_id=END,
            max_position_embeddings=CONTEXT,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.35,
        )
    ),
}
Pair = tuple[Any, GPT]


SEEDS = [("gpt2", 22), ("gpt2", 36), ("llama", 5), ("llama", 11)]  # with these most beams find an end


@pytest.fixture(scope="module", params=SEEDS, ids=str)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model of transformers, and what weft reads of its folder, in fp64."""
    kind, seed = request.param
    torch.manual_seed(seed)
    theirs = MAKE[kind]().eval()
    folder = tmp_path_factory.mktemp(kind)
    theirs.save_pretrained(folder)
    read = huggingface.read(folder)
    mine = GPT(read.config, read.vocab_size).eval()
    mine.load_state_dict(read.tensors)
    return theirs.double(), mine.double()


@pytest.fixture
def pair(made: Pair) -> Pair:
    made[1].specials = ENDING
    return made


def prompts(rows: Sequence[Sequence[int]] = PROMPTS) -> Tensor:
    return padded(rows, torch.device("cpu"), -1)


def generate(model: Any, ends: bool, **options: Any) -> tuple[list[list[int]], list[float]]:
    """What transformers adds to the prompts, END cut off, and the scores; prompts are padded at the left."""
    longest = max(map(len, PROMPTS))
    rows = torch.tensor([[0] * (longest - len(row)) + row for row in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in PROMPTS])
    found = model.generate(
        rows,
        attention_mask=mask,
        pad_token_id=END,
        bos_token_id=None,
        eos_token_id=END if ends else None,
        suppress_tokens=None if ends else [END],
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    said = [row[longest:] for row in found.sequences.tolist()]
    scores = found.sequences_scores.tolist() if "sequences_scores" in found else []
    return [row[: row.index(END)] if END in row else row for row in said], scores


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_greedy(pair: Pair, ends: bool, cached: bool) -> None:
    """Their max_new_tokens counts the end and max_extra does not: the tokens are the same, whatever the last one is."""
    theirs, mine = pair
    mine.specials = ENDING if ends else ENDLESS
    expected, _ = generate(theirs, ends, do_sample=False, max_new_tokens=14, use_cache=cached)
    options = SearchOptions(max_ratio=0.0, max_extra=14)
    found = [h for (h,) in greedy(mine, prompts(), options)]
    assert [list(h.tokens) for h in found] == expected
    assert ends or not any(h.finished for h in found)
    for row, h in zip(PROMPTS, found, strict=True):
        ((alone,),) = greedy(mine, prompts([row]), options)
        assert alone.tokens == h.tokens


@pytest.mark.parametrize(
    ("alpha", "early", "patience", "cached"),
    [
        (1.0, True, 1.0, True),
        (0.0, True, 1.0, False),
        (2.0, True, 1.0, True),
        (0.0, "never", math.inf, True),
        (0.5, "never", math.inf, False),
    ],
)
def test_beams_that_end(pair: Pair, alpha: float, early: bool | str, patience: float, cached: bool) -> None:
    """The n-best lists and their scores.

    early_stopping=True is a patience of 1. "never" is one of ∞: both then go on until nothing live can come in. At
    the greatest length they differ: they rank what is cut off among what is finished, so lists that hold such are
    left out. Their max_new_tokens counts the end, max_extra does not.
    """
    theirs, mine = pair
    expected, scores = generate(
        theirs,
        ends=True,
        num_beams=4,
        num_return_sequences=3,
        early_stopping=early,
        length_penalty=alpha,
        max_new_tokens=21,
        use_cache=cached,
    )
    options = SearchOptions(beam=4, n_best=3, length_penalty=alpha, patience=patience, max_ratio=0.0, max_extra=20)
    compared = 0
    for number, found in enumerate(beam(mine, prompts(), options)):
        part = slice(3 * number, 3 * number + 3)
        if all(len(tokens) <= 20 for tokens in expected[part]):
            compared += 1
            assert [list(h.tokens) for h in found] == expected[part]
            assert [h.score for h in found] == pytest.approx(scores[part], abs=1e-4)
    assert compared >= 2


@pytest.mark.parametrize(("alpha", "cached"), [(0.0, True), (0.7, False), (1.0, True), (-0.5, True)])
def test_beams_without_an_end(pair: Pair, alpha: float, cached: bool) -> None:
    """All are cut off at the greatest length, which is then the same number for both."""
    theirs, mine = pair
    mine.specials = ENDLESS
    expected, scores = generate(
        theirs,
        ends=False,
        num_beams=3,
        num_return_sequences=3,
        early_stopping=True,
        length_penalty=alpha,
        max_new_tokens=12,
        use_cache=cached,
    )
    options = SearchOptions(beam=3, n_best=3, length_penalty=alpha, max_ratio=0.0, max_extra=12)
    found = [h for hypotheses in beam(mine, prompts(), options) for h in hypotheses]
    assert [list(h.tokens) for h in found] == expected
    assert [h.score for h in found] == pytest.approx(scores, abs=1e-4)


@dataclass(frozen=True)
class Whole:
    """All tokens so far, a length a row."""

    tokens: Tensor
    lengths: Tensor

    def select(self, rows: Tensor) -> Whole:
        return Whole(self.tokens[rows], self.lengths[rows])


class Anew(nn.Module):
    """A GPT that remembers nothing: each step runs over the whole text."""

    cross_attentions = ()

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model, self.precision = model, model.precision
        self.specials, self.max_len, self.logits = model.specials, model.max_len, model.logits
        self.first, self.room = model.first, model.room

    def start(self, inputs: Tensor) -> Whole:
        return Whole(inputs.clamp(min=0), (inputs >= 0).sum(1) - 1)

    def step(self, tokens: Tensor, state: Whole) -> tuple[Tensor, Whole]:
        (width,) = tokens.shape[1:]
        places = state.lengths[:, None] + torch.arange(width)
        whole = nn.functional.pad(state.tokens, (0, width)).scatter(1, places, tokens)
        whole = whole[:, : int(places.max()) + 1]
        hidden = torch.cat(
            [self.model(row[None, : int(p[-1]) + 1])[:, p] for row, p in zip(whole, places, strict=True)]
        )
        return hidden, Whole(whole, state.lengths + width)


def test_remembering_changes_nothing(pair: Pair) -> None:
    _, mine = pair
    anew: Any = Anew(mine)
    options = SearchOptions(beam=3, n_best=2, max_ratio=0.0, max_extra=15)
    same(greedy(mine, prompts(), options), greedy(anew, prompts(), options))
    same(beam(mine, prompts(), options), beam(anew, prompts(), options))
    drawn = SamplingOptions(samples=3, seed=4)
    same(sample(mine, prompts(), drawn, options), sample(anew, prompts(), drawn, options))


def same(one: list[list[Hypothesis]], other: list[list[Hypothesis]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert [h.tokens for h in mine] == [h.tokens for h in theirs]
        assert [h.finished for h in mine] == [h.finished for h in theirs]
        for h, again in zip(mine, theirs, strict=True):
            assert h.token_log_probs == pytest.approx(again.token_log_probs, abs=1e-6)


@pytest.mark.parametrize("finished", [True, False])
def test_a_continuation_is_scored_after_its_prompt(pair: Pair, finished: bool) -> None:
    """Prompts and continuations of unequal lengths; one fills the context while others have far to go."""
    theirs, mine = pair
    draw = torch.Generator().manual_seed(5)
    sizes = [(1, 47), (5, 0), (46, 2), (40, 3), (2, 9), (47, 1), (48, 0)]
    rows = [torch.randint(0, END, (before + after,), generator=draw).tolist() for before, after in sizes]
    pairs = [(row[:before], row[before:]) for row, (before, _) in zip(rows, sizes, strict=True)]
    found = score(mine, prompts([p for p, _ in pairs]), [t for _, t in pairs], SearchOptions(), finished)
    for (prompt, target), h in zip(pairs, found, strict=True):
        with torch.no_grad():
            log_probs = theirs(torch.tensor([[*prompt, *target]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        said = [*target, END] if finished else target
        expected = [float(log_probs[i, token]) for i, token in enumerate(said)]
        assert h.token_log_probs == pytest.approx(expected, abs=1e-6)
        assert h.tokens == tuple(target)
    (alone,) = score(mine, prompts([pairs[2][0]]), [pairs[2][1]], SearchOptions(), finished)
    assert alone.token_log_probs == pytest.approx(found[2].token_log_probs, abs=1e-9)


def test_what_was_found_is_what_scoring_gives(pair: Pair) -> None:
    _, mine = pair
    options = SearchOptions(beam=3, n_best=3, max_ratio=0.0, max_extra=10, no_repeat=2, suppress=(0,))
    for hypotheses in zip(*beam(mine, prompts(), options), strict=True):
        for finished in (True, False):
            again = score(mine, prompts(), [h.tokens for h in hypotheses], options, finished)
            for h, other in zip(hypotheses, again, strict=True):
                assert 0 not in h.tokens
                if h.finished == finished:
                    assert h.token_log_probs == pytest.approx(other.token_log_probs, abs=1e-6)
                    assert h.score == pytest.approx(other.score, abs=1e-6)


def tiny(**options: Any) -> GPT:
    torch.manual_seed(8)
    config = GPTConfig(**{"dim": 16, "num_heads": 2, "num_layers": 1, "max_len": 12, "dropout": 0.0, **options})
    model = GPT(config, VOCAB).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.4 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("positions", ["learned", "rotary", "alibi"])
def test_a_text_ends_where_the_context_does(positions: str) -> None:
    model = tiny(positions=positions)
    model.specials = ENDLESS
    long = SearchOptions(beam=2, max_ratio=0.0, max_extra=20)
    for search in (greedy, beam):
        sizes = [len(hypotheses[0].tokens) for hypotheses in search(model, prompts([*PROMPTS, [1] * 12]), long)]
        assert sizes == ([20] * 5 if positions == "alibi" else [7, 11, 10, 5, 0])
    if positions != "alibi":
        with pytest.raises(ValueError, match="at most 12 tokens, not 13"):
            greedy(model, prompts([[1] * 13, [1]]))
        with pytest.raises(ValueError, match="room for 2 tokens, but a target has 3"):
            score(model, prompts([[1] * 10]), [[1] * 3])
        with pytest.raises(ValueError, match="room for 2 tokens, but a prefix has 3"):
            beam(model, prompts([[1] * 10]), long, [[1] * 3])
    with pytest.raises(ValueError, match="a prompt needs a token, but row 1 has none"):
        greedy(model, prompts([[1], []]))
    assert greedy(model, prompts([])) == beam(model, prompts([])) == []


def test_specials_are_the_model_s() -> None:
    """Weft's own numbers, and a published vocabulary in which these are words."""
    model, options = tiny(), SearchOptions(max_ratio=0.0, max_extra=11)
    row = torch.tensor([[5, 0], [6, 7]])  # 0 is padding here
    ((one,), (_,)) = greedy(model, row, options)
    ((alone,),) = greedy(model, row[:1, :1], options)
    assert one.tokens == alone.tokens
    drawn = SamplingOptions(samples=60, temperature=9.0)
    for numbers, closed in ((Specials(), {0, 1, 2}), (ENDING, {END}), (ENDLESS._replace(never=(END, 4)), {END, 4})):
        model.specials = numbers
        (found,) = sample(model, torch.tensor([[5]]), drawn, options)
        assert {token for h in found for token in h.tokens} == set(range(VOCAB)) - closed
        assert any(h.finished for h in found) == (numbers.eos not in numbers.never)
    with pytest.raises(ValueError, match=rf"other than EOS \({END}\)"):
        greedy(model, torch.tensor([[5]]), SearchOptions(suppress=(END,)))
    model.specials = ENDING._replace(eos=VOCAB)
    with pytest.raises(ValueError, match=f"token {VOCAB} is not in the vocabulary of {VOCAB}"):
        greedy(model, torch.tensor([[5]]))


def test_beginnings_and_alternatives() -> None:
    model = tiny()
    model.specials = ENDING
    options = SearchOptions(beam=2, max_ratio=0.0, max_extra=6)
    for (h,) in beam(model, prompts(PROMPTS[:3]), options, [[0, 2], [], [0]]):
        assert len(h.tokens) <= 6
    found = alternatives(model, prompts([[3, 0]]), [0, 5, 1], 1, k=VOCAB, options=options, complete=True)
    with torch.no_grad():
        expected = model.logits(model(torch.tensor([[3, 0, 0]])))[0, -1].softmax(-1)
    assert sorted(a.token for a in found) == list(range(VOCAB))
    for a in found:
        assert a.probability == pytest.approx(float(expected[a.token]))
        assert a.completion is not None
        assert a.completion.tokens[:2] == ((0,) if a.token == END else (0, a.token))


def test_samples_are_the_same_in_any_company() -> None:
    model = tiny(max_len=64).float()
    model.specials = ENDING
    options = SearchOptions(max_ratio=0.0, max_extra=12, exact=True)
    drawn = {"seed": 6, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "typical_p": 0.95}
    together = sample(model, prompts(), SamplingOptions(samples=3, **drawn), options)
    assert len({h.tokens for hypotheses in together for h in hypotheses}) == 12
    for chosen in ([0], [3], [2, 0, 1], [1, 1]):
        rows = prompts([PROMPTS[i] for i in chosen])
        for count in (1, 3, 5):
            apart = sample(model, rows, SamplingOptions(samples=count, **drawn), options, numbers=chosen)
            assert [found[:3] for found in apart] == [together[i][:count] for i in chosen]
