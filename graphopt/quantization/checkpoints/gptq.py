"""GPTQ checkpoints, as AutoGPTQ, GPTQModel and AutoRound write them (Frantar et al. 2023, arXiv:2210.17323).

For a layer of K inputs, N outputs and G groups, with codes of b bits:

    qweight  int32 [K b / 32, N]   codes, one behind the other down each column, lowest bits first
    qzeros   int32 [G, N b / 32]   zero points in the same way along rows; format "gptq" stores them less one, in b bits
    scales   [G, N]
    g_idx    int32 [K]             the group of each input; shuffled where columns were quantized by their activation
"""

from __future__ import annotations

from graphopt.graph.weights import Expression, Transpose
from graphopt.quantization.checkpoints.importer import Importer, Layer
from graphopt.quantization.matrix_codes import CodedMatrix, UnpackedBits

BITS = (2, 3, 4, 8)
_SHIFTS = {"gptq": 1, "gptq_v2": 0}


def matrix_of(layer: Layer) -> Expression:
    """Return the matrix of a layer, [N, K].

    Raises:
        InputError: a tensor is missing or does not fit, or a setting is unknown.
    """
    bits = layer.choice("bits", 4, BITS)
    shift = _SHIFTS[layer.choice("checkpoint_format", "gptq", tuple(_SHIFTS))]
    words = layer.part(".qweight")
    if len(words.shape) != 2 or words.shape[0] * 32 % bits:
        raise layer.refusal(f"it holds no codes of {bits} bits", ".qweight")
    columns, rows = words.shape[0] * 32 // bits, words.shape[1]
    size = layer.settings.get("group_size", 128)
    group = columns if size in (None, -1) else int(size)
    groups = -(-columns // group)
    scales = layer.of_shape(".scales", (groups, rows))
    points = layer.of_shape(".qzeros", (groups, -(-rows * bits // 32)))
    return CodedMatrix(
        layer.settings["quant_method"],
        Transpose(UnpackedBits(words, bits, 0, columns), (1, 0)),
        f"uint{bits}",
        group,
        Transpose(scales, (1, 0)),
        Transpose(UnpackedBits(points, bits, 1, rows), (1, 0)),
        shift,
        None if layer.optional(".g_idx") is None else layer.of_shape(".g_idx", (columns,)),
    )


GPTQ = Importer("gptq", (".qweight",), (".qzeros", ".scales", ".g_idx"), matrix_of)
