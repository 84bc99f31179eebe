"""Folders of transformers: out and in again bit for bit, what they may look like, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.config import GPTConfig, RopeScaling
from weft.interop import huggingface
from weft.models.gpt import GPT

WORDS = 11
LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False}


def tiny(**options: Any) -> GPTConfig:
    sizes = {"dim": 8, "num_heads": 4, "num_layers": 2, "ffn_dim": 12, "max_len": 32, "dropout": 0.0}
    return GPTConfig(**{**sizes, **options})


CONFIGS = {
    "gpt2": tiny(activation="gelu_tanh", norm_eps=1e-3),
    "gpt2 dropped": tiny(dropout=0.2, attention_dropout=0.3),
    "gpt2 untied": tiny(activation="relu", tie=False),
    "llama": tiny(**LLAMA, tie=False),
    "llama grouped": tiny(**LLAMA, num_kv_heads=2, rope_base=500.0, attention_dropout=0.1),
    "llama head_dim": tiny(**LLAMA, head_dim=6, num_kv_heads=1, tie=False),
    "llama biased": tiny(**LLAMA, attention_bias=True),
    "llama all biased": tiny(**{**LLAMA, "bias": True}),
    "llama linear": tiny(**LLAMA, rope_scaling=RopeScaling(factor=4.0)),
    "llama 3": tiny(**LLAMA, rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_len=16)),
}


def make(config: GPTConfig) -> GPT:
    model = GPT(config, WORDS).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_out_and_in_again_it_is_the_same_and_transformers_computes_the_same(config: GPTConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = make(config)
    huggingface.write(tmp_path / "a", config, model.state_dict(), {"bos": 1, "eos": [2, 3]})
    read = huggingface.read(tmp_path / "a")
    assert read.config == config
    assert read.vocab_size == WORDS
    same(read.tensors, dict(model.state_dict()))
    assert all(tensor.is_contiguous() for tensor in read.tensors.values())
    assert huggingface.special_tokens(tmp_path / "a") == {"bos": (1,), "eos": (2, 3)}
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    tokens = torch.randint(0, WORDS, (2, 30))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(model(tokens)), theirs(tokens).logits, rtol=0, atol=1e-5)
    theirs.save_pretrained(tmp_path / "b")
    again = huggingface.read(tmp_path / "b")
    assert again.config == config
    same(again.tensors, read.tensors)


def edit(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; ``...`` takes one out."""
    path = folder / "config.json"
    tree = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))


def stored(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors)
    save_file(tensors if changed is None else changed, folder / "model.safetensors")


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    model = make(CONFIGS["gpt2"])
    huggingface.write(tmp_path / "gpt2", CONFIGS["gpt2"], model.state_dict())
    return tmp_path / "gpt2"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    model = make(CONFIGS["llama 3"])
    huggingface.write(tmp_path / "llama", CONFIGS["llama 3"], model.state_dict())
    return tmp_path / "llama"


def shard(folder: Path, save: Callable[[dict[str, Tensor], Path], None], name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    stem, dot, end = name.rpartition(".")
    places = {key: f"{stem}-{number % 3}{dot}{end}" for number, key in enumerate(tensors)}
    for file in set(places.values()):
        save({key: tensors[key] for key in tensors if places[key] == file}, folder / file)
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()


def test_parameters_in_several_files(gpt2: Path) -> None:
    whole = huggingface.read(gpt2)
    shard(gpt2, save_file, "model.safetensors")
    same(huggingface.read(gpt2).tensors, whole.tensors)
    (gpt2 / "model-1.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no 'model-1.safetensors', which .*index.json lists"):
        huggingface.read(gpt2)


def test_parameters_in_pickles(gpt2: Path) -> None:
    whole = huggingface.read(gpt2)
    tensors = load_file(gpt2 / "model.safetensors")
    shared = {**tensors, "lm_head.weight": tensors["transformer.wte.weight"]}
    torch.save({name: torch.nn.Parameter(tensor) for name, tensor in shared.items()}, gpt2 / "pytorch_model.bin")
    shard(gpt2, torch.save, "pytorch_model.bin")  # takes model.safetensors away
    (gpt2 / "pytorch_model.bin.index.json").rename(gpt2 / "index")
    same(huggingface.read(gpt2).tensors, whole.tensors)
    (gpt2 / "index").rename(gpt2 / "pytorch_model.bin.index.json")
    (gpt2 / "pytorch_model.bin").unlink()
    same(huggingface.read(gpt2).tensors, whole.tensors)


def test_old_folders(gpt2: Path, llama: Path) -> None:
    """GPT-2 of 2019: no prefix, and masks among the parameters. Llamas of 2023: rotary frequencies, other keys."""
    whole = huggingface.read(gpt2)

    def age(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        mask = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
        return old | {f"h.{i}.attn.bias": mask.clone() for i in range(2)} | {"h.0.attn.masked_bias": torch.tensor(-1e4)}

    stored(gpt2, age)
    edit(gpt2, n_inner=None, n_ctx=32, tie_word_embeddings=..., activation_function=...)
    with pytest.raises(ValueError, match=r"c_fc.weight' has shape \[8, 12\], but config.json asks for \[8, 32\]"):
        huggingface.read(gpt2)
    edit(gpt2, n_inner=12)
    read = huggingface.read(gpt2)
    assert read.config == whole.config
    same(read.tensors, whole.tensors)

    stored(llama, lambda tensors: tensors.update({"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    edit(llama, rope_scaling={"type": "linear", "factor": 2.0}, num_key_value_heads=..., head_dim=..., mlp_bias=...)
    assert huggingface.read(llama).config.rope_scaling == RopeScaling(factor=2.0)
    new = {"rope_type": "llama3", "rope_theta": 7.0, "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
    edit(llama, rope_scaling=..., rope_theta=..., rope_parameters=new)
    config = huggingface.read(llama).config
    assert config.rope_base == 7.0
    scaling = RopeScaling(kind="llama3", factor=3.0, high_freq_factor=2.0, original_max_len=32)
    assert config.rope_scaling == scaling


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_read_as_fp32(gpt2: Path, dtype: torch.dtype) -> None:
    whole = huggingface.read(gpt2).tensors
    stored(gpt2, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    same(huggingface.read(gpt2).tensors, {name: tensor.to(dtype).float() for name, tensor in whole.items()})


def test_a_tied_output_layer_may_be_stored_if_it_is_the_embeddings(gpt2: Path) -> None:
    whole = huggingface.read(gpt2).tensors
    stored(gpt2, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"].clone()}))
    same(huggingface.read(gpt2).tensors, whole)
    stored(gpt2, lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 1}))
    with pytest.raises(ValueError, match="is not the embeddings"):
        huggingface.read(gpt2)
    edit(gpt2, tie_word_embeddings=False)
    assert torch.equal(huggingface.read(gpt2).tensors["output_weight"], whole["embedding"] + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "does not read model_type 'mistral': expected llama or gpt2"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": ...}, "has no 'hidden_size'"),
        ({"hidden_size": "8"}, "'hidden_size' must be a valid integer, not '8'"),
        ({"hidden_size": -8}, "'hidden_size' must be greater than or equal to 1, not -8"),
        ({"num_hidden_layers": 10**12}, "has 20 tensors, too few for 1000000000000 layers"),
        ({"num_hidden_layers": 1}, "has a tensor 'model.layers.1.*' that the model has not"),
        ({"num_hidden_layers": 3}, "has no tensor 'model.layers.2.input_layernorm.weight'"),
        ({"vocab_size": 0}, "'vocab_size' must be a whole number"),
        ({"vocab_size": 2**40}, r"has shape \[11, 8\], but config.json asks for \[1099511627776, 8\]"),
        ({"num_attention_heads": 3, "head_dim": None}, "dim must be a multiple of num_heads, but 8 is not one of 3"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"attention_bias": True}, "has no tensor 'model.layers.0.self_attn.q_proj.bias'"),
        ({"tie_word_embeddings": False}, "has no tensor 'lm_head.weight'"),
        ({"hidden_act": "relu2"}, "does not compute hidden_act = 'relu2'"),
        ({"sliding_window": 4096}, "does not compute sliding_window = 4096: expected None"),
        ({"rope_interleaved": True}, "does not compute rope_interleaved = True: expected False"),
        ({"quantization_config": {"bits": 4}}, "does not compute quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "does not compute rope_type = 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' has no 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor' must be a valid number"),
        ({"rope_scaling": 2.0}, "the rotary options must be an object, not 2.0"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be greater than 0"),
        ({"x" * 10: 1}, None),
    ],
)
def test_configurations_that_are_refused(llama: Path, changes: dict[str, Any], message: str | None) -> None:
    edit(llama, **changes)
    if message is None:
        huggingface.read(llama)
        return
    with pytest.raises(ValueError, match=message) as error:
        huggingface.read(llama)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True: expected False"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"activation_function": "gelu_10"}, "expected one of gelu_new"),
        ({"n_positions": 33}, r"wpe.weight' has shape \[32, 8\], but config.json asks for \[33, 8\]"),
    ],
)
def test_configurations_of_gpt2_that_are_refused(gpt2: Path, changes: dict[str, Any], message: str) -> None:
    edit(gpt2, **changes)
    with pytest.raises(ValueError, match=message):
        huggingface.read(gpt2)


def test_tensors_that_are_refused(gpt2: Path) -> None:
    name = "transformer.h.1.mlp.c_fc.weight"
    original = load_file(gpt2 / "model.safetensors")

    def refused(message: str, **changes: Tensor | None) -> None:
        tensors = {**original, **{key.replace("__", "."): value for key, value in changes.items()}}
        save_file({key: value for key, value in tensors.items() if value is not None}, gpt2 / "model.safetensors")
        with pytest.raises(ValueError, match=message) as error:
            huggingface.read(gpt2)
        assert "\n" not in str(error.value)

    key = name.replace(".", "__")
    refused(f"has no tensor '{name}'; did you mean 'transformer.h.1.mlp.c_fk.weight'", **{
        key: None, key.replace("c_fc", "c_fk"): original[name],
    })  # fmt: skip
    refused("that the model has not; did you mean", **{key.replace("c_fc", "c_fx"): original[name].clone()})
    refused(r"has shape \[12, 8\], but config.json asks for \[8, 12\]", **{key: original[name].T.contiguous()})
    refused("is stored as I8: expected one of F64, F32", **{key: original[name].to(torch.int8)})
    refused("twice, with 'transformer.'", wte__weight=original["transformer.wte.weight"].clone())


def test_missing_and_damaged_files(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        huggingface.read(tmp_path)
    with pytest.raises(FileNotFoundError):
        huggingface.read(tmp_path / "nowhere")
    (gpt2 / "model.safetensors").write_bytes((gpt2 / "model.safetensors").read_bytes()[:-5])
    with pytest.raises(ValueError, match="damaged or cut short"):
        huggingface.read(gpt2)
    (gpt2 / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor pytorch_model\.bin"):
        huggingface.read(gpt2)
    index = gpt2 / "model.safetensors.index.json"
    for outside in ("../a.safetensors", "/etc/passwd", "", 7, "a/b", "a\0b"):
        index.write_text(json.dumps({"weight_map": {"x": outside}}))
        with pytest.raises(ValueError, match="must list files of its folder"):
            huggingface.read(gpt2)
    index.write_text("[]")
    with pytest.raises(ValueError, match="holds no JSON object"):
        huggingface.read(gpt2)
    index.write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="no 'weight_map'"):
        huggingface.read(gpt2)
    (gpt2 / "config.json").write_text("{" * 100_000)
    with pytest.raises(ValueError, match="is no JSON"):
        huggingface.read(gpt2)
    (gpt2 / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": [1, "2"]}))
    with pytest.raises(ValueError, match="'eos_token_id' must be a token's number or several"):
        huggingface.special_tokens(gpt2)


class Call:
    """Pickled, it asks for a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.fixture
def pickled(gpt2: Path) -> Path:
    (gpt2 / "model.safetensors").unlink()
    return gpt2 / "pytorch_model.bin"


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_calls_something_is_not_run(pickled: Path, tmp_path: Path, protocol: int) -> None:
    for function, arguments in (
        (Path.touch, (tmp_path / "run",)),
        (exec, (f"open({str(tmp_path / 'run')!r}, 'w')",)),
        (bytearray, (1 << 40,)),
        (torch.Tensor, (1 << 40,)),
    ):
        torch.save({"transformer.wte.weight": Call(function, *arguments)}, pickled, pickle_protocol=protocol)
        with pytest.raises(ValueError, match="holds more than tensors and is not loaded: it asks for") as error:
            huggingface.read(pickled.parent)
        assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_other_pickles_are_refused(pickled: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message) as error:
            huggingface.read(pickled.parent)
        assert "\n" not in str(error.value)

    tensors = huggingface.FAMILIES["gpt2"].layout(CONFIGS["gpt2"], WORDS)
    one = torch.zeros(1)
    torch.save({name: one.expand(entry.shape) for name, entry in tensors.items()}, pickled)
    refused("the tensors would take [0-9]+ bytes, but the files have")
    torch.save({"a": {"b": one}}, pickled)
    refused("something else than a tensor under 'a'")
    torch.save({3: one}, pickled)
    refused("something else than a tensor under 3")
    torch.save([one], pickled)
    refused("holds a list: expected tensors by their names")
    torch.save({"a": one}, pickled, _use_new_zipfile_serialization=False)
    refused("of torch before 1.6")
    pickled.write_bytes(pickle.dumps({"a": 1}))
    refused("damaged, or of torch before 1.6")
    torch.save({"a": one}, pickled)
    with zipfile.ZipFile(pickled) as file:
        records = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(pickled, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in records.items():
            file.writestr(name, data)
    refused("no record compressed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "alibi"}, "neither a Llama nor a GPT-2 has positions 'alibi': expected rotary or learned"),
        ({"norm": "rms"}, "a GPT-2 has norm = layer, but the model has rms"),
        ({"bias": False}, "a GPT-2 has bias = True, but the model has False"),
        ({"attention_bias": False}, "a GPT-2 has attention_bias = True"),
        ({"num_kv_heads": 2}, "a GPT-2 has num_kv_heads = 4, but the model has 2"),
        ({"head_dim": 4}, "a GPT-2 has head_dim = 2, but the model has 4"),
        ({"activation": "swiglu"}, "a GPT-2 has activation = relu or gelu or gelu_tanh, but the model has swiglu"),
        ({**LLAMA, "norm": "layer"}, "a Llama has norm = rms, but the model has layer"),
        ({**LLAMA, "activation": "gelu"}, "a Llama has activation = swiglu, but the model has gelu"),
    ],
)
def test_models_that_they_have_not_are_not_written(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tiny(**options)
    with pytest.raises(ValueError, match=message):
        huggingface.write(tmp_path / "out", config, GPT(config, WORDS).state_dict())
    assert not (tmp_path / "out").exists()


def test_tensors_that_are_not_the_configurations_are_not_written(gpt2: Path, tmp_path: Path) -> None:
    config, tensors = CONFIGS["gpt2"], make(CONFIGS["gpt2"]).state_dict()

    def refused(message: str, **changes: Tensor | None) -> None:
        changed = {**tensors, **{name.replace("__", "."): value for name, value in changes.items()}}
        kept = {name: value for name, value in changed.items() if value is not None}
        with pytest.raises(ValueError, match=message):
            huggingface.write(tmp_path / "out", config, kept)

    refused("has no tensor 'embedding'", embedding=None)
    refused("the model has no tensor 'norm.bias'", norm__bias=None)
    refused(r"'norm.bias' has shape \[3\], but the configuration asks for \[8\]", norm__bias=torch.zeros(3))
    refused("has no tensor 'norm.bios'; did you mean 'norm.bias'", norm__bios=torch.zeros(8))
    with pytest.raises(ValueError, match="unknown special token 'end'"):
        huggingface.write(tmp_path / "out", config, tensors, {"end": 1})
    assert not (tmp_path / "out").exists()
    before = (gpt2 / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="holds a model already"):
        huggingface.write(gpt2, config, tensors)
    assert (gpt2 / "model.safetensors").read_bytes() == before


@pytest.mark.skipif(
    importlib.util.find_spec("iglm") is None, reason="the package iglm with its weights is not installed"
)
@torch.no_grad()
def test_published_weights_iglm() -> None:
    """IgLM-S (Shuai et al. 2023), a GPT-2 of antibodies: the logits are those of transformers."""
    transformers = pytest.importorskip("transformers")
    spec = importlib.util.find_spec("iglm")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    folders = {path.parent for name in ("pytorch_model.bin", "model.safetensors") for path in root.rglob(name)}
    assert folders, f"{root} holds no weights"
    folder = min(folders, key=lambda one: sum(path.stat().st_size for path in one.iterdir()))  # the small one
    config, tensors, vocab_size = huggingface.read(folder)
    model = GPT(config, vocab_size).eval()
    model.load_state_dict(tensors)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    tokens = torch.randint(0, vocab_size, (2, 100))
    expected = theirs(tokens).logits
    assert (model.logits(model(tokens)) - expected).abs().max() <= 1e-5 * expected.abs().max()
