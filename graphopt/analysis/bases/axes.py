"""Axes of tensors as a graph: joined by ops, taken apart into smaller ones, written and read by weights, pinned."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import networkx as nx

from graphopt.analysis.bases.pins import CONSTANT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import onnx_ir as ir

    from graphopt.graph.diagnostics import Fact

Role = Literal["residual", "value", "query_key", "weight_input", "weight_output"]
Side = Literal["made", "observed"]


@dataclass(frozen=True)
class Axis:
    """One axis of one tensor; ``index`` counts from the front, ``part`` names a piece that no tensor has as an axis."""

    tensor: str
    index: int
    part: str = ""


@dataclass(frozen=True)
class WeightAxis:
    """Axis ``axis`` of the weight that is input ``input`` of ``node``, seen as a writer or a reader of a basis.

    The basis lies at ``start .. start + width`` of that axis for each of ``starts``: several heads, say, of which each
    is a copy of the basis.
    """

    node: ir.Node
    input: int
    axis: int
    starts: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Pin:
    """A node that fixes the coordinates of a basis, and why.

    ``made``: the node gives ``tensor`` its coordinates, so a rotation could follow behind it at run time.
    ``observed``: the node takes ``tensor`` in these coordinates and no others.
    """

    node: str
    reason: Fact
    side: Side
    tensor: str


@dataclass
class Basis:
    """A set of axes that share a basis.

    Attributes:
        name: the first tensor of the graph that lies in it.
        width: its dimension, or ``None`` where it varies at run time.
        axes: the axes, in the order of the graph.
        writers: weights that write it.
        readers: weights that read it.
        pins: what keeps it from being rotated by changing weights alone; empty where nothing does.
        marks: what attention does with it: ``query_key`` is contracted with its like, ``value`` is passed on.
    """

    name: str
    width: int | None
    axes: list[Axis]
    writers: list[WeightAxis] = field(default_factory=list)
    readers: list[WeightAxis] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)
    marks: frozenset[Role] = frozenset()

    @property
    def role(self) -> Role:
        """What it is to the model; any basis between weights that attention does not touch counts as ``residual``."""
        if "query_key" in self.marks:
            return "query_key"
        if "value" in self.marks:
            return "value"
        if self.writers and self.readers:
            return "residual"
        return "weight_input" if self.readers else "weight_output"


class AxisUse(NamedTuple):
    """A node that makes the axis of a tensor of parts, or takes it apart into them."""

    node: ir.Node
    side: Side
    tensor: str


@dataclass
class Refinement:
    """An axis that some node makes of smaller ones, or takes apart into them.

    ``product``: coordinate i of the whole is (i // size, i % size) of the parts, as in ``Reshape``; ``sum``: the parts
    lie behind one another, as in ``Split``.
    """

    kind: Literal["product", "sum"]
    whole: Axis
    parts: tuple[Axis, ...]
    sizes: tuple[int, ...]
    uses: list[AxisUse]


class BasisGraph:
    """The graph of axes that rules fill.

    Attributes:
        graph: axes as nodes with what touches them; edges join two axes that are one basis, labelled by the op.
        refinements: axes that consist of others.
    """

    def __init__(self) -> None:
        self.graph: nx.Graph[Axis] = nx.Graph()
        self.refinements: list[Refinement] = []

    def axis(self, value: ir.Value, index: int) -> Axis:
        """Return axis ``index`` (negative counts from the back) of ``value``, whose rank is known, as a node."""
        assert value.shape is not None
        axis = Axis(value.name or "", index % len(value.shape))
        if axis not in self.graph:
            self._add(axis, static_size(value.shape[axis.index]))
            if value.is_initializer():
                self.pin(axis, value, CONSTANT(), "made")
        return axis

    def axes(self, value: ir.Value) -> list[Axis]:
        """Return all axes of ``value``; none where its rank is not known."""
        return [] if value.shape is None else [self.axis(value, index) for index in range(len(value.shape))]

    def join(self, axis: Axis, twin: Axis, node: ir.Node | None) -> None:
        """Record that ``node`` forces two axes into one basis."""
        self.graph.add_edge(axis, twin, op=None if node is None else node.op_type)

    def width(self, axis: Axis) -> int | None:
        """Return the dimension of ``axis``, or ``None`` where it varies at run time."""
        width: int | None = self.graph.nodes[axis]["width"]
        return width

    def pin(self, axis: Axis, origin: ir.Node | ir.Value, reason: Fact, side: Side) -> None:
        """Record that a node, or a value without one, makes or observes the coordinates of ``axis``."""
        self.graph.nodes[axis]["pins"].append(Pin(origin.name or "", reason, side, axis.tensor))

    def pin_axes(self, axes: Iterable[Axis], origin: ir.Node | ir.Value, reason: Fact, side: Side) -> None:
        """Pin each of ``axes`` in the same way."""
        for axis in axes:
            self.pin(axis, origin, reason, side)

    def mark(self, axis: Axis, role: Role) -> None:
        """Record what attention does with ``axis``."""
        self.graph.nodes[axis]["marks"].add(role)

    def add_writer(self, axis: Axis, node: ir.Node, position: int, weight_axis: int) -> None:
        """Record that a weight writes ``axis``."""
        self.graph.nodes[axis]["writers"].append(WeightAxis(node, position, weight_axis))

    def add_reader(self, axis: Axis, node: ir.Node, position: int, weight_axis: int) -> None:
        """Record that a weight reads ``axis``."""
        self.graph.nodes[axis]["readers"].append(WeightAxis(node, position, weight_axis))

    def refine(
        self,
        kind: Literal["product", "sum"],
        whole: Axis,
        parts: Sequence[Axis | int | None],
        node: ir.Node,
        side: Side,
    ) -> tuple[Axis, ...]:
        """Record that ``whole`` consists of ``parts``; a number stands for a part of that size that is no axis itself.

        ``side`` is ``made`` where ``node`` makes the whole of its parts, ``observed`` where it takes the whole apart.
        """
        axes = tuple(
            part if isinstance(part, Axis) else self._piece(whole, f"{node.name}.{number}", part)
            for number, part in enumerate(parts)
        )
        sizes = tuple(self.graph.nodes[axis]["width"] for axis in axes)
        self.refinements.append(Refinement(kind, whole, axes, sizes, [AxisUse(node, side, whole.tensor)]))
        return axes

    def _piece(self, whole: Axis, part: str, width: int | None) -> Axis:
        axis = Axis(whole.tensor, whole.index, part)
        self._add(axis, width)
        return axis

    def _add(self, axis: Axis, width: int | None) -> None:
        self.graph.add_node(axis, width=width, writers=[], readers=[], pins=[], marks=set())


def static_size(dim: object) -> int | None:
    """Return a dimension as a number where it is one; the exporter also writes a fixed 8 as the symbol ``"8"``."""
    if isinstance(dim, int):
        return dim
    text = str(dim)
    return int(text) if text.isdigit() else None
