"""Matrices in bf16 and int8: stored, read, damaged, searched with and looked into, and handed on to others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import weft
from tests.api.test_language_model import model_of
from tests.api.test_translator import LINES, translator_of
from weft import api, cli, folder
from weft.api import LanguageModel, Translator
from weft.data.tokenizers import TokenizerPair
from weft.kernels import native
from weft.kernels.linear import linear, narrowed, widened
from weft.models import narrow
from weft.models.compiled import compiled
from weft.models.transformer import Transformer

SIZES = {"dim": 48, "num_heads": 4, "ffn_dim": 160, "encoder_layers": 1, "decoder_layers": 2}
TRANSFORMER = {"family": "transformer", **SIZES}
FAMILIES = {
    "biased": {**TRANSFORMER, "positions": "alibi"},
    "recurrent": {"family": "recurrent", "dim": 32, "embed_dim": 24, "cell": "lstm"},
    "convolutional": {"family": "convolutional", "dim": 32, "embed_dim": 24, "encoder_layers": 1, "decoder_layers": 2},
}
DTYPES = {"bf16": torch.bfloat16, "int8": torch.int8}
NARROW = pytest.mark.parametrize("weights", DTYPES)
TEXT = "the dog runs home"


def stored(model: Transformer, dtype: torch.dtype) -> Transformer:
    """The model as a folder that has its matrices in this dtype gives it."""
    words = [len(table) for table in (model.source_embedding, model.target_embedding) if table is not None]
    with torch.device("meta"):
        made = Transformer(model.config, words[0], words[-1])
    narrow.fill(made, narrow.state(model, dtype), keep=True)
    return made.eval()


def needs_the_library() -> None:
    if native.library() is None:
        pytest.skip(f"nothing is compiled here: {native.why_not()}")


@pytest.fixture(scope="module")
def translator() -> Translator:
    return translator_of("bpe", model=TRANSFORMER)


@pytest.fixture(scope="module")
def folders(translator: Translator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model three times: fp32, bf16 and int8."""
    place = tmp_path_factory.mktemp("narrow")
    for weights in folder.STORED:
        save(translator, place / weights, weights)
    return place


def save(translator: Translator, path: Path, weights: str = "fp32") -> str:
    folder.save(path, translator.model, translator.recipe, translator.tokenizers, "# card\n", weights)
    return str(path)


def loaded(path: Path, precision: Any = "fp32") -> Translator:
    found = weft.load(path, precision)
    assert isinstance(found, Translator)
    return found


def test_whole_numbers_from_minus_127_to_127_times_the_scale_of_their_row() -> None:
    weight = torch.randn(9, 50) * 10 ** torch.randn(9, 1)
    weight[4] = 0.0
    numbers, scale = narrowed(weight, torch.int8)
    assert scale is not None
    assert (numbers.dtype, scale.dtype) == (torch.int8, torch.float32)
    most = numbers.int().abs().amax(1).tolist()
    assert most == [127] * 4 + [0] + [127] * 4
    assert bool(((widened(numbers, scale) - weight).abs() <= 0.501 * scale[:, None]).all())
    assert bool((widened(numbers, scale)[4] == 0.0).all())


def test_narrowed_again_they_are_the_same_numbers() -> None:
    numbers, scale = narrowed(torch.randn(40, 33), torch.int8)
    again, scale_again = narrowed(widened(numbers, scale), torch.int8)
    assert torch.equal(again, numbers)
    torch.testing.assert_close(scale_again, scale, rtol=1e-6, atol=0.0)


def test_bf16_is_rounded_and_has_no_scale() -> None:
    weight = torch.randn(5, 7)
    rounded, scale = narrowed(weight, torch.bfloat16)
    assert scale is None
    assert torch.equal(rounded, weight.bfloat16())
    assert torch.equal(widened(rounded, None), weight.bfloat16().float())


@pytest.mark.parametrize(
    ("dtype", "activations"),
    [
        (torch.int8, torch.float32),
        (torch.int8, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_narrow_matrix_multiplies_as_its_wide_self(dtype: torch.dtype, activations: torch.dtype) -> None:
    x, bias = torch.randn(6, 20).to(activations), torch.randn(11)
    weight, scale = narrowed(torch.randn(11, 20), dtype)
    found = linear(x, weight, bias, scale)
    assert found.dtype == activations
    wide = linear(x.float(), widened(weight, scale), bias)
    torch.testing.assert_close(found.float(), wide, rtol=0.0, atol=1e-6 if activations == torch.float32 else 0.1)


def test_matrices_are_those_of_linear_layers_and_tables(translator: Translator) -> None:
    names = narrow.matrices(translator.model)
    wide = {name for name, tensor in translator.model.state_dict().items() if tensor.dim() > 1}
    assert names == wide
    assert "target_embedding" in names
    assert "decoder.1.cross_attention.key.weight" in names


def test_what_becomes_narrow_and_what_does_not(translator: Translator) -> None:
    own, names = translator.model.state_dict(), narrow.matrices(translator.model)
    int8 = narrow.state(translator.model, torch.int8)
    assert int8.keys() == own.keys() | {f"{name}_scale" for name in names}
    for name, tensor in int8.items():
        assert tensor.dtype == (torch.int8 if name in names else torch.float32), name
    assert all(torch.equal(int8[name], own[name]) for name in own.keys() - names)
    assert {tensor.dtype for tensor in narrow.state(translator.model, torch.bfloat16).values()} == {torch.bfloat16}
    fp32 = narrow.state(translator.model)
    assert all(torch.equal(fp32[name], own[name]) for name in own)


def test_sizes_on_disk(folders: Path) -> None:
    fp32, bf16, int8 = (folder.size(folders / weights) for weights in ("fp32", "bf16", "int8"))
    assert 0.5 < bf16 / fp32 < 0.55
    assert 0.25 < int8 / fp32 < 0.32


def wide_state(translator: Translator, weights: str) -> dict[str, Tensor]:
    """What the parameters are worth when they were stored so."""
    made, names = narrow.state(translator.model, folder.STORED[weights]), narrow.matrices(translator.model)
    values = {name: widened(tensor, made.get(f"{name}_scale")) for name, tensor in made.items()}
    return {name: tensor for name, tensor in values.items() if not narrow.is_scale(name, names)}


@NARROW
def test_what_is_read_stays_narrow_where_it_is_multiplied_so(
    translator: Translator, folders: Path, weights: str
) -> None:
    needs_the_library()
    model = folder.read(folders / weights).model
    names, expected = narrow.matrices(model), wide_state(translator, weights)
    own = model.state_dict()
    for name, tensor in own.items():
        assert tensor.dtype == (DTYPES[weights] if name in names else torch.float32), name
    for name, tensor in expected.items():
        assert torch.equal(widened(own[name], own.get(f"{name}_scale")), tensor), name
    assert not model.training
    assert compiled(model) is not None
    assert all(parameter.requires_grad == (weights == "bf16") for parameter in model.parameters())


@NARROW
def test_whoever_asks_for_it_wide_gets_fp32(translator: Translator, folders: Path, weights: str) -> None:
    model, expected = folder.read(folders / weights, wide=True).model, wide_state(translator, weights)
    own = model.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
    assert {tensor.dtype for tensor in own.values()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in model.parameters())


@NARROW
def test_without_compiled_code_it_is_wide_too(folders: Path, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_NATIVE", "0")
    found = loaded(folders / weights)
    assert {tensor.dtype for tensor in found.model.state_dict().values()} == {torch.float32}
    assert found.translate(TEXT).text


@NARROW
@pytest.mark.parametrize("again", ["fp32", "bf16", "int8"])
def test_a_narrow_model_is_stored_again_for_what_it_is_worth(
    folders: Path, weights: str, again: str, tmp_path: Path
) -> None:
    model, recipe, tokenizers = folder.read(folders / weights)
    folder.save(tmp_path / "again", model, recipe, tokenizers, "", again)
    if again == weights:
        first, second = (load_file(place / "model.safetensors") for place in (folders / weights, tmp_path / "again"))
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            torch.testing.assert_close(second[name], tensor, rtol=1e-6, atol=0.0)
    if again == "fp32":
        kept, wide = (folder.read(place, wide=True).model for place in (tmp_path / "again", folders / weights))
        assert all(map(torch.equal, kept.state_dict().values(), wide.state_dict().values()))
    elif again != weights:
        one, other = (loaded(place).translate(TEXT).log_prob for place in (tmp_path / "again", folders / weights))
        assert one == pytest.approx(other, abs=0.5)


TABLE, LAYER = "target_embedding", "encoder.0.attention.query.weight"
NORM = "encoder.0.around_attention.norm.weight"


def change(name: str, make: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    def changed(tensors: dict[str, Tensor]) -> None:
        made = make(tensors.pop(name, torch.ones(48)))
        if made is not None:
            tensors[name] = made.contiguous()

    return changed


DAMAGES: dict[str, tuple[Callable[[dict[str, Tensor]], None], str]] = {
    "no scale": (change(f"{TABLE}_scale", lambda s: None), f"'{TABLE}' is int8 and needs '{TABLE}_scale'.*not None"),
    "no scale of a layer": (change(f"{LAYER}_scale", lambda s: None), f"'{LAYER}' is int8 and needs '{LAYER}_scale'"),
    "a shorter scale": (change(f"{LAYER}_scale", lambda s: s[1:]), rf"needs '{LAYER}_scale', \[48\] of F32, not"),
    "a scale of two dimensions": (change(f"{LAYER}_scale", lambda s: s[:, None]), r"\[48\] of F32, not \(\[48, 1\]"),
    "a single scale": (change(f"{LAYER}_scale", lambda s: s[0]), r"\[48\] of F32, not \(\[\]"),
    "a scale in bf16": (change(f"{LAYER}_scale", lambda s: s.bfloat16()), r"of F32, not \(\[48\], 'BF16'\)"),
    "a scale in int8": (change(f"{LAYER}_scale", lambda s: s.char()), "of F32, not"),
    "another shape": (change(LAYER, lambda w: w[:, 1:]), r"has shape \[48, 47\], but config.json asks for \[48, 48\]"),
    "bytes without a sign": (change(LAYER, lambda w: w.byte()), f"'{LAYER}' is stored as U8"),
    "longer numbers": (change(LAYER, lambda w: w.int()), f"'{LAYER}' is stored as I32"),
    "a scale without int8": (
        change(LAYER, lambda w: w.float()),
        f"has a tensor '{LAYER}_scale' that the model has not",
    ),
    "a norm in int8": (change(NORM, lambda w: w.char()), f"'{NORM}' is stored as I8"),
    "a scale of a norm": (change(f"{NORM}_scale", lambda s: s), f"has a tensor '{NORM}_scale' that the model has not"),
    "no matrix": (change(LAYER, lambda w: None), f"has no tensor '{LAYER}'"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES)
def test_damage_is_told_in_a_line(
    damage: Callable[[dict[str, Tensor]], None], message: str, translator: Translator, tmp_path: Path
) -> None:
    save(translator, tmp_path / "m", "int8")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    for wide in (False, True):
        with pytest.raises(ValueError, match=message) as caught:
            folder.read(tmp_path / "m", wide)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_file_that_was_cut_short_is_told(translator: Translator, tmp_path: Path) -> None:
    save(translator, tmp_path / "m", "int8")
    path = tmp_path / "m" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged or cut short"):
        folder.read(tmp_path / "m")


def eager(translator: Translator, text: str) -> Any:
    """What is said while nothing is compiled, with the parameters as they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_NATIVE", "0")
        assert compiled(translator.model) is None
        return translator.translate(text, beam=2)


@NARROW
def test_compiled_and_in_torch_a_narrow_model_says_the_same(folders: Path, weights: str) -> None:
    needs_the_library()
    model = loaded(folders / weights)
    assert compiled(model.model) is not None
    for text in LINES:
        found, expected = model.translate(text, beam=2), eager(model, text)
        assert found.text == expected.text
        assert found.n_best[0].token_log_probs == pytest.approx(expected.n_best[0].token_log_probs, abs=1e-3)


@NARROW
def test_it_says_nearly_what_the_wide_model_says(translator: Translator, folders: Path, weights: str) -> None:
    model, other = loaded(folders / weights), "der hund rennt heim"
    for text in LINES:
        mine, theirs = model.score(text, other), translator.score(text, other)
        assert mine.log_prob == pytest.approx(theirs.log_prob, rel=0.05)
        assert mine.log_prob != theirs.log_prob


@NARROW
def test_what_it_attends_to_is_seen(folders: Path, weights: str) -> None:
    model = loaded(folders / weights)
    found = model.translate(TEXT, beam=2)
    with weft.record(model, kinds=("weights", "added")) as seen:
        heard = model.translate(TEXT, beam=2)
    assert heard.text == found.text
    assert heard.log_prob == pytest.approx(found.log_prob, abs=1e-3)
    weights_of = seen["decoder.1.cross_attention"].weights
    torch.testing.assert_close(weights_of.sum(-1), torch.ones(weights_of.shape[:-1]))
    heads = seen["decoder.1.cross_attention.output"]
    assert "heads" in heads.values
    look = model.look(TEXT, beam=2)
    assert look.record.about["target_text"] == found.text
    assert look.matrix.weights.shape[0] == len(look.record.about["target"])
    assert model.align(TEXT, "der hund").weights.shape[0] > 1


def test_what_each_head_adds_sums_to_what_the_layer_adds(folders: Path) -> None:
    model = loaded(folders / "int8")
    with weft.record(model, kinds=("added",)) as seen:
        model.score("the dog", "der hund")
    heads = seen["encoder.0.attention.output"].values
    added = seen["encoder.0.around_attention"].values["added"]
    torch.testing.assert_close(heads["heads"].sum(1) + heads["bias"], added, rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("weights", ["int8", "bf16"])
@pytest.mark.parametrize("exact", [False, True])
def test_with_activations_in_bf16_it_runs_in_torch(folders: Path, weights: str, exact: bool) -> None:
    needs_the_library()
    model = loaded(folders / weights, "bf16")
    assert compiled(model.model) is None
    narrow_one = model.translate(TEXT, beam=1, exact=exact)
    assert narrow_one.score == pytest.approx(loaded(folders / weights).translate(TEXT, beam=1).score, abs=0.1)


def test_auto_is_fp32_where_it_is_compiled(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_the_library()
    monkeypatch.setattr(api, "bf16_products", lambda: True)
    assert cast(Any, loaded(folders / "int8", "auto").model).precision == torch.float32
    assert cast(Any, loaded(folders / "fp32", "auto").model).precision == torch.float32
    monkeypatch.setenv("WEFT_NATIVE", "0")
    assert cast(Any, loaded(folders / "int8", "auto").model).precision == torch.bfloat16


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_damaged_parameters_are_told_by_the_search(folders: Path, weights: str) -> None:
    needs_the_library()
    model = loaded(folders / weights)
    norm = model.model.get_submodule("decoder_norm")
    assert isinstance(norm, nn.LayerNorm)
    with torch.no_grad():
        norm.weight[3] = float("nan")
    with pytest.raises(ValueError, match="not finite numbers"):
        model.translate(TEXT)


@pytest.mark.parametrize("name", ["decoder.0.attention.key.weight", "decoder.1.cross_attention.value.weight"])
def test_a_matrix_that_is_wide_among_narrow_ones_counts_for_what_it_is(
    folders: Path, translator: Translator, name: str, tmp_path: Path
) -> None:
    needs_the_library()
    save(translator, tmp_path / "m", "int8")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = widened(tensors[name], tensors.pop(f"{name}_scale"))
    save_file(tensors, path)
    mixed, whole = loaded(tmp_path / "m"), loaded(folders / "int8")
    expected = whole.score(TEXT, "der hund").log_prob
    assert mixed.score(TEXT, "der hund").log_prob == pytest.approx(expected, abs=2e-2)


@NARROW
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_read_wide_and_translate(family: str, weights: str, tmp_path: Path) -> None:
    translator = translator_of("bpe", model=FAMILIES[family])
    save(translator, tmp_path / "m", weights)
    assert folder.size(tmp_path / "m") < 0.9 * folder.size(save(translator, tmp_path / "wide"))
    model, expected = loaded(tmp_path / "m"), wide_state(translator, weights)
    own = model.model.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(own[name], tensor) for name, tensor in translator.model.state_dict().items())
    found = model.translate(TEXT)
    assert found.score == pytest.approx(model.translate(TEXT, exact=True).score, abs=1e-4)
    mine, theirs = (each.score(TEXT, "der hund").log_prob for each in (model, translator))
    assert mine == pytest.approx(theirs, rel=0.1)


@NARROW
def test_language_models_are_read_wide_and_generate(weights: str, tmp_path: Path) -> None:
    model = model_of()
    tokenizer = cast(Any, model.vocabulary)
    folder.save(tmp_path / "m", model.model, model.recipe, TokenizerPair(tokenizer, tokenizer), "card", weights)
    found = weft.load(tmp_path / "m", "fp32")
    assert isinstance(found, LanguageModel)
    assert {tensor.dtype for tensor in found.model.state_dict().values() if tensor.is_floating_point()} == {
        torch.float32
    }
    assert len(found.generate("O Romeo", temperature=0, max_tokens=6).n_best[0].ids) > 0
    assert found.score("O Romeo").log_prob == pytest.approx(model.score("O Romeo").log_prob, rel=0.05)


@NARROW
def test_a_narrow_model_goes_out_to_others(folders: Path, weights: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    told = api.convert(folders / weights, tmp_path / "from-folder", "transformers")
    assert "checked with transformers" in told
    loaded(folders / weights).export(tmp_path / "from-memory", "transformers")
    wide = cast(Any, folder.read(folders / weights, wide=True).model)
    source, target = torch.tensor([[5, 6, 7, 8, 2]]), torch.tensor([[1, 9, 10, 11]])
    with torch.no_grad():
        expected = wide.logits(wide(source, target))
    for name in ("from-folder", "from-memory"):
        theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            logits = theirs(source, decoder_input_ids=target).logits
        assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-5


def test_a_narrow_model_goes_out_to_ctranslate2(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    assert "checked with CTranslate2" in api.convert(folders / "int8", tmp_path / "out", "ctranslate2")


@NARROW
def test_convert_writes_the_same_model_smaller(folders: Path, weights: str, tmp_path: Path) -> None:
    told = api.convert(folders / "fp32", tmp_path / "out", "weft", weights=weights)
    assert told.startswith(f"{tmp_path / 'out'}: the same model with weights in {weights}, ")
    assert "\n" not in told
    first, second = (load_file(place / "model.safetensors") for place in (folders / weights, tmp_path / "out"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert folder.card_of(tmp_path / "out") == "# card\n"
    assert folder.recipe(tmp_path / "out") == folder.recipe(folders / "fp32")
    back = api.convert(tmp_path / "out", tmp_path / "back", "weft")
    assert "weights in fp32" in back
    one, other = (loaded(tmp_path / name).translate(TEXT, beam=2) for name in ("out", "back"))
    assert one.text == other.text
    assert one.log_prob == pytest.approx(other.log_prob, abs=1e-2)


def test_an_unknown_storage_is_refused(folders: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fp32, bf16, int8, not 'int4'"):
        api.convert(folders / "fp32", tmp_path / "out", "weft", weights="int4")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def here(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, with a model of weft's own, one of others and something else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(folders / "fp32")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("a file")
    yield tmp_path
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mine.txt"]
    assert (tmp_path / "file").read_text() == "a file"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8"])
def test_the_shell_converts_and_translates(
    folders: Path, weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = str(tmp_path / "small")
    assert cli.main(["convert", str(folders / "fp32"), small, "--weights", weights]) == 0
    assert f"{small}: the same model with weights in {weights}, " in capsys.readouterr().out
    assert folder.size(small) == folder.size(folders / weights)
    assert cli.main(["convert", small, str(tmp_path / "again"), "--to", "weft"]) == 0
    assert folder.size(tmp_path / "again") == folder.size(folders / "fp32")
    capsys.readouterr()
    assert cli.main(["translate", small, TEXT, "--precision", "fp32"]) == 0
    assert capsys.readouterr().out == loaded(Path(small)).translate(TEXT).text + "\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["model", "notes", "--weights", "int8"], "notes is there already: choose another folder"),
        (["model", "file", "--weights", "int8"], "file is there already: choose another folder"),
        (["model", "out", "--weights", "int8", "--to", "ctranslate2"], "for CTranslate2 there is quantization"),
        (["model", "out", "--weights", "bf16", "--to", "transformers"], "weights='bf16' is for models of weft's own"),
        (["model", "out", "--weights", "int4"], "int4"),
        (["nowhere", "out", "--weights", "int8"], "no model 'nowhere'"),
        (["notes", "out", "--weights", "int8"], "notes"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_is_wrong_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft: error: ")
    assert told in error
    assert error.count("\n") == 1


def test_a_published_model_is_not_stored_smaller(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    model_of("bpe", activation="gelu_tanh").export("published")
    assert cli.main(["convert", "published", "out", "--weights", "int8"]) == 2
    error = capsys.readouterr().err
    assert "published is no model of weft's own: only these are stored in fewer bits" in error
    assert error.count("\n") == 1
