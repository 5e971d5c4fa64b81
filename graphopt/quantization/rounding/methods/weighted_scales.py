"""Scales searched for the least error that inputs would notice; each weight then becomes the nearest code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.quantization.rounding.method import Need, RoundingMethod
from graphopt.quantization.rounding.nearest import QuantizedMatrix
from graphopt.quantization.rounding.scale_search import Search
from graphopt.util.processors import run_in_threads

if TYPE_CHECKING:
    from graphopt.numerics.formats.format import Format
    from graphopt.quantization.rounding.scales import Scale

# Columns that are searched together: their groups stay in a core's cache.
_COLUMNS = 256


class WeightedScales(RoundingMethod):
    """Search scales for the least squared error weighted by how large each row's input is, and round to nearest.

    Of E = W - Q the product makes X E. Where inputs are not correlated its squared norm is the sum over rows k of
    H_kk |E_k|^2, H = X^T X, so the error of a row counts H_kk (llama.cpp's importance matrix). Scales that are
    shares of the extreme are tried; then, a few times, the scale that is best for the codes q of the best so far,
    sum H w q / sum H q^2. With the scale ``extreme`` nothing is searched.

    Attributes:
        importance: "inputs", as above; or "uniform", which needs no statistics and searches more than ``nearest`` does.
        search: which scales are tried.
    """

    method: Literal["weighted"] = "weighted"
    importance: Literal["inputs", "uniform"] = "inputs"
    search: Search = Search()

    @property
    def needs(self) -> Need | None:
        """X^T X, of which the diagonal is used, unless all rows count the same."""
        return None if self.importance == "uniform" else "hessian"

    def round(
        self,
        matrix: npt.NDArray[np.float32],
        format: Format,
        group: int,
        scale: Scale,
        *,
        scale_type: npt.DTypeLike,
        statistics: npt.NDArray[Any] | None,
    ) -> QuantizedMatrix:
        """See :class:`RoundingMethod`."""
        importance = None
        if statistics is not None and self.needs is not None:
            importance = np.diagonal(statistics).astype(np.float64)
            if not np.isfinite(importance).all():
                raise InputError("the statistics of a weight's inputs are NaN or infinite", shape=statistics.shape)
        rows, columns = matrix.shape
        groups, kind = -(-rows // group), np.dtype(scale_type)
        codes = np.empty((rows, format.code_columns(slice(0, columns)).stop), np.uint8)
        scales, points = np.empty((groups, columns), kind), np.empty((groups, columns), np.uint8)

        def round_part(part: slice) -> None:
            for number, top in enumerate(range(0, rows, group)):
                group_rows = slice(top, top + group)
                numbers = np.asarray(matrix[group_rows, part], np.float64)[None]
                weights = (
                    None
                    if importance is None or not importance[group_rows].any()
                    else importance[None, group_rows, None]
                )
                choice = self.search.choose(numbers, format, scale, kind, weights)
                codes[group_rows, format.code_columns(part)] = choice.codes[0]
                scales[number, part], points[number, part] = choice.scales[0], choice.zero_points[0]

        run_in_threads(round_part, list(format.blocks(columns, _COLUMNS)))
        return QuantizedMatrix(format, group, codes, scales, points if format.zero_point else None)
