"""A language model, its vocabulary and the searches as one thing that takes a prompt and says how it goes on."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from dataclasses import fields
from hashlib import sha256
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Protocol, Unpack, cast, overload

import torch
from torch import Tensor, nn

from weft.api.look import KINDS, Look, of_continuation, way_of
from weft.api.results import Candidate, Choice, Continuation
from weft.api.search import Search, SearchKeys, batches, known, make_search, windows
from weft.api.walk import walk
from weft.config import BOS, UNK, GPTConfig, Recipe
from weft.decoding.options import Hypothesis
from weft.decoding.sampling import SamplingOptions
from weft.decoding.score import score
from weft.decoding.sliding import Sliding
from weft.decoding.steps import begin, padded, predict, searching, top
from weft.interop.published import write_published
from weft.models.contract import Seq2Seq
from weft.models.gpt import GPT
from weft.observe import record
from weft.views.stream import Walk

WINDOW = 64  # prompts that are read before the first of them goes on
WALKED = 256  # the longest prompt of a walk, in tokens
_BEFORE = 32  # so many tokens of a prompt are decoded with what follows
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_NOT_OF_A_DRAW = ("n", "stop", "max_tokens", "beam")  # options that say nothing of how one token is drawn


class Options(SearchKeys, total=False):
    """What can be asked of a continuation, besides ``SearchKeys``. Left out or None: as the model's recipe says.

    Attributes:
        n: how many continuations of each prompt, most probable first.
        max_tokens: so many tokens at most; ``decoding.max_extra`` of the recipe.
        stop: a text, or several, at which a continuation ends; it does not belong to its ``text``, but its tokens are
            among the ``ids``, and count for the log-probability.
    """

    n: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None


class Vocabulary(Protocol):
    """What is asked of a vocabulary: weft's own tokenizers, and published ones."""

    @property
    def vocab_size(self) -> int:
        """How many tokens there are."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, without BOS and EOS."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens."""

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """A label for each token."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a tokenizer.json."""


class LanguageModel:
    """A language model with its vocabulary and searches.

    A text may grow beyond the model's context: then the model sees only the last part of it (see
    ``weft.decoding.sliding``).

    Attributes:
        model: the nn.Module, which fulfils ``weft.models.contract.Seq2Seq``; a prompt is its source.
        recipe: what it was trained by; its ``decoding`` section holds the defaults of every search.
        vocabulary: text to tokens and back.
        opening: the tokens that the model puts before every prompt.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, vocabulary: Vocabulary, opening: Sequence[int] = ()) -> None:
        self.model, self.recipe, self.vocabulary, self.opening = model, recipe, vocabulary, tuple(opening)
        self._bare = cast(Seq2Seq, model)
        self._size = len(cast(GPT, model).embedding)
        self._endless = cast(Seq2Seq, Sliding(model)) if self._bare.max_len is not None else self._bare

    @classmethod
    def trained(cls, model: nn.Module, recipe: Recipe, vocabulary: Vocabulary) -> LanguageModel:
        """One that weft trained, with its recipe's specials."""
        cast(Seq2Seq, model).specials = recipe.specials
        return cls(model, recipe, vocabulary, (BOS,) if recipe.data.sample == "documents" else ())

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        size = self._bare.max_len
        context = f", context {size:,}" if size is not None else ""
        return f"LanguageModel({self.recipe.name or 'gpt'}, {count:,} parameters{context})"

    @overload
    def generate(self, prompt: str, **options: Unpack[Options]) -> Continuation: ...

    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **options: Unpack[Options]) -> list[Continuation]: ...

    def generate(
        self, prompt: str | list[str] | tuple[str, ...], **options: Unpack[Options]
    ) -> Continuation | list[Continuation]:
        """Say how a prompt goes on, or each of a list of prompts, of any lengths.

        A draw follows from the seed, the prompt and the number of the draw: what stands beside a prompt changes
        nothing of its continuation (to the last bit with ``exact=True``). A prompt that is given twice is drawn from
        twice.

        Args:
            prompt: what to go on from.
            options: see ``Options``.

        Returns:
            A continuation, or a list of them in the order of the prompts.

        Raises:
            ValueError: if an option is unknown or out of range, or a prompt is empty and the model has nothing to
                begin a text with.
        """
        texts = [prompt] if isinstance(prompt, str) else list(prompt)
        search, stops = self.search(**options)
        found = self._generated(texts, self._encoded(texts), search, stops)
        return found[0] if isinstance(prompt, str) else found

    def generate_lines(
        self, prompts: Iterable[str], window: int = WINDOW, **options: Unpack[Options]
    ) -> Iterator[Continuation]:
        """Go on from each of a stream of prompts, in their order, holding no more than a window of them.

        Raises:
            ValueError: as ``generate``.
        """
        search, stops = self.search(**options)
        return (
            found
            for some in windows(iter(prompts), window)
            for found in self._generated(some, self._encoded(some), search, stops)
        )

    def stream(self, prompt: str, **options: Unpack[Options]) -> Iterator[str]:
        """The text of one continuation, piece by piece, as it comes.

        Raises:
            ValueError: as ``generate``; or if a beam is asked for, which has no text before its end.
        """
        search, stops = self.search(**options)
        if search.sampling is None and search.options.beam > 1:
            raise ValueError(f"a beam of {search.options.beam} has no text before its end: expected beam 1, or a draw")
        if search.sampling is not None and search.sampling.samples > 1:
            raise ValueError(f"one continuation can be streamed, not {search.sampling.samples}")
        return _streamed(lambda tell: self._generated([prompt], self._encoded([prompt]), search, stops, tell))

    def score(self, text: str, prompt: str = "") -> Continuation:
        """How probable the model finds a text after a prompt, in all and by token (``n_best[0].token_log_probs``).

        Raises:
            ValueError: if there is nothing before the text's first token.
        """
        (before,) = self._encoded([prompt])
        whole = [*self.opening, *self.vocabulary.encode_batch([prompt + text])[0]]
        if whole[: len(before)] != before:  # the text changes how the prompt's end is cut into tokens
            whole = [*before, *self.vocabulary.encode_batch([text])[0]]
        row = torch.tensor([before])
        (found,) = score(self._endless, row, [whole[len(before) :]], self.search()[0].options, finished=False)
        return Continuation(prompt, tuple(before), (self._candidate(found, text),), self)

    def next(self, prompt: str, k: int = 10) -> list[Choice]:
        """The k most probable next tokens after a prompt, and their probabilities.

        Raises:
            ValueError: if the prompt is empty and the model has nothing to begin a text with.
        """
        source = torch.tensor(self._encoded([prompt]))
        with searching(self._endless, exact=False):
            state = begin(self._endless, source)
            hidden, _ = self._endless.step(self._endless.first(source)[:, None], state)
            log_probs = predict(self._endless, hidden[:, -1])
            values, tokens = top(log_probs, min(k, log_probs.shape[1]))
        labels = self.labels(tokens[0].tolist())
        return [Choice(label, value) for label, value in zip(labels, values[0].exp().tolist(), strict=True)]

    def walk(self, prompt: str, **options: Unpack[Options]) -> Walk:
        """Everything that happens from a prompt to the next token, every number that the model made on the way.

        Args:
            prompt: a text of at most 256 tokens, which fits into the context.
            options: of the draw of the next token.

        Raises:
            ValueError: if the prompt is longer, or an option is not of the next token; and as ``generate``.
        """
        if wrong := [name for name in _NOT_OF_A_DRAW if options.get(name) is not None]:
            raise ValueError(f"{', '.join(wrong)}: a walk goes to the next token only")
        search, _ = self.search(**options)
        (row,) = self._encoded([prompt])
        if len(row) > WALKED:
            raise ValueError(
                f"a walk keeps every number of every head: expected at most {WALKED} tokens, not {len(row)}"
            )
        likeliest = SamplingOptions(top_k=1)
        assert isinstance(self.model, GPT)
        drawn = search.sampling or likeliest
        return walk(self.model, row, self.labels, drawn, search.options, _numbers([row])[0])

    def look(self, prompt: str, **options: Unpack[Options]) -> Look:
        """Everything that the model looks at while it goes on from a prompt.

        Args:
            prompt: what to go on from; with the continuation it must fit into the context.
            options: of the search; ``max_tokens`` is at most what the context has room for.

        Raises:
            ValueError: if several continuations are asked for, or the prompt fills the context; and as ``generate``.
        """
        if options.get("n") not in (None, 1):
            raise ValueError(f"n={options['n']}: one continuation can be looked at")
        (row,) = self._encoded([prompt])
        search, _ = self.search(**options)
        if self._bare.max_len is not None:
            room = self._bare.max_len - len(row)
            if room < 1:
                raise ValueError(f"the prompt has {len(row)} tokens, and the context ends at {self._bare.max_len}")
            options["max_tokens"] = min(search.options.max_extra, room)
        drawn = {key: value for key, value in options.items() if key not in _NOT_OF_A_DRAW}
        with record(self.model, kinds=KINDS) as seen:
            found = self.generate(prompt, **options)
        way = way_of(search)
        walked = way != "beam" and len(row) <= WALKED  # a beam's first token is not chosen when it is said
        return of_continuation(seen, found, way, self.walk(prompt, **cast(Options, drawn)) if walked else None)

    def export(self, path: str | os.PathLike[str]) -> str:
        """Write the model for others: a folder of transformers, or a file of llama2.c if the path ends with .bin.

        Returns:
            What was written, for people.

        Raises:
            ValueError: if such a format has no place for this model.
            OSError: if it cannot be written.
        """
        model, config = self.model, self.recipe.model
        assert isinstance(model, GPT)
        assert isinstance(config, GPTConfig)
        return write_published(path, model, config, self.vocabulary, self.opening)

    def search(self, **options: Unpack[Options]) -> tuple[Search, tuple[str, ...]]:
        """The search that these options and the recipe's defaults ask for, and the stop strings.

        Raises:
            ValueError: if an option is unknown or out of range.
        """
        given = known(options, Options)
        stop = given.pop("stop", ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in stops:
            raise ValueError("a stop must be some text: every text has '' in it")
        if "max_tokens" in given:
            given["max_extra"] = given.pop("max_tokens")
        if given.get("temperature") == 0.0:  # what many mean by it; nothing is drawn then
            for key in fields(SamplingOptions):
                given.pop(key.name, None)
            given["sample"] = False
        n = given.pop("n", 1)
        search = make_search(self.recipe.decoding, given, n)
        if stops and search.sampling is None and search.options.beam > 1:
            raise ValueError("stop is for draws and greedy search: a beam has no single text before its end")
        return search, stops

    def _encoded(self, prompts: Sequence[str]) -> list[list[int]]:
        """The tokens of each prompt, what the model puts before it among them; at least one."""
        rows = [[*self.opening, *ids] for ids in self.vocabulary.encode_batch(prompts)]
        for prompt, row in zip(prompts, rows, strict=True):
            if row and max(row) >= self._size:
                label = self.vocabulary.tokens([max(row)])[0]
                raise ValueError(
                    f"the model has no embedding for {label!r}, which the prompt {prompt[:40]!r} has in it"
                )
        return [row or self._beginning() for row in rows]

    def labels(self, ids: Sequence[int]) -> list[str]:
        """A label for each token; a number for those that only round the size of the model up."""
        known = self.vocabulary.vocab_size
        return [self.vocabulary.tokens([number])[0] if number < known else f"#{number}" for number in ids]

    def _beginning(self) -> list[int]:
        """What stands before a text of which nothing is given: the end of another, or of a line."""
        specials = self._bare.specials
        if specials.eos not in specials.never:
            return [specials.bos]
        (line,) = self.vocabulary.encode_batch(["\n"])
        if not line or UNK in line:
            raise ValueError("the prompt is empty, and this model has no token that begins a text: give some text")
        return line

    def _generated(
        self,
        prompts: Sequence[str],
        rows: Sequence[Sequence[int]],
        search: Search,
        stops: Sequence[str],
        tell: Callable[[str], None] | None = None,
    ) -> list[Continuation]:
        """Each prompt's continuations, in order: prompts of like length go on together."""
        found: list[list[Candidate]] = [[]] * len(rows)
        numbers = _numbers(rows)
        most = self._bare.max_len or math.inf  # a row's memory grows with its text, up to the context
        sizes = [int(min(len(row) + search.options.max_extra, most)) for row in rows]
        for places in batches(range(len(rows)), sizes, search.source_tokens):
            source = padded([rows[place] for place in places], torch.device("cpu"), self._bare.specials.pad)
            texts = [_Text(self.vocabulary, rows[place], stops) for place in places]
            copies = search.sampling.samples if search.sampling else 1
            watch = _watching(texts, copies, tell) if stops or tell else None
            results = search.run(self._endless, source, numbers=[numbers[place] for place in places], watch=watch)
            for place, text, best in zip(places, texts, results, strict=True):
                made = [self._candidate(each, text.of(each.tokens)[0]) for each in best]
                found[place] = sorted(made, key=lambda candidate: -candidate.score)
                if tell:
                    tell(made[0].text)
        return [
            Continuation(prompt, tuple(row), tuple(best), self)
            for prompt, row, best in zip(prompts, rows, found, strict=True)
        ]

    def _candidate(self, found: Hypothesis, text: str) -> Candidate:
        return Candidate(
            text,
            found.score,
            found.log_prob,
            found.tokens,
            found.token_log_probs,
            found.finished,
            self.vocabulary,
        )


def _numbers(rows: Sequence[Sequence[int]]) -> list[int]:
    """A number for each prompt by which its random stream is known: of the same prompt the next free one."""
    seen: Counter[int] = Counter()
    numbers = []
    for row in rows:
        key = int.from_bytes(sha256(str(list(row)).encode()).digest()[:7], "big")
        numbers.append(key + seen[key])
        seen[key] += 1
    return numbers


class _Text:
    """The continuations of one prompt as text."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self.vocabulary, self.prompt, self.stops = vocabulary, list(prompt[-_BEFORE:]), stops
        self.before = vocabulary.decode(self.prompt)

    def of(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """What these tokens add to the prompt's text, up to a stop, and whether there was one.

        The prompt's end is decoded with them, since the space before a word may be part of it only behind another.
        """
        whole = self.vocabulary.decode([*self.prompt, *tokens])
        text = whole.removeprefix(self.before) if whole.startswith(self.before) else self.vocabulary.decode(tokens)
        ends = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return (text[: min(ends)], True) if ends else (text, False)

    def settled(self, tokens: Sequence[int]) -> str:
        """The text so far without what may yet change: half a character, or the beginning of a stop.

        Tokens of one byte are read together: a byte that does not fit changes how all before it are shown.
        """
        text, stopped = self.of(tokens)
        if stopped:
            return text
        count = len(tokens)
        while count and _BYTE.fullmatch(self.vocabulary.tokens(tokens[count - 1 : count])[0]):
            count -= 1
        text = text if count == len(tokens) else self.of(tokens[:count])[0]
        text = text.rstrip("\ufffd")
        longest = max((_overlap(text, stop) for stop in self.stops), default=0)
        return text[: len(text) - longest]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of a stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def _watching(texts: Sequence[_Text], copies: int, tell: Callable[[str], None] | None) -> Callable[..., Tensor | None]:
    """Looks at each path after each token: tells the text so far, and ends what has come to a stop."""

    def watch(rows: Tensor, tokens: Tensor) -> Tensor | None:
        own = [texts[row // copies] for row in rows.tolist()]
        if tell:
            tell(own[0].settled(tokens[0].tolist()))
        if not own[0].stops:
            return None
        return torch.tensor([text.of(path)[1] for text, path in zip(own, tokens.tolist(), strict=True)])

    return watch


def _streamed(run: Callable[[Callable[[str], None]], Any]) -> Iterator[str]:
    """What ``run`` tells, as growing texts, in the pieces by which they grow. If nobody reads on, it stops."""
    queue: SimpleQueue[str | BaseException | None] = SimpleQueue()
    left = Event()

    def tell(text: str) -> None:
        if left.is_set():
            raise _LeftError
        queue.put(text)

    def work() -> None:
        try:
            run(tell)
            queue.put(None)
        except BaseException as error:  # it is the reader's
            queue.put(error)

    thread = Thread(target=copy_context().run, args=(work,), name="generate", daemon=True)  # observers hear it too
    thread.start()
    sent = 0
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            if len(item) > sent:
                yield item[sent:]
                sent = len(item)
    finally:
        left.set()
        thread.join()


class _LeftError(Exception):
    """Nobody reads the stream any more."""
