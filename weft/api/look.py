"""Everything that a model looked at while it answered one text, as a record that the views draw."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from weft.api.results import Candidate, Continuation, Translation
from weft.api.search import Search
from weft.api.walk import scheme_of
from weft.config import EOS
from weft.models.contract import Seq2Seq
from weft.models.gpt import GPT
from weft.models.transformer import Transformer
from weft.observe import Record, Seen
from weft.views import html, matrix, summaries, terminal
from weft.views.matrix import Matrix
from weft.views.stream import Walk

KINDS = ("weights", "gates", "vectors", "search", "distribution")  # what must be listened for
CANDIDATES = 12  # so many of the likeliest tokens at each step
_SPACE = "▁"  # a tokenizer's label for the space before a word
_CUT_OFF = "…"  # the label of a step whose token was not taken
Labels = Callable[[Sequence[int]], Sequence[str]]


@dataclass(frozen=True, eq=False)
class Look:
    """What a model looked at. It shows itself in a terminal, in a notebook, as a page and as a picture.

    Attributes:
        record: all of it, with token labels.
    """

    record: Record

    @property
    def matrix(self) -> Matrix:
        """The alignment of target and source, or without a source the mean of the last layer's heads."""
        return self.aligned()

    def aligned(self, words: bool = False) -> Matrix:
        """The matrix; between whole words instead of their pieces, if so asked and where the tokens tell of words.

        Raises:
            ValueError: if no attention was recorded.
        """
        attentions = self.record.of_kind("weights")
        if not attentions:
            raise ValueError("no attention was recorded: the model has none, or the record is of something else")
        cross = [entry for entry in attentions if entry.role == "cross"]
        if not cross:
            last = attentions[-1]
            return matrix.of(last, allowed=last.values.get("allowed"))
        cross = [entry for entry in cross if entry.weights.shape[2:] == cross[0].weights.shape[2:]]
        weights = torch.stack([summaries.mean_of_heads(entry)[0] for entry in cross]).mean(0)
        rows: Sequence[str] | None = cross[0].queries
        columns: Sequence[str] | None = cross[0].keys
        known = self.record.about.get("words", {})
        if words and {"source", "target"} <= known.keys():
            weights = summaries.by_words(weights, known["target"], known["source"])
            rows, columns = _joined(rows or (), known["target"]), _joined(columns or (), known["source"])
        what = "word" if words else "token"
        caption = f"where each target {what} looked: attention to the source, mean over heads and layers, after softmax"
        return Matrix(weights, rows, columns, None, caption, ("target", "source"))

    def page(self) -> str:
        """One HTML file with everything in it."""
        return html.page(self.record)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page.

        Raises:
            OSError: if it cannot be written.
        """
        html.write(self.record, os.fspath(path))

    def figure(self, path: str | os.PathLike[str], words: bool = False) -> None:
        """Draw the alignment as a picture, in the format that the path's ending names (.svg, .png, .pdf).

        Raises:
            ImportError: if matplotlib is missing.
            ValueError: if there is no such format.
        """
        from weft.views import figures

        crosses = any(entry.role == "cross" for entry in self.record)
        drawn = self.aligned(words)
        figure = figures.alignment(drawn) if crosses else figures.heat_map(drawn)
        figures.save(figure, os.fspath(path))

    def draw(self, colour: bool = False, words: bool = False, columns: int | None = None) -> str:
        """The alignment for a terminal, in shades of characters or in colours; said and not drawn if it is too wide."""
        about = self.record.about
        texts = [_printable(str(about[name])) for name in ("source_text", "target_text") if about.get(name)]
        if not self.record.of_kind("weights"):
            drawn = "no attention was recorded"
        else:
            matrix = self.aligned(words)
            drawn = terminal.draw(matrix, colour)
            wide = 2 * len(matrix.keys) + max(map(terminal.width, matrix.queries), default=0) + 1
            if columns is not None and wide > columns:
                drawn = f"{len(matrix.queries)} × {len(matrix.keys)} weights are too wide for {columns} columns"
        return "\n".join([*texts, "", drawn])

    def __str__(self) -> str:
        return self.draw()

    def __repr__(self) -> str:
        about = self.record.about
        return f"Look({about.get('source_text')!r} → {about.get('target_text')!r}, {len(self.record)} entries)"

    def _repr_html_(self) -> str:
        return html.notebook(self.record)


def of_translation(seen: Record, found: Translation, way: str) -> Look:
    """What was seen while one text was translated, or (forced) while a given translation was scored.

    Args:
        seen: a record of KINDS, and of "hidden" too if forced.
        found: the translation.
        way: how it came about: "beam", "greedy", "sample" or "forced".

    Raises:
        ValueError: if nothing was seen, since the text is blank.
    """
    if not len(seen):
        raise ValueError("there is nothing to look at: the text is blank")
    translator, best = found.translator, found.n_best[0]
    model, labels = cast(Seq2Seq, translator.model), translator.tokenizers.target.tokens
    log_probs = _distribution(seen, model, way == "forced")
    count = len(log_probs)
    said = _said(labels, best, count)
    read = _labels(labels, [model.specials.bos, *best.ids])[:count]
    source = _labels(translator.tokenizers.source.tokens, [*found.source_ids, EOS])
    for entry in seen.of_kind("weights"):
        if entry.name in model.cross_attentions:
            entry.role, entry.queries, entry.keys = "cross", tuple(said), tuple(source)
        else:
            inside = "encoder" if entry.name.startswith("encoder") else "decoder"
            entry.role = f"{inside} self"
            entry.queries = entry.keys = tuple(source if inside == "encoder" else read)
    seen.about |= {
        "title": found.source,
        "model": repr(translator),
        "source_text": found.source,
        "target_text": found.text,
        "source": source,
        "target": said,
        "words": _words(source=source, target=said),
        "search": _search(seen, log_probs, found.n_best, labels, way),
    }
    return Look(_trimmed(seen, _positions(translator.model, [len(source), count])))


def of_continuation(seen: Record, found: Continuation, way: str, walk: Walk | None = None) -> Look:
    """What was seen while a prompt was gone on from; with a walk from the prompt to the first token of it."""
    model, best = found.model, found.n_best[0]
    log_probs = _distribution(seen, cast(Seq2Seq, model.model), forced=False)
    text = _labels(model.labels, [*found.prompt_ids, *best.ids])
    for entry in seen.of_kind("weights"):
        count = entry.weights.shape[2]
        entry.role, entry.queries, entry.keys = "self", tuple(text[:count]), tuple(text[:count])
    seen.about |= {
        "title": found.prompt,
        "model": repr(model),
        "source_text": found.prompt,
        "target_text": found.text,
        "source": text,
        "words": _words(source=text),
        "search": _search(seen, log_probs, found.n_best, model.labels, way, first=len(found.prompt_ids) - 1),
    }
    extra = _positions(model.model, [len(text)])
    if walk is not None:
        seen.about["walk"] = _told(walk)
        extra.append(Seen("", "walk", 0, walk.tensors()))
    return Look(_trimmed(seen, extra))


def _distribution(seen: Record, model: Seq2Seq, forced: bool) -> Tensor:
    """The log-probabilities [T, V] of the next token at each step."""
    if forced:
        (entry,) = seen.calls("", "hidden")
        with torch.no_grad():
            return model.logits(entry["hidden"][0]).log_softmax(-1)
    return seen.calls("", "distribution")[0]["log_probs"][0]


def _search(
    seen: Record, log_probs: Tensor, n_best: Sequence[Candidate], labels: Labels, way: str, first: int = 0
) -> dict[str, Any]:
    """How the search went, as the page takes it; ``first`` is the row of self-attention that its first step is."""
    best = n_best[0]
    taken = [*best.ids, EOS] if best.finished else list(best.ids)
    values, tokens = log_probs.topk(min(CANDIDATES, log_probs.shape[1]))
    candidates = []
    for place, (ids, row) in enumerate(zip(tokens.tolist(), values.exp().tolist(), strict=True)):
        said = taken[place] if place < len(taken) else None
        if said is not None and said not in ids:  # a draw may fall on what is not among the likeliest
            ids, row = [*ids, said], [*row, float(log_probs[place, said].exp())]
        parts = zip(_labels(labels, ids), ids, row, strict=True)
        candidates.append([{"token": label, "p": p, "chosen": token == said} for label, token, p in parts])
    steps = [] if way == "forced" else _tree(seen.calls("", "search")[0], taken, labels)
    widest = max((sum(not row["end"] for row in step) for step in steps), default=1)
    return {
        "kind": way,
        "width": widest,
        "first": first,
        "steps": steps,
        "candidates": candidates,
        "finished": [{"text": each.text, "score": each.score} for each in n_best],
    }


def _tree(table: Seen, taken: Sequence[int], labels: Labels) -> list[list[dict[str, Any]]]:
    """The continuations at each step, and which of them led to the tokens that were taken."""
    columns = {name: column.tolist() for name, column in table.values.items()}
    written = _labels(labels, columns["token"])
    steps: list[list[dict[str, Any]]] = [[] for _ in range(max(columns["step"], default=-1) + 1)]
    said: dict[tuple[int, int], list[int]] = {(-1, row): [] for row in columns["parent"]}  # by step and row
    for number, step in enumerate(columns["step"]):
        row, parent, token = (columns[name][number] for name in ("row", "parent", "token"))
        so_far = [*said[step - 1, parent], token]
        said[step, row] = so_far
        steps[step].append(
            {
                "row": row,
                "parent": parent if step else -1,
                "token": written[number],
                "p": float(torch.tensor(columns["log_prob"][number]).exp()),
                "total": columns["total"][number],
                "end": row < 0,
                "chosen": so_far == list(taken[: len(so_far)]),
            }
        )
    return steps


def _printable(text: str) -> str:
    """A text for a terminal, without what would move its cursor or ring its bell."""
    return "".join(c if c.isprintable() else "�" for c in text)


def way_of(search: Search) -> str:
    """What a search is called here."""
    return "sample" if search.sampling is not None else "beam" if search.options.beam > 1 else "greedy"


def _said(labels: Labels, best: Candidate, count: int) -> list[str]:
    """A label for each of the steps: the token that it said."""
    ids = [*best.ids, EOS] if best.finished else list(best.ids)
    return [*_labels(labels, ids), _CUT_OFF][:count]


def _labels(labels: Labels, ids: Sequence[int]) -> list[str]:
    """Labels in which the space before a word is a space."""
    return [label.replace(_SPACE, " ") for label in labels(ids)]


def _joined(labels: Sequence[str], words: Sequence[int]) -> list[str]:
    """The words that the pieces make."""
    whole = [""] * (max(words, default=-1) + 1)
    for label, word in zip(labels, words, strict=True):
        whole[word] += label
    return [word.strip() for word in whole]


def _words(**sides: Sequence[str]) -> dict[str, list[int]]:
    """For each token the number of its word, on sides whose labels tell where words begin."""
    found = {}
    for side, labels in sides.items():
        if any(label.startswith(" ") for label in labels):
            found[side] = summaries.word_numbers(labels)
    return found


def _positions(model: nn.Module, counts: Sequence[int]) -> list[Seen]:
    """How the model knows where so many tokens of the source and of the target, or of the text, stand."""
    if isinstance(model, Transformer):
        sides = {"source_positions": model.source_positions, "target_positions": model.target_positions}
        pictures: dict[str, tuple[str, dict[str, Tensor]]] = {
            name: (side.name, side.picture(count)) for (name, side), count in zip(sides.items(), counts, strict=True)
        }
    elif isinstance(model, GPT):
        pictures = {"positions": (scheme_of(model), model.picture(counts[0]))}
    else:
        return []
    return [
        Seen(name, "positions", 0, {key: value.detach() for key, value in picture.items()}, role=scheme)
        for name, (scheme, picture) in pictures.items()
        if picture
    ]


def _trimmed(seen: Record, extra: Sequence[Seen]) -> Record:
    """What the views need: not the whole distributions, nor what a second pass showed."""
    told = ("search", "distribution", "hidden")
    kept = [entry for entry in seen if entry.kind not in told and entry.call == 0]
    return Record([*kept, *extra], seen.about)


def _told(walk: Walk) -> dict[str, Any]:
    """What there is to say of a walk besides its tensors."""
    probabilities, draw = walk.probabilities, walk.draw
    shares = dict(zip(draw.tokens.tolist(), (draw.shares / draw.shares.sum()).tolist(), strict=True))
    likeliest = probabilities.topk(min(CANDIDATES, len(probabilities))).indices.tolist()
    return {
        "ids": walk.ids.tolist(),
        "labels": [label.replace(_SPACE, " ") for label in walk.labels],
        "scheme": walk.scheme,
        "rule": draw.rule,
        "u": draw.u,
        "chosen": walk.name(draw.chosen).replace(_SPACE, " "),
        "next": [
            {
                "token": walk.name(token).replace(_SPACE, " "),
                "p": float(probabilities[token]),
                "share": shares.get(token, 0.0),
            }
            for token in likeliest
        ],
    }
