from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.analysis.structure.product_codes import StoredCodes, stored_codes
from graphopt.graph.weights import Inline, WeightTensor, expression_of
from graphopt.numerics.formats import FORMATS, format_of, format_stored_as
from graphopt.passes.common.packing import packed_tensors
from graphopt.passes.common.table_layout import PackCodes, TileScales, UnpackCodes, UntileScales
from graphopt.quantization.rounding import round_to_nearest
from graphopt.quantization.rounding.lazy_codes import quantize_lazily
from graphopt.quantization.rounding.scales import Scale
from graphopt.runtime_ops import OPERATORS
from graphopt.runtime_ops.matmul_table.spec.op import dequantize
from tests.graph.weights.counting import CountingExpression

FLOAT16 = ir.DataType.FLOAT16
seeds = st.integers(0, 1000)


def weight(rows: int, columns: int) -> ir.Value:
    array = np.random.default_rng(rows).standard_normal((rows, columns)).astype(np.float32)
    return ir.val("w", const_value=ir.tensor(array, name="w"))


def meant(tensors: dict[str, ir.TensorProtocol], table: Any, rows: int, columns: int, group: int) -> np.ndarray:
    values = table.values.astype(np.float32)
    codes, scales = (tensors[part].numpy() for part in ("codes", "scales"))
    zero_points = tensors["zero_points"].numpy() if table.zero_point else np.zeros((1, 1, 1), scales.dtype)
    return dequantize(codes, scales, values, zero_points, rows, columns, group)


def product(reader: ir.Node) -> ir.Node:
    """Return a product of what ``reader`` dequantizes."""
    x = ir.val("x", ir.DataType.FLOAT, ["rows", "width"])
    return ir.node("MatMul", [x, reader.outputs[0]], name="product")


def initializers(tensors: dict[str, Any], graph: ir.Graph) -> dict[str, ir.Value]:
    values = {name: ir.val(name, const_value=tensor) for name, tensor in tensors.items()}
    for value in values.values():
        graph.register_initializer(value)
    return values


def packed_places(
    source: ir.Value, table: Any, group: int, scale: Scale = "extreme", *, half: bool = False
) -> dict[str, ir.TensorProtocol]:
    """Return the codes of our own form, packed."""
    stored = stored_places(source, table, group, scale, half=half)
    return packed_tensors(stored, ir.DataType.FLOAT16 if half else ir.DataType.FLOAT)


def stored_places(
    source: ir.Value, table: Any, group: int, scale: Scale = "extreme", *, half: bool = False
) -> StoredCodes:
    """Return a product's codes in our own form."""
    graph = ir.Graph([], [], nodes=[], name="g")
    given = quantize_lazily(source.const_value, table, group, scale, half=half, standard=False)
    tensors = {**given, "table": ir.tensor(table.values.astype(np.float32), name="table")}
    tensors.setdefault("zero_points", ir.tensor(np.zeros((1, 1), given["scales"].dtype.numpy()), name="none"))
    values = initializers(tensors, graph)
    inputs = [values[name] for name in ("codes", "scales", "table", "zero_points")]
    stored = stored_codes(product(OPERATORS["Dequantize"].node(inputs, {"group": group}, name="reader")))
    assert isinstance(stored, StoredCodes)
    return stored


@pytest.mark.parametrize("name", ["int3", "uint5", "fp6-e3m2", "nf4", "ternary"])
@pytest.mark.parametrize(("rows", "columns", "group"), [(64, 32, 16), (50, 20, 16), (10, 3, 10)])
@pytest.mark.parametrize("half", [True, False])
def test_packed_parts_mean_what_was_rounded(name: str, rows: int, columns: int, group: int, half: bool) -> None:
    source, table = weight(rows, columns), format_of(name)
    tensors = packed_places(source, table, group, "least_squares", half=half)
    stored = np.float16 if half else np.float32
    assert source.const_value is not None
    expected = round_to_nearest(source.const_value.numpy(), table, group, "least_squares", scale_type=stored)
    assert tensors["scales"].numpy().dtype == stored
    assert np.array_equal(meant(tensors, table, rows, columns, group), expected.dequantize())


def test_nothing_is_computed_before_it_is_read() -> None:
    source = weight(32, 8)
    source.const_value = WeightTensor(CountingExpression(expression_of(source.const_value), "packed"))
    made = packed_places(source, FORMATS["nf4"], 16)
    quantize_lazily(source.const_value, FORMATS["int4"], 16, "extreme", half=True)
    assert not CountingExpression.counts["packed"]
    made["codes"].numpy()
    assert CountingExpression.counts["packed"] == 1


def test_a_format_without_a_type_has_no_standard_form() -> None:
    with pytest.raises(ValueError, match="ONNX has no type for nf4"):
        quantize_lazily(weight(32, 8).const_value, FORMATS["nf4"], 16, "extreme")


@pytest.mark.parametrize("name", ["int4", "uint4", "int8", "uint8", "int2"])
def test_what_onnx_stores_is_packed_again_without_a_change(name: str) -> None:
    table = FORMATS[name]
    parts = quantize_lazily(weight(48, 20).const_value, table, 16, "extreme", half=True)
    inputs = list(initializers(parts, ir.Graph([], [], nodes=[], name="g")).values())
    reader = ir.node("DequantizeLinear", inputs, {"axis": 0, "block_size": 16})
    codes = stored_codes(product(reader))
    assert isinstance(codes, StoredCodes)
    stored = [tensor.numpy().astype(np.float64) for tensor in parts.values()]
    shift = np.repeat(stored[2], 16, axis=0) if table.zero_point else 0.0
    expected = (stored[0] - shift) * np.repeat(stored[1], 16, axis=0)
    for dtype in (ir.DataType.FLOAT16, ir.DataType.FLOAT):
        assert np.array_equal(meant(packed_tensors(codes, dtype), table, 48, 20, 16), expected)


def test_integer_types_have_a_format_and_others_have_not() -> None:
    assert format_stored_as(ir.DataType.UINT4) is FORMATS["uint4"]
    assert format_stored_as(ir.DataType.FLOAT4E2M1) is None
    assert format_stored_as(ir.DataType.INT32) is None


@given(
    rows=st.integers(1, 70), columns=st.integers(1, 40), bits=st.integers(1, 8), groups=st.integers(1, 5), seed=seeds
)
def test_unpacking_undoes_packing(rows: int, columns: int, bits: int, groups: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (rows, columns)).astype(np.uint8)
    numbers = random.standard_normal((groups, columns)).astype(np.float16)
    back = (
        UnpackCodes(PackCodes(Inline.from_array(codes), bits), rows, columns),
        UntileScales(TileScales(Inline.from_array(numbers), FLOAT16), columns),
    )
    for expression, expected in zip(back, (codes, numbers), strict=True):
        assert (expression.shape, expression.dtype.numpy()) == (expected.shape, expected.dtype)
        assert np.array_equal(expression.numpy(), expected)


@pytest.mark.parametrize("name", [name for name, format in FORMATS.items() if format.levels])
def test_bits_follow_from_the_table(name: str) -> None:
    table = FORMATS[name]
    assert max(1, (len(table.values) - 1).bit_length()) == table.bits


def test_a_type_that_does_not_hold_the_scales_is_refused() -> None:
    codes = stored_places(weight(32, 8), FORMATS["nf4"], 16)
    with pytest.raises(ValueError, match="promised as FLOAT16, which does not hold all of them"):
        packed_tensors(codes, ir.DataType.FLOAT16)["scales"].numpy()
