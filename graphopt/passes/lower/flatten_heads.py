"""Attention reads queries, keys and values as products make them: heads side by side in one row."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import onnx_ir as ir

from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import Inserter, clone_node, remove, take_place
from graphopt.passes.base import Pass
from graphopt.util.targets import Target

if TYPE_CHECKING:
    from graphopt.passes.context import Context, Ledger

FLAT = Rule("flatten_heads.flat", "reads and writes [batch, length, heads x size]: no transposes around it")
FLAT_ROTARY = Rule("flatten_heads.flat-rotary", "turns heads side by side in one row")
HEADS_JOINED = Rule("flatten_heads.joined", "heads side by side in one row, in the order they are stored in")
FLAT_ALREADY = Rule("flatten_heads.flat-already", "its heads are side by side already")
NOT_TRANSPOSED = Rule("flatten_heads.not-transposed", "{tensor} does not come from a transpose of its heads")
READ_BY_HEADS = Rule("flatten_heads.read-by-heads", "{tensor} is read in other ways than as rows of all heads")

_HEADS_BEHIND_LENGTH = (0, 2, 1, 3)


class _Source(NamedTuple):
    """Where queries, keys or values come from: a transpose of known heads, and perhaps a rotary embedding behind it."""

    transpose: ir.Node
    rotary: ir.Node | None
    heads: int
    size: int


class FlattenHeads(Pass):
    """Leave heads where products put them: ``Attention`` and ``RotaryEmbedding`` take them side by side.

    before::

        q, k, v = Transpose(Reshape(x W))           [batch, length, heads x size] -> [batch, heads, length, size]
        y = Reshape(Transpose(Attention(RotaryEmbedding(q), RotaryEmbedding(k), v, mask, caches)))

    after::

        y = Attention(RotaryEmbedding(x W_q; num_heads), RotaryEmbedding(x W_k; num_heads), x W_v, mask, caches;
                      q_num_heads, kv_num_heads)

    ONNX defines the second form of both operators as the first with these transposes, so all numbers stay, and so do
    caches, [batch, heads, tokens, size]. What goes are eight kernels of a layer that only move data, and cost
    onnxruntime some microseconds each at each token. Where a norm of heads stands between product and attention, a
    reshape stays.
    """

    name: ClassVar[str] = "flatten_heads"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("merge_products",)
    targets: ClassVar[tuple[Target, ...]] = ("ort-cpu",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Let each attention read rows; say why the others keep their transposes."""
        for node in list(model.graph):
            if node.op_type == "Attention" and not node.domain:
                reason = _flatten(model.graph, node, context.ledger)
                if reason is not None:
                    context.ledger.skipped(node, reason)


def _flatten(graph: ir.Graph, node: ir.Node, ledger: Ledger) -> Fact | None:
    """Flatten what ``node`` reads and makes, or return why not."""
    inputs, output = node.inputs[:3], node.outputs[0]
    if node.attributes.get_int("q_num_heads", 0):
        return FLAT_ALREADY()
    heads: list[_Source] = []
    for value in inputs:
        source = _source(value)
        if source is None:
            return NOT_TRANSPOSED(tensor="?" if value is None else value.name)
        heads.append(source)
    readers = _read_as_rows(output)
    if readers is None:
        return READ_BY_HEADS(tensor=output.name)
    flat = [_rows(graph, source, node, ledger) for source in heads]
    new = clone_node(node, [*flat, *node.inputs[3:]])
    new.attributes["q_num_heads"] = ir.AttrInt64("q_num_heads", heads[0].heads)
    new.attributes["kv_num_heads"] = ir.AttrInt64("kv_num_heads", heads[1].heads)
    graph.insert_before(node, new)
    ledger.changed(new, FLAT(), [node, *readers])
    for old, value in zip((readers[-1].outputs[0], *node.outputs[1:]), new.outputs, strict=True):
        take_place(old, value)
    remove(readers[-1])
    return None


def _source(value: ir.Value | None) -> _Source | None:
    """Return the transpose that ``value`` comes from, through a rotary embedding or not."""
    node = None if value is None else value.producer()
    rotary = node if node is not None and node.op_type == "RotaryEmbedding" and not node.domain else None
    if rotary is not None:
        node = None if rotary.inputs[0] is None else rotary.inputs[0].producer()
    if node is None or node.op_type != "Transpose" or node.domain or _order(node) != _HEADS_BEHIND_LENGTH:
        return None
    x = node.inputs[0]
    heads, size = (None, None) if x is None or x.shape is None else x.shape[2:]
    return _Source(node, rotary, heads, size) if isinstance(heads, int) and isinstance(size, int) else None


def _order(transpose: ir.Node) -> tuple[int, ...]:
    return tuple(transpose.attributes.get_ints("perm", ()))


def _rows(graph: ir.Graph, source: _Source, node: ir.Node, ledger: Ledger) -> ir.Value:
    """Return what ``source`` transposes as [batch, length, heads x size], turned by positions where it was."""
    head_rows = source.transpose.inputs[0]
    assert head_rows is not None and head_rows.shape is not None
    width = source.heads * source.size
    dims = [*head_rows.shape[:2], width]
    reshape = head_rows.producer()
    rows = reshape.inputs[0] if reshape is not None and reshape.op_type == "Reshape" else None
    if rows is None or not _is_rows(rows, head_rows, width):
        insert = Inserter(graph, source.rotary or node, source.transpose.name or "heads")
        rows = insert.op("Reshape", [head_rows, insert.integers([0, 0, width])], dims, head_rows.dtype, "rows")
        ledger.changed(insert.nodes[0], HEADS_JOINED(), [source.transpose])
    if source.rotary is None:
        return rows
    rotary_node = clone_node(source.rotary, [rows, *source.rotary.inputs[1:]], f"{source.rotary.name}.rows")
    rotary_node.attributes["num_heads"] = ir.AttrInt64("num_heads", source.heads)
    output = rotary_node.outputs[0]
    output.name, output.type, output.shape = f"{rotary_node.name}.output", source.rotary.outputs[0].type, ir.Shape(dims)
    graph.insert_before(source.rotary, rotary_node)
    ledger.changed(rotary_node, FLAT_ROTARY(), [source.rotary, source.transpose])
    return output


def _is_rows(rows: ir.Value, head_rows: ir.Value, width: int) -> bool:
    """Return whether ``rows`` is [batch, length, width] where ``head_rows`` is [batch, length, heads, size]."""
    if rows.shape is None or head_rows.shape is None or len(rows.shape) != 3 or rows.shape[2] != width:
        return False
    is_known = [isinstance(dim, int) or dim.value is not None for dim in rows.shape[:2]]
    return all(is_known) and list(rows.shape[:2]) == list(head_rows.shape[:2])


def _read_as_rows(output: ir.Value) -> tuple[ir.Node, ir.Node] | None:
    """Return the only reader of ``output``, a transpose, and its only reader, a reshape to rows, or ``None``."""
    transpose = _only_reader(output, "Transpose")
    reshape = None if transpose is None else _only_reader(transpose.outputs[0], "Reshape")
    if transpose is None or reshape is None or _order(transpose) != _HEADS_BEHIND_LENGTH:
        return None
    head_rows = transpose.outputs[0]
    _, _, heads, size = head_rows.shape if head_rows.shape is not None else [None] * 4
    whole = isinstance(heads, int) and isinstance(size, int) and _is_rows(reshape.outputs[0], head_rows, heads * size)
    return (transpose, reshape) if whole else None


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """Return the standard ``op_type`` that reads ``value`` as its first input, if nothing else reads it."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].idx:
        return None
    node = uses[0].node
    return node if node.op_type == op_type and not node.domain else None
