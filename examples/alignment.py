"""A recurrent translator with attention learns a little French, and which word comes from which.

    python examples/alignment.py [--steps 300] [--seed 0] [--save PICTURE.png]

The encoder reads an English sentence in both directions. Before each French word the decoder looks back at it with
additive attention (Bahdanau et al. 2015). The sentences come from a small grammar in which adjectives stand
before the noun in English and behind it in French. Only the words are taught, never where to look.
"""

from __future__ import annotations

import argparse
import random
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.kernels.mask import Mask
from weft.layers import masks
from weft.layers.cells import RecurrentState
from weft.layers.linear import Linear
from weft.layers.recurrent import Bridge, RecurrentDecoder, RecurrentEncoder
from weft.layers.scores import AdditiveAttention
from weft.views.matrix import Matrix
from weft.views.terminal import draw

# English -> French; of adjectives and participles the masculine and the feminine.
MASCULINE = {"agreement": "accord", "report": "rapport", "market": "marché", "treaty": "traité", "budget": "budget"}
FEMININE = {"Area": "zone", "bank": "banque", "policy": "politique", "law": "loi", "union": "union"}
ADJECTIVES = {
    "European": ("européen", "européenne"),
    "Economic": ("économique", "économique"),
    "common": ("commun", "commune"),
    "social": ("social", "sociale"),
    "national": ("national", "nationale"),
}
PARTICIPLES = {"signed": ("signé", "signée"), "published": ("publié", "publiée"), "discussed": ("discuté", "discutée")}
PREPOSITIONS = {"on": "sur", "for": "pour", "against": "contre", "with": "avec"}
VERBS = {"was": ["a", "été"], "is": ["est"]}
TIMES = {"in": "en", "before": "avant", "after": "après", "since": "depuis"}
MONTHS = {"March": "mars", "May": "mai", "June": "juin", "August": "août", "October": "octobre"}
YEARS = [str(year) for year in range(1985, 2000)]
SENTENCE = "the agreement on the European Economic Area was signed in August 1992 ."
ANSWER = "l' accord sur la zone économique européenne a été signé en août 1992 ."
PAD, BOS, EOS = "<pad>", "<s>", "<end>"


def phrase(rng: random.Random) -> tuple[list[str], list[str], int]:
    """An article, up to two adjectives and a noun: English, French and the gender (1 is feminine)."""
    gender = rng.randrange(2)
    noun, nom = rng.choice(list((FEMININE if gender else MASCULINE).items()))
    adjectives = rng.sample(list(ADJECTIVES), rng.randrange(3))
    article = "l'" if nom[0] in "au" else ("le", "la")[gender]
    return ["the", *adjectives, noun], [article, nom, *(ADJECTIVES[a][gender] for a in reversed(adjectives))], gender


def sentence(rng: random.Random) -> tuple[list[str], list[str]]:
    """A random pair of sentences, never the one that is shown at the end."""
    english, french, gender = phrase(rng)
    if rng.random() < 0.7:
        preposition = rng.choice(list(PREPOSITIONS))
        more, plus, _ = phrase(rng)
        english, french = [*english, preposition, *more], [*french, PREPOSITIONS[preposition], *plus]
    verb, participle, when, month = (rng.choice(list(table)) for table in (VERBS, PARTICIPLES, TIMES, MONTHS))
    year, end = rng.choice(YEARS), rng.choice(".?!")
    english += [verb, participle, when, month, year, end]
    french += [*VERBS[verb], PARTICIPLES[participle][gender], TIMES[when], MONTHS[month], year, end]
    return (english, french) if " ".join(english) != SENTENCE else sentence(rng)


def vocabulary(side: int) -> list[str]:
    """Every word of one language, in a thousand sentences; the specials first."""
    rng = random.Random(0)
    return [PAD, BOS, EOS, *sorted({word for _ in range(1000) for word in sentence(rng)[side]})]


ENGLISH, FRENCH = vocabulary(0), vocabulary(1)


def tokens(sentences: list[list[str]], vocabulary: list[str]) -> Tensor:
    """Sentences as token ids [B, longest], padded at the right."""
    number = {word: index for index, word in enumerate(vocabulary)}
    rows = [torch.tensor([number[word] for word in sentence]) for sentence in sentences]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=0)


class Translator(nn.Module):
    """A bidirectional GRU encoder and a GRU decoder that attends to it (Bahdanau et al. 2015)."""

    def __init__(self, dim: int = 64) -> None:
        """Make an encoder of ``dim`` in each direction, and a decoder of ``dim``."""
        super().__init__()
        self.source = nn.Embedding(len(ENGLISH), dim)
        self.target = nn.Embedding(len(FRENCH), dim)
        self.encoder = RecurrentEncoder("gru", dim, dim, bidirectional=True)
        self.bridge = Bridge("gru", 2 * dim, dim)
        attention = AdditiveAttention(dim, 2 * dim, dim)
        self.decoder = RecurrentDecoder("gru", dim, dim, attention=attention, memory_dim=2 * dim)
        self.output = Linear(self.decoder.output_dim, len(FRENCH))

    def encode(self, source: Tensor) -> tuple[Tensor, Mask, RecurrentState]:
        """The memory [B, M, 2·dim] of source [B, M], its padding, and the decoder's first state."""
        mask = masks.padding_from_tokens(source, 0)
        memory, state = self.encoder(self.source(source), lengths=mask.lengths)
        return memory, mask, self.bridge(state)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits [B, N, V] for the word after each of target [B, N]."""
        memory, mask, state = self.encode(source)
        hidden, _ = self.decoder(self.target(target), memory, mask, state)
        logits: Tensor = self.output(hidden)
        return logits

    @torch.no_grad()
    def translate(self, english: list[str]) -> tuple[list[str], Tensor]:
        """The French words to EOS, and the weights [N, M] with which each looked at the English ones."""
        memory, mask, state = self.encode(tokens([[*english, EOS]], ENGLISH))
        french = [BOS]
        with weft.record(self, names="decoder.attention") as seen:
            while french[-1] != EOS and len(french) < 30:
                x = self.target(tokens([[french[-1]]], FRENCH))
                hidden, state = self.decoder(x, memory, mask, state)
                french.append(FRENCH[int(self.output(hidden)[0, -1].argmax())])
        return french[1:], torch.cat([step.weights[0, 0] for step in seen.calls("decoder.attention")])


def train(model: Translator, steps: int, rng: random.Random) -> None:
    """Teach the words; where to look is left to the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=max(steps, 10), pct_start=0.2)
    begin = time.perf_counter()
    for step in range(1, steps + 1):
        pairs = [sentence(rng) for _ in range(32)]
        source = tokens([[*english, EOS] for english, _ in pairs], ENGLISH)
        target = tokens([[BOS, *french, EOS] for _, french in pairs], FRENCH)
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"step {step:4d}  loss {loss.item():.4f}  {time.perf_counter() - begin:5.1f} s", flush=True)


def look(model: Translator) -> Matrix:
    """The alignment of the sentence: English words across, French words down."""
    english = SENTENCE.split()
    french, weights = model.translate(english)
    caption = (
        "English to French: decoder.attention, one head, after the softmax. A diagonal: the words keep their order."
    )
    return Matrix(weights, french, [*english, EOS], caption=caption, sides=("French", "English"))


def turned(matrix: Matrix) -> list[tuple[int, int]]:
    """Runs of rows, first and last, whose strongest keys go backwards: there the order of the words differs."""
    best = matrix.weights[:-1].argmax(1).tolist()  # the end is no word
    runs: list[tuple[int, int]] = []
    for row in range(1, len(best)):
        if best[row] < best[row - 1]:
            first = runs.pop()[0] if runs and runs[-1][1] == row - 1 else row - 1
            runs.append((first, row))
    return runs


def main() -> None:
    """Train, translate, look."""
    parser = argparse.ArgumentParser(
        description="A recurrent translator with attention learns which word comes from which."
    )
    parser.add_argument("--steps", type=int, default=300, help="of training, 32 sentences each (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sentences (default: 0)")
    parser.add_argument("--save", metavar="PNG", help="also write the map as a picture")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps must be at least 1, not {arguments.steps}")

    torch.manual_seed(arguments.seed)
    model = Translator()
    train(model, arguments.steps, random.Random(arguments.seed))
    matrix = look(model)
    print(f"\n{SENTENCE}\n{' '.join(matrix.queries[:-1])}\n\n{draw(matrix)}")
    best = matrix.weights.argmax(1).tolist()
    for first, last in turned(matrix):
        french = " ".join(matrix.queries[first : last + 1])
        print(f"other order: {french} <- {' '.join(matrix.keys[best[row]] for row in range(first, last + 1))}")
    if arguments.save:
        from weft.views import figures

        figures.save(figures.heat_map(matrix), arguments.save)
        print(f"written: {arguments.save}")


if __name__ == "__main__":
    main()
