"""The page holds what was recorded, lets nothing run but its own script, and is put together of whole modules."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.browser import samples
from weft.observe import Record, Seen
from weft.views.html import joined, notebook, packed, page, write
from weft.views.matrix import INK

FOLDER = Path(weft.__file__).parent / "views" / "page"
MODULES = sorted(FOLDER.glob("*.js"))
FORMS = {"f32": "<f4", "i16": "<i2", "u16": "<u2", "u8": "u1"}


class Parts(HTMLParser):
    """The scripts and styles of a page as a browser would find them, and its policy."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[str, str]] = []
        self.styles: list[str] = []
        self.tags: list[str] = []
        self.policy = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append((given["type"] or "", ""))
        if tag == "style":
            self.styles.append("")
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""

    def handle_endtag(self, tag: str) -> None:
        self.tags.append(f"/{tag}")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"]:
            kind, so_far = self.scripts[-1]
            self.scripts[-1] = (kind, so_far + data)
        if self.tags[-1:] == ["style"]:
            self.styles[-1] += data


def content(text: str) -> dict[str, Any]:
    """The record inside a page."""
    ((_, inside),) = [script for script in Parts(text).scripts if script[0] == "application/json"]
    found: dict[str, Any] = json.loads(inside)
    return found


def numbers(array: dict[str, Any]) -> torch.Tensor:
    """What a packed array stands for."""
    data = base64.b64decode(array["data"])
    if array["form"] == "bits":
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return torch.tensor(bits[: int(np.prod(array["shape"]))].astype(bool)).view(array["shape"])
    whole = np.frombuffer(data, FORMS[array["form"]]).astype(np.float64) * array.get("scale", 1.0)
    return torch.tensor(whole).view(array["shape"])


def test_arrays_come_back_within_half_a_step() -> None:
    values = torch.rand(3, 4, 5)
    for form, most in (("u8", 255), ("u16", 65535), ("i16", 32767)):
        array = packed(values, form)
        assert array["shape"] == [3, 4, 5]
        assert (numbers(array) - values).abs().max() <= 0.5000001 * float(values.max()) / most
    assert torch.equal(numbers(packed(values, "f32")).float(), values)
    assert (numbers(packed(-values, "i16")) + values).abs().max() < 2e-5
    assert torch.equal(numbers(packed(values > 0.5, "bits")), values > 0.5)
    assert not numbers(packed(torch.zeros(2, 2), "u16")).any()
    assert packed(torch.zeros(2, 0), "u16")["data"] == ""


def test_the_record_stands_in_the_page() -> None:
    record = samples.translation()
    inside = content(page(record))
    assert [place["name"] for place in inside["places"]] == ["encoder self", "decoder self", "cross"]
    lists = inside["sequences"]
    for place in inside["places"]:
        entries = [entry for entry in record.entries if entry.role == place["name"]]
        assert [layer["module"] for layer in place["layers"]] == [entry.name for entry in entries]
        for layer, entry in zip(place["layers"], entries, strict=True):
            assert layer["weights"]["form"] == "u16"
            assert (numbers(layer["weights"]) - entry.weights[0]).abs().max() < 1e-5
            for name in ("queries", "keys", "values"):
                assert (numbers(layer["vectors"][name]) - entry[name][0]).abs().max() < 3e-4
            assert layer["scale"] == 0.25
            assert entry.queries is not None
            assert lists[layer["queries"]]["labels"] == [label.replace(" ", "·") for label in entry.queries]
            assert ("allowed" in layer) == (entry.role == "decoder self")
    assert torch.equal(numbers(inside["places"][1]["layers"][0]["allowed"])[0], torch.ones(10, 10).tril().bool())


def test_exact_weights_are_bit_equal() -> None:
    record = samples.translation()
    for place in content(page(record, exact=True))["places"]:
        entries = [entry for entry in record.entries if entry.role == place["name"]]
        for layer, entry in zip(place["layers"], entries, strict=True):
            assert torch.equal(numbers(layer["weights"]).float(), entry.weights[0])


def test_what_a_decoder_reads_is_known_as_what_it_wrote() -> None:
    source, target, read = content(page(samples.translation()))["sequences"]
    assert (source["name"], target["name"], read["name"]) == ("source", "target", "target as read")
    assert (read["like"], read["by"]) == (1, 1)
    assert read["words"] == [-1, *target["words"][:-1]]
    assert "like" not in source
    text, heard = content(page(samples.language()))["sequences"]
    assert (heard["name"], heard["like"], heard["by"]) == ("text", 0, 0)
    assert heard["labels"] == text["labels"][:-1]


def test_a_row_of_a_batch_is_chosen() -> None:
    weights = torch.rand(3, 2, 4, 5).softmax(-1)
    allowed = torch.rand(3, 1, 4, 5) > 0.3
    bias = torch.randn(3, 2, 1, 5).index_fill(-1, torch.tensor(2), -torch.inf)
    record = Record(entries=[Seen("a", "weights", 0, {"weights": weights, "allowed": allowed, "bias": bias})])
    layer = content(page(record, row=2))["places"][0]["layers"][0]
    assert (numbers(layer["weights"]) - weights[2]).abs().max() < 1e-5
    open_ = allowed[2].clone()
    open_[..., 2] = False  # a bias of −∞ closes a key
    assert torch.equal(numbers(layer["allowed"]), open_.expand(2, 4, 5))
    finite = bias[2].expand(2, 4, 5).nan_to_num(0, 0, 0)
    assert (numbers(layer["bias"]) - finite).abs().max() < 1e-4
    assert content(page(record))["places"][0]["name"] == "attention"
    for wrong in (3, -1):
        with pytest.raises(ValueError, match="'a' has 3 rows, so no row"):
            page(record, row=wrong)


@pytest.mark.parametrize("weight", [1.5, -0.5, float("nan")])
def test_what_is_no_attention_is_refused(weight: float) -> None:
    weights = torch.full((1, 1, 1, 1), weight)
    with pytest.raises(ValueError, match="between 0 and 1, and those of 'a' do not"):
        page(Record(entries=[Seen("a", "weights", 0, {"weights": weights})]))


def test_only_its_own_script_and_style_may_run() -> None:
    text = page(samples.translation(samples.HOSTILE))
    parts = Parts(text)
    assert [kind for kind, _ in parts.scripts] == ["application/json", "module"]
    hashes = [
        base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        for part in (parts.scripts[1][1], parts.styles[0])
    ]
    assert parts.policy == (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; base-uri 'none'"
    )
    assert "unsafe" not in parts.policy
    assert "img" not in parts.tags
    assert content(text)["sequences"][0]["labels"][0] == "<script>"
    assert content(text)["sequences"][1]["labels"][5] == "{{script}}"  # nothing is filled into what was filled in
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)


def test_any_text_is_carried() -> None:
    strange = ["\ud800", "\u2028", "\x00", "</SCRIPT>", "<!--", "]]>", "\\u003c", "a" * 500]
    about = {
        "source": strange,
        "notes": ["</script>", 3],
        "title": '"><script>',
        "search": {"finished": [{"text": "x", "score": -float("inf")}]},
    }
    text = page(Record(about=about))
    text.encode()  # can be written
    inside = content(text)
    assert inside["sequences"][0]["labels"][3:] == strange[3:]
    assert inside["about"]["notes"] == ["</script>", 3]
    assert inside["about"]["search"]["finished"][0]["score"] is None
    assert len(Parts(text).scripts) == 2


def test_a_record_of_everything_and_of_nothing() -> None:
    inside = content(page(samples.recurrent()))
    assert list(inside["gates"][0]["grids"]) == ["forward.input", "forward.forget", "forward.output"]
    assert inside["gates"][0]["sequence"] == 0
    assert inside["gates"][1]["grids"]["channels"]["shape"] == [1, 40]
    assert [(each["scheme"], each["form"]) for each in inside["positions"]] == [
        ("sinusoidal", "table"),
        ("rotary", "angles"),
    ]
    assert "vectors" not in inside["places"][0]["layers"][0]
    empty = content(page(Record()))
    assert empty["places"] == empty["gates"] == empty["sequences"] == []
    assert empty["walk"] is None


def test_the_walk_is_told_for_the_last_token() -> None:
    record = samples.language()
    (entry,) = [entry for entry in record.entries if entry.kind == "walk"]
    walk = content(page(record))["walk"]
    assert walk["labels"] == ["·Once", "·upon", "·a", "·time"]
    assert walk["chosen"] == walk["next"][1]["token"] == "·in"
    assert (numbers(walk["heads"]) - entry["heads"][:, :, -1]).abs().max() < 1e-4
    assert (numbers(walk["rest"]) - 0.1).abs().max() < 1e-4  # what no head added
    assert torch.equal(numbers(walk["norms"]).float(), entry["stream"].norm(dim=-1))


def test_it_stays_light(tmp_path: Path) -> None:
    record = samples.translation(samples.long_pair(20), layers=4, heads=4, dim=32)
    write(record, tmp_path / "page.html")
    size = (tmp_path / "page.html").stat().st_size
    assert size < 600_000
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page(record)
    large = content(page(samples.many(64, 6, 48)))
    assert large["places"][0]["layers"][0]["weights"]["form"] == "u8"  # 16 bits would be more than 2 MB


def test_a_notebook_gets_a_sandbox() -> None:
    record = samples.translation(samples.HOSTILE)
    frame = notebook(record, height=500)
    found = re.fullmatch(r'<iframe ([^>]*) srcdoc="([^"<>]*)"></iframe>', frame)
    assert found is not None
    assert 'sandbox="allow-scripts"' in found[1]
    assert 'height="500"' in found[1]
    assert html.unescape(found[2]) == page(record)


def test_modules_share_no_name() -> None:
    owners: dict[str, str] = {}
    for module in MODULES:
        text = re.sub(r"/\*.*?\*/", "", module.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = re.sub(r"^import \{[^}]*\} from .*", "", text, flags=re.MULTILINE)
        for line in re.findall(r"^[^\s/})\]].*", text, re.MULTILINE):
            named = re.match(r"(?:export )?(?:function|class|const) (\w+)", line)
            # Names are found by the lines that they begin: nothing else may begin a line, but what starts the page.
            assert named or (module.name == "main.js" and line.startswith("if (")), (module.name, line)
            if named:
                assert owners.setdefault(named[1], module.name) == module.name, f"{named[1]} stands in two modules"
    assert len(owners) > 100


def test_modules_are_joined_in_order() -> None:
    whole = joined()
    assert not re.search(r"^(import|export) ", whole, re.MULTILINE)

    def place(text: str) -> int:
        first = re.search(r"^(?:export )?((?:function|class|const) \w+.*)", text, re.MULTILINE)
        assert first is not None
        return whole.index(first[1])

    for module in MODULES:
        text = module.read_text(encoding="utf-8")
        assert text.count("\n") <= 300, module.name
        for needed in re.findall(r'from "\./(\w+\.js)"', text):
            assert place((FOLDER / needed).read_text(encoding="utf-8")) < place(text), (module.name, needed)


def test_what_is_imported_is_exported_and_used() -> None:
    for module in MODULES:
        text = module.read_text(encoding="utf-8")
        for names, origin in re.findall(r'^import \{([^}]*)\} from "\./(\w+\.js)";', text, re.MULTILINE):
            there = (FOLDER / origin).read_text(encoding="utf-8")
            for name in re.findall(r"\w+", names):
                assert re.search(rf"^export (function|class|const) {name}\b", there, re.MULTILINE), (module.name, name)
                assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{module.name} does not use {name}"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_modules_load_as_they_are(tmp_path: Path) -> None:
    # A copy in a folder that says what they are: node asks for that, browsers do not.
    for module in MODULES:
        shutil.copy(module, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    lines = [f'await import("./{module.name}");' for module in MODULES]
    (tmp_path / "all.js").write_text("\n".join(lines))
    (tmp_path / "joined.js").write_text(joined())
    for script in ("all.js", "joined.js"):
        run = subprocess.run(["node", script], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert run.stderr == ""


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_ink_is_one_hue_in_even_steps(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "ink.js", tmp_path / "ink.mjs")
    (tmp_path / "say.mjs").write_text(
        'import { INKS, ramp, luminance } from "./ink.mjs";\n'
        "const all = Object.entries(INKS).map(([name, { weight }]) => [name, ramp(weight).map(luminance)]);\n"
        "const said = Object.fromEntries(all);\n"
        "console.log(JSON.stringify({ said, light: INKS.light.weight }));\n"
    )
    run = subprocess.run(["node", "say.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True)
    told = json.loads(run.stdout)
    assert tuple(told["light"]) == INK  # the same as in the figures
    for name, luminances in told["said"].items():
        y = torch.tensor(luminances, dtype=torch.float64)
        lightness = 116 * y.clamp(min=0.008857).pow(1 / 3) - 16  # CIE L*
        steps = lightness.diff() * (-1 if name == "light" else 1)
        assert float(steps.min()) >= 0, name  # more weight, never less ink
        halves = (lightness[127] - lightness[0], lightness[255] - lightness[127])
        assert float(halves[0] / halves[1]) == pytest.approx(1, abs=0.25), name
