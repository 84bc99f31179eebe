"""The walk through a GPT: its numbers are those of the forward pass and of transformers, and the text has them."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor

import weft
from weft.api.walk import walk
from weft.config import GPTConfig, Specials
from weft.decoding.options import SearchOptions
from weft.decoding.sampling import SamplingOptions, sample
from weft.interop import huggingface, llama2c
from weft.models.contract import Seq2Seq
from weft.models.gpt import GPT
from weft.views import walk as views
from weft.views.stream import Draw, Walk
from weft.views.terminal import width
from weft.views.walk import WalkView, walk_text

WORDS = 37
LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "tie": False}


def tiny(**options: Any) -> GPTConfig:
    sizes = {"dim": 16, "num_heads": 4, "num_layers": 3, "ffn_dim": 24, "max_len": 64, "dropout": 0.1}
    return GPTConfig(**{**sizes, **options})


CONFIGS = {
    "gpt2": tiny(activation="gelu_tanh"),
    "llama": tiny(**LLAMA, num_kv_heads=2),
    "llama head_dim": tiny(**LLAMA, head_dim=6, num_kv_heads=1),
    "llama biased": tiny(**{**LLAMA, "attention_bias": True}),
    "alibi": tiny(positions="alibi"),
    "none": tiny(positions="none", bias=False),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def make(config: GPTConfig) -> GPT:
    """A model whose parameters are all at work, biases and norms too; no token is special to it."""
    model = GPT(config, WORDS).eval()
    model.specials = Specials(pad=-1, bos=0, eos=0, never=())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def words(count: int) -> list[int]:
    return torch.randint(0, WORDS, (count,)).tolist()


def labels(tokens: Any) -> list[str]:
    return [f"w{token}" for token in tokens]


@every_config
def test_it_is_the_forward_pass(config: GPTConfig) -> None:
    model, tokens = make(config), words(9)
    seen = walk(model, tokens)
    with torch.no_grad():
        hidden = model(torch.tensor([tokens]))
        assert torch.equal(seen.hidden, hidden[0])
        assert torch.equal(seen.logits, model.logits(hidden[:, -1])[0])
        torch.testing.assert_close(seen.logits, model.logits(hidden)[0, -1], rtol=0, atol=1e-5)
        assert torch.equal(seen.tokens, model.embedding[tokens])
        stream = model._embed(torch.tensor([tokens]), torch.arange(9))
        assert torch.equal(seen.stream[0], stream[0])
    assert (seen.positions is not None) == (config.positions == "learned")
    assert seen.scheme == config.positions
    assert (seen.biases is not None) == (config.bias if config.attention_bias is None else config.attention_bias)
    assert seen.stream.shape == (4, 9, 16)
    assert seen.heads.shape == (3, 4, 9, 16)
    assert seen.weights.shape == (3, 4, 9, 9)
    torch.testing.assert_close(seen.probabilities.sum(), torch.tensor(1.0, dtype=torch.float64))
    added = seen.heads.sum((0, 1)) + seen.feed_forward.sum(0)
    added = added if seen.biases is None else added + seen.biases.sum(0)
    torch.testing.assert_close(seen.stream[0] + added, seen.stream[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama head_dim", "llama biased"])
def test_transformers_walks_the_same_way(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = CONFIGS[name]
    model, tokens = make(config), words(11)
    huggingface.write(tmp_path, config, model.state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        found = theirs(torch.tensor([tokens]), output_hidden_states=True, output_attentions=True)
    seen = walk(model, tokens)

    def close(mine: Tensor, other: Tensor) -> None:
        torch.testing.assert_close(mine, other, rtol=0, atol=2e-5)

    close(seen.stream[:-1], torch.cat(found.hidden_states[:-1]))
    close(seen.hidden, found.hidden_states[-1][0])  # theirs has the last norm in it
    close(seen.weights, torch.cat(found.attentions))
    close(seen.logits, found.logits[0, -1])
    close(seen.probabilities, found.logits[0, -1].double().softmax(-1))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_what_a_head_added_is_what_is_missing_without_it(name: str) -> None:
    """The columns of W_O that belong to a head set to 0: the attention of the first block adds just so much less."""
    model, tokens = make(CONFIGS[name]), words(7)
    seen = walk(model, tokens)
    weight = cast(Tensor, model.blocks[0].attention.output.weight)  # type: ignore[union-attr]
    for head in range(4):
        columns = slice(4 * head, 4 * head + 4)
        kept = weight[:, columns].clone()
        weight[:, columns] = 0
        without = walk(model, tokens)
        weight[:, columns] = kept
        torch.testing.assert_close(seen.attention[0] - without.attention[0], seen.heads[0, head], rtol=0, atol=1e-5)
        assert without.heads[0, head].count_nonzero() == 0
        assert seen.heads[0, head].abs().max() > 0.01


@every_config
@pytest.mark.parametrize("training", [False, True])
def test_listening_changes_nothing(config: GPTConfig, training: bool) -> None:
    model, tokens = make(config).train(training), torch.randint(0, WORDS, (2, 6))

    def run() -> tuple[Tensor, list[Tensor], Tensor]:
        torch.manual_seed(3)
        model.zero_grad()
        hidden = model(tokens)
        hidden.square().sum().backward()
        return hidden, [p.grad for p in model.parameters() if p.grad is not None], torch.get_rng_state()

    alone = run()
    with weft.record(model, kinds=("weights", "added")):
        heard = run()
    assert torch.equal(alone[0], heard[0])
    assert torch.equal(alone[2], heard[2])
    assert all(torch.equal(a, b) for a, b in zip(alone[1], heard[1], strict=True))


def test_the_model_and_the_random_numbers_are_left_as_they_were() -> None:
    model = make(CONFIGS["gpt2"])
    model.train()
    model.blocks[1].eval()
    modes = [part.training for part in model.modules()]
    state = torch.get_rng_state()
    first, again = walk(model, [1, 2, 3]), walk(model, [1, 2, 3])
    assert torch.equal(first.stream, again.stream)  # no dropout
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [part.training for part in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not first.stream.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_other_precisions_add_up_too(name: str, dtype: torch.dtype) -> None:
    model, tokens = make(CONFIGS[name]), words(8)
    expected = walk(model, tokens)
    if dtype == torch.float64:
        model.double()
    else:
        model.precision = dtype
    seen = walk(model, tokens)
    assert seen.stream.dtype == dtype
    size = float(expected.stream.abs().max())
    torch.testing.assert_close(seen.stream.float(), expected.stream, rtol=0, atol=0.1 * size)


SAMPLINGS = {
    "plain": SamplingOptions(),
    "cold": SamplingOptions(temperature=0.5, top_k=5),
    "hot": SamplingOptions(temperature=3.0, top_p=0.8),
    "typical": SamplingOptions(min_p=0.2, typical_p=0.9),
    "penalty": SamplingOptions(repetition_penalty=1.7),
    "likeliest": SamplingOptions(top_k=1),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_draw_is_that_of_sampling(name: str, sampling: SamplingOptions) -> None:
    model, tokens = make(CONFIGS[name]), words(6)
    model.specials = Specials(pad=-1, bos=0, eos=WORDS - 1, never=(1, 2))
    options = SearchOptions(max_ratio=0, max_extra=1, min_len=1, suppress=(4,))
    for seed in range(8):
        chosen = replace(sampling, seed=seed)
        drawn = walk(model, tokens, sampling=chosen, options=options).draw
        (found,) = sample(cast(Seq2Seq, model), torch.tensor([tokens]), chosen, options)[0]
        assert found.tokens[0] == drawn.chosen
        assert not {1, 2, 4, WORDS - 1} & set(drawn.tokens.tolist())
        assert 0 < drawn.u < 1
        assert len(drawn.tokens) <= (sampling.top_k or WORDS)


def test_shares_are_the_probabilities_unless_a_rule_says_otherwise() -> None:
    model, tokens = make(CONFIGS["gpt2"]), words(5)
    plain = walk(model, tokens)
    order = plain.probabilities.sort(descending=True, stable=True)
    torch.testing.assert_close(plain.draw.shares, order.values, rtol=0, atol=1e-6)
    assert plain.draw.tokens.tolist() == order.indices.tolist()
    assert plain.draw.rule == ""
    cold = walk(model, tokens, sampling=SamplingOptions(temperature=0.5, top_k=3, seed=9))
    torch.testing.assert_close(cold.draw.shares, (2 * plain.logits.double()).topk(3).values.softmax(0))
    assert cold.draw.rule == "temperature 0.5, top_k 3"


def test_a_draw_falls_where_it_says() -> None:
    tokens, shares = torch.tensor([7, 8, 9]), torch.tensor([0.4, 0.2, 0.2], dtype=torch.float64)
    for u, place in ((0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (0.999, 2)):
        assert Draw(tokens, shares, u, int(tokens[place])).place == place
    assert Draw(tokens, shares, 0.1, 7).running.tolist() == pytest.approx([0.5, 0.75, 1.0])
    with pytest.raises(ValueError, match=r"expected that u = 0\.6 falls on the token 7"):
        Draw(tokens, shares, 0.6, 7)
    with pytest.raises(ValueError, match="every share is above 0"):
        Draw(tokens, torch.tensor([1.0, 0.0, 0.0]), 0.6, 7)


def nudged(tensor: Tensor) -> Tensor:
    """One number changed, by little."""
    changed = tensor.clone()
    changed.view(-1)[-1] += 1e-3 * tensor.abs().max() + 1e-3
    return changed


@pytest.mark.parametrize(
    ("field", "fact"),
    [
        ("tokens", "embedding [+] position = stream"),
        ("positions", "embedding [+] position = stream"),
        ("stream", "stream [+] feed-forward of block 3 = stream"),
        ("between", "stream [+] attention of block 3 = stream"),
        ("attention", "stream [+] attention of block 3 = stream"),
        ("feed_forward", "stream [+] feed-forward of block 3 = stream"),
        ("heads", "the heads of block 3 sum to what its attention added"),
        ("biases", "the heads of block 3 sum to what its attention added"),
        ("weights", "the weights of each token sum to 1"),
        ("logits", "without a rule the shares are the probabilities"),
    ],
)
def test_numbers_that_do_not_add_up_make_no_walk(field: str, fact: str) -> None:
    seen = walk(make(CONFIGS["gpt2"]), words(6))
    seen.check()
    with pytest.raises(ValueError, match=f"do not add up: expected that {fact}"):
        replace(seen, **{field: nudged(getattr(seen, field))})  # type: ignore[arg-type]


def test_a_look_ahead_makes_no_walk() -> None:
    seen = walk(make(CONFIGS["gpt2"]), words(6))
    with pytest.raises(ValueError, match="no token looks at a later one"):
        replace(seen, weights=seen.weights.flip(-1))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "at least one token, not none"),
        ([3, WORDS], f"a number from 0 to {WORDS - 1}, not {WORDS}"),
        ([-1], f"a number from 0 to {WORDS - 1}, not -1"),
        ([1] * 65, "at most 64 tokens, not 65"),
    ],
)
def test_tokens_that_cannot_be_walked_are_named(tokens: list[int], message: str) -> None:
    for name in ("gpt2", "llama"):
        with pytest.raises(ValueError, match=message):
            walk(make(CONFIGS[name]), tokens)


def test_with_everything_forbidden_there_is_no_draw() -> None:
    model = make(CONFIGS["gpt2"])
    model.specials = Specials(pad=-1, bos=0, eos=0, never=tuple(range(WORDS)))
    with pytest.raises(ValueError, match="no token to draw"):
        walk(model, [1])


def section(text: str, title: str) -> list[str]:
    """The lines of one step, without its title."""
    return re.split(r"(?m)^\d+\. ", text.split(f". {title}\n")[1])[0].splitlines()


def shown(name: str = "gpt2", count: int = 7, **options: Any) -> Walk:
    return walk(make(CONFIGS[name]), words(count), labels, **options)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_text_has_the_numbers_of_the_walk(name: str) -> None:
    seen = shown(name)
    text = walk_text(seen, width=100)

    tokens = section(text, "Text to tokens")
    assert tokens[2].split() == seen.labels
    assert [int(number) for number in tokens[3].split()] == seen.ids.tolist()

    for layer in range(3):
        rows = {line[:16].strip(): line for line in section(text, f"Block {layer + 1} of 3")}
        parts = {f"+ head {head + 1}": seen.heads[layer, head, -1] for head in range(4)}
        parts |= {"before": seen.stream[layer, -1], "= after": seen.stream[layer + 1, -1]}
        parts |= {"= attended": seen.between[layer, -1], "+ feed-forward": seen.feed_forward[layer, -1]}
        parts |= {} if seen.biases is None else {"+ bias": seen.biases[layer]}
        for title, vector in parts.items():
            found = re.search(r"\[(.*) … \] +([\d.]+)", rows[title])
            assert found is not None
            first = [float(value) for value in found[1].split()]
            assert first == pytest.approx(vector[: len(first)].tolist(), abs=0.0051)
            assert float(found[2]) == pytest.approx(float(vector.norm()), abs=0.0051)
        for head in range(4):
            weight, key = seen.weights[layer, head, -1].max(0)
            assert rows[f"+ head {head + 1}"].endswith(f" {float(weight):.2f} on {seen.labels[int(key)]}")

    stream = [line.split() for line in section(text, "The residual stream")[2:] if line]
    assert stream[0] == ["block", "0", "1", "2", "3"]
    for place, (label, *lengths) in enumerate(stream[1:]):
        assert label == seen.labels[place]
        assert list(map(float, lengths)) == pytest.approx(seen.stream[:, place].norm(dim=-1).tolist(), abs=0.0051)

    after = "\n".join(section(text, "Vector to probabilities")).split("probability\n")[1]
    scores = [line.split() for line in after.splitlines()[:10]]
    likeliest = seen.probabilities.topk(10)
    assert [row[0] for row in scores] == labels(likeliest.indices.tolist())
    assert [float(row[2]) for row in scores] == pytest.approx(likeliest.values.tolist(), abs=0.000051)
    assert [float(row[1]) for row in scores] == pytest.approx(seen.logits[likeliest.indices].tolist(), abs=0.0051)


def test_the_text_says_how_the_token_was_drawn() -> None:
    model, tokens = make(CONFIGS["gpt2"]), words(4)
    for seed in range(12):  # likely ones and unlikely ones
        seen = walk(model, tokens, labels, SamplingOptions(temperature=4.0, seed=seed))
        text = "\n".join(section(walk_text(seen), "The draw"))
        assert "temperature 4" in text
        assert f"u = {seen.draw.u:.4f}" in re.sub(r"\s+", " ", text)
        (line,) = [line for line in text.splitlines() if "◀" in line]
        name, share, start, end = line.split()[:4]
        assert name == f"w{seen.draw.chosen}"
        assert float(start) - 1e-4 <= seen.draw.u <= float(end) + 1e-4
        assert float(share) == pytest.approx(float(seen.draw.shares[seen.draw.place]), abs=1e-4)
        assert f'The next token is "w{seen.draw.chosen}", number {seen.draw.chosen}.' in text


@pytest.mark.parametrize("columns", [72, 80, 120])
@pytest.mark.parametrize("count", [1, 5, 40, 60])
def test_no_line_is_too_long_and_no_token_too_many(columns: int, count: int) -> None:
    seen = shown("llama", count)
    text = walk_text(seen, columns)
    assert max(map(width, text.splitlines())) <= columns
    rows = [line for line in section(text, "Tokens to vectors") if "[ " in line]
    assert [row.split()[0] for row in rows[-40:]] == seen.labels[-40:]
    assert ("(20 tokens before these)" in text) == (count == 60)


def test_the_chosen_attention_is_drawn() -> None:
    seen = shown()
    text = walk_text(seen, layer=1, head=2)
    assert "block 2, head 3 of 4, after the softmax" in text
    looks = section(text, "Where it looked")
    cells = next(line for line in looks if line.startswith(seen.labels[-1])).split()
    for head in range(4):
        weight, key = seen.weights[1, head, -1].max(0)
        assert cells[1 + 2 * head : 3 + 2 * head] == [seen.labels[int(key)], f"{float(weight):.2f}"]
    most = int(seen.heads[:, :, -1].norm(dim=-1).argmax())
    assert f"block {most // 4 + 1}, head {most % 4 + 1} of 4" in walk_text(seen)
    of_last = int(seen.heads[2, :, -1].norm(dim=-1).argmax())
    assert f"block 3, head {of_last + 1} of 4" in walk_text(seen, layer=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "there are 3 layers, counted from 0, so no layer 3"),
        ({"head": -1}, "there are 4 heads, counted from 0, so no head -1"),
        ({"width": 71}, "needs 72 columns and a token, not width 71"),
        ({"limit": 0}, "limit 0"),
    ],
)
def test_what_cannot_be_shown_is_named(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        walk_text(shown(count=2), **options)


def test_labels_of_any_script_keep_their_room() -> None:
    odd = ["狐", "a b", "\n", "e\u0301", "a-very-long-piece-of-text", "[bold]", "x" * 60]
    seen = walk(make(CONFIGS["gpt2"]), words(9), lambda tokens: [odd[token % len(odd)] for token in tokens])
    assert max(map(width, walk_text(seen).splitlines())) <= 80


def test_rich_shows_the_same_words_with_colours() -> None:
    seen = shown("llama")
    console = Console(width=90, force_terminal=True, color_system="standard", file=StringIO(), record=True)
    console.print(WalkView(seen))
    coloured = console.export_text(styles=True, clear=False)
    plain = [line.rstrip() for line in console.export_text().splitlines() if line.strip()]
    assert plain == [line for line in walk_text(seen, 90).splitlines() if line]
    assert "\x1b[1m1. Text to tokens" in coloured
    assert "\x1b[36m" in coloured


def test_in_a_pipe_it_is_plain_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    seen = shown()
    views.show(seen, layer=0)
    assert capsys.readouterr().out == walk_text(seen, 90, layer=0)
    monkeypatch.setenv("COLUMNS", "20")  # narrower than a walk can be
    views.show(seen)
    assert capsys.readouterr().out == walk_text(seen, 72)


def test_without_labels_tokens_are_their_numbers() -> None:
    seen = walk(make(CONFIGS["gpt2"]), [5, 6])
    assert seen.labels == ["5", "6"]
    assert replace(seen, names={}).labels == ["#5", "#6"]


def test_a_published_model_tells_a_story(weft_weights: Path) -> None:
    read = llama2c.read(weft_weights / "stories260K" / "stories260K.bin")
    pieces = llama2c.read_pieces(weft_weights / "stories260K" / "tok512.bin")
    model = GPT(read.config, read.vocab_size)
    model.load_state_dict(read.tensors)
    model.specials = Specials(pad=-1, bos=1, eos=2, never=())
    tokens = [1, *pieces.tokenizer().encode("Once upon a time").ids]
    seen = walk(model, tokens, lambda some: [pieces.pieces[token].decode() for token in some])
    assert seen.labels[1:] == [" Once", " upon", " a", " time"]
    text = walk_text(seen)
    assert seen.name(int(seen.probabilities.argmax())) == ","
    assert 'The next token is ",", number 432.' in text
    assert "·upon" in text
