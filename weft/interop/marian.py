"""A Transformer as a folder of Hugging Face's transformers: a Marian if its norms stand behind, a Pegasus if before.

    config.json, generation_config.json     sizes and options; how ``generate`` decodes: greedily, as weft does
    model.safetensors                       the parameters
    tokenizer.json, tokenizer_config.json   the source's vocabulary, which puts </s> behind a text
    target/                                 the target's, where it has its own: AutoTokenizer's subfolder="target"

AutoModelForSeq2SeqLM and AutoTokenizer load it. Both families have the sines of a position in the first half of its
vector and the cosines in the second; weft has them by turns. Nothing but the parameters tells the entries of the
residual stream apart: where all parameters that read or write it change the order of their entries in the same way, the
model stays what it was. Where linear layers or norms have no biases, zeros stand for them.

``generate`` knows no length that depends on the source's: a translation may be as long as there are positions. In a
beam search it ranks as weft does with the same ``length_penalty``, and it ends with early_stopping=True as weft does
with patience 1, with "never" as with infinite patience.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from weft.config import BOS, EOS, PAD, UNK, TransformerConfig
from weft.data.tokenizers import TokenizerPair
from weft.interop.handover import POSITIONS, Said, Trial, aside, require, whole
from weft.interop.huggingface import CONFIG
from weft.interop.tensor_files import WEIGHTS
from weft.interop.vocabularies import write_vocabulary
from weft.models.transformer import Transformer

TARGET = "target"

_SPECIAL: dict[str, int | list[int]] = {"bos": BOS, "eos": EOS, "pad": PAD, "unk": UNK}
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_ATTENTION = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
_ENCODER = {
    **{f"self_attn.{theirs}": f"attention.{ours}" for theirs, ours in _ATTENTION.items()},
    "self_attn_layer_norm": "around_attention.norm",
    "fc1": "feed_forward.inner",
    "fc2": "feed_forward.outer",
    "final_layer_norm": "around_feed_forward.norm",
}
_DECODER = {
    **_ENCODER,
    **{f"encoder_attn.{theirs}": f"cross_attention.{ours}" for theirs, ours in _ATTENTION.items()},
    "encoder_attn_layer_norm": "around_cross_attention.norm",
}
_ROWS = 16  # sentences whose logits exist at a time
_WRITES = ("output", "outer", "norm")  # parts whose rows, not columns, are entries of the residual stream


class Family(NamedTuple):
    """A type of model there: its name in messages, in config.json, and that of its class."""

    what: str
    model_type: str
    architecture: str


_MARIAN = Family("a Marian of transformers", "marian", "MarianMTModel")
_PEGASUS = Family("a Pegasus of transformers", "pegasus", "PegasusForConditionalGeneration")


def write(
    path: str | os.PathLike[str],
    model: Transformer,
    config: TransformerConfig,
    tokenizers: TokenizerPair,
    samples: Sequence[str] = (),
    positions: int = POSITIONS,
) -> str:
    """Write a folder that transformers loads, after a proof that it says the same; without transformers, unproven.

    Args:
        path: a folder that is not there yet.
        model: what to write.
        config: its configuration.
        tokenizers: those that it was trained with.
        samples: sentences for the proof; if none, some are made of the source's vocabulary.
        positions: how many tokens a text may have, EOS counted.

    Returns:
        What was written, for people.

    Raises:
        ValueError: if the family cannot hold the model, naming the key; or if transformers does not say what weft says.
        OSError: if the path is there, or cannot be written.
    """
    family = _PEGASUS if config.norm_first else _MARIAN
    kinds = {"positions": ["sinusoidal"], "norm": ["layer"], "activation": [*_ACTIVATIONS]}
    require(config, family.what, {**kinds, "num_kv_heads": [config.num_heads], "qk_norm": [False]})
    sizes = tokenizers.source.vocab_size, tokenizers.target.vocab_size
    if family is _PEGASUS and sizes[0] != sizes[1]:
        raise ValueError(
            f"{family.what} has one size of vocabulary, but the model has {sizes[0]} source and {sizes[1]} target "
            "tokens: expected a joint tokenizer, or norm_first = False; CTranslate2 has both sizes"
        )
    model = whole(model, config, tokenizers)
    with aside(path) as folder:
        tensors = dict(_tensors(model, config, family, positions))
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        _write_json(folder / CONFIG, _config(config, family, sizes, positions))
        _write_json(folder / "generation_config.json", _generation(positions))
        _write_tokenizers(folder, tokenizers, positions)
        if importlib.util.find_spec("transformers") is None:
            proof = "not checked, since transformers is not installed"
        else:
            trial = Trial(model, tokenizers, samples, positions)
            proof = trial.proof(_generated(folder, trial, positions), "transformers")
    return f"{os.fspath(path)}: {family.what}; {proof}"


def _config(config: TransformerConfig, family: Family, sizes: tuple[int, int], positions: int) -> dict[str, Any]:
    tables: dict[str, Any] = {"vocab_size": sizes[0], "tie_word_embeddings": config.tie != "none"}
    if family is _MARIAN:
        tables |= {"decoder_vocab_size": sizes[1], "share_encoder_decoder_embeddings": config.tie == "all"}
    else:
        tables["tie_word_embeddings"] = config.tie == "all"  # it ties all three tables or none
    sides = {
        f"{side}_{key}": value
        for side in ("encoder", "decoder")
        for key, value in (("attention_heads", config.num_heads), ("ffn_dim", config.ffn_dim))
    }
    return {
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "is_encoder_decoder": True,
        **tables,
        "d_model": config.dim,
        "encoder_layers": config.encoder_layers,
        "decoder_layers": config.decoder_layers,
        **sides,
        "activation_function": _ACTIVATIONS[config.activation],
        "max_position_embeddings": positions,
        "scale_embedding": True,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.ffn_dropout,
        **_tokens(),
        "forced_eos_token_id": None,
        "dtype": "float32",
    }


def _generation(positions: int) -> dict[str, Any]:
    return {**_tokens(), "max_length": positions, "suppress_tokens": [PAD, BOS]}


def _tokens() -> dict[str, int]:
    return {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "decoder_start_token_id": BOS}


def _tensors(
    model: Transformer, config: TransformerConfig, family: Family, positions: int
) -> Iterator[tuple[str, Tensor]]:
    """The parameters by their names there, each in memory of its own, which safetensors asks for."""
    order = torch.arange(config.dim).view(-1, 2).T.flatten()  # the even entries, then the odd ones
    tensors = model.state_dict()

    def linear(theirs: str, ours: str) -> Iterator[tuple[str, Tensor]]:
        weight = tensors[f"{ours}.weight"]
        bias = tensors.get(f"{ours}.bias", torch.zeros(len(weight)))
        writes = ours.endswith(_WRITES)
        yield f"{theirs}.weight", weight[order] if writes else weight[:, order]
        yield f"{theirs}.bias", bias[order] if writes else bias.clone()

    for side, parts, layers in (
        ("encoder", _ENCODER, config.encoder_layers),
        ("decoder", _DECODER, config.decoder_layers),
    ):
        for i in range(layers):
            for theirs, ours in parts.items():
                yield from linear(f"model.{side}.layers.{i}.{theirs}", f"{side}.{i}.{ours}")
        if family is _PEGASUS:
            yield from linear(f"model.{side}.layer_norm", f"{side}_norm")
            table = model.source_positions.picture(positions)["table"]  # it asks for them, though they follow
            yield f"model.{side}.embed_positions.weight", table[:, order]
    for name, table in _tables(tensors, config, family):
        yield name, table[:, order]


def _tables(tensors: Mapping[str, Tensor], config: TransformerConfig, family: Family) -> Iterator[tuple[str, Tensor]]:
    """The tables by their names there."""
    target = tensors["target_embedding"]
    if config.tie == "all":
        yield "model.shared.weight", target
        return
    yield "model.encoder.embed_tokens.weight", tensors["source_embedding"]
    yield "model.decoder.embed_tokens.weight", target
    if family is _PEGASUS:
        yield "model.shared.weight", tensors["source_embedding"]  # untied, it serves nothing
    if family is _PEGASUS or config.tie == "none":
        yield "lm_head.weight", tensors.get("output_weight", target)


def _write_tokenizers(folder: Path, tokenizers: TokenizerPair, positions: int) -> None:
    also = {"model_max_length": positions, "split_special_tokens": True}  # text that spells a special is text
    write_vocabulary(folder, tokenizers.source, _SPECIAL, closing=(EOS,), also=also)
    if not tokenizers.joint:
        (folder / TARGET).mkdir()
        write_vocabulary(folder / TARGET, tokenizers.target, _SPECIAL, closing=(EOS,), also=also)


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def _generated(folder: Path, trial: Trial, longest: int) -> list[Said]:
    """What transformers says to the texts of a trial, as ``generate`` decodes unless it is told otherwise.

    Raises:
        ValueError: if its tokenizer gives other tokens than weft's.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    read = tokenizer(trial.texts, truncation=True, max_length=longest).input_ids
    for number, (ids, source) in enumerate(zip(read, trial.sources, strict=True), 1):
        if ids != [*source, EOS]:
            sample = f"sample {number} of {len(read)}"
            raise ValueError(f"not written: the tokenizer of transformers gives other tokens than weft's to {sample}")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(folder, local_files_only=True).eval()
    finally:
        if bars:
            logging.enable_progress_bar()
    said: list[Said] = []
    for first in range(0, len(read), _ROWS):
        rows = tokenizer.pad({"input_ids": read[first : first + _ROWS]}, return_tensors="pt")
        said += _answers(model, rows.input_ids, rows.attention_mask, trial.limit)
    return said


def _answers(model: Any, source: Tensor, seen: Tensor, limit: int) -> Iterator[Said]:
    found = model.generate(
        input_ids=source,
        attention_mask=seen,
        max_length=limit + 1,  # BOS counts
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = found.sequences[:, 1:]
    log_probs = torch.stack(found.logits, 1).log_softmax(-1).gather(2, tokens[..., None])[..., 0]  # [B, T]
    for row, gained in zip(tokens.tolist(), log_probs.double(), strict=True):
        count = row.index(EOS) if EOS in row else len(row)
        yield Said(row[:count], float(gained[: count + 1].sum()), EOS in row)
