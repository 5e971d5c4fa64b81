"""The nearest codes of groups, and what they cost, by the library of operators where that was built.

It computes what :mod:`graphopt.rounding.scales` does by NumPy, operation by operation: both give the same bits, and a
model has the same codes whether the library was there or not.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.formats.table import Codes, TableFormat
from graphopt.runtime_ops.library import library_path

Doubles = npt.NDArray[np.float64]

_MOST_CELLS = 1 << 12


class _Work(ctypes.Structure):
    """``RoundWork`` of ``cpu/round.h``."""

    _fields_ = [
        ("weights", ctypes.c_void_p),
        ("groups", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("columns", ctypes.c_size_t),
        ("scales", ctypes.c_void_p),
        ("shifts", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("ties", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("entries", ctypes.c_size_t),
        ("cells", ctypes.c_size_t),
        ("origin", ctypes.c_double),
        ("per_unit", ctypes.c_double),
        ("counting", ctypes.c_uint8),
        ("errors", ctypes.c_void_p),
        ("rounded", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Search:
    """How places in a table are found: cells of equal width, each with one halfway point at most.

    Attributes:
        first: how many halfway points lie below each cell, and below the one in front of it; empty without cells.
        cells: how many cells; 0 where values lie too close to one another, then places are found by halving.
        origin: where the cells begin.
        per_unit: cells in a unit.
    """

    first: npt.NDArray[np.int32]
    cells: int
    origin: float
    per_unit: float

    @classmethod
    def of(cls, halfway: Doubles) -> Search:
        """Return cells for these halfway points, in order."""
        if len(halfway) < 2:
            return cls(np.zeros(1, np.int32), 0, 0.0, 0.0)
        span, gap = float(halfway[-1] - halfway[0]), float(np.diff(halfway).min())
        if 2 * span > _MOST_CELLS * gap:
            return cls(np.zeros(1, np.int32), 0, 0.0, 0.0)
        cells = 1 << max(1, int(np.ceil(np.log2(2 * span / gap))))
        width = span / cells
        origin = float(halfway[0]) - width
        # A cell starts to look one cell early, as the cell of a number is rounded.
        edges = origin + (np.arange(cells + 4) - 1) * width
        return cls(np.searchsorted(halfway, edges).astype(np.int32), cells, origin, 1 / width)


@dataclass(frozen=True)
class _Table:
    """A format as the library reads it, for as many calls as there are."""

    values: npt.NDArray[np.float64]
    codes: npt.NDArray[np.uint8]
    ties: npt.NDArray[np.float64]
    search: Search

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, table: TableFormat) -> _Table:
        values, codes = table.ordered
        return cls(
            np.ascontiguousarray(values, np.float64),
            np.ascontiguousarray(codes, np.uint8),
            np.ascontiguousarray(table.ties, np.float64),
            Search.of(table.halfway),
        )


@lru_cache(maxsize=4)
def _library(path: str) -> Any:
    """Return the function of a library, or ``None`` where it is of an older version that has none."""
    try:
        function = ctypes.CDLL(path).graphopt_round_groups
    except (OSError, AttributeError):
        return None
    function.argtypes, function.restype = [ctypes.POINTER(_Work)], ctypes.c_int
    return function


def _address(array: npt.NDArray[Any]) -> int:
    # `array.ctypes` takes several times as long
    return int(array.__array_interface__["data"][0])


def available() -> bool:
    """Return whether the library is there and has the function."""
    path = library_path()
    return path is not None and _library(str(path)) is not None


def round_groups(
    groups: Doubles,
    table: TableFormat,
    scales: Doubles,
    zero_points: Codes | None,
    importance: Doubles | None = None,
    *,
    errors: bool = False,
    codes: bool = False,
) -> tuple[Doubles | None, Codes | None]:
    """Return the squared error of each group [groups, columns], and the codes nearest to its numbers, as asked for.

    Args:
        groups: [groups, rows of a group, columns].
        table: the format.
        scales: [groups, columns].
        zero_points: [groups, columns]; ``None`` where the format has none.
        importance: what a squared error counts, [groups, rows of a group, 1]; ``None`` for 1.
        errors: whether errors are wanted.
        codes: whether codes are wanted.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    function = _library(str(library_path()))
    known = _Table.of(table)
    search = known.search
    count, size, columns = groups.shape
    keep: list[npt.NDArray[Any]] = []

    def pointer(array: npt.ArrayLike | None, dtype: npt.DTypeLike) -> int | None:
        if array is None:
            return None
        keep.append(np.ascontiguousarray(array, dtype))
        return _address(keep[-1])

    found = np.empty((count, columns)) if errors else None
    rounded = np.empty(groups.shape, np.uint8) if codes else None
    work = _Work(
        pointer(groups, np.float64),
        count,
        size,
        columns,
        pointer(scales, np.float64),
        pointer(None if zero_points is None else table.decode(zero_points), np.float64),
        pointer(importance, np.float64),
        _address(known.values),
        _address(known.codes),
        _address(known.ties),
        _address(search.first),
        len(known.values),
        search.cells,
        search.origin,
        search.per_unit,
        table.is_counting,
        None if found is None else _address(found),
        None if rounded is None else _address(rounded),
    )
    if not function(ctypes.byref(work)):
        raise InputError("GRAPHOPT_OPS_ISA names instructions that this machine does not have")
    return found, rounded
