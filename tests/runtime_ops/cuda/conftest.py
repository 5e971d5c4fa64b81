from __future__ import annotations

import ctypes

import pytest

from tests.runtime_ops.cuda import interpreted as interpreter


@pytest.fixture(scope="session")
def interpreted() -> ctypes.CDLL:
    """The C interface of all CUDA operators (``cuda/c_interface.h``), whose kernels the host interpreter runs."""
    compiler = interpreter.compiler() or pytest.skip("there is no C++ compiler")
    return interpreter.load(interpreter.build("operators", interpreter.sources(), compiler))
