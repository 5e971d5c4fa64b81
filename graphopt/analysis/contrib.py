"""What fused operators of onnxruntime's own domain say about the inputs of a graph, before anything lifts them."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.facts import Fact, Rule

MICROSOFT = "com.microsoft"
PADDING = "graphopt.padding"
"""Metadata of a model that takes ``attention_mask`` and yet cannot have padding in front of a row's tokens: "none"."""

_GROUPED, _MULTI = "GroupQueryAttention", "MultiHeadAttention"
_QUERY, _KEY = 0, 1
_PAST = {_GROUPED: (3, 4), _MULTI: (6, 7)}

CACHE_GROWS = Rule(
    "importing.cache-grows",
    "caches that were cut to a window of tokens grow instead: the window stays ({layers} layer(s))",
    also=["nodes"],
)


def contrib_nodes(graph: ir.Graph, *op_types: str) -> list[ir.Node]:
    """Return the nodes of ``graph`` with one of the fused operators ``op_types``, in order."""
    return [node for node in graph if node.domain == MICROSOFT and node.op_type in op_types]


def head_sizes(node: ir.Node) -> tuple[int, int, int] | None:
    """Return query heads, KV heads and head size of a fused attention, or ``None`` if the graph lacks one.

    Args:
        node: a ``GroupQueryAttention``, or a ``MultiHeadAttention`` whose queries, keys and values are apart.
    """
    query, heads = node.inputs[_QUERY], node.attributes.get_int("num_heads", 0)
    groups = node.attributes.get_int("kv_num_heads", 0) if node.op_type == _GROUPED else heads
    width = None if query is None or query.shape is None or len(query.shape) != 3 else query.shape[2]
    if not isinstance(width, int) or heads < 1 or groups < 1 or heads % groups:
        return None
    packed = len(node.inputs) <= _KEY or node.inputs[_KEY] is None
    size, rest = divmod(width, heads + 2 * groups if packed else heads)
    return None if rest else (heads, groups, size)


def settle_caches(model: ir.Model) -> list[Fact]:
    """State in the graph how its caches are fed, where only fused attention says so; return notes on it.

    The heads and head size of caches get into the shapes of inputs and outputs. A cache that ``GroupQueryAttention``
    itself cuts to its window (``sliding_window_cache``) becomes one that grows: what the window hides, the window still
    hides.
    """
    grown = []
    for node in contrib_nodes(model.graph, *_PAST):
        if node.op_type == _GROUPED:
            # The operator counts a row's tokens from its first column.
            model.metadata_props[PADDING] = "none"
        if node.attributes.get_int("sliding_window_cache", 0):
            del node.attributes["sliding_window_cache"]
            grown.append(node.name or "")
        sizes = head_sizes(node)
        if sizes is None:
            continue
        _, groups, size = sizes
        pasts = [node.inputs[index] for index in _PAST[node.op_type] if index < len(node.inputs)]
        for value in (*pasts, *node.outputs[1:3]):
            if value is not None and value.shape is not None and len(value.shape) == 4:
                value.shape = ir.Shape([value.shape[0], groups, value.shape[2], size])
    return [CACHE_GROWS(layers=len(grown), nodes=grown)] if grown else []


def counts_from_first_column(graph: ir.Graph) -> bool:
    """Return whether an operator of ``graph`` takes the first columns of each row for its tokens."""
    return bool(contrib_nodes(graph, _GROUPED))
