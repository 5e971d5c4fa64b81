"""Scales that are stored in float16 for the file's sake become the float32 that operators read."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.scales import widened_scales
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import bypass
from graphopt.graph.weights import Cast, WeightTensor, expression_of, new_weight
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

FLOAT32_SCALES = Rule("widen_scales.widened", "{scales} in float32, as it is read")


class WidenScales(Pass):
    """Undo the step ``compact_scales``, so that every pass meets scales as constants.

    before::

        W = DequantizeLinear(codes, Cast(scales; to float32))               scales: float16

    after::

        W = DequantizeLinear(codes, scales')                                scales': float32

    float32 holds every number of float16, so nothing changes. graphopt adds this step itself to every recipe for a
    graph with such scales.
    """

    name: ClassVar[str] = "widen_scales"
    effect: ClassVar[Effect] = "exact"

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether scales are stored in float16 and read in float32."""
        del recipe
        return bool(widened_scales(graph))

    def requires(self, model: ir.Model) -> None:
        """Demand nothing: the opset is raised later."""

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Put a constant in the place of every such ``Cast``."""
        graph = model.graph
        made_of: dict[str, WeightTensor] = {}
        for cast, weight in widened_scales(graph).items():
            name, has_one_reader = weight.name or "scales", len(weight.uses()) == 1
            expression = expression_of(weight.const_value)
            wide = made_of.setdefault(expression.digest, WeightTensor(Cast(expression, ir.DataType.FLOAT)))
            if has_one_reader:
                del graph.initializers[name]
            scales = new_weight(graph, name, wide)
            context.ledger.changed(scales, FLOAT32_SCALES(scales=scales.name), [cast])
            bypass(cast, scales)
