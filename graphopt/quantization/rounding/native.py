"""The nearest codes of groups, and what they cost, by the library of operators where that was built.

It computes what :mod:`graphopt.quantization.rounding.scales` does by NumPy, operation by operation: both give the
same bits, and a model has the same codes whether the library was there or not.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import numpy.typing as npt

from graphopt.errors import InputError
from graphopt.numerics.formats.trellis import WORST_COST, TrellisFormat
from graphopt.runtime_ops.library import library_path

if TYPE_CHECKING:
    from graphopt.numerics.formats.format import Codes, Format

Doubles = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

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
        ("rounded_codes", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class Search:
    """How levels are found: cells of equal width, each with one halfway point at most.

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
    def from_halfway(cls, halfway: Doubles) -> Search:
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
class _Levels:
    """The levels of a format as the library reads them, for as many calls as there are."""

    values: npt.NDArray[np.float64]
    codes: npt.NDArray[np.uint8]
    ties: npt.NDArray[np.float64]
    search: Search
    is_counting: bool

    @classmethod
    @lru_cache(maxsize=64)
    def from_halfway(cls, format: Format) -> _Levels:
        levels = format.levels
        assert levels is not None
        return cls(
            np.ascontiguousarray(levels.values, np.float64),
            np.ascontiguousarray(levels.codes, np.uint8),
            np.ascontiguousarray(levels.ties, np.float64),
            Search.from_halfway(levels.halfway),
            levels.is_counting,
        )


class _Search(ctypes.Structure):
    """``SearchWork`` of ``cpu/round.h``."""

    _fields_ = [("round", _Work), ("trials", ctypes.c_size_t), ("best_trials", ctypes.c_void_p)]


class _Trellis(ctypes.Structure):
    """``TrellisWork`` of ``cpu/trellis.h``."""

    _fields_ = [
        ("numbers", ctypes.c_void_p),
        ("units", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("importance", ctypes.c_void_p),
        ("groups", ctypes.c_size_t),
        ("size", ctypes.c_size_t),
        ("columns", ctypes.c_size_t),
        ("values", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("steps", ctypes.c_double),
        ("farthest", ctypes.c_double),
        ("costs", ctypes.c_double),
        ("worst", ctypes.c_double),
        ("bits", ctypes.c_size_t),
        ("window", ctypes.c_size_t),
        ("codes", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
    ]


class _Trial(ctypes.Structure):
    """``TrialWork`` of ``cpu/trellis.h``."""

    _fields_ = [
        ("search", _Trellis),
        ("numbers", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("errors", ctypes.c_void_p),
        ("products", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
    ]


class _Feedback(ctypes.Structure):
    """``FeedbackWork`` of ``cpu/trellis.h``."""

    _fields_ = [
        ("search", _Trellis),
        ("rows", ctypes.c_size_t),
        ("targets", ctypes.c_void_p),
        ("upper", ctypes.c_void_p),
        ("upper_rows", ctypes.c_size_t),
        ("matrix", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("group", ctypes.c_size_t),
        ("scale_columns", ctypes.c_size_t),
        ("codes", ctypes.c_void_p),
        ("code_columns", ctypes.c_size_t),
        ("errors", ctypes.c_void_p),
    ]


@dataclass(frozen=True)
class _Functions:
    """What the library has for us."""

    round: Any
    search: Any
    search_trellis: Any | None
    try_scales: Any | None
    feed_back: Any | None


@lru_cache(maxsize=4)
def _library(path: str) -> _Functions | None:
    """Return the functions of a library, or ``None`` where it is of an older version that lacks one."""
    try:
        library = ctypes.CDLL(path)
        trellis = getattr(library, "graphopt_search_trellis", None)
        trial = getattr(library, "graphopt_try_scales", None)
        feed_back = getattr(library, "graphopt_feed_back", None)
        functions = _Functions(library.graphopt_round_groups, library.graphopt_search_groups, trellis, trial, feed_back)
    except (OSError, AttributeError):
        return None
    functions.round.argtypes, functions.round.restype = [ctypes.POINTER(_Work)], ctypes.c_int
    functions.search.argtypes, functions.search.restype = [ctypes.POINTER(_Search)], ctypes.c_int
    if trellis is not None:
        trellis.argtypes, trellis.restype = [ctypes.POINTER(_Trellis)], ctypes.c_int
    if trial is not None:
        trial.argtypes, trial.restype = [ctypes.POINTER(_Trial)], ctypes.c_int
    if feed_back is not None:
        feed_back.argtypes, feed_back.restype = [ctypes.POINTER(_Feedback)], ctypes.c_int
    return functions


def _address(array: npt.NDArray[Any] | None) -> int | None:
    # `array.ctypes` takes several times as long
    return None if array is None else int(array.__array_interface__["data"][0])


def available() -> bool:
    """Return whether the library is there and has the functions."""
    path = library_path()
    return path is not None and _library(str(path)) is not None


def rounds(format: Format) -> bool:
    """Return whether the library is there, and can round to ``format``: each weight by itself."""
    return format.levels is not None and available()


def searches(format: Format) -> TypeGuard[TrellisFormat]:
    """Return whether the library is there, and can search the paths of ``format``."""
    return isinstance(format, TrellisFormat) and available() and _library_here().search_trellis is not None


def tries_scales(format: Format) -> TypeGuard[TrellisFormat]:
    """Return whether the library is there, and can say what scales of ``format`` lead to."""
    return searches(format) and _library_here().try_scales is not None


def feeds_back(format: Format) -> TypeGuard[TrellisFormat]:
    """Return whether the library is there, and can round rows of ``format`` one after the other."""
    return searches(format) and _library_here().feed_back is not None


class _GroupWork:
    """The work on some groups; it keeps the arrays that the library reads."""

    def __init__(
        self,
        groups: Doubles,
        format: Format,
        scales: Doubles,
        zero_points: Codes | None,
        importance: Doubles | None,
        errors: Doubles | None = None,
        codes: Codes | None = None,
    ) -> None:
        levels = _Levels.from_halfway(format)
        search = levels.search
        shifts = None if zero_points is None else format.decode(zero_points)
        self.arrays = [_doubles(array) for array in (groups, scales, shifts, importance)]
        weights, factors, points, counts = (_address(array) for array in self.arrays)
        self.work = _Work(
            weights,
            *groups.shape,
            factors,
            points,
            counts,
            _address(levels.values),
            _address(levels.codes),
            _address(levels.ties),
            _address(search.first),
            len(levels.values),
            search.cells,
            search.origin,
            search.per_unit,
            levels.is_counting,
            _address(errors),
            _address(codes),
        )


def _doubles(array: npt.NDArray[Any] | None) -> Doubles | None:
    return None if array is None else np.ascontiguousarray(array, np.float64)


_NOT_HERE = "GRAPHOPT_OPS_ISA names instructions that this machine does not have"


def _library_here() -> _Functions:
    functions = _library(str(library_path()))
    assert functions is not None
    return functions


def _call(name: str, work: ctypes.Structure) -> None:
    if not getattr(_library_here(), name)(ctypes.byref(work)):
        raise InputError(_NOT_HERE)


def round_groups(
    groups: Doubles,
    format: Format,
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
        format: the format.
        scales: [groups, columns].
        zero_points: [groups, columns]; ``None`` where the format has none.
        importance: what a squared error counts, [groups, rows of a group, 1]; ``None`` for 1.
        errors: whether errors are wanted.
        codes: whether codes are wanted.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    squares = np.empty(scales.shape) if errors else None
    nearest_codes = np.empty(groups.shape, np.uint8) if codes else None
    work = _GroupWork(groups, format, scales, zero_points, importance, squares, nearest_codes)
    _call("round", work.work)
    return squares, nearest_codes


class Row:
    """Rounds one row at a time: :func:`round_groups` for codes of a group of one row, without what that sets up.

    Args:
        format: the format.
    """

    def __init__(self, format: Format) -> None:
        empty = np.empty((1, 1, 0))
        self._work = _GroupWork(empty, format, empty[0], None, None)
        self._call = _library_here().round

    def __call__(self, numbers: Doubles, scales: Doubles, shifts: Doubles | None, codes: Codes) -> None:
        """Write the codes nearest to ``numbers / scales + shifts``; all are contiguous arrays [columns].

        Raises:
            InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
        """
        work = self._work.work
        work.columns = len(numbers)
        work.weights, work.scales, work.shifts = _address(numbers), _address(scales), _address(shifts)
        work.rounded_codes = _address(codes)
        if not self._call(work):
            raise InputError(_NOT_HERE)


def search_groups(
    groups: Doubles,
    format: Format,
    scales: Doubles,
    zero_points: Codes | None,
    importance: Doubles | None = None,
) -> tuple[npt.NDArray[np.uint32], Codes]:
    """Return which of several scales has the least squared error, [groups, columns], and the codes nearest with it.

    Args:
        groups: [groups, rows of a group, columns].
        format: the format.
        scales: [scales that are tried, groups, columns]; of several with the same error the first is chosen.
        zero_points: [scales that are tried, groups, columns]; ``None`` where the format has none.
        importance: what a squared error counts, [groups, rows of a group, 1]; ``None`` for 1.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    best_trials, codes = np.empty(scales.shape[1:], np.uint32), np.empty(groups.shape, np.uint8)
    work = _GroupWork(groups, format, scales, zero_points, importance, None, codes)
    _call("search", _Search(work.work, len(scales), _address(best_trials)))
    return best_trials, codes


def encode(
    groups: Doubles,
    format: Format,
    scales: Doubles,
    zero_points: Codes | None = None,
    importance: Doubles | None = None,
) -> Codes:
    """Return what ``format.encode`` does, uint8 [groups, rows of a group, codes of a row], by the library if it can.

    Args:
        groups: [groups, rows of a group, columns].
        format: the format.
        scales: [groups, columns].
        zero_points: [groups, columns]; ``None`` where the format has none.
        importance: what a squared error counts, [groups, rows of a group, 1]; ``None`` for 1.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    if not searches(format):
        return format.encode(groups, scales[:, None], None if zero_points is None else zero_points[:, None], importance)
    numbers, codes = np.ascontiguousarray(groups, np.float64), np.empty(groups.shape, np.uint8)
    factors, counts = _doubles(scales), _doubles(importance)
    _call("search_trellis", _trellis_work(format, numbers, factors, counts, codes))
    return codes


def try_scales(
    numbers: Singles, format: TrellisFormat, scales: Singles, weights: Singles | None
) -> tuple[Singles, Singles, Singles]:
    """Return what scales lead to, summed over the rows of a group, each [groups, columns].

    A number x with its weight w becomes a value v of the best path with free ends, and means v times its scale s.

    Args:
        numbers: x, [groups, rows of a group, columns].
        format: the format.
        scales: s, [groups, columns].
        weights: w, [groups, rows of a group, 1]; ``None`` for 1.

    Returns:
        The sums of w (v s - x)^2, of w v x, and of w v^2.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    x, factors, steps = np.ascontiguousarray(numbers), scales.astype(np.float64), np.ascontiguousarray(scales)
    counts = None if weights is None else np.ascontiguousarray(weights)
    errors, products, squares = (np.empty(scales.shape, np.float32) for _ in range(3))
    search = _trellis_work(format, x, factors, None, None)
    arrays = (_address(array) for array in (x, steps, counts, errors, products, squares))
    _call("try_scales", _Trial(search, *arrays))
    return errors, products, squares


def _trellis_work(
    format: TrellisFormat,
    numbers: Singles | Doubles,
    scales: Doubles | None,
    importance: Doubles | None,
    codes: Codes | None,
) -> _Trellis:
    """Return the work of a search; without codes its numbers are set elsewhere. All arrays must outlive the call."""
    return _Trellis(
        None if codes is None else _address(numbers),
        None,
        _address(scales),
        _address(importance),
        *numbers.shape,
        _address(format.values),
        _address(format.tables_in_steps),
        format.steps_per_unit,
        format.farthest,
        format.costs_per_step,
        WORST_COST,
        format.bits,
        format.window,
        _address(codes),
        None,
    )


def round_rows(  # noqa: PLR0913, what feedback reads and writes
    targets: Doubles,
    upper: Doubles,
    matrix: Doubles,
    order: npt.NDArray[np.int64],
    format: TrellisFormat,
    scales: Doubles,
    group: int,
    codes: Codes,
    errors: Doubles,
) -> None:
    """Round rows one after the other, each plus the errors of those before it, in the order of its sum.

    Args:
        targets: what is rounded, [rows, columns], contiguous.
        upper: what the error of one row adds to another, [rows, rows], columns contiguous; its strict upper triangle
            is read.
        matrix: what errors are counted from, [rows of the matrix, columns], contiguous.
        order: where rows lie in the matrix, [rows].
        format: the format.
        scales: [groups, columns], rows contiguous.
        group: rows of the matrix that share a scale.
        codes: of the matrix, [rows of the matrix, columns], rows contiguous; those of the rows are written.
        errors: ``matrix`` less what codes mean, [rows, columns], contiguous; written.

    Raises:
        InputError: GRAPHOPT_OPS_ISA names what this machine does not have.
    """
    row_indices = np.ascontiguousarray(order, np.int64)
    work = _Feedback(
        _trellis_work(format, targets[None], None, None, codes),
        len(targets),
        _address(targets),
        _address(upper),
        upper.strides[1] // upper.itemsize,
        _address(matrix),
        _address(row_indices),
        _address(scales),
        group,
        scales.strides[0] // scales.itemsize,
        _address(codes),
        codes.strides[0],
        _address(errors),
    )
    _call("feed_back", work)
