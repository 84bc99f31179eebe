"""The loop does what a plain loop does, and keeps its promises about validation, memory, errors and what it writes."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.training.toys import Attention, Batch, Batches, Gru, NeverAnswers, Told, metrics, settings, validate
from weft.kernels import machine
from weft.kernels.plain import is_plain
from weft.models.contract import Loss
from weft.training import loop
from weft.training.checkpoint import RunFolder, tensors_of
from weft.training.distributed import Ranks
from weft.training.loop import Outcome, TrainingError, seed_of, train
from weft.training.optim import learning_rate


def run(model: nn.Module, folder: Path, batches: Any = None, **changes: Any) -> Outcome:
    """Train with the usual settings but for these; what is no setting goes to ``train``."""
    names = ("validate", "best", "report", "fork", "seed")
    given = {name: changes.pop(name) for name in names if name in changes}
    config = settings(**changes)
    identity = {"training": config.model_dump()}
    return train(model, batches or Batches(), config, folder, **{"seed": 1, "identity": identity, **given})


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def made(kind: type[Gru] = Gru, p: float = 0.0) -> Gru:
    torch.manual_seed(2)
    return kind(p=p)


def plain_training(model: Gru, batches: Batches, steps: int, **changes: Any) -> list[float]:
    """A loop as in any tutorial: the mean loss over a whole batch, clipping, AdamW."""
    config = settings(steps=steps, **changes)
    trained = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ],
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        foreach=False,
    )
    model.train()
    losses = []
    for step in range(steps):
        batch = batches.at(step)
        logits = model.output(model.hidden(batch.target[:, :-1]))
        loss = F.cross_entropy(
            logits.flatten(0, 1), batch.target[:, 1:].flatten(), ignore_index=0, label_smoothing=config.smoothing
        )
        optimizer.zero_grad()
        loss.backward()
        norm = torch.cat([p.grad.flatten() for p in trained if p.grad is not None]).norm()
        for p in trained:
            p.grad = (p.grad if p.grad is not None else torch.zeros_like(p)) * min(1.0, config.clip / float(norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step + 1)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("accumulate", [1, 2, 6])
def test_accumulated_parts_are_one_plain_step_on_the_whole(tmp_path: Path, accumulate: int) -> None:
    # Whole batches of 12 rows come in parts with different counts of tokens, so a mean of means would be wrong.
    mine, plain = made().double(), made().double()
    losses = plain_training(plain, Batches(rows=12), 10, clip=0.5)
    run(mine, tmp_path, Batches(rows=12, split=accumulate), steps=10, accumulate=accumulate, clip=0.5, log_every=1)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(mine.get_parameter(name), parameter, rtol=0, atol=1e-10, msg=name)
    assert [event["loss"] for event in metrics(tmp_path)] == pytest.approx(losses, abs=1e-10)


def test_the_log_has_means_over_tokens_and_the_schedule(tmp_path: Path) -> None:
    model, told = made(), Told()
    run(model, tmp_path, steps=8, log_every=3, accumulate=2, report=told)
    events = metrics(tmp_path, times=True)
    assert [event["step"] for event in events] == [3, 6, 8]
    # The same again, by hand: the loss of each batch before its update.
    other, batches, config = made(), Batches(), settings(steps=8)
    counted = [sum(other.loss(batches.at(2 * step + i)).count for i in (0, 1)) for step in range(8)]
    assert [event["tokens"] for event in events] == [sum(counted[:n]) for n in (3, 6, 8)]
    assert [event["lr"] for event in events] == [learning_rate(config, n) for n in (3, 6, 8)]
    assert [event["epoch"] for event in events] == [6 / 7, 12 / 7, 16 / 7]
    assert all(event["loss"] > event["nll"] > 0.0 for event in events)  # the labels are smoothed
    assert all(event["grad_norm"] > 0.0 and event["tokens_per_second"] > 0.0 for event in events)
    assert events[0]["seconds"] < events[1]["seconds"]
    assert told.events[0][:3] == ("start", 8, 0)
    assert told.events[0][3]["precision"] == "fp32"
    assert [event for event in told.events if event[0] == "update"] == [
        ("update", event.pop("step"), event) for event in events
    ]


class Recorder(Gru):
    """Keeps what it was given and drew."""

    def __init__(self) -> None:
        super().__init__(p=0.5)
        self.given: list[tuple[float, float]] = []
        self.draws: list[float] = []

    def loss(self, batch: Batch, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        self.given.append((smoothing, rdrop))
        self.draws.append(float(torch.rand((), dtype=torch.float64)))
        return super().loss(batch, smoothing, rdrop)


def test_each_step_has_random_numbers_of_its_own_and_each_start_the_same(tmp_path: Path) -> None:
    first, again, other = Recorder(), Recorder(), Recorder()
    run(first, tmp_path / "a", steps=6, seed=1, smoothing=0.2, rdrop=0.5)
    torch.rand(3)  # what was drawn before does not matter
    run(again, tmp_path / "b", steps=6, seed=1, smoothing=0.2, rdrop=0.5)
    run(other, tmp_path / "c", steps=6, seed=2)
    assert first.draws[1:] == again.draws[1:]  # the first is the trial's
    assert len({*first.draws, *other.draws[1:]}) == 1 + 12 + 12
    assert set(first.given) == {(0.2, 0.5)}
    assert len({seed_of(a, b, c) for a in range(9) for b in range(9) for c in range(-1, 8)}) == 9**3
    assert seed_of(1, 23, 4) != seed_of(12, 3, 4)


def test_ranks_draw_different_numbers_and_only_the_first_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Recorder(), Recorder()
    run(first, tmp_path / "a", steps=3)
    monkeypatch.setattr(loop, "joined", lambda: nullcontext(Ranks(1, 1, torch.device("cpu"))))
    run(second, tmp_path / "b", steps=3, report=Told(), validate=None)
    assert not {*first.draws[1:]} & {*second.draws[1:]}
    assert not (tmp_path / "b").exists()


def test_micro_batches_are_read_in_order_and_again_from_where_it_stopped(tmp_path: Path) -> None:
    batches = Batches()
    run(made(), tmp_path, batches, steps=5, accumulate=3, save_every=2)
    assert batches.asked[:15] == list(range(15))
    batches.asked.clear()
    with pytest.raises(TrainingError):
        run(NeverAnswers(calls=6), tmp_path / "b", batches, steps=9, accumulate=3, save_every=1)
    batches.asked.clear()
    run(made(), tmp_path / "b", batches, steps=9, accumulate=3, save_every=1)
    assert batches.asked[:24] == list(range(3, 27))


class Watcher:
    """A validation that gives values from a list and keeps what the model was like."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.seen: list[dict[str, Tensor]] = []
        self.modes: list[bool] = []

    def __call__(self, model: nn.Module) -> dict[str, float]:
        self.modes.append(model.training or torch.is_grad_enabled())
        self.seen.append({name: tensor.clone() for name, tensor in tensors_of(model).items()})
        torch.rand(7)
        return {"score": self.values[len(self.seen) - 1], "other": 1.0}


@pytest.mark.parametrize(
    ("direction", "values", "best"),
    [("max", [1.0, 3.0, 2.0, 3.0], 4), ("min", [1.0, 3.0, 0.5, 0.5], 6), ("min", [math.nan, 2.0, math.inf, 5.0], 4)],
)
def test_the_best_step_gives_the_model(tmp_path: Path, direction: Any, values: list[float], best: int) -> None:
    model, watcher = made(p=0.3), Watcher(*values)
    settings = {"steps": 8, "validate_every": 2, "save_every": 100, "keep": 1}
    outcome = run(model, tmp_path, validate=watcher, best=("score", direction), **settings)
    assert (outcome.step, outcome.best_step, outcome.weights) == (8, best, (best,))
    assert outcome.metrics == {"score": values[best // 2 - 1], "other": 1.0}
    assert watcher.modes == [False] * 4
    assert same(tensors_of(model), watcher.seen[best // 2 - 1])
    assert not model.training
    assert RunFolder(tmp_path).steps() == sorted({best, 8})
    logged = [event for event in metrics(tmp_path) if "validation" in event]
    assert [event["step"] for event in logged] == [2, 4, 6, 8]
    assert [event["validation"]["score"] for event in logged] == [v if math.isfinite(v) else None for v in values]


def test_a_validation_changes_nothing_in_training(tmp_path: Path) -> None:
    for ema in (0.0, 0.9):
        with_it, without = made(p=0.3), made(p=0.3)
        run(with_it, tmp_path / f"a{ema}", validate=validate, validate_every=2, ema=ema, steps=6)
        run(without, tmp_path / f"b{ema}", ema=ema, steps=6)
        files = [tmp_path / f"{name}{ema}" / "step-000006" / "optimizer.safetensors" for name in "ab"]
        assert same(*map(load_file, files))


def test_with_a_mean_over_time_that_is_what_counts(tmp_path: Path) -> None:
    model, watcher = made(), Watcher(1.0, 2.0)
    run(
        model,
        tmp_path,
        steps=8,
        validate_every=4,
        save_every=1,
        keep=8,
        ema=0.6,
        validate=watcher,
        best=("score", "max"),
    )
    saved = RunFolder(tmp_path)
    torch.manual_seed(2)
    mean = {name: p.detach().clone() for name, p in Gru(p=0.0).named_parameters()}
    for step in range(1, 9):
        decay = min(0.6, (1 + step) / (10 + step))
        now = saved.tensors(step, "model")
        mean = {name: decay * mean[name] + (1 - decay) * now[name] for name in mean}
        assert not torch.equal(now["embedding.weight"], mean["embedding.weight"])
    for name, value in mean.items():
        torch.testing.assert_close(saved.tensors(8, "mean")[name], value)
        assert torch.equal(watcher.seen[1][name], saved.tensors(8, "mean")[name])
        assert torch.equal(model.get_parameter(name), saved.tensors(8, "mean")[name])


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_the_last_saved_steps_are_averaged(tmp_path: Path, ema: float) -> None:
    model = made(p=0.2)
    flat = lambda model: {"loss": 1.0}  # noqa: E731
    outcome = run(model, tmp_path, steps=11, save_every=2, average=3, keep=1, ema=ema, validate=flat, validate_every=5)
    saved = RunFolder(tmp_path)
    assert outcome.weights == (8, 10, 11)
    group = "mean" if ema else "model"
    for name, parameter in model.named_parameters():
        values = [saved.tensors(step, group)[name].double() for step in (8, 10, 11)]
        torch.testing.assert_close(parameter.double(), sum(values) / 3, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("ema", [0.0, 0.5])
def test_an_average_that_validation_finds_worse_is_not_taken(tmp_path: Path, ema: float) -> None:
    config = {"steps": 6, "save_every": 1, "validate_every": 2, "average": 3, "keep": 1, "ema": ema}
    for last, weights, score in ((0.9, (4,), 1.0), (1.1, (4, 5, 6), 1.1)):
        folder, told, watcher = tmp_path / str(last), Told(), Watcher(0.5, 1.0, 0.7, last)
        model = made(p=0.2)
        outcome = run(model, folder, validate=watcher, best=("score", "max"), report=told, **config)
        assert (outcome.best_step, outcome.weights, outcome.metrics["score"]) == (4, weights, score)
        assert told.notes[-1].endswith("kept")
        # What was validated last is the average, whichever was taken; the run's own last step is as it was trained.
        group = "mean" if ema else "model"
        saved = [RunFolder(folder).tensors(step, group)["embedding.weight"].double() for step in (4, 5, 6)]
        torch.testing.assert_close(watcher.seen[-1]["embedding.weight"].double(), sum(saved) / 3, rtol=1e-6, atol=1e-8)
        again = made()
        assert run(again, folder, best=("score", "max"), **config) == outcome
        assert same(tensors_of(again), tensors_of(model))
        plain = made(p=0.2)
        run(plain, folder / "plain", validate=Watcher(*[0.0] * 4), best=("score", "max"), **{**config, "average": 0})
        last_step = (RunFolder(each).tensors(6, "model") for each in (folder, folder / "plain"))
        assert same(*last_step)


def test_patience_is_not_lost_while_the_loss_falls(tmp_path: Path) -> None:
    def falling(until: int) -> Any:
        losses = iter([*(9.0 - n for n in range(until)), *[9.0] * 99])
        return lambda model: {"loss": next(losses), "bleu": 0.0}

    config = {"steps": 100, "validate_every": 1, "save_every": 50, "patience": 3}
    for until in (1, 5):
        outcome = run(made(), tmp_path / str(until), validate=falling(until), best=("bleu", "max"), **config)
        assert (outcome.best_step, outcome.step) == (1, until + 3)


def test_more_steps_are_averaged_than_kept(tmp_path: Path) -> None:
    outcome = run(made(), tmp_path, steps=8, save_every=1, average=6, keep=1)
    assert outcome.weights == (3, 4, 5, 6, 7, 8)
    assert RunFolder(tmp_path).steps() == [3, 4, 5, 6, 7, 8]
    outcome = run(made(), tmp_path / "few", steps=3, save_every=1, average=6, keep=1)
    assert outcome.weights == (1, 2, 3)


def test_a_damaged_older_step_does_not_stop_the_run(tmp_path: Path) -> None:
    class Damaging(Watcher):
        def __call__(self, model: nn.Module) -> dict[str, float]:
            for state in sorted(tmp_path.glob("step-*/state.json"))[:-1]:
                state.write_text("{")
            return super().__call__(model)

    config = {"steps": 6, "validate_every": 1, "save_every": 1, "keep": 3}
    outcome = run(made(), tmp_path, validate=Damaging(*range(6)), best=("score", "max"), **config)
    assert outcome.weights == (6,)


def test_what_a_kept_step_needs_is_kept(tmp_path: Path) -> None:
    values = [5.0, 1.0, 2.0, 3.0, 4.0, 0.5, 9.0]
    kept: list[list[int]] = []

    class Watching(Watcher):
        def __call__(self, model: nn.Module) -> dict[str, float]:
            kept.append(RunFolder(tmp_path).steps())
            return super().__call__(model)

    watcher = Watching(*values)
    config = {"steps": 7, "validate_every": 1, "save_every": 1, "keep": 2}
    run(made(), tmp_path, validate=watcher, best=("score", "min"), **config)
    # Before each validation: two steps, and the best as each of the two saw it.
    assert kept == [[], [1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    assert RunFolder(tmp_path).steps() == [6, 7]


def test_patience_ends_a_run(tmp_path: Path) -> None:
    watcher, told = Watcher(2.0, 1.0, 1.5, 1.0, 0.5, 0.4), Told()
    config = {"steps": 100, "validate_every": 2, "patience": 2}
    outcome = run(made(), tmp_path, validate=watcher, best=("score", "min"), report=told, **config)
    assert (outcome.step, outcome.best_step) == (8, 4)
    again = run(made(), tmp_path, validate=None, best=("score", "min"), report=told, **config)
    assert again == outcome
    with pytest.raises(ValueError, match=r"training\.patience=2 needs a validation"):
        run(made(), tmp_path / "b", **config)


@pytest.mark.parametrize(
    ("direction", "goal", "step"), [("max", 3.0, 6), ("max", 2.5, 6), ("min", 1.0, 2), ("max", 9.0, 8)]
)
def test_a_goal_ends_a_run(tmp_path: Path, direction: Literal["min", "max"], goal: float, step: int) -> None:
    watcher = Watcher(1.0, 2.0, 3.0, 4.0)
    config = {"steps": 8, "validate_every": 2, "goal": goal}
    outcome = run(made(), tmp_path, validate=watcher, best=("score", direction), **config)
    assert (outcome.step, len(watcher.seen)) == (step, step // 2)
    with pytest.raises(ValueError, match=rf"training\.goal={goal} needs a validation"):
        run(made(), tmp_path / "b", **config)


def test_no_number_reaches_no_goal(tmp_path: Path) -> None:
    config = {"steps": 4, "validate_every": 2, "goal": 1.0}
    assert run(made(), tmp_path, validate=Watcher(math.nan, math.nan), best=("score", "min"), **config).step == 4


def test_without_validation_the_last_step_gives_the_model(tmp_path: Path) -> None:
    model = made()
    outcome = run(model, tmp_path, steps=5, save_every=2)
    assert (outcome.best_step, outcome.metrics, outcome.weights) == (None, {}, (5,))
    assert same(tensors_of(model), RunFolder(tmp_path).tensors(5, "model"))


def test_a_finished_run_reads_no_batch(tmp_path: Path) -> None:
    model, again, batches, told = made(), made(Gru, p=0.1), Batches(), Told()
    outcome = run(model, tmp_path, validate=validate)
    before, steps = (tmp_path / "metrics.jsonl").read_bytes(), RunFolder(tmp_path).steps()
    shutil.copytree(tmp_path / "step-000020", tmp_path / "step-000003")  # as if killed before it was removed
    assert run(again, tmp_path, batches, report=told) == outcome
    assert batches.asked == []
    assert told.notes == [f"{tmp_path}: finished after step 20"]
    assert same(tensors_of(again), tensors_of(model))
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert RunFolder(tmp_path).steps() == steps


def test_a_loss_that_is_no_number_stops_and_leaves_what_was_saved(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"^step 7: the loss is nan; step 6 is saved\. Try a lower training\.learn"
    ) as e:
        run(NeverAnswers(calls=1 + 12 + 1), tmp_path, save_every=3)
    assert isinstance(e.value, ValueError)
    assert RunFolder(tmp_path).steps() == [3, 6]
    assert RunFolder(tmp_path).fault(6) is None
    whole = made()
    run(whole, tmp_path / "whole", save_every=3)
    mended = made()
    run(mended, tmp_path / "other", save_every=3, steps=20)
    assert same(tensors_of(mended), tensors_of(whole))
    told = Told()
    run(made(), tmp_path, save_every=3, report=told)
    assert told.notes == [f"{tmp_path}: going on after step 6"]


def test_a_gradient_that_is_no_number_stops_before_the_update(tmp_path: Path) -> None:
    class Exploding(Gru):
        def loss(self, batch: Batch, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
            found = super().loss(batch, smoothing, rdrop)
            zero = (self.output.bias[0] * 0.0).sqrt()  # 0, whose gradient is 0 · ∞
            return Loss(found.total + zero, found.count, found.parts)

    model = Exploding()
    with torch.no_grad():
        model.output.bias.fill_(1.0)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    with pytest.raises(TrainingError, match=r"step 1: the gradient's norm is (nan|inf); no step is saved yet"):
        run(model, tmp_path)
    assert same(dict(model.named_parameters()), before)


class Greedy(Gru):
    """Needs more memory than there is, for a batch as wide as the costliest."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__(p=0.5)
        self.error = error

    def loss(self, batch: Batch, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
        if batch.target.shape[1] == 10 and self.error:
            raise self.error
        return super().loss(batch, smoothing, rdrop)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        MemoryError(),
    ],
)
def test_a_batch_that_does_not_fit_is_told_at_the_start_with_advice(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(TrainingError, match=r"lower training\.batch_tokens \(now 777\) or the longest row"):
        run(Greedy(error), tmp_path, batch_tokens=777)
    assert RunFolder(tmp_path).steps() == []


def test_other_errors_of_the_trial_are_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(Greedy(RuntimeError("shapes differ")), tmp_path)


def test_a_real_lack_of_memory_is_recognised(tmp_path: Path) -> None:
    class Huge(Gru):
        def loss(self, batch: Batch, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
            torch.empty(2**59)
            return super().loss(batch, smoothing, rdrop)

    with pytest.raises(TrainingError, match="does not fit in memory"):
        run(Huge(), tmp_path)


def test_the_trial_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(p=0.5)
    seen: list[Any] = []

    def stop(self: object, total_steps: int, step: int, facts: object) -> None:
        seen.append((torch.get_rng_state(), [p.grad for p in model.parameters()]))
        raise KeyError

    monkeypatch.setattr(Told, "start", stop)
    before = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    generator = torch.get_rng_state()
    with pytest.raises(KeyError):
        run(model, tmp_path, report=Told())
    assert torch.equal(seen[0][0], generator)
    assert all(gradient is None for gradient in seen[0][1])
    assert same(tensors_of(model), before)  # among them a buffer that counts calls
    assert RunFolder(tmp_path).steps() == []


def test_a_changed_recipe_is_refused_unless_it_is_a_fork(tmp_path: Path) -> None:
    run(made(), tmp_path, steps=8, save_every=4)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.name != "lock")
    with pytest.raises(
        ValueError, match=r"training\.learning_rate was 0\.01 and is 0\.02, training\.steps was 8 and is 12"
    ):
        run(made(), tmp_path, steps=12, save_every=4, learning_rate=0.02)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.name != "lock") == before
    told = Told()
    changes = {"steps": 12, "save_every": 4, "learning_rate": 0.02, "ema": 0.5}
    outcome = run(made(), tmp_path, fork=True, report=told, validate=validate, **changes)
    assert outcome.step == 12
    assert told.notes[-1] == f"{tmp_path}: finished after step 8"
    assert [event["step"] for event in metrics(tmp_path) if "loss" in event] == [3, 6, 8, 9, 12]
    assert run(made(), tmp_path, **changes) == outcome


def test_a_fork_forgets_which_weights_the_run_before_it_ended_with(tmp_path: Path) -> None:
    config = {"save_every": 2, "validate_every": 2, "keep": 1}
    first = run(made(), tmp_path, steps=6, average=3, validate=Watcher(*[1.0] * 4), best=("score", "max"), **config)
    assert first.weights == (2, 4, 6)
    model = made()
    outcome = run(
        model, tmp_path, steps=8, average=1, fork=True, validate=Watcher(9.0), best=("score", "max"), **config
    )
    assert (outcome.weights, outcome.metrics["score"]) == ((8,), 9.0)
    assert same(tensors_of(model), RunFolder(tmp_path).tensors(8, "model"))


def test_precision_is_chosen_once_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for first in (True, False):
        folder = tmp_path / str(first)
        monkeypatch.setattr(machine, "bf16_products", lambda first=first: first)
        with pytest.raises(TrainingError):
            run(NeverAnswers(calls=8), folder, precision="auto", save_every=1, steps=6)
        monkeypatch.setattr(machine, "bf16_products", lambda first=first: not first)
        model = made(Attention)
        with pytest.raises(ValueError, match="does not fit the model"):
            run(model, folder, precision="auto", save_every=1, steps=6)
        plain = made()
        outcome = run(plain, folder, precision="auto", save_every=1, steps=6)
        assert outcome.precision == ("bf16" if first else "fp32")
        assert plain.precision == (torch.bfloat16 if first else torch.float32)
    assert run(made(), tmp_path / "c", precision="bf16", steps=1).precision == "bf16"


def test_another_machine_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(made(), tmp_path, steps=2)
    monkeypatch.setattr(machine, "describe", lambda: "a slide rule")
    told = Told()
    run(made(), tmp_path, steps=2, report=told)
    assert "is a slide rule: the results may differ" in told.notes[0]


def test_a_measure_that_is_not_there_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"validation gave score, other, but no 'scores'; did you mean 'score'\?"):
        run(made(), tmp_path, validate=Watcher(1.0), best=("scores", "min"), validate_every=1)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a model with a loss"):
        run(nn.Linear(2, 2), tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_error_in_a_batch_comes_out(tmp_path: Path) -> None:
    class Torn(Batches):
        def at(self, number: int) -> Batch:
            if number == 9:
                raise OSError("the file is gone")
            return super().at(number)

    with pytest.raises(OSError, match="the file is gone"):
        run(made(), tmp_path, Torn(), accumulate=1, save_every=9)
    assert RunFolder(tmp_path).steps() == [9]


def test_the_state_is_json_for_people_too(tmp_path: Path) -> None:
    run(made(), tmp_path, steps=4, save_every=2, validate=validate)
    state = json.loads((tmp_path / "step-000004" / "state.json").read_text())
    assert (state["step"], state["finished"], state["saved"], state["best_step"]) == (4, True, [2, 4], 4)
    begun = json.loads((tmp_path / "run.json").read_text())
    assert begun["identity"]["training"]["steps"] == 4
    assert "torch" in begun["facts"]["the machine"]


def test_the_reference_run_uses_the_plain_ways_and_says_so(tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks(Gru):
        def loss(self, batch: Any, smoothing: float = 0.0, rdrop: float = 0.0) -> Loss:
            seen.append(is_plain())
            return super().loss(batch, smoothing, rdrop)

    for reference in (True, False):
        seen.clear()
        told = Told()
        run(made(Looks), tmp_path / str(reference), reference=reference, steps=3, report=told)
        assert seen
        assert set(seen) == {reference}
        (facts,) = (event[3] for event in told.events if event[0] == "start")
        assert (facts["kernels"] == "the plain formulas") == reference
    assert not is_plain()
