from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.analysis.structure.cost import weight_totals
from graphopt.analysis.structure.product_codes import dequantize_of
from graphopt.compile.pipeline import optimize
from graphopt.graph import provenance
from graphopt.graph.diagnostics import PassReport
from graphopt.graph.editing import shared_constant
from graphopt.graph.weights import WeightTensor, expression_of
from graphopt.ort.session import open_session
from graphopt.passes.codes.quantize_activations import QuantizeActivations
from graphopt.passes.codes.quantize_weights import LinearFormat, QuantizeWeights
from graphopt.passes.common.input_rounding import round_input
from graphopt.passes.context import Ledger
from graphopt.passes.lower.lower import lower_model
from graphopt.passes.lower.merge_products import DIFFER, MERGE, MergeProducts
from tests.graph.weights.counting import CountingExpression
from tests.graphs import Builder, save
from tests.native import needs_library

ROWS = 64


def readers(*widths: int, format_: str = "nf4", activations: str = "int8", group: int = 32) -> ir.Model:
    """Return y0, y1, ... = x W0, x W1, ... and z = y0 W, with quantized weights [64, width]."""
    build = Builder(np.random.default_rng(0), [], [])
    x = ir.val("x", ir.DataType.FLOAT, ["batch", "length", ROWS])
    weights = [build.weight(f"w{i}", ROWS, width) for i, width in enumerate(widths)]
    made = [build.op("MatMul", [x, weight], widths[i], f"y{i}") for i, weight in enumerate(weights)]
    z = build.op("MatMul", [made[0], build.weight("w", widths[0], 16)], 16, "z")
    graph = ir.Graph([x], [*made, z], nodes=build.nodes, initializers=build.weights, opset_imports={"": 23}, name="g")
    model = ir.Model(graph, ir_version=10)
    quantize(model, format_, activations, group)
    return model


def quantize(model: ir.Model, format_: str, activations: str = "int8", group: int = 32) -> None:
    linear = LinearFormat(format=format_, group=group)
    options = {"linear": linear, "lm_head": None, "embedding": None, "activations": activations}
    QuantizeWeights(**options)(model)


def merge(model: ir.Model) -> Any:
    return MergeProducts()(model).report


def run(model: ir.Model, length: int = 3, native: bool = True) -> list[np.ndarray]:
    """Run the model as it is lowered."""
    model = lower_model(model)
    x = np.random.default_rng(length).standard_normal((2, length, ROWS)).astype(np.float32)
    with TemporaryDirectory() as folder:
        return open_session(save(model, Path(folder)), native=native).run(None, {"x": x})


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def assert_equal(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> None:
    for a, b in zip(before, after, strict=True):
        assert np.array_equal(a, b)


@needs_library
@settings(max_examples=10, deadline=None)
@given(
    widths=st.lists(st.integers(9, 80), min_size=2, max_size=4),  # narrower ones stay in floats
    format_=st.sampled_from(["nf4", "fp6-e3m2", "ternary", "uint3"]),
    activations=st.sampled_from(["int8", "int16", "bfloat16", "float32"]),
    group=st.sampled_from([16, 32, 64]),
    length=st.sampled_from([1, 7, 20]),
)
def test_the_kernel_gives_the_same_bits(
    widths: list[int], format_: str, activations: str, group: int, length: int
) -> None:
    model = readers(*widths, format_=format_, activations=activations, group=group)
    before = run(model, length)
    merge(model)
    assert kinds(lower_model(model)) == {"MatMulTable": 2, "Split": 1}
    assert_equal(before, run(model, length))


@needs_library
def test_trellises_are_merged_where_their_circles_are_whole() -> None:
    model = readers(32, 48, format_="t2")
    before = run(model, 5)
    merge(model)
    assert kinds(lower_model(model))["MatMulTable"] == 2
    assert_equal(before, run(model, 5))
    model = readers(37, 32, format_="t2")
    before, report = run(model, 5), merge(model)
    assert "which are no whole circles of 16" in str(report.skips[0].reason)
    assert_equal(before, run(model, 5))


def test_names_provenance_and_size_stay() -> None:
    model = readers(32, 16, 48)
    outputs, size = [value.name for value in model.graph.outputs], weight_totals(model)
    codes = [model.graph.initializers[f"w{i}.codes"].const_value.numpy() for i in range(3)]
    report = merge(model)
    assert [value.name for value in model.graph.outputs] == outputs
    assert [list(value.shape) for value in model.graph.outputs[:3]] == [["batch", "length", n] for n in (32, 16, 48)]
    assert weight_totals(model) == size
    product = next(node for node in model.graph if node.name == "y0.merged")
    reader = dequantize_of(product)
    assert np.array_equal(reader.inputs[0].const_value.numpy(), np.concatenate(codes, axis=1))
    assert isinstance(reader.inputs[0].const_value, ir.LazyTensor)
    passes, sources = provenance.history(product)
    assert passes[-1] == "merge_products"
    # those before quantize_weights
    assert sorted(sources) == ["w0", "w1", "w2", "y0", "y1", "y2"]
    assert str(report.changes[1].what) == "y0, y1, y2 in one product of 96 columns"
    assert not report.skips
    assert not any(name.startswith(("w0.codes.y", "w1", "w2")) for name in model.graph.initializers)


def test_a_second_time_changes_nothing() -> None:
    model = readers(32, 16)
    merge(model)
    again = merge(model)
    assert not again.changes
    assert not again.skips


@pytest.mark.parametrize("native", [True, False])
def test_products_of_rounded_inputs_are_merged(native: bool) -> None:
    model = readers(32, 16)
    QuantizeActivations(bits=8)(model)
    before = run(model, native=native)
    merge(model)
    assert kinds(lower_model(model)) == {"MatMulDynamic": 2, "Split": 1}
    after = run(model, native=native)
    # The body multiplies float32, and may sum 64 products in another order for another width.
    for a, b in zip(before, after, strict=True):
        assert np.abs(a - b).max() <= (0 if native else 64 * 2**-24 * np.abs(a).max())


@pytest.mark.parametrize("format_", ["int4", "uint4", "int8"])
def test_the_standard_form_is_merged_and_onnxruntime_still_fuses_it(format_: str, tmp_path: Path) -> None:
    model = readers(32, 16, 64, format_=format_)
    before = run(model)
    merge(model)
    assert kinds(model) == {"DequantizeLinear": 2, "MatMul": 2, "Split": 1}
    after = run(model)
    # onnxruntime's kernel may sum the 64 rounded products of a column in another order beside other columns
    for a, b in zip(before, after, strict=True):
        assert np.abs(a - b).max() < 64 * 2**-24 * np.abs(a).max()
    optimized = tmp_path / "optimized.onnx"
    open_session(save(model, tmp_path), optimized_to=optimized)
    assert kinds(ir.load(optimized))["MatMulNBits"] == 2


def reader_of(model: ir.Model, name: str) -> ir.Node:
    reader = dequantize_of(next(node for node in model.graph if node.name == name))
    assert reader is not None
    return reader


def other_table(reader: ir.Node) -> None:
    reader.replace_input_with(2, shared_constant(reader.graph, "other.table", np.arange(16, dtype=np.float32)))


def zero_points(reader: ir.Node) -> None:
    ones = np.ones(reader.inputs[1].shape.numpy(), np.float16)
    reader.replace_input_with(3, shared_constant(reader.graph, "points", ones))


def wider_scales(reader: ir.Node) -> None:
    scales = reader.inputs[1].const_value.numpy().astype(np.float32)
    reader.replace_input_with(1, shared_constant(reader.graph, "wide", scales))
    reader.replace_input_with(3, shared_constant(reader.graph, "none", np.zeros((1, 1), np.float32)))


@pytest.mark.parametrize("what", [other_table, zero_points, wider_scales])
def test_what_differs_stays_apart_and_the_others_are_merged(what: Callable[[ir.Node], None]) -> None:
    model = readers(32, 16, 48)
    what(reader_of(model, "y1"))
    before = run(model)
    report = merge(model)
    assert [change.where for change in report.changes] == ["y0.dequantize.merged", "y0.merged", "y0.merged.split"]
    (skip,) = report.skips
    assert skip.where == "y1"
    assert skip.reason == DIFFER(input="x.int8.32.output")
    assert_equal(before, run(model))


def test_products_that_round_their_input_in_two_ways_stay_apart() -> None:
    model = readers(32, 16, 48)
    node = next(node for node in model.graph if node.name == "y1")
    attributes = {"activations": "int16", "group": 32, "clip": 1.0}
    round_input(model.graph, node, attributes, Ledger(PassReport(name="test", effect="lossy")))
    before = run(model)
    assert [change.where for change in merge(model).changes][1:] == ["y0.merged", "y0.merged.split"]
    assert_equal(before, run(model))


def test_groups_that_differ_stay_apart() -> None:
    model, other = readers(32, 16, activations="float32"), readers(32, 16, activations="float32", group=16)
    reader, odd = reader_of(model, "y1"), reader_of(other, "y1")
    for index in (0, 1):
        reader.replace_input_with(
            index, shared_constant(model.graph, f"odd{index}", odd.inputs[index].const_value.numpy())
        )
    reader.attributes["group"] = ir.AttrInt64("group", 16)
    report = merge(model)
    assert not report.changes
    assert [skip.where for skip in report.skips] == ["y0", "y1"]


def test_zero_points_are_joined() -> None:
    model = readers(32, 16)
    for name in ("y0", "y1"):
        reader = reader_of(model, name)
        points = np.random.default_rng(len(name)).standard_normal(reader.inputs[1].shape.numpy()).astype(np.float16)
        reader.replace_input_with(3, shared_constant(model.graph, f"{name}.points", points))
    before = run(model)
    merge(model)
    assert kinds(lower_model(model))["MatMulTable"] == 2
    assert_equal(before, run(model))


def test_a_weight_that_others_read_too_is_not_stored_twice() -> None:
    model = readers(32, 32)
    reader_of(model, "y1").replace_input_with(0, reader_of(model, "y0").inputs[0])
    report = merge(model)
    assert not report.changes
    assert {str(skip.reason) for skip in report.skips} == {
        "its weight is read elsewhere too, and would be stored twice"
    }


def test_codes_that_are_computed_stay() -> None:
    model = readers(32, 16)
    reader = reader_of(model, "y1")
    same = ir.node("Identity", [reader.inputs[1]], name="same")
    same.outputs[0].name = "computed"
    model.graph.insert_before(reader, same)
    reader.replace_input_with(1, same.outputs[0])
    assert ("y1", "its codes, scales or zero points are no constants") in [
        (skip.where, str(skip.reason)) for skip in merge(model).skips
    ]


def test_scales_per_column_of_the_standard_form_stay() -> None:
    model = readers(32, 16, format_="int8")
    dequantize = next(node for node in model.graph if node.name == "y1.dequantize")
    scales = shared_constant(model.graph, "per_column", np.ones(16, np.float32))
    dequantize.replace_input_with(1, scales)
    dequantize.attributes["axis"] = ir.AttrInt64("axis", 1)
    assert ("y1", "its scales are not in groups of rows") in [
        (skip.where, str(skip.reason)) for skip in merge(model).skips
    ]


def test_weights_are_not_read_before_they_are_written() -> None:
    model = readers(32, 16)
    for name in ("w0.codes", "w1.codes"):
        value = model.graph.initializers[name]
        value.const_value = WeightTensor(CountingExpression(expression_of(value.const_value), f"merged {name}"))
    assert merge(model).changes
    assert not any(name.startswith("merged") for name in CountingExpression.counts)


def test_a_llama_for_the_processor_is_merged_and_says_the_same(llama_artifact: Path, tmp_path: Path) -> None:
    made = optimize(llama_artifact, "int4-rtn", tmp_path / "out", target="ort-cpu:avx512")
    report = made.manifest.passes[-4]
    assert report.name == "merge_products"
    # queries, keys and values; gate and up
    merged = [change.what.figures["products"] for change in report.changes if change.what.code == MERGE.code]
    assert [len(products) for products in merged] == 2 * [3, 2]
    (check,) = [check for check in made.manifest.checks if check.after == "merge_products"]
    # graphopt's kernel gives the same bits; onnxruntime's, which runs before `lower`, sums in float32
    assert check.figures["largest_change"] < 1e-6
