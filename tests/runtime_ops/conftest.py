from __future__ import annotations

import pytest

from graphopt.runtime_ops.instructions import ISA_VARIABLE
from tests.native import INSTRUCTIONS, skip_without


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels for one set of instructions; skips where this machine lacks it, and for nothing else."""
    skip_without(request.param)
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests that differ in their instructions alone follow one another: they share what they are compared with."""
    places: dict[str, int] = {}
    items.sort(key=lambda item: places.setdefault(_whatever_instructions(item), len(places)))


def _whatever_instructions(item: pytest.Item) -> str:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return item.nodeid.replace(str(parameters.get("instructions", "")), "", 1)
