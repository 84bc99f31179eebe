"""The relative schemes against those of transformers, and interleaved turning against complex numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weft.kernels.attention import attention_weights
from weft.layers import masks
from weft.layers.positions import Sinusoidal, positions
from weft.layers.relative import ALiBi, Rotary, T5Bias

pytest.importorskip("transformers")

from transformers import LlamaConfig, T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.llama import modeling_llama as llama
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding
from transformers.models.t5.modeling_t5 import T5Attention

SINGLE, DOUBLE = 1e-5, 1e-10


def difference(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return (ours - theirs).abs().max().item()


def test_sinusoid_is_marians_whose_sines_come_first() -> None:
    table = MarianSinusoidalPositionalEmbedding(100, 32).create_weight()
    ours = Sinusoidal(32)(torch.arange(100))
    assert difference(torch.cat((ours[:, 0::2], ours[:, 1::2]), 1), table) <= SINGLE


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("head_dim", [2, 16, 64])
def test_rotary_is_llamas(head_dim: int, base: float) -> None:
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": base},
    )
    q, k = torch.randn(2, 2, 2, 9, head_dim)
    rows = positions(9, torch.tensor([0, 4000]))  # far enough for the float32 of the angles to show
    theirs = llama.apply_rotary_pos_emb(q, k, *llama.LlamaRotaryEmbedding(config)(q, rows))
    rotary = Rotary(head_dim, base)
    assert difference(rotary(q, rows), theirs[0]) <= SINGLE
    assert difference(rotary(k, rows), theirs[1]) <= SINGLE


def test_rotary_is_llamas_in_float64_given_the_same_angles() -> None:
    # Their angles are float32 always, so their turning is compared on our float64 angles.
    rotary, rows = Rotary(16), positions(9, torch.tensor([0, 4000]))
    q = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    cos, sin = (torch.cat((part, part), -1)[:, 0] for part in rotary.angles(rows, torch.float64))
    theirs, _ = llama.apply_rotary_pos_emb(q, q, cos, sin)
    assert rotary(q, rows).dtype == torch.float64
    assert difference(rotary(q, rows), theirs) <= DOUBLE


def test_interleaved_rotary_is_gptjs() -> None:
    head_dim = 16
    x = torch.randn(2, 3, 9, head_dim)
    rows = positions(9, torch.tensor([0, 40]))
    sin, cos = gptj.create_sinusoidal_positions(60, head_dim)[rows].chunk(2, -1)
    theirs = gptj.apply_rotary_pos_emb(x.transpose(1, 2), sin, cos).transpose(1, 2)
    assert difference(Rotary(head_dim, interleaved=True)(x, rows), theirs) <= SINGLE


@pytest.mark.parametrize("base", [10000.0, 77.0])
def test_interleaved_rotary_is_a_product_of_complex_numbers(base: float) -> None:
    head_dim = 12
    x = torch.randn(2, 3, 9, head_dim, dtype=torch.float64)
    rows = positions(9, torch.tensor([0, 4000]))
    angles = rows[:, None, :, None] * torch.logspace(0, -(head_dim - 2) / head_dim, head_dim // 2, base, dtype=x.dtype)
    product = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    theirs = torch.view_as_real(product).flatten(-2)
    assert difference(Rotary(head_dim, base, interleaved=True)(x, rows), theirs) <= DOUBLE


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (4, 3), (64, 1000), (6, 100)])
def test_t5_buckets(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    distance = torch.arange(-5000, 5001)
    theirs = T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    ours = T5Bias(1, num_buckets, max_distance, bidirectional).buckets(distance)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_bias(bidirectional: bool, dtype: torch.dtype) -> None:
    config = T5Config(d_model=24, d_kv=8, num_heads=3, is_decoder=not bidirectional)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).to(dtype)
    ours = T5Bias(3, bidirectional=bidirectional).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(theirs.relative_attention_bias.weight.normal_())
    keys = torch.arange(300)
    for n, offset in ((300, 0), (4, 250)):
        made = ours(positions(n, offset), keys)
        assert made.dtype == dtype
        assert difference(made, theirs.compute_bias(n, 300, past_seen_tokens=offset)) <= DOUBLE


@pytest.mark.parametrize("num_heads", range(1, 21))
def test_alibi_is_blooms_up_to_a_number_per_query(num_heads: int) -> None:
    """Bloom adds slope · j where the paper has −slope · (i − j): slope · i more, which the softmax does not see.

    That holds where no query sees a later key, so both are compared under a causal mask.
    """
    n = 40
    theirs = build_alibi_tensor(torch.ones(1, n), num_heads, torch.float32)[None]  # [1, H, 1, n]
    ours = ALiBi(num_heads)(torch.arange(n), torch.arange(n))  # [1, H, n, n]
    past = torch.ones(n, n, dtype=torch.bool).tril()
    from_itself = theirs - theirs.transpose(-2, -1)  # slope · (j − i)
    assert difference(ours.masked_fill(~past, 0), from_itself.masked_fill(~past, 0)) <= SINGLE
    q, k = torch.randn(2, 1, num_heads, n, 8)
    weights = [attention_weights(q, k, masks.causal(), bias) for bias in (ours, theirs)]
    assert difference(*weights) <= SINGLE
