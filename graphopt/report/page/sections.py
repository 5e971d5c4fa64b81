"""The parts of a page that stand in it without a script: verdict, passes, layers, size."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from graphopt.analysis.structure.roles import OTHER_ROLE, SHARED_ROLE
from graphopt.quality.judge import CHECK as QUALITY
from graphopt.report.difference.tables import layer_text, operators_text, rows_of
from graphopt.report.escape import count_text, letters, ranges
from graphopt.report.explanation import rewrite_of
from graphopt.report.page.difference import operator_counts
from graphopt.report.page.drawing import drawing
from graphopt.report.page.html import Html, bar, el, section, table
from graphopt.report.sentences import sentence
from graphopt.report.summary import repeats_of, rows, short, stored_size
from graphopt.report.tables import size_text
from graphopt.report.times import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.artifact.manifest import Manifest
    from graphopt.graph.diagnostics import Check, PassReport
    from graphopt.inference.profiling import Profile
    from graphopt.quality.losses import Losses
    from graphopt.report.trace import Diff, Stage, Trace

_FIRST, _REASONS = 8, 12


def verdict(
    trace: Trace, manifest: Manifest | None, difference: Diff | None, losses: Losses | None, measurement: Profile | None
) -> Html:
    """Return size, quality, speed and proofs in a few tiles, and what to look at first."""
    parameters, size = trace.totals()
    tiles = [("weights", size_text(size), f"{parameters:,} parameters, {8 * size / max(1, parameters):.2f} bits each")]
    if difference is not None and difference.bytes[1]:
        before, after = difference.bytes
        tiles.append(("smaller", f"{before / after:.1f} x", f"than {size_text(before)} before"))
    tiles += _check_tiles([] if manifest is None else manifest.checks)
    tiles += [] if measurement is None else [_speed_tile(measurement)]
    per_token = sum(entry.value for entry in trace.measures if entry.metric == "bytes/token")
    tiles.append(("read per token", size_text(round(per_token)), f"with {trace.context:,} tokens in the cache"))
    boxes = (
        el("div", el("span", name, class_="label"), el("b", value), el("span", note, class_="note"), class_="tile")
        for name, value, note in tiles
    )
    first = list(islice(_first(manifest, losses, trace), _FIRST))
    look = el("div", el("h3", "Look at first"), el("ul", (el("li", entry) for entry in first))) if first else None
    return section("verdict", "Verdict", el("div", boxes, class_="tiles"), look)


def _check_tiles(checks: Sequence[Check]) -> Iterator[tuple[str, str, str]]:
    """Yield the last verdict on quality, and how many checks proved and measured."""
    verdicts = [check for check in checks if check.name == QUALITY]
    for check in verdicts[-1:]:
        word, _, details = sentence(check.reason).partition(":")
        yield "quality", word if details else check.status, details.strip() or word
    if checks:
        counts = Counter(check.status for check in checks)
        text = ", ".join(f"{counts[status]} {status}" for status in ("proved", "measured") if counts[status])
        wrong = counts["failed"] + counts["not covered"]
        yield "checks", text or "none", f"{wrong} failed or not covered" if wrong else "all covered"


def _speed_tile(measurement: Profile) -> tuple[str, str, str]:
    run, prompt = measurement.token or measurement.prompt, measurement.prompt
    name = "a token" if run.tokens == 1 else f"a prompt of {run.tokens}"
    prompt_text = f"; a prompt of {prompt.tokens}: {duration(prompt.seconds)}" if measurement.token else ""
    return "speed", f"{run.tokens / run.seconds:,.0f} tokens/s", f"{duration(run.seconds)} {name}{prompt_text}"


def _first(manifest: Manifest | None, losses: Losses | None, trace: Trace) -> Iterator[str]:
    doubtful: dict[tuple[str, str], list[str]] = {}
    for check in [] if manifest is None else manifest.checks:
        if check.status in ("failed", "not covered"):
            nodes = doubtful.setdefault((check.status, sentence(check.reason)), [])
            nodes.append(f"{check.name} after {check.after}")
    yield from (f"{status}: {', '.join(nodes)}: {reason}" for (status, reason), nodes in doubtful.items())
    yield from (sentence(fact) for fact in ([] if losses is None else losses.advice))
    bodies = Counter(node.operator for node in trace.nodes if node.runner == "body")
    if bodies:
        yield f"{count_text(dict(bodies))} run by bodies, not by kernels"
    yield from trace.notes
    yield from (sentence(note) for note in ([] if manifest is None else manifest.notes))


def passes(trace: Trace, manifest: Manifest | None, difference: Diff | None) -> Html | None:
    """Return the passes with their time, and what each changed and left."""
    if not trace.stages or manifest is None:
        return None
    longest = max(stage.seconds for stage in trace.stages) or 1.0
    lines = []
    for stage, report in zip(trace.stages, manifest.passes, strict=True):
        summary = el(
            "summary",
            el("b", stage.name if stage.run < 2 else f"{stage.name} ({stage.run})"),
            el("span", stage.effect, class_=f"chip {stage.effect}"),
            el("span", _stage_text(stage), class_="note"),
            bar(stage.seconds / longest, f"{stage.seconds:.2f} s"),
        )
        parts = [*_pass_edits(stage, difference), *_pass_reasons(stage, report)]
        lines.append(el("details", summary, el("div", parts, class_="inner")))
    return section("passes", "Passes", lines)


def _pass_edits(stage: Stage, difference: Diff | None) -> Iterator[Html]:
    """Yield the rewrite of a pass, and what it changed that is still different."""
    rewrite = rewrite_of(stage.name)
    if rewrite:
        yield el("pre", ((line, Html("\n")) for line in rewrite.splitlines()))
    yield el("h4", "What it changed")
    groups = [] if difference is None else [row for row in rows_of(difference) if stage.name in row[1][0].passes]
    if not groups:
        yield _no_edits(difference)
        return
    rows = (
        (
            edges[0].kind,
            len(group.edges),
            layer_text(group),
            edges[0].role,
            operators_text(edges[0], len(group.edges) == 1) if len(edges) == 1 else operator_counts(edges),
        )
        for group, edges in groups
    )
    yield table(("", "times", "layers", "role", "became"), rows, right=(1,), long=(4,))


def _pass_reasons(stage: Stage, report: PassReport) -> Iterator[Html]:
    """Yield what a pass left alone, and what was checked after it."""
    reasons = Counter(sentence(skip.reason) for skip in report.skips).most_common(_REASONS)
    if reasons:
        yield el("h4", "What it left, and why")
        yield el("ul", (el("li", f"{count} x: {reason}") for reason, count in reasons))
    if stage.checks:
        yield el("h4", "Checks")
        yield el("ul", (el("li", f"{check.name}: {check.status}: {sentence(check.reason)}") for check in stage.checks))


def _stage_text(stage: Stage) -> str:
    texts = [f"{stage.changed:,} changed"]
    texts += [f"{stage.left:,} left alone"] if stage.left else []
    texts += [f"{stage.removed:,} node{'' if stage.removed == 1 else 's'} removed"] if stage.removed else []
    return ", ".join(texts)


def _no_edits(difference: Diff | None) -> Html:
    text = "a report with --before FOLDER shows it" if difference is None else "nothing that is still different"
    return el("p", text, class_="note")


def layers(trace: Trace) -> Html:
    """Return how layers repeat, and one layer of each structure as a drawing."""
    names = list(islice(letters(), len(trace.folds)))
    count = sum(len(fold.layers) for fold in trace.folds)
    text = f"{count} layers: {repeats_of(trace.repeats, names)}" if count else "no repeated layers were found"
    parts: list[Html] = [el("p", text, class_="repeats")]
    if count:
        colours = el("label", "colour by ", el("select", id="colour"))
        parts.append(el("div", colours, el("span", id="legend"), class_="controls", id="colours", hidden=""))
    for number, (fold, name) in enumerate(zip(trace.folds, names, strict=True)):
        odd = f", of which {ranges(fold.exceptions)} are stored in another way" if fold.exceptions else ""
        summary = el(
            "summary", el("b", f"{name} x {len(fold.layers)}"), el("span", f"layers {ranges(fold.layers)}{odd}")
        )
        layer_drawing = el("div", drawing(trace, number), class_="inner")
        parts.append(el("details", summary, layer_drawing, open="" if number == 0 else None))
    return section("graph", "Layers", parts)


def size(trace: Trace) -> Html:
    """Return bytes, operations and formats by role, layers of one structure together."""
    names = list(islice(letters(), len(trace.folds)))
    shown_rows = [row for row in rows(trace) if row.role not in (OTHER_ROLE, SHARED_ROLE) or row.bytes]
    largest = max((row.bytes for row in shown_rows), default=0) or 1
    lines = (
        (
            "outside" if row.fold is None else f"{names[row.fold]}: {ranges(trace.folds[row.fold].layers)}",
            el("a", row.role, href=f"#q=role:{row.role}"),
            f"{row.nodes:,}",
            f"{row.parameters:,}" if row.parameters else "",
            bar(row.bytes / largest, stored_size(row)),
            count_text(row.formats) if row.formats else "",
            count_text(row.computes) if row.computes else "",
            count_text(row.runners),
            short(row.operations),
            short(row.bytes_read),
        )
        for row in shown_rows
    )
    head = ("layers", "role", "nodes", "parameters", "size", "stored", "computed", "run by", "operations per token",
            "bytes per token")  # fmt: skip
    return section("size", "Size and work", table(head, lines, right=(2, 3, 8, 9)))
