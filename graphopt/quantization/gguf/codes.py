"""Codes and scales of a tensor of a GGUF file, in formats of ours: what the file holds, not rounded again.

    Q4_0  Q5_0  Q8_0   w = q d                int4, int5, int8 in groups of 32, d float16
    Q3_K  Q6_K         w = q (d s)            int3, int6 in groups of 16; s of 6 and 8 bits: d s takes float32
    Q4_1  Q5_1         w = q d + m            uint4, uint5 in groups of 32; d and m float16
    Q2_K  Q4_K  Q5_K   w = q (d s) - d' t     uint2 in groups of 16, uint4, uint5 in groups of 32; d s and d' t as above
    IQ4_NL  IQ4_XS     w = T[q] d             16 integers in groups of 32; d float16, or a product as above
    TQ1_0  TQ2_0       w = q d                ternary in groups of 256, in 2 bits; d float16
    MXFP4  NVFP4       w = T[q] d             the values of FP4 doubled, in groups of 32 and 16; d E8M0, E4M3 halved

Each means the same numbers as the file to the last bit. Where a kernel knows no minimums, they become zero points
z = -m / d in float32, and a weight (q - z) d moves by about 2^-23 of the larger of |q d| and |m|.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from graphopt.numerics.formats import FORMATS, TableFormat
from graphopt.quantization.gguf.blocks import Ggml, block_of, decode, import_gguf
from graphopt.quantization.matrix_codes import CodedRows, CodedTensor, Coding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from graphopt.graph.weights import Array, Region, Shape
    from graphopt.numerics.formats import Format


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How a type lies in its blocks.

    Attributes:
        format: a format of ours; ``None`` where the package ``gguf`` has the table.
        group: numbers that share a scale.
        half: where the float16 number lies that is the scale of the block; ``None`` where a scale is a product.
        minimums: whether groups have minimums.
        unit_codes: the bytes of codes by their first place, set so that every code means 1.
    """

    format: str | None
    group: int
    half: int | None = None
    minimums: bool = False
    unit_codes: Mapping[int, bytes] = dataclasses.field(default_factory=dict)


KINDS = {
    "Q4_0": _Kind("int4", 32, 0),
    "Q5_0": _Kind("int5", 32, 0),
    "Q8_0": _Kind("int8", 32, 0),
    "Q4_1": _Kind("uint4", 32, 0, minimums=True),
    "Q5_1": _Kind("uint5", 32, 0, minimums=True),
    "Q2_K": _Kind("uint2", 16, minimums=True, unit_codes={16: b"\x55" * 64}),
    "Q3_K": _Kind("int3", 16, unit_codes={0: b"\xff" * 32, 32: b"\x55" * 64}),
    "Q4_K": _Kind("uint4", 32, minimums=True),
    "Q5_K": _Kind("uint5", 32, minimums=True),
    "Q6_K": _Kind("int6", 16, unit_codes={0: b"\x11" * 128, 128: b"\xaa" * 64}),
    "IQ4_NL": _Kind(None, 32, 0),
    "IQ4_XS": _Kind(None, 32, unit_codes={8: b"\x88" * 128}),
    "TQ1_0": _Kind("ternary", 256, -2),
    "TQ2_0": _Kind("ternary", 256, -2),
    "MXFP4": _Kind(None, 32, unit_codes={1: b"\x11" * 16}),
    "NVFP4": _Kind(None, 16, unit_codes={4: b"\x11" * 32}),
}
_TABLES = {"IQ4_NL": "IQ4_NL", "IQ4_XS": "IQ4_NL", "MXFP4": "MXFP4", "NVFP4": "NVFP4"}
"""Types whose table the package ``gguf`` has, and under which name."""


def has_codes(tensor: object) -> bool:
    """Return whether a tensor holds matrices of codes that a format of ours can say."""
    return isinstance(tensor, Ggml) and tensor.kind in KINDS and len(tensor.dims) > 1


@cache
def format_of_kind(kind: str) -> Format:
    """Return the format whose codes a type of GGML has.

    Raises:
        MissingDependencyError: the package ``gguf`` is not installed.
    """
    name = KINDS[kind].format
    if name is not None:
        return FORMATS[name]
    table = _TABLES[kind]
    values = tuple(float(value) for value in getattr(import_gguf().quants, table).kvalues)
    return TableFormat(table.lower(), 4, values)


@dataclasses.dataclass(frozen=True, eq=False)
class GgmlCodes(CodedTensor):
    """The codes of a tensor of a GGUF file, of a type in the table above; rows of stacked matrices are one matrix."""

    source: Ggml

    def __post_init__(self) -> None:
        if not has_codes(self.source):
            raise ValueError(f"{self.source} has no codes that can be kept")
        rows = prod(self.source.dims[:-1])
        object.__setattr__(self, "source", dataclasses.replace(self.source, dims=(rows, self.source.dims[-1])))

    @property
    def kind(self) -> str:
        """The type."""
        return self.source.kind

    @property
    def shape(self) -> Shape:
        """Rows of all matrices, and their columns."""
        return self.source.dims

    @property
    def coding(self) -> Coding:
        """As the table above has it."""
        kind = KINDS[self.kind]
        return Coding(format_of_kind(self.kind), kind.group, minimums=kind.minimums, half=kind.half is not None)

    def evaluate(self, region: Region) -> Array:
        """Decode the blocks that the region touches."""
        return self.source.evaluate(region)

    def coded_rows(self, rows: Array) -> CodedRows:
        """Return codes, scales and minimums of rows.

        Raises:
            ValueError: the file means numbers that its own scales cannot make, as a NaN among them.
        """
        blocks = np.ascontiguousarray(self.source.blocks()[rows])
        format, group = self.coding.format, self.coding.group
        numbers = decode(blocks, self.kind).reshape(len(rows), -1, group)
        scales, minimums = scales_of(blocks, self.kind)
        # A group without a step is its minimum, everywhere.
        steps = np.where(scales == 0, 1, scales.astype(np.float64))[..., None]
        units = (numbers.astype(np.float64) - minimums[..., None]) / steps
        levels = format.levels
        assert levels is not None
        if not ((levels.values[0] - 0.5 <= units) & (units <= levels.values[-1] + 0.5)).all():
            raise ValueError(f"{self.source} has numbers beyond its codes")
        codes = levels.encode(units)
        products = format.operands["table"][codes] * scales[..., None] + minimums[..., None]
        if not np.array_equal(products, numbers):
            raise ValueError(f"{self.source} has numbers that are not codes times scales, and minimums")
        return CodedRows(codes.reshape(len(rows), -1), scales, minimums if self.coding.minimums else None)


def scales_of(blocks: Array, kind: str) -> tuple[Array, Array]:
    """Return scales and minimums of each group of rows of blocks, float32 [rows, groups]; minimums may be all 0.

    Where a scale is a product, it is what the package ``gguf`` decodes in the place of a code that means 1.

    Args:
        blocks: uint8 [rows, blocks of a row, bytes of a block].
        kind: a type in the table above.
    """
    rows, (numbers, size) = len(blocks), block_of(kind)
    flat, layout = blocks.reshape(-1, size), KINDS[kind]

    def half(offset: int) -> Array:
        start = offset % size
        return np.ascontiguousarray(flat[:, start : start + 2]).view(np.float16).astype(np.float32)

    def decode_with(parts: Mapping[int, bytes]) -> Array:
        probe_blocks = flat.copy()
        for start, octets in parts.items():
            probe_blocks[:, start : start + len(octets)] = np.frombuffer(octets, np.uint8)
        return decode(probe_blocks, kind).reshape(-1, numbers // layout.group, layout.group)[..., 0]

    minimums = np.zeros((len(flat), numbers // layout.group), np.float32)
    if kind in ("Q4_K", "Q5_K"):
        of_groups, of_minimums = import_gguf().quants.Q4_K.get_scale_min(np.ascontiguousarray(flat[:, 4:16]))
        scales = half(0) * of_groups.astype(np.float32)
        minimums = -(half(2) * of_minimums.astype(np.float32))
    elif kind == "Q2_K":
        scales = decode_with({**layout.unit_codes, 82: b"\0\0"})
        minimums = decode_with({16: bytes(64)})
        minimums[minimums == 0] *= -1  # as 0 times a step that is subtracted, like all others of the type
    elif layout.half is None:
        scales = decode_with(layout.unit_codes)
    else:
        scales = half(layout.half)
        minimums = half(2) if layout.minimums else minimums
    return scales.reshape(rows, -1), minimums.reshape(rows, -1)
