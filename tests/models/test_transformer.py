"""The Transformer: its published sizes, the same numbers as torch and transformers, and what positions tell it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    T5Config,
    T5ForConditionalGeneration,
)

from weft.config import EOS, PAD, TransformerConfig
from weft.models.transformer import Transformer

WORDS = 17


def tiny(**options: Any) -> TransformerConfig:
    sizes = {"dim": 16, "num_heads": 4, "ffn_dim": 24, "encoder_layers": 2, "decoder_layers": 3, "dropout": 0.0}
    return TransformerConfig(**{**sizes, **options})


def tokens(*lengths: int, end: int | None = None) -> Tensor:
    rows = [torch.randint(4, WORDS, (length,)) for length in lengths]
    if end is not None:
        rows = [torch.cat([row[:-1], torch.tensor([end])]) for row in rows]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def shake(model: nn.Module) -> None:
    """Move every parameter away from the 0 or 1 that it may start at."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)


def put(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Load all parameters; none may be missing."""
    model.load_state_dict(values, strict=True)


@pytest.mark.parametrize(
    ("sizes", "words", "millions"),
    [
        ({"dim": 512, "num_heads": 8, "ffn_dim": 2048, "encoder_layers": 6, "decoder_layers": 6}, 37_000, 63.1),
        ({"dim": 1024, "num_heads": 16, "ffn_dim": 4096, "encoder_layers": 6, "decoder_layers": 6}, 37_000, 214.2),
        ({"dim": 128, "num_heads": 4, "ffn_dim": 256, "encoder_layers": 4, "decoder_layers": 4}, 10_000, 2.6),
    ],
    ids=["base", "big", "tiny"],
)
def test_published_sizes(sizes: dict[str, int], words: int, millions: float) -> None:
    with torch.device("meta"):
        model = Transformer(TransformerConfig(norm_first=False, **sizes), words, words)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions


def from_torch(theirs: nn.Transformer, table: Tensor) -> dict[str, Tensor]:
    """The parameters of torch's model under our names."""
    values = {"target_embedding": table}
    attentions = {"self_attn": "attention", "multihead_attn": "cross_attention"}
    norms = ["around_attention", "around_cross_attention", "around_feed_forward"]
    for side, stack in (("encoder", theirs.encoder), ("decoder", theirs.decoder)):
        around = norms if side == "decoder" else norms[::2]
        for name, value in stack.state_dict().items():
            head, *rest = name.split(".")
            if head == "norm":
                values[f"{side}_norm.{rest[0]}"] = value
                continue
            number, part, kind = rest[0], rest[1], ".".join(rest[2:])
            block = f"{side}.{number}"
            if part in attentions and kind.startswith("in_proj_"):
                for ours, chunk in zip(("query", "key", "value"), value.chunk(3), strict=True):
                    values[f"{block}.{attentions[part]}.{ours}.{kind.removeprefix('in_proj_')}"] = chunk
            elif part in attentions:
                values[f"{block}.{attentions[part]}.{kind.replace('out_proj', 'output')}"] = value
            elif part.startswith("linear"):
                values[f"{block}.feed_forward.{'inner' if part == 'linear1' else 'outer'}.{kind}"] = value
            else:
                values[f"{block}.{around[int(part.removeprefix('norm')) - 1]}.norm.{kind}"] = value
    return values


def sinusoids(n: int, dim: int) -> Tensor:
    """The paper's formula, number by number."""
    table = torch.empty(n, dim, dtype=torch.float64)
    for position in range(n):
        for i in range(dim):
            angle = position / 10000 ** ((i - i % 2) / dim)
            table[position, i] = math.cos(angle) if i % 2 else math.sin(angle)
    return table


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
def test_is_torchs_transformer(norm_first: bool, activation: Any) -> None:
    theirs = nn.Transformer(16, 4, 2, 3, 24, 0.0, activation, batch_first=True, norm_first=norm_first)
    if not norm_first:  # torch ends its stacks with a norm also where the paper has none
        theirs.encoder.norm = theirs.decoder.norm = None
    theirs.double().eval()
    shake(theirs)
    ours = Transformer(tiny(norm_first=norm_first, activation=activation), WORDS, WORDS).double().eval()
    table = torch.randn(WORDS, 16, dtype=torch.float64)
    put(ours, from_torch(theirs, table))
    source, target = tokens(7, 4, 5), tokens(6, 6, 6)
    x, y = ((table * 4.0)[side] + sinusoids(side.shape[1], 16) for side in (source, target))
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    padding = source == PAD
    expected = theirs(
        x, y, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True
    )
    close(ours(source, target), expected, 1e-10)
    close(ours.logits(ours(source, target)), expected @ table.T, 1e-10)


def from_bart_like(theirs: nn.Module, positions: tuple[Tensor, Tensor] | None) -> dict[str, Tensor]:
    """The parameters of a model of transformers' BART kin (Marian, M2M100) under our names."""
    names = {
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.out_proj": "attention.output",
        "self_attn_layer_norm": "around_attention.norm",
        "encoder_attn.q_proj": "cross_attention.query",
        "encoder_attn.k_proj": "cross_attention.key",
        "encoder_attn.v_proj": "cross_attention.value",
        "encoder_attn.out_proj": "cross_attention.output",
        "encoder_attn_layer_norm": "around_cross_attention.norm",
        "fc1": "feed_forward.inner",
        "fc2": "feed_forward.outer",
        "final_layer_norm": "around_feed_forward.norm",
    }
    values = {"target_embedding": theirs.state_dict()["model.shared.weight"]}
    for name, value in theirs.state_dict().items():
        side, _, rest = name.removeprefix("model.").partition(".")
        if rest.startswith("layer_norm."):
            values[f"{side}_norm.{rest.removeprefix('layer_norm.')}"] = value
        elif rest.startswith("layers."):
            _, number, *path = rest.split(".")
            values[f"{side}.{number}.{names['.'.join(path[:-1])]}.{path[-1]}"] = value
    if positions is not None:
        for side, table in zip(("source", "target"), positions, strict=True):
            values[f"{side}_positions.scheme.weight"] = table
    return values


BART_LIKE = {
    "vocab_size": WORDS,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 20,
    "dropout": 0.0,
    "scale_embedding": True,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": 1,
    "tie_word_embeddings": True,
}


def logits_of(theirs: nn.Module, source: Tensor, target: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = theirs(source, attention_mask=(source != PAD).long(), decoder_input_ids=target).logits
    return result


# Their sinusoids are in another order (all sines, then all cosines) and, in M2M100, begin at the row behind padding's:
# the tables are taken over as learned ones.
def test_is_marian() -> None:
    config = MarianConfig(**BART_LIKE, activation_function="gelu")
    theirs = MarianMTModel(config).eval()
    shake(theirs)
    ours = Transformer(tiny(norm_first=False, activation="gelu", positions="learned", max_len=20), WORDS, WORDS).eval()
    table = theirs.model.encoder.embed_positions.weight.detach()
    put(ours, from_bart_like(theirs, (table, theirs.model.decoder.embed_positions.weight.detach())))
    source, target = tokens(7, 4, 5, end=EOS), tokens(6, 6, 6)
    bias = theirs.final_logits_bias
    close(ours.logits(ours(source, target)) + bias, logits_of(theirs, source, target), 1e-5)


def test_is_m2m100() -> None:
    theirs = M2M100ForConditionalGeneration(M2M100Config(**BART_LIKE, activation_function="relu")).eval()
    shake(theirs)
    ours = Transformer(tiny(norm_first=True, positions="learned", max_len=20), WORDS, WORDS).eval()
    table = theirs.model.encoder.embed_positions.weights[PAD + 1 : PAD + 21]
    put(ours, from_bart_like(theirs, (table, table)))
    source, target = tokens(7, 4, 5, end=EOS), tokens(6, 6, 6)
    close(ours.logits(ours(source, target)), logits_of(theirs, source, target), 1e-5)


def from_t5(theirs: nn.Module) -> dict[str, Tensor]:
    values = {}
    letters = {"q": "query", "k": "key", "v": "value", "o": "output"}
    for name, value in theirs.state_dict().items():
        side, *path = name.split(".")
        if name == "shared.weight":
            values["target_embedding"] = value
        elif path[0] == "final_layer_norm":
            values[f"{side}_norm.weight"] = value
        elif "relative_attention_bias" in path:
            values[f"{'source' if side == 'encoder' else 'target'}_positions.bias.weight"] = value
        elif path[0] == "block":
            block, layer, part, *rest = f"{side}.{path[1]}", int(path[3]), *path[4:]
            kind = {"SelfAttention": "attention", "EncDecAttention": "cross_attention"}.get(part)
            parts = (
                ["attention", "feed_forward"] if side == "encoder" else ["attention", "cross_attention", "feed_forward"]
            )
            if part == "layer_norm":
                values[f"{block}.around_{parts[layer]}.norm.weight"] = value
            elif kind is not None:
                # Theirs has no scale of the scores; ours divides by √head_dim, so the query is made larger.
                values[f"{block}.{kind}.{letters[rest[0]]}.weight"] = value * 2.0 if rest[0] == "q" else value
            else:
                values[f"{block}.feed_forward.{'inner' if rest[0] == 'wi' else 'outer'}.weight"] = value
    return values


def test_is_t5() -> None:
    config = T5Config(
        vocab_size=WORDS, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, layer_norm_epsilon=1e-5, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=PAD,
        tie_word_embeddings=True,
    )  # fmt: skip
    theirs = T5ForConditionalGeneration(config).eval()
    shake(theirs)
    ours = Transformer(tiny(norm="rms", bias=False, positions="t5"), WORDS, WORDS).eval()
    put(ours, from_t5(theirs))
    ours.scale = 1.0  # theirs scales at the output instead
    source, target = tokens(40, 4, 5, end=EOS), tokens(30, 30, 30)
    close(ours.logits(ours(source, target) * 16**-0.5), logits_of(theirs, source, target), 1e-5)


def test_only_without_positions_is_the_source_a_set() -> None:
    source, target = tokens(6), tokens(5)
    for name in ("sinusoidal", "learned", "order", "fraction", "rotary", "alibi", "shaw", "t5", "none"):
        model = Transformer(tiny(positions=name), WORDS, WORDS).double().eval()
        shake(model)
        there, back = model(source, target), model(source.flip(1), target)
        assert ((there - back).abs().max().item() < 1e-12) == (name == "none"), name


def test_a_target_is_measured_by_its_source() -> None:
    """The fraction of a target's length would need the length, which only the end of a translation tells."""
    model = Transformer(tiny(positions="fraction", encoder_layers=1, decoder_layers=1), WORDS, WORDS).double()
    seen: list[Tensor] = []
    model.target_positions.register_forward_hook(lambda module, given, result: seen.append(result - given[0]))
    model(tokens(9, 5, end=EOS), tokens(4, 4))
    expected = torch.tensor([[0, 1 / 8, 2 / 8, 3 / 8], [0, 1 / 4, 2 / 4, 3 / 4]], dtype=torch.float64)
    close(seen[0], expected[:, :, None] * model.target_positions.direction, 1e-12)


def test_starting_values() -> None:
    config = TransformerConfig(dim=256, num_heads=4, ffn_dim=512, encoder_layers=1, decoder_layers=1)
    model = Transformer(config, 4000, 4000)
    embedded = model._embed(torch.arange(4000)[None], target=True) * model.scale
    assert abs(embedded.std().item() - 1) < 0.01
    inner = dict(model.named_parameters())["encoder.0.feed_forward.inner.weight"]
    bound = (6 / (256 + 512)) ** 0.5
    assert 0.99 * bound < inner.abs().max() <= bound
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith("bias"))


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        Transformer(tiny(dim=12, num_heads=4, positions="rotary"), WORDS, WORDS)
    with pytest.raises(ValueError, match="multiple of num_kv_heads"):
        Transformer(tiny(num_kv_heads=3), WORDS, WORDS)
