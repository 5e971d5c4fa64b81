"""The parts of a page that stand in it without a script: verdict, passes, layers, size."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

from graphopt.analysis.structure.roles import OTHER_ROLE, SHARED_ROLE
from graphopt.quality.judge import CHECK as QUALITY
from graphopt.report.difference.tables import became, rows_of, where
from graphopt.report.escape import count_text, letters, ranges
from graphopt.report.explanation import rewrite_of
from graphopt.report.page.difference import counted_operators
from graphopt.report.page.drawing import drawing
from graphopt.report.page.html import Html, bar, el, section, table
from graphopt.report.sentences import sentence
from graphopt.report.summary import repeats_of, rows, short, stored_size
from graphopt.report.tables import size_text
from graphopt.report.times import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.artifact.manifest import Manifest
    from graphopt.inference.profiling import Profile
    from graphopt.quality.losses import Losses
    from graphopt.report.trace import Diff, Stage, Trace

_FIRST, _REASONS = 8, 12


def verdict(
    trace: Trace, manifest: Manifest | None, found: Diff | None, lost: Losses | None, taken: Profile | None
) -> Html:
    """Return size, quality, speed and proofs in a few tiles, and what to look at first."""
    parameters, size = trace.totals()
    tiles = [("weights", size_text(size), f"{parameters:,} parameters, {8 * size / max(1, parameters):.2f} bits each")]
    if found is not None and found.bytes[1]:
        tiles.append(
            ("smaller", f"{found.bytes[0] / found.bytes[1]:.1f} x", f"than {size_text(found.bytes[0])} before")
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
    if taken is not None:
        run = taken.token or taken.prompt
        what = "a token" if run.tokens == 1 else f"a prompt of {run.tokens}"
        prompt = f"; a prompt of {taken.prompt.tokens}: {duration(taken.prompt.seconds)}" if taken.token else ""
        tiles.append(("speed", f"{run.tokens / run.seconds:,.0f} tokens/s", f"{duration(run.seconds)} {what}{prompt}"))
    per_token = sum(each.value for each in trace.measures if each.metric == "bytes/token")
    tiles.append(("read per token", size_text(round(per_token)), f"with {trace.context:,} tokens in the cache"))
    boxes = (
        el("div", el("span", name, class_="label"), el("b", value), el("span", more, class_="note"), class_="tile")
        for name, value, more in tiles
    )
    first = list(islice(_first(manifest, lost, trace), _FIRST))
    look = el("div", el("h3", "Look at first"), el("ul", (el("li", each) for each in first))) if first else None
    return section("verdict", "Verdict", el("div", boxes, class_="tiles"), look)


def _first(manifest: Manifest | None, lost: Losses | None, trace: Trace) -> Iterator[str]:
    doubtful: dict[tuple[str, str], list[str]] = {}
    for check in [] if manifest is None else manifest.checks:
        if check.status in ("failed", "not covered"):
            places = doubtful.setdefault((check.status, sentence(check.reason)), [])
            places.append(f"{check.name} after {check.after}")
    yield from (f"{status}: {', '.join(places)}: {reason}" for (status, reason), places in doubtful.items())
    yield from (sentence(each) for each in ([] if lost is None else lost.advice))
    bodies = Counter(node.operator for node in trace.nodes if node.runner == "body")
    if bodies:
        yield f"{count_text(dict(bodies))} run by bodies, not by kernels"
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
        own = [] if found is None else [each for each in rows_of(found) if stage.name in each[1][0].passes]
        edits = table(
            ("", "times", "layers", "role", "became"),
            (
                (
                    edges[0].kind,
                    len(group.edges),
                    where(group),
                    edges[0].role,
                    became(edges[0], len(group.edges) == 1) if len(edges) == 1 else counted_operators(edges),
                )
                for group, edges in own
            ),
            right=(1,),
            long=(4,),
        )
        summary = el(
            "summary",
            el("b", stage.name if stage.run < 2 else f"{stage.name} ({stage.run})"),
            el("span", stage.effect, class_=f"chip {stage.effect}"),
            el("span", _did(stage), class_="note"),
            bar(stage.seconds / longest, f"{stage.seconds:.2f} s"),
        )
        parts = [
            el("pre", ((line, Html("\n")) for line in rewrite.splitlines())) if rewrite else None,
            el("h4", "What it changed"), edits if own else _no_edits(found),
            *([el("h4", "What it left, and why"), el("ul", reasons)] if left else []),
            *([el("h4", "Checks"), el("ul", checks)] if stage.checks else []),
        ]  # fmt: skip
        lines.append(el("details", summary, el("div", parts, class_="inner")))
    return section("passes", "Passes", lines)


def _did(stage: Stage) -> str:
    said = [f"{stage.changed:,} changed"]
    said += [f"{stage.left:,} left alone"] if stage.left else []
    said += [f"{stage.removed:,} node{'' if stage.removed == 1 else 's'} removed"] if stage.removed else []
    return ", ".join(said)


def _no_edits(found: Diff | None) -> Html:
    said = "a report with --before FOLDER shows it" if found is None else "nothing that is still different"
    return el("p", said, class_="note")


def layers(trace: Trace) -> Html:
    """Return how layers repeat, and one layer of each structure as a drawing."""
    names = list(islice(letters(), len(trace.folds)))
    count = sum(len(fold.layers) for fold in trace.folds)
    said = f"{count} layers: {repeats_of(trace.repeats, names)}" if count else "no repeated layers were found"
    parts: list[Html] = [el("p", said, class_="repeats")]
    if count:
        colours = el("label", "colour by ", el("select", id="colour"))
        parts.append(el("div", colours, el("span", id="legend"), class_="controls", id="colours", hidden=""))
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
    found = [row for row in rows(trace) if row.role not in (OTHER_ROLE, SHARED_ROLE) or row.bytes]
    largest = max((row.bytes for row in found), default=0) or 1
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
        for row in found
    )
    head = ("layers", "role", "nodes", "parameters", "size", "stored", "computed", "run by", "operations per token",
            "bytes per token")  # fmt: skip
    return section("size", "Size and work", table(head, lines, right=(2, 3, 8, 9)))
