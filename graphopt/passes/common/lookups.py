"""Lookups of columns of a matrix of codes: a tied token embedding, beside the product that makes the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.contrib import MICROSOFT
from graphopt.analysis.structure.product_codes import StoredCodes, column_lookups
from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import Inserter, name_output, replace
from graphopt.graph.weights import new_weight, source_of
from graphopt.runtime_ops import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.passes.common.packing import PackedMatrix
    from graphopt.passes.context import Ledger

GATHER = Rule("lower.gathered", "GatherTable of the codes that {product} reads")
UNPACKED_COPY = Rule(
    "lower.gathered-beside",
    "{operator} of the codes of {product}, under a second name, as onnxruntime fuses no product that shares its codes",
)

_LOOKUP_SUFFIX = ".looked_up"  # behind the name of what a product reads: what lookups read of it

# The types of codes that ONNX's own Gather takes in onnxruntime.
_BYTES = (ir.DataType.INT8, ir.DataType.UINT8)


Lookup = tuple[ir.Node, ir.Value]
"""A node that makes the rows of a table that ids name, [..., K], and these ids."""


def lookups_of(graph: ir.Graph, matrix_codes: StoredCodes) -> list[Lookup]:
    """Return what looks up columns: of the matrix itself, or of codes as :func:`gather_standard` left them.

    The latter is in a model that was lowered before; codes and scales must be those of the product, to the byte.
    """
    lookups = [(node, node.inputs[1]) for node in column_lookups(matrix_codes.reader)]
    codes, scales = _lookup_weight(graph, matrix_codes.codes), _lookup_weight(graph, matrix_codes.scales)
    for node in (use.node for use in (codes.uses() if codes and scales else ())):
        is_fused = (node.domain, node.op_type) == (MICROSOFT, "GatherBlockQuantized")
        columns = node if is_fused else _only_reader(node, "DequantizeLinear")
        transpose = None if columns is None else _only_reader(columns, "Transpose")
        if columns is None or transpose is None:
            continue
        source = columns.inputs[2] if is_fused else columns.inputs[1]
        if not is_fused:
            gather = None if source is None else source.producer()
            source = None if gather is None else gather.inputs[0]
        if source is scales:
            lookups.append((transpose, node.inputs[1]))
    return [(node, ids) for node, ids in lookups if ids is not None]


def gather_packed(graph: ir.Graph, lookups: Sequence[Lookup], matrix: PackedMatrix, ledger: Ledger, name: str) -> None:
    """Let each of ``lookups`` read columns of the packed ``matrix``, which the product called ``name`` multiplies by.

    ::

        e = Gather(Transpose(Dequantize(codes, ...)), ids)   ->   e = GatherTable(ids, packed codes, scales, table, ...)
    """
    operator = OPERATORS["GatherTable"]
    for node, ids in lookups:
        insert = Inserter(graph, node, node.name or "lookup")
        if ids.dtype != ir.DataType.INT64:
            ids = insert.op("Cast", [ids], ids.shape, ir.DataType.INT64, "ids", to=ir.DataType.INT64)
        inputs = {"ids": ids, **matrix.ports}
        new = operator.node(
            {key: inputs[key] for key in operator.schema.input_names}, matrix.attributes, name=node.name
        )
        replace(node, new)
        ledger.changed(new, GATHER(product=name), [node])


def gather_standard(graph: ir.Graph, codes: StoredCodes, ledger: Ledger, name: str) -> None:
    """Let lookups of a matrix in standard form read codes of the columns they want, and dequantize those.

    ::

        e = Gather(Transpose(DequantizeLinear(codes, scales; axis=0)), ids)
        -> e = Transpose(DequantizeLinear(Gather(codes', ids; axis=1), Gather(scales', ids; axis=1); axis=0))
        or e = Transpose(GatherBlockQuantized(codes', ids, scales'; gather_axis=1, quantize_axis=0))

    The first for codes of 8 bits, the second for those of 4. codes' and scales' are the tensors of the product, to the
    byte, under other names: the file holds them once.
    """
    lookups = column_lookups(codes.reader)
    parts = {"codes": codes.codes, "scales": codes.scales, "zero_points": codes.zero_points}
    tensors = {
        part: new_weight(graph, f"{value.name}{_LOOKUP_SUFFIX}", value.const_value)
        for part, value in parts.items()
        if lookups and value is not None
    }
    for node in lookups:
        insert, ids = Inserter(graph, node, node.name or "lookup"), node.inputs[1]
        assert ids is not None and ids.shape is not None
        rank, rows, dtype = len(ids.shape), codes.shape[0], node.outputs[0].dtype
        dims = [rows, *ids.shape]
        if codes.codes.dtype in _BYTES:
            operator = "DequantizeLinear"
            gathered_rows = [
                insert.op("Gather", [value, ids], [_rows(value), *ids.shape], value.dtype, part, axis=1)
                for part, value in tensors.items()
            ]
            columns = insert.op(operator, gathered_rows, dims, dtype, "dequantize", axis=0, block_size=codes.group)
        else:
            operator = "GatherBlockQuantized"
            graph.opset_imports.setdefault(MICROSOFT, 1)
            source = [
                tensors["codes"],
                ids,
                tensors["scales"],
                *([tensors["zero_points"]] if "zero_points" in tensors else []),
            ]
            axes = {"gather_axis": 1, "quantize_axis": 0, "block_size": codes.group}
            made_by = ir.node(operator, source, axes, domain=MICROSOFT, name=f"{node.name}.columns")
            columns = name_output(made_by, node.outputs[0], dims, dtype)
            graph.insert_before(node, made_by)
            insert.nodes.append(made_by)
        new = ir.node("Transpose", [columns], {"perm": [*range(1, rank + 1), 0]}, name=node.name)
        replace(node, new)
        fact = UNPACKED_COPY(operator=operator, product=name)
        for new_value in (*insert.nodes, new):
            ledger.changed(new_value, fact, [node])


def _rows(value: ir.Value) -> int:
    assert value.const_value is not None
    rows: int = value.const_value.shape.numpy()[0]
    return rows


def _lookup_weight(graph: ir.Graph, value: ir.Value) -> ir.Value | None:
    """Return the same tensor under the name that lookups read it by."""
    lookups = graph.initializers.get(f"{value.name}{_LOOKUP_SUFFIX}")
    if lookups is None or lookups.const_value is None or value.const_value is None:
        return None
    return lookups if source_of(lookups.const_value) == source_of(value.const_value) else None


def _only_reader(node: ir.Node, operator: str) -> ir.Node | None:
    """Return what alone reads what ``node`` makes, where that is such an operator of ONNX."""
    readers = [use.node for use in node.outputs[0].uses()]
    is_only_reader = len(readers) == 1 and (readers[0].domain, readers[0].op_type) == ("", operator)
    return readers[0] if is_only_reader else None
