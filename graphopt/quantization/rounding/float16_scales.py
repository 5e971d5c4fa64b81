"""Whether scales can be stored in float16 without losing precision to its small range."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.quantization.rounding.scales import LEAST_SHARE

if TYPE_CHECKING:
    from graphopt.numerics.formats.format import Format

# Columns that are looked at together.
_COLUMNS = 1 << 10


def fits_half(matrix: npt.NDArray[Any], format: Format, group: int) -> bool:
    """Return whether every scale that :func:`round_to_nearest` may choose is 0 or a normal number of float16.

    There a scale is rounded by 2^-11 of itself at most; below 2^-14 by as much as at 2^-14, so by a larger share.

    Args:
        matrix: [rows, columns].
        format: the format.
        group: rows that share a scale; the last group may have fewer.
    """
    half, whole = np.finfo(np.float16), matrix.shape[0] // group * group
    for begin in range(0, matrix.shape[1], _COLUMNS):
        block = matrix[:, begin : begin + _COLUMNS]
        parts = [block[:whole].reshape(-1, group, block.shape[1]), block[None, whole:]]
        high, low = (
            np.concatenate([extreme(part, axis=1) for part in parts if part.size]) for extreme in (np.max, np.min)
        )
        if format.zero_point:
            scales = (np.maximum(high, 0.0) - np.minimum(low, 0.0)) / format.limit
        else:
            scales = np.maximum(high, -low) / format.limit
        scales = scales[scales > 0]
        if scales.size and not (scales.min() * LEAST_SHARE >= half.tiny and scales.max() <= half.max):
            return False
    return True
