"""Small models and batches for the tests of training, and a process that trains them and may be killed.

Run as a program this is a server: it imports torch once, forks a child for each run, and tells how the child ended.
Killed at a named point, or by whoever knows its number, a child leaves what a real process would leave.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

import torch
import torch._dynamo  # which torch.optim imports when first used: seconds, that a forked child need not spend again
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.config import RecurrentConfig, TrainingConfig, TransformerConfig
from weft.kernels.dropout import dropout
from weft.kernels.mask import Mask
from weft.layers.blocks import BlockConfig, EncoderBlock
from weft.layers.linear import Linear
from weft.models import build
from weft.models.contract import Loss
from weft.training import checkpoint, loop, optim

VOCAB = 11
ROOT = Path(__file__).resolve().parents[2]


class Batch(NamedTuple):
    source: Tensor
    target: Tensor


class Batches:
    """Micro-batch n follows from n; row widths differ, so that batches have different counts of tokens."""

    per_epoch = 7

    def __init__(self, rows: int = 3, split: int = 1, pause: float = 0.0) -> None:
        """With ``split`` each batch comes in so many parts, one after the other; each takes ``pause`` seconds."""
        self.rows, self.split, self.pause = rows, split, pause
        self.asked: list[int] = []

    def at(self, number: int) -> Batch:
        self.asked.append(number)
        time.sleep(self.pause)
        whole, part = divmod(number, self.split)
        generator = torch.Generator().manual_seed(whole % self.per_epoch)
        lengths = torch.randint(2, 9, (self.rows,), generator=generator)
        tokens = torch.randint(3, VOCAB, (self.rows, 9), generator=generator)
        tokens[:, 0] = 1
        tokens[torch.arange(9) > lengths[:, None]] = 0
        mine = slice(part * self.rows // self.split, (part + 1) * self.rows // self.split)
        return Batch(tokens[mine, 1:], tokens[mine])

    def costliest(self) -> Batch:
        return Batch(torch.full((self.rows, 9), 3), torch.full((self.rows, 10), 3))


class Gru(nn.Module):
    """A language model with recurrence and dropout; the output layer, tied to the embedding, has the precision."""

    def __init__(self, dim: int = 8, p: float = 0.25) -> None:
        super().__init__()
        self.p = p
        self.precision = torch.float32
        self.embedding = nn.Embedding(VOCAB, dim)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.output = Linear(dim, VOCAB)
        self.output.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3, 2))  # has no part in the loss
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def hidden(self, tokens: Tensor) -> Tensor:
        x: Tensor = dropout(self.embedding(tokens), self.p, self.training)
        return F.dropout(self.gru(x)[0], self.p, self.training)

    def loss(self, batch: Batch, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        if self.training:
            assert isinstance(self.seen, Tensor)
            self.seen += 1
        wanted = batch.target[:, 1:]
        hidden = self.hidden(batch.target[:, :-1])
        logits = self.output(hidden.bfloat16() if self.precision == torch.bfloat16 else hidden)
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        total, nll = (
            F.cross_entropy(scores, wanted.flatten(), ignore_index=0, reduction="sum", label_smoothing=s)
            for s in (smoothing, 0.0)
        )
        return Loss(total, int((wanted != 0).sum()), {"nll": nll.detach()})


class Attention(Gru):
    """The same with a Transformer block in place of the recurrence."""

    def __init__(self, dim: int = 8, p: float = 0.25) -> None:
        super().__init__(dim, p)
        del self.gru
        self.block = EncoderBlock(BlockConfig(dim, num_heads=2, ffn_dim=12, dropout=p, attention_dropout=p))

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).to(self.precision)
        y: Tensor = self.block(x, Mask(causal=True))
        return y


class NeverAnswers(Gru):
    """A loss that is no number from the k-th call in training on."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def loss(self, batch: Batch, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        found = super().loss(batch, smoothing, rdrop)
        self.calls -= 1
        return found if self.calls > 0 else Loss(found.total * float("nan"), found.count, found.parts)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gru": Gru,
    "plain": lambda: Gru(p=0.0),
    "attention": Attention,
    "transformer": lambda: build(
        TransformerConfig(dim=16, num_heads=2, ffn_dim=24, encoder_layers=1, decoder_layers=1, attention_dropout=0.1),
        VOCAB,
        VOCAB,
    ),
    "recurrent": lambda: build(RecurrentConfig(cell="lstm", embed_dim=8, dim=12), VOCAB, VOCAB),
}

SETTINGS: dict[str, Any] = {
    "steps": 20,
    "accumulate": 2,
    "precision": "fp32",
    "learning_rate": 0.01,
    "warmup": 4,
    "weight_decay": 0.01,
    "validate_every": 6,
    "save_every": 4,
    "log_every": 3,
    "keep": 2,
}


def settings(**changes: Any) -> TrainingConfig:
    return TrainingConfig(**{**SETTINGS, **changes})


def validate(model: nn.Module) -> dict[str, float]:
    """Loss per token on a batch that is not trained on, and something random, which must not disturb training."""
    found = model.loss(Batches(rows=16).at(10_000_019))  # type: ignore[operator]
    return {"loss": float(found.total) / found.count, "noise": float(torch.rand(()))}


class Told:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    @property
    def notes(self) -> list[str]:
        return [event[1] for event in self.events if event[0] == "note"]

    def start(self, total_steps: int, step: int, facts: Mapping[str, str]) -> None:
        self.events.append(("start", total_steps, step, dict(facts)))

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("update", step, dict(metrics)))

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.events.append(("validation", step, dict(metrics)))

    def note(self, text: str) -> None:
        self.events.append(("note", text))

    def close(self) -> None:
        self.events.append(("close",))


def metrics(folder: Path, times: bool = False) -> list[dict[str, Any]]:
    """The events of metrics.jsonl, without what the clock decides."""
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: v for key, v in event.items() if times or key not in loop.TIME_FIELDS} for event in events]


def everything(folder: Path) -> dict[str, Any]:
    """All that a run promises bit for bit: weights, what the last step saved, its state, the metrics, the outcome."""
    run = checkpoint.RunFolder(folder)
    last = run.steps()[-1]
    found: dict[str, Any] = {"metrics": metrics(folder), "steps": run.steps()}
    found["state"] = {key: value for key, value in run.state(last).items() if key != "seconds"}
    found["outcome"] = {k: v for k, v in json.loads((folder / "outcome.json").read_text()).items() if k != "seconds"}
    files = [folder / "final.safetensors", *sorted((folder / f"step-{last:06d}").glob("*.safetensors"))]
    for file in files:
        found |= {f"{file.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[key].dtype, key
            assert value.numpy().tobytes() == other[key].numpy().tobytes(), key
        else:
            assert value == other[key], key


# Where a run can be stopped: before (0) or after (1) a call of this function.
POINTS: dict[str, tuple[Any, str, int]] = {
    "mid-step": (optim, "shortened", 0),
    "after-update": (optim.Optimizer, "step", 1),
    "mid-log": (checkpoint.RunFolder, "log", 0),
    "mid-validation": (sys.modules[__name__], "validate", 0),
    "mid-save": (checkpoint, "save_file", 1),
    "before-checksum": (checkpoint, "_sha256", 0),
    "before-sync": (os, "fsync", 0),
    "before-rename": (os, "rename", 0),
    "after-rename": (os, "rename", 1),
    "before-latest": (os, "replace", 0),
    "after-latest": (os, "replace", 1),
    "mid-prune": (shutil, "rmtree", 0),
    "epoch-end": (Batches, "at", 0),
}


def stop_at(point: str, times: int, signals: list[int]) -> None:
    """Send these signals to this process when it comes to the point for so many times."""
    owner, name, after = POINTS[point]
    function = getattr(owner, name)
    left = times

    def stopping(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        if point == "epoch-end" and args[1] % Batches.per_epoch:
            return function(*args, **kwargs)
        left -= 1
        result = function(*args, **kwargs) if after or left else None
        if left:
            return result
        if point == "mid-log" and signals == [signal.SIGKILL]:  # half a line
            with (args[0].path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(args[1])[:9])
        if point == "mid-save" and signals == [signal.SIGKILL]:  # half a file
            os.truncate(args[1], os.path.getsize(args[1]) // 2)
        if point == "mid-prune" and signals == [signal.SIGKILL]:  # half a folder
            next(Path(args[0]).glob("*.safetensors")).unlink()
        for number in signals:
            os.kill(os.getpid(), number)
        return result if after else function(*args, **kwargs)

    setattr(owner, name, stopping)


def train(
    folder: Path,
    model: str = "gru",
    changes: Mapping[str, Any] | None = None,
    stop: tuple[str, int, list[int]] | None = None,
    pause: float = 0.0,
    validating: bool = True,
) -> None:
    """A whole run in this process, ending with final.safetensors and outcome.json beside its steps."""
    torch.manual_seed(5)
    made = MODELS[model]()
    config = settings(**(changes or {}))
    if stop:
        stop_at(*stop)
    batches = Batches(pause=pause)
    measure = (lambda model: validate(model)) if validating else None
    identity = {"training": config.model_dump()}
    outcome = loop.train(made, batches, config, folder, seed=3, identity=identity, validate=measure)
    if os.environ.get("RANK", "0") == "0":
        save_file(checkpoint.tensors_of(made), folder / "final.safetensors")
        (folder / "outcome.json").write_text(json.dumps(vars(outcome)))


class Server:
    """Starts runs in processes of their own."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__))]
        self.process = Popen(command, cwd=ROOT, env=environment, stdin=PIPE, stdout=PIPE, text=True)

    def start(self, folder: Path, environment: Mapping[str, str] | None = None, **arguments: Any) -> int:
        """Begin a run in ``folder`` with the arguments of ``train``; its process number."""
        return self._ask({"folder": str(folder), "environment": environment or {}, "arguments": arguments})

    def wait(self, number: int) -> int:
        """How the process ended: its exit code, or minus the signal that ended it."""
        return self._ask({"wait": number})

    def train(self, folder: Path, **arguments: Any) -> int:
        return self.wait(self.start(folder, **arguments))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, question: Mapping[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())


def serve() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        if "wait" in asked:
            print(os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1]), flush=True)
            continue
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        signal.signal(signal.SIGINT, signal.default_int_handler)
        folder = Path(asked["folder"])
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.update(asked["environment"])
        with in_files(folder):
            code = 1
            try:
                train(folder, **asked["arguments"])
                code = 0
            except KeyboardInterrupt:
                code = 130
            except SystemExit as error:
                code = int(error.code or 0)
            except Exception as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(code)


@contextmanager
def in_files(folder: Path) -> Iterator[None]:
    """What the process prints goes to the file ``said``."""
    handle = os.open(folder / "said", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    yield


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve()
