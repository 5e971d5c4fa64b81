"""The trunk of a graph: the nodes that every path from tokens to logits crosses. They cut the graph into segments.

    tokens -> embedding -> [attention, Add] -> [MLP, Add] -> ... -> norm -> lm_head -> logits
                       cut              cut           cut       cut     cut

What the data do not reach, such as masks, positions, rotary tables and shapes, is in no path. It belongs to the segment
that alone reads it, or to the globals. No name is read: the tokens are the root that reaches most products, the logits
the output that needs most nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.runtime_ops import signature_of

_SHAPES = frozenset({"Shape", "Size"})
"""What they make does not depend on the numbers that they read."""

_BRANCHES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)

_PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose"})


@dataclass
class Segment:
    """A part of the graph between two nodes that every path crosses.

    Attributes:
        nodes: in the order of the graph.
        end: the last of them, which every path crosses; ``None`` where the segment makes side outputs only.
    """

    nodes: list[ir.Node]
    end: ir.Node | None


@dataclass
class Cuts:
    """A graph cut into segments.

    Attributes:
        segments: from tokens to logits.
        common_nodes: the nodes that several segments read, and those that none reads, in the order of the graph.
        segment_of: the number of the segment of each node that is in one.
    """

    segments: list[Segment]
    common_nodes: list[ir.Node]
    segment_of: dict[ir.Node, int]


def inputs_of(node: ir.Node) -> list[ir.Value]:
    """Return what a node reads, also from inside its subgraphs."""
    values = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.type not in _BRANCHES:
            continue
        for graph in [attribute.value] if attribute.type == _BRANCHES[0] else attribute.value:
            inner = set(graph)
            for inner_node in graph:
                values += (value for value in inputs_of(inner_node) if value.producer() not in inner)
            values += (value for value in graph.outputs if value.producer() not in inner)
    return values


def is_product(node: ir.Node) -> bool:
    """Return whether a node multiplies matrices, or convolves."""
    signature = signature_of(node)
    return node.op_type in _PRODUCTS or (signature is not None and signature.is_product)


Division = tuple[dict[ir.Node, int], set[ir.Node]]
"""The number of the segment of each node, and the last nodes of segments."""

Divide = Callable[[Sequence[ir.Node], Mapping[ir.Node, int]], Division | None]
"""Divides a path further, given its nodes and the segment of each; ``None`` to leave it."""


def cut(graph: ir.Graph, divide: Divide | None = None) -> Cuts:
    """Cut a graph at the nodes that every path from tokens to logits crosses.

    Args:
        graph: the graph.
        divide: what divides the path where there are few such nodes.
    """
    nodes = list(graph)
    constants = constant_nodes(nodes)
    readers = readers_of(nodes)
    data = _data(graph, nodes, constants)
    ancestors = data & _ancestors(_sink(graph, nodes))
    ends = set(crossings([node for node in nodes if node in ancestors], readers))
    segment_of = _number_segments([node for node in nodes if node in data], ends)
    division = None if divide is None else divide([node for node in nodes if node in data], segment_of)
    if division is not None:
        segment_of, ends = division
    _claim(nodes, segment_of, readers)
    return Cuts(_segments(nodes, segment_of, ends), [node for node in nodes if node not in segment_of], segment_of)


def _segments(nodes: list[ir.Node], segment_of: dict[ir.Node, int], ends: set[ir.Node]) -> list[Segment]:
    members: list[list[ir.Node]] = [[] for _ in range(1 + max(segment_of.values(), default=-1))]
    for node in nodes:
        if node in segment_of:
            members[segment_of[node]].append(node)
    last = {segment_of[node]: node for node in nodes if node in ends}
    return [Segment(segment_nodes, last.get(number)) for number, segment_nodes in enumerate(members)]


def readers_of(nodes: Iterable[ir.Node]) -> dict[ir.Node, list[ir.Node]]:
    """Return the nodes that read what each node makes, by themselves or in their subgraphs."""
    readers: dict[ir.Node, list[ir.Node]] = {node: [] for node in nodes}
    for node in readers:
        for value in inputs_of(node):
            producer = value.producer()
            if producer in readers and producer is not None:
                readers[producer].append(node)
    return readers


def constant_nodes(nodes: Iterable[ir.Node]) -> set[ir.Node]:
    """Return the nodes that read nothing but constants, such as those that turn codes into a matrix."""
    constants: set[ir.Node] = set()
    for node in nodes:
        if all(value.is_initializer() or value.producer() in constants for value in inputs_of(node)):
            constants.add(node)
    return constants


def _sink(graph: ir.Graph, nodes: list[ir.Node]) -> ir.Node | None:
    """Return what makes the output that is farthest from the inputs."""
    depth: dict[ir.Node, int] = {}
    for node in nodes:
        sources = (value.producer() for value in inputs_of(node))
        depth[node] = 1 + max((depth[maker] for maker in sources if maker is not None and maker in depth), default=0)
    makers = [producer for value in graph.outputs if (producer := value.producer()) is not None and producer in depth]
    return max(makers, key=depth.__getitem__, default=None)


def _ancestors(node: ir.Node | None) -> set[ir.Node]:
    ancestors: set[ir.Node] = set()
    waiting = [node]
    while waiting:
        maker = waiting.pop()
        if maker is not None and maker not in ancestors:
            ancestors.add(maker)
            waiting += [value.producer() for value in inputs_of(maker)]
    return ancestors


def _data(graph: ir.Graph, nodes: list[ir.Node], constants: set[ir.Node]) -> set[ir.Node]:
    """Return what depends on the numbers of the lookup, or input of floats, that reaches most products."""
    floats = [value for value in graph.inputs if value.dtype is not None and value.dtype.is_floating_point()]
    lookups = [node for node in nodes if node not in constants and _looks_up(node, constants)]
    roots: list[ir.Node | ir.Value] = [*lookups, *floats] or [*graph.inputs]
    bits: dict[object, int] = {root: 1 << number for number, root in enumerate(roots)}
    sources = _sources(nodes, constants, bits)
    products = [sources[node] for node in nodes if is_product(node)]
    best = max(bits.values(), key=lambda bit: sum(1 for product in products if product & bit), default=0)
    return {node for node, roots in sources.items() if roots & best}


def _sources(nodes: list[ir.Node], constants: set[ir.Node], bits: Mapping[object, int]) -> dict[ir.Node, int]:
    """Return for each node the bits of the roots whose numbers it depends on."""
    sources: dict[ir.Node, int] = {}
    for node in nodes:
        sources[node] = bits.get(node, 0)
        if node.op_type not in _SHAPES and node not in constants:
            for value in inputs_of(node):
                producer = value.producer()
                sources[node] |= bits.get(value, 0) if producer is None else sources.get(producer, 0)
    return sources


def _looks_up(node: ir.Node, constants: set[ir.Node]) -> bool:
    if not node.op_type.startswith("Gather") or not node.inputs:
        return False
    # Gather has its table in front, our lookup of packed codes the tokens.
    tables = node.inputs if signature_of(node) is not None else node.inputs[:1]
    stored_tables = [
        table for table in tables if table is not None and (table.is_initializer() or table.producer() in constants)
    ]
    return any(len(table.shape or ()) >= 2 for table in stored_tables)


def crossings(
    nodes: Sequence[ir.Node], readers: Mapping[ir.Node, Sequence[ir.Node]], farthest: int = -1
) -> list[ir.Node]:
    """Return the nodes that every path crosses, of those that lie on a path, given in topological order.

    Every path crosses a node if, and only if, no edge jumps over its place in the order.

    Args:
        nodes: the nodes on paths.
        readers: the nodes that read what each makes.
        farthest: the place of the last node that an edge from outside leads to.
    """
    position = {node: number for number, node in enumerate(nodes)}
    ends = []
    for number, node in enumerate(nodes):
        if farthest <= number:
            ends.append(node)
        farthest = max([farthest, *(position[reader] for reader in readers[node] if reader in position)])
    return ends


def _number_segments(data: list[ir.Node], ends: set[ir.Node]) -> dict[ir.Node, int]:
    segment_of: dict[ir.Node, int] = {}
    for node in data:
        makers = (value.producer() for value in inputs_of(node))
        segment_of[node] = max(
            (segment_of[maker] + (maker in ends) for maker in makers if maker is not None and maker in segment_of),
            default=0,
        )
    return segment_of


def _claim(nodes: list[ir.Node], segment_of: dict[ir.Node, int], readers: dict[ir.Node, list[ir.Node]]) -> None:
    """Give each node that the data do not reach to the segment that alone reads it."""
    claims: dict[ir.Node, set[int]] = {}
    for node in reversed(nodes):
        if node in segment_of:
            continue
        outward = any(output.is_graph_output() for output in node.outputs)
        claims[node] = {-1} if outward or not readers[node] else set()
        for reader in readers[node]:
            claims[node] |= claims[reader] if reader in claims else {segment_of[reader]}
        if len(claims[node]) == 1 and -1 not in claims[node]:
            segment_of[node] = next(iter(claims[node]))
