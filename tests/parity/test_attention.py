"""Multi-head attention on copied weights against torch.nn.MultiheadAttention and transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from weft import record
from weft.kernels.mask import Mask
from weft.layers.attention import MultiHeadAttention

PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-10)]


def copy_from_torch(mine: MultiHeadAttention, theirs: nn.MultiheadAttention) -> None:
    """Torch stacks the projections of q, k and v in one matrix if they are equally wide."""
    dim = theirs.embed_dim
    with torch.no_grad():
        if theirs.in_proj_weight is not None:
            weights = theirs.in_proj_weight.split(dim)
        else:
            weights = (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        for layer, weight in zip((mine.query, mine.key, mine.value), weights, strict=True):
            layer.weight.copy_(weight)
        mine.output.weight.copy_(theirs.out_proj.weight)
        if theirs.in_proj_bias is not None:
            theirs.in_proj_bias.normal_()  # torch starts them at zero, which would prove nothing
            theirs.out_proj.bias.normal_()
            for layer, bias in zip((mine.query, mine.key, mine.value), theirs.in_proj_bias.split(dim), strict=True):
                layer.bias.copy_(bias)
            mine.output.bias.copy_(theirs.out_proj.bias)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["self", "causal", "padded", "cross", "cross of another width"])
def test_against_torch(kind: str, bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    dim, heads, memory_dim = 24, 4, 10 if kind == "cross of another width" else 24
    theirs = nn.MultiheadAttention(dim, heads, bias=bias, kdim=memory_dim, vdim=memory_dim, batch_first=True).to(dtype)
    mine = MultiHeadAttention(dim, heads, bias=bias, memory_dim=memory_dim).to(dtype)
    copy_from_torch(mine, theirs)
    x = torch.randn(3, 7, dim, dtype=dtype, requires_grad=True)
    memory = torch.randn(3, 5, memory_dim, dtype=dtype) if kind.startswith("cross") else None
    lengths = torch.tensor([7, 3, 1])
    mask: Mask | None = None
    options: dict[str, Tensor] = {}
    if kind == "causal":
        mask, options["attn_mask"] = Mask(causal=True), torch.ones(7, 7, dtype=torch.bool).triu(1)
    if kind == "padded":
        mask, options["key_padding_mask"] = Mask(lengths=lengths), torch.arange(7) >= lengths[:, None]
    keys = x if memory is None else memory
    expected, weights = theirs(x, keys, keys, average_attn_weights=False, **options)
    with record(mine) as seen:
        out = mine(x, memory, mask=mask)
    assert (out - expected).abs().max() <= tolerance
    assert (seen[""].weights - weights).abs().max() <= tolerance
    grad = torch.randn_like(out)
    (mine_grad,), (their_grad,) = (torch.autograd.grad(y, x, grad) for y in (out, expected))
    assert (mine_grad - their_grad).abs().max() <= tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_grouped_rotary_attention_against_transformers(dtype: torch.dtype, tolerance: float, qk_norm: bool) -> None:
    """Llama's attention (grouped heads, rotary positions, no biases), and Qwen3's with normalised queries and keys."""
    transformers = pytest.importorskip("transformers")
    from weft.layers.relative import Rotary

    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": False,
        "attn_implementation": "eager" if dtype == torch.float32 else "sdpa",  # eager has its softmax in float32
    }
    if qk_norm:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention as Attention
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding as Embedding

        config = transformers.Qwen3Config(**sizes, rms_norm_eps=torch.finfo(dtype).eps)
    else:
        from transformers.models.llama.modeling_llama import LlamaAttention as Attention
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Embedding

        config = transformers.LlamaConfig(**sizes)
    theirs = Attention(config, layer_idx=0).to(dtype).eval()
    mine = MultiHeadAttention(32, 4, num_kv_heads=2, bias=False, qk_norm=qk_norm).to(dtype).eval()
    pairs = [(mine.query, theirs.q_proj), (mine.key, theirs.k_proj), (mine.value, theirs.v_proj)]
    with torch.no_grad():
        for own, other in [*pairs, (mine.output, theirs.o_proj)]:
            own.weight.copy_(other.weight)
        if qk_norm:
            for own_norm, other_norm in ((mine.query_norm, theirs.q_norm), (mine.key_norm, theirs.k_norm)):
                other_norm.weight.uniform_(0.5, 1.5)
                own_norm.weight.copy_(other_norm.weight)
    x = torch.randn(2, 9, 32, dtype=dtype)
    rotary = Rotary(8)
    if dtype == torch.float64:  # transformers computes angles in float32: give it ours, test the layer
        cos, sin = rotary.angles(torch.arange(9), dtype)
        angles = tuple(torch.cat([t, t], -1).expand(2, 9, 8) for t in (cos.view(9, 4), sin.view(9, 4)))
    else:
        angles = Embedding(config)(x, torch.arange(9).expand(2, 9))
    closed = torch.full((9, 9), float("-inf"), dtype=dtype).triu(1)
    expected, weights = theirs(x, angles, closed[None, None])
    with record(mine) as seen:
        out = mine(x, mask=Mask(causal=True), rotary=rotary)
    assert (out - expected).abs().max() <= (1e-6 if qk_norm else tolerance)  # Qwen3's norm is in float32 always
    if weights is not None:
        assert (seen[""].weights - weights).abs().max() <= 1e-6
