"""Axes of tensors as a graph: joined by ops, written and read by weights, pinned by what observes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx
import onnx_ir as ir


@dataclass(frozen=True)
class Axis:
    """One axis of one tensor; ``index`` counts from the front."""

    tensor: str
    index: int


@dataclass(frozen=True)
class WeightAxis:
    """Axis ``axis`` of the weight that is input ``input`` of ``node``, seen as a writer or a reader of a basis."""

    node: ir.Node
    input: int
    axis: int


@dataclass(frozen=True)
class Pin:
    """A node that observes the coordinates of a basis, and why."""

    node: str
    reason: str


@dataclass
class Basis:
    """A set of axes that share a basis.

    Attributes:
        name: the first tensor of the graph that lies in it.
        width: its dimension, or ``None`` where it varies at run time.
        axes: the axes, in the order of the graph.
        writers: weights that write it.
        readers: weights that read it.
        pins: what keeps it from being rotated; empty where nothing does.
    """

    name: str
    width: int | None
    axes: list[Axis]
    writers: list[WeightAxis] = field(default_factory=list)
    readers: list[WeightAxis] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)


class BasisGraph:
    """The graph of axes that rules fill; :attr:`graph` is the networkx graph, its edges labelled by the joining op."""

    def __init__(self) -> None:
        self.graph: nx.Graph[Axis] = nx.Graph()

    def axis(self, value: ir.Value, index: int, rank: int) -> Axis:
        """Return axis ``index`` (negative counts from the back) of ``value`` as a node of the graph."""
        axis = Axis(value.name or "", index % rank)
        if axis not in self.graph:
            known = value.shape is not None and len(value.shape) == rank
            width = value.shape[axis.index] if known and value.shape is not None else None
            pins = [] if known else [Pin(axis.tensor, "its shape is not known, so what reads it cannot be followed")]
            self.graph.add_node(
                axis, width=width if isinstance(width, int) else None, writers=[], readers=[], pins=pins
            )
        return axis

    def join(self, left: Axis, right: Axis, node: ir.Node) -> None:
        """Record that ``node`` forces two axes into one basis."""
        self.graph.add_edge(left, right, op=node.op_type)

    def pin(self, axis: Axis, node: str, reason: str) -> None:
        """Record that ``node`` observes the coordinates of ``axis``."""
        self.graph.nodes[axis]["pins"].append(Pin(node, reason))

    def write(self, axis: Axis, node: ir.Node, position: int, weight_axis: int) -> None:
        """Record that a weight writes ``axis``."""
        self.graph.nodes[axis]["writers"].append(WeightAxis(node, position, weight_axis))

    def read(self, axis: Axis, node: ir.Node, position: int, weight_axis: int) -> None:
        """Record that a weight reads ``axis``."""
        self.graph.nodes[axis]["readers"].append(WeightAxis(node, position, weight_axis))

    def bases(self) -> Iterator[Basis]:
        """Yield the connected sets of axes, in the order of the graph."""
        order = {axis: position for position, axis in enumerate(self.graph)}
        for component in sorted(nx.connected_components(self.graph), key=lambda axes: min(order[a] for a in axes)):
            axes = sorted(component, key=order.__getitem__)
            data = [self.graph.nodes[axis] for axis in axes]
            widths = {entry["width"] for entry in data if entry["width"] is not None}
            yield Basis(
                name=axes[0].tensor,
                width=widths.pop() if len(widths) == 1 else None,
                axes=axes,
                writers=[writer for entry in data for writer in entry["writers"]],
                readers=[reader for entry in data for reader in entry["readers"]],
                pins=[pin for entry in data for pin in entry["pins"]],
            )
