"""Attention as the standard op has it: grouped heads not repeated, the cache inside.

Repeated heads (grouped-query attention, Ainslie et al. 2023), with R = query heads / KV heads:

    Attention(q, Reshape(Expand(Unsqueeze(k, 2), [.., R, ..])), ...)   ->   Attention(q, k, ...)

Cache:

    present = Concat(past, new; axis=2);  Attention(q, present_k, present_v, mask)
      ->   y, present_k, present_v = Attention(q, new_k, new_v, mask, past_k, past_v)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.diagnostics import Rule
from graphopt.graph.editing import replace
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
            continue
        if bases[0] is None or bases[1] is None:
            ledger.skipped(node, ONE_REPEATED())
            continue
        for index, base in zip((_KEY, _VALUE), bases, strict=True):
            node.replace_input_with(index, base)
        ledger.changed(node, HEADS_GROUPED(), [b for b in bases if b is not None])


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
