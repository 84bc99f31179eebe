"""What size of model suits how much data: the one table from which ``weft train translation`` chooses.

A row serves corpora of at least so many pairs. docs/results.md says which rows were chosen on a validation set and
which are first guesses from the literature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """A row of the table: from ``pairs`` pairs on, these settings."""

    pairs: int
    vocab_size: int
    dim: int
    layers: int
    dropout: float
    epochs: int
    learning_rate: float
    batch_tokens: int

    def tree(self, per_epoch: int) -> dict[str, Any]:
        """The recipe's values, where an epoch has ``per_epoch`` batches."""
        steps = max(200, self.epochs * per_epoch)
        every = max(50, steps // 20)
        return {
            "tokenizer": {"kind": "bpe", "vocab_size": self.vocab_size},
            "model": {
                "family": "transformer",
                "dim": self.dim,
                "num_heads": max(2, self.dim // 64),
                "ffn_dim": 4 * self.dim if self.dim >= 256 else 2 * self.dim,
                "encoder_layers": self.layers,
                "decoder_layers": self.layers,
                "dropout": self.dropout,
            },
            "training": {
                "steps": steps,
                "batch_tokens": self.batch_tokens,
                "learning_rate": self.learning_rate,
                "warmup": min(2000, steps // 5),
                "validate_every": every,
                "save_every": every,
                "average": 5,
                "keep": 5,
                "patience": 5,
            },
        }


# pairs from, words, dim, layers, dropout, epochs, learning rate, tokens of a batch
SIZES = (
    Size(0, 2_000, 128, 2, 0.3, 60, 3e-3, 1024),
    Size(10_000, 4_000, 128, 3, 0.3, 40, 3e-3, 2048),
    Size(50_000, 8_000, 256, 3, 0.2, 20, 1.5e-3, 4096),
    Size(500_000, 16_000, 512, 6, 0.1, 10, 7e-4, 8192),
    Size(5_000_000, 32_000, 512, 6, 0.1, 4, 7e-4, 16384),
)


def size_for(pairs: int) -> Size:
    """The row of the table for a corpus of so many pairs."""
    return max((size for size in SIZES if size.pairs <= pairs), key=lambda size: size.pairs)
