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
from graphopt.analysis.bases.pins import APART, CUT_OTHERWISE, PARTS_OBSERVED

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
    def hopeless(self) -> bool:
        return self.refinement is None and any(pin.side == "observed" for pin in self.pins)


def bases_of(found: BasisGraph) -> Iterator[Basis]:
    """Yield the bases of a filled graph of axes, in graph order."""
    _unify(found)
    components = _components(found)
    home = {axis: component for component in components for axis in component.axes}
    _settle_pins(components, home)
    writers, readers = (_hand_down(found, components, home, what) for what in ("writers", "readers"))
    for component in components:
        if component.refinement is not None:
            continue
        real = [axis for axis in component.axes if not axis.part] or component.axes
        marks = frozenset().union(*(found.graph.nodes[axis]["marks"] for axis in component.axes))
        yield Basis(
            name=real[0].tensor,
            width=component.width,
            axes=component.axes,
            writers=writers[id(component)],
            readers=readers[id(component)],
            pins=list(dict.fromkeys(component.pins)),
            marks=marks,
        )


def _components(found: BasisGraph) -> list[_Component]:
    order = {axis: position for position, axis in enumerate(found.graph)}
    made = []
    for joined in sorted(nx.connected_components(found.graph), key=lambda axes: min(order[a] for a in axes)):
        axes = sorted(joined, key=order.__getitem__)
        data = [found.graph.nodes[axis] for axis in axes]
        widths = {entry["width"] for entry in data if entry["width"] is not None}
        component = _Component(axes, widths.pop() if len(widths) == 1 else None)
        component.pins = [pin for entry in data for pin in entry["pins"]]
        made.append(component)
    home = {axis: component for component in made for axis in component.axes}
    for refinement in found.refinements:
        home[refinement.whole].refinement = refinement
    return made


def _unify(found: BasisGraph) -> None:
    """Join the parts of axes that consist of the same parts twice; cut finer where the parts differ."""
    while True:
        home = {axis: number for number, axes in enumerate(nx.connected_components(found.graph)) for axis in axes}
        groups = defaultdict(list)
        for refinement in found.refinements:
            groups[home[refinement.whole]].append(refinement)
        several = [group for group in groups.values() if len(group) > 1]
        if not several:
            return
        for group in several:
            for refinement in group:
                found.refinements.remove(refinement)
            _merge(found, group)


def _merge(found: BasisGraph, group: list[Refinement]) -> None:
    kinds = {refinement.kind for refinement in group}
    cuts = sorted(set().union(*(_cuts(refinement) for refinement in group)))
    # Factors are cut finer only if each cut divides the next, counted from the last axis on.
    if len(kinds) > 1 or ("product" in kinds and any(b % a for a, b in itertools.pairwise(cuts))):
        for refinement in group:
            reason = CUT_OTHERWISE()
            for axis in (refinement.whole, *refinement.parts):
                found.pin(axis, refinement.places[0][0].name or "", reason, "observed")
        return
    kind = group[0].kind
    if kind == "product":
        sizes = tuple(b // a for a, b in itertools.pairwise(cuts))[::-1]
    else:
        sizes = tuple(b - a for a, b in itertools.pairwise(cuts))
    first = next((refinement for refinement in group if refinement.sizes == sizes), None)
    node, side, _ = group[0].places[0]
    if first is None:
        found.refine(kind, group[0].whole, sizes, node, side)
        first = found.refinements.pop()
        first.places.clear()
    places = [place for refinement in group for place in refinement.places]
    found.refinements.append(replace(first, places=places))
    for refinement in group:
        if refinement is not first:
            _match(found, refinement, first)


def _match(found: BasisGraph, coarse: Refinement, fine: Refinement) -> None:
    """Join each part of ``coarse`` with the part of ``fine`` that it is, or let it consist of several."""
    bounds = _bounds(fine)
    for part, (begin, end) in zip(coarse.parts, _bounds(coarse), strict=True):
        inside = [piece for piece, (b, e) in zip(fine.parts, bounds, strict=True) if begin <= b and e <= end]
        if len(inside) == 1:
            found.join(part, inside[0], None)
        elif inside:
            found.refine(coarse.kind, part, inside, *coarse.places[0][:2])


def _cuts(refinement: Refinement) -> set[int]:
    if refinement.kind == "sum":
        return set(itertools.accumulate(refinement.sizes, initial=0))
    return set(itertools.accumulate(reversed(refinement.sizes), lambda a, b: a * b, initial=1))


def _bounds(refinement: Refinement) -> list[tuple[int, int]]:
    """Return where each part begins and ends, in positions of a sum, or in minus strides of a product."""
    if refinement.kind == "sum":
        return list(itertools.pairwise(itertools.accumulate(refinement.sizes, initial=0)))
    strides = [math.prod(refinement.sizes[place:]) for place in range(len(refinement.sizes) + 1)]
    return [(-a, -b) for a, b in itertools.pairwise(strides)]


def _settle_pins(components: list[_Component], home: dict[Axis, _Component]) -> None:
    """Hand pins of a whole down to its parts; make an axis whole again where all of its parts are observed."""
    changed = True
    while changed:
        changed = False
        for component in components:
            refinement = component.refinement
            if refinement is None:
                continue
            parts = [home[part] for part in refinement.parts]
            for pin in component.pins:
                for part in parts:
                    inherited = replace(pin, side="observed")
                    if inherited not in part.pins:
                        part.pins.append(inherited)
                        changed = True
            if all(part.hopeless for part in parts):
                component.refinement = None
                component.pins.extend(_pins_of_whole(refinement, parts))
                changed = True


def _pins_of_whole(refinement: Refinement, parts: list[_Component]) -> Iterator[Pin]:
    deepest = next(pin for pin in parts[-1].pins if pin.side == "observed")
    for node, side, tensor in refinement.places:
        if side == "made":
            yield Pin(node.name or "", PARTS_OBSERVED(op=node.op_type, observer=deepest.node), side, tensor)
        else:
            yield Pin(deepest.node, deepest.reason, side, tensor)


def _hand_down(
    found: BasisGraph, components: list[_Component], home: dict[Axis, _Component], what: str
) -> dict[int, list[WeightAxis]]:
    """Return weights by the component that they reach, with the places of its copies on the weight's axis."""
    sites: dict[int, list[WeightAxis]] = {id(component): [] for component in components}
    for component in components:
        for axis in component.axes:
            for site in found.graph.nodes[axis][what]:
                _place(site, component, home, sites)
    return sites


def _place(
    site: WeightAxis, component: _Component, home: dict[Axis, _Component], sites: dict[int, list[WeightAxis]]
) -> None:
    refinement = component.refinement
    if refinement is None:
        sites[id(component)].append(site)
        return
    sizes = refinement.sizes
    for place, part in enumerate(refinement.parts):
        if refinement.kind == "sum":
            offset = sum(sizes[:place])
            starts = tuple(start + offset for start in site.starts)
        elif place == len(sizes) - 1:
            copies = range(math.prod(sizes[:-1]))
            starts = tuple(start + copy * sizes[-1] for start in site.starts for copy in copies)
        else:
            # The coordinates of an outer factor lie apart; only a basis that is contiguous is rotated.
            reason = APART(reader=site.node.name)
            home[part].pins.append(Pin(site.node.name or "", reason, "observed", part.tensor))
            continue
        _place(replace(site, starts=starts), home[part], home, sites)
