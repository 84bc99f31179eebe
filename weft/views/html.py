"""A record as one HTML page that shows everything a model attended to; it needs no network and asks for none.

The page is made of the files in ``weft/views/page``: a template, a style sheet and plain ES modules. They are joined
here without a bundler: modules follow those that they import, in one inline script, where ``import`` and ``export``
have no meaning any more. What was recorded stands beside them as JSON, with arrays as integers in base64 and their
scale. A content-security policy allows this script and this style by their hashes and nothing else, so that no text in
a record can ever run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.observe import Record, Seen
from weft.views.matrix import plain, visible

Json = dict[str, Any]

_SIXTEEN_BITS_UP_TO = 2_000_000  # bytes of all weights; beyond that, a step of 1/255 must do
_WALK_TOKENS = 40  # of a walk's tokens, how many vectors are shown: the last ones, as in the terminal
# Which token lists the queries and the keys of an attention are, where it does not say so itself.
_SIDES = {
    "encoder self": (("source",), ("source",)),
    "decoder self": (("target",), ("target",)),
    "cross": (("target",), ("source",)),
}
_EITHER = (("text", "target", "source"), ("text", "target", "source"))
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+\.js)";\n', re.MULTILINE)


def page(record: Record, row: int = 0, exact: bool = False) -> str:
    """The whole page as text.

    Args:
        record: what was seen, with ``about`` for what it is about.
        row: which sequence of the batch.
        exact: keep weights as float32; else they are integers of 16 bits, or of 8 where there are very many.

    Raises:
        ValueError: if there is no such row, or a weight is not between 0 and 1.
    """
    style, script = _text("style.css"), joined()
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    parts = {
        "policy": policy,
        "title": html.escape(str(record.about.get("title") or "What the model looked at")),
        "style": style,
        "record": _json(_content(record, row, exact)),
        "script": script,
    }
    # All at once: nothing is filled into what was filled in.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text("index.html"))


def write(record: Record, path: str | os.PathLike[str], row: int = 0, exact: bool = False) -> None:
    """Write the page to a file; arguments and errors as of ``page``."""
    Path(path).write_text(page(record, row, exact), encoding="utf-8", newline="\n")


def notebook(record: Record, row: int = 0, height: int = 760) -> str:
    """The page as a frame for a notebook, in a sandbox of its own: it may run its script and nothing else."""
    inside = html.escape(page(record, row), quote=True)
    return (
        f'<iframe title="what the model looked at" sandbox="allow-scripts" width="100%" height="{height}" '
        f'frameborder="0" srcdoc="{inside}"></iframe>'
    )


@cache
def joined() -> str:
    """The modules of the page as one script, each after those that it imports."""
    folder = files("weft.views") / "page"
    texts = {file.name: file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".js")}
    order: list[str] = []

    def place(name: str, above: tuple[str, ...] = ()) -> None:
        if name in above:
            raise ValueError(f"modules import each other in a circle: {' → '.join((*above, name))}")
        for needed in _IMPORT.findall(texts[name]):
            place(needed, (*above, name))
        if name not in order:
            order.append(name)

    for name in sorted(texts):
        place(name)
    whole = "\n".join(re.sub(r"^export ", "", _IMPORT.sub("", texts[name]), flags=re.MULTILINE) for name in order)
    if found := re.search(r"</script|<!--", whole, re.IGNORECASE):
        raise ValueError(f"{found[0]!r} would end the script inside the page")
    return whole


class _Sequences:
    """The lists of tokens that a record speaks of, each once.

    What a decoder reads is what it writes, one place later, and the last token of a text is not read at all: a list
    that is another one moved by 1, or its beginning, says so, that the page can mark one token in both.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.labels: list[tuple[str, ...]] = []
        self.items: list[Json] = []
        words = about.get("words") or {}
        for name in ("source", "target"):
            if about.get(name):
                # Alone it is no source of anything.
                shown = name if about.get("source") and about.get("target") else "text"
                self._add(shown, tuple(about[name]), words.get(name))

    def number(self, labels: Sequence[str] | None, count: int, likely: Sequence[str], name: str) -> int:
        """The number of the list with these labels, or of the likely one with so many; a new one if there is none."""
        order = [place for like in likely for place, item in enumerate(self.items) if item["name"] == like]
        if labels is None:
            fitting = [place for place in order if len(self.labels[place]) == count]
        else:
            order += [place for place in range(len(self.items)) if place not in order]
            fitting = [place for place in order if self.labels[place] == tuple(labels)]
        if fitting:
            return fitting[0]
        return self._add(name, tuple(map(str, range(count)) if labels is None else labels), None)

    def _add(self, name: str, labels: tuple[str, ...], words: Sequence[int] | None) -> int:
        if words is not None and len(words) != len(labels):
            raise ValueError(f"{name!r} has {len(labels)} tokens, but words were given for {len(words)}")
        found = self._like(labels)
        if found is not None:
            place, by = found
            name = f"{self.items[place]['name']} as read" if by else self.items[place]["name"]
            base = self.items[place].get("words")
            words = None if base is None else [-1] * by + base[: len(labels) - by]
        spaced = any(label.startswith(" ") for label in labels)
        item: Json = {
            "name": name,
            "labels": [visible(label) for label in labels],
            "starts": [int(i == 0 or not spaced or label.startswith(" ")) for i, label in enumerate(labels)],
        }
        if words is not None:
            item["words"] = list(words)
        if found is not None:
            item["like"], item["by"] = found
        self.labels.append(labels)
        self.items.append(item)
        return len(self.items) - 1

    def _like(self, labels: tuple[str, ...]) -> tuple[int, int] | None:
        """The list of which this is the beginning, moved by 0 or 1, and by how much."""
        for by in (0, 1):
            for place, other in enumerate(self.labels):
                if by < len(labels) <= len(other) + by and labels[by:] == other[: len(labels) - by]:
                    return place, by
        return None


def _content(record: Record, row: int, exact: bool) -> Json:
    """All that the page shows, as JSON."""
    about = dict(record.about)
    sequences = _Sequences(about)
    attention = [entry for entry in record.entries if entry.kind == "weights"]
    numbers = sum(entry.weights.shape[1:].numel() for entry in attention)
    form = "f32" if exact else "u16" if 2 * numbers <= _SIXTEEN_BITS_UP_TO else "u8"
    places: dict[str, list[Json]] = {}
    for entry in attention:
        places.setdefault(entry.role or "attention", []).append(_attention(entry, row, form, sequences))
    walk = next((_walk(entry, about) for entry in record.entries if entry.kind == "walk"), None)
    content = {
        "places": [{"name": name, "layers": layers} for name, layers in places.items()],
        "gates": [_gates(entry, row, sequences) for entry in record.entries if entry.kind == "gates"],
        "positions": [_positions(entry) for entry in record.entries if entry.kind == "positions"],
        "walk": walk,
        "sequences": sequences.items,
    }
    told = ("title", "model", "source_text", "target_text", "search", "notes")
    return content | {"about": _shown({key: about[key] for key in told if about.get(key)})}


def _attention(entry: Seen, row: int, form: str, sequences: _Sequences) -> Json:
    """One layer of attention: weights, what was closed, and the vectors that they were made from, where recorded."""
    whole = plain(entry.weights, torch.float32)
    if whole.dim() != 4:
        raise ValueError(f"{entry.name!r} has weights {list(whole.shape)}: expected [batch, head, query, key]")
    batch, heads, n, m = whole.shape
    for side, labels, count in (("queries", entry.queries, n), ("keys", entry.keys, m)):
        if labels is not None and len(labels) != count:
            raise ValueError(f"{entry.name!r} has {count} {side}, but {len(labels)} labels")
    if not 0 <= row < batch:
        raise ValueError(f"{entry.name!r} has {batch} rows, so no row {row}")
    weights = whole[row]
    if not bool(((weights >= 0) & (weights <= 1 + 1e-5)).all()):  # NaN is neither
        raise ValueError(f"weights of attention lie between 0 and 1, and those of {entry.name!r} do not")
    likely = _SIDES.get(entry.role, _EITHER)
    names = ("tokens", "tokens") if n == m and entry.queries == entry.keys else ("queries", "keys")
    layer: Json = {
        "module": entry.name or entry.role or "attention",
        "call": entry.call,
        "weights": packed(weights, form),
        "queries": sequences.number(entry.queries, n, likely[0], names[0]),
        "keys": sequences.number(entry.keys, m, likely[1], names[1]),
    }

    def spread(value: Tensor) -> Tensor:
        """[H or 1, N, M] of this row: once where all heads have the same."""
        mine = value.detach().cpu().broadcast_to(batch, heads, n, m)[row]
        return mine[:1] if bool((mine == mine[:1]).all()) else mine

    allowed = torch.ones(1, n, m, dtype=torch.bool)
    if "allowed" in entry.values:
        allowed = allowed & spread(entry["allowed"]).bool()
    if "bias" in entry.values:
        bias = spread(entry["bias"].float())
        allowed = allowed & bias.isfinite()  # −∞ closes a key as a mask does
        layer["bias"] = packed(bias.nan_to_num(0.0, 0.0, 0.0), "i16")
    if not bool(allowed.all()):
        layer["allowed"] = packed(allowed, "bits")
    if "queries" in entry.values and "keys" in entry.values:
        vectors = [name for name in ("queries", "keys", "values") if name in entry.values]
        layer["vectors"] = {name: packed(entry[name][row], "i16") for name in vectors}
        width = entry["queries"].shape[-1]
        layer["scale"] = float(entry["scale"]) if "scale" in entry.values else 1 / math.sqrt(width)
    return layer


def _gates(entry: Seen, row: int, sequences: _Sequences) -> Json:
    grids = {name: plain(value, torch.float32)[row] for name, value in entry.values.items() if row < len(value)}
    gates: Json = {"module": entry.name, "call": entry.call, "role": entry.role}
    gates["grids"] = {name: packed(grid[None] if grid.dim() == 1 else grid, "i16") for name, grid in grids.items()}
    times = {len(grid) for grid in grids.values() if grid.dim() == 2}
    if len(times) == 1:
        fitting = [place for place, labels in enumerate(sequences.labels) if {len(labels)} == times]
        if entry.queries is not None:
            gates["sequence"] = sequences.number(entry.queries, times.pop(), (), "steps")
        elif len(fitting) == 1:  # with two lists of this length it would be a guess
            gates["sequence"] = fitting[0]
    return gates


def _positions(entry: Seen) -> Json:
    form = next(iter(entry.values))
    return {"module": entry.name, "scheme": entry.role, "form": form, "values": packed(entry[form], "i16")}


def _walk(entry: Seen, about: Mapping[str, Any]) -> Json:
    """The walk of the last token, after which the next comes; of the others, their beginnings and lengths."""
    told = _shown(about.get("walk") or {})
    given = {name: plain(value, torch.float32) for name, value in entry.values.items()}
    rest = given["attention"] - given["heads"].sum(1)  # the bias of the output layer, where there is one
    walk: Json = told | {
        "norms": packed(given["stream"].norm(dim=-1), "f32"),
        "looks": packed(given["weights"][:, :, -1], "u16"),
        "stream": packed(given["stream"][:, -1], "i16"),
        "between": packed(given["between"][:, -1], "i16"),
        "heads": packed(given["heads"][:, :, -1], "i16"),
        "feed_forward": packed(given["feed_forward"][:, -1], "i16"),
        "hidden": packed(given["hidden"][-1], "i16"),
    }
    if bool((rest.abs() > 1e-4 * given["heads"].abs().amax().clamp(min=1e-30)).any()):
        walk["rest"] = packed(rest[:, -1], "i16")
    for name in ("tokens", "positions"):
        if name in given:
            walk[name] = packed(given[name][-_WALK_TOKENS:], "i16")
    return walk


def packed(values: Tensor, form: str) -> Json:
    """An array for the page: its shape, its numbers as bytes in base64, and what a whole number stands for.

    Args:
        values: finite numbers.
        form: "f32", "i16", "u16", "u8", or "bits" for booleans.
    """
    array = values.detach().cpu().contiguous()
    packed: Json = {"shape": list(array.shape), "form": form}
    if form == "bits":
        flat = torch.nn.functional.pad(array.flatten().to(torch.uint8), (0, -array.numel() % 8)).view(-1, 8)
        data = (flat << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8).numpy().tobytes()
    elif form == "f32":
        data = array.float().numpy().astype("<f4").tobytes()
    else:
        most, kind = {"i16": (32767, "<i2"), "u16": (65535, "<u2"), "u8": (255, "u1")}[form]
        scale = float(array.abs().max()) / most if array.numel() else 0.0
        packed["scale"] = scale
        data = (array.double() / (scale or 1.0)).round().numpy().astype(kind).tobytes()
    return packed | {"data": base64.b64encode(data).decode("ascii")}


def _shown(value: Any) -> Any:
    """Plain JSON of what was told: tokens made visible, and null for a number that JSON has not (−∞)."""
    match value:
        case dict():
            return {
                str(key): visible(part) if key in ("token", "chosen") and isinstance(part, str) else _shown(part)
                for key, part in value.items()
            } | ({"labels": [visible(label) for label in value["labels"]]} if "labels" in value else {})
        case list() | tuple():
            return [_shown(part) for part in value]
        case float() if not math.isfinite(value):
            return None
        case _:
            return value


def _json(value: Json) -> str:
    """JSON that can stand inside a script element: no text in it ends the element or opens another."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    # Half a surrogate pair has no bytes in UTF-8.
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _text(name: str) -> str:
    return (files("weft.views") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """How a content-security policy names an inline script or style."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
