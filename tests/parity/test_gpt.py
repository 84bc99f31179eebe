"""GPT on the weights of transformers' GPT-2 and Llama: the same logits, at once, step by step and in a batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from weft.config import PAD
from weft.interop import huggingface
from weft.layers.relative import Rotary, slowed, slowed_where_low
from weft.models.gpt import GPT

transformers = pytest.importorskip("transformers")

WORDS = 37


def gpt2(**options: Any) -> Any:
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_head": 4, "n_layer": 3, "n_positions": 48}
    return transformers.GPT2Config(**{**sizes, **options})


def llama(**options: Any) -> Any:
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 3}
    return transformers.LlamaConfig(**{**sizes, "intermediate_size": 28, "max_position_embeddings": 64, **options})


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "gpt2": gpt2(),
    "gpt2 wide": gpt2(n_inner=20, layer_norm_epsilon=1e-3),
    "gpt2 gelu": gpt2(activation_function="gelu"),
    "gpt2 untied": gpt2(tie_word_embeddings=False),
    "llama": llama(),
    "llama grouped": llama(num_key_value_heads=2),
    "llama multi-query, tied": llama(num_key_value_heads=1, tie_word_embeddings=True),
    "llama head_dim": llama(head_dim=6, num_key_value_heads=2),
    "llama attention bias": llama(attention_bias=True),
    "llama mlp bias": llama(mlp_bias=True),
    "llama both biases": llama(attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3),
    "llama rope_theta": llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "llama linear": llama(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "llama 3": llama(
        rope_parameters={**LLAMA3, "original_max_position_embeddings": 16, "rope_theta": 100.0}, head_dim=16
    ),
}


class Pair(NamedTuple):
    mine: GPT
    theirs: nn.Module

    def expected(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.theirs(tokens).logits
        return logits


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made(request.param, tmp_path_factory.mktemp("model"))


def made(config: Any, folder: Path) -> Pair:
    """Their model with every parameter random, and weft's, read from the folder that theirs was saved to."""
    torch.manual_seed(1)
    kind = transformers.GPT2LMHeadModel if config.model_type == "gpt2" else transformers.LlamaForCausalLM
    theirs = kind(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.2 * torch.randn_like(parameter)  # so that no norm is 1 and no bias 0
    theirs.save_pretrained(folder)
    config, tensors, vocab_size = huggingface.read(folder)
    mine = GPT(config, vocab_size).eval()
    mine.load_state_dict(tensors)
    return Pair(mine, theirs)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


@torch.no_grad()
def test_the_logits_are_theirs(pair: Pair) -> None:
    tokens = torch.randint(1, WORDS, (3, 40))
    close(pair.mine.logits(pair.mine(tokens)), pair.expected(tokens))


@torch.no_grad()
def test_step_by_step_the_logits_are_theirs(pair: Pair) -> None:
    tokens = torch.randint(1, WORDS, (2, 24))
    state, parts = pair.mine.start(tokens[:, :1]), []
    assert state.lengths.tolist() == [0, 0]
    for part in tokens.split([1, 1, 7, 1, 14], 1):
        hidden, state = pair.mine.step(part, state)
        parts.append(pair.mine.logits(hidden))
    close(torch.cat(parts, 1), pair.expected(tokens))


@torch.no_grad()
def test_unequal_prompts_go_on_as_each_alone(pair: Pair) -> None:
    lengths = [9, 1, 20, 2]
    rows = [torch.randint(1, WORDS, (length,)) for length in lengths]
    state = pair.mine.start(nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD))
    assert state.lengths.tolist() == [8, 0, 19, 1]
    tokens = torch.stack([row[-1:] for row in rows])
    for _ in range(4):
        hidden, state = pair.mine.step(tokens, state)
        logits = pair.mine.logits(hidden[:, -1])
        for row, given in enumerate(rows):
            close(logits[row], pair.expected(given[None])[0, -1])
        tokens = logits.argmax(-1, keepdim=True)
        rows = [torch.cat([row, token]) for row, token in zip(rows, tokens, strict=True)]


class Text(NamedTuple):
    tokens: Tensor
    segments: Tensor | None = None
    counted: Tensor | None = None


def test_the_loss_and_its_gradients_are_theirs(pair: Pair) -> None:
    tokens = torch.randint(1, WORDS, (3, 30))
    loss = pair.mine.loss(Text(tokens))
    theirs = pair.theirs(tokens, labels=tokens).loss
    assert loss.count == 3 * 29
    close(loss.total / loss.count, theirs)
    embedding = pair.theirs.get_input_embeddings().weight
    (mine_grad,) = torch.autograd.grad(loss.total / loss.count, pair.mine.embedding)
    (their_grad,) = torch.autograd.grad(theirs, embedding)
    close(mine_grad, their_grad)


@pytest.mark.parametrize("name", ["linear", "llama3"])
@pytest.mark.parametrize("factor", [2.0, 32.0])
def test_slowed_frequencies_are_transformers(name: str, factor: float) -> None:
    """At the sizes of Llama 3.1: heads of 128, θ = 500,000, trained with 8,192 positions."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options = {**LLAMA3, "rope_type": name, "factor": factor, "original_max_position_embeddings": 8192}
    if name == "linear":
        options = {"rope_type": name, "factor": factor}
    config = llama(head_dim=128, max_position_embeddings=131072, rope_parameters={**options, "rope_theta": 500_000.0})
    expected, _ = ROPE_INIT_FUNCTIONS[name](config, torch.device("cpu"))
    if name == "linear":
        scaling = partial(slowed, factor=factor)
    else:
        scaling = partial(slowed_where_low, factor=factor, low=1.0, high=4.0, length=8192)
    plain, scaled = Rotary(128, 500_000.0), Rotary(128, 500_000.0, scaling=scaling)
    one = torch.tensor([1])
    angles = [torch.atan2(*reversed(rotary.angles(one, torch.float64)))[0, 0, 0] for rotary in (plain, scaled)]
    torch.testing.assert_close(angles[1], expected.double(), rtol=1e-6, atol=0)
    assert (angles[1] < angles[0]).any()
    assert (angles[1] == angles[0]).any() == (name == "llama3")
