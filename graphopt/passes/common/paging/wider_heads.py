"""Heads of attention in pages with zeros behind them, where a cache has to be wider than the model's heads.

    y [.., heads, size] = KVAttention(q, k, v)
      ->
    y' = KVAttention(Pad(q), Pad(k), Pad(v));  y = Slice(y'; heads, size)

Zeros behind a query and a key change no score. Zeros behind a value give zeros behind an output, and so do heads of
zeros: both are cut off again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.editing import Inserter, name_output
from graphopt.runtime_ops import port

if TYPE_CHECKING:
    from graphopt.analysis.structure.paged_caches import PagedLayer


def widen(graph: ir.Graph, node: ir.Node, old: PagedLayer, new: PagedLayer) -> ir.Value:
    """Let a ``KVAttention`` read and make the heads of ``new``, and cut its output down to those of ``old``.

    Its cache and its attribute ``kv_heads`` are left to the caller. Keys and values that are as wide as in ``new``
    already stay.

    Args:
        graph: with the node.
        node: of the layer.
        old: the layer.
        new: with as many KV heads or more, as large or larger; each has as many query heads as before.

    Returns:
        The output that is cut, which those read that read the output of the node.
    """
    query, y = port(node, "query"), node.outputs[0]
    assert query is not None
    is_latent = bool(new.attributes.value_size)
    group = _width(query) // (old.head_size * old.attributes.kv_heads)
    stored_inputs = ("key",) if is_latent else ("key", "value")
    heads = dict.fromkeys(stored_inputs, (old.attributes.kv_heads, new.attributes.kv_heads))
    heads["query"] = group * old.attributes.kv_heads, group * new.attributes.kv_heads
    insert = Inserter(graph, node, node.name or "attention")
    for index, value in enumerate(node.inputs):
        name = next((name for name in heads if port(node, name) is value), None)
        if value is None or name is None:
            continue
        before, after = (heads[name][0], old.head_size), (heads[name][1], new.head_size)
        if _width(value) != math.prod(after):
            node.replace_input_with(index, pad_heads(insert, value, before, after, name))
    logits = port(node, "sink_logits")
    extra_heads = heads["query"][1] - heads["query"][0]
    if extra_heads and logits is not None and logits.shape is not None and logits.shape[0] != 0:
        wide = insert.op(
            "Pad", [logits, insert.integers([0, extra_heads])], [heads["query"][1]], logits.dtype, "sink_logits.wide"
        )
        node.replace_input_with(list(node.inputs).index(logits), wide)
    if is_latent:  # whose values are the first numbers of keys
        return y
    return _cut(graph, node, y, (heads["query"][0], old.head_size), (heads["query"][1], new.head_size))


def pad_heads(
    insert: Inserter, value: ir.Value, before: tuple[int, int], after: tuple[int, int], name: str
) -> ir.Value:
    """Return rows [batch, tokens, heads x size] with zeros behind each head, and behind all heads.

    Args:
        insert: where to compute it.
        value: the rows.
        before: heads and size of ``value``.
        after: heads and size of what is returned.
        name: what the nodes are called by.
    """
    assert value.shape is not None
    rows = list(value.shape)[:2]
    heads = insert.op(
        "Reshape", [value, insert.integers([0, 0, *before])], [*rows, *before], value.dtype, f"{name}.heads"
    )
    ends = insert.integers([0] * 6 + [wide - size for size, wide in zip(before, after, strict=True)])
    wide = insert.op("Pad", [heads, ends], [*rows, *after], value.dtype, f"{name}.padded")
    width = math.prod(after)
    return insert.op("Reshape", [wide, insert.integers([0, 0, width])], [*rows, width], value.dtype, f"{name}.wide")


def _cut(graph: ir.Graph, node: ir.Node, y: ir.Value, before: tuple[int, int], after: tuple[int, int]) -> ir.Value:
    """Return the first heads of the output [batch, tokens, heads x size] of ``node``, as large as before."""
    assert y.shape is not None
    rows, stem = list(y.shape)[:2], f"{node.name}.cut"
    insert = Inserter(graph, node, stem)
    bounds = insert.integers([0, 0]), insert.integers([*before]), insert.integers([2, 3])
    heads = ir.node("Reshape", [y, insert.integers([0, 0, *after])], name=f"{stem}.heads")
    cut = ir.node("Slice", [name_output(heads, y, [*rows, *after]), *bounds], name=f"{stem}.slice")
    width = math.prod(before)
    flat = ir.node(
        "Reshape", [name_output(cut, y, [*rows, *before]), insert.integers([0, 0, width])], name=f"{stem}.rows"
    )
    uses = [use for use in y.uses() if use.node is not heads]
    graph.insert_after(node, [heads, cut, flat])
    output = name_output(flat, y, [*rows, width])
    for use in uses:
        use.node.replace_input_with(use.idx, output)
    y.shape = ir.Shape([*rows, math.prod(after)])
    return output


def _width(value: ir.Value) -> int:
    assert value.shape is not None
    return int(str(value.shape[-1]))
