"""A record of a search holds the paths that were chosen, for every model and every way of searching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.config import ConvolutionalConfig, GPTConfig, RecurrentConfig, Specials, TransformerConfig
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import Hypothesis, SearchOptions
from weft.decoding.sampling import SamplingOptions, sample
from weft.decoding.sliding import Sliding
from weft.kernels.plain import plain
from weft.models.contract import Seq2Seq
from weft.models.convolutional import Convolutional
from weft.models.gpt import GPT
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer
from weft.observe import Record

WORDS = 20
SOURCE = torch.tensor([[5, 6, 7, 8, 9, 2], [9, 4, 2, 0, 0, 0], [6, 11, 6, 2, 0, 0]])


def _transformer(**more: Any) -> nn.Module:
    sizes: dict[str, Any] = {"dim": 16, "num_heads": 4, "ffn_dim": 32, "encoder_layers": 2, "decoder_layers": 2}
    return Transformer(TransformerConfig(**{**sizes, **more}), WORDS, WORDS)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": _transformer,
    "grouped heads": lambda: _transformer(num_kv_heads=2),
    "rotary": lambda: _transformer(positions="rotary"),
    "shaw": lambda: _transformer(positions="shaw"),
    "recurrent": lambda: Recurrent(RecurrentConfig(dim=16, embed_dim=12), WORDS, WORDS),
    "dot score": lambda: Recurrent(RecurrentConfig(dim=16, embed_dim=12, attention="dot"), WORDS, WORDS),
    "convolutional": lambda: Convolutional(
        ConvolutionalConfig(dim=16, embed_dim=12, encoder_layers=2, decoder_layers=2), WORDS, WORDS
    ),
    "gpt": lambda: GPT(GPTConfig(dim=16, num_heads=4, ffn_dim=32, num_layers=2, max_len=40), WORDS),
    "llama": lambda: GPT(
        GPTConfig(
            dim=16, num_heads=4, num_kv_heads=2, ffn_dim=32, num_layers=2, max_len=40, positions="rotary", norm="rms"
        ),
        WORDS,
    ),
}
_OPTIONS = SearchOptions(max_ratio=1.0, max_extra=6)
Found = list[list[Hypothesis]]
SEARCHES: dict[str, Callable[[Seq2Seq, Tensor], Found]] = {
    "greedy": lambda model, source: greedy(model, source, _OPTIONS),
    "beam": lambda model, source: beam(model, source, SearchOptions(beam=4, n_best=2, max_ratio=1.0, max_extra=6)),
    "coverage": lambda model, source: beam(
        model, source, SearchOptions(beam=3, coverage_penalty=0.3, max_ratio=1.0, max_extra=6)
    ),
    "exact beam": lambda model, source: beam(model, source, SearchOptions(beam=4, exact=True, max_extra=6)),
    "sampling": lambda model, source: sample(model, source, SamplingOptions(samples=2, seed=3), _OPTIONS),
}
PAIRS = [
    (name, search) for name in MODELS for search in SEARCHES if not (search == "coverage" and name in ("gpt", "llama"))
]


def _made(name: str, larger: float = 2.0) -> tuple[Seq2Seq, Tensor]:
    torch.manual_seed(4)
    module = MODELS[name]().eval().double()  # in which only a fault can be as large as 1e-9
    with torch.no_grad():  # so that hypotheses differ, and some end early
        for parameter in module.parameters():
            parameter.mul_(larger)
    model = cast(Seq2Seq, module)
    return model, torch.tensor([[5, 6, 7, 8], [9, 4, 0, 0], [6, 11, 6, 0]]) if isinstance(module, GPT) else SOURCE


def _at_once(model: Seq2Seq, source: Tensor, target: Sequence[int]) -> Record:
    """What the model shows when it reads one source and one whole target, by the plain formulas."""
    real = source[source != model.specials.pad]
    with plain(), torch.no_grad(), weft.record(cast(nn.Module, model), kinds=("weights", "gates", "hidden")) as seen:
        if isinstance(model, GPT):
            model(torch.cat([real, torch.tensor(list(target), dtype=torch.int64)])[None])
        else:
            cast(nn.Module, model)(real[None], torch.tensor([[model.specials.bos, *target]]))
    return seen


@pytest.mark.parametrize(("name", "search"), PAIRS)
def test_a_search_shows_what_its_chosen_hypotheses_show_when_read_at_once(name: str, search: str) -> None:
    model, source = _made(name)
    unheard = SEARCHES[search](model, source)
    with weft.record(cast(nn.Module, model), kinds=("weights", "gates", "hidden")) as seen:
        found = SEARCHES[search](model, source)
    assert found == unheard  # tokens, scores and log-probabilities to the last bit
    chosen = [h for best in found for h in best] if search == "sampling" else [best[0] for best in found]
    owner = [row for row, best in enumerate(found) for _ in best] if search == "sampling" else range(len(found))
    assert len({len(h.tokens) for h in chosen}) > 1, "rows should end at different steps"
    compared = set()
    for row, (hypothesis, number) in enumerate(zip(chosen, owner, strict=True)):
        for entry in _at_once(model, source[number], hypothesis.tokens):
            shown = seen.calls(entry.name, entry.kind)
            assert len(shown) == 1, "one entry for the whole search"
            for value, expected in entry.values.items():
                compared.add((entry.kind, value))
                torch.testing.assert_close(
                    _cut(shown[0].values[value][row], expected[0]), expected[0], rtol=0.0, atol=1e-9
                )
                if value == "weights":
                    total = expected[0].sum(-1)
                    torch.testing.assert_close(total, torch.ones_like(total), rtol=0.0, atol=1e-5)
                    assert not shown[0].weights[row][..., expected.shape[-1] :].any(), "padding was looked at"
    assert ("weights", "weights") in compared
    assert ("hidden", "hidden") in compared


def _cut(x: Tensor, like: Tensor) -> Tensor:
    """The first part of x, of the size of another tensor; behind it is padding."""
    return x[tuple(slice(size) for size in like.shape)]


@pytest.mark.parametrize("name", ["transformer", "grouped heads", "rotary", "gpt", "llama"])
@pytest.mark.parametrize("search", ["greedy", "beam", "exact beam", "sampling"])
def test_weights_are_the_formula_of_the_vectors_beside_them(name: str, search: str) -> None:
    model, source = _made(name, larger=1.0)
    cast(nn.Module, model).float()
    with weft.record(cast(nn.Module, model), kinds="vectors") as seen:
        SEARCHES[search](model, source)
    for entry in seen:
        q, k = entry["queries"], entry["keys"]
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-2, -1) * entry["scale"]
        allowed = entry.values.get("allowed", torch.ones(1, 1, 1, 1, dtype=torch.bool))
        expected = scores.masked_fill(~allowed, float("-inf")).softmax(-1)
        looks = (entry.weights.sum(-1) > 0)[..., None]  # rows behind a path's end are zero
        assert bool((allowed | ~looks).any(-1).all()), "who looks somewhere may"
        difference = (entry.weights - expected).masked_fill(~looks, 0.0).abs().max()
        assert difference < 1e-6, (entry.name, float(difference))


def test_the_distributions_are_those_that_the_tokens_were_chosen_by() -> None:
    model, source = _made("transformer")
    with weft.record(cast(nn.Module, model), kinds="distribution") as seen:
        found = beam(model, source, SearchOptions(beam=3, max_extra=6))
    log_probs = seen[""]["log_probs"]
    for row, (best,) in enumerate(found):
        tokens = [*best.tokens, model.specials.eos][: len(best.token_log_probs)]
        said = log_probs[row, range(len(tokens)), tokens]
        assert said.tolist() == list(best.token_log_probs)
        assert torch.allclose(log_probs[row, : len(tokens)].exp().sum(-1), torch.ones(len(tokens)).double())


@pytest.mark.parametrize("search", ["greedy", "beam", "sampling"])
def test_the_search_can_be_followed_from_its_table(search: str) -> None:
    model, source = _made("transformer")
    with weft.record(cast(nn.Module, model), kinds="search") as seen:
        found = SEARCHES[search](model, source)
    table = {name: column.tolist() for name, column in seen[""].values.items()}
    said: dict[tuple[int, int], list[int]] = {}
    ended: dict[int, list[tuple[list[int], float]]] = {}
    rows = zip(*(table[name] for name in ("step", "source", "parent", "row", "token", "total")), strict=True)
    for step, number, parent, row, token, total in rows:
        tokens = [*(said[step - 1, parent] if step else []), token]
        if row >= 0:
            said[step, row] = tokens
        else:
            ended.setdefault(number, []).append((tokens, total))
    for number, best in enumerate(found):
        for hypothesis in best:
            if hypothesis.finished:
                whole = [*hypothesis.tokens, model.specials.eos]
                totals = [total for tokens, total in ended[number] if tokens == whole]
                assert totals == [pytest.approx(hypothesis.log_prob, abs=1e-4)] or (search == "sampling" and totals)


def test_two_searches_under_one_record_are_two_calls() -> None:
    model, source = _made("transformer")
    module = cast(nn.Module, model)
    with weft.record(module, names="decoder.0.*") as seen:
        first = beam(model, source[:1], SearchOptions(beam=2, max_extra=3))
        second = greedy(model, source[1:], _OPTIONS)
    one, two = seen.calls("decoder.0.cross_attention")
    assert [one.call, two.call] == [0, 1]
    assert one.weights.shape[:3] == (1, 4, len(first[0][0].tokens) + 1)
    assert two.weights.shape[0] == 2
    assert {entry.name for entry in seen} == {"decoder.0.attention", "decoder.0.cross_attention"}
    assert second


def test_a_prompt_beyond_the_end_of_another_is_cut_where_it_ends() -> None:
    """The shorter prompts of a batch are padded when they are read; no row of padding may stay in their paths."""
    model, source = _made("gpt")
    with weft.record(cast(nn.Module, model)) as seen:
        found = greedy(model, source, SearchOptions(max_extra=4))
    weights = seen["blocks.0.attention"].weights
    for row, prompt in enumerate(source.tolist()):
        rows = sum(token != 0 for token in prompt) + len(found[row][0].tokens)
        assert torch.equal(weights[row].sum(-1) > 0, (torch.arange(weights.shape[2]) < rows).expand(4, -1))


def test_recording_in_training_shows_weights_before_dropout_and_changes_nothing() -> None:
    torch.manual_seed(4)
    model = _transformer(dropout=0.3, attention_dropout=0.3).train()
    batch = (SOURCE, torch.cat([torch.ones(3, 1, dtype=torch.int64), SOURCE], 1))

    class Pair:
        source, target = batch

    def run() -> list[Tensor]:
        torch.manual_seed(5)
        model.zero_grad()
        loss = cast(Seq2Seq, model).loss(cast(Any, Pair)).total
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    unheard = run()
    with weft.record(model, kinds=("weights", "vectors", "added", "hidden")) as seen:
        heard = run()
    assert all(torch.equal(a, b) for a, b in zip(unheard, heard, strict=True))
    for entry in seen.of_kind("weights"):
        sums = entry.weights.sum(-1)
        assert torch.allclose(sums, torch.ones_like(sums)), entry.name


def test_specials_without_weft_numbers_are_followed_too() -> None:
    model, source = _made("gpt")
    model.specials = Specials(eos=3, bos=1, pad=0)
    with weft.record(cast(nn.Module, model)) as seen:
        found = beam(model, source, SearchOptions(beam=3, max_extra=5))
    assert len(seen["blocks.1.attention"].weights) == len(found)


def test_beyond_the_context_keys_stand_where_they_do_in_the_text() -> None:
    torch.manual_seed(4)
    gpt = GPT(GPTConfig(dim=16, num_heads=4, ffn_dim=32, num_layers=2, max_len=8, positions="none"), WORDS).eval()
    model = cast(Seq2Seq, Sliding(gpt))
    prompts = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [9, 4, 5, 0, 0, 0, 0, 0, 0, 0]])
    options = SearchOptions(max_ratio=0.0, max_extra=9)
    unheard = greedy(model, prompts, options)
    with weft.record(gpt, kinds="vectors") as seen:
        found = greedy(model, prompts, options)
    assert found == unheard
    for entry in seen.of_kind("weights"):
        for row, prompt in enumerate(prompts.tolist()):
            length = sum(token != 0 for token in prompt)
            text = [*prompt[:length], *found[row][0].tokens]
            for place in range(length - 1, len(text)):  # what the model saw when it read this token
                state = model.start(torch.tensor([text[: place + 1]]))
                begin = int(cast(Any, state).begins[0])
                with torch.no_grad(), weft.record(gpt) as window:
                    gpt(torch.tensor([text[begin : place + 1]]))
                expected = window.calls(entry.name, "weights")[0].weights[0, :, -1]
                mine = entry.weights[row, :, place]
                torch.testing.assert_close(mine[:, begin : place + 1], expected, rtol=0.0, atol=1e-5)
                assert not mine[:, :begin].any()
                assert not mine[:, place + 1 :].any()
        assert entry["keys"].shape[2] == entry.weights.shape[3]


def test_a_record_hears_of_its_own_models_searches_only() -> None:
    one, source = _made("transformer")
    other, prompts = _made("gpt")
    with weft.record(cast(nn.Module, one), kinds=("distribution", "search", "weights")) as seen:
        greedy(other, prompts, _OPTIONS)
    assert len(seen) == 0
    with weft.record(cast(nn.Module, one), names="decoder.0.*", kinds=("distribution", "weights")) as seen:
        greedy(one, source, _OPTIONS)
    assert {entry.kind for entry in seen} == {"weights", "distribution"}


def test_in_exact_mode_no_padding_of_keys_is_shown() -> None:
    model, source = _made("transformer")
    with weft.record(cast(nn.Module, model)) as seen:
        beam(model, source, SearchOptions(beam=2, exact=True, max_extra=3))
    assert {entry.weights.shape[3] for entry in seen if "cross" in entry.name} == {source.shape[1]}


@pytest.mark.parametrize(("name", "search"), PAIRS)
def test_in_fp32_the_weights_are_those_of_the_plain_formulas(name: str, search: str) -> None:
    model, source = _made(name, larger=1.0)
    cast(nn.Module, model).float()
    with weft.record(cast(nn.Module, model)) as seen:
        found = SEARCHES[search](model, source)
    paths = [(number, h) for number, best in enumerate(found) for h in (best if search == "sampling" else best[:1])]
    for row, (number, hypothesis) in enumerate(paths):
        for entry in _at_once(model, source[number], hypothesis.tokens).of_kind("weights"):
            mine = _cut(seen.calls(entry.name, "weights")[0].weights[row], entry.weights[0])
            torch.testing.assert_close(mine, entry.weights[0], rtol=0.0, atol=1e-6)
            sums = mine.sum(-1)
            torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0.0, atol=1e-5)
