"""What a translator makes of text that it was not trained for.

    python -m benchmarks.robustness [MODEL] [--from en] [--to es]

Prints a table in Markdown: the text, what came out, and of numbers, addresses, pictures and marks-up that a translation
should carry over, how many it did. Blank lines must stay blank, and each line must give one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NamedTuple

from weft.api import Translator, load_translator

CARRIED = re.compile(
    r"https?://\S+[\w/]|www\.\S+[\w/]|\S+@\S+[\w]|\d+(?:[.,:]\d+)*|</?\w+>|[\U0001F300-\U0001FAFF☀-➿]"
)
SHOWN = 70  # characters of a text


class Case(NamedTuple):
    """A text, and what is hard about it."""

    what: str
    text: str


CASES = (
    Case("empty", ""),
    Case("only spaces", "   "),
    Case("with its dot", "We are eating bread."),
    Case("without", "We are eating bread"),
    Case("no capital", "we are eating bread"),
    Case("ALL CAPS", "WE ARE EATING BREAD."),
    Case("ALL CAPS, one word", "STOP!"),
    Case("spaces around", "  We are eating bread.  "),
    Case("two sentences", "We are eating bread. Do you want some?"),
    Case("a number", "I was born in 1969."),
    Case("a large number", "The city has 3482917 inhabitants."),
    Case("decimals", "It costs 12.50 euros."),
    Case("a time", "The train leaves at 17:45."),
    Case("an address", "Visit https://example.org/page/7 today."),
    Case("mail", "Write to anna.smith@example.org, please."),
    Case("a picture", "I love you 😀"),
    Case("pictures only", "😀🎉"),
    Case("HTML", "We are <b>eating</b> bread."),
    Case("rare names", "Mr. Kowalczyk met Ngozi in Ljubljana."),
    Case("a rare word", "The platypus photosynthesizes."),
    Case("mixed scripts", "She said привет and 你好 to us."),
    Case("another script", "我们在吃面包。"),
    Case("code", "print(x[0] + 1)"),
    Case("a tab and quotes", 'He said\t"no".'),
    Case("one letter", "a"),
    Case("marks only", "?!…"),
    Case("a word 200 times", "very " * 199 + "good."),
    Case("2,000 words", "We are eating bread and drinking water in the garden. " * 200),
    Case("2,000 words, no mark", "bread and water " * 667),
)


class Outcome(NamedTuple):
    """What came of a case, and of what should be carried over how many were and how many should."""

    case: Case
    translation: str
    kept: int
    wanted: int


def tried(translator: Translator, to: str | None, from_: str | None, cases: Sequence[Case] = CASES) -> list[Outcome]:
    """All cases as one stream of lines, as a file would be translated."""
    texts = [case.text for case in cases]
    found = list(translator.translate_lines(texts, skipped=lambda line: None, to=to, from_=from_))
    outcomes = []
    for case, translation in zip(cases, found, strict=True):
        wanted = CARRIED.findall(case.text)
        outcomes.append(Outcome(case, translation.text, sum(each in translation.text for each in wanted), len(wanted)))
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes in Markdown."""
    lines = ["| case | text | translation | carried over |", "|---|---|---|---|"]
    for case, translation, kept, wanted in outcomes:
        lines.append(
            f"| {case.what} | {_cell(case.text)} | {_cell(translation)} | {f'{kept}/{wanted}' if wanted else ''} |"
        )
    return "\n".join(lines)


def _cell(text: str) -> str:
    words = len(text.split())
    short = text if len(text) <= SHOWN else f"{text[:SHOWN]}… ({words} words)"
    quoted = short.replace("|", "\\|").replace("\t", "⇥")
    return f"`{quoted}`" if quoted.strip() else f"({len(text)} spaces)" if text else "(nothing)"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="tatoeba")
    parser.add_argument("--from", dest="from_", default=None)
    parser.add_argument("--to", default=None)
    given = parser.parse_args()
    print(table(tried(load_translator(given.model), given.to, given.from_)))


if __name__ == "__main__":
    main()
