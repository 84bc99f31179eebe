"""Records that look like those of trained models: attention made from vectors that aim somewhere, searches, walks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.kernels.attention import attention_weights
from weft.kernels.mask import Mask
from weft.observe import Record, Seen

Aim = Callable[[int], float]  # the key that a query looks at

SHORT = (
    ["I", " read", " a", " good", " book", " yester", "day", ".", "</s>"],
    [" Gestern", " habe", " ich", " ein", " gutes", " Buch", " gel", "esen", ".", "</s>"],
    [5.5, 1, 0, 2, 3, 4, 1, 1, 7, 8],
)
JAPANESE = (
    ["猫", "が", "窓", "の", "そば", "で", "静か", "に", "眠", "って", "いる", "。", "</s>"],
    [" The", " cat", " is", " sleeping", " quietly", " by", " the", " window", ".", "</s>"],
    [0, 0, 10, 8, 6, 4, 3, 2, 11, 12],
)
HOSTILE = (
    ["<script>", "window.ran=1", "</script>", "<img src=x onerror=window.ran=1>", " &amp;", "\u202eabc", "</s>"],
    [" </script><script>window.ran=1</script>", " <b>", " עברית", " العربية", "\u2028", "{{script}}", "</s>"],
    [0, 1, 2, 3, 4, 5, 6],
)

ENGLISH = """when the long winter was over and the snow had gone from the hills they went down
to the old town by the sea"""
GERMAN = """als der lange Winter vorbei war und der Schnee von den Hügeln verschwunden war gingen sie
hinunter in die alte Stadt am Meer"""


def attention(
    name: str, role: str, aims: Sequence[Aim], n: int, m: int, causal: bool = False, dim: int = 16, sharp: float = 1.0
) -> Seen:
    """One layer: each head has an aim; queries are made from the keys near it, and weights from both."""
    heads = len(aims)
    k = torch.randn(1, heads, m, dim)
    v = torch.randn(1, heads, m, dim)
    places = torch.arange(m)
    nearness = torch.stack(
        [torch.stack([(-((places - aim(i)) ** 2) / 0.6).exp() for i in range(n)]) for aim in aims]
    )  # [H, N, M]
    q = sharp * 4.2 * (nearness[None] @ k) / math.sqrt(dim) * 1.6 + 0.4 * torch.randn(1, heads, n, dim)
    mask = Mask(causal=True) if causal else None
    values = {
        "weights": attention_weights(q, k, mask),
        "queries": q,
        "keys": k,
        "values": v,
        "scale": torch.tensor(dim**-0.5),
    }
    if causal:
        values["allowed"] = torch.ones(1, 1, n, m, dtype=torch.bool).tril()
    return Seen(name, "weights", 0, values, role=role)


def translation(
    texts: tuple[Sequence[str], Sequence[str], Sequence[float]] = SHORT,
    layers: int = 3,
    heads: int = 4,
    dim: int = 16,
    search: bool = True,
) -> Record:
    """An encoder and a decoder that looked along the given alignment, each head in its own way."""
    source, target, aligned = texts
    n, m = len(target), len(source)
    read = ["<s>", *target[:-1]]
    entries = []

    def aims(*all_aims: Aim) -> list[Aim]:
        return [all_aims[head % len(all_aims)] for head in range(heads)]

    near = aims(lambda i: i, lambda i: i - 1, lambda i: i + 1, lambda i: m - 1)
    past = aims(lambda i: i, lambda i: i - 1, lambda i: 0, lambda i: i - 2)
    for layer in range(layers):
        sharp = 0.6 + 0.3 * layer
        entries.append(attention(f"encoder.{layer}.attention", "encoder self", near, m, m, dim=dim, sharp=sharp))
    for layer in range(layers):
        sharp = 0.5 + 0.35 * layer
        entries.append(attention(f"decoder.{layer}.attention", "decoder self", past, n, n, causal=True, dim=dim))
        across = aims(lambda i: aligned[i], lambda i: aligned[i] - 0.5, lambda i: m - 1, lambda i: aligned[i])
        entries.append(attention(f"decoder.{layer}.cross", "cross", across, n, m, dim=dim, sharp=sharp))
    for entry in entries:
        labels = {"encoder self": (source, source), "decoder self": (read, read), "cross": (target, source)}[entry.role]
        entry.queries, entry.keys = tuple(labels[0]), tuple(labels[1])
    about: dict[str, Any] = {
        "title": joined(source),
        "source_text": joined(source),
        "target_text": joined(target),
        "model": f"a Transformer of {layers} + {layers} layers with {heads} heads, made up for this page",
        "source": list(source),
        "target": list(target),
        "words": {"source": words(source), "target": words(target)},
    }
    if search:
        about["search"] = beams(target)
    return Record(entries=entries, about=about)


def beams(target: Sequence[str], width: int = 3) -> dict[str, Any]:
    """A beam search that ended at the target, with others beside it that fell away or ended too."""
    others = [" das", " ein", " der", " noch", " war", " Buch", " gutes", " lesen", "!", "</s>"]
    steps: list[list[dict[str, Any]]] = []
    candidates: list[list[dict[str, Any]]] = []
    total = 0.0
    for t, token in enumerate(target):
        beside = [word for word in others[3 * t % 10 :] + others[: 3 * t % 10] if word != token]
        p = [0.82, 0.46, 0.91, 0.6, 0.74][t % 5]
        total += math.log(p)
        last = t == len(target) - 1
        rest = [(1 - p) * 0.6, (1 - p) * 0.3]
        step = [row(0, 0, token, p, total, True)]
        for beam in range(1, width):
            parent = 0 if (t + beam) % 3 else beam
            step.append(row(beam, parent, beside[beam], rest[(beam - 1) % 2], total - beam * 0.9, False))
        for each in step:
            each["parent"] = -1 if t == 0 else each["parent"]
        if last:
            step[0] |= {"end": True, "row": -1}
        steps.append(step)
        listed = [(token, p), *((beside[i], (1 - p) * 0.5**i) for i in range(1, 8))]
        candidates.append([{"token": word, "p": chance, "chosen": word == token} for word, chance in listed])
    text = joined(target)
    finished = [{"text": text, "score": -0.41}, {"text": text.replace(".", "!"), "score": -0.93}]
    return {"kind": "beam", "width": width, "steps": steps, "candidates": candidates, "finished": finished}


def row(number: int, parent: int, token: str, p: float, total: float, chosen: bool) -> dict[str, Any]:
    return {"row": number, "parent": parent, "token": token, "p": p, "total": total, "end": False, "chosen": chosen}


def language(layers: int = 2, heads: int = 2, dim: int = 32) -> Record:
    """A GPT that read a prompt and went on, with the walk to the first token that it found."""
    prompt, found = [" Once", " upon", " a", " time"], [" there", " was", " a", " fox", "."]
    text, read = [*prompt, *found], [*prompt, *found[:-1]]
    n, p, head_dim = len(read), len(prompt), dim // heads
    aims: list[Aim] = [lambda i: i, lambda i: i - 1]
    entries = []
    for layer in range(layers):
        entry = attention(f"blocks.{layer}.attention", "self", aims[:heads], n, n, causal=True, dim=head_dim)
        entry.queries = entry.keys = tuple(read)
        entries.append(entry)
    slopes = torch.tensor([0.5, 0.125])[:heads, None, None]
    far = (torch.arange(n)[:, None] - torch.arange(n)[None]).clamp(min=0)
    entries.append(Seen("positions", "positions", 0, {"bias": -slopes * far}, role="alibi"))
    entries.append(walk([entry.weights[0, :, :p, :p] for entry in entries[:layers]], p, dim))
    candidates = [
        [{"token": token, "p": 0.5, "chosen": True}, {"token": " an", "p": 0.2, "chosen": False}] for token in found
    ]
    steps = [[row(0, 0 if t else -1, token, 0.5, (t + 1) * math.log(0.5), True)] for t, token in enumerate(found)]
    following = [(" there", 0.5, 0.61), (" in", 0.22, 0.27), (" a", 0.1, 0.12), (" when", 0.06, 0.0)]
    about: dict[str, Any] = {
        "title": joined(prompt),
        "target_text": joined(found),
        "source": text,
        "words": {"source": words(text)},
        "search": {"kind": "sample", "width": 1, "first": p - 1, "steps": steps, "candidates": candidates},
        "walk": {
            "ids": [512, 88, 3, 190],
            "labels": prompt,
            "scheme": "alibi",
            "rule": "top_k 3",
            "u": 0.7,
            "chosen": " in",
            "next": [{"token": token, "p": chance, "share": part} for token, chance, part in following],
        },
    }
    return Record(entries=entries, about=about)


def walk(weights: list[Tensor], n: int, dim: int) -> Seen:
    """Numbers that add up as those of a walk do."""
    layers, heads = len(weights), len(weights[0])
    tokens = torch.randn(n, dim)
    parts, feed = 0.4 * torch.randn(layers, heads, n, dim), 0.5 * torch.randn(layers, n, dim)
    stream, between = [tokens], []
    for layer in range(layers):
        between.append(stream[-1] + parts[layer].sum(0) + 0.1)
        stream.append(between[-1] + feed[layer])
    values = {
        "tokens": tokens,
        "stream": torch.stack(stream),
        "between": torch.stack(between),
        "attention": parts.sum(1) + 0.1,
        "heads": parts,
        "feed_forward": feed,
        "weights": torch.stack(weights),
        "hidden": torch.nn.functional.layer_norm(stream[-1], (dim,)),
    }
    return Seen("", "walk", 0, values)


def recurrent() -> Record:
    """Additive attention (weights only), the gates of an LSTM, factors of channels, two kinds of positions."""
    source, target, aligned = SHORT
    entry = attention("decoder.attention", "cross", [lambda i: aligned[i]], len(target), len(source))
    entry.values = {"weights": entry.weights}
    gates = {f"forward.{name}": torch.rand(1, len(source), 24) for name in ("input", "forget", "output")}
    angles = torch.arange(12.0)[:, None] * 10000 ** (-torch.arange(8) / 8)
    return Record(
        entries=[
            Seen("encoder.0", "gates", 0, gates),
            entry,
            Seen("squeeze", "gates", 0, {"channels": torch.rand(1, 40)}),
            Seen("positions", "positions", 0, {"table": torch.cat([angles.sin(), angles.cos()], 1)}, role="sinusoidal"),
            Seen("rotary", "positions", 0, {"angles": angles}, role="rotary"),
        ],
        about={"title": "A recurrent translator", "source": list(source), "target": list(target)},
    )


def long_pair(count: int = 60) -> tuple[list[str], list[str], list[float]]:
    """A sentence of so many tokens and its translation."""
    english, german = ENGLISH.split(), GERMAN.split()
    source = [f" {english[i % len(english)]}" for i in range(count - 1)] + ["</s>"]
    target = [f" {german[i % len(german)]}" for i in range(count - 1)] + ["</s>"]
    return source, target, [float(i + (3 if i % 7 == 2 else -2 if i % 7 == 5 else 0)) for i in range(count)]


def many(tokens: int = 200, layers: int = 12, heads: int = 12) -> Record:
    """A large language model over a long text: weights only."""
    labels = [f" t{i}" for i in range(tokens)]
    scores = torch.randn(layers, 1, heads, tokens, tokens) * 2
    allowed = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    entries = [
        Seen(f"blocks.{i}.attention", "weights", 0, {"weights": each, "allowed": allowed}, role="self")
        for i, each in enumerate(weights)
    ]
    return Record(entries=entries, about={"title": "200 tokens, 144 heads", "source": labels})


def unnamed() -> Record:
    """What a record without labels has: an attention that was called step by step, each time with a key more."""
    steps = [torch.rand(1, 2, 1, m).softmax(-1) for m in (1, 2, 3, 4)]
    return Record(entries=[Seen("decoder", "weights", call, {"weights": each}) for call, each in enumerate(steps)])


def words(labels: Sequence[str]) -> list[int]:
    """The number of each token's word: a space or a mark begins one."""
    numbers, number = [], -1
    for i, label in enumerate(labels):
        number += i == 0 or label.startswith((" ", "<"))
        numbers.append(number)
    return numbers


def joined(labels: Sequence[str]) -> str:
    return "".join(label for label in labels if label != "</s>").strip()
