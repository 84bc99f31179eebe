"""What was seen: entries with their tensors and labels, to be read, saved to one file, and made of others' tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

_FORMAT = 1


@dataclass
class Seen:
    """What one call of one module showed.

    Attributes:
        name: the module's name in ``model.named_modules()``.
        kind: one of ``weft.observe.KINDS``, or what an outside record calls it.
        call: 0 for the module's first call under this record, 1 for its second, …; each kind is counted by itself.
        values: the tensors by name; attention has ``"weights"`` [B, H, N, M].
        queries, keys: token labels, if they were given by ``Record.label``.
        role: what an attention is in its model ("encoder self", "cross"), if that was given.
    """

    name: str
    kind: str
    call: int
    values: dict[str, Tensor]
    queries: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    role: str = ""

    @property
    def weights(self) -> Tensor:
        """The attention weights [batch, head, query, key]."""
        return self["weights"]

    def __getitem__(self, value: str) -> Tensor:
        if value not in self.values:
            raise KeyError(f"{self.name!r} showed {', '.join(self.values)}, not {value!r}")
        return self.values[value]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{k}{list(v.shape)}" for k, v in self.values.items())
        return f"Seen({self.name!r}, call {self.call}: {shapes})"


@dataclass
class Record:
    """Everything that was seen, in the order in which it happened.

    Attributes:
        entries: what was seen.
        about: what else there is to say, as plain JSON: texts, labels, how a search went.
    """

    entries: list[Seen] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        attentions: Sequence[Any] | Mapping[str, Any],
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        role: str = "self",
    ) -> Record:
        """A record of attention weights from anywhere, such as ``outputs.attentions`` of a model of transformers.

        Args:
            attentions: for each layer weights [B, H, N, M], tensors or arrays; with names, or "layer 1", "layer 2", …
            queries: N token labels.
            keys: M token labels; the queries' if None, where there are as many.
            role: what these attentions are.

        Raises:
            ValueError: if something is no [B, H, N, M] of numbers from 0 to 1, or labels do not fit.
        """
        if not isinstance(attentions, Mapping):
            attentions = {f"layer {number}": weights for number, weights in enumerate(attentions, 1)}
        record = cls()
        for name, given in attentions.items():
            if given is None:
                raise ValueError(f'{name}: no weights; transformers gives them with attn_implementation="eager"')
            weights = torch.as_tensor(given).detach().float().cpu()
            if weights.dim() != 4:
                raise ValueError(f"{name}: expected weights [batch, head, query, key], not {list(weights.shape)}")
            if not bool(((weights >= 0) & (weights <= 1 + 1e-5)).all()):  # NaN is neither
                raise ValueError(f"{name}: weights of attention lie between 0 and 1, and these do not")
            record.entries.append(Seen(name, "weights", 0, {"weights": weights}))
        if record.entries:
            square = all(entry.weights.shape[-2] == entry.weights.shape[-1] for entry in record)
            record.label("*", queries=queries, keys=queries if keys is None and square else keys, role=role)
        return record

    def calls(self, name: str, kind: str | None = None) -> list[Seen]:
        """All calls of the module ``name``, first to last; of one kind, or of all."""
        found = [entry for entry in self.entries if entry.name == name and kind in (None, entry.kind)]
        if not found:
            names = list(dict.fromkeys(entry.name for entry in self.entries))
            near = get_close_matches(name, names, n=1) or names[:1]
            hint = f"; did you mean {near[0]!r}?" if near else ": nothing was recorded"
            raise KeyError(f"no record of {name!r}{hint}")
        return found

    def __getitem__(self, name: str) -> Seen:
        found = self.calls(name)
        if len(kinds := sorted({entry.kind for entry in found})) > 1:
            raise KeyError(f"{name!r} showed {' and '.join(kinds)}: use calls({name!r}, kind)[i]")
        if len(found) > 1:
            raise KeyError(f"{name!r} was called {len(found)} times: use calls({name!r})[i]")
        return found[0]

    def __iter__(self) -> Iterator[Seen]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __contains__(self, name: str) -> bool:
        return any(entry.name == name for entry in self.entries)

    def of_kind(self, kind: str) -> list[Seen]:
        """The entries of one kind, in order."""
        return [entry for entry in self.entries if entry.kind == kind]

    def label(
        self,
        pattern: str,
        *,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
        role: str | None = None,
    ) -> None:
        """Give token labels, and a role, to every attention entry whose name matches the shell-style ``pattern``.

        Raises:
            ValueError: if nothing matches, or a list is not as long as that side of the weights.
        """
        found = [e for e in self.entries if e.kind == "weights" and fnmatchcase(e.name, pattern)]
        if not found:
            raise ValueError(f"no recorded attention matches {pattern!r}")
        for entry in found:
            entry.role = entry.role if role is None else role
        for side, labels, dim in (("queries", queries, -2), ("keys", keys, -1)):
            if labels is None:
                continue
            for entry in found:
                if len(labels) != entry.weights.shape[dim]:
                    raise ValueError(
                        f"{entry.name!r} has {entry.weights.shape[dim]} {side}, but {len(labels)} labels were given"
                    )
                setattr(entry, side, tuple(labels))

    def numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """All tensors as arrays, named "module/value" and from a module's second call on "module#1/value"."""
        arrays = {}
        for entry in self.entries:
            for name, value in entry.values.items():
                wide = value.float() if value.dtype == torch.bfloat16 else value  # numpy has no bf16
                call = f"#{entry.call}" if entry.call else ""
                arrays[f"{entry.name}{call}/{name}"] = wide.cpu().numpy()
        return arrays

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one file, in the format of safetensors.

        Raises:
            OSError: if it cannot be written.
            ValueError: if ``about`` holds what JSON has no words for.
        """
        tensors, entries = {}, []
        for number, entry in enumerate(self.entries):
            told = {key: value for key, value in asdict(_bare(entry)).items() if key != "values"}
            entries.append({**told, "values": list(entry.values)})
            for name, value in entry.values.items():
                tensors[f"{number}.{name}"] = value.detach().cpu().contiguous().clone()
        told = {"format": _FORMAT, "entries": entries, "about": self.about}
        try:
            save_file(tensors, os.fspath(path), {"weft_record": json.dumps(told, ensure_ascii=False)})
        except SafetensorError as error:
            raise OSError(f"cannot write {os.fspath(path)}: {error}") from None
        except TypeError as error:
            raise ValueError(f"about must hold what JSON can say: {error}") from None

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Read what ``save`` wrote.

        Raises:
            OSError: if there is no such file.
            ValueError: if it is no record, or a newer one than this weft reads.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no such file: {os.fspath(path)}")
        try:
            with safe_open(os.fspath(path), "pt") as file:
                told = json.loads((file.metadata() or {}).get("weft_record", "null"))
                if told is None:
                    raise ValueError("it holds tensors, but no record")
                if told["format"] != _FORMAT:
                    raise ValueError(f"its format is {told['format']}, and this weft reads {_FORMAT}")
                entries = [
                    Seen(
                        str(entry["name"]),
                        str(entry["kind"]),
                        int(entry["call"]),
                        {str(name): file.get_tensor(f"{number}.{name}") for name in entry["values"]},
                        _labels(entry["queries"]),
                        _labels(entry["keys"]),
                        str(entry["role"]),
                    )
                    for number, entry in enumerate(told["entries"])
                ]
                return cls(entries, dict(told["about"]))
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{os.fspath(path)} is no record of attention: {error}") from error


def _bare(entry: Seen) -> Seen:
    """The entry without its tensors, which asdict would copy."""
    return Seen(entry.name, entry.kind, entry.call, {}, entry.queries, entry.keys, entry.role)


def _labels(given: Sequence[Any] | None) -> tuple[str, ...] | None:
    return None if given is None else tuple(map(str, given))
