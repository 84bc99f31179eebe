"""A context that slides: against a loop that runs the model on the right window, in any company and portions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.decoding.table import TableModel, batch
from weft.config import GPTConfig, Specials
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import SearchOptions
from weft.decoding.sampling import SamplingOptions, sample
from weft.decoding.score import score
from weft.decoding.sliding import Sliding, SlidingState
from weft.decoding.steps import padded
from weft.models.gpt import GPT

VOCAB, CONTEXT = 11, 8
PROMPTS = [[5, 0, 3], [7], [1, 2, 3, 4, 5, 6, 7], list(range(10)) * 2, [4] * CONTEXT, [0] * (CONTEXT + 1)]


def make(positions: str = "learned", context: int = CONTEXT, end: bool = False, **options: Any) -> GPT:
    torch.manual_seed(2)
    sizes = {"dim": 16, "num_heads": 2, "num_layers": 2, "dropout": 0.0}
    model = GPT(GPTConfig(**{**sizes, "positions": positions, "max_len": context, **options}), VOCAB).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model.specials = Specials(pad=-1, bos=VOCAB - 1, eos=VOCAB - 1, never=() if end else (VOCAB - 1,))
    return model.double()


def rows(prompts: list[list[int]]) -> Tensor:
    return padded(prompts, torch.device("cpu"), -1)


def window(tokens: list[int], context: int) -> list[int]:
    """What the model sees of a text that came token by token: a full context is cut to its half before the next."""
    seen: list[int] = []
    for token in tokens:
        if len(seen) == context:
            seen = seen[len(seen) + 1 - max(context // 2, 1) :]
        seen.append(token)
    return seen


def reference(model: GPT, prompt: list[int], count: int, context: int) -> list[int]:
    said: list[int] = []
    for _ in range(count):
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([window([*prompt, *said], context)])))[0, -1]
        said.append(int(logits[: VOCAB - 1].argmax()))
    return said


@pytest.mark.parametrize(
    ("positions", "context"), [("learned", 1), ("rotary", 2), ("learned", 3), ("rotary", 7), ("learned", 8)]
)
def test_greedy_is_the_loop_over_windows_in_any_company(positions: str, context: int) -> None:
    model = make(positions, context)
    options = SearchOptions(max_ratio=0.0, max_extra=20)
    together = [h for (h,) in greedy(Sliding(model), rows(PROMPTS), options)]
    for prompt, h in zip(PROMPTS, together, strict=True):
        assert list(h.tokens) == reference(model, prompt, 20, context)
        ((alone,),) = greedy(Sliding(model), rows([prompt]), options)
        assert alone.tokens == h.tokens
        assert alone.token_log_probs == pytest.approx(h.token_log_probs)
    if context == CONTEXT:
        assert len({h.tokens for h in together}) > 2, "the test needs texts that differ"


@pytest.mark.parametrize("end", [True, False])
def test_beams_and_samples_slide_too(end: bool) -> None:
    sliding = Sliding(make(end=end))
    options = SearchOptions(beam=3, n_best=2, max_ratio=0.0, max_extra=15)
    drawn = SamplingOptions(samples=2, seed=3)
    beams, samples = beam(sliding, rows(PROMPTS), options), sample(sliding, rows(PROMPTS), drawn, options)
    for number, prompt in enumerate(PROMPTS[:4]):
        (alone,) = beam(sliding, rows([prompt]), options)
        assert [h.tokens for h in alone] == [h.tokens for h in beams[number]]
        (again,) = sample(sliding, rows([prompt]), drawn, options, numbers=[number])
        assert [h.tokens for h in again] == [h.tokens for h in samples[number]]
    for found in (beams, samples):  # what was said by one token at a time is scored in one step
        for column in zip(*found, strict=True):
            for finished in (True, False):
                scores = score(sliding, rows(PROMPTS), [h.tokens for h in column], options, finished)
                for h, other in zip(column, scores, strict=True):
                    assert h.finished != finished or h.token_log_probs == pytest.approx(other.token_log_probs)
    assert all(len(h.tokens) == 15 for found in beams for h in found) == (not end)


def test_until_the_context_is_full_all_is_as_without() -> None:
    model = make(context=24).float()
    few, prompts = SearchOptions(beam=3, n_best=3, max_ratio=0.0, max_extra=17), rows(PROMPTS[:3])
    for options in (few, SearchOptions(beam=3, max_ratio=0.0, max_extra=17, exact=True)):
        assert beam(Sliding(model), prompts, options) == beam(model, prompts, options)
        assert greedy(Sliding(model), prompts, options) == greedy(model, prompts, options)
    full = rows([[4] * 24, [3] * 23])
    with torch.no_grad():
        ours, _ = Sliding(model).step(model.first(full)[:, None], Sliding(model).start(full))
        bare, _ = model.step(model.first(full)[:, None], model.start(full))
    assert torch.equal(ours, bare)
    endless = make("alibi")
    assert endless.max_len is None
    assert greedy(Sliding(endless), prompts, few) == greedy(endless, prompts, few)


def test_portions_prompts_cuts_and_joins_come_to_the_same() -> None:
    """What the model sees follows from the text alone, however it came to be."""
    model = Sliding(make())
    text = torch.randint(0, VOCAB - 1, (3, 40))

    def states(sizes: list[int], begun: int) -> tuple[Tensor, SlidingState]:
        state, parts, place = model.start(text[:, : begun + 1]), [], begun
        for size in sizes:
            hidden, state = model.step(text[:, place : place + size], state)
            parts.append(hidden)
            place += size
        return torch.cat(parts, 1), state

    with torch.no_grad():
        whole, state = states([40], 0)
        for sizes, begun in (([1] * 40, 0), ([3, 1, 20, 16], 0), ([5, 5], 30), ([2], 38), ([25], 15)):
            torch.testing.assert_close(states(sizes, begun)[0], whole[:, begun:])
        cut = state.truncate(torch.tensor([3, 39, 20]))
        assert cut.lengths.tolist() == [3, 39, 20]
        following = text[torch.arange(3), cut.lengths][:, None]
        for past in (cut, SlidingState.cat([cut.select(torch.tensor([0])), cut.select(torch.tensor([1, 2]))])):
            hidden, after = model.step(following, past)
            torch.testing.assert_close(hidden[:, 0], whole[torch.arange(3), cut.lengths])
            assert after.lengths.tolist() == [4, 40, 21]
        _, late = states([30], 0)
        joined = SlidingState.cat([state.truncate(torch.full((3,), 39)), late])
        hidden, _ = model.step(torch.cat([text[:, 39:], text[:, 30:31]]), joined)
        torch.testing.assert_close(hidden[:, 0], torch.cat([whole[:, 39], whole[:, 30]]))
    with pytest.raises(ValueError, match="cannot cut rows of lengths"):
        state.truncate(torch.tensor([3, 41, 20]))
    with pytest.raises(ValueError, match="at least one state"):
        SlidingState.cat([])


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a language model"):
        greedy(Sliding(TableModel()), batch([[4], [4, 5]]))
    for prompt, message in (([[]], "needs a token"), ([[3, -1, 4]], "padding must be at the right")):
        with pytest.raises(ValueError, match=message):
            greedy(Sliding(make()), rows(prompt))
    assert greedy(Sliding(make()), rows([])) == []


def test_it_is_the_model_in_all_else() -> None:
    model = make()
    sliding = Sliding(model)
    assert (sliding.max_len, sliding.room(rows(PROMPTS)), sliding.specials) == (None, None, model.specials)
    assert {id(p) for p in sliding.parameters()} == {id(p) for p in model.parameters()}
    assert isinstance(sliding, nn.Module)
    hidden = torch.randn(2, 16).double()
    assert torch.equal(sliding.logits(hidden), model.logits(hidden))
