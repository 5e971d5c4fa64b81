"""What the tests of canonicalization share: how it is run, and norms spelled out as exporters do."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.passes.lift.canonicalize import Canonicalize

# Lifts reorder nothing that is summed; only a decomposed norm is computed in another order. Seen 0 to 3e-7.
FLOAT32 = 2e-6


def canonicalize(model: ir.Model) -> object:
    return Canonicalize()(model).report  # type: ignore[attr-defined]


def node_of(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def decompose(graph: ir.Graph, norm: ir.Node, square: str, division: str, gain_first: bool) -> None:
    """Spell a norm out as exporters do."""
    x, gain = norm.inputs

    def number(name: str, value: float | list[int], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        made = ir.val(f"{norm.name}.{name}", const_value=ir.tensor(value, dtype=dtype, name=f"{norm.name}.{name}"))
        graph.initializers[made.name] = made
        return made

    tape = ir.tape.Tape()
    squared = tape.op("Pow", [x, number("two", 2.0)]) if square == "Pow" else tape.op("Mul", [x, x])
    mean = tape.op("ReduceMean", [squared, number("axes", [-1], ir.DataType.INT64)], {"keepdims": 1})
    root = tape.op("Sqrt", [tape.op("Add", [mean, number("epsilon", norm.attributes.get_float("epsilon", 1e-5))])])
    if division == "Div":
        normalized = tape.op("Div", [x, root])
    elif division == "Reciprocal":
        normalized = tape.op("Mul", [x, tape.op("Reciprocal", [root])])
    else:
        normalized = tape.op("Mul", [x, tape.op("Div", [number("one", 1.0), root])])
    output = tape.op("Mul", [gain, normalized] if gain_first else [normalized, gain])
    for position, node in enumerate(tape.nodes):
        node.name = f"{norm.name}.{position}"
        node.outputs[0].dtype = ir.DataType.FLOAT
    output.shape = norm.outputs[0].shape
    graph.insert_before(norm, tape.nodes)
    norm.outputs[0].replace_all_uses_with(output)
    graph.remove(norm, safe=True)


def center(model: ir.Model, norm: ir.Node, **mean: object) -> tuple[ir.Node, ir.Value]:
    """Spell the mean of a LayerNormalization out, as Cohere's is, and return the RMSNormalization and x - mean(x)."""
    x, gain, *bias = norm.inputs
    axes = ir.val(f"{norm.name}.axes", const_value=ir.tensor([-1], dtype=ir.DataType.INT64, name=f"{norm.name}.axes"))
    model.graph.initializers[axes.name] = axes
    tape = ir.tape.Tape()
    centered = tape.op("Sub", [x, tape.op("ReduceMean", [x, axes], {"keepdims": 1, **mean})])
    output = tape.op("RMSNormalization", [centered, gain], {"axis": -1, "epsilon": 1e-5})
    normed = output.producer()
    if bias:
        output = tape.op("Add", [bias[0], output] if norm.name == "norm0" else [output, bias[0]])
    for node in tape.nodes:
        node.name = f"{norm.name}.{node.op_type}"
        node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.FLOAT, norm.outputs[0].shape
    model.graph.insert_before(norm, tape.nodes)
    norm.outputs[0].replace_all_uses_with(output)
    model.graph.remove(norm, safe=True)
    return normed, centered
