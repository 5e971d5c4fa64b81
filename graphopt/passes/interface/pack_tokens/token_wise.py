"""Which nodes treat tokens one by one, and which of their operands have an axis of tokens.

A value has tokens where its first two dimensions are those of the mask, [batch, length, ...]. A node is token-wise
where the row of a token in its outputs depends on that token's row of its operands alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import networkx as nx

from graphopt.passes.common.nodes import ELEMENTWISE
from graphopt.runtime_ops import DOMAIN
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.round_activations.spec.op import ROUND_ACTIVATIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import onnx_ir as ir

Rows = Literal["tokens", "positions", "texts", "same"]
"""What an operand has a row for: each token, each column, each text; or all tokens read the same."""

_ALONG_AN_AXIS = ("Softmax", "LogSoftmax", "RMSNormalization", "LayerNormalization", "Split")
_OF_OURS = (HADAMARD.name, ROUND_ACTIVATIONS.name)


@dataclass(frozen=True)
class TokenAxes:
    """The names of the dimensions that the mask of padding has.

    Attributes:
        batch: of texts.
        length: of columns.
    """

    batch: str
    length: str

    def has_tokens(self, value: ir.Value) -> bool:
        """Return whether a value is [batch, length, ...] with numbers behind."""
        dims = _dims(value)
        return dims is not None and dims[:2] == [self.batch, self.length] and _are_numbers(dims[2:])

    def rows(self, value: ir.Value, rank: int) -> Rows | None:
        """Return which rows an operand of a node with ``rank`` dimensions has; ``None`` where it cannot be told."""
        dims = _dims(value)
        if dims is None or len(dims) > rank:
            return None
        batch, length, *widths = [1] * (rank - len(dims)) + dims
        if not _are_numbers(widths) or batch not in (1, self.batch) or length not in (1, self.length):
            return None
        if batch == self.batch:
            return "tokens" if length == self.length else "texts"
        return "positions" if length == self.length else "same"

    def operands(self, node: ir.Node) -> dict[int, Rows] | None:
        """Return what rows the inputs of a token-wise node have, by index; ``None`` where it is none."""
        if not all(self.has_tokens(value) for value in node.outputs):
            return None
        shape = node.outputs[0].shape
        assert shape is not None
        rank = len(shape)
        if rank < 3:  # a mask, ids, positions: next to nothing to compute
            return None
        inputs = {index: value for index, value in enumerate(node.inputs) if value is not None}
        if not node.domain and node.op_type in ELEMENTWISE:
            rows = {index: self.rows(value, rank) for index, value in inputs.items()}
            return _if_all(rows) if "tokens" in rows.values() else None
        if not node.domain and node.op_type == "Concat":
            is_behind = node.attributes.get_int("axis", 0) % rank >= 2
            return dict.fromkeys(inputs, "tokens") if is_behind and all(map(self.has_tokens, inputs.values())) else None
        return self._reads_first(node, rank, inputs)

    def _reads_first(self, node: ir.Node, rank: int, inputs: dict[int, ir.Value]) -> dict[int, Rows] | None:
        """Return the rows for nodes of which one operand has tokens, and the parameters say what is done to each."""
        operand = 1 if node.op_type == "Gather" else 0
        if node.domain == DOMAIN:
            is_one = node.op_type in _OF_OURS
        elif node.domain:
            return None
        elif node.op_type == "Gather":
            is_one = node.attributes.get_int("axis", 0) == 0 and len(_dims(inputs[0]) or []) == rank - 1
        elif node.op_type == "MatMul":
            is_one = len(_dims(inputs[1]) or []) == 2
        elif node.op_type in _ALONG_AN_AXIS:
            default = 0 if node.op_type == "Split" else -1
            is_one = node.attributes.get_int("axis", default) % rank >= 2
        else:
            return None
        parameters = [value for index, value in inputs.items() if index != operand]
        if (
            not is_one
            or not self.has_tokens(inputs[operand])
            or not all(_are_numbers(_dims(value)) for value in parameters)
        ):
            return None
        return {index: "tokens" if index == operand else "same" for index in inputs}


def token_wise_regions(graph: ir.Graph, axes: TokenAxes) -> Iterator[dict[ir.Node, dict[int, Rows]]]:
    """Yield the token-wise nodes that hang together and hold a product, in order, with the rows of their inputs.

    Nodes without a product, such as the norms of queries in front of attention, take less time than packing does.
    """
    rows_of = {node: rows for node in graph if (rows := axes.operands(node)) is not None}
    neighbours: nx.Graph[ir.Node] = nx.Graph()
    neighbours.add_nodes_from(rows_of)
    for node, rows in rows_of.items():
        for index, kind in rows.items():
            value = node.inputs[index]
            producer = None if value is None else value.producer()
            if kind == "tokens" and producer in rows_of:
                neighbours.add_edge(producer, node)
    for region in nx.connected_components(neighbours):
        if any(node.op_type == "MatMul" for node in region):
            yield {node: rows for node, rows in rows_of.items() if node in region}


def _if_all(rows: dict[int, Rows | None]) -> dict[int, Rows] | None:
    certain = {index: kind for index, kind in rows.items() if kind is not None}
    return certain if len(certain) == len(rows) else None


def _dims(value: ir.Value) -> list[int | str] | None:
    """Return numbers and names of dimensions; ``None`` where one has neither."""
    if value.shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return None if None in dims else [dim for dim in dims if dim is not None]


def _are_numbers(dims: Iterable[int | str] | None) -> bool:
    return dims is not None and all(isinstance(dim, int) for dim in dims)
