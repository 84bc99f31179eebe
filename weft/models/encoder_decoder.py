"""What every encoder-decoder shares: embeddings, tied or not, the output layer over them, and the loss.

A family says in ``forward`` what stands between the tokens and the output layer; in ``start`` and ``step`` the same by
portions (see contract.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import observe
from weft.config import PAD, Specials, Tie
from weft.kernels.cross_entropy import linear_cross_entropy, linear_rdrop
from weft.kernels.linear import linear, widened
from weft.kernels.mask import Mask
from weft.layers import masks
from weft.models.contract import Loss, Pairs
from weft.models.state import DecoderState


class EncoderDecoder(nn.Module):
    """Source tokens to target tokens, as weft.models.contract.Seq2Seq says.

    A table that is tied is one parameter with one name: what is called ``target_embedding`` serves the output too
    (tie "output") and the source (tie "all"; Press and Wolf 2017).
    """

    cross_attentions: tuple[str, ...] = ()
    max_len: int | None = None
    specials = Specials()

    def __init__(self, source_vocab: int, target_vocab: int, dim: int, tie: Tie, std: float, bias: bool) -> None:
        """Make the tables.

        Args:
            source_vocab: how many source words there are.
            target_vocab: how many target words.
            dim: width of the embeddings and of what the output layer takes.
            tie: which tables are one: "all", "output" (target and output) or "none".
            std: of the normal distribution that they start from.
            bias: whether the output layer has one.

        Raises:
            ValueError: if source and target are tied and differ in size, or a vocabulary has no words.
        """
        super().__init__()
        if min(source_vocab, target_vocab) < 1:
            raise ValueError(
                f"a vocabulary needs words, not {source_vocab} for the source, {target_vocab} for the target"
            )
        if tie == "all" and source_vocab != target_vocab:
            raise ValueError(
                f"tie 'all' needs one vocabulary for both sides, but the source has {source_vocab} words and the "
                f"target {target_vocab}: expected a joint tokenizer, or tie 'output' or 'none'"
            )
        self.precision = torch.float32

        def table(rows: int, wanted: bool = True) -> nn.Parameter | None:
            return nn.Parameter(nn.init.normal_(torch.empty(rows, dim), std=std)) if wanted else None

        self.source_embedding = table(source_vocab, tie != "all")
        self.target_embedding = table(target_vocab)
        self.output_weight = table(target_vocab, tie == "none")
        for name in ("source_embedding", "target_embedding", "output_weight"):
            self.register_buffer(f"{name}_scale", None)  # of a table that was loaded in int8, for each of its rows
        self.output_bias = nn.Parameter(torch.zeros(target_vocab)) if bias else None

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """What the output layer takes [B, T, D] after each token of target [B, T], all positions at once."""
        raise NotImplementedError

    def start(self, inputs: Tensor) -> DecoderState:
        """The state before the first target token, from source tokens [B, N]."""
        raise NotImplementedError

    def first(self, inputs: Tensor) -> Tensor:
        """[B] BOS, which every target begins with."""
        return inputs.new_full((len(inputs),), self.specials.bos)

    def room(self, inputs: Tensor) -> Tensor | None:
        """[B] how many tokens there is room for behind BOS; None for any number."""
        return None if self.max_len is None else inputs.new_full((len(inputs),), self.max_len - 1)

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Consume tokens [B, T], T ≥ 1: hidden [B, T, D] and the state after them."""
        raise NotImplementedError

    def loss(self, batch: Pairs, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        """The cross entropy of the targets given the sources, summed over target tokens.

        With rdrop > 0 every pair runs twice, under two drops, in one batch (R-Drop, Wu et al. 2021): the mean of the
        two cross entropies, plus rdrop times how far the two predictions are apart. (The paper adds the two: its α
        is twice this rdrop.)

        Raises:
            ValueError: if rdrop is negative, or tokens do not fit.
        """
        if rdrop < 0.0:
            raise ValueError(f"rdrop must be at least 0, not {rdrop}")
        source, target = batch.source, batch.target
        if rdrop:
            source, target = source.repeat(2, 1), target.repeat(2, 1)
        hidden = self(source, target[:, :-1])
        wanted, weight = target[:, 1:], self._output
        if not rdrop:
            entropy = linear_cross_entropy(hidden, weight, wanted, self.output_bias, smoothing, PAD)
            return Loss(entropy.total, entropy.count, {"nll": entropy.nll})
        first, second = hidden.chunk(2)
        both = linear_rdrop(first, second, weight, wanted.chunk(2)[0], self.output_bias, smoothing, PAD, rdrop)
        return Loss(both.total, both.count, {"nll": both.nll, "rdrop": both.divergence})

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token [..., V] of hidden [..., D].

        In the parameters' precision, fp32: rounded to bf16, most of the best candidates would be equal.
        """
        weight, scale = self._output, self._scale("target_embedding" if self.output_weight is None else "output_weight")
        wide = torch.promote_types(weight.dtype, torch.float32)  # fp64 after .double()
        return linear(hidden.to(wide), weight, self.output_bias, scale)

    def _shown(self, hidden: Tensor) -> Tensor:
        """What the output layer takes [B, T, D], shown to observers."""
        observe.see(self, "hidden", lambda: {"hidden": hidden})
        return hidden

    @property
    def _output(self) -> Tensor:
        """The output layer's weight [V, D]."""
        found = self.target_embedding if self.output_weight is None else self.output_weight
        assert found is not None
        return found

    def _embed(self, tokens: Tensor, target: bool) -> Tensor:
        """The embeddings [B, N, D] of source or target tokens [B, N], in the parameters' dtype."""
        name = "target_embedding" if target or self.source_embedding is None else "source_embedding"
        table, scale = getattr(self, name), self._scale(name)
        found = F.embedding(tokens, table)
        if table.dtype in (torch.bfloat16, torch.int8):
            return widened(found, None if scale is None else scale[tokens])
        return found

    def _scale(self, table: str) -> Tensor | None:
        """Of each row of a table that was loaded in int8."""
        scale: Tensor | None = getattr(self, f"{table}_scale")
        return scale

    def _narrow(self, x: Tensor) -> Tensor:
        """Activations in this model's precision; fp32 leaves them in the parameters' dtype (fp64 after .double())."""
        return x if self.precision == torch.float32 else x.to(self.precision)


class Source(NamedTuple):
    """Source tokens and what is padding."""

    tokens: Tensor  # [B, N]
    places: Tensor  # [N] where they stand; padding stands where the longest row ends, so no table is too short for it
    lengths: Tensor  # [B] how many are real
    mask: Mask  # these alone may be attended to


def read_source(tokens: Tensor) -> Source:
    """Look at source tokens [B, N].

    Raises:
        ValueError: if a padding token stands before a real one.
    """
    lengths = masks.padding_from_tokens(tokens, PAD).lengths
    assert lengths is not None
    shortest, longest = (int(end) for end in lengths.aminmax())
    places = torch.arange(tokens.shape[1], device=tokens.device).clamp(max=max(longest - 1, 0))
    return Source(tokens, places, lengths, Mask() if shortest == tokens.shape[1] else Mask(lengths=lengths))
