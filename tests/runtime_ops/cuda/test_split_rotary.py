"""The CUDA kernel of SplitRotary against its definition, in the host interpreter and on a GPU, and in onnxruntime."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from graphopt.runtime_ops.library import PATH_VARIABLE
from graphopt.runtime_ops.split_rotary.spec.op import reference
from tests.runtime_ops.cuda import interface
from tests.runtime_ops.hostile import Case, Tensor
from tests.runtime_ops.states import by_kernel

# Half a unit in the last place of what is stored.
ROUNDING = {np.float32: 0.0, np.float16: 2**-11, ml_dtypes.bfloat16: 2**-8}

# Whole heads and parts of them, grouped or not; columns of one block and of several; both orders of pairs.
HEADS = [
    {"heads": 4, "kv_heads": 2, "rotary": 16, "rotary_interleaved": 0},
    {"heads": 4, "kv_heads": 2, "rotary": 8, "rotary_interleaved": 1},
    {"heads": 1, "kv_heads": 1, "rotary": 2, "rotary_interleaved": 0},
    {"heads": 20, "kv_heads": 4, "rotary": 16, "rotary_interleaved": 1},
]


def inputs(dtype: type, heads: int, kv_heads: int, rotary: int, **others: int) -> list[np.ndarray]:
    del others
    random = np.random.default_rng(0)
    angles = random.uniform(0, 6, (2, 3, rotary // 2))
    arrays = [random.standard_normal((2, 3, (heads + 2 * kv_heads) * 16)), np.cos(angles), np.sin(angles)]
    return [array.astype(dtype) for array in arrays]


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("heads", HEADS)
def test_it_is_what_the_operator_means(kernels: ctypes.CDLL, dtype: type, heads: dict[str, Any]) -> None:
    arrays = inputs(dtype, **heads)
    outputs = interface.split_rotary(kernels, *arrays, **heads)
    expected = reference(*(array.astype(np.float64) for array in arrays), **heads)
    size = np.abs(arrays[0].astype(np.float64)).max()
    # two products and a sum in float32 of numbers up to `size`, whose sum is up to twice that
    limit = (3 * np.finfo(np.float32).eps + 2 * ROUNDING[dtype]) * size
    for output, stated in zip(outputs, expected, strict=True):
        assert np.abs(output.astype(np.float64) - stated).max() <= limit
    assert np.array_equal(outputs[2].astype(np.float64), expected[2])


def test_other_types_are_refused_and_nothing_stays_nothing(kernels: ctypes.CDLL) -> None:
    call = interface.SplitRotary(*[None] * 6, 1, 1, 1, 2, 2, 0, 11)
    with pytest.raises(RuntimeError, match="float32, float16 and bfloat16"):
        interface.check(kernels.graphopt_cuda_split_rotary(ctypes.byref(call), None))
    call.tokens = 0
    interface.check(kernels.graphopt_cuda_split_rotary(ctypes.byref(call), None))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_onnxruntime_gives_the_bits_of_the_c_interface(
    interpreted: ctypes.CDLL, interpreted_library: Path, monkeypatch: pytest.MonkeyPatch, dtype: type
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, str(interpreted_library))
    heads = HEADS[0]
    arrays = inputs(dtype, **heads)
    names = ("x", "cos", "sin")
    case = Case("SplitRotary", {n: Tensor(array, "fed") for n, array in zip(names, arrays, strict=True)}, dict(heads))
    expected = interface.split_rotary(interpreted, *arrays, **heads)
    for output, stated in zip(by_kernel(case), expected, strict=True):
        assert np.array_equal(output, stated)
    case.inputs["sin"].values = arrays[2][:1]
    with pytest.raises(Exception, match=r"ai.graphopt node 'node': sin must be \[2, 3, 8\]"):
        by_kernel(case)
    for tensor in case.inputs.values():
        tensor.values = tensor.values[:0]
    assert [output.shape for output in by_kernel(case)] == [(0, 3, 64), (0, 3, 32), (0, 3, 32)]
