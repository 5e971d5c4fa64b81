"""A difference in a few lines and one table: equal edits of many layers are one row."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from graphopt.report.console_table import ConsoleTable, figure_columns
from graphopt.report.escape import plain, ranges
from graphopt.report.tables import size_text
from graphopt.report.trace import Change, Diff, Edge, Group

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

_CHANGES, _OPERATORS = 4, 6
_NUMBER = re.compile(r"\d+")


def heading(difference: Diff) -> Iterator[str]:
    """Say in a few lines how much is different."""
    yield f"before: {plain(difference.before, 200)}: {difference.nodes[0]:,} nodes, {_size(difference, 0)}"
    yield f"after:  {plain(difference.after, 200)}: {difference.nodes[1]:,} nodes, {_size(difference, 1)}"
    if difference.stages:
        yield f"passes: {', '.join(dict.fromkeys(stage.name for stage in difference.stages))}"
    kinds = Counter(edge.kind for edge in difference.edges)
    counts = ", ".join(f"{kinds[kind]:,} {kind}" for kind in ("edited", "replaced", "added", "removed") if kinds[kind])
    yield f"{difference.kept:,} nodes are kept as they are" + (f"; {counts}" if counts else "")
    yield from ports(difference.ports)
    yield from (f"note: {note}" for note in difference.notes)
    if difference.equal:
        yield "equal: the same graph with the same weights"


def ports(changes: Sequence[Change]) -> Iterator[str]:
    """Say what became of inputs and outputs; those whose names differ in one number are one line."""
    groups: dict[tuple[str, str, str, str], list[tuple[str, int | None]]] = {}
    for change in changes:
        number = _NUMBER.search(change.name)
        name = change.name if number is None else f"{change.name[: number.start()]}{{}}{change.name[number.end() :]}"
        key = (change.what, name, change.before, change.after)
        groups.setdefault(key, []).append((change.name, None if number is None else int(number[0])))
    for (kind, name, before, after), members in groups.items():
        name_ = members[0][0]
        if len(members) > 1:
            name_ = name.replace("{}", ranges(number for _, number in members if number is not None))
        yield f"{kind} {name_}: {before} -> {after}"


def groups_table(difference: Diff, *, is_folded: bool = True) -> ConsoleTable | None:
    """Show what is different, equal edits together, and of each the first few changes if folded; ``None`` for none."""
    names = ("layers", "role", "before -> after", "what is different", "cause")
    table = ConsoleTable(["", *figure_columns("times"), *names])
    for group, edges in rows_of(difference):
        is_single = len(group.edges) == 1
        edge = edges[0]
        table.add_row(
            edge.kind,
            str(len(group.edges)),
            layer_text(group),
            edge.role,
            operators_text(edge, is_single) if len(edges) == 1 else _operator_list(edges),
            "\n".join(change_lines(edge, is_single, _CHANGES if is_folded else None)),
            cause(edge),
        )
    return table if table.rows else None


def rows_of(difference: Diff) -> Iterator[tuple[Group, list[Edge]]]:
    """Yield the groups, with their edges where they are shown; what was only added or removed in one place together."""
    by_key: dict[Hashable, list[Group]] = {}
    for number, group in enumerate(difference.groups):
        edge = difference.edges[group.edges[0]]
        is_pair = edge.kind in ("replaced", "edited")
        key = number if is_pair else (edge.kind, edge.role, tuple(edge.passes), edge.by, tuple(group.layers))
        by_key.setdefault(key, []).append(group)
    for groups in by_key.values():
        if len(groups) == 1:
            yield groups[0], [difference.edges[groups[0].edges[0]]]
        else:
            edges = [number for group in groups for number in group.edges]
            merged_group = Group(edges=edges, layers=groups[0].layers, missing=groups[0].missing)
            yield merged_group, [difference.edges[number] for number in edges]


def _operator_list(edges: Sequence[Edge]) -> str:
    counts = Counter(name for edge in edges for name in (*edge.operators[0], *edge.operators[1]))
    text = ", ".join(f"{count} x {name}" for name, count in counts.most_common(_OPERATORS))
    hidden = len(counts) - _OPERATORS
    return text + (f" and {hidden} other operators" if hidden > 0 else "")


def cause(edge: Edge) -> str:
    """Return what did it: the passes, or what tells that the nodes belong together."""
    return ", ".join(edge.passes) or (f"matched by {edge.by}" if edge.by not in ("", "record") else "")


def layer_text(group: Group) -> str:
    """Return the layers of a group, with those that lack it."""
    missing = f" (not {ranges(group.missing)})" if group.missing else ""
    return ranges(group.layers) + missing if group.layers else "outside"


def operators_text(edge: Edge, is_single: bool) -> str:
    """Return what became what: operators, with names where there is one edge only."""
    before, after = (", ".join(f"{n} x {name}" if n > 1 else name for name, n in Counter(names).items())
                     for names in edge.operators)  # fmt: skip
    text = after if before == after or not before else before if not after else f"{before} -> {after}"
    if not is_single:
        return text
    return f"{text} {', '.join(plain(name) for name in (edge.after or edge.before)[:2])}"


def change_lines(edge: Edge, is_single: bool, length: int | None = _CHANGES) -> Iterator[str]:
    """Yield what is different, in words; of an edge that stands for many, without the names of what is read."""
    lines = list(dict.fromkeys(_line(change, is_single) for change in edge.changes))
    yield from lines[:length]
    if length is not None and len(lines) > length:
        yield f"and {len(lines) - length} more"


def _line(change: Change, is_single: bool) -> str:
    if change.what == "operator":
        return "another operator"
    if change.what == "input":
        return (
            f"input {change.name}: {change.before} -> {change.after}" if is_single else f"input {change.name} differs"
        )
    if change.what == "attribute":
        return f"{change.name}: {change.before} -> {change.after}"
    if change.before != change.after:
        return f"weight {change.before} -> {change.after}"
    figures = change.figures
    distance = f" by {_percent(figures['relative'])} in root mean square" if "relative" in figures else ""
    share = f"{figures['changed']:.1%} of " if figures.get("changed", 1) < 1 else ""
    return f"weight {change.before}: {share}its numbers changed{distance}"


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= _LITTLE else f"{100 * share:.1g}%"


_LITTLE = 0.001


def _size(difference: Diff, side: int) -> str:
    return f"{difference.parameters[side]:,} parameters in {size_text(difference.bytes[side])}"
