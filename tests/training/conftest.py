"""Runs in processes of their own, which may be killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.toys import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A process that has torch loaded and starts runs."""
    made = Server()
    yield made
    made.close()
