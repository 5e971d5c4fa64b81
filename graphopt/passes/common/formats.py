"""What recipes say about the formats of weights, and which of them onnxruntime has kernels of its own for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import onnx_ir as ir
from pydantic import AfterValidator, Field

from graphopt.errors import InputError
from graphopt.numerics.formats import Format, format_of
from graphopt.passes.base import Options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from graphopt.util.targets import InstructionSet, Target

# onnxruntime fuses DequantizeLinear -> MatMul for blocks of these sizes, and for codes of these types, which are ONNX's
# from these opsets on.
_GROUPS = (16, 32, 64, 128, 256)
_FUSED_TYPES = {
    ir.DataType.INT2: 25,
    ir.DataType.UINT2: 25,
    ir.DataType.INT4: 21,
    ir.DataType.UINT4: 21,
    ir.DataType.INT8: 21,
    ir.DataType.UINT8: 21,
}


def _check_format(name: str | tuple[float, ...]) -> str | tuple[float, ...]:
    try:
        format_of(name)
    except InputError as error:
        raise ValueError(str(error)) from error
    return name


Activations = Literal["float32", "bfloat16", "int8", "int16"]


ProductRole = Literal[
    "q_proj",
    "k_proj",
    "v_proj",
    "qk_proj",
    "qv_proj",
    "kv_proj",
    "qkv_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
]
"""What a product of a layer is for, as :mod:`graphopt.analysis.structure.roles` tells."""


class GroupedFormat(Options):
    """A number format, and how many rows of a matrix share a scale (``None``: all of a column).

    The format is one of :data:`graphopt.numerics.formats.FORMATS`, or a table of one's own: the value of each code.
    """

    format: Annotated[str | tuple[float, ...], AfterValidator(_check_format)] = "int4"
    group: Literal[16, 32, 64, 128, 256] | None = 64


class LinearFormat(GroupedFormat):
    """A number format for matrices, and what takes its place on GPUs and on some CPUs.

    Attributes:
        on_gpus: the format for ``ort-cuda``, where another is faster; ``None``: the same one.
        on_avx2: the format for ``ort-cpu`` where it multiplies with AVX2 and no VNNI; ``None``: the same one. There two
            products of bytes are added in 16 bits, which fit where codes have 7 bits.
    """

    on_gpus: GroupedFormat | None = None
    on_avx2: GroupedFormat | None = None

    def for_target(self, target: Target, instructions: InstructionSet | None = None) -> GroupedFormat:
        """Return the format for a target, and for the instruction set of its CPU."""
        if self.on_gpus is not None and target == "ort-cuda":
            return self.on_gpus
        is_avx2 = target == "ort-cpu" and instructions == "avx2"
        return self.on_avx2 if self.on_avx2 is not None and is_avx2 else self


class EmbeddingFormat(Options):
    """A number format for tables that are looked up, and how many weights of a row share a scale (``None``: all).

    ONNX's ``Gather`` takes no codes of 4 bits.
    """

    format: Literal["int8", "uint8"] = "int8"
    group: int | None = Field(default=None, ge=1)


def fused_group(format: Format, choice: GroupedFormat, rows: int, opset: int) -> int | None:
    """Return the largest group up to the wanted one that onnxruntime can fuse, or ``None`` where there is none."""
    first_opset = None if format.onnx_type is None else _FUSED_TYPES.get(format.onnx_type)
    if first_opset is None or opset < first_opset or choice.group is None:
        return None
    return next((size for size in reversed(_GROUPS) if size <= choice.group and rows % size == 0), None)


def check_names(matrices: Iterable[str], weights: Iterable[ir.Value | None]) -> None:
    """Refuse formats of matrices that are no weight of a product.

    Raises:
        InputError: names the first.
    """
    weight_names = {weight.name for weight in weights if weight is not None}
    unknown = [name for name in matrices if name not in weight_names]
    if unknown:
        raise InputError(
            f"the recipe gives {len(unknown)} formats to weights that no product has, the first to {unknown[0]}",
            remedy="graphopt inspect shows the names; a recipe of graphopt search is for one model",
        )
