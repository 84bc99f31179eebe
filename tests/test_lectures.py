"""What the lectures say holds: docs/lectures.md runs and names what exists, and its weightier facts are tests."""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import weft
from docs.pictures import BLOCKS, FOLDER, PICTURES, gradient_norms, stack
from docs.pictures import main as draw_pictures
from weft.kernels.attention import attend, attention_weights
from weft.kernels.mask import Mask
from weft.layers import masks
from weft.layers.attention import MultiHeadAttention
from weft.layers.blocks import BlockConfig, EncoderBlock
from weft.layers.cache import KVCache
from weft.layers.positions import Learned, Positioned, Sinusoidal, positions
from weft.layers.relative import ALiBi, Rotary, T5Bias
from weft.layers.scores import SelfAttention

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/lectures.md").read_text(encoding="utf-8")
PROGRAM = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
LINES = [
    *(f"A{i}" for i in range(1, 5)),
    *(f"B{i}" for i in range(1, 12)),
    *("C1", "C2", "C3", "D1", "D2", "D3", "D4", "E1", "E2", "E3", "I1"),
]


def line_of(program: re.Match[str]) -> int:
    return PAGE[: program.start(1)].count("\n") + 1


def alike(printed: str, promised: str) -> bool:
    """The same text, with numbers that differ by what machines differ."""
    if NUMBER.split(printed) != NUMBER.split(promised):
        return False
    numbers = zip(NUMBER.findall(printed), NUMBER.findall(promised), strict=True)
    whole = re.compile(r"-?\d+")
    return all(
        (
            a == b
            if whole.fullmatch(a) and whole.fullmatch(b)
            else abs(float(a) - float(b)) <= 1e-6 + 0.05 * abs(float(b))
        )
        for a, b in numbers
    )


@pytest.mark.parametrize("program", list(PROGRAM.finditer(PAGE)), ids=lambda program: f"line-{line_of(program)}")
def test_a_program_of_the_page_runs_and_prints_what_it_promises(program: re.Match[str]) -> None:
    source = "\n" * (line_of(program) - 1) + program[1]  # so that a traceback names the page's own lines
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(source, "docs/lectures.md", "exec"), {"__name__": "lectures"})
    assert alike(printed.getvalue(), program[2] or ""), printed.getvalue()


def test_the_program_of_the_readme_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    programs = [program for program in PROGRAM.finditer(readme) if "weft.load(" not in program[1]]
    assert programs  # what loads a model is run in test_end_to_end.py, which trains one
    for program in programs:
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(compile(program[1], "README.md", "exec"), {"__name__": "readme"})
        assert printed.getvalue().strip() == "torch.Size([1, 4, 5, 5])"


def test_every_block_of_the_page_is_run_or_compared() -> None:
    fences = re.findall(r"^```(\w+)$", PAGE, re.MULTILINE)
    programs = list(PROGRAM.finditer(PAGE))
    assert len(programs) > 20
    assert fences.count("python") == len(programs)
    assert fences.count("text") == sum(program[2] is not None for program in programs)
    assert set(fences) == {"python", "text"}


def test_what_is_printed_is_compared() -> None:
    assert alike("a 1.00 b", "a 1.01 b")
    assert alike("(0)", "(7e-14)")
    assert not alike("a 1.0 b", "a 1.2 b")
    assert not alike("60 steps", "63 steps")
    assert not alike("a 1.0 b", "a 1.0 c")
    assert not alike("", "a")


def test_every_line_of_the_checklist_has_its_row() -> None:
    assert re.findall(r"^\| ([A-Z]\d+) \|", PAGE, re.MULTILINE) == LINES


def test_every_file_and_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:weft|tests|docs|examples|benchmarks)/[\w./]+?\.\w+)(?:::(\w+))?`", PAGE)
    assert len(named) > 30
    for path, test in named:
        assert (ROOT / path).is_file(), path
        if test:
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_every_command_that_the_page_names_exists() -> None:
    for script in re.findall(r"`python (\S+\.py)", PAGE):
        assert (ROOT / script).is_file(), script
    for module in re.findall(r"`python -m ([\w.]+)", PAGE):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module
    for name in re.findall(r"`python -m docs.pictures (\w+)`", PAGE):
        assert name in PICTURES, name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make (\w+)`", PAGE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_picture_exists_and_is_shown() -> None:
    shown = set(re.findall(r"!\[[^\]]+\]\((pictures/\w+\.png)\)", PAGE))
    linked = set(re.findall(r"\]\((pictures/\w+\.png)\)", PAGE))
    drawn = {f"pictures/{name}.png" for name in [*PICTURES, "three_ways", "ladder"]}
    assert shown == linked
    assert linked <= drawn == {f"pictures/{path.name}" for path in FOLDER.glob("*.png")}
    trained = re.findall(r"\]\((pictures/gallery/\w+\.png)\)", PAGE)
    assert [path for path in trained if not (ROOT / "docs" / path).is_file()] == []
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob("*.png")}
    assert {name: size for name, size in sizes.items() if not 5_000 < size < 110_000} == {}


def test_links_inside_the_page_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    links = set(re.findall(r"\]\(#([^)]+)\)", PAGE))
    assert links
    assert links - anchors == set()


def test_pictures_are_drawn_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "docs" / "pictures"
    folder.mkdir(parents=True)
    monkeypatch.setattr("docs.pictures.FOLDER", folder)
    monkeypatch.setattr("sys.argv", ["pictures", "masks", "positions"])
    draw_pictures()
    assert sorted(path.name for path in folder.iterdir()) == ["masks.png", "positions.png"]
    monkeypatch.setattr("sys.argv", ["pictures", "nothing"])
    with pytest.raises(SystemExit) as stopped:
        draw_pictures()
    assert stopped.value.code == 2


def test_the_worked_numbers() -> None:
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float64)
    q[..., 0] = 8.0
    k = torch.zeros(1, 1, 2, 64, dtype=torch.float64)
    k[..., 0] = torch.tensor([14.0, 12.0])  # q · k = 112 and 96
    expected = [exp(14) / (exp(14) + exp(12)), exp(12) / (exp(14) + exp(12))]
    assert [round(weight, 2) for weight in expected] == [0.88, 0.12]
    assert attention_weights(q, k).flatten().tolist() == pytest.approx(expected)
    v = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)[None, None]
    assert attend(q, k, v).flatten().tolist() == pytest.approx(expected)


def test_without_parameters_each_input_looks_at_itself() -> None:
    attention = SelfAttention()
    for dim in (16, 64):
        x = torch.randn(8, 20, dim)
        with weft.record(attention) as seen:
            y = attention(x)
        w = seen[""].weights[:, 0]
        assert torch.allclose(w.sum(-1), torch.ones(8, 20))
        assert torch.allclose(y, torch.stack([(a @ a.T).softmax(-1) @ a for a in x]), atol=1e-5)
        on_the_diagonal = (w.argmax(-1) == torch.arange(20)).float().mean()
        assert on_the_diagonal > 0.95
        assert w.diagonal(dim1=1, dim2=2).mean() > 0.9
    learned = MultiHeadAttention(16, num_heads=1)
    with weft.record(learned) as seen:
        learned(torch.randn(8, 20, 16))
    assert (seen[""].weights[:, 0].argmax(-1) == torch.arange(20)).float().mean() < 0.5


DIM = 16
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "parameter-free": SelfAttention,
    "multi-head": lambda: MultiHeadAttention(DIM, 4),
    "grouped": lambda: MultiHeadAttention(DIM, 4, num_kv_heads=2),
    "pre-norm block": lambda: EncoderBlock(BlockConfig(DIM, 4, 32)),
    "post-norm block": lambda: EncoderBlock(BlockConfig(DIM, 4, 32, norm_first=False)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_set_goes_in_and_a_set_comes_out(name: str) -> None:
    layer = LAYERS[name]().double()
    for n in (2, 7, 33):
        x, s = torch.randn(2, n, DIM, dtype=torch.float64), torch.randperm(n)
        assert torch.allclose(layer(x[:, s]), layer(x)[:, s], atol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_goes_in_and_a_graph_comes_out(name: str) -> None:
    layer = LAYERS[name]().double()
    x, s = torch.randn(1, 9, DIM, dtype=torch.float64), torch.randperm(9)
    edges = torch.randint(0, 9, (2, 12))
    place = s.argsort()  # node u stands at place[u] after the reordering
    y = layer(x, mask=masks.from_edges(edges, 9))
    assert torch.allclose(layer(x[:, s], mask=masks.from_edges(place[edges], 9)), y[:, s], atol=1e-10)


def test_positions_end_the_equivariance() -> None:
    attention = MultiHeadAttention(DIM, 4).double()
    x, s, places = torch.randn(1, 9, DIM, dtype=torch.float64), torch.randperm(9), positions(9)
    learned = Learned(DIM, max_len=9).double()
    t5 = T5Bias(4).double()
    for scheme in (learned, t5):
        nn.init.normal_(scheme.weight)
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "sinusoidal": lambda x: attention(Positioned(Sinusoidal(DIM))(x)),
        "learned": lambda x: attention(Positioned(learned)(x)),
        "rotary": lambda x: attention(x, rotary=Rotary(DIM // 4)),
        "alibi": lambda x: attention(x, bias=ALiBi(4)(places, places, torch.float64)),
        "t5": lambda x: attention(x, bias=t5(places, places)),
        "causal": lambda x: attention(x, mask=Mask(causal=True)),
    }
    for name, way in ways.items():
        assert not torch.allclose(way(x[:, s]), way(x)[:, s], atol=1e-3), name


def run(blocks: nn.ModuleList, x: Tensor, mask: Mask | None, cached: bool) -> Tensor:
    """x[B, N, D] through causal blocks, at once or token by token."""
    for block in blocks:
        assert isinstance(block, EncoderBlock)
        if not cached:
            x = block(x, mask=masks.combine(masks.causal(), mask))
            continue
        cache, steps = KVCache.empty(len(x)), []
        for t in range(x.shape[1]):
            now = mask
            if mask is not None and mask.segments is not None:
                now = replace(mask, segments=mask.segments[:, : t + 1])  # of the keys that are there
            y, cache = block.step(x[:, t : t + 1], cache, mask=now)
            steps.append(y)
        x = torch.cat(steps, 1)
    return x


@pytest.mark.parametrize("cached", [False, True], ids=["at once", "cached"])
@pytest.mark.parametrize("kind", ["full", "window", "packed"])
def test_the_past_does_not_hear_of_the_future(kind: str, cached: bool) -> None:
    n = 10
    mask = {"full": None, "window": masks.window(3), "packed": masks.packed_from_lengths([[4, 6]] * 2, n)}[kind]
    blocks = nn.ModuleList(EncoderBlock(BlockConfig(DIM, 4, 32)) for _ in range(2)).double()
    x = torch.randn(2, n, DIM, dtype=torch.float64)
    y = run(blocks, x, mask, cached)
    assert torch.allclose(y, run(blocks, x, mask, cached=False), atol=1e-10)
    for t in range(n - 1):
        other = torch.cat((x[:, : t + 1], torch.randn(2, n - t - 1, DIM, dtype=torch.float64)), 1)
        changed = run(blocks, other, mask, cached)
        assert torch.allclose(changed[:, : t + 1], y[:, : t + 1], atol=1e-10), t
        assert ((changed - y)[:, t + 1 :].abs().amax(-1) > 1e-6).all(), t


def test_packed_documents_do_not_hear_of_each_other() -> None:
    block = EncoderBlock(BlockConfig(DIM, 4, 32)).double()
    x = torch.randn(1, 10, DIM, dtype=torch.float64)
    y = block(x, mask=masks.packed_from_lengths([[4, 6]], 10))
    alone = [block(part, mask=masks.causal()) for part in (x[:, :4], x[:, 4:])]
    assert torch.allclose(y, torch.cat(alone, 1), atol=1e-10)


def test_what_residuals_and_norms_do_for_gradients() -> None:
    first_over_last = {name: norms[0] / norms[-1] for name in BLOCKS if (norms := gradient_norms(BLOCKS[name]))}
    assert first_over_last["neither"] < 1e-4
    assert first_over_last["residual, no norm"] > 1e3
    for name in ("residual and norm, norm first", "residual and norm, norm last (2017)", "norm, no residual"):
        assert 0.05 < first_over_last[name] < 20, name


def torch_layer(block: nn.Module) -> nn.TransformerEncoderLayer:
    """torch's layer with the weights of the post-norm block."""
    assert isinstance(block, EncoderBlock)
    layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True)
    projections = [block.attention.query, block.attention.key, block.attention.value]
    with torch.no_grad():
        layer.self_attn.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        layer.self_attn.in_proj_bias.copy_(torch.cat([p.bias for p in projections]))
    for theirs, ours in (
        (layer.self_attn.out_proj, block.attention.output),
        (layer.linear1, block.feed_forward.inner),
        (layer.linear2, block.feed_forward.outer),
        (layer.norm1, block.around_attention.norm),
        (layer.norm2, block.around_feed_forward.norm),
    ):
        theirs.load_state_dict(ours.state_dict())
    return layer


def test_gradient_norms_are_torchs_on_the_same_weights() -> None:
    config = BLOCKS["residual and norm, norm last (2017)"]
    found = gradient_norms(config, num_layers=3)
    layers = [torch_layer(block) for block in stack(config, num_layers=3)]
    stack(config, num_layers=3)  # starts from the same seed, and leaves the same random numbers to come
    x = torch.randn(8, 16, 64)
    for layer in layers:
        x = layer(x)
    (x * torch.randn_like(x)).mean().backward()
    squares = [sum(float((p.grad**2).sum()) for p in layer.parameters() if p.grad is not None) for layer in layers]
    assert found == pytest.approx([square**0.5 for square in squares], rel=1e-4)
