"""What the machine can do, against what the kernel of the operating system says of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weft.kernels import machine

CPUINFO = Path("/proc/cpuinfo")


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Both answers are cached: ask anew in each test, and leave nothing false behind."""
    machine.bf16_products.cache_clear()
    machine.cpu_name.cache_clear()
    yield
    machine.bf16_products.cache_clear()
    machine.cpu_name.cache_clear()


@pytest.mark.skipif(not CPUINFO.exists(), reason="no /proc/cpuinfo here")
def test_bf16_products_is_what_the_cpu_flags_say() -> None:
    words = set(CPUINFO.read_text().split())
    assert machine.bf16_products() is bool({"amx_bf16", "avx512_bf16", "bf16", "svebf16"} & words)


@pytest.mark.parametrize(
    ("onednn", "capabilities", "expected"),
    [
        (True, {"amx_bf16": True}, True),
        (True, {"avx512_bf16": True}, True),
        (True, {"avx512_f": True, "avx512_bf16": False}, False),  # a bf16 path without bf16 instructions
        (False, {"avx512_bf16": True}, False),  # oneDNN is held back
        (True, {"bf16": True}, True),  # ARM
    ],
)
def test_bf16_products_needs_the_cpu_and_onednn(
    monkeypatch: pytest.MonkeyPatch, onednn: bool, capabilities: dict[str, Any], expected: bool
) -> None:
    class Ops:
        @staticmethod
        def _is_mkldnn_bf16_supported() -> bool:
            return onednn

    monkeypatch.setattr(torch.ops, "mkldnn", Ops)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert machine.bf16_products() is expected


def test_a_torch_without_onednn_has_no_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert machine.bf16_products() is False


def test_describe_is_one_line_with_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(machine, "bf16_products", lambda: True)
    line = machine.describe()
    assert "\n" not in line
    capability = torch.backends.cpu.get_cpu_capability()
    assert line.endswith(f", 3 threads, {capability}, bf16 products, torch {torch.__version__}")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(machine, "bf16_products", lambda: False)
    assert machine.describe().endswith(f", 1 thread, {capability}, no bf16 products, torch {torch.__version__}")


@pytest.mark.skipif("model name" not in (CPUINFO.read_text() if CPUINFO.exists() else ""), reason="no CPU name here")
def test_describe_names_the_cpu() -> None:
    name = CPUINFO.read_text().split("model name", 1)[1].split("\n", 1)[0].lstrip("\t :").rstrip()
    assert machine.describe().startswith(name + ", ")


def test_a_machine_without_proc_has_a_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert machine.cpu_name() == "riscv64"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc here")
def test_products_of_many_shapes_do_not_add_up() -> None:
    """300 heights of bf16 products in a process of their own, whose memory may not grow by much after the first 100."""
    program = """
import torch
from weft.kernels import machine
machine.keep_memory()
machine.remember_few_products()
def resident():
    return next(int(line.split()[1]) // 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
weight = torch.randn(256, 64).bfloat16()
for rows in range(900, 1200):
    x = torch.randn(rows, 64).bfloat16()
    y = x @ weight.t()
    y.t() @ x, y @ weight
    if rows == 1000:
        before = resident()
print(resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40
