"""The sections of a recipe: every key, its type, its default and what it means. This file imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PAD, BOS, EOS, UNK = range(4)  # the first token numbers of weft's own vocabularies: padding, begin, end, unknown


class Specials(NamedTuple):
    """The token numbers that a search must know; a published vocabulary has its own.

    Attributes:
        pad: what rows are filled up with; −1 where no token is for that.
        bos: what a text begins with.
        eos: what it ends with.
        never: what is never chosen as the next token.
        others: tokens besides ``eos`` that end a text too.
    """

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    never: tuple[int, ...] = (PAD, BOS)
    others: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """All tokens that end a text; none if the vocabulary has no such token."""
        return tuple(number for number in (self.eos, *self.others) if number >= 0)


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
        languages: instead of source and target, for one model of many directions: all those between these languages
            for which ``train``, a part of a named set or a path with {source} and {target} in it, has pairs.
        bridge: one of the languages. Two others without pairs of their own get those that both have with it.
        bridged: so great a share of these pairs is trained on.
        variants: so great a share of the pairs is trained on with made-up names, numbers and addresses in it that must
            be copied, or without its capital and last mark; see weft/data/variants.py.
        held_out: without a validation set, so many pairs are taken out of the training set for it.
        max_len: a pair with a side of more tokens is dropped (the end token counts, a mark does not). 0: none is.
        max_ratio: a pair with one side so many times as long as the other is dropped. 0: none is.

    Of a language model, ``train`` and ``validation`` are text files, folders of them (lists, or with commas between),
    or a part of a named set, and these say what is made of them:

        split: a document is a whole "file", what stands between "blank" lines, or a "line".
        end: whether the end token follows each document.
        held_out_share: without a validation set, so much of the text, from its end, is kept for it.
        sample: "stream" draws windows of the whole text; "rounds" reads it once an epoch, from another place on each
            time; "documents" packs documents, which do not see each other.
        length: tokens of a row; 0: as many as the model can take.
    """

    train: Corpus = ""
    validation: Corpus = ""
    source: str = ""
    target: str = ""
    swap: bool = False
    languages: list[str] = []
    bridge: str = ""
    bridged: float = Field(default=1.0, gt=0.0, le=1.0)
    variants: Share = 0.0
    held_out: int = Field(default=1000, ge=0)
    max_len: int = Field(default=128, ge=0)
    max_ratio: float = Field(default=0.0, ge=0.0)
    split: Literal["file", "blank", "line"] = "file"
    end: bool = True
    held_out_share: Share = 0.1
    sample: Literal["stream", "rounds", "documents"] = "stream"
    length: int = Field(default=0, ge=0)

    @property
    def direction(self) -> tuple[str, str]:
        """The language that is read and the one that is said, as far as they are named; of one direction."""
        return (self.target, self.source) if self.swap else (self.source, self.target)

    @model_validator(mode="after")
    def _one_way_or_many(self) -> Self:
        if self.languages and (self.source or self.target or self.swap):
            raise ValueError("languages take the place of source, target and swap: expected one or the other")
        if self.bridge and self.bridge not in self.languages:
            raise ValueError(f"bridge must be one of the languages {self.languages}, not {self.bridge!r}")
        if self.languages and self.train and not self.validation:
            raise ValueError(
                "several languages need a validation set: a sentence that was held out of one direction would be "
                "learned from another"
            )
        return self


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
        dropout: on embeddings and sub-layers; attention_dropout: on attention weights, the same if None; ffn_dropout:
            inside feed-forward layers.
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
    ffn_dropout: Share = 0.0

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
        goal: training stops with the first validation that is as good as this, in what chooses the best step (BLEU of a
            translator, the loss of a language model); 0: it goes on to its last step.
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
    goal: float = Field(default=0.0, ge=0.0)
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
        split: a text of several sentences is translated sentence by sentence, and what is longer than anything that the
            model was trained on is cut.
        recase: text in capitals is translated as if it were in small letters, and put in capitals again.
        carry: a plain name or number stands for addresses and for numbers with marks in them while the text is
            translated, and gives way to them again.
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
    split: bool = False
    recase: bool = False
    carry: bool = False
    exact: bool = False
    sample: bool = False
    temperature: float = Field(default=1.0, gt=0.0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    typical_p: float = Field(default=1.0, gt=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    frequency_penalty: float = 0.0


MODELS: dict[str, type[Section]] = {
    "transformer": TransformerConfig,
    "recurrent": RecurrentConfig,
    "convolutional": ConvolutionalConfig,
    "gpt": GPTConfig,
}
