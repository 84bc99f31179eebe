"""How well attention aligns words, where the right answer is known without a person: strings that stand on both sides.

A number, a name or a comma that is once in the source and once in its translation almost always translates itself. So
for each such target word there is one source word that the attention should look at most. Beside it: what IBM's first
model makes of the training text (Brown et al. 1993), which has no other purpose than to align, and chance.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import cast

import torch
from torch import Tensor

from weft.api import Precision, Translator, load_translator
from weft.config import EOS
from weft.data.corpora import open_pairs
from weft.data.tokenizers import Tokenizer
from weft.decoding.score import teacher_inputs
from weft.decoding.steps import begin, padded, searching
from weft.models.contract import Seq2Seq
from weft.observe import record
from weft.views.summaries import by_words, word_numbers

Pair = tuple[Sequence[str], Sequence[str]]  # the words of a source and of its translation
_BATCH = 64
MEAN = "attention, mean of all layers"


@dataclass(frozen=True)
class Hits:
    """How often the right source word was found.

    Attributes:
        shares: for each way of aligning, the share of the links that it found.
        links: how many there were.
        sentences: in how many sentences.
        skipped: sentences whose words the tokenizer does not keep apart.
    """

    shares: dict[str, float]
    links: int
    sentences: int
    skipped: int

    def text(self) -> str:
        """For people."""
        lines = [f"{100 * share:5.1f}%  {name}" for name, share in self.shares.items()]
        told = f"{self.links:,} strings that are once in a source and once in its translation, in {self.sentences:,}"
        return "\n".join([f"{told} sentences ({self.skipped:,} skipped)", *lines])


@dataclass(frozen=True)
class Report:
    """How often an aligner finds the right word: of all strings, and of those with a letter or a digit."""

    everything: Hits
    words: Hits

    def text(self) -> str:
        """For people."""
        return f"{self.everything.text()}\n\nwithout punctuation: {self.words.text()}"

    def json(self) -> str:
        """For machines."""
        return json.dumps(asdict(self))


def evaluate_folder(path: str | os.PathLike[str], data: str | Sequence[str], precision: Precision = "auto") -> Report:
    """``hits`` of a model folder on pairs, beside IBM model 1 trained on what the model was trained on.

    Raises:
        OSError: if there is no such model or data.
        ValueError: as ``hits``.
    """
    translator = load_translator(path, precision)
    of = translator.recipe.data
    if of.languages:
        raise ValueError("of a model of several languages no alignment is measured: it has no text of one direction")
    pairs, training = (list(open_pairs(each, of.source, of.target, of.swap)) for each in (data, of.train))
    lexicon = Lexicon.learned((a.split(), b.split()) for a, b in training)
    return Report(*(hits(translator, pairs, lexicon, punctuation) for punctuation in (True, False)))


def identical(source: Sequence[str], target: Sequence[str], punctuation: bool = True) -> list[tuple[int, int]]:
    """The places (in the target, in the source) of the words that stand once on each side.

    Args:
        source: words.
        target: words.
        punctuation: whether what has neither letter nor digit counts.
    """
    once = [{word for word, count in Counter(side).items() if count == 1} for side in (source, target)]
    places = {word: place for place, word in enumerate(source)}
    both = once[0] & once[1]
    return [
        (place, places[word])
        for place, word in enumerate(target)
        if word in both and (punctuation or any(map(str.isalnum, word)))
    ]


def hits(translator: Translator, pairs: Iterable[tuple[str, str]], lexicon: Lexicon, punctuation: bool) -> Hits:
    """How often the attention of a translator hits, for each of its layers; and IBM model 1, and chance.

    Args:
        translator: one that attends to its source.
        pairs: sentences and their translations, words between spaces.
        lexicon: IBM model 1.
        punctuation: see ``identical``.

    Raises:
        ValueError: if the translator does not attend to its source.
    """
    if not cast(Seq2Seq, translator.model).cross_attentions:
        raise ValueError("this model does not attend to its source, so it aligns nothing")
    right: Counter[str] = Counter()
    chance = 0.0
    links = sentences = skipped = 0
    texts = [(a, b) for a, b in pairs if identical(a.split(), b.split(), punctuation)]
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        for (a, b), found in zip(batch, attended(translator, batch), strict=True):
            source, target = a.split(), b.split()
            wanted = identical(source, target, punctuation)
            if any(weights.shape != (len(target), len(source)) for weights in found.values()):
                skipped += 1
                continue
            ways = {name: weights.argmax(-1).tolist() for name, weights in found.items()}
            ways["IBM model 1"] = lexicon.align(source, target)
            for name, chosen in ways.items():
                right[name] += sum(chosen[t] == s for t, s in wanted)
            chance += len(wanted) / len(source)
            links, sentences = links + len(wanted), sentences + 1
    shares = {name: count / links for name, count in {**right, "chance": chance}.items()} if links else {}
    return Hits(shares, links, sentences, skipped)


def attended(translator: Translator, pairs: Sequence[tuple[str, str]]) -> Iterator[dict[str, Tensor]]:
    """Where each translation's words look in its source while they are said: weights [words, words] by layer.

    The mean over heads; the pieces of a source word are summed, those of a target word averaged. End tokens are left
    out, and what they were looked at with.
    """
    model, tokenizers = cast(Seq2Seq, translator.model), translator.tokenizers
    sources = [tokenizers.source.encode(source) for source, _ in pairs]
    targets = [tokenizers.target.encode(target) for _, target in pairs]
    rows = padded([[*row, EOS] for row in sources], torch.device("cpu"), model.specials.pad)
    with (
        searching(model, exact=False),
        record(translator.model, names=model.cross_attentions, kinds="weights") as seen,
    ):
        model.step(teacher_inputs(model, rows, targets), begin(model, rows))
    layers = torch.stack([entry.weights.mean(1) for entry in seen])  # [L, B, T, N]
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        words = [_words(tokenizers.target, target), _words(tokenizers.source, source)]
        each = layers[:, number, : len(target), : len(source)]
        found = {MEAN: each.mean(0)}
        if len(each) > 1:
            found |= {f"attention, layer {layer}": weights for layer, weights in enumerate(each, 1)}
        yield {name: by_words(weights, *words) for name, weights in found.items()}


def _words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """For each token the number of its word."""
    return list(range(len(ids))) if tokenizer.kind == "word" else word_numbers(tokenizer.tokens(ids))


class Lexicon:
    """IBM's first model: t(f | e), how probable the target word f is where the source word e is translated.

    Learned by expectation maximisation from the same start for every word, so there is nothing to choose but the
    number of rounds: a target word is explained by each word of its source, or by none, as probably as t says.
    """

    def __init__(self, table: dict[tuple[str, str], float]) -> None:
        """Take t(f | e) by (e, f)."""
        self.table = table

    @classmethod
    def learned(cls, pairs: Iterable[Pair], rounds: int = 5) -> Lexicon:
        """Of pairs of sentences; in each round the expected counts of all of them make the next t."""
        numbers: tuple[dict[str, int], dict[str, int]] = ({"": 0}, {})  # "" is no word at all
        e_side, f_side, groups, group = [], [], [], 0
        for source, target in pairs:
            e = torch.tensor([0, *(numbers[0].setdefault(word, len(numbers[0])) for word in source)])
            f = torch.tensor([numbers[1].setdefault(word, len(numbers[1])) for word in target], dtype=torch.int64)
            e_side.append(e.repeat(len(f)))
            f_side.append(f.repeat_interleave(len(e)))
            groups.append((torch.arange(len(f)) + group).repeat_interleave(len(e)))
            group += len(f)
        if not group:
            return cls({})
        place = torch.cat(groups)  # of the target word that an entry may explain
        keys, entry = (torch.cat(e_side) * len(numbers[1]) + torch.cat(f_side)).unique(return_inverse=True)
        of_e = keys // len(numbers[1])
        t = torch.ones(len(keys), dtype=torch.float64)
        for _ in range(rounds):
            share = t[entry]
            share = share / torch.zeros(group, dtype=t.dtype).index_add_(0, place, share)[place]
            counts = torch.zeros_like(t).index_add_(0, entry, share)
            t = counts / torch.zeros(len(numbers[0]), dtype=t.dtype).index_add_(0, of_e, counts)[of_e]
        words = [list(side) for side in numbers]
        pairs_of_words = zip(of_e.tolist(), (keys % len(numbers[1])).tolist(), strict=True)
        return cls({(words[0][e], words[1][f]): p for (e, f), p in zip(pairs_of_words, t.tolist(), strict=True)})

    def align(self, source: Sequence[str], target: Sequence[str]) -> list[int]:
        """The place of the source word that most probably gave each target word; of equals the first."""
        return [
            max(range(len(source)), key=lambda place: self.table.get((source[place], word), 0.0)) for word in target
        ]
