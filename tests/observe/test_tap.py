"""The tap: names, calls, patterns, labels, nesting, threads; nothing left behind."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import weft
from weft import observe
from weft.layers.attention import MultiHeadAttention
from weft.layers.blocks import BlockConfig, EncoderBlock


class Twice(nn.Module):
    """One attention used twice and one block used once."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = MultiHeadAttention(8, 2)
        self.block = EncoderBlock(BlockConfig(8, 2, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.shared(self.shared(x)))  # type: ignore[no-any-return]


def test_a_layer_used_twice_has_two_entries_in_order() -> None:
    model, x = Twice(), torch.randn(1, 3, 8)
    with weft.record(model) as seen:
        model(x)
    assert [(entry.name, entry.call) for entry in seen] == [("shared", 0), ("shared", 1), ("block.attention", 0)]
    first, second = seen.calls("shared")
    assert not torch.equal(first.weights, second.weights)
    with weft.record(model.shared) as alone:
        model.shared(x)
    assert torch.equal(alone[""].weights, first.weights)
    with pytest.raises(KeyError, match="called 2 times"):
        _ = seen["shared"]


def test_patterns_choose_and_a_wrong_one_is_named() -> None:
    model, x = Twice(), torch.randn(1, 3, 8)
    with weft.record(model, names="block.*") as seen:
        model(x)
    assert {entry.name for entry in seen} == {"block.attention"}
    with (
        pytest.raises(ValueError, match=r"no module matches 'sharde'; did you mean 'shared'\?"),
        weft.record(model, names=["sharde"]),
    ):
        pass


def test_what_is_added_is_told_to_those_who_ask() -> None:
    model, x = Twice(), torch.randn(1, 3, 8)
    both = ("weights", "added")
    with (
        weft.record(model) as usual,
        weft.record(model, kinds="added") as added,
        weft.record(model, kinds=both) as all_,
    ):
        model(x)
    assert [entry.name for entry in usual] == ["shared", "shared", "block.attention"]
    assert [(entry.name, entry.call) for entry in added] == [
        ("shared.output", 0),
        ("shared.output", 1),
        ("block.attention.output", 0),
        ("block.around_attention", 0),
        ("block.around_feed_forward", 0),
    ]
    assert {entry.kind for entry in added} == {"added"}
    assert len(all_) == len(usual) + len(added)
    assert all_["block.around_attention"]["added"] is added["block.around_attention"]["added"]  # made once
    assert torch.equal(all_["block.attention"].weights, usual["block.attention"].weights)
    with (
        pytest.raises(ValueError, match=r"among weights, .*, search, not 'add'; did you mean 'added'\?"),
        weft.record(model, kinds="add"),
    ):
        pass


def test_what_was_added_stays_when_the_model_learns() -> None:
    model, x = Twice(), torch.randn(1, 3, 8)
    with weft.record(model, kinds="added") as seen:
        model(x)
    kept = [value.clone() for entry in seen for value in entry.values.values()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    found = [value for entry in seen for value in entry.values.values()]
    assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))


def test_what_was_not_seen_is_named() -> None:
    model = Twice()
    with weft.record(model) as seen:
        model(torch.randn(1, 3, 8))
    with pytest.raises(KeyError, match=r"did you mean 'block\.attention'"):
        _ = seen["block.attentoin"]
    with pytest.raises(KeyError, match="showed weights, not 'gates'"):
        _ = seen["block.attention"]["gates"]
    assert "shared" in seen
    assert "nothing" not in seen


def test_labels_fit_or_are_refused() -> None:
    model = Twice()
    with weft.record(model) as seen:
        model(torch.randn(1, 3, 8))
    seen.label("*", queries=["a", "b", "c"], keys=["x", "y", "z"])
    assert seen["block.attention"].queries == ("a", "b", "c")
    assert seen.calls("shared")[1].keys == ("x", "y", "z")
    with pytest.raises(ValueError, match="has 3 keys, but 2 labels"):
        seen.label("shared", keys=["x", "y"])
    with pytest.raises(ValueError, match="no recorded attention matches 'decoder'"):
        seen.label("decoder", keys=["x"])


def test_records_nest_and_end() -> None:
    model, x = Twice(), torch.randn(1, 3, 8)
    with weft.record(model) as outer:
        model(x)
        with weft.record(model.block) as inner:
            model(x)
        assert observe.listening()
    model(x)
    assert not observe.listening()
    assert len(outer) == 6
    assert [entry.name for entry in inner] == ["attention"]


def test_an_error_inside_ends_the_record() -> None:
    with pytest.raises(RuntimeError), weft.record(Twice()):
        raise RuntimeError
    assert not observe.listening()


def test_another_thread_is_not_heard() -> None:
    model, x = Twice(), torch.randn(1, 3, 8)
    with weft.record(model) as seen:
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    assert len(seen) == 0


def test_a_compiled_model_runs_eagerly_and_is_heard() -> None:
    model, x = Twice(), torch.randn(1, 3, 8)
    compiled = torch.compile(model, backend="eager")
    expected = compiled(x)
    for listened in (model, compiled):
        with weft.record(listened) as seen:
            assert torch.equal(compiled(x), expected)
        assert [entry.name for entry in seen] == ["shared", "shared", "block.attention"]


def test_nothing_is_left_on_a_module() -> None:
    model, x = Twice(), torch.randn(1, 3, 8)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with weft.record(model):
        model(x)
    assert before == {name: set(vars(module)) for name, module in model.named_modules()}


def test_with_nobody_listening_nothing_is_made() -> None:
    def fail() -> dict[str, Tensor]:
        raise AssertionError("made without a listener")

    observe.see(nn.Identity(), "weights", fail)
    with weft.record(nn.Linear(2, 2)):  # listens to another module
        observe.see(nn.Identity(), "weights", fail)


def test_the_public_names() -> None:
    assert weft.record is observe.record
    assert "record" in dir(weft)
    with pytest.raises(AttributeError, match="it has Recipe, __version__, load, record"):
        _ = weft.nothing  # type: ignore[attr-defined]
