"""Blocks: cached = whole, dropout only in training, what is left out is left out, errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weft import record
from weft.kernels.mask import Mask
from weft.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock, FeedForward
from weft.layers.cache import KVCache
from weft.layers.relative import Rotary

CONFIGS = {
    "2017": BlockConfig(16, 4, 32, norm_first=False),
    "pre-norm": BlockConfig(16, 4, 32),
    "llama": BlockConfig(16, 4, 32, num_kv_heads=2, norm="rms", activation="swiglu", bias=False),
    "gpt2": BlockConfig(16, 4, 32, activation="gelu_tanh"),
    "shaw": BlockConfig(16, 4, 32, max_distance=2),
    "normed": BlockConfig(16, 4, 32, qk_norm=True),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_encoder_block_steps_as_it_runs(name: str) -> None:
    block = EncoderBlock(CONFIGS[name]).double()
    rotary = Rotary(4) if name == "llama" else None
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    whole = block(x, Mask(causal=True), rotary=rotary)
    cache, parts = KVCache.empty(2), []
    for low, high in ((0, 3), (3, 4), (4, 7)):
        part, cache = block.step(x[:, low:high], cache, rotary=rotary)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_decoder_block_steps_as_it_runs(name: str) -> None:
    block = DecoderBlock(CONFIGS[name]).double()
    x, memory = torch.randn(2, 6, 16, dtype=torch.float64), torch.randn(2, 5, 16, dtype=torch.float64)
    memory_mask = Mask(lengths=torch.tensor([5, 3]))
    whole = block(x, memory, memory_mask=memory_mask)
    projected = block.cross_attention.keys_values(memory)
    cache, parts = KVCache.empty(2), []
    for t in range(6):
        part, cache = block.step(x[:, t : t + 1], projected, cache, memory_mask)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-12, rtol=1e-12)


def test_a_decoder_block_records_both_attentions() -> None:
    block = DecoderBlock(CONFIGS["2017"])
    with record(block) as seen:
        block(torch.randn(1, 3, 16), torch.randn(1, 4, 16))
    assert [(entry.name, tuple(entry.weights.shape)) for entry in seen] == [
        ("attention", (1, 4, 3, 3)),
        ("cross_attention", (1, 4, 3, 4)),
    ]
    assert seen["attention"].weights.triu(1).count_nonzero() == 0


@pytest.mark.parametrize("name", [*CONFIGS, "no residual"])
@pytest.mark.parametrize("training", [False, True])
def test_a_block_tells_what_it_adds_to_the_stream(name: str, training: bool) -> None:
    """Each sub-layer's part is its function's output, before dropout; the stream is what the next one gets."""
    config = CONFIGS.get(name, BlockConfig(16, 4, 32, residual=False))
    block = DecoderBlock(replace(config, dropout=0.3)).train(training)
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    torch.manual_seed(1)
    alone = block(x, memory)
    torch.manual_seed(1)
    with record(block, kinds="added") as seen:
        heard = block(x, memory)
    assert torch.equal(alone, heard)
    names = ["attention", "cross_attention", "feed_forward"]
    around = [f"around_{part}" for part in names]
    assert [entry.name for entry in seen] == [
        "attention.output",
        around[0],
        "cross_attention.output",
        around[1],
        around[2],
    ]
    assert torch.equal(seen[around[2]]["stream"], heard)
    assert not any(value.requires_grad for entry in seen for value in entry.values.values())
    norms = [getattr(block, part).norm for part in around]
    fed = seen[around[1]]["stream"]
    by_hand = block.feed_forward(norms[2](fed) if config.norm_first else fed)
    assert torch.equal(seen[around[2]]["added"], by_hand)
    if not training:
        before = x
        for part, norm in zip(around, norms, strict=True):
            added, stream = seen[part]["added"], seen[part]["stream"]
            after = before + added if config.residual else added
            assert torch.equal(stream, after if config.norm_first else norm(after))
            before = stream


def test_dropout_is_for_training_only() -> None:
    block = EncoderBlock(BlockConfig(16, 4, 32, dropout=0.5, attention_dropout=0.5, ffn_dropout=0.5))
    x = torch.randn(1, 5, 16)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))


@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "ffn_dropout"])
def test_each_dropout_does_something(field: str) -> None:
    block = EncoderBlock(BlockConfig(16, 4, 32, **{field: 0.5}))
    x = torch.randn(1, 5, 16)
    assert not torch.equal(block(x), block(x))


def test_without_residual_and_norm_only_the_functions_are_left() -> None:
    block = EncoderBlock(BlockConfig(16, 4, 32, residual=False, norm="none"))
    x = torch.randn(2, 3, 16)
    assert torch.equal(block(x), block.feed_forward(block.attention(x)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CONFIGS)
def test_bf16_activations_with_fp32_parameters(name: str) -> None:
    block = EncoderBlock(CONFIGS[name])
    x = torch.randn(2, 3, 16)
    out = block(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out.float() - block(x)).abs().max() < 0.1


def test_the_feed_forward_is_the_same_at_every_position() -> None:
    network = FeedForward(8, 12).double()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    inner = (x @ network.inner.weight.T + network.inner.bias).clamp(min=0)
    torch.testing.assert_close(network(x), inner @ network.outer.weight.T + network.outer.bias)
    torch.testing.assert_close(network(x[:, [3]]), network(x)[:, [3]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "relu6"}, "activation must be one of relu, gelu, gelu_tanh, swiglu, not 'relu6'"),
        ({"num_heads": 0}, "num_heads must be ≥ 1, not 0"),
        ({"norm": "batch"}, "norm must be layer, rms or none, not 'batch'"),
        ({"dropout": 1.0}, "dropout must be at least 0 and less than 1, not 1.0"),
        ({"ffn_dropout": -0.1}, "ffn_dropout must be at least 0"),
    ],
)
def test_choices_that_do_not_exist_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockConfig(**{"dim": 16, "num_heads": 4, "ffn_dim": 32} | options)  # type: ignore[arg-type]
    if "activation" in options:
        with pytest.raises(ValueError, match=message):
            FeedForward(16, 32, **options)  # type: ignore[arg-type]
