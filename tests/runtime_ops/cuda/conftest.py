from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.runtime_ops.cuda import interface
from tests.runtime_ops.cuda import interpreted as interpreter


@pytest.fixture(scope="session")
def interpreted_library() -> Path:
    """The library for GPUs, whose kernels the host interpreter runs: operators of onnxruntime's CPU provider."""
    compiler = interpreter.compiler() or pytest.skip("there is no C++ compiler")
    return interpreter.build("operators", interpreter.sources(), compiler)


@pytest.fixture(scope="session")
def interpreted(interpreted_library: Path) -> ctypes.CDLL:
    """The C interface of all CUDA operators (``cuda/c_interface.h``), whose kernels the host interpreter runs."""
    return interface.declare(interpreter.load(interpreted_library))
