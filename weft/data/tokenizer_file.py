"""The tokenizer.json: the form that weft's own have, and how one that was made elsewhere is fitted to it.

A file is data: it is parsed by the ``tokenizers`` library, and nothing in it is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Rust

from weft.config import UNK

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
# Letters, numbers and the rest share no piece: no comma clings to a word, and neither "<s>" nor "<0x41>" is one piece.
WORDS = pre_tokenizers.Split(Regex(r" ?[\p{L}\p{M}]+| ?\p{N}+| ?[^ \p{L}\p{M}\p{N}]+| "), "isolated")
SPACES = pre_tokenizers.Split(" ", "merged_with_next")
OPENED = normalizers.Prepend(" ")

_NAMES = (
    ("<pad>", "[PAD]", "<|pad|>"),
    ("<s>", "[CLS]", "<bos>", "[BOS]"),
    ("</s>", "[SEP]", "<eos>", "[EOS]"),
    ("<unk>", "[UNK]"),
)
_CUTS = ("truncation", "padding", "post_processor")  # what changes the tokens of a text afterwards
_DRAWS = ("dropout", "alpha", "nbest_size")  # what makes a model draw them


def parsed(text: str) -> Rust:
    """The library's tokenizer of a tokenizer.json.

    Raises:
        ValueError: if it is none.
    """
    try:
        return Rust.from_str(text)
    except Exception as error:  # the library raises no other kind
        raise ValueError(" ".join(str(error).split())) from None


def numbered(tokens: Iterable[str]) -> dict[str, int]:
    """The tokens with their numbers, from 0 on."""
    return {token: number for number, token in enumerate(tokens)}


def closed(text: str) -> str:
    """A tokenizer.json without holes between the numbers of its tokens: the library would list them, each by itself."""
    try:
        tree = json.loads(text)
        vocab = tree["model"]["vocab"]
        if not isinstance(vocab, dict) or max(vocab.values(), default=-1) < len(vocab):
            return text
        tree["model"]["vocab"] = numbered(sorted(vocab, key=lambda piece: vocab[piece]))
        return json.dumps(tree)
    except (KeyError, TypeError, RecursionError):
        raise ValueError("expected a model with a vocabulary") from None


def fit(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A parsed tokenizer.json with its specials at 0 to 3, that neither cuts, pads nor draws; and what that changed."""
    model = tree["model"]
    scores: dict[str, float] = dict(model["vocab"]) if model["type"] == "Unigram" else {}
    numbers: dict[str, int] = numbered(scores) if scores else model["vocab"]
    unknown = model["vocab"][model["unk_id"]][0] if scores and model["unk_id"] is not None else model.get("unk_token")
    added = {token["content"]: token for token in tree["added_tokens"]}
    marked = {piece for piece, token in added.items() if token["special"]}
    specials, changes = _specials({piece: token["id"] for piece, token in added.items()} | numbers, marked, unknown)

    others = sorted(numbers.keys() - set(specials), key=lambda piece: numbers[piece])
    placed = numbered([*specials, *others])
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
    words, spaces, opened = (json.loads(part.__getstate__()) for part in (WORDS, SPACES, OPENED))
    if pre_tokenizer in (words, spaces) and tree["normalizer"] == opened and specials == [*SPECIALS]:
        return pre_tokenizer
    if model["type"] == "BPE" and not model["merges"]:  # its tokens are single characters
        return pre_tokenizer
    ends = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in specials if len(name) > 1]
    pattern = "|".join([*ends, "<(?=0x[0-9A-F]{2}>)"])  # the first character, if the others follow
    guard = json.loads(pre_tokenizers.Split(Regex(pattern), "isolated").__getstate__())
    before = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return {"type": "Sequence", "pretokenizers": before if guard in before else [*before, guard]}
