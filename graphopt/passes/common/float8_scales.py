"""Scales in two levels, of which the lower are floats of 8 bits (E4M3), as those of NVFP4 are.

They are found by the numbers alone, as in :mod:`graphopt.passes.common.scale_levels`.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Bundle, Expression, Shape

_TOPS = (448, 416, 384, 352, 320, 288, 256, 240)
"""The largest number of E4M3 with each of its fractions. The largest of scales may be taken for one of these: powers of
two can move between levels and steps."""

_GROUPS = -2
_SAMPLE = 1 << 12
_CLOSE = 2.0**-21  # float32 is off by 2^-24 of a scale, and of the largest one


@dataclasses.dataclass(frozen=True, eq=False)
class Float8Scales(Bundle):
    """Scales [..., tiles, groups, 16] as ``levels``, E4M3 of that shape, times ``steps``, float64.

    float32(levels x steps), cast to the type of the scales, is each of them to the last bit.

    Attributes:
        source: the scales, float32 or float16.
        is_shared: whether there is one step, [1, ..., 1], or one of each column, [..., tiles, 1, 16].
    """

    source: Expression
    is_shared: bool

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Levels and steps."""
        *tiles, _, columns = self.source.shape
        shape = (1,) * len(self.source.shape) if self.is_shared else (*tiles, 1, columns)
        return {"levels": (ir.DataType.FLOAT8E4M3FN, self.source.shape), "steps": (ir.DataType.DOUBLE, shape)}

    def evaluate(self) -> dict[str, Array]:
        """Take the scales apart once more.

        Raises:
            ValueError: they are no such products, although they were found to be.
        """
        parts = _levels_of(self.source.numpy(), is_shared=self.is_shared)
        if parts is None:
            raise ValueError(f"{self.source} does not lie in float8 times a factor")
        return dict(zip(("levels", "steps"), parts, strict=True))


def float8_scales(source: Expression) -> Float8Scales | None:
    """Return scales as floats of 8 bits under one step, or one for each column; ``None`` where they are not such.

    Args:
        source: float32 or float16 [..., tiles, groups, 16].
    """
    scales = source.numpy()
    sample = scales.reshape(-1, *scales.shape[_GROUPS:])
    sample = sample[: max(1, _SAMPLE // (sample.shape[1] * sample.shape[2]))]
    for is_shared in (True, False):
        if _levels_of(sample, is_shared=is_shared) is not None and _levels_of(scales, is_shared=is_shared) is not None:
            return Float8Scales(source, is_shared)
    return None


def _levels_of(scales: Array, *, is_shared: bool) -> tuple[Array, Array] | None:
    """Return E4M3 numbers and float64 steps whose products are ``scales`` to the last bit; ``None`` if none are."""
    axes = tuple(range(scales.ndim)) if is_shared else _GROUPS
    sizes = np.abs(scales.astype(np.float64))
    if not np.isfinite(sizes).all():
        return None
    largest = sizes.max(axes, keepdims=True)
    largest = np.where(largest > 0, largest, 1.0)
    levels, open_runs = np.zeros_like(sizes), np.ones(largest.shape, bool)
    for top in _TOPS:
        ratios = sizes * (top / largest)
        nearest = ratios.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        fits = (np.abs(ratios - nearest) <= _CLOSE * ratios).all(axes, keepdims=True) & open_runs
        levels, open_runs = np.where(fits, nearest, levels), open_runs & ~fits
        if not open_runs.any():
            break
    else:
        return None
    steps = _steps_of(scales, sizes, levels, axes)
    signed_levels = np.copysign(levels, scales)
    if not np.array_equal((signed_levels * steps).astype(np.float32).astype(scales.dtype), scales):
        return None
    return signed_levels.astype(ml_dtypes.float8_e4m3fn), steps


def _steps_of(scales: Array, sizes: Array, levels: Array, axes: int | tuple[int, ...]) -> Array:
    """Return steps in the middle of those that give each scale when a product is rounded to its type."""
    half_unit = np.spacing(np.abs(scales)).astype(np.float64) / 2
    is_used, divisors = levels > 0, np.where(levels > 0, levels, 1.0)
    lower_end = np.where(is_used, (sizes - half_unit) / divisors, 0.0).max(axes, keepdims=True)
    upper_end = np.where(is_used, (sizes + half_unit) / divisors, np.inf).min(axes, keepdims=True)
    steps = np.where(np.isfinite(upper_end), (lower_end + upper_end) / 2, 1.0)
    short: Array = steps.astype(np.float32).astype(np.float64)  # what a checkpoint has, where it fits too
    return np.where((lower_end < short) & (short < upper_end), short, steps)
