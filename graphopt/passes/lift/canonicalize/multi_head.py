"""``MultiHeadAttention``, onnxruntime's own, becomes the standard ops that it fuses.

    y, present_k, present_v = MultiHeadAttention(q, k, v, [b_q | b_k | b_v], padding, bias, past_k, past_v)
      ->   q = Transpose(Reshape(q + b_q)), k and v alike
           y, present_k, present_v = Attention(q, k, v, <padding and bias>, past_k, past_v)
           Reshape(Transpose(y))

(Vaswani et al. 2017, section 3.2.2.) ``unidirectional`` becomes ``is_causal``, ``scale`` stays. What is added to
scores is added as before: ``masks.py`` finds out what it means. Scores of keys that are padding get
``mask_filter_value`` added, -10000 by default, and are hidden here. In float32 that is the same, except for a query all
of whose keys are padding, whose output is meaningless in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.contrib import contrib_nodes, head_sizes
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import Dims, Inserter, replace
from graphopt.graph.weights import Slice, WeightTensor, expression_of, new_weight, weight_of
from graphopt.passes.lift.canonicalize.group_query import GROUP_QUERY_LIFT, HEADS_UNKNOWN, SCORES_READ
from graphopt.passes.lift.canonicalize.heads import join_heads, split_heads, swap_axes
from graphopt.passes.lift.canonicalize.mask_input import one_mask, with_queries

if TYPE_CHECKING:
    from graphopt.passes.context import Ledger

_OPERATOR = "MultiHeadAttention"
_BIAS, _PADDING, _ATTENTION_BIAS, _PAST_KEY, _PAST_VALUE, _PAST_LENGTH, _INDIRECTION = range(3, 10)
_INPUTS = 10
# A score that is lowered by this or more has no weight in float32.
_HIDDEN = -1e4

Masks = dict[tuple[ir.Value | None, ir.Value | None], ir.Value]

NOT_THREE = Rule(
    "canonicalize.not-three", "its queries, keys and values are not three tensors [batch, length, heads x size]"
)
OTHER_SEQUENCE = Rule(
    "canonicalize.other-sequence",
    "its keys and values are not [batch, length, heads x size]: those of another sequence, or packed",
)
BIAS_COMPUTED = Rule("canonicalize.bias-computed", "its bias is computed")
PADDING_SHAPE = Rule(
    "canonicalize.padding-shape",
    "its padding {padding} is no mask [batch, keys] or [batch, queries, keys] (lengths, perhaps)",
)
FILTER_VALUE = Rule("canonicalize.filter-value", "its mask_filter_value does not hide what is padding")
ONE_CACHE = Rule("canonicalize.one-cache", "only one of keys and values has a cache")
SHARED_BUFFER = Rule(
    "canonicalize.shared-buffer",
    "its cache is a buffer that is input and output at once (past_sequence_length, cache_indirection)",
)


def lift_multi_head(model: ir.Model, ledger: Ledger) -> None:
    """Lift every ``MultiHeadAttention`` that standard ops can express."""
    masks: Masks = {}
    for node in contrib_nodes(model.graph, _OPERATOR):
        reason = _why_not(node)
        if reason is not None:
            ledger.skipped(node, reason)
            continue
        _lift(model.graph, node, masks, ledger)


def _why_not(node: ir.Node) -> Fact | None:
    """Return why standard ops cannot express what ``node`` computes, or ``None``."""
    inputs = _inputs(node)
    query, key, value = inputs[:3]
    if query is None or query.shape is None or len(query.shape) != 3 or key is None or value is None:
        return NOT_THREE()
    if any(head_size.shape is None or len(head_size.shape) != 3 for head_size in (key, value)):
        return OTHER_SEQUENCE()
    if _widths(node) is None:
        return HEADS_UNKNOWN(op=_OPERATOR)
    if inputs[_BIAS] is not None and weight_of(node, _BIAS) is None:
        return BIAS_COMPUTED()
    padding = inputs[_PADDING]
    if padding is not None and (padding.shape is None or len(padding.shape) not in (2, 3)):
        return PADDING_SHAPE(padding=padding.name)
    if padding is not None and node.attributes.get_float("mask_filter_value", _HIDDEN) > _HIDDEN:
        return FILTER_VALUE()
    if (inputs[_PAST_KEY] is None) != (inputs[_PAST_VALUE] is None):
        return ONE_CACHE()
    if inputs[_PAST_LENGTH] is not None or inputs[_INDIRECTION] is not None:
        return SHARED_BUFFER()
    if any(value.uses() or value.is_graph_output() for value in node.outputs[3:]):
        return SCORES_READ(op=_OPERATOR)
    return None


def _widths(node: ir.Node) -> tuple[int, list[int]] | None:
    """Return the heads, and the columns of queries, keys and values, or ``None`` if the graph lacks one."""
    sizes = head_sizes(node)
    widths = [value.shape[2] for value in node.inputs[:3] if value is not None and value.shape is not None]
    whole = [width for width in widths if isinstance(width, int)]
    if sizes is None or len(whole) != 3 or whole[0] != whole[1] or whole[2] % sizes[0]:
        return None
    return sizes[0], whole


def _lift(graph: ir.Graph, node: ir.Node, masks: Masks, ledger: Ledger) -> None:
    widths_of_node = _widths(node)
    assert widths_of_node is not None
    heads, widths = widths_of_node
    inputs, insert = _inputs(node), Inserter(graph, node, node.name or "attention")
    parts: list[ir.Value] = []
    for number, role in enumerate(("query", "key", "value")):
        rows = inputs[number]
        assert rows is not None and rows.shape is not None
        if inputs[_BIAS] is not None:
            bias = _bias(graph, node, widths, number, role)
            rows = insert.op("Add", [rows, bias], list(rows.shape), rows.dtype, f"{role}.biased")
        parts.append(
            swap_axes(insert, split_heads(insert, rows, heads, widths[number] // heads, f"{role}.heads"), role)
        )
    query = parts[0]
    assert query.shape is not None
    batch, _, length, size = query.shape
    key = (inputs[_PADDING], inputs[_ATTENTION_BIAS])
    mask = masks.get(key)
    if mask is None and any(key):
        mask = masks[key] = _mask(insert, *key, query)
    scale, dtype = node.attributes.get_float("scale", 0.0), query.dtype
    attributes: dict[str, object] = {"scale": scale or int(str(size)) ** -0.5}
    if node.attributes.get_int("unidirectional", 0):
        attributes["is_causal"] = 1
    outputs: list[tuple[Dims, ir.DataType | None]] = [([batch, heads, length, widths[2] // heads], dtype)]
    has_cache = inputs[_PAST_KEY] is not None
    if has_cache:
        sizes = (int(str(size)), widths[2] // heads)
        outputs += [([batch, heads, None, head_size], dtype) for head_size in sizes]
    attention = insert.node(
        "Attention", [*parts, mask, *inputs[_PAST_KEY:_PAST_LENGTH]], outputs, "Attention", **attributes
    )
    y = join_heads(insert, attention.outputs[0], "output")
    # Without a cache, its present is the keys and values themselves.
    presents = list(attention.outputs[1:]) if has_cache else parts[1:]
    outputs_by_old = {old: new for old, new in zip(node.outputs, [y, *presents], strict=False) if old.name}
    for old, new in outputs_by_old.items():
        new.shape = new.shape if old.shape is None else old.shape
    replace(node, insert.nodes, outputs_by_old)
    ledger.changed(attention, GROUP_QUERY_LIFT(op=_OPERATOR), [node])


def _bias(graph: ir.Graph, node: ir.Node, widths: list[int], number: int, role: str) -> ir.Value:
    """Return the part of the bias for queries, keys or values, as a weight of its own."""
    value = weight_of(node, _BIAS)
    assert value is not None and value.const_value is not None
    begin, name = sum(widths[:number]), f"{value.name}.{role}"
    part = Slice.cut(expression_of(value.const_value), {0: slice(begin, begin + widths[number])})
    return new_weight(graph, name, WeightTensor(part, name))


def _mask(insert: Inserter, padding: ir.Value | None, bias: ir.Value | None, query: ir.Value) -> ir.Value:
    """Return the one mask for padding [batch, keys] or [batch, queries, keys] and what is added to scores."""
    masks = []
    if padding is not None:
        assert padding.shape is not None
        whole = ir.DataType.BOOL
        dims = list(padding.shape)
        visible = insert.op("Cast", [padding], dims, whole, "seen", to=whole)
        axes, wide = ([1, 2], [dims[0], 1, 1, dims[1]]) if len(dims) == 2 else ([1], [dims[0], 1, *dims[1:]])
        masks.append((insert.op("Unsqueeze", [visible, insert.integers(axes)], wide, whole, "seen.heads"), False))
    if bias is not None:
        masks.append((bias, False))
    mask = one_mask(insert, masks)
    assert mask is not None
    return with_queries(insert, mask, query)


def _inputs(node: ir.Node) -> list[ir.Value | None]:
    return [*node.inputs, *[None] * _INPUTS][:_INPUTS]
