"""C++ that is compiled once a machine, where there is a compiler; without one everything runs in torch.

A step of decoding is a hundred small operations, and most of its time goes to calling them. `library` gives the same
arithmetic as a few plain functions (library.cpp: products, a Transformer, its searches), called through ctypes, without
Python's lock. It is made with c++, g++ or clang++ (or what CXX names) for this very CPU, in seconds, and kept in
weft's cache.

    WEFT_NATIVE=0    does without it
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from weft.config.places import cache_folder
from weft.kernels.machine import cpu_instructions

SOURCE = Path(__file__).parent
MAIN = "library.cpp"
FLAGS = ("-O2", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
OPENMP = "-fopenmp"  # left out where the compiler has none
EXACT = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")  # nothing that reorders a sum
PATIENCE = 300.0  # seconds that a compiler may take


class NoLibraryError(Exception):
    """Why there is none, in a line.

    Attributes:
        said: all that the compiler said.
    """

    def __init__(self, why: str, said: str = "") -> None:
        super().__init__(why)
        self.said = said


def library() -> ctypes.CDLL | None:
    """The compiled functions; None where there is no compiler, or nobody wants them."""
    return None if os.environ.get("WEFT_NATIVE") == "0" else _loaded()[0]


def why_not() -> str:
    """Why ``library`` is None; empty if it is not."""
    return "WEFT_NATIVE=0" if os.environ.get("WEFT_NATIVE") == "0" else _loaded()[1]


def name() -> str:
    """Which library it is: other sources, compilers, flags or CPUs have another name; "none" without one."""
    return Path(found._name).stem if (found := library()) is not None else "none"


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    try:
        path = built()
        try:
            return ctypes.CDLL(str(path)), ""
        except OSError:  # another system's, with the same home, or damaged
            path.unlink()
            return ctypes.CDLL(str(built())), ""
    except (NoLibraryError, OSError, RuntimeError) as problem:  # the last: nobody knows a home for the cache
        return None, str(problem)


def built(folder: Path | None = None) -> Path:
    """The library's file, compiled now if it is not there.

    It is named by all that it was made of: the source, the compiler, the flags and the CPU.

    Raises:
        NoLibraryError: if there is no compiler, or it fails for another reason than that it has no OpenMP.
        OSError: if the file cannot be written.
    """
    compiler = _compiler()
    said = _run([compiler, "--version"]).partition("\n")[0]
    parts = [(SOURCE / name).read_bytes() for name in sorted(os.listdir(SOURCE)) if name.endswith((".h", ".cpp"))]
    flags = (*FLAGS, *EXACT, OPENMP)
    made_of = b"\0".join([*parts, " ".join(flags).encode(), said.encode(), cpu_instructions().encode()])
    place = (cache_folder() if folder is None else folder) / "native"
    path = place / f"{hashlib.sha256(made_of).hexdigest()[:24]}.so"
    if not path.is_file():
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place) as aside:  # whole or not there, whoever else compiles it too
            command = [compiler, *FLAGS, *EXACT, str(SOURCE / MAIN), "-o", f"{aside}/{path.name}"]
            try:
                _run([*command, OPENMP])
            except NoLibraryError as problem:
                if not re.search(r"openmp|gomp|(lib|-l)i?omp", problem.said, re.IGNORECASE):
                    raise
                _run(command)
            with open(f"{aside}/{path.name}", "rb") as made:
                os.fsync(made.fileno())  # one that is cut short would end the process that loads it
            os.replace(f"{aside}/{path.name}", path)
    return path


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise NoLibraryError(f"no C++ compiler: {', '.join(names)} not found")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise NoLibraryError(f"{command[0]} failed: {problem}") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
        raise NoLibraryError(f"{command[0]} failed: {first.strip()}", done.stderr)
    return done.stdout
