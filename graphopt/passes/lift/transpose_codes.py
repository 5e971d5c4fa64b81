"""Codes lie as the product reads them, so that onnxruntime fuses the product with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.transposed_codes import transposed_codes
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import drop, replace
from graphopt.graph.weights import new_weight, weight_of
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context

NEW_LAYOUT = Rule("transpose_codes.transposed", "codes of {weight} as [{rows}, {columns}]")

SCALES_NOT_STORED = Rule("transpose_codes.computed", "its scales or zero points are computed, and not constants")


class TransposeCodes(Pass):
    """Store codes in the layout of the product.

    before::

        y = MatMul(x, Transpose(DequantizeLinear(codes [N, K], scales; axis=1, block_size)))

    after::

        y = MatMul(x, DequantizeLinear(codes^T [K, N], scales^T; axis=0, block_size))

    The numbers are the same. onnxruntime sees the second form and multiplies by codes; of the first it decodes the
    whole weight in each run.
    """

    name: ClassVar[str] = "transpose_codes"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("canonicalize",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Transpose the codes of each such product."""
        graph = model.graph
        for transpose in transposed_codes(graph):
            old = transpose.inputs[0]
            reader = None if old is None else old.producer()
            assert old is not None
            assert reader is not None
            weights = [weight_of(reader, index) for index in range(len(reader.inputs))]
            if any(weight is None and value is not None for weight, value in zip(weights, reader.inputs, strict=True)):
                context.ledger.skipped(reader, SCALES_NOT_STORED())
                continue
            values: list[ir.Value | None] = []
            for weight, value in zip(weights, reader.inputs, strict=True):
                if weight is None or weight.const_value is None or len(weight.const_value.shape) != 2:
                    values.append(value)
                    continue
                array = np.ascontiguousarray(weight.const_value.numpy().T)
                tensor = ir.Tensor(array, dtype=weight.const_value.dtype)
                values.append(new_weight(graph, f"{weight.name}.transposed", tensor))
            attributes = {name: attribute for name, attribute in reader.attributes.items() if name != "axis"}
            new = ir.Node(
                "",
                "DequantizeLinear",
                values,
                [*attributes.values(), ir.AttrInt64("axis", 1 - reader.attributes.get_int("axis", 1) % 2)],
                name=f"{reader.name}.transposed",
            )
            new.outputs[0].type, new.outputs[0].shape = transpose.outputs[0].type, transpose.outputs[0].shape
            weight = weight_of(reader, 0)
            replace(transpose, new)
            shape = values[0].shape if values[0] is not None else None
            rows, columns = (str(size) for size in (shape or ("?", "?")))
            name = "?" if weight is None else weight.name
            context.ledger.changed(new, NEW_LAYOUT(weight=name, rows=rows, columns=columns), [reader, transpose])
            drop(graph, old)
