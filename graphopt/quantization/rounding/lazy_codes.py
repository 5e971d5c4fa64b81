"""The codes, scales and zero points of one weight, as tensors that are evaluated when they are written."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from graphopt.graph.weights import Cast, Expression, WeightTensor, expression_of
from graphopt.quantization.rounding.expressions import MatrixRounding, RoundingWithValues, parts_of
from graphopt.quantization.rounding.low_rank import LowRankRounding
from graphopt.quantization.rounding.methods.nearest import NEAREST

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from graphopt.numerics.formats.format import Format
    from graphopt.quantization.rounding.method import RoundingMethod
    from graphopt.quantization.rounding.scales import Scale


def quantize_lazily(
    weight: ir.TensorProtocol | None,
    format: Format,
    group: int,
    scale: Scale,
    *,
    is_transposed: bool = False,
    half: bool = False,
    standard: bool = True,
    method: RoundingMethod = NEAREST,
    statistics: Expression | None = None,
    low_rank: int = 0,
    inputs: Expression | None = None,
    with_values: bool = False,
) -> dict[str, ir.TensorProtocol]:
    """Return ``codes``, ``scales`` and, where the format has them, ``zero_points`` of a matrix; nothing is read.

    Scales have the matrix's own type, as ``DequantizeLinear`` wants it, also where they are rounded to float16: only
    the weight says whether they can be, and it is not read here. The step ``lower`` stores them in float16 then.

    Args:
        weight: a tensor [rows, columns]; groups run along the rows.
        format: the format.
        group: rows that share a scale; the last group may have fewer.
        scale: how scales are chosen, see :func:`graphopt.quantization.rounding.round_to_nearest`.
        is_transposed: groups run along the columns instead, as a table that is looked up by row wants it.
        half: round scales to float16 if all of them are normal numbers there.
        standard: codes and zero points have the type that ONNX has for the format. Otherwise they are uint8, places in
            its format, and zero points are values of it, in the type of scales.
        method: the rounding method.
        statistics: what the method needs to know of the weight's inputs.
        low_rank: directions of what rounding loses that are returned as ``left`` and ``right``, see
            :mod:`graphopt.quantization.rounding.low_rank`; 0 for none.
        inputs: X^T X of the product's inputs, which these directions are chosen by.
        with_values: return ``values``, too: the matrix that the codes mean; ``low_rank`` is 0 then.

    Raises:
        ValueError: the standard form is asked for, and ONNX has no type for the format.
    """
    kind: Callable[..., MatrixRounding] = RoundingWithValues if with_values else MatrixRounding
    if low_rank:
        kind = functools.partial(LowRankRounding, rank=low_rank, inputs=inputs)
    rounding = kind(
        expression_of(weight),
        format,
        group,
        scale,
        axis=int(is_transposed),
        half=half,
        standard=standard,
        method=method,
        statistics=statistics,
    )
    parts: dict[str, Expression] = {**parts_of(rounding)}
    if not standard and "zero_points" in parts:  # a code that means 0 is its own value
        parts["zero_points"] = Cast(parts["zero_points"], parts["scales"].dtype)
    return {name: WeightTensor(part) for name, part in parts.items()}
