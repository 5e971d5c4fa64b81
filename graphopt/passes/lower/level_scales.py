"""Scales of packed products in two levels: a byte for each group under a float for each column."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from graphopt.analysis.structure.products import packed_nodes
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.weights import Expression, Part, expression_of
from graphopt.passes.base import Pass
from graphopt.passes.common.leveled_scales import BYTES, Levels, leveled_scales, read_levels
from graphopt.runtime_ops import port
from graphopt.runtime_ops.matmul_dynamic.spec.op import MATMUL_DYNAMIC
from graphopt.runtime_ops.matmul_experts.spec.op import MATMUL_EXPERTS
from graphopt.runtime_ops.matmul_table.spec.op import MATMUL_TABLE
from graphopt.runtime_ops.operator import DOMAIN

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

BYTE_SCALES = Rule("level_scales.leveled", "{scales} in bytes of {columns} steps: {saved} bytes less")
FEW_SCALES = Rule(
    "level_scales.few", "a column has {groups} scales only: a byte for each and a step would save nothing"
)
OTHER_READER = Rule("level_scales.shared", "{op_type} reads it too")
NOT_CONSTANT = Rule("level_scales.computed", "its scales are no constant")
OTHER_FORM = Rule("level_scales.other-form", "{op_type} stores scales in a form of its own")

_OPERATORS = (MATMUL_TABLE.name, MATMUL_DYNAMIC.name, MATMUL_EXPERTS.name)
"""Products that read scales of a float for each group of a column."""


class LevelScales(Pass):
    """Store a scale as a byte.

    before::

        y = MatMulTable(x, codes, scales, ...)                    scales: float16 [tiles, groups, 16]

    after::

        y = MatMulTable(x, codes, scales', ...)     scales' = Cast(Mul(Cast(levels), Cast(steps)); to float16)

    with ``levels`` uint8 [tiles, groups, 16] and ``steps`` bfloat16 [tiles, 1, 16], one for each column; likewise for
    ``MatMulExperts``, whose scales are [experts, tiles, groups, 16]. onnxruntime
    folds what makes ``scales'`` when it loads the model, so the kernel and its memory stay what they are; the file is
    smaller by nearly a byte for each group. Codes are not chosen again: a level is off by half of 1/254 of the largest
    scale of its column at most (scales under a scale: llama.cpp's K-quants; QServe, Lin et al. 2024, section 4.1).

    A lookup that shares the codes of a product reads the same scales. The step ``unpack`` makes one constant of them
    again, of the same numbers, when an artifact is optimized once more; graphopt adds this step then.
    """

    name: ClassVar[str] = "level_scales"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("lower", "group_experts", "float16")

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether packed scales have two levels already, and the recipe has work with codes."""
        return (
            bool(packed_nodes(graph))
            and bool(recipe.phases & {"codes", "lower"})
            and bool(leveled_scales(graph, BYTES))
        )

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Level the scales of every packed product; say why others stay."""
        graph, ledger = model.graph, context.ledger
        order = {node: position for position, node in enumerate(graph)}
        for scales, reader in {port(node, "scales"): node for node in packed_nodes(graph)}.items():
            reason = _refusal(reader, scales)
            if reason is not None:
                ledger.skipped(reader if scales is None else scales, reason)
                continue
            assert scales is not None
            expression, uses = expression_of(scales.const_value), [*scales.uses()]
            nodes = read_levels(graph, scales, Levels(expression), order)
            columns = math.prod(expression.shape) // expression.shape[-2]
            fact = BYTE_SCALES(scales=scales.name, columns=columns, saved=_saved_bytes(expression))
            for node in nodes:
                ledger.changed(node, fact, [use.node for use in uses])


def _refusal(product: ir.Node, scales: ir.Value | None) -> Fact | None:
    """Return why the scales of a packed product stay as they are; ``None`` where they become levels and steps."""
    if product.op_type not in _OPERATORS:
        return OTHER_FORM(op_type=product.op_type)
    if scales is None or scales.const_value is None:
        return NOT_CONSTANT()
    other_reader = next((use.node for use in scales.uses() if use.node.domain != DOMAIN), None)
    if other_reader is not None:
        return OTHER_READER(op_type=other_reader.op_type)
    expression = expression_of(scales.const_value)
    return None if _saved_bytes(expression) > 0 else FEW_SCALES(groups=expression.shape[-2])


def _saved_bytes(scales: Expression) -> int:
    """Return by how much levels and steps are smaller than scales."""
    levels = Levels(scales)
    return scales.nbytes - sum(Part(levels, name).nbytes for name in levels.parts)
