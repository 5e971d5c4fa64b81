from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tools.bench.parts.machine import Memory


@pytest.fixture(scope="session")
def make_memory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Memory]:
    """Return a function that makes a probe of the memory for one thread, once for a size: it compiles a file of C."""
    return functools.cache(lambda size: Memory(tmp_path_factory.mktemp("memory"), threads=1, cache_bytes=size))
