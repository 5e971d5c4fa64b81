"""The factor U + I of a Hessian as error feedback reads it: whole in float64, or, of wide matrices, half in float32.

    correction of rows k .. l  =  U[j .. k, k .. l]^T E[j .. k]          E: the errors of the rows before

A wide Hessian (28672 inputs) takes 6.6 GB in float64. So its factor stays in the panels that it is made in, half of the
numbers. Its entries are rounded to float32, and so are errors where they are multiplied by it: a relative error of 6e-8
each, in a sum that a code of a few bits is chosen by.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.quantization.rounding.ldl import factor, factor_panels
from graphopt.util.processors import run_in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.quantization.rounding.scales import Doubles

WIDE = 8192
"""Rows of the largest Hessian that is factored as a whole."""

# Rows of a panel; of one that is solved with; and columns that are solved for together.
_PANEL, _SOLVED_ROWS, _SOLVED_COLUMNS = 512, 96, 256


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
        count = len(hessian)
        self._rows, self._size = count, panel
        self.weights = np.empty(count)

        def divide(rows: Doubles) -> npt.NDArray[np.float32]:
            roots, start = np.diagonal(rows).copy(), count - rows.shape[1]
            self.weights[::-1][start : start + len(rows)] = roots**2
            return (rows / roots[:, None]).astype(np.float32)

        self._panels = factor_panels(hessian, damping, order[::-1], panel, divide)

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


def solve_damped(hessian: npt.NDArray[Any], damping: float, right: npt.NDArray[Any]) -> Doubles:
    """Return (H + d)^-1 B, float64 [rows, columns], by the factor R of H + d = R^T R; threads share the columns.

    Args:
        hessian: H = X^T X, [rows, rows], up to a factor.
        damping: d, as a share of the mean of H's diagonal, which is not 0; grows tenfold up to 1 where it is too small.
        right: B, [rows, columns].

    Raises:
        InputError: H is not finite, or not X^T X of any X.
    """
    mean = float(np.diagonal(hessian).mean(dtype=np.float64))
    panels = factor_panels(hessian, damping, np.arange(len(hessian)), _SOLVED_ROWS, lambda panel: panel)
    ends = [len(hessian) - panel.shape[1] + len(panel) for panel in panels]
    inverses = [np.linalg.inv(panel[:, : len(panel)]) for panel in panels]
    solution = np.empty(right.shape)

    def solve_part(columns: slice) -> None:
        x = right[:, columns].astype(np.float64)
        x /= mean
        for panel, end, inverse in zip(panels, ends, inverses, strict=True):
            rows = slice(end - len(panel), end)
            x[rows] = inverse.T @ x[rows]
            x[end:] -= panel[:, len(panel) :].T @ x[rows]
        for panel, end, inverse in zip(panels[::-1], ends[::-1], inverses[::-1], strict=True):
            rows = slice(end - len(panel), end)
            x[rows] = inverse @ (x[rows] - panel[:, len(panel) :] @ x[end:])
        solution[:, columns] = x

    columns = right.shape[1]
    run_in_threads(solve_part, [slice(begin, begin + _SOLVED_COLUMNS) for begin in range(0, columns, _SOLVED_COLUMNS)])
    return solution
