"""Scales of packed products in two levels: a byte for each group under a float for each column."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.products import packed_nodes
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.weights import (
    Part,
    WeightTensor,
    expression_of,
    new_weight,
)
from graphopt.passes.base import Pass
from graphopt.passes.common.leveled_scales import Levels, leveled_scales
from graphopt.runtime_ops import OPERATORS, port
from graphopt.runtime_ops.operator import DOMAIN

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

BYTE_SCALES = Rule("level_scales.leveled", "{scales} in bytes of {columns} steps: {saved} bytes less")
FEW_SCALES = Rule(
    "level_scales.few", "a column has {groups} scales only: a byte for each and a step would save nothing"
)
OTHER_READER = Rule("level_scales.shared", "{op_type} reads it too")

# The largest level, and the axis of groups.
# What the largest scale of a column is divided by. bfloat16 rounds the step by up to 2^-8 of itself, so with the first
# the largest scale has level 253, 254 or 255. The others are tried where it has that level itself.


class LevelScales(Pass):
    """Store a scale as a byte.

    before::

        y = MatMulTable(x, codes, scales, ...)                    scales: float16 [tiles, groups, 16]

    after::

        y = MatMulTable(x, codes, scales', ...)     scales' = Cast(Mul(Cast(levels), Cast(steps)); to float16)

    with ``levels`` uint8 [tiles, groups, 16] and ``steps`` bfloat16 [tiles, 1, 16], one for each column. onnxruntime
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
        return bool(packed_nodes(graph)) and bool(recipe.phases & {"codes", "lower"}) and bool(leveled_scales(graph))

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Level the scales of every packed product; say why others stay."""
        graph, ledger = model.graph, context.ledger
        order = {node: position for position, node in enumerate(graph)}
        products = [node for node in graph if (node.domain, node.op_type) == (DOMAIN, OPERATORS["MatMulTable"].name)]
        for scales in dict.fromkeys(port(node, "scales") for node in products):
            if scales is None or scales.const_value is None or scales.dtype is None:
                continue
            expression, name, uses = expression_of(scales.const_value), scales.name or "scales", [*scales.uses()]
            other_reader = next((use.node for use in uses if use.node.domain != DOMAIN), None)
            groups, saved_bytes = (
                expression.shape[1],
                expression.nbytes - np.prod(expression.shape) * (1 + 2 / expression.shape[1]),
            )
            if other_reader is not None or saved_bytes <= 0:
                ledger.skipped(
                    scales,
                    FEW_SCALES(groups=groups) if other_reader is None else OTHER_READER(op_type=other_reader.op_type),
                )
                continue
            table = Levels(expression)
            levels, steps = (
                new_weight(graph, f"{name}.{part}", WeightTensor(Part(table, part))) for part in ("levels", "steps")
            )
            wide = ir.node("Cast", [levels], {"to": ir.DataType.FLOAT}, name=f"{name}.wide")
            factors = ir.node("Cast", [steps], {"to": ir.DataType.FLOAT}, name=f"{name}.factors")
            product = ir.node("Mul", [wide.outputs[0], factors.outputs[0]], name=f"{name}.leveled")
            narrow = ir.node("Cast", [product.outputs[0]], {"to": scales.dtype}, name=f"{name}.narrow")
            nodes = [wide, factors, product, narrow]
            for node in nodes:
                output = node.outputs[0]
                output.name, output.dtype = f"{node.name}.output", ir.DataType.FLOAT
                output.shape = steps.shape if node is factors else scales.shape
            narrow.outputs[0].dtype = scales.dtype
            graph.insert_before(min((use.node for use in uses), key=order.__getitem__), nodes)
            for use in uses:
                use.node.replace_input_with(use.idx, narrow.outputs[0])
            del graph.initializers[name]
            fact = BYTE_SCALES(scales=name, columns=expression.shape[0] * expression.shape[2], saved=int(saved_bytes))
            for node in nodes:
                ledger.changed(node, fact, [use.node for use in uses])
