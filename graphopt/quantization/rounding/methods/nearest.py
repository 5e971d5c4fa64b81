"""Each weight becomes the nearest code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from graphopt.quantization.rounding.method import RoundingMethod
from graphopt.quantization.rounding.nearest import QuantizedMatrix, round_to_nearest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphopt.numerics.formats.format import Format
    from graphopt.quantization.rounding.scales import Scale


class Nearest(RoundingMethod):
    """Round to nearest; see :func:`graphopt.quantization.rounding.round_to_nearest`. It needs no statistics."""

    method: Literal["nearest"] = "nearest"

    def round(
        self,
        matrix: npt.NDArray[np.float32],
        format: Format,
        group: int,
        scale: Scale,
        *,
        scale_type: npt.DTypeLike,
        statistics: npt.NDArray[Any] | None = None,
    ) -> QuantizedMatrix:
        """See :class:`RoundingMethod`."""
        del statistics
        return round_to_nearest(matrix, format, group, scale, scale_type=scale_type)


NEAREST = Nearest()
"""The default of everything that rounds."""
