"""Transformers as folders of transformers: the same logits, searches and tokens there, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from tests.interop.tiny import LIMIT, SOURCE, batch, make, searched, sources, taught, tiny, vocabularies
from weft.config import BOS, EOS, PAD, Recipe, TransformerConfig
from weft.interop import marian
from weft.interop.published import export_translator
from weft.models import build
from weft.models.transformer import Transformer

CONFIGS = {
    "post-norm": (tiny(norm_first=False), True),
    "post-norm, output tied": (tiny(norm_first=False, tie="output", activation="gelu"), True),
    "post-norm, nothing tied": (tiny(norm_first=False, tie="none", activation="gelu_tanh"), True),
    "post-norm, two vocabularies": (tiny(norm_first=False, tie="output", encoder_layers=2, dim=30), False),
    "post-norm, two vocabularies, nothing tied": (tiny(norm_first=False, tie="none", bias=False), False),
    "pre-norm": (tiny(), True),
    "pre-norm, output tied": (tiny(tie="output", activation="gelu"), True),
    "pre-norm, nothing tied": (tiny(tie="none", encoder_layers=2, decoder_layers=1), True),
    "pre-norm, no biases": (tiny(bias=False, num_heads=2, ffn_dim=17), True),
}
ALL = pytest.mark.parametrize(("config", "joint"), CONFIGS.values(), ids=CONFIGS)


def load(folder: Path) -> Any:
    """The model, of which nothing was missing and nothing was left over."""
    model, told = AutoModelForSeq2SeqLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


@torch.no_grad()
def logits(theirs: Any, source: Tensor, target: Tensor) -> Tensor:
    found: Tensor = theirs(source, attention_mask=(source != PAD).long(), decoder_input_ids=target).logits
    return found


@ALL
@torch.no_grad()
def test_the_logits_are_the_same(config: TransformerConfig, joint: bool, tmp_path: Path) -> None:
    tokenizers = vocabularies(joint)
    model = make(config, tokenizers)
    told = marian.write(tmp_path / "out", model, config, tokenizers)
    family = "Pegasus" if config.norm_first else "Marian"
    assert told.endswith(
        f"out: a {family} of transformers; checked with transformers: the same greedy translations of 16 sentences"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    theirs = load(tmp_path / "out")
    source = batch(sources(tokenizers))
    target = torch.randint(0, tokenizers.target.vocab_size, (len(source), LIMIT))
    expected = model.logits(model(source, target))
    assert (logits(theirs, source, target) - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))

    theirs.save_pretrained(tmp_path / "again")  # their own way out loses nothing that they need
    assert torch.equal(logits(load(tmp_path / "again"), source, target), logits(theirs, source, target))


def generate(theirs: Any, rows: list[list[int]], **options: Any) -> tuple[list[list[int]], list[float]]:
    """The tokens up to EOS, and the scores of a beam."""
    source = batch(rows)
    found = theirs.generate(
        source, attention_mask=(source != PAD).long(), return_dict_in_generate=True, output_scores=True, **options
    )
    ended = [row[1 : row.index(EOS) if EOS in row else None] for row in found.sequences.tolist()]
    return ended, found.sequences_scores.tolist() if "sequences_scores" in found else []


@pytest.mark.parametrize("kind", ["post-norm", "pre-norm", "post-norm, two vocabularies"])
def test_generate_searches_as_weft_does(kind: str, tmp_path: Path) -> None:
    config, joint = CONFIGS[kind]
    tokenizers = vocabularies(joint)
    model = taught(config, tokenizers)
    marian.write(tmp_path / "out", model, config, tokenizers)
    theirs, rows = load(tmp_path / "out"), sources(tokenizers, 24)

    ours = searched(model, rows)
    assert len({h.tokens for h in ours}) > 5
    assert generate(theirs, rows, max_length=LIMIT + 1)[0] == [list(h.tokens) for h in ours]
    for alpha, early, patience in ((1.0, True, 1.0), (0.6, True, 1.0), (0.0, "never", math.inf)):
        options = {"num_beams": 4, "length_penalty": alpha, "early_stopping": early, "max_length": LIMIT + 1}
        said, scores = generate(theirs, rows, **options)
        ours = searched(model, rows, beam=4, length_penalty=alpha, patience=patience)
        # They rank what is cut off among the finished.
        ended = [place for place, h in enumerate(ours) if h.finished and len(said[place]) < LIMIT]
        assert len({ours[place].tokens for place in ended}) > 2
        assert [said[place] for place in ended] == [list(ours[place].tokens) for place in ended]
        assert [scores[place] for place in ended] == pytest.approx([ours[place].score for place in ended], abs=1e-5)


def test_generate_needs_no_options_and_never_says_pad_and_bos(tmp_path: Path) -> None:
    config = tiny(tie="none", decoder_layers=1)
    model = make(config)
    assert model.output_weight is not None
    with torch.no_grad():  # PAD and BOS are always among the more probable
        model.decoder_norm.bias[0] = 10.0  # type: ignore[index, operator]
        model.output_weight[[PAD, BOS], 0] = 5.0
    marian.write(tmp_path / "out", model, config, vocabularies(), positions=32)
    theirs, rows = load(tmp_path / "out"), sources(vocabularies())
    ours = searched(model, rows, max_extra=31)
    assert [list(h.tokens) for h in ours] == generate(theirs, rows)[0]
    assert max(len(h.tokens) for h in ours) == 31
    assert all(row[0] in (PAD, BOS) for row in generate(theirs, rows, suppress_tokens=[])[0])


TEXTS = [*SOURCE, "A man", " sleeps  on\ta bench", "<s> a </s> <pad> <unk>", "größer ☃ 🚲 <0x41>", "cat\nsits", "."]


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
@pytest.mark.parametrize("joint", [True, False])
def test_the_tokenizer_gives_the_same_tokens_and_texts(kind: str, joint: bool, tmp_path: Path) -> None:
    tokenizers = vocabularies(joint, kind)
    config = tiny(norm_first=False, tie="all" if joint else "output")
    marian.write(tmp_path / "out", make(config, tokenizers), config, tokenizers)
    for ours, inside in ((tokenizers.source, ""), (tokenizers.target, "" if joint else "target")):
        theirs = AutoTokenizer.from_pretrained(tmp_path / "out", subfolder=inside)
        expected = [[*ids, EOS] for ids in ours.encode_batch(TEXTS)]
        assert theirs(TEXTS).input_ids == expected
        assert theirs.batch_decode(expected, skip_special_tokens=True) == [ours.decode(ids) for ids in expected]
        assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (0, 1, 2, 3)
        padded = theirs(TEXTS, padding=True)
        assert [sum(row) for row in padded.attention_mask] == [len(row) for row in expected]


def test_precision_mode_and_samples_of_the_caller(tmp_path: Path) -> None:
    """What is written is fp32, whatever the model computes in just then; the model stays as it was."""
    config = tiny()
    model = make(config).train()
    model.precision = torch.bfloat16
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    samples = ["", SOURCE[0], " ".join(["dogs"] * 100)]  # nothing to say; a sentence; one that must be cut
    told = marian.write(tmp_path / "deep" / "out", model, config, vocabularies(), samples, positions=32)
    assert told.endswith("the same greedy translations of 2 sentences")
    assert model.training
    assert model.precision == torch.bfloat16
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="the samples hold no text"):
        marian.write(tmp_path / "other" / "deep", model, config, vocabularies(), [""])
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]


def test_without_transformers_it_says_that_it_is_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        told = marian.write(tmp_path / "out", make(config), config, vocabularies())
    assert told.endswith("out: a Pegasus of transformers; not checked, since transformers is not installed")
    load(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "learned"}, "a Pegasus of transformers has positions = sinusoidal, but the model has learned"),
        ({"positions": "rotary", "norm_first": False}, "a Marian of transformers has positions = sinusoidal, but the"),
        ({"norm": "rms"}, "has norm = layer, but the model has rms"),
        ({"activation": "swiglu"}, "has activation = relu or gelu or gelu_tanh, but the model has swiglu"),
        ({"num_kv_heads": 1}, "has num_kv_heads = 3, but the model has 1"),
        ({"qk_norm": True}, "has qk_norm = False, but the model has True"),
    ],
)
def test_models_that_they_have_not_are_not_written(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tiny(**options)
    with pytest.raises(ValueError, match=message) as error:
        marian.write(tmp_path / "out", make(config), config, vocabularies())
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_two_sizes_of_vocabulary_need_a_marian(tmp_path: Path) -> None:
    config, two = tiny(tie="output"), vocabularies(joint=False)
    with pytest.raises(
        ValueError, match=r"has one size of vocabulary, but .* 24 source and 21 target .* norm_first = F"
    ):
        marian.write(tmp_path / "out", make(config, two), config, two)
    config = tiny(norm_first=False, tie="output")
    with pytest.raises(ValueError, match=r"'source_embedding' has shape \[39, 12\], but .* asks for \[24, 12\]"):
        marian.write(tmp_path / "out", make(config), config, two)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_says_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny()
    model = make(config)
    right = marian._tensors

    def refused(message: str, name: str, factor: float) -> None:
        def wrong(*args: Any) -> Iterator[tuple[str, Tensor]]:
            return ((key, tensor * factor if key.endswith(name) else tensor) for key, tensor in right(*args))

        monkeypatch.setattr(marian, "_tensors", wrong)
        with pytest.raises(ValueError, match=message) as error:
            marian.write(tmp_path / "out", model, config, vocabularies())
        assert "\n" not in str(error.value)
        assert list(tmp_path.iterdir()) == []

    start = "not written: run by transformers, the model does not say what weft says to sample 1 of 16: "
    refused(f"{start}token [0-9]+ is '.*', and weft's '.*'", "shared.weight", -1.0)
    refused(f"{start}log p is -[0-9.]+, and weft's -[0-9.]+", "decoder.layers.2.fc1.weight", 1.01)
    refused("the model does not say what weft says", "encoder.layers.0.fc2.weight", math.nan)

    monkeypatch.setattr(marian, "_tensors", right)
    vocabulary = marian.write_vocabulary
    monkeypatch.setattr(marian, "write_vocabulary", lambda *a, **k: vocabulary(*a, **{**k, "closing": (EOS, EOS)}))
    with pytest.raises(ValueError, match="the tokenizer of transformers gives other tokens than weft's to sample 1 of"):
        marian.write(tmp_path / "out", model, config, vocabularies())
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(tmp_path: Path) -> None:
    config = tiny()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("b")
    with pytest.raises(FileExistsError, match="out is there already: choose another folder"):
        marian.write(tmp_path / "out", make(config), config, vocabularies())
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a"]


def test_export_translator(tmp_path: Path) -> None:
    config, tokenizers = tiny(), vocabularies()
    tree = {"task": "translation", "model": config.model_dump(exclude_none=True), "data": {"max_len": 200}}
    recipe, model = Recipe.make(tree), make(config)
    told = export_translator(model, recipe, tokenizers, tmp_path / "out", "transformers", SOURCE)
    assert told.endswith("the same greedy translations of 3 sentences")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 1600
    with pytest.raises(ValueError, match="to='ctranslate': expected transformers or ctranslate2; did you mean"):
        export_translator(model, recipe, tokenizers, tmp_path / "b", "ctranslate")
    with pytest.raises(ValueError, match="quantization='int8' is for ctranslate2"):
        export_translator(model, recipe, tokenizers, tmp_path / "b", "transformers", quantization="int8")
    other = Recipe.make({"task": "translation", "model": {"family": "recurrent", "dim": 8, "embed_dim": 8}})
    size = tokenizers.source.vocab_size
    recurrent = build(other.model, size, size)
    assert not isinstance(recurrent, Transformer)
    with pytest.raises(ValueError, match="transformers has family = transformer, but the model has recurrent"):
        export_translator(recurrent, other, tokenizers, tmp_path / "b", "transformers")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
