"""Checkpoints in FP8: one scale for a matrix, for each of its rows, or for each block of it, as DeepSeek-V3 has them.

weight                          float8 E4M3 or E5M2 [N, K]
weight_scale_inv, weight_scale  what numbers are multiplied by: [], [1], [N, 1], or one for each block
input_scale                     a scale of activations, which is not used: inputs stay as they are
"""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from graphopt.graph.weights import Expression, StoredBytes
from graphopt.quantization.checkpoints.importer import Importer, Layer
from graphopt.quantization.matrix_codes import CodedMatrix

FORMATS = {
    ir.DataType.FLOAT8E4M3FN: "fp8-e4m3",
    ir.DataType.FLOAT8E5M2: "fp8-e5m2",
    ir.DataType.INT8: "int8",
}
"""Types of stored weights, and the formats that have the same codes."""


def matrix_of(layer: Layer) -> Expression:
    """Return the matrix of a layer, [N, K].

    Raises:
        InputError: a tensor is missing or does not fit.
    """
    weight = layer.part(".weight")
    if not isinstance(weight, StoredBytes) or len(weight.shape) != 2 or weight.dtype not in FORMATS:
        raise layer.refusal(f"{weight.dtype.name} is no matrix of 8 bits", ".weight")
    name = next(name for name in (".weight_scale_inv", ".weight_scale") if layer.optional(name) is not None)
    scales, group = layer.repeated_scales(name, *weight.shape)
    codes = dataclasses.replace(weight, kind=ir.DataType.UINT8)
    return CodedMatrix(layer.settings["quant_method"], codes, FORMATS[weight.dtype], group, scales)


FP8 = Importer("fp8", (".weight_scale_inv", ".weight_scale"), (".input_scale", ".activation_scale"), matrix_of)
FBGEMM = Importer("fbgemm_fp8", (".weight_scale",), (".input_scale_ub",), matrix_of)
