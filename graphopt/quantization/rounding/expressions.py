"""Rounding as an expression: codes, scales and zero points of one weight, computed together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.weights import Array, Bundle, Expression, Part, Region, SameShape, Shape
from graphopt.quantization.rounding.float16_scales import fits_half
from graphopt.quantization.rounding.methods.nearest import NEAREST

if TYPE_CHECKING:
    from graphopt.numerics.formats.format import Format
    from graphopt.quantization.rounding.method import RoundingMethod
    from graphopt.quantization.rounding.nearest import QuantizedMatrix
    from graphopt.quantization.rounding.scales import Scale


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixRounding(Bundle):
    """What a rounding method makes of a matrix: ``codes``, ``scales``, ``zero_points``.

    Attributes:
        source: the matrix [rows, columns].
        format: the format.
        group: numbers that share a scale; the last group may have fewer.
        scale: how scales are chosen.
        axis: groups run along it: 0 as a product sums, 1 as a table that is looked up by row wants it.
        half: round scales to float16 if all of them are normal numbers there. They keep the matrix's own type.
        standard: codes and zero points have the type that ONNX has for the format. Otherwise they are uint8.
        method: the rounding method.
        statistics: what the method needs to know of the weight's inputs; ``None`` where it needs nothing.
    """

    source: Expression
    format: Format
    group: int
    scale: Scale
    axis: int = 0
    half: bool = False
    standard: bool = True
    method: RoundingMethod = NEAREST
    statistics: Expression | None = None

    def __post_init__(self) -> None:
        if (self.method.needs is None) != (self.statistics is None):
            raise ValueError(f"the rounding method {self.method.method} needs {self.method.needs or 'no statistics'}")
        if self.standard and self.format.onnx_type is None:
            raise ValueError(f"ONNX has no type for {self.format.name}")

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Codes have the matrix's shape; of scales and zero points there is one for each group."""
        groups = list(self.source.shape)
        groups[self.axis] = -(-groups[self.axis] // self.group)
        codes = self.format.onnx_type if self.standard and self.format.onnx_type is not None else ir.DataType.UINT8
        parts = {"codes": (codes, self.source.shape), "scales": (self.source.dtype, tuple(groups))}
        return parts | {"zero_points": (codes, tuple(groups))} if self.format.zero_point else parts

    def evaluate(self) -> dict[str, Array]:
        """Round the matrix once."""
        return self.tensors(self.round()[1])

    def round(self) -> tuple[npt.NDArray[np.float32], QuantizedMatrix]:
        """Return the matrix with groups along its rows, and what the method made of it."""
        matrix = np.asarray(self.source.numpy(), dtype=np.float32)
        matrix = matrix.T if self.axis else matrix
        half = self.half and fits_half(matrix, self.format, self.group)
        scale_type = np.float16 if half else self.source.dtype.numpy()
        statistics = None if self.statistics is None else self.statistics.numpy()
        return matrix, self.method.round(
            matrix, self.format, self.group, self.scale, scale_type=scale_type, statistics=statistics
        )

    def tensors(self, matrix_codes: QuantizedMatrix) -> dict[str, Array]:
        """Return codes, scales and zero points in the types and shapes of :attr:`parts`."""
        arrays: dict[str, npt.NDArray[Any]] = {"codes": matrix_codes.codes, "scales": matrix_codes.scales}
        if matrix_codes.zero_points is not None:
            arrays["zero_points"] = matrix_codes.zero_points
        return {name: self._as_part(name, array) for name, array in arrays.items()}

    def _as_part(self, name: str, array: Array) -> Array:
        if name == "scales":
            array = array.astype(self.source.dtype.numpy(), copy=False)
        elif self.standard:
            array = self.format.to_onnx(array)
        return np.ascontiguousarray(array.T if self.axis else array)


@dataclasses.dataclass(frozen=True, eq=False)
class RoundingWithValues(MatrixRounding):
    """What :class:`MatrixRounding` makes, and ``values``, what the codes mean, in the matrix's own type."""

    @property
    def parts(self) -> dict[str, tuple[ir.DataType, Shape]]:
        """Beside those of :class:`MatrixRounding` the matrix that products will use."""
        return super().parts | {"values": (self.source.dtype, self.source.shape)}

    def evaluate(self) -> dict[str, Array]:
        """Round the matrix, and look its codes up."""
        matrix_codes = self.round()[1]
        values = matrix_codes.dequantize().astype(self.source.dtype.numpy())
        return self.tensors(matrix_codes) | {"values": np.ascontiguousarray(values.T if self.axis else values)}


def parts_of(rounding: Bundle) -> dict[str, Part]:
    """Return each tensor of a rounding as an expression, by name."""
    return {name: Part(rounding, name) for name in rounding.parts}


@dataclasses.dataclass(frozen=True, eq=False)
class CodeIndices(SameShape):
    """Codes of an integer type as places in the format's table, uint8: two's complement becomes 0 .. 2^bits - 1."""

    bits: int

    @property
    def dtype(self) -> ir.DataType:
        """uint8."""
        return ir.DataType.UINT8

    def evaluate(self, region: Region) -> Array:
        """Convert what lies in the region."""
        codes = self.source.evaluate(region)
        if codes.dtype == np.uint8:
            return codes
        return np.asarray((codes.astype(np.int16) & (2**self.bits - 1)).astype(np.uint8))
