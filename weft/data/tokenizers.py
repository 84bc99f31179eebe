"""Text to tokens and back, over the ``tokenizers`` library.

    bpe, unigram   pieces of words; what has no piece is spelled in bytes, so any Unicode text comes back as it was
    word           what stands between two spaces
    char           one code point each

Every vocabulary opens with the specials ``<pad> <s> </s> <unk>`` = PAD, BOS, EOS, UNK. No text spells them: a text with
``<s>`` in it has these three characters in it. A space belongs to the word behind it, and the first word of a text gets
one, which decoding takes away again; so a word is the same token at the start of a sentence and inside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import chain, groupby
from math import inf, log, log1p
from pathlib import Path
from random import Random
from typing import Any, Self

from tokenizers import Encoding, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Rust

from weft.config import BOS, EOS, PAD, UNK, TokenizerConfig

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
JOINT, SIDES = "tokenizer.json", ("tokenizer.source.json", "tokenizer.target.json")

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
# Letters, numbers and the rest share no piece: no comma clings to a word, and neither "<s>" nor "<0x41>" is one piece.
_WORDS = pre_tokenizers.Split(Regex(r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^ \p{L}\p{M}\p{N}]+| "), "isolated")
_SPACES = pre_tokenizers.Split(" ", "merged_with_next")
_OPENED = normalizers.Prepend(" ")

if hasattr(os, "register_at_fork"):  # a forked process has none of the library's threads, and would wait for them
    os.register_at_fork(after_in_child=partial(os.environ.__setitem__, "TOKENIZERS_PARALLELISM", "false"))


class Tokenizer:
    """Text to token numbers and back. Made by ``train_tokenizer`` or ``Tokenizer.load``."""

    def __init__(self, rust: Rust) -> None:
        """Wrap a tokenizer of the library whose specials are at 0 to 3."""
        rust.encode_special_tokens = True  # means: a text that spells a special is text
        self._rust = rust

    @cached_property
    def kind(self) -> str:
        """bpe, unigram, word or char; or wordpiece, for one that was made elsewhere."""
        model = self._tree["model"]
        if model["type"] == "BPE":
            return "bpe" if model["merges"] or model["byte_fallback"] else "char"
        return {"Unigram": "unigram", "WordLevel": "word", "WordPiece": "wordpiece"}[model["type"]]

    @cached_property
    def vocab_size(self) -> int:
        """How many tokens there are, the specials among them."""
        return self._rust.get_vocab_size()

    def encode(self, text: str, strict: bool = False) -> list[int]:
        """The tokens of a text, without BOS and EOS.

        Args:
            text: any text.
            strict: whether a word or character without a token is an error; else it is UNK.

        Raises:
            ValueError: naming the unknown word or character; or if the text has half a surrogate pair in it.
        """
        [ids] = self.encode_batch([text])
        if strict and UNK in ids:
            raise ValueError(f"{_named(self.unknown(text)[0])} is none of the {self.vocab_size:,} known tokens")
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, on all cores (on one in a forked process, or if TOKENIZERS_PARALLELISM is false)."""
        return [encoding.ids for encoding in _encoded(self._rust.encode_batch_fast, texts)]

    def encode_dropout(self, texts: Sequence[str], p: float, seed: int | Sequence[int]) -> list[list[int]]:
        """The tokens of each text where each merge is left out with probability p (BPE dropout, Provilkov et al. 2020).

        What comes out follows from p, the text and its seed, whatever else is in the batch. p = 1 leaves characters.

        Args:
            texts: any texts.
            p: from 0 to 1.
            seed: one for all texts, or one for each.

        Raises:
            ValueError: if p > 0 and the tokenizer has no merges, or the seeds are not as many as the texts.
        """
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"the dropout of merges must be from 0 to 1, not {p}")
        seeds = [seed] * len(texts) if isinstance(seed, int) else seed
        if len(seeds) != len(texts):
            raise ValueError(f"expected a seed for each of the {len(texts)} texts, not {len(seeds)}")
        if p == 0.0:
            return self.encode_batch(texts)
        if self.kind != "bpe":
            raise ValueError(f"only bpe has merges to leave out: expected dropout 0 for {self.kind}, not {p}")
        return self._dropout.encode(texts, p, seeds)

    def decode(self, ids: Sequence[int], unknown: str | Sequence[str] = "") -> str:
        """The text of the tokens; specials have none.

        Args:
            ids: from 0 to vocab_size − 1.
            unknown: words to put for UNK: one for all, or one for each.

        Raises:
            ValueError: if a number is no token, or the words are not as many as the unknown tokens.
        """
        self._check(ids)
        if not unknown:
            return self._rust.decode(ids)
        missing = sum(number == UNK for number in ids)
        words = [unknown] * missing if isinstance(unknown, str) else unknown
        if len(words) != missing:
            raise ValueError(f"expected a word for each of the {missing} unknown tokens, not {len(words)}")
        parts, rest = [], iter(words)
        for is_unknown, run in groupby((n for n in ids if n not in (PAD, BOS, EOS)), UNK.__eq__):
            tokens = list(run)
            parts += [next(rest) for _ in tokens] if is_unknown else [self._rust.decode(tokens)]
        return ("" if self.kind == "char" else " ").join(parts)

    def tokens(self, ids: Sequence[int]) -> list[str]:
        r"""A label for each token, to be read in pictures.

        The space before a word shows as ``▁`` (the words of a word tokenizer go without), what cannot be printed as in
        Python (``\n``, ``\u200b``), and a byte as ``<0x0A>``.

        Raises:
            ValueError: if a number is no token.
        """
        self._check(ids)
        return [self._label(self._rust.id_to_token(number) or "") for number in ids]

    def unknown(self, text: str) -> list[str]:
        """The words or characters of the text that have no token, each once."""
        [encoding] = _encoded(self._rust.encode_batch, [text])
        places = (place for place, number in zip(encoding.offsets, encoding.ids, strict=True) if number == UNK)
        return list(dict.fromkeys(text[start:stop].strip(" ") or " " for start, stop in places))

    def fingerprint(self) -> str:
        """A hash that is the same for tokenizers that give the same tokens."""
        return hashlib.sha256(self._rust.to_str().encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json. What was there stays until the new one is whole."""
        part = Path(f"{os.fspath(path)}.part")
        part.write_bytes(self._rust.to_str(pretty=True).encode())
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a tokenizer.json. It is data: nothing in it is run.

        One that was made elsewhere is fitted in, and a warning says what that took: its specials move to 0 to 3 under
        their own names, or are added, and it no longer cuts, pads or draws.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it is no tokenizer.json.
        """
        try:
            rust = _parsed(_closed(Path(path).read_text(encoding="utf-8")))
            tree = json.loads(rust.to_str())
            fitted, changes = _fit(tree)
            made = cls(rust if fitted == tree else _parsed(json.dumps(fitted)))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)} is no tokenizer.json: {error}") from None
        if changes:
            warnings.warn(f"{os.fspath(path)}: {', '.join(changes)}", stacklevel=2)
        return made

    def __reduce__(self) -> tuple[Callable[[str], Tokenizer], tuple[str]]:
        """Pickled as JSON."""
        return _from_json, (self._rust.to_str(),)

    def __repr__(self) -> str:
        """Kind and size."""
        return f"Tokenizer({self.kind}, {self.vocab_size:,} tokens)"

    @property
    def _tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = json.loads(self._rust.to_str())
        return tree

    @cached_property
    def _dropout(self) -> _Dropout:
        return _Dropout(self._rust, self._tree["model"])

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(self._tree["decoder"])

    def _check(self, ids: Sequence[int]) -> None:
        for number in ids:
            if not 0 <= number < self.vocab_size:
                raise ValueError(f"a token is a number from 0 to {self.vocab_size - 1}, not {number}")

    def _label(self, piece: str) -> str:
        if self._byte_level:
            piece = self._rust.decoder.decode([piece])
        if self.kind == "word" and piece != " ":
            piece = piece.removeprefix(" ")
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in piece)
        return "".join(shown).replace(" ", "▁")


@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of the two sides; one and the same where the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    @property
    def joint(self) -> bool:
        """Whether both sides have one vocabulary."""
        return self.source is self.target

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, or tokenizer.source.json and tokenizer.target.json, in place of any that were there."""
        made = {JOINT: self.source} if self.joint else dict(zip(SIDES, (self.source, self.target), strict=True))
        for name, tokenizer in made.items():
            tokenizer.save(Path(folder, name))
        for name in {JOINT, *SIDES} - made.keys():
            Path(folder, name).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Read what ``save`` wrote.

        Raises:
            OSError: if a file is missing or cannot be read.
            ValueError: if one is no tokenizer.json.
        """
        if Path(folder, JOINT).exists():
            both = Tokenizer.load(Path(folder, JOINT))
            return cls(both, both)
        if not any(Path(folder, name).exists() for name in SIDES):
            raise FileNotFoundError(f"{os.fspath(folder)} has neither {JOINT} nor {' and '.join(SIDES)}")
        return cls(*(Tokenizer.load(Path(folder, name)) for name in SIDES))

    def fingerprint(self) -> str:
        """A hash that is the same for pairs that give the same tokens."""
        both = f"{self.joint} {self.source.fingerprint()} {self.target.fingerprint()}"
        return hashlib.sha256(both.encode()).hexdigest()


def make_pair(
    config: TokenizerConfig, sources: Callable[[], Iterable[str]], targets: Callable[[], Iterable[str]]
) -> TokenizerPair:
    """The tokenizers that a recipe asks for: read from ``config.path``, or trained.

    Args:
        config: of the recipe.
        sources: gives the lines of the source side, from the first one on.
        targets: gives those of the target side.

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
        made = [train_tokenizer(chain(sources(), targets()), config)]
    else:
        made = [train_tokenizer(lines(), config) for lines in (sources, targets)]
    for tokenizer in made:
        if config.dropout and tokenizer.kind != "bpe":
            what = f"expected 0.0 for {tokenizer.kind}, not {config.dropout}"
            raise ValueError(f"tokenizer.dropout leaves out merges, which only bpe has: {what}")
    return TokenizerPair(made[0], made[-1])


_COUNTED = 1 << 21  # so many different words are counted; beyond that the rarest so far are forgotten
_SEEDS = 2  # a unigram vocabulary is chosen from so many times as many pieces; with 4 it takes twice as long
_STUDIED = 1 << 20  # and by so many characters of the most frequent words


def train_tokenizer(lines: Iterable[str], config: TokenizerConfig) -> Tokenizer:
    """A tokenizer of ``config.kind`` with at most ``config.vocab_size`` tokens, from lines that are gone through once.

    The lines are not kept, only their different words. The same lines in any order give the same tokenizer. bpe and
    unigram give at most half of their room to single characters; rarer ones are spelled in bytes.

    Raises:
        ValueError: if the vocabulary has no room for the specials and the bytes.
    """
    if config.kind == "char":
        characters: set[str] = set()
        for line in lines:
            characters.update(line)
        _unicode(characters)
        vocab = _numbered([*SPECIALS, *sorted(characters)])
        return _built(models.BPE(vocab, [], unk_token=SPECIALS[UNK]), None)
    # A lone space, which is the empty word between two spaces, always has a token.
    first = [*SPECIALS, " "] if config.kind == "word" else [*SPECIALS, *_BYTES]
    room = config.vocab_size - len(first)
    if room < 0:
        what = f"{config.kind} starts from {len(first)} specials and bytes"
        raise ValueError(f"tokenizer.vocab_size must be at least {len(first)}, since {what}, not {config.vocab_size}")
    words = _counted(lines)
    _unicode(words)
    if config.kind == "word":
        known = sorted(words.keys() - {""}, key=lambda word: (-words[word], word))[:room]
        vocab = _numbered([*first, *(f" {word}" for word in known)])
        return _built(models.WordLevel(vocab, unk_token=SPECIALS[UNK]), _SPACES)
    pieces = _pieces(words, (room + 1) // 2)
    if config.kind == "bpe":
        vocab, merges = _bpe(pieces, config.vocab_size)
        return _built(models.BPE(vocab, merges, unk_token=SPECIALS[UNK], byte_fallback=True), _WORDS)
    seeds, _ = _bpe(pieces, len(first) + _SEEDS * room)
    scored = [*((token, 0.0) for token in first), *_unigram(pieces, list(seeds)[len(first) :], room)]
    return _built(models.Unigram(scored, unk_id=UNK, byte_fallback=True), _WORDS)


def _numbered(tokens: Iterable[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}


def _built(model: models.Model, pre_tokenizer: pre_tokenizers.PreTokenizer | None) -> Tokenizer:
    """The tokenizer of a model. With a pre-tokenizer, a space opens every word; without, text is taken as it is."""
    rust = Rust(model)
    rust.add_special_tokens(list(SPECIALS))
    rust.decoder = decoders.Fuse()
    if pre_tokenizer is not None:
        rust.normalizer = _OPENED
        rust.pre_tokenizer = pre_tokenizer
        rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return Tokenizer(rust)


def _counted(lines: Iterable[str]) -> Counter[str]:
    """How often each word stands between two spaces."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(line.split(" "))
        floor = 1
        while len(counts) > _COUNTED:
            counts = Counter({word: count for word, count in counts.items() if count > floor})
            floor += 1
    return counts


def _pieces(words: Counter[str], num_characters: int) -> dict[str, int]:
    """How often each piece occurs, inside which tokens are sought, cut at all but so many most frequent characters."""
    counts: Counter[str] = Counter({" ": 1})
    for word, count in words.items():
        for piece, _ in _WORDS.pre_tokenize_str(f" {word}"):
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


def _bpe(pieces: dict[str, int], vocab_size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary of at most so many tokens, specials and bytes first, and the merges."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=[*SPECIALS, *_BYTES], show_progress=False
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


class _Dropout:
    """Byte pair encoding that leaves out merges: the library's own draws from a generator that takes no seed."""

    def __init__(self, rust: Rust, model: dict[str, Any]) -> None:
        self._rust = rust
        vocab, prefix = model["vocab"], len(model["continuing_subword_prefix"] or "")
        self._merges: dict[tuple[int, int], tuple[int, int]] = {  # (left, right) -> (rank, what they become)
            (vocab[left], vocab[right]): (rank, vocab[left + right[prefix:]])
            for rank, (left, right) in enumerate(model["merges"])
        }
        self._parts = {into: pair for pair, (_, into) in self._merges.items()}
        self._known: dict[int, list[int]] = {}

    def encode(self, texts: Sequence[str], p: float, seeds: Sequence[int]) -> list[list[int]]:
        """The tokens of each text, which has its own coins."""
        rows = []
        for text, seed, encoding in zip(texts, seeds, _encoded(self._rust.encode_batch, texts), strict=True):
            coins, ids, start = _Coins(p, f"{seed} {text}"), encoding.ids, 0
            row: list[int] = []
            for _, word in groupby(encoding.word_ids):
                stop = start + sum(1 for _ in word)
                tokens, start = ids[start:stop], stop
                symbols = [symbol for token in tokens for symbol in self._symbols(token)]
                merges = len(symbols) - len(tokens)
                if coins.heads >= merges:  # none of them is left out
                    coins.heads -= merges
                    row += tokens
                else:
                    row += self._merged(symbols, coins)
            rows.append(row)
        return rows

    def _symbols(self, token: int) -> list[int]:
        """What a token was made of by merges, in the end."""
        if token not in self._known:
            parts = self._parts.get(token)
            self._known[token] = [symbol for part in parts for symbol in self._symbols(part)] if parts else [token]
        return self._known[token]

    def _merged(self, symbols: Sequence[int], keep: Callable[[], bool]) -> list[int]:
        """The word after its merges: the lowest rank first, then the leftmost.

        Before each merge, all that are possible are drawn for anew, in their order up to the first that is kept.
        """
        ids, length = list(symbols), len(symbols)
        left, right = list(range(-1, length - 1)), list(range(1, length + 1))
        queue: list[tuple[int, int, int, int, int]] = []

        def offer(place: int) -> None:
            if place >= 0 and right[place] < length:
                pair = ids[place], ids[right[place]]
                if pair in self._merges:
                    rank, into = self._merges[pair]
                    heappush(queue, (rank, place, *pair, into))

        for place in range(length):
            offer(place)
        passed_over = []
        while queue:
            merge = heappop(queue)
            _, place, *pair, into = merge
            other = right[place]
            if other >= length or [ids[place], ids[other]] != pair:
                continue  # one of the two is part of something else by now
            if not keep():
                passed_over.append(merge)
                continue
            ids[place], ids[other], right[place] = into, -1, right[other]
            if right[place] < length:
                left[right[place]] = place
            offer(left[place])
            offer(place)
            while passed_over:
                heappush(queue, passed_over.pop())
        return [number for number in ids if number >= 0]


class _Coins:
    """Coins that fall on tails with probability p, drawn as the lengths of the runs of heads."""

    def __init__(self, p: float, seed: str) -> None:
        self._random = Random(seed).random
        self._log_heads = log1p(-p) if p < 1.0 else -inf
        self.heads = self._run()

    def __call__(self) -> bool:
        """Whether the next one falls on heads."""
        if self.heads:
            self.heads -= 1
            return True
        self.heads = self._run()
        return False

    def _run(self) -> int:
        return int(min(log(1.0 - self._random()) / self._log_heads, 1e18))


def _encoded(encode: Callable[..., list[Encoding]], texts: Sequence[str]) -> list[Encoding]:
    try:
        return encode(texts, add_special_tokens=False)
    except TypeError:
        _unicode(texts)
        raise


def _unicode(texts: Iterable[str]) -> None:
    """Raise ValueError if one of the texts is none."""
    for text in texts:
        if half := re.search("[\\ud800-\\udfff]", text):
            raise ValueError(f"expected Unicode text, but {text[:80]!r} has half a surrogate pair at {half.start()}")


def _named(unknown: str) -> str:
    return f"the character {unknown!r} (U+{ord(unknown):04X})" if len(unknown) == 1 else f"the word {unknown!r}"


def _parsed(text: str) -> Rust:
    try:
        return Rust.from_str(text)
    except Exception as error:  # the library raises no other kind
        raise ValueError(" ".join(str(error).split())) from None


def _from_json(text: str) -> Tokenizer:
    return Tokenizer(_parsed(text))


# What the specials are called elsewhere.
_NAMES = (
    ("<pad>", "[PAD]", "<|pad|>"),
    ("<s>", "[CLS]", "<bos>", "[BOS]"),
    ("</s>", "[SEP]", "<eos>", "[EOS]"),
    ("<unk>", "[UNK]"),
)
_CUTS = ("truncation", "padding", "post_processor")  # what changes the tokens of a text afterwards
_DRAWS = ("dropout", "alpha", "nbest_size")  # what makes a model draw them


def _closed(text: str) -> str:
    """A tokenizer.json without holes between the numbers of its tokens: the library would list them, each by itself."""
    try:
        tree = json.loads(text)
        vocab = tree["model"]["vocab"]
        if not isinstance(vocab, dict) or max(vocab.values(), default=-1) < len(vocab):
            return text
        tree["model"]["vocab"] = _numbered(sorted(vocab, key=lambda piece: vocab[piece]))
        return json.dumps(tree)
    except (KeyError, TypeError, RecursionError):
        raise ValueError("expected a model with a vocabulary") from None


def _fit(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A parsed tokenizer.json with its specials at 0 to 3, that neither cuts, pads nor draws; and what that changed."""
    model = tree["model"]
    scores: dict[str, float] = dict(model["vocab"]) if model["type"] == "Unigram" else {}
    numbers: dict[str, int] = _numbered(scores) if scores else model["vocab"]
    unknown = model["vocab"][model["unk_id"]][0] if scores and model["unk_id"] is not None else model.get("unk_token")
    added = {token["content"]: token for token in tree["added_tokens"]}
    marked = {piece for piece, token in added.items() if token["special"]}
    specials, changes = _specials({piece: token["id"] for piece, token in added.items()} | numbers, marked, unknown)

    others = sorted(numbers.keys() - set(specials), key=lambda piece: numbers[piece])
    placed = _numbered([*specials, *others])
    if any(numbers[piece] != placed[piece] for piece in others):
        changes.append("the other tokens renumbered")
    if scores:
        model = {**model, "vocab": [[piece, scores.get(piece, 0.0)] for piece in placed], "unk_id": UNK}
    else:
        model = {**model, "vocab": dict(placed), "unk_token": specials[UNK]}

    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = {piece: {"content": piece, **flags} for piece in specials}
    tokens |= {piece: token for piece, token in added.items() if piece not in specials}
    for piece in tokens:
        placed.setdefault(piece, len(placed))
    listed = [{**tokens[piece], "id": placed[piece]} for piece in sorted(tokens, key=lambda piece: placed[piece])]

    changes += [f"{key} left out" for key in _CUTS if tree[key] is not None]
    changes += [f"{key} left out" for key in _DRAWS if model.get(key) is not None]
    model |= {key: None for key in _DRAWS if key in model}
    fitted = {**tree, **dict.fromkeys(_CUTS), "model": model, "added_tokens": listed}
    return {**fitted, "pre_tokenizer": _guarded(fitted, specials)}, changes


def _specials(there: dict[str, int], marked: set[str], unknown: str | None) -> tuple[list[str], list[str]]:
    """The names of the four specials, of tokens that are there or to be added; and what has to change for them."""
    specials: list[str] = []
    changes = []
    for number, names in enumerate(_NAMES):
        if number == UNK and unknown in there and unknown not in specials:
            names = (unknown,)
        known = [name for name in names if name in there]
        name = next((name for name in known if name in marked), known[0] if known else SPECIALS[number])
        specials.append(name)
        if name not in there:
            changes.append(f"{name} added as {number}")
        elif there[name] != number:
            changes.append(f"{name} moved from {there[name]} to {number}")
    return specials, changes


def _guarded(tree: dict[str, Any], specials: list[str]) -> dict[str, Any] | None:
    """The pre-tokenizer, and behind it one that keeps text that spells a special or a byte from becoming one piece."""
    model: dict[str, Any] = tree["model"]
    pre_tokenizer: dict[str, Any] | None = tree["pre_tokenizer"]
    words, spaces, opened = (json.loads(part.__getstate__()) for part in (_WORDS, _SPACES, _OPENED))
    if pre_tokenizer in (words, spaces) and tree["normalizer"] == opened and specials == [*SPECIALS]:
        return pre_tokenizer
    if model["type"] == "BPE" and not model["merges"]:  # its tokens are single characters
        return pre_tokenizer
    ends = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in specials if len(name) > 1]
    pattern = "|".join([*ends, "<(?=0x[0-9A-F]{2}>)"])  # the first character, if the others follow
    guard = json.loads(pre_tokenizers.Split(Regex(pattern), "isolated").__getstate__())
    before = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return {"type": "Sequence", "pretokenizers": before if guard in before else [*before, guard]}
