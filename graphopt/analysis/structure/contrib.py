"""What fused operators of onnxruntime's own domain say about the inputs of a graph, before anything lifts them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

MICROSOFT = "com.microsoft"
PADDING = "graphopt.padding"
"""Metadata of a model that takes ``attention_mask`` and yet cannot have padding in front of a row's tokens: "none"."""
WINDOWS = "graphopt.windows"
"""Metadata of a model whose caches are cut to a window: how many tokens each cache input holds, by name, in JSON."""
CUTS_TO_WINDOW = "sliding_window_cache"
"""Attribute of ``GroupQueryAttention``: it cuts its own cache to its window."""

_GROUP_QUERY, _MULTI_HEAD = "GroupQueryAttention", "MultiHeadAttention"
_QUERY, _KEY = 0, 1
_PAST = {_GROUP_QUERY: (3, 4), _MULTI_HEAD: (6, 7)}


def contrib_nodes(graph: ir.Graph, *op_types: str) -> list[ir.Node]:
    """Return the nodes of ``graph`` with one of the fused operators ``op_types``, in order."""
    return [node for node in graph if node.domain == MICROSOFT and node.op_type in op_types]


def head_sizes(node: ir.Node) -> tuple[int, int, int] | None:
    """Return query heads, KV heads and head size of a fused attention, or ``None`` if the graph lacks one.

    Args:
        node: a ``GroupQueryAttention``, or a ``MultiHeadAttention`` whose queries, keys and values are apart.
    """
    query, heads = node.inputs[_QUERY], node.attributes.get_int("num_heads", 0)
    groups = node.attributes.get_int("kv_num_heads", 0) if node.op_type == _GROUP_QUERY else heads
    width = None if query is None or query.shape is None or len(query.shape) != 3 else query.shape[2]
    if not isinstance(width, int) or heads < 1 or groups < 1 or heads % groups:
        return None
    is_packed = len(node.inputs) <= _KEY or node.inputs[_KEY] is None
    size, remainder = divmod(width, heads + 2 * groups if is_packed else heads)
    return None if remainder else (heads, groups, size)


def state_caches(model: ir.Model) -> None:
    """State in the graph how its caches are fed, where only fused attention says so.

    Heads and head size of caches get into the shapes of inputs and outputs. Two facts get into the metadata, where a
    session finds them: :data:`PADDING` and :data:`WINDOWS`. What the graph computes is left as it is.
    """
    windows = windows_of(model.graph)
    if windows:
        model.metadata_props[WINDOWS] = json.dumps(windows)
    if counts_from_first_column(model.graph):
        model.metadata_props[PADDING] = "none"
    for node in contrib_nodes(model.graph, *_PAST):
        sizes = head_sizes(node)
        if sizes is None:
            continue
        _, groups, size = sizes
        for value in (*cache_inputs(node), *node.outputs[1:3]):
            if value is not None and value.shape is not None and len(value.shape) == 4:
                value.shape = ir.Shape([value.shape[0], groups, value.shape[2], size])


def cache_inputs(node: ir.Node) -> list[ir.Value | None]:
    """Return the inputs by which a fused attention takes its cached keys and values."""
    return [node.inputs[index] for index in _PAST[node.op_type] if index < len(node.inputs)]


def windowed_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return every ``GroupQueryAttention`` that cuts its own cache to its window."""
    return [node for node in contrib_nodes(graph, _GROUP_QUERY) if node.attributes.get_int(CUTS_TO_WINDOW, 0)]


def windows_of(graph: ir.Graph) -> dict[str, int]:
    """Return how many tokens each cache input holds that is cut to a window: what its shape says, else the window."""
    windows = {}
    for node in windowed_nodes(graph):
        for value in cache_inputs(node):
            if value is not None and value.is_graph_input() and value.name:
                length = value.shape[2] if value.shape is not None and len(value.shape) == 4 else None
                window = node.attributes.get_int("local_window_size", 0)
                windows[value.name] = length if isinstance(length, int) else window
    return windows


def stated_windows(metadata: Mapping[str, str]) -> dict[str, int]:
    """Return what :data:`WINDOWS` in the metadata of a model says, as :func:`windows_of` does.

    Raises:
        InputError: it is something else.
    """
    try:
        windows = json.loads(metadata.get(WINDOWS, "{}"))
        return {str(name): int(length) for name, length in windows.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"the metadata {WINDOWS} of the model are not lengths of caches by name: {error}") from error


def counts_from_first_column(graph: ir.Graph) -> bool:
    """Return whether an operator of ``graph`` takes the first columns of each row for its tokens."""
    return bool(contrib_nodes(graph, _GROUP_QUERY))
