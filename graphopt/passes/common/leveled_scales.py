"""Scales in two levels: a byte for each, and a step in floats for each column."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.products import reads_packed
from graphopt.graph.editing import bypass
from graphopt.graph.weights import (
    Array,
    Bundle,
    Expression,
    Region,
    Shape,
    WeightTensor,
    expression_of,
    new_weight,
    weight_of,
)
from graphopt.graph.weights.expression import widen
from graphopt.runtime_ops import port

_LEVELS, _GROUPS = 255, -2

_TOPS = (254, 253, 255)


@dataclasses.dataclass(frozen=True, eq=False)
class Levels(Bundle):
    """Scales [tiles, groups, 16] as ``levels``, uint8 of that shape, times ``steps``, bfloat16 [tiles, 1, 16].

    Those of a stack of experts are [experts, tiles, groups, 16], and steps [experts, tiles, 1, 16].

    A step is the largest scale of a column over 253, 254 or 255, whichever leaves the least error. A level is the
    nearest one from 1 to 255, so that no scale is 0, for the step as it is stored: bfloat16 has the range of float32.
    Scales that were levels times steps come out as they are.
    """

    source: Expression

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Levels and steps."""
        *tiles, _, columns = self.source.shape
        steps = (*tiles, 1, columns)
        return {"levels": (ir.DataType.UINT8, self.source.shape), "steps": (ir.DataType.BFLOAT16, steps)}

    def evaluate(self) -> dict[str, Array]:
        """Round the scales once, those of one expert after another."""
        scales = self.source.numpy()
        if scales.ndim == 3:
            return self._round(scales)
        of_experts = [self._round(of_expert) for of_expert in scales]
        return {name: np.stack([parts[name] for parts in of_experts]) for name in self.parts}

    def _round(self, source: Array) -> dict[str, Array]:
        scales, kind = source.astype(np.float64), self.source.dtype.numpy()
        largest = scales.max(_GROUPS, keepdims=True)
        steps, levels = np.zeros(largest.shape, ml_dtypes.bfloat16), np.zeros(scales.shape, np.uint8)
        least_error = np.full(largest.shape, np.inf)
        for top in _TOPS:
            step = (largest / top).astype(ml_dtypes.bfloat16)
            wide = np.where(step > 0, step, 1).astype(np.float64)
            levels_of_step = np.clip(np.rint(scales / wide), 1, _LEVELS)
            products = (levels_of_step * step.astype(np.float64)).astype(kind).astype(np.float64)  # as it is read
            error = np.square(products - scales).sum(_GROUPS, keepdims=True)
            better = (error < least_error) & ((top == _TOPS[0]) | (np.rint(largest / wide) == top))
            least_error = np.where(better, error, least_error)
            steps, levels = np.where(better, step, steps), np.where(better, levels_of_step, levels).astype(np.uint8)
        return {"levels": levels, "steps": steps}


@dataclasses.dataclass(frozen=True, eq=False)
class LeveledScales(Expression):
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
        """Tiles, groups and columns of a tile, behind the experts of a stack."""
        return self.levels.shape

    def evaluate(self, region: Region) -> Array:
        """Multiply what lies in the region."""
        steps = self.steps.evaluate(widen(region, len(self.shape) + _GROUPS, 1)).astype(np.float32)
        return (self.levels.evaluate(region).astype(np.float32) * steps).astype(self.to.numpy())


def leveled_scales(graph: ir.Graph) -> dict[ir.Node, tuple[ir.Value, ir.Value]]:
    """Return every ``Cast`` that makes scales of packed codes of levels and steps, with those."""
    scales_by_cast: dict[ir.Node, tuple[ir.Value, ir.Value]] = {}
    for scales in dict.fromkeys(port(node, "scales") for node in graph if reads_packed(node)):
        narrow = _producer_of_type(scales, "Cast")
        product = _producer_of_type(narrow, "Mul")
        if narrow is None or product is None:
            continue
        parts = [_producer_of_type(value, "Cast") for value in product.inputs]
        levels, steps = (None if part is None else weight_of(part, 0) for part in parts)
        if levels is not None and steps is not None and levels.dtype == ir.DataType.UINT8:
            scales_by_cast[narrow] = levels, steps
    return scales_by_cast


def join_levels(graph: ir.Graph) -> None:
    """Put one constant in the place of levels and steps, for steps that want the scales of packed products whole."""
    for narrow, (levels, steps) in leveled_scales(graph).items():
        dtype = ir.DataType(narrow.attributes.get_int("to", ir.DataType.FLOAT16))
        whole = LeveledScales(expression_of(levels.const_value), expression_of(steps.const_value), dtype)
        bypass(narrow, new_weight(graph, (levels.name or "scales").removesuffix(".levels"), WeightTensor(whole)))


def _producer_of_type(source: ir.Value | ir.Node | None, op_type: str) -> ir.Node | None:
    """Return the node of a type that makes a value, or the first input of a node."""
    value = source.inputs[0] if isinstance(source, ir.Node) else source
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None
