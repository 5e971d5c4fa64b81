"""Subgraphs, functions and ports: places where a difference could hide."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.numerics.rotations.claims import Claims
from graphopt.verification.certificate.checker import check
from graphopt.verification.certificate.correspondence import live_nodes
from tests.graphs import residual_model
from tests.verification.certificate.rotated_models import edit, first_fault, insert_hadamard, node, rotated_residual


def add_branch(model: ir.Model, source: str) -> None:
    """Add an output that an ``If`` computes from what the node called ``source`` computes, seen from inside only."""
    outer = node(model, source).outputs[0]
    branches = []
    for number, op_type in enumerate(("Identity", "Neg")):
        inner = ir.node(op_type, [outer], name=f"branch{number}")
        inner.outputs[0].name, inner.outputs[0].dtype = f"branch{number}.out", ir.DataType.FLOAT
        branches.append(ir.Graph([], inner.outputs, nodes=[inner], name=f"graph{number}"))
    condition = ir.val("condition", const_value=ir.tensor(np.array(True), name="condition"))
    model.graph.initializers["condition"] = condition
    branch_node = ir.node("If", [condition], {"then_branch": branches[0], "else_branch": branches[1]}, name="if")
    branch_node.outputs[0].name, branch_node.outputs[0].dtype = "chosen", ir.DataType.FLOAT
    model.graph.append(branch_node)
    model.graph.outputs.append(branch_node.outputs[0])


@pytest.mark.parametrize(("source", "fault"), [("up0", None), ("norm0", "if")])
def test_what_a_subgraph_reads_from_outside_is_followed(source: str, fault: str | None) -> None:
    before, after, claims = rotated_residual()
    for model in (before, after):
        add_branch(model, source)
    certificate = check(before, after, claims)
    if fault is None:
        assert certificate.status == "proved"
    else:
        assert first_fault(certificate).node == fault
        assert first_fault(certificate).tensor == f"{source}.out"


def test_a_subgraph_that_reads_something_else_is_found() -> None:
    before, after, claims = rotated_residual()
    add_branch(before, "up0")
    add_branch(after, "up1")
    assert first_fault(check(before, after, claims)).node == "if"


def with_function(op_type: str) -> ir.Model:
    """Return a residual model that has its own activation, a function of one standard op."""
    model = residual_model(gains=False)
    x = ir.val("x")
    body = ir.node(op_type, [x], name="body")
    graph = ir.Graph([x], body.outputs, nodes=[body], name="body", opset_imports={"": 23})
    function = ir.Function("local", "Activation", graph=graph, attributes=[])
    model.functions[function.identifier()] = function
    model.opset_imports["local"] = 1
    old = node(model, "sigmoid0")
    new = ir.node("Activation", list(old.inputs), domain="local", name="sigmoid0")
    model.graph.insert_before(old, new)
    old.outputs[0].replace_all_uses_with(new.outputs[0])
    model.graph.remove(old, safe=True)
    new.outputs[0].name = "sigmoid0.out"
    return model


def test_the_body_of_a_function_must_stay() -> None:
    assert check(with_function("Sigmoid"), with_function("Sigmoid"), Claims()).status == "proved"
    fault = first_fault(check(with_function("Sigmoid"), with_function("Relu"), Claims()))
    assert "local::Activation" in str(fault.reason)


def test_ports_must_stay() -> None:
    def models() -> tuple[ir.Model, ir.Model]:
        return residual_model(residual_output=True), residual_model(residual_output=True)

    before, after = models()
    after.graph.outputs.pop()
    assert str(first_fault(check(before, after, Claims())).reason) == "the graph after has no such output"
    before, after = models()
    before.graph.outputs.pop()
    assert str(first_fault(check(before, after, Claims())).reason) == "the graph before has no such output"
    before, after = models()
    after.graph.inputs[0].dtype = ir.DataType.INT32
    assert first_fault(check(before, after, Claims())).node == "input_ids"
    before, after = models()
    after.graph.inputs.append(ir.val("more", ir.DataType.FLOAT, [1]))
    assert first_fault(check(before, after, Claims())).node == "more"
    assert first_fault(check(after, before, Claims())).node == "more"


def test_outputs_must_not_change_places() -> None:
    before, after = residual_model(16, 16, residual_output=True), residual_model(16, 16, residual_output=True)
    x = node(after, "residual1").outputs[0]
    earlier_sum = node(after, "residual0").outputs[0]
    x.name, earlier_sum.name = "swapped", x.name
    after.graph.outputs[1] = earlier_sum
    fault = first_fault(check(before, after, Claims()))
    assert fault.tensor == "residual1.out"
    assert "does not stand for" in str(fault.reason)


def test_a_constant_may_be_copied_but_not_computed() -> None:
    before, after = residual_model(), residual_model()
    copy = ir.val("copy", const_value=after.graph.initializers["up0.weight"].const_value)
    after.graph.initializers["copy"] = copy
    node(after, "up0").replace_input_with(1, copy)
    assert check(before, after, Claims()).status == "proved"
    identity = ir.node("Identity", [copy], name="made")
    after.graph.insert_before(node(after, "up0"), identity)
    node(after, "up0").replace_input_with(1, identity.outputs[0])
    nodes = [finding.node for finding in check(before, after, Claims()).findings]
    assert nodes[:2] == ["made", "up0"]


def test_an_initializer_that_the_app_may_replace_is_no_constant() -> None:
    before, after, claims = rotated_residual()
    for model in (before, after):
        model.graph.inputs.append(model.graph.initializers["down0.weight"])
    fault = first_fault(check(before, after, claims))
    assert fault.node == "down0.weight"


def test_nodes_in_the_wrong_order_are_found() -> None:
    before, after = residual_model(), residual_model()
    late = node(after, "up0")
    after.graph.remove(late)
    after.graph.append(late)
    assert first_fault(check(before, after, Claims())).node == "sigmoid0"


def test_an_added_rotation_behind_nothing_known_is_found() -> None:
    before, after = residual_model(), residual_model()
    rotation_node = insert_hadamard(after, "residual1", 4, 4, "turned")
    rotation_node.replace_input_with(0, after.graph.initializers["up0.weight"])
    assert first_fault(check(before, after, Claims())).node == "turned"


def test_only_what_outputs_need_must_be_there() -> None:
    before, after = residual_model(), residual_model()
    idle = ir.node("Relu", [node(before, "up0").outputs[0]], name="idle")
    before.graph.append(idle)
    assert idle not in live_nodes(before.graph)
    assert check(before, after, Claims()).status == "proved"


def test_a_weight_of_another_shape_is_named() -> None:
    before, after, claims = rotated_residual()
    edit(after, "down0.weight", lambda W: W[:, :8])
    fault = first_fault(check(before, after, claims))
    assert fault.tensor == "down0.weight"
    assert "[12, 16]" in str(fault.reason)
