"""Whatever happened to a file, reading it ends in a model or in one line, in little memory, and runs nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weft.config import GPTConfig
from weft.interop import huggingface, llama2c
from weft.models.gpt import GPT

COUNT = 150
SIZES = {"dim": 8, "num_heads": 2, "num_layers": 1, "ffn_dim": 8, "max_len": 8, "dropout": 0.0}
LLAMA = GPTConfig(**SIZES, positions="rotary", norm="rms", activation="swiglu", bias=False)


def write_safetensors(path: Path) -> None:
    huggingface.write(path, LLAMA, GPT(LLAMA, 11).state_dict())


def write_shards(path: Path) -> None:
    config = GPTConfig(**SIZES)
    huggingface.write(path, config, GPT(config, 11).state_dict())
    whole = load_file(path / "model.safetensors")
    places = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(whole)}
    for file in set(places.values()):
        save_file({name: tensor for name, tensor in whole.items() if places[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (path / "model.safetensors").unlink()


def write_pickle(path: Path) -> None:
    huggingface.write(path, LLAMA, GPT(LLAMA, 11).state_dict())
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


def write_pieces(path: Path) -> None:
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(f"<0x{i:02X}>".encode() for i in range(256)), b"a", b"b", b"ab"]
    llama2c.write_pieces(path, llama2c.Pieces(pieces, [0.0] * 261 + [-1.0]))


WRITERS = {
    "safetensors": ("huggingface", write_safetensors),
    "shards": ("huggingface", write_shards),
    "pickle": ("huggingface", write_pickle),
    "llama2.c": ("model", lambda path: llama2c.write(path, LLAMA, GPT(LLAMA, 11).state_dict())),
    "llama2.c vocabulary": ("pieces", write_pieces),
}


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc to know the memory in use")
def test_damaged_files_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("damage.py")), str(COUNT)]
    for name, (kind, write) in WRITERS.items():
        write(tmp_path / name)
        command += [kind, str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert [sum(pair) for pair in counts] == [COUNT] * len(WRITERS)
    assert all(refused > COUNT / 4 for _, refused in counts)
