"""Schedules against formulas and torch's schedulers, updates against torch's AdamW and Muon, means against numpy."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.toys import Gru
from weft.config import GPTConfig, TrainingConfig
from weft.models.gpt import GPT
from weft.training.optim import Mean, Optimizer, average, learning_rate, linear_weights, orthogonal, shortened


def rates(**settings: Any) -> list[float]:
    config = TrainingConfig(**settings)
    return [learning_rate(config, step) for step in range(1, config.steps + 1)]


def by_torch(make: Any, warmup: int, steps: int, peak: float) -> list[float]:
    """What torch's schedulers give: a line up to the peak at step ``warmup``, and ``make`` from there on."""
    from torch.optim.lr_scheduler import LinearLR, SequentialLR

    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=peak)
    up = LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
    schedule = SequentialLR(optimizer, [up, make(optimizer)], milestones=[warmup - 1])
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_inverse_sqrt_is_the_schedule_of_2017() -> None:
    # lrate = dim^-0.5 · min(step^-0.5, step · warmup^-1.5), whose highest is (dim · warmup)^-0.5
    dim, warmup = 512, 40
    expected = [dim**-0.5 * min(t**-0.5, t * warmup**-1.5) for t in range(1, 201)]
    peak = (dim * warmup) ** -0.5
    assert rates(steps=200, warmup=warmup, learning_rate=peak, schedule="inverse_sqrt") == pytest.approx(expected)


def test_cosine_is_that_of_torch() -> None:
    from torch.optim.lr_scheduler import CosineAnnealingLR

    expected = by_torch(lambda o: CosineAnnealingLR(o, T_max=90, eta_min=0.05 * 0.3), 10, 100, 0.3)
    given = rates(steps=100, warmup=10, learning_rate=0.3, schedule="cosine", final_rate=0.05)
    assert given == pytest.approx(expected)
    assert given[9] == 0.3
    assert given[-1] == pytest.approx(0.3 * 0.05)


def test_wsd_goes_up_stays_and_goes_down_in_lines() -> None:
    given = rates(steps=100, warmup=10, learning_rate=0.5, schedule="wsd", decay=0.2, final_rate=0.1)
    corners = np.interp(np.arange(1, 101), [0, 10, 80, 100], [0.0, 0.5, 0.5, 0.05])
    assert given == pytest.approx(corners.tolist())


def test_constant_and_no_warmup() -> None:
    assert rates(steps=5, warmup=0, learning_rate=0.5, schedule="constant") == [0.5] * 5
    assert rates(steps=4, warmup=2, learning_rate=0.5, schedule="constant") == [0.25, 0.5, 0.5, 0.5]
    assert rates(steps=4, warmup=0, learning_rate=0.5, schedule="inverse_sqrt")[3] == 0.25
    assert rates(steps=3, warmup=0, learning_rate=0.5, schedule="wsd", decay=0.0) == [0.5] * 3


@given(
    schedule=st.sampled_from(["inverse_sqrt", "cosine", "wsd", "constant"]),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 80),
    decay=st.floats(0.0, 0.99),
    final_rate=st.floats(0.0, 0.99),
)
def test_every_schedule_rises_then_never_rises(
    schedule: str, steps: int, warmup: int, decay: float, final_rate: float
) -> None:
    given = rates(schedule=schedule, steps=steps, warmup=warmup, decay=decay, final_rate=final_rate, learning_rate=2.0)
    assert all(0.0 <= rate <= 2.0 for rate in given)
    assert given[:warmup] == sorted(given[:warmup])
    assert all(a >= b - 1e-12 for a, b in pairwise(given[max(warmup - 1, 0) :]))


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()


def test_updates_are_those_of_plain_adamw_with_decay_for_matrices_only() -> None:
    config = TrainingConfig(steps=9, warmup=3, learning_rate=0.1, weight_decay=0.3, beta1=0.8, beta2=0.95, eps=1e-7)
    mine, plain = small_model(), small_model()
    matrices = [p for p in plain.parameters() if p.dim() == 2]
    vectors = [p for p in plain.parameters() if p.dim() == 1]
    assert (len(matrices), len(vectors)) == (2, 3)
    torch_adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        eps=1e-7,
        foreach=False,
    )
    optimizer = Optimizer(mine, config)
    for step in range(1, 10):
        if step == 5:  # a new one with the same moments goes on as if it were the old one
            stored = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
            optimizer = Optimizer(mine, config)
            for name, tensor in optimizer.tensors().items():
                tensor.copy_(stored[name])
        for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for group in torch_adam.param_groups:
            group["lr"] = learning_rate(config, step)
        assert optimizer.step(step) == learning_rate(config, step)
        torch_adam.step()
        assert all(p.grad is None for p in mine.parameters())
    for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_what_is_not_trained_is_left_alone() -> None:
    model = small_model()
    frozen = model[0].weight.requires_grad_(False).clone()
    optimizer = Optimizer(model, TrainingConfig(weight_decay=0.5))
    assert "0.weight" not in optimizer.parameters
    assert [float(g.abs().sum()) for g in optimizer.gradients()] == [0.0] * 4  # no part in a step: zero
    optimizer.step(1)
    assert torch.equal(model[0].weight, frozen)


def test_a_tied_parameter_is_updated_once() -> None:
    assert [name for name in Optimizer(Gru(), TrainingConfig()).parameters if "output" in name] == ["output.bias"]


@pytest.mark.parametrize("shape", [(5, 5), (3, 8), (8, 3), (1, 6)])
def test_orthogonal_takes_singular_values_through_the_quintic_five_times(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.norm()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    (found,) = orthogonal(matrix[None])
    torch.testing.assert_close(found, u @ s.diag() @ v, rtol=1e-10, atol=1e-10)
    values = torch.linalg.svdvals(found)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3


@pytest.mark.parametrize("shape", [(64, 256), (256, 64), (64, 64)])
@pytest.mark.parametrize("rank", [2, 63])
def test_orthogonal_in_single_precision_of_matrices_with_next_to_no_rank(shape: tuple[int, int], rank: int) -> None:
    """Directions that are there come out as in double precision, the others as small as they were meant to be."""
    sizes = torch.cat([torch.ones(rank), torch.full((min(shape) - rank,), 1e-5)]).double()
    u, v = (torch.linalg.qr(torch.randn(side, min(shape), dtype=torch.float64))[0] for side in shape)
    matrix = u @ sizes.diag() @ v.T
    expected = orthogonal(matrix[None])
    torch.testing.assert_close(orthogonal(matrix[None].float()).double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [(6, 6), (4, 12), (12, 4)])
def test_each_of_several_is_made_orthogonal_for_itself(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, dtype=torch.float64) * torch.tensor([1.0, 1e-3, 50.0]).view(3, 1, 1)
    found = orthogonal(matrices)
    for matrix, each in zip(matrices, found, strict=True):
        torch.testing.assert_close(each, orthogonal(matrix[None])[0], rtol=1e-12, atol=1e-12)


def test_orthogonal_of_nothing_is_nothing() -> None:
    assert torch.equal(orthogonal(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_muon_is_for_the_matrices_of_linear_layers() -> None:
    config = GPTConfig(dim=16, num_heads=2, num_layers=1, ffn_dim=24, max_len=8, tie=False)
    parts = ["attention.query", "attention.key", "attention.value", "attention.output"]
    parts += ["feed_forward.inner", "feed_forward.outer"]
    assert linear_weights(GPT(config, 30)) == {f"blocks.0.{part}.weight" for part in parts}
    assert linear_weights(Gru()) == set()  # its output layer is the embedding


def test_muons_updates_are_those_of_torch_and_a_new_one_goes_on_bit_for_bit() -> None:
    """torch computes in bf16, so updates agree to its two or three digits; what AdamW has agrees exactly."""
    config = TrainingConfig(
        steps=9, warmup=3, learning_rate=0.1, weight_decay=0.3, optimizer="muon", beta1=0.8, beta2=0.95, eps=1e-7
    )

    def models() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(5, 12), nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 6))

    mine, broken, theirs = models(), models(), models()
    muon = torch.optim.Muon(
        [p for name, p in theirs.named_parameters() if name in ("2.weight", "3.weight")],
        weight_decay=0.3,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        [
            {"params": [theirs[0].weight], "weight_decay": 0.3},
            {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.8, 0.95),
        eps=1e-7,
        fused=True,
    )
    optimizer, resumed = Optimizer(mine, config), Optimizer(broken, config)
    for step in range(1, 10):
        if step == 5:
            stored = {name: tensor.clone() for name, tensor in resumed.tensors().items()}
            resumed = Optimizer(broken, config)
            assert resumed.tensors().keys() == stored.keys()
            for name, tensor in resumed.tensors().items():
                tensor.copy_(stored[name])
        for p, q, r in zip(mine.parameters(), broken.parameters(), theirs.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad, r.grad = p.grad.clone(), p.grad.clone()
        for group in (*muon.param_groups, *adam.param_groups):
            group["lr"] = learning_rate(config, step)
        assert optimizer.step(step) == resumed.step(step) == learning_rate(config, step)
        muon.step()
        adam.step()
    for (name, p), q, r in zip(mine.named_parameters(), broken.parameters(), theirs.parameters(), strict=True):
        assert p.grad is None
        assert torch.equal(p, q), name
        apart = float((p - r).detach().norm() / r.detach().norm())
        assert apart < (0.02 if name in ("2.weight", "3.weight") else 1e-6), name
    assert "momentum.2.weight" in optimizer.tensors()
    assert "exp_avg.2.weight" not in optimizer.tensors()


@pytest.mark.parametrize(("count", "clip"), [(1, 0.0), (7, 0.0), (7, 0.1), (7, 1e9), (1, 1.0)])
def test_shortened_is_a_division_and_torchs_clipping(count: int, clip: float) -> None:
    gradients = [torch.randn(3, 4), torch.randn(5)]
    parameters = [g.clone().requires_grad_() for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g / count
    expected = torch.nn.utils.clip_grad_norm_(parameters, clip or math.inf)
    norm, by = shortened(gradients, count, clip)
    assert norm == pytest.approx(float(expected))
    for p, g in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(p.grad, g * by, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_norm_tells_what_is_no_number(bad: float) -> None:
    assert not math.isfinite(shortened([torch.tensor([1.0, bad]), torch.tensor([2.0])], 3, 1.0)[0])


def test_nothing_is_not_shortened() -> None:
    assert shortened([torch.zeros(3)], 4, 1.0) == (0.0, 0.25)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_step_takes_gradients_times_a_number(optimizer: str) -> None:
    config = TrainingConfig(optimizer=optimizer, warmup=0)
    one, other = small_model().float(), small_model().float()
    other.load_state_dict(one.state_dict())
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        p.grad = torch.randn_like(p)
        q.grad = p.grad * 0.25
    Optimizer(one, config).step(1, 0.25), Optimizer(other, config).step(1)
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("decay", [0.05, 0.5, 0.999])
def test_the_mean_is_its_formula(decay: float) -> None:
    parameter = nn.Parameter(torch.randn(4, dtype=torch.float64))
    mean = Mean({"p": parameter}, decay)
    expected = parameter.detach().numpy().copy()
    for t in range(1, 30):
        parameter.data = torch.randn(4, dtype=torch.float64)
        mean.update(t)
        d = min(decay, (1 + t) / (10 + t))
        expected = d * expected + (1 - d) * parameter.detach().numpy()
    np.testing.assert_allclose(mean.values["p"].numpy(), expected, rtol=1e-12)
    assert not mean.values["p"].requires_grad


def test_swapping_is_exact_and_undone_by_errors_too() -> None:
    parameter = nn.Parameter(torch.randn(1000))
    mean = Mean({"p": parameter}, 0.9)
    with torch.no_grad():
        parameter.mul_(1.1)
    before, average_before = parameter.detach().clone(), mean.values["p"].clone()
    storage = parameter.data_ptr()

    def fail() -> None:
        with mean.swapped():
            assert torch.equal(parameter, average_before)
            assert torch.equal(mean.values["p"], before)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(parameter, before)
    assert torch.equal(mean.values["p"], average_before)
    assert parameter.data_ptr() == storage


def test_average_is_the_mean_in_fp64() -> None:
    models: list[dict[str, Tensor]] = [
        {"w": torch.randn(50) * 10.0**n, "steps": torch.tensor(n), "h": torch.randn(3).bfloat16()} for n in range(5)
    ]
    found = average(iter(models))
    expected = np.mean([m["w"].numpy().astype(np.float64) for m in models], axis=0).astype(np.float32)
    assert found["w"].dtype == torch.float32
    assert found["w"].numpy().tolist() == expected.tolist()
    assert found["steps"].item() == 4
    assert found["h"].dtype == torch.bfloat16
    one = average([models[0]])
    assert torch.equal(one["w"], models[0]["w"])
    with pytest.raises(ValueError, match="at least one"):
        average([])
