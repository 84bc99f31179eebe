"""The same answer in any company, over a whole test set: one by one, in batches, shuffled."""

from __future__ import annotations

import random
from itertools import zip_longest
from pathlib import Path

import pytest

import weft
from weft import cli
from weft.api import Translation
from weft.data.corpora import open_pairs

# Trained enough to write words and to end: what an untrained model writes never ends.
SHORT = ["--training.steps=150"]
LONG = ["--training.steps=800", "--training.batch_tokens=1024"]
SMALL = ["--model.embed_dim=128", "--model.dim=128"]
FAMILIES = {
    "transformer": SHORT,
    "recurrent": ["--model.family=recurrent", *SMALL, *LONG],
    "convolutional": ["--model.family=convolutional", *SMALL, *SHORT],
}
CLOSE = {"fp32": 1e-4, "bf16": 2e-2}  # candidates that may change places where it is not to be exact


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_test_set_is_translated_alike_one_by_one_in_batches_and_shuffled(
    weft_data: Path, tmp_path_factory: pytest.TempPathFactory, family: str, precision: str
) -> None:
    """1,000 sentences of Multi30k with the Transformer in fp32, 100 elsewhere: greedy and beam 5, ids and scores.

    With ``exact`` all of it is equal. Without, greedy search may only change its mind between two tokens that are
    CLOSE; so may a beam in fp32 between two hypotheses. In bf16, where rounding is a thousand times coarser, a beam
    that dropped another candidate on the way may end anywhere: there, few may.
    """
    out = tmp_path_factory.getbasetemp() / f"company-{family}"
    rest = ["--training.bleu=false", "--training.warmup=50", "--training.average=0", "--training.learning_rate=3e-3"]
    rest += ["--training.optimizer=adamw", "--training.schedule=inverse_sqrt", "--training.rdrop=0.0"]
    rest += ["--training.batch_tokens=4096"]
    if not (out / "model.safetensors").exists():
        assert cli.main(["train", "multi30k-en-de", "--out", str(out), *rest, *FAMILIES[family]]) == 0
    translator = weft.load(out, precision=precision)  # type: ignore[arg-type]
    sources = [source for source, _ in open_pairs("multi30k:test_2016_flickr", "en", "de")]
    if (family, precision) != ("transformer", "fp32"):
        sources = sources[:100]
    order = random.Random(0).sample(range(len(sources)), len(sources))
    for beam in (1, 5):

        def found(texts: list[str], beam: int = beam) -> list[tuple[str, float, float]]:
            answers = translator.translate(texts, beam=beam, exact=True)
            return [(each.text, each.score, each.log_prob) for each in answers]

        alone = [found([source])[0] for source in sources]
        batches = [answer for at in range(0, len(sources), 64) for answer in found(sources[at : at + 64])]
        shuffled = found([sources[i] for i in order])
        assert batches == alone
        assert [shuffled[order.index(i)] for i in range(len(sources))] == alone
        assert len({text for text, _, _ in alone}) > len(alone) // 4  # they are not all the same sentence
        changed = 0
        for one, other in zip(
            translator.translate(sources, beam=beam, exact=True), translator.translate(sources, beam=beam), strict=True
        ):
            if one.text != other.text:
                changed += 1
                apart = _apart(one, other, beam)
                print(f"beam {beam}: {one.text!r} and {other.text!r} changed places, {apart:.1e} apart")
                assert apart < CLOSE[precision] or (beam > 1 and precision == "bf16")
        assert changed <= len(sources) // 20


def _apart(one: Translation, other: Translation, beam: int) -> float:
    """How far apart two translations were where they parted: for a beam at the end, else at the first other token."""
    if beam > 1:
        return abs(one.score - other.score)
    fork = next(i for i, (a, b) in enumerate(zip_longest(one.n_best[0].ids, other.n_best[0].ids)) if a != b)
    return abs(one.n_best[0].token_log_probs[fork] - other.n_best[0].token_log_probs[fork])
