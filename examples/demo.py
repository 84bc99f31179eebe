"""The first minute: translate, see where the model looked, and let another one write.

    python examples/demo.py [--out demo.html]

Both models come with weft. In a terminal it speaks in colours; elsewhere it is plain text.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import get_terminal_size
from time import perf_counter

import weft
from weft.api import load_language_model, load_translator
from weft.kernels import native
from weft.views.terminal import shows_colours

SENTENCES = ("we are eating bread", "The animal didn't cross the street because it was too tired.")
LANGUAGES = {"es": "Spanish", "fr": "French", "de": "German"}
PROMPT = "ROMEO:"
NEXT = """\
weft translate --to fr "Where is the station?"       any of en, es, fr, de to any other; or < file > file
weft look --to de "I have never seen that film."     where it looked, as a page of its own
weft generate "JULIET:" --seed 7                     a little more Shakespeare
weft train translation --data.train=tatoeba-sample:train --training.steps=1500 --out mine
                                                     one of your own, in ten minutes: docs/tutorial.md"""


def main() -> None:
    """Show it all, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo.html"), help="where the page goes")
    out: Path = parser.parse_args().out
    colour = shows_colours(sys.stdout)

    def heading(text: str) -> None:
        print(f"\n\x1b[1m{text}\x1b[0m\n" if colour else f"\n{text}\n")

    begin = perf_counter()
    if why := native.why_not():
        print(f"no compiled searches ({why}): slower, and the same words")
    heading("Translated by a model that comes with weft and was trained by it")
    translator = load_translator("tatoeba")
    for text in SENTENCES:
        print(f"    {text}")
        for code, name in LANGUAGES.items():
            print(f"      {name:<8}{translator.translate(text, to=code).text}")

    heading("Where it looked while it spoke")
    seen = translator.look(SENTENCES[0], to="es")
    seen.write(out)
    columns = get_terminal_size().columns if sys.stdout.isatty() else None
    print(*(f"    {line}" for line in seen.draw(colour, words=True, columns=columns).splitlines()), sep="\n")
    print(f"\n    All heads, layers and steps of it: {out.resolve()} (open it in any browser; it needs no network)")

    heading("Written letter by letter by a small GPT that has read Shakespeare")
    print(*(f"    {line}" for line in _lines(PROMPT, 8)), sep="\n")

    heading("What to type next")
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ:
        print(f"    source {os.path.relpath(sys.prefix)}/bin/activate")
    print(*(f"    {line}" for line in NEXT.splitlines()), sep="\n")
    print(f"\nweft {weft.__version__}, {perf_counter() - begin:.1f} s")


def _lines(prompt: str, count: int) -> Iterator[str]:
    """The first lines of what a language model goes on with."""
    found = load_language_model("shakespeare").generate(prompt, max_tokens=400, seed=6)
    yield from "\n".join((prompt + found.text).split("\n")[:count]).rstrip().split("\n")


if __name__ == "__main__":
    main()
