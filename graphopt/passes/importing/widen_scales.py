"""Scales that are stored in fewer bytes for the file's sake become the numbers that operators read."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.scales import computed_scales, parts_of
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import bypass
from graphopt.graph.weights import WeightTensor, new_weight
from graphopt.passes.base import Pass
from graphopt.passes.common.scale_forms import expression_of_nodes

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

WHOLE_SCALES = Rule("widen_scales.widened", "{scales} in {type}, as it is read")
UNKNOWN_FORM = Rule("widen_scales.unknown", "{scales} are computed by {op_type}, which is no form of the step")


class WidenScales(Pass):
    """Undo the step ``compact_scales``, so that every pass meets scales as constants.

    before::

        W = DequantizeLinear(codes, Cast(scales; to float32))               scales: float16
        y = MatMulTable(x, codes, Reshape(Mul(Cast(levels), Cast(steps))), ...)

    after::

        W = DequantizeLinear(codes, scales')                                scales': float32
        y = MatMulTable(x, codes, scales'', ...)                            scales'': float32

    The constants are what the nodes compute, so nothing changes. graphopt adds this step itself to every recipe for a
    graph with such scales.
    """

    name: ClassVar[str] = "widen_scales"
    effect: ClassVar[Effect] = "exact"

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether scales are computed of constants of fewer bytes."""
        del recipe
        return bool(computed_scales(graph))

    def requires(self, model: ir.Model) -> None:
        """Demand nothing: the opset is raised later."""

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Put a constant in the place of what computes each."""
        graph = model.graph
        made_of: dict[str, WeightTensor] = {}
        for value in computed_scales(graph):
            node, parts = value.producer(), parts_of(value)
            assert node is not None
            expression = expression_of_nodes(value)
            if expression is None:
                context.ledger.skipped(value, UNKNOWN_FORM(scales=value.name, op_type=node.op_type))
                continue
            whole = made_of.setdefault(expression.digest, WeightTensor(expression))
            name = (parts[0].name or "scales").rpartition(".")[0] or parts[0].name or "scales"
            scales = new_weight(graph, name, whole)
            context.ledger.changed(scales, WHOLE_SCALES(scales=scales.name, type=expression.dtype.name.lower()), [node])
            bypass(node, scales)
