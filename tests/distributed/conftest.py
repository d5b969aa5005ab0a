"""The group of processes that the tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    if not dist.is_available():
        pytest.skip("torch was built without distributed")
    found = Ranks(tmp_path_factory.mktemp("ranks"))
    yield found
    found.stop()
