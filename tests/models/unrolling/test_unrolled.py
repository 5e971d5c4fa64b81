"""A graph that was unrolled is the graph that a trace of all layers gives, node for node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from graphopt.graph.provenance import SCOPE
from graphopt.graph.weights import WeightTensor, expression_of
from graphopt.models.agreement import MAIN, check_agreement
from graphopt.models.checkpoint_tensors import Parameter
from graphopt.models.loading import LoadedModel, weights_of
from graphopt.models.trace import trace
from graphopt.models.unrolling import kinds, short_trace, trace_loaded, trace_skeleton
from graphopt.models.unrolling.graph import unroll
from graphopt.models.unrolling.kinds import Plan
from graphopt.models.unrolling.layer_of_node import GraphLayers
from graphopt.models.unrolling.refusals import NO_LAYERS, NotUnderstoodError
from graphopt.report.difference import diff_of
from tests.cached_folders import cached_folder
from tests.decoders import shuffle_names
from tests.families import make_model
from tests.isomorphic import description


def test_a_llama_of_three_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_FEWEST", 3)  # fewer to trace whole; what is unrolled is the last
    model = make_model("llama", 3).eval()

    def save_trace(folder: Path) -> None:
        folder.mkdir()
        ir.save(trace(model, "llama"), folder / "model.onnx")

    sources = ("graphopt/models/*.py", "tests/families.py", "tests/models/unrolling/test_unrolled.py")
    whole = ir.load(cached_folder("llama-of-three-layers", sources, save_trace) / "model.onnx")
    loaded_model = LoadedModel(model, weights_of(model), lambda: model, [])
    program, notes = trace_loaded(loaded_model, "llama")
    assert notes == []
    assert description(program) == description(whole)

    # The same checkpoint exported by another route, then given other names: `diff` finds no difference.
    shuffle_names(whole)
    difference = diff_of((program, None), (whole, None))
    assert (difference.edges, difference.ports) == ([], [])
    assert difference.equal


def test_a_hybrid_has_the_states_of_each_kind_of_layer() -> None:
    model = make_model("lfm2", 5).eval()  # convolutions in three layers and attention in two: four are traced
    program, notes = trace_loaded(LoadedModel(model, weights_of(model), lambda: model, []), "lfm2")
    assert notes == []
    names = [value.name for value in program.graph.inputs]
    assert [name for name in names if name and name.startswith("past")] == [
        f"past_key_values.{layer}.{part}"
        for layer in range(5)
        for part in (["key", "value"] if layer % 2 else ["conv_state"])
    ]
    # tracing takes the weights out of the model
    assert check_agreement(lambda: make_model("lfm2", 5).eval(), {MAIN: program}).status == "measured"


def toy_graph(layers: int, **exceptions: Any) -> ir.Model:
    """Return x -> layers of x + gelu(x w) -> y, as an exporter would write it, with modules in the metadata."""
    x = ir.val("x", ir.DataType.FLOAT, [2, 4])
    nodes, weights, residual = [], [], x

    def node(op: str, inputs: list[Any], module: str | None) -> ir.Value:
        new_node = ir.node(op, inputs)
        new_node.outputs[0].name = f"v{len(nodes)}"
        if module is not None:
            new_node.metadata_props[SCOPE] = repr(["", module, op])
        nodes.append(new_node)
        return new_node.outputs[0]

    for n in range(layers):
        leaf = Parameter(f"layers.{n}.w", ir.DataType.FLOAT, (4, 4))
        w = ir.val(f"layers.{n}.w", ir.DataType.FLOAT, [4, 4], const_value=WeightTensor(leaf))
        weights.append(w)
        product = node("MatMul", [residual, w], f"layers.{n}")
        # Some nodes come without their module.
        active = node("Tanh" if n == exceptions.get("other") else "Gelu", [product], None)
        residual = node("Add", [residual, active], f"layers.{n}")
        if n == exceptions.get("shared"):
            first = residual
    y = node("Relu", [residual], "norm")
    if "shared" in exceptions:
        y = node("Add", [y, first], "norm")
    y.name = "y"
    graph = ir.Graph([x], [y], nodes=nodes, initializers=weights, opset_imports={"": 23})
    return ir.Model(graph, ir_version=10)


def unroll_graph(model: ir.Model, layers: int) -> ir.Model:
    count = len(model.graph.initializers)
    unroll(model, Plan("layers", (0,) * layers, tuple(range(count))))
    return model


def test_a_toy_of_two_layers_becomes_that_of_five() -> None:
    result, expected = unroll_graph(toy_graph(2), 5), toy_graph(5)
    assert [str(expression_of(value.const_value)) for value in result.graph.initializers.values()] == [
        str(expression_of(value.const_value)) for value in expected.graph.initializers.values()
    ]
    assert [node.op_type for node in result.graph] == [node.op_type for node in expected.graph]
    assert [node.metadata_props.get(SCOPE) for node in result.graph] == [
        node.metadata_props.get(SCOPE) for node in expected.graph
    ]
    names = {value: number for number, value in enumerate(v for node in result.graph for v in node.outputs)}
    expected_names = {value: number for number, value in enumerate(v for node in expected.graph for v in node.outputs)}
    for node, other_node in zip(result.graph, expected.graph, strict=True):
        assert [names.get(value) for value in node.inputs] == [expected_names.get(value) for value in other_node.inputs]
    assert result.graph.outputs[0].name == "y"
    assert list(result.graph.initializers) == list(expected.graph.initializers)


@pytest.mark.parametrize("number", [0, 1])
def test_layers_that_came_out_differently_are_refused(number: int) -> None:
    with pytest.raises(NotUnderstoodError, match="layers 0 and 1 are of one kind and came out as different graphs"):
        unroll_graph(toy_graph(2, other=number), 5)


def test_a_layer_that_is_read_behind_the_last_is_refused() -> None:
    with pytest.raises(NotUnderstoodError, match="reads more than what the layer before passes on"):
        unroll_graph(toy_graph(3, shared=0), 5)


def test_places_of_nodes_without_a_module() -> None:
    model = toy_graph(2)
    layers = GraphLayers(model.graph, Plan("layers", (0, 0, 0), (0, 1)))
    assert [layers.layer_of(node) for node in model.graph] == [0, 0, 0, 1, 1, 1, -1]


def test_a_model_that_cannot_be_shortened_is_traced_whole_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any, inputs: Any) -> Plan:
        raise NotUnderstoodError(NO_LAYERS())

    monkeypatch.setattr(short_trace, "plan_layers", refuse)
    monkeypatch.setattr(short_trace, "_export", lambda model, source, task: toy_graph(3))
    monkeypatch.setattr(short_trace, "finish", lambda program, model, source, task: None)
    program, reason = trace_skeleton(make_model("llama", 1), "toy")
    assert str(reason) == "its modules hold no list of layers"
    assert len(program.graph) == 10
