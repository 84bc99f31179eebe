"""Blocks on copied weights against torch's Transformer layers and transformers' norms and feed-forwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.kernels.mask import Mask
from weft.layers.attention import MultiHeadAttention
from weft.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock, FeedForward

PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-10)]


def copy_attention(mine: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    layers = (mine.query, mine.key, mine.value)
    for layer, weight, bias in zip(layers, theirs.in_proj_weight.chunk(3), theirs.in_proj_bias.chunk(3), strict=True):
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    mine.output.load_state_dict(theirs.out_proj.state_dict())


@torch.no_grad()
def copy_block(
    mine: EncoderBlock | DecoderBlock, theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer
) -> None:
    for parameter in theirs.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)  # so that no norm is 1 and no bias 0
    copy_attention(mine.attention, theirs.self_attn)
    mine.feed_forward.inner.load_state_dict(theirs.linear1.state_dict())
    mine.feed_forward.outer.load_state_dict(theirs.linear2.state_dict())
    norms = [theirs.norm1, theirs.norm2]
    around = [mine.around_attention, mine.around_feed_forward]
    if isinstance(mine, DecoderBlock):
        copy_attention(mine.cross_attention, theirs.multihead_attn)
        norms.append(theirs.norm3)
        around.insert(1, mine.around_cross_attention)
    for sub_layer, norm in zip(around, norms, strict=True):
        sub_layer.norm.load_state_dict(norm.state_dict())


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("causal", [True, False])
def test_encoder_block(activation: str, norm_first: bool, causal: bool, dtype: torch.dtype, tolerance: float) -> None:
    theirs = nn.TransformerEncoderLayer(
        16, 4, 40, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first
    ).to(dtype)
    mine = EncoderBlock(BlockConfig(16, 4, 40, norm_first=norm_first, activation=activation)).to(dtype)
    copy_block(mine, theirs)
    x = torch.randn(2, 6, 16, dtype=dtype, requires_grad=True)
    if causal:
        out = mine(x, Mask(causal=True))
        expected = theirs(x, src_mask=torch.ones(6, 6, dtype=torch.bool).triu(1))
    else:
        lengths = torch.tensor([6, 4])
        out, expected = (
            mine(x, Mask(lengths=lengths)),
            theirs(x, src_key_padding_mask=torch.arange(6) >= lengths[:, None]),
        )
    assert (out - expected).abs().max() <= tolerance
    grad = torch.randn_like(out)
    (mine_grad,), (their_grad,) = (torch.autograd.grad(y, x, grad) for y in (out, expected))
    assert (mine_grad - their_grad).abs().max() <= tolerance * 10


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_block(norm_first: bool, dtype: torch.dtype, tolerance: float) -> None:
    theirs = nn.TransformerDecoderLayer(16, 4, 40, dropout=0.0, batch_first=True, norm_first=norm_first).to(dtype)
    mine = DecoderBlock(BlockConfig(16, 4, 40, norm_first=norm_first)).to(dtype)
    copy_block(mine, theirs)
    x, memory = torch.randn(2, 6, 16, dtype=dtype), torch.randn(2, 5, 16, dtype=dtype)
    lengths = torch.tensor([5, 2])
    out = mine(x, memory, memory_mask=Mask(lengths=lengths))
    expected = theirs(
        x,
        memory,
        tgt_mask=torch.ones(6, 6, dtype=torch.bool).triu(1),
        memory_key_padding_mask=torch.arange(5) >= lengths[:, None],
    )
    assert (out - expected).abs().max() <= tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_rms_norm_and_swiglu_are_llamas(dtype: torch.dtype, tolerance: float) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    x = torch.randn(3, 5, 16, dtype=dtype)
    norm = BlockConfig(16, 4, 40, norm="rms", norm_eps=1e-6).make_norm().to(dtype)
    their_norm = LlamaRMSNorm(16, eps=1e-6).to(dtype)
    with torch.no_grad():
        their_norm.weight.uniform_(0.5, 1.5)
        norm.weight.copy_(their_norm.weight)  # type: ignore[operator]
    # Llama normalises in float32 even when the model is float64
    assert (norm(x) - their_norm(x)).abs().max() <= 1e-5
    exact = their_norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (norm(x) - exact).abs().max() <= tolerance

    config = transformers.LlamaConfig(hidden_size=16, num_attention_heads=4, intermediate_size=40)
    theirs = LlamaMLP(config).to(dtype)
    mine = FeedForward(16, 40, activation="swiglu", bias=False).to(dtype)
    assert mine.gate is not None
    for own, other in ((mine.gate, theirs.gate_proj), (mine.inner, theirs.up_proj), (mine.outer, theirs.down_proj)):
        own.load_state_dict(other.state_dict())
    assert (mine(x) - theirs(x)).abs().max() <= tolerance


def test_gelu_with_tanh_is_gpt2s() -> None:
    pytest.importorskip("transformers")
    from transformers.activations import ACT2FN

    x = torch.randn(50, 4, dtype=torch.float64)
    mine = FeedForward(4, 4, activation="gelu_tanh").activate
    assert (mine(x) - ACT2FN["gelu_new"](x)).abs().max() <= 1e-10
