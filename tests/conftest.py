"""Settings of every test: one thread, and a fresh Dynamo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled by one test is there for the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
