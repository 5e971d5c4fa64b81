"""AWQ checkpoints in the layout "gemm", as AutoAWQ and AutoRound write them (Lin et al. 2024, arXiv:2306.00978).

For a layer of K inputs, N outputs and G groups, with codes of 4 bits:

    qweight  int32 [K, N / 8]   in each integer the codes of columns 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first
    qzeros   int32 [G, N / 8]   zero points in the same way
    scales   [G, N]
"""

from __future__ import annotations

from graphopt.graph.weights import Expression, Reshape, Transpose
from graphopt.quantization.checkpoints.importer import Importer, Layer
from graphopt.quantization.matrix_codes import CodedMatrix, UnpackedBits


def matrix_of(layer: Layer) -> Expression:
    """Return the matrix of a layer, [N, K].

    Raises:
        InputError: a tensor is missing or does not fit, or a setting is unknown.
    """
    layer.choice("bits", 4, (4,))
    layer.choice("version", "gemm", ("gemm", "GEMM"))
    words = layer.part(".qweight")
    if len(words.shape) != 2:
        raise layer.refusal("it is no matrix", ".qweight")
    columns, rows = words.shape[0], words.shape[1] * 8
    size = layer.settings.get("group_size", 128)
    group = columns if size in (None, -1) else int(size)
    groups = -(-columns // group)
    scales = layer.of_shape(".scales", (groups, rows))
    points = layer.of_shape(".qzeros", (groups, rows // 8))
    return CodedMatrix(
        layer.settings["quant_method"], _codes(words), "uint4", group, Transpose(scales, (1, 0)), _codes(points)
    )


def _codes(words: Expression) -> Expression:
    """Return codes [N, lines] of integers [lines, N / 8]: half h, place p of an integer is column 2 p + h."""
    lines, count = words.shape
    halves = Reshape.to_dims(UnpackedBits(words, 4, 1, count * 8), (lines, count, 2, 4))
    in_order = Reshape.to_dims(Transpose(halves, (0, 1, 3, 2)), (lines, count * 8))
    return Transpose(in_order, (1, 0))


AWQ = Importer("awq", (".qweight",), (".qzeros", ".scales"), matrix_of)
