"""Checkpoints of NVIDIA's ModelOpt: FP8 with one scale, and NVFP4 with two levels of scales.

weight          uint8 [N, K / 2]         codes of FP4 (E2M1), the lower half of a byte first
weight_scale    float8 E4M3 [N, K / 16]
weight_scale_2  float32 []               what each scale is multiplied by
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Cast, Inline, Scale
from graphopt.quantization.checkpoints import fp8
from graphopt.quantization.checkpoints.importer import Importer, Layer
from graphopt.quantization.matrix_codes import CodedMatrix, UnpackedBits

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression

_GROUP = 16


def matrix_of(layer: Layer) -> Expression:
    """Return the matrix of a layer, [N, K].

    Raises:
        InputError: a tensor is missing or does not fit.
    """
    if layer.optional(".weight_scale_2") is None:
        return fp8.matrix_of(layer)
    return two_level_matrix(layer, ".weight", ".weight_scale_2", divides=False)


def two_level_matrix(layer: Layer, weight: str, factor: str, *, divides: bool) -> Expression:
    """Return a matrix of FP4 codes whose scales have a scale.

    Args:
        layer: the layer.
        weight: the tensor of codes.
        factor: the tensor of the scale of scales, one number.
        divides: whether scales are divided by it, and not multiplied.

    Raises:
        InputError: a tensor is missing or does not fit.
    """
    octets, number = layer.part(weight), layer.part(factor).numpy().astype(np.float64)
    if octets.dtype != ir.DataType.UINT8 or len(octets.shape) != 2 or octets.shape[1] * 2 % _GROUP:
        raise layer.refusal("it is no matrix of two codes in a byte", weight)
    if number.size != 1 or not number.all():
        raise layer.refusal("it should be one number", factor)
    rows, columns = octets.shape[0], octets.shape[1] * 2
    scales = Cast(layer.of_shape(".weight_scale", (rows, columns // _GROUP)), ir.DataType.FLOAT)
    # In float64, so that the product is rounded once.
    factors = Inline.from_array(np.full(rows, 1 / number.item() if divides else number.item()))
    codes = UnpackedBits(octets, 4, 1, columns)
    return CodedMatrix(str(layer.settings["quant_method"]), codes, "fp4", _GROUP, Scale(scales, factors, 0))


MODELOPT = Importer("modelopt", (".weight_scale",), (".weight_scale_2", ".input_scale"), matrix_of)
