"""The same start for every test: seeds, threads, hypothesis, and where the larger data is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # parity tests make tiny models; nothing may be fetched

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one core a worker

# No deadline and no health check by the clock: a busy machine is no failure. No example database. In CI every
# run draws the same examples.
settings.register_profile(
    "weft",
    deadline=None,
    database=None,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("weft")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Every test starts from the same random numbers, in whatever order and company it runs."""
    torch.manual_seed(0)
    return 0


def folder_from(variable: str) -> Path:
    """The folder that an environment variable names, or a skip that says what is missing."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    if not Path(value).is_dir():
        pytest.skip(f"{variable} names no folder: {value}")
    return Path(value)


@pytest.fixture(scope="session")
def weft_data() -> Path:
    """The folder of larger data sets, WEFT_DATA."""
    return folder_from("WEFT_DATA")


@pytest.fixture(scope="session")
def weft_weights() -> Path:
    """The folder of published weights, WEFT_WEIGHTS."""
    return folder_from("WEFT_WEIGHTS")
