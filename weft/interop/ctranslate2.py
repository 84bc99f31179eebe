"""A Transformer as a model of CTranslate2, an engine for fast translation on CPUs and GPUs.

    model.bin, config.json   the parameters; the names of the specials
    *_vocabulary.json        the tokens: shared, or of the source and of the target
    tokenizer.json           weft's own, for text to tokens and back (or one a side, as in a model folder)

    tokens = tokenizers.Tokenizer.from_file("out/tokenizer.json").encode("A man sleeps.").tokens
    ctranslate2.Translator("out").translate_batch([tokens], suppress_sequences=[["<pad>"], ["<s>"]])

The engine itself puts </s> behind a source. It computes all that the model can have but ALiBi, fractions as positions,
and normalised queries and keys. Weft never says <pad> and <s>; the engine has to be told, though a trained model hardly
ever would; its scores then are of a distribution without these two, while weft's has them. It says at least one token
unless min_decoding_length=0. Where a text may spell a special token, set encode_special_tokens of its tokenizer.

In a beam search it ranks as weft does with the same ``length_penalty``, and ends as weft does with the same
``patience``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Rust
from torch import nn

from weft.config import BOS, EOS, PAD, UNK, TransformerConfig, nearest
from weft.data.tokenizers import JOINT, SIDES, TokenizerPair
from weft.interop.handover import POSITIONS, Said, Trial, aside, require, whole
from weft.layers.attention import MultiHeadAttention
from weft.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock
from weft.layers.linear import Linear
from weft.layers.relative import T5Bias
from weft.models.transformer import Positions, Transformer

NAME = "CTranslate2"
QUANTIZATIONS = ("none", "int8", "int16", "float16", "bfloat16")

_ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "swiglu": "SWISH"}
_POSITIONS = ("sinusoidal", "learned", "order", "rotary", "shaw", "t5", "none")


def write(
    path: str | os.PathLike[str],
    model: Transformer,
    config: TransformerConfig,
    tokenizers: TokenizerPair,
    samples: Sequence[str] = (),
    quantization: str = "none",
    positions: int = POSITIONS,
) -> str:
    """Write a folder that CTranslate2 loads, after a proof that it says the same.

    Args:
        path: a folder that is not there yet.
        model: what to write.
        config: its configuration.
        tokenizers: those that it was trained with.
        samples: sentences for the proof; if none, some are made of the source's vocabulary.
        quantization: how matrices are stored, one of ``QUANTIZATIONS``. What is rounded is not proven to be the same:
            it is told how far it is.
        positions: how many tokens a text may have, EOS counted, where positions are added to embeddings; learned ones
            are as many as they are, and relative ones know no end.

    Returns:
        What was written, for people.

    Raises:
        ImportError: if the package ctranslate2 is missing.
        ValueError: if CTranslate2 cannot hold the model, naming the key; or if it does not say what weft says.
        OSError: if the path is there, or cannot be written.
    """
    if quantization not in QUANTIZATIONS:
        known = ", ".join(QUANTIZATIONS)
        raise ValueError(
            f"no quantization {quantization!r}: expected one of {known}{nearest(quantization, QUANTIZATIONS)}"
        )
    try:
        import ctranslate2
    except ImportError as error:
        raise ImportError("models of CTranslate2 need ctranslate2: pip install 'weft[ctranslate2]'") from error
    require(config, NAME, {"positions": _POSITIONS, "qk_norm": [False]})
    positions = config.max_len if config.positions == "learned" else positions
    model = whole(model, config, tokenizers)
    try:
        spec = _spec(model, config, positions)
    except TypeError as error:
        version = ctranslate2.__version__
        raise ValueError(f"ctranslate2 {version} has no place for this model, a newer one may: {error}") from None
    with aside(path) as folder:
        tokenizers.save(folder)
        source, target = vocabularies = _vocabularies(folder, tokenizers)
        spec.register_source_vocabulary(source)
        spec.register_target_vocabulary(target)
        for role, number in (("unk", UNK), ("bos", BOS), ("eos", EOS), ("decoder_start", BOS)):
            setattr(spec.config, f"{role}_token", target[number])
        spec.config.add_source_eos = True
        spec.config.layer_norm_epsilon = BlockConfig.norm_eps
        spec.validate()
        spec.optimize(None if quantization == "none" else quantization)
        spec.save(str(folder))
        trial = Trial(model, tokenizers, samples, positions)
        said = _translated(folder, trial, *vocabularies)
        told = trial.proof(said, NAME) if quantization == "none" else trial.difference(said, NAME)
    stored = "" if quantization == "none" else f" in {quantization}"
    return f"{os.fspath(path)}: a model of {NAME}{stored}; {told}"


def _vocabularies(folder: Path, tokenizers: TokenizerPair) -> tuple[list[str], list[str]]:
    """The tokens of both sides, from the tokenizers in the folder.

    The engine knows one name for each special, the target's. A source that has another for the unknown token gives the
    engine a token that it does not know, which is the same.
    """

    def tokens(name: str) -> list[str]:
        rust = Rust.from_file(str(folder / name))
        return [rust.id_to_token(number) or "" for number in range(rust.get_vocab_size())]

    source, target = map(tokens, (JOINT, JOINT) if tokenizers.joint else SIDES)
    return [*target[: UNK + 1], *source[UNK + 1 :]], target


def _spec(model: Transformer, config: TransformerConfig, positions: int) -> Any:
    """The specification of a model, filled with copies of its parameters: to quantise changes them in place."""
    from ctranslate2.specs import common_spec, transformer_spec

    options = {
        "pre_norm": config.norm_first,
        "activation": common_spec.Activation[_ACTIVATIONS[config.activation]],
        "ffn_glu": config.activation == "swiglu",
        "rms_norm": config.norm == "rms",
        "relative_position": config.positions == "shaw",
        "relative_attention_bias": config.positions == "t5",
    }
    if config.num_kv_heads is not None:  # these two are not in all versions
        options["num_heads_kv"] = config.num_kv_heads
    if config.positions == "rotary":
        options |= {"rotary_dim": 0, "rotary_interleave": False}  # 0: whole heads
    encoder = transformer_spec.TransformerEncoderSpec(config.encoder_layers, config.num_heads, **options)
    decoder = transformer_spec.TransformerDecoderSpec(config.decoder_layers, config.num_heads, **options)
    tensors = model.state_dict()
    target = tensors["target_embedding"]
    encoder.embeddings[0].weight = tensors.get("source_embedding", target).clone()
    decoder.embeddings.weight = target.clone()
    decoder.projection.weight = tensors.get("output_weight", target).clone()
    for side, blocks, norm, places in (
        (encoder, model.encoder, model.encoder_norm, model.source_positions),
        (decoder, model.decoder, model.decoder_norm, model.target_positions),
    ):
        if config.norm_first:
            _norm(side.layer_norm, norm)
        if config.positions not in ("rotary", "shaw", "t5"):
            nowhere = torch.zeros(positions, config.dim)  # without a table it would take sinusoids of its own
            side.position_encodings.encodings = places.picture(positions).get("table", nowhere).clone()
        for layer, block in zip(side.layer, blocks, strict=True):
            _block(layer, block, places)
    return transformer_spec.TransformerSpec(encoder, decoder)


def _block(spec: Any, block: nn.Module, places: Positions) -> None:
    assert isinstance(block, EncoderBlock | DecoderBlock)
    _attention(spec.self_attention, block.attention, block.around_attention.norm)
    if isinstance(places.bias, T5Bias):
        spec.self_attention.relative_attention_bias = places.bias.weight.clone()
        spec.self_attention.relative_attention_max_distance = np.int32(places.bias.max_distance)
    if isinstance(block, DecoderBlock):
        _attention(spec.attention, block.cross_attention, block.around_cross_attention.norm)
    inner = block.feed_forward
    _norm(spec.ffn.layer_norm, block.around_feed_forward.norm)
    if inner.gate is None:
        _linear(spec.ffn.linear_0, inner.inner)
    else:
        _linear(spec.ffn.linear_0, inner.gate)
        _linear(spec.ffn.linear_0_noact, inner.inner)
    _linear(spec.ffn.linear_1, inner.outer)


def _attention(spec: Any, attention: MultiHeadAttention, norm: nn.Module) -> None:
    """Self-attention has one matrix for queries, keys and values; to a memory, the queries have one of their own."""
    parts = [attention.query, attention.key, attention.value]
    own = 3 if len(spec.linear) == 2 else 1
    _norm(spec.layer_norm, norm)
    _linear(spec.linear[0], *parts[:own])
    if parts[own:]:
        _linear(spec.linear[1], *parts[own:])
    _linear(spec.linear[-1], attention.output)
    if attention.relative is not None:
        values = attention.relative.value_vectors
        assert values is not None
        spec.relative_position_keys = attention.relative.key_vectors.clone()
        spec.relative_position_values = values.clone()


def _linear(spec: Any, *layers: Linear) -> None:
    """One layer of several, one below the other."""
    spec.weight = torch.cat([layer.weight.data for layer in layers])
    if biases := [layer.bias.data for layer in layers if layer.bias is not None]:
        spec.bias = torch.cat(biases)


def _norm(spec: Any, norm: nn.Module) -> None:
    tensors = norm.state_dict()
    spec.gamma = tensors["weight"].clone()
    if isinstance(norm, nn.LayerNorm):
        spec.beta = tensors.get("bias", torch.zeros_like(spec.gamma)).clone()


def _translated(folder: Path, trial: Trial, source: Sequence[str], target: Sequence[str]) -> list[Said]:
    """What CTranslate2 says to the sources of a trial."""
    from ctranslate2 import Translator

    numbers = {token: number for number, token in enumerate(target)}
    translator = Translator(str(folder), inter_threads=1, intra_threads=torch.get_num_threads())
    texts = [[source[number] for number in ids] for ids in trial.sources]
    never = [[target[number]] for number in (PAD, BOS)]
    found = translator.translate_batch(
        texts,
        beam_size=1,
        max_input_length=0,
        min_decoding_length=0,
        max_decoding_length=trial.limit,
        suppress_sequences=never,
        return_end_token=True,
    )
    rows = [[numbers[token] for token in each.hypotheses[0]] for each in found]
    said = [[number for number in row if number != EOS] for row in rows]
    # Scored apart: a search that suppresses tokens scores without them.
    scored = translator.score_batch(texts, [[target[number] for number in row] for row in said], max_input_length=0)
    return [
        Said(tokens, sum(each.log_probs[: len(row)]), EOS in row)
        for tokens, row, each in zip(said, rows, scored, strict=True)
    ]
