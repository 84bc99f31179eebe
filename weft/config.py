"""Recipes: everything that decides what a training run does, typed and strict, in TOML.

A recipe is a tree of sections. It comes from a TOML file, a dictionary or the defaults, and is changed by dotted
overrides as the shell gives them::

    recipe = Recipe.read("my.toml", ["model.dim=128", "training.steps=2000"])
    recipe.write("resolved.toml")

An unknown key, a wrong type or a value out of range is a ValueError that names the key, what was given, and the
nearest key that there is. This file imports no torch.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Self, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

PAD, BOS, EOS, UNK = range(4)  # the first token numbers of weft's own vocabularies: padding, begin, end, unknown


class Specials(NamedTuple):
    """The token numbers that a search must know; a published vocabulary has its own.

    Attributes:
        pad: what rows are filled up with; −1 where no token is for that.
        bos: what a text begins with.
        eos: what it ends with.
        never: what is never chosen as the next token.
    """

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    never: tuple[int, ...] = (PAD, BOS)


Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]
Corpus = str | list[str]


class Section(BaseModel):
    """A part of a recipe: no key but these, no type but these, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class DataConfig(Section):
    """What is read.

    Attributes:
        train, validation: a TSV file, two files (a list of two, or "a.en,b.de"), or a part of a named set ("set:part").
        source, target: the languages; a named set needs them to find its files, a model folder shows them.
        swap: read the pairs the other way round.
        held_out: without a validation set, so many pairs are taken out of the training set for it.
        max_len: a pair with a side of more tokens is dropped (the end token counts). 0: none is.
        max_ratio: a pair with one side so many times as long as the other is dropped. 0: none is.

    Of a language model, ``train`` and ``validation`` are text files, folders of them (lists, or with commas between),
    or a part of a named set, and these say what is made of them:

        split: a document is a whole "file", what stands between "blank" lines, or a "line".
        end: whether the end token follows each document.
        held_out_share: without a validation set, so much of the text, from its end, is kept for it.
        sample: "stream" draws windows of the whole text, "documents" packs documents, which do not see each other.
        length: tokens of a row; 0: as many as the model can take.
    """

    train: Corpus = ""
    validation: Corpus = ""
    source: str = ""
    target: str = ""
    swap: bool = False
    held_out: int = Field(default=1000, ge=0)
    max_len: int = Field(default=128, ge=0)
    max_ratio: float = Field(default=0.0, ge=0.0)
    split: Literal["file", "blank", "line"] = "file"
    end: bool = True
    held_out_share: Share = 0.1
    sample: Literal["stream", "documents"] = "stream"
    length: int = Field(default=0, ge=0)


class TokenizerConfig(Section):
    """How text becomes numbers.

    Attributes:
        kind: bpe and unigram know every text; word and char only what they saw.
        vocab_size: at most so many tokens, the specials among them; char takes what there is.
        joint: one vocabulary for both languages, or one each.
        path: a tokenizer.json to take instead of training one (two of them, source first, if not joint).
        dropout: BPE dropout (Provilkov et al. 2020): each merge is left out with this probability, in training only.
    """

    kind: Literal["bpe", "unigram", "word", "char"] = "bpe"
    vocab_size: int = Field(default=8000, ge=8)
    joint: bool = True
    path: Corpus = ""
    dropout: Share = 0.0


Positions = Literal["sinusoidal", "learned", "order", "fraction", "rotary", "alibi", "shaw", "t5", "none"]
Tie = Literal["all", "output", "none"]  # which embeddings are one: source = target = output; target = output; none


class TransformerConfig(Section):
    """The encoder-decoder Transformer (Vaswani et al. 2017); see weft/models/transformer.py."""

    family: Literal["transformer"] = "transformer"
    dim: Count = 256
    num_heads: Count = 4
    num_kv_heads: Count | None = None
    ffn_dim: Count = 1024
    encoder_layers: Count = 3
    decoder_layers: Count = 3
    norm: Literal["layer", "rms"] = "layer"
    norm_first: bool = True
    activation: Literal["relu", "gelu", "gelu_tanh", "swiglu"] = "relu"
    bias: bool = True
    qk_norm: bool = False
    positions: Positions = "sinusoidal"
    max_len: Count = 1024
    tie: Tie = "all"
    dropout: Share = 0.1
    attention_dropout: Share = 0.0
    ffn_dropout: Share = 0.0

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.dim % self.num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, but {self.dim} is not one of {self.num_heads}")
        return self


class RopeScaling(Section):
    """How rotary angles are slowed down for a context longer than the one first trained with.

    Attributes:
        kind: linear divides every frequency by ``factor`` (Chen et al. 2023); llama3 only the low ones.
        factor: by how much.
        low_freq_factor, high_freq_factor: what turns less often than the first in the original context is low, what
            turns more often than the second stays as it is, and between them the one passes into the other (llama3).
        original_max_len: the context first trained with (llama3).
    """

    kind: Literal["linear", "llama3"] = "linear"
    factor: float = Field(default=1.0, ge=1.0)
    low_freq_factor: float = Field(default=1.0, gt=0.0)
    high_freq_factor: float = Field(default=4.0, gt=0.0)
    original_max_len: Count = 8192

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor must be less than high_freq_factor, not {self.low_freq_factor} and "
                f"{self.high_freq_factor}"
            )
        return self


class GPTConfig(Section):
    """The decoder-only Transformer: GPT-2 and the Llama family; see weft/models/gpt.py.

    Attributes:
        head_dim: dim / num_heads if None; num_kv_heads: num_heads if None.
        max_len: the context: how many tokens are seen at once.
        rope_base, rope_scaling: of rotary positions.
        bias: of linear layers and LayerNorm; attention_bias: of the attention's linear layers, as ``bias`` if None.
        tie: whether the output layer is the table of embeddings.
        dropout: on embeddings and sub-layers; attention_dropout: on attention weights, the same if None.
    """

    family: Literal["gpt"] = "gpt"
    dim: Count = 256
    num_heads: Count = 4
    num_kv_heads: Count | None = None
    head_dim: Count | None = None
    num_layers: Count = 4
    ffn_dim: Count = 1024
    max_len: Count = 256
    positions: Literal["learned", "rotary", "alibi", "none"] = "learned"
    rope_base: float = Field(default=10_000.0, gt=0.0)
    rope_scaling: RopeScaling | None = None
    norm: Literal["layer", "rms"] = "layer"
    norm_eps: float = Field(default=1e-5, gt=0.0)
    activation: Literal["relu", "gelu", "gelu_tanh", "swiglu"] = "gelu"
    bias: bool = True
    attention_bias: bool | None = None
    tie: bool = True
    dropout: Share = 0.1
    attention_dropout: Share | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.head_dim is None and self.dim % self.num_heads:
            raise ValueError(f"dim must be a multiple of num_heads, but {self.dim} is not one of {self.num_heads}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, but {self.num_heads} is not one of {self.num_kv_heads}"
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(f"rotary positions turn pairs: head_dim must be even, not {self.head_width}")
        if self.positions != "rotary" and self.rope_scaling is not None:
            raise ValueError(f"rope_scaling is for rotary positions, not for {self.positions!r}")
        return self

    @property
    def head_width(self) -> int:
        """How wide a head is."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim


class RecurrentConfig(Section):
    """RNN, GRU or LSTM, with attention or without; see weft/models/recurrent.py."""

    family: Literal["recurrent"] = "recurrent"
    cell: Literal["rnn", "gru", "lstm"] = "gru"
    attention: Literal["additive", "dot", "scaled_dot", "bilinear", "none"] = "additive"
    embed_dim: Count = 256
    dim: Count = 512
    encoder_layers: Count = 1
    decoder_layers: Count = 1
    bidirectional: bool = True
    tie: Tie = "output"
    dropout: Share = 0.2


class ConvolutionalConfig(Section):
    """Gated convolutions, attention in every decoder layer (Gehring et al. 2017); see weft/models/convolutional.py."""

    family: Literal["convolutional"] = "convolutional"
    embed_dim: Count = 256
    dim: Count = 256
    encoder_layers: Count = 4
    decoder_layers: Count = 3
    kernel_size: Count = 3
    max_len: Count = 1024
    tie: Tie = "output"
    dropout: Share = 0.1


ModelConfig = TransformerConfig | RecurrentConfig | ConvolutionalConfig | GPTConfig


class TrainingConfig(Section):
    """How the parameters are found.

    Attributes:
        steps: updates of the parameters in all.
        batch_tokens: a batch has rows × its longest side ≤ this, padding counted.
        accumulate: so many batches make an update, weighted by their tokens.
        precision: of activations and products; parameters are fp32. auto: bf16 where the CPU multiplies it fast.
        reference: train by the plain formulas instead of the fast kernels; slower, for comparison.
        optimizer: adamw, or muon (Jordan et al. 2024) for the matrices of the blocks and adamw for the rest.
        learning_rate: the highest; schedule, warmup (steps up), decay (the last share of the steps, for wsd) and
            final_rate (share of the highest at the end, for cosine and wsd) shape it.
        clip: the longest a gradient may be; 0: any.
        smoothing: of the labels.
        rdrop: weight of R-Drop's divergence between two passes, half the α of Wu et al. 2021; 0: one pass.
        ema: how much of the mean of the weights is kept each step; 0: no mean.
        average: at the end the weights of the last so many saved steps are averaged; 0 or 1: the best step's are taken.
        validate_every, save_every, log_every: in steps. validate_every also saves.
        keep: so many saved steps stay, besides the best.
        patience: validations without a better one, after which training stops; 0: never.
        bleu: whether validation also translates, with which the best step is chosen; else by the loss.
        samples: after each validation of a language model so many texts are drawn and shown.
        tensorboard: also write TensorBoard's files.
    """

    steps: Count = 10_000
    batch_tokens: Count = 4096
    accumulate: Count = 1
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    reference: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=1e-3, gt=0.0)
    schedule: Literal["inverse_sqrt", "cosine", "wsd", "constant"] = "inverse_sqrt"
    warmup: int = Field(default=1000, ge=0)
    decay: Share = 0.2
    final_rate: Share = 0.0
    beta1: Share = 0.9
    beta2: Share = 0.98
    eps: float = Field(default=1e-9, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    clip: float = Field(default=1.0, ge=0.0)
    smoothing: Share = 0.1
    rdrop: float = Field(default=0.0, ge=0.0)
    ema: Share = 0.0
    average: int = Field(default=0, ge=0)
    validate_every: Count = 500
    save_every: Count = 500
    log_every: Count = 50
    keep: Count = 3
    patience: int = Field(default=0, ge=0)
    bleu: bool = True
    samples: int = Field(default=0, ge=0)
    tensorboard: bool = False


class DecodingConfig(Section):
    """How text is found, unless the caller says otherwise.

    Attributes:
        beam: hypotheses a sentence; 1 is greedy.
        length_penalty: α: hypotheses are ranked by log-probability / length^α, the end token counted.
        coverage_penalty: β of Wu et al. 2016: source words that were attended to too little cost this much.
        patience: the search goes on until beam × patience hypotheses are complete (Kasai et al. 2022).
        max_ratio, max_extra: a translation has at most max_ratio × source tokens + max_extra tokens.
        no_repeat: no sequence of so many tokens occurs twice; 0: it may.
        replace_unknown: an unknown word is replaced by the source word that it attended to most.
        exact: a text's translation does not depend on what is translated beside it, to the last bit; takes longer.
            Else only two hypotheses that are all but equally probable may change places.
        sample: draw at random instead of searching for the best.
        temperature, top_k, top_p, min_p, typical_p, repetition_penalty, frequency_penalty: of the draw; see
            ``weft.decoding.sampling.SamplingOptions``.
    """

    beam: Count = 5
    length_penalty: float = 1.0
    coverage_penalty: float = Field(default=0.0, ge=0.0)
    patience: float = Field(default=1.0, gt=0.0)
    max_ratio: float = Field(default=2.0, ge=0.0)
    max_extra: int = Field(default=20, ge=0)
    no_repeat: int = Field(default=0, ge=0)
    replace_unknown: bool = False
    exact: bool = False
    sample: bool = False
    temperature: float = Field(default=1.0, gt=0.0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    typical_p: float = Field(default=1.0, gt=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    frequency_penalty: float = 0.0


class Recipe(Section):
    """Everything that decides what a run does. ``name`` and ``note`` are for people."""

    name: str = ""
    note: str = ""
    task: Literal["translation", "language"] = "translation"
    seed: int = Field(default=1, ge=0)
    data: DataConfig = DataConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: Annotated[ModelConfig, Field(discriminator="family")] = TransformerConfig()
    training: TrainingConfig = TrainingConfig()
    decoding: DecodingConfig = DecodingConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.task == "language") != (self.model.family == "gpt"):
            others = ", ".join(name for name in MODELS if (name == "gpt") == (self.task == "language"))
            raise ValueError(f"task {self.task!r} needs a model.family of {others}, not {self.model.family!r}")
        for task, names in _ONLY.items():
            for name in names if task != self.task else ():
                if getattr(self.data, name) != DataConfig.model_fields[name].default:
                    raise ValueError(f"data.{name} is for the task {task!r}, not for {self.task!r}")
        return self

    @classmethod
    def make(cls, tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> Self:
        """A recipe from a tree of values, changed by overrides such as ``model.dim=128``.

        Raises:
            ValueError: naming the key, what was given, and the nearest key or what was expected.
        """
        pairs = [_split(override) for override in overrides]
        task = next((text for key, text in reversed(pairs) if key == "task"), tree.get("task"))
        usual = TASKS.get(task if isinstance(task, str) else "", {})
        changed: dict[str, Any] = {**usual, **tree}
        for key, value in changed.items():
            if isinstance(value, Mapping):
                changed[key] = {**_usual(usual.get(key, {}), value), **value}
        # The family decides which keys the model has, so it comes first; another family starts from its defaults.
        for key, text in sorted(pairs, key=lambda pair: pair[0] != "model.family"):
            if key == "model.family" and changed.get("model", {}).get("family", "transformer") != text:
                changed["model"] = {}
            _put(changed, key, _typed(_field(key, changed), key, text))
        if "model" in changed and isinstance(changed["model"], dict):
            changed["model"].setdefault("family", "transformer")
        try:
            return cls.model_validate(changed)
        except ValidationError as error:
            raise ValueError(_explain(error.errors()[0], changed)) from None

    @classmethod
    def read(cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Self:
        """A recipe from a TOML file, changed by overrides.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is no TOML, or not a recipe.
        """
        try:
            tree = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from None
        try:
            cls.make(tree)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls.make(tree, overrides)

    def tree(self) -> dict[str, Any]:
        """All values as dictionaries, for JSON and TOML; what is None is left out."""
        return self.model_dump(exclude_none=True)

    def toml(self) -> str:
        """The recipe as TOML, which ``Recipe.read`` takes back."""
        return tomli_w.dumps(self.tree())

    def changed(self, **sections: Mapping[str, Any]) -> Self:
        """The recipe with some keys of some sections changed: ``recipe.changed(training={"steps": 10})``."""
        tree = self.tree()
        for section, values in sections.items():
            tree[section] = {**tree[section], **values}
        return self.make(tree)

    def differences(self, other: Recipe) -> list[str]:
        """The dotted keys in which two recipes differ."""
        mine, theirs = flat(self.tree()), flat(other.tree())
        return sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))


MODELS: dict[str, type[Section]] = {
    "transformer": TransformerConfig,
    "recurrent": RecurrentConfig,
    "convolutional": ConvolutionalConfig,
    "gpt": GPTConfig,
}

# What a recipe of each task starts from, where that is not the default of the sections.
TASKS: dict[str, dict[str, Any]] = {
    "translation": {},
    "language": {
        "model": {"family": "gpt"},
        "training": {
            "smoothing": 0.0,
            "bleu": False,
            "schedule": "cosine",
            "final_rate": 0.1,
            "beta2": 0.99,
            "weight_decay": 0.1,
            "samples": 1,
        },
        "decoding": {"beam": 1, "max_ratio": 0.0, "max_extra": 200, "length_penalty": 0.0, "sample": True},
    },
}
_ONLY = {  # keys of the data that are for one task
    "translation": ("source", "target", "swap", "held_out", "max_len", "max_ratio"),
    "language": ("split", "end", "held_out_share", "sample", "length"),
}

_SECTIONS = ("data", "tokenizer", "model", "training", "decoding")
RECIPES = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """The names of the recipes that come with weft."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def find_recipe(name: str, overrides: Iterable[str] = (), others: Iterable[str] = ()) -> Recipe:
    """A recipe by its name or its file, changed by overrides; ``others`` could have been said instead.

    Raises:
        ValueError: if there is none of that name, with the nearest; or if it is no recipe.
        OSError: if the file cannot be read.
    """
    path = RECIPES / f"{name}.toml"
    if name in recipe_names():
        return Recipe.read(path, overrides)
    if name.endswith(".toml") or os.sep in name:
        return Recipe.read(name, overrides)
    known = [*others, *recipe_names()]
    hint = nearest(name, known) or f": expected a TOML file or one of {', '.join(known)}"
    raise ValueError(f"unknown recipe {name!r}{hint}")


def nearest(given: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?`` with the nearest of the names, or nothing if none is near."""
    near = get_close_matches(given, list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _usual(usual: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a section starts from; not that of another model family."""
    return usual if given.get("family", usual.get("family")) == usual.get("family") else {}


def _split(override: str) -> tuple[str, str]:
    key, equals, text = override.removeprefix("--").partition("=")
    if not equals or not key:
        raise ValueError(f"an override is key=value, such as training.steps=2000, not {override!r}")
    return key, text


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for name in path:
        tree = tree.setdefault(name, {})
    tree[last] = value


def _field(key: str, tree: Mapping[str, Any]) -> Any:
    """The type of the value that a dotted key names."""
    known = _types(tree)
    if key not in known:
        sections = {name.partition(".")[0] for name in known if "." in name}
        if key in sections:
            raise ValueError(f"{key!r} is a section: expected one of its keys, such as {_first(known, key)!r}")
        bare = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
        hint = f"; did you mean {bare[0]!r}?" if bare else nearest(key, known)
        raise ValueError(f"unknown key {key!r}{hint}")
    return known[key]


def _first(known: Iterable[str], section: str) -> str:
    return next(name for name in known if name.startswith(section + "."))


def _types(tree: Mapping[str, Any]) -> dict[str, Any]:
    """All dotted keys of a recipe with the model family of this tree, and the types of their values."""
    model = tree.get("model", {})
    family = model.get("family", "transformer") if isinstance(model, Mapping) else "transformer"
    sections: dict[str, type[BaseModel]] = {
        "data": DataConfig,
        "tokenizer": TokenizerConfig,
        "model": MODELS.get(family, TransformerConfig) if isinstance(family, str) else TransformerConfig,
        "training": TrainingConfig,
        "decoding": DecodingConfig,
    }
    known = {name: _annotation(info) for name, info in Recipe.model_fields.items() if name not in sections}
    for section, kind in sections.items():
        known |= _keys(section, kind)
    return known | {"model.family": Literal[tuple(MODELS)]}


def _keys(section: str, kind: type[BaseModel]) -> dict[str, Any]:
    """The dotted keys of a section and of the sections inside it, and the types of their values."""
    known: dict[str, Any] = {}
    for name, info in kind.model_fields.items():
        inside = [part for part in get_args(info.annotation) if isinstance(part, type) and issubclass(part, Section)]
        known |= _keys(f"{section}.{name}", inside[0]) if inside else {f"{section}.{name}": _annotation(info)}
    return known


def _annotation(info: Any) -> Any:
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def _typed(kind: Any, key: str, text: str) -> Any:
    """The text of an override as a value of this type."""
    bare = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    choices = get_args(bare) if isinstance(bare, UnionType) or get_origin(bare) is Union else (bare,)
    if list[str] in choices and text.startswith("["):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            raise ValueError(f'{key} must be a list such as ["a.en", "a.de"], not {text!r}') from None
    if str in choices:
        return text
    if type(None) in choices and text in ("", "none"):
        return None
    try:
        return TypeAdapter(kind).validate_strings(text)
    except ValidationError as error:
        raise ValueError(f"{key} {_expected(error.errors()[0])}, not {text!r}") from None


def _explain(error: ErrorDetails, tree: Mapping[str, Any]) -> str:
    path = [str(part) for part in error["loc"] if part not in MODELS or error["loc"].index(part) != 1]
    key = ".".join(path)
    if error["type"] == "extra_forbidden":
        return f"unknown key {key!r}{nearest(key, [*_types(tree), *_SECTIONS])}"
    if error["type"] == "union_tag_invalid":
        given = str(error["input"].get("family"))
        return f"model.family must be one of {', '.join(MODELS)}, not {given!r}{nearest(given, MODELS)}"
    if error["type"] == "value_error":
        return f"{key}: {error['ctx']['error']}".removeprefix(": ")
    if key.endswith((".str", ".list[str]")):
        key = key.rpartition(".")[0]
        return f"{key} must be a text or a list of two, not {error['input']!r}"
    return f"{key} {_expected(error)}, not {error['input']!r}"


def _expected(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Input ")
    if error["type"] == "literal_error":
        return f"must be one of {error['ctx']['expected'].replace(' or ', ', ')}".replace("'", "")
    return message.replace("should be", "must be").split(", unable")[0]


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a tree by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
