"""From axes to bases: joined axes are one basis; an axis of several parts hands weights and pins down to them.

A fused projection writes ``[query | key | value]``, a head is one factor of the axis that a projection writes: where an
axis is made of smaller ones, these are the bases. An axis stays whole again where none of its parts could be rotated
anyway, so that a weight which reads it can be reached as a whole.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import networkx as nx

from graphopt.analysis.bases.axes import Axis, Basis, BasisGraph, Pin, Refinement, WeightAxis
from graphopt.analysis.bases.pins import CUT_OTHERWISE, NOT_CONTIGUOUS, PARTS_OBSERVED

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class _Component:
    """A connected set of axes, and what is known about it."""

    axes: list[Axis]
    width: int | None
    pins: list[Pin] = field(default_factory=list)
    refinement: Refinement | None = None

    @property
    def is_observed(self) -> bool:
        return self.refinement is None and any(pin.side == "observed" for pin in self.pins)


def bases_of(graph: BasisGraph) -> Iterator[Basis]:
    """Yield the bases of a filled graph of axes, in graph order."""
    _unify(graph)
    components = _components(graph)
    home = {axis: component for component in components for axis in component.axes}
    _settle_pins(components, home)
    writers, readers = (_hand_down(graph, components, home, kind) for kind in ("writers", "readers"))
    for component in components:
        if component.refinement is not None:
            continue
        tensor_axes = [axis for axis in component.axes if not axis.part] or component.axes
        marks = frozenset().union(*(graph.graph.nodes[axis]["marks"] for axis in component.axes))
        yield Basis(
            name=tensor_axes[0].tensor,
            width=component.width,
            axes=component.axes,
            writers=writers[id(component)],
            readers=readers[id(component)],
            pins=list(dict.fromkeys(component.pins)),
            marks=marks,
        )


def _components(graph: BasisGraph) -> list[_Component]:
    order = {axis: position for position, axis in enumerate(graph.graph)}
    sets = sorted(nx.connected_components(graph.graph), key=lambda axes: min(map(order.__getitem__, axes)))
    components = [_component(graph, sorted(axes, key=order.__getitem__)) for axes in sets]
    home = {axis: component for component in components for axis in component.axes}
    for refinement in graph.refinements:
        home[refinement.whole].refinement = refinement
    return components


def _component(graph: BasisGraph, axes: list[Axis]) -> _Component:
    widths = {width for axis in axes if (width := graph.width(axis)) is not None}
    pins = [pin for axis in axes for pin in graph.graph.nodes[axis]["pins"]]
    return _Component(axes, widths.pop() if len(widths) == 1 else None, pins)


def _unify(graph: BasisGraph) -> None:
    """Join the parts of axes that consist of the same parts twice; cut finer where the parts differ."""
    while True:
        home = {axis: number for number, axes in enumerate(nx.connected_components(graph.graph)) for axis in axes}
        groups = defaultdict(list)
        for refinement in graph.refinements:
            groups[home[refinement.whole]].append(refinement)
        conflicts = [group for group in groups.values() if len(group) > 1]
        if not conflicts:
            return
        for group in conflicts:
            for refinement in group:
                graph.refinements.remove(refinement)
            _merge(graph, group)


def _merge(graph: BasisGraph, group: list[Refinement]) -> None:
    sizes = _finest_sizes(group)
    if sizes is None:
        for refinement in group:
            axes = (refinement.whole, *refinement.parts)
            graph.pin_axes(axes, refinement.uses[0].node, CUT_OTHERWISE(), "observed")
        return
    finest = next((refinement for refinement in group if refinement.sizes == sizes), None)
    if finest is None:
        node, side, _ = group[0].uses[0]
        graph.refine(group[0].kind, group[0].whole, sizes, node, side)
        finest = graph.refinements.pop()
    graph.refinements.append(replace(finest, uses=[use for refinement in group for use in refinement.uses]))
    for refinement in group:
        if refinement is not finest:
            _match(graph, refinement, finest)


def _finest_sizes(group: list[Refinement]) -> tuple[int, ...] | None:
    """Return the sizes of parts that all refinements of one axis consist of; ``None`` where there are none."""
    kinds = {refinement.kind for refinement in group}
    cuts = list(itertools.pairwise(sorted(set().union(*(_cuts(refinement) for refinement in group)))))
    if kinds == {"sum"}:
        return tuple(b - a for a, b in cuts)
    # Factors are cut finer only if each cut divides the next, counted from the last axis on.
    if len(kinds) > 1 or any(b % a for a, b in cuts):
        return None
    return tuple(b // a for a, b in cuts)[::-1]


def _match(graph: BasisGraph, coarse: Refinement, fine: Refinement) -> None:
    """Join each part of ``coarse`` with the part of ``fine`` that it is, or let it consist of several."""
    bounds = _bounds(fine)
    for part, (begin, end) in zip(coarse.parts, _bounds(coarse), strict=True):
        inside = [piece for piece, (b, e) in zip(fine.parts, bounds, strict=True) if begin <= b and e <= end]
        if len(inside) == 1:
            graph.join(part, inside[0], None)
        elif inside:
            graph.refine(coarse.kind, part, inside, *coarse.uses[0][:2])


def _cuts(refinement: Refinement) -> set[int]:
    if refinement.kind == "sum":
        return set(itertools.accumulate(refinement.sizes, initial=0))
    return set(itertools.accumulate(reversed(refinement.sizes), lambda a, b: a * b, initial=1))


def _bounds(refinement: Refinement) -> list[tuple[int, int]]:
    """Return where each part begins and ends, in positions of a sum, or in minus strides of a product."""
    if refinement.kind == "sum":
        return list(itertools.pairwise(itertools.accumulate(refinement.sizes, initial=0)))
    strides = [math.prod(refinement.sizes[start:]) for start in range(len(refinement.sizes) + 1)]
    return [(-a, -b) for a, b in itertools.pairwise(strides)]


def _settle_pins(components: list[_Component], home: dict[Axis, _Component]) -> None:
    """Hand pins of a whole down to its parts; make an axis whole again where all of its parts are observed."""
    is_settled = False
    while not is_settled:
        is_settled = True
        for component in components:
            refinement = component.refinement
            if refinement is None:
                continue
            parts = [home[part] for part in refinement.parts]
            for pin in component.pins:
                for part in parts:
                    copy = replace(pin, side="observed")
                    if copy not in part.pins:
                        part.pins.append(copy)
                        is_settled = False
            if all(part.is_observed for part in parts):
                component.refinement = None
                component.pins.extend(_pins_of_whole(refinement, parts))
                is_settled = False


def _pins_of_whole(refinement: Refinement, parts: list[_Component]) -> Iterator[Pin]:
    deepest = next(pin for pin in parts[-1].pins if pin.side == "observed")
    for node, side, tensor in refinement.uses:
        if side == "made":
            yield Pin(node.name or "", PARTS_OBSERVED(op=node.op_type, observer=deepest.node), side, tensor)
        else:
            yield Pin(deepest.node, deepest.reason, side, tensor)


def _hand_down(
    graph: BasisGraph, components: list[_Component], home: dict[Axis, _Component], kind: str
) -> dict[int, list[WeightAxis]]:
    """Return weights by the component that they reach, with the positions of its copies on the weight's axis."""
    sites: dict[int, list[WeightAxis]] = {id(component): [] for component in components}
    for component in components:
        for axis in component.axes:
            for site in graph.graph.nodes[axis][kind]:
                _reach(site, component, home, sites)
    return sites


def _reach(
    site: WeightAxis, component: _Component, home: dict[Axis, _Component], sites: dict[int, list[WeightAxis]]
) -> None:
    refinement = component.refinement
    if refinement is None:
        sites[id(component)].append(site)
        return
    sizes = refinement.sizes
    for number, part in enumerate(refinement.parts):
        if refinement.kind == "sum":
            offset = sum(sizes[:number])
            starts = tuple(start + offset for start in site.starts)
        elif number == len(sizes) - 1:
            copies = range(math.prod(sizes[:-1]))
            starts = tuple(start + copy * sizes[-1] for start in site.starts for copy in copies)
        else:
            # The coordinates of an outer factor lie apart; only a basis that is contiguous is rotated.
            reason = NOT_CONTIGUOUS(reader=site.node.name)
            home[part].pins.append(Pin(site.node.name or "", reason, "observed", part.tensor))
            continue
        _reach(replace(site, starts=starts), home[part], home, sites)
