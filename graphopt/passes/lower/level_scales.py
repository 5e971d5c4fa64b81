"""Scales of packed products in two levels: a byte for each group under a float for each column."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.products import packed_nodes, reads_packed
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import bypass
from graphopt.graph.weights import (
    Array,
    Bundle,
    Expression,
    Part,
    Region,
    Shape,
    WeightTensor,
    expression_of,
    new_weight,
    weight_of,
)
from graphopt.graph.weights.expression import widen
from graphopt.passes.base import Pass
from graphopt.runtime_ops import OPERATORS, port
from graphopt.runtime_ops.operator import DOMAIN

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

LEVELED = Rule("level_scales.leveled", "{scales} in bytes of {columns} steps: {saved} bytes less")
FEW = Rule("level_scales.few", "a column has {groups} scales only: a byte for each and a step would save nothing")
SHARED = Rule("level_scales.shared", "{op_type} reads it too")

# The largest level, and the axis of groups.
_LEVELS, _GROUPS = 255, 1
# What the largest scale of a column is divided by. bfloat16 rounds the step by up to 2^-8 of itself, so with the first
# the largest scale has level 253, 254 or 255. The others are tried where it has that level itself.
_TOPS = (254, 253, 255)


@dataclasses.dataclass(frozen=True, eq=False)
class Levels(Bundle):
    """Scales [tiles, groups, 16] as ``levels``, uint8 of that shape, times ``steps``, bfloat16 [tiles, 1, 16].

    A step is the largest scale of a column over 253, 254 or 255, whichever leaves the least error. A level is the
    nearest one from 1 to 255, so that no scale is 0, for the step as it is stored: bfloat16 has the range of float32.
    Scales that were levels times steps come out as they are.
    """

    source: Expression

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Levels and steps."""
        tiles, _, columns = self.source.shape
        return {"levels": (ir.DataType.UINT8, self.source.shape), "steps": (ir.DataType.BFLOAT16, (tiles, 1, columns))}

    def evaluate(self) -> dict[str, Array]:
        """Round the scales once."""
        scales, kind = self.source.numpy().astype(np.float64), self.source.dtype.numpy()
        largest = scales.max(_GROUPS, keepdims=True)
        steps, levels = np.zeros(largest.shape, ml_dtypes.bfloat16), np.zeros(scales.shape, np.uint8)
        least = np.full(largest.shape, np.inf)
        for top in _TOPS:
            step = (largest / top).astype(ml_dtypes.bfloat16)
            wide = np.where(step > 0, step, 1).astype(np.float64)
            tried = np.clip(np.rint(scales / wide), 1, _LEVELS)
            made = (tried * step.astype(np.float64)).astype(kind).astype(np.float64)  # as it is read
            error = np.square(made - scales).sum(_GROUPS, keepdims=True)
            better = (error < least) & ((top == _TOPS[0]) | (np.rint(largest / wide) == top))
            least = np.where(better, error, least)
            steps, levels = np.where(better, step, steps), np.where(better, tried, levels).astype(np.uint8)
        return {"levels": levels, "steps": steps}


@dataclasses.dataclass(frozen=True, eq=False)
class Leveled(Expression):
    """What a graph makes of :class:`Levels`: the product in float32, then the type that the operator reads."""

    levels: Expression
    steps: Expression
    to: ir.DataType

    @property
    def dtype(self) -> ir.DataType:
        """The type of the scales."""
        return self.to

    @property
    def shape(self) -> Shape:
        """Tiles, groups and columns of a tile."""
        return self.levels.shape

    def evaluate(self, region: Region) -> Array:
        """Multiply what lies in the region."""
        steps = self.steps.evaluate(widen(region, _GROUPS, 1)).astype(np.float32)
        return (self.levels.evaluate(region).astype(np.float32) * steps).astype(self.to.numpy())


def leveled_scales(graph: ir.Graph) -> dict[ir.Node, tuple[ir.Value, ir.Value]]:
    """Return every ``Cast`` that makes scales of packed codes of levels and steps, with those."""
    found: dict[ir.Node, tuple[ir.Value, ir.Value]] = {}
    for scales in dict.fromkeys(port(node, "scales") for node in graph if reads_packed(node)):
        narrow = _made_by(scales, "Cast")
        product = _made_by(narrow, "Mul")
        if narrow is None or product is None:
            continue
        parts = [_made_by(value, "Cast") for value in product.inputs]
        levels, steps = (None if part is None else weight_of(part, 0) for part in parts)
        if levels is not None and steps is not None and levels.dtype == ir.DataType.UINT8:
            found[narrow] = levels, steps
    return found


def join_levels(graph: ir.Graph) -> None:
    """Put one constant in the place of levels and steps, for steps that want the scales of packed products whole."""
    for narrow, (levels, steps) in leveled_scales(graph).items():
        to = ir.DataType(narrow.attributes.get_int("to", ir.DataType.FLOAT16))
        whole = Leveled(expression_of(levels.const_value), expression_of(steps.const_value), to)
        bypass(narrow, new_weight(graph, (levels.name or "scales").removesuffix(".levels"), WeightTensor(whole)))


def _made_by(of: ir.Value | ir.Node | None, op_type: str) -> ir.Node | None:
    """Return the node of a type that makes a value, or the first input of a node."""
    value = of.inputs[0] if isinstance(of, ir.Node) else of
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None


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
    after: ClassVar[tuple[str, ...]] = ("lower", "float16")

    @classmethod
    def needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether packed scales have two levels already, and the recipe has work with codes."""
        return bool(packed_nodes(graph)) and bool(recipe.phases & {"codes", "lower"}) and bool(leveled_scales(graph))

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Level the scales of every packed product; say why others stay."""
        graph, ledger = model.graph, context.ledger
        order = {node: place for place, node in enumerate(graph)}
        products = [node for node in graph if (node.domain, node.op_type) == (DOMAIN, OPERATORS["MatMulTable"].name)]
        for scales in dict.fromkeys(port(node, "scales") for node in products):
            if scales is None or scales.const_value is None or scales.dtype is None:
                continue
            stored, name, uses = expression_of(scales.const_value), scales.name or "scales", [*scales.uses()]
            other = next((use.node for use in uses if use.node.domain != DOMAIN), None)
            groups, saved = stored.shape[_GROUPS], stored.nbytes - np.prod(stored.shape) * (1 + 2 / stored.shape[1])
            if other is not None or saved <= 0:
                ledger.skipped(scales, FEW(groups=groups) if other is None else SHARED(op_type=other.op_type))
                continue
            made = Levels(stored)
            levels, steps = (
                new_weight(graph, f"{name}.{part}", WeightTensor(Part(made, part))) for part in ("levels", "steps")
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
            fact = LEVELED(scales=name, columns=stored.shape[0] * stored.shape[2], saved=int(saved))
            for node in nodes:
                ledger.changed(node, fact, [use.node for use in uses])
