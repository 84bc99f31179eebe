"""A run folder: what a run was begun with, its saved steps, and its metrics, safe against a stop at any instant.

    run.json         the recipe, the machine, and what was chosen once for the whole run
    step-000500/     *.safetensors, state.json, and manifest.json with the sha256 of each
    latest           the name of the newest step
    metrics.jsonl    one event a line
    lock             held by the process that trains here

A step is written aside, every file and the folder brought to the disk, and then renamed; ``latest`` moves last. So
what has a step's name is whole, and what is not whole is found by its checksums. Nothing is pickled.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft import __version__

FORMAT = 1
FOR_PEOPLE = ("name", "note")  # keys of a recipe that change no number
_ASIDE = ".aside-"  # begins the name of what is not finished, or is about to go

Note = Callable[[str], None]


class RunFolder:
    """One run's folder. Other files may stand in it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the folder; nothing is read or made yet."""
        self.path = Path(path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, keep other trainers out of it, and clear away what a stopped one left unfinished.

        The lock belongs to the process: it ends with it, however that ends.

        Raises:
            OSError: if another process trains here, or the folder cannot be made.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                raise OSError(f"{self.path}: {holder} is training here; wait for it, or take another folder") from None
            file.truncate(0)
            file.write(f"process {os.getpid()}")
            file.flush()
            for left in self.path.glob(_ASIDE + "*"):
                _remove(left)
            yield

    def check_room(self) -> None:
        """See that a run can be written here, and that nothing else is here which it would write over.

        Raises:
            OSError: if this or a folder above it is a file or may not be written to.
            ValueError: if it holds something else than a run.
        """
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(f"{there} is a file: a run is written into a folder")
        if not os.access(there, os.W_OK):
            raise PermissionError(f"{there} may not be written to")
        others = [path.name for path in self.path.iterdir() if path.name != "lock"] if self.path.exists() else []
        if others and not (self.path / "run.json").is_file():
            raise ValueError(f"{self.path} is no run, but holds {sorted(others)[0]}: choose another folder")

    def begin(
        self,
        identity: Mapping[str, Any],
        facts: Mapping[str, str],
        choices: Mapping[str, str],
        *,
        fork: bool = False,
        note: Note,
    ) -> dict[str, str]:
        """Write down what this run is, or check that it is the one that was begun here.

        Args:
            identity: the resolved recipe; what differs in it makes another run, save for names and notes.
            facts: the machine and its like, on which the last bits may depend; a difference is told to ``note``.
            choices: what this start would choose where the recipe leaves it open.
            fork: go on with a changed recipe, which becomes the run's own.
            note: takes the warnings.

        Returns:
            The choices of the run's first start.

        Raises:
            ValueError: if the recipe has changed and ``fork`` is not given, or run.json is of another format.
        """
        record = {"format": FORMAT, "weft": __version__, "identity": identity, "facts": facts, "choices": choices}
        given: dict[str, Any] = json.loads(json.dumps(record))
        if not (self.path / "run.json").exists():
            self._replace("run.json", json.dumps(given, indent=1))
            return dict(given["choices"])
        begun = _read_json(self.path / "run.json")
        if begun.get("format") != FORMAT:
            raise ValueError(f"{self.path}: run.json has format {begun.get('format')}, expected {FORMAT}")
        changed = differences(begun["identity"], given["identity"])
        changed = {key: values for key, values in changed.items() if key not in FOR_PEOPLE}
        if changed and not fork:
            told = ", ".join(f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed.items())
            raise ValueError(
                f"{self.path} was begun with another recipe: {told}; take another folder, or --fork to go on so"
            )
        if changed:
            note(f"{self.path} goes on with a changed recipe: {', '.join(changed)}")
            self._replace("run.json", json.dumps({**begun, "identity": given["identity"]}, indent=1))
        for key, (old, new) in differences(begun["facts"], given["facts"]).items():
            note(f"{key} was {old} and is {new}: the results may differ from those of an unbroken run")
        return dict(begun["choices"])

    def steps(self) -> list[int]:
        """The saved steps that are there, whole or not, in order."""
        names = (folder.name.removeprefix("step-") for folder in self.path.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def save(self, step: int, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> None:
        """Write a step: ``NAME.safetensors`` for each group of tensors, and the state as JSON.

        Raises:
            OSError: if it cannot be written; what was saved before stays as it was.
        """
        folder = self._folder(step)
        aside = folder.with_name(_ASIDE + folder.name)
        _remove(aside)
        aside.mkdir()
        try:
            for name, group in tensors.items():
                save_file({key: value.detach() for key, value in group.items()}, aside / f"{name}.safetensors")
            (aside / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
            sums = {file.name: _sha256(file) for file in sorted(aside.iterdir())}
            (aside / "manifest.json").write_text(json.dumps({"format": FORMAT, "sha256": sums}, indent=1))
            for file in sorted(aside.iterdir()):
                _sync(file)
            _sync(aside)
            if (self.path / "metrics.jsonl").exists():
                _sync(self.path / "metrics.jsonl")  # what was told up to this step must not be lost behind it
            self._discard(step)
            os.rename(aside, folder)
        except BaseException:
            _remove(aside)
            raise
        _sync(self.path)
        self._replace("latest", f"{folder.name}\n")

    def newest(self, needs: Callable[[Mapping[str, Any]], Iterable[int]], note: Note) -> dict[str, Any] | None:
        """The state of the newest step that is whole, and so are the steps that it needs; later ones are removed.

        Args:
            needs: the other steps that the run will read again, from a step's state.
            note: takes a line about each step that is damaged.

        Returns:
            Its state, or None if no step was saved.

        Raises:
            OSError: if there are steps but none is whole.
        """
        steps = self.steps()
        latest = self._latest()
        tried = [step for step in steps if latest is None or step <= latest] or steps
        for step in reversed(tried):
            fault = self.fault(step)
            if fault is None:
                state = self.state(step)
                fault = next((found for other in needs(state) if (found := self.fault(other))), None)
            if fault is None:
                if step != latest:
                    self._replace("latest", f"{self._folder(step).name}\n")
                self.prune([other for other in steps if other <= step])
                return state
            note(f"{fault}; going back to the step before")
        if steps:
            raise OSError(f"{self.path}: no saved step is whole; move the folder away to begin again")
        return None

    def fault(self, step: int) -> str | None:
        """What is wrong with a saved step; None if it is whole."""
        folder = self._folder(step)
        if not folder.is_dir():
            return f"{folder} is missing"
        try:
            sums = _read_json(folder / "manifest.json")["sha256"]
            for name, expected in sums.items():
                if _sha256(folder / name) != expected:
                    return f"{folder / name} is damaged: its checksum differs"
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{folder} is damaged: {error}"
        return None

    def state(self, step: int) -> dict[str, Any]:
        """The state that was saved with a step."""
        return _read_json(self._folder(step) / "state.json")

    def tensors(self, step: int, name: str) -> dict[str, Tensor]:
        """A group of tensors that was saved with a step; none if it has no such group."""
        path = self._folder(step) / f"{name}.safetensors"
        return load_file(path) if path.exists() else {}

    def prune(self, keep: Collection[int]) -> None:
        """Remove all saved steps but these."""
        for step in self.steps():
            if step not in keep:
                self._discard(step)

    def log(self, event: Mapping[str, Any]) -> None:
        """Append an event to metrics.jsonl. What is no finite number becomes null."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(event), allow_nan=False) + "\n")

    def cut_metrics(self, step: int) -> None:
        """Cut metrics.jsonl back to what was told up to this step; a line that is not whole goes too."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        end = 0
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                told = json.loads(line)["step"]
            except (ValueError, KeyError, TypeError):
                break
            if not line.endswith(b"\n") or told > step:
                break
            end += len(line)
        os.truncate(path, end)

    def _folder(self, step: int) -> Path:
        return self.path / f"step-{step:06d}"

    def _latest(self) -> int | None:
        try:
            name = (self.path / "latest").read_text(encoding="utf-8").strip().removeprefix("step-")
        except (OSError, UnicodeDecodeError):
            return None
        return int(name) if name.isdecimal() else None

    def _discard(self, step: int) -> None:
        """Remove a saved step, in one instant as seen from outside."""
        folder = self._folder(step)
        if folder.exists():
            aside = folder.with_name(f"{_ASIDE}old-{folder.name}")
            _remove(aside)
            os.rename(folder, aside)
            _remove(aside)

    def _replace(self, name: str, text: str) -> None:
        """Write a small file: the old text or the new one is there at every instant."""
        aside = self.path / (_ASIDE + name)
        aside.write_text(text, encoding="utf-8")
        _sync(aside)
        os.replace(aside, self.path / name)
        _sync(self.path)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two trees differ, with both values; None where there is none."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found |= {f"{key}.{inner}": pair for inner, pair in differences(before, after).items()}
        elif before != after:
            found[key] = (before, after)
    return found


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and lasting buffers by name; what is tied appears once, under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach() for name, tensor in found.values()}


@torch.no_grad()
def copy_into(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrite tensors with the values of the same names.

    Raises:
        ValueError: naming the first tensor that only one side has, or that has another shape.
    """
    for name in sorted(tensors.keys() | values.keys()):
        shapes = [list(side[name].shape) if name in side else "none" for side in (values, tensors)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"the saved step does not fit the model: it has {name} {shapes[0]}, expected {shapes[1]}")
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path}: expected an object, not {type(tree).__name__}")
    return tree


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Bring a file or a folder's list of names to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
