"""Settings of every test: one thread, a fresh Dynamo, nothing measured."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else every new cache folder starts by compiling trials for 7 s


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def no_measured_devices(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What somebody measured on this machine decides nothing here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FXCKPT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled by one test is there for the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
