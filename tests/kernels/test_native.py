"""What is compiled: products against float64, bits that no company changes; how it is made, kept and done without."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.decoding.table import batch
from weft.config import TransformerConfig
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.kernels import native
from weft.kernels.linear import narrowed, widened
from weft.models.compiled import Compiled, compiled
from weft.models.transformer import Transformer

KINDS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=["fp32", "bf16", "int8"])
ALL = pytest.mark.parametrize(
    ("dtype", "coarse"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.int8, False), (torch.int8, True)],
    ids=["fp32", "bf16", "int8", "coarse"],
)
COARSE = 64  # the largest whole number that a coarse input becomes
WIDTHS = [1, 7, 16, 17, 32, 50, 64, 65, 131]
AROUND = 64  # numbers before and behind a result, which must stay as they were


class Layer(Compiled):
    """One linear layer, packed as those of a model are; of int8 the inputs may be coarse, whatever their number."""

    def __init__(
        self, weight: Tensor, dtype: torch.dtype = torch.float32, bias: Tensor | None = None, coarse: bool = False
    ) -> None:
        library = native.library()
        if library is None:
            pytest.skip(f"nothing is compiled here: {native.why_not()}")
        self._library, self._kept, self._panel = library, [], library.weft_panel()
        if coarse:
            self.coarse_from = 1
        self.narrow, self.scale = narrowed(weight, dtype)
        self.wide = widened(self.narrow, self.scale).double()
        self.packed = self._matrix([(self.narrow, self.scale, bias)])

    def __call__(self, x: Tensor, threads: int = 1) -> Tensor:
        rows, x = len(x), x.contiguous()
        size = rows * self.packed.outputs
        room = torch.full((size + 2 * AROUND,), float("nan"))
        self._library.weft_linear(
            ctypes.c_void_p(x.data_ptr()),
            rows,
            ctypes.byref(self.packed),
            ctypes.c_void_p(room[AROUND:].data_ptr()),
            threads,
        )
        assert bool(room[:AROUND].isnan().all() and room[AROUND + size :].isnan().all())
        return room[AROUND : AROUND + size].view(rows, self.packed.outputs)


def most_error(layer: Layer, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """How far a result may be from the exact one: the rounding of each addition, and of inputs that become 16 bits."""
    sizes = x.abs().double() @ layer.wide.abs().T + (0.0 if bias is None else bias.abs())
    if dtype != torch.int8:
        return (x.shape[1] + 2) * 2.0**-24 * sizes
    step = x.abs().amax(1, keepdim=True).double() / 32767
    return 0.51 * step * layer.wide.abs().sum(1) + 4 * 2.0**-24 * sizes


@KINDS
@pytest.mark.parametrize("depth", [1, 2, 17, 128, 300])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_a_product_is_the_exact_one_but_for_its_rounding(dtype: torch.dtype, depth: int, biased: bool) -> None:
    for width in WIDTHS:
        bias = torch.randn(width) if biased else None
        layer = Layer(torch.randn(width, depth), dtype, bias)
        for rows in range(1, 21):
            x = torch.randn(rows, depth) * torch.rand(rows, 1) * 10
            expected = x.double() @ layer.wide.T + (0.0 if bias is None else bias)
            assert bool(((layer(x) - expected).abs() <= most_error(layer, x, bias, dtype)).all()), (width, rows)


def spread(rows: int, depth: int) -> Tensor:
    """Inputs of many sizes: drawn from a bell, all of one size, mostly zero, and all of one sign."""
    x = torch.randn(rows, depth) * 10 ** torch.randn(rows, 1)
    x[1::5] = torch.randn(len(x[1::5]), depth).sign()
    x[2::5] *= torch.rand(len(x[2::5]), depth) < 0.1
    x[3::5] = x[3::5].abs()
    return x


def extreme(width: int, depth: int) -> Tensor:
    """Weights of which half are as large as they can be."""
    weight = torch.randn(width, depth)
    return torch.where(torch.rand(width, depth) < 0.5, weight.sign() * 5.0, weight)


@pytest.mark.parametrize("depth", [1, 2, 7, 8, 9, 31, 32, 33, 100, 512, 2051])
@pytest.mark.parametrize("made", [torch.randn, extreme, torch.ones], ids=["bell", "extreme", "ones"])
def test_a_coarse_product_is_that_of_the_rounded_inputs(depth: int, made: Callable[[int, int], Tensor]) -> None:
    """Whole numbers are summed without a fault, whichever of the two ways they are multiplied in."""
    for width in (1, 16, 17, 50):
        bias = torch.randn(width)
        layer = Layer(made(width, depth), torch.int8, bias, coarse=True)
        assert layer.scale is not None
        for rows in (1, 2, 3, 5, 6, 7, 12, 40):
            x = spread(rows, depth)
            most = x.abs().amax(1, keepdim=True)
            whole = (x * torch.where(most > 0, COARSE / most, 0.0)).round()
            sums = whole.double() @ layer.narrow.double().T
            expected = sums * layer.scale.double() * most.double() / COARSE
            error = (layer(x) - (expected + bias)).abs()
            assert bool((error <= 4 * 2.0**-24 * (expected.abs() + bias.abs())).all()), (width, rows)


def test_inputs_are_coarse_where_there_are_many() -> None:
    for depth, coarse in ((511, False), (512, True)):
        x, weight = torch.randn(3, depth), torch.randn(20, depth)
        assert torch.equal(Layer(weight, torch.int8)(x), Layer(weight, torch.int8, coarse=True)(x)) == coarse


@ALL
def test_nothing_gives_nothing_and_zeros_the_bias(dtype: torch.dtype, coarse: bool) -> None:
    bias = torch.randn(21)
    layer = Layer(torch.randn(21, 17), dtype, bias, coarse)
    assert layer(torch.empty(0, 17)).shape == (0, 21)
    assert torch.equal(layer(torch.zeros(3, 17)), bias.expand(3, 21))


@ALL
@pytest.mark.parametrize("depth", [17, 128])
def test_a_row_has_the_same_bits_in_any_company_at_any_place(dtype: torch.dtype, coarse: bool, depth: int) -> None:
    layer = Layer(torch.randn(75, depth), dtype, torch.randn(75), coarse)
    x = torch.randn(70, depth) * 10 ** torch.randn(70, 1)
    whole = layer(x)
    for rows, threads in product(range(1, 71), (1, 2, 3)):
        chosen = torch.randperm(70)[:rows]
        assert torch.equal(layer(x[chosen], threads), whole[chosen]), (rows, threads)


@pytest.mark.parametrize("depth", [4096, 4097, 20_000])
def test_sums_of_whole_numbers_do_not_overflow(depth: int) -> None:
    signs = torch.ones(4, depth)
    signs[1] = -1.0
    signs[2, ::2] = -1.0
    signs[3, depth // 2 :] = -1.0
    layer = Layer(signs, torch.int8)
    expected = signs @ signs.T
    assert expected[0, 0] == depth
    torch.testing.assert_close(layer(signs), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer(1e30 * signs), 1e30 * expected, rtol=1e-6, atol=1e24)


NAN, INF = float("nan"), float("inf")


@ALL
@pytest.mark.parametrize("value", [NAN, INF])
def test_what_is_no_number_stays_none_and_spoils_no_other_row(dtype: torch.dtype, coarse: bool, value: float) -> None:
    layer, x = Layer(torch.randn(20, 19), dtype, coarse=coarse), torch.randn(3, 19)
    before = layer(x)
    for place in range(19):
        damaged = x.clone()
        damaged[1, place] = value
        after = layer(damaged)
        assert not after[1].isfinite().any(), place
        assert torch.equal(after[::2], before[::2])


@pytest.fixture
def anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that has not asked for the library yet."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WEFT_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    native._loaded.cache_clear()
    yield tmp_path
    native._loaded.cache_clear()


def script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return str(path)


def fake(path: Path, *work: str, version: str = "fake 1.0") -> str:
    """A compiler that says what it is, and else does this; "$out" is what it should write."""
    told = f'[ "$1" = --version ] && echo "{version}" && exit 0'
    return script(path, told, 'while [ "$1" != -o ]; do shift; done; out="$2"', *work)


def nobody(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("CXX", str(place / "no-such-compiler"))
    return "no C\\+\\+ compiler: .*no-such-compiler not found"


def nowhere(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("PATH", str(place))
    return "no C\\+\\+ compiler: c\\+\\+, g\\+\\+, clang\\+\\+ not found"


def broken(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("CXX", script(place / "broken", "echo it is broken >&2", "exit 1"))
    return "broken failed: it is broken"


def strict(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("CXX", fake(place / "strict", "echo In file a.h: >&2", "echo a.h:1: error: no >&2", "exit 1"))
    return "strict failed: a.h:1: error: no"


def silent(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("CXX", fake(place / "silent"))
    return "No such file or directory"


def wrong(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("CXX", fake(place / "wrong", 'echo no library > "$out"'))
    return "cache/native/[0-9a-f]+.so: "


def endless(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setattr(native, "PATIENCE", 0.3)
    patch.setenv("CXX", fake(place / "endless", "exec sleep 60"))
    return "endless failed: .*timed out"


def unwritable(place: Path, patch: pytest.MonkeyPatch) -> str:
    (place / "file").write_text("")
    patch.setenv("WEFT_CACHE", str(place / "file"))
    patch.setenv("CXX", fake(place / "unwritable", ': > "$out"'))
    return "file/native"


def unwanted(place: Path, patch: pytest.MonkeyPatch) -> str:
    patch.setenv("WEFT_NATIVE", "0")
    return "^WEFT_NATIVE=0$"


def homeless(place: Path, patch: pytest.MonkeyPatch) -> str:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    patch.setattr(native, "cache_folder", nowhere)
    patch.setenv("CXX", fake(place / "homeless", ': > "$out"'))
    return "home directory"


WITHOUT = [nobody, nowhere, broken, strict, silent, wrong, endless, unwritable, unwanted, homeless]


@pytest.mark.parametrize("without", WITHOUT, ids=lambda each: str(each.__name__))
def test_without_the_library_it_is_said_why_and_searches_run_all_the_same(
    without: Callable[[Path, pytest.MonkeyPatch], str], anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TransformerConfig(dim=16, num_heads=2, ffn_dim=24, encoder_layers=1, decoder_layers=1)
    model, sources = Transformer(config, 30, 30), batch([[5, 6, 7], [8], [9, 9]])
    reason = without(anew, monkeypatch)
    assert native.library() is None
    assert native.name() == "none"
    assert re.search(reason, native.why_not())
    assert "\n" not in native.why_not()
    assert compiled(model) is None
    assert [len(found) for found in (greedy(model, sources), beam(model, sources))] == [3, 3]


def test_where_there_is_a_library_nothing_is_wrong() -> None:
    if native.library() is None:
        pytest.skip(f"nothing is compiled here: {native.why_not()}")
    assert native.why_not() == ""


def logged(place: Path) -> list[str]:
    return (place / "log").read_text().splitlines()


def test_what_was_compiled_is_found_again(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fake(anew / "compiler", f'echo "$out" >> {anew}/log', 'echo made > "$out"')
    monkeypatch.setenv("CXX", compiler)
    first = native.built()
    assert first.read_text() == "made\n"
    assert first.parent == anew / "cache" / "native"
    assert native.built() == first
    assert len(logged(anew)) == 1
    first.unlink()
    assert native.built() == first
    assert len(logged(anew)) == 2
    assert list(first.parent.iterdir()) == [first]  # nothing is left of where it was written


def test_a_compiler_that_fails_half_way_leaves_nothing(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake(anew / "compiler", 'echo half > "$out"', "exit 1"))
    assert native.library() is None
    assert list((anew / "cache" / "native").iterdir()) == []


@pytest.mark.parametrize("why", ["error: no such option -fopenmp", "/usr/bin/ld: cannot find -lomp: No such file"])
def test_a_compiler_without_openmp_compiles_all_the_same(why: str, anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = f'case "$*" in *-fopenmp*) echo "{why}" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", fake(anew / "compiler", f'echo "$*" >> {anew}/log', refuses, ': > "$out"'))
    assert native.built().is_file()
    assert ["-fopenmp" in line for line in logged(anew)] == [True, False]


def test_a_compiler_that_fails_for_another_reason_is_asked_again_next_time(
    anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = 'echo "fatal error: Killed signal terminated program cc1plus; compilation terminated." >&2; exit 1'
    monkeypatch.setenv("CXX", fake(anew / "compiler", f'echo "$*" >> {anew}/log', killed))
    for count in (1, 2):
        with pytest.raises(native.NoLibraryError, match="Killed"):
            native.built()
        assert len(logged(anew)) == count


def test_a_library_that_cannot_be_loaded_is_made_again(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None) is None:
        pytest.skip("no C++ compiler")
    (anew / "source").mkdir()
    (anew / "source" / native.MAIN).write_text('extern "C" int weft_panel() { return 77; }\n')
    monkeypatch.setattr(native, "SOURCE", anew / "source")
    path = native.built()
    path.write_bytes(b"of another system")
    found = native.library()
    assert found is not None
    assert found.weft_panel() == 77
    assert native.name() == path.stem


def test_its_name_tells_the_source_the_flags_the_compiler_and_the_cpu(
    anew: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", fake(anew / "compiler", ': > "$out"'))
    names = [native.built().name]
    shutil.copytree(native.SOURCE, anew / "source", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(native, "SOURCE", anew / "source")
    assert native.built().name == names[0]  # where it lies is the same
    header = min((anew / "source").glob("*.h"))
    header.write_text(header.read_text() + "// another line\n")
    names.append(native.built().name)
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-g"))
    names.append(native.built().name)
    monkeypatch.setattr(native, "EXACT", ())
    names.append(native.built().name)
    monkeypatch.setattr(native, "cpu_instructions", lambda: "another CPU")
    names.append(native.built().name)
    fake(anew / "compiler", ': > "$out"', version="fake 1.1")
    names.append(native.built().name)
    assert len(set(names)) == len(names)


COMPILE = """
import ctypes, sys
from pathlib import Path
from weft.kernels import native
native.SOURCE = Path(sys.argv[1])
print(ctypes.CDLL(str(native.built())).weft_panel())
"""


def test_two_processes_that_compile_at_once_both_get_it_whole(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if real is None:
        pytest.skip("no C++ compiler")
    (anew / "source").mkdir()
    (anew / "source" / native.MAIN).write_text('extern "C" int weft_panel() { return 77; }\n')
    (anew / "met").mkdir()
    waits = f'n=0; while [ "$(ls {anew}/met | wc -l)" -lt 2 ] && [ $n -lt 200 ]; do sleep 0.1; n=$((n + 1)); done'
    told = f'[ "$1" = --version ] && exec {real} --version'
    monkeypatch.setenv("CXX", script(anew / "meeting", told, f": > {anew}/met/$$", waits, f'exec {real} "$@"'))
    command = [sys.executable, "-c", COMPILE, str(anew / "source")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["77\n", "77\n"]
    assert len(list((anew / "met").iterdir())) == 2  # or else they did not meet
    assert len(list((anew / "cache" / "native").iterdir())) == 1
