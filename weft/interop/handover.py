"""What every way out for a Transformer shares: what a format cannot hold, and the proof before a folder counts.

A folder is written aside, loaded by the program that is to run it, and takes its place once that program says to sample
sentences, greedily, what weft would say. So whoever finds a folder can rely on it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from weft.config import BOS, EOS, TransformerConfig
from weft.data.tokenizers import Tokenizer, TokenizerPair
from weft.interop.huggingface import check_tensors
from weft.models import narrow, outline
from weft.models.transformer import Transformer

POSITIONS = 1024  # how many a table has that could have any number
CLOSE = 1e-4  # by so much two programs may differ in the log-probability of a token; fp32 rounds it by some 1e-6


class Said(NamedTuple):
    """What another program says to a source: tokens without BOS and EOS, log p, and whether EOS came."""

    tokens: Sequence[int]
    log_prob: float
    finished: bool


def require(config: TransformerConfig, what: str, possible: Mapping[str, Sequence[object]]) -> None:
    """Raise ValueError, naming the key, unless each key has a value that a format can hold."""
    given = {**config.model_dump(), "num_kv_heads": config.num_kv_heads or config.num_heads}
    for key, values in possible.items():
        if given[key] not in values:
            known = " or ".join(map(str, values))
            raise ValueError(f"{what} has {key} = {known}, but the model has {given[key]}")


def whole(model: Transformer, config: TransformerConfig, tokenizers: TokenizerPair) -> Transformer:
    """The same model in fp32, on the CPU and ready to run, without a copy where it is so already.

    Raises:
        ValueError: if its parameters are not those of the configuration and the vocabularies.
    """
    made = outline(config, tokenizers.source.vocab_size, tokenizers.target.vocab_size)
    assert isinstance(made, Transformer)
    tensors = narrow.state(model)
    check_tensors(tensors, {name: tuple(tensor.shape) for name, tensor in made.state_dict().items()})
    made.load_state_dict({name: tensor.to("cpu", torch.float32) for name, tensor in tensors.items()}, assign=True)
    return made.eval().requires_grad_(False)


@contextmanager
def aside(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A new folder to write into, which becomes ``path`` at the end; after an error nothing is left of it.

    Raises:
        OSError: if there is something at the path already.
    """
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already: choose another folder")
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            made = Path(folder, path.name)  # unlike the folder around it, others may read it
            made.mkdir()
            yield made
            made.rename(path)
    except BaseException:
        with suppress(OSError):  # somebody else may have found them useful
            for parent in missing:
                parent.rmdir()
        raise


def sample_texts(tokenizer: Tokenizer, count: int = 16) -> list[str]:
    """Texts of 3 to 20 tokens drawn from a vocabulary, always the same ones."""
    draw = random.Random(0)
    words = range(EOS + 1, tokenizer.vocab_size)
    return [tokenizer.decode([draw.choice(words) for _ in range(draw.randint(3, 20))]) for _ in range(count)]


class Trial:
    """Sentences on which another program is compared with weft.

    Attributes:
        texts: the sentences.
        sources: the tokens of each, without EOS.
        limit: how many tokens the other program may say.
    """

    def __init__(
        self, model: Transformer, tokenizers: TokenizerPair, samples: Sequence[str], longest: int = POSITIONS
    ) -> None:
        """Take note of what is to be said.

        Args:
            model: as ``whole`` gives it.
            tokenizers: of both sides.
            samples: sentences; ``sample_texts`` if there are none.
            longest: how many tokens a side may have, EOS counted; longer samples are cut.

        Raises:
            ValueError: if no sample has a token.
        """
        texts = list(samples) or sample_texts(tokenizers.source)
        encoded = zip(texts, tokenizers.source.encode_batch(texts), strict=True)
        pairs = [(text, ids[: longest - 1]) for text, ids in encoded if ids]
        if not pairs:
            raise ValueError("the samples hold no text to compare translations of")
        self.texts, self.sources = [text for text, _ in pairs], [ids for _, ids in pairs]
        self.limit = min(2 * max(map(len, self.sources)) + 20, longest - 1)
        self._model, self._target = model, tokenizers.target

    def proof(self, said: Sequence[Said], by: str) -> str:
        """That all of it is what weft says, for people.

        Args:
            said: to each source.
            by: the other program's name.

        Raises:
            ValueError: naming the first sample in which it is not.
        """
        for number, (source, answer) in enumerate(zip(self.sources, said, strict=True), 1):
            fault, log_prob = self._compared(source, answer)
            allowed = CLOSE * (len(answer.tokens) + answer.finished)
            if not fault and not abs(log_prob - answer.log_prob) <= allowed:  # so a NaN is not close
                fault = f"log p is {answer.log_prob:.5f}, and weft's {log_prob:.5f}"
            if fault:
                sample = f"sample {number} of {len(said)}"
                raise ValueError(
                    f"not written: run by {by}, the model does not say what weft says to {sample}: {fault}"
                )
        return f"checked with {by}: the same greedy translations of {len(said)} sentences"

    def difference(self, said: Sequence[Said], by: str) -> str:
        """How much of it is what weft says, for people; where parameters were rounded."""
        found = [self._compared(source, answer) for source, answer in zip(self.sources, said, strict=True)]
        same = sum(not fault for fault, _ in found)
        apart = max(abs(log_prob - answer.log_prob) for (_, log_prob), answer in zip(found, said, strict=True))
        what = f"{same} of {len(said)} greedy translations are the same, log p differs by at most {apart:.2g}"
        return f"checked with {by}: {what}"

    @torch.no_grad()
    def _compared(self, source: Sequence[int], answer: Said) -> tuple[str, float]:
        """Where a token is not the most probable after those before it, if anywhere; and weft's log p of all.

        That is what a greedy search of weft's own would tell, but for two tokens within ``CLOSE``: either may be first.
        """
        wanted = torch.tensor([*answer.tokens, *([EOS] if answer.finished else [])])
        if not answer.finished and len(wanted) < self.limit:
            return f"it ends after {len(wanted)} tokens without EOS", float("nan")
        read = torch.cat([torch.tensor([BOS]), wanted[:-1]])
        hidden = self._model(torch.tensor([[*source, EOS]]), read[None])
        log_probs = self._model.logits(hidden)[0].log_softmax(-1)  # [T, V]
        log_probs[:, self._model.specials.never] = float("-inf")
        best, tokens = log_probs.max(-1)
        gained = log_probs.gather(1, wanted[:, None])[:, 0]
        fault = ""
        for place in (~(best - gained <= CLOSE)).nonzero()[:, 0].tolist()[:1]:
            theirs, ours = self._target.tokens([int(wanted[place]), int(tokens[place])])
            fault = f"token {place + 1} is {theirs!r}, and weft's {ours!r}"
        return fault, float(gained.double().sum())
