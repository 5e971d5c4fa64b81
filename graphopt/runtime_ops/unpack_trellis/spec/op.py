"""``ai.graphopt::UnpackTrellis``, version 1: the matrix that packed codes of a trellis stand for.

Inputs, all of them required:
    codes: uint8 [T, U, 32 bits], codes [K, N] of 1 to 6 bits in the layout of ``MatMulTable``, T = ceil(N / 16).
    scales: float or float16 [T, G, 16], G = ceil(K / group); finite.
    tables: float [2, entries], as ``DequantizeTrellis`` has them.

Attributes:
    rows: int, K.
    columns: int, N.
    group: int, the rows that share a scale. The last group may be shorter.

Output:
    W: float [K, N], what ``DequantizeTrellis`` makes of the same codes, scales and tables, to the last bit.

It has no kernel. The body depends on constants alone, so onnxruntime makes a float matrix of it when it loads the
model: the file is small, and what runs is a product with float weights, as fast and as large as of the float model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.dequantize_trellis.spec.op import reference as dequantize
from graphopt.runtime_ops.dequantize_trellis.spec.op import value_nodes
from graphopt.runtime_ops.matmul_table.spec.body import for_each_row, sizes_of, unpack_nodes
from graphopt.runtime_ops.matmul_table.spec.packing import bits_of, unpack, untile
from graphopt.runtime_ops.operator import DOMAIN, Operator
from graphopt.runtime_ops.tape import ints
from graphopt.runtime_ops.unpack_trellis.spec.schema import SCHEMA

Floats = npt.NDArray[np.floating[Any]]


def function(opset: int) -> ir.Function:
    """Return the body. It depends on constants alone, so onnxruntime folds it when it loads the model."""
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    codes, scales, tables = inputs
    tape = ir.tape.Tape()
    rows, columns, group = sizes_of(tape)
    bits = tape.op("Div", [tape.op("Shape", [codes], {"start": 2}), ints(tape, 32)])
    values = value_nodes(tape, unpack_nodes(tape, codes, rows, columns), columns, tables, bits)
    weight = tape.op("Mul", [values, for_each_row(tape, scales, rows, columns, group)])
    weight.name = "W"
    graph = ir.Graph(inputs, [weight], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, graph=graph, attributes=SCHEMA.parameters)


def reference(
    codes: npt.NDArray[np.uint8], scales: Floats, tables: Floats, rows: int, columns: int, group: int
) -> npt.NDArray[np.float32]:
    """Return what the operator means, float32 [K, N].

    Raises:
        ValueError: the shapes do not fit one another.
    """
    return dequantize(unpack(codes, rows, columns), untile(scales, columns), tables, bits_of(codes.shape), group)


UNPACK_TRELLIS = Operator(SCHEMA, function, reference)
