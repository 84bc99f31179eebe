"""How long each row of a decoder's past is: a number while all rows are alike, a tensor when somebody asks for one."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from weft.kernels.mask import Mask


class Lengths:
    """The lengths of B rows, a value. All layers of a step ask the same of it: it remembers its last answers.

    Attributes:
        rows: B.
        longest: the length of the longest row, 0 of none.
        alike: whether all rows are as long as that.
    """

    def __init__(self, rows: int, longest: int, alike: bool, device: torch.device) -> None:
        """Use ``Lengths.same`` or ``Lengths.of``."""
        self.rows, self.longest, self.alike, self.device = rows, longest, alike, device
        self._after: tuple[int, Lengths] | None = None
        self._chosen: tuple[Tensor, Lengths] | None = None

    @classmethod
    def same(cls, rows: int, length: int, device: torch.device) -> Lengths:
        """So many rows of one length."""
        return cls(rows, length if rows else 0, True, device)

    @classmethod
    def of(cls, lengths: Tensor) -> Lengths:
        """What a tensor [B] says."""
        shortest, longest = (int(end) for end in lengths.aminmax()) if len(lengths) else (0, 0)
        made = cls(len(lengths), longest, shortest == longest, lengths.device)
        made.__dict__["tensor"] = lengths
        return made

    @cached_property
    def tensor(self) -> Tensor:
        """[B]."""
        return torch.full((self.rows,), self.longest, dtype=torch.int64, device=self.device)

    @cached_property
    def causal(self) -> Mask:
        """What tokens see that stand behind these: all before them, but not what lies behind a shorter row's end."""
        return Mask(causal=True, offset=self.tensor)

    def equal(self, other: Lengths) -> bool:
        """Whether all rows are as long as the other's."""
        if self is other:
            return True
        if self.alike and other.alike:
            return (self.rows, self.longest) == (other.rows, other.longest)
        return torch.equal(self.tensor, other.tensor)

    def plus(self, count: int) -> Lengths:
        """Each row longer by ``count``."""
        if self._after is None or self._after[0] != count:
            longer = self.same(self.rows, self.longest + count, self.device) if self.alike else None
            self._after = count, longer or self.of(self.tensor + count)
        return self._after[1]

    def select(self, rows: Tensor) -> Lengths:
        """The rows with these numbers, in this order."""
        if self._chosen is None or self._chosen[0] is not rows:
            alike = self.same(len(rows), self.longest, self.device) if self.alike else None
            self._chosen = rows, alike or self.of(self.tensor[rows])
        return self._chosen[1]
