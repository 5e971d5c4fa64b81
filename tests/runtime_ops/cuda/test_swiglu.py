"""The CUDA kernel of SwiGLU against its definition, in the host interpreter and on a GPU, and in onnxruntime."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from graphopt.runtime_ops.library import PATH_VARIABLE
from graphopt.runtime_ops.swiglu.spec.op import reference
from tests.runtime_ops.cuda import interface
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.states import by_kernel

# Half a unit in the last place of what is stored, and some roundings of float32.
ROUNDING = {np.float32: 0.0, np.float16: 2**-11, ml_dtypes.bfloat16: 2**-8}


def normal(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    return (3 * np.random.default_rng(0).standard_normal(shape)).astype(dtype)


def check(x: np.ndarray, y: np.ndarray) -> None:
    wide = x.astype(np.float64)
    expected = reference(wide)
    gate, up = np.abs(np.split(wide, 2, axis=-1))
    # exp2 of a GPU is off by two units in the last place, its argument by half of one; a sum, a quotient, two products
    limit = 6 * np.finfo(np.float32).eps * gate * up + ROUNDING[x.dtype.type] * np.abs(expected) + 2.0**-25
    assert (np.abs(y.astype(np.float64) - expected) <= limit).all()


# Whole words of 16 bytes; rows at no such multiple; a column beyond a block; one number.
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [(3, 64), (2, 30), (1, 2 * 2056), (1, 2 * 257), (5, 2)])
def test_it_is_what_the_operator_means(kernels: ctypes.CDLL, dtype: type, shape: tuple[int, int]) -> None:
    x = normal(shape, dtype)
    check(x, interface.swiglu(kernels, x))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_tensors_that_lie_anywhere_and_many_rows(kernels: ctypes.CDLL, dtype: type) -> None:
    x = normal((4, 64), dtype)
    assert np.array_equal(interface.swiglu(kernels, x, shift=1), interface.swiglu(kernels, x))
    many = normal((66000, 2), dtype)  # more than a grid has rows of blocks
    if kernels.on_gpu:
        check(many, interface.swiglu(kernels, many))


def test_other_types_are_refused_and_nothing_stays_nothing(kernels: ctypes.CDLL) -> None:
    call = interface.SwiGLU(None, None, 1, 1, 11)
    with pytest.raises(RuntimeError, match="float32, float16 and bfloat16"):
        interface.check(kernels.graphopt_cuda_swiglu(ctypes.byref(call), None))
    call.rows = 0
    interface.check(kernels.graphopt_cuda_swiglu(ctypes.byref(call), None))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_onnxruntime_gives_the_bits_of_the_c_interface(
    interpreted: ctypes.CDLL, interpreted_library: Path, monkeypatch: pytest.MonkeyPatch, dtype: type
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, str(interpreted_library))
    x = normal((2, 3, 48), dtype)
    y = by_kernel(Case("SwiGLU", {"x": Tensor(x, "fed")}))[0]
    assert np.array_equal(y.reshape(6, 24), interface.swiglu(interpreted, x.reshape(6, 48)))
    for shape in ((0, 48), (3, 0)):
        assert by_kernel(Case("SwiGLU", {"x": Tensor(np.zeros(shape, dtype), "fed")}))[0].shape == (
            shape[0],
            shape[1] // 2,
        )
    with pytest.raises(Exception, match=r"ai.graphopt node 'node': the last axis of x is 5, which has no two halves"):
        by_kernel(Case("SwiGLU", {"x": Tensor(np.zeros((1, 5), dtype), "fed")}))
