"""Tensors of types that onnxruntime's own conversions refuse."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from graphopt.ort.session import array_of, ort_value, run, session_of

EACH_TYPE = pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])


@EACH_TYPE
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()])
def test_a_value_lies_in_the_memory_of_its_array(dtype: npt.DTypeLike, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    value = ort_value(array)
    assert value.shape() == list(shape)
    if array.size:
        assert value.data_ptr() == array.ctypes.data
    copy = array_of(value)
    assert (copy.dtype, copy.shape) == (array.dtype, shape)
    array[...] = 2
    assert (copy == 1).all(), "it is a copy"
    assert (array_of(value) == 2).all()


@EACH_TYPE
def test_a_session_takes_and_gives_any_type(dtype: npt.DTypeLike) -> None:
    x = ir.val("x", ir.DataType.from_numpy(np.dtype(dtype)), ["m", "n"])
    nodes = [ir.node("Transpose", [x], {"perm": [1, 0]}), ir.node("Shape", [x])]
    for node, name, type_ in zip(nodes, ("turned", "shape"), (x.dtype, ir.DataType.INT64), strict=True):
        node.outputs[0].name, node.outputs[0].dtype = name, type_
    outputs = [node.outputs[0] for node in nodes]
    model = ir.Model(ir.Graph([x], outputs, nodes=nodes, opset_imports={"": 23}, name="one"), ir_version=10)
    array = np.arange(6).reshape(2, 3).astype(dtype)
    with session_of(model) as session:
        transpose, shape = run(session, None, {"x": array})
        (single_output,) = run(session, ["turned"], {"x": array})
    assert transpose.dtype == array.dtype
    assert np.array_equal(transpose, array.T)
    assert np.array_equal(single_output, transpose)
    assert shape.tolist() == [2, 3]
