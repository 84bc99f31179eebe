"""The walk through a GPT for one text: run once, listened to, and the next token drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import cast

import torch
from torch import Tensor

from weft.decoding.greedy import Moment
from weft.decoding.options import SearchOptions
from weft.decoding.rules import Rules
from weft.decoding.sampling import SamplingOptions, candidates, draw, penalised, uniform
from weft.decoding.steps import normalised, searching
from weft.models.contract import Seq2Seq
from weft.models.gpt import GPT
from weft.observe import Record, record
from weft.views.stream import Draw, Walk

_NAMED = 100  # of the likeliest next tokens, how many get their names


def walk(
    model: GPT,
    tokens: Sequence[int],
    labels: Callable[[Sequence[int]], Sequence[str]] | None = None,
    sampling: SamplingOptions | None = None,
    options: SearchOptions | None = None,
    number: int = 0,
) -> Walk:
    """Everything that happens when the model reads a text and the next token is drawn.

    The numbers are those of the model's own forward pass, listened to; a second pass that nobody listens to must give
    the same bits. The draw is the first that ``sample`` makes with these options.

    Args:
        model: a GPT; it runs in eval mode and is left as it was.
        tokens: of the text, at least one.
        labels: how tokens are written, a tokenizer's ``tokens``; their numbers if None.
        sampling: how the next token is drawn; from the model's probabilities if None. ``top_k=1`` takes the likeliest.
        options: which tokens may come next; the defaults if None.
        number: of the text, for its random stream; see ``weft.decoding.sampling.sample``.

    Raises:
        ValueError: if there are no tokens, one is not in the vocabulary, there are more than the model can take, or
            the options leave none to draw.
    """
    sampling = SamplingOptions() if sampling is None else sampling
    ids = _checked(model, tokens)
    with searching(cast(Seq2Seq, model), exact=False):
        with record(model, kinds=("weights", "added")) as seen:
            hidden = model(ids)
        assert torch.equal(hidden, model(ids)), "listening must change no bit"
        assert torch.equal(hidden, model.norm(_added(seen, model, "around_feed_forward", "stream")[-1:]))
        logits = model.logits(hidden[:, -1])
        drawn = _draw(model, ids, logits, sampling, SearchOptions() if options is None else options, number)
    likeliest = logits[0].topk(min(_NAMED, logits.shape[1])).indices
    known = list(dict.fromkeys([*tokens, *likeliest.tolist(), *drawn.tokens[:_NAMED].tolist(), drawn.chosen]))
    start = seen[""]
    return Walk(
        ids=ids[0],
        names=dict(zip(known, map(str, known) if labels is None else labels(known), strict=True)),
        scheme=scheme_of(model),
        tokens=start["tokens"][0],
        positions=None if model.positions is None else start["positions"],
        stream=torch.cat([start["stream"], _added(seen, model, "around_feed_forward", "stream")]),
        between=_added(seen, model, "around_attention", "stream"),
        attention=_added(seen, model, "around_attention", "added"),
        heads=_added(seen, model, "attention.output", "heads"),
        biases=_biases(seen, model),
        feed_forward=_added(seen, model, "around_feed_forward", "added"),
        weights=_added(seen, model, "attention", "weights"),
        hidden=hidden[0],
        logits=logits[0],
        draw=drawn,
    )


def _checked(model: GPT, tokens: Sequence[int]) -> Tensor:
    """The tokens as a batch of one text [1, N]."""
    count = len(model.embedding)
    if not tokens:
        raise ValueError("a walk needs at least one token, not none: an empty text begins with BOS")
    if wrong := [token for token in tokens if not 0 <= token < count]:
        raise ValueError(f"a token is a number from 0 to {count - 1}, not {wrong[0]}")
    if model.max_len is not None and len(tokens) > model.max_len:
        raise ValueError(f"the model takes at most {model.max_len} tokens, not {len(tokens)}")
    return torch.tensor([list(tokens)], dtype=torch.int64, device=model.embedding.device)


def _draw(
    model: GPT, ids: Tensor, logits: Tensor, sampling: SamplingOptions, options: SearchOptions, number: int
) -> Draw:
    """How the token after ids [1, N], which is text ``number``, is drawn by logits [1, V]."""
    log_probs, nothing, first = normalised(logits), ids[:, :0], ids.new_zeros(1)
    Rules(cast(Seq2Seq, model), ids, options).close(log_probs, nothing, first)
    scores = penalised(Moment(log_probs, logits, first, nothing, ids), sampling)
    shares, tokens = candidates(scores, sampling)
    u = uniform(sampling.seed, first + number, first, first)  # its sample 0, position 0
    kept = shares[0] > 0
    if not kept.any():
        raise ValueError("there is no token to draw: the options forbid them all")
    chosen = int(draw(shares, tokens, u))
    return Draw(tokens[0, kept], shares[0, kept], float(u), chosen, _rule(sampling))


def _rule(sampling: SamplingOptions) -> str:
    """What changes the distribution, in the options' own names."""
    changed = ((field.name, getattr(sampling, field.name), field.default) for field in fields(sampling))
    return ", ".join(
        f"{name} {value:g}" for name, value, usual in changed if value != usual and name not in ("samples", "seed")
    )


def _added(seen: Record, model: GPT, part: str, value: str) -> Tensor:
    """What a part of every block showed [L, …]."""
    return torch.cat([seen[f"blocks.{layer}.{part}"][value] for layer in range(len(model.blocks))])


def _biases(seen: Record, model: GPT) -> Tensor | None:
    found = [seen[f"blocks.{layer}.attention.output"].values.get("bias") for layer in range(len(model.blocks))]
    biases = [bias for bias in found if bias is not None]
    return torch.stack(biases) if biases else None


def scheme_of(model: GPT) -> str:
    """How a model knows where a token stands: learned, rotary, alibi or none."""
    parts = {"learned": model.positions, "rotary": model.rotary, "alibi": model.alibi}
    return next((name for name, part in parts.items() if part is not None), "none")
