from __future__ import annotations

import pytest

from tests.runtime_ops.kv_cases import attributes_of
from tests.runtime_ops.kv_native import Native
from tests.runtime_ops.test_hostile import INSTRUCTIONS


@pytest.fixture(params=INSTRUCTIONS)
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """KVAttention's kernels for one set of instructions; skips where this machine lacks it, and for nothing else."""
    monkeypatch.setenv("GRAPHOPT_OPS_ISA", request.param)
    try:
        Native().session(attributes_of().for_node())
    except Exception as error:
        if "GRAPHOPT_OPS_ISA" not in str(error):
            raise
        pytest.skip(f"{request.param}: {error}")
    return str(request.param)
