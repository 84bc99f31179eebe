"""What multiplies blocks of bf16 (AMX) is tested without such a CPU too: compiled as for one, its unit emulated."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from weft.kernels import native
from weft.kernels.machine import cpu_instructions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
EMULATION = HERE / "emulated_tiles.h"
BY_BLOCKS = ("test_sublayers.py", "test_heads.py", "test_output.py")  # tests of what multiplies so

# Tests with another library; in processes which they start it is the ordinary one.
CHILD = """
import ctypes, sys
from pathlib import Path
import pytest
from weft.kernels import native
header, folder, *arguments = sys.argv[1:]
native.FLAGS += ("-include", header)
library = ctypes.CDLL(str(native.built(Path(folder))))
native._loaded = lambda: (library, "")
assert library.weft_multiplies_bf16() == 2
failed = pytest.main(arguments)
print("products:", library.emulated_products())
sys.exit(failed)
"""


def test_what_multiplies_by_blocks_passes_its_tests_with_emulated_ones(tmp_path: Path) -> None:
    library = native.library()
    if library is None:
        pytest.skip(f"no compiled library: {native.why_not()}")
    if "avx512_bf16" not in cpu_instructions().split():
        pytest.skip("this CPU has no vectors of bf16 (AVX512_BF16), of which blocks are made")
    if library.weft_multiplies_bf16() == 2:
        pytest.skip("this CPU multiplies blocks of bf16 itself (AMX), in the ordinary tests")
    files, report = [HERE / name for name in BY_BLOCKS if (HERE / name).is_file()], tmp_path / "report.xml"
    arguments = [*map(str, files), "--capture=sys", f"--basetemp={tmp_path / 'tests'}", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(EMULATION), str(tmp_path), *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.rpartition("products:")[2]) > 1000  # else all went another way
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert [case.get("name") for case in cases if case.find("skipped") is not None] == []
    assert {str(case.get("classname")) for case in cases} == {f"tests.kernels.{file.stem}" for file in files}
