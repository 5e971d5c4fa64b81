from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt.graph import editing

F = ir.DataType.FLOAT
X = np.array([[1.0, -2.0, 3.0, -4.0]], np.float32)


def chain(*op_types: str) -> ir.Model:
    """Return a graph in which each op reads the one before: ``x``, ``v0``, ``v1`` and so on; the last is the output."""
    value = ir.val("x", F, ["batch", 4])
    graph = ir.Graph([value], [], nodes=[], opset_imports={"": 23}, name="chain")
    for number, op_type in enumerate(op_types):
        node = ir.node(op_type, [value], name=f"n{number}", metadata_props={"scope": f"layer.{number}"})
        value = node.outputs[0]
        value.name, value.type, value.shape = f"v{number}", ir.TensorType(F), ir.Shape(["batch", 4])
        graph.append(node)
    graph.outputs.append(value)
    return ir.Model(graph, ir_version=10)


def run(model: ir.Model) -> list[np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": X})


def names(model: ir.Model) -> list[str]:
    return [node.name or "" for node in model.graph]


def test_nodes_take_the_place_the_name_and_the_history_of_a_node() -> None:
    model = chain("Neg", "Abs", "Neg")
    old = model.graph[1]
    square = ir.node("Mul", [old.inputs[0], old.inputs[0]], name="square")
    root = ir.node("Sqrt", [square.outputs[0]], name="root")
    editing.replace(old, [square, root])
    assert names(model) == ["n0", "square", "root", "n2"]
    assert (root.outputs[0].name, root.outputs[0].dtype, root.outputs[0].shape) == ("v1", F, ir.Shape(["batch", 4]))
    assert [node.metadata_props["scope"] for node in (square, root)] == ["layer.1", "layer.1"]
    np.testing.assert_array_equal(run(model)[0], -np.abs(X))


def test_an_output_of_the_graph_keeps_its_name_and_place() -> None:
    model = chain("Neg", "Abs")
    relu = ir.node("Relu", [model.graph[1].inputs[0]], name="relu")
    editing.replace(model.graph[1], relu)
    assert [value.name for value in model.graph.outputs] == ["v1"]
    np.testing.assert_array_equal(run(model)[0], np.maximum(-X, 0))


def test_what_a_new_node_knows_of_its_output_stays() -> None:
    model = chain("Neg", "Abs")
    shape_node = ir.node("Shape", [model.graph[0].outputs[0]], name="shape")
    shape_node.outputs[0].dtype, shape_node.outputs[0].shape = ir.DataType.INT64, ir.Shape([2])
    editing.replace(model.graph[1], shape_node)
    assert (shape_node.outputs[0].dtype, shape_node.outputs[0].shape) == (ir.DataType.INT64, ir.Shape([2]))
    # a scalar has an empty shape, which is not the same as none
    scalar = ir.node("Size", [model.graph[0].outputs[0]], name="size")
    scalar.outputs[0].dtype, scalar.outputs[0].shape = ir.DataType.INT64, ir.Shape([])
    editing.replace(shape_node, scalar)
    assert scalar.outputs[0].shape == ir.Shape([])


def test_what_only_the_old_node_read_goes_and_the_rest_stays() -> None:
    model = chain("Neg", "Abs", "Neg")
    graph = model.graph
    own_constant, common_constant = (
        editing.shared_constant(graph, name, np.ones(4, np.float32)) for name in ("alone", "both")
    )
    inner = ir.node("Add", [graph.inputs[0], own_constant], name="inner")
    outer = ir.node("Add", [inner.outputs[0], common_constant], name="outer")
    old = ir.node("Add", [graph[2].outputs[0], outer.outputs[0]], name="old")
    graph.extend([inner, outer, old])
    graph.outputs.append(old.outputs[0])
    old.outputs[0].name, old.outputs[0].type, old.outputs[0].shape = "sum", ir.TensorType(F), ir.Shape(["batch", 4])
    editing.replace(old, ir.node("Sub", [graph[2].outputs[0], common_constant], name="new"))
    assert names(model) == ["n0", "n1", "n2", "new"]
    assert list(graph.initializers) == ["both"]
    np.testing.assert_array_equal(run(model)[1], -np.abs(X) - 1)


def test_a_node_that_is_read_is_not_removed() -> None:
    model = chain("Neg", "Abs")
    editing.drop(model.graph, model.graph[0].outputs[0])
    editing.drop(model.graph, model.graph[1].outputs[0])
    assert names(model) == ["n0", "n1"]
    with pytest.raises(ValueError, match="n0"):
        editing.remove(model.graph[0])


def test_a_node_with_two_outputs_stays_while_one_is_read() -> None:
    model = chain("Neg")
    halves = ir.node("Split", [model.graph[0].outputs[0]], {"axis": 1, "num_outputs": 2}, num_outputs=2, name="halves")
    model.graph.append(halves)
    readers = [ir.node("Abs", [half], name=f"abs{number}") for number, half in enumerate(halves.outputs)]
    model.graph.extend(readers)
    editing.remove(readers[0])
    assert names(model) == ["n0", "halves", "abs1"]
    editing.remove(readers[1])
    assert names(model) == ["n0"]


def test_a_node_goes_between_a_value_and_some_of_its_readers() -> None:
    model = chain("Neg", "Abs")
    value = model.graph[0].outputs[0]
    relu = ir.node("Relu", [value], name="other")
    model.graph.append(relu)
    relu.outputs[0].name, relu.outputs[0].type = "w", ir.TensorType(F)
    model.graph.outputs.append(relu.outputs[0])
    insertion = editing.insert_behind(value, ir.node("Exp", [value], name="exp"), {relu})
    assert names(model) == ["n0", "exp", "n1", "other"]
    assert (insertion.name, insertion.dtype, insertion.shape) == ("exp.output", F, ir.Shape(["batch", 4]))
    left, right = run(model)
    np.testing.assert_array_equal(left, np.abs(X))
    np.testing.assert_allclose(right, np.exp(-X), rtol=1e-6)


def test_a_node_behind_an_output_of_the_graph_takes_its_name() -> None:
    model = chain("Neg")
    value = model.graph.outputs[0]
    unit = editing.shared_constant(model.graph, "one", np.ones(4, np.float32))
    editing.insert_behind(value, ir.node("Add", [value, unit], name="add"), value_name="v0.before")
    assert [output.name for output in model.graph.outputs] == ["v0"]
    assert model.graph[0].outputs[0].name == "v0.before"
    np.testing.assert_array_equal(run(model)[0], 1 - X)


def test_a_node_behind_an_input_stands_in_front_of_its_first_reader() -> None:
    model = chain("Neg", "Abs")
    graph = model.graph
    graph.append(ir.node("Add", [graph.inputs[0], graph[1].outputs[0]], name="late"))
    editing.insert_behind(graph.inputs[0], ir.node("Relu", [graph.inputs[0]], name="relu"))
    assert names(model) == ["relu", "n0", "n1", "late"]
    np.testing.assert_array_equal(run(model)[0], np.maximum(X, 0))


def test_a_node_goes_in_front_of_one_input() -> None:
    model = chain("Neg", "Abs")
    editing.insert_in_front(model.graph[1], 0, ir.node("Relu", [model.graph[1].inputs[0]], name="relu"))
    assert names(model) == ["n0", "relu", "n1"]
    np.testing.assert_array_equal(run(model)[0], np.maximum(-X, 0))


def test_a_node_is_gone_around() -> None:
    model = chain("Neg", "Abs", "Neg")
    editing.bypass(model.graph[1], model.graph[0].outputs[0])
    assert names(model) == ["n0", "n2"]
    np.testing.assert_array_equal(run(model)[0], X)


def test_equal_constants_are_shared_and_others_get_a_name_of_their_own() -> None:
    graph = chain("Neg").graph
    first = editing.shared_constant(graph, "c", np.array([1, 2]))
    assert editing.shared_constant(graph, "c", np.array([1, 2])) is first
    for constant in (np.array([1, 3]), np.array([1, 2], np.int32), np.array([[1, 2]])):
        assert editing.shared_constant(graph, "c", constant) is not first
    assert list(graph.initializers) == ["c", "c.1", "c.2", "c.3"]


def test_a_node_like_another_has_its_attributes_and_history() -> None:
    node = ir.node("Split", [ir.val("x", F)], {"axis": 1, "num_outputs": 2}, num_outputs=2, name="split")
    node.metadata_props["scope"] = "mlp"
    copy = editing.clone_node(node, [ir.val("y", F)], "other")
    assert (copy.name, len(copy.outputs), copy.attributes.get_int("axis")) == ("other", 2, 1)
    assert copy.metadata_props["scope"] == "mlp"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10)), max_size=8))
def test_any_sequence_of_edits_keeps_the_graph_valid_and_what_it_computes(edits: list[tuple[int, int]]) -> None:
    """Each edit puts nodes in that undo one another, or takes such a node out; so the graph always computes -|-x|."""
    model = chain("Neg", "Abs", "Neg")
    graph, expected = model.graph, -np.abs(X)
    for number, (kind, position) in enumerate(edits):
        node = graph[position % len(graph)]
        value = node.outputs[0]
        if kind == 0:  # Relu(v) - Relu(-v) = v
            positive_part, negation = ir.node("Relu", [value]), ir.node("Neg", [value])
            back = ir.node("Relu", [negation.outputs[0]])
            whole = ir.node("Sub", [positive_part.outputs[0], back.outputs[0]], name=f"whole{number}")
            copy_of_node = editing.clone_node(node, node.inputs)
            for reader in (positive_part, negation):
                reader.replace_input_with(0, copy_of_node.outputs[0])
            editing.replace(node, [copy_of_node, positive_part, negation, back, whole])
        elif kind == 1:
            new_name = f"{value.name}.before{number}" if value.is_graph_output() else None
            editing.insert_behind(value, ir.node("Identity", [value], name=f"behind{number}"), value_name=new_name)
        elif kind == 2:
            editing.insert_in_front(node, 0, ir.node("Identity", [node.inputs[0]], name=f"front{number}"))
        elif node.op_type == "Identity" and not value.is_graph_output():
            editing.bypass(node, node.inputs[0])
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert [output.name for output in graph.outputs] == ["v2"]
    np.testing.assert_array_equal(run(model)[0], expected)
