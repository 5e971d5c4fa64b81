"""Scales in two levels: a byte for each, and a step in floats for each column."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.products import reads_packed
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
from graphopt.runtime_ops import port

if TYPE_CHECKING:
    from collections.abc import Mapping

BYTES, FLOAT8 = frozenset((ir.DataType.UINT8,)), frozenset((ir.DataType.FLOAT8E4M3FN,))
"""Types of levels: of :class:`Levels`, and of :class:`graphopt.passes.common.float8_scales.Float8Scales`."""

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
    """What a graph makes of levels and steps: the product, then the type that the operator reads.

    Steps of float64 are multiplied so, and the product is rounded to float32 first; others are multiplied in float32.
    """

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
        kind = _wide_type(self.steps.dtype).numpy()
        slices = zip(region, self.steps.shape, strict=True)
        steps = self.steps.evaluate(tuple(slice(0, 1) if size == 1 else part for part, size in slices)).astype(kind)
        product: Array = (self.levels.evaluate(region).astype(kind) * steps).astype(np.float32)
        return product.astype(self.to.numpy())


def _wide_type(of_steps: ir.DataType) -> ir.DataType:
    """Return what levels and steps are multiplied in."""
    return ir.DataType.DOUBLE if of_steps == ir.DataType.DOUBLE else ir.DataType.FLOAT


def read_levels(graph: ir.Graph, scales: ir.Value, parts: Bundle, order: Mapping[ir.Node, int]) -> list[ir.Node]:
    """Let all nodes that read a constant read the product of ``parts``, its levels and steps, in its place.

    Args:
        graph: the graph.
        scales: the constant, which is removed.
        parts: ``levels`` and ``steps``.
        order: where each node stands.

    Returns:
        The nodes that make the product.
    """
    name, uses, dtype = scales.name or "scales", [*scales.uses()], scales.dtype
    assert dtype is not None
    levels, steps = (
        new_weight(graph, f"{name}.{part}", WeightTensor(Part(parts, part))) for part in ("levels", "steps")
    )
    wide_type = _wide_type(parts.parts["steps"][0])
    nodes: list[ir.Node] = []

    def insert(
        op_type: str, inputs: list[ir.Value], dtype_of_output: ir.DataType, suffix: str, shape: ir.Shape | None
    ) -> ir.Value:
        attributes = {"to": dtype_of_output} if op_type == "Cast" else {}
        node = ir.node(op_type, inputs, attributes, name=f"{name}.{suffix}")
        output = node.outputs[0]
        output.name, output.dtype, output.shape = f"{node.name}.output", dtype_of_output, shape
        nodes.append(node)
        return output

    factors = [insert("Cast", [levels], wide_type, "wide", scales.shape)]
    factors.append(steps if steps.dtype == wide_type else insert("Cast", [steps], wide_type, "factors", steps.shape))
    product = insert("Mul", factors, wide_type, "leveled", scales.shape)
    if wide_type == ir.DataType.DOUBLE and dtype != ir.DataType.FLOAT:
        product = insert("Cast", [product], ir.DataType.FLOAT, "rounded", scales.shape)
    narrow = insert("Cast", [product], dtype, "narrow", scales.shape)
    graph.insert_before(min((use.node for use in uses), key=order.__getitem__), nodes)
    for use in uses:
        use.node.replace_input_with(use.idx, narrow)
    del graph.initializers[name]
    return nodes


def leveled_scales(
    graph: ir.Graph, kinds: frozenset[ir.DataType] = BYTES | FLOAT8
) -> dict[ir.Node, tuple[ir.Value, ir.Value]]:
    """Return every ``Cast`` that makes scales of packed codes of levels of one of these types and steps, with those."""
    scales_by_cast: dict[ir.Node, tuple[ir.Value, ir.Value]] = {}
    for scales in dict.fromkeys(port(node, "scales") for node in graph if reads_packed(node)):
        narrow = _producer_of_type(scales, "Cast")
        rounding = _producer_of_type(narrow, "Cast")
        product = _producer_of_type(rounding or narrow, "Mul")
        if narrow is None or product is None:
            continue
        parts = [_producer_of_type(value, "Cast") for value in product.inputs]
        levels, steps = (
            weight_of(product, index) if part is None else weight_of(part, 0) for index, part in enumerate(parts)
        )
        if levels is not None and steps is not None and levels.dtype in kinds:
            scales_by_cast[narrow] = levels, steps
    return scales_by_cast


def join_levels(graph: ir.Graph, kinds: frozenset[ir.DataType] = BYTES | FLOAT8) -> dict[ir.Value, ir.Node]:
    """Put one constant in the place of levels and steps, for steps that want the scales of packed products whole.

    Returns:
        For each constant the ``Cast`` whose place it takes.
    """
    joined_scales: dict[ir.Value, ir.Node] = {}
    for narrow, (levels, steps) in leveled_scales(graph, kinds).items():
        dtype = ir.DataType(narrow.attributes.get_int("to", ir.DataType.FLOAT16))
        whole = LeveledScales(expression_of(levels.const_value), expression_of(steps.const_value), dtype)
        scales = new_weight(graph, (levels.name or "scales").removesuffix(".levels"), WeightTensor(whole))
        joined_scales[scales] = narrow
        bypass(narrow, scales)
    return joined_scales


def _producer_of_type(source: ir.Value | ir.Node | None, op_type: str) -> ir.Node | None:
    """Return the node of a type that makes a value, or the first input of a node."""
    value = source.inputs[0] if isinstance(source, ir.Node) else source
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None
