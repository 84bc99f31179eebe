"""Folders of Hugging Face's transformers: GPT-2 and Llama, in and out.

    config.json            the sizes and options
    model.safetensors      the parameters (tensor_files.py has the other files that are read)

Names, shapes and types are compared with what config.json asks for before a parameter is copied, and an option that
weft does not compute is an error that names it. Dropout is for training and is read as far as weft has it: one figure
for embeddings and sub-layers, one for attention weights.

GPT-2 keeps the matrices of query, key and value as one, and all matrices transposed. Its folders of 2019 have no
"transformer." before the names, and hold masks, as old Llamas hold rotary frequencies, which are no parameters.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor

from weft.config import GPTConfig, nearest
from weft.interop.tensor_files import BYTES, WEIGHTS, Stored, opened, read_json, short

CONFIG = "config.json"

_OUTPUT = "lm_head.weight"
_SPECIALS = ("bos", "eos", "pad")
_ROPE = {  # what each kind of rotary scaling has: their names and weft's
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_len",
    },
}


class Weights(NamedTuple):
    """A model as a configuration, parameters by weft's names (fp32), and the size of the vocabulary."""

    config: GPTConfig
    tensors: dict[str, Tensor]
    vocab_size: int


class Entry(NamedTuple):
    """A tensor of a folder: its shape there, and the tensors of weft that it holds, one below the other."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Of each of weft's tensors."""
        first, *rest = reversed(self.shape) if self.transposed else self.shape
        return first // len(self.names), *rest

    def split(self, tensor: Tensor) -> dict[str, Tensor]:
        """Weft's tensors, in fp32 and in memory of their own."""
        parts = (tensor.T if self.transposed else tensor).to(torch.float32).chunk(len(self.names))
        return {
            name: part.clone(memory_format=torch.contiguous_format)
            for name, part in zip(self.names, parts, strict=True)
        }

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The folder's tensor of weft's."""
        whole = torch.cat([tensors[name].detach().cpu() for name in self.names])
        return (whole.T if self.transposed else whole).contiguous()


Layout = dict[str, Entry]  # by the name in the folder


class Family(NamedTuple):
    """A type of model, and how it is said there.

    Attributes:
        what: its name in messages.
        architecture: its class in transformers.
        keys: weft's keys of a configuration, and theirs.
        needed: those that have no default.
        defaults: what a configuration has that does not say; in weft's words, but for the activation.
        fixed: options, and the values of them that weft computes; one that is not there has the first.
        activations: their names and weft's; the first of several is written.
        layout: the tensors of a configuration and a vocabulary's size.
        prefix: of all names but the output layer's; a folder may leave it out.
        noise: tensors that may be there, too, since they follow from the configuration.
    """

    what: str
    architecture: str
    keys: Mapping[str, str]
    needed: tuple[str, ...]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]]
    activations: Mapping[str, str]
    layout: Callable[[GPTConfig, int], Layout]
    prefix: str
    noise: re.Pattern[str]


def read(folder: str | os.PathLike[str]) -> Weights:
    """The model of a folder, for ``GPT(config, vocab_size).load_state_dict(tensors)``.

    Raises:
        OSError: if a file is missing.
        ValueError: if a file is damaged, files do not fit each other, or the model is one that weft does not compute.
    """
    folder = Path(folder)
    config, vocab_size, family = _read_config(folder / CONFIG)
    with opened(folder) as files:
        stored = _prefixed(folder, files, family.prefix)
        if config.num_layers > len(stored.headers):  # or else a forged number would keep us listing
            raise ValueError(f"{folder} has {len(stored.headers)} tensors, too few for {config.num_layers} layers")
        layout = family.layout(config, vocab_size)
        _check(folder, layout, stored, family.noise)
        tensors: dict[str, Tensor] = {}
        for name, entry in layout.items():
            tensors |= entry.split(stored.get(name))
        again = config.tie and _OUTPUT in stored.headers  # stored, though it is the embeddings
        if again and not torch.equal(stored.get(_OUTPUT).to(torch.float32), tensors["embedding"]):
            raise ValueError(f"{folder}: {_OUTPUT!r} is not the embeddings, but {CONFIG} says that they are tied")
    return Weights(config, tensors, vocab_size)


def special_tokens(folder: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
    """The numbers of the tokens "bos", "eos" and "pad" that a folder names; several eos, or expressly none.

    What generation_config.json says goes before what config.json says.

    Raises:
        OSError: if there is no configuration.
        ValueError: if it is damaged, or what it names is no token.
    """
    path, generation = Path(folder) / CONFIG, Path(folder) / "generation_config.json"
    tree = read_json(path)
    if generation.is_file():
        tree |= {name: value for name, value in read_json(generation).items() if value is not None}
    found: dict[str, tuple[int, ...]] = {}
    for name in _SPECIALS:
        given = tree.get(f"{name}_token_id")
        several: list[Any] = given if isinstance(given, list) else [given]
        numbers = [number for number in several if number is not None and number != -1]  # old folders say none so
        if not all(_is_whole(number) and number >= 0 for number in numbers):
            raise ValueError(f"{path}: '{name}_token_id' must be a token's number or several, not {short(given)}")
        if numbers or (name == "eos" and "eos_token_id" in tree):
            found[name] = tuple(numbers)
    return found


def write(
    folder: str | os.PathLike[str],
    config: GPTConfig,
    tensors: Mapping[str, Tensor],
    special: Mapping[str, int | Sequence[int]] | None = None,
) -> None:
    """Write a model as a folder that transformers loads: a Llama if its positions are rotary, a GPT-2 if learned.

    Args:
        folder: one that has no model yet.
        config: of the model.
        tensors: its parameters, ``model.state_dict()``.
        special: the numbers of the tokens "bos", "eos" and "pad", as ``special_tokens`` gives them.

    Raises:
        ValueError: if neither family has what this model has, or the tensors are not those of the configuration.
        OSError: if the folder holds a model already, or cannot be written.
    """
    folder = Path(folder)
    kind = {"rotary": "llama", "learned": "gpt2"}.get(config.positions)
    if kind is None:
        raise ValueError(f"neither a Llama nor a GPT-2 has positions {config.positions!r}: expected rotary or learned")
    if "embedding" not in tensors:
        raise ValueError(f"the model has no tensor 'embedding'{nearest('embedding', tensors)}")
    vocab_size = len(tensors["embedding"])
    tree = {**_write_config(kind, config), "vocab_size": vocab_size, **_write_special(special or {})}
    layout = FAMILIES[kind].layout(config, vocab_size)
    check_tensors(tensors, {name: entry.own_shape for entry in layout.values() for name in entry.names})
    for name in (CONFIG, WEIGHTS):
        if (folder / name).exists():
            raise FileExistsError(f"{folder} holds a model already ({name}): choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{WEIGHTS}.part"
    try:
        save_file({name: entry.join(tensors) for name, entry in layout.items()}, aside, metadata={"format": "pt"})
        aside.rename(folder / WEIGHTS)
    finally:
        aside.unlink(missing_ok=True)
    (folder / CONFIG).write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")


def require(config: GPTConfig, what: str, **expected: Any) -> None:
    """Raise ValueError, naming the option, unless the configuration has the only values that a format knows.

    For an option that is None, what that stands for counts.
    """
    given = config.model_dump() | implied(config)
    for key, value in expected.items():
        if given[key] != value:
            raise ValueError(f"{what} has {key} = {value}, but the model has {given[key]}")


def implied(config: GPTConfig) -> dict[str, Any]:
    """The options that may be None, with what that stands for."""
    meant = {
        "num_kv_heads": config.num_heads,
        "head_dim": config.head_width,
        "attention_bias": config.bias,
        "attention_dropout": config.dropout,
    }
    return {key: value if getattr(config, key) is None else getattr(config, key) for key, value in meant.items()}


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError unless the tensors, by weft's names, are those that a configuration asks for."""
    for name, shape in shapes.items():
        if name not in tensors:
            raise ValueError(f"the model has no tensor {name!r}{nearest(name, tensors.keys() - shapes.keys())}")
        if tensors[name].shape != shape:
            given = list(tensors[name].shape)
            raise ValueError(f"{name!r} has shape {given}, but the configuration asks for {list(shape)}")
    for name in tensors:
        if name not in shapes:
            raise ValueError(f"a model of this configuration has no tensor {name!r}{nearest(name, shapes)}")


def _llama(config: GPTConfig, vocab_size: int) -> Layout:
    dim, ffn_dim, meant = config.dim, config.ffn_dim, implied(config)
    queries, keys = config.num_heads * meant["head_dim"], meant["num_kv_heads"] * meant["head_dim"]
    biased = meant["attention_bias"]
    parts = {
        "self_attn.q_proj": ("attention.query", queries, dim, biased),
        "self_attn.k_proj": ("attention.key", keys, dim, biased),
        "self_attn.v_proj": ("attention.value", keys, dim, biased),
        "self_attn.o_proj": ("attention.output", dim, queries, biased),
        "mlp.gate_proj": ("feed_forward.gate", ffn_dim, dim, config.bias),
        "mlp.up_proj": ("feed_forward.inner", ffn_dim, dim, config.bias),
        "mlp.down_proj": ("feed_forward.outer", dim, ffn_dim, config.bias),
    }
    norms = {"input_layernorm": "around_attention.norm", "post_attention_layernorm": "around_feed_forward.norm"}
    layout = {
        "model.embed_tokens.weight": Entry(("embedding",), (vocab_size, dim)),
        "model.norm.weight": Entry(("norm.weight",), (dim,)),
    }
    for i in range(config.num_layers):
        theirs, ours = f"model.layers.{i}", f"blocks.{i}"
        for part, name in norms.items():
            layout[f"{theirs}.{part}.weight"] = Entry((f"{ours}.{name}.weight",), (dim,))
        for part, (name, rows, columns, bias) in parts.items():
            layout[f"{theirs}.{part}.weight"] = Entry((f"{ours}.{name}.weight",), (rows, columns))
            if bias:
                layout[f"{theirs}.{part}.bias"] = Entry((f"{ours}.{name}.bias",), (rows,))
    return layout | _output(config, vocab_size)


def _gpt2(config: GPTConfig, vocab_size: int) -> Layout:
    dim, ffn_dim = config.dim, config.ffn_dim
    parts = {
        "attn.c_attn": (("attention.query", "attention.key", "attention.value"), dim, 3 * dim),
        "attn.c_proj": (("attention.output",), dim, dim),
        "mlp.c_fc": (("feed_forward.inner",), dim, ffn_dim),
        "mlp.c_proj": (("feed_forward.outer",), ffn_dim, dim),
    }
    norms = {"ln_1": "around_attention.norm", "ln_2": "around_feed_forward.norm"}
    layout = {
        "transformer.wte.weight": Entry(("embedding",), (vocab_size, dim)),
        "transformer.wpe.weight": Entry(("positions.weight",), (config.max_len, dim)),
    }
    for kind in ("weight", "bias"):
        layout[f"transformer.ln_f.{kind}"] = Entry((f"norm.{kind}",), (dim,))
        for i in range(config.num_layers):
            theirs, ours = f"transformer.h.{i}", f"blocks.{i}"
            for part, name in norms.items():
                layout[f"{theirs}.{part}.{kind}"] = Entry((f"{ours}.{name}.{kind}",), (dim,))
            for part, (names, rows, columns) in parts.items():
                held, matrix = tuple(f"{ours}.{name}.{kind}" for name in names), kind == "weight"
                layout[f"{theirs}.{part}.{kind}"] = Entry(held, (rows, columns) if matrix else (columns,), matrix)
    return layout | _output(config, vocab_size)


def _output(config: GPTConfig, vocab_size: int) -> Layout:
    return {} if config.tie else {_OUTPUT: Entry(("output_weight",), (vocab_size, config.dim))}


FAMILIES = {
    "llama": Family(
        what="a Llama",
        architecture="LlamaForCausalLM",
        keys={
            "dim": "hidden_size",
            "num_heads": "num_attention_heads",
            "num_kv_heads": "num_key_value_heads",
            "head_dim": "head_dim",
            "num_layers": "num_hidden_layers",
            "ffn_dim": "intermediate_size",
            "max_len": "max_position_embeddings",
            "norm_eps": "rms_norm_eps",
            "activation": "hidden_act",
            "bias": "mlp_bias",
            "attention_bias": "attention_bias",
            "tie": "tie_word_embeddings",
            "attention_dropout": "attention_dropout",
        },
        needed=("dim", "num_heads", "num_layers", "ffn_dim"),
        defaults={
            "positions": "rotary",
            "norm": "rms",
            "max_len": 2048,
            "norm_eps": 1e-6,
            "activation": "silu",
            "bias": False,
            "tie": False,
            "dropout": 0.0,
        },
        fixed={"rope_interleaved": (False,), "partial_rotary_factor": (None, 1.0), "sliding_window": (None,)},
        activations={"silu": "swiglu", "swish": "swiglu"},
        layout=_llama,
        prefix="model.",
        noise=re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"),
    ),
    "gpt2": Family(
        what="a GPT-2",
        architecture="GPT2LMHeadModel",
        keys={
            "dim": "n_embd",
            "num_heads": "n_head",
            "num_layers": "n_layer",
            "ffn_dim": "n_inner",
            "max_len": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
            "tie": "tie_word_embeddings",
            "dropout": "resid_pdrop",
            "attention_dropout": "attn_pdrop",
        },
        needed=("dim", "num_heads", "num_layers"),
        defaults={"max_len": 1024, "activation": "gelu_new", "attention_dropout": 0.1},
        fixed={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"},
        layout=_gpt2,
        prefix="transformer.",
        noise=re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
    ),
}


def _read_config(path: Path) -> tuple[GPTConfig, int, Family]:
    tree = read_json(path)
    kind = tree.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"{path}: weft does not read model_type {short(kind)}: expected {' or '.join(FAMILIES)}")
    family = FAMILIES[kind]
    for option, allowed in {**family.fixed, "quantization_config": (None,)}.items():
        if tree.get(option, allowed[0]) not in allowed:
            given = short(tree[option])
            raise ValueError(f"{path}: weft does not compute {option} = {given}: expected {allowed[-1]!r}")
    for key in (*(family.keys[name] for name in family.needed), "vocab_size"):
        if tree.get(key) is None:
            raise ValueError(f"{path} has no {key!r}")
    vocab_size = tree["vocab_size"]
    if not _is_whole(vocab_size) or vocab_size < 1:
        raise ValueError(f"{path}: 'vocab_size' must be a whole number ≥ 1, not {short(vocab_size)}")
    said = {ours: tree[theirs] for ours, theirs in family.keys.items() if tree.get(theirs) is not None}
    values = {**family.defaults, **said, **(_read_rope(path, tree) if kind == "llama" else {})}
    activation = values["activation"]
    if not isinstance(activation, str) or activation not in family.activations:
        known, key = ", ".join(family.activations), family.keys["activation"]
        raise ValueError(f"{path}: weft does not compute {key} = {short(activation)}: expected one of {known}")
    values["activation"] = family.activations[activation]
    if "ffn_dim" not in values and _is_whole(values["dim"]):
        values["ffn_dim"] = 4 * values["dim"]  # GPT-2's way to say nothing
    return _made(path, family, values), vocab_size, family


def _read_rope(path: Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary options: under rope_parameters, or before transformers 5 as rope_theta and rope_scaling."""
    given = tree.get("rope_parameters") or tree.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError(f"{path}: the rotary options must be an object, not {short(given)}")
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("partial_rotary_factor") not in (None, 1.0):
        raise ValueError(f"{path}: weft turns whole heads: partial_rotary_factor must be 1.0")
    base = given.get("rope_theta", tree.get("rope_theta"))
    options = {} if base is None else {"rope_base": base}
    if kind == "default":
        return options
    if not isinstance(kind, str) or kind not in _ROPE:
        known = ", ".join(("default", *_ROPE))
        raise ValueError(f"{path}: weft does not compute rope_type = {short(kind)}: expected one of {known}")
    original = tree.get("max_position_embeddings", FAMILIES["llama"].defaults["max_len"])
    given = {"original_max_position_embeddings": original, **given}
    for name in _ROPE[kind]:
        if name not in given:
            raise ValueError(f"{path}: rope_type {kind!r} has no {name!r}")
    return options | {"rope_scaling": {"kind": kind, **{ours: given[name] for name, ours in _ROPE[kind].items()}}}


def _made(path: Path, family: Family, values: Mapping[str, Any]) -> GPTConfig:
    """The configuration of these values, with None wherever that stands for the same."""
    try:
        config = GPTConfig.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "value_error":
            raise ValueError(f"{path}: {first['ctx']['error']}") from None
        key = ".".join(family.keys.get(str(part), str(part)) for part in first["loc"])
        message = first["msg"].removeprefix("Input ").replace("should be", "must be").partition(", unable")[0]
        raise ValueError(f"{path}: {key!r} {message}, not {short(first['input'])}") from None
    for key, value in implied(config).items():
        bare = config.model_copy(update={key: None})
        if implied(bare)[key] == value:
            config = bare
    return config


def _write_config(kind: str, config: GPTConfig) -> dict[str, Any]:
    """What config.json says of a configuration.

    The rotary options are written as before transformers 5, which reads both ways; the older ones ignore the newer.
    """
    family = FAMILIES[kind]
    if kind == "llama":
        require(config, family.what, norm="rms")
        extra = {"rope_theta": config.rope_base, "rope_scaling": _write_rope(config)}
    else:
        whole = {"num_kv_heads": config.num_heads, "head_dim": config.dim // config.num_heads}
        require(config, family.what, norm="layer", bias=True, attention_bias=True, **whole)
        extra = {"embd_pdrop": config.dropout}
    names = {ours: theirs for theirs, ours in reversed(list(family.activations.items()))}
    if config.activation not in names:
        known = " or ".join(names)
        raise ValueError(f"{family.what} has activation = {known}, but the model has {config.activation}")
    values = config.model_dump() | implied(config) | {"activation": names[config.activation]}
    said = {theirs: values[ours] for ours, theirs in family.keys.items()}
    return {"model_type": kind, "architectures": [family.architecture], **said, **extra}


def _write_rope(config: GPTConfig) -> dict[str, Any] | None:
    scaling = config.rope_scaling
    if scaling is None:
        return None
    return {"rope_type": scaling.kind, **{name: getattr(scaling, ours) for name, ours in _ROPE[scaling.kind].items()}}


def _write_special(special: Mapping[str, int | Sequence[int]]) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for name, given in special.items():
        if name not in _SPECIALS:
            raise ValueError(f"unknown special token {name!r}: expected one of {', '.join(_SPECIALS)}")
        numbers = [given] if isinstance(given, int) else list(given)
        written[f"{name}_token_id"] = numbers[0] if len(numbers) == 1 else numbers or None
    return written


def _prefixed(folder: Path, stored: Stored, prefix: str) -> Stored:
    """The same tensors with the prefix before every name but the output layer's."""
    own = {name if name.startswith((prefix, _OUTPUT)) else prefix + name: name for name in stored.headers}
    if len(own) != len(stored.headers):
        raise ValueError(f"{folder} has a tensor twice, with {prefix!r} before its name and without")
    headers = {name: stored.headers[other] for name, other in own.items()}
    return Stored(headers, lambda name: stored.get(own[name]), stored.size)


def _check(folder: Path, layout: Layout, stored: Stored, noise: re.Pattern[str]) -> None:
    """Raise ValueError unless the files hold what the layout says, and nothing that is unknown."""
    headers = stored.headers
    embedding = next(entry for entry in layout.values() if entry.names == ("embedding",))
    expected = layout | {_OUTPUT: embedding} if _OUTPUT in headers else layout
    for name, entry in expected.items():
        if name not in headers:
            raise ValueError(f"{folder} has no tensor {name!r}{nearest(name, headers.keys() - expected.keys())}")
        shape, kind = headers[name]
        if shape != list(entry.shape):
            raise ValueError(f"{folder}: {name!r} has shape {shape}, but {CONFIG} asks for {list(entry.shape)}")
        if kind not in BYTES:
            raise ValueError(f"{folder}: {name!r} is stored as {kind}: expected one of {', '.join(BYTES)}")
    for name in headers:
        if name not in expected and not noise.fullmatch(name):
            raise ValueError(f"{folder} has a tensor {short(name)} that the model has not{nearest(name, expected)}")
    needed = sum(math.prod(entry.shape) * BYTES[headers[name][1]] for name, entry in layout.items())
    if needed > stored.size:  # in a pickle several tensors can be views of the same bytes
        raise ValueError(f"{folder}: the tensors would take {needed} bytes, but the files have {stored.size}")


def _is_whole(value: object) -> bool:
    return type(value) is int
