"""``ai.graphopt::MatMulDynamic``, version 1: MatMulTable of activations that are rotated and rounded token by token.

Inputs, all of them required:
    x, codes, scales, table, zero_points, bias: as :mod:`graphopt.runtime_ops.matmul_table.spec.op` says.
    left: int8 [a, a], right: int8 [b, b], as :mod:`graphopt.runtime_ops.hadamard.spec.op` says; K is a multiple of
        a b. With [[1]] and [[1]] x is not rotated.

Attributes:
    rows, columns, group: as for MatMulTable.
    bits: int, 8 or 4.
    clip: float above 0, at most 1.
    minimums, trellis, span, low, base: as for MatMulTable; optional.

Output:
    y: the type of x, [..., N]::

        h = Hadamard(x, left, right)
        m = clip max|h| over a row of h      L = 127 for 8 bits, 7 for 4      s = m / L
        q = round(h (L / m)), ties to even, from -L to L
        y = (q s) W + bias, with W and bias as for MatMulTable

    in float32 arithmetic. Where m < 1e-30, q is 0. A row with a number that is not finite gives a row of NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.hadamard.spec.op import reference as hadamard
from graphopt.runtime_ops.matmul_dynamic.spec.schema import SCHEMA
from graphopt.runtime_ops.matmul_table.spec.activations import round_rows, row_rounding_nodes
from graphopt.runtime_ops.matmul_table.spec.body import flags_of, sizes_of, weight_of
from graphopt.runtime_ops.matmul_table.spec.op import MATMUL_TABLE, dequantize
from graphopt.runtime_ops.matmul_table.spec.schema import overload
from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.runtime_ops.tape import branch, choice

Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]

LEVELS = {8: 127, 4: 7}
"""The largest code of an activation, by bits."""


def function(opset: int, **attributes_of_node: Any) -> ir.Function:
    """Return the body: Hadamard, the rounding, MatMulTable. It needs the bodies of both beside it.

    With minimums, a trellis or scales in two levels it is a MatMul: onnxruntime finds no overload of MatMulTable from
    within a body. Whether there is a rotation at all is folded when onnxruntime loads the model.
    """
    name = overload(**attributes_of_node)
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    x, codes, scales, table, zero_points, bias, left, right = inputs
    tape = ir.tape.Tape()
    wide = tape.op("Cast", [x], {"to": ir.DataType.FLOAT})
    orders = [tape.op("Shape", [matrix], {"start": 0, "end": 1}) for matrix in (left, right)]
    unit = tape.op("Constant", [], {"value_ints": [1]})
    turns = tape.op("Greater", [tape.op("Mul", orders), unit])
    branches = {
        "then_branch": branch("turned", lambda tape: tape.op(HADAMARD.name, [wide, left, right], domain=DOMAIN)),
        "else_branch": branch("plain", lambda tape: tape.op("Identity", [wide])),
    }
    h = tape.op("If", [turns], branches)
    by_bits = tape.op("Constant", [], {"value_floats": [float(levels) for levels in LEVELS.values()]})
    levels = tape.op("Gather", [by_bits, choice(tape, "bits", ir.AttributeType.INT, list(LEVELS))], {"axis": 0})
    clip = tape.op("Constant", [], {"value_float": ir.RefAttr("value_float", "clip", ir.AttributeType.FLOAT)})
    activations = row_rounding_nodes(tape, h, levels, clip)
    attributes: dict[str, Any] = {
        name: ir.RefAttr(name, name, ir.AttributeType.INT) for name in ("rows", "columns", "group")
    }
    if name:
        weight = weight_of(tape, (codes, scales, table, zero_points), sizes_of(tape), **flags_of(attributes_of_node))
        product = tape.op("Add", [tape.op("MatMul", [activations, weight]), bias])
    else:
        attributes["activations"] = "float32"
        product = tape.op(MATMUL_TABLE.name, [activations, *inputs[1:6]], attributes, domain=DOMAIN)
    y = tape.op("CastLike", [product, x])
    y.name = "y"
    opsets = {"": opset, DOMAIN: MATMUL_TABLE.version}
    graph = ir.Graph(inputs, [y], nodes=tape.nodes, opset_imports=opsets, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, name, graph=graph, attributes=SCHEMA.parameters_for(name))


def reference(
    x: Floats,
    codes: npt.NDArray[np.uint8],
    scales: Floats,
    table: Floats,
    zero_points: Floats,
    bias: Floats,
    left: npt.NDArray[np.int8],
    right: npt.NDArray[np.int8],
    rows: int,
    columns: int,
    group: int,
    bits: int,
    clip: float,
    minimums: int = 0,
    trellis: int = 0,
    span: int = 0,
    low: int = 0,
    base: int = 0,
) -> Doubles:
    """Return what the operator means: h in float64 and then rounded to float32, q and s in float32, then float64.

    A kernel's h differs from that by the roundings of its sums, and so one of its q may differ by 1 where h (L / m) is
    close to halfway between two integers.

    Returns:
        float64 [..., N].

    Raises:
        ValueError: the shapes do not fit one another, or ``bits`` is neither 8 nor 4.
        IndexError: a code has no entry in the table.
    """
    if bits not in LEVELS:
        raise ValueError(f"activations have 8 or 4 bits, not {bits}")
    h = hadamard(x.astype(np.float64), left, right) if len(left) * len(right) > 1 else x
    activations = round_rows(h.astype(np.float32), LEVELS[bits], clip)
    weight = dequantize(codes, scales, table, zero_points, rows, columns, group, minimums, trellis, span, low, base)
    with np.errstate(invalid="ignore"):  # x that is not finite makes y not finite
        y: Doubles = activations @ weight + bias.astype(np.float64)
    return y


MATMUL_DYNAMIC = Operator(SCHEMA, function, reference, overload)
