"""``ai.graphopt::SwiGLU``, version 1: a gated activation of two halves that lie side by side.

Input, required:
    x: float or float16 [..., 2 n]: gates, and behind them what they let through.

Output:
    y: the type of x, [..., n], computed in float32 and rounded once::

        y[..., i] = g / (1 + exp(-g)) x[..., n + i]        g = x[..., i]

        and no finite number where one of both is not finite.

It is what stands between the products of an MLP (Shazeer 2020, "GLU Variants Improve Transformer", equation 6 with
beta = 1, without its products), where one product makes both halves: one node for ``Split``, ``Sigmoid`` and two
``Mul``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.runtime_ops.swiglu.spec.schema import SCHEMA
from graphopt.runtime_ops.tape import ints

Floats = npt.NDArray[np.floating[Any]]


def function(opset: int) -> ir.Function:
    """Return the body as a function of the given ONNX opset."""
    x = ir.Value(name="x")
    tape = ir.tape.Tape()
    wide = tape.op("Cast", [x], {"to": ir.DataType.FLOAT})
    half = tape.op("Div", [tape.op("Shape", [x], {"start": -1}), ints(tape, 2)])
    halves = tape.op("Concat", [half, half], {"axis": 0})  # an odd number of columns is more than both
    gate, up = tape.op_multi_out("Split", [wide, halves], {"axis": -1}, num_outputs=2)
    silu = tape.op("Mul", [gate, tape.op("Sigmoid", [gate])])
    y = tape.op("CastLike", [tape.op("Mul", [silu, up]), x])
    y.name = "y"
    graph = ir.Graph([x], [y], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, graph=graph, attributes=SCHEMA.parameters)


def reference(x: Floats) -> Floats:
    """Return what the operator means, in float64 and then rounded to the type of ``x``.

    Raises:
        ValueError: x has no last axis, or one of an odd size.
    """
    if not x.ndim or x.shape[-1] % 2:
        raise ValueError(f"x must have two halves in its last axis, and has the shape {list(x.shape)}")
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    with np.errstate(all="ignore"):  # overflow, infinity and NaN are allowed
        product: Floats = (gate / (1 + np.exp(-gate)) * up).astype(x.dtype)
    return product


SWIGLU = Operator(SCHEMA, function, reference)
"""The schema of ``ai.graphopt::SwiGLU``."""
