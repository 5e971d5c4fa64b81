"""Reports as rich tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.passes import PASSES
from graphopt.passes.algebra.rotate import STAYS
from graphopt.quality.judge import CHECK as QUALITY
from graphopt.quality.verdict import verdict_of
from graphopt.report.console_table import ConsoleTable, figure_columns
from graphopt.report.escape import plain
from graphopt.report.sentences import fold_reasons, sentence
from graphopt.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from graphopt.artifact.manifest import Manifest
    from graphopt.graph.diagnostics import Check, PassReport, Skip


def passes_table(manifest: Manifest) -> ConsoleTable:
    """Show each pass with what it changed, what it left alone, and what its check found."""
    table = ConsoleTable(
        ["pass", "effect", *figure_columns("changed", "left alone"), "check", *figure_columns("change", "seconds")]
    )
    comparisons = {task.quantity for task in TASKS.values()}
    for report in manifest.passes:
        checks = {check.name: check for check in manifest.checks_of(report)}
        comparison = next((check for name, check in checks.items() if name in comparisons), None)
        table.add_row(
            report.name if report.run < 2 else f"{report.name} ({report.run})",
            report.effect,
            str(len(report.changes)),
            str(len(report.skips)),
            "\n".join(check.status for check in checks.values()),
            "" if comparison is None else change(comparison),
            f"{report.seconds:.2f}",
        )
    return table


def change(check: Check) -> str:
    """Show how far a pass moved what the model computes, relative to the largest number."""
    value = check.figures.get("largest_change")
    return "" if value is None else f"{value:.1e}"


def checks_table(checks: Sequence[Check]) -> ConsoleTable:
    """Show each check with its status and its evidence."""
    table = ConsoleTable(["check", "after", "status", "evidence"])
    for check in checks:
        figure = change(check)
        reason = sentence(check.reason)
        evidence = f"{reason}; largest change {figure}" if figure else reason
        table.add_row(check.name, check.after, check.status, evidence)
    return table


def skips_table(reports: Sequence[PassReport], *, is_folded: bool = True) -> ConsoleTable | None:
    """Show what was left alone and why; ``None`` where nothing was.

    Args:
        reports: the passes.
        is_folded: whether reasons of one kind are one row, with their number and an example.
    """
    table = ConsoleTable(
        ["pass", *figure_columns("places"), "for example", "why"] if is_folded else ["pass", "place", "why"]
    )
    for report in reports:
        if is_folded:
            for reason, skips in fold_reasons((skip.reason, skip) for skip in report.skips):
                table.add_row(report.name, str(len(skips)), _subject(skips[0]), plain(reason, _REASON))
        else:
            for skip in report.skips:
                table.add_row(report.name, _subject(skip), plain(sentence(skip.reason), _REASON))
    return table if table.rows else None


def findings_table(checks: Sequence[Check]) -> ConsoleTable | None:
    """Show each finding of checks; ``None`` where there is none."""
    table = ConsoleTable(["check", "node", "tensor", "status", "evidence"])
    for check in checks:
        for finding in check.findings:
            names = (plain(finding.node), plain(finding.tensor or ""))
            table.add_row(check.name, *names, finding.status, plain(sentence(finding.reason), _REASON))
    return table if table.rows else None


def _subject(skip: Skip) -> str:
    """Name what was left alone: a node or value, or a basis with its width, and the node that is the reason."""
    width = skip.reason.figures.get("width")
    name = plain(skip.where)
    subject = name if skip.reason.code != STAYS.code else f"basis {name} [{width or '?'}]"
    return subject if skip.node is None or skip.node == skip.where else f"{subject} at {plain(skip.node)}"


_REASON = 400
"""Characters of a reason that are shown; names in it may be long."""


def summary(manifest: Manifest) -> list[str]:
    """Say in a few lines how large the artifact is, in what it is stored, and in what it computes."""
    total = sum(record.bytes for record in manifest.files.values())
    lines = []
    if manifest.weights is not None:
        weights = manifest.weights
        lines.append(
            f"{size_text(total)} on disk: {weights.parameters:,} weights of {weights.bits_per_weight:.2f} bits, "
            f"scales included"
        )
    if manifest.precision is not None:
        storage = ", ".join(f"{count} {name}" for name, count in manifest.precision.storage.items())
        if storage:
            lines.append(f"stored: {storage} tensor(s)")
        notes = "; ".join(map(sentence, manifest.precision.notes))
        lines.append(f"computed: activations {manifest.precision.activations}; {notes}")
    verdicts = [check for check in manifest.checks if check.name == QUALITY]
    lines += [f"quality: {_quality(check)}" for check in verdicts[-1:]]
    return [*lines, *map("note: {}".format, (*_idle(manifest), *map(sentence, manifest.notes)))]


def _idle(manifest: Manifest) -> Iterator[str]:
    """Say which steps of the last recipe changed nothing, and why."""
    steps = (manifest.recipe or {}).get("steps", ())
    for report in manifest.passes[len(manifest.passes) - len(steps) :]:
        step = PASSES.get(report.name)
        if step is not None and step.phase() in _OF_MODELS and report.skips and not report.changes:
            reasons = dict.fromkeys(sentence(skip.reason) for skip in report.skips)
            rest_text = f" ({len(reasons)} reasons in all)" if len(reasons) > 1 else ""
            yield f"the step {report.name} changed nothing: {plain(next(iter(reasons)), _REASON)}{rest_text}"


_OF_MODELS = ("algebra", "codes", "cache")
"""Phases whose steps a recipe names for what they do to a model; steps of the others often find nothing to do."""


def _quality(check: Check) -> str:
    text = sentence(check.reason)
    return text if check.status == "measured" else f"{check.status}: {text}"


def quality_table(rows: Sequence[tuple[str, Mapping[str, float]]]) -> ConsoleTable:
    """Show models with their figures beside their reference: one row for each."""
    columns = {name: words for name, words in _FIGURES.items() if any(name in figures for _, figures in rows)}
    labels = (*(label for label, _ in columns.values()), "verdict")
    table = ConsoleTable(["model", *figure_columns(*labels)])
    for label, figures in rows:
        cells = [form.format(figures[name]) if name in figures else "" for name, (_, form) in columns.items()]
        has_verdict = bool({"tokens", "cosine_mean"} & set(figures))
        table.add_row(label, *cells, verdict_of(figures) if has_verdict else "")
    return table


_FIGURES = {
    "bits_per_byte": ("bits/byte", "{:.4f}"),
    "perplexity": ("perplexity", "{:.3f}"),
    "kl_mean": ("KL", "{:.4f}"),
    "kl_error": ("+-", "{:.4f}"),
    "kl_99": ("KL 99%", "{:.3f}"),
    "kl_largest": ("largest", "{:.2f}"),
    "same_first_choice": ("same", "{:.1%}"),
    "cosine_mean": ("cosine", "{:.5f}"),
    "relative_error": ("error", "{:.2g}"),
    "same_class_share": ("same class", "{:.1%}"),
    "exact_copy": ("copy", "{:.0%}"),
    "exact_lookup": ("lookup", "{:.0%}"),
    "exact_arithmetic": ("sums", "{:.0%}"),
    "exact_json": ("JSON", "{:.0%}"),
}


def size_text(size: int) -> str:
    """Show a size in bytes: as megabytes (10^6) from a tenth of one on, as kilobytes (10^3), or as it is."""
    if abs(size) >= _TENTH or not size:
        return f"{size / 1e6:.2f} MB"
    return f"{size / 1e3:.1f} kB" if abs(size) >= _KILO else f"{size} bytes"


_TENTH, _KILO = 100_000, 1000
