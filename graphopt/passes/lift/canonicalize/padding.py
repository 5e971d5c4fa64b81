"""The masks that stay, each made once for all layers: padding by ``attention_mask``, and windows."""

from __future__ import annotations

import onnx_ir as ir

from graphopt.analysis.structure.ports import token_port
from graphopt.graph.editing import Dims, Inserter

_PADDING, _WINDOW = "padding_mask", "window_mask"


def padding_mask(model: ir.Model, window: int = 0) -> ir.Value:
    """Return the boolean mask [batch, 1, length, past + length] that ``attention_mask`` makes.

    Args:
        model: a graph with an input for tokens or their embeddings, and ``attention_mask``.
        window: hide the keys that stand this many tokens before a query, or more; 0: none. It counts columns, which
            differ from positions by one number a row where padding stands in front.
    """
    graph = model.graph
    name = f"{_WINDOW}.{window}" if window else _PADDING
    for node in graph:
        if node.outputs[0].name == name:
            return node.outputs[0]
    ports = {value.name: value for value in graph.inputs}
    tokens, real = token_port(graph), ports["attention_mask"]
    assert tokens is not None
    dims: Dims = [None] * 4
    if tokens.shape is not None and real.shape is not None:
        dims = [tokens.shape[0], 1, tokens.shape[1], real.shape[1]]
    mask = _window_mask(model, window, tokens, real, dims) if window else _padding(graph, tokens, real, dims)
    mask.name = name
    return mask


def _padding(graph: ir.Graph, tokens: ir.Value, real: ir.Value, dims: Dims) -> ir.Value:
    insert = Inserter(graph, graph[0], _PADDING)
    visible = insert.op("Cast", [real], [dims[0], dims[3]], ir.DataType.BOOL, to=ir.DataType.BOOL)
    visible = insert.op("Unsqueeze", [visible, insert.integers([1, 2])], [dims[0], 1, 1, dims[3]], ir.DataType.BOOL)
    length = insert.op("Shape", [tokens], [1], ir.DataType.INT64, start=1, end=2)
    leading_dims = [insert.integers([1, 1]), length, insert.integers([1])]
    shape = insert.op("Concat", leading_dims, [4], ir.DataType.INT64, axis=0)
    # onnxruntime's Attention does not broadcast the query axis of a mask.
    return insert.op("Expand", [visible, shape], dims, ir.DataType.BOOL)


def _window_mask(model: ir.Model, window: int, tokens: ir.Value, real: ir.Value, dims: Dims) -> ir.Value:
    padding = padding_mask(model)
    producer = padding.producer()
    assert producer is not None
    position = list(model.graph).index(producer) + 1
    insert = Inserter(model.graph, model.graph[position], f"{_WINDOW}.{window}")
    whole = ir.DataType.INT64

    def number(value: ir.Value, suffix: str) -> ir.Value:
        size = insert.op("Shape", [value], [1], whole, f"{suffix}.shape", start=1, end=2)
        return insert.op("Squeeze", [size], [], whole, suffix)

    zero, unit = insert.integers(0), insert.integers(1)
    length, keys = number(tokens, "length"), number(real, "keys")
    columns = insert.op("Range", [zero, keys, unit], [dims[3]], whole, "columns")
    first = insert.op("Sub", [keys, length], [], whole, "first")
    queries = insert.op("Range", [first, keys, unit], [dims[2]], whole, "queries")
    queries = insert.op("Unsqueeze", [queries, insert.integers([1])], [dims[2], 1], whole, "query_column")
    oldest = insert.op("Sub", [queries, insert.integers(window)], [dims[2], 1], whole, "hidden")
    in_window = insert.op("Greater", [columns, oldest], [dims[2], dims[3]], ir.DataType.BOOL, "near")
    return insert.op("And", [in_window, padding], dims, ir.DataType.BOOL, "And")
