from __future__ import annotations

import pytest

from tests.native import INSTRUCTIONS, ISA_VARIABLE, skip_without


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels for one set of instructions; skips where this machine lacks it, and for nothing else."""
    skip_without(request.param)
    monkeypatch.setenv(ISA_VARIABLE, request.param)
    return str(request.param)
