"""What size of model suits how much data: the tables from which ``weft train translation`` and ``… language`` choose.

A row serves corpora of at least so many pairs, or texts of at least so many characters. docs/results.md says which rows
were chosen on a validation set and which are first guesses from the literature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config import Recipe


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

    def tree(self, per_epoch: int, steps: int | None = None) -> dict[str, Any]:
        """The recipe's values, where an epoch has ``per_epoch`` updates, or for so many steps."""
        steps = steps or max(200, self.epochs * per_epoch)
        every = max(min(50, steps), steps // 20)
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
                "schedule": "cosine",
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
    Size(0, 4_000, 256, 2, 0.3, 32, 1.5e-3, 1024),
    Size(10_000, 8_000, 256, 3, 0.3, 22, 1.5e-3, 2048),
    Size(50_000, 8_000, 128, 4, 0.2, 11, 3e-3, 4096),
    Size(500_000, 16_000, 512, 6, 0.1, 10, 7e-4, 8192),
    Size(5_000_000, 32_000, 512, 6, 0.1, 4, 7e-4, 16384),
)


def fitted(size: Size | TextSize, overrides: Sequence[str], per_epoch: Callable[[Recipe], int]) -> Recipe:
    """The recipe of a row, changed by overrides; the schedule follows the steps that these leave or ask for.

    Args:
        size: the row.
        overrides: as the shell gives them.
        per_epoch: how many batches an epoch has, given a draft of the recipe that has all but the steps right.
    """
    draft = Recipe.make(size.tree(1), overrides)
    asked = any(word.removeprefix("--").startswith("training.steps=") for word in overrides)
    updates = -(-per_epoch(draft) // draft.training.accumulate)
    return Recipe.make(size.tree(updates, draft.training.steps if asked else None), overrides)


def size_for(pairs: int) -> Size:
    """The row of the table for a corpus of so many pairs."""
    return max((size for size in SIZES if size.pairs <= pairs), key=lambda size: size.pairs)


@dataclass(frozen=True)
class TextSize:
    """A row of the table for language models: from ``characters`` characters on, these settings."""

    characters: int
    kind: str
    vocab_size: int
    dim: int
    layers: int
    length: int
    dropout: float
    epochs: int
    learning_rate: float
    batch_tokens: int

    def tree(self, per_epoch: int, steps: int | None = None) -> dict[str, Any]:
        """The recipe's values, where an epoch has ``per_epoch`` updates, or for so many steps."""
        steps = steps or max(500, self.epochs * per_epoch)
        every = max(min(50, steps), steps // 20)
        return {
            "task": "language",
            "tokenizer": {"kind": self.kind, "vocab_size": self.vocab_size},
            "model": {
                "family": "gpt",
                "dim": self.dim,
                "num_heads": max(4, self.dim // 64),
                "num_layers": self.layers,
                "ffn_dim": 4 * self.dim,
                "max_len": self.length,
                "bias": False,
                "dropout": self.dropout,
            },
            "training": {
                "steps": steps,
                "batch_tokens": self.batch_tokens,
                "learning_rate": self.learning_rate,
                "warmup": min(1000, steps // 20),
                "validate_every": every,
                "save_every": every,
                "patience": 5,
            },
        }


# characters from, kind of tokens, how many, dim, layers, context, dropout, epochs, learning rate, tokens of a batch.
# The first row is near nanoGPT's recipe for a million characters on a CPU, the last is of GPT-2 small's size.
TEXT_SIZES = (
    TextSize(0, "char", 1_000, 128, 4, 128, 0.1, 5, 1e-3, 2048),
    TextSize(3_000_000, "bpe", 4_000, 256, 4, 256, 0.2, 10, 1e-3, 4096),
    TextSize(30_000_000, "bpe", 8_000, 384, 6, 256, 0.1, 4, 1e-3, 8192),
    TextSize(300_000_000, "bpe", 16_000, 512, 8, 512, 0.0, 2, 6e-4, 16384),
    TextSize(3_000_000_000, "bpe", 32_000, 768, 12, 1024, 0.0, 1, 6e-4, 32768),
)


def text_size_for(characters: int) -> TextSize:
    """The row of the table for a text of so many characters."""
    return max((size for size in TEXT_SIZES if size.characters <= characters), key=lambda size: size.characters)
