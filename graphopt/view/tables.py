"""Reports as rich tables."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from rich.table import Column, Table

from graphopt.facts import Check, PassReport
from graphopt.manifest import Manifest


def passes_table(manifest: Manifest) -> Table:
    """Show each pass with what it changed, what it left alone, and what its check found."""
    names = Column("pass", no_wrap=True)
    table = Table(names, "effect", "changed", "left alone", Column("check", no_wrap=True), "logit change", "seconds")
    # One for each pass, in the same order; a pass may have run twice.
    checks = [check for check in manifest.checks if check.name == "logits"]
    proofs = iter(check for check in manifest.checks if check.name == "certificate")
    for report, check in itertools.zip_longest(manifest.passes, checks):
        table.add_row(
            report.name,
            report.effect,
            str(len(report.changes)),
            str(len(report.skips)),
            "\n".join(
                each.status for each in (next(proofs, None) if report.claims else None, check) if each is not None
            ),
            "" if check is None else change(check),
            f"{report.seconds:.2f}",
        )
    return table


def change(check: Check) -> str:
    """Show how far a pass moved the logits, relative to the largest."""
    value = check.figures.get("largest_change")
    return "" if value is None else f"{value:.1e}"


def checks_table(checks: Sequence[Check]) -> Table:
    """Show each check with its status and its evidence."""
    table = Table("check", "after", "status", "evidence")
    for check in checks:
        figure = change(check)
        evidence = f"{check.reason}; largest change {figure}" if figure else check.reason
        table.add_row(check.name, check.after, check.status, evidence)
    return table


def skips_table(reports: Sequence[PassReport]) -> Table | None:
    """Show what was left alone and why, equal reasons of one pass together; ``None`` where nothing was."""
    table = Table("pass", "left alone", "why")
    for report in reports:
        reasons = Counter(skip.reason for skip in report.skips)
        for reason, count in reasons.items():
            first = next(skip.where for skip in report.skips if skip.reason == reason)
            table.add_row(report.name, first if count == 1 else f"{first} and {count - 1} more", reason)
    return table if table.row_count else None


def summary(manifest: Manifest) -> list[str]:
    """Say in a few lines how large the artifact is, in what it is stored, and in what it computes."""
    total = sum(record.bytes for record in manifest.files.values())
    lines = []
    if manifest.weights is not None:
        weights = manifest.weights
        lines.append(
            f"{megabytes(total)} on disk: {weights.parameters:,} weights of {weights.bits_per_weight:.2f} bits, "
            f"scales included"
        )
    if manifest.precision is not None:
        stored = ", ".join(f"{count} {name}" for name, count in manifest.precision.storage.items())
        lines.append(f"stored: {stored} tensor(s)")
        lines.append(f"computed: activations {manifest.precision.activations}; {manifest.precision.note}")
    return lines + [f"note: {note}" for note in manifest.notes]


def megabytes(size: int) -> str:
    """Show a size in bytes as megabytes (10^6)."""
    return f"{size / 1e6:.2f} MB"
