"""Keys and values that are made of a cache token by token, such as some of its heads, or heads that are repeated.

    f(Concat(past, new)) = Concat(f(past), f(new))      f looks at no two tokens together

So attention that reads f of a cache may as well store f of what is new in a cache of its own. Differential attention
(Ye et al. 2025) does: two products of one softmax each read half of the heads of the values, once for each head of
the keys.

    v = Concat(past, new);  y1 = Attention(q, k, Tile(Split(v)[0]), m);  y2 = Attention(q, k, Tile(Split(v)[1]), m)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.ports import CachePort, past_port
from graphopt.graph.editing import clone_node
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEY, _VALUE, _MASK, _PAST_KEY, _PAST_VALUE = range(1, 6)
_LENGTH = 2
"""The axis of tokens of keys and values [batch, heads, length, size]."""


@dataclass(frozen=True)
class TokenWise:
    """What attention without a cache of its own reads, token by token, of one that grows outside of it.

    Attributes:
        number: N in ``past_key_values.N.key``.
        steps: of keys and of values, the nodes from the cache on, in order, each with the output that is read.
        new: of both, what is new of the cache.
        pasts: of both, the inputs that hold the stored tokens.
        presents: of both, the cache with the new tokens.
    """

    number: int
    steps: tuple[tuple[ir.Value, ...], ...]
    new: tuple[ir.Value, ...]
    pasts: tuple[ir.Value, ...]
    presents: tuple[ir.Value, ...]


def token_wise_of(node: ir.Node) -> TokenWise | None:
    """Return what ``Attention`` reads of a cache that grows outside of it; ``None`` where it reads something else."""
    inputs = [*node.inputs, *[None] * 7][:7]
    if any(value is not None for value in inputs[_PAST_KEY:]):
        return None
    traces = [_trace(value) for value in inputs[_KEY:_MASK]]
    parts = [part for part in traces if part is not None]
    if len(parts) != len(traces):
        return None
    steps, presents, pasts, new = zip(*parts, strict=True)
    ports = [past_port(past) for past in pasts]
    if ports[0] is None or ports[0].part != "key" or ports[1] != CachePort(ports[0].layer, "value"):
        return None
    return TokenWise(ports[0].layer, steps, new, pasts, presents)


def _trace(value: ir.Value | None) -> tuple[tuple[ir.Value, ...], ir.Value, ir.Value, ir.Value] | None:
    """Return the values that lead from a cache to ``value``, the cache, its past, and what is new of it."""
    steps: list[ir.Value] = []
    while value is not None:
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type == "Concat":
            past, new = node.inputs if len(node.inputs) == 2 else (None, None)
            is_cache = past is not None and past.is_graph_input() and node.attributes.get_int("axis", 0) in (2, -2)
            return (tuple(reversed(steps)), value, past, new) if is_cache and past is not None and new else None
        if not _is_token_wise(node):
            return None
        steps.append(value)
        value = node.inputs[0]
    return None


def _is_token_wise(node: ir.Node) -> bool:
    """Return whether a node of [batch, heads, length, size] makes each token of the result of that token alone."""
    before, after = None if node.inputs[0] is None else node.inputs[0].shape, node.outputs[0].shape
    if before is None or after is None or (len(before), len(after)) != (4, 4) or before[_LENGTH] != after[_LENGTH]:
        return False
    if before[0] != after[0]:
        return False
    match node.op_type:
        case "Identity":
            return True
        case "Split":
            return node.attributes.get_int("axis", 0) % 4 in (1, 3)
        case "Tile" | "Expand":
            # The shapes say that batch and length stay. What an Expand wants may be computed from the length.
            counts = weight_of(node, 1)
            return counts is not None and counts.const_value is not None and counts.const_value.size == 4
        case "Gather":
            return node.attributes.get_int("axis", 0) % 4 in (1, 3) and weight_of(node, 1) is not None
    return False


def of_new_tokens(graph: ir.Graph, steps: Sequence[ir.Value], new: ir.Value, before: ir.Node) -> ir.Value:
    """Return what the steps make of new tokens [batch, heads, length, size]; nodes are inserted before ``before``."""
    for step in steps:
        node = step.producer()
        assert node is not None and step.shape is not None and new.shape is not None
        copy = clone_node(node, [new, *node.inputs[1:]], f"{node.name}.of_new.{before.name}")
        for output, old in zip(copy.outputs, node.outputs, strict=True):
            assert old.shape is not None
            output.name, output.type = f"{old.name}.of_new.{before.name}", old.type
            output.shape = ir.Shape([*old.shape[:_LENGTH], new.shape[_LENGTH], *old.shape[_LENGTH + 1 :]])
        graph.insert_before(before, copy)
        new = copy.outputs[step.index() or 0]
    return new
