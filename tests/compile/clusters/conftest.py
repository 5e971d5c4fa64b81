from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graphopt.compile.clusters.executor import ClusterExecutor


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A client of two workers on this machine; Dask gives up on a task of which one worker dies."""
    import dask

    from graphopt.compile.clusters.kinds.local import Local

    with dask.config.set({"distributed.scheduler.allowed-failures": 0}), Local().connect("dask://", 2) as client:
        yield client


@pytest.fixture
def executor(client: Any, tmp_path: Path) -> Iterator[ClusterExecutor]:
    executor = ClusterExecutor(client, patience=20)
    executor.prepare(tmp_path)
    yield executor
    executor.shutdown(cancel_futures=True)
