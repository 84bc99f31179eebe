"""Transformers as models of CTranslate2: the same searches and scores there, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers as library
import torch

from tests.interop.tiny import LIMIT, SOURCE, batch, make, searched, sources, taught, tiny, vocabularies
from weft.config import BOS, EOS, PAD, Recipe, TransformerConfig
from weft.data.tokenizers import Tokenizer, TokenizerPair
from weft.decoding.score import score
from weft.interop import ctranslate2 as way_out
from weft.interop.published import export_translator
from weft.models.transformer import Transformer

ctranslate2 = pytest.importorskip("ctranslate2")

CONFIGS = {
    "post-norm": (tiny(norm_first=False), True),
    "post-norm, output tied": (tiny(norm_first=False, tie="output", activation="gelu"), True),
    "post-norm, two vocabularies": (tiny(norm_first=False, tie="none", encoder_layers=2), False),
    "pre-norm": (tiny(), True),
    "pre-norm, two vocabularies": (tiny(tie="output", activation="gelu_tanh"), False),
    "pre-norm, nothing tied": (tiny(tie="none", encoder_layers=3, decoder_layers=1), True),
    "no biases": (tiny(bias=False, num_heads=2, ffn_dim=17), True),
    "swiglu": (tiny(activation="swiglu"), True),
    "rms": (tiny(norm="rms", norm_first=False), True),
    "one key head": (tiny(num_kv_heads=1, num_heads=2), True),
    "grouped key heads": (tiny(num_kv_heads=2, num_heads=6), True),
    "learned": (tiny(positions="learned", max_len=30), True),
    "order": (tiny(positions="order"), True),
    "none": (tiny(positions="none"), True),
    "rotary": (tiny(positions="rotary"), True),
    "shaw": (tiny(positions="shaw", norm_first=False), True),
    "t5": (tiny(positions="t5"), True),
    "as a Llama": (
        tiny(positions="rotary", norm="rms", activation="swiglu", bias=False, num_kv_heads=1, tie="none"),
        True,
    ),
}


class Theirs:
    """A folder, run by CTranslate2 with token numbers."""

    def __init__(self, folder: Path) -> None:
        self.translator = ctranslate2.Translator(str(folder), inter_threads=1, intra_threads=1)
        shared = folder / "shared_vocabulary.json"
        apart = [folder / f"{side}_vocabulary.json" for side in ("source", "target")]
        names = [shared, shared] if shared.exists() else apart
        self.source, self.target = (json.loads(path.read_text()) for path in names)
        self.never: list[list[str]] | None = [[self.target[number]] for number in (PAD, BOS)]

    def texts(self, rows: Sequence[Sequence[int]]) -> list[list[str]]:
        return [[self.source[number] for number in row] for row in rows]

    def search(self, rows: list[list[int]], **options: Any) -> tuple[list[list[int]], list[float]]:
        """Tokens with the EOS that came, and scores."""
        found = self.translator.translate_batch(
            self.texts(rows),
            min_decoding_length=0,
            max_decoding_length=LIMIT,
            return_scores=True,
            return_end_token=True,
            suppress_sequences=self.never,
            **options,
        )
        tokens = [[self.target.index(token) for token in each.hypotheses[0]] for each in found]
        return tokens, [each.scores[0] for each in found]

    def score(self, rows: list[list[int]], targets: Sequence[Sequence[int]]) -> list[float]:
        said = [[self.target[number] for number in target] for target in targets]
        return [sum(each.log_probs) for each in self.translator.score_batch(self.texts(rows), said)]


@pytest.mark.parametrize(("config", "joint"), CONFIGS.values(), ids=CONFIGS)
def test_the_tokens_and_scores_are_the_same(config: TransformerConfig, joint: bool, tmp_path: Path) -> None:
    tokenizers = vocabularies(joint)
    model = make(config, tokenizers)
    told = way_out.write(tmp_path / "out", model, config, tokenizers)
    assert told.endswith(
        "out: a model of CTranslate2; checked with CTranslate2: the same greedy translations of 16 sentences"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    theirs, rows = Theirs(tmp_path / "out"), sources(tokenizers)
    ours = searched(model, rows)
    assert theirs.search(rows, beam_size=1)[0] == [[*h.tokens, *[EOS] * h.finished] for h in ours]
    targets = [[int(number) for number in row if number > EOS] for row in torch.randint(0, 20, (len(rows), LIMIT))]
    expected = [h.log_prob for h in score(model, batch(rows), targets)]
    assert theirs.score(rows, targets) == pytest.approx(expected, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("kind", ["post-norm", "pre-norm", "pre-norm, two vocabularies"])
def test_it_searches_as_weft_does(kind: str, tmp_path: Path) -> None:
    config, joint = CONFIGS[kind]
    tokenizers = vocabularies(joint)
    model = taught(config, tokenizers)
    way_out.write(tmp_path / "out", model, config, tokenizers)
    theirs, rows = Theirs(tmp_path / "out"), sources(tokenizers, 24)
    assert theirs.search(rows, beam_size=1)[0] == [[*h.tokens, *[EOS] * h.finished] for h in searched(model, rows)]
    theirs.never = None  # a search that suppresses PAD and BOS scores without them; here they do not come
    for alpha, patience in ((1.0, 1.0), (0.6, 1.0), (0.0, 1.0), (1.0, 2.0)):
        said, scores = theirs.search(rows, beam_size=4, length_penalty=alpha, patience=patience)
        ours = searched(model, rows, beam=4, length_penalty=alpha, patience=patience)
        ended = [place for place, h in enumerate(ours) if h.finished and said[place][-1] == EOS]
        assert len({ours[place].tokens for place in ended}) > 2
        assert [said[place] for place in ended] == [[*ours[place].tokens, EOS] for place in ended]
        assert [scores[place] for place in ended] == pytest.approx([ours[place].score for place in ended], abs=1e-5)


@pytest.mark.parametrize("kind", ["bpe", "unigram", "word", "char"])
@pytest.mark.parametrize("joint", [True, False])
def test_from_text_to_text(kind: str, joint: bool, tmp_path: Path) -> None:
    """With the files of the folder alone, as its description says."""
    pair = vocabularies(joint, kind)
    config = tiny(tie="all" if joint else "output", decoder_layers=1)
    model = taught(config, pair, 50)
    way_out.write(tmp_path / "out", model, config, pair)
    names = ["tokenizer.json"] * 2 if joint else ["tokenizer.source.json", "tokenizer.target.json"]
    source, target = (library.Tokenizer.from_file(str(tmp_path / "out" / name)) for name in names)
    translator = ctranslate2.Translator(str(tmp_path / "out"), inter_threads=1, intra_threads=1)
    texts = [*SOURCE, "größer ☃", "two\ndogs"]
    found = translator.translate_batch(
        [source.encode(text).tokens for text in texts],
        beam_size=1,
        min_decoding_length=0,
        max_decoding_length=LIMIT,
        suppress_sequences=[["<pad>"], ["<s>"]],
    )
    said = [target.decode([target.token_to_id(token) for token in each.hypotheses[0]]) for each in found]
    ours = searched(model, pair.source.encode_batch(texts))
    assert said == [pair.target.decode(h.tokens) for h in ours]


@pytest.mark.parametrize("quantization", ["int8", "int16", "float16", "bfloat16"])
def test_rounded_parameters_are_told_how_far_they_are(quantization: str, tmp_path: Path) -> None:
    config, pair = tiny(norm_first=False), vocabularies()
    model = taught(config, pair, 20)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    whole = way_out.write(tmp_path / "whole", model, config, pair)
    told = way_out.write(tmp_path / "out", model, config, pair, quantization=quantization)
    assert f"out: a model of CTranslate2 in {quantization}; checked with CTranslate2: " in told
    assert "of 16 greedy translations are the same, log p differs by at most " in told
    assert " in " not in whole
    assert 0.0 < float(told.rpartition(" ")[2]) < (0.5 if quantization == "float16" else 100.0)
    assert (tmp_path / "out" / "model.bin").stat().st_size < (tmp_path / "whole" / "model.bin").stat().st_size
    for name, tensor in model.state_dict().items():  # the engine's own tool would have rounded them in place
        assert torch.equal(tensor, before[name])


def test_a_source_may_name_its_specials_otherwise(tmp_path: Path) -> None:
    pair = vocabularies(joint=False)
    foreign = tmp_path / "tokenizer.json"
    pair.source.save(foreign)
    names = {"<pad>": "[PAD]", "<s>": "[CLS]", "</s>": "[SEP]", "<unk>": "[UNK]"}
    text = foreign.read_text()
    for ours, theirs in names.items():
        text = text.replace(json.dumps(ours), json.dumps(theirs))
    foreign.write_text(text)
    other = TokenizerPair(Tokenizer.load(foreign), pair.target)
    config = tiny(tie="output")
    model = make(config, other)
    way_out.write(tmp_path / "out", model, config, other, ["a man sleeps unheard", "a dog"])
    rust = library.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.source.json"))
    tokens = rust.encode("a man unheard").tokens
    assert tokens[-1] == "[UNK]"
    theirs = Theirs(tmp_path / "out")
    (found,) = theirs.translator.translate_batch(
        [tokens], beam_size=1, max_decoding_length=LIMIT, suppress_sequences=theirs.never
    )
    (best,) = searched(model, [other.source.encode("a man unheard")])
    assert found.hypotheses[0] == [theirs.target[number] for number in best.tokens]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "alibi"}, "CTranslate2 has positions = sinusoidal or .* or none, but the model has alibi"),
        ({"positions": "fraction"}, "but the model has fraction"),
        ({"qk_norm": True}, "CTranslate2 has qk_norm = False, but the model has True"),
    ],
)
def test_models_that_it_has_not_are_not_written(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = tiny(**options)
    with pytest.raises(ValueError, match=message) as error:
        way_out.write(tmp_path / "out", make(config), config, vocabularies())
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, pair = tiny(), vocabularies()
    model = make(config)
    with pytest.raises(ValueError, match=r"no quantization 'int': expected one of none, int8, .*; did you mean 'int8'"):
        way_out.write(tmp_path / "out", model, config, pair, quantization="int")
    with pytest.raises(ValueError, match=r"'target_embedding' has shape \[39, 12\], but .* asks for"):
        way_out.write(tmp_path / "out", model, config, vocabularies(kind="bpe"))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ctranslate2", None)
        with pytest.raises(ImportError, match=r"need ctranslate2: pip install 'weft\[ctranslate2\]'"):
            way_out.write(tmp_path / "out", model, config, pair)
    (tmp_path / "there").write_text("a")
    with pytest.raises(FileExistsError, match="there is there already: choose another folder"):
        way_out.write(tmp_path / "there", model, config, pair)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_an_older_version_may_have_no_place_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctranslate2.specs import transformer_spec

    newer = transformer_spec.TransformerEncoderSpec

    def older(num_layers: int, num_heads: int, **options: Any) -> Any:
        if "rotary_dim" in options:
            raise TypeError("unexpected keyword argument 'rotary_dim'")
        return newer(num_layers, num_heads, **options)

    monkeypatch.setattr(transformer_spec, "TransformerEncoderSpec", older)
    config = tiny(positions="rotary")
    with pytest.raises(ValueError, match=r"ctranslate2 [0-9.]+ has no place for this model.*'rotary_dim'"):
        way_out.write(tmp_path / "out", make(config), config, vocabularies())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "factor", "message"),
    [
        ("target_embedding", -1.0, "token [0-9]+ is '.*', and weft's '.*'"),
        ("decoder.2.feed_forward.inner.weight", 1.01, "log p is -[0-9.]+, and weft's -[0-9.]+"),
    ],
)
def test_a_folder_that_says_something_else_is_refused(
    name: str, factor: float, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny()
    right = way_out._spec

    def wrong(model: Transformer, *args: Any) -> Any:
        other = make(config)
        other.load_state_dict({**model.state_dict(), name: model.state_dict()[name] * factor})
        return right(other.requires_grad_(False), *args)

    monkeypatch.setattr(way_out, "_spec", wrong)
    start = "not written: run by CTranslate2, the model does not say what weft says to sample 1 of 16: "
    with pytest.raises(ValueError, match=start + message) as error:
        way_out.write(tmp_path / "deep" / "out", make(config), config, vocabularies())
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_export_translator(tmp_path: Path) -> None:
    config = tiny()
    recipe = Recipe.make({"task": "translation", "model": config.model_dump(exclude_none=True)})
    told = export_translator(make(config), recipe, vocabularies(), tmp_path / "a", "ctranslate2", SOURCE)
    assert told.endswith("the same greedy translations of 3 sentences")
    told = export_translator(make(config), recipe, vocabularies(), tmp_path / "b", "ctranslate2", quantization="int8")
    assert "CTranslate2 in int8; " in told
