"""``ai.graphopt::Dequantize``, version 1: the matrix that a matrix of codes stands for.

Inputs, all of them required:
    codes: uint8 [K, N], one code per byte.
    scales: float or float16 [G, N], G = ceil(K / group); finite.
    table: float [entries], 1 <= entries <= 256, finite. A code that is not below entries is an error.
    zero_points: the type of scales, [G, N] or [1, 1]: values, in units of the table. [[0]] is the placeholder for none.

Attributes:
    group: int, the rows that share a scale: a multiple of 16, or K. The last group may be shorter.
    minimums: int, 1 where zero_points are minimums, in units of W and not of the table; optional, else 0.

Output:
    W: float [K, N], in float32 arithmetic, with g = k div group::

        W[k, n] = (table[codes[k, n]] - zero_points[g, n]) scales[g, n]
        W[k, n] = table[codes[k, n]] scales[g, n] + zero_points[g, n]        where minimums is 1

This is how a quantized weight is written between the phases ``codes`` and ``lower`` where ``DequantizeLinear`` cannot
say it: in front of a standard ``MatMul``, in no layout. It has no kernel and needs none: the step ``lower`` packs the
codes and turns both nodes into one product, and refuses a graph in which a ``Dequantize`` is left.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.dequantize.spec.schema import SCHEMA
from graphopt.runtime_ops.matmul_table.spec.schema import overload
from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.runtime_ops.tape import ints, number_of

Floats = npt.NDArray[np.floating[Any]]


def function(opset: int, **attributes: Any) -> ir.Function:
    """Return the body. It depends on constants alone, so onnxruntime folds it when it loads the model."""
    minimums = overload(**attributes)
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    codes, scales, table, zero_points = inputs
    tape = ir.tape.Tape()
    rows = tape.op("Shape", [codes], {"start": 0, "end": 1})
    bounds = (ints(tape, 0), rows, ints(tape, 1))
    every_row = tape.op("Range", [tape.op("Squeeze", [bound]) for bound in bounds])
    of_row = tape.op("Div", [every_row, number_of(tape, "group")])

    def for_each_row(per_group: ir.Value) -> ir.Value:
        return tape.op("Gather", [tape.op("Cast", [per_group], {"to": ir.DataType.FLOAT}), of_row], {"axis": 0})

    values = tape.op("Gather", [table, tape.op("Cast", [codes], {"to": ir.DataType.INT32})], {"axis": 0})
    full_zeros = tape.op("Expand", [zero_points, tape.op("Shape", [scales])])
    zeros_of_row = for_each_row(full_zeros)
    differences = values if minimums else tape.op("Sub", [values, zeros_of_row])
    weight = tape.op("Mul", [differences, for_each_row(scales)])
    if minimums:
        weight = tape.op("Add", [weight, zeros_of_row])
    weight.name = "W"
    graph = ir.Graph(inputs, [weight], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, minimums, graph=graph, attributes=SCHEMA.parameters_for(minimums))


def reference(
    codes: npt.NDArray[np.uint8], scales: Floats, table: Floats, zero_points: Floats, group: int, minimums: int = 0
) -> npt.NDArray[np.float32]:
    """Return what the operator means, float32 [K, N].

    Raises:
        ValueError: the shapes do not fit one another.
        IndexError: a code has no entry in the table.
    """
    rows, columns = codes.shape
    if scales.shape != (-(-rows // group), columns):
        raise ValueError(
            f"codes {list(codes.shape)} in groups of {group} have scales [{-(-rows // group)}, {columns}], "
            f"not {list(scales.shape)}"
        )
    of_row = np.arange(rows) // group
    zeros = np.broadcast_to(zero_points, scales.shape).astype(np.float32)
    values = table.astype(np.float32)[codes]
    shifts, factors = zeros[of_row], scales.astype(np.float32)[of_row]
    weight: npt.NDArray[np.float32] = values * factors + shifts if minimums else (values - shifts) * factors
    return weight


DEQUANTIZE = Operator(SCHEMA, function, reference, overload)
