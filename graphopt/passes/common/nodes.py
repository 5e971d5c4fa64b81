"""Small questions about nodes and values that several passes ask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir


# fmt: off
ELEMENTWISE = frozenset((
    "Abs", "Add", "And", "Cast", "CastLike", "Clip", "Div", "Elu", "Equal", "Erf", "Exp", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max",
    "Min", "Mish", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub",
    "Swish", "Tanh", "Where",
))
# fmt: on
"""Operators of ONNX that treat each number by itself: rows may stand in any order."""


def attentions(model: ir.Model) -> list[ir.Node]:
    """Return the standard ``Attention`` nodes of the graph, in order."""
    return [node for node in model.graph if node.op_type == "Attention" and node.domain == ""]


def scalar(value: ir.Value | None) -> float | None:
    """Return the number that a constant of one element holds, else ``None``."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return float(np.asarray(value.const_value.numpy()).reshape(-1)[0])
