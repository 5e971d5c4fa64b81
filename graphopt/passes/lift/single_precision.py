"""Computations in float64 become float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.doubles import double_casts, double_weights
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.weights import Cast, WeightTensor, expression_of
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context

NARROWING = Rule("single_precision.narrowed", "{weights} weights and {casts} casts from float64 to float32")
OUT_OF_RANGE = Rule("single_precision.out-of-range", "a number of it does not fit float32")
PORT = Rule("single_precision.port", "an input or output of the graph is float64, and what it is computed with stays")

_LARGEST = float(np.finfo(np.float32).max)


class SinglePrecision(Pass):
    """Store weights of float64 in float32, and compute in it.

    before::

        y = Cast(MatMul(Cast(x, to=double), W: double), to=float)

    after::

        y = Cast(MatMul(Cast(x, to=float), W: float), to=float)

    Exporters write float64 where Python's numbers came in. A CPU computes half as many of them at a time, and
    onnxruntime has no fused kernels for them. Nothing is changed where a port of the graph is float64, or a weight has
    numbers that float32 has not the range for.
    """

    name: ClassVar[str] = "single_precision"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)

    def requires(self, model: ir.Model) -> None:
        """Demand nothing: the types are of any opset."""

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Narrow all of the graph, or nothing."""
        ledger = context.ledger
        weights, casts = double_weights(model), double_casts(model)
        if not weights and not casts:
            return
        port = next((v for v in (*model.graph.inputs, *model.graph.outputs) if v.dtype == ir.DataType.DOUBLE), None)
        if port is not None:
            ledger.skipped(port, PORT())
            return
        for value in weights:
            tensor = value.const_value
            assert tensor is not None
            if np.abs(tensor.numpy()).max(initial=0) > _LARGEST:
                ledger.skipped(value, OUT_OF_RANGE())
                return
        for value in weights:
            assert value.const_value is not None
            value.const_value = WeightTensor(Cast(expression_of(value.const_value), ir.DataType.FLOAT), value.name)
        for node in casts:
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        for graph in model.graphs():
            for value in (*graph.initializers.values(), *(output for node in graph for output in node.outputs)):
                if value.dtype == ir.DataType.DOUBLE:
                    value.dtype = ir.DataType.FLOAT
        ledger.report_change("graph", NARROWING(weights=len(weights), casts=len(casts)))
