"""A token embedding that is the transposed lm_head: one matrix of codes, which the lookup and the product read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.products import linear_nodes, lm_head_nodes, token_lookups
from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import drop
from graphopt.graph.weights import Transpose, expression_of, weight_of
from graphopt.passes.common.logical_codes import columns_of

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

TIED = Rule("quantize_weights.tied", "{table} is looked up in the columns of {weight}: both are stored once")


def tied_lookups(graph: ir.Graph) -> dict[ir.Node, list[ir.Node]]:
    """Return the products that make logits with a transposed token embedding, each with the lookups of that embedding.

    An embedding is the transposed matrix of a product where both are the same expression of the same bytes. After
    ``fold_norms`` they are no longer: the matrix has the gain of the last norm in it, and the embedding has not.
    """
    lookups_by_product: dict[ir.Node, list[ir.Node]] = {}
    lookups = [node for node in token_lookups(graph) if _is_plain(node)]
    heads = lm_head_nodes(graph)
    for product in linear_nodes(graph):
        if product in heads:
            matches = [node for node in lookups if _is_transposed(_constant(product, 1), _constant(node, 0))]
            if matches:
                lookups_by_product[product] = matches
    return lookups_by_product


def look_up_columns(graph: ir.Graph, lookup: ir.Node, reader: ir.Node, weight: ir.Value, ledger: Ledger) -> None:
    """Let ``lookup``, the Gather of a tied embedding, read the columns of the matrix that ``reader`` makes of codes."""
    table = lookup.inputs[0]
    assert table is not None
    columns = columns_of(graph, reader, lookup)
    transpose = columns.producer()
    assert transpose is not None
    lookup.replace_input_with(0, columns)
    fact = TIED(table=table.name, weight=weight.name)
    ledger.changed(transpose, fact, [lookup, table])
    ledger.changed(lookup, fact, [lookup, table])
    drop(graph, table)


def _constant(node: ir.Node, index: int) -> ir.TensorProtocol:
    weight = weight_of(node, index)
    assert weight is not None and weight.const_value is not None
    return weight.const_value


def _is_plain(lookup: ir.Node) -> bool:
    """Return whether a lookup makes float32 and its indices have a known rank, as the operators for it need."""
    ids = lookup.inputs[1]
    return _constant(lookup, 0).dtype == ir.DataType.FLOAT and ids is not None and ids.shape is not None


def _is_transposed(matrix: ir.TensorProtocol, table: ir.TensorProtocol) -> bool:
    rows, columns = matrix.shape.numpy()
    if (columns, rows) != tuple(table.shape.numpy()) or matrix.dtype != table.dtype:
        return False
    expression, transpose = expression_of(matrix), expression_of(table)
    pairs = ((expression, Transpose(transpose, (1, 0))), (Transpose(expression, (1, 0)), transpose))
    return any(a.digest == b.digest for a, b in pairs)
