"""What a graph costs: how many parameters it stores, and in how many bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from pydantic import BaseModel

from graphopt.analysis.structure.constant_parts import reads_constants_only
from graphopt.analysis.structure.decoded_weights import holds_cast_codes, scales_cast_codes
from graphopt.analysis.structure.products import expert_count, reads_packed
from graphopt.graph.weights import source_of
from graphopt.numerics.formats import FORMATS
from graphopt.runtime_ops import DECODING, Role, port, port_at, ports_of, signature_of
from graphopt.runtime_ops.schema import attributes_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Set

_CODES = frozenset({Role.CODES})


class WeightTotals(BaseModel):
    """Size of the weights of a graph.

    Attributes:
        parameters: numbers that the graph stores: floats, or codes that stand for one number each.
        bytes: bytes of these numbers, their scales and their zero points.
        bits_per_weight: 8 * bytes / parameters; 0 for a graph without weights.
    """

    parameters: int
    bytes: int
    bits_per_weight: float


def weight_totals(model: ir.Model) -> WeightTotals:
    """Count the weights of ``model`` and their bytes, as they are stored.

    A weight is an initializer of floating point with at least one axis, or the codes that a dequantizing operator
    reads. Scales and zero points add bytes but no parameters. Scalars and integer constants (shapes, axes) are not
    weights. An initializer that several nodes read counts once, and so do two that are the same bytes, such as the
    codes of a tied embedding: they are stored once.
    """
    parameters = size = 0
    for graph in model.graphs():
        for value, tensor in _distinct_tensors(graph):
            if is_weight(value, tensor):
                parameters += parameters_in(value, tensor)
            elif reader_of(value, DECODING) is None and not scales_cast_codes(value):
                continue
            size += tensor.nbytes
    bits = 8 * size / parameters if parameters else 0.0
    return WeightTotals(parameters=parameters, bytes=size, bits_per_weight=bits)


def _distinct_tensors(graph: ir.Graph) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield initializers that have a tensor; of those that are the same bytes, the first."""
    sources: set[Hashable] = set()
    for value in graph.initializers.values():
        tensor = value.const_value
        if tensor is not None and (source := source_of(tensor)) not in sources:
            sources.add(source)
            yield value, tensor


INTEGER_PRODUCTS = frozenset(
    (
        "ConvInteger",
        "DynamicQuantizeLSTM",
        "DynamicQuantizeMatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "QAttention",
        "QGemm",
        "QLinearConv",
        "QLinearMatMul",
    )
)
"""Operators of ONNX and of onnxruntime whose weights are integers, as files have them that were quantized before."""


def is_weight(value: ir.Value, tensor: ir.TensorProtocol) -> bool:
    """Return whether an initializer holds numbers of the model, as floats or as codes; scales and shapes are none."""
    if reader_of(value, _CODES) is not None or holds_cast_codes(value):
        return True
    if tensor.size == 0 or scales_cast_codes(value):
        return False  # the placeholder of an absent input, or scales
    if any((port := port_at(*use)) is not None and port.placeholder == tensor.size for use in value.uses()):
        return False
    if tensor.dtype in (ir.DataType.INT8, ir.DataType.UINT8):
        return tensor.shape.rank() > 1 and any(use.node.op_type in INTEGER_PRODUCTS for use in value.uses())
    return tensor.dtype.is_floating_point() and tensor.shape.rank() > 0 and reader_of(value, DECODING) is None


def reader_of(value: ir.Value, roles: Set[Role]) -> ir.Node | None:
    """Return the node that reads ``value`` in one of the roles: its numbers in another type, scaled, or rows of it.

    Or what nodes make of it and of other constants.
    """
    for use in value.uses():
        port = port_at(*use)
        if port is not None and port.role in roles:
            return use.node
        is_scaled = (use.node.op_type in ("Gather", "Cast") and use.idx == 0) or use.node.op_type == "Mul"
        if is_scaled or reads_constants_only(use.node):
            reader = reader_of(use.node.outputs[0], roles)
            if reader is not None:
                return reader
    return None


def parameters_in(value: ir.Value, tensor: ir.TensorProtocol) -> int:
    """Return how many numbers of the model a weight stands for."""
    codes = reader_of(value, _CODES)
    return tensor.size if codes is None else _numbers(codes, tensor)


def _numbers(node: ir.Node, tensor: ir.TensorProtocol) -> int:
    """Return how many numbers the codes in ``tensor``, which ``node`` reads, stand for."""
    if "rows" in node.attributes:  # whose codes are padded
        matrix = node.attributes.get_int("rows", 0) * node.attributes.get_int("columns", 0)
        return matrix * (expert_count(node) or 1)
    bits = _packed_bits(node, tensor)
    return tensor.size if bits is None else tensor.size * 8 // bits


def _packed_bits(node: ir.Node, tensor: ir.TensorProtocol) -> int | None:
    """Return the bits of each code where ``node`` reads them packed into bytes, else ``None``."""
    signature = signature_of(node)
    codes = None if signature is None else next((port for port in signature.inputs if port.role is Role.CODES), None)
    if codes is None or codes.bits is None or tensor.dtype != ir.DataType.UINT8:
        return None
    return codes.bits(tuple(tensor.shape.numpy()), attributes_of(node))


def storage_formats(model: ir.Model) -> dict[str, int]:
    """Return how many weight tensors are stored in each format, such as ``{"fp6-e2m3": 42, "float32": 13}``."""
    counts: dict[str, int] = {}
    for value, tensor in (item for graph in model.graphs() for item in _distinct_tensors(graph)):
        if not is_weight(value, tensor):
            continue
        codes = reader_of(value, _CODES)
        name = packed_format(codes) if codes is not None and reads_packed(codes) else type_name(tensor.dtype)
        counts[name] = counts.get(name, 0) + 1
    return counts


def format_of(value: ir.Value, tensor: ir.TensorProtocol) -> str:
    """Return the format that a weight is stored in, such as ``int4`` or ``fp6-e2m3``, whatever reads its codes."""
    codes = reader_of(value, _CODES)
    signature = None if codes is None else signature_of(codes)
    if codes is None or signature is None:
        return type_name(tensor.dtype)
    if signature.of_role(Role.TABLE):
        return packed_format(codes)
    bits = _packed_bits(codes, tensor)
    return type_name(tensor.dtype) if bits is None else f"uint{bits}"


def type_name(dtype: ir.DataType) -> str:
    """Return what a type is called in reports."""
    return _NAMES.get(dtype, dtype.name.lower())


def packed_format(node: ir.Node) -> str:
    """Return the format of the packed codes that a node reads, by its table; of an unnamed table, its size."""
    codes, table = port(node, "codes"), next(iter(ports_of(node, Role.TABLE)), None)
    if codes is None or codes.const_value is None or table is None or table.const_value is None:
        return "codes"
    if isinstance(table.const_value, ir.ExternalTensor) and not Path(table.const_value.path).is_file():
        return f"a table of {table.const_value.size} values"
    bits, values = _packed_bits(node, codes.const_value), table.const_value.numpy()
    if "index_bits" in node.attributes:
        return f"a book of {len(values)} by {values.shape[1]} values"
    for candidate in FORMATS.values():
        if bits in (None, candidate.bits) and np.array_equal(next(iter(candidate.operands.values())), values):
            return candidate.name
    return f"a table of {values.size} values"


_NAMES = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}
