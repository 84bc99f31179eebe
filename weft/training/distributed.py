"""One process or many: who am I, and sums over all of us. The loop knows ranks only through this file.

Under torchrun each process reads its place from the environment. Gradients are summed after the last micro-batch of
a step, as one flat tensor; with token counts summed likewise, a step of w ranks is the step of one process with
w times as many micro-batches. Every rank holds the whole model; sharding it (FSDP2) is not here yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PATIENCE = timedelta(hours=12)  # the others wait while the first rank validates


@dataclass(frozen=True)
class Ranks:
    """This process among its equals.

    Attributes:
        rank: its number, from 0. The first writes all files.
        world: how many there are.
        device: where its tensors live.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes and reports."""
        return self.rank == 0

    def place(self, batch: Any) -> Any:
        """A batch, which is a named tuple of tensors (or None), on this process's device."""
        if self.device.type == "cpu":
            return batch
        moved = (None if part is None else part.to(self.device, non_blocking=True) for part in batch)
        return type(batch)(*moved)

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """Each value summed over all ranks, in fp64."""
        if self.world == 1:
            return dict(values)
        total = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replace each tensor by its sum over all ranks."""
        if self.world == 1:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.sums({"flag": float(flag)})["flag"] > 0

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the first rank."""
        if self.world == 1:
            return
        for tensor in tensors:
            dist.broadcast(tensor.detach(), src=0)

    def share_json(self, value: Any) -> Any:
        """What the first rank gave, on all ranks; it must be fit for JSON."""
        if self.world == 1:
            return value
        text = json.dumps(value).encode()
        size = torch.tensor(len(text), device=self.device)
        dist.broadcast(size, src=0)
        room = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.first:
            room.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(room, src=0)
        return json.loads(bytes(room.tolist()))


def is_first() -> bool:
    """Whether this process is the one that writes and reports, as torchrun says; it is if it is alone."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined() -> Iterator[Ranks]:
    """Take this process's place among those that torchrun started; without it, alone on the CPU. May be nested.

    Raises:
        ValueError: if the environment names a rank but not how many there are, or the other way round.
    """
    given = [os.environ.get(name) for name in ("RANK", "WORLD_SIZE")]
    if (given[0] is None) != (given[1] is None):
        raise ValueError(f"RANK and WORLD_SIZE belong together, but RANK is {given[0]} and WORLD_SIZE {given[1]}")
    rank, world = int(given[0] or 0), int(given[1] or 1)
    device = torch.device("cpu")
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    begun = world > 1 and not dist.is_initialized()
    if begun:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_PATIENCE)
    try:
        yield Ranks(rank, world, device)
    finally:
        if begun:
            dist.destroy_process_group()
