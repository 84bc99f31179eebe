"""A Transformer learns to reverse words, then shows where it looked.

    python examples/reverse.py [--steps 600] [--seed 0] [--save PICTURE.png]

An encoder block reads a word of random letters; a decoder block says it backwards, letter by letter. Nobody
tells it where to look: the map at the end is what it found.
"""

from __future__ import annotations

import argparse
import time
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.data.synthetic import BOS, EOS, FIRST, PAD, Batch, Task
from weft.kernels.mask import Mask
from weft.layers import masks
from weft.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock
from weft.layers.cache import KVCache
from weft.layers.linear import Linear
from weft.layers.positions import Positioned, Sinusoidal, positions
from weft.views.matrix import Matrix, of
from weft.views.terminal import draw

TASK = Task("reverse", num_symbols=26, min_len=3, max_len=12)
WORD = "workmanship"  # is held out: the model never saw it


class Reverser(nn.Module):
    """An encoder-decoder Transformer (Vaswani et al. 2017, pre-norm), as small as the task allows."""

    def __init__(self, vocab_size: int = TASK.vocab_size, config: BlockConfig | None = None) -> None:
        """Make one encoder block and one decoder block."""
        super().__init__()
        config = config or BlockConfig(dim=64, num_heads=2, ffn_dim=256)
        self.embedding = nn.Embedding(vocab_size, config.dim)
        self.positioned = Positioned(Sinusoidal(config.dim))
        self.encoder = EncoderBlock(config)
        self.encoder_norm = config.make_norm()
        self.decoder = DecoderBlock(config)
        self.decoder_norm = config.make_norm()
        self.output = Linear(config.dim, vocab_size)

    def encode(self, source: Tensor) -> tuple[Tensor, Mask]:
        """The memory [B, M, D] of source [B, M], and which of it is padding."""
        mask = masks.padding_from_tokens(source, PAD)
        x = self.positioned(self.embedding(source))
        return self.encoder_norm(self.encoder(x, mask)), mask

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B, N, V] for the token after each of target [B, N], all positions at once."""
        memory, mask = self.encode(source)
        x = self.decoder(self.positioned(self.embedding(target)), memory, memory_mask=mask)
        logits: Tensor = self.output(self.decoder_norm(x))
        return logits

    @torch.no_grad()
    def reverse(self, source: Tensor) -> Tensor:
        """What the model says to source [B, M], one token at a time, to EOS: [B, ≤ M]."""
        memory, mask = self.encode(source)
        keys_values = self.decoder.cross_attention.keys_values(memory)  # made once, looked at in every step
        cache = KVCache.empty(len(source))
        said = [torch.full((len(source), 1), BOS)]
        ended = torch.zeros(len(source), 1, dtype=torch.bool)
        while len(said) <= source.shape[1] and not bool(ended.all()):
            x = self.positioned(self.embedding(said[-1]), positions(1, cache.lengths))
            x, cache = self.decoder.step(x, keys_values, cache, mask)
            token = self.output(self.decoder_norm(x)).argmax(-1).masked_fill(ended, PAD)  # [B, 1]
            said.append(token)
            ended = ended | (token == EOS)
        return torch.cat(said[1:], 1)


def train(model: Reverser, steps: int, seed: int) -> None:
    """Teach the model with AdamW; the learning rate rises, then falls to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=max(steps, 10), pct_start=0.2)
    begin = time.perf_counter()
    for step, (source, target) in enumerate(islice(TASK.batches(64, seed), steps), start=1):
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step:4d}  loss {loss.item():.4f}  {time.perf_counter() - begin:5.1f} s", flush=True)


def accuracy(model: Reverser, batch: Batch) -> float:
    """The share of pairs whose answer is right from the first letter to EOS."""
    said = model.reverse(batch.source)
    right = batch.target[:, 1:]
    said = F.pad(said, (0, right.shape[1] - said.shape[1]), value=PAD)
    return (said == right).all(1).float().mean().item()


def look(model: Reverser, word: str) -> tuple[str, Matrix]:
    """The word as the model reverses it, and where it looked for each letter."""
    source = torch.tensor([[FIRST + ord(letter) - ord("a") for letter in word] + [EOS]])
    with weft.record(model, names="decoder.cross_attention") as seen:
        said = [spell(token) for token in model.reverse(source)[0].tolist()]
    matrix = of(seen.calls("decoder.cross_attention"), caption=f"Reversing “{word}”")
    matrix = Matrix(matrix.weights, said, [*word, "end"], caption=matrix.caption, sides=("said", "read"))
    return "".join(letter for letter in said if letter != "end"), matrix


def spell(token: int) -> str:
    """A token as a letter."""
    return chr(token - FIRST + ord("a")) if token >= FIRST else "end" if token == EOS else "?"


def main() -> None:
    """Train, test, look."""
    parser = argparse.ArgumentParser(description="A Transformer learns to reverse words, then shows where it looked.")
    parser.add_argument("--steps", type=int, default=600, help="of training, 64 words each (default: 600)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and words (default: 0)")
    parser.add_argument("--save", metavar="PNG", help="also write the map as a picture")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, not {arguments.steps}")

    torch.manual_seed(arguments.seed)
    model = Reverser()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, words of 3 to {TASK.max_len} letters")
    train(model, arguments.steps, arguments.seed)
    held_out = next(TASK.batches(1000, arguments.seed, held_out=True))
    print(f"right on {accuracy(model, held_out):.1%} of 1,000 held-out words\n")
    said, matrix = look(model, WORD)
    print(f"{WORD} -> {said}\n\n{draw(matrix)}")
    if arguments.save:
        from weft.views import figures

        figures.save(figures.heat_map(matrix), arguments.save)
        print(f"\nwritten: {arguments.save}")


if __name__ == "__main__":
    main()
