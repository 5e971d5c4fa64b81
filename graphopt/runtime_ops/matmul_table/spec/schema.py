"""The schema of ``ai.graphopt::MatMulTable``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from graphopt.runtime_ops.matmul_table.spec.activations import WITH_ZERO_POINTS
from graphopt.runtime_ops.matmul_table.spec.levels import SPANS
from graphopt.runtime_ops.matmul_table.spec.packing import TILE, bits_of
from graphopt.runtime_ops.schema import Coordinates, Cost, Port, Role, Schema

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)

PORTS = (
    Port("x", Role.DATA, FLOATS),
    Port("codes", Role.CODES, (ir.DataType.UINT8,), columns=0, bits=lambda shape, _: bits_of(shape)),
    Port("scales", Role.SCALES, (*FLOATS, ir.DataType.UINT8), columns=0),
    Port("table", Role.TABLE, (ir.DataType.FLOAT,)),
    Port(
        "zero_points", Role.ZERO_POINTS, (*FLOATS, ir.DataType.UINT8), same_type_as="scales", placeholder=1, columns=0
    ),
    Port("bias", Role.BIAS, (ir.DataType.FLOAT,), placeholder=1, columns=0),
)
"""The inputs of every product with packed codes."""

SIZES = dict.fromkeys(("rows", "columns", "group"), ir.AttributeType.INT)

OPTIONAL = {"minimums": ir.AttributeType.INT}
"""1: zero points are minimums, added behind the scales. 0, and where it is left out: they are zero points."""

PACKED_OPTIONAL = {**OPTIONAL, **dict.fromkeys(("trellis", "span", "low", "base"), ir.AttributeType.INT)}
"""trellis is 1: codes are those of a trellis, with two tables. 0, and where it is left out: each code has a value.
span: groups under one step where scales and zero points are in two levels. 0, and where it is left out: they are
numbers. low: the integer of code 0 of those, beside span. base: 3 where codes are digits of base 3, five in a byte.
0, and where it is left out: they are bits.
"""


def overload(
    *,
    minimums: int = 0,
    trellis: int = 0,
    span: int = 0,
    low: int | None = None,
    base: int = 0,
    activations: str = "",
    **_: Any,
) -> str:
    """Return the name of the body for a node's attributes, "" for the first of them.

    There are bodies for zero points, for minimums and for trellises, of each one more where activations have zero
    points, and of all of these one more where scales are in two levels, and where codes are digits.

    Raises:
        ValueError: ``minimums`` or ``trellis`` is neither 0 nor 1, or both are 1; ``span`` is none of 0, 8 and 16, or
            has no ``low`` from -128 to 0; ``base`` is neither 0 nor 3, or is 3 for a trellis.
    """
    flags = {"minimums": minimums, "trellis": trellis}
    for name, flag in flags.items():
        if flag not in (0, 1):
            raise ValueError(f"{name} must be 0 or 1, it is {flag}")
    if minimums and trellis:
        raise ValueError("a trellis has no minimums")
    if span not in (0, *SPANS) or (span and (low is None or not -128 <= low <= 0)):
        raise ValueError(f"span must be 0, 8 or 16, beside low from -128 to 0; they are {span} and {low}")
    if base not in (0, 3) or (base and trellis):
        raise ValueError(f"base must be 0, or 3 for codes that are no trellis, it is {base}")
    flags |= {"span": span, "low": span, "base": base}
    modes = (mode for mode in WITH_ZERO_POINTS if mode == activations)
    return "_".join((*(name for name, flag in flags.items() if flag), *modes))


def cost(shapes: Sequence[Sequence[int]]) -> Cost:
    """Return what a call takes, with scales that are floats or in two levels, and the padding of the last tile."""
    x, codes, scales, table, zero_points, *small = shapes
    outputs = prod(x[:-1]) * TILE * codes[0]
    numbers = prod(x) + outputs + sum(prod(shape) for shape in (table, *small))
    of_groups = sum(prod(shape) * scale_bytes(shape, codes) for shape in (scales, zero_points))
    return Cost(operations=2 * outputs * x[-1], bytes=prod(codes) + of_groups + 4 * numbers)


def scale_bytes(scales: Sequence[int], codes: Sequence[int]) -> int:
    """Return the bytes of an element of scales: 4 as floats [..., G, 16], 1 in two levels, [..., B]."""
    return 4 if len(scales) == len(codes) else 1


def precision(attributes: Mapping[str, Any]) -> str | None:
    """Return what x is rounded to; activations of ``float32`` stay as they are."""
    mode: str = attributes.get("activations", "unknown")
    return None if mode == "float32" else mode


SCHEMA = Schema(
    name="MatMulTable",
    version=1,
    inputs=PORTS,
    outputs=(Port("y", Role.DATA, same_type_as="x"),),
    attributes={**SIZES, "activations": ir.AttributeType.STRING},
    optional=PACKED_OPTIONAL,
    shapes=lambda shapes, attributes: ((*shapes["x"][:-1], attributes["columns"]),),
    cost=cost,
    coordinates=Coordinates.MULTIPLIES,
    precision=precision,
)
