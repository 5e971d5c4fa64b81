"""Scales in two levels, of which standard operators make floats: a byte for each, and steps in floats."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.products import reads_packed
from graphopt.graph.editing import Inserter, bypass, shared_constant
from graphopt.graph.weights import (
    Array,
    Bundle,
    Expression,
    Inline,
    Part,
    Region,
    Shape,
    WeightTensor,
    expression_of,
    new_weight,
    weight_of,
)
from graphopt.passes.common.nested_levels import order_of_axes, scales_of_parts
from graphopt.runtime_ops import port

if TYPE_CHECKING:
    from collections.abc import Mapping

BYTES, FLOAT8, TABLE = frozenset(("bytes",)), frozenset(("float8",)), frozenset(("nested",))
"""Kinds of levels: of :class:`Levels`, of :class:`graphopt.passes.common.float8_scales.Float8Scales` and of
:class:`graphopt.passes.common.nested_levels.NestedLevels`."""

EXACT = FLOAT8 | TABLE
"""Kinds that are other bytes for the same numbers."""

_KINDS = {ir.DataType.UINT8: "bytes", ir.DataType.FLOAT8E4M3FN: "float8"}

_LEVELS, _GROUPS = 255, -2
_FLOAT = ir.DataType.FLOAT

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
    target_type: ir.DataType

    @property
    def dtype(self) -> ir.DataType:
        """The type of the scales."""
        return self.target_type

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
        return product.astype(self.target_type.numpy())


def _wide_type(of_steps: ir.DataType) -> ir.DataType:
    """Return what levels and steps are multiplied in."""
    return ir.DataType.DOUBLE if of_steps == ir.DataType.DOUBLE else ir.DataType.FLOAT


def read_levels(graph: ir.Graph, scales: ir.Value, parts: Bundle, order: Mapping[ir.Node, int]) -> list[ir.Node]:
    """Let all nodes that read a constant read what is made of ``parts`` in its place.

    Args:
        graph: the graph.
        scales: the constant, which is removed.
        parts: ``levels`` and ``steps``, whose product is made; or those of
            :class:`graphopt.passes.common.nested_levels.NestedLevels`.
        order: where each node stands.

    Returns:
        The nodes that make the scales.
    """
    name, uses, dtype = scales.name or "scales", [*scales.uses()], scales.dtype
    assert dtype is not None
    writer = Inserter(graph, min((use.node for use in uses), key=order.__getitem__), name)
    values = {part: _part_value(graph, name, parts, part) for part in parts.parts}
    floats = _nested_floats(writer, values, scales) if "table" in values else _product(writer, values, scales)
    narrow = writer.op("Cast", [floats], _dims(scales), dtype, "narrow", to=dtype)
    for use in uses:
        use.node.replace_input_with(use.idx, narrow)
    del graph.initializers[name]
    return writer.nodes


def _part_value(graph: ir.Graph, name: str, parts: Bundle, part: str) -> ir.Value:
    """Register a part under the name of the scales; a table, which many have, under that of its numbers."""
    expression = Part(parts, part)
    if part != "table":
        return new_weight(graph, f"{name}.{part}", WeightTensor(expression))
    numbers = Inline(expression.numpy(), expression.dtype)
    return shared_constant(graph, f"nested_scales.{numbers.digest[:16]}", numbers.array)


def _product(writer: Inserter, parts: Mapping[str, ir.Value], scales: ir.Value) -> ir.Value:
    """Multiply levels and steps; return the product, rounded to float32."""
    levels, steps, dims = parts["levels"], parts["steps"], _dims(scales)
    assert steps.dtype is not None
    wide_type = _wide_type(steps.dtype)
    wide = writer.op("Cast", [levels], dims, wide_type, "wide", to=wide_type)
    if steps.dtype != wide_type:
        steps = writer.op("Cast", [steps], _dims(steps), wide_type, "factors", to=wide_type)
    product = writer.op("Mul", [wide, steps], dims, wide_type, "leveled")
    if wide_type == ir.DataType.DOUBLE and scales.dtype != _FLOAT:
        product = writer.op("Cast", [product], dims, _FLOAT, "rounded", to=_FLOAT)
    return product


def _nested_floats(writer: Inserter, parts: Mapping[str, ir.Value], scales: ir.Value) -> ir.Value:
    """Look levels up, scale them, shift them, and put them into tiles; return float32 of the shape of the scales."""
    levels, (*tiles, groups, columns) = parts["levels"], _dims(scales)
    of_runs, of_rows, kind = _dims(levels), [*tiles, columns, groups], ir.DataType.INT32
    indices = writer.op("Cast", [levels], of_runs, kind, "indices", to=kind)
    numbers = writer.op("Gather", [parts["table"], indices], of_runs, _FLOAT, "numbers")
    product = writer.op("Mul", [numbers, parts["steps"]], of_runs, _FLOAT, "leveled")
    total = writer.op("Add", [product, parts["offsets"]], of_runs, _FLOAT, "shifted")
    rows = writer.op("Reshape", [total, writer.integers(of_rows)], of_rows, _FLOAT, "rows")
    return writer.op("Transpose", [rows], _dims(scales), _FLOAT, "tiled", perm=order_of_axes(len(of_rows)))


def leveled_scales(graph: ir.Graph, kinds: frozenset[str] = BYTES | EXACT) -> dict[ir.Node, Expression]:
    """Return every ``Cast`` that makes scales of packed codes of levels of one of these kinds, with what it makes."""
    scales_by_cast: dict[ir.Node, Expression] = {}
    for scales in dict.fromkeys(port(node, "scales") for node in graph if reads_packed(node)):
        narrow = _producer_of_type(scales, "Cast")
        match = None if narrow is None else _nested_match(narrow) or _product_match(narrow)
        if narrow is not None and match is not None and match[0] in kinds:
            scales_by_cast[narrow] = match[1]
    return scales_by_cast


def _product_match(narrow: ir.Node) -> tuple[str, Expression] | None:
    """Return the kind of scales that are levels times steps, and the scales; ``None`` for others."""
    rounding = _producer_of_type(narrow, "Cast")
    product = _producer_of_type(rounding or narrow, "Mul")
    if product is None:
        return None
    parts = [_producer_of_type(value, "Cast") for value in product.inputs]
    levels, steps = (
        weight_of(product, index) if part is None else weight_of(part, 0) for index, part in enumerate(parts)
    )
    if levels is None or steps is None or levels.dtype not in _KINDS:
        return None
    whole = LeveledScales(expression_of(levels.const_value), expression_of(steps.const_value), _type_of(narrow))
    return _KINDS[levels.dtype], whole


def _nested_match(narrow: ir.Node) -> tuple[str, Expression] | None:
    """Return the kind of scales that are codes of a table, and the scales; ``None`` for others."""
    rows = _producer_of_type(_producer_of_type(narrow, "Transpose"), "Reshape")
    total = _producer_of_type(rows, "Add")
    product = _producer_of_type(total, "Mul")
    numbers = _producer_of_type(product, "Gather")
    if total is None or product is None or numbers is None:
        return None
    indices = _producer_of_type(numbers.inputs[1], "Cast")
    if indices is None:
        return None
    parts = weight_of(indices, 0), weight_of(numbers, 0), weight_of(product, 1), weight_of(total, 1)
    (dims,) = (_dims(value) for value in narrow.outputs)
    levels, table, steps, offsets = (None if part is None else expression_of(part.const_value) for part in parts)
    if levels is None or table is None or steps is None or offsets is None:
        return None
    return "nested", scales_of_parts(levels, table, steps, offsets, dims=dims, dtype=_type_of(narrow))


def join_levels(graph: ir.Graph, kinds: frozenset[str] = BYTES | EXACT) -> dict[ir.Value, ir.Node]:
    """Put one constant in the place of levels and steps, for steps that want the scales of packed products whole.

    Returns:
        For each constant the ``Cast`` whose place it takes.
    """
    joined_scales: dict[ir.Value, ir.Node] = {}
    for narrow, whole in leveled_scales(graph, kinds).items():
        scales = new_weight(graph, (narrow.name or "scales").removesuffix(".narrow"), WeightTensor(whole))
        joined_scales[scales] = narrow
        bypass(narrow, scales)
    return joined_scales


def _type_of(cast: ir.Node) -> ir.DataType:
    return ir.DataType(cast.attributes.get_int("to", ir.DataType.FLOAT16))


def _dims(value: ir.Value) -> list[int]:
    assert value.shape is not None
    return [int(size) for size in value.shape.numpy()]


def _producer_of_type(source: ir.Value | ir.Node | None, op_type: str) -> ir.Node | None:
    """Return the node of a type that makes a value, or the first input of a node."""
    value = source.inputs[0] if isinstance(source, ir.Node) else source
    node = None if value is None else value.producer()
    return node if node is not None and (node.domain, node.op_type) == ("", op_type) else None
