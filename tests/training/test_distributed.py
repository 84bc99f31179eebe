"""Two processes do what one does with twice the micro-batches, and only the first writes."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import torch

from tests.training.toys import Batch, Server, assert_same, everything, metrics
from weft.training.checkpoint import RunFolder
from weft.training.distributed import Ranks, joined

PLAIN = {"model": "plain", "changes": {"accumulate": 1, "ema": 0.9}}


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def train_two(
    server: Server, folder: Path, stops: tuple[object, object] = (None, None), **arguments: object
) -> list[int]:
    """The exit codes of two ranks; each is told to keep to its own folder, so that what the second writes is seen."""
    port = free_port()
    started = []
    for rank, stop in enumerate(stops):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(server.start(folder / str(rank), environment=place, stop=stop, **arguments))
    first = server.wait(started[0])
    if first == 1:  # an error: the second would wait for the first for hours
        os.kill(started[1], signal.SIGKILL)
    return [first, server.wait(started[1])]


def test_two_ranks_are_one_process_with_twice_the_batches(server: Server, tmp_path: Path) -> None:
    assert train_two(server, tmp_path, **PLAIN) == [0, 0], (tmp_path / "0" / "said").read_text()
    alone = {**PLAIN, "changes": {"accumulate": 2, "ema": 0.9}}
    assert server.train(tmp_path / "alone", **alone) == 0
    two, one = everything(tmp_path / "0"), everything(tmp_path / "alone")
    for key, value in one.items():
        if isinstance(value, torch.Tensor) and not key.endswith("/seen"):
            torch.testing.assert_close(two[key], value, rtol=1e-6, atol=1e-6, msg=key)
    assert two["outcome"]["tokens"] == one["outcome"]["tokens"]
    for mine, theirs in zip(metrics(tmp_path / "0"), metrics(tmp_path / "alone"), strict=True):
        assert mine["step"] == theirs["step"]
        assert mine.get("loss", 0.0) == pytest.approx(theirs.get("loss", 0.0), abs=1e-6)
        assert mine.get("epoch") == theirs.get("epoch")
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == ["said"]


def test_two_ranks_resume_exactly_and_agree_when_to_stop(server: Server, tmp_path: Path) -> None:
    random = {"model": "gru", "changes": {"ema": 0.9}}
    assert train_two(server, tmp_path / "whole", **random) == [0, 0]
    broken = tmp_path / "broken"
    term = [int(signal.SIGTERM)]
    # Only the second rank hears the signal, in the middle of a step; both end that step, and the first saves it.
    assert train_two(server, broken, (None, ("mid-step", 7, term)), **random) == [143, 143]
    assert RunFolder(broken / "0").steps()[-1] == 7
    kill = ("mid-step", 8, [int(signal.SIGKILL)])
    codes = train_two(server, broken, (kill, kill), **random)
    assert codes[0] == -signal.SIGKILL
    assert codes[1] != 0  # killed too, or told by the loss of its connection
    assert train_two(server, broken, **random) == [0, 0]
    assert_same(everything(broken / "0"), everything(tmp_path / "whole" / "0"))


def test_alone_there_is_nothing_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with joined() as ranks:
        assert (ranks.rank, ranks.world, ranks.device.type, ranks.first) == (0, 1, "cpu", True)
        assert ranks.sums({"a": 0.1, "b": 2.0}) == {"a": 0.1, "b": 2.0}
        assert ranks.share_json({"a": [1]}) == {"a": [1]}
        assert [ranks.any(flag) for flag in (True, False)] == [True, False]
        tensor = torch.randn(3)
        kept = tensor.clone()
        ranks.add_up([tensor])
        ranks.share([tensor])
        assert torch.equal(tensor, kept)
        batch = Batch(tensor, tensor)
        assert ranks.place(batch) is batch
    assert not torch.distributed.is_initialized()


def test_a_batch_goes_to_the_device() -> None:
    placed = Ranks(0, 1, torch.device("meta")).place(Batch(torch.zeros(2), torch.zeros(3)))
    assert isinstance(placed, Batch)
    assert [tensor.device.type for tensor in placed] == ["meta", "meta"]


@pytest.mark.parametrize(("name", "value"), [("RANK", "1"), ("WORLD_SIZE", "2")])
def test_half_a_place_is_an_error(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for other in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="belong together"), joined():
        pass
