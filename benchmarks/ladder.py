"""The lectures' ladder: translation models that were trained on the same data for as long, in one table.

    python -m benchmarks.ladder RUN … [--data multi30k:test_2016_flickr] [--tokenize none] [--out PNG] [--json FILE]

RUN is the run folder of a trained translator, best written in the order of the rungs: recurrent without attention, with
it, convolutional, Transformer. Training time, steps and tokens are what the run saved; BLEU, and how fast the
translations came, is measured here, one model after the other. The picture has BLEU by the length of the source: what
attention is for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import timing
from weft.api import Translator, load_translator
from weft.data.corpora import open_pairs
from weft.evaluation import translation
from weft.training.checkpoint import RunFolder
from weft.views import figures

BUCKETS = ((1, 8), (9, 10), (11, 12), (13, 14), (15, 17), (18, 21), (22, 200))  # words of a source, from and to


@dataclass(frozen=True)
class Rung:
    """What is known of one model.

    Attributes:
        name: of its family, and of its attention where there is a choice.
        parameters: how many.
        steps, tokens, minutes: of its training; the time is that of the run's own clock, validations counted.
        bleu, chrf: on the test set.
        tokens_per_second: of decoding.
        by_length: BLEU of the sentences with so many source words, by the first of them.
    """

    name: str
    parameters: int
    steps: int
    tokens: int
    minutes: float
    bleu: float
    chrf: float
    tokens_per_second: float
    by_length: dict[int, float]


def measure(run: Path, data: str, tokenize: str) -> Rung:
    """Translate the test set with the model of a run."""
    translator = load_translator(run)
    named = translator.recipe.data
    sources, references = translation.sentences(open_pairs(data, named.source, named.target, named.swap))
    report = translation.evaluate(translator, sources, references, tokenize)
    trained = RunFolder(run)
    last = trained.state(trained.steps()[-1])
    return Rung(
        _name(translator),
        sum(parameter.numel() for parameter in translator.model.parameters()),
        last["step"],
        last["tokens"],
        last["seconds"] / 60,
        report.scores.bleu,
        report.scores.chrf,
        report.tokens_per_second,
        by_length(sources, report.translations, references, tokenize),
    )


def by_length(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[Sequence[str]], tokenize: str
) -> dict[int, float]:
    """BLEU of the sentences of each bucket, by its first length; none where there are no sentences."""
    scores = {}
    for low, high in BUCKETS:
        chosen = [i for i, source in enumerate(sources) if low <= len(source.split()) <= high]
        if chosen:
            found = translation.score([translations[i] for i in chosen], [references[i] for i in chosen], tokenize)
            scores[low] = found.bleu
    return scores


def _name(translator: Translator) -> str:
    model = translator.recipe.model
    parts = [getattr(model, key, "") for key in ("family", "cell", "attention")]
    return ", ".join(f"attention {part}" if part == "none" else part for part in parts if part)


def main() -> None:
    """Measure, print, draw."""
    parser = argparse.ArgumentParser(description="Translation models side by side.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--data", default="multi30k:test_2016_flickr")
    parser.add_argument("--tokenize", default="none", help="sacreBLEU's tokenizer")
    parser.add_argument("--out", help="a picture of BLEU by source length")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    print(timing.header())
    head = ["model", "parameters", "steps", "target tokens", "training", "BLEU", "chrF", "decoding"]
    lines = [head, ["---", *["---:"] * 7]]
    rungs = {}
    for run in options.runs:
        rung = rungs[run.name] = measure(run, options.data, options.tokenize)
        lines.append(
            [
                rung.name,
                f"{rung.parameters / 1e6:.1f} M",
                f"{rung.steps:,}",
                f"{rung.tokens / 1e6:.1f} M",
                f"{rung.minutes:.0f} min",
                f"{rung.bleu:.2f}",
                f"{rung.chrf:.2f}",
                f"{rung.tokens_per_second:,.0f} tokens/s",
            ]
        )
        print(f"{rung.name}: BLEU {rung.bleu:.2f}", flush=True)
    print()
    print(timing.markdown(lines))
    if options.out:
        curves = {rung.name: (list(rung.by_length), list(rung.by_length.values())) for rung in rungs.values()}
        told = f"BLEU on {options.data} by the length of the source; a dot stands for sentences from this length on"
        figures.save(figures.lines({"BLEU": curves}, "words of the source", told), options.out)
    if options.json:
        timing.save(options.json, {name: asdict(rung) for name, rung in rungs.items()})


if __name__ == "__main__":
    main()
