"""``ai.graphopt::Hadamard``, version 1: an orthogonal transform of a tensor's last axis.

Inputs:
    x: float16, float or double [..., n], of rank 1 or more.
    left: int8 [a, a], right: int8 [b, b], Hadamard matrices; n is a multiple of a b.

Output:
    y: the type and shape of x. Every run of a b coordinates, seen as a matrix X [a, b], becomes
    left^T X right / sqrt(a b); so y = x Q for Q = I (x) left (x) right / sqrt(a b).

The matrices are inputs, so one body serves all orders and a checker can look at the very matrices that run. They are as
small as a + b can be, and nodes of the same width share them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.hadamard.spec.schema import SCHEMA
from graphopt.runtime_ops.operator import DOMAIN, Operator


def function(opset: int) -> ir.Function:
    """Return the body: y = reshape(left^T X right), with 1 / sqrt(a) in left and 1 / sqrt(b) in right.

    What depends on left and right alone is folded when onnxruntime loads the model, as they are constants there. Where
    n is no multiple of a b, the first Reshape is an error: its shape has fewer elements than x.

    The runs' axis is moved behind a for the product with left, which then is one product of two matrices. A product of
    left with a stack of matrices would save the two transposes, but onnxruntime refuses it for a stack of none.
    """
    x, left, right = (ir.Value(name=name) for name in SCHEMA.input_names)
    tape = ir.tape.Tape()
    turned_left = tape.op("Transpose", [_orthogonal(tape, left, x)], {"perm": [1, 0]})
    turned_right = _orthogonal(tape, right, x)
    rows = tape.op("Shape", [left], {"start": 0, "end": 1})
    columns = tape.op("Shape", [right], {"start": 0, "end": 1})
    in_each = tape.op("Div", [tape.op("Shape", [x], {"start": -1}), tape.op("Mul", [rows, columns])])
    leading = tape.op("Concat", [tape.op("Shape", [x], {"start": 0, "end": -1}), in_each], {"axis": 0})
    runs = tape.op("ReduceProd", [leading], {"keepdims": 1})
    # allowzero: an axis may be empty, as for an expert that no token goes to
    matrices = tape.op("Reshape", [x, tape.op("Concat", [runs, rows, columns], {"axis": 0})], {"allowzero": 1})
    half = tape.op("Transpose", [tape.op("MatMul", [matrices, turned_right])], {"perm": [1, 0, 2]})
    flat = tape.op("Concat", [rows, tape.op("Constant", [], {"value_ints": [-1]})], {"axis": 0})
    whole = tape.op("MatMul", [turned_left, tape.op("Reshape", [half, flat])])
    blocks = tape.op("Reshape", [whole, tape.op("Concat", [rows, runs, columns], {"axis": 0})], {"allowzero": 1})
    products = tape.op("Transpose", [blocks], {"perm": [1, 0, 2]})
    y = tape.op("Reshape", [products, tape.op("Shape", [x])], {"allowzero": 1})
    y.name = "y"
    graph = ir.Graph([x, left, right], [y], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, graph=graph, attributes=SCHEMA.parameters)


def reference(
    x: npt.NDArray[np.floating], left: npt.NDArray[np.int8], right: npt.NDArray[np.int8]
) -> npt.NDArray[np.floating]:
    """Return what the operator means, in float64 and then rounded to the type of ``x``.

    Raises:
        ValueError: the last axis of ``x`` is no multiple of a b.
    """
    order = len(left) * len(right)
    if x.shape[-1] % order:
        raise ValueError(f"the last axis of x is {x.shape[-1]}, which is no multiple of {len(left)} x {len(right)}")
    runs = x.astype(np.float64).reshape(-1, len(left), len(right))
    with np.errstate(invalid="ignore", over="ignore"):  # overflow, infinity and NaN are allowed
        products = left.T.astype(np.float64) @ runs @ right.astype(np.float64)
        y: npt.NDArray[np.floating] = (products.reshape(x.shape) / np.sqrt(order)).astype(x.dtype)
    return y


def _orthogonal(tape: ir.tape.Tape, matrix: ir.Value, reference: ir.Value) -> ir.Value:
    """Return ``matrix`` [n, n] / sqrt(n), in the type of ``reference``; the root is a double, rounded once."""
    order = tape.op("Cast", [tape.op("Shape", [matrix], {"start": 0, "end": 1})], {"to": ir.DataType.DOUBLE})
    wide = tape.op("Cast", [matrix], {"to": ir.DataType.DOUBLE})
    return tape.op("CastLike", [tape.op("Div", [wide, tape.op("Sqrt", [order])]), reference])


HADAMARD = Operator(SCHEMA, function, reference)
