"""What must be proven before a folder counts: every way to say something else is seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.tiny import make, searched, taught, tiny, vocabularies
from weft.config import BOS, EOS, PAD
from weft.interop.handover import Said, Trial, aside, sample_texts


def test_a_trial_sees_what_is_not_said_as_weft_says_it() -> None:
    config, pair = tiny(), vocabularies()
    model = taught(config, pair)
    trial = Trial(model, pair, ())
    assert trial.texts == sample_texts(pair.source) == sample_texts(pair.source)
    assert trial.sources == pair.source.encode_batch(trial.texts)
    assert all(3 <= len(ids) <= 20 for ids in trial.sources)
    ours = [Said(h.tokens, h.log_prob, h.finished) for h in searched(model, trial.sources, max_extra=trial.limit)]
    assert trial.proof(ours, "weft") == "checked with weft: the same greedy translations of 16 sentences"
    assert "weft: 16 of 16 greedy translations are the same, log p differs by at most " in trial.difference(
        ours, "weft"
    )
    place = next(place for place, answer in enumerate(ours) if answer.finished and len(answer.tokens) > 1)

    def refused(message: str, change: Callable[[Said], Said]) -> None:
        other = [change(answer) if number == place else answer for number, answer in enumerate(ours)]
        with pytest.raises(ValueError, match=f"to sample {place + 1} of 16: {message}"):
            trial.proof(other, "another")
        assert "another: 15 of 16" in trial.difference(other, "another") or message.startswith("log p")

    for number in (PAD, BOS):  # their log p would be −∞
        refused("token 2 is '<.*>', and weft's '.*'", lambda s, n=number: s._replace(tokens=(s.tokens[0], n)))  # type: ignore[misc]
    refused("token 1 is '.*', and weft's '.*'", lambda s: s._replace(tokens=(EOS + 1, EOS + 1)))
    refused("token 2 is '</s>', and weft's '.*'", lambda s: s._replace(tokens=s.tokens[:1]))
    refused("it ends after [0-9]+ tokens without EOS", lambda s: s._replace(finished=False))
    refused("it ends after 0 tokens without EOS", lambda s: s._replace(tokens=(), finished=False))
    for wrong in (ours[place].log_prob - 0.01, ours[place].log_prob + 0.01, math.nan, -math.inf):
        refused("log p is ", lambda s, w=wrong: s._replace(log_prob=w))  # type: ignore[misc]


def test_parameters_that_are_no_numbers_are_seen() -> None:
    config, pair = tiny(), vocabularies()
    model = make(config).requires_grad_(False)
    trial = Trial(model, pair, ["snow"])
    (found,) = searched(model, trial.sources, max_extra=trial.limit)
    assert model.target_embedding is not None
    model.target_embedding.mul_(math.nan)
    with pytest.raises(ValueError, match="to sample 1 of 1: token 1 is"):
        trial.proof([Said(found.tokens, found.log_prob, found.finished)], "another")


def test_what_is_written_aside_is_there_at_the_end_or_never(tmp_path: Path) -> None:
    with aside(tmp_path / "a" / "b" / "out") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a" / "b" / "out").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b", "out", "file"]

    def stopped() -> None:
        with aside(tmp_path / "c" / "d" / "out") as folder:
            (folder / "file").write_text("x")
            raise KeyboardInterrupt

    (tmp_path / "c").mkdir()
    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert list((tmp_path / "c").iterdir()) == []
