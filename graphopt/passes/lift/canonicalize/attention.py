"""Attention as the standard op has it: grouped heads not repeated, the cache inside.

Repeated heads (grouped-query attention, Ainslie et al. 2023), with R = query heads / KV heads:

    Attention(q, Reshape(Expand(Unsqueeze(k, 2), [.., R, ..])), ...)   ->   Attention(q, k, ...)

Heads that are tiled, as JetMoE does: query head h reads KV head h mod the KV heads. Queries change places, and back:

    Attention(q, Tile(k, [1, R, 1, 1]), Tile(v, [1, R, 1, 1]), m)
      ->   Gather(Attention(Gather(q, order; axis=1), k, v, m), <order back>; axis=1)

Cache:

    present = Concat(past, new; axis=2);  Attention(q, present_k, present_v, mask)
      ->   y, present_k, present_v = Attention(q, new_k, new_v, mask, past_k, past_v)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import Inserter, name_output, replace
from graphopt.graph.weights import weight_of
from graphopt.passes.common.nodes import attentions

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from graphopt.passes.context import Ledger

_KEY, _VALUE, _PAST_KEY = 1, 2, 4

HEADS_GROUPED = Rule("canonicalize.heads-grouped", "reads grouped KV heads instead of repeated ones")
ONE_REPEATED = Rule("canonicalize.one-repeated", "only one of key and value is repeated per query head")
CACHE_TAKEN = Rule("canonicalize.cache-taken", "appends to its cache itself")
NO_APPENDING = Rule(
    "canonicalize.no-appending", "its keys or values are no Concat of a cache input and new ones along the length"
)
CACHE_IN_MASK = Rule(
    "canonicalize.cache-in-mask",
    "{input} is computed from {cache}, the cache with the new tokens, which the node would only then make",
)


def group_heads(model: ir.Model, ledger: Ledger) -> None:
    """Let ``Attention`` read each KV head once instead of a copy per query head."""
    for node in attentions(model):
        bases = [_before_repeat(node.inputs[index], node.inputs[0]) for index in (_KEY, _VALUE)]
        if bases[0] is None and bases[1] is None:
            _group_tiled_heads(model.graph, node, ledger)
            continue
        if bases[0] is None or bases[1] is None:
            ledger.skipped(node, ONE_REPEATED())
            continue
        for index, base in zip((_KEY, _VALUE), bases, strict=True):
            node.replace_input_with(index, base)
        ledger.changed(node, HEADS_GROUPED(), [b for b in bases if b is not None])


def _group_tiled_heads(graph: ir.Graph, node: ir.Node, ledger: Ledger) -> None:
    """Let ``Attention`` whose keys and values are tiled read each KV head once, with its queries in another order."""
    bases = [_before_tile(node.inputs[index]) for index in (_KEY, _VALUE)]
    query, mask = node.inputs[0], node.inputs[3] if len(node.inputs) > 3 else None
    if bases[0] is None or bases[1] is None or query is None or query.shape is None or len(query.shape) != 4:
        return
    heads, kv_heads = query.shape[1], {base.shape[1] for base in bases if base is not None and base.shape is not None}
    is_alike = mask is None or (mask.shape is not None and len(mask.shape) == 4 and mask.shape[1] == 1)
    last = _guard_behind(node.outputs[0])
    if len(kv_heads) > 1 or not is_alike or len(node.outputs) > 1 or not isinstance(heads, int):
        return
    if last.outputs[0].is_graph_output():
        return
    order = np.arange(heads).reshape(-1, int(str(*kv_heads))).T.ravel()
    insert = Inserter(graph, node, node.name or "attention")
    indices = [insert.integers(heads_in_order.tolist()) for heads_in_order in (order, np.argsort(order))]
    dims = list(query.shape)
    node.replace_input_with(0, insert.op("Gather", [query, indices[0]], dims, query.dtype, "by_group", axis=1))
    for index, base in zip((_KEY, _VALUE), bases, strict=True):
        node.replace_input_with(index, base)
    output = last.outputs[0]
    back = ir.node("Gather", [output, indices[1]], {"axis": 1}, name=f"{node.name}.ungrouped")
    uses = list(output.uses())
    graph.insert_after(last, back)
    name_output(back, output, list(output.shape or dims))
    for use in uses:
        if use.node is not back:
            use.node.replace_input_with(use.idx, back.outputs[0])
    ledger.changed(node, HEADS_GROUPED(), [base for base in bases if base is not None])
    ledger.changed(back, HEADS_GROUPED(), [node])


def _guard_behind(y: ir.Value) -> ir.Node:
    """Return the guard for queries that see no key, which is the same for all heads, or else what makes ``y``."""
    users = {use.node for use in y.uses()}
    node = y.producer()
    assert node is not None
    for user in users:
        condition = user.inputs[0]
        is_guard = user.op_type == "Where" and not user.domain and len(users) == 1 and user.inputs[2] is y
        if is_guard and condition is not None and condition.shape is not None and condition.shape[1] == 1:
            return user
    return node


def _before_tile(value: ir.Value | None) -> ir.Value | None:
    """Return the [batch, KV heads, keys, size] value whose heads are tiled to ``value``, or ``None``."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Tile" or node.domain or value is None or value.shape is None:
        return None
    base, repeats = node.inputs[0], weight_of(node, 1)
    expand = None if base is None else base.producer()
    if expand is not None and expand.op_type == "Expand" and _keeps_shape(expand):
        base = expand.inputs[0]
    if base is None or base.shape is None or repeats is None or repeats.const_value is None:
        return None
    counts = repeats.const_value.numpy().tolist()
    is_static = isinstance(base.shape[1], int) and len(base.shape) == 4
    return base if is_static and len(counts) == 4 and [*counts[:1], *counts[2:]] == [1, 1, 1] else None


def _keeps_shape(node: ir.Node) -> bool:
    """Return whether a node's output is known to have the shape of its first input."""
    before, after = None if node.inputs[0] is None else node.inputs[0].shape, node.outputs[0].shape
    if before is None or after is None:
        return False
    are_known = all(isinstance(dim, int) or dim.value is not None for dim in before)
    return are_known and list(before) == list(after)


def _before_repeat(value: ir.Value | None, query: ir.Value | None) -> ir.Value | None:
    """Return the [batch, KV heads, keys, size] value that ``value`` repeats head by head, or ``None``."""
    if value is None or query is None or query.shape is None:
        return None
    reshape = value.producer()
    expand = _producer(reshape, "Reshape")
    unsqueeze = _producer(expand, "Expand")
    base = unsqueeze.inputs[0] if unsqueeze is not None and unsqueeze.op_type == "Unsqueeze" else None
    if base is None or reshape is None or expand is None or unsqueeze is None:
        return None
    axes = weight_of(unsqueeze, 1)
    wide, tall = expand.outputs[0].shape, value.shape
    if axes is None or axes.const_value is None or axes.const_value.numpy().tolist() != [2]:
        return None
    if base.shape is None or wide is None or tall is None or (len(base.shape), len(wide), len(tall)) != (4, 5, 4):
        return None
    heads, repeats, size = base.shape[1], wide[2], base.shape[3]
    if not (isinstance(heads, int) and isinstance(repeats, int) and isinstance(size, int)):
        return None
    is_same = wide[1] == heads and wide[4] == size and tall[1] == heads * repeats == query.shape[1] and tall[3] == size
    return base if is_same else None


def _producer(node: ir.Node | None, op_type: str) -> ir.Node | None:
    """Return what computes the first input of ``node``, if ``node`` is an ``op_type``."""
    if node is None or node.op_type != op_type or node.inputs[0] is None:
        return None
    return node.inputs[0].producer()


def take_cache(model: ir.Model, ledger: Ledger) -> None:
    """Let ``Attention`` append to its cache itself."""
    for node in attentions(model):
        if len(node.inputs) > _PAST_KEY and node.inputs[_PAST_KEY] is not None:
            continue
        concats = [_appends(node.inputs[index]) for index in (_KEY, _VALUE)]
        if concats[0] is None or concats[1] is None:
            ledger.skipped(node, NO_APPENDING())
            continue
        pairs = [(concat.inputs[0], concat.inputs[1], concat.outputs[0]) for concat in concats if concat is not None]
        (past_key, key, present_key), (past_value, value, present_value) = pairs
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        circle = _dependence((node.inputs[0], mask), (present_key, present_value))
        if circle is not None:
            ledger.skipped(node, CACHE_IN_MASK(input=circle[0].name, cache=circle[1].name))
            continue
        inputs = [node.inputs[0], key, value, mask, past_key, past_value]
        count = max(3, len(node.outputs))
        attention = ir.node("Attention", inputs, dict(node.attributes), num_outputs=count, name=node.name)
        olds = (node.outputs[0], present_key, present_value, *node.outputs[3:])
        replace(node, attention, dict(zip(olds, attention.outputs, strict=True)))
        if any(value.uses() for value in attention.outputs[1:3]):
            # What else reads the cache, such as a sum of the exponents of all scores, stood in front of the softmax.
            model.graph.sort()
        ledger.changed(attention, CACHE_TAKEN(), [concat.name or "" for concat in concats if concat])


def _appends(value: ir.Value | None) -> ir.Node | None:
    """Return the node that appends new keys or values to a cache input, if ``value`` is its result."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 2 or value is None:
        return None
    past = node.inputs[0]
    if past is None or not past.is_graph_input() or node.attributes.get_int("axis") not in (2, -2):
        return None
    return node


def _dependence(inputs: Iterable[ir.Value | None], caches: Collection[ir.Value]) -> tuple[ir.Value, ir.Value] | None:
    """Return an input and the cache that it is computed from, if there is such a pair."""
    for source in inputs:
        pending = [] if source is None else [source]
        ancestors = set(pending)
        while pending:
            value = pending.pop()
            if value in caches and source is not None:
                return source, value
            node = value.producer()
            parents = {parent for parent in (node.inputs if node is not None else ()) if parent is not None} - ancestors
            ancestors |= parents
            pending += parents
    return None
