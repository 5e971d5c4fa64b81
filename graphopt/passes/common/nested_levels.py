"""Scales in two levels as bitsandbytes nests them: codes of 8 bits, a table, and a number for each run of codes.

What they are made of is read from their expression, and each of them is compared: the numbers come back to the last
bit, wherever the checkpoint's rows lie now.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Bundle, Cast, Expression, Inline, Reshape, Shape, Transpose, origins_of
from graphopt.quantization.nested_scales import NestedScales

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, eq=False)
class NestedLevels(Bundle):
    """Scales [..., tiles, groups, 16] as table[levels] steps + offsets, in runs of codes; rows lie as in checkpoints.

    Attributes:
        sources: the scales of matrices whose rows lie one behind the other, as their checkpoint has them.
        dims: dimensions of the scales; columns behind those of the sources are padding, whose scales are 0.
        run: codes that share a step and an offset.
    """

    sources: tuple[NestedScales, ...]
    dims: Shape
    run: int

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Levels, uint8 [runs, run]; table, float32 [values]; steps and offsets, float32 [runs, 1] or [1, 1]."""
        runs = math.prod(self.dims) // self.run
        return {
            "levels": (ir.DataType.UINT8, (runs, self.run)),
            "table": (ir.DataType.FLOAT, self.sources[0].table.shape),
            "steps": (ir.DataType.FLOAT, (runs, 1)),
            "offsets": (ir.DataType.FLOAT, (1 if self._has_one_offset else runs, 1)),
        }

    @property
    def _has_one_offset(self) -> bool:
        first = self.sources[0]
        return len(self.sources) == 1 and first.offsets.shape == (1,) and first.shape[0] == math.prod(self.dims)

    def evaluate(self) -> dict[str, Array]:
        """Lay the codes of all sources one behind the other, and repeat their numbers for each run."""
        levels = [source.codes.numpy() for source in self.sources]
        steps = [self._of_runs(source, source.scales.numpy()) for source in self.sources]
        offsets = [self._of_runs(source, source.offsets.numpy()) for source in self.sources]
        arrays = {
            "levels": np.concatenate(levels),
            "table": self.sources[0].table.numpy(),
            "steps": np.concatenate(steps),
            "offsets": self.sources[0].offsets.numpy() if self._has_one_offset else np.concatenate(offsets),
        }
        for name, (dtype, shape) in self.parts.items():
            array = arrays[name].reshape(-1)
            padding = np.zeros(math.prod(shape) - len(array), dtype.numpy())
            arrays[name] = np.concatenate([array, padding]).reshape(shape)
        return arrays

    def _of_runs(self, source: NestedScales, numbers: Array) -> Array:
        runs = source.shape[0] // self.run
        return np.repeat(numbers, runs) if len(numbers) == 1 else numbers[np.arange(runs) * self.run // source.block]


def nested_levels(source: Expression) -> NestedLevels | None:
    """Return scales as codes of 8 bits, where they were such in a checkpoint; ``None`` where they were not.

    Args:
        source: float32 or float16 [..., tiles, groups, 16].
    """
    leaves = tuple(origin for origin in origins_of(source) if isinstance(origin, NestedScales))
    sizes = [leaf.shape[0] for leaf in leaves]
    padding = math.prod(source.shape) - sum(sizes)
    if not leaves or padding < 0 or not all(sizes) or len({leaf.table.digest for leaf in leaves}) != 1:
        return None
    form = NestedLevels(leaves, source.shape, math.gcd(*sizes, *(leaf.block for leaf in leaves), padding))
    parts = {name: Inline(array, form.parts[name][0]) for name, array in form.evaluate().items()}
    whole = scales_of_parts(**parts, dims=source.shape, dtype=source.dtype)
    return form if np.array_equal(whole.numpy(), source.numpy()) else None


def scales_of_parts(
    levels: Expression,
    table: Expression,
    steps: Expression,
    offsets: Expression,
    *,
    dims: Sequence[int],
    dtype: ir.DataType,
) -> Expression:
    """Return what a graph makes of the parts of :class:`NestedLevels`.

    Args:
        levels: uint8 [runs, run].
        table: float32 [values].
        steps: float32 [runs, 1].
        offsets: float32 [runs, 1] or [1, 1].
        dims: of the scales, [..., tiles, groups, 16].
        dtype: of the scales.
    """
    flat_levels, flat_steps, flat_offsets = (Reshape.to_dims(part, (-1,)) for part in (levels, steps, offsets))
    flat = NestedScales(flat_levels, table, flat_steps, levels.shape[1], flat_offsets)
    *tiles, groups, columns = dims
    rows = Reshape.to_dims(flat, (*tiles, columns, groups))
    whole = Transpose(rows, order_of_axes(len(dims)))
    return whole if dtype == ir.DataType.FLOAT else Cast(whole, dtype)


def order_of_axes(rank: int) -> tuple[int, ...]:
    """Return the order in which rows of scales become columns of tiles."""
    return (*range(rank - 2), rank - 1, rank - 2)
