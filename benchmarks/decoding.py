"""The same trained translator in weft, in CTranslate2 and in transformers: how fast, how good, how much memory.

    python -m benchmarks.decoding MODEL [--data multi30k:test_2016_flickr] [--sentences 1000] [--tokenize none]
        [--rounds 3] [--wide] [--quick] [--json FILE]

MODEL is the folder of a Transformer. It is written for the others by weft's own exports, which check that it says the
same there, and for weft once more in int8. Everyone gets text and gives text, tokenizers included, in one process with
the same threads, and takes turns. With --wide, random weights of a Transformer 512 wide with 6 + 6 layers take
the place of MODEL's, and every answer has 16 tokens: there is no BLEU then.

    throughput  the whole set at once; target tokens (weft's count of each answer) a second, median of the rounds.
                CTranslate2 is first tried with every way of the grid (GRID), once each, and its best takes part.
                "weft is": the faster of weft's two against this row.
    latency     the first 50 sentences one by one, with 1 thread and with 2: median and 95th percentile; alone, and
                beside a process that keeps a core busy. "weft in torch" is weft without its compiled library.
    memory      peak resident memory of a process that loads the model and translates the set once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from benchmarks import timing
from weft import folder
from weft.api import Translator, convert, load_translator
from weft.config import Recipe
from weft.data.corpora import open_pairs
from weft.data.tokenizers import JOINT, SIDES
from weft.evaluation import translation
from weft.models import build

IN_TORCH = "in torch"
Translate = Callable[[list[str]], list[str]]
THREADS = 2
LATENCY = 50  # sentences that are translated one by one
LENGTH = 60  # the longest answer, in tokens, for everyone
FIXED = 16  # and that of random weights, always
WIDE = {"dim": 512, "num_heads": 8, "ffn_dim": 2048, "encoder_layers": 6, "decoder_layers": 6}
# CTranslate2: how matrices are multiplied × (processes of work, threads of each) × tokens of a batch.
GRID = (("float32", "int8"), ((1, 2), (2, 1)), (1024, 2048, 4096, 8192, 16384))
QUICK = (("float32",), ((1, 2),), (2048,))


class Way(NamedTuple):
    """Who translates, and how."""

    who: str
    beam: int
    threads: int = THREADS
    compute: str = "float32"
    work: tuple[int, int] = (1, THREADS)  # of CTranslate2: inter- and intra-threads
    batch: int = 2048  # of CTranslate2, in tokens
    length: int = LENGTH

    def __str__(self) -> str:
        """As in the tables."""
        if self.who != "ctranslate2":
            return f"{self.who} {self.compute}"
        return f"ctranslate2 {self.compute}, {self.work[0]}×{self.work[1]} threads, batches of {self.batch:,}"

    def start(self, folders: Folders) -> Translate:
        """Load the model."""
        torch.set_num_threads(self.threads)
        return {"weft": _weft, "ctranslate2": _ctranslate2, "transformers": _transformers}[self.who](self, folders)


class Folders(NamedTuple):
    """Where the model is, in the form of each."""

    weft: str
    int8: str
    ctranslate2: str
    transformers: str


@dataclass(frozen=True)
class Row:
    """What was found of one way."""

    tokens_per_second: float
    seconds: float
    bleu: float
    memory: int | None


def _weft(way: Way, folders: Folders) -> Translate:
    model = load_translator(folders.int8 if way.compute == "int8" else folders.weft, "fp32")

    def translate(texts: list[str]) -> list[str]:
        os.environ["WEFT_NATIVE"] = "0" if way.compute == IN_TORCH else "1"
        found = model.translate(texts, beam=way.beam, max_ratio=0.0, max_extra=way.length)
        return [each.text for each in found]

    return translate


def _ctranslate2(way: Way, folders: Folders) -> Translate:
    import ctranslate2

    names = [Path(folders.ctranslate2, name) for name in ((JOINT, JOINT), SIDES)[not _joint(folders)]]
    source, target = (Tokenizer.from_file(str(name)) for name in names)
    numbers = target.get_vocab()
    inter, intra = way.work
    model = ctranslate2.Translator(
        folders.ctranslate2, device="cpu", inter_threads=inter, intra_threads=intra, compute_type=way.compute
    )

    def translate(texts: list[str]) -> list[str]:
        found = model.translate_batch(
            [encoding.tokens for encoding in source.encode_batch(texts)],
            beam_size=way.beam,
            max_batch_size=way.batch,
            batch_type="tokens",
            max_decoding_length=way.length,
            min_decoding_length=FIXED if way.length == FIXED else 1,
            suppress_sequences=[["<pad>"], ["<s>"]],
        )
        return [target.decode([numbers[token] for token in each.hypotheses[0]]) for each in found]

    return translate


def _transformers(way: Way, folders: Folders) -> Translate:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForSeq2SeqLM.from_pretrained(folders.transformers).eval()
    tokenizer = AutoTokenizer.from_pretrained(folders.transformers)

    def translate(texts: list[str]) -> list[str]:
        order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
        said = [""] * len(texts)
        for start in range(0, len(order), 64):
            places = order[start : start + 64]
            batch = tokenizer([texts[place] for place in places], return_tensors="pt", padding=True)
            with torch.inference_mode():
                found = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    num_beams=way.beam,
                    max_length=way.length + 1,  # with the token that it starts from
                    min_length=FIXED + 1 if way.length == FIXED else 0,
                    early_stopping=way.beam > 1,
                )
            for place, text in zip(places, tokenizer.batch_decode(found, skip_special_tokens=True), strict=True):
                said[place] = text
        return said

    return translate


def _joint(folders: Folders) -> bool:
    return Path(folders.ctranslate2, JOINT).is_file()


def memory(way: Way, folders: Folders, texts: Sequence[str]) -> int | None:
    """Peak resident memory, in bytes, of a process that does nothing else; None where the system does not tell."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_peak, way, folders, list(texts)).result()


def _peak(way: Way, folders: Folders, texts: list[str]) -> int | None:
    way.start(folders)(texts)
    try:
        return timing.peak_resident()
    except OSError:
        return None


def best_of_grid(beam: int, length: int, folders: Folders, texts: list[str], grid: Any) -> Way:
    """The fastest way of CTranslate2; each is warmed up and then timed once."""
    times = {}
    for compute, work, batch in product(*grid):
        way = Way("ctranslate2", beam, compute=compute, work=work, batch=batch, length=length)
        translate = way.start(folders)
        translate(texts[:64])
        begin = perf_counter()
        translate(texts)
        times[way] = perf_counter() - begin
        print(f"  {way}: {times[way]:.2f} s", flush=True)
    return min(times, key=times.__getitem__)


@contextmanager
def busy() -> Iterator[None]:
    """Meanwhile, another process keeps a core busy."""
    other = get_context("spawn").Process(target=_spin, daemon=True)
    other.start()
    try:
        yield
    finally:
        other.terminate()
        other.join()


def _spin() -> None:
    parent = os.getppid()
    while os.getppid() == parent:  # whoever starts this may be killed
        pass


def latencies(
    ways: Sequence[Way], folders: Folders, texts: Sequence[str], rounds: int
) -> dict[str, tuple[float, float]]:
    """Seconds for one sentence: median and 95th percentile of all sentences and rounds, taking turns."""
    taken: dict[str, list[float]] = {}
    for threads in (1, THREADS):
        started = {
            f"{way.who} {way.compute}, {threads} thread{'s' * (threads > 1)}": way._replace(
                threads=threads, work=(1, threads)
            )
            for way in ways
        }
        for _ in range(rounds):
            for name, way in started.items():
                translate = way.start(folders)  # which also sets the threads
                translate([texts[0]])
                for text in texts[:LATENCY]:
                    begin = perf_counter()
                    translate([text])
                    taken.setdefault(name, []).append(perf_counter() - begin)
    return {name: (median(all_), sorted(all_)[int(0.95 * len(all_))]) for name, all_ in taken.items()}


def race(
    ways: Sequence[Way], folders: Folders, sources: list[str], references: list[list[str]], options: argparse.Namespace
) -> dict[str, Row]:
    """Throughput, BLEU and memory of each."""
    counter = load_translator(folders.weft, "fp32").tokenizers.target
    calls: dict[str, Callable[[], object]] = {}
    said = {}
    for way in ways:
        translate = way.start(folders)
        calls[str(way)] = lambda translate=translate: translate(sources)  # type: ignore[misc]
        said[str(way)] = translate(sources)
    times = timing.alternate(calls, options.rounds, warmup=0)
    rows = {}
    for way in ways:
        name = str(way)
        tokens = sum(len(ids) + 1 for ids in counter.encode_batch(said[name]))
        bleu = translation.score(said[name], references, options.tokenize).bleu
        peak = None if options.quick else memory(way, folders, sources)
        rows[name] = Row(tokens / times[name], times[name], bleu, peak)
    return rows


def _random(translator: Translator, path: str) -> Translator:
    """The same vocabulary with random weights of a larger model, saved."""
    tree = translator.recipe.tree()
    recipe = Recipe.make({**tree, "model": {**tree["model"], **WIDE}})
    torch.manual_seed(0)
    sides = translator.tokenizers
    model = build(recipe.model, sides.source.vocab_size, sides.target.vocab_size)
    folder.save(path, model, recipe, sides, "")
    return load_translator(path, "fp32")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Decoding side by side.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", default="multi30k:test_2016_flickr")
    parser.add_argument("--sentences", type=int, default=1000)
    parser.add_argument("--tokenize", default="none", help="sacreBLEU's tokenizer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--wide", action="store_true", help="random weights, 512 wide, answers of 16 tokens")
    parser.add_argument("--quick", action="store_true", help="one way of CTranslate2, no memory")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    print(timing.header())
    torch.set_num_threads(THREADS)
    translator: Translator = load_translator(options.model, "fp32")
    named = translator.recipe.data
    sources, references = translation.sentences(open_pairs(options.data, named.source, named.target, named.swap))
    sources, references = sources[: options.sentences], references[: options.sentences]
    results: dict[str, Any] = {}
    with TemporaryDirectory() as place:
        if options.wide:
            translator = _random(translator, f"{place}/random")
        length, own = FIXED if options.wide else LENGTH, f"{place}/random" if options.wide else str(options.model)
        folders = Folders(own, f"{place}/int8", f"{place}/ctranslate2", f"{place}/transformers")
        print(convert(own, folders.int8, "weft", weights="int8").partition(": ")[2])
        for to in ("ctranslate2", "transformers"):
            print(translator.export(Path(place, to), to, sources[:8]).partition(": ")[2])
        lines = [["beam", "who", "tokens/s", "weft is", "BLEU", "memory"], ["---:", "---", *["---:"] * 4]]
        ways: list[Way] = []
        for beam in (1, 5):
            print(f"\nbeam {beam}")
            best = best_of_grid(beam, length, folders, sources, QUICK if options.quick else GRID)
            mine = [Way("weft", beam, compute=compute, length=length) for compute in ("float32", "int8")]
            ways = [*mine, best, Way("transformers", beam, length=length)]
            rows = race(ways, folders, sources, references, options)
            ours = max(rows[str(way)].tokens_per_second for way in mine)
            for name, row in rows.items():
                peak = "–" if row.memory is None else f"{row.memory / 1e6:,.0f} MB"
                ratio = f"{ours / row.tokens_per_second:.2f}×"
                lines.append([str(beam), name, f"{row.tokens_per_second:,.0f}", ratio, f"{row.bleu:.2f}", peak])
            results[f"beam {beam}"] = {name: asdict(row) for name, row in rows.items()}
        print()
        print(timing.markdown(lines))
        lines = [["beam", "one sentence", "median", "95th percentile", "beside a busy process", "95th percentile"]]
        lines.append(["---:", "---", *["---:"] * 4])
        for beam in (1, 5):
            latest = [*ways, *(way._replace(compute=c) for way in ways if way.who == "ctranslate2" for c in GRID[0])]
            latest.append(Way("weft", beam, compute=IN_TORCH, length=length))
            once = [way._replace(beam=beam) for way in {(way.who, way.compute): way for way in latest}.values()]
            alone = latencies(once, folders, sources, options.rounds)
            with busy():
                beside = latencies(once, folders, sources, options.rounds)
            results[f"latency, beam {beam}"] = {"alone": alone, "beside a busy process": beside}
            for name in alone:
                lines.append([str(beam), name, *map(timing.duration, (*alone[name], *beside[name]))])
        print()
        print(timing.markdown(lines))
    if options.json:
        timing.save(options.json, results)


if __name__ == "__main__":
    main()
