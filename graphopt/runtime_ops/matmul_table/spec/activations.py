"""How ``MatMulTable`` and ``MatMulDynamic`` round activations: in NumPy, and as nodes of their bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.runtime_ops.tape import branch, ints

if TYPE_CHECKING:
    from collections.abc import Sequence

Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]

MODES = ("float32", "bfloat16", "int8", "int16", "uint4")
"""What x may be rounded to."""

ON_GPUS = MODES[:4]
"""Those that have kernels for GPUs."""

LEVELS = {"int8": 127, "int16": 16256, "uint4": 15}
"""The largest code of an activation. 16256 = 128 x 127: such a code is two signed bytes,
128 high + low."""

WITH_ZERO_POINTS = ("uint4",)
"""Those whose groups have a zero point beside their scale: codes go from 0 to the largest. Each has its own body."""

SYMMETRIC = tuple(mode for mode in MODES if mode not in WITH_ZERO_POINTS)
"""The others, in the order of :data:`MODES`: one body serves them all, as it did before there were zero points."""

TINY = 1e-30
"""A group of activations that stays below it counts as zeros: its scale could not be divided by."""


def round_activations(x: Floats, group: int, activations: str) -> Doubles:
    """Return x [..., K] as a product sees it, float64."""
    if activations not in MODES:
        raise ValueError(f"activations are {', '.join(MODES)}, not {activations!r}")
    row = x.astype(np.float32)
    if activations == "float32":
        return row.astype(np.float64)
    if activations == "bfloat16":
        return to_bfloat16(row).astype(np.float64)
    products = np.empty(row.shape, np.float64)
    for start in range(0, row.shape[-1], group):
        columns = slice(start, start + group)
        products[..., columns] = round_group(row[..., columns], activations)
    return products


def round_group(x: npt.NDArray[np.float32], activations: str, clip: float = 1.0, levels: int | None = None) -> Doubles:
    """Return each row (last axis) of ``x`` rounded with one scale, see :func:`round_rows` and :func:`round_ranges`.

    Args:
        x: float32 [..., n].
        activations: an integer type.
        clip: the share of the row's range that codes reach.
        levels: the largest code, where it is not the one in :data:`LEVELS`.
    """
    levels = LEVELS[activations] if levels is None else levels
    return (round_ranges if activations in WITH_ZERO_POINTS else round_rows)(x, levels, clip)


def round_rows(x: npt.NDArray[np.float32], levels: int, clip: float = 1.0) -> Doubles:
    """Return q s for each row (last axis) of ``x``, float64; m, q and s are those of float32 arithmetic.

    m = clip max|x|, s = m / levels, q = round(x (levels / m)), from -levels to levels. A row with m < 1e-30 is zeros, a
    row that is not finite is NaN.
    """
    m = np.abs(x).max(axis=-1, keepdims=True) * np.float32(clip)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        q = np.clip(np.rint(x * (np.float32(levels) / m)), -levels, levels)
        products = np.where(m < TINY, 0.0, q.astype(np.float64) * (m / np.float32(levels)))
    return np.where(np.isfinite(m), products, np.nan)


def round_ranges(x: npt.NDArray[np.float32], levels: int, clip: float = 1.0) -> Doubles:
    """Return q s for each row (last axis) of ``x``, float64; s, z and q are those of float32 arithmetic.

    low = clip min(0, min x), high = clip max(0, max x), w = high - low, s = w / levels, z = round(-low (levels / w)),
    q = round(x (levels / w)), from -z to levels - z. A row with w < 1e-30 is zeros; one that is not finite, or whose w
    is not, is NaN.
    """
    low = np.minimum(x.min(axis=-1, keepdims=True), np.float32(0)) * np.float32(clip)
    high = np.maximum(x.max(axis=-1, keepdims=True), np.float32(0)) * np.float32(clip)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        width = high - low
        inverse = np.float32(levels) / width
        zero_point = np.rint(-low * inverse)
        q = np.clip(np.rint(x * inverse), -zero_point, levels - zero_point)
        products = np.where(width < TINY, 0.0, q.astype(np.float64) * (width / np.float32(levels)))
    return np.where(np.isfinite(width), products, np.nan)


def to_bfloat16(numbers: Floats) -> npt.NDArray[np.float32]:
    """Return ``numbers`` rounded to the nearest bfloat16, ties to even."""
    with np.errstate(over="ignore", invalid="ignore"):
        halves: npt.NDArray[np.float32] = numbers.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    return halves


def bfloat16_nodes(tape: ir.tape.Tape, numbers: ir.Value) -> ir.Value:
    """Return ``numbers`` rounded to bfloat16, as float."""
    return tape.op("Cast", [tape.op("Cast", [numbers], {"to": ir.DataType.BFLOAT16})], {"to": ir.DataType.FLOAT})


def rounding_nodes(tape: ir.tape.Tape, x: ir.Value, mode: ir.Value, rows: ir.Value, group: ir.Value) -> ir.Value:
    """Return x as the product sees it; ``mode`` is the place of the mode in :data:`SYMMETRIC`, int64 [1]."""
    bfloat16 = ints(tape, SYMMETRIC.index("bfloat16"))
    is_bfloat16 = tape.op("Equal", [mode, bfloat16])

    def otherwise(inner: ir.tape.Tape) -> ir.Value:
        branches = {
            "then_branch": branch("halves", lambda tape: bfloat16_nodes(tape, x)),
            "else_branch": branch("floats", lambda tape: tape.op("Identity", [x])),
        }
        return inner.op("If", [is_bfloat16], branches)

    branches = {
        "then_branch": branch("grouped", lambda tape: _rounded_in_groups(tape, x, mode, rows, group)),
        "else_branch": branch("whole", otherwise),
    }
    is_integer = tape.op("Greater", [mode, bfloat16])
    return tape.op("If", [is_integer], branches)


def _rounded_in_groups(tape: ir.tape.Tape, x: ir.Value, mode: ir.Value, rows: ir.Value, group: ir.Value) -> ir.Value:
    whole, groups = group_nodes(tape, x, rows, group)
    by_mode = tape.op("Constant", [], {"value_floats": [float(LEVELS.get(name, 0)) for name in SYMMETRIC]})
    levels = tape.op("Gather", [by_mode, mode], {"axis": 0})
    return ungroup_nodes(tape, row_rounding_nodes(tape, groups, levels, None), whole, rows)


def range_nodes(tape: ir.tape.Tape, x: ir.Value, activations: str, rows: ir.Value, group: ir.Value) -> ir.Value:
    """Return x as the product sees it where ``activations`` is one of :data:`WITH_ZERO_POINTS`."""
    whole, groups = group_nodes(tape, x, rows, group)
    levels = tape.op("Constant", [], {"value_float": float(LEVELS[activations])})
    return ungroup_nodes(tape, range_rounding_nodes(tape, groups, levels, None), whole, rows)


def group_nodes(tape: ir.tape.Tape, x: ir.Value, rows: ir.Value, group: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return x [..., rows] padded with zeros to whole groups, and that as [..., groups, group]; rows, group int64 [1].

    Zeros change neither the largest magnitude of a group nor a range that 0 is in.
    """
    missing = tape.op("Mod", [tape.op("Neg", [rows]), group])
    zero = tape.op("Constant", [], {"value_float": 0.0})
    pads = tape.op("Concat", [ints(tape, 0), missing], {"axis": 0})
    whole = tape.op("Pad", [x, pads, zero, ints(tape, -1)])
    groups = tape.op("Div", [tape.op("Add", [rows, missing]), group])
    leading = tape.op("Shape", [x], {"start": 0, "end": -1})
    # allowzero: an axis may be empty, as for an expert that no token goes to
    shape = tape.op("Concat", [leading, groups, group], {"axis": 0})
    return whole, tape.op("Reshape", [whole, shape], {"allowzero": 1})


def ungroup_nodes(tape: ir.tape.Tape, groups: ir.Value, whole: ir.Value, rows: ir.Value) -> ir.Value:
    """Return ``groups`` [..., groups, group] as [..., rows], without padding; see :func:`group_nodes`."""
    flat = tape.op("Reshape", [groups, tape.op("Shape", [whole])], {"allowzero": 1})
    return tape.op("Slice", [flat, ints(tape, 0), rows, ints(tape, -1)])


def group_rounding_nodes(
    tape: ir.tape.Tape,
    x: ir.Value,
    mode: ir.Value,
    modes: Sequence[str],
    levels: ir.Value,
    clip: ir.Value | None,
) -> ir.Value:
    """Return q s for each row of ``x``, as :func:`round_group`; ``mode`` is the place of the mode in ``modes``."""
    (range_mode,) = (modes.index(name) for name in WITH_ZERO_POINTS)
    branches = {
        "then_branch": branch("ranges", lambda tape: range_rounding_nodes(tape, x, levels, clip)),
        "else_branch": branch("rows", lambda tape: row_rounding_nodes(tape, x, levels, clip)),
    }
    return tape.op("If", [tape.op("Equal", [mode, ints(tape, range_mode)])], branches)


def range_rounding_nodes(tape: ir.tape.Tape, x: ir.Value, levels: ir.Value, clip: ir.Value | None) -> ir.Value:
    """Return q s for each row of ``x``, see :func:`round_ranges`; arguments as for :func:`row_rounding_nodes`."""
    zero = tape.op("Constant", [], {"value_float": 0.0})
    low = tape.op("Min", [tape.op("ReduceMin", [x, ints(tape, -1)], {"keepdims": 1}), zero])
    high = tape.op("Max", [tape.op("ReduceMax", [x, ints(tape, -1)], {"keepdims": 1}), zero])
    if clip is not None:
        low, high = (tape.op("Mul", [end, clip]) for end in (low, high))
    width = tape.op("Sub", [high, low])
    inverse = tape.op("Div", [levels, width])
    zero_point = tape.op("Round", [tape.op("Mul", [tape.op("Neg", [low]), inverse])])
    capped_steps = tape.op(
        "Min", [tape.op("Sub", [levels, zero_point]), tape.op("Round", [tape.op("Mul", [x, inverse])])]
    )
    steps = tape.op("Max", [tape.op("Neg", [zero_point]), capped_steps])
    return _zeros_where_tiny(tape, x, width, tape.op("Mul", [steps, tape.op("Div", [width, levels])]))


def row_rounding_nodes(tape: ir.tape.Tape, x: ir.Value, levels: ir.Value, clip: ir.Value | None) -> ir.Value:
    """Return q s for each row of ``x``, see :func:`round_rows`.

    Args:
        tape: takes the nodes.
        x: float [..., n].
        levels: float [1], the largest code.
        clip: float [1], the share of the largest magnitude that the largest code stands for; ``None`` for all of it.
    """
    largest = tape.op("ReduceMax", [tape.op("Abs", [x]), ints(tape, -1)], {"keepdims": 1})
    m = largest if clip is None else tape.op("Mul", [largest, clip])
    steps = tape.op("Round", [tape.op("Mul", [x, tape.op("Div", [levels, m])])])
    if clip is not None:
        steps = tape.op("Max", [tape.op("Neg", [levels]), tape.op("Min", [levels, steps])])
    return _zeros_where_tiny(tape, x, m, tape.op("Mul", [steps, tape.op("Div", [m, levels])]))


def _zeros_where_tiny(tape: ir.tape.Tape, x: ir.Value, size: ir.Value, products: ir.Value) -> ir.Value:
    # x 0 is 0 for finite x and NaN otherwise: NaN must reach y, even where maxima and minima lose it
    zeros = tape.op("Mul", [x, tape.op("Constant", [], {"value_float": 0.0})])
    is_tiny = tape.op("Less", [size, tape.op("Constant", [], {"value_float": TINY})])
    return tape.op("Where", [is_tiny, zeros, tape.op("Add", [products, zeros])])
