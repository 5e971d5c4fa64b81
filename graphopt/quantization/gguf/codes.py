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

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Array, Bundle, Shape
from graphopt.numerics.formats import FORMATS, Format
from graphopt.quantization.gguf.blocks import Ggml, block_of, decode, import_gguf

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
class KeptCodes(Bundle):
    """Codes, scales and perhaps minimums of rows of a tensor.

    Attributes:
        source: the tensor, of a type in the table above.
        order: the rows, int64.
        looked_up: rows stay rows and codes are int8, as a table that is looked up wants them. Otherwise rows become
            columns, as a product reads them, and codes have the type that ONNX has for the format: int4 or int8. Where
            it has none they are uint8, places in the format's table.
        standard: whether to use what ONNX has for the format. Without, codes are always uint8, and scales as short as
            in the file.
        as_zero_points: minimums become zero points, values of the format's table in float32.
    """

    source: Ggml
    order: Array
    looked_up: bool = False
    standard: bool = True
    as_zero_points: bool = False

    def __post_init__(self) -> None:
        if not has_codes(self.source) or (self.looked_up and self.has_minimums):
            raise ValueError(f"{self.source} has no codes that can be kept")

    @property
    def format(self) -> Format:
        """The format."""
        return FORMATS[_FORMATS[self.source.kind][0]]

    @property
    def group(self) -> int:
        """Numbers that share a scale."""
        return _FORMATS[self.source.kind][1]

    @property
    def has_minimums(self) -> bool:
        """Whether a group has a minimum of its own."""
        return self.format.zero_point

    @property
    def is_standard(self) -> bool:
        """Whether ``DequantizeLinear`` can say it."""
        has_form = self.standard and self.format.onnx_type is not None and not self.has_minimums
        return self.looked_up or has_form

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Scales and minimums of one level are float16, as in the file, but for a product in standard form."""
        rows, columns = len(self.order), self.source.dims[1]
        codes, scales = (rows, columns), (rows, columns // self.group)
        if not self.looked_up:
            codes, scales = codes[::-1], scales[::-1]
        kind = ir.DataType.INT8 if self.looked_up else self.format.onnx_type if self.is_standard else None
        half = self.source.kind in _ONE_LEVEL and (self.looked_up or not self.is_standard) and not self.as_zero_points
        numbers = ir.DataType.FLOAT16 if half else ir.DataType.FLOAT
        parts: dict[str, tuple[ir.DataType, Shape]] = {
            "codes": (kind or ir.DataType.UINT8, codes),
            "scales": (numbers, scales),
        }
        minimums_part = "zero_points" if self.as_zero_points else "minimums"
        return parts | {minimums_part: (numbers, scales)} if self.has_minimums else parts

    def evaluate(self) -> dict[str, Array]:
        """Return the parts.

        Raises:
            ValueError: the file means numbers that its own scales cannot make, as a NaN among them.
        """
        blocks = np.ascontiguousarray(self.source.blocks()[self.order])
        numbers = decode(blocks, self.source.kind).reshape(len(self.order), -1, self.group).astype(np.float64)
        scales, minimums = scales_of(blocks, self.source.kind)
        # A group without a step is its minimum, everywhere.
        steps = np.where(scales == 0, 1, scales.astype(np.float64))
        indices = np.rint((numbers - minimums[..., None]) / steps[..., None])
        levels = self.format.levels
        assert levels is not None
        if not ((levels.values[0] <= indices) & (indices <= levels.values[-1])).all():
            raise ValueError(f"{self.source} has numbers beyond its codes")
        products = indices.astype(np.float32) * scales[..., None] + minimums[..., None]
        if not np.array_equal(products, numbers.astype(np.float32)):
            raise ValueError(f"{self.source} has numbers that are not codes times scales, and minimums")
        if self.has_minimums and self.as_zero_points:
            parts = {"scales": steps, "zero_points": -minimums.astype(np.float64) / steps}
        else:
            parts = {"scales": scales, **({"minimums": minimums} if self.has_minimums else {})}
        parts["codes"] = indices.reshape(len(self.order), -1)
        return {name: self._in_stored_type(name, array) for name, array in parts.items()}

    def _in_stored_type(self, name: str, array: Array) -> Array:
        kind, _ = self.parts[name]
        matrix = array if self.looked_up else array.T
        if kind == ir.DataType.UINT8:  # two's complement, as places in the format's table
            return np.ascontiguousarray((matrix.astype(np.int16) & (2**self.format.bits - 1)).astype(np.uint8))
        return np.ascontiguousarray(matrix.astype(kind.numpy()))


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
