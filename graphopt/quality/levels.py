"""How the numbers of a weight lie among the levels of its format: counts, never the numbers themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from pydantic import BaseModel, ConfigDict

from graphopt.analysis.structure.product_codes import dequantize_of
from graphopt.analysis.structure.products import expert_count
from graphopt.numerics.formats import format_stored_as
from graphopt.quality.correspondence import Product, matrix_in_floats
from graphopt.runtime_ops import DOMAIN, Role, signature_of
from graphopt.runtime_ops.matmul_table.spec.levels import numbers_of
from graphopt.runtime_ops.matmul_table.spec.packing import unpack, untile

if TYPE_CHECKING:
    from graphopt.ort.session import Array

Doubles = npt.NDArray[np.float64]

BINS = 120
"""Of a histogram."""

_COLUMNS, _MATRIX = 256, 2


class Histogram(BaseModel):
    """The numbers of one product's weight in units of its scales, beside the levels that its format has.

    Attributes:
        node: the product.
        role: what it is for.
        layer: where.
        levels: the values that its format has, in order, in units of the scales.
        used: the share of the numbers that is stored as each level.
        low: where the first bin begins.
        high: where the last one ends.
        counts: how many numbers of the reference lie in each bin; those beyond the ends are in the last ones.
    """

    model_config = ConfigDict(extra="forbid")

    node: str
    role: str
    layer: int | None
    levels: list[float]
    used: list[float]
    low: float
    high: float
    counts: list[int]


@dataclass(frozen=True)
class Grid:
    """A matrix of codes, [K, N], and what its codes mean.

    Attributes:
        levels: the different values of the table, in order.
        values: the value of each code, in units of the scales, zero points aside.
        scales: of each number.
        zeros: subtracted from values, or added behind the scales; ``None`` for nothing.
        minimums: whether they are added behind the scales.
    """

    levels: Doubles
    values: Doubles
    scales: Doubles
    zeros: Doubles | None
    minimums: bool

    def in_units(self, numbers: Doubles) -> Doubles:
        """Return numbers of the matrix where they lie among the levels; not finite where a scale is zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.zeros is None:
                return numbers / self.scales
            return (numbers - self.zeros) / self.scales if self.minimums else numbers / self.scales + self.zeros


def histogram(product: Product, node: ir.Node) -> Histogram | None:
    """Return how the weight of a product lies among the levels of its format.

    Args:
        product: of a compressed model.
        node: the same in that model.

    Returns:
        Counts over at most 256 columns; ``None`` where the weight is not stored as codes of a table.
    """
    grid = grid_of(node)
    numbers = matrix_in_floats(product).astype(np.float64)
    if grid is None or grid.values.shape != numbers.shape:
        return None
    columns = np.unique(np.linspace(0, numbers.shape[1] - 1, _COLUMNS).astype(int))
    positions, levels = grid.in_units(numbers)[:, columns], grid.levels
    used = np.bincount(np.searchsorted(levels, grid.values[:, columns]).reshape(-1), minlength=len(levels))
    margin = (levels[-1] - levels[0]) / 16
    low, high = float(levels[0] - margin), float(levels[-1] + margin)
    counts, _ = np.histogram(np.clip(positions[np.isfinite(positions)], low, high), BINS, (low, high))
    return Histogram(
        node=product.name,
        role=product.role,
        layer=product.layer,
        levels=levels.tolist(),
        used=(used / used.sum()).tolist(),
        low=low,
        high=high,
        counts=counts.tolist(),
    )


def grid_of(node: ir.Node) -> Grid | None:
    """Return what the one matrix of a product is stored as; ``None`` where it is not codes of a table with scales."""
    signature = signature_of(node)
    is_packed = signature is not None and signature.is_product and node.domain == DOMAIN
    reader = node if is_packed else dequantize_of(node)
    signature = None if reader is None else signature_of(reader)
    if reader is None or signature is None or expert_count(reader) is not None:
        return None
    ports = zip(signature.inputs, reader.inputs, strict=False)
    arrays = {port.role: _numbers(value) for port, value in ports if not port.is_absent(value)}
    codes, scales, table, zeros = (arrays.get(role) for role in (Role.CODES, Role.SCALES, Role.TABLE, Role.ZERO_POINTS))
    if codes is None or scales is None or (table is not None and table.ndim > 1):  # of a trellis
        return None
    if is_packed:
        rows, columns = (reader.attributes.get_int(name, 0) for name in ("rows", "columns"))
        codes = unpack(codes, rows, columns)
        scales = untile(_numbers_of_groups(reader, scales), columns)
        zeros = None if zeros is None else untile(_numbers_of_groups(reader, zeros), columns)
    values, levels = _values_and_levels(reader, codes, table)
    group = reader.attributes.get_int("group", 0) or reader.attributes.get_int("block_size", 0)
    if levels is None or values.ndim != _MATRIX or group < 1 or scales.ndim != _MATRIX:
        return None
    of_row = np.arange(len(values)) // group
    wide_zeros = None if zeros is None else zeros.astype(np.float64)[of_row]
    is_minimum = reader.attributes.get_int("minimums", 0) == 1
    return Grid(levels, values, scales.astype(np.float64)[of_row], wide_zeros, is_minimum)


def _values_and_levels(reader: ir.Node, codes: Array, table: Array | None) -> tuple[Doubles, Doubles | None]:
    """Return the value of each code, and the values that codes have in order; ``None`` for a type without levels."""
    if table is not None:
        return table.astype(np.float64)[codes], np.unique(table.astype(np.float64))
    form = format_stored_as(_type_of(reader))
    return codes.astype(np.float64), None if form is None or form.levels is None else form.levels.values


def _numbers_of_groups(reader: ir.Node, part: Array) -> Array:
    """Return scales or zero points of a packed product as numbers, [tiles, groups, 16]."""
    rows, group, span, low = (reader.attributes.get_int(name, 0) for name in ("rows", "group", "span", "low"))
    return numbers_of(part, rows, group, span, low)


def _type_of(reader: ir.Node) -> ir.DataType:
    value = reader.inputs[0]
    return ir.DataType.UNDEFINED if value is None or value.dtype is None else value.dtype


def _numbers(value: ir.Value | None) -> Array | None:
    """Return the numbers of a constant, also behind a ``Cast``; ``None`` for what is computed otherwise."""
    maker = None if value is None else value.producer()
    if maker is not None and (maker.domain, maker.op_type) == ("", "Cast"):
        value = maker.inputs[0]
    tensor = None if value is None else value.const_value
    return None if tensor is None else tensor.numpy()
