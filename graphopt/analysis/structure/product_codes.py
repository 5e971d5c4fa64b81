"""The stored codes of a product, and what its input is rounded to: the one form that both have before ``lower``.

    y = MatMul(x, DequantizeLinear(codes, scales, zero points))                     where ONNX and onnxruntime have it
    y = MatMul(x, ai.graphopt::Dequantize(codes, scales, table, zero points))       anywhere else
    y = MatMul(x, ai.graphopt::DequantizeTrellis(codes, scales, tables))            codes of a trellis
    y = MatMul(x, ai.graphopt::DequantizeCodebook(codes, scales, levels, ...))      codes of vectors, packed already
    y = MatMul(ai.graphopt::RoundActivations(x), ...)                               where x is rounded to few bits

    e = Gather(Transpose(W), ids)                 where W, one of these matrices, is a tied token embedding too

Codes lie as [K, N], scales and zero points as [groups, N]; those of vectors as their product reads them, since an entry
lies in several rows or columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.weights import weight_of
from graphopt.numerics.formats import Format, format_stored_as
from graphopt.runtime_ops import Role, signature_of
from graphopt.runtime_ops.dequantize.spec.op import DEQUANTIZE
from graphopt.runtime_ops.dequantize_codebook.spec.op import DEQUANTIZE_CODEBOOK
from graphopt.runtime_ops.dequantize_trellis.spec.op import DEQUANTIZE_TRELLIS
from graphopt.runtime_ops.operator import DOMAIN
from graphopt.runtime_ops.round_activations.spec.op import ROUND_ACTIVATIONS

NOT_QUANTIZED = Rule("codes.not-quantized", "its weights are not quantized")
NOT_CONSTANT = Rule("codes.not-constant", "its codes, scales or zero points are no constants")
NO_TABLE = Rule("codes.no-table", "codes of {type} have no table")
NOT_IN_ROWS = Rule("codes.not-in-rows", "its scales are not in groups of rows")
SCALES_NOT_FLOAT = Rule("codes.scales-not-float", "its scales are {type}, not float32")
ODD_GROUP = Rule("codes.odd-group", "its groups have {group} rows, which is no multiple of 16")

LOGICAL = (DEQUANTIZE.name, DEQUANTIZE_TRELLIS.name, DEQUANTIZE_CODEBOOK.name, ROUND_ACTIVATIONS.name)
"""Our operators that stand for codes before they are packed; none is left after the step ``lower``."""


@dataclass(frozen=True)
class StoredCodes:
    """The stored codes of one product.

    Attributes:
        reader: the node that turns them into a matrix.
        codes: an integer type [K, N]: places in the table, two's complement where ONNX has a signed type for them.
        scales: [groups, N].
        zero_points: [groups, N], or ``None`` where there are none: codes like ``codes`` where ``table`` is a format,
            else numbers in units of the table, or minimums.
        table: what the codes mean: a format that ONNX has a type for, or an initializer float [entries], of a trellis
            [2, entries].
        group: rows that share a scale.
    """

    reader: ir.Node
    codes: ir.Value
    scales: ir.Value
    zero_points: ir.Value | None
    table: Format | ir.Value
    group: int

    @property
    def is_standard(self) -> bool:
        """Whether ONNX has the form, so that any onnxruntime has a kernel for it."""
        return not self.reader.domain

    @property
    def is_trellis(self) -> bool:
        """Whether what a code means depends on its neighbours."""
        return is_trellis(self.reader)

    @property
    def minimums(self) -> bool:
        """Whether zero points are minimums, added behind the scales."""
        return self.reader.attributes.get_int("minimums", 0) == 1

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        assert self.codes.const_value is not None
        rows, columns = self.codes.const_value.shape.numpy()
        return rows, columns

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The value of each code; of a trellis its two tables."""
        if isinstance(self.table, Format):
            return self.table.operands["table"]
        assert self.table.const_value is not None
        return np.asarray(self.table.const_value.numpy())

    @property
    def bits(self) -> int:
        """Bits that a code takes."""
        if self.is_trellis:
            return self.reader.attributes.get_int("bits", 0)
        return max(1, (len(self.values) - 1).bit_length())


def dequantize_of(node: ir.Node) -> ir.Node | None:
    """Return the node that turns codes into the right side of the ``MatMul`` ``node``, if there is one."""
    right = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
    producer = None if right is None else right.producer()
    return producer if producer is not None and is_dequantize(producer) else None


def codebook_of(node: ir.Node) -> ir.Node | None:
    """Return the ``DequantizeCodebook`` that makes the right side of the ``MatMul`` ``node``, if there is one."""
    right = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
    producer = None if right is None else right.producer()
    is_own = producer is not None and (producer.domain, producer.op_type) == (DOMAIN, DEQUANTIZE_CODEBOOK.name)
    return producer if is_own else None


def column_lookups(reader: ir.Node) -> list[ir.Node]:
    """Return every ``Gather`` of columns of the matrix that ``reader`` makes of codes: of rows of its transpose."""
    transposes = [use.node for use in reader.outputs[0].uses() if feeds_lookups(use.node)]
    return [use.node for node in transposes for use in node.outputs[0].uses()]


def feeds_lookups(node: ir.Node) -> bool:
    """Return whether ``node`` transposes a matrix, and nothing but lookups of rows read what it makes."""
    matrix = node.outputs[0]
    return (
        (node.domain, node.op_type) == ("", "Transpose")
        and tuple(node.attributes.get_ints("perm", (1, 0))) == (1, 0)
        and not matrix.is_graph_output()
        and all(
            (use.node.domain, use.node.op_type, use.idx) == ("", "Gather", 0)
            and use.node.attributes.get_int("axis", 0) == 0
            for use in matrix.uses()
        )
    )


def table_readers(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that make a matrix of codes of our own form for lookups of its columns alone, in order."""
    return [
        node
        for node in graph
        if (node.domain, node.op_type) == (DOMAIN, DEQUANTIZE.name)
        and node.outputs[0].uses()
        and all(feeds_lookups(use.node) for use in node.outputs[0].uses())
    ]


def is_dequantize(node: ir.Node) -> bool:
    """Return whether ``node`` makes numbers of codes."""
    return (node.domain, node.op_type) in (("", "DequantizeLinear"), (DOMAIN, DEQUANTIZE.name)) or is_trellis(node)


def is_trellis(node: ir.Node) -> bool:
    """Return whether ``node`` makes numbers of codes whose meaning depends on their neighbours."""
    return (node.domain, node.op_type) == (DOMAIN, DEQUANTIZE_TRELLIS.name)


def rounding_of(node: ir.Node) -> ir.Node | None:
    """Return the ``RoundActivations`` in front of the left side of the product ``node``, if there is one."""
    producer = None if node.inputs[0] is None else node.inputs[0].producer()
    is_own = producer is not None and (producer.domain, producer.op_type) == (DOMAIN, ROUND_ACTIVATIONS.name)
    return producer if is_own else None


def coded_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return every ``MatMul`` with a matrix of stored codes, in order."""
    return [
        node
        for node in graph
        if (reader := dequantize_of(node)) is not None
        and (codes := weight_of(reader, 0)) is not None
        and len(codes.shape or ()) == 2
    ]


def stored_codes(node: ir.Node) -> StoredCodes | Fact:
    """Return the stored codes of the product ``node``, or why a packed product cannot have them."""
    reader = dequantize_of(node)
    return NOT_QUANTIZED() if reader is None else codes_of_reader(reader)


def codes_of_reader(reader: ir.Node) -> StoredCodes | Fact:
    """Return the stored codes that ``reader`` makes a matrix of, or why a packed product cannot have them."""
    signature = signature_of(reader)
    assert signature is not None
    ports = enumerate(zip(signature.inputs, reader.inputs, strict=False))
    weights = {port.role: weight_of(reader, index) for index, (port, value) in ports if value is not None}
    codes, scales, zero_points = (weights.get(role) for role in (Role.CODES, Role.SCALES, Role.ZERO_POINTS))
    if codes is None or codes.const_value is None or codes.dtype is None or scales is None or None in weights.values():
        return NOT_CONSTANT()
    if reader.domain:
        stored_codes: StoredCodes | Fact = _own_codes(reader, codes, scales, weights.get(Role.TABLE), zero_points)
    else:
        stored_codes = _standard(reader, codes, scales, zero_points)
    if (
        isinstance(stored_codes, StoredCodes)
        and stored_codes.group % 16
        and stored_codes.group != stored_codes.shape[0]
    ):
        return ODD_GROUP(group=stored_codes.group)
    return stored_codes


def _standard(reader: ir.Node, codes: ir.Value, scales: ir.Value, zero_points: ir.Value | None) -> StoredCodes | Fact:
    assert codes.dtype is not None and codes.const_value is not None
    table = format_stored_as(codes.dtype)
    if table is None:
        return NO_TABLE(type=codes.dtype.name)
    group = reader.attributes.get_int("block_size", 0)
    if codes.const_value.shape.rank() != 2 or reader.attributes.get_int("axis", 1) % 2 != 0 or group < 1:
        return NOT_IN_ROWS()
    if scales.dtype != ir.DataType.FLOAT:
        return SCALES_NOT_FLOAT(type=str(scales.dtype))
    return StoredCodes(reader, codes, scales, zero_points, table, group)


def _own_codes(
    reader: ir.Node, codes: ir.Value, scales: ir.Value, table: ir.Value | None, zero_points: ir.Value | None
) -> StoredCodes:
    assert table is not None and scales.const_value is not None
    group = reader.attributes.get_int("group", 0)
    if zero_points is None:
        return StoredCodes(reader, codes, scales, None, table, group)
    assert zero_points.const_value is not None
    placeholder = tuple(zero_points.const_value.shape.numpy()) != tuple(scales.const_value.shape.numpy()) or (
        zero_points.const_value.size == 1 and not zero_points.const_value.numpy().any()
    )
    return StoredCodes(reader, codes, scales, None if placeholder else zero_points, table, group)
