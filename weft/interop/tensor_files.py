"""Files of tensors that others wrote: safetensors and pickles of torch.save, one or several to a folder.

    model.safetensors      or, in several files, those that model.safetensors.index.json lists
    pytorch_model.bin      the same as a pickle

They are data: nothing of them is run. What a file says of its tensors is known before one is copied. A pickle
is a program, so it is read as a text first, and refused if it names anything but what tensors are made of; then torch
loads it with ``weights_only``, which refuses such things by itself, and maps the tensors instead of reading them.
"""

from __future__ import annotations

import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor

WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of the types that a parameter may be stored as

_PLAIN = re.compile(r"[\w.-]{1,200}")  # the name of a file, and no way out of its folder
_LARGEST_JSON = 1 << 26
_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_HARMLESS = {  # what a pickle of tensors asks for
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in _STORAGES),
}
_NAMING = {"GLOBAL", "STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"}  # the operations by which a pickle names something


class Stored(NamedTuple):
    """Tensors in files of which only the headers have been read.

    Attributes:
        headers: shape and type of each tensor by its name; types are named as in safetensors.
        get: a tensor by its name.
        size: how many bytes the files have.
    """

    headers: Mapping[str, tuple[list[int], str]]
    get: Callable[[str], Tensor]
    size: int


@contextmanager
def opened(folder: Path) -> Iterator[Stored]:
    """The tensors of a folder, from safetensors if there are any, else from pickles.

    Raises:
        OSError: if there are none, or a file that an index lists is missing.
        ValueError: if a file is damaged, or a pickle holds more than tensors.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    if paths := _parts(folder, WEIGHTS):
        try:
            with ExitStack() as stack:
                yield _safetensors(paths, stack)
        except safetensors.SafetensorError as error:
            raise ValueError(f"{folder}: the tensors are damaged or cut short: {first_line(error)}") from None
    elif paths := _parts(folder, PICKLE):
        yield _pickles(paths)
    else:
        raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {PICKLE}")


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        OSError: if there is no such file.
        ValueError: if it holds no JSON object, or is too large for a configuration.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{path} has {path.stat().st_size} bytes: expected {_LARGEST_JSON} at most")
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {first_line(error)}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} holds no JSON object, but {short(tree)}")
    return tree


def short(value: object) -> str:
    """A value as Python writes it, cut where it gets long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _parts(folder: Path, name: str) -> list[Path]:
    """The file of this name, or those that its index lists, or none."""
    if (folder / name).is_file():
        return [folder / name]
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return []
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} has no 'weight_map' that says which tensor is where")
    for file in places.values():
        if not isinstance(file, str) or not _PLAIN.fullmatch(file):
            raise ValueError(f"{index} must list files of its folder, not {short(file)}")
    paths = [folder / file for file in sorted(set(places.values()))]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {short(path.name)}, which {index.name} lists")
    return paths


def _safetensors(paths: Sequence[Path], stack: ExitStack) -> Stored:
    headers: dict[str, tuple[list[int], str]] = {}
    files: dict[str, Any] = {}
    for path in paths:
        file = stack.enter_context(safetensors.safe_open(path, framework="pt"))  # reads the header only
        for name in file.keys():  # noqa: SIM118 (it is no dict)
            part = file.get_slice(name)
            _add(path, headers, name, list(part.get_shape()), str(part.get_dtype()))
            files[name] = file
    return Stored(headers, lambda name: files[name].get_tensor(name), _size(paths))


def _pickles(paths: Sequence[Path]) -> Stored:
    headers: dict[str, tuple[list[int], str]] = {}
    tensors: dict[str, Tensor] = {}
    for path in paths:
        _check_pickle(path)
        try:
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises whatever a damaged file leads it to
            raise ValueError(f"{path} is damaged: {first_line(error)}") from None
        if not isinstance(tree, dict):
            raise ValueError(f"{path} holds a {type(tree).__name__}: expected tensors by their names")
        for name, tensor in tree.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ValueError(f"{path} holds something else than a tensor under {short(name)}")
            _add(path, headers, name, list(tensor.shape), _KINDS.get(tensor.dtype, str(tensor.dtype)))
            tensors[name] = tensor.detach()
    return Stored(headers, lambda name: tensors[name], _size(paths))


def _check_pickle(path: Path) -> None:
    """Raise ValueError if a file of torch.save names anything but what tensors are made of, or is compressed."""
    try:
        with zipfile.ZipFile(path) as file:
            records = file.infolist()
            programs = [record for record in records if record.filename.rpartition("/")[2] == "data.pkl"]
            if len(programs) != 1 or any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise zipfile.BadZipFile("expected one data.pkl, and no record compressed")
            program = file.read(programs[0])
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, struct.error) as error:
        raise ValueError(f"{path} is damaged, or of torch before 1.6: {first_line(error)}") from None
    try:
        named = [(code.name, argument) for code, argument, _ in pickletools.genops(program) if code.name in _NAMING]
    except Exception as error:  # pickletools too
        raise ValueError(f"{path} is damaged: {first_line(error)}") from None
    for code, argument in named:
        if code != "GLOBAL" or argument not in _HARMLESS:
            raise ValueError(f"{path} holds more than tensors and is not loaded: it asks for {short(argument or code)}")


def _add(path: Path, headers: dict[str, tuple[list[int], str]], name: str, shape: list[int], kind: str) -> None:
    if name in headers:
        raise ValueError(f"{path} holds {short(name)}, which another file holds, too")
    headers[name] = shape, kind


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths)
