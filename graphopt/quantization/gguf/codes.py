"""Codes and scales of a tensor of a GGUF file, in formats of ours: what the file holds, not rounded again.

    Q4_0  Q5_0  Q8_0      w = q d            int4, int5, int8 in groups of 32, d float16
    Q6_K                  w = q (d s)        int6 in groups of 16; s int8, so d s takes float32
    Q4_1  Q5_1            w = q d + m        uint4, uint5 in groups of 32; d and m float16
    Q4_K  Q5_K            w = q (d s) - d' t uint4, uint5 in groups of 32; s, t of 6 bits: d s and d' t take float32

Each means the same numbers as the file to the last bit. Where a kernel knows no minimums, they become zero points
z = -m / d in float32, and a weight (q - z) d moves by about 2^-23 of the larger of |q d| and |m|.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from graphopt.numerics.formats import FORMATS
from graphopt.quantization.gguf.blocks import Ggml, block_of, decode, import_gguf
from graphopt.quantization.matrix_codes import CodedRows, CodedTensor, Coding

if TYPE_CHECKING:
    from graphopt.graph.weights import Array, Region, Shape

_FORMATS = {
    "Q4_0": ("int4", 32),
    "Q5_0": ("int5", 32),
    "Q8_0": ("int8", 32),
    "Q6_K": ("int6", 16),
    "Q4_1": ("uint4", 32),
    "Q5_1": ("uint5", 32),
    "Q4_K": ("uint4", 32),
    "Q5_K": ("uint5", 32),
}
_SYMMETRIC = ("Q4_0", "Q5_0", "Q8_0")
_ONE_LEVEL = (*_SYMMETRIC, "Q4_1", "Q5_1")


def has_codes(tensor: object) -> bool:
    """Return whether a tensor is a matrix of codes that a format of ours can say."""
    return isinstance(tensor, Ggml) and tensor.kind in _FORMATS and len(tensor.dims) == 2


@dataclasses.dataclass(frozen=True, eq=False)
class GgmlCodes(CodedTensor):
    """The codes of a matrix of a GGUF file, of a type in the table above."""

    source: Ggml

    def __post_init__(self) -> None:
        if not has_codes(self.source):
            raise ValueError(f"{self.source} has no codes that can be kept")

    @property
    def kind(self) -> str:
        """The type."""
        return self.source.kind

    @property
    def shape(self) -> Shape:
        """The dimensions."""
        return self.source.dims

    @property
    def coding(self) -> Coding:
        """As the table above has it."""
        name, group = _FORMATS[self.kind]
        return Coding(FORMATS[name], group, minimums=name.startswith("uint"), half=self.kind in _ONE_LEVEL)

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
        numbers = decode(blocks, self.kind).reshape(len(rows), -1, group).astype(np.float64)
        scales, minimums = scales_of(blocks, self.kind)
        # A group without a step is its minimum, everywhere.
        steps = np.where(scales == 0, 1, scales.astype(np.float64))
        indices = np.rint((numbers - minimums[..., None]) / steps[..., None])
        levels = format.levels
        assert levels is not None
        if not ((levels.values[0] <= indices) & (indices <= levels.values[-1])).all():
            raise ValueError(f"{self.source} has numbers beyond its codes")
        products = indices.astype(np.float32) * scales[..., None] + minimums[..., None]
        if not np.array_equal(products, numbers.astype(np.float32)):
            raise ValueError(f"{self.source} has numbers that are not codes times scales, and minimums")
        # two's complement, as places in the format's table
        codes = (indices.astype(np.int16) & (2**format.bits - 1)).astype(np.uint8).reshape(len(rows), -1)
        return CodedRows(codes, scales, minimums if self.coding.minimums else None)


def scales_of(blocks: Array, kind: str) -> tuple[Array, Array]:
    """Return scales and minimums of each group of rows of blocks, float32 [rows, groups]; minimums may be all 0.

    Args:
        blocks: uint8 [rows, blocks of a row, bytes of a block].
        kind: a type in the table above.
    """
    rows, size = len(blocks), block_of(kind)[1]
    flat = blocks.reshape(-1, size)

    def half(offset: int) -> Array:
        return np.ascontiguousarray(flat[:, offset : offset + 2]).view(np.float16).astype(np.float32)

    if kind == "Q6_K":
        scales = half(size - 2) * np.ascontiguousarray(flat[:, 192:208]).view(np.int8).astype(np.float32)
        minimums = np.zeros_like(scales)
    elif kind in ("Q4_K", "Q5_K"):
        of_groups, of_minimums = import_gguf().quants.Q4_K.get_scale_min(np.ascontiguousarray(flat[:, 4:16]))
        scales = half(0) * of_groups.astype(np.float32)
        minimums = -(half(2) * of_minimums.astype(np.float32))
    else:
        scales = half(0)
        minimums = np.zeros_like(scales) if kind in _SYMMETRIC else half(2)
    return scales.reshape(rows, -1), minimums.reshape(rows, -1)
