"""onnxruntime's own activations become standard ops.

    FastGelu(x, b)         ->   Gelu(x + b; approximate=tanh)                  b only where there is one
    BiasGelu(x, b)         ->   Gelu(x + b)
    Gelu(x)                ->   Gelu(x)
    QuickGelu(x; alpha)    ->   x * Sigmoid(alpha * x)                         alpha = 1 is SiLU

onnxruntime's optimizer writes them. (Gaussian error linear units: Hendrycks and Gimpel 2016, section 2 has all three.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphopt.analysis.structure.contrib import contrib_nodes
from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import Inserter, replace, shared_constant

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Ledger

_APPROXIMATE = {"FastGelu": "tanh", "BiasGelu": "none", "Gelu": "none"}
_QUICK, _ALPHA = "QuickGelu", 1.702

ACTIVATION_LIFTED = Rule("canonicalize.activation-lifted", "onnxruntime's {op} became standard ops")


def lift_fused_activations(model: ir.Model, ledger: Ledger) -> None:
    """Lift every fused activation of the graph; the opset must be 20 or later."""
    for node in contrib_nodes(model.graph, *_APPROXIMATE, _QUICK):
        x, y, op_type = node.inputs[0], node.outputs[0], node.op_type
        assert x is not None
        insert = Inserter(model.graph, node, node.name or "activation")
        dims, dtype = None if x.shape is None else list(x.shape), x.dtype or y.dtype
        bias = node.inputs[1] if len(node.inputs) > 1 else None
        if bias is not None:
            x = insert.op("Add", [x, bias], dims, dtype, "biased")
        if op_type == _QUICK:
            alpha = node.attributes.get_float("alpha", _ALPHA)
            argument = x
            if alpha != 1:
                number = np.array(alpha, np.float32 if dtype is None else dtype.numpy())
                argument = insert.op(
                    "Mul", [x, shared_constant(model.graph, f"alpha.{alpha:g}", number)], dims, dtype, "scaled"
                )
            product = insert.op("Mul", [x, insert.op("Sigmoid", [argument], dims, dtype)], dims, dtype)
        else:
            product = insert.op("Gelu", [x], dims, dtype, approximate=_APPROXIMATE[op_type])
        replace(node, insert.nodes, {y: product})
        ledger.changed(insert.nodes[-1], ACTIVATION_LIFTED(op=op_type), [node])
