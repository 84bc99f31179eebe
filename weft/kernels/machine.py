"""What this machine can do: for the rules that pick a fast way, and for the line above a log."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from pathlib import Path

import torch

MMAP_THRESHOLD, TOP_PAD, TRIM_THRESHOLD = -3, -2, -1  # mallopt's parameters
_BF16_PRODUCTS = ("amx_bf16", "avx512_bf16", "bf16", "sve_bf16")  # the last two are ARM's


@cache
def bf16_products() -> bool:
    """Whether the CPU multiplies bf16 matrices natively, so that bf16 is the faster type.

    oneDNN's yes means that it has a bf16 path, which need not be made of bf16 instructions: hence the
    question to the CPU itself. oneDNN is asked too, since it can be missing or held back.
    """
    ask = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if ask is None or not ask():
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BF16_PRODUCTS)


def describe() -> str:
    """This machine in one line: CPU, threads in use, vector instructions, bf16 products, torch."""
    return ", ".join(
        (
            cpu_name(),
            f"{torch.get_num_threads()} thread{'s' * (torch.get_num_threads() != 1)}",
            torch.backends.cpu.get_cpu_capability(),
            "bf16 products" if bf16_products() else "no bf16 products",
            f"torch {torch.__version__}",
        )
    )


def keep_memory() -> bool:
    """Let glibc keep freed memory instead of giving it back to the system; for the whole process.

    Otherwise large tensors come fresh from the system at each call, and their pages are faulted in and zeroed every
    time: two exp of 4 MB made 2,016 page faults, and now make none. What is free already is given back: in pieces, it
    would not serve. Returns whether there was a glibc to tell.
    """
    glibc("malloc_trim", 0)
    large = any(glibc("mallopt", MMAP_THRESHOLD, size) for size in (1 << 30, 1 << 25))  # old ones: ≤ 32 MiB
    return large and bool(glibc("mallopt", TRIM_THRESHOLD, -1) and glibc("mallopt", TOP_PAD, 64 << 20))


def remember_few_products(count: int = 64) -> None:
    """Let torch and oneDNN keep what they made for the last so many shapes of bf16 products; before the first of them.

    Else it is 1,024, of 0.6 MB and more each: 900 products of up to 200 heights took 290 MB, and a long training on
    batches of any shape 3.6 GB in all. Updates take as long with 64. What the environment says already stays.
    """
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(count))


def glibc(name: str, *arguments: int) -> int:
    """A call of glibc; 0 where there is none."""
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, TypeError, AttributeError):
        return 0
    result: int = function(*arguments)
    return result


@cache
def cpu_name() -> str:
    """What the CPU is called."""
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "unknown CPU"


@cache
def cpu_instructions() -> str:
    """Everything that tells one kind of CPU from another, for what was compiled for this one."""
    return f"{cpu_name()} {platform.machine()} {_cpuinfo('flags') or _cpuinfo('Features')}"


def _cpuinfo(key: str) -> str:
    """What Linux says of the first CPU under this key; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
