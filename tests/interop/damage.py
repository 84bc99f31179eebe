"""Damages files and reads them, with little memory to spend: run as ``python damage.py COUNT KIND PATH [KIND PATH …]``.

Each reading must give a model or one line of complaint. Prints how many were read and how many refused, for each PATH.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from weft.interop import huggingface, llama2c

SPARE = 512 << 20  # bytes beyond what the process has when it begins
NUMBERS = ["0", "-1", "1e999", "NaN", "9223372036854775807", "1" * 5000, '"x"', "null", "[[]]", "{}", "true", "2.5"]
READERS: dict[str, Callable[[Path], object]] = {
    "huggingface": huggingface.read,
    "model": llama2c.read,
    "pieces": lambda path: llama2c.read_pieces(path).tokenizer(),
}


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The data with something about it changed, most often near an end, where files say what is in them."""
    reach = min(len(data), 3000)
    place = rng.choice([rng.randrange(reach), len(data) - 1 - rng.randrange(reach), rng.randrange(len(data))])
    match rng.randrange(6):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        case 2:
            value = rng.choice([0, 1, -1, 2**31 - 1, -(2**31), 0x616B3432])
            return data[:place] + value.to_bytes(4, "little", signed=True) + data[place + 4 :]
        case 3:
            return data[:place] + rng.choice([b"\xff" * 8, b"\0" * 8]) + data[place + 8 :]
        case 4:
            return data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place:]
        case _:
            digits = [i for i, byte in enumerate(data[:reach]) if chr(byte).isdigit()]
            if not digits:
                return data + b"\0"
            begin = end = rng.choice(digits)
            while end < len(data) and chr(data[end]).isdigit():
                end += 1
            return data[:begin] + rng.choice(NUMBERS).encode() + data[end:]


def copied(path: Path, work: Path) -> list[Path]:
    """The files of a fresh copy of a file or a folder."""
    if path.is_file():
        shutil.copy(path, work)
        return [work]
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(path, work)
    return sorted(work.iterdir())


def complaint(kind: str, path: Path) -> str | None:
    """What the reader says against a file, or None if it reads it."""
    try:
        READERS[kind](path)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def harm(count: int, kind: str, path: Path) -> None:
    rng, refused = random.Random(0), 0
    for _ in range(count):
        work = path.with_name(f"{path.name}.damaged")
        chosen = rng.choice(copied(path, work))
        data = chosen.read_bytes()
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            data = damaged(data, rng) or b"\0"
        chosen.write_bytes(data)
        said = complaint(kind, work)
        refused += said is not None
        assert said is None or len(said.splitlines()) == 1, f"not a line: {said!r}"
        assert said is None or len(said) < 1000, f"a long line: {said!r}"
    print(count - refused, refused)


if __name__ == "__main__":
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE, used + SPARE))
    for kind, path in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        harm(int(sys.argv[1]), kind, Path(path))
