"""How an artifact shows itself in a notebook: what it is, what was done to it, what was checked."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphopt.artifact.artifact import Artifact


def html_of(artifact: Artifact) -> str:
    """Return a few tables about an artifact, in HTML; the whole page is what `graphopt report` writes."""
    # Imported here: they know every part of graphopt, and `import graphopt` is to be quick.
    from graphopt.report.page.html import el, table
    from graphopt.report.sentences import sentence

    manifest, weights = artifact.manifest, artifact.manifest.weights
    facts = [
        ("place", str(artifact.path or "in memory")),
        ("recipe", str((manifest.recipe or {}).get("name", "none"))),
    ]
    if weights is not None:
        size = f"{weights.parameters:,}, {weights.bytes / 1e6:.1f} MB, {weights.bits_per_weight:.2f} bits each"
        facts.append(("weights", size))
    passes = [
        (report.name, report.effect, len(report.changes), len(report.skips), f"{report.seconds:.1f} s")
        for report in manifest.passes
    ]
    checks = [(check.after, f"{check.name}: {check.status}: {sentence(check.reason)}") for check in manifest.checks]
    return "".join(
        [
            table(("", "artifact"), facts),
            table(("pass", "effect", "changed", "left", "took"), passes, right=(2, 3, 4)) if passes else "",
            table(("behind", "checked"), checks) if checks else "",
            el("p", "graphopt report MODEL, or graphopt view MODEL, shows the whole of it"),
        ]
    )


def register() -> None:
    """Tell a running IPython how to show artifacts. Where none runs, do nothing."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if shell is not None:
        shell.display_formatter.formatters["text/html"].for_type_by_name(
            "graphopt.artifact.artifact", "Artifact", html_of
        )
