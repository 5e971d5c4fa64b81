"""Checkpoints of BitNet b1.58, packed as transformers has them (Ma et al. 2024, arXiv:2402.17764).

    weight        uint8 [N / 4, K]  bits 2 i and 2 i + 1 of row r are row i N / 4 + r plus 1: 0, 1, 2 for -1, 0, 1
    weight_scale  [1]               what products are divided by, or, with "autobitlinear", multiplied by

Where such a model rounds the inputs of products to int8 per token, that is left out: it is no part of the weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Inline, Reshape, Transpose
from graphopt.quantization.checkpoints.importer import Importer, Layer
from graphopt.quantization.matrix_codes import CodedMatrix, RepeatedRows, UnpackedBits

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression


def matrix_of(layer: Layer) -> Expression:
    """Return the matrix of a layer, [N, K].

    Raises:
        InputError: a tensor is missing or does not fit, or a setting is unknown.
    """
    layer.choice("use_rms_norm", False, (False,))
    kind = layer.choice("linear_class", "bitlinear", ("bitlinear", "autobitlinear"))
    octets, number = layer.part(".weight"), layer.part(".weight_scale").numpy().astype(np.float32)
    if octets.dtype != ir.DataType.UINT8 or len(octets.shape) != 2:
        raise layer.refusal("it is no matrix of four codes in a byte", ".weight")
    if number.size != 1 or not number.all():
        raise layer.refusal("it should be one number", ".weight_scale")
    quarter, columns = octets.shape
    rows = 4 * quarter
    fours = Reshape.to_dims(UnpackedBits(octets, 2, 0, rows), (quarter, 4, columns))
    codes = Reshape.to_dims(Transpose(fours, (1, 0, 2)), (rows, columns))
    scale = 1 / number.reshape(1, 1) if kind == "bitlinear" else number.reshape(1, 1)
    return CodedMatrix("bitnet", codes, "ternary", columns, RepeatedRows(Inline.from_array(scale), rows, rows))


BITNET = Importer("bitnet", (".weight_scale",), (), matrix_of)
