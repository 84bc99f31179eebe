"""A model folder gives back what was put in, refuses what is damaged, and is never a mix of two models."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from weft import folder
from weft.config import Recipe
from weft.data.tokenizers import TokenizerPair
from weft.data.vocabulary import make_pair
from weft.models import build, narrow
from weft.models.compiled import is_compiled

LINES = ["a man sleeps", "the dog runs", "two birds sing a song"]
OTHERS = ["ein mann schläft", "der hund rennt", "zwei vögel singen ein lied"]
TINY: dict[str, dict[str, Any]] = {
    "transformer": {"dim": 8, "num_heads": 2, "ffn_dim": 16, "encoder_layers": 1, "decoder_layers": 1},
    "recurrent": {"embed_dim": 6, "dim": 8},
    "convolutional": {"embed_dim": 6, "dim": 8, "encoder_layers": 1, "decoder_layers": 1},
}


def recipe_of(family: str = "transformer", joint: bool = True, **model: Any) -> Recipe:
    tree = {
        "name": "tiny",
        "data": {"train": "a.tsv", "source": "en", "target": "de"},
        "tokenizer": {"kind": "char", "joint": joint},
        "model": {"family": family, **TINY[family], **({} if joint else {"tie": "output"}), **model},
    }
    return Recipe.make(tree)


def pair_of(recipe: Recipe) -> TokenizerPair:
    return make_pair(recipe.tokenizer, lambda: iter(LINES), lambda: iter(OTHERS))


def made(recipe: Recipe, seed: int = 0) -> tuple[nn.Module, TokenizerPair]:
    torch.manual_seed(seed)
    pair = pair_of(recipe)
    return build(recipe.model, pair.source.vocab_size, pair.target.vocab_size), pair


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    recipe = recipe_of()
    model, pair = made(recipe)
    folder.save(tmp_path / "model", model, recipe, pair, "# tiny\n")
    return tmp_path / "model"


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = config_of(path)
    change(config)
    (path / "config.json").write_text(json.dumps(config))


def retensor(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(("transformer", {"positions": p}) for p in ("sinusoidal", "learned", "order", "fraction")),
    *(("transformer", {"positions": p}) for p in ("rotary", "alibi", "shaw", "t5", "none")),
    ("transformer", {"joint": False}),
    ("transformer", {"tie": "none", "norm": "rms", "activation": "swiglu", "qk_norm": True}),
    ("recurrent", {}),
    ("recurrent", {"cell": "lstm", "attention": "dot", "joint": False}),
    ("recurrent", {"cell": "rnn", "attention": "none"}),
    ("convolutional", {}),
]


@pytest.mark.parametrize(("family", "options"), VARIANTS, ids=lambda v: str(v))
def test_what_is_read_is_what_was_saved(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(family, **options)
    model, pair = made(recipe)
    folder.save(tmp_path, model, recipe, pair, "# card\n")
    before = torch.get_rng_state()
    again, recipe_again, pair_again = folder.read(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert recipe_again == recipe
    assert not again.training
    assert pair_again.fingerprint() == pair.fingerprint()
    assert pair_again.joint == recipe.tokenizer.joint
    mine, theirs = model.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in model.parameters()]
    source, target = torch.tensor([[5, 6, 7, 2]]), torch.tensor([[1, 8, 9]])
    with torch.no_grad():
        said, said_again = (m.step(target, m.start(source))[0] for m in (model.eval(), again))
    assert torch.equal(said, said_again)
    names = {"model.safetensors", "config.json", "README.md"}
    sides = {"tokenizer.json"} if recipe.tokenizer.joint else {"tokenizer.source.json", "tokenizer.target.json"}
    assert {path.name for path in tmp_path.iterdir()} == names | sides


@pytest.mark.parametrize(("stored", "share"), [("bf16", 0.6), ("int8", 0.5)])
def test_smaller_storage_is_read_as_it_is_or_as_fp32(stored: str, share: float, tmp_path: Path) -> None:
    recipe = recipe_of(dim=32, ffn_dim=256)
    model, pair = made(recipe)
    folder.save(tmp_path / "a", model, recipe, pair, "")
    folder.save(tmp_path / "b", model, recipe, pair, "", stored=stored)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in "ab"]
    assert sizes[1] < share * sizes[0]
    dtype, again = folder.STORED[stored], folder.read(tmp_path / "b").model
    wide = folder.read(tmp_path / "b", wide=True).model.state_dict()
    for name, tensor in model.state_dict().items():
        kept = dtype if name in narrow.matrices(model) and is_compiled(again) else torch.float32
        assert again.state_dict()[name].dtype == kept
        assert wide[name].dtype == torch.float32
        if stored == "bf16":
            assert torch.equal(again.state_dict()[name].float(), tensor.bfloat16().float())
            assert torch.equal(wide[name], tensor.bfloat16().float())
        else:
            torch.testing.assert_close(wide[name], tensor, rtol=0.0, atol=float(tensor.abs().max()) / 250)
    with pytest.raises(ValueError, match="fp32, bf16, int8, not 'int4'"):
        folder.save(tmp_path / "c", model, recipe, pair, "", stored="int4")


def test_the_loaded_model_does_not_hang_on_its_file(saved: Path) -> None:
    model = folder.read(saved).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = saved / "model.safetensors"
    path.write_bytes(b"\0" * path.stat().st_size)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_reading_does_not_wait_for_torch_s_compiler(saved: Path) -> None:
    program = "import sys; from weft import folder; folder.read(sys.argv[1]); print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, saved], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_who_may_read_one_file_may_read_all(saved: Path) -> None:
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1


def test_the_config_tells_what_made_it(saved: Path) -> None:
    config = config_of(saved)
    assert config["format"] == 1
    assert config["weft"] == folder.__version__
    assert config["recipe"]["model"]["dim"] == 8
    assert config["vocab"]["source"] == config["vocab"]["target"] > 4


DAMAGES: list[tuple[str, Callable[[Path], Any], type[Exception], str]] = [
    ("no weights", lambda p: (p / "model.safetensors").unlink(), FileNotFoundError, "has no model.safetensors"),
    ("no tokenizer", lambda p: (p / "tokenizer.json").unlink(), FileNotFoundError, "has no tokenizer.json"),
    ("no config", lambda p: (p / "config.json").unlink(), FileNotFoundError, "has no config.json"),
    ("no JSON", lambda p: (p / "config.json").write_text("{"), ValueError, "is no JSON"),
    ("no text", lambda p: (p / "config.json").write_bytes(b"\xff\xfe{"), ValueError, "is no JSON"),
    ("a list", lambda p: (p / "config.json").write_text("[]"), ValueError, "not a model's of weft"),
    ("foreign", lambda p: (p / "config.json").write_text('{"architectures": []}'), ValueError, "not a model's of weft"),
    ("later format", lambda p: rewrite(p, lambda c: c.update(format=2)), ValueError, "has format 2.*reads format 1"),
    ("no recipe", lambda p: rewrite(p, lambda c: c.pop("recipe")), ValueError, "has no recipe"),
    (
        "unknown key",
        lambda p: rewrite(p, lambda c: c["recipe"]["model"].update(dimm=8)),
        ValueError,
        "config.json: unknown key 'model.dimm'; did you mean 'model.dim'",
    ),
    ("wrong sizes", lambda p: rewrite(p, lambda c: c["vocab"].update(target=9)), ValueError, "tokens, but config.json"),
    ("no files", lambda p: rewrite(p, lambda c: c.update(files=["a"])), ValueError, "'files' must list tokenizer.json"),
    ("path in files", lambda p: rewrite(p, lambda c: c.update(files=7)), ValueError, "'files' must list"),
    (
        "other shape",
        lambda p: rewrite(p, lambda c: c["recipe"]["model"].update(ffn_dim=24)),
        ValueError,
        r"has shape \[16, 8\], but config.json asks for \[24, 8\]",
    ),
    (
        "more layers",
        lambda p: rewrite(p, lambda c: c["recipe"]["model"].update(encoder_layers=2)),
        ValueError,
        "has no tensor 'encoder",
    ),
    (
        "renamed",
        lambda p: retensor(p, lambda t: t.update(target_embeding=t.pop("target_embedding"))),
        ValueError,
        "has no tensor 'target_embedding'; did you mean 'target_embeding'",
    ),
    (
        "one too many",
        lambda p: retensor(p, lambda t: t.update(other=torch.zeros(1))),
        ValueError,
        "has a tensor 'other' that the model has not",
    ),
    (
        "whole numbers",
        lambda p: retensor(p, lambda t: t.update(target_embedding=t["target_embedding"].long())),
        ValueError,
        "is stored as I64",
    ),
    ("tokenizer damaged", lambda p: (p / "tokenizer.json").write_text("{}"), ValueError, "tokenizer.json"),
]


@pytest.mark.parametrize(("name", "damage", "kind", "message"), DAMAGES, ids=[d[0] for d in DAMAGES])
def test_damage_is_told_in_a_line(
    name: str, damage: Callable[[Path], Any], kind: type[Exception], message: str, saved: Path
) -> None:
    damage(saved)
    with pytest.raises(kind, match=message) as caught:
        folder.read(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_file_that_was_cut_short_is_told(size: int, saved: Path) -> None:
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="damaged or cut short"):
        folder.read(saved)


def test_nothing_is_unpickled(saved: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    (saved / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="damaged"):
        folder.read(saved)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "model", [{"dim": 1 << 24, "ffn_dim": 1 << 24}, {"encoder_layers": 1 << 40}, {"ffn_dim": 1 << 45}]
)
def test_a_forged_size_is_found_before_memory_is_asked_for(model: dict[str, Any], saved: Path) -> None:
    rewrite(saved, lambda c: c["recipe"]["model"].update(model))
    with pytest.raises(ValueError, match=r"model.safetensors(:| has)"):
        folder.read(saved)


class Cut(BaseException):
    """The power went off."""


def cut_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> Iterator[None]:
    """All that changes the disk's order counts; the call after the last allowed one never happens."""
    left = [calls]

    def counted(really: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Cut
            return really(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "fsync", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


def state_of(path: Path) -> tuple[str, str, float]:
    model, recipe, pair = folder.read(path)
    return recipe.name, pair.fingerprint(), float(sum(t.double().sum() for t in model.state_dict().values()))


def test_cut_short_at_any_call_the_folder_is_the_old_model_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_recipe = recipe_of(joint=False)
    new_recipe = Recipe.make(recipe_of().tree() | {"name": "new"})
    old, new = (made(recipe, seed) for seed, recipe in enumerate((old_recipe, new_recipe)))
    folder.save(tmp_path / "old", old[0], old_recipe, old[1], "old")
    folder.save(tmp_path / "new", new[0], new_recipe, new[1], "new")
    states = [state_of(tmp_path / name) for name in ("old", "new")]
    seen = []
    for calls in range(100):
        here = tmp_path / f"cut-{calls}"
        shutil.copytree(tmp_path / "old", here)
        done = False
        for _ in cut_after(monkeypatch, calls):
            try:
                folder.save(here, new[0], new_recipe, new[1], "new")
                done = True
            except Cut:
                pass
        seen.append(states.index(state_of(here)))
        folder.save(here, new[0], new_recipe, new[1], "new")  # what was left does not stand in the way
        assert state_of(here) == states[1]
        names = {path.name for path in here.iterdir()}
        assert names == {"model.safetensors", "config.json", "README.md", "tokenizer.json"}
        if done:
            break
    else:
        pytest.fail("the save never came to its end")
    assert seen == sorted(seen)  # once new, always new
    assert seen[0] == 0
    assert sum(seen) >= 5  # several instants lie between the renaming and the end


def test_something_else_is_never_overwritten(tmp_path: Path) -> None:
    recipe = recipe_of()
    model, pair = made(recipe)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds something else than a model \(notes.txt\)"):
        folder.save(tmp_path, model, recipe, pair, "")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"architectures": ["Bert"]}')
    with pytest.raises(ValueError, match="something else"):
        folder.save(foreign, model, recipe, pair, "")
    assert [path.name for path in foreign.iterdir()] == ["config.json"]
    with pytest.raises(NotADirectoryError, match="is a file"):
        folder.save(tmp_path / "notes.txt", model, recipe, pair, "")


def test_a_run_folder_holds_its_model_beside_its_steps(tmp_path: Path) -> None:
    recipe = recipe_of()
    model, pair = made(recipe)
    run = tmp_path / "run"
    (run / "step-000010").mkdir(parents=True)
    (run / "latest").write_text("step-000010\n")
    pair.save(run)
    with pytest.raises(FileNotFoundError, match=r"has not ended \(saved up to step-000010\).*weft train"):
        folder.read(run)
    folder.save(run, model, recipe, pair, "")
    assert folder.read(run).recipe == recipe
    assert (run / "step-000010").is_dir()
    assert (run / "latest").read_text() == "step-000010\n"


def test_names_and_paths_are_found(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped"
    shutil.copytree(saved, shipped / "en-de")
    (shipped / "only-data").mkdir()
    monkeypatch.setattr(folder, "SHIPPED", shipped)
    monkeypatch.chdir(tmp_path)
    assert folder.names() == ["en-de"]
    assert folder.resolve("en-de") == shipped / "en-de"
    assert folder.resolve(str(saved)) == saved
    assert folder.resolve("model") == Path("model")
    for given, hint in (("en-dr", "en-de"), ("modle", "model"), (str(tmp_path / "modell"), str(saved))):
        with pytest.raises(FileNotFoundError, match=f"did you mean '{hint}'"):
            folder.resolve(given)
    with pytest.raises(NotADirectoryError, match="a model is the folder"):
        folder.resolve(saved / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"is no model folder; did you mean '.*en-de'"):
        folder.resolve(shipped)


def test_nothing_is_shipped_yet_or_it_can_be_read() -> None:
    assert [name for name in folder.names() if not folder.is_model(folder.SHIPPED / name)] == []


def test_the_card_tells_data_results_and_command() -> None:
    recipe = Recipe.make(recipe_of().tree() | {"note": "A first try."})
    text = folder.card(recipe, 2_605_568, {"BLEU, test": 41.0234, "tokens/s": "7,000"}, "weft train x", "CC BY 2.0 FR")
    for part in (
        "# tiny",
        "from en to de",
        "2.6 M",
        "A first try.",
        "a.tsv",
        "CC BY 2.0 FR",
        "| 41.02 |",
        "weft train x",
    ):
        assert part in text
    bare = folder.card(Recipe(), 1234, {})
    assert "1,234 parameters" in bare
    assert "## Results" not in bare
    assert "## Command" not in bare
