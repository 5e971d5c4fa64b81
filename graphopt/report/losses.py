"""Where quality was lost, as tables: one row for each kind of product, one for each group of layers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from graphopt.quality.spread import Spread
from graphopt.report.console_table import ConsoleTable, figure_columns
from graphopt.report.escape import plain, ranges
from graphopt.report.sentences import sentence
from graphopt.report.tables import sized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from graphopt.quality.groups import Group
    from graphopt.quality.losses import Losses, ProductLoss

_LINES = 8


def errors_table(found: Losses) -> ConsoleTable:
    """Show the errors of products by role, all layers together."""
    names = ("products", "alone", "worst", "in layer", "inside: first layer", "last layer", "first token")
    table = ConsoleTable(["role", *figure_columns(*names)])
    for role in dict.fromkeys(each.role for each in found.products):
        those = [each for each in found.products if each.role == role]
        worst = max(those, key=lambda one: one.local)
        usual = float(np.median([each.local for each in those]))
        inside = (those[0].accumulated, those[-1].accumulated, those[-1].first_token)
        cells = [str(len(those)), f"{usual:.1%}", f"{worst.local:.1%}", _layer(worst), *map(percent, inside)]
        table.add_row(role, *cells)
    return table


def spread_table(found: Losses) -> ConsoleTable | None:
    """Show outliers of what products read, before and after the rotations; ``None`` where they were not measured."""
    names = ("kurtosis before", "kurtosis after", "largest before", "largest after")
    table = ConsoleTable(["role", *figure_columns(*names)])
    for role in dict.fromkeys(each.role for each in found.products):
        those = [each for each in found.products if each.role == role and each.read is not None]
        sides = [_usual([each.read_before for each in those]), _usual([each.read for each in those])]
        if any(sides):
            cells = [[f"{each.kurtosis:.1f}", f"{each.largest:.1f}"] if each else ["", ""] for each in sides]
            table.add_row(role, *(cells[side][figure] for figure in (0, 1) for side in (0, 1)))
    return table if table.rows else None


def groups_table(found: Losses) -> ConsoleTable | None:
    """Show what groups of products do to the divergence; ``None`` where that was not measured."""
    if found.kl is None:
        return None
    names = ("KL: only this", "all but this", "comes back", "costs")
    table = ConsoleTable(["quantized", *figure_columns(*names)])
    table.add_row("everything", f"{found.kl:.4f}", "", "", "")
    for each in found.groups:
        back = round((found.kl - each.kl) / found.kl, 2) + 0.0 if found.kl else 0.0  # never "-0%"
        alone = "" if each.only is None else f"{each.only:.4f}"
        table.add_row(named(each), alone, f"{each.kl:.4f}", f"{back:.0%}", sized(each.bytes))
    return table


def named(group: Group) -> str:
    """Return what a group of products is called."""
    if group.what == "both":
        return f"{group.role} of layer {ranges(group.layers)}"
    if group.what == "layers":
        return f"{'layers' if len(group.layers) > 1 else 'layer'} {ranges(group.layers)}"
    return group.role or {"inputs": "inputs of products", "products": "all products"}[group.what]


def percent(value: float | None) -> str:
    """Return a share in percent; "" where it is not known."""
    return "" if value is None else f"{value:.1%}"


def told(found: Losses) -> Iterator[str]:
    """Say what the columns are, and what the figures support."""
    yield (
        f"errors are relative to what a product makes in floats, on {found.tokens:,} tokens: alone, with inputs of the "
        "float model; inside the model, in the first layer and in the last; first token: that of each text, inside"
    )
    if any(each.read is not None for each in found.products):
        yield "kurtosis and largest (over the root mean square) are of inputs: of the model before, and after rotations"
    if found.remainder is not None:
        yield remainder(found)
    yield from (f"advice: {plain(sentence(each), 300)}" for each in found.advice)
    if found.remedy is not None and found.recipe is not None:
        yield "the most for its bytes, as lines for the recipe (`--recipe FILE` writes all of it):"
        yield from (f"  {line}" for line in recipe_lines(found.remedy))
    if found.unmatched:
        yield f"not measured, no counterpart in the float model: {', '.join(map(plain, found.unmatched[:8]))}"


def remainder(found: Losses) -> str:
    """Say what of the divergence no kind of product explains."""
    assert found.remainder is not None
    kinds, rest, together = (found.remainder.kinds, found.remainder.rest, found.remainder.together)
    how = "strengthen" if together > 0 else "cancel"
    return (
        f"one by one, the kinds of products cause {kinds:.4f} nats, and what is not a product {rest:.4f}; the other "
        f"{together:+.4f} of {found.kl or 0:.4f} do not add up: errors of several kinds {how} each other"
    )


def recipe_lines(remedy: Group, limit: int = _LINES) -> list[str]:
    """Return the lines of a recipe that leave a group of products in floats; at most ``limit`` of them are matrices."""
    names = remedy.matrices
    lines = ["- step: quantize_weights", "  matrices:"]
    lines += [f"    {json.dumps(plain(name, 300))}: null" for name in names[:limit]]
    return [*lines, f"    # and {len(names) - limit} more"] if len(names) > limit else lines


def _layer(product: ProductLoss) -> str:
    return "" if product.layer is None else str(product.layer)


def _usual(spreads: Sequence[Spread | None]) -> Spread | None:
    known = [each for each in spreads if each is not None]
    if not known:
        return None
    medians = {name: float(np.median([getattr(each, name) for each in known])) for name in ("kurtosis", "largest")}
    return Spread(**medians)
