"""Coordinate descent on what was rounded: code by code, then scale by scale, no step makes the product's error more."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.quantization.rounding import native
from graphopt.quantization.rounding.scales import Doubles, stored_scales

if TYPE_CHECKING:
    from graphopt.numerics.formats.format import Codes
    from graphopt.quantization.rounding.nearest import QuantizedMatrix

# Rows whose changes are carried to all others by one product, and columns that are polished together.
_ROWS, _COLUMNS = 128, 512


def polish(
    matrix_codes: QuantizedMatrix, matrix: npt.NDArray[Any], hessian: npt.NDArray[Any], damping: float, sweeps: int
) -> QuantizedMatrix:
    """Return codes and scales of no more error E^T (H + damping) E than those of ``quantized``, E = W - Q.

    With G = (H + d) E, the best value for Q_k while all others stay is Q_k + G_k / (H_kk + d), so row k takes the code
    nearest to that; and the best change of the scale of a group with values V is V^T G / V^T (H + d) V. Zero points
    stay. A sweep costs as much as two products of H with the weight.

    Args:
        matrix_codes: what is polished.
        matrix: W, [rows, columns].
        hessian: X^T X, [rows, rows], up to a factor.
        damping: added to its diagonal, as a share of the diagonal's mean.
        sweeps: how often all codes, then all scales, are gone through.
    """
    mean = float(np.diagonal(hessian).mean(dtype=np.float64))
    H = hessian.astype(np.float64)
    H /= mean or 1.0
    H.reshape(-1)[:: len(H) + 1] += damping if mean else 1.0
    codes, scales = matrix_codes.codes.copy(), matrix_codes.scales.astype(np.float64)
    points = matrix_codes.zero_points
    for part in matrix_codes.format.blocks(matrix.shape[1], _COLUMNS):
        columns = _Columns(
            matrix_codes,
            np.asarray(matrix[:, part], np.float64),
            H,
            codes[:, matrix_codes.format.code_columns(part)],
            scales[:, part],
            None if points is None else points[:, part],
        )
        for _ in range(sweeps):
            columns.sweep_codes()
            columns.sweep_scales()
    return dataclasses.replace(matrix_codes, codes=codes, scales=scales.astype(matrix_codes.scales.dtype))


class _Columns:
    """Some columns of a weight, their codes and scales, which are changed in place, and the gradient G = H (W - Q)."""

    def __init__(
        self,
        matrix_codes: QuantizedMatrix,
        weights: Doubles,
        H: Doubles,
        codes: Codes,
        scales: Doubles,
        points: Codes | None,
    ) -> None:
        self.format, self.group, self.kind = matrix_codes.format, matrix_codes.group, matrix_codes.scales.dtype
        self.H, self.codes, self.scales = H, codes, scales
        self.of_row = np.arange(len(weights)) // matrix_codes.group
        self.points = points
        self.values = self.format.decode(codes, scales[self.of_row], None if points is None else points[self.of_row])
        self.gradient = H @ (weights - self.values)

    def _points(self, row: int) -> Codes | None:
        return None if self.points is None else self.points[self.of_row[row]]

    def sweep_codes(self) -> None:
        """Give each row the code that is best while all others stay."""
        for begin in range(0, len(self.codes), _ROWS):
            rows = range(begin, min(begin + _ROWS, len(self.codes)))
            block = slice(rows.start, rows.stop)
            H, changes = self.H[block, block], np.zeros((len(rows), self.scales.shape[1]))
            for number, row in enumerate(rows):
                gradient = self.gradient[row] - H[number, :number] @ changes[:number]
                scales, points = self.scales[self.of_row[row]], self._points(row)
                goal = (self.values[row] + gradient / H[number, number])[None, None]
                groups = None if points is None else points[None]
                self.codes[row] = native.encode(goal, self.format, scales[None], groups)[0, 0]
                changes[number] = self.format.decode(self.codes[row], scales, points) - self.values[row]
            self.values[block] += changes
            self.gradient -= self.H[:, block] @ changes

    def sweep_scales(self) -> None:
        """Give each group the scale that is best while all codes stay, rounded as it is stored, where that helps."""
        for number, begin in enumerate(range(0, len(self.codes), self.group)):
            block = slice(begin, min(begin + self.group, len(self.codes)))
            values = self.format.decode(self.codes[block], None, self._points(begin))
            slope = (values * self.gradient[block]).sum(0)
            curve = (values * (self.H[block, block] @ values)).sum(0)
            old = self.scales[number].copy()
            best = old + np.divide(slope, curve, out=np.zeros_like(slope), where=curve > 0)
            new = np.where(best > 0, stored_scales(np.maximum(best, 0), 1.0, self.kind), old)
            change = new - old
            change[curve * change**2 - 2 * change * slope >= 0] = 0
            self.scales[number] = np.where(change == 0, old, new)
            changes = values * (self.scales[number] - old)
            self.values[block] += changes
            self.gradient -= self.H[:, block] @ changes
