"""How good translations are: BLEU and chrF with their signatures, speed, and whether a difference is more than chance.

All scores are sacreBLEU's (Post 2018), so that they compare with published ones of the same signature.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Unpack, cast

import torch
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.significance import PairedTest
from torch import nn

from weft.api import Options, Precision, Translator, load_translator
from weft.config import PAD, DataConfig, Recipe, nearest
from weft.data.batching import Batch, in_order
from weft.data.corpora import open_pairs
from weft.data.directions import Direction, is_many, open_directions
from weft.data.store import PairStore
from weft.data.text import TextPairs, references
from weft.data.tokenizers import TokenizerPair
from weft.models.contract import Seq2Seq

_BATCH_TOKENS = 4096  # of a batch whose loss is taken


@dataclass(frozen=True)
class Scores:
    """BLEU and chrF of a set of translations, each with the signature that says how it was computed.

    Attributes:
        bleu_ci, chrf_ci: the score's 95% confidence interval, by bootstrap, is ± this; None if it was not asked for.
    """

    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    bleu_ci: float | None = None
    chrf_ci: float | None = None


@dataclass(frozen=True)
class Difference:
    """One measure of two systems on the same sentences, by paired bootstrap (Koehn 2004).

    Attributes:
        baseline, system: the scores.
        baseline_ci, system_ci: each score's 95% confidence interval is ± this.
        p_value: how probable a difference at least as large is between two systems that are equally good; 1 if their
            translations are the same, where sacreBLEU itself gives its least.
        signature: how it was computed: the number of samples and the seed too.
    """

    baseline: float
    baseline_ci: float
    system: float
    system_ci: float
    p_value: float
    signature: str


@dataclass(frozen=True)
class Comparison:
    """A system against a baseline."""

    bleu: Difference
    chrf: Difference


@dataclass(frozen=True)
class Report:
    """What evaluating a translator gave.

    Attributes:
        scores: BLEU and chrF.
        sentences: how many were translated.
        target_tokens: how many tokens the model wrote, end tokens not counted.
        seconds: how long that took, from text to text.
        decoding: what was asked of the search.
        comparison: with a baseline, if there was one.
        translations: the translations themselves.
    """

    scores: Scores
    sentences: int
    target_tokens: int
    seconds: float
    decoding: Mapping[str, Any] = field(default_factory=dict)
    comparison: Comparison | None = None
    translations: tuple[str, ...] = field(default=(), repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Target tokens a second."""
        return self.target_tokens / self.seconds if self.seconds else 0.0

    def tree(self) -> dict[str, Any]:
        """Everything but the translations, as JSON has it."""
        tree = asdict(replace(self, translations=()))
        del tree["translations"]
        return tree | {"tokens_per_second": self.tokens_per_second}

    def json(self) -> str:
        """The report as a line of JSON."""
        return json.dumps(self.tree())

    def text(self) -> str:
        """The report as a person reads it."""
        scores = self.scores
        lines = [
            f"BLEU {scores.bleu:6.2f}{_give_or_take(scores.bleu_ci)}   {scores.bleu_signature}",
            f"chrF {scores.chrf:6.2f}{_give_or_take(scores.chrf_ci)}   {scores.chrf_signature}",
            f"{self.sentences:,} sentences, {self.target_tokens:,} target tokens in {self.seconds:.1f} s: "
            f"{self.tokens_per_second:,.0f} tokens/s",
        ]
        if self.comparison is not None:
            lines.append("")
            for name, found in (("BLEU", self.comparison.bleu), ("chrF", self.comparison.chrf)):
                lines.append(
                    f"{name} {found.system:6.2f} ± {found.system_ci:.2f}, baseline {found.baseline:.2f} ± "
                    f"{found.baseline_ci:.2f}: {found.system - found.baseline:+.2f}, p = {found.p_value:.4f}   "
                    f"{found.signature}"
                )
        return "\n".join(lines)


@dataclass(frozen=True)
class Reports:
    """What evaluating a translator of several languages gave, by direction (``en-es``)."""

    directions: Mapping[str, Report]

    def json(self) -> str:
        """The reports as a line of JSON."""
        return json.dumps({name: report.tree() for name, report in self.directions.items()})

    def text(self) -> str:
        """A line for each direction, and below them how the scores were computed."""
        lines = ["direction   BLEU            chrF            sentences"]
        for name, report in self.directions.items():
            bleu, chrf = report.scores.bleu, report.scores.chrf
            ends = _give_or_take(report.scores.bleu_ci), _give_or_take(report.scores.chrf_ci)
            lines.append(f"{name:<10}{bleu:6.2f}{ends[0]:<8}  {chrf:6.2f}{ends[1]:<8}  {report.sentences:9,}")
            if (found := report.comparison) is not None:
                change, p = found.bleu.system - found.bleu.baseline, found.bleu.p_value
                lines[-1] += f"   baseline {found.bleu.baseline:.2f}: {change:+.2f} BLEU, p = {p:.4f}"
        scores = [report.scores for report in self.directions.values()]
        signatures = [*(each.bleu_signature for each in scores), *(each.chrf_signature for each in scores)]
        return "\n".join([*lines, "", *dict.fromkeys(signatures)])


def _give_or_take(interval: float | None) -> str:
    return "" if interval is None else f" ± {interval:.2f}"


def score(
    translations: Sequence[str],
    references: Sequence[Sequence[str]],
    tokenize: str = "13a",
    lowercase: bool = False,
    samples: int = 0,
) -> Scores:
    """BLEU and chrF of translations.

    Args:
        translations: one a sentence.
        references: for each sentence one or more, not everywhere equally many.
        tokenize: sacreBLEU's tokenizer for BLEU; "none" for text that is tokenised already.
        lowercase: whether BLEU and chrF take capitals for small letters.
        samples: how often the sentences are drawn anew for the confidence intervals; 0 for none.

    Raises:
        ValueError: if the numbers do not fit, a sentence has no reference, or there is no such tokenizer.
    """
    columns = _columns(translations, references)
    bleu, chrf = _metrics(tokenize, lowercase).values()
    b, c = (metric.corpus_score(translations, columns, n_bootstrap=max(samples, 1)) for metric in (bleu, chrf))
    scores = Scores(b.score, c.score, str(bleu.get_signature()), str(chrf.get_signature()))
    return replace(scores, bleu_ci=float(b._ci), chrf_ci=float(c._ci)) if samples > 1 else scores


def compare(
    baseline: Sequence[str],
    system: Sequence[str],
    references: Sequence[Sequence[str]],
    tokenize: str = "13a",
    lowercase: bool = False,
    samples: int = 1000,
) -> Comparison:
    """Whether two systems' translations of the same sentences differ by more than chance, by paired bootstrap.

    The samples are drawn from sacreBLEU's fixed seed, which the signatures name.

    Args:
        baseline, system: the translations.
        references: for each sentence one or more.
        tokenize: see ``score``.
        lowercase: see ``score``.
        samples: how often the sentences are drawn anew.

    Raises:
        ValueError: as ``score``.
    """
    columns = _columns(baseline, references)
    _columns(system, references)
    metrics = _metrics(tokenize, lowercase)
    named = [("baseline", baseline), ("system", system)]
    signatures, found = PairedTest(named, metrics, columns, test_type="bs", n_samples=samples)()
    same = list(baseline) == list(system)
    differences = []
    for name in signatures:
        old, new = cast(Any, found[name])
        p_value = 1.0 if same or old.score == new.score else float(new.p_value)
        scores = float(old.score), float(old.ci), float(new.score), float(new.ci)
        differences.append(Difference(*scores, p_value, str(signatures[name])))
    return Comparison(*differences)


def evaluate(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    tokenize: str = "13a",
    lowercase: bool = False,
    samples: int = 0,
    **options: Unpack[Options],
) -> Report:
    """Translate the sources and score what comes out.

    Args:
        translator: what ``weft.load`` gave.
        sources: one a sentence.
        references: for each sentence one or more.
        tokenize: see ``score``.
        lowercase: see ``score``.
        samples: see ``score``.
        options: of ``Translator.translate``.

    Raises:
        ValueError: as ``score`` and ``Translator.translate``.
    """
    _columns(sources, references)
    _metrics(tokenize, lowercase)  # what is wrong is told before the work
    begin = time.perf_counter()
    found = translator.translate(list(sources), **options)
    seconds = time.perf_counter() - begin
    texts = tuple(translation.text for translation in found)
    return Report(
        scores=score(texts, references, tokenize, lowercase, samples),
        sentences=len(texts),
        target_tokens=sum(len(translation.n_best[0].ids) for translation in found),
        seconds=seconds,
        decoding=_told(translator, options),
        translations=texts,
    )


def evaluate_folder(
    model: str | os.PathLike[str],
    data: str | Sequence[str],
    baseline: str | os.PathLike[str] | None = None,
    *,
    source: str | None = None,
    tokenize: str = "13a",
    lowercase: bool = False,
    samples: int = 0,
    output: str | os.PathLike[str] | None = None,
    precision: Precision = "auto",
    **options: Unpack[Options],
) -> Report | Reports:
    """Load a model, translate a test set and score it, beside a baseline's translations of it if one is given.

    Args:
        model: a model folder, or the name of a model that comes with weft.
        data: a TSV file, two files, or a part of a named set, in the languages of the model's recipe.
        baseline: another model.
        source: the language, of a model that has several; without it and ``to``, all directions that the data has.
        tokenize: see ``score``.
        lowercase: see ``score``.
        samples: see ``score``.
        output: a file for the translations, a line each.
        precision: see ``weft.load``.
        options: of ``Translator.translate``, for both models.

    Returns:
        A report; or, where there are several directions, one for each.

    Raises:
        OSError: if a file is missing.
        ValueError: if the data, a model or an option is at fault.
    """
    if output is not None and not Path(output).parent.is_dir():
        raise FileNotFoundError(f"no folder {Path(output).parent} for {output}")
    if output is not None and Path(output).is_dir():
        raise IsADirectoryError(f"{output} is a folder: the translations are written to a file")
    translator = load_translator(model, precision)
    other = None if baseline is None else load_translator(baseline, precision)
    reports = {}
    for name, (sources, targets, to, from_) in trials(translator.recipe.data, data, source, options.get("to")).items():
        options["to"], options["from_"] = to, from_
        theirs = None if other is None else evaluate(other, sources, targets, tokenize, lowercase, **options)
        report = evaluate(translator, sources, targets, tokenize, lowercase, samples, **options)
        if theirs is not None:
            compared = compare(theirs.translations, report.translations, targets, tokenize, lowercase)
            report = replace(report, comparison=compared)
        reports[name] = report
    if output is not None:
        lines = (text.replace("\n", " ") for report in reports.values() for text in report.translations)
        Path(output).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    return Reports(reports) if len(reports) > 1 else report


def trials(
    trained: DataConfig, data: str | Sequence[str], source: str | None = None, to: str | None = None
) -> dict[str, Sentences]:
    """What a model is tried on, by direction (``en-es``).

    Args:
        trained: what the model was trained on; it names the languages.
        data: a TSV file, two files, or a part of a named set.
        source, to: the languages; left out, all of those that the model knows and the data has.

    Raises:
        OSError: if a file is missing.
        ValueError: if the data is at fault, or the model does not know a language.
    """
    known = trained.languages or [language for language in trained.direction if language]
    for language in (source, to):
        if language is not None and language not in known:
            raise ValueError(f"{language!r} is no language of this model: expected {' or '.join(known) or 'none'}")
    if not trained.languages:
        read, said = trained.direction
        if source not in (None, read) or to not in (None, said):
            raise ValueError(f"this model translates from {read} to {said}, not the other way")
        pairs = open_pairs(data, trained.source, trained.target, trained.swap)
        return {f"{read}-{said}": Sentences(*sentences(pairs), said or None, read or None)}
    if is_many(data):
        texts = open_directions(data, trained.languages, trained.bridge, every=True).texts
    elif to is not None:
        texts = (open_pairs(data, source or "", to),)
    else:
        raise ValueError(f"the model has several languages: say to which of {', '.join(known)} the file translates")
    chosen = [text for text in texts if source in (None, text.source) and to in (None, text.target)]
    if not chosen:
        raise ValueError(f"{data} has no pairs from {source or 'any language'} to {to or 'any language'}")
    return {f"{text.source}-{text.target}": of_direction(text) for text in chosen}


class Sentences(NamedTuple):
    """What a model is tried on: sources, the references of each, and the languages, as far as they are known."""

    sources: list[str]
    references: list[list[str]]
    to: str | None = None
    from_: str | None = None


def of_direction(pairs: Direction) -> Sentences:
    """Those of one direction among several."""
    return Sentences(*sentences(pairs), pairs.target, pairs.source or None)


def sentences(pairs: TextPairs) -> tuple[list[str], list[list[str]]]:
    """Sources and, for each, its references.

    A set in which a sentence may have several translations has each sentence once, with all of them; any other is
    scored line by line, though a line should come twice.
    """
    if getattr(pairs, "several", True):
        return references(pairs)
    lines = list(pairs)
    return [source for source, _ in lines], [[target] for _, target in lines]


Validate = Callable[[nn.Module], dict[str, float]]


def validator(store: PairStore, tokenizers: TokenizerPair, recipe: Recipe, texts: Sequence[Sentences] = ()) -> Validate:
    """What the training loop calls to validate a model: its loss on a store and, given texts, its greedy BLEU.

    Args:
        store: pairs of tokens, for the loss.
        tokenizers: those that made it.
        recipe: of the model that is being trained.
        texts: what to translate, in each direction; none, and there is no BLEU.
    """

    def validate(model: nn.Module) -> dict[str, float]:
        metrics = validation_loss(model, in_order(store, _BATCH_TOKENS))
        if texts:
            metrics["bleu"] = validation_bleu(Translator(model, recipe, tokenizers), texts)
        return metrics

    return validate


def validation_loss(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """The mean negative log-likelihood of a target token, without smoothing and dropout, and its perplexity.

    A pair that is longer than the model can take does not count.

    Raises:
        ValueError: if there is nothing to take the mean of.
    """
    seq2seq = cast(Seq2Seq, model)
    total, count, training = 0.0, 0, model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                if len((fitting := _fitting(batch, seq2seq.max_len)).source):
                    loss = seq2seq.loss(fitting)
                    total, count = total + float(loss.parts["nll"]), count + loss.count
    finally:
        model.train(training)
    if not count:
        raise ValueError("there is no validation pair that the model can take")
    mean = total / count
    return {"loss": mean, "perplexity": math.exp(min(mean, 700.0))}


def validation_bleu(translator: Translator, texts: Sequence[Sentences]) -> float:
    """BLEU of greedy translations, the mean of all directions.

    A source that is longer than the model can take counts as translated to nothing.
    """
    scores = []
    for sources, targets, to, from_ in texts:
        found = translator.translate_lines(sources, skipped=lambda line: None, beam=1, to=to, from_=from_)
        scores.append(score([translation.text for translation in found], targets).bleu)
    return sum(scores) / len(scores)


def _fitting(batch: Batch, max_len: int | None) -> Batch:
    """The rows that a model can take which reads and writes up to ``max_len`` tokens."""
    source, target = batch.source, batch.target
    if max_len is None or max(source.shape[1], target.shape[1] - 1) <= max_len:
        return batch
    fits = ((source != PAD).sum(1) <= max_len) & ((target != PAD).sum(1) - 1 <= max_len)
    return Batch(source[fits][:, :max_len], target[fits][:, : max_len + 1])


def _told(translator: Translator, options: Options) -> dict[str, Any]:
    """What a translator was asked for, as JSON has it."""
    search, usual = translator.search(**options), translator.recipe.decoding.model_dump()
    asked = ("split", "recase", "carry")
    text = {name: usual[name] if options.get(name) is None else options.get(name) for name in asked}
    drawn = {} if search.sampling is None else {"sampling": asdict(search.sampling)}
    languages = {"from": options.get("from_"), "to": options.get("to")}
    return asdict(search.options) | {"replace_unknown": search.replace_unknown} | text | languages | drawn


def _columns(translations: Sequence[str], references: Sequence[Sequence[str]]) -> list[list[str]]:
    """The references as sacreBLEU wants them: the first of each sentence, the second of each, …; None for a gap."""
    if len(translations) != len(references):
        raise ValueError(f"there are {len(translations):,} sentences, but references for {len(references):,}")
    if not references:
        raise ValueError("there is nothing to score: expected at least one sentence")
    for number, each in enumerate(references, 1):
        if not each:
            raise ValueError(f"sentence {number:,} has no reference: expected at least one")
    most = max(map(len, references))
    columns = [[each[column] if column < len(each) else None for each in references] for column in range(most)]
    return cast(list[list[str]], columns)  # sacreBLEU takes None, but its types do not say so


def _metrics(tokenize: str, lowercase: bool) -> dict[str, BLEU | CHRF]:
    if tokenize not in BLEU.TOKENIZERS:
        known = ", ".join(sorted(BLEU.TOKENIZERS))
        raise ValueError(f"tokenize must be one of {known}, not {tokenize!r}{nearest(tokenize, BLEU.TOKENIZERS)}")
    try:  # force: the caller has said what the text is like, so sacreBLEU need not guess aloud
        bleu = BLEU(tokenize=tokenize, lowercase=lowercase, force=True)
    except (ImportError, RuntimeError) as error:  # some tokenizers need another package
        raise ValueError(f"tokenize {tokenize!r}: {' '.join(str(error).split())}") from None
    return {"bleu": bleu, "chrf": CHRF(lowercase=lowercase)}
