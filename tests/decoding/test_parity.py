"""Beam and greedy search against ``generate`` of transformers, on tiny random weights behind the same contract."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import MarianConfig, MarianMTModel

from tests.decoding.table import TableModel, batch
from weft.config import BOS, EOS, PAD, Specials
from weft.decoding.beam import beam
from weft.decoding.greedy import greedy
from weft.decoding.options import SearchOptions

VOCAB, LIMIT = 23, 20
SOURCES = [[5, 9, 4, 4], [7], [3, 8, 20, 21, 22, 10, 11], [6, 6]]


@dataclass(frozen=True)
class WholeState:
    """The source and all tokens so far: a step runs the whole decoder anew."""

    source: Tensor
    past: Tensor

    @property
    def lengths(self) -> Tensor:
        return torch.full((len(self.past),), self.past.shape[1])

    def select(self, rows: Tensor) -> WholeState:
        return WholeState(self.source[rows], self.past[rows])

    def truncate(self, lengths: Tensor) -> WholeState:
        return WholeState(self.source, self.past[:, : int(lengths[0])])

    @staticmethod
    def cat(states: Sequence[WholeState]) -> WholeState:
        return WholeState(torch.cat([s.source for s in states]), torch.cat([s.past for s in states]))


class Marian(nn.Module):
    """transformers' Marian behind weft's contract."""

    precision = torch.float32
    specials = Specials()
    cross_attentions = ()
    max_len = None
    first, room = TableModel.first, TableModel.room

    def __init__(self, model: MarianMTModel) -> None:
        super().__init__()
        self.model = model

    def start(self, inputs: Tensor) -> WholeState:
        return WholeState(inputs, inputs[:, :0])

    def step(self, tokens: Tensor, state: WholeState) -> tuple[Tensor, WholeState]:
        past = torch.cat([state.past, tokens], 1)
        found = self.model(
            input_ids=state.source, attention_mask=(state.source != PAD).long(), decoder_input_ids=past, use_cache=False
        )
        return found.logits[:, -tokens.shape[1] :], WholeState(state.source, past)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.fixture(scope="module")
def marian() -> MarianMTModel:
    torch.manual_seed(7)
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = MarianConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=64,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=BOS,
        forced_eos_token_id=None,
        init_std=0.3,
        tie_word_embeddings=False,
        **sizes,
    )
    model = MarianMTModel(config).eval().double()
    model.final_logits_bias[0, EOS] = 1.5
    return model


def generate(model: MarianMTModel, **options: Any) -> tuple[list[list[int]], list[float]]:
    source = batch(SOURCES)
    found = model.generate(
        source,
        attention_mask=(source != PAD).long(),
        max_new_tokens=LIMIT + 1,
        suppress_tokens=[PAD, BOS],
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    scores = found.sequences_scores.tolist() if "sequences_scores" in found else []
    return [row[1 : row.index(EOS) + 1] for row in found.sequences.tolist()], scores


@pytest.mark.parametrize(
    ("alpha", "early", "patience", "rules"),
    [
        (1.0, True, 1.0, {}),
        (2.0, True, 1.0, {"no_repeat": 2, "min_len": 2}),
        (0.5, True, 1.0, {"min_len": 5}),
        (0.0, "never", math.inf, {}),
        (0.3, "never", math.inf, {"no_repeat": 2, "min_len": 3}),
    ],
)
def test_beam_search(marian: MarianMTModel, alpha: float, early: Any, patience: float, rules: dict[str, int]) -> None:
    width = 4
    theirs, scores = generate(
        marian,
        num_beams=width,
        num_return_sequences=width,
        early_stopping=early,
        length_penalty=alpha,
        no_repeat_ngram_size=rules.get("no_repeat", 0),
        min_new_tokens=rules.get("min_len", 0),
    )
    options = SearchOptions(
        beam=width, n_best=width, length_penalty=alpha, patience=patience, max_ratio=0.0, max_extra=LIMIT, **rules
    )
    found = [h for hypotheses in beam(Marian(marian), batch(SOURCES), options) for h in hypotheses]
    assert all(h.finished for h in found), "they rank what is cut off among the finished"
    assert [[*h.tokens, EOS] for h in found] == theirs
    assert [h.score for h in found] == pytest.approx(scores, abs=1e-5)
    assert len({len(h.tokens) for h in found}) > 1
    assert len({h.tokens for h in found}) > 9


def test_greedy(marian: MarianMTModel) -> None:
    theirs, _ = generate(marian, num_beams=1, do_sample=False)
    options = SearchOptions(max_ratio=0.0, max_extra=LIMIT)
    found = [h for (h,) in greedy(Marian(marian), batch(SOURCES), options)]
    assert [[*h.tokens, EOS] for h in found] == theirs
    assert len({len(h.tokens) for h in found}) > 1
