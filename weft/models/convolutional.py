"""Convolutional translation (Gehring et al. 2017, "Convolutional Sequence to Sequence Learning").

    source ─ embedding + position e ─▶ gated convolutions ─▶ z: keys z, values z + e
    target ─ embedding + position g ─▶ gated convolutions, each followed by attention ─▶ hidden ─▶ logits

Every layer of the decoder looks at the source: its query is its own output and the token it stands on, W h + b + g.
Sums of two are multiplied by √½ and contexts by √m, m the source's length, so that variances stay. The decoder sees
only what is behind it: in training all target positions are computed at once, in a step from each layer's last inputs.

What differs from the paper: no weight normalisation (the starting values, which keep the variances, are the paper's);
all layers are equally wide. As there, the gradient that the encoder gets from attention is divided by its layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weft import observe
from weft.config import ConvolutionalConfig
from weft.kernels.dropout import dropout
from weft.kernels.mask import Mask
from weft.layers.convolution import GatedConvolution
from weft.layers.linear import Linear
from weft.layers.positions import Learned, Positioned, positions
from weft.layers.scores import DotScore, ScoreAttention
from weft.models.encoder_decoder import EncoderDecoder, read_source
from weft.models.state import DecoderState, kept, last_entries, new_caches

_HALF = 0.5**0.5  # times a sum of two keeps the variance
_STD = 0.1  # of embeddings


class DecoderLayer(nn.Module):
    """A causal gated convolution and attention to the source, with a residual around both."""

    def __init__(self, config: ConvolutionalConfig) -> None:
        """Build from sizes."""
        super().__init__()
        self.convolution = GatedConvolution(config.dim, config.kernel_size, causal=True, dropout=config.dropout)
        self.query = Linear(config.dim, config.embed_dim)
        self.attention = ScoreAttention(DotScore())
        self.output = Linear(config.embed_dim, config.dim)

    def forward(
        self, x: Tensor, g: Tensor, z: Tensor, values: Tensor, mask: Mask, before: Tensor | None = None
    ) -> Tensor:
        """The layer's output [B, T, dim].

        Args:
            x: [B, T, dim] the layer's inputs.
            g: [B, T, embed_dim] the embeddings of the tokens at these positions.
            z: [B, M, embed_dim] the keys of the source.
            values: [B, M, embed_dim] its values.
            mask: which of the M are padding.
            before: [B, reach, dim] the layer's inputs before x; zeros if None.
        """
        y, _ = self.convolution(x, state=before)
        context = self.attention((self.query(y) + g) * _HALF, z, values, mask)
        output: Tensor = ((self.output(context) + y) * _HALF + x) * _HALF
        return output


class Convolutional(EncoderDecoder):
    """An encoder and a decoder of gated convolutions.

    Example:
        >>> model = Convolutional(ConvolutionalConfig(), source_vocab=100, target_vocab=80)
        >>> hidden, state = model.step(torch.tensor([[1]]), model.start(torch.tensor([[7, 8, 9, 2]])))
        >>> model.logits(hidden).shape
        torch.Size([1, 1, 80])
    """

    def __init__(self, config: ConvolutionalConfig, source_vocab: int, target_vocab: int) -> None:
        """Make the model of this configuration for vocabularies of these sizes."""
        embed_dim, dim = config.embed_dim, config.dim
        super().__init__(source_vocab, target_vocab, embed_dim, config.tie, std=_STD, bias=True)
        self.dropout = config.dropout
        self.max_len = config.max_len
        self.source_positions = Positioned(Learned(embed_dim, config.max_len))
        self.target_positions = Positioned(Learned(embed_dim, config.max_len))
        self.encoder_input = Linear(embed_dim, dim)
        self.encoder = nn.ModuleList(
            GatedConvolution(dim, config.kernel_size, causal=False, dropout=config.dropout)
            for _ in range(config.encoder_layers)
        )
        self.encoder_output = Linear(dim, embed_dim)
        self.decoder_input = Linear(embed_dim, dim)
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.decoder_output = Linear(dim, embed_dim)
        self.cross_attentions = tuple(f"decoder.{i}.attention" for i in range(config.decoder_layers))
        self._initialise()

    def _initialise(self) -> None:
        dropped = (self.encoder_input, self.decoder_input)  # what they take has been through dropout
        for module in self.modules():
            if isinstance(module, nn.Linear):
                kept = 1.0 - self.dropout if module in dropped else 1.0
                nn.init.normal_(module.weight, std=(kept / module.in_features) ** 0.5)
                nn.init.zeros_(module.bias)
            elif isinstance(module, Learned):
                nn.init.normal_(module.weight, std=_STD)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor, Mask]:
        """The keys and values [B, M, embed_dim] of source tokens [B, N], how many are real [B], and their mask."""
        tokens, places, lengths, mask = read_source(source)
        e = self._place(tokens, places, target=False)
        x = self.encoder_input(e)
        for layer in self.encoder:
            y, _ = layer(x, None if mask.open else lengths)
            x = (y + x) * _HALF
        z: Tensor = self.encoder_output(x)
        if z.requires_grad:
            z.register_hook(lambda gradient: gradient / len(self.decoder))
        observe.see(self.encoder, "hidden", lambda: {"memory": z})
        scale = lengths.to(z.dtype).sqrt()[:, None, None]
        return z, (z + e) * (_HALF * scale), lengths, mask

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """What the output layer takes [B, T, embed_dim] after each token of target [B, T], all positions at once."""
        z, values, _, mask = self.encode(source)
        g = self._place(target, positions(target.shape[1], device=target.device), target=True)
        x = self.decoder_input(g)
        for layer in self.decoder:
            x = layer(x, g, z, values, mask)
        return self._shown(self._drop(self.decoder_output(x)))

    def start(self, inputs: Tensor) -> DecoderState:
        """The state before the first target token, from source tokens [B, N].

        It has the keys and values of the source, and a cache of each layer's inputs.
        """
        z, values, lengths, _ = self.encode(inputs)
        like = z.new_zeros(len(z), len(self.decoder), 0, self.decoder_input.out_features)
        return DecoderState.of((kept(z), kept(values)), lengths, new_caches((like, like[..., :0])))

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Consume tokens [B, T], T ≥ 1: hidden [B, T, embed_dim] and the state after them."""
        (cache,) = state.caches
        g = self._place(tokens, positions(tokens.shape[1], cache.lengths), target=True)
        layers = [layer for layer in self.decoder if isinstance(layer, DecoderLayer)]
        before, _ = last_entries(cache, layers[0].convolution.reach)  # [B, L, reach, dim]
        x = self.decoder_input(g)
        inputs = []
        for i, layer in enumerate(layers):
            inputs.append(x)
            x = layer(x, g, *state.source, state.mask, before[:, i])
        entries = torch.stack(inputs, 1)  # [B, L, T, dim]
        hidden = self._shown(self._drop(self.decoder_output(x)))
        return hidden, state.with_caches([cache.append(entries, entries[..., :0])])

    def _place(self, tokens: Tensor, places: Tensor, target: bool) -> Tensor:
        """The embeddings of tokens that stand at these places."""
        x = (self.target_positions if target else self.source_positions)(self._embed(tokens, target), places)
        return self._drop(self._narrow(x))

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)
