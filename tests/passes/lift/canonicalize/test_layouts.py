from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.graph import provenance
from graphopt.ort.session import open_session
from tests.graphs import logits, relative, residual_model
from tests.passes.lift.canonicalize.common import FLOAT32, canonicalize, node_of


def test_a_tied_head_becomes_a_weight_of_its_own(tmp_path: Path) -> None:
    model = residual_model(tied=True)
    before = logits(model, tmp_path / "before")
    canonicalize(model)
    assert node_of(model, "head").inputs[1].is_initializer()
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def layout_model(op_type: str, shape: tuple[int, ...], extra: list[list[int] | int], **attributes: object) -> ir.Model:
    """Return y0, y1, .. = x * <what ``op_type`` makes of a weight of ``shape``>, for a number x."""
    x = ir.val("x", ir.DataType.FLOAT, [])
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    values = [ir.val("weight", const_value=ir.tensor(weight, name="weight"))]
    for position, numbers in enumerate(extra):
        values.append(ir.val(f"n{position}", const_value=ir.tensor(np.array(numbers, np.int64), name=f"n{position}")))
    parts = 1 if op_type != "Split" else attributes.get("num_outputs", 0) or len(extra[0])
    node = ir.node(op_type, values, attributes or None, num_outputs=parts, name="layout")
    products = [ir.node("Mul", [x, part], name=f"product{position}") for position, part in enumerate(node.outputs)]
    for position, product in enumerate(products):
        node.outputs[position].dtype = product.outputs[0].dtype = ir.DataType.FLOAT
        product.outputs[0].name = f"y{position}"
    outputs = [product.outputs[0] for product in products]
    graph = ir.Graph([x], outputs, nodes=[node, *products], initializers=values, opset_imports={"": 23}, name="layout")
    return ir.Model(graph, ir_version=10)


def run_products(model: ir.Model, folder: Path) -> list[np.ndarray]:
    folder.mkdir()
    ir.save(model, folder / "model.onnx")
    return open_session(folder / "model.onnx").run(None, {"x": np.array(1.5, np.float32)})


@pytest.mark.parametrize(
    ("op_type", "shape", "extra", "attributes"),
    [
        ("Transpose", (2, 3, 4), [], {}),
        ("Transpose", (2, 3, 4), [], {"perm": [1, 2, 0]}),
        ("Split", (6, 3), [], {"axis": 0, "num_outputs": 3}),
        ("Split", (3, 7), [], {"axis": -1, "num_outputs": 3}),
        ("Split", (6, 3), [[1, 2, 3]], {}),
        ("Slice", (6, 5), [[1], [2**63 - 1]], {}),
        ("Slice", (6, 5), [[-1, 0], [-(2**63), -2], [1, 0], [-2, 1]], {}),
        ("Gather", (4, 3, 2), [-2], {"axis": 0}),
        ("Gather", (4, 3, 2), [1], {"axis": 2}),
        ("Squeeze", (1, 3, 1, 2), [[0, -2]], {}),
        ("Squeeze", (1, 3, 1, 2), [], {}),
        ("Unsqueeze", (3, 2), [[0, -1]], {}),
        ("Reshape", (4, 3, 2), [[0, -1]], {}),
        ("Reshape", (4, 3, 2), [[2, 2, -1]], {"allowzero": 1}),
    ],
)
def test_a_weight_is_stored_as_it_is_read(
    tmp_path: Path, op_type: str, shape: tuple[int, ...], extra: list[list[int] | int], attributes: dict[str, object]
) -> None:
    model = layout_model(op_type, shape, extra, **attributes)
    before = run_products(model, tmp_path / "before")
    canonicalize(model)
    assert {node.op_type for node in model.graph} == {"Mul"}
    assert "n0" not in model.graph.initializers
    after = run_products(model, tmp_path / "after")
    assert len(before) == len(after) == len(model.graph.outputs)
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def shape_is_computed(model: ir.Model) -> None:
    node_of(model, "layout").replace_input_with(1, computed(model, [6]))


def app_reads_it(model: ir.Model) -> None:
    output = node_of(model, "layout").outputs[0]
    output.name, output.shape = "y1", ir.Shape([6])
    model.graph.outputs.append(output)


def holds_integers(model: ir.Model) -> None:
    # Shapes and indices: what reads them wants them as they are, and they weigh nothing.
    weight = model.graph.initializers["weight"]
    weight.const_value = ir.tensor(np.arange(6).reshape(2, 3), name="weight")
    layout = node_of(model, "layout")
    number = ir.node("Cast", [layout.outputs[0]], {"to": ir.DataType.FLOAT}, name="number")
    number.outputs[0].dtype = ir.DataType.FLOAT
    layout.outputs[0].dtype = ir.DataType.INT64
    model.graph.insert_after(layout, number)
    node_of(model, "product0").replace_input_with(1, number.outputs[0])


def computed(model: ir.Model, numbers: list[int]) -> ir.Value:
    """Return ``numbers`` as something that is only known at run time: x, which is 1.5, is cast to 1 and multiplied."""
    layout = node_of(model, "layout")
    factor = ir.val("factor", const_value=ir.tensor(np.array(numbers, np.int64), name="factor"))
    model.graph.initializers["factor"] = factor
    tape = ir.tape.Tape()
    product = tape.op("Mul", [tape.op("Cast", [model.graph.inputs[0]], {"to": ir.DataType.INT64}), factor])
    for node in tape.nodes:
        node.outputs[0].dtype = ir.DataType.INT64
    model.graph.insert_before(layout, tape.nodes)
    return product


@pytest.mark.parametrize("twist", [shape_is_computed, app_reads_it, holds_integers])
def test_a_layout_that_cannot_be_stored_stays(tmp_path: Path, twist: Callable[[ir.Model], None]) -> None:
    model = layout_model("Reshape", (2, 3), [[6]])
    twist(model)
    before = run_products(model, tmp_path / "before")
    canonicalize(model)
    assert node_of(model, "layout").inputs[0].name == "weight"
    after = run_products(model, tmp_path / "after")
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def mixture(experts: int, rows: int, columns: int, *, transposed: bool = False) -> ir.Model:
    """Return y_e = x stack[e]; with ``transposed`` the stack is kept [experts, columns, rows]."""
    shape = (experts, columns, rows) if transposed else (experts, rows, columns)
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    stack, first = ir.val("stack", const_value=ir.tensor(array, name="stack")), ir.val("first")
    first.const_value = ir.tensor(np.array([0], np.int64), name="first")
    x = ir.val("x", ir.DataType.FLOAT, ["length", rows])
    tape = ir.tape.Tape()
    whole = tape.op("Transpose", [stack], {"perm": [0, 2, 1]}) if transposed else stack
    split = ir.node("Split", [whole], {"axis": 0, "num_outputs": experts}, num_outputs=experts, name="split")
    after, products = ir.tape.Tape(), []
    for expert, part in enumerate(split.outputs):
        products.append(after.op("MatMul", [x, after.op("Squeeze", [part, first])]))
        products[-1].name, products[-1].shape = f"y{expert}", ir.Shape(["length", columns])
    nodes = [*tape.nodes, split, *after.nodes]
    for position, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}{position}"
        for output in node.outputs:
            output.dtype = ir.DataType.FLOAT
    graph = ir.Graph([x], products, nodes=nodes, initializers=[stack, first], opset_imports={"": 23}, name="mixture")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("transposed", [True, False])
def test_each_expert_becomes_a_matrix_of_its_own(tmp_path: Path, transposed: bool) -> None:
    model = mixture(3, 4, 5, transposed=transposed)
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)}
    results = []
    for name in ("before", "after"):
        ir.save(model, tmp_path / f"{name}.onnx")
        results.append(np.stack(open_session(tmp_path / f"{name}.onnx").run(None, feeds)))
        if name == "before":
            report = canonicalize(model)
    assert relative(*results) < FLOAT32
    assert {node.op_type for node in model.graph} == {"MatMul"}
    stem = "stack.transposed" if transposed else "stack"
    # and so neither the stack, nor what lay between
    assert list(model.graph.initializers) == [f"{stem}.{expert}" for expert in range(3)]
    assert all(value.shape == [4, 5] for value in model.graph.initializers.values())
    assert [change.where for change in report.changes] == list(model.graph.initializers)
    assert provenance.history(model.graph.initializers[f"{stem}.1"]) == (["canonicalize"], ["stack"])


def test_a_stack_that_is_read_whole_as_well_stays_beside_its_parts() -> None:
    model = mixture(3, 4, 5)
    whole = ir.node("ReduceSum", [model.graph.initializers["stack"]], name="whole")
    whole.outputs[0].name, whole.outputs[0].dtype = "sum", ir.DataType.FLOAT
    model.graph.append(whole)
    model.graph.outputs.append(whole.outputs[0])
    canonicalize(model)
    assert set(model.graph.initializers) == {"stack", "stack.0", "stack.1", "stack.2"}


@pytest.mark.parametrize("transposed", [True, False])
def test_reading_an_expert_takes_the_memory_of_that_expert(tmp_path: Path, transposed: bool) -> None:
    ir.save(mixture(8, 128, 256, transposed=transposed), tmp_path / "model.onnx", external_data="model.data")
    model = ir.load(tmp_path / "model.onnx")
    canonicalize(model)
    assert len(model.graph.initializers) == 8
    size = 4 * 128 * 256
    for value in model.graph.initializers.values():
        tracemalloc.start()
        assert value.const_value.numpy().nbytes == size
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # a view of the mapped file where it lies there in order; else one copy, and small things
        assert peak < (1.2 * size if transposed else 0.2 * size)
