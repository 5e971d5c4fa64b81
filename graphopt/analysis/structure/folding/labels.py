"""What of a node is structure, and what is only how its numbers are stored.

A product by a constant matrix is the same structure in any format::

    MatMul(x, W) = MatMul(x, DequantizeLinear(codes, scales)) = MatMulNBits(x, codes, scales) = product [K, N] of x

Nodes that only round their data are seen through. So layers of mixed precision have one structure; their formats are
their parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.runtime_ops import DOMAIN, Coordinates, Role, signature_of
from graphopt.runtime_ops.schema import Signature, attributes_of

if TYPE_CHECKING:
    from collections.abc import Hashable

_STORAGE_ROLES = frozenset(
    {Role.CODES, Role.SCALES, Role.ZERO_POINTS, Role.TABLE, Role.GROUPS, Role.MATRIX, Role.STATE}
)
"""Inputs whose form follows from a format."""

_SHAPING = frozenset({"kv_heads", "window", "chunks", "slopes"})
"""Attributes of our operators that say what is computed, not in which precision or by which policy."""

_SMALL = 64
"""Elements of the largest constant of integers that is compared by its numbers: shapes, axes, sizes of parts."""

_SIZES = (("rows", "columns"), ("K", "N"))


def rounds(node: ir.Node) -> bool:
    """Return whether a node only rounds its data."""
    signature = signature_of(node)
    return signature is not None and signature.coordinates is Coordinates.ROUNDS


def matrix_of(node: ir.Node, constant: set[ir.Node]) -> tuple[int, int] | None:
    """Return rows and columns of the constant matrix that a product reads; ``None`` for any other node."""
    signature = signature_of(node)
    if signature is not None and signature.is_product:
        candidates = (tuple(node.attributes.get_int(name, 0) for name in names) for names in _SIZES)
        return next(((rows, columns) for rows, columns in candidates if rows and columns), None)
    right = node.inputs[1] if node.op_type in ("MatMul", "Gemm") and not node.domain and len(node.inputs) > 1 else None
    if right is None or not (right.is_initializer() or right.producer() in constant):
        return None
    sizes = [size for size in dims(right) if size is not None]
    if len(sizes) != 2 or len(dims(right)) != 2:
        return None
    rows, columns = reversed(sizes) if node.attributes.get_int("transB", 0) else sizes
    return rows, columns


def kind_of(node: ir.Node, constant: set[ir.Node]) -> Hashable:
    """Return what a node does, without its inputs."""
    matrix = matrix_of(node, constant)
    if matrix is not None:
        return "product", matrix
    attributes = ((name, _plain(attribute)) for name, attribute in sorted(node.attributes.items()))
    if node.domain == DOMAIN:
        attributes = ((name, plain) for name, plain in attributes if name in _SHAPING)
    return node.domain, node.op_type, "" if node.domain == DOMAIN else node.overload, tuple(attributes)


def stored_inputs(node: ir.Node) -> set[int]:
    """Return the places of the inputs of a node whose form follows from a format."""
    signature = signature_of(node)
    if signature is None:
        return set()
    return {number for number in range(len(node.inputs)) if _is_stored(signature, node, number)}


def _is_stored(signature: Signature, node: ir.Node, number: int) -> bool:
    port = signature.input(number)
    return port is not None and (port.role in _STORAGE_ROLES or port.is_absent(node.inputs[number]))


def constant_of(value: ir.Value) -> Hashable:
    """Return what of a constant is structure: its shape, and the numbers of small integers."""
    tensor = value.const_value
    if tensor is None:
        return "weight", dims(value)
    return numbers_of(tensor)


def numbers_of(tensor: ir.TensorProtocol) -> Hashable:
    """Return what of a tensor is structure; see :func:`constant_of`. Nothing but small integers is read."""
    shape = tuple(tensor.shape.numpy())
    if isinstance(tensor, ir.ExternalTensor) and not Path(tensor.path).is_file():
        return "weight", shape
    if not tensor.dtype.is_floating_point() and tensor.size <= _SMALL:
        return "numbers", shape, tuple(tensor.numpy().reshape(-1).tolist())
    return "weight", shape


def dims(value: ir.Value) -> tuple[int | None, ...]:
    """Return the dimensions of a value that are numbers; names are labels, and left out."""
    return tuple(size if isinstance(size, int) else None for size in value.shape or ())


def parameters_of(node: ir.Node) -> Hashable:
    """Return how the numbers that a node reads are stored, and what it rounds them to; ``None`` if it reads none."""
    dtypes = tuple(
        (str(value.dtype), None if value.const_value is None else value.const_value.dtype.bitwidth)
        for value in node.inputs
        if value is not None and value.is_initializer() and (value.dtype is None or value.dtype.is_floating_point())
    )
    signature = signature_of(node)
    if signature is None:
        return dtypes or None
    codes = tuple(str(value.dtype) for value in node.inputs if value is not None and value.is_initializer())
    return (
        node.op_type,
        codes,
        tuple(sorted((name, _hashable(attribute)) for name, attribute in attributes_of(node).items())),
    )


def stored_value(attribute: ir.Attr) -> Any:
    """Return the value of an attribute as a file holds it: ONNX stores floats in 32 bits."""
    if attribute.type == ir.AttributeType.FLOAT:
        return float(np.float32(attribute.value))
    if attribute.type == ir.AttributeType.FLOATS:
        return tuple(float(np.float32(number)) for number in attribute.value)
    return attribute.value


def _plain(attribute: ir.Attr) -> Hashable:
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        graphs = [attribute.value] if attribute.type == ir.AttributeType.GRAPH else attribute.value
        return tuple(tuple((node.domain, node.op_type) for node in graph) for graph in graphs)
    if attribute.type == ir.AttributeType.TENSOR:
        return numbers_of(attribute.value)
    return _hashable(stored_value(attribute))


def _hashable(value: Any) -> Hashable:
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return value if isinstance(value, (str, int, float, bool, bytes, type(None))) else str(value)
