"""onnxruntime's product with codes rounds its inputs to int8."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.contrib import contrib_nodes
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.passes.base import Pass

if TYPE_CHECKING:
    from graphopt.passes.context import Context

ROUNDS = Rule("accuracy_level.set", "inputs rounded to int8 in groups of {group}, accuracy_level {before} before")

LEVEL, INT8 = "accuracy_level", 4
"""The attribute of ``MatMulNBits``, and the level at which it multiplies bytes."""


def slow_products(graph: ir.Graph) -> list[ir.Node]:
    """Return the products ``MatMulNBits`` that decode their weights to float32 in each run, by their level."""
    return [node for node in contrib_nodes(graph, "MatMulNBits") if node.attributes.get_int(LEVEL, 0) in (0, 1)]


class AccuracyLevel(Pass):
    """Let ``com.microsoft::MatMulNBits`` round its inputs to int8.

    before::

        y = MatMulNBits(x, codes, scales; accuracy_level absent, 0 or 1)        x as it is

    after::

        y = MatMulNBits(x, codes, scales; accuracy_level=4)                     x to int8, a scale for each group

    Without the attribute onnxruntime decodes weights to float32 and multiplies floats; with it a CPU multiplies bytes.
    An input moves by up to 1/254 of the largest number of its group.
    """

    name: ClassVar[str] = "accuracy_level"
    effect: ClassVar[Effect] = "lossy"
    # The last: what comes behind would be compared through the rounding of inputs.
    after: ClassVar[tuple[str, ...]] = ("integer_zero_points", "compact_scales", "level_scales", "share_weights")

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Set the attribute of each product that lacks it."""
        for node in slow_products(model.graph):
            level, group = node.attributes.get_int(LEVEL, 0), node.attributes.get_int("block_size", 0)
            node.attributes[LEVEL] = ir.AttrInt64(LEVEL, INT8)
            context.ledger.changed(node, ROUNDS(group=group, before=level), [node])
