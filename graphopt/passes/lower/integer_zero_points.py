"""Zero points of onnxruntime's products as codes, not as floats."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.contrib import contrib_nodes
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import drop
from graphopt.graph.weights import new_weight, weight_of
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context

PACKING = Rule("integer_zero_points.packed", "{count} zero points as codes of {bits} bits")
NOT_WHOLE = Rule("integer_zero_points.not-whole", "zero points of {weight} are no whole codes of {bits} bits")

_ZERO_POINTS = 3


def float_zero_points(graph: ir.Graph) -> list[ir.Node]:
    """Return the products ``MatMulNBits`` whose zero points are floats."""
    return [
        node
        for node in contrib_nodes(graph, "MatMulNBits")
        if (zeros := weight_of(node, _ZERO_POINTS)) is not None
        and zeros.const_value is not None
        and zeros.const_value.dtype.is_floating_point()
    ]


class IntegerZeroPoints(Pass):
    """Pack the zero points of ``com.microsoft::MatMulNBits`` where they are whole numbers.

    before::

        y = MatMulNBits(x, codes, scales, zero points: float [N groups])

    after::

        y = MatMulNBits(x, codes, scales, zero points: uint8 [N ceil(groups bits / 8)])

    Codes of a column lie one after the other from the lowest bit on, as those of weights do. The numbers are the same;
    onnxruntime has its fast kernels for the second form only.
    """

    name: ClassVar[str] = "integer_zero_points"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("lower",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Pack what can be; say why others stay."""
        graph = model.graph
        for node in float_zero_points(graph):
            zeros = weight_of(node, _ZERO_POINTS)
            assert zeros is not None
            assert zeros.const_value is not None
            bits, columns = node.attributes.get_int("bits", 4), node.attributes.get_int("N", 0)
            numbers = np.asarray(zeros.const_value.numpy(), np.float64).reshape(columns, -1)
            if 8 % bits or not np.isin(numbers, np.arange(1 << bits)).all():
                context.ledger.skipped(node, NOT_WHOLE(weight=zeros.name, bits=bits))
                continue
            new_bytes = new_weight(graph, f"{zeros.name}.codes", ir.tensor(pack(numbers.astype(np.uint8), bits)))
            node.replace_input_with(_ZERO_POINTS, new_bytes)
            context.ledger.changed(node, PACKING(count=numbers.size, bits=bits), [node, zeros])
            drop(graph, zeros)


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Return codes [columns, groups] as bytes [columns x ceil(groups bits / 8)], the first in the lowest bits."""
    per_byte = 8 // bits
    columns, groups = codes.shape
    codes_of_bytes = np.zeros((columns, -(-groups // per_byte) * per_byte), np.uint8)
    codes_of_bytes[:, :groups] = codes
    parts = codes_of_bytes.reshape(columns, -1, per_byte) << (bits * np.arange(per_byte, dtype=np.uint8))
    new_bytes: np.ndarray = np.bitwise_or.reduce(parts, axis=-1)
    return new_bytes.reshape(-1)
