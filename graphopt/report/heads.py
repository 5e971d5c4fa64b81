"""A calibration of heads as rich tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.report.console_table import ConsoleTable, figure_columns
from graphopt.report.escape import ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from graphopt.analysis.structure.heads import Calibration, HeadFigures

NOTABLE = 0.1
"""Share of attention from which on an echo or induction score has a row of its own."""


def heads_table(calibration: Calibration) -> ConsoleTable:
    """Show KV heads: their echo and induction scores, the largest of their query heads, and what policies keep.

    A head with a score of :data:`NOTABLE` or more has a row. The others of a layer are one row, and so are layers one
    behind the other that have no such head: with the largest scores among them, and the mean of what policies keep.
    """
    policies = list(calibration.policies)
    table = ConsoleTable(
        ["layers", "KV heads", *figure_columns("induction", "echo", *(f"kept by {name}" for name in policies))]
    )
    layers: list[int] = []
    other_heads: list[HeadFigures] = []

    def close() -> None:
        if other_heads:
            table.add_row(ranges(layers), f"{len(other_heads)} others", *_cells(other_heads, policies))
        layers.clear()
        other_heads.clear()

    for layer in calibration.layers:
        notable = [number for number, head in enumerate(layer.heads) if max(*head.induction, *head.echo) >= NOTABLE]
        if notable:
            close()
        for number in notable:
            table.add_row(str(layer.number), str(number), *_cells([layer.heads[number]], policies))
        layers.append(layer.number)
        other_heads += [head for number, head in enumerate(layer.heads) if number not in notable]
        if notable:
            close()
    close()
    return table


def _cells(heads: Sequence[HeadFigures], policies: Iterable[str]) -> list[str]:
    scores = [max(max(head.induction) for head in heads), max(max(head.echo) for head in heads)]
    shares = [_mean(share for head in heads for share in head.kept[name]) for name in policies]
    return [f"{figure:.3f}" for figure in (*scores, *shares)]


def policies_table(calibration: Calibration) -> ConsoleTable:
    """Show each policy: what it reads of the tokens, and what it keeps of attention."""
    table = ConsoleTable(["policy", "options", *figure_columns("tokens read", "attention kept")])
    for name, policy in calibration.policies.items():
        says = ", ".join(f"{key} {value}" for key, value in policy.attributes.items() if key != "policy")
        table.add_row(name, says, f"{policy.read:.1%}", f"{policy.kept:.1%}")
    return table


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
