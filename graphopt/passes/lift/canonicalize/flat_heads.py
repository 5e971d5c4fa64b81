"""``Attention`` of heads side by side becomes ``Attention`` of heads apart, the form that all passes know.

    y, present_k, present_v = Attention(q, k, v, mask, past_k, past_v; q_num_heads, kv_num_heads)
      ->   q = Transpose(Reshape(q)), k and v alike
           y, present_k, present_v = Attention(q, k, v, mask, past_k, past_v)
           Reshape(Transpose(y))

A ``RotaryEmbedding`` of such rows right in front of it comes along, behind the transpose. This is how ONNX defines the
first form. The step ``flatten_heads`` does the opposite, in the end, for where it is faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import Inserter, clone_node, replace
from graphopt.passes.lift.canonicalize.heads import join_heads, split_heads, swap_axes

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

HEADS_APART = Rule("canonicalize.heads-apart", "heads that were side by side are apart")
WIDTH_UNKNOWN = Rule("canonicalize.width-unknown", "{tensor} is not known to be [batch, length, heads x size]")


def take_heads_apart(model: ir.Model, ledger: Ledger) -> None:
    """Give every ``Attention`` of rows heads that are apart; say why not where that cannot be."""
    for node in list(model.graph):
        if node.op_type != "Attention" or node.domain or not node.attributes.get_int("q_num_heads", 0):
            continue
        heads = _heads(node)
        unknown = [value for value, count in zip(node.inputs, heads, strict=False) if _size(value, count) is None]
        if unknown:
            ledger.skipped(node, WIDTH_UNKNOWN(tensor="?" if unknown[0] is None else unknown[0].name))
        else:
            _take_apart(model.graph, node, heads, ledger)


def _heads(node: ir.Node) -> tuple[int, int, int]:
    """Return the numbers of heads of queries, keys and values."""
    queries, keys = (node.attributes.get_int(f"{role}_num_heads", 0) for role in ("q", "kv"))
    return queries, keys, keys


def _size(value: ir.Value | None, heads: int) -> int | None:
    """Return the size of a head of rows of ``heads`` heads, ``None`` where it is not known."""
    if value is None or value.shape is None or len(value.shape) != 3:
        return None
    width = value.shape[2]
    return width // heads if isinstance(width, int) and heads and not width % heads else None


def _take_apart(graph: ir.Graph, node: ir.Node, heads: tuple[int, int, int], ledger: Ledger) -> None:
    insert, sources = Inserter(graph, node, node.name or "attention"), [node]
    inputs: list[ir.Value | None] = []
    for value, count, role in zip(node.inputs, heads, ("query", "key", "value"), strict=False):
        assert value is not None
        rotary, x = _rotary_behind(value)
        if rotary is None or x is None or _size(x, count) is None:
            inputs.append(_by_heads(insert, value, count, role))
            continue
        rows = _by_heads(insert, x, count, role)
        rotary_copy = clone_node(rotary, [rows, *rotary.inputs[1:]], f"{rotary.name}.heads")
        output = rotary_copy.outputs[0]
        output.name, output.type, output.shape = f"{rotary_copy.name}.output", value.type, rows.shape
        graph.insert_before(node, rotary_copy)
        insert.nodes.append(rotary_copy)
        sources.append(rotary)
        inputs.append(output)
    new = clone_node(node, [*inputs, *node.inputs[3:]])
    for name in ("q_num_heads", "kv_num_heads"):
        del new.attributes[name]
    graph.insert_before(node, new)
    insert.nodes.append(new)
    y, queries, size = new.outputs[0], inputs[0], _size(node.inputs[2], heads[2])
    assert queries is not None and queries.shape is not None
    y.name, y.type = f"{node.name}.heads.output", node.outputs[0].type
    y.shape = ir.Shape([*queries.shape[:3], size])
    rows = join_heads(insert, y, "made")
    outputs = {old: output for old, output in zip(node.outputs, [rows, *new.outputs[1:]], strict=True) if old.name}
    replace(node, insert.nodes, outputs)
    for made_node in insert.nodes:
        ledger.changed(made_node, HEADS_APART(), sources)


def _rotary_behind(value: ir.Value) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the rotary embedding that makes ``value``, and what it turns."""
    node = value.producer()
    rotary = node is not None and node.op_type == "RotaryEmbedding" and not node.domain
    return (node, node.inputs[0]) if rotary and node is not None else (None, None)


def _by_heads(insert: Inserter, value: ir.Value, heads: int, role: str) -> ir.Value:
    size = _size(value, heads)
    assert size is not None
    return swap_axes(insert, split_heads(insert, value, heads, size, f"{role}.apart"), role)
