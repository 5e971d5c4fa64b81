"""The factor U + I of a Hessian as error feedback reads it: whole in float64, or, of wide matrices, half in float32.

    correction of rows k .. l  =  U[j .. k, k .. l]^T E[j .. k]          E: the errors of the rows before

A wide Hessian (28672 inputs) takes 6.6 GB in float64, and LAPACK's routine three times that by way of NumPy. So it is
factored in panels of rows from the diagonal on, in place: half of the numbers, each panel's own block by LAPACK, the
rest by products (Golub and Van Loan, Matrix Computations, 4th edition, section 4.2.6). Its entries are then rounded to
float32, and so are errors where they are multiplied by it: a relative error of 6e-8 each, in a sum that a code of a few
bits is chosen by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.quantization.rounding.ldl import MOST_DAMPING, check_diagonal, factor, refuse_factor
from graphopt.util.processors import run_in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.quantization.rounding.scales import Doubles

WIDE = 8192
"""Rows of the largest Hessian that is factored as a whole."""

# Rows of a panel.
_PANEL = 512


class Factor(ABC):
    """U + I, unit upper triangular [rows, rows], in the order of rounding.

    Attributes:
        weights: D, float64 [rows].
    """

    weights: Doubles

    @abstractmethod
    def errors(self, columns: int) -> Errors:
        """Return where the errors of all rows go, for some columns of the matrix."""


class Errors(ABC):
    """The errors of rows [rows, columns], in the order of rounding."""

    @abstractmethod
    def factor_block(self, rows: slice) -> Doubles:
        """Return U + I of some rows and the same columns, float64; columns are contiguous."""

    @abstractmethod
    def correction(self, start: int, rows: slice) -> Doubles:
        """Return what the errors of the rows from ``start`` on, but before ``rows``, add to these, float64."""

    @abstractmethod
    def block(self, rows: slice) -> Doubles:
        """Return the array that the errors of some rows are written to, float64, contiguous."""

    @abstractmethod
    def keep(self, rows: slice) -> None:
        """Take what was written to the last :meth:`block`."""


def factor_of(hessian: npt.NDArray[Any], damping: float, order: npt.NDArray[np.intp]) -> Factor:
    """Return the factor of a damped Hessian whose rows are put in ``order``, see :func:`ldl.factor`.

    Raises:
        InputError: the Hessian is not finite, or not X^T X of any X.
    """
    if len(hessian) > WIDE:
        return PanelFactor(hessian, damping, order)
    return WholeFactor(*factor(hessian, damping, order))


class WholeFactor(Factor):
    """All of it, in float64.

    Args:
        upper: U + I.
        weights: D.
    """

    def __init__(self, upper: Doubles, weights: Doubles) -> None:
        self.upper, self.weights = upper, weights

    def errors(self, columns: int) -> Errors:
        """See :class:`Factor`."""
        return _WholeErrors(self.upper, columns)


class _WholeErrors(Errors):
    def __init__(self, upper: Doubles, columns: int) -> None:
        self._upper, self._errors = upper, np.empty((len(upper), columns))

    def factor_block(self, rows: slice) -> Doubles:
        return self._upper[rows, rows]

    def correction(self, start: int, rows: slice) -> Doubles:
        before = slice(start, rows.start)
        return np.asarray(self._upper[before, rows].T @ self._errors[before])

    def block(self, rows: slice) -> Doubles:
        return self._errors[rows]

    def keep(self, rows: slice) -> None:
        pass


class PanelFactor(Factor):
    """Half of it, in float32: the rows of R for H = R^T R, H's rows in reverse order, each divided by its diagonal.

    So U_jk is R[n-1-k, n-1-j], and what corrects a row lies side by side.

    Args:
        hessian: X^T X, [rows, rows].
        damping: what is added to the diagonal, as a share of its mean; grows tenfold up to 1 where it is too small.
        order: which row comes first, and so on.
        panel: rows of a panel.
    """

    def __init__(
        self, hessian: npt.NDArray[Any], damping: float, order: npt.NDArray[np.intp], panel: int = _PANEL
    ) -> None:
        mean = float(check_diagonal(hessian).mean())
        self._rows, self._size = len(hessian), panel
        damping = damping if mean else 1.0
        squares: Doubles | None = None
        while squares is None:
            try:
                squares = self._factor(hessian, mean or 1.0, damping, order[::-1])
            except np.linalg.LinAlgError as error:
                if not np.isfinite(hessian).all() or damping >= MOST_DAMPING:
                    raise refuse_factor(hessian, damping) from error
                damping = min(10 * damping, MOST_DAMPING)
        self.weights = np.ascontiguousarray(squares[::-1])

    def _factor(self, hessian: npt.NDArray[Any], mean: float, damping: float, order: npt.NDArray[np.intp]) -> Doubles:
        """Make the panels, and return the squares of R's diagonal."""
        count, size = self._rows, self._size
        starts = range(0, count, size)
        panels: list[Any] = [None] * len(starts)
        squares = np.empty(count)
        buffers: list[Doubles] = []

        def copy_rows(number: int) -> None:
            start = starts[number]
            rows = hessian[order[start : start + size]]
            panel = np.ascontiguousarray(rows[:, order[start:]], np.float64)
            panel /= mean
            panel.reshape(-1)[:: panel.shape[1] + 1] += damping
            panels[number] = panel

        run_in_threads(copy_rows, range(len(starts)))
        for number, start in enumerate(starts):
            panel = panels[number]
            width = len(panel)
            lower = np.linalg.cholesky(panel[:, :width])
            panel[:, width:] = np.linalg.inv(lower) @ panel[:, width:]
            panel[:, :width] = lower.T

            def subtract(later: int, panel: Doubles = panel, start: int = start) -> None:
                column = starts[later] - start
                target = panels[later]
                buffer = buffers.pop() if buffers else np.empty(size * count)
                product = buffer[: target.size].reshape(target.shape)
                np.matmul(panel[:, column : column + len(target)].T, panel[:, column:], out=product)
                target -= product
                buffers.append(buffer)

            run_in_threads(subtract, range(number + 1, len(starts)))
            roots = np.diagonal(panel).copy()
            squares[start : start + width] = roots**2
            panels[number] = (panel / roots[:, None]).astype(np.float32)
        self._panels: list[npt.NDArray[np.float32]] = panels
        return squares

    def part(self, rows: slice, columns: slice) -> Iterator[tuple[slice, npt.NDArray[np.float32]]]:
        """Yield R of some rows and columns, in the reverse order: which of the rows, and their numbers."""
        for number in range(rows.start // self._size, -(-rows.stop // self._size)):
            top = number * self._size
            start, stop = max(rows.start, top), min(rows.stop, top + self._size)
            first = max(columns.start - top, 0)
            numbers = self._panels[number][start - top : stop - top, first : columns.stop - top]
            yield slice(start - rows.start, stop - rows.start), numbers

    def reverse(self, rows: slice) -> slice:
        """Return where rows of the order of rounding lie in the reverse order."""
        return slice(self._rows - rows.stop, self._rows - rows.start)

    def errors(self, columns: int) -> Errors:
        """See :class:`Factor`."""
        return _PanelErrors(self, self._rows, columns)


class _PanelErrors(Errors):
    """Errors in float32, in the reverse order; those of the rows at hand in float64."""

    def __init__(self, factor: PanelFactor, rows: int, columns: int) -> None:
        self._factor, self._errors = factor, np.empty((rows, columns), np.float32)
        self._block = np.empty((0, columns))

    def factor_block(self, rows: slice) -> Doubles:
        reverse_rows = self._factor.reverse(rows)
        size = reverse_rows.stop - reverse_rows.start
        block = np.zeros((size, size))
        for part_rows, numbers in self._factor.part(reverse_rows, reverse_rows):
            block[part_rows, size - numbers.shape[1] :] = numbers
        # R's rows are U's columns, and both run backwards; below the diagonal is nothing that is read.
        return np.ascontiguousarray(block[::-1, ::-1]).T

    def correction(self, start: int, rows: slice) -> Doubles:
        reverse_rows = self._factor.reverse(rows)
        before = self._factor.reverse(slice(start, rows.start))
        sums = np.zeros((reverse_rows.stop - reverse_rows.start, self._errors.shape[1]))
        if before.start < before.stop:
            for part_rows, numbers in self._factor.part(reverse_rows, before):
                sums[part_rows] = numbers @ self._errors[before]
        return sums[::-1]

    def block(self, rows: slice) -> Doubles:
        self._block = np.empty((rows.stop - rows.start, self._errors.shape[1]))
        return self._block

    def keep(self, rows: slice) -> None:
        self._errors[self._factor.reverse(rows)] = self._block[::-1]
