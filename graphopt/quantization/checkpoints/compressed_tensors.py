"""Checkpoints of compressed-tensors, as llm-compressor writes them.

For a layer of K inputs and N outputs, with codes of b bits:

    pack-quantized        weight_packed      int32 [N, K b / 32], a code is its integer plus 2^(b - 1)
                          weight_scale       [N, groups] or [N, 1]
                          weight_zero_point  int32 [N b / 32, groups], packed down each column, in the same way
                          weight_shape       int64 [2]: N, K
                          weight_g_idx       int32 [K], the group of each input; -1 where they are in order
    int-quantized         weight int8, weight_scale
    float-quantized,      weight float8, weight_scale
    naive-quantized
    nvfp4-pack-quantized  weight_packed uint8 [N, K / 2], weight_scale E4M3 [N, K / 16], weight_global_scale: divides
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.graph.weights import Inline
from graphopt.quantization.checkpoints import fp8
from graphopt.quantization.checkpoints.importer import Importer, Layer
from graphopt.quantization.checkpoints.nvfp4 import two_level_matrix
from graphopt.quantization.matrix_codes import CodedMatrix, RepeatedRows, UnpackedBits

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression

_BITS = (2, 4, 8)


def matrix_of(layer: Layer) -> Expression:
    """Return the matrix of a layer, [N, K].

    Raises:
        InputError: a tensor is missing or does not fit.
    """
    if layer.optional(".weight_global_scale") is not None:
        return two_level_matrix(layer, ".weight_packed", ".weight_global_scale", divides=True)
    if layer.optional(".weight_packed") is not None:
        return _packed_matrix(layer)
    if layer.optional(".weight_zero_point") is not None:
        raise layer.refusal("zero points of codes that are not packed are not known", ".weight_zero_point")
    block = _weights_of(layer).get("block_structure")
    return fp8.matrix_of(dataclasses.replace(layer, settings={**layer.settings, "weight_block_size": block}))


def _weights_of(layer: Layer) -> dict[str, Any]:
    """Return what the first group of layers says of its weights."""
    groups: dict[str, Any] = layer.settings.get("config_groups") or {}
    weights: list[dict[str, Any]] = [group["weights"] for group in groups.values() if group.get("weights")]
    return weights[0] if weights else {}


def _packed_matrix(layer: Layer) -> Expression:
    words = layer.part(".weight_packed")
    rows, columns = (int(size) for size in layer.of_shape(".weight_shape", (2,)).numpy())
    bits = words.shape[-1] * 32 // max(columns, 1)
    if bits not in _BITS or words.shape != (rows, -(-columns * bits // 32)):
        raise layer.refusal(f"a matrix of {rows} x {columns} takes no codes of {bits} bits in it", ".weight_packed")
    scales, group = layer.repeated_scales(".weight_scale", rows, columns)
    groups = columns // group
    if layer.optional(".weight_zero_point") is None:
        middle = 2 ** (bits - 1)
        points: Expression = RepeatedRows(Inline.from_array(np.zeros((1, groups), np.uint8)), rows, rows)
    else:
        middle = 0
        packed_points = layer.of_shape(".weight_zero_point", (-(-rows * bits // 32), groups))
        points = UnpackedBits(packed_points, bits, 0, rows)
    order = None if layer.optional(".weight_g_idx") is None else layer.of_shape(".weight_g_idx", (columns,))
    if order is not None and (order.numpy() < 0).all():
        order = None
    codes = UnpackedBits(words, bits, 1, columns)
    return CodedMatrix("compressed-tensors", codes, f"uint{bits}", group, scales, points, middle, order)


COMPRESSED_TENSORS = Importer(
    "compressed-tensors",
    (".weight_packed", ".weight_scale"),
    (
        ".weight_shape",
        ".weight_zero_point",
        ".weight_g_idx",
        ".weight_global_scale",
        ".input_scale",
        ".input_global_scale",
    ),
    matrix_of,
)
