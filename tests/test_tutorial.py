"""Every command and every program of docs/tutorial.md and of the README's first minutes, as a newcomer types them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_end_to_end import SMALL
from weft import cli

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
QUICK = [*SMALL[:-1], "--training.steps=20", "--training.bleu=false"]  # that training learns is shown elsewhere


def blocks(page: str) -> list[tuple[str, str]]:
    """The shell's and Python's blocks of a page, in order."""
    return [(found[1], found[2]) for found in BLOCK.finditer(page)]


def first_minutes() -> str:
    """The part of the README that needs nothing but what comes along."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition("## The first minutes")[2].partition("\n## ")[0]


PAGES = {"docs/tutorial.md": (ROOT / "docs/tutorial.md").read_text(encoding="utf-8"), "README.md": first_minutes()}


def shell(line: str) -> None:
    """Do what a line of a shell block says; ``weft`` runs in this process unless a file goes in or out."""
    words = shlex.split(line, comments=True)
    if not words or words[0] in ("make", "source"):
        return  # the demo is run below
    if words[0] != "weft" or "<" in words or ">" in words:
        command = re.sub(r"^weft ", f"{shlex.quote(sys.executable)} -m weft ", line)
        done = subprocess.run(command, shell=True, capture_output=True, text=True, encoding="utf-8")
        assert done.returncode == 0, done.stderr
        return
    assert cli.main([*words[1:], *(QUICK if words[1] == "train" else [])]) == 0, line


def run_python(source: str, name: str) -> Any:
    """Run a program; what its last line gives, if that is an expression as in a notebook."""
    *lines, last = source.rstrip().split("\n")
    names: dict[str, Any] = {"__name__": name}
    exec(compile("\n".join(lines), name, "exec"), names)
    if last.startswith("print("):
        exec(last, names)
        return None
    return eval(last, names)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_does_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = blocks(PAGES[name])
    assert page
    for kind, text in page:
        if kind == "python":
            shown = run_python(text, name)
            assert capsys.readouterr().out or "<" in shown._repr_html_()
            continue
        for line in text.splitlines():
            shell(line)
        assert capsys.readouterr().err.count("error") == 0


def test_a_stream_keeps_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stream = next(text for _, text in blocks(PAGES["docs/tutorial.md"]) if "lines.txt" in text)
    for line in stream.splitlines():
        shell(line)
    assert len(Path("lineas.txt").read_text(encoding="utf-8").splitlines()) == 2


def test_the_demo_in_a_pipe_is_plain_and_names_its_page(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/demo.py")], capture_output=True, text=True, encoding="utf-8", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert "we are eating bread" in done.stdout
    assert "ROMEO:" in done.stdout
    assert str(tmp_path / "demo.html") in done.stdout
    assert (tmp_path / "demo.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    following = [line.split() for line in done.stdout.partition("type next")[2].splitlines()]
    verbs = [words[1] for words in following if words[:1] == ["weft"] and words[1].isalpha()]
    assert verbs == ["translate", "look", "generate", "train"]


def test_what_the_demo_says_to_type_next_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.demo import NEXT

    monkeypatch.chdir(tmp_path)
    for line in NEXT.splitlines():
        if line.startswith("weft "):
            shell(re.split(r"  +", line)[0])
    assert (tmp_path / "mine" / "model.safetensors").is_file()
