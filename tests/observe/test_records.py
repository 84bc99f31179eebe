"""A record is read, saved to one file and loaded again, and made of other people's tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import weft
from weft.layers.attention import MultiHeadAttention
from weft.observe import Record, Seen


def _record() -> Record:
    torch.manual_seed(0)
    first, second = (torch.randn(1, 2, 3, 4).softmax(-1) for _ in range(2))
    allowed = torch.ones(1, 1, 3, 4, dtype=torch.bool)
    return Record(
        [
            Seen("a", "weights", 0, {"weights": first, "allowed": allowed}, ("x", " y", "z"), tuple("abcd"), "cross"),
            Seen("a", "weights", 1, {"weights": second}),
            Seen("b", "gates", 0, {"gate": torch.rand(1, 3, 5, dtype=torch.bfloat16)}),
        ],
        {"title": "größer 日本 <b>", "words": {"source": [0, 0, 1]}},
    )


def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    record = _record()
    record.save(tmp_path / "seen.record")
    again = Record.load(tmp_path / "seen.record")
    assert again.about == record.about
    for one, other in zip(record, again, strict=True):
        assert (one.name, one.kind, one.call, one.queries, one.keys, one.role) == (
            (other.name, other.kind, other.call, other.queries, other.keys, other.role)
        )
        assert one.values.keys() == other.values.keys()
        assert all(torch.equal(value, other.values[name]) for name, value in one.values.items())
        assert all(value.dtype == other.values[name].dtype for name, value in one.values.items())


def test_an_empty_record_is_saved_too(tmp_path: Path) -> None:
    Record().save(tmp_path / "empty")
    assert len(Record.load(tmp_path / "empty")) == 0


def test_what_is_no_record_is_told_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        Record.load(tmp_path / "nothing")
    (tmp_path / "text").write_text("no tensors here")
    save_file({"x": torch.ones(2)}, tmp_path / "tensors")
    told = {"format": 1, "entries": [{"name": "a", "kind": "weights", "call": 0, "values": ["weights"]}], "about": {}}
    save_file({}, tmp_path / "missing", {"weft_record": json.dumps(told)})
    save_file({}, tmp_path / "newer", {"weft_record": json.dumps({**told, "format": 99})})
    save_file({}, tmp_path / "strange", {"weft_record": json.dumps([1, 2])})
    save_file({}, tmp_path / "broken", {"weft_record": "{"})
    for name in ("text", "tensors", "missing", "newer", "strange", "broken"):
        with pytest.raises(ValueError, match="is no record of attention") as caught:
            Record.load(tmp_path / name)
        assert "\n" not in str(caught.value)
    whole = tmp_path / "whole"
    _record().save(whole)
    whole.write_bytes(whole.read_bytes()[:-7])
    with pytest.raises(ValueError, match="is no record of attention"):
        Record.load(whole)


def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="cannot write"):
        _record().save(tmp_path / "missing" / "x")
    with pytest.raises(ValueError, match="what JSON can say"):
        Record(about={"x": torch.ones(1)}).save(tmp_path / "x")


def test_calls_and_kinds_are_told_apart() -> None:
    record = _record()
    assert [entry.call for entry in record.calls("a")] == [0, 1]
    assert [entry.name for entry in record.of_kind("gates")] == ["b"]
    record.entries.append(Seen("b", "hidden", 0, {"hidden": torch.zeros(1, 3, 5)}))
    with pytest.raises(KeyError, match="'b' showed gates and hidden: use calls"):
        _ = record["b"]
    assert record.calls("b", "hidden")[0].kind == "hidden"


def test_arrays_are_named_by_module_call_and_value() -> None:
    record = _record()
    arrays = record.numpy()
    assert sorted(arrays) == ["a#1/weights", "a/allowed", "a/weights", "b/gate"]
    assert arrays["b/gate"].dtype == np.float32
    np.testing.assert_array_equal(arrays["a#1/weights"], record.calls("a")[1].weights.numpy())


def test_attentions_of_other_models_become_a_record() -> None:
    layers = [torch.randn(1, 3, 4, 4).softmax(-1) for _ in range(2)]
    tokens = ["[CLS]", "the", "cat", "[SEP]"]
    record = Record.of(layers, tokens)
    assert [entry.name for entry in record] == ["layer 1", "layer 2"]
    assert all(entry.queries == entry.keys == tuple(tokens) and entry.role == "self" for entry in record)
    assert torch.equal(record["layer 2"].weights, layers[1])
    named = Record.of({"decoder": np.full((1, 1, 2, 4), 0.25)}, ["a", "b"], tokens, role="cross")
    assert named["decoder"].queries == ("a", "b")
    assert named["decoder"].keys == tuple(tokens)
    with pytest.raises(ValueError, match=r"expected weights \[batch, head, query, key\]"):
        Record.of([torch.ones(3, 3)])
    with pytest.raises(ValueError, match='attn_implementation="eager"'):
        Record.of([None])
    with pytest.raises(ValueError, match="between 0 and 1"):
        Record.of([torch.randn(1, 1, 3, 3)])
    with pytest.raises(ValueError, match="4 queries, but 2 labels"):
        Record.of(layers, ["a", "b"])


def test_bert_of_transformers_becomes_a_record() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    config._attn_implementation = "eager"
    model = transformers.BertModel(config).eval()
    with torch.no_grad():
        outputs = model(torch.tensor([[1, 5, 6, 2]]), output_attentions=True)
    record = Record.of(outputs.attentions, ["[CLS]", "a", "b", "[SEP]"])
    for entry, theirs in zip(record, outputs.attentions, strict=True):
        assert torch.equal(entry.weights, theirs)


def test_vectors_come_beside_weights_for_those_who_ask() -> None:
    model, x = MultiHeadAttention(8, 2), torch.randn(1, 3, 8)
    with weft.record(model) as usual, weft.record(model, kinds="vectors") as more:
        model(x)
    assert set(usual[""].values) == {"weights"}
    assert set(more[""].values) == {"weights", "queries", "keys", "values", "scale"}
    entry = more[""]
    expected = (entry["queries"] @ entry["keys"].transpose(-2, -1) * entry["scale"]).softmax(-1)
    torch.testing.assert_close(entry.weights, expected)


def test_what_holds_a_model_can_be_recorded() -> None:
    class Holder:
        model = MultiHeadAttention(8, 2)

    with weft.record(Holder()) as seen:
        Holder.model(torch.randn(1, 3, 8))
    assert seen[""].weights.shape == (1, 2, 3, 3)
