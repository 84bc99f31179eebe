"""The contestants of benchmarks/training.py are of one size, learn, and compute the same; its counts are true."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import characters, contestants, floor, peers, timing, training
from benchmarks.contestants import Contestant, Plain, Way, Weft
from benchmarks.peers import Case
from benchmarks.training import Data
from weft.config import BOS, EOS, PAD
from weft.data.batching import Batch
from weft.training import loop

TRANSLATION = Case("translation", 2, 3, 32, 48, 4, 6, 10, 300, dropout=0.1, smoothing=0.1)
LANGUAGE = Case("language", 0, 3, 32, 128, 4, 6, 10, 300, dropout=0.1, attention_dropout=0.1)
BOTH = pytest.mark.parametrize("case", [TRANSLATION, LANGUAGE], ids=lambda case: case.name)


def text(case: Case, padding: bool = True) -> Batch:
    """Random words; each row as long as the case says, or shorter by its number."""
    tokens = torch.randint(4, case.vocab_size, (2, case.rows, case.length))
    shorter = torch.arange(case.rows)[:, None] % 5 * (padding and case.translates)
    beyond = torch.arange(case.length) >= case.length - shorter
    source, target = tokens.masked_fill(beyond, PAD)
    target = torch.cat((torch.full((case.rows, 1), BOS), target), 1)
    return Batch(source if case.translates else target[:, :0], target)


def need(peer: str) -> None:
    if peer != "weft" and not peers.installed(peer):
        pytest.skip(f"{peer} is not installed")


@BOTH
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("who", ["weft", *peers.PEERS])
def test_each_contestant_learns(who: str, precision: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    need(who)
    monkeypatch.setattr(contestants, "_ADAM", contestants._ADAM.model_copy(update={"learning_rate": 1e-2}))
    case, way = replace(case, vocab_size=30), Way(who, precision)
    contestant, batch = way.start(case), text(case)
    losses = [contestant.update(batch) for _ in range(25)]
    assert losses[-1] < losses[0] - 0.5
    assert all(parameter.grad is None for parameter in contestant.model.parameters())
    assert str(way) == f"{who} {precision}"


@pytest.mark.parametrize("case", ["tiny", "gpt-small"])
@pytest.mark.parametrize("peer", peers.PEERS)
def test_contestants_are_of_one_size(peer: str, case: str) -> None:
    need(peer)
    sizes = training.CASES[case]
    theirs = contestants.parameter_count(peers.PEERS[peer](sizes))
    assert theirs == pytest.approx(contestants.parameter_count(peers.weft_model(sizes)), rel=0.01)


@BOTH
def test_with_copied_weights_torch_computes_the_same(case: Case) -> None:
    case = replace(case, dropout=0.0, attention_dropout=0.0)
    ours, theirs = Weft(case, "fp32"), Plain("torch", case, "fp32")
    batch = text(case)
    assert float(ours.nll(batch).detach()) != pytest.approx(float(theirs.nll(batch).detach()), rel=1e-3)
    with torch.no_grad():
        for parameter in ours.model.parameters():
            if parameter.dim() == 1:  # all norms start alike, and one put in another's place would not show
                parameter += 0.1 * torch.randn_like(parameter)
    peers.copy_weights(ours.model, theirs.model)
    for _ in range(4):  # gradients and optimisers agree as well
        assert ours.update(batch) == pytest.approx(theirs.update(batch), abs=1e-4)
    assert float(ours.nll(batch).detach()) == pytest.approx(float(theirs.nll(batch).detach()), rel=1e-4)


def count(batch: Batch) -> int:
    return int((batch.target[:, 1:] != PAD).sum())


@BOTH
@pytest.mark.parametrize("who", ["weft", "torch"])
def test_operations_are_those_of_the_step(who: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NATIVE", "0")  # torch does not count what is compiled
    contestant = Way(who, "fp32").start(case)
    batch = text(case, padding=who == "weft")  # weft's output layer leaves padding out, torch's does not

    def in_place(_: Any, a: tuple[int, int], b: tuple[int, int], out_shape: Any, **more: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    missing: Any = {torch.ops.aten.addmm_: in_place}
    with FlopCounterMode(display=False, custom_mapping=missing) as counter, sdpa_kernel(SDPBackend.MATH):
        contestant.update(batch)
    assert floor.operations(floor.products(case, count(batch))) == counter.get_total_flops()


@BOTH
def test_operations_are_those_of_the_formula(case: Case) -> None:
    tokens, d, f = case.rows * case.length, case.dim, case.ffn_dim
    encoder, decoder = case.encoder_layers, case.decoder_layers
    matrices = encoder * (4 * d * d + 2 * d * f) + decoder * ((8 if encoder else 4) * d * d + 2 * d * f)
    attention = 12 * (encoder + (2 if encoder else 1) * decoder) * tokens * case.length * d
    output = 6 * 41 * d * case.vocab_size
    assert floor.operations(floor.products(case, targets=41)) == 6 * tokens * matrices + attention + output


class Elements(TorchDispatchMode):
    """Counts the elements that come out of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) else out
        if isinstance(first, Tensor):
            self.found[func.overloadpacket.__name__] += first.numel()
        return out


@BOTH
def test_passes_are_those_of_a_plain_model(case: Case) -> None:
    contestant, batch = Plain("transformers", case, "fp32"), text(case, padding=False)
    with torch.no_grad(), Elements() as seen:
        contestant.nll(batch)
    drops = seen.found["bernoulli_"] + seen.found["native_dropout"]
    expected = floor.passes(case, count(batch))
    if case.attention_dropout:
        drops -= expected["softmax of attention"]
    assert expected == {
        "norm": seen.found["native_layer_norm"],
        "dropout and residual": drops,
        "activation": seen.found["relu" if case.translates else "gelu"],
        "softmax of attention": seen.found["_softmax"],
        "softmax of the output": seen.found["_log_softmax"],
    }


def test_the_floor_is_products_and_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "alternate", lambda ways, *_, **__: dict.fromkeys(ways, 2.0))
    case, speeds = TRANSLATION, floor.Speeds({"fp32": 1.0, "bf16": 2.0}, bandwidth=1e6)
    # a layer has 4 + 2 or 8 + 2 linear layers of three products each, its attentions six; the output three
    layers = 2 * (6 * 3 + 6) + 3 * (10 * 3 + 12) + 3
    elements = sum(floor.passes(case, 41).values())
    assert speeds.floor(case, 41, parameters=1000, rounds=1) == pytest.approx(
        {"products": 2.0 * layers, "passes": elements * 2 * 4 / 1e6, "optimiser": 28_000 / 1e6}
    )
    wide = replace(speeds, peaks={"fp32": 2.0, "bf16": 1.0})
    assert wide.floor(case, 41, 1000, 1)["passes"] == pytest.approx(elements * 4 * 4 / 1e6)


@pytest.fixture
def only_the_sample(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("WEFT_DATA", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))


@pytest.mark.usefixtures("only_the_sample")
def test_batches_are_text_of_one_shape() -> None:
    case = replace(TRANSLATION, vocab_size=600, length=16)
    data = training.read(case, 2)
    assert data.origin == "tatoeba-sample en-es"
    assert data.vocab_size == 600
    for batch in data.train:
        assert batch.source.shape == (case.rows, 16)
        assert batch.target.shape == (case.rows, 17)
        assert bool((batch.target[:, 0] == BOS).all())
        for row in (*batch.source.tolist(), *batch.target[:, 1:].tolist()):
            end = row.index(EOS)
            assert 11 <= end <= 15
            assert row[end + 1 :] == [PAD] * (15 - end)
            assert not {PAD, BOS, EOS} & set(row[:end])
    assert not torch.equal(data.train[0].source, data.train[1].source)
    held_out = {tuple(row) for batch in data.held_out for row in batch.source.tolist()}
    assert len(held_out) > 10
    assert not held_out & {tuple(row) for batch in data.train for row in batch.source.tolist()}


@pytest.mark.usefixtures("only_the_sample")
def test_a_language_models_batches_are_characters() -> None:
    data = training.read(LANGUAGE, 3)
    assert data.origin == "tatoeba-sample en"
    assert len(data.train) == 3
    for batch in (*data.train, data.held_out[0]):
        assert batch.source.shape == (6, 0)
        assert batch.target.shape == (6, 11)
        assert 4 <= int(batch.target.min()) <= int(batch.target.max()) < data.vocab_size
    first, second = data.held_out[0].target[:2]
    assert first[-1] == second[0]  # one window begins with the last character of the one before: none is left out


def test_shakespeare_has_65_characters(weft_data: Path) -> None:
    assert training.read(LANGUAGE, 1)[:2] == ("tinyshakespeare", 4 + 65)


class Seat:
    """Someone who takes part without a process."""

    def __init__(self, way: Way, seen: list[str], *seconds: float) -> None:
        self.way, self.seen, self.seconds = way, seen, iter(seconds)

    def first(self) -> float:
        return 60.0

    def turn(self) -> float:
        self.seen.append(self.way.who)
        return next(self.seconds)


def test_contestants_take_turns_and_the_median_counts() -> None:
    seen: list[str] = []
    ours, theirs = Way("weft", "fp32"), Way("torch", "fp32", compiled=True)
    seats: Any = [Seat(ours, seen, 1, 9, 2), Seat(theirs, seen, 3, 4, 50)]
    assert contestants.race(seats, rounds=3) == ({ours: 2, theirs: 4}, {theirs: 60.0})
    assert seen == ["weft", "torch", "torch", "weft", "weft", "torch"]  # nobody always follows the same one


def test_a_turn_times_updates_that_follow_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = [0.0], iter([8.0, 3.0, 2.0, *[0.0625] * 8, 7.0])

    def updates() -> Iterator[float]:
        for seconds in durations:
            now[0] += seconds
            yield 0.0

    monkeypatch.setattr(contestants, "_updates", updates(), raising=False)
    monkeypatch.setattr(contestants, "perf_counter", lambda: now[0])
    assert contestants._first() == 8.0
    assert contestants._turn() == 0.0625  # after two that are not timed, eight that are
    assert list(durations) == [7.0]


def test_what_fails_in_a_process_is_told() -> None:
    with (
        Contestant(Way("nobody", "fp32"), LANGUAGE, [text(LANGUAGE)]) as contestant,
        pytest.raises(KeyError, match="nobody"),
    ):
        contestant.turn()


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux tells")
def test_memory_is_that_of_an_update() -> None:
    case = replace(LANGUAGE, dim=64, rows=64, length=32, vocab_size=4000)
    with Contestant(Way("torch", "fp32"), case, [text(case)]) as contestant:
        found = contestant.memory()
    logits = case.rows * case.length * case.vocab_size * 4
    assert found is not None
    assert 2 * logits < found < 6 * logits  # logits, their logarithms, and gradients


def test_quality_compares_from_the_same_weights() -> None:
    case = replace(TRANSLATION, dropout=0.0)
    data = Data("random", case.vocab_size, [text(case), text(case)], [text(case)])
    found = training.quality(case, data, "fp32", steps=3)
    assert found["ratio"] == pytest.approx(found["weft"] / found["reference"])
    assert found["ratio"] == pytest.approx(1.0, abs=1e-4)
    assert found["weft"] == pytest.approx(5.7, abs=1.0)  # log 300, a token's


def test_who_takes_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(contestants.machine, "bf16_products", lambda: False)
    monkeypatch.setattr(peers, "installed", lambda peer: peer != "transformers")
    assert list(map(str, contestants.taking_part(compiled=False))) == ["weft fp32", "torch fp32", "x-transformers fp32"]
    assert "transformers is not installed" in capsys.readouterr().out
    everyone = set(map(str, contestants.taking_part(everything=True)))
    assert {"weft bf16", "torch bf16 compiled", "torch fp32", "x-transformers fp32 compiled"} <= everyone
    assert not any("weft" in name and "compiled" in name for name in everyone)


@pytest.mark.usefixtures("only_the_sample")
def test_the_program_measures_and_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {case.name: replace(case, vocab_size=600, mfu=0.3) for case in (TRANSLATION, LANGUAGE)}
    monkeypatch.setattr(training, "CASES", small)
    monkeypatch.setattr(floor, "SIDE", 64)
    monkeypatch.setattr(timing, "steady_memory", lambda: True)
    who = [Way("weft", loop.fastest_precision()), Way("torch", "fp32"), Way("torch", "bf16")]
    monkeypatch.setattr(training, "taking_part", lambda *_: [*who, Way("transformers", "fp32")])
    words = ["--quick", "--quality", "1", "--json", str(tmp_path / "out.json")]
    training.main([*words, "--only", "torch"])
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
    assert set(written) == {"speeds", "cases"}
    assert set(written["speeds"]["peaks"]) == {"fp32", "bf16"}
    assert set(written["cases"]) == set(small)
    for found in written["cases"].values():
        rows = found["contestants"]
        assert set(rows) == set(map(str, who))
        ours, best = rows[found["weft"]], rows[found["best_peer"]]
        assert found["best_peer"] == max((n for n in rows if "weft" not in n), key=lambda n: -rows[n]["seconds"])
        assert found["ratio"] == pytest.approx(best["seconds"] / ours["seconds"])
        least = sum(found["floor"][part] for part in ("products", "passes", "optimiser"))
        assert ours["floor_share"] == pytest.approx(least / ours["seconds"])
        assert ours["tokens_per_second"] == pytest.approx(found["targets"] / ours["seconds"])
        peak = max(written["speeds"]["peaks"].values())
        assert ours["mfu"] == pytest.approx(found["operations"] / ours["seconds"] / peak)
        assert found["quality"]["ratio"] > 0
    printed = capsys.readouterr().out
    assert printed.count("| translation | ") == len(written["cases"]["translation"]["contestants"])
    assert sum(line.startswith(("met", "MISSED")) for line in printed.splitlines()) == 6
    monkeypatch.setattr(training, "measure", lambda case, *_: written["cases"][case.name])
    monkeypatch.setattr(training, "FLOOR_SHARE", 1e9)
    with pytest.raises(SystemExit, match="1"):
        training.main(["--quick", "--strict"])
    with pytest.raises(SystemExit, match="2"):
        training.main(["--quick", "--only", "nobody"])


def test_nanogpts_rate_goes_up_and_down_to_a_tenth() -> None:
    rates = [characters.peer_rate(step) for step in range(1, characters.STEPS + 1)]
    assert rates[49] == pytest.approx(5e-4)
    assert max(rates) == pytest.approx(1e-3) == pytest.approx(rates[99])
    assert rates[-1] == pytest.approx(1e-4)
    assert rates[1049] == pytest.approx(5.5e-4)  # half way down


def test_character_models_are_trained_side_by_side(
    weft_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_DATA", str(weft_data))
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(characters, "ROUNDS", 1)
    monkeypatch.setattr(characters, "taking_part", lambda *_: [Way("weft", "fp32"), Way("torch", "fp32")])
    few = ["--steps", "3", "--peer-steps", "3", "--turns", "1", "--json", str(tmp_path / "out.json")]
    characters.main(few)
    said = capsys.readouterr().out
    assert "missed (at most 1.88)" in said  # nothing is learned in three steps
    runs = json.loads((tmp_path / "out.json").read_text())["results"]["runs"]
    assert len(runs) == 2
    for ((seconds, loss),) in runs.values():
        assert seconds > 0
        assert 3.0 < loss < 4.7  # about ln 69 at first
