"""Scales that are stored in fewer bytes for the file's sake become float32 again."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.scales import leveled_nodes, widened_scales
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import bypass, shared_constant
from graphopt.graph.weights import Cast, WeightTensor, expression_of, new_weight
from graphopt.passes.base import Pass
from graphopt.passes.common.leveled_scales import EXACT, join_levels, leveled_scales
from graphopt.passes.common.scale_levels import UnpackedLevels
from graphopt.runtime_ops import port, schema_of

if TYPE_CHECKING:
    from graphopt.passes.context import Context, Ledger
    from graphopt.passes.recipe import Recipe

FLOAT32_SCALES = Rule("widen_scales.widened", "{scales} in float32, as it is read")


class WidenScales(Pass):
    """Undo the step ``compact_scales``, so that every pass meets scales as constants.

    before::

        W = DequantizeLinear(codes, Cast(scales; to float32))               scales: float16
        y = MatMulTable(x, codes, levels, ...; span, low)                   levels: uint8 [tiles, bytes]
        y = MatMulTable(x, codes, Cast(Mul(Cast(levels), steps)), ...)      levels: float8; or codes of nested scales

    after::

        W = DequantizeLinear(codes, scales')                                scales': float32
        y = MatMulTable(x, codes, scales', ...)                             scales': float32 [tiles, groups, 16]

    float32 holds every number of float16, and every product of levels, so nothing changes. graphopt adds this step
    itself to every recipe for a graph with such scales.
    """

    name: ClassVar[str] = "widen_scales"
    effect: ClassVar[Effect] = "exact"

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether scales are stored in float16 and read in float32, or in two levels."""
        del recipe
        return bool(widened_scales(graph) or leveled_nodes(graph) or leveled_scales(graph, EXACT))

    def requires(self, model: ir.Model) -> None:
        """Demand nothing: the opset is raised later."""

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Put a constant in the place of every such ``Cast``."""
        graph = model.graph
        _widen_levels(graph, context.ledger)
        for scales, cast in join_levels(graph, EXACT).items():
            context.ledger.changed(scales, FLOAT32_SCALES(scales=scales.name), [cast])
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


def _widen_levels(graph: ir.Graph, ledger: Ledger) -> None:
    """Let nodes with packed codes read numbers again where they read them in two levels."""
    whole: dict[ir.Value, ir.Value] = {}
    for node in leveled_nodes(graph):
        rows, group, span, low = (node.attributes.get_int(name, 0) for name in ("rows", "group", "span", "low"))
        rank = 0
        for name in ("scales", "zero_points"):
            index = schema_of(node).index(name)
            value = port(node, name)
            if schema_of(node).inputs[index].is_absent(value):
                zero = np.zeros((1,) * rank, np.float32)
                node.replace_input_with(index, shared_constant(graph, "no_zero_points.float", zero))
                if value is not None and not value.uses():
                    graph.initializers.pop(value.name or "", None)
                continue
            assert value is not None
            if value not in whole:
                expression = UnpackedLevels(expression_of(value.const_value), -(-rows // group), span, low)
                numbers = WeightTensor(expression)
                del graph.initializers[value.name or ""]
                whole[value] = new_weight(graph, value.name or "scales", numbers)
            node.replace_input_with(index, whole[value])
            rank = len(whole[value].shape or ())
            ledger.changed(node, FLOAT32_SCALES(scales=whole[value].name), [node])
        del node.attributes["span"], node.attributes["low"]
