"""One layer drawn as a graph: nodes in rows by their distance from what the layer reads, edges as curves.

Nodes that do the same to the same are one box, such as those of eight experts. Rows are ordered so that few edges
cross: each node goes to the mean place of its neighbours, a few times down and up (Sugiyama, Tagawa and Toda, 1981).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from graphopt.analysis.structure.roles import OTHER_ROLE, SHARED_ROLE
from graphopt.report.escape import plain
from graphopt.report.page.html import Html, el

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from graphopt.report.trace import Node, Trace

_WIDTH, _HEIGHT, _ACROSS, _DOWN, _MARGIN = 158, 38, 22, 26, 12
_SWEEPS, _LARGEST, _TEXT = 6, 150, 22


def drawing(trace: Trace, fold: int) -> Html:
    """Return the archetype of a fold as SVG; nodes that only make constants are left out."""
    layer = trace.folds[fold].layers[0]
    helps = _constants(trace)
    inside = [number for number, node in enumerate(trace.nodes) if node.layer == layer and number not in helps]
    first = _equal(trace, inside, helps)
    numbers = [number for number in inside if first[number] == number]
    if not numbers or len(numbers) > _LARGEST:
        return el("p", f"{len(numbers)} nodes: too many to draw, see the list of nodes", class_="note")
    pairs = ((first[m], reader) for reader in numbers for m in trace.nodes[reader].reads if m in first)
    edges = list(dict.fromkeys(pairs))
    rows, chains = _ranks(numbers, edges)
    rows = _order_rows(rows, [pair for chain in chains for pair in pairwise(chain)])
    corner_of, width = _corners(rows)
    height = 2 * _MARGIN + len(rows) * (_HEIGHT + _DOWN) - _DOWN
    lines = (el("path", d="".join(_path([corner_of[cell] for cell in chain])), class_="edge") for chain in chains)
    copies: dict[int, list[int]] = {number: [] for number in numbers}
    for number in inside:
        copies[first[number]].append(number)
    boxes = (_box(trace, copies[number], *corner_of[number]) for number in numbers)
    size_of = {"viewBox": f"0 0 {width:.0f} {height:.0f}", "width": f"{width:.0f}", "height": f"{height:.0f}"}
    title = f"layer {layer}: {len(inside)} nodes"
    return el(
        "div", el("svg", el("g", lines), el("g", boxes), role="group", aria_label=title, **size_of), class_="scroll"
    )


def _corners(rows: Sequence[Sequence[int]]) -> tuple[dict[int, tuple[float, float]], float]:
    """Return for each cell the middle of its upper edge, and the width of the drawing; cells below 0 have no width."""
    widths = [sum(_ACROSS + (_WIDTH if cell >= 0 else 0) for cell in row) - _ACROSS for row in rows]
    corner_of: dict[int, tuple[float, float]] = {}
    for depth, (row, row_width) in enumerate(zip(rows, widths, strict=True)):
        x = _MARGIN + (max(widths) - row_width) / 2
        for cell in row:
            size = _WIDTH if cell >= 0 else 0
            corner_of[cell] = (x + size / 2, _MARGIN + depth * (_HEIGHT + _DOWN))
            x += size + _ACROSS
    return corner_of, max(widths) + 2 * _MARGIN


def _equal(trace: Trace, boxes: Sequence[int], helps: Collection[int]) -> dict[int, int]:
    """Return for each node the first one of its operator and role that reads the same, or what equals that."""
    first_of: dict[object, int] = {}
    first: dict[int, int] = {}
    for number in boxes:
        node = trace.nodes[number]
        weights = tuple((trace.weights[weight].format, tuple(trace.weights[weight].shape)) for weight in node.weights)
        reads = tuple(first.get(maker, maker) for maker in node.reads if maker not in helps)
        identity = None if reads else number
        first[number] = first_of.setdefault((node.operator, node.role, weights, reads, identity), number)
    return first


def _constants(trace: Trace) -> set[int]:
    """Return nodes that read no other node, and that nothing but products or lookups reads: they make constants."""
    constants: set[int] = set()
    for number, node in enumerate(trace.nodes):
        if (
            node.role not in (OTHER_ROLE, SHARED_ROLE)
            and not node.weights
            and all(source in constants for source in node.reads)
        ):
            constants.add(number)
    return constants


def _ranks(boxes: Sequence[int], edges: Sequence[tuple[int, int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the rows, and for each edge the numbers that it passes: in each row between its ends one below 0."""
    depth = dict.fromkeys(boxes, 0)
    reads: dict[int, list[int]] = {number: [] for number in boxes}
    for maker, reader in edges:
        reads[reader].append(maker)
    for number in boxes:  # in the order of the graph, so makers come first
        depth[number] = 1 + max((depth[maker] for maker in reads[number]), default=-1)
    rows: list[list[int]] = [[] for _ in range(1 + max(depth.values()))]
    for number in boxes:
        rows[depth[number]].append(number)
    chains, through = [], 0
    for maker, reader in edges:
        chain = [maker]
        for row in rows[depth[maker] + 1 : depth[reader]]:
            through -= 1
            row.append(through)
            chain.append(through)
        chains.append([*chain, reader])
    return rows, chains


def _order_rows(rows: list[list[int]], edges: Sequence[tuple[int, int]]) -> list[list[int]]:
    neighbours: tuple[dict[int, list[int]], dict[int, list[int]]] = ({}, {})
    for maker, reader in edges:
        neighbours[0].setdefault(reader, []).append(maker)
        neighbours[1].setdefault(maker, []).append(reader)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for number in range(len(rows)) if down else reversed(range(len(rows))):
            position = {node: index - len(row) / 2 for row in rows for index, node in enumerate(row)}
            rows[number].sort(key=lambda node: _mean(neighbours[0 if down else 1].get(node, []), position, node))
    return rows


def _mean(nodes: Sequence[int], position: Mapping[int, float], default: int) -> float:
    return sum(position[node] for node in nodes) / len(nodes) if nodes else position[default]


def _path(points: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Yield a curve from the lower edge of the first box to the upper edge of the last, straight beside others."""
    x, y = points[0][0], points[0][1] + _HEIGHT
    yield f"M{x:.0f} {y:.0f}"
    for u, v in points[1:]:
        bend = (v - y) * 0.6
        yield f"C{x:.0f} {y + bend:.0f} {u:.0f} {v - bend:.0f} {u:.0f} {v:.0f}"
        yield f"V{v + _HEIGHT:.0f}" if (u, v) != points[-1] else ""
        x, y = u, v + _HEIGHT


def _box(trace: Trace, numbers: Sequence[int], x: float, y: float) -> Html:
    node = trace.nodes[numbers[0]]
    name, subtitle = label_of(trace, node)
    name = name if len(numbers) == 1 else f"{name} x {len(numbers)}"
    kind = "product" if node.weights and node.role.endswith("proj") else "attention" if node.role == "attention" else ""
    kind = kind or ("norm" if "norm" in node.role else "plain")
    return el(
        "g",
        el("title", plain(node.name, 200)),
        el("rect", x=f"{x - _WIDTH / 2:.0f}", y=f"{y:.0f}", width=_WIDTH, height=_HEIGHT, rx=6),
        el("text", plain(name, _TEXT), x=f"{x:.0f}", y=f"{y + (16 if subtitle else 23):.0f}"),
        el("text", plain(subtitle, _TEXT + 4), x=f"{x:.0f}", y=f"{y + 30:.0f}", class_="small") if subtitle else None,
        class_=f"box {kind}",
        data_node=numbers[0],
        data_same=" ".join(map(str, numbers)) if len(numbers) > 1 else None,
        tabindex=0,
        role="button",
    )


def label_of(trace: Trace, node: Node) -> tuple[str, str]:
    """Return what a node is for, and below it its operator and in what its weights are stored."""
    operator = node.operator.rpartition("::")[2]
    formats = [trace.weights[number].format for number in node.weights if trace.weights[number].parameters]
    if node.role in (OTHER_ROLE, SHARED_ROLE):
        return operator, formats[0] if formats else ""
    return node.role, f"{operator}, {formats[0]}" if formats else operator
