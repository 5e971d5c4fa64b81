"""Parts of a graph that could be a norm: row by row they make ``y`` of ``x`` and of constants, around a reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.weights import weight_of
from graphopt.passes.common.nodes import scalar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

OTHER_READ = Rule("canonicalize.norm-reads-more", "it reads {tensor} too, which is not made of one row and constants")
TOO_LONG = Rule("canonicalize.norm-too-long", "it is made of more than {nodes} nodes")
RETYPES = Rule("canonicalize.norm-retypes", "it turns {before} into {after}")
READ_INSIDE = Rule("canonicalize.norm-read-inside", "{tensor} inside it is read elsewhere")
ROUNDS_INSIDE = Rule("canonicalize.norm-rounds-inside", "{op} {node} rounds to {dtype} inside it")
SUMS_NARROW = Rule("canonicalize.norm-sums-narrow", "{op} {node} sums numbers of {dtype}")
SPANS = Rule("canonicalize.norm-spans", "it spans the axes from {axis} on, not the last alone")
AXES_UNKNOWN = Rule("canonicalize.norm-axes-unknown", "the axes that it sums along are computed, or all")
SUMS_ALONG = Rule("canonicalize.norm-sums-along", "it sums along the axes {axes}, not along the last alone")

NORMS = ("LayerNormalization", "RMSNormalization")
_REDUCTIONS = ("ReduceL2", "ReduceMean", "ReduceSum", "ReduceSumSquare")
_ELEMENTWISE = frozenset(
    ("Abs", "Add", "Cast", "Clip", "Div", "Identity", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "Sqrt", "Sub")
)
_ROW_WISE = frozenset((*_ELEMENTWISE, *_REDUCTIONS, *NORMS, "Squeeze", "Unsqueeze"))
# The longest spellings seen have about 15 nodes.
_MAX_NODES = 32
_MOST_CONSTANT = 8


@dataclass(frozen=True)
class Region:
    """What makes ``y`` of ``x``: ``nodes`` in order, those that make constants of constants among them."""

    x: ir.Value
    y: ir.Value
    nodes: tuple[ir.Node, ...]


def seeds(graph: ir.Graph) -> list[ir.Node]:
    """Return the nodes that a norm could be spelled around, in order: reductions, and norms with more around them."""
    return [node for node in graph if not node.domain and node.op_type in (*_REDUCTIONS, *NORMS)]


def ends(seed: ir.Node, position: Mapping[ir.Node, int]) -> list[ir.Value]:
    """Return the values that a norm around ``seed`` could end in, the last first; empty where no root is taken.

    Args:
        seed: one of :func:`seeds`.
        position: the place of each node in the graph.
    """
    cone: list[ir.Node] = [seed]
    for node in cone:
        for user in (use.node for use in node.outputs[0].uses()):
            if _is_row_wise(user) and user not in cone and len(cone) < _MAX_NODES:
                cone.append(user)
    if not any(map(takes_root, cone)):
        return []
    # The output of a reduction has no rows any more. A region that ends in a wrong cast is refused by its type later.
    return [node.outputs[0] for node in sorted(cone, key=position.__getitem__, reverse=True) if not _reduces(node)]


def region_of(seed: ir.Node, y: ir.Value, position: Mapping[ir.Node, int]) -> Region | Fact:
    """Return the smallest region that makes ``y`` around ``seed`` and begins in one value, or why there is none."""
    nodes: set[ir.Node] = set()
    frontier = {y}
    while True:
        x = max(frontier, key=lambda value: _place_of(value, position))
        node = x.producer()
        if len(frontier) == 1 and seed in nodes and not _widens(node, y):
            break
        if node is None or not _is_row_wise(node):
            return OTHER_READ(tensor=x.name)
        if len(nodes) >= _MAX_NODES:
            return TOO_LONG(nodes=_MAX_NODES)
        frontier.remove(x)
        nodes.add(node)
        for value in node.inputs:
            if value is None or value.is_initializer():
                continue
            branch = _constant_nodes(value)
            if branch is None:
                frontier.add(value)
            else:
                nodes.update(branch)
    if x.dtype is not None and y.dtype is not None and x.dtype != y.dtype:
        return RETYPES(before=x.dtype.name, after=y.dtype.name)
    region = Region(x, y, tuple(sorted(nodes, key=position.__getitem__)))
    return _why_open(region) or _why_rounded(region) or region


def _place_of(value: ir.Value, position: Mapping[ir.Node, int]) -> int:
    node = value.producer()
    return -1 if node is None else position[node]


def _widens(node: ir.Node | None, y: ir.Value) -> bool:
    """Return whether ``node`` casts from the type of ``y`` to another: exporters compute norms in float32."""
    source = node.inputs[0] if node is not None and node.op_type == "Cast" else None
    return source is not None and y.dtype is not None and source.dtype == y.dtype


def _is_row_wise(node: ir.Node) -> bool:
    """Return whether ``node`` could treat each row of the last axis by itself; running it tells."""
    if node.domain or node.op_type not in _ROW_WISE:
        return False
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 0)).is_floating_point()
    return len(node.outputs) == 1 or all(not output.uses() for output in node.outputs[1:])


def _reduces(node: ir.Node) -> bool:
    return node.op_type in _REDUCTIONS


def takes_root(node: ir.Node) -> bool:
    """Return whether ``node`` makes a divisor of a norm: a root, a power, an L2 norm."""
    if node.op_type == "Pow":
        exponent = scalar(node.inputs[1])
        return exponent is not None and exponent not in (1.0, 2.0)
    return node.op_type in ("Sqrt", "ReduceL2", *NORMS)


def _constant_nodes(value: ir.Value, depth: int = _MOST_CONSTANT) -> set[ir.Node] | None:
    """Return the nodes that make ``value`` of constants alone, or ``None`` if it depends on anything else."""
    node = value.producer()
    if value.is_initializer():
        return set()
    if node is None or not depth or node.domain or not node.inputs or len(node.outputs) > 1:
        return None
    constants = {node}
    for operand in node.inputs:
        branch = set() if operand is None else _constant_nodes(operand, depth - 1)
        if branch is None:
            return None
        constants |= branch
    return constants


def _why_open(region: Region) -> Fact | None:
    inside = set(region.nodes)
    for node in region.nodes:
        if all(value is None or _constant_nodes(value) is not None for value in node.inputs):
            continue  # a constant may be read by anyone
        for value in node.outputs:
            outside = value.is_graph_output() or any(use.node not in inside for use in value.uses())
            if value is not region.y and outside:
                return READ_INSIDE(tensor=value.name)
    return None


def _why_rounded(region: Region) -> Fact | None:
    """Return why ``region`` loses precision: it rounds to a narrower type inside, or sums in less than float32."""
    outer_dtype = region.y.dtype or region.x.dtype or ir.DataType.FLOAT
    for node in region.nodes:
        for value in node.outputs:
            if (
                value.dtype is not None
                and value.dtype.is_floating_point()
                and value.dtype.bitwidth < outer_dtype.bitwidth
            ):
                return ROUNDS_INSIDE(op=node.op_type, node=node.name, dtype=value.dtype.name)
        summed_dtype = node.inputs[0].dtype if _reduces(node) and node.inputs[0] is not None else None
        if summed_dtype is not None and summed_dtype.bitwidth < ir.DataType.FLOAT.bitwidth:
            return SUMS_NARROW(op=node.op_type, node=node.name, dtype=summed_dtype.name)
    return None


def why_not_last_axis(node: ir.Node) -> Fact | None:
    """Return why a reduction or norm does not work along the last axis alone, or ``None``."""
    x = node.inputs[0]
    # Of an axis counted from the front, running tells, where the rank is not stated.
    last: Collection[int] = (-1, *range(8)) if x is None or x.shape is None else (-1, len(x.shape) - 1)
    if node.op_type in NORMS:
        axis = node.attributes.get_int("axis", -1)
        return None if axis in last else SPANS(axis=axis)
    axes = weight_of(node, 1)
    if axes is None or axes.const_value is None:
        return AXES_UNKNOWN()
    numbers = axes.const_value.numpy().reshape(-1).tolist()
    return None if len(numbers) == 1 and numbers[0] in last else SUMS_ALONG(axes=numbers)


def constants(region: Region) -> Iterator[ir.Value]:
    """Yield the initializers that ``region`` reads, each once, in order."""
    constants = dict.fromkeys(v for node in region.nodes for v in node.inputs if v is not None and v.is_initializer())
    yield from constants
