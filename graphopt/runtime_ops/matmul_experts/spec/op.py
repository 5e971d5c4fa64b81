"""``ai.graphopt::MatMulExperts``, version 1: products with the weights of the experts that a router chose.

Inputs, all of them required:
    x: float or float16, experts.shape + [K]: a row for each slot; or [..., K] with experts [..., top]: a row for the
        top slots of a token.
    codes: uint8 [E, T, U, 32 bits]: for each expert what MatMulTable reads, see
        :mod:`graphopt.runtime_ops.matmul_table.spec.op`.
    scales: float or float16 [E, T, G, 16], finite; or uint8 [E, T, B], in two levels.
    table: float [entries], or of a trellis [2, entries]: the same for all experts.
    zero_points: the type of scales, [E, T, G, 16] or [1, 1, 1, 1], where [[[[0]]]] is neutral; [[[0]]] beside bytes.
    bias: float [E, N], or [1], where [0] is neutral.
    experts: int64 [...], below E: the expert of each slot, negative for none.

Attributes:
    rows, columns, group, activations, minimums, trellis, span, low, base: as for MatMulTable, of the matrix of one
        expert. N is a multiple of 16 where trellis is 1.

Output:
    y: the type of x, experts.shape + [N]. For slot s, which reads the row x_s, and W_e and b_e of expert e::

        y[s] = round(x_s) W_e + b_e,  e = experts[s]        as MatMulTable says
        y[s] = 0                                            where experts[s] is negative

A kernel reads the weights of each expert once, for all slots that chose it, and of an expert that none chose not at
all. In integer modes y[s] has the bits that MatMulTable gives for that row and that expert.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.runtime_ops.matmul_experts.spec.body import function
from graphopt.runtime_ops.matmul_experts.spec.schema import SCHEMA
from graphopt.runtime_ops.matmul_table.spec.activations import round_activations, to_bfloat16
from graphopt.runtime_ops.matmul_table.spec.op import dequantize
from graphopt.runtime_ops.matmul_table.spec.packing import TILE
from graphopt.runtime_ops.matmul_table.spec.schema import overload
from graphopt.runtime_ops.operator import Operator

Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]


def reference(
    x: Floats,
    codes: npt.NDArray[np.uint8],
    scales: Floats,
    table: Floats,
    zero_points: Floats,
    bias: Floats,
    experts: npt.NDArray[np.int64],
    rows: int,
    columns: int,
    group: int,
    activations: str,
    minimums: int = 0,
    trellis: int = 0,
    span: int = 0,
    low: int = 0,
    base: int = 0,
) -> Doubles:
    """Return what the operator means: x rounded in float32 arithmetic, everything behind it in float64.

    Returns:
        float64, the shape of experts and [N].

    Raises:
        ValueError: the shapes do not fit one another, or there is no such rounding of activations.
        IndexError: a code has no entry in the table, or there is no such expert.
    """
    if trellis and columns % TILE:
        raise ValueError(f"experts of a trellis have a multiple of {TILE} columns, not {columns}")
    is_shared = x.ndim == experts.ndim
    if x.shape[:-1] != (experts.shape[:-1] if is_shared else experts.shape):
        raise ValueError(f"experts {list(experts.shape)} do not fit x {list(x.shape)}")
    product_rows = round_activations(x, group, activations)
    of_slots = np.broadcast_to(product_rows[..., None, :] if is_shared else product_rows, (*experts.shape, rows))
    if activations == "bfloat16" and not trellis:
        table = to_bfloat16(table)
    zeros = np.broadcast_to(zero_points, scales.shape)
    biases = np.broadcast_to(bias.astype(np.float64), (len(codes), columns))
    y = np.zeros((*experts.shape, columns))
    for expert in np.unique(experts[experts >= 0]):
        tensors = (codes[expert], scales[expert], table, zeros[expert])
        weight = dequantize(*tensors, rows, columns, group, minimums, trellis, span, low, base)
        with np.errstate(invalid="ignore"):  # x that is not finite makes y not finite
            y[experts == expert] = of_slots[experts == expert] @ weight + biases[expert]
    return y


MATMUL_EXPERTS = Operator(SCHEMA, function, reference, overload)
