"""Checkpoints of bitsandbytes with 4 and 8 bits (Dettmers et al. 2023, arXiv:2305.14314; 2022, arXiv:2208.07339).

With 4 bits, as QLoRA has them:

weight                   uint8 [N K / 2, 1]   codes, the higher half of a byte first, rows one behind the other
weight.absmax            float32 [blocks], or uint8 where it is quantized again
weight.quant_map         float32 [16]         the value of each code
weight.nested_absmax     float32, a scale for each 256 of ``absmax``, and
weight.nested_quant_map  float32 [256], the value of each code of ``absmax``
weight.quant_state.bitsandbytes__nf4, __fp4: JSON as bytes: shape, blocksize, nested_blocksize, nested_offset

With 8 bits, as LLM.int8() has them; which inputs are outliers is decided when it runs, so no weight is one:

weight                   int8 [N, K]
SCB                      float32 [N]          the largest magnitude of a row: a weight is code times SCB / 127
weight_format            an integer, 0 for rows one behind the other
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.graph.weights import Inline, Reshape, Scale, StoredBytes
from graphopt.numerics.formats import FORMATS
from graphopt.quantization.checkpoints.importer import Importer, Layer
from graphopt.quantization.matrix_codes import CodedMatrix, UnpackedBits
from graphopt.quantization.nested_scales import NestedScales

if TYPE_CHECKING:
    from graphopt.graph.weights import Expression

_STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))


def matrix_of(layer: Layer) -> Expression:
    """Return the matrix of a layer, [N, K].

    Raises:
        InputError: a tensor is missing or does not fit.
    """
    if layer.optional(".SCB") is not None:
        return _matrix_of_bytes(layer)
    state = _state_of(layer)
    rows, columns = (int(size) for size in state["shape"])
    block, octets = int(state["blocksize"]), layer.part(".weight")
    if octets.dtype != ir.DataType.UINT8 or octets.shape != (rows * columns // 2, 1):
        raise layer.refusal(f"it does not hold {rows} x {columns} codes of 4 bits", ".weight")
    if columns % block:
        raise layer.refusal(f"blocks of {block} do not divide rows of {columns} columns", ".weight")
    groups = columns // block
    scales = layer.of_shape(".weight.absmax", (rows * groups,))
    if scales.dtype == ir.DataType.UINT8:
        block_scales, table = layer.part(".weight.nested_absmax"), layer.of_shape(".weight.nested_quant_map", (256,))
        offset = Inline.from_array(np.array([state["nested_offset"]], np.float32))
        scales = NestedScales(scales, table, block_scales, int(state["nested_blocksize"]), offset)
    values = tuple(float(value) for value in layer.of_shape(".weight.quant_map", (16,)).numpy())
    is_nf4 = np.array_equal(FORMATS["nf4"].operands["table"], np.array(values, np.float32))
    return CodedMatrix(
        "bitsandbytes",
        UnpackedBits(Reshape.to_dims(octets, (rows, columns // 2)), 4, 1, columns, high_first=True),
        "nf4" if is_nf4 else values,
        block,
        Reshape.to_dims(scales, (rows, groups)),
    )


def _matrix_of_bytes(layer: Layer) -> Expression:
    """Return a matrix of 8 bits, whose rows have a scale each."""
    codes = layer.part(".weight")
    if not isinstance(codes, StoredBytes) or codes.dtype != ir.DataType.INT8 or len(codes.shape) != 2:
        raise layer.refusal("it is no matrix of int8", ".weight")
    order = layer.optional(".weight_format")
    if order is not None and order.numpy().any():
        raise layer.refusal("rows of the matrix do not lie one behind the other", ".weight_format")
    rows, columns = codes.shape
    # in float64, so that the scale is rounded once
    scales = Scale(layer.of_shape(".SCB", (rows,)), Inline.from_array(np.full(rows, 1 / 127)), 0)
    octets = dataclasses.replace(codes, kind=ir.DataType.UINT8)
    return CodedMatrix("bitsandbytes", octets, "int8", columns, Reshape.to_dims(scales, (rows, 1)))


def _state_of(layer: Layer) -> dict[str, Any]:
    name = next((name for name in _STATES if layer.optional(name) is not None), _STATES[0])
    try:
        state: dict[str, Any] = json.loads(layer.part(name).numpy().tobytes())
        if len(state["shape"]) == 2 and int(state["blocksize"]) > 0:
            return state
    except (ValueError, KeyError, TypeError) as error:
        raise layer.refusal(f"it does not say shape and block size ({error!r})", name) from error
    raise layer.refusal("it is not the state of a matrix", name)


BITSANDBYTES = Importer(
    "bitsandbytes",
    (".weight.absmax", ".SCB"),
    (".weight_format", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map", *_STATES),
    matrix_of,
)
