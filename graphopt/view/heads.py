"""A calibration of heads as rich tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from graphopt.analysis.heads import Calibration


def heads_table(found: Calibration) -> Table:
    """Show each KV head: its echo and induction scores, the largest of its query heads, and what policies keep."""
    table = Table("layer", "KV head", "induction", "echo", *(f"kept by {name}" for name in found.policies))
    for layer in found.layers:
        for number, head in enumerate(layer.heads):
            kept = (f"{_mean(head.kept[name]):.3f}" for name in found.policies)
            table.add_row(
                str(layer.number),
                str(number),
                f"{max(head.induction):.3f}",
                f"{max(head.echo):.3f}",
                *kept,
            )
    return table


def policies_table(found: Calibration) -> Table:
    """Show each policy: what it reads of the tokens, and what it keeps of attention."""
    table = Table("policy", "says", "tokens read", "attention kept")
    for name, policy in found.policies.items():
        says = ", ".join(f"{key} {value}" for key, value in policy.attributes.items() if key != "policy")
        table.add_row(name, says, f"{policy.read:.1%}", f"{policy.kept:.1%}")
    return table


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
