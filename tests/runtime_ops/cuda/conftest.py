from __future__ import annotations

import ctypes

import pytest

from graphopt.runtime_ops import library_path
from tests.runtime_ops.cuda import interface
from tests.runtime_ops.cuda import interpreted as interpreter


@pytest.fixture(scope="session")
def on_gpu() -> ctypes.CDLL:
    """The same interface of the library that nvcc built, on the GPU of this machine; skips where there is none."""
    library = library_path("cuda") or pytest.skip("the library of operators for GPUs is not built: no GPU, or no nvcc")
    torch = pytest.importorskip("torch", reason="torch is not installed, which gives memory of a GPU")
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU")
    return interface.declare(interpreter.load(library), on_gpu=True)


@pytest.fixture(scope="session", params=["interpreted", "on_gpu"])
def kernels(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """The interface in the host interpreter, and on a GPU: for tests whose arrays are ``interface.Buffer``."""
    return request.getfixturevalue(request.param)
