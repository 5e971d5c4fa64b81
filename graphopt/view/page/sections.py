"""The parts of a page that stand in it without a script: verdict, passes, layers, differences, quality, size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice

from graphopt.analysis.roles import OTHER, SHARED
from graphopt.manifest import Manifest
from graphopt.quality.judge import CHECK as QUALITY
from graphopt.quality.losses import Losses
from graphopt.view.differing.tables import became, cause, rows_of, told, where
from graphopt.view.explaining import rewrite_of
from graphopt.view.inspecting import repeats_of, rows, short
from graphopt.view.page.drawing import drawing
from graphopt.view.page.html import Html, bar, el, joined, section, shade, table
from graphopt.view.plain import counted, letters, ranges
from graphopt.view.sentences import sentence
from graphopt.view.tables import megabytes
from graphopt.view.trace import Diff, Edge, Trace

_FIRST, _REASONS = 8, 12


def verdict(trace: Trace, manifest: Manifest | None, found: Diff | None, lost: Losses | None) -> Html:
    """Return size, quality and proofs in a few tiles, and what to look at first."""
    parameters, size = trace.totals()
    tiles = [("weights", megabytes(size), f"{parameters:,} parameters, {8 * size / max(1, parameters):.2f} bits each")]
    if found is not None and found.bytes[1]:
        tiles.append(
            ("smaller", f"{found.bytes[0] / found.bytes[1]:.1f} x", f"than {megabytes(found.bytes[0])} before")
        )
    checks = [] if manifest is None else manifest.checks
    judged = [check for check in checks if check.name == QUALITY]
    for check in judged[-1:]:
        word, _, rest = sentence(check.reason).partition(":")
        tiles.append(("quality", word if rest else check.status, rest.strip() or word))
    if checks:
        counts = Counter(check.status for check in checks)
        said = ", ".join(f"{counts[status]} {status}" for status in ("proved", "measured") if counts[status])
        wrong = counts["failed"] + counts["not covered"]
        tiles.append(("checks", said or "none", f"{wrong} failed or not covered" if wrong else "all covered"))
    per_token = sum(each.value for each in trace.measures if each.metric == "bytes/token")
    tiles.append(("read per token", megabytes(round(per_token)), f"with {trace.context:,} tokens in the cache"))
    boxes = (
        el("div", el("span", name, class_="label"), el("b", value), el("span", more, class_="note"), class_="tile")
        for name, value, more in tiles
    )
    first = list(islice(_first(manifest, lost, trace), _FIRST))
    look = el("div", el("h3", "Look at first"), el("ul", (el("li", each) for each in first))) if first else None
    return section("verdict", "Verdict", el("div", boxes, class_="tiles"), look)


def _first(manifest: Manifest | None, lost: Losses | None, trace: Trace) -> Iterator[str]:
    for check in [] if manifest is None else manifest.checks:
        if check.status in ("failed", "not covered"):
            yield f"{check.name} after {check.after}: {check.status}: {sentence(check.reason)}"
    yield from (sentence(each) for each in ([] if lost is None else lost.advice))
    bodies = Counter(node.operator for node in trace.nodes if node.runner == "body")
    if bodies:
        yield f"{counted(dict(bodies))} run by bodies, not by kernels"
    yield from trace.notes
    yield from (sentence(note) for note in ([] if manifest is None else manifest.notes))


def passes(trace: Trace, manifest: Manifest | None, found: Diff | None) -> Html | None:
    """Return the passes with their time, and what each changed and left."""
    if not trace.stages or manifest is None:
        return None
    longest = max(stage.seconds for stage in trace.stages) or 1.0
    lines = []
    for stage, report in zip(trace.stages, manifest.passes, strict=True):
        left = Counter(sentence(skip.reason) for skip in report.skips)
        reasons = (el("li", f"{count} x: {reason}") for reason, count in left.most_common(_REASONS))
        checks = (el("li", f"{check.name}: {check.status}: {sentence(check.reason)}") for check in stage.checks)
        rewrite = rewrite_of(stage.name)
        own = [] if found is None else [g for g in found.groups if stage.name in found.edges[g.edges[0]].passes]
        edits = table(
            ("", "x", "layers", "role", "became"),
            (
                (e.kind, len(g.edges), where(g), e.role, became(e, len(g.edges) == 1))
                for g in own
                for e in [found.edges[g.edges[0]]]  # type: ignore[union-attr]
            ),
            right=(1,),
        )
        summary = el(
            "summary",
            el("b", stage.name if stage.run < 2 else f"{stage.name} ({stage.run})"),
            el("span", stage.effect, class_=f"chip {stage.effect}"),
            el("span", f"{stage.changed} changed, {stage.left} left, {stage.removed} nodes gone", class_="note"),
            bar(stage.seconds / longest, f"{stage.seconds:.2f} s"),
        )
        parts = [
            el("pre", ((line, Html("\n")) for line in rewrite.splitlines())) if rewrite else None,
            el("h4", "What it changed"), edits if own else el("p", "not told without BEFORE", class_="note"),
            *([el("h4", "What it left, and why"), el("ul", reasons)] if left else []),
            *([el("h4", "Checks"), el("ul", checks)] if stage.checks else []),
        ]  # fmt: skip
        lines.append(el("details", summary, el("div", parts, class_="inner")))
    return section("passes", "Passes", lines)


def layers(trace: Trace) -> Html:
    """Return how layers repeat, and one layer of each structure as a drawing."""
    names = list(islice(letters(), len(trace.folds)))
    said = repeats_of(trace.repeats, names) if trace.folds else "no layers that repeat were found"
    parts: list[Html] = [el("p", said, class_="repeats")]
    for number, (fold, name) in enumerate(zip(trace.folds, names, strict=True)):
        odd = f", of which {ranges(fold.exceptions)} are stored in another way" if fold.exceptions else ""
        summary = el(
            "summary", el("b", f"{name} x {len(fold.layers)}"), el("span", f"layers {ranges(fold.layers)}{odd}")
        )
        drawn = el("div", drawing(trace, number), class_="inner")
        parts.append(el("details", summary, drawn, open="" if number == 0 else None))
    return section("graph", "Layers", parts)


def size(trace: Trace) -> Html:
    """Return bytes, operations and formats by role, layers of one structure together."""
    names = list(islice(letters(), len(trace.folds)))
    found = [row for row in rows(trace) if row.role not in (OTHER, SHARED) or row.bytes]
    largest = max((row.bytes for row in found), default=0) or 1
    lines = (
        (
            "outside" if row.fold is None else f"{names[row.fold]}: {ranges(trace.folds[row.fold].layers)}",
            el("a", row.role, href=f"#q=role:{row.role}"),
            f"{row.nodes:,}",
            f"{row.parameters:,}" if row.parameters else "",
            bar(row.bytes / largest, megabytes(row.bytes) if row.bytes else ""),
            counted(row.formats) if row.formats else "",
            counted(row.computes) if row.computes else "",
            counted(row.runners),
            short(row.operations),
            short(row.read),
        )
        for row in found
    )
    head = ("layers", "role", "nodes", "parameters", "size", "stored", "computed", "run by", "op/token", "bytes/token")
    return section("size", "Size and work", table(head, lines, right=(2, 3, 8, 9)))


def difference(found: Diff | None) -> Html | None:
    """Return what became of the model before, equal edits of many layers as one row."""
    if found is None:
        return None
    kinds = Counter(edge.kind for edge in found.edges)
    said = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    lines = (
        (
            el("span", edges[0].kind, class_=f"chip {edges[0].kind}"),
            len(group.edges),
            where(group),
            edges[0].role,
            became(edges[0], len(group.edges) == 1) if len(edges) == 1 else counted_operators(edges),
            joined(el("div", line) for line in told(edges[0], len(group.edges) == 1)),
            cause(edges[0]),
        )
        for group, edges in rows_of(found)
    )
    head = ("", "x", "layers", "role", "before → after", "what is different", "cause")
    notes = (el("p", note, class_="note") for note in found.notes)
    text = el(
        "p", f"{found.nodes[0]:,} nodes before, {found.nodes[1]:,} after; {found.kept:,} are kept as they were; {said}."
    )
    return section("diff", "What is different", text, table(head, lines, right=(1,)), notes)


def counted_operators(edges: Sequence[Edge]) -> str:
    """Return how many nodes of which operators edges are about."""
    found = Counter(name for edge in edges for name in (*edge.operators[0], *edge.operators[1]))
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in found.most_common())


def quality(lost: Losses | None) -> Html | None:
    """Return errors of products as a heat map of layers and roles, and what comes back in floats."""
    if lost is None or not lost.products:
        return None
    inside = [each for each in lost.products if each.layer is not None]
    roles = list(dict.fromkeys(each.role for each in inside))
    numbers = sorted({each.layer for each in inside if each.layer is not None})
    maps = [
        (title, _heat(lost, roles, numbers, name))
        for title, name in (("Alone: on inputs of the reference", "local"), ("Inside the model", "accumulated"))
    ]
    drawn = el("div", (el("figure", el("figcaption", title), heat) for title, heat in maps), class_="pair")
    parts: list[object] = [
        el("p", f"Errors in percent of what a product makes in floats, {lost.tokens:,} tokens of text."),
        drawn,
    ]
    if lost.kl is not None:
        kl = lost.kl or 1.0
        lines = (
            (
                each.role or ("layers " + ranges(each.layers) if each.layers else f"all {each.what}"),
                bar(each.kl / kl, f"{each.kl:.4f}"),
                f"{(lost.kl - each.kl) / kl:.0%}",
                megabytes(each.bytes),
            )
            for each in lost.restored
        )
        parts += [
            el("h3", f"What comes back in floats, of a divergence of {lost.kl:.4f} nats"),
            table(("in floats", "divergence that stays", "comes back", "costs"), lines, right=(2, 3)),
        ]
    return section("quality", "Where quality was lost", parts)


def _heat(lost: Losses, roles: list[str], numbers: list[int], name: str) -> Html:
    known = {(each.layer, each.role): getattr(each, name) for each in lost.products}
    largest = max((value for (layer, _), value in known.items() if layer is not None), default=0.0)

    def cell(layer: int, role: str) -> Html:
        value = known.get((layer, role))
        if value is None:
            return el("td")
        return el("td", f"{100 * value:.1f}", style=shade(value, largest), title=f"layer {layer}, {role}: {value:.2%}")

    head = el("tr", el("th", "layer"), (el("th", role) for role in roles))
    body = (el("tr", el("th", layer), (cell(layer, role) for role in roles)) for layer in numbers)
    return el("div", el("table", el("thead", head), el("tbody", body), class_="heat"), class_="scroll")
