"""Choosing a vocabulary: tokenizers trained on text, or the ones that a recipe names."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from math import inf, log
from pathlib import Path

from tokenizers import Tokenizer as Rust
from tokenizers import decoders, models, pre_tokenizers, trainers

from weft import __version__
from weft.config import UNK, TokenizerConfig
from weft.data.disk import digest, once
from weft.data.tokenizer_file import OPENED, SPACES, SPECIALS, WORDS, numbered
from weft.data.tokenizers import Tokenizer, TokenizerPair, check_unicode, tag_token

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_COUNTED = 1 << 20  # so many different words are counted; beyond that the rarest so far are forgotten
_LEARNED = 1 << 18  # bpe and unigram learn from so many most frequent words, in about 1 KB of memory each
_SEEDS = 2  # a unigram vocabulary is chosen from so many times as many pieces; with 4 it takes twice as long
_STUDIED = 1 << 20  # and by so many characters of the most frequent words


def make_pair(
    config: TokenizerConfig,
    sources: Callable[[], Iterable[str]],
    targets: Callable[[], Iterable[str]],
    tags: Sequence[str] = (),
) -> TokenizerPair:
    """The tokenizers that a recipe asks for: read from ``config.path``, or trained.

    Args:
        config: of the recipe.
        sources: gives the lines of the source side, from the first one on.
        targets: gives those of the target side.
        tags: the languages that sources are marked with; see ``Tokenizer.tags``.

    Raises:
        OSError: if a file that the recipe names cannot be read.
        ValueError: if it is no tokenizer.json, or the recipe asks for what cannot be.
    """
    if config.path:
        given = config.path.split(",") if isinstance(config.path, str) else config.path
        if len(given) != (1 if config.joint else 2):
            what = "one file if tokenizer.joint is true" if config.joint else "two files if tokenizer.joint is false"
            raise ValueError(f"tokenizer.path must name {what}, not {config.path!r}")
        made = [Tokenizer.load(path) for path in given]
    elif config.joint:
        made = [train_tokenizer(chain(sources(), targets()), config, tags)]
    else:
        made = [train_tokenizer(sources(), config, tags), train_tokenizer(targets(), config)]
    if absent := [tag for tag in tags if tag not in made[0].tags]:
        raise ValueError(
            f"{config.path} has no token {tag_token(absent[0])}, with which sources to translate are marked"
        )
    for tokenizer in made:
        if config.dropout and tokenizer.kind != "bpe":
            what = f"expected 0.0 for {tokenizer.kind}, not {config.dropout}"
            raise ValueError(f"tokenizer.dropout leaves out merges, which only bpe has: {what}")
    return TokenizerPair(made[0], made[-1])


def kept_pair(
    config: TokenizerConfig, fingerprint: str, cache: Path, make: Callable[[], TokenizerPair]
) -> TokenizerPair:
    """What ``make`` trains as a recipe asks for; what was trained on the same text before is used again.

    Args:
        config: of the recipe.
        fingerprint: of the text.
        cache: the folder of all that is kept.
        make: trains the tokenizers.
    """

    def train(folder: Path) -> None:
        made = make()
        folder.mkdir()
        made.save(folder)

    wanted = config.model_dump(mode="json")
    return once(cache / f"tokenizers-{digest([__version__, wanted, fingerprint])}", train, TokenizerPair.load)


def train_tokenizer(lines: Iterable[str], config: TokenizerConfig, tags: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of ``config.kind`` with at most ``config.vocab_size`` tokens, from lines that are gone through once.

    A line is a text of its own, whose first word a space opens, unless it begins with a line end: then it goes on.
    The lines are not kept, only their different words; beyond a million of these, the rarest are forgotten on the way.
    Up to there, the same lines in any order give the same tokenizer. bpe and unigram give at most half of their room
    to single characters; rarer ones are spelled in bytes.

    Raises:
        ValueError: if the vocabulary has no room for the specials and the bytes.
    """
    marks = [tag_token(tag) for tag in tags]
    if config.kind == "char":
        characters: set[str] = set()
        for line in lines:
            characters.update(line)
        check_unicode(characters)
        vocab = numbered([*SPECIALS, *marks, *sorted(characters)])
        return _built(models.BPE(vocab, [], unk_token=SPECIALS[UNK]), None, marks)
    # A lone space, which is the empty word between two spaces, always has a token.
    first = [*SPECIALS, *marks, " "] if config.kind == "word" else [*SPECIALS, *marks, *_BYTES]
    room = config.vocab_size - len(first)
    if room < 0:
        what = f"{config.kind} starts from {len(first)} specials and bytes"
        raise ValueError(f"tokenizer.vocab_size must be at least {len(first)}, since {what}, not {config.vocab_size}")
    words, bare = _counted(lines, goes_on=config.kind != "word")
    check_unicode(chain(words, bare))
    if config.kind == "word":
        del words[""]
        vocab = numbered([*first, *(f" {word}" for word in _frequent(words, room))])
        return _built(models.WordLevel(vocab, unk_token=SPECIALS[UNK]), SPACES, marks)
    opened = {f" {word}": count for word, count in _frequent(words, _LEARNED).items()}
    pieces = _pieces({**_frequent(bare, _LEARNED), **opened}, (room + 1) // 2)
    if config.kind == "bpe":
        vocab, merges = _bpe(pieces, first, config.vocab_size)
        return _built(models.BPE(vocab, merges, unk_token=SPECIALS[UNK], byte_fallback=True), WORDS, marks)
    seeds, _ = _bpe(pieces, first, len(first) + _SEEDS * room)
    scored = [*((token, 0.0) for token in first), *_unigram(pieces, list(seeds)[len(first) :], room)]
    return _built(models.Unigram(scored, unk_id=UNK, byte_fallback=True), WORDS, marks)


def _built(model: models.Model, pre_tokenizer: pre_tokenizers.PreTokenizer | None, marks: Sequence[str]) -> Tokenizer:
    """The tokenizer of a model. With a pre-tokenizer, a space opens every word; without, text is taken as it is."""
    rust = Rust(model)
    rust.add_special_tokens([*SPECIALS, *marks])
    rust.decoder = decoders.Fuse()
    if pre_tokenizer is not None:
        rust.normalizer = OPENED
        rust.pre_tokenizer = pre_tokenizer
        rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(rust)


def _counted(lines: Iterable[str], goes_on: bool) -> tuple[Counter[str], Counter[str]]:
    """How often each word stands behind a space, and how often behind a line end, with it, if text goes on there."""
    words: Counter[str] = Counter()
    bare: Counter[str] = Counter()
    for line in lines:
        parts = line.split(" ")
        if goes_on and line.startswith("\n"):
            bare[parts.pop(0)] += 1
        words.update(parts)
        for counts in (words, bare):
            floor = 1
            while len(counts) > _COUNTED:
                for word in [word for word, count in counts.items() if count <= floor]:
                    del counts[word]
                floor += 1
    return words, bare


def _frequent(words: Counter[str], most: int) -> dict[str, int]:
    """The most frequent words; of equally frequent ones, the first in the alphabet."""
    kept = sorted(words, key=lambda word: (-words[word], word))[:most]
    return {word: words[word] for word in kept}


def _pieces(words: Mapping[str, int], num_characters: int) -> dict[str, int]:
    """How often each piece occurs, inside which tokens are sought, cut at all but so many most frequent characters."""
    counts: Counter[str] = Counter({" ": 1})
    for word, count in words.items():
        for piece, _ in WORDS.pre_tokenize_str(word):
            counts[piece] += count
    characters: Counter[str] = Counter()
    for piece, count in counts.items():
        for character in piece:
            characters[character] += count
    known = set(sorted(characters, key=lambda character: (-characters[character], character))[:num_characters])
    kept: Counter[str] = Counter()
    for piece, count in counts.items():
        for is_known, run in groupby(piece, known.__contains__):
            if is_known:
                kept["".join(run)] += count
    return dict(sorted(kept.items()))


def _bpe(pieces: dict[str, int], first: Sequence[str], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary of at most so many tokens, specials, marks and bytes first, and the merges."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=list(first), show_progress=False
    )
    rust = Rust(models.BPE())
    rust.train_from_iterator(_repeated(pieces), trainer)
    model = json.loads(rust.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _repeated(pieces: dict[str, int], most: int = 1000) -> Iterator[list[str]]:
    """Each piece as often as it occurs, some at a time: the trainer takes no counts."""
    for piece, count in pieces.items():
        for done in range(0, count, most):
            yield [piece] * min(most, count - done)


def _unigram(pieces: dict[str, int], seeds: Sequence[str], size: int) -> list[tuple[str, float]]:
    """At most so many of the seeds, with the log-probabilities under which the pieces are most likely (Kudo 2018).

    In turns, each piece is spelled in the likeliest way, the seeds are counted in that, and the quarter of them goes
    that the likelihood misses least. Single characters stay. The library's own trainer takes for seeds what stands in
    two different words, whatever their counts: it has no token for " ." and needs 16.6 tokens a sentence where this one
    needs 13.8 (Multi30k en-de, 10,000 tokens). The order of its threads and hashes decides its last digits.
    """
    studied, left = [], _STUDIED
    for piece, count in sorted(pieces.items(), key=lambda item: (-item[1], item[0])):
        if len(piece) <= left:
            left -= len(piece)
            studied.append((piece, count))
    alive, counts = sorted(seeds), Counter(seeds)
    while True:
        for _ in range(1 if len(alive) > size else 2):
            table = _table(alive, counts)
            counts = Counter()
            for piece, count in studied:
                for part in _spelling(piece, table, len(piece))[1]:
                    counts[part] += count
        table = _table(alive, counts)
        if len(alive) <= size:
            return [(seed, round(table[seed], 6)) for seed in sorted(alive, key=lambda seed: (-table[seed], seed))]
        missed = {
            seed: counts[seed] * (table[seed] - _spelling(seed, table, len(seed) - 1)[0]) if len(seed) > 1 else inf
            for seed in alive
        }
        alive = sorted(sorted(alive, key=lambda seed: (-missed[seed], seed))[: max(size, len(alive) * 3 // 4)])


def _table(seeds: Sequence[str], counts: Counter[str]) -> dict[str, float]:
    """log p of each seed, and −∞ for what only begins one."""
    total = max(1, sum(counts[seed] for seed in seeds))
    table = {seed[:end]: -inf for seed in seeds for end in range(1, len(seed))}
    return table | {seed: log(max(counts[seed], 0.1) / total) for seed in seeds}  # one without use may yet be of use


def _spelling(text: str, table: dict[str, float], longest: int) -> tuple[float, list[str]]:
    """The likeliest way to spell the text in seeds, none longer than so many characters: its log p, and the seeds."""
    best, begin = [0.0, *[-inf] * len(text)], [0] * (len(text) + 1)
    for start, before in enumerate(best):  # nothing changes best[start] any more
        for end in range(start + 1, min(start + longest, len(text)) + 1):
            score = table.get(text[start:end])
            if score is None:
                break
            if before + score > best[end]:
                best[end], begin[end] = before + score, start
    seeds, end = [], len(text)
    while end:
        seeds.append(text[begin[end] : end])
        end = begin[end]
    return best[-1], seeds[::-1]
