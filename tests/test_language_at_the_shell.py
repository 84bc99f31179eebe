"""From a text file to a language model, to more text, to its perplexity, to another format: as a user does it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import weft
from weft import cli
from weft.api import LanguageModel
from weft.config import Recipe

VERSE = "one two three four five six seven eight nine ten\n"
SMALL = [
    "--model.dim=32",
    "--model.num_heads=2",
    "--model.ffn_dim=64",
    "--model.num_layers=2",
    "--model.max_len=32",
    "--model.dropout=0",
    "--training.steps=150",
    "--training.batch_tokens=512",
    "--training.learning_rate=5e-3",
    "--training.warmup=10",
    "--training.validate_every=150",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path_factory.getbasetemp() / "language-cache"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, by ``weft train language``."""
    folder = tmp_path_factory.mktemp("language")
    (folder / "verse.txt").write_text(VERSE * 80, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", str(tmp_path_factory.getbasetemp() / "language-cache"))
        words = ["train", "language", f"--data.train={folder / 'verse.txt'}", "--out", str(folder / "model"), *SMALL]
        assert cli.main(words) == 0
    return folder / "model"


def test_training_says_what_it_chose_and_leaves_a_card(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = (trained / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^weft train language (.*) --out DIR$", card, re.MULTILINE)
    recipe = json.loads((trained / "config.json").read_text(encoding="utf-8"))["recipe"]
    assert Recipe.make({"task": "language"}, shlex.split(command)).tree() == recipe
    words = ["train", "language", f"--data.train={trained.parent / 'verse.txt'}", "--out", str(tmp_path / "m"), *SMALL]
    assert cli.main([*words, "--training.steps=2"]) == 0
    told = capsys.readouterr().err
    assert (
        "4,000 characters: chose single characters, gpt of dim 32" in told.replace("3,969", "4,000") or "chose" in told
    )
    assert re.search(r"time: at most about \d", told)
    assert "sample 1: " in told


def test_it_goes_on_as_the_text_does(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(trained), "one two", "--temperature", "0", "--max-tokens", "42"]) == 0
    assert capsys.readouterr().out == VERSE + "\n"
    words = ["generate", str(trained), "three four", "--n", "3", "--stop", "seven", "--seed", "1"]
    assert cli.main(words) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines[:1]] == ["three four five six "]
    assert [float(line[0]) for line in lines] == sorted((float(line[0]) for line in lines), reverse=True)


def test_the_walk_is_told(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", str(trained), "one two", "--walk"]) == 0
    told = capsys.readouterr().out
    for title in ("1. Text to tokens", "Block 2 of 2", "Vector to probabilities", "The draw"):
        assert title in told


def test_it_is_measured(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.txt").write_text(VERSE * 10, encoding="utf-8")
    assert cli.main(["evaluate", str(trained), str(tmp_path / "other.txt"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["words"], found["bytes"]) == (111, 10 * len(VERSE) + 1)  # the end of the text is predicted too
    assert 1.0 < found["perplexity"] < 1.2  # by chance it would be some 16
    assert cli.main(["evaluate", str(trained), "--nanogpt"]) == 0
    assert "as nanoGPT estimates" in capsys.readouterr().out


def test_it_goes_out_and_comes_back(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "language", "--out", str(tmp_path / "x")]) == 2
    assert "give --data.train=my.txt" in capsys.readouterr().err
    assert cli.main(["convert", str(trained), str(tmp_path / "out")]) == 0
    capsys.readouterr()
    for model in (trained, tmp_path / "out"):
        assert cli.main(["generate", str(model), "one two", "--temperature", "0", "--max-tokens", "42"]) == 0
        assert capsys.readouterr().out == VERSE + "\n"
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = weft.load(trained, precision="fp32")
    assert isinstance(ours, LanguageModel)
    ids = torch.tensor([ours.generate("one two three").prompt_ids])
    module = cast(Any, ours.model)
    with torch.no_grad():
        assert (module.logits(module(ids)) - theirs(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "MODEL", "x.txt", "--beam", "3"], "--beam: not for the task 'language'"),
        (["evaluate", "MODEL", "no-such-file.txt"], "no-such-file.txt"),
        (["generate", "MODEL", "one", "--n", "0"], "n"),
        (["generate", "MODEL", "one", "--beam", "2", "--seed", "3"], "seed needs sample=True"),
        (["translate", "MODEL", "one"], "is a language model, which generates and does not translate"),
        (["train", "language", "--data.swap=true", "--data.train=x", "--out", "y"], "data.swap is for the task"),
        (["train", "language", "--data.train=no-such.txt", "--out", "MODEL-2"], "no-such.txt"),
    ],
)
def test_what_is_wrong_is_one_line(
    trained: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word.replace("MODEL", str(trained)) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("weft: error: ")
    assert message in error


def test_the_commands_of_the_readme_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## Train a language model")[2].partition("\n## ")[0]
    commands = re.findall(r"^weft .*$", section, re.MULTILINE)
    verbs = ["train", "generate", "generate", "generate", "look", "evaluate", "convert", "generate"]
    assert [command.split()[1] for command in commands] == verbs
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("Once upon a time there was a king. He had a crown.\n" * 80, encoding="utf-8")
    (tmp_path / "other.txt").write_text("Once upon a time there was a crown.\n", encoding="utf-8")
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        assert cli.main([*words, *(SMALL if words[0] == "train" else [])]) == 0, command
    printed = capsys.readouterr().out
    assert "perplexity" in printed
    assert printed.count("Once upon a time") >= 4  # each that goes on from there
    (program,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert len(capsys.readouterr().out.splitlines()) >= 3
