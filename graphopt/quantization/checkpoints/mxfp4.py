"""Experts in MXFP4, as gpt-oss has them (Microscaling Formats 1.0, 2023).

    gate_up_proj_blocks  uint8 [experts, N, K / 32, 16]  codes of FP4 (E2M1), the lower half of a byte first
    gate_up_proj_scales  uint8 [experts, N, K / 32]      exponents: a scale is 2^(e - 127)

The model's parameter is [experts, K, N].
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.weights import Reshape, StoredBytes, Transpose
from graphopt.quantization.checkpoints.importer import Importer, Layer
from graphopt.quantization.matrix_codes import CodedMatrix, UnpackedBits

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression

_GROUP = 32


def experts_of(layer: Layer) -> Expression:
    """Return the matrices of all experts, [experts, K, N].

    Raises:
        InputError: a tensor is missing or does not fit.
    """
    blocks = layer.part("_blocks")
    if blocks.dtype != ir.DataType.UINT8 or len(blocks.shape) != 4 or blocks.shape[3] * 2 != _GROUP:
        raise layer.refusal("these are no blocks of 32 codes", "_blocks")
    experts, rows, groups, _ = blocks.shape
    exponents = layer.of_shape("_scales", (experts, rows, groups))
    if not isinstance(exponents, StoredBytes) or exponents.dtype.bitwidth != 8:
        raise layer.refusal("exponents should have 8 bits", "_scales")
    scales = dataclasses.replace(exponents, kind=ir.DataType.FLOAT8E8M0)
    columns = groups * _GROUP
    octets = Reshape.to_dims(blocks, (experts * rows, columns // 2))
    matrix = CodedMatrix(
        "mxfp4",
        UnpackedBits(octets, 4, 1, columns),
        "fp4",
        _GROUP,
        Reshape.to_dims(scales, (experts * rows, groups)),
    )
    return Transpose(Reshape.to_dims(matrix, (experts, rows, columns)), (0, 2, 1))


MXFP4 = Importer("mxfp4", ("_blocks",), ("_scales",), experts_of, target="")
