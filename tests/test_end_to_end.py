"""From two columns of text to a model folder, to translations, to a score: by the shell, as a user does it."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft import cli
from weft.config import Recipe
from weft.evaluation import translation as evaluation

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
PALABRAS = ["uno", "dos", "tres", "cuatro", "cinco", "seis", "siete", "ocho", "nueve", "diez"]

# Small and quick, yet enough to learn word for word.
SIZES = [
    "--model.dim=32",
    "--model.num_heads=2",
    "--model.ffn_dim=64",
    "--model.encoder_layers=1",
    "--model.decoder_layers=1",
    "--model.dropout=0",
]
SMALL = [
    *SIZES,
    "--tokenizer.vocab_size=400",
    "--training.batch_tokens=512",
    "--training.learning_rate=5e-3",
    "--training.warmup=50",
    "--training.smoothing=0",
    "--training.average=0",
    "--data.held_out=40",
]


def write_corpus(path: Path, lines: int = 600, seed: int = 0) -> Path:
    """Numbers in English and Spanish, word for word."""
    draw = random.Random(seed)
    rows = []
    for _ in range(lines):
        chosen = [draw.randrange(10) for _ in range(draw.randint(1, 5))]
        rows.append(" ".join(WORDS[i] for i in chosen) + "\t" + " ".join(PALABRAS[i] for i in chosen) + "\n")
    path.write_text("".join(rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(cache))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A model folder, by ``weft train translation``."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = write_corpus(folder / "numbers.tsv")
    out = folder / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_CACHE", str(cache))
        steps = ["--training.steps=400", "--training.validate_every=200", "--training.save_every=100"]
        code = cli.main(["train", "translation", f"--data.train={corpus}", "--out", str(out), *SMALL, *steps])
    assert code == 0
    return out


def test_training_leaves_a_model_folder_with_its_card_and_its_curve(trained: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "README.md", "metrics.jsonl", "curve.png"):
        assert (trained / name).stat().st_size > 0
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert "numbers.tsv" in card
    recipe = json.loads((trained / "config.json").read_text(encoding="utf-8"))["recipe"]
    # The command on the card asks for this very recipe.
    (command,) = re.findall(r"^weft train translation (.*) --out DIR$", card, re.MULTILINE)
    assert Recipe.make({}, shlex.split(command)).tree() == recipe
    assert recipe["model"]["dim"] == 32
    assert recipe["training"]["steps"] == 400


def test_the_plain_ways_are_two_words_at_the_shell(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "numbers.tsv", 60), tmp_path / "model"
    words = ["train", "translation", f"--data.train={corpus}", "--out", str(out), *SMALL, "--training.steps=2"]
    assert cli.main([*words, "--precision", "fp32", "--reference", "--data.held_out=5", "--training.bleu=false"]) == 0
    training = json.loads((out / "config.json").read_text(encoding="utf-8"))["recipe"]["training"]
    assert (training["precision"], training["reference"]) == ("fp32", True)


def test_exact_is_a_word_at_the_shell(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["translate", str(trained), "one two"],
        ["evaluate", str(trained), str(trained.parent / "numbers.tsv")],
    ):
        printed = []
        for exact in ("--exact", "--no-exact"):
            assert cli.main([*words, exact, "--json"]) == 0
            printed.append(json.loads(capsys.readouterr().out))
        assert printed[0].keys() == printed[1].keys()
    assert printed[0]["decoding"]["exact"] is True
    assert printed[1]["decoding"]["exact"] is False


def test_it_translates_what_it_never_saw(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["one two three", "", "ten nine", "four four seven one"]
    expected = ["uno dos tres", "", "diez nueve", "cuatro cuatro siete uno"]
    assert cli.main(["translate", str(trained), *filter(None, lines)]) == 0
    assert capsys.readouterr().out.splitlines() == [line for line in expected if line]
    stdin = io.TextIOWrapper(io.BytesIO("\n".join(lines).encode() + b"\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["translate", str(trained), "--beam", "2"]) == 0
    assert capsys.readouterr().out.split("\n") == [*expected, ""]


def test_json_has_scores_and_the_n_best(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["translate", str(trained), "one two", "--n-best", "3", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["text"] == "uno dos"
    scores = [each["score"] for each in found["n_best"]]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


def test_draws_are_narrowed_at_the_shell(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for narrow in (["--top-k", "1"], ["--top-p", "0.0001"], ["--min-p", "1"]):
        assert cli.main(["translate", str(trained), "one two", "--sample", *narrow]) == 0
        assert capsys.readouterr().out == "uno dos\n"
    assert cli.main(["translate", str(trained), "one two", "--top-k", "3"]) == 2
    assert "top_k needs sample=True (at the shell --sample)" in capsys.readouterr().err


def test_evaluation_is_that_of_sacrebleu(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = write_corpus(tmp_path / "test.tsv", 60, seed=5)
    output = tmp_path / "out.txt"
    words = ["evaluate", str(trained), str(corpus), "--output", str(output), "--json", "--baseline", str(trained)]
    assert cli.main(words) == 0
    report = json.loads(capsys.readouterr().out)
    reference = tmp_path / "reference.txt"
    reference.write_text("".join(line.split("\t")[1] for line in corpus.read_text().splitlines(True)))
    done = subprocess.run(
        [sys.executable, "-m", "sacrebleu", str(reference), "-i", str(output), "-b", "-w", "4"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert report["scores"]["bleu"] == pytest.approx(float(done.stdout), abs=1e-4)
    assert report["scores"]["bleu"] > 60
    # Two line-aligned files, gzipped, are the same data.
    source, target = tmp_path / "test.en.gz", tmp_path / "test.es.gz"
    for column, path in enumerate((source, target)):
        text = "".join(line.rstrip("\n").split("\t")[column] + "\n" for line in corpus.read_text().splitlines(True))
        path.write_bytes(gzip.compress(text.encode()))
    assert cli.main(["evaluate", str(trained), str(source), str(target), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == report["scores"]


def test_the_same_command_again_changes_nothing(trained: Path) -> None:
    recipe = json.loads((trained / "config.json").read_text(encoding="utf-8"))["recipe"]
    before = (trained / "model.safetensors").read_bytes()
    metrics = (trained / "metrics.jsonl").read_bytes()
    overrides = [f"--data.train={recipe['data']['train']}", *SMALL, "--training.steps=400"]
    rest = ["--training.validate_every=200", "--training.save_every=100"]
    assert cli.main(["train", "translation", "--out", str(trained), *overrides, *rest]) == 0
    assert (trained / "model.safetensors").read_bytes() == before
    assert (trained / "metrics.jsonl").read_bytes() == metrics


def test_another_recipe_in_the_same_folder_is_refused(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = json.loads((trained / "config.json").read_text(encoding="utf-8"))["recipe"]
    words = ["train", "translation", "--out", str(trained), f"--data.train={recipe['data']['train']}", *SMALL]
    rest = ["--training.steps=400", "--training.validate_every=200", "--training.save_every=100"]
    assert cli.main([*words, *rest, "--training.clip=0.5"]) == 2
    assert "training.clip" in capsys.readouterr().err.splitlines()[-1]


def test_the_commands_of_the_readme_work(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Train a translator")[2].partition("\n## Train a language model")[0]
    commands = re.findall(r"^weft .*$", section, re.MULTILINE)
    assert [command.split()[1] for command in commands] == ["train", "translate", "evaluate", "look", "look", "look"]
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "pairs.tsv")
    write_corpus(tmp_path / "test.tsv", 20, seed=7)
    for command in commands:
        words = shlex.split(command, comments=True)[1:]
        if words[0] == "train":
            words += [*SMALL, "--training.steps=20", "--training.bleu=false"]  # quick: that it learns is shown above
        assert cli.main(words) == 0
    assert "BLEU" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.*")} >= {"look.html", "map.svg", "seen.record", "again.html"}
    programs = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert len(programs) == 3
    for program in programs:
        exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
        assert capsys.readouterr().out


def test_decoding_is_compared_with_others(trained: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    pytest.importorskip("transformers")
    write_corpus(tmp_path / "test.tsv", 12, seed=7)
    arguments = [str(trained), "--data", str(tmp_path / "test.tsv"), "--json", str(tmp_path / "out.json")]
    command = [sys.executable, "-m", "benchmarks.decoding", *arguments, "--quick", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"]
    for beam in (1, 5):
        rows = found[f"beam {beam}"]
        assert len(rows) == 4
        whole = [row for name, row in rows.items() if name != "weft int8"]
        assert len({round(row["bleu"], 6) for row in whole}) == 1, "all say the same"
        assert rows["weft int8"]["bleu"] > 50
        latency = found[f"latency, beam {beam}"]
        for times in (latency["alone"], latency["beside a busy process"]):
            assert len(times) == 12
            assert sum(name.startswith("weft in torch") for name in times) == 2


def test_models_are_put_side_by_side(trained: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "test.tsv", 20, seed=7)
    arguments = [str(trained), "--data", str(tmp_path / "test.tsv"), "--json", str(tmp_path / "out.json")]
    command = [sys.executable, "-m", "benchmarks.ladder", *arguments, "--out", str(tmp_path / "out.png")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    (rung,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["results"].values()
    assert (rung["name"], rung["steps"]) == ("transformer", 400)
    assert rung["bleu"] > 50
    assert "| transformer |" in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "translation", "--out", "{tmp}/x", "--data.train={tmp}/gone.tsv"], "gone.tsv"),
        (["train", "translation", "--out", "{tmp}/x", "--data.train={tmp}/a.en,{tmp}/a.de"], "line"),
        (["train", "translation", "--out", "{tmp}/x", "--data.train={tmp}/a.en"], "a.en"),
        (["train", "transfomer-base", "--out", "{tmp}/x"], "'transformer-base'"),
        (["train", "translation", "--out", "{tmp}/x", "--model.dmi=3"], "'model.dim'"),
        (["train", "translation", "--out", "{tmp}/x", "--model.dim=wide"], "model.dim must be a valid integer"),
        (["train", "translation", "--out", "{tmp}/x"], "--data.train"),
        (["translate", "{tmp}/gone", "hello"], "gone"),
        (["translate", "{tmp}", "hello"], "model"),
        (["evaluate", "{model}", "multi31k:test"], "'multi30k'"),
        (["data", "get", "multi31k"], "'multi30k'"),
        (["evaluate", "{model}", "{tmp}/a.en", "{tmp}/a.de"], "line"),
        (["evaluate", "{model}", "{tmp}/a.tsv", "--tokenize", "14a"], "14a"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_left(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    (tmp_path / "a.en").write_text("one\ntwo\nthree\n")
    (tmp_path / "a.de").write_text("eins\nzwei\n")
    write_corpus(tmp_path / "a.tsv", 3)
    before = sorted(tmp_path.rglob("*"))
    assert cli.main([word.format(tmp=tmp_path, model=trained) for word in words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("weft: error: ")
    assert named in lines[-1]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, out = write_corpus(tmp_path / "numbers.tsv", 60), tmp_path / "mine"
    out.mkdir()
    for name in ("README.md", "config.json", "metrics.jsonl", "tokenizer.json"):
        (out / name).write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in (out, tmp_path / "file", tmp_path / "file" / "below"):
        assert cli.main(["train", "translation", f"--data.train={corpus}", "--out", str(place), *SMALL]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "choose another folder" in line or "is a file" in line
    assert all(path.read_text() == "mine" for path in [*out.iterdir(), tmp_path / "file"])


def test_another_tokenizer_is_another_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A start that got no further than its tokenizer leaves nothing that the next one would take for its own."""
    corpus, out = write_corpus(tmp_path / "numbers.tsv", 60), tmp_path / "model"
    few = ["--data.held_out=5", "--training.bleu=false", "--training.steps=2"]
    words = ["train", "translation", f"--data.train={corpus}", "--out", str(out), *SMALL, *few]
    assert cli.main([*words, "--model.positions=learned", "--model.max_len=3"]) == 2
    assert "model takes 2: set data.max_len to 2" in capsys.readouterr().err.splitlines()[-1]
    assert cli.main([*words, "--tokenizer.kind=word"]) == 0
    assert "<0x41>" not in (out / "tokenizer.json").read_text(encoding="utf-8")


def test_two_processes_train_one_model_by_the_same_command(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "numbers.tsv", 120), tmp_path / "model"
    few = ["--data.held_out=5", "--training.bleu=false", "--training.steps=6", "--training.save_every=3"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "weft", "train", "translation", f"--data.train={corpus}", *SMALL, *few]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*words, "--out", str(out)],
            env={**os.environ, **place, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=240)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert "training for 6 steps" in said[0]
    assert said[1] == ""
    assert cli.main(["translate", str(out), "one two"]) == 0


def test_the_card_of_another_family_has_a_command_that_works(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "numbers.tsv", 60), tmp_path / "model"
    few = ["--data.held_out=5", "--training.bleu=false", "--training.steps=2"]
    small = [word for word in SMALL if not re.match("--model.(num_heads|ffn_dim)", word)]
    words = ["train", "translation", f"--data.train={corpus}", "--out", str(out), *small, *few]
    assert cli.main([*words, "--model.family=recurrent", "--model.embed_dim=16"]) == 0
    card = (out / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^weft train translation (.*) --out DIR$", card, re.MULTILINE)
    recipe = json.loads((out / "config.json").read_text(encoding="utf-8"))["recipe"]
    assert Recipe.make({}, shlex.split(command)).tree() == recipe


def test_each_line_gives_as_many_lines_and_a_broken_one_loses_none_before_it(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"one\n\ntwo\n\xff\nthree\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["translate", str(trained), "--n-best", "2"]) == 2
    out, err = capsys.readouterr()
    assert [line for line in out.split("\n")[::2] if line] == ["uno", "dos"]
    assert len(out.split("\n")) == 7
    assert "stdin:4" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_goes_on_and_ends_as_an_unbroken_one(tmp_path: Path, number: int, code: int) -> None:
    corpus = write_corpus(tmp_path / "numbers.tsv")
    steps = ["--training.steps=60", "--training.validate_every=30", "--training.log_every=1", "--training.bleu=false"]
    common = [sys.executable, "-m", "weft", "train", "translation", f"--data.train={corpus}", *SMALL, *steps, "--out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*common, str(tmp_path / "whole")], check=True, env=environment, capture_output=True)
    run = subprocess.Popen([*common, str(tmp_path / "broken")], env=environment, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "broken" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while (not metrics.exists() or metrics.stat().st_size == 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.send_signal(number)
    _, err = run.communicate(timeout=120)
    assert run.returncode == code, err
    assert not (tmp_path / "broken" / "model.safetensors").exists()
    subprocess.run([*common, str(tmp_path / "broken")], check=True, env=environment, capture_output=True)
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_tatoeba_test_set_has_each_sentence_once_with_all_its_translations() -> None:
    from weft.data.corpora import open_pairs

    pairs = open_pairs("tatoeba-sample:test", "en", "es")
    sources, references = evaluation.sentences(pairs)
    assert len(sources) == len(set(sources)) < sum(map(len, references)) == sum(1 for _ in pairs)
