"""The house keeps its rules: who may import whom, the file maps are true, no file grows out of hand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Room -> the rooms it may import, besides itself. docs/architecture.md tells the same in words.
_GROUND = {"config", "observe"}
_TENSORS = _GROUND | {"kernels", "layers", "models"}
_ABOVE_MODELS = _TENSORS | {"data"}
_API = _ABOVE_MODELS | {"decoding", "folder", "interop", "views"}
_EVALUATION = _API | {"api"}
_TOP = _EVALUATION | {"evaluation"}
ALLOWED: dict[str, set[str]] = {
    "config": set(),
    "observe": set(),
    "kernels": _GROUND,
    "layers": _GROUND | {"kernels"},
    "models": _GROUND | {"kernels", "layers"},
    "data": {"config"},
    "decoding": _ABOVE_MODELS,
    "interop": _ABOVE_MODELS,
    "folder": _ABOVE_MODELS,
    "views": {"observe"},
    "api": _API,
    "evaluation": _EVALUATION,
    "training": _TOP,
    "serving": _TOP,
    "cli": _TOP | {"training", "serving"},
    "__init__": {"config", "observe", "folder", "api"},
    "__main__": {"cli"},
}
# What knows tensors only: these rooms import nothing from outside but torch.
TORCH_ONLY = {"kernels", "layers"}
# Folders of the project that the package must do without.
OUTSIDE = {"benchmarks", "docs", "examples", "tests"}


def tracked() -> list[str]:
    """The project's files as paths from its root: what git knows or would add, or without git what is there."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True) if (ROOT / ".git").exists() else None
    if listed is not None and listed.returncode == 0:
        names = [name for name in listed.stdout.split("\0") if name]
    else:
        paths = (path for folder in ("weft", *OUTSIDE) for path in (ROOT / folder).rglob("*"))
        names = [path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts]
    return sorted(name for name in names if (ROOT / name).is_file())  # git lists deleted files too


FILES = tracked()
PACKAGE = [name for name in FILES if name.startswith("weft/") and name.endswith(".py")]


def room_of(name: str) -> str:
    """``weft/kernels/mask.py`` -> ``kernels``; ``weft/observe.py`` -> ``observe``."""
    return name.split("/")[1].removesuffix(".py")


def imported(source: str, name: str) -> Iterator[str]:
    """The full dotted names that the file ``name`` imports anywhere, in function bodies too."""
    package = name.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                start = package[: len(package) - level + 1] if level else []
                origin = ".".join([*start, *([module] if module else [])])
                # `from weft import layers` imports a room, and `from weft import record` goes to its front door
                yield from (f"{origin}.{alias.name}" for alias in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(module)), *_]):
                if getattr(func, "attr", getattr(func, "id", "")) in ("import_module", "__import__"):
                    yield module


def trespasses(source: str, name: str) -> list[str]:
    """What the file ``name`` imports against the rules."""
    room = room_of(name)
    found = []
    for module in imported(source, name):
        top, _, rest = module.partition(".")
        target = rest.partition(".")[0]
        if top in OUTSIDE:
            found.append(f"{module}: the package must do without {top}/")
        elif top == "weft":
            if target not in ALLOWED[room] | {room, "__version__"}:
                found.append(f"{module}: {room} may import {', '.join(sorted(ALLOWED[room])) or 'no other room'}")
        elif room in TORCH_ONLY and top not in sys.stdlib_module_names | {"torch"}:
            found.append(f"{module}: {room} knows torch only")
    return found


def test_every_file_stands_in_a_room_of_the_house() -> None:
    assert [name for name in PACKAGE if room_of(name) not in ALLOWED] == []


def test_imports_go_one_way() -> None:
    found = {name: trespasses((ROOT / name).read_text(encoding="utf-8"), name) for name in PACKAGE}
    assert {name: faults for name, faults in found.items() if faults} == {}


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("weft/kernels/a.py", "import weft.layers.blocks"),
        ("weft/kernels/a.py", "from weft import layers"),
        ("weft/kernels/a.py", "from weft import record"),
        ("weft/kernels/a.py", "from weft.layers import blocks"),
        ("weft/kernels/a.py", "from ..layers import blocks"),
        ("weft/kernels/a.py", "from .. import layers"),
        ("weft/kernels/a.py", "def f():\n    from weft.layers.blocks import Block"),
        ("weft/kernels/a.py", "if TYPE_CHECKING:\n    from weft.models.gpt import GPT"),
        ("weft/kernels/a.py", "import importlib\nx = importlib.import_module('weft.layers')"),
        ("weft/kernels/deep/a.py", "from ...layers import blocks"),
        ("weft/kernels/a.py", "import numpy"),
        ("weft/layers/a.py", "import tokenizers"),
        ("weft/observe.py", "from .kernels import mask"),
        ("weft/observe.py", "from weft import config"),
        ("weft/data/a.py", "from weft.kernels import mask"),
        ("weft/views/a.py", "from weft.layers.attention import MultiHeadAttention"),
        ("weft/api/translator.py", "from weft import training"),
        ("weft/cli.py", "import benchmarks.kernels"),
    ],
)
def test_a_wrong_import_is_seen(name: str, source: str) -> None:
    assert len(trespasses(source, name)) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("weft/kernels/a.py", "import math\nimport torch.nn.functional as F\nfrom weft.kernels.mask import Mask"),
        ("weft/kernels/a.py", "from . import mask\nfrom .mask import Mask\nfrom weft import observe, __version__"),
        ("weft/layers/a.py", "from ..kernels.mask import Mask\nfrom weft import observe"),
        ("weft/views/a.py", "import numpy\nfrom weft.observe import Record"),
        ("weft/cli.py", "def f():\n    from weft.training import loop"),
    ],
)
def test_a_right_import_is_let_through(name: str, source: str) -> None:
    assert trespasses(source, name) == []


MAPPED = ("weft/", "benchmarks/", "examples/", "docs/")
# Folders whose files one line may stand for.
GROUPS = ("docs/pictures/", "weft/shipped/", "weft/views/page/")


def file_map(text: str) -> list[str] | None:
    """The paths that open the lines of the first fenced block that maps the package, or None."""
    for block in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        paths = [line.split()[0] for line in block.splitlines() if line.strip()]
        if sum(path.startswith("weft/") for path in paths) >= 3:
            return paths
    return None


def unlisted(paths: list[str], files: list[str]) -> list[str]:
    """The files, and the folders of tests, that a map names neither by themselves nor by their folder.

    The ``__init__.py`` of a room needs no line: it says what the room is for.
    """
    needed = {name for name in files if name.startswith(MAPPED) and not re.fullmatch(r"weft/.+/__init__\.py", name)}
    needed |= {name.rpartition("/")[0] + "/" for name in files if name.startswith("tests/")}
    folders = tuple(path for path in paths if path.endswith("/") and path.startswith(MAPPED))
    return sorted(name for name in needed - set(paths) if not name.startswith(folders))


def map_faults(paths: list[str], files: list[str]) -> list[str]:
    """Where a map and the files that stand differ."""
    faults = [f"{path} is listed twice" for path in sorted({p for p in paths if paths.count(p) > 1})]
    for path in paths:
        if path.endswith("/") and not path.startswith(("tests/", *GROUPS)):
            faults.append(f"{path}: one line per file, please")
        if not any(fnmatchcase(name, path + "*" if path.endswith("/") else path) for name in files):
            faults.append(f"{path} is listed, but does not stand")
    return faults + [f"{name} stands, but is not listed" for name in unlisted(paths, files)]


def test_the_map_in_architecture_is_true() -> None:
    paths = file_map((ROOT / "docs/architecture.md").read_text(encoding="utf-8"))
    assert paths is not None, "docs/architecture.md has no fenced block with a line per file"
    assert map_faults(paths, FILES) == []


def test_the_map_in_the_readme_is_true() -> None:
    paths = file_map((ROOT / "README.md").read_text(encoding="utf-8"))
    assert paths is not None, "README.md has no fenced block with a line per file or folder"
    # Here a folder may stand for its files, and the tests need no line for each folder.
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert [name for name in unlisted(paths, FILES) if not name.startswith("tests/")] == []


def test_faults_of_a_map_are_seen() -> None:
    files = ["weft/__init__.py", "weft/layers/__init__.py", "weft/layers/a.py", "docs/pictures/x.png", "tests/t.py"]
    true = ["weft/__init__.py", "weft/layers/a.py", "docs/pictures/", "tests/"]
    assert map_faults(true, files) == []
    assert map_faults([*true, "weft/gone.py"], files) == ["weft/gone.py is listed, but does not stand"]
    assert map_faults([*true, "weft/layers/a.py"], files) == ["weft/layers/a.py is listed twice"]
    for missing in true:
        rest = [path for path in true if path != missing]
        assert [fault.endswith("stands, but is not listed") for fault in map_faults(rest, files)] == [True]
    folder = ["weft/__init__.py", "weft/layers/", "docs/pictures/", "tests/"]
    assert map_faults(folder, files) == ["weft/layers/: one line per file, please"]
    assert file_map("no block") is None
    block = "weft/__init__.py   names\nweft/a.py  a\n\nweft/b.py  b\ntests/  all\n"
    assert file_map(f"```sh\nls\n```\n\n```\n{block}```\n") == ["weft/__init__.py", "weft/a.py", "weft/b.py", "tests/"]


def test_no_file_over_a_thousand_lines() -> None:
    texts = [name for name in FILES if name.endswith((".py", ".md", ".toml", ".js", ".css", ".html"))]
    lengths = {name: (ROOT / name).read_text(encoding="utf-8").count("\n") for name in texts}
    assert {name: length for name, length in lengths.items() if length > 1000} == {}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")
def test_nothing_is_tracked_that_git_ignores() -> None:
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted({name.split("/")[0] for name in listed}) == []


def test_no_drawer_for_odds_and_ends() -> None:
    assert [name for name in FILES if Path(name).stem in ("utils", "util", "helpers", "common", "misc")] == []
