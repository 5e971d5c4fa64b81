"""Scales are stored in float16 where that loses nothing, also where an operator reads float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.scales import scale_values, widened_scales
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import name_output
from graphopt.graph.weights import Cast, WeightTensor, expression_of, new_weight
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

FLOAT16_SCALES = Rule("compact_scales.stored", "{scales} in float16: {saved} bytes less")
NOT_HALF = Rule("compact_scales.not-half", "float16 does not hold all of its numbers")

_HALF, _WIDE = ir.DataType.FLOAT16, ir.DataType.FLOAT


class CompactScales(Pass):
    """Store the scales of ``DequantizeLinear`` in half the bytes.

    before::

        W = DequantizeLinear(codes, scales)                                 scales: float32 [groups, columns]

    after::

        W = DequantizeLinear(codes, Cast(scales'; to float32))              scales': float16

    ``DequantizeLinear`` makes float32 of float32 scales only, but ``quantize_weights`` rounds scales to float16 where
    float16 has their range, so the numbers stay what they are. onnxruntime folds the ``Cast`` when it loads the model,
    before it fuses products, so what runs is the same. In groups of 32 a weight of 4 bits takes 4.5 bits in the file,
    not 5. Scales of convolutions and of inputs are few, and stay.

    Every recipe that stores codes gets this step at its end. The step ``widen_scales`` undoes it when an artifact is
    optimized again.
    """

    name: ClassVar[str] = "compact_scales"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("lower", "float16")

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether the recipe makes codes, or scales were compact as the graph came in."""
        return "codes" in recipe.phases or bool(widened_scales(graph))

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Store each scale in float16 that can be; say why another one stays."""
        graph, ledger = model.graph, context.ledger
        order = {node: position for position, node in enumerate(graph)}
        made_of: dict[str, WeightTensor] = {}
        for scales in scale_values(graph):
            if scales.dtype != _WIDE or scales.const_value is None:
                continue
            numbers = np.asarray(scales.const_value.numpy())
            with np.errstate(over="ignore"):
                exact = np.array_equal(numbers.astype(np.float16).astype(np.float32), numbers)
            if not exact:
                ledger.skipped(scales, NOT_HALF())
                continue
            # What is one tensor under several names stays one.
            expression = expression_of(scales.const_value)
            narrow = made_of.setdefault(expression.digest, WeightTensor(Cast(expression, _HALF)))
            name, uses = scales.name or "scales", [*scales.uses()]
            del graph.initializers[name]
            cast = ir.node("Cast", [new_weight(graph, name, narrow)], {"to": _WIDE}, name=f"{name}.wide")
            half_scales = name_output(cast, scales)
            first = min((use.node for use in uses), key=order.__getitem__)
            graph.insert_before(first, cast)
            for use in uses:
                use.node.replace_input_with(use.idx, half_scales)
            ledger.changed(cast, FLOAT16_SCALES(scales=name, saved=2 * numbers.size), [use.node for use in uses])
