"""Rounding with error feedback: each row is rounded to make up for the errors of the rows before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from graphopt.quantization.rounding import native
from graphopt.quantization.rounding.nearest import QuantizedMatrix
from graphopt.quantization.rounding.row_rounding import Rows
from graphopt.util.processors import run_in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.numerics.formats.format import Format
    from graphopt.quantization.rounding.factors import Factor
    from graphopt.quantization.rounding.scale_search import Search
    from graphopt.quantization.rounding.scales import Doubles, Scale

# Rows that one product corrects, and columns that are rounded together: what a row touches stays in a core's cache.
_ROWS, _COLUMNS = 128, 256


@dataclass(frozen=True)
class Rule:
    """How codes and scales of all columns are chosen.

    Attributes:
        format: the format.
        group: rows that share a scale.
        scale: how the scale of a group is chosen.
        scale_type: the type that scales are stored in.
        importance: what the error of a row counts when its scale is chosen, [rows]; ``None`` for 1.
        search: which scales are tried.
        static: choose all scales for the weights as they were, not as they are when their group is reached.
    """

    format: Format
    group: int
    scale: Scale
    scale_type: np.dtype[Any]
    importance: Doubles | None
    search: Search
    static: bool


def round_with_feedback(
    matrix: npt.NDArray[Any], factor: Factor, order: npt.NDArray[np.intp], rule: Rule
) -> QuantizedMatrix:
    """Round row after row, each plus the errors of those before it times the factor U + I of its Hessian.

    A row is encoded as a whole, so neighbours in it may matter to its codes. A block of rows is corrected by one
    product for all rows before the block, and within the block row by row.

    Args:
        matrix: [rows, columns].
        factor: unit upper triangular, [rows, rows], in the order of rounding; see
            :mod:`graphopt.quantization.rounding.ldl`.
        order: the order in which rows are rounded. In any but the natural one scales must be static.
        rule: how.
    """
    rows, columns = matrix.shape
    groups = -(-rows // rule.group)
    codes = np.empty((rows, rule.format.code_columns(slice(0, columns)).stop), np.uint8)
    scales = np.empty((groups, columns), np.float64)
    zero_points = np.zeros((groups, columns), np.uint8)

    def round_part(part: slice) -> None:
        numbers = np.ascontiguousarray(matrix[:, part], np.float64)
        if rule.static:
            for group, group_rows in _groups(rows, rule.group):
                _choose(numbers[group_rows], group_rows, group, rule, scales[:, part], zero_points[:, part])
        _round(
            numbers,
            factor,
            order,
            rule,
            codes[:, rule.format.code_columns(part)],
            scales[:, part],
            zero_points[:, part],
        )

    run_in_threads(round_part, list(rule.format.blocks(columns, _COLUMNS)))
    points = zero_points if rule.format.zero_point else None
    return QuantizedMatrix(rule.format, rule.group, codes, scales.astype(rule.scale_type), points)


def _groups(rows: int, size: int) -> Iterator[tuple[int, slice]]:
    for group, start in enumerate(range(0, rows, size)):
        yield group, slice(start, min(start + size, rows))


def _choose(
    numbers: Doubles, rows: slice, group: int, rule: Rule, scales: Doubles, zero_points: npt.NDArray[np.uint8]
) -> None:
    importance = None if rule.importance is None else rule.importance[None, rows, None]
    scaling = rule.search.scaling(numbers[None], rule.format, rule.scale, rule.scale_type, importance)
    scales[group], zero_points[group] = scaling.scales[0], scaling.zero_points[0]


def _round(
    numbers: Doubles,
    factor: Factor,
    order: npt.NDArray[np.intp],
    rule: Rule,
    codes: npt.NDArray[np.uint8],
    scales: Doubles,
    zero_points: npt.NDArray[np.uint8],
) -> None:
    """Round some columns; ``scales`` and ``zero_points`` are given if static, else chosen where a group begins."""
    rows, round_row = len(numbers), Rows(rule.format)
    # A group's scale is chosen for all of its rows at once, so either block holds whole groups or lies within one.
    inner = min(rule.group, _ROWS)
    outer = rule.group if rule.group > _ROWS else _ROWS // rule.group * rule.group
    errors = factor.errors(numbers.shape[1])
    for begin in range(0, rows, outer):
        end = min(begin + outer, rows)
        targets = numbers[order[begin:end]]
        targets += errors.correction(0, slice(begin, end))
        if not rule.static and outer == rule.group:
            _choose(targets, slice(begin, end), begin // rule.group, rule, scales, zero_points)
        for first in range(begin, end, inner):
            last = min(first + inner, end)
            target = targets[first - begin : last - begin]
            block = slice(first, last)
            target += errors.correction(begin, block)
            if not rule.static and outer != rule.group:
                _choose(target, slice(first, last), first // rule.group, rule, scales, zero_points)
            upper, block_errors = errors.factor_block(block), errors.block(block)
            if native.feeds_back(rule.format):
                native.round_rows(
                    target, upper, numbers, order[block], rule.format, scales, rule.group, codes, block_errors
                )
            else:
                for row, goal in enumerate(target):
                    index = order[first + row]
                    if row:
                        goal += _sum(upper[:row, row], block_errors[:row], rule.format)
                    group = index // rule.group
                    value = round_row(goal, scales[group], zero_points[group], codes[index])
                    np.subtract(numbers[index], value, out=block_errors[row])
            errors.keep(block)


def _sum(factors: Doubles, errors: Doubles, format: Format) -> Doubles:
    """Return the sum of errors [rows, columns] times factors [rows]."""
    if format.levels is not None:
        return factors @ errors
    # row after row, as the library adds them up
    total = np.zeros(errors.shape[1])
    for factor, row in zip(factors, errors, strict=True):
        total += factor * row
    return total
