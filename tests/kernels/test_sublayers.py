"""Compiled sub-layers: the values and gradients of torch's own layers and of weft's pieces, and only where they fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.test_steady import threads
from weft import record
from weft.config import GPTConfig, TransformerConfig
from weft.data.batching import Batch
from weft.kernels import native, plain, steady, sublayers
from weft.kernels.compiled import KINDS, compiled, multiplies
from weft.kernels.mask import Mask
from weft.layers.blocks import BlockConfig, DecoderBlock, EncoderBlock, through
from weft.layers.relative import Rotary
from weft.models.gpt import GPT
from weft.models.transformer import Transformer

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no compiled library: {native.why_not()}")

PIECES = tuple(kind for kind in KINDS if kind != "sublayers")
CASES: dict[str, dict[str, Any]] = {
    "gelu": {"dim": 64, "num_heads": 4, "ffn_dim": 128, "activation": "gelu"},
    "relu": {"dim": 80, "num_heads": 5, "ffn_dim": 48},  # panels that are not full
    "tanh": {"dim": 96, "num_heads": 3, "ffn_dim": 336, "activation": "gelu_tanh", "bias": False},
    "llama": {
        "dim": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 96, "activation": "swiglu", "norm": "rms",
        "bias": False,
    },
    "biases": {"dim": 32, "num_heads": 2, "ffn_dim": 64, "activation": "swiglu", "attention_bias": False},
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sub-layers each compiled call had."""
    found: list[int] = []
    through = sublayers.through

    def counted(x: Tensor, parts: list[sublayers.SubLayer]) -> Tensor:
        found.append(len(parts))
        return through(x, parts)

    monkeypatch.setattr(sublayers, "through", counted)
    return found


@pytest.fixture
def dtypes() -> Iterator[list[torch.dtype]]:
    """Of what can be compiled here."""
    with compiled("sublayers"):
        yield [torch.float32, *([torch.bfloat16] if multiplies(torch.bfloat16) else [])]


def made(**config: Any) -> EncoderBlock:
    """A block whose biases and gains are not what they begin with."""
    block = EncoderBlock(BlockConfig(**config))
    for parameter in block.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, 0.7, 0.5)
    return block


def results(
    block: nn.Module, x: Tensor, by: Tensor, kinds: tuple[str, ...], run: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """What comes out, and the gradients of x and of the parameters, in fp64."""
    x = x.detach().requires_grad_()
    torch.manual_seed(3)  # of what is dropped
    with compiled(*kinds):
        y = (run or block)(x)
        gradients = torch.autograd.grad((y * by.to(y.dtype)).sum(), [x, *block.parameters()])
    return [found.detach().double() for found in (y, *gradients)]


def distances(found: list[Tensor], right: list[Tensor]) -> list[float]:
    """Of each from what is right, relative to it; or to a little of the largest, as a key's bias has no gradient."""
    least = max(float(b.norm()) for b in right) * 3e-3
    return [float((a - b).norm()) / max(float(b.norm()), least) for a, b in zip(found, right, strict=True)]


@pytest.mark.parametrize("mask", [None, Mask(causal=True), Mask(lengths=torch.tensor([37, 1, 20]))], ids=str)
@pytest.mark.parametrize("rotary", ["", "halves", "pairs"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_plain_formulas(
    case: str, rotary: str, mask: Mask | None, calls: list[int], dtypes: list[torch.dtype]
) -> None:
    torch.manual_seed(0)
    block, size = made(**CASES[case]), CASES[case]["dim"]
    x, by = torch.randn(3, 37, size), torch.randn(3, 37, size)
    turns = Rotary(size // CASES[case]["num_heads"], interleaved=rotary == "pairs") if rotary else None

    def run(kinds: tuple[str, ...], dtype: torch.dtype) -> list[Tensor]:
        turning = turns.turning(torch.arange(37), dtype) if turns else None
        return results(block, x.to(dtype), by, kinds, lambda y: block(y, mask, None, turning))

    narrow = {dtype: run(KINDS, dtype) for dtype in dtypes}
    assert calls == [2] * len(dtypes)
    pieces = run(PIECES, torch.bfloat16)
    assert len(calls) == len(dtypes)
    with plain.plain():
        right = results(
            block.double(), x.double(), by.double(), (),
            lambda y: block(y, mask, None, turns.turning(torch.arange(37), torch.float64) if turns else None),
        )  # fmt: skip
    assert max(distances(narrow[torch.float32], right)) < 3e-5
    if torch.bfloat16 in dtypes and case != "relu":  # which a rounding turns on or off: chance would decide
        ours, theirs = distances(narrow[torch.bfloat16], right), distances(pieces, right)
        assert max(ours) < 1.5 * max(theirs)  # the pieces, which hand each other bf16 too
        assert sum(ours) < 1.3 * sum(theirs)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_they_are_torchs_own_layer(activation: str, calls: list[int]) -> None:
    torch.manual_seed(1)
    block = made(dim=48, num_heads=3, ffn_dim=96, activation=activation)
    theirs = nn.TransformerEncoderLayer(48, 3, 96, 0.0, activation, batch_first=True, norm_first=True)
    attention = block.attention
    own = [attention.query, attention.key, attention.value]
    pairs = [
        (theirs.self_attn.in_proj_weight, torch.cat([layer.weight for layer in own])),
        (theirs.self_attn.in_proj_bias, torch.cat([layer.bias for layer in own])),
        *zip(theirs.self_attn.out_proj.parameters(), attention.output.parameters(), strict=True),
        *zip(theirs.linear1.parameters(), block.feed_forward.inner.parameters(), strict=True),
        *zip(theirs.linear2.parameters(), block.feed_forward.outer.parameters(), strict=True),
        *zip(theirs.norm1.parameters(), block.around_attention.norm.parameters(), strict=True),
        *zip(theirs.norm2.parameters(), block.around_feed_forward.norm.parameters(), strict=True),
    ]
    with torch.no_grad():
        for to, what in pairs:
            to.copy_(what)
    x, by = torch.randn(2, 2, 9, 48).unbind()
    there, _, *gradients = results(theirs, x, by, ())
    here, dx, *ours = results(block, x, by, KINDS)
    assert calls == [2]
    torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)
    found = dict(zip([name for name, _ in block.named_parameters()], ours, strict=True))
    wanted = dict(zip([name for name, _ in theirs.named_parameters()], gradients, strict=True))
    joined = torch.cat([found[f"attention.{name}.weight"] for name in ("query", "key", "value")])
    torch.testing.assert_close(joined, wanted["self_attn.in_proj_weight"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["feed_forward.outer.weight"], wanted["linear2.weight"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["around_attention.norm.weight"], wanted["norm1.weight"], rtol=1e-4, atol=1e-4)
    assert dx.shape == x.shape


def test_the_same_is_dropped(calls: list[int], dtypes: list[torch.dtype]) -> None:
    torch.manual_seed(2)
    block = made(dim=32, num_heads=2, ffn_dim=64, dropout=0.3, attention_dropout=0.2)
    x, by = torch.randn(2, 5, 11, 32).unbind()
    ours, theirs = (results(block, x, by, kinds) for kinds in (KINDS, PIECES))
    assert calls == [2]
    assert max(distances(ours, theirs)) < 2e-5
    torch.manual_seed(3)
    with compiled(*KINDS), torch.no_grad():
        still = block.eval()(x)
    assert float((still - ours[0]).abs().max()) > 0.1


def test_threads_and_company_leave_the_bits_of_what_comes_out(dtypes: list[torch.dtype]) -> None:
    torch.manual_seed(4)
    block, x, by = made(dim=64, num_heads=2, ffn_dim=96), torch.randn(9, 50, 64), torch.randn(9, 50, 64)
    for dtype in dtypes:
        found = []
        for count in (1, 2, 3):
            with threads(count):
                found.append(results(block, x.to(dtype), by, KINDS))
        assert all(torch.equal(one[0], found[0][0]) and torch.equal(one[1], found[0][1]) for one in found)
        with threads(2):
            again = results(block, x.to(dtype), by, KINDS)
        assert all(map(torch.equal, again, found[1]))  # the parameters' gradients with as many threads
        assert max(distances(found[2], found[0])) < 1e-5
        with compiled(*KINDS), torch.no_grad():
            assert torch.equal(block(x[3:5].to(dtype)).double(), found[0][0][3:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_train_through_them(dtype: torch.dtype, calls: list[int], dtypes: list[torch.dtype]) -> None:
    if dtype not in dtypes:
        pytest.skip("this CPU has no fast bf16 vectors, or matrices of them")
    torch.manual_seed(5)
    language = GPT(GPTConfig(dim=32, num_heads=2, num_layers=3, positions="rotary", max_len=32, dropout=0.1), 50)
    config = TransformerConfig(dim=32, num_heads=2, ffn_dim=64, encoder_layers=2, decoder_layers=3)
    translation = Transformer(config, 50, 50)
    source, target = torch.randint(4, 50, (2, 6, 12)).unbind()
    source[3, 7:] = 0
    for model, batch, expected in (
        (language, _Text(target), [6]),
        (translation, Batch(source, target), [4, *[1] * 6]),
    ):
        model.train().precision = dtype  # type: ignore[assignment]
        found = []
        for kinds in (KINDS, PIECES):
            calls.clear()
            torch.manual_seed(6)
            with compiled(*kinds):
                total = model.loss(batch).total  # type: ignore[arg-type]
                gradients = torch.autograd.grad(total, list(model.parameters()))
            assert calls == (expected if kinds == KINDS else [])
            found.append([total.detach().double(), *(gradient.double() for gradient in gradients)])
        assert max(distances(*found)) < (1e-4 if dtype == torch.float32 else 0.12)
        assert distances(*found)[0] < (1e-6 if dtype == torch.float32 else 2e-3)


class _Text:
    segments = counted = None

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


def test_parameters_that_are_not_trained_get_no_gradient(calls: list[int]) -> None:
    block = made(dim=32, num_heads=2, ffn_dim=64)
    block.attention.key.requires_grad_(False)
    with compiled(*KINDS):
        block(torch.randn(2, 4, 32)).sum().backward()
    assert calls == [2]
    assert block.attention.key.weight.grad is None
    assert all(p.grad is not None for name, p in block.named_parameters() if "key" not in name)


def test_hooks_in_blocks_are_called(calls: list[int]) -> None:
    torch.manual_seed(6)
    model = GPT(GPTConfig(dim=32, num_heads=2, num_layers=1), 20)
    tokens, met = torch.randint(4, 20, (2, 5)), []
    model.blocks[0].register_forward_hook(lambda *_: met.append(True))
    with compiled(*KINDS):
        model(tokens)
    assert met == [True]
    assert calls == [2]  # its sub-layers are plain all the same


@pytest.mark.parametrize("compiled_kinds", [(), KINDS])
def test_blocks_that_are_wrapped_are_run(compiled_kinds: tuple[str, ...]) -> None:
    torch.manual_seed(6)
    model = GPT(GPTConfig(dim=32, num_heads=2, num_layers=2), 20).eval()
    tokens = torch.randint(4, 20, (2, 5))
    right = model(tokens)
    model.blocks[0] = _Wrapped(model.blocks[0])
    with compiled(*compiled_kinds):
        torch.testing.assert_close(model(tokens), right, rtol=1e-5, atol=1e-5)


class _Wrapped(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *given: Any) -> Tensor:
        found: Tensor = self.block(*given)
        return found


def test_wrong_masks_and_places_are_told(calls: list[int]) -> None:
    block, x = made(dim=32, num_heads=2, ffn_dim=64), torch.randn(2, 5, 32)
    wrong = {
        "mask must be a Mask": torch.ones(5, 5, dtype=torch.bool),
        "lengths go up to 9": Mask(lengths=torch.tensor([5, 9])),
        "lengths has 3 rows": Mask(lengths=torch.tensor([5, 4, 3])),
    }
    with compiled(*KINDS):
        for message, mask in wrong.items():
            with pytest.raises(ValueError, match=message):
                block(x, mask)
        with pytest.raises((ValueError, RuntimeError)):  # angles of four places for five tokens, as in the pieces
            block(x, None, None, Rotary(16).turning(torch.arange(4), torch.float32))
        calls.clear()
        one = block(x, None, None, Rotary(16).turning(torch.tensor([3]), torch.float32))  # of one for all
    assert calls == [1]
    torch.testing.assert_close(one, block(x), rtol=1e-4, atol=1e-4)  # all turned alike is as if nothing were


def test_layers_that_do_not_go_together_are_told() -> None:
    x = torch.randn(2, 5, 32)
    for spoil in (
        lambda block: setattr(block.feed_forward, "outer", type(block.feed_forward.outer)(48, 32)),
        lambda block: setattr(block.attention, "num_heads", 4),
    ):
        block = made(dim=32, num_heads=2, ffn_dim=64)
        spoil(block)
        with compiled(*KINDS), pytest.raises((ValueError, RuntimeError)):
            block(x)


def test_what_is_saved_may_stand_elsewhere_on_the_way_back(calls: list[int]) -> None:
    """As where it is moved to the disk meanwhile."""
    torch.manual_seed(0)
    block, x, by = made(dim=32, num_heads=2, ffn_dim=64), torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    expected = results(block, x, by, KINDS)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved.clone()):
        found = results(block, x, by, KINDS)
    assert calls == [2, 2]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_parameters_of_another_shape_on_the_way_back_are_told() -> None:
    block, x = made(dim=32, num_heads=2, ffn_dim=64), torch.randn(2, 5, 32)
    with compiled(*KINDS):
        loss = block(x).sum()
        block.feed_forward.outer.weight.data = torch.zeros(32, 16)
        with pytest.raises(RuntimeError, match="another shape"):
            loss.backward()


def test_large_sub_layers_go_piece_by_piece(
    calls: list[int], dtypes: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sublayers, "_LARGEST", 4 * 64 * 64)
    block = EncoderBlock(BlockConfig(dim=64, num_heads=2, ffn_dim=256))  # attention has as many, the other twice that
    for dtype in dtypes:
        with compiled(*KINDS):
            block(torch.randn(1, 3, 64).to(dtype))
        assert calls == [1]
        calls.clear()


def test_differentiating_twice_is_refused() -> None:
    block, x = made(dim=32, num_heads=2, ffn_dim=64), torch.randn(2, 5, 32, requires_grad=True)
    with compiled(*KINDS):
        (slope,) = torch.autograd.grad(block(x).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="differentiate twice"):
            slope.pow(2).sum().backward()


def test_a_block_that_is_used_twice_and_rows_that_see_nothing(dtypes: list[torch.dtype], calls: list[int]) -> None:
    torch.manual_seed(11)
    block = made(dim=32, num_heads=2, ffn_dim=64, dropout=0.1)
    blocks, mask = nn.ModuleList([block, block]), Mask(causal=True, lengths=torch.tensor([0, 3, 5]))
    x, by = torch.randn(2, 3, 5, 32).unbind()
    ours, theirs = (results(block, x, by, kinds, lambda y: through(blocks, y, mask)) for kinds in (KINDS, PIECES))
    assert calls == [4]
    assert max(distances(ours, theirs)) < 2e-5
    with compiled(*KINDS), torch.no_grad():
        torch.manual_seed(3)
        assert torch.equal(through(blocks, x, mask).double(), ours[0])


def _spied(block: EncoderBlock) -> EncoderBlock:
    block.attention.forward = block.attention.forward  # type: ignore[method-assign]
    return block


def _hooked(block: EncoderBlock) -> EncoderBlock:
    block.feed_forward.outer.register_forward_hook(lambda *_: None)
    return block


def _watched(block: EncoderBlock) -> EncoderBlock:
    block.attention.key_norm.register_forward_hook(lambda *_: None)
    return block


OTHERS: dict[str, Callable[[], EncoderBlock]] = {
    "post-norm": lambda: made(dim=32, num_heads=2, ffn_dim=64, norm_first=False),
    "no residual": lambda: made(dim=32, num_heads=2, ffn_dim=64, residual=False),
    "no norm": lambda: made(dim=32, num_heads=2, ffn_dim=64, norm="none"),
    "normalised queries": lambda: made(dim=32, num_heads=2, ffn_dim=64, qk_norm=True),
    "relative positions": lambda: made(dim=32, num_heads=2, ffn_dim=64, max_distance=3),
    "no whole vectors": lambda: made(dim=24, num_heads=2, ffn_dim=64),
    "dropout inside": lambda: made(dim=32, num_heads=2, ffn_dim=64, ffn_dropout=0.5),
    "a forward of its own": lambda: _spied(made(dim=32, num_heads=2, ffn_dim=64)),
    "a hook in a norm that does nothing": lambda: _watched(made(dim=32, num_heads=2, ffn_dim=64)),
    "a hook": lambda: _hooked(made(dim=32, num_heads=2, ffn_dim=64)),
    "fp64": lambda: made(dim=32, num_heads=2, ffn_dim=64).double(),
}


ONE_OF_TWO = (
    "normalised queries",
    "relative positions",
    "dropout inside",
    "a forward of its own",
    "a hook in a norm that does nothing",
    "a hook",
)  # the other sub-layer is plain


@pytest.mark.parametrize("what", OTHERS)
def test_other_blocks_go_piece_by_piece(what: str, calls: list[int]) -> None:
    torch.manual_seed(7)
    block = OTHERS[what]()
    size = 24 if what == "no whole vectors" else 32
    x = torch.randn(2, 5, size, dtype=torch.float64 if what == "fp64" else torch.float32)
    with compiled(*KINDS):
        assert block(x, Mask(causal=True)).shape == x.shape
    assert calls == ([1] if what in ONE_OF_TWO else [])


def test_what_they_cannot_do_goes_piece_by_piece(calls: list[int]) -> None:
    torch.manual_seed(8)
    block, x = made(dim=32, num_heads=2, ffn_dim=64), torch.randn(2, 5, 32)
    segments = torch.tensor([[0, 0, 1, 1, 1]] * 2)
    with compiled(*KINDS):
        for mask in (Mask(window=2, causal=True), Mask(causal=True, segments=segments)):
            block(x, mask)
        block(x, None, torch.zeros(1, 2, 5, 5))
        turning = Rotary(16).turning(torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]), torch.float32)
        block(x, None, None, turning)
        assert calls == [1] * 4  # their feed-forwards
        calls.clear()
        with steady.steady():
            block(x)
        with plain.plain():
            block(x)
        assert not calls
        block(x)
    assert calls == [2]


def test_whoever_watches_sees_the_pieces(calls: list[int]) -> None:
    torch.manual_seed(9)
    block, x = made(dim=32, num_heads=2, ffn_dim=64), torch.randn(2, 5, 32)
    with compiled(*KINDS):
        unseen = block(x)
        with record(block) as seen:
            watched = block(x)
    assert calls == [2]
    assert len(seen) == 1
    torch.testing.assert_close(watched, unseen, rtol=1e-5, atol=1e-5)


def test_a_decoder_block_has_its_own_two(calls: list[int]) -> None:
    torch.manual_seed(10)
    block = DecoderBlock(BlockConfig(dim=32, num_heads=2, ffn_dim=64))
    x, memory = torch.randn(2, 5, 32), torch.randn(2, 7, 32)
    with compiled(*KINDS):
        ours = block(x, memory)
    assert calls == [1, 1]
    torch.testing.assert_close(ours, block(x, memory), rtol=1e-5, atol=1e-5)
