"""``ai.graphopt::MatMulCodebook``, version 1: a product with a weight whose codes stand for vectors.

Inputs, all of them required:
    x: float or float16 [..., K], of rank 1 or more.
    codes, scales, levels, level_table, books, shifts: as ``DequantizeCodebook`` takes them.

Attributes, all integers, as those of ``DequantizeCodebook``:
    rows, columns, axis, index_bits, second_bits, sign_bits, level_bits, group, span.

Output:
    y: the type of x, [..., N]: x W, where W [K, N] is what ``DequantizeCodebook`` makes of the others. Sums are of
    float32, in any order, and what summands share, a level and a scale, may be multiplied behind their sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.dequantize_codebook.spec.body import matrix_nodes
from graphopt.runtime_ops.dequantize_codebook.spec.op import reference as dequantize
from graphopt.runtime_ops.dequantize_codebook.spec.schema import overload
from graphopt.runtime_ops.matmul_codebook.spec.schema import SCHEMA
from graphopt.runtime_ops.operator import DOMAIN, Operator

Floats = npt.NDArray[np.floating[Any]]


def function(opset: int, **attributes: Any) -> ir.Function:
    """Return the body as a function of the given ONNX opset."""
    inputs = [ir.Value(name=name) for name in SCHEMA.input_names]
    x, *operands = inputs
    tape = ir.tape.Tape()
    weight = matrix_nodes(tape, operands, **attributes)
    wide = tape.op("Cast", [x], {"to": ir.DataType.FLOAT})
    y = tape.op("CastLike", [tape.op("MatMul", [wide, weight]), x])
    y.name = "y"
    graph = ir.Graph(inputs, [y], nodes=tape.nodes, opset_imports={"": opset}, name=SCHEMA.name)
    return ir.Function(DOMAIN, SCHEMA.name, overload(**attributes), graph=graph, attributes=SCHEMA.parameters)


def reference(x: Floats, *operands: Any, **attributes: Any) -> Floats:
    """Return what the operator means, summed up in float64 and then rounded to the type of ``x``.

    Raises:
        ValueError: shapes and attributes do not fit one another.
    """
    weight = dequantize(*operands, **attributes)
    if x.ndim < 1 or x.shape[-1] != len(weight):
        raise ValueError(f"x must be [..., {len(weight)}], and is {list(x.shape)}")
    with np.errstate(invalid="ignore", over="ignore"):  # x that is not finite makes y not finite
        y: Floats = (x.astype(np.float64) @ weight.astype(np.float64)).astype(x.dtype)
    return y


MATMUL_CODEBOOK = Operator(SCHEMA, function, reference, overload)
