"""Number formats: what a code means. A new format is one line in :data:`FORMATS`."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.errors import InputError
from graphopt.formats.table import TableFormat, signed_integer, unsigned_integer

FORMATS: dict[str, TableFormat] = {
    table.name: table
    for table in (
        signed_integer(4, ir.DataType.INT4),
        signed_integer(8, ir.DataType.INT8),
        unsigned_integer(4, ir.DataType.UINT4),
        unsigned_integer(8, ir.DataType.UINT8),
    )
}
"""Every format by name: ``int4`` and ``int8`` are symmetric, ``uint4`` and ``uint8`` carry a zero point per group."""


def format_of(name: str) -> TableFormat:
    """Return the format called ``name``.

    Raises:
        InputError: there is none.
    """
    if name not in FORMATS:
        raise InputError(f"there is no number format {name!r}", remedy=f"known are {', '.join(FORMATS)}")
    return FORMATS[name]


__all__ = ["FORMATS", "TableFormat", "format_of"]
