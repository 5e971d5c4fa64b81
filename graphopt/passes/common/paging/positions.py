"""Positions inside the cache: what lets a model that streams go on past the length that it was trained on.

A query at position p that reads a key at position j sees only p - j, as rotary embeddings are relative (Su et al.
2021). Of the newest tokens p - j stays below the window whatever p is. Of the first ones it grows without bound, and
models answer distances that they never saw with noise. So the query has a second form for them, turned as if the tokens
between did not exist (positions inside the cache: StreamingLLM, Xiao et al. 2024, section 3.2; a cap on the distance:
LM-Infinite, Han et al. 2024, section 4)::

    q = RotaryEmbedding(x, cos(p w), sin(p w))
      ->  q, and q' = RotaryEmbedding(x, cos(p' w), sin(p' w)),  p' = min(p, sinks + recent - 1)

    angle = Cast(p, float32) * w     ->     angle = Cast(Cast(p, float64) * Cast(w, float64) mod 2 pi, float32)

In float32 an angle is wrong by 6e-8 of itself: at a million tokens that is 0.06 radians for the fastest pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.paged_caches import UNBOUNDED_POSITIONS, kv_nodes, layer_of
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import clone_node, name_output, replace, shared_constant
from graphopt.graph.weights import weight_of
from graphopt.passes.common.paging.states import graph_input
from graphopt.runtime_ops import DOMAIN, port, schema_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from graphopt.passes.context import Ledger

_POSITIONS = "position_ids"
_COS, _SIN, _INDICES = 1, 2, 3


WIDE_ANGLES = Rule("positions.wide-angles", "angles are computed in float64, so that positions may be of any size")
POSITION_CAP = Rule("positions.capped", "reads its first tokens from position {position} at most")
BOUND = Rule("positions.bound", "sequences end where the model's positions do: {why}")
READS_MEAN = Rule("positions.reads-mean", "{node} reads a mean of keys at any distance")
NO_POSITIONS = Rule("positions.no-input", "it has no input {input}, so nothing turns its queries")
NO_ROTARY = Rule("positions.no-rotary", "the query of {node} comes from no RotaryEmbedding")
FROM_TABLE = Rule("positions.from-table", "{node} reads its angles from a table, which has an end")
POSITIONS_READ = Rule("positions.read-too", "{op} {node} reads positions too")


def unbind_positions(graph: ir.Graph, ledger: Ledger) -> None:
    """Make positions endless where every layer drops old tokens; report why where something needs them."""
    layers = {node: layer_of(node) for node in kv_nodes(graph)}
    if not layers or not all(layer.wraps for layer in layers.values()):
        return
    compensating = [node for node, layer in layers.items() if layer.attributes.compensate]
    if compensating:
        ledger.skipped(_POSITIONS, BOUND(why=READS_MEAN(node=compensating[0].name)))
        return
    queries = {
        node: query
        for node, layer in layers.items()
        if layer.attributes.sinks and not layer.has_unbounded_positions and (query := port(node, "query")) is not None
    }
    reason = bound(graph, queries)
    if reason is not None:
        ledger.skipped(_POSITIONS, BOUND(why=reason))
        return
    for node, product in exact_angles(graph).items():
        ledger.changed(node, WIDE_ANGLES(), [product])
    caps: dict[int, CappedQueries] = {}
    for node, query in queries.items():
        cap = layers[node].reach - 1
        output = caps.setdefault(cap, CappedQueries(graph, cap)).cap_query(query)
        node.replace_input_with(schema_of(node).index("sink_query"), output)
        ledger.changed(node, POSITION_CAP(position=cap), [node])
    for node in layers:
        node.metadata_props[UNBOUNDED_POSITIONS] = "1"


def bound(graph: ir.Graph, queries: Mapping[ir.Node, ir.Value]) -> Fact | None:
    """Return what keeps the graph from positions of any size, or ``None``.

    Args:
        graph: the graph.
        queries: the query of each ``KVAttention`` node that is to read its first tokens by another angle.
    """
    positions = [value for value in graph.inputs if value.name == _POSITIONS]
    if not positions:
        return NO_POSITIONS(input=_POSITIONS)
    for node, query in queries.items():
        rotary = _rotary(query)
        if rotary is None:
            return NO_ROTARY(node=node.name)
        if len(rotary.inputs) > _INDICES and rotary.inputs[_INDICES] is not None:
            return FROM_TABLE(node=rotary.name)
    for node in _readers(positions[0]):
        if node.op_type != "RotaryEmbedding" and node.op_type not in _ELEMENTWISE:
            return POSITIONS_READ(op=node.op_type, node=node.name)
    return None


def exact_angles(graph: ir.Graph) -> dict[ir.Node, str]:
    """Compute all products of positions with frequencies in float64, modulo 2 pi.

    Returns:
        The nodes that now make the angles, each with the name of the product that did.
    """
    output: dict[ir.Node, str] = {}
    readers = _readers(graph_input(graph, _POSITIONS), until=("Cos", "Sin"))
    for node in [node for node in readers if node.op_type in ("Mul", "MatMul")]:
        if node.outputs[0].dtype not in (ir.DataType.FLOAT, None):
            continue
        name = node.name
        # Integers up to 2^24 are exact as float32, but positions go further: the cast is bypassed.
        wide = [
            _cast(graph, _before_cast(value), ir.DataType.DOUBLE, node) for value in node.inputs if value is not None
        ]
        product = ir.node(node.op_type, wide, name=f"{name}.float64")
        turn = shared_constant(graph, "two_pi", np.array(2 * np.pi, np.float64))
        remainder = ir.node("Mod", [product.outputs[0], turn], {"fmod": 1}, name=f"{name}.turn")
        back = ir.node("Cast", [remainder.outputs[0]], {"to": ir.DataType.FLOAT}, name=f"{name}.angle")
        for value, dtype in ((product, ir.DataType.DOUBLE), (remainder, ir.DataType.DOUBLE), (back, ir.DataType.FLOAT)):
            name_output(value, node.outputs[0], dtype=dtype)
        replace(node, [product, remainder, back])
        output[back] = name or "?"
    return output


class CappedQueries:
    """Makes queries whose positions go no further than a cap; what several of them need is made once.

    Args:
        graph: the graph, for which :func:`bound` found nothing.
        cap: the largest position, in tokens.
    """

    def __init__(self, graph: ir.Graph, cap: int) -> None:
        self._graph, self._cap = graph, cap
        self._copies: dict[ir.Value, ir.Value] = {}

    def cap_query(self, query: ir.Value) -> ir.Value:
        """Return ``query`` as its tokens would have it at the capped position; same shape, same type."""
        node = query.producer()
        assert node is not None and node.inputs[0] is not None
        if node.op_type == "RotaryEmbedding":
            angles = [self._cap_value(node.inputs[index], node) for index in (_COS, _SIN)]
            return self._copy(node, [node.inputs[0], *angles, *node.inputs[_INDICES:]], node)
        return self._copy(node, [self.cap_query(node.inputs[0]), *node.inputs[1:]], node)

    def _cap_value(self, value: ir.Value | None, before: ir.Node) -> ir.Value | None:
        """Return ``value``, which is made of positions, as capped positions make it."""
        if value is None or value.is_initializer():
            return value
        if value not in self._copies:
            node = value.producer()
            if value.name == _POSITIONS and node is None:
                cap = shared_constant(self._graph, f"position.{self._cap}", np.array(self._cap, np.int64))
                minimum = ir.node("Min", [value, cap], name=f"{_POSITIONS}.capped.{self._cap}")
                self._graph.insert_before(self._graph[0], minimum)
                self._copies[value] = name_output(minimum, value)
            elif node is None or not node.inputs:
                return value
            else:
                inputs = [self._cap_value(value, before) for value in node.inputs]
                if inputs == list(node.inputs):
                    return value
                self._copies[value] = self._copy(node, inputs, node)
        return self._copies[value]

    def _copy(self, node: ir.Node, inputs: list[ir.Value | None], after: ir.Node) -> ir.Value:
        output = clone_node(node, inputs, f"{node.name}.sinks")
        self._graph.insert_after(after, output)
        return name_output(output, node.outputs[0], name=f"{node.outputs[0].name}.sinks")


_ELEMENTWISE = frozenset(
    (
        "Unsqueeze",
        "Cast",
        "Mul",
        "MatMul",
        "Cos",
        "Sin",
        "Concat",
        "Expand",
        "Reshape",
        "Transpose",
        "Mod",
        "Slice",
        "Min",
    )
)
"""What may make angles of positions; each takes positions of any size."""


def _readers(positions: ir.Value, until: Collection[str] = ()) -> list[ir.Node]:
    """Return the nodes that positions flow into, up to operators ``until`` and rotary embeddings, in no order."""
    waiting, sources = [positions], list[ir.Node]()
    while waiting:
        for use in waiting.pop().uses():
            if use.node not in sources:
                sources.append(use.node)
                if use.node.op_type in _ELEMENTWISE and use.node.op_type not in until:
                    waiting.extend(use.node.outputs)
    return sources


def _rotary(query: ir.Value) -> ir.Node | None:
    """Return the rotary embedding behind ``query``, through what turns each head alike."""
    node = query.producer()
    while node is not None and (
        node.op_type in ("Reshape", "Transpose")
        or (node.op_type, node.domain) == ("Hadamard", DOMAIN)
        or (node.op_type == "MatMul" and weight_of(node, 1) is not None)
    ):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node if node is not None and node.op_type == "RotaryEmbedding" and not node.domain else None


def _before_cast(value: ir.Value) -> ir.Value:
    node = value.producer()
    return node.inputs[0] if node is not None and node.op_type == "Cast" and node.inputs[0] is not None else value


def _cast(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, before: ir.Node) -> ir.Value:
    node = ir.node("Cast", [value], {"to": dtype}, name=f"{before.name}.{value.name}.wide")
    graph.insert_before(before, node)
    return name_output(node, value, dtype=dtype)
