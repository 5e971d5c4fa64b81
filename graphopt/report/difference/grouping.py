"""Equal edges of many layers as one: 80 layers of the same edit are one row, with the layers that lack it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graphopt.report.trace import Change, Edge, Group

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

_KINDS = ("replaced", "edited", "added", "removed")


def group_edges(edges: Sequence[Edge], folds: Sequence[Sequence[int]]) -> list[Group]:
    """Put edges together that are the same but for their layer.

    Args:
        edges: what is different.
        folds: layers of one structure.
    """
    numbers_of: dict[Hashable, list[int]] = {}
    for number, edge in enumerate(edges):
        numbers_of.setdefault(_key(edge), []).append(number)
    groups = [_group(edges, numbers, folds) for numbers in numbers_of.values()]
    return sorted(groups, key=lambda group: (_KINDS.index(edges[group.edges[0]].kind), -len(group.edges)))


def _key(edge: Edge) -> Hashable:
    before, after = edge.operators
    return (
        edge.kind,
        edge.role,
        edge.layer is None,
        tuple(sorted(Counter(before).items())),
        tuple(sorted(Counter(after).items())),
        tuple(edge.passes),
        tuple(sorted({_change_key(change) for change in edge.changes})),
    )


def _change_key(change: Change) -> tuple[str, ...]:
    """Return what of a change is the same in all layers: not the names of what is read."""
    if change.what == "input":
        return change.what, change.name
    return change.what, change.name, change.before, change.after


def _group(edges: Sequence[Edge], numbers: list[int], folds: Sequence[Sequence[int]]) -> Group:
    layers = sorted({layer for number in numbers if (layer := edges[number].layer) is not None})
    missing: list[int] = []
    if len(layers) > 1:
        candidates = [fold for fold in folds if set(layers) <= set(fold)]
        # Half of the layers or fewer are not all but some.
        missing = [layer for layer in max(candidates, key=len, default=[]) if layer not in layers]
        missing = missing if len(missing) < len(layers) else []
    return Group(edges=numbers, layers=layers, missing=missing)
