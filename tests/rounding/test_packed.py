from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.formats import FORMATS, format_of
from graphopt.rounding import round_to_nearest
from graphopt.rounding.lazy import LazyQuantized, quantized
from graphopt.rounding.packed import format_of_codes, repacked_tensors
from graphopt.runtime_ops.matmul_table.spec.op import dequantize
from graphopt.weights import WeightTensor, expression_of
from tests.weights.counting import Counted


def weight(rows: int, columns: int) -> ir.Value:
    array = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    return ir.val("w", const_value=ir.tensor(array, name="w"))


def meant(tensors: dict[str, ir.TensorProtocol], table: Any, rows: int, columns: int, group: int) -> np.ndarray:
    values = table.values.astype(np.float32)
    codes, scales = (tensors[part].numpy() for part in ("codes", "scales"))
    zero_points = tensors["zero_points"].numpy() if table.zero_point else np.zeros((1, 1, 1), scales.dtype)
    return dequantize(codes, scales, values, zero_points, rows, columns, group)


@pytest.mark.parametrize("name", ["int3", "uint5", "fp6-e3m2", "nf4", "ternary"])
@pytest.mark.parametrize(("rows", "columns", "group"), [(64, 32, 16), (50, 20, 16), (10, 3, 10)])
@pytest.mark.parametrize("half", [True, False])
def test_packed_parts_mean_what_was_rounded(name: str, rows: int, columns: int, group: int, half: bool) -> None:
    source, table = weight(rows, columns), format_of(name)
    tensors = LazyQuantized(source, table, group, "least_squares", half=half).packed()
    stored = np.float16 if half else np.float32
    assert source.const_value is not None
    expected = round_to_nearest(source.const_value.numpy(), table, group, "least_squares", scale_type=stored)
    assert tensors["scales"].numpy().dtype == stored
    assert np.array_equal(meant(tensors, table, rows, columns, group), expected.dequantize())


def test_nothing_is_computed_before_it_is_read() -> None:
    source = weight(32, 8)
    source.const_value = WeightTensor(Counted(expression_of(source.const_value), "packed"))
    made = LazyQuantized(source, FORMATS["nf4"], 16, "extreme").packed()
    quantized(source.const_value, FORMATS["int4"], 16, "extreme", half=True)
    assert not Counted.counts["packed"]
    made["codes"].numpy()
    assert Counted.counts["packed"] == 1


def test_a_format_without_a_type_has_no_standard_form() -> None:
    with pytest.raises(ValueError, match="ONNX has no type for nf4"):
        LazyQuantized(weight(32, 8), FORMATS["nf4"], 16, "extreme").tensors()


@pytest.mark.parametrize("name", ["int4", "uint4", "int8", "uint8", "int2"])
def test_what_onnx_stores_is_packed_again_without_a_change(name: str) -> None:
    table = FORMATS[name]
    parts = LazyQuantized(weight(48, 20), table, 16, "extreme", half=True).tensors()
    inputs = [ir.val(part, const_value=tensor) for part, tensor in parts.items()]
    node = ir.node("DequantizeLinear", inputs, {"axis": 0, "block_size": 16})
    stored = [tensor.numpy().astype(np.float64) for tensor in parts.values()]
    shift = np.repeat(stored[2], 16, axis=0) if table.zero_point else 0.0
    expected = (stored[0] - shift) * np.repeat(stored[1], 16, axis=0)
    for dtype in (ir.DataType.FLOAT16, ir.DataType.FLOAT):
        assert np.array_equal(meant(repacked_tensors(node, dtype), table, 48, 20, 16), expected)


def test_integer_types_have_a_format_and_others_have_not() -> None:
    assert format_of_codes(ir.DataType.UINT4) is FORMATS["uint4"]
    assert format_of_codes(ir.DataType.FLOAT4E2M1) is None
    assert format_of_codes(ir.DataType.INT32) is None
