"""The shell: what it prints, what it exits with, and that asking for help costs no import of torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from weft import __version__, cli

# Runs one command in a process of its own and tells its exit code and whether torch was imported.
PROBE = """
import json, sys
from weft.cli import main
code = main(json.loads(sys.argv[1]))
print("\\n" + json.dumps([code, "torch" in sys.modules]))
"""


def probe(*words: str) -> tuple[int, bool, str, str]:
    """Exit code, whether torch was imported, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(words)], capture_output=True, text=True, timeout=120, check=True
    )
    output, _, last = done.stdout.rstrip("\n").rpartition("\n")
    code, imported = json.loads(last)
    return code, imported, output, done.stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Make ``weft machine`` raise what it is given."""

    def install(error: BaseException) -> None:
        def describe() -> str:
            raise error

        monkeypatch.setattr("weft.kernels.machine.describe", describe)

    return install


@pytest.mark.parametrize(
    ("words", "expected"),
    [(("--help",), "machine"), ((), "machine"), (("machine", "--help"), "--help"), (("--version",), __version__)],
)
def test_help_and_version_import_no_torch(words: tuple[str, ...], expected: str) -> None:
    code, imported, out, err = probe(*words)
    assert (code, imported, err) == (0, False, "")
    assert expected in out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("machin",), "'machine'"),  # the nearest verb
        (("--debg",), "--debug"),  # the nearest option
        (("machine", "--hlep"), "--help"),
        (("xyzzy",), "'weft --help'"),  # nothing is near
        (("-x",), "'weft --help'"),
        (("machine", "extra"), "'weft machine --help'"),
        (("two\nlines",), "two\\nlines"),
    ],
)
def test_usage_errors_are_one_line_and_import_no_torch(words: tuple[str, ...], named: str) -> None:
    code, imported, out, err = probe(*words)
    assert (code, imported, out) == (2, False, "")
    assert err.startswith("weft: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert named in err


def test_debug_shows_the_traceback_of_a_usage_error() -> None:
    code, _, _, err = probe("nope", "--debug")
    assert code == 2
    assert err.startswith("Traceback")
    assert err.splitlines()[-1].startswith("weft: error: no such command 'nope'")


@pytest.mark.parametrize("words", [["--version"], ["machine"]])
def test_python_m_weft(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "weft", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    assert (__version__ if words == ["--version"] else torch.__version__) in done.stdout


def test_python_m_weft_exits_with_the_code() -> None:
    done = subprocess.run([sys.executable, "-m", "weft", "machin"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("window must be ≥ 1, not 0"), 2, "window must be ≥ 1, not 0"),
        (ValueError(), 2, "ValueError"),
        (FileNotFoundError(2, "No such file or directory", "a  b.txt"), 2, "a  b.txt: No such file or directory"),
        (OSError("disk on fire"), 2, "disk on fire"),
        (RuntimeError("first\n  second"), 1, "RuntimeError: first second (--debug shows where)"),
        (KeyError("name"), 1, "KeyError: 'name' (--debug shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_failures(
    failing: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    failing(error)
    assert cli.main(["machine"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"weft: error: {message}\n"


@pytest.mark.parametrize("words", [["--debug", "machine"], ["machine", "--debug"]])
@pytest.mark.parametrize(("error", "code"), [(RuntimeError("broken"), 1), (ValueError("broken"), 2)])
def test_debug_shows_where(
    failing: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    error: Exception,
    code: int,
) -> None:
    failing(error)
    assert cli.main(words) == code
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "in describe" in err
    assert err.splitlines()[-1].startswith("weft: error: ")


def test_debug_behind_a_double_dash_is_a_word() -> None:
    assert cli._take_debug(["translate", "--debug", "--", "say", "--debug"]) == (
        ["translate", "--", "say", "--debug"],
        True,
    )
    assert cli._take_debug(["translate", "--", "--debug"]) == (["translate", "--", "--debug"], False)


def test_main_reads_the_arguments_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["weft", "--version"])
    assert cli.main() == 0
    assert capsys.readouterr().out == f"weft {__version__}\n"
