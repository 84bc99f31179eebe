"""Every family learns copy, reverse and sort, to a bound that a broken one misses; and what attention is for."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from examples import bottleneck
from weft.config import BOS, EOS, PAD, ConvolutionalConfig, RecurrentConfig, TransformerConfig
from weft.data.synthetic import Task
from weft.models import build
from weft.models.contract import Seq2Seq

TRANSFORMER = TransformerConfig(dim=32, num_heads=2, ffn_dim=64, encoder_layers=1, decoder_layers=1, dropout=0.0)
RECURRENT = RecurrentConfig(embed_dim=16, dim=32, dropout=0.0)
CONVOLUTIONAL = ConvolutionalConfig(embed_dim=32, dim=32, encoder_layers=2, decoder_layers=2, max_len=16, dropout=0.0)
STEPS = {"transformer": 250, "recurrent": 120, "convolutional": 200}


def argmax(model: Seq2Seq, source: Tensor, length: int) -> Tensor:
    """The likeliest token at each step, PAD behind EOS: [B, length]."""
    state, token, said = model.start(source), torch.full((len(source), 1), BOS), []
    ended = torch.zeros(len(source), 1, dtype=torch.bool)
    for _ in range(length):
        hidden, state = model.step(token, state)
        token = model.logits(hidden[:, -1]).argmax(-1, keepdim=True).masked_fill(ended, PAD)
        ended = ended | (token == EOS)
        said.append(token)
    return torch.cat(said, 1)


@pytest.mark.parametrize("task", ["copy", "reverse", "sort"])
@pytest.mark.parametrize("config", [TRANSFORMER, RECURRENT, CONVOLUTIONAL], ids=lambda config: config.family)
def test_learns(config: TransformerConfig | RecurrentConfig | ConvolutionalConfig, task: str) -> None:
    pairs = Task(task, num_symbols=10, min_len=3, max_len=7)
    model, steps = build(config, pairs.vocab_size, pairs.vocab_size), STEPS[config.family]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps, pct_start=0.2)
    for batch in islice(pairs.batches(64, seed=0), steps):
        loss = model.loss(batch)
        optimizer.zero_grad()
        (loss.total / loss.count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    source, target = next(pairs.batches(200, seed=0, held_out=True))
    with torch.no_grad():
        said = argmax(model, source, target.shape[1] - 1)
    assert (said == target[:, 1:]).all(1).float().mean() > 0.8  # whole sequences, the end among them


def test_one_state_holds_short_sources_only() -> None:
    found = bottleneck.experiment(steps=150, max_len=12, lengths=range(2, 13, 5))
    without, with_attention = found["without attention"], found["with attention"]
    assert list(without) == list(with_attention) == [2, 7, 12]
    assert min(without[2], with_attention[2], with_attention[12]) > 0.8
    assert without[12] < 0.2


def test_the_example_prints_a_table_and_draws_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = {"without attention": {2: 1.0, 20: 0.0}, "with attention": {2: 1.0, 20: 0.97}}
    monkeypatch.setattr(bottleneck, "experiment", lambda steps, seed: found)
    monkeypatch.setattr("sys.argv", ["bottleneck.py", "--save", str(tmp_path / "curves.png")])
    bottleneck.main()
    assert "    20                  0%                 97%\n" in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("wrong", [["--steps", "many"], ["--steps", "0"], ["--nothing"]], ids=" ".join)
def test_wrong_arguments_are_usage_errors(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bottleneck.py", *wrong])
    with pytest.raises(SystemExit) as stopped:
        bottleneck.main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: bottleneck.py")
