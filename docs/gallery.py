"""Draws the gallery (docs/gallery.md) from trained models.

    python -m docs.gallery MODELS [name …]      all pictures, or the named ones

MODELS is a folder with the models that docs/gallery.md says how to train: ``enfr-rnn``, ``enja-rnn``,
``multi30k-en-de``, ``multi30k-en-de-rnn`` and ``shakespeare``. A picture whose model is not there is left as it is, and
that is said. The pages are photographed by a headless Chromium, through playwright.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.api import Look, load_language_model, load_translator
from weft.layers.convolution import GatedConvolution
from weft.layers.gates import SqueezeExcitation
from weft.views import figures
from weft.views.matrix import heads, of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parent / "pictures" / "gallery"
AGREEMENT = (
    "The agreement on the European Economic Area was signed in August 1992.",
    "L'accord sur la zone économique européenne a été signé en août 1992.",
)
CAT = ("The black cat is sleeping under the white table.", "Le chat noir dort sous la table blanche.")
PARK = "he went to the park with his brother yesterday ."
FOX = ("the little brown fox", "茶色 の 小 狐")
CAPTION = "a man in a blue shirt is standing on a ladder cleaning a window ."  # of Multi30k's test2016
LINE = "O Romeo, Romeo! "


def agreement(models: Path) -> Figure:
    """B2: the alignment of an English sentence and its French translation."""
    look = load_translator(models / "enfr-rnn").look(*AGREEMENT)
    return _aligned(look, "English across, French down; a GRU with additive attention says the given translation")


def cat(models: Path) -> Figure:
    """B2: adjectives go behind their nouns."""
    look = load_translator(models / "enfr-rnn").look(*CAT)
    return _aligned(look, "English across, French down; a GRU with additive attention says the given translation")


def fox(models: Path) -> Figure:
    """B2: the same for English and Japanese."""
    look = load_translator(models / "enja-rnn").look(*FOX)
    return _aligned(look, "English across, Japanese down; a GRU with additive attention says the given translation")


def park(models: Path) -> Figure:
    """B2: a sentence whose words come in another order in Japanese; the translation is the model's own."""
    look = load_translator(models / "enja-rnn").look(PARK)
    return _aligned(look, "English across, Japanese down; a GRU with additive attention translates: verbs come last")


def caption(models: Path) -> Figure:
    """B2 and B10: the cross-attention of a Transformer on a sentence that it has never seen."""
    look = load_translator(models / "multi30k-en-de").look(CAPTION)
    return _aligned(look, "A Transformer translates a caption: cross-attention, mean over heads and layers")


def caption_rnn(models: Path) -> Figure:
    """B2: the same sentence, and a recurrent model."""
    look = load_translator(models / "multi30k-en-de-rnn").look(CAPTION)
    return _aligned(look, "A GRU with additive attention translates the same caption")


def many_heads(models: Path) -> Figure:
    """B9: each head of one layer looks for something else."""
    record = load_translator(models / "multi30k-en-de").look(CAPTION).record
    layers = [entry for entry in record.of_kind("weights") if entry.role == "encoder self"]
    middle = layers[len(layers) // 2]
    told = f"{middle.name}, after the softmax: queries down, keys across. Each head has its own pattern"
    return figures.panels(heads(middle), told, columns=2)


def reading(models: Path) -> Figure:
    """A2: the gates of a GRU while it reads a sentence."""
    model = load_translator(models / "enfr-rnn")
    record = model.look(*AGREEMENT).record
    entry = next(entry for entry in record.of_kind("gates") if entry.name.startswith("encoder"))
    shown = {}
    for name in ("reset", "update"):
        grid = entry[f"forward.{name}"][0]  # [N, D]
        order = grid.std(0).argsort(descending=True)[:24]  # the units that the text moves most
        shown[f"{name} gate"] = grid[:, order].T
    told = "A trained GRU reads: its gates, of the 24 units that change most, from left to right"
    return figures.values(shown, "the tokens that are read", "unit", told, list(record.about["source"]), high=2.2)


def excitation(models: Path) -> Figure:
    """B11: gates over channels, opened and closed by what the whole input holds."""
    model = _gated_network()
    signals, kinds = _signals(400)
    with weft.record(model) as seen, torch.no_grad():
        answers = model(signals)
    right = float((answers.argmax(-1) == kinds % 2).float().mean())
    gates = seen["gate"]["channels"]
    order = (gates[kinds < 2].mean(0) - gates[kinds >= 2].mean(0)).argsort()
    grid = torch.stack([gates[kinds == kind].mean(0)[order] for kind in range(4)])
    told = (
        "Squeeze-and-excitation: the mean gate of each channel for four kinds of input. A pilot tone asks whether the "
        f"signal is above 0 (answers: kinds 0, no, and 1, yes) or fast (2, 3); {100 * right:.0f}% of 400 are answered "
        "right. Which channels are let through depends on the question and on the signal"
    )
    return figures.values({"": grid}, "channel, in the order of what it is for", "kind of input", told, high=2.0)


def positions(models: Path) -> Figure:
    """C2: the sinusoidal positions that a model adds to its embeddings."""
    record = load_translator(models / "multi30k-en-de").look(CAPTION).record
    table = record.of_kind("positions")[0]["table"]
    told = "What the Transformer adds to its tokens, by place: sin and cos in turns, from fast to slow"
    return figures.values({"": table.T}, "position", "entry", told, high=3.0)


def looks_back(models: Path) -> Figure:
    """E1: where each letter of a line looks, in each head of a layer of a GPT."""
    model = load_language_model(models / "shakespeare")
    record = model.look(LINE, max_tokens=8, temperature=0.0).record
    entry = record.of_kind("weights")[-1]
    told = "A GPT that reads Shakespeare by letters"
    closed = torch.ones(entry.weights.shape[-2:], dtype=torch.bool).tril()
    return figures.heat_map(of(entry, allowed=closed, caption=told))


WIDE = (1280, 860)
HEAD = "view=matrix&where=encoder self&layer=2&head=2&token=source.5"
_DRAWN = (agreement, cat, fox, park, caption, caption_rnn, many_heads, reading, excitation, positions, looks_back)
PICTURES: dict[str, Callable[[Path], Figure]] = {draw.__name__: draw for draw in _DRAWN}
# The page, photographed: whose model, of which text, in which view, how wide and high, light or dark.
PAGES: dict[str, tuple[str, str, str, tuple[int, int], str]] = {
    "page_lines": ("multi30k-en-de", CAPTION, "view=lines", WIDE, "light"),
    "page_alignment": ("multi30k-en-de", CAPTION, "view=alignment", WIDE, "light"),
    "page_grid": ("multi30k-en-de", CAPTION, "view=grid", WIDE, "dark"),
    "page_steps": ("multi30k-en-de", CAPTION, "view=steps&step=6", WIDE, "light"),
    "page_head": (
        "multi30k-en-de",
        CAPTION,
        "view=matrix&where=encoder self&head=2&layer=2&token=source.5",
        (1280, 1500),
        "light",
    ),
    "page_shuffle": ("multi30k-en-de", CAPTION, "view=shuffle&where=encoder self&head=2", WIDE, "light"),
    "page_positions": ("multi30k-en-de", CAPTION, "view=positions", WIDE, "light"),
    "page_gates": ("enfr-rnn", AGREEMENT[0], "view=gates", WIDE, "light"),
    "page_walk": ("shakespeare", LINE, "view=walk", (1280, 2600), "light"),
    "page_phone": ("multi30k-en-de", CAPTION, "view=lines", (390, 860), "dark"),
}


def _aligned(look: Look, told: str) -> Figure:
    matrix = look.aligned(words=True)
    matrix.caption = told
    return figures.alignment(matrix)


class _Gated(nn.Module):
    """A convolution, gates over its channels, and a classifier of the mean over time."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(2, 16)
        self.convolution = GatedConvolution(16, kernel_size=5, causal=False)
        self.gate = SqueezeExcitation(16, reduction=4)
        self.output = nn.Linear(16, 2)

    def forward(self, signals: Tensor) -> Tensor:
        """The scores [B, 2] of signals [B, N, 2]."""
        hidden, _ = self.convolution(self.input(signals), None)
        return self.output(self.gate(hidden).mean(1))  # type: ignore[no-any-return]


def _signals(count: int) -> tuple[Tensor, Tensor]:
    """Signals [B, 32, 2] and their kinds [B] from 0 to 3.

    The second channel asks: of kinds 0 and 1 whether the first is mostly above 0, of 2 and 3 whether it is fast.
    """
    kinds = torch.randint(0, 4, (count,))
    place = torch.arange(32)[None]
    asked, answer = (kinds >= 2)[:, None], (kinds % 2 == 1)[:, None]
    other = torch.randint(0, 2, (count, 1)) == 1  # the question that is not asked has an answer too
    above, fast = torch.where(asked, other, answer), torch.where(asked, answer, other)
    wave = torch.sin(place * torch.where(fast, 2.5, 0.6) + torch.rand(count, 1) * 6.28)
    signal = wave + torch.where(above, 0.5, -0.5) + 0.3 * torch.randn(count, 32)
    pilot = torch.where(asked, 1.0, -1.0).expand(-1, 32)
    return torch.stack([signal, pilot], -1), kinds


def _gated_network() -> _Gated:
    torch.manual_seed(0)
    model = _Gated()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(600):
        signals, kinds = _signals(64)
        loss = F.cross_entropy(model(signals), kinds % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def _photograph(look: Look, view: str, size: tuple[int, int], scheme: str, path: Path) -> None:
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as play:
        look.write(Path(folder, "look.html"))
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)  # type: ignore[arg-type]
        page.goto(f"file://{folder}/look.html#{view}")
        page.wait_for_timeout(500)
        page.screenshot(path=path)
        browser.close()
    Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=96).save(path, optimize=True)


def _page(models: Path, name: str) -> None:
    model, text, view, size, scheme = PAGES[name]
    if model == "shakespeare":
        look = load_language_model(models / model).look(text, max_tokens=8, temperature=0.0)
    else:
        look = load_translator(models / model).look(text)
    _photograph(look, view, size, scheme, FOLDER / f"{name}.png")


def main() -> None:
    """Draw what was asked for and can be drawn."""
    everything = [*PICTURES, *PAGES]
    parser = argparse.ArgumentParser(description="Draw the gallery from trained models.")
    parser.add_argument("models", type=Path, help="the folder with the models")
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(everything)}; all if none")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in everything]:
        parser.error(f"there is no picture {unknown[0]!r}: expected {', '.join(everything)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in options.names or everything:
        path = FOLDER / f"{name}.png"
        try:
            if name in PICTURES:
                figures.save(PICTURES[name](options.models), path)
            else:
                _page(options.models, name)
        except OSError as error:
            print(f"{name}: left as it is, {error}")
        else:
            print(f"{path.relative_to(FOLDER.parent.parent.parent)}  {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
