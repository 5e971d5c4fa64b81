"""A trace in a few tables: layers of one structure are one, with how many there are and what is different in some."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from graphopt.analysis.structure.roles import OTHER_ROLE, SHARED_ROLE
from graphopt.report.console_table import ConsoleTable, figure_columns
from graphopt.report.escape import count_text, letters, plain, ranges
from graphopt.report.sentences import fold_reasons, sentence
from graphopt.report.tables import size_text
from graphopt.report.trace import Node, Repeat, Trace
from graphopt.report.trace_builder import BYTES, OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from graphopt.graph.diagnostics import Fact


@dataclass
class Row:
    """The nodes of one role in all layers of one fold, or outside of layers.

    Attributes:
        fold: the fold, ``None`` outside of layers.
        role: what they are for.
        nodes: how many there are.
        formats: in what their weights are stored, how often.
        layers: of each format, the layers.
        parameters: numbers of the model; a weight that several read counts at the first.
        bytes: as they are stored, scales included.
        computes: in what they compute, how often.
        runners: who runs them, how often.
        operations: per token.
        bytes_read: bytes of weights and caches per token.
        passes: how many nodes each pass touched.
        skips: why a pass left nodes alone: by pass and reason, the layers.
    """

    fold: int | None
    role: str
    nodes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    layers: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    parameters: int = 0
    bytes: int = 0
    computes: Counter[str] = field(default_factory=Counter)
    runners: Counter[str] = field(default_factory=Counter)
    operations: int = 0
    bytes_read: int = 0
    passes: Counter[str] = field(default_factory=Counter)
    skips: dict[tuple[str, Fact], list[int | None]] = field(default_factory=lambda: defaultdict(list))

    def add_node(self, node: Node) -> None:
        """Count a node, in what it computes, who runs it, and the passes that touched it or left it alone."""
        self.nodes += 1
        self.runners[node.runner] += 1
        self.passes.update(node.passes)
        self.computes.update([node.computes] if node.computes is not None else [])
        for skip in node.left:
            self.skips[skip.by, skip.why].append(node.layer)

    def add_formats(self, node: Node, formats: list[str]) -> None:
        """Count a node at the format of its first weight."""
        for name in formats[:1]:
            self.formats[name] += 1
            if node.layer is not None:
                self.layers[name].append(node.layer)

    @property
    def odd(self) -> dict[str, list[int]]:
        """Of each format that is not that of most, the layers."""
        majority = self.formats.most_common(1)[0][0] if self.formats else ""
        return {name: layers for name, layers in self.layers.items() if name != majority and layers}


def rows(trace: Trace, is_selected: Callable[[Node], bool] | None = None) -> list[Row]:
    """Put nodes of one role and one fold together.

    Args:
        trace: of the model.
        is_selected: which nodes to count; all by default.
    """
    by_key: dict[tuple[int | None, str], Row] = {}
    counted_weights: set[int] = set()
    figures: dict[str, dict[str, float]] = defaultdict(dict)
    for measure in trace.measures:
        figures[measure.subject][measure.metric] = measure.value
    # A node that only makes the matrix of a product is no product of its own.
    product_roles = {node.role for node in trace.nodes if node.weights} - {OTHER_ROLE, SHARED_ROLE}
    for node in trace.nodes:
        is_helper = not node.weights and node.role in product_roles
        if is_helper or (is_selected is not None and not is_selected(node)):
            continue
        row = by_key.setdefault((node.fold, node.role), Row(node.fold, node.role))
        row.add_node(node)
        row.operations += round(figures[node.name].get(OPERATIONS, 0))
        row.bytes_read += round(figures[node.name].get(BYTES, 0))
        row.add_formats(node, [_format(trace, number) for number in node.weights if trace.weights[number].parameters])
        for number in {trace.weights[reference].same_as or reference for reference in node.weights} - counted_weights:
            counted_weights.add(number)
            row.parameters += trace.weights[number].parameters
            row.bytes += trace.weights[number].bytes
    return sorted(
        by_key.values(), key=lambda row: (row.fold is None, row.fold or 0, row.role in (OTHER_ROLE, SHARED_ROLE))
    )


def roles_table(trace: Trace, is_selected: Callable[[Node], bool] | None = None) -> ConsoleTable:
    """Show each role of each fold: how many, how large, in what they are stored and compute, who runs them."""
    sizes, costs = figure_columns("nodes", "parameters", "size"), figure_columns("operations /token", "bytes /token")
    table = ConsoleTable(["layers", "role", *sizes, "stored", "computed", "run by", *costs])
    names, previous = list(islice(letters(), len(trace.folds))), object()
    for row in rows(trace, is_selected):
        fold_label = "" if row.fold == previous else _fold_label(trace, row.fold, names)
        previous = row.fold
        formats = count_text(row.formats) if row.formats else ""
        odd = "".join(f"\n{name} in {ranges(layers)}" for name, layers in sorted(row.odd.items()))
        table.add_row(
            fold_label,
            row.role,
            str(row.nodes),
            f"{row.parameters:,}" if row.parameters else "",
            stored_size(row),
            formats + odd,
            count_text(row.computes) if row.computes else "",
            count_text(row.runners),
            short(row.operations),
            short(row.bytes_read),
        )
    return table


def stored_size(row: Row) -> str:
    """Return the bytes of the weights of a row; ``tied`` where all of them are stored with those of another row."""
    return size_text(row.bytes) if row.bytes else "tied" if row.formats else ""


def coverage_table(trace: Trace, is_selected: Callable[[Node], bool] | None = None) -> ConsoleTable | None:
    """Show how many nodes of each role each pass touched; ``None`` where no pass is known."""
    names = list(dict.fromkeys(stage.name for stage in trace.stages))
    if not names:
        return None
    table = ConsoleTable(["layers", "role", "nodes that each pass touched, of all"])
    folds, previous = list(islice(letters(), len(trace.folds))), object()
    for row in rows(trace, is_selected):
        if row.role in (OTHER_ROLE, SHARED_ROLE) and not row.passes:
            continue
        fold_label = "" if row.fold == previous else _fold_label(trace, row.fold, folds)
        previous = row.fold
        shares = (f"{name} {row.passes[name]}/{row.nodes}" for name in names if row.passes[name])
        table.add_row(fold_label, row.role, ", ".join(shares))
    return table


def left_table(
    trace: Trace, is_selected: Callable[[Node], bool] | None = None, *, is_folded: bool = True
) -> ConsoleTable | None:
    """Show what passes left alone, and why; ``None`` where they left nothing.

    Args:
        trace: of the model.
        is_selected: which nodes to show; all by default.
        is_folded: whether reasons of one kind are one row, with the roles and layers of their nodes.
    """
    if not is_folded:
        return _left_nodes(trace, is_selected)
    table = ConsoleTable(["pass", *figure_columns("nodes"), "role", "layers", "why"])
    reasons: dict[str, list[tuple[Fact, tuple[str, list[int | None]]]]] = defaultdict(list)
    for row in rows(trace, is_selected):
        for (name, reason), layers in row.skips.items():
            reasons[name].append((reason, (row.role, layers)))
    for name, entries in reasons.items():
        for reason_text, nodes in fold_reasons(entries):
            layers = [layer for _, numbers in nodes for layer in numbers]
            roles = ", ".join(dict.fromkeys(role for role, _ in nodes))
            layer_text = ranges(layer for layer in layers if layer is not None)
            table.add_row(name, str(len(layers)), roles, layer_text or "outside", plain(reason_text, 400))
    return table if table.rows else None


def _left_nodes(trace: Trace, is_selected: Callable[[Node], bool] | None) -> ConsoleTable | None:
    table = ConsoleTable(["pass", "node", "why"])
    for node in trace.nodes:
        for skip in node.left if is_selected is None or is_selected(node) else ():
            table.add_row(skip.by, plain(node.name), plain(sentence(skip.why), 240))
    return table if table.rows else None


def heading(trace: Trace) -> Iterator[str]:
    """Say in a few lines what the model is, and how its layers repeat."""
    parameters, size = trace.totals()
    yield f"{plain(trace.model, 200)}: {len(trace.nodes):,} nodes, {parameters:,} parameters in {size_text(size)}"
    names = list(islice(letters(), len(trace.folds)))
    if trace.folds:
        count = sum(len(fold.layers) for fold in trace.folds)
        yield f"{count} layers: {repeats_of(trace.repeats, names)}"
    for fold, name in zip(trace.folds, names, strict=True):
        if fold.exceptions:
            yield f"stored in another way than most of {name}: {ranges(fold.exceptions)}"
    yield f"per token: one sequence, {trace.context:,} tokens in the cache; products, attention and weights are counted"
    yield from (f"note: {note}" for note in trace.notes)


def repeats_of(parts: list[Repeat | int], names: list[str]) -> str:
    """Return how layers repeat: ``((A) x 5, B) x 4``."""
    texts = []
    for part in parts:
        inner = repeats_of(part.parts, names) if isinstance(part, Repeat) else names[part]
        texts.append(inner if isinstance(part, int) else f"({inner}) x {part.count}")
    return ", ".join(texts)


def _fold_label(trace: Trace, fold: int | None, names: list[str]) -> str:
    return "outside" if fold is None else f"{names[fold]}: {ranges(trace.folds[fold].layers)}"


def _format(trace: Trace, number: int) -> str:
    weight = trace.weights[number]
    return weight.format if weight.group is None else f"{weight.format} by {weight.group}"


def short(value: float) -> str:
    """Return a large number with its unit: ``786.4 k``; "" for 0."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f}" if value else ""
