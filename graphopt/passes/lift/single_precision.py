"""Computations in float64 become float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.doubles import double_attributes, double_casts, double_to_integers, double_weights
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.weights import Cast, WeightTensor, expression_of
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context

NARROWING = Rule("single_precision.narrowed", "{weights} weights and {casts} casts from float64 to float32")
OUT_OF_RANGE = Rule("single_precision.out-of-range", "a number of it does not fit float32")
INTEGERS = Rule("single_precision.integers", "it makes integers of float64, which rounding to float32 may tip over")
PORT = Rule("single_precision.port", "an input or output of the graph is float64, and what it is computed with stays")

_LARGEST = float(np.finfo(np.float32).max)


class SinglePrecision(Pass):
    """Store weights of float64 in float32, and compute in it.

    before::

        y = Cast(MatMul(Cast(x, to=double), W: double), to=float)

    after::

        y = Cast(MatMul(Cast(x, to=float), W: float), to=float)

    Exporters write float64 where Python's numbers came in. A CPU computes half as many of them at a time, and
    onnxruntime has no fused kernels for them. Nothing is changed where a port of the graph is float64, where a constant
    has numbers that float32 has not the range for, or where results become integers, which rounding tips over.
    """

    name: ClassVar[str] = "single_precision"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Narrow all of the graph, or nothing."""
        weights, casts = double_weights(model), double_casts(model)
        if not weights and not casts:
            return
        refusal = why_not(model)
        if refusal is not None:
            context.ledger.skipped(*refusal)
            return
        for value in weights:
            assert value.const_value is not None
            value.const_value = WeightTensor(Cast(expression_of(value.const_value), ir.DataType.FLOAT), value.name)
        for node, name in double_attributes(model):
            attribute = node.attributes[name]
            if attribute.type == ir.AttributeType.TENSOR:
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.as_tensor().numpy().astype(np.float32)))
            else:
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        # A cast to float64 whose result is cast back at once has to follow, since the types of all values do.
        for node in model.graph.all_nodes():
            if (node.domain, node.op_type, node.attributes.get_int("to", 0)) == ("", "Cast", int(ir.DataType.DOUBLE)):
                node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        for graph in model.graphs():
            results = (output for node in graph for output in node.outputs)
            for value in (*graph.inputs, *graph.initializers.values(), *results):
                if value.dtype == ir.DataType.DOUBLE:
                    value.type = ir.TensorType(ir.DataType.FLOAT)  # copies of a graph share types: none is edited
        context.ledger.report_change("graph", NARROWING(weights=len(weights), casts=len(casts)))


def why_not(model: ir.Model) -> tuple[ir.Value | ir.Node, Fact] | None:
    """Return what in a model has to stay in float64, and why; ``None`` where nothing does."""
    ports = (*model.graph.inputs, *model.graph.outputs)
    port = next((value for value in ports if value.dtype == ir.DataType.DOUBLE), None)
    if port is not None:
        return port, PORT()
    node = next(iter(double_to_integers(model)), None)
    if node is not None:
        return node, INTEGERS()
    arrays: list[tuple[ir.Value | ir.Node, ir.TensorProtocol | None]] = [
        (value, value.const_value) for value in double_weights(model)
    ]
    arrays += [
        (node, node.attributes[name].as_tensor())
        for node, name in double_attributes(model)
        if node.attributes[name].type == ir.AttributeType.TENSOR
    ]
    for item, tensor in arrays:
        assert tensor is not None
        numbers = np.abs(tensor.numpy())
        if numbers[np.isfinite(numbers)].max(initial=0) > _LARGEST:
            return item, OUT_OF_RANGE()
    return None
