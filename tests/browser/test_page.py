"""The page in a real browser, without a network: what is shown is what was recorded, and everything can be reached."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.browser import samples
from weft.observe import Record
from weft.views import summaries
from weft.views.html import notebook, write

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install 'weft[test]')")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: nothing to open the page with")

Opened = Callable[..., Any]
RECORDS: dict[str, Callable[[], Record]] = {
    "short": samples.translation,
    "long": lambda: samples.translation(samples.long_pair()),
    "japanese": lambda: samples.translation(samples.JAPANESE),
    "hostile": lambda: samples.translation(samples.HOSTILE),
    "language": samples.language,
    "recurrent": samples.recurrent,
    "unnamed": samples.unnamed,
    "nothing": Record,
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Opened]:
    """Opens the page of a record; afterwards nothing must have gone wrong, and nothing have been asked for."""
    contexts, wrong = [], []

    def open_(
        record: Record,
        fragment: str = "",
        width: int = 1280,
        scheme: str = "light",
        height: int = 860,
        path: str = "page.html",
    ) -> Any:
        file = tmp_path / path
        if not file.exists():
            write(record, file)
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.on("request", lambda asked: asked.url.startswith(file.as_uri()) or wrong.append(f"asked for {asked.url}"))
        page.goto(file.as_uri() + (f"#{fragment}" if fragment else ""))
        page.wait_for_selector("html[data-ready]", state="attached")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert wrong == []


def weights_of(record: Record, role: str, layer: int | None, heads: list[int] | None = None) -> torch.Tensor:
    """[N, M] as the page should show it, straight from the record."""
    entries = [entry for entry in record.entries if entry.kind == "weights" and entry.role == role]
    kept = entries if layer is None else [entries[layer]]
    return torch.stack([entry.weights[0] if heads is None else entry.weights[0, heads] for entry in kept]).mean((0, 1))


def state(page: Any) -> dict[str, str]:
    """What the address' fragment says."""
    found: dict[str, str] = page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
    return found


def point_at(page: Any, i: int, j: int) -> str:
    """Point at a cell of the matrix; what is told of it."""
    sheet = page.locator(".sheet:visible")
    left, top, cell = json.loads(sheet.get_attribute("data-cells"))
    box = sheet.bounding_box()
    scrolled = sheet.evaluate("e => [e.scrollLeft, e.scrollTop]")
    page.mouse.move(box["x"] + left + (j + 0.5) * cell - scrolled[0], box["y"] + top + (i + 0.5) * cell - scrolled[1])
    told: str = page.locator(".readout:visible").inner_text()
    return told


def bars(page: Any, name: str) -> list[tuple[str, str]]:
    """The rows of a list of bars that are filled: label and number."""
    rows = page.locator(f'ol[aria-label="{name}"] li:not(.empty)')
    texts = rows.evaluate_all("all => all.map(e => [e.children[0].textContent, e.children[2].textContent])")
    return [(label, number) for label, number in texts]


def shown_label(label: str) -> str:
    return label.replace(" ", "·")


@pytest.mark.parametrize("name", RECORDS)
def test_every_view_of_every_record_opens(opened: Opened, name: str) -> None:
    page = opened(RECORDS[name]())
    for scheme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{scheme}'")
        for button in page.locator('[aria-label="view"] button').all():
            button.click()
            view = button.inner_text()
            assert state(page)["view"] == view
            assert page.locator(f".view-{view}").is_visible()
            assert page.locator(f".view-{view} .caption").first.inner_text()
    expected = {
        "recurrent": "lines matrix grid alignment positions gates",
        "language": "lines matrix grid steps shuffle positions walk",
        "unnamed": "lines matrix grid",
        "nothing": "",
    }.get(name, "lines matrix grid steps alignment shuffle")
    assert page.locator('[aria-label="view"] button').all_inner_texts() == expected.split()


@pytest.mark.parametrize(("layer", "head"), [(0, 0), (1, 3), (2, 1), (2, None), (None, None), (None, 2)])
@pytest.mark.parametrize("role", ["encoder self", "decoder self", "cross"])
def test_the_matrix_tells_the_recorded_weights(opened: Opened, role: str, layer: int | None, head: int | None) -> None:
    record = samples.translation()
    chosen = f"where={role}&layer={'all' if layer is None else layer + 1}&head={'all' if head is None else head + 1}"
    page = opened(record, f"{chosen}&view=matrix")
    weights = weights_of(record, role, layer, None if head is None else [head])
    n, m = weights.shape
    told_apart = set()
    for i, j in [(0, 0), (2, 1), (5, 4), (n - 1, m - 1), (n - 1, 0), (6, 2), (0, m - 1)]:
        told = point_at(page, i, j)
        if role == "decoder self" and j > i:
            assert told.endswith("may not look there")
        else:
            assert told.split()[-1] == f"{float(weights[i, j]):.2f}"
            told_apart.add(told.split()[-1])
    assert len(told_apart) > 1


def test_a_matrix_that_scrolls_tells_the_right_cell(opened: Opened) -> None:
    record = samples.translation(samples.long_pair(60))
    page = opened(record, "view=matrix&head=1&step=50")
    weights = weights_of(record, "cross", 2, [0])
    sheet = page.locator(".sheet")
    assert sheet.evaluate("e => e.scrollTop") > 0  # the chosen row came into sight
    sheet.evaluate("e => e.scrollTo(260, 300)")
    page.wait_for_timeout(50)
    for i, j in [(20, 20), (22, 25), (30, 30)]:
        assert point_at(page, i, j).split()[-1] == f"{float(weights[i, j]):.2f}"
    # What was drawn under the pointer is the ink of this weight.
    i, j = 24, int(weights[24].argmax())
    point_at(page, i, j)
    left, top, cell = json.loads(sheet.get_attribute("data-cells"))
    x, y = left + (j + 0.5) * cell - 260, top + (i + 0.5) * cell - 300
    canvas = page.locator(".sheet canvas")
    read = "(e, [x, y, wide]) => [...e.getContext('2d').getImageData(x, y, wide, 1).data]"
    line = canvas.evaluate(read, [x, y, 5 * cell + 1])
    pixel, empty = line[:4], line[-4:]
    assert pixel[3] == 255
    assert sum(pixel[:3]) < 765 - 300 * float(weights[i, j])
    assert float(weights[i, j + 5]) < 0.02
    assert sum(empty[:3]) > 745


def test_hovering_a_token_changes_the_inspector_and_moves_nothing(opened: Opened) -> None:
    record = samples.translation()
    page = opened(record, "view=lines&layer=3&head=4")
    weights = weights_of(record, "cross", 2, [3])
    source, target, _ = samples.SHORT
    boxes = """() => [...document.querySelectorAll("h2, h3, main, footer, .sentence-row, .bars, .line-row")]
        .map((e) => JSON.stringify(e.getBoundingClientRect()))"""
    before = page.evaluate(boxes)
    seen = set()
    for i in (1, 4, 7):
        page.locator(".sentence-row").nth(1).locator("button").nth(i).hover()
        assert page.locator("#inspector h2").inner_text() == shown_label(target[i])
        found = bars(page, "strongest weights")
        strongest = weights[i].topk(len(found))
        assert [number for _, number in found] == [f"{weight:.2f}" for weight in strongest.values.tolist()]
        assert found[0][0] == shown_label(source[int(strongest.indices[0])])
        seen.add(tuple(found))
        assert page.evaluate(boxes) == before
        # Marked everywhere: in the bar and in the column.
        assert page.locator(".piece.marked").inner_text() == page.locator(".line-token.marked").inner_text()
    assert len(seen) == 3
    # A source token tells who looked at it.
    page.locator(".sentence-row").nth(0).locator("button").nth(4).hover()
    assert page.locator("#inspector h3").first.inner_text() == "is looked at by"
    assert bars(page, "strongest weights")[0] == (
        shown_label(target[int(weights[:, 4].argmax())]),
        f"{float(weights[:, 4].max()):.2f}",
    )
    page.mouse.move(5, 5)
    assert page.locator("#inspector h2").inner_text() == shown_label(target[0])  # the chosen one again


def test_a_token_is_known_where_it_is_read(opened: Opened) -> None:
    """The decoder reads what it wrote one step before: the token's row there is the next."""
    record = samples.translation()
    page = opened(record, "where=decoder self&view=matrix&layer=2&head=1")
    weights = weights_of(record, "decoder self", 1, [0])
    for i in (0, 3, 8):
        page.locator(".sentence-row").nth(1).locator("button").nth(i).hover()
        assert page.locator("#inspector h2").inner_text() == shown_label(samples.SHORT[1][i])
        assert bars(page, "strongest weights")[0][1] == f"{float(weights[i + 1].max()):.2f}"
        assert bars(page, "who looks at it")[0][1] == f"{float(weights[:, i + 1].max()):.2f}"


def test_lines_are_drawn_for_the_weights_of_the_chosen_heads(opened: Opened) -> None:
    record = samples.translation()
    page = opened(record, "view=lines&layer=2")

    def drawn() -> int:
        found: int = page.locator(".links .all path").count()
        return found

    weights = next(entry.weights[0] for entry in record.entries if entry.name == "decoder.1.cross")
    assert drawn() == int((weights >= 0.05).sum())
    assert len(set(page.locator(".links .all path").evaluate_all("all => all.map(e => e.getAttribute('stroke'))"))) == 4
    page.get_by_label("head 2", exact=True).click()
    assert state(page)["head"] == "2"
    assert drawn() == int((weights[1] >= 0.05).sum())
    page.get_by_label("head 4", exact=True).click()
    assert state(page)["head"] == "2,4"
    assert drawn() == int((weights[[1, 3]] >= 0.05).sum())
    page.get_by_label("next layer").click()
    assert state(page)["layer"] == "3"
    after = next(entry.weights[0] for entry in record.entries if entry.name == "decoder.2.cross")
    assert drawn() == int((after[[1, 3]] >= 0.05).sum())
    page.locator(".keys .line-token").nth(5).hover()
    told = page.locator(".queries .weight").evaluate_all("all => all.map(e => e.textContent)")
    mean = after[[1, 3]].mean(0)[:, 5]
    assert told == [f"{weight:.2f}" if weight >= 0.02 else "" for weight in mean.tolist()]


def test_the_keyboard(opened: Opened) -> None:
    page = opened(samples.translation())
    assert state(page) == {}  # nothing was chosen yet
    press = page.keyboard.press
    press("ArrowRight")
    press("ArrowRight")
    assert state(page)["step"] == "3"
    assert page.locator("#inspector h2").inner_text() == "·ich"
    press("ArrowLeft")
    assert state(page)["step"] == "2"
    press("ArrowUp")
    assert state(page)["layer"] == "2"
    press("ArrowUp")
    press("ArrowUp")
    press("ArrowUp")
    assert state(page)["layer"] == "all"
    press("ArrowDown")
    assert state(page)["layer"] == "1"
    press("h")
    press("h")
    assert state(page)["head"] == "2"
    press("H")
    assert state(page)["head"] == "1"
    press("H")
    assert state(page)["head"] == "all"
    for number, view in enumerate(("lines", "matrix", "grid", "steps", "alignment", "shuffle"), 1):
        press(str(number))
        assert state(page)["view"] == view
        assert page.locator(f".view-{view}").is_visible()
    press("8")  # this record has no gates
    assert state(page)["view"] == "shuffle"
    press("w")
    assert state(page)["words"] == "1"
    press("?")
    assert page.locator("dialog").is_visible()
    press("ArrowRight")
    assert state(page)["step"] == "2"  # not behind the list
    press("Escape")
    assert not page.locator("dialog").is_visible()
    press("/")
    page.keyboard.type("buch")
    assert state(page)["step"] == "6"
    assert page.locator("#inspector h2").inner_text() == "·Buch"
    assert page.get_by_label("find a token").input_value() == "buch"
    assert state(page)["head"] == "all"  # a letter in the field is no command
    page.keyboard.press("Control+a")
    page.keyboard.type("read")
    assert state(page)["token"] == "source.2"
    page.keyboard.press("Escape")
    press("ArrowRight")  # along the list in which the chosen token stands
    assert state(page)["token"] == "source.3"


def test_tab_reaches_every_control_and_focus_is_seen(opened: Opened) -> None:
    page = opened(samples.translation(), "view=grid")
    reached, last = [], ""
    for _ in range(120):
        page.keyboard.press("Tab")
        active = page.evaluate(
            "() => { const e = document.activeElement, s = getComputedStyle(e);"
            " const outlined = s.outlineStyle !== 'none' && s.outlineWidth !== '0px';"
            " return [e.tagName, e.getAttribute('aria-label') ?? e.textContent, outlined] }"
        )
        if active[0] == "BODY":
            break
        assert active[2], f"the focus on {active[1]!r} is not seen"
        reached.append(active[1])
        last = active[1]
    for wanted in (
        "find a token",
        "keyboard help",
        "encoder self",
        "cross",
        "next layer",
        "head before",
        "head 3",
        "steps",
        "words",
    ):
        assert wanted in reached
    assert "layer 2, head 3: enlarge" in reached
    assert reached.count("·Gestern") == 1  # one stop for all tokens; the arrows go on from there
    assert last
    unnamed = page.locator("button, input, canvas[role], dialog, [role=group]").evaluate_all(
        "all => all.filter(e => !(e.getAttribute('aria-label') ?? e.textContent).trim()).map(e => e.outerHTML)"
    )
    assert unnamed == []
    page.get_by_label("layer 2, head 3: enlarge").focus()
    page.keyboard.press("Enter")
    assert (state(page)["view"], state(page)["layer"], state(page)["head"]) == ("matrix", "2", "3")


def test_steps_and_beams(opened: Opened) -> None:
    record = samples.translation()
    page = opened(record, "view=steps")
    search, target = record.about["search"], record.about["target"]
    slider = page.locator("input[type=range]")
    for step in (1, 5, 9):
        slider.fill(str(step + 1))
        assert state(page)["step"] == str(step + 1)
        assert page.locator(".step-told").inner_text().split()[-1] == shown_label(target[step])
        listed = bars(page, "candidates with their probabilities")
        expected = search["candidates"][step]
        assert [label for label, _ in listed] == [shown_label(each["token"]) for each in expected]
        assert listed[0][1] == f"{expected[0]['p']:.2f}"
        weights = weights_of(record, "cross", 2)[step]
        looked = bars(page, "what this step looked at")
        assert looked[0] == (shown_label(samples.SHORT[0][int(weights.argmax())]), f"{float(weights.max()):.2f}")
    assert page.locator(".beam-node").count() == sum(map(len, search["steps"]))
    assert page.locator(".beam-node.taken").count() == len(target)
    assert page.locator(".beam-edge.taken").count() == len(target) - 1
    assert page.locator(".finished li").count() == 2
    page.locator(".beam-node").nth(3).click()
    assert state(page)["step"] == "2"
    # In self-attention a step is the row of what was read before it: its first row here reads <s>.
    page.goto(page.url.split("#")[0] + "#where=decoder self&layer=1&view=steps&step=4")
    row = weights_of(record, "decoder self", 0)[3]
    assert bars(page, "what this step looked at")[0][1] == f"{float(row.max()):.2f}"


def test_steps_of_a_language_model_begin_after_the_prompt(opened: Opened) -> None:
    record = samples.language()
    page = opened(record)
    assert page.locator("#inspector h2").inner_text() == "·there"
    page.keyboard.press("4")
    assert page.locator(".step-told").inner_text().split() == ["step", "1", "of", "5", "·there"]
    assert bars(page, "candidates with their probabilities")[0] == ("·there", "0.50")
    weights = weights_of(record, "self", 1)[3]  # it had read four tokens
    assert bars(page, "what this step looked at")[0][1] == f"{float(weights.max()):.2f}"
    page.keyboard.press("ArrowRight")
    assert page.locator(".step-told").inner_text().split()[-1] == "·was"


@pytest.mark.parametrize("view", ["lines", "matrix", "grid", "steps", "alignment", "shuffle"])
def test_text_stays_text(opened: Opened, view: str) -> None:
    record = samples.translation(samples.HOSTILE)
    page = opened(record, f"view={view}&head=1")
    for row in (0, 1):
        for button in page.locator(".sentence-row").nth(row).locator("button").all():
            button.hover()
    page.wait_for_timeout(50)
    assert page.evaluate("window.ran") is None
    assert page.locator("img, b, script:not([type])").count() == 0
    assert page.locator("script").count() == 2
    assert page.locator(".sentence-row").nth(0).locator("button").nth(0).inner_text() == "<script>"
    assert "<img src=x onerror=window.ran=1>".replace(" ", "·") in page.locator("#sentence").inner_text()
    right_to_left = page.locator(".sentence-row").nth(1).locator("bdi").nth(2)
    assert right_to_left.evaluate("e => getComputedStyle(e).direction") == "rtl"
    assert right_to_left.evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"


def test_nothing_else_may_run(browser: Any, tmp_path: Path) -> None:
    """The policy holds even if a text did get into the page as HTML."""
    write(samples.translation(), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    evil = '<script>window.ran=1</script><p style="color:red" onclick="window.ran=1" id="evil">x</p><img src="x.png">'
    (tmp_path / "page.html").write_text(text.replace("<main>", evil + "<main>"), encoding="utf-8")
    with browser.new_context(offline=True) as context:
        page = context.new_page()
        blocked: list[str] = []
        page.on("console", lambda message: blocked.append(message.text))
        page.goto((tmp_path / "page.html").as_uri())
        page.locator("#evil").click()
        assert page.evaluate("window.ran") is None
        assert page.locator("#evil").evaluate("e => getComputedStyle(e).color") != "rgb(255, 0, 0)"
        assert sum("Content Security Policy" in message for message in blocked) >= 4


def test_the_fragment_brings_a_view_back(opened: Opened) -> None:
    page = opened(samples.translation())
    page.get_by_role("button", name="decoder self").click()
    for key in ("ArrowUp", "h", "h", "2", "w", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    page.get_by_label("colours: as the system").click()
    chosen = state(page)
    assert chosen == {
        "where": "decoder self",
        "layer": "2",
        "head": "2",
        "view": "matrix",
        "step": "3",
        "words": "1",
        "theme": "light",
    }
    caption, told = page.locator(".caption").inner_text(), point_at(page, 3, 2)
    page.mouse.move(5, 5)
    page.reload()
    assert state(page) == chosen
    assert page.locator(".caption").inner_text() == caption
    assert point_at(page, 3, 2) == told
    # Another fragment typed in is another choice; nonsense is mended.
    page.evaluate("location.hash = '#where=cross&layer=99&head=7,2&view=nothing&step=-3&token=source.4'")
    playwright.expect(page.locator("#inspector h2")).to_have_text("·good")
    assert page.locator(".which").inner_text() == "decoder.2.cross, head 2 of 4"


def test_words_are_summed_over_keys_and_averaged_over_queries(opened: Opened) -> None:
    record = samples.translation()
    page = opened(record, "view=matrix&layer=2&head=1&words=1")
    weights = weights_of(record, "cross", 1, [0])
    words = record.about["words"]
    folded = summaries.by_words(weights, words["target"], words["source"])
    assert folded.shape < weights.shape
    for i, j in [(0, 5), (6, 1), (5, 4), (7, 6)]:
        assert point_at(page, i, j).split()[-1] == f"{float(folded[i, j]):.2f}"
    assert point_at(page, 0, 5).split()[2] == "·yesterday."
    assert "summed over the pieces of a key" in page.locator(".caption").inner_text()


def test_the_alignment_counts_runs_and_crossings(opened: Opened) -> None:
    record = samples.translation()
    page = opened(record, "where=encoder self&layer=all")
    page.keyboard.press("5")
    assert state(page)["where"] == "cross"
    runs, crossings = summaries.order(summaries.alignment(weights_of(record, "cross", None)).tolist())
    assert crossings > 3
    assert f"{runs} monotone runs" in page.locator(".caption").inner_text()
    assert f"{crossings} crossings" in page.locator(".caption").inner_text()
    page.get_by_role("button", name="decoder self").click()
    assert state(page)["view"] == "matrix"  # there is no alignment with itself


@pytest.mark.parametrize("role", ["encoder self", "decoder self", "cross"])
def test_captions_measure_as_the_summaries_do(opened: Opened, role: str) -> None:
    record = samples.translation()
    page = opened(record, f"where={role}&layer=2&view=matrix")
    entry = [entry for entry in record.entries if entry.role == role][1]
    for head in (None, 0, 3):
        page.evaluate(f"location.hash = '#where={role}&layer=2&head={'all' if head is None else head + 1}&view=matrix'")
        named = "mean of 4 heads" if head is None else f"head {head + 1} of 4"
        playwright.expect(page.locator(".which")).to_have_text(f"{entry.name}, {named}")
        told = page.locator(".caption").inner_text()
        kept = slice(None) if head is None else head
        assert f"Entropy of a row {float(summaries.entropy(entry)[0, kept].mean()):.2f} bits" in told
        if role == "cross":
            assert "places away" not in told
        else:
            assert f"looks {float(summaries.distance(entry)[0, kept].mean()):.2f} places away" in told


def test_calls_of_different_lengths_have_no_mean(opened: Opened) -> None:
    record = samples.unnamed()
    page = opened(record, "view=matrix&head=2")
    for call in (3, 2, 0):
        assert page.locator(".which").inner_text() == f"decoder, call {call + 1}, head 2 of 2"
        assert point_at(page, 0, call).split()[-1] == f"{float(record.entries[call].weights[0, 1, 0, call]):.2f}"
        for _ in range(call - {3: 2, 2: 0, 0: 0}[call]):
            page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert state(page)["layer"] == "1"  # before the first there is no mean


def number_in(text: str) -> float:
    """3·10⁻⁷ as a number."""
    digits, _, power = text.replace("−", "-").partition("·10")
    return float(digits) * 10.0 ** float(power.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")) or 0)


@pytest.mark.parametrize("role", ["encoder self", "decoder self", "cross"])
def test_the_arithmetic_is_that_of_the_record(opened: Opened, role: str) -> None:
    record = samples.translation()
    page = opened(record, f"where={role}&layer=2&head=3&view=matrix")
    entry = [entry for entry in record.entries if entry.role == role][1]
    q, k, v = (entry[name][0, 2].double() for name in ("queries", "keys", "values"))
    for i in (1, 6):
        point_at(page, i, 0)
        weights = entry.weights[0, 2, i]
        places = weights.topk(6).indices.tolist()
        rows = page.locator(".headwork tbody tr").evaluate_all(
            "all => all.map(r => [...r.cells].map(c => c.textContent))"
        )
        assert entry.keys is not None
        for row, j in zip(rows, places, strict=True):
            if float(weights[j]) < 0.005:  # the order of what is nearly 0 is not told
                continue
            dot = float(q[i] @ k[j])
            assert row[0] == shown_label(entry.keys[j])
            assert [number_in(cell) for cell in row[1:]] == pytest.approx(
                [dot, dot / 4, float(weights[j]), float(weights[j])], abs=0.007
            )
        assert number_in(page.locator(".agreement strong").inner_text()) < 2e-4
        output = (weights.double() @ v)[:3].tolist()
        told = page.locator(".headwork p", has_text="Σ weight").inner_text()
        assert [number_in(x) for x in re.findall(r"−?\d+\.\d\d", told)] == pytest.approx(output, abs=0.0051)


def test_what_was_not_recorded_is_said(opened: Opened) -> None:
    page = opened(samples.recurrent(), "view=matrix")
    assert "were not recorded" in page.locator(".headwork").inner_text()
    page = opened(samples.translation(), "view=matrix", path="other.html")
    assert "choose a head" in page.locator(".headwork").inner_text()


def test_a_wrong_weight_is_seen_in_the_arithmetic(opened: Opened) -> None:
    record = samples.translation()
    for entry in record.entries:
        entry.values["weights"] = entry.weights.roll(1, -1)
    page = opened(record, "layer=2&head=1")
    assert number_in(page.locator(".agreement strong").inner_text()) > 0.1


def test_shuffling_changes_nothing_but_the_order_unless_masked(opened: Opened) -> None:
    page = opened(samples.translation(), "where=encoder self&view=shuffle&head=2")
    assert number_in(page.locator(".free").inner_text()) < 1e-6
    assert page.locator(".bound").count() == 0
    assert page.locator(".differs").count() == 0
    order = page.locator(".after").inner_text()
    assert sorted(order.split("\n")) == sorted(page.locator(".before").inner_text().split("\n"))
    assert order != page.locator(".before").inner_text()
    page.get_by_role("button", name="shuffle").last.click()
    assert state(page)["seed"] == "2"
    assert page.locator(".after").inner_text() != order
    page.get_by_role("button", name="decoder self").click()
    assert number_in(page.locator(".free").inner_text()) < 1e-6
    assert number_in(page.locator(".bound").inner_text()) > 0.05
    page.get_by_role("button", name="with the mask").click()
    assert page.locator(".after .differs").count() > 3
    page.get_by_role("button", name="cross").click()
    assert number_in(page.locator(".free").inner_text()) < 1e-6  # the order of the keys does not matter
    assert page.locator(".after").inner_text() == page.locator(".before").inner_text()


def test_gates_positions_and_the_walk_tell_their_numbers(opened: Opened) -> None:
    record = samples.recurrent()
    page = opened(record, "view=gates")
    picture = page.locator(".picture", has_text="forward.forget")
    box = picture.locator("canvas").bounding_box()
    n, units = 9, 24
    page.mouse.move(box["x"] + box["width"] * 4.5 / n, box["y"] + box["height"] * 7.5 / units)
    gate = float(record.entries[0]["forward.forget"][0, 4, 7])
    assert (
        picture.locator(".readout").inner_text().replace("\u2068", "").replace("\u2069", "")
        == f"·book, unit 8: {gate:.2f}"
    )
    page.keyboard.press("7")
    assert page.locator(".view-positions h2").all_inner_texts() == ["sinusoidal", "rotary"]
    box = page.locator(".view-positions canvas").nth(1).bounding_box()
    page.mouse.move(box["x"] + box["width"] * 3.5 / 12, box["y"] + box["height"] * 0.5 / 8)
    cosine = float(record.entries[4]["angles"][3, 0].cos())
    assert page.locator(".view-positions .readout").nth(1).inner_text() == f"position 3, pair 1: {cosine:.2f}".replace(
        "-", "−"
    )
    record = samples.language()
    page = opened(record, "view=walk", path="walk.html")
    assert page.locator(".view-walk h2").all_inner_texts()[2:4] == ["Block 1 of 2", "Block 2 of 2"]
    (entry,) = [entry for entry in record.entries if entry.kind == "walk"]
    lengths = page.locator(".block").nth(1).locator(".bar-number").all_inner_texts()
    expected = [entry["stream"][1, -1], *entry["heads"][1, :, -1], torch.full((32,), 0.1), entry["between"][1, -1]]
    expected += [entry["feed_forward"][1, -1], entry["stream"][2, -1]]
    assert [float(text) for text in lengths] == pytest.approx([float(vector.norm()) for vector in expected], abs=0.0051)
    assert page.locator(".piece-of.chosen").inner_text() == "·in"


@pytest.mark.parametrize("name", ["short", "long", "japanese", "hostile", "language", "recurrent"])
def test_a_phone_needs_no_sideways_scrolling(opened: Opened, name: str) -> None:
    page = opened(RECORDS[name](), width=390, height=844)
    for view in page.locator('[aria-label="view"] button').all_inner_texts():
        page.evaluate(f"location.hash = '#view={view}'")
        page.locator(f".view-{view}").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
    view, inspector = (page.locator(part).bounding_box() for part in ("#view", "#inspector"))
    assert inspector["y"] >= view["y"] + view["height"]


CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    const text = [...e.childNodes].filter((n) => n.nodeType === 3).map((n) => n.textContent.trim()).join(" ").trim();
    if (!text || !e.checkVisibility({ visibilityProperty: true }) || ["SCRIPT", "STYLE"].includes(e.tagName)) continue;
    let behind = e, ground = [0, 0, 0, 0];
    while (behind && (ground[3] ?? 1) === 0) {
      ground = parse(getComputedStyle(behind).backgroundColor);
      behind = behind.parentElement;
    }
    const style = getComputedStyle(e);
    const ink = parse(e instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), text.slice(0, 40)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(opened: Opened, scheme: str) -> None:
    record = samples.translation()
    page = opened(record, scheme=scheme)
    seen = 0
    for view in ("lines", "matrix", "grid", "steps", "alignment", "shuffle"):
        page.keyboard.press(str(1 + ("lines", "matrix", "grid", "steps", "alignment", "shuffle").index(view)))
        for step in range(1, 11):  # many shades under the tokens
            page.evaluate(f"location.hash = '#view={view}&step={step}&head={step % 4 + 1}'")
            playwright.expect(page.locator(".piece.chosen")).to_have_text(shown_label(samples.SHORT[1][step - 1]))
            found = page.evaluate(CONTRAST)
            seen += len(found)
            assert min(found)[0] >= 4.5, min(found)
    assert seen > 2000
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_grid_draws_what_is_seen(opened: Opened) -> None:
    record = samples.translation()
    page = opened(record, "view=grid&where=decoder self", scheme="light")
    playwright.expect(page.locator(".thumb.drawn")).to_have_count(12)
    weights = next(entry.weights[0, 1] for entry in record.entries if entry.name == "decoder.2.attention")
    drawn = page.get_by_label("layer 3, head 2: enlarge").locator("canvas")
    data = drawn.evaluate("e => [...e.getContext('2d').getImageData(0, 0, e.width, e.height).data]")
    image = torch.tensor(data).view(*weights.shape, 4)
    assert torch.equal(image[..., 3] > 0, torch.ones(10, 10).tril().bool())  # closed cells show the hatching behind
    open_ = image[..., 3] > 0
    order = weights[open_].argsort()
    assert bool((image[..., 0][open_][order].diff() <= 0).all())  # more weight, more ink


def test_large_records_stay_smooth(opened: Opened, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """200 tokens and 144 heads; the times are told, not judged: this machine may be busy."""
    record = samples.many()
    write(record, tmp_path / "page.html")
    page = opened(record)
    timing = page.evaluate("performance.getEntriesByType('navigation')[0].toJSON()")
    times = {"open": timing["domComplete"] - timing["startTime"]}
    switch = """async (key) => {
      const start = performance.now();
      dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true, bubbles: true }));
      const after = performance.now();
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      return [after - start, performance.now() - start];
    }"""
    for key, name in (
        ("2", "to matrix"),
        ("3", "to grid"),
        ("1", "to lines"),
        ("h", "to one head"),
        ("ArrowUp", "layer up"),
        ("3", "grid again"),
    ):
        times[name] = page.evaluate(switch, key)[1]
    page.keyboard.press("2")
    hover = """async () => {
      const e = document.querySelector(".sheet"), box = e.getBoundingClientRect(), start = performance.now();
      for (let i = 0; i < 20; i++) {
        e.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + 200 + 19 * i, clientY: box.top + 200 }));
        await new Promise((done) => requestAnimationFrame(done));
      }
      return (performance.now() - start) / 20;
    }"""
    times["a hover"] = page.evaluate(hover)
    page.keyboard.press("3")
    page.wait_for_timeout(300)
    drawn = page.locator(".thumb.drawn").count()
    assert 0 < drawn < 144  # what is not in sight is not drawn
    size = (tmp_path / "page.html").stat().st_size
    with capsys.disabled():
        told = ", ".join(f"{name} {time:.0f} ms" for name, time in times.items())
        print(f"\n200 tokens × 144 heads, {size / 1e6:.1f} MB: {told}")


def test_a_notebook_shows_it_in_its_sandbox(opened: Opened, tmp_path: Path) -> None:
    record = samples.translation()
    (tmp_path / "page.html").write_text(f"<!doctype html><html data-ready><body>{notebook(record)}", encoding="utf-8")
    page = opened(record)
    inside = page.frame_locator("iframe")
    inside.get_by_role("button", name="matrix").click()
    inside.locator(".view-matrix").wait_for()
    assert inside.locator("#inspector h2").inner_text() == "·Gestern"
