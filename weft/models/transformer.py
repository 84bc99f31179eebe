"""The Transformer (Vaswani et al. 2017, "Attention Is All You Need"): attention where recurrence was.

    source ─ embedding · √dim + position ─▶ encoder blocks ─▶ memory
    target ─ embedding · √dim + position ─▶ decoder blocks, each looking at the memory ─▶ hidden ─▶ logits

What differs from the paper is for the configuration to say. With norm_first = False, norm = "layer", activation =
"relu", positions = "sinusoidal" and tie = "all" it is the model of 2017; else:

- norm_first: the norm stands before each sub-layer and once more at the end of each stack (Wang et al. 2019).
- positions: sinusoidal, learned (Gehring et al. 2017); shaw (Shaw et al. 2018, distances up to 16, in each
  self-attention), t5 (Raffel et al. 2020, one table for all layers of a stack), rotary (Su et al. 2021), none.
  Attention from target to source has no relative positions.
- alibi (Press et al. 2022, who have no encoder): in the encoder a key behind the query counts as half as far as one
  before it. If both sides counted alike, a source and its reverse would be the same to the model.
- order and fraction, to see why not: the number times a learned vector is added, since a LayerNorm does not see what
  is added to every entry alike. The fraction of a target is of its source's length: its own is not known yet.
- ties, RMSNorm, SwiGLU, grouped key heads, normalised queries and keys: as the layers say.

Linear layers start Glorot-uniform with biases of 0, embeddings normal with variance 1 / dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft import observe
from weft.config import TransformerConfig
from weft.kernels.dropout import dropout
from weft.kernels.mask import Mask
from weft.layers.attention import Rotation
from weft.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock, through
from weft.layers.positions import ABSOLUTE, Absolute, Learned, Sinusoidal, positions
from weft.layers.relative import ALiBi, Rotary, T5Bias, distances
from weft.models.encoder_decoder import EncoderDecoder, read_source
from weft.models.state import DecoderState, kept, new_caches

SHAW_DISTANCE = 16  # as in Shaw et al.


class Positions(nn.Module):
    """How one side of the model knows where its tokens stand: a vector added, a bias on the scores, or a rotation."""

    def __init__(self, config: TransformerConfig, bidirectional: bool) -> None:
        """Make what ``config.positions`` names; Shaw's vectors are in the attentions, "none" has nothing."""
        super().__init__()
        dim, heads = config.dim, config.num_heads
        self.name, self.bidirectional = config.positions, bidirectional
        self.scheme: Absolute | None = None
        self.direction: nn.Parameter | None = None
        self.bias: ALiBi | T5Bias | None = None
        self.rotary: Rotary | None = None
        match config.positions:
            case "order" | "fraction" as name:
                self.scheme = ABSOLUTE[name]()
                self.direction = nn.Parameter(torch.randn(dim))
            case "sinusoidal":
                self.scheme = Sinusoidal(dim)
            case "learned":
                self.scheme = table = Learned(dim, config.max_len)
                nn.init.normal_(table.weight, std=dim**-0.5)
            case "t5":
                self.bias = T5Bias(heads, bidirectional=bidirectional)
            case "alibi":
                self.bias = ALiBi(heads)
            case "rotary":
                self.rotary = Rotary(dim // heads)

    def forward(self, x: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        """The embeddings x [B, N, D] of tokens that stand at places [N] or [B, N], of rows of these lengths [B]."""
        if self.scheme is None:
            return x
        return x + self._encoding(self.scheme, places, lengths, x.dtype)

    def between(self, places: Tensor, num_keys: int, dtype: torch.dtype) -> tuple[Tensor | None, Rotation | None]:
        """The bias [B or 1, H, N, num_keys] of queries that stand at places, and the rotation of queries and keys."""
        bias: Tensor | None = None
        if self.bias is not None:
            keys = torch.arange(num_keys, device=places.device)
            bias = self.bias(places, keys)
            if self.bidirectional and isinstance(self.bias, ALiBi):
                bias = torch.where(distances(places, keys)[:, None] > 0, bias / 2, bias)
        return bias, None if self.rotary is None else self.rotary.turning(places, dtype)

    def table(self, count: int) -> Tensor:
        """What is added to the embeddings at each of the first ``count`` places [N, D], in fp32.

        Raises:
            ValueError: if nothing is added, or it depends on more than the place.
        """
        if self.scheme is None or self.name == "fraction":
            raise ValueError(f"positions {self.name!r} are no table")
        return self._encoding(self.scheme, positions(count), torch.tensor([count]), torch.float32).contiguous()

    def turns(self, count: int) -> Tensor:
        """The cos and sin [N, head_dim] by which queries and keys at the first ``count`` places are turned, in fp32.

        Raises:
            ValueError: if nothing is turned.
        """
        if self.rotary is None:
            raise ValueError(f"positions {self.name!r} turn nothing")
        return torch.cat(self.rotary.angles(positions(count), torch.float32), -1)[0, 0].contiguous()

    def picture(self, count: int) -> dict[str, Tensor]:
        """What the first ``count`` places of a text have, to be drawn; nothing of Shaw's vectors, nor of "none".

        "table" [N, D] is added to the embeddings, "bias" [H, N, N] to the scores, and by "angles" [N, head_dim/2]
        queries and keys are turned.
        """
        places = positions(count)
        if self.scheme is not None:
            return {"table": self._encoding(self.scheme, places, torch.tensor([count]), torch.float32)}
        if self.rotary is not None:
            return {"angles": self.rotary.table(places)}
        bias, _ = self.between(places, count, torch.float32)
        return {} if bias is None else {"bias": bias[0]}

    def _encoding(self, scheme: Absolute, places: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        encoding: Tensor = scheme(places, lengths, dtype)  # [N, D or 1] or [B, N, D or 1]
        return encoding if self.direction is None else encoding * self.direction


class Transformer(EncoderDecoder):
    """The encoder-decoder Transformer.

    Example:
        >>> model = Transformer(TransformerConfig(dim=64), source_vocab=100, target_vocab=100)
        >>> hidden, state = model.step(torch.tensor([[1]]), model.start(torch.tensor([[7, 8, 9, 2]])))
        >>> model.logits(hidden).shape
        torch.Size([1, 1, 100])
    """

    def __init__(self, config: TransformerConfig, source_vocab: int, target_vocab: int) -> None:
        """Make the model of this configuration for vocabularies of these sizes."""
        dim = config.dim
        super().__init__(source_vocab, target_vocab, dim, config.tie, std=dim**-0.5, bias=False)
        self.config = config
        self.scale = dim**0.5
        self.dropout = config.dropout
        block = BlockConfig(
            dim=dim,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            ffn_dim=config.ffn_dim,
            norm=config.norm,
            norm_first=config.norm_first,
            activation=config.activation,
            bias=config.bias,
            qk_norm=config.qk_norm,
            max_distance=SHAW_DISTANCE if config.positions == "shaw" else None,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            ffn_dropout=config.ffn_dropout,
        )
        self.source_positions = Positions(config, bidirectional=True)
        self.target_positions = Positions(config, bidirectional=False)
        self.encoder = nn.ModuleList(EncoderBlock(block) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderBlock(block) for _ in range(config.decoder_layers))
        self.encoder_norm = block.make_norm() if config.norm_first else nn.Identity()
        self.decoder_norm = block.make_norm() if config.norm_first else nn.Identity()
        self.cross_attentions = tuple(f"decoder.{i}.cross_attention" for i in range(config.decoder_layers))
        self.max_len = config.max_len if config.positions == "learned" else None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, Mask]:
        """The memory [B, M, D] of source tokens [B, N], how many of each row are real [B], and the mask of these."""
        tokens, places, lengths, mask = read_source(source)
        x = self._place(tokens, places, lengths, target=False)
        bias, rotary = self.source_positions.between(places, tokens.shape[1], x.dtype)
        x = through(self.encoder, x, mask, bias, rotary)
        memory: Tensor = self.encoder_norm(x)
        observe.see(self.encoder, "hidden", lambda: {"memory": memory})
        return memory, lengths, mask

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """What the output layer takes [B, T, D] after each token of target [B, T], all positions at once."""
        memory, lengths, mask = self.encode(source)
        places = positions(target.shape[1], device=target.device)
        x = self._place(target, places, lengths, target=True)
        bias, rotary = self.target_positions.between(places, target.shape[1], x.dtype)
        for block in self.decoder:
            x = block(x, memory, memory_mask=mask, bias=bias, rotary=rotary)
        return self._shown(self.decoder_norm(x))

    def start(self, inputs: Tensor) -> DecoderState:
        """The state before the first target token, from source tokens [B, N].

        It has each layer's keys and values of the source, and a cache of those of the target.
        """
        memory, lengths, _ = self.encode(inputs)
        pairs = [block.cross_attention.keys_values(memory) for block in self._decoder_blocks]
        source = tuple(kept(part) for pair in pairs for part in pair)
        return DecoderState.of(source, lengths, new_caches(*pairs))

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Consume tokens [B, T], T ≥ 1: hidden [B, T, D] and the state after them."""
        size = state.size  # where all rows are alike, positions are made once and not for every row
        places = positions(tokens.shape[1], size.longest if size.alike else size.tensor, tokens.device)
        x = self._place(tokens, places, state.source_lengths, target=True)
        num_keys = size.longest + tokens.shape[1]
        bias, rotary = self.target_positions.between(places, num_keys, x.dtype)
        caches = []
        pairs = zip(state.source[::2], state.source[1::2], strict=True)
        for block, pair, cache in zip(self._decoder_blocks, pairs, state.caches, strict=True):
            x, cache = block.step(x, pair, cache, state.mask, bias=bias, rotary=rotary)
            caches.append(cache)
        return self._shown(self.decoder_norm(x)), state.with_caches(caches)

    def _place(self, tokens: Tensor, places: Tensor, lengths: Tensor, target: bool) -> Tensor:
        """The embeddings of tokens that stand at these places, ready for the first block."""
        x = self._embed(tokens, target) * self.scale
        x = (self.target_positions if target else self.source_positions)(x, places, lengths)
        return dropout(self._narrow(x), self.dropout, self.training)

    @property
    def _decoder_blocks(self) -> list[DecoderBlock]:
        return [block for block in self.decoder if isinstance(block, DecoderBlock)]
