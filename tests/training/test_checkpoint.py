"""A run folder keeps what it was given, finds what is damaged, and lets one trainer in."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.training.toys import Gru
from weft.training import checkpoint
from weft.training.checkpoint import RunFolder, copy_into, differences, tensors_of


def groups(value: float) -> dict[str, dict[str, Tensor]]:
    return {"model": {"w": torch.full((4, 3), value), "b": torch.arange(3)}, "optimizer": {"m": torch.randn(5)}}


def saved(path: Path, *steps: int) -> RunFolder:
    """A run with these steps."""
    run = RunFolder(path)
    path.mkdir(exist_ok=True)
    for step in steps:
        run.save(step, groups(step), {"step": step})
    return run


def nothing(state: Any) -> list[int]:
    return []


def test_a_step_comes_back_as_it_was(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    tensors = groups(0.1)
    run.save(7, tensors, {"step": 7, "third": 1 / 3, "nan": float("nan")})
    assert (tmp_path / "latest").read_text() == "step-000007\n"
    assert run.steps() == [7]
    for name, group in tensors.items():
        loaded = run.tensors(7, name)
        assert loaded.keys() == group.keys()
        assert all(torch.equal(loaded[key], group[key]) for key in group)
    assert run.tensors(7, "mean") == {}
    state = run.newest(nothing, print)
    assert state is not None
    assert state["third"] == 1 / 3
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_files_are_safetensors_and_json_alone(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    files = sorted(path.name for path in (tmp_path / "step-000003").iterdir())
    assert files == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert load_file(tmp_path / "step-000003" / "model.safetensors")["w"].shape == (4, 3)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "flip":
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 0x10]) + content[-1:])
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "empty", "gone"])
def test_a_damaged_step_is_told_and_passed_over(tmp_path: Path, name: str, how: str) -> None:
    run = saved(tmp_path, 2, 4, 6)
    damage(tmp_path / "step-000006" / name, how)
    notes: list[str] = []
    state = run.newest(nothing, notes.append)
    assert state is not None
    assert state["step"] == 4
    assert len(notes) == 1
    assert "step-000006" in notes[0]
    assert "damaged" in notes[0]
    assert run.steps() == [2, 4]
    assert (tmp_path / "latest").read_text() == "step-000004\n"


def test_a_step_is_passed_over_if_one_that_it_needs_is_damaged(tmp_path: Path) -> None:
    run = saved(tmp_path, 2, 4, 6)
    damage(tmp_path / "step-000002" / "model.safetensors", "flip")
    notes: list[str] = []
    state = run.newest(lambda state: [2] if state["step"] == 6 else [], notes.append)
    assert state is not None
    assert state["step"] == 4
    assert "step-000002" in notes[0]


def test_without_any_whole_step_it_is_an_error_that_loses_nothing(tmp_path: Path) -> None:
    run = saved(tmp_path, 2, 4)
    for step in (2, 4):
        damage(tmp_path / f"step-{step:06d}" / "model.safetensors", "cut")
    with pytest.raises(OSError, match="no saved step is whole"):
        run.newest(nothing, print)
    assert run.steps() == [2, 4]


def test_latest_decides_and_what_lies_behind_it_is_removed(tmp_path: Path) -> None:
    run = saved(tmp_path, 2, 4, 6)
    (tmp_path / "latest").write_text("step-000004\n")
    state = run.newest(nothing, print)
    assert state is not None
    assert state["step"] == 4
    assert run.steps() == [2, 4]


@pytest.mark.parametrize("text", [None, "", "step-", "\x00\x00\x00", "nonsense"])
def test_without_a_readable_latest_the_newest_step_is_taken(tmp_path: Path, text: str | None) -> None:
    run = saved(tmp_path, 2, 4)
    (tmp_path / "latest").unlink()
    if text is not None:
        (tmp_path / "latest").write_text(text)
    state = run.newest(nothing, print)
    assert state is not None
    assert state["step"] == 4


def test_nothing_saved_is_no_error(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).newest(nothing, print) is None


@pytest.mark.parametrize("broken", ["save_file", "_sync"])
def test_a_failed_save_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    run = saved(tmp_path, 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, broken, full)
    with pytest.raises(OSError, match="No space"):
        run.save(4, groups(4), {"step": 4})
    monkeypatch.undo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000002"]
    state = run.newest(nothing, print)
    assert state is not None
    assert state["step"] == 2


def test_every_file_and_folder_reaches_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def told(name: str, function: Any) -> Any:
        def called(*args: Any) -> Any:
            paths = [Path(os.readlink(f"/proc/self/fd/{a}")) if isinstance(a, int) else Path(a) for a in args]
            order.append(f"{name} {paths[-1].name}")
            return function(*args)

        return called

    (tmp_path / "metrics.jsonl").touch()
    for name in ("fsync", "rename", "replace"):
        monkeypatch.setattr(os, name, told(name, getattr(os, name)))
    saved(tmp_path, 2)
    aside = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert order == [
        *(f"fsync {name}" for name in aside),
        "fsync .aside-step-000002",
        "fsync metrics.jsonl",
        "rename step-000002",
        f"fsync {tmp_path.name}",
        "fsync .aside-latest",
        "replace latest",
        f"fsync {tmp_path.name}",
    ]


def test_the_lock_keeps_others_out_and_ends_with_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"

    def second() -> None:
        with RunFolder(folder).locked():
            raise AssertionError

    with RunFolder(folder).locked(), pytest.raises(OSError, match=f"process {os.getpid()} is training here"):
        second()
    with RunFolder(folder).locked():
        pass


def test_what_a_stopped_trainer_left_is_cleared_away(tmp_path: Path) -> None:
    run = saved(tmp_path, 2)
    (tmp_path / ".aside-step-000004").mkdir()
    (tmp_path / ".aside-step-000004" / "model.safetensors").write_text("half")
    (tmp_path / ".aside-latest").write_text("step-0")
    (tmp_path / "model.safetensors").write_text("the user's own")
    (tmp_path / "step-notes").mkdir()
    with run.locked():
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "latest",
            "lock",
            "model.safetensors",
            "step-000002",
            "step-notes",
        ]
    assert run.steps() == [2]


def test_prune_removes_all_others(tmp_path: Path) -> None:
    run = saved(tmp_path, 2, 4, 6, 8)
    run.prune({4, 8, 100})
    assert run.steps() == [4, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000004", "step-000008"]


def test_a_step_that_is_half_removed_has_no_name_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = saved(tmp_path, 2, 4)

    def stopped(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", stopped)
    with pytest.raises(KeyboardInterrupt):
        run.prune([4])
    monkeypatch.undo()
    assert run.steps() == [4]
    with run.locked():
        assert not list(tmp_path.glob(".aside-*"))


RECIPE = {"name": "a", "note": "b", "seed": 1, "model": {"dim": 4, "tie": "all"}, "data": {"train": ["a", "b"]}}
FACTS = {"the machine": "fast", "the number of processes": "1"}


def begin(
    run: RunFolder, recipe: dict[str, Any], facts: dict[str, str] = FACTS, **kwargs: Any
) -> tuple[Any, list[str]]:
    notes: list[str] = []
    choices = run.begin(recipe, facts, kwargs.pop("choices", {"precision": "bf16"}), note=notes.append, **kwargs)
    return choices, notes


def test_a_run_remembers_its_choices_and_warns_of_another_machine(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert begin(run, RECIPE) == ({"precision": "bf16"}, [])
    people = {**RECIPE, "name": "other", "note": "other", "data": {"train": ("a", "b")}}
    assert begin(run, people, choices={"precision": "fp32"}) == ({"precision": "bf16"}, [])
    _, notes = begin(run, RECIPE, {**FACTS, "the machine": "slow"})
    assert notes == ["the machine was fast and is slow: the results may differ from those of an unbroken run"]


def test_a_changed_recipe_is_refused_by_its_keys(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    begin(run, RECIPE)
    changed = {**RECIPE, "model": {"dim": 8, "tie": "all", "name": "x"}, "seed": 2}
    with pytest.raises(
        ValueError, match=r"model\.dim was 4 and is 8, model\.name was None and is 'x', seed was 1"
    ) as e:
        begin(run, changed)
    assert "\n" not in str(e.value)
    assert begin(run, RECIPE)[1] == []  # the refused one has left no trace
    _, notes = begin(run, changed, fork=True)
    assert "changed recipe: model.dim, model.name, seed" in notes[0]
    assert begin(run, changed)[1] == []
    with pytest.raises(ValueError, match=r"model\.dim was 8 and is 4"):
        begin(run, RECIPE)


def test_a_run_of_another_format_or_none_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99, expected 1"):
        begin(run, RECIPE)
    for text in ("{", "[]"):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=r"run\.json"):
            begin(run, RECIPE)


def test_differences_of_trees() -> None:
    assert differences({}, {}) == {}
    assert differences({"a": {"b": 1}, "c": 2}, {"a": 3, "d": {"e": 4}}) == {
        "a": ({"b": 1}, 3),
        "c": (2, None),
        "d": (None, {"e": 4}),
    }


def test_metrics_are_cut_back_to_a_step(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.cut_metrics(3)
    assert not (tmp_path / "metrics.jsonl").exists()
    for step in (1, 2, 2, 3, 4):
        run.log({"step": step, "loss": 0.1 * step, "validation": {"perplexity": float("inf"), "text": "é\u2028"}})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    assert whole.count(b"\n") == 5
    assert json.loads(whole.splitlines()[0])["validation"]["perplexity"] is None
    with path.open("ab") as file:
        file.write(whole[:20])  # torn
    run.cut_metrics(4)
    assert path.read_bytes() == whole
    run.cut_metrics(2)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 2]
    with path.open("ab") as file:
        file.write(b'{"step": 3}')  # whole but for its end
    run.cut_metrics(9)
    assert path.read_bytes().count(b"\n") == 3
    assert path.read_bytes().endswith(b"\n")
    run.cut_metrics(0)
    assert path.read_bytes() == b""


def test_tied_parameters_are_stored_once_and_come_back_tied() -> None:
    model, other = Gru(), Gru()
    found = tensors_of(model)
    assert "embedding.weight" in found
    assert "output.weight" not in found
    assert "seen" in found
    model.register_buffer("passing", torch.zeros(1), persistent=False)
    assert tensors_of(model).keys() == found.keys()
    copy_into(tensors_of(other), found)
    assert other.output.weight is other.embedding.weight
    for one, two in zip(model.state_dict().values(), other.state_dict().values(), strict=False):
        assert torch.equal(one, two)


def test_a_step_of_another_model_is_refused() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    values = {name: tensor + 1 for name, tensor in tensors_of(model).items()}
    for name, changed in {
        "weight": {**values, "weight": torch.zeros(3, 2)},
        "bias": {"weight": values["weight"]},
        "gain": {**values, "gain": torch.zeros(1)},
    }.items():
        with pytest.raises(ValueError, match=f"it has {name}"):
            copy_into(tensors_of(model), changed)
        assert torch.equal(model.weight, before)
